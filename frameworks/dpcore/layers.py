"""Layers in dpcore: the engine's clipped sum, the wrapped module's per-sample gradients, and its modules without DP."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from dpcore import Engine, layers, native
from dpcore.grad_sample import GradSampleModule
from dpcore.optimizers import DPOptimizer
from frameworks._shared.torch.layers import TorchLayer, canonical
from harness.layer_contract import LayerAdapter, Unsupported

OWN = {
    "MultiheadAttention": layers.DPMultiheadAttention,
    "RNN": layers.DPRNN,
    "GRU": layers.DPGRU,
    "LSTM": layers.DPLSTM,
}


def create(variant: str) -> LayerAdapter:
    """``native``, ``engine`` (without kernels), ``compiled``, ``grad-sample``, ``make-private`` or ``module``."""
    if variant not in ("engine", "module"):
        try:
            native.build()
        except native.NativeBuildError as error:
            raise Unsupported(str(error)) from None
    others = {"grad-sample": PerSample, "make-private": MakePrivate, "module": OwnModule}
    return others[variant]() if variant in others else ByEngine(graphs=variant == "compiled")


class OwnModule(TorchLayer):
    """dpcore's layer with Opacus' constructor; forward and backward without DP."""

    def module(self) -> nn.Module:
        return OWN[self.layer.kind](**self.layer.options, batch_first=not self.layer.time_first)

    def one_pass(self, inputs: tuple[Tensor, ...], labels: Tensor) -> None:
        self.forget()
        self.losses(self.model(*inputs), labels).sum().backward()


class ByEngine(TorchLayer):
    """The clipped sum as every ``Engine.step`` takes it."""

    engine: Engine | None = None

    def __init__(self, graphs: bool = False) -> None:
        self.graphs = graphs

    def one_pass(self, inputs: tuple[Tensor, ...], labels: Tensor) -> None:
        x = inputs if len(inputs) > 1 else inputs[0]
        if self.engine is None:  # in the first pass, so that its buffer of the sums counts as gradients
            bound = self.setting.max_grad_norm
            self.engine = Engine(self.model, self.losses, max_grad_norm=bound, compile=self.graphs)
            if self.graphs:  # eagerly, so that all that is checked and timed comes from graphs
                self.engine.clipped_sum(x, labels)
        self.sums = self.engine.clipped_sum(x, labels).sums

    def left_behind(self) -> Mapping[str, Tensor]:
        return {name: self.sums[f"module.{name}"] for name in self.layer.parameters}

    def plan(self) -> Mapping[str, int]:
        """Read off ``engine.explain()``: a line per parameter, and the largest physical batch size."""
        assert self.engine is not None
        said = dict(line.split(": ", 1) for line in self.engine.explain().splitlines())
        kept = [self.model.get_parameter(name) for name, method in said.items() if method == "keep"]
        size = said["physical batch size"].rpartition(" ")[2]
        return {
            "kept_bytes": sum(p.numel() * p.element_size() for p in kept),
            **({"micro_batch": min(int(size), self.setting.batch_size)} if size.isdigit() else {}),
        }


class PerSample(TorchLayer):
    """Every ``p.grad_sample`` formed, as a script that reads them all has it."""

    def wrap(self) -> None:
        self.wrapped = GradSampleModule(self.model, loss_reduction="sum", ordinary_grad=False)
        self.trained = canonical(self.model.module, self.layer)

    def one_pass(self, inputs: tuple[Tensor, ...], labels: Tensor) -> None:
        self.wrapped.zero_grad(set_to_none=True)
        self.losses(self.wrapped(*inputs), labels).sum().backward()
        for p in self.trained.values():
            p.grad_sample  # noqa: B018 formed when it is read

    def left_behind(self) -> Mapping[str, Tensor]:
        return {name: p.grad_sample for name, p in self.trained.items()}


class MakePrivate(TorchLayer):
    """The two-line use: wrapped module, and the clipping piece of its optimiser's ``step``."""

    def wrap(self) -> None:
        self.wrapped = GradSampleModule(self.model, loss_reduction="sum", ordinary_grad=False)
        self.optimizer = DPOptimizer(
            torch.optim.SGD(self.parameters, lr=0.0),
            noise_multiplier=0.0,
            max_grad_norm=self.setting.max_grad_norm,
            expected_batch_size=1,
            loss_reduction="sum",
        )

    def one_pass(self, inputs: tuple[Tensor, ...], labels: Tensor) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        self.losses(self.wrapped(*inputs), labels).sum().backward()
        self.optimizer.clip_and_accumulate()

    def left_behind(self) -> Mapping[str, Tensor]:
        return {name: p.summed_grad for name, p in canonical(self.model.module, self.layer).items()}
