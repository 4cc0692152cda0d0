"""The cross-entropy of many logits on a CPU, by a kernel: it has no parameters, but takes a sixth of a step.

torch keeps the logarithms of all probabilities beside the logits, fills a second tensor of that size with zeros for the
gradient at them, and a third with the gradient at the logits. Here only the last one exists.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import functional as F

from dpcore import native
from dpcore.tape.tape import Tape
from dpcore.tape.uses import handles

WORTH_A_KERNEL = 2**17
"""Logits; below, torch takes less time than a function of one's own costs."""
REDUCTIONS = ("none", "mean", "sum")
"""Their places are torch's numbers for them."""
STEPS_BEHIND = 12
"""Functions between a module's output and the loss (views, slices, a cast) that are looked through at most."""
_OF_PRIVATE = "dpcore: output of a private module"
CHANGED = (
    "Logits or labels were changed in place between F.cross_entropy and its backward pass. The gradient is computed "
    "from them, because dpcore keeps no logarithms of probabilities beside them; change a copy, or set DPCORE_NATIVE=0."
)

_installing = threading.Lock()


class _CrossEntropy(torch.autograd.Function):
    """(z [.., C] of two or three dimensions, labels [R]) -> losses [R]."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, labels: Tensor, ignored: int) -> Tensor:
        losses, shifts = native.cross_entropy(z, labels, ignored)
        ctx.save_for_backward(z, labels, shifts)
        ctx.ignored = ignored
        return losses

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        try:
            z, labels, shifts = ctx.saved_tensors
        except RuntimeError as error:
            if "inplace" in str(error):
                error.add_note(CHANGED)
            raise
        # Gradients that get gradients (create_graph=True), and many at once (is_grads_batched), are torch's.
        if torch.is_grad_enabled() or not torch._C._has_storage(grad) or not native.serves(z, grad):
            return _gradient(z, labels, grad, ctx.ignored), None, None
        found = native.cross_entropy_grad(z, labels, grad, shifts, ctx.ignored)
        if found is None:
            raise RuntimeError(CHANGED)
        return found, None, None


def _gradient(z: Tensor, labels: Tensor, grad: Tensor, ignored: int) -> Tensor:
    """The gradient of Σ_r grad[r] loss[r] at z, in torch's operators."""
    places = (*z.shape[:-1], 1)
    without = (labels == ignored).view(places)
    hit = torch.zeros_like(z).scatter(-1, labels.view(places).masked_fill(without, 0), 1.0)
    return grad.view(places) * (z.softmax(-1) - hit).masked_fill(without, 0.0)


def is_watched() -> bool:
    """Return whether operations are traced, handed to a mode of the dispatcher, or differentiated forward: no kernel is
    seen there.
    """
    return (
        torch._C._len_torch_dispatch_stack() > 0
        or torch._C._get_tracing_state() is not None
        or forward_ad._current_level >= 0
    )


def _by_kernel(input: Tensor, target: Tensor, reduction: str, ignored: int) -> Tensor | None:
    """F.cross_entropy of logits [B, C] or [B, C, T] and classes [B] or [B, T]; None where the kernel does not serve."""
    if (
        type(input) is not Tensor
        or type(target) is not Tensor
        or input.numel() < WORTH_A_KERNEL
        or not input.requires_grad
        or not torch.is_grad_enabled()
        or target.dtype != torch.int64
        or target.device != input.device
        or input.dim() not in (2, 3)
        or target.shape != input.shape[:1] + input.shape[2:]
        or reduction not in REDUCTIONS
        or is_watched()
        or not native.serves(input)
    ):
        return None
    rows, labels = input.movedim(1, -1), target.contiguous().view(-1)
    classes = rows.shape[-1]
    # Of a label that is no class torch says what is wrong.
    if rows.stride(-1) != 1 or not (((labels >= 0) & (labels < classes)) | (labels == ignored)).all():
        return None
    losses: Tensor = _CrossEntropy.apply(rows, labels, ignored)
    if reduction == "none":
        return losses.view(target.shape)
    return losses.sum() / (labels != ignored).sum() if reduction == "mean" else losses.sum()


@handles(F.cross_entropy, derives=True)
def _in_a_pass(tape: Tape, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    def call(
        input: Tensor,
        target: Tensor,
        weight: Tensor | None = None,
        size_average: bool | None = None,
        ignore_index: int = -100,
        reduce: bool | None = None,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
    ) -> Tensor | None:
        if weight is not None or size_average is not None or reduce is not None or label_smoothing != 0.0:
            return None
        return _by_kernel(input, target, reduction, ignore_index)

    found = call(*args, **kwargs)
    return func(*args, **kwargs) if found is None else found


# ---- behind a private module, in the user's own loop


def mark(outputs: list[Any]) -> None:
    """Let :func:`torch.nn.functional.cross_entropy` of these outputs of a private module go through the kernel."""
    for output in outputs:
        if (
            isinstance(output, Tensor)
            and output.grad_fn is not None
            and output.numel() >= WORTH_A_KERNEL
            and output.device.type == "cpu"
            and native.available()
        ):
            node: Any = output.grad_fn
            node.metadata[_OF_PRIVATE] = True
            _install()


def _is_marked(logits: Tensor) -> bool:
    node: Any = logits.grad_fn
    for _ in range(STEPS_BEHIND):
        if node is None or _OF_PRIVATE in node.metadata:
            return node is not None
        node = node.next_functions[0][0] if node.next_functions else None
    return False


def _cross_entropy_loss(
    original: Callable[..., Tensor],
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    reduction: int = 1,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Tensor:
    """Compute what ``F.cross_entropy`` asks torch for: by the kernel, where a private module put out the logits."""
    if (
        not torch.compiler.is_compiling()
        and weight is None
        and label_smoothing == 0.0
        and type(input) is Tensor
        and input.numel() >= WORTH_A_KERNEL
        and _is_marked(input)
        and 0 <= reduction < len(REDUCTIONS)
    ):
        found = _by_kernel(input, target, REDUCTIONS[reduction], ignore_index)
        if found is not None:
            return found
    return original(input, target, weight, reduction, ignore_index, label_smoothing)


def _install() -> None:
    """Put :func:`_cross_entropy_loss` in the place of torch's, once; it hands on everything else."""
    with _installing:
        current = torch._C._nn.cross_entropy_loss
        if getattr(current, "of_private_modules", False):
            return
        replaced = functools.wraps(current)(functools.partial(_cross_entropy_loss, current))
        replaced.of_private_modules = True  # type: ignore[attr-defined]
        torch.jit._builtins._register_builtin(replaced, "aten::cross_entropy_loss")  # scripts go on with torch's own
        torch._C._nn.cross_entropy_loss = replaced  # type: ignore[assignment]
