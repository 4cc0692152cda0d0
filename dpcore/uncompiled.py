"""Methods that ``torch.compile`` must not trace: they run as they are, whoever compiles around them."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
from torch import nn

from dpcore.errors import UnsupportedError

Method = TypeVar("Method", bound=Callable[..., Any])

REASON = (
    "dpcore tells gradients apart by intercepting torch functions and by their places in autograd's graph, "
    "which torch.compile cannot trace; the private step runs uncompiled."
)


def uncompiled(method: Method) -> Method:
    """Decorator: inside a compiled function, too, ``method`` and all that it calls run eagerly, with the same result.

    With ``fullgraph=True`` torch refuses the call and names REASON.
    """
    kept: list[Callable[..., Any]] = []

    @functools.wraps(method)
    def run(*args: Any, **kwargs: Any) -> Any:
        if "torch._dynamo" not in sys.modules:  # importing it takes longer than many a step, and nothing compiles yet
            return method(*args, **kwargs)
        if not kept:
            kept.append(_disabled(method))
        return kept[0](*args, **kwargs)

    return cast(Method, run)


def _disabled(method: Callable[..., Any]) -> Callable[..., Any]:
    try:
        return torch.compiler.disable(method, reason=REASON)
    except TypeError:  # torch 2.6 takes no reason
        return torch.compiler.disable(method)


def refuse_compiled(module: nn.Module) -> None:
    """UnsupportedError where a part of the module was compiled: the calls inside it cannot be recorded."""
    for name, child in module.named_modules():
        if hasattr(child, "_orig_mod") or getattr(child, "_compiled_call_impl", None) is not None:
            raise UnsupportedError(
                f"{name or 'The module'} is compiled by torch.compile, which hides the layers inside it from the "
                "recording of gradients by example; pass the uncompiled module (compiled._orig_mod)."
            )
