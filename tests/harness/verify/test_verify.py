"""A committed pack is accepted; thirty-four that were tampered with are not, each for its own reason by name."""

from __future__ import annotations

import copy
import gzip
import hashlib
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from harness.cli.main import app
from harness.gate.admission import Verdict
from harness.paths import ROOT
from harness.plan import registry
from harness.store.record import Gate, GateCheck, Record, parse
from harness.tasks import definition_hash, known_task
from harness.verify import here, records
from harness.worker import sketch

PACK = ROOT / "results" / "records" / "2026-11-27-epyc-26d5a594-jaxdpopt-turns.jsonl.gz"
Lines = list[dict[str, Any]]


@pytest.fixture(scope="module")
def lines() -> Lines:
    return [json.loads(line) for line in gzip.decompress(PACK.read_bytes()).decode().splitlines()]


def one(lines: Lines, purpose: str = "time") -> dict[str, Any]:
    return next(line for line in lines if line["purpose"] == purpose and line["cell"]["private"])


def faster(lines: Lines) -> None:
    one(lines)["epoch_seconds"] = [0.9 * seconds for seconds in one(lines)["epoch_seconds"]]


def faster_measured(lines: Lines) -> None:
    faster(lines)
    one(lines)["timed"]["measured_seconds"] = [0.9 * seconds for seconds in one(lines)["timed"]["measured_seconds"]]


def faster_turns(lines: Lines) -> None:
    faster_measured(lines)
    for turn in one(lines)["timed"]["turns"]:
        turn[2], turn[3] = 0.9 * turn[2], 0.9 * turn[3]


def more_steps(lines: Lines) -> None:
    one(lines)["timed"]["steps_timed"] += 100


def shorter_epoch(lines: Lines) -> None:
    one(lines)["timed"]["steps_per_epoch"] -= 10


def other_task(lines: Lines) -> None:
    one(lines)["cell"]["batch_size"] *= 2


def other_framework(lines: Lines) -> None:
    one(lines)["cell"]["framework"] = "opake"


def other_adapter(lines: Lines) -> None:
    one(lines)["source"]["adapter_hash"] = "0" * 12


def other_adapter_with_its_key(lines: Lines) -> None:
    line = one(lines)
    line["source"]["adapter_hash"] = "0" * 12
    parts = [value for value in line["cell"].values() if value is not None]
    parts += ["0" * 12, line["source"]["lock_hash"]]
    line["key"] = hashlib.sha256("\0".join(map(str, parts)).encode()).hexdigest()[:16]


def smaller_epsilon(lines: Lines) -> None:
    one(lines)["epsilon"]["pld"] *= 0.9


def larger_delta(lines: Lines) -> None:
    one(lines)["epsilon"]["delta"] = 1e-3


def fewer_steps_of_epsilon(lines: Lines) -> None:
    one(lines)["epsilon"]["steps"] //= 2


def smaller_error(lines: Lines) -> None:
    check = next(check for check in one(lines, "gate")["gate"]["checks"] if check["limit"])
    check["error"] = 2 * check["limit"]


def failed_check_behind_a_passed_gate(lines: Lines) -> None:
    one(lines, "gate")["gate"]["checks"][0]["passed"] = False
    one(lines, "gate")["gate"]["checks"][0]["error"] = None


def no_gate(lines: Lines) -> None:
    lines.remove(one(lines, "gate"))


def rejected_gate(lines: Lines) -> None:
    one(lines, "gate").update(state="rejected", reason="update")


def other_gate(lines: Lines) -> None:
    one(lines)["gate"]["key"] = "0" * 16


def worse_replay(lines: Lines) -> None:
    line = next(line for line in lines if line["timed"] and line["timed"]["compared"])
    line["timed"]["compared"]["replay_error"] = 2 * line["timed"]["compared"]["replay_limit"]


def without_its_slowest(lines: Lines) -> None:
    times = [line for line in lines if line["purpose"] == "time" and line["cell"] == one(lines)["cell"]]
    lines.remove(max(times, key=lambda line: line["epoch_seconds"]))


def without_a_round(lines: Lines) -> None:
    lines[:] = [line for line in lines if line["purpose"] == "gate" or line["block"]["round"] != 1]


def twice(lines: Lines) -> None:
    other = copy.deepcopy(one(lines))
    other["wall_seconds"] += 1.0
    lines.append(other)


def copied(lines: Lines) -> None:
    lines.append(copy.deepcopy(one(lines)))


def other_machine(lines: Lines) -> None:
    one(lines)["machine"]["id"] = "ffffffff"


def more_threads(lines: Lines) -> None:
    one(lines)["machine"]["threads"] = 2


def other_seed(lines: Lines) -> None:
    one(lines)["seeds"]["batches"] += 1


def other_run(lines: Lines) -> None:
    one(lines)["block"]["run"] += "0"


def other_data(lines: Lines) -> None:
    one(lines)["data"]["sha256"] = "0" * 64


def fewer_rows(lines: Lines) -> None:
    one(lines)["data"]["train_size"] = 1000


def other_versions(lines: Lines) -> None:
    one(lines)["versions"]["numpy"] = "1.0"


def other_commit(lines: Lines) -> None:
    one(lines)["source"]["commit"] = "0" * 40


def too_much_memory(lines: Lines) -> None:
    one(lines)["memory"]["peak_resident_growth"] = 2**50


def earlier(lines: Lines) -> None:
    max((line for line in lines if line["sequence"]), key=lambda line: line["sequence"])["started"] = (
        "2020-01-01T00:00:00+00:00"
    )


def hidden_disturbance(lines: Lines) -> None:
    one(lines)["load"].update(throttled=0.9, disturbed=False)


TAMPERED: dict[Callable[[Lines], None], str] = {
    faster: "epoch",
    faster_measured: "turns",
    faster_turns: "clocks",
    more_steps: "turns",
    shorter_epoch: "steps",
    other_task: "identity",
    other_framework: "identity",
    other_adapter: "identity",
    other_adapter_with_its_key: "other code",
    smaller_epsilon: "epsilon",
    larger_delta: "epsilon",
    fewer_steps_of_epsilon: "epsilon",
    smaller_error: "check",
    failed_check_behind_a_passed_gate: "verdict",
    no_gate: "no gate",
    rejected_gate: "not admitted",
    other_gate: "no gate",
    worse_replay: "compared",
    without_its_slowest: "missing",
    without_a_round: "missing",
    twice: "twice",
    copied: "twice",
    other_machine: "machines",
    more_threads: "machines",
    other_seed: "seeds",
    other_run: "missing",
    other_data: "data",
    fewer_rows: "data",
    other_versions: "versions",
    other_commit: "commits",
    too_much_memory: "memory",
    earlier: "order",
    hidden_disturbance: "disturbed",
}


def written(path: Path, lines: Lines) -> Path:
    path.write_bytes(gzip.compress("".join(json.dumps(line) + "\n" for line in lines).encode()))
    return path


def test_a_committed_pack_is_accepted() -> None:
    said = CliRunner().invoke(app, ["verify", "--no-gate", str(PACK)])
    assert said.exit_code == 0 and said.output.startswith("Accepted: 15 records agree")


@pytest.mark.parametrize("tamper", TAMPERED, ids=lambda tamper: tamper.__name__)
def test_a_pack_that_was_tampered_with_is_not(lines: Lines, tmp_path: Path, tamper: Callable[[Lines], None]) -> None:
    changed = copy.deepcopy(lines)
    tamper(changed)
    pack = written(tmp_path / "pack.jsonl.gz", changed)
    said = CliRunner().invoke(app, ["verify", "--no-gate", "--json", str(pack)])
    found = json.loads(said.stdout)
    assert said.exit_code == 1 and not found["accepted"]
    assert TAMPERED[tamper] in {fault["kind"] for fault in found["faults"]}, found


def consistently_faster(lines: Lines) -> None:
    """No arithmetic finds it: all readings of a process made a tenth smaller, each in its place."""
    line, timed = one(lines), one(lines)["timed"]
    for name in ("measured_seconds", "part_seconds", "referee_seconds"):
        timed[name] = [0.9 * seconds for seconds in timed[name]]
    faster(lines)
    for turn in timed["turns"]:
        turn[2], turn[3] = 0.9 * turn[2], 0.9 * turn[3]
    line["wall_seconds"] *= 0.9


def test_what_cannot_be_found_is_known(lines: Lines, tmp_path: Path) -> None:
    changed = copy.deepcopy(lines)
    consistently_faster(changed)
    said = CliRunner().invoke(app, ["verify", "--no-gate", str(written(tmp_path / "pack.jsonl.gz", changed))])
    assert said.exit_code == 0
    page = (ROOT / "docs" / "submit.md").read_text(encoding="utf-8")
    assert "all smaller by one factor" in page


def test_every_kind_is_explained_on_the_page() -> None:
    page = (ROOT / "docs" / "submit.md").read_text(encoding="utf-8")
    for kind in {*TAMPERED.values(), "gate", "limit", "protocol", "update", "no digest"}:
        assert f"| `{kind}` |" in page, kind


def test_a_pack_of_an_older_protocol_is_not_accepted() -> None:
    old = ROOT / "results" / "records" / "2026-11-24-epyc-b714c58d-modern-vit.jsonl.gz"
    said = CliRunner().invoke(app, ["verify", str(old)])
    assert said.exit_code == 1 and "verified-v1 is no protocol of this dpbench" in said.output


def of_today(lines: Lines, limit: float = 1.0, digest: Sequence[float] = ()) -> list[Record]:
    """Two records of the pack, as this tree's code would have made them."""
    (contestant,) = registry.select(["dpcore-native"])
    adapter = contestant.framework.adapter_hash + definition_hash(known_task("mnist-cnn"))
    found = []
    for purpose in ("gate", "time"):
        line = copy.deepcopy(
            next(one for one in lines if one["purpose"] == purpose and one["cell"]["framework"] == "dpcore")
        )
        line["source"]["adapter_hash"] = hashlib.sha256(adapter.encode()).hexdigest()[:12]
        line["source"]["lock_hash"] = contestant.framework.lock_hash
        line["data"] = None
        if purpose == "gate":
            check = {"check": "update: one", "error": 0.0, "limit": limit, "passed": True, "digest": digest}
            line["gate"]["checks"] = [check]
        found.append(parse(json.dumps(line), purpose))
    return found


@pytest.mark.parametrize(
    ("error", "limit", "kinds"), [(0.5, 1.0, set()), (2.0, 1.0, {"gate"}), (0.5, 3.0, {"limit"})], ids=str
)
def test_the_gate_is_asked_again_here(lines: Lines, error: float, limit: float, kinds: set[str]) -> None:
    asked = []

    def judge(contestant: registry.Contestant, task: str) -> Verdict:
        asked.append((contestant.name, task))
        check = GateCheck(check="update: one", error=error, limit=1.0, passed=error <= 1.0)
        return Verdict("ok", None, Gate(passed=check.passed, key="", checks=[check]), {})

    found = {fault.kind for fault in here.faults(of_today(lines, limit), judge)}
    assert asked == [("dpcore-native", "mnist-cnn")] and found == kinds


def other_update(update: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    return update + 1e-3 * np.linalg.norm(update) / math.sqrt(update.size) * rng.standard_normal(update.size)


def longer_update(update: np.ndarray, _: np.random.Generator) -> np.ndarray:
    return 1.001 * update


def update_as_rounded(update: np.ndarray, _: np.random.Generator) -> np.ndarray:
    return update.astype(np.float32).astype(np.float64)


@pytest.mark.parametrize(
    ("make", "kinds"),
    [(other_update, {"update"}), (longer_update, {"update"}), (update_as_rounded, set()), (None, set())],
    ids=("other", "longer", "as_rounded", "no_digest"),
)
def test_the_update_is_compared_with_the_one_made_here(lines: Lines, make: Any, kinds: set[str]) -> None:
    rng, limit = np.random.default_rng(7), 5e-5
    update = rng.standard_normal(10_000)
    there = of_today(lines, limit, [] if make is None else sketch.digest(make(update, rng)))

    def judge(*_: object) -> Verdict:
        check = GateCheck(check="update: one", error=0.0, limit=limit, passed=True, digest=sketch.digest(update))
        return Verdict("ok", None, Gate(passed=True, key="", checks=[check]), {})

    assert {fault.kind for fault in here.faults(there, judge)} == kinds
    assert here.undigested(there) == ([] if make else ["mnist-cnn, dpcore-native"])


def test_code_that_is_not_here_is_not_judged(lines: Lines) -> None:
    changed = [record.model_copy(update={"data": None}) for record in map(as_record, lines)]

    def judge(*_: object) -> Verdict:
        raise AssertionError("it must not be asked")

    others = [r for r in changed if r.cell.framework != "dpcore"]
    for record in others:
        object.__setattr__(record.source, "adapter_hash", "0" * 12)
    assert {fault.kind for fault in here.faults(others, judge)} == {"other code"}


def as_record(line: dict[str, Any]) -> Record:
    return parse(json.dumps(line), "a test")


def test_faults_of_records_name_the_record(lines: Lines) -> None:
    changed = copy.deepcopy(lines)
    faster(changed)
    (fault,) = records.faults([as_record(line) for line in changed])
    assert fault.kind == "epoch" and fault.where.startswith(one(lines)["cell"]["task"])
