"""A dynamic check that examples are treated apart, which no list of classes can give.

One example of a batch is changed. If the module's output for any other example moves, or a buffer ends up different,
then that example reaches others' gradients or the state, and no clipping of per-example gradients bounds its influence.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from dpcore.errors import PrivacyError
from dpcore.tree import flatten, unflatten

TOLERANCE = 1e-5


def check_isolation(module: nn.Module, *args: Any, **kwargs: Any) -> None:
    """Runs ``module(*args, **kwargs)`` twice, the second time with the first example replaced; batch size at least 2.

    Tensors whose first dimension equals the first tensor's are taken to be batched. The module and the random state are
    left as they were. PrivacyError names the first submodule that mixes examples, or the buffer that moved.
    """
    leaves, structure = flatten((args, kwargs))
    batch_size = next((len(leaf) for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim()), 0)
    if batch_size < 2:
        raise ValueError(f"The batch has {batch_size} examples; the check needs at least 2.")
    changed = [_replace_first(leaf) if _is_batched(leaf, batch_size) else leaf for leaf in leaves]
    buffers = {name: b.clone() for name, b in module.named_buffers()}
    first, state = _run(module, *unflatten(structure, leaves))
    _restore(module, buffers)
    second, changed_state = _run(module, *unflatten(structure, changed))
    _restore(module, buffers)
    for (name, kind, before), (_, _, after) in zip(first, second, strict=True):
        for a, b in zip(before, after, strict=True):
            if _is_batched(a, batch_size) and not _same(a[1:], b[1:]):
                raise PrivacyError(
                    f"{name or 'The module'} ({kind}) lets one example change the output of others, so clipping "
                    f"its gradient "
                    "does not bound its influence; use a layer that treats examples apart (GroupNorm for BatchNorm)."
                )
    for name, value in state.items():
        if not _same(value, changed_state[name]):
            raise PrivacyError(
                f"The buffer {name} depends on the examples and would be released without noise; switch its "
                f"tracking off."
            )


def _is_batched(value: Any, batch_size: int) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0 and len(value) == batch_size


def _replace_first(batch: Tensor) -> Tensor:
    """The batch with another first example: the others' values, reversed (valid token ids stay valid)."""
    changed = batch.clone()
    changed[0] = batch[1].flip(tuple(range(batch.dim() - 1))) if batch.dim() > 1 else batch[1]
    if batch.is_floating_point():
        changed[0] = 1.5 * changed[0] + 0.5
    return changed


def _same(a: Tensor, b: Tensor) -> bool:
    if not a.is_floating_point():
        return torch.equal(a, b)
    return torch.allclose(a, b, rtol=TOLERANCE, atol=TOLERANCE, equal_nan=True)


def _restore(module: nn.Module, buffers: dict[str, Tensor]) -> None:
    for name, buffer in module.named_buffers():
        buffer.copy_(buffers[name])


def _run(module: nn.Module, args: Any, kwargs: Any) -> tuple[list[tuple[str, str, list[Any]]], dict[str, Tensor]]:
    """Outputs of all submodules in the order in which they return, innermost first, and the buffers afterwards."""
    outputs: list[tuple[str, str, list[Any]]] = []
    hooks = []
    for name, child in module.named_modules():

        def keep(child: nn.Module, inputs: Any, output: Any, name: str = name) -> None:
            leaves = [leaf.detach().clone() if isinstance(leaf, Tensor) else leaf for leaf in flatten(output)[0]]
            outputs.append((name, type(child).__name__, leaves))

        hooks.append(child.register_forward_hook(keep))
    try:
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(0)
            module(*args, **kwargs)
    finally:
        for hook in hooks:
            hook.remove()
    return outputs, {name: b.clone() for name, b in module.named_buffers()}
