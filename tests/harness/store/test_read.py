"""Loading: everything that may lie in a folder."""

from __future__ import annotations

import json

import pytest

from harness.analysis import frames
from harness.errors import BadInput
from harness.store import cache, read, record
from harness.store import folder as store
from tests.support import record_factory as factory


def test_loose_and_packed_records_are_found_at_any_depth(tmp_path):
    run = factory.quick_run(rounds=1)
    factory.write(run[:10], tmp_path / "a" / "records")
    factory.write(run[10:], tmp_path / "b", packed=True)
    assert len(read.load(tmp_path)) == len(run)
    assert len(read.load(tmp_path / "b" / "records.jsonl")) == len(run) - 10


def test_a_record_that_is_there_loose_and_packed_counts_once(tmp_path):
    run = factory.quick_run(rounds=2)
    factory.write(run, tmp_path / "loose")
    factory.write(run, tmp_path / "packed", packed=True)
    assert len(read.load(tmp_path)) == len(run)


def test_of_a_run_folder_only_its_records_count(tmp_path):
    (tmp_path / "plan.json").write_text('{"options": {}}')
    factory.write([factory.record()], tmp_path / "records")
    factory.write([factory.record(round=7)], tmp_path / "earlier" / "20261101" / "records")
    (tmp_path / "records" / ".half.json.123.part").write_text('{"schema"')
    (tmp_path / "records" / ".hidden.json").write_text('{"schema"')
    assert [r.block.round for r in read.load(tmp_path)] == [0]


def test_a_file_that_vanishes_while_we_read_makes_us_read_again(tmp_path, monkeypatch):
    factory.write([factory.record(), factory.record(round=1)], tmp_path)
    real, calls = read.record.texts, []

    def flaky(path):
        calls.append(path)
        if len(calls) == 2:
            raise FileNotFoundError(path)
        return real(path)

    monkeypatch.setattr(read.record, "texts", flaky)
    assert len(read.load(tmp_path)) == 2


@pytest.mark.parametrize(
    ("content", "word"),
    [
        ('{"schema": 1, "purp', "not a record"),
        ("[]", "not a record"),
        ('{"schema": 1}', "corrupt"),
        ('{"config": {}}', "no `schema`, .*; name the files"),
        ('{"schema": 99}', "schema 99"),
    ],
)
def test_a_bad_record_is_named(tmp_path, content, word):
    factory.write([factory.record()], tmp_path)
    (tmp_path / "bad.json").write_text(content)
    with pytest.raises(BadInput, match=word) as error:
        read.load(tmp_path)
    assert "bad.json" in str(error.value)


def test_a_bad_line_of_a_packed_file_is_named(tmp_path):
    good = factory.record().to_json()
    newer = json.dumps({**json.loads(good), "schema": 99})
    (tmp_path / "run.jsonl").write_text(f"{good}\n\n{newer}\n")
    with pytest.raises(BadInput, match=r"run\.jsonl:3 .*99"):
        read.load(tmp_path)


def test_bytes_that_are_no_text_are_refused(tmp_path):
    (tmp_path / "x.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(BadInput, match="not a record"):
        read.load(tmp_path)


def test_no_folder_and_no_record_are_told_apart(tmp_path):
    with pytest.raises(BadInput, match="There is no folder"):
        read.load(tmp_path / "nowhere")
    with pytest.raises(BadInput, match="no records in"):
        read.load(tmp_path)
    with pytest.raises(BadInput, match="no end-to-end records"):
        frames.build([])


def test_a_packed_run_does_not_name_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", "/home/somebody")
    reason = "the whole log is /home/somebody/.cache/x.log, not /data/home/somebody/x"
    factory.write([factory.record(state="crashed", reason=reason)], tmp_path / "records")
    assert store.pack(tmp_path, tmp_path / "packed.jsonl") == 1
    (packed,) = read.load(tmp_path / "packed.jsonl")
    assert packed.reason == "the whole log is ~/.cache/x.log, not /data/home/somebody/x"


def test_a_run_at_work_is_not_packed(tmp_path):
    factory.write([factory.record()], tmp_path / "records")
    with cache.locked(tmp_path / ".lock"), pytest.raises(BadInput, match="at work"):
        store.pack(tmp_path, tmp_path / "packed.jsonl")
    assert not (tmp_path / "packed.jsonl").exists()


def test_some_contestants_and_tasks_are_chosen_by_name():
    run = factory.quick_run(rounds=1)
    some = read.chosen(run, ("opacus", "jax-vmap"), ("mnist-cnn",))
    assert {r.cell.contestant for r in some} == {"opacus-hooks", "opacus-ghost", "jax-vmap"}
    assert {r.cell.task for r in some} == {"mnist-cnn"}
    assert read.chosen(run) == list(run)
    with pytest.raises(BadInput, match=r"'opacu' \(did you mean opacus"):
        read.chosen(run, ("opacu",))
    with pytest.raises(BadInput, match="--tasks names 'recsys'"):
        read.chosen(run, None, ("recsys",))


def test_a_linked_run_is_read_and_a_circle_is_read_once(tmp_path):
    factory.write([factory.record()], tmp_path / "elsewhere" / "records")
    (tmp_path / "all").mkdir()
    (tmp_path / "all" / "link").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere" / "round").symlink_to(tmp_path / "all")
    assert len(read.load(tmp_path / "all")) == 1


def test_what_editors_and_git_do_to_line_ends_and_beginnings_is_no_fault(tmp_path):
    run = factory.quick_run(rounds=1)[:3]
    lines = "\r\n".join(record.to_json() for record in run)
    (tmp_path / "of-windows.jsonl").write_bytes(b"\xef\xbb\xbf" + lines.encode())
    assert read.load(tmp_path) == run


def test_what_dpbench_wrote_is_read_as_any_json_is():
    line = factory.quick_run(rounds=1)[0].to_json()
    assert record.parse(line, "here") == record.parse(f" {line}", "here")
    for text in (f'{line[:-1]},"schema":2}}', line.replace('"schema":1', '"schema":1,"other":1')):
        told = []
        for spelt in (text, f" {text}"):
            with pytest.raises(BadInput) as caught:
                record.parse(spelt, "here")
            told.append(str(caught.value))
        assert told[0] == told[1]


def test_equal_parts_of_records_are_there_once(tmp_path):
    found = read.load(factory.write(factory.quick_run(rounds=2), tmp_path / "run" / "records"))
    for name in ("cell", "gate", "machine", "versions", "source"):
        parts = [getattr(one, name) for one in found]
        assert len({id(part) for part in parts}) == len({repr(part) for part in parts}) < len(found), name


def test_a_verdict_is_shared_only_where_it_is_the_record_s_own():
    one = factory.quick_run(rounds=1)[0]
    facts = {**one.machine, "gate": {"passed": True, "key": "of the machine", "checks": []}, "epsilon": 1.0}
    odd = one.model_copy(update={"machine": facts, "gate": None})
    gates = {}
    for value in (one, odd, one):
        assert record.parse(value.to_json(), "here", gates) == value
    assert len(gates) == 1


def test_of_a_packed_file_that_breaks_off_nothing_counts(tmp_path):
    run = factory.quick_run(rounds=1)
    factory.write(run[:2], tmp_path / "whole", packed=True)
    (tmp_path / "broken.jsonl").write_bytes("".join(one.to_json() + "\n" for one in run).encode() + b"\xff\n")
    told = []
    assert read.load(tmp_path, left_out=told.append) == run[:2]
    assert (
        len(told) == 1
        and "broken.jsonl" in told[0]
        and f"at byte {len(''.join(one.to_json() + 'x' for one in run).encode())}" in told[0]
    )
