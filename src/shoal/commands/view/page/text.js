// Text that a model wrote, shown as what it is: no markup, no control of the terminal, the reading direction or the page.

import { el } from "./dom.js";

const SHOWN_CHARS = 20000;
const LONG_CHARS = 1500;
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
export function textBlock(text, className = "text") {
  const whole = String(text ?? "");
  // A long text scrolls in a box of its own, which keys must reach.
  const isLong = whole.length > LONG_CHARS || whole.split("\n", 40).length === 40;
  const block = el("div", { class: isLong ? `${className} long` : className, dir: "auto", tabindex: isLong ? "0" : null });
  if (!whole) return el("div", { class: `${className} faint`, text: "(empty)" });
  block.append(...textNodes(whole.slice(0, SHOWN_CHARS)));
  if (whole.length > SHOWN_CHARS) {
    const more = el("button", { type: "button", class: "more", text:
      `Show the other ${(whole.length - SHOWN_CHARS).toLocaleString("en-US")} characters`, on: { click: () => {
      more.replaceWith(...textNodes(whole.slice(SHOWN_CHARS)));
    } } });
    block.append(more);
  }
  return block;
}

/** A prompt: its messages by role, or its text. */
export function promptBlock(prompt) {
  if (!Array.isArray(prompt)) return textBlock(typeof prompt === "string" ? prompt : JSON.stringify(prompt));
  return el("div", { class: "messages" }, prompt.map((message) => el("div", { class: "message" },
    el("div", { class: "role", text: String(message?.role ?? "message") }),
    textBlock(typeof message?.content === "string" ? message.content : JSON.stringify(message?.content ?? message)))));
}

/** Marks where a searched text occurs below a node, as a search of the Groups view found it. */
export function markFound(node, text, isRegex) {
  let expression;
  try {
    expression = new RegExp(isRegex ? text : text.replace(/[.*+?^${}()|[\]\\]/g, "\\$&"), isRegex ? "gu" : "giu");
  } catch {
    return; // an expression of the server's dialect that this one lacks
  }
  const walker = document.createTreeWalker(node, NodeFilter.SHOW_TEXT), places = [];
  while (walker.nextNode() && places.length < 1000) places.push(walker.currentNode);
  for (const place of places) {
    const found = [...place.data.matchAll(expression)].filter((match) => match[0]).slice(0, 200);
    if (!found.length) continue;
    let last = 0;
    const parts = found.flatMap((match) => {
      const before = place.data.slice(last, match.index);
      last = match.index + match[0].length;
      return [before, el("mark", { text: match[0] })];
    });
    place.replaceWith(...parts, place.data.slice(last));
  }
}

/** The words of `text`, those that `other` lacks at that place marked. Longest common subsequence over words. */
export function differenceBlock(text, other) {
  const own = words(text), others = words(other);
  if (own.length * others.length > 4e6) return textBlock(text);
  const kept = commonWords(own, others);
  const isLong = String(text ?? "").length > LONG_CHARS;
  const block = el("div", { class: isLong ? "text long" : "text", dir: "auto", tabindex: isLong ? "0" : null });
  let run = "", marked = false;
  const flush = () => {
    if (run) block.append(marked ? el("mark", {}, textNodes(run)) : el("span", {}, textNodes(run)));
    run = "";
  };
  own.forEach((word, place) => {
    if (marked === kept.has(place)) {
      flush();
      marked = !kept.has(place);
    }
    run += word;
  });
  flush();
  return block;
}

function words(text) {
  return String(text ?? "").match(/\s+|[\p{L}\p{N}]+|[^\s\p{L}\p{N}]/gu) ?? [];
}

function commonWords(own, others) {
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
