"""Runs a plan over layers: float64 references, environments, one process per measurement, records."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from harness.environments.backend import Argument, Backend, Input, Log, Output, RunTool, last_json
from harness.environments.executor import ToolFault
from harness.environments.unavailable import Unavailable
from harness.errors import BadInput
from harness.gate import admission
from harness.layers import LAYERS
from harness.plan import layers as layer_plan
from harness.plan.layer_registry import LayerContestant
from harness.plan.layers import LayerJob, LayerOptions
from harness.run.progress import Progress
from harness.run.session import Moment, Session
from harness.store import cache, seal
from harness.store.folder import RunFolder
from harness.store.record import Gate, GateCheck, LayerResult, Load, Record, Seeds
from harness.worker import machine
from harness.worker.layer_request import LayerRequest
from harness.worker.result import Check, Layer, Result

WORKER = "harness.worker.layers"
REFERENCE = "frameworks._tools.layer_reference"
REFERENCE_SOURCES = (
    "harness/layers.py",
    "harness/worker/gate/layers.py",
    "frameworks/_tools/layer_reference.py",
    "frameworks/_shared/torch/layers.py",
)


class LayerRun(Session[LayerOptions, LayerContestant, LayerJob, LayerRequest]):
    """Single layers: references, times, the memory."""

    def __init__(
        self,
        options: LayerOptions,
        contestants: list[LayerContestant],
        folder: RunFolder,
        command: str,
        backend: Backend,
    ) -> None:
        super().__init__(options, contestants, folder, command, backend)
        self.references: dict[str, Path] = {}
        self.reference_fault: str | None = None
        self.jobs = layer_plan.jobs(options, contestants)
        if not self.jobs:
            raise BadInput(
                "None of the chosen contestants makes any of the chosen passes over the chosen layers; leave out "
                "--frameworks or --passes, or see docs/add-a-layer.md."
            )

    def description(self) -> dict[str, Any]:
        return {
            **self.backend.describe(),
            "options": asdict(self.options),
            "contestants": {name: {"layers": code, "lock": lock} for name, (code, lock) in self.hashes.items()},
            "harness": admission.sources_hash(REFERENCE_SOURCES),
            "place": self.place(),
        }

    def _hashes_of(self, contestant: LayerContestant) -> tuple[str, str]:
        return contestant.code_hash, self.backend.environment_id(contestant.framework)

    def prepare(self, log: Log) -> None:
        """Environments and references. Without one, its cells are ``unsupported`` (``crashed`` without a reference)."""
        for c in self.contestants:
            self.executors[c.name] = self.backend.executor(c, log, WORKER)
        self.references, self.reference_fault = references(self.options.layers, log, self.backend.run_tool)
        self.watched.add(self.references.values())

    def _begin(self, progress: Progress) -> None:
        self.prepare(progress.log)

    def finished(
        self, job: LayerJob, request: LayerRequest, result: Result, started: Moment, load: Load, log: Log
    ) -> Record:
        if request.left is not None and result.state == "ok":
            result = self._compare_last_pass(request, result, log)
        return self._record(job, result, started, load)

    def unmeasured(self, job: LayerJob, result: Result, started: Moment) -> Record:
        return self._record(job, result, started)

    def _compare_last_pass(self, request: LayerRequest, result: Result, log: Log) -> Result:
        """Check that the last timed pass left what is right on the measured batch."""
        assert request.left is not None
        left = Path(request.left)
        if not left.exists():
            reason = "the timed process left nothing of its last pass to compare."
            return replace(result, state="crashed", reason=reason)
        try:
            measured = result.layer or Layer()
            check = self.last_pass(request, (len(measured.pass_seconds) - 1) % measured.batches, log)
        except ToolFault as fault:
            reason = f"the float64 reference of the last pass could not be made: {fault}"
            return replace(result, state="crashed", reason=reason)
        finally:
            left.unlink()
        result = replace(result, checks=[*result.checks, check])
        if check.passed:
            return result
        reason = f"{check.check}: error {check.error}, limit {check.limit} ({check.detail})"
        return replace(result, state="rejected", reason=reason)

    def last_pass(self, request: LayerRequest, number: int, log: Log) -> Check:
        """Return what :mod:`frameworks._tools.layer_reference` says of it, which was over batch ``number``.

        Raises :class:`ToolFault` where it cannot be asked.
        """
        assert request.left is not None
        arguments: list[Argument] = ["--layers", request.layer, "--left", Input(Path(request.left))]
        arguments += ["--passes", request.passes]
        arguments += ["--batch-size", str(request.batch_size), "--seed", str(request.seed), "--number", str(number)]
        arguments += ["--bound", repr(request.max_grad_norm)]
        return Check(**last_json(self.backend.run_tool(REFERENCE, arguments, log)))

    def refusal(self, job: LayerJob) -> Result | None:
        """Return a result without a process: it cannot run, or an earlier process of this cell showed so."""
        assert job.cell.layer is not None
        executor = self.executors[job.contestant.name]
        reason = job.contestant.variant.why_unsupported(LAYERS[job.cell.layer])
        if isinstance(executor, Unavailable):
            return Result("unsupported", executor.reason)
        if reason:
            return Result("unsupported", reason)
        if self.reference_fault is not None:
            return Result("crashed", self.reference_fault)
        earlier = self.ended.get(job.cell.name)
        if earlier is not None:
            return Result(earlier.state, earlier.reason, layer=_predictions(earlier))
        return None

    def request(self, job: LayerJob) -> LayerRequest:
        options, cell = self.options, job.cell
        is_compared = job.purpose == "time" and job.round == 0
        first = job.purpose == "memory" or (job.round == 0 and not options.memory)
        return layer_plan.request_of(
            job.contestant,
            cell,
            mode="time" if job.purpose == "time" else "memory",
            max_grad_norm=options.max_grad_norm,
            threads=self.threads,
            seed=self._seed(job),
            reference=str(self.references[str(cell.layer)]),
            predicts=first and options.device == "cpu",
            seconds=options.seconds,
            most_passes=options.most_passes,
            least_passes=options.least_passes,
            longest_pass=options.longest_pass,
            most_bytes=options.most_bytes,
            left=str(self.folder.scratch / f"{job.name}.last-pass.npz") if is_compared else None,
        )

    def _seed(self, job: LayerJob) -> int:
        """Return the seed: the same for all contestants of a block; every round has its own."""
        return self.options.seed * 1000 + job.round

    def _record(self, job: LayerJob, result: Result, started: Moment, load: Load | None = None) -> Record:
        assert job.cell.layer is not None
        layer = LAYERS[job.cell.layer]
        checks = [GateCheck(**vars(check)) for check in result.checks]
        gate = Gate(passed=all(c.passed for c in checks), key=self._key(job), checks=checks) if checks else None
        seed = self._seed(job)
        return Record(
            **self._facts(job, result, started, load),
            layer=LayerResult(
                kind=layer.kind,
                description=layer.description,
                column=job.contestant.variant.column,
                paper_row=layer.paper_row,
                input_bytes=layer.input_bytes,
                label_bytes=layer.label_bytes,
                output_bytes=layer.output_bytes,
                parameter_bytes=layer.parameter_bytes,
                **vars(result.layer or Layer()),
            ),
            gate=gate,
            seeds=Seeds(initial=seed, batches=seed, noise=seed),
        )


def _predictions(record: Record) -> Layer | None:
    if record.layer is None:
        return None
    return Layer(predicted_seconds=record.layer.predicted_seconds, predicted_bytes=record.layer.predicted_bytes)


def references(names: tuple[str, ...], log: Log, run_tool: RunTool) -> tuple[dict[str, Path], str | None]:
    """Return :func:`ensure_references`, or why there are none."""
    try:
        return ensure_references(names, log, run_tool), None
    except ToolFault as fault:
        reason = f"the float64 references of the layers could not be made: {fault}"
        log(reason)
        return {}, reason


def ensure_references(names: tuple[str, ...], log: Log, run_tool: RunTool) -> dict[str, Path]:
    """Return layer -> .npz of its float64 gradients, which ``run_tool`` computes once.

    Raises:
        EnvironmentFault: there is no environment with PyTorch.
        ToolFault: they could not be computed.
    """
    folder = cache.folder("layer-references") / f"{admission.sources_hash(REFERENCE_SOURCES)}-{machine.kind()}"
    folder.mkdir(exist_ok=True)
    paths = {name: folder / f"{name}.npz" for name in names}
    with cache.locked(folder / ".lock"):
        missing = [name for name, path in paths.items() if not seal.holds(path, log)]
        if missing:
            log(f"References of {len(missing)} layers: float64, one example at a time")
            output = Output(folder, tuple(paths[name].name for name in missing))
            run_tool(REFERENCE, ["--layers", ",".join(missing), "--out", output], log)
            for name in missing:
                seal.put(paths[name])
    return paths
