"use strict";
// The dashboard: colours, filters, anchors that open their cell, and charts drawn when they are first seen. No network.
(() => {
  const root = document.documentElement;
  const by = (id) => document.getElementById(id);
  const all = (query, from = document) => [...from.querySelectorAll(query)];
  let drawn = 0;
  // Tests wait for this number: it grows when what is shown has changed.
  const done = () => { root.dataset.drawn = String(++drawn); };

  // ---- colours ----
  const THEMES = ["system", "light", "dark"];
  const remembered = () => { try { return localStorage.getItem("dpbench-theme"); } catch { return null; } };
  let theme = THEMES.includes(remembered()) ? remembered() : "system";
  function paint() {
    if (theme === "system") root.removeAttribute("data-theme"); else root.dataset.theme = theme;
    by("theme").textContent = `Colours: ${theme}`;
    by("theme").setAttribute("aria-label", `Colours: ${theme}. Press to change`);
  }
  paint();
  by("theme").addEventListener("click", () => {
    theme = THEMES[(THEMES.indexOf(theme) + 1) % THEMES.length];
    try { localStorage.setItem("dpbench-theme", theme); } catch { /* a page from disk may have no storage */ }
    paint();
    done();
  });
  by("goto").addEventListener("change", (e) => { if (e.target.value) location.href = e.target.value; });

  // ---- filters ----
  const words = () => (by("filter")?.value ?? "").trim().toLowerCase().split(/\s+/).filter(Boolean);
  const fits = (text) => words().every((word) => text.toLowerCase().includes(word));
  const count = (n, what, of) => { by("shown").textContent = `${n === of ? n : `${n} of ${of}`} ${what}`; };
  function filterTable() {
    const machine = by("machine")?.value ?? "", changed = by("changed").checked;
    let shown = 0, total = 0;
    for (const body of all("#all tbody")) {
      let here = 0;
      for (const row of all("tr[data-text]", body)) {
        const fit = (!machine || body.dataset.machine === machine) && fits(row.dataset.text) && (!changed || row.dataset.mark !== "");
        row.hidden = !fit;
        here += fit;
        total += 1;
      }
      body.hidden = !here;
      shown += here;
    }
    count(shown, "cells", total);
    done();
  }
  function filterEvents() {
    const kind = by("kind").value, rows = all(".event");
    const shown = rows.filter((row) => {
      const fit = fits(row.dataset.text) && (!kind || row.dataset.kind === kind || (kind === "open" && row.dataset.kind === "red"));
      row.hidden = !fit;
      return fit;
    });
    count(shown.length, "events", rows.length);
    done();
  }
  function filterCells() {
    const machine = by("machine")?.value ?? "", rows = all("details.cell");
    let shown = 0;
    for (const part of all("section.machine")) {
      let here = 0;
      for (const row of all("details.cell", part)) {
        row.hidden = (machine && part.dataset.machine !== machine) || !fits(row.dataset.text);
        here += !row.hidden;
      }
      part.hidden = !here;
      shown += here;
      for (const title of all("h4", part)) {
        let next = title.nextElementSibling, some = false;
        for (; next && next.tagName !== "H4"; next = next.nextElementSibling) some ||= next.matches("details.cell") && !next.hidden;
        title.hidden = !some;
      }
    }
    count(shown, "cells", rows.length);
    done();
  }
  const controls = by("controls");
  controls?.addEventListener("submit", (e) => e.preventDefault());

  // ---- text of numbers, as in the other formats ----
  function number(value) {
    if (!Number.isFinite(value)) return "–";
    if (value === 0) return "0";
    const rounded = Number(value.toPrecision(3));
    return rounded.toFixed(Math.max(0, 2 - Math.floor(Math.log10(Math.abs(rounded)))));
  }
  const duration = (s) => (s < 1e-3 ? `${number(s * 1e6)} µs` : s < 1 ? `${number(s * 1e3)} ms` : `${number(s)} s`);
  const size = (b) => (b >= 2 ** 30 ? `${number(b / 2 ** 30)} GiB` : `${number(b / 2 ** 20)} MiB`);
  function percent(ratio) {
    if (ratio === null) return "from nothing";
    if (ratio >= 2 || ratio <= 0.5) return `${ratio.toFixed(2)}×`;
    const value = (ratio - 1) * 100;
    return `${value < 0 ? "−" : "+"}${Math.abs(value) < 0.095 ? Math.abs(value).toPrecision(1) : Math.abs(value).toFixed(1)} %`;
  }
  const day = (minutes) => new Date(minutes * 60000).toISOString().slice(0, 10);
  const moment = (minutes) => new Date(minutes * 60000).toISOString().slice(0, 16).replace("T", " ");

  // ---- elements ----
  const SVG = "http://www.w3.org/2000/svg";
  function shape(name, attributes, text) {
    const made = document.createElementNS(SVG, name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    if (text !== undefined) made.textContent = text;
    return made;
  }
  function element(name, properties = {}, ...children) {
    const made = Object.assign(document.createElement(name), properties);
    made.append(...children);
    return made;
  }

  // ---- charts ----
  const holder = by("data");
  const data = holder ? JSON.parse(holder.textContent) : null;
  const LEFT = 62, RIGHT = 12, TOP = 16, BOTTOM = 22;
  const chosen = (name) => document.querySelector(`input[name="${name}"]:checked`).value;
  // [index, value] wherever a value changes -> all values
  function expand(changes, n) {
    const values = new Array(n);
    changes.forEach(([at, value], i) => values.fill(value, at, i + 1 < changes.length ? changes[i + 1][0] : n));
    return values;
  }
  function points(cell, metric, raw) {
    const machine = data.machines[cell.m], n = cell.v.length, vetoed = new Set(cell.vetoed ?? []);
    const counted = metric === "memory" && cell.bytes ? expand(cell.bytes, n) : null;
    const processes = expand(cell.n, n), extrapolated = expand(cell.extrapolated ?? [[0, 0]], n);
    return cell.v.map((v, i) => {
      const run = cell.runs ? cell.runs[i] : i;
      const normal = (v / data.scale) * cell.base;
      const seconds = cell.fixed ? normal : (normal * machine.raw[run]) / data.scale;
      const y = metric === "memory" ? (counted ? counted[i] : 0) : raw ? seconds : normal;
      return { run, x: machine.t[run], y: y || null, normal, seconds, bytes: counted?.[i], n: processes[i], extrapolated: extrapolated[i],
        vetoed: vetoed.has(i), state: cell.states?.[i] ?? "ok", commit: machine.commit[run], dirty: machine.dirty.includes(run) };
    });
  }
  const quantile = (sorted, q) => sorted[Math.min(sorted.length - 1, Math.max(0, Math.round(q * (sorted.length - 1))))];
  function ticks(low, high, wanted) {
    const rough = (high - low) / wanted, power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 2.5, 5, 10].map((f) => f * power).find((s) => s >= rough);
    const found = [];
    for (let at = Math.ceil(low / step) * step; at <= high; at += step) found.push(at);
    return found;
  }
  function months(from, to, most) {
    const found = [], start = new Date(from * 60000);
    const span = (to - from) / 43200, every = [1, 2, 3, 6, 12].find((m) => span / m <= most) ?? 24;
    for (let y = start.getUTCFullYear(), m = 0; ; m += every) {
      const at = Date.UTC(y, m, 1) / 60000;
      if (at > to) return found;
      if (at >= from) found.push([at, new Date(at * 60000).toISOString().slice(0, every >= 12 ? 4 : 7)]);
    }
  }
  // The chosen measure; beside time also memory where it has changed.
  function draw(details) {
    const place = details.querySelector(".chart"), cell = data.cells[details.id], metric = chosen("metric");
    const shown = metric === "time" && cell.memory?.steps.length ? ["time", "memory"] : [metric];
    place.replaceChildren(...shown.map((m, i) => chart(element("div"), place, details, cell, m, i ? 120 : 190)));
    place.dataset.drawn = `${metric}-${chosen("values")}-${by("period").value}`;
  }
  function chart(place, frame, details, cell, metric, HEIGHT) {
    const raw = chosen("values") === "raw", days = Number(by("period").value);
    const machine = data.machines[cell.m];
    const end = machine.t.at(-1), begin = days ? Math.max(machine.t[0], end - days * 1440) : machine.t[0];
    const shown = points(cell, metric, raw).filter((p) => p.x >= begin);
    const good = shown.filter((p) => p.y !== null);
    const text = metric === "memory" ? size : duration;
    if (!good.length) {
      place.replaceChildren(element("p", { className: "quiet", textContent: metric === "memory" ? "No memory was measured in this period." : "No time in this period." }));
      return place;
    }
    const width = Math.max(280, frame.clientWidth - parseFloat(getComputedStyle(frame).paddingLeft) - parseFloat(getComputedStyle(frame).paddingRight));
    const found = cell[metric] ?? { segments: [], steps: [] };
    const levels = metric === "memory" || !raw ? found.segments : [];
    const level = (g) => (metric === "memory" ? g[2] : (g[2] / data.scale) * cell.base);
    const sorted = good.filter((p) => !p.vetoed).map((p) => p.y).sort((a, b) => a - b);
    const values = sorted.length ? sorted : good.map((p) => p.y).sort((a, b) => a - b);
    const seen = levels.filter((g) => machine.t[g[1]] >= begin).map(level);
    let low = Math.min(quantile(values, 0.01), ...seen), high = Math.max(quantile(values, 0.99), ...seen);
    const middle = (low + high) / 2, least = middle * (metric === "memory" ? 0.02 : 0.06);
    if (high - low < least) { low = middle - least / 2; high = middle + least / 2; }
    const pad = (high - low) * 0.1;
    low -= pad; high += pad;
    const span = Math.max(end - begin, 1);
    const x = (t) => (span === 1 ? LEFT + (width - LEFT - RIGHT) / 2 : LEFT + ((t - begin) / span) * (width - LEFT - RIGHT));
    const y = (v) => TOP + (1 - (v - low) / (high - low)) * (HEIGHT - TOP - BOTTOM);
    const r = (v) => Math.round(v * 10) / 10;
    const svg = shape("svg", { viewBox: `0 0 ${width} ${HEIGHT}`, tabindex: 0, role: "img" });
    const what = metric === "memory" ? `memory, ${cell.memory_metric}` : cell.fixed ? "seconds as measured (a GPU's are not normalised)" : raw ? "raw seconds" : "normalised seconds";
    svg.setAttribute("aria-label", `${details.id}: ${what}, ${good.length} runs, ${found.steps.length} steps. Arrow keys read single runs.`);
    svg.style.height = `${HEIGHT}px`;
    const unit = metric === "memory" ? (high > 2 ** 31 ? 2 ** 30 : 2 ** 20) : 1;
    for (const at of ticks(low / unit, high / unit, HEIGHT > 150 ? 6 : 4).map((v) => v * unit)) {
      svg.append(shape("line", { class: "grid", x1: LEFT, x2: width - RIGHT, y1: r(y(at)), y2: r(y(at)) }));
      svg.append(shape("text", { x: LEFT - 6, y: r(y(at)) + 4, "text-anchor": "end" }, text(at)));
    }
    for (const [at, label] of span === 1 ? [[end, day(end)]] : months(begin, end, Math.floor(width / 80))) {
      svg.append(shape("text", { x: r(x(at)), y: HEIGHT - 5, "text-anchor": "middle" }, label));
      svg.append(shape("line", { class: "grid", x1: r(x(at)), x2: r(x(at)), y1: HEIGHT - BOTTOM, y2: HEIGHT - BOTTOM + 4 }));
    }
    const steps = found.steps.filter((s) => machine.t[s.at] >= begin);
    for (const s of steps) {
      const from = x(Math.max(begin, machine.t[s.from])), to = x(machine.t[s.to]);
      svg.append(shape("rect", { class: "range", x: r(from), y: TOP, width: r(Math.max(to - from, 2)), height: HEIGHT - TOP - BOTTOM }));
    }
    for (const g of levels) {
      if (machine.t[g[1]] < begin) continue;
      const a = x(Math.max(begin, machine.t[g[0]])), b = Math.max(x(machine.t[g[1]]), a + 3), v = level(g);
      if (found.sd) {
        const top = y(Math.min(high, v * Math.exp(2 * found.sd))), bottom = y(Math.max(low, v * Math.exp(-2 * found.sd)));
        svg.append(shape("rect", { class: "band", x: r(a), y: r(top), width: r(b - a), height: r(Math.max(1, bottom - top)) }));
      }
      svg.append(shape("path", { class: "level", d: `M${r(a)} ${r(y(v))}H${r(b)}` }));
    }
    const inside = (p) => p.y >= low && p.y <= high;
    const path = (list, one) => list.map(one).join("");
    const dot = (p) => `M${r(x(p.x))} ${r(y(p.y))}h0`;
    const ring = (p) => `M${r(x(p.x)) - 2} ${r(y(p.y))}a2 2 0 1 0 4 0a2 2 0 1 0 -4 0`;
    svg.append(shape("path", { class: "dots", d: path(good.filter((p) => inside(p) && !p.vetoed), dot) }));
    svg.append(shape("path", { class: "hollow", d: path(good.filter((p) => inside(p) && p.vetoed), ring) }));
    svg.append(shape("path", { class: "beyond", d: path(good.filter((p) => !inside(p)), (p) => (p.y > high ? `M${r(x(p.x)) - 3} ${TOP + 6}h6l-3 -6z` : `M${r(x(p.x)) - 3} ${HEIGHT - BOTTOM - 6}h6l-3 6z`)) }));
    svg.append(shape("path", { class: "crosses", d: path(shown.filter((p) => p.state !== "ok"), (p) => `M${r(x(p.x)) - 2.5} ${HEIGHT - BOTTOM - 8}l5 5m0 -5l-5 5`) }));
    let last = -100;
    for (const s of steps) {
      const at = r(x(machine.t[s.at])), better = s.ratio !== null && s.ratio < 1;
      svg.append(shape("line", { class: `stepline${better ? " better" : ""}`, x1: at, x2: at, y1: TOP, y2: HEIGHT - BOTTOM }));
      if (at - last < 46) continue;
      const right = at > width - 60;
      svg.append(shape("text", { class: `step-label ${better ? "better" : "worse"}-text`, x: right ? at - 4 : at + 4, y: 11, "text-anchor": right ? "end" : "start" }, percent(s.ratio)));
      last = at;
    }
    const cursor = shape("g", {});
    svg.append(cursor);
    const reading = element("p", { className: "reading" });
    reading.setAttribute("role", "status");
    let at = shown.length - 1;
    const link = (commit, shownText) => (data.repository && commit ? element("a", { className: "sha", href: `${data.repository}/commit/${commit}`, textContent: shownText }) : element("span", { className: "sha", textContent: shownText || "no commit" }));
    function read(i, mark) {
      at = Math.max(0, Math.min(shown.length - 1, i));
      const p = shown[at], parts = [`${moment(p.x)} · `, link(p.commit, p.commit.slice(0, 7) + (p.dirty ? "+" : "")), " · "];
      if (p.state !== "ok") parts.push(element("span", { className: "bad", textContent: p.state }));
      else if (metric === "memory") parts.push(p.y === null ? "no memory" : `${size(p.y)} (${p.y.toLocaleString("en")} bytes)`);
      else parts.push(cell.fixed ? duration(p.seconds) : `${duration(p.normal)} normalised, ${duration(p.seconds)} raw`, ` · ${p.n} process${p.n === 1 ? "" : "es"}`, p.extrapolated ? " · extrapolated from a part of an epoch" : "", p.vetoed ? " · disturbed: in no statistics" : "");
      reading.replaceChildren(...parts);
      const px = r(x(p.x));
      cursor.replaceChildren(...(mark ? [shape("line", { class: "cursor", x1: px, x2: px, y1: TOP, y2: HEIGHT - BOTTOM }), ...(p.y !== null && inside(p) ? [shape("circle", { class: "here", cx: px, cy: r(y(p.y)), r: 4.5 })] : [])] : []));
    }
    function nearest(event) {
      const box = svg.getBoundingClientRect(), t = begin + (((event.clientX - box.left) * (width / box.width) - LEFT) / (width - LEFT - RIGHT)) * span;
      let best = 0;
      shown.forEach((p, i) => { if (Math.abs(p.x - t) < Math.abs(shown[best].x - t)) best = i; });
      return best;
    }
    svg.addEventListener("pointermove", (e) => read(nearest(e), true));
    svg.addEventListener("pointerdown", (e) => read(nearest(e), true));
    svg.addEventListener("focus", () => read(at, true));
    svg.addEventListener("keydown", (e) => {
      const to = { ArrowLeft: at - 1, ArrowRight: at + 1, PageUp: at - 30, PageDown: at + 30, Home: 0, End: shown.length - 1 }[e.key];
      if (e.key === "Enter") reading.querySelector("a")?.click();
      if (to === undefined) return;
      e.preventDefault();
      read(to, true);
    });
    read(at, false);
    const list = element("ul");
    for (const s of [...found.steps].reverse()) {
      const worse = s.ratio === null || s.ratio > 1;
      const words_ = metric === "memory" ? (worse ? "more memory" : "less memory") : worse ? "slower" : "faster";
      const interval = s.low === null || s.low === s.high ? "" : ` [${percent(s.low)}, ${percent(s.high)}]`;
      const a = machine.commit[s.from], b = machine.commit[s.to];
      const both = `${a.slice(0, 7)}…${b.slice(0, 7)}`;
      const where = a === b ? ["at ", link(a, a.slice(0, 7))]
        : ["between ", data.repository && a && b ? element("a", { href: `${data.repository}/compare/${a}...${b}`, className: "sha", textContent: both }) : element("span", { className: "sha", textContent: both })];
      list.append(element("li", {}, element("span", { className: worse ? "worse" : "better", textContent: `${percent(s.ratio)} ${words_}` }), `${interval} on ${day(machine.t[s.at])}, `, ...where, `, known since ${day(machine.t[s.alarm])}`));
    }
    const caption = element("p", { className: "quiet", textContent: what });
    place.replaceChildren(caption, svg, reading, ...(list.children.length ? [list] : []));
    return place;
  }

  // Only open cells that can be seen are drawn, and again when a choice changes.
  const waiting = new Set();
  const watcher = data ? new IntersectionObserver((entries) => {
    for (const entry of entries) {
      if (!entry.isIntersecting) continue;
      watcher.unobserve(entry.target);
      waiting.delete(entry.target);
      draw(entry.target);
    }
    done();
  }, { rootMargin: "600px" }) : null;
  function ask(details) {
    if (!details.open || details.hidden) return;
    waiting.add(details);
    watcher.unobserve(details);
    watcher.observe(details);
  }
  function redraw() {
    all("details.cell").forEach((details) => { if (details.open) ask(details); });
  }

  // ---- anchors ----
  function arrive() {
    const name = decodeURIComponent(location.hash.slice(1));
    all(".cell.target").forEach((e) => e.classList.remove("target"));
    const goal = name ? by(name) : null;
    if (goal?.matches("details.cell")) {
      if (goal.hidden) { by("filter").value = ""; if (by("machine")) by("machine").value = ""; filterCells(); }
      goal.open = true;
      goal.classList.add("target");
      draw(goal);
      goal.scrollIntoView({ block: "start" });
      goal.querySelector("summary").focus({ preventScroll: true });
    }
    done();
  }

  if (data) {
    all("details.cell").forEach((details) => details.addEventListener("toggle", () => {
      if (details.open) ask(details);
      done();
    }));
    by("open").addEventListener("click", () => {
      const rows = all("details.cell").filter((d) => !d.hidden), opening = rows.some((d) => !d.open);
      rows.forEach((d) => { d.open = opening; });
      by("open").textContent = opening ? "Close all" : "Open all";
    });
    controls.addEventListener("input", (e) => {
      if (e.target.id === "filter" || e.target.id === "machine") filterCells();
      else { redraw(); done(); }
    });
    let before = innerWidth;
    addEventListener("resize", () => { if (innerWidth !== before) { before = innerWidth; redraw(); } });
    filterCells();
    redraw();
    addEventListener("hashchange", arrive);
    // The browser's own jump to the anchor, at the end of loading, takes the focus away again.
    if (location.hash) addEventListener("load", () => setTimeout(arrive));
    arrive();
  } else if (by("all")) {
    controls.addEventListener("input", filterTable);
    filterTable();
  } else if (by("kind")) {
    controls.addEventListener("input", filterEvents);
    filterEvents();
  } else done();
})();
