"""Texts for people: no warning for an ordinary script, one for a likely mistake, objects that say what they are."""

from __future__ import annotations

import itertools
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from dpcore import (
    BudgetError,
    DPDataLoader,
    Engine,
    GradSampleModule,
    PrivacyEngine,
    PrivacyError,
    UnsupportedError,
    native,
)
from tests.dpcore.private_setup import small_data, small_model, step


def _private(engine=None, **options):
    model = small_model()
    settings = {
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "data_loader": DataLoader(small_data(), batch_size=10),
        "noise_multiplier": 1.0,
        "max_grad_norm": 0.5,
    }
    engine = PrivacyEngine(seed=1) if engine is None else engine
    return engine, *engine.make_private(**({"module": model} | settings | options))


def test_an_ordinary_script_is_not_warned():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine, model, optimizer, loader = _private()
        for x, y in loader:
            step(model, optimizer, x, y)
        assert engine.get_epsilon(1e-2) > 0


def test_a_delta_above_one_over_n_is_warned_of():
    engine = _private()[0]
    with pytest.warns(UserWarning, match=r"delta is 0\.1, above 1 / 60 .*Use 0\.01 or less"):
        engine.get_epsilon(0.1)
    with pytest.warns(UserWarning, match="above 1 / 60"):
        engine.set_budget(3.0, 0.1)
    with pytest.warns(UserWarning, match="above 1 / 60"):
        model = small_model()
        PrivacyEngine().make_private_with_epsilon(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            data_loader=DataLoader(small_data(), batch_size=10),
            target_epsilon=3.0,
            target_delta=0.1,
            epochs=1,
            max_grad_norm=1.0,
            enforce_budget=False,
        )


@pytest.mark.parametrize(("declared", "reduced"), [("mean", "sum"), ("sum", "mean"), ("mean", "mean"), ("sum", "sum")])
def test_a_loss_that_is_reduced_otherwise_than_declared_is_warned_of_once(declared, reduced):
    _, model, optimizer, loader = _private(loss_reduction=declared)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for x, y in itertools.islice(loader, 2):  # the third would be refused
            optimizer.zero_grad()
            F.cross_entropy(model(x), y, reduction=reduced).backward()
            optimizer.step()
    assert len(caught) == (declared != reduced)
    assert all(w.filename == __file__ and f"loss_reduction={reduced!r}" in str(w.message) for w in caught)


def test_a_module_that_returns_its_loss_is_trained():
    class Loss(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = small_model()

        def forward(self, x):
            return self.layers(x).square().mean()

    module = Loss()
    module, optimizer, loader = PrivacyEngine().make_private(
        module=module,
        optimizer=torch.optim.SGD(module.parameters(), lr=0.1),
        data_loader=DataLoader(small_data(), batch_size=10),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
    )
    module(next(iter(loader))[0]).backward()
    optimizer.step()
    assert optimizer.steps == 1


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("declared", ["mean", "sum"])
@pytest.mark.parametrize(
    ("loss", "known"),
    [
        (lambda z, y, **how: F.cross_entropy(z, y.argmax(1), **how), True),
        (F.binary_cross_entropy_with_logits, True),
        (F.mse_loss, True),
        (lambda z, y, reduction: getattr(torch, reduction)((z - y).abs().sum(1)), True),
        (lambda z, y, reduction: getattr(torch, reduction)((z - y).abs()) + z.square().mean(), False),
        (lambda z, y, reduction: 1e-3 * getattr(torch, reduction)((z - y).abs()), False),
    ],
)
def test_a_loss_that_is_reduced_otherwise_than_declared_is_warned_of(loss, known, declared, reduction):
    model = GradSampleModule(nn.Linear(6, 3), loss_reduction=declared)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for _ in range(3):
            loss(model(torch.randn(10, 6)), torch.rand(10, 3), reduction=reduction).backward()
    told = [str(w.message) for w in found if f"The loss is the {reduction} over the batch" in str(w.message)]
    assert len(told) == (known and declared != reduction)


def test_a_mean_by_the_gradient_that_backward_is_given_is_not_warned_of():
    losses = GradSampleModule(nn.Linear(6, 3))(torch.randn(10, 6)).square().sum(1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        losses.backward(torch.full((10,), 0.1))


@pytest.mark.parametrize("loss", ["softmax", "sigmoid"])
@pytest.mark.parametrize("divisor", [1, 2, 4])
def test_losses_that_are_divided_by_the_accumulated_batches_are_warned_of(loss, divisor):
    _, model, optimizer, loader = _private()
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for k, (x, y) in enumerate(loader, 1):
            outputs = model(x)
            whole = F.cross_entropy(outputs, y)
            if loss == "sigmoid":
                whole = F.binary_cross_entropy_with_logits(outputs, F.one_hot(y, outputs.shape[1]).to(outputs.dtype))
            (whole / divisor).backward()
            if k % 4 == 0:
                optimizer.step()
                optimizer.zero_grad()
    told = [
        str(w.message)
        for w in found
        if "accumulates 4 batches for a step and divides their losses by 4" in str(w.message)
    ]
    assert len(told) == (divisor == 4)


def test_clipping_the_ordinary_gradient_is_warned_of():
    _, model, optimizer, loader = _private()
    x, y = next(iter(loader))
    F.cross_entropy(model(x), y).backward()
    with pytest.warns(UserWarning, match="clip_grad_norm_ does nothing"):
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    with pytest.raises(UnsupportedError, match="clip_grad_value_ does nothing"):
        torch.nn.utils.clip_grad_value_(model.parameters(), 1.0)
    optimizer.step()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(list(model.parameters())) == 4


@pytest.mark.parametrize("name", ["noise_multiplier", "max_grad_norm", "sample_rate", "expected_batch_size"])
@pytest.mark.parametrize("value", ["1", float("nan"), -1, [[]]])
def test_what_is_no_number_is_named(name, value):
    with pytest.raises(ValueError, match=name):
        _private(**{name: value})


def test_a_misspelt_argument_is_that_of_make_private():
    with pytest.raises(TypeError, match=r"make_private\(\) takes no argument 'max_grad_nrom'.*mean 'max_grad_norm'"):
        _private(max_grad_nrom=1.0)
    with pytest.raises(TypeError, match="mean 'target_unclipped_quantile'"):
        _private(clipping="adaptive", target_quantile=0.5)


def test_a_batch_norm_is_quoted_with_its_remedy():
    model = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5))
    with pytest.raises(UnsupportedError, match=r"Module '1' is a BatchNorm1d.*from dpcore.validators import"):
        PrivacyEngine().make_private(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            data_loader=DataLoader(small_data(), batch_size=10),
            noise_multiplier=1.0,
            max_grad_norm=1.0,
        )


def test_a_mean_in_the_engine_names_the_users_batch():
    engine = Engine(nn.Linear(6, 3), F.cross_entropy)
    x, y = torch.randn(64, 6), torch.arange(64) % 3
    with pytest.raises(PrivacyError, match=r"shape \(\) for a piece of 16 examples of your batch of 64"):
        engine.clipped_sum(x, y)
    with pytest.raises(PrivacyError, match=r"shape \(\) for your batch of 3 examples"):
        engine.clipped_sum(x[:3], y[:3])


def test_a_penalty_that_the_model_returns_is_refused_with_its_remedy():
    class Penalised(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(6, 3)

        def forward(self, x):
            return self.layer(x), self.layer.weight.square().sum()

    model = Penalised().double()
    with pytest.raises(UnsupportedError, match=r"a single number from layer, a penalty.*weight_decay"):
        _, model, _, loader = _private(module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
        model(next(iter(loader))[0])


def test_objects_say_what_they_are():
    engine, model, optimizer, loader = _private()
    assert "no private step yet" in repr(engine) and "epsilon" not in repr(engine)
    for x, y in loader:
        step(model, optimizer, x, y)
    assert repr(engine.accountant) == "PLDAccountant(6 steps: 6 at noise 1, rate 0.166667)"
    start = f"PrivacyEngine(accountant={engine.accountant!r}, epsilon="
    said = repr(engine).removeprefix(start).split(" at ")[0]
    assert repr(engine).startswith(start) and len(said.replace(".", "").lstrip("0")) <= 3
    exact = engine.accountant.get_epsilon(0.01)
    assert exact <= float(said) < 1.01 * exact, "three digits, and never less than was spent"
    shown = f"{start}{said} at delta=0.01 (below 1 / 60 examples)"
    if native.available():
        assert (
            repr(engine).startswith(f"{shown}, kernels={native.description()}, whole batches")
            and "in use" in native.description()
        )
    with native.disabled():
        assert (
            repr(engine).startswith(f"{shown}, kernels={native.REMEDY}, ")
            and "python -m dpcore.native" in native.REMEDY
        )
    engine.set_budget(9.0, 1e-3)
    said = repr(engine).partition("epsilon=")[2]
    assert said.startswith(f"{float(said.split()[0]):g} at delta=0.001, budget=9")
    assert engine.get_epsilon(1e-3) <= float(said.split()[0])
    assert repr(loader) == (
        "DPDataLoader(60 examples, sample_rate=0.166667: about 10 a batch, 6 batches a round, 6 handed out)"
    )
    assert repr(optimizer).startswith(
        "DPOptimizer(noise_multiplier=1, max_grad_norm=0.5, expected_batch_size=10.0, steps=6, SGD"
    )
    engine = Engine(nn.Linear(6, 3), F.cross_entropy, noise_multiplier=1.1, expected_batch_size=64)
    assert repr(engine) == (
        "Engine(Linear, 2 trained parameters, max_grad_norm=1.0, noise_multiplier=1.1, expected_batch_size=64, "
        "optimizer=None, steps=0)"
    )
    assert issubclass(BudgetError, PrivacyError) and isinstance(loader, DPDataLoader)
