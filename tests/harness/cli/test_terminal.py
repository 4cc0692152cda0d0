"""Texts in a terminal: the help, the lists, the lines of a run."""

from __future__ import annotations

import functools
import io
import re
from collections.abc import Iterator

import pytest
from rich.console import Console
from typer.main import get_command
from typer.testing import CliRunner

from harness.cli.main import app
from harness.errors import BadInput, did_you_mean
from harness.plan import layer_registry, registry
from harness.plan.e2e import START_UP_SECONDS, expected_seconds, jobs, preset
from harness.run.progress import Progress
from harness.run.remaining import Remaining, about, clock

NAMES = re.compile(r"\b(?:" + "|".join(sorted(registry.frameworks())) + r")-[a-z][a-z-]*[a-z]")


def paths(command: object, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Every verb."""
    yield path
    for name, below in getattr(command, "commands", {}).items():
        yield from paths(below, (*path, name))


@functools.cache
def helps() -> tuple[str, ...]:
    """The whole help of every verb."""
    asked = (CliRunner().invoke(app, [*p, "--help"], env={"COLUMNS": "400"}) for p in paths(get_command(app)))
    return tuple(one.output for one in asked)


def test_every_contestant_that_a_help_text_names_exists() -> None:
    known = {c.name for c in registry.select(["all"])} | {c.name for c in layer_registry.contestants()}
    named = {name for text in helps() for name in NAMES.findall(text)}
    assert named, "no help text names a contestant: the pattern finds nothing"
    assert not named - known


def test_the_help_names_the_verb_that_most_want_first_and_cuts_no_line() -> None:
    for path in paths(get_command(app)):
        text = CliRunner().invoke(app, [*path, "--help"], env={"COLUMNS": "80"}).output
        _, commands, verbs = text.partition("Commands:")
        assert not [line for line in verbs.splitlines() if line.endswith("...")]
        assert not commands or path or verbs.split()[0] == "run"


def test_every_option_says_what_its_value_is() -> None:
    typed = re.compile(r"^ +--\S+ <.*", re.MULTILINE)
    assert [line for text in helps() for line in typed.findall(text)] == []


def test_choices_stand_in_the_help() -> None:
    text = CliRunner().invoke(app, ["run", "e2e", "--help"], env={"COLUMNS": "200"}).output
    for choices in (
        "smoke|quick|full|modern|gpu-full|paper",
        "cpu|cuda",
        "venv|docker|inprocess",
        "verified|paper|as_shipped",
    ):
        assert choices in text


def test_the_version_is_that_of_the_installed_distribution() -> None:
    assert re.fullmatch(r"dpbench \d+\.\d+\.\d+\n", CliRunner().invoke(app, ["--version"]).output)


def test_the_lists_fit_eighty_columns() -> None:
    lines = CliRunner().invoke(app, ["list"], env={"COLUMNS": "80"}).output.splitlines()
    assert max(map(len, lines)) <= 80
    for contestant in registry.select(["all"]):
        assert [line for line in lines if contestant.name in line.split()]


def test_one_kind_is_listed_alone() -> None:
    whole, tasks, presets = (CliRunner().invoke(app, ["list", *kind]).output for kind in ([], ["tasks"], ["presets"]))
    assert tasks.startswith("Tasks\n") and "gpt2-124m" in tasks and "Presets" not in tasks and tasks.strip() in whole
    assert presets.startswith("Presets\n") and "mnist-cnn" not in presets
    assert isinstance(CliRunner().invoke(app, ["list", "contestants"]).exception, BadInput)


@pytest.mark.parametrize(
    ("name", "answer"), [("opcaus", " (did you mean opacus?)"), ("quick", " (did you mean quick?)"), ("zzz", "")]
)
def test_a_slip_is_answered_with_what_may_have_been_meant(name: str, answer: str) -> None:
    assert did_you_mean(name, ["opacus", "jax", "quick"]) == answer


def test_the_time_left_is_that_of_the_pieces_most_like_those_to_come() -> None:
    remaining = Remaining()
    assert remaining.seconds([("time", "mnist")]) is None
    remaining.add(("time", "mnist", "opacus"), 10.0)
    remaining.add(("time", "mnist", "jax"), 2.0)
    remaining.add(("memory", "mnist", "jax"), 30.0)
    left = [("time", "mnist", "jax"), ("time", "mnist", "dpcore"), ("probe",)]
    assert remaining.seconds(left) == pytest.approx(2.0 + 6.0 + 14.0)


def test_durations_read_as_people_say_them() -> None:
    assert [clock(0), clock(751.9), clock(7507)] == ["0:00", "12:31", "2:05:07"]
    assert [about(x) for x in (0.2, 40, 1130, 11000)] == ["about 1 s", "about 40 s", "about 19 min", "about 3 h"]


def test_without_a_terminal_a_line_says_what_came_out_and_what_is_left() -> None:
    out = io.StringIO()
    with Progress(Console(file=out, width=60)) as progress:
        progress.begin([("time", "a")] * 12)
        progress.doing("mnist-cnn · opacus-hooks · batch 64, time, round 1/3")
        progress.done("16.6 s per epoch")
        progress.doing("from before")
        progress.done("2 s per epoch", counts=False)
    first, second = out.getvalue().splitlines()
    assert first.startswith("[ 1/12] mnist-cnn · opacus-hooks · batch 64, time, round 1/3: 16.6 s per epoch (0:00")
    assert second.startswith("[ 2/12] from before: 2 s per epoch (")


def test_the_time_of_a_plan_is_told_beforehand_unless_whole_epochs_are_timed() -> None:
    options = preset("quick", frameworks=("pytorch-eager",))
    planned = jobs(options, registry.select(options.frameworks))
    seconds = expected_seconds(options, planned)
    timed = sum(job.purpose == "time" for job in planned)
    budget = options.budget_seconds or 0.0
    assert seconds == pytest.approx(
        timed * budget + sum(START_UP_SECONDS[job.cell.task][job.purpose] for job in planned)
    )
    assert expected_seconds(preset("quick", epochs=2), planned) is None
