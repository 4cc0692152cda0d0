"""Recorded calls of a module: what has to be known of it before, and the tape that runs along."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.nn.utils.rnn import PackedSequence

from dpcore.distributed import Ranks
from dpcore.errors import UnsupportedError
from dpcore.example_isolation.check import IsolationCheck
from dpcore.example_isolation.loss import LossCheck
from dpcore.gathering import Gathering, gathering_of
from dpcore.grad_sample import mean_loss
from dpcore.grad_sample.backward_passes import BackwardPasses
from dpcore.microbatch.layout import Layout
from dpcore.microbatch.looks import looks
from dpcore.rerun.side_effects import tensors_in
from dpcore.rules import cross_entropy
from dpcore.rules.custom import custom_fallbacks
from dpcore.tape.tape import Tape
from dpcore.tree import flatten, leaves_of, unflatten
from dpcore.validators.module_validator import batch_norm_error, batch_norms, mixes_examples

Call = Callable[..., Any]
Given = tuple[tuple[Any, ...], dict[str, Any]]
"""Arguments of a call of the module: by place, and by name."""
Found = tuple[tuple[Any, ...], Given, int]
"""A kind of batches, a batch of that kind, and how many examples it has."""


class ForwardPasses:
    """Records calls of ``module`` for the trained parameters ``names``; ``backward`` is told what is reached.

    ``group``: rows of an example.
    """

    def __init__(
        self,
        module: nn.Module,
        names: dict[Parameter, str],
        mean_loss: bool,
        losses: LossCheck,
        backward: BackwardPasses,
        group: int,
    ) -> None:
        self.count = 0
        """How many calls were recorded."""
        self._module = module
        self._names = names
        self._mean_loss = mean_loss
        self._losses = losses
        self._backward = backward
        self.group = group
        self._layout = Layout(module, custom_fallbacks(module))
        self._kinds: set[tuple[Any, ...]] = set()
        self._batch_norms = batch_norms(module)
        self.isolation = IsolationCheck(module, names, self._layout, group)

    def check_batch_norms(self) -> None:
        """Raise UnsupportedError where a pass would put the batch's statistics into buffers, without noise.

        It would do so without gradients, too.
        """
        for name, norm in self._batch_norms.items():
            if mixes_examples(norm):
                raise batch_norm_error(f"Module {name!r}", norm)

    @property
    def _gathering(self) -> Gathering | None:
        return gathering_of(self._module)

    @property
    def _ranks(self) -> Ranks | None:
        ranks = getattr(self._module, "ranks", None)
        return ranks if isinstance(ranks, Ranks) and ranks.sharded else None

    @property
    def sharded(self) -> bool:
        """Whether all ranks have to run the module together."""
        return self._ranks is not None

    def record(self, call: Call, given: Given, batch_size: int, name: str) -> Any:
        """Return what ``call`` of the module's method ``name`` returns for ``given``, recorded."""
        parts = None if self._ranks is None else self._ranks.parts
        if parts is not None:
            parts.agree_on_examples(leaves_of(given))
        tape, output = self._layout.attempt(
            lambda: self._pass(call, given, batch_size, name),
            None if self.sharded else lambda: self._look_again(call, given, batch_size),
        )
        if self._mean_loss and tape.rounds:
            mean_loss.install()
            leaves = leaves_of(given)  # whose gradients would be too large
            of_leaf = any(isinstance(v, Tensor) and v.requires_grad and v.is_leaf for v in leaves)
            if not of_leaf:
                mean_loss.may_start_with_length(tape)
        if parts is not None:
            parts.agree_on_losses(leaves_of(output))
        cross_entropy.mark(leaves_of(output))
        return output

    def _pass(self, call: Call, given: Given, batch_size: int, name: str) -> tuple[Tape, Any]:
        """Run a recorded call: its tape, and what was returned."""
        kind, due = self._prepare(call, given, batch_size, name)
        self.count += 1
        # A row's share in a mean loss, or in a sum, becomes its share in the mean over its example's rows.
        scale = (batch_size if self._mean_loss else 1.0) / self.group
        tape = self._layout.tape(self._names, batch_size, scale)
        tape.number, tape.on_fire, tape.on_again = self.count, self._backward.reach, self._again
        tape.drops_activations = self._layout.drops_activations
        tape.inputs = [leaf for leaf in leaves_of(given) if isinstance(leaf, Tensor)]
        if not batch_size and not self._layout.learnt:
            output = _of_nothing(call, given)  # on all ranks, of which none has shown what has no rule
            if self._gathering is not None:
                self._gathering.let_go()
            return tape, output
        if self._gathering is not None:
            self._gathering.kept.begin_pass()
        with self._layout.recording(tape):
            output = call(*given[0], **given[1])
        if self.isolation.enabled and not self.sharded:
            mean_loss.install()
            self._losses.expect(kind, due, tensors_in(output), batch_size)
        return tape, output

    def _again(self, tape: Tape) -> None:
        self._backward.check_latest(tape, self.count)

    def _prepare(self, call: Call, given: Given, batch_size: int, name: str) -> tuple[Any, bool]:
        """Before a batch: finds what has no rule, and whether examples are kept apart, where either is due.

        Returns the kind of the batch, and whether it was checked.
        """
        leaves = leaves_of(given)
        kind = (
            name,
            *(
                (leaf.shape[1:], leaf.dtype) if isinstance(leaf, Tensor) else leaf
                for leaf in leaves
                if isinstance(leaf, bool | str) or (isinstance(leaf, Tensor) and leaf.dim())
            ),
        )
        self._learn(kind, call, given, batch_size)
        # The passes of a sharded module exchange parameters: all ranks would have to make the same experiments.
        if self.sharded or not self.isolation.due(kind, batch_size):
            return kind, False
        run = lambda batch: call(*batch[0], **batch[1])  # noqa: E731
        self.isolation.check(kind, run, given, batch_size, outputs=name == "forward")
        return kind, True

    def _learn(self, kind: tuple[Any, ...], call: Call, given: Given, batch_size: int) -> None:
        """Finds what has no rule, before the first batch of a kind."""
        found: Iterable[Found] = [(kind, given, batch_size)] if batch_size > 0 and kind not in self._kinds else []
        if self.sharded:
            # Their looks gather parameters: where one rank looked once more than another, both would wait for ever.
            found = _found_together(self._module.ranks, [*found])  # type: ignore[arg-type]
        for kind, batch, count in found:
            self._look(call, batch, count)
            if self._ranks is not None:  # which gather for them together
                self._ranks.agree({"the layers without a rule": sorted(self._layout.fallbacks)})
            self._kinds.add(kind)
        if self._ranks is not None and self._ranks.parts is not None:
            self._check_by_rules()

    def _check_by_rules(self) -> None:
        """Refuse what is formed of more than the ranks' parts."""
        if self._layout.fallbacks:
            raise UnsupportedError(
                f"{', '.join(self._layout.fallbacks)} has no rule and would be run again example by example, for which "
                "the ranks' parts are not enough; with tensor parallelism every trained layer must be of a kind with a "
                "rule. Use fully_shard or DifferentiallyPrivateDistributedDataParallel instead."
            )
        if read := self._gathering and [*self._gathering.waiting]:
            raise UnsupportedError(
                f"{', '.join(sorted(self._names[param] for param in read))} is used by way of what the model computes "
                "from it alone (a normalised weight, say), whose gradient needs a parameter's numbers when it is no "
                "longer whole; with fully_shard beside tensor parallelism layers may transpose, scale or look up their "
                "parameters, no more. Use fully_shard or DifferentiallyPrivateDistributedDataParallel instead."
            )

    def _look_again(self, call: Call, given: Given, batch_size: int) -> None:
        """Look at all examples of a batch that has led to a part of the model that is not known."""
        self._look(call, given, batch_size, again=True)
        self.isolation.begin_anew()

    def _look(self, call: Call, given: Given, batch_size: int, again: bool = False) -> None:
        run = lambda batch: call(*batch[0], **batch[1])  # noqa: E731
        of = looks(self._module, run, given, batch_size, again, self.group)
        self._layout.learn(self._names, *of, again=again)


@torch.no_grad()
def _of_nothing(call: Call, given: Given) -> Any:
    """Return what a call on no examples returns, as ends of the graph, which may be changed in place."""
    leaves, structure = flatten(call(*given[0], **given[1]))
    ends = [isinstance(leaf, Tensor) and leaf.is_floating_point() for leaf in leaves]
    with torch.enable_grad():
        found = [leaf.requires_grad_().clone() if end else leaf for leaf, end in zip(leaves, ends, strict=True)]
    return unflatten(structure, found)


def _found_together(ranks: Ranks, mine: list[Found]) -> Iterator[Found]:
    """Yield the new kinds of all ranks, each with the batch of the first rank that has found it.

    Batches of one kind may tell a look different things: an empty one passes for a mask of positions.
    """
    if not ranks.largest(len(mine)):
        return
    kinds = ranks.gather([kind for kind, _, _ in mine])
    firsts = {kind: rank for rank, (kind, *_) in reversed([(r, k) for r, k in enumerate(kinds) if k])}
    for kind, rank in sorted(firsts.items(), key=lambda one: one[1]):
        values: Any = None
        if rank == ranks.rank:
            (_, given, batch_size), *_ = mine
            leaves, structure = flatten(given)
            here = [isinstance(leaf, Tensor) and leaf.device.type != "cpu" for leaf in leaves]
            values = unflatten(structure, [_on("cpu", leaf) for leaf in leaves]), here, batch_size
        given, here, batch_size = ranks.share(values, rank)
        leaves, structure = flatten(given)
        placed = [_on(ranks.device, leaf) if there else leaf for leaf, there in zip(leaves, here, strict=True)]
        yield kind, unflatten(structure, placed), batch_size


def _on(device: Any, leaf: Any) -> Any:
    return leaf.detach().to(device).requires_grad_(leaf.requires_grad) if isinstance(leaf, Tensor) else leaf


def batch_brought_first(call: Call, given: Given) -> tuple[Call, Given]:
    """Return a call with time-first inputs [T, B, ...] as one with batch-first inputs: the module still gets its own.

    UnsupportedError where its inputs have no batch in the second dimension.
    """

    def swap(value: Any) -> Any:
        leaves, structure = flatten(value)
        return unflatten(structure, [v.transpose(0, 1) if isinstance(v, Tensor) and v.dim() > 1 else v for v in leaves])

    if any(isinstance(value, PackedSequence) for value in (*given[0], *given[1].values())):
        raise UnsupportedError("A PackedSequence has no first dimension to speak of; use batch_first=True.")
    if any(isinstance(leaf, Tensor) and leaf.dim() > 1 and not len(leaf) for leaf in flatten(given)[0]):
        raise UnsupportedError(
            "An input has no time steps, and may be an empty batch that was cut in the wrong dimension; with "
            "batch_first=False transpose batches in the loop, not in the loader's collate_fn."
        )

    def swapped(*args: Any, **kwargs: Any) -> Any:
        return call(*swap(args), **swap(kwargs))

    return swapped, (swap(given[0]), swap(given[1]))
