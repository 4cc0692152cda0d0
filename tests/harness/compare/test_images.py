"""Comparisons in containers of a pretended engine: two images of one code, two states of the code in their locked
images."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from harness.cli.main import app
from harness.compare import record as compare_record
from harness.compare import report as compare_report
from harness.compare import sides
from harness.environments.containers import engine, images
from harness.errors import BadInput
from harness.gate import admission
from harness.plan import registry
from harness.store.record import Gate
from tests.support.engines import PretendedEngine
from tests.support.project import Project

pytestmark = pytest.mark.usefixtures("apart")


@pytest.fixture
def pretended(monkeypatch: pytest.MonkeyPatch) -> PretendedEngine:
    made = PretendedEngine()
    monkeypatch.setattr(engine, "connect", lambda: made.on)
    monkeypatch.setattr(
        "harness.environments.containers.executor.Docker._contain", lambda place, *rest: made.contain(place, *rest)
    )
    return made


@pytest.fixture
def project(tmp_path: Path) -> Project:
    made = Project(tmp_path / "project")
    folder = made.layers.parent
    (folder / "requirements.txt").write_text("numpy==2.0.0\n")
    (folder / "requirements.lock").write_text(f"numpy==2.0.0 --hash=sha256:{'0' * 64}\n")
    made.commit("sleep-3ms", title="plain")
    return made


def locked(project: Project) -> tuple[str, str]:
    """(tag, lock) that the tree's framework asks for."""
    from harness.environments.containers import lockfile

    framework = registry.load(project.layers.parent)
    return images.tag_of(framework), lockfile.load(framework).sha256


def test_one_code_in_two_images(project, tmp_path, pretended):
    was = pretended.add("fake:was", 1, versions={"python": "3.11.2", "numpy": "2.0.0", "gone": "1"})
    now = pretended.add("fake:now", 2, locked(project)[1], versions={"python": "3.11.2", "numpy": "2.1.0"})
    comparison = project.compare("image:fake:was", f"image:{now}", tmp_path / "out", isolation="docker")
    (cell,) = comparison.cells
    assert cell.alerts == [] and cell.time.n >= 5 and comparison.exit_code == 0
    assert {digest for digest, _, _ in pretended.contained} == {was, now}
    found = compare_record.read(tmp_path / "out" / "comparison.json")
    base, head = found.base.images["phantom"], found.head.images["phantom"]
    assert (base.tag, base.digest, base.matches_lock) == ("fake:was", was, False)
    assert (head.digest, head.matches_lock) == (now, True)
    assert (found.base.locks, found.head.locks) == ({"phantom": "pins-1"}, {"phantom": "pins-2"})
    assert found.base.content == found.head.content and found.engine == "pretended 1"
    containers = [process.container for pair in found.cells[0].pairs for process in (pair.base, pair.head)]
    assert all(c is not None and c.exit_code == 0 and c.engine == "pretended 1" for c in containers)
    text = compare_report.markdown(found)
    assert "gone 1 → none, numpy 2.0.0 → 2.1.0." in text and "python 3.11.2" not in text
    assert "not what the tree's lock describes) → (000000000000, lock" in text and "on the same base" in text
    assert "The code is the same on both sides" in text and "fresh containers" in text


def test_a_resumed_comparison_needs_the_same_images(project, tmp_path, pretended):
    for number, name in enumerate(("fake:was", "fake:now")):
        pretended.add(name, number)
    both = "image:fake:was", "image:fake:now"
    first = project.compare(*both, tmp_path / "out", isolation="docker")
    count = len(pretended.contained)
    assert project.compare(*both, tmp_path / "out", isolation="docker").cells == first.cells
    assert len(pretended.contained) == count
    pretended.add("fake:now", 7)
    with pytest.raises(BadInput, match=r"differs in images\.head\.phantom"):
        project.compare(*both, tmp_path / "out", isolation="docker")


def test_two_states_run_with_the_code_of_their_own(project, tmp_path, pretended):
    tag, lock = locked(project)
    digest = pretended.add(tag, 3, lock)
    project.commit("sleep-15ms")
    comparison = project.compare("HEAD~1", "HEAD", tmp_path / "out", isolation="docker")
    assert comparison.cells[0].alerts == ["time"] and comparison.exit_code == 1
    both = [sides.resolve(role, ref, project.folder) for role, ref in (("base", "HEAD~1"), ("head", "HEAD"))]
    mounted = {outside["/dpbench/code/frameworks"] for _, _, outside in pretended.contained}
    assert mounted == {str(side.folder / "frameworks") for side in both}
    for _, order, outside in pretended.contained:
        assert json.loads(order["request"])["folder"] == "/dpbench/code/frameworks/phantom"
        assert outside["/dpbench/code/harness"] == outside["/dpbench/code/frameworks"].replace("frameworks", "harness")
    assert comparison.base.images["phantom"].digest == comparison.head.images["phantom"].digest == digest
    assert comparison.base.images["phantom"].matches_lock
    assert "both sides in one image" in compare_report.markdown(comparison)


def test_a_task_asks_for_its_gate_before_its_containers(project, tmp_path, pretended, monkeypatch):
    asked: list[Any] = []

    def judge(contestant: Any, task: str, executor: Any, *rest: Any) -> admission.Verdict:
        asked.append((task, executor.identity))
        return admission.Verdict("ok", None, Gate(passed=True, key="k", checks=[]), {})

    monkeypatch.setattr("harness.compare.run.admission.judge", judge)
    digests = [pretended.add(f"fake:{number}", number) for number in (1, 2)]
    chosen: dict[str, Any] = {"layers": (), "tasks": ("logreg",), "frameworks": ("phantom-noop",), "synthetic": True}
    comparison = project.compare(
        "image:fake:1", "image:fake:2", tmp_path / "out", isolation="docker", **chosen, max_rounds=5, batch_sizes=(64,)
    )
    assert asked == [("logreg", digests[0]), ("logreg", digests[1])]
    assert comparison.cells[0].time.n == 5 and comparison.cells[0].name == "logreg/phantom-noop/64"
    assert {order["worker"] for _, order, _ in pretended.contained} == {"harness.worker.e2e"}


def test_a_state_whose_image_is_of_another_lock_is_refused(project, tmp_path, pretended):
    pretended.add(locked(project)[0], 3, "f" * 64)
    with pytest.raises(BadInput, match=r"built from another lock.*name it as a side \(image:TAG\)"):
        project.compare("main", ".", tmp_path / "out", isolation="docker")


@pytest.mark.parametrize(
    ("base", "arguments", "message"),
    [
        ("image:fake:there", [], "--frameworks is missing"),
        ("image:fake:there", ["--isolation", "venv"], "--isolation is 'venv', but --base is an image"),
        (
            "image:fake:gone",
            [],
            "--base is 'image:fake:gone', which unix:///pretended.sock does not have",
        ),
        ("image:python:3.11", [], "it lacks the label of a lock"),
        ("numpy==2.2.0", ["--isolation", "docker"], "--base is 'numpy==2.2.0', which has no lock"),
    ],
)
def test_bad_input_is_one_sentence(project, tmp_path, pretended, base, arguments, message):
    pretended.add("fake:there", 1)
    pretended.add("python:3.11", 2)
    pretended.images["python:3.11"].labels.clear()
    chosen = [] if "missing" in message else ["--frameworks", "phantom-exact", "--layers", "layer-norm"]
    where = ["--repository", str(project.folder), "--out", str(tmp_path / "out")]
    head = base if base.startswith("image:") else "."
    done = CliRunner().invoke(app, ["compare", "--base", base, "--head", head, *chosen, *arguments, *where])
    assert isinstance(done.exception, BadInput) and message in str(done.exception), done.output
    assert not pretended.contained


@pytest.mark.parametrize("base", ["main", "image:fake"])
def test_without_an_engine_there_is_one_sentence(project, tmp_path, monkeypatch, base):
    monkeypatch.setenv(engine.HOST, f"unix://{tmp_path}/no.sock")
    chosen = ["--layers", "layer-norm", "--frameworks", "phantom-exact", "--isolation", "docker"]
    where = ["--repository", str(project.folder), "--out", str(tmp_path / "out")]
    done = CliRunner().invoke(app, ["compare", "--base", base, "--head", ".", *chosen, *where])
    assert isinstance(done.exception, BadInput) and "No container engine answers" in str(done.exception)
