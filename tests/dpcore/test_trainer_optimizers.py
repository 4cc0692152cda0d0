"""A private Trainer and its optimizer: another model, other steps, schedules, interruptions."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader

from dpcore import PrivacyEngine, PrivacyError, UnsupportedError
from tests.dpcore.trainer_parts import (
    EXAMPLES,
    NOISY,
    ROWS,
    WHOLE,
    Texts,
    arguments,
    difference,
    language_model,
    state,
)

transformers = pytest.importorskip("transformers")

from dpcore.transformers import DPTrainer  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")


def test_a_second_model_of_a_trainer_is_private_too(trainer):
    """``model_init`` makes another model at every ``train()``, with an optimizer of the Trainer's own."""
    # Batches in one piece: the private optimizer was never asked for, and raw gradients were applied.
    more = {"model_init": lambda: language_model("gpt2")}
    run, ends = trainer(model=None, privacy=WHOLE, more=more, max_steps=3, optim="sgd"), []
    for _ in range(2):
        run.train()
        ends.append(run.model)
    assert len(run.engine.accountant) == 6
    assert ends[0] is not ends[1] and difference(state(language_model("gpt2")), *ends) > 0.1  # noise of its own


def test_a_trainer_refuses_steps_of_another_optimizer(trainer):
    class OfItsOwn(DPTrainer):
        def get_train_dataloader(self):
            return DataLoader(self.train_dataset, batch_size=ROWS)

    class Replaces(transformers.TrainerCallback):
        def __init__(self, what):
            self.what = what

        def on_train_begin(self, args, state, control, **given):
            self.what()

    with pytest.raises(PrivacyError, match=r"OfItsOwn has made no private optimizer.*super\(\)\.get_train_dataloader"):
        trainer(OfItsOwn, privacy=WHOLE, max_steps=2).train()
    other = trainer(privacy=WHOLE, max_steps=2)
    plain = torch.optim.SGD(other.model.parameters(), lr=0.1)
    other.add_callback(Replaces(lambda: setattr(other, "optimizer", plain)))
    start = state(other.model)
    with pytest.raises(PrivacyError, match=r"optimizer is SGD and not the private one"):
        other.train()
    assert all(torch.equal(start[name], value) for name, value in state(other.model).items())


class WithoutSchedule(torch.optim.SGD):
    """Like those of the package schedulefree, whose weights are others in evaluation, and which are told of it."""

    trains = False
    changes = 0

    def train(self) -> None:
        self.changes += not self.trains
        self.trains = True

    def eval(self) -> None:
        self.changes += self.trains
        self.trains = False

    def step(self, closure=None):
        assert self.trains
        return super().step(closure)


def test_an_optimizer_without_a_schedule_is_told_of_training_and_evaluation(trainer):
    model = language_model("lora")
    optimizer = WithoutSchedule([p for p in model.parameters() if p.requires_grad], lr=0.1)
    more = {"eval_dataset": torch.utils.data.Subset(Texts(), range(4)), "optimizers": (optimizer, None)}
    run = trainer(model=model, more=more, max_steps=4, eval_strategy="steps", eval_steps=2)
    run.train()
    assert len(run.engine.accountant) == 4 and optimizer.changes == 4 and not optimizer.trains


def test_a_trainer_that_was_interrupted_within_a_batch_goes_on(trainer):
    class Interrupted(DPTrainer):
        passes = 0

        def compute_loss(self, *given, **named):
            self.passes += 1
            if self.passes == 2:
                raise KeyboardInterrupt
            return super().compute_loss(*given, **named)

    run = trainer(Interrupted, max_steps=2)
    with pytest.raises(KeyboardInterrupt):
        run.train()
    run.train()
    assert len(run.engine.accountant) == 2


@pytest.mark.parametrize("rate", [0.2, 0.01])
def test_a_trainers_noise_is_for_as_many_steps_as_it_takes(rate, trainer):
    """A round at a sample rate of the user's own has other steps than one of the data's batches."""
    budget = {"target_epsilon": 3.0, "target_delta": 1e-3, "max_grad_norm": 1.0}
    privacy = budget | {"sample_rate": rate, "expected_batch_size": rate * EXAMPLES}
    run = trainer(model="lora", privacy=privacy, max_steps=6)
    run.train()
    assert len(run.engine.accountant) == 6 and 2.9 < run.engine.get_epsilon(1e-3) <= 3.0


def test_a_trainer_refuses_options_that_it_would_not_follow(tmp_path, trainer):
    def positional(*given):
        first = language_model("gpt2"), arguments(tmp_path), None, Texts()
        return DPTrainer(*first, *given, engine=PrivacyEngine(), privacy=NOISY)

    for options in ({"grad_sample_mode": "ghost"}, {"wrap_model": True}):
        with pytest.raises(UnsupportedError, match=r"grad_sample_mode='ghost' or the wrapper of wrap_model=True"):
            trainer(privacy=NOISY | options)
    with pytest.raises(UnsupportedError, match=r"loss_reduction='sum', but the loss of a DPTrainer is the mean"):
        trainer(privacy=NOISY | {"loss_reduction": "sum"})
    with pytest.raises(UnsupportedError, match="compute_loss_func average"):
        positional(None, None, None, lambda outputs, labels, **given: outputs.logits.sum())
