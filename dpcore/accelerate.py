"""accelerate: the private model, optimizer and loader for a loop with an ``Accelerator``. Needs ``accelerate``.

In the place of ``accelerator.prepare(model, optimizer, loader)``; the loop stays as it is::

    model, optimizer, loader = prepare(accelerator, engine, module=model, optimizer=optimizer, data_loader=loader,
                                       noise_multiplier=1.1, max_grad_norm=1.0)
    scheduler = accelerator.prepare(scheduler)
    for x, y in loader:
        with accelerator.accumulate(model):
            accelerator.backward(loss_fn(model(x), y))
            optimizer.step(); scheduler.step(); optimizer.zero_grad()

``accelerator.save_state`` writes the budget too, and ``accelerator.load_state`` goes on with it, or refuses.

With several processes (``accelerate launch``, torchrun) every process runs the same script. The prepared model is not
in torch's DistributedDataParallel, which averages gradients before they are clipped: the optimizer adds up the clipped
sums of all processes, see :mod:`dpcore.distributed`. With accelerate's FSDP2 plugin the model is sharded as the plugin
says, see :mod:`dpcore.sharding`.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.data import DataLoader, IterableDataset

from dpcore.errors import PrivacyError, UnsupportedError
from dpcore.optimizers import DPOptimizer
from dpcore.optimizers.schedules import follow
from dpcore.privacy_engine import PrivacyEngine
from dpcore.processes import check_drawn, check_processes, joined, logical_loader, put_in_shards, shards
from dpcore.utils.batch_memory_manager import PiecewiseLoader, check_pieces

try:
    from accelerate.optimizer import AcceleratedOptimizer
    from accelerate.utils import send_to_device

    import accelerate
except ImportError as error:
    raise ImportError("dpcore.accelerate needs accelerate; install it with: pip install accelerate") from error


STATE = "privacy.pt"
"""The file of accountant, noise and batches in each of the accelerator's checkpoints."""
_ACCUMULATED: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
"""How many batches a step of an accelerator had before prepare() left that to the loader: a second call has as many."""


class _PrivateOptimizer(AcceleratedOptimizer):  # type: ignore[misc]
    """The optimizer as ``accelerator.prepare`` returns it; schedules step once for each logical batch."""

    _is_accelerate_prepared = True

    @property
    def batch_goes_on(self) -> bool:
        """Whether the last ``step()`` was that of a piece whose batch goes on; a checkpoint has to wait then."""
        goes_on: bool = self.optimizer.batch_goes_on
        return goes_on

    @property
    def steps(self) -> int:
        """How many updates were made."""
        made: int = self.optimizer.steps
        return made

    def step(self, closure: Any = None) -> None:
        before = self.optimizer.steps
        self.optimizer.step(closure)
        self._is_overflow = self.optimizer.steps == before
        # Loops count their steps, and average weights, where accelerate says that gradients were exchanged.
        self.gradient_state._set_sync_gradients(not self._is_overflow)

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        self.optimizer.zero_grad()


class _Pieces(PiecewiseLoader):
    """The pieces of the private loader's batches, on the accelerator's device.

    All processes get equally many, because a loop may gather its losses, or save, after any of them.
    """

    def __init__(self, loader: DataLoader[Any], size: int | str, optimizer: DPOptimizer, device: Any) -> None:
        super().__init__(loader, size, optimizer, in_step=True)
        self.device = device

    def __iter__(self) -> Iterator[Any]:
        for piece in super().__iter__():
            yield send_to_device(piece, self.device)


class _PrivacyState:
    """The run's accountant, noise and batches, in each checkpoint that the accelerator writes.

    Hooks, not ``register_for_checkpointing``: that is read last, when the weights are loaded already, and a checkpoint
    without it fails by accelerate's own message. ``known``: what of the run the accelerator has in its list of that
    name, until its ``free_memory()`` lets go of the whole run.
    """

    def __init__(
        self,
        accelerator: accelerate.Accelerator,
        engine: PrivacyEngine,
        optimizer: _PrivateOptimizer,
        known: Any,
        listed: str,
    ) -> None:
        self.accelerator, self.engine, self.listed = accelerator, engine, listed
        self.prepared, self.known = weakref.ref(optimizer), weakref.ref(known)
        accelerator.register_save_state_pre_hook(self.save)
        accelerator.register_load_state_pre_hook(self.load)

    def save(self, models: Any, weights: Any, folder: Any) -> None:
        optimizer, path = self._run(folder)
        if optimizer is None:
            return
        if optimizer.batch_goes_on:
            raise PrivacyError(
                "accelerator.save_state was called within a logical batch: a run that is resumed from there would draw "
                "another batch, and add the noise to it that this run adds to the one at hand. Save where "
                "optimizer.batch_goes_on is False."
            )
        self.engine.save_checkpoint(path=str(path), module=nn.Module(), optimizer=optimizer)

    def load(self, models: Any, folder: Any) -> None:
        optimizer, path = self._run(folder)
        if optimizer is None:
            return
        if not path.exists():
            raise PrivacyError(
                f"{folder} holds no {path.name}, so it does not say what its steps have spent, and the budget would be "
                "counted anew. Load a checkpoint that accelerator.save_state wrote after dpcore.accelerate.prepare."
            )
        self.engine.load_checkpoint(path=str(path), module=nn.Module(), optimizer=optimizer)

    def _run(self, folder: Any) -> tuple[DPOptimizer | None, Path]:
        """The optimizer, None where the accelerator has freed it, and its file, numbered as accelerate's own are."""
        prepared, known, stem = self.prepared(), self.known(), Path(STATE)
        # Not the hook's list of models: other hooks take out of it what they load themselves.
        for k, part in enumerate(getattr(self.accelerator, self.listed)):
            if prepared is not None and part is known:
                return prepared.optimizer, Path(folder) / (f"{stem.stem}_{k}{stem.suffix}" if k else STATE)
        return None, Path(folder) / STATE


def prepare(
    accelerator: accelerate.Accelerator,
    engine: PrivacyEngine,
    *,
    module: nn.Module,
    optimizer: Optimizer,
    data_loader: DataLoader[Any],
    **privacy: Any,
) -> tuple[nn.Module, Any, Any]:
    """Make a training run private and prepare it for ``accelerator``.

    A logical batch is a Poisson sample of the loader's batch size times the accelerator's
    ``gradient_accumulation_steps`` on average, times the number of processes (unless the accelerator splits batches):
    as many examples as accelerate's own steps have. The returned loader hands it out in pieces of the loader's batch
    size, and ``optimizer.step()`` acts at its last piece, so the accelerator itself accumulates no more.

    ``accelerator.save_state`` and ``load_state`` keep accountant, noise and batches from then on; a checkpoint without
    them, or of other settings, is refused (PrivacyError). Save between batches (``optimizer.batch_goes_on`` is False).

    Of several processes each calls this with the whole data set and the same settings. Each draws, clips and cuts its
    own share of a logical batch; the noise is added once. All get equally many pieces, some of them empty. As with
    accelerate's own loaders, a prepared schedule makes as many steps at a time as there are processes.

    Args:
        accelerator: An accelerator with one process, or with several that each hold the whole model, or its shards by
            ``FullyShardedDataParallelPlugin(fsdp_version=2)``.
        engine: Keeps the budget.
        module: The module, not prepared.
        optimizer: The optimizer, not prepared.
        data_loader: The loader, not prepared, with the physical batch size. Its ``generator`` is not used: the engine's
            seed, or a secret one, draws the batches.
        **privacy: Further arguments of :meth:`PrivacyEngine.make_private`; with ``target_epsilon`` those of
            :meth:`PrivacyEngine.make_private_with_epsilon`. "max_physical_batch_size" is the pieces' size where it is
            not the loader's; "auto" plans it by time and memory.

    Returns:
        (module, optimizer, data_loader), of which the first two are prepared.

    Raises:
        UnsupportedError: the accelerator shards the model by FSDP's first version, DeepSpeed or tensor parallelism, or
            scales the loss; the data set is an iterable; the mode is "ghost", or there is no wrapper; or as
            ``make_private``.
        ValueError: the loader has no batch size, or the pieces' size is below 1.
    """
    check_processes(accelerator)
    if accelerator.scaler is not None:
        raise UnsupportedError(
            f"mixed_precision={accelerator.mixed_precision!r} multiplies the loss, so gradients would be clipped at "
            "their scaled size; use 'bf16'."
        )
    if privacy.get("grad_sample_mode") == "ghost" or not privacy.get("wrap_model", True):
        raise UnsupportedError(
            "prepare() has no place for the criterion of grad_sample_mode='ghost' or the hooks of wrap_model=False; "
            "leave both out: the default mode takes norms without gradients by example, too."
        )
    if isinstance(data_loader.dataset, IterableDataset):
        raise UnsupportedError(
            f"The data set ({type(data_loader.dataset).__name__}) is an iterable, and logical batches are drawn from "
            "examples by number; use a map-style data set (with __len__ and __getitem__)."
        )
    size = data_loader.batch_size
    if size is None:
        raise ValueError("The loader has no batch_size, by which logical batches could be cut; give it one.")
    if accelerator.split_batches:
        # Then the loader's batch is that of all processes together.
        size = -(-size // accelerator.num_processes)
    # make_private would cut the batches too, and these pieces would be pieces of its pieces.
    piece = privacy.pop("max_physical_batch_size", None)
    piece = size if piece is None else piece
    check_pieces(piece, privacy.get("batch_first", True))
    poisson = privacy.get("poisson_sampling", True)
    check_drawn(accelerator, poisson)
    known: Any = None
    if shards(accelerator):
        known, optimizer = put_in_shards(accelerator, module, optimizer)
        module = known
    else:
        module = module.to(accelerator.device)
    ranks = joined(accelerator, module)
    accumulated = accelerator.gradient_accumulation_steps
    if accumulated == 1:
        accumulated = _ACCUMULATED.get(accelerator, 1)
    share = size * accumulated
    if known is not None:  # whose loader is of batches of all processes, dealt out by position
        share *= accelerator.num_processes
    logical = logical_loader(data_loader, data_loader.sampler, share, poisson, ranks, data_loader.drop_last)
    make: Any = engine.make_private_with_epsilon if "target_epsilon" in privacy else engine.make_private
    module, private, loader = make(module=module, optimizer=optimizer, data_loader=logical, **privacy)
    _ACCUMULATED[accelerator] = accumulated
    accelerator.gradient_accumulation_steps = 1
    accelerator.gradient_state.plugin_kwargs["adjust_scheduler"] = False  # which would count the pieces
    prepared = _PrivateOptimizer(private, device_placement=accelerator.device_placement)
    # A schedule that is built on it and not prepared itself is stepped for every piece.
    follow(prepared, private.logical_batch)
    if known is not None:
        _PrivacyState(accelerator, engine, prepared, known, "_models")
        return module, prepared, _Pieces(loader, piece, private, accelerator.device)
    # As for evaluation: without torch's DistributedDataParallel around it.
    module = accelerator.prepare_model(module, evaluation_mode=ranks is not None)
    if isinstance(module, DistributedDataParallel):
        raise UnsupportedError(
            "accelerate has put the model into torch's DistributedDataParallel, which averages gradients before they "
            "are clipped; use the version of accelerate that dpcore's tests run with, and report this one."
        )
    _PrivacyState(accelerator, engine, prepared, prepared, "_optimizers")
    return (
        module,
        accelerator.prepare_optimizer(prepared),
        _Pieces(loader, piece, private, accelerator.device),
    )
