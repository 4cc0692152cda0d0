"""A container engine for tests: the one that is reachable, or our own where Docker is installed and we are root; and a
pretended one, for what needs no isolation."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import docker
import docker.errors
import requests

from harness.environments.containers import engine, images
from harness.environments.containers.executor import Outcome
from harness.environments.executor import OUTPUTS, InProcess, Limits
from harness.environments.referee import Referee
from harness.errors import BadInput
from harness.worker.container_entrypoint import RESULTS
from harness.worker.layer_request import LayerRequest
from harness.worker.request import Request


class OwnEngine:
    """A dockerd with everything it has in one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.start()

    @property
    def host(self) -> str:
        return f"unix://{self.folder}/docker.sock"

    def start(self) -> None:
        """Raises RuntimeError with the end of its log where it does not answer."""
        (self.folder / "pid").unlink(missing_ok=True)
        folders = ["--data-root", self.folder / "root", "--exec-root", self.folder / "exec", "-p", self.folder / "pid"]
        listen = ["-H", self.host, "--iptables=false", "--bridge=none", "--tls=false"]
        log = self.folder / "log"
        with log.open("ab") as output:
            self.process = subprocess.Popen(
                ["dockerd", *map(str, folders), *listen], stdout=output, stderr=output, start_new_session=True
            )
        for _ in range(300):
            if (self.folder / "docker.sock").exists() and self.process.poll() is None and self._answers():
                return
            if self.process.poll() is not None:
                break
            time.sleep(0.2)
        end = " ".join(log.read_text(errors="replace")[-300:].split())
        self.stop()
        raise RuntimeError(f"dockerd does not run here: {end}")

    def _answers(self) -> bool:
        """Whether a request gets its answer: it listens before it has found its containers again."""
        try:
            with contextlib.closing(docker.DockerClient(base_url=self.host, version="1.41", timeout=5)) as client:
                return bool(client.ping())
        except (requests.exceptions.RequestException, docker.errors.DockerException):
            return False

    def kill(self) -> None:
        """As a power cut would, but for the containers' own watchers."""
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.wait()
        # The daemon below it outlives it, and the next engine would give up on finding that one's socket taken.
        for path in (self.folder / "exec").rglob("containerd.pid"):
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(path.read_text()), signal.SIGKILL)
            path.unlink()

    def stop(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            self.process.kill()
        # What a killed engine left running belongs to its folder; a watcher that lives on would hold it.
        for path in (self.folder / "exec").rglob("*.pid"):
            with_number = path.read_text().strip()
            if with_number.isdigit():
                try:
                    os.kill(int(with_number), signal.SIGKILL)
                except ProcessLookupError:
                    continue
        for line in reversed(Path("/proc/mounts").read_text().splitlines()):
            if str(self.folder) in line:
                subprocess.run(["umount", "-l", line.split()[1]], capture_output=True)
        shutil.rmtree(self.folder, ignore_errors=True)


def obtain(folder: Path) -> tuple[Any, OwnEngine | None]:
    """(engine, ours or None), with a base; an engine of ours lives in ``folder``, an empty one that pytest does not
    tidy up (it would trip over the mounts). Raises RuntimeError: why there is none."""
    own = None
    try:
        on = engine.connect()
        folder.rmdir()
    except BadInput as fault:
        if os.geteuid() != 0 or shutil.which("dockerd") is None:
            folder.rmdir()
            raise RuntimeError(f"no engine is reachable, and none can be started here ({fault})") from None
        own = OwnEngine(folder)
        os.environ[engine.HOST] = own.host
        on = engine.connect()
    try:
        if images.base_digest(on) is None:
            _make_base(on)
    except BaseException:
        if own is not None:
            own.stop()
        raise
    return on, own


def _make_base(on: Any) -> None:
    try:
        images.make_base(on, print)
    except BadInput as fault:
        try:
            images.make_base(on, print, images.debootstrap(on, print))
        except BadInput as second:
            raise RuntimeError(f"there is no base image: {fault} {second}") from None


class PretendedEngine:
    """Has images, by name; its containers run in this process, with the paths that they would see translated back by
    their mounts. ``contained``: (image's digest, order, inside -> outside) of each. ``versions``: digest -> what the
    worker finds installed. ``tools``: module -> what takes its arguments and returns what it prints."""

    def __init__(self) -> None:
        self.images: dict[str, Any] = {}
        self.versions: dict[str, dict[str, str]] = {}
        self.contained: list[tuple[str, dict[str, Any], dict[str, str]]] = []
        self.tools: dict[str, Callable[[list[str]], str]] = {}
        nothing = SimpleNamespace(list=lambda **asked: [])
        client = SimpleNamespace(images=SimpleNamespace(get=self._get), containers=nothing)
        facts = {"kind": "pretended", "version": "1", "id": "e", "cpus": 2, "memory_bytes": 2**30}
        self.on = engine.Engine(client, "unix:///pretended.sock", facts)

    def _get(self, name: str) -> Any:
        if name not in self.images:
            raise docker.errors.ImageNotFound(name)
        return self.images[name]

    def add(self, name: str, number: int, lock: str = "l" * 64, versions: Mapping[str, str] | None = None) -> str:
        """An image of that tag; its digest, by which it is found, too."""
        digest = f"sha256:{number:064x}"
        labels = {images.LOCK_LABEL: lock, images.BASE_LABEL: "sha256:" + "b" * 64, images.PINS_LABEL: f"pins-{number}"}
        self.images[name] = self.images[digest] = SimpleNamespace(id=digest, labels=labels, attrs={"Size": 2**20})
        self.versions[digest] = dict(versions or {})
        return digest

    def contain(
        self, place: Any, order: dict[str, Any], mounts: list[Any], limits: Limits, threads: int, *rest: Any
    ) -> Outcome:
        """In the place of :meth:`harness.environments.containers.executor.Docker._contain`."""
        outside = {mount["Target"]: mount["Source"] for mount in mounts}
        assert all(mount["ReadOnly"] for mount in mounts)
        self.contained.append((place.image.digest, order, outside))
        outcome = Outcome()
        with tempfile.TemporaryDirectory() as results:
            outside = {**outside, str(RESULTS): results}
            if order["kind"] == "tool":
                words = [_outside(word, outside) for word in order["arguments"]]
                outcome.result = {"event": "result", "state": "ok", "output": self.tools[order["module"]](words)}
            else:
                data = json.loads(order["request"])
                for field in ("folder", "reference", *OUTPUTS):
                    if data.get(field):
                        data[field] = _outside(data[field], outside)
                kind = LayerRequest if order["worker"] == "harness.worker.layers" else Request
                referee = next((one for one in rest if isinstance(one, Referee)), None)
                result = InProcess(order["worker"]).run(kind(**data), limits, lambda event: None, referee)
                outcome.result = replace(result, versions=self.versions[place.image.digest]).as_event()
            outcome.files = {path.name: bytearray(path.read_bytes()) for path in Path(results).iterdir()}
        outcome.is_complete = True
        return outcome.settled({"ExitCode": 0}, limits)


def _outside(path: str, mounts: dict[str, str]) -> str:
    inside = max((one for one in mounts if path.startswith(one)), key=len, default=None)
    return path if inside is None else mounts[inside] + path.removeprefix(inside)
