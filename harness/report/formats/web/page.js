"use strict";
// The page of a report: choosing, sorting, charts, and the way from a number back to its processes. No network.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const root = document.documentElement;
  const by = (id) => document.getElementById(id);
  const unique = (values) => [...new Set(values)];
  const element = (name, properties = {}, ...children) => {
    const made = Object.assign(document.createElement(name), properties);
    made.append(...children);
    return made;
  };

  // Three significant digits without an exponent, as in the other formats.
  function number(value) {
    if (value === null || value === undefined || !Number.isFinite(value)) return "–";
    if (value === 0) return "0";
    const rounded = Number(value.toPrecision(3));
    return rounded.toFixed(Math.max(0, 2 - Math.floor(Math.log10(Math.abs(rounded)))));
  }
  const factor = (v) => { const size = Math.abs(Number(v.toPrecision(3))); return size >= 0.1 && size < 10 ? v.toFixed(2) : number(v); };

  // ---- downloads ----
  function save(name, content, type) {
    const link = element("a", { download: name, href: typeof content === "string" && content.startsWith("data:") ? content : URL.createObjectURL(new Blob([content], { type })) });
    link.click();
    if (link.href.startsWith("blob:")) URL.revokeObjectURL(link.href);
  }
  const csv = (rows) => rows.map((row) => row.map((cell) => (/[",\n]/.test(cell) ? `"${cell.replaceAll('"', '""')}"` : cell)).join(",") + "\n").join("");
  const slug = (text) => text.toLowerCase().replace(/[^a-z0-9]+/g, "-").replace(/^-|-$/g, "");
  const saver = (words, title, action) => {
    const button = element("button", { type: "button", className: "save", textContent: words });
    button.setAttribute("aria-label", `${words}: ${title}`);
    button.addEventListener("click", action);
    return button;
  };

  // ---- colours ----
  const THEMES = ["system", "light", "dark"];
  function stored() {
    try { return localStorage.getItem("dpbench-theme") || "system"; } catch { return "system"; }
  }
  function setTheme(name) {
    if (name === "system") root.removeAttribute("data-theme"); else root.dataset.theme = name;
    by("theme").textContent = `Colours: ${name}`;
    by("theme").setAttribute("aria-label", `Colours: ${name}. Press to change`);
    try { localStorage.setItem("dpbench-theme", name); } catch { /* a page from disk may have no storage */ }
  }
  let theme = stored();
  setTheme(THEMES.includes(theme) ? theme : "system");
  by("theme").addEventListener("click", () => {
    theme = THEMES[(THEMES.indexOf(theme) + 1) % THEMES.length];
    setTheme(theme);
    charts();
  });
  const dark = () => theme === "dark" || (theme === "system" && matchMedia("(prefers-color-scheme: dark)").matches);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => charts());

  // ---- sorting, for the main table and for the fixed ones ----
  const leading = (text) => {
    const found = /^[\s×]*(-?\d[\d.]*)/.exec(text.replace(/,/g, ""));
    return found ? Number(found[1]) : null;
  };
  function compare(a, b) {
    const missing = (v) => v === null || v === undefined || v === "" || v === "–";
    if (missing(a) || missing(b)) return missing(a) - missing(b);
    if (typeof a === "number" && typeof b === "number") return a - b;
    return String(a).localeCompare(String(b), "en", { numeric: true });
  }
  // What is missing stays below in both directions.
  function ordered(items, key, direction) {
    const missing = (v) => v === null || v === undefined || v === "" || v === "–";
    return [...items].sort((x, y) => {
      const a = key(x), b = key(y);
      return missing(a) || missing(b) ? compare(a, b) : direction * compare(a, b);
    });
  }
  for (const image of document.querySelectorAll("figure img")) {
    image.previousElementSibling.append(saver("SVG", image.alt, () => save(image.dataset.name, image.src)));
  }
  for (const table of document.querySelectorAll("table.sortable")) {
    const title = table.caption.textContent;
    const texts = [...table.rows].map((row) => [...row.cells].map((cell) => cell.textContent));
    table.caption.append(saver("CSV", title, () => save(`${slug(title)}.csv`, csv(texts), "text/csv")));
    const heads = [...table.tHead.rows[0].cells];
    const rows = [...table.tBodies[0].rows];
    heads.forEach((head, column) => {
      const texts = rows.map((row) => row.cells[column].textContent);
      const numeric = column > 0 && texts.some((t) => leading(t) !== null) && texts.every((t) => leading(t) !== null || t === "–" || !/^\d/.test(t));
      rows.forEach((row, i) => { if (texts[i].length > 40) row.cells[column].classList.add("words"); });
      if (numeric && texts.every((t) => t.length < 28)) {
        head.classList.add("number");
        rows.forEach((row) => row.cells[column].classList.add("number"));
      }
      const button = element("button", { type: "button", textContent: head.textContent });
      head.replaceChildren(button);
      button.addEventListener("click", () => {
        const direction = head.getAttribute("aria-sort") === "ascending" ? -1 : 1;
        heads.forEach((h) => h.removeAttribute("aria-sort"));
        head.setAttribute("aria-sort", direction > 0 ? "ascending" : "descending");
        const key = (row) => {
          const text = row.cells[column].textContent;
          return numeric ? leading(text) ?? (text === "–" ? null : text) : text;
        };
        table.tBodies[0].append(...ordered(rows, key, direction));
      });
    });
  }

  // A link to a chapter, or to a cell of layers, opens what it leads to.
  function unfold() {
    if (location.hash.includes("=")) return;
    let found = document.getElementById(decodeURIComponent(location.hash.slice(1)));
    found?.scrollIntoView();
    for (; found; found = found.parentElement) if (found.tagName === "DETAILS") found.open = true;
  }
  addEventListener("hashchange", unfold);
  unfold();

  if (!data.cells.length) return;

  // ---- choosing ----
  const controls = ["machine", "device", "protocol", "task", "batch"];
  const ALL = "all";
  const of = (cell, control) => {
    const section = data.sections[cell.s];
    if (control === "machine") return section.machine;
    if (control === "device") return section.device;
    if (control === "protocol") return `${section.protocol} · ${section.isolation}`;
    if (control === "task") return cell.task;
    return String(cell.batch);
  };
  const label = (control, value) => (control === "task" ? data.tasks[value] ?? value : value);
  // The first of the values with most undisturbed times; of batch sizes and tasks the first.
  function soundest(cells, control, values) {
    if (!["machine", "device", "protocol"].includes(control)) return values[0];
    const sound = (v) => cells.filter((cell) => of(cell, control) === v && cell.state === "ok" && !/[ᵈ‼]/.test(cell.marks)).length;
    const most = Math.max(...values.map(sound));
    return values.find((v) => sound(v) === most);
  }
  // Every select offers only what exists under the choices to its left.
  function offer() {
    let left = data.cells;
    for (const control of controls) {
      const select = by(control), before = select.value;
      const values = unique(left.map((cell) => of(cell, control)));
      if (control === "batch") values.sort((a, b) => a - b);
      const shown = control === "batch" && values.length > 1 ? [...values, ALL] : values;
      select.replaceChildren(...shown.map((v) => element("option", { value: v, textContent: v === ALL ? "all" : label(control, v) })));
      select.value = shown.includes(before) ? before : control === "batch" && shown.includes("512") ? "512" : soundest(left, control, shown);
      select.parentElement.hidden = shown.length < 2;
      left = left.filter((cell) => select.value === ALL || of(cell, control) === select.value);
    }
  }
  function chosen(withBatch = true) {
    const words = by("filter").value.trim().toLowerCase().split(/\s+/).filter(Boolean);
    return data.cells.filter((cell) => {
      const contestant = data.contestants[cell.c];
      return controls.every((control) => (control === "batch" && !withBatch) || by(control).value === ALL || of(cell, control) === by(control).value)
        && words.every((word) => `${contestant.name} ${contestant.title}`.toLowerCase().includes(word))
        && (!by("private").checked || contestant.private);
    });
  }

  // ---- the main table ----
  const columns = [
    { title: "contestant", key: (c) => data.contestants[c.c].title },
    { title: "batch", minor: false, key: (c) => c.batch, number: true },
    { title: "seconds per epoch", key: (c) => c.median, number: true },
    { title: "n", minor: true, key: (c) => (c.state === "ok" ? c.n : null), number: true },
    { title: "× without DP", key: (c) => (c.ratio ? c.ratio[0] : c.base ? 1 : null), number: true },
    { title: "start-up s", minor: true, key: (c) => c.start, number: true },
    { title: "peak MiB", key: (c) => c.memory, number: true },
    { title: "× floor", minor: true, key: (c) => c.floor, number: true },
    { title: "ε", minor: true, key: (c) => c.epsilon, number: true },
    { title: "accuracy", minor: true, key: (c) => c.accuracy, number: true },
    { title: "state", key: (c) => c.state },
  ];
  let sorting = { column: 2, direction: 1 };
  // What is chosen stands in the address, so that a link shows the same to others.
  function state(cell) {
    const found = new URLSearchParams();
    for (const control of controls) if (!by(control).parentElement.hidden) found.set(control, by(control).value);
    if (by("filter").value.trim()) found.set("filter", by("filter").value.trim());
    if (by("private").checked) found.set("private", "1");
    if (sorting.column !== 2 || sorting.direction !== 1) found.set("sort", `${sorting.direction < 0 ? "-" : ""}${sorting.column}`);
    if (cell) found.set("cell", `${cell.s}/${cell.cell}`);
    return `#${found}`;
  }
  function restore() {
    const asked = new URLSearchParams(location.hash.includes("=") ? location.hash.slice(1) : "");
    // From left to right: each select offers what exists under the choices before it.
    for (const control of controls) {
      offer();
      if ([...by(control).options].some((option) => option.value === asked.get(control))) by(control).value = asked.get(control);
    }
    offer();
    by("filter").value = asked.get("filter") ?? "";
    by("private").checked = asked.get("private") === "1";
    const sort = Number(asked.get("sort") ?? 2);
    if (columns[Math.abs(sort)]) sorting = { column: Math.abs(sort), direction: Object.is(sort, -0) || sort < 0 ? -1 : 1 };
  }
  const address = (cell) => state(cell);
  const range = (low, high) => element("span", { className: "range", textContent: ` [${number(low)}, ${number(high)}]` });
  function content(cell, column) {
    const value = columns[column].key(cell);
    if (column === 0) return [value];
    if (column === 2) {
      const link = element("a", { href: address(cell), textContent: cell.state === "ok" ? number(cell.median) + cell.marks : "why" });
      link.setAttribute("aria-label", `${link.textContent}: the processes behind ${cell.cell}`);
      return cell.low !== null ? [link, range(cell.low, cell.high)] : [link];
    }
    if (column === 4 && cell.base) return ["1.00×"];
    if (column === 4 && cell.ratio) {
      const [ratio, low, high, rounds] = cell.ratio;
      const span = element("span", { className: "range", textContent: (low === null ? "" : ` [${factor(low)}, ${factor(high)}]`) + (rounds === cell.n ? "" : ` n=${rounds}`) });
      return [`${factor(ratio)}×${cell.ratio_marks}`, span];
    }
    if (column === 7 && value) return [`${factor(value)}×${cell.marks.replace("ᶠ", "")}`];
    if (column === 9 && value) return [`${(100 * value).toFixed(1)} %`];
    if (column === 10) {
      if (cell.state === "ok") return [cell.failures ? `ok, besides ${cell.failures}` : "ok"];
      const reason = element("span", { className: cell.state === "unsupported" ? "warn" : "bad", textContent: cell.state, title: cell.reason });
      return [reason, `: ${cell.reason}`];
    }
    return [typeof value === "number" && column !== 1 && column !== 3 ? number(value) : String(value ?? "–")];
  }
  function fillTable(cells) {
    const shown = columns.map((_, i) => i).filter((i) => i !== 1 || by("batch").value === ALL).filter((i) => i < 4 || (i === 10 && cells.some((c) => c.state !== "ok" || c.failures)) || i !== 10 && cells.some((c) => { const v = columns[i].key(c); return v !== null && v !== undefined; }));
    const head = element("tr");
    for (const i of shown) {
      const button = element("button", { type: "button", textContent: columns[i].title });
      button.addEventListener("click", () => {
        sorting = { column: i, direction: sorting.column === i ? -sorting.direction : 1 };
        choose();
        by("results").tHead.querySelector(`[data-column="${i}"] button`).focus();
      });
      const th = element("th", { scope: "col", className: (columns[i].number ? "number" : "") + (columns[i].minor ? " minor" : "") }, button);
      th.dataset.column = i;
      if (sorting.column === i) th.setAttribute("aria-sort", sorting.direction > 0 ? "ascending" : "descending");
      head.append(th);
    }
    by("results").tHead.replaceChildren(head);
    by("results").tBodies[0].replaceChildren(...ordered(cells, columns[sorting.column].key, sorting.direction).map((cell) => {
      const row = element("tr");
      for (const i of shown) {
        const kind = i === 0 ? "th" : "td";
        const plain = i === 0 && !data.contestants[cell.c].private ? "plain" : "";
        const box = element(kind, { className: plain || (columns[i].number ? "number" : i === 10 ? "reason" : "") + (columns[i].minor ? " minor" : "") }, ...content(cell, i));
        if (i === 0) Object.assign(box, { scope: "row", title: data.contestants[cell.c].name });
        row.append(box);
      }
      return row;
    }));
  }
  function legend(cells) {
    const ok = cells.filter((c) => c.state === "ok");
    const lines = ["Every number of seconds leads to its processes: raw samples, environment, image, command. In italics: without DP."];
    if (ok.some((c) => c.low !== null)) lines.push("Brackets behind seconds: lowest and highest process (under 6 processes there is no 95 % interval), from 6 on the distribution-free 95 % interval of the median. Behind a ratio: 95 % interval of the mean of paired rounds, and their number n where it is not that of the processes.");
    if (ok.some((c) => (c.marks + c.ratio_marks).includes("ᵉ"))) lines.push("ᵉ extrapolated: a part of an epoch was measured and scaled up to a whole one.");
    if (ok.some((c) => (c.marks + c.ratio_marks).includes("‼"))) lines.push("‼ too disturbed to be a result: other programs took more than half of the processors in every process. Stop them, or take a quieter machine, and run the same command with --fresh.");
    if (ok.some((c) => (c.marks + c.ratio_marks).includes("ᵈ"))) lines.push("ᵈ disturbed: other programs took processor time or the machine changed its speed during some process of the cell. A ratio leaves such processes out where two undisturbed pairs remain, and then has no ᵈ.");
    if (ok.some((c) => c.marks.includes("ᶠ"))) lines.push("ᶠ some processes of the cell failed.");
    if (cells.some((c) => c.synthetic)) lines.push("Synthetic data of the same shape stands in place of the genuine here.");
    if (ok.some((c) => c.memory)) lines.push(`Peak MiB: ${unique(ok.map((c) => c.metric).filter(Boolean)).map((m) => data.metrics[m] ?? m).join("; ")}.`);
    if (ok.some((c) => c.floor)) lines.push("× floor: over what arithmetic and data alone would take at this machine's measured peaks.");
    if (ok.some((c) => c.floor !== null && c.floor < 1)) lines.push("× floor below 1: " + data.below_floor);
    by("legend").replaceChildren(...lines.map((text) => element("li", { textContent: text, className: /^(Brackets|× floor)/.test(text) ? "minor" : "" })));
  }

  // ---- charts ----
  function colours() {
    const style = getComputedStyle(root), css = (name) => style.getPropertyValue(name).trim();
    return { text: css("--text"), quiet: css("--quiet"), line: css("--line"), bad: css("--bad"), accent: css("--link") };
  }
  function config(c) {
    return {
      background: null, font: "system-ui, sans-serif", view: { stroke: null },
      axis: { labelColor: c.text, titleColor: c.quiet, gridColor: c.line, domainColor: c.quiet, tickColor: c.quiet, labelFontSize: 12, titleFontSize: 12, titleFontWeight: "normal", labelLimit: 190 },
      legend: { labelColor: c.text, titleColor: c.quiet, labelFontSize: 12, labelLimit: 200 },
    };
  }
  const name = (cell) => data.contestants[cell.c].title + (by("batch").value === ALL ? ` · ${cell.batch}` : "");
  const tint = (k, c) => (k.colour === "#000000" ? c.text : dark() ? k.light : k.colour);
  const FEW = 60; // rows that a chart can show
  // A logarithmic axis has ticks at 0.8, 0.9, 1, 2: where it is short, steps as on a straight one label all its length.
  function ticks(rows) {
    const values = rows.flatMap((r) => [r.value, r.low, r.high, r.paper]).filter((v) => Number.isFinite(v));
    const low = Math.min(...values), high = Math.max(...values);
    if (!(low < high && high < 6 * low)) return { tickCount: 6 };
    const raw = (high - low) / 5, power = 10 ** Math.floor(Math.log10(raw));
    const step = power * [1, 2, 2.5, 5, 10].find((share) => power * share >= raw);
    const first = Math.ceil(low / step);
    return { values: Array.from({ length: Math.floor(high / step) - first + 1 }, (_, i) => Number(((first + i) * step).toPrecision(12))) };
  }
  function dots(cells, value, title, c, paper) {
    const rows = cells.slice(0, FEW).map((cell) => ({ name: name(cell), colour: tint(data.contestants[cell.c], c), batch: cell.batch, state: cell.state, n: cell.n, ...value(cell) }));
    const color = { field: "colour", type: "nominal", scale: null };
    const order = ordered(rows, (r) => r.value, 1).map((r) => r.name);
    const scale = { type: "log", nice: false, padding: 12 };
    const tooltip = [{ field: "name", title: "contestant" }, { field: "shown", title }, { field: "n", title: "n" }];
    const y = { field: "name", type: "nominal", sort: order, title: null };
    const good = "isValid(datum.value)";
    const axis = { format: "~g", labelBound: 4, ...ticks(rows) };
    return {
      data: { values: rows }, height: Math.max(44, 22 * unique(order).length), width: "container", autosize: { type: "fit-x", contains: "padding" }, config: config(c),
      description: `${title}: ${rows.map((r) => `${r.name} ${r.shown ?? r.state}`).join("; ")}`,
      layer: [
        // An empty layer would have a scale without an extent, of which Vega complains.
        ...(!rows.some((r) => r.low !== null && r.low !== undefined) ? [] : [{ transform: [{ filter: good }, { filter: "isValid(datum.low)" }], mark: { type: "rule", strokeWidth: 3, opacity: 0.55 }, encoding: { y, color, x: { field: "low", type: "quantitative", scale, title: null, axis }, x2: { field: "high" } } }]),
        { transform: [{ filter: good }], mark: { type: "point", filled: true, size: 70, opacity: 1 }, encoding: { y, color, x: { field: "value", type: "quantitative", scale, title: null, axis }, tooltip } },
        ...(paper && rows.some((r) => r.paper !== null && r.paper !== undefined) ? [{ transform: [{ filter: "isValid(datum.paper)" }], mark: { type: "point", shape: "diamond", size: 70, color: c.quiet }, encoding: { y, x: { field: "paper", type: "quantitative", scale }, tooltip: [{ field: "name", title: "contestant" }, { field: "paper", title: "the paper (A100, 2021)", format: ".2f" }] } }] : []),
        { transform: [{ filter: "datum.state !== 'ok'" }], mark: { type: "text", align: "left", color: c.bad, fontSize: 12 }, encoding: { y, x: { value: 6 }, text: { field: "state" } } },
      ],
    };
  }
  function lines(cells, c) {
    const timed = cells.filter((cell) => cell.state === "ok");
    const sizes = unique(timed.map((cell) => cell.batch));
    const names = data.contestants.map((k, i) => ({ ...k, mine: timed.filter((cell) => cell.c === i) })).filter((k) => k.mine.length);
    // Without a value the line breaks: none is drawn through a batch size that was not measured.
    const rows = names.flatMap((k) => sizes.map((batch) => {
      const cell = k.mine.find((one) => one.batch === batch);
      return cell ? { name: k.title, inside: k.open ? "transparent" : tint(k, c), batch, value: cell.median, low: cell.low, high: cell.high, shown: `${number(cell.median)}${cell.marks}`, n: cell.n } : { name: k.title, batch, value: null };
    }));
    const bright = names.filter((k) => !k.grey);
    const colour = { field: "name", type: "nominal", title: null, scale: { domain: names.map((k) => k.title), range: names.map((k) => tint(k, c)) }, legend: { orient: "bottom", columns: innerWidth < 720 ? 1 : 4, values: bright.map((k) => k.title) } };
    const shape = { field: "name", type: "nominal", title: null, scale: { domain: names.map((k) => k.title), range: names.map((k) => k.shape) } };
    const dash = { field: "name", type: "nominal", title: null, scale: { domain: names.map((k) => k.title), range: names.map((k) => k.dash) } };
    const x = { field: "batch", type: "quantitative", title: "batch size", scale: { type: "log", base: 2, nice: false, padding: 16 }, axis: { values: sizes, format: "d", labelOverlap: true } };
    const y = { field: "value", type: "quantitative", title: "seconds per epoch", scale: { type: "log", nice: false, padding: 10 }, axis: { format: "~g", ...ticks(rows) } };
    const opacity = { condition: { param: "picked", value: 1 }, value: 0.12 };
    return {
      data: { values: rows }, width: "container", height: 320, autosize: { type: "fit-x", contains: "padding" }, config: config(c),
      description: "Seconds per epoch over batch size, a line per contestant; the same numbers stand in the table.",
      layer: [
        { params: [{ name: "picked", select: { type: "point", fields: ["name"] }, bind: "legend" }], mark: { type: "line", strokeWidth: 1.5 }, encoding: { x, y, color: colour, strokeDash: dash, opacity } },
        ...(rows.some((r) => r.low !== null && r.low !== undefined) ? [{ transform: [{ filter: "isValid(datum.low)" }], mark: { type: "rule", strokeWidth: 2 }, encoding: { x, y: { field: "low", type: "quantitative" }, y2: { field: "high" }, color: colour, opacity } }] : []),
        { transform: [{ filter: "isValid(datum.value)" }], mark: { type: "point", size: 60 }, encoding: { x, y, color: colour, fill: { field: "inside", type: "nominal", scale: null }, shape, opacity, tooltip: [{ field: "name", title: "contestant" }, { field: "batch", title: "batch size" }, { field: "shown", title: "seconds" }, { field: "n", title: "n" }] } },
      ],
    };
  }
  const drawn = {};
  async function draw(id, spec) {
    const place = by(id);
    drawn[id]?.finalize();
    drawn[id] = null;
    place.previousElementSibling.querySelector(".save")?.remove();
    if (!spec) { place.replaceChildren(element("p", { textContent: "Nothing to show for this choice." })); return; }
    drawn[id] = await window.vegaEmbed(place, { $schema: "https://vega.github.io/schema/vega-lite/v6.json", ...spec }, { actions: false, renderer: "svg" });
    const title = place.previousElementSibling.textContent;
    place.previousElementSibling.append(saver("SVG", title, async () => save(`${slug(title)}.svg`, await drawn[id].view.toSVG(), "image/svg+xml")));
  }
  let turn = 0;
  async function charts() {
    if (!data.cells.length) return;
    const mine = ++turn, c = colours(), cells = chosen();
    const seconds = (cell) => ({ value: cell.median, low: cell.low, high: cell.high, shown: cell.state === "ok" ? `${number(cell.median)}${cell.marks}` : null });
    const ratio = (cell) => (cell.ratio ? { value: cell.ratio[0], low: cell.ratio[1], high: cell.ratio[2], shown: `${factor(cell.ratio[0])}×${cell.ratio_marks}`, n: cell.ratio[3], paper: cell.paper } : { paper: cell.paper });
    const over = cells.filter((cell) => cell.ratio || cell.state !== "ok");
    const base = cells.find((cell) => cell.baseline)?.baseline;
    by("ratio-title").textContent = `Relative to PyTorch without DP (${base ? `${base}, ` : ""}log; left is faster)` + (over.some((cell) => cell.paper) ? "; ◇ the paper's ratio" : "");
    const everywhere = chosen(false);
    for (const [id, spec] of [
      ["chart-seconds", cells.length ? dots(cells, seconds, "seconds", c, false) : null],
      ["chart-ratio", over.some((cell) => cell.ratio) ? dots(over, ratio, "ratio", c, true) : null],
      ["chart-batch", everywhere.some((cell) => cell.state === "ok") ? lines(everywhere, c) : null],
    ]) {
      if (mine !== turn) return;
      await draw(id, spec);
    }
    if (mine === turn) root.dataset.drawn = String(turn);
  }

  // ---- provenance ----
  const dialog = by("provenance");
  function explain(place) {
    const slash = place.indexOf("/"), section = Number(place.slice(0, slash)), wanted = place.slice(slash + 1);
    const cell = data.cells.find((k) => k.s === section && k.cell === wanted);
    if (!cell) return;
    by("provenance-title").textContent = cell.cell;
    const body = [element("p", { textContent: `${data.sections[section].machine}: ${cell.state === "ok" ? `median ${number(cell.median)}${cell.marks} s${cell.low === null ? "" : ` [${number(cell.low)}, ${number(cell.high)}]`}, n = ${cell.n}` : `${cell.state}: ${cell.reason}`}` })];
    for (const index of cell.p) {
      const [purpose, state, ...pairs] = data.processes[index];
      body.push(element("h3", { textContent: `${purpose} process: ${state}` }));
      const list = element("dl");
      for (let i = 0; i < pairs.length; i += 2) list.append(element("dt", { textContent: data.labels[pairs[i]] }), element("dd", { textContent: data.strings[pairs[i + 1]] }));
      body.push(list);
    }
    by("provenance-body").replaceChildren(...body);
    if (!dialog.open) dialog.showModal();
    by("provenance-body").scrollTop = 0;
    by("close").focus();
  }
  function followAddress() {
    const wanted = location.hash.includes("=") ? new URLSearchParams(location.hash.slice(1)).get("cell") : null;
    if (wanted) explain(wanted); else if (dialog.open) dialog.close();
  }
  by("close").addEventListener("click", () => dialog.close());
  dialog.addEventListener("click", (event) => { if (event.target === dialog) dialog.close(); });
  dialog.addEventListener("close", () => {
    const link = [...document.links].find((one) => one.getAttribute("href") === location.hash);
    history.replaceState(null, "", state());
    link?.focus();
  });
  addEventListener("hashchange", followAddress);

  function update() {
    const cells = chosen();
    const failed = cells.filter((cell) => cell.state !== "ok").length;
    const section = cells.length ? data.sections[cells[0].s] : null;
    by("shown").textContent = `${cells.length} cells, ${cells.length - failed} with a time, ${failed} without.` + (section ? ` Measured ${section.when}.` : "");
    fillTable(cells);
    legend(cells);
    charts();
  }
  // Only what somebody chose goes into the address; a link to a chapter stays one.
  function choose() {
    update();
    history.replaceState(null, "", state());
  }
  by("csv").addEventListener("click", () => {
    const texts = [...by("results").rows].map((row) => [...row.cells].map((cell) => cell.textContent));
    save(`${slug(`seconds-per-epoch ${by("task").value} ${by("batch").value}`)}.csv`, csv(texts), "text/csv");
  });
  for (const id of [...controls, "private"]) by(id).addEventListener("change", () => { offer(); choose(); });
  by("filter").addEventListener("input", choose);
  by("controls").addEventListener("submit", (event) => event.preventDefault());
  restore();
  update();
  followAddress();
})();
