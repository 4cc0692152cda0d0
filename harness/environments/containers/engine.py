"""The container engine: how it is reached, what it can do, and what this harness has left on it.

Docker by its API, and whatever speaks it (Podman's service). The SDK is imported only here and only when containers are
asked for.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import psutil

from harness.data.store import home
from harness.environments.containers import seccomp
from harness.errors import BadInput

HOST = "DOCKER_HOST"
LOCAL = ("unix://", "npipe://")
OWNER = "dpbench.owner"
"""Label of everything that must not outlive the process that made it."""
DEADLINE = "dpbench.deadline"
"""Label: seconds since 1970 after which a container counts as abandoned, even if its owner is another machine."""
DELEGATE = "run the engine as root, or on cgroup v2 with these controllers delegated to its user"
ONCE_SECONDS = 900.0
NOBODY = "65534:65534"
RESOURCES = {"nofile": 16384, "nproc": 8192}
API_SECONDS = 600
"""A build step sends nothing while it installs."""


class EngineGone(BadInput):
    """The engine stopped answering in the middle of something. Where nobody waits for it, the user has to start it."""


@dataclass(frozen=True)
class Engine:
    """An engine on this machine, whose files it mounts. ``client``: a ``docker.DockerClient``."""

    client: Any
    host: str
    facts: dict[str, Any]

    @property
    def name(self) -> str:
        """Return the engine's kind and version, for records."""
        return f"{self.facts['kind']} {self.facts['version']}"


def host() -> str:
    """Return what ``DOCKER_HOST`` says, else Docker's usual socket."""
    return os.environ.get(HOST) or "unix:///var/run/docker.sock"


def connect() -> Engine:
    """Return the engine of ``DOCKER_HOST``. Raises :class:`BadInput` with the remedy where none answers."""
    import docker
    from docker.errors import DockerException

    where = host()
    if not where.startswith(LOCAL):
        raise BadInput(
            f"{HOST} is {where}, but containers have to see this machine's files, and only an engine at unix:// does; "
            "run dpbench on that machine, or use --isolation venv."
        )
    try:
        client = docker.from_env(timeout=API_SECONDS)
        facts = _facts(client)
    except (DockerException, OSError, ValueError) as error:
        raise BadInput(_why_unreachable(where, error)) from None
    return Engine(client, where, facts)


def _facts(client: Any) -> dict[str, Any]:
    info, version = client.info(), client.version()
    names = [part.get("Name", "") for part in version.get("Components", [])]
    kind = "podman" if any("podman" in name.lower() for name in names) else "docker"
    return {
        "kind": kind,
        "version": str(version["Version"]),
        "api": str(version["ApiVersion"]),
        "id": str(info.get("ID", "")) if kind == "docker" else _id(info),
        "cpus": int(info["NCPU"]),
        "memory_bytes": int(info["MemTotal"]),
        "cgroup": str(info.get("CgroupVersion", "1")),
        "storage": str(info.get("Driver", "")),
        "seccomp": kind == "docker" and any("seccomp" in option for option in info.get("SecurityOptions") or []),
        "runtimes": sorted(info.get("Runtimes") or {}),
        "rootless": any("rootless" in option for option in info.get("SecurityOptions") or []),
        "memory_limit": bool(info.get("MemoryLimit", True)),
        "pids_limit": bool(info.get("PidsLimit", True)),
        "cpuset": bool(info.get("CPUSet", True)),
    }


def _id(info: Mapping[str, Any]) -> str:
    """Podman says another ID every time it is asked; the folder of its images on that machine is what stays."""
    return hashlib.sha256(f"{info.get('Name')}\n{info.get('DockerRootDir')}".encode()).hexdigest()[:12]


def run_once(on: Engine, digest: str, code: str, **more: Any) -> tuple[int, bytes]:
    """Return (exit code, standard output) of ``python -c code`` in a container of one of our images: hardened, and gone
    afterwards even where it could not be started."""
    container = on.client.containers.create(
        digest,
        ["-c", code],
        network_mode="none",
        user=NOBODY,
        cap_drop=["ALL"],
        security_opt=security(on),
        read_only=True,
        use_config_proxy=False,
        labels=labels(ONCE_SECONDS),
        ulimits=ulimits(),
        **more,
    )
    try:
        container.start()
        status = int(container.wait()["StatusCode"])
        return status, container.logs(stdout=True, stderr=False)
    finally:
        remove(container)


def security(on: Engine) -> list[str]:
    """Return options for every container: no privileges to gain, and where the engine takes one, our own list of system
    calls (Podman's service takes none by this way, and has its own)."""
    options = ["no-new-privileges:true"]
    return [*options, f"seccomp={seccomp.profile()}"] if on.facts.get("seccomp") else options


def ulimits() -> list[Any]:
    """Return limits for every container, because an engine's own default may lie above what it may set (Podman as a
    service does)."""
    from docker.types import Ulimit

    return [Ulimit(name=name, soft=number, hard=number) for name, number in RESOURCES.items()]


def _why_unreachable(where: str, error: Exception) -> str:
    text = str(error)
    kind, _, there = where.partition("://")
    if "Permission denied" in text:
        why = "this user may not open its socket"
        remedy = "join its group (`sudo usermod -aG docker $USER`, then log in again), or use a rootless engine"
    elif kind == "unix" and not Path(there).exists():
        found = elsewhere(where)
        why = f"there is no socket {there}"
        remedy = f"set {HOST}={found[0]}, where there is one" if found else "install Docker or Podman and start it"
    elif "Connection refused" in text:
        why = "nothing listens there"
        remedy = "start the engine (`systemctl start docker`)"
    else:
        why, remedy = " ".join(text.split())[:200], "repair the engine or the way to it"
    other = "" if remedy.startswith(f"set {HOST}") else f"set {HOST} to another, "
    return f"No container engine answers at {where}: {why}; {remedy}, {other}or use --isolation venv."


def elsewhere(than: str) -> list[str]:
    """Return addresses of engines that Docker's command line, or a rootless installation, would use instead."""
    from docker.context import ContextAPI

    runtime, own = Path(os.environ.get("XDG_RUNTIME_DIR", "/nowhere")), home() or Path("/nowhere")
    usual = (
        runtime / "docker.sock",
        own / ".docker" / "desktop" / "docker.sock",
        own / ".colima" / "default" / "docker.sock",
        runtime / "podman" / "podman.sock",
        Path("/run/podman/podman.sock"),
        Path("/var/run/docker.sock"),
    )
    found = [f"unix://{path}" for path in usual if os.access(path, os.R_OK | os.W_OK)]
    with suppress(Exception):  # a broken configuration is not what was asked about
        context = ContextAPI.get_current_context()
        if context.Name != "default" and context.Host:
            found.insert(0, str(context.Host))
    return [host for host in found if host != than]


def unlimited(facts: Mapping[str, Any]) -> list[str]:
    """Return what the engine cannot limit, though it would start a container that asks for it."""
    names = {"memory_limit": "memory", "pids_limit": "processes", "cpuset": "processors"}
    return [name for fact, name in names.items() if not facts.get(fact, True)]


@lru_cache
def _boot_time() -> int:
    return int(psutil.boot_time())


def _machine() -> str:
    """This machine and this boot: a process number means nothing on another."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    text = boot.read_text() if boot.exists() else f"{os.uname().nodename} {_boot_time()}"
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def owner() -> str:
    """Return a name that no other process will have: machine, boot, number, time of start."""
    return f"{_machine()}:{os.getpid()}:{int(psutil.Process().create_time() * 100)}"


def labels(seconds: float) -> dict[str, str]:
    """Return the labels of what this process makes and must have removed ``seconds`` from now."""
    return {OWNER: owner(), DEADLINE: str(int(time.time() + seconds))}


def is_orphan(found: dict[str, str]) -> bool:
    """Return whether the owner named by the labels is dead (or, on another machine, must have been done by now)."""
    machine, _, process = found.get(OWNER, "").partition(":")
    if machine != _machine():
        return time.time() > float(found.get(DEADLINE, "0"))
    number, _, started = process.partition(":")
    try:
        process_there = psutil.Process(int(number))
        # One whose parent has not asked how it ended does nothing any more.
        is_dead = process_there.status() == psutil.STATUS_ZOMBIE
        return is_dead or int(process_there.create_time() * 100) != int(started)
    except (psutil.Error, ValueError):
        return True


def orphans(engine: Engine, mine: bool = False) -> list[Any]:
    """Return containers whose owner is gone (and with ``mine`` this process's own)."""
    filters = {"label": OWNER}
    with errors():
        found = engine.client.containers.list(all=True, filters=filters, ignore_removed=True)
    return [one for one in found if is_orphan(one.labels) or (mine and one.labels.get(OWNER) == owner())]


def sweep(engine: Engine, mine: bool = False) -> list[str]:
    """Remove :func:`orphans`; their names."""
    found = orphans(engine, mine)
    with errors():
        for one in found:
            remove(one)
    return [one.name for one in found]


def remove(container: Any) -> None:
    """End and removes it with its anonymous volumes; it may be gone already, or be going."""
    with suppress(_docker().errors.APIError):
        container.remove(force=True, v=True)


def kill(container: Any) -> None:
    """End it; it may have ended already."""
    with suppress(_docker().errors.APIError):
        container.kill()


@contextmanager
def errors() -> Iterator[None]:
    """Turn a lost connection into :class:`EngineGone`, and what the engine refuses into :class:`BadInput`."""
    import docker.errors
    import requests.exceptions
    import urllib3.exceptions

    try:
        yield
    except docker.errors.APIError as error:
        why = " ".join(str(error.explanation or error).split())[:300]
        raise BadInput(f"The container engine refused: {why}; see `dpbench doctor`.") from error
    except (
        requests.exceptions.RequestException,
        urllib3.exceptions.HTTPError,
        docker.errors.DockerException,
        OSError,
    ) as error:
        why = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        raise EngineGone(
            f"The container engine stopped answering ({why}); start it and run the same command again."
        ) from error


def _docker() -> Any:
    import docker
    import docker.errors

    return docker
