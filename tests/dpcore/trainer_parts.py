"""Small models, texts and loops for tests of training libraries, by one process and by several."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, SequentialSampler, TensorDataset

from tests.dpcore import torchvision_on_cpu

torchvision_on_cpu.make_importable()

WITHOUT = {"noise_multiplier": 0.0, "max_grad_norm": 1e6, "poisson_sampling": False}
STEPS, PIECES, ROWS, TOKENS, WORDS = 20, 4, 2, 6, 32
EXAMPLES = STEPS * PIECES * ROWS
NOISY = {"noise_multiplier": 1.0, "max_grad_norm": 1.0}
WHOLE = NOISY | {"max_physical_batch_size": EXAMPLES}  # batches in one piece


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


def classifier(**options) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    rates = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = transformers.BertConfig(vocab_size=WORDS, max_position_embeddings=8, **sizes, **rates, **options)
    return transformers.BertForSequenceClassification(config).double()


def mixture_of_experts(balanced: bool) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    sizes |= {"vocab_size": WORDS, "num_key_value_heads": 2, "num_local_experts": 2, "max_position_embeddings": 8}
    config = transformers.MixtralConfig(**sizes, output_router_logits=balanced, pad_token_id=0)
    return transformers.MixtralForCausalLM(config)


def words_and_tokenizer():
    """All words but three, and a tokenizer of transformers that splits texts into them."""
    import tokenizers
    import transformers

    words = [f"w{i}" for i in range(WORDS - 3)]
    vocabulary = {word: i for i, word in enumerate(["<pad>", "<eos>", "<unk>", *words])}
    split = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    split.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return words, transformers.PreTrainedTokenizerFast(
        tokenizer_object=split, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )


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
