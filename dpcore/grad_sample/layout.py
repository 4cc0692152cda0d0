"""Which modules need the fallback and where layers see the batch, found by running the model before the first batch of
a kind.

With an odd number of copies of one example, an input whose first dimension is not the batch does not pass for one by
having the batch's length, here as in the real batch; and a parameter that receives a gradient was used by an
operation without a rule. Either way the module around it is recorded as a whole, and the model is run again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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


def probe_sizes(value: Any, batch_size: int) -> tuple[int, int]:
    """Two numbers of examples that are neither the batch's nor any other dimension of the inputs, and hardly both of
    them one of the model's: should they be, the real batch is refused with an error."""
    taken = {batch_size}.union(*(leaf.shape for leaf in flatten(value)[0] if isinstance(leaf, Tensor)))
    free = [n for n in (7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47) if n not in taken]
    return free[0], free[1]


class Layout:
    """What is known of a model's insides.

    ``fallbacks``: modules, by name, to record as a whole. ``recurrent``: its recurrent layers. For every parameter that
    was used, the dimensions, 0 or 1, in which its layer sees the batch: by themselves the lengths cannot tell, where a
    batch has as many examples as time steps.
    """

    def __init__(self, model: nn.Module, fallbacks: dict[str, Fallback]) -> None:
        self.model = model
        self.fallbacks = fallbacks
        self.recurrent = [m for m in model.modules() if isinstance(m, nn.RNNBase)]
        self._dims: dict[Parameter, set[int]] = {}
        self._probing = False

    def dims(self, param: Parameter, tape: Tape, x: Tensor, features: int) -> tuple[int, ...]:
        """Dimensions of x that may be the batch for the layer of ``param``; while probing, found by their length."""
        known = self._dims.setdefault(param, set())
        if self._probing:
            second = x.dim() > 1 + features and x.shape[0] != tape.batch_size == x.shape[1]
            known.add(1 if second else 0)
            return (1,) if second else (0,)
        if len(known) > 1 and x.dim() > 1 and x.shape[0] == x.shape[1]:
            raise UnsupportedError(
                f"{tape.name((param,))} is used on time-first and on batch-first inputs, and shape {tuple(x.shape)} is "
                "of equal lengths, so examples cannot be told from time steps; keep the batch first in both."
            )
        return tuple(sorted(known)) or (0,)

    def learn(self, names: dict[Parameter, str], run: Callable[[int], Any], counts: Sequence[int]) -> None:
        """Finds out about one kind of batch; ``run(count)`` calls the model on that many examples.

        UnsupportedError where even the whole model does not keep its batch first. Random state is left as it was.
        """
        modules = dict(self.model.named_modules())
        with torch.random.fork_rng(devices=[]):
            while True:
                try:
                    self._probing = True
                    self._check(run, names, counts[0])
                    self._probing = False
                    if any(1 in dims for dims in self._dims.values()):
                        # A second length makes it certain that it was the batch which was second.
                        self._check(run, names, counts[1])
                    return
                except NoRuleError as error:
                    name = owner(self.model, error.params, list(self.fallbacks))
                    if name is None:
                        raise UnsupportedError(str(error)) from error
                    kept = {n: f for n, f in self.fallbacks.items() if name and not n.startswith(name + ".")}
                    self.fallbacks = {**kept, name: Fallback(name, modules[name])}
                finally:
                    self._probing = False

    def _check(self, run: Callable[[int], Any], names: dict[Parameter, str], count: int) -> None:
        tape = Tape(names, count, layout=self)
        tape.probing = True
        with torch.enable_grad(), tape:
            output = run(count)
        for use in tape.uses:
            if isinstance(use, ModuleUse):
                # What has the batch's length here and in the real batch has the batch first.
                fallback = next(f for f in self.fallbacks.values() if f.module is use.module)
                batched = frozenset(use.batched)
                fallback.batched = batched if fallback.batched is None else fallback.batched & batched
                if type(use) is ModuleUse:
                    use.check_alone(use.outputs, count)
                use.outputs = []
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
