"""The container engine: how it is reached, what it can do, and what this harness has left on it.

Docker by its API, and whatever speaks it (Podman's service). The SDK is imported only here and only when containers are
asked for.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import psutil

from harness.errors import BadInput

HOST = "DOCKER_HOST"
OWNER = "dpbench.owner"
"""Label of everything that must not outlive the process that made it."""
DEADLINE = "dpbench.deadline"
"""Label: seconds since 1970 after which even a foreign owner's container is nobody's."""
API_SECONDS = 600
"""A build step sends nothing while it installs."""


class EngineGone(BadInput):
    """The engine stopped answering in the middle of something. Where nobody waits for it, the user has to start it."""


@dataclass(frozen=True)
class Engine:
    """``client``: a ``docker.DockerClient``. ``is_remote``: it may not see this machine's files, so that code and data
    have to be sent."""

    client: Any
    host: str
    is_remote: bool
    facts: dict[str, Any]

    @property
    def name(self) -> str:
        """For records: kind and version."""
        return f"{self.facts['kind']} {self.facts['version']}"


def host() -> str:
    """What ``DOCKER_HOST`` says, else Docker's usual socket."""
    return os.environ.get(HOST) or "unix:///var/run/docker.sock"


def connect() -> Engine:
    """The engine of ``DOCKER_HOST``. Raises :class:`BadInput` with the remedy where none answers."""
    import docker
    from docker.errors import DockerException

    where = host()
    try:
        # The system's ssh knows the user's keys and host names; the SDK's own would need another library.
        client = docker.from_env(timeout=API_SECONDS, use_ssh_client=where.startswith("ssh://"))
        facts = _facts(client)
    except (DockerException, OSError) as error:
        raise BadInput(_why_unreachable(where, error)) from None
    return Engine(client, where, not where.startswith(("unix://", "npipe://")), facts)


def _facts(client: Any) -> dict[str, Any]:
    info, version = client.info(), client.version()
    names = [part.get("Name", "") for part in version.get("Components", [])]
    kind = "podman" if any("podman" in name.lower() for name in names) else "docker"
    return {
        "kind": kind,
        "version": str(version["Version"]),
        "api": str(version["ApiVersion"]),
        "id": str(info.get("ID", "")),
        "cpus": int(info["NCPU"]),
        "memory_bytes": int(info["MemTotal"]),
        "cgroup": str(info.get("CgroupVersion", "1")),
        "storage": str(info.get("Driver", "")),
        "runtimes": sorted(info.get("Runtimes") or {}),
        "rootless": any("rootless" in option for option in info.get("SecurityOptions") or []),
        "memory_limit": bool(info.get("MemoryLimit", True)),
        "pids_limit": bool(info.get("PidsLimit", True)),
        "cpuset": bool(info.get("CPUSet", True)),
    }


def _why_unreachable(where: str, error: Exception) -> str:
    text = str(error)
    path = where.removeprefix("unix://")
    if "Permission denied" in text:
        why, remedy = "this user may not open its socket", "join the group `docker` and log in again, or use rootless"
    elif where.startswith("unix://") and not Path(path).exists():
        why, remedy = f"there is no socket {path}", "install and start Docker or `podman system service`"
    elif "Connection refused" in text:
        why, remedy = "nothing listens there", "start the engine (`systemctl start docker`)"
    else:
        why, remedy = " ".join(text.split())[:200], "see `dpbench doctor`"
    return f"No container engine answers at {where}: {why}; {remedy}, set {HOST}, or use --isolation venv."


@lru_cache
def _boot_time() -> int:
    return int(psutil.boot_time())


def _machine() -> str:
    """This machine and this boot: a process number means nothing on another."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    text = boot.read_text() if boot.exists() else f"{os.uname().nodename} {_boot_time()}"
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def owner() -> str:
    """Names this process for ever: machine, boot, number, time of start."""
    return f"{_machine()}:{os.getpid()}:{int(psutil.Process().create_time() * 100)}"


def labels(seconds: float) -> dict[str, str]:
    """Of what this process makes and must have removed ``seconds`` from now."""
    return {OWNER: owner(), DEADLINE: str(int(time.time() + seconds))}


def is_orphan(found: dict[str, str]) -> bool:
    """Whether the owner named by the labels is dead (or, on another machine, must have been done by now)."""
    machine, _, process = found.get(OWNER, "").partition(":")
    if machine != _machine():
        return time.time() > float(found.get(DEADLINE, "0"))
    number, _, started = process.partition(":")
    try:
        return int(psutil.Process(int(number)).create_time() * 100) != int(started)
    except (psutil.Error, ValueError):
        return True


def orphans(engine: Engine, mine: bool = False) -> list[Any]:
    """Containers, then volumes, whose owner is gone (and with ``mine`` this process's own)."""
    filters = {"label": OWNER}
    with errors():
        containers = engine.client.containers.list(all=True, filters=filters, ignore_removed=True)
        volumes = engine.client.volumes.list(filters=filters)
    labelled = [(one, one.labels) for one in containers] + [(one, one.attrs.get("Labels") or {}) for one in volumes]
    return [one for one, found in labelled if is_orphan(found) or (mine and found.get(OWNER) == owner())]


def sweep(engine: Engine, mine: bool = False) -> list[str]:
    """Removes :func:`orphans`; their names."""
    from docker.models.containers import Container

    found = orphans(engine, mine)
    with errors():
        for one in found:
            if isinstance(one, Container):
                remove(one)
            else:
                with suppress(_docker().errors.APIError):
                    one.remove(force=True)
    return [one.name for one in found]


def remove(container: Any) -> None:
    """Ends and removes it with its anonymous volumes; it may be gone already, or be going."""
    with suppress(_docker().errors.APIError):
        container.remove(force=True, v=True)


def kill(container: Any) -> None:
    """Ends it; it may have ended already."""
    with suppress(_docker().errors.APIError):
        container.kill()


@contextmanager
def errors() -> Iterator[None]:
    """Turns a lost connection into :class:`EngineGone`, and what the engine refuses into :class:`BadInput`."""
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
