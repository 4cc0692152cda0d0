"""Small functions of modules and tensors that programs take from Opacus."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

MONKEYPATCHED = ["grad_sample", "summed_grad"]


def has_trainable_params(module: nn.Module) -> bool:
    """Return whether a module has trained parameters of its own."""
    return requires_grad(module)


def requires_grad(module: nn.Module, *, recurse: bool = False) -> bool:
    """Return whether a module has trained parameters."""
    return any(p.requires_grad for p in module.parameters(recurse))


def parametrized_modules(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the parts that have parameters of their own, by name."""
    return ((n, part) for n, part in module.named_modules() if any(True for _ in part.parameters(recurse=False)))


def trainable_modules(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the parts that have trained parameters of their own, by name."""
    return ((n, part) for n, part in module.named_modules() if requires_grad(part))


def trainable_parameters(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the trained parameters, by name."""
    return ((n, p) for n, p in module.named_parameters() if p.requires_grad)


def clone_module(module: nn.Module) -> nn.Module:
    """Return a deep copy."""
    return copy.deepcopy(module)


def get_submodule(module: nn.Module, target: str) -> nn.Module:
    """Return the part of that name."""
    return module.get_submodule(target)


def are_state_dict_equal(sd1: dict[str, Tensor], sd2: dict[str, Tensor]) -> bool:
    """Return whether both hold the same numbers under the same names."""
    return sd1.keys() == sd2.keys() and all(torch.equal(value, sd2[name]) for name, value in sd1.items())


def is_batch_empty(batch: Any) -> bool:
    """Return whether a batch, or the first part of one, has length 0."""
    return len(batch if isinstance(batch, Tensor) else next(iter(batch))) == 0


def compute_seq_lengths(batch_sizes: Tensor) -> list[int]:
    """Return the lengths of packed sequences, the longest first."""
    sizes = batch_sizes.tolist()
    return [sum(size > i for size in sizes) for i in range(sizes[0])]


def calc_sample_norms_one_layer(param: Tensor) -> Tensor:
    """Return the [B] norms of [B, ...]."""
    return param.flatten(1).norm(2, dim=1) if param.dim() > 1 else param.abs()


def calc_sample_norms(named_params: Iterable[tuple[str, Tensor]], *, flat: bool = True) -> list[Tensor]:
    """Return the [B] norms of every tensor [B, ...]; with ``flat`` those of all together, in a list of one."""
    norms = [calc_sample_norms_one_layer(tensor) for _, tensor in named_params]
    return [torch.stack(norms).norm(2, dim=0)] if flat else norms


def sum_over_all_but_batch_and_last_n(tensor: Tensor, n_dims: int) -> Tensor:
    """Return a tensor without the dimensions between its first and its last ``n_dims``, over which it was summed."""
    between = tuple(range(1, tensor.dim() - n_dims))
    return tensor.sum(dim=between) if between else tensor


def unfold2d(input: Tensor, *, kernel_size: Any, padding: Any, stride: Any, dilation: Any) -> Tensor:
    """Return the windows of a convolution [B, C * kh * kw, windows], with padding by name or number."""
    if isinstance(padding, str):
        extra = [d * (k - 1) if padding == "same" else 0 for k, d in zip(kernel_size, dilation, strict=True)]
        sides = [side for e in reversed(extra) for side in (e // 2, e - e // 2)]
        input, padding = F.pad(input, sides), 0
    return F.unfold(input, kernel_size, dilation=dilation, padding=padding, stride=stride)


def get_grad_sample_modes(use_ew: bool = False) -> list[str]:
    """Return modes in which gradients by example can be taken."""
    return ["hooks", "functorch", *(["ew"] if use_ew else [])]


def check_torch_version_for_ew_sample() -> bool:
    """True: the mode is there with every version of torch."""
    return True
