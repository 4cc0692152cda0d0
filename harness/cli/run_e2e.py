"""The verb ``run e2e``. Heavy imports happen inside: the help must appear at once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from harness.cli import options as shared
from harness.cli.options import exit_code, integers, names_of
from harness.paths import LOCAL_RESULTS

if TYPE_CHECKING:
    from harness.plan.e2e import Options


def e2e(
    context: typer.Context,
    preset: Annotated[
        str, typer.Option(help="How much: tasks, sizes, rounds.", metavar="smoke|quick|full|modern|gpu-full|paper")
    ] = "quick",
    tasks: shared.Tasks = None,
    frameworks: shared.Names = None,
    batch_sizes: Annotated[
        str | None, typer.Option(help="Comma-separated expected batch sizes.", metavar="SIZES")
    ] = None,
    rounds: shared.Rounds = None,
    epochs: Annotated[
        int | None, typer.Option(help="Timed epochs per process.", metavar="N", show_default=False)
    ] = None,
    subset: Annotated[
        float | None, typer.Option(help="Fraction of an epoch; the figures are then extrapolated.", metavar="FRACTION")
    ] = None,
    budget_seconds: Annotated[
        float | None, typer.Option(help="Time about so long; extrapolated to the epoch.", metavar="SECONDS")
    ] = None,
    minutes: Annotated[
        float | None,
        typer.Option(
            help="Measure about so long: at least a round, then until it is known who is fastest.", metavar="M"
        ),
    ] = None,
    memory: Annotated[
        bool | None,
        typer.Option(
            help="Also measure peak memory, in a process of its own. Default: all presets but modern.",
            show_default=False,
        ),
    ] = None,
    time: Annotated[bool, typer.Option(help="Without it, peak memory alone: nothing is timed.")] = True,
    protocol: Annotated[
        str, typer.Option(help="Rules of the measurement.", metavar="verified|paper|as_shipped")
    ] = "verified",
    device: shared.Device = "cpu",
    isolation: shared.Isolation = "venv",
    threads: shared.Threads = None,
    world_size: shared.WorldSize = None,
    parallel: shared.Parallel = None,
    sigma: Annotated[
        float | None, typer.Option(help="Another noise multiplier than the protocol's.", metavar="SIGMA")
    ] = None,
    repeats: shared.Repeats = None,
    seed: shared.Seed = 0,
    timeout: shared.Timeout = None,
    memory_limit: shared.MemoryLimit = None,
    synthetic: shared.Synthetic = False,
    small_gate: Annotated[
        bool | None,
        typer.Option(
            help="Judge modern tasks by small networks of their structure: minutes, not hours. Default: as the preset.",
            show_default=False,
        ),
    ] = None,
    out: shared.Out = None,
    any_image: shared.AnyImage = False,
    fresh: shared.Fresh = False,
    as_json: shared.Json = False,
) -> None:
    """Measure median seconds per epoch and peak memory of every framework, task and batch size."""
    from harness.cli.outcome import carry_out, interim
    from harness.environments.choose import backend_of
    from harness.plan import e2e as plan
    from harness.run.e2e import Run, command_line
    from harness.run.pace import Pace
    from harness.run.remaining import about
    from harness.store.folder import RunFolder

    options = options_of(context.params)
    contestants = options.contestants()
    folder = RunFolder((out or LOCAL_RESULTS / preset).resolve())
    pace = Pace(minutes, interim(folder, as_json))
    run = Run(options, contestants, folder, command_line(), backend_of(isolation, device, any_image=any_image), pace)
    seconds = plan.expected_seconds(options, run.jobs)
    took = f", which take {about(seconds)} on two cores" if seconds else ""
    smallest = {task: min(sizes) for task, sizes in options.batch_sizes.items()}
    first = [job for job in run.jobs if job.round == 0 and job.cell.batch_size == smallest[job.cell.task]]
    first = [job for job in first if job.purpose == "time" or not options.time]
    early = plan.expected_seconds(options, first)
    beginning = f"{len(run.jobs)} processes are planned{took}; missing environments and data come first, "
    beginning += "the gates of each task before it."
    if early and len(first) < len(run.jobs):
        gates = plan.GATE_SECONDS * len({(job.contestant.name, job.cell.task) for job in first})
        beginning += f" A task's table comes with its first times, the last one after {len(first)} processes, "
        beginning += f"{about(early)}, and up to {about(gates)} more where gates are judged for the first time."
    if minutes:
        beginning += f" Measuring ends {minutes:g} min after it began, apart from gates, with the block then under way "
        beginning += "and the memory of what was timed."
    summary = carry_out(run, fresh, as_json, beginning)
    raise typer.Exit(exit_code(summary.states, summary.expected, summary.missing))


def options_of(given: Mapping[str, Any]) -> Options:
    """Return the options of a run, of what was given for the parameters of :func:`e2e`.

    Raises:
        BadInput: they cannot be measured.
    """
    from harness.environments import memory_limit as limits
    from harness.environments.choose import check_isolation
    from harness.plan import e2e as plan

    check_isolation(given["isolation"])
    same = "rounds epochs subset budget_seconds memory time protocol device isolation threads sigma repeats seed"
    same += " synthetic small_gate"
    return plan.preset(
        given["preset"],
        tasks=names_of(given["tasks"]),
        frameworks=names_of(given["frameworks"]),
        batch_sizes=integers(given["batch_sizes"], "--batch-sizes"),
        world_size=integers(given["world_size"], "--world-size"),
        parallel=names_of(given["parallel"]),
        timeout_seconds=given["timeout"],
        memory_limit_bytes=limits.from_gibibytes(given["memory_limit"], "--memory-limit"),
        **{name: given[name] for name in same.split()},
    )
