"""The gate in this process: a right adapter passes every check, wrong ones fail the check that names their fault."""

from __future__ import annotations

import dataclasses
import functools

import numpy as np
import pytest

from harness.contract import Setting, Unsupported
from harness.network import Bags
from harness.plan import registry
from harness.store.record import GateCheck
from harness.tasks import FULL_TASKS, NOT_OWN, TASKS, TOKEN_LOSS
from harness.worker.gate import cases as gate_cases
from harness.worker.gate import checks as gate_module
from harness.worker.gate import pool as gate_pool
from harness.worker.gate import updates
from harness.worker.gate.checks import checks
from tests.support import gate_faults, gate_numpy

PRIVATE = Setting(
    variant="exact",
    private=True,
    batch_size=64,
    dataset_size=30_162,
    noise_multiplier=1.1,
    max_grad_norm=1.0,
    learning_rate=0.15,
    seed=5,
)
PLAIN = dataclasses.replace(PRIVATE, private=False, noise_multiplier=0.0)
BUDGET = {"steps": 500, "delta": 1e-5, "rdp": 0.5, "pld": 0.1, "of_2017": 0.7}

reference = functools.cache(lambda task: gate_numpy.reference(TASKS[task]))


bound_check = updates.bound_check


@pytest.fixture(autouse=True)
def without_the_large_parameter(monkeypatch):
    """It takes longer in numpy than all the rest, and has tests of its own."""
    monkeypatch.setattr(gate_module, "bound_check", lambda *rest: iter(()))


def gate(adapter, task="ffnn", setting=PRIVATE, static=False, budget=BUDGET, entropy=None):
    return list(checks(lambda: adapter, TASKS[task], setting, static, reference(task), budget, entropy))


def failed(found):
    return {check["check"] for check in found if not check["passed"]}


def test_rows_whose_update_rounding_would_hide_are_in_no_small_batch():
    known = dict(reference("logreg"))
    rows = np.argsort(known["instability"][:-10], kind="stable")[: gate_cases.CORE : 5]
    known["norms"] = known["norms"].copy()
    known["norms"][rows] *= 1e-3
    small = [case for case in gate_cases.cases(TASKS["logreg"], known, private=True) if "large" not in case.name]
    small += gate_cases.size_cases(TASKS["logreg"], known)
    assert not {*rows.tolist()} & {
        row for case in small if not case.saturated for b in case.batches for row in b.tolist()
    }


@pytest.mark.parametrize("task", ["logreg", "ffnn"])
@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("setting", [PRIVATE, PLAIN], ids=["private", "plain"])
def test_the_right_adapter_passes(task, static, setting):
    found = gate(gate_numpy.Exact(), task, setting, static)
    assert failed(found) == set()
    assert [GateCheck(**check).check for check in found]
    single = [f"update: {name}" for name in gate_cases.names(setting.private)]
    assert max(check["error"] for check in found if check["check"] in single and "steps" not in check["check"]) < 1e-5
    names = gate_module.names(setting.private, has_budget=True)
    assert [check["check"] for check in found] == [name for name in names if name != updates.BOUND_CHECK]


def test_noise_that_is_correlated_as_its_adapter_states_passes():
    found = {check["check"]: check for check in gate(gate_faults.Correlated())}
    assert not [name for name, check in found.items() if not check["passed"]]
    spread = found["noise: standard deviation sigma C / B"]
    assert spread["detail"].startswith("finding: its noise is correlated over steps, and judged by the factor")


@pytest.mark.parametrize(
    "column", [lambda steps: np.full(steps, 2.0), lambda steps: [1.0, 0.5], lambda steps: np.full(steps, np.nan)]
)
def test_a_factor_that_is_none_is_a_failed_check_that_says_so(column):
    """One whose first entry is larger would hide noise that is too small."""

    class States(gate_faults.Correlated):
        def noise_factor(self, steps):
            return column(steps)

    found = {check["check"]: check for check in gate(States())}
    assert "it must be the first column of F" in found["noise"]["detail"] and not found["noise"]["passed"]


@pytest.mark.parametrize(
    ("mutant", "caught"),
    [
        (gate_numpy.Laplace, {"noise: normal"}),
        (gate_numpy.TwoPercentLess, {"noise: standard deviation sigma C / B"}),
        (gate_numpy.SameForAllRows, {"noise: independent coordinates"}),
        (gate_numpy.EveryThirdStep, {"noise: independent steps"}),
        (gate_numpy.Shifted, {"noise: mean 0"}),
        (gate_numpy.NanOnOutliers, {"update: outlier", "sensitivity"}),
        (gate_numpy.RaisesOnEmpty, {"update: empty", "noise"}),
        (gate_numpy.WorksWhenRead, {"deferred work"}),
    ],
)
def test_wrong_adapters_are_caught_by_name(mutant, caught):
    found = gate(mutant())
    assert caught <= failed(found)
    if mutant not in (gate_numpy.NanOnOutliers, gate_numpy.RaisesOnEmpty):
        assert not any(name.startswith("update") for name in failed(found))


@pytest.mark.parametrize("fault", gate_faults.FAULTS, ids=lambda fault: fault.mutant.__name__)
def test_faults_that_were_admitted_are_caught_by_name(fault):
    """The gate ends at the check that names it: no other may be needed."""
    setting = dataclasses.replace(PRIVATE, dataset_size=TASKS[fault.task].train_size)
    for check in checks(fault.mutant, TASKS[fault.task], setting, fault.static, reference(fault.task)):
        if check["check"] == fault.check:
            break
    assert check["check"] == fault.check and check["error"] is not None
    assert not check["passed"]


def test_the_page_of_faults_counts_those_of_the_code():
    noise = sum(fault.check.startswith("noise") for fault in gate_faults.FAULTS)
    said = f"{len(gate_faults.FAULTS)} faults, {noise} of them in the noise"
    assert said in (registry.ROOT / "docs" / "gate-faults.md").read_text()


@pytest.mark.parametrize(("factor", "passes"), [(1.0, True), (1.0004, True), (1.002, False)])
def test_the_clip_bound_of_a_large_parameter_is_measured(factor, passes, monkeypatch):
    example = gate_cases.large_example()

    class Long(gate_numpy.Exact):
        """What a norm that is too small does."""

        def step(self, indices, mask):
            before = dict(self.weights)
            super().step(indices, mask)
            longer = {n: before[n] + factor * (w - before[n]) for n, w in self.weights.items()}
            self.weights = {n: w.astype(np.float32) for n, w in longer.items()}

    monkeypatch.setattr(gate_cases, "large_example", lambda: example)
    (check,) = bound_check(Long, PRIVATE, False)
    assert check["check"] == "clip bound: one example, 9.4e+06 parameters" and check["passed"] == passes
    assert check["error"] == pytest.approx(factor - 1.0, abs=1e-6)
    assert ("finding: clip bound exceeded by" in check["detail"]) == (factor > 1.0)


def test_who_cannot_take_the_large_parameter_has_nothing_measured():
    class Narrow(gate_numpy.Exact):
        def build(self, task, setting, initial):
            raise KeyError(task.name)

    (check,) = bound_check(Narrow, PRIVATE, False)
    assert check["passed"] and check["detail"].startswith("not measured (KeyError")


def test_a_raising_adapter_fails_the_check_and_says_why():
    (empty,) = [check for check in gate(gate_numpy.RaisesOnEmpty()) if check["check"] == "update: empty"]
    assert empty["error"] is None and "IndexError: no rows" in empty["detail"]


def test_a_wrong_divisor_is_told_as_one():
    class DividesByItsRows(gate_numpy.Exact):
        def step(self, indices, mask):
            before = dict(self.weights)
            super().step(indices, mask)
            share = self.setting.batch_size / max(1, len(indices))
            moved = {n: before[n] + share * (w - before[n]) for n, w in self.weights.items()}
            self.weights = {n: w.astype(np.float32) for n, w in moved.items()}

    found = checks(DividesByItsRows, TASKS["logreg"], PRIVATE, False, reference("logreg"))
    wrong = next(check for check in found if not check["passed"])
    assert wrong["check"] == "update: all clipped"
    assert wrong["detail"].startswith(
        "2 times as long as it ought to be, 16 / 8: the divisor is the batch's own length; "
    )


def test_a_twin_without_privacy_must_not_add_noise():
    assert "no noise" in failed(gate(gate_numpy.NoisyTwin(), setting=PLAIN))


def test_slow_but_equal_readings_are_not_deferred_work():
    assert failed(gate(gate_numpy.SlowToRead())) == set()


@pytest.mark.parametrize(
    ("epsilon", "passes", "told"),
    [
        *((0.1, True, False), (0.0995, True, False), (0.52, True, False), (0.54, True, True), (0.73, True, True)),
        *((0.0985, False, False), (0.74, False, True), (float("nan"), False, False)),
    ],
)
def test_own_epsilon_between_the_tight_value_and_the_renyi_value_of_2017(epsilon, passes, told):
    check = next(check for check in gate(gate_numpy.Reports(epsilon)) if check["check"] == "budget")
    assert check["passed"] == passes and check["detail"].startswith("finding: its epsilon is") == told


def test_unsupported_goes_through():
    class Refuses(gate_numpy.Exact):
        def build(self, task, setting, initial):
            raise Unsupported("not this task")

    with pytest.raises(Unsupported, match="not this task"):
        gate(Refuses())


def test_an_adapter_is_asked_for_no_precision_that_it_does_not_know():
    with pytest.raises(Unsupported, match=r"trains in float32 only; the task's precision is bfloat16"):
        gate(gate_numpy.Exact(), setting=dataclasses.replace(PRIVATE, precision="bfloat16"))


@pytest.mark.parametrize("excess", [0.0, 5e-5, 3e-4, -0.2])
def test_no_example_may_move_the_sum_by_more_than_c(excess):
    """In batches of copies, whose sum is as long as all of them; to move it by less is another check's affair."""

    class Clips(gate_numpy.Exact):
        def build(self, task, setting, initial):
            super().build(
                task, dataclasses.replace(setting, max_grad_norm=(1 + excess) * setting.max_grad_norm), initial
            )

    found = {check["check"]: check["passed"] for check in gate(Clips())}
    assert found[updates.COPIES_CHECK] == (excess < 1e-4)


def test_checks_come_one_by_one():
    stream = checks(gate_numpy.Exact, TASKS["ffnn"], PRIVATE, False, reference("ffnn"))
    assert next(stream)["check"].startswith("parameters")


@pytest.mark.parametrize("task", sorted({*TASKS} - {*FULL_TASKS}))
def test_pool_has_the_tasks_shapes_and_the_promised_rows(task):
    task = TASKS[task]
    x, y = gate_pool.pool(task)
    again, _ = gate_pool.pool(task)
    copies, ordinary = gate_pool.COPIES, gate_pool.POOL_SIZE - gate_pool.COPIES - gate_pool.OUTLIERS
    assert x.shape == (gate_pool.POOL_SIZE, *task.input_shape) and x.dtype == task.input_dtype
    assert y.dtype == np.int32
    if task.loss == TOKEN_LOSS:
        own = y != NOT_OWN
        assert y.shape == x.shape and x.min() >= 0 and max(x.max(), y.max()) == task.classes - 1
        assert not own[gate_pool.BLANK].any() and len({*own.sum(1)}) > 20, "texts of different lengths"
    else:
        assert set(y) == set(range(task.classes))
    np.testing.assert_array_equal(x, again)
    np.testing.assert_array_equal(x[-copies:], x[1 : 1 + copies])
    np.testing.assert_array_equal(y[-copies:], y[1 : 1 + copies])
    if task.input_dtype == "float32":
        assert x[:ordinary].min() >= 0 and x[:ordinary].max() <= 1
    elif isinstance(bags := task.layers[0], Bags):
        limits = [np.inf] * bags.counts + [rows for rows in bags.rows for _ in range(bags.ids)]
        assert x.min() >= 0 and (x.max(axis=0) < limits).all(), "ids of every field's own table"
    elif task.loss != TOKEN_LOSS:
        assert x.min() >= 0 and x.max() < task.layers[0].num_embeddings
        started = np.maximum.accumulate(x != 0, axis=1)
        assert ((x == 0) == ~started).all(), "padding stands in front only"
    assert len(gate_cases.zero_gradient_rows(task)) == 8


def test_cases_contain_what_their_names_say():
    known = reference("ffnn")
    norms = known["norms"]
    by_name = {case.name: case for case in gate_cases.cases(TASKS["ffnn"], known, private=True)}
    c = gate_cases.clipping_norm(known)
    rows = {name: case.batches[0] for name, case in by_name.items()}
    assert (norms[rows["all clipped"]] > c).all() and (norms[rows["none clipped"]] < c).all()
    assert 0 < (norms[rows["some clipped"]] > c).sum() < len(rows["some clipped"]) == gate_cases.BATCH
    assert sorted(rows["permuted"]) == sorted(rows["some clipped"]) and (rows["permuted"] != rows["some clipped"]).any()
    assert norms[rows["one, clipped"]] > c > norms[rows["one, not clipped"]]
    assert rows["empty"].size == 0
    assert norms[rows["outlier"]].max() > 100 * c
    x, _ = gate_pool.pool(TASKS["ffnn"])
    assert len(np.unique(x[rows["duplicates"]], axis=0)) <= len(rows["duplicates"]) - 2
    assert all(len(np.unique(r)) == len(r) for r in rows.values()), "no row twice, as in Poisson samples"
    assert len(by_name["three steps"].batches) == 3
    assert len(rows["large batch"]) == gate_cases.LARGE_BATCH


@pytest.mark.parametrize("task", sorted({*TASKS} - {*FULL_TASKS}))
def test_no_usual_length_of_a_piece_divides_the_large_batch(task):
    rows = gate_cases.large_rows(TASKS[task])
    assert all(rows % length for length in (4, 8, 16, 20, 32, 50, 64, 100, 128, 200, 256, 500, 512, 1000, 1024))


def test_pack_keeps_only_rows_that_are_not_empty_and_unpack_restores():
    task = TASKS["imdb-embedding"]
    rng = np.random.default_rng(1)
    values = {name: np.zeros(shape) for name, shape in task.parameters.items()}
    values["embedding.weight"][[3, 77]] = rng.standard_normal((2, 16))
    values["fc.weight"][:] = rng.standard_normal((2, 16))
    packed = gate_cases.pack("clipped/x", values)
    assert sum(v.nbytes for v in packed.values()) < 1000
    restored = gate_cases.unpack("clipped/x", task, packed)
    for name, value in values.items():
        np.testing.assert_array_equal(restored[name], value)
