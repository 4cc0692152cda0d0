"""The kernel of the cross-entropy beside torch's own, in a private pass and in the user's own loop behind it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

from dpcore import Engine, GradSampleModule, native
from dpcore.rules import cross_entropy
from tests.dpcore.test_native import pytestmark  # noqa: F401

TOKENS, CLASSES = 9, 700


class Words(nn.Module):
    """[B, T] ids to logits [B, T, C]."""

    def __init__(self, classes=CLASSES):
        super().__init__()
        self.table = nn.Embedding(50, 12)
        self.head = nn.Linear(12, classes)

    def forward(self, x):
        return self.head(self.table(x).tanh())


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Lets the kernel take what a test can afford."""
    monkeypatch.setattr(cross_entropy, "WORTH_A_KERNEL", 0)


@pytest.fixture
def calls(monkeypatch):
    """Lists the reductions that went through the kernel."""
    found, original = [], cross_entropy._by_kernel

    def seen(input, target, reduction, ignored):
        result = original(input, target, reduction, ignored)
        if result is not None:
            found.append(reduction)
        return result

    monkeypatch.setattr(cross_entropy, "_by_kernel", seen)
    return found


def batch(size=6, classes=CLASSES, ignored=-100):
    torch.manual_seed(0)
    y = torch.randint(0, classes, (size, TOKENS))
    y[:, ::4] = ignored
    return torch.randint(0, 50, (size, TOKENS)), y


def by_kernel_and_by_float64(z, target, reduction, ignored):
    weights = torch.rand(target.shape if reduction == "none" else ())
    found = []
    for logits in (z.detach().requires_grad_(), z.detach().double().requires_grad_()):
        if logits.dtype == torch.float32:
            losses = cross_entropy._by_kernel(logits, target, reduction, ignored)
            assert losses is not None
        else:
            losses = F.cross_entropy(logits, target, reduction=reduction, ignore_index=ignored)
        (losses * weights).sum().backward()
        found.append((losses.detach(), logits.grad))
    return found


@given(
    st.integers(1, 5),
    st.integers(0, 7),
    st.integers(1, 300),
    st.sampled_from(["rows", "last", "middle", "strided"]),
    st.sampled_from(["none", "sum", "mean"]),
    st.sampled_from([-100, 0, 3]),
    st.sampled_from([0.1, 1.0, 30.0, 1000.0]),
)
@settings(max_examples=60)
def test_losses_and_gradients_are_those_of_float64(batch, tokens, classes, layout, reduction, ignored, scale):
    torch.manual_seed(classes)
    if layout == "rows":
        z, target = scale * torch.randn(batch, classes), torch.randint(0, classes, (batch,))
    else:
        z, target = scale * torch.randn(batch, tokens + 2, classes), torch.randint(0, classes, (batch, tokens))
        z = (z[:, 1:-1] if layout == "strided" else z[:, :tokens].contiguous()).transpose(1, 2)
    target = torch.where(torch.rand(target.shape) < 0.3, ignored, target)
    (losses, grad), (true_losses, true_grad) = by_kernel_and_by_float64(z, target, reduction, ignored)
    if reduction == "mean" and bool((target == ignored).all()):
        assert losses.isnan() and true_losses.isnan()
        return
    torch.testing.assert_close(losses, true_losses.float(), rtol=2e-6, atol=2e-6 * max(1.0, scale))
    torch.testing.assert_close(grad, true_grad.float(), rtol=1e-5 * max(1.0, scale), atol=1e-6)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_values_that_are_not_finite_stay_in_their_row_as_in_torch(value):
    z = torch.randn(4, 150)
    z[1, 70], z[3, 140] = value, value
    target = torch.tensor([3, 5, 149, 140])
    found = []
    for original in (False, True):
        logits = z.clone().requires_grad_()
        losses = F.cross_entropy(logits, target, reduction="none") if original else None
        losses = cross_entropy._by_kernel(logits, target, "none", -100) if losses is None else losses
        losses.sum().backward()
        found.append((losses.detach(), logits.grad))
    for ours, torchs in zip(*found, strict=True):
        torch.testing.assert_close(ours, torchs, equal_nan=True, rtol=1e-5, atol=1e-6)


def test_the_gradient_does_not_depend_on_the_number_of_threads(monkeypatch):
    z, target = torch.randn(300, 2000), torch.randint(0, 2000, (300,))
    found = []
    for threads in (1, 2):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        logits = z.clone().requires_grad_()
        cross_entropy._by_kernel(logits, target, "sum", -100).backward()
        found.append(logits.grad)
    assert torch.equal(*found)


def test_labels_beyond_the_classes_get_torchs_own_words(calls):
    x, y = batch()
    y[2, 1] = CLASSES
    module = GradSampleModule(Words())
    with pytest.raises(IndexError, match=str(CLASSES)):
        F.cross_entropy(module(x).transpose(1, 2), y)
    assert calls == []


def kernel_loss(logits, labels):
    found = cross_entropy._by_kernel(logits, labels, "mean", -100)
    assert found is not None
    return found


def test_logits_that_were_changed_behind_the_loss_are_refused():
    logits = torch.randn(4, 100, requires_grad=True) * 1.0
    loss = kernel_loss(logits, torch.arange(4))
    with torch.no_grad():
        logits.mul_(2.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation") as refusal:
        loss.backward()
    assert refusal.value.__notes__ == [cross_entropy.CHANGED]


def test_changes_that_torch_does_not_count_are_refused_too():
    """Through numpy: torch's own loss does not look at the logits again, so that a loop may do this."""
    for part in (0, 1):
        given = torch.randn(4, 100), torch.arange(4)
        loss = kernel_loss(given[0].requires_grad_(), given[1])
        given[part].detach().numpy()[3] += 98
        if part == 0:
            given[0].detach().numpy()[3, 7] -= 90
        with pytest.raises(RuntimeError, match="changed in place between"):
            loss.backward()


@pytest.mark.parametrize("classes", [1, 7, 150, 3000, 70_001])
@pytest.mark.parametrize("spread", [0.0, 1.0, 40.0, 1e4])
def test_no_logits_are_taken_for_changed_ones(classes, spread):
    logits = (spread * torch.randn(2, classes)).requires_grad_()
    kernel_loss(logits, torch.tensor([0, classes - 1])).backward()
    assert logits.grad is not None


def test_a_penalty_on_the_gradient_at_the_logits_has_its_own_gradient():
    z, labels = torch.randn(3, 40), torch.tensor([1, -100, 39])
    found = []
    for logits, loss in ((z.clone(), kernel_loss), (z.double(), F.cross_entropy)):
        first = loss(logits.requires_grad_(), labels)
        (gradient,) = torch.autograd.grad(first, logits, create_graph=True)
        found.append(torch.autograd.grad(first + gradient.square().sum(), logits)[0])
    torch.testing.assert_close(found[0], found[1].float(), rtol=1e-5, atol=1e-7)


def test_many_gradients_at_once():
    logits, labels, weights = torch.randn(3, 40, requires_grad=True), torch.tensor([1, -100, 39]), torch.randn(5, 3)
    found = []
    for losses in (
        cross_entropy._by_kernel(logits, labels, "none", -100),
        F.cross_entropy(logits, labels, reduction="none"),
    ):
        found += torch.autograd.grad(losses, logits, weights, is_grads_batched=True)
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("dims", [2, 3])
def test_saved_logits_may_come_back_with_other_strides(dims):
    """As hooks that keep them elsewhere may lay them out."""
    shape = (3, 40) if dims == 2 else (3, 5, 40)
    z, labels = torch.randn(shape), torch.randint(0, 40, shape[:-1])
    grads = []
    for turned in (False, True):
        logits = z.clone().requires_grad_()
        pack = (lambda t: t.mT.contiguous()) if turned else (lambda t: t)
        unpack = (lambda t: t.mT) if turned else (lambda t: t)
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t, pack=pack: pack(t) if t.shape == shape else t,
            lambda t, unpack=unpack: unpack(t) if t.dim() == dims and t.shape[-2] == 40 else t,
        ):
            loss = kernel_loss(logits.movedim(-1, 1), labels)
        loss.backward()
        grads.append(logits.grad)
    assert torch.equal(*grads)


# ---- where it is used


def losses_of(z, y):
    return F.cross_entropy(z.transpose(1, 2), y, reduction="none").mean(1)


def test_an_engines_loss_goes_through_the_kernel_and_gives_the_weights_of_torchs_own(calls, monkeypatch):
    x, y = batch()
    weights = []
    for kernels in (True, False):
        torch.manual_seed(1)
        model = Words()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        engine = Engine(
            model, losses_of, max_grad_norm=0.1, noise_multiplier=0.0, expected_batch_size=6, optimizer=optimizer
        )
        # All other kernels stay: their bounds of rounding, and with these the clip factors, differ by more than this.
        monkeypatch.setattr(cross_entropy, "WORTH_A_KERNEL", 0 if kernels else 2**62)
        engine.step(x, y)
        assert bool(calls) == kernels
        calls.clear()
        weights.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    torch.testing.assert_close(*weights, rtol=1e-5, atol=1e-7)


SPELLINGS = {
    "function": lambda z, y: F.cross_entropy(z.flatten(0, 1), y.flatten()),
    "module": lambda z, y: nn.CrossEntropyLoss(reduction="sum")(z.transpose(1, 2), y) / y.numel(),
    "shifted": lambda z, y: F.cross_entropy(z[:, :-1].float().transpose(1, 2), y[:, 1:], reduction="none").mean(),
    "copied": lambda z, y: F.cross_entropy(z[:, :-1].contiguous().view(-1, z.shape[-1]), y[:, 1:].reshape(-1)),
}


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_a_loop_behind_a_private_module_goes_through_the_kernel(calls, spelling):
    x, y = batch()
    samples = []
    for kernels in (True, False):
        torch.manual_seed(1)
        module = GradSampleModule(Words())
        module.isolation.switch_off()  # a mean over labels of which some are ignored mixes examples
        z = module(x)
        if not kernels:
            with native.disabled():
                SPELLINGS[spelling](z, y).backward()
        else:
            SPELLINGS[spelling](z, y).backward()
            assert len(calls) == 1
        samples.append([p.grad_sample.clone() for p in module.parameters()])
    for ours, torchs in zip(*samples, strict=True):
        torch.testing.assert_close(ours, torchs, rtol=1e-4, atol=1e-6)


def test_what_no_private_module_put_out_goes_through_torch(calls):
    x, y = batch()
    GradSampleModule(Words())(x)  # from here on torch's function is replaced
    model = Words()
    F.cross_entropy(model(x).transpose(1, 2), y).backward()
    with torch.no_grad():
        F.cross_entropy(model(x).transpose(1, 2), y)
    assert calls == []


@pytest.mark.parametrize(
    "more",
    [{"label_smoothing": 0.1}, {"weight": torch.ones(CLASSES)}, {"reduction": "sum", "label_smoothing": 0.5}],
    ids=["smoothed", "weighted", "both"],
)
def test_what_the_kernel_does_not_compute_goes_through_torch(calls, more):
    x, y = batch()
    z = GradSampleModule(Words())(x).transpose(1, 2)
    loss = F.cross_entropy(z, y, **more)
    assert calls == []
    assert torch.equal(loss, F.cross_entropy(z.detach().requires_grad_(), y, **more))


def test_probabilities_as_targets_go_through_torch(calls):
    x, _ = batch()
    z = GradSampleModule(Words())(x).flatten(0, 1)
    F.cross_entropy(z, torch.full_like(z, 1.0 / CLASSES)).backward()
    assert calls == []


def test_scripts_and_compiled_functions_go_on_with_torchs_function(calls):
    x, y = batch()
    z = GradSampleModule(Words())(x).flatten(0, 1)
    scripted = torch.jit.script(nn.CrossEntropyLoss())
    assert torch.allclose(scripted(z, y.flatten()), F.cross_entropy(z.detach(), y.flatten()))
    assert calls == []
    if torch.__version__ < (2, 7):
        return  # torch 2.6 fails an assertion of its own where one of its functions is compiled by name
    compiled = torch.compile(F.cross_entropy, backend="aot_eager", fullgraph=True)
    assert torch.allclose(compiled(z, y.flatten()), F.cross_entropy(z.detach(), y.flatten()))


def traced(z, y):
    return torch.jit.trace(F.cross_entropy, (z, y))(z, y)


def made_a_graph(z, y):
    return make_fx(lambda z, y: F.cross_entropy(z, y))(z, y)(z, y)


def forward_mode(z, y):
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(F.cross_entropy(forward_ad.make_dual(z, z.detach()), y)).tangent


@pytest.mark.parametrize("through", [traced, made_a_graph, forward_mode])
def test_no_kernel_where_operations_are_traced_or_differentiated_forward(calls, through):
    x, y = batch()
    z, y = GradSampleModule(Words())(x).flatten(0, 1), y.flatten()
    found = through(z, y)
    assert calls == []
    torch.testing.assert_close(found, through(z.detach().requires_grad_(), y))


def test_no_tensor_of_the_logits_size_is_kept_beside_them():
    """torch keeps the logarithms of all probabilities for the backward pass, the kernel the logits, which exist."""
    x, y = batch()
    z = GradSampleModule(Words())(x).flatten(0, 1)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        F.cross_entropy(z, y.flatten())
    large = [t for t in kept if t.numel() >= z.numel()]
    assert len(large) == 1 and large[0].data_ptr() == z.data_ptr()
