"""Snapshots of what extra passes through a model must leave as it was: buffers and generators of random numbers."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from dpcore.errors import PrivacyError
from dpcore.rerun.side_effects import SideEffects


def same_values(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors hold the same values, NaN being equal to NaN."""
    if a.shape != b.shape or a.layout != b.layout:
        return False
    return all(
        x.shape == y.shape and torch.allclose(x, y, rtol=0.0, atol=0.0, equal_nan=True)
        for x, y in zip(_parts(a), _parts(b), strict=True)
    )


def _parts(tensor: Tensor) -> tuple[Tensor, ...]:
    """Return the tensors that a sparse one (of a graph's edges, say) consists of; of any other itself."""
    if tensor.layout == torch.strided:
        return (tensor,)
    if tensor.layout == torch.sparse_coo:
        return tensor._indices(), tensor._values()
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return tensor.crow_indices(), tensor.col_indices(), tensor.values()
    return tensor.ccol_indices(), tensor.row_indices(), tensor.values()


class RandomNumbers:
    """The random numbers of torch (on the model's devices), numpy and Python, as they are now."""

    def __init__(self, model: nn.Module) -> None:
        self._torch = torch.get_rng_state()
        devices = {p.device for p in model.parameters() if p.device.type == "cuda"}
        self._cuda = [(device, torch.cuda.get_rng_state(device)) for device in devices]
        self._python = random.getstate()
        self._numpy = np.random.get_state()

    def same(self, other: RandomNumbers) -> bool:
        """Return whether no random number was drawn between the two."""
        pairs = [(self._torch, other._torch), *zip(dict(self._cuda).values(), dict(other._cuda).values(), strict=True)]
        return (
            all(torch.equal(a, b) for a, b in pairs)
            and self._python == other._python
            and all(np.array_equal(a, b) for a, b in zip(self._numpy, other._numpy, strict=True))
        )

    def restore(self) -> None:
        """Sets them back."""
        torch.set_rng_state(self._torch)
        for device, state in self._cuda:
            torch.cuda.set_rng_state(state, device)
        random.setstate(self._python)
        np.random.set_state(self._numpy)


def draw_on(count: int) -> None:
    """Draw ``count`` random numbers of each kind, so that a model that goes by them may take another way."""
    for _ in range(count):
        torch.rand(()), random.random(), np.random.random()


def _checksum(param: Tensor) -> Tensor:
    """The sum of a tensor's bits as integers: also a write through ``.data``, which leaves no version, changes it."""
    bits = param.detach().reshape(-1)
    return bits.view({1: torch.int8, 2: torch.int16, 4: torch.int32}.get(bits.element_size(), torch.int64)).sum()


class ModelState:
    """Buffers of a model, and which of its parameters were written."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._buffers = {
            (module, name): (buffer, buffer.detach().clone())
            for module in model.modules()
            for name, buffer in module._buffers.items()
            if buffer is not None
        }
        self._sums: dict[str, Tensor] = {}
        self._names = {module: name for name, module in model.named_modules()}

    def watch_parameters(self) -> None:
        """From now on :meth:`written` also looks at parameters (not at those of a sharded module, which have no memory
        of their own).
        """
        self._sums = {name: _checksum(p) for name, p in self.model.named_parameters()}

    def written(self) -> dict[str, Tensor]:
        """Buffers that are not as they were, by name, which then are so again.

        PrivacyError where a parameter was written.
        """
        for name, param in self.model.named_parameters():
            if name in self._sums and not torch.equal(_checksum(param), self._sums[name]):
                raise PrivacyError(
                    f"Parameter {name} is written in the forward pass, where neither clipping nor noise comes between "
                    "it and the examples. Do that in the training loop, after optimizer.step()."
                )
        found = {}
        for module in self.model.modules():
            for name, buffer in module._buffers.items():
                before, value = self._buffers.get((module, name), (None, None))
                if buffer is not None and (buffer is not before or value is None or not same_values(buffer, value)):
                    path = f"{self._names[module]}.{name}".lstrip(".")
                    found[path] = buffer.detach().clone()
        self.restore()
        return found

    @torch.no_grad()
    def restore(self) -> None:
        """Gives every buffer its object and its values back."""
        for (module, name), (buffer, value) in self._buffers.items():
            if not same_values(buffer, value):
                buffer.copy_(value)
            module._buffers[name] = buffer


class Before:
    """A model's buffers and attributes, what its forward hooks write to, and all random numbers, as they are now."""

    def __init__(self, model: nn.Module) -> None:
        self.state, self._numbers, self._effects = ModelState(model), RandomNumbers(model), SideEffects(model)

    def restore(self) -> None:
        """Gives all of them back."""
        self._effects.restore()
        self.state.restore()
        self._numbers.restore()


@contextmanager
def preserved(model: nn.Module) -> Iterator[ModelState]:
    """Whatever runs within leaves all that :class:`Before` keeps as it was."""
    before = Before(model)
    try:
        yield before.state
    finally:
        before.restore()


class _NoDropout(TorchFunctionMode):
    """Calls of dropout hand on their input, and attention does without its own."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _DROPOUTS:
            return args[0] if args else kwargs["input"]
        if func is F.scaled_dot_product_attention:
            args, kwargs = args[:4], {**kwargs, "dropout_p": 0.0, **dict(zip(("is_causal",), args[5:6], strict=False))}
        return func(*args, **kwargs)


_DROPOUTS = {
    *(F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout),
    *(torch.dropout, torch.feature_dropout, torch.alpha_dropout, torch.feature_alpha_dropout),
}


@contextmanager
def without_dropout(model: nn.Module) -> Iterator[None]:
    """No dropout within: of functions, of attention, and of recurrent layers, which have it as a number."""
    layers = [(m, m.dropout) for m in model.modules() if isinstance(m, nn.RNNBase)]
    for layer, _ in layers:
        layer.dropout = 0.0
    try:
        with _NoDropout():
            yield
    finally:
        for layer, dropout in layers:
            layer.dropout = dropout
