// The Groups view: a table of all groups, sorted by any column, filtered by numbers and by text.

import { addressOf, change, here } from "./address.js";
import { isFile, load } from "./data.js";
import { count, el, num, percent, replace, selectNext, stateBox } from "./dom.js";
import { textNodes } from "./text.js";

const PAGE = 50;
// Column -> its heading, format and meaning.
const COLUMNS = [
  ["step", "step", num, "training step; of an evaluation the step after which it was made"], ["group", "group", num, "place in the step"],
  ["set", "set", String, "train, or the data set of an evaluation"], ["prompt", "prompt", null],
  ["reward", "reward", num, "mean over its completions"], ["spread", "spread", num, "standard deviation of the reward"],
  ["pass", "pass", percent, "completions that solve it"], ["length", "length", num, "mean tokens of a completion"],
  ["turns", "turns", num, "mean turns of a rollout"], ["calls", "calls", num, "mean tool calls of a rollout"],
  ["truncated", "truncated", percent, "completions that reached the token limit"],
  ["staleness", "stale", num, "updates between sampling and training"], ["size", "size", num, "completions"],
];
// Of prompts that were answered more than once, by their newest group.
const OF_PROMPTS = [["change", "change", num, "of the share of right answers, else of the reward, since the first time"],
  ["times", "times", num, "how often it was answered"]];

export async function showGroups(node, parameters, context) {
  const run = parameters.run || context.runs[0]?.name;
  const view = { run, node, selected: 0, stop: null, context, timer: 0 };
  view.form = filterForm(view, parameters);
  view.note = el("p", { class: "faint count", role: "status" });
  view.body = el("div", { class: "groupsBody" }, stateBox("loading", "Reading groups …"));
  view.lists = el("nav", { class: "controls tabs", "aria-label": "lists" });
  replace(node, el("h1", { text: `Groups of ${run}` }), view.lists, view.form, view.note, view.body);
  await readGroups(view, parameters);
  const select = (by) => { view.selected = selectNext([...view.body.querySelectorAll("tbody tr")], by); };
  return {
    update: () => readGroups(view, here().parameters),
    moved: (next) => {
      if ((next.run || context.runs[0]?.name) !== run) return false;
      view.selected = 0;
      view.form.replaceWith(view.form = filterForm(view, next));
      readGroups(view, next);
      return true;
    },
    close: () => { view.stop?.abort(); clearTimeout(view.timer); },
    keys: {
      j: () => select(1), k: () => select(-1),
      Enter: () => view.body.querySelector("tr.selected a")?.click(),
      n: () => view.body.querySelector("button.nextPage")?.click(),
      p: () => view.body.querySelector("button.previousPage")?.click(),
    },
  };
}

/** Lists that answer a question; the worst are those of the newest tenth of the steps, for the first steps' are worse. */
function drawLists(view, { filter = "", sort = "", desc = "", prompts = "", text }) {
  if (isFile) return;
  const run = view.context.runs.find((one) => one.name === view.run);
  const last = run?.progress.step ?? 0;
  const lists = [["all, newest first", "", ""],
    ...(run?.measured ? [["rewarded, none right", "set=train pass=0", "reward", "1"]] : []), ["worst lately", `set=train step=${Math.ceil(0.9 * last)}..${last}`, "reward", ""],
    ["most to learn from", "set=train", "spread", "1"],
    ["cut off", "set=train truncated>0", "truncated", "1"], ["questions learned", "set!=train", "change", "1", "1"],
    ["questions lost", "set!=train", "change", "", "1"]];
  replace(view.lists, lists.map(([name, of, by, down = "", prompt = ""]) => el("a", { class: "button", text: name,
    "aria-current": String([of, by, down, prompt]) === String([filter, sort, desc, prompts]) && !text ? "true" : null,
    href: addressOf("groups", { run: view.run, filter: of, sort: by, desc: down, prompts: prompt }) })));
}

function filterForm(view, parameters) {
  if (isFile) return el("form", { hidden: true });
  const filter = el("input", { id: "filter", type: "text", value: parameters.filter ?? "", spellcheck: "false",
    autocomplete: "off", placeholder: "reward>0.5 step=10..20 set=train" });
  const text = el("input", { id: "search", type: "search", value: parameters.text ?? "", spellcheck: "false",
    autocomplete: "off", placeholder: "text in prompt or completion" });
  const apply = (event) => {
    event?.preventDefault();
    change({ filter: filter.value.trim(), text: text.value, offset: "" });
  };
  return el("form", { class: "controls", role: "search", on: { submit: apply } },
    el("span", { class: "field" }, el("label", { for: "filter", text: "Filter" }), filter),
    el("span", { class: "field" }, el("label", { for: "search", text: "Text" }), text),
    el("button", { type: "submit", text: "Search" }),
    el("a", { class: "button", href: addressOf("groups", { run: view.run }), text: "Clear" }));
}

async function readGroups(view, parameters) {
  view.stop?.abort();
  clearTimeout(view.timer);
  view.stop = new AbortController();
  drawLists(view, parameters);
  const { sort, desc } = sortingOf(parameters);
  const { filter, text, prompts, offset } = parameters;
  try {
    const record = await load("groups", { run: view.run, sort, desc, filter, text, prompts, offset, limit: PAGE }, view.stop.signal);
    drawGroups(view, record, parameters);
    if (record.search && !record.search.done) {
      view.timer = setTimeout(() => readGroups(view, parameters), 30);
    }
  } catch (error) {
    if (error.name === "AbortError") return;
    view.note.textContent = "";
    replace(view.body, stateBox("failed", error.message, () => readGroups(view, parameters)));
  }
}

function drawGroups(view, record, parameters) {
  const { rows, total, search, waiting, functions } = record;
  const offset = Number(parameters.offset || 0);
  view.selected = Math.min(view.selected, Math.max(0, rows.length - 1));
  const said = [count(total, "group") + (isFile ? " in this file" : "")];
  if (search) {
    said.push(search.done ? `searched all of ${count(search.files, "file")}`
      : `searched ${num(search.searched)} of ${count(search.files, "file")}, the newest first …`);
  }
  if (waiting) said.push(`${count(waiting, "file")} of groups still to be read …`);
  view.note.textContent = said.join("  ·  ");
  if (!rows.length) {
    const text = search && !search.done ? "Nothing found so far …" : waiting ? "Reading groups …"
      : parameters.filter || parameters.text ? "No group passes this filter." : "This run has no groups yet.";
    replace(view.body, stateBox("empty", text));
    return;
  }
  const columns = [...COLUMNS.slice(0, 4), ...(parameters.prompts ? OF_PROMPTS : []), ...COLUMNS.slice(4, 6), ...functions.map((name) => [`mean/${name}`, name, num, `mean of the reward function ${name}`]), ...COLUMNS.slice(6)]
    .filter(([key]) => !["turns", "calls"].includes(key) || rows.some((row) => row[key] !== null));
  const head = columns.map(([key, label, , meaning]) => headCell(key, label, meaning, parameters));
  const body = rows.map((row, place) => groupRow(view, row, place, columns));
  const page = (label, to, kind, on) => el("button", { type: "button", class: kind, disabled: !on,
    text: label, on: { click: () => change({ offset: to || "" }) } });
  replace(view.body,
    el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "groups" },
      el("table", { class: "groups" }, el("thead", {}, el("tr", {}, head)), el("tbody", {}, body))),
    el("div", { class: "pager" }, page("Previous", Math.max(0, offset - PAGE), "previousPage", offset > 0),
      el("span", { text: `${num(offset + 1)} to ${num(offset + rows.length)} of ${num(total)}` }),
      page("Next", offset + PAGE, "nextPage", offset + rows.length < total)));
}

/** The column that rows are sorted by; the newest steps come first unless another is named. */
function sortingOf({ sort, desc }) {
  return sort ? { sort, desc: desc ?? "" } : { sort: "step", desc: "1" };
}

function headCell(key, label, meaning, parameters) {
  const sort = key.replace(/^mean\//, ""), sorting = sortingOf(parameters);
  const isSorted = sorting.sort === sort, down = isSorted && sorting.desc === "1";
  if (key === "prompt") return el("th", { scope: "col", class: "prompt", text: label });
  return el("th", { scope: "col", class: `c-${key.split("/")[0]}`, "aria-sort": isSorted ? (down ? "descending"
    : "ascending") : null },
    isFile ? label : el("button", { type: "button", class: "sort", title: meaning,
      text: label + (isSorted ? (down ? " ↓" : " ↑") : ""), on: { click: () =>
        change({ sort, desc: down ? "" : "1", offset: "" }) } }));
}

function groupRow(view, row, place, columns) {
  const link = addressOf("group", { run: view.run, file: row.file, group: row.group });
  const cells = columns.map(([key, , format]) => {
    if (key === "prompt") return el("td", { class: "prompt", dir: "auto" }, el("a", { href: link },
      row.prompt ? textNodes(row.prompt.slice(0, 160)) : "(no text)"));
    return el("td", { class: `number c-${key.split("/")[0]}`, text: format(row[key]) });
  });
  return el("tr", { class: place === view.selected ? "selected" : null }, cells);
}
