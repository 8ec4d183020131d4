// The Groups view: a table of all groups, sorted by any column, filtered by numbers and by text.

import { addressOf } from "./address.js";
import { EVALUATIONS, el, num, percent } from "./dom.js";
import { showListing, spokenColumns } from "./listing.js";
import { textNodes } from "./text.js";

// Column -> its heading, format and meaning; a column of texts has no meaning.
const GROUP_COLUMNS = [
  ["step", "step", num, "training step; in an evaluation, the step after which it was made"], ["group", "group", num, "place in the step"],
  ["set", "set", String, "train, discarded, or the data set of an evaluation"], ["prompt", "prompt", null],
  ["reward", "reward", num, "mean over its completions"], ["spread", "spread", num, "standard deviation of the reward"],
  ["pass", "pass", percent, "completions that solve it"], ["length", "length", num, "mean tokens of a completion"],
  ["turns", "turns", num, "mean turns of a rollout"], ["calls", "calls", num, "mean tool calls of a rollout"],
  ["truncated", "truncated", percent, "completions that reached the token limit"],
  ["staleness", "stale", num, "updates between sampling and training"], ["size", "size", num, "completions"],
];
// Of prompts that were answered more than once, by their newest group.
const OF_PROMPTS = [["change", "change", num, "of the share of right answers, else of the reward, since the first time"],
  ["times", "times", num, "how often it was answered"]];

const GROUPS = {
  view: "groups", noun: "group", title: "Groups", placeholder: "reward>0.5 step=10..20 set=train",
  lists: groupLists, columns: groupColumns, cell: groupCell,
};

export function showGroups(node, parameters, context) {
  return showListing(node, parameters, context, GROUPS);
}

/** Lists that answer a question; the worst are those of the newest tenth of the steps, for the first steps' are worse. */
function groupLists(view) {
  const run = view.context.runs.find((one) => one.name === view.run);
  const last = run?.progress.step ?? 0;
  return [["all, newest first", "", ""],
    ...(run?.measured ? [["rewarded, none right", "set=train pass=0", "reward", "1"]] : []), ["worst lately", `set=train step=${Math.ceil(0.9 * last)}..${last}`, "reward", ""],
    ["most to learn from", "set=train", "spread", "1"],
    ["cut off", "set=train truncated>0", "truncated", "1"], ["questions learned", EVALUATIONS, "change", "1", "learned"],
    ["questions lost", EVALUATIONS, "change", "", "lost"],
    ...(run?.discarded ? [["discarded", "set=discarded", ""]] : [])];
}

function groupColumns(record, parameters) {
  const functions = record.functions.map((name) => [`mean/${name}`, name, num, `mean of the reward function ${name}`]);
  const columns = [...GROUP_COLUMNS.slice(0, 4), ...(parameters.prompts ? OF_PROMPTS : []), ...GROUP_COLUMNS.slice(4, 6),
    ...functions, ...GROUP_COLUMNS.slice(6)];
  return spokenColumns(columns, record, parameters);
}

/** A group's prompt leads to the group; of prompts that were answered more than once to all its groups. */
function groupCell(view, row, key) {
  if (key !== "prompt") return undefined;
  const href = "times" in row ? addressOf("prompt", { run: view.run, set: row.set, row: row.row })
    : addressOf("group", { run: view.run, file: row.file, group: row.group });
  return el("a", { href }, row.prompt ? textNodes(row.prompt.slice(0, 160)) : "(no text)");
}
