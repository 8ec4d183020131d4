// The Run view: how far it is, before and after, what moves the reward, what happened when, curves, settings.

import { addressOf, change, here } from "./address.js";
import { Chart, varies } from "./charts.js";
import { isFile, load } from "./data.js";
import { duration, el, num, replace, stateBox, table } from "./dom.js";

const MOST_CHARTS = 60;
const MOST_OVERLAID = 3; // runs that lie over each other unless one is chosen

/** Draws the view into `node`; gives back what keeps it up to date. */
export async function showRun(node, parameters, context) {
  const names = chosenRuns(parameters, context);
  replace(node, stateBox("loading", `Reading ${names.join(", ")} …`));
  const view = { names, charts: new Map(), records: [], curves: [], node, context };
  await readRuns(view, parameters);
  drawRun(view, parameters);
  return {
    update: () => updateRun(view, here().parameters),
    moved: (next) => {
      if (String(chosenRuns(next, context)) !== String(names)) return false;
      updateCharts(view, next);
      return true;
    },
    restyle: () => view.charts.forEach((chart) => chart.update(chart.series, { redraw: true })),
    close: () => view.charts.forEach((chart) => chart.destroy()),
    keys: {},
  };
}

export function chosenRuns(parameters, context) {
  const known = context.runs.map((run) => run.name);
  const wanted = (parameters.runs ?? parameters.run ?? "").split(",").filter((name) => known.includes(name));
  return wanted.length ? wanted : known.slice(0, known.length <= MOST_OVERLAID ? MOST_OVERLAID : 1);
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

function rangeOf(parameters) {
  const low = Number.parseFloat(parameters.from), high = Number.parseFloat(parameters.to);
  return Number.isFinite(low) && Number.isFinite(high) && high > low ? [low, high] : null;
}

/** Metric -> its series, one a run, of curves by step and of evaluations. */
function seriesOf(view, metric) {
  return view.names.map((name, place) => {
    const evaluation = view.records[place].evaluations[metric], curves = view.curves[place];
    if (evaluation) return { name, place, ...evaluation };
    return { name, place, x: curves.y[metric] ? curves.x : [], y: curves.y[metric] ?? [] };
  }).filter((one) => one.x.length);
}

function drawRun(view, parameters) {
  const { node, records } = view;
  view.charts.forEach((chart) => chart.destroy());
  view.charts.clear();
  view.parts = { status: el("div", { class: "cards" }), facts: el("div"),
    controls: el("div"), topics: el("div"), settings: el("div") };
  drawStatus(view);
  drawFacts(view);
  drawControls(view, parameters);
  drawTopics(view, parameters);
  drawSettings(view);
  const warning = view.comparison?.warning;
  replace(node, el("h1", { text: view.names.join(" and ") }),
    records.flatMap((record) => record.problems.map((text) => el("p", { class: "notice", text }))),
    warning ? el("p", { class: "notice", role: "note", text: warning }) : null,
    view.parts.status, view.parts.facts, view.parts.controls, view.parts.topics, view.parts.settings);
}

function drawStatus(view) {
  replace(view.parts.status, view.records.map((record, place) => {
    const { state, step, steps, seconds, seconds_left: left, step_seconds: lately } = record.progress;
    const bar = steps ? el("progress", { max: steps, value: step, "aria-label": `step ${step} of ${steps}` }) : null;
    const facts = [steps ? `step ${num(step)} of ${num(steps)}` : `step ${num(step)}`,
      seconds ? `${duration(seconds)} in steps` : "", left ? `${duration(left)} left` : "",
      lately ? `${num(lately)} s a step lately` : "",
      record.checkpoints.length ? `saved: ${record.checkpoints.slice(-4).join(", ")}` : ""].filter(Boolean);
    return el("div", { class: "card status" },
      el("div", {}, el("span", { class: "swatch", "data-series": (place % 6) + 1 }),
        el("strong", { dir: "auto", text: record.name }), " ", el("span", { class: `badge ${state}`, text: state })),
      bar, el("div", { class: "faint", text: facts.join("  ·  ") }));
  }));
}

/** Of several runs: their figures next to each other, and the settings in which they differ. */
function drawComparison(view) {
  const figures = [...new Set(view.records.flatMap((record) => record.table.map(([figure]) => figure)))];
  const rows = figures.map((figure) => [figure, ...view.records.flatMap((record) => {
    const [, before = "–", after = "–"] = record.table.find(([name]) => name === figure) ?? [];
    return [before, after];
  })]);
  const head = ["figure", ...view.names.flatMap((name) => [`${name} before`, "after"])];
  return el("div", { class: "columns" },
    el("section", { class: "card" }, el("h2", { text: "Before and after" }), rows.length
      ? table(head, rows, "Before and after") : el("p", { class: "faint", text: "No evaluation so far." })),
    el("section", { class: "card" }, el("h2", { text: "Settings that differ between the runs" }),
      view.comparison?.differing.length ? table(["key", ...view.names], view.comparison.differing.map((row) => [row.key,
        ...row.values.map(shownValue)]), "Settings that differ between the runs")
        : el("p", { class: "faint", text: view.comparison ? "None." : "Not in this file." })));
}

function shownValue(value) {
  return value === null ? "–" : typeof value === "string" ? value : JSON.stringify(value);
}

function drawFacts(view) {
  const several = view.names.length > 1;
  const parts = view.records.flatMap((record) => {
    const title = several ? ` of ${record.name}` : "";
    return el("div", { class: several ? "columns even" : "columns" },
      several ? null : el("section", { class: "card" }, el("h2", { text: `Before and after${title}` }),
        record.table.length ? table(["figure", "before", "after", "change"], record.table, `Before and after${title}`)
          : el("p", { class: "faint", text: "No evaluation so far." })),
      el("div", { class: several ? "flat" : null }, record.drivers.length ? el("section", { class: "card" }, el("h2", { text: `What moves the reward${title}` }),
        table(["function", "weight", "first", "last", "adds"], record.drivers.map((row) => [
          row.function, row.weight === null ? "–" : num(row.weight), num(row.first), num(row.last),
          el("span", { class: row.adds > 0 ? "up" : row.adds < 0 ? "down" : null,
            text: (row.adds > 0 ? "+" : "") + num(row.adds) })]), `What moves the reward${title}`),
        el("p", { class: "faint", text: (record.drivers[0].over === 1 ? "The first and the last step"
          : `Means of the first and the last ${record.drivers[0].over} steps`)
          + "; what the change adds to the reward, by the function's weight." })) : null,
      drawEventList(record, title)));
  });
  replace(view.parts.facts, several ? drawComparison(view) : null, parts);
}

function drawEventList(record, title) {
  const shown = record.events.filter((event) => event.level !== "evaluation");
  const line = (event) => el("li", { class: event.level },
    event.step ? el("a", { href: addressOf("groups", { run: record.name, filter: `step=${event.step} set=train` }),
      text: `step ${event.step}` }) : "at the start", " ", el("span", { class: `badge ${event.level}`, text: event.level }), " ",
    el("span", { dir: "auto", text: event.text }));
  return el("section", { class: "card" }, el("h2", { text: `Warnings, failures and spikes${title}` }),
    shown.length ? el("ul", { class: "events", tabindex: "0", "aria-label": "events" }, shown.map(line))
      : el("p", { class: "faint", text: "None so far." }));
}

function drawControls(view, parameters) {
  const smoothing = el("input", { type: "range", id: "smooth", min: 0, max: 0.98, step: 0.02,
    value: parameters.smooth ?? 0, on: { input: (event) => change({ smooth: event.target.value === "0" ? ""
      : event.target.value }, { quietly: true }) || updateCharts(view, here().parameters) } });
  const log = el("input", { type: "checkbox", id: "log", on: { change: (event) => {
    change({ log: event.target.checked ? "1" : "" }, { quietly: true });
    updateCharts(view, here().parameters);
  } } });
  log.checked = parameters.log === "1";
  const all = el("button", { type: "button", text: "All steps", on: { click: () => zoom(view, null) } });
  const others = view.context.runs.length > 1 ? el("fieldset", { class: "runs" }, el("legend", { text: "Runs" }),
    view.context.runs.map((run) => {
      const box = el("input", { type: "checkbox", on: { change: (event) => {
        const kept = event.target.checked ? [...view.names, run.name] : view.names.filter((name) => name !== run.name);
        change({ run: "", runs: kept.join(",") });
      } } });
      box.checked = view.names.includes(run.name);
      return el("label", {}, box, " ", run.name);
    })) : null;
  replace(view.parts.controls, el("div", { class: "controls", role: "group", "aria-label": "Curves" },
    el("label", { for: "smooth", text: "Smoothing" }), smoothing,
    el("label", {}, log, " Log axis"), all,
    el("span", { class: "faint wide", text: "Drag over a curve to zoom, double-click for all steps, click for a step's groups." }),
    others));
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
    events: view.records.flatMap((record) => record.events),
    smoothing: metric.startsWith("evaluate/") ? 0 : Number.parseFloat(parameters.smooth) || 0, log: parameters.log === "1",
    range: rangeOf(parameters), onZoom: (range) => zoom(view, range),
    onStep: (step) => view.context.open("groups", { run: view.names[0], filter: `step=${step} set=train` }),
  };
}

function drawTopics(view, parameters) {
  const titles = [...new Set(view.records.flatMap((record) => record.topics.map((topic) => topic.title)))];
  const missing = view.comparison?.not_comparable ?? [];
  const sections = titles.map((title) => {
    const metrics = [...new Set(view.records.flatMap((record) =>
      record.topics.find((topic) => topic.title === title)?.metrics ?? []))];
    const shown = [], constant = [];
    metrics.forEach((metric) => {
      const series = seriesOf(view, metric);
      if (!varies(series)) constant.push(metric);
      else if (title !== "Evaluation" || series.some((one) => one.x.length > 2)) shown.push(metric);
    });
    const few = title === "Evaluation" && !shown.length && metrics.length;
    const grid = el("div", { class: "charts" });
    shown.slice(0, MOST_CHARTS).forEach((metric) => {
      const chart = new Chart(seriesOf(view, metric), chartOptions(view, parameters, metric));
      view.charts.set(metric, chart);
      grid.append(chart.node);
    });
    const said = constant.map((metric) => `${metric} ${num(seriesOf(view, metric)[0]?.y.find((value) => value !== null))}`);
    return el("section", { class: "topic" }, el("h2", { text: title }),
      missing.includes(title) ? el("p", { class: "faint", text: "Not comparable between these runs." }) : null,
      few ? el("p", { class: "faint", text: "Curves appear from the third evaluation on; the table above has the first two." })
        : grid, said.length && !few ? el("p", { class: "faint constant", text: `Constant: ${said.join(", ")}` }) : null);
  });
  const empty = view.curves.every((curves) => !curves.x.length);
  replace(view.parts.topics, empty ? stateBox("empty", "No step has been made yet: curves appear after the first.") : null,
    sections);
  view.numMetrics = countMetrics(view);
}

function countMetrics(view) {
  return view.records.reduce((sum, record) => sum + record.topics.reduce((all, topic) => all + topic.metrics.length, 0), 0);
}

function updateCharts(view, parameters) {
  view.charts.forEach((chart, metric) => chart.update(seriesOf(view, metric), chartOptions(view, parameters, metric)));
}

async function updateRun(view, parameters) {
  await readRuns(view, parameters);
  drawStatus(view);
  drawFacts(view);
  if (countMetrics(view) !== view.numMetrics || view.charts.size === 0) drawTopics(view, parameters);
  else updateCharts(view, parameters);
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

