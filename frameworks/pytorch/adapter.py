"""Plain training by PyTorch: the non-private baseline, eager, compiled, and with sparse gradients of tables."""

from __future__ import annotations

import shutil
from collections.abc import Mapping

import numpy as np
import torch
from torch import nn

from frameworks._shared.torch import models as torch_models
from frameworks._shared.torch import optimizers
from frameworks._shared.torch.adapter import COMPILERS, PRECISIONS, TorchAdapter
from harness.contract import NO_OWN_LOOP, PARALLEL, Adapter, Setting, Unsupported
from harness.optimizer import SGD
from harness.tasks import Task

# One graph per padded batch size, and the gate brings sizes of its own; the default of 8 would fall back to eager.
torch._dynamo.config.recompile_limit = 64


def create(variant: str) -> Adapter:
    """The adapter of ``variant``, ``eager``, ``compiled`` or ``sparse``; in several processes, ``ddp`` or ``fsdp2``."""
    if variant in PARALLEL:
        from frameworks._shared.torch.ranks import Lead
        from frameworks.pytorch.ranked import Ranked

        return Lead(__file__, variant, Ranked(variant))
    return Sparse() if variant == "sparse" else PyTorch(compiled=variant == "compiled")


class PyTorch(TorchAdapter):
    """``torch.optim``'s update by the sum of the examples' losses over B."""

    optimizers = optimizers.NAMES
    precisions = PRECISIONS

    def __init__(self, compiled: bool) -> None:
        self.compiled = compiled
        self.task = None

    def build(self, task: Task, setting: Setting, initial: Mapping[str, np.ndarray]) -> None:
        if setting.private:
            raise Unsupported("PyTorch alone has no differential privacy.")
        if self.compiled and setting.device == "cpu" and not any(map(shutil.which, COMPILERS)):
            raise Unsupported(
                f"torch.compile on a CPU needs a C++ compiler, and none of {', '.join(COMPILERS)} is here."
            )
        known = self.task is not None and self.task == task and self.setting.device == setting.device
        self.configure(task, setting)
        if known:  # the compiled step holds on to these very parameters
            torch_models.load_parameters(self.model, task, initial)
        else:
            self.model = self.network(initial)
            self.loss = self._summed_loss()
        # The divisor goes into SGD's rate, and else into the loss, so that no pass over the gradients is spent on it.
        of_sum = optimizers.takes_sums(setting)
        self.share = 1.0 if of_sum else 1.0 / setting.batch_size
        self.optimizer = optimizers.make(torch_models.trained_parameters(self.model), setting, of_sum)
        self.optimizer.zero_grad(set_to_none=True)
        self.order = torch.Generator()
        self.own_loader = None

    def _summed_loss(self):
        model, losses = self.model, torch_models.loss_fn(self.task)

        def summed(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return losses(model(x), y).sum()

        def summed_where(x: torch.Tensor, y: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            return (losses(model(x), y) * mask).sum()

        return torch.compile(summed_where, dynamic=False) if self.compiled else summed

    def step(self, indices: np.ndarray, mask: np.ndarray | None) -> None:
        if len(indices) == 0:  # AdamW moves the weights all the same
            for parameter in torch_models.trained_parameters(self.model):
                parameter.grad = torch.zeros_like(parameter)
            return self.optimizer.step()
        x, y = self.batch(indices)
        with self.autocast():
            if self.compiled:
                kept = np.ones(len(indices), bool) if mask is None else mask
                loss = self.loss(x, y, torch.from_numpy(kept).to(self.device, non_blocking=True))
            else:
                loss = self.loss(x, y)
        (loss if self.share == 1.0 else self.share * loss).backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def epoch(self, seed: int) -> int:
        """The tutorial's loop: a shuffled loader, the mean of the losses, plain SGD."""
        if self.own_loader is None:
            self.own_loader = self.loader(self.order)
            self.own_module = torch.compile(self.model) if self.compiled else self.model
            trained = torch_models.trained_parameters(self.model)
            self.own_optimizer = optimizers.make(trained, self.setting, of_sum=False)
        losses = torch_models.loss_fn(self.task)
        self.order.manual_seed(seed)
        return self.train(self.own_module, lambda out, y: losses(out, y).mean(), self.own_optimizer, self.own_loader)


class Sparse(PyTorch):
    """As users of huge tables train: the gradient of a table holds only the rows that the batch read."""

    optimizers = (SGD.name,)  # torch.optim's others take no sparse gradients, or make another update of them

    def __init__(self) -> None:
        super().__init__(compiled=False)

    def build(self, task: Task, setting: Setting, initial: Mapping[str, np.ndarray]) -> None:
        super().build(task, setting, initial)
        tables = [part for part in self.model.modules() if isinstance(part, (nn.Embedding, nn.EmbeddingBag))]
        if not tables:
            raise Unsupported("its task has no tables, whose gradients alone can be sparse.")
        for table in tables:
            table.sparse = True
        for group in self.optimizer.param_groups:
            group["fused"] = False  # PyTorch's fused SGD refuses sparse gradients

    def epoch(self, seed: int) -> int:
        raise Unsupported(NO_OWN_LOOP)
