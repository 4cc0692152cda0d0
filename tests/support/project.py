"""A small git repository of fake contestants, whose commits are slower, fatter, wrong or broken in known ways; and
comparisons between them, in this process."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from harness.compare import sides
from harness.compare.options import ComparisonOptions
from harness.compare.record import Comparison
from harness.compare.run import ComparisonRun
from harness.store.folder import RunFolder
from tests.support.phantom_layer import PHANTOM

SLEEP = "    sleep_seconds = 0.0"
SPARE = "    spare_bytes = 0"
FACTORS = "            factors = np.minimum(1.0, self.setting.max_grad_norm / np.maximum(norms, 1e-30))"
CHANGES = {
    "sleep-3ms": (SLEEP, "    sleep_seconds = 0.003"),
    "sleep-6ms": (SLEEP, "    sleep_seconds = 0.006"),
    # On a busy machine a sleep of 3 ms may well take 5.
    "sleep-15ms": (SLEEP, "    sleep_seconds = 0.015"),
    "buffer": (SPARE, "    spare_bytes = 2**20"),
    "clip-bug": ("np.minimum(1.0, self.setting.max_grad_norm", "np.minimum(2.0, self.setting.max_grad_norm"),
    # Right for the four examples of the check, and for the first eight of any batch.
    "late-clip-bug": (FACTORS, FACTORS + "\n            factors[8:] = 1.0"),
    "crash": ("        self.passes += 1\n", '        self.passes += 1\n        raise RuntimeError("it broke")\n'),
    "syntax": ("class Counters:", "class Counters"),
}


class Project:
    """``commit(changes)`` starts from the plain phantom and makes those of CHANGES; returns the hash."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "frameworks").mkdir(parents=True)
        (folder / "dpcore").mkdir()
        (folder / "dpcore" / "__init__.py").write_text("")
        shutil.copytree(PHANTOM, folder / "frameworks" / "phantom", ignore=shutil.ignore_patterns("__pycache__"))
        self.layers = folder / "frameworks" / "phantom" / "layers.py"
        self.plain = self.layers.read_text()
        (folder / "frameworks" / "phantom" / "requirements.txt").write_text("numpy==2.0.0\nfake-lib==1.0\n")
        self.git("init", "-q", "-b", "main")

    def git(self, *arguments: str) -> str:
        who = ["-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "commit.gpgsign=false"]
        done = subprocess.run(
            ["git", *who, *arguments], cwd=self.folder, check=True, capture_output=True, text=True, env=_plain()
        )
        return done.stdout.strip()

    def write(self, *changes: str) -> None:
        text = self.plain
        for old, new in (CHANGES[name] for name in changes):
            assert old in text
            text = text.replace(old, new)
        self.layers.write_text(text)

    def commit(self, *changes: str, title: str = "a change") -> str:
        self.write(*changes)
        self.git("add", "-A")
        self.git("commit", "-q", "--allow-empty", "-m", title)
        return self.git("rev-parse", "HEAD")

    def compare(self, base: str, head: str, out: Path, **changes: object) -> Comparison:
        run = self.run(base, head, out, **changes)
        from rich.console import Console

        from harness.run.progress import Progress

        with Progress(Console(quiet=True), quiet=True) as progress:
            return run.execute(progress)

    def run(self, base: str, head: str, out: Path, **changes: object) -> ComparisonRun:
        both = sides.resolve("base", base, self.folder), sides.resolve("head", head, self.folder)
        options = ComparisonOptions(**{**PLAIN, **changes})
        return ComparisonRun.connected(options, *both, RunFolder(out), "a test")


PLAIN: dict[str, object] = {
    "layers": ("layer-norm",),
    "frameworks": ("phantom-exact",),
    "batch_sizes": (16,),
    "isolation": "inprocess",
    "seconds": 0.03,
    "threads": 1,
    "max_rounds": 8,
    "threshold": 0.2,  # sleeps are late by up to a millisecond on a busy machine
}


def _plain() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
