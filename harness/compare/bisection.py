"""Find the commit that made a cell worse: a search over the commits between a good and a bad one. The search is a pure
function of what a judge says of single commits; the judge is a comparison of the good commit against each of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from harness.compare.record import CellResult, memory_fault
from harness.compare.sides import commit_of, git
from harness.errors import BadInput

Opinion = Literal["good", "bad", "ambiguous", "did not run"]


@dataclass(frozen=True)
class Step:
    """One commit that was judged. ``why``: in words."""

    commit: str
    opinion: Opinion
    why: str = ""


@dataclass(frozen=True)
class Culprit:
    """``commits``: one where it could be named, else the smallest range that must hold it, oldest first; none where the
    bad commit is not worse than the good one."""

    commits: tuple[str, ...]
    steps: tuple[Step, ...]


def search(commits: Sequence[str], judge: Callable[[str], Step]) -> Culprit:
    """``commits``: after the good one, oldest first, the last is the bad one. Every commit is judged at most once.

    Holds: everything up to ``low`` is good, ``high`` is bad. A commit that is ambiguous or does not run says nothing
    about either half; then its nearest undecided neighbour is asked. When all between the two say nothing, the range
    ends there. Assumes, as every bisection, that the change stays: only the first crossing from good to bad is found.
    """
    if not commits:
        raise ValueError("A bisection needs at least one commit after the good one.")
    steps = [judge(commits[-1])]
    if steps[0].opinion != "bad":
        return Culprit((), tuple(steps))
    low, high, silent = -1, len(commits) - 1, set[int]()
    while open_ := [i for i in range(low + 1, high) if i not in silent]:
        middle = (low + high) / 2
        asked = min(open_, key=lambda i: (abs(i - middle), i))
        step = judge(commits[asked])
        steps.append(step)
        if step.opinion == "bad":
            high = asked
        elif step.opinion == "good":
            low = asked
        else:
            silent.add(asked)
    return Culprit(tuple(commits[low + 1 : high + 1]), tuple(steps))


def commits_between(good: str, bad: str, repository: Path) -> tuple[str, list[str]]:
    """Return (full hash of the good commit, first-parent commits after it up to the bad one, oldest first). Raises
    :class:`BadInput` where there are none."""
    start, end = commit_of("GOOD", good, repository), commit_of("BAD", bad, repository)
    if git(repository, "merge-base", "--is-ancestor", start, end) is None or start == end:
        raise BadInput(f"GOOD ({good}) must be an ancestor of BAD ({bad}); swap them, or name an older commit.")
    listed = git(repository, "rev-list", "--first-parent", "--reverse", f"{start}..{end}") or ""
    return start, listed.split()


def opinion_of(cell: CellResult, kinds: frozenset[str]) -> tuple[Opinion, str]:
    """``kinds`` of regression that the bad commit has (all, where it is not judged yet): another kind is not what is
    looked for."""
    found = kinds & set(cell.alerts)
    time = cell.time
    figure = "" if time is None or time.ratio is None else f"{(time.ratio - 1.0) * 100:+.1f} % in {time.n} pairs"
    if found:
        return "bad", ", ".join([*sorted(found), *([figure] if figure else [])])
    if cell.verdict in ("failed", "not compared", "repaired"):
        return "did not run", cell.reason or ""
    if cell.verdict == "wrong":
        return "did not run", "its correctness check fails, which is not the regression that is looked for"
    if "gate" in kinds and any(said != "passed" for said in cell.gate.values()):
        return "ambiguous", "its correctness was not checked"
    if "memory" in kinds and cell.kind == "layer":  # the memory of a task is never judged
        if cell.memory is None:
            return "ambiguous", memory_fault(cell.memory_processes) or "its memory was not measured"
        if cell.memory.change == "grown" and not cell.memory.proven:
            return "ambiguous", "its memory has grown, but no second process confirms it"
    # Memory is exact: without any alert of time among those looked for, an undecided time says nothing.
    if "time" not in kinds:
        return "good", "neither gate nor memory is worse"
    is_sure = cell.verdict in ("faster", "equivalent") or (time is not None and time.within_threshold)
    return ("good" if is_sure else "ambiguous"), f"{cell.verdict}{', ' + figure if figure else ''}"
