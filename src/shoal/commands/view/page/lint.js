// Lint: what looks wrong with the rewards, over all groups; each finding leads to the groups that show it.

import { addressOf } from "./address.js";
import { isFile, load } from "./data.js";
import { coded, count, el, num, replace, stateBox } from "./dom.js";
import { textNodes } from "./text.js";

const LEVELS = { warning: "look at this", note: "worth knowing", ok: "fine" };

export async function showLint(node, parameters, context) {
  const run = parameters.run || context.runs[0]?.name;
  const view = { timer: 0, closed: false };
  replace(node, stateBox("loading", "Looking at all groups …"));
  const read = async () => {
    const record = await load("lint", { run });
    if (view.closed) return;
    context.showFindings(run, findingsIn(record).length);
    drawLint(node, run, record);
    clearTimeout(view.timer);
    if (!record.done && !isFile) view.timer = setTimeout(() => read().catch(() => {}), 100);
  };
  await read();
  return { update: read, close: () => { view.closed = true; clearTimeout(view.timer); }, keys: {} };
}

/** Reads the findings of a run until all texts were read, unless they are known; `show` gets each record. Stops once
 * `isOver()`. Gives back the last record, null where it could not be read. */
export async function readFindings(run, show, isOver) {
  let record;
  do {
    record = await load("lint", { run }).catch(() => null);
    if (!record || isOver()) return null;
    show(record);
  } while (!record.done && !isFile && await new Promise((resolve) => { setTimeout(() => resolve(true), 500); }));
  return record;
}

/** What a person should look at, the worst first. */
export function findingsIn(record) {
  return record.findings.filter((found) => found.level === "warning");
}

/** The group, and of a finding in texts the completion, that shows it. */
export function exampleLink(run, one, text) {
  const isText = one.completion !== null;
  return el("a", { href: addressOf("group", { run, file: one.file, group: one.group, completion: one.completion }),
    text: text ?? `step ${Number(one.file.replace(/.*_/, ""))}, group ${one.group}${isText ? `, completion ${one.completion}` : ""}` });
}

function drawLint(node, run, record) {
  const fine = record.findings.filter((found) => found.level === "ok");
  const cards = record.findings.filter((found) => found.level !== "ok").map((found) => el("article", { class: `card finding ${found.level}` },
    el("h2", {}, el("span", { class: `badge ${found.level}`, text: LEVELS[found.level] }), ` ${found.title}`),
    el("p", {}, coded(found.text)),
    found.filter ? el("p", {}, el("a", { href: addressOf("groups", { run, filter: found.filter, sort: found.sort,
      desc: found.sort && !found.filter.includes("<") ? "1" : "" }),
      text: `Groups: ${found.filter}` })) : null,
    found.examples.length ? el("ul", { class: "examples" }, found.examples.map((one) => el("li", {},
      exampleLink(run, one), `${one.completion === null ? " mean" : ""} reward ${num(one.reward)}: `, el("span", { class: "quote", dir: "auto" }, textNodes(one.text))))) : null));
  const reading = record.done ? "" : record.waiting ? `Groups are still being read: ${count(record.waiting, "file")} to go.`
    : `Texts are being read: ${num(record.read)} of ${count(record.files, "file")}.`;
  replace(node, el("h1", { text: `Lint of ${run}` }),
    el("p", { class: "faint", role: "status", text: reading || `The texts of ${count(record.files, "step")} and the numbers of all groups were read.` }),
    !record.findings.length ? null : cards.length ? cards : el("p", { class: "card", text: reading ? "Nothing looks wrong so far." : "Nothing looks wrong." }),
    fine.length ? el("section", { class: "card" }, el("h2", { text: "Checked, and fine" }), el("ul", { class: "fine" },
      fine.map((found) => el("li", {}, el("strong", { text: found.title }), ` ${found.text}`)))) : null,
    record.findings.length ? null : stateBox("empty", record.waiting ? "Groups are still being read …"
      : "There are no training groups to look at yet."));
}
