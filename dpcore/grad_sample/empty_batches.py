"""Empty batches: each is one step, however often the module was called on it.

A batch with examples counts by its backward pass, however many calls of the module lead there. An empty one has to
count in the same way: if a step divided by a number of calls, its noise would be smaller where the batch was empty, and
show that it was. A loop may leave the backward pass of an empty batch out, because a mean over nothing is no number;
then its calls count as one batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from dpcore.example_isolation.rows import ways_of_rows
from dpcore.rerun.snapshot import preserved
from dpcore.tree import flatten, unflatten

VIEWS = (Tensor.view, Tensor.reshape, torch.reshape)
MADE_UP = 7
"""Examples in the place of none; hardly another dimension has this length."""
EMPTY_BATCH = (
    "The batch was empty, as those of Poisson sampling may be, and the module failed on it. Let forward() return an "
    "empty output where len(x) == 0, for instance torch.zeros(0, classes), so that loss.backward() and "
    "optimizer.step() make this batch a step, too."
)


def number_batches(recorder: Any, newest: Callable[[], int]) -> None:
    """Let ``newest()`` tell which batch of its loader a recorder is called on; not a copy of the recorder."""
    recorder._waiting.empty.newest = newest


def newest_batch(recorder: Any) -> int | None:
    """Return the number of the newest batch of a recorder's loader; None where it is not known."""
    newest: Callable[[], int] | None = recorder._waiting.empty.newest
    return None if newest is None else newest()


@torch.no_grad()
def outputs_of_none(module: nn.Module, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Return what a call of ``module`` on an empty batch returns: if it fails, as some layers do, made-up examples'."""
    try:
        return call(*args, **kwargs)
    except Exception as error:
        error.add_note(EMPTY_BATCH)
        leaves, structure = flatten((args, kwargs))
        for i, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor) and leaf.dim() and not len(leaf):
                leaves[i] = leaf.new_ones(MADE_UP, *leaf.shape[1:])
        args, kwargs = unflatten(structure, leaves)
        try:
            with preserved(module):
                found, structure = flatten(call(*args, **kwargs))
        except Exception:
            raise error from None
        for i, leaf in enumerate(found):
            ways = ways_of_rows(leaf.shape, MADE_UP) if isinstance(leaf, Tensor) else ()
            found[i] = leaf.narrow(ways[0][0], 0, 0) if ways else leaf
        return unflatten(structure, found)


@dataclass(eq=False)
class _Call:
    """A call of the module on an empty batch, the loader's number ``batch`` (None: not known)."""

    batch: Any
    counted: bool = False
    """Whether a backward pass went through it."""


class ViewsOfNone(TorchFunctionMode):
    """Gives -1 in a view of nothing the length that it has for one example, where torch finds it ambiguous.

    Models split their heads by ``view(*shape[:-1], -1, width)``. For passes that all ranks have to make together, of
    which none can be tried and made again with other examples.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in VIEWS and len(args) > 1 and not args[0].numel() and all(isinstance(n, int) for n in _sizes(args)):
            sizes = _sizes(args)
            if -1 in sizes and 0 in sizes:
                known = prod(max(n, 1) for n in sizes if n != -1)
                length = prod(max(n, 1) for n in args[0].shape) // known
                args = (args[0], [length if n == -1 else n for n in sizes])
        return func(*args, **(kwargs or {}))


def _sizes(args: Any) -> tuple[Any, ...]:
    """Return the sizes that ``view`` was given, one by one or together."""
    return tuple(args[1]) if len(args) == 2 and isinstance(args[1], tuple | list) else args[1:]


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
