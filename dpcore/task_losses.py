"""The losses of transformers' tasks, by example, and what their models take and return."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from dpcore.errors import UnsupportedError

IGNORED = -100
HALF = (torch.float16, torch.bfloat16)


def task_of(model: Any) -> str | None:
    """The model's task, by its class: "causal", "aligned", "sequence classification", or None where it is another."""
    base = base_of(model)
    name = type(base).__name__
    if name.endswith("ForSequenceClassification"):
        return "sequence classification"
    if name.endswith(("ForCausalLM", "LMHeadModel")):
        return "causal"
    seq2seq = name.endswith("ForConditionalGeneration") and base.config.is_encoder_decoder
    return "aligned" if seq2seq or name.endswith(("ForMaskedLM", "ForTokenClassification")) else None


def base_of(model: Any) -> Any:
    """The model inside of PEFT's adapters."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def without_labels(model: Any, inputs: Any) -> dict[str, Any]:
    """The model's arguments for outputs alone; a decoder reads what it would make of the labels.

    Raises:
        UnsupportedError: the model does not say what that is.
    """
    given = {name: value for name, value in inputs.items() if name != "labels"}
    decodes = getattr(getattr(model, "config", None), "is_encoder_decoder", False)
    if decodes and "decoder_input_ids" not in given and "labels" in inputs:
        if not hasattr(model, "prepare_decoder_input_ids_from_labels"):
            raise UnsupportedError(
                f"A {type(base_of(model)).__name__} has no prepare_decoder_input_ids_from_labels, so it is not known "
                "what its decoder reads for the labels: let the data collator return decoder_input_ids beside them."
            )
        given["decoder_input_ids"] = model.prepare_decoder_input_ids_from_labels(labels=inputs["labels"])
    return given


def takes_labels(model: Any) -> bool:
    """Return whether the model computes a loss of its own for labels."""
    parameters = inspect.signature(model.forward).parameters.values()
    return any(p.name == "labels" or p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)


def losses_and_counts(model: Any, kind: str, logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """[B] sums of losses, and [B]: of how many labels each is; the model's own loss divides the ones by the others."""
    logits = logits.float() if logits.dtype in HALF else logits
    if kind == "sequence classification":
        losses = _classification_losses(logits, labels, getattr(getattr(model, "config", None), "problem_type", None))
        ignored = labels.reshape(len(labels), -1)[:, 0] == IGNORED
        return losses, (torch.zeros_like(ignored) if labels.is_floating_point() else ignored).logical_not().long()
    # Virtual tokens of prompt tuning stand before those that have labels, and the last of them predicts the first.
    labels = F.pad(labels, (logits.shape[1] - labels.shape[1], 0), value=IGNORED)
    if kind == "causal":
        logits, labels = logits[:, :-1], labels[:, 1:]
    losses = F.cross_entropy(logits.transpose(1, 2), labels, ignore_index=IGNORED, reduction="none")
    return losses.sum(1), (labels != IGNORED).sum(1)


def _classification_losses(logits: Tensor, labels: Tensor, problem: str | None) -> Tensor:
    """[B]: cross-entropies of classes, squared errors of numbers, binary cross-entropies of several labels."""
    if problem is None:
        one = logits.shape[1:] in ((), (1,))
        several = "multi_label_classification" if labels.is_floating_point() else "single_label_classification"
        problem = "regression" if one else several
    rows = len(logits)
    if problem == "single_label_classification":
        return F.cross_entropy(logits, labels.reshape(rows), reduction="none")
    logits, labels = logits.reshape(rows, -1), labels.reshape(rows, -1).to(logits.dtype)
    if problem == "regression":
        return F.mse_loss(logits, labels, reduction="none").mean(1)
    return F.binary_cross_entropy_with_logits(logits, labels, reduction="none").mean(1)


def check_auxiliary(model: Any, outputs: Any = None) -> None:
    """Refuse a mixture of experts that would be trained without its router's loss, in silence.

    Raises:
        UnsupportedError: the model is set up to add it, or has returned it.
    """
    asked = getattr(getattr(model, "config", None), "output_router_logits", False)
    if asked or any(getattr(outputs, name, None) is not None for name in ("aux_loss", "z_loss")):
        raise UnsupportedError(
            "The model's own loss adds an auxiliary one of its router (aux_loss), a number of the whole batch, through "
            "which every example reaches the others' gradients: it cannot be clipped by example, and private training "
            "would leave it out. Train without it by model.config.output_router_logits = False."
        )
