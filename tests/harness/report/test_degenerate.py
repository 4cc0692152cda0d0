"""Runs in which something is missing, equal, zero or failed everywhere: every format of the report is made of them."""

from __future__ import annotations

import io
import itertools
import json
from collections.abc import Callable, Iterable
from dataclasses import replace

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from rich.console import Console

from harness.errors import BadInput
from harness.history import events, series
from harness.history import runs as history
from harness.report import conclusion, contents, output
from harness.report.chapters import compare, explain
from harness.report.formats import page, terminal
from harness.report.model import Report
from harness.store.record import Accuracy, Load, Record
from tests.harness.report.test_frontier import probe
from tests.support import figures
from tests.support import record_factory as factory

WHO = (("pytorch", "eager", False), ("opacus", "hooks", True), ("dpcore", "native", True))
LAYERS = (
    {"framework": "pytorch", "variant": "eager", "passes": "plain", "column": "module"},
    {"framework": "opacus", "variant": "module", "passes": "plain", "column": "own_module"},
    {"framework": "opacus", "variant": "hooks", "passes": "per_sample", "column": "dp"},
    {"framework": "dpcore", "variant": "engine", "passes": "clipped", "column": "dp"},
)
STATES = ("oom", "timeout", "crashed", "rejected", "unsupported")
Change = Callable[[list[Record]], list[Record]]


def of_tasks() -> list[Record]:
    """Three rounds of one task: gates, times at one size and memory at three, of which a figure is made."""
    places = [
        {"task": "mnist-cnn", "framework": f, "variant": v, "private": p, "batch_size": size, "order": order}
        for size in (16, 64, 512)
        for order, (f, v, p) in enumerate(WHO)
    ]
    seconds = {"seconds": [2.0, 3.0], "compile_seconds": 1.0, "accuracy": {"test": 0.93, "after_steps": 236}}
    spent = {"epsilon": {"delta": 1e-5, "steps": 236, "rdp": 0.61, "pld": 0.55, "own": 0.61}}
    times = [
        factory.record(**place, round=r, **seconds, **spent)
        for place in places
        for r in range(3)
        if place["batch_size"] == 64
    ]
    memory = [
        factory.record(**place, purpose="memory", memory={"peak_resident_growth": place["batch_size"] * 2**20})
        for place in places
    ]
    return [*(factory.record(**place, purpose="gate") for place in places[:3]), *times, *memory]


def of_layers() -> list[Record]:
    """Two runs of three layers, each in one of the paper's groups: times and memory."""
    return [
        factory.layer_record(layer=layer, batch_size=16, purpose=purpose, round=r, run=f"run-{r}", **who)
        for layer in ("linear", "lstm", "embedding-n100")
        for who in LAYERS
        for purpose in ("time", "memory")
        for r in range(2)
    ]


def of_the_frontier() -> list[Record]:
    """Searches that end between 64 and 128 examples, and a further process each."""
    searched = [probe(size, who, size) for who in WHO for size in (32, 64, 128)]
    return [*searched, *(probe(64, who, 64, "throughput", 1) for who in WHO)]


KINDS = {"tasks": of_tasks(), "layers": of_layers(), "frontier": of_the_frontier()}
EVERYTHING = [record for records in KINDS.values() for record in records]


def made(records: list[Record]) -> Report:
    """Return the report, after every format, sentence and comparison was made of it."""
    report = contents.build(records)
    terminal.show(report, Console(file=io.StringIO(), width=80))
    list(conclusion.sentences(report))
    for picture in (picture for chapter in report.chapters for picture in chapter.pictures):
        json.dumps(picture.draw(), allow_nan=False)
    output.texts(report)
    page.page(report, {})
    tables = report.tables
    if tables is not None:
        for pair in itertools.combinations(tables.order, 2):
            json.dumps([line.as_json() for line in compare.compare(tables, *pair)])
        for name in {r.cell.name for r in records if r.cell.kind == "e2e" and r.purpose == "time"}:
            list(explain.summary(tables, name))
            list(explain.parts(explain.rows(tables, name), True))
    try:
        runs = history.condense(records)
    except BadInput as nothing:  # which a run without times is told
        assert "no timed cells" in str(nothing)
        return report
    for key, cells in series.of_history(history.of(runs)).items():
        events.of_machine(key, cells)
    return report


def each(**update: object) -> Change:
    return lambda records: [record.model_copy(update=update) for record in records]


def only(holds: Callable[[Record], bool]) -> Change:
    return lambda records: [record for record in records if holds(record)]


def ended(states: Iterable[str]) -> Change:
    """No process has a result; they ended in these states, one after the other."""
    none = {"epoch_seconds": [], "timed": None, "memory": {}, "reason": "on purpose", "accuracy": None, "epsilon": None}

    def change(records: list[Record]) -> list[Record]:
        nexts = itertools.cycle(states)
        return [
            record.model_copy(
                update={
                    **none,
                    "state": next(nexts),
                    "layer": record.layer and replace(record.layer, pass_seconds=[], parts=None),
                    "probe": record.probe and replace(record.probe, step_seconds=[], first_step_seconds=None),
                }
            )
            for record in records
        ]

    return change


def nothing_grew(records: list[Record]) -> list[Record]:
    """Every counter of memory says zero."""
    nothing = dict.fromkeys(("input", "labels", "module", "gradients", "intermediate", "peak"), 0)

    def still(record: Record) -> Record:
        update: dict[str, object] = {"memory": dict.fromkeys(record.memory, 0)}
        if record.layer and record.layer.parts:
            update["layer"] = replace(record.layer, parts=replace(record.layer.parts, **nothing))
        return record.model_copy(update=update)

    return [still(record) for record in records]


def without_features(records: list[Record]) -> list[Record]:
    """Layers whose examples take no bytes beside their weights."""
    return [
        r.model_copy(update={"layer": replace(r.layer, parts=replace(r.layer.parts, input=0, labels=0))})
        if r.layer and r.layer.parts
        else r
        for r in records
    ]


def in_no_time(records: list[Record]) -> list[Record]:
    """Nanoseconds in every second process, years in the others."""
    return [
        r.model_copy(update={"epoch_seconds": [1e-9 if i % 2 else 1e9] * len(r.epoch_seconds)})
        for i, r in enumerate(records)
    ]


def without_budget(records: list[Record]) -> list[Record]:
    return [r.model_copy(update={"probe": replace(r.probe, budget_bytes=None)}) if r.probe else r for r in records]


SWAMPED = Load(foreign_share=1.0, disturbed=True, repeats=1)
NO_PEAKS = {"flops_per_second": 0.0, "bytes_per_second": 0.0}
CHANGES: dict[str, Change] = {
    "as it is": each(),
    "one record": lambda records: records[:1],
    "the last record": lambda records: records[-1:],
    "one round": only(lambda r: r.block.round == 0),
    "without DP alone": only(lambda r: not r.cell.private),
    "with DP alone": only(lambda r: r.cell.private),
    "times alone": only(lambda r: r.purpose == "time"),
    "memory alone": only(lambda r: r.purpose == "memory"),
    "gates alone": only(lambda r: r.purpose == "gate"),
    "nothing grew": nothing_grew,
    "no bytes of an example": without_features,
    "no memory figure": each(memory={}),
    "in no time": in_no_time,
    "no budget": without_budget,
    "all disturbed": each(load=SWAMPED),
    "no load": each(load=None),
    "no gate": each(gate=None),
    "no machine": each(machine={}),
    "peaks of nothing": each(machine={**factory.MACHINE, "peaks": NO_PEAKS}),
    "no data": each(data=None),
    "no compile time": each(compile_seconds=None),
    "nothing classified right": each(accuracy=Accuracy(test=0.0, after_steps=0)),
    "every way to fail": ended(STATES),
    **{f"all {state}": ended([state]) for state in STATES},
}
OF_LAYERS = ("one record", "with", "memory alone", "times alone", "nothing grew", "no bytes", "no gate", "every way")
"""How the names of changes begin that concern layers; one kind's report takes a third of a second."""
CASES = [
    pytest.param(kind, change, id=f"{kind}: {name}")
    for name, change in CHANGES.items()
    for kind, records in KINDS.items()
    if (kind != "layers" or name.startswith(OF_LAYERS)) and change(records)
]


@pytest.mark.parametrize(("kind", "change"), CASES)
def test_every_format_is_made(kind: str, change: Change) -> None:
    records = [Record.model_validate(record.model_dump(by_alias=True)) for record in change(KINDS[kind])]
    assert made(records).chapters


@settings(max_examples=15, phases=(Phase.explicit, Phase.generate))  # to shrink reports takes minutes
@given(
    st.lists(st.integers(0, len(EVERYTHING) - 1), min_size=1, max_size=16, unique=True),
    st.lists(st.sampled_from(sorted(CHANGES)), min_size=1, max_size=3),
    st.floats(0.0, 1.0),
)
def test_any_part_of_a_run_has_its_report(chosen: list[int], names: list[str], share: float) -> None:
    """Some records, of which the first ``share`` is changed in some of the ways."""
    records = [EVERYTHING[number] for number in chosen]
    changed = records[: round(share * len(records))]
    for name in names:
        changed = CHANGES[name](changed)
    made([*changed, *records[round(share * len(records)) :]] or records)


def test_a_peak_of_nothing_is_no_figure_and_the_others_keep_theirs() -> None:
    one, *others = KINDS["frontier"]
    still = one.model_copy(update={"memory": {"peak_resident_growth_with_compile": 0}})
    chapter = next(c for c in made([still, *others]).chapters if c.title == "Memory frontier")
    drawn = [len(figures.rows(picture.draw(), "point")) for picture in chapter.pictures]
    whole = next(c for c in made([one, *others]).chapters if c.title == "Memory frontier")
    assert drawn == [len(figures.rows(picture.draw(), "point")) - 1 for picture in whole.pictures] != []
