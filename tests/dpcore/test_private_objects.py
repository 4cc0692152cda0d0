"""The module, its parameters and the optimiser that make_private returns: copies, attributes, hooks, and what cannot
be made private."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import dpcore
from dpcore import Engine
from tests.dpcore.private_setup import losses, make, small_data, small_model, step

# ---- copies


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_of_a_module_with_hooks_is_an_ordinary_module(copied):
    model = small_model()
    _, _, _, _ = make(model, wrap_model=False)
    x = small_data()[:5][0]
    for made in (copied(model), copied(copied(model))):
        torch.testing.assert_close(made(x), model.eval()(x))
        with torch.no_grad():
            for p in made.parameters():
                p.zero_()
        assert float(made(x).detach().abs().max()) == 0.0 < float(model(x).detach().abs().max())
        F.cross_entropy(made.train()(x), torch.arange(5) % 3).backward()
        assert all(p.grad is not None for p in made.parameters())
        model.train()


def test_a_copy_keeps_a_forward_of_the_users():
    model = small_model()
    model.forward = lambda x: 2 * nn.Sequential.forward(model, x)
    make(model, wrap_model=False)
    x = small_data()[:5][0]
    torch.testing.assert_close(copy.deepcopy(model)(x), model.eval()(x))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda engine: pickle.loads(pickle.dumps(engine))])
def test_a_copy_of_an_engine_counts_on(copied):
    engine, model, optimizer, loader = make(noise_multiplier=1.0)
    step(model, optimizer, *next(iter(loader)))
    before = copied(engine)
    step(model, optimizer, *next(iter(loader)))
    assert before.get_epsilon(1e-5) < engine.get_epsilon(1e-5)
    _, model, optimizer, loader = make(engine=before, noise_multiplier=1.0)
    step(model, optimizer, *next(iter(loader)))
    assert before.get_epsilon(1e-5) == pytest.approx(engine.get_epsilon(1e-5))


@pytest.mark.parametrize("copied", [copy.deepcopy, copy.copy, pickle.dumps])
def test_a_private_optimizer_is_not_copied_and_others_go_on(copied):
    _, _, optimizer, _ = make()
    with pytest.raises(dpcore.PrivacyError, match="cannot be copied or pickled"):
        copied(optimizer)
    for adaptive in ({}, {"clipping": "adaptive", "target_unclipped_quantile": 0.5, "clipbound_learning_rate": 0.1,
                          "max_clipbound": 1.0, "min_clipbound": 0.1, "unclipped_num_std": 1.0,
                          "noise_multiplier": 1.0}):  # fmt: skip
        _, model, other, loader = make(**adaptive)
        for x, y in loader:
            step(model, other, x, y)
        assert other.steps > 0


# ---- attributes


class Tempered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.temperature = nn.Linear(6, 3).double(), 1.0

    def forward(self, x):
        return self.layer(x) / self.temperature


def test_an_attribute_set_on_the_wrapper_reaches_the_module():
    inner = Tempered()
    _, model, optimizer, loader = make(inner)
    x = small_data()[:5][0]
    before = model(x).detach()
    model.temperature = 0.25
    assert inner.temperature == model.temperature == 0.25 and "temperature" not in vars(model)
    torch.testing.assert_close(model(x).detach(), 4 * before)
    model.note = "mine"
    assert not hasattr(inner, "note")
    model.eval()
    assert not inner.training
    model.train()
    x, y = next(iter(loader))
    model.layer = nn.Linear(6, 3).double()
    assert inner.layer is model.layer
    with pytest.raises(dpcore.PrivacyError, match="was replaced"):
        step(model, optimizer, x, y)


# ---- gradients


def test_two_backward_passes_through_one_graph_add_up():
    for wrap in (True, False):
        model, x, y = small_model(), *small_data()[:5]
        reference = copy.deepcopy(model)
        F.cross_entropy(reference(x), y).backward()
        _, private, _, _ = make(model, grad_sample_mode="hooks", check_batches=False, wrap_model=wrap)
        call = private if wrap else model
        loss = F.cross_entropy(call(x), y)
        loss.backward(retain_graph=True)
        loss.backward()
        for p, q in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(p.grad, 2 * q.grad)
        F.cross_entropy(call(x), y).backward()
        for p, q in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(p.grad, 3 * q.grad)


def test_two_losses_of_one_pass_add_up():
    model, x, y = small_model(), *small_data()[:5]
    reference = copy.deepcopy(model)
    for net in (reference, make(model, grad_sample_mode="hooks", check_batches=False)[1]):
        output = net(x)
        F.cross_entropy(output, y).backward(retain_graph=True)
        output.square().mean().backward()
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)


def test_adversarial_training_is_told_what_to_do():
    _, model, optimizer, loader = make()
    for x, y in loader:
        x = x.requires_grad_()
        (grad,) = torch.autograd.grad(F.cross_entropy(model(x), y), x)
        F.cross_entropy(model((x + 0.1 * grad.sign()).detach()), y).backward()
        with pytest.raises(dpcore.PrivacyError, match=r"torch.autograd.grad .*adversarial.* model.eval\(\)"):
            optimizer.step()
        break
    for x, y in loader:
        x = x.requires_grad_()
        model.eval()
        (grad,) = torch.autograd.grad(F.cross_entropy(model(x), y), x)
        model.train()
        step(model, optimizer, (x + 0.1 * grad.sign()).detach(), y)


# ---- hooks


def _hook_a_parameter(model, kind):
    return getattr(next(model.parameters()), kind)(lambda *given: None)


@pytest.mark.parametrize("kind", ["register_hook", "register_post_accumulate_grad_hook"])
def test_parameters_with_hooks_are_refused(kind):
    hooked = pytest.raises(dpcore.UnsupportedError, match=r"Parameter 0\.weight has a gradient hook")
    model = small_model()
    handle = _hook_a_parameter(model, kind)
    with hooked:
        make(model)
    with hooked:
        Engine(model, losses)
    handle.remove()
    _, private, optimizer, loader = make(model)
    handle = _hook_a_parameter(model, kind)
    x, y = next(iter(loader))
    with hooked:
        step(private, optimizer, x, y)
    handle.remove()
    engine = Engine(model, losses)
    _hook_a_parameter(model, kind)
    with hooked:
        engine.clipped_sum(x, y)


def test_forward_hooks_see_the_users_rows_alone():
    for wrap in (True, False):
        model, seen, sizes, calls = small_model(), [], {}, 0

        class Recorder:
            last = None

            def __init__(self):
                self.all = []

            def hook(self, module, inputs, output):
                self.last = output
                self.all.append(len(output))

        recorder = Recorder()

        def count(module, inputs, seen=seen, sizes=sizes):
            nonlocal calls
            calls += 1
            seen.append(len(inputs[0]))
            sizes[len(inputs[0])] = True

        model[0].register_forward_pre_hook(count)
        model[2].register_forward_hook(recorder.hook)
        _, private, optimizer, loader = make(model, wrap_model=wrap)
        expected = []
        for x, y in loader:
            if len(x):
                expected.append(len(x))
            step(private if wrap else model, optimizer, x, y)
        assert [n for n in seen if n] == expected == [n for n in recorder.all if n]
        assert calls == len(seen) and set(sizes) == set(seen) and len(recorder.last) == len(x)


def test_the_optimizers_hooks_see_released_gradients_and_updates():
    _, model, optimizer, loader = make()
    events = []
    optimizer.register_step_pre_hook(
        lambda of, args, kwargs: events.append(("pre", of, next(model.parameters()).grad.clone()))
    )
    optimizer.register_step_post_hook(lambda of, args, kwargs: events.append(("post", of, None)))
    optimizer.register_state_dict_post_hook(lambda of, state: state | {"note": 1})
    x, y = next(iter(loader))
    F.cross_entropy(model(x), y).backward()
    optimizer.signal_skip_step()
    optimizer.step()
    assert events == []
    optimizer.discard()
    x, y = next(iter(loader))
    step(model, optimizer, x, y)
    assert [event[0] for event in events] == ["pre", "post"] and all(event[1] is optimizer for event in events)
    torch.testing.assert_close(events[0][2], next(model.parameters()).grad)
    assert optimizer.state_dict()["note"] == 1


# ---- what cannot be made private


class Scripted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.jit.script(nn.Linear(6, 3).double())

    def forward(self, x):
        return self.inner(x)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
@pytest.mark.parametrize(
    ("model", "sentence"),
    [
        (lambda: nn.Sequential(nn.LazyLinear(3)), "lazy layer and has no shape yet"),
        (Scripted, "inner is scripted or traced"),
    ],
)
def test_layers_that_hide_their_parameters_are_refused(model, sentence):
    model = model()
    with pytest.raises(dpcore.UnsupportedError, match=sentence):
        make(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(dpcore.UnsupportedError, match=sentence):
        Engine(model, losses)


def test_loaders_of_whole_batches_are_refused():
    batches = DataLoader([(torch.randn(8, 6), torch.zeros(8).long())] * 4, batch_size=None)
    with pytest.raises(dpcore.UnsupportedError, match="batch_size=None"):
        make(data_loader=batches)


def test_a_lazy_layer_that_was_run_once_is_private():
    model = nn.Sequential(nn.LazyLinear(3)).double()
    data = TensorDataset(*small_data()[:])
    model(data[:2][0])
    _, private, optimizer, loader = make(model)
    x, y = next(iter(loader))
    step(private, optimizer, x, y)
    assert optimizer.steps == 1


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_of_a_private_wrapper_says_that_training_it_does_nothing(copied):
    _, model, _, _ = make()
    x, y = small_data()[:4]
    other = copied(model)
    torch.testing.assert_close(other.eval()(x), model.eval()(x))
    with pytest.raises(dpcore.PrivacyError, match="copy of a private module"):
        other.train()(x)
    standard = other.to_standard_module()
    F.cross_entropy(standard(x), y).backward()
    assert all(p.grad is not None for p in standard.parameters())


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_of_a_wrapper_records_for_itself(copied):
    x, y = small_data()[:4]
    model = dpcore.GradSampleModule(small_model())
    other = copied(model)
    for one in (model, other):
        F.cross_entropy(one(x), y).backward()
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(q.grad_sample, p.grad_sample)


def test_an_optimizer_of_a_part_of_the_module_that_does_nothing_is_refused():
    model = small_model()
    parameters = list(model.parameters())
    head = torch.optim.Adam(parameters[-2:], lr=0.1)
    _, private, optimizer, loader = make(model, optimizer=torch.optim.SGD(parameters[:-2], lr=0.1))
    head.step()  # before any pass: as warm-ups of schedules do
    x, y = next(iter(loader))
    step(private, optimizer, x, y)
    with pytest.raises(dpcore.PrivacyError, match="would do nothing"):
        head.step()


def test_weights_of_an_ordinary_model_say_where_they_belong():
    _, model, *_ = make()
    weights = small_model().state_dict()
    with pytest.raises(RuntimeError, match=r"'0.weight' the first.*model._module.load_state_dict\(\)"):
        model.load_state_dict(weights)
    model._module.load_state_dict(weights)
    model.load_state_dict(model.state_dict())
