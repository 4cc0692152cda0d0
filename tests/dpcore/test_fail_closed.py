"""What would release something that the accountant does not know of is refused, and the message says what."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from dpcore import GradSampleModule, PrivacyEngine, PrivacyError, UnsupportedError
from dpcore.accountants import create_accountant
from dpcore.data_loader import DPDataLoader
from dpcore.optimizers import DPOptimizer
from dpcore.privacy_engine import BudgetError
from dpcore.utils.batch_memory_manager import BatchMemoryManager
from tests.dpcore.comparison import relative_error
from tests.dpcore.private_setup import make, small_data, small_model, step, truth


def _batch(n: int = 5):
    return small_data()[:n]


def _unfreeze(model):
    model[0].bias.requires_grad_(True)


def _add(model):
    model.append(nn.Linear(3, 3).double())


def _replace(model):
    model[0].weight = nn.Parameter(model[0].weight.detach().clone())


def _swap(model):
    model[2] = nn.Sigmoid()


def _remove(model):
    model[0].bias = None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_unfreeze, "bias was added or unfrozen"),
        (_add, "was added or unfrozen"),
        (_replace, "weight was replaced"),
        (_swap, "layer was added, removed or swapped"),
        (_remove, "layer was added, removed or swapped"),
    ],
)
def test_a_module_that_changed_after_make_private(change, message):
    model = small_model()
    model[0].bias.requires_grad_(False)
    _, wrapped, optimizer, _ = make(model, check_batches=False)
    x, y = _batch()
    step(wrapped, optimizer, x, y)
    change(model)
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(PrivacyError, match=message):
        step(wrapped, optimizer, x, y)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_a_parameter_that_joined_the_optimizer_later():
    model = small_model()
    optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)
    _, wrapped, private, _ = make(model, optimizer=optimizer, check_batches=False)
    optimizer.add_param_group({"params": list(model[3].parameters())})
    with pytest.raises(PrivacyError, match="added to the optimizer after make_private"):
        step(wrapped, private, *_batch())


def test_a_gradient_that_a_frozen_parameter_has_kept():
    """It was applied at every step: torch's optimizers do not ask whether a parameter is trained."""
    module = small_model()
    x, y = small_data()[:8]
    F.cross_entropy(module(x), y).backward()  # an earlier, ordinary pass over the same data
    body, module[3] = module[0].requires_grad_(False), nn.Linear(5, 3).double()
    before = body.weight.clone()
    _, model, optimizer, loader = make(module, optimizer=torch.optim.SGD(module.parameters(), lr=0.1))
    batches = iter(loader)
    x, y = next(batches)
    F.cross_entropy(model(x), y).backward()
    with pytest.raises(PrivacyError, match=r"not trained \(requires_grad=False\) and has a gradient"):
        optimizer.step()
    step(model, optimizer, *next(batches))  # after zero_grad()
    assert torch.equal(before, body.weight)


def test_only_what_the_optimizer_holds_is_clipped_and_changes():
    model = small_model()
    x, y = _batch()
    before = copy.deepcopy(model)
    frozen = copy.deepcopy(model)
    frozen[0].requires_grad_(False)
    _, wrapped, optimizer, _ = make(
        model, optimizer=torch.optim.SGD(model[3].parameters(), lr=0.1), check_batches=False
    )
    step(wrapped, optimizer, x, y)
    expected = {n: g / 10 for n, g in truth(frozen, x, y).items()}
    assert relative_error({f"3.{n}": p.grad for n, p in model[3].named_parameters()}, expected) < 1e-12
    assert torch.equal(model[0].weight, before[0].weight) and model[0].weight.grad is None


def test_batches_that_are_not_the_private_loaders():
    original = DataLoader(small_data(), batch_size=10)
    _, model, optimizer, loader = make(data_loader=original)
    with pytest.raises(PrivacyError, match="step 1 of this optimizer, and no batch"):
        for x, y in original:
            step(model, optimizer, x, y)
    _, model, optimizer, loader = make()
    for x, y in loader:
        step(model, optimizer, x, y)
    with pytest.raises(PrivacyError, match="step 7 of this optimizer, and no batch"):
        step(model, optimizer, x, y)
    # Without Poisson sampling the loader is the caller's own object, whichever name the loop has for it.
    _, model, optimizer, loader = make(poisson_sampling=False, data_loader=original)
    assert loader is original and isinstance(loader, DataLoader)
    for x, y in original:
        step(model, optimizer, x, y)
    with pytest.raises(PrivacyError, match="no batch of the private data loader is left"):
        step(model, optimizer, x, y)


@pytest.mark.parametrize("poisson_sampling", [True, False])
def test_an_example_in_several_rows(poisson_sampling):
    _, model, optimizer, loader = make(poisson_sampling=poisson_sampling)
    with pytest.raises(PrivacyError, match="an example in several rows is clipped in each"):
        for x, y in loader:
            step(model, optimizer, torch.cat([x, x + 0.1]), torch.cat([y, y]))
    _, model, optimizer, loader = make(check_batches=False, poisson_sampling=poisson_sampling)
    for x, y in loader:
        step(model, optimizer, torch.cat([x, x + 0.1]), torch.cat([y, y]))


def test_pieces_and_abandoned_batches_pass_the_check():
    _, model, optimizer, loader = make()
    for _ in range(2):
        with BatchMemoryManager(data_loader=loader, max_physical_batch_size=3, optimizer=optimizer) as pieces:
            for x, y in pieces:
                step(model, optimizer, x, y)
        next(iter(loader))
    assert optimizer.steps == 12


def test_the_inner_optimizer_may_not_step_on_its_own():
    model = small_model()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    _, wrapped, optimizer, _ = make(model, optimizer=inner, grad_sample_mode="hooks", check_batches=False)
    x, y = _batch()
    F.cross_entropy(wrapped(x), y).backward()
    with pytest.raises(PrivacyError, match="optimizer inside the private one"):
        inner.step()
    optimizer.step()
    plain = wrapped.to_standard_module()
    inner.zero_grad()
    F.cross_entropy(plain(x), y).backward()
    inner.step()


def test_make_private_twice():
    model = small_model()
    engine, wrapped, optimizer, _ = make(model)
    with pytest.raises(PrivacyError, match="recorded by another wrapper"):
        make(model, engine)
    with pytest.raises(PrivacyError, match="belongs to another DPOptimizer"):
        make(wrapped, engine)
    with pytest.raises(PrivacyError, match="private already"):
        make(wrapped, engine, optimizer=optimizer)
    make(wrapped.to_standard_module(), engine)


def test_an_optimizer_without_a_recorded_module():
    model = small_model()
    options = {"noise_multiplier": 1.0, "max_grad_norm": 1.0, "expected_batch_size": 4}
    with pytest.raises(PrivacyError, match="not recorded by any GradSampleModule"):
        DPOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), **options)
    first, second = GradSampleModule(small_model()), GradSampleModule(small_model())
    both = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.1)
    with pytest.raises(PrivacyError, match="2 GradSampleModules"):
        DPOptimizer(both, **options)
    with pytest.raises(ValueError, match="loss_reduction"):
        DPOptimizer(torch.optim.SGD(first.parameters(), lr=0.1), loss_reduction="sum", **options)


def test_a_reduction_that_the_criterion_contradicts():
    with pytest.raises(ValueError, match="reduction is 'sum' and loss_reduction is 'mean'"):
        make(criterion=nn.CrossEntropyLoss(reduction="sum"))


def test_accumulation_where_it_is_forbidden():
    _, model, _, _ = make(check_batches=False)
    model.forbid_grad_accumulation()
    x, y = _batch()
    F.cross_entropy(model(x), y).backward()
    with pytest.raises(ValueError, match="accumulation is forbidden"):
        F.cross_entropy(model(x), y).backward()
    _, model, _, _ = make(check_batches=False)
    model.forbid_grad_accumulation()
    model.allow_grad_accumulation()
    for _ in range(2):
        F.cross_entropy(model(x), y).backward()


def test_zero_grad_drops_what_was_not_released():
    _, model, optimizer, _ = make(check_batches=False)
    x, y = _batch()
    F.cross_entropy(model(x), y).backward()
    optimizer.zero_grad()
    with pytest.raises(PrivacyError, match="no backward pass"):
        optimizer.step()


@pytest.mark.parametrize("mode", ["bookkeeping", "hooks"])
def test_a_missing_zero_grad_changes_nothing(mode):
    weights = []
    for clean in (True, False):
        _, model, optimizer, loader = make(grad_sample_mode=mode, noise_multiplier=1.0)
        for x, y in loader:
            if clean:
                optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
        weights.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    assert torch.equal(*weights)


def test_a_graph_that_is_used_again_after_the_step():
    _, model, optimizer, _ = make(nn.Linear(6, 3).double(), check_batches=False)
    x, y = _batch()
    loss = F.cross_entropy(model(x), y)
    loss.backward(retain_graph=True)
    optimizer.step()
    loss.backward()
    with pytest.raises(PrivacyError, match="no backward pass"):
        optimizer.step()
    F.cross_entropy(model(x), y)
    with pytest.raises(UnsupportedError, match="create_graph"):
        F.cross_entropy(model(x), y).backward(create_graph=True)


def test_gradients_that_were_changed_by_hand():
    _, model, optimizer, _ = make(grad_sample_mode="hooks", check_batches=False)
    x, y = _batch()
    F.cross_entropy(model(x), y).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    with pytest.raises(PrivacyError, match="changed by hand"):
        optimizer.step()


def test_hooks_that_were_disabled():
    _, model, optimizer, _ = make(check_batches=False)
    model.disable_hooks()
    x, y = _batch()
    F.cross_entropy(model(x), y).backward()
    with pytest.raises(PrivacyError, match="ordinary, unclipped gradient"):
        optimizer.step()
    optimizer.zero_grad()
    model.enable_hooks()
    step(model, optimizer, x, y)


def test_no_step_beyond_the_budget():
    engine = PrivacyEngine(seed=1)
    model = small_model()
    model, optimizer, loader = engine.make_private_with_epsilon(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(small_data(), batch_size=10),
        target_epsilon=2.0,
        target_delta=1e-3,
        epochs=2,
        max_grad_norm=1.0,
        sample_rate=1 / 6,
        expected_batch_size=10,
    )
    for _ in range(2):
        for x, y in loader:
            assert engine.within_budget(optimizer)
            step(model, optimizer, x, y)
    assert not engine.within_budget(optimizer)
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(BudgetError, match="beyond the budget of 2"):
        for x, y in loader:
            step(model, optimizer, x, y)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert 1.99 < engine.get_epsilon(1e-3) <= 2.0 and optimizer.steps == 12
    with pytest.raises(AttributeError):  # as many steps as were planned for 2 would still be made
        engine.budget.epsilon = 0.1
    engine.set_budget(None)
    for x, y in loader:
        step(model, optimizer, x, y)
    assert engine.get_epsilon(1e-3) > 2.0


def test_noise_that_is_lowered_after_the_budget_s_look():
    engine, model, optimizer, loader = make(noise_multiplier=1.0)
    engine.set_budget(3.0, 1e-3)

    def lower(private):
        private.noise_multiplier = 0.01

    optimizer.attach_step_guard(lower)
    with pytest.raises(PrivacyError, match=r"noise_multiplier was changed from 1 to 0\.01 within a logical batch"):
        step(model, optimizer, *next(iter(loader)))
    assert not engine.accountant.history


def test_a_schedule_that_spends_faster_meets_the_budget_earlier():
    engine = PrivacyEngine(seed=1)
    engine, model, optimizer, loader = make(engine=engine, noise_multiplier=2.0)
    engine.set_budget(1.0, 1e-3)
    with pytest.raises(BudgetError):
        for x, y in loader:
            step(model, optimizer, x, y)
            optimizer.noise_multiplier *= 0.8
    assert 0 < engine.get_epsilon(1e-3) <= 1.0
    with pytest.raises(ValueError, match="need epsilon > 0"):
        engine.set_budget(1.0)


@pytest.mark.parametrize("mode", ["hooks", "functorch"])
def test_a_hook_before_all_others_that_raises_leaves_no_uncounted_release(mode):
    engine, model, optimizer, loader = make(noise_multiplier=1.0, grad_sample_mode=mode)
    seen = []

    def breaks(of):
        seen.append([p.grad.clone() for p in of.params])
        raise KeyError("the user's own")

    optimizer.step_hooks.insert(0, breaks)
    batches = iter(loader)
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(KeyError):
        step(model, optimizer, *next(batches))
    assert len(engine.accountant) == len(seen) == optimizer.steps == 1
    assert all(p.grad is None for p in optimizer.params)
    assert all(map(torch.equal, before, model.parameters()))
    optimizer.step_hooks.remove(breaks)
    for x, y in batches:
        step(model, optimizer, x, y)
    assert len(engine.accountant) == optimizer.steps == 6


@pytest.mark.parametrize(("method", "counted"), [("add_noise", 1), ("scale_grad", 1), ("own noise", 0)])
def test_an_override_that_raises_leaves_no_uncounted_release(method, counted):
    """Noise of one's own is counted behind it: nobody else knows when it is drawn."""

    class Breaks(DPOptimizer):
        def add_noise(self):
            if method == "own noise":
                for p in self.params:
                    p.grad = p.summed_grad + torch.randn_like(p)
            else:
                super().add_noise()
            if method != "scale_grad":
                raise KeyError(method)

        def scale_grad(self):
            raise KeyError(method)

    engine, model, optimizer, loader = make(noise_multiplier=1.0)
    optimizer.__class__ = Breaks
    with pytest.raises(KeyError):
        step(model, optimizer, *next(iter(loader)))
    assert len(engine.accountant) == optimizer.steps == counted and all(p.grad is None for p in optimizer.params)


def test_a_hook_of_the_users_does_not_silence_the_accountant():
    engine, model, optimizer, loader = make(noise_multiplier=1.0)
    seen = []
    optimizer.attach_step_hook(lambda of: seen.append(of.steps))
    for x, y in loader:
        step(model, optimizer, x, y)
    assert len(seen) == len(engine.accountant) == 6


def test_another_accountant_may_not_forget_steps():
    """Epsilon was 0 after it."""
    engine, model, optimizer, loader = make(noise_multiplier=1.0)
    engine.accountant = create_accountant("gdp")  # nothing was released yet
    for x, y in loader:
        step(model, optimizer, x, y)
    other = create_accountant("rdp")
    with pytest.raises(PrivacyError, match="has counted 6 steps that the new accountant does not know of"):
        engine.accountant = other
    other.history = list(engine.accountant.history)
    engine.accountant = other
    assert engine.get_epsilon(1e-3) == other.get_epsilon(1e-3) > 0
    step(model, optimizer, *next(iter(loader)))
    assert len(other) == 7


def test_another_data_set_is_warned_of():
    engine, *_ = make()
    with pytest.warns(UserWarning, match="another data set"):
        engine.make_private(
            module=(model := small_model()),
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            data_loader=DPDataLoader(small_data(), sample_rate=0.1),
            noise_multiplier=1.0,
            max_grad_norm=1.0,
            expected_batch_size=6,
        )


def test_random_examples_for_empty_batches_are_not_drawn():
    model = small_model()
    with pytest.warns(UserWarning, match="twice max_grad_norm"):
        PrivacyEngine().make_private(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            data_loader=DPDataLoader(small_data(), sample_rate=0.1),
            noise_multiplier=1.0,
            max_grad_norm=1.0,
            expected_batch_size=6,
            rand_on_empty=True,
        )


def test_what_a_compiler_would_hide():
    with pytest.raises(UnsupportedError, match=r"compiled by torch\.compile"):
        make(torch.compile(small_model(), backend="eager"))
    model = small_model()
    model[0] = torch.compile(model[0], backend="eager")
    with pytest.raises(UnsupportedError, match=r"compiled by torch\.compile"):
        make(model)
    model = small_model()
    model[0].compile(backend="eager")
    with pytest.raises(UnsupportedError, match=r"compiled by torch\.compile"):
        make(model)
