"""Read what a container says, line by line, while it runs."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from harness.environments.containers.engine import Engine
from harness.environments.executor import (
    LOG_TAIL,
    LONGEST_LINE,
    Inbox,
)


class Stream:
    """The container's three streams over one connection, attached before it starts so that nothing is lost. A thread
    reads, so that the watchdog never blocks on a silent worker."""

    def __init__(self, on: Engine, container: Any) -> None:
        parameters = {"stdin": 1, "stdout": 1, "stderr": 1, "stream": 1}
        self._socket = on.client.api.attach_socket(container.id, params=parameters)
        self.inbox = Inbox()
        self.tail = b""
        self.is_lost = False
        threading.Thread(target=self._read, daemon=True).start()

    def send(self, order: Mapping[str, Any]) -> None:
        payload = json.dumps(order).encode() + b"\n"
        raw = getattr(self._socket, "_sock", self._socket)
        raw.sendall(payload)

    def _read(self) -> None:
        from docker.utils.socket import STDOUT, frames_iter

        rest = bytearray()
        try:
            for stream, data in frames_iter(self._socket, tty=False):
                if stream != STDOUT:
                    self.tail = (self.tail + data)[-LOG_TAIL:]
                    continue
                first, *others = data.split(b"\n")
                rest += first
                for part in others:
                    self.inbox.put(bytes(rest))
                    rest = bytearray(part)
                self.inbox.is_endless = len(rest) > LONGEST_LINE
                if self.inbox.is_endless or self.inbox.is_closed:
                    break
        except (OSError, ValueError):
            self.is_lost = not self.inbox.is_closed
        self.inbox.put(None)

    def close(self) -> None:
        """End the container's standard input, too."""
        self.inbox.close()
        with suppress(OSError, AttributeError):
            getattr(self._socket, "_sock", self._socket).shutdown(socket.SHUT_RDWR)
        with suppress(OSError):
            self._socket.close()
