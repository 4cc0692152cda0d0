"""The dashboard: its files, and its pages in a real browser on a generated history of two years x 100 cells."""

from __future__ import annotations

import json
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
from PIL import Image
from typer.testing import CliRunner

from harness.cli.main import app
from harness.dashboard import demo, feed, site, view
from harness.errors import BadInput
from harness.history import events, series
from harness.history import runs as history
from harness.layers import LAYERS
from harness.plan import layer_registry, registry
from harness.tasks import TASKS
from tests.harness.report.test_page import CONTRAST, Opened, browser  # noqa: F401 (browser is a fixture)
from tests.support import history_factory as made

ATOM = {"a": feed.ATOM}
LIMIT_MS = 2000
"""On a machine that makes WORK in USUAL_MS; on a slower or busier one, as much longer as WORK takes there just then."""
WORK = (
    "() => {const start = performance.now(); let a = 1;"
    " for (let i = 0; i < 3e7; i++) a = Math.imul(a, 1664525) + i | 0;"
    " return performance.now() - start + 0 * a;}"
)
USUAL_MS = 60
NASTY = "</script><script>document.title='gone'</script> & <b>"


@pytest.fixture(scope="module")
def big(tmp_path_factory):
    """(folder, summary, history) of the generated history."""
    loaded = history.of(demo.history().runs)
    folder = tmp_path_factory.mktemp("site") / "dashboard"
    options = view.Options(repository="https://example.org/dpbench", site="https://example.org/site")
    return folder, site.write(loaded, folder, options), loaded


@pytest.fixture(scope="module")
def little(big, tmp_path_factory):
    """A part of it: one task and one layer, the last 150 runs, with a failure and a file that could not be read."""
    runs = [
        run.model_copy(update={"cells": [c for c in run.cells if c.subject in ("imdb-embedding", "conv")]})
        for run in big[2].runs[-150:]
    ]
    folder = tmp_path_factory.mktemp("little") / "dashboard"
    site.write(history.of(runs, ["x.json cannot be read"]), folder, view.Options())
    return folder


def invoke(*arguments):
    return CliRunner().invoke(app, [str(a) for a in arguments])


def small(*runs, **options):
    """Files of a small site as text."""
    files, _ = site.pages(history.of(runs), view.Options(**options))
    return {name: content.decode() for name, content in files.items()}


def test_the_demo_shows_contestants_and_layers_that_exist(big):
    known = {
        "e2e": {(c.name, task) for c in registry.select(["all"]) for task in TASKS},
        "layer": {(c.name, layer) for c in layer_registry.contestants() for layer in LAYERS},
    }
    shown = {
        (cell.kind, (f"{cell.framework}-{cell.variant}", cell.subject)) for run in big[2].runs for cell in run.cells
    }
    assert [place for kind, place in shown if place not in known[kind]] == []


def test_every_task_layer_and_framework_has_a_page_and_all_say_simulated(big):
    folder, shown, loaded = big
    cells = {(c.kind, c.subject) for run in loaded.runs for c in run.cells}
    wanted = {f"{'layer' if kind == 'layer' else 'task'}-{subject}.html" for kind, subject in cells}
    wanted |= {f"framework-{name}.html" for name in ("dpcore", "opacus", "jax", "jax-privacy", "fastdp", "pytorch")}
    assert wanted | {"index.html", "events.html", "feed.xml", "badge.svg", "badge.json"} <= set(shown["files"])
    for path in folder.glob("*.html"):
        text = path.read_text()
        assert "<strong>Simulated.</strong>" in text and "(simulated)</title>" in text, path.name
        assert path.stat().st_size < 400_000, path.name
    assert "simulated" in (folder / "badge.svg").read_text() and shown["simulated"]


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
    assert followed > 500


def test_the_feed_is_atom(big):
    folder, _, _ = big
    root = ElementTree.fromstring((folder / "feed.xml").read_bytes())
    assert root.tag == f"{{{feed.ATOM}}}feed"
    for element in (root, *root.findall("a:entry", ATOM)):
        for tag in ("id", "title", "updated"):
            assert element.findtext(f"a:{tag}", namespaces=ATOM), tag
        assert re.fullmatch(r"urn:uuid:[0-9a-f-]{36}", element.findtext("a:id", namespaces=ATOM))
    entries = {e.findtext("a:id", namespaces=ATOM): e for e in root.findall("a:entry", ATOM)}
    assert len(entries) == len(root.findall("a:entry", ATOM)) > 10
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


def test_badge_in_its_states():
    def badge(runs):
        loaded = history.of(runs)
        return feed.badge(loaded, events.of_history(loaded), 30)

    assert badge([]) == feed.Badge("no data", "lightgrey")
    for few in (made.runs(1), made.runs(9), [run for cell in "abc" for run in made.runs(9, cells=(cell,))]):
        assert badge(few) == feed.Badge("simulated: too few runs to judge", "lightgrey")
    assert badge(made.runs(10)).message == "simulated: no regressions since 2026-01-01"
    calm, two = badge(made.runs(60)), badge(made.runs(60, time={50: 1.2}, memory={55: 1.01}))
    assert (calm.message, calm.colour) == ("simulated: no regressions since 2026-01-01", "brightgreen")
    assert (two.message, two.colour) == ("simulated: 2 regressions", "red")
    old = badge(made.runs(100, time={40: 1.2}))
    assert re.fullmatch(r"simulated: no regressions since 2026-02-1\d", old.message)
    assert ElementTree.fromstring(two.as_svg()).get("aria-label") == "dpbench: simulated: 2 regressions"
    assert json.loads(two.as_json()) == {"schemaVersion": 1, "label": "dpbench", "message": two.message, "color": "red"}


def test_commits_are_linked_only_where_a_repository_is_named():
    runs = made.runs(60, time={50: 1.2}, noise=0.002)
    with_, without = small(*runs, repository="https://example.org/x"), small(*runs)
    assert f'href="https://example.org/x/commit/{runs[50].commit}"' in with_["index.html"]
    assert f"https://example.org/x/compare/{runs[49].commit}...{runs[50].commit}" in with_["index.html"]
    assert "/commit/" not in without["index.html"] and runs[50].commit[:7] in without["index.html"]


def test_a_cell_that_is_new_and_worse_says_in_words_how():
    def row(files):
        return re.search(r'<tr data-text="a/.*?</tr>', files["index.html"])[0]

    runs = made.runs(60, cells=("a", "b"), time={50: 1.2}, memory={55: 1.01}, only=("a",))
    assert ">slower and more memory</span>" in row(small(*runs))
    assert ">slower</span>" in row(small(*runs[:55])) and ">ok</span>" in row(small(*runs[:50]))
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
    text = (tmp_path / "site" / "framework-jax.html").read_text()
    assert "https://github.example/some/one/commit/a20015b" in text


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


# ---- in the browser ----


class Site:
    """Pages of the site in one window, with everything that the browser complained about."""

    def __init__(self, browser, folder, **context):  # noqa: F811
        self.folder = folder
        self.opened = Opened(browser, folder / "index.html", **{"viewport": {"width": 1280, "height": 900}, **context})
        self.page, self.complaints = self.opened.page, self.opened.complaints

    def go(self, name):
        self.page.goto("about:blank")
        self.page.goto((self.folder / "index.html").as_uri().replace("index.html", name))
        self.opened.wait(1)

    def until(self, expression):
        self.page.wait_for_function(expression, timeout=120_000)


@pytest.fixture(scope="module")
def window(browser, big):  # noqa: F811
    opened = Site(browser, big[0])
    yield opened
    assert not opened.complaints
    opened.page.context.close()


@pytest.fixture(scope="module")
def stepped(big):
    """(anchor, series) of a cell of mnist-cnn, on the machine with 100 cells, that stepped in time."""
    loaded = big[2]
    machine = next(m for m in view.machines(loaded) if len(m.runs[-1].cells) == 100)
    wanted = [
        run.model_copy(update={"cells": [c for c in run.cells if c.subject == "mnist-cnn" and c.framework == "opacus"]})
        for run in machine.runs
    ]
    found = next(s for s in series.of_machine(machine.key, wanted) if s.time.steps)
    return f"{found.name}@{machine.short}", found


def slowness(window) -> float:
    return max(1.0, window.page.evaluate(WORK) / USUAL_MS)


@pytest.mark.parametrize("name", ["index.html", "task-mnist-cnn.html", "framework-opacus.html", "events.html"])
def test_pages_load_in_under_two_seconds_without_a_complaint(window, name):
    """Navigation start to the end of loading, scripts and the first charts included; the best of three."""
    took = []
    for _ in range(3):
        window.go(name)
        window.until("performance.getEntriesByType('navigation')[0].loadEventEnd > 0")
        took.append(
            window.page.evaluate("performance.getEntriesByType('navigation')[0].loadEventEnd") / slowness(window)
        )
        if took[-1] < LIMIT_MS:
            break
    assert min(took) < LIMIT_MS, took
    assert not window.complaints
    assert all(url.startswith(("file:", "data:", "about:")) for url in window.opened.requests)


OPEN_ALL = """() => new Promise((done) => {
  const start = performance.now(), all = [...document.querySelectorAll("details.cell")];
  document.getElementById("open").click();
  const look = () => {
    const near = all.filter((d) => d.getBoundingClientRect().top < innerHeight + 500);
    if (near.every((d) => d.querySelector(".chart").dataset.drawn)) done(performance.now() - start);
    else requestAnimationFrame(look);
  };
  requestAnimationFrame(look);
})"""


def test_opening_all_charts_of_the_largest_page_takes_under_two_seconds(window):
    """The best of three."""
    took = []
    while len(took) < 3 and min(took, default=LIMIT_MS) >= LIMIT_MS:
        window.go("framework-opacus.html")
        cells = window.page.locator("details.cell").count()
        assert cells > 30
        took.append(window.page.evaluate(OPEN_ALL) / slowness(window))
    assert min(took) < LIMIT_MS, took
    assert window.page.locator("details.cell[open]").count() == cells


def test_the_overview_shows_what_is_red_what_moved_and_both_machines(window, big):
    _, shown, loaded = big
    window.go("index.html")
    assert "simulated: " in window.page.inner_text(".tile")
    listed = window.page.locator("section[aria-labelledby=now] > .events > .event")
    assert listed.count() == len(shown["open"]) > 0
    assert "rejected" in listed.first.inner_text()
    assert 0 < window.page.locator("section[aria-labelledby=movers] tbody tr").count() <= 8
    assert window.page.locator("#all tbody tr[data-text]").count() == 132
    assert window.page.locator("#all .spark path").count() == 132
    bodies = window.page.locator("#all tbody").evaluate_all("all => all.map((b) => b.dataset.machine)")
    assert len(set(bodies)) == len(loaded.machines) == 2


def test_the_overview_filters_by_machine_by_words_and_by_change(window):
    window.go("index.html")
    window.page.select_option("#machine", "51ab0002-26-threads")
    window.until("document.getElementById('shown').textContent === '32 of 132 cells'")
    window.page.fill("#filter", "dpcore LSTM")
    window.until("document.getElementById('shown').textContent.startsWith('2 of')")
    visible = window.page.locator("#all tr[data-text]:visible").evaluate_all("all => all.map((r) => r.dataset.text)")
    assert len(visible) == 2 and all("dpcore" in t and "lstm" in t and "cuda" in t for t in visible)
    window.page.fill("#filter", "")
    window.page.select_option("#machine", "")
    window.page.check("#changed")
    window.until("parseInt(document.getElementById('shown').textContent) < 60")
    assert int(window.page.inner_text("#shown").split()[0]) > 3


def test_a_deep_link_opens_its_cell_scrolls_to_it_and_draws_it(window, stepped):
    name, s = stepped
    window.go(f"task-mnist-cnn.html#{name}")
    cell = window.page.locator(f'[id="{name}"]')
    window.until(f"document.getElementById({json.dumps(name)}).open")
    assert cell.locator("svg[role=img]").count() >= 1
    assert -5 <= cell.bounding_box()["y"] < 900
    window.until(f"document.activeElement.closest('details')?.id === {json.dumps(name)}")
    steps = cell.locator(".chart > div").first.locator("ul li").all_inner_texts()
    assert len(steps) == len(s.time.steps)
    commit = s.runs[next(s.changes("time"))[2]].commit
    assert commit[:7] in steps[-1], "the oldest step last, with its first commit after"
    # Another anchor of the same page, as from a link on it.
    other = window.page.locator("details.cell").last.get_attribute("id")
    window.page.evaluate("(id) => { location.hash = id; }", other)
    window.until(f"document.getElementById({json.dumps(other)}).open")


def test_charts_switch_between_raw_and_normalised_and_time_and_memory(window, stepped):
    name, _ = stepped
    window.go(f"task-mnist-cnn.html#{name}")
    drawn = f"document.getElementById({json.dumps(name)}).querySelector('.chart').dataset.drawn"
    window.until(f"{drawn} === 'time-normalised-0'")
    path = window.page.locator(f'[id="{name}"] path.dots').first
    normalised = path.get_attribute("d")
    assert normalised.count("M") > 500
    window.page.check("input[name=values][value=raw]")
    window.until(f"{drawn} === 'time-raw-0'")
    assert path.get_attribute("d") != normalised
    window.page.select_option("#period", "90")
    window.until(f"{drawn} === 'time-raw-90'")
    assert path.get_attribute("d").count("M") < 95
    window.page.check("input[name=metric][value=memory]")
    window.until(f"{drawn} === 'memory-raw-90'")
    assert "MiB" in window.page.inner_text(f'[id="{name}"] .chart') or "GiB" in window.page.inner_text(
        f'[id="{name}"] .chart'
    )


def test_single_runs_are_read_by_keyboard(window, stepped):
    name, s = stepped
    window.go(f"task-mnist-cnn.html#{name}")
    window.until(f"document.getElementById({json.dumps(name)}).querySelector('svg[role=img]')")
    reading = window.page.locator(f'[id="{name}"] .reading').first
    window.page.locator(f'[id="{name}"] svg[role=img]').first.focus()
    for key, run in (("End", s.runs[-1]), ("ArrowLeft", s.runs[-2]), ("Home", s.runs[0])):
        window.page.keyboard.press(key)
        window.until(
            f"document.getElementById({json.dumps(name)}).querySelector('.reading').textContent.includes('{run.time[:10]}')"
        )
        assert run.commit[:7] in reading.inner_text()


def test_machines_stand_apart_on_a_task_page_and_one_can_be_chosen(window):
    window.go("task-mnist-cnn.html")
    assert window.page.locator("section.machine").count() == 2
    window.page.select_option("#machine", "51ab0002-26-threads")
    window.until("document.getElementById('shown').textContent === '8 of 24 cells'")
    shown = window.page.locator("details.cell:visible").evaluate_all("all => all.map((d) => d.id)")
    assert len(shown) == 8 and all(name.endswith("@51ab0002-26-threads") for name in shown)


def test_events_filter(window):
    window.go("events.html")
    total = window.page.locator(".event").count()
    window.page.select_option("#kind", "red")
    window.until(f"document.getElementById('shown').textContent !== '{total} events'")
    kinds = window.page.locator(".event:visible .chip").all_inner_texts()
    assert kinds and set(kinds) == {"red"}


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_can_be_read_in_both_schemes_and_on_a_phone(browser, little, scheme):  # noqa: F811
    phone = Site(browser, little, viewport={"width": 390, "height": 844}, color_scheme=scheme)
    for page in ("index.html", "task-imdb-embedding.html", "events.html"):
        phone.go(page)
        if "task" in page:
            phone.page.click("#open")
            phone.until("document.querySelectorAll('svg[role=img]').length > 3")
        found = phone.page.evaluate(CONTRAST)
        assert found["seen"] > 30 and not found["low"], (page, found["low"][:5])
        assert phone.page.evaluate("document.documentElement.scrollWidth") == 390, page
    assert not phone.complaints
    phone.page.context.close()


def test_the_colours_follow_the_button(window, tmp_path):
    window.go("index.html")
    window.page.click("#theme")
    window.until("document.documentElement.dataset.theme === 'light'")
    window.page.click("#theme")
    window.until("document.documentElement.dataset.theme === 'dark'")
    picture = tmp_path / "dark.png"
    window.page.screenshot(path=picture)
    assert sum(Image.open(picture).convert("L").resize((1, 1)).getpixel((0, 0)) for _ in "x") < 80
    window.page.evaluate("localStorage.removeItem('dpbench-theme')")
