"""``make test-versions``: dpcore's tests on the oldest torch that it allows, on newer ones, on the newest.

Every pair of torch and Python has an environment of its own in ``.venvs``, with what tests/requirements-torch.txt pins
beside torch. First the import, in which every warning is an error, then the tests that are not slow. ``--quick`` runs
only the parts that lean on torch's own functions, hooks and formats. A Python that is not here is looked for in pyenv,
then fetched by ``uv`` where that is installed. Without one the pair fails, unless ``--allow-missing`` is given.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PINS = ROOT / "tests" / "requirements-torch.txt"
NEWEST = "newest"
PAIRS = (("2.6.0", "3.11"), ("2.9.1", "3.12"), ("2.11.0", "3.13"), ("2.13.0", "3.11"), (NEWEST, "3.13"))
"""(torch, Python)."""
QUICK = (
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
REMEDY = (
    "there is no Python {version} here, and no uv that could fetch it. Install it (your system's packages or pyenv), "
    "or `pip install uv`, or pass --allow-missing to leave such pairs out"
)


@dataclass(frozen=True)
class Outcome:
    """``line``: what came of a pair, in words. ``failed``: whether it makes the whole run fail."""

    line: str
    failed: bool


def interpreter(version: str) -> str | None:
    """Find a Python.

    Args:
        version: such as "3.12".

    Returns:
        Its path; None where there is none, and no ``uv`` to fetch it.
    """
    candidates = [shutil.which(f"python{version}"), *_of_pyenv(version)]
    for found in candidates:
        # pyenv puts a python3.12 on the path that only says which versions have one.
        if found and subprocess.run([found, "-c", ""], capture_output=True, check=False).returncode == 0:
            return found
    if shutil.which("uv") is None:
        return None
    subprocess.run(["uv", "python", "install", "-q", version], check=False)
    done = subprocess.run(["uv", "python", "find", version], capture_output=True, text=True, check=False)
    return done.stdout.strip() or None


def _of_pyenv(version: str) -> list[str]:
    if shutil.which("pyenv") is None:
        return []
    done = subprocess.run(["pyenv", "root"], capture_output=True, text=True, check=False)
    found = Path(done.stdout.strip()).glob(f"versions/{version}.*/bin/python{version}") if done.stdout.strip() else ()
    return sorted(map(str, found), reverse=True)


def packages(torch: str) -> list[str]:
    """Return what an environment gets: that torch, and the pins of the tests beside it.

    Of setuptools it gets what that torch allows, which may be older than the pin.
    """
    lines = [line.split("#")[0].strip() for line in PINS.read_text().splitlines()]
    beside = [line for line in lines if line and not line.startswith(("torch==", "setuptools=="))]
    return ["torch" if torch == NEWEST else f"torch=={torch}", *beside, "setuptools"]


def folder_of(torch: str, python: str) -> Path:
    """Where a pair's environment is."""
    return ROOT / ".venvs" / f"torch-{torch}-python-{python}"


def environment(torch: str, python: str, path: str) -> Path:
    """The Python of an environment with that torch, made where it is not there or of other pins."""
    folder, wanted = folder_of(torch, python), packages(torch)
    inside, ready = folder / "bin" / "python", folder / "ready"
    if not ready.exists() or ready.read_text() != "\n".join(wanted):
        subprocess.run([path, "-m", "venv", "--clear", folder], check=True)
        subprocess.run([inside, "-m", "pip", "install", "--quiet", *wanted], check=True)
        ready.write_text("\n".join(wanted))
    return inside


def outcome(torch: str, python: str, tests: list[str], options: argparse.Namespace) -> Outcome:
    """Run one pair.

    Args:
        torch: its version, or NEWEST.
        python: its version.
        tests: what pytest is to run, files or folders.
        options: those of the command line.
    """
    path = interpreter(python)
    if path is None:
        return Outcome(f"not run: {REMEDY.format(version=python)}", not options.allow_missing)
    try:
        inside = environment(torch, python, path)
    except subprocess.CalledProcessError as error:
        return Outcome(f"no environment: {error}", True)
    try:
        return _tested(inside, tests, options.pytest)
    finally:
        if options.remove:
            shutil.rmtree(folder_of(torch, python))


def _tested(inside: Path, tests: list[str], more: list[str]) -> Outcome:
    settings = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    look = "import dpcore, torch; print(torch.__version__)"
    found = subprocess.run(
        [inside, "-W", "error", "-c", look], capture_output=True, text=True, env=settings, cwd=ROOT, check=False
    )
    if found.returncode:
        return Outcome(f"the import fails or warns: {found.stderr.strip().splitlines()[-1]}", True)
    command = [inside, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not slow", "--tb=short", *more, *tests]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=settings, cwd=ROOT, check=False)
    if done.returncode:
        print(done.stdout, file=sys.stderr)
    last = (done.stdout.strip().splitlines() or ["pytest said nothing"])[-1]
    return Outcome(f"torch {found.stdout.strip()}, no warning at import; {last}", bool(done.returncode))


def main(arguments: list[str] | None = None) -> int:
    """Run the pairs and print a line for each.

    Args:
        arguments: of the command line, without the program's name; None: this process's own.

    Returns:
        0 if every pair passed, 1 if one failed or could not run.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    versions = [torch for torch, _ in PAIRS]
    parser.add_argument("--torch", nargs="*", choices=versions, metavar="VERSION", help=f"only: {', '.join(versions)}")
    parser.add_argument("--python", help="this Python instead of the pairs' own")
    parser.add_argument("--quick", action="store_true", help=f"only the {len(QUICK)} parts that lean on torch most")
    parser.add_argument("--tests", nargs="*", metavar="NAME", help="only these parts: recurrent for test_recurrent.py")
    parser.add_argument("--allow-missing", action="store_true", help="a pair whose Python is missing does not fail")
    parser.add_argument("--remove", action="store_true", help="removes each environment after its run (about 5 GB)")
    parser.add_argument(
        "--pytest", nargs="*", default=[], metavar="OPTION", help="more for pytest, such as --pytest=-x"
    )
    options = parser.parse_args(arguments)
    names = options.tests or (QUICK if options.quick else ())
    tests = [f"tests/dpcore/test_{name}.py" for name in names] or ["tests/dpcore"]
    failed = False
    for torch, own in PAIRS:
        if options.torch and torch not in options.torch:
            continue
        python = options.python or own
        found = outcome(torch, python, tests, options)
        failed |= found.failed
        print(f"torch {torch}, Python {python}: {found.line}", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
