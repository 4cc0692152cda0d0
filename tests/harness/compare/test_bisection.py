"""The search for the commit: with a made-up judge, and in a real repository of fake contestants."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from harness.analysis.sequential import Rule
from harness.cli.compare import parse_cell
from harness.cli.main import app
from harness.compare import bisection
from harness.compare import record as compare_record
from harness.compare.bisection import Step, search
from harness.errors import BadInput
from tests.support.project import Project

pytestmark = pytest.mark.usefixtures("apart")


@given(st.data())
def test_the_culprit_is_in_what_is_named_and_nothing_else_that_could_be_left_out(data):
    count = data.draw(st.integers(1, 40))
    first_bad = data.draw(st.integers(0, count - 1))
    silent = data.draw(st.sets(st.integers(0, count - 2))) if count > 1 else set()
    commits = [f"c{i}" for i in range(count)]
    asked: list[str] = []

    def judge(commit: str) -> Step:
        asked.append(commit)
        i = int(commit[1:])
        return Step(commit, "ambiguous" if i in silent else "bad" if i >= first_bad else "good")

    found = search(commits, judge)
    assert f"c{first_bad}" in found.commits
    assert len(asked) == len(set(asked))
    # Nothing but the first bad commit that answers, and the silent ones right before it.
    last = int(found.commits[-1][1:])
    assert last == min(i for i in range(first_bad, count) if i not in silent)
    assert all(int(c[1:]) in silent for c in found.commits[:-1])
    if not silent:
        assert len(asked) <= 1 + count.bit_length()


def test_a_bad_commit_that_is_not_bad_ends_the_search():
    found = search(["a", "b"], lambda commit: Step(commit, "good"))
    assert found.commits == () and len(found.steps) == 1
    with pytest.raises(ValueError):
        search([], lambda commit: Step(commit, "bad"))


def bisect(project: Project, good: str, bad: str, *more: str) -> tuple[int, dict]:
    arguments = ["bisect", "layer-norm/phantom-exact/clipped/16", good, bad, "--repository", str(project.folder)]
    arguments += ["--isolation", "inprocess", "--seconds", "0.03", "--threshold", "0.2", "--max-rounds", "8", "--json"]
    done = CliRunner().invoke(app, [*arguments, "--out", str(project.folder.parent / "steps"), *more])
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done.exit_code, json.loads(done.stdout)


def test_the_commit_that_made_a_layer_slower_is_named(project):
    good = project.git("rev-parse", "HEAD")
    project.commit("sleep-3ms", title="nothing")
    project.commit("crash", title="does not run")
    project.commit("sleep-3ms", title="repaired")
    culprit = project.commit("sleep-15ms", title="slower")
    project.commit("sleep-15ms", "buffer", title="and fatter")
    code, said = bisect(project, good, "main")
    assert code == 1 and said["commits"] == [culprit]
    assert len(said["steps"]) <= 4


def test_commits_that_do_not_run_leave_a_range(project):
    good = project.git("rev-parse", "HEAD")
    broken = project.commit("crash")
    bad = project.commit("buffer")
    code, said = bisect(project, good, "HEAD")
    assert code == 1 and said["commits"] == [broken, bad]
    assert [step["opinion"] for step in said["steps"]] == ["bad", "did not run"]


def test_a_bad_commit_that_is_as_good_is_no_finding_and_one_that_breaks_is_a_failure(project):
    good = project.git("rev-parse", "HEAD")
    project.commit("sleep-3ms")
    code, said = bisect(project, good, "HEAD")
    assert code == 0 and said["commits"] == []
    project.commit("crash")
    code, said = bisect(project, good, "HEAD")
    assert code == 3 and said["steps"][0]["opinion"] == "did not run"


def test_bad_input_is_one_sentence(project):
    with pytest.raises(BadInput, match="must be an ancestor"):
        bisection.commits_between("HEAD", "HEAD", project.folder)
    with pytest.raises(BadInput, match="GOOD is 'no'"):
        bisection.commits_between("no", "HEAD", project.folder)
    with pytest.raises(BadInput, match="The cell is 'linear/64'"):
        parse_cell("linear/64")
    assert parse_cell("lstm/opacus-ghost/clipped/32/layers-v1/cpu/venv")["batch_sizes"] == "32"
    assert parse_cell("mnist-cnn/dpcore-engine/64")["tasks"] == "mnist-cnn"


def test_a_wrong_commit_is_found_without_asking_the_clock(project):
    good = project.git("rev-parse", "HEAD")
    project.commit("sleep-6ms")
    wrong = project.commit("sleep-6ms", "clip-bug")
    project.commit("sleep-6ms", "clip-bug", title="later")
    code, said = bisect(project, good, "HEAD", "--max-rounds", "20")
    assert code == 1 and said["commits"] == [wrong]
    assert {step["opinion"]: step["why"] for step in said["steps"]}["good"] == "neither gate nor memory is worse"


def test_a_cell_whose_check_was_not_begun_is_not_called_good():
    cell = compare_record.conclude("cell", "layer", [], None, None, None, Rule(rounds=8))
    assert cell.gate == {"base": "not begun", "head": "not begun"}
    assert bisection.opinion_of(cell, frozenset({"gate"}))[0] == "ambiguous"
