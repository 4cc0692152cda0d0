"""The committed records as others find and take them: Croissant metadata, and a snapshot with a checksum."""

from __future__ import annotations

import gzip
import hashlib
import importlib.util
import json
import os
import subprocess
import tarfile
from pathlib import Path

import pytest
from typer.testing import CliRunner

from harness.cli.main import app
from harness.errors import BadInput
from harness.published import croissant, index, snapshot

METADATA = json.loads(croissant.FILE.read_text(encoding="utf-8"))


def test_the_metadata_are_those_of_the_committed_records() -> None:
    assert croissant.FILE.read_text(encoding="utf-8") == croissant.text(index.load()), "run `make findings`"


def test_every_file_of_records_is_listed_with_its_hash() -> None:
    listed = {e["contentUrl"]: e["sha256"] for e in METADATA["distribution"] if e["@type"] == "cr:FileObject"}
    files = [*sorted((index.FOLDER / "records").glob("*.jsonl.gz")), index.FILE]
    assert listed == {
        str(path.relative_to(index.FOLDER)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files
    }


def test_its_fields_are_those_of_a_record() -> None:
    lines = (gzip.decompress(path.read_bytes()).split(b"\n")[0] for path in (index.FOLDER / "records").glob("*.gz"))
    records = [json.loads(line) for line in lines]
    for path in croissant.FIELDS:
        column, _, rest = path.partition(".")
        assert any(rest in record[column] if rest else record[column] is not None for record in records), path


@pytest.mark.skipif(importlib.util.find_spec("mlcroissant") is None, reason="mlcroissant is not installed")
def test_its_validator_accepts_it_and_reads_every_record() -> None:
    import mlcroissant

    found = mlcroissant.Dataset(str(croissant.FILE))
    assert not found.metadata.ctx.issues.errors and not found.metadata.ctx.issues.warnings
    count = sum(
        len(gzip.decompress(path.read_bytes()).splitlines()) for path in (index.FOLDER / "records").glob("*.gz")
    )
    assert sum(1 for _ in found.records("processes")) == count


def repository(folder: Path, date: int) -> Path:
    results = folder / "results"
    results.mkdir(parents=True)
    for name in ("b", "a", "not committed"):
        (results / name).write_text(name)
        os.utime(results / name, (date, date))
    subprocess.run(["git", "init", "-q", str(folder)], check=True)
    subprocess.run(["git", "-C", str(results), "add", "a", "b"], check=True)
    return results


def test_a_snapshot_has_the_same_bytes_whoever_makes_it(tmp_path: Path) -> None:
    made = [
        (tmp_path / name / "snapshot.tar", repository(tmp_path / name, date)) for name, date in (("x", 1e9), ("y", 2e9))
    ]
    assert len({snapshot.write(target, folder) for target, folder in made}) == 1
    target, _ = made[0]
    assert target.read_bytes() == made[1][0].read_bytes()
    with tarfile.open(target) as archive:
        assert archive.getnames() == ["results/a", "results/b"]
    checked = subprocess.run(["sha256sum", "--check", "snapshot.tar.sha256"], cwd=target.parent, capture_output=True)
    assert checked.returncode == 0


def test_a_snapshot_of_this_checkout_holds_the_records(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["findings", "--snapshot", str(tmp_path / "results.tar")])
    assert done.exit_code == 0, done.output
    with tarfile.open(tmp_path / "results.tar") as archive:
        assert {"results/index.toml", *(f"results/{e.file}" for e in index.load().run if e.holds_records)} <= set(
            archive.getnames()
        )


def test_what_cannot_be_a_snapshot_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"the ending \.tar"):
        snapshot.write(tmp_path / "results.zip")
    with pytest.raises(BadInput, match="needs a checkout"):
        snapshot.write(tmp_path / "results.tar", tmp_path)
