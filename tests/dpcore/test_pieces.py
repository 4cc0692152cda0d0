"""Pieces have names: in random loops one example moves a released sum by at most C, or the loop is refused.

Example i is the i-th unit vector, so that column i of a released gradient is its part of the sum.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import warnings
from collections import deque

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from dpcore import DPDataLoader, GradSampleModule, PrivacyEngine
from dpcore.errors import PrivacyError
from dpcore.optimizers import DPOptimizer
from dpcore.utils.batch_memory_manager import BatchMemoryManager

EXAMPLES, C = 12, 0.1


def _examples(rows):
    return torch.eye(EXAMPLES)[list(rows)], torch.zeros(len(rows)).long()


class _Loop:
    """A model, its private optimizer, and what each update was made of: every example's part over C."""

    def __init__(self, by_hand: bool, batch_size: int = 6, seed: int = 0, **options) -> None:
        net = nn.Linear(EXAMPLES, 3, bias=False)
        sgd = torch.optim.SGD(net.parameters(), lr=1e-9)
        self.updates: list[torch.Tensor] = []
        sgd.register_step_post_hook(lambda *_: self.updates.append(net.weight.grad.norm(dim=0) / C))
        settings = {"noise_multiplier": 0.0, "max_grad_norm": C, "expected_batch_size": 1.0}
        if by_hand:
            self.model = GradSampleModule(net)
            self.optimizer = DPOptimizer(sgd, **settings)
            return
        data = DataLoader(TensorDataset(torch.eye(EXAMPLES), torch.zeros(EXAMPLES).long()), batch_size=batch_size)
        self.engine = PrivacyEngine(seed=seed)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.model, self.optimizer, self.loader = self.engine.make_private(
                module=net, optimizer=sgd, data_loader=data, **settings, **options
            )

    def backward(self, x, y) -> None:
        self.optimizer.zero_grad()
        F.cross_entropy(self.model(x), y).backward()

    def train(self, x, y) -> None:
        self.backward(x, y)
        self.optimizer.step()

    @property
    def most(self) -> float:
        return max((float(update.max()) for update in self.updates), default=0.0)


def _ahead(pieces, signal, depth):
    """Hand pieces on, of which ``depth`` more are drawn, and announced, before the one at hand is used."""
    drawn: deque = deque()
    for piece, goes_on in pieces:
        signal(goes_on)
        drawn.append(piece)
        if len(drawn) > depth:
            yield drawn.popleft()
    yield from drawn


def _random_batches(chance):
    for _ in range(4):
        batch = [i for i in range(EXAMPLES) if chance.random() < 0.5] or [0]
        yield from _in_pieces(chance, len(batch), lambda rows, batch=batch: batch[rows])


def _in_pieces(chance, length, of):
    size = chance.randint(1, 4)
    starts = range(0, max(length, 1), size)
    return ((of(slice(k, k + size)), k != starts[-1]) for k in starts)


def _cut(loader, chance):
    for x, y in loader:
        yield from _in_pieces(chance, len(x), lambda rows, x=x, y=y: (x[rows], y[rows]))


def _groups(pieces):
    """The examples of each batch."""
    groups = [set()]
    for piece, goes_on in pieces:
        groups[-1] |= set(piece)
        groups += [] if goes_on else [set()]
    return groups[:-1]


def _by_batch(pieces, signal):
    """Hand pieces on, all of a batch announced before the first of them is used."""
    batch = []
    for piece, goes_on in pieces:
        signal(goes_on)
        batch.append(piece)
        if not goes_on:
            yield from batch
            batch.clear()


@pytest.mark.parametrize("how", ["in turn", "by batch", "with the pieces"])
def test_signals_end_in_their_groups(how) -> None:
    """They were one flag: pieces of two batches were added, 2 C. Where pieces are drawn ahead they bring theirs."""
    for seed in range(25):
        pieces = list(_random_batches(random.Random(seed)))
        loop = _Loop(by_hand=True)
        signal = loop.optimizer.signal_skip_step
        if how == "with the pieces":
            for piece, goes_on in _ahead(((pair, None) for pair in pieces), lambda _: None, 3):
                signal(goes_on)
                loop.train(*_examples(piece))
        else:
            for piece in _ahead(pieces, signal, 0) if how == "in turn" else _by_batch(pieces, signal):
                loop.train(*_examples(piece))
        assert [{*u.nonzero().flatten().tolist()} for u in loop.updates] == _groups(pieces)
        assert loop.most <= 1 + 1e-6


@pytest.mark.parametrize("of", ["lists", "poisson", "private"])
@pytest.mark.parametrize("depth", [0, 1, 2, 3, "batch"])
def test_random_loops_over_signals_that_go_wrong(depth, of) -> None:
    """Pieces left out before or behind their pass, steps that fail, rounds that are left: refused, or at most C."""
    for seed in range(30):
        chance = random.Random(seed)
        loop = _Loop(by_hand=of != "private", seed=seed)
        if of == "poisson":
            loop.loader = DPDataLoader(TensorDataset(*_examples(range(EXAMPLES))), sample_rate=0.5, seed=seed)
        signal = loop.optimizer.signal_skip_step
        with contextlib.suppress(PrivacyError):
            for _ in range(3):
                pieces = list(_random_batches(chance)) if of == "lists" else _cut(loop.loader, chance)
                for piece in _by_batch(pieces, signal) if depth == "batch" else _ahead(pieces, signal, depth):
                    what = chance.random()
                    if what < 0.08:
                        loop.backward(*(_examples(piece) if of == "lists" else piece))  # and no step: out of memory
                    elif what < 0.16:
                        continue
                    elif what < 0.22:
                        break
                    else:
                        if what < 0.25:
                            with contextlib.suppress(PrivacyError):
                                loop.optimizer.step()
                        loop.train(*(_examples(piece) if of == "lists" else piece))
                        if what > 0.95 and of != "lists":
                            break
        assert loop.most <= 1 + 1e-6, seed


@pytest.mark.parametrize("depth", [1, 3])
def test_signals_of_another_batch_ahead_of_a_step_are_one_sentence(depth) -> None:
    """Where one is left out later on nothing would tell: refused at once, until discard()."""
    loop = _Loop(by_hand=True)
    pieces = [([k], k % 2 == 0) for k in range(6)]
    with pytest.raises(PrivacyError, match=r"cannot be told which.*right before the step\(\)"):
        for piece in _ahead(pieces, loop.optimizer.signal_skip_step, depth):
            loop.train(*_examples(piece))
    loop.updates.clear()
    loop.optimizer.discard()
    loop.train(*_examples([0]))
    assert len(loop.updates) == 1


def test_pieces_of_the_private_loader_are_announced_before_the_next_batch_is_drawn() -> None:
    """One that was left out when the loader was at its end made 2 C, where numbers of rows happened to fit."""
    for seed in range(40):
        loop = _Loop(by_hand=False, seed=seed)
        pieces = []
        for x, y in loop.loader:
            for k, rows in enumerate((slice(0, None, 2), slice(1, None, 2))):
                loop.optimizer.signal_skip_step(k == 0)
                pieces.append((x[rows], y[rows]))
        with contextlib.suppress(PrivacyError):
            loop.train(*pieces[0])
            loop.train(*pieces[3])
        assert not loop.updates


@pytest.mark.parametrize("depth", [0, 1, 2, 3])
def test_no_release_of_an_optimizer_built_by_hand_holds_an_example_twice(depth) -> None:
    """Its memory manager's pieces have names, whatever the loop does with them; some batches are pieces as they are."""
    data, updates = TensorDataset(*_examples(range(EXAMPLES))), 0
    for seed in range(40):
        chance, loop = random.Random(seed), _Loop(by_hand=True)
        loader = DPDataLoader(data, sample_rate=chance.choice([0.2, 0.4]), seed=seed)
        size = chance.randint(1, 4)
        changed = (lambda x: x.clone()) if chance.random() < 0.3 else (lambda x: x)
        wrong = 0.0 if chance.random() < 0.3 else 0.1
        manager = BatchMemoryManager(data_loader=loader, max_physical_batch_size=size, optimizer=loop.optimizer)
        with contextlib.suppress(PrivacyError), manager as pieces:
            for _ in range(3):
                for x, y in _ahead(((piece, None) for piece in pieces), lambda _: None, depth):
                    what = chance.random()
                    if what < wrong / 3:
                        break
                    for _ in range(chance.choice([0, 2]) if what < wrong else 1):
                        loop.train(changed(x), y)
        assert loop.most <= 1 + 1e-6, seed
        updates += len(loop.updates)
    assert updates > 40


def _nested(loop, pieces, chance):
    for piece in pieces:
        loop.train(*piece)
        if chance.random() < 0.3:
            loop.train(*next(iter(pieces)))


def _twice(loop, pieces, chance):
    for piece in pieces:
        for _ in range(chance.choice([1, 1, 2])):
            loop.train(*piece)


def _fetched_ahead(loop, pieces, chance):
    depth, drawn = chance.randint(1, 3), deque()
    for piece in itertools.chain(pieces, [None] * 3):
        drawn.append(piece)
        if len(drawn) > depth and (now := drawn.popleft()) is not None:
            loop.train(*now)


def _whole_batch_within(loop, pieces, chance):
    for piece in pieces:
        loop.train(*piece)
        if chance.random() < 0.3:
            loop.train(*next(iter(loop.loader)))


def _left_and_begun_again(loop, pieces, chance):
    for _ in range(3):
        for piece in pieces:
            loop.train(*piece)
            if chance.random() < 0.2:
                break


def _left_out(loop, pieces, chance):
    for piece in pieces:
        if chance.random() < 0.8:
            loop.train(*piece)


def _in_two_halves(loop, pieces, chance):
    for x, y in pieces:
        for half in (slice(0, None, 2), slice(1, None, 2)):
            loop.train(x[half], y[half])


def _goes_on_after_errors(loop, pieces, chance):
    for piece in pieces:
        try:
            _twice(loop, [piece], chance)
        except PrivacyError:
            continue


@pytest.mark.parametrize("check_batches", [True, False])
@pytest.mark.parametrize("how", ["manager", "make_private", "auto"])
@pytest.mark.parametrize(
    "body",
    [
        _nested,
        _twice,
        _fetched_ahead,
        _whole_batch_within,
        _left_and_begun_again,
        _left_out,
        _in_two_halves,
        _goes_on_after_errors,
    ],
)
def test_no_release_holds_an_example_twice(body, how, check_batches) -> None:
    """next(iter(loader)) within a loop, and two updates on a piece, made 2 C."""
    for seed in range(3):
        options = {"max_physical_batch_size": {"make_private": 2, "auto": "auto"}.get(how)}
        loop = _Loop(by_hand=False, seed=seed, check_batches=check_batches, **options)
        pieces = loop.loader
        if how == "manager":
            manager = BatchMemoryManager(data_loader=pieces, max_physical_batch_size=2, optimizer=loop.optimizer)
            pieces = manager.__enter__()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with contextlib.suppress(PrivacyError):
                body(loop, pieces, random.Random(seed))
        assert loop.most <= 1 + 1e-6
        assert sum(steps for *_, steps in loop.engine.accountant.history) == len(loop.updates)


def test_the_remedy_for_nested_loops_works() -> None:
    """Whole batches may be fetched within a loop, and pieces where no batch goes on."""
    loop = _Loop(by_hand=False)
    for batch in loop.loader:
        loop.train(*batch)
        loop.train(*next(iter(loop.loader)))
    assert len(loop.updates) == 4 and loop.most <= 1 + 1e-6
    loop = _Loop(by_hand=False, max_physical_batch_size=2)
    for piece in loop.loader:
        loop.train(*piece)
        if not loop.optimizer.batch_goes_on:
            for inner in loop.loader:
                loop.train(*inner)
                if not loop.optimizer.batch_goes_on:
                    break
    assert len(loop.updates) == 4 and loop.most <= 1 + 1e-6


def test_a_second_update_on_a_piece_is_one_sentence() -> None:
    loop = _Loop(by_hand=False, max_physical_batch_size=2)
    it = iter(loop.loader)
    piece = next(it)
    loop.train(*piece)
    with pytest.raises(PrivacyError, match=r"called again on a piece.*draw a fresh batch"):
        loop.train(*piece)
    with pytest.raises(PrivacyError, match=r"first pieces were dropped.*batch_goes_on is False"):
        loop.train(*next(it))
    assert not loop.updates


@pytest.mark.parametrize("by_hand", [True, False])
@pytest.mark.parametrize("depth", [1, 2, 3, "blocks"])
def test_a_managers_pieces_may_be_drawn_ahead(depth, by_hand) -> None:
    """By a loader that prefetches, or in blocks: updates are those of whole batches."""
    updates = []
    for ahead in (0, depth):
        loop = _Loop(by_hand, batch_size=4)
        if by_hand:
            loop.loader = DPDataLoader(TensorDataset(*_examples(range(EXAMPLES))), sample_rate=0.25, seed=5)
        with BatchMemoryManager(data_loader=loop.loader, max_physical_batch_size=2, optimizer=loop.optimizer) as pieces:
            for _ in range(2):
                if ahead == "blocks":
                    drawn = iter(pieces)
                    while block := list(itertools.islice(drawn, 3)):
                        for piece in block:
                            loop.train(*piece)
                    continue
                for piece in _ahead(((piece, None) for piece in pieces), lambda _: None, ahead):
                    loop.train(*piece)
        updates.append(loop.updates)
    assert len(updates[0]) == len(updates[1]) > 4
    for a, b in zip(*updates, strict=True):
        torch.testing.assert_close(a, b)
    assert max(float(update.max()) for update in updates[1]) <= 1 + 1e-6


@pytest.mark.parametrize("times", [0, 2])
@pytest.mark.parametrize("depth", [1, 3])
def test_pieces_drawn_ahead_are_told_by_their_tensors(depth, times) -> None:
    """A piece that is left out, or used twice, is refused wherever it stands: also the first and the last ones."""
    for wrong in range(6):
        loop, refused = _Loop(by_hand=True), False
        loader = DataLoader(TensorDataset(*_examples(range(EXAMPLES))), batch_size=6)
        manager = BatchMemoryManager(data_loader=loader, max_physical_batch_size=2, optimizer=loop.optimizer)
        with manager as pieces:
            try:
                for k, piece in enumerate(_ahead(((piece, None) for piece in pieces), lambda _: None, depth)):
                    for _ in range(times if k == wrong else 1):
                        loop.train(*piece)
            except PrivacyError:
                refused = True
        assert loop.most <= 1 + 1e-6
        assert refused or wrong == 5  # the last: then the batch has no end, or an update of its own follows it
