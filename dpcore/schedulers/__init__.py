"""Schedules of the noise multiplier, the clip norm and the batch size; the accountant follows."""

from dpcore.schedulers.batch_size_scheduler import ExponentialBatchSize, LambdaBatchSize, StepBatchSize
from dpcore.schedulers.grad_clip_scheduler import (
    ExponentialGradClip,
    LambdaGradClip,
    StepGradClip,
    _GradClipScheduler,
)
from dpcore.schedulers.noise_scheduler import ExponentialNoise, LambdaNoise, StepNoise, _NoiseScheduler

__all__ = [
    "ExponentialBatchSize",
    "ExponentialGradClip",
    "ExponentialNoise",
    "LambdaBatchSize",
    "LambdaGradClip",
    "LambdaNoise",
    "StepBatchSize",
    "StepGradClip",
    "StepNoise",
    "_GradClipScheduler",
    "_NoiseScheduler",
]
