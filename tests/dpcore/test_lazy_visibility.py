"""Between steps nobody sees a row of a lazy table without its noise, and no interruption adds noise twice."""

from __future__ import annotations

import concurrent.futures
import copy
import os
import pickle
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from dpcore.errors import PrivacyError, UnsupportedError
from dpcore.lazy_tables import table as tables_room
from tests.dpcore.lazy import ROWS, WIDTH, Model, batch, engine, momenta, same, train


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
