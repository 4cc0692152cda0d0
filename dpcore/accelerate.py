"""accelerate: the private model, optimizer and loader for a loop with an ``Accelerator``. Needs ``accelerate``.

In the place of ``accelerator.prepare(model, optimizer, loader)``; the loop stays as it is::

    model, optimizer, loader = prepare(accelerator, engine, module=model, optimizer=optimizer, data_loader=loader,
                                       noise_multiplier=1.1, max_grad_norm=1.0)
    scheduler = accelerator.prepare(scheduler)
    for x, y in loader:
        with accelerator.accumulate(model):
            accelerator.backward(loss_fn(model(x), y))
            optimizer.step(); scheduler.step(); optimizer.zero_grad()
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from dpcore.errors import UnsupportedError
from dpcore.optimizers import DPOptimizer
from dpcore.privacy_engine import PrivacyEngine
from dpcore.utils.batch_memory_manager import PiecewiseLoader, check_pieces

try:
    from accelerate.optimizer import AcceleratedOptimizer
    from accelerate.utils import send_to_device

    import accelerate
except ImportError as error:
    raise ImportError("dpcore.accelerate needs accelerate; install it with: pip install accelerate") from error


class _PrivateOptimizer(AcceleratedOptimizer):  # type: ignore[misc]
    """The optimizer as ``accelerator.prepare`` returns it; schedules step once for each logical batch."""

    _is_accelerate_prepared = True

    def step(self, closure: Any = None) -> None:
        before = self.optimizer.steps
        super().step(closure)
        self._is_overflow = self.optimizer.steps == before


class _Pieces(PiecewiseLoader):
    """The pieces of the private loader's batches, on the accelerator's device."""

    def __init__(self, loader: DataLoader[Any], size: int, optimizer: DPOptimizer, device: Any) -> None:
        check_pieces(size, optimizer.module.batch_first, optimizer.ranks)
        super().__init__(loader, size, optimizer)
        self.device = device

    def __iter__(self) -> Iterator[Any]:
        for piece in super().__iter__():
            yield send_to_device(piece, self.device)


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
    ``gradient_accumulation_steps`` on average. The returned loader hands it out in pieces of the loader's batch size,
    and ``optimizer.step()`` acts at its last piece, so the accelerator itself accumulates no more.

    Args:
        accelerator: An accelerator with one process.
        engine: Keeps the budget.
        module: The module, not prepared.
        optimizer: The optimizer, not prepared.
        data_loader: The loader, not prepared, with the physical batch size.
        **privacy: Further arguments of :meth:`PrivacyEngine.make_private`; with ``target_epsilon`` those of
            :meth:`PrivacyEngine.make_private_with_epsilon`.

    Returns:
        (module, optimizer, data_loader), of which the first two are prepared.

    Raises:
        UnsupportedError: the accelerator has several processes or scales the loss; or as ``make_private``.
        ValueError: the loader has no batch size.
    """
    if accelerator.num_processes > 1:
        raise UnsupportedError(
            f"The accelerator has {accelerator.num_processes} processes, and would average gradients before they are "
            "clipped; use one, or a loop of your own with DifferentiallyPrivateDistributedDataParallel."
        )
    if accelerator.scaler is not None:
        raise UnsupportedError(
            f"mixed_precision={accelerator.mixed_precision!r} multiplies the loss, so gradients would be clipped at "
            "their scaled size; use 'bf16'."
        )
    size = data_loader.batch_size
    if size is None:
        raise ValueError("The loader has no batch_size, by which logical batches could be cut; give it one.")
    poisson = privacy.get("poisson_sampling", True)
    logical: DataLoader[Any] = DataLoader(
        data_loader.dataset,
        batch_size=size * accelerator.gradient_accumulation_steps,
        sampler=data_loader.sampler,
        collate_fn=data_loader.collate_fn,
        num_workers=data_loader.num_workers,
        pin_memory=data_loader.pin_memory,
        drop_last=data_loader.drop_last and not poisson,
    )
    make: Any = engine.make_private_with_epsilon if "target_epsilon" in privacy else engine.make_private
    module = module.to(accelerator.device)
    module, private, loader = make(module=module, optimizer=optimizer, data_loader=logical, **privacy)
    accelerator.gradient_accumulation_steps = 1
    prepared = _PrivateOptimizer(private, device_placement=accelerator.device_placement)
    return (
        accelerator.prepare_model(module),
        accelerator.prepare_optimizer(prepared),
        _Pieces(loader, size, private, accelerator.device),
    )
