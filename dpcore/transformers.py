"""transformers: a Trainer whose steps are private. Needs the package ``transformers`` (and ``accelerate``, as it does).

``DPTrainer`` stands in the place of ``transformers.Trainer``. ``DPTrainerMixin`` makes another Trainer private, TRL's
``SFTTrainer`` for instance::

    class DPSFTTrainer(DPTrainerMixin, SFTTrainer): ...
"""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, RandomSampler

from dpcore.checkpoint import RandomState
from dpcore.errors import PrivacyError, UnsupportedError
from dpcore.grad_sample.hooks import AbstractGradSampleHooks
from dpcore.loading.uniform_sampler import steps_per_epoch
from dpcore.optimizers import DPOptimizer
from dpcore.privacy_engine import PrivacyEngine
from dpcore.processes import check_drawn, check_processes, joined, logical_loader, put_in_shards, shards
from dpcore.task_losses import (
    IGNORED,
    base_of,
    check_auxiliary,
    check_kept_apart,
    check_own_loss,
    losses_and_counts,
    task_of,
    without_labels,
)
from dpcore.trainer_checks import (
    check_arguments,
    check_names,
    check_numbered,
    check_unchanged,
    keep_checkpoints_between_batches,
)
from dpcore.tree import batch_length
from dpcore.utils.batch_memory_manager import PiecewiseLoader, check_pieces

try:
    from accelerate.data_loader import BatchSamplerShard, SeedableRandomSampler

    import transformers
    from dpcore.trainer_rounds import Rounds
except ImportError as error:
    raise ImportError("dpcore.transformers needs transformers; install it with: pip install transformers") from error

LOOKS = 3
"""Batches in which a loss of the user's is looked at, whose choice among examples may by chance be the same in one."""
STATE = "privacy.pt"
"""The file of accountant, noise and batches in each of the Trainer's checkpoints."""


class DPTrainerMixin:
    """A Trainer's training loop, made private; evaluation, logging and checkpoints are the Trainer's own.

    A logical batch is a Poisson sample of ``per_device_train_batch_size * gradient_accumulation_steps`` examples on
    average, times the number of processes, of which each draws and clips its own share. It goes through the model in
    pieces of ``per_device_train_batch_size`` examples at most, and is one step of the optimizer, the schedule and the
    accountant. The loss of an example is the mean over its own positions (:meth:`per_example_losses`), because a mean
    over a batch's tokens would let one example's length scale the others.

    What is logged, the training loss above all, is computed from the data without noise: it is for the curator's eyes.

    Args:
        *args: The Trainer's arguments.
        engine: Keeps the budget; ``engine.get_epsilon(delta)`` reads it.
        privacy: The arguments of :meth:`PrivacyEngine.make_private`, or, where it has "target_epsilon", those of
            :meth:`PrivacyEngine.make_private_with_epsilon`; its "epochs" are those of the training arguments.
            "max_physical_batch_size" is the pieces' size where it is not ``per_device_train_batch_size``; "auto" plans
            it by time and memory.
        **kwargs: The Trainer's arguments.

    Raises:
        UnsupportedError: the training arguments ask for what cannot be done privately, the data set is an iterable, or
            the Trainer has a loss of its own that training would not use.
        TypeError, ValueError: ``privacy`` has a name that nothing would read, or pieces of a size below 1.
    """

    def __init__(self, *args: Any, engine: PrivacyEngine, privacy: Mapping[str, Any], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        trainer: Any = self
        check_arguments(trainer.args, _own_loss_function(trainer))
        _check_privacy(self, engine, privacy)
        check_processes(trainer.accelerator)
        _check_loss(self)
        check_numbered(trainer.train_dataset)
        self.engine = engine
        self.privacy = dict(privacy)
        # make_private would hand pieces to the Trainer, which counts what it gets as batches.
        self._piece = self.privacy.pop("max_physical_batch_size", None)
        if self._piece is None:
            self._piece = trainer.args.per_device_train_batch_size
        check_pieces(self._piece, self.privacy.get("batch_first", True))
        self._hooks: AbstractGradSampleHooks | None = None
        self._private_optimizer: DPOptimizer | None = None
        self._private_loader: Any = None
        self._cutter: PiecewiseLoader | None = None
        self._trained: nn.Module | None = None  # what the three were made of
        self._data: Any = None
        self._looks = 0  # at the loss, of LOOKS
        keep_checkpoints_between_batches(trainer)
        trainer.callback_handler.callbacks.insert(0, Rounds(trainer))  # before all that read the epoch
        # The loop sees logical batches, of which each is one step; gradients are clipped by example and nowhere else;
        # the loader goes on by itself where a checkpoint was written.
        self._pieces = trainer.args.gradient_accumulation_steps
        trainer.args = copy.copy(trainer.args)
        trainer.args.gradient_accumulation_steps = 1
        trainer.args.max_grad_norm = 0.0
        trainer.args.ignore_data_skip = True

    # ---- what the Trainer asks for

    def get_train_dataloader(self) -> DataLoader[Any]:
        """The private loader, the same at every call; the optimizer is made private with it.

        Another one for another model, such as ``model_init`` makes at every ``train()``: the budget adds up.
        """
        trainer: Any = self
        # A search, or the user, may have set others since.
        check_arguments(trainer.args, _own_loss_function(trainer))
        check_unchanged(trainer.args)
        if self._private_loader is None or trainer.model is not self._trained:
            self._make_private(super().get_train_dataloader())  # type: ignore[misc]
        elif trainer.train_dataset is not self._data:
            raise UnsupportedError(
                "train_dataset was changed after the first train(), and the private loader goes on with the former "
                f"data. Make another {type(self).__name__} for it, with an engine of its own, or with this one, whose "
                "epsilon is then that of both data sets together."
            )
        loader: DataLoader[Any] = self._private_loader
        return loader

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """Forward and backward pass of one logical batch; the optimizer's step for its last piece is the Trainer's."""
        if isinstance(model, nn.parallel.DistributedDataParallel):
            raise UnsupportedError(
                "The model was put into torch's DistributedDataParallel, which averages gradients before they are "
                "clipped; leave the model as it is, and the accelerator's preparation to DPTrainer."
            )
        self._check_private(model)
        assert self._private_optimizer is not None
        try:
            return self._train_on(model, inputs)
        except BaseException:
            # Or the pieces that were added would meet those of the next train()'s first batch.
            self._private_optimizer.discard()
            raise

    def _train_on(self, model: nn.Module, inputs: Any) -> Tensor:
        """The passes of :meth:`training_step`; return the mean loss."""
        trainer: Any = self
        assert self._private_optimizer is not None and self._hooks is not None and self._cutter is not None
        inputs = trainer._prepare_inputs(inputs)
        total, rows = torch.zeros((), device=trainer.args.device), batch_length(inputs)
        # Every pass of a sharded model gathers weights from all processes, so that all look, or none.
        together = self._private_optimizer.ranks if shards(trainer.accelerator) else None
        if self._looks < LOOKS and (rows if together is None else together.least(rows) > 1):
            looks = self._check_loss(model, inputs)
            self._looks += looks if together is None else int(together.least(looks))
        model.train()
        # One without a schedule is told, as the Trainer's own step does.
        if callable(getattr(trainer.optimizer, "train", None)):
            trainer.optimizer.train()
        for piece in self._cutter.pieces_of(inputs):
            if not rows and together is None:
                self._hooks.record_empty_batch()
                break
            with trainer.compute_loss_context_manager():
                loss = trainer.compute_loss(model if together is None else self._hooks, piece)
            trainer.accelerator.backward(loss)
            total += loss.detach() * batch_length(piece) / max(rows, 1)
            if self._private_optimizer.logical_batch.goes_on:
                self._private_optimizer.step()  # only adds the piece
        return total

    def compute_loss(
        self, model: nn.Module, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """The mean of the examples' own losses in training, the Trainer's loss in evaluation."""
        trainer: Any = self
        if not model.training:
            return super().compute_loss(model, inputs, return_outputs=return_outputs)  # type: ignore[misc]
        base = trainer.accelerator.unwrap_model(self._trained if model is self._hooks else model)
        outputs = model(**without_labels(base, inputs))
        losses = self.per_example_losses(base, outputs, dict(inputs).get("labels"))
        rows = batch_length(inputs)
        if losses.shape != (rows,):
            raise UnsupportedError(
                f"per_example_losses returned losses of the shape {tuple(losses.shape)} for {rows} examples: their "
                "mean would weigh the examples by each other. Return one loss per example, [B]: over tokens, each "
                "example's own mean."
            )
        loss = losses.mean() if rows else losses.sum()
        return (loss, outputs) if return_outputs else loss

    def per_example_losses(self, model: Any, outputs: Any, labels: Tensor | None) -> Tensor:
        """Return [B] losses, each of one example's own outputs and labels; override it for a loss of your own.

        Args:
            model: The model, without what accelerate has put around it.
            outputs: What it returned for inputs without labels.
            labels: [B] classes or [B, ...] numbers for sequence classification; [B, T] tokens else, -100 where none.

        Raises:
            UnsupportedError: the model's loss is not known, or has a router's auxiliary loss beside the examples' own.
        """
        check_auxiliary(model, outputs)
        kind = task_of(model)
        if labels is None or kind is None:
            raise UnsupportedError(
                f"The loss of a {type(base_of(model)).__name__} is not known example by example (causal, masked and "
                "sequence-to-sequence language models, and classifiers of sequences and tokens are): override "
                "per_example_losses(model, outputs, labels) of the Trainer, to return one loss per example, [B]."
            )
        losses, counted = losses_and_counts(model, kind, outputs.logits, labels)
        if kind == "sequence classification":
            return losses
        # The Trainer divides by the number of all labels where it does not know that a loss leaves out the first.
        trainer: Any = self
        if (
            kind == "causal"
            and trainer.model_accepts_loss_kwargs
            and not getattr(trainer, "_loss_shifts_labels", False)
        ):
            counted = (labels != IGNORED).sum(1)
        return losses / counted.clamp(min=1)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log what is spent beside every loss of training, at the budget's delta or the customary one.

        The Trainer's norm of the gradient is left out: where it looks there is none, and it would always be 0.
        """
        if "loss" in logs or "train_loss" in logs:
            delta = self.engine._spending.delta
            logs = {n: v for n, v in logs.items() if n != "grad_norm"}
            logs |= {"epsilon": self.engine.accountant.get_epsilon(delta), "delta": delta}
        super().log(logs, *args, **kwargs)  # type: ignore[misc]

    def _check_private(self, model: nn.Module) -> None:
        """Refuse to train where the optimizer's step would not be the private one, or not that of ``model``.

        Raises:
            PrivacyError: gradients would be applied without clipping and noise.
        """
        trainer: Any = self
        private = self._private_optimizer
        if private is None:
            raise PrivacyError(
                f"{type(self).__name__} has made no private optimizer: its get_train_dataloader does not call that of "
                "DPTrainerMixin, and the loader's batches would be trained on without clipping and noise. Return "
                "super().get_train_dataloader(), and choose the data by train_dataset and data_collator."
            )
        prepared = trainer.optimizer
        inner = getattr(prepared, "optimizer", prepared)  # accelerate's is around it
        if private is not inner and not any(part is private for part in vars(inner).values()):
            raise PrivacyError(
                f"The Trainer's optimizer is {type(inner).__name__} and not the private one, so its step would apply "
                "gradients without clipping and noise. Leave trainer.optimizer alone, and pass yours as optimizers=."
            )
        if trainer.accelerator.unwrap_model(model) is not self._trained:
            raise PrivacyError(
                f"The {type(model).__name__} that is to be trained is not the one that the optimizer was made private "
                "for, so its gradients would be neither clipped nor noised. Change trainer.model before train() only."
            )

    def _check_loss(self, model: nn.Module, inputs: Any) -> int:
        """Look at the loss of some examples before it is trained; return as how many looks that counts.

        Raises:
            UnsupportedError: it is another one than the model's own, or one of the user's mixes the examples.
        """
        if getattr(self.compute_loss, "__func__", None) is not DPTrainerMixin.compute_loss:
            return LOOKS  # nothing tells the examples' own losses
        ours = getattr(self.per_example_losses, "__func__", None) is DPTrainerMixin.per_example_losses
        trainer: Any = self
        random = RandomState.now()
        model.eval()
        try:
            with torch.no_grad(), trainer.compute_loss_context_manager():
                looked = None if ours else check_kept_apart(trainer, model, inputs, shards(trainer.accelerator))
                return LOOKS * check_own_loss(trainer, model, inputs) if looked is None else looked
        finally:
            random.restore()

    # ---- checkpoints

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """Beside the Trainer's files, what was spent, and where noise and batches stand."""
        with _little_state(self):
            super()._save_optimizer_and_scheduler(output_dir)  # type: ignore[misc]
        os.makedirs(output_dir, exist_ok=True)  # of several processes, the first may not have made it yet
        self.engine.save_checkpoint(path=str(Path(output_dir) / STATE), **self._parts())

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        with _little_state(self):
            super()._load_optimizer_and_scheduler(checkpoint)  # type: ignore[misc]
        if checkpoint is None:
            return
        path = Path(checkpoint) / STATE
        if not path.exists():
            raise PrivacyError(
                f"{checkpoint} holds no {STATE}, so it does not say what its steps have spent, and the budget would be "
                "counted anew. Resume from a checkpoint that a DPTrainer wrote."
            )
        self.engine.load_checkpoint(path=str(path), **self._parts())

    def _parts(self) -> dict[str, Any]:
        # The Trainer keeps the weights.
        return {"module": nn.Module(), "optimizer": self._private_optimizer, "data_loader": self._private_loader}

    # ---- how it is made private

    def _make_private(self, loader: DataLoader[Any]) -> None:
        """Make the optimizer private, together with a loader of whole logical batches over the data of ``loader``."""
        trainer: Any = self
        check_numbered(loader.dataset)  # a Trainer's own get_train_dataloader may use other data
        trainer.create_optimizer()
        share = trainer.args.per_device_train_batch_size * self._pieces
        privacy = {"wrap_model": False, **self.privacy}
        poisson = privacy.get("poisson_sampling", True)
        check_drawn(trainer.accelerator, poisson)
        if shards(trainer.accelerator):
            # A loader of batches of all processes, dealt out by position; torch would average the gradients of a model
            # that is called without a wrapper.
            share, privacy["wrap_model"] = share * trainer.accelerator.num_processes, True
            trainer.model, trainer.optimizer = put_in_shards(trainer.accelerator, trainer.model, trainer.optimizer)
            trainer.model_wrapped = trainer.model
            _prepare_no_more(trainer.accelerator, trainer.model)
        ranks = joined(trainer.accelerator, trainer.model)
        if ranks is not None:
            _prepare_without_averaging(trainer.accelerator)
        # The sampler is refused where Poisson sampling would draw what it leaves out.
        drop_last = trainer.args.dataloader_drop_last
        whole = logical_loader(loader, _sampler(loader), share, poisson, ranks, drop_last)
        make: Any = self.engine.make_private
        if "target_epsilon" in privacy:
            make = self.engine.make_private_with_epsilon
            rate = privacy.get("sample_rate")
            privacy["epochs"] = self._epochs(len(whole) if rate is None else steps_per_epoch(rate))
        self._hooks, self._private_optimizer, self._private_loader = make(
            module=trainer.model.train(), optimizer=trainer.optimizer, data_loader=whole, **privacy
        )
        assert self._private_optimizer is not None
        trainer.optimizer = self._private_optimizer
        self._trained, self._data = trainer.model, trainer.train_dataset
        self._looks = 0
        self._cutter = PiecewiseLoader(self._private_loader, self._piece, self._private_optimizer)

    def _epochs(self, steps: int) -> float:
        """Rounds of ``steps`` steps that the training arguments ask for."""
        arguments: Any = self.args  # type: ignore[attr-defined]
        return arguments.max_steps / steps if arguments.max_steps > 0 else arguments.num_train_epochs


class DPTrainer(DPTrainerMixin, transformers.Trainer):
    """``transformers.Trainer`` whose steps are private; see :class:`DPTrainerMixin`."""


def _prepare_without_averaging(accelerator: Any) -> None:
    """Let ``accelerator`` prepare models as for evaluation: without torch's DistributedDataParallel around them."""
    prepare = accelerator.prepare_model

    def prepare_model(model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = True) -> Any:
        return prepare(model, device_placement=device_placement, evaluation_mode=True)

    accelerator.prepare_model = prepare_model


@contextmanager
def _little_state(trainer: Any) -> Iterator[None]:
    """Show the Trainer an optimizer with next to no state in the place of one over shards: dpcore's file has its.

    What saves and loads an optimizer's shards would take a step of it, to make a state that is missing.
    """
    private = trainer.optimizer
    if shards(trainer.accelerator):
        smallest = min((p for p in trainer.model.parameters() if p.requires_grad), key=Tensor.numel)
        trainer.optimizer = torch.optim.SGD([smallest], lr=0.0, momentum=0.5)
    try:
        yield
    finally:
        trainer.optimizer = private


def _prepare_no_more(accelerator: Any, model: nn.Module) -> None:
    """Let ``accelerator`` leave ``model``, which it has sharded, and its private optimizer as they are."""
    prepare = accelerator.prepare

    def prepare_others(*given: Any, **options: Any) -> Any:
        return given if any(part is model for part in given) else prepare(*given, **options)

    accelerator.prepare = prepare_others


def _sampler(loader: DataLoader[Any]) -> Any:
    """Return what draws the examples of a loader that accelerate has prepared, of which ``loader.sampler`` is none."""
    batches: Any = loader.batch_sampler
    if isinstance(batches, BatchSamplerShard):  # deals the batches out to several processes
        batches = batches.batch_sampler
    drawn: Any = getattr(batches, "sampler", batches)
    # accelerate puts one of its own in the place of torch's.
    ours = isinstance(drawn, SeedableRandomSampler)
    return RandomSampler(drawn.data_source, replacement=drawn.replacement) if ours else drawn


STOCK = {("transformers", "Trainer"), ("trl", "SFTTrainer")}
"""Trainers whose own loss is that of :meth:`DPTrainerMixin.per_example_losses`: first package and name of the class."""
LOSS_TYPES = ("nll", "chunked_nll")
"""TRL's names of the ordinary cross-entropy, which has two implementations in some versions."""


def _check_loss(trainer: Any) -> None:
    """Refuse a Trainer whose own loss would silently not be the one that is trained.

    Raises:
        UnsupportedError: with the class and the method, or the value, and the remedy.
    """
    check_auxiliary(trainer.model)
    order = type(trainer).__mro__
    behind = order[order.index(DPTrainerMixin) + 1 :]
    for name in ("per_example_losses", "training_step"):
        owner = _owner(behind, name)
        if owner is not None and owner.__module__.split(".")[0] not in ("transformers", "trl"):
            raise UnsupportedError(
                f"{owner.__name__}.{name} stands behind DPTrainerMixin's own, which hides it, so it would never be "
                f"called: define {name} in the class that inherits from DPTrainerMixin, or in a class before it."
            )
    # Before the mixin, or on the object, both are the user's, and are called.
    if getattr(trainer.per_example_losses, "__func__", None) is not DPTrainerMixin.per_example_losses:
        return
    if getattr(trainer.compute_loss, "__func__", None) is not DPTrainerMixin.compute_loss:
        return
    owner = _owner(behind, "compute_loss")
    if owner is not None and (owner.__module__.split(".")[0], owner.__name__) not in STOCK:
        raise UnsupportedError(
            f"{owner.__name__}.compute_loss is a loss of its own over the whole batch, and private training would use "
            "the ordinary cross-entropy in its place: override per_example_losses(model, outputs, labels) in the class "
            "that inherits from DPTrainerMixin, to return one loss per example, [B]."
        )
    loss_type = getattr(trainer.args, "loss_type", None)
    if loss_type is not None and loss_type not in LOSS_TYPES:
        raise UnsupportedError(
            f"loss_type={loss_type!r} would be trained as the ordinary cross-entropy (loss_type='nll'): leave it out, "
            "or override per_example_losses(model, outputs, labels), to return one loss per example, [B]."
        )


def _own_loss_function(trainer: Any) -> Any:
    """The user's ``compute_loss_func``, given by name or by place; TRL's are told by ``loss_type``."""
    function = getattr(trainer, "compute_loss_func", None)
    return None if str(getattr(function, "__module__", "")).split(".")[0] == "trl" else function


def _check_privacy(trainer: Any, engine: PrivacyEngine, privacy: Mapping[str, Any]) -> None:
    """Refuse arguments of make_private that have no place in a Trainer.

    Raises:
        UnsupportedError, TypeError: with the argument, the reason and the remedy.
    """
    check_names(engine, privacy)
    if privacy.get("grad_sample_mode") == "ghost" or privacy.get("wrap_model", False):
        raise UnsupportedError(
            "A Trainer has no place for the criterion of grad_sample_mode='ghost' or the wrapper of wrap_model=True, "
            "because it calls the model by itself: leave both out of privacy; the default mode takes norms without "
            "gradients by example, too."
        )
    own = getattr(trainer.compute_loss, "__func__", None) is DPTrainerMixin.compute_loss
    reduction = privacy.get("loss_reduction", "mean")
    if own and reduction != "mean":
        raise UnsupportedError(
            f"loss_reduction={reduction!r}, but the loss of a DPTrainer is the mean of its examples' losses, and every "
            "gradient would be divided by the length of its piece before it is clipped: leave loss_reduction out of "
            "privacy, or override compute_loss."
        )


def _owner(classes: Any, name: str) -> Any:
    """The first class that defines ``name``, or None."""
    return next((owner for owner in classes if name in vars(owner)), None)


__all__ = ["DPTrainer", "DPTrainerMixin", "task_of"]
