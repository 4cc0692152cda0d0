"""``dpbench`` with fake contestants: their environment is this interpreter, and the gate lets them in.

Only for tests of the run loop; what the gate says of real contestants is tested elsewhere.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

FAKES = Path(__file__).resolve().parent.parent / "fakes"
os.environ["DPBENCH_FRAMEWORKS"] = str(FAKES)

from harness.analysis import accounting  # noqa: E402
from harness.cli import main as cli  # noqa: E402
from harness.cli import outcome  # noqa: E402
from harness.environments import unpinned, venv  # noqa: E402
from harness.gate import admission  # noqa: E402
from harness.gate.admission import Verdict  # noqa: E402
from harness.grid.launchers.slurm import Slurm  # noqa: E402
from harness.plan import e2e as plan  # noqa: E402
from harness.run import layers as layer_run  # noqa: E402
from harness.run import peaks, replays  # noqa: E402
from harness.store import cache  # noqa: E402
from harness.store.record import Gate  # noqa: E402
from harness.worker import machine, speed_probe  # noqa: E402
from harness.worker.layer_request import LayerRequest  # noqa: E402
from harness.worker.request import Request  # noqa: E402
from harness.worker.result import Check  # noqa: E402
from tests.support import phantom_layer  # noqa: E402


class _ThisPython(venv.Environment):
    @property
    def python(self) -> Path:
        return Path(sys.executable)


def _layer_references(names: tuple[str, ...], *rest: object) -> dict[str, Path]:
    """Of the only layer that the fakes have: where the tests wrote it."""
    return dict.fromkeys(names, Path(os.environ["DRIVE_LAYER_REFERENCE"]))


def _remembered(epsilons: Callable[..., tuple[float, float]]) -> Callable[..., tuple[float, float]]:
    """The accountants' own answers, kept on disk: to import them takes longer than a run of fakes."""

    def answer(*question: float) -> tuple[float, float]:
        path = cache.folder("epsilons") / f"{'-'.join(map(str, question))}.json"
        if not path.exists():
            part = path.with_suffix(f".{os.getpid()}")
            part.write_text(json.dumps(epsilons(*question)))
            part.replace(path)
        rdp, pld = json.loads(path.read_text())
        return rdp, pld

    return answer


def _step_reference(backend: object, request: Request, log: object) -> dict[str, object]:
    """The phantoms train nothing that could be right; the cheats are looked at in numpy."""
    if Path(request.folder).name != "cheat":
        return {"update_error": 0.0, "update_limit": 1.0}
    from tests.support import gate_numpy

    return gate_numpy.step_reference(request, Path(str(request.checked)))


def _last_pass(itself: layer_run.LayerRun, request: LayerRequest, number: int, log: object) -> Check:
    left, size, bound = Path(str(request.left)), request.batch_size, request.max_grad_norm
    return Check(**phantom_layer.last_pass(request.layer, request.passes, left, size, request.seed, number, bound))


def install() -> None:
    venv.ensure = lambda framework, log: _ThisPython(Path(), framework.lock_hash, (framework.name,), 0.0)
    admission.judge = lambda contestant, task, *rest, **named: Verdict(
        "ok", None, Gate(passed=contestant.variant.name != "unfit", key="fake", checks=[]), {}
    )
    layer_run.LayerRun.last_pass = _last_pass
    layer_run.ensure_references = _layer_references
    admission.reference = lambda task, *rest: Path()
    unpinned.REFERENCES = ()
    replays.step_reference = _step_reference
    # The preset's half a second is a hundred epochs of a fake, and every step of them is replayed.
    plan.PRESETS["smoke"] = replace(plan.PRESETS["smoke"], budget_seconds=0.01)
    if "DRIVE_WITH_GPU" in os.environ:
        machine.gpus = lambda: ["A device that is not there, 1000 MiB, 1.0"]
        machine._gpu_throttle = list
    speed_probe.seconds = lambda: 0.01  # takes longer than a fake's steps, and a busy machine changes it
    Slurm.poll_seconds = 1.0  # a grid of fakes waits mostly for the next look at the queue
    peaks.measure = lambda threads: {"flops_per_second": 1e9 * threads, "bytes_per_second": 2e9}
    if "DRIVE_WITH_REPORT" not in os.environ:  # figures take longer than the fake cells
        outcome.report = lambda folder, console, shows: []
        outcome.interim = lambda folder, as_json: lambda is_first: None
    accounting.epsilons = _remembered(accounting.epsilons)


if __name__ == "__main__":
    install()
    cli.main()
