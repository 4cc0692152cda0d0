"""All rules: importing this module registers them."""

from dpcore.grad_sample import (
    attention,
    bilinear,
    broadcast,
    cells,
    contraction,
    convolution,
    embedding,
    embedding_bag,
    normalization,
    pooling,
    recurrent,
)

__all__ = [
    "attention",
    "bilinear",
    "broadcast",
    "cells",
    "contraction",
    "convolution",
    "embedding",
    "embedding_bag",
    "normalization",
    "pooling",
    "recurrent",
]
