"""Proves that a cut in dpcore leaves the weights of seeded runs as they were, bit for bit, and what it refuses.

``weights.json`` holds hashes of the weights, epsilons and norms of small runs, and of the sentences of refusals. Other
processors and versions of torch may give other bits: a set holds for the machine that its key names. Where there is
none for this machine, ``--write`` on the commit before makes one. ``make golden-weights`` compares.
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import io
import json
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from dpcore import GaussianNoise, PrivacyEngine, native
from dpcore.engine.engine import Engine
from dpcore.optimizers import DPOptimizer
from dpcore.schedulers import ExponentialGradClip, ExponentialNoise
from dpcore.utils.batch_memory_manager import BatchMemoryManager

FILE = Path(__file__).with_name("weights.json")
STEPS, EXAMPLES, BATCH = 10, 64, 16
Make = Callable[[], nn.Module]
SGD, ADAMW = partial(torch.optim.SGD, lr=0.5, momentum=0.9), partial(torch.optim.AdamW, lr=1e-2)


class Text(nn.Module):
    """An embedding and ``of``, of whose outputs the mean over the positions goes into a layer."""

    def __init__(self, of: nn.Module, width: int = 16) -> None:
        """Build it around a module of sequences, whose outputs have ``width`` features."""
        super().__init__()
        self.embedding = nn.Embedding(50, 16)
        self.of = of
        self.out = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits [B, 10] of tokens [B, T]."""
        found = self.of(self.embedding(x))
        return self.out((found[0] if isinstance(found, tuple) else found).mean(1))


class Attention(nn.Module):
    """Self-attention by the functional operator."""

    def __init__(self) -> None:
        """Build its layers."""
        super().__init__()
        self.qkv = nn.Linear(16, 48)
        self.norm = nn.LayerNorm(16)

    def forward(self, x: Tensor) -> Tensor:
        """Return [B, T, 16]."""
        q, k, v = (part.unflatten(-1, (2, 8)).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, -1))
        return x + F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


class Tied(nn.Module):
    """A model of language whose last layer is its first."""

    def __init__(self) -> None:
        """Build its layers."""
        super().__init__()
        self.embedding = nn.Embedding(50, 16)
        self.inner = nn.Linear(16, 16)
        self.out = nn.Linear(16, 50, bias=False)
        self.out.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        """Return logits [B, 10] of the mean position."""
        return self.out(torch.tanh(self.inner(self.embedding(x)))).mean(1)[:, :10]


class LowRank(nn.Module):
    """A frozen layer with a trained correction of low rank, beside parameters of its own that have no rule."""

    def __init__(self) -> None:
        """Build its layers."""
        super().__init__()
        self.base = nn.Linear(16, 16).requires_grad_(False)
        self.down, self.up = nn.Linear(16, 2, bias=False), nn.Linear(2, 16, bias=False)
        self.scale = nn.Parameter(torch.ones(16))

    def forward(self, x: Tensor) -> Tensor:
        """Return [..., 16]."""
        return self.scale * torch.tanh(self.base(x) + self.up(self.down(x)))


def _cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 8, 8, 2, padding=3),
        nn.ReLU(),
        nn.MaxPool2d(2, 1),
        nn.Conv2d(8, 12, 4, 2),
        nn.GroupNorm(3, 12),
        nn.ReLU(),
        nn.Flatten(),
        nn.LazyLinear(10),
    )


MODELS: Mapping[str, Make] = {
    "cnn": _cnn,
    "mlp": lambda: nn.Sequential(nn.Flatten(), nn.Linear(196, 24), nn.Tanh(), nn.Linear(24, 10)),
    "embedding": lambda: Text(nn.Identity()),
    "lstm": lambda: Text(nn.LSTM(16, 12, batch_first=True), 12),
    "attention": lambda: Text(Attention()),
    "tied": Tied,
    "low rank": lambda: Text(LowRank()),
}


@dataclass(frozen=True)
class Run:
    """A seeded run by ``make_private``, of ``model`` with ``options``, whose loop is ``loop``."""

    model: str
    options: Mapping[str, Any] = field(default_factory=dict)
    optimizer: Callable[..., torch.optim.Optimizer] = SGD
    loop: Callable[..., None] | None = None
    dtype: torch.dtype = torch.float32

    def __call__(self) -> Iterator[Any]:
        """Train, and give what is to stay the same."""
        model, data = _made(self.model, self.dtype)
        engine = PrivacyEngine(seed=5)
        private = engine.make_private(
            module=model,
            optimizer=self.optimizer(model.parameters()),
            data_loader=DataLoader(data, batch_size=BATCH),
            **{"noise_multiplier": 0.7, "max_grad_norm": 0.5, **self.options},
        )
        yield from (self.loop or _train)(engine, *private)
        yield from _outcome(engine, private[1])


def _made(name: str, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, TensorDataset]:
    torch.manual_seed(3)
    model = MODELS[name]()
    images = name in ("cnn", "mlp")
    x = torch.randn(EXAMPLES, 1, 14, 14, dtype=dtype) if images else torch.randint(50, (EXAMPLES, 7))
    model(x[:1].float() if images else x[:1])
    return model.to(dtype), TensorDataset(x, torch.randint(10, (EXAMPLES,)))


def _outcome(engine: PrivacyEngine, optimizer: DPOptimizer) -> Iterator[Any]:
    yield from (param for group in optimizer.param_groups for param in group["params"])
    yield engine.get_epsilon(1e-3)
    yield [optimizer.steps, optimizer.max_grad_norm, optimizer.noise_multiplier]
    yield engine.accountant.history


def _batches(loader: Any, steps: int = STEPS) -> Iterator[Any]:
    done = 0
    while done < steps:
        for batch in loader:
            if done == steps:
                return
            done += 1
            yield batch


def _train(engine: Any, module: Any, optimizer: Any, *rest: Any, steps: int = STEPS) -> Iterator[Any]:
    """Train by the ordinary loop; with the mode "ghost" by the criterion that it gave."""
    *criterion, loader = rest
    loss_of = criterion[0] if criterion else nn.CrossEntropyLoss(reduction=module.loss_reduction)
    call = module if isinstance(module, nn.Module) else module._module
    for x, y in _batches(loader, steps):
        optimizer.zero_grad()
        loss = loss_of(call(x), y)
        loss.backward()
        optimizer.step()
        if not len(x):
            continue
        yield float(loss.item())


def _accumulate(engine: Any, module: Any, optimizer: Any, loader: Any) -> Iterator[Any]:
    """Add two batches up for every step."""
    for i, (x, y) in enumerate(_batches(loader)):
        F.cross_entropy(module(x), y).backward()
        if i % 2:
            optimizer.step()
            optimizer.zero_grad()
            yield optimizer.accumulated_iterations


def _managed(engine: Any, module: Any, optimizer: Any, loader: Any) -> Iterator[Any]:
    """Cut batches by the manager, under schedules."""
    schedules = ExponentialNoise(optimizer, gamma=0.95), ExponentialGradClip(optimizer, gamma=0.95)
    rate = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    for _ in range(2):
        with BatchMemoryManager(data_loader=loader, max_physical_batch_size=5, optimizer=optimizer) as pieces:
            for x, y in pieces:
                optimizer.zero_grad()
                F.cross_entropy(module(x), y).backward()
                optimizer.step()
                for schedule in (*schedules, rate):
                    schedule.step()
                yield rate.get_last_lr()


def _read(engine: Any, module: Any, optimizer: Any, loader: Any) -> Iterator[Any]:
    """Read and change what can be read between the backward pass and the step."""
    for x, y in _batches(loader, 4):
        optimizer.zero_grad()
        F.cross_entropy(module(x), y).backward()
        for param in optimizer.params:
            yield param.grad_sample.sum()
            yield param.grad
            param.grad_sample *= 0.9
        optimizer.step()
        yield from (param.grad for param in optimizer.params)


def _signals(engine: Any, module: Any, optimizer: Any, loader: Any) -> Iterator[Any]:
    """Cut batches by hand."""
    for x, y in _batches(loader):
        for part in (slice(0, 6), slice(6, None)):
            optimizer.zero_grad()
            optimizer.signal_skip_step(part.stop is not None)
            F.cross_entropy(module(x[part]), y[part]).backward()
            optimizer.step()
        yield optimizer.batch_goes_on


def _resume(engine: Any, module: Any, optimizer: Any, loader: Any) -> Iterator[Any]:
    """Go on in another process's objects from a file."""
    yield from _train(engine, module, optimizer, loader, steps=5)
    file = io.BytesIO()
    engine.save_checkpoint(path=file, module=module, optimizer=optimizer)
    file.seek(0)
    torch.manual_seed(99)
    model, data = _made("mlp")
    other = PrivacyEngine(seed=5)
    private = other.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9),
        data_loader=DataLoader(data, batch_size=BATCH),
        noise_multiplier=0.7,
        max_grad_norm=0.5,
    )
    entries = other.load_checkpoint(path=file, module=private[0], optimizer=private[1])
    yield sorted(entries)
    yield from _train(other, *private, steps=5)
    yield from _outcome(other, private[1])


def _by_state(engine: Any, module: Any, optimizer: Any, loader: Any) -> Iterator[Any]:
    """Load the state of an optimizer into another one's."""
    yield from _train(engine, module, optimizer, loader, steps=3)
    state = copy.deepcopy(optimizer.state_dict())
    model, data = _made("mlp")
    other = PrivacyEngine(seed=6)
    private = other.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9),
        data_loader=DataLoader(data, batch_size=BATCH),
        noise_multiplier=0.7,
        max_grad_norm=0.5,
    )
    private[1].load_state_dict(state)
    spent = state.get("privacy") or state["param_groups"][0]["privacy"]
    yield [history for _, history in sorted(spent["runs"].items())]
    yield other.get_epsilon(1e-3)
    yield len(private[2])


def _engine(name: str, dtype: torch.dtype = torch.float32, **options: Any) -> Iterator[Any]:
    """Train by :class:`Engine`."""
    model, data = _made(name, dtype)
    engine = Engine(
        model,
        partial(F.cross_entropy, reduction="none"),
        **{"max_grad_norm": 0.5, "noise_multiplier": 0.7, **options},
        expected_batch_size=BATCH,
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2),
        noise=GaussianNoise(7),
    )
    x, y = data.tensors
    for step in range(STEPS):
        rows = torch.arange(step, step + (0 if step == 4 else 12 + step)) % EXAMPLES
        mask = rows % 5 != 0 if step % 3 == 2 else None
        found = engine.step(x[rows], y[rows], mask)
        yield from (found.norms, found.factors, found.losses, found.sensitivity)
    yield from model.state_dict().values()


RUNS: Mapping[str, Callable[[], Iterator[Any]]] = {
    **{f"{name}, bookkeeping": Run(name) for name in MODELS},
    **{f"{name}, hooks, AdamW": Run(name, {"grad_sample_mode": "hooks"}, ADAMW) for name in MODELS},
    "cnn, functorch": Run("cnn", {"grad_sample_mode": "functorch"}),
    "attention, ew": Run("attention", {"grad_sample_mode": "ew"}, ADAMW),
    "cnn, ghost": Run("cnn", {"grad_sample_mode": "ghost"}),
    "lstm, ghost": Run("lstm", {"grad_sample_mode": "ghost"}, ADAMW),
    "attention, no wrapper": Run("attention", {"wrap_model": False}),
    "mlp, sum": Run("mlp", {"loss_reduction": "sum"}, partial(torch.optim.SGD, lr=0.01)),
    "mlp, float64": Run("mlp", dtype=torch.float64),
    "mlp, bfloat16": Run("mlp", dtype=torch.bfloat16),
    "mlp, per layer": Run("mlp", {"clipping": "per_layer", "max_grad_norm": [0.1, 0.2, 0.3, 0.4]}),
    "mlp, adaptive": Run("mlp", {"clipping": "adaptive", "target_unclipped_quantile": 0.7}),
    "mlp, automatic": Run("mlp", {"clipping": "automatic"}),
    "mlp, own divisor": Run("mlp", {"expected_batch_size": 20.0, "sample_rate": 0.25}),
    "mlp, without Poisson": Run("mlp", {"poisson_sampling": False, "sample_rate": 0.25}),
    "mlp, without checks": Run("mlp", {"check_batches": False, "check_isolation": False}),
    "mlp, no noise": Run("mlp", {"noise_multiplier": 0.0}),
    "cnn, in pieces": Run("cnn", {"max_physical_batch_size": 5}),
    "lstm, in pieces of hooks": Run("lstm", {"max_physical_batch_size": 5, "grad_sample_mode": "hooks"}),
    "mlp, managed": Run("mlp", loop=_managed),
    "mlp, managed, hooks": Run("mlp", {"grad_sample_mode": "hooks"}, ADAMW, _managed),
    "mlp, signals": Run("mlp", loop=_signals),
    "mlp, accumulated": Run("mlp", loop=_accumulate),
    "mlp, accumulated, hooks": Run("mlp", {"grad_sample_mode": "hooks"}, ADAMW, _accumulate),
    "cnn, read": Run("cnn", {"grad_sample_mode": "hooks"}, loop=_read),
    "mlp, resumed": Run("mlp", loop=_resume),
    "mlp, by a state": Run("mlp", loop=_by_state),
    **{f"{name}, engine": partial(_engine, name) for name in MODELS},
    "mlp, engine, float64": partial(_engine, "mlp", torch.float64),
    "mlp, engine, bfloat16": partial(_engine, "mlp", torch.bfloat16),
    "mlp, engine, per layer": partial(_engine, "mlp", max_grad_norm=[0.1, 0.2, 0.3, 0.4]),
    "cnn, engine, in pieces": partial(_engine, "cnn", physical_batch_size=5),
    "mlp, engine, no noise": partial(_engine, "mlp", noise_multiplier=0.0),
}


def _refused(**options: Any) -> None:
    model, data = _made("mlp")
    PrivacyEngine(seed=5, secure_mode=False).make_private(
        **{
            "module": model,
            "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
            "data_loader": DataLoader(data, batch_size=BATCH),
            "noise_multiplier": 1.0,
            "max_grad_norm": 1.0,
            **options,
        }
    )


def _calibrated(**options: Any) -> None:
    model, data = _made("mlp")
    PrivacyEngine(seed=5).make_private_with_epsilon(
        **{
            "module": model,
            "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
            "data_loader": DataLoader(data, batch_size=BATCH),
            "target_epsilon": 2.0,
            "target_delta": 1e-3,
            "epochs": 1,
            "max_grad_norm": 1.0,
            **options,
        }
    )


def _loop_refused(*actions: str) -> None:
    """Do what a loop does, by name, on one batch after the other."""
    model, data = _made("mlp")
    module, optimizer, loader = PrivacyEngine(seed=5).make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(data, batch_size=BATCH),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        grad_sample_mode="hooks",
    )
    x, y = next(iter(loader))
    does: Mapping[str, Callable[[], Any]] = {
        "backward": lambda: F.cross_entropy(module(x), y).backward(),
        "half": lambda: F.cross_entropy(module(x[:3]), y[:3]).backward(),
        "step": optimizer.step,
        "inner": optimizer.original_optimizer.step,
        "foreign": torch.optim.SGD(model.parameters(), lr=0.1).step,
        "skip": optimizer.signal_skip_step,
        "bound": lambda: setattr(optimizer, "max_grad_norm", 2.0),
        "noise": lambda: setattr(optimizer, "noise_multiplier", 2.0),
        "eval": module.eval,
        "copy": lambda: copy.deepcopy(optimizer),
        "again": lambda: _refused(module=module, optimizer=optimizer),
        "second": lambda: DPOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1),
            noise_multiplier=1.0,
            max_grad_norm=1.0,
            expected_batch_size=BATCH,
        ),
        "freeze": lambda: model[1].requires_grad_(False),
    }
    for action in actions:
        does[action]()


REFUSALS: Mapping[str, Callable[[], Any]] = {
    **{
        f"make_private: {options}": partial(_refused, **options)
        for options in (
            {"noise_multiplier": -1.0},
            {"noise_multiplier": "1"},
            {"max_grad_norm": 0.0},
            {"max_grad_norm": [1.0]},
            {"max_grad_norm": 1e39},
            {"clipping": "flt"},
            {"clipping": "per_layer"},
            {"clipping": "per_layer", "max_grad_norm": [1.0]},
            {"clipping": "automatic", "factors": None},
            {"clipping": "adaptive", "expected_batch_size": 0},
            {"clipping": "adaptive", "unclipped_num_std": 0.1},
            {"sample_rate": 2.0},
            {"expected_batch_size": -1},
            {"grad_sample_mode": "none"},
            {"loss_reduction": "max"},
            {"secure_mode": True},
            {"generator": None},
            {"noise": None},
            {"ranks": None},
            {"max_grad_nrm": 1.0},
            {"target_quantile": 1.0},
            {"max_physical_batch_size": 0},
            {"max_physical_batch_size": "all"},
            {"criterion": nn.CrossEntropyLoss(reduction="sum")},
            {"module": None},
            {"optimizer": None},
            {"data_loader": None},
        )
    },
    **{
        f"make_private_with_epsilon: {options}": partial(_calibrated, **options)
        for options in ({"target_epsilon": 0.0}, {"target_delta": 2.0}, {"epochs": 0}, {"noise_multiplier": 1.0})
    },
    **{
        f"a loop: {' '.join(actions)}": partial(_loop_refused, *actions)
        for actions in (
            ("step",),
            ("backward", "inner"),
            ("backward", "foreign"),
            ("half", "step"),
            ("backward", "step", "backward", "step"),
            ("skip", "half", "step", "bound", "half", "step"),
            ("skip", "half", "step", "noise", "half", "step"),
            ("eval", "backward", "step"),
            ("copy",),
            ("again",),
            ("second",),
            ("freeze", "backward", "step"),
        )
    },
}


def machine() -> str:
    """Return the key of the sets that hold here."""
    return f"torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}, kernels {native.description()}"


def digest(values: Iterator[Any]) -> str:
    """Return a short hash of tensors and plain values, of every bit of them."""
    sha = hashlib.sha256()
    for value in values:
        if isinstance(value, Tensor):
            value = value.detach().contiguous().reshape(-1)
            sha.update(f"{value.dtype} {value.shape}".encode())
            sha.update(value.view(torch.uint8).numpy().tobytes())
        else:
            sha.update(repr(value).encode())
    return sha.hexdigest()[:16]


def refusal(act: Callable[[], Any]) -> str:
    """Return a hash of what ``act`` raises, or of nothing."""
    try:
        act()
    except Exception as error:
        return f"{type(error).__name__} {hashlib.sha256(str(error).encode()).hexdigest()[:8]}"
    return "goes"


def main() -> int:
    """Compare the committed hashes with those of this tree; return 1 where they differ, 2 where there are none."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="replace this machine's hashes by those of this tree")
    parser.add_argument("--runs", default="", metavar="TEXT", help="only runs whose name contains TEXT")
    said = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    kept = json.loads(FILE.read_text()) if FILE.exists() else {}
    mine = kept.setdefault(machine(), {})
    if not mine and not said.write:
        print(f"There is no set for this machine ({machine()}): write one on the commit before, with --write.")
        return 2
    began = time.monotonic()
    found = {name: digest(run()) for name, run in RUNS.items() if said.runs in name}
    found |= {name: refusal(act) for name, act in REFUSALS.items() if said.runs in name}
    if said.write:
        kept[machine()] = {**(mine if said.runs else {}), **found}
        FILE.write_text(json.dumps(kept, indent=0, sort_keys=True) + "\n")
    wrong = [name for name, value in found.items() if kept[machine()].get(name) != value]
    for name in wrong:
        print(f"{name}: {found[name]} instead of {mine.get(name)}")
    print(f"{len(found)} runs and refusals in {time.monotonic() - began:.0f} s: {len(wrong)} differ")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
