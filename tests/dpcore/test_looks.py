"""What dpcore learns of a model before it trains it: on which batches it looks, when it looks again, what it leaves."""

from __future__ import annotations

import copy
import dataclasses
import os
import subprocess
import sys
from collections import UserDict

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from dpcore import Engine, PrivacyEngine
from dpcore.errors import PrivacyError, UnsupportedError
from dpcore.grad_sample import GradSampleModule

pytestmark = pytest.mark.filterwarnings("ignore:poisson_sampling=False")

LENGTH = 8
BOUND = 0.5
RATE = 1.0


def clipped(model, x, y, bound=BOUND):
    """Σ_i min(1, C/|g_i|) g_i by one example at a time, in float64; None is no gradient."""
    model, parts = copy.deepcopy(model).double(), []
    for i in range(len(y)):
        loss = F.cross_entropy(model(x[i : i + 1].double()), y[i : i + 1])
        parts.append(torch.autograd.grad(loss, list(model.parameters()), allow_unused=True, materialize_grads=True))
    factors = [min(1.0, bound / float(sum(g.square().sum() for g in part)) ** 0.5) for part in parts]
    return [sum(f * part[k] for f, part in zip(factors, parts, strict=True)) for k in range(len(parts[0]))]


def training_step(model, batch, way):
    """(a step of the model, the loader) by the two lines, by hooks or by an Engine; no noise, and a rate of 1."""
    torch.manual_seed(1)
    data = TensorDataset(torch.randn(3 * batch, LENGTH, 6), torch.randint(0, 3, (3 * batch,)))
    loader, optimizer = DataLoader(data, batch_size=batch), torch.optim.SGD(model.parameters(), lr=RATE)
    if way == "engine":
        options = {"max_grad_norm": BOUND, "expected_batch_size": batch, "optimizer": optimizer}
        engine = Engine(model, lambda outputs, y: F.cross_entropy(outputs, y, reduction="none"), **options)
        return engine.step, loader
    options = {"noise_multiplier": 0.0, "max_grad_norm": BOUND, "poisson_sampling": False, "wrap_model": way == "lines"}
    private, optimizer, loader = PrivacyEngine().make_private(
        module=model, optimizer=optimizer, data_loader=loader, **options
    )
    called = private if way == "lines" else model

    def step(x, y):
        optimizer.zero_grad()
        F.cross_entropy(called(x), y).backward()
        optimizer.step()

    return step, loader


# ---- parts that run for the first time in a later batch


class Late(nn.Module):
    """``use(self, hidden [B, T, d])`` runs once ``epoch`` is 1."""

    def __init__(self, use, extra=None):
        super().__init__()
        self.body, self.head, self.extra = nn.Linear(6, LENGTH), nn.Linear(LENGTH, 3), extra
        self.table = nn.Parameter(torch.randn(LENGTH, LENGTH))
        self.use, self.epoch = use, 0

    def forward(self, x):
        h = torch.tanh(self.body(x))
        return self.head((self.use(self, h) if self.epoch else h).mean(1))


def _extra(model, h):
    return model.extra(h)


def _time_first(model, h):
    return model.extra(h.transpose(0, 1)).transpose(0, 1)


def _expert(model, h):
    chosen, out = h[:, 0, 0] > 0, h.clone()
    if chosen.any():
        out[chosen] = model.extra(h[chosen])
    return out


LATE = {
    "linear": lambda: Late(_extra, nn.Linear(LENGTH, LENGTH)),
    "norm": lambda: Late(_extra, nn.LayerNorm(LENGTH)),
    "rms norm": lambda: Late(_extra, nn.RMSNorm(LENGTH)),
    "prelu": lambda: Late(_extra, nn.PReLU()),
    "norm of [T, B, d]": lambda: Late(_time_first, nn.LayerNorm(LENGTH)),
    "transformer of [T, B, d]": lambda: Late(_time_first, nn.TransformerEncoderLayer(LENGTH, 2, 16, dropout=0.0)),
    "recurrence of [T, B, d]": lambda: Late(
        lambda m, h: m.extra(h.transpose(0, 1))[0].transpose(0, 1), nn.GRU(LENGTH, LENGTH)
    ),
    "convolution and group norm": lambda: Late(
        _extra, nn.Sequential(nn.Conv1d(LENGTH, LENGTH, 3, padding=1), nn.GroupNorm(2, LENGTH))
    ),
    "positions": lambda: Late(lambda m, h: h + m.extra(torch.arange(h.shape[1])), nn.Embedding(LENGTH, LENGTH)),
    "a parameter that is added": lambda: Late(lambda m, h: h + m.table),
    "a parameter without a rule": lambda: Late(lambda m, h: torch.cdist(h, m.table)),
    "a computed weight": lambda: Late(_extra, nn.utils.parametrizations.weight_norm(nn.Linear(LENGTH, LENGTH))),
    "under a checkpoint": lambda: Late(
        lambda m, h: checkpoint(m.extra, h, use_reentrant=False), nn.Linear(LENGTH, LENGTH)
    ),
    "for some examples": lambda: Late(_expert, nn.Linear(LENGTH, LENGTH)),
    "a known layer on [T, B, d]": lambda: Late(
        lambda m, h: h + torch.tanh(F.linear(m.head(h.transpose(0, 1)), m.head.weight.t())).transpose(0, 1)
    ),
}


@pytest.mark.parametrize("batch", [LENGTH, LENGTH + 1])
@pytest.mark.parametrize("name", LATE)
def test_a_part_that_first_runs_later_is_trained(name, batch):
    for way in ("lines", "engine") if name in ("norm", "a parameter without a rule") else ("lines",):
        torch.manual_seed(0)
        model = LATE[name]()
        step, loader = training_step(model, batch, way)
        for model.epoch in (0, 1):
            for x, y in loader:
                before = [p.detach().double() for p in copy.deepcopy(model).parameters()]
                expected = clipped(model, x, y)
                step(x, y)
                for p, old, summed in zip(model.parameters(), before, expected, strict=True):
                    torch.testing.assert_close((old - p.detach()) * batch / RATE, summed, rtol=1e-3, atol=1e-4)


def test_a_model_that_goes_by_the_number_of_its_calls_is_trained():
    """Looks and experiments are several calls, each of which is to be the next one: this was refused."""

    class Counting(Late):
        def forward(self, x):
            self.calls += 1
            self.epoch = self.calls > 1
            return super().forward(x)

    model = Counting(_extra, nn.Linear(LENGTH, LENGTH))
    model.calls, before = 0, model.extra.weight.detach().clone()
    step, loader = training_step(model, LENGTH, "lines")
    for call, batch in enumerate(loader, 1):
        step(*batch)
        assert model.calls == call and (call > 1) != torch.equal(model.extra.weight, before)


@pytest.mark.parametrize("way", ["lines", "hooks", "engine"])
def test_a_part_that_first_runs_later_and_mixes_examples_is_refused(way):
    model = Late(lambda m, h: m.extra(h - h.mean(0)), nn.Linear(LENGTH, LENGTH))
    step, loader = training_step(model, LENGTH, way)
    for x, y in loader:
        step(x, y)
    model.epoch = 1
    with pytest.raises(PrivacyError, match="mixes the examples"):
        step(x, y)


class Dropped(nn.Module):
    """Layers of which each pass takes some, by chance."""

    def __init__(self, chance):
        super().__init__()
        self.body, self.head, self.chance = nn.Linear(6, LENGTH), nn.Linear(LENGTH, 3), chance
        self.layers = nn.ModuleList(nn.Sequential(nn.LayerNorm(LENGTH), nn.Linear(LENGTH, LENGTH)) for _ in range(4))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        h = F.dropout(torch.tanh(self.body(x)), 0.1)
        for layer in self.layers:
            h = h + layer(h) if torch.rand([]) < self.chance else h
        return self.head(h.mean(1))


@pytest.mark.parametrize("chance", [0.9, 0.1])
def test_layers_that_chance_leaves_out_are_trained_and_nothing_else_moves(chance):
    torch.manual_seed(0)
    model = Dropped(chance)
    bare = copy.deepcopy(model)
    step, loader = training_step(model, LENGTH, "lines")
    for number, (x, y) in enumerate(loader):
        bare.load_state_dict(model.state_dict())
        bare.zero_grad()
        numbers = torch.get_rng_state()
        F.cross_entropy(bare(x), y).backward()  # the user's own numbers: looks and experiments have drawn none of them
        after, (before,) = torch.get_rng_state(), [[p.detach().clone() for p in model.parameters()]]
        torch.set_rng_state(numbers)
        step(x, y)
        assert torch.equal(torch.get_rng_state(), after)
        assert model.calls == number + 1
        for p, q, old in zip(model.parameters(), bare.parameters(), before, strict=True):
            if q.grad is None:
                assert torch.equal(p, old), "a layer that did not run has moved"


# ---- what a look leaves behind


@dataclasses.dataclass(eq=False)
class Cache:
    mask: torch.Tensor | None = None
    shapes: list = dataclasses.field(default_factory=list)


def _registers_a_hook(model, x):
    if not hasattr(model, "hooked"):
        model.hooked = model.body.register_forward_hook(lambda *_: model.seen.append(1))
    return x


def _registers_a_buffer(model, x):
    if not hasattr(model, "mask"):
        model.register_buffer("mask", torch.ones(len(x), 1, 1))
    return x * model.mask


def _fills_a_cache(model, x):
    if model.cache.mask is None:
        model.cache.mask = torch.ones(len(x), 1, 1)
        model.cache.shapes.append(x.shape)
    return x * model.cache.mask


class First(nn.Module):
    def __init__(self, at_first):
        super().__init__()
        self.body, self.head = nn.Linear(6, 8), nn.Linear(8, 3)
        self.at_first, self.seen, self.cache = at_first, [], Cache()

    def forward(self, x):
        return self.head(torch.tanh(self.body(self.at_first(self, x))).mean(1))


@pytest.mark.parametrize("at_first", [_registers_a_hook, _registers_a_buffer, _fills_a_cache])
def test_what_a_model_does_at_its_first_call_is_done_in_the_users_own(at_first):
    model = First(at_first)
    step, loader = training_step(model, LENGTH, "lines")
    for x, y in loader:
        step(x, y)
    if at_first is _registers_a_hook:
        assert (len(model.body._forward_hooks), len(model.seen)) == (1, len(loader))
    elif at_first is _registers_a_buffer:
        assert len(model.mask) == LENGTH
    else:
        assert len(model.cache.mask) == LENGTH and len(model.cache.shapes) == 1


def test_a_hook_that_removes_itself_sees_the_users_first_call():
    model, seen = First(lambda m, x: x), []

    def once(module, args, kwargs, output):
        seen.append(len(output))
        handle.remove()

    handle = model.body.register_forward_hook(once, with_kwargs=True)
    step, loader = training_step(model, LENGTH, "lines")
    for x, y in loader:
        step(x, y)
    assert seen == [LENGTH] and not model.body._forward_hooks


# ---- batches of which no copies can be made


class Encoding(UserDict):
    """As transformers.BatchEncoding."""


class Using(nn.Module):
    def __init__(self, use):
        super().__init__()
        self.body, self.head, self.use = nn.Linear(6, 6), nn.Linear(6, 3), use

    def forward(self, *inputs):
        return self.head(self.use(self.body, *inputs))


def _by_lengths(body, lengths, tokens):
    return torch.stack([torch.tanh(body(row)).mean(0) for row in tokens.split(lengths.tolist())])


def _over_edges(body, x, edges):
    h = x.flatten(0, 1)
    return torch.tanh(body(h.index_add(0, edges[0], h[edges[1]]))).view(x.shape).mean(1)


ROWS = torch.randn(16, 4, 6, generator=torch.Generator().manual_seed(0))
INPUTS = {
    "a list of targets": (
        lambda body, x, targets: torch.tanh(body(x)).mean(1) * torch.stack([t["weight"] for t in targets])[:, None],
        lambda k: (ROWS[k], [{"weight": 1 + ROWS[i, 0, 0]} for i in k]),
    ),
    "a list of names": (
        lambda body, x, names: torch.tanh(body(x)).mean(1) * torch.tensor([float(n) for n in names])[:, None],
        lambda k: (ROWS[k], [str(i / 16) for i in k]),
    ),
    "a mapping": (lambda body, of: torch.tanh(body(of["x"])).mean(1), lambda k: (Encoding(x=ROWS[k]),)),
    "edges before the layers": (
        lambda body, x, edges: torch.tanh(body(_over_edges(lambda h: h.atanh(), x, edges)[:, None])).mean(1),
        lambda k: (ROWS[k] / 9, torch.arange(4 * len(k)).repeat(2, 1)),
    ),
    "edges": (_over_edges, lambda k: (ROWS[k], torch.arange(4 * len(k)).roll(1).repeat(2, 1))),
    "flat tokens": (
        _by_lengths,
        lambda k: (torch.tensor([2 + i % 3 for i in k]), torch.cat([ROWS[i, : 2 + i % 3] for i in k])),
    ),
}


REFUSED = {name: "not all of one row, or one entry of a list, per example" for name in ("edges", "flat tokens")}


@pytest.mark.parametrize("name", INPUTS)
def test_inputs_of_which_no_copies_can_be_made_are_trained_or_refused_in_words(name):
    use, collate = INPUTS[name]
    torch.manual_seed(0)
    model, batch = Using(use), 5
    reference = copy.deepcopy(model).double()
    private, optimizer, loader = PrivacyEngine().make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=RATE),
        data_loader=DataLoader(range(10), batch, collate_fn=collate),
        noise_multiplier=0.0,
        max_grad_norm=BOUND,
        poisson_sampling=False,
    )
    inputs = next(iter(loader))
    try:
        private(*inputs).square().mean().backward()
        optimizer.step()
    except UnsupportedError as refusal:
        assert name in REFUSED and REFUSED[name] in str(refusal)
        return
    assert name not in REFUSED
    total = None
    for i in range(batch):
        loss = reference(*map(_doubled, collate([i]))).square().mean()
        grads = torch.autograd.grad(loss, list(reference.parameters()))
        factor = min(1.0, BOUND / float(sum(g.square().sum() for g in grads)) ** 0.5)
        total = [factor * g + (0 if total is None else total[k]) for k, g in enumerate(grads)]
    for p, q, summed in zip(model.parameters(), reference.parameters(), total, strict=True):
        torch.testing.assert_close((q.detach() - p.detach()) * batch / RATE, summed, rtol=1e-3, atol=1e-4)


def _doubled(value):
    if isinstance(value, Encoding):
        return Encoding({name: part.double() for name, part in value.items()})
    return value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value


EDGES = torch.arange(4 * 17).repeat(2, 1)


@pytest.mark.parametrize("mixes", [False, True])
def test_a_model_that_takes_whole_batches_alone_is_checked_by_gradients_between_rows(mixes):
    def use(body, x, edges):
        h = torch.tanh(body(_over_edges(torch.nn.Identity(), x, edges)))
        return h - h.mean(0) if mixes else h

    private, optimizer, loader = PrivacyEngine().make_private(
        module=(model := Using(use)),
        optimizer=torch.optim.SGD(model.parameters(), lr=RATE),
        data_loader=DataLoader(range(17), 17, collate_fn=lambda k: (ROWS[:1].repeat(17, 1, 1), EDGES)),
        noise_multiplier=1.0,
        max_grad_norm=BOUND,
        poisson_sampling=False,
    )
    (inputs,) = loader
    if mixes:
        with pytest.warns(UserWarning, match="one row per example"), pytest.raises(PrivacyError, match="mixes"):
            private(*inputs)
        return
    with pytest.warns(UserWarning, match="only the gradients between rows"):
        private(*inputs).square().mean().backward()
    optimizer.step()


def test_an_error_of_the_models_own_is_shown_as_it_is():
    model = Using(lambda body, x: torch.tanh(body(x)).mean(1) @ torch.zeros(5, 6))
    private, _, loader = PrivacyEngine().make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=RATE),
        data_loader=DataLoader(range(10), 5, collate_fn=lambda k: (ROWS[k],)),
        noise_multiplier=1.0,
        max_grad_norm=BOUND,
    )
    with pytest.raises(RuntimeError, match="mat1 and mat2 shapes cannot be multiplied"):
        for inputs in loader:
            private(*inputs)


# ---- large examples

VOLUMES = """
import re, torch
from torch import nn
from dpcore.microbatch.layout import Layout
from dpcore.microbatch.looks import looks
from dpcore.rerun.heap import give_back

def megabytes(field):
    return int(re.search(field + r":\\s+(\\d+)", open("/proc/self/status").read())[1]) / 1024

def peak(work):
    give_back()
    open("/proc/self/clear_refs", "w").write("5")
    before = megabytes("VmRSS")
    work()
    return megabytes("VmHWM") - before

torch.set_num_threads(1)
convolutions = (nn.Conv3d(1, 16, 3, padding=1), *(nn.Conv3d(16, 16, 3, padding=1) for _ in range(5)))
layers = [layer for c in convolutions for layer in (c, nn.GroupNorm(4, 16), nn.LeakyReLU())]
model, x = nn.Sequential(*layers, nn.Conv3d(16, 2, 1)), torch.randn(1, 1, 36, 36, 36)
names, layout = {p: n for n, p in model.named_parameters()}, Layout(model, {})
model(x).sum().backward()  # what torch itself loads
print(peak(lambda: layout.learn(names, *looks(model, model, x, 1))), peak(lambda: model(x).sum().backward()))
"""


@pytest.mark.skipif(not os.path.exists("/proc/self/clear_refs"), reason="asks Linux for the peak")
def test_a_look_at_large_examples_takes_no_more_memory_than_ordinary_training():
    # The kernel may count a page that was given back: what one of three processes can do with less, all can.
    for _ in range(3):
        done = subprocess.run([sys.executable, "-c", VOLUMES], capture_output=True, text=True, check=True)
        look, training = map(float, done.stdout.split())
        if look < 1.2 * training:
            break
    assert look < 1.2 * training


def test_a_constant_before_the_examples_is_told_with_its_remedy():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(6, 3)

        def forward(self, given):
            return self.linear(given["x"] * given["scale"]).mean(1)

    x, scale = torch.randn(4, 3, 6), torch.ones(6)
    private = GradSampleModule(Scaled())
    with pytest.raises(RuntimeError) as found:
        private({"scale": scale, "x": x})
    assert "put one [B, ...] first" in found.value.__notes__[-1]
    assert private({"x": x, "scale": scale}).shape == (4, 3)
