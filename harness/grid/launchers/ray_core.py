"""Ray core: one unit a node, whose result travels as an object. No disk is shared."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from harness.errors import BadInput
from harness.grid import plan as plans
from harness.grid.drive import Launcher
from harness.grid.folder import GridFolder
from harness.grid.plan import Unit

SLOT = "dpbench"
"""The resource of which a node that may measure has one. Ray itself only counts."""
HAS_A_SLOT = f"""--resources '{{"{SLOT}": 1}}'"""


def on_node(text: str, name: str) -> bytes:
    """Measure a unit on the node that Ray has chosen, and return its folder.

    Args:
        text: The grid's plan.
        name: The unit's.
    """
    from harness.grid.perform import packed, perform

    plan = plans.parse(text, Path("the plan that Ray carries"))
    with tempfile.TemporaryDirectory(prefix="dpbench-") as folder:
        return packed(perform(plan, plan.find(name), Path(folder)))


class RayCore(Launcher):
    """Tasks of one grid in a cluster of Ray.

    Args:
        grid: Its folder, which only this process sees.
        settings: ``address`` of the cluster (default: the one of this machine), ``num_gpus`` and ``num_cpus`` of a
            unit.

    Raises:
        BadInput: Ray is missing, no cluster answers, a setting is unknown, or no node has room for a unit.
    """

    poll_seconds = 2.0

    def __init__(self, grid: GridFolder, settings: Mapping[str, str]) -> None:
        if unknown := settings.keys() - {"address", "num_gpus", "num_cpus"}:
            raise BadInput(f"--with names {sorted(unknown)[0]!r}: for Ray it is address, num_gpus or num_cpus.")
        try:
            import ray
        except ImportError:
            told = "The launcher ray needs Ray, which is not installed: `pip install 'dpsgd-bench[ray]'`."
            raise BadInput(told) from None
        from harness.grid.perform import unpacked

        self.ray, self.unpacked = ray, unpacked
        self.grid = grid
        self.tasks: dict[Any, str] = {}
        needs = {name: float(text) for name, text in settings.items() if name != "address"}
        address = settings.get("address", "auto")
        try:
            ray.init(address=address, log_to_driver=False, logging_level="error")
        except ConnectionError:
            told = f"No cluster of Ray answers at {address!r}: start one by `ray start --head "
            raise BadInput(
                f"""{told}--resources '{{"{SLOT}": 1}}'`, or name it by --with address=HOST:PORT."""
            ) from None
        if not ray.cluster_resources().get(SLOT):
            ray.shutdown()
            told = f"No node of this cluster has the resource {SLOT!r}: start each that may measure by `ray start "
            raise BadInput(f"{told}--address HOST:PORT {HAS_A_SLOT}`.")
        # A lost task is handed out again by the loop, which knows from the files whether it is still to be done.
        self.task = ray.remote(**{"num_cpus": 0, **needs}, resources={SLOT: 1}, max_retries=0)(on_node)

    def submit(self, units: Sequence[Unit]) -> None:
        """Hand the units to Ray."""
        text = self.grid.plan.to_json()
        self.tasks |= {self.task.remote(text, unit.name): unit.name for unit in units}

    def at_work(self) -> set[str]:
        """Return the units whose tasks have not ended, after the folders of those that have were written."""
        if not self.tasks:
            return set()
        ended, _ = self.ray.wait(list(self.tasks), num_returns=len(self.tasks), timeout=0)
        for task in ended:
            self.tasks.pop(task)
            try:
                content = self.ray.get(task)
            except self.ray.exceptions.RayError:  # the node died, or its process did
                continue
            self.grid.settle(self.unpacked(content, self.grid.attempts))
        return set(self.tasks.values())

    def running(self) -> int:
        """Return how many nodes are taken."""
        taken = self.ray.cluster_resources().get(SLOT, 0.0) - self.ray.available_resources().get(SLOT, 0.0)
        return max(0, round(taken))

    def close(self) -> None:
        """Leave the cluster, which ends what is under way."""
        self.ray.shutdown()
