"""A comparison in words: the Markdown of a pull request's comment, and the lines of a terminal."""

from __future__ import annotations

from harness.analysis.naming import duration, size
from harness.compare.record import CellResult, Comparison, SideFacts
from harness.store.record import Image

MOST_CHANGES = 12
"""Packages whose change is named, a framework."""

WORST_FIRST = ("wrong", "slower", "failed", "ambiguous", "faster", "repaired", "equivalent", "not compared")


def summary(comparison: Comparison) -> str:
    """Return one sentence."""
    found = sorted(comparison.regressions, key=_rank)
    if found:
        many = f"{len(found)} regressions" if len(found) > 1 else "A regression"
        said = "; ".join(f"{cell.name} {_what(cell)}" for cell in found[:3])
        more = f"; and {len(found) - 3} more" if len(found) > 3 else ""
        return f"{many} of {comparison.head.title} against {comparison.base.title}: {said}{more}."
    if not any(cell.is_compared for cell in comparison.cells):
        late = "the time was up before any cell had enough pairs" if not comparison.finished else "no cell ran"
        return f"Nothing could be compared: {next((c.reason for c in comparison.cells if c.reason), late)}"
    compared = [cell for cell in comparison.cells if cell.verdict not in ("failed", "not compared")]
    text = f"No regression proven in {_count(len(compared), 'cell')}: {_tally(compared)}"
    if missed := len(comparison.failures):
        text += f"; {_count(missed, 'cell')} did not run"
    if left := sum(cell.verdict == "not compared" for cell in comparison.cells):
        text += f"; {_count(left, 'cell')} not compared"
    if blind := sum(cell.lacks_memory for cell in comparison.cells):
        text += f"; the memory of {_count(blind, 'cell')} was not compared"
    return f"{text}."


def _rank(cell: CellResult) -> tuple[int, str]:
    return (0 if cell.alerts else 1) * 10 + WORST_FIRST.index(cell.verdict), cell.name


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' if number != 1 else ''}"


def _tally(cells: list[CellResult]) -> str:
    counts = {verdict: sum(cell.verdict == verdict for cell in cells) for verdict in WORST_FIRST}
    return ", ".join(f"{count} {verdict}" for verdict, count in counts.items() if count)


def _what(cell: CellResult) -> str:
    said = []
    if "gate" in cell.alerts:
        is_rejected = any(state.startswith("failed") for state in cell.gate.values())
        why = "only head fails its correctness check" if is_rejected else "base and head do not compute the same"
        said.append(f"is wrong ({why})")
    if "time" in cell.alerts and cell.time is not None and cell.time.ratio is not None:
        said.append(f"is {percent(cell.time.ratio)} slower ({interval(cell)})")
    if "memory" in cell.alerts and cell.memory is not None:
        said.append(f"holds {size(cell.memory.head - cell.memory.base)} more at its peak")
    return " and ".join(said)


def percent(ratio: float) -> str:
    """Return a ratio as the change that it is: ``+4.2 %``, without a sign where a word says it."""
    return f"{abs(ratio - 1.0) * 100:.1f} %"


def signed(ratio: float) -> str:
    """Return a ratio as a change in per cent, with its sign."""
    return f"{'+' if ratio >= 1.0 else '−'}{percent(ratio)}"


def interval(cell: CellResult) -> str:
    """Return the interval of a cell's change in brackets."""
    if cell.time is None or cell.time.low is None or cell.time.high is None:
        return "no interval yet"
    return f"{signed(cell.time.low)} to {signed(cell.time.high)}"


def _memory(cell: CellResult) -> str:
    memory = cell.memory
    if memory is None:
        return "–"
    change = memory.head - memory.base
    by = f"{'+' if change > 0 else ''}{size(change)}"
    if memory.change == "not judged":
        return f"{size(memory.base)} → {size(memory.head)} (resident, not judged)"
    if memory.change == "same":
        return f"{size(memory.base)}, same"
    by = f"**{by}**" if memory.change == "grown" else by
    return f"{size(memory.base)} → {size(memory.head)} ({by}{'' if memory.proven else ', not confirmed'})"


def _gate(cell: CellResult) -> str:
    if all(said == "passed" for said in cell.gate.values()):
        return "passed"
    short = {role: said.partition(":")[0] for role, said in cell.gate.items()}
    return f"base {short['base']}, head {short['head']}"


def _verdict(cell: CellResult) -> str:
    time = cell.time
    if cell.verdict == "slower" and "time" not in cell.alerts:
        where = "within the threshold" if time is not None and time.within_threshold else "estimate below the threshold"
        text = f"slower ({where})"
    elif cell.verdict == "faster" and time is not None and time.within_threshold:
        text = "faster (within the threshold)"
    else:
        text = cell.verdict
    text = f"**{text}**" if cell.alerts else text
    return text + (" · **memory grown**" if "memory" in cell.alerts else "")


def _row(cell: CellResult) -> list[str]:
    time, figures = cell.time, ["–"] * 3
    if time is not None and time.ratio is not None:
        over = f"{signed(time.ratio)} ({interval(cell)}), n = {time.n}"
        figures = [duration(time.base_seconds), duration(time.head_seconds), over]
    return [f"`{cell.name}`", *figures, _verdict(cell), _memory(cell), _gate(cell)]


COLUMNS = ("cell", "base", "head", "head over base", "verdict", "memory at the peak", "gate")


def markdown(comparison: Comparison) -> str:
    """Return the Markdown of a pull request's comment."""
    cells = sorted(comparison.cells, key=_rank)
    lines = [f"**{summary(comparison)}**", ""]
    lines += [f"| {' | '.join(COLUMNS)} |", f"|{'|'.join('---' for _ in COLUMNS)}|"]
    rows = [[text.replace("|", "\\|") for text in _row(cell)] for cell in cells]
    lines += [f"| {' | '.join(row)} |" for row in rows]
    notes = [f"`{cell.name}`: {_short(cell.reason)}" for cell in cells if cell.reason]
    notes += [f"What could not have been seen: {blind}" for blind in [blind_spot(comparison)] if blind]
    notes += conditions(comparison)
    return "\n".join([*lines, "", *(f"- {note}" for note in notes), ""])


def _short(text: str, most: int = 400) -> str:
    flat = " ".join(text.split())
    return flat if len(flat) <= most else flat[:most] + " …"


def blind_spot(comparison: Comparison) -> str:
    """Return the smallest slowdown that would have been found, cell by cell, worst last; and the cells without any
    figure."""
    known = [
        (cell.time.smallest_effect, cell.name) for cell in comparison.cells if cell.time and cell.time.smallest_effect
    ]
    said = []
    if known:
        low, high = min(known), max(known)
        text = f"with these pairs and their spread a slowdown of {low[0] * 100:.1f} %"
        text += f" ({low[1]}) to {high[0] * 100:.1f} % ({high[1]})" if len(known) > 1 else ""
        said.append(f"{text} would have raised an alert 4 times out of 5; smaller ones may be there.")
    undecided = [cell.name for cell in comparison.cells if cell.verdict == "ambiguous"]
    if undecided:
        more = "--fresh --max-rounds" if comparison.finished else "the same command with more --minutes"
        said.append(f"Undecided, which is not unchanged: {', '.join(undecided)}; more pairs ({more}) may decide.")
    return " ".join(said)


def conditions(comparison: Comparison) -> list[str]:
    """Return how it was measured, and with which error rate."""
    pairs = sum(cell.time.n for cell in comparison.cells if cell.time)
    aside = sum(cell.time.set_aside for cell in comparison.cells if cell.time)
    noisy = sum(cell.time.disturbed_counted for cell in comparison.cells if cell.time)
    disturbed = f"; {_count(aside, 'unevenly disturbed pair')} set aside whole" if aside else ""
    disturbed += f"; beside {noisy} of those that count, other work was running" if noisy else ""
    lines = [
        f"base: {_side(comparison.base)}; head: {_side(comparison.head)}",
        *differences(comparison),
        f"{_count(pairs, 'pair')} of fresh "
        f"{'containers' if comparison.isolation == 'docker' else 'processes'} in random "
        f"order on one machine "
        f"({comparison.machine.get('cpu', 'unknown')}, {_count(comparison.threads, 'thread')}), "
        f"{comparison.minutes:.1f} minutes{disturbed}.",
        f"An alert: slower beyond doubt and by an estimated {comparison.threshold * 100:g} % or more, or "
        "memory grown, or "
        "only head fails its check. If nothing had changed, the chance that any cell is called slower or faster is at "
        f"most {comparison.alpha * 100:g} %, all cells and looks together.",
    ]
    if not comparison.finished:
        lines.append("The time was up before every cell was decided; the same command goes on from there.")
    return lines


def _side(side: SideFacts) -> str:
    if side.package is not None:
        return f"{side.title} (in environments {', '.join(sorted(set(side.locks.values())))})"
    return side.title


def differences(comparison: Comparison) -> list[str]:
    """Return what the environments of both sides are, framework by framework: their images, and the packages that
    differ."""
    base, head = comparison.base, comparison.head
    lines = []
    for name in sorted(base.images.keys() & head.images.keys()):
        was, now = base.images[name], head.images[name]
        if was.digest == now.digest:
            lines.append(f"{name}: both sides in one image, {_image(now)}.")
        else:
            on = "on the same base" if was.base == now.base else f"on bases {_hash(was.base)} → {_hash(now.base)}"
            lines.append(f"{name}: images {_image(was)} → {_image(now)}, {on}.")
    for name in sorted(base.versions.keys() & head.versions.keys()):
        was_there, is_there = base.versions[name], head.versions[name]
        changed = sorted(p for p in was_there.keys() | is_there.keys() if was_there.get(p) != is_there.get(p))
        said = [f"{p} {was_there.get(p, 'none')} → {is_there.get(p, 'none')}" for p in changed[:MOST_CHANGES]]
        more = f", and {len(changed) - MOST_CHANGES} more" if len(changed) > MOST_CHANGES else ""
        if changed:
            lines.append(f"{name}: packages that differ: {', '.join(said)}{more}.")
        elif name in base.images:
            lines.append(f"{name}: the same {_count(len(is_there), 'package')} on both sides, Python included.")
    if base.images and base.content == head.content:
        lines.append(f"The code is the same on both sides ({head.commit[:10] if head.commit else head.content}"
                     f"{' with changes' if head.dirty else ''}).")  # fmt: skip
    return lines


def _image(image: Image) -> str:
    unlike = "" if image.matches_lock else ", not what the tree's lock describes"
    name = f"`{image.tag}` " if not image.tag.startswith("sha256:") else ""
    return f"{name}({_hash(image.digest)}, lock {image.lock[:12]}{unlike})"


def _hash(digest: str) -> str:
    return digest.removeprefix("sha256:")[:12]


def terminal(comparison: Comparison) -> list[str]:
    """Plain lines."""
    lines = []
    for cell in sorted(comparison.cells, key=_rank):
        row = [text.replace("**", "").replace("`", "") for text in _row(cell)]
        lines.append(f"{row[0]}: {row[4]}; {row[3]}; base {row[1]}, head {row[2]}; memory {row[5]}; gate {row[6]}")
        if cell.reason:
            lines.append(f"  {_short(cell.reason)}")
    if blind := blind_spot(comparison):
        lines.append(f"What could not have been seen: {blind}")
    return [*lines, *(line.replace("`", "") for line in conditions(comparison)), summary(comparison)]
