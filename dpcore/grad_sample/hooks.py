"""The recording of training passes, so that an ordinary ``loss.backward()`` leaves what the clipped sum needs.

:class:`GradSampleHooks` does it on a module as it is, :class:`GradSampleModule` in a wrapper around it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any
from weakref import WeakMethod

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from dpcore.errors import PrivacyError, UnsupportedError
from dpcore.example_isolation.loss import LossCheck
from dpcore.gathering import end_keeping, gathering_of
from dpcore.grad_sample.backward_pass import Iteration, owner_of, set_owner
from dpcore.grad_sample.backward_passes import BackwardPasses
from dpcore.grad_sample.empty_batches import ViewsOfNone, newest_batch, outputs_of_none
from dpcore.grad_sample.entrances import Enter, Entrance, methods_that_run_layers
from dpcore.grad_sample.forward_passes import ForwardPasses, batch_brought_first
from dpcore.grad_sample.ordinary_gradients import LoopsGradients, OrdinaryGradients
from dpcore.grad_sample.waiting import WaitingBatches
from dpcore.microbatch import ragged
from dpcore.privacy_unit import check_group, units_in
from dpcore.reduction import ModuleInParts
from dpcore.tape.checkpointing import CHECKPOINTING
from dpcore.tape.uses import Use
from dpcore.tree import flatten, unflatten
from dpcore.uncompiled import refuse_compiled, uncompiled
from dpcore.validators.module_validator import ModuleValidator
from dpcore.validators.parameters import check_recordable
from dpcore.validators.structure import Structure


class AbstractGradSampleHooks:
    """The recorder of a module's gradients by example, which hands them to the optimiser.

    ``batch_first`` False: the module's inputs are [T, B, ...] (lengths and the like [B]). ``loss_reduction``: "mean" or
    "sum", what the user's loss does over the batch. ``ordinary_grad``: whether ``p.grad`` is the ordinary gradient of
    the batch between ``backward()`` and the optimiser's step; forming it costs about what an ordinary backward pass
    does for its weights. ``p.grad_sample`` is formed when it is read, in either case. ``group``: how many rows that
    follow each other are one example (:mod:`dpcore.privacy_unit`).
    """

    _module: nn.Module
    max_grad_norm: float | None = None
    """The bound that the fast-clipping classes were given; the optimiser's must be the same."""
    _gradients_kind: type[OrdinaryGradients] = OrdinaryGradients
    _made = False
    """True once all attributes have their first values."""

    def _setup(
        self,
        m: nn.Module,
        *,
        batch_first: bool,
        loss_reduction: str,
        strict: bool,
        ordinary_grad: bool,
        group: int,
    ) -> None:
        if loss_reduction not in ("mean", "sum"):
            raise ValueError(f"loss_reduction is {loss_reduction!r}; it must be 'mean' or 'sum'.")
        group = check_group(group)
        self.validate(m, strict=strict)
        refuse_compiled(m)
        check_recordable(m)
        self._module = m
        self.loss_reduction = loss_reduction
        self.batch_first = batch_first
        self.ordinary_grad = ordinary_grad
        self.trained = {n: p for n, p in m.named_parameters() if p.requires_grad}
        for name, param in self.trained.items():
            if hasattr(param, "device_mesh"):
                raise UnsupportedError(
                    f"Parameter {name} is a DTensor, of which this rank holds a part; hand the module to "
                    "PrivacyEngine.make_private, which sums and releases the parts (fully_shard, parallelize_module)."
                )
            if owner_of(param) is not None:
                raise PrivacyError(
                    f"Parameter {name} is recorded by another wrapper already; its gradients would be clipped in two "
                    "places. Use that wrapper, or call its cleanup() or to_standard_module() first. (Lightning calls "
                    "configure_optimizers at every fit(): return the optimizer of the first call again.)"
                )
        self._names = {p: n for n, p in self.trained.items()}
        self.hooks_enabled = True
        self._structure = Structure(m, self.trained, m.shards if isinstance(m, ModuleInParts) else {})
        self._waiting = WaitingBatches(self._names, kept=ordinary_grad)
        mean, params = loss_reduction == "mean", [*self.trained.values()]
        self.ordinary_gradients = self._gradients_kind(params, mean)
        self.losses = LossCheck(loss_reduction, group)
        self._backward_passes = BackwardPasses(
            loss_reduction, self.losses, self._waiting, self.ordinary_gradients if ordinary_grad else None, group
        )
        self._forward_passes = ForwardPasses(m, self._names, mean, self.losses, self._backward_passes, group)
        self.isolation = self._forward_passes.isolation
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

    @uncompiled
    def _run(
        self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], name: str = "forward"
    ) -> Any:
        """``call(*args, **kwargs)`` of the module's method ``name``, recorded where it is a training pass."""
        self._forward_passes.check_batch_norms()
        if not (self._module.training and torch.is_grad_enabled() and self.hooks_enabled):
            end_keeping(self._module)
            return call(*args, **kwargs)
        if self.trained and owner_of(next(iter(self.trained.values()))) is not self:
            self._record_as_copy()
        self._waiting.tell()
        given = (args, kwargs)
        if not self.batch_first:
            call, given = batch_brought_first(call, given)
        batch_size = ragged.batch_size(self._module, given)
        units_in(batch_size, self.group)
        if not batch_size and not self._forward_passes.sharded:
            return self._run_empty(call, *given)
        with nullcontext() if batch_size else ViewsOfNone():
            output = self._forward_passes.record(call, given, batch_size, name)
        if batch_size == 0:
            # Nothing may flow back from an empty batch, yet it is a step.
            self._note_empty()
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

    def _run_empty(self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an empty batch, from which nothing flows back to the parameters and which yet is a step.

        Its outputs come from ends of the graph alone. (Sharded modules take the other way: their ranks gather
        parameters in the backward pass, too.)
        """
        output = outputs_of_none(self._module, call, args, kwargs)
        noted = self._note_empty()

        def arrived(gradient: Tensor) -> None:
            iteration = Iteration([], 0)
            if self._waiting.empty.is_new(noted, torch._C._current_graph_task_id()):
                self._waiting.passes.append(iteration)
            if self.ordinary_grad:
                self.ordinary_gradients.form(iteration)

        leaves, structure = flatten(output)
        for i, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor) and leaf.is_floating_point():
                end = leaf.detach().requires_grad_()
                end.register_hook(arrived)
                leaves[i] = end.clone()  # which may be changed in place: a loss that is scaled
        return unflatten(structure, leaves)

    def _note_empty(self) -> Any:
        """Note a call on an empty batch, which becomes a step by a backward pass or, without one, when it is taken."""
        return self._waiting.empty.note(newest_batch(self))

    # ---- what the optimiser takes

    def record_empty_batch(self) -> None:
        """Make an empty batch a step without running the module, which may not take one."""
        self._waiting.empty.note(object())

    @property
    def group(self) -> int:
        """Return how many rows that follow each other are one example."""
        return self._forward_passes.group

    def tell_passes(self, listener: Callable[[], None]) -> None:
        """Call ``listener()``, a method whose object lives, before every training pass; not before those of a copy."""
        self._waiting.listener = WeakMethod(listener)

    @property
    def calls(self) -> int:
        """How many training passes were recorded."""
        return self._forward_passes.count

    @property
    def has_passes(self) -> bool:
        """Whether there was a backward pass whose gradients no step has taken."""
        return bool(self._waiting.passes)

    @property
    def given(self) -> list[Tensor]:
        """The tensors that the module was called with in the passes whose gradients no step has taken."""
        return self._waiting.inputs

    def take(self) -> Iterator[tuple[list[Use], int]]:
        """Yield (uses, batch size) of every backward pass since the last call, and forget them.

        Where ordinary gradients are asked for, ``p.grad_sample`` can still be read until ``zero_grad()``.
        """
        if (gathering := gathering_of(self._module)) is not None:
            self._waiting.form(gathering.in_turns())
        return self._waiting.take(self._backward_passes.give_up)

    def forget(self) -> None:
        """Drops what earlier passes left behind."""
        end_keeping(self._module)
        self._waiting.forget()
        self._backward_passes.give_up()

    def drop_gradients(self) -> None:
        """Drop the per-sample gradients, as ``zero_grad()`` does.

        An empty batch at hand stays a step, whether ``zero_grad()`` comes before or behind the module's call.
        """
        self._waiting.drop()

    def records(self, param: Parameter) -> bool:
        """Return whether this is a trained parameter of the module."""
        return param in self._names and owner_of(param) is self

    def divided_by(self, k: int) -> bool:
        """Return whether the first loss was divided by ``k`` beside its mean; once."""
        passes = self._backward_passes
        if passes.loss_divided_by != k:
            return False
        passes.loss_divided_by = 1
        return True

    def check_unchanged(self) -> None:
        """PrivacyError where the module is no longer the one that was made private."""
        self._structure.check()

    # ---- p.grad_sample

    def read_grad_sample(self, param: Parameter) -> Any:
        """[B, *param.shape]; a list of them where several batches have accumulated; None before a backward pass."""
        return self._waiting.read(param)

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
        self._waiting.write(param, value)

    def set_grad_sample_to_none(self) -> None:
        """Forgets all per-sample gradients."""
        self.drop_gradients()

    def del_grad_sample(self) -> None:
        """Forgets all per-sample gradients."""
        self.drop_gradients()

    # ---- switches

    def forbid_grad_accumulation(self) -> None:
        """From now on a second backward pass before the optimiser's step raises ValueError."""
        self._backward_passes.accumulation_allowed = False

    def allow_grad_accumulation(self) -> None:
        """Undoes :meth:`forbid_grad_accumulation`."""
        self._backward_passes.accumulation_allowed = True

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
        self.ordinary_gradients.clear()
        for param in self.trained.values():
            if owner_of(param) is self:
                set_owner(param, None)
            vars(param).pop("summed_grad", None)

    def to_standard_module(self) -> nn.Module:
        """The module itself, without any trace of recording: the user's own, where ranks have parts of it."""
        self._close()
        return self._module.module if isinstance(self._module, ModuleInParts) else self._module

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
        group: int = 1,
    ) -> None:
        """``force_functorch`` is accepted and changes nothing: rules and vmap give the same gradients."""
        self._setup(
            m,
            batch_first=batch_first,
            loss_reduction=loss_reduction,
            strict=strict,
            ordinary_grad=ordinary_grad,
            group=group,
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

    _gradients_kind = LoopsGradients

    def __init__(self, m: nn.Module, *, batch_first: bool = True, loss_reduction: str = "mean", group: int = 1) -> None:
        self._setup(
            m,
            batch_first=batch_first,
            loss_reduction=loss_reduction,
            strict=True,
            ordinary_grad=False,
            group=group,
        )
        self.hooks_enabled = False

    def take(self) -> Iterator[tuple[list[Use], int]]:
        for iteration in self._waiting.passes:
            missing = [name for name, param in self.trained.items() if param not in iteration.given]
            if missing and iteration.batch_size:
                raise PrivacyError(
                    f"{missing[0]} has no grad_sample; in the no_op mode the loop sets p.grad_sample of every trained "
                    "parameter before optimizer.step(), or its examples would be clipped by a part of their gradient."
                )
        yield from super().take()
