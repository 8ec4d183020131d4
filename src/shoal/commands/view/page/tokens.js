// The Tokens view: one completion token by token, coloured by a quantity, each token's numbers on hover or by keys.

import { addressOf, change, goTo, here } from "./address.js";
import { load } from "./data.js";
import { count, el, fact, fileText, num, percent, replace, stateBox, stepLink, table, versionText } from "./dom.js";
import { textBlock, textNodes } from "./text.js";

const SHOWN_TOKENS = 4000;
const FEW_TOKENS = 400; // that leave room for the prompt
const MOST_STRONGEST = 15;

/** Quantity -> title, and from a token's record its number or null; for numbers the least bound of the colours (so that
 * noise stays pale), for kinds the text of each. */
const COLOURS = {
  push: ["advantage × surprise", pushOf, 1e-6],
  logprob: ["log-prob of the sampler", (data, t) => data.logprob[t], 1e-6],
  trainer: ["log-prob of the trainer", (data, t) => data.trainer[t], 1e-6],
  entropy: ["entropy", (data, t) => data.entropy?.[t] ?? null, 1e-6],
  gap: ["trainer minus sampler", (data, t) => data.gap[t], 1e-3],
  ratio: ["ratio trainer / sampler, minus 1", (data, t) => (data.ratio[t] === null ? null : data.ratio[t] - 1), 1e-3],
  weighted: ["advantage × ratio", (data, t) => data.weighted[t], 1e-6],
  clipped: ["outside the clip range", (data, t) => (data.clipped[t] ? (advantageOf(data, t) > 0 ? 4 : -4) : 0),
    { "-4": "below, advantage < 0", 0: "within", 4: "above, advantage > 0" }],
  mask: ["trained on (loss mask)", (data, t) => (data.mask[t] ? 2 : -2), { "-2": "context, no loss", 2: "the model's" }],
  versions: ["weights that sampled it", (data, t) => ((data.versions[t] - data.versions[0]) % 2 ? 2 : 0),
    { 0: "the first weights", 2: "the following versions, in turn" }],
};
const COLOUR_STEPS = [-4, -3, -2, -1, 0, 1, 2, 3, 4];

/** A token's advantage: that of its turn where they are by turn, else that of the completion. */
function advantageOf(data, t) {
  return data.advantages ? data.advantages[t] : data.advantage;
}

/** How much the update pushes a token: the advantage times minus its log-prob; null for context. */
function pushOf(data, t) {
  return !data.mask[t] || data.advantage === null || data.logprob[t] === null ? null : -advantageOf(data, t) * data.logprob[t];
}

export async function showTokens(node, parameters) {
  const { run, file, group, completion = "0" } = parameters;
  replace(node, stateBox("loading", "Reading the tokens …"));
  const [data, whole] = await Promise.all([load("tokens", { run, file, group, completion }),
    load("group", { run, file, group }).catch(() => null)]);
  const view = { node, data, run, selected: Number(parameters.token || 0), size: whole?.completions.length ?? 1 };
  drawTokens(view, parameters);
  if (parameters.token) view.box.querySelector(".t.selected")?.scrollIntoView({ block: "nearest" });
  const move = (by) => selectToken(view, view.selected + by);
  const open = (place) => place >= 0 && place < view.size && goTo("tokens", { ...here().parameters, completion: place,
    token: "" });
  return {
    moved: (next) => {
      if (next.run !== run || next.file !== file || next.group !== group || (next.completion ?? "0") !== completion) {
        return false;
      }
      paint(view, next.colour);
      selectToken(view, Number(next.token || 0), true);
      return true;
    },
    keys: {
      ArrowRight: () => move(1), ArrowLeft: () => move(-1), l: () => move(1), h: () => move(-1),
      j: () => open(Number(completion) + 1), k: () => open(Number(completion) - 1),
      n: () => nextMarked(view), c: () => nextColour(view),
      Escape: () => goTo("group", { run, file, group, completion }),
    },
  };
}

function drawTokens(view, parameters) {
  const { data, run, node } = view;
  view.colour = el("select", { id: "colour", on: { change: (event) => change({ colour: event.target.value }) } },
    Object.entries(COLOURS).map(([value, [title]]) => el("option", { value, text: title })));
  view.info = el("div", { class: "info card", role: "status", "aria-live": "polite" });
  view.box = el("div", { class: "tokens text", tabindex: "0", role: "group", dir: "auto",
    "aria-label": "tokens; arrow keys go from one to the next" });
  view.legend = el("p", { class: "legend", "aria-hidden": "true" });
  const pager = [["previous completion", "k", data.completion - 1], ["next completion", "j", data.completion + 1]].map(
    ([text, key, completion]) => stepLink(text, key, completion >= 0 && completion < view.size
      ? addressOf("tokens", { ...here().parameters, completion, token: "" }) : null));
  replace(node,
    el("nav", { class: "crumbs", "aria-label": "place" },
      el("a", { href: addressOf("group", { run, file: data.file, group: data.group, completion: data.completion }),
        text: `group ${data.group} of ${fileText(data.file)}` }), pager),
    el("h1", { text: `Completion ${data.completion}, token by token` }),
    el("p", { class: "faint", text: `Reward ${num(data.reward)}, advantage ${data.advantage === null ? "none"
      : num(data.advantage)}, ${count(data.ids.length, "token")}. ${data.is_trained
      ? "The trainer's log-probs are those before the update."
      : "No update used it, so the trainer's log-probs, and what follows from them, were not recorded."}` }),
    el("div", { class: "controls" }, el("label", { for: "colour", text: "Colour" }), view.colour, view.legend),
    view.info,
    data.prompt.length ? el("details", { open: data.prompt.length + data.ids.length < FEW_TOKENS }, el("summary", { text: `Prompt, ${num(data.prompt.length)} tokens as the model `
      + "read them" }), textBlock(data.prompt.join(""), { raw: true })) : null,
    data.tokens ? view.box : [el("p", { class: "notice", text: "The run has no tokenizer that can be read: tokens are "
      + "shown by their numbers." }), view.box],
    view.table = el("section", { class: "card strongest" }));
  fillTokens(view, 0, SHOWN_TOKENS);
  paint(view, parameters.colour);
  selectToken(view, view.selected, true);
  const at = (event, call) => {
    const place = event.target.closest?.("[data-t]")?.dataset.t;
    if (place !== undefined) call(view, Number(place));
  };
  view.box.addEventListener("pointerover", (event) => at(event, describe));
  view.box.addEventListener("pointerleave", () => describe(view, view.selected));
  view.box.addEventListener("click", (event) => at(event, selectToken));
}

function fillTokens(view, start, stop) {
  const { data, box } = view;
  const size = data.ids.length;
  for (let t = start; t < Math.min(stop, size); t++) {
    const text = data.tokens ? data.tokens[t] : `${data.ids[t]} `;
    const token = el("span", { class: data.mask[t] ? "t" : "t context", "data-t": t }, text === "" ? el("span", { class: "odd", text: "·" })
      : text.includes("\n") ? [el("span", { class: "odd", text: "↵" }), textNodes(text)] : textNodes(text));
    box.append(token);
  }
  view.drawn = Math.min(stop, size);
  if (view.drawn < size) {
    const more = el("button", { type: "button", class: "more", text: `Show ${num(Math.min(SHOWN_TOKENS, size - view.drawn))} `
      + `of the other ${num(size - view.drawn)} tokens`, on: { click: () => {
      more.remove();
      fillTokens(view, view.drawn, view.drawn + SHOWN_TOKENS);
      paint(view, view.colour.value);
    } } });
    box.append(more);
  }
}

/** Colours the tokens by a quantity, fitted to the completion's largest value; of roots, for most values are small. */
function paint(view, quantity) {
  const { data } = view; // without an advantage every product is 0
  const name = quantity in COLOURS ? quantity : data.advantage ? "push" : "logprob", [title, of, scale] = COLOURS[name];
  view.colour.value = name;
  const values = data.ids.map((_, t) => (data.mask[t] || name === "mask" ? of(data, t) : null)), known = values.filter((value) => value !== null);
  const [low, high] = known.reduce(([least, most], value) => [Math.min(least, value), Math.max(most, value)], [0, 0]);
  const bound = Math.max(-low, high, scale);
  const level = (value) => Math.sign(value) * Math.round(4 * Math.sqrt(Math.abs(value) / bound));
  view.levels = values.map((value) => (value === null ? null : typeof scale === "object" ? value : level(value)));
  view.box.querySelectorAll(".t").forEach((token) => { token.dataset.c = view.levels[Number(token.dataset.t)] ?? "none"; });
  const steps = typeof scale === "object" ? Object.entries(scale)
    : COLOUR_STEPS.filter((step) => (step >= 0 || low < 0) && (step <= 0 || high > 0 || low === 0))
      .map((step) => [step, num(Math.sign(step) * bound * (step / 4) ** 2)]);
  const missing = { entropy: "A run records no entropies: `shoal replay` computes them, as the group's page says",
    push: "No update used this completion: it has no advantage" }[name] ?? `${title} was not recorded for this completion`;
  drawStrongest(view, title, values);
  const note = name === "push" ? "surprise: −log-prob; blue: the update makes the token likelier, red: less likely" : !quantity && data.advantage === 0
    ? "the advantage is 0: the completion taught nothing" : "";
  replace(view.legend, known.length ? [steps.map(([value, text]) => el("span", { class: "t", "data-c": value, text })),
    note ? el("span", { class: "faint", text: note }) : null] : missing);
}

/** The tokens with the largest values of a quantity as a table, so that they need not be found by the pointer. */
function drawStrongest(view, title, values) {
  const { data } = view;
  const places = values.map((value, t) => t).filter((t) => values[t]).sort((a, b) => Math.abs(values[b]) - Math.abs(values[a]));
  const rows = places.slice(0, MOST_STRONGEST).map((t) => [
    el("button", { type: "button", class: "plain", on: { click: () => selectToken(view, t) } }, data.tokens ? textNodes(JSON.stringify(data.tokens[t])) : data.ids[t]),
    num(t), num(values[t]), num(data.logprob[t]), num(data.trainer[t]), num(data.ratio[t], 5)]);
  view.table.hidden = !rows.length;
  if (rows.length) replace(view.table, el("h2", { text: `Largest: ${title}` }), table(["text", "token", title, "sampler", "trainer", "ratio"], rows, "largest tokens"));
}

function describe(view, t) {
  const { data } = view;
  if (!(t in data.ids)) {
    replace(view.info, el("p", { class: "faint", text: "No tokens." }));
    return;
  }
  const pairs = [["token", t], ["id", data.ids[t]], ["sampler", data.logprob[t]], ["trainer", data.trainer[t]],
    ["difference", data.gap[t]], ["ratio", data.ratio[t]], data.advantages ? ["its turn's advantage", data.advantages[t]] : null, ["advantage × surprise", pushOf(data, t)],
    data.entropy ? ["entropy", data.entropy[t]] : null, ["advantage × ratio", data.weighted[t]],
    ["clip range", data.ratio[t] === null ? null : data.clipped[t] ? "outside" : "within"],
    ["loss", data.mask[t] ? "yes" : "no"], ["sampled", versionText(data.versions[t])],
    data.support ? ["chosen from", `${data.support[t]} tokens`] : null].filter(Boolean);
  replace(view.info, el("dl", { class: "facts" }, fact("text", data.tokens ? textNodes(JSON.stringify(data.tokens[t])) : "–"),
    pairs.map(([name, value]) => fact(name, num(value, 5)))),
    data.likeliest ? el("p", { class: "faint" }, "Likeliest: ", data.likeliest[t].map(([text, logprob], place) => [
      place ? ", " : "", textNodes(JSON.stringify(text)), ` ${percent(Math.exp(logprob))}`])) : null);
}

function selectToken(view, t, quietly = false) {
  const size = view.data.ids.length;
  view.selected = Math.max(0, Math.min(size - 1, t));
  if (view.selected >= view.drawn) fillTokens(view, view.drawn, view.selected + 1);
  view.box.querySelector(".t.selected")?.classList.remove("selected");
  const token = view.box.querySelector(`[data-t="${view.selected}"]`);
  token?.classList.add("selected");
  if (!quietly) {
    token?.scrollIntoView({ block: "nearest" });
    change({ token: view.selected || "" }, { quietly: true });
  }
  describe(view, view.selected);
}

/** The next token that is coloured strongly. */
function nextMarked(view) {
  const next = view.levels.findIndex((level, t) => t > view.selected && Math.abs(level) >= 3);
  if (next >= 0) selectToken(view, next);
}

function nextColour(view) {
  const names = Object.keys(COLOURS);
  change({ colour: names[(names.indexOf(view.colour.value) + 1) % names.length] });
}
