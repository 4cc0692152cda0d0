"""Looks of contestants: the colour and marker that its framework declares, so that it is the same in every report."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal

from harness.analysis.naming import BASELINE_FRAMEWORK
from harness.plan.registry import Framework, frameworks

Fill = Literal["full", "none", "left", "right", "top", "bottom"]
Line = Literal["-", "--", "-.", ":", ""]

LIBRARY = "dpcore"
"""The framework of this repository, which every figure highlights."""
MOST_HIGHLIGHTED = 6
"""Colours that a reader can follow in one figure; the other contestants are grey."""
GREY = "#9AA0A6"
OF_VARIANTS: Sequence[tuple[Line, Fill]] = (
    *(("-", "full"), ("--", "none"), ("-.", "left"), (":", "right"), ("--", "top"), ("-.", "bottom")),
)
"""Line and fill of a framework's first private variant, its second, and so on."""
WITHOUT_DP: Sequence[tuple[Line, Fill]] = ((":", "none"), ("-.", "none"))
UNKNOWN = ("#6E6E6E", "o")
"""Look of contestants that no framework of this checkout declares: records outlive names."""


PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8C6D31", "#7B4FA3")
"""Okabe and Ito's colours, told apart by colour-blind people, and two more: for what is no contestant."""
MARKERS = "os^Dv<>PX*hd"
SHAPES = {
    **{"o": "circle", "s": "square", "^": "triangle-up", "v": "triangle-down", "<": "triangle-left"},
    **{">": "triangle-right", "D": "diamond", "d": "diamond", "P": "cross", "X": "cross", "8": "circle"},
    "*": "M0,-1L.24,-.32 .95,-.31 .38,.12 .59,.81 0,.4 -.59,.81 -.38,.12 -.95,-.31 -.24,-.32Z",
    **dict.fromkeys("phH", "M0,-.95L.82,-.47 .82,.47 0,.95 -.82,.47 -.82,-.47Z"),
    **{"x": "M-.8,-.8L.8,.8M-.8,.8L.8,-.8", "_": "stroke"},
}
"""Letter of a marker -> the shape, as Vega names or draws it."""
DASHES: Mapping[str, list[int]] = {"-": [1, 0], "--": [6, 3], "-.": [6, 3, 2, 3], ":": [2, 2]}
TINTS: Mapping[Fill, float] = {"full": 1.0, "left": 0.5, "right": 0.5, "top": 0.25, "bottom": 0.25, "none": 0.0}
"""How much of a marker's colour is inside of it; the rest is white."""


@dataclass(frozen=True)
class Look:
    """``line``: empty where points are not joined; ``fill``: how much of the marker is filled."""

    colour: Any
    marker: str
    line: Line
    fill: Fill = "full"


@cache
def _frameworks() -> Mapping[str, Framework]:
    """Read once: a report asks for some hundred looks."""
    return frameworks()


@cache
def _declared() -> Mapping[str, Look]:
    found = {}
    for framework in _frameworks().values():
        seen = {True: 0, False: 0}
        for variant in framework.variants:
            styles = OF_VARIANTS if variant.private else WITHOUT_DP
            line, fill = styles[seen[variant.private] % len(styles)]
            seen[variant.private] += 1
            found[f"{framework.name}-{variant.name}"] = Look(framework.colour, framework.marker, line, fill)
    return found


def of(contestant: str) -> Look:
    """Return the look of a contestant, which depends on nothing else."""
    declared = _declared().get(contestant)
    if declared is not None:
        return declared
    framework = _frameworks().get(contestant.partition("-")[0])
    colour, marker = (framework.colour, framework.marker) if framework else UNKNOWN
    return Look(colour, marker, "-")


def is_own(contestant: str) -> bool:
    """Return whether it is a contestant of this repository."""
    return contestant.startswith(f"{LIBRARY}-")


def highlighted(by_speed: Iterable[str], private: Mapping[str, bool]) -> list[str]:
    """Return who is shown in colour: the contestants of this repository, then the fastest others with DP.

    Args:
        by_speed: Contestants, the fastest first.
        private: Contestant -> whether it trains with DP.
    """
    names = [name for name in by_speed if private[name]]
    own = [name for name in names if is_own(name)]
    return [*own, *(name for name in names if name not in own)][:MOST_HIGHLIGHTED]


def of_all(names: Sequence[str], private: Mapping[str, bool]) -> dict[str, Look]:
    """Return the looks of one figure. ``names``: the fastest first. Who is neither highlighted nor PyTorch is grey."""
    bright: Collection[str] = {
        *highlighted(names, private),
        *(n for n in names if n.startswith(f"{BASELINE_FRAMEWORK}-")),
    }
    return {name: of(name) if name in bright else replace(of(name), colour=GREY) for name in names}


def line(colour: str, kind: Line = "-") -> Look:
    """Return the look of a line that is no contestant's."""
    return Look(colour, "o", kind)


def inside(look: Look) -> str:
    """Return the colour inside of a marker."""
    share = TINTS[look.fill]
    parts = [int(str(look.colour)[i : i + 2], 16) for i in (1, 3, 5)]
    return "#" + "".join(f"{round(255 - share * (255 - part)):02X}" for part in parts)


def light(colour: str) -> str:
    """Return the colour for a dark page: halfway to white where it is darker than a middle grey."""
    parts = [int(colour[i : i + 2], 16) for i in (1, 3, 5)]
    luminance = 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2]
    return colour if luminance > 140 else "#" + "".join(f"{(255 + part) // 2:02X}" for part in parts)
