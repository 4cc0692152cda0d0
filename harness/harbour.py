"""What a run needs of a container engine: images, places, and the tools that need a torch (references, evaluation)."""

from __future__ import annotations

import json
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from harness import cache, engine, gatekeeper, images, record, seal, wheelhouse
from harness.container import CACHE, INSIDE, Docker, Luggage, check_gpu
from harness.container_main import RESULTS
from harness.data import store
from harness.engine import Engine
from harness.env import EnvironmentFault, Say
from harness.errors import BadInput
from harness.images import Image
from harness.isolation import WORKER, ToolFault
from harness.layer_registry import LayerContestant
from harness.registry import Contestant, Framework, frameworks
from harness.request import Request

TOOL_SECONDS = 900.0


class Harbour:
    """Open it before anything is measured: whatever an earlier, killed run left on the engine is removed first."""

    def __init__(self, device: str, any_image: bool = False, otherwise: str = images.ANY_IMAGE) -> None:
        self.engine: Engine = engine.connect()
        if absent := set(engine.unlimited(self.engine.facts)) & {"memory", "processes"}:
            raise BadInput(
                f"The engine at {self.engine.host} cannot limit {' and '.join(sorted(absent))} (cgroup "
                f"v{self.engine.facts['cgroup']}), so that a contestant could take all; {engine.DELEGATE}, or use "
                "--isolation venv."
            )
        self.device = device
        self.any_image = any_image
        self.otherwise = otherwise
        self.luggage = Luggage(self.engine)
        self._images: dict[tuple[Path, str], Image | str] = {}
        self._gives_gpu = False
        self._matches: dict[tuple[str, Path, str], bool] = {}

    def prepare(self, contestants: Iterable[Contestant | LayerContestant], say: Say) -> dict[str, str]:
        """Sweeps, and builds what is missing. The digest of each framework's image, for the plan; why there is none."""
        self.sweep(say)
        found = {c.framework.name: self.image(c.framework, say) for c in contestants}
        return {name: image if isinstance(image, str) else image.digest for name, image in found.items()}

    def sweep(self, say: Say) -> None:
        for name in engine.sweep(self.engine):
            say(f"Removed {name}, which a run that was killed had left on the engine")

    def image(self, framework: Framework, say: Say) -> Image | str:
        """The image, or why there is none. Two trees may lock the same pins in different files."""
        key = framework.root, framework.lock_hash
        if key not in self._images:
            try:
                self._images[key] = images.ensure(
                    framework, self.engine, say, self.device, self.any_image, self.otherwise
                )
            except EnvironmentFault as fault:
                say(f"{framework.name}: {fault}")
                self._images[key] = str(fault)
        return self._images[key]

    def place(
        self,
        contestant: Contestant | LayerContestant,
        say: Say,
        module: str = WORKER,
        image: Image | None = None,
    ) -> Docker | str:
        """Where the contestant's workers, ``module``, run, with the code of its own tree; or why there is no such
        place. ``image``: this one, whatever is locked. Raises :class:`BadInput` where there should be a GPU and the
        engine gives none."""
        found = image or self.image(contestant.framework, say)
        if isinstance(found, str):
            return found
        if self.device == "cuda" and not self._gives_gpu:
            check_gpu(self.engine, found)
            self._gives_gpu = True
        environment, root = contestant.variant.environment, contestant.framework.root
        return Docker(self.engine, found, self.luggage, environment, module, root)

    def record(self, place: Any, framework: Framework) -> record.Image:
        """The image of a place of this harbour, for the record."""
        image: Image = place.image
        key = image.digest, framework.root, framework.lock_hash
        if key not in self._matches:
            self._matches[key] = self._is_locked(image, framework)
        matches = self._matches[key]
        return record.Image(tag=image.tag, digest=image.digest, base=image.base, lock=image.lock, matches_lock=matches)

    def _is_locked(self, image: Image, framework: Framework) -> bool:
        """Whether it is the one that the framework's lock describes."""
        try:
            lock = wheelhouse.load(framework, self.device)
        except EnvironmentFault:
            return False
        return images.mismatch(image, lock, self.engine, self.device) is None

    def reference(self, task: str, say: Say) -> None:
        """Puts the float64 reference of a task where the gate looks for it, made in the image of plain PyTorch.

        Raises :class:`ToolFault` or :class:`EnvironmentFault`.
        """
        # The name that gatekeeper.reference gives it; another name would only make it there once more.
        name = f"{task}-{gatekeeper.sources_hash(gatekeeper.REFERENCE_SOURCES)}.npz"
        path = cache.folder("references") / name
        if seal.holds(path, say):
            return
        say(f"Reference of {task}: float64, one example at a time, in a container")
        arguments = ["--task", task, "--out", str(RESULTS / name)]
        outcome = self._torch(say).tool("frameworks.reference", arguments, {}, TOOL_SECONDS)
        if name not in outcome.files:
            raise ToolFault(f"frameworks.reference left no {name}.")
        cache.write_atomically(path, bytes(outcome.files[name]))
        seal.put(path)

    def layer_references(self, names: list[str], folder: Path, say: Say) -> None:
        """Writes the float64 references of layers into ``folder``, made in the image of plain PyTorch.

        Raises :class:`ToolFault` or :class:`EnvironmentFault`.
        """
        say(f"References of {len(names)} layers: float64, one example at a time, in a container")
        arguments = ["--layers", ",".join(names), "--out", str(RESULTS)]
        outcome = self._torch(say).tool("frameworks.layer_reference", arguments, {}, TOOL_SECONDS)
        for name in names:
            if f"{name}.npz" not in outcome.files:
                raise ToolFault(f"frameworks.layer_reference left no {name}.npz.")
            cache.write_atomically(folder / f"{name}.npz", bytes(outcome.files[f"{name}.npz"]))

    def evaluate(self, task: str, data: str, synthetic: bool, weights: Path, say: Say) -> float:
        """Test accuracy of weights. Raises :class:`ToolFault` or :class:`EnvironmentFault`."""
        source = store.folder(data, synthetic)
        test = CACHE / "data" / source.name
        arguments = ["--task", task, "--parameters", str(INSIDE / "weights" / weights.name)]
        arguments += ["--x", str(test / "test_x.npy"), "--y", str(test / "test_y.npy")]
        inputs = {source: str(test), weights: str(INSIDE / "weights")}
        outcome = self._torch(say).tool("frameworks.evaluate", arguments, inputs, TOOL_SECONDS)
        measured: dict[str, Any] = json.loads(outcome.result["output"].strip().splitlines()[-1])
        return float(measured["accuracy"])

    def step_reference(self, request: Request, checked: Path, arguments: list[str], say: Say) -> dict[str, Any]:
        """As :meth:`harness.run.Run.step_reference`, in a container."""
        source = store.folder(request.data, request.synthetic)
        train = CACHE / "data" / source.name
        arguments = [*arguments, "--checked", str(INSIDE / "weights" / checked.name)]
        arguments += ["--x", str(train / "train_x.npy"), "--y", str(train / "train_y.npy")]
        inputs = {source: str(train), checked: str(INSIDE / "weights")}
        outcome = self._torch(say).tool("frameworks.step_reference", arguments, inputs, TOOL_SECONDS)
        measured: dict[str, Any] = json.loads(outcome.result["output"].strip().splitlines()[-1])
        return measured

    def _torch(self, say: Say) -> Docker:
        image = self.image(frameworks()["pytorch"], say)
        if isinstance(image, str):
            raise EnvironmentFault(image)
        return Docker(self.engine, image, self.luggage)

    def close(self) -> None:
        """Removes what this process has left on the engine, as far as it still answers."""
        with suppress(BadInput):
            engine.sweep(self.engine, mine=True)
