"""Classes of Opacus' names for modes that are one here."""

from __future__ import annotations

from dpcore.optimizers.optimizer import DPOptimizer


class DPOptimizerFastGradientClipping(DPOptimizer):
    """:class:`DPOptimizer` under the name of the fast-clipping mode: one optimiser serves all modes."""
