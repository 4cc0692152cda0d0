"""The loops of the libraries on PyTorch, each in our own words after the page that its function names."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from frameworks._shared.torch import models as torch_models
from harness.optimizer import AdamW
from harness.tasks import TOKEN_LOSS
from tests.frameworks.own_examples.terms import Example, Terms

Step = Callable[[torch.Tensor, torch.Tensor], None]

TABLE = torch_models.Own(table=nn.Embedding)


class Loop(Example):
    """``step`` on a resident batch, as the adapters have theirs; ``batches`` where a library takes its loader's."""

    def __init__(
        self,
        terms: Terms,
        model: nn.Module,
        step: Step,
        batches: Iterator[Any] | None = None,
    ) -> None:
        self.task, self.model, self._step, self.batches = terms.task, model, step, batches
        self.batch = tuple(map(torch.from_numpy, (terms.x, terms.y.astype(np.int64))))

    def draw(self) -> Any:
        return self.batch if self.batches is None else next(self.batches)

    def step(self, batch: Any) -> None:
        self._step(*batch)

    def parameters(self) -> Mapping[str, np.ndarray]:
        return torch_models.read_parameters(self.model, self.task)


def _network(terms: Terms) -> nn.Module:
    return torch_models.build_model(terms.task, terms.initial, own=TABLE)


def _optimizer(model: nn.Module, terms: Terms) -> torch.optim.Optimizer:
    """As users make one: without ``fused``."""
    chosen = terms.optimizer
    trained = torch_models.trained_parameters(model)
    if isinstance(chosen, AdamW):
        betas, decay = (chosen.beta1, chosen.beta2), chosen.weight_decay
        return torch.optim.AdamW(trained, lr=terms.learning_rate, betas=betas, eps=chosen.eps, weight_decay=decay)
    return torch.optim.SGD(trained, lr=terms.learning_rate)


def _criterion(terms: Terms) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """PyTorch's mean loss. All sequences have the same number of words, so that of all words is that of examples."""
    mean = nn.CrossEntropyLoss()
    if terms.task.loss == TOKEN_LOSS:
        return lambda logits, words: mean(logits.flatten(0, 1), words.flatten())
    return mean


def _loader(terms: Terms) -> DataLoader:
    rows = TensorDataset(torch.from_numpy(terms.x), torch.from_numpy(terms.y.astype(np.int64)))
    return DataLoader(rows, batch_size=terms.batch_size)


def _usual(optimizer: Any, model: nn.Module, criterion: Any) -> Step:
    """Return the body of the loop that a user of PyTorch has already."""

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        optimizer.zero_grad()
        criterion(model(x), y).backward()
        optimizer.step()

    return step


def opacus_hooks(terms: Terms) -> Example:
    """Opacus' README, "Getting started": make_private, then the loop as it was."""
    from opacus import PrivacyEngine

    network = _network(terms)
    model, optimizer, _ = PrivacyEngine().make_private(
        module=network,
        optimizer=_optimizer(network, terms),
        data_loader=_loader(terms),
        noise_multiplier=terms.noise_multiplier,
        max_grad_norm=terms.max_grad_norm,
        poisson_sampling=False,
    )
    return Loop(terms, network, _usual(optimizer, model, _criterion(terms)))


def opacus_ghost(terms: Terms) -> Example:
    """Opacus' page on fast gradient and ghost clipping: make_private with the criterion, which comes back wrapped."""
    from opacus import PrivacyEngine

    network = _network(terms)
    model, optimizer, criterion, _ = PrivacyEngine().make_private(
        module=network,
        optimizer=_optimizer(network, terms),
        data_loader=_loader(terms),
        criterion=nn.CrossEntropyLoss(),
        noise_multiplier=terms.noise_multiplier,
        max_grad_norm=terms.max_grad_norm,
        poisson_sampling=False,
        grad_sample_mode="ghost",
    )
    return Loop(terms, network, _usual(optimizer, model, criterion))


def torch_func_eager(terms: Terms) -> Example:
    """PyTorch's page on per-sample gradients, which ends with them; clip, noise and update as short as can be."""
    from torch.func import functional_call, grad, vmap

    model, criterion = _network(terms), _criterion(terms)
    optimizer = _optimizer(model, terms)
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    detached = {name: p.detach() for name, p in model.named_parameters()}
    trained = {name: detached.pop(name) for name in named}

    def loss(trained: Mapping, others: Mapping, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return criterion(functional_call(model, (trained, others), (x.unsqueeze(0),)), y.unsqueeze(0))

    gradients_of = vmap(grad(loss), in_dims=(None, None, 0, 0))

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        gradients = gradients_of(trained, detached, x, y)
        norms = torch.stack([g.flatten(1).norm(dim=1) for g in gradients.values()]).norm(dim=0)
        factors = (terms.max_grad_norm / norms).clamp(max=1)
        for name, p in named.items():
            noise = terms.noise_multiplier * terms.max_grad_norm * torch.randn_like(p)
            p.grad = (torch.einsum("i,i...->...", factors, gradients[name]) + noise) / terms.batch_size
        optimizer.step()

    return Loop(terms, model, step)


def opake_vmap(terms: Terms) -> Example:
    """Opake's README, "Example", with an optimizer of ``opake.optimizers`` in place of the line that it names."""
    import torchopt
    from opake.dpsgd.clipping import clipped_grad
    from opake.dpsgd.noise import gaussian_noise
    from opake.functional import make_functional
    from opake.optimizers import adamw, sgd
    from opake.random import key

    model, criterion = _network(terms), _criterion(terms)
    forward, weights, frozen = make_functional(model, disable_autograd_tracking=True, partition_trainable=True)

    def loss(weights: dict, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return criterion(forward({**weights, **frozen}, x.unsqueeze(0)), y.unsqueeze(0))

    gradient_of, clip_state = clipped_grad(
        loss, clipping_norm=terms.max_grad_norm, batch_argnums=(1, 2), normalize_by=terms.batch_size
    )
    noise_of, noise_state = gaussian_noise(noise_multiplier=terms.noise_multiplier, key=key(42))
    chosen = terms.optimizer
    if isinstance(chosen, AdamW):
        optimizer = adamw(terms.learning_rate, (chosen.beta1, chosen.beta2), chosen.eps, chosen.weight_decay)
    else:
        optimizer = sgd(lr=terms.learning_rate)
    states = [clip_state, noise_state, optimizer.init(weights)]

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        nonlocal weights
        gradient, states[0] = gradient_of(weights, x, y, state=states[0])
        noisy, states[1] = noise_of(gradient, states[1])
        updates, states[2] = optimizer.update(noisy, states[2], params=weights)
        weights = torchopt.apply_updates(weights, updates)

    return Loop(terms, model, step)


def dpcore_native(terms: Terms) -> Example:
    """dpcore's README: make_private, then the loop as it was. It steps on batches of its loader alone."""
    from dpcore import PrivacyEngine

    network = _network(terms)
    model, optimizer, loader = PrivacyEngine().make_private(
        module=network,
        optimizer=_optimizer(network, terms),
        data_loader=_loader(terms),
        noise_multiplier=terms.noise_multiplier,
        max_grad_norm=terms.max_grad_norm,
        poisson_sampling=False,
        sample_rate=1.0,
        expected_batch_size=terms.batch_size,
    )

    def batches() -> Iterator[Any]:
        while True:
            yield from loader

    return Loop(terms, network, _usual(optimizer, model, _criterion(terms)), batches=batches())
