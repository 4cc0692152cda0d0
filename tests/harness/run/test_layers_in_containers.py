"""``dpbench run layers --isolation docker`` on a pretended engine: judged and recorded as the end-to-end run is."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from harness.cli.main import app
from harness.environments.containers import engine, images, lockfile
from harness.environments.containers.backend import ContainerBackend
from harness.errors import BadInput
from harness.plan import layer_registry, registry
from harness.plan import layers as layer_plan
from harness.run.layers import REFERENCE, LayerRun
from harness.run.progress import Progress
from harness.store import record
from harness.store.folder import RunFolder
from harness.store.record import Record
from tests.support import phantom_layer
from tests.support.engines import PretendedEngine


@pytest.fixture
def pretended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reference: Path) -> PretendedEngine:
    """An engine with the images of the phantom, whose tree is a copy with a lock, and of plain PyTorch."""
    folder = tmp_path / "frameworks" / "phantom"
    shutil.copytree(phantom_layer.PHANTOM, folder)
    (folder / "requirements.txt").write_text("numpy==2.0.0\n")
    (folder / "requirements.lock").write_text(f"numpy==2.0.0 --hash=sha256:{'0' * 64}\n")
    monkeypatch.setenv("DPBENCH_FRAMEWORKS", str(folder.parent))
    monkeypatch.setenv("DPBENCH_CACHE", str(tmp_path / "cache"))
    made = PretendedEngine()
    for number, framework in enumerate((registry.load(folder), registry.frameworks()["pytorch"])):
        made.add(images.tag_of(framework), number, lockfile.load(framework).sha256, {"numpy": "2.0.0"})

    def tool(words: list[str]) -> str:
        asked = dict(zip(words[::2], words[1::2], strict=True))
        if "--left" not in asked:
            shutil.copy(reference, Path(asked["--out"]) / f"{asked['--layers']}.npz")
            return ""
        numbers = [int(asked[name]) for name in ("--batch-size", "--seed", "--number")]
        left, bound = Path(asked["--left"]), float(asked["--bound"])
        return json.dumps(phantom_layer.last_pass(asked["--layers"], asked["--passes"], left, *numbers, bound))

    made.tools[REFERENCE] = tool
    monkeypatch.setattr(engine, "connect", lambda: made.on)
    monkeypatch.setattr(
        "harness.environments.containers.executor.Docker._contain", lambda place, *rest: made.contain(place, *rest)
    )
    return made


def measured(out: Path, *variants: str) -> dict[tuple[str, str, str], Record]:
    """The records of a run in containers, by variant, passes and purpose."""
    names = [f"phantom-{variant}" for variant in variants]
    options = layer_plan.preset("smoke", layers=["layer-norm"], frameworks=names, batch_sizes=(32,), most_passes=5)
    options = replace(options, isolation="docker", threads=1, repeats=0)
    backend = ContainerBackend.connected("cpu")
    run = LayerRun(options, layer_registry.select(names), RunFolder(out), "a test", backend)
    with Progress(Console(quiet=True), quiet=True) as progress:
        run.execute(progress)
    found = [record.read(path)[0] for path in sorted((out / "records").glob("*.json"))]
    return {(r.cell.variant, str(r.cell.passes), r.purpose): r for r in found}


def test_layers_are_measured_judged_and_recorded_as_a_whole_run_is(tmp_path: Path, pretended: PretendedEngine) -> None:
    found = measured(tmp_path / "run", "exact", "four-only", "declared")
    phantom = images.tag_of(registry.frameworks()["phantom"])
    for (variant, _, _), one in found.items():
        assert one.cell.isolation == "docker"
        assert one.image is not None and one.image.tag == phantom and one.image.matches_lock
        if variant == "declared":
            assert one.state == "unsupported" and one.container is None
        else:
            assert one.container is not None and one.container.engine == "pretended 1"
    for passes in ("per_sample", "clipped"):
        good, bad = found["exact", passes, "time"], found["four-only", passes, "time"]
        assert good.state == "ok" and good.layer is not None and len(good.layer.pass_seconds) == 5
        assert good.versions == {"numpy": "2.0.0"}
        assert bad.state == "rejected" and str(bad.reason).startswith("last-timed-pass: error ")
        for one in (good, bad):
            assert one.gate is not None and one.gate.passed == (one is good)
            (last,) = [check for check in one.gate.checks if check.check == "last-timed-pass"]
            assert "32 examples of the measured batch" in str(last.detail)
    kinds = [(order["kind"], order.get("worker") or order["module"]) for _, order, _ in pretended.contained]
    assert kinds[0] == ("tool", REFERENCE) and {kind for kind in kinds if kind[0] == "measure"} == {
        ("measure", "harness.worker.layers")
    }
    assert list((tmp_path / "run").rglob("*.last-pass.npz")) == []


def test_a_resumed_run_needs_the_same_images(tmp_path: Path, pretended: PretendedEngine) -> None:
    first = measured(tmp_path / "run", "exact")
    count = len(pretended.contained)
    assert measured(tmp_path / "run", "exact") == first and len(pretended.contained) == count
    framework = registry.frameworks()["phantom"]
    pretended.add(images.tag_of(framework), 7, lockfile.load(framework).sha256)
    with pytest.raises(BadInput, match=r"differs in images\.phantom"):
        measured(tmp_path / "run", "exact")


@pytest.mark.parametrize(
    ("isolation", "message"), [("docker", "No container engine answers"), ("podman", "choose venv, docker, or")]
)
def test_bad_input_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, isolation: str, message: str
) -> None:
    monkeypatch.setenv(engine.HOST, f"unix://{tmp_path}/no.sock")
    chosen: list[Any] = ["--layers", "layer-norm", "--frameworks", "pytorch", "--isolation", isolation]
    done = CliRunner().invoke(app, ["run", "layers", *chosen, "--out", str(tmp_path / "out")])
    assert isinstance(done.exception, BadInput) and message in str(done.exception), done.output
    assert not (tmp_path / "out").exists()
