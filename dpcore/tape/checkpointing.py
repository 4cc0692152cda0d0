"""torch.utils.checkpoint while a tape is open: checkpointed functions are run once."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch.utils.checkpoint

GENERATOR = "_checkpoint_without_reentrant_generator"
"""The function that checkpoint() looks up where it is not reentrant; torch 2.14 has put another one behind it."""
if hasattr(torch.utils.checkpoint, f"{GENERATOR}_impl"):
    GENERATOR += "_impl"


class _Checkpointing:
    """Functions under torch.utils.checkpoint are run once and keep their activations, on threads with an open tape.

    Run a second time, in the backward pass, they would use the parameters where no tape sees them. What a rule needs is
    kept in any case; physical micro-batches are what bounds memory here. checkpoint() looks both names up when called,
    on whatever thread: they are replaced from the first tape that is opened to the last that is closed, and on other
    threads what takes their places hands on to them.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open = 0
        self._here = threading.local()
        self._reentrant: Any = None
        self._generator: Any = None

    def __enter__(self) -> None:
        module: Any = torch.utils.checkpoint
        self._here.depth = self.depth + 1
        with self._lock:
            self._open += 1
            if self._open == 1:
                self._reentrant = module.CheckpointFunction
                self._generator = getattr(module, GENERATOR)
                module.CheckpointFunction = _Reentrant(self._reentrant)
                setattr(module, GENERATOR, functools.partial(_generator, self._generator))

    def __exit__(self, *exception: Any) -> None:
        module: Any = torch.utils.checkpoint
        self._here.depth -= 1
        with self._lock:
            self._open -= 1
            if not self._open:
                module.CheckpointFunction = self._reentrant
                setattr(module, GENERATOR, self._generator)

    @property
    def depth(self) -> int:
        """Return how many tapes are open on this thread."""
        return getattr(self._here, "depth", 0)


CHECKPOINTING = _Checkpointing()


class _Reentrant:
    """In the place of the reentrant checkpoint's autograd function."""

    def __init__(self, original: Any) -> None:
        self._original = original

    def apply(self, function: Callable[..., Any], preserve_random_state: bool, *args: Any) -> Any:
        if CHECKPOINTING.depth:
            return function(*args)
        return self._original.apply(function, preserve_random_state, *args)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)


def _generator(original: Any, *args: Any, **kwargs: Any) -> Iterator[None]:
    """In the place of what runs before and after the function of a checkpoint that is not reentrant."""
    if CHECKPOINTING.depth:
        yield
    else:
        yield from original(*args, **kwargs)
