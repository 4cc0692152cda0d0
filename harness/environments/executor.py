"""Executors of workers: this process (for tests), a virtual environment, and, in their own folder, containers.

Every executor takes a request and yields the worker's events; what went wrong outside the worker (a kill, a limit, a
time-out, silence) becomes a ``result`` event as well, so that the caller has one kind of ending.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import queue
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Protocol

from harness.environments import nvml, strays, validate, variables
from harness.environments.memory_limit import MemoryLimit
from harness.environments.orphans import dying_with_parent
from harness.environments.referee import Direct, Referee
from harness.environments.turns import Seat
from harness.paths import ROOT
from harness.worker.layer_request import LayerRequest
from harness.worker.request import Request
from harness.worker.result import BY_THE_HARNESS, Result, State

AnyRequest = Request | LayerRequest
Event = dict[str, Any]
POLL_SECONDS = 0.1
GRACE_SECONDS = 2.0
"""How long a worker is heard after its time, where it does not stop writing, and after its end, where its output stays
open."""
WORKER = "harness.worker.e2e"
LOG_TAIL = 4000
OUTPUTS = ("snapshot", "checked", "weights", "left")
"""Fields of a request that name files which the worker fills with arrays."""
LONGEST_LINE = 8 * 2**20
"""Bytes. A line of events that is longer has no end that the harness waits for."""
LINES_AHEAD = 32
BESIDE = "it made a process that is its parent's child and not its own: nobody would count its memory and its time."
ENDLESS = "wrote a line of more than {} MiB without an end"
STOPPED_SECONDS = 1.0
"""Between two looks at a worker: longer means that this process did not run."""
FROM_OUTSIDE = {signal.SIGKILL, signal.SIGTERM, signal.SIGHUP, signal.SIGINT}
"""Signals by which somebody else ends a process; the others are what it does to itself."""


@dataclass(frozen=True)
class Limits:
    """Limits of one process: bytes and seconds. After the worker's ``start-up`` event the memory limit becomes its
    resident bytes + ``growth_bytes``. ``ends_at``: by ``time.monotonic()``, however little of the time this process
    itself ran; ``timeout_seconds`` are of those in which it did."""

    memory_bytes: int
    timeout_seconds: float
    growth_bytes: int | None = None
    ends_at: float | None = None


class Executor(Protocol):
    """An executor runs one worker. ``name`` goes into the cell. ``identity`` tells two executors with the same pins
    apart (the image of a container): a verdict holds for one; empty where the pins say it all."""

    name: str
    identity: str

    def run(self, request: AnyRequest, limits: Limits, on_event: Callable[[Event], None]) -> Result:
        """Return how it ended, always."""
        ...


class InProcess:
    """Executor for tests of the harness: no isolation, no limits."""

    name = "inprocess"
    identity = ""

    def __init__(self, module: str = WORKER) -> None:
        self.module = module

    def run(
        self, request: AnyRequest, limits: Limits, on_event: Callable[[Event], None], referee: Referee | None = None
    ) -> Result:
        """``referee``: of the caller's, who then judges the clock."""
        worker = importlib.import_module(self.module)
        events: list[Event] = []

        def emit(event: Event) -> None:
            events.append(event)
            on_event(event)

        line = Direct(request, referee) if isinstance(request, Request) else None
        worker.run(request, emit, line)
        result = _examined(events[-1], request)
        judge = line is not None and referee is None and request.mode == "time"
        return line.referee.judged(result) if line is not None and judge else result


class Venv:
    """A fresh process of a framework's own interpreter, running the worker ``module`` of the tree ``root``."""

    name = "venv"

    def __init__(
        self,
        python: Path,
        environment: Mapping[str, str] | None = None,
        module: str = WORKER,
        root: Path = ROOT,
        content: str = "",
    ) -> None:
        """``content``: hash of what is installed there."""
        self.identity = self.content = content
        self.root = root
        self.python = python
        self.environment = dict(environment or {})
        self.module = module

    def run(
        self, request: AnyRequest, limits: Limits, on_event: Callable[[Event], None], seat: Seat | None = None
    ) -> Result:
        """``seat``: of a process that takes turns with others."""
        with tempfile.TemporaryDirectory(prefix="dpbench-") as folder:
            path = Path(folder, "request.json")
            referee = None
            if isinstance(request, Request) and request.mode == "time":
                referee = Referee(request, seat=seat, is_strict=self.root == ROOT)
            path.write_text((referee.for_worker if referee else request).to_json())
            log = Path(folder, "log.txt")
            with log.open("wb") as errors:
                command = [str(self.python), "-m", self.module, str(path)]
                said = self._run(command, request, errors, limits, on_event, referee)
            said["log_tail"] = log.read_text(errors="replace")[-LOG_TAIL:]
        result = _examined(said, request)
        return referee.judged(result) if referee else result

    def _run(
        self,
        command: list[str],
        request: AnyRequest,
        errors: Any,
        limits: Limits,
        on_event: Callable[[Event], None],
        referee: Referee | None,
    ) -> Event:
        limit = MemoryLimit(limits.memory_bytes)
        adopts = self.module == WORKER  # what its children leave behind stays below it
        watches_gpu = request.device == "cuda" and request.mode in {"memory", "probe"}
        declared = variables.declared(self.environment, request.mode, os.environ)
        with strays.ended() as mark:
            process = subprocess.Popen(
                command,
                cwd=self.root,
                # What a contestant imports is compiled by its first gate, and no process that is measured does it.
                env=variables.of_worker(request.threads, declared, self.root, request.mode == "gate") | mark,
                stdin=subprocess.PIPE if referee else subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                start_new_session=True,
            )
            if referee is not None:
                referee.send, referee.pid = functools.partial(_write_line, process), process.pid
                if referee.seat is not None:
                    referee.seat.pid = process.pid
            try:
                limit.adopt(process.pid)
                gpu = nvml.Watch(process.pid) if watches_gpu else None
                result = _follow(process, limit, limits, on_event, gpu, referee, mark[strays.MARK] if adopts else "")
                if gpu is not None and "memory" in result:
                    result["memory"] |= gpu.memory
                return result
            finally:
                kill_tree(process)
                limit.close()
                if referee is not None:
                    referee.close()


def _examined(said: Event, request: AnyRequest) -> Result:
    """Return the result as :mod:`harness.environments.validate` lets it through; files of no use are removed."""
    paths = {name: getattr(request, name, None) for name in OUTPUTS}
    files = {name: Path(path) for name, path in paths.items() if path is not None and Path(path).exists()}
    result, kept = validate.examined(
        said, request, {name: path.read_bytes() for name, path in files.items()}, "the worker"
    )
    for name in files.keys() - set(kept):
        files[name].unlink()
    return result


class Patience:
    """``seconds`` of waiting, of which only those count in which this process ran: who was stopped (Ctrl-Z) for a while
    cannot have heard what was said meanwhile."""

    def __init__(self, seconds: float) -> None:
        self.left = seconds
        self.was_stopped = False
        self._last = time.monotonic()

    def hold(self) -> None:
        """The time since the last look does not count: who is waited for stands still for others' sake."""
        self._last = time.monotonic()

    @property
    def is_over(self) -> bool:
        now = time.monotonic()
        self.left -= min(now - self._last, 2 * POLL_SECONDS)
        self.was_stopped = self.was_stopped or now - self._last > STOPPED_SECONDS
        self._last = now
        return self.left < 0.0


def _follow(
    process: subprocess.Popen[bytes],
    limit: MemoryLimit,
    limits: Limits,
    on_event: Callable[[Event], None],
    gpu: nvml.Watch | None = None,
    referee: Referee | None = None,
    mark: str = "",
) -> Event:
    """Passes events on until the result, the end of the process, the memory limit or the time-out."""
    patience = Patience(limits.timeout_seconds)
    last_words = Patience(GRACE_SECONDS)
    result: Event | None = None
    inbox = Inbox()
    assert process.stdout is not None
    threading.Thread(target=_read, args=(process.stdout, inbox, referee), daemon=True).start()
    try:
        while True:
            line = inbox.get(POLL_SECONDS)
            if referee is not None and referee.seat is not None and referee.seat.is_waiting:
                patience.hold()
            if gpu is not None:
                gpu.look()
            if line:
                event = event_of(line)
                if event.get("event") == "result":
                    result = event
                elif event.get("event") == "start-up" and limits.growth_bytes is not None:
                    limit.move(event["resident_bytes"] + limits.growth_bytes)
                on_event(event)
            if fault := _fault(process, limit, mark, result is not None):
                return fault
            if inbox.is_endless:
                return result or failed("crashed", f"the worker {ENDLESS.format(LONGEST_LINE // 2**20)}.")
            has_ended = process.poll() is not None
            # What it started may keep its output open, and what it said may still be on its way.
            if has_ended and (line is None or (result is not None and not line) or last_words.is_over):
                break
            if not has_ended:
                last_words = Patience(GRACE_SECONDS)
            # Where the time is over, what was said before is heard first.
            over = limits.ends_at is not None and time.monotonic() > limits.ends_at
            if (patience.is_over or over) and (not line or over or patience.left < -GRACE_SECONDS):
                return result or failed("timeout", f"no result within {limits.timeout_seconds:.0f} s.")
            if line is None:  # a process may close its output and go on
                time.sleep(POLL_SECONDS)
    finally:
        inbox.close()
    if result is not None:
        return result | ({"harness_stopped": True} if patience.was_stopped else {})
    if limit.exceeded(process.pid):
        return failed("oom", f"killed at the memory limit of {limit.limit_bytes / 2**30:.2f} GiB ({limit.kind}).")
    code = process.returncode
    how = f"was killed by {_name(-code)}" if code < 0 else f"ended with exit code {code}"
    return failed("crashed", f"the worker {how} before it had a result.", interrupted=-code in FROM_OUTSIDE)


def _fault(process: subprocess.Popen[bytes], limit: MemoryLimit, mark: str, has_result: bool) -> Event | None:
    """Return a result where a worker has passed its limit before it had one, or has made processes beside it. Once it
    has ended, what it left behind is this process's, too."""
    if not has_result and limit.exceeded(process.pid):
        size = limit.limit_bytes / 2**30
        return failed("oom", f"the process passed the memory limit of {size:.2f} GiB ({limit.kind}).")
    is_alone = not mark or not strays.beside(process.pid, mark, limit.members())
    return None if is_alone or process.poll() is not None else failed("rejected", BESIDE)


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"


def failed(state: State, reason: str, interrupted: bool = False) -> Event:
    """Return a ``result`` event in the place of the worker's. ``interrupted``: see
    :class:`harness.store.record.Record`."""
    return Result(state, reason, interrupted=interrupted).as_event()


def event_of(line: bytes) -> Event:
    """Return the event in a line. A line that is none is a library's print that slipped past the redirection. What only
    the harness may state of the process is left out."""
    with suppress(ValueError, RecursionError):
        event = json.loads(line)
        if isinstance(event, dict):
            is_result = event.get("event") == "result"
            return {k: v for k, v in event.items() if k not in BY_THE_HARNESS} if is_result else event
    return {"event": "noise", "text": line.decode(errors="replace").rstrip()[:1000]}


class Inbox:
    """Lines from the thread that reads them, so that the watchdog never blocks on a silent worker; None is the end.

    Bounded: who writes faster than the harness reads has to wait, and not the harness's memory to grow.
    ``is_endless``: reading was given up within a line of more than LONGEST_LINE bytes.
    """

    def __init__(self) -> None:
        self._lines: queue.Queue[bytes | None] = queue.Queue(LINES_AHEAD)
        self.is_closed = False
        self.is_endless = False

    def put(self, line: bytes | None) -> None:
        while not self.is_closed:
            with suppress(queue.Full):
                self._lines.put(line, timeout=1.0)
                return

    def get(self, seconds: float) -> bytes | None:
        """Return the next line; empty where none came within ``seconds``; None at and after the end."""
        try:
            line = self._lines.get(timeout=seconds)
        except queue.Empty:
            return b""
        if line is None:
            with suppress(queue.Full):
                self._lines.put_nowait(None)
        return line

    def close(self) -> None:
        """Nobody reads any more: a writer that waits goes on."""
        self.is_closed = True


def _write_line(process: subprocess.Popen[bytes], message: Event) -> None:
    assert process.stdin is not None
    with suppress(OSError, ValueError):  # it may have ended
        process.stdin.write(json.dumps(message).encode() + b"\n")
        process.stdin.flush()


def _read(stream: IO[bytes], inbox: Inbox, referee: Referee | None) -> None:
    """The ``referee`` hears and answers at once. Closes the stream, too: whoever closed it from another thread would
    wait for this one."""
    with stream, suppress(OSError):
        while not inbox.is_closed and (line := stream.readline(LONGEST_LINE)):
            if len(line) == LONGEST_LINE and not line.endswith(b"\n"):
                inbox.is_endless = True
                break
            if referee is not None:
                referee.attend(event_of(line))
            inbox.put(line)
    inbox.put(None)


def kill_tree(process: subprocess.Popen[Any]) -> None:
    """End the worker and everything it started (it leads a session of its own)."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    if process.stdin is not None:
        with suppress(OSError):
            process.stdin.close()


class ToolFault(Exception):
    """A helper process failed; the message holds the tail of its error output."""


def run_tool(
    python: Path,
    module: str,
    arguments: list[str],
    timeout_seconds: float = 900.0,
    environment: Mapping[str, str] | None = None,
) -> str:
    """Standard output of ``python -m module arguments`` in an environment; for references and evaluation.

    ``environment``: more environment variables. Raises :class:`ToolFault`.
    """
    try:
        done = subprocess.run(
            dying_with_parent([str(python), "-m", module, *arguments]),
            cwd=ROOT,
            env=variables.of_worker(len(os.sched_getaffinity(0)), environment or {}, leaves_bytecode=True),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_seconds,
        )
    except subprocess.TimeoutExpired:
        raise ToolFault(f"{module} did not end within {timeout_seconds:.0f} s.") from None
    if done.returncode:
        raise ToolFault(f"{module} ended with {done.returncode}: {done.stderr[-1500:]}")
    return done.stdout
