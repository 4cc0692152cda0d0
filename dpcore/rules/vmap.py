"""Calls of modules without a rule are recorded as a whole, as one use each (:class:`ModuleUse`)."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import Parameter
from torch.nn.utils.rnn import PackedSequence

from dpcore.errors import NoRuleError, UnsupportedError
from dpcore.rerun.snapshot import RandomNumbers
from dpcore.rules.graph_part import Part
from dpcore.rules.module_use import Call, Fallback, Forward, ModuleUse, is_replayed
from dpcore.tape.tape import Tape, check_first_order
from dpcore.tape.uses import Saved
from dpcore.tree import flatten, unflatten

__all__ = ["Fallback", "Interception", "ModuleUse", "is_replayed", "owner"]

_ENTRANCES = ("forward", "_compiled_call_impl")
"""Where a module's calls can be intercepted: without its hooks, and (as torch.compile does) with them."""


class Interception:
    """While it is in place, calls of a fallback's module are recorded on the tape as one use each.

    ``hooked``: whether its hooks are a part of the call, and not what gathers its parameters around it.
    """

    def __init__(self, tape: Tape, fallback: Fallback, hooked: bool = True) -> None:
        self.module = fallback.module
        entrances = _ENTRANCES if hooked else _ENTRANCES[:1]
        self.previous = {name: vars(self.module).get(name) for name in entrances}
        # The entrances hold it, a circle: with the tape in it, the batch would wait for Python's collector.
        self._tape = weakref.ref(tape)
        self._fallback = fallback
        bare = Forward(self.module)

        def forward(*args: Any, **kwargs: Any) -> Any:
            return self._run(bare, "module.", args, kwargs)

        def call(*args: Any, **kwargs: Any) -> Any:
            return self._run(self.module, "", args, kwargs)

        self._own = dict(zip(entrances, (forward, call), strict=False))

    def __enter__(self) -> None:
        vars(self.module).update(self._own)

    def __exit__(self, *exception: Any) -> None:
        for name, value in self.previous.items():
            vars(self.module).pop(name, None)
            if value is not None:
                vars(self.module)[name] = value

    @contextmanager
    def _out_of_place(self) -> Iterator[None]:
        """Within it the module's calls are its own."""
        self.__exit__()
        try:
            yield
        finally:
            self.__enter__()

    def _run(self, target: nn.Module, prefix: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tape = self._tape()
        assert tape is not None, f"the forward pass of {self._fallback.name or 'the model'} is over"
        trained = {n: p for n, p in self.module.named_parameters() if tape.trains(p)}
        if not trained or not torch.is_grad_enabled():
            with self._out_of_place():
                return target(*args, **kwargs)
        check_first_order()
        call = _RecordedCall(tape, self._fallback, trained, args, kwargs)
        stand_ins = {prefix + n: p for n, p in call.part.stand_ins.items()}
        inner_args, inner_kwargs = call.inner
        try:
            with self._out_of_place():
                output = functional_call(target, stand_ins, inner_args, inner_kwargs)
        except RuntimeError as error:
            if "leaf Variable that requires grad" in str(error):
                raise _changes_inputs(call.name, call.params) from error
            raise
        call.check()
        if tape.probing:
            call.note()
        return call.record(target, prefix, output)


class _RecordedCall:
    """One call of a fallback's module, as a part of the graph that is cut off from the rest, and the use of it."""

    def __init__(
        self, tape: Tape, fallback: Fallback, trained: dict[str, Parameter], args: Any, kwargs: dict[str, Any]
    ) -> None:
        self.tape = tape
        self.fallback = fallback
        self.trained = trained
        self.module = module = fallback.module
        self.name = fallback.name or "the model"
        self.params = tuple(trained.values())
        if any(isinstance(value, PackedSequence) for value in (*args, *kwargs.values())):
            raise NoRuleError(
                f"{self.name} has no rule for a PackedSequence; pack the sequences inside of the model, or pad them.",
                self.params,
            )
        self.leaves, self.spec = flatten((args, kwargs))
        self.part = Part(self.name, trained, self.leaves)
        self.inner = unflatten(self.spec, self.part.leaves)
        """(args, kwargs) of the call inside the part."""
        device = self.params[0].device.type
        self.autocast = (device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))
        self.buffers = {n: b.clone() for n, b in module.named_buffers() if n in fallback.buffers}
        self._versions = _versions(module) if tape.probing else {}
        self._attached = tape.attached
        self._numbers = RandomNumbers(module)
        self._drawn = False

    def check(self) -> None:
        """NoRuleError where the call did what is not seen by its result."""
        self._drawn = not self._numbers.same(RandomNumbers(self.module))
        if self.tape.attached != self._attached:
            raise NoRuleError(
                f"{self.name} has no rule, and uses trained parameters that are not its own; register the layers that "
                "they belong to within it.",
                self.params,
            )
        if any(leaf.requires_grad for leaf in self.part.changed_inputs()):
            raise _changes_inputs(self.name, self.params)
        after, after_spec = flatten(self.inner)
        if after_spec != self.spec or any(a is not b for a, b in zip(after, self.part.leaves, strict=True)):
            raise NoRuleError(
                f"{self.name} has no rule, and changes a list or dict among its arguments; return what it adds.",
                self.params,
            )

    def note(self) -> None:
        """Notes in the fallback what a probe shows: which buffers change, and whether the call can be repeated."""
        for leaf in self.leaves:
            if _holds_tensors(leaf):
                raise NoRuleError(
                    f"{self.name} has no rule, and gets an argument of type {type(leaf).__name__}, which holds tensors "
                    "that cannot be told apart by example; pass the tensors.",
                    self.params,
                )
        self.fallback.buffers |= {n for n, v in _versions(self.module).items() if self._versions.get(n) != v}
        self.fallback.unrepeatable |= self._drawn or bool(self.part.changed_inputs())

    def record(self, target: nn.Module, prefix: str, output: Any) -> Any:
        """Records the use on the tape, and returns the output to use."""
        tape, size = self.tape, self.tape.batch_size
        use = self._use(target, prefix)
        results, spec = flatten(output)
        released, places = self.part.release(results, tape.edges.anchor, tape.probing)
        if tape.scale is None:
            tape.edges.guards += self.part.guarded
        for k, place in places.items():
            result = released[k]
            if not result.dim() or len(result) != size:
                tape.forbid(result, self.params)
                continue
            released[k] = result = tape.attach(result, functools.partial(use.set_grad, k))
            use.places[k] = place
            # An activation behind it may work in place; the probe compares in any case.
            use.results[k] = Saved(result.clone() if tape.probing else result)
        tape.uses.append(use)
        return unflatten(spec, released)

    def _use(self, target: nn.Module, prefix: str) -> ModuleUse:
        """The use; with the graph of this call where there cannot be another one."""
        fallback, size = self.fallback, self.tape.batch_size
        kind = fallback.use or ModuleUse
        by_graph = fallback.unrepeatable or self._drawn or bool(self.part.changed_inputs())
        if by_graph and kind is not ModuleUse:
            raise UnsupportedError(
                f"{self.name} has a custom rule and draws random numbers (dropout?), which cannot be drawn again; move "
                "the dropout out of it."
            )
        long = [k for k, v in enumerate(self.leaves) if isinstance(v, Tensor) and v.dim() and len(v) == size]
        batched = tuple(k for k in long if fallback.batched is None or k in fallback.batched)
        call = Call(self.name, self.module, target, prefix, self.spec, batched, self.autocast, self.buffers)
        use = kind(call, self.trained, self.leaves)
        if by_graph:
            use.part, use.numbers, self.part.kept = self.part, self._numbers, True
        return use


def _versions(module: nn.Module) -> dict[str, tuple[int, int]]:
    return {n: (id(b), b._version) for n, b in module.named_buffers() if not b.is_inference()}


def _changes_inputs(name: str, params: tuple[Parameter, ...]) -> NoRuleError:
    return NoRuleError(
        f"{name} has no rule, and changes its input in place; make that operation out-of-place (for instance "
        "ReLU(inplace=False)).",
        params,
    )


def _holds_tensors(value: Any, depth: int = 6) -> bool:
    """Return whether an argument is an object (a cache, say) with tensors inside of it that no one else can reach."""
    if isinstance(value, Tensor):
        return depth < 6
    if not depth or isinstance(value, (nn.Module, type)) or callable(value):
        return False
    parts: Any = ()
    if isinstance(value, Mapping):
        parts = value.values()
    elif isinstance(value, (list, tuple, set, frozenset)):
        parts = value
    elif hasattr(value, "__dict__"):
        parts = vars(value).values()
    return any(_holds_tensors(part, depth - 1) for part in parts)


def owner(model: nn.Module, params: Sequence[Parameter], taken: Sequence[str]) -> str | None:
    """Name of the innermost module around ``params`` that is neither among ``taken`` nor within one of them; None when
    even the model is taken.
    """
    names = [name for name, p in model.named_parameters() if any(p is q for q in params)]
    path = names[0].rpartition(".")[0] if names else ""
    while around := [t for t in taken if t in ("", path) or path.startswith(t + ".")]:
        if "" in around:
            return None
        path = min(around, key=len).rpartition(".")[0]
    return path
