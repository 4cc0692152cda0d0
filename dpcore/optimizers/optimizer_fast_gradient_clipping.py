"""A class of Opacus' name for a mode that is one with the others here."""

from dpcore.optimizers.optimizer import DPOptimizer


class DPOptimizerFastGradientClipping(DPOptimizer):
    """:class:`DPOptimizer` under the name of the fast-clipping mode: one optimiser serves all modes."""
