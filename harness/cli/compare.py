"""The verbs ``compare`` and ``bisect``. Heavy imports happen inside: the help must appear at once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from harness.cli.options import CELL_FAILED, FINDING, Device, Fresh, In, Isolation, Json, Synthetic, Tasks
from harness.errors import BadInput
from harness.paths import LOCAL_RESULTS

if TYPE_CHECKING:
    from rich.console import Console

    from harness.compare.options import ComparisonOptions
    from harness.compare.record import Comparison
    from harness.compare.sides import Side

Threshold = Annotated[float, typer.Option(help="Slowdown from which an alert is raised.", metavar="FRACTION")]
Alpha = Annotated[float, typer.Option(help="Chance of any false difference in the whole call.", metavar="FRACTION")]
Rounds = Annotated[
    int | None,
    typer.Option(
        help="Pairs after which a cell ends undecided; default 20, or 10 where only tasks are compared.",
        metavar="N",
        show_default=False,
    ),
]
Minutes = Annotated[
    float | None, typer.Option(help="After so many no new pair is begun.", metavar="M", show_default=False)
]
Threads = Annotated[int, typer.Option(help="Threads and pinned cores per process.", metavar="N")]
Seconds = Annotated[
    float | None,
    typer.Option(
        help="Timed per process; default 0.6 for a layer (under 0.5, other load goes unseen), 6 for a task.",
        metavar="SECONDS",
        show_default=False,
    ),
]
Repository = Annotated[
    Path | None,
    typer.Option(help="Git repository whose refs are meant; default this project's.", hidden=True, metavar="FOLDER"),
]


def compare(
    a: Annotated[
        str | None,
        typer.Argument(help="Contestant in stored records, for instance dpcore-engine; a unique part suffices."),
    ] = None,
    b: Annotated[str | None, typer.Argument(help="Contestant to compare it with.")] = None,
    folder: In = LOCAL_RESULTS,
    base: Annotated[
        str | None,
        typer.Option(
            help="What was: a git ref, . (the working tree), NAME==VERSION, a wheel, or image:TAG_OR_DIGEST.",
            metavar="STATE",
        ),
    ] = None,
    head: Annotated[str | None, typer.Option(help="What is new; as --base.", metavar="STATE")] = None,
    layers: Annotated[
        str | None, typer.Option(help="Comma-separated; default linear,embedding,lstm.", metavar="NAMES")
    ] = None,
    tasks: Tasks = None,
    batch_sizes: Annotated[str | None, typer.Option(help="Comma-separated; default 64.", metavar="SIZES")] = None,
    frameworks: Annotated[
        str | None,
        typer.Option(
            help="Comma-separated; default dpcore-native, or all with the named package's pin.", metavar="NAMES"
        ),
    ] = None,
    passes: Annotated[
        str, typer.Option(help="Passes over layers, comma-separated.", metavar="plain|per_sample|clipped")
    ] = "clipped",
    threshold: Threshold = 0.05,
    alpha: Alpha = 0.05,
    max_rounds: Rounds = None,
    minutes: Minutes = None,
    threads: Threads = 1,
    seconds: Seconds = None,
    isolation: Annotated[
        str | None,
        typer.Option(
            help="What keeps contestants apart; default docker where a side is an image, else venv.",
            metavar="venv|docker|inprocess",
        ),
    ] = None,
    device: Device = "cpu",
    memory: Annotated[bool, typer.Option(help="Also compare memory, in processes of its own.")] = True,
    first_alert: Annotated[
        bool, typer.Option("--first-alert", help="A cell ends with its first alert; grown memory needs no clock.")
    ] = False,
    synthetic: Synthetic = False,
    seed: Annotated[int, typer.Option(help="Seed of orders, batches and weights.", metavar="N")] = 0,
    out: Annotated[
        Path | None, typer.Option(help="Where comparison.json goes; default results/local/compare/….", metavar="FOLDER")
    ] = None,
    markdown: Annotated[Path | None, typer.Option(help="Also write the Markdown here.", metavar="FILE")] = None,
    repository: Repository = None,
    fresh: Fresh = False,
    as_json: Json = False,
) -> None:
    """Compare two contestants in stored records (A B), or two states of the code by measuring both (--base, --head).

    Exit codes of --base and --head: 0 no regression proven, 1 one is, 2 bad input, 3 a cell did not run.
    """
    if base is None and head is None:
        if a is None or b is None:
            raise BadInput("compare needs either two contestants (A B) in stored records, or --base and --head.")
        from harness.cli.report import compare as of_records

        of_records(a, b, folder, as_json)
        return
    if base is None or head is None or a is not None or b is not None:
        raise BadInput(
            "compare takes two contestants (A B) in stored records, or both --base and --head, not a part of each."
        )
    from rich.console import Console

    from harness.compare import report as compare_report
    from harness.compare import sides
    from harness.paths import ROOT
    from harness.store.cache import check_replaceable, write_atomically

    if markdown is not None:
        check_replaceable(markdown)  # now, and not after an hour of measuring
    project = (repository or ROOT).resolve()
    both = sides.resolve("base", base, project), sides.resolve("head", head, project)
    options = _options(
        both,
        layers=layers,
        tasks=tasks,
        batch_sizes=batch_sizes,
        frameworks=frameworks,
        passes=passes,
        threshold=threshold,
        alpha=alpha,
        max_rounds=max_rounds,
        minutes=minutes,
        threads=threads,
        seconds=seconds,
        isolation=isolation or ("docker" if any(side.image is not None for side in both) else "venv"),
        device=device,
        memory=memory,
        first_alert=first_alert,
        synthetic=synthetic,
        seed=seed,
    )
    place = (out or LOCAL_RESULTS / "compare" / f"{both[0].slug}-{both[1].slug}").resolve()
    console = Console(stderr=as_json)
    comparison = _run_pairs(options, both, place, fresh, console, as_json)
    text = compare_report.markdown(comparison)
    for path in (place / "comparison.md", *([markdown] if markdown else [])):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise BadInput(f"{path.parent} cannot be made ({error.strerror}); name another file.") from None
        write_atomically(path, text.encode())
    if as_json:
        typer.echo(comparison.to_json())
    else:
        for line in compare_report.terminal(comparison):
            console.print(line, markup=False, highlight=False, soft_wrap=True)
        console.print(
            f"All of it: {place / 'comparison.json'}; as a comment: {place / 'comparison.md'}",
            markup=False,
            soft_wrap=True,
        )
    raise typer.Exit(comparison.exit_code)


def _options(both: tuple[Side, Side], **asked: Any) -> ComparisonOptions:
    """Return the options, with lists read from text and the defaults that depend on the sides."""
    from harness.cli.options import integers, names_of
    from harness.compare import options as comparison

    names = {key: names_of(asked.pop(key)) for key in ("layers", "tasks", "frameworks", "passes")}
    sizes = integers(asked.pop("batch_sizes"), "--batch-sizes")
    if names["layers"] is None and names["tasks"] is None:
        names["layers"] = comparison.DEFAULT_LAYERS
    if names["frameworks"] is None:
        if any(side.image is not None for side in both):
            raise BadInput(
                "--frameworks is missing: an image does not say which contestant is to run in it; name one, for "
                "instance --frameworks dpcore."
            )
        users = dict.fromkeys(user for side in both for user in side.users)
        has_layers = names["layers"] is not None
        names["frameworks"] = _contestants(both, list(users), has_layers) if users else comparison.DEFAULT_CONTESTANTS
    given: dict[str, Any] = {key: value for key, value in names.items() if value is not None}
    if sizes:
        given["batch_sizes"] = sizes
    return comparison.ComparisonOptions(**given, **asked)


def _contestants(both: tuple[Side, Side], users: list[str], has_layers: bool) -> tuple[str, ...]:
    """Return the contestants of the frameworks that pin a package: those that can be asked for by name, where
    ``has_layers``, those with layers. Raises :class:`BadInput` where there are none."""
    from harness.plan import registry

    known = [framework for side in both for framework in registry.frameworks(root=side.folder).values()]
    names = {f.name for f in known if not has_layers or (f.folder / "layers.toml").exists()}
    if not names & set(users):
        raise BadInput(
            f"Of the frameworks with that package's pin ({', '.join(users)}), none has layers; name --tasks instead."
        )
    return tuple(user for user in users if user in names)


def _run_pairs(
    options: ComparisonOptions, both: tuple[Side, Side], place: Path, fresh: bool, console: Console, quiet: bool
) -> Comparison:
    from harness.compare.run import ComparisonRun
    from harness.run.e2e import command_line
    from harness.run.progress import watched
    from harness.store.folder import RunFolder

    run = ComparisonRun.connected(options, *both, RunFolder(place), command_line())
    return watched(lambda progress: run.execute(progress, fresh), place, console, quiet)


def bisect(
    cell: Annotated[str, typer.Argument(help="layer/framework-variant/passes/batch, or task/framework-variant/batch.")],
    good: Annotated[str, typer.Argument(help="Git ref at which the cell was good.")],
    bad: Annotated[str, typer.Argument(help="Git ref at which it is worse; a descendant of GOOD.")],
    threshold: Threshold = 0.05,
    alpha: Alpha = 0.05,
    max_rounds: Rounds = None,
    threads: Threads = 1,
    seconds: Seconds = None,
    isolation: Isolation = "venv",
    synthetic: Synthetic = False,
    out: Annotated[
        Path | None, typer.Option(help="Where the steps go; default results/local/bisect/….", metavar="FOLDER")
    ] = None,
    repository: Repository = None,
    fresh: Fresh = False,
    as_json: Json = False,
) -> None:
    """Name the commit between GOOD and BAD that made a cell worse: GOOD against one candidate after the other.

    Exit codes: 1 a commit or a range was found, 0 BAD is not proven to be worse than GOOD, 2 bad input, 3 BAD did not
    run."""
    from rich.console import Console

    from harness.analysis.sequential import FIRST_LOOK
    from harness.compare import bisection, sides
    from harness.paths import ROOT

    project = (repository or ROOT).resolve()
    chosen = parse_cell(cell)
    start, commits = bisection.commits_between(good, bad, project)
    first = sides.resolve("base", start, project)
    parent = (out or LOCAL_RESULTS / "bisect" / f"{start[:10]}-{commits[-1][:10]}" / cell.replace("/", ".")).resolve()
    console = Console(stderr=as_json)
    kinds: list[frozenset[str]] = []
    every = frozenset({"gate", "time", "memory"})

    def judge(commit: str) -> bisection.Step:
        try:
            both = first, sides.resolve("head", commit, project)
        except BadInput as fault:
            return bisection.Step(commit, "did not run", str(fault))
        looked_for = kinds[0] if kinds else every
        options = _options(
            both,
            **chosen,
            threshold=threshold,
            alpha=alpha,
            # A wrong clip and grown memory are exact: the clock is not asked, and the fewest pairs are enough.
            max_rounds=max_rounds if "time" in looked_for else FIRST_LOOK,
            first_alert=looked_for == {"memory"},
            threads=threads,
            seconds=seconds,
            isolation=isolation,
            synthetic=synthetic,
        )
        result = _run_pairs(options, both, parent / commit[:10], fresh, console, as_json).cells[0]
        opinion, why = bisection.opinion_of(result, looked_for)
        if not kinds:
            kinds.append(frozenset(result.alerts))
        console.print(f"{commit[:10]}: {opinion} ({why})", markup=False, highlight=False, soft_wrap=True)
        return bisection.Step(commit, opinion, why)

    culprit = bisection.search(commits, judge)
    if as_json:
        steps = [{"commit": s.commit, "opinion": s.opinion, "why": s.why} for s in culprit.steps]
        typer.echo(json.dumps({"cell": cell, "good": start, "commits": culprit.commits, "steps": steps}))
    else:
        console.print(_named(cell, culprit, project), markup=False, highlight=False, soft_wrap=True)
    raise typer.Exit(FINDING if culprit.commits else CELL_FAILED if culprit.steps[0].opinion == "did not run" else 0)


def _named(cell: str, culprit: Any, repository: Path) -> str:
    from harness.compare.sides import git

    if not culprit.commits:
        first = culprit.steps[0]
        return f"{cell}: {first.commit[:10]} is not proven to be worse than GOOD ({first.opinion}: {first.why})."
    titles = [f"{c[:10]} {git(repository, 'log', '-1', '--format=%s', c) or ''}".strip() for c in culprit.commits]
    if len(titles) == 1:
        return f"{cell} became worse with {titles[0]} ({len(culprit.steps)} comparisons)."
    silent = [f"{s.commit[:10]} {s.opinion}" for s in culprit.steps if s.opinion in ("ambiguous", "did not run")]
    return (
        f"{cell} became worse with one of {'; '.join(titles)}: {', '.join(silent)} ({len(culprit.steps)} comparisons)."
    )


def parse_cell(cell: str) -> dict[str, Any]:
    """Options of the one cell that a name means; what follows the batch size (protocol, device) may be there. Raises
    :class:`BadInput`."""
    from harness.layers import LAYERS
    from harness.tasks import TASKS

    parts = cell.split("/")
    what, *rest = parts
    if what in LAYERS and len(rest) >= 3 and rest[2].isdecimal():
        return {"layers": what, "tasks": None, "frameworks": rest[0], "passes": rest[1], "batch_sizes": rest[2]}
    if what in TASKS and len(rest) >= 2 and rest[1].isdecimal():
        return {"layers": None, "tasks": what, "frameworks": rest[0], "passes": "clipped", "batch_sizes": rest[1]}
    raise BadInput(
        f"The cell is {cell!r}: write layer/framework-variant/passes/batch (linear/dpcore-engine/clipped/64) or "
        "task/framework-variant/batch (mnist-cnn/dpcore-engine/64)."
    )
