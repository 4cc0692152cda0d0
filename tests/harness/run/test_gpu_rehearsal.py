"""The folder for a machine with a GPU, made and run on the processors with that machine's versions.

    make test-gpu-rehearsal

It needs an environment of 5 GB, which that target makes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
MAKE_FOLDER = ROOT / ".ci" / "gpu_folder.py"
PYTHON = ROOT / ".venvs" / "gpu-rehearsal" / "bin" / "python"
SECONDS = 300
"""For one command. On a busy machine it does not suffice: the same command then goes on."""
MOST_COMMANDS = 4
SLACK = 15.0
"""Seconds in which a busy machine ends what was under way."""
CONTESTANTS = (
    "pytorch-eager",
    "dpcore-engine",
    "opacus-ghost",
    "opacus-hooks",
    "jax-vmap",
    "jax-non-private",
    "backpack-batch-grad",
    "optax-aggregate",
)

pytestmark = pytest.mark.slow
rehearsed = pytest.mark.skipif(not PYTHON.exists(), reason="no environment: make test-gpu-rehearsal makes it")


def make_folder(out: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command behind ``make gpu-folder``."""
    command = [sys.executable, str(MAKE_FOLDER), "--out", str(out), *arguments]
    return subprocess.run(command, capture_output=True, text=True)


def test_a_folder_that_is_too_large_is_refused_and_one_with_other_things_is_left_alone(tmp_path):
    nothing = tmp_path / "requirements.txt"
    nothing.write_text("mdurl==0.1.2\n")
    small = ("--requirements", str(nothing))

    refused = make_folder(tmp_path / "folder", *small, "--limit", "1")
    assert refused.returncode == 2 and "may have 1" in refused.stderr
    assert not (tmp_path / "folder").exists()

    made = make_folder(tmp_path / "folder", *small)
    assert made.returncode == 0 and "MiB" in made.stdout
    assert (tmp_path / "folder" / "packages" / "mdurl" / "__init__.py").exists()
    assert make_folder(tmp_path / "folder", *small).returncode == 0  # its own folder is made anew

    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "thesis.txt").write_text("years of work")
    assert make_folder(mine, *small).returncode == 2
    assert (mine / "thesis.txt").read_text() == "years of work"


@rehearsed
def test_the_run_goes_end_to_end_with_the_versions_of_that_machine(tmp_path):
    made = make_folder(tmp_path / "folder")
    assert made.returncode == 0, made.stderr
    print(made.stdout, flush=True)

    arguments = ["--device", "cpu", "--threads", "1", "--seconds", str(SECONDS), "--rounds", "1"]
    arguments += ["--tasks", "logreg", "--layers", "layer-norm", "--batch-sizes", "16"]
    arguments += ["--frameworks", ",".join(CONTESTANTS)]
    bare = {name: os.environ[name] for name in ("HOME", "PATH", "LANG") if name in os.environ}
    environment = bare | {"PYTHON": str(PYTHON), "OUT": str(tmp_path / "out")}
    for _ in range(MOST_COMMANDS):
        done = subprocess.run(
            [str(tmp_path / "folder" / "run.sh"), *arguments], env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-3000:]
        said = json.loads((tmp_path / "out" / "summary.json").read_text())
        assert said["seconds"]["used"] < SECONDS + SLACK
        if said["complete"]:
            break
    print(done.stdout[-6000:], flush=True)

    assert said["complete"]
    assert not said["not_installed"] and said["synthetic_data"] and said["unpinned"]
    versions = said["versions"]
    assert versions["torch"].startswith("2.11.0") and versions["jax"] == "0.11.2" and versions["numpy"] == "2.5.0"
    assert {row["contestant"]: row["state"] for row in said["gates"]} == dict.fromkeys(CONTESTANTS, "passed")
