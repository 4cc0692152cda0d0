"""``p.summed_grad``: the sums of a batch's clipped gradients, where subclasses of the optimizer read and write them."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn import Parameter

from dpcore.errors import PrivacyError, UnsupportedError, warn_caller
from dpcore.microbatch.accumulator import Accumulator


class SummedGrads:
    """``p.summed_grad`` of the parameters of ``accumulator``, for the class of optimizers ``name``."""

    def __init__(self, accumulator: Accumulator, name: str) -> None:
        self.accumulator = accumulator
        self.name = name
        self._shown: dict[Parameter, Tensor] = {}  # what was put there here
        self._told: set[str] = set()
        self.forget()

    def forget(self) -> None:
        """Show none."""
        for param in self.accumulator.parameters.values():
            param.summed_grad = None  # type: ignore[attr-defined]

    def show(self, copies: bool = False) -> None:
        """Show the sums, or copies of them."""
        for param, summed in self.accumulator.sums.items():
            self._show(param, summed.clone() if copies else summed)

    def _show(self, param: Parameter, summed: Tensor) -> None:
        param.summed_grad = self._shown[param] = summed  # type: ignore[attr-defined]

    def take_changed(self) -> None:
        """Take what somebody else has put there (a subclass, usually) for the sum."""
        self.check_whole()
        for param, summed in self.accumulator.sums.items():
            given = getattr(param, "summed_grad", None)
            if given is None:
                raise PrivacyError(
                    f"{self.name}.clip_and_accumulate() has left nothing in summed_grad of "
                    f"{self.accumulator.names[param]}, so noise alone would be released for it. Put the sum of the "
                    "clipped gradients there, or call super().clip_and_accumulate()."
                )
            if given is not self._shown.get(param):
                bounds = self.accumulator.bounds
                self._warn(
                    f"p.summed_grad was written by {self.name}.clip_and_accumulate() or by the loop. Noise "
                    "and epsilon hold where one example moves the sum by at most "
                    f"max_grad_norm={bounds[0] if len(bounds) == 1 else list(bounds)}, which nobody checks then."
                )
                summed.copy_(given)
                self._show(param, summed)

    def check_whole(self, own: bool = False) -> None:
        """Refuse a subclass's ``own`` sums, or the loop's, where those of the module are dealt out to ranks."""
        if self.accumulator.sums:
            return
        held = (p for pair in self.accumulator.targets.items() for p in pair)
        if own or any(getattr(p, "summed_grad", None) is not None for p in held):
            raise UnsupportedError(
                f"{self.name}.clip_and_accumulate() adds up gradients by itself, or the loop writes p.summed_grad, and "
                "the module is sharded: no rank holds whole sums, and these would be lost. Train the module in "
                "DifferentiallyPrivateDistributedDataParallel, or clip by a rule, make_private(clipping=...)."
            )

    def check_own_noise(self, optimizer: Any) -> None:
        """Look at the gradients that a subclass's add_noise() has left, which adds noise all by itself."""
        if optimizer.ranks is not None:
            raise UnsupportedError(
                f"{self.name}.add_noise() does not call super().add_noise(), by which the ranks' sums are added up and "
                "get the noise once; call it, or train in one process."
            )
        self._warn(
            f"{self.name}.add_noise() adds noise of its own. Epsilon is that of fresh normal noise of noise_multiplier "
            f"* max_grad_norm = {optimizer.logical_batch.noise_multiplier} * {optimizer.max_grad_norm}; nobody checks "
            "that it is."
        )
        for param, key in self.accumulator.names.items():
            if param.grad is None:
                raise PrivacyError(
                    f"{self.name}.add_noise() has left nothing in the grad of {key}; set p.grad to p.summed_grad plus "
                    "noise, or call super().add_noise()."
                )

    def _warn(self, text: str) -> None:
        if text not in self._told:
            self._told.add(text)
            warn_caller(text)
