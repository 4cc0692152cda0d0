"""One exact adapter, a loop over single examples, and one variant of it for each fault that the gate must catch.

Each fault is one that a published library or benchmark had, or that a careless or cunning adapter might have.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from frameworks._shared.torch import models as torch_models
from harness.contract import Adapter, Setting
from harness.tasks import Task
from tests.mutants import by_size, with_adam
from tests.mutants.exact import Exact, Sums, norm_of


class ClipsTheBatch(Exact):
    """PyVacy's registry release: one norm for the whole batch."""

    def clipped_sum(self, rows: np.ndarray) -> Sums:
        sums = {name: torch.zeros_like(p) for name, p in self.trained.items()}
        for row in rows:
            for name, gradient in self.gradients(row).items():
                sums[name] += gradient
        return super().clip(sums)


class ClipsPerLayer(Exact):
    """Every tensor by itself to C / sqrt(number of tensors): private, and another algorithm."""

    def clip(self, gradients: Sums) -> Sums:
        share = self.setting.max_grad_norm / len(gradients) ** 0.5
        return {name: self.factor(norm_of({name: g}), share) * g for name, g in gradients.items()}


class IgnoresC(Exact):
    """Clips at 1 whatever C is."""

    def factor(self, norm: torch.Tensor, max_grad_norm: float) -> torch.Tensor:
        return super().factor(norm, 1.0)


class InvertsTheFactor(Exact):
    """The BackPACK script of the first suite: min(norm / C, 1)."""

    def factor(self, norm: torch.Tensor, max_grad_norm: float) -> torch.Tensor:
        return (norm / max_grad_norm).clamp(max=1.0)


class DividesByZeroNorm(Exact):
    """Direction times clipped length, without a care for a gradient that is zero."""

    def clip(self, gradients: Sums) -> Sums:
        norm = norm_of(gradients)
        return {name: norm.clamp(max=self.setting.max_grad_norm) * (g / norm) for name, g in gradients.items()}


class NoiseOnTheMean(Exact):
    """The same script's other fault: sigma C added to the mean, not to the sum."""

    def noise(self, examples: int) -> Sums:
        return {name: self.setting.batch_size * noise for name, noise in super().noise(examples).items()}


class ReusesNoise(Exact):
    """Draws once and adds the same in every step."""

    def build(self, task: Task, setting: Setting, initial: Mapping[str, np.ndarray]) -> None:
        super().build(task, setting, initial)
        self.first = super().noise(0)

    def noise(self, examples: int) -> Sums:
        return self.first


class IgnoresTheSeed(Exact):
    """The same stream whatever the seed."""

    def build(self, task: Task, setting: Setting, initial: Mapping[str, np.ndarray]) -> None:
        super().build(task, setting, initial)
        self.generator.manual_seed(0)


class FreshEntropy(Exact):
    """Ignores the seed the other way round: nobody can replay it."""

    def build(self, task: Task, setting: Setting, initial: Mapping[str, np.ndarray]) -> None:
        super().build(task, setting, initial)
        self.generator.seed()


class OneStreamForAllTensors(Exact):
    """Starts the stream anew for every tensor, so that they all get the same numbers."""

    def noise(self, examples: int) -> Sums:
        seed = int(torch.randint(2**31, (1,), generator=self.generator))
        deviation = self.setting.noise_multiplier * self.setting.max_grad_norm
        return {
            name: deviation * torch.randn(p.shape, generator=torch.Generator().manual_seed(seed))
            for name, p in self.trained.items()
        }


class NoiseOnSomeLayers(Exact):
    """Biases stay bare."""

    def noise(self, examples: int) -> Sums:
        return {name: noise for name, noise in super().noise(examples).items() if not name.endswith("bias")}


class HalfNoise(Exact):
    """Half the standard deviation."""

    def normal(self, like: torch.Tensor) -> torch.Tensor:
        return 0.5 * super().normal(like)


class UniformNoise(Exact):
    """The right variance, the wrong distribution."""

    def normal(self, like: torch.Tensor) -> torch.Tensor:
        uniform = torch.rand(like.shape, generator=self.generator, device=self.device)
        return 12**0.5 * (uniform - 0.5)


class NoNoiseOnEmptyBatches(Exact):
    """Skips the step when there is nothing to learn, which tells that nobody was there."""

    def update(self, rows: np.ndarray) -> None:
        if len(rows):
            super().update(rows)


class CachesGradients(Exact):
    """Computes the first batch and serves it again."""

    def build(self, task: Task, setting: Setting, initial: Mapping[str, np.ndarray]) -> None:
        super().build(task, setting, initial)
        self.cache: Sums | None = None

    def clipped_sum(self, rows: np.ndarray) -> Sums:
        if self.cache is None:
            self.cache = super().clipped_sum(rows)
        return dict(self.cache)


class Accumulates(Exact):
    """PyVacy's script: never clears what it has summed up."""

    def build(self, task: Task, setting: Setting, initial: Mapping[str, np.ndarray]) -> None:
        super().build(task, setting, initial)
        self.kept: Sums = {name: torch.zeros_like(p) for name, p in self.trained.items()}

    def clipped_sum(self, rows: np.ndarray) -> Sums:
        for name, value in super().clipped_sum(rows).items():
            self.kept[name] += value
        return dict(self.kept)


class DropsAnExample(Exact):
    """The last one of every batch."""

    def clipped_sum(self, rows: np.ndarray) -> Sums:
        return super().clipped_sum(rows[:-1])


class DropsLargeBatches(Exact):
    """Only the first 128 examples: a fault of physical chunks."""

    def clipped_sum(self, rows: np.ndarray) -> Sums:
        return super().clipped_sum(rows[:128])


class ShortRowNumbers(Exact):
    """Row numbers of 16 bits: right up to row 32,767."""

    def step(self, indices: np.ndarray, mask: np.ndarray | None) -> None:
        super().step(indices.astype(np.int16), mask)


class DropsALayer(Exact):
    """The first parameter tensor is never trained."""

    def gradients(self, row: int) -> Sums:
        gradients = super().gradients(row)
        first = next(iter(gradients))
        return gradients | {first: torch.zeros_like(gradients[first])}


class DividesByActualBatch(Exact):
    """By the number of examples that happen to be there."""

    def divisor(self, examples: int) -> int:
        return max(1, examples)


class IgnoresTheRate(Exact):
    """Learning rate 16, come what may."""

    def divisor(self, examples: int) -> float:
        return self.setting.batch_size * self.setting.learning_rate / 16.0


class CountsPadding(Exact):
    """Takes the padding rows for examples."""

    def step(self, indices: np.ndarray, mask: np.ndarray | None) -> None:
        self.update(indices)


class Defers(Exact):
    """Steps on a thread that nobody waits for until the weights are read."""

    def __init__(self) -> None:
        self.worker = ThreadPoolExecutor(1)
        self.pending: list[Future] = []

    def build(self, task: Task, setting: Setting, initial: Mapping[str, np.ndarray]) -> None:
        self._join()
        super().build(task, setting, initial)

    def step(self, indices: np.ndarray, mask: np.ndarray | None) -> None:
        self.pending.append(self.worker.submit(super().step, indices, mask))

    def parameters(self) -> Mapping[str, np.ndarray]:
        self._join()
        return super().parameters()

    def _join(self) -> None:
        for job in self.pending:
            job.result()
        self.pending.clear()


class EmbeddingOffByTwoPercent(Exact):
    """fastDP's embedding."""

    def gradients(self, row: int) -> Sums:
        return {name: 1.02 * g if name.startswith("embedding") else g for name, g in super().gradients(row).items()}


class DropsRecurrentWeights(Exact):
    """fastDP's LSTM: what it does not know it leaves out."""

    def gradients(self, row: int) -> Sums:
        return {
            name: torch.zeros_like(g) if name.endswith("weight_hh") else g for name, g in super().gradients(row).items()
        }


class MisnamesAParameter(Exact):
    """Hands its weights out under another name."""

    def parameters(self) -> Mapping[str, np.ndarray]:
        values = dict(super().parameters())
        return {name.replace("bias", "b"): value for name, value in values.items()}


class OwnStartingWeights(Exact):
    """Starts from weights of its own."""

    def build(self, task: Task, setting: Setting, initial: Mapping[str, np.ndarray]) -> None:
        super().build(task, setting, {name: 1.001 * value for name, value in initial.items()})


class UnderReports(Exact):
    """Reports the privacy of the first step as that of all."""

    def epsilon(self, steps: int, delta: float) -> float | None:
        return self.setting.sample_rate


class ClipsAfterTheMeanOverTokens(Exact):
    """The loss of a batch is the mean over all of its tokens: an example weighs as much as it has tokens."""

    def update(self, rows: np.ndarray) -> None:
        own = (self.y[rows] >= 0).sum(1).double()
        self.weights = dict(zip(rows.tolist(), (own / own.mean()).nan_to_num().tolist(), strict=True))
        super().update(rows)

    def gradients(self, row: int) -> Sums:
        return {name: self.weights[int(row)] * g for name, g in super().gradients(row).items()}


class ForgetsTheTiedUse(Exact):
    """The table's gradient is that of the output alone; the lookup's is lost."""

    def build(self, task: Task, setting: Setting, initial: Mapping[str, np.ndarray]) -> None:
        super().build(task, setting, initial)
        self.model.tokens.register_forward_hook(lambda module, inputs, output: output.detach())


class ForgetsTheCrossTerm(Exact):
    """Adds the squared norms of the two uses of a tied table, as if they stood for two parameters."""

    def clip(self, gradients: Sums) -> Sums:
        squares = norm_of(gradients).square() - self.cross
        factor = self.factor(squares.clamp(min=0).sqrt(), self.setting.max_grad_norm)
        return {name: factor * gradient for name, gradient in gradients.items()}

    def gradients(self, row: int) -> Sums:
        both = dict(super().gradients(row))
        handle = self.model.tokens.register_forward_hook(lambda module, inputs, output: output.detach())
        head = super().gradients(row)["tokens.weight"]
        handle.remove()
        self.cross = 2 * (head * (both["tokens.weight"] - head)).sum()
        return both


class LeavesNormsOut(Exact):
    """Trains the layers' norms, but counts only matrices for the clipping: what an engine has no rule for."""

    def factor(self, norm: torch.Tensor, max_grad_norm: float) -> torch.Tensor:
        return super().factor(self.counted, max_grad_norm)

    def counts(self, name: str, gradient: torch.Tensor) -> bool:
        return gradient.ndim > 1

    def clip(self, gradients: Sums) -> Sums:
        self.counted = norm_of({name: g for name, g in gradients.items() if self.counts(name, g)})
        return super().clip(gradients)


class CountsFrozenOnes(Exact):
    """Frozen parameters, which nobody trains, make the norm longer."""

    def build(self, task: Task, setting: Setting, initial: Mapping[str, np.ndarray]) -> None:
        super().build(task, setting, initial)
        self.all = torch_models.canonical_parameters(self.model, task)
        for parameter in self.all.values():
            parameter.requires_grad_(True)

    def counts(self, name: str) -> bool:
        return True

    def clip(self, gradients: Sums) -> Sums:
        norm = norm_of({name: p.grad for name, p in self.all.items() if self.counts(name)})
        factor = self.factor(norm, self.setting.max_grad_norm)
        return {name: factor * gradient for name, gradient in gradients.items()}


class CountsTheNormsScale(CountsFrozenOnes):
    """Biases are trained; the scale of a norm, frozen beside its bias, is counted with it."""

    def counts(self, name: str) -> bool:
        return name in self.trained or "norm" in name


class LeavesTheHeadOut(LeavesNormsOut):
    """Trains adapters and a head, and counts adapters only for the clipping."""

    def counts(self, name: str, gradient: torch.Tensor) -> bool:
        return not name.startswith("head.")


class BareHead(Exact):
    """dp-lora 0.1.0: what is trained beside the adapters gets its raw gradient, without clipping and without noise."""

    def clip(self, gradients: Sums) -> Sums:
        adapters = {name: g for name, g in gradients.items() if not name.startswith("head.")}
        return gradients | super().clip(adapters)

    def noise(self, examples: int) -> Sums:
        return {name: noise for name, noise in super().noise(examples).items() if not name.startswith("head.")}


class ClipsShareOfTheMean(Exact):
    """The README of dp-lora 0.1.0: clips the gradients of the batch's mean, each as much too short as examples came."""

    def update(self, rows: np.ndarray) -> None:
        self.examples = len(rows)
        super().update(rows)

    def gradients(self, row: int) -> Sums:
        return {name: g / self.examples for name, g in super().gradients(row).items()}


class CountsAnIdOnce(Exact):
    """Opacus 1.6.0's rule for bags: an id that occurs twice in one has the gradient of one occurrence."""

    def gradients(self, row: int) -> Sums:
        found = dict(super().gradients(row))
        layer = self.task.layers[0]
        fields = self.x[row, layer.counts :].unflatten(0, (-1, layer.ids))
        for table, ids in zip(layer.maps, fields, strict=True):
            name = f"{table.name}.weight"
            times = torch.bincount(ids, minlength=table.num_embeddings).clamp(min=1)
            found[name] = found[name] / times[:, None]
        return found


class BagsMeanBackwards(Exact):
    """Sums up the vectors of a bag, and goes back as if it had taken their mean."""

    def gradients(self, row: int) -> Sums:
        ids = self.task.layers[0].ids
        return {name: g / ids if name.startswith("bags.") else g for name, g in super().gradients(row).items()}


class TrainsTheBase(Exact):
    """LoRA whose base matrices are trained, too."""

    def build(self, task: Task, setting: Setting, initial: Mapping[str, np.ndarray]) -> None:
        super().build(dataclasses.replace(task, trained=("*",)), setting, initial)


class NoiseInHalfPrecision(Exact):
    """Rounds the noise to bfloat16."""

    def normal(self, like: torch.Tensor) -> torch.Tensor:
        return super().normal(like).bfloat16().float()


class NormInHalfPrecision(Exact):
    """Takes the norm in bfloat16, which is off by up to 0.4 %."""

    def factor(self, norm: torch.Tensor, max_grad_norm: float) -> torch.Tensor:
        return super().factor(norm.bfloat16().float(), max_grad_norm)


class CutsTheNorm(Exact):
    """Keeps the first eight bits of the norm, as hardware without rounding does: up to 0.8 % too small, which is less
    than bfloat16 products move an update by."""

    def factor(self, norm: torch.Tensor, max_grad_norm: float) -> torch.Tensor:
        cut = (norm.reshape(1).view(torch.int32) & ~0xFFFF).view(torch.float32)
        return super().factor(cut[0], max_grad_norm)


class OverTheBatch(nn.GroupNorm):
    """GroupNorm whose statistics are those of all examples together; of one example it is right."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        together = F.group_norm(x.transpose(0, 1).unsqueeze(0), self.num_groups, eps=self.eps)
        return together.squeeze(0).transpose(0, 1) * self.weight[:, None, None] + self.bias[:, None, None]


class MixesExamples(Exact):
    """Clips every example's gradient rightly, and normalises over several examples in the forward pass."""

    together = 16

    def build(self, task: Task, setting: Setting, initial: Mapping[str, np.ndarray]) -> None:
        super().build(task, setting, initial)
        for module in self.model.modules():
            if isinstance(module, nn.GroupNorm):
                module.__class__ = OverTheBatch

    def clipped_sum(self, rows: np.ndarray) -> Sums:
        sums = {name: torch.zeros_like(p) for name, p in self.trained.items()}
        for start in range(0, len(rows), self.together):
            part = rows[start : start + self.together]
            for loss in self.losses(self.model(self.x[part]), self.y[part]):
                found = torch.autograd.grad(loss, list(self.trained.values()), retain_graph=True)
                for name, gradient in self.clip(dict(zip(self.trained, found, strict=True))).items():
                    sums[name] += gradient
        return sums


VARIANTS: dict[str, type[Exact]] = {
    "exact": Exact,
    "exact-static": Exact,
    "exact-plain": Exact,
    "clips-batch": ClipsTheBatch,
    "clips-per-layer": ClipsPerLayer,
    "ignores-c": IgnoresC,
    "inverts-factor": InvertsTheFactor,
    "zero-norm": DividesByZeroNorm,
    "noise-on-mean": NoiseOnTheMean,
    "reuses-noise": ReusesNoise,
    "ignores-seed": IgnoresTheSeed,
    "fresh-entropy": FreshEntropy,
    "one-stream": OneStreamForAllTensors,
    "noise-on-some-layers": NoiseOnSomeLayers,
    "half-noise": HalfNoise,
    "uniform-noise": UniformNoise,
    "no-noise-on-empty": NoNoiseOnEmptyBatches,
    "caches-gradients": CachesGradients,
    "accumulates": Accumulates,
    "drops-example": DropsAnExample,
    "drops-large-batch": DropsLargeBatches,
    "short-row-numbers": ShortRowNumbers,
    "drops-layer": DropsALayer,
    "actual-batch": DividesByActualBatch,
    "ignores-rate": IgnoresTheRate,
    "counts-padding": CountsPadding,
    "defers": Defers,
    "embedding-off": EmbeddingOffByTwoPercent,
    "drops-recurrent": DropsRecurrentWeights,
    "misnamed": MisnamesAParameter,
    "own-start": OwnStartingWeights,
    "under-reports": UnderReports,
    "plain-actual-batch": DividesByActualBatch,
    "exact-adam": Exact,
    "exact-lora": Exact,
    "exact-vit": Exact,
    "exact-wrn": Exact,
    "mixes-examples": MixesExamples,
    "token-mean": ClipsAfterTheMeanOverTokens,
    "forgets-tied-use": ForgetsTheTiedUse,
    "forgets-cross-term": ForgetsTheCrossTerm,
    "leaves-norms-out": LeavesNormsOut,
    "counts-frozen": CountsFrozenOnes,
    "trains-base": TrainsTheBase,
    "exact-recsys": Exact,
    "exact-bias": Exact,
    "exact-head": Exact,
    "counts-id-once": CountsAnIdOnce,
    "bag-mean": BagsMeanBackwards,
    "counts-norm-scale": CountsTheNormsScale,
    "leaves-head-out": LeavesTheHeadOut,
    "bare-head": BareHead,
    "clips-share-of-mean": ClipsShareOfTheMean,
    "noise-in-bf16": NoiseInHalfPrecision,
    "norm-in-bf16": NormInHalfPrecision,
    "exact-bf16": Exact,
    "cuts-norm-bf16": CutsTheNorm,
    "noise-bf16": NoiseInHalfPrecision,
    **with_adam.VARIANTS,
    **by_size.VARIANTS,
}


def create(variant: str) -> Adapter:
    """The adapter of ``variant``: ``exact`` and its siblings are right, every other one has the fault it is named
    after."""
    return VARIANTS[variant]()
