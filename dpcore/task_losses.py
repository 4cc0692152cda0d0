"""The losses of transformers' tasks, by example, and what their models take and return."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dpcore.arguments import number_of
from dpcore.checkpoint import RandomState
from dpcore.errors import UnsupportedError
from dpcore.microbatch.pieces import cut
from dpcore.tree import batch_length

IGNORED = -100
HALF = (torch.float16, torch.bfloat16)
COMPARED = 4
"""Examples whose loss is compared with the model's own: class weights show in several only."""


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


def check_kept_apart(trainer: Any, model: nn.Module, inputs: Any, in_shards: bool) -> bool:
    """Compare the losses of a few examples at a time with those of half of them alone, where these repeat themselves.

    Returns:
        Whether there were enough.

    Raises:
        UnsupportedError: an example's loss is another one beside others.
    """
    length = batch_length(inputs)
    most = COMPARED if in_shards else 4 * COMPARED  # there all processes make as many passes
    for start in range(0, min(length, most), COMPARED):
        if length - start > 1:
            _check_some(trainer, model, cut(inputs, slice(start, start + COMPARED)))
    return length > 1


def _check_some(trainer: Any, model: nn.Module, inputs: Any) -> None:
    """UnsupportedError where the losses of the first half of these examples are others beside the rest."""
    base, rows = trainer.accelerator.unwrap_model(model), batch_length(inputs)
    half = rows // 2

    def losses(count: int) -> Tensor:
        some = cut(inputs, slice(0, count))
        random.restore()
        return trainer.per_example_losses(base, model(**without_labels(base, some)), some.get("labels")).double()

    random = RandomState.now()
    beside, again, alone = losses(rows), losses(rows), losses(half)
    if beside.shape != (rows,) or not torch.equal(beside, again):
        return  # which compute_loss refuses, or which draws random numbers in evaluation mode
    tolerance = 5e-2 if trainer.args.bf16 or {p.dtype for p in model.parameters()} & {*HALF} else 1e-3
    if bool(((beside[:half] - alone).abs() > tolerance * beside.abs().max()).any()):
        raise UnsupportedError(
            f"{type(trainer).__name__}.per_example_losses gives {number_of(half, 'example')} the losses "
            f"{alone.tolist()} without others, and {beside[:half].tolist()} beside {rows - half} others: it mixes the "
            "examples, and no clipping would bound what one of them does. Return losses each of which is of one "
            "example's own outputs and labels."
        )


def check_own_loss(trainer: Any, model: nn.Module, inputs: Any) -> bool:
    """Compare the loss that training uses with the model's own, on some examples and without dropout.

    A model's class may have the name of a task and a loss of its own: class weights in a subclass, a
    ``loss_function`` that was set, labels that are not shifted. It would be replaced in silence.

    Returns:
        Whether it is known now; examples without labels tell nothing.

    Raises:
        UnsupportedError: the two differ.
    """
    base = trainer.accelerator.unwrap_model(model)
    kind = task_of(base)
    if kind is None or "labels" not in inputs or not takes_labels(base_of(base)):
        return True
    some = cut(inputs, slice(0, COMPARED))
    theirs = getattr(model(**some), "loss", None)
    outputs = model(**without_labels(base, some))
    check_auxiliary(base, outputs)
    logits = outputs.logits
    losses, counted = losses_and_counts(base, kind, logits, some["labels"])
    if not isinstance(theirs, Tensor):
        return True
    expected, found = float(theirs), float(losses.sum() / counted.sum())
    tolerance = 2e-2 if logits.dtype in HALF or trainer.args.bf16 else 1e-4
    if abs(expected - found) > tolerance * max(abs(expected), abs(found)):
        raise UnsupportedError(
            f"A {type(base_of(base)).__name__} computes the loss {expected:.6g} of the first {len(losses)} "
            f"examples, and private training would use {found:.6g}, the ordinary one of its task ({kind}), in its "
            "place: override per_example_losses(model, outputs, labels) of the Trainer, to return one loss per "
            "example, [B]."
        )
    return found == found
