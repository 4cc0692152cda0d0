"""The module that users train: a wrapper whose training passes are recorded."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from dpcore.errors import PrivacyError
from dpcore.grad_sample.hooks import AbstractGradSampleHooks, GradSampleHooksNoOp
from dpcore.microbatch.accumulator import Accumulator


class AbstractGradSampleModule(AbstractGradSampleHooks, nn.Module):
    """A module around another one, ``_module``."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._run(self._module, args, kwargs)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears ``p.grad`` and ``p.grad_sample``."""
        self.drop_gradients()
        nn.Module.zero_grad(self, set_to_none=True)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "_module":
                raise
            return getattr(self._module, name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Sets what the wrapped module has and the wrapper has not (a temperature, a layer) on the wrapped module,
        whose forward reads it there."""
        module = vars(self).get("_modules", {}).get("_module")
        own = module is None or name in vars(self) or hasattr(type(self), name) or name == "_module"
        if own or not hasattr(module, name) or not self._made:
            super().__setattr__(name, value)
        else:
            setattr(module, name, value)


class GradSampleModule(AbstractGradSampleModule):
    """Wraps ``m``; attributes, ``state_dict`` keys apart from the prefix ``_module.``, and outputs are its own.

    In training mode with gradients enabled, inputs must be batch first. Where one loss goes through several calls of
    the module, rows of the same number are one example. ``loss_reduction``: "mean" or "sum", what the user's loss does
    over the batch. After ``backward()``, ``p.grad_sample`` [B, *p.shape] is formed when it is read; ``p.grad`` is the
    ordinary gradient with ``ordinary_grad``, and None without, where it is never formed.
    """

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
        nn.Module.__init__(self)
        self._setup(
            m, batch_first=batch_first, loss_reduction=loss_reduction, strict=strict, ordinary_grad=ordinary_grad
        )


class GradSampleModuleNoOp(GradSampleHooksNoOp, AbstractGradSampleModule):
    """Records nothing: the user's loop sets ``p.grad_sample`` itself."""

    def __init__(self, m: nn.Module, *, batch_first: bool = True, loss_reduction: str = "mean") -> None:
        nn.Module.__init__(self)
        GradSampleHooksNoOp.__init__(self, m, batch_first=batch_first, loss_reduction=loss_reduction)


class GradSampleModuleExpandedWeights(GradSampleModule):
    """:class:`GradSampleModule` under the name of another mode; the gradients are the same."""

    def __init__(self, m: nn.Module, *, batch_first: bool = True, loss_reduction: str = "mean") -> None:
        super().__init__(m, batch_first=batch_first, loss_reduction=loss_reduction)


class GradSampleModuleFastGradientClipping(GradSampleModule):
    """:class:`GradSampleModule` without ordinary gradients, under the name of the fast-clipping mode."""

    def __init__(
        self,
        m: nn.Module,
        *,
        batch_first: bool = True,
        loss_reduction: str = "mean",
        strict: bool = True,
        force_functorch: bool = False,
        max_grad_norm: float | None = None,
        use_ghost_clipping: bool = True,
    ) -> None:
        """``max_grad_norm``: for :meth:`get_clipping_coef`; an optimiser with another bound is refused.
        ``use_ghost_clipping`` is accepted and changes nothing: the planner chooses per layer."""
        super().__init__(m, batch_first=batch_first, loss_reduction=loss_reduction, strict=strict, ordinary_grad=False)
        self.max_grad_norm = max_grad_norm

    @torch.no_grad()
    def get_norm_sample(self) -> Tensor:
        """[B] norms of the per-sample gradients of the last backward pass. PrivacyError where there was none."""
        return self._measure()[0]

    @torch.no_grad()
    def get_clipping_coef(self) -> Tensor:
        """[B] clip factors of the last backward pass at ``max_grad_norm``."""
        return self._measure()[1]

    @property
    def per_sample_gradient_norms(self) -> Tensor:
        return self.get_norm_sample()

    def _measure(self) -> tuple[Tensor, Tensor]:
        if not self._iterations:
            raise PrivacyError("There was no backward pass since the last step, so there are no gradients to measure.")
        bound = 1.0 if self.max_grad_norm is None else self.max_grad_norm
        iteration = self._iterations[-1]
        norms, factors = Accumulator(self.trained, bound).add(iteration.remaining(), iteration.batch_size)
        return norms[0], factors[0]
