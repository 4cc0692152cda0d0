"""Trainers of transformers, TRL and accelerate: without noise and clipping they end where the library's own run ends.

20 steps of four accumulated batches each, the same batches in both. Everything is float64, so that what differs is not
rounding, which Adam enlarges.
"""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, IterableDataset, SequentialSampler, SubsetRandomSampler, TensorDataset

from dpcore import BudgetError, PrivacyEngine, PrivacyError, UnsupportedError
from tests.dpcore import torchvision_on_cpu

torchvision_on_cpu.make_importable()

WITHOUT = {"noise_multiplier": 0.0, "max_grad_norm": 1e6, "poisson_sampling": False}
STEPS, PIECES, ROWS, TOKENS, WORDS = 20, 4, 2, 6, 32
EXAMPLES = STEPS * PIECES * ROWS


def difference(start: dict, ordinary: nn.Module, private: nn.Module) -> float:
    """How far apart the two ended, over how far they went."""

    def norm(values) -> float:
        return torch.stack([v.square().sum() for v in values]).sum().sqrt().item()

    mine, theirs = private.state_dict(), ordinary.state_dict()
    moved = norm(theirs[name] - start[name] for name in start)
    assert moved > 1e-3
    return norm(theirs[name] - mine[name] for name in start) / moved


def state(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in module.state_dict().items() if value.is_floating_point()}


# ---- transformers


class Texts(Dataset):
    def __init__(self, classes: int = 0) -> None:
        self.ids = torch.randint(0, WORDS, (EXAMPLES, TOKENS), generator=torch.Generator().manual_seed(0))
        self.classes = classes

    def __len__(self) -> int:
        return EXAMPLES

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.ids[i], "labels": self.ids[i, 0] % self.classes if self.classes else self.ids[i]}


class InOrder:
    """A fixed sampler, the same for both runs."""

    def _get_train_sampler(self, *given):
        return SequentialSampler(self.train_dataset)


def arguments(folder, kind=None, **options):
    transformers = pytest.importorskip("transformers")
    settings = {
        "per_device_train_batch_size": ROWS,
        "gradient_accumulation_steps": PIECES,
        "num_train_epochs": 1,
        "learning_rate": 1e-2,
        "max_grad_norm": 0.0,
        "report_to": [],
        "save_strategy": "no",
        "disable_tqdm": True,
        "use_cpu": True,
    }
    return (kind or transformers.TrainingArguments)(str(folder), **(settings | options))


def language_model(name: str) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    common = {"vocab_size": WORDS, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    small = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    if name == "gpt2":
        sizes = {"n_positions": 8, "n_embd": 16, "n_layer": 1, "n_head": 2}
        rates = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**common, **sizes, **rates))
    elif name == "bert":
        rates = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "num_labels": 3}
        config = transformers.BertConfig(**common, **small, **rates, max_position_embeddings=8)
        model = transformers.BertForSequenceClassification(config)
    else:
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**common, **small, max_position_embeddings=8))
    if name == "lora":
        peft = pytest.importorskip("peft")
        lora = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
        model = peft.get_peft_model(model, lora)
    return model.double()


@pytest.mark.parametrize("optimizer", ["sgd", "adamw_torch"])
@pytest.mark.parametrize("name", ["gpt2", "llama", "lora", "bert"])
@pytest.mark.filterwarnings("ignore")
def test_a_trainer_without_noise_ends_where_transformers_own_does(name, optimizer, tmp_path):
    transformers = pytest.importorskip("transformers")
    from dpcore.transformers import DPTrainer

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


@pytest.mark.filterwarnings("ignore")
def test_a_trainer_keeps_its_budget_through_a_resume(tmp_path):
    pytest.importorskip("transformers")
    from dpcore.transformers import STATE, DPTrainer

    def trainer(folder, **options):
        engine = PrivacyEngine(seed=1)
        privacy = {"target_epsilon": 3.0, "target_delta": 1e-3, "max_grad_norm": 1.0, "epochs": 1}
        options = arguments(folder, save_strategy="steps", save_steps=7, save_total_limit=9, **options)
        model = language_model("lora")
        return engine, DPTrainer(model=model, args=options, train_dataset=Texts(), engine=engine, privacy=privacy)

    whole, run = trainer(tmp_path / "whole")
    run.train()
    assert len(whole.accountant) == STEPS and 2.9 < whole.get_epsilon(1e-3) <= 3.0
    *_, last = run.state.log_history
    assert last["epsilon"] == whole.get_epsilon(1e-3) and last["delta"] == 1e-3
    assert not any("grad_norm" in line for line in run.state.log_history)
    checkpoint = tmp_path / "whole" / "checkpoint-7"
    resumed, again = trainer(tmp_path / "again")
    again.train(resume_from_checkpoint=str(checkpoint))
    assert resumed.accountant.history == whole.accountant.history
    first, second = state(run.model), state(again.model)
    assert all(torch.equal(first[name], second[name]) for name in first)
    (checkpoint / STATE).unlink()
    with pytest.raises(PrivacyError, match="budget would be counted anew"):
        trainer(tmp_path / "blind")[1].train(resume_from_checkpoint=str(checkpoint))
    beyond, longer = trainer(tmp_path / "longer", max_steps=STEPS + 1)
    with pytest.raises(BudgetError):
        longer.train()
    assert len(beyond.accountant) == STEPS


@pytest.mark.filterwarnings("ignore")
def test_an_empty_batch_of_a_trainer_is_a_step(tmp_path):
    pytest.importorskip("transformers")
    from dpcore.transformers import DPTrainer

    engine = PrivacyEngine(seed=1)
    privacy = {"noise_multiplier": 1.0, "max_grad_norm": 1.0, "sample_rate": 1e-6, "expected_batch_size": 8}
    options = arguments(tmp_path, max_steps=3)
    model = language_model("gpt2")
    start = state(model)
    DPTrainer(model=model, args=options, train_dataset=Texts(), engine=engine, privacy=privacy).train()
    assert len(engine.accountant) == 3
    assert all(not torch.equal(start[name], value) for name, value in state(model).items())


@pytest.mark.filterwarnings("ignore")
def test_a_trainer_refuses_what_would_mix_examples(tmp_path):
    transformers = pytest.importorskip("transformers")
    from dpcore.transformers import DPTrainer

    def trainer(model=None, **options):
        model = model or language_model("gpt2")
        options = arguments(tmp_path, **options)
        return DPTrainer(model=model, args=options, train_dataset=Texts(), engine=PrivacyEngine(), privacy=WITHOUT)

    with pytest.raises(UnsupportedError, match="label_smoothing_factor"):
        trainer(label_smoothing_factor=0.1)
    with pytest.raises(UnsupportedError, match="train_sampling_strategy"):
        trainer(train_sampling_strategy="group_by_length")
    config = transformers.LlamaConfig(
        vocab_size=WORDS, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    with pytest.raises(UnsupportedError, match=r"LlamaForQuestionAnswering.*override per_example_losses"):
        trainer(transformers.LlamaForQuestionAnswering(config)).train()


@pytest.mark.filterwarnings("ignore")
def test_a_trainer_refuses_a_sampler_that_leaves_examples_out(tmp_path):
    pytest.importorskip("transformers")
    from dpcore.transformers import DPTrainer

    class OfSome(DPTrainer):
        def _get_train_sampler(self, *given):
            return SubsetRandomSampler(range(3))

    privacy = {"noise_multiplier": 1.0, "max_grad_norm": 1.0}
    options = {"args": arguments(tmp_path), "train_dataset": Texts(), "engine": PrivacyEngine(), "privacy": privacy}
    with pytest.raises(UnsupportedError, match="SubsetRandomSampler would be replaced by Poisson sampling"):
        OfSome(model=language_model("gpt2"), **options).train()


@pytest.mark.filterwarnings("ignore")
def test_a_loss_that_training_would_not_use_is_refused(tmp_path):
    transformers = pytest.importorskip("transformers")
    from dpcore.transformers import DPTrainer, DPTrainerMixin

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

    def trainer(kind, arguments_of=None):
        options = arguments(tmp_path, arguments_of, max_steps=2)
        given = {"train_dataset": Texts(), "engine": PrivacyEngine(), "privacy": WITHOUT}
        return kind(model=language_model("gpt2"), args=options, **given)

    with pytest.raises(UnsupportedError, match=r"Doubled\.compute_loss.*override per_example_losses"):
        trainer(Private)
    with pytest.raises(UnsupportedError, match=r"Timed\.training_step.*define training_step in the class"):
        trainer(type("Private", (DPTrainerMixin, Timed), {}))
    with pytest.raises(UnsupportedError, match=r"Hidden\.per_example_losses.*define per_example_losses in the class"):
        trainer(type("Private", (DPTrainerMixin, Hidden), {}))
    inherited = type("Private", (DPTrainerMixin, transformers.Seq2SeqTrainer), {})
    trainer(inherited, transformers.Seq2SeqTrainingArguments).train()
    # The first examples' losses are looked at in three passes, if they are told apart.
    for kind, looked in ((Supplied, 3), (InFront, 0)):
        trainer(kind).train()
        assert kind.used == 2 * PIECES + looked


@pytest.mark.filterwarnings("ignore")
def test_a_trainer_refuses_compiled_models_and_iterable_data(tmp_path):
    pytest.importorskip("transformers")
    from dpcore.transformers import DPTrainer

    class Stream(IterableDataset):
        def __iter__(self):
            return iter(Texts())

    class Own(DPTrainer):
        def get_train_dataloader(self):
            self._make_private(DataLoader(Stream(), batch_size=ROWS))

    def trainer(kind=DPTrainer, data=None, **options):
        given = {"train_dataset": data or Texts(), "engine": PrivacyEngine(), "privacy": WITHOUT}
        return kind(model=language_model("gpt2"), args=arguments(tmp_path, max_steps=1, **options), **given)

    with pytest.raises(UnsupportedError, match="leave torch_compile"):
        trainer(torch_compile=True)
    with pytest.raises(UnsupportedError, match=r"\(Stream\) is an iterable.*map-style"):
        trainer(data=Stream())
    with pytest.raises(UnsupportedError, match=r"\(Stream\) is an iterable.*map-style"):
        trainer(Own).train()


@pytest.mark.parametrize("size", ["auto", 3])
@pytest.mark.filterwarnings("ignore")
def test_a_trainers_batches_are_cut_as_asked(size, tmp_path):
    pytest.importorskip("transformers")
    from dpcore.transformers import DPTrainer

    ends = []
    for options in ({}, {"max_physical_batch_size": size}):
        engine, model = PrivacyEngine(seed=1), language_model("gpt2")
        privacy = {"noise_multiplier": 1.0, "max_grad_norm": 1.0} | options
        given = {"args": arguments(tmp_path), "train_dataset": Texts(), "engine": engine, "privacy": privacy}
        DPTrainer(model=model, **given).train()
        assert len(engine.accountant) == STEPS
        ends.append(model)
    assert difference(state(language_model("gpt2")), *ends) < 1e-6
    with pytest.raises(ValueError, match="max_physical_batch_size is 0"):
        DPTrainer(model=ends[0], **given | {"privacy": privacy | {"max_physical_batch_size": 0}})


class Labelled(Texts):
    def __init__(self, label) -> None:
        super().__init__()
        self.label = label

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.ids[i], "labels": self.label(i)}


def classifier(**options) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    rates = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = transformers.BertConfig(vocab_size=WORDS, max_position_embeddings=8, **sizes, **rates, **options)
    return transformers.BertForSequenceClassification(config).double()


SIGNED = torch.randn(EXAMPLES, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
PROBLEMS = {
    "numbers": ({"num_labels": 2, "problem_type": "regression"}, lambda i: SIGNED[i]),
    "a whole number": ({"num_labels": 1}, lambda i: torch.tensor(i % 3)),
    "one label of several": (
        {"num_labels": 1, "problem_type": "multi_label_classification"},
        lambda i: SIGNED[i, :1] > 0,
    ),
    "a column of classes": ({"num_labels": 3}, lambda i: torch.tensor([i % 3])),
}


@pytest.mark.parametrize("problem", PROBLEMS)
@pytest.mark.filterwarnings("ignore")
def test_a_classifiers_problem_type_chooses_the_loss(problem, tmp_path):
    transformers = pytest.importorskip("transformers")
    from dpcore.transformers import DPTrainer

    options, label = PROBLEMS[problem]
    integer = problem in ("a whole number", "a column of classes")
    data = Labelled(label if integer else lambda i: label(i).double())
    model = classifier(**options)
    start, reference = state(model), copy.deepcopy(model)
    ordinary = type("Ordinary", (InOrder, transformers.Trainer), {"loss_is_scaled_for_ga": False})
    private = type("Private", (InOrder, DPTrainer), {})
    given = {"args": arguments(tmp_path, optim="sgd", max_steps=3), "train_dataset": data}
    ordinary(model=model, **given).train()
    private(model=reference, **given, engine=PrivacyEngine(), privacy=WITHOUT).train()
    assert difference(start, model, reference) < 1e-12


@pytest.mark.filterwarnings("ignore")
def test_a_models_own_loss_is_not_replaced_in_silence(tmp_path):
    transformers = pytest.importorskip("transformers")
    from dpcore.transformers import DPTrainer

    class WeightedForSequenceClassification(transformers.BertForSequenceClassification):
        def forward(self, input_ids=None, labels=None, **given):
            outputs = super().forward(input_ids=input_ids, **given)
            weight = torch.tensor([1.0, 5.0, 1.0], dtype=torch.float64)
            outputs["loss"] = None if labels is None else F.cross_entropy(outputs.logits, labels, weight)
            return outputs

    class Supplied(DPTrainer):
        def per_example_losses(self, model, outputs, labels):
            return F.cross_entropy(outputs.logits, labels, reduction="none")

    def trainer(model, data, kind=DPTrainer):
        options = {"args": arguments(tmp_path, max_steps=1), "train_dataset": data}
        return kind(model=model, **options, engine=PrivacyEngine(seed=1), privacy={**WITHOUT, "poisson_sampling": True})

    def weighted():
        return WeightedForSequenceClassification(classifier(num_labels=3).config).double()

    with pytest.raises(UnsupportedError, match=r"WeightedForS\w+ computes the loss .* override per_example_losses"):
        trainer(weighted(), Texts(3)).train()
    trainer(weighted(), Texts(3), Supplied).train()
    changed = language_model("llama")
    ordinary = changed.loss_function
    changed.loss_function = lambda *given, **named: 2.0 * ordinary(*given, **named)
    refused = trainer(changed, Texts())
    with pytest.raises(UnsupportedError, match=r"LlamaForCausalLM computes the loss .*\(causal\)"):
        refused.train()
    assert not len(refused.engine.accountant)
    common = {"vocab_size": WORDS, "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "pad_token_id": 0}
    unshifted = transformers.BartConfig(**common, decoder_attention_heads=2, decoder_ffn_dim=16)
    with pytest.raises(UnsupportedError, match="BartForCausalLM computes the loss"):
        trainer(transformers.BartForCausalLM(unshifted).double(), Texts()).train()
    translator = transformers.M2M100Config(**common, decoder_attention_heads=2, encoder_attention_heads=2)
    with pytest.raises(UnsupportedError, match=r"M2M100\w+ has no prepare_decoder_input_ids_from_labels.*collator"):
        trainer(transformers.M2M100ForConditionalGeneration(translator).double(), Texts()).train()


@pytest.mark.filterwarnings("ignore")
def test_losses_of_ones_own_are_of_one_example_each(tmp_path):
    pytest.importorskip("transformers")
    from dpcore.transformers import DPTrainer

    def by_token(outputs, labels):
        return F.cross_entropy(outputs.logits[:, :-1].transpose(1, 2), labels[:, 1:], reduction="none")

    def trainer(change):
        class Own(DPTrainer):
            def per_example_losses(self, model, outputs, labels):
                return change(by_token(outputs, labels))

        given = {"args": arguments(tmp_path, max_steps=1), "train_dataset": Texts(), "engine": PrivacyEngine(seed=1)}
        return Own(model=language_model("lora"), **given, privacy={"noise_multiplier": 1.0, "max_grad_norm": 1.0})

    for change in (lambda losses: losses, lambda losses: losses.flatten(), lambda losses: losses.mean()):
        with pytest.raises(
            UnsupportedError, match=r"losses of the shape \(.*\) for \d+ examples.*one loss per example"
        ):
            trainer(change).train()
    for change in (lambda losses: (losses - losses.mean()).sum(1), lambda losses: losses.sum(1) / losses.sum()):
        refused = trainer(change)
        start = state(refused.model)
        with pytest.raises(UnsupportedError, match=r"Own\.per_example_losses gives the first 2 examples.*mixes"):
            refused.train()
        assert all(torch.equal(start[name], value) for name, value in state(refused.model).items())
    for change in (lambda losses: losses.sum(1), lambda losses: losses.sum(1) * torch.rand(len(losses))):
        trained = trainer(change)
        trained.train()
        assert len(trained.engine.accountant) == 1


@pytest.mark.filterwarnings("ignore")
def test_the_virtual_tokens_of_prompt_tuning_have_no_labels(tmp_path):
    pytest.importorskip("transformers")
    peft = pytest.importorskip("peft")
    from dpcore.transformers import DPTrainer

    torch.manual_seed(0)
    prompts = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    model = peft.get_peft_model(language_model("llama"), prompts).double()
    options = {"args": arguments(tmp_path, max_steps=1), "train_dataset": Texts(), "engine": PrivacyEngine()}
    trainer = DPTrainer(model=model, **options, privacy={"noise_multiplier": 1.0, "max_grad_norm": 1.0})
    trainer.train()
    ids = Texts().ids[:3]
    with torch.no_grad():
        mine = trainer.per_example_losses(model.train(), model(input_ids=ids), ids)
        theirs = [model(input_ids=row[None], labels=row[None]).loss for row in ids]
    torch.testing.assert_close(mine.float(), torch.stack(theirs).float())


@pytest.mark.filterwarnings("ignore")
def test_a_trainer_trains_a_module_without_a_config(tmp_path):
    pytest.importorskip("transformers")
    from dpcore.transformers import DPTrainer

    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(WORDS, 3)

        def forward(self, input_ids, labels=None):
            return {"logits": self.table(input_ids).mean(1)}

    class Supplied(DPTrainer):
        def per_example_losses(self, model, outputs, labels):
            return F.cross_entropy(outputs["logits"], labels, reduction="none")

    options = {"args": arguments(tmp_path, max_steps=2), "train_dataset": Texts(3), "engine": PrivacyEngine()}
    privacy = {"noise_multiplier": 1.0, "max_grad_norm": 1.0}
    Supplied(model=Plain(), **options, privacy=privacy).train()
    assert len(options["engine"].accountant) == 2


# ---- a Trainer's optimizer


@pytest.mark.filterwarnings("ignore")
def test_a_second_model_of_a_trainer_is_private_too(tmp_path):
    """``model_init`` makes another model at every ``train()``, with an optimizer of the Trainer's own."""
    pytest.importorskip("transformers")
    from dpcore.transformers import DPTrainer

    engine = PrivacyEngine(seed=1)
    # Batches in one piece: the private optimizer was never asked for, and raw gradients were applied.
    privacy = {"noise_multiplier": 1.0, "max_grad_norm": 1.0, "max_physical_batch_size": EXAMPLES}
    options = {"args": arguments(tmp_path, max_steps=3, optim="sgd"), "train_dataset": Texts(), "engine": engine}
    trainer = DPTrainer(model_init=lambda: language_model("gpt2"), **options, privacy=privacy)
    ends = []
    for _ in range(2):
        trainer.train()
        ends.append(trainer.model)
    assert len(engine.accountant) == 6
    assert ends[0] is not ends[1] and difference(state(language_model("gpt2")), *ends) > 0.1  # noise of its own


@pytest.mark.filterwarnings("ignore")
def test_a_trainer_refuses_steps_of_another_optimizer(tmp_path):
    transformers = pytest.importorskip("transformers")
    from dpcore.transformers import DPTrainer

    class OfItsOwn(DPTrainer):
        def get_train_dataloader(self):
            return DataLoader(self.train_dataset, batch_size=ROWS)

    class Replaces(transformers.TrainerCallback):
        def __init__(self, what):
            self.what = what

        def on_train_begin(self, args, state, control, **given):
            self.what()

    def trainer(kind=DPTrainer):
        privacy = {"noise_multiplier": 1.0, "max_grad_norm": 1.0, "max_physical_batch_size": EXAMPLES}
        options = {"args": arguments(tmp_path, max_steps=2), "train_dataset": Texts(), "engine": PrivacyEngine()}
        return kind(model=language_model("gpt2"), **options, privacy=privacy)

    with pytest.raises(PrivacyError, match=r"OfItsOwn has made no private optimizer.*super\(\)\.get_train_dataloader"):
        trainer(OfItsOwn).train()
    other = trainer()
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


@pytest.mark.filterwarnings("ignore")
def test_an_optimizer_without_a_schedule_is_told_of_training_and_evaluation(tmp_path):
    pytest.importorskip("transformers")
    from dpcore.transformers import DPTrainer

    model = language_model("lora")
    optimizer = WithoutSchedule([p for p in model.parameters() if p.requires_grad], lr=0.1)
    options = {"args": arguments(tmp_path, max_steps=4, eval_strategy="steps", eval_steps=2), "train_dataset": Texts()}
    options |= {"eval_dataset": torch.utils.data.Subset(Texts(), range(4)), "optimizers": (optimizer, None)}
    engine, privacy = PrivacyEngine(), {"noise_multiplier": 1.0, "max_grad_norm": 1.0}
    DPTrainer(model=model, **options, engine=engine, privacy=privacy).train()
    assert len(engine.accountant) == 4 and optimizer.changes == 4 and not optimizer.trains


@pytest.mark.filterwarnings("ignore")
def test_a_trainer_that_was_interrupted_within_a_batch_goes_on(tmp_path):
    pytest.importorskip("transformers")
    from dpcore.transformers import DPTrainer

    class Interrupted(DPTrainer):
        passes = 0

        def compute_loss(self, *given, **named):
            self.passes += 1
            if self.passes == 2:
                raise KeyboardInterrupt
            return super().compute_loss(*given, **named)

    options = {"args": arguments(tmp_path, max_steps=2), "train_dataset": Texts(), "engine": PrivacyEngine(seed=1)}
    privacy = {"noise_multiplier": 1.0, "max_grad_norm": 1.0}
    trainer = Interrupted(model=language_model("gpt2"), **options, privacy=privacy)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    trainer.train()
    assert len(options["engine"].accountant) == 2


@pytest.mark.parametrize("rate", [0.2, 0.01])
@pytest.mark.filterwarnings("ignore")
def test_a_trainers_noise_is_for_as_many_steps_as_it_takes(rate, tmp_path):
    """A round at a sample rate of the user's own has other steps than one of the data's batches."""
    pytest.importorskip("transformers")
    from dpcore.transformers import DPTrainer

    engine, steps = PrivacyEngine(seed=1), 6
    budget = {"target_epsilon": 3.0, "target_delta": 1e-3, "max_grad_norm": 1.0}
    privacy = budget | {"sample_rate": rate, "expected_batch_size": rate * EXAMPLES}
    options = {"args": arguments(tmp_path, max_steps=steps), "train_dataset": Texts(), "engine": engine}
    DPTrainer(model=language_model("lora"), **options, privacy=privacy).train()
    assert len(engine.accountant) == steps and 2.9 < engine.get_epsilon(1e-3) <= 3.0


@pytest.mark.filterwarnings("ignore")
def test_a_trainer_refuses_options_that_it_would_not_follow(tmp_path):
    pytest.importorskip("transformers")
    from dpcore.transformers import DPTrainer

    def trainer(*given, **options):
        privacy = {"noise_multiplier": 1.0, "max_grad_norm": 1.0} | options
        return DPTrainer(
            language_model("gpt2"), arguments(tmp_path), None, Texts(), *given, engine=PrivacyEngine(), privacy=privacy
        )

    for options in ({"grad_sample_mode": "ghost"}, {"wrap_model": True}):
        with pytest.raises(UnsupportedError, match=r"grad_sample_mode='ghost' or the wrapper of wrap_model=True"):
            trainer(**options)
    with pytest.raises(UnsupportedError, match=r"loss_reduction='sum', but the loss of a DPTrainer is the mean"):
        trainer(loss_reduction="sum")
    with pytest.raises(UnsupportedError, match="compute_loss_func average"):
        trainer(None, None, None, lambda outputs, labels, **given: outputs.logits.sum())


# ---- TRL


@pytest.mark.filterwarnings("ignore")
def test_trls_trainer_without_noise_ends_where_its_own_does(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")
    import tokenizers
    import transformers

    from dpcore.transformers import DPTrainerMixin

    words = [f"w{i}" for i in range(WORDS - 3)]
    vocabulary = {word: i for i, word in enumerate(["<pad>", "<eos>", "<unk>", *words])}
    split = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    split.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=split, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )
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


def mixture_of_experts(balanced: bool) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    sizes |= {"vocab_size": WORDS, "num_key_value_heads": 2, "num_local_experts": 2, "max_position_embeddings": 8}
    config = transformers.MixtralConfig(**sizes, output_router_logits=balanced, pad_token_id=0)
    return transformers.MixtralForCausalLM(config)


@pytest.mark.filterwarnings("ignore")
def test_a_routers_auxiliary_loss_is_not_left_out_in_silence(tmp_path):
    pytest.importorskip("transformers")
    from dpcore.transformers import DPTrainer

    def trainer(balanced: bool, adapted: bool = False):
        model = mixture_of_experts(balanced)
        if adapted:
            peft = pytest.importorskip("peft")
            lora = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
            model = peft.get_peft_model(model, lora)
        options = {"args": arguments(tmp_path, max_steps=1), "train_dataset": Texts(), "engine": PrivacyEngine()}
        privacy = {"noise_multiplier": 1.0, "max_grad_norm": 1.0, "check_isolation": not adapted}
        return DPTrainer(model=model, **options, privacy=privacy)

    with pytest.raises(UnsupportedError, match=r"aux_loss.*output_router_logits = False"):
        trainer(True)
    # Asked for later, by who has switched the experiments on mixing off, which find such a number among the outputs.
    late = trainer(False, adapted=True)
    start = state(late.model)
    late.model.config.output_router_logits = True
    with pytest.raises(UnsupportedError, match=r"aux_loss.*output_router_logits = False"):
        late.train()
    assert len(late.engine.accountant) == 0
    assert all(torch.equal(value, start[name]) for name, value in state(late.model).items())
    done = trainer(False)
    done.train()
    assert len(done.engine.accountant) == 1


# ---- accelerate


def numbers() -> TensorDataset:
    torch.manual_seed(0)
    return TensorDataset(torch.randn(EXAMPLES, 6, dtype=torch.float64), torch.arange(EXAMPLES) % 3)


def parts(module: nn.Module):
    optimizer = torch.optim.Adam(module.parameters(), lr=0.01)
    return module, optimizer, DataLoader(numbers(), batch_size=ROWS)


def network() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).double()


def loop(accelerator, model, optimizer, loader) -> float:
    """One round with a schedule; returns the last learning rate."""
    scheduler = accelerator.prepare(torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.5))
    for x, y in loader:
        with accelerator.accumulate(model):
            accelerator.backward(F.cross_entropy(model(x), y))
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    return scheduler.get_last_lr()[0]


def test_an_accelerators_loop_without_noise_ends_where_its_own_does():
    accelerate = pytest.importorskip("accelerate")
    from dpcore.accelerate import prepare

    model = network()
    start, reference = state(model), copy.deepcopy(model)
    accelerator = accelerate.Accelerator(gradient_accumulation_steps=PIECES, cpu=True)
    rate = loop(accelerator, *accelerator.prepare(*parts(model)))
    accelerator = accelerate.Accelerator(gradient_accumulation_steps=PIECES, cpu=True)
    engine = PrivacyEngine()
    module, optimizer, loader = parts(reference)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        private = prepare(accelerator, engine, module=module, optimizer=optimizer, data_loader=loader, **WITHOUT)
    assert loop(accelerator, *private) == rate == 0.01 * 0.5**4
    assert len(engine.accountant) == STEPS
    assert difference(start, model, reference) < 1e-12


def test_an_accelerator_says_where_a_batch_has_ended():
    """Loops count their steps and average weights there; it said so at every piece."""
    accelerate = pytest.importorskip("accelerate")
    from dpcore.accelerate import prepare

    accelerator = accelerate.Accelerator(gradient_accumulation_steps=PIECES, cpu=True)
    engine = PrivacyEngine(seed=1)
    module, optimizer, loader = parts(network())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        given = {"noise_multiplier": 1.0, "max_grad_norm": 1.0}
        model, optimizer, loader = prepare(
            accelerator, engine, module=module, optimizer=optimizer, data_loader=loader, **given
        )
    total = len(loader.loader)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=total)
    scheduler, ended, pieces = accelerator.prepare(schedule), 0, 0
    for x, y in loader:
        with accelerator.accumulate(model):
            accelerator.backward(F.cross_entropy(model(x), y))
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        pieces += 1
        ended += accelerator.sync_gradients
    assert ended == len(engine.accountant) == schedule.last_epoch == total < pieces


def test_a_schedule_that_an_accelerator_does_not_know_moves_once_a_batch():
    """It is stepped for every piece, with nothing of accelerate's between it and the loop."""
    pytest.importorskip("accelerate")
    accelerator, _, model, optimizer, loader = private_run()
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    pieces = 0
    for x, y in loader:
        accelerator.backward(F.cross_entropy(model(x), y))
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        pieces += 1
    assert schedule.last_epoch == STEPS < pieces


def test_a_private_loop_of_an_accelerator_spends_its_budget_and_no_more():
    accelerate = pytest.importorskip("accelerate")
    from dpcore.accelerate import prepare

    accelerator = accelerate.Accelerator(gradient_accumulation_steps=PIECES, cpu=True)
    engine = PrivacyEngine(seed=1)
    budget = {"target_epsilon": 3.0, "target_delta": 1e-3, "epochs": 1, "max_grad_norm": 1.0}
    module, optimizer, loader = parts(network())
    private = prepare(accelerator, engine, module=module, optimizer=optimizer, data_loader=loader, **budget)
    loop(accelerator, *private)
    assert len(engine.accountant) == STEPS and 2.9 < engine.get_epsilon(1e-3) <= 3.0
    with pytest.raises(BudgetError):
        loop(accelerator, *private)


def private_run(**options):
    """(accelerator, engine, module, optimizer, loader), all of them new; the budget is for two rounds."""
    import accelerate

    from dpcore.accelerate import prepare

    accelerator = accelerate.Accelerator(gradient_accumulation_steps=PIECES, cpu=True)
    engine = PrivacyEngine(seed=1)
    module, optimizer, loader = parts(network())
    options = {"target_epsilon": 3.0, "target_delta": 1e-3, "epochs": 2, "max_grad_norm": 1.0} | options
    private = prepare(accelerator, engine, module=module, optimizer=optimizer, data_loader=loader, **options)
    return accelerator, engine, *private


def test_an_accelerator_goes_on_with_its_budget_from_its_own_checkpoint(tmp_path):
    pytest.importorskip("accelerate")
    from dpcore.accelerate import STATE

    accelerator, whole, *run = private_run()
    loop(accelerator, *run)
    accelerator.save_state(str(tmp_path))
    loop(accelerator, *run)
    with pytest.raises(PrivacyError, match="counted 20 steps that are not in the checkpoint"):
        accelerator.load_state(str(tmp_path))

    again, resumed, *rest = private_run()
    again.load_state(str(tmp_path))
    assert len(resumed.accountant) == STEPS and rest[1].optimizer.steps == STEPS
    loop(again, *rest)
    assert resumed.accountant.history == whole.accountant.history and len(resumed.accountant) == 2 * STEPS
    assert resumed.get_epsilon(1e-3) == whole.get_epsilon(1e-3)
    first, second = state(run[0]), state(rest[0])
    assert all(torch.equal(first[name], second[name]) for name in first)
    with pytest.raises(BudgetError):
        loop(again, *rest)

    other = private_run(max_grad_norm=2.0)[0]
    with pytest.raises(PrivacyError, match=r"saved with max_grad_norm=1\.0"):
        other.load_state(str(tmp_path))
    (tmp_path / STATE).unlink()
    with pytest.raises(PrivacyError, match="budget would be counted anew"):
        private_run()[0].load_state(str(tmp_path))


def test_an_accelerator_refuses_a_checkpoint_that_knows_no_budget(tmp_path):
    accelerate = pytest.importorskip("accelerate")

    plain = accelerate.Accelerator(cpu=True)
    plain.prepare(*parts(network()))
    plain.save_state(str(tmp_path))
    accelerator, _, module, *_ = private_run()
    start = state(module)
    # As some scripts do: a hook that loads the weights itself, and takes the module away from those after it.
    accelerator.register_load_state_pre_hook(lambda models, folder: models.clear())
    with pytest.raises(PrivacyError, match="budget would be counted anew"):
        accelerator.load_state(str(tmp_path))
    assert all(torch.equal(start[name], value) for name, value in state(module).items())


def test_an_accelerator_saves_each_of_its_runs_and_none_that_it_has_freed(tmp_path):
    accelerate = pytest.importorskip("accelerate")
    from dpcore.accelerate import prepare

    accelerator = accelerate.Accelerator(cpu=True)
    for _ in range(2):
        module, optimizer, loader = parts(network())
        options = {"noise_multiplier": 1.0, "max_grad_norm": 1.0}
        engine = PrivacyEngine()
        prepare(accelerator, engine, module=module, optimizer=optimizer, data_loader=loader, **options)
    accelerator.save_state(str(tmp_path / "both"))
    assert {file.name for file in (tmp_path / "both").glob("privacy*")} == {"privacy.pt", "privacy_1.pt"}
    accelerator.free_memory()
    accelerator.save_state(str(tmp_path / "none"))
    assert not list((tmp_path / "none").glob("privacy*"))


def test_an_accelerator_saves_between_batches_only(tmp_path):
    pytest.importorskip("accelerate")
    accelerator, _, model, optimizer, loader = private_run()
    for x, y in loader:
        accelerator.backward(F.cross_entropy(model(x), y))
        optimizer.step()
        optimizer.zero_grad()
        if optimizer.batch_goes_on:
            break
    with pytest.raises(PrivacyError, match=r"within a logical batch.*Save where optimizer\.batch_goes_on is False"):
        accelerator.save_state(str(tmp_path))


@pytest.mark.parametrize("size", ["auto", 3])
def test_an_accelerators_batches_are_cut_as_asked(size):
    pytest.importorskip("accelerate")
    ends = []
    for options in ({}, {"max_physical_batch_size": size}):
        accelerator, engine, *run = private_run(**options)
        assert loop(accelerator, *run) == 0.01 * 0.5**4
        assert len(engine.accountant) == STEPS
        ends.append(accelerator.unwrap_model(run[0]).to_standard_module())
    assert difference(state(network()), *ends) < 1e-9


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("mode", ["bookkeeping", "hooks", "ghost"])
@pytest.mark.parametrize("wrapped", [True, False])
def test_an_accelerators_modes_are_right_or_refused(mode, wrapped):
    """Three objects that train as the default mode's do, or a sentence that names the option."""
    accelerate = pytest.importorskip("accelerate")
    from dpcore.accelerate import prepare

    ends = []
    for options in ({}, {"grad_sample_mode": mode, "wrap_model": wrapped}):
        accelerator = accelerate.Accelerator(gradient_accumulation_steps=PIECES, cpu=True)
        module, optimizer, loader = parts(network())
        given = {"module": module, "optimizer": optimizer, "data_loader": loader, **WITHOUT, **options}
        try:
            private = prepare(accelerator, PrivacyEngine(), **given)
        except UnsupportedError as refused:
            assert options and "grad_sample_mode" in str(refused) and "wrap_model" in str(refused)
            assert mode == "ghost" or not wrapped
            return
        assert not options or (mode != "ghost" and wrapped)
        loop(accelerator, *private)
        ends.append(module)
    assert difference(state(network()), *ends) < 1e-12


def test_an_accelerators_loader_must_be_numbered():
    pytest.importorskip("accelerate")
    import accelerate

    from dpcore.accelerate import prepare

    class Stream(IterableDataset):
        def __iter__(self):
            return iter(numbers())

    module, optimizer, _ = parts(network())
    given = {"module": module, "optimizer": optimizer, "data_loader": DataLoader(Stream(), batch_size=ROWS)}
    with pytest.raises(UnsupportedError, match=r"\(Stream\) is an iterable.*map-style"):
        prepare(accelerate.Accelerator(cpu=True), PrivacyEngine(), **given, noise_multiplier=1.0, max_grad_norm=1.0)


@pytest.mark.parametrize("first", ["make_private", "prepare"])
def test_accelerates_own_prepare_is_told_the_recipe(first):
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True)
    engine, given = PrivacyEngine(), parts(network())

    def make_private(module, optimizer, loader):
        return engine.make_private(
            module=module, optimizer=optimizer, data_loader=loader, noise_multiplier=1.0, max_grad_norm=1.0
        )

    with pytest.raises((PrivacyError, UnsupportedError), match=r"dpcore\.accelerate\.prepare|dpcore\.transformers"):
        if first == "make_private":
            loop(accelerator, *accelerator.prepare(*make_private(*given)))
        else:
            make_private(*accelerator.prepare(*given))


class Opened(Dataset):
    """Examples that a worker process can read after it has opened its file."""

    def __init__(self, examples) -> None:
        self.examples, self.file = examples, None

    def __len__(self) -> int:
        return EXAMPLES

    def __getitem__(self, i: int):
        return self.file[i]


def open_file(number: int) -> None:
    data = torch.utils.data.get_worker_info().dataset
    data.file = data.examples


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("library", ["accelerate", "transformers"])
def test_worker_processes_are_started_as_the_loader_says(library, tmp_path):
    pytest.importorskip("transformers")
    import accelerate

    from dpcore.accelerate import prepare
    from dpcore.transformers import DPTrainer

    class Reading(DPTrainer):
        def _make_private(self, loader):
            loader.worker_init_fn = open_file
            super()._make_private(loader)

    engine, workers = PrivacyEngine(), {"num_workers": 1, "worker_init_fn": open_file, "persistent_workers": True}
    privacy = {"noise_multiplier": 1.0, "max_grad_norm": 1.0}
    if library == "transformers":
        options = {"dataloader_num_workers": 1, "dataloader_persistent_workers": True, "max_steps": 2}
        given = {"args": arguments(tmp_path, **options), "train_dataset": Opened(Texts()), "engine": engine}
        trainer = Reading(model=language_model("lora"), **given, privacy=privacy)
        trainer.train()
        loader, steps = trainer.get_train_dataloader(), 2
    else:
        accelerator = accelerate.Accelerator(gradient_accumulation_steps=PIECES, cpu=True)
        module, optimizer, _ = parts(network())
        given = {
            "module": module,
            "optimizer": optimizer,
            "data_loader": DataLoader(Opened(numbers()), ROWS, **workers),
        }
        run = prepare(accelerator, engine, **given, **privacy)
        loop(accelerator, *run)
        loader, steps = run[2], STEPS
    assert len(engine.accountant) == steps and loader.persistent_workers
