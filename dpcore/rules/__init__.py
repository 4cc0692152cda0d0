"""Rules per kind of layer: per-sample norms and clipped sums from what a tape has recorded.

Importing the package registers all of them.
"""

from dpcore.rules import (
    attention,
    bilinear,
    broadcast,
    convolution,
    cross_entropy,
    embedding,
    embedding_bag,
    gelu,
    linear,
    normalization,
    pooling,
    recurrent,
    recurrent_cells,
)

__all__ = [
    "attention",
    "bilinear",
    "broadcast",
    "convolution",
    "cross_entropy",
    "embedding",
    "embedding_bag",
    "gelu",
    "linear",
    "normalization",
    "pooling",
    "recurrent",
    "recurrent_cells",
]
