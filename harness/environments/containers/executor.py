"""A worker in a container: fresh for every measurement, with nothing that it could harm or be helped by.

No network, no privileges, the user `nobody`, a read-only root, code and data read-only, one results folder in memory
of a limited size, limits on memory and processes, pinned processors. What the worker leaves comes back by its output
stream, and so does everything else.
"""

from __future__ import annotations

import base64
import os
import signal
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

from harness.data import store
from harness.environments import validate, variables
from harness.environments.containers import engine
from harness.environments.containers.engine import Engine, EngineGone
from harness.environments.containers.images import Image
from harness.environments.containers.mounts import Mounts
from harness.environments.containers.stream import Stream
from harness.environments.executor import (
    ENDLESS,
    FROM_OUTSIDE,
    GRACE_SECONDS,
    LONGEST_LINE,
    OUTPUTS,
    POLL_SECONDS,
    WORKER,
    AnyRequest,
    Event,
    Limits,
    Patience,
    ToolFault,
    event_of,
    failed,
)
from harness.environments.referee import Referee
from harness.errors import BadInput
from harness.paths import ROOT
from harness.worker.container_entrypoint import ORPHANED, RESULTS
from harness.worker.request import Request
from harness.worker.result import Result, State

INSIDE = Path("/dpbench")
CODE = INSIDE / "code"
CACHE = INSIDE / "cache"
CODE_FOLDERS = ("harness", "frameworks", "dpcore")
RESULTS_BYTES = 256 * 2**20
SCRATCH_BYTES = 512 * 2**20
SHARED_MEMORY_BYTES = 64 * 2**20
MESSAGE_SECONDS = 0.02
"""How long the two messages around a timed stretch may take."""
PROCESSES = 512
"""Threads count: a framework with a pool per core and per library stays far below."""
STOP_SECONDS = 30.0
DOCTOR = "see `dpbench doctor`"
RETURN_SECONDS = 60.0
"""How long an engine that went away may take to come back (a restart by its supervisor) before the run stops."""


class Docker:
    """An executor: every :meth:`run` is a container of its own, removed at the end. It runs the worker ``module`` with
    the code of the tree ``root``."""

    name = "docker"

    def __init__(
        self,
        on: Engine,
        image: Image,
        mounts: Mounts,
        environment: Mapping[str, str] | None = None,
        module: str = WORKER,
        root: Path = ROOT,
    ) -> None:
        self.engine = on
        self.image = image
        self.mounts = mounts
        self.environment = dict(environment or {})
        self.module = module
        self.root = root
        self.identity = image.digest

    def run(self, request: AnyRequest, limits: Limits, on_event: Callable[[Event], None]) -> Result:
        """Return how it ended, always, with ``container``.

        An engine that goes away and comes back in between costs one repetition. Raises :class:`BadInput` where it does
        not come back: nothing is known about the cell then.
        """
        for restarts in range(2):
            try:
                result = self._run(request, limits, on_event)
            except EngineGone as error:
                self._wait_for_return()
                why = f"the container engine restarted during the measurement ({error})."
                continue
            return replace(result, container={**(result.container or {}), "engine_restarts": restarts})
        return Result(
            "crashed", why, container={"startup_seconds": None, "exit_code": None, "engine_restarts": restarts + 1}
        )

    def _run(self, request: AnyRequest, limits: Limits, on_event: Callable[[Event], None]) -> Result:
        referee = None
        if isinstance(request, Request) and request.mode == "time":
            referee = Referee(request, room=MESSAGE_SECONDS)
        translated, mounts, outputs = self._translate(referee.for_worker if referee else request)
        order = {
            "kind": "measure",
            "worker": self.module,
            "request": translated.to_json(),
            "describe": False,  # the worker of an older commit asks for it
        }
        threads, is_cuda = request.threads, request.device == "cuda"
        declared = variables.declared(self.environment, request.mode, {})
        outcome = self._contain(order, mounts, limits, threads, is_cuda, declared, on_event, referee)
        files = {
            name.removesuffix(".npz"): bytes(content)
            for name, content in outcome.files.items()
            if name.removesuffix(".npz") in outputs
        }
        result, kept = validate.examined(outcome.result, request, files, "the container")
        for name in kept:
            _write(outputs[name], files[name])
        return referee.judged(result) if referee else result

    def tool(self, module: str, arguments: list[str], inputs: Mapping[Path, str], timeout_seconds: float) -> Outcome:
        """``python -m module arguments`` in a container; ``inputs``: files or folders and where they lie inside.

        Raises :class:`ToolFault` where it fails.
        """
        order = {"kind": "tool", "module": module, "arguments": arguments, "describe": False}
        mounts = [*self._code(), *(self._mount(path, inside) for path, inside in inputs.items())]
        limits = Limits(int(self.engine.facts["memory_bytes"] * 0.9), timeout_seconds)
        try:
            outcome = self._contain(order, mounts, limits, 0, False, self.environment, lambda event: None)
        except EngineGone:
            self._wait_for_return()
            raise ToolFault(f"{module}: the container engine restarted.") from None
        if outcome.result["state"] != "ok":
            raise ToolFault(f"{module}: {outcome.result['reason']} {outcome.result['log_tail'][-1500:]}")
        return outcome

    def _translate(self, request: AnyRequest) -> tuple[AnyRequest, list[Any], dict[str, Path]]:
        """Return the request with the container's paths, what is mounted, and where which result goes."""
        mounts = self._code()
        outputs: dict[str, Path] = {}
        changes: dict[str, Any] = {}
        folder = Path(request.folder)
        if folder.is_relative_to(self.root / "frameworks"):
            changes["folder"] = str(CODE / folder.relative_to(self.root))
        else:
            changes["folder"] = str(INSIDE / "contestant" / folder.name)
            mounts.append(self._mount(folder, changes["folder"]))
        if isinstance(request, Request) and request.data:
            data = store.folder(request.data, request.synthetic)
            mounts.append(self._mount(data, str(CACHE / "data" / data.name)))
        if request.reference:
            changes["reference"] = str(INSIDE / "reference" / Path(request.reference).name)
            mounts.append(self._mount(Path(request.reference), str(INSIDE / "reference")))
        for field in OUTPUTS:
            wanted = getattr(request, field, None)
            if wanted is not None:
                outputs[field] = Path(wanted)
                changes[field] = str(RESULTS / f"{field}.npz")
        return replace(request, **changes), mounts, outputs

    def _code(self) -> list[Any]:
        # An old state of the code may lack dpcore/.
        present = [name for name in CODE_FOLDERS if (self.root / name).is_dir()]
        return [self._mount(self.root / name, str(CODE / name)) for name in present]

    def _mount(self, source: Path, inside: str) -> Any:
        with engine.errors():
            return self.mounts.mount(source, inside)

    def _wait_for_return(self) -> None:
        """Raise :class:`BadInput` where the engine stays away."""
        deadline = time.monotonic() + RETURN_SECONDS
        while time.monotonic() < deadline:
            with suppress(BadInput), engine.errors():
                self.engine.client.ping()
                engine.sweep(self.engine, mine=True)
                return
            time.sleep(1.0)
        raise BadInput(
            f"The container engine at {self.engine.host} went away and did not come back within "
            f"{RETURN_SECONDS:.0f} s; start it and run the same command again: it goes on where it stopped."
        )

    def _contain(
        self,
        order: Mapping[str, Any],
        mounts: list[Any],
        limits: Limits,
        threads: int,
        is_cuda: bool,
        declared: Mapping[str, str],
        on_event: Callable[[Event], None],
        referee: Referee | None = None,
    ) -> Outcome:
        """Raise :class:`EngineGone` where the engine stops answering, :class:`BadInput` where it refuses to start."""
        import docker.errors

        start = time.monotonic()
        container = None
        try:
            with engine.errors():
                try:
                    container = self._create(mounts, limits, threads, is_cuda, declared)
                    stream = Stream(self.engine, container)
                    container.start()
                except docker.errors.APIError as error:
                    if is_cuda:  # there was one when the run began
                        return _without_gpu(str(error.explanation))
                    raise BadInput(f"The engine cannot run a container: {error.explanation}; {DOCTOR}.") from None
                stream.send(order)
                if referee is not None:
                    referee.send = stream.send
                outcome = _follow(stream, start, limits, on_event, referee)
                if not outcome.is_over:
                    engine.kill(container)
                state = _end_state(container)
            return outcome.settled(state, limits, says_oom=self.engine.facts["kind"] == "docker")
        finally:
            if container is not None:
                with suppress(BadInput), engine.errors():
                    engine.remove(container)

    def _create(
        self, mounts: list[Any], limits: Limits, threads: int, is_cuda: bool, declared: Mapping[str, str]
    ) -> Any:
        from docker.types import LogConfig

        return self.engine.client.containers.create(
            self.image.digest,
            ["-m", "harness.worker.container_entrypoint"],
            name=f"dpbench-{os.getpid()}-{os.urandom(4).hex()}",
            labels=engine.labels(limits.timeout_seconds + 600.0),
            environment=inside_environment(threads or self.engine.facts["cpus"], declared),
            working_dir=str(CODE),
            stdin_open=True,
            network_mode="none",
            user=engine.NOBODY,
            cap_drop=["ALL"],
            security_opt=engine.security(self.engine),
            read_only=True,
            mounts=mounts,
            tmpfs={
                str(RESULTS): f"rw,nosuid,nodev,noexec,size={RESULTS_BYTES},mode=1777",
                # What is compiled at run time (torch.compile) is loaded from here.
                "/tmp": f"rw,nosuid,nodev,exec,size={SCRATCH_BYTES},mode=1777",
                # Podman puts a writable one here into every container with a read-only root.
                "/var/tmp": "ro,nosuid,nodev,noexec,size=64k,mode=0555",
            },
            shm_size=SHARED_MEMORY_BYTES,
            mem_limit=limits.memory_bytes,
            memswap_limit=limits.memory_bytes,
            pids_limit=PROCESSES,
            ulimits=engine.ulimits(),
            cpuset_cpus=processors(threads) if threads else None,
            # What it prints is read as it comes; a log on the engine's disk would be a way to fill it.
            log_config=LogConfig(type="none"),
            device_requests=_all_gpus() if is_cuda else None,
            # The proxy of the user's Docker configuration is no environment variable of the container: it may hold a
            # password, and there is no network.
            use_config_proxy=False,
        )


def check_gpu(on: Engine, image: Image) -> None:
    """Raise :class:`BadInput` where a container of this engine gets no GPU: one sentence instead of a record each."""
    import docker.errors

    with engine.errors():
        try:
            look = "import glob, sys; sys.exit(not glob.glob('/dev/nvidia[0-9]*'))"
            if engine.run_once(on, image.digest, look, device_requests=_all_gpus())[0] == 0:
                return
            why = "the container has no /dev/nvidia0"
        except docker.errors.APIError as error:
            why = str(error.explanation)
    raise BadInput(
        f"The engine at {on.host} gives containers no GPU ({why}); install the NVIDIA container toolkit there and "
        "restart the engine, or use --device cpu."
    )


def _all_gpus() -> list[Any]:
    from docker.types import DeviceRequest

    return [DeviceRequest(count=-1, capabilities=[["gpu"]])]


def processors(threads: int) -> str:
    """Return the processors to pin to, of those that this process may use."""
    return ",".join(map(str, sorted(os.sched_getaffinity(0))[:threads]))


def inside_environment(threads: int, extra: Mapping[str, str]) -> dict[str, str]:
    """Nothing of this machine's environment enters a container."""
    return {
        **variables.of_every_worker(threads, CODE),
        "DPBENCH_CACHE": str(CACHE),
        "HOME": "/tmp",
        # Nobody has no name, and some libraries ask for one.
        "USER": "nobody",
        "LOGNAME": "nobody",
        **extra,
    }


def _end_state(container: Any) -> dict[str, Any]:
    """Return how it ended; ended by force where its streams are over and it is not."""
    import docker.errors

    deadline = time.monotonic() + STOP_SECONDS
    while True:
        try:
            container.reload()
        except docker.errors.NotFound:  # somebody else removed it
            return {"ExitCode": 128 + signal.SIGKILL}
        state: dict[str, Any] = container.attrs["State"]
        if not state["Running"]:
            return state
        if time.monotonic() > deadline:
            engine.kill(container)
        time.sleep(0.05)


def _write(path: Path, content: bytes) -> None:
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    part.write_bytes(content)
    part.replace(path)


class Outcome:
    """Output of a container and how it ended. ``is_over``: its streams ended by themselves; ``is_lost``: the connection
    to them broke."""

    def __init__(self) -> None:
        self.result: Event = {}
        self.files: dict[str, bytearray] = {}
        self.startup_seconds: float | None = None
        self.tail = ""
        self.is_over = False
        self.is_lost = False
        self.is_complete = False

    def settled(self, state: Mapping[str, Any], limits: Limits, says_oom: bool = True) -> Outcome:
        """Return the result with the engine's word on how it ended. ``says_oom``: whether it can be counted on to say
        that the memory limit did it (Podman on cgroup v1 cannot)."""
        code = int(state.get("ExitCode", 0))
        is_oom = bool(state.get("OOMKilled"))
        if not self.result:
            if is_oom:
                reason = f"killed at the memory limit of {limits.memory_bytes / 2**30:.1f} GiB (the container's)."
                self.result = failed("oom", reason)
            elif self.is_lost:  # by what the harness saw: an exit code is the contestant's to choose
                raise EngineGone("the connection to the container was lost")
            else:
                how = f"was killed by signal {code - 128}" if code > 128 else f"ended with exit code {code}"
                if code == 128 + signal.SIGKILL and not says_oom:
                    how += f" (by the memory limit of {limits.memory_bytes / 2**30:.1f} GiB or another hand)"
                if code == ORPHANED:
                    how += ", which says that the harness is gone, and it is not,"
                by_others = code - 128 in {int(number) for number in FROM_OUTSIDE} and says_oom
                self.result = failed("crashed", f"the container {how} before it had a result.", by_others)
        elif self.result["state"] == "ok" and not self.is_complete:
            self.result = failed("crashed", f"the container ended (exit code {code}) before its results were sent.")
        reason = str(self.result.get("reason"))
        if "No space left on device" in reason:
            # The container's own limit, not the disk of this machine, for which the run would stop.
            sizes = f"results {RESULTS_BYTES // 2**20} MiB, /tmp {SCRATCH_BYTES // 2**20} MiB"
            reason = reason.replace("No space left on device", f"the container's limit of file space ({sizes})")
            self.result["reason"] = reason
        self.result["log_tail"] = self.tail
        self.result["container"] = {"startup_seconds": self.startup_seconds, "exit_code": code, "oom_killed": is_oom}
        return self


def _follow(
    stream: Stream, start: float, limits: Limits, on_event: Callable[[Event], None], referee: Referee | None = None
) -> Outcome:
    """Passes events on until the streams end or the time is over. Collected files never outgrow the results folder."""
    outcome = Outcome()
    patience = Patience(limits.timeout_seconds)
    collected = 0
    shown = b""
    try:
        while True:
            line = stream.inbox.get(POLL_SECONDS)
            if stream.inbox.is_endless and not line:
                why = f"the container {ENDLESS.format(LONGEST_LINE // 2**20)}."
                outcome.result = outcome.result or failed("crashed", why)
                return outcome
            if line is None:
                outcome.is_over, outcome.is_lost = not stream.is_lost, stream.is_lost
                return outcome
            # Where the time is over, what was said before is heard first.
            if patience.is_over and (not line or patience.left < -GRACE_SECONDS):
                why = f"no result within {limits.timeout_seconds:.0f} s."
                outcome.result = outcome.result or failed("timeout", why)
                return outcome
            if not line:
                if stream.tail != shown:
                    shown = stream.tail
                    on_event({"event": "log", "text": _last_line(shown)})
                continue
            event = event_of(line)
            if referee is not None:
                referee.attend(event)
            match event.get("event"):
                case "started" if outcome.startup_seconds is None:  # a later one is not of our making
                    outcome.startup_seconds = time.monotonic() - start
                case "file":
                    name, content = _part_of_file(event)
                    collected += len(content)
                    if collected <= RESULTS_BYTES:
                        outcome.files.setdefault(name, bytearray()).extend(content)
                case "done":
                    outcome.is_complete = True
                case "result":
                    outcome.result = event if event.get("state") in STATES else failed("crashed", MALFORMED)
                    on_event(outcome.result)
                case _:
                    on_event(event)
    finally:
        if outcome.result and patience.was_stopped:
            outcome.result["harness_stopped"] = True
        if referee is not None:
            referee.close()
        outcome.tail = stream.tail.decode(errors="replace")
        stream.close()


STATES = list(get_args(State))
MALFORMED = "the container sent a result without a state that there is."


def _without_gpu(why: str) -> Outcome:
    """Return the result of a container that the engine did not start."""
    outcome = Outcome()
    outcome.result = failed("crashed", f"the engine gave the container no GPU: {why}")
    outcome.settled({}, Limits(0, 0.0))
    outcome.result["container"]["exit_code"] = None
    return outcome


def _last_line(log: bytes) -> str:
    """Return the last line that says something."""
    lines = [line for line in log.decode(errors="replace").splitlines() if line.strip()]
    return lines[-1].strip() if lines else ""


def _part_of_file(event: Event) -> tuple[str, bytes]:
    """Parse a part of a file. What comes out of a container is the contestant's word: nonsense is an empty file, not an
    error of ours."""
    with suppress(KeyError, ValueError, TypeError):
        return str(event["name"]), base64.b64decode(event["data"])
    return "", b""
