"""The recording of training passes, so that an ordinary ``loss.backward()`` leaves what the clipped sum needs.

:class:`GradSampleHooks` does it on a module as it is, :class:`GradSampleModule` in a wrapper around it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.nn.utils.rnn import PackedSequence

from dpcore.distributed import Ranks
from dpcore.engine.uncompiled import refuse_compiled
from dpcore.errors import PrivacyError, UnsupportedError, warn_caller
from dpcore.example_isolation.check import IsolationCheck
from dpcore.example_isolation.loss import LossCheck
from dpcore.grad_sample import mean_loss
from dpcore.grad_sample.backward_pass import Iteration, owner_of, set_owner
from dpcore.grad_sample.empty_batches import EmptyBatches, newest_batch, outputs_of_none
from dpcore.grad_sample.entrances import Enter, Entrance, methods_that_run_layers
from dpcore.microbatch import ragged
from dpcore.microbatch.accumulator import weighted_sum
from dpcore.microbatch.layout import Layout
from dpcore.microbatch.looks import looks
from dpcore.microbatch.planner import choose
from dpcore.rerun.side_effects import tensors_in
from dpcore.rules import cross_entropy
from dpcore.rules.custom import custom_fallbacks
from dpcore.tape.checkpointing import CHECKPOINTING
from dpcore.tape.tape import Tape, started_with
from dpcore.tape.uses import Use
from dpcore.tree import flatten, unflatten
from dpcore.validators.module_validator import ModuleValidator, batch_norm_error, batch_norms, mixes_examples
from dpcore.validators.parameters import check_hooks, check_recordable


class AbstractGradSampleHooks:
    """The recorder of a module's gradients by example, which hands them to the optimiser.

    ``batch_first`` False: the module's inputs are [T, B, ...] (lengths and the like [B]). ``loss_reduction``: "mean" or
    "sum", what the user's loss does over the batch. ``ordinary_grad``: whether ``p.grad`` is the ordinary gradient of
    the batch between ``backward()`` and the optimiser's step; forming it costs about what an ordinary backward pass
    does for its weights. ``p.grad_sample`` is formed when it is read, in either case.
    """

    _module: nn.Module
    max_grad_norm: float | None = None
    """The bound that the fast-clipping classes were given; the optimiser's must be the same."""
    _reduction_seen = False
    """True once a loss was looked at."""
    loss_divided_by = 1
    """Divisor of the first loss beside its mean."""
    _rounding_told = False
    """True once a warning said that a mean loss is rounded after its division."""
    _passes = 0
    """How many forward passes were recorded."""
    _made = False
    """True once all attributes have their first values."""

    def _setup(
        self, m: nn.Module, *, batch_first: bool, loss_reduction: str, strict: bool, ordinary_grad: bool
    ) -> None:
        if loss_reduction not in ("mean", "sum"):
            raise ValueError(f"loss_reduction is {loss_reduction!r}; it must be 'mean' or 'sum'.")
        self.validate(m, strict=strict)
        refuse_compiled(m)
        check_recordable(m)
        self._module = m
        self.loss_reduction = loss_reduction
        self.batch_first = batch_first
        self.ordinary_grad = ordinary_grad
        self.trained = {n: p for n, p in m.named_parameters() if p.requires_grad}
        for name, param in self.trained.items():
            if owner_of(param) is not None:
                raise PrivacyError(
                    f"Parameter {name} is recorded by another wrapper already; its gradients would be clipped in two "
                    "places. Use that wrapper, or call its cleanup() or to_standard_module() first."
                )
        self._names = {p: n for n, p in self.trained.items()}
        self.hooks_enabled = True
        self.grad_accumulation_allowed = True
        self._iterations: list[Iteration] = []
        self._last: list[Iteration] = []
        self._empty = EmptyBatches()
        self._firing: dict[int, list[Tape]] = {}
        """Tapes that were reached, by the backward pass under way. A pass that failed stays here."""
        self._layout = Layout(m, custom_fallbacks(m))
        self._kinds: set[tuple[Any, ...]] = set()
        self.isolation = IsolationCheck(m, self._names, self._layout)
        self.losses = LossCheck(loss_reduction)
        # Gradients that were formed here or released by the optimiser, and their versions: any other in p.grad is
        # an ordinary one, of an operation that no rule has seen.
        self._own: dict[Parameter, tuple[Tensor, int]] = {}
        self._ordinary: set[Parameter] = set()
        """Parameters in whose p.grad is the ordinary gradient of a batch, formed here."""
        self._parts = _parts(m)
        self._batch_norms = batch_norms(m)
        for param in self.trained.values():
            set_owner(param, self)
        self._made = True

    # ---- recording

    def _open_entrances(self, hooks: Callable[[], AbstractGradSampleHooks | None]) -> None:
        """From now on calls of the module as it is are recorded while ``hooks()`` is there."""

        def enter() -> Enter | None:
            return None if (alive := hooks()) is None else alive._enter

        names = ("forward", *methods_that_run_layers(self._module))
        for name in names:
            Entrance(self._module, name, enter).put()

    def _enter(self, name: str, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """``call(*args, **kwargs)``, recorded as a pass of its own where it is none within another one."""
        tape: Any = CHECKPOINTING.tape
        within = CHECKPOINTING.is_open and (tape is None or tape.parameters is self._names)
        return call(*args, **kwargs) if within else self._run(call, args, kwargs, name)

    def _run(
        self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], name: str = "forward"
    ) -> Any:
        """``call(*args, **kwargs)`` of the module's method ``name``, recorded where it is a training pass."""
        for name, norm in self._batch_norms.items():
            # Without gradients, too: the pass would put the batch's statistics into buffers, without noise.
            if mixes_examples(norm):
                raise batch_norm_error(f"Module {name!r}", norm)
        if not (self._module.training and torch.is_grad_enabled() and self.hooks_enabled):
            return call(*args, **kwargs)
        if torch.compiler.is_compiling():
            raise UnsupportedError(
                "torch.compile cannot see through the recording of gradients by example; leave the private module "
                "uncompiled."
            )
        if self.trained and owner_of(next(iter(self.trained.values()))) is not self:
            self._record_as_copy()
        if not self.batch_first:
            call, args, kwargs = _batch_brought_first(call, args, kwargs)
        batch_size = ragged.batch_size(self._module, (args, kwargs))
        if not batch_size and not self._sharded:
            return self._run_empty(call, args, kwargs)
        tape, output = self._layout.attempt(
            lambda: self._pass(call, args, kwargs, batch_size, name),
            None if self._sharded else lambda: self._look_again(call, args, kwargs, batch_size),
        )
        if batch_size == 0:
            # Nothing may flow back from an empty batch, yet it is a step.
            self._note_empty()
        if self.loss_reduction == "mean" and tape.rounds:
            mean_loss.install()
            given = flatten((args, kwargs))[0]  # whose gradients would be too large
            tape.may_start_with_length = not any(isinstance(v, Tensor) and v.requires_grad and v.is_leaf for v in given)
        cross_entropy.mark(flatten(output)[0])
        return output

    def _record_as_copy(self) -> None:
        """Make this copy (by copy.deepcopy or pickle) the recorder of its own parameters.

        PrivacyError where it forms no ordinary gradients: whatever trained it would do nothing.
        """
        if not self.ordinary_grad:
            raise PrivacyError(
                "This is a copy of a private module, and no private optimizer takes its gradients: training it would "
                "do nothing. Call to_standard_module() on the copy and make that one private, or train it without "
                "privacy; for evaluation call eval()."
            )
        self.forget()  # passes of the original's
        for param in self.trained.values():
            set_owner(param, self)

    def _pass(
        self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], batch_size: int, name: str
    ) -> tuple[Tape, Any]:
        """A recorded call of the module's method ``name``: the tape and what was returned."""
        kind, due = self._prepare(call, args, kwargs, batch_size, name)
        scale = float(batch_size) if self.loss_reduction == "mean" else 1.0
        self._passes += 1
        tape = self._layout.tape(self._names, batch_size, scale)
        tape.number, tape.on_fire, tape.on_again = self._passes, self._fired, self._check_latest
        tape.drops_activations = self._layout.drops_activations
        tape.inputs = [leaf for leaf in flatten((args, kwargs))[0] if isinstance(leaf, Tensor)]
        with self._layout.recording(tape):
            output = call(*args, **kwargs)
        if self.isolation.enabled and not self._sharded:
            mean_loss.install()
            self.losses.expect(kind, due, tensors_in(output), batch_size)
        return tape, output

    @property
    def _sharded(self) -> bool:
        """Whether all ranks have to run the module together."""
        ranks = getattr(self._module, "ranks", None)
        return isinstance(ranks, Ranks) and ranks.sharded

    def _see_reduction(self, divisor: float, examples: int) -> None:
        """Warn once where the first loss shows that it is reduced otherwise than ``loss_reduction`` says."""
        self._reduction_seen = True
        reduction = {1.0: "sum", float(examples): "mean"}.get(round(divisor, 3))
        if reduction is None:
            divisor /= examples if self.loss_reduction == "mean" else 1
            self.loss_divided_by = round(divisor) if math.isclose(divisor, round(divisor), rel_tol=1e-5) else 1
        elif reduction != self.loss_reduction:
            wrong = "large" if reduction == "sum" else "small"
            warn_caller(
                f"The loss is the {reduction} over the batch, and loss_reduction is {self.loss_reduction!r}: every "
                f"gradient is too {wrong} by the batch's length before it is clipped. Pass "
                f"loss_reduction={reduction!r}, or reduce the loss by its {self.loss_reduction}.",
            )

    def _run_empty(self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an empty batch, from which nothing flows back to the parameters and which yet is a step.

        Its outputs are the graph's ends. (Sharded modules take the other way: their ranks gather parameters in the
        backward pass, too.)
        """
        output = outputs_of_none(self._module, call, args, kwargs)
        noted = self._note_empty()

        def arrived(gradient: Tensor) -> None:
            iteration = Iteration([], 0)
            if self._empty.is_new(noted, torch._C._current_graph_task_id()):
                self._iterations.append(iteration)
            if self.ordinary_grad:
                self._form_ordinary_gradients(iteration)

        leaves, structure = flatten(output)
        for i, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor) and leaf.is_floating_point():
                leaves[i] = leaf.detach().requires_grad_()
                leaves[i].register_hook(arrived)
        return unflatten(structure, leaves)

    def _note_empty(self) -> Any:
        """Note a call on an empty batch, which becomes a step by a backward pass or, without one, when it is taken."""
        return self._empty.note(newest_batch(self))

    def _fired(self, tape: Tape) -> None:
        """A backward pass has reached ``tape`` for the first time; all that it reaches are one gradient per example."""
        task = torch._C._current_graph_task_id()
        if any(tape in tapes for other, tapes in self._firing.items() if other != task):
            raise PrivacyError(
                "A backward pass went through a graph in which another one had failed or is still under way (a hook "
                "that calls torch.autograd.grad, say): the gradients of both would be added up. Run the forward pass "
                "again, and take no gradients within a backward pass."
            )
        if self.losses.divided is not None and not self._reduction_seen:
            self._see_reduction(*self.losses.divided)
        if task not in self._firing:
            self._firing[task] = []
            torch.autograd.Variable._execution_engine.queue_callback(functools.partial(self._end_of_backward, task))
        self._firing[task].append(tape)
        divided = self.loss_reduction == "mean" and started_with() == 1.0 < tape.batch_size
        if divided and tape.rounds and not self._rounding_told:
            self._rounding_told = True
            warn_caller(
                "The loss is divided by the batch's length before its gradient is rounded to half precision, so one "
                "example more or less changes the rounding of all others (docs/privacy.md). Compute it in float32 "
                "and from the module's outputs alone, and call its backward(); or sum the loss and pass "
                'loss_reduction="sum".'
            )

    def _check_latest(self, tape: Tape) -> None:
        """Refuse to run a checkpointed function of ``tape`` again after a pass of another batch.

        What the module has kept of that batch in its attributes would go into the gradients of this one's examples,
        and no clipping bounds that. Passes that one backward pass reaches are one gradient per example.
        """
        task = torch._C._current_graph_task_id()
        reached = {t.number for t in self._firing.get(task, ())}
        if not reached.issuperset(range(tape.number + 1, self._passes + 1)):
            raise UnsupportedError(
                "A backward pass would run a function under torch.utils.checkpoint again after another batch went "
                "through the private module, of which the module may have kept something; call backward() before the "
                "next forward pass, or leave checkpointing out."
            )

    def _end_of_backward(self, task: int) -> None:
        tapes = self._firing.pop(task)
        new = [tape for tape in tapes if tape.iteration is None]
        sizes = {tape.batch_size for tape in tapes}
        if len(sizes) > 1:
            _spend(tapes)
            raise PrivacyError(
                f"One loss went through batches of {sorted(sizes)} examples, so their gradients cannot be told "
                "apart by example: rows of the same number are one example. Give every call as many rows (as many "
                "made-up examples as real ones, torch.randn(len(x), ...), say), and one loss to all of them."
            )
        size = sizes.pop()
        iteration = Iteration([use for tape in new for use in tape.uses], size)
        iteration.inputs = [tensor for tape in new for tensor in tape.inputs]
        for tape in new:
            tape.iteration = iteration
        if new and size:
            self._iterations.append(iteration)
            if not self.grad_accumulation_allowed and sum(1 for i in self._iterations if i.batch_size) > 1:
                raise ValueError(
                    "A second backward pass came before optimizer.step(), and accumulation is forbidden; step after "
                    "every batch, use BatchMemoryManager for large ones, or call allow_grad_accumulation()."
                )
        if self.ordinary_grad:
            again = [i for i in self._iterations if i is not iteration and any(t.iteration is i for t in tapes)]
            for reached in [iteration, *again] if new else again:
                self._form_ordinary_gradients(reached)

    @torch.no_grad()
    def _form_ordinary_gradients(self, iteration: Iteration) -> None:
        """Add Σ_i g_i to ``p.grad``, divided by the batch's length for a mean loss.

        Where an earlier backward pass went through the same graph, add what this one adds.
        """
        for param, total in self._ordinary_gradients(iteration):
            if param.grad is not None and not self.owns(param):
                continue  # an ordinary gradient of the user's; the optimiser's step refuses it by name
            before = iteration.ordinary.get(param)
            iteration.ordinary[param] = total
            added = (total if before is None else total - before).to(param.dtype)
            param.grad = added if param.grad is None else param.grad + added
            self._ordinary.add(param)
            self.own(param)

    @torch.no_grad()
    def _ordinary_gradients(self, iteration: Iteration) -> Iterator[tuple[Parameter, Tensor]]:
        """Yield every parameter and Σ_i g_i, divided by the batch's length for a mean loss."""
        size = iteration.batch_size
        weight = 1.0 / max(size, 1) if self.loss_reduction == "mean" else 1.0
        choices = {choice.param: choice for choice in choose(iteration.uses)}
        for param in self.trained.values():
            dtype = torch.promote_types(param.dtype, torch.float32)
            total = torch.zeros(param.shape, dtype=dtype, device=param.device)
            if param in choices:
                weighted_sum(choices[param], torch.full((size,), weight, dtype=dtype, device=param.device), total)
            yield param, total

    def _prepare(
        self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], batch_size: int, name: str
    ) -> tuple[Any, bool]:
        """Before a batch: finds what has no rule, and whether examples are kept apart, where either is due.

        Returns the kind of the batch, and whether it was checked.
        """
        kind = (
            name,
            *(
                (leaf.shape[1:], leaf.dtype) if isinstance(leaf, Tensor) else leaf
                for leaf in flatten((args, kwargs))[0]
                if isinstance(leaf, bool | str) or (isinstance(leaf, Tensor) and leaf.dim())
            ),
        )
        self._learn(kind, call, args, kwargs, batch_size)
        # The passes of a sharded module exchange parameters: all ranks would have to make the same experiments.
        if self._sharded or not self.isolation.due(kind, batch_size):
            return kind, False
        run = lambda batch: call(*batch[0], **batch[1])  # noqa: E731
        self.isolation.check(kind, run, (args, kwargs), batch_size, outputs=name == "forward")
        return kind, True

    def _look_again(
        self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], batch_size: int
    ) -> None:
        """Look at all examples of a batch that has led to a part of the model that is not known."""
        self._look(call, args, kwargs, batch_size, again=True)
        self.isolation.begin_anew()

    def _learn(
        self, kind: tuple[Any, ...], call: Callable[..., Any], args: tuple[Any, ...], kwargs: Any, batch_size: int
    ) -> None:
        """Finds what has no rule, before the first batch of a kind."""
        new = batch_size > 0 and kind not in self._kinds
        if sharded := self._sharded:
            # The model can only be run by all ranks together, and none of them knows what the others have seen.
            new = self._module.ranks.largest(int(new)) > 0  # type: ignore[union-attr, operator]
        if not new:
            return
        self._look(call, args, kwargs, batch_size)
        self._kinds.add(kind)
        if self._layout.derived and sharded:
            raise UnsupportedError(
                f"{', '.join(sorted(self._layout.derived))} is used by way of what the model computes from it alone (a "
                "transposed or scaled weight, say), for which it is no longer whole; with fully_shard layers must use "
                "their parameters as they are. Use DifferentiallyPrivateDistributedDataParallel instead."
            )
        if self._layout.fallbacks and sharded:
            raise UnsupportedError(
                f"{', '.join(self._layout.fallbacks)} has no rule and would be run again example by example, for which "
                "its parameters are no longer whole; with fully_shard every trained layer must be of a kind with a "
                "rule. Use DifferentiallyPrivateDistributedDataParallel instead."
            )

    def _look(
        self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: Any, batch_size: int, again: bool = False
    ) -> None:
        of = looks(self._module, lambda batch: call(*batch[0], **batch[1]), (args, kwargs), batch_size, again)
        self._layout.learn(self._names, *of, again=again)

    # ---- what the optimiser takes

    def record_empty_batch(self) -> None:
        """Make an empty batch a step without running the module, which may not take one."""
        self._empty.note(object())

    @property
    def has_recorded(self) -> bool:
        """Return whether there was a training pass."""
        return self._passes > 0

    @property
    def has_passes(self) -> bool:
        """Whether there was a backward pass whose gradients no step has taken."""
        return bool(self._iterations)

    @property
    def given(self) -> list[Tensor]:
        """The tensors that the module was called with in the passes whose gradients no step has taken."""
        return [tensor for iteration in self._iterations for tensor in iteration.inputs]

    def take(self) -> Iterator[tuple[list[Use], int]]:
        """Yield (uses, batch size) of every backward pass since the last call, and forget them.

        Where ordinary gradients are asked for, ``p.grad_sample`` can still be read until ``zero_grad()``.
        """
        iterations, self._iterations = self._iterations, []
        iterations += [Iteration([], 0) for _ in range(self._empty.without_backward(bool(iterations)))]
        self._empty.take()
        self._last = iterations if self.ordinary_grad else []
        self._give_up()
        for iteration in iterations:
            iteration.ordinary.clear()
            yield iteration.remaining(), iteration.batch_size

    def forget(self) -> None:
        """Drops what earlier passes left behind."""
        self._iterations, self._last = [], []
        self._empty.clear()
        self._give_up()

    def _give_up(self) -> None:
        """Forgets backward passes that failed."""
        for tapes in self._firing.values():
            _spend(tapes)
        self._firing = {}

    def drop_gradients(self) -> None:
        """Drop the per-sample gradients, as ``zero_grad()`` does.

        An empty batch at hand stays a step, whether ``zero_grad()`` comes before or behind the module's call.
        """
        self._iterations, self._last = [], []
        self._empty.drop()

    def own(self, param: Parameter) -> None:
        """Record that ``param.grad`` is ours; a later change will be noticed."""
        assert param.grad is not None
        self._own[param] = (param.grad, param.grad._version)

    def records(self, param: Parameter) -> bool:
        """Return whether this is a trained parameter of the module."""
        return param in self._names and owner_of(param) is self

    def release(self, param: Parameter) -> None:
        """Record that ``param.grad`` is what a private step releases."""
        self._ordinary.discard(param)
        self.own(param)

    def is_released(self, param: Parameter) -> bool:
        """Return whether ``param.grad`` is none, or a released gradient as it was released."""
        return param.grad is None or (param not in self._ordinary and self.owns(param))

    def owns(self, param: Parameter) -> bool:
        """Return whether ``param.grad`` is none, or has the values that it had when :meth:`own` was called."""
        grad, version = self._own.get(param, (None, 0))
        if param.grad is None or (param.grad is grad and grad._version == version):
            return True
        if param.grad is grad and param in self._ordinary:
            self._own_what_is_as_formed()
        grad, version = self._own.get(param, (None, 0))
        return param.grad is grad and grad._version == version

    def _own_what_is_as_formed(self) -> None:
        """Own ordinary gradients that were written in place and have the values that were formed.

        clip_grad_norm_ that clips nothing multiplies by 1; who logs the norm calls it so.
        """
        formed: dict[Parameter, Tensor] = {}
        for iteration in self._iterations:
            for param, total in self._ordinary_gradients(iteration):
                formed[param] = formed[param] + total.to(param.dtype) if param in formed else total.to(param.dtype)
        for param in self._ordinary & formed.keys():
            if param.grad is self._own[param][0] and torch.equal(param.grad, formed[param]):
                self.own(param)

    def formed(self, param: Parameter) -> bool:
        """Return whether ``param.grad`` was formed or released here, whatever has become of it since."""
        return param.grad is not None and self._own.get(param, (None, 0))[0] is param.grad

    def check_unchanged(self) -> None:
        """PrivacyError where the module is no longer the one that was made private."""
        check_hooks(self.trained)
        parts = _parts(self._module)
        if len(parts) == len(self._parts) and all(a is b for a, b in zip(parts, self._parts, strict=True)):
            return
        now = dict(self._module.named_parameters())
        for name, param in now.items():
            if param.requires_grad and param not in self._names:
                how = "replaced" if name in self.trained else "added or unfrozen"
                raise PrivacyError(
                    f"Parameter {name} was {how} after make_private: its gradient would be neither clipped nor noised. "
                    "Make the module private again, from to_standard_module() and a new optimizer."
                )
        for name, param in self.trained.items():
            if name not in now:
                raise PrivacyError(
                    f"Parameter {name} was removed after make_private: the optimizer would go on releasing noise for "
                    "it. Make the module private again."
                )
            if not param.requires_grad:
                raise PrivacyError(
                    f"Parameter {name} was frozen after the engine was built; build a new engine for the new set."
                )
        raise PrivacyError(
            "A layer was added, removed or swapped after make_private; whether the new one keeps examples apart was "
            "never checked. Make the module private again, from to_standard_module()."
        )

    # ---- p.grad_sample

    def read_grad_sample(self, param: Parameter) -> Any:
        """[B, *param.shape]; a list of them where several batches have accumulated; None before a backward pass."""
        iterations = self._iterations or self._last
        if not iterations:
            return None
        values = [iteration.grad_sample(param) for iteration in iterations]
        return values[0] if len(values) == 1 else values

    def write_grad_sample(self, param: Parameter, value: Any) -> None:
        """Put ``value`` in the place of what was recorded.

        Args:
            param: A recorded parameter.
            value: A tensor [B, *param.shape], or a list of them, one per batch. None forgets all parameters' per-sample
                gradients, because a gradient without one of its parts is no gradient.

        Raises:
            ValueError: a tensor has another shape.
            PrivacyError: the numbers of examples are not those of the recorded batches.
        """
        if value is None:
            self.drop_gradients()
            return
        values = list(value) if isinstance(value, (list, tuple)) else [value]
        for tensor in values:
            if not isinstance(tensor, Tensor) or tensor.shape[1:] != param.shape:
                raise ValueError(
                    f"grad_sample of {self._names[param]} was set to a value that is not a tensor of shape "
                    f"[batch, {', '.join(map(str, param.shape))}]; give one gradient per example."
                )
        if not self._iterations:
            self._iterations = [Iteration([], len(tensor)) for tensor in values]
        if [len(tensor) for tensor in values] != [iteration.batch_size for iteration in self._iterations]:
            raise PrivacyError(
                f"grad_sample of {self._names[param]} has {[len(t) for t in values]} examples, the batch has "
                f"{[i.batch_size for i in self._iterations]}; rows of different examples would be clipped together."
            )
        for iteration, tensor in zip(self._iterations, values, strict=True):
            iteration.give(param, tensor)

    def set_grad_sample_to_none(self) -> None:
        """Forgets all per-sample gradients."""
        self.drop_gradients()

    def del_grad_sample(self) -> None:
        """Forgets all per-sample gradients."""
        self.drop_gradients()

    # ---- switches

    def forbid_grad_accumulation(self) -> None:
        """From now on a second backward pass before the optimiser's step raises ValueError."""
        self.grad_accumulation_allowed = False

    def allow_grad_accumulation(self) -> None:
        """Undoes :meth:`forbid_grad_accumulation`."""
        self.grad_accumulation_allowed = True

    def disable_hooks(self) -> None:
        """Stops recording; the optimiser then refuses the ordinary gradients that arise."""
        self.hooks_enabled = False

    def enable_hooks(self) -> None:
        """Resumes recording."""
        self.hooks_enabled = True

    def remove_hooks(self) -> None:
        """Ends the recording for good."""
        self.disable_hooks()
        for entrance in [value for value in vars(self._module).values() if isinstance(value, Entrance)]:
            entrance.remove()

    def cleanup(self) -> None:
        """Ends the recording and removes every trace from the parameters."""
        self.remove_hooks()
        self.forget()
        self._own.clear()
        for param in self.trained.values():
            if owner_of(param) is self:
                set_owner(param, None)
            vars(param).pop("summed_grad", None)

    def to_standard_module(self) -> nn.Module:
        """The module itself, without any trace of recording."""
        self._close()
        return self._module

    def _close(self) -> None:
        self.cleanup()

    @classmethod
    def is_supported(cls, module: nn.Module) -> bool:
        """Return whether the module treats examples apart, as far as its class tells."""
        return ModuleValidator.is_valid(module)

    @classmethod
    def validate(cls, module: nn.Module, *, strict: bool = False) -> list[Any]:
        """Reasons against the module; with ``strict`` the first one is raised."""
        return list(ModuleValidator.validate(module, strict=strict))


class GradSampleHooks(AbstractGradSampleHooks):
    """Records ``m`` where it is, without a wrapper: go on using ``m``, and call :meth:`cleanup` when done."""

    def __init__(
        self,
        m: nn.Module,
        *,
        batch_first: bool = True,
        loss_reduction: str = "mean",
        strict: bool = True,
        force_functorch: bool = False,
        ordinary_grad: bool = True,
    ) -> None:
        """``force_functorch`` is accepted and changes nothing: rules and vmap give the same gradients."""
        self._setup(
            m, batch_first=batch_first, loss_reduction=loss_reduction, strict=strict, ordinary_grad=ordinary_grad
        )
        self._open_entrances(lambda: self)  # which keep it as long as the module

    # What loops ask of a wrapper works on the hooks too.

    @property
    def training(self) -> bool:
        return self._module.training

    def parameters(self, recurse: bool = True) -> Iterator[Parameter]:
        return self._module.parameters(recurse)

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return self._module.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self._module.load_state_dict(*args, **kwargs)


class GradSampleHooksNoOp(AbstractGradSampleHooks):
    """Records nothing: the user's loop sets ``p.grad_sample`` itself, one gradient per example for every parameter."""

    def __init__(self, m: nn.Module, *, batch_first: bool = True, loss_reduction: str = "mean") -> None:
        self._setup(m, batch_first=batch_first, loss_reduction=loss_reduction, strict=True, ordinary_grad=False)
        self.hooks_enabled = False

    def owns(self, param: Parameter) -> bool:
        """True: what the loop leaves in ``p.grad`` is its own affair, and the step replaces it."""
        return True

    def is_released(self, param: Parameter) -> bool:
        """Return whether ``param.grad`` is none, or a released gradient: the loop's own is neither."""
        return AbstractGradSampleHooks.owns(self, param)

    def take(self) -> Iterator[tuple[list[Use], int]]:
        for iteration in self._iterations:
            missing = [name for name, param in self.trained.items() if param not in iteration.given]
            if missing and iteration.batch_size:
                raise PrivacyError(
                    f"{missing[0]} has no grad_sample; in the no_op mode the loop sets p.grad_sample of every trained "
                    "parameter before optimizer.step(), or its examples would be clipped by a part of their gradient."
                )
        yield from super().take()


def _batch_brought_first(
    call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    """A call with time-first inputs [T, B, ...] as one with batch-first inputs: the module still gets its own."""

    def swap(value: Any) -> Any:
        leaves, structure = flatten(value)
        return unflatten(structure, [v.transpose(0, 1) if isinstance(v, Tensor) and v.dim() > 1 else v for v in leaves])

    if any(isinstance(value, PackedSequence) for value in (*args, *kwargs.values())):
        raise UnsupportedError("A PackedSequence has no first dimension to speak of; use batch_first=True.")
    if any(isinstance(leaf, Tensor) and leaf.dim() > 1 and not len(leaf) for leaf in flatten((args, kwargs))[0]):
        raise UnsupportedError(
            "An input has no time steps, and may be an empty batch that was cut in the wrong dimension; with "
            "batch_first=False transpose batches in the loop, not in the loader's collate_fn."
        )

    def swapped(*args: Any, **kwargs: Any) -> Any:
        return call(*swap(args), **swap(kwargs))

    return swapped, swap(args), swap(kwargs)


def _spend(tapes: list[Tape]) -> None:
    """Mark tapes as used, so that nothing that was recorded on them is used again."""
    for tape in tapes:
        tape.iteration = Iteration([], 0)


def _parts(module: nn.Module) -> tuple[Any, ...]:
    """All submodules and all parameters, each followed by whether it is trained; to be compared by identity."""
    return (*module.modules(), *(part for param in module.parameters() for part in (param, param.requires_grad)))
