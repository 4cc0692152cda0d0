"""``make test-versions``: a part of dpcore's tests on the oldest torch that it allows, on newer ones, on the newest.

Every pair of torch and Python has an environment of its own in ``.venvs``. First the import, in which every warning is
an error, then the tests. A Python that is not here is fetched by ``uv`` where that is installed; else the pair is "not
run", which the table says.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
NEWEST = "newest"
PAIRS = (("2.6.0", "3.11"), ("2.9.1", "3.12"), ("2.11.0", "3.13"), ("2.13.0", "3.11"), (NEWEST, "3.13"))
"""(torch, Python)."""
PACKAGES = ("numpy", "scipy", "pytest", "hypothesis")
TESTS = (
    "clipped_sum",
    "recurrent",
    "attention",
    "privacy_engine",
    "checkpoint",
    "fail_closed",
    "gradients_between_steps",
    "messages",
    "mistakes",
    "noise_and_step",
    "parity",
    "patches",
    "precision",
    "sampling",
)
"""The parts that lean on torch's own functions, hooks and formats."""


def interpreter(version: str) -> str | None:
    """The path of that Python; None where there is none, and no ``uv`` to fetch it."""
    found = shutil.which(f"python{version}")
    if found and subprocess.run([found, "-c", ""], capture_output=True, check=False).returncode == 0:
        return found
    if shutil.which("uv") is None:
        return None
    subprocess.run(["uv", "python", "install", "-q", version], check=False)
    done = subprocess.run(["uv", "python", "find", version], capture_output=True, text=True, check=False)
    return done.stdout.strip() or None


def environment(torch: str, python: str, path: str) -> Path:
    """The Python of an environment with that torch, made where it is not there."""
    folder = ROOT / ".venvs" / f"torch-{torch}-python-{python}"
    inside = folder / "bin" / "python"
    if not (folder / "ready").exists():
        subprocess.run([path, "-m", "venv", "--clear", folder], check=True)
        wanted = "torch" if torch == NEWEST else f"torch=={torch}"
        subprocess.run([inside, "-m", "pip", "install", "--quiet", wanted, *PACKAGES], check=True)
        (folder / "ready").touch()
    return inside


def outcome(torch: str, python: str, tests: list[str]) -> tuple[str, bool]:
    """Return the outcome of one pair, and whether it counts as passed."""
    path = interpreter(python)
    if path is None:
        return f"not run: there is no Python {python} here, and no uv to fetch it", True
    try:
        inside = environment(torch, python, path)
    except subprocess.CalledProcessError as error:
        return f"no environment: {error}", False
    settings = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    look = "import dpcore, torch; print(torch.__version__)"
    found = subprocess.run(
        [inside, "-W", "error", "-c", look], capture_output=True, text=True, env=settings, cwd=ROOT, check=False
    )
    if found.returncode:
        return f"the import fails or warns: {found.stderr.strip().splitlines()[-1]}", False
    files = [f"tests/dpcore/test_{name}.py" for name in tests]
    options = ["-q", "-p", "no:cacheprovider", "-m", "not slow", "--tb=short"]
    command = [inside, "-m", "pytest", *options, *files]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=settings, cwd=ROOT, check=False)
    if done.returncode:
        print(done.stdout, file=sys.stderr)
    return f"torch {found.stdout.strip()}, no warning at import; {done.stdout.splitlines()[-1]}", not done.returncode


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--torch", nargs="*", help="only these, of the versions " + ", ".join(t for t, _ in PAIRS))
    parser.add_argument("--python", help="with this Python instead of the pair's own, where there is no other")
    parser.add_argument("--tests", nargs="*", default=list(TESTS), help="parts of dpcore's tests, by name")
    options = parser.parse_args()
    failed = False
    for torch, own in PAIRS:
        if options.torch and torch not in options.torch:
            continue
        python = options.python or own
        line, passed = outcome(torch, python, options.tests)
        failed |= not passed
        print(f"torch {torch}, Python {python}: {line}", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
