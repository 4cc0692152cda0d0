"""The verb ``run frontier``."""

from __future__ import annotations

from typing import Annotated

import typer

from harness.cli import options as shared
from harness.cli.options import exit_code, names_of
from harness.paths import LOCAL_RESULTS

BUDGET_GIB = 1.5


def frontier(
    tasks: Annotated[str, typer.Option(help="Comma-separated task names.", metavar="NAMES")] = "mnist-cnn,cifar10-cnn",
    frameworks: Annotated[
        str, typer.Option(help="As for run e2e: names, core, defaults or all.", metavar="NAMES")
    ] = "core",
    budget: Annotated[
        float | None,
        typer.Option(
            help="GiB above start-up, on a CPU; default 1.5. On CUDA it is the device's memory.",
            metavar="GIB",
            show_default=False,
        ),
    ] = None,
    first: Annotated[int, typer.Option(help="The batch size that is tried first, then doubled.", metavar="N")] = 64,
    largest: Annotated[
        int | None, typer.Option(help="No larger size is tried; default the training set.", metavar="N")
    ] = None,
    resolution: Annotated[
        float, typer.Option(help="The bisection ends at this share of the batch size.", metavar="FRACTION")
    ] = 0.05,
    longest_step: Annotated[
        float, typer.Option(help="No size whose step would take more is tried.", metavar="SECONDS")
    ] = 20.0,
    rounds: Annotated[int, typer.Option(help="Processes at each frontier, for the throughput.", metavar="N")] = 3,
    seconds: Annotated[
        float, typer.Option(help="How long a process times steps (at least one).", metavar="SECONDS")
    ] = 1.0,
    device: shared.Device = "cpu",
    threads: shared.Threads = None,
    seed: shared.Seed = 0,
    timeout: shared.Timeout = 600.0,
    synthetic: shared.Synthetic = False,
    small_gate: Annotated[
        bool, typer.Option(help="Judge modern tasks by small networks of their structure: minutes, not hours.")
    ] = True,
    out: shared.Out = None,
    fresh: shared.Fresh = False,
    as_json: shared.Json = False,
) -> None:
    """Find the largest physical batch that fits a memory budget, and the throughput there."""
    from harness.cli.outcome import carry_out
    from harness.environments import memory_limit
    from harness.environments.venv import VenvBackend
    from harness.plan import registry
    from harness.plan.e2e import check_numbers
    from harness.run.e2e import command_line
    from harness.run.frontier import FrontierRun, Search, options_of
    from harness.store.folder import RunFolder

    check_numbers({"rounds": rounds}, {"seconds": seconds, "timeout": timeout}, 0, seed)
    if budget is None and device == "cpu":
        budget = BUDGET_GIB
    search = Search(first, largest, resolution, longest_step)
    options = options_of(
        list(names_of(tasks) or ()),
        frameworks=names_of(frameworks),
        rounds=rounds,
        budget_seconds=seconds,
        device=device,
        threads=threads,
        seed=seed,
        timeout_seconds=timeout,
        synthetic=synthetic,
        small_gate=small_gate,
    )
    contestants = registry.select(options.frameworks)
    folder = RunFolder((out or LOCAL_RESULTS / "frontier").resolve())
    budget_bytes = memory_limit.from_gibibytes(budget, "--budget")
    run = FrontierRun(options, search, budget_bytes, contestants, folder, command_line(), VenvBackend())
    summary = carry_out(run, fresh, as_json)
    # Out of memory is what the search looks for.
    states = {state: count for state, count in summary.states.items() if state != "oom"}
    raise typer.Exit(exit_code(states, summary.expected, summary.missing))
