// Text that a model wrote, shown as what it is: no markup, no control of the terminal, the reading direction or the page.

import { asText, el, num } from "./dom.js";
import { isRendered, renderedNodes } from "./render.js";

const SHOWN_CHARS = 20000;
const LONG_CHARS = 1500;
// What differences are made of: words, of scripts without spaces characters; of long texts lines.
const WORDS = /\s+|[\p{sc=Han}\p{sc=Hiragana}\p{sc=Katakana}\p{sc=Thai}]|[\p{L}\p{M}\p{N}]+|[^\s\p{L}\p{M}\p{N}]/gu;
const LINES = /[^\n]*\n|[^\n]+/g;
// Controls but tab and line end; marks that turn or hide text; halves of characters. The joiner of emoji stays.
const ODD = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u061c\u200b\u200e\u200f\u202a-\u202e\u2060-\u2064\u2066-\u2069\ufeff\ufff9-\ufffb]|[\ud800-\udbff](?![\udc00-\udfff])|(?<![\ud800-\udbff])[\udc00-\udfff]/gu;

function oddName(character) {
  const code = character.codePointAt(0);
  if (code < 0x20) return String.fromCodePoint(0x2400 + code);
  if (code === 0x7f) return "\u2421";
  return `U+${code.toString(16).toUpperCase().padStart(4, "0")}`;
}

/** Nodes for a text: its odd characters as marks that name them. */
export function textNodes(text) {
  const nodes = [];
  let last = 0;
  for (const found of text.matchAll(ODD)) {
    if (found.index > last) nodes.push(document.createTextNode(text.slice(last, found.index)));
    nodes.push(el("span", { class: "odd", title: "a character that cannot be seen", text: oddName(found[0]) }));
    last = found.index + found[0].length;
  }
  if (last < text.length) nodes.push(document.createTextNode(text.slice(last)));
  return nodes;
}

/** A block of text with its own direction; of a very long one the beginning, and a button for the rest. */
export function textBlock(text, { raw = !isRendered() } = {}) {
  const whole = String(text ?? "");
  const draw = (piece) => (raw ? textNodes(piece) : renderedNodes(piece, textNodes));
  const block = textFrame(whole, raw, draw(whole.slice(0, SHOWN_CHARS)));
  if (whole.length > SHOWN_CHARS) {
    const more = el("button", { type: "button", class: "more", text:
      `Show the other ${(whole.length - SHOWN_CHARS).toLocaleString("en-US")} characters`, on: { click: () => {
      more.replaceWith(...[draw(whole.slice(SHOWN_CHARS))].flat(Infinity).filter(Boolean));
    } } });
    block.append(more);
  }
  return block;
}

/** The box of a text; a long one scrolls in it, so that keys must reach it. */
function textFrame(whole, raw, nodes) {
  if (!whole) return el("div", { class: "text faint", text: "(empty)" });
  const isLong = whole.length > LONG_CHARS || whole.split("\n", 40).length === 40;
  return el("div", { class: `text${isLong ? " long" : ""}${raw ? "" : " rendered"}`, dir: "auto", tabindex: isLong ? "0" : null }, nodes);
}

/** A prompt: its messages by role, or its text. */
export function promptBlock(prompt) {
  if (!Array.isArray(prompt)) return textBlock(typeof prompt === "string" ? prompt : JSON.stringify(prompt));
  return el("div", { class: "messages" }, prompt.map((message) => el("div", { class: "message" },
    el("div", { class: "role", text: String(message?.role ?? "message") }),
    textBlock(typeof message?.content === "string" ? message.content : JSON.stringify(message?.content ?? message)))));
}

/** What followed the prompt of a rollout with turns: its messages; tool calls, and what tools answered, are folded. */
export function conversationBlock(messages) {
  if (!Array.isArray(messages)) return textBlock(messages);
  const folded = (title, text) => el("details", { class: "call" }, el("summary", {}, textNodes(String(title))), textBlock(text));
  const line = (text) => (text.length > 80 ? `${text.slice(0, 80)} …` : text).replaceAll("\n", " ");
  return el("div", { class: "messages" }, messages.map((message) => {
    const role = String(message?.role ?? "message"), text = asText(message?.content ?? "");
    const calls = Array.isArray(message?.tool_calls) ? message.tool_calls : [];
    const cut = message?.truncated_bytes ? `${text}\n… ${message.truncated_bytes} bytes were cut` : text;
    return el("div", { class: role === "assistant" ? "message" : "message context" },
      el("div", { class: "role", text: typeof message?.reward === "number" ? `${role}, reward ${num(message.reward)}` : role }),
      role === "tool" ? folded(`${message.name ?? "tool"} answered: ${line(text)}`, cut) : cut || !calls.length ? textBlock(cut) : null,
      calls.map((call) => folded(`calls ${call?.function?.name ?? "a tool"}`, asText(call?.function?.arguments ?? call))));
  }));
}

/** As it is meant, or, of raw text, with the words marked that `other` lacks at that place; of long texts the lines. With `onlyAlike`, a text that
 * shares less than half of its words is shown without marks, which would tell nothing. */
export function differenceBlock(text, other, { mostCells = 4e6, onlyAlike = false } = {}) {
  if (isRendered()) return textBlock(text);
  const isSmall = ([one, two]) => one.length * two.length <= mostCells;
  const pieces = [WORDS, LINES].map((piece) => [text, other].map((one) => String(one ?? "").match(piece) ?? [])).find(isSmall);
  if (!pieces) return textBlock(text);
  const [own, others] = pieces, kept = commonPieces(own, others), isWord = (piece) => piece.trim() !== "";
  const shared = own.filter((piece, place) => kept.has(place) && isWord(piece)).length;
  if (onlyAlike && shared < own.filter(isWord).length / 2) return textBlock(text);
  const runs = [];
  own.forEach((piece, place) => {
    const marked = !kept.has(place), last = runs.at(-1);
    if (last?.marked === marked) last.text += piece;
    else runs.push({ marked, text: piece });
  });
  return textFrame(own.join(""), true, runs.map((run) => el(run.marked ? "mark" : "span", {}, textNodes(run.text))));
}

/** The places of `own` in the longest common subsequence with `others`. */
function commonPieces(own, others) {
  const width = others.length + 1;
  const lengths = new Uint16Array((own.length + 1) * width);
  for (let i = own.length - 1; i >= 0; i--) {
    for (let j = others.length - 1; j >= 0; j--) {
      lengths[i * width + j] = own[i] === others[j] ? lengths[(i + 1) * width + j + 1] + 1
        : Math.max(lengths[(i + 1) * width + j], lengths[i * width + j + 1]);
    }
  }
  const kept = new Set();
  for (let i = 0, j = 0; i < own.length && j < others.length;) {
    if (own[i] === others[j]) {
      kept.add(i);
      i++;
      j++;
    } else if (lengths[(i + 1) * width + j] >= lengths[i * width + j + 1]) i++;
    else j++;
  }
  return kept;
}
