"""Scripts written against Opacus' public API, run with Opacus and again with ``opacus`` replaced by ``dpcore`` in their
imports. Without noise and with the same batches both end at the same weights, to the rounding of float32 and the 1e-6
that Opacus adds to every norm."""

from __future__ import annotations

import textwrap
import warnings

import pytest
import torch
from torch import nn

pytest.importorskip("opacus")

COMMON = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from opacus import PrivacyEngine

torch.manual_seed(0)
x, y = torch.randn(48, 1, 8, 8), torch.arange(48) % 4
loader = DataLoader(TensorDataset(x, y), batch_size=12)
model = nn.Sequential(
    nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 16), nn.ReLU(), nn.Linear(16, 4)
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
criterion = nn.CrossEntropyLoss()
engine = PrivacyEngine()
"""

SCRIPTS = {
    "hooks": """
        model, optimizer, loader = engine.make_private(
            module=model, optimizer=optimizer, data_loader=loader, noise_multiplier=0.0, max_grad_norm=0.3,
            poisson_sampling=False, grad_sample_mode="hooks",
        )
        for epoch in range(2):
            for data, target in loader:
                optimizer.zero_grad()
                loss = criterion(model(data), target)
                loss.backward()
                seen.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
                seen.append(torch.cat([p.grad_sample.flatten(1) for p in model.parameters()], 1))
                optimizer.step()
                seen.append(torch.cat([p.grad_sample.flatten(1) for p in model.parameters()], 1))
                seen.append(torch.cat([p.summed_grad.flatten() for p in model.parameters()]))
        """,
    "default": """
        from opacus.validators import ModuleValidator
        assert ModuleValidator.is_valid(model)
        model, optimizer, loader = engine.make_private(
            module=model, optimizer=optimizer, data_loader=loader, noise_multiplier=0.0, max_grad_norm=0.3,
            poisson_sampling=False,
        )
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        losses = []
        for epoch in range(2):
            model.train()
            for data, target in loader:
                optimizer.zero_grad()
                loss = criterion(model(data), target)
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
            scheduler.step()
        model.eval()
        with torch.no_grad():
            seen.append(model(x))
        seen.append(torch.tensor(losses))
        """,
    "ghost": """
        model, optimizer, criterion, loader = engine.make_private(
            module=model, optimizer=optimizer, data_loader=loader, criterion=criterion, noise_multiplier=0.0,
            max_grad_norm=0.3, poisson_sampling=False, grad_sample_mode="ghost",
        )
        losses = []
        for data, target in loader:
            optimizer.zero_grad()
            loss = criterion(model(data), target)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        seen.append(torch.tensor(losses))
        """,
    "virtual steps": """
        from opacus.utils.batch_memory_manager import BatchMemoryManager
        from opacus.data_loader import DPDataLoader
        model, optimizer, loader = engine.make_private(
            module=model, optimizer=optimizer, data_loader=DPDataLoader(loader.dataset, sample_rate=1.0),
            noise_multiplier=0.0, max_grad_norm=0.3,
        )
        for epoch in range(3):
            with BatchMemoryManager(data_loader=loader, max_physical_batch_size=7, optimizer=optimizer) as pieces:
                for data, target in pieces:
                    optimizer.zero_grad()
                    criterion(model(data), target).backward()
                    optimizer.step()
        """,
    "per layer": """
        model, optimizer, loader = engine.make_private(
            module=model, optimizer=optimizer, data_loader=loader, noise_multiplier=0.0,
            max_grad_norm=[0.05 * (k + 1) for k in range(8)], clipping="per_layer", poisson_sampling=False,
        )
        for data, target in loader:
            optimizer.zero_grad()
            criterion(model(data), target).backward()
            optimizer.step()
        """,
    "schedules": """
        from opacus.schedulers import ExponentialGradClip, LambdaNoise
        model, optimizer, loader = engine.make_private(
            module=model, optimizer=optimizer, data_loader=loader, noise_multiplier=0.0, max_grad_norm=0.5,
            poisson_sampling=False,
        )
        clip = ExponentialGradClip(optimizer, gamma=0.5)
        noise = LambdaNoise(optimizer, noise_lambda=lambda epoch: 1.0)
        for epoch in range(3):
            for data, target in loader:
                optimizer.zero_grad()
                criterion(model(data), target).backward()
                optimizer.step()
            clip.step()
            noise.step()
        """,
    "checkpoint": """
        import tempfile, os
        def start():
            torch.manual_seed(0)
            model = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.Tanh(), nn.Linear(8, 4))
            engine = PrivacyEngine(accountant="rdp")
            made = engine.make_private(
                module=model, optimizer=torch.optim.Adam(model.parameters(), lr=0.1), data_loader=loader,
                noise_multiplier=0.0, max_grad_norm=0.3, poisson_sampling=False,
            )
            return engine, *made
        def train(model, optimizer, loader):
            for data, target in loader:
                optimizer.zero_grad()
                criterion(model(data), target).backward()
                optimizer.step()
        engine, model, optimizer, loader = start()
        train(model, optimizer, loader)
        path = os.path.join(tempfile.mkdtemp(), "checkpoint.pt")
        engine.save_checkpoint(path=path, module=model, optimizer=optimizer, checkpoint_dict={"epoch": 1})
        engine, model, optimizer, loader = start()
        restored = engine.load_checkpoint(path=path, module=model, optimizer=optimizer)
        assert restored["epoch"] == 1 and len(engine.accountant) > 0
        train(model, optimizer, loader)
        """,
    "by hand": """
        from opacus import GradSampleModule
        from opacus.accountants import RDPAccountant
        from opacus.optimizers import DPOptimizer
        accountant = RDPAccountant()
        model = GradSampleModule(model)
        optimizer = DPOptimizer(optimizer, noise_multiplier=0.0, max_grad_norm=0.3, expected_batch_size=12)
        optimizer.attach_step_hook(accountant.get_optimizer_hook_fn(sample_rate=0.25))
        for data, target in loader:
            criterion(model(data), target).backward()
            seen.extend(optimizer.grad_samples)
            optimizer.step()
            optimizer.zero_grad()
        assert len(accountant) > 0
        """,
    "no wrapper": """
        plain = model
        hooks, optimizer, loader = engine.make_private(
            module=model, optimizer=optimizer, data_loader=loader, noise_multiplier=0.0, max_grad_norm=0.3,
            poisson_sampling=False, wrap_model=False,
        )
        for data, target in loader:
            optimizer.zero_grad()
            criterion(plain(data), target).backward()
            optimizer.step()
        hooks.cleanup()
        assert not any(hasattr(p, "grad_sample") for p in plain.parameters())
        """,
    "accumulation": """
        model, optimizer, loader = engine.make_private(
            module=model, optimizer=optimizer, data_loader=loader, noise_multiplier=0.0, max_grad_norm=0.3,
            poisson_sampling=False,
        )
        for k, (data, target) in enumerate(loader):
            criterion(model(data), target).backward()
            if k % 2:
                optimizer.step()
                optimizer.zero_grad()
        """,
    "no_op": """
        from torch.func import functional_call, grad, vmap
        model, optimizer, loader = engine.make_private(
            module=model, optimizer=optimizer, data_loader=loader, noise_multiplier=0.0, max_grad_norm=0.3,
            poisson_sampling=False, grad_sample_mode="no_op",
        )
        def loss_of(params, x, y):
            return nn.functional.cross_entropy(functional_call(model, params, (x[None],)), y[None])
        for data, target in loader:
            params = {n: p.detach() for n, p in model.named_parameters()}
            gradients = vmap(grad(loss_of), (None, 0, 0))(params, data, target)
            for name, p in model.named_parameters():
                p.grad_sample = gradients[name]
            optimizer.step()
            optimizer.zero_grad()
        """,
}


def _run(script: str, library: str) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Weights after the script, and what it has put into ``seen``."""
    scope: dict[str, object] = {"seen": []}
    text = (COMMON + textwrap.dedent(script)).replace("opacus", library)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exec(compile(text, library, "exec"), scope)
    model = scope["model"]
    assert isinstance(model, nn.Module)
    return [p.detach().clone() for p in model.parameters()], [t.detach().clone() for t in scope["seen"]]  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_gives_the_same_with_either_library(name):
    theirs, seen_by_theirs = _run(SCRIPTS[name], "opacus")
    ours, seen_by_ours = _run(SCRIPTS[name], "dpcore")
    assert len(seen_by_ours) == len(seen_by_theirs)
    for a, b in zip([*ours, *seen_by_ours], [*theirs, *seen_by_theirs], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=2e-5)
    error = torch.cat([(a - b).flatten() for a, b in zip(ours, theirs, strict=True)]).norm()
    assert error / torch.cat([p.flatten() for p in theirs]).norm() < 1e-5
