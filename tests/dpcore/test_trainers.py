"""Trainers of transformers and TRL: without noise and clipping they end where the library's own run ends.

20 steps of four accumulated batches each, the same batches in both. Everything is float64, so that what differs is not
rounding, which Adam enlarges.
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset, SubsetRandomSampler

from dpcore import BudgetError, PrivacyEngine, PrivacyError, UnsupportedError
from tests.dpcore.trainer_parts import (
    EXAMPLES,
    NOISY,
    PIECES,
    ROWS,
    STEPS,
    WITHOUT,
    WORDS,
    InOrder,
    Texts,
    arguments,
    classifier,
    difference,
    language_model,
    mixture_of_experts,
    state,
    words_and_tokenizer,
)

transformers = pytest.importorskip("transformers")

from dpcore.transformers import STATE, DPTrainer, DPTrainerMixin  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize("optimizer", ["sgd", "adamw_torch"])
@pytest.mark.parametrize("name", ["gpt2", "llama", "lora", "bert"])
def test_a_trainer_without_noise_ends_where_transformers_own_does(name, optimizer, tmp_path):
    # The loss of BERT's classifiers is the mean over a piece, which this Trainer would add up where it is not told.
    ordinary = type("Ordinary", (InOrder, transformers.Trainer), {"loss_is_scaled_for_ga": name != "bert"})
    private = type("Private", (InOrder, DPTrainer), {})
    model, data = language_model(name), Texts(3 if name == "bert" else 0)
    start, reference = state(model), copy.deepcopy(model)
    ordinary(model=model, args=arguments(tmp_path, optim=optimizer), train_dataset=data).train()
    engine, options = PrivacyEngine(), arguments(tmp_path, optim=optimizer)
    private(model=reference, args=options, train_dataset=data, engine=engine, privacy=WITHOUT).train()
    assert len(engine.accountant) == STEPS and options.gradient_accumulation_steps == PIECES
    assert difference(start, model, reference) < 1e-6


def test_a_trainer_in_bfloat16_ends_near_transformers_own(tmp_path):
    """The Trainer's accelerator wraps forward, for autocast, when it is recorded already."""
    model = language_model("gpt2").float()
    start, reference = state(model), copy.deepcopy(model)
    ordinary = type("Ordinary", (InOrder, transformers.Trainer), {})
    private = type("Private", (InOrder, DPTrainer), {})
    given = {"args": arguments(tmp_path, optim="sgd", bf16=True), "train_dataset": Texts()}
    ordinary(model=model, **given).train()
    run = private(model=reference, **given, engine=PrivacyEngine(), privacy=WITHOUT)
    run.train()
    assert len(run.engine.accountant) == STEPS and difference(start, model, reference) < 0.05
    logits, ids = reference.eval()(Texts().ids[:2]).logits, Texts().ids[:2]
    bare = run.accelerator.unwrap_model(reference, keep_fp32_wrapper=False)
    torch.testing.assert_close(bare(ids).logits, logits, rtol=0.05, atol=0.05)


def test_a_trainer_keeps_its_budget_through_a_resume(tmp_path, trainer):
    def saving(folder, **options):
        privacy = {"target_epsilon": 3.0, "target_delta": 1e-3, "max_grad_norm": 1.0}
        options |= {"save_strategy": "steps", "save_steps": 7, "save_total_limit": 9, "folder": folder}
        options["logging_steps"] = 3
        made = trainer(model="lora", privacy=privacy, **options)
        return made.engine, made

    whole, run = saving(tmp_path / "whole")
    run.train()
    assert len(whole.accountant) == STEPS and 2.9 < whole.get_epsilon(1e-3) <= 3.0
    *_, last = run.state.log_history
    assert last["epsilon"] == whole.get_epsilon(1e-3) and last["delta"] == 1e-3
    assert not any("grad_norm" in line for line in run.state.log_history)
    checkpoint = tmp_path / "whole" / "checkpoint-7"
    resumed, again = saving(tmp_path / "again")
    again.train(resume_from_checkpoint=str(checkpoint))
    assert resumed.accountant.history == whole.accountant.history
    first, second = state(run.model), state(again.model)
    assert all(torch.equal(first[name], second[name]) for name in first)
    epochs = [[line["epoch"] for line in made.state.log_history] for made in (run, again)]
    assert epochs[1] == pytest.approx(epochs[0]) and again.state.epoch == pytest.approx(1.0)
    (checkpoint / STATE).unlink()
    with pytest.raises(PrivacyError, match="budget would be counted anew"):
        saving(tmp_path / "blind")[1].train(resume_from_checkpoint=str(checkpoint))
    with pytest.raises(BudgetError):
        run.train()
    assert len(whole.accountant) == STEPS


@pytest.mark.parametrize(
    ("privacy", "why"),
    [
        (NOISY | {"epochs": 3}, "no 'epochs': the rounds are those of the training arguments; set num_train_epochs"),
        ({"target_epsilon": 3.0, "target_delta": 1e-3, "max_grad_norm": 1.0, "epochs": 3}, "no 'epochs': the rounds"),
        (NOISY | {"target_epsilon": 3.0, "target_delta": 1e-3}, "no 'noise_multiplier': the noise follows from"),
        (NOISY | {"target_delta": 1e-3}, "no 'target_delta': it belongs to a budget; give target_epsilon"),
        (NOISY | {"optimizer": None}, "no 'optimizer': the Trainer gives its own"),
        (None, "privacy is None; it must be a dict of make_private's arguments"),
        ([("noise_multiplier", 1.0)], r"privacy is \[\('noise_multiplier', 1.0\)\]; it must be a dict"),
        ({"max_grad_norm": 1.0}, "no 'noise_multiplier': make_private.. needs it, as in"),
        ({"target_epsilon": 3.0}, "no 'max_grad_norm' and no 'target_delta': make_private_with_epsilon.. needs them"),
        (NOISY | {"max_grad_nrom": 2.0}, "no 'max_grad_nrom': .* Did you mean 'max_grad_norm'"),
    ],
)
def test_a_name_that_nothing_reads_is_refused_before_training(privacy, why, trainer):
    with pytest.raises(TypeError, match=why):
        trainer(privacy=privacy)


def test_a_checkpoint_that_a_signal_asks_for_is_saved_behind_the_step(tmp_path, trainer):
    """It was saved between a backward pass and its step, which is refused: the run ended without any."""

    class Signal(transformers.TrainerCallback):
        def on_step_begin(self, args, state, control, **given):
            (callback,) = (c for c in run.callback_handler.callbacks if hasattr(c, "jit_manager"))
            callback.jit_manager.is_checkpoint_requested |= state.global_step == 2

    run = trainer(folder=tmp_path / "cut", max_steps=5, enable_jit_checkpoint=True, more={"callbacks": [Signal()]})
    run.train()
    assert len(run.engine.accountant) == 3
    whole, resumed = (trainer(folder=tmp_path / name, max_steps=5) for name in ("whole", "resumed"))
    whole.train()
    resumed.train(resume_from_checkpoint=str(tmp_path / "cut" / "checkpoint-3"))
    assert resumed.engine.accountant.history == whole.engine.accountant.history
    first, second = state(whole.model), state(resumed.model)
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("gradient_accumulation_steps", 2, "gradient_accumulation_steps was set to 2 after"),
        ("label_smoothing_factor", 0.1, "label_smoothing_factor and compute_loss_func average"),
    ],
)
def test_arguments_that_are_set_later_are_looked_at_too(name, value, why, trainer):
    """As a search for hyperparameters sets them at every trial."""
    run = trainer(max_steps=2)
    setattr(run.args, name, value)
    with pytest.raises(UnsupportedError, match=why):
        run.train()
    assert not len(run.engine.accountant)


def test_other_data_are_not_left_out_in_silence(trainer):
    run = trainer(max_steps=2)
    run.train()
    run.train_dataset = Texts()
    with pytest.raises(UnsupportedError, match=r"train_dataset was changed after the first train\(\)"):
        run.train()
    assert len(run.engine.accountant) == 2


def test_an_empty_batch_of_a_trainer_is_a_step(trainer):
    run = trainer(privacy=NOISY | {"sample_rate": 1e-6, "expected_batch_size": 8}, max_steps=3)
    start = state(run.model)
    run.train()
    assert len(run.engine.accountant) == 3
    assert all(not torch.equal(start[name], value) for name, value in state(run.model).items())


def test_a_trainer_refuses_what_would_mix_examples(trainer):
    with pytest.raises(UnsupportedError, match="label_smoothing_factor"):
        trainer(privacy=WITHOUT, label_smoothing_factor=0.1)
    with pytest.raises(UnsupportedError, match="neftune_noise_alpha makes the noise"):
        trainer(privacy=WITHOUT, neftune_noise_alpha=5.0)
    with pytest.raises(UnsupportedError, match="train_sampling_strategy"):
        trainer(privacy=WITHOUT, train_sampling_strategy="group_by_length")
    config = transformers.LlamaConfig(
        vocab_size=WORDS, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    with pytest.raises(UnsupportedError, match=r"LlamaForQuestionAnswering.*override per_example_losses"):
        trainer(model=transformers.LlamaForQuestionAnswering(config), privacy=WITHOUT).train()


def test_a_trainer_refuses_a_sampler_that_leaves_examples_out(trainer):
    class OfSome(DPTrainer):
        def _get_train_sampler(self, *given):
            return SubsetRandomSampler(range(3))

    with pytest.raises(UnsupportedError, match="SubsetRandomSampler would be replaced by Poisson sampling"):
        trainer(OfSome).train()


def test_a_trainer_refuses_data_of_datasets_that_hold_an_example_twice(trainer):
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_dict({"input_ids": Texts().ids.tolist(), "labels": Texts().ids.tolist()})
    rare = rows.select([0, 3, 5])
    parts = rows.train_test_split(0.5, seed=1)
    for repeated in (
        rows.select([0, 1, 1]),
        datasets.concatenate_datasets([rows, rare]),
        datasets.interleave_datasets([rare, rows.select(range(6, 60))], stopping_strategy="all_exhausted"),
        torch.utils.data.ConcatDataset([rows, rare]),
    ):
        refused = trainer(data=repeated, max_steps=1)
        with pytest.raises(PrivacyError, match=r"holds an example \d+ times.*interleave_datasets"):
            refused.train()
        assert not len(refused.engine.accountant)
    whole = datasets.concatenate_datasets([*parts.values()]).shuffle(seed=2)
    for given in (rows, whole, datasets.concatenate_datasets([rows.shard(2, 1), rows.shard(2, 0)])):
        run = trainer(data=given, max_steps=1)
        run.train()
        assert len(run.engine.accountant) == 1


def test_a_loss_that_training_would_not_use_is_refused(trainer):
    class Doubled(transformers.Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            return 2.0 * super().compute_loss(model, inputs, return_outputs, num_items_in_batch)

    class Timed(transformers.Trainer):
        def training_step(self, *given):
            return super().training_step(*given)

    class Hidden(transformers.Trainer):
        def per_example_losses(self, model, outputs, labels):
            return outputs.logits[:, 0, 0]

    class Private(DPTrainerMixin, Doubled): ...

    class Supplied(DPTrainerMixin, Doubled):
        used = 0

        def per_example_losses(self, model, outputs, labels):
            type(self).used += 1
            return super().per_example_losses(model, outputs, labels)

    class InFront(DPTrainer):
        used = 0

        def compute_loss(self, *given, **named):
            type(self).used += 1
            return super().compute_loss(*given, **named)

    def of(kind, **options):
        return trainer(kind, privacy=WITHOUT, max_steps=2, **options)

    with pytest.raises(UnsupportedError, match=r"Doubled\.compute_loss.*override per_example_losses"):
        of(Private)
    with pytest.raises(UnsupportedError, match=r"Timed\.training_step.*define training_step in the class"):
        of(type("Private", (DPTrainerMixin, Timed), {}))
    with pytest.raises(UnsupportedError, match=r"Hidden\.per_example_losses.*define per_example_losses in the class"):
        of(type("Private", (DPTrainerMixin, Hidden), {}))
    inherited = type("Private", (DPTrainerMixin, transformers.Seq2SeqTrainer), {})
    of(inherited, arguments_of=transformers.Seq2SeqTrainingArguments).train()
    # Losses of both batches are looked at, if they are told apart: twice four examples in three passes.
    for kind, looked in ((Supplied, 2 * 2 * 3), (InFront, 0)):
        of(kind).train()
        assert kind.used == 2 * PIECES + looked


def test_a_trainer_refuses_compiled_models_and_iterable_data(trainer):
    class Stream(IterableDataset):
        def __iter__(self):
            return iter(Texts())

    class Own(DPTrainer):
        def get_train_dataloader(self):
            self._make_private(DataLoader(Stream(), batch_size=ROWS))

    short = {"privacy": WITHOUT, "max_steps": 1}
    with pytest.raises(UnsupportedError, match="leave torch_compile"):
        trainer(torch_compile=True, **short)
    with pytest.raises(UnsupportedError, match=r"\(Stream\) is an iterable.*map-style"):
        trainer(data=Stream(), **short)
    with pytest.raises(UnsupportedError, match=r"\(Stream\) is an iterable.*map-style"):
        trainer(Own, **short).train()


@pytest.mark.parametrize("size", ["auto", 3])
def test_a_trainers_batches_are_cut_as_asked(size, trainer):
    ends = []
    for options in ({}, {"max_physical_batch_size": size}):
        run = trainer(privacy=NOISY | options)
        run.train()
        assert len(run.engine.accountant) == STEPS
        ends.append(run.model)
    assert difference(state(language_model("gpt2")), *ends) < 1e-6
    with pytest.raises(ValueError, match="max_physical_batch_size is 0"):
        trainer(privacy=NOISY | {"max_physical_batch_size": 0})


class Labelled(Texts):
    def __init__(self, label) -> None:
        super().__init__()
        self.label = label

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.ids[i], "labels": self.label(i)}


SIGNED = torch.randn(EXAMPLES, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
PROBLEMS = {
    "numbers": ({"num_labels": 2, "problem_type": "regression"}, lambda i: SIGNED[i]),
    "a whole number": ({"num_labels": 1}, lambda i: torch.tensor(i % 3)),
    "one label of several": (
        {"num_labels": 1, "problem_type": "multi_label_classification"},
        lambda i: (SIGNED[i, :1] > 0).double(),
    ),
    "a column of classes": ({"num_labels": 3}, lambda i: torch.tensor([i % 3])),
}


@pytest.mark.parametrize("problem", PROBLEMS)
def test_a_classifiers_problem_type_chooses_the_loss(problem, tmp_path):
    options, label = PROBLEMS[problem]
    model, data = classifier(**options), Labelled(label)
    start, reference = state(model), copy.deepcopy(model)
    ordinary = type("Ordinary", (InOrder, transformers.Trainer), {"loss_is_scaled_for_ga": False})
    private = type("Private", (InOrder, DPTrainer), {})
    given = {"args": arguments(tmp_path, optim="sgd", max_steps=3), "train_dataset": data}
    ordinary(model=model, **given).train()
    private(model=reference, **given, engine=PrivacyEngine(), privacy=WITHOUT).train()
    assert difference(start, model, reference) < 1e-12


def test_a_models_own_loss_is_not_replaced_in_silence(trainer):
    class WeightedForSequenceClassification(transformers.BertForSequenceClassification):
        def forward(self, input_ids=None, labels=None, **given):
            outputs = super().forward(input_ids=input_ids, **given)
            weight = torch.tensor([1.0, 5.0, 1.0], dtype=torch.float64)
            outputs["loss"] = None if labels is None else F.cross_entropy(outputs.logits, labels, weight)
            return outputs

    class Supplied(DPTrainer):
        def per_example_losses(self, model, outputs, labels):
            return F.cross_entropy(outputs.logits, labels, reduction="none")

    def of(model, data=None, kind=DPTrainer):
        return trainer(kind, model, data, privacy={**WITHOUT, "poisson_sampling": True}, max_steps=1)

    def weighted():
        return WeightedForSequenceClassification(classifier(num_labels=3).config).double()

    with pytest.raises(UnsupportedError, match=r"WeightedForS\w+ computes the loss .* override per_example_losses"):
        of(weighted(), Texts(3)).train()
    of(weighted(), Texts(3), Supplied).train()
    changed = language_model("llama")
    ordinary = changed.loss_function
    changed.loss_function = lambda *given, **named: 2.0 * ordinary(*given, **named)
    refused = of(changed)
    with pytest.raises(UnsupportedError, match=r"LlamaForCausalLM computes the loss .*\(causal\)"):
        refused.train()
    assert not len(refused.engine.accountant)
    common = {"vocab_size": WORDS, "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "pad_token_id": 0}
    unshifted = transformers.BartConfig(**common, decoder_attention_heads=2, decoder_ffn_dim=16)
    with pytest.raises(UnsupportedError, match="BartForCausalLM computes the loss"):
        of(transformers.BartForCausalLM(unshifted).double()).train()
    translator = transformers.M2M100Config(**common, decoder_attention_heads=2, encoder_attention_heads=2)
    with pytest.raises(UnsupportedError, match=r"M2M100\w+ has no prepare_decoder_input_ids_from_labels.*collator"):
        of(transformers.M2M100ForConditionalGeneration(translator).double()).train()


def test_losses_of_ones_own_are_of_one_example_each(trainer):
    def by_token(outputs, labels):
        return F.cross_entropy(outputs.logits[:, :-1].transpose(1, 2), labels[:, 1:], reduction="none")

    def of(change):
        class Own(DPTrainer):
            def per_example_losses(self, model, outputs, labels):
                return change(by_token(outputs, labels))

        return trainer(Own, "lora", max_steps=3)

    for change in (lambda losses: losses, lambda losses: losses.flatten(), lambda losses: losses.mean()):
        with pytest.raises(
            UnsupportedError, match=r"losses of the shape \(.*\) for \d+ examples.*one loss per example"
        ):
            of(change).train()

    def hardest(losses):
        """Keep half of them: for four examples and for two of these that is often the same."""
        losses = losses.mean(1)
        return losses * (losses > losses.median())

    for change in (
        lambda losses: (losses - losses.mean()).sum(1),
        lambda losses: losses.sum(1) / losses.sum(),
        hardest,
    ):
        refused = of(change)
        start = state(refused.model)
        with pytest.raises(UnsupportedError, match=r"Own\.per_example_losses gives 2 examples.*mixes"):
            refused.train()
        alike = all(torch.equal(start[name], value) for name, value in state(refused.model).items())
        assert alike or change is hardest
    for change in (lambda losses: losses.sum(1), lambda losses: losses.sum(1) * torch.rand(len(losses))):
        trained = of(change)
        trained.train()
        assert len(trained.engine.accountant) == 3


def test_the_virtual_tokens_of_prompt_tuning_have_no_labels(trainer):
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    prompts = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    model = peft.get_peft_model(language_model("llama"), prompts).double()
    run = trainer(model=model, max_steps=1)
    run.train()
    ids = Texts().ids[:3]
    with torch.no_grad():
        mine = run.per_example_losses(model.train(), model(input_ids=ids), ids)
        theirs = [model(input_ids=row[None], labels=row[None]).loss for row in ids]
    torch.testing.assert_close(mine.float(), torch.stack(theirs).float())


def test_a_trainer_trains_a_module_without_a_config(trainer):
    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(WORDS, 3)

        def forward(self, input_ids, labels=None):
            return {"logits": self.table(input_ids).mean(1)}

    class Supplied(DPTrainer):
        def per_example_losses(self, model, outputs, labels):
            return F.cross_entropy(outputs["logits"], labels, reduction="none")

    run = trainer(Supplied, Plain(), Texts(3), max_steps=2)
    run.train()
    assert len(run.engine.accountant) == 2


# ---- TRL


def test_trls_trainer_without_noise_ends_where_its_own_does(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")
    words, tokenizer = words_and_tokenizer()
    texts = [" ".join(words[int(i) % len(words)] for i in row) for row in Texts().ids]
    data = datasets.Dataset.from_dict({"text": texts})
    model = language_model("llama")
    start, reference = state(model), copy.deepcopy(model)
    options = {"bf16": False, "gradient_checkpointing": False, "max_length": 8, "optim": "sgd"}

    def given(trained):
        folder = arguments(tmp_path, trl.SFTConfig, **options)
        return {"model": trained, "args": folder, "train_dataset": data, "processing_class": tokenizer}

    type("Ordinary", (InOrder, trl.SFTTrainer), {})(**given(model)).train()
    private = type("Private", (InOrder, DPTrainerMixin, trl.SFTTrainer), {})
    private(**given(reference), engine=PrivacyEngine(), privacy=WITHOUT).train()
    assert difference(start, model, reference) < 1e-6
    options["loss_type"] = "dft"
    with pytest.raises(UnsupportedError, match=r"loss_type='dft'.*override per_example_losses"):
        private(**given(copy.deepcopy(reference)), engine=PrivacyEngine(), privacy=WITHOUT)
    supplied = type("Supplied", (private,), {"per_example_losses": lambda *given: None})
    supplied(**given(copy.deepcopy(reference)), engine=PrivacyEngine(), privacy=WITHOUT)
    del options["loss_type"]
    with pytest.raises(UnsupportedError, match="packing"):
        options["packing"] = True
        private(**given(copy.deepcopy(reference)), engine=PrivacyEngine(), privacy=WITHOUT)


def test_a_routers_auxiliary_loss_is_not_left_out_in_silence(trainer):
    def of(balanced: bool, adapted: bool = False):
        model = mixture_of_experts(balanced)
        if adapted:
            peft = pytest.importorskip("peft")
            lora = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
            model = peft.get_peft_model(model, lora)
        return trainer(model=model, privacy=NOISY | {"check_isolation": not adapted}, max_steps=1)

    with pytest.raises(UnsupportedError, match=r"aux_loss.*output_router_logits = False"):
        of(True)
    # Asked for later, by who has switched the experiments on mixing off, which find such a number among the outputs.
    late = of(False, adapted=True)
    start = state(late.model)
    late.model.config.output_router_logits = True
    with pytest.raises(UnsupportedError, match=r"aux_loss.*output_router_logits = False"):
        late.train()
    assert len(late.engine.accountant) == 0
    assert all(torch.equal(value, start[name]) for name, value in state(late.model).items())
    done = of(False)
    done.train()
    assert len(done.engine.accountant) == 1
