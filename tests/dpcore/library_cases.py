"""Honest models of transformers, PEFT and timm with small random weights; none where transformers is missing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from tests.dpcore.case_runner import Case, classify

SIZES = {
    "vocab_size": 40,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 24,
    "max_position_embeddings": 32,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "pad_token_id": 0,
}
GATED = {"num_key_value_heads": 2, "head_dim": 4, "attention_dropout": 0.0, "tie_word_embeddings": True}


def tokens() -> list[Any]:
    """Six examples (ids [7], label below 3)."""
    numbers = torch.Generator().manual_seed(4)
    return [(torch.randint(3, 40, (7,), generator=numbers), k % 3) for k in range(6)]


def pictures() -> list[Any]:
    numbers = torch.Generator().manual_seed(4)
    return [(torch.randn(3, 32, 32, generator=numbers), k % 3) for k in range(4)]


def next_token(model: Any, batch: Any) -> torch.Tensor:
    """The mean over examples of the mean over tokens, of logits [B, T, V]."""
    logits = model(input_ids=batch[0]).logits
    return F.cross_entropy(logits[:, :-1].transpose(1, 2), batch[0][:, 1:])


def larger(model: Any, batch: Any) -> torch.Tensor:
    """For gradients so small that weights near one could not show them."""
    return 1000 * next_token(model, batch)


def own_loss(model: Any, batch: Any) -> torch.Tensor:
    """The loss that the model computes from labels."""
    return model(input_ids=batch[0], labels=batch[0]).loss


def classes(model: Any, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]).logits, batch[1])


def translated(model: Any, batch: Any) -> torch.Tensor:
    return model(input_ids=batch[0], labels=batch[0].flip(1)).loss


def library_cases() -> list[Case]:
    """The cases of the libraries that can be imported."""
    try:
        import transformers as hf
    except ImportError:
        return []
    cases = []

    def add(name: str, model: Callable[[], nn.Module], loss: Any = next_token, **options: Any) -> None:
        cases.append(Case(name, "honest", model, examples=options.pop("examples", tokens), loss=loss, **options))

    def causal(kind: str, **sizes: Any) -> Callable[[], nn.Module]:
        config = getattr(hf, f"{kind}Config")
        return lambda: getattr(hf, f"{kind}ForCausalLM")(config(**{**SIZES, **sizes}))

    gpt2 = {"n_embd": 16, "n_layer": 2, "n_head": 4, "vocab_size": 40, "n_positions": 32}
    gpt2 |= dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    add("GPT-2", lambda: hf.GPT2LMHeadModel(hf.GPT2Config(**gpt2)))
    add("GPT-2, its own loss", lambda: hf.GPT2LMHeadModel(hf.GPT2Config(**gpt2)), own_loss)
    add(
        "GPT-2, bfloat16 autocast",
        lambda: hf.GPT2LMHeadModel(hf.GPT2Config(**gpt2)),
        autocast=True,
        half=True,
        tolerance=2e-2,
    )
    for kind in ("Bert", "Roberta", "Electra", "DebertaV2"):
        more = {"relative_attention": True, "pos_att_type": ["p2c", "c2p"]} if kind == "DebertaV2" else {}
        more |= {"embedding_size": 16} if kind == "Electra" else {}
        add(
            f"{kind} (classification)",
            lambda kind=kind, more=more: getattr(hf, f"{kind}ForSequenceClassification")(
                getattr(hf, f"{kind}Config")(**SIZES, **more, num_labels=3)
            ),
            classes,
        )
    distil = {"vocab_size": 40, "dim": 16, "n_layers": 2, "n_heads": 4, "hidden_dim": 24, "max_position_embeddings": 32}
    distil |= dict.fromkeys(("dropout", "attention_dropout", "seq_classif_dropout"), 0.0)
    add(
        "DistilBERT",
        lambda: hf.DistilBertForSequenceClassification(hf.DistilBertConfig(**distil, num_labels=3)),
        classes,
    )
    for kind in ("Llama", "Mistral", "Qwen2", "Qwen3", "Gemma2", "Gemma3Text", "Phi3"):
        if kind == "Gemma3Text":
            add("Gemma 3", lambda: hf.Gemma3ForCausalLM(hf.Gemma3TextConfig(**SIZES, **GATED)))
        else:
            add(kind, causal(kind, **GATED))
    opt = {"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "ffn_dim": 24}
    opt |= {"max_position_embeddings": 32, "dropout": 0.0, "word_embed_proj_dim": 16, "pad_token_id": 1}
    add("OPT", lambda: hf.OPTForCausalLM(hf.OPTConfig(**opt)))
    t5 = {"vocab_size": 40, "d_model": 16, "d_kv": 4, "d_ff": 24, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.0}
    add("T5", lambda: hf.T5ForConditionalGeneration(hf.T5Config(**t5, decoder_start_token_id=0)), translated)
    modern = {k: v for k, v in SIZES.items() if "prob" not in k}
    add(
        "ModernBERT",
        lambda: hf.ModernBertForSequenceClassification(
            hf.ModernBertConfig(**modern, num_labels=3, bos_token_id=1, eos_token_id=2, cls_token_id=1, sep_token_id=2)
        ),
        classes,
    )
    add(
        "Mamba",
        lambda: hf.MambaForCausalLM(hf.MambaConfig(vocab_size=40, hidden_size=16, num_hidden_layers=2, state_size=4)),
    )
    vit = {**SIZES, "image_size": 32, "patch_size": 16, "num_labels": 3}
    add("ViT", lambda: hf.ViTForImageClassification(hf.ViTConfig(**vit)), classes, examples=pictures)
    add(
        "CLIP's text tower",
        lambda: hf.CLIPTextModelWithProjection(
            hf.CLIPTextConfig(**SIZES, projection_dim=3, eos_token_id=2, bos_token_id=1)
        ),
        lambda m, b: F.cross_entropy(m(b[0]).text_embeds, b[1]),
    )
    for case in _adapters(hf, gpt2):
        cases.append(case)
    return cases + _images()


def _adapters(hf: Any, gpt2: dict[str, Any]) -> list[Case]:
    try:
        import peft
    except ImportError:
        return []

    def adapted(config: Any) -> Callable[[], nn.Module]:
        return lambda: peft.get_peft_model(hf.LlamaForCausalLM(hf.LlamaConfig(**SIZES, **GATED)), config())

    where = {"target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM"}
    configs = {
        "LoRA": lambda: peft.LoraConfig(r=2, init_lora_weights=False, **where),
        "DoRA": lambda: peft.LoraConfig(r=2, use_dora=True, init_lora_weights=False, **where),
        "IA3": lambda: peft.IA3Config(
            target_modules=["k_proj", "up_proj"], feedforward_modules=["up_proj"], task_type="CAUSAL_LM"
        ),
        "prompt tuning": lambda: peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
        "prefix tuning": lambda: peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
    }
    last = {"prompt tuning", "prefix tuning"}
    return [
        Case(
            f"Llama, {name}",
            "honest",
            adapted(config),
            examples=tokens,
            loss=larger if name == "IA3" else _last_tokens if name in last else next_token,
        )
        for name, config in configs.items()
    ]


def _last_tokens(model: Any, batch: Any) -> torch.Tensor:
    logits = model(input_ids=batch[0]).logits[:, -7:]
    return F.cross_entropy(logits[:, :-1].transpose(1, 2), batch[0][:, 1:])


def _images() -> list[Case]:
    try:
        import timm
    except (ImportError, RuntimeError):
        return []
    settings: dict[str, dict[str, Any]] = {
        "vit_tiny_patch16_224": {"img_size": 32, "depth": 2, "embed_dim": 12, "num_heads": 3},
        "deit_tiny_distilled_patch16_224": {"img_size": 32, "depth": 2, "embed_dim": 12, "num_heads": 3},
        "swin_tiny_patch4_window7_224": {
            "img_size": 32,
            "window_size": 4,
            "depths": (1, 1),
            "num_heads": (2, 4),
            "embed_dim": 8,
        },
        "convnext_atto": {"depths": (1, 1, 1, 1), "dims": (4, 8, 8, 8)},
        "resnet18": {"norm_layer": "groupnorm1", "channels": (8, 8, 8, 8), "layers": (1, 1, 1, 1)},
        "nf_resnet26": {},
    }
    mixer = {"img_size": 32, "patch_size": 16, "num_blocks": 2, "embed_dim": 12, "num_classes": 3}
    return [
        Case("timm MlpMixer", "honest", lambda: timm.models.MlpMixer(**mixer), examples=pictures),
    ] + [
        Case(
            f"timm {name}",
            "honest",
            lambda name=name, options=options: timm.create_model(name, num_classes=3, **options),
            examples=pictures,
            loss=classify,
        )
        for name, options in settings.items()
    ]
