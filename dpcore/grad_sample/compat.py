"""Classes of Opacus' names for modes that are one here: they record what :class:`GradSampleModule` does."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dpcore.errors import PrivacyError
from dpcore.grad_sample.grad_sample_module import GradSampleModule
from dpcore.grad_sample.hooks import AbstractGradSampleHooks, GradSampleHooks
from dpcore.microbatch.accumulator import Accumulator


class _Measured(AbstractGradSampleHooks):
    """A recorder that tells norms and clip factors of the last backward pass, until the step."""

    @torch.no_grad()
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
        group: int = 1,
    ) -> None:
        """``max_grad_norm``: for :meth:`get_clipping_coef`; an optimiser with another bound is refused.

        ``use_ghost_clipping`` is accepted and changes nothing: the planner chooses per layer.
        """
        super().__init__(  # type: ignore[call-arg]
            m,
            batch_first=batch_first,
            loss_reduction=loss_reduction,
            strict=strict,
            ordinary_grad=False,
            group=group,
        )
        self.max_grad_norm = max_grad_norm

    def get_norm_sample(self) -> Tensor:
        """[B] norms of the per-sample gradients of the last backward pass. PrivacyError where there was none."""
        return self._measure()[0]

    @torch.no_grad()
    def get_clipping_coef(self) -> Tensor:
        """[B] clip factors of the last backward pass at ``max_grad_norm``."""
        return self._measure()[1]

    @property
    def per_sample_gradient_norms(self) -> Tensor:
        """[B] what :meth:`get_norm_sample` returns."""
        return self.get_norm_sample()

    def _measure(self) -> tuple[Tensor, Tensor]:
        if not self._waiting.passes:
            raise PrivacyError("There was no backward pass since the last step, so there are no gradients to measure.")
        bound = 1.0 if self.max_grad_norm is None else self.max_grad_norm
        iteration = self._waiting.passes[-1]
        norms, factors = Accumulator(self.trained, bound).add(iteration.remaining(), iteration.batch_size)
        return norms[0], factors[0]


class GradSampleHooksFastGradientClipping(_Measured, GradSampleHooks):
    """:class:`GradSampleHooks` without ordinary gradients, under the name of the fast-clipping mode."""


class GradSampleModuleExpandedWeights(GradSampleModule):
    """:class:`GradSampleModule` under the name of another mode; the gradients are the same."""

    def __init__(self, m: nn.Module, *, batch_first: bool = True, loss_reduction: str = "mean", group: int = 1) -> None:
        super().__init__(m, batch_first=batch_first, loss_reduction=loss_reduction, group=group)


class GradSampleModuleFastGradientClipping(_Measured, GradSampleModule):
    """:class:`GradSampleModule` without ordinary gradients, under the name of the fast-clipping mode."""
