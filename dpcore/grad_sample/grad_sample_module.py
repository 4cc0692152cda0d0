"""The module that users train: a wrapper whose training passes are recorded."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn
from torch.nn import Parameter

from dpcore.errors import UnsupportedError, warn_caller
from dpcore.grad_sample.hooks import AbstractGradSampleHooks, GradSampleHooks, GradSampleHooksNoOp

__all__ = ["AbstractGradSampleModule", "GradSampleHooks", "GradSampleModule", "GradSampleModuleNoOp"]


class AbstractGradSampleModule(AbstractGradSampleHooks, nn.Module):
    """A module around another one, ``_module``."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._enter("forward", self._module, args, kwargs)

    def parameters(self, recurse: bool = True) -> Iterator[Parameter]:
        """The module's parameters, which torch asks for to clip ordinary gradients; these are None.

        A warning where that does nothing; UnsupportedError where torch would stop, as it does by value.
        """
        frame = sys._getframe(1)
        comprehension = frame.f_code.co_name == "<listcomp>" and frame.f_back  # a frame of its own up to Python 3.11
        asking = (comprehension or frame).f_code.co_name
        if asking in ("clip_grad_norm_", "clip_grad_value_") and self._waiting.passes and not self.ordinary_grad:
            told = (
                f"{asking} does nothing between backward() and the private optimizer's step(): there is no ordinary "
                "gradient, and step() clips every example's own to max_grad_norm. Leave the call out."
            )
            if asking == "clip_grad_value_":
                raise UnsupportedError(told)
            warn_caller(told)
        yield from super().parameters(recurse)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears ``p.grad`` and ``p.grad_sample``."""
        self.drop_gradients()
        nn.Module.zero_grad(self, set_to_none=True)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load weights by the wrapper's names; RuntimeError where they have those of the module inside."""
        if strict and state_dict and not any(name.startswith("_module.") for name in state_dict):
            raise RuntimeError(
                f"The weights have an ordinary model's names, {next(iter(state_dict))!r} the first, and the private "
                "one's begin with '_module.'; load them before make_private, or by model._module.load_state_dict()."
            )
        return super().load_state_dict(state_dict, strict=strict, assign=assign)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "_module" or (name[:2] == name[-2:] == "__"):  # of the class: len(self) would not find it
                raise
            return getattr(self._module, name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set what the wrapped module has and the wrapper has not on the wrapped module, whose forward reads it there.

        Examples are a temperature, or a layer.
        """
        module = vars(self).get("_modules", {}).get("_module")
        own = module is None or name in vars(self) or hasattr(type(self), name) or name == "_module"
        if own or not hasattr(module, name) or not self._made:
            super().__setattr__(name, value)
        else:
            setattr(module, name, value)


class GradSampleModule(AbstractGradSampleModule):
    """A wrapper around ``m`` that records gradients by example; attributes and outputs are the module's own.

    Keys of ``state_dict`` have the prefix ``_module.``. In training mode with gradients enabled, inputs must be batch
    first. Where one loss goes through several calls of the module, rows of the same number are one example. After
    ``backward()``, ``p.grad_sample`` [B, *p.shape] is formed when it is read.

    Args:
        m: The module to record.
        batch_first: Whether inputs are [B, T, ...]; False: [T, B, ...].
        loss_reduction: The reduction of your loss over the batch, "mean" or "sum".
        strict: Whether a module that is known to mix examples is refused.
        force_functorch: Accepted for compatibility; rules and vmap give the same gradients.
        ordinary_grad: Whether ``p.grad`` is the ordinary gradient between ``backward()`` and ``step()``. False: None,
            which costs nothing.
        group: K, how many rows that follow each other are one example, whose gradient is that of the mean of its rows'
            losses; ``p.grad_sample`` then is [B / K, *p.shape].

    Raises:
        UnsupportedError: the module mixes examples, is compiled, or cannot be recorded.
        PrivacyError: another wrapper records a parameter already.
        ValueError: ``loss_reduction`` is neither "mean" nor "sum".
    """

    lives_with_module = False  # whether a wrapper that nobody keeps goes on recording its module

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
        """Wrap ``m``; see the class."""
        nn.Module.__init__(self)
        self._setup(
            m,
            batch_first=batch_first,
            loss_reduction=loss_reduction,
            strict=strict,
            ordinary_grad=ordinary_grad,
            group=group,
        )
        self._open_entrances((lambda: self) if self.lives_with_module else weakref.ref(self))


class GradSampleModuleNoOp(GradSampleHooksNoOp, AbstractGradSampleModule):
    """Records nothing: the user's loop sets ``p.grad_sample`` itself."""

    def __init__(self, m: nn.Module, *, batch_first: bool = True, loss_reduction: str = "mean", group: int = 1) -> None:
        nn.Module.__init__(self)
        GradSampleHooksNoOp.__init__(self, m, batch_first=batch_first, loss_reduction=loss_reduction, group=group)
