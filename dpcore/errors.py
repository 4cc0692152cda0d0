"""The two ways in which dpcore refuses to go on, and how it warns."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from typing import Any


def warn_caller(message: str) -> None:
    """A warning at the first line outside of dpcore (its examples count as outside) and of torch's backward pass."""
    level, frame = 3, sys._getframe(1)
    while frame.f_back is not None:
        frame = frame.f_back
        name = frame.f_globals.get("__name__", "")
        if not name.startswith(("dpcore.", "torch.")) or name.startswith("dpcore.examples"):
            break
        level += 1
    warnings.warn(message, stacklevel=level)


TRAINERS = {
    "transformers": "use dpcore.transformers.DPTrainer",
    "lightning": "use dpcore.lightning.DPLightningDataModule",
    "accelerate": "call dpcore.accelerate.prepare(accelerator, engine, module=..., optimizer=..., data_loader=..., "
    "...) in the place of both make_private and accelerator.prepare, which undo each other in either order",
}
"""Libraries that build loaders of their own, and what to do with each."""


def trainer_hint() -> str:
    """Return the recipes for the training libraries that are imported, of which any may run the loop."""
    recipes = [f"with {name} {recipe}" for name, recipe in TRAINERS.items() if name in sys.modules]
    if not recipes:
        return ""
    return f" If a training library runs the loop, it uses a module or a loader of its own: {', '.join(recipes)}."


class UnsupportedError(NotImplementedError, ValueError):
    """dpcore cannot compute this exactly; the message says what, why and what to do instead.

    A ValueError too, because scripts written for Opacus catch that.
    """


class NoRuleError(UnsupportedError):
    """No rule applies to the use of ``params``; the module around them may still be recorded as a whole."""

    def __init__(self, message: str, params: Sequence[Any]) -> None:
        super().__init__(message)
        self.params = params


class NotLearnt(NoRuleError):
    """A pass uses ``params`` as no look at the model has seen them used; another look may learn of it."""

    def __init__(self, name: str, params: Sequence[Any]) -> None:
        super().__init__(
            f"{name} is used as it was in no pass in which dpcore looked at the model, not even on this batch: by "
            "chance, say, or for the values of a few examples. So it is not known where its input holds the batch; let "
            "the model take the same way whatever its inputs and random numbers are.",
            params,
        )


class PrivacyError(RuntimeError, ValueError):
    """Going on would release something that the accountant does not know of.

    The message says what would have leaked. A ValueError too, because scripts written for Opacus catch that.
    """
