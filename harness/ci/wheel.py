"""Prepare ``dpbench compare`` in a CI job: find the wheel and the release, and tell the runner the outcome."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from packaging.utils import InvalidName, InvalidWheelFilename, canonicalize_name, parse_wheel_filename
from packaging.version import InvalidVersion, Version

from harness.errors import BadInput

VERDICTS = {0: "none-proven", 1: "regression", 2: "bad-input", 3: "failed"}
"""Verdict by exit code of ``dpbench compare``. A measurement that was too short proves nothing, so it is no
acquittal."""
REGRESSION, FAILED = 1, 3
DRY_RUN = "dry-run"


@dataclass(frozen=True)
class WheelComparison:
    """A wheel of ``package`` against its release ``base``. ``more``: further options of ``dpbench compare`` by name."""

    package: str
    wheel: Path
    base: str
    markdown: Path
    more: Mapping[str, str]

    @property
    def command(self) -> list[str]:
        options = [word for name, value in self.more.items() if value for word in (f"--{name}", value)]
        return [
            *(sys.executable, "-m", "harness", "compare"),
            *("--base", f"{self.package}=={self.base}", "--head", str(self.wheel), "--markdown", str(self.markdown)),
            *options,
        ]


def find_wheel(pattern: str, workspace: Path, package: str) -> tuple[Path, Version]:
    """Return the only wheel that ``pattern`` (a path, or one with ``*``, relative to ``workspace``) means, and its
    version.

    Raises :class:`BadInput` where that is no wheel of ``package`` or not exactly one.
    """
    try:
        wanted = canonicalize_name(package, validate=True)
    except InvalidName:
        raise BadInput(f"The package {package!r} is no name of a distribution; give one such as opacus.") from None
    given = Path(pattern)
    root, relative = (
        (Path(given.anchor), str(given.relative_to(given.anchor))) if given.anchor else (workspace, pattern)
    )
    found = sorted(path for path in root.glob(relative) if path.is_file()) if relative else []
    if len(found) != 1:
        names = ", ".join(path.name for path in found) or "nothing"
        raise BadInput(f"The wheel {pattern!r} means {names} in {root}: it must mean exactly one file.")
    try:
        name, version, *_ = parse_wheel_filename(found[0].name)
    except InvalidWheelFilename:
        raise BadInput(
            f"{found[0].name} is not the name of a wheel; give the .whl file that the build wrote."
        ) from None
    if name != wanted:
        raise BadInput(f"{found[0].name} is a wheel of {name}, not of {package}; correct the package or the wheel.")
    return found[0].resolve(), version


def last_release(package: str) -> str:
    """Return the version that pip would install now from the index that it is configured for.

    Raises :class:`BadInput` where pip finds none.
    """
    report = ("install", "--dry-run", "--no-deps", "--ignore-installed", "--quiet", "--report", "-")
    options = ("--disable-pip-version-check", "--no-input")
    done = subprocess.run(
        [sys.executable, "-m", "pip", *options, *report, "--", package], capture_output=True, text=True
    )
    if done.returncode != 0:
        reason = next((line for line in done.stderr.splitlines() if line.startswith("ERROR")), "pip gave no reason")
        raise BadInput(f"The last release of {package} was not found ({reason}); name a version as the base.")
    return str(json.loads(done.stdout)["install"][0]["metadata"]["version"])


def check_version(text: str) -> str:
    """Return a version, also as written after ``NAME==``."""
    version = text.rsplit("==", 1)[-1].strip()
    try:
        Version(version)
    except InvalidVersion:
        raise BadInput(
            f"The base {text!r} is not a version; give one such as 1.5.4, or nothing for the last."
        ) from None
    return version


Run = Callable[[Sequence[str]], int]


def _run(command: Sequence[str]) -> int:
    return subprocess.run(command).returncode


def compare_wheel(comparison: WheelComparison, dry_run: bool = False, run: Run = _run) -> int:
    """Run the comparison, tell the runner ``verdict``, ``markdown`` and ``base``, and return the exit code."""
    if dry_run:
        code, verdict = 0, DRY_RUN
    else:
        comparison.markdown.unlink(missing_ok=True)  # of an earlier run: it must not be taken for this one's
        code = run(comparison.command)
        if code == REGRESSION and not comparison.markdown.exists():
            code = FAILED  # a crash of Python ends with 1 too, but only a verdict is written down
        verdict = VERDICTS.get(code, "failed")
    text = comparison.markdown.read_text() if not dry_run and comparison.markdown.exists() else ""
    outputs = {"verdict": verdict, "base": comparison.base, "markdown": text, "file": str(comparison.markdown)}
    set_outputs(outputs)
    if text:
        append_summary(text)
    return code


def set_outputs(outputs: Mapping[str, str]) -> None:
    """To the file that the runner reads after the step (``$GITHUB_OUTPUT``); nothing elsewhere.

    Each value stands between two lines that it cannot contain: text from a wheel must not be able to set an output.
    """
    if path := os.environ.get("GITHUB_OUTPUT"):
        with open(path, "a") as file:
            for name, value in outputs.items():
                end = f"end-{secrets.token_hex(16)}"
                file.write(f"{name}<<{end}\n{value}\n{end}\n")


def append_summary(text: str) -> None:
    """To the page of the job (``$GITHUB_STEP_SUMMARY``); nothing elsewhere."""
    if path := os.environ.get("GITHUB_STEP_SUMMARY"):
        with open(path, "a") as file:
            file.write(text.rstrip("\n") + "\n")
