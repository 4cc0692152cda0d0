"""Parameters that meet complex numbers (torch.fft, torch.view_as_complex) are right; complex ones are refused."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from dpcore import Engine, PrivacyEngine, UnsupportedError, reference
from tests.dpcore.comparison import relative_error

ROWS, WIDTH, CLASSES, BOUND = 6, 8, 3, 0.3
MODES = ("bookkeeping", "hooks", "ghost")


class Spectral(nn.Module):
    """``of(own parameter, spectrum [B, WIDTH // 2 + 1])`` is the spectrum that goes on."""

    def __init__(self, shape, of):
        super().__init__()
        self.weight = nn.Parameter(1.0 + torch.rand(shape))
        self.head = nn.Linear(WIDTH, CLASSES)
        self.of = of

    def forward(self, x):
        return self.head(torch.fft.irfft(self.of(self.weight, torch.fft.rfft(x)), n=WIDTH))


class Spectrum(nn.Module):
    """Its outputs are complex; parameters meet real numbers alone."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return torch.fft.rfft(self.layer(x))


BINS = WIDTH // 2 + 1
MODELS = {
    "a filter": lambda: Spectral((BINS, 2), lambda w, x: x * torch.view_as_complex(w)),
    "a matrix": lambda: Spectral((BINS, BINS, 2), lambda w, x: torch.einsum("bi,io->bo", x, torch.view_as_complex(w))),
    "a convolution": lambda: Spectral((WIDTH,), lambda w, x: x * torch.fft.rfft(w)),
    "a phase": lambda: Spectral((BINS,), lambda w, x: x * torch.exp(1j * w)),
    "two parts": lambda: Spectral((2, BINS), lambda w, x: x * torch.complex(w[0], w[1])),
    "real scales": lambda: Spectral((BINS,), lambda w, x: x * w),
    "real biases": lambda: Spectral((BINS,), lambda w, x: x + w),
    "real divisors": lambda: Spectral((BINS,), lambda w, x: x / w),
    "within a model": lambda: nn.Sequential(
        Spectral((BINS, 2), lambda w, x: x * torch.view_as_complex(w)), nn.Linear(3, 3)
    ),
}


def numbers():
    return torch.randn(ROWS, WIDTH), torch.arange(ROWS) % CLASSES


def each(outputs, y):
    return F.cross_entropy(outputs, y, reduction="none")


@pytest.mark.parametrize("name", MODELS)
def test_a_parameter_that_meets_complex_numbers(name):
    model, (x, y) = MODELS[name](), numbers()
    truth = reference.clipped_sum(copy.deepcopy(model), each, x, y, BOUND).clipped
    sums = Engine(copy.deepcopy(model), each, max_grad_norm=BOUND).clipped_sum(x, y).sums
    assert relative_error(sums, truth) < 1e-5
    for mode in MODES:
        own = copy.deepcopy(model)
        private, optimizer, *criterion, loader = PrivacyEngine(seed=1).make_private(
            module=own,
            optimizer=torch.optim.SGD(own.parameters(), lr=0.0),
            data_loader=DataLoader(TensorDataset(x, y), batch_size=ROWS),
            noise_multiplier=0.0,
            max_grad_norm=BOUND,
            sample_rate=1.0,
            expected_batch_size=1,
            grad_sample_mode=mode,
            criterion=nn.CrossEntropyLoss(),
        )
        loss = criterion[0] if criterion else nn.CrossEntropyLoss()
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss(private(inputs), targets).backward()
            optimizer.step()
        assert relative_error({n: p.grad for n, p in own.named_parameters()}, truth) < 1e-5, mode


def test_complex_outputs():
    model, (x, y) = Spectrum(), numbers()

    def losses(outputs, targets):
        return each(outputs.abs(), targets)

    truth = reference.clipped_sum(copy.deepcopy(model), losses, x, y, BOUND).clipped
    assert relative_error(Engine(model, losses, max_grad_norm=BOUND).clipped_sum(x, y).sums, truth) < 1e-5


@pytest.mark.parametrize("whole", [False, True])
def test_a_complex_parameter_is_refused(whole):
    """Noise for it would be that of complex numbers, of which sums and bounds know nothing."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(WIDTH, dtype=torch.complex64))
            if not whole:
                self.head = nn.Linear(WIDTH, CLASSES)

        def forward(self, x):
            return (x * self.weight).real

    with pytest.raises(UnsupportedError, match=r"parameter is complex.*view_as_complex"):
        Engine(Model(), each, max_grad_norm=BOUND)
