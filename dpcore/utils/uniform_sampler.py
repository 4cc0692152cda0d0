"""The samplers of :mod:`dpcore.loading.uniform_sampler` under Opacus' path."""

from dpcore.loading.uniform_sampler import (
    DistributedUniformWithReplacementSampler,
    UniformWithReplacementSampler,
    steps_per_epoch,
)

__all__ = ["DistributedUniformWithReplacementSampler", "UniformWithReplacementSampler", "steps_per_epoch"]
