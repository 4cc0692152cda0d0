"""Tables whose noise is drawn when a row is read: what dense noise gives, in bits or in law; nothing is seen before."""

from __future__ import annotations

import concurrent.futures
import copy
import math
import os
import pickle
import warnings
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from dpcore import Engine, GaussianNoise
from dpcore.errors import PrivacyError, UnsupportedError
from dpcore.lazy_tables import LazyEngine, history
from dpcore.lazy_tables import table as tables_room
from dpcore.noise import SecureNoise

ROWS, WIDTH, DIVISOR = 50, 8, 6


class Model(nn.Module):
    """A dense part, and a table of each kind."""

    def __init__(self, kind="embedding", rows=ROWS):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(3, 4)
        self.kind = kind
        if kind in ("embedding", "padded"):
            self.items = nn.Embedding(rows, WIDTH, padding_idx=3 if kind == "padded" else None)
        else:
            self.items = nn.EmbeddingBag(rows, WIDTH, mode="mean" if kind == "mean" else "sum")
        self.users = nn.Embedding(20, 2)
        self.out = nn.Linear(WIDTH + 4 + 2, 2)

    def forward(self, ids, x, users):
        if self.kind in ("embedding", "padded"):
            items = self.items(ids).mean(1)
        elif self.kind == "weights":
            items = self.items(ids, per_sample_weights=torch.cos(ids.float()))
        else:
            items = self.items(ids)
        return self.out(torch.cat([items, torch.tanh(self.first(x)), self.users(users)], 1))


def losses(outputs, y):
    return F.cross_entropy(outputs, y, reduction="none")


def engine(model, *, lazy=("items", "users"), decay=0.0, momentum=0.0, lr=0.3, seed=5, **options):
    usual = torch.optim.SGD(model.parameters(), lr=lr, weight_decay=decay, momentum=momentum)
    optimizer = options.pop("optimizer", None) or usual
    given = {"noise": GaussianNoise(seed), "max_grad_norm": 0.7, "noise_multiplier": 1.1}
    given |= {"expected_batch_size": DIVISOR, "physical_batch_size": 4, "check_isolation": False}
    given |= {"optimizer": optimizer} | options
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return LazyEngine(model, losses, tables=lazy, **given) if lazy else Engine(model, losses, **given)


def batch(chance, size=None, rows=ROWS):
    size = int(torch.randint(0, 8, (), generator=chance)) if size is None else size
    ids = torch.randint(0, rows, (size, 3), generator=chance)
    users = torch.randint(0, 20, (size,), generator=chance)
    return (ids, torch.randn(size, 3, generator=chance), users), torch.randint(0, 2, (size,), generator=chance)


def train(one, steps=12, seed=1, lr=0.3):
    chance = torch.Generator().manual_seed(seed)
    for step in range(steps):
        one.optimizer.param_groups[0]["lr"] = lr / (1 + step)
        one.step(*batch(chance))
    return one.model.state_dict() | momenta(one)


def momenta(one):
    """Return every parameter's, as the optimizer saves it."""
    states = one.optimizer.state_dict()["state"]
    return {
        str(number): found["momentum_buffer"]
        for number, found in states.items()
        if found.get("momentum_buffer") is not None
    }


def same(one, other):
    assert one.keys() == other.keys()
    return all(torch.equal(one[name], other[name]) for name in one)


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


# ---- what can be seen


def test_between_steps_a_table_shows_nothing():
    one = engine(Model(), momentum=0.9)
    train_steps = torch.Generator().manual_seed(1)
    for _ in range(3):
        one.step(*batch(train_steps))
        for table in (one.model.items, one.model.users):
            assert bool(table.weight.isnan().all()) and table.weight.grad is None
            assert bool(one.optimizer.state[table.weight]["momentum_buffer"].isnan().all())
    one.flush()
    assert not any(bool(found.isnan().any()) for found in momenta(one).values())
    assert not bool(one.model.items.weight.isnan().any())
    assert type(one.model.items) is nn.Embedding and one.model.items.weight.shape == (ROWS, WIDTH)


def test_a_result_does_not_tell_which_rows_were_read():
    one = engine(Model())
    sums = one.step(*batch(torch.Generator(), size=3)).sums
    assert set(sums) == {"first.weight", "first.bias", "out.weight", "out.bias"}


def test_a_second_engine_waits_for_the_first_ones_flush():
    one = engine(Model())
    one.step(*batch(torch.Generator(), size=3))
    with pytest.raises(UnsupportedError, match=r"another LazyEngine, whose flush\(\) comes first"):
        engine(one.model)
    one.flush()
    other = engine(one.model, seed=6)
    other.step(*batch(torch.Generator(), size=3))
    assert bool(one.model.items.weight.isnan().all())
    assert not bool(one.model.state_dict()["items.weight"].isnan().any())


def test_a_call_of_the_model_reads_rows_with_all_their_noise():
    one, dense = engine(Model(), exact_steps=12), engine(Model(), lazy=())
    for each in (one, dense):
        chance = torch.Generator().manual_seed(1)
        for _ in range(5):
            each.step(*batch(chance))
    x, _ = batch(torch.Generator().manual_seed(9), size=5)
    with torch.no_grad():
        assert torch.equal(one.model(*x), dense.model(*x))
        assert bool(one.model.items.weight.isnan().all())
        with pytest.raises(IndexError):
            one.model(x[0] + ROWS, *x[1:])
        assert bool(one.model.items.weight.isnan().all())
    assert same(one.model.state_dict(), dense.model.state_dict())


def test_copies_and_pickles_of_a_model_whose_rows_wait_are_refused():
    one = engine(Model())
    one.step(*batch(torch.Generator(), size=3))
    for act in (lambda: copy.deepcopy(one.model), lambda: pickle.dumps(one.model)):
        with pytest.raises(PrivacyError, match=r"copied or pickled while rows .* call flush\(\)"):
            act()
    with pytest.raises(PrivacyError, match="not copied or pickled"):
        copy.deepcopy(one)
    one.flush()
    for other in (copy.deepcopy(one.model), pickle.loads(pickle.dumps(one.model))):
        assert same(other.state_dict(), one.model.state_dict())
        other(*batch(torch.Generator(), size=3)[0])


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_what_was_read_holds_still(momentum):
    """Later steps leave rows without their noise in the table, and the best state so far may be released last."""
    one = engine(Model(), momentum=momentum)
    train(one, steps=3)
    one.optimizer.load_state_dict(loaded := copy.deepcopy(one.optimizer.state_dict()))
    kept = [one.model.state_dict()["items.weight"], one.model.items.weight.detach()]
    states = [*one.optimizer.state_dict()["state"].values(), *loaded["state"].values()]
    kept += [state["momentum_buffer"] for state in states if momentum]
    before = copy.deepcopy(kept)
    tables = {tensor.data_ptr() for tensor in kept if len(tensor) == len(one.model.items.weight)}
    one.step(*batch(torch.Generator().manual_seed(9), size=4))
    for tensor, old in zip(kept, before, strict=True):
        assert tensor.data_ptr() not in tables or torch.equal(tensor, old)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_an_interrupted_flush_adds_no_noise_twice(momentum, monkeypatch):
    from dpcore.lazy_tables import table

    one, real = engine(Model(), momentum=momentum, exact_steps=1), table.add_noise
    train(one, steps=9)

    def stops(part, std, name, rows, address):
        real(part, std, name, rows, address)
        if part._base is not None:  # the table itself, and no rows that were gathered
            raise KeyboardInterrupt

    one.step(*batch(torch.Generator().manual_seed(9), size=4))
    for seed in range(3):
        one.step(*batch(torch.Generator().manual_seed(seed), size=1))
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(table, "add_noise", stops)
        one.flush()
    with pytest.raises(PrivacyError, match="interrupted"):
        one.model.state_dict()


def test_a_state_that_is_loaded_replaces_the_table():
    one, start = engine(Model()), Model().state_dict()
    one.step(*batch(torch.Generator(), size=3))
    one.model.load_state_dict(start)
    assert same(one.model.state_dict(), start)
    one.step(*batch(torch.Generator(), size=3))
    assert bool(one.model.items.weight.isnan().all())


def test_a_table_that_is_moved_while_rows_wait_stops_the_run():
    one = engine(Model())
    one.step(*batch(torch.Generator(), size=3))
    one.model.items.weight.data = torch.zeros(ROWS, WIDTH)
    with pytest.raises(
        PrivacyError, match=r"its values or their momentum were replaced, while rows waited .* flush\(\)"
    ):
        one.step(*batch(torch.Generator(), size=3))


def test_a_table_that_is_set_to_zero_while_rows_wait_stops_the_run():
    """It was forgotten at the next flush, and rows that wait showed zeros."""
    chance = torch.Generator().manual_seed(1)
    one = engine(Model())
    one.step(*batch(chance))
    one.model.items.weight.data.zero_()
    with pytest.raises(PrivacyError, match="values or their momentum were replaced"):
        one.step(*batch(chance))
    one.flush()
    one.model.items.weight.data.zero_()
    one.step(*batch(chance))
    assert one.model.items.weight.isnan().all()


def test_momentum_that_is_replaced_while_rows_wait_stops_the_run():
    one = engine(Model(), momentum=0.9)
    one.step(*batch(torch.Generator(), size=3))
    one.optimizer.state.clear()
    with pytest.raises(PrivacyError, match="momentum were replaced"):
        one.step(*batch(torch.Generator(), size=3))


def _loaded_in_place_of_the_weights(model):
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)


def _replaced(model):
    model.items = copy.deepcopy(model.items)


def _frozen(model):
    model.items.weight.requires_grad_(False)


def _taken_away(model):
    del model.items


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (_loaded_in_place_of_the_weights, "its weight is another one"),
        (_replaced, "its module is another one"),
        (_taken_away, "its module is another one"),
        (_frozen, "not trained any more"),
    ],
)
def test_a_table_that_is_replaced_or_frozen_stops_the_run(change, said):
    chance = torch.Generator().manual_seed(1)
    one = engine(Model())
    one.step(*batch(chance))
    one.flush()
    change(one.model)
    before = copy.deepcopy(one.model.state_dict())
    with pytest.raises(PrivacyError, match=f"(?s)items has changed .*{said}.*make a LazyEngine"):
        one.step(*batch(chance))
    assert one.steps == 1
    assert same(one.model.state_dict(), before)


def test_a_step_in_inference_mode_is_refused_and_harms_nothing():
    chance, other = torch.Generator().manual_seed(1), torch.Generator().manual_seed(1)
    one, usual = engine(Model()), engine(Model())
    for step in range(3):
        given = batch(chance)
        if step:
            with torch.inference_mode(), pytest.raises(PrivacyError, match="inference_mode"):
                one.step(*given)
        one.step(*given)
        usual.step(*batch(other))
    assert same(one.model.state_dict(), usual.model.state_dict())


def test_a_run_goes_on_after_ctrl_c_in_a_call_of_the_model(monkeypatch):
    chance, other = torch.Generator().manual_seed(1), torch.Generator().manual_seed(1)
    one, usual = engine(Model()), engine(Model())
    one.step(*batch(chance))
    with monkeypatch.context() as patch:
        patch.setattr(F, "embedding", _interrupt)
        with pytest.raises(KeyboardInterrupt):
            one.model.items(torch.tensor([[1, 2]]))
    one.step(*batch(chance))
    assert one.model.items.weight.isnan().all()
    for _ in range(2):
        usual.step(*batch(other))
        usual.model.items(torch.tensor([[1, 2]]))
    assert same(one.model.state_dict(), usual.model.state_dict())


def _interrupt(*_, **__):
    raise KeyboardInterrupt


def test_ids_outside_of_a_table_draw_no_noise(monkeypatch):
    one = engine(Model())
    one.step(*batch(torch.Generator(), size=3))
    drawn = []
    monkeypatch.setattr(tables_room, "add_noise", lambda *of: drawn.append(of[3]))
    for ids in ([[-1]], [[ROWS]], [[-1, ROWS]]):
        with pytest.raises(IndexError):
            one.model.items(torch.tensor(ids))
    assert all(not len(rows) for rows in drawn)


def test_rows_that_wait_are_for_one_thread():
    one, usual = engine(Model()), engine(Model())
    for each in (one, usual):
        each.step(*batch(torch.Generator(), size=3))
    x, y = batch(torch.Generator().manual_seed(2), size=3)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        for ask in (lambda: one.model(*x), lambda: one.step(x, y), one.flush):
            with pytest.raises(PrivacyError, match=r"used by another thread .* flush\(\) before that"):
                pool.submit(ask).result()
        one.flush()
        pool.submit(one.step, x, y).result()
        with pytest.raises(PrivacyError, match="used by another thread"):
            one.flush()
    usual.step(x, y)  # The pool's thread has ended: nobody else can draw the noise.
    assert same(one.model.state_dict(), usual.model.state_dict())


@pytest.mark.parametrize("of_all", [False, True])
@pytest.mark.parametrize("before", [False, True])
def test_somebody_elses_hooks_see_no_row_that_waits(of_all, before):
    one = engine(Model())
    one.step(*batch(torch.Generator(), size=3))
    of_all_modules = torch.nn.modules.module
    add = {
        (False, True): one.model.items.register_forward_pre_hook,
        (False, False): one.model.items.register_forward_hook,
        (True, True): of_all_modules.register_module_forward_pre_hook,
        (True, False): of_all_modules.register_module_forward_hook,
    }[of_all, before]
    seen = []
    handle = add(lambda module, *_: seen.append(module.weight.detach().clone()) if module is one.model.items else None)
    try:
        one.model.items(torch.tensor([[1, 2]]))
    finally:
        handle.remove()
    assert len(seen) == 1 and (
        bool(seen[0].isnan().all()) or torch.equal(seen[0], one.model.state_dict()["items.weight"])
    )


def test_somebody_elses_mode_or_forward_sees_no_row_that_waits():
    class Looks(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            if func is F.embedding:
                seen.append(args[1].detach().clone())
            return func(*args, **(kwargs or {}))

    def wrapped(ids):
        seen.append(one.model.items.weight.detach().clone())
        return forward(ids)

    one, seen = engine(Model()), []
    forward = one.model.items.forward
    for mode in (Looks(), nullcontext()):
        one.step(*batch(torch.Generator(), size=3))
        if not isinstance(mode, Looks):
            one.model.items.forward = wrapped
        with mode:
            one.model.items(torch.tensor([[1, 2]]))
        assert torch.equal(seen.pop(), one.model.state_dict()["items.weight"])


def test_a_state_of_the_optimizer_that_was_kept_holds_still():
    one = engine(Model(), momentum=0.9)
    one.step(*batch(torch.Generator(), size=3))
    kept = one.optimizer.state_dict()
    before = copy.deepcopy(kept)
    one.step(*batch(torch.Generator(), size=3))
    of_tables = [
        n for n, (name, _) in enumerate(one.model.named_parameters()) if name in ("items.weight", "users.weight")
    ]
    assert len(of_tables) == 2
    for number in of_tables:
        assert torch.equal(kept["state"][number]["momentum_buffer"], before["state"][number]["momentum_buffer"])


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_ctrl_c_while_a_table_is_hidden_loses_nothing(momentum, monkeypatch):
    one, usual = engine(Model(), momentum=momentum), engine(Model(), momentum=momentum)
    given = batch(torch.Generator(), size=3)
    with monkeypatch.context() as patch:
        patch.setattr(tables_room.Table, "show", _interrupt)
        with pytest.raises(KeyboardInterrupt):
            one.step(*given)
    one.flush()
    for each in (one, usual):
        each.step(*given)
    assert same(one.model.state_dict() | momenta(one), usual.model.state_dict() | momenta(usual))


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_two_engines_do_not_take_turns_on_one_model(momentum):
    one = engine(Model(), momentum=momentum)
    other = engine(one.model, momentum=momentum, optimizer=one.optimizer)
    one.step(*batch(torch.Generator(), size=3))
    with pytest.raises(PrivacyError, match=r"another LazyEngine, whose flush\(\)"):
        other.step(*batch(torch.Generator(), size=3))


def test_two_engines_of_a_table_of_one_column_do_not_take_turns():
    model = nn.Sequential(nn.Embedding(9, 1), nn.Flatten())
    usual = torch.optim.SGD(model.parameters(), lr=0.1)
    one, other = (engine(model, lazy=["0"], optimizer=usual) for _ in range(2))
    x, y = torch.randint(9, (3, 2)), torch.randint(2, (3,))
    one.step(x, y)
    with pytest.raises(PrivacyError, match="another LazyEngine"):
        other.step(x, y)


def test_momentum_is_not_switched_on_or_off():
    for first, then in ((0.0, 0.9), (0.9, 0.0)):
        one = engine(Model(), momentum=first)
        one.optimizer.param_groups[0]["momentum"] = then
        with pytest.raises(UnsupportedError, match=f"momentum is {then} now"):
            one.step(*batch(torch.Generator(), size=3))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_forked_process_draws_no_pending_noise():
    one = engine(Model())
    one.step(*batch(torch.Generator(), size=3))
    end, start = os.pipe()
    child = os.fork()
    if not child:
        said = b"nothing"
        try:
            one.flush()
        except PrivacyError as error:
            said = str(error)[:25].encode()
        os.write(start, said)
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(end, 25) == b"The process was forked wh"
    one.flush()


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
