"""Paths of this tree. Standard library only."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
"""The folder that holds ``harness/``, ``frameworks/`` and ``dpcore/``; workers import from it. It is a checkout,
or dpbench/ in site-packages where a wheel was installed."""

INSTALLED = not (ROOT / "pyproject.toml").exists()
"""Whether ROOT came with a wheel: nothing is written there, and what only the repository has is refused."""

LOCAL_RESULTS = Path("results/local")
"""Where runs are written unless the user names another folder; relative to the working directory."""
