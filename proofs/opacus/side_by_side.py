"""The traps of the most-used library and dpcore, side by side: every case is run with both, and both outcomes shown.

    python -m proofs.opacus.side_by_side                 # a table on the screen (needs opacus installed)
    python -m proofs.opacus.side_by_side --write FILE.md

A gradient case trains one step without noise, at learning rate 1 and clipping norm 0.5, and compares the update with a
loop over single examples in float64. "right" means a relative L2 error below 1e-4.
"""

from __future__ import annotations

import argparse
import copy
import importlib
import itertools
import os
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

BATCH = 6
CLIP = 0.5
CLASSES = 3


@dataclass(frozen=True)
class Library:
    """One of the two, by its package's name; both have the same module paths."""

    name: str

    def __call__(self, path: str) -> Any:
        """The public object at ``path``, such as ``accountants.RDPAccountant``."""
        *modules, attribute = path.split(".")
        return getattr(importlib.import_module(".".join([self.name, *modules])), attribute)

    @property
    def version(self) -> str:
        return getattr(importlib.import_module(self.name), "__version__", "of this repository")


@dataclass(frozen=True)
class Case:
    """``run(library)`` returns the outcome in words, or raises what the library raises."""

    title: str
    group: str
    run: Callable[[Library], str]


CASES: list[Case] = []


def case(group: str, title: str) -> Callable[[Callable[[Library], str]], Callable[[Library], str]]:
    def add(run: Callable[[Library], str]) -> Callable[[Library], str]:
        CASES.append(Case(title, group, run))
        return run

    return add


def outcome(run: Callable[[Library], str], library: Library) -> str:
    """Return in one line what happened."""
    torch.manual_seed(0)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return run(library)
    except Exception as error:
        text = " ".join(str(error).split()).strip("[]'\"")
        return f"{type(error).__name__}: {text[:130]}{'…' if len(text) > 130 else ''}"


# ---- one private step against the loop over examples


def own_tensors(library: Library) -> dict[str, Any]:
    """The settings with which a loop may use batches that are not the loader's, as these cases do."""
    return {"check_batches": False} if library.name == "dpcore" else {}


def private(
    library: Library, model: nn.Module, x: Tensor, y: Tensor, *, loader: DataLoader[Any] | None = None, **options: Any
) -> tuple[Any, ...]:
    """Return what ``make_private`` returns for one full batch, without sampling and noise."""
    settings: dict[str, Any] = {"noise_multiplier": 0.0, "max_grad_norm": CLIP, "poisson_sampling": False}
    settings |= own_tensors(library)
    return library("PrivacyEngine")().make_private(  # type: ignore[no-any-return]
        module=model,
        optimizer=torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1.0),
        data_loader=loader or DataLoader(TensorDataset(x, y), batch_size=len(x)),
        **(settings | options),
    )


def loss(outputs: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(outputs, y)


def truth(model: nn.Module, x: Tensor, y: Tensor, bound: float = CLIP) -> list[Tensor]:
    """The clipped sum, one float64 example at a time."""
    model = copy.deepcopy(model).double()
    trained = [p for p in model.parameters() if p.requires_grad]
    total = [torch.zeros_like(p) for p in trained]
    for i in range(len(x)):
        one = x[i : i + 1]
        model.zero_grad()
        loss(model(one.double() if one.is_floating_point() else one), y[i : i + 1]).backward()
        present = [torch.zeros_like(p) if p.grad is None else p.grad for p in trained]
        norm = torch.stack([g.square().sum() for g in present]).sum().sqrt()
        if norm.isfinite():
            for t, g in zip(total, present, strict=True):
                t += g * min(1.0, bound / float(norm)) if norm else 0.0
    return total


def compare(before: list[Tensor], model: nn.Module, expected: list[Tensor]) -> str:
    after = [p.detach().double() for p in model.parameters() if p.requires_grad]
    update = [(b - a) * BATCH for b, a in zip(before, after, strict=True)]
    if not all(u.isfinite().all() for u in update):
        return "WRONG: every parameter is NaN" if all(u.isnan().any() for u in update) else "WRONG: NaN"
    error = torch.stack([(u - e).square().sum() for u, e in zip(update, expected, strict=True)]).sum().sqrt()
    size = torch.stack([e.square().sum() for e in expected]).sum().sqrt()
    relative = float(error / size)
    return "right" if relative < 1e-4 else f"WRONG: the update is off by {relative:.0%}"


def step(library: Library, model: nn.Module, x: Tensor, y: Tensor, **options: Any) -> str:
    """One update by ``library``, judged."""
    model.train()
    expected = truth(model, x, y)
    before = [p.detach().double().clone() for p in model.parameters() if p.requires_grad]
    made = private(library, model, x, y, **options)
    wrapped, optimizer = made[0], made[1]
    criterion = made[2] if len(made) == 4 else loss
    criterion(wrapped(x), y).backward()
    optimizer.step()
    return compare(before, model, expected)


def labels(count: int = BATCH) -> Tensor:
    return torch.arange(count) % CLASSES


class Apply(nn.Module):
    """``forward`` is the function ``use(modules, x)``."""

    def __init__(self, use: Callable[[Any, Tensor], Tensor], **modules: Any) -> None:
        super().__init__()
        self.use = use
        for name, module in modules.items():
            setattr(self, name, module)

    def forward(self, x: Tensor) -> Tensor:
        return self.use(self, x)


# ---- silently wrong gradients


@case("gradients", "`nn.Embedding(padding_idx=0)`")
def padding_idx(library: Library) -> str:
    model = Apply(lambda m, x: m.head(m.table(x).mean(1)), table=nn.Embedding(9, 4, 0), head=nn.Linear(4, CLASSES))
    return step(library, model, torch.randint(0, 3, (BATCH, 5)), labels())


@case("gradients", "`nn.Embedding(scale_grad_by_freq=True)`, which couples the examples")
def scale_grad_by_freq(library: Library) -> str:
    table = nn.Embedding(9, 4, scale_grad_by_freq=True)
    model = Apply(lambda m, x: m.head(m.table(x).mean(1)), table=table, head=nn.Linear(4, CLASSES))
    return step(library, model, torch.randint(0, 3, (BATCH, 5)), labels())


@case("gradients", '`nn.Conv2d(padding_mode="circular")`')
def padding_mode(library: Library) -> str:
    convolution = nn.Conv2d(2, 4, 3, padding=1, padding_mode="circular")
    model = nn.Sequential(convolution, nn.Flatten(), nn.Linear(4 * 36, CLASSES))
    return step(library, model, torch.randn(BATCH, 2, 6, 6), labels())


@case("gradients", "one example is NaN")
def nan_example(library: Library) -> str:
    x = torch.randn(BATCH, 4)
    x[2] = float("nan")
    return step(library, nn.Linear(4, CLASSES), x, labels())


# ---- ordinary models


@case("models", "`nn.LayerNorm(bias=False)`")
def layer_norm(library: Library) -> str:
    return step(library, nn.Sequential(nn.LayerNorm(4, bias=False), nn.Linear(4, CLASSES)), torch.randn(6, 4), labels())


@case("models", "`nn.Linear` on a 4-D input")
def linear_4d(library: Library) -> str:
    model = Apply(lambda m, x: m.linear(x).mean((1, 2)), linear=nn.Linear(4, CLASSES))
    return step(library, model, torch.randn(BATCH, 2, 3, 4), labels())


@case("models", "`nn.Bilinear`")
def bilinear(library: Library) -> str:
    model = Apply(lambda m, x: m.layer(x, x), layer=nn.Bilinear(4, 4, CLASSES))
    return step(library, model, torch.randn(BATCH, 4), labels())


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(CLASSES, 4)
        self.head = nn.Linear(4, CLASSES, bias=False)
        self.head.weight = self.table.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.table(x).mean(1))


@case("models", "embedding and head share one weight")
def tied(library: Library) -> str:
    return step(library, Tied(), torch.randint(0, CLASSES, (BATCH, 5)), labels())


@case("models", "a layer used twice")
def reused(library: Library) -> str:
    model = Apply(lambda m, x: m.head(m.body(m.body(x).tanh())), body=nn.Linear(4, 4), head=nn.Linear(4, CLASSES))
    return step(library, model, torch.randn(BATCH, 4), labels())


@case("models", "a table of positions, broadcast over the batch")
def positions(library: Library) -> str:
    model = Apply(
        lambda m, x: m.head((m.tokens(x) + m.places(torch.arange(5))).tanh().mean(1)),
        tokens=nn.Embedding(9, 4),
        places=nn.Embedding(5, 4),
        head=nn.Linear(4, CLASSES),
    )
    return step(library, model, torch.randint(0, 9, (BATCH, 5)), labels())


@case("models", "a reshape to (B·T, d) and back")
def reshaped(library: Library) -> str:
    model = Apply(
        lambda m, x: m.head(m.body(x.reshape(-1, 4)).tanh().reshape(-1, 5, 4).mean(1)),
        body=nn.Linear(4, 4),
        head=nn.Linear(4, CLASSES),
    )
    return step(library, model, torch.randn(BATCH, 5, 4), labels())


@case("models", "`nn.ReLU(inplace=True)` after a convolution")
def in_place(library: Library) -> str:
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(64, CLASSES))
    return step(library, model, torch.randn(BATCH, 2, 6, 6), labels())


def _checkpointed(library: Library, use_reentrant: bool) -> str:
    model = Apply(
        lambda m, x: m.head(checkpoint(m.body, m.first(x), use_reentrant=use_reentrant).tanh()),
        first=nn.Linear(4, 4),
        body=nn.Linear(4, 4),
        head=nn.Linear(4, CLASSES),
    )
    return step(library, model, torch.randn(BATCH, 4), labels())


@case("models", "activation checkpointing, `use_reentrant=False`")
def checkpointed(library: Library) -> str:
    return _checkpointed(library, use_reentrant=False)


@case("models", "activation checkpointing, `use_reentrant=True`")
def checkpointed_reentrant(library: Library) -> str:
    return _checkpointed(library, use_reentrant=True)


@case("models", "a layer called by keyword, `layer(input=x)`")
def keyword(library: Library) -> str:
    model = Apply(lambda m, x: m.layer(input=x), layer=nn.Linear(4, CLASSES))
    return step(library, model, torch.randn(BATCH, 4), labels())


@case("models", "a layer that this batch does not use")
def unused(library: Library) -> str:
    model = Apply(lambda m, x: m.head(x), head=nn.Linear(4, CLASSES), spare=nn.Linear(4, 4))
    return step(library, model, torch.randn(BATCH, 4), labels())


@case("models", "plain `nn.LSTM`")
def plain_lstm(library: Library) -> str:
    model = Apply(
        lambda m, x: m.head(m.recurrent(x)[0][:, -1]),
        recurrent=nn.LSTM(4, 5, batch_first=True),
        head=nn.Linear(5, CLASSES),
    )
    return step(library, model, torch.randn(BATCH, 7, 4), labels())


@case("models", "`DPLSTM` draws the dropout of `nn.LSTM` from the same random state")
def lstm_dropout(library: Library) -> str:
    plain = nn.LSTM(4, 5, num_layers=2, dropout=0.5, batch_first=True)
    ours = library("layers.DPLSTM")(4, 5, num_layers=2, dropout=0.5, batch_first=True)
    ours.load_state_dict(plain.state_dict(), strict=False)
    x = torch.randn(BATCH, 7, 4)
    torch.manual_seed(1)
    a = plain(x)[0]
    torch.manual_seed(1)
    b = ours(x)[0]
    return (
        "right"
        if torch.allclose(a, b, atol=1e-5)
        else f"differs from nn.LSTM by up to {float((a - b).abs().max()):.2f}"
    )


# ---- ghost mode


@case("ghost mode", '`grad_sample_mode="ghost"`, `criterion` left as it is')
def ghost_same_criterion(library: Library) -> str:
    model, x = nn.Linear(4, CLASSES), torch.randn(BATCH, 4)
    expected = truth(model, x, labels())
    before = [p.detach().double().clone() for p in model.parameters()]
    made = private(library, model, x, labels(), grad_sample_mode="ghost", criterion=nn.CrossEntropyLoss())
    loss(made[0](x), labels()).backward()
    made[1].step()
    return compare(before, model, expected)


@case("ghost mode", "two backward passes accumulated in one step")
def ghost_accumulates(library: Library) -> str:
    model, x = nn.Linear(4, CLASSES), torch.randn(BATCH, 4)
    expected = truth(model, x, labels())
    before = [p.detach().double().clone() for p in model.parameters()]
    made = private(library, model, x, labels(), grad_sample_mode="ghost", criterion=nn.CrossEntropyLoss())
    for rows in (slice(0, 3), slice(3, 6)):
        made[2](made[0](x[rows]), labels()[rows]).backward()
    made[1].step()
    # Two batches in one step: the divisor is twice the expected batch size.
    return compare(before, model, [e / 2 for e in expected])


@case("ghost mode", "embedding and head share one weight")
def ghost_tied(library: Library) -> str:
    x = torch.randint(0, CLASSES, (BATCH, 5))
    return step(library, Tied(), x, labels(), grad_sample_mode="ghost", criterion=nn.CrossEntropyLoss())


# ---- sampling and the divisor


@case("sampling", "the update's divisor for 999, 1000 and 1001 examples, batch size 100")
def divisor(library: Library) -> str:
    found = []
    for n in (999, 1000, 1001):
        data = DataLoader(TensorDataset(torch.randn(n, 4), labels(n)), batch_size=100)
        x, y = torch.randn(BATCH, 4), labels()
        public = {} if library.name == "opacus" else {"sample_rate": 0.1, "expected_batch_size": 100}
        made = private(library, nn.Linear(4, CLASSES), x, y, loader=data, poisson_sampling=True, **public)
        found.append(made[1].expected_batch_size)
    return ("public: " if len(set(found)) == 1 else "moves with one example: ") + ", ".join(f"{d:g}" for d in found)


@case("sampling", "numbers of examples below 500 (batch size 1) for which a round loses a step")
def lost_steps(library: Library) -> str:
    """A round of an accountant that is given ``epochs`` has int(epochs / q) steps; the loader's has N."""
    lost = [n for n in range(1, 500) if len(_sampler(library, n, 1 / n)) != n]
    return f"{len(lost)}" + (f" ({', '.join(map(str, lost[:3]))} …)" if lost else "")


def _sampler(library: Library, examples: int, rate: float) -> Any:
    return library("utils.uniform_sampler.UniformWithReplacementSampler")(num_samples=examples, sample_rate=rate)


@case("sampling", "expected number drawn of 50 million at q = 1e-7 (right: 5), 40 draws")
def tiny_rate(library: Library) -> str:
    if library.name == "opacus":
        # Its sampler compares float32 uniforms with q; those lie on a grid of 2^-24, so P(u < q) is not q.
        inside = sum(1 for k in range(8) if k * 2.0**-24 < 1e-7)
        return f"{inside * 2.0**-24 * 5e7:.2f} (float32 uniforms: q becomes {inside * 2.0**-24:.3g}; from the grid)"
    sampler = _sampler(library, 50_000_000, 1e-7)
    drawn = sum(len(batch) for batch in itertools.islice(iter(sampler), 40))
    return f"{drawn / 40:.2f} (Binomial size, then a uniform subset)"


# ---- accounting


@case("accounting", "q 0.001, sigma 0.5, 1000 steps, delta 1e-5 (true 3.2389): `gdp`")
def gdp(library: Library) -> str:
    accountant = library("accountants.create_accountant")("gdp")
    for _ in range(1000):
        accountant.step(noise_multiplier=0.5, sample_rate=0.001)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        epsilon = accountant.get_epsilon(1e-5)
    said = any("approximation" in str(w.message).lower() for w in caught)
    return f"{epsilon:.4f}, " + ("with a warning that this is an approximation" if said else "no warning")


@case("accounting", "the same: the default accountant")
def prv(library: Library) -> str:
    accountant = library("accountants.create_accountant")("prv")
    for _ in range(1000):
        accountant.step(noise_multiplier=0.5, sample_rate=0.001)
    return f"{accountant.get_epsilon(1e-5):.4f}"


@case("accounting", "epsilon without noise (right: infinity)")
def no_noise(library: Library) -> str:
    accountant = library("accountants.create_accountant")("prv")
    accountant.step(noise_multiplier=0.0, sample_rate=0.01)
    return f"{accountant.get_epsilon(1e-5)}"


@case("accounting", "sigma for epsilon 1 (q 256/60000, 3515 steps, RDP; exact 1.263036)")
def calibration(library: Library) -> str:
    sigma = library("accountants.utils.get_noise_multiplier")(
        target_epsilon=1.0, target_delta=1e-5, sample_rate=256 / 60000, steps=3515, accountant="rdp"
    )
    return f"{sigma:.6f} ({sigma / 1.263036 - 1:+.2%})"


# ---- state


@case("state", "the step after a resume (the same seeds)")
def noise_reuse(library: Library) -> str:
    """The checkpoint is taken, one step follows; the run is restored and steps on. A second use of the same noise on
    other data lets both be subtracted from each other.
    """
    x, y = torch.randn(BATCH, 4), labels()

    def start() -> tuple[Any, Any, Any]:
        torch.manual_seed(7)
        model = nn.Linear(4, CLASSES)
        engine = library("PrivacyEngine")()
        made = engine.make_private(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=1.0),
            data_loader=DataLoader(TensorDataset(x, y), batch_size=BATCH),
            noise_multiplier=1.0,
            max_grad_norm=CLIP,
            poisson_sampling=False,
            noise_generator=torch.Generator().manual_seed(3),
            **own_tensors(library),
        )
        return engine, made[0], made[1]

    def one(model: Any, optimizer: Any) -> Tensor:
        before = next(model.parameters()).detach().clone()
        optimizer.zero_grad()
        loss(model(x), y).backward()
        optimizer.step()
        return before - next(model.parameters()).detach()

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "checkpoint"
        engine, model, optimizer = start()
        first = one(model, optimizer)
        engine.save_checkpoint(path=path, module=model, optimizer=optimizer)
        onward = one(model, optimizer)
        engine, model, optimizer = start()
        engine.load_checkpoint(path=path, module=model, optimizer=optimizer)
        resumed = one(model, optimizer)
    if torch.allclose(resumed, onward, atol=1e-6):
        return "right: the resumed step is the uninterrupted one"
    # The steps' gradients are small beside sigma C / B, so equal noise shows as a correlation near 1.
    again = torch.corrcoef(torch.stack([resumed.flatten(), first.flatten()]))[0, 1]
    return (
        "WRONG: the noise of step 1 is used again in step 2" if again > 0.95 else "differs from the uninterrupted run"
    )


@case("state", "a loop of virtual steps is abandoned, then a whole batch is trained")
def abandoned(library: Library) -> str:
    x, y = torch.randn(BATCH, 4), labels()
    model = nn.Linear(4, CLASSES)
    wrapped, optimizer, loader = private(library, model, x, y, loader=DataLoader(TensorDataset(x, y), batch_size=BATCH))
    manager = library("utils.batch_memory_manager.BatchMemoryManager")
    with manager(data_loader=loader, max_physical_batch_size=2, optimizer=optimizer) as pieces:
        for part, target in pieces:
            loss(wrapped(part), target).backward()
            optimizer.step()
            break
    untouched = nn.Linear(4, CLASSES)
    untouched.load_state_dict(model.state_dict())
    expected = truth(untouched, x, y)
    before = [p.detach().double().clone() for p in model.parameters()]
    optimizer.zero_grad()
    loss(wrapped(x), y).backward()
    optimizer.step()
    return compare(before, model, expected)


@case("state", "`secure_mode=True`")
def secure_mode(library: Library) -> str:
    model = nn.Linear(4, CLASSES)
    engine = library("PrivacyEngine")(secure_mode=True)
    data = DataLoader(TensorDataset(torch.randn(40, 4), labels(40)), batch_size=10)
    wrapped, optimizer, loader = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=data,
        noise_multiplier=1.0,
        max_grad_norm=CLIP,
    )
    for x, y in loader:
        optimizer.zero_grad()
        loss(wrapped(x), y).backward()
        optimizer.step()
    return "runs" if all(p.isfinite().all() for p in model.parameters()) else "WRONG: not finite"


# ---- the table


def table() -> list[tuple[str, str, str, str]]:
    """(group, case, outcome with opacus, outcome with dpcore)."""
    return [(c.group, c.title, outcome(c.run, Library("opacus")), outcome(c.run, Library("dpcore"))) for c in CASES]


def markdown(rows: list[tuple[str, str, str, str]]) -> str:
    lines = [
        "# Opacus and dpcore side by side",
        "",
        f"Written by `proofs/opacus/side_by_side.py`, which runs every case with both libraries: Opacus "
        f"{Library('opacus').version},",
        f"torch {torch.__version__.partition('+')[0]}. A gradient case is one step without noise at clipping",
        'norm 0.5, compared with a float64 loop over single examples; "right" is a relative L2 error below 1e-4.',
    ]
    for group, members in itertools.groupby(rows, key=lambda row: row[0]):
        lines += ["", f"## {group.capitalize()}", "", "| case | Opacus | dpcore |", "|---|---|---|"]
        lines += [
            f"| {title} | {theirs.replace('|', '/')} | {ours.replace('|', '/')} |" for _, title, theirs, ours in members
        ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", type=Path, help="a Markdown file")
    arguments = parser.parse_args()
    text = markdown(table())
    print(text)
    if arguments.write:
        temporary = arguments.write.with_suffix(".tmp")
        temporary.write_text(text)
        os.replace(temporary, arguments.write)


if __name__ == "__main__":
    main()
