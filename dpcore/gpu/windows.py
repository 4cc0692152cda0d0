"""Windows: the part of its input that each output position of a convolution sees."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Windows:
    """A convolution in one to three dimensions, as torch's arguments say it; ``kernel``: its size.

    ``channels_last``: a gradient's columns in the order (*kernel, c), as such weights have it in memory, not (c,
    *kernel).
    """

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int = 1
    channels_last: bool = False
