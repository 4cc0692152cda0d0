"""Compare K = 4 views of an example with one: ``python -m proofs.views_accuracy FOLDER`` (half an hour of one thread).

FOLDER holds CIFAR-10 as the harness keeps it (``harness data path cifar10``). The network is small: two layers of fixed
oriented filters, their energies averaged and normalised by picture, and a linear layer, which alone is trained, on
10,000 pictures at epsilon 8. Fixed layers know no data: the mean that is subtracted is that of pictures of noise. Each
picture has 12 views, flipped or not and shifted by up to 2 pixels, whose features are computed once. For every K the
better of two rates is taken, which are compared on pictures of their own that are in neither set. Equal seeds have the
same batches. The table goes between the marks in docs/privacy-unit.md; ``proofs.views_figure`` draws it.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from scipy.stats import t as student
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import dpcore

EXAMPLES, HELD_OUT, BATCH, EPOCHS, EPSILON, DELTA, BOUND = 10_000, 5_000, 1_000, 30, 8.0, 1e-5, 0.3
VIEWS, SHIFT = 12, 2
SEEDS, RATES = range(1, 6), (250.0, 500.0)
TUNING_SEED = 0
PAGE = Path(__file__).parents[1] / "docs" / "privacy-unit.md"
BEGIN, END = "<!-- table of proofs/views_accuracy.py -->", "<!-- end -->"
KINDS = {"as it is": (1, False), "1 view": (1, True), "4 views": (4, True)}
COLOURS = torch.tensor([[1 / 3, 1 / 3, 1 / 3], [0.5, -0.5, 0.0], [0.25, 0.25, -0.5]])
"""Light, red against green, and both against blue."""


def filters(size: int, width: float, frequency: float) -> Tensor:
    """Return eight directions of waves under a bell [16, 1, size, size], each as a pair a quarter of a wave apart."""
    place = torch.arange(size) - size // 2
    down, right = torch.meshgrid(place, place, indexing="ij")
    bell, made = torch.exp(-(right**2 + down**2) / (2 * width**2)), []
    for angle in torch.arange(8) * (math.pi / 8):
        phase = frequency * (right * angle.cos() + down * angle.sin())
        even = bell * phase.cos()
        even = even - bell * (even.sum() / bell.sum())
        made += [even / even.norm(), bell * phase.sin() / even.norm()]
    return torch.stack(made)[:, None]


FINE, COARSE = filters(5, 1.0, 2.2), filters(7, 1.6, 1.3)


def energies(x: Tensor, pairs: Tensor) -> Tensor:
    """Return the root of the energy in every direction [n, 8, h, w] of pictures [n, 1, h, w]."""
    waves = F.conv2d(F.pad(x, (pairs.shape[-1] // 2,) * 4, mode="reflect"), pairs)
    return (waves[:, 0::2] ** 2 + waves[:, 1::2] ** 2 + 1e-8) ** 0.25


def fixed_layers(x: Tensor) -> Tensor:
    """Return the features [n, 1072] of pictures [n, 3, 32, 32] in [0, 1]."""
    x = torch.einsum("cd,ndhw->nchw", COLOURS, x) - torch.tensor([0.47, 0.0, 0.0])[:, None, None]
    half = F.avg_pool2d(x, 2)
    found = [F.avg_pool2d(energies(x[:, :1], pairs), 4) for pairs in (FINE, COARSE)]
    found += [F.avg_pool2d(energies(half[:, c : c + 1], pairs), 2) for pairs in (FINE, COARSE) for c in range(3)]
    found.append(F.avg_pool2d(x, 4))
    return F.avg_pool2d(torch.cat([F.group_norm(part, 1) for part in found], 1), 2).flatten(1)


def mean_of_noise() -> Tensor:
    """Return the mean features [1072] of pictures of noise whose spectrum falls as that of photographs."""
    frequency = torch.fft.fftfreq(32)
    amplitude = (frequency[:, None] ** 2 + frequency**2).sqrt()
    amplitude[0, 0] = 1 / 32
    white = torch.randn(2000, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    noise = torch.fft.ifft2(torch.fft.fft2(white) / amplitude).real
    mix = torch.tensor([[1.0, 0.25, 0.15], [1.0, 0.0, -0.15], [1.0, -0.25, 0.1]])
    noise = torch.einsum("cd,ndhw->nchw", mix, noise)
    noise = 0.47 + 0.2 * noise / noise.flatten(1).std(1)[:, None, None, None]
    return fixed_layers(noise.clamp(0, 1)).mean(0)


def features(x: Tensor, mean: Tensor) -> Tensor:
    """Return what the linear layer sees [n, 1073], in half precision: a direction, and a constant for its bias."""
    found = F.normalize(fixed_layers(x) - mean, dim=1)
    return torch.cat([found, torch.full((len(x), 1), 0.1)], 1).half()


def moved(x: Tensor, numbers: torch.Generator) -> Tensor:
    """Return a view of each picture: shifted by up to SHIFT pixels, and flipped half of the time."""
    padded, size = F.pad(x, (SHIFT,) * 4, mode="reflect"), x.shape[-1]
    places = torch.randint(2 * SHIFT + 1, (len(x), 2), generator=numbers).tolist()
    cut = torch.stack([padded[i, :, a : a + size, b : b + size] for i, (a, b) in enumerate(places)])
    flips = torch.rand(len(x), 1, 1, 1, generator=numbers) < 0.5
    return torch.where(flips, cut.flip(3), cut)


def pictures(folder: Path, split: str, chosen: slice, views: int) -> tuple[Tensor, Tensor]:
    """Return features [n, 1 + views, 1073] of pictures as they are and of views, and the classes [n]."""
    x, y = (np.load(folder / f"{split}_{part}.npy", mmap_mode="r")[chosen] for part in "xy")
    mean, numbers, found = mean_of_noise(), torch.Generator().manual_seed(0), []
    for start in range(0, len(x), 500):
        some = torch.from_numpy(np.array(x[start : start + 500])).float()
        some = some.permute(0, 3, 1, 2) if some.shape[-1] == 3 else some
        some = some / 255 if some.max() > 2 else some
        each = [some, *(moved(some, numbers) for _ in range(views))]
        found.append(torch.stack([features(view, mean) for view in each], 1))
    return torch.cat(found), torch.from_numpy(np.array(y)).long()


def accuracy(data: tuple[Tensor, Tensor], judged: tuple[Tensor, Tensor], kind: str, rate: float, seed: int) -> float:
    """Train one linear layer and return the share of ``judged``, as it is, that it gets right."""
    group, is_moved = KINDS[kind]
    torch.manual_seed(seed)
    model = nn.Linear(data[0].shape[-1], 10, bias=False)
    nn.init.zeros_(model.weight)

    def view(known: Tensor) -> Tensor:
        return known[int(torch.randint(1, 1 + VIEWS, ())) if is_moved else 0]

    loader = DataLoader(dpcore.views(TensorDataset(*data), view, K=group), batch_size=BATCH)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=rate)
    engine = dpcore.PrivacyEngine(seed=seed)
    _, optimizer, loader = engine.make_private_with_epsilon(
        module=model, optimizer=optimizer, data_loader=loader, max_grad_norm=BOUND, target_epsilon=EPSILON,
        target_delta=DELTA, epochs=EPOCHS, wrap_model=False,
    )  # fmt: skip
    steps = EPOCHS * len(loader)
    for _ in range(EPOCHS):
        for rows, classes in loader:
            for options in optimizer.param_groups:
                options["lr"] = rate * (1.0 - optimizer.steps / steps)
            optimizer.zero_grad()
            F.cross_entropy(model(rows.float()), classes).backward()
            optimizer.step()
    assert engine.get_epsilon(DELTA) <= EPSILON
    model.eval()
    with torch.no_grad():
        return float((model(judged[0][:, 0].float()).argmax(1) == judged[1]).double().mean())


def interval(differences: list[float]) -> str:
    """Return the mean and its 95 % interval, in points of a hundred."""
    mean, n = statistics.mean(differences), len(differences)
    half = float(student.ppf(0.975, n - 1)) * statistics.stdev(differences) / math.sqrt(n)
    return f"{100 * mean:+.1f} [{100 * (mean - half):+.1f}, {100 * (mean + half):+.1f}]"


def table(rates: dict[str, float], found: dict[str, list[float]]) -> str:
    """Return the rows of the page, in the order of the seeds."""
    lines = ["| an example is | rate | accuracy of each seed | mean | 4 views, over this |", "|---|---|---|---|---|"]
    for kind, values in found.items():
        each = ", ".join(f"{100 * value:.1f}" for value in values)
        apart = [four - own for four, own in zip(found["4 views"], values, strict=True)]
        against = "" if kind == "4 views" else interval(apart)
        lines.append(f"| {kind} | {rates[kind]:g} | {each} | {100 * statistics.mean(values):.1f} | {against} |")
    return "\n".join(lines)


def remembered(log: Path | None) -> Callable[[str, Callable[[], float]], float]:
    """Return what trains under a name, once: ``log`` holds lines of JSON, one for every training that was made."""
    known: dict[str, float] = {}
    if log and log.exists():
        known = dict(json.loads(line) for line in log.read_text().splitlines())

    def trained(name: str, train: Callable[[], float]) -> float:
        if name not in known:
            known[name] = train()
            print(f"{name}: {known[name]:.4f}", flush=True)
            if log:
                with log.open("a") as file:
                    file.write(json.dumps([name, known[name]]) + "\n")
        return known[name]

    return trained


def write_table(page: Path, begin: str, table: str) -> None:
    """Put a table between its marks in a page; nothing where the page has none."""
    before, _, rest = page.read_text().partition(begin)
    if rest:
        page.write_text(f"{before}{begin}\n{table}\n{END}{rest.partition(END)[2]}")


def main() -> None:
    """Choose a rate for every kind, train with every seed, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--log", type=Path, help="lines of JSON, one for every training; those in it are not repeated")
    given = parser.parse_args()
    torch.set_num_threads(1)
    train = pictures(given.folder, "train", slice(EXAMPLES), VIEWS)
    held_out = pictures(given.folder, "train", slice(EXAMPLES, EXAMPLES + HELD_OUT), 0)
    test = pictures(given.folder, "test", slice(None), 0)
    once = remembered(given.log)

    def trained(kind: str, rate: float, seed: int, judged: Any) -> float:
        return once(f"{kind}, rate {rate:g}, seed {seed}", lambda: accuracy(train, judged, kind, rate, seed))

    rates = {k: max(RATES, key=lambda rate, k=k: trained(k, rate, TUNING_SEED, held_out)) for k in KINDS}
    found: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for seed in SEEDS:
        for kind in KINDS:
            found[kind].append(trained(kind, rates[kind], seed, test))
    made = table(rates, found)
    print(made)
    write_table(PAGE, BEGIN, made)


if __name__ == "__main__":
    main()
