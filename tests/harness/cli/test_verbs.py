"""The verbs: what people read, what machines read, and what bad input says."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import pandas as pd
import pytest
from typer.testing import CliRunner

from harness.cli.main import app
from harness.errors import BadInput
from tests.support import record_factory as factory


def run(*arguments, code=0):
    result = CliRunner(env={"COLUMNS": "200"}).invoke(app, [str(a) for a in arguments])
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == code, result.output
    return result.output


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("run")
    return factory.write(factory.quick_run(rounds=6), place)


def fixed(b_seconds, rounds=10, **more):
    a = [factory.record(framework="dpcore", variant="book-keeping", round=r, seconds=[1.0]) for r in range(rounds)]
    return a + [factory.record(round=r, seconds=[s], **more) for r, s in zip(range(rounds), b_seconds, strict=True)]


def line(tmp_path, records, a="dpcore", b="opacus", code=0):
    return run("compare", a, b, "--in", factory.write(records, tmp_path), code=code).strip()


def test_a_certain_difference_is_one_plain_sentence(tmp_path):
    assert line(tmp_path, fixed([2.3, 2.4] * 5)) == (
        "dpcore-book-keeping is 2.35× [2.31, 2.39] faster than opacus-hooks on mnist-cnn at 512, n = 10 "
        "(verdict: faster)"
    )


def test_turned_round_it_is_slower(tmp_path):
    assert line(tmp_path, fixed([2.3, 2.4] * 5), "opacus", "dpcore") == (
        "opacus-hooks is 2.35× [2.31, 2.39] slower than dpcore-book-keeping on mnist-cnn at 512, n = 10 "
        "(verdict: slower)"
    )


@pytest.mark.parametrize(("noise", "verdict"), [(0.01, "equivalent"), (0.5, "ambiguous")])
def test_no_difference_is_not_called_one(tmp_path, noise, verdict):
    text = line(tmp_path, fixed([1 + noise, 1 / (1 + noise)] * 5))
    assert "takes 1.00× [" in text and f"(verdict: {verdict})" in text
    assert "faster" not in text and "slower" not in text


def test_a_difference_below_the_margin_says_so(tmp_path):
    assert "(verdict: faster, by less than 5%)" in line(tmp_path, fixed([1.019, 1.021] * 5))


def test_few_rounds_give_an_interval_and_no_verdict(tmp_path):
    text = line(tmp_path, fixed([2.3, 2.4, 2.3], rounds=3))
    assert "[" in text and "(no verdict: under 5 rounds)" in text


def test_failures_are_named_instead_of_compared(tmp_path):
    records = [factory.record(framework="dpcore", variant="a"), factory.record(state="oom")]
    assert line(tmp_path, records, code=3) == (
        "dpcore-a and opacus-hooks cannot be compared on mnist-cnn at 512: dpcore-a ok, opacus-hooks oom"
    )


def test_two_machines_are_compared_apart(tmp_path):
    records = fixed([2.0] * 10) + [
        r.model_copy(update={"machine": factory.OTHER_MACHINE, "epoch_seconds": [3.0 * s for s in r.epoch_seconds]})
        for r in fixed([4.0] * 10)
    ]
    lines = line(tmp_path, records).splitlines()
    assert len(lines) == 4 and "2.00×" in lines[1] and "4.00×" in lines[3]
    assert lines[0].startswith("AMD") and "H200" in lines[2]


def test_compare_for_machines(tmp_path):
    out = run("compare", "dpcore", "opacus", "--in", factory.write(fixed([2.0] * 10), tmp_path), "--json")
    (entry,) = json.loads(out)
    assert (entry["ratio"], entry["n"], entry["verdict"], entry["not_slower"]) == (2.0, 10, "faster", True)


@pytest.mark.parametrize(
    ("a", "b", "words"),
    [
        ("opacus", "dpcore", "more than one contestant"),
        ("opacus-hoks", "dpcore", "is no contestant .*opacus-hooks"),
        ("dpcore", "dpcore-book", "Both names mean"),
    ],
)
def test_names_that_cannot_be_compared(folder, a, b, words):
    with pytest.raises(BadInput, match=words):
        run("compare", a, b, "--in", folder)


def test_explain_shows_every_process_of_a_cell(folder):
    text = run("explain", "mnist-cnn/opacus-hooks/512", "--in", folder, "--all-checks")
    assert text.splitlines()[0] == "mnist-cnn/opacus-hooks/512/verified-v1/cpu/venv"
    assert text.count("time process") == 6 and text.count("memory process") == 1
    assert text.count("gate process") == 1
    for part in (
        "n = 6",
        "round 5, place",
        "epoch seconds",
        "update-equality",
        "other programs took",
        "opacus 1.6.0",
        "commit b618197aa",
        "dpbench run e2e --tasks mnist-cnn --frameworks opacus-hooks --batch-sizes 512",
    ):
        assert part in text, part


def test_explain_shows_times_first_shared_facts_once_and_the_gate_in_short(folder):
    text = run("explain", "mnist-cnn/opacus-hooks/512", "--in", folder)
    titles = [line for line in text.splitlines() if re.match(r"\w+ process", line)]
    assert titles[0] == "time process 1 of 7" and titles[-1] == "gate process"
    assert text.count("opacus 1.6.0") == text.count("in all of them") == 1
    assert "update-equality" not in text and "3 passed; --all-checks shows each" in text


def test_explain_always_shows_the_checks_that_failed(tmp_path):
    judged = factory.write([factory.record(purpose="gate", state="rejected", gate_passed=False)], tmp_path)
    text = run("explain", "opacus-hooks", "--in", judged)
    assert re.search(r"noise-standard-deviation +FAILED error 0.9.*the noise is 10 times too small", text)
    assert "update-equality" not in text


def test_explain_shows_why_a_cell_has_no_number(folder):
    text = run("explain", "imdb-lstm/opacus-ghost/64", "--in", folder)
    assert "unsupported: ghost clipping has no rule for an LSTM layer" in text


def test_explain_for_machines_gives_the_records(folder):
    entries = json.loads(run("explain", "imdb-lstm/jax-vmap/64/verified-v1/cpu/venv", "--in", folder, "--json"))
    assert {e["record"]["cell"]["task"] for e in entries} == {"imdb-lstm"}
    assert all(e["record"]["schema"] == 1 for e in entries)


def test_explain_finds_cells_of_layers_beside_those_of_tasks(tmp_path):
    records = [
        factory.record(),
        factory.layer_record(round=0),
        factory.layer_record(round=1, seconds=(2e-3,) * 5),
        factory.layer_record(purpose="memory"),
        factory.layer_record(layer="lstm", state="unsupported", reason="predicted 7 s a pass"),
    ]
    place = factory.write(records, tmp_path)
    text = run("explain", "linear/opacus-hooks/clipped/16", "--in", place)
    assert text.splitlines()[0].startswith("linear/opacus-hooks/clipped/16/layers-v1")
    assert text.count("time process") == 2 and text.count("memory process") == 1
    for part in ("5 timed after", "median 2 ms, mean 2 ms", "2, 2, 2, 2, 2", "gradients", "peak", "dpbench run layers"):
        assert part in text, part
    assert "unsupported: predicted 7 s a pass" in run("explain", "lstm/opacus-hooks", "--in", place)
    assert len(json.loads(run("explain", "linear/opacus-hooks/clipped/16", "--in", place, "--json"))) == 3
    with pytest.raises(BadInput, match=r"is no cell .*did you mean linear\?"):
        run("explain", "linaer", "--in", place)


def test_a_fragment_that_fits_whole_parts_goes_first(tmp_path):
    records = [factory.record(batch_size=b) for b in (16, 1600)]
    assert "/16/verified" in run("explain", "opacus-hooks/16", "--in", factory.write(records, tmp_path))


def test_mutants_and_frameworks_are_not_judged_together():
    with pytest.raises(BadInput, match="leave out --frameworks opacus"):
        run("gate", "--mutants", "--frameworks", "opacus")


def test_what_a_cell_is_marked_with_is_said_in_words(tmp_path):
    records = [factory.record(round=r, seconds=[1.0 + r], disturbed=r == 0, extrapolated=True) for r in range(3)]
    text = run("explain", "opacus-hooks", "--in", factory.write(records, tmp_path))
    assert "n = 3; extrapolated from a part of an epoch; 1 of 3 disturbed" in text


def test_a_folder_that_cannot_be_made_is_told_before_any_table(folder, tmp_path):
    (tmp_path / "file").write_text("")
    result = CliRunner().invoke(app, ["report", str(folder), "--out", str(tmp_path / "file")])
    assert isinstance(result.exception, BadInput) and "file cannot be made" in str(result.exception)
    assert not result.output, "no table before it"


def test_a_misspelt_cell_is_looked_for_among_tasks_and_layers_alike(tmp_path):
    place = factory.write([factory.layer_record(), factory.record(), factory.record(framework="jax")], tmp_path)
    meant = r"did you mean mnist-cnn/opacus-hooks/512\?\); choose one of mnist-cnn/opacus-hooks/512/[^,]*\."
    with pytest.raises(BadInput, match=meant):
        run("explain", "mnst-cnn/opacus-hoks/512", "--in", place)
    with pytest.raises(BadInput, match=r"is no cell of these records; choose"):
        run("explain", "xyzzy", "--in", place)


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        (("--tasks", "x y"), r"`dpbench run e2e --tasks 'x y'` \(or frontier, gpu\)"),
        (("--preset=smoke", "--json"), r"`dpbench run e2e --preset=smoke --json` \(or layers\)"),
    ],
)
def test_an_option_before_what_is_measured_is_answered_with_the_whole_command(asked, words):
    with pytest.raises(BadInput, match=words):
        run("run", *asked)


@pytest.mark.parametrize(
    ("fragment", "words"),
    [("mnist", "fits more than one .*mnist-cnn/"), ("mnsit", r"is no cell"), ("mnst-cnn", r"did you mean mnist-cnn\?")],
)
def test_unclear_cells_list_near_ones(folder, fragment, words):
    with pytest.raises(BadInput, match=words):
        run("explain", fragment, "--in", folder)


def sizes(run, *batch_sizes, **more):
    """Two rounds of JAX and Opacus on the MNIST network: 12 s and 24 s at batch 16, less in proportion beyond it."""
    return [
        factory.record(framework=name, variant=variant, batch_size=b, run=run, round=r, seconds=[s * 16 / b], **more)
        for name, variant, s in (("jax", "vmap", 12.0), ("opacus", "hooks", 24.0))
        for b in batch_sizes
        for r in range(2)
    ]


def test_what_two_runs_know_together_they_are_asked_together(tmp_path):
    """The gap beyond 2048 against that at 2048 needs both runs."""
    small = factory.write(sizes("run-1", 16, 2048), tmp_path / "small", packed=True)
    large = factory.write(sizes("run-2", 8192), tmp_path / "large", packed=True)
    paper = factory.write(sizes("run-3", 2048, 8192, protocol="paper-v1"), tmp_path / "paper", packed=True)

    def gaps(*places):
        run("report", *(p / "records.jsonl" for p in places), "--out", tmp_path / "out", "--json")
        frame = pd.read_csv(tmp_path / "out" / "paper-claims.csv").set_index(["protocol", "claim"])
        return frame.cells.xs(
            "Beyond 2048 the gap Opacus / JAX (DP) closes: the gap there / at 2048", level=1
        ).to_dict()

    assert gaps(large) == {"verified-v1": 0}
    assert gaps(small, large, small, paper) == {"verified-v1": 1, "paper-v1": 1}


def test_several_places_need_a_place_for_their_report(folder):
    with pytest.raises(BadInput, match=r"2 places .* --out"):
        run("report", folder, folder)


def test_report_writes_beside_the_records_and_says_where(tmp_path):
    records = factory.write(factory.quick_run(rounds=1, tasks=("mnist-cnn",)), tmp_path, packed=True)
    out = json.loads(run("report", records, "--json"))
    assert out["records"] == 25 and len(out["cells"]) == 10
    assert str(tmp_path / "report" / "report.md") in out["files"]
    text = run("report", records, "--out", tmp_path / "o", "--plots", tmp_path / "p")
    assert "median seconds per epoch" in text and f"{tmp_path / 'p'}: " in text
    assert text.splitlines()[-1] == f"Report: {(tmp_path / 'o' / 'report.html').as_uri()}"


@pytest.mark.parametrize("verb", [("report",), ("compare", "a", "b", "--in"), ("explain", "x", "--in")])
def test_no_records_is_one_clear_sentence(tmp_path, verb):
    with pytest.raises(BadInput, match=r"There are no records in .*dpbench run e2e"):
        run(*verb, tmp_path)


@pytest.mark.parametrize(
    "arguments", [("list",), ("--help",), ("explain", "mnist-cnn/opacus-hooks/512", "--in", "HERE")]
)
def test_a_reader_who_left_ends_it_silently_and_is_no_verdict(folder, arguments):
    """As ``| head`` may; by print, by the help and by rich's tables."""
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "harness", *(str(folder) if word == "HERE" else word for word in arguments)]
    try:
        done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True)
    finally:
        os.close(writing)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="only Linux has a device that is always full")
@pytest.mark.parametrize(
    "arguments", [("list",), ("--help",), ("explain", "mnist-cnn/opacus-hooks/512", "--in", "HERE")]
)
def test_a_full_disk_behind_standard_output_is_one_sentence(folder, arguments):
    command = [sys.executable, "-m", "harness", *(str(folder) if word == "HERE" else word for word in arguments)]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1, done.stderr
    assert "Standard output cannot be written" in done.stderr and "make room" in done.stderr


@pytest.mark.parametrize(
    ("asked", "meant"),
    [("env remove", "rm"), ("data ls", "list"), ("measure", "run"), ("env mkae", "make")],
)
def test_another_programs_verb_is_answered_with_ours(asked, meant):
    said = run(*asked.split(), code=2)
    assert f"No such command {asked.split()[-1]!r}. Did you mean {meant!r}?" in said
    assert "Did you mean" not in run("env", "frobnicate", code=2)
