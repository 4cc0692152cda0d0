"""A clip norm that follows a quantile of the gradient norms.

Andrew et al. 2021, "Differentially private learning with adaptive clipping".
"""

from __future__ import annotations

import hashlib
import math
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from dpcore.arguments import check_number
from dpcore.clipping import SMALLEST_MAX_GRAD_NORM
from dpcore.errors import PrivacyError
from dpcore.noise import GaussianNoise, SecureNoise
from dpcore.optimizers.optimizer import DPOptimizer


class AdaClipDPOptimizer(DPOptimizer):
    """Moves C towards the ``target_unclipped_quantile`` of the norms by C *= exp(-rate * (unclipped - quantile)).

    Every step releases two things: the noisy sum, and the noisy count Σ (b_i - 1/2) of examples with norm at most C,
    which one example moves by 1/2. The accountant is told ``noise_multiplier`` σ for both together: the count has noise
    of standard deviation σ_b = ``unclipped_num_std``, a multiplier of 2 σ_b, and the sum has the multiplier
    (σ^-2 - (2 σ_b)^-2)^(-1/2) (their theorem 1). Adding or removing an example moves the count by 1/2 only because
    the count is centred and divided by the public expected batch size, never by the batch's own length.

    ``unclipped_num_std`` None: a twentieth of the expected batch size, at least σ. PrivacyError unless σ < 2 σ_b.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        noise_multiplier: float,
        max_grad_norm: float,
        expected_batch_size: float | None,
        target_unclipped_quantile: float = 0.5,
        clipbound_learning_rate: float = 0.2,
        max_clipbound: float = 1e8,
        min_clipbound: float = 1e-8,
        unclipped_num_std: float | None = None,
        **options: Any,
    ) -> None:
        if not expected_batch_size:
            raise ValueError(
                f"expected_batch_size is {expected_batch_size}; the count of unclipped examples is divided by it, so "
                "it must be a positive, public number."
            )
        if not SMALLEST_MAX_GRAD_NORM <= min_clipbound < max_clipbound < math.inf:
            raise ValueError(
                f"min_clipbound is {min_clipbound} and max_clipbound {max_clipbound}; need "
                f"{SMALLEST_MAX_GRAD_NORM} <= min < max < infinity, between which every bound can be used."
            )
        if not 0.0 <= target_unclipped_quantile <= 1.0:
            raise ValueError(f"target_unclipped_quantile is {target_unclipped_quantile}; it must lie in [0, 1].")
        rule = "it must be a number, and finite"
        check_number("clipbound_learning_rate", clipbound_learning_rate, math.isfinite, rule)
        if unclipped_num_std is None:
            unclipped_num_std = max(expected_batch_size / 20, noise_multiplier)
        rule = "it must be a number, finite and above 0, for instance a twentieth of the expected batch size"
        check_number("unclipped_num_std", unclipped_num_std, lambda std: 0.0 < std < math.inf, rule)
        self.target_unclipped_quantile = target_unclipped_quantile
        self.clipbound_learning_rate = clipbound_learning_rate
        self.max_clipbound = max_clipbound
        self.min_clipbound = min_clipbound
        self.unclipped_num_std = unclipped_num_std
        self._centred = 0.0
        self._secret_noise: GaussianNoise | None = None
        super().__init__(
            optimizer,
            noise_multiplier=noise_multiplier,
            max_grad_norm=max_grad_norm,
            expected_batch_size=expected_batch_size,
            **options,
        )
        self._gradient_noise_multiplier()

    def _observe(self, norms: Tensor) -> None:
        self._centred += float((norms[0] <= self.accumulator.bounds[0]).sum()) - norms.shape[1] / 2

    def _clear(self) -> None:
        super()._clear()
        self._centred = 0.0

    def _gradient_noise_multiplier(self) -> float:
        """The sum's share of the noise; PrivacyError where a schedule has raised σ beyond what the count's allows."""
        if self.noise_multiplier == 0.0:
            return 0.0
        left = self.noise_multiplier**-2 - (2 * self.unclipped_num_std) ** -2
        if left <= 0.0:
            raise PrivacyError(
                f"noise_multiplier is {self.noise_multiplier}, which must stay below 2 * unclipped_num_std = "
                f"{2 * self.unclipped_num_std}: the count of unclipped examples alone would release more than that "
                "noise accounts for. Raise unclipped_num_std."
            )
        return left**-0.5

    def add_noise(self) -> None:
        ranks = self.ranks
        is_counted = ranks is not None and ranks.parts is not None and ranks.parts.rank > 0  # by the first of them
        count = torch.tensor([0.0 if is_counted else self._centred], dtype=torch.float64)
        if self.noise_multiplier > 0.0 and (ranks is None or ranks.rank == 0):
            self._count_noise().add_(count, self.unclipped_num_std, self.steps)
        if ranks is not None:
            count = ranks.sum_(count.to(ranks.device))
        super().add_noise()
        self.update_max_grad_norm(float(count))

    def _count_noise(self) -> GaussianNoise:
        """A stream of its own: the count must not share the gradient's noise.

        A subclass of :class:`GaussianNoise` may draw from elsewhere, and have a seed that everybody knows. Then the
        count's noise has a secret seed.
        """
        if isinstance(self.noise, SecureNoise):
            return self.noise
        if not self.noise.is_by_seed:
            self._secret_noise = self._secret_noise or GaussianNoise()
            return self._secret_noise
        digest = hashlib.sha256(f"dpcore unclipped count {self.noise.seed}".encode()).digest()
        noise = GaussianNoise(int.from_bytes(digest[:16], "little"), self.noise.rank)
        noise.also, noise.version = self.noise.also, self.noise.version
        return noise

    def update_max_grad_norm(self, noisy_count: float) -> None:
        """Moves the bound by the noisy centred count of this step."""
        assert self.expected_batch_size is not None
        unclipped = noisy_count / (self.expected_batch_size * self.logical_batch.batches) + 0.5
        step = -self.clipbound_learning_rate * (unclipped - self.target_unclipped_quantile)
        bound = self.accumulator.bounds[0] * math.exp(max(-50.0, min(50.0, step)))
        # The step has been released and is to be counted: a bound that would be refused must not be reached here.
        largest = self.accumulator.largest_bound(self._gradient_noise_multiplier())
        self.max_grad_norm = min(max(bound, self.min_clipbound), self.max_clipbound, largest)
