"""Any module: per-sample gradients by vmap over its own forward pass, or one example at a time where vmap cannot.

Slower than a rule, and used only where there is none: custom layers with parameters of their own, tables of positions
without a batch dimension (then the module around them). A replay must give the outputs of the first run. Where there
cannot be one (dropout), the graph of the first run is kept, and one backward pass per example goes through it.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn import Parameter

from dpcore.errors import NoRuleError, UnsupportedError
from dpcore.rerun.side_effects import without_side_effects
from dpcore.rerun.snapshot import RandomNumbers
from dpcore.rules.graph_part import Part
from dpcore.tape.uses import Saved, Use
from dpcore.tree import flatten, unflatten

_REPLAYED = ContextVar("replayed", default=False)


@contextmanager
def _replay() -> Iterator[None]:
    token = _REPLAYED.set(True)
    try:
        yield
    finally:
        _REPLAYED.reset(token)


def is_replayed() -> bool:
    """Return whether a module runs again for its per-sample gradients, where nothing of it is to be recorded."""
    return _REPLAYED.get()


@dataclass
class Fallback:
    """A module that is recorded as a whole, as a ``use`` (:class:`ModuleUse` where None).

    ``batched``: positions among its flattened arguments of the tensors with the batch first, None until they are known.
    ``unrepeatable``: a second run gives something else (it draws random numbers, say), so that gradients must come from
    the first.
    """

    name: str
    module: nn.Module
    batched: frozenset[int] | None = None
    use: type[ModuleUse] | None = None
    unrepeatable: bool = False
    buffers: frozenset[str] = frozenset()
    """Those that a call changes."""


@dataclass(frozen=True)
class Call:
    """How a module was called.

    ``target`` is it, or what calls its ``forward`` without its hooks; ``prefix`` then leads to its names. ``leaves``:
    flattened arguments, of which the tensors at ``batched`` have the batch first.
    """

    name: str
    module: nn.Module
    target: nn.Module
    prefix: str
    spec: Any
    batched: tuple[int, ...]
    autocast: tuple[str, bool, torch.dtype]
    buffers: dict[str, Tensor]
    """The buffers that a call changes, as they were before."""

    def again(self, params: dict[str, Tensor], leaves: Sequence[Any], example: Sequence[Tensor] | None = None) -> Any:
        """The flattened results of another call with these parameters by name, and these tensors in the places of
        the batch. Buffers are copies.
        """
        filled = list(leaves)
        for k, tensor in zip(self.batched if example is not None else (), example or (), strict=True):
            filled[k] = tensor
        args, kwargs = unflatten(self.spec, filled)
        others = {n: self.buffers.get(n, b).clone() for n, b in self.module.named_buffers()}
        if any(p.dtype == torch.float64 for p in params.values()):
            frozen = {n: p.detach() for n, p in self.module.named_parameters() if n not in params}
            others = {n: _cast(t, torch.float64) for n, t in (others | frozen).items()}
        device, enabled, kind = self.autocast
        with torch.autocast(device, enabled=enabled, dtype=kind, cache_enabled=False):
            given = {self.prefix + n: t for n, t in (others | params).items()}
            return flatten(functional_call(self.target, given, args, kwargs))[0]


class Forward(nn.Module):
    """Calls the ``forward`` of a module without its hooks."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.training = module.training
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module.forward(*args, **kwargs)


class ModuleUse(Use):
    """A call of a module; ``leaves`` are its flattened arguments. One gradient [B, ...] per tensor output."""

    def __init__(self, call: Call, trained: dict[str, Parameter], leaves: Sequence[Any]) -> None:
        self.call = call
        self.name = call.name
        self.module = call.module
        self.trained = trained
        self.params = tuple(trained.values())
        self.leaves = [Saved(leaf.detach()) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self.versions = [p._version for p in self.params]
        self.grads: dict[int, Tensor] = {}
        self.part: Part | None = None
        """The graph of the first run, where there cannot be a second."""
        self.numbers: RandomNumbers | None = None
        """With it: the random numbers as they were before."""
        self.places: dict[int, int] = {}
        """Numbers of the recorded results among the part's outputs."""
        self.results: dict[int, Saved] = {}
        """Results of the first run, by the same keys; empty where nothing is to be compared with them."""
        self.dtype: torch.dtype | None = None
        """In which precision it is run again; None: in its own."""
        self._cache: dict[Parameter, Tensor] | None = None

    def set_grad(self, output: int, gradient: Tensor | None) -> None:
        self._cache = None
        if gradient is None:
            self.grads.pop(output, None)
        else:
            self.grads[output] = gradient
        self.grad = next(iter(self.grads.values()), None)

    def grad_sample(self, param: Parameter) -> Tensor:
        if self._cache is None:
            self._cache = self._all()
        return self._cache[param]

    def given(self) -> list[Any]:
        """The flattened arguments."""
        return [leaf.get(self.name) if isinstance(leaf, Saved) else leaf for leaf in self.leaves]

    def _all(self) -> dict[Parameter, Tensor]:
        if self.part is not None:
            return self._by_graph(self.part)
        if any(p._version != version for p, version in zip(self.params, self.versions, strict=True)):
            raise UnsupportedError(
                f"The parameters of {self.name}, which has no rule, were changed between its forward pass and the "
                "optimizer's step, so its gradients by example can no longer be computed; change them after the step."
            )
        grads, results = self._in_full()
        if not self._agrees(results) and not self._agrees(self._whole_again()):
            raise UnsupportedError(
                f"{self.name} has no rule, and gave other outputs when it was run again for its gradients by example: "
                "it draws random numbers of its own, or depends on what was changed since its forward pass. Let its "
                "outputs depend on its arguments, parameters and buffers alone."
            )
        return {self.trained[name]: value.detach() for name, value in grads.items()}

    def _by_graph(self, part: Part) -> dict[Parameter, Tensor]:
        """One backward pass per example through the graph of the batch; an example that is not finite would reach all
        others there, since 0 * NaN is NaN: the batch is run again without it.
        """
        spoilt = self._spoilt()
        good = (~spoilt).nonzero().flatten().tolist()
        if good and len(good) < len(spoilt):
            outputs, ends = self._without(spoilt, good[0])
            if not all(self._close(outputs[k][good], saved.tensor[good]) for k, saved in self.results.items()):
                good = []
            grads = {k: g.masked_fill(spoilt.view(-1, *[1] * (g.dim() - 1)), 0.0) for k, g in self.grads.items()}
        else:
            outputs, ends = {k: part.outputs[place] for k, place in self.places.items()}, list(part.stand_ins.values())
            good, grads = list(range(len(spoilt))), self.grads
        rows = {p: p.new_full((len(spoilt), *p.shape), torch.nan) for p in self.params}
        for i in good:
            single = [torch.zeros_like(g) for g in grads.values()]
            for row, g in zip(single, grads.values(), strict=True):
                row[i] = g[i]
            for p, gradient in zip(self.params, part.gradients(ends, [outputs[k] for k in grads], single), strict=True):
                rows[p][i] = 0.0 if gradient is None else gradient
        return rows

    def _spoilt(self) -> Tensor:
        """[B] bool: examples whose inputs, outputs or gradients are not finite."""
        given, count = self.given(), len(next(iter(self.grads.values())))
        tensors = [
            *(given[k] for k in self.call.batched),
            *self.grads.values(),
            *(s.tensor for s in self.results.values()),
        ]
        finite = [t.flatten(1).isfinite().all(1) for t in tensors if t.numel()]
        return ~torch.stack(finite).all(0) if finite else torch.zeros(count, dtype=torch.bool)

    def _without(self, spoilt: Tensor, other: int) -> tuple[dict[int, Tensor], list[Tensor]]:
        """Outputs of another run with the same random numbers, the ``spoilt`` examples' inputs being those of the
        example ``other``; and what stands for the parameters there.
        """
        given = self.given()
        rows = torch.arange(len(spoilt), device=spoilt.device).masked_fill(spoilt, other)
        params = {n: p.detach().requires_grad_() for n, p in self.trained.items()}
        now = RandomNumbers(self.module)
        assert self.numbers is not None
        try:
            self.numbers.restore()
            with torch.enable_grad(), _replay(), without_side_effects(self.module):
                results = self.call.again(params, given, [given[k][rows] for k in self.call.batched])
        finally:
            now.restore()
        return {k: results[k] for k in self.places}, list(params.values())

    def _in_full(self) -> tuple[dict[str, Tensor], dict[int, Tensor]]:
        """:meth:`_replayed` in the precision that is asked for, or in the module's own where it has constants in it."""
        if self.dtype != torch.float64 or all(p.dtype == torch.float64 for p in self.params):
            return self._replayed(None)
        try:
            return self._replayed(torch.float64)
        except RuntimeError:
            return self._replayed(None)

    def _replayed(self, dtype: torch.dtype | None) -> tuple[dict[str, Tensor], dict[int, Tensor]]:
        """Gradients [B, *shape] by name, and the outputs at the places of ``grads``, of each example run alone."""
        leaves, params = self.given(), {name: p.detach() for name, p in self.trained.items()}
        gradients = list(self.grads.values())
        if dtype is not None:
            leaves = [_cast(leaf, dtype) for leaf in leaves]
            params = {name: _cast(p, dtype) for name, p in params.items()}
        inputs = [leaves[k] for k in self.call.batched]

        def product(
            params: dict[str, Tensor], example: list[Tensor], grads: list[Tensor]
        ) -> tuple[Tensor, list[Tensor]]:
            """⟨gradient at the outputs, outputs⟩ of one example: its gradient is the example's parameter gradient."""
            results = self.call.again(params, leaves, [tensor.unsqueeze(0) for tensor in example])
            outputs = [results[k] for k in self.grads]
            for output, g in zip(outputs, grads, strict=True):
                if output.shape != (1, *g.shape):
                    raise UnsupportedError(
                        f"{self.name} has no rule, and gave an output of shape {tuple(output.shape)} for one example "
                        f"alone, where its part of the batch's is {(1, *g.shape)}; keep the batch first in it."
                    )
            total = sum((output[0] * g).sum() for output, g in zip(outputs, grads, strict=True))
            return total, [output[0].detach() for output in outputs]

        def singly(i: int) -> tuple[list[Tensor], list[Tensor]]:
            own = {name: p.detach().requires_grad_() for name, p in params.items()}
            total, outputs = product(own, [t[i] for t in inputs], [g[i] for g in gradients])
            if not total.requires_grad:
                return [torch.zeros_like(p) for p in own.values()], outputs
            return list(
                torch.autograd.grad(total, list(own.values()), allow_unused=True, materialize_grads=True)
            ), outputs

        with torch.enable_grad(), _replay(), without_side_effects(self.module):
            try:
                stacked, outputs = vmap(grad(product, has_aux=True), (None, 0, 0))(params, inputs, gradients)
                return stacked, dict(zip(self.grads, outputs, strict=True))
            except Exception:  # whatever it is that vmap cannot: if the module itself fails, it does so again
                each = [singly(i) for i in range(len(gradients[0]))]
        stacked = [torch.stack(rows) for rows in zip(*(of for of, _ in each), strict=True)]
        outputs = [torch.stack(rows) for rows in zip(*(of for _, of in each), strict=True)]
        return dict(zip(params, stacked, strict=True)), dict(zip(self.grads, outputs, strict=True))

    def _whole_again(self) -> dict[int, Any]:
        """The outputs at the places of ``results`` in another run of the whole batch."""
        with torch.no_grad(), _replay(), without_side_effects(self.module):
            results = self.call.again({n: p.detach() for n, p in self.trained.items()}, self.given())
        return {k: results[k] for k in self.results}

    def _agrees(self, outputs: Mapping[int, Tensor]) -> bool:
        """Return whether these are the outputs of the first run, but for rounding."""
        for k, again in outputs.items():
            saved = self.results.get(k)
            # Changed in place since, as an activation may do; or without values, in a trace.
            known = saved is not None and saved.tensor._version == saved.version and type(saved.tensor) is Tensor
            if known and not self._close(again, saved.tensor):  # type: ignore[union-attr]
                return False
        return True

    def _close(self, again: Tensor, first: Tensor) -> bool:
        """Return whether two outputs are the same but for rounding; rows that are not finite are not compared."""
        if again.shape != first.shape:
            return False
        if not first.numel():
            return True
        rows, expected = (t.double().reshape(len(t), -1) for t in (again, first))
        scale = expected.abs().amax(1)
        scale = torch.maximum(scale, scale.nanmedian()).unsqueeze(1)
        low = first.dtype in (torch.bfloat16, torch.float16) or self.call.autocast[1]
        return not bool(((rows - expected).abs() > (5e-2 if low else 1e-3) * scale).any())

    def check_alone(self, fallback: Fallback) -> None:
        """That one example alone has the outputs that it had in the batch, of copies of it.

        NoRuleError or UnsupportedError where not: its gradient alone would be something else. Notes in ``fallback``
        what cannot be run a second time.
        """
        if fallback.unrepeatable:
            return
        leaves = self.given()
        with torch.no_grad(), _replay(), without_side_effects(self.module):
            params = {n: p.detach() for n, p in self.trained.items()}
            alone = self.call.again(params, leaves, [leaves[k][:1] for k in self.call.batched])
        differs = False
        for k, saved in self.results.items():
            together, one = saved.tensor, alone[k]
            if one.shape != (1, *together.shape[1:]):
                raise NoRuleError(f"{self.name} has no rule, and hides which example is which.", self.params)
            differs |= not self._close(one, together[:1])
        if differs and self._agrees(self._whole_again()):
            raise self._mixed()
        fallback.unrepeatable |= differs

    def _mixed(self) -> UnsupportedError:
        return UnsupportedError(
            f"{self.name} has no rule, and its output for an example depends on the others in the batch, so clipping "
            "its gradient does not bound its influence; treat examples apart in it."
        )

    def rows(self, index: Tensor, dtype: torch.dtype) -> ModuleUse:
        leaves = [
            leaf.index_select(0, index) if k in self.call.batched else leaf for k, leaf in enumerate(self.given())
        ]
        use = type(self)(self.call, self.trained, leaves)
        use.versions, use.dtype = self.versions, dtype
        for k, g in self.grads.items():
            use.set_grad(k, g.index_select(0, index).to(dtype))
        if self.part is not None and self.grads:
            # The graph cannot be run in another precision; what it gives is finite or is left out.
            use._cache = {p: self.grad_sample(p).index_select(0, index).to(dtype) for p in self.params}
        return use

    def stash_bytes(self) -> int:
        saved = sum(leaf.tensor.nbytes for leaf in self.leaves if isinstance(leaf, Saved))
        return saved + sum(g.nbytes for g in self.grads.values())


def _cast(value: Any, dtype: torch.dtype) -> Any:
    return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value


def in_dtype(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    """The module itself, or a float64 copy of it where the gradients are float64 and its frozen parts are not."""
    tensors = [t for t in [*module.parameters(), *module.buffers()] if t.is_floating_point()]
    if dtype != torch.float64 or all(t.dtype == dtype for t in tensors):
        return module
    return copy.deepcopy(module).to(dtype)
