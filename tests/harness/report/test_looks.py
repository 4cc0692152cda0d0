"""How contestants look: declared once, the same in every figure, few in colour."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from harness.analysis.frames import build
from harness.errors import BadInput
from harness.plan import registry
from harness.report.figures import headline, looks
from harness.report.figures.panel import Axis, Panel, over_sizes
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
    return Panel(Axis(10, 1000), Axis(low, high), 300, 200)


UNKNOWN = (math.nan, math.nan)


def test_no_line_is_drawn_through_a_size_that_was_not_measured():
    one = panel_of(1, 10)
    shown = {16: (2.0, *UNKNOWN), 256: (2.5, *UNKNOWN), 512: (3.0, *UNKNOWN)}
    over_sizes(one, [16, 64, 256, 512], shown, BLACK)
    pieces = [row["piece"] for row in one.lines]
    assert [row["x"] for row in one.lines] == [16, 256, 512] and pieces[0] != pieces[1] == pieces[2]
    assert len(one.marks) == 3


def test_an_interval_that_leaves_the_axis_ends_in_an_arrow():
    one = panel_of(1, 10)
    over_sizes(one, [16, 64], {16: (2.0, 0.1, 50.0), 64: (3.0, 2.9, 3.1)}, BLACK)
    arrows = {mark["shape"]: mark["y"] for mark in one.marks if "triangle" in mark["shape"]}
    assert arrows == {"triangle-down": 1, "triangle-up": 10}
    assert all(1 <= end <= 10 for bar in one.bars for end in (bar["y"], bar["y2"]))


def test_a_name_beside_a_line_stays_inside_of_the_panel_and_off_other_names():
    one = panel_of(1, 10)
    grey = replace(BLACK, colour=looks.GREY)
    for name, end in (("a long name that no legend holds " * 5, 9.0), ("in its place", 8.9), ("far", 2.0)):
        over_sizes(one, [16, 512], {16: (2.0, *UNKNOWN), 512: (end, *UNKNOWN)}, grey, label=name)
    first, second = (row["text"] for row in one.texts)
    assert first.endswith("…") and len(first) < 70
    assert second == "far", "a name that has no room is left out"


@pytest.mark.parametrize("shape", registry.MARKERS)
def test_every_marker_that_a_framework_may_declare_can_be_drawn(shape):
    assert shape in looks.SHAPES


def test_a_marker_is_filled_with_its_colour_with_a_tint_of_it_or_not():
    found = [looks.inside(replace(BLACK, fill=fill)) for fill in ("full", "left", "bottom", "none")]
    assert found[0] == "#000000" and found[-1] == "#FFFFFF" and len(set(found)) == 4


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
