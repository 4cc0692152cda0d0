"""The release's files as a user gets them: installed into an empty environment on a machine without a compiler.

``make test-wheels`` runs these tests on what ``make wheels`` has left in dist/.
"""

from __future__ import annotations

import json
import os
import platform
import resource
import statistics
import subprocess
import venv
import zipfile
from pathlib import Path

import numpy as np
import pytest

from dpcore.native import levels

ROOT = Path(__file__).parents[2]
DIST = ROOT / "dist"
WHEELS = sorted(DIST.glob(f"dpcore-*manylinux*_{platform.machine()}.whl"))
SUMS_DIFFER_BY = 2e-6
"""Difference of float32 sums in another order that docs/dpcore.md allows, relative to the largest."""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not WHEELS, reason="no wheel for this machine in dist/: make wheels"),
]

# Clipped sums through every kernel, noise of lengths that fill no whole block, and what the library says of itself.
PROGRAM = """
import hashlib, json, sys, numpy, torch, dpcore
from torch import nn

def losses(out, y):
    return out.flatten(1).square().sum(1)

class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.down = nn.Embedding(50, 21), nn.Linear(21, 3)
    def forward(self, ids):
        return self.down(self.table(ids).mean(1))

class Last(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.loop = kind(6, 33, batch_first=True)
    def forward(self, x):
        return self.loop(x)[0][:, -1]

torch.manual_seed(0)
sums, y = {}, torch.zeros(9)
for name, model, x in (
    ("convolution", nn.Conv2d(3, 20, 5, 2, 1).to(memory_format=torch.channels_last), torch.randn(9, 3, 12, 12)),
    ("positions", nn.Linear(40, 30), torch.randn(9, 80, 40)),
    ("lstm", Last(nn.LSTM), torch.randn(9, 70, 6)),
    ("gru", Last(nn.GRU), torch.randn(9, 70, 6)),
    ("rnn", Last(nn.RNN), torch.randn(9, 70, 6)),
    ("tokens", Words(), torch.randint(0, 50, (9, 50))),
):
    engine = dpcore.Engine(model, losses, max_grad_norm=0.5)
    found = engine.clipped_sum(x, y).sums
    sums.update({f"{name}.{key}": value.numpy() for key, value in found.items()})
noise = [dpcore.GaussianNoise(3, rank=1).add_(torch.zeros(n), 1.3, 7).numpy() for n in (16, 1003, 100_000)]
numpy.savez(sys.argv[1], **sums, noise=numpy.concatenate(noise))
print(json.dumps({
    "file": dpcore.__file__,
    "available": dpcore.native.available(),
    "explained": [line for line in engine.explain().splitlines() if "kernels" in line],
}))
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an empty environment with the wheel and torch."""
    folder = tmp_path_factory.mktemp("installed") / "env"
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "torch==2.13.0", "setuptools==84.2.1", WHEELS[-1]], check=True)
    return python


def without_compiler(python: Path, **more: str) -> dict[str, str]:
    """An environment whose PATH holds the virtual environment alone, and no cache of compiled kernels."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("DPCORE", "PYTHON", "CXX", "PIP_"))}
    folder = python.parent
    return kept | {"PATH": str(folder), "XDG_CACHE_HOME": str(folder.parent / "cache"), "OMP_NUM_THREADS": "1"} | more


def tried(python: Path, folder: Path, switch: str) -> tuple[dict[str, object], dict[str, np.ndarray]]:
    """Return what PROGRAM says and computes under ``DPCORE_NATIVE``."""
    file, environment = folder / f"{switch or 'default'}.npz", without_compiler(python, DPCORE_NATIVE=switch)
    command = [python, "-W", "error::RuntimeWarning", "-c", PROGRAM, file]
    done = subprocess.run(command, cwd=folder, env=environment, check=True, capture_output=True, text=True)
    with np.load(file) as arrays:
        return json.loads(done.stdout), dict(arrays)


def test_kernels_are_there_without_a_compiler_and_every_set_computes_the_same(installed: Path, tmp_path: Path) -> None:
    environment = without_compiler(installed)
    look = "import shutil; print([shutil.which(c) for c in ('cc', 'c++', 'gcc', 'g++', 'clang', 'clang++')])"
    said = subprocess.run([installed, "-c", look], env=environment, capture_output=True, text=True, check=True).stdout
    assert said.strip() == str([None] * 6)
    here = [level.name for level in levels.levels_here()]
    assert here, "no kernels for this processor"
    best, first = tried(installed, tmp_path, "")
    assert best["available"] is True and str(best["file"]).startswith(str(installed.parent.parent))
    assert best["explained"] == [f"compiled kernels: in use ({here[0]})"]
    for name in here[1:]:
        about, arrays = tried(installed, tmp_path, name)
        assert about["explained"] == [f"compiled kernels: in use ({name})"]
        assert np.array_equal(arrays["noise"], first["noise"]), "noise is the same to the bit"
        worst = furthest(arrays, first)
        print(f"{name}: the same noise; sums differ from those of {here[0]} by {worst:.1e}")
        assert worst < SUMS_DIFFER_BY
    pure, arrays = tried(installed, tmp_path, "0")
    assert pure["available"] is False and furthest(arrays, first) < SUMS_DIFFER_BY
    np.testing.assert_allclose(arrays["noise"], first["noise"], rtol=0, atol=1e-5)
    print(f"pure: sums differ from those of {here[0]} by {furthest(arrays, first):.1e}")


def furthest(found: dict[str, np.ndarray], true: dict[str, np.ndarray]) -> float:
    """The largest difference of a sum, relative to its norm."""
    assert found.keys() == true.keys()
    names = found.keys() - {"noise"}
    return max(float(np.linalg.norm(found[n] - true[n]) / np.linalg.norm(true[n])) for n in names)


def processor_seconds(python: Path, program: str, folder: Path) -> float:
    """User and system time of a fresh process."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([python, "-c", program], cwd=folder, env=without_compiler(python), check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def test_the_import_takes_little_more_than_torchs_own(installed: Path, tmp_path: Path) -> None:
    programs = ("import torch", "import dpcore")
    for program in programs:  # bytecode and the pages of the libraries
        processor_seconds(installed, program, tmp_path)
    pairs = [[processor_seconds(installed, program, tmp_path) for program in programs] for _ in range(9)]
    ratio = statistics.median(ours / torchs for torchs, ours in pairs)
    print(f"import dpcore / import torch: {ratio:.3f} (processor time, median of 9 pairs)")
    assert ratio <= 1.1


def test_the_wheel_is_small() -> None:
    size = WHEELS[-1].stat().st_size
    print(f"{WHEELS[-1].name}: {size:,} bytes")
    assert size < 2**20


def test_the_benchmark_compiles_the_library_that_the_wheel_carries(installed: Path, tmp_path: Path) -> None:
    pins = (ROOT / "frameworks" / "dpcore" / "requirements.txt").read_text().splitlines()
    (compiler,) = (pin for pin in pins if pin.startswith("ziglang=="))
    own = tmp_path / "compiler"
    subprocess.run([installed, "-m", "pip", "install", "--quiet", "--no-deps", "--target", own, compiler], check=True)
    environment = without_compiler(installed, PYTHONPATH=str(own), XDG_CACHE_HOME=str(tmp_path / "cache"))
    command = [installed, "-m", "dpcore.native"]
    said = subprocess.run(command, cwd=tmp_path, env=environment, check=True, capture_output=True, text=True).stdout
    with zipfile.ZipFile(WHEELS[-1]) as files:
        packaged = files.read(f"dpcore/native/libraries/{levels.levels_here()[0].file_name}")
    assert Path(said.strip()).read_bytes() == packaged


def test_the_source_archive_gives_a_pure_wheel_without_a_compiler(installed: Path, tmp_path: Path) -> None:
    (archive,) = DIST.glob("dpcore-*.tar.gz")
    pip = [installed, "-m", "pip", "wheel", "--quiet", "--no-index", "--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, "--wheel-dir", tmp_path, archive], env=without_compiler(installed), check=True)
    assert [path.name.split("-", 2)[2] for path in tmp_path.glob("*.whl")] == ["py3-none-any.whl"]
