"""A container engine for tests: the one that is reachable, or our own where Docker is installed and we are root."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path
from typing import Any

import docker
import docker.errors
import requests

from harness import engine, images
from harness.errors import BadInput


class OwnEngine:
    """A dockerd with everything it has in one folder. Listens on a socket, and on a port of this machine: who comes by
    the port cannot count on seeing our files, as with an engine on another machine."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.start()

    @property
    def host(self) -> str:
        return f"unix://{self.folder}/docker.sock"

    @property
    def remote_host(self) -> str:
        return f"tcp://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Raises RuntimeError with the end of its log where it does not answer."""
        (self.folder / "pid").unlink(missing_ok=True)
        folders = ["--data-root", self.folder / "root", "--exec-root", self.folder / "exec", "-p", self.folder / "pid"]
        listen = ["-H", self.host, "-H", self.remote_host, "--iptables=false", "--bridge=none", "--tls=false"]
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
