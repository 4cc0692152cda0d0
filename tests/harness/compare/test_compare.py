"""Comparisons between commits of fake contestants: what is proven, what is not, and what a killed one leaves."""

from __future__ import annotations

import io
import json
import math
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from harness.analysis import naming
from harness.analysis.sequential import Rule
from harness.cli import main as cli
from harness.cli.main import app
from harness.compare import bisection, sides
from harness.compare import record as compare_record
from harness.compare import report as compare_report
from harness.compare.cells import first_of
from harness.compare.record import MemoryPair, Pair, Process
from harness.compare.workers import Workers
from harness.environments.unavailable import Unavailable
from harness.errors import BadInput
from harness.gate import admission
from harness.plan import registry
from harness.store.record import Gate, GateCheck, Load

pytestmark = pytest.mark.usefixtures("apart")


def test_a_slower_head_is_slower(project, tmp_path):
    base = project.git("rev-parse", "HEAD")
    project.commit("sleep-6ms")
    comparison = project.compare(base, "main", tmp_path / "out")
    (cell,) = comparison.cells
    assert (cell.name, cell.verdict, cell.alerts) == ("layer-norm/phantom-exact/clipped/16", "slower", ["time"])
    assert 1.4 < cell.time.ratio < 4.0 and cell.time.low > 1.0
    assert cell.time.n < 8 and cell.time.stop.startswith("clear")  # it stopped early
    assert cell.gate == {"base": "passed", "head": "passed"}
    assert cell.memory.change == "same" and cell.memory.exact
    assert comparison.exit_code == 1
    assert comparison.base.commit == base and not comparison.base.dirty
    back = project.compare("main", base, tmp_path / "back")
    assert back.cells[0].verdict == "faster" and back.exit_code == 0


def test_equal_sides_are_no_finding_and_share_a_folder(project, tmp_path):
    comparison = project.compare("main", ".", tmp_path / "out")
    assert comparison.base.content == comparison.head.content
    # A tiny difference may be found by chance (5 %); an alert may not.
    assert comparison.cells[0].alerts == [] and comparison.cells[0].time.within_threshold and comparison.exit_code == 0
    stored = compare_record.read(tmp_path / "out" / "comparison.json")
    assert stored == comparison
    for pair in stored.cells[0].pairs:
        assert pair.base.seconds > 0.003 and pair.head.passes >= 5
    firsts = [pair.order[0] for pair in stored.cells[0].pairs]
    assert {"base", "head"} == set(firsts)


def test_grown_memory_is_proven_by_a_second_process_and_shrunk_memory_is_told(project, tmp_path):
    project.commit("sleep-3ms", "buffer")
    comparison = project.compare("HEAD~1", "HEAD", tmp_path / "out")
    (cell,) = comparison.cells
    assert cell.alerts == ["memory"] and comparison.exit_code == 1
    assert cell.memory.head - cell.memory.base == 2**20
    assert cell.memory.proven and len(cell.memory_processes.head) == 2
    back = project.compare("HEAD", "HEAD~1", tmp_path / "back")
    assert back.cells[0].memory.change == "shrunk" and back.exit_code == 0
    assert "−1.00 MiB" in compare_report.markdown(back)


def test_grown_memory_is_an_alert_without_any_clock(project, tmp_path):
    project.commit("sleep-3ms", "buffer")
    comparison = project.compare("HEAD~1", "HEAD", tmp_path / "out", first_alert=True)
    (cell,) = comparison.cells
    assert (cell.alerts, cell.pairs, cell.memory.proven, comparison.exit_code) == (["memory"], [], True, 1)
    assert cell.reason == "no pair was timed" and "no pair was timed" in compare_report.markdown(comparison)


def test_a_gate_that_only_head_fails_is_wrong_and_said_first(project, tmp_path):
    project.commit("clip-bug")
    comparison = project.compare("HEAD~1", "HEAD", tmp_path / "out")
    (cell,) = comparison.cells
    assert (cell.verdict, cell.alerts, comparison.exit_code) == ("wrong", ["gate"], 1)
    assert cell.time is None and cell.gate["head"].startswith("failed: clipped-sum")
    text = compare_report.markdown(comparison).splitlines()
    assert text[0].startswith("**A regression of") and "is wrong" in text[0]
    repaired = project.compare("HEAD", "HEAD~1", tmp_path / "back")
    assert repaired.cells[0].verdict == "repaired" and repaired.exit_code == 0


def test_a_fault_beyond_the_checked_examples_is_seen_on_the_measured_batch(project, tmp_path):
    project.commit("sleep-3ms", "late-clip-bug")
    comparison = project.compare("HEAD~1", "HEAD", tmp_path / "out")
    (cell,) = comparison.cells
    assert cell.gate == {"base": "passed", "head": "passed"}, "the check has four examples"
    assert (cell.verdict, cell.alerts, comparison.exit_code) == ("wrong", ["gate"], 1)
    assert "gradients of a batch of the measured size differ" in cell.reason and len(cell.pairs) == 1
    assert cell.pairs[0].differs and cell.pairs[0].apart > 1e-3 > cell.pairs[0].limit
    assert "base and head do not compute the same" in compare_report.markdown(comparison)
    equal = project.compare("HEAD", "HEAD", tmp_path / "equal")
    assert all(pair.apart == 0.0 for pair in equal.cells[0].pairs)


def test_a_corrupt_pair_is_named_and_an_interrupted_one_is_made_again(project, tmp_path):
    chosen: dict[str, Any] = {"max_rounds": 5, "memory": False}
    project.compare("main", ".", tmp_path / "out", **chosen)
    stored = tmp_path / "out" / "records" / "layer-norm.phantom-exact.clipped.16.000.json"
    whole = json.loads(stored.read_text())
    for content in (b"{", b"[]", b"\xff", b"[" * 100_000):
        stored.write_bytes(content)
        with pytest.raises(BadInput, match=r"000\.json is corrupt"):
            project.compare("main", ".", tmp_path / "out", **chosen)
    whole["head"] |= {"state": "crashed", "reason": "the worker was killed by SIGKILL", "interrupted": True}
    stored.write_text(json.dumps(whole))
    (cell,) = project.compare("main", ".", tmp_path / "out", **chosen).cells
    assert cell.pairs[0].head.state == "ok" and len(cell.pairs) == 5


@pytest.mark.parametrize("fault", ["crash", "syntax"])
@pytest.mark.parametrize("side", ["base", "head"])
def test_a_crash_on_one_side_is_no_verdict(project, tmp_path, fault, side):
    project.commit(fault)
    refs = ("HEAD~1", "HEAD") if side == "head" else ("HEAD", "HEAD~1")
    comparison = project.compare(*refs, tmp_path / "out")
    assert comparison.cells[0].verdict == "failed" and comparison.exit_code == 3
    assert f"{side} did not run: crashed" in comparison.cells[0].reason
    assert len(comparison.cells[0].pairs) == 1


def test_a_side_that_cannot_be_installed_fails_at_once(project, tmp_path, monkeypatch):
    def refuse(backend: Any, contestant: Any, *rest: Any) -> Unavailable:
        installed.append(contestant.framework.folder)
        return Unavailable("not installable here: there is no such version")

    installed: list[Path] = []
    monkeypatch.setattr("harness.environments.in_process.InProcessBackend.executor", refuse)
    comparison = project.compare("HEAD", ".", tmp_path / "out")
    (cell,) = comparison.cells
    assert (cell.verdict, cell.pairs, cell.memory_processes, comparison.exit_code) == ("failed", [], None, 3)
    assert cell.reason == "base cannot run: not installable here: there is no such version"
    assert len(installed) == 1


def test_a_contestant_that_one_side_lacks_is_not_compared(project, tmp_path):
    toml = project.layers.with_name("layers.toml")
    toml.write_text(toml.read_text() + '[[variants]]\nname = "new"\ntitle = "t"\ncolumn = "dp"\npasses = ["clipped"]\n')
    project.commit("sleep-3ms")
    comparison = project.compare("HEAD~1", "HEAD", tmp_path / "out", frameworks=("phantom-new", "phantom-exact"))
    assert comparison.cells[0].verdict == "not compared" and comparison.cells[1].time.n >= 5
    assert comparison.cells[0].reason.startswith(
        "base has no such contestant: There is no layer contestant 'phantom-new'"
    )
    assert comparison.timed_cells == 1 and comparison.exit_code == 0
    assert compare_report.summary(comparison).endswith("; 1 cell not compared.")
    alone = project.compare("HEAD~1", "HEAD", tmp_path / "alone", frameworks=("phantom-new",))
    assert alone.exit_code == 3  # nothing was compared
    lost = project.compare("HEAD", "HEAD~1", tmp_path / "lost", frameworks=("phantom-new", "phantom-exact"))
    assert lost.cells[0].verdict == "failed" and lost.cells[1].is_compared
    assert lost.cells[0].reason.startswith("head has no such contestant: There is no") and lost.exit_code == 3


def test_a_head_whose_description_cannot_be_read_fails_in_its_own_words(project, tmp_path):
    project.layers.with_name("framework.toml").write_text("name = ")
    project.commit("sleep-3ms")
    comparison = project.compare("HEAD~1", "HEAD", tmp_path / "out")
    assert comparison.cells[0].verdict == "failed" and comparison.exit_code == 3
    assert (
        "head has no such contestant" in comparison.cells[0].reason and "cannot be read" in comparison.cells[0].reason
    )


def test_a_pass_that_head_no_longer_has_is_a_failure(project, tmp_path):
    toml = project.layers.with_name("layers.toml")
    plain = toml.read_text()
    toml.write_text(plain.replace(', "clipped"', ""))
    assert toml.read_text() != plain
    project.commit("sleep-3ms")
    comparison = project.compare("HEAD~1", "HEAD", tmp_path / "out")
    assert comparison.cells[0].verdict == "failed" and "not with this layer and pass" in comparison.cells[0].reason


def test_a_killed_comparison_goes_on_from_its_pairs(project, tmp_path, monkeypatch):
    project.commit("sleep-6ms")
    out = tmp_path / "out"
    measured: list[tuple[str, int]] = []
    real = Workers.one

    def process(self: Any, paired: Any, role: str, purpose: str, number: int, progress: Any) -> Process:
        measured.append((purpose, number))
        if len(measured) == 6:  # in the middle of the second pair
            raise KeyboardInterrupt
        return real(self, paired, role, purpose, number, progress)

    monkeypatch.setattr(Workers, "one", process)
    with pytest.raises(KeyboardInterrupt):
        project.compare("HEAD~1", "HEAD", out)
    kept = {path.name: path.read_bytes() for path in (out / "records").iterdir()}
    assert sorted(name.split(".")[-2] for name in kept) == ["000", "memory"]  # nothing of one side only
    comparison = project.compare("HEAD~1", "HEAD", out)
    assert measured[6:8] == [("time", 1), ("time", 1)]
    assert {name: (out / "records" / name).read_bytes() for name in kept} == kept
    assert comparison.cells[0].alerts == ["time"]
    again = len(measured)
    assert project.compare("HEAD~1", "HEAD", out).cells == comparison.cells
    assert len(measured) == again  # a finished one measures nothing
    with pytest.raises(BadInput, match="differs in"):
        project.compare("HEAD", "HEAD~1", out)


def test_when_the_time_is_up_what_is_open_is_ambiguous(project, tmp_path):
    comparison = project.compare("main", ".", tmp_path / "out", minutes=1e-6)
    assert not comparison.finished and comparison.exit_code == 3
    assert comparison.cells[0].verdict == "ambiguous"
    assert compare_report.summary(comparison).startswith("Nothing could be compared: ")
    assert "The time was up" in compare_report.markdown(comparison)


def test_the_minutes_begin_after_the_installations(project, tmp_path, monkeypatch):
    run = project.run("main", ".", tmp_path / "out")
    clock = [0.0]
    monkeypatch.setattr("harness.compare.run.time", SimpleNamespace(monotonic=lambda: clock[0]))
    monkeypatch.setattr(type(run), "_prepare", lambda self, log: clock.__setitem__(0, 3600.0))
    begun: list[float] = []
    monkeypatch.setattr(type(run), "_open", lambda self, paired, progress: None)
    monkeypatch.setattr(type(run), "_run_pairs", lambda self, start, progress: begun.append(start) or True)
    project.compare("main", ".", tmp_path / "out")
    assert begun == [3600.0]


def test_the_order_within_pairs_is_random_and_balanced():
    orders = [first_of(0, "cell", number)[0] for number in range(40)]
    assert orders.count("base") == 20
    assert all({orders[i], orders[i + 1]} == {"base", "head"} for i in range(0, 40, 2))
    assert len({tuple(orders[i : i + 2]) for i in range(0, 40, 2)}) == 2


# ---- conclusions of pairs that were made up


def pair(number: int, ratio: float, shares: tuple[float, float] = (0.0, 0.0), **head: Any) -> Pair:
    """``shares``: of the processors that others took beside base and beside head."""
    base_load, load = (Load(foreign_share=share, disturbed=share > 0.05, repeats=0) for share in shares)
    base = Process(state="ok", seconds=1.0, load=base_load)
    return Pair(
        number=number,
        order=("base", "head"),
        base=base,
        head=Process.model_validate({"state": "ok", "seconds": ratio, "load": load, **head}),
    )


def conclusion(pairs: list[Pair], memory: MemoryPair | None = None) -> compare_record.CellResult:
    return compare_record.conclude("cell", "layer", pairs, memory, None, None, Rule(rounds=8))


def test_uneven_pairs_are_set_aside_whole_until_there_are_too_many():
    calm = [pair(i, 1.0 + 0.001 * (i % 2)) for i in range(6)]
    wild = [pair(6, 3.0, (0.0, 0.7)), pair(7, 0.3, (0.7, 0.0))]
    found = conclusion([wild[0], *calm, wild[1]])
    assert (found.verdict, found.time.n, found.time.set_aside, found.time.disturbed_counted) == ("equivalent", 6, 2, 0)
    always = conclusion([pair(i, 1.0, (0.0, 0.7)) for i in range(9)])
    assert (always.time.n, always.time.set_aside, always.time.disturbed_counted) == (5, 4, 5)
    assert always.verdict == "equivalent"


def test_pairs_beside_equal_load_count_and_are_told():
    busy = conclusion([pair(i, 1.0 + 0.001 * (i % 2), (0.6, 0.62)) for i in range(5)])
    assert (busy.verdict, busy.time.n, busy.time.set_aside, busy.time.disturbed_counted) == ("equivalent", 5, 0, 5)


@pytest.mark.parametrize(("shares", "uneven"), [((0.0, 0.08), False), ((0.0, 0.12), True), ((0.66, 0.76), True)])
def test_what_counts_is_what_others_left_of_the_processors(shares, uneven):
    assert pair(0, 1.0, shares).is_uneven is uneven
    assert pair(0, 1.0, shares[::-1]).is_uneven is uneven


def test_a_change_of_the_machines_own_speed_sets_a_pair_aside():
    slow = Load(foreign_share=0.0, disturbed=True, repeats=0, canary_before=0.01, canary_after=0.02)
    assert pair(0, 1.0, load=slow).is_uneven and not pair(0, 1.0).is_uneven


def test_a_small_growth_is_none_and_an_unconfirmed_one_is_no_alert():
    def of(base: list[int], head: list[int]) -> compare_record.Memory:
        made = {role: [Process(state="ok", bytes=b) for b in sizes] for role, sizes in (("base", base), ("head", head))}
        found = compare_record.memory_of(MemoryPair(**made), exact=True)
        assert found is not None
        return found

    mebibyte = 2**20
    assert of([mebibyte], [mebibyte + 64 * 2**10]).change == "same"
    assert of([mebibyte], [mebibyte + 64 * 2**10 + 1]).change == "grown"
    assert not of([mebibyte], [2 * mebibyte]).proven
    assert of([mebibyte] * 2, [2 * mebibyte] * 2).proven
    assert of([mebibyte] * 2, [2 * mebibyte, mebibyte]).change == "same"
    assert of([1000 * mebibyte], [1004 * mebibyte]).change == "same"  # 0.5 %
    grown = MemoryPair(base=[Process(state="ok", bytes=mebibyte)], head=[Process(state="ok", bytes=2 * mebibyte)])
    assert compare_record.needs_second(grown)
    assert conclusion([pair(i, 1.0) for i in range(5)], grown).alerts == []


def comparison_of(*cells: compare_record.CellResult) -> compare_record.Comparison:
    side = compare_record.SideFacts(
        asked=".", title="", commit=None, dirty=None, content="", package=None, locks={}, versions={}
    )
    facts = {"base": side, "head": side, "alpha": 0.05, "threshold": 0.05, "max_rounds": 8, "timed_cells": len(cells)}
    how = {"isolation": "venv", "threads": 1, "seconds": 0.5, "machine": {}, "minutes": 1.0, "finished": True}
    return compare_record.Comparison.model_validate({"started": "", "command": "", **facts, **how, "cells": cells})


@pytest.mark.parametrize("first", [[], [2**21]])
def test_a_memory_process_that_died_is_no_equal_memory(first):
    dead = Process(state="oom", reason="it asked for 4 GiB")
    head = [*(Process(state="ok", bytes=size) for size in first), dead]
    memory = MemoryPair(base=[Process(state="ok", bytes=2**20)] * len(head), head=head)
    equal = conclusion([pair(i, 1.0) for i in range(5)], memory)
    assert (equal.verdict, equal.alerts) == ("equivalent", [])
    assert equal.reason == "memory was not compared: head oom: it asked for 4 GiB"
    assert comparison_of(equal).exit_code == 3
    assert "the memory of 1 cell was not compared" in compare_report.summary(comparison_of(equal))
    slower = conclusion([pair(i, 1.5 + 0.001 * i) for i in range(5)], memory)
    assert slower.alerts == ["time"] and comparison_of(slower).exit_code == 1
    whole = MemoryPair(base=memory.base, head=memory.base)
    assert comparison_of(conclusion([pair(i, 1.0) for i in range(5)], whole)).exit_code == 0
    # A search for grown memory must not take it for good; one for a slowdown may.
    assert bisection.opinion_of(equal, frozenset({"memory"}))[0] == "ambiguous"
    assert bisection.opinion_of(equal, frozenset({"time"}))[0] == "good"


def test_too_few_pairs_for_an_interval_are_no_comparison():
    few = conclusion([pair(0, 1.0), pair(1, 1.1)])
    assert few.verdict == "ambiguous" and comparison_of(few).exit_code == 3
    noisy = conclusion([pair(i, (1.5, 0.6)[i % 2]) for i in range(8)])
    assert noisy.verdict == "ambiguous" and comparison_of(noisy).exit_code == 0


def test_the_resident_set_of_a_task_is_shown_and_never_judged():
    made = MemoryPair(base=[Process(state="ok", bytes=10**6)], head=[Process(state="ok", bytes=10**9)])
    found = compare_record.memory_of(made, exact=False)
    assert found.change == "not judged" and not found.proven


def test_a_wrong_cell_keeps_its_alert_beside_cells_that_did_not_run():
    broken = conclusion([pair(0, 1.0, state="crashed", seconds=None, reason="no")])
    assert broken.verdict == "failed"
    checks = [{"check": "clipped-sum", "error": 0.3, "limit": 1e-4, "passed": False}]
    wrong = conclusion([pair(0, 1.0, state="rejected", seconds=None, checks=checks)])
    assert wrong.verdict == "wrong" and "clipped-sum: error 0.3, limit 0.0001" in wrong.reason


# ---- sides


def test_the_working_tree_is_taken_as_it_is(project):
    before = sides.resolve("head", ".", project.folder)
    project.write("sleep-6ms")
    after = sides.resolve("head", "WORKTREE", project.folder)
    assert (before.dirty, after.dirty) == (False, True)
    assert before.content != after.content and len(before.content) == len(after.content)
    assert "0.006" in (after.folder / "frameworks" / "phantom" / "layers.py").read_text()
    assert (after.folder / "harness" / "worker" / "layers.py").exists()  # the running harness, on both sides
    assert sides.resolve("base", "main", project.folder).content == before.content


def test_a_version_replaces_every_pin_of_the_package_and_nothing_else(project):
    requirements = Path("frameworks") / "phantom" / "requirements.txt"
    side = sides.resolve("head", "Fake_Lib==2.1", project.folder)
    assert (side.folder / requirements).read_text() == "numpy==2.0.0\nFake_Lib==2.1\n"
    assert side.users == ("phantom",) and side.package == "Fake_Lib==2.1"
    plain = sides.resolve("base", ".", project.folder)
    files = {
        path.relative_to(s.folder)
        for s in (side, plain)
        for path in s.folder.rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    }
    differing = [f for f in files if (side.folder / f).read_bytes() != (plain.folder / f).read_bytes()]
    assert differing == [requirements]


def test_a_wheel_is_pinned_by_its_content(project, tmp_path):
    wheel = tmp_path / "fake_lib-3.0-py3-none-any.whl"
    wheel.write_bytes(b"one")
    first = sides.resolve("head", str(wheel), project.folder)
    wheel.write_bytes(b"two")
    second = sides.resolve("head", str(wheel), project.folder)
    assert first.package.startswith("fake-lib @ file://") and first.package != second.package


def test_two_builds_of_a_private_framework_are_two_sides(project, tmp_path, monkeypatch):
    private = tmp_path / "elsewhere" / "mine"
    shutil.copytree(project.folder / "frameworks" / "phantom", private)
    (private / "requirements.txt").write_text("numpy==2.0.0\nmy-lib==1.0\n")
    monkeypatch.setenv("DPBENCH_FRAMEWORKS", str(private.parent))
    builds = [tmp_path / day / "my_lib-1.0-py3-none-any.whl" for day in ("monday", "tuesday")]
    for build in builds:
        build.parent.mkdir()
        build.write_bytes(build.parent.name.encode())
    old, new = (sides.resolve("head", str(build), project.folder) for build in builds)
    assert old.users == new.users == ("mine",) and old.content != new.content
    assert "monday" in (old.folder / "frameworks" / "mine" / "requirements.txt").read_text()
    # Beside a state of the repository it stands as it is.
    plain = sides.resolve("base", ".", project.folder)
    assert (plain.folder / "frameworks" / "mine" / "requirements.txt").read_text() == "numpy==2.0.0\nmy-lib==1.0\n"


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ("nowhere", "'nowhere', which is no commit, branch or tag"),
        ("-x", "which is no commit"),
        ("absent==1.0", "no framework's requirements pin absent"),
        ("gone-1.0-py3-none-any.whl", "there is no such file"),
        ("image:", "which names no image"),
        ("before", "a commit without a folder frameworks/"),
    ],
)
def test_bad_sides_are_one_sentence(project, asked, message):
    if asked == "before":
        project.git("checkout", "-q", "--orphan", "before")
        project.git("rm", "-rq", "--cached", "frameworks")
        project.git("commit", "-q", "-m", "older than the frameworks")
    with pytest.raises(BadInput, match=message):
        sides.resolve("head", asked, project.folder)


# ---- the verb


def dpbench(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["compare", *arguments])


def test_the_verb_writes_json_and_markdown_and_ends_with_the_verdict(project, tmp_path):
    project.commit("sleep-6ms")
    comment = tmp_path / "deep" / "comment.md"
    arguments = ["--base", "HEAD~1", "--head", "HEAD", "--repository", str(project.folder), "--layers", "layer-norm"]
    arguments += ["--frameworks", "phantom-exact", "--isolation", "inprocess", "--seconds", "0.03", "--threads", "1"]
    arguments += ["--threshold", "0.2", "--max-rounds", "8", "--out", str(tmp_path / "out"), "--json"]
    done = dpbench(*arguments, "--markdown", str(comment))
    assert done.exit_code == 1, done.output
    said = json.loads(done.stdout)
    assert said["cells"][0]["alerts"] == ["time"]
    assert said == json.loads((tmp_path / "out" / "comparison.json").read_text())
    text = comment.read_text()
    assert text == (tmp_path / "out" / "comparison.md").read_text()
    assert text.startswith("**A regression of") and "| `layer-norm/phantom-exact/clipped/64` |" in text
    assert "could not have been seen" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "either two contestants"),
        (["--base", "."], "not a part of each"),
        (["a", "b", "--base", ".", "--head", "."], "not a part of each"),
        (["--threshold", "0"], "--threshold is 0.0"),
        (["--alpha", "0.5"], "--alpha is 0.5: it is a chance above 0 and below 0.5"),
        (["--max-rounds", "3"], "--max-rounds is 3"),
        (["--isolation", "podman"], "--isolation is 'podman'"),
        (["--minutes", "0"], "--minutes is 0.0"),
        (["--layers", "conv9d"], "There is no layer 'conv9d'"),
        (["--tasks", "mnist"], "There is no task 'mnist'"),
        (["--passes", "backward"], "--passes is 'backward'"),
        (["--frameworks", "nobody"], "There is no layer contestant 'nobody'"),
        (["--batch-sizes", "many"], "--batch-sizes is 'many'"),
    ],
)
def test_bad_input_is_one_sentence(project, tmp_path, arguments, message):
    both = [] if "either" in message or "part" in message else ["--base", "main", "--head", "."]
    done = dpbench(*both, *arguments, "--repository", str(project.folder), "--out", str(tmp_path / "out"))
    assert isinstance(done.exception, BadInput)
    assert message in str(done.exception)


def test_a_reader_who_left_before_the_verdict_is_no_success(monkeypatch):
    def leave() -> None:
        raise BrokenPipeError

    monkeypatch.setattr(cli, "app", leave)
    monkeypatch.setattr("sys.stderr", io.StringIO())
    with pytest.raises(SystemExit) as left:
        cli.main()
    assert left.value.code == 141


def test_figures_are_readable():
    assert naming.duration(0.00213) == "2.13 ms" and naming.duration(3.2e-6) == "3.20 µs"
    assert naming.size(3 * 2**20) == "3.00 MiB" and naming.size(-2048) == "−2.00 KiB"
    assert compare_report.signed(0.95) == "−5.0 %" and compare_report.signed(1.1) == "+10.0 %"
    assert math.isclose(pair(0, 1.5).log_ratio, math.log(1.5))


# ---- tasks


def test_a_task_is_judged_by_its_gate_before_it_is_timed(project, tmp_path, monkeypatch):
    adapter = project.layers.with_name("adapter.py")
    plain = adapter.read_text()
    adapter.write_text(plain.replace("time.sleep(0.01)", "time.sleep(0.02)"))
    project.commit("sleep-3ms")
    asked: list[str] = []
    passes = {"base": True, "head": True}

    def judge(contestant: Any, task: str, *rest: Any) -> admission.Verdict:
        role = "base" if "sleep(0.02)" not in (contestant.framework.folder / "adapter.py").read_text() else "head"
        asked.append(role)
        assert rest[1].timeout_seconds == 123.0, "a hanging gate ends by the run's own limit"
        check = GateCheck(check="update", error=0.5, limit=0.1, passed=passes[role])
        return admission.Verdict("ok", None, Gate(passed=passes[role], key="k", checks=[check]), {})

    monkeypatch.setattr("harness.compare.run.admission.judge", judge)
    chosen: dict[str, Any] = {"layers": (), "tasks": ("logreg",), "frameworks": ("phantom-sleeper",), "synthetic": True}
    chosen["timeout_seconds"] = 123.0
    comparison = project.compare("HEAD~1", "HEAD", tmp_path / "out", **chosen, batch_sizes=(64,))
    (cell,) = comparison.cells
    assert asked == ["base", "head"]
    assert (cell.name, cell.verdict, cell.alerts) == ("logreg/phantom-sleeper/64", "slower", ["time"]), cell.reason
    assert cell.memory is None or cell.memory.change == "not judged"
    assert cell.weights is not None and cell.weights.apart == 0.0 and not cell.weights.differs
    adapter.write_text(plain.replace("value += 1e-3", "value += 1.1e-3"))
    project.commit("sleep-3ms", title="a larger update, which the gate lets in here")
    other = project.compare("HEAD~1", "HEAD", tmp_path / "other", **chosen, batch_sizes=(64,))
    assert other.cells[0].verdict == "wrong" and other.exit_code == 1 and other.cells[0].pairs == []
    assert "weights after the first steps without noise differ between them by 0." in other.cells[0].reason
    project.git("reset", "-q", "--hard", "HEAD~1")
    passes["head"] = False
    wrong = project.compare("HEAD~1", "HEAD", tmp_path / "wrong", **chosen, batch_sizes=(64,))
    assert wrong.cells[0].verdict == "wrong" and wrong.exit_code == 1 and wrong.cells[0].pairs == []
    passes["base"] = False
    neither = project.compare("HEAD~1", "HEAD", tmp_path / "neither", **chosen, batch_sizes=(64,))
    assert neither.cells[0].verdict == "not compared"
    # The gate's memory of verdicts must tell the sides apart.
    hashes = {
        registry.frameworks(root=sides.resolve("base", ref, project.folder).folder)["phantom"].adapter_hash
        for ref in ("HEAD~1", "HEAD")
    }
    assert len(hashes) == 2
