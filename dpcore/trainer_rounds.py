"""Tell the Trainer of transformers at which part of a round a resumed run goes on."""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback


class Rounds(TrainerCallback):  # type: ignore[misc]
    """Counts the steps of the round that was at work when the checkpoint was written.

    The private loader goes on within that round by itself, so that the Trainer is not to skip batches, and counts the
    epoch of the logs, and of ``trainer_state.json``, from the round's beginning.
    """

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self._before = 0.0

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Note which part of the round is over."""
        loader = self.trainer._private_loader  # None: the first step will refuse
        steps = 1 if loader is None else len(loader)
        self._before = state.global_step % steps / steps

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Add that part to the epoch that the Trainer has just set."""
        state.epoch += self._before

    def on_epoch_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Count the next round from its beginning, as the Trainer does."""
        self._before = 0.0
