"""torch.utils.checkpoint while a tape is open.

A checkpointed function runs with its activations dropped, and once more in the backward pass, as torch has it. What
rules need of it (the inputs of recorded uses) is dropped with them and comes back with the second run, which is
recorded on a tape of its own that nobody reads: every use is recorded once, in the first run. What a use keeps when
its output's gradient arrives is told in :mod:`dpcore.tape.dropped_use`.
"""

from __future__ import annotations

import functools
import inspect
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
import torch.utils.checkpoint
from torch import Tensor
from torch.utils._pytree import tree_flatten

from dpcore.errors import UnsupportedError

GENERATOR = "_checkpoint_without_reentrant_generator"
"""The function that checkpoint() looks up where it is not reentrant; torch 2.14 has put another one behind it."""
if hasattr(torch.utils.checkpoint, f"{GENERATOR}_impl"):
    GENERATOR += "_impl"


_signature = functools.cache(inspect.signature)


def _given(generator: Any, function: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Return the function's own arguments among the generator's; from torch 2.14 on as one tuple and one dict."""
    given = _signature(generator).bind(function, *args, **kwargs).arguments
    return given.get("args", ()), given.get("kwargs", {})


class Recording(Protocol):
    """The part of a tape that this module needs."""

    drops_activations: bool
    dropped: list[tuple[Tensor, int]] | None
    lookups: Any
    rows: Any

    def again(self) -> Any:
        """Return a tape for the second run of a function."""
        ...


class _Checkpointing:
    """torch.utils.checkpoint, changed on threads with an open tape.

    checkpoint() looks two names up when called, on whatever thread: they are replaced from the first tape that is
    opened to the last that is closed, and on other threads what takes their places hands on to them.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open = 0
        self._here = threading.local()
        self._reentrant: Any = None
        self._generator: Any = None

    def open(self, tape: Recording | None) -> None:
        """Note that ``tape`` records on this thread; None: a pass that nothing records, but in which no checkpoint is
        reentrant, because it is asked for its gradients by torch.autograd.grad.
        """
        module: Any = torch.utils.checkpoint
        self._tapes.append(tape)
        with self._lock:
            self._open += 1
            if self._open == 1:
                self._reentrant = module.CheckpointFunction
                self._generator = getattr(module, GENERATOR)
                module.CheckpointFunction = _Reentrant(self._reentrant)
                setattr(module, GENERATOR, functools.partial(_generator, self._generator))

    def close(self) -> None:
        """End what :meth:`open` began."""
        module: Any = torch.utils.checkpoint
        self._tapes.pop()
        with self._lock:
            self._open -= 1
            if not self._open:
                module.CheckpointFunction = self._reentrant
                setattr(module, GENERATOR, self._generator)

    @property
    def _tapes(self) -> list[Recording | None]:
        """The tapes that are open on this thread."""
        if not hasattr(self._here, "tapes"):
            self._here.tapes = []
        return self._here.tapes  # type: ignore[no-any-return]

    @property
    def tape(self) -> Recording | None:
        """The tape that records on this thread."""
        return self._tapes[-1] if self._tapes else None

    @property
    def is_open(self) -> bool:
        """Return whether :meth:`open` was called on this thread."""
        return bool(self._tapes)


CHECKPOINTING = _Checkpointing()


@contextmanager
def unrecorded() -> Iterator[None]:
    """No checkpoint within is reentrant, though nothing is recorded."""
    CHECKPOINTING.open(None)
    try:
        yield
    finally:
        CHECKPOINTING.close()


class _Reentrant:
    """In the place of the reentrant checkpoint's autograd function, which would run without a graph at first."""

    def __init__(self, original: Any) -> None:
        self._original = original

    def apply(self, function: Callable[..., Any], preserve_random_state: bool, *args: Any) -> Any:
        if CHECKPOINTING.is_open:
            return torch.utils.checkpoint.checkpoint(
                function, *args, use_reentrant=False, preserve_rng_state=preserve_random_state
            )
        return self._original.apply(function, preserve_random_state, *args)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)


def _generator(original: Any, function: Any, *args: Any, **kwargs: Any) -> Iterator[None]:
    """In the place of what runs before and after the function of a checkpoint that is not reentrant."""
    tape = CHECKPOINTING.tape
    if tape is None:
        yield from original(function, *args, **kwargs)
    elif tape.drops_activations and tape.dropped is None and not tape.lookups.alive:
        # Of functions within functions only the outer one is run again; and what stands for vectors that were not
        # looked up yet would be vectors in the second run.
        leaves = tree_flatten(_given(original, function, args, kwargs))[0]
        again = _Again(tape, function, [tape.rows.of(leaf) for leaf in leaves])
        with _dropping(tape):
            yield from original(again, *args, **kwargs)
    else:
        yield  # run once, with its activations


@contextmanager
def _dropping(tape: Recording) -> Iterator[None]:
    """While this is open, the inputs of recorded uses are dropped.

    Raises:
        UnsupportedError: an input was changed in place since it was used.
    """
    tape.dropped = []
    try:
        yield
        if any(tensor._version != version for tensor, version in tape.dropped):
            raise UnsupportedError(
                "A layer's input was changed in place within a function under torch.utils.checkpoint after the layer "
                "had used it, so its gradient can no longer be computed; make that operation out-of-place (for "
                "instance ReLU(inplace=False))."
            )
    finally:
        tape.dropped = None


def kept_by_graph() -> torch.autograd.graph.saved_tensors_hooks:
    """Return a context in which the graph keeps what it saves, though a checkpoint would drop it."""

    def unpack(kept: tuple[Tensor, int]) -> Tensor:
        tensor, version = kept
        if tensor._version != version:
            raise UnsupportedError(
                "What is computed from a parameter alone was changed in place under torch.utils.checkpoint before the "
                "optimizer's step, so gradients by example can no longer be computed; change it after the step."
            )
        return tensor

    # Detached: a node that kept its own output would keep itself.
    return torch.autograd.graph.saved_tensors_hooks(lambda tensor: (tensor.detach(), tensor._version), unpack)


class _Again:
    """A checkpointed function's second run. It holds no tape: the tape's graph holds it.

    ``places``: of each of the arguments' leaves the dimension that holds rows, and how many for an example. The second
    run has other objects.
    """

    def __init__(self, tape: Recording, function: Callable[..., Any], places: Sequence[tuple[int, int] | None]) -> None:
        self._tape = weakref.ref(tape)
        self._function = function
        self._places = places

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        tape = self._tape()
        if tape is None:
            raise UnsupportedError(
                "An activation under torch.utils.checkpoint was asked for after its pass had ended; call backward() on "
                "the loss of the pass, once."
            )
        again = tape.again()
        for leaf, place in zip(tree_flatten((args, kwargs))[0], self._places, strict=False):
            if place is not None and isinstance(leaf, Tensor):
                again.rows.put(leaf, *place)
        with again:
            again.dropped = []
            return self._function(*args, **kwargs)
