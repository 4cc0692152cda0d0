"""A pytest plugin: the fixture ``dpbench`` puts a layer or a step of anybody's own under the instrument's clock.

Every test run of everybody who has dpbench installed imports this module, so that it imports nothing of the harness
before the fixture is used; see docs/pytest-plugin.md.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from harness.stopwatch.measure import Process
    from harness.stopwatch.runs import StepRun
    from harness.stopwatch.table import Change

FOR_A_VERDICT = 5
"""Processes; :data:`harness.analysis.stats.VERDICT_ROUNDS`, which a test holds equal: importing it would import
scipy."""

Action = Callable[[], Any]


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("dpbench", "dpbench: layers and steps under a benchmark's clock")
    group.addoption("--dpbench-save", metavar="NAME", help="Keep the figures of this run in .dpbench/, by this name.")
    group.addoption("--dpbench-compare", metavar="NAME", help="Compare with the newest saved run NAME, or with latest.")
    group.addoption("--dpbench-fail", metavar="5%", help="Fail where a step is proven to be slower by more than that.")
    group.addoption(
        "--dpbench-processes", metavar="N", help="Measure each step in N fresh processes; 5 or more for a verdict."
    )
    group.addoption("--dpbench-rounds", metavar="N", help="Rounds in a process, instead of half a second of them.")
    group.addoption("--dpbench-memory", action="store_true", help="Also the peak memory of a call.")
    group.addoption("--dpbench-disable", action="store_true", help="Run every step once, without a clock.")
    group.addoption("--dpbench-child", help="Internal: where the process that measures one test finds its task.")


class Session:
    """One session: its options and its measurements."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.root = config.rootpath
        self.save: str | None = config.getoption("--dpbench-save")
        self.compare: str | None = config.getoption("--dpbench-compare")
        self.fail = _percentage(config.getoption("--dpbench-fail"))
        self.processes = _count(config, "--dpbench-processes")
        self.rounds = _count(config, "--dpbench-rounds")
        self.memory = bool(config.getoption("--dpbench-memory"))
        self.parallel = _is_parallel(config)
        self.disabled = bool(config.getoption("--dpbench-disable")) or self.parallel
        self.child: dict[str, str] | None = None
        self.steps: dict[str, tuple[Process, ...]] = {}
        self.run_once = 0
        self.then: StepRun | None = None
        self.probe: list[float] = []
        self.started = ""
        self.run: StepRun | None = None
        self.changes: list[Change] = []
        self.saved: Path | None = None
        self.failures: list[str] = []
        if task := config.getoption("--dpbench-child"):
            self._become_child(Path(task))
        else:
            self._check()

    def _become_child(self, task: Path) -> None:
        """Measure the task's test here, and nothing else."""
        self.child = json.loads(task.read_text())
        self.config.args = [self.child["test"]]
        self.save = self.compare = self.fail = self.processes = None
        self.disabled = self.parallel

    def _check(self) -> None:
        """Raise UsageError for what cannot be, before anything takes time."""
        keeps = [name for name in ("save", "compare") if getattr(self, name) is not None]
        if keeps and self.parallel:
            raise pytest.UsageError(
                f"--dpbench-{keeps[0]} with pytest-xdist: tests that run side by side disturb each other's times; add "
                "-n 0."
            )
        if keeps and self.disabled:
            raise pytest.UsageError(f"--dpbench-{keeps[0]} and --dpbench-disable exclude each other; leave one out.")
        if self.fail is not None and self.compare is None:
            raise pytest.UsageError("--dpbench-fail needs something to compare with; add --dpbench-compare NAME.")
        if self.fail is not None and (self.processes or 1) < FOR_A_VERDICT:
            raise pytest.UsageError(
                f"--dpbench-fail with {self.processes or 1} process(es) a step: under {FOR_A_VERDICT} prove nothing "
                f"about the next one; add --dpbench-processes {FOR_A_VERDICT}."
            )
        if not keeps:
            return
        from harness.errors import BadInput
        from harness.stopwatch import runs as stopwatch_runs

        try:
            if self.save is not None:
                stopwatch_runs.check_name(self.save, "--dpbench-save")
            if self.compare is not None:
                self.then = stopwatch_runs.find(self.root, self.compare, "--dpbench-compare")
        except BadInput as error:
            raise pytest.UsageError(str(error)) from None
        fewest = min((len(found) for found in self.then.steps.values()), default=1) if self.then else FOR_A_VERDICT
        if self.fail is not None and fewest < FOR_A_VERDICT:
            raise pytest.UsageError(
                f"--dpbench-fail against {self.compare!r}, saved with {fewest} process(es) a step: under "
                f"{FOR_A_VERDICT} prove nothing about the next one; save it again with --dpbench-processes "
                f"{FOR_A_VERDICT}."
            )

    @property
    def keeps(self) -> bool:
        return self.save is not None or self.compare is not None

    def begin(self) -> None:
        """Before the first measurement."""
        if not self.started:
            from datetime import UTC, datetime

            self.started = f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}"
            self._watch_machine()

    def _watch_machine(self) -> None:
        from harness.stopwatch import runs as stopwatch_runs

        if self.keeps and (seconds := stopwatch_runs.canary_seconds()) is not None:
            self.probe.append(seconds)

    def finish(self) -> None:
        """Save and compares. Raises BadInput where the run cannot be saved."""
        if self.child is not None:
            from harness.store import cache

            for found in self.steps.values():
                cache.write_atomically(Path(self.child["result"]), json.dumps(found[0].as_json()).encode())
        if not self.steps or not self.keeps:
            return
        from harness.stopwatch import runs as stopwatch_runs
        from harness.stopwatch import table as stopwatch_table

        self._watch_machine()
        probe = (self.probe[0], self.probe[1]) if len(self.probe) == 2 else None
        facts = stopwatch_runs.describe(self.root)
        name = self.save or "this run"
        self.run = stopwatch_runs.StepRun(name=name, started=self.started, canary=probe, steps=self.steps, **facts)
        if self.then is not None:
            self.changes = stopwatch_table.changes(self.run, self.then)
            if self.fail is not None:
                self.failures += [
                    f"{change.step} is at least {change.proven - 1:.1%} slower than in {self.then.name} "
                    f"(--dpbench-fail {100 * self.fail:g}%)"
                    for change in self.changes
                    if change.proven is not None and change.proven > 1 + self.fail
                ]
        if self.save is not None:
            self.saved = stopwatch_runs.save(self.root, self.run)


SESSION = pytest.StashKey[Session]()


def pytest_configure(config: pytest.Config) -> None:
    # Nothing for suites that neither use the fixture nor give an option: the session is made when first asked for.
    if any(
        config.getoption(f"--dpbench-{name}")
        for name in ("save", "compare", "fail", "processes", "rounds", "memory", "disable", "child")
    ):
        _session(config)


def _session(config: pytest.Config) -> Session:
    if SESSION not in config.stash:
        config.stash[SESSION] = Session(config)
    return config.stash[SESSION]


class Bench:
    """The fixture's value; call it once in a test.

    ``measured``: afterwards the figures of each process (:class:`harness.stopwatch.measure.Process`); empty without
    a clock.
    """

    def __init__(self, session: Session, request: pytest.FixtureRequest) -> None:
        self._session = session
        self._request = request
        self._used = False
        self.measured: tuple[Process, ...] = ()

    def __call__(self, step: Action, synchronize: Action | None = None, setup: Action | None = None) -> Any:
        """Measure ``step()`` and returns what its last call returned, so that the test can check it.

        ``synchronize`` blocks until the device is at rest (``torch.cuda.synchronize``); it is called before the clock
        starts and before it stops. ``setup`` is called before every call of the step, outside the clock.
        """
        if self._used:
            pytest.fail("dpbench was called twice in a test: one step a test; parametrize it instead.", pytrace=False)
        self._used = True
        session, test = self._session, self._request.node.nodeid
        if session.disabled or session.processes:
            result = _once(step, synchronize, setup)
            if session.disabled:
                session.run_once += 1
            else:
                session.begin()
                self.measured = tuple(self._in_a_process(number) for number in range(session.processes or 0))
                session.steps[test] = self.measured
            return result
        from harness.stopwatch import measure as stopwatch

        session.begin()
        process, result = stopwatch.measure(step, synchronize, setup, session.rounds, session.memory)
        self.measured = (process,)
        session.steps[test] = self.measured
        return result

    def _in_a_process(self, number: int) -> Process:
        """This test in a fresh process, which measures it there."""
        from harness.stopwatch.measure import Process

        node, config = self._request.node, self._session.config
        test = "::".join([str(node.path), *node.nodeid.split("::")[1:]])
        with tempfile.TemporaryDirectory(prefix="dpbench-") as folder:
            task, result = Path(folder, "task.json"), Path(folder, "result.json")
            task.write_text(json.dumps({"test": test, "result": str(result)}))
            # Options of others that would spoil a process of one test: side by side, coverage, what failed last.
            after = ["-o", f"cache_dir={folder}/cache", f"--dpbench-child={task}"]
            after += ["-n0"] if config.pluginmanager.hasplugin("xdist") else []
            after += ["--no-cov"] if config.pluginmanager.hasplugin("_cov") else []
            done = subprocess.run(
                [sys.executable, "-m", "pytest", *map(str, config.invocation_params.args), *after],
                cwd=config.invocation_params.dir,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            if not result.exists():
                tail = "\n".join(done.stdout.splitlines()[-25:])
                pytest.fail(
                    f"Process {number + 1} of --dpbench-processes measured nothing (exit {done.returncode}):\n{tail}",
                    pytrace=False,
                )
            return Process.from_json(json.loads(result.read_text()))


def _once(step: Action, synchronize: Action | None, setup: Action | None) -> Any:
    if setup is not None:
        setup()
    result = step()
    if synchronize is not None:
        synchronize()
    return result


@pytest.fixture
def dpbench(request: pytest.FixtureRequest) -> Bench:
    """dpbench(step, synchronize=None, setup=None): measures step() as dpbench measures its contestants."""
    return Bench(_session(request.config), request)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> None:
    """No time counts unless the step is right: what a test measured before it failed is dropped."""
    if call.excinfo is not None and (state := item.config.stash.get(SESSION, None)) is not None:
        state.steps.pop(item.nodeid, None)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    state = session.config.stash.get(SESSION, None)
    if state is None:
        return
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["dpbench_run_once"] = state.run_once
        return
    from harness.errors import BadInput

    try:
        state.finish()
    except BadInput as error:
        state.failures.append(str(error))
    if state.failures and session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: Any) -> None:
    """xdist: a worker process has ended."""
    if count := getattr(node, "workeroutput", {}).get("dpbench_run_once", 0):
        _session(node.config).run_once += count


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    state = config.stash.get(SESSION, None)
    if state is None or state.child is not None:
        return
    for line in _summary(state):
        terminalreporter.write_line(line)


def _summary(state: Session) -> Iterator[str]:
    if state.run_once and state.parallel:
        yield (
            f"dpbench: {state.run_once} step(s) ran once and untimed: pytest-xdist runs tests side by side, which "
            "disturbs every time; -n 0 measures."
        )
    if not state.steps:
        if state.keeps and not state.disabled:
            yield "dpbench: no step was measured, so that nothing was saved or compared."
        return
    from harness.stopwatch import table as stopwatch_table

    yield ""
    yield from stopwatch_table.lines(state.steps, state.changes, state.then)
    if state.saved is not None:
        yield f"Saved as {state.saved.relative_to(state.root)}"
    if state.fail is not None:
        judged = sum(change.proven is not None for change in state.changes)
        yield f"--dpbench-fail {100 * state.fail:g}%: {judged} of {len(state.changes)} steps could be judged."
    for sentence in state.failures:
        yield f"FAILED dpbench: {sentence}"


def _is_parallel(config: pytest.Config) -> bool:
    """Return whether pytest-xdist runs tests side by side: this is one of its workers, or what starts them."""
    return hasattr(config, "workerinput") or bool(
        config.getoption("numprocesses", None) or config.getoption("tx", None)
    )


def _count(config: pytest.Config, option: str) -> int | None:
    text = config.getoption(option)
    if text is None:
        return None
    if not re.fullmatch(r"[1-9][0-9]{0,3}", text):
        raise pytest.UsageError(f"{option} is {text!r}: give a whole number from 1 to 9999, for instance 5.")
    return int(text)


def _percentage(text: str | None) -> float | None:
    """Return the percentage as a fraction."""
    if text is None:
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*%", text)
    if match is None:
        raise pytest.UsageError(f"--dpbench-fail is {text!r}: give a percentage with its sign, for instance 5%.")
    return float(match[1]) / 100
