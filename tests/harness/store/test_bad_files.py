"""What lies where the harness reads and is not what it wrote: one sentence that names it, and never a traceback."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest
from typer.testing import CliRunner

from harness.analysis import frames
from harness.cli import main as cli
from harness.data import store as data_store
from harness.environments.backend import Argument, Output
from harness.environments.executor import Limits
from harness.errors import BadInput
from harness.gate import admission
from harness.gate.admission import judge
from harness.plan import registry
from harness.run.e2e import ensure_data
from harness.store import cache, read, seal, sequence
from harness.store import folder as store
from harness.store.folder import RunFolder
from harness.store.record import parse
from harness.worker.result import Check, Result
from tests.support import record_factory as factory

PLAN = {"options": {"seed": 0}}


def invoke(*arguments: object) -> BadInput | None:
    """What ``dpbench`` says of bad input, or None."""
    done = CliRunner().invoke(cli.app, [str(a) for a in arguments])
    assert done.exception is None or isinstance(done.exception, (BadInput, SystemExit)), done.exc_info
    return done.exception if isinstance(done.exception, BadInput) else None


def changed(**fields: object) -> str:
    return json.dumps({**json.loads(factory.record().to_json()), **fields})


CELL = json.loads(factory.record().to_json())["cell"]
BAD = {
    "random bytes": b"\xff\xfe\x00\x9c",
    "nothing": b"",
    "a number": b"7",
    "deep": b"[" * 200_000 + b"]" * 200_000,
    "deep inside": ('{"schema": 1, "a": ' + "[" * 200_000 + "]" * 200_000 + "}").encode(),
    "no seconds": changed(epoch_seconds=[]).encode(),
    "no timing": changed(timed=None).encode(),
    **{f"seconds {s}": changed(epoch_seconds=[s]).encode() for s in (0.0, -1.0, float("nan"), float("inf"))},
    "gpus": changed(machine={"gpus": 5}).encode(),
    "cores": changed(machine={"cores": "two"}).encode(),
    "schema true": changed(schema=True).encode(),
    "schema -1": changed(schema=-1).encode(),
    "batch size": changed(cell={**CELL, "batch_size": 0}).encode(),
    "task": changed(cell={**CELL, "task": "mnist"}).encode(),
    "memory": changed(memory={"peak_resident_growth": -1}).encode(),
    "started": changed(started="yesterday").encode(),
    "no zone": changed(started="2026-11-20T08:00:00").encode(),
}


@pytest.mark.parametrize("content", BAD.values(), ids=BAD.keys())
def test_of_a_bad_record_the_report_shows_the_rest_and_names_it(tmp_path: Path, content: bytes) -> None:
    factory.write([factory.record(), factory.record(round=1)], tmp_path)
    (tmp_path / "bad.json").write_bytes(content)
    told: list[str] = []
    assert len(read.load(tmp_path, left_out=told.append)) == 2
    (fault,) = told
    assert "bad.json" in fault and "\n" not in fault
    with pytest.raises(BadInput, match=r"bad\.json"):
        read.load(tmp_path)


def test_the_written_report_says_what_was_left_out(tmp_path: Path) -> None:
    factory.write([factory.record()], tmp_path / "in")
    (tmp_path / "in" / "bad.json").mkdir()
    (tmp_path / "in" / "worse.json").write_text("<script>")
    said = invoke("report", tmp_path / "in", "--out", tmp_path / "out")
    assert said is not None and "worse.json" in str(said)
    page = (tmp_path / "out" / "report.md").read_text()
    assert "Records left out" in page and "worse.json" in page and "Seconds per epoch" in page


def test_a_folder_or_a_device_in_a_records_place(tmp_path: Path) -> None:
    (tmp_path / "x.json").mkdir()
    for place in (tmp_path / "x.json", Path("/proc/self/mem")):
        said = invoke("report", place)
        assert said is not None and str(place) in str(said) and "None" not in str(said)


def test_control_characters_of_a_contestant_reach_no_terminal() -> None:
    made = factory.record(state="crashed", reason="\x1b[2J\x07red\u202e <b>")
    assert made.reason == "[2Jred <b>"
    assert parse(made.to_json(), "here").reason == made.reason


def opened(path: Path, fresh: bool = False, plan: dict[str, object] = PLAN) -> RunFolder:
    folder = RunFolder(path)
    with folder.open(plan, fresh):
        return folder


@pytest.mark.parametrize("content", [b"null", b"[]", b'"x"', b"\xff", b"", b"{}", b"[" * 100_000])
def test_a_bad_plan_is_refused(tmp_path: Path, content: bytes) -> None:
    opened(tmp_path)
    (tmp_path / "plan.json").write_bytes(content)
    with pytest.raises(BadInput, match=r"plan\.json is corrupt; start anew with --fresh"):
        opened(tmp_path)


def test_records_without_their_plan_are_refused(tmp_path: Path) -> None:
    folder = opened(tmp_path)
    folder.write(factory.record().file_name, factory.record())
    (tmp_path / "plan.json").unlink()
    with pytest.raises(BadInput, match=r"no plan\.json"):
        opened(tmp_path)
    opened(tmp_path, fresh=True)


def test_a_record_under_another_cells_name_is_refused_and_left_out(tmp_path: Path) -> None:
    folder = opened(tmp_path)
    mine, other = factory.record(), factory.record(framework="dpcore", variant="book-keeping")
    for value in (mine, other):
        folder.write(value.file_name, value)
    assert folder.read(mine.file_name) == mine
    (folder.records / other.file_name).write_text(mine.to_json())
    with pytest.raises(BadInput, match="holds the record of another process"):
        folder.read(other.file_name)
    told: list[str] = []
    assert read.load(tmp_path, left_out=told.append) == [mine]
    assert len(told) == 1 and other.file_name in told[0]
    with pytest.raises(BadInput, match="holds the record of another process"):
        store.pack(tmp_path, tmp_path / "packed.jsonl")


def test_a_folder_that_cannot_be_written_is_named_before_anything_runs(tmp_path: Path) -> None:
    for name in ("records", "scratch"):
        opened(tmp_path / name)
        where = tmp_path / name / name
        done = subprocess.run(["mount", "-t", "tmpfs", "-o", "ro", "tmpfs", str(where)], capture_output=True)
        if done.returncode:
            pytest.skip("mounting a read-only folder needs root")
        try:
            with pytest.raises(BadInput, match=f"{name} cannot be .*Read-only"):
                opened(tmp_path / name)
            with pytest.raises(BadInput, match="Read-only"):
                cache.write_atomically(where / "x", b"")
        finally:
            subprocess.run(["umount", str(where)], check=True)


def test_attempts_are_counted_over_kills_only(tmp_path: Path) -> None:
    folder = opened(tmp_path)
    for ending in (None, KeyboardInterrupt, ValueError):
        try:
            with folder.attempt("cell") as before:
                assert before == 0
                if ending is not None:
                    raise ending
        except (KeyboardInterrupt, ValueError):
            pass
    killed = [folder.attempt("cell") for _ in range(3)]  # kept: a killed process ends no block
    assert [attempt.__enter__() for attempt in killed] == [0, 1, 2]


def test_no_device_and_no_pipe_is_replaced(tmp_path: Path) -> None:
    factory.write([factory.record()], tmp_path / "records")
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    (tmp_path / "link").symlink_to(pipe)
    (tmp_path / "folder").mkdir()
    for target in (pipe, tmp_path / "link", tmp_path / "folder", Path("/dev/null")):
        said = invoke("pack", tmp_path, target)
        assert said is not None and "no regular file" in str(said) and str(target) in str(said)
    assert pipe.is_fifo() and Path("/dev/null").is_char_device()
    (tmp_path / "to").symlink_to(tmp_path / "behind.jsonl")
    assert invoke("pack", tmp_path, tmp_path / "to") is None
    assert (tmp_path / "to").is_symlink() and (tmp_path / "behind.jsonl").is_file()
    nowhere = invoke("pack", tmp_path, "/proc/nope/x")
    assert nowhere is not None and "--out" not in str(nowhere)


def test_the_newer_record_is_the_later_one_whatever_the_clock_says(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("DPBENCH_CACHE", str(tmp_path))
    clock = 2_000_000_000 * 10**9
    monkeypatch.setattr(sequence.time, "time_ns", lambda: clock)
    first = sequence.take()
    clock -= 10 * 24 * 3600 * 10**9  # set back by ten days
    second = sequence.take()
    assert first == 2_000_000_000_000 and second == first + 1
    old = factory.record(seconds=[9.0], adapter_hash="old", started="2033-05-18T03:33:20+00:00", sequence=first)
    new = factory.record(seconds=[1.0], adapter_hash="new", started="2033-05-08T03:33:20+00:00", sequence=second)
    assert frames.build([new, old]).cells["median"].tolist() == [1.0]
    before = factory.record(seconds=[5.0], adapter_hash="older", started="2033-05-18T03:33:19+00:00")
    assert frames.build([new, old, before]).cells["median"].tolist() == [1.0]
    (tmp_path / "sequence").write_text("nonsense")
    assert sequence.take() == clock // 10**6


REFUSED = {
    "gate frameworks": ("gate", "--frameworks", "", "--frameworks names nothing"),
    "gate tasks": ("gate", "--tasks", ",", "--tasks names nothing"),
    "gate threads 0": ("gate", "--threads", "0", "--threads is 0"),
    "gate threads -3": ("gate", "--threads", "-3", "--threads is -3"),
    "gate threads 1000": ("gate", "--threads", "1000", "--threads is 1000"),
    "keyword": ("new-framework", "class", "cannot be called 'class'"),
    "layers": ("run", "layers", "--memory-limit", "inf", "--memory-limit is inf"),
    "layers seconds": ("run", "layers", "--seconds", "inf", "--seconds is inf"),
    "layers seed": ("run", "layers", "--seed", "-1", "--seed is -1"),
    "e2e budget": ("run", "e2e", "--budget-seconds", "nan", "--budget-seconds is nan"),
}


@pytest.mark.parametrize("case", REFUSED.values(), ids=REFUSED.keys())
def test_options_that_mean_nothing_are_refused(case: tuple[str, ...]) -> None:
    *arguments, words = case
    said = invoke(*arguments)
    assert said is not None and words in str(said)


class Yes:
    """A place whose gate lets everybody in."""

    name, identity = "nowhere", ""

    def __init__(self) -> None:
        self.runs = 0

    def run(self, request, limits, on_event):
        self.runs += 1
        return Result("ok", checks=[Check("update: all", 0.0, 1.0, True)])


@pytest.fixture
def gate(tmp_path: Path, monkeypatch):
    """Judges a contestant on a task in the place."""
    monkeypatch.setenv("DPBENCH_CACHE", str(tmp_path))
    monkeypatch.setattr(admission, "reference", lambda task, log, run_tool: tmp_path)
    (contestant,) = registry.select(["pytorch-eager"])

    def no_tool(*asked: object) -> str:
        raise AssertionError(f"nothing is to be computed: {asked}")

    def decide(place: Yes, task: str = "logreg", log=lambda text: None):
        return judge(contestant, task, place, Limits(2**30, 60.0), "cpu", 1, log, no_tool)

    return decide


def verdicts(folder: Path) -> list[Path]:
    return sorted((folder / "gate").glob("*.json"))


def test_a_verdict_that_this_harness_did_not_write_is_made_anew(tmp_path: Path, gate) -> None:
    place = Yes()
    assert gate(place).passed and gate(place).cached and place.runs == 1
    (path,) = verdicts(tmp_path)
    whole = path.read_bytes()
    forged = json.loads(whole)
    forged["result"] = forged["result"].replace('"error": 0.0', '"error": 0.5')
    said: list[str] = []
    contents = (b"", whole[:40], b"{}", b"[]", b"null", b"\xff", json.dumps(forged).encode(), b"[" * 100_000)
    for number, content in enumerate(contents, start=1):
        path.write_bytes(content)
        verdict = gate(place, log=said.append)
        assert verdict.passed and not verdict.cached and verdict.gate.checks[0].error == 0.0
        assert place.runs == 1 + number and len(said) == number and "another hand" in said[-1]
        assert gate(place, log=said.append).cached and path.read_bytes() == whole


def test_the_verdict_of_one_task_does_not_count_for_another(tmp_path: Path, gate) -> None:
    place = Yes()
    gate(place)
    (mine,) = verdicts(tmp_path)
    gate(place, "ffnn")
    (other,) = set(verdicts(tmp_path)) - {mine}
    other.write_bytes(mine.read_bytes())
    assert not gate(place, "ffnn").cached


def test_a_verdict_needs_this_users_key(tmp_path: Path, gate) -> None:
    place = Yes()
    gate(place)
    assert (tmp_path / "key").stat().st_mode & 0o077 == 0
    (tmp_path / "key").write_text("00" * 32)
    assert not gate(place).cached


def test_a_reference_is_what_was_sealed_or_made_anew(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("DPBENCH_CACHE", str(tmp_path))
    made: list[str] = []

    def make(module: str, arguments: Sequence[Argument], log: object) -> str:
        made.append(module)
        output = arguments[-1]
        assert isinstance(output, Output)
        output.path.write_bytes(b"truth")
        return ""

    said: list[str] = []

    def ask() -> Path:
        return admission.reference("logreg", said.append, make)

    path = ask()
    assert ask() == path and len(made) == 1
    path.write_bytes(b"tru")
    ask()
    assert len(made) == 2 and sum("another hand" in text for text in said) == 1
    path.with_name(f"{path.name}.seal").unlink()
    ask()
    assert len(made) == 3 and path.read_bytes() == b"truth"


def test_watched_files_may_be_touched_but_not_changed(tmp_path: Path) -> None:
    file = tmp_path / "clock.py"
    file.write_text("seconds")
    watched = seal.Watched()
    watched.add([file])
    os.utime(file, (1, 1))
    watched.check()
    before = file.stat()
    file.write_text("seCONDS")  # as long as it was, and with the old time
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    with pytest.raises(BadInput, match=r"clock\.py changed during the run"):
        watched.check()
    file.unlink()
    with pytest.raises(BadInput, match=r"clock\.py changed"):
        watched.check()


def test_changed_data_is_noticed_before_anything_runs(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("DPBENCH_CACHE", str(tmp_path))
    ensure_data("adult", True, lambda text: None)
    path = data_store.folder("adult", True) / "train_x.npy"
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)
    with pytest.raises(BadInput, match="is damaged: its SHA-256 is"):
        ensure_data("adult", True, lambda text: None)
    path.write_bytes(content[:100])
    with pytest.raises(BadInput, match=r"is damaged: train_x\.npy cannot be read"):
        ensure_data("adult", True, lambda text: None)
