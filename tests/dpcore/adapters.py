"""PEFT's adapters on the architectures: LoRA, DoRA, IA3, prefix and prompt tuning.

What an adapter is put on follows PEFT's own choice for that kind of model where it has one, else the same layers under
their names there. A classifier's head is trained beside its adapter, as PEFT does it for ``task_type="SEQ_CLS"``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from tests.dpcore.architectures import Architecture


@dataclass(frozen=True)
class Places:
    """``low_rank``: layers that get LoRA or DoRA; ``scaled``: layers whose outputs IA3 scales, ``fed``: whose inputs.

    ``task``: PEFT's name of the task, None for models that it knows no task of. ``prefix``: whether PEFT can put a
    prefix before the keys and values of such a model, which takes a model that is given past ones. ``heads``: layers
    that are trained beside the adapter, as PEFT trains a classifier's by itself where it knows the task. ``options``:
    more for the layers' adapters.
    """

    low_rank: tuple[str, ...]
    scaled: tuple[str, ...] = ()
    fed: tuple[str, ...] = ()
    task: str | None = "CAUSAL_LM"
    prefix: bool = True
    heads: tuple[str, ...] = ()
    options: tuple[tuple[str, Any], ...] = ()


_BERT = Places(("query", "value"), ("key", "value"), ("output.dense",), "SEQ_CLS")
_GPT2 = Places(("c_attn", "c_proj"), ("c_attn",), ("mlp.c_proj",), options=(("fan_in_fan_out", True),))
_LLAMA = Places(("q_proj", "v_proj"), ("k_proj", "v_proj"), ("down_proj",))
_TIMM = Places(("attn.qkv", "mlp.fc2"), ("attn.qkv",), ("mlp.fc2",), None, False, ("head",))

PLACES = {
    "GPT-2": _GPT2,
    "GPT-2, head of its own": _GPT2,
    "BERT": _BERT,
    "RoBERTa": _BERT,
    "ELECTRA": _BERT,
    "DeBERTa-v2": Places(("query_proj", "value_proj"), ("key_proj", "value_proj"), ("output.dense",), "SEQ_CLS", False),
    "BERT, masked words": replace(_BERT, task=None, prefix=False),
    "DistilBERT": Places(("q_lin", "v_lin"), ("k_lin", "v_lin"), ("lin2",), "SEQ_CLS", False),
    "ModernBERT": Places(("Wqkv", "attn.Wo"), ("Wqkv",), ("mlp.Wo",), "SEQ_CLS", False),
    "T5": Places(("q", "v"), ("k", "v"), ("wo",), "SEQ_2_SEQ_LM"),
    "OPT": Places(("q_proj", "v_proj"), ("k_proj", "v_proj"), ("fc2",)),
    "Llama (GQA)": _LLAMA,
    "Mistral": _LLAMA,
    "Qwen2": _LLAMA,
    "Qwen3": _LLAMA,
    "Gemma 2": _LLAMA,
    "Phi-3": Places(("qkv_proj", "o_proj"), ("qkv_proj",), ("down_proj",)),
    "Llama, tied head": _LLAMA,
    "Gemma 3": _LLAMA,
    "Mamba": Places(("in_proj", "x_proj"), ("in_proj",), ("x_proj",), prefix=False),
    "ViT": Places(("q_proj", "v_proj"), ("k_proj", "v_proj"), ("mlp.fc2",), None, False, ("classifier",)),
    "CLIP's text tower": Places(
        ("q_proj", "v_proj"), ("k_proj", "v_proj"), ("fc2",), None, False, ("text_projection",)
    ),
    "vit_tiny": _TIMM,
    "deit, distilled": replace(_TIMM, heads=("head", "head_dist")),
    "swin": _TIMM,
    "mixer": Places(
        ("mlp_tokens.fc1", "mlp_channels.fc2"), ("mlp_tokens.fc1",), ("mlp_channels.fc2",), None, False, ("head",)
    ),
    "convnext": Places(("mlp.fc1", "downsample.1"), ("mlp.fc1",), ("mlp.fc2",), None, False, ("head.fc",)),
    "ResNet, GroupNorm": Places(("conv1", "conv2"), ("conv1",), ("conv2",), None, False, ("fc",)),
    "NFNet": Places(("fc1", "fc2"), ("fc1",), ("fc2",), None, False, ("head.fc",)),
}


def adapters(bases: Iterable[Architecture]) -> Iterator[Architecture]:
    """Every architecture with every adapter that PEFT has for it."""
    import peft

    for base in bases:
        at = PLACES[base.name]
        for name, config in _configurations(at).items():
            yield _adapted(base, name, config)
        if base.name == "Llama (GQA)":
            tuning = {"task_type": "CAUSAL_LM", "num_virtual_tokens": 3}
            yield _adapted(base, "prompt tuning", lambda tuning=tuning: peft.PromptTuningConfig(**tuning))


def _configurations(at: Places) -> dict[str, Callable[[], Any]]:
    import peft

    both = {"task_type": at.task, "modules_to_save": list(at.heads) or None, **dict(at.options)}
    low = {"r": 2, "target_modules": list(at.low_rank), **both}
    scale = {"target_modules": [*at.scaled, *at.fed], "feedforward_modules": list(at.fed), **both}
    found: dict[str, Callable[[], Any]] = {
        "LoRA": lambda: peft.LoraConfig(**low),
        "DoRA": lambda: peft.LoraConfig(**low, use_dora=True),
        "IA3": lambda: peft.IA3Config(**scale),
    }
    if at.prefix:
        found["prefix tuning"] = lambda: peft.PrefixTuningConfig(task_type=at.task, num_virtual_tokens=3)
    return found


def _adapted(base: Architecture, name: str, config: Callable[[], Any]) -> Architecture:
    import peft

    def make() -> nn.Module:
        return _stirred(peft.get_peft_model(base.make(), config()))

    return replace(base, name=f"{base.name}, {name}", library="peft", make=make)


def _stirred(model: nn.Module) -> nn.Module:
    """The model with other values in what is trained: adapters begin at zero, where half of the gradients vanish."""
    with torch.no_grad():
        for param in model.parameters():
            if param.requires_grad:
                param.add_(0.05 * torch.randn_like(param))
    return model
