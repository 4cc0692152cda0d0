"""Where a worker runs: inside this process (for tests), in a venv, and, as the seam for later, in a container.

Every place takes a request and yields the worker's events; what went wrong outside the worker (a kill, a limit, a
time-out, silence) becomes a ``result`` event as well, so that the caller has one kind of ending.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from harness import answer, nvml
from harness.layer_request import LayerRequest
from harness.limits import MemoryLimit
from harness.referee import Direct, Referee
from harness.registry import ROOT
from harness.request import Request

AnyRequest = Request | LayerRequest
Event = dict[str, Any]
POLL_SECONDS = 0.1
WORKER = "harness.worker"
LOG_TAIL = 4000
WEIGHTS = ("snapshot", "checked", "weights")
"""Fields of a request that name files which the worker fills with weights."""


@dataclass(frozen=True)
class Limits:
    """``growth_bytes``: from the worker's ``start-up`` event on the limit is what it says is resident, and so much."""

    memory_bytes: int
    timeout_seconds: float
    growth_bytes: int | None = None


class Place(Protocol):
    """``name`` goes into the cell. ``identity`` tells two places with the same pins apart (the image of a container): a
    verdict holds for one; empty where the pins say it all."""

    name: str
    identity: str

    def run(self, request: Request, limits: Limits, on_event: Callable[[Event], None]) -> Event:
        """The ``result`` event, always; with ``log_tail``."""
        ...


class InProcess:
    """For tests of the harness: no isolation, no limits."""

    name = "inprocess"
    identity = ""

    def __init__(self, module: str = WORKER) -> None:
        self.module = module

    def run(self, request: AnyRequest, limits: Limits, on_event: Callable[[Event], None]) -> Event:
        worker = importlib.import_module(self.module)
        events: list[Event] = []

        def emit(event: Event) -> None:
            events.append(event)
            on_event(event)

        line = Direct(request) if isinstance(request, Request) else None
        worker.run(request, emit, line)
        result = _examined({"log_tail": "", **events[-1]}, request)
        return line.referee.judged(result) if line is not None and request.mode == "time" else result


class Venv:
    """A fresh process of a framework's own interpreter, running the worker ``module`` of the tree ``root``."""

    name = "venv"
    identity = ""

    def __init__(
        self,
        python: Path,
        environment: Mapping[str, str] | None = None,
        module: str = WORKER,
        root: Path = ROOT,
    ) -> None:
        self.root = root
        self.python = python
        self.environment = dict(environment or {})
        self.module = module

    def run(self, request: AnyRequest, limits: Limits, on_event: Callable[[Event], None]) -> Event:
        with tempfile.TemporaryDirectory(prefix="dpbench-") as folder:
            path = Path(folder, "request.json")
            referee = Referee(request) if isinstance(request, Request) and request.mode == "time" else None
            path.write_text((referee.for_worker if referee else request).to_json())
            log = Path(folder, "log.txt")
            with log.open("wb") as errors:
                command = [str(self.python), "-m", self.module, str(path)]
                result = self._run(command, request, errors, limits, on_event, referee)
            result["log_tail"] = log.read_text(errors="replace")[-LOG_TAIL:]
        result = _examined(result, request)
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
        watches_gpu = request.device == "cuda" and request.mode in {"memory", "probe"}
        process = subprocess.Popen(
            command,
            cwd=self.root,
            env=worker_environment(request.threads, self.environment, self.root),
            stdin=subprocess.PIPE if referee else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            start_new_session=True,
            text=True,
        )
        if referee is not None:
            referee.say, referee.pid = functools.partial(_write_line, process), process.pid
        try:
            limit.adopt(process.pid)
            gpu = nvml.Watch(process.pid) if watches_gpu else None
            result = _follow(process, limit, limits, on_event, gpu, referee)
            if gpu is not None and "memory" in result:
                result["memory"] |= gpu.memory
            return result
        finally:
            kill_tree(process)
            limit.close()
            if referee is not None:
                referee.close()


def _examined(result: Event, request: AnyRequest) -> Event:
    """The result as :mod:`harness.answer` lets it through; weights that are none are removed."""
    paths = {name: getattr(request, name, None) for name in WEIGHTS}
    files = {name: Path(path) for name, path in paths.items() if path is not None and Path(path).exists()}
    result, kept = answer.examined(
        result, request, {name: path.read_bytes() for name, path in files.items()}, "the worker"
    )
    for name in files.keys() - set(kept):
        files[name].unlink()
    return result


def worker_environment(threads: int, extra: Mapping[str, str], root: Path = ROOT) -> dict[str, str]:
    """The worker sees the repository, its thread count, and nothing of the harness's own virtual environment."""
    dropped = (
        "PYTHONHOME",
        "VIRTUAL_ENV",
        "PYTHONSTARTUP",
        "XLA_FLAGS",
        "JAX_",
        "TORCH",
        "OMP_",
        "MKL_",
        "KMP_",
        "TF_",
    )
    kept = {k: v for k, v in os.environ.items() if not k.startswith(dropped)}
    pools = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")
    return {
        **kept,
        **dict.fromkeys(pools, str(threads)),
        "PYTHONPATH": str(root),
        "PYTHONHASHSEED": "0",
        "PYTHONDONTWRITEBYTECODE": "1",
        # A cache of compiled code would make the second process of a cell compile for nothing.
        "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1",
        **extra,
    }


def _follow(
    process: subprocess.Popen[str],
    limit: MemoryLimit,
    limits: Limits,
    on_event: Callable[[Event], None],
    gpu: nvml.Watch | None = None,
    referee: Referee | None = None,
) -> Event:
    """Passes events on until the result, the end of the process, the memory limit or the time-out."""
    deadline = time.monotonic() + limits.timeout_seconds
    result: Event | None = None
    lines = _lines(process, referee)
    while True:
        try:
            line = lines.get(timeout=POLL_SECONDS)
        except queue.Empty:
            line = ""
        if gpu is not None:
            gpu.look()
        if line is None:
            break
        if line:
            event = _event(line)
            if event.get("event") == "result":
                result = event
            elif event.get("event") == "start-up" and limits.growth_bytes is not None:
                limit.move(event["resident_bytes"] + limits.growth_bytes)
            on_event(event)
        if result is None and limit.exceeded(process.pid):
            return _failed(
                "oom", f"the process passed the memory limit of {limit.limit_bytes / 2**30:.2f} GiB ({limit.kind})."
            )
        if time.monotonic() > deadline:
            return result or _failed("timeout", f"no result within {limits.timeout_seconds:.0f} s.")
    code = process.wait()
    if result is not None:
        return result
    if limit.exceeded(process.pid):
        return _failed("oom", f"killed at the memory limit of {limit.limit_bytes / 2**30:.2f} GiB ({limit.kind}).")
    how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    return _failed("crashed", f"the worker {how} before it had a result.")


def _failed(state: str, reason: str) -> Event:
    return {"event": "result", "state": state, "reason": reason}


def _event(line: str) -> Event:
    """A line that is not an event is a library's print that slipped past the redirection: passed on as noise."""
    with suppress(json.JSONDecodeError):
        event = json.loads(line)
        if isinstance(event, dict):
            return event
    return {"event": "noise", "text": line.rstrip()}


def _write_line(process: subprocess.Popen[str], message: Event) -> None:
    assert process.stdin is not None
    with suppress(OSError, ValueError):  # it may have ended
        process.stdin.write(json.dumps(message) + "\n")
        process.stdin.flush()


def _lines(process: subprocess.Popen[str], referee: Referee | None = None) -> queue.Queue[str | None]:
    """The process's output lines, then None. A thread reads, so that the watchdog never blocks on a silent worker, and
    the ``referee`` hears and answers at once."""
    out: queue.Queue[str | None] = queue.Queue()

    def read() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            if referee is not None:
                referee.attend(_event(line))
            out.put(line)
        out.put(None)

    threading.Thread(target=read, daemon=True).start()
    return out


def kill_tree(process: subprocess.Popen[Any]) -> None:
    """Ends the worker and everything it started (it leads a session of its own)."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            with suppress(OSError):
                stream.close()


class ToolFault(Exception):
    """A helper process failed; the message holds the tail of its error output."""


def mortal(command: list[str]) -> list[str]:
    """The command, killed by Linux when this process dies (PR_SET_PDEATHSIG outlives exec): an orphaned installer would
    write into the folder that the next run cleans up."""
    code = "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 9); os.execv(sys.argv[1], sys.argv[1:])"
    return [sys.executable, "-c", code, shutil.which(command[0]) or command[0], *command[1:]]


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
            mortal([str(python), "-m", module, *arguments]),
            cwd=ROOT,
            env=worker_environment(os.cpu_count() or 1, environment or {}),
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


def json_tool(
    python: Path, module: str, arguments: list[str], environment: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """The JSON object on the last line of a tool's output."""
    output = run_tool(python, module, arguments, environment=environment)
    result: dict[str, Any] = json.loads(output.strip().splitlines()[-1])
    return result
