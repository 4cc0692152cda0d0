"""Architectures of transformers, PEFT and timm with small random weights, each with a batch and its losses.

Nothing is downloaded. Texts are padded to different lengths, and a text's loss is the mean over its own tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.dpcore import torchvision_on_cpu

VOCABULARY, LENGTH, CLASSES = 40, 7, 3
PADDING = 0

SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 24,
    "max_position_embeddings": 32,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "pad_token_id": PADDING,
}
DECODER = {"num_key_value_heads": 2, "head_dim": 4, "attention_dropout": 0.0}
GPT2 = {"n_embd": 16, "n_layer": 2, "n_head": 4, "vocab_size": VOCABULARY, "n_positions": 32}
GPT2 |= dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
OPT = {"vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "ffn_dim": 24}
OPT |= {"max_position_embeddings": 32, "dropout": 0.0, "word_embed_proj_dim": 16, "pad_token_id": 1}
T5 = {"vocab_size": VOCABULARY, "d_model": 16, "d_kv": 4, "d_ff": 24, "num_layers": 2, "num_heads": 4}
DISTIL = {"vocab_size": VOCABULARY, "dim": 16, "n_layers": 2, "n_heads": 4, "hidden_dim": 24}
DISTIL |= {"max_position_embeddings": 32} | dict.fromkeys(("dropout", "attention_dropout", "seq_classif_dropout"), 0.0)


@dataclass(frozen=True)
class Batch:
    """``x``: what the model is called with, a tensor [B, ...] or keyword arguments; ``y`` [B, ...]: targets."""

    x: Any
    y: Tensor

    def example(self, i: int, group: int = 1) -> Batch:
        """The batch of example i alone, of ``group`` rows."""
        return self.rows(torch.arange(i * group, (i + 1) * group))

    def rows(self, index: Tensor) -> Batch:
        """The batch of these rows [k], of which some may be the same."""
        x = {k: v[index] for k, v in self.x.items()} if isinstance(self.x, dict) else self.x[index]
        return Batch(x, self.y[index])

    def double(self) -> Batch:
        """The same batch with floating-point inputs in float64."""
        return Batch(self.x.double() if isinstance(self.x, Tensor) and self.x.is_floating_point() else self.x, self.y)


@dataclass(frozen=True)
class Architecture:
    """``losses(scores(outputs), y)`` are the [B] losses of a model's outputs."""

    name: str
    library: str
    make: Callable[[], nn.Module]
    batch: Callable[[], Batch]
    scores: Callable[[Any], Tensor]
    losses: Callable[[Tensor, Tensor], Tensor]

    def model(self) -> nn.Module:
        """The model in training mode, with the same weights whenever it is made."""
        torch.manual_seed(5)
        return self.make().train()


def _texts(count: int = 6) -> tuple[Tensor, Tensor]:
    """(ids, mask [count, LENGTH]) of texts of different lengths, the first one of full length."""
    numbers = torch.Generator().manual_seed(4)
    ids = torch.randint(3, VOCABULARY, (count, LENGTH), generator=numbers)
    lengths = torch.tensor([LENGTH, 4, 6, LENGTH, 3, 5])[:count]
    mask = (torch.arange(LENGTH) < lengths.unsqueeze(1)).long()
    return ids * mask, mask


def texts() -> Batch:
    """Padded texts with a label each."""
    ids, mask = _texts()
    return Batch({"input_ids": ids, "attention_mask": mask}, torch.arange(len(ids)) % CLASSES)


def sentences() -> Batch:
    """Padded texts, each its own target."""
    ids, mask = _texts()
    return Batch({"input_ids": ids, "attention_mask": mask}, ids)


def pairs() -> Batch:
    """Padded texts and others to be made of them."""
    ids, mask = _texts()
    return Batch({"input_ids": ids, "attention_mask": mask, "decoder_input_ids": ids.flip(1)}, ids.flip(1))


def pictures() -> Batch:
    """Pictures with a label each."""
    numbers = torch.Generator().manual_seed(4)
    return Batch(torch.randn(4, 3, 32, 32, generator=numbers), torch.arange(4) % CLASSES)


def next_token(logits: Tensor, ids: Tensor) -> Tensor:
    """[B] means over an example's own tokens; logits [B, T', V] of which the last T count."""
    logits = logits[:, -ids.shape[1] :]
    losses = F.cross_entropy(logits[:, :-1].transpose(1, 2).float(), ids[:, 1:], reduction="none")
    own = (ids[:, 1:] != PADDING).to(losses.dtype)
    return (losses * own).sum(1) / own.sum(1).clamp(min=1)


def label(logits: Tensor, y: Tensor) -> Tensor:
    """[B] cross entropies of logits [B, classes]."""
    return F.cross_entropy(logits, y, reduction="none")


def logits_of(outputs: Any) -> Tensor:
    """The logits of an output of transformers."""
    return outputs.logits


def architectures() -> list[Architecture]:
    """All of them, trained as a whole; ImportError where a library is missing. Those with adapters: adapters.py."""
    torchvision_on_cpu.make_importable()
    return [*_transformers(), *_pictures()]


def _transformers() -> Iterator[Architecture]:
    import transformers as hf

    def causal(name: str, make: Callable[[], nn.Module]) -> Architecture:
        return Architecture(name, "transformers", make, sentences, logits_of, next_token)

    def classifier(name: str, make: Callable[[], nn.Module]) -> Architecture:
        return Architecture(name, "transformers", make, texts, logits_of, label)

    yield causal("GPT-2", lambda: hf.GPT2LMHeadModel(hf.GPT2Config(**GPT2)))
    yield causal("GPT-2, head of its own", lambda: hf.GPT2LMHeadModel(hf.GPT2Config(**GPT2, tie_word_embeddings=False)))
    for name, kind in {"BERT": "Bert", "RoBERTa": "Roberta", "ELECTRA": "Electra", "DeBERTa-v2": "DebertaV2"}.items():
        more: dict[str, Any] = {"embedding_size": 16} if kind == "Electra" else {}
        if kind == "DebertaV2":
            more = {"relative_attention": True, "pos_att_type": ["p2c", "c2p"]}

        def encoder(kind: str = kind, more: dict[str, Any] = more) -> nn.Module:
            config = getattr(hf, f"{kind}Config")(**SIZES, **more, num_labels=CLASSES)
            return getattr(hf, f"{kind}ForSequenceClassification")(config)

        yield classifier(name, encoder)
    yield causal("BERT, masked words", lambda: hf.BertForMaskedLM(hf.BertConfig(**SIZES)))
    yield classifier(
        "DistilBERT", lambda: hf.DistilBertForSequenceClassification(hf.DistilBertConfig(**DISTIL, num_labels=CLASSES))
    )
    modern = {k: v for k, v in SIZES.items() if "prob" not in k}
    modern |= {"bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2}
    yield classifier(
        "ModernBERT",
        lambda: hf.ModernBertForSequenceClassification(hf.ModernBertConfig(**modern, num_labels=CLASSES)),
    )
    yield Architecture(
        "T5",
        "transformers",
        lambda: hf.T5ForConditionalGeneration(hf.T5Config(**T5, dropout_rate=0.0, decoder_start_token_id=0)),
        pairs,
        logits_of,
        next_token,
    )
    yield causal("OPT", lambda: hf.OPTForCausalLM(hf.OPTConfig(**OPT)))
    decoders = {"Llama (GQA)": "Llama", "Mistral": "Mistral", "Qwen2": "Qwen2", "Qwen3": "Qwen3", "Gemma 2": "Gemma2"}
    for name, kind in (decoders | {"Phi-3": "Phi3"}).items():

        def decoder(kind: str = kind) -> nn.Module:
            return getattr(hf, f"{kind}ForCausalLM")(getattr(hf, f"{kind}Config")(**SIZES, **DECODER))

        yield causal(name, decoder)
    yield causal(
        "Llama, tied head",
        lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**SIZES, **DECODER, tie_word_embeddings=True)),
    )
    yield causal("Gemma 3", lambda: hf.Gemma3ForCausalLM(hf.Gemma3TextConfig(**SIZES, **DECODER)))
    mamba = {"vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 2, "state_size": 4}
    yield causal("Mamba", lambda: hf.MambaForCausalLM(hf.MambaConfig(**mamba)))
    vit = {**SIZES, "image_size": 32, "patch_size": 16, "num_labels": CLASSES}
    yield Architecture(
        "ViT", "transformers", lambda: hf.ViTForImageClassification(hf.ViTConfig(**vit)), pictures, logits_of, label
    )
    clip = {**SIZES, "projection_dim": CLASSES, "eos_token_id": 2, "bos_token_id": 1}
    yield Architecture(
        "CLIP's text tower",
        "transformers",
        lambda: hf.CLIPTextModelWithProjection(hf.CLIPTextConfig(**clip)),
        texts,
        lambda outputs: outputs.text_embeds,
        label,
    )


def _pictures() -> Iterator[Architecture]:
    import timm

    small = {"img_size": 32, "depth": 2, "embed_dim": 12, "num_heads": 3}
    swin = {"img_size": 32, "window_size": 4, "depths": (2, 1), "num_heads": (2, 4), "embed_dim": 8}
    mixer = {"img_size": 32, "patch_size": 16, "num_blocks": 2, "embed_dim": 12, "num_classes": CLASSES}
    nfnet = {
        "depths": (1, 1),
        "channels": (16, 16),
        "stem_chs": 8,
        "group_size": 8,
        "attn_layer": "se",
        "attn_kwargs": {},
    }

    def create(kind: str, **options: Any) -> Callable[[], nn.Module]:
        return lambda: timm.create_model(kind, num_classes=CLASSES, drop_path_rate=0.0, **options)

    models = {
        "vit_tiny": create("vit_tiny_patch16_224", **small),
        "deit, distilled": create("deit_tiny_distilled_patch16_224", **small),
        "swin": create("swin_tiny_patch4_window7_224", **swin),
        "mixer": lambda: timm.models.MlpMixer(**mixer),
        "convnext": create("convnext_atto", depths=(1, 1, 1, 1), dims=(4, 8, 8, 8)),
        "ResNet, GroupNorm": create("resnet18", norm_layer="groupnorm1", channels=(8, 8, 8, 8), layers=(1, 1, 1, 1)),
        "NFNet": lambda: timm.models.NormFreeNet(
            timm.models.nfnet.NfCfg(**nfnet, std_conv_eps=1e-5, skipinit=True), num_classes=CLASSES
        ),
    }
    for name, make in models.items():
        yield Architecture(name, "timm", make, pictures, lambda outputs: outputs, label)
