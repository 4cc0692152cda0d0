"""The dashboard: its files, its charts, and its pages in a real browser on a generated history."""

from __future__ import annotations

import json
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
import vl_convert
from typer.testing import CliRunner

from harness.cli.main import app
from harness.dashboard import feed, site, view
from harness.errors import BadInput
from harness.history import events, series
from harness.history import runs as history
from tests.harness.report.test_page import CONTRAST, Opened, browser  # noqa: F401 (browser is a fixture)
from tests.support import history_factory as made

ATOM = {"a": feed.ATOM}
NASTY = "</script><script>document.title='gone'</script> & <b>"


@pytest.fixture(scope="module")
def big(tmp_path_factory):
    """(folder, summary, history) of the generated history."""
    cells = {"time": {20: 1.1, 70: 1.2}, "memory": {40: 1.01}, "states": {("b", 50): "oom"}}
    elsewhere = {**made.MACHINE, "id": "51ab0002", "cpu": "Other CPU"}
    loaded = history.of([*made.runs(90, cells=("a", "b"), **cells), *made.runs(20, machine=elsewhere, seed=2)])
    folder = tmp_path_factory.mktemp("site") / "dashboard"
    options = view.Options(repository="https://example.org/dpbench", site="https://example.org/site")
    return folder, site.write(loaded, folder, options), loaded


def invoke(*arguments):
    return CliRunner().invoke(app, [str(a) for a in arguments])


def small(*runs, **options):
    """Files of a small site as text."""
    files, _ = site.pages(history.of(runs), view.Options(**options))
    return {name: content.decode() for name, content in files.items()}


def test_every_task_has_a_page_and_all_say_simulated(big):
    folder, shown, loaded = big
    wanted = {f"task-{cell.subject}.html" for run in loaded.runs for cell in run.cells}
    assert wanted | {"index.html", "events.html", "feed.xml"} <= set(shown["files"]) and shown["simulated"]
    for path in folder.glob("*.html"):
        text = path.read_text()
        assert "<strong>Simulated.</strong>" in text and "(simulated)</title>" in text, path.name


def test_a_chart_holds_runs_levels_steps_and_what_has_no_value():
    loaded = history.of(made.runs(60, time={30: 1.2}, states={("a", 50): "oom"}, disturbed=(10,), memory={40: 1.1}))
    all_series = series.of_history(loaded)
    views = view.cells(loaded, events.of_history(loaded, all_series), all_series, 30)
    spec = view.chart(views, "time")
    kinds = [row["kind"] for row in spec["data"]["values"]]
    assert {kind: kinds.count(kind) for kind in set(kinds)} == {
        "run": 58, "disturbed": 1, "no value": 1, "level": 2, "step": 1,
    }  # fmt: skip
    assert "dpcore-engine · batch 512" in vl_convert.vegalite_to_svg(spec)
    memory = view.chart(views, "memory")["data"]["values"]
    assert [row["kind"] for row in memory].count("step") == 1


def test_measured_histories_are_not_called_simulated(tmp_path):
    done = invoke("dashboard", "--history", history.FOLDER, "--out", tmp_path / "site", "--json")
    assert done.exit_code == 0, done.output
    shown = json.loads(done.stdout)
    assert not shown["simulated"] and shown["runs"] >= 2
    index = (tmp_path / "site" / "index.html").read_text()
    assert "imulated" not in index and "MNIST CNN" in index and "embedding-n100" in index


def test_every_link_inside_of_the_site_leads_somewhere(big):
    folder, _, _ = big
    ids = {path.name: set(re.findall(r' id="([^"]+)"', path.read_text())) for path in folder.glob("*.html")}
    followed = 0
    for path in folder.glob("*.html"):
        for address in re.findall(r'(?:href|value)="([^":]+\.(?:html|xml|css)[^":]*)"', path.read_text()):
            file, _, anchor = address.partition("#")
            assert (folder / file).exists(), (path.name, address)
            assert not anchor or anchor in ids[file], (path.name, address)
            followed += 1
    assert followed > 20


def test_the_feed_is_atom(big):
    folder, _, _ = big
    root = ElementTree.fromstring((folder / "feed.xml").read_bytes())
    assert root.tag == f"{{{feed.ATOM}}}feed"
    for element in (root, *root.findall("a:entry", ATOM)):
        for tag in ("id", "title", "updated"):
            assert element.findtext(f"a:{tag}", namespaces=ATOM), tag
        assert re.fullmatch(r"urn:uuid:[0-9a-f-]{36}", element.findtext("a:id", namespaces=ATOM))
    entries = {e.findtext("a:id", namespaces=ATOM): e for e in root.findall("a:entry", ATOM)}
    assert len(entries) == len(root.findall("a:entry", ATOM)) > 2
    for e in entries.values():
        assert e.find("a:link", ATOM).get("href").startswith("https://example.org/site/")
        assert e.findtext("a:title", namespaces=ATOM).startswith("Simulated: ")


def test_a_reader_of_the_feed_is_told_once():
    runs = made.runs(90, cells=("a", "b"), time={20: 1.1, 60: 1.2}, memory={40: 1.01}, states={("b", 50): "oom"})

    def ids(until):
        root = ElementTree.fromstring(small(*runs[:until])["feed.xml"])
        return [e.findtext("a:id", namespaces=ATOM) for e in root.findall("a:entry", ATOM)]

    assert [len(ids(until)) for until in (15, 35, 45, 55, 90)] == [0, 1, 2, 3, 4]
    assert set(ids(35)) < set(ids(45)) < set(ids(55)) < set(ids(90))


def test_commits_are_linked_only_where_a_repository_is_named():
    runs = made.runs(60, time={50: 1.2}, noise=0.002)
    with_, without = small(*runs, repository="https://example.org/x"), small(*runs)
    assert f'href="https://example.org/x/commit/{runs[50].commit}"' in with_["index.html"]
    assert f"https://example.org/x/compare/{runs[49].commit}...{runs[50].commit}" in with_["index.html"]
    assert "/commit/" not in without["index.html"] and runs[50].commit[:7] in without["index.html"]


def test_a_cell_that_is_new_and_worse_says_in_words_how():
    def row(files):
        return re.search(r'<tr id="a/.*?</tr>', files["task-a.html"])[0]

    runs = made.runs(60, cells=("a", "b"), time={50: 1.2}, memory={55: 1.01}, only=("a",))
    assert ">slower and more memory</span>" in row(small(*runs))
    assert ">slower</span>" in row(small(*runs[:55])) and "<td>ok</td>" in row(small(*runs[:50]))
    broken = small(*made.runs(12, states={("a", 11): "rejected"}))
    assert ">rejected</span>" in row(broken) and not re.search(r"\d (µs|ms|s)<", row(broken)), "and no time beside it"


def test_hostile_reasons_stay_text_and_an_empty_history_is_a_page():
    runs = made.runs(12, states={("a", 11): "crashed"})
    cell = runs[11].cells[0].model_copy(update={"reason": NASTY})
    runs[11] = runs[11].model_copy(update={"cells": [cell]})
    for text in small(*runs).values():
        assert NASTY not in text
    assert "The history is empty" in small()["index.html"]


def test_a_github_job_links_its_own_repository(tmp_path, monkeypatch):
    monkeypatch.setenv("GITHUB_SERVER_URL", "https://github.example")
    monkeypatch.setenv("GITHUB_REPOSITORY", "some/one")
    assert invoke("dashboard", "--history", history.FOLDER, "--out", tmp_path / "site").exit_code == 0
    assert "https://github.example/some/one/commit/" in (tmp_path / "site" / "index.html").read_text()


def test_a_folder_that_is_no_dashboard_is_left_alone(tmp_path):
    (tmp_path / "mine.txt").write_text("precious")
    done = invoke("dashboard", "--history", history.FOLDER, "--out", tmp_path)
    assert isinstance(done.exception, BadInput) and "holds something that is no dashboard" in str(done.exception)
    assert [p.name for p in tmp_path.iterdir()] == ["mine.txt"]
    for option, value in (("--days", 0), ("--repository", "example.org"), ("--site", "ftp://x")):
        bad = invoke("dashboard", option, value)
        assert isinstance(bad.exception, BadInput) and option in str(bad.exception)


def test_writing_again_replaces_the_whole_site(tmp_path):
    out = tmp_path / "site"
    site.write(history.of(made.runs(12, cells=("a", "b"))), out, view.Options())
    assert (out / "task-b.html").exists()
    site.write(history.of(made.runs(12)), out, view.Options())
    assert (out / "task-a.html").exists() and not (out / "task-b.html").exists()
    assert [p.name for p in tmp_path.iterdir()] == ["site"]


def test_the_old_site_stays_where_the_new_one_cannot_take_its_place(tmp_path, monkeypatch):
    out = tmp_path / "site"
    site.write(history.of(made.runs(12)), out, view.Options())
    rename = Path.rename

    def refuse(path, target):
        if path.name.endswith(".part"):
            raise PermissionError(13, "Permission denied")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", refuse)
    with pytest.raises(BadInput, match="cannot be written"):
        site.write(history.of(made.runs(12, cells=("b",))), out, view.Options())
    assert (out / "task-a.html").exists() and [p.name for p in tmp_path.iterdir()] == ["site"]


def test_pages_draw_their_charts_without_a_complaint_and_ask_for_nothing(browser, big):  # noqa: F811
    folder, _, _ = big
    for name in ("index.html", "task-b.html", "events.html"):
        opened = Opened(
            browser, folder / name, "document.readyState === 'complete'", viewport={"width": 1280, "height": 900}
        )
        charts = opened.page.locator(".chart")
        assert (charts.count() > 1) is (name == "task-b.html")
        opened.page.evaluate("for (const part of document.querySelectorAll('details')) part.open = true")
        opened.page.wait_for_function(
            "[...document.querySelectorAll('.chart')].every((chart) => chart.querySelectorAll('svg path').length > 5)"
        )
        assert not opened.complaints
        assert all(url.startswith(("file:", "data:", "about:")) for url in opened.requests)
        contrast = opened.page.evaluate(CONTRAST)
        assert contrast["seen"] > 10 and contrast["low"] == []
        opened.context.close()
