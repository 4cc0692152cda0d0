"""The worker's end of the line to the referee, who knows what the worker may not know too early. Standard library only.

A question is an event like any other, and the referee answers it with one line of JSON. Without being asked it says
only ``stop``, at a moment that nobody here can know.
"""

from __future__ import annotations

import json
import queue
import threading
from collections.abc import Callable
from typing import Any, Protocol

Message = dict[str, Any]


class Line(Protocol):
    """``is_stopped`` says whether the referee has asked for a halt since the last ``go``."""

    def ask(self, what: str, **more: Any) -> Message: ...

    def tell(self, what: str) -> None: ...

    def is_stopped(self) -> bool: ...


class Remote:
    """To a referee in another process, by what it writes to ``read``: a line each time, empty at the end."""

    def __init__(self, emit: Callable[[Message], None], read: Callable[[], str]) -> None:
        self._emit = emit
        self._answers: queue.Queue[Message | None] = queue.Queue()
        self._stopped = threading.Event()
        self.is_stopped = self._stopped.is_set
        threading.Thread(target=self._listen, args=(read,), daemon=True).start()

    def _listen(self, read: Callable[[], str]) -> None:
        while line := read():
            message = json.loads(line)
            if "stop" in message:
                self._stopped.set()
            else:
                self._answers.put(message)
        self._answers.put(None)

    def ask(self, what: str, **more: Any) -> Message:
        """The referee's answer. Raises ConnectionError where there is nobody."""
        self._stopped.clear()
        self._emit({"event": "ask", "what": what, **more})
        answer = self._answers.get()
        if answer is None:
            raise ConnectionError(f"nobody answers the question for {what}.")
        return answer

    def tell(self, what: str) -> None:
        self._emit({"event": "tell", "what": what})
