"""The first process of a container: takes its order from standard input, runs the worker, hands the results back.

Standard library and numpy only, as the worker. The order is one line of JSON; the input stays open after it, and its
end means that the harness is gone: then this process ends too, for a container whose owner was killed would disturb
whatever is measured next. Standard output carries events, a JSON line each, files of the results folder among them;
whatever a framework prints goes to standard error.
"""

from __future__ import annotations

import base64
import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, TextIO

from harness.worker.line import Remote
from harness.worker.result import Result

RESULTS = Path("/dpbench/results")
CHUNK_BYTES = 2**20
ORPHANED = 88
"""Exit code of a container whose harness went away."""


def main() -> None:
    events = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    order = json.loads(sys.stdin.readline())

    states: list[str] = []

    def emit(event: dict[str, Any]) -> None:
        if event["event"] == "result":
            states.append(event["state"])
        print(json.dumps(event), file=events, flush=True)

    emit({"event": "started"})
    # Whoever listens ends this process when the harness is gone.
    line = Remote(emit, _read_or_end)
    if order["kind"] == "tool":
        _tool(order, emit)
    else:
        _measure(order, emit, line)
    # A measurement that failed has no weights worth sending, and may have filled the folder.
    if states == ["ok"]:
        _send_results(events)


def _measure(order: dict[str, Any], emit: Any, line: Remote) -> None:
    from harness.worker.layer_request import LayerRequest
    from harness.worker.process import pin
    from harness.worker.request import Request

    kind = LayerRequest if order["worker"] == "harness.worker.layers" else Request
    request = kind.from_json(order["request"])
    if request.device == "cuda" and not list(Path("/dev").glob("nvidia[0-9]*")):
        reason = "no GPU is in the container, though it was asked for: the engine's GPU runtime gave none."
        emit(Result("crashed", reason).as_event())
        return
    pin(request.threads)
    importlib.import_module(order["worker"]).run(request, emit, line)


def _tool(order: dict[str, Any], emit: Any) -> None:
    command = [sys.executable, "-m", order["module"], *order["arguments"]]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        reason = f"{order['module']} ended with {done.returncode}."
        emit({"event": "result", "state": "crashed", "reason": reason})
    else:
        emit({"event": "result", "state": "ok", "output": done.stdout})


def _read_or_end() -> str:
    line = sys.stdin.readline()
    if not line:
        os._exit(ORPHANED)
    return line


def _send_results(events: TextIO) -> None:
    """Send the results by the same stream, because what lies in memory (a limited file system) is gone when the
    container has ended."""
    for path in sorted(RESULTS.glob("*")):
        if path.is_symlink() or not path.is_file():
            continue
        with path.open("rb") as file:
            while chunk := file.read(CHUNK_BYTES):
                event = {"event": "file", "name": path.name, "data": base64.b64encode(chunk).decode()}
                print(json.dumps(event), file=events, flush=True)
    print(json.dumps({"event": "done"}), file=events, flush=True)


if __name__ == "__main__":
    main()
