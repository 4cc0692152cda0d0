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
    "temperature": (_classes, lambda o, y: F.cross_entropy(o / torch.tensor(2.0), y)),
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


def test_a_pass_without_a_backward_pass_holds_no_graph():
    net, (x, y) = _classes()
    model = GradSampleModule(net)
    for _ in range(5):
        model(x)
    model.losses.give_up()
    F.cross_entropy(model(x), y).backward()


def test_losses_of_other_models_are_not_looked_at():
    net, (x, y) = _classes()
    model = GradSampleModule(net)
    output = model(x)
    other = nn.Linear(8, CLASSES)
    F.cross_entropy(other(x), y, weight=WEIGHTS).backward()
    assert other.weight.grad is not None
    F.cross_entropy(output, y).backward()
