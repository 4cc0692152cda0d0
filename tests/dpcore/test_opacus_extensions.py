"""Scripts that use Opacus' extension points, run with Opacus and again with its name replaced in the imports: an
accountant and a rule of one's own, a generator for batches, and the errors that scripts catch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.dpcore.test_opacus_scripts import _run

pytest.importorskip("opacus")

ACCOUNTANT = """
    import math
    from opacus.accountants import IAccountant, create_accountant, register_accountant

    class Zero(IAccountant):
        '''Zero-concentrated privacy without amplification by sampling, by nothing but Opacus' interface.'''

        def __init__(self):
            self.history = []
            self.rho = 0.0

        def step(self, *, noise_multiplier, sample_rate):
            self.rho += 1 / (2 * noise_multiplier**2)
            self.history.append((noise_multiplier, sample_rate, 1))

        def get_epsilon(self, delta, *args, **kwargs):
            return self.rho + 2 * math.sqrt(self.rho * math.log(1 / delta))

        def __len__(self):
            return len(self.history)

        @classmethod
        def mechanism(cls):
            return "zero"

    register_accountant("zero", Zero, force=True)
    assert isinstance(create_accountant("zero"), Zero)
    engine = PrivacyEngine(accountant="zero")
    model, optimizer, loader = engine.make_private(
        module=model, optimizer=optimizer, data_loader=loader, noise_multiplier=2.0, max_grad_norm=0.3,
        poisson_sampling=False,
    )
    for data, target in loader:
        optimizer.zero_grad()
        criterion(model(data), target).backward()
        optimizer.step()
    assert len(engine.accountant) == 4
    saved = engine.accountant.state_dict()
    engine.accountant.load_state_dict(saved)
    seen.append(torch.tensor([engine.get_epsilon(1e-5), engine.get_epsilon(delta=1e-3)]))
"""

RULE = """
    from opacus.grad_sample import register_grad_sampler

    class Scale(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 16))

        def forward(self, x):
            return self.scale.sigmoid() * x

    calls = []

    @register_grad_sampler(Scale)
    def scale_rule(layer, activations, backprops):
        calls.append(len(backprops))
        slope = layer.scale.sigmoid() * (1 - layer.scale.sigmoid())
        return {layer.scale: backprops * activations[0] * slope}

    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), Scale(), nn.Linear(16, 4))
    model, optimizer, loader = engine.make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.5), data_loader=loader,
        noise_multiplier=0.0, max_grad_norm=0.3, poisson_sampling=False,
    )
    for data, target in loader:
        optimizer.zero_grad()
        criterion(model(data), target).backward()
        optimizer.step()
    assert calls.count(12) >= 4
"""

GENERATOR = """
    from opacus.data_loader import DPDataLoader
    from opacus.utils.uniform_sampler import UniformWithReplacementSampler

    def batches(seed, **options):
        generator = torch.Generator().manual_seed(seed)
        sampler = UniformWithReplacementSampler(num_samples=48, sample_rate=0.25, generator=generator, **options)
        return [sorted(int(i) for i in batch) for batch in sampler]

    assert len(batches(1, steps=7)) == 7
    assert batches(1) == batches(1) != batches(2)
    first, second = (
        [len(data) for data, _ in DPDataLoader(
            loader.dataset, sample_rate=0.25, generator=torch.Generator().manual_seed(3))]
        for _ in range(2)
    )
    assert first == second
    private = DPDataLoader.from_data_loader(loader, generator=torch.Generator().manual_seed(3))
    assert [len(data) for data, _ in private] == first

    def sizes(global_seed):
        torch.manual_seed(global_seed)
        ordinary = DataLoader(loader.dataset, batch_size=12, generator=torch.Generator().manual_seed(5))
        model = nn.Linear(64, 3)
        _, _, private = PrivacyEngine().make_private(
            module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), data_loader=ordinary,
            noise_multiplier=1.0, max_grad_norm=1.0)
        return [len(data) for data, _ in private for _ in range(3)]

    assert sizes(0) == sizes(1)
"""

MISUSES = {
    "a step without a backward pass": """
        make()
        private.step()
        """,
    "a batch norm": "make(nn.Sequential(nn.Flatten(), nn.Linear(64, 4), nn.BatchNorm1d(4)))",
    "an iterable data set": """
        from torch.utils.data import IterableDataset
        from opacus.data_loader import DPDataLoader
        class Stream(IterableDataset):
            def __iter__(self):
                return iter(loader.dataset)
        DPDataLoader.from_data_loader(DataLoader(Stream(), batch_size=4))
        """,
    "an unknown accountant": "PrivacyEngine(accountant='moments')",
    "an unknown mode": "make(grad_sample_mode='backpack')",
    "an unknown reduction": "make(loss_reduction='median')",
    "a module that is private already": """
        from opacus.grad_sample import GradSampleModule
        first = GradSampleModule(model)
        GradSampleModule(model)
        """,
    "no batch size for a mean": """
        from opacus import GradSampleModule
        from opacus.optimizers import DPOptimizer
        GradSampleModule(model)
        DPOptimizer(optimizer, noise_multiplier=1.0, max_grad_norm=1.0, expected_batch_size=None)
        """,
    "accumulation where it is forbidden": """
        make()
        private_model.forbid_grad_accumulation()
        for _ in range(2):
            criterion(private_model(x[:4]), y[:4]).backward()
        """,
    "steps and epochs": """
        from opacus.accountants.utils import get_noise_multiplier
        get_noise_multiplier(target_epsilon=1.0, target_delta=1e-5, sample_rate=0.1, steps=3, epochs=3)
        """,
    "a name that is taken": """
        from opacus.accountants import RDPAccountant, register_accountant
        register_accountant("rdp", RDPAccountant)
        """,
    "another accountant's state": """
        from opacus.accountants import GaussianAccountant, RDPAccountant
        RDPAccountant().load_state_dict(GaussianAccountant().state_dict())
        """,
    "an empty state": """
        from opacus.accountants import RDPAccountant
        RDPAccountant().load_state_dict({})
        """,
    "no examples": """
        from opacus.utils.uniform_sampler import UniformWithReplacementSampler
        UniformWithReplacementSampler(num_samples=0, sample_rate=0.1)
        """,
}
MISUSES_BY_CLASS = {
    "a batch norm": (MISUSES["a batch norm"], "UnsupportedModuleError"),
    "evaluation mode": ("make(model.eval())", "UnsupportedModuleError"),
    "running statistics": (
        "make(nn.Sequential(nn.Unflatten(1, (4, 16)), nn.InstanceNorm1d(4, affine=True, track_running_stats=True)))",
        "UnsupportedModuleError",
    ),
    "a listed batch norm": (
        """
        from opacus.validators import ModuleValidator
        raise ModuleValidator.validate(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))[0]
        """,
        "ShouldReplaceModuleError",
    ),
    "listed running statistics": (
        """
        from opacus.validators import ModuleValidator
        raise ModuleValidator.validate(nn.InstanceNorm1d(4, affine=True, track_running_stats=True))[0]
        """,
        "IllegalModuleConfigurationError",
    ),
}
CAUGHT = """
def make(model=model, **options):
    global private_model, private
    private_model, private, *_ = engine.make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), data_loader=loader, noise_multiplier=1.0,
        max_grad_norm=1.0, **options)

try:
{misuse}
except ValueError:
    caught = True
else:
    caught = False
seen.append(torch.tensor(caught))
"""


@pytest.mark.parametrize("script", [ACCOUNTANT, RULE, GENERATOR], ids=["accountant", "rule", "generator"])
def test_an_extension_works_with_either_library(script):
    theirs, seen_by_theirs = _run(script, "opacus")
    ours, seen_by_ours = _run(script, "dpcore")
    for a, b in zip(seen_by_ours, seen_by_theirs, strict=True):
        torch.testing.assert_close(a, b)
    if script is RULE:  # the only one without noise
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("misuse", MISUSES)
def test_a_misuse_is_a_value_error_in_either_library(misuse):
    lines = [line[8:] if line.startswith(" " * 8) else line for line in MISUSES[misuse].splitlines()]
    script = CAUGHT.replace("{misuse}", "\n".join("    " + line for line in lines if line))
    for library in ("opacus", "dpcore"):
        assert _run(script, library)[1][0], library


@pytest.mark.parametrize("misuse", MISUSES_BY_CLASS)
def test_a_module_that_cannot_be_trained_is_caught_by_opacus_class(misuse):
    body, error = MISUSES_BY_CLASS[misuse]
    lines = [line[8:] if line.startswith(" " * 8) else line for line in body.splitlines()]
    script = CAUGHT.replace("{misuse}", "\n".join("    " + line for line in lines if line.strip()))
    script = f"from opacus.validators.errors import {error}\n" + script.replace("except ValueError", f"except {error}")
    for library in ("opacus", "dpcore"):
        assert _run(script, library)[1][0], library


def test_an_accountant_of_ones_own_calibrates_noise_and_keeps_a_budget():
    from dpcore import BudgetError, PrivacyEngine
    from tests.dpcore.private_setup import make, step

    _run(ACCOUNTANT, "dpcore")
    engine, model, optimizer, loader = make(engine=PrivacyEngine(accountant="zero"), noise_multiplier=4.0)
    engine.set_budget(2.0, 1e-5)
    assert "Zero(0 steps" in repr(engine)
    with pytest.raises(BudgetError):
        for x, y in loader:
            step(model, optimizer, x, y)
    assert 0 < len(engine.accountant) < 6 and engine.get_epsilon(1e-5) <= 2.0


def test_the_distributed_sampler_takes_opacus_arguments(tmp_path):
    """In a process of its own, which is a group of one."""
    group = f"file://{tmp_path}/group"  # torch 2.6 takes no port 0
    script = f"""
import torch, torch.distributed as dist
dist.init_process_group("gloo", init_method={group!r}, rank=0, world_size=1)
from dpcore.utils.uniform_sampler import DistributedUniformWithReplacementSampler as Sampler
def batches(seed):
    sampler = Sampler(total_size=50, sample_rate=0.2, shuffle=True, shuffle_seed=3, steps=4,
                      generator=torch.Generator().manual_seed(seed))
    sampler.set_epoch(1)
    return [list(batch) for batch in sampler]
assert batches(1) == batches(1) != batches(2) and len(batches(1)) == 4
"""
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, cwd=root)
    assert done.returncode == 0, done.stderr
