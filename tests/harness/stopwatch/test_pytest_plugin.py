"""The pytest plugin, in suites of its own: what it measures, what it may prove, and what it leaves alone."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import tomllib
from importlib import import_module, util
from pathlib import Path
from typing import Any

import pytest

from harness import pytest_plugin as plugin
from harness.analysis import stats
from harness.run import session
from harness.stopwatch import measure as watch
from harness.worker import layers as layer_worker

pytest_plugins = ["pytester"]

ROOT = Path(__file__).resolve().parents[3]
XDIST = util.find_spec("xdist") is not None

# A machine on which nobody disturbs: what others really do during these tests must not decide them.
CALM = """
import os
import harness.worker.clock, harness.stopwatch.runs
harness.worker.clock._cpu_seconds = lambda: None
harness.stopwatch.runs.canary_seconds = lambda: float(os.environ.get("CANARY", "0.01"))
"""

SLEEPS = """
import os, time

def test_sleep(dpbench):
    dpbench(lambda: time.sleep(float(os.environ["SLEEP"])))
"""


@pytest.fixture
def suite(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    """A folder for a suite of its own; only this plugin is loaded, whether or not dpbench is installed."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
    pytester.makeconftest(CALM)
    return pytester


def launch(suite: pytest.Pytester, *arguments: str) -> pytest.RunResult:
    return suite.runpytest_subprocess("-p", "harness.pytest_plugin", *arguments)


def quick(suite: pytest.Pytester, *arguments: str) -> pytest.RunResult:
    """In this process, which the suite's conftest must not touch: where nothing is measured."""
    return suite.runpytest_inprocess("-p", "harness.pytest_plugin", "--noconftest", *arguments)


def saved(suite: pytest.Pytester) -> list[dict[str, Any]]:
    """The saved runs, oldest first."""
    return [json.loads(path.read_text()) for path in sorted(suite.path.glob(".dpbench/*/*.json"))]


def test_known_sleeps_are_measured_within_5_percent(suite: pytest.Pytester) -> None:
    suite.makepyfile(
        """
        import statistics, time, pytest

        @pytest.mark.parametrize("milliseconds", [5, 10, 50])
        def test_sleep(dpbench, milliseconds):
            lasted = []  # as the sleeper saw it: a busy machine wakes it late

            def sleep():
                start = time.perf_counter()
                time.sleep(milliseconds / 1000)
                lasted.append(time.perf_counter() - start)
                return "slept"

            assert dpbench(sleep) == "slept"
            (process,) = dpbench.measured
            timed = lasted[-process.calls * len(process.seconds):]
            truth = [statistics.fmean(timed[i : i + process.calls]) for i in range(0, len(timed), process.calls)]
            ratios = [measured / true for measured, true in zip(process.seconds, truth, strict=True)]
            assert min(ratios) >= 1.0 and statistics.median(ratios) < 1.05
            assert min(process.seconds) >= milliseconds / 1000
        """
    )
    launch(suite, "--dpbench-save", "sleeps").assert_outcomes(passed=3)
    assert len(saved(suite)[-1]["steps"]) == 3


def verdicts(suite: pytest.Pytester, slower: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> list[pytest.RunResult]:
    """The same code against itself, and then made slower by the environment ``slower``."""
    more = ["--dpbench-processes", "5", "--dpbench-rounds", "5"]
    launch(suite, "--dpbench-save", "before", *more).assert_outcomes(passed=1)
    (step,) = saved(suite)[-1]["steps"].values()
    assert len(step["processes"]) == 5
    against = ["--dpbench-compare", "before", "--dpbench-fail", "5%", *more]
    same = launch(suite, *against)
    for name, value in slower.items():
        monkeypatch.setenv(name, value)
    return [same, launch(suite, *against)]


def test_a_planted_slowdown_of_20_percent_fails_and_the_same_code_does_not(
    suite: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a clock that only the step moves, by 20 ms with 1 % of noise from process to process."""
    suite.makeconftest(
        CALM
        + """
import random, pytest

class Clock:
    now = 0.0
    perf_counter = staticmethod(lambda: Clock.now)

harness.worker.clock.time = Clock

@pytest.fixture
def work():
    def advance():
        Clock.now += 0.02 * float(os.environ["FACTOR"]) * pace
    pace = random.Random(os.getpid()).gauss(1, 0.01)
    return advance
"""
    )
    suite.makepyfile("def test_step(dpbench, work):\n    dpbench(work)")
    monkeypatch.setenv("FACTOR", "1")
    same, slower = verdicts(suite, {"FACTOR": "1.2"}, monkeypatch)
    assert same.ret == 0, same.stdout.str()
    same.stdout.fnmatch_lines(["--dpbench-fail 5%: 1 of 1 steps could be judged."])
    assert slower.ret == 1
    slower.assert_outcomes(passed=1)
    slower.stdout.fnmatch_lines(["* slower", "FAILED dpbench: *::test_step is at least [12]*% slower than in before *"])
    # A machine whose own clockwork takes a quarter longer explains the same figures.
    monkeypatch.setenv("CANARY", "0.0125")
    excused = launch(suite, "--dpbench-compare", "before", "--dpbench-fail", "5%", "--dpbench-processes", "5")
    assert excused.ret == 0
    excused.stdout.fnmatch_lines(["The machine's own clockwork (speed probe) takes 1.25 times as long as then."])


@pytest.mark.slow
def test_the_same_of_real_sleeps(suite: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    suite.makepyfile(SLEEPS)
    codes = []
    for _attempt in range(5):  # on a busy machine a sleeper wakes late, which widens an honest interval
        monkeypatch.setenv("SLEEP", "0.02")
        same, slower = verdicts(suite, {"SLEEP": "0.024"}, monkeypatch)
        codes.append((same.ret, slower.ret))
        assert same.ret == 0, same.stdout.str()
        if slower.ret == 1:
            return
    raise AssertionError(f"Exit codes (same, slower): {codes}")


def test_one_process_proves_nothing_and_says_so(suite: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    suite.makepyfile(SLEEPS)
    monkeypatch.setenv("SLEEP", "0.002")
    launch(suite, "--dpbench-save", "one", "--dpbench-rounds", "3")
    monkeypatch.setenv("SLEEP", "0.004")
    result = launch(suite, "--dpbench-compare", "latest", "--dpbench-rounds", "3")
    assert result.ret == 0
    result.stdout.fnmatch_lines(
        ["*::test_sleep *no verdict: 1 process", "One process: * says nothing of the next process*"]
    )
    quick(suite, "--dpbench-compare", "one", "--dpbench-fail", "5%", "--dpbench-processes", "5").stderr.fnmatch_lines(
        ["ERROR: --dpbench-fail against 'one', saved with 1 process(es) a step: under 5 prove nothing*"]
    )


def test_what_others_disturb_is_marked_and_not_judged(suite: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLEEP", "0.002")
    suite.makepyfile(SLEEPS)
    more = ["--dpbench-processes", "5", "--dpbench-rounds", "3"]
    launch(suite, "--dpbench-save", "calm", *more)
    # Other programs take all processors: ten busy seconds for each reading of the clock, none of them this process's.
    suite.makeconftest(
        CALM + "import itertools\ncount = itertools.count()\n"
        "harness.worker.clock._cpu_seconds = lambda: (10.0 * (n := next(count)), 10.0 * n, 0.0)\n"
    )
    monkeypatch.setenv("SLEEP", "0.004")
    result = launch(suite, "--dpbench-compare", "calm", "--dpbench-fail", "5%", *more)
    assert result.ret == 0
    result.stdout.fnmatch_lines(
        ["*::test_sleep *msᵈ *no verdict: disturbed", "ᵈ disturbed: *", "*0 of 1 steps could be judged."]
    )


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ("--dpbench-fail 5%", "--dpbench-fail needs something to compare with; add --dpbench-compare NAME."),
        ("--dpbench-compare x --dpbench-fail 0.05", "--dpbench-fail is '0.05': give a percentage*, for instance 5%."),
        ("--dpbench-compare x --dpbench-fail 5%", "--dpbench-fail with 1 process(es) a step: under 5 prove nothing*"),
        ("--dpbench-rounds 0", "--dpbench-rounds is '0': give a whole number from 1 to 9999, for instance 5."),
        ("--dpbench-processes many", "--dpbench-processes is 'many': give a whole number*"),
        ("--dpbench-save a/b", "--dpbench-save is 'a/b': give a name of up to 64 letters*"),
        ("--dpbench-save latest", "--dpbench-save is 'latest': give a name*other than 'latest'."),
        (
            "--dpbench-compare x",
            "--dpbench-compare is 'x', but this machine has none; save one by --dpbench-save NAME first.",
        ),
        (
            "--dpbench-save x --dpbench-disable",
            "--dpbench-save and --dpbench-disable exclude each other; leave one out.",
        ),
    ],
)
def test_a_bad_option_is_one_sentence(suite: pytest.Pytester, options: str, sentence: str) -> None:
    result = quick(suite, *options.split())
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([f"ERROR: {sentence}"])
    assert len(result.errlines) <= 2
    assert not (suite.path / ".dpbench").exists()


def test_machines_are_never_mixed(suite: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    suite.makepyfile(SLEEPS)
    monkeypatch.setenv("SLEEP", "0.001")
    launch(suite, "--dpbench-save", "here", "--dpbench-rounds", "1")
    (folder,) = (suite.path / ".dpbench").iterdir()
    folder.rename(folder.with_name("0ther"))
    quick(suite, "--dpbench-compare", "here").stderr.fnmatch_lines(
        ["ERROR: --dpbench-compare is 'here', * (machine 0ther has one, and machines are never mixed)*"]
    )


def test_a_killed_run_leaves_no_half_file(suite: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    suite.makepyfile(SLEEPS)
    monkeypatch.setenv("SLEEP", "0.001")
    few = ["--dpbench-rounds", "1"]
    launch(suite, "--dpbench-save", "whole", *few)
    # Killed at the worst moment: the content is written, the name is not yet there.
    suite.makeconftest(CALM + "import os, signal\nos.fsync = lambda file: os.kill(os.getpid(), signal.SIGKILL)\n")
    assert launch(suite, "--dpbench-save", "half", *few).ret == -signal.SIGKILL
    assert [one["name"] for one in saved(suite)] == ["whole"]
    suite.makeconftest(CALM)
    assert launch(suite, "--dpbench-compare", "latest", "--dpbench-save", "next", *few).ret == 0
    (folder,) = (suite.path / ".dpbench").iterdir()
    assert sorted(path.suffix for path in folder.iterdir() if path.name != ".lock") == [".json", ".json"]


def test_a_run_killed_while_it_measures_leaves_nothing(suite: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    suite.makepyfile(
        "import time\ndef test_long(dpbench):\n    dpbench(lambda: print('begun', flush=True) or time.sleep(60))"
    )
    command = [sys.executable, "-m", "pytest", "-s", "-p", "harness.pytest_plugin", "--dpbench-save", "x"]
    with subprocess.Popen(command, cwd=suite.path, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert any("begun" in line for line in process.stdout)
        process.kill()
    assert not (suite.path / ".dpbench").exists()


def test_a_disabled_step_runs_once(suite: pytest.Pytester) -> None:
    suite.makepyfile(
        """
        def test_step(dpbench):
            calls = []
            note = lambda name: lambda: calls.append(name)
            assert dpbench(note("step"), synchronize=note("wait"), setup=note("setup")) is None
            assert calls == ["setup", "step", "wait"]
            assert dpbench.measured == ()
        """
    )
    result = quick(suite, "--dpbench-disable")
    result.assert_outcomes(passed=1)
    result.stdout.no_fnmatch_line("*median*")


def test_setup_is_outside_and_the_wait_inside_of_the_clock(suite: pytest.Pytester) -> None:
    suite.makepyfile(
        """
        import time

        def test_step(dpbench):
            calls = []

            def slowly(name, seconds):
                return lambda: (calls.append(name), time.sleep(seconds))

            dpbench(slowly("step", 0.001), synchronize=slowly("wait", 0.002), setup=slowly("setup", 0.25))
            (process,) = dpbench.measured
            assert process.calls == 1
            assert 0.003 <= min(process.seconds) < 0.25
            assert calls[:4] == ["setup", "wait", "step", "wait"]
            assert calls.count("setup") == calls.count("step") == process.warm_up + len(process.seconds)
        """
    )
    launch(suite, "--dpbench-rounds", "3").assert_outcomes(passed=1)


def test_no_time_counts_unless_the_test_passes(suite: pytest.Pytester) -> None:
    suite.makepyfile(
        """
        def test_wrong(dpbench):
            assert dpbench(lambda: 1 + 1) == 3

        def test_right(dpbench):
            assert dpbench(lambda: 1 + 1) == 2
        """
    )
    result = launch(suite, "--dpbench-save", "x", "--dpbench-rounds", "2")
    result.assert_outcomes(passed=1, failed=1)
    (run_saved,) = saved(suite)
    assert [name.split("::")[1] for name in run_saved["steps"]] == ["test_right"]
    wrong = launch(suite, "--dpbench-processes", "2", "--dpbench-rounds", "2", "-k", "wrong")
    wrong.stdout.fnmatch_lines(["Process 1 of --dpbench-processes measured nothing (exit 1):", "*assert 2 == 3*"])


def test_a_second_step_in_a_test_is_refused(suite: pytest.Pytester) -> None:
    suite.makepyfile("def test_two(dpbench):\n    dpbench(int)\n    dpbench(int)")
    result = launch(suite, "--dpbench-rounds", "1")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["dpbench was called twice in a test: one step a test; parametrize it instead."])


def test_fresh_processes_measure_the_very_test_with_the_user_s_own_options(suite: pytest.Pytester) -> None:
    """Options of the suite's own, a test with an awkward name and arguments that select it reach the processes."""
    suite.makeconftest(
        CALM + "def pytest_addoption(parser):\n    parser.addoption('--device')\n"
        "import pytest\n@pytest.fixture\ndef device(request):\n    return request.config.getoption('--device')\n"
    )
    suite.mkdir("tests")
    (suite.path / "tests" / "test_it.py").write_text(
        "import os, pytest\n"
        "class TestLayer:\n"
        "    @pytest.mark.parametrize('shape', ['a::b', '[3 4]'])\n"
        "    def test_step(self, dpbench, device, shape):\n"
        "        assert device == 'tests'\n"
        "        dpbench(lambda: open(os.environ['PIDS'], 'a').write(f'{os.getpid()} {shape}\\n'))\n"
    )
    os.environ["PIDS"] = str(suite.path / "pids")
    try:
        result = launch(
            suite, "tests", "--device", "tests", "-k", "step", "--dpbench-processes", "2", "--dpbench-rounds", "1"
        )
    finally:
        del os.environ["PIDS"]
    result.assert_outcomes(passed=2)
    wrote = {tuple(line.split(" ", 1)) for line in (suite.path / "pids").read_text().splitlines()}
    # Of each parameter: the session itself once, for the test's own checks, and two processes of its own.
    assert sorted(shape for _, shape in wrote) == ["[3 4]"] * 3 + ["a::b"] * 3
    assert len({pid for pid, _ in wrote}) == 5


def test_memory_by_two_metrics(suite: pytest.Pytester) -> None:
    suite.makepyfile("def test_bytes(dpbench):\n    dpbench(lambda: len(bytearray(b'1') * (16 * 2**20)))")
    result = launch(suite, "--dpbench-memory", "--dpbench-save", "x", "--dpbench-rounds", "2")
    result.stdout.fnmatch_lines(["*resident peak*traced peak*", "traced peak: *by tracemalloc; resident peak: *"])
    (process,) = saved(suite)[0]["steps"].popitem()[1]["processes"]
    assert 16 * 2**20 <= process["memory"]["tracemalloc_peak_growth"] < 17 * 2**20
    assert process["memory"].get("peak_resident_growth", 16 * 2**20) == pytest.approx(16 * 2**20, rel=0.1)


@pytest.mark.skipif(not XDIST, reason="pytest-xdist is not installed")
def test_side_by_side_nothing_is_timed(suite: pytest.Pytester) -> None:
    suite.makepyfile("def test_step(dpbench):\n    dpbench(int)\n    assert dpbench.measured == ()")
    beside = ["-p", "xdist.plugin", "-n"]
    result = launch(suite, *beside, "1")
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["dpbench: 1 step(s) ran once and untimed: pytest-xdist runs tests side by side*"])
    refused = launch(suite, *beside, "1", "--dpbench-save", "x")
    assert refused.ret == pytest.ExitCode.USAGE_ERROR
    refused.stderr.fnmatch_lines(["ERROR: --dpbench-save with pytest-xdist: *; add -n 0."])
    suite.makepyfile("def test_step(dpbench):\n    dpbench(int)\n")
    off = launch(suite, *beside, "0", "--dpbench-processes", "1", "--dpbench-rounds", "1")
    off.stdout.fnmatch_lines(["*::test_step * 1 *"])


def test_a_suite_that_does_not_use_it_is_left_alone(suite: pytest.Pytester) -> None:
    suite.makeconftest("")
    suite.makepyfile(
        """
        import sys

        def test_nothing_of_it_is_there():
            assert not {"harness.stopwatch.measure", "harness.analysis.stats"} & (sys.modules.keys() - {"__main__"})

        def test_fails():
            assert 1 == 2
        """
    )
    shown = []
    for arguments in ([], ["-p", "harness.pytest_plugin"]):
        result = suite.runpytest_subprocess(*arguments)
        result.assert_outcomes(passed=1, failed=1)
        shown.append([re.sub(r"in \d.*s ", "", line) for line in result.outlines])
    assert shown[0] == shown[1]
    assert not (suite.path / ".dpbench").exists()


def test_unused_it_costs_under_50_ms_and_imports_nothing_heavy() -> None:
    program = (
        "import sys, time, pytest\n"
        "import _pytest.config\n"
        "start = time.process_time()\n"
        "import harness.pytest_plugin\n"
        "print(time.process_time() - start)\n"
        "heavy = {'numpy', 'scipy', 'pandas', 'pydantic', 'rich', 'typer', 'harness.worker.clock'}\n"
        "heavy &= sys.modules.keys()\n"
        "assert not heavy, heavy\n"
    )
    times = []
    for _ in range(3):  # the fastest of three: the first may compile
        times.append(float(subprocess.check_output([sys.executable, "-c", program], cwd=ROOT, text=True)))
    assert min(times) < 0.05, times


def test_it_is_announced_to_pytest() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    module = import_module(project["entry-points"]["pytest11"]["dpbench"])
    assert module.dpbench


def test_its_rules_are_those_of_the_benchmark() -> None:
    assert plugin.FOR_A_VERDICT == stats.VERDICT_ROUNDS
    assert watch.DISTURBED_SHARE == session.DISTURBED_SHARE
    assert watch.SHARE_FROM == layer_worker.SHARE_FROM


def test_short_steps_are_repeated_until_the_clock_is_nothing_beside_them() -> None:
    process, result = watch.measure(lambda: sum(range(100)), rounds=3)
    assert result == 4950
    assert process.calls > 100
    assert all(0 < seconds < 1e-3 for seconds in process.seconds)
    long, _ = watch.measure(lambda: time.sleep(0.02), rounds=2)
    assert long.calls == 1 and len(long.seconds) == 2


def test_the_page_s_example_runs_and_its_options_exist(suite: pytest.Pytester) -> None:
    page = (ROOT / "docs" / "pytest-plugin.md").read_text()
    (example,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    suite.makepyfile(test_layer=example)
    before, against = re.findall(r"^pytest test_layer.py ([^#\n]*)", page, re.MULTILINE)
    few = [word if word != "5" else "1" for word in before.split()]
    launch(suite, *few, "--dpbench-rounds", "1").assert_outcomes(passed=2)
    # With the single process of these tests, the page's second command is refused for that reason alone.
    quick(suite, *against.split()).stderr.fnmatch_lines(
        ["ERROR: --dpbench-fail against 'before', saved with 1 process*"]
    )
    known = quick(suite, "--help").stdout.str()
    options = set(re.findall(r"--dpbench-[a-z]+", page))
    assert options == set(re.findall(r"--dpbench-[a-z]+", known)) - {"--dpbench-child"}
