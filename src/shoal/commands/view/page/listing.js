// A table of rows that the server sorts, filters and searches, page by page: of groups, and of completions.

import { addressOf, change, here } from "./address.js";
import { isFile, load } from "./data.js";
import { count, el, num, replace, selectNext, stateBox } from "./dom.js";

const PAGE = 50;

/** Opens a listing. `kind`: view (its name), noun (of a row), placeholder (of the filter); lists(view), links that answer a
 * question; columns(view, record, parameters), rows of key, heading, format and meaning; cell(view, row, key), what a column
 * shows that is no figure, else undefined; link(view, row), the address of a row; tools(view, parameters), further controls. */
export async function showListing(node, parameters, context, kind) {
  const run = parameters.run || context.runs[0]?.name;
  const view = { run, node, kind, selected: 0, stop: null, context, timer: 0 };
  view.form = filterForm(view, parameters);
  view.note = el("p", { class: "faint count", role: "status" });
  view.body = el("div", { class: "listing" }, stateBox("loading", `Reading ${kind.noun}s …`));
  view.lists = el("nav", { class: "controls tabs", "aria-label": "lists" });
  view.tools = el("div", { class: "controls tools" });
  replace(node, el("h1", { text: `${kind.title} of ${run}` }), view.lists, view.form, view.tools, view.note, view.body);
  await readListing(view, parameters);
  const select = (by) => { view.selected = selectNext([...view.body.querySelectorAll("tbody tr")], by); };
  return {
    update: () => readListing(view, here().parameters),
    moved: (next) => {
      if ((next.run || context.runs[0]?.name) !== run) return false;
      view.selected = 0;
      view.form.replaceWith(view.form = filterForm(view, next));
      readListing(view, next);
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

/** Lists are links; each is a filter, a column to sort by, and which prompts are wanted. */
function drawLists(view, { filter = "", sort = "", desc = "", prompts = "", text }) {
  if (isFile) return;
  const { lists, name } = { lists: view.kind.lists(view), name: view.kind.view };
  replace(view.lists, lists.map(([title, of, by, down = "", prompt = ""]) => el("a", { class: "button", text: title,
    "aria-current": String([of, by, down, prompt]) === String([filter, sort, desc, prompts]) && !text ? "true" : null,
    href: addressOf(name, { run: view.run, filter: of, sort: by, desc: down, prompts: prompt }) })));
}

function filterForm(view, parameters) {
  if (isFile) return el("form", { hidden: true });
  const filter = el("input", { id: "filter", type: "text", value: parameters.filter ?? "", spellcheck: "false",
    autocomplete: "off", placeholder: view.kind.placeholder });
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
    el("a", { class: "button", href: addressOf(view.kind.view, { run: view.run }), text: "Clear" }));
}

async function readListing(view, parameters) {
  view.stop?.abort();
  clearTimeout(view.timer);
  view.stop = new AbortController();
  drawLists(view, parameters);
  const { sort, desc } = sortingOf(parameters);
  const { filter, text, prompts, offset } = parameters;
  try {
    const record = await load(view.kind.view, { run: view.run, sort, desc, filter, text, prompts, offset, limit: PAGE },
      view.stop.signal);
    drawListing(view, record, parameters);
    if (record.search && !record.search.done) {
      view.timer = setTimeout(() => readListing(view, parameters), 30);
    }
  } catch (error) {
    if (error.name === "AbortError") return;
    view.note.textContent = "";
    replace(view.body, stateBox("failed", error.message, () => readListing(view, parameters)));
  }
}

function drawListing(view, record, parameters) {
  const { rows, total, search, waiting, left_out: leftOut } = record, { noun } = view.kind;
  const offset = Number(parameters.offset || 0);
  view.selected = Math.min(view.selected, Math.max(0, rows.length - 1));
  const said = [count(total, noun) + (isFile ? " in this file" : "")];
  if (search) {
    said.push(search.done ? `searched all of ${count(search.files, "file")}`
      : `searched ${num(search.searched)} of ${count(search.files, "file")}, the newest first …`);
  }
  if (waiting) said.push(`${count(waiting, "file")} of groups still to be read …`);
  if (leftOut) said.push(`${num(leftOut)} more have no place in this table: Groups has them`);
  view.note.textContent = said.join("  ·  ");
  replace(view.tools, view.kind.tools?.(view, parameters, record));
  if (!rows.length) {
    const text = search && !search.done ? "Nothing found so far …" : waiting ? "Reading groups …"
      : parameters.filter || parameters.text || parameters.prompts ? `No ${noun} passes this filter.` : `This run has no ${noun}s yet.`;
    replace(view.body, stateBox("empty", text));
    return;
  }
  const columns = view.kind.columns(record, parameters);
  const head = columns.map(([key, label, , meaning]) => headCell(key, label, meaning, parameters));
  const body = rows.map((row, place) => listingRow(view, row, place, columns));
  const page = (label, to, kind, on) => el("button", { type: "button", class: kind, disabled: !on,
    text: label, on: { click: () => change({ offset: to || "" }) } });
  replace(view.body,
    el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": `${noun}s` },
      el("table", { class: `listed ${view.kind.view}Table` }, el("thead", {}, el("tr", {}, head)), el("tbody", {}, body))),
    el("div", { class: "pager" }, page("Previous", Math.max(0, offset - PAGE), "previousPage", offset > 0),
      el("span", { text: `${num(offset + 1)} to ${num(offset + rows.length)} of ${num(total)}` }),
      page("Next", offset + PAGE, "nextPage", offset + rows.length < total)));
}

/** The column that rows are sorted by; the newest steps come first unless another is named. */
function sortingOf({ sort, desc }) {
  return sort ? { sort, desc: desc ?? "" } : { sort: "step", desc: "1" };
}

function headCell(key, label, meaning, parameters) {
  const sort = key.replace(/^(mean|score)\//, ""), sorting = sortingOf(parameters);
  const isSorted = sorting.sort === sort || sorting.sort === key, down = isSorted && sorting.desc === "1";
  if (meaning === undefined) return el("th", { scope: "col", class: `${key}Cell`, text: label }); // of texts
  return el("th", { scope: "col", class: classOf(key), "aria-sort": isSorted ? (down ? "descending" : "ascending") : null },
    isFile ? label : el("button", { type: "button", class: "sort", title: meaning,
      text: label + (isSorted ? (down ? " ↓" : " ↑") : ""), on: { click: () =>
        change({ sort: key, desc: down ? "" : "1", offset: "" }) } }));
}

/** By the class of a column a narrow screen knows which to leave out. */
const classOf = (key) => `c-${key.split("/")[0]}`;

function listingRow(view, row, place, columns) {
  const cells = columns.map(([key, , format]) => {
    const own = view.kind.cell(view, row, key);
    return own === undefined ? el("td", { class: `number ${classOf(key)}`, text: format(row[key]) })
      : el("td", { class: `${key}Cell`, dir: "auto" }, own);
  });
  return el("tr", { class: place === view.selected ? "selected" : null }, cells);
}

/** The columns that say something: one that is empty or 0 in the whole run takes the room of the texts. A column that rows
 * are sorted by or filtered on stays. */
export function spokenColumns(columns, { blank }, { sort = "", filter = "" }) {
  const kept = ["step", "group", "reward"];
  return columns.filter(([key]) => !blank.includes(key) || kept.includes(key) || sort === key || filter.includes(key));
}
