"""Who wins where and by how much, in words: a paragraph over all tasks, then a line for each of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pandas as pd

from harness.analysis.frames import Tables
from harness.analysis.naming import factor
from harness.analysis.standing import Paired, Place, Standing, standings
from harness.analysis.tidy import CELL, PLACE, SECTION
from harness.report import model
from harness.tasks import TASKS

EXPLAINED = (
    "In parentheses: how many times the leader's time the next framework takes, the mean of paired rounds. Shown: its "
    "95 % interval, of three undisturbed rounds or more, lies above 1, and no other framework's holds 1. Of one or two "
    "processes each there is no interval: another one may turn it round."
)


@dataclass(frozen=True)
class _Told:
    """What is said of one task and batch size."""

    name: str
    standing: Standing
    swamped: bool


def text(tables: Tables) -> str:
    """Return the paragraph, a line for every task and batch size, and what they rest on; empty where nobody with DP was
    timed. Machines and protocols have a paragraph of their own."""
    found = standings(tables)
    places = in_order(found)
    several = len({place[: len(SECTION)] for place in found}) > 1
    parts = []
    for section in dict.fromkeys(place[: len(SECTION)] for place in places):
        here = [place for place in places if place[: len(SECTION)] == section]
        told = [_Told(_name(place), found[place], _is_swamped(tables, place, found[place])) for place in here]
        machine = f"{_when(tables, section)}: " if several else ""
        parts.append(machine + _paragraph(tables, told))
        parts.append("\n".join(f"- {one.name}: {''.join(_line(tables, one))}." for one in told))
        parts.append(f"{EXPLAINED} {basis(tables, section)}.")
    return "\n\n".join(parts)


def in_order(found: Iterable[Place]) -> list[Place]:
    """Return the places in the order of the tasks and sizes."""
    order = {name: i for i, name in enumerate(TASKS)}
    return sorted(found, key=lambda place: (order.get(of(place)["task"], len(order)), of(place)["batch_size"]))


def of(place: Place) -> Mapping[str, Any]:
    """Return the place's values by name."""
    return dict(zip((*PLACE, "batch_size"), place, strict=True))


def _name(place: Place) -> str:
    named = of(place)
    return f"`{named['task']}` at {named['batch_size']}" + (" (synthetic data)" if named["synthetic"] else "")


def _when(tables: Tables, section: Place) -> str:
    return model.readable(model.Section(*section), _in(tables, section))


def _in(tables: Tables, section: Place) -> pd.DataFrame:
    return model.Section(*section).of(tables.raw)


def _is_swamped(tables: Tables, place: Place, standing: Standing) -> bool:
    """Return whether a time of the lead is too disturbed to be a result."""
    both = {standing.first, *([standing.runner_up.contestant] if standing.runner_up else [])}
    swamped = tables.cells.loc[tables.cells.swamped, CELL].itertuples(index=False, name=None)
    return any(tuple(cell[:-1]) == place and cell[-1] in both for cell in swamped)


def _paragraph(tables: Tables, told: list[_Told]) -> str:
    """Return the leaders, those of the most tasks first, each with its leads."""
    leads: dict[str, list[_Told]] = {}
    for one in told:
        leads.setdefault(one.standing.first, []).append(one)
    ordered = sorted(leads.items(), key=lambda item: -len(item[1]))
    parts = [f"{tables.title(name)} on {', '.join(_short(one) for one in ones)}" for name, ones in ordered]
    shown = sum(one.standing.is_shown and not one.swamped for one in told)
    alone = sum(_processes(one.standing) == 1 for one in told)
    count = f"{shown} of {len(told)} leads {'is' if shown == 1 else 'are'} shown"
    doubt = f", {alone} rest{'s' if alone == 1 else ''} on one process each" if alone else ""
    return f"**With DP the fastest is {'; '.join(parts)}.** {count}{doubt}."


def _processes(standing: Standing) -> int:
    """Return the paired processes of a lead, 0 where there is nothing to pair."""
    next_one = standing.runner_up
    return next_one.times.n if next_one is not None and next_one.times is not None else 0


def _short(one: _Told) -> str:
    next_one = one.standing.runner_up
    if next_one is None:
        return f"{one.name} (alone)"
    if next_one.times is None:
        return f"{one.name} (no round with the next)"
    return f"{one.name} ({factor(next_one.times.ratio)}×, {_verdict(one)})"


def _verdict(one: _Told) -> str:
    next_one = one.standing.runner_up
    assert next_one is not None and next_one.times is not None
    if one.swamped:
        return "too disturbed to be a result"
    if next_one.evidence == "few":
        many = {1: "one process each", 2: "two processes each"}.get(next_one.times.n, "")
        return ", ".join(filter(None, (many, "disturbed" if next_one.disturbed else "")))
    if next_one.evidence == "overlap":
        return "within the interval"
    return "not shown of all" if one.standing.level else "shown"


def _line(tables: Tables, one: _Told) -> Iterator[str]:
    """Yield what is said of one task: the leader, the next one, who else is level, and the price of privacy."""
    standing, next_one = one.standing, one.standing.runner_up
    leader = tables.title(standing.first)
    if next_one is None:
        yield f"only {leader} was timed with DP"
    elif next_one.times is None:
        yield f"{leader} is first by its median, and shares no round with {tables.title(next_one.contestant)}"
    else:
        yield f"{leader} is first; {tables.title(next_one.contestant)}, the next, takes {_times(next_one, 'its time')}"
        yield f" ({_verdict(one)})"
    if standing.level:
        yield f"; the intervals of {' and '.join(tables.title(p.contestant) for p in standing.level)} hold 1"
    if standing.price is not None:
        yield f". It takes {_times(standing.price, f'the time of {tables.title(standing.price.contestant)}')}"
        yield ", disturbed" if standing.price.disturbed else ""


def _times(paired: Paired, whose: str) -> str:
    assert paired.times is not None
    times = paired.times
    return f"{factor(times.ratio)} times {whose}{model.interval(times.low, times.high)}, n = {times.n}"


def basis(tables: Tables, section: Place) -> str:
    """Return machine, days, and whether times are scaled up."""
    here = _in(tables, section)
    timed = here[(here.purpose == "time") & (here.state == "ok") & ~here.superseded]
    scaled = "" if not timed.extrapolated.any() else "Times are extrapolated from parts of epochs; "
    return f"{scaled}{_when(tables, section)}"
