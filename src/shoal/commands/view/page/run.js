// The Run view: a verdict, how far the run is, its main curves, before and after, what moves the reward, what happened
// when, further curves, settings.

import { addressOf, change, here, remember, remembered } from "./address.js";
import { Chart, varies } from "./charts.js";
import { comparisonBlock } from "./compare.js";
import { isFile, load } from "./data.js";
import { count, duration, el, num, replace, stateBox, table } from "./dom.js";
import { progressOf } from "./home.js";
import { exampleLink, findingsIn } from "./lint.js";

const MOST_CHARTS = 60, MOST_FINDINGS = 4, MOST_OVERLAID = 3;
const SMOOTHING = 0.6; // unless the address says otherwise
const LINT_MILLISECONDS = 60_000; // of a run that is written, between two looks for findings
const IMPORTANT = ["entropy", "kl", "grad_norm", "completions/length_mean", "completions/truncated", "groups/nonzero_std",
  "clip/fraction", "sampler_gap/logprob_mean", "throughput/sample_tokens_per_second"];
const pins = new Set((remembered("pins") ?? "").split(" ").filter(Boolean));

/** Draws the view into `node`; gives back what keeps it up to date. */
export async function showRun(node, parameters, context) {
  const names = chosenRuns(parameters, context);
  replace(node, stateBox("loading", `Reading ${names.join(", ")} …`));
  const view = { names, charts: new Map(), records: [], curves: [], node, context };
  await readRuns(view, parameters);
  drawRun(view, parameters);
  readFindings(view);
  return {
    update: () => updateRun(view, here().parameters),
    moved: (next) => {
      if (String(chosenRuns(next, context)) !== String(names)) return false;
      updateCharts(view, next);
      return true;
    },
    restyle: () => view.charts.forEach((chart) => chart.update(chart.series, { redraw: true })),
    close: () => { view.closed = true; view.charts.forEach((chart) => chart.destroy()); },
    keys: {},
  };
}

export function chosenRuns(parameters, context) {
  const known = context.runs.map((run) => run.name);
  const wanted = (parameters.runs ?? parameters.run ?? "").split(",").filter((name) => known.includes(name));
  return wanted.length ? wanted : known.slice(0, context.home ? 1 : MOST_OVERLAID);
}

async function readRuns(view, parameters) {
  const range = rangeOf(parameters);
  const limits = range ? { first: range[0], last: range[1] } : {};
  [view.records, view.curves] = await Promise.all([
    Promise.all(view.names.map((run) => load("overview", { run }))),
    Promise.all(view.names.map((run) => load("curves", isFile ? { run } : { run, ...limits }))),
  ]);
  view.comparison = view.names.length > 1 ? await load("compare", { runs: view.names.join(",") }).catch(() => null) : null;
}

/** Lint reads many texts: it is asked for after the curves stand, and of a live run once a minute. */
async function readFindings(view) {
  if (view.closed || view.names.length > 1 || Date.now() - (view.linted ?? 0) < LINT_MILLISECONDS) return;
  view.linted = Date.now();
  let record;
  do {
    record = await load("lint", { run: view.names[0] }).catch(() => null);
    if (!record || view.closed) return;
    view.findings = record;
    view.context.showFindings(view.names[0], findingsIn(record).length);
    drawFindings(view);
  } while (!record.done && !isFile && await new Promise((resolve) => { setTimeout(() => resolve(true), 500); }));
}

function drawFindings(view) {
  if (!view.findings) return;
  const [run] = view.names, found = findingsIn(view.findings);
  replace(view.parts.count, found.length ? ["; ", el("a", { href: addressOf("lint", { run }), text: count(found.length, "finding") })] : null);
  replace(view.parts.findings, !found.length ? null : el("section", { class: "card" }, el("h2", { text: "Findings, the worst first" }),
    el("ol", { class: "findings" }, found.slice(0, MOST_FINDINGS).map((one) => el("li", {}, el("strong", { text: one.title }), " ",
      one.examples.length ? exampleLink(run, one.examples[0], "a group that shows it") : null)))));
}

function rangeOf(parameters) {
  const low = Number.parseFloat(parameters.from), high = Number.parseFloat(parameters.to);
  return Number.isFinite(low) && Number.isFinite(high) && high > low ? [low, high] : null;
}

/** Metric -> its series, one a run, of curves by step and of evaluations; `x` by step, time or tokens. */
function seriesOf(view, metric) {
  return view.names.map((name, place) => {
    const evaluation = view.records[place].evaluations[metric], curves = view.curves[place];
    const axis = here().parameters.x, across = curves[axis] ?? curves.x;
    if (evaluation) return { name, place, ...evaluation, x: evaluation.x.map((step) => along(curves, axis, step)) };
    return { name, place, x: curves.y[metric] ? across : [], y: curves.y[metric] ?? [] };
  }).filter((one) => one.x.length);
}

/** Seconds or tokens up to a step; the step itself where the run did not record them. */
function along(curves, axis, step) {
  if (!curves[axis]) return step;
  const place = curves.x.findLastIndex((known) => known <= step);
  return place < 0 ? 0 : curves[axis][place];
}

function axisOf(view, { x: axis }) {
  const [curves] = view.curves;
  return { name: curves[axis] ? axis : "step", toX: (step) => along(curves, axis, step),
    toStep: (value) => (curves[axis] ? curves.x[Math.max(0, curves[axis].findLastIndex((known) => known <= value))] : value) };
}

function drawRun(view, parameters) {
  const { node, records } = view, several = view.names.length > 1;
  view.parts = { status: el("div", { class: "cards" }), facts: el("div"), controls: el("div"), main: el("div", { class: "charts main" }),
    topics: el("div"), settings: el("div"), count: el("span"), findings: el("div"), verdict: el("div") };
  drawVerdict(view);
  drawStatus(view);
  drawFacts(view);
  drawControls(view, parameters);
  drawTopics(view, parameters);
  drawSettings(view);
  const warning = view.comparison?.warning;
  replace(node, el("div", { class: "controls" }, el("h1", { text: view.names.join(" and ") }), several
    ? el("a", { href: addressOf("home", { runs: view.names.join(",") }), text: "choose other runs" }) : null),
    records.flatMap((record) => record.problems.map((text) => el("p", { class: "notice", text }))),
    warning ? el("p", { class: "notice", role: "note", text: warning }) : null,
    view.parts.verdict, view.parts.status, several ? view.parts.facts : null, view.parts.controls, view.parts.main,
    view.parts.findings, several ? null : view.parts.facts,
    view.parts.topics, view.parts.settings);
}

/** The sentence that says how it goes; what stands in backticks is a name. */
function drawVerdict(view) {
  const several = view.names.length > 1;
  replace(view.parts.verdict, view.records.map(({ name, verdict: { level, text, detail } }) => el("div", { class: `card verdict ${level}` },
    el("p", { class: "sentence" }, several ? el("strong", { text: `${name}: ` }) : null, minus(text).split("`").map((part, place) =>
      (place % 2 ? el("code", { text: part }) : part)), several ? null : view.parts.count),
    detail && !several ? el("p", { class: "faint", text: minus(detail) }) : null)));
}

function minus(text) {
  return text.replace(/(^|\s)-(?=\d)/g, "$1−");
}

function drawStatus(view) {
  replace(view.parts.status, view.records.map((record, place) => {
    const { step, steps, seconds, seconds_left: left, step_seconds: lately } = record.progress;
    const bar = steps && step < steps ? el("progress", { max: steps, value: step, "aria-label": `step ${step} of ${steps}` }) : null;
    const facts = [steps ? `step ${num(step)} of ${num(steps)}` : `step ${num(step)}`,
      seconds ? `${duration(seconds)} in steps` : "", left ? `${duration(left)} left` : "",
      lately ? `${num(lately)} s a step lately` : "",
      record.checkpoints.length ? `saved: ${record.checkpoints.slice(-4).join(", ")}` : ""].filter(Boolean);
    return el("div", { class: "card status" },
      el("div", {}, view.names.length > 1 ? [el("span", { class: "swatch", "data-series": (place % 6) + 1 }),
        el("strong", { dir: "auto", text: record.name }), " "] : null, progressOf(record.progress)),
      bar, el("div", { class: "faint", text: facts.join("  ·  ") }));
  }));
}

function shownValue(value) {
  return value === null ? "–" : typeof value === "string" ? value : JSON.stringify(value);
}

/** A loss is not taken for a gain at a glance: sign, arrow and colour. */
function changeOf(text) {
  const sign = Number.parseFloat(text) || 0;
  return el("span", { class: sign > 0 ? "up" : sign < 0 ? "down" : null, text: `${sign > 0 ? "▲ " : sign < 0 ? "▼ " : ""}${minus(text)}` });
}

function drawFacts(view) {
  const several = view.names.length > 1;
  const parts = view.records.flatMap((record) => {
    const title = several ? ` of ${record.name}` : "";
    return el("div", { class: several ? "columns even" : "columns" },
      several ? null : el("section", { class: "card" }, el("h2", { text: `Before and after${title}` }),
        record.table.length ? table(["figure", "before", "after", "change"], record.table.map(([...cells]) =>
          [...cells.slice(0, 3), changeOf(cells[3])]), `Before and after${title}`)
          : el("p", { class: "faint", text: "No evaluation so far." })),
      el("div", { class: several ? "flat" : null }, record.drivers.length ? el("section", { class: "card" }, el("h2", { text: `What moves the reward${title}` }),
        table(["function", "weight", "first", "last", "adds"], record.drivers.slice(1).map((row) => [
          row.function, row.weight === null ? "–" : num(row.weight), num(row.first), num(row.last),
          changeOf(row.adds === null ? "–" : (row.adds > 0 ? "+" : "") + num(row.adds).replace("−", "-"))]), `What moves the reward${title}`),
        el("p", {}, `The reward went from ${num(record.drivers[0].first)} to ${num(record.drivers[0].last)}.`),
        el("p", { class: "faint", text: (record.drivers[0].over === 1 ? "The first and the last step"
          : `Means of the first and the last ${record.drivers[0].over} steps`)
          + "; what the change adds to the reward, by the function's weight." })) : null,
      drawEventList(record, title)));
  });
  replace(view.parts.facts, several ? comparisonBlock(view) : null, parts);
}

function drawEventList(record, title) {
  const shown = record.events.filter((event) => event.level !== "evaluation");
  const line = (event) => el("li", { class: event.level },
    event.step ? el("a", { href: addressOf("groups", { run: record.name, filter: `step=${event.step} set=train` }),
      text: event.last_step > event.step ? `steps ${event.step} to ${event.last_step}` : `step ${event.step}` }) : "at the start", " ", el("span", { class: `badge ${event.level}`, text: event.level }), " ",
    el("span", { dir: "auto", text: event.text }));
  return el("section", { class: "card" }, el("h2", { text: `Warnings, failures and spikes${title}` }),
    shown.length ? el("ul", { class: "events", tabindex: "0", "aria-label": "events" }, shown.map(line))
      : el("p", { class: "faint", text: "None so far." }));
}

function drawControls(view, parameters) {
  const set = (key, value, draw = updateCharts) => {
    change({ [key]: value }, { quietly: true });
    draw(view, here().parameters);
  };
  const smoothing = el("input", { type: "range", id: "smooth", min: 0, max: 0.98, step: 0.02, value: parameters.smooth ?? SMOOTHING,
    on: { input: (event) => set("smooth", event.target.value) } });
  const log = el("input", { type: "checkbox", id: "log", on: { change: (event) => set("log", event.target.checked ? "1" : "") } });
  log.checked = parameters.log === "1";
  const axes = ["step", ...["time", "tokens"].filter((axis) => view.curves.some((curves) => curves[axis]))];
  const axis = el("select", { id: "x", on: { change: (event) => set("x", event.target.value === "step" ? "" : event.target.value) } },
    axes.map((value) => el("option", { value, text: value })));
  axis.value = axes.includes(parameters.x) ? parameters.x : "step";
  const search = el("input", { type: "search", id: "search", "aria-label": "Search curves", placeholder: "search curves", value: parameters.curve ?? "",
    on: { input: (event) => set("curve", event.target.value.trim(), showFound) } });
  replace(view.parts.controls, el("div", { class: "controls", role: "group", "aria-label": "Curves" },
    search, el("label", { for: "x" }, "by ", axis), el("label", {}, "Smoothing ", smoothing), el("label", {}, log, " Log axis"),
    el("button", { type: "button", text: "All steps", on: { click: () => zoom(view, null) } }),
    el("span", { class: "faint wide", text: "Drag to zoom, click for a step's groups." })));
}

/** Of the curves those whose names contain what is searched for; their topics are unfolded. */
function showFound(view, { curve: text = "" }) {
  view.charts.forEach((chart, metric) => { chart.node.hidden = !metric.includes(text.toLowerCase()); });
  view.parts.topics.querySelectorAll(".topic").forEach((topic) => {
    const found = topic.querySelectorAll(".chart:not([hidden])").length;
    topic.hidden = text !== "" && !found;
    if (topic.tagName === "DETAILS") topic.open = text !== "" && found > 0;
  });
}

async function zoom(view, range) {
  change({ from: range ? range[0] : "", to: range ? range[1] : "" }, { quietly: true });
  if (!isFile) {
    const limits = range ? { first: range[0], last: range[1] } : {};
    view.curves = await Promise.all(view.names.map((run) => load("curves", { run, ...limits })));
  }
  updateCharts(view, here().parameters);
}

function chartOptions(view, parameters, metric) {
  const about = view.records.map((record) => record.about[metric]).find(Boolean) ?? {};
  return {
    title: metric, unit: about.unit === "1" ? "" : about.unit, meaning: about.meaning,
    events: view.records.flatMap((record) => record.events), axis: axisOf(view, parameters),
    smoothing: metric.startsWith("evaluate/") ? 0 : Number.parseFloat(parameters.smooth ?? SMOOTHING) || 0, log: parameters.log === "1",
    range: rangeOf(parameters), onZoom: (range) => zoom(view, range), pinned: pins.has(metric),
    onPin: () => {
      if (!pins.delete(metric)) pins.add(metric);
      remember("pins", [...pins].join(" "));
      drawTopics(view, here().parameters);
    },
    onStep: (step) => view.context.open("groups", { run: view.names[0], filter: `step=${step} set=train` }),
  };
}

/** Reward and accuracy large, then what was pinned and what matters, the rest folded by topic; each curve once. */
function drawTopics(view, parameters) {
  view.charts.forEach((chart) => chart.destroy());
  view.charts.clear();
  const large = [...new Set(view.records.flatMap((record) => record.main))], missing = view.comparison?.not_comparable ?? [];
  const of = (record, title) => record.topics.find((topic) => topic.title === title)?.metrics ?? [];
  const all = new Set(view.records.flatMap((record) => record.topics.flatMap((topic) => topic.metrics)));
  const titles = [...new Set(view.records.flatMap((record) => record.topics.map((topic) => topic.title)))];
  const charts = (metrics, isLarge = false) => {
    const left = metrics.filter((metric) => all.has(metric) && !view.charts.has(metric));
    const shown = left.filter((metric) => isLarge || pins.has(metric) || varies(seriesOf(view, metric)));
    const constant = left.filter((metric) => !shown.includes(metric));
    const nodes = shown.slice(0, MOST_CHARTS).map((metric) => {
      const chart = new Chart(seriesOf(view, metric), { ...chartOptions(view, parameters, metric), large: isLarge });
      view.charts.set(metric, chart);
      return chart.node;
    });
    return { nodes, constant };
  };
  const note = (title) => (missing.includes(title) ? el("p", { class: "faint", text: "Not comparable between these runs." }) : null);
  replace(view.parts.main, charts(large, true).nodes);
  const open = [["Pinned", [...pins]], ["What matters", IMPORTANT]].map(([title, metrics]) => {
    const { nodes } = charts(metrics);
    return nodes.length ? el("section", { class: "topic" }, el("h2", { text: title }), el("div", { class: "charts" }, nodes)) : null;
  });
  const folded = titles.map((title) => {
    const { nodes, constant } = charts(view.records.flatMap((record) => of(record, title)).filter((metric, place, list) => list.indexOf(metric) === place));
    const said = constant.map((metric) => `${metric} ${num(seriesOf(view, metric)[0]?.y.find((value) => value !== null))}`);
    return nodes.length || said.length ? el("details", { class: "topic" }, el("summary", {}, el("strong", { text: title }),
      el("span", { class: "faint", text: nodes.length ? ` ${count(nodes.length, "curve")}` : " constant" })), note(title), el("div", { class: "charts" }, nodes),
    said.length ? el("p", { class: "faint constant", text: `Constant: ${said.join(", ")}` }) : null) : null;
  });
  const empty = view.curves.every((curves) => !curves.x.length);
  replace(view.parts.topics, empty ? stateBox("empty", "No step has been made yet: curves appear after the first.") : null, open, folded);
  view.numMetrics = countMetrics(view);
  if (parameters.curve) showFound(view, parameters);
}

function countMetrics(view) {
  return view.records.reduce((sum, record) => sum + record.topics.reduce((all, topic) => all + topic.metrics.length, 0), 0);
}

function updateCharts(view, parameters) {
  view.charts.forEach((chart, metric) => chart.update(seriesOf(view, metric), chartOptions(view, parameters, metric)));
}

async function updateRun(view, parameters) {
  await readRuns(view, parameters);
  drawVerdict(view);
  drawStatus(view);
  drawFacts(view);
  if (countMetrics(view) !== view.numMetrics || view.charts.size === 0) drawTopics(view, parameters);
  else updateCharts(view, parameters);
  readFindings(view);
}

function drawSettings(view) {
  const shown = shownValue, parts = [];
  view.records.forEach((record) => {
    const own = record.settings.filter((row) => row.differs);
    const title = view.names.length > 1 ? ` of ${record.name}` : "";
    parts.push(el("h2", { text: `Settings${title} that differ from the defaults` }),
      own.length ? table(["key", "value", "default"], own.map((row) => [row.key, shown(row.value), shown(row.default)]),
        `Settings that differ from the defaults${title}`) : el("p", { class: "faint", text: "None." }),
      el("details", {}, el("summary", { text: `All ${record.settings.length} settings${title}` }),
        table(["key", "value", "default"], record.settings.map((row) => [el("span", { title: row.help, text: row.key }),
          shown(row.value), shown(row.default)]), `All settings${title}`)));
  });
  replace(view.parts.settings, el("section", { class: "card" }, parts));
}

