// The Completions view: a table of all completions with the beginnings of their texts, and its export to a file.

import { addressOf, remember, remembered } from "./address.js";
import { isFile, save } from "./data.js";
import { EVALUATIONS, el, num } from "./dom.js";
import { showListing, spokenColumns } from "./listing.js";
import { textNodes } from "./text.js";

const yes = (value) => (value === null ? "–" : value ? "yes" : "no");
// As GROUP_COLUMNS; the columns of the reward functions stand before the advantage.
const COMPLETION_COLUMNS = [
  ["step", "step", num, "training step; in an evaluation, the step after which it was made"],
  ["set", "set", String, "train, discarded, or the data set of an evaluation"], ["prompt", "prompt", null], ["text", "text", null],
  ["reward", "reward", num, "weighted sum of the reward functions"], ["right", "right", yes, "whether the answer is right, if the task checks it"],
  ["advantage", "advantage", num, "how much better than the group's mean; none if no update used it"],
  ["length", "tokens", num, "tokens of the model"], ["truncated", "cut off", yes, "whether it reached the token limit"],
  ["unscored", "no score", yes, "whether a reward function failed"],
  ["turns", "turns", num, "turns of a rollout"], ["calls", "calls", num, "tool calls of a rollout"],
];

const COMPLETIONS = {
  view: "completions", noun: "completion", title: "Completions", placeholder: "right=0 reward>0.5 step=10..20",
  lists: completionLists, columns: completionColumns, cell: completionCell, tools: completionTools,
};

export function showCompletions(node, parameters, context) {
  return showListing(node, parameters, context, COMPLETIONS);
}

function completionLists(view) {
  const measured = view.context.runs.find((one) => one.name === view.run)?.measured;
  return [["all, newest first", "", ""], ["highest reward", "set=train", "reward", "1"], ["lowest reward", "set=train", "reward", ""],
    ...(measured ? [["right", "right=1", ""], ["wrong", "right=0", ""], ["wrong, highest reward", "right=0 set=train", "reward", "1"]] : []),
    ["cut off", "truncated=1", ""], ["no score", "unscored=1", ""], ["longest", "", "length", "1"], ["evaluations", EVALUATIONS, ""]];
}

function completionColumns(record, parameters) {
  const functions = record.functions.map((name) => [`score/${name}`, name, num, `score of the reward function ${name}`]);
  const columns = [...COMPLETION_COLUMNS.slice(0, 5), ...functions, ...COMPLETION_COLUMNS.slice(5)];
  return spokenColumns(columns, record, parameters);
}

/** A text is the link to its group, which has the rest of it; its prompt leads there, too. */
function completionCell(view, row, key) {
  const href = addressOf("group", { run: view.run, file: row.file, group: row.group, completion: row.completion });
  if (key === "prompt") return el("span", {}, row.prompt ? textNodes(row.prompt) : "(no text)");
  if (key !== "text") return undefined;
  const left = row.chars - row.text.length;
  return [el("a", { href }, row.text ? textNodes(row.text) : "(empty)"),
    left > 0 ? el("a", { class: "rest", href, text: `… ${num(left)} more characters` }) : null];
}

/** How many lines of each text are shown, and the table as a file. */
function completionTools(view, parameters, record) {
  const lines = el("select", { id: "lines", on: { change: (event) => {
    remember("lines", event.target.value);
    view.body.dataset.lines = event.target.value;
  } } }, [["1", "one"], ["3", "three"], ["all", "all"]].map(([value, text]) => el("option", { value, text })));
  lines.value = ["3", "all"].includes(remembered("lines")) ? remembered("lines") : "1";
  view.body.dataset.lines = lines.value;
  return [el("label", { for: "lines" }, "Lines of a text ", lines),
    isFile || !record.total ? null : ["csv", "jsonl"].map((format) => exportButton(view, parameters, record.total, format))];
}

function exportButton(view, { filter, text }, total, format) {
  const title = `Save ${format.toUpperCase()}`;
  const button = el("button", { type: "button", title: `${num(total)} whole texts with all columns`, text: title, on: { click: async () => {
    button.disabled = true;
    button.textContent = "Writing …";
    try {
      await save("export", { run: view.run, filter, text, format }, `${view.run.replace(/[^\w.-]+/g, "_")}_completions.${format}`);
      button.textContent = title;
    } catch (error) {
      button.textContent = error.message;
    }
    button.disabled = false;
  } } });
  return button;
}
