"""The dynamic probe and the schedules."""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dpcore import GradSampleModule, PrivacyEngine, PrivacyError, UnsupportedError
from dpcore.accountants import PLDAccountant
from dpcore.optimizers import DPOptimizer
from dpcore.schedulers import (
    ExponentialGradClip,
    ExponentialNoise,
    LambdaGradClip,
    LambdaNoise,
    StepGradClip,
    StepNoise,
    _GradClipScheduler,
    _NoiseScheduler,
)
from dpcore.validators import ModuleValidator, check_isolation, register_module_fixer, register_module_validator
from dpcore.validators.errors import IllegalModuleConfigurationError


class Centred(nn.Module):
    """Mixes examples, and is in no list of classes."""

    def forward(self, x):
        return x - x.mean(0)


class Counting(nn.Module):
    """Treats examples apart, but keeps their sum."""

    def __init__(self):
        super().__init__()
        self.register_buffer("total", torch.zeros(3))

    def forward(self, x):
        self.total += x.sum(0)
        return x


def test_the_probe_names_the_layer_that_mixes_examples():
    x = torch.randn(4, 3)
    with pytest.raises(PrivacyError, match=r"1 \(Centred\)"):
        check_isolation(nn.Sequential(nn.Linear(3, 3), Centred(), nn.Linear(3, 2)), x)
    with pytest.raises(PrivacyError, match="BatchNorm1d"):
        check_isolation(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3, affine=False)), x)
    counting = Counting()
    with pytest.raises(PrivacyError, match="buffer total"):
        check_isolation(counting, x)
    assert not counting.total.any()


def test_the_probe_lets_sound_modules_pass_and_leaves_them_alone():
    model = nn.Sequential(nn.Embedding(7, 4), nn.Flatten(), nn.Dropout(0.5), nn.LayerNorm(12), nn.Linear(12, 2))
    ids = torch.randint(0, 7, (4, 3))
    before = torch.get_rng_state()
    check_isolation(model, ids)
    assert torch.equal(before, torch.get_rng_state())
    check_isolation(nn.LSTM(3, 2, batch_first=True), torch.randn(4, 5, 3))
    check_isolation(nn.Bilinear(3, 3, 2), torch.randn(4, 3), torch.randn(4, 3))
    with pytest.raises(ValueError, match="at least 2"):
        check_isolation(nn.Linear(3, 2), torch.randn(1, 3))


def _optimizer(clip=2.0) -> DPOptimizer:
    model = nn.Linear(3, 2)
    return DPOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1),
        module=GradSampleModule(model),
        noise_multiplier=4.0,
        max_grad_norm=clip,
        expected_batch_size=4,
    )


@pytest.mark.parametrize(
    ("make", "attribute", "values"),
    [
        (lambda o: ExponentialNoise(o, gamma=0.5), "noise_multiplier", [4, 2, 1, 0.5]),
        (lambda o: StepNoise(o, step_size=2, gamma=0.5), "noise_multiplier", [4, 4, 2, 2]),
        (lambda o: LambdaNoise(o, noise_lambda=lambda k: 1 + k), "noise_multiplier", [4, 8, 12, 16]),
        (lambda o: ExponentialGradClip(o, gamma=0.5), "max_grad_norm", [2, 1, 0.5, 0.25]),
        (lambda o: StepGradClip(o, step_size=3, gamma=0.5), "max_grad_norm", [2, 2, 2, 1]),
        (lambda o: LambdaGradClip(o, scheduler_function=lambda k: 1 / (1 + k)), "max_grad_norm", [2, 1, 2 / 3, 0.5]),
    ],
)
def test_schedules(make, attribute, values):
    optimizer = _optimizer()
    scheduler = make(optimizer)
    seen = []
    for _ in values:
        seen.append(getattr(optimizer, attribute))
        scheduler.step()
    assert seen == pytest.approx(values)
    other = _optimizer()
    resumed = make(other)
    resumed.load_state_dict(scheduler.state_dict())
    assert getattr(other, attribute) == getattr(optimizer, attribute)


class _Halving(_NoiseScheduler):
    """Computes its value from the one before, as a schedule written for Opacus does."""

    def __init__(self, optimizer, last_epoch=-1):
        self.calls = 0
        super().__init__(optimizer, last_epoch=last_epoch)

    def get_noise_multiplier(self):
        self.calls += 1
        return self.optimizer.noise_multiplier * (0.5 if self.last_epoch else 1.0)


class _OwnClip(_GradClipScheduler):
    def get_max_grad_norm(self):
        return 1.0 / (1 + self.last_epoch)


def test_a_rule_of_ones_own_goes_on_where_it_was():
    scheduler = _Halving(_optimizer())
    scheduler.step()
    assert scheduler.optimizer.noise_multiplier == 2.0
    resumed = _Halving(_optimizer())
    resumed.optimizer.noise_multiplier = 2.0  # as load_checkpoint does
    resumed.load_state_dict(scheduler.state_dict())
    assert (resumed.optimizer.noise_multiplier, resumed.last_epoch, resumed.calls) == (2.0, 1, 2)
    resumed.step()
    assert resumed.optimizer.noise_multiplier == 1.0
    assert _Halving(_optimizer(), last_epoch=3).optimizer.noise_multiplier == 2.0
    assert _OwnClip(_optimizer(), last_epoch=3).optimizer.max_grad_norm == 0.2


@pytest.mark.parametrize(
    "make", [lambda o: ExponentialNoise(o, gamma=0.5), lambda o: StepNoise(o, step_size=1, gamma=0.5)]
)
def test_the_state_of_opacus_schedules_holds_no_initial_value(make):
    scheduler = make(_optimizer())
    scheduler.load_state_dict({"gamma": 0.5, "last_epoch": 2})
    assert scheduler.optimizer.noise_multiplier == 1.0


def test_the_accountant_and_the_clipping_follow_the_schedule():
    optimizer = _optimizer([0.3, 0.4])
    accountant = PLDAccountant()
    optimizer.attach_step_hook(accountant.get_optimizer_hook_fn(0.1))
    noise, clip = ExponentialNoise(optimizer, gamma=0.5), ExponentialGradClip(optimizer, gamma=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        (100 * optimizer.module(torch.randn(4, 3))).square().mean().backward()
        optimizer.clip_and_accumulate()
        bounds = optimizer.max_grad_norm
        sums = [float(p.summed_grad.norm()) for p in optimizer.module.parameters()]
        assert all(0 < s <= 4 * c for s, c in zip(sums, bounds, strict=True))
        optimizer.discard()
        optimizer.module(torch.zeros(0, 3)).sum().backward()
        optimizer.step()
        noise.step()
        clip.step()
    assert accountant.history == [(4.0, 0.1, 1), (2.0, 0.1, 1)]
    assert optimizer.max_grad_norm == pytest.approx([0.003, 0.004])
    with pytest.raises(ValueError, match="must be above 0"):
        LambdaNoise(optimizer, noise_lambda=lambda k: 0.0)


# ---- validators and fixers of the user's own


class Own(nn.Linear):
    """A layer that its author knows more about than dpcore does."""


class Derived(Own):
    """Of a class derived from a registered one, for which nothing was registered."""


@pytest.fixture
def registered(monkeypatch):
    """Registers, for one test, a validator and a fixer of :class:`Own`."""
    monkeypatch.setattr(ModuleValidator, "VALIDATORS", {})
    monkeypatch.setattr(ModuleValidator, "FIXERS", {})

    @register_module_validator(Own)
    def validate(module):
        return [] if module.bias is None else [IllegalModuleConfigurationError("Own must have no bias.")]

    @register_module_fixer([Own, nn.BatchNorm1d])
    def fix(module, **kwargs):
        if isinstance(module, nn.BatchNorm1d):
            return nn.LayerNorm(module.num_features)
        return Own(module.in_features, module.out_features, bias=False, **kwargs)

    return validate, fix


def test_a_registered_validator_is_asked_and_make_private_refuses(registered):
    module = nn.Sequential(nn.Linear(3, 3), nn.Sequential(Own(3, 3)))
    assert [str(error) for error in ModuleValidator.validate(module)] == ["Own must have no bias."]
    with pytest.raises(IllegalModuleConfigurationError, match="no bias"):
        ModuleValidator.validate(module, strict=True)
    with pytest.raises(IllegalModuleConfigurationError, match="no bias"):
        PrivacyEngine().make_private(
            module=module,
            optimizer=torch.optim.SGD(module.parameters(), lr=0.1),
            data_loader=DataLoader(TensorDataset(torch.zeros(8, 3)), batch_size=4),
            noise_multiplier=1.0,
            max_grad_norm=1.0,
        )
    assert ModuleValidator.is_valid(nn.Sequential(Derived(3, 3))), "of that very class only, as in Opacus"


def test_registered_fixers_replace_and_get_the_arguments(registered):
    shared = Own(3, 3)
    module = nn.Sequential(shared, nn.BatchNorm1d(3), nn.Sequential(shared), nn.BatchNorm2d(3)).eval()
    fixed = ModuleValidator.fix(module, dtype=torch.float64)
    assert module[0] is shared and shared.bias is not None, "the module itself stays as it is"
    assert fixed[0].bias is None and fixed[0].weight.dtype == torch.float64
    assert fixed[2][0] is fixed[0], "a layer that stands in two places is replaced in both, by one"
    assert isinstance(fixed[1], nn.LayerNorm) and isinstance(fixed[3], nn.GroupNorm)
    assert not any(part.training for part in fixed.modules())
    assert ModuleValidator.is_valid(fixed)
    assert isinstance(ModuleValidator.fix(nn.BatchNorm1d(3)), nn.LayerNorm)


def test_a_validator_adds_to_dpcore_s_own_checks(registered):
    register_module_validator(nn.BatchNorm1d)(lambda module: [])
    assert len(ModuleValidator.validate(nn.Sequential(nn.BatchNorm1d(3)))) == 1


def test_a_registry_of_one_s_own(registered):
    class Strict(ModuleValidator):
        VALIDATORS: ClassVar = {}

    register_module_validator(nn.Linear, Strict)(lambda module: [UnsupportedError("no linear layers")])
    assert not Strict.is_valid(nn.Linear(1, 1)) and ModuleValidator.is_valid(nn.Linear(1, 1))


def test_opacus_options_of_the_fixer_of_batch_norms():
    module = nn.Sequential(nn.Conv2d(3, 16, 1), nn.BatchNorm2d(16), nn.Flatten(2), nn.BatchNorm1d(16))
    fixed = ModuleValidator.fix(module, replace_bn_with_in=True)
    assert [type(fixed[i]) for i in (1, 3)] == [nn.InstanceNorm2d, nn.InstanceNorm1d]
    assert ModuleValidator.is_valid(fixed) and fixed(torch.randn(2, 3, 4, 4)).shape == (2, 16, 16)
    assert [ModuleValidator.fix(module, num_groups=4)[i].num_groups for i in (1, 3)] == [4, 4]
    assert ModuleValidator.fix(module)[1].num_groups == 16
    with pytest.raises(ValueError, match="give one of the two"):
        ModuleValidator.fix(module, replace_bn_with_in=True, num_groups=4)
    with pytest.raises(ValueError, match="num_groups is 5, and a BatchNorm2d has 16 channels"):
        ModuleValidator.fix(module, num_groups=5)
    with pytest.raises(UnsupportedError, match="no InstanceNorm for SyncBatchNorm"):
        ModuleValidator.fix(nn.SyncBatchNorm(4), replace_bn_with_in=True)


def test_what_takes_a_batch_norms_place_has_its_precision():
    fixed = ModuleValidator.fix(nn.Sequential(nn.Conv1d(2, 4, 3), nn.BatchNorm1d(4)).double())
    assert fixed(torch.randn(2, 2, 8, dtype=torch.float64)).dtype == torch.float64


@pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated")
def test_a_module_that_has_kept_what_it_computed_is_fixed():
    module = nn.Sequential(nn.utils.weight_norm(nn.Conv1d(2, 4, 3)), nn.BatchNorm1d(4))
    x = torch.randn(3, 2, 8)
    module(x)
    fixed = ModuleValidator.fix(module)
    assert torch.equal(fixed[0](x), module[0](x)) and isinstance(fixed[1], nn.GroupNorm)
    fixed(x).sum().backward()
    assert fixed[0].weight_g.grad is not None and module[0].weight_g.grad is None


def test_a_lazy_layer_cannot_be_fixed():
    with pytest.raises(UnsupportedError, match="lazy layer and has no shape yet; run the module once"):
        ModuleValidator.fix(nn.Sequential(nn.LazyBatchNorm2d()))


def test_what_is_registered_wrongly_is_said(registered):
    register_module_validator(nn.Linear)(lambda module: None)
    with pytest.raises(TypeError, match="registered for Linear returned None; it must return a list"):
        ModuleValidator.validate(nn.Linear(1, 1))
    register_module_fixer(nn.Linear)(lambda module, **kwargs: None)
    with pytest.raises(TypeError, match="registered for Linear returned NoneType; it must return the module"):
        ModuleValidator.fix(nn.Linear(1, 1))
    with pytest.raises(TypeError, match="is no class of modules"):
        register_module_validator("Linear")(lambda module: [])
    with pytest.raises(TypeError, match="is no class of modules"):
        register_module_fixer(nn.Linear(1, 1))(lambda module: module)
