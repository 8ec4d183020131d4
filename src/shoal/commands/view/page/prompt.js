// The Prompt view: one prompt through the run, or through two runs: its groups as a strip, and the completions of two of
// them side by side, so of a question of an evaluation its answers before and after.

import { addressOf, change, goTo, here } from "./address.js";
import { shape } from "./charts.js";
import { load } from "./data.js";
import { count, el, num, percent, replace, stateBox, stepLink, trainedWhen, versionText } from "./dom.js";
import { completionCard, promptCard, stacksOf } from "./group.js";
import { textChoice } from "./render.js";

const MOST_BESIDE = 4;

export async function showPrompt(node, parameters, context) {
  replace(node, stateBox("loading", "Reading the groups of the prompt …"));
  const view = { node, context, strips: [] };
  await readPrompt(view, parameters);
  const open = (row) => row !== null && goTo("prompt", { run: parameters.run, set: parameters.set, row, other: here().parameters.other });
  const [{ record }] = view.strips;
  return {
    update: () => readPrompt(view, here().parameters),
    moved: (next) => {
      if (["run", "set", "row", "other"].some((name) => next[name] !== parameters[name])) return false;
      readPrompt(view, next);
      return true;
    },
    keys: { n: () => open(record.next), p: () => open(record.previous) },
  };
}

/** The strip of each run, the two groups that are chosen, and all of it on the page. */
async function readPrompt(view, parameters) {
  const { run, set, row, other } = parameters;
  view.strips = await Promise.all([run, other].filter(Boolean).map(async (name, place) => ({ name, place,
    record: await load("prompt", { run: name, set, row, other: place ? "" : other }) })));
  const all = view.strips.flatMap(({ name, place, record }) => record.groups.map((group) => ({ ...group, run: name,
    key: `${place}.${group.file}.${group.group}` })));
  if (!all.length) throw new Error(`No group of row ${row} of ${set} has been read: the run may not have asked this question yet.`);
  const chosen = chosenSides(all, parameters);
  const sides = await Promise.all(chosen.map(async (side) => side && { ...side,
    record: await load("group", { run: side.run, file: side.file, group: side.group }) }));
  drawPrompt(view, parameters, all, sides);
}

/** What stands left and right: what the address names, else the first and the newest group of a run, and of two runs the
 * newest group of a step that both have, or their newest. */
function chosenSides(all, { left, right, other }) {
  const named = (key) => all.find((group) => group.key === key);
  const own = all.filter((group) => group.key.startsWith("0.")), others = all.filter((group) => group.key.startsWith("1."));
  let usual = [own[0], own.length > 1 ? own.at(-1) : null];
  if (other) {
    const steps = new Set(others.map((group) => group.step));
    const shared = own.filter((group) => steps.has(group.step)).at(-1);
    usual = [shared ?? own.at(-1), shared ? others.filter((group) => group.step === shared.step).at(-1) : others.at(-1)];
  }
  return [named(left) ?? usual[0], named(right) ?? usual[1]];
}

const whenOf = (group) => trainedWhen(group) ?? versionText(group.step);

function drawPrompt(view, parameters, all, sides) {
  const { run, set, row, other } = parameters, several = view.strips.length > 1;
  const [{ record }] = view.strips, shown = sides.find(Boolean).record;
  const link = (number) => number !== null && addressOf("prompt", { run, set, row: number, other });
  const words = sides.filter(Boolean).map((side) => JSON.stringify(side.record.prompt));
  replace(view.node,
    el("nav", { class: "crumbs", "aria-label": "place" },
      el("a", { href: addressOf("groups", { run, filter: `set=${set} row=${row}`, sort: "step" }), text: `groups of ${set}` }),
      stepLink("previous question", "p", link(record.previous)), stepLink("next question", "n", link(record.next)),
      runChoice(view, parameters), textChoice(() => drawPrompt(view, here().parameters, all, sides))),
    el("h1", { text: `Row ${num(Number(row))} of ${set}, answered ${num(record.total)} ${record.total === 1 ? "time" : "times"}` }),
    words.length > 1 && words[0] !== words[1] ? el("p", { class: "notice", text: "The two runs asked different questions under this "
      + "row: their data differ." }) : null,
    promptCard(shown),
    view.strips.map((strip) => stripOf(strip, several, sides)),
    el("div", { class: "sides" }, sides.map((side, place) => sideOf(view, side, sides[1 - place], place, all, parameters))));
}

/** Which other run stands beside this one. */
function runChoice(view, { run, other = "" }) {
  const names = view.context.runs.map((one) => one.name).filter((name) => name !== run);
  if (!names.length) return null;
  const node = el("select", { id: "other", on: { change: (event) => change({ other: event.target.value, left: "", right: "" }) } },
    el("option", { value: "", text: "no other run" }), names.map((name) => el("option", { value: name, text: name })));
  node.value = names.includes(other) ? other : "";
  return el("label", { for: "other" }, "beside ", node);
}

/** The groups of the prompt by step, each as high as its reward; a click opens the group. */
function stripOf({ name, place, record }, several, sides) {
  const values = record.groups.map((group) => group.reward).filter((value) => value !== null);
  const low = Math.min(0, ...values), high = Math.max(1, ...values); // most rewards end at 1
  const cells = record.groups.map((group) => {
    const share = high > low && group.reward !== null ? (group.reward - low) / (high - low) : 0;
    const height = Math.max(0.01, share).toFixed(3);
    const bar = shape("svg", { viewBox: "0 0 1 1", preserveAspectRatio: "none", "aria-hidden": "true" });
    bar.append(shape("rect", { class: "bar", width: 1, height, y: (1 - height).toFixed(3) }));
    const text = `${whenOf(group)}: reward ${num(group.reward)}${group.pass === null ? "" : `, ${percent(group.pass)} right`}`;
    const isSide = sides.some((side) => side?.key === `${place}.${group.file}.${group.group}`);
    return el("li", {}, el("a", { href: addressOf("group", { run: name, file: group.file, group: group.group }), title: text,
      "aria-label": text, class: isSide ? "chosen" : null }, bar,
    el("span", { class: "value", text: num(group.reward) }), el("span", { class: "faint", text: num(group.step) })));
  });
  const left = record.total - record.groups.length;
  return el("section", { class: "card" }, el("h2", { text: `Reward by step${several ? `, ${name}` : ""}` }),
    cells.length ? el("ol", { class: "strip", tabindex: "0", "aria-label": `groups of ${name}` }, cells)
      : el("p", { class: "faint", text: `${name} was never asked this row.` }),
    left ? el("p", { class: "faint", text: `The newest ${num(record.groups.length)}; ${num(left)} before them are in Groups.` }) : null);
}

/** One of the two groups: which it is, and its first completions, with the words marked that the other side lacks. */
function sideOf(view, side, opposite, place, all, parameters) {
  const name = place ? "right" : "left", several = view.strips.length > 1;
  const choice = el("select", { id: name, on: { change: (event) => change({ [name]: event.target.value }) } },
    side ? null : el("option", { value: "", text: "choose a group" }),
    all.map((group) => el("option", { value: group.key, text: `${several ? `${group.run}, ` : ""}${whenOf(group)}, reward ${num(group.reward)}` })));
  choice.value = side?.key ?? "";
  const head = el("div", { class: "controls" }, el("label", { for: name }, place ? "After " : "Before ", choice));
  if (several) head.querySelector("label").firstChild.textContent = place ? "Right " : "Left ";
  if (!side) {
    return el("section", {}, head, el("p", { class: "faint", text: several ? "The other run has no group of this row." : "It was answered once so far." }));
  }
  const stacks = stacksOf(side.record, {}), other = opposite ? stacksOf(opposite.record, {})[0][0] : null;
  const cards = { record: side.record, run: side.run, other, best: null, selected: null };
  const left = stacks.length - MOST_BESIDE;
  return el("section", {}, head,
    stacks.slice(0, MOST_BESIDE).map((stack) => completionCard(cards, stack, parameters, 4e6)),
    left > 0 ? el("p", {}, el("a", { href: addressOf("group", { run: side.run, file: side.file, group: side.group }),
      text: `${count(left, "more text")} in the group` })) : null);
}
