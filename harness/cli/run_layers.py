"""The verb ``run layers``. Heavy imports happen inside: the help must appear at once."""

from __future__ import annotations

from typing import Annotated

import typer

from harness.cli import options as shared
from harness.cli.options import exit_code, integers, names_of
from harness.paths import LOCAL_RESULTS


def layers(
    preset: Annotated[
        str, typer.Option(help="How much: layers, sizes, rounds.", metavar="smoke|small|quick|full|paper")
    ] = "quick",
    layers: Annotated[
        str | None, typer.Option(help="Comma-separated layers or sets (paper, today, sweep).", metavar="NAMES")
    ] = None,
    frameworks: Annotated[
        str | None,
        typer.Option(help="Comma-separated: opacus (all of its variants), opacus-ghost, core, all.", metavar="NAMES"),
    ] = None,
    passes: Annotated[
        str | None,
        typer.Option(
            help="Comma-separated. plain: without DP; per_sample: the paper's; clipped: to a sum.",
            metavar="plain|per_sample|clipped",
        ),
    ] = None,
    batch_sizes: Annotated[str | None, typer.Option(help="Comma-separated, up to 8192.", metavar="SIZES")] = None,
    rounds: shared.Rounds = None,
    memory: Annotated[bool | None, typer.Option(help="Also count memory, in a process of its own.")] = None,
    seconds: Annotated[
        float | None, typer.Option(help="A cell stops after so many timed seconds.", metavar="SECONDS")
    ] = None,
    most_passes: Annotated[
        int | None, typer.Option(help="Or after so many passes; 2000 in the paper.", metavar="N")
    ] = None,
    longest_pass: Annotated[
        float | None, typer.Option(help="No cell is tried whose pass would take more.", metavar="SECONDS")
    ] = None,
    device: shared.Device = "cpu",
    isolation: shared.Isolation = "venv",
    threads: shared.Threads = None,
    repeats: shared.Repeats = None,
    seed: shared.Seed = 0,
    timeout: shared.Timeout = None,
    memory_limit: shared.MemoryLimit = None,
    out: shared.Out = None,
    any_image: shared.AnyImage = False,
    fresh: shared.Fresh = False,
    as_json: shared.Json = False,
) -> None:
    """Measure time and memory of single layers: plain module, a DP library's own module, and with DP."""
    from harness.cli.outcome import carry_out
    from harness.environments import memory_limit as limits
    from harness.environments.choose import backend_of, check_isolation
    from harness.plan import layer_registry
    from harness.plan import layers as layer_plan
    from harness.run.e2e import command_line
    from harness.run.layers import LayerRun
    from harness.store.folder import RunFolder

    check_isolation(isolation)
    options = layer_plan.preset(
        preset,
        layers=names_of(layers),
        frameworks=names_of(frameworks),
        passes=names_of(passes),
        batch_sizes=integers(batch_sizes, "--batch-sizes"),
        rounds=rounds,
        memory=memory,
        seconds=seconds,
        most_passes=most_passes,
        longest_pass=longest_pass,
        device=device,
        isolation=isolation,
        threads=threads,
        repeats=repeats,
        seed=seed,
        timeout_seconds=timeout,
        memory_limit_bytes=limits.from_gibibytes(memory_limit, "--memory-limit"),
    )
    contestants = layer_registry.select(options.frameworks)
    folder = RunFolder((out or LOCAL_RESULTS / f"layers-{preset}").resolve())
    run = LayerRun(options, contestants, folder, command_line(), backend_of(isolation, device, any_image=any_image))
    summary = carry_out(run, fresh, as_json, f"{len(run.jobs)} processes are planned.")
    raise typer.Exit(exit_code(summary.states, summary.expected, summary.missing))
