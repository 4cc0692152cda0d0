"""What every adapter on PyTorch does alike: device and precision, resident data, weights in and out, CUDA's memory."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from frameworks._shared.torch import models as torch_models
from harness.contract import Adapter, Memory, Setting, Unsupported
from harness.tasks import BFLOAT16, FLOAT32, Task

PRECISIONS = (FLOAT32, BFLOAT16)
"""Of adapters that run the forward pass under :meth:`TorchAdapter.autocast`."""
COMPILERS = ("g++", "clang++", "c++")
"""What torch.compile looks for on a CPU."""


class TorchAdapter(Adapter):
    """Leaves ``build`` and ``step`` to the framework; ``build`` calls :meth:`configure` and sets ``self.model``."""

    model: nn.Module
    own_modules = torch_models.Own()
    memory_format = torch.channels_last
    """Layout of images and kernels in memory: the one that oneDNN's and cuDNN's fast convolutions take. Shapes, values
    and canonical weights do not depend on it."""

    def configure(self, task: Task, setting: Setting) -> None:
        """Applies device and threads of ``setting`` to this process.

        Raises :class:`Unsupported` where the machine cannot do it.
        """
        self.task = task
        self.setting = setting
        self.device = torch.device(setting.device)
        if self.device.type == "cuda":
            if not torch.cuda.is_available():
                raise Unsupported("PyTorch finds no CUDA device here.")
            torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
            torch.cuda.reset_peak_memory_stats(self.device)
        torch.set_num_threads(setting.threads)

    def autocast(self) -> torch.autocast:
        """The region of the forward pass and the loss: PyTorch's own mixed precision where the setting has one."""
        return torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.setting.precision == BFLOAT16)

    def network(self, initial: Mapping[str, np.ndarray]) -> torch.nn.Module:
        """The task's model with the weights ``initial``, on the device."""
        model = torch_models.build_model(self.task, initial, own=self.own_modules)
        return model.to(self.device, memory_format=self.memory_format)

    def place(self, x: np.ndarray, y: np.ndarray) -> None:
        self.x, self.y = torch_models.place(x, y, self.device)
        if self.x.ndim == 4:
            self.x = self.x.contiguous(memory_format=self.memory_format)

    def batch(self, indices: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and labels of the rows ``indices`` of the placed data."""
        rows = torch.from_numpy(indices).to(self.device, non_blocking=True)
        return self.x[rows], self.y[rows]

    def loader(self, generator: torch.Generator) -> DataLoader:
        """For protocol ``as_shipped``: PyTorch's own loader as its users have it, shuffled rows of host memory."""
        rows = TensorDataset(self.x.cpu().contiguous(), self.y.cpu())
        return DataLoader(rows, batch_size=self.setting.batch_size, shuffle=True, generator=generator)

    def train(
        self, module: nn.Module, criterion: torch_models.Loss, optimizer: torch.optim.Optimizer, loader: DataLoader
    ) -> int:
        """The loop that every PyTorch user writes, once over ``loader``; the number of updates."""
        updates = 0
        for x, y in loader:
            optimizer.zero_grad()
            with self.autocast():
                loss = criterion(module(x.to(self.device)), y.to(self.device))
            loss.backward()
            optimizer.step()
            updates += 1
        return updates

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def parameters(self) -> Mapping[str, np.ndarray]:
        return torch_models.read_parameters(self.model, self.task)

    def peak_memory(self) -> Memory:
        if self.device.type != "cuda":
            return Memory({})
        return Memory(
            {
                "cuda_peak_allocated": torch.cuda.max_memory_allocated(self.device),
                "cuda_peak_reserved": torch.cuda.max_memory_reserved(self.device),
            }
        )
