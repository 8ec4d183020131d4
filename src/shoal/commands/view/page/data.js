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
  const answer = await ask(view, parameters, signal);
  return answer.json();
}

/** Sends a record to the server, which writes it, and gives back what it stored; throws an Error with one line. */
export async function send(view, record) {
  const answer = await ask(view, {}, undefined, { method: "POST", body: JSON.stringify(record) });
  return answer.json();
}

/** The server's answer; throws an Error with one line for the reader where it is none. */
async function ask(view, parameters, signal, options = {}) {
  const headers = options.body ? { "content-type": "application/json" } : {};
  if (token) headers["x-shoal-token"] = token;
  let answer;
  try {
    answer = await fetch(`/api/${view}?${queryOf(parameters)}`, { signal, headers, ...options });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Error("The server does not answer: is `shoal view` still running?");
  }
  if (answer.ok) return answer;
  const record = await answer.json().catch(() => ({}));
  throw new Error(record.error ?? `The server answered ${answer.status}.`);
}

/** Saves what the server answers as a file of this name. */
export async function save(view, parameters, name) {
  const answer = await ask(view, parameters);
  const address = URL.createObjectURL(await answer.blob());
  const link = document.createElement("a");
  link.href = address;
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(address), 60_000);
}

const LISTINGS = ["groups", "completions"];

/** A file holds the rows of some groups, of which it shows a page. */
function fromFile(view, parameters) {
  const isListing = LISTINGS.includes(view);
  const found = stored.records[recordKey(view, isListing ? { run: parameters.run } : parameters)];
  if (found === undefined) {
    throw new Error("This is not in the file. `shoal view RUN` shows every group; groups= puts more of them into a file.");
  }
  if (!isListing) return found;
  const offset = Number(parameters.offset || 0);
  return { ...found, rows: found.rows.slice(offset, offset + parameters.limit) };
}
