"""How contestants look: declared once, the same in every figure, few in colour."""

from __future__ import annotations

import io
import math
import re
from dataclasses import replace

import numpy as np
import pytest
import vl_convert
from PIL import Image

from harness.analysis.frames import build
from harness.errors import BadInput
from harness.plan import registry
from harness.report.figures import drawing, headline, looks
from harness.report.figures.drawing import Drawing
from harness.report.figures.panel import Panel, Scale, lines
from tests.support import record_factory as factory

BLACK = looks.Look("#000000", "o", "-")


def test_every_framework_declares_a_look_of_its_own():
    declared = [(f.colour, f.marker) for f in registry.frameworks().values()]
    assert len(set(declared)) == len(declared)
    assert len({colour for colour, _ in declared}) == len(declared)
    text = [(f.folder / "framework.toml").read_text() for f in registry.frameworks().values()]
    assert all("colour = " in t and "marker = " in t for t in text)


def test_a_look_does_not_depend_on_who_else_is_in_the_report():
    alone = build([factory.record()], factory.PAPER_ROWS)
    several = build(factory.quick_run(rounds=1), factory.PAPER_ROWS)
    shown = [
        looks.of_all(t.order, dict(zip(t.raw.contestant, t.raw.private, strict=True)))["opacus-hooks"]
        for t in (alone, several)
    ]
    assert shown[0] == shown[1] == looks.of("opacus-hooks")


def test_variants_of_a_framework_share_its_colour_and_differ_in_line_and_fill():
    own = [looks.of(f"dpcore-{variant}") for variant in ("engine", "native", "compiled")]
    assert len({look.colour for look in own}) == 1 and len({(look.line, look.fill) for look in own}) == 3


def test_six_are_in_colour_ours_and_the_fastest_and_the_rest_is_grey():
    names = [*(f"peer{i}-x" for i in range(9)), "dpcore-engine", "pytorch-eager"]
    shown = looks.of_all(names, {name: name != "pytorch-eager" for name in names})
    grey = {name for name, look in shown.items() if look.colour == looks.GREY}
    assert grey == {f"peer{i}-x" for i in range(5, 9)}


@pytest.mark.parametrize(("line", "words"), [('colour = "red"', "#RRGGBB"), ('marker = "oo"', "choose one of")])
def test_a_look_that_cannot_be_drawn_is_refused(tmp_path, line, words):
    head = 'name = "a"\ntitle = "a"\nhome = ""\nlicence = ""\npython = "3.11"\n'
    (tmp_path / "framework.toml").write_text(f'{head}{line}\n[[variants]]\nname = "b"\ntitle = "b"\nprivate = true\n')
    with pytest.raises(BadInput, match=words):
        registry.load(tmp_path)


def test_a_new_colour_does_not_outdate_measurements(tmp_path):
    head = 'name = "a"\ntitle = "a"\nhome = ""\nlicence = ""\npython = "3.11"\n'
    tail = '[[variants]]\nname = "b"\ntitle = "b"\nprivate = true\n'
    found = []
    for text in (head + tail, head + 'colour = "#0072B2"\nmarker = "v"\n' + tail, head.replace("3.11", "3.12") + tail):
        (tmp_path / "framework.toml").write_text(text)
        found.append(registry.load(tmp_path).adapter_hash)
    assert found[0] == found[1] != found[2]


def panel_of(low, high):
    return Panel(Drawing(400), 50, 10, 390, 200, Scale(10, 1000), Scale(low, high))


UNKNOWN = (math.nan, math.nan)


def test_no_line_is_drawn_through_a_size_that_was_not_measured():
    one = panel_of(1, 10)
    lines(one, [16, 64, 256, 512], {16: (2.0, *UNKNOWN), 256: (2.5, *UNKNOWN), 512: (3.0, *UNKNOWN)}, BLACK)
    (drawn,) = one.drawing.curves
    assert [x for x, _ in drawn.points] == pytest.approx([one.at(size, 1)[0] for size in (256, 512)])
    assert len(one.drawing.marks) == 3


def test_an_interval_that_leaves_the_axis_ends_in_an_arrow():
    one = panel_of(1, 10)
    lines(one, [16, 64], {16: (2.0, 0.1, 50.0), 64: (3.0, 2.9, 3.1)}, BLACK)
    arrows = {mark.shape: mark.y for mark in one.drawing.marks if mark.shape in "v^"}
    assert arrows == {"v": one.bottom, "^": one.top}
    assert all(one.top <= y <= one.bottom for curve in one.drawing.curves for _, y in curve.points)


def test_a_name_beside_a_line_stays_inside_of_the_panel_and_off_other_names():
    one = panel_of(1, 10)
    for name, end in (
        ("a contestant with a long name that no legend holds " * 3, 9.0),
        ("in its place", 8.9),
        ("far", 2.0),
    ):
        lines(
            one, [16, 512], {16: (2.0, *UNKNOWN), 512: (end, *UNKNOWN)}, replace(BLACK, colour=looks.GREY), label=name
        )
    first, second = one.drawing.texts
    assert first.text.endswith("…") and first.x - drawing.width(first.text, first.size) >= one.left
    assert second.text == "far" and second.y - first.y >= first.size, "a name that has no room is left out"


@pytest.mark.parametrize("shape", registry.MARKERS)
def test_every_marker_that_a_framework_may_declare_can_be_drawn(shape):
    assert shape in drawing.SHAPES


def test_a_half_filled_marker_is_filled_on_one_side():
    page = Drawing(20, 20, [drawing.Mark(10, 10, "D", 8, "#123456", "left")])
    _, half = [part for part in page.svg().split("<path ") if "#123456" in part]
    right = max(float(x) for x in re.findall(r"[ML](\S+) ", half))
    assert right == 10


def test_text_is_drawn_the_same_whether_letters_are_reused_or_not():
    page = Drawing(200, 20)
    page.write(5, 15, "dpcore 1.09× [1.01, 1.16]", 8, style="bold")
    shots = [vl_convert.svg_to_png(page.svg(reuse=reuse), scale=2.0) for reuse in (True, False)]
    first, second = (np.asarray(Image.open(io.BytesIO(shot)).convert("L"), dtype=float) for shot in shots)
    assert first.min() < 60, "something is written"
    assert np.corrcoef(first.ravel(), second.ravel())[0, 1] > 0.99 and 'aria-label="dpcore' in page.svg()


def test_a_text_is_as_wide_as_its_letters():
    assert drawing.width("MM", 10) == pytest.approx(2 * drawing.width("M", 10))
    assert drawing.width("i", 10) < drawing.width("M", 10) < drawing.width("M", 10, "bold")


FAST = headline.Mark("dpcore", looks.of("dpcore-loop"), 1.1, True, 0.9, 1.4)
SLOW = headline.Mark("Opacus", looks.of("opacus-hooks"), 42.0, False)


def test_the_front_page_s_figure_has_a_mark_with_its_number_and_interval_for_each_contestant():
    part = headline.Part("Batch 64", [("MNIST CNN", [FAST, SLOW]), ("IMDb LSTM", [FAST])], "note", "a Zen 4")
    for theme in headline.THEMES.values():
        figure = headline.draw("title", [part, part], theme)
        assert [text.get_text() for text in figure.legends[0].get_texts()] == ["dpcore", "Opacus"]
        for axes in figure.axes:
            assert [label.get_text() for label in axes.get_yticklabels()] == ["MNIST CNN", "IMDb LSTM"]
            assert [text.get_text() for text in axes.texts] == ["a Zen 4", "1.10", "42.0", "1.10"]
            places = [float(line.get_xdata()[0]) for line in axes.lines if line.get_marker() != "None"]
            assert places == [1.1, 42.0, 1.1]
            whiskers = [list(line.get_xdata()) for line in axes.lines if list(line.get_xdata()) == [0.9, 1.4]]
            assert len(whiskers) == 2, "what has no interval has no line"
            assert axes.texts[1].xy[0] == 1.4, "the number stands behind the interval"
            assert axes.get_xlim()[0] < 0.9 and axes.get_xlim()[1] > 42.0
