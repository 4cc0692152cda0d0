"""Files: what is written, what stands in it, and that LaTeX takes it."""

from __future__ import annotations

import io
import itertools
import json
import math
import pstats
import re
import resource
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from PIL import Image
from rich.console import Console

from harness.analysis.frames import PUBLISHED_LABEL, build
from harness.errors import BadInput
from harness.report import conclusion, contents, model, output
from harness.report.figures import looks, panel
from harness.report.figures import tasks as task_figures
from harness.report.formats import latex, markdown, page, terminal
from harness.store.read import load
from harness.store.record import SCHEMA, Load
from tests.support import figures
from tests.support import record_factory as factory


@pytest.fixture(scope="module")
def quick():
    return build(factory.quick_run(synthetic_tasks=("imdb-embedding",)), factory.PAPER_ROWS)


@pytest.fixture(scope="module")
def written(tmp_path_factory, quick):
    folder = tmp_path_factory.mktemp("report")
    return output.write_report(report_of(quick), folder / "out", folder / "plots")


def report_of(tables):
    return contents.of_tables(tables.records, tables)


def named(paths, start, suffix):
    found = [p for p in paths if p.name.startswith(start) and p.suffix == suffix]
    assert found, (start, suffix)
    return found


def test_everything_is_written_and_nothing_is_empty(written):
    assert all(p.stat().st_size > 200 for p in written)
    for kind in ("seconds-per-epoch", "relative-to-pytorch", "cumulative-seconds"):
        for suffix in (".pdf", ".svg", ".png"):
            named(written, kind, suffix)
    assert len(named(written, "seconds-per-epoch", ".png")) == 4


def test_file_names_are_short_and_say_synthetic_where_it_applies(written):
    names = {p.name for p in written if p.suffix == ".svg"}
    assert {"relative-to-pytorch_synthetic.svg", "seconds-per-epoch_mnist-cnn.svg"} <= names
    assert "seconds-per-epoch_cifar10-cnn.svg" in names, "extrapolated: said in the caption, not in the name"
    assert "seconds-per-epoch_imdb-embedding_synthetic.svg" in names
    assert any(p.name == "report_synthetic.md" for p in written)


def test_the_words_stand_in_the_figure_and_it_says_where_when_and_how(quick):
    with_words = {p.stem: figures.words(p.draw()) for c in report_of(quick).chapters for p in c.pictures}
    assert len(with_words) == 6
    for name, words in with_words.items():
        for part in ("AMD EPYC 7B13, 20 Nov 2026", "rules verified-v1", "n = 3" if "seconds-per" in name else ""):
            assert part in words, (name, part)
        assert ("synthetic" in name) == ("synthetic" in words)
        # Said once, however many panels there are.
        assert words.count("xtrapolated") == ("cifar" in name or "lstm" in name or "seconds-per" not in name) + (
            "cumulative" in name
        )
        assert "opacus-hooks" not in words and "pytorch-eager" not in words.replace("Without DP: pytorch-eager", "")
    assert (
        "Opacus at 512: oom" in with_words["seconds-per-epoch_imdb-lstm"]
        or "oom" in (with_words["seconds-per-epoch_imdb-lstm"])
    )


@pytest.mark.parametrize(
    ("rounds", "caption"),
    [
        ({"opacus": 2, "dpcore": 1}, "n = 2 processes (dpcore-hooks at 2048: 1), too few for an interval."),
        ({"opacus": 4, "dpcore": 2}, "(dpcore-hooks at 2048: 2) (median of its epochs each); bar: lowest to highest "),
        ({"opacus": 6, "dpcore": 6}, "n = 6 processes (median of its epochs each); bar: distribution-free 95 %"),
    ],
)
def test_a_caption_names_the_cells_of_fewer_processes(rounds, caption):
    records = [
        factory.record(framework=framework, batch_size=size, round=r, seconds=[1.0 + r])
        for framework in ("opacus", "dpcore")
        for size in (16, 512, 2048)
        for r in range(rounds[framework] if size == 2048 else rounds["opacus"])
    ]
    (figure,) = _figures_of(build(records, factory.PAPER_ROWS))
    assert caption in figures.words(figure)


def test_a_caption_of_many_different_cells_gives_the_range():
    n = pd.Series([5] * 9 + [3] * 5)
    assert model.processes(n, [f"cell {i}" for i in range(14)]) == "n = 3 to 5 processes, most often 5"


def test_files_carry_title_and_provenance(written):
    svg, png = (named(written, "relative-to-pytorch", suffix)[0] for suffix in (".svg", ".png"))
    for part in ("Seconds per epoch relative to PyTorch without DP", "b618197aa", "protocol verified-v1"):
        assert part in svg.read_text()
        with Image.open(png) as image:
            assert part in " ".join(map(str, image.info.values()))


def _of_a_crowd(private, rounds):
    """Contestant i of the private ones takes i + 2 times the baseline; the last is out of memory at 512."""
    names = [("pytorch", "eager", False, 1.0)] + [(f"peer{i}", "x", True, i + 2.0) for i in reversed(range(private))]
    return build(
        [
            factory.record(
                framework=framework,
                variant=variant,
                private=is_private,
                batch_size=size,
                state="oom" if framework == f"peer{private - 1}" and size == 512 else "ok",
                seconds=[factor * (1.0 + 0.1 * i)],
                disturbed=framework == "peer2" and size == 64,
                round=i,
                order=order,
            )
            for i in range(rounds)
            for size in (16, 64, 256, 512)
            for order, (framework, variant, is_private, factor) in enumerate(names)
        ],
        factory.PAPER_ROWS,
    )


def _figures_of(tables):
    section = model.sections(tables)[0]
    found = task_figures.pictures(tables, section)
    return [picture.draw() for kind in ("seconds-per-epoch", "relative-to-pytorch") for picture in found[kind]]


@pytest.mark.parametrize("rounds", [1, 3])
def test_more_contestants_than_colours_are_a_grid_of_numbers_fastest_first(rounds):
    seconds, ratios = _figures_of(_of_a_crowd(9, rounds))
    peers = [f"peer{i}-x" for i in range(9)]
    assert _row_names(seconds) == ["PyTorch without DP", *peers]
    assert _row_names(ratios) == peers
    middle = 1.0 if rounds == 1 else 1.1
    for figure, numbers in ((seconds, [f"{(i + 2) * middle:.3g}" for i in range(9)]), (ratios, ["2.00", "9.00"])):
        squares = figures.rows(figure, "rect")
        texts = [square["text"] for square in squares]
        assert sum(text == "oom" for text in texts) == 1
        assert any(text.endswith("ᵈ") for text in texts)
        assert all(any(text.startswith(number) for text in texts) for number in numbers)
        assert any(square["interval"] for square in squares) == (rounds > 1)
        assert "disturbed" in figures.words(figure)
    assert "oom: oom on purpose." in figures.words(seconds)


def _row_names(figure):
    return figures.panels(figure)[0]["layer"][0]["encoding"]["y"]["sort"]


def test_as_many_as_there_are_colours_are_lines():
    for figure in _figures_of(_of_a_crowd(7, 1)):
        assert {f"peer{i}-x" for i in range(6)} <= set(figures.legend(figure))
        assert figures.rows(figure, "line") and not figures.rows(figure, "rect")


def test_the_darker_the_slower():
    from harness.report.figures.heatmap import HeatmapCell, grid

    squares = {("a", 16): HeatmapCell("1", 1.0), ("a", 64): HeatmapCell("4", 4.0)}
    rows = figures.rows(grid(["a"], [16, 64, 256], squares), "rect")
    quick, slow, missing = (sum(bytes.fromhex(row["colour"][1:])) for row in rows)
    assert slow < quick
    assert missing > slow
    assert [row["text"] for row in rows] == ["1", "4", "–"]


def test_the_same_records_draw_the_same_bytes(tmp_path):
    t = build(factory.quick_run(tasks=("mnist-cnn",)), factory.PAPER_ROWS)
    first, again = (output.write_report(report_of(t), tmp_path / n / "out", tmp_path / n / "plots") for n in ("a", "b"))
    for old, new in zip(first, again, strict=True):
        assert old.name == new.name
        if old.suffix == ".pdf":  # made from the SVG, its objects in no fixed order
            assert abs(old.stat().st_size - new.stat().st_size) < 1000
        else:
            assert old.read_bytes() == new.read_bytes(), old.name


def test_csv_can_be_read_back(written, quick):
    path = named(written, "seconds-per-epoch", ".csv")[0]
    frame = pd.read_csv(path)
    assert len(frame) == len(quick.cells) == 40
    assert np.allclose(frame["median"].dropna(), quick.cells["median"].dropna())
    assert set(frame.state) == {"ok", "oom", "unsupported"}


def test_markdown_of_a_quick_run_begins_with_the_result_and_is_short(quick):
    lines = markdown.page(report_of(quick)).splitlines()
    assert lines[2].startswith("**With DP, dpcore") and len(lines) < 300
    gate = lines.index("**Admission gate: checks passed**")
    assert sum(line.startswith("| opacus-hooks |") and " of " in line for line in lines[gate : gate + 12]) == 1


def test_the_first_table_says_what_its_marks_and_names_mean(quick):
    first = markdown.page(report_of(quick)).split("\n## ")[0]
    assert "JAX (DP) `jax-vmap`" in first and "`imdb-embedding`" in first
    for mark, meaning in (("ᵉ", "ᵉ extrapolated"), ("ᵈ", "ᵈ disturbed")):
        assert (mark in first) == (meaning in first)
    assert "ᵉ extrapolated" in first


def test_markdown_shows_measured_and_published_values_apart(quick):
    page = markdown.page(report_of(quick))
    assert PUBLISHED_LABEL not in page and "arXiv:2109.12298" in page
    titles = [g.title for c in report_of(quick).chapters if c.title == "Seconds per epoch" for g in c.grids]
    assert len(titles) == 8 and sum(PUBLISHED_LABEL in title for title in titles) == 4
    for chapter in ("Relative to PyTorch without DP", "Peak memory", "Coverage"):
        assert f"### {chapter}" in page
    for chapter in ("Start-up", "Privacy", "Accuracy"):
        assert f"### {chapter}" not in page and chapter in page.splitlines()[-1]
    widths = [line.count("|") for line in page.splitlines() if line.startswith("|")]
    assert min(widths) >= 3


def test_markdown_survives_bars_and_line_breaks_in_a_reason():
    t = build([factory.record(state="crashed", reason="a | b\nc")], factory.PAPER_ROWS)
    assert all(not line.startswith("c") for line in markdown.page(report_of(t)).splitlines())


def test_latex_escapes_whatever_a_reason_holds():
    assert latex.escape("50% & $x_1$ #{~^\\") == (
        r"50\% \& \$x\_1\$ \#\{\textasciitilde{}\textasciicircum{}\textbackslash{}"
    )


def test_every_grid_is_a_table_for_latex(quick):
    failures = next(c for c in report_of(quick).chapters if c.title == "Failures and rejections")
    text = latex.chapter(failures, "failures")
    assert "no rule for an LSTM" in text and text.count(r"\begin{longtable}") == len(failures.grids)
    assert r"\label{tab:failures}" in text and "2026-11-20" in text


def test_the_main_table_goes_into_a_paper_as_it_is(written, quick):
    folder = written[0].parent
    text = (folder / "tab-main_synthetic.tex").read_text()
    assert text.count(r"\begin{table*}") == 1 and r"\label{tab:main_synthetic}" in text
    rows = [line for line in text.splitlines() if line.endswith(r"\\")]
    names = [row.partition(" &")[0] for row in rows[2:]]
    ordered = [quick.title(n) for n in quick.order if n != "pytorch-eager"]
    assert names == [*ordered, r"\textit{PyTorch without DP}"], "the fastest first, with names for readers"
    # The fastest with DP of each of the eight columns, and no other, is in bold.
    assert text.count(r"\textbf") == 8 and rows[2].count(r"\textbf") == 8
    assert "2109.12298" in (folder / "dpbench.bib").read_text()
    labels = [found for p in folder.glob("*.tex") for found in re.findall(r"\\label{([^}]*)}", p.read_text())]
    assert len(labels) == len(set(labels))


@pytest.mark.skipif(
    shutil.which("pdflatex") is None,
    reason="no LaTeX on this machine: the table is not compiled (Debian: apt install texlive-latex-recommended)",
)
def test_the_main_table_compiles_and_fits_on_a_page(tmp_path, written):
    wide = factory.quick_run(rounds=6, batch_sizes=(16, 32, 64, 128, 256, 512, 1024, 2048), extrapolated_tasks=())
    tables = [(written[0].parent / "tab-main_synthetic.tex").read_text()]
    tables.append(output.texts(report_of(build(wide, factory.PAPER_ROWS)))["tab-main.tex"])
    for text in tables:
        body = "\\footnotesize" + text
        (tmp_path / "x.tex").write_text(
            "\\documentclass{article}\\usepackage[a4paper,margin=20mm]{geometry}\\usepackage{booktabs}"
            f"\\begin{{document}}{body}\\end{{document}}"
        )
        command = ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "x.tex"]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, errors="replace")
        assert done.returncode == 0, done.stdout[-2000:]
        assert "Float too large" not in done.stdout


def test_cumulative_seconds_start_with_the_compilation_and_go_on_with_the_median():
    curve = task_figures.cumulative_seconds([1.0, 3.0, 2.0], 10.0)
    assert curve[:4].tolist() == [11.0, 14.0, 16.0, 18.0]
    assert curve[-1] == 10.0 + 6.0 + 17 * 2.0
    whole = task_figures.cumulative_seconds([1.0] * 25, 0.0)
    assert len(whole) == 20 and whole[-1] == 20.0


def test_contestants_without_dp_are_black_and_all_looks_differ(quick):
    private = dict(zip(quick.raw.contestant, quick.raw.private, strict=True))
    shown = looks.of_all(quick.order, private)
    assert shown["pytorch-eager"].colour == "#000000"
    assert len(set(shown.values())) == len(shown)


def test_failures_only_make_a_report_without_figures(tmp_path):
    t = build([factory.record(state="crashed", reason="boom")], factory.PAPER_ROWS)
    paths = output.write_report(report_of(t), tmp_path / "out", tmp_path / "plots")
    assert not [p for p in paths if p.suffix == ".png"]
    assert "boom" in (tmp_path / "out" / "report.md").read_text()


def test_two_machines_make_figures_of_their_own(tmp_path):
    tasks = ("mnist-cnn",)
    runs = factory.quick_run(rounds=1, tasks=tasks)
    runs += factory.quick_run(rounds=1, tasks=tasks, machine=factory.OTHER_MACHINE)
    paths = output.write_report(contents.build(runs), tmp_path / "out", tmp_path / "plots")
    assert len({p.name for p in paths}) == len(paths)
    assert len([p for p in paths if p.suffix == ".png"]) == 6


def test_a_folder_that_cannot_be_made_is_bad_input(tmp_path, quick):
    (tmp_path / "file").write_text("")
    with pytest.raises(BadInput, match="cannot be made"):
        output.write_report(report_of(quick), tmp_path / "file" / "out", tmp_path / "plots")


def shown(records, width=100):
    console = Console(file=io.StringIO(), width=width)
    terminal.show(contents.build(list(records)), console)
    return console.file.getvalue()


def test_the_terminal_shows_times_ratios_and_failures():
    text = shown(factory.quick_run())
    for part in (
        "MNIST CNN: median seconds per epoch",
        "relative to PyTorch without DP",
        "unsupported: opacus-ghost",
        "oom",
    ):
        assert part in text


def test_a_narrow_terminal_shows_every_column_all_the_same():
    sizes = (16, 32, 64, 128, 256, 512, 1024, 2048)
    text = shown(factory.quick_run(rounds=1, batch_sizes=sizes), width=70)
    assert all(f"batch {size}" in text for size in sizes)
    assert "…" not in text


def test_parts_of_a_table_begin_with_what_tells_their_rows_apart():
    header = ("layer", "batch", "a-long-contestant", "another-contestant", "a-third-contestant")
    rows = tuple(("lstm", size, "1.00×", "2.00×", "3.00×") for size in ("16", "512"))
    stream = io.StringIO()
    chapter = model.Chapter("Layers", None, (model.Grid("factors", header, rows),), in_terminal=True)
    terminal.show(contents.Report((), None, (chapter,)), Console(file=stream, width=60))
    text = stream.getvalue()
    assert text.count("batch") == 2 and all(name in text for name in header), text


def test_what_was_too_disturbed_says_so_and_what_to_do():
    rows = [("opacus", "hooks", True, 0.86), ("opacus", "ghost", True, 0.2), ("pytorch", "eager", False, 0.0)]
    rows.append(("jax", "vmap", True, 0.9))  # in turns on one thread, where waiting is not among the seconds
    records = [
        factory.record(framework=framework, variant=variant, private=private, order=order).model_copy(
            update={"load": Load(foreign_share=share, disturbed=share > 0.05 and framework != "jax", repeats=1)}
        )
        for order, (framework, variant, private, share) in enumerate(rows)
    ]
    built = contents.build(records)
    text = shown(records, width=400)
    assert "too disturbed to be a result" in text and "--fresh: opacus-hooks at 512" in text
    for words in (markdown.page(built), page.page(built, {}), "\n".join(conclusion.sentences(built))):
        assert "too disturbed to be a result" in words and "--fresh" in words
    _, _, over = markdown.page(built).partition("seconds relative to PyTorch without DP**")
    assert "| opacus-hooks | 1.00×‼ |" in over and "‼ too disturbed" in over.partition("**")[0], "as its time is marked"
    assert "| opacus-ghost | 1.00×ᵈ |" in over
    assert built.tables.cells.set_index("contestant").swamped.to_dict() == {
        "opacus-hooks": True,
        "opacus-ghost": False,
        "pytorch-eager": False,
        "jax-vmap": False,
    }


def test_memory_is_sorted_by_memory_whether_or_not_anything_was_timed():
    bytes_of = {"a": (300, 900), "b": (100, 800), "c": (200, 200), "z": (50, 60)}
    records = [
        factory.record(
            framework=name, purpose="memory", batch_size=size, memory={"peak_resident_growth": value * 2**20}
        )
        for name, values in bytes_of.items()
        for size, value in zip((64, 512), values, strict=True)
    ]
    assert re.findall(r"^  (\w)-hooks", shown(records), re.M) == ["z", "c", "b", "a"], "nothing else is to be seen"
    _, _, table = markdown.page(contents.build(records)).partition("MiB of peak_resident_growth**")
    assert re.findall(r"^\| (\w)-hooks", table, re.M)[:4] == ["z", "c", "b", "a"]


def test_the_terminal_names_failed_gate_checks():
    text = shown([factory.record(purpose="gate", state="rejected", gate_passed=False, reason="gate")], width=160)
    assert "failed checks" in text and "the noise is 10 times too small" in text
    assert not shown([factory.record(purpose="gate")]).strip(), "it was stopped before its first time"


def _busy_seconds() -> float:
    """Processor seconds, of the system too, of the processes that this one has started and that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _written(folder: Path, **size: Any) -> int:
    """Writes the records of a run of that size, packed, and says how many; the page's script is in the cache after."""
    copies = size.pop("copies", 1)
    made = [
        r.model_copy(update={"cell": r.cell.model_copy(update={"framework": f"{r.cell.framework}{k or ''}"})})
        for k in range(copies)
        for r in factory.quick_run(seed=k, **size)
    ]
    factory.write(made, folder, packed=True)
    page.vega()
    return len(made)


def test_the_work_of_a_report_is_bounded(tmp_path):
    """Calls of functions, imports included: the same number on a busy machine (3.15 million of them, to one in ten
    thousand, in November 2026), where every clock, the processor's too, runs slower."""
    assert _written(tmp_path / "records", rounds=12, batch_sizes=(64, 512)) >= 500
    profile = tmp_path / "profile"
    command = ["-m", "harness", "report", str(tmp_path / "records"), "--out", str(tmp_path / "out")]
    subprocess.run([sys.executable, "-m", "cProfile", "-o", str(profile), *command], check=True, capture_output=True)
    assert 1e6 < pstats.Stats(str(profile)).total_calls < 4.5e6
    assert (tmp_path / "out" / "report.html").stat().st_size < 6_000_000


@pytest.mark.slow  # a clock decides it
def test_a_large_report_is_made_in_seconds(tmp_path):
    sizes = (16, 32, 64, 128, 256, 512, 1024, 2048)
    assert _written(tmp_path / "records", copies=3, rounds=20, batch_sizes=sizes) >= 10_000
    start = _busy_seconds()
    command = [sys.executable, "-m", "harness", "report", str(tmp_path / "records"), "--out", str(tmp_path / "out")]
    subprocess.run(command, check=True, capture_output=True)
    assert _busy_seconds() - start < 20, "10 s on a quiet machine of 2026"
    assert (tmp_path / "out" / "report.html").stat().st_size < 6_000_000


def test_records_from_before_some_fields_are_read_beside_new_ones_and_a_newer_schema_is_refused(tmp_path):
    line = factory.record().to_json()
    (tmp_path / "new.jsonl").write_text(line + "\n")
    older = {k: v for k, v in json.loads(line).items() if k not in {"load", "image", "log_tail", "memory"}}
    older["cell"].pop("kind")
    older["block"]["round"] = 1
    (tmp_path / "old.json").write_text(json.dumps(older))
    tables = build(load(tmp_path), factory.PAPER_ROWS)
    assert tables.cells.n.tolist() == [2]
    (tmp_path / "newer.json").write_text(json.dumps({**json.loads(line), "schema": SCHEMA + 1}))
    with pytest.raises(BadInput, match=rf"newer.json has record schema {SCHEMA + 1}, .*update dpbench"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [
        (0.7, 1.45, [0.8, 1.0, 1.2, 1.4]),
        (0.9, 1.11, [0.9, 0.95, 1.0, 1.05, 1.1]),
        (0.56, 1.2, [0.6, 0.8, 1.0, 1.2]),
        (0.3, 1.3, [0.4, 0.6, 0.8, 1.0, 1.2]),
        (0.1, 1.05, [0.125, 0.25, 0.5, 1.0]),
        (0.4, 3.0, [0.5, 1.0, 2.0]),
        (0.4, 5000.0, [1.0, 4.0, 16.0, 64.0, 256.0, 1024.0, 4096.0]),
        (0.0, 1.0, []),
    ],
)
def test_an_axis_of_factors_has_ticks_on_both_sides_of_its_one(low, high, ticks):
    assert [value for value, _ in panel.factor_ticks(low, high)] == pytest.approx(ticks)


@pytest.mark.parametrize(("low", "high"), [(76.0, 160.0), (0.041, 0.052), (95.0, 130.0), (10.0, 29.0), (3.0, 50.0)])
def test_a_short_axis_of_seconds_is_labelled_on_all_its_length(low, high):
    labelled = [value for value, label in panel.plain_ticks(low, high) if label]
    assert len(labelled) >= 3
    edges = [math.log(low), *sorted(map(math.log, labelled)), math.log(high)]
    assert max(later - earlier for earlier, later in itertools.pairwise(edges)) < 0.55 * (edges[-1] - edges[0])
