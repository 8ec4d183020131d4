// The Group view: a prompt as the model read it, its right answer, and its completions with all that scored them: equal
// ones folded, the others with the words marked that the best lacks.

import { addressOf, change, goTo, here } from "./address.js";
import { isFile, load } from "./data.js";
import { asText, count, el, fact, num, replace, selectNext, stateBox, stepLink, table, trainedWhen, versionText } from "./dom.js";
import { textChoice } from "./render.js";
import { conversationBlock, differenceBlock, promptBlock, textBlock } from "./text.js";

const MOST_MARKS = 100; // characters of a template without words of its own

export async function showGroup(node, parameters) {
  const { run, file, group } = parameters;
  replace(node, stateBox("loading", "Reading the group …"));
  const record = await load("group", { run, file, group });
  const view = { node, run, record };
  drawGroup(view, parameters);
  if (parameters.completion) node.querySelector(".completion.selected")?.scrollIntoView({ block: "nearest" });
  const tokens = () => goTo("tokens", { run, file, group, completion: view.selected });
  return {
    moved: (next) => {
      if (next.run !== run || next.file !== file || next.group !== group) return false;
      drawGroup(view, next);
      return true;
    },
    keys: {
      ...Object.fromEntries(neighbours(record).map(({ key, to }) => [key, () => to && goTo("group", elsewhere(to))])),
      j: () => selectCompletion(view, 1), k: () => selectCompletion(view, -1), t: tokens, Enter: tokens,
      Escape: () => goTo("groups", { run, filter: `step=${record.step} set=${record.set}` }),
    },
  };
}

/** The groups beside this one: key, text, and file and group where there is one. */
function neighbours(record) {
  return [["[", "previous step", record.previous_file, record.group], ["]", "next step", record.next_file, record.group],
    ["p", "previous group", record.file, record.previous_group], ["n", "next group", record.file, record.next_group],
  ].map(([key, text, file, group]) => ({ key, text, to: file && group !== null ? { file, group } : null }));
}

const elsewhere = (to) => ({ ...here().parameters, completion: "", compare: "", ...to });

function drawGroup(view, parameters) {
  const { record, run, node } = view, number = record.completions.length;
  const stacks = stacksOf(record, parameters);
  view.best = bestOf(stacks);
  const compared = parameters.compare || String(view.best?.completion ?? "none");
  view.other = record.completions.find((one) => String(one.completion) === compared);
  view.selected = Number(parameters.completion || stacks[0][0].completion);
  const when = trainedWhen(record) ?? `${record.set}, ${versionText(record.step)}`;
  replace(node,
    el("nav", { class: "crumbs", "aria-label": "place" },
      el("a", { href: addressOf("groups", { run, filter: `step=${record.step} set=${record.set}` }), text: when }),
      neighbours(record).map(({ key, text, to }) => stepLink(text, key, to && addressOf("group", elsewhere(to))))),
    el("h1", { text: `Group ${record.group} of ${when}` }),
    el("p", { class: "faint" }, `Row ${num(record.row)} of the data, sampled ${versionText(record.version)}, `
      + `${num(record.num_prompt_tokens)} prompt tokens. `,
      isFile ? null : el("a", { text: "This prompt through the run", href: addressOf("prompt", { run, row: record.row,
        set: record.set === "discarded" ? "train" : record.set, right: `0.${record.file}.${record.group}` }) })),
    el("p", { class: "summary", text: summaryOf(record, stacks) }),
    record.set === "discarded" ? el("p", { class: "notice", text: "Dynamic sampling discarded this group: no update used it." }) : null,
    promptCard(record),
    el("div", { class: "controls" }, el("h2", { text: count(number, "completion") }),
      number > 1 ? choices(view, parameters, compared) : null, textChoice(() => drawGroup(view, here().parameters)), replayNote(record, run)),
    el("div", { class: "completions" },
      stacks.map((stack) => completionCard(view, stack, parameters, Math.min(4e6, 4e7 / stacks.length))))); // about 0.5 s
}

/** The prompt of a group, before it its right answer. */
export function promptCard(record) {
  return el("section", { class: "card prompt" }, record.right_answer === null ? null : el("div", { class: "rightAnswer" },
    el("h2", { text: "Right answer" }), textBlock(asText(record.right_answer))),
  el("h2", { text: "Prompt" }), promptBlock(record.prompt), promptRead(record),
  namedTexts(`The data's columns: ${Object.keys(record.columns).join(", ")}`, record.columns));
}

/** The prompt with what the chat template adds to its messages, such as a system prompt; open where that is more than marks. */
function promptRead({ prompt, prompt_read: read, num_prompt_tokens: size }) {
  if (!read) return null;
  const messages = Array.isArray(prompt) ? prompt.map((message) => message?.content) : [prompt];
  const added = messages.filter((text) => typeof text === "string").reduce((left, text) => left.replace(text.trim(), ""), read);
  return el("details", { open: added.length > MOST_MARKS }, el("summary", { text: `As the model read it, with all that the chat `
    + `template adds: ${count(size, "token")}` }), textBlock(read, { raw: true }));
}

// ---- which completions stand first, and which together

const worth = (one) => one.advantage ?? one.reward ?? -Infinity;
const ORDERS = {
  advantage: ["advantage", (one) => [worth(one)]],
  interest: ["interest", (one, mean) => [oddities(one, mean).length, Math.abs(worth(one))]],
  sampled: ["order sampled", (one) => [-one.completion]],
};

/** What one should look at: a reward that the right answer does not explain, a completion cut off or without a score. The
 * mean of equal rewards may be rounded, which is no difference. */
function oddities(one, mean) {
  const above = Math.abs(one.reward - mean) > 1e-9 * Math.abs(mean) ? Math.sign(one.reward - mean) : 0;
  return [one.valid ? "" : "no score", one.stop_reason === "length" ? "cut off" : "",
    one.correct === false && above > 0 ? "wrong, yet above the mean" : "",
    one.correct === true && above < 0 ? "right, yet below the mean" : ""].filter(Boolean);
}

function rewardsOf(record) {
  const all = record.completions.filter((one) => one.valid).map((one) => one.reward);
  return { low: Math.min(...all), high: Math.max(...all), mean: all.reduce((sum, reward) => sum + reward, 0) / all.length };
}

/** The completions in the order asked for, those that are equal in all things as one stack; the one that the address names
 * stands for its stack. */
export function stacksOf(record, { sort, fold, completion }) {
  const stacks = new Map(), { mean } = rewardsOf(record), [, rank] = ORDERS[sort] ?? ORDERS.advantage;
  record.completions.forEach((one) => {
    const key = fold === "no" ? one.completion : JSON.stringify({ ...one, completion: null });
    const stack = stacks.get(key) ?? stacks.set(key, []).get(key);
    if (String(one.completion) === completion) stack.unshift(one);
    else stack.push(one);
  });
  return [...stacks.values()].map((stack) => [[...rank(stack[0], mean), stack.length], stack])
    .sort(([a], [b]) => b.reduceRight((later, value, place) => value - a[place] || later, 0)).map(([, stack]) => stack);
}

/** Of the completions with the most reward that which was sampled most often; none where all have the same. */
function bestOf(stacks) {
  const { low, high } = rewardsOf({ completions: stacks.flat() });
  const top = stacks.filter(([one]) => one.valid && one.reward === high).sort((a, b) => b.length - a.length);
  return low < high ? top[0][0] : null;
}

/** The group in a line: how many are right, their rewards, and what tells them apart. */
function summaryOf(record, stacks) {
  const all = record.completions, { low, high, mean } = rewardsOf(record);
  const causes = Object.keys(all[0].components).map((name) => {
    const values = all.filter((one) => one.valid).map((one) => one.components[name] ?? 0);
    return [name, Math.abs(record.weights[name] ?? 1) * (Math.max(...values) - Math.min(...values))];
  }).filter(([, spread]) => spread > 0).sort(([, a], [, b]) => b - a).map(([name]) => name);
  const cut = all.filter((one) => one.stop_reason === "length").length;
  return [all.some((one) => one.correct !== null) ? `${num(all.filter((one) => one.correct).length)} of ${all.length} right` : "",
    low < high ? `reward ${num(low)} to ${num(high)}, mean ${num(mean)}` : low === high ? `reward ${num(low)}` : "",
    causes.length ? `told apart by ${causes.join(", then ")}` : low === high && all.length > 1 ? "none is better than another" : "",
    cut ? `${num(cut)} cut off at the limit` : "", stacks.length < all.length ? count(stacks.length, "distinct text") : "",
  ].filter(Boolean).join("  ·  ");
}

// ---- parts of the view

function namedTexts(title, values, open) {
  const names = Object.keys(values);
  return names.length ? el("details", { open }, el("summary", { text: title }), el("dl", {}, names.map((name) =>
    [el("dt", { text: name }), el("dd", {}, textBlock(asText(values[name])))]))) : null;
}

/** Order, comparison and folding; each is a part of the address. */
function choices({ record, best }, parameters, compared) {
  const choice = (name, label, options, value = parameters[name] ?? "") => {
    const node = el("select", { id: name, on: { change: (event) => change({ [name]: event.target.value }) } },
      options.map(([key, text]) => el("option", { value: key, text })));
    node.value = options.some(([key]) => key === value) ? value : options[0][0];
    return el("label", { for: name }, `${label} `, node);
  };
  return [
    choice("sort", "Sorted by", Object.entries(ORDERS).map(([key, [text]]) => [key, text])),
    choice("compare", "Differences to", [["none", "none"], ...record.completions.map((one) => [String(one.completion),
      `${one === best ? "the best, " : ""}completion ${one.completion}`])], compared),
    choice("fold", "Equal ones", [["", "folded"], ["no", "one by one"]]),
  ];
}

/** The command that samples the group again with the weights of its version. */
function replayNote(record, run) {
  if (record.set !== "train") return null;
  return el("details", { class: "replay" }, el("summary", { text: "Sample it again" }),
    el("p", { class: "faint", text: "Takes the weights of its version from a checkpoint, or retrains them, and compares the "
      + "tokens bit for bit; then Tokens has entropies and the likeliest other tokens." }),
    el("code", { text: `shoal replay ${JSON.stringify(record.path || run)} step=${record.step} group=${record.group} likeliest=8` }));
}

/** The completion's turns in a row, with what each earned and its advantage, where these are by turn. */
function turnTable(one) {
  const rows = [["reward", one.turn_rewards], ["advantage", one.turn_advantages]].filter(([, values]) => values);
  if (!rows.length) return null;
  return table(["turn", ...rows[0][1].map((_, turn) => String(turn + 1))],
    rows.map(([name, values]) => [name, ...values.map((value) => num(value))]), "turns");
}

export function completionCard(view, stack, parameters, mostCells) {
  const { record, run, other } = view, [one] = stack;
  const sign = one.advantage > 0 ? "up" : one.advantage < 0 ? "down" : "";
  const tokensOf = (which, text) => el("a", { text, href: addressOf("tokens", { run, file: record.file, group: record.group,
    completion: which.completion }) });
  const odd = oddities(one, rewardsOf(record).mean).map((text) => [text, "warning"]), word = one.correct ? "right" : "wrong";
  const isBest = one === view.best && one.correct !== false; // of wrong answers none is called the best
  const badges = [one.correct === null || odd.some(([text]) => text.startsWith(word)) ? null : [word, word],
    isBest ? ["best", "ok"] : null, ...odd];
  const parts = Object.entries(one.components).map(([name, value]) => `${name} ${num(value)}`
    + ((record.weights[name] ?? 1) === 1 ? "" : ` × ${num(record.weights[name])}`));
  return el("article", { class: `card completion${stack.some((row) => row.completion === view.selected) ? " selected" : ""}`,
    "aria-label": `completion ${one.completion}`, "data-completion": one.completion, "data-sign": sign },
    el("h3", {}, tokensOf(one, `Completion ${one.completion}`),
      badges.filter(Boolean).map(([text, kind]) => el("span", { class: `badge ${kind}`, text }))),
    stack.length > 1 ? el("p", {}, el("strong", { text: `${stack.length} times the same` }), ", also completion ",
      stack.slice(1).map((row, place) => [place ? ", " : "", tokensOf(row, row.completion)])) : null,
    el("dl", { class: "facts" },
      record.set !== "train" ? null : fact("advantage", one.advantage === null ? "none: no update used it" : (one.advantage > 0 ? "+" : "") + num(one.advantage), sign),
      fact("reward", num(one.reward)),
      fact("tokens", num(one.num_tokens) + (one.num_trained === one.num_tokens ? "" : `, ${num(one.num_trained)} of the model`)),
      one.messages ? fact("turns", num(one.messages.filter?.((message) => message?.role === "assistant").length)) : null,
      fact("ended by", one.stop_reason === "length" ? "the limit" : one.stop_reason),
      parts.length ? fact("made of", parts.join(", ")) : null),
    turnTable(one),
    one.messages ? conversationBlock(one.messages)
      : other && other !== one ? differenceBlock(one.text, other.text, { mostCells, onlyAlike: !parameters.compare })
      : textBlock(one.text),
    namedTexts("What the grader said", one.extra, true));
}

function selectCompletion(view, by) {
  const cards = [...view.node.querySelectorAll(".completion")];
  view.selected = Number(cards[selectNext(cards, by)].dataset.completion);
  change({ completion: view.selected }, { quietly: true });
}
