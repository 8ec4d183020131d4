// Records by view and parameters: from the server, or from the page itself where it is a file.

import { queryOf } from "./address.js";

const embedded = document.getElementById("data");
const stored = embedded ? JSON.parse(embedded.textContent) : null;
const token = new URLSearchParams(location.search).get("token") ?? "";

export const isFile = stored !== null;
export const fileNote = stored?.note ?? "";

/** The key of a record: the view and its parameters in the order of their names. */
export function recordKey(view, parameters) {
  const query = queryOf(parameters);
  query.sort();
  return [view, ...[...query].map(([name, value]) => `${name}=${value}`)].join("&");
}

/** A record; throws an Error with one line for the reader. */
export async function load(view, parameters = {}, signal = undefined) {
  if (isFile) return fromFile(view, parameters);
  let answer;
  try {
    answer = await fetch(`/api/${view}?${queryOf(parameters)}`, { signal, headers: token ? { "x-shoal-token": token } : {} });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Error("The server does not answer: is `shoal view` still running?");
  }
  const record = await answer.json().catch(() => ({ error: `The server answered ${answer.status} without a record.` }));
  if (!answer.ok) throw new Error(record.error ?? `The server answered ${answer.status}.`);
  return record;
}

function fromFile(view, parameters) {
  if (view === "groups") return groupsFromFile(parameters);
  const found = stored.records[recordKey(view, parameters)];
  if (found === undefined) {
    throw new Error("This is not in the file. `shoal view RUN` shows every group; groups= puts more of them into a file.");
  }
  return found;
}

const TERM = /([\w/@.-]+?)\s*(<=|>=|!=|=|<|>)\s*("[^"]*"|\S+)/g;

function groupsFromFile(parameters) {
  const record = stored.records[recordKey("groups", { run: parameters.run })];
  if (!record) throw new Error("This file holds no groups of that run.");
  let rows = record.rows.filter((row) => passes(row, parameters.filter ?? "", record.functions));
  if (parameters.text) rows = rows.filter((row) => hasText(row, parameters));
  const key = columnKey(parameters.sort || "step", record.functions), turn = parameters.desc ? -1 : 1;
  rows = rows.map((row, place) => [row, place]).sort(([a, i], [b, j]) => {
    const x = a[key] ?? null, y = b[key] ?? null;
    if (x === null || y === null) return x === y ? i - j : (x === null ? 1 : -1);
    return x < y ? -turn : x > y ? turn : i - j;
  }).map(([row]) => row);
  const offset = Number(parameters.offset || 0);
  return { ...record, rows: rows.slice(offset, offset + Number(parameters.limit || 100)), total: rows.length };
}

function columnKey(column, functions) {
  return functions.includes(column) ? `mean/${column}` : column;
}

function passes(row, filter, functions) {
  for (const [, column, operator, text] of filter.matchAll(TERM)) {
    const key = columnKey(column, functions);
    if (!(key in row)) throw new Error(`There is no column ${column}. Columns: ${Object.keys(row).join(", ")}`);
    const value = row[key], wanted = text.replaceAll('"', "");
    const [low, high] = wanted.split("..");
    const number = typeof value === "number" || value === null;
    const bound = number ? Number(wanted) : wanted;
    const holds = wanted === "none" ? (operator === "=") === (value === null)
      : value === null ? false
      : high !== undefined && number ? value >= Number(low) && value <= Number(high)
      : operator === "=" ? value === bound : operator === "!=" ? value !== bound
      : operator === "<" ? value < bound : operator === ">" ? value > bound
      : operator === "<=" ? value <= bound : value >= bound;
    if (!holds) return false;
  }
  return true;
}

function hasText(row, { run, text, regex }) {
  const group = stored.records[recordKey("group", { run, file: row.file, group: row.group })];
  if (!group) return false;
  const places = [JSON.stringify(group.prompt), ...group.completions.map((one) => one.text ?? "")];
  let expression = null;
  try {
    expression = regex ? new RegExp(text, "u") : null;
  } catch (error) {
    throw new Error(`Regular expression: ${error.message}`);
  }
  return places.some((place) => (expression ? expression.test(place) : place.toLowerCase().includes(text.toLowerCase())));
}
