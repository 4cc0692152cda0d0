"""The loops of the libraries on PyTorch, each in our own words after the page that its function names."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
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
    """``step`` on a resident batch, as the adapters have theirs; ``batches`` where a library takes its loader's;
    ``weights`` by their canonical names where a library has put them into other modules."""

    def __init__(
        self,
        terms: Terms,
        model: nn.Module,
        step: Step,
        batches: Iterator[Any] | None = None,
        weights: Mapping[str, nn.Parameter] | None = None,
    ) -> None:
        self.weights = torch_models.canonical_parameters(model, terms.task) if weights is None else weights
        self._step, self.batches = step, batches
        self.batch = torch_models.place(terms.x, terms.y, "cpu")

    def draw(self) -> Any:
        return self.batch if self.batches is None else next(self.batches)

    def step(self, batch: Any) -> None:
        self._step(*batch)

    def parameters(self) -> Mapping[str, np.ndarray]:
        return {name: p.detach().numpy().copy() for name, p in self.weights.items()}


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


def _losses(terms: Terms) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """PyTorch's loss of each example, that of a text by the mean of its words."""
    each = nn.CrossEntropyLoss(reduction="none")
    if terms.task.loss == TOKEN_LOSS:
        return lambda logits, words: each(logits.transpose(1, 2), words).mean(1)
    return each


def _loader(terms: Terms) -> DataLoader:
    rows = TensorDataset(*torch_models.place(terms.x, terms.y, "cpu"))
    return DataLoader(rows, batch_size=terms.batch_size)


def _forever(loader: Iterable[Any]) -> Iterator[Any]:
    while True:
        yield from loader


def _usual(optimizer: Any, model: nn.Module, criterion: Any) -> Step:
    """Return the body of the loop that a user of PyTorch has already."""

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        optimizer.zero_grad()
        criterion(model(x), y).backward()
        optimizer.step()

    return step


def _peft(terms: Terms) -> tuple[nn.Module, nn.Module, Mapping[str, nn.Parameter]]:
    """The network, the model of PEFT around it, and the weights of both."""
    from frameworks.dp_lora.adapter import as_peft

    network = _network(terms)
    weights = torch_models.canonical_parameters(network, terms.task)
    return network, as_peft(network), weights


def opacus_hooks(terms: Terms) -> Example:
    """Opacus' README, "Getting started": make_private, then the loop as it was."""
    from opacus import PrivacyEngine

    network = model = _network(terms)
    optimizer = _optimizer(model, terms)
    criterion = _criterion(terms)
    model, optimizer, _ = PrivacyEngine().make_private(
        module=model,
        optimizer=optimizer,
        data_loader=_loader(terms),
        noise_multiplier=terms.noise_multiplier,
        max_grad_norm=terms.max_grad_norm,
        poisson_sampling=False,
    )
    return Loop(terms, network, _usual(optimizer, model, criterion))


def opacus_ghost(terms: Terms) -> Example:
    """Opacus' page on fast gradient and ghost clipping: make_private with the criterion, which comes back wrapped. For
    texts it takes the logits' shape beside, by which it finds the words of each."""
    from opacus import PrivacyEngine

    network = model = _network(terms)
    optimizer = _optimizer(model, terms)
    model, optimizer, criterion, _ = PrivacyEngine().make_private(
        module=model,
        optimizer=optimizer,
        data_loader=_loader(terms),
        criterion=nn.CrossEntropyLoss(),
        noise_multiplier=terms.noise_multiplier,
        max_grad_norm=terms.max_grad_norm,
        poisson_sampling=False,
        grad_sample_mode="ghost",
    )
    return Loop(terms, network, _usual(optimizer, model, _of_words(terms, criterion)))


def _of_words(terms: Terms, criterion: Callable[..., Any]) -> Callable[[torch.Tensor, torch.Tensor], Any]:
    """Opacus' wrapped criterion, for texts with the shape that tells whose the words are."""
    if terms.task.loss == TOKEN_LOSS:
        return lambda logits, words: criterion(logits.flatten(0, 1), words.flatten(), shape=logits.shape)
    return criterion


def _released(terms: Terms, gradients: torch.Tensor, norms: torch.Tensor) -> torch.Tensor:
    """The clipped mean of one parameter's per-example gradients [B, ...] with noise, as short as can be."""
    factors = (terms.max_grad_norm / norms).clamp(max=1)
    noise = terms.noise_multiplier * terms.max_grad_norm * torch.randn_like(gradients[0])
    return (torch.einsum("i,i...->...", factors, gradients) + noise) / terms.batch_size


def _norms(gradients: Iterable[torch.Tensor]) -> torch.Tensor:
    """The norms of the examples' gradients, [B]."""
    return torch.stack([g.flatten(1).norm(dim=1) for g in gradients]).norm(dim=0)


def torch_func_eager(terms: Terms) -> Example:
    """PyTorch's page on per-sample gradients, which ends with them; clip, noise and update as short as can be."""
    from torch.func import functional_call, grad, vmap

    network = model = _network(terms)
    optimizer = _optimizer(model, terms)
    criterion = _criterion(terms)
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    detached = {name: p.detach() for name, p in model.named_parameters()}
    trained = {name: detached.pop(name) for name in named}

    def loss(trained: Mapping, others: Mapping, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return criterion(functional_call(model, (trained, others), (x.unsqueeze(0),)), y.unsqueeze(0))

    gradients_of = vmap(grad(loss), in_dims=(None, None, 0, 0))

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        gradients = gradients_of(trained, detached, x, y)
        norms = _norms(gradients.values())
        for name, p in named.items():
            p.grad = _released(terms, gradients[name], norms)
        optimizer.step()

    return Loop(terms, network, step)


def opake_vmap(terms: Terms) -> Example:
    """Opake's README, "Example", with an optimizer of ``opake.optimizers`` in place of the line that it names."""
    import torchopt
    from opake.dpsgd.clipping import clipped_grad
    from opake.dpsgd.noise import gaussian_noise
    from opake.functional import make_functional
    from opake.optimizers import adamw, sgd
    from opake.random import key

    network = model = _network(terms)
    criterion = _criterion(terms)
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

    return Loop(terms, network, step)


def dpcore_native(terms: Terms) -> Example:
    """dpcore's README: make_private, then the loop as it was. It steps on batches of its loader alone."""
    from dpcore import PrivacyEngine

    network = model = _network(terms)
    optimizer = _optimizer(model, terms)
    criterion = _criterion(terms)
    model, optimizer, loader = PrivacyEngine().make_private(
        module=model,
        optimizer=optimizer,
        data_loader=_loader(terms),
        noise_multiplier=terms.noise_multiplier,
        max_grad_norm=terms.max_grad_norm,
        poisson_sampling=False,
        sample_rate=1.0,
        expected_batch_size=terms.batch_size,
    )
    return Loop(terms, network, _usual(optimizer, model, criterion), batches=_forever(loader))


def backpack_batch_grad(terms: Terms) -> Example:
    """BackPACK's page on individual gradients, which ends with them: extend model and loss, backward inside
    backpack(BatchGrad()). The loss is a sum, by which ``grad_batch`` holds the examples' gradients."""
    from backpack import backpack, extend
    from backpack.extensions import BatchGrad

    network = model = extend(_network(terms))
    criterion = extend(nn.CrossEntropyLoss(reduction="sum"))
    optimizer = _optimizer(model, terms)
    trained = list(torch_models.trained_parameters(model))

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        optimizer.zero_grad()
        with backpack(BatchGrad()):
            criterion(model(x), y).backward()
        norms = _norms(p.grad_batch for p in trained)
        for p in trained:
            p.grad = _released(terms, p.grad_batch, norms)
        optimizer.step()

    return Loop(terms, network, step)


def fastdp_flat(terms: Terms) -> Example:
    """fastDP's README: PrivacyEngine, attach, then the loop as it was. Flat clipping in place of its default, which
    is another mechanism."""
    from fastDP import PrivacyEngine

    network = model = _network(terms)
    optimizer = _optimizer(model, terms)
    engine = PrivacyEngine(
        model,
        batch_size=terms.batch_size,
        sample_size=100 * terms.batch_size,
        epochs=1,
        noise_multiplier=terms.noise_multiplier,
        max_grad_norm=terms.max_grad_norm,
        clipping_fn="Abadi",
        clipping_mode="MixOpt",
        clipping_style="all-layer",
        origin_params=None,
    )
    engine.attach(optimizer)
    criterion = _criterion(terms)

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        criterion(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()

    return Loop(terms, network, step)


def private_transformers_default(terms: Terms) -> Example:
    """private-transformers' README: PrivacyEngine, attach; step takes the examples' losses. Its checks, which let
    Hugging Face's models in alone, are skipped."""
    from private_transformers import PrivacyEngine

    network = model = _network(terms)
    optimizer = _optimizer(model, terms)
    engine = PrivacyEngine(
        model,
        batch_size=terms.batch_size,
        sample_size=100 * terms.batch_size,
        epochs=1,
        noise_multiplier=terms.noise_multiplier,
        max_grad_norm=terms.max_grad_norm,
        skip_checks=True,
    )
    engine.attach(optimizer)
    losses = _losses(terms)

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        optimizer.zero_grad()
        optimizer.step(loss=losses(model(x), y))

    return Loop(terms, network, step)


def dp_lora_hooks(terms: Terms) -> Example:
    """dp-lora's README: make_private on a model of PEFT, the examples' gradients to ``step``. The loss is the sum over
    the examples, n times the README's mean, by which it clips wrongly (frameworks/dp_lora/NOTES.md). ``vanilla`` trains
    both matrices of an adapter, as the tasks do."""
    from dp_lora import DPLoRAEngine

    network, model, weights = _peft(terms)
    optimizer = _optimizer(model, terms)
    criterion = _criterion(terms)
    engine = DPLoRAEngine()
    model, optimizer, _ = engine.make_private(
        model=model,
        optimizer=optimizer,
        data_loader=_loader(terms),
        noise_multiplier=terms.noise_multiplier,
        max_grad_norm=terms.max_grad_norm,
        method="vanilla",
        poisson_sampling=False,
    )

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        optimizer.zero_grad()
        (len(x) * criterion(model(x), y)).backward()
        optimizer.step(engine.grad_sample_module.get_per_sample_grads())
        engine.grad_sample_module.clear_per_sample_grads()

    return Loop(terms, network, step, weights=weights)


def pyvacy_git_microbatch(terms: Terms) -> Example:
    """PyVacy's tutorial: zero, backward and microbatch_step for each example, then one step."""
    from pyvacy import optim

    network = model = _network(terms)
    criterion = _criterion(terms)
    optimizer = optim.DPSGD(
        l2_norm_clip=terms.max_grad_norm,
        noise_multiplier=terms.noise_multiplier,
        minibatch_size=terms.batch_size,
        microbatch_size=1,
        params=torch_models.trained_parameters(model),
        lr=terms.learning_rate,
    )

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        optimizer.zero_grad()
        for example, label in zip(x, y, strict=True):
            optimizer.zero_microbatch_grad()
            criterion(model(example.unsqueeze(0)), label.unsqueeze(0)).backward()
            optimizer.microbatch_step()
        optimizer.step()

    return Loop(terms, network, step)


def microbatch_loop(terms: Terms) -> Example:
    """The paper's appendix: a usual loop over batches of one, completed by PyTorch's ``clip_grad_norm_`` and a sum."""
    network = model = _network(terms)
    criterion = _criterion(terms)
    optimizer = _optimizer(model, terms)
    trained = list(torch_models.trained_parameters(model))

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        sums = [torch.zeros_like(p) for p in trained]
        for example, label in zip(x, y, strict=True):
            optimizer.zero_grad()
            criterion(model(example.unsqueeze(0)), label.unsqueeze(0)).backward()
            nn.utils.clip_grad_norm_(trained, terms.max_grad_norm)
            for total, p in zip(sums, trained, strict=True):
                total += p.grad
        for total, p in zip(sums, trained, strict=True):
            noise = terms.noise_multiplier * terms.max_grad_norm * torch.randn_like(p)
            p.grad = (total + noise) / terms.batch_size
        optimizer.step()

    return Loop(terms, network, step)
