"""Embeddings whose vectors are averaged or summed over the positions right away: the vectors are never formed.

A batch of 512 texts of 256 tokens is 8 MB of vectors that are written only to be read once. Where the run of the model
on copies of an example has shown that nothing but a mean or sum over the positions ever sees a lookup, it is deferred:
the model gets a placeholder (NaN, one value in memory), and the mean or sum is one pass over the table's rows. Should
anything else come across the placeholder after all, the vectors are formed and take its place. What cannot be seen
(a scripted function, ``torch.vmap``, an autograd function's inputs) is found out by the gradient that reaches the
placeholder, and the batch is run again with vectors.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.nn import functional as F

from dpcore.tape.uses import Recorder
from dpcore.tree import flatten, unflatten

_MEANS = (torch.mean, Tensor.mean)
_SUMS = (torch.sum, Tensor.sum)
_SHAPES = {
    Tensor.dim,
    Tensor.size,
    Tensor.numel,
    Tensor.__len__,
    *(getattr(Tensor, name).__get__ for name in ("shape", "ndim", "dtype", "device")),
}
"""Questions that may be asked of a placeholder."""


class SeenOtherwise(Exception):
    """A placeholder was used other than by pooling, so that a gradient has reached it. The lookup is no longer
    deferred.
    """


@dataclass
class _Lookup:
    """A stand-in for weight[ids], ids [B, T]: a placeholder, or the vectors themselves where they are only watched."""

    stands: weakref.ref[Tensor]
    weight: Parameter
    ids: Tensor
    form: Callable[[], Tensor]
    pool: Callable[[Tensor, int], Tensor]
    formed: Tensor | None = None
    pooled: bool = False


class Lookups:
    """The deferred lookups of one tape, which is handed to every method: two objects that held each other would outlive
    the step.
    """

    def __init__(self) -> None:
        self.alive: dict[int, _Lookup] = {}

    def watch(self, output: Tensor, weight: Parameter) -> None:
        """While the model is probed: who sees the vectors ``output``?"""
        self._remember(output, weight, output, lambda: output, lambda total, count: total)

    @staticmethod
    def may_wait(tape: Recorder, weight: Parameter, ids: Tensor) -> bool:
        """Return whether a lookup may be deferred.

        It must be float32 on a CPU, in an engine's own pass, which sees all that is done with it.
        """
        return (
            tape.scale is None
            and tape.dropped is None
            and tape.averaged.get(weight, False)
            and not tape.probing
            and weight.dtype == torch.float32
            and weight.device.type == "cpu"
            and type(ids) is Tensor
            and ids.dim() == 2
            and ids.numel() > 0
            and torch.is_grad_enabled()
            and not torch.compiler.is_compiling()
        )

    def put_off(
        self,
        tape: Recorder,
        weight: Parameter,
        ids: Tensor,
        form: Callable[[], Tensor],
        pool: Callable[[Tensor, int], Tensor],
    ) -> Tensor:
        """A placeholder [B, T, d].

        ``form()`` gives the vectors; ``pool(total, count)`` records their sums ``total`` [B, d], divided by ``count``,
        and returns what to use.
        """
        averaged = tape.averaged

        def refuse(grad: Tensor | None) -> None:
            if grad is not None:
                averaged[weight] = False
                raise SeenOtherwise

        value = tape.attach(weight.new_full((), torch.nan).requires_grad_(), refuse)
        placeholder = value.expand(*ids.shape, weight.shape[1])
        self._remember(placeholder, weight, ids, form, pool)
        return placeholder

    def _remember(
        self,
        stands: Tensor,
        weight: Parameter,
        ids: Tensor,
        form: Callable[[], Tensor],
        pool: Callable[[Tensor, int], Tensor],
    ) -> None:
        key, alive = id(stands), self.alive
        alive[key] = _Lookup(weakref.ref(stands, lambda _: alive.pop(key, None)), weight, ids, form, pool)

    def _find(self, value: Any) -> _Lookup | None:
        found = self.alive.get(id(value)) if isinstance(value, Tensor) else None
        return found if found is not None and found.stands() is value else None

    def pooled(
        self, tape: Recorder, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Tensor | None:
        """The result of ``func``, where that is the only mean or sum over the positions of a deferred lookup."""
        lookup = _over_positions(func, args, kwargs) and self._find(args[0] if args else kwargs["input"])
        if not lookup:
            return None
        if tape.probing:
            # What is averaged twice is better formed: two uses of a parameter have cross terms.
            _note(tape, lookup, not lookup.pooled)
            lookup.pooled = True
            return None
        if lookup.pooled or lookup.formed is not None or not torch.is_grad_enabled():
            return None
        lookup.pooled = True
        ids, length = lookup.ids, lookup.ids.shape[1]
        # As F.embedding_bag calls it, whose questions about the arguments take longer.
        starts = torch.arange(0, ids.numel(), length, device=ids.device, dtype=ids.dtype)
        total = torch.embedding_bag(lookup.weight.detach(), ids.reshape(-1), starts, False, 0)[0]
        return lookup.pool(total, length if func in _MEANS else 1)

    def formed(self, tape: Recorder, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """(args, kwargs) with vectors in the place of placeholders."""
        if func in _SHAPES:
            return args, kwargs
        leaves, structure = flatten((args, kwargs))
        changed = False
        for i, leaf in enumerate(leaves):
            lookup = self._find(leaf)
            if lookup is None:
                continue
            if not tape.probing:
                leaves[i], changed = _form(lookup), True
            elif not _over_positions(func, args, kwargs):
                _note(tape, lookup, False)
        return unflatten(structure, leaves) if changed else (args, kwargs)

    def settle(self, tape: Recorder) -> None:
        """Placeholders that outlive the pass get their values: someone may look at them."""
        for lookup in list(self.alive.values()):
            stands = lookup.stands()
            if stands is not None and not tape.probing:
                values = F.embedding(lookup.ids, lookup.weight) if lookup.formed is None else lookup.formed
                stands.data = values.detach()
        self.alive.clear()


def _over_positions(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether this is a mean or sum over dimension 1 of 3, and nothing else."""
    if func not in _MEANS and func not in _SUMS:
        return False
    named = dict(zip(("input", "dim"), args, strict=False)) | kwargs
    if len(args) > 2 or set(named) != {"input", "dim"}:
        return False
    dim = named["dim"]
    return tuple(dim if isinstance(dim, list | tuple) else (dim,)) in ((1,), (-2,))


def _note(tape: Recorder, lookup: _Lookup, averaged: bool) -> None:
    """Note what a probe has seen; one other use outweighs all averages."""
    tape.averaged[lookup.weight] = averaged and tape.averaged.get(lookup.weight, True)


def _form(lookup: _Lookup) -> Tensor:
    if lookup.formed is None:
        with torch.enable_grad():
            lookup.formed = lookup.form()
    return lookup.formed
