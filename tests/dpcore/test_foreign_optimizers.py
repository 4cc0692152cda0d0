"""An optimizer that is not private may not update a private module."""

from __future__ import annotations

import gc

import pytest
import torch
from torch.nn import functional as F

from dpcore.errors import PrivacyError
from dpcore.grad_sample import GradSampleModule
from tests.dpcore.private_setup import make, small_data, small_model


def _two(mode):
    """A private optimizer of the first layer, and an ordinary one of the last."""
    module = small_model()
    body, head = (torch.optim.SGD(module[k].parameters(), lr=0.1) for k in (0, 3))
    _, model, optimizer, loader = make(module, optimizer=body, grad_sample_mode=mode)
    return model, optimizer, head, loader


@pytest.mark.parametrize("private_first", [True, False])
def test_the_head_of_a_private_module_is_not_updated_without_noise(private_first):
    """It was, by the batch's ordinary gradient, of which no accountant knew."""
    model, optimizer, head, loader = _two("hooks")
    before = [p.detach().clone() for p in model._module[3].parameters()]
    x, y = next(iter(loader))
    F.cross_entropy(model(x), y).backward()
    if private_first:
        optimizer.step()
    with pytest.raises(PrivacyError, match=r"SGD.step\(\) would apply an ordinary gradient.*make that one private"):
        head.step()
    assert all(map(torch.equal, before, model._module[3].parameters()))


def test_nor_by_a_pass_in_evaluation_mode():
    model, _private, head, loader = _two("bookkeeping")
    x, y = next(iter(loader))
    model.eval()
    F.cross_entropy(model(x), y).backward()
    with pytest.raises(PrivacyError, match="would apply an ordinary gradient"):
        head.step()


def test_another_optimizer_may_apply_what_was_released():
    _, model, optimizer, loader = make(grad_sample_mode="hooks", noise_multiplier=1.0)
    other = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = next(iter(loader))
    F.cross_entropy(model(x), y).backward()
    with pytest.raises(PrivacyError, match="would apply an ordinary gradient"):
        other.step()
    optimizer.step()
    other.step()


def test_modules_that_are_not_private_are_left_alone():
    x, y = small_data()[:8]
    recorded = GradSampleModule(small_model())
    for module in (recorded, small_model()):
        own = torch.optim.SGD(module.parameters(), lr=0.1)
        F.cross_entropy(module(x), y).backward()
        own.step()


def test_a_wrapper_of_the_users_around_the_private_optimizer():
    class Around(torch.optim.Optimizer):
        def __init__(self, inner):
            self.inner = inner
            super().__init__([p for group in inner.param_groups for p in group["params"]], {})

        def step(self, closure=None):
            self.inner.step()

    _, model, optimizer, loader = make(grad_sample_mode="hooks")
    x, y = next(iter(loader))
    F.cross_entropy(model(x), y).backward()
    Around(optimizer).step()
    assert optimizer.steps == 1


def test_a_wrapper_around_the_private_optimizer_that_applies_the_gradient_itself():
    """It did, before it asked the private one to step."""

    class Greedy(torch.optim.Optimizer):
        def __init__(self, inner):
            self.inner = inner
            super().__init__([p for group in inner.param_groups for p in group["params"]], {})
            self.found = None

        @torch.no_grad()
        def step(self, closure=None):
            params = self.param_groups[0]["params"]
            self.found = [p.grad for p in params]
            for p in params:
                if p.grad is not None:
                    p.sub_(p.grad)
            self.inner.step()

    for mode in ("hooks", "no_op"):
        _, model, optimizer, loader = make(grad_sample_mode=mode, noise_multiplier=1.0)
        greedy = Greedy(optimizer)
        x, y = next(iter(loader))
        F.cross_entropy(model(x), y).backward()
        if mode == "no_op":
            for p in model.parameters():
                p.grad_sample = torch.zeros(len(x), *p.shape, dtype=p.dtype)
        greedy.step()
        assert optimizer.steps == 1 and greedy.found == [None] * 4
        assert all(p.grad is not None for p in model.parameters())  # what was released


def test_a_wrapper_finds_no_gradient_of_another_pass():
    class Around(torch.optim.SGD):
        def __init__(self, inner):
            super().__init__([p for group in inner.param_groups for p in group["params"]], lr=0.1)
            self.inner = inner

    _, model, optimizer, loader = make()
    x, y = next(iter(loader))
    model.eval()
    F.cross_entropy(model(x), y).backward()
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(PrivacyError, match="has an ordinary, unclipped gradient"):
        Around(optimizer).step()
    assert all(map(torch.equal, before, model.parameters()))


def test_what_the_loop_leaves_in_grad_in_the_no_op_mode():
    """Another optimizer applied it."""
    _, model, _private, loader = make(grad_sample_mode="no_op")
    x, y = next(iter(loader))
    F.cross_entropy(model(x), y).backward()
    with pytest.raises(PrivacyError, match="would apply an ordinary gradient"):
        torch.optim.SGD(model.parameters(), lr=0.1).step()


def test_the_private_optimizer_s_own_may_not_step_another_on_what_is_not_its():
    """A gradient of the head, which the private optimizer does not hold, was applied while it stepped."""
    module = small_model()
    head = torch.optim.SGD(module[3].parameters(), lr=0.1)

    class Both(torch.optim.SGD):
        def step(self, closure=None):
            super().step()
            head.step()

    body = Both(module[0].parameters(), lr=0.1)
    _, model, optimizer, loader = make(module, optimizer=body, grad_sample_mode="hooks")
    before = module[3].weight.detach().clone()
    x, y = next(iter(loader))
    F.cross_entropy(model(x), y).backward()
    with pytest.raises(PrivacyError, match="would apply an ordinary gradient"):
        optimizer.step()
    assert torch.equal(before, module[3].weight)


@pytest.mark.parametrize("mode", ["bookkeeping", "hooks"])
def test_an_optimizer_that_takes_the_place_of_the_private_one_is_refused(mode):
    """It trained nothing without a word, or by ordinary gradients: the check went with the private optimizer."""
    _, model, optimizer, loader = make(grad_sample_mode=mode)
    batches = iter(loader)
    x, y = next(batches)
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    optimizer = torch.optim.Adam(model.parameters())
    gc.collect()
    before = [p.detach().clone() for p in model.parameters()]
    optimizer.zero_grad()
    x, y = next(batches)
    F.cross_entropy(model(x), y).backward()
    with pytest.raises(PrivacyError, match="optimizer, which make_private returned, is gone"):
        optimizer.step()
    assert all(map(torch.equal, before, model.parameters()))


def test_the_standard_module_may_have_an_optimizer_of_its_own():
    _, model, optimizer, loader = make()
    del optimizer
    gc.collect()
    module = model.to_standard_module()
    x, y = next(iter(loader))
    F.cross_entropy(module(x), y).backward()
    torch.optim.SGD(module.parameters(), lr=0.1).step()
