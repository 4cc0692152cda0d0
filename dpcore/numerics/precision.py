"""Float32 products in float32, also where the user has asked torch for less.

``torch.set_float32_matmul_precision`` and ``fp32_precision`` let products of float32 matrices be computed from operands
of 10 bits or 7 (TF32, bfloat16). That is the user's choice for the forward and the backward pass. A norm that decides
on clipping, and the product that is clipped by it, would be off by 1e-3 of the sum of their terms.
"""

from __future__ import annotations

import threading
from typing import Any

import torch

_BACKENDS: Any = torch.backends
_PLACES: tuple[tuple[Any, Any], ...] = (
    ((_BACKENDS.cuda.matmul, _BACKENDS), (_BACKENDS.mkldnn.matmul, _BACKENDS.mkldnn))
    if hasattr(_BACKENDS, "fp32_precision")
    else ()
)
"""Settings (torch 2.9 and later) of the products that rules use, each with the one that it follows where it has none of
its own."""

_LOCK = threading.Lock()
_users = 0
_older: str | None = None
_newer: list[tuple[Any, str, str]] = []


def matmul_precision() -> str:
    """Return the precision of products of float32 matrices, as a name that differs where the setting does."""
    if _PLACES:
        return "/".join(place.fp32_precision for place, _ in _PLACES)
    return torch.get_float32_matmul_precision()


def is_lowered() -> bool:
    """Return whether products of float32 matrices may be computed in less."""
    try:
        return torch.get_float32_matmul_precision() != "highest"
    except RuntimeError:  # the newer settings (torch 2.9) were used, and differ from what the older one can say
        return True


def convolutions_are_lowered() -> bool:
    """Return whether float32 convolutions on a CPU may be computed in less."""
    return bool(_PLACES) and _BACKENDS.mkldnn.conv.fp32_precision in ("tf32", "bf16")


class full_precision:
    """Within, products of float32 matrices are float32.

    The setting is the process's: the last thread that leaves puts the user's back, so that none loses this one
    half-way.
    """

    def __enter__(self) -> None:
        global _users
        with _LOCK:
            self._needed = _users > 0 or is_lowered()
            if self._needed:
                if not _users:
                    _raise()
                _users += 1

    def __exit__(self, *exception: object) -> None:
        global _users
        if not self._needed:
            return
        with _LOCK:
            _users -= 1
            if not _users:
                _restore()


def _raise() -> None:
    global _older, _newer
    _newer = [(place, place.fp32_precision, followed.fp32_precision) for place, followed in _PLACES]
    try:
        _older = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("highest")
    except RuntimeError:
        _older = None
        for place, own, _ in _newer:
            if own in ("tf32", "bf16"):
                place.fp32_precision = "ieee"


def _restore() -> None:
    if _older is not None:
        torch.set_float32_matmul_precision(_older)
    for place, own, followed in _newer:
        if place.fp32_precision != own:
            place.fp32_precision = "none" if own == followed else own
