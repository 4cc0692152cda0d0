"""A function under torch.utils.checkpoint, and its third run.

A clipped sum needs a layer's input and output gradient twice: for the norm, and when the norms of all layers are known.
To keep those of all checkpointed layers in between would undo what checkpoints save. So, beyond :class:`Room`, they are
let go: a segment keeps its arguments and the gradient at its result, and when the sum is formed, its function and its
backward pass run once more, one segment at a time.

What such a run brings gets the clip factors of norms that were taken before, so it must bring the same. It is compared
with the run before (:mod:`dpcore.tape.fingerprint`): one that does something else is refused, and of one that adds in
another order, as GPUs may, an example's part is scaled down to the norm that was counted.
"""

from __future__ import annotations

import functools
import sys
import types
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.nn import Parameter
from torch.utils._pytree import tree_flatten, tree_map

from dpcore.errors import PrivacyError, UnsupportedError
from dpcore.tape.rows import Rows
from dpcore.tape.uses import Use

LEAST_ROOM = 48 * 2**20
"""Bytes. Pieces that the planner cuts for a CPU leave so much, so that no function runs a third time for these."""
ROOM_IN_PARAMETERS = 0.25
"""In bytes of the trained parameters, beside which so much hardly shows: ordinary training holds their gradients."""
CUDA_ROOM = 0.125
"""In the free bytes of a GPU: a third run costs as much time as the first two, and what is free may as well be used."""


class Again(Protocol):
    """The tape of a third run, which is read once."""

    @property
    def uses(self) -> list[Use]:
        """The uses that were recorded."""
        ...

    rows: Rows
    receive: Callable[[int, Use], None] | None

    def __enter__(self) -> Any: ...

    def __exit__(self, *exception: Any) -> None: ...

    def pull(self, outputs: Sequence[Tensor], weights: Sequence[Tensor], keep: bool) -> Any:
        """Fill in every use's gradient."""
        ...


class Refilled(Protocol):
    """A use that was let go."""

    def refill(self, use: Use) -> None:
        """Take what a third run has recorded in its place."""
        ...


@dataclass
class Room:
    """How many bytes of checkpointed layers one pass may keep until its norms are known; ``kept``: has kept so far."""

    limit: int
    kept: int = 0

    @staticmethod
    def beside(parameters: Mapping[Parameter, str]) -> Room:
        """Return the room of a pass that trains these."""
        limit = max(LEAST_ROOM, int(ROOM_IN_PARAMETERS * sum(p.nbytes for p in parameters)))
        device = next((p.device for p in parameters), None)
        if device is not None and device.type == "cuda":
            limit = max(limit, int(CUDA_ROOM * torch.cuda.mem_get_info(device)[0]))
        return Room(limit)


@dataclass
class Segment:
    """One call of a checkpointed function. It holds no node of the graph, for that holds it.

    ``again`` makes the tape of a third run, None where there can be none. ``counts``: how often the pass uses a
    parameter, complete when the backward pass begins.
    """

    again: Callable[[], Again] | None
    room: Room
    counts: Mapping[Parameter, int]
    places: list[tuple[int, int] | None]
    """Of each of the arguments' leaves: the dimension that holds rows, and how many for an example."""
    _function: Callable[..., Any] | None = None
    _arguments: tuple[Any, Any] = ((), {})
    _versions: list[tuple[Tensor, int]] = field(default_factory=list)
    """Tensors among the arguments, and their versions."""
    _state: _State | None = None
    _gradients: list[tuple[Tensor, float]] = field(default_factory=list)
    """At the result, one of each backward pass, and by what to multiply them."""
    _uses: list[weakref.ref[Any]] = field(default_factory=list)
    _lets_go: bool | None = None

    def end(self, result: Any, uses: Sequence[Use], factor: Callable[[Tensor], float] | None) -> None:
        """Note what the first run has returned and recorded; ``factor`` tells by what to multiply a gradient there.

        The gradient at the result is all that a third run knows of what comes behind it, so there must be one, and
        nothing that may lead elsewhere.
        """
        leaves = tree_flatten(result)[0]
        ends = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad]
        if not all(map(_is_plain, leaves)) or len(ends) != 1 or ends[0].grad_fn is None:
            self.again = None
            return

        def arrive(grad: Tensor) -> None:
            self._gradients.append((grad.detach(), 1.0 if factor is None else factor(grad)))

        ends[0].register_hook(arrive)
        self._uses = [weakref.ref(use) for use in uses]

    def forget(self) -> None:
        """Forget what an earlier backward pass brought."""
        self._gradients, self._lets_go = [], None
        self._let_arguments_go()

    def end_of_use(self) -> None:
        """After the sums are formed, there is no further run."""
        self.again, self._gradients = None, []
        self._let_arguments_go()

    def _let_arguments_go(self) -> None:
        self._function, self._arguments, self._versions, self._state = None, ((), {}), [], None

    def mark_rows(self, rows: Rows, args: Any, kwargs: Any) -> None:
        """Note in ``rows`` what was known of the first run's arguments; another run has other objects."""
        for leaf, place in zip(tree_flatten((args, kwargs))[0], self.places, strict=False):
            if place is not None and isinstance(leaf, Tensor):
                rows.put(leaf, *place)

    def begin_again(self, function: Callable[..., Any], args: Any, kwargs: Any) -> None:
        """Note what a third run needs, as the second one begins."""
        if self.again is None:
            return
        leaves = tree_flatten((args, kwargs))[0]
        if not all(map(_is_plain, leaves)) or _may_hold_graph(function):
            self.again = None
            return
        detached = _Detached()
        self._function = detached.partial(function)
        self._arguments = tree_map(detached, (args, kwargs))
        self._versions = [(tensor, tensor._version) for tensor in detached.made]
        self._state = _State.now(leaves)

    def lets_go(self, params: Sequence[Parameter], size: int) -> bool:
        """Return whether a use of ``size`` bytes is let go; one answer for all of the segment's."""
        if self.again is None or len(self._gradients) != 1 or (self._function is None and self._lets_go is not False):
            return False
        if self._lets_go is None:
            self._lets_go = self.room.kept >= self.room.limit
        if not self._lets_go:
            self.room.kept += size
            self._let_arguments_go()
            return False
        # The norm of a parameter that is used twice has cross terms between both uses.
        return all(self.counts.get(param) == 1 for param in params)

    def run(self) -> None:
        """Run the function and its backward pass once more, and hand what was let go to its uses.

        Raises:
            PrivacyError: it takes another way than before.
            UnsupportedError: an argument was changed in place since.
        """
        if self.again is None or self._function is None or self._state is None:
            raise other_way()
        if any(tensor._version != version for tensor, version in self._versions):
            raise UnsupportedError(
                "An argument of a function under torch.utils.checkpoint was changed in place between backward() and "
                "the optimizer's step, so gradients by example can no longer be computed; change it after the step."
            )
        tape = self.again()
        args, kwargs = self._arguments
        self.mark_rows(tape.rows, args, kwargs)
        gradient, factor = self._gradients[0]
        if len(self._gradients) > 1:
            gradient, factor = sum(scaled(grad, f) for grad, f in self._gradients), 1.0  # type: ignore[assignment]
        missing = {i for i, reference in enumerate(self._uses) if getattr(reference(), "is_let_go", False)}

        def receive(number: int, use: Use) -> None:
            own: Refilled | None = self._uses[number]() if number < len(self._uses) else None
            if number in missing and own is not None and use.grad is not None:
                missing.remove(number)
                use.grad = scaled(use.grad, factor)
                own.refill(use)

        tape.receive = receive
        with self._state.restored(), torch.enable_grad():
            with tape:
                leaves = tree_flatten(self._function(*args, **kwargs))[0]
            ends = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad]
            if len(ends) != 1 or ends[0].shape != gradient.shape or len(tape.uses) != len(self._uses):
                raise other_way()
            tape.pull(ends, [gradient], keep=False)
        if missing:
            raise other_way()


def other_way() -> PrivacyError:
    """Return the error of a third run that brings other gradients."""
    return PrivacyError(
        "A function under torch.utils.checkpoint did something else when it ran again for the optimizer's step, so its "
        "examples' gradients are not those whose norms were taken. Change parameters, their modules' mode and inputs "
        "after the step only; leave checkpointing out where a function reads what changes from run to run (random "
        "numbers that are not torch's, say), or hands on tensors otherwise than by its return value."
    )


def returned() -> Any:
    """Return what a function under torch.utils.checkpoint has returned; None where that cannot be seen.

    For a generator that torch's checkpoint() drives: it is resumed when the function has returned, and is not told
    what. checkpoint() has that in a local variable.
    """
    frame = sys._getframe(1)
    while frame.f_back is not None:
        frame = frame.f_back
        if frame.f_code.co_filename == torch.utils.checkpoint.__file__ and "ret" in frame.f_locals:
            return frame.f_locals["ret"]
        if frame.f_code.co_name == "checkpoint":
            break
    return None


def scaled(tensor: Tensor, scale: float) -> Tensor:
    """Tensor * scale, expanded where the tensor is: rules make use of that."""
    if scale == 1.0:
        return tensor
    if 0 not in tensor.stride() or not tensor.numel():
        return tensor * scale
    core = tensor[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in tensor.stride())]
    return (core * scale).expand(tensor.shape)


@dataclass(frozen=True)
class _State:
    """Random numbers and autocast, on which a run depends beside its arguments."""

    numbers: Tensor
    devices: Sequence[Any]
    device_numbers: Sequence[Tensor]
    device_type: str
    autocast: dict[str, tuple[bool, torch.dtype]]
    cache: bool

    @staticmethod
    def now(leaves: Sequence[Any]) -> _State:
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        device_type = next((t.device.type for t in tensors if t.device.type != "cpu"), "cpu")
        devices, numbers = torch.utils.checkpoint.get_device_states(*tensors) if device_type != "cpu" else ((), ())
        return _State(
            torch.get_rng_state(),
            devices,
            numbers,
            device_type,
            {kind: (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in {"cpu", device_type}},
            torch.is_autocast_cache_enabled(),
        )

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Within, all of it is as it was."""
        with ExitStack() as stack:
            stack.enter_context(torch.random.fork_rng(devices=self.devices, device_type=self.device_type or "cpu"))
            torch.set_rng_state(self.numbers)
            if self.devices:
                torch.utils.checkpoint.set_device_states(
                    self.devices, self.device_numbers, device_type=self.device_type
                )
            for kind, (enabled, dtype) in self.autocast.items():
                stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=self.cache))
            yield


class _Detached:
    """Makes copies of tensors without their graph, one of each; parameters stay. ``made``: all so far."""

    def __init__(self) -> None:
        self.made: list[Tensor] = []
        self._known: dict[int, Tensor] = {}
        self._originals: list[Tensor] = []

    def __call__(self, value: Any) -> Any:
        if not isinstance(value, Tensor) or isinstance(value, Parameter):
            return value
        if id(value) not in self._known:
            self._known[id(value)] = value.detach().requires_grad_(value.requires_grad)
            self._originals.append(value)  # so that no other gets its number
            self.made.append(self._known[id(value)])
        return self._known[id(value)]

    def partial(self, function: Any) -> Any:
        """``function`` with the arguments that it brings along (as transformers does it) without their graph."""
        if not isinstance(function, functools.partial):
            return function
        args, keywords = tree_map(self, (function.args, function.keywords))
        return functools.partial(self.partial(function.func), *args, **keywords)


_PLAIN = (type(None), bool, int, float, complex, str, bytes, slice, torch.dtype, torch.device, nn.Module, Tensor)


def _is_plain(leaf: Any) -> bool:
    """Return whether a leaf of arguments or results is a tensor, or surely holds none with a graph.

    A module may; but only until its next pass.
    """
    return isinstance(leaf, _PLAIN)


def _may_hold_graph(function: Any) -> bool:
    """Return whether a function may bring a tensor with a graph along otherwise than by ``functools.partial``.

    A segment must not hold one: the graph holds the segment, and Python's collector does not see the circle.
    """
    while isinstance(function, functools.partial):
        if not all(map(_is_plain, tree_flatten((function.args, function.keywords))[0])):
            return True
        function = function.func
    if isinstance(function, nn.Module | types.BuiltinFunctionType | type):
        return False
    if hasattr(function, "__self__"):  # a method, or what stands for one
        return not isinstance(function.__self__, nn.Module)
    if not isinstance(function, types.FunctionType):
        return True
    held = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    for cell in function.__closure__ or ():
        try:
            held.append(cell.cell_contents)
        except ValueError:  # an empty cell
            continue
    return any(_brings_graph(leaf) for leaf in tree_flatten(held)[0])


def _brings_graph(leaf: Any) -> bool:
    """Return whether what a function holds may hold a tensor with a graph."""
    if isinstance(leaf, Tensor):
        return leaf.grad_fn is not None
    return not _is_plain(leaf) and _may_hold_graph(leaf)
