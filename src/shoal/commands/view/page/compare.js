// Several runs next to each other: where two first differ, the settings that differ, and their figures.

import { addressOf } from "./address.js";
import { asText, card, count, el, num, tableCard } from "./dom.js";
import { textNodes } from "./text.js";

const STAGES = { data: "the questions differ", sampling: "the same questions have different answers",
  rewards: "the same texts have different rewards", update: "the updates differ, for the same texts and rewards" };

export function comparisonBlock({ names, records, comparison, shared }) {
  const plain = (title) => title.replace(/ \(.*\)$/, ""); // runs may be evaluated on other numbers of questions
  const figures = [...new Set(records.flatMap((record) => record.table.map(([title]) => plain(title))))];
  const rows = figures.map((figure) => [figure, ...records.map((record) => {
    const [, before, after] = record.table.find(([title]) => plain(title) === figure) ?? [];
    return before === undefined ? "–" : `${before} → ${after}`;
  })]);
  const causes = comparison?.first?.causes ?? [];
  const rank = ({ key }) => (causes.includes(key) ? causes.indexOf(key) : causes.length);
  const settings = [...comparison?.differing ?? []].sort((a, b) => rank(a) - rank(b)).map(({ key, values, help }) => [
    [key.split(".").flatMap((part, place) => (place ? [".", el("wbr"), part] : [part])), values.some((value) => value === null || value.length === 0) ? el("div", { class: "faint", text: help }) : null,
      causes.includes(key) ? [" ", el("span", { class: "badge warning", text: "may be the cause" })] : null],
    ...values.map(asText)]);
  return el("div", { class: "comparison" }, comparison?.first ? firstDifference(names, comparison.first) : null,
    shared?.total ? sharedQuestions(names, shared) : null,
    tableCard("Settings that differ between the runs", ["key", ...names], settings, comparison ? "None." : "Not in this file."),
    tableCard("Before and after", ["figure", ...names], rows, noEvaluation(records)));
}

/** What a table of evaluations says that has none: of runs that have come to their end none will follow. */
export function noEvaluation(records) {
  if (!records.every((record) => record.progress.has_ended)) return "No evaluation so far.";
  return records.length === 1 ? "No evaluation in this run." : "No evaluation in these runs.";
}

function firstDifference(names, { step, num_shared: shared, stage, file, group, completion }) {
  const links = names.map((run) => [" ", el("a", { text: run, href: addressOf("group", { run, file, group, completion }) })]);
  return card("Where they first differ", el("p", {}, !shared ? "No step is in both runs."
    : step === null ? `Nothing but time differs in the ${count(shared, "step")} that both have.`
    : `From step ${num(step)} on${stage ? `: ${STAGES[stage]}` : ""}.`,
  stage && stage !== "update" ? [` First in completion ${completion} of group ${group}:`, links] : null));
}

/** The questions of evaluations that both runs were asked, and those that one of them answers better. */
function sharedQuestions([run, other], { total, num_better: numBetter, num_worse: numWorse, better, worse }) {
  const list = (title, questions) => (questions.length ? [el("h3", { text: title }), el("ol", { class: "questions" },
    questions.map(({ set, row, prompt, a, b }) => el("li", {}, el("a", { href: addressOf("prompt", { run, set, row, other }) },
      textNodes(prompt)), el("span", { class: "faint", text: ` ${num(a)} → ${num(b)}` }))))] : null);
  return card("The same questions", el("p", {}, `Of ${count(total, "question")} of evaluations that both were asked, ${other} `
    + `answers ${num(numBetter)} better than ${run} and ${num(numWorse)} worse, each in its newest evaluation.`),
  list(`Better in ${other}`, better), list(`Better in ${run}`, worse));
}
