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

/** A file holds the rows of some groups, which it shows all. */
function fromFile(view, parameters) {
  const found = stored.records[recordKey(view, view === "groups" ? { run: parameters.run } : parameters)];
  if (found === undefined) {
    throw new Error("This is not in the file. `shoal view RUN` shows every group; groups= puts more of them into a file.");
  }
  return found;
}
