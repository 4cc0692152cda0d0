"""How contestants look: declared once, the same in every figure, few in colour."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from matplotlib.figure import Figure

from harness.analysis.frames import build
from harness.errors import BadInput
from harness.plan import registry
from harness.report.figures import headline, looks
from harness.report.figures import tasks as task_figures
from tests.support import record_factory as factory


def test_every_framework_declares_a_look_of_its_own():
    declared = [(f.colour, f.marker) for f in registry.frameworks().values()]
    assert len(set(declared)) == len(declared)
    assert len({colour for colour, _ in declared}) == len(declared)
    text = [(f.folder / "framework.toml").read_text() for f in registry.frameworks().values()]
    assert all("colour = " in t and "marker = " in t for t in text)


def test_a_look_does_not_depend_on_who_else_is_in_the_report():
    alone = build([factory.record()], factory.PAPER_ROWS)
    crowd = build(factory.quick_run(rounds=1), factory.PAPER_ROWS)
    shown = [
        looks.of_all(t.order, dict(zip(t.raw.contestant, t.raw.private, strict=True)))["opacus-hooks"]
        for t in (alone, crowd)
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


def test_no_line_is_drawn_through_a_size_that_was_not_measured():
    axes = Figure().add_subplot()
    axes.set_ylim(1, 10)
    shown = pd.DataFrame({"median": [2.0, 3.0], "low": np.nan, "high": np.nan}, index=[16, 512])
    task_figures.line(axes, [16, 64, 512], shown, looks.Look("#000000", "o", "-"))
    (drawn,) = (line for line in axes.lines if len(line.get_xdata()) == 3)
    assert np.isnan(drawn.get_ydata()[1])


def test_an_interval_that_leaves_the_axis_ends_in_an_arrow():
    axes = Figure().add_subplot()
    axes.set_ylim(1, 10)
    shown = pd.DataFrame({"median": [2.0, 3.0], "low": [0.1, 2.9], "high": [50.0, 3.1]}, index=[16, 64])
    task_figures.line(axes, [16, 64], shown, looks.Look("#000000", "o", "-"))
    arrows = {line.get_marker(): list(line.get_xydata()[:, 1]) for line in axes.lines if line.get_marker() in "v^"}
    assert arrows == {"v": [1.0], "^": [10.0]}


def test_a_name_beside_a_line_takes_no_room_from_the_axes():
    figure = Figure(figsize=(3, 2), layout="constrained")
    axes = figure.add_subplot()
    axes.set_xlim(10, 1000)
    axes.set_ylim(1, 10)
    shown = pd.DataFrame({"median": [2.0, 3.0], "low": np.nan, "high": np.nan}, index=[16, 512])
    look = looks.Look(looks.GREY, "o", "-")
    task_figures.line(axes, [16, 512], shown, look, label="a contestant with a long name that no legend holds")
    figure.draw_without_rendering()
    assert axes.get_position().width > 0.7 and axes.get_position().height > 0.7
    assert axes.get_tightbbox().y0 > 0


def test_the_front_page_s_figure_has_sorted_bars_with_their_numbers():
    bars = [headline.Bar("dpcore", 0.56, True), headline.Bar("Opacus", 42.0, False)]
    for theme in headline.THEMES.values():
        figure = headline.draw("title", [("MNIST CNN", bars), ("IMDb LSTM", bars)], "note", theme)
        axes = figure.axes[0]
        assert [label.get_text() for label in axes.get_yticklabels()] == ["dpcore", "Opacus"]
        assert [text.get_text() for text in axes.texts] == ["0.56×", "42.0×"]
        widths = [bar.get_width() for bar in axes.patches]
        assert widths == [0.56, headline.LONGEST_BAR], "a bar that is cut says so by an arrow"
        assert [line.get_marker() for line in axes.lines if line.get_marker() == ">"] == [">"]
