"""Any module: per-sample gradients by vmap over its own forward pass, or one example at a time where vmap cannot.

Slower than a rule, and used only where there is none: custom layers with parameters of their own, tables of positions
without a batch dimension (then the module around them).
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn import Parameter
from torch.nn.utils.rnn import PackedSequence

from dpcore.errors import NoRuleError, UnsupportedError
from dpcore.grad_sample.tape import Saved, Tape, Use
from dpcore.grad_sample.tree import flatten, unflatten

_REPLAYED = ContextVar("replayed", default=False)


@contextmanager
def _replay() -> Iterator[None]:
    token = _REPLAYED.set(True)
    try:
        yield
    finally:
        _REPLAYED.reset(token)


def is_replayed() -> bool:
    """Whether a module runs again for its per-sample gradients, where nothing of it is to be recorded."""
    return _REPLAYED.get()


@dataclass
class Fallback:
    """A module that is recorded as a whole, as a ``use`` (:class:`ModuleUse` where None). ``batched``: positions among
    its flattened arguments of the tensors with the batch first, None until they are known."""

    name: str
    module: nn.Module
    batched: frozenset[int] | None = None
    use: type[ModuleUse] | None = None


class ModuleUse(Use):
    """A call of ``module``; ``leaves`` are its flattened arguments, of which the tensors at ``batched`` have the batch
    first. One gradient [B, ...] per tensor output."""

    def __init__(
        self,
        name: str,
        module: nn.Module,
        trained: dict[str, Parameter],
        leaves: list[Any],
        spec: Any,
        batched: Sequence[int],
    ) -> None:
        self.name = name
        self.module = module
        self.trained = trained
        self.params = tuple(trained.values())
        self.spec = spec
        self.batched = list(batched)
        self.leaves = [Saved(leaf.detach()) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self.grads: dict[int, Tensor] = {}
        self._cache: dict[Parameter, Tensor] | None = None
        self.outputs: list[Any] = []

    def set_grad(self, output: int, gradient: Tensor | None) -> None:
        if gradient is not None:
            self.grads[output] = gradient
            self.grad = gradient
            self._cache = None

    def ghost_is_cheaper(self, param: Parameter) -> bool:
        return False

    def grad_sample(self, param: Parameter) -> Tensor:
        if self._cache is None:
            self._cache = self._all()
        return self._cache[param]

    def _all(self) -> dict[Parameter, Tensor]:
        leaves = [leaf.get(self.name) if isinstance(leaf, Saved) else leaf for leaf in self.leaves]
        params = {name: p.detach() for name, p in self.trained.items()}
        dtype = next(iter(self.grads.values())).dtype
        if dtype == torch.float64:
            params = {name: p.double() for name, p in params.items()}
        module = in_dtype(self.module, dtype)
        inputs = [leaves[k] for k in self.batched]
        positions = list(self.grads)

        def product(params: dict[str, Tensor], example: list[Tensor], outputs: list[Tensor]) -> Tensor:
            """⟨gradient at the outputs, outputs⟩ of one example: its gradient is the example's parameter gradient."""
            filled = list(leaves)
            for k, tensor in zip(self.batched, example, strict=True):
                filled[k] = tensor.unsqueeze(0)
            args, kwargs = unflatten(self.spec, filled)
            results, _ = flatten(functional_call(module, params, args, kwargs))
            return sum((results[k][0] * g).sum() for k, g in zip(positions, outputs, strict=True))

        gradients = [self.grads[k] for k in positions]
        with torch.enable_grad(), _replay():
            try:
                stacked = vmap(grad(product), (None, 0, 0))(params, inputs, gradients)
            except (RuntimeError, ValueError, NotImplementedError):
                each = [
                    grad(product)(params, [t[i] for t in inputs], [g[i] for g in gradients])
                    for i in range(len(gradients[0]))
                ]
                stacked = {name: torch.stack([e[name] for e in each]) for name in params}
        return {self.trained[name]: value.detach() for name, value in stacked.items()}

    def check_alone(self, outputs: Sequence[Any], count: int) -> None:
        """That one example alone gives the ``outputs`` that it had in the batch, of ``count`` copies of it. NoRuleError
        or UnsupportedError where not: its gradient alone would be something else."""
        leaves = [leaf.get(self.name) if isinstance(leaf, Saved) else leaf for leaf in self.leaves]
        for k in self.batched:
            leaves[k] = leaves[k][:1]
        args, kwargs = unflatten(self.spec, leaves)
        with torch.no_grad():
            alone, _ = flatten(self.module(*args, **kwargs))
        for together, one in zip(outputs, alone, strict=True):
            if not isinstance(together, Tensor) or not together.requires_grad or together.shape[:1] != (count,):
                continue
            if one.shape != (1, *together.shape[1:]):
                raise NoRuleError(f"{self.name} has no rule, and hides which example is which.", self.params)
            if not torch.allclose(one[0], together[0].detach(), 1e-2, 1e-4 * float(one.abs().max()), equal_nan=True):
                raise UnsupportedError(
                    f"{self.name} has no rule, and its output for an example depends on the others in the batch, so "
                    "clipping its gradient does not bound its influence; treat examples apart in it."
                )

    def rows(self, index: Tensor, dtype: torch.dtype) -> ModuleUse:
        leaves = []
        for k, leaf in enumerate(self.leaves):
            tensor = leaf.get(self.name) if isinstance(leaf, Saved) else leaf
            if k in self.batched:
                tensor = tensor.index_select(0, index)
            if isinstance(tensor, Tensor) and tensor.is_floating_point():
                tensor = tensor.to(dtype)
            leaves.append(tensor)
        use = type(self)(self.name, self.module, self.trained, leaves, self.spec, self.batched)
        for k, g in self.grads.items():
            use.set_grad(k, g.index_select(0, index).to(dtype))
        return use

    def stash_bytes(self) -> int:
        saved = sum(leaf.tensor.nbytes for leaf in self.leaves if isinstance(leaf, Saved))
        return saved + sum(g.nbytes for g in self.grads.values())


def in_dtype(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    """The module itself, or a float64 copy of it where the gradients are float64 and its frozen parts are not."""
    tensors = [t for t in [*module.parameters(), *module.buffers()] if t.is_floating_point()]
    if dtype != torch.float64 or all(t.dtype == dtype for t in tensors):
        return module
    return copy.deepcopy(module).to(dtype)


def taped_forward(tape: Tape, fallback: Fallback) -> Callable[..., Any]:
    """A forward for the module that records the whole call as one use."""
    module, name = fallback.module, fallback.name or "the model"
    previous = vars(module).get("forward")
    # ``forward`` names itself, a circle: with the tape in it, the batch would wait for Python's collector.
    current = weakref.ref(tape)

    def forward(*args: Any, **kwargs: Any) -> Any:
        tape = current()
        assert tape is not None, f"the forward pass of {name} is over"
        leaves, spec = flatten((args, kwargs))
        trained = {n: p for n, p in module.named_parameters() if tape.trains(p)}
        if any(isinstance(value, PackedSequence) for value in (*args, *kwargs.values())):
            raise NoRuleError(
                f"{name} has no rule for a PackedSequence; pack the sequences inside of the model, or pad them.",
                tuple(trained.values()),
            )
        before = torch.get_rng_state()
        restore_forward(module, previous)
        try:
            detached = {n: p.detach() for n, p in trained.items()}
            output = functional_call(module, detached, args, kwargs)
        finally:
            module.forward = forward
        if not torch.equal(before, torch.get_rng_state()):
            raise UnsupportedError(
                f"{name} has no rule and draws random numbers (dropout?), which cannot be drawn again for its "
                f"per-sample "
                "gradients; move the dropout out of it."
            )
        long = [k for k, v in enumerate(leaves) if isinstance(v, Tensor) and v.dim() and len(v) == tape.batch_size]
        batched = [k for k in long if fallback.batched is None or k in fallback.batched]
        use = (fallback.use or ModuleUse)(name, module, trained, leaves, spec, batched)
        results, out_spec = flatten(output)
        attached = []
        for k, result in enumerate(results):
            if not isinstance(result, Tensor) or not result.is_floating_point():
                attached.append(result)
                continue
            if not result.dim() or len(result) != tape.batch_size:
                attached.append(tape.forbid(result, use.params))
                continue

            def set_grad(grad: Tensor | None, k: int = k) -> None:
                use.set_grad(k, grad)

            attached.append(tape.attach(result, set_grad))
        tape.uses.append(use)
        use.outputs = attached if tape.probing else []
        return unflatten(out_spec, attached)

    return forward


def restore_forward(module: nn.Module, previous: Any) -> None:
    """Gives a module back the ``forward`` that was set on it before, None for its class's."""
    vars(module).pop("forward", None)
    if previous is not None:
        vars(module)["forward"] = previous


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
