"""The two-line use: gradients, noise, accounting, virtual steps, checkpoints and refusals."""

from __future__ import annotations

import copy
import gc
import warnings

import pytest
import torch
from scipy import stats
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import dpcore
from dpcore import PrivacyEngine, PrivacyError, reference
from dpcore.noise import SecureNoise
from dpcore.utils.batch_memory_manager import BatchMemoryManager
from dpcore.validators import ModuleValidator
from tests.dpcore.comparison import relative_error


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 3, 3), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(48, 8), nn.Tanh(), nn.Linear(8, 3)
    ).double()


def _data(n: int = 60) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(n, 1, 6, 6, dtype=torch.float64, generator=generator), torch.arange(n) % 3)


def _private(
    sigma: float = 0.0,
    clip: float = 0.5,
    model: nn.Module | None = None,
    engine: PrivacyEngine | None = None,
    **options,
):
    model = _model() if model is None else model
    engine = PrivacyEngine(seed=7) if engine is None else engine
    return engine, *engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5),
        data_loader=DataLoader(_data(), batch_size=10),
        noise_multiplier=sigma,
        max_grad_norm=clip,
        **{"sample_rate": 1 / 6, "expected_batch_size": 10, "check_batches": False} | options,
    )


def _loss(outputs, y):
    return F.cross_entropy(outputs, y, reduction="none")


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_an_ordinary_loop_gets_the_clipped_mean(reduction):
    _, model, optimizer, loader = _private(loss_reduction=reduction)
    for x, y in loader:
        truth = reference.clipped_sum(copy.deepcopy(model._module), _loss, x, y, 0.5)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y, reduction=reduction).backward()
        assert all(p.grad is None for p in model.parameters())
        optimizer.step()
        divisor = 10 if reduction == "mean" else 1
        expected = {f"_module.{n}": g / divisor for n, g in truth.clipped.items()}
        assert relative_error({n: p.grad for n, p in model.named_parameters()}, expected) < 1e-12


def test_every_step_is_accounted_for_and_a_target_budget_is_kept():
    engine = PrivacyEngine(seed=3)
    model = _model()
    model, optimizer, loader = engine.make_private_with_epsilon(
        module=model,
        optimizer=torch.optim.Adam(model.parameters()),
        data_loader=DataLoader(_data(), batch_size=10),
        target_epsilon=3.0,
        target_delta=1e-3,
        epochs=2,
        max_grad_norm=1.0,
        sample_rate=1 / 6,
        expected_batch_size=10,
    )
    assert len(loader) == 6
    for _ in range(2):
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
    assert engine.accountant.history == [(optimizer.noise_multiplier, 1 / 6, 12)]
    assert 2.99 < engine.get_epsilon(1e-3) <= 3.0


def test_noise_has_the_deviation_of_sigma_times_c_over_the_divisor():
    _, model, optimizer, _ = _private(sigma=2.0)
    draws = []
    for _ in range(60):
        optimizer.zero_grad()
        model(torch.zeros(0, 1, 6, 6, dtype=torch.float64)).sum().backward()
        optimizer.step()
        draws.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    drawn = torch.stack(draws)
    assert stats.kstest(drawn.flatten() / (2.0 * 0.5 / 10), "norm").pvalue > 1e-4
    assert len({float(row[0]) for row in drawn}) == 60


def test_pieces_equal_the_whole_batch():
    runs = []
    for size in (100, 4, 1):
        engine, model, optimizer, loader = _private(sigma=1.0)
        with BatchMemoryManager(data_loader=loader, max_physical_batch_size=size, optimizer=optimizer) as pieces:
            for x, y in pieces:
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
                assert len(x) <= size
        assert engine.accountant.history == [(1.0, 1 / 6, 6)]
        runs.append({n: p.detach().clone() for n, p in model.named_parameters()})
    assert relative_error(runs[1], runs[0]) < 1e-12
    assert relative_error(runs[2], runs[0]) < 1e-12


def test_an_abandoned_loop_over_pieces_leaves_nothing_behind():
    _, model, optimizer, loader = _private()
    with BatchMemoryManager(data_loader=loader, max_physical_batch_size=1, optimizer=optimizer) as pieces:
        for x, y in pieces:
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            break
    assert optimizer.steps == 0
    x, y = _data()[:4]
    truth = reference.clipped_sum(copy.deepcopy(model._module), _loss, x, y, 0.5)
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    expected = {f"_module.{n}": g / 10 for n, g in truth.clipped.items()}
    assert relative_error({n: p.grad for n, p in model.named_parameters()}, expected) < 1e-12


def test_accumulated_batches_are_averaged_and_accounted_for_soundly():
    engine, model, optimizer, _ = _private(sigma=0.5)
    for start in (0, 5):
        x, y = _data()[start : start + 5]
        F.cross_entropy(model(x), y).backward()
    optimizer.step()
    assert engine.accountant.history == [(pytest.approx(0.5 / 2**0.5), 1 / 6, 2)]
    engine, model, optimizer, _ = _private()
    sums = {}
    for start in (0, 5):
        x, y = _data()[start : start + 5]
        for n, g in reference.clipped_sum(copy.deepcopy(model._module), _loss, x, y, 0.5).clipped.items():
            sums[f"_module.{n}"] = sums.get(f"_module.{n}", 0) + g / 20
        F.cross_entropy(model(x), y).backward()
    optimizer.step()
    assert relative_error({n: p.grad for n, p in model.named_parameters()}, sums) < 1e-12


def test_two_forward_passes_of_one_loss_are_one_gradient_per_example():
    _, model, optimizer, _ = _private()
    x, y = _data()[:5]

    class Twice(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, x):
            return self.inner(x) * self.inner(2 * x).tanh()

    truth = reference.clipped_sum(Twice(copy.deepcopy(model._module)), _loss, x, y, 0.5)
    F.cross_entropy(model(x) * model(2 * x).tanh(), y).backward()
    optimizer.step()
    expected = {n.replace("inner", "_module"): g / 10 for n, g in truth.clipped.items()}
    assert relative_error({n: p.grad for n, p in model.named_parameters()}, expected) < 1e-12


def test_two_forward_passes_with_a_loss_each_are_two_batches():
    _, model, optimizer, _ = _private()
    batches = [_data()[:5], _data()[5:10]]
    sums = {}
    for x, y in batches:
        for n, g in reference.clipped_sum(copy.deepcopy(model._module), _loss, x, y, 0.5).clipped.items():
            sums[f"_module.{n}"] = sums.get(f"_module.{n}", 0) + g / 20
    losses = [F.cross_entropy(model(x), y) for x, y in batches]
    gc.collect()
    for loss in losses:
        loss.backward()
        gc.collect()
    optimizer.step()
    assert relative_error({n: p.grad for n, p in model.named_parameters()}, sums) < 1e-12


class Scaled(nn.Module):
    """No rule: by vmap."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3).double())

    def forward(self, x):
        return x * self.scale.cumsum(0)


@pytest.mark.parametrize("ruled", [True, False])
@pytest.mark.parametrize("read", [True, False])
def test_two_backward_passes_through_one_forward_pass_add_up_though_grad_sample_is_read_between(read, ruled):
    """What was read took the place of what was recorded: the second pass was lost, and no one told."""
    _, model, optimizer, _ = _private(model=_model() if ruled else _model().append(Scaled()))
    x, y = _data()[:5]

    def both(outputs, y):
        return _loss(outputs, y) + outputs.exp().sum(1)

    truth = reference.clipped_sum(copy.deepcopy(model._module), both, x, y, 0.5)
    outputs = model(x)
    F.cross_entropy(outputs, y).backward(retain_graph=True)
    first = [p.grad_sample.clone() for p in model.parameters()] if read else []
    outputs.exp().sum(1).mean().backward()
    assert not any(torch.equal(p.grad_sample, before) for p, before in zip(model.parameters(), first, strict=read))
    optimizer.step()
    expected = {f"_module.{n}": g / 10 for n, g in truth.clipped.items()}
    assert relative_error({n: p.grad for n, p in model.named_parameters()}, expected) < 1e-12


def test_a_grad_sample_that_was_changed_between_two_backward_passes_is_refused():
    _, model, optimizer, _ = _private()
    x, y = _data()[:5]
    outputs = model(x)
    F.cross_entropy(outputs, y).backward(retain_graph=True)
    next(model.parameters()).grad_sample.mul_(2)
    outputs.exp().sum(1).mean().backward()
    with pytest.raises(PrivacyError, match="was changed, and then another backward pass"):
        optimizer.step()


def test_one_loss_through_batches_of_different_sizes_is_refused():
    _, model, _, _ = _private()
    (x, _), (z, _) = _data()[:5], _data()[:4]
    with pytest.raises(PrivacyError, match=r"batches of \[4, 5\]"):
        (model(x).sum() + model(z).sum()).backward()


def test_evaluation_between_steps_changes_nothing():
    _, model, optimizer, _ = _private()
    x, y = _data()[:5]
    model(x)
    model.eval()
    with torch.no_grad():
        model(x)
    model.train()
    truth = reference.clipped_sum(copy.deepcopy(model._module), _loss, x, y, 0.5)
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    expected = {f"_module.{n}": g / 10 for n, g in truth.clipped.items()}
    assert relative_error({n: p.grad for n, p in model.named_parameters()}, expected) < 1e-12


def _train(model, optimizer, loader, batches):
    for k, (x, y) in enumerate(loader):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        if k + 1 == batches:
            return


def test_a_resumed_run_equals_the_uninterrupted_one_bit_for_bit(tmp_path):
    whole = _private(sigma=1.0)
    _train(*whole[1:], 6)
    first = _private(sigma=1.0)
    _train(*first[1:], 3)
    engine, model, optimizer, loader = first
    engine.save_checkpoint(path=tmp_path / "c.pt", module=model, optimizer=optimizer, data_loader=loader)
    engine, model, optimizer, loader = second = _private(sigma=1.0, engine=PrivacyEngine(seed=99))
    engine.load_checkpoint(path=tmp_path / "c.pt", module=model, optimizer=optimizer, data_loader=loader)
    _train(*second[1:], 100)
    for a, b in zip(whole[1].parameters(), model.parameters(), strict=True):
        assert torch.equal(a, b)
    assert engine.accountant.history == whole[0].accountant.history
    other = _private(sigma=2.0)
    with pytest.raises(PrivacyError, match=r"noise_multiplier=1\.0"):
        other[0].load_checkpoint(path=tmp_path / "c.pt", module=other[1], optimizer=other[2], data_loader=other[3])


def test_per_layer_and_automatic_clipping():
    model = _model()
    count = len(list(model.parameters()))
    _, wrapped, optimizer, _ = _private(clip=[0.1] * count, clipping="per_layer", model=model)
    x, y = _data()[:5]
    F.cross_entropy(wrapped(x), y).backward()
    optimizer.clip_and_accumulate()
    assert all(float(p.summed_grad.norm()) <= 5 * 0.1 for p in model.parameters())
    assert any(float(p.summed_grad.norm()) > 0.1 for p in model.parameters())
    _, wrapped, optimizer, _ = _private(clipping="automatic")
    norms = reference.clipped_sum(copy.deepcopy(wrapped._module), _loss, x[:1], y[:1], 0.5).norms
    F.cross_entropy(wrapped(x[:1]), y[:1]).backward()
    optimizer.clip_and_accumulate()
    size = float(torch.cat([p.summed_grad.flatten() for p in wrapped.parameters()]).norm())
    assert size == pytest.approx(0.5 * float(norms[0]) / (float(norms[0]) + 0.01), rel=1e-9)


def test_a_learning_rate_scheduler_and_optimizer_state_work_as_before():
    _, model, optimizer, loader = _private()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    _train(model, optimizer, loader, 2)
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.05
    assert optimizer.state_dict()["state"]


def test_what_would_leak_is_refused():
    engine, model, optimizer, loader = _private()
    with pytest.raises(PrivacyError, match="no backward pass"):
        optimizer.step()
    F.mse_loss(model._module[3].weight, torch.ones(8, 48, dtype=torch.float64)).backward()
    x, y = _data()[:5]
    F.cross_entropy(model(x), y).backward()
    with pytest.raises(PrivacyError, match="unclipped gradient"):
        optimizer.step()
    _, model, optimizer, _ = _private()
    next(model.parameters()).requires_grad_(False)
    F.cross_entropy(model(x), y).backward()
    with pytest.raises(PrivacyError, match="frozen after"):
        optimizer.step()
    with pytest.raises(PrivacyError, match="not the module's"):
        engine.make_private(
            module=_model(),
            optimizer=torch.optim.SGD(_model().parameters(), lr=0.1),
            data_loader=DataLoader(_data(), batch_size=10),
            noise_multiplier=1.0,
            max_grad_norm=1.0,
        )
    with pytest.raises(PrivacyError, match="private already"):
        engine.make_private(
            module=model, optimizer=optimizer, data_loader=loader, noise_multiplier=1.0, max_grad_norm=1.0
        )
    with pytest.raises(dpcore.UnsupportedError, match="BatchNorm1d"):
        _private(model=nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)))
    with pytest.raises(ValueError, match="evaluation mode"):
        _private(model=_model().eval())
    with pytest.raises(ValueError, match="per_layer takes a list"):
        _private(clipping="per_layer")


def test_a_divisor_that_tells_what_the_rate_hides_is_warned_of():
    with pytest.warns(UserWarning, match="expected_batch_size was not given.*tells how many there are"):
        _private(expected_batch_size=None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _private(sigma=1.0)
        _private(sigma=1.0, sample_rate=None, expected_batch_size=None)


def test_the_validator_finds_and_fixes():
    bad = nn.Sequential(nn.Conv2d(3, 24, 3), nn.BatchNorm2d(24), nn.InstanceNorm2d(24, track_running_stats=True))
    assert len(ModuleValidator.validate(bad)) == 2
    assert not ModuleValidator.is_valid(bad)
    fixed = ModuleValidator.fix(bad)
    assert ModuleValidator.is_valid(fixed)
    assert isinstance(fixed[1], nn.GroupNorm) and fixed[1].num_groups == 8
    assert fixed(torch.randn(2, 3, 5, 5)).shape == (2, 24, 3, 3)
    for channels, groups in ((8, 4), (24, 8), (64, 32), (5, 1), (1, 1)):  # alone, a number of a vector would be zero
        assert ModuleValidator.fix(nn.BatchNorm1d(channels)).num_groups == groups


def test_secure_noise_is_normal_and_fresh():
    noise = SecureNoise()
    first = noise.add_(torch.ones(50_000), 2.0, 0)
    assert stats.kstest((first.double() - 1) / 2, "norm").pvalue > 1e-10  # it has no seed
    assert not torch.equal(first, noise.add_(torch.ones(50_000), 2.0, 0))
    _, model, optimizer, loader = _private(sigma=1.0, engine=PrivacyEngine(secure_mode=True))
    _train(model, optimizer, loader, 3)
    assert optimizer.steps == 3 and loader.sampler_state.secure
    with pytest.raises(ValueError, match="takes no seed"):
        PrivacyEngine(secure_mode=True, seed=1)
