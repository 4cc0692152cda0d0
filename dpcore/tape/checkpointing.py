"""torch.utils.checkpoint while a tape is open.

A checkpointed function runs with its activations dropped, and once more in the backward pass, as torch has it. What
rules need of it (the inputs of recorded uses) is dropped with them and comes back with the second run, which is
recorded on a tape of its own that nobody reads: every use is recorded once, in the first run. Where its output's
gradient arrives, a use has its inputs again, and keeps the smaller of the two: these and the gradient, or the
per-sample gradients that are formed of them.
"""

from __future__ import annotations

import copy
import functools
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
import torch.utils.checkpoint
from torch import Tensor
from torch.nn import Parameter

from dpcore.errors import UnsupportedError
from dpcore.numerics.rounding import SquaredNorm
from dpcore.tape.uses import Saved, Use

GENERATOR = "_checkpoint_without_reentrant_generator"
"""The function that checkpoint() looks up where it is not reentrant; torch 2.14 has put another one behind it."""
if hasattr(torch.utils.checkpoint, f"{GENERATOR}_impl"):
    GENERATOR += "_impl"


class Recording(Protocol):
    """The part of a tape that this module needs."""

    dropped: list[tuple[Tensor, int]] | None

    @property
    def may_drop_activations(self) -> bool:
        """Return whether a function that is about to run may be run again later."""
        ...

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

    def open(self, tape: Recording) -> None:
        """Note that ``tape`` records on this thread."""
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
    def _tapes(self) -> list[Recording]:
        """The tapes that are open on this thread."""
        if not hasattr(self._here, "tapes"):
            self._here.tapes = []
        return self._here.tapes  # type: ignore[no-any-return]

    @property
    def tape(self) -> Recording | None:
        """The tape that records on this thread."""
        return self._tapes[-1] if self._tapes else None


CHECKPOINTING = _Checkpointing()


class _Reentrant:
    """In the place of the reentrant checkpoint's autograd function, which would run without a graph at first."""

    def __init__(self, original: Any) -> None:
        self._original = original

    def apply(self, function: Callable[..., Any], preserve_random_state: bool, *args: Any) -> Any:
        if CHECKPOINTING.tape is not None:
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
    elif tape.may_drop_activations:
        with _segment(tape):
            yield from original(_Again(tape, function), *args, **kwargs)
    else:
        yield  # run once, with its activations


@contextmanager
def _segment(tape: Recording) -> Iterator[None]:
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
    """A checkpointed function's second run. It holds no tape: the tape's graph holds it."""

    def __init__(self, tape: Recording, function: Callable[..., Any]) -> None:
        self._tape = weakref.ref(tape)
        self._function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        tape = self._tape()
        if tape is None:
            raise UnsupportedError(
                "An activation under torch.utils.checkpoint was asked for after its pass had ended; call backward() on "
                "the loss of the pass, once."
            )
        again = tape.again()
        with again:
            again.dropped = []
            return self._function(*args, **kwargs)


class _Keep(torch.autograd.Function):
    """A node of the graph that keeps a tensor as all others do: by whatever rules are in force for saved tensors."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, anchor: Tensor) -> Tensor:
        ctx.save_for_backward(tensor)
        return torch.empty(0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None]:
        return None, None


class DroppedUse(Use):
    """A use in a checkpointed function: without its inputs until the gradient at its output arrives."""

    def __init__(self, use: Use) -> None:
        self.use = use
        self.params = use.params
        self.sequential, self.sparse = use.sequential, use.sparse
        self._formed: dict[Parameter, Tensor] | None = None

    def drop(self, anchor: Tensor, dropped: list[tuple[Tensor, int]]) -> list[tuple[Saved, Any]]:
        """Let the inputs go, and return outputs of the graph's nodes from which :meth:`take` gets them back.

        A node leads to the checkpoint's arguments and their graph. It may be held behind the use's output in that
        graph, but not by the use: the tape holds that, and hooks in the graph hold the tape. Its output is held with
        it, for torch up to 2.9 at least frees what a node saved when nothing refers to that.
        """
        nodes = []
        for saved in _inputs(self.use):
            dropped.append((saved.tensor, saved.version))
            nodes.append((saved, _Keep.apply(saved.tensor, anchor)))
            saved.drop()
        return nodes

    @property
    def grad(self) -> Tensor | None:  # type: ignore[override]
        """That of the use, or what was formed for the first parameter."""
        return self.use.grad if self._formed is None else self._formed[self.params[0]]

    @torch.no_grad()
    def forget(self) -> None:
        """Forget what an earlier backward pass brought."""
        self._formed, self.use.grad = None, None

    @torch.no_grad()
    def take(self, grad: Tensor, nodes: list[tuple[Saved, Any]]) -> None:
        """Receive the gradient at the output, all of it so far, within the backward pass."""
        self._formed, self.use.grad = None, grad
        for saved, node in nodes:
            if saved.missing:
                (tensor,) = node.grad_fn.saved_tensors
                saved.bring_back(tensor)
        examples = len(grad)
        if examples * sum(p.numel() for p in self.params) * 4 >= self.use.stash_bytes():
            return
        with torch.autocast(grad.device.type, enabled=False):
            self._formed = {param: self.use.grad_sample(param) for param in self.params}
        self.use.grad = None
        for saved, _ in nodes:
            saved.drop()

    def norm_sq(self, param: Parameter) -> SquaredNorm:
        return self.use.norm_sq(param)

    def grad_sample(self, param: Parameter) -> Tensor:
        return self.use.grad_sample(param) if self._formed is None else self._formed[param]

    def takes_turns(self, param: Parameter) -> bool:
        return self._formed is None and self.use.takes_turns(param)

    def example(self, param: Parameter, i: int) -> Tensor:
        return self.use.example(param, i)

    def add_example(self, param: Parameter, i: int, out: Tensor) -> None:
        self.use.add_example(param, i, out)

    def add_clipped_sum(self, param: Parameter, factors: Tensor, out: Tensor) -> None:
        self.use.add_clipped_sum(param, factors, out)

    def ghost_is_cheaper(self, param: Parameter) -> bool:
        return self._formed is None and self.use.ghost_is_cheaper(param)

    def rows(self, index: Tensor, dtype: torch.dtype) -> Use:
        if self._formed is None:
            return self.use.rows(index, dtype)
        part = copy.copy(self)
        part._formed = {p: formed.index_select(0, index).to(dtype) for p, formed in self._formed.items()}
        return part

    def stash_bytes(self) -> int:
        if self._formed is not None:
            return sum(formed.nbytes for formed in self._formed.values())
        return 0 if self.use.grad is None else self.use.stash_bytes()


def _inputs(use: Use) -> list[Saved]:
    """Return the floating-point inputs that a use keeps."""
    found: list[Saved] = []
    for value in vars(use).values():
        parts = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else (value,)
        found += [part for part in parts if isinstance(part, Saved) and part.tensor.is_floating_point()]
    return found
