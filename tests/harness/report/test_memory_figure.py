"""Peak memory over batch size: which figures are made, and that failures stand where they happened."""

from __future__ import annotations

import pytest

from harness.analysis.frames import build
from harness.report import contents, model
from harness.report.chapters import tables as task_tables
from harness.report.figures import looks
from harness.report.figures import memory as memory_figure
from harness.report.formats import page
from tests.support import figures
from tests.support import record_factory as factory

MIB = 2**20
SIZES = (16, 64, 256)


def run(sizes=SIZES, lost=None, grown=MIB):
    """Memory processes alone; ``lost``: (batch size, state) of opacus-hooks; ``grown``: bytes for each example."""
    records = []
    for framework, variant, private in (("pytorch", "eager", False), ("opacus", "hooks", True)):
        for size in sizes:
            what = {"memory": {"peak_resident_growth": size * grown, "other": 1}}
            if lost and private and size == lost[0]:
                what = {"state": lost[1]}
            contestant = {"framework": framework, "variant": variant, "private": private}
            records.append(factory.record(**contestant, batch_size=size, purpose="memory", **what))
    return records


def of(records):
    tables = build(records, factory.PAPER_ROWS)
    (section,) = model.sections(tables)
    return memory_figure.pictures(tables, section)["peak-memory"]


def test_a_line_per_contestant_in_mib_and_the_one_without_dp_dotted():
    (picture,) = of(run())
    lines = figures.rows(picture.draw(), "line")
    for dash in looks.DASHES[":"], looks.DASHES["-"]:
        assert [(row["x"], row["y"]) for row in lines if row["dash"] == dash] == [(16, 16), (64, 64), (256, 256)]


@pytest.mark.parametrize("state", ["oom", "unsupported", "timeout"])
def test_a_failure_stands_at_its_batch_size_and_hides_no_point(state):
    (picture,) = of(run(lost=(256, state)))
    (mark,) = figures.rows(picture.draw(), "text")
    assert (mark["text"], mark["x"]) == (f"× {state}", 256)
    assert mark["y"] > max(row["y"] for row in figures.rows(picture.draw(), "point"))
    assert f"Opacus at 256: {state}" in figures.words(picture.draw())


def test_the_table_names_the_failure_in_its_place():
    tables = build(run(lost=(256, "oom")), factory.PAPER_ROWS)
    (grid,) = (g for g in task_tables.memory(tables, model.sections(tables)[0]) if "MiB of peak_resident" in g.title)
    assert {row[0]: row[1:] for row in grid.rows}["opacus-hooks"] == ("16.0", "64.0", "oom")


def test_a_failure_that_was_made_good_later_is_none():
    good = run()
    again = factory.record(batch_size=256, purpose="memory", state="oom", started="2026-11-19T08:00:00+00:00")
    (picture,) = of([again, *good])
    assert "oom" not in figures.words(picture.draw())


def test_the_caption_says_n_machine_day_and_instrument():
    (picture,) = of(run())
    words = figures.words(picture.draw())
    for part in ("n = 1", "AMD EPYC 7B13", "20 Nov 2026", "VmHWM"):
        assert part in words


def test_two_batch_sizes_make_no_figure():
    assert of(run((16, 64))) == []


def test_the_report_of_a_run_that_timed_nothing_holds_figures_and_table(tmp_path):
    from harness.report import output

    report = contents.build(run(lost=(256, "oom")))
    written = output.write_report(report, tmp_path / "out", tmp_path / "plots")
    drawn = {p.suffix for p in written if p.name.startswith("peak-memory_mnist-cnn")}
    assert {".pdf", ".svg", ".png"} <= drawn
    assert "data:image/svg+xml" in page.page(report, {p.stem: p for p in written if p.suffix == ".svg"})
    assert "MiB of peak_resident_growth" in (tmp_path / "out" / "report.md").read_text()


def test_the_report_of_a_run_in_which_no_process_grew_holds_the_table_and_no_figure(tmp_path):
    from harness.report import output

    written = output.write_report(contents.build(run(grown=0)), tmp_path / "out", tmp_path / "plots")
    assert not any(p.suffix == ".png" for p in written)
    assert "MiB of peak_resident_growth" in (tmp_path / "out" / "report.md").read_text()


def test_where_one_contestant_did_not_grow_the_other_keeps_its_line():
    still = [
        r.model_copy(update={"memory": {"peak_resident_growth": 0}}) for r in run() if r.cell.framework == "opacus"
    ]
    (picture,) = of([*still, *(r for r in run() if r.cell.framework != "opacus")])
    shown = picture.draw()
    assert len({(mark["shape"], mark["colour"]) for mark in figures.rows(shown, "point")}) == 1
    assert [row["dash"] for row in figures.rows(shown, "line")] == [[2, 2]] * len(SIZES)
