"""The harness's own clock: what a worker may not do between its stretches, nor beside them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Collection
from types import SimpleNamespace

import numpy as np
import pytest

from harness.environments import processors
from harness.environments import referee as referee_module
from harness.environments.order import Order
from harness.environments.processors import tree_processors, tree_seconds
from harness.environments.referee import Direct, Referee
from harness.worker.batches import REPLAYED_STEPS, epoch_batches, setting_of, timed_batches
from harness.worker.request import Request
from harness.worker.result import Result, Timed

GIVEN = {
    "mode": "time",
    "folder": "nowhere",
    "variant": "v",
    "private": True,
    "static_shapes": False,
    "task": "logreg",
    "batch_size": 64,
    "dataset_size": 30_162,
    "sampling": "poisson",
    "warm_up": True,
    "noise_multiplier": 1.1,
    "max_grad_norm": 1.0,
    "learning_rate": 0.1,
    "delta": 1e-5,
    "device": "cpu",
    "threads": 2,
    "initial_seed": 0,
    "batch_seed": 7,
    "noise_seed": 1,
    "order_seed": 3,
}


WATTS = 50.0


def fault_of(
    monkeypatch: pytest.MonkeyPatch, pause: float = 0.1, processors: float = 2.0, allowed: Collection[int] = (0, 1)
) -> str | None:
    """Return what is said against :func:`judged`."""
    return judged(monkeypatch, pause, processors, allowed).clock_fault


def judged(
    monkeypatch: pytest.MonkeyPatch, pause: float = 0.1, processors: float = 2.0, allowed: Collection[int] = (0, 1)
) -> Result:
    """Return the result of three stretches of one second, with so long a pause after each, on so many processors, by a
    machine that takes WATTS."""
    now = used = 0.0
    counter = SimpleNamespace(joules=lambda: WATTS * now)
    monkeypatch.setattr(referee_module.energy, "counters", lambda device: {"gpu": counter})
    monkeypatch.setattr(referee_module, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(referee_module, "tree_seconds", lambda pid: used)
    monkeypatch.setattr(referee_module, "_waited", lambda task: 0.0)
    monkeypatch.setattr(referee_module, "tree_processors", lambda pid: set(allowed))
    request = Request(**GIVEN)  # type: ignore[arg-type]
    judge = Referee(request, pid=1)
    line = Direct(request, judge)
    line.ask("sizes", steps=1, epochs=1)
    line.ask("seed")
    for epoch in range(3):
        line.ask("go", epoch=epoch, done=0)
        now, used = now + 1.0, used + processors
        line.tell("end")
        for _ in range(2):
            now += 1e-3
            line.tell("read")
        now, used = now + pause, used + 2.0 * pause
    line.ask("finish")
    return judge.judged(
        Result("ok", epoch_seconds=[1.0] * 3, timed=Timed(1, 1, 3, False, [1.0] * 3, part_seconds=[1.0] * 3))
    )


@pytest.mark.parametrize(("waited", "counts"), [(0.0, None), (0.2, [3.0, 1.5]), (0.4, [3.0, 1.5])])
def test_on_a_busy_machine_a_clock_that_goes_slowly_gains_nothing(monkeypatch, waited, counts):
    now = spent = 0.0
    monkeypatch.setattr(referee_module, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(referee_module, "_waited", lambda task: spent)
    judge = Referee(Request(**GIVEN))  # type: ignore[arg-type]
    line = Direct(judge.request, judge)
    line.ask("sizes", steps=1, epochs=1)
    line.ask("seed")
    for epoch, done in ((0, 0), (0, 4), (1, 0)):
        line.ask("go", epoch=epoch, done=done)
        now, spent = now + 0.75, spent + waited
        line.tell("end")
        for _ in range(2):
            line.tell("read")
    line.ask("finish")
    timed = Timed(20, 10, 2, True, measured_seconds=[0.02, 0.01], part_seconds=[0.01] * 3)

    judged = judge.judged(Result("ok", epoch_seconds=[0.04, 0.02], timed=timed))

    if counts is None:
        assert "the worker's clock says 0.0300 s" in str(judged.clock_fault)
    else:
        assert judged.clock_fault is None
        assert judged.epoch_seconds == counts
        assert judged.timed is not None and judged.timed.measured_seconds == [1.5, 0.75]


def test_an_honest_worker_has_no_fault(monkeypatch):
    assert fault_of(monkeypatch) is None


def test_energy_is_that_of_the_stretches_and_not_of_the_pauses(monkeypatch):
    said = judged(monkeypatch).energy
    assert said == {
        "joules": {"gpu": pytest.approx(3 * WATTS)},
        "seconds": pytest.approx(3.0),
        "stretches": 3,
        "unavailable": {},
    }


def test_work_between_a_reading_and_the_next_start_is_a_fault(monkeypatch):
    assert "0.600 s went by between a reading of the weights and the next start" in str(fault_of(monkeypatch, 0.6))


def test_more_processors_than_threads_are_a_fault(monkeypatch):
    assert fault_of(monkeypatch, processors=2.03) is None
    assert "used 9.00 s of processors in 3.00 s on 2 threads" in str(fault_of(monkeypatch, processors=3.0))


def test_processors_that_were_not_given_are_a_fault(monkeypatch):
    found = fault_of(monkeypatch, allowed=(0, 1, 5))
    assert "its processes may use 3 processors, and were given 2" in str(found)


def test_processors_of_a_process_are_those_of_its_affinity():
    assert tree_processors(os.getpid()) >= os.sched_getaffinity(0)


def test_a_worker_is_pinned_with_the_threads_that_it_has_already():
    code = (
        "import os, threading\nfrom harness.environments.processors import tree_processors\n"
        "from harness.worker.process import pin\n"
        "threading.Thread(target=threading.Event().wait, daemon=True).start()\n"
        "pin(1)\nassert len(tree_processors(os.getpid())) == 1"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("listed", [processors.LISTS_CHILDREN, False])
def test_processor_time_of_children_counts(monkeypatch, listed):
    monkeypatch.setattr(processors, "LISTS_CHILDREN", listed)
    code = "import time\nwhile time.process_time() < 0.3: pass\nprint(flush=True)\ninput()"
    grandchild = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {code!r}])"
    command = [sys.executable, "-c", grandchild]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline()
        assert tree_seconds(process.pid) >= 0.29
        process.communicate(b"\n")
    assert tree_seconds(process.pid) == 0.0


def test_the_first_steps_have_no_order_before_the_clock_starts_either():
    request = Request(**{**GIVEN, "dataset_size": 64 * 12})  # type: ignore[arg-type]
    listed = epoch_batches(request, setting_of(request), 0, 12)
    orders = set()
    for seed in range(50):
        other = Request(**{**GIVEN, "dataset_size": 64 * 12, "order_seed": seed})  # type: ignore[arg-type]
        taken = timed_batches(other, setting_of(other), 12, 1, [(0, 0), (0, REPLAYED_STEPS)])[:REPLAYED_STEPS]
        orders.add(
            tuple(
                next(i for i, (rows, _) in enumerate(listed[:REPLAYED_STEPS]) if np.array_equal(rows, found))
                for found, _ in taken
            )
        )
    assert len(orders) > 10


START = ["sizes", "seed"]
STRETCH = ["go", "end", "read", "read"]
TURN = ["turn", *STRETCH]


@pytest.mark.parametrize(
    ("said", "fault"),
    [
        ([*START, *STRETCH, *STRETCH, "finish"], None),
        (["seed", *START, *STRETCH, "finish"], "it sent 'seed' after its start, where sizes is due"),
        ([*START, "go", *STRETCH, "finish"], "it sent 'go' after go, where end is due"),
        ([*START, *STRETCH, *STRETCH[1:], "finish"], "it sent 'end' after read again, where go or finish is due"),
        ([*START, *STRETCH], "it ended after read again, and not after 'finish'"),
        ([*START, *TURN, "finish"], "it sent 'turn' after seed, where go is due"),
    ],
)
def test_a_worker_asks_and_tells_in_one_order(said, fault):
    order = Order(has_turns=False)
    heard = [order.fault({"what": what, "epoch": epoch, "done": 0}) for what, epoch in numbered(said)]
    assert next((f for f in [*heard, *order.unfinished] if f), None) == fault


def test_with_turns_every_stretch_is_in_one():
    order = Order(has_turns=True)
    assert not any(order.fault({"what": w, "epoch": e, "done": 0}) for w, e in numbered([*START, *TURN, *TURN]))
    assert (
        order.fault({"what": "go", "epoch": 2, "done": 0})
        == "it sent 'go' after read again, where turn or finish is due"
    )


def test_nobody_asks_for_steps_that_are_done():
    order = Order(has_turns=False)
    for what in [*START, *STRETCH]:
        assert order.fault({"what": what, "epoch": 0, "done": 0}) is None
    again = order.fault({"what": "go", "epoch": 0, "done": 0})
    assert again == "it asked for the steps from 0 on of epoch 0 after those from (0, 0)"


def test_a_worker_of_an_older_commit_neither_finishes_nor_commits_itself():
    order = Order(has_turns=False, is_strict=False)
    assert not any(order.fault({"what": w, "epoch": e, "done": 0}) for w, e in numbered([*START, *STRETCH]))
    assert order.unfinished == []


def numbered(said: list[str]) -> list[tuple[str, int]]:
    """Give every stretch its own epoch."""
    found, epoch, last = [], -1, ""
    for what in said:
        epoch += what == "turn" or (what == "go" and last != "turn")
        found.append((what, max(0, epoch)))
        last = what
    return found
