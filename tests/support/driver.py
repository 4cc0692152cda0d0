"""``dpbench`` with the fakes, in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from harness.store import record
from harness.store.record import Record

DRIVE = Path(__file__).with_name("drive.py")
ROOT = DRIVE.parents[2]
SECONDS = 1800
"""A run of fakes takes much less, on a busy machine too."""


class Driver:
    """Measures variants of a fake into the folder ``out``. ``verb``: what every command begins with."""

    def __init__(self, verb: Sequence[str], cache: Path, out: Path, fake: str = "phantom") -> None:
        self.verb = verb
        self.out = out
        self.fake = fake
        self.environment = {**os.environ, "DPBENCH_CACHE": str(cache), "PYTHONPATH": str(ROOT)}

    def arguments(self, variants: str, *more: str) -> list[str]:
        """Return what follows ``dpbench``. ``variants``: comma-separated."""
        names = ",".join(f"{self.fake}-{v}" for v in variants.split(","))
        return [*self.verb, "--synthetic", "--threads", "1", "--frameworks", names, "--out", str(self.out), *more]

    def command(self, variants: str, *more: str) -> list[str]:
        return [sys.executable, str(DRIVE), *self.arguments(variants, *more)]

    def run(self, variants: str, *more: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.command(variants, *more), env=self.environment, capture_output=True, text=True, timeout=SECONDS
        )

    def start(self, variants: str, *more: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            self.command(variants, *more), env=self.environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )

    def files(self) -> dict[str, str]:
        """Return the text of every record by its name."""
        return {p.name: p.read_text() for p in sorted((self.out / "records").glob("*.json"))}

    def records(self, purpose: str = "time") -> list[Record]:
        found = [record.parse(text, name) for name, text in self.files().items()]
        return [r for r in found if r.purpose == purpose]
