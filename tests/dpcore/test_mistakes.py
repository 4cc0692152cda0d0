"""What a first script gets wrong: each message has the value, the rule and the remedy, and everyday scripts run."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from dpcore import CorrelatedNoise, Engine, GradSampleModule, PrivacyEngine, PrivacyError, UnsupportedError
from dpcore.optimizers import DPOptimizer
from dpcore.utils.batch_memory_manager import BatchMemoryManager
from tests.dpcore.private_setup import losses, make, small_data, small_model, step, truth


class Stream(IterableDataset):
    def __iter__(self):
        return iter(small_data())


def _plan(**options):
    model = small_model()
    settings = {
        "module": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "data_loader": DataLoader(small_data(), batch_size=10),
        "target_epsilon": 3.0,
        "target_delta": 1e-5,
        "epochs": 1,
        "max_grad_norm": 1.0,
    }
    return PrivacyEngine().make_private_with_epsilon(**(settings | options))


@pytest.mark.parametrize("epsilon", [float("inf"), 0.0, float("nan"), "8"])
def test_a_target_that_no_noise_is_for(epsilon):
    """An infinite one was searched for ever."""
    with pytest.raises(ValueError, match=r"target_epsilon is .*above 0 and finite.*noise_multiplier=0\.0"):
        _plan(target_epsilon=epsilon)


@pytest.mark.parametrize("loader", [small_data(), [1, 2], None])
@pytest.mark.parametrize("poisson_sampling", [True, False])
def test_a_data_set_in_the_place_of_its_loader(loader, poisson_sampling):
    sentence = rf"data_loader is of type {type(loader).__name__}; pass a torch\.utils\.data\.DataLoader"
    with pytest.raises(TypeError, match=sentence):
        make(data_loader=loader, poisson_sampling=poisson_sampling)
    with pytest.raises(TypeError, match=sentence):
        _plan(data_loader=loader, poisson_sampling=poisson_sampling)


def _without_noise(way):
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if way == "make_private":
        private = PrivacyEngine().make_private(
            module=model,
            optimizer=optimizer,
            data_loader=DataLoader(small_data(), batch_size=10),
            noise_multiplier=0,
            max_grad_norm=1.0,
        )[1]
        private.noise_multiplier = 0.0
    elif way == "a schedule":
        _, _, private, _ = make(noise_multiplier=1.0)
        for sigma in (0.5, 0.0, 0.0):
            private.noise_multiplier = sigma
    else:
        engine = Engine(model, losses, expected_batch_size=10, optimizer=optimizer)
        engine.clipped_sum(*small_data()[:5])
        for _ in range(2):
            engine.step(*small_data()[:5])


@pytest.mark.parametrize("way", ["make_private", "a schedule", "Engine"])
def test_no_noise_is_said_once(way):
    with pytest.warns(UserWarning) as told:
        _without_noise(way)
    assert [str(one.message)[:23] for one in told] == ["noise_multiplier is 0, "]


def test_correlated_noise_for_an_engine_is_one_sentence():
    for mechanism in (0.9, CorrelatedNoise.previous(0.9)):
        with pytest.raises(UnsupportedError, match=r"noise of an Engine's steps is independent.*make_private"):
            Engine(small_model(), losses, expected_batch_size=10, mechanism=mechanism)
    with pytest.raises(TypeError, match=r"mechanism is 0\.9; it must be a dpcore\.CorrelatedNoise"):
        make(mechanism=0.9)
    with pytest.raises(TypeError, match=r"mechanism is 0\.9; it must be a dpcore\.CorrelatedNoise"):
        _plan(mechanism=0.9)


def test_epsilon_without_delta():
    engine, *_ = make()
    with pytest.raises(TypeError, match=r"without delta.*get_epsilon\(delta=0\.01\)"):
        engine.get_epsilon()
    for delta in ("1e-5", 0, torch.tensor(2.0)):
        with pytest.raises(ValueError, match=r"delta is .*; it must be a number in \(0, 1\)"):
            engine.get_epsilon(delta)


@pytest.mark.parametrize(("divisor", "told"), [(10.0, False), (14.0, False), (30.0, True), (3.0, True)])
def test_a_divisor_that_belongs_to_other_data(divisor, told):
    """The update would be so many times too short, or too long, as a snippet for another data set makes it."""
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        PrivacyEngine().make_private(
            module=(model := small_model()),
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            data_loader=DataLoader(small_data(), batch_size=10),
            noise_multiplier=1.0,
            max_grad_norm=1.0,
            sample_rate=10 / len(small_data()),
            expected_batch_size=divisor,
        )
    said = [str(w.message) for w in heard if "examples on average" in str(w.message)]
    assert bool(said) == told
    assert not told or f"is {divisor:g}, and a batch holds 10 examples on average" in said[0]


@pytest.mark.parametrize("bound", [None, "1.0", "many", -1.0, float("nan")])
def test_a_bound_that_is_no_number(bound):
    with pytest.raises(ValueError, match=f"max_grad_norm is {bound!r}; it must be a number"):
        make(max_grad_norm=bound)


def test_a_bound_beside_which_rounding_would_count_is_refused():
    with pytest.raises(ValueError, match="max_grad_norm is 1e-09; it must be at least 1e-08"):
        make(max_grad_norm=1e-9)
    make(max_grad_norm=1e-8)


@pytest.mark.filterwarnings("ignore")
def test_a_plan_without_epochs():
    with pytest.raises(ValueError, match="epochs is 0; it must be above 0"):
        _plan(epochs=0)


@pytest.mark.filterwarnings("ignore")
def test_data_without_a_length():
    with pytest.raises(UnsupportedError, match="IterableDataset"):
        make(data_loader=DataLoader(Stream(), batch_size=10))
    for options in ({"sample_rate": None}, {"expected_batch_size": None}):
        with pytest.raises(ValueError, match="has no length"):
            make(data_loader=DataLoader(Stream(), batch_size=10), poisson_sampling=False, **options)
    with pytest.raises(ValueError, match="of type Stream, has no length"):
        _plan(data_loader=DataLoader(Stream(), batch_size=10))
    _, model, optimizer, loader = make(data_loader=DataLoader(Stream(), batch_size=10), poisson_sampling=False)
    for x, y in loader:
        step(model, optimizer, x, y)


def test_what_is_no_module_and_no_optimizer():
    model = small_model()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(TypeError, match="module is of type SGD"):
        PrivacyEngine().make_private(
            module=sgd,
            optimizer=model,
            data_loader=DataLoader(small_data(), batch_size=10),
            noise_multiplier=1.0,
            max_grad_norm=1.0,
        )
    with pytest.raises(TypeError, match="optimizer is of type list"):
        make(model, optimizer=[sgd])
    with pytest.raises(UnsupportedError, match="LBFGS evaluates the same batch several times"):
        make(model, optimizer=torch.optim.LBFGS(model.parameters()))
    with pytest.raises(UnsupportedError, match="SparseAdam takes sparse gradients alone"):
        make(model, optimizer=torch.optim.SparseAdam(model.parameters()))
    with pytest.raises(UnsupportedError, match="LBFGS evaluates the same batch several times"):
        DPOptimizer(
            torch.optim.LBFGS(model.parameters()), noise_multiplier=1.0, max_grad_norm=1.0, expected_batch_size=10
        )
    _, _, _, loader = make(model, optimizer=sgd)
    with pytest.raises(TypeError, match="which would step on every piece"):
        BatchMemoryManager(data_loader=loader, max_physical_batch_size=5, optimizer=sgd)


def test_a_seed_of_the_noise_in_secure_mode():
    """It was ignored, and the run could not be repeated although its script said so."""
    model, generator = small_model(), torch.Generator().manual_seed(1)
    with pytest.raises(ValueError, match="noise_generator would be ignored"):
        make(model, engine=PrivacyEngine(secure_mode=True), noise_generator=generator)
    settings = {"noise_multiplier": 1.0, "max_grad_norm": 1.0, "expected_batch_size": 10}
    with pytest.raises(ValueError, match="a generator would be ignored"):
        DPOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), generator=generator, secure_mode=True, **settings)


def test_the_seed_of_the_noise_is_drawn_where_its_generator_is(monkeypatch):
    """A generator on a GPU failed with torch's message; here torch's random numbers only tell what they were asked."""
    asked = []

    def randint(*args, generator=None, device=None, **kwargs):
        if generator is not None:
            asked.append(device)
        return original(*args, generator=generator, device=device, **kwargs)

    original = torch.randint
    monkeypatch.setattr(torch, "randint", randint)
    generator = torch.Generator().manual_seed(1)
    make(small_model(), noise_generator=generator)
    module = GradSampleModule(small_model())
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    DPOptimizer(optimizer, noise_multiplier=1.0, max_grad_norm=1.0, expected_batch_size=10, generator=generator)
    assert asked == [generator.device] * 2


def test_training_in_evaluation_mode():
    _, model, optimizer, loader = make()
    model.eval()
    x, y = next(iter(loader))
    with pytest.raises(PrivacyError, match=r"in evaluation mode.*model\.train\(\)"):
        step(model, optimizer, x, y)
    model.train()
    step(model, optimizer, *next(iter(loader)))


def test_gradients_past_the_private_module():
    _, model, optimizer, loader = make()
    x, y = next(iter(loader))
    (F.cross_entropy(model(x), y) + sum(p.square().sum() for p in model.parameters())).backward()
    with pytest.raises(PrivacyError, match=r"weight_decay.*param\.expand\(len\(x\)"):
        optimizer.step()


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.hidden, self.logits, self.value = nn.Linear(6, 5), nn.Linear(5, 3), nn.Linear(5, 1)

    def forward(self, x):
        return self.logits(torch.tanh(self.hidden(x)))

    def evaluate(self, x, y):
        h = torch.tanh(self.hidden(x))
        return F.cross_entropy(self.logits(h), y, reduction="none") + self.value(h).squeeze(1).square()

    def twice(self, x, y):
        return self.evaluate(x, y) + self.evaluate(-x, y)

    def fit(self, x, y):
        self.evaluate(x, y).mean().backward()

    def fit_by_layers(self, x, y):
        F.cross_entropy(self.logits(torch.tanh(self.hidden(x))), y).backward()


@pytest.mark.parametrize("called", ["the wrapper", "the module inside", "the module alone"])
@pytest.mark.parametrize("method", ["forward", "evaluate", "twice"])
def test_other_methods_and_the_module_inside_are_recorded(method, called):
    torch.manual_seed(0)
    policy, rate = Policy(), 0.5
    options = {"poisson_sampling": False, "noise_multiplier": 0.0, "max_grad_norm": 0.5}
    private, optimizer, loader = PrivacyEngine().make_private(
        module=policy,
        optimizer=torch.optim.SGD(policy.parameters(), lr=rate),
        data_loader=DataLoader(TensorDataset(torch.randn(20, 6), torch.randint(0, 3, (20,))), batch_size=5),
        wrap_model=called != "the module alone",
        **options,
    )
    at_hand = private if called == "the wrapper" else policy
    for x, y in loader:
        true, before = copy.deepcopy(policy).double(), [p.detach().double().clone() for p in policy.parameters()]
        optimizer.zero_grad()
        (F.cross_entropy(at_hand(x), y) if method == "forward" else getattr(at_hand, method)(x, y).mean()).backward()
        optimizer.step()
        total = [torch.zeros_like(p) for p in before]
        for i in range(5):
            one, label = x[i : i + 1].double(), y[i : i + 1]
            loss = F.cross_entropy(true(one), label) if method == "forward" else getattr(true, method)(one, label).sum()
            grads = torch.autograd.grad(loss, list(true.parameters()), allow_unused=True, materialize_grads=True)
            factor = min(1.0, 0.5 / float(sum(g.square().sum() for g in grads)) ** 0.5)
            total = [t + factor * g for t, g in zip(total, grads, strict=True)]
        for p, old, summed in zip(policy.parameters(), before, total, strict=True):
            torch.testing.assert_close((old - p.detach()) * 5 / rate, summed, rtol=1e-3, atol=1e-4)


def test_a_method_that_makes_a_backward_pass_is_no_pass_of_its_own():
    policy = Policy().double()
    _, _, optimizer, loader = make(policy)
    assert not {"fit", "fit_by_layers"} & vars(policy).keys()
    before = policy.hidden.weight.detach().clone()
    policy.fit(*next(iter(loader)))  # through a method that is one
    optimizer.step()
    assert (policy.hidden.weight != before).any()
    policy.fit_by_layers(*next(iter(loader)))
    with pytest.raises(PrivacyError, match="ordinary, unclipped gradient"):
        optimizer.step()


def test_copies_and_the_standard_module_have_their_own_methods():
    policy = Policy()
    _, model, _, _ = make(policy)
    twin = copy.deepcopy(policy)
    assert "evaluate" in vars(policy)
    x, y = torch.randn(4, 6), torch.tensor([0, 1, 2, 0])
    twin.evaluate(x, y).sum().backward()
    assert twin.hidden.weight.grad is not None and policy.hidden.weight.grad is None
    model.to_standard_module()
    assert not {"forward", "evaluate", "twice"} & vars(policy).keys()


def test_a_gradient_that_was_only_looked_at_is_no_fault_and_one_that_was_changed_is():
    torch.manual_seed(0)
    x, y = torch.randn(6, 6), torch.randint(0, 3, (6,))
    for most, fine in ((float("inf"), True), (1e-3, False)):
        model = GradSampleModule(nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = DPOptimizer(optimizer, noise_multiplier=0.0, max_grad_norm=1.0, expected_batch_size=6)
        F.cross_entropy(model(x), y).backward()
        nn.utils.clip_grad_norm_(model.parameters(), most)
        if fine:
            optimizer.step()
        else:
            with pytest.raises(PrivacyError, match="changed by hand"):
                optimizer.step()


def test_a_wrapper_that_is_not_kept_is_told_of_hooks():
    model = nn.Linear(4, 2)
    GradSampleModule(model)
    with pytest.raises(PrivacyError, match=r"dpcore\.grad_sample\.GradSampleHooks\(module\)"):
        DPOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1), noise_multiplier=0.0, max_grad_norm=1.0, expected_batch_size=6
        )


def test_a_frozen_batch_norm_in_evaluation_mode_stays():
    def build() -> nn.Sequential:
        model = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)).double()
        model[1].running_mean.normal_()
        model[1].requires_grad_(False)
        return model

    with pytest.raises(UnsupportedError, match=r"Module '1' is a BatchNorm1d.*eval\(\) after every train\(\)"):
        make(build())
    inner = build()
    inner[1].eval()
    _, model, optimizer, _ = make(inner, check_batches=False)
    x, y = small_data()[:10]
    expected = truth(inner, x, y)
    statistics = inner[1].running_mean.clone()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    for name, param in inner.named_parameters():
        if name in expected:
            torch.testing.assert_close(param.grad * 10, expected[name])
    model.train()
    for context in (torch.enable_grad(), torch.no_grad()):
        with context, pytest.raises(UnsupportedError, match="Module '1' is a BatchNorm1d"):
            model(x)
    assert torch.equal(inner[1].running_mean, statistics)
    inner[1].eval()
    step(model, optimizer, x, y)
    bare = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5, track_running_stats=False), nn.Linear(5, 3))
    bare[1].eval()
    with pytest.raises(UnsupportedError, match="BatchNorm1d"):
        make(bare)


def test_a_module_that_moves_after_make_private():
    inner = small_model().float()
    _, model, optimizer, _ = make(inner, check_batches=False)
    x, y = small_data()[:10]
    step(model, optimizer, x.float(), y)
    model.to(torch.float64)
    expected = truth(inner, x, y)
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    for name, param in inner.named_parameters():
        torch.testing.assert_close(param.grad * 10, expected[name])


SEQUENCES = torch.randn(3, 5, 8, dtype=torch.float64)
IMAGES = torch.randn(3, 4, 6, 6, dtype=torch.float64)


class Last(nn.Module):
    """The last of a layer's outputs, from as many inputs as it takes."""

    def __init__(self, layer: nn.Module, inputs: int = 1) -> None:
        super().__init__()
        self.layer, self.inputs = layer.double(), inputs

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if isinstance(self.layer, nn.EmbeddingBag | nn.Embedding):
            x = (x.sum(2) * 0).long()
        output = self.layer(*[x] * self.inputs)
        return output[0] if isinstance(output, tuple) else output


@pytest.mark.parametrize("mode", ["bookkeeping", "hooks"])
@pytest.mark.parametrize("empty_first", [True, False])
@pytest.mark.parametrize(
    ("layer", "inputs", "x"),
    [
        (nn.Linear(8, 3), 1, SEQUENCES),
        (nn.LayerNorm(8), 1, SEQUENCES),
        (nn.Bilinear(8, 8, 3), 2, SEQUENCES),
        (nn.PReLU(), 1, SEQUENCES),
        (nn.Embedding(4, 3), 1, SEQUENCES),
        (nn.EmbeddingBag(4, 3), 1, SEQUENCES),
        (nn.GRU(8, 3, 2, batch_first=True, bidirectional=True), 1, SEQUENCES),
        (nn.LSTM(8, 3, batch_first=True, proj_size=2), 1, SEQUENCES),
        (nn.RNN(8, 3, batch_first=True), 1, SEQUENCES),
        (nn.MultiheadAttention(8, 2, batch_first=True), 3, SEQUENCES),
        (nn.TransformerEncoderLayer(8, 2, 9, batch_first=True), 1, SEQUENCES),
        (nn.Conv2d(4, 2, 3, padding=1, padding_mode="circular"), 1, IMAGES),
        (nn.ConvTranspose2d(4, 2, 3), 1, IMAGES),
        (nn.Sequential(nn.Conv2d(4, 4, 3, groups=2), nn.GroupNorm(2, 4)), 1, IMAGES),
        (nn.InstanceNorm2d(4, affine=True), 1, IMAGES),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
def test_an_empty_batch_is_a_step_for_every_layer(layer, inputs, x, empty_first, mode):
    inner = Last(copy.deepcopy(layer), inputs)
    engine, model, optimizer, _ = make(inner, check_batches=False, grad_sample_mode=mode)
    for count in [0, 3] if empty_first else [3, 0]:
        optimizer.zero_grad()
        output = model(x[:count])
        assert len(output) == count
        output.mean().backward()
        if not count and mode == "hooks":
            assert all(not p.grad.any() and len(p.grad_sample) == 0 for p in inner.parameters())
        optimizer.step()
        assert any(p.grad.any() for p in inner.parameters()) == (count > 0)
    assert sum(steps for _, _, steps in engine.accountant.history) == 2


@pytest.mark.parametrize("poisson", [True, False])
@pytest.mark.filterwarnings("ignore")
def test_the_number_of_pieces_is_that_of_a_progress_bar(poisson):
    _, _, optimizer, loader = make(poisson_sampling=poisson)
    for size, pieces in ((3, 20), (5, 12), (100, 6)):
        with BatchMemoryManager(data_loader=loader, max_physical_batch_size=size, optimizer=optimizer) as manager:
            assert len(manager) == pieces


def test_warnings_point_at_the_script():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _plan(sample_rate=0.1)
    assert caught and all(w.filename == __file__ for w in caught)


@pytest.mark.parametrize("compile", [False, "aot_eager"])
def test_inference_mode_in_which_every_gradient_would_be_zero_is_refused(compile):
    model = nn.Linear(4, 3)
    engine = Engine(model, lambda out, y: F.cross_entropy(out, y, reduction="none"), max_grad_norm=1.0, compile=compile)
    x, y = torch.randn(8, 4), torch.arange(8) % 3
    with torch.inference_mode(), pytest.raises(PrivacyError, match="inference_mode"):
        engine.clipped_sum(x, y)
    for _ in range(2):
        assert engine.clipped_sum(x, y).norms.gt(0).all()


@pytest.mark.parametrize(
    ("name", "value", "remedy"),
    [
        ("secure_mode", True, r"PrivacyEngine\(secure_mode=True\)"),
        ("generator", torch.Generator(), "noise_generator="),
        ("noise", None, "from the engine's seed"),
        ("epochs", 3, r"make_private_with_epsilon\(\)"),
    ],
)
def test_what_make_private_sets_itself_is_not_ignored_where_it_is_passed(name, value, remedy):
    """A run with secure_mode=True given here drew its noise from an ordinary generator, without a word."""
    with pytest.raises(TypeError, match=f"takes no argument '{name}'.*{remedy}"):
        make(**{name: value})


def test_a_step_within_inference_mode_says_so_and_releases_nothing():
    engine, wrapped, optimizer, _ = make(check_batches=False)
    x, y = small_data()[:5]
    F.cross_entropy(wrapped(x), y).backward()
    with torch.inference_mode(), pytest.raises(PrivacyError, match="inference_mode"):
        optimizer.step()
    assert len(engine.accountant) == 0 and optimizer.steps == 0
    optimizer.step()
    assert len(engine.accountant) == 1


@pytest.mark.parametrize("kind", ["frozen", "foreign"])
def test_an_engine_s_optimizer_that_holds_another_gradient(kind):
    """step() applied it, without clipping and noise."""
    model, other = small_model(), torch.nn.Parameter(torch.ones(3, dtype=torch.float64))
    if kind == "frozen":
        other = model[0].weight.requires_grad_(False)
    held = {id(p): p for p in (*model.parameters(), other)}
    optimizer = torch.optim.SGD(held.values(), lr=0.1)
    engine = Engine(model, losses, max_grad_norm=0.5, expected_batch_size=10, optimizer=optimizer)
    x, y = small_data()[:8]
    engine.step(x, y)
    other.grad = torch.ones_like(other)
    before = [p.detach().clone() for p in held.values()]
    with pytest.raises(PrivacyError, match="has a gradient: step\\(\\) would apply it without clipping and noise"):
        engine.step(x, y)
    assert engine.steps == 1 and all(map(torch.equal, before, held.values()))


def test_one_target_for_all_examples_of_an_engine():
    """It would be spread over the batch, and its example would move the contributions of all."""

    def squares(outputs, y):
        return (outputs - y).square().mean(1)

    x, y = small_data()[:5][0], torch.randn(5, 3, dtype=torch.float64)
    engine = Engine(small_model(), squares, max_grad_norm=0.5)
    engine.clipped_sum(x, y)
    with pytest.raises(UnsupportedError, match=r"y has the shape \(1, 3\) and x 5 examples"):
        engine.clipped_sum(x, y[:1])


def test_a_new_optimizer_on_the_private_module_is_refused_where_it_would_do_nothing():
    model = nn.Linear(5, 3)
    private, _kept, loader = PrivacyEngine(seed=1).make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(TensorDataset(torch.randn(40, 5), torch.arange(40) % 3), batch_size=20),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
    )
    other = torch.optim.SGD(private.parameters(), lr=0.1)
    x, y = next(iter(loader))
    F.cross_entropy(private(x), y).backward()
    with pytest.raises(PrivacyError, match=r"SGD.step\(\) would do nothing.*make_private returned"):
        other.step()


def test_training_with_the_old_objects_shows_when_epsilon_is_read():
    model = nn.Linear(5, 3)
    engine = PrivacyEngine(seed=1)
    engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(TensorDataset(torch.randn(40, 5), torch.arange(40) % 3), batch_size=20),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
    )
    with pytest.warns(UserWarning, match="No private step was taken"):
        assert engine.get_epsilon(1e-3) == 0.0


def test_a_loader_without_batches_is_a_sentence():
    model = nn.Linear(5, 3)
    with pytest.raises(ValueError, match=r"batch_size is 50 for 40 examples.*at most 40"):
        PrivacyEngine().make_private(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            data_loader=DataLoader(
                TensorDataset(torch.randn(40, 5), torch.arange(40) % 3), batch_size=50, drop_last=True
            ),
            noise_multiplier=1.0,
            max_grad_norm=1.0,
        )


def test_the_remedy_for_a_parameter_in_the_loss_works():
    """A distance to other weights, as FedProx has it: refused beside the module, exact by example within it."""

    class Near(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, x):
            return self.layer(x), self.layer.weight.expand(len(x), 3, 4)

    torch.manual_seed(0)
    x, y, anchor = torch.randn(8, 4), torch.arange(8) % 3, torch.randn(3, 4)
    model = GradSampleModule(Near(), loss_reduction="sum")
    outputs, weights = model(x)
    (F.cross_entropy(outputs, y, reduction="sum") + (weights - anchor).square().sum()).backward()
    plain = model._module.layer
    for i in range(8):
        alone = F.cross_entropy(plain(x[i]), y[i]) + (plain.weight - anchor).square().sum()
        for p, g in zip(plain.parameters(), torch.autograd.grad(alone, list(plain.parameters())), strict=True):
            torch.testing.assert_close(p.grad_sample[i], g, rtol=1e-4, atol=1e-6)
