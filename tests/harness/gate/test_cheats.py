"""Adapters that the gate admits and that cheat where they are timed: each is refused, for the reason that is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.store.record import Record
from tests.support.driver import Driver

REFUSED = {
    "quarter": ("rejected", ("measured step",)),
    "after-three": ("rejected", ("measured step",)),
    "until-read": ("rejected", ("measured step",)),
    "skips-steps": ("rejected", ("timed = replayed",)),
    "defers-evenly": ("rejected", ("work was deferred past the clock",)),
    "one-noise": ("rejected", ("from step to step",)),
    "half-twice": ("rejected", ("along the difference of halves",)),
    "until-halt": ("rejected", ("timed = replayed",)),
    "jumps": ("rejected", ("times as far as its rows and its noise can", "at the end")),
    "stops-clocks": ("rejected", ("by the harness's clock",)),
    "works-between": ("rejected", ("between a reading of the weights and the next start",)),
    "two-processors": ("rejected", ("processors, and were given 1",)),
    "first-of-a-turn": ("rejected", ("the first step of a turn took more than",)),
    "forges-time": ("rejected", ("the clocks do not agree",)),
    "patches-clock": ("rejected", ("the clocks do not agree",)),
    "patches-worker": ("rejected", ("unchanged", "the clocks do not agree", "replay")),
    "asks-early": ("crashed", ("it sent 'seed' after its start, where sizes is due",)),
    "forges-end": ("rejected", ("in half of its pauses it worked",)),
    "fills-later": ("rejected", ("timed = replayed",)),
    "fills-past-copy": ("rejected", ("the weights are not those that were read",)),
    "beside": ("rejected", ("its parent's child",)),
    "memory-crash": ("rejected", ("measured step",)),
}
BY_CHANCE = {"until-halt"}
"""Honest to the end where the halt is drawn so late that there is none."""


def run(cache: Path, out: Path, variants: list[str], *more: str) -> dict[str, Record]:
    # Long enough for what begins only after some epochs.
    budget = () if "as_shipped" in more else ("--budget-seconds", "0.5")
    driver = Driver(("run", "e2e", "--preset", "smoke", "--tasks", "logreg", *budget), cache, out, fake="cheat")
    driver.environment["DPBENCH_CHEAT_FOUND"] = str(out.with_name("found.txt"))
    done = driver.run(",".join(variants), *more)
    assert "Traceback" not in done.stderr, done.stderr
    return {r.cell.variant: r for r in driver.records("time")}


def test_an_honest_one_is_timed_and_what_was_compared_is_named(cache: Path, tmp_path: Path) -> None:
    found = run(cache, tmp_path / "run", ["honest", "peeks"])
    for one in found.values():
        assert one.state == "ok", one.reason
        assert one.timed is not None and one.timed.compared is not None
        compared = one.timed.compared
        assert compared.all_steps == one.timed.steps_timed * one.timed.epochs
        assert 0 <= compared.step < compared.all_steps and 0 < compared.steps <= compared.all_steps
        assert compared.update_error < 1e-4 and compared.replay_error == 0.0
        assert len(compared.noise_scores) == 8 and compared.compared_steps >= 16
        assert compared.end_error == 0.0 and compared.longest_step is not None and 0 < compared.longest_step < 1
        assert len(one.timed.referee_seconds) == len(one.timed.part_seconds) >= 2
    peeked = (tmp_path / "found.txt").read_text().split()
    assert peeked and set(peeked) == {"False"}, "nothing tells of the batches before the last build is done"


@pytest.mark.slow
def test_every_cheat_is_refused_for_its_reason(cache: Path, tmp_path: Path) -> None:
    left, found = set(REFUSED), {}
    for attempt in range(4):
        found |= run(cache, tmp_path / f"run{attempt}", sorted(left))
        left = {name for name in BY_CHANCE if found[name].state == "ok"}
        if not left:
            break
    for name, (state, words) in REFUSED.items():
        timed, reason = found[name].timed, str(found[name].reason)
        if name == "patches-clock" and found[name].state == "ok":
            # A busy machine: the clocks may differ by what either waited for, and the harness's is the one that counts.
            assert timed is not None
            worked = sum(work for _, _, _, work in timed.turns) / sum(steps for _, steps, _, _ in timed.turns)
            assert sum(timed.measured_seconds) == pytest.approx(worked * timed.steps_timed)
            continue
        assert (found[name].state, any(word in reason for word in words)) == (state, True), (name, reason)


def test_what_lies_in_the_workers_memory_at_a_reading_does_not_come_in_that_order(cache: Path, tmp_path: Path) -> None:
    (one,) = run(cache, tmp_path / "run", ["works-ahead"]).values()
    assert one.state == "ok"
    served = (tmp_path / "found.txt").read_text().split()
    # A stretch of one batch, or one that keeps its place, is no plan to work by.
    assert len(served) > 100 and served.count("True") < 0.1 * len(served)


@pytest.mark.slow
def test_a_loop_of_its_own_that_does_nothing_is_refused(cache: Path, tmp_path: Path) -> None:
    (one,) = run(cache, tmp_path / "run", ["own-loop"], "--protocol", "as_shipped").values()
    assert one.state == "rejected" and "the noise of" in str(one.reason)
