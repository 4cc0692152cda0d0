"""A container engine behind ``ssh://``: its API as a socket of this machine.

The Docker SDK's own way to such a host needs a further library, and its connections cannot be closed in one direction.
This one does what Docker's command line does: every connection is an ``ssh`` of its own that runs ``docker system
dial-stdio`` there, with the accepted socket as its standard input and output, so that no byte passes through Python.
All share one connection of ssh (its ControlMaster), because the SDK opens a new one for every address it asks.
"""

from __future__ import annotations

import atexit
import shutil
import socket
import subprocess
import tempfile
import threading
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

from harness.errors import BadInput

SCHEME = "ssh://"
OPTIONS = (
    # A question in the middle of a measurement would wait for ever.
    *("-o", "BatchMode=yes"),
    # A network that went away is noticed within a minute, not at the cell's time-out.
    *("-o", "ServerAliveInterval=15", "-o", "ServerAliveCountMax=3", "-o", "ConnectTimeout=20"),
)
REMOTE_COMMAND = "docker system dial-stdio"
CONNECTIONS = 5
"""That the SDK keeps open for later; sshd serves ten at once over one shared connection."""
LINGER_SECONDS = 30
"""The shared connection outlives a killed harness by so much."""
GOODBYE_SECONDS = 5
COMPLAINT = 2000
"""Characters kept of what ssh said last."""


def command(host: str) -> list[str]:
    """Return the command that reaches the engine of ``ssh://[user@]host[:port]``. Raises :class:`BadInput` for another
    form."""
    try:
        url = urlsplit(host)
        name, port = url.hostname, url.port
    except ValueError:
        name, port = None, None
    if not name or name.startswith("-") or url.path.strip("/") or url.password:
        raise BadInput(
            "DOCKER_HOST begins with ssh:// and is no ssh://[user@]host[:port]; write it so, and what else ssh has to "
            "know (keys, jumps) into ~/.ssh/config."
        )
    where = [*(("-l", url.username) if url.username else ()), *(("-p", str(port)) if port else ())]
    return ["ssh", *OPTIONS, *where, "--", name, REMOTE_COMMAND]


def ssh_command(host: str) -> str:
    """Return the command that a user would type to get there."""
    return " ".join(word for word in command(host)[:-1] if word not in {*OPTIONS, "--"})


class SshConnection:
    """Listens until this process ends. ``socket``: where; only this user may open it."""

    def __init__(self, host: str) -> None:
        words = command(host)
        if shutil.which("ssh") is None:
            raise BadInput(f"DOCKER_HOST is {host!r}, and there is no ssh on this machine; install an OpenSSH client.")
        self._folder = Path(tempfile.mkdtemp(prefix="dpbench-ssh-"))
        atexit.register(self.close)
        self.socket = self._folder / "engine.sock"
        shared = ["-o", f"ControlPath={self._folder}/s", "-o", "ControlMaster=auto"]
        shared += ["-o", f"ControlPersist={LINGER_SECONDS}"]
        self._command = [words[0], *shared, *words[1:]]
        self._goodbye = [words[0], *shared[:2], "-O", "exit", *words[1:-1]]
        self._log = (self._folder / "log").open("w+b")
        self._processes: list[subprocess.Popen[bytes]] = []
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(self.socket))
        self._listener.listen(16)
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                # A session of its own: Ctrl-C is for the harness, which still has to remove its containers.
                with connection, suppress(OSError):
                    end = connection.fileno()
                    process = subprocess.Popen(
                        self._command, stdin=end, stdout=end, stderr=self._log, start_new_session=True
                    )
                    self._processes = [one for one in self._processes if one.poll() is None] + [process]

    def complaint(self) -> str:
        """Return what ssh said last, on one line; empty where it said nothing."""
        with suppress(OSError, ValueError):
            text = (self._folder / "log").read_bytes()[-COMPLAINT:].decode(errors="replace")
            return " ".join(text.split())
        return ""

    def close(self) -> None:
        atexit.unregister(self.close)
        self._listener.close()
        for process in self._processes:
            if process.poll() is None:
                process.terminate()
        with suppress(OSError, subprocess.TimeoutExpired):
            subprocess.run(self._goodbye, stdin=subprocess.DEVNULL, capture_output=True, timeout=GOODBYE_SECONDS)
        self._log.close()
        shutil.rmtree(self._folder, ignore_errors=True)
