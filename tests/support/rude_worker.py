"""A worker that treats its harness rudely, as the request's variant says. Standard library only, so that it starts at
once."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

RESULT = json.dumps({"event": "result", "state": "ok", "memory": {}, "interrupted": True}).encode() + b"\n"


def daemon(note: str) -> None:
    """A grandchild in a session of its own, whose parent is gone, and which keeps this process's output open."""
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            Path(note).write_text(str(os.getpid()))
            time.sleep(600)
        os._exit(0)
    os.wait()
    while not Path(note).exists() or not Path(note).read_text():
        time.sleep(0.01)


def main() -> None:
    request = json.loads(Path(sys.argv[1]).read_text())
    how = request["variant"]
    if how == "daemon":
        daemon(request["task"])
        os.write(1, RESULT)
    elif how == "finished":
        os.write(1, RESULT)
    elif how == "endless":
        while True:
            os.write(1, b"x" * 2**16)
    elif how == "no text":
        os.write(1, b"\xff\xfe\n" + RESULT)
    elif how == "silent":
        os.close(1)
        time.sleep(600)
    elif how == "chatter":
        while True:
            os.write(1, b'{"event": "phase", "phase": "x"}\n')
    else:
        os.kill(os.getpid(), getattr(signal, how))


if __name__ == "__main__":
    main()
