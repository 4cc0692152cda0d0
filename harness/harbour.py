"""What a run needs of a container engine: images, places, and two tools that need a torch (reference, evaluation)."""

from __future__ import annotations

import json
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from harness import cache, engine, gatekeeper, images, record, wheelhouse
from harness.container import CACHE, INSIDE, Docker, Luggage
from harness.container_main import RESULTS
from harness.data import store
from harness.engine import Engine
from harness.env import EnvironmentFault, Say
from harness.errors import BadInput
from harness.images import Image
from harness.isolation import ToolFault
from harness.registry import Contestant, Framework, frameworks

TOOL_SECONDS = 900.0


class Harbour:
    """Open it before anything is measured: whatever an earlier, killed run left on the engine is removed first."""

    def __init__(self, device: str, any_image: bool) -> None:
        self.engine: Engine = engine.connect()
        self.device = device
        self.any_image = any_image
        self.luggage = Luggage(self.engine)
        self._images: dict[str, Image | str] = {}
        self._matches: dict[str, bool] = {}

    def prepare(self, contestants: Iterable[Contestant], say: Say) -> dict[str, str]:
        """Sweeps, and builds what is missing. The digest of each framework's image, for the plan; why there is none."""
        for name in engine.sweep(self.engine):
            say(f"Removed {name}, which a run that was killed had left on the engine")
        found = {c.framework.name: self.image(c.framework, say) for c in contestants}
        return {name: image if isinstance(image, str) else image.digest for name, image in found.items()}

    def image(self, framework: Framework, say: Say) -> Image | str:
        """The image, or why there is none."""
        key = framework.lock_hash
        if key not in self._images:
            try:
                image = images.ensure(framework, self.engine, say, self.device, self.any_image)
                lock = wheelhouse.load(framework, self.device)
                self._matches[image.tag] = images.mismatch(image, lock, self.engine, self.device) is None
                self._images[key] = image
            except EnvironmentFault as fault:
                say(f"{framework.name}: {fault}")
                self._images[key] = str(fault)
        return self._images[key]

    def place(self, contestant: Contestant, say: Say) -> Docker | str:
        image = self.image(contestant.framework, say)
        if isinstance(image, str):
            return image
        return Docker(self.engine, image, self.luggage, contestant.variant.environment)

    def record(self, place: Any) -> record.Image:
        """The image of a place of this harbour, for the record."""
        image: Image = place.image
        return record.Image(
            tag=image.tag, digest=image.digest, base=image.base, lock=image.lock, matches_lock=self._matches[image.tag]
        )

    def reference(self, task: str, say: Say) -> None:
        """Puts the float64 reference of a task where the gate looks for it, made in the image of plain PyTorch.

        Raises :class:`ToolFault` or :class:`EnvironmentFault`.
        """
        # The name that gatekeeper.reference gives it; another name would only make it there once more.
        name = f"{task}-{gatekeeper.sources_hash(gatekeeper.REFERENCE_SOURCES)}.npz"
        path = cache.folder("references") / name
        if path.exists():
            return
        say(f"Reference of {task}: float64, one example at a time, in a container")
        arguments = ["--task", task, "--out", str(RESULTS / name)]
        outcome = self._torch(say).tool("frameworks.reference", arguments, {}, TOOL_SECONDS)
        if name not in outcome.files:
            raise ToolFault(f"frameworks.reference left no {name}.")
        cache.write_atomically(path, bytes(outcome.files[name]))

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

    def _torch(self, say: Say) -> Docker:
        image = self.image(frameworks()["pytorch"], say)
        if isinstance(image, str):
            raise EnvironmentFault(image)
        return Docker(self.engine, image, self.luggage)

    def close(self) -> None:
        """Removes what this process has left on the engine, as far as it still answers."""
        with suppress(BadInput):
            engine.sweep(self.engine, mine=True)
