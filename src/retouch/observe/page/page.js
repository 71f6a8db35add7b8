// Curves, gallery and updates of a report, of `retouch watch` and of `retouch compare`. Data come from the page itself,
// or from the server of `watch`; texts are set as text, never as HTML.
"use strict";
(() => {
  const $ = (selector, root = document) => root.querySelector(selector);
  const $$ = (selector, root = document) => [...root.querySelectorAll(selector)];
  const make = (tag, about = {}, ...children) => {
    const node = document.createElement(tag);
    for (const [name, value] of Object.entries(about)) {
      if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
      else if (name === "text") node.textContent = value;
      else if (value !== false && value != null) node.setAttribute(name, value === true ? "" : value);
    }
    node.append(...children.filter((child) => child != null));
    return node;
  };
  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const number = (value, digits = 4) => value == null ? "–" : Math.abs(value) >= 1e5 || (value !== 0 && Math.abs(value) < 1e-3)
    ? value.toExponential(2) : String(+value.toPrecision(digits));
  const read = (id) => JSON.parse($(id).textContent);

  let page = read("#data");
  let images = null;  // parsed when the first one is shown: they are most of the file
  const source = (at) => (images ??= read("#images"))[at];

  // --- files for other programs ---

  const cell = (value) => {
    const text = String(value);
    const formula = /^[=+\-@\t\r]/.test(text) && Number.isNaN(Number(text)) ? `'${text}` : text;  // for spreadsheets
    return /[",\n\r]/.test(formula) ? `"${formula.replaceAll('"', '""')}"` : formula;
  };
  const save = (name, rows) => {
    const text = rows.map((row) => row.map(cell).join(",")).join("\r\n");
    make("a", { href: `data:text/csv;charset=utf-8,${encodeURIComponent(text)}`, download: `${name}.csv` }).click();
  };
  const addTools = (root) => {
    for (const table of $$("table[data-csv]", root)) {
      const rows = () => $$("tr", table).map((row) => [...row.children].map((one) => one.textContent.trim()));
      table.parentNode.after(make("button", { text: "CSV", title: "Save this table", onclick: () => save(table.dataset.csv, rows()) }));
    }
    for (const button of $$("button[data-copy]", root)) button.addEventListener("click", () => copy(button));
  };
  const copy = async (button) => {
    try {
      await navigator.clipboard.writeText(button.dataset.copy);
      button.textContent = "Copied";
    } catch {
      getSelection().selectAllChildren(button.previousElementSibling);
      button.textContent = "Selected: press Ctrl-C";
    }
    setTimeout(() => { button.textContent = "Copy"; }, 2500);
  };
  const ages = () => {
    for (const time of $$("time[data-at]")) {
      const seconds = Math.max(0, Date.now() / 1000 - Number(time.dataset.at));
      const [size, unit] = [[86400, "day"], [3600, "hour"], [60, "minute"], [1, "second"]].find(([size]) => seconds >= size) ?? [1, "second"];
      const count = Math.floor(seconds / size);
      time.title ||= time.textContent;
      time.textContent = `${time.title} (${count} ${unit}${count === 1 ? "" : "s"} ago)`;
    }
  };

  // --- curves ---

  const HEIGHT = 190;
  const DASHES = [[], [9, 4], [2, 3], [11, 3, 2, 3], [5, 2], [1, 5], [14, 5], [6, 2, 1, 2, 1, 2]];
  const hidden = new Set();  // names of lines that the legend has switched off
  const charts = new Map();
  let smoothing = 0;

  const smooth = (values) => {
    let sum = 0, weight = 0;
    return values.map((value) => {
      if (value == null) return null;
      sum = sum * smoothing + value * (1 - smoothing);
      weight = weight * smoothing + 1 - smoothing;  // of the first values there is no past yet
      return sum / weight;
    });
  };
  const stroke = (index) => () => colour(`--c${index % 8}`);
  const faint = (index, alpha) => () => {
    const hex = colour(`--c${index % 8}`);
    return hex + alpha;
  };

  class Chart {
    constructor(host) {
      this.log = false;
      this.output = make("output", { "aria-live": "off" });
      this.logButton = make("button", { text: "log", title: "Logarithmic axis", onclick: () => { this.log = !this.log; this.draw(); } });
      this.note = make("span", { class: "note" });
      this.plotHost = make("div", { class: "plot" });
      this.name = make("span", { class: "name" });
      this.say = make("p", { class: "say" });
      const csv = make("button", { text: "CSV", title: "Save this curve", onclick: () => this.save() });
      this.figure = make("figure", { class: "chart" },
        make("div", { class: "head" }, this.name, this.logButton, csv), this.say, this.plotHost, this.output, this.note);
      host.append(this.figure);
      sight.observe(this.figure);
      new ResizeObserver(() => this.plot?.setSize({ width: this.plotHost.clientWidth, height: HEIGHT })).observe(this.plotHost);
    }
    set(chart) {
      const first = !this.chart;
      this.chart = chart;
      if (first) this.log = chart.log;
      this.figure.dataset.chart = chart.key;
      this.name.textContent = chart.key;
      this.say.textContent = chart.sentence;
      this.note.textContent = chart.note;
      this.logButton.hidden = !chart.wide;
      if (this.plot) this.draw();
    }
    // For each line: raw values, the smoothed ones if any, and the two edges of a band.
    columns() {
      const tables = [], series = [{ label: "step" }], bands = [];
      const positive = (values) => this.log ? values.map((value) => value > 0 ? value : null) : values;
      this.shown = [];
      this.chart.lines.forEach((line, index) => {
        if (!line || hidden.has(index)) return;
        const columns = [line.x];
        const add = (values, about) => { columns.push(positive(values)); series.push({ spanGaps: true, points: { show: false }, ...about }); };
        const few = line.x.length <= 40;
        if (smoothing && line.x.length > 2 && !line.thinned) {  // of the extremes of bins a mean would be no mean of the run
          add(line.y, { stroke: faint(index, "55"), width: 1 });
          add(smooth(line.y), { stroke: stroke(index), width: 2, dash: DASHES[index % 8], main: index, smoothed: true });
        } else add(line.y, { stroke: stroke(index), width: 1.75, dash: DASHES[index % 8], main: index, points: { show: few, size: 5, fill: stroke(index), stroke: stroke(index) } });
        if (line.low) {
          add(line.high, { stroke: faint(index, "40"), width: 0.5 });
          add(line.low, { stroke: faint(index, "40"), width: 0.5 });
          bands.push({ series: [series.length - 2, series.length - 1], fill: faint(index, "2b") });
        }
        const at = series.findIndex((one) => one.main === index);
        this.shown.push({ index, at, smoothed: series[at].smoothed });
        tables.push(columns);
      });
      return { data: tables.length ? uPlot.join(tables) : [[]], series, bands };
    }
    // The same lines get their new values in the plot that is there: a user may point at it.
    draw() {
      const zoom = this.plot && this.zoomed ? { ...this.plot.scales.x } : null;
      const { data, series, bands } = this.columns();
      const shape = JSON.stringify([this.log, series, bands]);
      this.whole = [data[0][0], data[0][data[0].length - 1]];
      if (this.plot && shape === this.shape) this.plot.setData(data, !zoom);
      else this.plotAnew(data, series, bands);
      this.shape = shape;
      if (zoom) this.plot.setScale("x", zoom);
      this.noteZoom(this.plot);
      this.hover();
    }
    plotAnew(data, series, bands) {
      this.plot?.destroy();
      this.logButton.setAttribute("aria-pressed", this.log);
      const axis = { stroke: () => colour("--dim"), grid: { stroke: () => colour("--grid"), width: 1 }, ticks: { stroke: () => colour("--grid"), width: 1 }, font: "11px system-ui,sans-serif" };
      this.plot = new uPlot({
        width: this.plotHost.clientWidth, height: HEIGHT, series, bands,
        legend: { show: false }, padding: [null, page.lines.length > 1 ? 20 : null, null, null],
        cursor: { sync: { key: "steps", filters: { pub: (type) => type === "mousemove" || type === "mouseleave" } }, drag: { x: true, y: false, dist: 5 }, points: { size: 7 } },
        scales: { x: { time: false, range: (_, low, high) => low === high ? [low - 1, high + 1] : [low, high] }, y: { distr: this.log ? 3 : 1, range: (_, low, high) => this.range(low, high) } },
        axes: [{ ...axis, size: 34, label: "optimizer step", labelSize: 14, labelFont: "11px system-ui,sans-serif", labelGap: 0 },
               { ...axis, size: 56, values: (_, ticks) => ticks.map((tick) => tick == null ? "" : number(tick)) }],
        hooks: { setCursor: [() => this.hover()], setScale: [(plot, key) => { if (key === "x") this.noteZoom(plot); }], draw: [(plot) => this.letters(plot)] },
      }, data, this.plotHost);
    }
    // A change of nothing looks flat: the axis spans at least a fiftieth of the value, or what counts for this measure.
    range(low, high) {
      if (low == null) return [0, 1];
      if (this.log) return uPlot.rangeLog(low, high, 10, true);
      const least = Math.max(this.chart.least, Math.abs(low + high) / 100);
      if (high - low < least) return [(low + high - least) / 2, (low + high + least) / 2];
      return [low - 0.05 * (high - low), high + 0.05 * (high - low)];
    }
    noteZoom(plot) {
      const { min, max } = plot.scales.x;
      this.zoomed = this.whole != null && min != null && this.whole[0] !== this.whole[1] && (min > this.whole[0] || max < this.whole[1]);
      this.figure.toggleAttribute("data-zoomed", this.zoomed);
    }
    // Values under the pointer, of the nearest step that a line has; without a pointer, the last ones.
    hover() {
      const plot = this.plot, steps = plot.data[0];
      if (!steps.length) { this.output.textContent = ""; return; }
      const at = Math.min(plot.cursor.idx ?? Infinity, steps.length - 1);
      const told = this.shown.map(({ index, at: series }) => {
        const values = plot.data[series];
        let near = at;
        for (let off = 0; off < steps.length && values[near] == null; off++) near = values[at - off] != null ? at - off : at + off;
        const line = page.lines[index];
        return `${page.lines.length > 1 ? `${line.letter} ` : ""}${number(values[near])}`;
      });
      this.output.textContent = `step ${steps[at]}: ${told.join(" · ")}${this.shown.some(({ smoothed }) => smoothed) ? " (smoothed)" : ""}`;
    }
    // The letter of the legend beside the end of each line, so that no colour has to be matched.
    letters(plot) {
      if (page.lines.length < 2) return;
      const { ctx } = plot, ratio = devicePixelRatio, height = 12 * ratio;
      const ends = this.shown.map(({ index, at }) => {
        const last = plot.data[at].findLastIndex((value, step) => value != null && plot.data[0][step] <= plot.scales.x.max);
        return last < 0 ? null : { index, y: plot.valToPos(plot.data[at][last], "y", true) };
      }).filter(Boolean).sort((one, other) => one.y - other.y);
      ends.forEach((end, at) => { if (at) end.y = Math.max(end.y, ends[at - 1].y + height); });
      ctx.save();
      ctx.font = `bold ${11 * ratio}px system-ui,sans-serif`;
      ctx.textAlign = "left";
      ctx.textBaseline = "middle";
      for (const { index, y } of ends) {
        ctx.fillStyle = colour(`--c${index % 8}`);
        ctx.fillText(page.lines[index].letter, plot.bbox.left + plot.bbox.width + 5 * ratio, y);
      }
      ctx.restore();
    }
    save() {
      const thinned = this.chart.lines.some((line) => line?.thinned) ? " (thinned)" : "";
      const rows = [["line", "step", `${this.chart.key}${thinned}`, "lowest", "highest"]];
      this.chart.lines.forEach((line, index) => line?.x.forEach((step, at) =>
        rows.push([page.lines[index].name, step, line.y[at] ?? "", line.low?.[at] ?? "", line.high?.[at] ?? ""])));
      save(`${this.chart.key.replaceAll("/", "-")}${thinned && "-thinned"}`, rows);
    }
  }

  const each = (act) => charts.forEach((chart) => { if (chart.plot) act(chart); });
  // Only charts in sight are drawn: a run has dozens, and most are folded away.
  const sight = new IntersectionObserver((entries) => {
    for (const { isIntersecting, target } of entries) {
      const chart = charts.get(target.dataset.chart);
      if (isIntersecting && chart && !chart.plot) chart.draw();
    }
  }, { rootMargin: "300px" });
  const drawCharts = () => {
    for (const section of $$("[data-charts]")) {
      const own = page.charts.filter((chart) => chart.section === section.dataset.charts);
      section.hidden = !own.length;
      for (const chart of own) {
        if (!charts.has(chart.key)) charts.set(chart.key, new Chart($(".plots", section)));
        charts.get(chart.key).set(chart);
      }
    }
    $(".tools").hidden = !page.charts.length;
    for (const chart of charts.values()) {  // once all have their places, and so their widths
      if (!chart.plot && chart.figure.clientWidth && chart.figure.getBoundingClientRect().top < innerHeight) chart.draw();
    }
  };
  const drawLegend = () => {
    if (page.lines.length < 2) return;
    $(".legend").replaceChildren(...page.lines.map((line, index) => {
      const sample = document.createElementNS("http://www.w3.org/2000/svg", "svg");
      const path = document.createElementNS("http://www.w3.org/2000/svg", "path");
      for (const [name, value] of [["d", "M0 6H34"], ["stroke", "currentColor"], ["stroke-width", 2.5], ["stroke-dasharray", DASHES[index % 8].join(" ")]]) path.setAttribute(name, value);
      sample.setAttribute("class", `f${index % 8}`);
      sample.append(path);
      const button = make("button", { "aria-pressed": !hidden.has(index), title: line.about }, sample, make("span", {}, make("b", { text: line.letter }), ` ${line.name}`));
      button.addEventListener("click", () => {
        if (!hidden.delete(index)) hidden.add(index);
        button.setAttribute("aria-pressed", !hidden.has(index));
        each((chart) => chart.draw());
      });
      return button;
    }));
  };

  // --- gallery: the stored evaluations ---

  const state = { before: 0, after: null, wipe: 0, sort: "order", measure: 0, most: 60 };

  const value = (variant, item) => page.gallery.cells[variant]?.[item]?.v[state.measure];
  const order = () => {
    const { items, variants } = page.gallery, last = state.after, columns = page.gallery.columns;
    const change = (item) => columns
      ? Math.max(...variants.map((_, v) => Math.abs((value(v, item) ?? 0) - (value(0, item) ?? 0))))
      : Math.abs((value(last, item) ?? 0) - (value(state.before, item) ?? 0));
    const sign = page.gallery.measures[state.measure]?.lower ? -1 : 1;
    const key = { best: (i) => -sign * (value(last, i) ?? -sign * Infinity), worst: (i) => sign * (value(last, i) ?? sign * Infinity), changed: (i) => -change(i) }[state.sort];
    const numbers = items.map((_, item) => item).filter((item) => columns || page.gallery.cells[last]?.[item]);
    return key ? numbers.map((item) => [key(item), item]).sort((a, b) => a[0] - b[0] || a[1] - b[1]).map(([, item]) => item) : numbers;
  };
  const picture = (one, label) => {
    const image = make("img", { alt: label, src: source(one.i), decoding: "async" });
    image.addEventListener("load", () => image.classList.toggle("small", image.naturalWidth < 200));
    return image;
  };
  const stack = (item) => {
    const { cells, variants } = page.gallery, before = cells[state.before]?.[item], after = cells[state.after][item];
    const node = make("div", { class: "stack" });
    if (before && state.before !== state.after) node.append(picture(before, `before: ${variants[state.before].label}`));
    node.append(picture(after, `after: ${variants[state.after].label}`));
    wipe(node);
    return node;
  };
  const wipe = (node) => {
    const over = node.children[1];
    if (over) over.style.clipPath = `inset(0 0 0 ${state.wipe}%)`;
  };
  const says = (item) => {
    const { cells, items, measures, columns } = page.gallery, node = make("div");
    const line = (name, text) => node.append(make("p", { class: "says" }, make("b", { text: `${name} ` }), text));
    if (items[item].text != null) line("to write", items[item].text);
    else if (items[item].prompt != null) line("prompt", items[item].prompt);
    if (columns) return node;
    const [before, after] = [cells[state.before]?.[item], cells[state.after][item]];
    const both = (of) => before && state.before !== state.after ? `${of(before)} → ${of(after)}` : of(after);
    if (after.read != null) line("read", both((one) => one.read ?? "–"));
    if (measures.length) line(measures[state.measure].name, both((one) => number(one.v[state.measure], 3)));
    return node;
  };
  const columnsOf = (item) => make("div", { class: "row" }, ...page.gallery.variants.map((variant, v) => {
    const one = page.gallery.cells[v][item];
    const frame = make("figure", {}, one ? make("div", { class: "stack" }, picture(one, variant.label)) : make("p", { class: "note", text: "no image" }));
    const told = [variant.label, one?.read != null ? `read ${one.read}` : null, one && page.gallery.measures.length ? `${page.gallery.measures[state.measure].name} ${number(one.v[state.measure])}` : null];
    frame.append(make("figcaption", { text: told.filter(Boolean).join(" · ") }));
    return frame;
  }));
  const tile = (item) => {
    const open = make("button", { class: "open", title: "Full size", onclick: () => full(item) }, page.gallery.columns ? columnsOf(item) : stack(item));
    return make("article", { class: "tile", "data-item": item }, open, says(item));
  };
  const full = (item) => {
    const dialog = $("#full"), about = page.gallery.items[item];
    const close = make("button", { text: "Close", onclick: () => dialog.close() });
    const shown = page.gallery.columns ? columnsOf(item) : stack(item);
    dialog.replaceChildren(close, make("p", { class: "note", text: `example ${about.example}, image ${about.index}${about.prompt != null ? `: ${about.prompt}` : ""}` }), shown);
    if (shown.children.length > 1 && !page.gallery.columns) dialog.append(make("label", {}, "after ", slider("wipe", 100, state.wipe, (value) => { state.wipe = value; wipe(shown); }), " before"));
    dialog.append(says(item));
    dialog.showModal();
  };
  const slider = (name, max, value, act) => make("input", { type: "range", name, min: 0, max, value, "aria-label": name, oninput: (event) => act(Number(event.target.value)) });
  const select = (name, options, chosen, act) => {
    const node = make("select", { name, onchange: (event) => act(event.target.value) }, ...options.map(([key, text]) => make("option", { value: key, text, selected: String(key) === String(chosen) })));
    return make("label", {}, name, node);
  };
  const fill = () => {
    const items = order();
    $("#gallery .tiles").replaceChildren(...items.slice(0, state.most).map(tile));
    $("#gallery .more").hidden = items.length <= state.most;
  };
  // New controls; where there are as many, those that are there get their values: a user may hold one.
  const renew = (host, controls) => {
    const parts = "select, input, output", now = controls.flatMap((one) => $$(parts, one)), old = $$(parts, host);
    if (old.length !== now.length) host.replaceChildren(...controls);
    else old.forEach((node, at) => {
      if (node.matches("output")) node.textContent = now[at].textContent;
      else {
        const { value } = now[at];  // before its options are taken away
        if (node.matches("input")) node.max = now[at].max;
        else if (node.textContent !== now[at].textContent) node.replaceChildren(...now[at].children);
        node.value = value;
      }
    });
  };
  const chosen = (key) => (at) => {
    state[key] = key === "sort" ? at : Number(at);
    state.follow = state.after === page.gallery.variants.length - 1;
    for (const label of $$("#gallery .controls output")) label.textContent = page.gallery.variants[state.after].label;
    fill();
  };
  const drawGallery = () => {
    const gallery = page.gallery, root = $("#gallery");
    if (root) root.hidden = !gallery?.items.length;
    if (!root || root.hidden) return;
    const last = gallery.variants.length - 1;
    if (state.after == null || state.follow || state.after > last) state.after = last;
    state.before = Math.min(state.before, last);  // evaluations may have been deleted
    state.follow = state.after === last;
    if (!gallery.measures[state.measure]) state.measure = 0;
    $(".note", root).textContent = gallery.note;
    $(".tiles", root).classList.toggle("wide", gallery.columns);
    const label = make("output", { text: gallery.variants[state.after].label });
    const controls = gallery.columns ? [] : [
      select("before", gallery.variants.map((variant, at) => [at, variant.label]), state.before, chosen("before")),
      make("label", {}, "after", slider("step", last, state.after, chosen("after")), label),
      make("label", {}, "show after", slider("wipe all", 100, state.wipe, (value) => { state.wipe = value; $$("#gallery .stack").forEach(wipe); }), "before"),
    ];
    controls.push(select("sort", [["order", "in order"], ["best", "best first"], ["worst", "worst first"], ["changed", "most changed"]], state.sort, chosen("sort")));
    if (gallery.measures.length) controls.push(select("by", gallery.measures.map((measure, at) => [at, measure.name]), state.measure, chosen("measure")));
    renew($(".controls", root), controls);
    fill();
  };

  // --- the page, and its updates ---

  const drawAll = (withGallery) => { drawLegend(); drawCharts(); if (withGallery) drawGallery(); ages(); };
  let held = false, kept = null;  // nothing changes under a pressed pointer: what came meanwhile is shown after it
  const show = (news) => {
    const shown = JSON.stringify([page.gallery, images ??= read("#images")]);
    page = news.page;
    images = news.images;
    kept = null;
    setParts(news.parts);
    drawAll(JSON.stringify([page.gallery, images]) !== shown);
  };
  const hold = (event) => {
    held = event.type !== "pointercancel" && event.buttons > 0;
    if (!held && kept) setTimeout(() => { if (!held && kept) show(kept); });  // after the click
  };
  const setParts = (parts) => {
    for (const [key, html] of Object.entries(parts)) {
      const host = $(`[data-part="${key}"]`);
      if (host.dataset.html === html) continue;
      const open = $$("details[open] > summary", host).map((one) => one.textContent);
      host.innerHTML = html;  // escaped where the server made it
      host.dataset.html = html;
      for (const one of $$("details > summary", host)) one.parentNode.open = open.includes(one.textContent);
      addTools(host);
    }
  };
  const follow = async (version, pause) => {
    const started = performance.now();
    let news = null;
    try {
      const answer = await fetch(`data?since=${encodeURIComponent(version)}`, { cache: "no-store" });
      if (answer.status === 200) news = await answer.json();
      else if (answer.status !== 204) throw new Error(`status ${answer.status}`);
    } catch {
      $("#lost").hidden = false;
      pause = Math.min(2 * pause, 60000);
      setTimeout(() => follow(version, pause), pause);
      return;
    }
    $("#lost").hidden = true;
    try {  // an error in drawing is none of the connection
      if (news && held) kept = news;
      else if (news) show(news);
    } finally {
      pause = Math.max(page.live, 10 * (performance.now() - started));  // a large page takes a tenth of the time at most
      setTimeout(() => follow(news?.page.version ?? version, pause), pause);
    }
  };

  $("#smoothing").addEventListener("input", (event) => {
    smoothing = Number(event.target.value);
    event.target.nextElementSibling.textContent = smoothing ? smoothing.toFixed(2) : "off";
    each((chart) => chart.draw());
  });
  $("#reset").addEventListener("click", () => each((chart) => { chart.zoomed = false; chart.draw(); }));
  $$("#gallery .more").forEach((button) => button.addEventListener("click", () => { state.most += 240; fill(); }));
  $("#full").addEventListener("close", () => { if (page.gallery && !page.gallery.columns) $$("#gallery .stack").forEach(wipe); });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => each((chart) => chart.draw()));
  addEventListener("beforeprint", () => charts.forEach((chart) => { if (!chart.plot && chart.figure.clientWidth) chart.draw(); }));
  for (const type of ["pointerdown", "pointermove", "pointerup", "pointercancel"]) addEventListener(type, hold, true);
  addTools(document);
  drawAll(true);
  setInterval(ages, 5000);
  if (page.live) setTimeout(() => follow(page.version, page.live), page.live);
  document.documentElement.dataset.ready = "true";
})();
