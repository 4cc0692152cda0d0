"""Empty batches: each is one step, however often the module was called on it.

A batch with examples counts by its backward pass, however many calls of the module lead there. An empty one has to
count in the same way: if a step divided by a number of calls, its noise would be smaller where the batch was empty, and
show that it was. A loop may leave the backward pass of an empty batch out, because a mean over nothing is no number;
then its calls count as one batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any


def number_batches(recorder: Any, newest: Callable[[], int]) -> None:
    """Let ``newest()`` tell which batch of its loader a recorder is called on; not a copy of the recorder."""
    recorder._empty.newest = newest


def newest_batch(recorder: Any) -> int | None:
    """Return the number of the newest batch of a recorder's loader; None where it is not known."""
    newest: Callable[[], int] | None = recorder._empty.newest
    return None if newest is None else newest()


@dataclass(eq=False)
class _Call:
    """A call of the module on an empty batch, the loader's number ``batch`` (None: not known)."""

    batch: Any
    counted: bool = False
    """Whether a backward pass went through it."""


class EmptyBatches:
    """The module's calls on empty batches since the last step."""

    newest: Callable[[], int] | None = None  # the number of the loader's newest batch, which a copy does not know

    def __init__(self) -> None:
        self._calls: list[_Call] = []
        self._used: set[Any] = set()
        """Numbers of the batches of the last step."""
        self._task = -1
        """The newest backward pass through such a call."""

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "newest"}

    def note(self, batch: Any) -> _Call:
        """Note a call on batch number ``batch``."""
        call = _Call(batch)
        self._calls.append(call)
        return call

    def is_new(self, call: _Call, task: int) -> bool:
        """Note that the backward pass ``task`` goes through ``call``; return whether it is one more batch."""
        new = not call.counted and task != self._task
        if not call.counted:
            call.counted, self._task = True, task
        return new

    def without_backward(self, found: bool) -> int:
        """Return the number of batches through whose calls no backward pass went.

        A call for the log alone is none: its batch has a backward pass beside it, or was used by the last step.

        Args:
            found: Whether the step has other batches. If not, a call without a number is one.
        """
        waiting = _numbers(call for call in self._calls if not call.counted)
        known = _numbers(call for call in self._calls if call.counted) | self._used
        count = len(waiting - known - {None})
        return count if found or not waiting else max(1, count)

    def take(self) -> None:
        """Begin the next step."""
        self._used = _numbers(self._calls)
        self._calls = []

    def drop(self) -> None:
        """Forget calls as ``zero_grad()`` forgets gradients: not those whose backward pass may be to come."""
        newest = self._calls[-1].batch if self._calls else None
        self._calls = [call for call in self._calls if not call.counted and call.batch in (None, newest)]

    def clear(self) -> None:
        """Forget all calls."""
        self._calls = []


def _numbers(calls: Iterable[_Call]) -> set[Any]:
    return {call.batch for call in calls}
