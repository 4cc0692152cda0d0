"""Workers and tools in containers of one engine: images, executors, what the records say of both."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from harness.environments.backend import (
    AnyContestant,
    Argument,
    Input,
    LocalBackend,
    Log,
    Output,
    Provenance,
    Resources,
    place_of,
)
from harness.environments.containers import engine, images, lockfile
from harness.environments.containers.engine import Engine
from harness.environments.containers.executor import INSIDE, Docker, check_gpu
from harness.environments.containers.images import Image
from harness.environments.containers.mounts import Mounts
from harness.environments.executor import WORKER, Executor, ToolFault
from harness.environments.unavailable import Unavailable
from harness.environments.venv import EnvironmentFault
from harness.errors import BadInput
from harness.plan.registry import Framework, frameworks
from harness.store import cache, record, surroundings
from harness.worker import machine, speed_probe
from harness.worker.container_entrypoint import RESULTS
from harness.worker.result import Result

TOOL_SECONDS = 900.0


class ContainerBackend:
    """A fresh container for every process, of the image that the framework's lock describes.

    Args:
        on: the engine.
        device: ``cuda`` for containers that get the GPUs.
        any_image: measure in images that do not match their lock, too.
        otherwise: the remedy that is named where an image does not match.
        image: this one for every contestant, whatever is locked.
    """

    def __init__(
        self,
        on: Engine,
        device: str,
        any_image: bool = False,
        otherwise: str = images.ANY_IMAGE,
        image: Image | None = None,
    ) -> None:
        self.engine = on
        self.device = device
        self.any_image = any_image
        self.otherwise = otherwise
        self._named = image
        self._mounts = Mounts()
        self._images: dict[tuple[Path, str], Image | Unavailable] = {}
        self._described: dict[str, str] = {}
        self._gives_gpu = False
        self._matches: dict[tuple[str, Path, str], bool] = {}

    @classmethod
    def connected(cls, device: str, named: str | None = None, option: str = "", **more: Any) -> ContainerBackend:
        """Return the backend of the engine that ``DOCKER_HOST`` names.

        Args:
            device: as in the class.
            named: an image of that engine, by tag or digest, for every contestant.
            option: that named it, for messages.
            more: as in the class.

        Raises:
            BadInput: no engine answers, it cannot limit a contestant, or it has no such image.
        """
        on = engine.connect()
        if absent := set(engine.unlimited(on.facts)) & {"memory", "processes"}:
            raise BadInput(
                f"The engine at {on.host} cannot limit {' and '.join(sorted(absent))} (cgroup "
                f"v{on.facts['cgroup']}), so that a contestant could take all; {engine.DELEGATE}, or use "
                "--isolation venv."
            )
        image = images.named(on, named, option) if named is not None else None
        return cls(on, device, image=image, **more)

    def prepare(self, contestants: Iterable[AnyContestant], log: Log) -> None:
        """Remove what an earlier, killed run left on the engine, and build the images that are missing."""
        for name in engine.sweep(self.engine):
            log(f"Removed {name}, which a run that was killed had left on the engine")
        for framework in {c.framework.name: c.framework for c in contestants}.values():
            image = self._image(framework, log)
            self._described[framework.name] = image.reason if isinstance(image, Unavailable) else image.digest

    def _image(self, framework: Framework, log: Log) -> Image | Unavailable:
        return self._named or self._locked_image(framework, log)

    def _locked_image(self, framework: Framework, log: Log) -> Image | Unavailable:
        """Two trees may lock the same pins in different files."""
        key = framework.root, framework.lock_hash
        if key not in self._images:
            try:
                self._images[key] = images.ensure(
                    framework, self.engine, log, self.device, self.any_image, self.otherwise
                )
            except EnvironmentFault as fault:
                log(f"{framework.name}: {fault}")
                self._images[key] = Unavailable(str(fault))
        return self._images[key]

    def executor(self, contestant: AnyContestant, log: Log, module: str = WORKER) -> Executor | Unavailable:
        """Raise :class:`BadInput` where there should be a GPU and the engine gives none."""
        image = self._image(contestant.framework, log)
        if isinstance(image, Unavailable):
            return image
        if self.device == "cuda" and not self._gives_gpu:
            check_gpu(self.engine, image)
            self._gives_gpu = True
        environment, root = contestant.variant.environment, contestant.framework.root
        return Docker(self.engine, image, self._mounts, environment, module, root)

    def run_tool(self, module: str, arguments: Sequence[Argument], log: Log) -> str:
        """Run the tool in the image of plain PyTorch, and bring here what it writes."""
        image = self._locked_image(frameworks()["pytorch"], log)
        if isinstance(image, Unavailable):
            raise EnvironmentFault(image.reason)
        inside: dict[Path, str] = {}
        words = [a if isinstance(a, str) else _path_inside(a, inside) for a in arguments]
        outcome = Docker(self.engine, image, self._mounts).tool(module, words, inside, TOOL_SECONDS)
        for output in (a for a in arguments if isinstance(a, Output)):
            for path in [output.path / name for name in output.names] or [output.path]:
                if path.name not in outcome.files:
                    raise ToolFault(f"{module} left no {path.name}.")
                cache.write_atomically(path, bytes(outcome.files[path.name]))
        return str(outcome.result["output"])

    def environment_id(self, framework: Framework) -> str:
        return self._named.pins if self._named is not None else framework.lock_hash

    def resources(self, device: str, threads: int | None, memory_bytes: int | None, seconds: float) -> Resources:
        return LocalBackend().resources(device, threads, memory_bytes, seconds)

    def describe(self) -> dict[str, Any]:
        return {"images": self._described, "engine": self.engine.facts["id"]}

    def place(self, device: str, threads: int) -> dict[str, Any]:
        """Return the facts; a container has none of this process's variables, and a quota of its own."""
        return surroundings.facts(place_of(device, threads))

    def describe_process(self, framework: Framework, result: Result | None) -> Provenance:
        image = self._named or self._images.get((framework.root, framework.lock_hash))
        container = result.container if result else None
        return Provenance(
            image=self._of_record(image, framework) if image and not isinstance(image, Unavailable) else None,
            container=record.Container(engine=self.engine.name, **container) if container else None,
            machine={**machine.describe(), **machine.state()},
        )

    def _of_record(self, image: Image, framework: Framework) -> record.Image:
        key = image.digest, framework.root, framework.lock_hash
        if key not in self._matches:
            self._matches[key] = self._is_locked(image, framework)
        matches = self._matches[key]
        return record.Image(tag=image.tag, digest=image.digest, base=image.base, lock=image.lock, matches_lock=matches)

    def _is_locked(self, image: Image, framework: Framework) -> bool:
        """Return whether it is the one that the framework's lock describes."""
        try:
            lock = lockfile.load(framework, self.device)
        except EnvironmentFault:
            return False
        return images.mismatch(image, lock, self.engine, self.device) is None

    def speed_probe(self) -> float | None:
        return speed_probe.seconds()

    def close(self) -> None:
        """Remove what this process has left on the engine, as far as it still answers."""
        with suppress(BadInput):
            engine.sweep(self.engine, mine=True)


def _path_inside(argument: Input | Output, inside: dict[Path, str]) -> str:
    """Return the path as a container sees it; ``inside`` gets what has to be mounted, and where."""
    if isinstance(argument, Output):
        return str(RESULTS if argument.names else RESULTS / argument.path.name)
    folder = inside.setdefault(argument.path, str(INSIDE / "inputs" / str(len(inside))))
    return f"{folder}/{argument.name or argument.path.name}"
