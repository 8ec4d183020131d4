// The list of runs, the newest first, each as it stands now; two or three that are chosen are compared.

import { addressOf, change, goTo, here } from "./address.js";
import { sparkline } from "./charts.js";
import { load } from "./data.js";
import { asText, count, duration, el, gainMark, minus, num, percent, replace, stateBox } from "./dom.js";
import { isFound, tagList } from "./notes.js";
import { textNodes } from "./text.js";

const MOST_COMPARED = 3, MOST_CHIPS = 4;

export async function showHome(node, parameters, context) {
  const view = { rows: new Map(), boxes: new Map(), chosen: new Set((parameters.runs ?? "").split(",").filter(Boolean)) };
  view.compare = el("button", { type: "button", class: "primary", on: { click: () =>
    goTo("run", { runs: [...view.chosen].join(",") }) } });
  view.body = el("tbody");
  view.notice = el("p", { class: "notice" });
  view.none = el("div");
  view.search = el("input", { type: "search", id: "search", "aria-label": "Search runs", value: parameters.find ?? "",
    placeholder: "name, tag=NAME, note, setting", on: { input: (event) => {
      change({ find: event.target.value }, { quietly: true });
      drawRows(view);
    } } });
  const read = async () => {
    view.records = differencesFirst((await load("home")).rows);
    drawRows(view);
    view.notice.textContent = context.notice;
    view.notice.hidden = !context.notice;
    drawChoice(view);
  };
  await read();
  replace(node, el("div", { class: "controls homeHead" }, el("h1", { text: "Runs" }), view.search, view.compare),
    view.notice,
    el("table", { class: "home" }, el("thead", {}, el("tr", {}, ["compare", "run", "progress", "curve", "before → after",
      "settings that differ"].map((text, place) => el("th", { scope: "col" }, place ? text
      : el("span", { class: "hidden", text }))))), view.body), view.none);
  const moved = ({ find = "" }) => {
    view.search.value = find;
    drawRows(view);
    return true;
  };
  return { update: read, moved, keys: {} };
}

/** The records, in each of which the settings come first that not all of the runs have: few fit in a row. */
function differencesFirst(records) {
  const runsWith = new Map();
  for (const { chips } of records) {
    for (const chip of chips) runsWith.set(JSON.stringify(chip), (runsWith.get(JSON.stringify(chip)) ?? 0) + 1);
  }
  const isShared = (chip) => runsWith.get(JSON.stringify(chip)) === records.length;
  return records.map((record) => {
    const own = record.chips.filter((chip) => !isShared(chip)), shared = record.chips.filter(isShared);
    return { ...record, chips: [...own, ...shared] };
  });
}

/** The runs that are found. Rows that say what they said stay as they are: a live run redraws none but its own. */
function drawRows(view) {
  const focused = document.activeElement, { find = "" } = here().parameters;
  const found = view.records.filter((record) => isFound(record, find));
  const none = view.records.length && !found.length;
  replace(view.none, none ? stateBox("empty", "No run has all these words in its name, tags, note or settings.") : null);
  const rows = found.map((record) => {
    const text = JSON.stringify(record), held = view.rows.get(record.name);
    if (held?.text === text) return held.row;
    const row = homeRow(view, record);
    view.rows.set(record.name, { text, row });
    return row;
  });
  replace(view.body, rows);
  if (focused?.isConnected) focused.focus({ preventScroll: true });
}

function homeRow(view, record) {
  const { name, progress: { state, step, steps, seconds_left: left }, gain, newest, verdict: { level, text } } = record;
  if (!view.boxes.has(name)) {
    view.boxes.set(name, el("input", { type: "checkbox", "aria-label": `compare ${name}`, on: { change: (event) => {
      if (event.target.checked) view.chosen.add(name);
      else view.chosen.delete(name);
      drawChoice(view);
    } } }));
  }
  const began = new Date(record.began * 1000).toLocaleString([], { day: "numeric", month: "short", hour: "2-digit",
    minute: "2-digit" });
  const cut = name.lastIndexOf("/") + 1, format = record.figure.endsWith("/accuracy") ? percent : num;
  return el("tr", {}, el("td", {}, view.boxes.get(name)),
    el("td", { class: "name" }, el("a", { href: addressOf("run", { run: name }), dir: "auto" },
      cut ? el("span", { class: "folder", text: name.slice(0, cut) }) : null, name.slice(cut)), el("div", { class: "faint", text: began }),
    tagList(record.tags, true), record.notes ? el("div", { class: "noteLine", dir: "auto", text: record.notes }) : null,
    ["bad", "warning"].includes(level) ? el("div", { class: level === "bad" ? "down" : "faint", text: minus(text) }) : null),
    el("td", { class: "progress" }, progressOf(record.progress), steps && state !== "finished" ? el("progress", { max: steps,
      value: step, "aria-label": `step ${step} of ${steps}` }) : null,
    state === "finished" ? el("span", { class: "faint", text: ` ${count(step, "step")}` })
      : left ? el("span", { class: "faint", text: `${duration(left)} left` }) : null),
    el("td", { class: "spark" }, sparkline(record.curve, `${record.of} of ${name}`), el("div", { class: "faint", text: record.curve.y.length ? record.of : "" })),
    el("td", { class: "change" }, gain ? gainOf(gain, newest, format) : el("span", { class: "faint", text: "not evaluated" })),
    el("td", { class: "chips" }, record.chips.slice(0, MOST_CHIPS).map(([key, value]) => el("span", { class: "chip" },
      `${key} `, el("b", { text: shortValue(value) }))),
    record.chips.length > MOST_CHIPS ? el("span", { class: "faint", text: `+${record.chips.length - MOST_CHIPS}` }) : null));
}

/** Running, finished, or where it ended, by whom or by which error, and how it goes on. */
export function progressOf({ state, step, steps, saved, resume, cause, stopped_by: stoppedBy }) {
  const at = step ? `${state} at step ${num(step)}${steps ? ` of ${num(steps)}` : ""}` : `${state} before the first step`;
  const badge = el("span", { class: `badge ${state}`, text: resume ? `${at}${stoppedBy ? ` by ${stoppedBy}` : ""}` : state === "running"
    ? `running, step ${num(step)}${steps ? ` of ${num(steps)}` : ""}` : state });
  return resume ? [badge, cause ? [": ", textNodes(cause)] : null, el("div", { class: "resume" }, `${saved === steps ? "evaluate and finish" : `resume ${saved ? `from step ${num(saved)}` : "from the start"}`}: `,
      el("code", { text: resume }))] : badge;
}

/** The run's main figure before and after training, as in its table, and the interval of the newest evaluation. */
function gainOf([title, before, after, change, sign], newest, format) {
  const { low = null, high = null } = newest ?? {};
  return [minus(before), after === "-" ? "" : ` → ${minus(after)} `, change ? gainMark(change, sign) : null,
    el("div", { class: "faint", text: low === null ? title : `${title}: ${format(low)} to ${format(high)}` })];
}

function shortValue(value) {
  const text = asText(value);
  return text.length > 32 ? `…${text.slice(-31)}` : text;
}

function drawChoice(view) {
  for (const [name, box] of view.boxes) {
    box.checked = view.chosen.has(name);
    box.disabled = !box.checked && view.chosen.size >= MOST_COMPARED;
  }
  const { size } = view.chosen;
  view.compare.disabled = size < 2;
  view.compare.textContent = size < 2 ? "Compare: choose 2 or 3 runs" : `Compare ${size} runs`;
}
