"""Losses of the user's own loop: those that mix examples are refused, and no others."""

import copy
import re

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from dpcore import GradSampleModule, PrivacyEngine
from dpcore.errors import PrivacyError
from dpcore.example_isolation.loss import WAITING

LENGTH, WORDS, CLASSES = 6, 11, 5
WEIGHTS = torch.tensor([0.2, 1.0, 0.5, 2.0, 0.7])


class Words(nn.Module):
    """Logits [B, T, V] of ids [B, T]."""

    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(WORDS, 8), nn.Linear(8, WORDS)

    def forward(self, ids):
        return self.head(torch.tanh(self.embedding(ids)))


def _words():
    ids = torch.randint(0, WORDS, (48, LENGTH), generator=torch.Generator().manual_seed(0))
    labels = ids.clone()
    for i in range(len(labels)):
        labels[i, : (0, 3, 1, 4, 2)[i % 5]] = -100
    return Words(), (ids, labels)


def _classes():
    generator = torch.Generator().manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, CLASSES))
    return net, (torch.randn(48, 8, generator=generator), torch.randint(0, CLASSES, (48,), generator=generator))


def _by_token(logits, labels):
    return F.cross_entropy(logits.transpose(1, 2), labels, reduction="none")


def _contrastive(out, labels):
    z = F.normalize(out, dim=1)
    return F.cross_entropy(z @ z.t() / 0.5, torch.arange(len(z)))


def _barlow(out, labels):
    z = (out - out.mean(0)) / out.std(0)
    return (z.t() @ z / len(z) - torch.eye(CLASSES)).square().sum()


MIXING = {
    "ignored labels": (_words, lambda o, y: F.cross_entropy(o.view(-1, WORDS), y.view(-1), ignore_index=-100)),
    "ignored labels by classes": (_words, lambda o, y: F.cross_entropy(o.transpose(1, 2), y)),
    "next words": (_words, lambda o, y: F.cross_entropy(o[:, :-1].reshape(-1, WORDS), y[:, 1:].reshape(-1))),
    "half of ignored labels": (_words, lambda o, y: F.cross_entropy(o.view(-1, WORDS), y.view(-1)) / 2),
    "divided by hand": (_words, lambda o, y: _by_token(o, y).sum() / (y != -100).sum()),
    "divided by a number": (_words, lambda o, y: _by_token(o, y).sum() / int((y != -100).sum())),
    "labels taken out": (_words, lambda o, y: F.cross_entropy(o[y != -100], y[y != -100])),
    "losses taken out": (_words, lambda o, y: _by_token(o, y)[y != -100].mean()),
    "weights of classes": (_classes, lambda o, y: F.cross_entropy(o, y, weight=WEIGHTS)),
    "contrastive": (_classes, _contrastive),
    "Barlow twins": (_classes, _barlow),
    "hardest examples": (_classes, lambda o, y: F.cross_entropy(o, y, reduction="none").topk(3).values.mean()),
    "worst example": (_classes, lambda o, y: F.cross_entropy(o, y, reduction="none").max()),
    "logarithm of the mean": (_classes, lambda o, y: F.cross_entropy(o, y).log()),
    "centred outputs": (_classes, lambda o, y: (o - o.mean(0)).square().mean()),
    "flooding": (_classes, lambda o, y: (F.cross_entropy(o, y) - 1.6).abs() + 1.6),
    "mean, clamped": (_classes, lambda o, y: F.cross_entropy(o, y).clamp(min=1.6)),
    "mean or a number": (_classes, lambda o, y: torch.maximum(F.cross_entropy(o, y), torch.tensor(1.6))),
    "larger of two means": (_classes, lambda o, y: torch.stack([F.cross_entropy(o, y), o.square().mean()]).max()),
    "mean where it is large": (_classes, lambda o, y: torch.where((m := F.cross_entropy(o, y)) > 1.6, m, 0 * m)),
    "mean outputs": (_classes, lambda o, y: F.l1_loss(o.mean(0), torch.zeros(CLASSES))),
    **{
        f"{name} of some": (_classes, lambda o, y, of=of: of(o[y < 3], F.one_hot(y, CLASSES)[y < 3].float()))
        for name, of in (
            ("squares", F.mse_loss),
            ("smooth losses", F.smooth_l1_loss),
            ("Huber's losses", F.huber_loss),
            ("cross-entropies", F.binary_cross_entropy_with_logits),
            ("divergences", lambda o, y: F.kl_div(o.log_softmax(1), y, reduction="batchmean")),
        )
    },
    "times a reciprocal": (_words, lambda o, y: _by_token(o, y).sum() * (1 / (y != -100).sum())),
    "divided by a float": (_words, lambda o, y: _by_token(o, y).sum() / float((y != -100).sum())),
    "divided by float64": (_words, lambda o, y: _by_token(o, y).sum() / (y != -100).double().sum()),
    "masked and divided": (_words, lambda o, y: (o.square().mean(2) * (y != -100)).sum() / (y != -100).sum().item()),
    "shares": (_classes, lambda o, y: F.cross_entropy(o, y, reduction="none") @ (WEIGHTS[y] / WEIGHTS[y].sum())),
    "standardised weights": (_classes, lambda o, y: (o[:, 0] * ((y - (z := y.float()).mean()) / z.std())).mean()),
    "divided by a spread": (_classes, lambda o, y: F.cross_entropy(o, y) / o.detach().std()),
    "divided by a class": (_classes, lambda o, y: F.cross_entropy(o, y, reduction="sum") / (1 + (y == 1).sum())),
}
APART = {
    "no label ignored": (_words, lambda o, y: F.cross_entropy(o.view(-1, WORDS), y.clamp(min=0).view(-1))),
    "mean of means": (
        _words,
        lambda o, y: (_by_token(o, y).sum(1) / (y != -100).sum(1).clamp(min=1)).mean(),
    ),
    "a public divisor": (_words, lambda o, y: _by_token(o, y).sum() / (len(y) * LENGTH)),
    "next words, none ignored": (
        _words,
        lambda o, y: F.cross_entropy(o[:, :-1].reshape(-1, WORDS), y[:, 1:].clamp(min=0).reshape(-1)),
    ),
    "plain": (_classes, F.cross_entropy),
    "half": (_classes, lambda o, y: F.cross_entropy(o, y) / 2),
    "smoothed": (_classes, lambda o, y: F.cross_entropy(o, y, label_smoothing=0.1)),
    "equal weights": (_classes, lambda o, y: F.cross_entropy(o, y, weight=torch.full((CLASSES,), 2.0))),
    "weights by example": (_classes, lambda o, y: F.cross_entropy(o, y, weight=WEIGHTS, reduction="none").mean()),
    "squares": (_classes, lambda o, y: F.mse_loss(o, F.one_hot(y, CLASSES).float())),
    "margin": (_classes, lambda o, y: (o.max(1).values - o.gather(1, y[:, None])[:, 0]).mean()),
    "focal": (
        _classes,
        lambda o, y: (
            (1 - o.softmax(1).gather(1, y[:, None])[:, 0]) ** 2 * F.cross_entropy(o, y, reduction="none")
        ).mean(),
    ),
    "flooded by example": (
        _classes,
        lambda o, y: ((F.cross_entropy(o, y, reduction="none") - 1.6).abs() + 1.6).mean(),
    ),
    "hinge": (_classes, lambda o, y: (1 - o.gather(1, y[:, None])).relu().mean()),
    "weights of few values": (_classes, lambda o, y: (F.cross_entropy(o, y, reduction="none") * (0.5 + y % 2)).mean()),
    "one by one": (
        _words,
        lambda o, y: torch.stack([F.cross_entropy(a[b >= 0], b[b >= 0]) for a, b in zip(o, y, strict=True)]).mean(),
    ),
    "worst word": (_words, lambda o, y: _by_token(o, y).max(1).values.mean()),
    "worst word, words first": (_words, lambda o, y: _by_token(o, y).t().amax(0).mean()),
    "sorted heads": (_classes, lambda o, y: torch.stack([o.square().mean(1), o[:, 0]] * 6).sort(0).values[-1].mean()),
    "a number of each batch": (_classes, lambda o, y: F.cross_entropy(o, y) * float(torch.rand(()))),
    "another width each time": (_words, lambda o, y: _by_token(o, y)[:, : int(torch.randint(3, 7, ()))].mean()),
    "a whole width each time": (
        _words,
        lambda o, y: _by_token(o, y)[:, : (n := int(torch.randint(3, 7, ())))].sum() / (n * len(y)),
    ),
    "temperature": (_classes, lambda o, y: F.cross_entropy(o / torch.tensor(2.0), y)),
}


def _values():
    net, (x, y) = _classes()
    return nn.Sequential(net, nn.Linear(CLASSES, 1)), (x, y.float())


IN_PAIRS = {
    "[B, 1] and [B]": (_values, F.mse_loss),
    "[B, 1] and [B] by hand": (_values, lambda o, y: (o - y).abs().mean()),
    "keys of all": (
        _classes,
        lambda o, y: F.cross_entropy(o @ F.one_hot(y, CLASSES).float().t(), torch.arange(len(y))),
    ),
    "detached keys": (_classes, lambda o, y: -F.logsigmoid((2 * torch.eye(len(y)) - 1) * (o @ o.detach().t())).mean()),
}
WITH_THEMSELVES = {
    "[B, 1] and [B, 1]": (_values, lambda o, y: F.mse_loss(o, y[:, None])),
    "diagonal": (_classes, lambda o, y: (o @ F.one_hot(y, CLASSES).float().t()).diagonal().mean()),
    "masked": (_classes, lambda o, y: ((o @ F.one_hot(y, CLASSES).float().t()) * torch.eye(len(y))).sum() / len(y)),
}


def _train(make, loss, **options):
    net, data = make()
    model, optimizer, loader = PrivacyEngine().make_private(
        module=net,
        optimizer=torch.optim.SGD(net.parameters(), lr=0.1),
        data_loader=DataLoader(TensorDataset(*data), batch_size=12),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        **options,
    )
    for x, y in loader:
        optimizer.zero_grad()
        if len(x) > 1:
            loss(model(x), y).backward()
        optimizer.step()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", MIXING)
def test_a_loss_that_mixes_examples_is_refused(name):
    with pytest.raises(PrivacyError, match="one number per example"):
        _train(*MIXING[name], poisson_sampling=False)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", APART)
@pytest.mark.parametrize("poisson", [False, True])
def test_a_loss_that_keeps_examples_apart_is_not(name, poisson):
    _train(*APART[name], poisson_sampling=poisson)


def _with_batches_of(lengths, make, loss, reduction="mean"):
    """Passes over batches of such lengths."""
    net, data = make()
    model = GradSampleModule(net, loss_reduction=reduction)
    for x, y in zip(*(of.split(lengths) for of in data), strict=True):
        loss(model(x), y).backward()
        model.forget()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", IN_PAIRS)
def test_a_loss_of_all_pairs_is_refused_as_soon_as_lengths_differ(name):
    with pytest.raises(PrivacyError, match="square of all pairs"):
        _with_batches_of([12, 20, 16], *IN_PAIRS[name])


@pytest.mark.filterwarnings("ignore")
def test_the_last_piece_of_a_batch_shows_a_loss_of_pairs():
    with pytest.raises(PrivacyError, match="square of all pairs"):
        _with_batches_of([7, 7, 7, 7, 3, 17], *IN_PAIRS["[B, 1] and [B]"])


@pytest.mark.parametrize("name", WITH_THEMSELVES)
def test_a_square_of_which_the_diagonal_alone_counts_is_not(name):
    _with_batches_of([12, 20, 16], *WITH_THEMSELVES[name])


@pytest.mark.parametrize("shape", ["by words", "flat"])
def test_texts_that_are_once_as_long_as_their_batch_are_not_pairs(shape):
    """Nor if they always are, where the output is of that length already."""
    model = GradSampleModule(Words())
    for length in (8, 12, 10):
        ids = torch.randint(0, WORDS, (length, length))
        losses = F.cross_entropy(model(ids).flatten(0, 1), ids.flatten(), reduction="none").view(length, length)
        (losses.sum(1) / length if shape == "flat" else losses).mean().backward()
        model.forget()


@pytest.mark.filterwarnings("ignore:The loss is the")
@pytest.mark.parametrize("said", ["mean", "sum"])
@pytest.mark.parametrize("number", [1.0, 0.05])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("loss", [F.cross_entropy, lambda o, y, reduction: getattr(o.square().sum(1), reduction)()])
def test_a_loss_that_is_reduced_otherwise_than_it_is_said_is_refused_as_soon_as_lengths_differ(
    loss, reduction, number, said
):
    def run():
        _with_batches_of([12, 20, 16], _classes, lambda o, y: number * loss(o, y, reduction=reduction), said)

    if reduction == said:
        run()
    else:
        with pytest.raises(PrivacyError, match=f"loss_reduction is '{said}'"):
            run()


@pytest.mark.filterwarnings("ignore:The loss is the")
@pytest.mark.parametrize(("said", "right"), [("mean", False), ("sum", False), ("mean", True), ("sum", True)])
def test_equal_weights_that_backward_is_given_are_a_reduction(said, right):
    is_sum = (said == "sum") == right

    def run():
        net, data = _classes()
        model = GradSampleModule(net, loss_reduction=said)
        for x, y in zip(*(of.split([12, 20, 16]) for of in data), strict=True):
            losses = F.cross_entropy(model(x), y, reduction="none")
            losses.backward(torch.ones_like(losses) / (1 if is_sum else len(losses)))
            model.forget()

    if right:
        run()
    else:
        with pytest.raises(PrivacyError, match=f"loss_reduction is '{said}'"):
            run()


def _self_critical(losses):
    return losses * (losses - losses.mean()).detach()


def _advantages(losses):
    rewards = torch.randn(len(losses))
    return losses * (rewards - rewards.mean())


@pytest.mark.parametrize("centred", [_self_critical, _advantages])
def test_weights_that_have_their_mean_taken_off_are_refused(centred):
    """One reward moves the weights of all other examples."""
    with pytest.raises(PrivacyError, match="mean taken off"):
        _with_batches_of([12, 20, 16], _classes, lambda o, y: centred(F.cross_entropy(o, y, reduction="none")).mean())


def test_weights_around_a_number_that_is_no_statistic_of_the_batch_are_fine():
    _with_batches_of(
        [12, 20, 16], _classes, lambda o, y: (F.cross_entropy(o, y, reduction="none") * torch.randn(len(y))).mean()
    )


def test_a_sum_of_losses_that_the_module_has_averaged_is_no_sum_of_examples():
    class Averages(nn.Linear):
        def forward(self, x):
            return (out := super().forward(x)).square().mean(), out.abs().mean()

    model = GradSampleModule(Averages(8, 3))
    for x in _classes()[1][0].split([12, 20, 16]):
        torch.stack(model(x)).sum().backward()
        model.forget()


class _Fused(torch.autograd.Function):
    """Losses of pairs, or of examples by themselves, whose gradients are made in the forward pass."""

    @staticmethod
    def forward(ctx, z, compare):
        with torch.enable_grad():
            z = z.detach().requires_grad_()
            loss = _contrastive(z, None) if compare else z.square().sum(1)
            ctx.save_for_backward(torch.autograd.grad(loss.sum(), z)[0])
        return loss.detach()

    @staticmethod
    def backward(ctx, grad):
        (of_loss,) = ctx.saved_tensors
        return grad.reshape(-1, 1) * of_loss, None


@pytest.mark.parametrize("compiled", [False, True])
def test_a_loss_whose_derivatives_hide_what_it_does_is_told_of_once(compiled):
    compare = torch.compile(_contrastive, backend="aot_eager")
    with pytest.warns(UserWarning, match="hides what it does") as told:
        _with_batches_of([24, 24], _classes, compare if compiled else lambda o, _: _Fused.apply(o, True))
    assert sum("hides what it does" in str(of.message) for of in told) == 1


def test_a_function_of_ones_own_that_returns_one_number_per_example_is_nothing_to_tell_of(recwarn):
    _with_batches_of([24, 24], _classes, lambda o, _: _Fused.apply(o, False).mean())
    assert not [of for of in recwarn if "hides what it does" in str(of.message)]


def _train_on_passes(loss, make=_words):
    """Three batches of one length, with whatever the loop makes of the model."""
    net, data = make()
    model = GradSampleModule(net)
    for x, y in zip(*(of.split(12) for of in data), strict=True):
        loss(model, x, y)
        model.forget()


def _divided(out, labels):
    return _by_token(out, labels).sum() / float((labels != -100).sum())


def _of_two_passes(model, x, y):
    one, two = model(x), model(x)
    (_divided(one, y) + F.mse_loss(one, two)).backward()


def _of_many_passes(model, x, y):
    sum(_divided(model(x), y) for _ in range(6)).backward()


def _of_the_second_loss(model, x, y):
    out = model(x)
    out.square().mean().backward(retain_graph=True)
    _divided(out, y).backward()


def _of_one_of_several(model, x, y):
    out = model(x)
    torch.autograd.backward([out.square().mean(), _divided(out, y)])


def _of_weights_given_to_backward(model, x, y):
    known = (y != -100).float()
    _by_token(model(x), y).backward(known / known.sum())


def _behind_passes_without_a_loss(model, x, y):
    model(x), model(x)
    _divided(model(x), y).backward()


def _of_another_length(model, x, y):
    width = int(torch.randint(3, 7, ()))
    _divided(model(x[:, :width]), y[:, :width]).backward()


@pytest.mark.parametrize(
    "loss",
    [
        _of_two_passes,
        _of_many_passes,
        _of_the_second_loss,
        _of_one_of_several,
        _of_weights_given_to_backward,
        _behind_passes_without_a_loss,
        _of_another_length,
    ],
)
def test_a_divisor_is_seen_whatever_passes_the_loss_comes_from(loss):
    with pytest.raises(PrivacyError, match="divided by what its batch holds"):
        _train_on_passes(loss)


@pytest.mark.parametrize("order", ["flat", "words first"])
@pytest.mark.parametrize("size", [WORDS, 7])
def test_flat_outputs_of_as_many_words_as_examples(order, size):
    """Their second dimension has the batch's length; their examples are in the first."""

    class Flat(Words):
        def forward(self, ids):
            out = super().forward(ids)
            return (out if order == "flat" else out.transpose(0, 1)).reshape(-1, WORDS)

    _, (ids, _) = _words()
    model = GradSampleModule(Flat())
    labels = ids[:size] if order == "flat" else ids[:size].t()
    F.cross_entropy(model(ids[:size]), labels.reshape(-1)).backward()
    assert model.has_passes


def test_what_is_looked_at_leaves_other_modules_and_retained_gradients_alone():
    first, second = nn.Linear(8, 6), nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 5))
    plain = copy.deepcopy(first), copy.deepcopy(second)
    private = GradSampleModule(first), GradSampleModule(second)
    x = _classes()[1][0]
    retained = []
    for one, two in (private, plain):
        hidden = one(x)
        out = two(hidden)
        out.retain_grad()
        (out.sum(1).mean() + hidden.relu().mean()).backward()
        retained.append(out.grad)
    torch.testing.assert_close(*retained)
    for mine, theirs in zip(private, plain, strict=True):
        for p, q in zip(mine.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(p.grad_sample.mean(0), q.grad)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["ignored labels", "weights of classes", "contrastive", "hardest examples"])
def test_no_loss_is_refused_without_the_experiments(name):
    _train(*MIXING[name], check_isolation=False)


def test_the_loss_that_the_refusal_names_is_right():
    net, (ids, labels) = _words()
    with pytest.raises(PrivacyError) as refused:
        F.cross_entropy(GradSampleModule(copy.deepcopy(net))(ids).view(-1, WORDS), labels.view(-1)).backward()
    line = re.search(r"(losses = .*?\.mean\(\))", str(refused.value)).group(1)
    plain = copy.deepcopy(net)
    model = GradSampleModule(net)
    space = {"F": F, "logits": model(ids), "labels": labels}
    exec(line, space)
    space["loss"].backward()
    grads = torch.cat([p.grad_sample.flatten(1) for p in model.parameters()], 1)
    alone = []
    for i in range(len(ids)):
        one = F.cross_entropy(plain(ids[i]), labels[i])
        alone.append(torch.cat([g.flatten() for g in torch.autograd.grad(one, list(plain.parameters()))]))
    torch.testing.assert_close(grads, torch.stack(alone), rtol=1e-4, atol=1e-6)


def test_the_loss_of_a_large_vocabulary_is_judged_too(monkeypatch):
    from dpcore.rules import cross_entropy

    monkeypatch.setattr(cross_entropy, "WORTH_A_KERNEL", 1)
    with pytest.raises(PrivacyError, match="labels that are not ignored"):
        _train(*MIXING["ignored labels"], poisson_sampling=False)
    _train(*APART["no label ignored"], poisson_sampling=False)


def test_two_calls_that_one_loss_compares_are_refused():
    def loss(net, x):
        return F.kl_div(net(x).log_softmax(1), net(x).softmax(1).flip(0), reduction="batchmean")

    net, (x, _) = _classes()
    with pytest.raises(PrivacyError, match="compares the examples"):
        loss(GradSampleModule(net), x).backward()


def test_passes_without_a_backward_pass_are_not_waited_for_for_ever():
    net, (x, y) = _classes()
    model = GradSampleModule(net)
    for _ in range(20):
        model(x)
    assert model.losses not in WAITING
    F.cross_entropy(model(x), y).backward()


def test_losses_of_other_models_are_not_looked_at():
    net, (x, y) = _classes()
    model = GradSampleModule(net)
    output = model(x)
    other = nn.Linear(8, CLASSES)
    F.cross_entropy(other(x), y, weight=WEIGHTS).backward()
    assert other.weight.grad is not None
    F.cross_entropy(output, y).backward()
