"""The backend that ``--isolation`` names."""

from __future__ import annotations

from typing import Any

from harness.environments.backend import Backend
from harness.environments.in_process import InProcessBackend
from harness.environments.venv import VenvBackend
from harness.errors import BadInput

ISOLATIONS = ("venv", "docker", "inprocess")


def check_isolation(isolation: str) -> None:
    """Raise :class:`BadInput` for a name that is none."""
    if isolation not in ISOLATIONS:
        raise BadInput(f"--isolation is {isolation!r}: choose venv, docker, or inprocess (tests only).")


def backend_of(isolation: str, device: str, **of_containers: Any) -> Backend:
    """Return the backend of ``venv``, ``docker`` or ``inprocess``, connected where it is an engine's.

    Args:
        isolation: its name.
        device: ``cpu`` or ``cuda``, which containers then get.
        of_containers: as :meth:`harness.environments.containers.backend.ContainerBackend.connected`.

    Raises:
        BadInput: no container engine answers, or it lacks what is needed.
    """
    if isolation == "docker":
        # The SDK takes longer to import than the harness to start.
        from harness.environments.containers.backend import ContainerBackend

        return ContainerBackend.connected(device, **of_containers)
    return InProcessBackend() if isolation == "inprocess" else VenvBackend()
