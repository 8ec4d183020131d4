// The Tokens view: one completion token by token, coloured by a quantity, each token's numbers on hover or by keys.

import { addressOf, change, goTo, here } from "./address.js";
import { load } from "./data.js";
import { count, el, num, percent, replace, stateBox } from "./dom.js";
import { textBlock, textNodes } from "./text.js";

const SHOWN_TOKENS = 4000;

/** Quantity -> title, and from a token's record a level of -4 to 4 (below: red, above: blue), or null. */
const COLOURS = {
  logprob: ["log-prob of the sampler", (data, t) => level(data.logprob[t], [[-6, -4], [-3, -3], [-1.5, -2], [-0.5, -1]])],
  trainer: ["log-prob of the trainer", (data, t) => level(data.trainer[t], [[-6, -4], [-3, -3], [-1.5, -2], [-0.5, -1]])],
  entropy: ["entropy", (data, t) => (data.entropy ? [0.05, 0.3, 1, 2].filter((bound) => data.entropy[t] >= bound).length
    : null)],
  gap: ["trainer minus sampler", (data, t) => signed(data.gap[t], [1e-4, 1e-3, 0.01, 0.1])],
  ratio: ["ratio trainer / sampler", (data, t) => signed(data.ratio[t] === null ? null : data.ratio[t] - 1,
    [1e-4, 1e-3, 0.01, 0.1])],
  weighted: ["advantage × ratio", (data, t) => signed(data.weighted[t], [0.05, 0.5, 1, 2])],
  clipped: ["outside the clip range", (data, t) => (data.clipped[t] ? (data.advantage > 0 ? 4 : -4) : 0)],
  mask: ["trained on (loss mask)", (data, t) => (data.mask[t] ? 2 : -2)],
  versions: ["version that sampled it", (data, t) => ((data.versions[t] - data.versions[0]) % 2 ? 2 : 0)],
};

function level(value, bounds) {
  if (value === null) return null;
  for (const [bound, step] of bounds) if (value <= bound) return step;
  return 0;
}

function signed(value, bounds) {
  if (value === null) return null;
  const size = bounds.filter((bound) => Math.abs(value) >= bound).length;
  return value < 0 ? -size : size;
}

export async function showTokens(node, parameters) {
  const { run, file, group, completion = "0" } = parameters;
  replace(node, stateBox("loading", "Reading the tokens …"));
  const [data, whole] = await Promise.all([load("tokens", { run, file, group, completion }),
    load("group", { run, file, group }).catch(() => null)]);
  const view = { node, data, run, selected: Number(parameters.token || 0), size: whole?.completions.length ?? 1 };
  drawTokens(view, parameters);
  const move = (by) => selectToken(view, view.selected + by);
  const open = (place) => place >= 0 && place < view.size && goTo("tokens", { ...here().parameters, completion: place,
    token: "" });
  return {
    moved: (next) => {
      if (next.run !== run || next.file !== file || next.group !== group || (next.completion ?? "0") !== completion) {
        return false;
      }
      paint(view, next.colour || "logprob");
      selectToken(view, Number(next.token || 0), true);
      return true;
    },
    keys: {
      ArrowRight: () => move(1), ArrowLeft: () => move(-1), l: () => move(1), h: () => move(-1),
      j: () => open(Number(completion) + 1), k: () => open(Number(completion) - 1),
      n: () => nextMarked(view), c: () => nextColour(view),
      Escape: () => goTo("group", { run, file, group, completion: completion === "0" ? "" : completion }),
    },
  };
}

function drawTokens(view, parameters) {
  const { data, run, node } = view;
  const colour = el("select", { id: "colour", on: { change: (event) => change({ colour: event.target.value === "logprob"
    ? "" : event.target.value }) } }, Object.entries(COLOURS).map(([value, [title]]) => el("option", { value, text: title })));
  colour.value = parameters.colour || "logprob";
  view.colour = colour;
  view.info = el("div", { class: "info card", role: "status", "aria-live": "polite" });
  view.box = el("div", { class: "tokens text", tabindex: "0", role: "group", dir: "auto",
    "aria-label": "tokens; arrow keys go from one to the next" });
  view.legend = el("p", { class: "legend", "aria-hidden": "true" });
  const pager = [Number(data.completion) - 1, Number(data.completion) + 1].map((place, index) => {
    const on = place >= 0 && place < view.size;
    return el("a", { class: `button${on ? "" : " off"}`, "aria-disabled": on ? null : "true",
      title: index ? "key j" : "key k",
      href: on ? addressOf("tokens", { ...here().parameters, completion: place, token: "" }) : null,
      text: index ? "next completion" : "previous completion" });
  });
  replace(node,
    el("nav", { class: "crumbs", "aria-label": "place" },
      el("a", { href: addressOf("group", { run, file: data.file, group: data.group, completion: data.completion || "" }),
        text: `group ${data.group} of ${data.file}` }), pager),
    el("h1", { text: `Completion ${data.completion}, token by token` }),
    el("p", { class: "faint", text: `Reward ${num(data.reward)}, advantage ${data.advantage === null ? "none"
      : num(data.advantage)}, ${count(data.ids.length, "token")}. ${data.is_trained
      ? "The trainer's log-probs are those before the update."
      : "No update used it, so the trainer's log-probs, and what follows from them, were not recorded."}` }),
    el("div", { class: "controls" }, el("label", { for: "colour", text: "Colour" }), colour, view.legend),
    view.info,
    data.prompt.length ? el("details", {}, el("summary", { text: `Prompt, ${num(data.prompt.length)} tokens as the model `
      + "read them" }), textBlock(data.prompt.join(""))) : null,
    data.tokens ? view.box : [el("p", { class: "notice", text: "The run has no tokenizer that can be read: tokens are "
      + "shown by their numbers." }), view.box]);
  fillTokens(view, 0, SHOWN_TOKENS);
  paint(view, parameters.colour || "logprob");
  selectToken(view, view.selected, true);
  view.box.addEventListener("pointerover", (event) => {
    const place = event.target.closest?.("[data-t]")?.dataset.t;
    if (place !== undefined) describe(view, Number(place));
  });
  view.box.addEventListener("pointerleave", () => describe(view, view.selected));
  view.box.addEventListener("click", (event) => {
    const place = event.target.closest?.("[data-t]")?.dataset.t;
    if (place !== undefined) selectToken(view, Number(place));
  });
}

function fillTokens(view, start, stop) {
  const { data, box } = view;
  const size = data.ids.length;
  for (let t = start; t < Math.min(stop, size); t++) {
    const text = data.tokens ? data.tokens[t] : `${data.ids[t]} `;
    const token = el("span", { class: "t", "data-t": t }, text === "" ? el("span", { class: "odd", text: "·" })
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

function paint(view, quantity) {
  const [title, of] = COLOURS[quantity] ?? COLOURS.logprob;
  view.colour.value = quantity in COLOURS ? quantity : "logprob";
  let known = 0;
  view.box.querySelectorAll(".t").forEach((token) => {
    const value = of(view.data, Number(token.dataset.t));
    known += value !== null;
    token.dataset.c = value === null ? "none" : String(value);
  });
  const steps = quantity === "logprob" || quantity === "trainer"
    ? [[-4, "−6 and below"], [-3, "to −3"], [-2, "to −1.5"], [-1, "to −0.5"], [0, "near 0"]]
    : quantity === "entropy" ? [[0, "below 0.05"], [1, "0.05"], [2, "0.3"], [3, "1"], [4, "2 nats and more"]]
    : quantity === "mask" ? [[2, "the model's"], [-2, "context, no loss"]]
    : quantity === "clipped" ? [[-4, "below, advantage < 0"], [4, "above, advantage > 0"], [0, "within"]]
    : quantity === "versions" ? [[0, `version ${view.data.versions[0] ?? "–"}`], [2, "the next ones, in turn"]]
    : [[-4, "far below"], [-2, "below"], [0, quantity === "ratio" ? "1" : "0"], [2, "above"], [4, "far above"]];
  const missing = quantity === "entropy" ? "A run records no entropies: `shoal replay` computes them, as the group's page says"
    : `${title} was not recorded for this completion`;
  replace(view.legend, known ? steps.map(([value, text]) => el("span", { class: "t", "data-c": value, text }))
    : missing);
}

function describe(view, t) {
  const { data } = view;
  if (!(t in data.ids)) {
    replace(view.info, el("p", { class: "faint", text: "No tokens." }));
    return;
  }
  const pairs = [["token", t], ["id", data.ids[t]], ["sampler", data.logprob[t]], ["trainer", data.trainer[t]],
    ["difference", data.gap[t]], ["ratio", data.ratio[t]],
    data.entropy ? ["entropy", data.entropy[t]] : null, ["advantage × ratio", data.weighted[t]],
    ["clip range", data.ratio[t] === null ? null : data.clipped[t] ? "outside" : "within"],
    ["loss", data.mask[t] ? "yes" : "no"], ["version", data.versions[t]],
    data.support ? ["chosen from", `${data.support[t]} tokens`] : null].filter(Boolean);
  const others = data.others?.[t] ?? [];
  replace(view.info, el("dl", { class: "facts" },
    el("div", {}, el("dt", { text: "text" }), el("dd", {}, data.tokens ? textNodes(JSON.stringify(data.tokens[t])) : "–")),
    pairs.map(([name, value]) => el("div", {}, el("dt", { text: name }), el("dd", { text: num(value, 5) })))),
    data.likeliest ? el("p", { class: "faint" }, "Likeliest: ", data.likeliest[t].map(([text, logprob], place) => [
      place ? ", " : "", textNodes(JSON.stringify(text)), ` ${percent(Math.exp(logprob))}`])) : null,
    others.length ? el("p", { class: "faint" }, "Also possible: ", textNodes(others.map((text) => JSON.stringify(text)).join(", ")))
      : null);
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
  const of = (COLOURS[view.colour.value] ?? COLOURS.logprob)[1];
  for (let t = view.selected + 1; t < view.data.ids.length; t++) {
    if (Math.abs(of(view.data, t) ?? 0) >= 3) {
      selectToken(view, t);
      return;
    }
  }
}

function nextColour(view) {
  const names = Object.keys(COLOURS);
  const next = names[(names.indexOf(view.colour.value) + 1) % names.length];
  change({ colour: next === "logprob" ? "" : next });
}
