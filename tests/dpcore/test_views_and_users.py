"""Views and users as units in two lines: what is drawn, counted, clipped and refused."""

import warnings
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import ConcatDataset, DataLoader, Subset, TensorDataset

import dpcore
from dpcore import DPDataLoader, Engine, GradSampleModule, PrivacyEngine, PrivacyError, UnsupportedError, reference
from dpcore.utils.batch_memory_manager import BatchMemoryManager
from tests.dpcore.private_setup import losses, make, small_data, small_model

K = 4


def data(n=30):
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(n, 6, dtype=torch.float64, generator=generator), torch.arange(n) % 3)


def shaken(x):
    return x + 0.1 * torch.randn_like(x)


def private(dataset, engine=None, **options):
    """(engine, module, optimizer, ..., loader) with sample rate 1/5 and divisor 6, σ = 0 and C = 0.5."""
    model, engine = small_model(), PrivacyEngine(seed=7) if engine is None else engine
    given = {"sample_rate": 1 / 5, "expected_batch_size": 6, "noise_multiplier": 0.0, "max_grad_norm": 0.5}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="expected_batch_size is")
        return engine, *engine.make_private(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            data_loader=DataLoader(dataset, batch_size=6),
            **(given | options),
        )


def weights(module):
    return {name.removeprefix("_module."): p for name, p in module.state_dict().items()}


@pytest.mark.parametrize("wrap", [True, False])
@pytest.mark.parametrize("mode", ["bookkeeping", "hooks", "ghost"])
@pytest.mark.parametrize("pieces", [None, 2, "auto"])
def test_views_are_clipped_as_one_in_two_lines(mode, wrap, pieces):
    criterion = nn.CrossEntropyLoss()
    _, module, optimizer, *middle, loader = private(
        dpcore.views(data(), shaken, K),
        grad_sample_mode=mode,
        wrap_model=wrap,
        max_physical_batch_size=pieces,
        criterion=criterion,
    )
    called = module if wrap else module._module
    expected = {name: value.clone() for name, value in weights(called).items()}
    criterion, seen = middle[0] if middle else criterion, []
    for x, y in loader:
        seen.append((x, y))
        assert len(x) % K == 0 and torch.equal(y.view(-1, K), y.view(-1, K)[:, :1].expand(-1, K))
        optimizer.zero_grad()
        criterion(called(x), y).backward()
        if mode == "hooks" and len(x):
            assert all(p.grad_sample.shape == (len(x) // K, *p.shape) for p in called.parameters())
        optimizer.step()
        if optimizer.batch_goes_on:
            continue
        x, y = (torch.cat(parts) for parts in zip(*seen, strict=True))
        model = small_model()
        model.load_state_dict(expected)
        for name, total in reference.clipped_sum(model, losses, x, y, 0.5, K).clipped.items():
            expected[name] -= 0.1 * total / 6
            torch.testing.assert_close(weights(called)[name], expected[name])
        seen = []
    assert optimizer.steps == 5


def test_epsilon_and_the_ledger_count_units():
    engine, module, optimizer, loader = private(dpcore.views(data(), shaken, K), noise_multiplier=1.0)
    other, *_, plain = private(data(), noise_multiplier=1.0)
    lengths = []
    for (x, y), (few, _) in zip(loader, plain, strict=True):
        assert len(x) == K * len(few)  # the same seed draws the same examples
        lengths.append(len(x))
        optimizer.zero_grad()
        F.cross_entropy(module(x), y).backward()
        optimizer.step()
        other.accountant.step(noise_multiplier=1.0, sample_rate=1 / 5)
    assert engine.get_epsilon(1e-3) == other.get_epsilon(1e-3) and sum(lengths)


def test_an_empty_batch_of_views_is_a_step():
    _, module, optimizer, loader = private(dpcore.views(data(), shaken, K), sample_rate=1e-9, noise_multiplier=1.0)
    x, y = next(iter(loader))
    assert x.shape == (0, 6) and y.shape == (0,)
    F.cross_entropy(module(x), y, reduction="sum").backward()
    optimizer.step()
    assert optimizer.steps == 1


def test_copies_of_an_example_beside_units_are_refused():
    _, module, optimizer, loader = private(dpcore.views(data(), shaken, K))
    x, y = next(iter(loader))
    F.cross_entropy(module(torch.cat([x, x])), torch.cat([y, y])).backward()
    with pytest.raises(PrivacyError, match="rows went through the backward passes"):
        optimizer.step()


def test_rows_of_a_data_set_of_ones_own_need_group():
    items = TensorDataset(torch.randn(30, K, 6, dtype=torch.float64), torch.arange(30) % 3)
    _, module, optimizer, loader = private(items, group=K)
    for x, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(module(x.flatten(0, 1)), y.repeat_interleave(K)).backward()
        optimizer.step()
    _, module, optimizer, loader = private(data(), group=2)  # each example in one row alone
    x, y = next(batch for batch in loader if len(batch[0]) and len(batch[0]) % 2 == 0)
    F.cross_entropy(module(x), y).backward()
    with pytest.raises(PrivacyError, match=r"units of group=2 rows went through .*leave group= out"):
        optimizer.step()


def test_a_group_that_is_not_the_data_sets_is_refused():
    with pytest.raises(ValueError, match="group is 2, and the data set gives every unit 4 rows"):
        private(dpcore.views(data(), shaken, K), group=2)
    wrapped = GradSampleModule(small_model())
    with pytest.raises(ValueError, match="wrapped already, with batch_first=True, group=1"):
        PrivacyEngine().make_private(
            module=wrapped,
            optimizer=torch.optim.SGD(wrapped.parameters(), lr=0.1),
            data_loader=DataLoader(dpcore.views(data(), shaken, K), batch_size=6),
            noise_multiplier=1.0,
            max_grad_norm=1.0,
        )


def test_a_checkpoint_of_another_group_is_refused(tmp_path):
    engine, module, optimizer, _ = private(dpcore.views(data(), shaken, K))
    engine.save_checkpoint(path=tmp_path / "c", module=module, optimizer=optimizer)
    engine, module, optimizer, _ = private(dpcore.views(data(), shaken, 2))
    with pytest.raises(
        PrivacyError, match="saved with unit=one example, by 4 views, this run has one example, by 2 views"
    ):
        engine.load_checkpoint(path=tmp_path / "c", module=module, optimizer=optimizer)


def test_a_file_of_an_earlier_version_is_of_single_rows(tmp_path):
    engine, module, optimizer, _ = private(data())
    engine.save_checkpoint(path=tmp_path / "c", module=module, optimizer=optimizer)
    saved = torch.load(tmp_path / "c", weights_only=True)
    del saved["setting"]["unit"], saved["setting"]["max_batch_size"]
    torch.save(saved, tmp_path / "c")
    for dataset in (data(), dpcore.views(data(), shaken, K)):
        engine, module, optimizer, _ = private(dataset)
        with (
            nullcontext() if len(dataset[0]) == 2 else pytest.raises(PrivacyError, match="saved with unit=one example,")
        ):
            engine.load_checkpoint(path=tmp_path / "c", module=module, optimizer=optimizer)


def test_pieces_are_cut_between_units():
    _, module, optimizer, loader = private(dpcore.views(data(), shaken, K))
    with BatchMemoryManager(data_loader=loader, max_physical_batch_size=1, optimizer=optimizer) as pieces:
        for x, y in pieces:
            assert len(x) in (0, K)
            F.cross_entropy(module(x), y, reduction="mean" if len(x) else "sum").backward()
            optimizer.step()
    assert optimizer.steps == 5


@pytest.mark.parametrize("workers", [0, 2])
def test_loaders_of_views(workers):
    dataset = dpcore.views(data(), shaken, K)
    for of in (dataset, Subset(dataset, [3, 5, 8, 9])):
        x, y = next(iter(DataLoader(of, batch_size=2, num_workers=workers)))
        assert x.shape == (2 * K, 6) and y.shape == (2 * K,)
        assert len(x.unique(dim=0)) == 2 * K
    loader = DPDataLoader(Subset(dataset, [3, 5, 8, 9]), sample_rate=1.0, num_workers=workers)
    x, y = next(iter(loader))
    assert sorted(y.tolist()) == sorted([0, 2, 2, 0] * K)
    engine = Engine(small_model(), losses, group=K)
    assert engine.clipped_sum(x, y).norms.shape == (4,)


def test_views_of_examples_that_are_no_tuples_and_of_data_that_change_by_themselves():
    class Changing(torch.utils.data.Dataset):
        reads = 0

        def __len__(self):
            return 2

        def __getitem__(self, number):
            self.reads += 1
            return torch.tensor([float(number), float(self.reads)])

    dataset = Changing()
    assert len(torch.stack(dpcore.views(dataset, None, 3)[0]).unique(dim=0)) == 3 and dataset.reads == 3
    assert dpcore.views(dataset, lambda x: x * 2.0, 2)[1][0][0] == 2.0


def test_overlapping_examples_behind_views_are_refused():
    with pytest.raises(PrivacyError, match="holds an example 2 times"):
        private(dpcore.views(Subset(data(), [0, 1, 1]), shaken, K))


# ---- users


def by_user(sample=True, rows=3):
    """(the data set of users, the id of every row); x[0] is the number of a row."""
    ids = torch.tensor([5, 7, 5, 5, 9, 7, 5, 5])
    x = torch.arange(8.0).unsqueeze(1)
    return dpcore.users(TensorDataset(x), ids, rows, sample=sample), ids


def test_users_are_units_of_their_own_rows_alone():
    dataset, ids = by_user()
    assert len(dataset) == 3
    seen = set()
    for _ in range(40):
        (x,) = next(iter(DataLoader(dataset, batch_size=3)))
        by_unit = x.long().view(3, 3)
        assert [set(ids[rows].tolist()) for rows in by_unit] == [{5}, {7}, {9}]
        assert len(set(by_unit[0].tolist())) == 3  # of five, each at most once
        assert set(by_unit[1].tolist()) == {1, 5} and by_unit[2].tolist() == [4, 4, 4]
        seen |= set(by_unit[0].tolist())
    assert seen == {0, 2, 3, 6, 7}


def test_users_without_sampling_give_their_first_rows():
    dataset, _ = by_user(sample=False)
    assert [[int(x) for (x,) in dataset[u]] for u in range(3)] == [[0, 2, 3], [1, 5, 1], [4, 4, 4]]


def test_a_user_is_in_a_batch_at_most_once_and_the_rate_is_of_users():
    ids = torch.arange(200) % 40
    dataset = dpcore.users(TensorDataset(torch.randn(200, 6), ids), ids, 2)
    loader = DPDataLoader(dataset, sample_rate=0.25, seed=3, steps=200)
    total = 0
    for _, who in loader:
        units = who.view(-1, 2)
        assert torch.equal(units[:, 0], units[:, 1]) and len(units[:, 0].unique()) == len(units)
        total += len(units)
    assert 0.2 < total / (200 * 40) < 0.3


def test_user_level_privacy_in_two_lines():
    rows, ids = data(), [f"user {k % 11}" for k in range(30)]
    engine, module, optimizer, loader = private(dpcore.users(rows, ids, 2), noise_multiplier=1.0)
    assert "11 examples" in repr(loader)
    for x, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(module(x), y).backward()
        optimizer.step()
    assert engine.get_epsilon(1e-2) > 0.0
    assert (
        "one user, by 2 rows" in str(page := dpcore.report(engine)) and "one user's training examples" in page.promise
    )


def test_what_cannot_be_units_is_refused():
    with pytest.raises(ValueError, match="user_id has 3 entries for 30 rows"):
        dpcore.users(data(), [1, 2, 3], 2)
    with pytest.raises(ValueError, match="K is 0; it must be a whole number, at least 1"):
        dpcore.views(data(), None, 0)

    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter(())

    with pytest.raises(UnsupportedError, match="Stream, has no length"):
        dpcore.views(Stream(), None, 2)


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: dpcore.views(data(), "flip", 2), "transform is 'flip'; it must be a function"),
        (lambda: dpcore.views(data(), 2, shaken), "transform is 2; it must be a function"),
        (lambda: dpcore.views(DataLoader(data()), None, 2), "is a DataLoader, .*pass loader.dataset"),
        (lambda: dpcore.users(DataLoader(data()), [1], 2), "is a DataLoader, .*pass loader.dataset"),
        (lambda: dpcore.users(data(), "user", 2), "user_id is 'user'; it must be a list"),
        (lambda: dpcore.users(data(), None, 2), "user_id is None; it must be a list"),
        (lambda: dpcore.users(data(), torch.tensor(3), 2), "user_id is .*; it must be a list"),
        (lambda: dpcore.users(data(), {row: row % 3 for row in range(30)}, 2), "user_id is a dict; it must be a list"),
    ],
    ids=["transform", "order", "loader", "users-of-a-loader", "name", "none", "scalar", "by-row"],
)
def test_what_is_no_transform_no_data_set_and_no_ids(make, sentence):
    with pytest.raises(TypeError, match=sentence):
        make()


@pytest.mark.parametrize("missing", [None, float("nan"), ["a"], object(), (torch.tensor(1), "a")])
def test_a_row_whose_user_is_not_known_is_refused(missing):
    """Each NaN, and each object of its own, was a user of its own, so that a person was split; all None were one."""
    ids = [*range(59), missing]
    with pytest.raises(ValueError, match=r"user_id of row 59 is .*would split a person"):
        dpcore.users(small_data(), ids, K=2)


@pytest.mark.parametrize("scalar", [torch.tensor, np.array])
def test_ids_taken_from_the_rows_of_a_data_set_are_numbers(scalar):
    """Each tensor was a user of its own: units were rows, and epsilon that of a row."""
    assert len(dpcore.users(small_data(), [scalar(row % 20) for row in range(60)], K=2)) == 20


@pytest.mark.parametrize(("ids", "options"), [([row // 2 for row in range(60)], {}), (None, {"sample": False})])
def test_a_run_goes_on_with_the_same_users_only(tmp_path, ids, options):
    """With others the steps since the checkpoint would be made again, of other batches, under the same noise."""
    first = [row % 30 for row in range(60)]

    def run(ids, **more):
        loader = DataLoader(dpcore.users(small_data(), ids, K=2, **more), batch_size=10)
        return make(nn.Linear(6, 3).double(), PrivacyEngine(), noise_multiplier=1.0, data_loader=loader)

    engine, model, optimizer, _ = run(first)
    engine.save_checkpoint(path=tmp_path / "saved.pt", module=model, optimizer=optimizer)
    again, model, optimizer, _ = run(first)
    again.load_checkpoint(path=tmp_path / "saved.pt", module=model, optimizer=optimizer)
    other, model, optimizer, _ = run(ids or first, **options)
    with pytest.raises(PrivacyError, match=r"saved with the users' rows=\w+, this run has \w+"):
        other.load_checkpoint(path=tmp_path / "saved.pt", module=model, optimizer=optimizer)


def test_units_of_units_and_joined_units_are_refused_by_name():
    data = TensorDataset(torch.randn(6, 3), torch.zeros(6))
    seen = dpcore.views(data, None, 2)
    assert repr(seen) == "6 units: each one example, by 2 views"
    for again in (lambda: dpcore.views(seen, None, 2), lambda: dpcore.users(Subset(seen, [0, 1]), [1, 2], 2)):
        with pytest.raises(UnsupportedError, match="one of units already"):
            again()
    model = nn.Linear(3, 1)
    with pytest.raises(UnsupportedError, match="Join the data first"):
        PrivacyEngine().make_private(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            data_loader=DataLoader(ConcatDataset([small_data(), seen]), batch_size=2),
            noise_multiplier=1.0,
            max_grad_norm=1.0,
        )
