"""The HTML page in a real browser: it renders, sorts, filters, explains, and can be read and used by everybody."""

from __future__ import annotations

import base64
import json
import re
import shutil
from pathlib import Path

import pytest

from harness.report import contents, output
from harness.report.chapters import explain
from harness.report.formats import page
from tests.support import record_factory as factory

CHROMIUM = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), None
)
ARGUMENTS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"]
NASTY = "</script><script>document.title='gone'</script> & <b>"
PEAKS = {"flops_per_second": 6e10, "bytes_per_second": 1e10}

CONTRAST = """() => {
  // A mixed colour is told in parts of one.
  const parse = (c) => c.match(/[\\d.]+/g).map(Number).map((v, i) => c.startsWith("color(") && i < 3 ? 255 * v : v);
  const linear = (v) => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
  const light = (c) => c.slice(0, 3).map((v) => linear(v / 255))
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const behind = (e) => {
    for (let at = e; at; at = at.parentElement) {
      const c = parse(getComputedStyle(at).backgroundColor);
      if (c.length < 4 || c[3] > 0) return c;
    }
    return [255, 255, 255];
  };
  const low = [];
  let seen = 0;
  for (const e of document.querySelectorAll("body *")) {
    const own = [...e.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim());
    if (!own || !e.getClientRects().length || ["SCRIPT", "STYLE", "NOSCRIPT"].includes(e.tagName)) continue;
    seen += 1;
    const style = getComputedStyle(e);
    const [a, b] = [light(parse(e.closest("svg") ? style.fill : style.color)), light(behind(e))].sort((x, y) => y - x);
    const ratio = (a + 0.05) / (b + 0.05);
    if (ratio < 4.5) low.push(`${e.tagName}.${e.className}: ${e.textContent.slice(0, 40)} ${ratio.toFixed(2)}`);
  }
  return { seen, low };
}"""

DRAWN = "Number(document.documentElement.dataset.drawn) >= {}"


@pytest.fixture(scope="module")
def report():
    tasks = ("mnist-cnn", "imdb-lstm")
    machine = {**factory.MACHINE, "threads": 2, "peaks": PEAKS}
    records = factory.quick_run(rounds=2, tasks=tasks, machine=machine)
    records += factory.quick_run(rounds=1, tasks=tasks[:1], batch_sizes=(64,), machine=factory.OTHER_MACHINE)
    records.append(factory.record(framework="nasty", variant="one", state="crashed", reason=NASTY, machine=machine))
    return contents.build(records)


@pytest.fixture(scope="module")
def file(report, tmp_path_factory):
    folder = tmp_path_factory.mktemp("page")
    path = folder / "report.html"
    path.write_text(page.page(report, {}))
    return path


@pytest.fixture(scope="module")
def browser():
    if CHROMIUM is None:
        pytest.skip("no Chromium on this machine: the page is not tested in a browser (Debian: apt install chromium)")
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: the page is not tested")
    with api.sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield started
        started.close()


class Opened:
    """The page, with everything that a browser would complain about."""

    def __init__(self, browser, file, ready=None, **context):
        self.ready = ready or DRAWN.format(1)
        self.complaints, self.requests = [], []
        self.context = browser.new_context(offline=True, **context)
        self.context.set_default_timeout(120_000)  # a busy machine
        self.page = self.context.new_page()
        self.page.on("console", lambda m: self.complaints.append(m.text) if m.type in {"error", "warning"} else None)
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.address = file.as_uri()
        self.open()

    def open(self):
        self.page.goto("about:blank")  # from an address with a fragment, the bare address alone would not load again
        self.page.goto(self.address)
        self.page.wait_for_function(self.ready)

    def wait(self, at_least):
        self.page.wait_for_function(DRAWN.format(at_least))

    def choose(self, control, value):
        drawn = int(self.page.evaluate("document.documentElement.dataset.drawn"))
        self.page.select_option(f"#{control}", value)
        self.wait(drawn + 1)

    def column(self, title):
        """The cells below the head of this name, which is not always in the same place."""
        heads = [head.inner_text().split("\xa0")[0] for head in self.page.query_selector_all("#results thead th")]
        place = f"#results tbody tr > :nth-child({heads.index(title) + 1})"
        return [cell.text_content() for cell in self.page.query_selector_all(place)]


@pytest.fixture(scope="module")
def shared(browser, file):
    opened = Opened(browser, file, viewport={"width": 1280, "height": 900})
    yield opened
    opened.context.close()


@pytest.fixture
def opened(shared):
    """The same page with its first choices, whatever the test before left in its address."""
    shared.open()
    return shared


def test_it_renders_without_network_or_complaint(opened):
    assert opened.page.title() == "DP-SGD frameworks: benchmark report"
    for chart in ("seconds", "ratio", "batch"):
        assert opened.page.locator(f"#chart-{chart} svg path").count() > 5, chart
    assert not opened.complaints
    assert all(url.startswith(("file:", "data:")) for url in opened.requests), opened.requests


def test_it_sorts_by_any_column_and_says_so(opened):
    seconds = [float(re.match(r"[\d.]+", text)[0]) for text in opened.column("seconds per epoch") if text[:1].isdigit()]
    assert len(seconds) == 5 and seconds == sorted(seconds)
    assert opened.column("contestant")[-1] == "nasty-one"
    head = opened.page.locator("#results thead th").nth(1)
    head.locator("button").click()
    assert head.get_attribute("aria-sort") == "descending"
    again = [float(re.match(r"[\d.]+", text)[0]) for text in opened.column("seconds per epoch") if text[:1].isdigit()]
    assert again == seconds[::-1]
    assert opened.column("contestant")[-1] == "nasty-one", "what has no time stays below"
    opened.page.locator("#results thead button").first.click()
    assert opened.column("contestant") == sorted(opened.column("contestant"), key=str.lower)


def test_the_other_tables_sort_too(opened):
    opened.page.get_by_text("Coverage", exact=True).first.click()
    table = opened.page.locator("table.sortable", has=opened.page.locator("caption", has_text="Coverage")).first
    table.locator("thead button").first.click()
    names = table.locator("tbody th").all_inner_texts()
    assert names == sorted(names) and len(names) > 3
    table.locator("thead button").first.click()
    assert table.locator("tbody th").all_inner_texts() == names[::-1]


def test_it_filters_by_task_batch_name_and_privacy(opened):
    page = opened.page
    opened.choose("batch", "64")
    with pytest.raises(ValueError, match="batch"):
        opened.column("batch")  # the same in every row
    opened.choose("batch", "all")
    assert set(opened.column("batch")) == {"64", "512"}
    page.fill("#filter", "OPACUS")
    assert {name.split()[0] for name in opened.column("contestant")} == {"Opacus"}
    page.fill("#filter", "")
    assert "PyTorch without DP" in opened.column("contestant")
    page.check("#private")
    assert "PyTorch without DP" not in opened.column("contestant")
    opened.choose("task", "imdb-lstm")
    assert "cells" in page.inner_text("#shown") and "3 without" in page.inner_text("#shown")


def test_failures_stand_in_the_table_with_their_reasons(opened):
    opened.choose("task", "imdb-lstm")
    states = " ".join(opened.column("state"))
    assert "oom: resident memory passed the limit" in states
    assert "unsupported: ghost clipping has no rule" in states
    assert opened.page.locator("#chart-seconds svg text", has_text="oom").count() == 1


def test_what_a_reason_holds_is_text(opened):
    assert NASTY in opened.page.inner_text("#results")
    assert opened.page.title().startswith("DP-SGD")


def test_machines_are_shown_apart(opened):
    machines = opened.page.locator("#machine option").all_inner_texts()
    assert len(machines) == 2
    opened.choose("machine", next(m for m in machines if "Xeon" in m))
    assert set(opened.column("n")) == {"1"}, "one process, though the other machine has two more"


def test_a_number_leads_to_its_processes_and_back(opened):
    page = opened.page
    opened.page.fill("#filter", "opacus-hooks")
    link = page.locator("#results tbody a").first
    link.focus()
    page.keyboard.press("Enter")
    dialog = page.locator("#provenance")
    dialog.wait_for(state="visible")  # the address changes first, and the browser tells of it in its own time
    text = dialog.inner_text()
    for part in (
        "mnist-cnn/opacus-hooks/512/verified-v1/cpu/venv",
        "epoch seconds",
        "update-equality",
        "opacus 1.6.0",
        "none (isolation venv)",
        "AMD EPYC 7B13",
        "dpbench run e2e --tasks mnist-cnn --frameworks opacus-hooks --batch-sizes 512",
    ):
        assert part in text, part
    assert text.count("time process") == 2 and text.count("memory process") == 1 and text.count("gate process") == 1
    page.keyboard.press("Escape")
    dialog.wait_for(state="hidden")
    page.wait_for_function("(document.activeElement.getAttribute('href') || '').includes('cell=')")


def test_everything_can_be_reached_and_used_by_keyboard(opened):
    page = opened.page
    page.evaluate("document.activeElement.blur()")
    reached = []
    for _ in range(150):
        page.keyboard.press("Tab")
        reached.append(
            page.evaluate(
                "(e => e.id || (e.closest('th') ? 'sort ' + e.textContent : e.tagName))(document.activeElement)"
            )
        )
    for name in ("theme", "machine", "task", "batch", "filter", "private", "sort contestant", "A", "SUMMARY"):
        assert name in reached, (name, reached)
    assert reached[0] == "A", "first of all the way past the controls"
    page.locator("#results thead button").first.focus()
    page.keyboard.press("Enter")
    assert opened.column("contestant") == sorted(opened.column("contestant"), key=str.lower)
    assert page.evaluate("document.activeElement.textContent") == "contestant", "the focus stays on the column"
    outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
    assert outline != "none"


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [(1280, 900), (390, 844)])
def test_all_text_has_contrast_and_nothing_runs_off_the_page(browser, file, scheme, size):
    view = {"width": size[0], "height": size[1]}
    opened = Opened(browser, file, viewport=view, color_scheme=scheme, device_scale_factor=1)
    opened.page.evaluate("document.querySelectorAll('details').forEach((d) => { d.open = true; })")
    found = opened.page.evaluate(CONTRAST)
    assert found["seen"] > 100 and not found["low"]
    assert opened.page.evaluate("document.documentElement.scrollWidth") <= size[0]
    dark = opened.page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(20, 23, 28)"
    assert dark == (scheme == "dark")
    opened.context.close()


def test_the_colours_can_be_chosen(opened):
    background = "getComputedStyle(document.body).backgroundColor"
    seen = set()
    for _ in range(3):
        opened.page.click("#theme")
        seen.add((opened.page.inner_text("#theme"), opened.page.evaluate(background)))
    assert ("Colours: light", "rgb(255, 255, 255)") in seen and ("Colours: dark", "rgb(20, 23, 28)") in seen


def test_the_page_asks_for_nothing_from_elsewhere(file):
    text = file.read_text()
    assert not re.search(r"""(src|href)\s*=\s*["']?(https?:)?//""", text)
    assert "@import" not in text
    assert len(text) < 3_000_000


def test_it_holds_what_explain_prints(report):
    tables = report.tables
    data = page._data(tables)
    cell = next(c for c in data["cells"] if c["cell"].startswith("mnist-cnn/jax-vmap/64") and c["s"] == 0)
    shown = [
        [(data["labels"][p[i]], data["strings"][p[i + 1]]) for i in range(2, len(p), 2)]
        for p in (data["processes"][k] for k in cell["p"])
    ]
    mine = [i for i, r in tables.raw.iterrows() if r.machine == data["sections"][0]["machine"]]
    wanted = [
        list(explain.lines(tables.records[i], tables.raw.loc[i].to_dict()))
        for i in mine
        if tables.raw.at[i, "cell"] == cell["cell"]
        or (tables.raw.at[i, "purpose"] == "gate" and tables.raw.at[i, "cell"].startswith("mnist-cnn/jax-vmap/"))
    ]
    assert sorted(shown) == sorted(wanted) and len(shown) == 4


def test_layers_have_their_processes_on_the_page(browser, tmp_path):
    report = contents.build(
        [factory.layer_record(), factory.layer_record(purpose="memory"), *factory.quick_run(rounds=1)]
    )
    file = tmp_path / "report.html"
    file.write_text(page.page(report, {}))
    opened = Opened(browser, file, viewport={"width": 390, "height": 900})
    (name,) = {r.cell.name for r in report.records if r.layer}
    cell = opened.page.locator(f'details.cell[id="{name}"]')
    opened.page.locator("#processes > summary").click()
    cell.locator("summary").click()
    text = cell.inner_text()
    for label, value in explain.lines(
        next(r for r in report.records if r.layer), {"state": "ok", "reason": None, "superseded": False}
    ):
        assert label in text and value in text, label
    assert opened.page.evaluate("document.documentElement.scrollWidth") == 390
    assert not opened.complaints
    opened.context.close()


def test_the_numbers_are_those_of_the_other_formats(report):
    data = json.loads(json.dumps(page._data(report.tables), allow_nan=False))
    cells = report.tables.cells
    assert len(data["cells"]) == len(cells)
    for shown, row in zip(data["cells"], cells.itertuples(), strict=True):
        assert shown["state"] == row.state and (
            row.state != "ok" or shown["median"] == pytest.approx(row.median, rel=1e-5)
        )
    assert any(c["floor"] for c in data["cells"]) and any(c["ratio"] for c in data["cells"])


def test_a_ratio_of_marked_seconds_is_marked(browser, tmp_path):
    records = [
        factory.record(
            framework=f,
            variant=v,
            private=p,
            disturbed=True,
            extrapolated=True,
            machine={**factory.MACHINE, "peaks": PEAKS},
        )
        for f, v, p in (("pytorch", "eager", False), ("opacus", "hooks", True))
    ]
    path = tmp_path / "report.html"
    path.write_text(page.page(contents.build(records), {}))
    opened = Opened(browser, path)
    row = next(t for t in opened.page.locator("#results tbody tr").all_inner_texts() if t.startswith("Opacus"))
    assert re.findall(r"×(\S*)", row) == ["ᵉᵈ", "ᵉᵈ"], "over the baseline and over the floor"
    assert not opened.complaints, "charts without an interval are drawn without a warning"
    opened.context.close()


def test_short_axes_are_labelled_on_both_sides_of_one_and_no_label_is_cut(browser, tmp_path):
    seconds = {"eager": 690.0, "a": 500.0, "b": 760.0, "c": 873.0}
    records = [
        factory.record(
            framework="pytorch" if name == "eager" else name, variant=name, private=name != "eager", seconds=[value]
        )
        for name, value in seconds.items()
    ]
    path = tmp_path / "report.html"
    path.write_text(page.page(contents.build(records), {}))
    opened = Opened(browser, path, viewport={"width": 390, "height": 844})
    labels = opened.page.locator("#chart-ratio .role-axis-label text").all_text_contents()
    numbers = [float(text) for text in labels if text[:1].isdigit() and not text[-1:].isalpha()]
    assert min(numbers) < 1 < max(numbers), labels
    for chart in ("seconds", "ratio", "batch"):
        outside = opened.page.evaluate(
            """(id) => {
              const place = document.querySelector(`#${id} svg`).getBoundingClientRect();
              return [...document.querySelectorAll(`#${id} .role-axis-label text`)]
                .filter((t) => t.textContent && getComputedStyle(t).opacity !== "0")
                .map((t) => [t, t.getBoundingClientRect()])
                .filter(([, b]) => b.left < place.left || b.right > place.right)
                .map(([t]) => t.textContent);
            }""",
            f"chart-{chart}",
        )
        assert not outside, chart
    opened.context.close()


def test_one_machine_with_two_numbers_of_threads_is_one():
    records = [
        factory.record(framework=name, machine={**factory.MACHINE, "threads": threads, "cpu": cpu})
        for name, threads, cpu in (("a", 1, "AMD EPYC"), ("b", 2, "AMD EPYC"), ("c", 1, "AMD EPYC 7B13"))
    ]
    assert "3 processes on 1 machine," in page.page(contents.build(records), {})
    records.append(factory.record(machine=factory.OTHER_MACHINE))
    assert "4 processes on 2 machines," in page.page(contents.build(records), {})


def test_the_page_opens_where_most_times_are_sound(browser, tmp_path):
    records = [
        factory.record(isolation=isolation, batch_size=size, disturbed=isolation == "docker")
        for isolation in ("docker", "venv")
        for size in (64, 512)
    ]
    path = tmp_path / "report.html"
    path.write_text(page.page(contents.build(records), {}))
    opened = Opened(browser, path)
    assert opened.page.input_value("#protocol") == "verified-v1 · venv"
    opened.context.close()


def test_the_figures_of_other_chapters_are_part_of_the_page(tmp_path, report):
    written = output.write_report(
        contents.build(factory.quick_run(rounds=1, tasks=("mnist-cnn",), batch_sizes=(64,))),
        tmp_path / "o",
        tmp_path / "p",
    )
    html = next(p for p in written if p.name == "report.html").read_text()
    (found,) = re.findall(
        r"data:image/svg\+xml;base64,([^\"]+)", html
    )  # cumulative seconds; the others are interactive
    assert base64.b64decode(found) == next(p for p in written if p.name == "cumulative-seconds.svg").read_bytes()
    assert 'alt="Cumulative seconds over 20 epochs' in html


def test_the_first_screen_is_the_main_result_of_all_tasks(browser, tmp_path):
    path = tmp_path / "report.html"
    path.write_text(page.page(contents.build(factory.quick_run(rounds=3)), {}))
    opened = Opened(browser, path, viewport={"width": 1280, "height": 900})
    matrix = opened.page.locator("table.matrix")
    assert [t.split("batch")[0] for t in matrix.locator("thead th").all_text_contents()] == [
        *("contestant", "MNIST CNN", "CIFAR-10 CNN", "IMDb embedding", "IMDb LSTM")
    ]
    box = matrix.bounding_box()
    assert box["y"] + box["height"] < 900 and opened.page.locator("p.result").inner_text().startswith("With DP,")
    assert matrix.locator("tbody tr", has_text="PyTorch without DP").inner_text().count("1.00×") == 4
    matrix.locator("tbody a").first.click()
    opened.page.locator("#provenance").wait_for(state="visible")
    assert not opened.complaints


def test_a_link_keeps_what_was_chosen(opened, browser, file):
    opened.choose("task", "imdb-lstm")
    opened.choose("batch", "64")
    opened.page.fill("#filter", "opacus")
    opened.page.locator("#results thead button", has_text="× without DP").click()
    address = opened.page.evaluate("location.hash")
    again = Opened(browser, file)
    again.page.goto("about:blank")
    again.page.goto(again.address + address)
    again.wait(1)
    assert [again.page.input_value(f"#{control}") for control in ("task", "batch", "filter")] == [
        *("imdb-lstm", "64", "opacus")
    ]
    assert again.column("contestant") == opened.column("contestant")
    again.context.close()


def test_a_link_to_a_chapter_opens_it(browser, file):
    opened = Opened(browser, file)
    link = opened.page.locator("nav a", has_text="Coverage").first
    target = opened.page.locator(f"details{link.get_attribute('href')}")
    assert target.get_attribute("open") is None
    link.click()
    opened.page.wait_for_function("document.querySelector('details#coverage').open")
    opened.context.close()


def test_tables_can_be_taken_away_as_csv(opened):
    with opened.page.expect_download() as download:
        opened.page.click("#csv")
    lines = Path(download.value.path()).read_text().splitlines()
    assert lines[0].startswith("contestant") and len(lines) == 1 + len(opened.column("contestant"))


def test_a_run_without_times_opens_with_its_figure(tmp_path):
    from tests.harness.report.test_frontier import searched

    written = output.write_report(contents.build(searched()), tmp_path / "o", tmp_path / "p")
    html = next(p for p in written if p.name == "report.html").read_text()
    assert re.search(r'<details id="memory-frontier" open>\s*<summary>.*\s*<figure>', html)


def test_a_run_of_memory_alone_has_no_empty_charts_of_seconds(tmp_path):
    sizes = (16, 64, 512)
    records = [factory.record(purpose="memory", round=0, batch_size=b, seconds=[]) for b in sizes]
    records.append(factory.record(purpose="memory", batch_size=2048, seconds=[], state="timeout", reason="within 60 s"))
    written = output.write_report(contents.build(records), tmp_path / "o", tmp_path / "p")
    html = next(p for p in written if p.name == "report.html").read_text()
    assert 'id="explore"' not in html and "within 60 s" in html


def test_every_region_of_a_page_has_a_name_of_its_own(report):
    names = re.findall(r'role="region" aria-label="([^"]*)"', page.page(report, {}))
    assert len(names) > 20 and len(set(names)) == len(names)
