"""All chapters of a report. A new kind of measurement adds one function to ``sources``; every format follows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import pandas as pd

from harness.analysis import frames as table
from harness.analysis.frames import Tables
from harness.errors import BadInput
from harness.report import model
from harness.report.chapters import costs, elsewhere, fastest_peer, frontier, layers, paper, paper_claims, throughput
from harness.report.chapters import tables as task_tables
from harness.report.figures import memory as memory_figure
from harness.report.figures import tasks as task_figures
from harness.report.formats import latex
from harness.report.model import Chapter, Grid, Report, Section
from harness.store.record import Record

Source = Callable[[Sequence[Record]], Iterable[Chapter]]
"""A function of all records (of every kind); it returns no chapter where it finds no record of its own kind."""


def sources() -> tuple[Source, ...]:
    """Return what stands beside the end-to-end tables, in order of appearance."""
    return (layers.chapters, frontier.chapters)


def build(records: Sequence[Record], left_out: Sequence[str] = ()) -> Report:
    """``left_out``: what is wrong with records that are not among these. Raises :class:`BadInput` for no record."""
    if not records:
        raise BadInput("There are no records to report; make some with `dpbench run e2e`.")
    tables = table.build(records) if any(r.cell.kind == "e2e" for r in records) else None
    report = of_tables(records, tables)
    return replace(report, chapters=(*_left_out(left_out), *report.chapters))


def _left_out(faults: Sequence[str]) -> Iterator[Chapter]:
    """First, because whoever reads the rest has to know."""
    if faults:
        rows = tuple((str(number), " ".join(fault.split())) for number, fault in enumerate(faults, 1))
        yield Chapter("Records left out", None, (Grid("What could not be read", ("", "why"), rows),), printed=False)


def of_tables(records: Sequence[Record], tables: Tables | None) -> Report:
    """Return a report with end-to-end tables that were built before."""
    own = end_to_end(tables) if tables else ()
    return Report(records, tables, (*own, *(chapter for source in sources() for chapter in source(records))))


def end_to_end(tables: Tables) -> tuple[Chapter, ...]:
    """Return the chapters of the end-to-end records: section by section, then what belongs to none."""
    numbers = {
        "paper-then-and-now": paper.then_and_now(tables),
        "paper-rank-correlation": paper.rank_correlation(tables),
        "paper-claims": paper_claims.claims(tables),
        "cumulative-seconds": costs.cumulative_numbers(tables),
        "start-up": costs.start_up(tables),
        "seconds-to-accuracy": costs.goals(tables),
        "physical-floor": costs.floor(tables),
        "fastest-peer": fastest_peer.frame(tables),
        "throughput": throughput.frame(tables),
    }
    chapters = [chapter for section in model.sections(tables) for chapter in _of_section(tables, section, numbers)]
    # Blocks of older records have no moment.
    unknown = [] if any(tables.raw.moment) else ["moment"]
    several = task_tables.side_by_side(tables)
    return (
        *((Chapter("Side by side", None, tuple(several), in_terminal=True),) if several else ()),
        *chapters,
        elsewhere.chapter(tables),
        Chapter("Processes", None, frames={"processes": tables.raw.drop(columns=unknown)}),
    )


def _of_section(tables: Tables, section: Section, numbers: Mapping[str, pd.DataFrame]) -> Iterator[Chapter]:
    pictures = task_figures.pictures(tables, section) | memory_figure.pictures(tables, section)
    when = model.provenance(tables, section)

    def chapter(
        title: str,
        grids: Iterable[Grid],
        brief: Iterable[Grid] | None = None,
        interactive: bool = True,
        printed: bool = True,
        **frames: pd.DataFrame,
    ) -> Chapter:
        """``frames``: by the stem of the CSV file, with _ for -. ``brief``: what the Markdown page shows of it."""
        of_here = {stem.replace("_", "-"): section.of(frame) for stem, frame in frames.items()}
        shown = tuple(picture for stem in of_here for picture in pictures.get(stem, ()))
        own = {}
        if "seconds-per-epoch" in of_here and (of_here["seconds-per-epoch"].state == "ok").any():
            name = task_figures.file_name("main", tables, section, of_here["seconds-per-epoch"])
            own[f"tab-{name}"] = latex.main(tables, section, name)
        short = None if brief is None else tuple(brief)
        return Chapter(title, section, tuple(grids), shown, of_here, when, own, printed, False, interactive, short)

    yield chapter(
        "Seconds per epoch",
        task_tables.seconds_and_published(tables, section),
        task_tables.seconds(tables, section),
        seconds_per_epoch=tables.cells,
    )
    speeds, no_joules = section.of(numbers["throughput"]), throughput.without_joules(tables, section)
    yield chapter(
        "Examples and tokens per second",
        throughput.grids(speeds, no_joules),
        throughput.grids(throughput.of_texts(speeds), no_joules),
        throughput=numbers["throughput"],
    )
    yield chapter(
        "Relative to PyTorch without DP", task_tables.ratios(tables, section), relative_to_pytorch=tables.ratios
    )
    fastest = numbers["fastest-peer"]
    peers = tuple(fastest_peer.grids(fastest, section))
    first_of_peers = [grid for grid in peers if grid.title.endswith(fastest_peer.TITLES[fastest_peer.PEER])]
    yield chapter("Against the fastest peer", peers, first_of_peers, interactive=False, fastest_peer=fastest)
    sums = costs.cumulative(tables, section)
    yield chapter("Cumulative seconds", sums, (), interactive=False, cumulative_seconds=numbers["cumulative-seconds"])
    yield chapter("Framework, DP, compile", task_tables.overheads(tables, section), (), overheads=tables.overheads)
    yield chapter(
        "The paper against these measurements",
        task_tables.against_the_paper(tables, section),
        (),
        interactive=False,
        paper_then_and_now=numbers["paper-then-and-now"],
        paper_rank_correlation=numbers["paper-rank-correlation"],
        paper_claims=numbers["paper-claims"],
    )
    starting, reached, bound = (section.of(numbers[k]) for k in ("start-up", "seconds-to-accuracy", "physical-floor"))
    yield chapter(
        "Start-up",
        [*costs.start_up_grids(starting), *task_tables.compile_seconds(tables, section)],
        (),
        start_up=starting,
        compile_seconds=tables.compile,
    )
    yield chapter("Seconds to accuracy and ε", costs.goals_grids(reached), (), seconds_to_accuracy=reached)
    yield chapter("Physical floor", costs.floor_grids(tables, section, bound), (), physical_floor=bound)
    memory = task_tables.memory(tables, section)
    # What the kernel counted comes first; other instruments stand on the page and in the CSV file.
    first, by_rank = task_tables.first_metric(tables, memory), costs.ranks(tables, section)
    every, brief = [*memory, *by_rank], [*first, *by_rank]
    # The page's own charts are of seconds.
    yield chapter("Peak memory", every, brief, interactive=False, peak_memory=tables.memory)
    yield chapter("Privacy", task_tables.privacy(tables, section), (), privacy=tables.privacy)
    yield chapter("Accuracy", task_tables.accuracy(tables, section), (), accuracy=tables.accuracy)
    yield chapter("Failures and rejections", costs.failures(tables, section))
    yield chapter("Coverage", task_tables.coverage(tables, section), coverage=tables.coverage)
    checks, passed = task_tables.gate(tables, section), task_tables.gate_summary(tables, section)
    yield chapter("Admission gate", checks, passed, interactive=False, printed=False, gate=tables.gate)
    yield chapter("Hardware", costs.hardware(tables, section))
    yield chapter("Versions", task_tables.versions(tables, section), versions=tables.versions)
