"""The committed results: a true index, names that commands take, packed records, pages with generated tables."""

from __future__ import annotations

import gzip
import json
import re
import subprocess
from pathlib import Path

import pytest
from typer.testing import CliRunner

from harness.cli.main import app
from harness.errors import BadInput
from harness.published import index, pages
from harness.store import folder as store
from harness.store import read as records
from tests.support import record_factory as factory

RESULTS = Path("results")
# Lists, pages about the runs, and what is no run: the published tables and the history, which names its own files.
APART = ("README.md", "index.toml", "croissant.json", "paper/", "published/", "history/", "findings/")

ENTRY = """
[[run]]
name = "{name}"
file = "records/{name}.jsonl.gz"
what = "w"
machine = "m"
date = 2026-01-01
status = "{status}"
note = "{note}"
"""


def tracked() -> list[str]:
    listed = subprocess.run(["git", "ls-files", "results"], capture_output=True, text=True, check=True).stdout.split(
        "\n"
    )
    return [name.removeprefix("results/") for name in listed if name]


def written(folder: Path, *entries: tuple[str, str, str]) -> Path:
    path = folder / "index.toml"
    path.write_text("".join(ENTRY.format(name=n, status=s, note=note) for n, s, note in entries))
    return path


def test_every_committed_file_is_in_the_index_and_every_entry_exists() -> None:
    named = [entry.file for entry in index.load().run]
    assert [file for file in named if not (RESULTS / file).exists()] == []
    unnamed = [
        file
        for file in tracked()
        if not file.startswith(APART) and not any(file == name or file.startswith(f"{name}/") for name in named)
    ]
    assert unnamed == []


@pytest.mark.parametrize("entry", [e for e in index.load().run if e.holds_records], ids=lambda e: e.name)
def test_an_entry_says_what_its_records_say(entry: index.Entry) -> None:
    found = [json.loads(line) for line in gzip.decompress((RESULTS / entry.file).read_bytes()).splitlines()]
    assert min(r["started"] for r in found)[:10] == str(entry.date) == Path(entry.file).name[:10]
    assert {r["source"]["commit"][:8] for r in found} == {entry.commit}
    assert {r["machine"]["threads"] for r in found} == {entry.threads}
    (identity,) = {r["machine"]["id"] for r in found}
    assert identity in entry.machine and identity in entry.file


def test_what_does_not_hold_says_why(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="must say why"):
        index.load(written(tmp_path, ("a", "superseded", "")))


def test_a_name_means_one_run(tmp_path: Path) -> None:
    names = ("grid-2-2026-11-22", "grid-2026-11-21", "scout-2026-11-20")
    loaded = index.load(written(tmp_path, *((n, "cited" if "grid" in n else "scouting", "n") for n in names)))

    def found(name: str) -> list[str]:
        return [e.name for e in loaded.find(name)]

    assert found("grid-2") == ["grid-2-2026-11-22"]
    assert found("grid") == ["grid-2026-11-21"]
    assert found("scou") == ["scout-2026-11-20"]
    assert found("cited") == list(names[:2])
    for name, why in (("2026", "several runs"), ("frontier", "none of that name")):
        with pytest.raises(BadInput, match=why):
            loaded.find(name)


def test_cited_are_the_runs_that_pages_name() -> None:
    read = (Path("README.md"), RESULTS / "README.md", *Path("docs").glob("*.md"))
    text = "\n".join(page.read_text() for page in read)
    hold = [e for e in index.load().run if e.status in index.HOLD]
    named = {e.name for e in hold if re.search(rf"(?<![\w-]){re.escape(e.name)}(?![\w-])", text)}
    assert {e.name for e in hold if e.status == "cited"} == named


def test_two_entries_with_one_name_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="share"):
        index.load(written(tmp_path, ("a", "cited", ""), ("a", "cited", "")))


def test_a_path_that_exists_is_no_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = written(tmp_path, ("mine", "cited", ""))
    assert index.places([Path("mine")], path) == [tmp_path / "records" / "mine.jsonl.gz"]
    Path("mine").mkdir()
    assert index.places([Path("mine")], path) == [Path("mine")]


@pytest.mark.parametrize(("name", "meant"), [("citd", "cited"), ("grid-lstm-3", "grid-lstm-2"), ("qick", "quick")])
def test_a_misspelt_run_is_answered_with_the_one_that_is_meant(name: str, meant: str) -> None:
    with pytest.raises(BadInput, match=rf"no file or folder {name} here, .*did you mean {meant}\?"):
        index.load().find(name)
    with pytest.raises(BadInput, match=r"none of that name; `cited`"):
        index.load().find("xyzzy")


def test_what_holds_no_records_is_not_reported() -> None:
    with pytest.raises(BadInput, match=r"open results/checks/gate-all"):
        index.load().find("gate-all")


def test_report_takes_the_name_of_a_committed_run(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["report", "scout-lstm-2026", "--out", str(tmp_path), "--json"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.output)["records"] == 9
    assert (tmp_path / "report.md").exists()


def test_explain_and_history_take_it_too(tmp_path: Path) -> None:
    explained = CliRunner().invoke(app, ["explain", "imdb-lstm/jax-vmap/16", "--in", "scout-lstm-2026", "--json"])
    assert explained.exit_code == 0 and json.loads(explained.output)
    added = CliRunner().invoke(app, ["history", "add", "scout-lstm-2026", "--folder", str(tmp_path)])
    assert added.exit_code == 0 and len(list(tmp_path.rglob("*.json"))) == 1


def test_cited_means_runs_that_can_be_read_together() -> None:
    files = index.places([Path("cited")])
    assert len(records.load(*files)) == sum(len(gzip.decompress(f.read_bytes()).splitlines()) for f in files) > 100


def test_packing_compresses_and_gives_the_same_bytes_twice(tmp_path: Path) -> None:
    run = factory.write(factory.quick_run(rounds=2), tmp_path / "run" / "records").parent
    count = store.pack(run, tmp_path / "a.jsonl.gz")
    store.pack(run, tmp_path / "b.jsonl.gz")
    store.pack(run, tmp_path / "plain.jsonl")
    assert (tmp_path / "a.jsonl.gz").read_bytes() == (tmp_path / "b.jsonl.gz").read_bytes()
    assert gzip.decompress((tmp_path / "a.jsonl.gz").read_bytes()) == (tmp_path / "plain.jsonl").read_bytes()
    assert len(records.load(tmp_path / "a.jsonl.gz")) == count


@pytest.mark.parametrize("damage", [lambda b: b[:-20], lambda b: b"no gzip", lambda b: b[:40] + b"x" + b[41:]])
def test_a_damaged_packed_file_is_one_sentence(tmp_path: Path, damage) -> None:
    path = tmp_path / "run.jsonl.gz"
    path.write_bytes(damage(gzip.compress(b"{}\n" * 100)))
    with pytest.raises(BadInput, match=r"run\.jsonl\.gz is no complete gzip file"):
        records.load(path)


LONG = ("2026-11-25-modern-tasks.md", "2026-11-26-modern-tasks.md")
"""Pages that take half a minute each, and whose records no longer change."""


@pytest.mark.parametrize(
    "page", [pytest.param(p, marks=[pytest.mark.slow] * (p.name in LONG), id=p.name) for p in pages.pages()]
)
def test_tables_of_pages_are_what_the_records_give(page: Path) -> None:
    text = page.read_text()
    words = " ".join(text.split())
    # Else every figure is typed, or another command writes the page, and the page says so.
    said = "No records exist" in words or "Written by `python -m" in words
    assert pages.BLOCK.search(text) or said, "no generated table"
    assert pages.fill(index.ROOT / page, text) == text, "run `make findings`"


def test_the_result_shown_first_rests_on_cited_runs() -> None:
    for page in (Path("README.md"), RESULTS / "README.md"):
        for block in pages.BLOCK.finditer(page.read_text()):
            for part in block["what"].split(" | "):
                entries = [e for name in part.split(" at ")[0].split() for e in index.load().find(name)]
                assert {e.status for e in entries} == {"cited"}
                kinds = {e.machine.rpartition(", ")[0] for e in entries}  # without the one machine's number
                assert len(kinds) == 1 or block["kind"] == "compute", "ratios are not compared across machines"


def test_the_first_tables_have_no_time_that_is_not_in_a_generated_one() -> None:
    with_interval = re.compile(r"(\d+\.\d+)×?ᵉ? \[(\d+\.\d+), (\d+\.\d+)\]")
    ratio = re.compile(r"\d+\.\d{2}(?!\d)")
    rounded = lambda numbers: tuple(f"{float(number):.2f}" for number in numbers)  # noqa: E731
    recent = [page for page in pages.pages() if page.name >= "2026-11-29" or page.name == "README.md"]
    made = "".join(block.group() for page in recent for block in pages.BLOCK.finditer(page.read_text()))
    known, alone = set(map(rounded, with_interval.findall(made))), set(rounded(re.findall(r"\d+\.\d+", made)))
    for page, least in ((Path("README.md"), 6), (RESULTS / "README.md", 30)):
        typed = re.findall(r"^\| .*$", pages.BLOCK.sub("", page.read_text()), re.MULTILINE)
        assert set(map(rounded, with_interval.findall("\n".join(typed)))) <= known
        found = ratio.findall("\n".join(typed))
        assert set(found) <= alone and len(found) >= least


def test_a_stale_table_is_found_and_mended() -> None:
    text = "before\n<!-- ratios: grid-lstm-2 at 512 -->\n| 0.01 |\n<!-- end -->\nafter\n"
    made = pages.fill(index.ROOT / "README.md", text)
    assert made.startswith("before\n<!-- ratios") and made.endswith("<!-- end -->\nafter\n")
    assert "| imdb-lstm | 512 | dpcore-native | 0.73" in made and "0.01 |" not in made and "| 16 |" not in made
    with pytest.raises(BadInput, match="like 'nothing'"):
        pages.fill(index.ROOT / "README.md", "<!-- tables: scout-lstm-2026 | nothing -->\n<!-- end -->")


def test_a_figure_is_linked_from_where_its_page_lies_and_named() -> None:
    text = "<!-- figure: grid-lstm-2 at 512 as lstm -->\n<!-- end -->\n"
    assert 'src="plots/lstm.svg"' in pages.fill(index.ROOT / "README.md", text)
    made = pages.fill(RESULTS / "README.md", text)
    assert 'src="../plots/lstm.svg"' in made and 'srcset="../plots/lstm-dark.svg"' in made
    assert {path.name for path in pages.pictures(text)} == {"lstm.svg", "lstm.png", "lstm-dark.svg", "lstm-dark.png"}
    with pytest.raises(BadInput, match="end the block's line with `as NAME`"):
        pages.fill(RESULTS / "README.md", text.replace(" as lstm", ""))


def test_readme_shows_the_figure_of_its_records() -> None:
    text = (index.ROOT / "README.md").read_text()
    found = pages.pictures(text)
    assert {path.name for path in found} == {
        f"cost-of-privacy{theme}.{kind}" for theme in ("", "-dark") for kind in ("svg", "png")
    }
    light = next(content for path, content in found.items() if path.name == "cost-of-privacy.svg").decode()
    assert "Zen 4, AVX-512), 1 thread, 29 Nov 2026, all keep their heap" in light and "Runs: paper-zen4-" in light
    for path in re.findall(r'(?:srcset|src)="(plots/[^"]+)"', text):
        assert Path(path).exists(), path


def test_the_result_is_a_sentence_of_its_records() -> None:
    made = pages.fill(
        index.ROOT / "README.md", "<!-- sentence: grid-lstm-2 grid-mnist-2026-11-22 at 512 -->\n<!-- end -->"
    )
    (said,) = re.findall(r"\*\*(.*)\*\* \((.*)\)\.", made)
    assert said[0] == (
        "Training with DP in dpcore (Engine) takes 0.68 to 0.73 of the time of the fastest other exact framework, and "
        "0.56 to 1.09 of the time of PyTorch without DP"
    )
    assert said[1].startswith("2 tasks at batch 512, AMD EPYC") and said[1].endswith(
        "22 Nov 2026, partly extrapolated from parts of epochs"
    )
    with pytest.raises(BadInput, match=r"No run of .* at 512"):
        pages.fill(index.ROOT / "README.md", "<!-- sentence: scout-lstm-2026 at 512 -->\n<!-- end -->")


def test_a_figure_asks_for_one_batch_size() -> None:
    with pytest.raises(BadInput, match="give one number"):
        pages.fill(index.ROOT / "README.md", "<!-- figure: grid-mnist-2026-11-22 at 16 64 as both -->\n<!-- end -->")


def test_who_wins_is_a_table_of_libraries() -> None:
    made = pages.fill(
        index.ROOT / "README.md", "<!-- board: modern-llama-lora-2-2026-11-26 grid-lstm-2 at 16 -->\n<!-- end -->"
    )
    rows = {cells[1]: cells[2:-1] for row in made.splitlines() if len(cells := re.split(r" ?\| ?", row)) > 2}
    assert rows[""] == ["imdb-lstm<br>16", "llama-lora<br>16"]
    of_clicks = pages.fill(index.ROOT / "README.md", "<!-- board: recsys-zen4-2026-11-29 at 16 -->\n<!-- end -->")
    assert "| recsys<br>16<br>synthetic data |" in of_clicks
    assert rows["dpcore"] == ["**1**", "1.18"] and rows["JAX Privacy"] == ["·", "**1**"]
    assert rows["JAX Privacy (git)"][1].endswith("≈"), "its interval holds 1"
    assert rows["fastDP"][1].endswith("?"), "two rounds show nothing"
    assert rows["*the fastest over PyTorch without DP*"][0].startswith("1.03 [0.986")
    with pytest.raises(BadInput, match="these tasks"):
        pages.fill(index.ROOT / "README.md", "<!-- board: grid-lstm-2 at 17 -->\n<!-- end -->")


def test_who_wins_is_told_of_the_records() -> None:
    made = pages.fill(index.ROOT / "README.md", "<!-- winners: grid-lstm-2 -->\n<!-- end -->")
    assert "**With DP the fastest is dpcore (Engine) on `imdb-lstm` at 16 (" in made
    assert "the time of PyTorch without DP [" in made
    some = pages.fill(
        index.ROOT / "README.md", "<!-- winners: modern-preset-2:recsys,gpt2-lm grid-lstm-2 -->\n<!-- end -->"
    )
    assert re.findall(r"^- `(\S+)`", some, re.MULTILINE) == [*["imdb-lstm"] * 4, "gpt2-lm", "recsys"]
    for nothing in ("memory-lstm-2", "modern-preset-2:vit"):
        with pytest.raises(BadInput, match="has a time with DP"):
            pages.fill(index.ROOT / "README.md", f"<!-- winners: {nothing} -->\n<!-- end -->")
