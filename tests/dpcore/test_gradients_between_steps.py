"""p.grad, p.grad_sample and p.summed_grad at every stage, in every mode; custom rules; optimisers and schedules."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from scipy import stats
from torch import nn
from torch.nn import functional as F

from dpcore import GaussianNoise, GradSampleModule, PrivacyEngine, PrivacyError, UnsupportedError, reference
from dpcore.grad_sample import (
    GradSampleHooksFastGradientClipping,
    GradSampleModuleFastGradientClipping,
    register_grad_sampler,
    register_norm_sampler,
)
from dpcore.optimizers import AdaClipDPOptimizer, DPOptimizer
from dpcore.rules.custom import GRAD_SAMPLERS, NORM_SAMPLERS
from dpcore.schedulers import ExponentialBatchSize, LambdaBatchSize, StepBatchSize
from dpcore.utils.batch_memory_manager import BatchMemoryManager
from dpcore.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping
from dpcore.utils.per_sample_gradients_utils import check_per_sample_gradients_are_correct
from tests.dpcore.comparison import relative_error
from tests.dpcore.private_setup import losses, make, small_data, small_model, step, truth

MODES = ["bookkeeping", "hooks", "functorch", "ew", "ghost"]


@pytest.mark.parametrize("wrap", [True, False])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_all_modes_give_the_same_update(mode, wrap, reduction):
    model = small_model()
    x, y = small_data()[:5]
    expected = {n: g / (10 if reduction == "mean" else 1) for n, g in truth(model, x, y).items()}
    made = make(model, grad_sample_mode=mode, wrap_model=wrap, loss_reduction=reduction, check_batches=False)
    criterion = made[3] if mode == "ghost" else nn.CrossEntropyLoss(reduction=reduction)
    call, optimizer = (made[1] if wrap else model), made[2]
    loss = criterion(call(x), y)
    assert loss.item() == pytest.approx(F.cross_entropy(model(x), y, reduction=reduction).item())
    optimizer.zero_grad()
    criterion(call(x), y).backward()
    optimizer.step()
    assert relative_error({n: p.grad for n, p in model.named_parameters()}, expected) < 1e-12
    made[1].cleanup()
    assert not any(hasattr(p, "grad_sample") or hasattr(p, "summed_grad") for p in model.parameters())
    assert "forward" not in vars(model)


@pytest.mark.parametrize("mode", ["bookkeeping", "hooks"])
def test_the_stages_of_a_step(mode):
    model = small_model()
    _, wrapped, optimizer, _ = make(model, grad_sample_mode=mode, noise_multiplier=1.0, check_batches=False)
    x, y = small_data()[:5]
    plain, each = copy.deepcopy(model), list(reference.example_gradients(model, losses, x, y))
    F.cross_entropy(plain(x), y).backward()
    assert all(p.grad_sample is None for p in model.parameters())
    F.cross_entropy(wrapped(x), y).backward()
    for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
        if mode == "hooks":
            torch.testing.assert_close(p.grad, q.grad)
        else:
            assert p.grad is None
        torch.testing.assert_close(p.grad_sample, torch.stack([g[name] for g in each]))
    samples = [p.grad_sample.clone() for p in model.parameters()]
    clipped = truth(model, x, y)
    optimizer.step()
    for (name, p), sample in zip(model.named_parameters(), samples, strict=True):
        if mode == "hooks":
            assert torch.equal(p.grad_sample, sample)
            torch.testing.assert_close(p.summed_grad, clipped[name])
        else:
            assert p.grad_sample is None and p.summed_grad is None
        assert not torch.allclose(p.grad, clipped[name] / 10)
    optimizer.zero_grad()
    assert all(p.grad is None and p.grad_sample is None and p.summed_grad is None for p in model.parameters())


def test_accumulated_batches_are_a_list():
    model = small_model()
    _, wrapped, optimizer, _ = make(model, check_batches=False)
    for rows in (slice(0, 3), slice(3, 7)):
        x, y = small_data()[rows]
        F.cross_entropy(wrapped(x), y).backward()
    assert [len(g) for g in model[0].weight.grad_sample] == [3, 4]
    assert optimizer.grad_samples[0].shape == (7, 5, 6)


def test_per_sample_gradients_that_the_user_changes_are_the_ones_that_count():
    model = small_model()
    x, y = small_data()[:5]
    _, wrapped, optimizer, _ = make(model, max_grad_norm=100.0, check_batches=False)
    F.cross_entropy(wrapped(x), y).backward()
    model[0].weight.grad_sample.mul_(3.0)
    model[3].bias.grad_sample = torch.ones(5, 3, dtype=torch.float64)
    expected = truth(model, x, y, 100.0)
    expected["0.weight"] *= 3.0
    expected["3.bias"] = torch.full((3,), 5.0, dtype=torch.float64)
    optimizer.step()
    assert relative_error({n: p.grad * 10 for n, p in model.named_parameters()}, expected) < 1e-12
    F.cross_entropy(wrapped(x), y).backward()
    with pytest.raises(ValueError, match="one gradient per example"):
        model[3].bias.grad_sample = torch.ones(3)
    with pytest.raises(PrivacyError, match="rows of different examples"):
        model[3].bias.grad_sample = torch.ones(4, 3)
    model[3].bias.grad_sample = None
    with pytest.raises(PrivacyError, match="no backward pass"):
        optimizer.step()


def test_other_parameters_keep_an_ordinary_attribute():
    GradSampleModule(small_model())
    p = nn.Parameter(torch.zeros(2))
    assert not hasattr(p, "grad_sample")
    p.grad_sample = 3
    assert p.grad_sample == 3
    del p.grad_sample
    assert not hasattr(p, "grad_sample")


def test_in_the_no_op_mode_every_parameter_needs_its_gradients():
    model = small_model()
    _, wrapped, optimizer, _ = make(model, grad_sample_mode="no_op", check_batches=False)
    x, y = small_data()[:4]
    F.cross_entropy(wrapped(x), y).backward()
    model[0].weight.grad_sample = torch.ones(4, 5, 6, dtype=torch.float64)
    with pytest.raises(PrivacyError, match=r"0\.bias has no grad_sample"):
        optimizer.step()


def test_a_wrapped_model_can_be_copied_and_pickled():
    model = small_model()
    _, wrapped, optimizer, _ = make(model, check_batches=False)
    x, y = small_data()[:4]
    step(wrapped, optimizer, x, y)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), copy.deepcopy(wrapped)):
        torch.testing.assert_close(other.eval()(x), model.eval()(x))


def test_a_file_of_the_model_holds_no_gradient_of_examples(tmp_path):
    """zero_grad() empties p.grad in place, and what was formed there before clipping is no part of the model."""
    model = GradSampleModule(nn.Linear(3, 2))
    model(torch.randn(4, 3)).sum().backward()
    formed = model._module.weight.grad.clone()
    model.zero_grad(set_to_none=False)
    torch.save(model, tmp_path / "model.pt")
    assert formed.abs().sum() > 0
    assert formed.numpy().tobytes() not in (tmp_path / "model.pt").read_bytes()


def test_an_unwrapped_model_keeps_its_own_forward():
    model = small_model()
    own = model.forward
    model.forward = lambda x: own(x) * 2
    x, y = small_data()[:4]
    outputs = model(x)
    _, hooks, _, _ = make(model, wrap_model=False, check_batches=False)
    torch.testing.assert_close(model(x), outputs)
    F.cross_entropy(model(x), y).backward()
    assert model[0].weight.grad_sample.shape == (4, 5, 6)
    hooks.cleanup()
    torch.testing.assert_close(model(x), outputs)


def test_a_forward_that_is_wrapped_later_is_recorded_once():
    """As accelerate's autocast wraps it, which called itself until the stack was full."""
    model = small_model()
    x, y = small_data()[:4]
    outputs = model(x)
    make(model, wrap_model=False, check_batches=False)
    private = model.forward
    model.forward = lambda x: private(x) * 2
    torch.testing.assert_close(model(x), outputs * 2)
    F.cross_entropy(model(x), y).backward()
    assert model[0].weight.grad_sample.shape == (4, 5, 6)


class Positions(nn.Module):
    """A table without a batch dimension: the whole model is recorded at once."""

    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.randn(6).double())
        self.out = nn.Linear(6, 3).double()

    def forward(self, x):
        return self.out(x * self.table.sigmoid())


class Angles(Positions):
    """A use of the table that has no rule."""

    def forward(self, x):
        return self.out(torch.atan2(x, self.table))


@pytest.mark.parametrize("kind", [Positions, Angles])
@pytest.mark.parametrize("wrapped", [True, False])
def test_an_unwrapped_model_that_is_recorded_as_a_whole(kind, wrapped):
    torch.manual_seed(0)
    model = kind()
    x, y = small_data()[:4]
    expected = {n: g / 10 for n, g in truth(model, x, y).items()}
    _, hooks, optimizer, _ = make(model, wrap_model=False, check_batches=False)
    own = model.forward
    if wrapped:
        model.forward = lambda x: own(x)
    step(model, optimizer, x, y)
    assert relative_error({n: p.grad for n, p in model.named_parameters()}, expected) < 1e-12
    model.forward = own
    hooks.cleanup()
    assert "forward" not in vars(model)


# ---- the criterion of the fast-clipping mode


def test_the_criterion_divides_no_example_by_what_depends_on_others():
    torch.manual_seed(0)
    model = GradSampleModule(nn.Linear(4, 3))
    outputs, y = torch.randn(6, 3), torch.tensor([0, 1, 2, 2, -100, 0])
    weighted = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 5.0]))
    criterion = DPLossFastGradientClipping(model, None, weighted)
    each = F.cross_entropy(outputs, y, weight=weighted.weight, reduction="none")
    assert criterion(outputs, y).item() == pytest.approx(float(each.sum() / 6))
    assert weighted.reduction == "mean"
    criterion = DPLossFastGradientClipping(model, None, nn.CrossEntropyLoss())
    by_sequence = criterion(outputs, y, shape=(2, 3, 3))
    each = F.cross_entropy(outputs, y, reduction="none").view(2, 3)
    assert by_sequence.item() == pytest.approx(float((each[0].sum() / 3 + each[1].sum() / 2) / 2))
    assert criterion(outputs[:0], y[:0]).item() == 0.0


def test_the_criterion_of_a_divergence_is_a_mean_over_the_batch_alone():
    model = GradSampleModule(nn.Linear(3, 4))
    inputs, targets = torch.randn(5, 4).log_softmax(1), torch.randn(5, 4).softmax(1)
    divergence = nn.KLDivLoss(reduction="batchmean")
    criterion = DPLossFastGradientClipping(model, None, divergence)
    assert criterion(inputs, targets).item() == pytest.approx(divergence(inputs, targets).item())
    assert criterion(inputs[:0], targets[:0]).item() == 0.0
    with pytest.raises(ValueError, match="reduction is 'batchmean' and loss_reduction is 'sum'"):
        DPLossFastGradientClipping(model, None, divergence, loss_reduction="sum")


@pytest.mark.parametrize("wrap_model", [True, False])
def test_norms_and_coefficients_of_the_fast_clipping_module(wrap_model):
    model = small_model()
    x, y = small_data()[:5]
    norms = reference.clipped_sum(copy.deepcopy(model), losses, x, y, 1.0).norms
    kind = GradSampleModuleFastGradientClipping if wrap_model else GradSampleHooksFastGradientClipping
    wrapped = kind(model, max_grad_norm=float(norms.median()))
    F.cross_entropy((wrapped if wrap_model else model)(x), y).backward()
    torch.testing.assert_close(wrapped.get_norm_sample(), norms)
    torch.testing.assert_close(wrapped.per_sample_gradient_norms, norms)
    torch.testing.assert_close(wrapped.get_clipping_coef(), (float(norms.median()) / norms).clamp(max=1))
    with pytest.raises(ValueError, match="give both the same"):
        DPOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1),
            noise_multiplier=1.0,
            max_grad_norm=3.0,
            expected_batch_size=4,
        )


# ---- rules of the user's


class Scaled(nn.Module):
    """y = x * w, with w of the length of x's last dimension."""

    def __init__(self, size: int):
        super().__init__()
        self.w = nn.Parameter(torch.randn(size).double())

    def forward(self, x):
        return x * self.w


@pytest.fixture
def scaled():
    torch.manual_seed(0)
    yield nn.Sequential(nn.Linear(6, 4).double(), Scaled(4), nn.Linear(4, 3).double())
    GRAD_SAMPLERS.pop(Scaled, None)
    NORM_SAMPLERS.pop(Scaled, None)


def test_custom_samplers_are_used_and_checked(scaled):
    x, y = small_data()[:7]
    calls = []

    @register_grad_sampler(Scaled)
    def gradients(layer, activations, backprops):
        calls.append("gradient")
        return {layer.w: activations[0] * backprops}

    assert check_per_sample_gradients_are_correct(x, scaled)
    assert calls

    @register_norm_sampler(Scaled)
    def norms(layer, activations, backprops):
        calls.append("norm")
        return {layer.w: (activations[0] * backprops).norm(dim=1)}

    assert check_per_sample_gradients_are_correct(x, scaled)
    assert "norm" in calls
    expected = {n: g / 10 for n, g in truth(scaled, x, y).items()}
    _, wrapped, optimizer, _ = make(scaled, check_batches=False)
    step(wrapped, optimizer, x, y)
    assert relative_error({n: p.grad for n, p in scaled.named_parameters()}, expected) < 1e-12


def test_the_checker_finds_a_wrong_gradient_and_a_wrong_norm(scaled):
    x = small_data()[:7][0]
    register_norm_sampler(Scaled)(lambda layer, a, g: {layer.w: 0.7 * (a[0] * g).norm(dim=1)})
    assert not check_per_sample_gradients_are_correct(x, scaled)
    NORM_SAMPLERS.clear()
    register_grad_sampler([Scaled])(lambda layer, a, g: {layer.w: a[0] * g.mean(0)})
    assert not check_per_sample_gradients_are_correct(x, scaled)


# ---- adaptive clipping


def test_adaptive_clipping_finds_the_quantile():
    torch.manual_seed(0)
    model = nn.Linear(6, 3).double()
    _, wrapped, optimizer, loader = make(
        model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.0),
        max_grad_norm=20.0,
        clipping="adaptive",
        target_unclipped_quantile=0.7,
        clipbound_learning_rate=0.3,
        noise_multiplier=1.0,
        unclipped_num_std=1.0,
    )
    for _ in range(12):
        for x, y in loader:
            step(wrapped, optimizer, x, y)
    norms = reference.clipped_sum(copy.deepcopy(model), losses, *small_data()[:60], 1.0).norms
    assert float(norms.quantile(0.5)) < optimizer.max_grad_norm < float(norms.quantile(0.9))


def test_adaptive_clipping_accounts_for_its_count():
    model = small_model()
    options = {"clipping": "adaptive", "noise_multiplier": 1.5, "unclipped_num_std": 1.0, "max_grad_norm": 0.5}
    engine, wrapped, optimizer, _ = make(model, check_batches=False, **options)
    assert isinstance(optimizer, AdaClipDPOptimizer)
    draws, counts = [], []
    for _ in range(150):
        bound = optimizer.max_grad_norm
        optimizer.zero_grad()
        wrapped(torch.zeros(0, 6, dtype=torch.float64)).sum().backward()
        optimizer.step()
        draws.append(torch.cat([p.grad.flatten() for p in model.parameters()]) * 10 / bound)
        # C *= exp(-0.2 ((noise / 10 + 1/2) - 1/2))
        counts.append(torch.tensor(optimizer.max_grad_norm / bound).log() / -0.2 * 10)
    multiplier = (1.5**-2 - 2.0**-2) ** -0.5
    assert stats.kstest(torch.cat(draws) / multiplier, "norm").pvalue > 1e-4
    assert stats.kstest(torch.stack(counts), "norm").pvalue > 1e-4
    first = torch.stack(draws)[:, 0]
    assert abs(float(torch.corrcoef(torch.stack([first, torch.stack(counts)]))[0, 1])) < 0.3
    assert engine.accountant.history == [(1.5, 1 / 6, 150)]
    with pytest.raises(PrivacyError, match="must stay below 2"):
        make(clipping="adaptive", noise_multiplier=2.0, unclipped_num_std=1.0)
    optimizer.noise_multiplier = 2.5
    with pytest.raises(PrivacyError, match="must stay below 2"):
        step(wrapped, optimizer, *small_data()[:3])


class _FromElsewhere(GaussianNoise):
    """Noise of a generator of its own, with a seed that everybody knows and that nothing follows from."""

    def __init__(self):
        super().__init__(seed=0)
        self.own = torch.Generator()
        self.own.seed()

    def generator(self, step, device="cpu"):
        return self.own


def test_the_count_of_adaptive_clipping_has_secret_noise_where_the_seed_is_none():
    bounds = set()
    x, y = small_data()[:5]
    for _ in range(3):
        module = GradSampleModule(small_model())
        optimizer = AdaClipDPOptimizer(
            torch.optim.SGD(module.parameters(), lr=0.1),
            noise_multiplier=1.0,
            max_grad_norm=0.5,
            expected_batch_size=5,
            unclipped_num_std=2.0,
            noise=_FromElsewhere(),
        )
        F.cross_entropy(module(x), y).backward()
        optimizer.step()
        bounds.add(optimizer.max_grad_norm)
    assert len(bounds) == 3


def test_adaptive_clipping_counts_all_pieces_of_a_batch():
    bounds = []
    for pieces in (1, 3):
        _, model, optimizer, _ = make(clipping="adaptive", check_batches=False, clipbound_learning_rate=1.0)
        x, y = small_data()[:9]
        for k in range(pieces):
            optimizer.signal_skip_step(k + 1 < pieces)
            step(model, optimizer, x[k::pieces], y[k::pieces])
        bounds.append(optimizer.max_grad_norm)
    assert bounds[0] == pytest.approx(bounds[1]) and bounds[0] != 0.5


# ---- schedules of the batch size


@pytest.mark.parametrize("check_batches", [True, False])
def test_a_batch_is_counted_at_the_rate_at_which_it_was_drawn(check_batches):
    engine, model, optimizer, loader = make(noise_multiplier=1.0, check_batches=check_batches)
    schedule = ExponentialBatchSize(optimizer, gamma=0.5)
    for x, y in loader:
        F.cross_entropy(model(x), y).backward()
    with pytest.raises(PrivacyError, match="from 10 to 5 between a batch's backward pass and its step"):
        schedule.step()
    optimizer.step()
    assert [rate for _, rate, _ in engine.accountant.history] == [1 / 6]
    schedule.step()
    assert optimizer.expected_batch_size == 5.0


def test_rate_divisor_and_accountant_follow_the_batch_size():
    engine, model, optimizer, loader = make(noise_multiplier=1.0)
    schedule = ExponentialBatchSize(optimizer, gamma=2.0)
    for _ in range(2):
        for x, y in loader:
            step(model, optimizer, x, y)
        schedule.step()
    assert engine.accountant.history == [(1.0, 1 / 6, 6), (1.0, pytest.approx(1 / 3), 3)]
    assert optimizer.expected_batch_size == 40 and len(loader) == 2
    with pytest.raises(ValueError, match="between rounds"):
        for _ in loader:
            StepBatchSize(optimizer, step_size=1, gamma=0.5).step()
    with pytest.raises(ValueError, match=r"must lie in \(0, 1\]"):
        LambdaBatchSize(make(noise_multiplier=1.0)[2], batch_size_lambda=lambda k: 7.0)
    with pytest.raises(ValueError, match="poisson_sampling=True"):
        StepBatchSize(make(poisson_sampling=False)[2], step_size=1, gamma=2.0)


def test_a_resumed_schedule_goes_on(tmp_path):
    from dpcore.schedulers import ExponentialGradClip, StepNoise

    def start():
        made = make(noise_multiplier=1.0)
        return *made, StepNoise(made[2], step_size=1, gamma=0.5), ExponentialGradClip(made[2], gamma=0.5)

    engine, model, optimizer, loader, noise, clip = start()
    for x, y in loader:
        step(model, optimizer, x, y)
    noise.step()
    clip.step()
    path = tmp_path / "c.pt"
    engine.save_checkpoint(
        path=path, module=model, optimizer=optimizer, noise_scheduler=noise, grad_clip_scheduler=clip
    )
    engine, model, optimizer, loader, noise, clip = start()
    engine.load_checkpoint(
        path=path, module=model, optimizer=optimizer, noise_scheduler=noise, grad_clip_scheduler=clip
    )
    assert (optimizer.noise_multiplier, optimizer.max_grad_norm) == (0.5, 0.25)
    noise.step()
    clip.step()
    assert (optimizer.noise_multiplier, optimizer.max_grad_norm) == (0.25, 0.125)
    assert len(PrivacyEngine().accountant) == 0 and len(engine.accountant) == 6


def test_a_run_with_a_batch_size_schedule_resumes_bit_for_bit(tmp_path):
    def start(seed):
        made = make(engine=PrivacyEngine(seed=seed), noise_multiplier=1.0)
        return *made, StepBatchSize(made[2], step_size=1, gamma=2.0)

    def train(model, optimizer, loader, schedule, batches):
        while batches:
            for x, y in loader:
                step(model, optimizer, x, y)
                batches -= 1
                if not batches:
                    break
            else:
                schedule.step()

    whole = start(7)
    train(*whole[1:], 10)
    engine, *run = start(7)
    train(*run, 7)
    path = tmp_path / "c.pt"
    engine.save_checkpoint(path=path, module=run[0], optimizer=run[1])
    schedule = run[3].state_dict()
    engine, *run = start(8)
    engine.load_checkpoint(path=path, module=run[0], optimizer=run[1])
    run[3].load_state_dict(schedule)
    train(*run, 3)
    for a, b in zip(whole[1].parameters(), run[0].parameters(), strict=True):
        assert torch.equal(a, b)
    assert engine.accountant.history == whole[0].accountant.history
    assert len(run[2]) == 2


class TimeFirst(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 5)
        self.recurrent = nn.LSTM(5, 6, batch_first=True)
        self.out = nn.Linear(6, 3)
        self.double()

    def forward(self, x):
        """[T, B, 4] -> [B, 3]."""
        return self.out(self.recurrent(self.inner(x.transpose(0, 1)).tanh())[0][:, -1])


def test_time_first_inputs():
    torch.manual_seed(0)
    model = TimeFirst()
    for examples in (5, 7):
        x, y = torch.randn(examples, 7, 4, dtype=torch.float64), torch.arange(examples) % 3
        expected = {}
        for i in range(examples):
            one = copy.deepcopy(model)
            F.cross_entropy(one(x[i : i + 1].transpose(0, 1)), y[i : i + 1]).backward()
            norm = torch.cat([p.grad.flatten() for p in one.parameters()]).norm()
            for n, p in one.named_parameters():
                expected[n] = expected.get(n, 0) + p.grad * min(1.0, 0.5 / float(norm)) / 10
        _, wrapped, optimizer, loader = make(model, batch_first=False, check_batches=False)
        step(wrapped, optimizer, x.transpose(0, 1), y)
        assert relative_error({n: p.grad for n, p in model.named_parameters()}, expected) < 1e-9
        with pytest.raises(UnsupportedError, match="each clipped once per piece"):
            BatchMemoryManager(data_loader=loader, max_physical_batch_size=2, optimizer=optimizer)
        with pytest.raises(UnsupportedError, match="no time steps"):
            wrapped(torch.zeros(0, 1, 4, dtype=torch.float64))
        wrapped.to_standard_module()
