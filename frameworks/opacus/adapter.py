"""DP-SGD by Opacus: its wrapped model, its optimiser, its accountant, fed with the harness's batches."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from opacus import PrivacyEngine
from opacus.accountants import PRVAccountant
from opacus.grad_sample import wrap_model
from opacus.layers import DPLSTM
from opacus.optimizers import get_optimizer_class
from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping

from frameworks._shared.torch import models as torch_models
from frameworks._shared.torch import optimizers
from frameworks._shared.torch.adapter import PRECISIONS, TorchAdapter
from frameworks.opacus.criterion import Criterion
from harness.contract import PARALLEL, Adapter, Setting, Unsupported
from harness.tasks import FLOAT32, Task

MIXED = ("hooks", "ghost", "functorch")
"""The modes whose mixed precision Opacus 1.6's own tests cover."""


def create(variant: str) -> Adapter:
    """The adapter of ``variant``, one of Opacus' gradient modes: ``hooks``, ``functorch``, ``ew`` or ``ghost``; or, in
    several processes, ``ddp`` or ``fsdp2``."""
    if variant in PARALLEL:
        from frameworks._shared.torch.ranks import Lead
        from frameworks.opacus.ranked import Ranked

        return Lead(__file__, variant, Ranked(variant))
    return Opacus(variant)


class Opacus(TorchAdapter):
    """The pieces that ``PrivacyEngine.make_private`` puts together, with the exact expected batch size.

    Losses are summed and, for SGD, the division by B sits in the learning rate, which spares Opacus' two passes of
    scaling. For Adam Opacus' optimiser divides.
    """

    optimizers = optimizers.NAMES

    # Opacus 1.6.0 adds an id that occurs twice in a bag once (NOTES.md), so a table's vectors are summed up outside.
    own_modules = torch_models.Own(lstm=DPLSTM, table=torch.nn.Embedding, views=False)

    # Opacus 1.6.0 reads channels-last activations wrongly (NOTES.md), so it gets PyTorch's default layout.
    memory_format = torch.contiguous_format

    def __init__(self, mode: str) -> None:
        self.mode = mode
        self.precisions = PRECISIONS if mode in MIXED else (FLOAT32,)

    def build(self, task: Task, setting: Setting, initial: Mapping[str, np.ndarray]) -> None:
        if not setting.private:
            raise Unsupported("Opacus only trains with differential privacy; its non-private twin is pytorch.")
        self.configure(task, setting)
        model = self.network(initial)
        if self.mode == "ghost" and task.trains_tied_table:
            raise Unsupported("Opacus 1.6.0 refuses it: parameter tying is not supported with ghost clipping.")
        of_sum = optimizers.takes_sums(setting)
        divides = "sum" if of_sum else "mean"
        # Ghost clipping wants one reduction for all of its parts; elsewhere the losses' sum is one pass less.
        reduction = divides if self.mode == "ghost" else "sum"
        extra = {"max_grad_norm": setting.max_grad_norm} if self.mode == "ghost" else {}
        self.wrapped = wrap_model(model, self.mode, batch_first=True, loss_reduction=reduction, **extra)
        self.model = model
        inner = optimizers.make(torch_models.trained_parameters(model), setting, of_sum)
        self.optimizer = get_optimizer_class("flat", distributed=False, grad_sample_mode=self.mode)(
            inner,
            noise_multiplier=setting.noise_multiplier,
            max_grad_norm=setting.max_grad_norm,
            expected_batch_size=setting.batch_size,
            loss_reduction=divides,
            generator=torch.Generator(self.device).manual_seed(setting.seed),
        )
        self.loss = Criterion(task, reduction)
        if self.mode == "ghost":
            self.loss = DPLossFastGradientClipping(self.wrapped, self.optimizer, self.loss, loss_reduction=reduction)
        self.own = None

    def step(self, indices: np.ndarray, mask: np.ndarray | None) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        if len(indices) == 0:
            self._contribute_nothing()
        elif len(indices) == 1 and self.mode == "ew":
            self._single_example(indices)
        else:
            x, y = self.batch(indices)
            with self.autocast():  # around the model alone, as in Opacus' own test of mixed precision
                outputs = self.wrapped(x)
            self.loss(outputs, y).backward()
        self.optimizer.step()

    def _contribute_nothing(self) -> None:
        """What the hooks leave behind for an empty batch. The other modes raise on one, so none runs the model."""
        for p in self.optimizer.params:
            if self.mode == "ghost":
                p.grad = torch.zeros_like(p)
            else:
                p.grad_sample = p.new_zeros((0, *p.shape))

    def _single_example(self, indices: np.ndarray) -> None:
        """PyTorch 2.13's expanded weights get a convolution's gradient wrong for a batch of one (input and output
        channels come out swapped); with a second example whose gradient is zero they are right."""
        x, y = self.batch(np.repeat(indices, 2))
        self.loss(self.wrapped(x)[:1], y[:1]).backward()

    def epoch(self, seed: int) -> int:
        """``make_private`` and its loader, as in the README; only the seeds are set."""
        if self.own is None:
            self.order, self.noise = torch.Generator(), torch.Generator(self.device)
            self.model = self.network(self.parameters())
            # In the ghost mode the criterion is the third of four.
            module, optimizer, *criterion, loader = PrivacyEngine().make_private(
                module=self.model,
                optimizer=optimizers.make(torch_models.trained_parameters(self.model), self.setting, of_sum=False),
                criterion=Criterion(self.task, "mean"),
                data_loader=self.loader(self.order),
                noise_multiplier=self.setting.noise_multiplier,
                max_grad_norm=self.setting.max_grad_norm,
                noise_generator=self.noise,
                grad_sample_mode=self.mode,
            )
            self.own = (module, *(criterion or [Criterion(self.task, "mean")]), optimizer, loader)
        self.order.manual_seed(seed)
        self.noise.manual_seed(seed + 1)
        return self.train(*self.own)

    def epsilon(self, steps: int, delta: float) -> float | None:
        if steps == 0 or self.setting.noise_multiplier == 0:
            return None
        accountant = PRVAccountant()
        accountant.history = [(self.setting.noise_multiplier, self.setting.sample_rate, steps)]
        return float(accountant.get_epsilon(delta))
