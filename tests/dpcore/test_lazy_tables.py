"""Tables whose noise is drawn when a row is read: what dense noise gives, in bits or in law; what is refused."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import nn

from dpcore import GaussianNoise
from dpcore.errors import UnsupportedError
from dpcore.lazy_tables import LazyEngine, history
from dpcore.lazy_tables import table as tables_room
from dpcore.noise import SecureNoise
from tests.dpcore.lazy import DIVISOR, ROWS, WIDTH, Model, batch, engine, losses, momenta, same, train


@pytest.mark.parametrize("kernels", [False, True])
@pytest.mark.parametrize(("decay", "momentum"), [(0.0, 0.0), (0.1, 0.0), (0.0, 0.9), (0.1, 0.5)])
@pytest.mark.parametrize("kind", ["embedding", "padded", "sum", "mean", "weights"])
def test_rows_get_the_very_bits_of_dense_noise(kind, decay, momentum, kernels, request):
    if kernels:
        request.getfixturevalue("compiled")
    settings = {"decay": decay, "momentum": momentum}
    dense = train(engine(Model(kind), lazy=(), **settings))
    assert len(dense) > len(Model(kind).state_dict()) or not momentum
    assert same(train(engine(Model(kind), exact_steps=12, **settings)), dense)


@given(st.integers(1, 9), st.integers(0, 9), st.integers(1, 10), st.integers(0, 5), st.sampled_from([0.0, 0.7]))
@settings(max_examples=12, deadline=None)
def test_bits_are_dense_ones_wherever_a_run_is_flushed(steps, before, exact, seed, momentum):
    """Flushes every so many steps, within which no row waits for longer than the exact ones."""
    dense, lazy = engine(Model(), lazy=(), momentum=momentum), engine(Model(), exact_steps=exact, momentum=momentum)
    chance = torch.Generator().manual_seed(seed)
    for step in range(before + steps):
        x, y = batch(chance)
        dense.step(x, y)
        lazy.step(x, y)
        if step % exact == exact - 1:
            lazy.flush()
    assert same(lazy.model.state_dict(), dense.model.state_dict())


class Fields(nn.Module):
    """Three tables of one width, of which the last does not begin at a multiple of it, and one of another."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Embedding(9, 4), nn.EmbeddingBag(30, 4, mode="sum")
        self.other, self.last = nn.Embedding(5, 3), nn.Embedding(40, 4)
        self.out = nn.Linear(15, 2)

    def forward(self, ids):
        a, b, c, d = ids.unbind(1)
        tables = self.first(a % 9), self.second(b[:, None] % 30), self.other(c % 5), self.last(d % 40)
        return self.out(torch.cat(tables, 1))


@pytest.mark.parametrize("kernels", [False, True])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("names", [("first", "second", "other", "last"), ("last", "second", "first")])
def test_tables_that_are_drawn_together_have_the_bits_of_dense_noise(names, momentum, kernels, request):
    if kernels:
        request.getfixturevalue("compiled")
    sizes, found = {"first": 9, "second": 30, "other": 5, "last": 40}, []
    rows_of = {name: lambda x, name=name: x[:, list(sizes).index(name)] % sizes[name] for name in names}
    for options in ({"lazy": None}, {"lazy": rows_of, "exact_steps": 20}):
        chance, one = torch.Generator().manual_seed(1), engine(Fields(), momentum=momentum, **options)
        for _ in range(12):
            one.step(torch.randint(0, 1000, (3, 4), generator=chance), torch.randint(0, 2, (3,), generator=chance))
        found.append(one.model.state_dict() | momenta(one))
    assert same(*found)


def test_checks_by_experiment_run_and_change_nothing():
    found = []
    for options in ({"lazy": ()}, {"exact_steps": 12}):
        found.append(train(engine(Model(), check_isolation=True, **options)))
    assert same(*found)


@pytest.mark.parametrize("decay", [0.0, 0.4])
def test_many_skipped_steps_have_the_law_of_dense_noise(decay):
    """Rows that no batch has read for 40 steps: normal, of the variance that the recurrence has, and independent."""
    rows, steps = 4000, 40
    model = Model(rows=rows)
    with torch.no_grad():
        model.items.weight.zero_()
    one = engine(model, exact_steps=2, decay=decay)
    variance, std = 0.0, 1.1 * 0.7 / DIVISOR
    for step in range(steps):
        lr = one.optimizer.param_groups[0]["lr"] = 0.3 / (1 + step % 5)
        one.step(*batch(torch.Generator().manual_seed(step), size=2, rows=30))
        variance = (1 - lr * decay) ** 2 * variance + (lr * std) ** 2
    found = model.state_dict()["items.weight"][30:].double() / math.sqrt(variance)
    count = found.numel()
    assert stats.kstest(found.flatten().numpy(), "norm").pvalue > 1e-4
    assert abs(float(found.var()) - 1) < 5 * (2 / count) ** 0.5
    for a, b in ((found[1:], found[:-1]), (found[:, 1:], found[:, :-1])):
        assert abs(float((a * b).mean())) < 5 / a.numel() ** 0.5


@pytest.mark.parametrize("exact", [1, 3])
@pytest.mark.parametrize(("decay", "momentum"), [(0.0, 0.9), (0.4, 0.5)])
def test_weights_and_momentum_have_the_covariance_of_dense_noise(decay, momentum, exact):
    """Also behind a call that brought half of the rows up to date on the way."""
    rows, steps = 4000, 40
    model = Model(rows=rows)
    with torch.no_grad():
        model.items.weight.zero_()
    one = engine(model, exact_steps=exact, decay=decay, momentum=momentum)
    covariance, std = np.zeros((2, 2)), 1.1 * 0.7 / DIVISOR
    for step in range(steps):
        lr = one.optimizer.param_groups[0]["lr"] = 0.3 / (1 + step % 5)
        one.optimizer.param_groups[0]["momentum"] = share = momentum / (1 + step % 2)
        one.step(*batch(torch.Generator().manual_seed(step), size=2, rows=30))
        if step == 25:
            model.items(torch.arange(30, rows, 2))
        kept = np.array([[1 - lr * decay, -lr * share], [decay, share]])
        drawn = std * np.array([[-lr], [1.0]])
        covariance = kept @ covariance @ kept.T + drawn @ drawn.T
    one.flush()
    weight = model.items.weight
    found = torch.stack([weight.detach(), one.optimizer.state[weight]["momentum_buffer"]])[:, 30:].double()
    white = np.linalg.solve(np.linalg.cholesky(covariance), found.flatten(1).numpy())
    assert np.abs(np.cov(white) - np.eye(2)).max() < 5 * (2 / white.shape[1]) ** 0.5
    assert min(stats.kstest(part, "norm").pvalue for part in white) > 1e-4
    for part in white.reshape(2, -1, WIDTH):
        assert abs((part[1:] * part[:-1]).mean()) < 5 / part.size**0.5
        assert abs((part[:, 1:] * part[:, :-1]).mean()) < 5 / part.size**0.5


def test_a_run_of_many_steps_is_flushed_on_the_way(monkeypatch):
    monkeypatch.setattr(history, "MOST_STEPS", 4)
    one = engine(Model(), exact_steps=12, momentum=0.9)
    assert same(train(one, steps=11), train(engine(Model(), lazy=(), momentum=0.9), steps=11))
    assert one._history.first == 8


def test_what_is_added_later_is_independent_of_what_was_added_before():
    model = Model(rows=3000)
    one, seen = engine(model, exact_steps=1), []
    for _ in range(3):
        before = model.state_dict()["items.weight"].clone()
        for _ in range(6):
            one.step(*batch(torch.Generator(), size=0))
        seen.append((model.state_dict()["items.weight"] - before).flatten().double())
    drawn = torch.stack(seen) / (0.3 * 1.1 * 0.7 / DIVISOR * math.sqrt(6))
    assert stats.kstest(drawn.flatten().numpy(), "norm").pvalue > 1e-4
    off = torch.corrcoef(drawn) - torch.eye(3)
    assert float(off.abs().max()) < 5 / drawn.shape[1] ** 0.5


def test_strong_weight_decay_over_many_steps_stays_finite_and_right():
    model = Model(rows=500)
    one = engine(model, exact_steps=1, decay=2.0, lr=0.3)
    for _ in range(900):  # (1 - 0.6)^900 is no float64
        one.step(*batch(torch.Generator(), size=0))
    std = 0.3 * 1.1 * 0.7 / DIVISOR / math.sqrt(1 - 0.4**2)
    weights = model.state_dict()["items.weight"].double() / std
    assert abs(float(weights.var()) - 1) < 5 * (2 / weights.numel()) ** 0.5


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("exact", [2, 12])
def test_a_resumed_run_equals_the_one_that_was_not_interrupted(exact, momentum):
    whole, first = (engine(Model(), exact_steps=exact, momentum=momentum) for _ in range(2))
    chance = [torch.Generator().manual_seed(3) for _ in range(2)]
    for _ in range(6):
        whole.step(*batch(chance[0]))
        first.step(*batch(chance[1]))
    whole.model.state_dict()  # a run that saves goes on as one that is resumed
    model, noise = Model(), GaussianNoise()
    model.load_state_dict(first.model.state_dict())
    noise.load_state_dict(first.noise.state_dict())
    resumed = engine(model, exact_steps=exact, noise=noise, momentum=momentum)
    resumed.optimizer.load_state_dict(first.optimizer.state_dict())
    resumed.steps = first.steps
    for _ in range(6):
        whole.step(*batch(chance[0]))
        resumed.step(*batch(chance[1]))
    assert resumed.steps == 12 and same(resumed.model.state_dict(), whole.model.state_dict())
    assert same(momenta(resumed), momenta(whole))


def test_a_failed_step_leaves_the_run_as_it_was():
    one, other = engine(Model(), exact_steps=12), engine(Model(), exact_steps=12)
    chance = torch.Generator().manual_seed(1)
    for step in range(6):
        x, y = batch(chance, size=4)
        if step == 3:
            with pytest.raises((IndexError, RuntimeError)):
                one.step(x, y + 9)
            assert type(one.model.items) is nn.Embedding and one.steps == 3
        one.step(x, y)
        other.step(x, y)
    assert same(one.model.state_dict(), other.model.state_dict())


# ---- what it costs


@pytest.mark.parametrize("rows", [1000, 100_000])
def test_a_step_draws_noise_for_the_rows_that_it_reads_and_for_no_others(monkeypatch, rows):
    drawn = []
    monkeypatch.setattr(
        tables_room, "add_noise", lambda target, *a, f=tables_room.add_noise: drawn.append(len(target)) or f(target, *a)
    )
    one = engine(Model(rows=rows), lazy={"items": lambda x: x[0]}, exact_steps=2)
    for step in range(6):
        drawn.clear()
        one.step(*batch(torch.Generator().manual_seed(step), size=5, rows=rows))
        assert 15 <= sum(drawn) <= 15 * 4
    assert one._tables["items"]._done.element_size() == 4 and len(one._tables["items"]._done) == rows


# ---- what is refused


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"optimizer": torch.optim.Adam}, "is a Adam.*linear in the gradient"),
        ({"optimizer": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True)}, "SGD without dampening"),
        ({"optimizer": lambda p: torch.optim.SGD(p, lr=0.1, momentum=1.0)}, "momentum is 1.0"),
        ({"optimizer": lambda p: torch.optim.SGD(p, lr=1.0, weight_decay=1.0)}, "below 1"),
        ({"optimizer": lambda p: torch.optim.SGD(list(p)[:2], lr=1.0)}, "not among the optimizer's parameters"),
        ({"noise": SecureNoise()}, "numbers have no addresses"),
        ({"compile": True}, "compile=False"),
        ({"lazy": ["first"]}, "which is a Linear"),
        ({"lazy": ["nothing"]}, "which is a NoneType"),
    ],
)
def test_what_cannot_be_drawn_later_is_refused(change, said):
    model = Model()
    if "optimizer" in change:
        change = {"optimizer": change["optimizer"](model.parameters())}
    with pytest.raises(UnsupportedError, match=said):
        engine(model, **change)


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda m: setattr(m, "items", nn.Embedding(9, 4, max_norm=1.0)), "max_norm"),
        (lambda m: setattr(m, "items", nn.EmbeddingBag(9, 4, mode="max")), "max"),
        (lambda m: m.items.double(), "must be float32"),
        (lambda m: m.items.requires_grad_(False), "not trained"),
        (lambda m: m.items.register_forward_hook(print), "has hooks"),
        (lambda m: setattr(m, "head", m.items), "tied head"),
    ],
)
def test_tables_that_cannot_be_lazy_are_refused(spoil, said):
    model = Model()
    spoil(model)
    with pytest.raises(UnsupportedError, match=f"The table items cannot be lazy: .*{said}"):
        engine(model)


def test_version_1_of_the_stream_is_refused():
    noise = GaussianNoise()
    noise.load_state_dict({"seed": "5", "rank": "0"})
    with pytest.raises(UnsupportedError, match="version 1"):
        engine(Model(), noise=noise)


def test_rows_that_are_not_in_the_batch_are_asked_for():
    class Hashed(Model):
        def forward(self, ids, x, users):
            return super().forward((ids * 7 + 1) % ROWS, x, users)

    x, y = batch(torch.Generator(), size=4)
    one = engine(Hashed())
    with pytest.raises(UnsupportedError, match="reads a row whose number is not among the integers of the batch"):
        one.step(x, y)
    engine(Hashed(), lazy={"items": lambda x: (x[0] * 7 + 1) % ROWS, "users": None}).step(x, y)


def test_a_step_needs_a_public_divisor():
    with pytest.raises(ValueError, match="expected_batch_size"):
        engine(Model(), expected_batch_size=None)
    with pytest.raises(ValueError, match="exact_steps is 0"):
        engine(Model(), exact_steps=0)
    for none in ([], "items"):
        with pytest.raises(ValueError, match="must hold the name of one table or more"):
            LazyEngine(Model(), losses, tables=none, optimizer=None)


def test_the_pages_snippet_runs(tmp_path):
    page = Path(__file__).parents[2] / "docs" / "dpcore-engine.md"
    section = page.read_text(encoding="utf-8").split("## Huge embedding tables")[1]
    path = tmp_path / "weights.pt"
    exec(section.split("```python\n")[1].split("```")[0], {"path": path})
    assert not bool(torch.load(path, weights_only=True)["items.weight"].isnan().any())
