"""Tutorial 5: an Opacus script becomes a dpcore script by its imports.

    python docs/tutorials/migrate_from_opacus.py                  # seconds, synthetic; or cell by cell, as a notebook
    python docs/tutorials/migrate_from_opacus.py --data FOLDER    # genuine MNIST

You will learn: which lines change (the imports), that the same update comes out, what to change next to gain what
dpcore adds, and what a script must say if it reads gradients between backward() and step(). The checklist is
docs/migration.md.
"""

# %% [1] A script as Opacus' users write it. Here the package's name is a variable; in your script it is the import:
#     from opacus import PrivacyEngine
#     from opacus.utils.batch_memory_manager import BatchMemoryManager
#     from opacus.validators import ModuleValidator
# becomes
#     from dpcore import PrivacyEngine
#     from dpcore.utils.batch_memory_manager import BatchMemoryManager
#     from dpcore.validators import ModuleValidator
import importlib
import importlib.util
import warnings
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dpcore import PrivacyError
from dpcore.examples import data

options = data.tutorial_options()
digits = data.load("mnist", options.data)
few = TensorDataset(*digits.train[:256])
print("opacus is", "installed: both are run" if importlib.util.find_spec("opacus") else "not installed: dpcore alone")
warnings.simplefilter("ignore")  # Opacus warns of many things; so does dpcore, of fixed batches


def train(library: str, **settings: Any) -> tuple[list[torch.Tensor], float]:
    """Weights after one round over 256 digits, and epsilon at 1e-5."""
    privacy_engine = importlib.import_module(library).PrivacyEngine
    memory_manager = importlib.import_module(f"{library}.utils.batch_memory_manager").BatchMemoryManager
    validator = importlib.import_module(f"{library}.validators").ModuleValidator

    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 8, 5, 2), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 144, 10))
    torch.manual_seed(0)  # a fixed model's new layers start with weights of their own
    model = validator.fix(model)  # BatchNorm -> GroupNorm
    validator.validate(model, strict=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    criterion = nn.CrossEntropyLoss()

    engine = privacy_engine(accountant="rdp")
    model, optimizer, loader = engine.make_private(
        module=model,
        optimizer=optimizer,
        data_loader=DataLoader(few, batch_size=64),
        max_grad_norm=1.0,
        **settings,
    )
    with memory_manager(data_loader=loader, max_physical_batch_size=16, optimizer=optimizer) as pieces:
        for x, y in pieces:
            optimizer.zero_grad()
            criterion(model(x), y).backward()
            optimizer.step()
    return [p.detach() for p in model.parameters()], engine.get_epsilon(1e-5)


# %% [2] Without noise and sampling, so that there is nothing random to differ: the same weights.
ours, _ = train("dpcore", noise_multiplier=0.0, poisson_sampling=False)
if importlib.util.find_spec("opacus"):
    theirs, _ = train("opacus", noise_multiplier=0.0, poisson_sampling=False)
    difference = max(float((a - b).abs().max()) for a, b in zip(ours, theirs, strict=True))
    print(f"largest difference of any weight: {difference:.1e} ({digits.label} data)")
    assert difference < 1e-5
    _, epsilon = train("opacus", noise_multiplier=1.0)
    _, same = train("dpcore", noise_multiplier=1.0)
    print(f"epsilon of the same steps, RDP: opacus {epsilon:.4f}, dpcore {same:.4f}")

# %% [3] Next: say the public numbers. Otherwise they are derived from the length of your data, as if it were public.
_, epsilon = train("dpcore", noise_multiplier=1.0, sample_rate=0.25, expected_batch_size=64)
print(f"epsilon {epsilon:.4f} with public numbers ({digits.label} data)")

# %% [4] A script that reads p.grad or p.grad_sample between backward() and step() asks for the mode that forms p.grad.
from dpcore import PrivacyEngine  # noqa: E402

model = nn.Linear(784, 10)
model, optimizer, loader = PrivacyEngine(seed=0).make_private(
    module=model,
    optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
    data_loader=DataLoader(few, batch_size=64),
    noise_multiplier=1.0,
    max_grad_norm=1.0,
    grad_sample_mode="hooks",
)
x, y = next(iter(loader))
nn.functional.cross_entropy(model(x.flatten(1)), y).backward()
weight = model.weight
assert weight.grad is not None and weight.grad_sample.shape == (len(x), 10, 784)
optimizer.step()

# %% [5] What Opacus lets pass, dpcore refuses; the message says what would have leaked.
try:
    nn.functional.cross_entropy(model(x.flatten(1)), y).backward()  # the same batch once more
    optimizer.step()
except PrivacyError as refusal:
    print(f"refused: {refusal}")
else:
    raise AssertionError("a batch was used twice")
