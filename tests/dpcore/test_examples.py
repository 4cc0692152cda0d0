"""The tutorials and examples run as a user would run them: short, on synthetic data."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
TUTORIALS = sorted(path for path in (ROOT / "docs" / "tutorials").glob("*.py") if path.stem != "private_lora")
"""Those that need nothing but torch; test_models.py runs the other one."""
EXAMPLES = ("dpcore.examples.imdb_lstm", "dpcore.examples.transformer_lora", "proofs.opacus.accuracy")


def run(*arguments: str) -> str:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, env=environment, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


NOTEBOOK = """
import re, sys
script = sys.argv[1]
sys.argv = ["ipykernel_launcher.py", "-f", "kernel.json"]
for cell in re.split(r"(?m)^(?=# %%)", open(script).read()):
    exec(compile(cell, script, "exec"))
"""
"""Runs a tutorial as a notebook does: cell by cell, with a kernel's arguments and no file of its own."""
CHANCE = {"mnist_cnn": 0.1, "cifar10_cnn": 0.1, "imdb_embedding": 0.5, "imdb_lstm": 0.5}


SHORTER = {"dpcore.examples.transformer_lora": ("--epochs", "1", "--pretraining-steps", "5")}
"""Options of those that otherwise train for half a minute."""
LONG = {"mnist_cnn", "cifar10_cnn", "imdb_lstm", "dpcore.examples.imdb_lstm", "proofs.opacus.accuracy"}
"""A quarter of a minute or more each; the others are made alike."""


@pytest.mark.parametrize(
    "script",
    [pytest.param(p, id=p.stem, marks=[pytest.mark.slow] if p.stem in LONG else []) for p in TUTORIALS],
)
def test_a_tutorial_runs_cell_by_cell_and_ends_with_something_learnt(script: Path) -> None:
    output = run("-c", NOTEBOOK, str(script))
    assert "synthetic data" in output and "epsilon" in output
    if script.stem in CHANCE:
        assert float(re.findall(r"test accuracy ([\d.]+)", output)[-1]) > CHANCE[script.stem] + 0.25


def test_a_tutorial_is_a_script_with_options() -> None:
    output = run(str(ROOT / "docs" / "tutorials" / "imdb_embedding.py"), "--smoke", "--seed", "1", "--epochs", "1")
    assert "epoch 1: epsilon" in output and "epoch 2" not in output


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] if n in LONG else []) for n in EXAMPLES])
def test_an_example_runs(name: str) -> None:
    output = run("-m", name, "--smoke", "--seed", "1", *SHORTER.get(name, ()))
    assert "synthetic data" in output
    assert re.search(r"epsilon \d", output) and re.search(r"accuracy 0\.\d+|accuracy 1\.0", output)


TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")


@pytest.mark.parametrize(
    "command",
    [
        pytest.param(("-m", "dpcore.examples.mnist"), id="mnist"),
        # A minute; the ranks' sums, noise and sampling are tested apart.
        pytest.param((*TORCHRUN, "-m", "dpcore.examples.cifar10_ddp"), id="cifar10_ddp", marks=pytest.mark.slow),
    ],
)
def test_an_example_spends_its_budget_and_learns(command: tuple[str, ...]) -> None:
    output = run(*command, "--smoke", "--seed", "1", "--epsilon", "50")
    epochs = [(float(e), float(a)) for e, a in re.findall(r"epsilon ([\d.]+).*accuracy ([\d.]+)", output)]
    (first, _), (spent, accuracy) = epochs[0], epochs[-1]
    assert "synthetic data" in output
    assert first < spent and 49.5 < spent <= 50.0
    assert accuracy > 0.25  # of ten classes


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(torch.cpu.Stream, "record_event"), reason="fully_shard of torch 2.6 needs a GPU")
def test_a_sharded_example_goes_on_from_its_checkpoint_at_another_number_of_ranks(tmp_path: Path) -> None:
    command = ("-m", "dpcore.examples.llama_fsdp", "--smoke", "--lora", "4")
    kept = ("--checkpoint", str(tmp_path / "llama"))
    made = re.compile(r"^step (\d+): loss [\d.]+ .*epsilon ([\d.]+)", re.MULTILINE)
    first = made.findall(run(*TORCHRUN, *command, "--steps", "2", *kept))
    alone = made.findall(run(*TORCHRUN[:-1], "--nproc-per-node=1", *command, "--steps", "4", *kept))
    assert [step for step, _ in first + alone] == ["1", "2", "3", "4"]
    assert sorted({float(epsilon) for _, epsilon in first + alone}) == [float(e) for _, e in first + alone]
    assert not (tmp_path / "llama.rank1").exists()


@pytest.mark.parametrize(
    ("ranks", "options", "said"),
    [
        ("0", [], "start it with torchrun"),
        ("1", ["--copies", "2"], "--copies is 2; it must divide the number of processes, 1"),
        ("2", ["--width", "100"], "--width is 100; it must be a multiple of four"),
        ("2", ["--steps", "0"], "--steps is 0; it must be 1 or more"),
        ("2", ["--checkpoint", "no-such-folder/llama"], "its folder is not there"),
    ],
)
def test_a_sharded_example_says_what_is_wrong_with_its_options(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], ranks: str, options: list[str], said: str
) -> None:
    from dpcore.examples import llama_fsdp

    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setenv("WORLD_SIZE", ranks)
    monkeypatch.setattr(sys, "argv", ["llama_fsdp", *options])
    with pytest.raises(SystemExit) as stopped:
        llama_fsdp.main()
    assert stopped.value.code == 2 and said in capsys.readouterr().err


def test_the_cases_beside_opacus_come_out_as_the_page_says() -> None:
    """Both libraries' outcomes, by kind: right, WRONG, an error's name, or other words."""
    pytest.importorskip("opacus")
    page = (ROOT / "docs" / "side_by_side.md").read_text()
    output = run("-m", "proofs.opacus.side_by_side")
    expected, now = _outcomes(page), _outcomes(output)
    assert len(now) >= 25
    assert now == expected, "write the page anew: python -m proofs.opacus.side_by_side --write FILE"
    assert not [title for title, (_, ours) in now.items() if ours == "WRONG"]
    assert sum(theirs == "WRONG" for theirs, _ in now.values()) >= 5


def _outcomes(text: str) -> dict[str, tuple[str, str]]:
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    return {title: (_kind(theirs), _kind(ours)) for title, theirs, ours in rows}


def _kind(outcome: str) -> str:
    word = re.match(r"right|WRONG|\w+Error\b", outcome)
    return word.group() if word else "words"
