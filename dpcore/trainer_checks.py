"""Check a Trainer of transformers before it trains privately."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from torch.utils.data import IterableDataset

from dpcore.arguments import did_you_mean
from dpcore.errors import UnsupportedError
from dpcore.private_settings import HINTS


def check_numbered(dataset: Any) -> None:
    """Refuse data whose examples have no numbers; None passes, a Trainer for evaluation alone.

    Raises:
        UnsupportedError: Poisson sampling draws examples by number.
    """
    numbered = hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
    if dataset is not None and (isinstance(dataset, IterableDataset) or not numbered):
        raise UnsupportedError(
            f"train_dataset ({type(dataset).__name__}) is an iterable, and Poisson sampling draws examples by number; "
            "use a map-style data set (with __len__ and __getitem__; load_dataset without streaming=True)."
        )


def check_arguments(args: Any, loss: Any) -> None:
    """Refuse training arguments under which examples would be mixed, or their gradients scaled or averaged unclipped.

    Raises:
        UnsupportedError: with the argument, the reason and the remedy.
    """
    refused = [
        (
            args.n_gpu > 1,
            f"One process with {args.n_gpu} GPUs would average gradients before they are clipped (torch's "
            "DataParallel); start one process for each GPU (torchrun, accelerate launch), or show it one GPU "
            "(CUDA_VISIBLE_DEVICES=0).",
        ),
        (
            args.fp16,
            "fp16=True multiplies the loss, so gradients would be clipped at their scaled size; use bf16=True.",
        ),
        (
            getattr(args, "packing", False) or getattr(args, "padding_free", False),
            "packing and padding_free put several examples into one row, to be clipped as one; leave them out.",
        ),
        (
            bool(args.label_smoothing_factor) or loss is not None,
            "label_smoothing_factor and compute_loss_func average over a batch's tokens, which mixes the examples; "
            "leave them out, and override per_example_losses for a loss of your own.",
        ),
        (
            getattr(args, "neftune_noise_alpha", None) is not None,
            "neftune_noise_alpha makes the noise of all of a batch's texts smaller where one of them is longer, so "
            "that this one changes the others' gradients; leave it out.",
        ),
        (
            args.torch_compile,
            "torch_compile=True compiles the model before it is made private, and gradients by example cannot be "
            "recorded inside of what is compiled; leave torch_compile, its backend and its mode out.",
        ),
        (
            args.auto_find_batch_size,
            "auto_find_batch_size begins anew with a part of the budget spent; choose per_device_train_batch_size.",
        ),
        (
            getattr(args, "train_sampling_strategy", "") in ("group_by_length", "batch_rebalance"),
            "train_sampling_strategy chooses a batch's examples by what is in them; leave it to Poisson sampling.",
        ),
    ]
    for asked, reason in refused:
        if asked:
            raise UnsupportedError(reason)


def check_names(engine: Any, privacy: Mapping[str, Any]) -> None:
    """Refuse names in ``privacy`` that nothing would read or that the Trainer sets itself, and a privacy without noise.

    Raises:
        TypeError: with the name, the rule and the remedy.
    """
    if not isinstance(privacy, Mapping):
        raise TypeError(
            f"privacy is {privacy!r}; it must be a dict of make_private's arguments, such as "
            '{"noise_multiplier": 1.1, "max_grad_norm": 1.0}.'
        )
    planned = "target_epsilon" in privacy
    make = engine.make_private_with_epsilon if planned else engine.make_private
    parameters = inspect.signature(make).parameters
    known = {*parameters, *HINTS} - {"options"}
    instead = {
        "epochs": "the rounds are those of the training arguments; set num_train_epochs or max_steps there",
        **dict.fromkeys(("module", "optimizer", "data_loader"), "the Trainer gives its own; leave it out"),
    }
    if planned:
        instead["noise_multiplier"] = "the noise follows from target_epsilon; leave one of the two out"
    else:
        instead["target_delta"] = "it belongs to a budget; give target_epsilon, too, and no noise_multiplier"
    for name in privacy:
        if name in instead:
            raise TypeError(f"privacy of a DPTrainer takes no {name!r}: {instead[name]}.")
        if name not in known:
            raise TypeError(
                f"privacy of a DPTrainer takes no {name!r}: it holds arguments of {make.__name__}()."
                f"{did_you_mean(name, {*known, 'target_epsilon'} - instead.keys()) or ' Leave it out.'}"
            )
    missing = [
        name
        for name, parameter in parameters.items()
        if parameter.default is parameter.empty and parameter.kind is not parameter.VAR_KEYWORD
        if name not in {*privacy, *instead}
    ]
    if missing:
        raise TypeError(
            f"privacy of a DPTrainer has no {' and no '.join(map(repr, missing))}: {make.__name__}() needs "
            f'{"it" if len(missing) == 1 else "them"}, as in {{"noise_multiplier": 1.1, "max_grad_norm": 1.0}} or '
            '{"target_epsilon": 3.0, "target_delta": 1e-5, "max_grad_norm": 1.0}.'
        )


def check_unchanged(args: Any) -> None:
    """Refuse a number of accumulated batches that was set after the Trainer was made, whose batches are whole ones.

    Raises:
        UnsupportedError: a step would add up that many of them.
    """
    if args.gradient_accumulation_steps != 1:
        raise UnsupportedError(
            f"gradient_accumulation_steps was set to {args.gradient_accumulation_steps} after the Trainer was made, "
            "whose batches are whole ones by then, so that a step would add up as many of them. Make a Trainer with "
            "these TrainingArguments, or choose the batch by per_device_train_batch_size."
        )


def keep_checkpoints_between_batches(trainer: Any) -> None:
    """Let ``enable_jit_checkpoint`` save behind a step only, and not between a backward pass and its step.

    That step would be made all the same, and once more by the run that resumes.
    """
    for callback in trainer.callback_handler.callbacks:
        if type(callback).__name__ == "JITCheckpointCallback":
            callback.on_step_begin = callback.on_pre_optimizer_step = lambda *given, **named: None
