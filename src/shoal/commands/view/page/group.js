// The Group view: a prompt as the model read it, and its completions with all that scored them.

import { addressOf, change, goTo, here } from "./address.js";
import { load } from "./data.js";
import { count, el, num, replace, stateBox } from "./dom.js";
import { differenceBlock, markFound, promptBlock, textBlock } from "./text.js";

export async function showGroup(node, parameters) {
  const { run, file, group } = parameters;
  replace(node, stateBox("loading", "Reading the group …"));
  const record = await load("group", { run, file, group });
  const view = { node, run, record, selected: Number(parameters.completion || 0) };
  drawGroup(view, parameters);
  const to = (place) => place !== null && place !== undefined;
  const open = (nextFile, nextGroup) => goTo("group", { ...here().parameters, run, file: nextFile, group: nextGroup,
    completion: "", compare: "" });
  return {
    moved: (next) => {
      if (next.run !== run || next.file !== file || next.group !== group) return false;
      view.selected = Number(next.completion || 0);
      drawGroup(view, next);
      return true;
    },
    keys: {
      n: () => to(record.next_group) && open(file, record.next_group),
      p: () => to(record.previous_group) && open(file, record.previous_group),
      "]": () => record.next_file && open(record.next_file, group),
      "[": () => record.previous_file && open(record.previous_file, group),
      j: () => selectCompletion(view, view.selected + 1), k: () => selectCompletion(view, view.selected - 1),
      t: () => goTo("tokens", { run, file, group, completion: view.selected }),
      Enter: () => goTo("tokens", { run, file, group, completion: view.selected }),
      Escape: () => goTo("groups", { run, filter: `step=${record.step} set=${record.set}` }),
    },
  };
}

function drawGroup(view, parameters) {
  const { record, run, node } = view;
  const wide = parameters.layout !== "list";
  const isTrain = record.set === "train";
  const step = (label, file, group, key) => el("a", { class: `button${file && group !== null ? "" : " off"}`,
    href: file && group !== null ? addressOf("group", { ...here().parameters, file, group, completion: "", compare: "" })
      : null, "aria-disabled": file && group !== null ? null : "true", title: `key ${key}`, text: label });
  replace(node,
    el("nav", { class: "crumbs", "aria-label": "place" },
      el("a", { href: addressOf("groups", { run, filter: `step=${record.step} set=${record.set}` }),
        text: `${isTrain ? "step" : `${record.set}, version`} ${num(record.step)}` }),
      step("previous step", record.previous_file, record.group, "["), step("next step", record.next_file, record.group, "]"),
      step("previous group", record.file, record.previous_group, "p"), step("next group", record.file, record.next_group, "n")),
    el("h1", { text: `Group ${record.group} of ${isTrain ? `step ${num(record.step)}` : `${record.set}, version ${record.step}`}` }),
    el("p", { class: "faint" }, `Row ${num(record.row)} of the data, sampled by version ${num(record.version)}, `
      + `${num(record.num_prompt_tokens)} prompt tokens. `,
      el("a", { href: addressOf("prompt", { run, set: record.set, row: record.row }), text: "This prompt through the run" })),
    el("section", { class: "card" }, el("h2", { text: "Prompt" }), promptBlock(record.prompt), dataColumns(record)),
    el("div", { class: "controls" }, el("h2", { text: count(record.completions.length, "completion") }),
      el("button", { type: "button", text: wide ? "One below the other" : "Side by side",
        on: { click: () => change({ layout: wide ? "list" : "" }) } }),
      compareControl(record, parameters), replayNote(record, run)),
    el("div", { class: wide ? "completions wide" : "completions" },
      record.completions.map((one) => completionCard(view, one, parameters))));
  if (parameters.find) node.querySelectorAll(".text").forEach((text) => markFound(text, parameters.find, parameters.regex));
}

function dataColumns(record) {
  const names = Object.keys(record.columns);
  if (!names.length) return null;
  const shown = (value) => (typeof value === "string" ? value : JSON.stringify(value));
  return el("details", {}, el("summary", { text: `The data's columns: ${names.join(", ")}` }),
    el("dl", {}, names.flatMap((name) => [el("dt", { text: name }), el("dd", {}, textBlock(shown(record.columns[name])))])));
}

function compareControl(record, parameters) {
  const options = [el("option", { value: "", text: "no comparison" }), record.completions.map((one) =>
    el("option", { value: String(one.completion), text: `with completion ${one.completion}` }))];
  const select = el("select", { id: "compare", on: { change: (event) => change({ compare: event.target.value }) } }, options);
  select.value = parameters.compare ?? "";
  return el("label", { for: "compare" }, "Differences ", select);
}

/** The command that samples the group again with the weights of its version. */
function replayNote(record, run) {
  if (record.set !== "train") return null;
  return el("details", { class: "replay" }, el("summary", { text: "Sample it again" }),
    el("p", { class: "faint", text: "Takes the weights of its version from a checkpoint, or retrains them, and compares the "
      + "tokens bit for bit; then Tokens has entropies and the likeliest other tokens." }),
    el("code", { text: `shoal replay ${JSON.stringify(record.path || run)} step=${record.step} group=${record.group} likeliest=8` }));
}

function completionCard(view, one, parameters) {
  const { record, run } = view;
  const other = parameters.compare ? record.completions.find((row) => String(row.completion) === parameters.compare) : null;
  const sign = one.advantage > 0 ? "up" : one.advantage < 0 ? "down" : "";
  const facts = [
    fact("reward", num(one.reward)),
    ...Object.entries(one.components).map(([name, value]) => fact(record.weights[name] === undefined ? name
      : `${name} × ${num(record.weights[name])}`, num(value))),
    one.advantage === null ? fact("advantage", "none: no update used it") : fact("advantage",
      (one.advantage > 0 ? "+" : "") + num(one.advantage), sign),
    fact("tokens", num(one.num_tokens) + (one.num_trained === one.num_tokens ? "" : `, ${num(one.num_trained)} of the model`)),
    fact("ended by", one.stop_reason === "length" ? "the limit" : one.stop_reason, one.stop_reason === "length" ? "warn" : ""),
    one.correct === null ? null : fact("correct", one.correct ? "yes" : "no", one.correct ? "up" : "down"),
    one.valid ? null : fact("score", "none", "warn"),
  ];
  const extra = Object.entries(one.extra);
  return el("article", { class: `card completion${one.completion === view.selected ? " selected" : ""}`,
    "aria-label": `completion ${one.completion}` },
    el("h3", {}, el("a", { href: addressOf("tokens", { run, file: record.file, group: record.group, completion: one.completion }),
      text: `Completion ${one.completion}` }), el("span", { class: `bar ${sign}`, "aria-hidden": "true" })),
    el("dl", { class: "facts" }, facts),
    other && other !== one ? differenceBlock(one.text, other.text) : textBlock(one.text),
    extra.length ? el("details", { open: true }, el("summary", { text: "What the grader said" }),
      el("dl", {}, extra.flatMap(([name, value]) => [el("dt", { text: name }),
        el("dd", {}, textBlock(typeof value === "string" ? value : JSON.stringify(value)))]))) : null);
}

function fact(name, value, kind = "") {
  return el("div", {}, el("dt", { text: name }), el("dd", { class: kind || null, text: value }));
}

function selectCompletion(view, place) {
  const cards = [...view.node.querySelectorAll(".completion")];
  if (!cards.length) return;
  view.selected = Math.max(0, Math.min(cards.length - 1, place));
  change({ completion: view.selected || "" }, { quietly: true });
  cards.forEach((card, index) => card.classList.toggle("selected", index === view.selected));
  cards[view.selected].scrollIntoView({ block: "nearest" });
}
