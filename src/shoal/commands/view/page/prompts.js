// Prompts over time: which questions were learned or lost, and one prompt's answers through the run.

import { addressOf, change, goTo, here } from "./address.js";
import { Chart } from "./charts.js";
import { load } from "./data.js";
import { count, el, num, percent, replace, stateBox, table } from "./dom.js";
import { differenceBlock, promptBlock, textBlock, textNodes } from "./text.js";

const CHANGES = [["", "all"], ["learned", "learned"], ["lost", "lost"], ["never", "never right"], ["always", "always right"]];

export async function showPrompts(node, parameters, context) {
  const run = parameters.run || context.runs[0]?.name;
  replace(node, stateBox("loading", "Reading prompts …"));
  await drawPrompts(node, run, parameters);
  return { update: () => drawPrompts(node, run, here().parameters), keys: {} };
}

async function drawPrompts(node, run, parameters) {
  const { set = "", change: kind = "" } = parameters;
  const record = await load("prompts", { run, set, change: kind });
  const sets = el("select", { id: "set", on: { change: (event) => change({ set: event.target.value, change: "" }) } },
    record.sets.map((one) => el("option", { value: one.set, text: `${one.set}: ${count(one.groups, "group")} of `
      + count(one.steps, one.set === "train" ? "step" : "evaluation") })));
  sets.value = record.set;
  const tabs = CHANGES.map(([value, name]) => el("button", { type: "button", "aria-pressed": String(kind === value),
    text: `${name} ${num(value ? record.totals[value] : record.totals.all)}`, on: { click: () => change({ change: value }) } }));
  const rows = record.rows.map((row) => [
    el("a", { href: addressOf("prompt", { run, set: record.set, row: row.row }), dir: "auto" },
      row.prompt ? textNodes(row.prompt) : `row ${row.row}`),
    `${percent(row.first)} at ${num(row.first_step)}`, `${percent(row.last)} at ${num(row.last_step)}`, num(row.times)]);
  replace(node, el("h1", { text: `Prompts of ${run} through time` }),
    el("div", { class: "controls" }, el("label", { for: "set", text: "Set" }), sets,
      el("div", { class: "tabs", role: "group", "aria-label": "change" }, tabs)),
    el("p", { class: "faint", text: "Prompts that were answered more than once: the share of right answers (without a "
      + "notion of right, the mean reward) the first and the last time." }),
    rows.length ? el("div", { class: "promptList" }, table(["prompt", "first", "last", "times"], rows, "prompts"))
      : stateBox("empty", record.waiting ? "Groups are still being read …" : "No prompt of this set was answered twice."));
}

export async function showPrompt(node, parameters) {
  const { run, set, row } = parameters;
  replace(node, stateBox("loading", "Reading the prompt's answers …"));
  const record = await load("prompt", { run, set, row });
  const score = (one) => (one.pass === null ? one.reward : one.pass);
  const chart = new Chart([{ name: run, place: 0, x: record.times.map((one) => one.step), y: record.times.map(score) }],
    { title: record.times.some((one) => one.pass !== null) ? "share of right answers" : "mean reward", events: [] });
  const isJudged = (one) => one.correct !== null && one.correct !== undefined;
  const word = (one) => (!isJudged(one) ? num(one.reward) : one.correct ? "right" : "wrong");
  let before = null;
  const answers = record.times.map((one) => {
    const changed = before !== null && before.text !== null && one.text !== null && before.text !== one.text;
    const card = el("article", { class: "card answer" },
      el("h2", {}, el("a", { href: addressOf("group", { run, file: one.file, group: one.group }),
        text: set === "train" ? `step ${num(one.step)}` : `version ${num(one.step)}` }), " ",
      isJudged(one) ? el("span", { class: `badge ${word(one)}`, text: word(one) }) : null,
      el("span", { class: "faint", text: ` ${one.size > 1 ? `first of ${one.size}; ` : ""}reward ${num(one.reward)}`
        + (one.size > 1 && one.pass !== null ? `, ${percent(one.pass)} right` : "") })),
      one.text === null ? el("p", { class: "faint", text: "Open the group to read it." })
        : changed ? differenceBlock(one.text, before.text) : textBlock(one.text));
    if (one.text !== null) before = one;
    return card;
  });
  const [first, last] = [record.times[0], record.times.at(-1)];
  replace(node,
    el("nav", { class: "crumbs", "aria-label": "place" }, el("a", { href: addressOf("prompts", { run, set }),
      text: `prompts of ${set}` })),
    el("h1", { text: record.times.length > 1 ? `Row ${row}: ${word(first)} at ${num(first.step)}, ${word(last)} at ${num(last.step)}`
      : `Row ${row} of ${set}` }),
    el("section", { class: "card" }, promptBlock(record.prompt)),
    record.times.length > 1 ? el("div", { class: "charts" }, chart.node) : null,
    el("p", { class: "faint", text: record.times.length > 1 ? "Words that the answer shown before lacks are marked." : "" }), answers);
  return { close: () => chart.destroy(), restyle: () => chart.update(chart.series, { redraw: true }),
    keys: { Escape: () => goTo("prompts", { run, set }) } };
}
