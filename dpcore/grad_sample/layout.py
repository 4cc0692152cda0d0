"""Which modules need the fallback, found by running the model before the first batch of a kind.

With an odd number of copies of one example, an input whose first dimension is not the batch does not pass for one by
having the batch's length, here as in the real batch; and a parameter that receives a gradient was used by an
operation without a rule. Either way the module around it is recorded as a whole, and the model is run again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from dpcore.errors import NoRuleError, UnsupportedError
from dpcore.grad_sample.fallback import Fallback, ModuleUse, owner
from dpcore.grad_sample.tape import Tape
from dpcore.grad_sample.tree import flatten, unflatten


def copies(value: Any, batch_size: int, count: int) -> Any:
    """``count`` copies of the first example of a batch: of every tensor whose first dimension is ``batch_size``; zeros
    where the batch is empty.
    """
    leaves, structure = flatten(value)
    return unflatten(
        structure,
        [
            (leaf[:1] if batch_size else leaf.new_zeros(1, *leaf.shape[1:])).expand(count, *leaf.shape[1:]).contiguous()
            if isinstance(leaf, Tensor) and leaf.dim() and len(leaf) == batch_size
            else leaf
            for leaf in leaves
        ],
    )


def probe_size(value: Any, batch_size: int) -> int:
    """A number of examples that is neither the batch's nor any other dimension of the inputs, and hardly one of the
    model's: should it be, the real batch is refused with an error."""
    taken = {batch_size}.union(*(leaf.shape for leaf in flatten(value)[0] if isinstance(leaf, Tensor)))
    return next(n for n in (7, 11, 13, 17, 19, 23, 29, 31, 37, 41) if n not in taken)


def find_fallbacks(
    model: nn.Module, names: dict[Parameter, str], run: Callable[[int], Any], count: int, known: dict[str, Fallback]
) -> dict[str, Fallback]:
    """Modules by name to record as a whole; ``run(count)`` calls the model on that many examples. ``known`` are found
    already.

    UnsupportedError where even the whole model does not keep its batch first. Random state is left as it was.
    """
    modules = dict(model.named_modules())
    found = dict(known)
    with torch.random.fork_rng(devices=[]):
        while True:
            try:
                _check(run, names, count, found)
                return found
            except NoRuleError as error:
                name = owner(model, error.params, list(found))
                if name is None:
                    raise UnsupportedError(str(error)) from error
                found = {n: f for n, f in found.items() if name and not n.startswith(name + ".")}
                found[name] = Fallback(name, modules[name])


def _check(run: Callable[[int], Any], names: dict[Parameter, str], count: int, fallbacks: dict[str, Fallback]) -> None:
    tape = Tape(names, count, fallbacks=fallbacks)
    with torch.enable_grad(), tape:
        output = run(count)
    for use in tape.uses:
        if isinstance(use, ModuleUse):
            # What has the batch's length here and in the real batch has the batch first.
            fallback = next(f for f in fallbacks.values() if f.module is use.module)
            batched = frozenset(use.batched)
            fallback.batched = batched if fallback.batched is None else fallback.batched & batched
    outputs = [leaf for leaf in flatten(output)[0] if isinstance(leaf, Tensor) and leaf.requires_grad]
    if not outputs:
        return
    params = [p for p in names if p.requires_grad]
    wanted: list[Any] = [*params, *(edge for edge, _ in tape.forbidden)]
    ones = [torch.ones_like(o) for o in outputs]
    grads = torch.autograd.grad(outputs, wanted, ones, allow_unused=True)
    for (_, refuse), grad in zip(tape.forbidden, grads[len(params) :], strict=True):
        refuse(grad)
    raw = [p for p, g in zip(params, grads, strict=False) if g is not None]
    if raw:
        tape.refuse_raw(raw[0])
