// The Run view: a verdict, how far the run is, its main curves, before and after, what moves the reward, what happened
// when, further curves, settings.

import { addressOf, change, goTo, here, remember, remembered } from "./address.js";
import { Chart, varies } from "./charts.js";
import { comparisonBlock, noEvaluation } from "./compare.js";
import { isFile, load } from "./data.js";
import { EVALUATIONS, asText, card, changeMark, coded, count, duration, el, gainMark, minus, num, percent, replace, stateBox, table, tableCard } from "./dom.js";
import { progressOf } from "./home.js";
import { exampleLink, findingsIn, readFindings } from "./lint.js";
import { Notes, tagList } from "./notes.js";
import { textNodes } from "./text.js";

const MOST_OVERLAID = 3;
const SMOOTHING = 0.6; // unless the address says otherwise
const LINT_MILLISECONDS = 60_000; // of a run that is written, between two looks for findings
const IMPORTANT = ["entropy", "kl", "grad_norm", "completions/length_mean", "completions/truncated", "groups/nonzero_std",
  "clip/fraction", "sampler_gap/logprob_mean", "throughput/sample_tokens_per_second"];
const MOST_QUESTIONS = 3;
const pins = new Set((remembered("pins") ?? "").split(" ").filter(Boolean));

/** Draws the view into `node`; gives back what keeps it up to date. */
export async function showRun(node, parameters, context) {
  const names = chosenRuns(parameters, context);
  replace(node, stateBox("loading", `Reading ${names.join(", ")} …`));
  const view = { names, charts: new Map(), records: [], curves: [], node, context };
  await readRuns(view, parameters);
  drawRun(view, parameters);
  readLint(view);
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
  [view.records, view.curves] = await Promise.all([
    Promise.all(view.names.map((run) => load("overview", { run }))), readCurves(view.names, rangeOf(parameters))]);
  const [run, other] = view.names;
  view.shared = view.names.length === 2 && !isFile ? await load("shared", { run, other }).catch(() => null) : null;
  view.comparison = view.names.length > 1 ? await load("compare", { runs: view.names.join(",") }).catch(() => null) : null;
}

function readCurves(names, range) {
  const limits = range && !isFile ? { first: range[0], last: range[1] } : {};
  return Promise.all(names.map((run) => load("curves", { run, ...limits })));
}

/** Lint reads many texts: it is asked for after the curves stand, and of a live run once a minute. */
async function readLint(view) {
  if (view.closed || view.names.length > 1 || Date.now() - (view.linted ?? 0) < LINT_MILLISECONDS) return;
  view.linted = Date.now();
  const [run] = view.names;
  await readFindings(run, (record) => {
    view.findings = record;
    view.context.showFindings(run, findingsIn(record).length);
    drawFindings(view);
  }, () => view.closed);
  await readQuestions(view);
}

/** How many questions of evaluations were learned and lost, and the first of them; after all groups were read. */
async function readQuestions(view) {
  if (view.closed || view.names.length > 1 || isFile) return;
  const [run] = view.names;
  const read = (prompts, desc) => load("groups", { run, filter: EVALUATIONS, sort: "change", desc, prompts, limit: MOST_QUESTIONS })
    .catch(() => ({ total: 0, rows: [] }));
  const [learned, lost] = await Promise.all([read("learned", "1"), read("lost", "")]);
  if (view.closed || learned.total + lost.total === 0) return;
  const list = ([prompts, desc, title], { total, rows }) => (total ? [el("h3", {}, el("a", { text: `${num(total)} ${title}`,
    href: addressOf("groups", { run, filter: EVALUATIONS, sort: "change", desc, prompts }) })),
  el("ol", { class: "questions" }, rows.map((row) => el("li", {}, el("a", { href: addressOf("prompt", { run, set: row.set, row: row.row }) },
    textNodes(row.prompt)))))] : null);
  replace(view.parts.questions, card("Evaluation questions, before and after", list(["learned", "1", "learned"], learned),
    list(["lost", "", "lost"], lost)));
}

function drawFindings(view) {
  if (!view.findings) return;
  const [run] = view.names, found = findingsIn(view.findings);
  replace(view.parts.count, found.length ? ["; ", el("a", { href: addressOf("lint", { run }), text: count(found.length, "finding") })] : null);
  replace(view.parts.findings, !found.length ? null : card("Findings, the worst first", el("ol", { class: "findings" }, found.map((one) => el("li", {}, el("strong", { text: one.title }), " ",
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
    topics: el("div"), settings: el("div"), count: el("span"), findings: el("div"), questions: el("div"), verdict: el("div") };
  view.notes = several ? null : new Notes(records[0], view.context.home);
  drawVerdict(view);
  drawStatus(view);
  drawFacts(view);
  drawControls(view, parameters);
  drawTopics(view, parameters);
  if (!several) drawSettings(view);
  const warning = view.comparison?.warning;
  replace(node, el("div", { class: "controls" }, el("h1", { text: view.names.join(" and ") }), several
    ? el("a", { href: addressOf("home", { runs: view.names.join(",") }), text: "choose other runs" }) : null),
    view.notes?.node, records.flatMap((record) => record.problems.map((text) => el("p", { class: "notice", text }))),
    warning ? el("p", { class: "notice", role: "note", text: warning }) : null,
    view.parts.verdict, view.parts.status, several ? view.parts.facts : null, view.parts.controls, view.parts.main,
    view.parts.findings, view.parts.questions, several ? null : view.parts.facts,
    view.parts.topics, view.parts.settings);
}

/** The sentence that says how it goes; what stands in backticks is a name. */
function drawVerdict(view) {
  const several = view.names.length > 1;
  replace(view.parts.verdict, view.records.map(({ name, verdict: { level, text, detail } }) => el("div", { class: `card verdict ${level}` },
    el("p", { class: "sentence" }, several ? el("strong", { text: `${name}: ` }) : null, coded(minus(text)), several ? null : view.parts.count),
    detail && !several ? el("p", { class: "faint", text: minus(detail) }) : null)));
}

function drawStatus(view) {
  replace(view.parts.status, view.records.map((record, place) => {
    const { step, steps, seconds, seconds_left: left, step_seconds: lately } = record.progress;
    const bar = steps && step < steps ? el("progress", { max: steps, value: step, "aria-label": `step ${step} of ${steps}` }) : null;
    const facts = [steps ? `step ${num(step)} of ${num(steps)}` : `step ${num(step)}`,
      seconds ? `${duration(seconds)} in training steps` : "", left ? `${duration(left)} left` : "",
      lately ? `${num(lately)} s a step lately` : "",
      record.checkpoints.length ? `saved: ${record.checkpoints.slice(-4).join(", ")}` : ""].filter(Boolean);
    return el("div", { class: "card status" },
      el("div", {}, view.names.length > 1 ? [el("span", { class: "swatch", "data-series": (place % 3) + 1 }),
        el("strong", { dir: "auto", text: record.name }), " "] : null, progressOf(record.progress)),
      bar, el("div", { class: "faint", text: facts.join("  ·  ") }), view.notes ? null
        : [tagList(record.tags, view.context.home), record.notes ? el("p", { class: "note", dir: "auto", text: record.notes }) : null]);
  }));
}

function drawFacts(view) {
  const several = view.names.length > 1;
  replace(view.parts.facts, several ? comparisonBlock(view) : null, view.records.map((record) => {
    const of = several ? ` of ${record.name}` : "", rows = record.table.map(([figure, before, after, change, sign]) =>
      [figure, minus(before), minus(after), gainMark(change, sign)]);
    return several ? el("div", { class: "flat" }, driversCard(record, of), eventsCard(record, of)) : el("div", { class: "columns" },
      tableCard("Before and after", ["figure", "before", "after", "change"], rows, noEvaluation([record])),
      el("div", {}, driversCard(record, of), eventsCard(record, of)));
  }));
}

/** Of a function that returned None for some completions: the share that it scored, before and after. */
function scoredShare({ scored }) {
  return scored && scored[0] !== null && scored[1] !== null ? ` (scored ${percent(scored[0])} → ${percent(scored[1])})` : "";
}

function driversCard({ drivers, reward_since: since }, of) {
  if (!drivers.length) return null;
  const [{ over }, ...functions] = drivers;
  return card(`What moves the reward in training${of}`, table(["function", "weight", "first", "last", "adds"], functions.map((row) => [
    row.function + scoredShare(row), num(row.weight), num(row.first), num(row.last), row.adds === null ? "–"
      : changeMark(row.adds, num(row.adds), row.sign * row.weight)]),
  `What moves the reward in training${of}`),
  el("p", { class: "faint", text: (over === 1 ? "The first and the last step" : `Means of the first and the last ${over} steps`)
    + (since ? ` after step ${num(since)}, where the run was resumed with other rewards, rows or lengths` : " of training")
    + ", sampled; what the change adds to the reward, by the function's weight."
    + (functions.some((row) => row.scored) ? " Where a function returned None, it adds 0; its own means leave that out." : "") }));
}

function eventsCard(record, of) {
  const shown = record.events.filter((event) => event.level !== "evaluation");
  const line = ({ step, last_step: last, level, text }) => el("li", { class: level }, step ? el("a", { href: addressOf("groups", { run: record.name,
    filter: `step=${step} set=train` }), text: last > step ? `steps ${step} to ${last}` : `step ${step}` }) : "at the start",
  " ", el("span", { class: `badge ${level}`, text: level }), " ", el("span", { dir: "auto", text }));
  return card(`Warnings, failures and spikes${of}`, shown.length ? el("ul", { class: "events", tabindex: "0", "aria-label": "events" },
    shown.map(line)) : el("p", { class: "faint", text: record.progress.has_ended ? "None." : "None so far." }));
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
  view.curves = await readCurves(view.names, range);
  updateCharts(view, here().parameters);
}

/** The band of the recipe that a run follows; by time and tokens as far as the run is. Several runs have none. */
function recipeOf(view, metric) {
  const [{ recipe }] = view.records, [curves] = view.curves, axis = here().parameters.x;
  if (recipe?.metric !== metric || view.names.length > 1) return null;
  const last = curves.x[curves.x.length - 1] ?? 0;
  const kept = recipe.x.map((_, place) => place).filter((place) => !curves[axis] || recipe.x[place] <= last);
  return { ...recipe, x: kept.map((place) => along(curves, axis, recipe.x[place])), low: kept.map((place) => recipe.low[place]),
    high: kept.map((place) => recipe.high[place]) };
}

function chartOptions(view, parameters, metric) {
  const about = view.records.map((record) => record.about[metric]).find(Boolean) ?? {};
  return {
    recipe: recipeOf(view, metric), title: metric, unit: about.unit === "1" ? "" : about.unit, meaning: about.meaning,
    events: view.records.flatMap((record) => record.events), axis: axisOf(view, parameters),
    smoothing: metric.startsWith("evaluate/") ? 0 : Number.parseFloat(parameters.smooth ?? SMOOTHING) || 0, log: parameters.log === "1",
    range: rangeOf(parameters), onZoom: (range) => zoom(view, range), pinned: pins.has(metric),
    onPin: () => {
      if (!pins.delete(metric)) pins.add(metric);
      remember("pins", [...pins].join(" "));
      drawTopics(view, here().parameters);
    },
    onStep: (step) => goTo("groups", { run: view.names[0], filter: `step=${step} set=train` }),
  };
}

/** Reward and accuracy large, then what was pinned and what matters, the rest folded by topic; each curve once. */
function drawTopics(view, parameters) {
  view.charts.forEach((chart) => chart.destroy());
  view.charts.clear();
  const large = [...new Set(view.records.flatMap((record) => record.main))];
  const topics = new Map(); // title -> the metrics of all runs
  view.records.flatMap((record) => record.topics).forEach(({ title, metrics }) =>
    topics.set(title, new Set([...topics.get(title) ?? [], ...metrics])));
  const all = new Set([...topics.values()].flatMap((metrics) => [...metrics]));
  const charts = (metrics, isLarge = false) => {
    const left = metrics.filter((metric) => all.has(metric) && !view.charts.has(metric));
    const shown = left.filter((metric) => isLarge || pins.has(metric) || varies(seriesOf(view, metric)));
    const constant = left.filter((metric) => !shown.includes(metric));
    const nodes = shown.map((metric) => {
      const chart = new Chart(seriesOf(view, metric), { ...chartOptions(view, parameters, metric), large: isLarge });
      view.charts.set(metric, chart);
      return chart.node;
    });
    return { nodes, constant };
  };
  replace(view.parts.main, charts(large, true).nodes);
  const open = [["Pinned", [...pins]], ["What matters", IMPORTANT]].map(([title, metrics]) => {
    const { nodes } = charts(metrics);
    return nodes.length ? el("section", { class: "topic" }, el("h2", { text: title }), el("div", { class: "charts" }, nodes)) : null;
  });
  const folded = [...topics].map(([title, metrics]) => {
    const { nodes, constant } = charts([...metrics]);
    const said = constant.map((metric) => `${metric} ${num(seriesOf(view, metric)[0]?.y.find((value) => value !== null))}`);
    return nodes.length || said.length ? el("details", { class: "topic" }, el("summary", {}, el("strong", { text: title }),
      el("span", { class: "faint", text: nodes.length ? ` ${count(nodes.length, "curve")}` : " the same in all steps" })), el("div", { class: "charts" }, nodes),
    said.length ? el("p", { class: "faint constant", text: `The same in all steps: ${said.join(", ")}` }) : null) : null;
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
  view.notes?.update(view.records[0]);
  drawVerdict(view);
  drawStatus(view);
  drawFacts(view);
  if (countMetrics(view) !== view.numMetrics || view.charts.size === 0) drawTopics(view, parameters);
  else updateCharts(view, parameters);
  readLint(view);
}

/** Of several runs the comparison has them. */
function drawSettings({ parts, records: [record] }) {
  const rows = (settings) => settings.map(({ key, value, default: usual, help }) => [el("span", { title: help, text: key }),
    asText(value), asText(usual)]);
  const head = ["key", "value", "default"], own = tableCard("Settings that differ from the defaults", head,
    rows(record.settings.filter((row) => row.differs)), "None.");
  own.append(el("details", {}, el("summary", { text: `All ${record.settings.length} settings` }),
    table(head, rows(record.settings), "All settings")));
  replace(parts.settings, own);
}
