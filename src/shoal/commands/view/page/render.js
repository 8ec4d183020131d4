// Text as it is meant to be read: thoughts folded, code in blocks, headings, lists and emphasis. Made of elements and text
// nodes: nothing that a model wrote is parsed as HTML, and no link or picture is followed.

import { remember, remembered } from "./address.js";
import { count, el } from "./dom.js";

const THOUGHTS = /<(think|thinking|reasoning)>([\s\S]*?)(?:<\/\1>|$)/g;
const INLINE = /(`[^`\n]+`|\*\*[^*\n]+\*\*|\*[^*\s][^*\n]*\*)/;

export function isRendered() {
  return remembered("text") === "rendered";
}

/** The switch between raw and rendered text; `redraw` is called after each change. */
export function textChoice(redraw) {
  const node = el("select", { id: "text", on: { change: (event) => {
    remember("text", event.target.value);
    redraw();
  } } }, ["raw", "rendered"].map((value) => el("option", { value, text: value })));
  node.value = isRendered() ? "rendered" : "raw";
  return el("label", { for: "text" }, "Text ", node);
}

/** Nodes for a text; `plain` gives those of a piece without marks. */
export function renderedNodes(text, plain) {
  const nodes = [];
  let last = 0;
  for (const found of text.matchAll(THOUGHTS)) {
    const [whole, tag, thoughts] = found;
    nodes.push(blocks(text.slice(last, found.index), plain), el("details", {},
      el("summary", { text: `${tag}: ${count(thoughts.length, "character")}` }), blocks(thoughts, plain)));
    last = found.index + whole.length;
  }
  return [nodes, blocks(text.slice(last), plain)];
}

/** Paragraphs, headings, items of lists and blocks of code, line by line. */
function blocks(text, plain) {
  const nodes = [];
  let code = null, paragraph = [];
  const close = () => {
    if (paragraph.join("").trim()) nodes.push(el("p", {}, inline(paragraph.join("\n"), plain)));
    paragraph = [];
  };
  const closeCode = () => {
    nodes.push(el("pre", {}, el("code", {}, plain(code.join("\n")))));
    code = null;
  };
  for (const line of text.split("\n")) {
    const heading = /^#{1,6}\s+(.*)/.exec(line), item = /^(\s*)(?:[-*+]|(\d{1,3}[.)]))\s+(.*)/.exec(line);
    if (line.startsWith("```")) {
      close();
      if (code) closeCode();
      else code = [];
    } else if (code) code.push(line);
    else if (heading) {
      close();
      nodes.push(el("p", { class: "heading" }, inline(heading[1], plain)));
    } else if (item) {
      close();
      nodes.push(el("p", { class: item[1].length > 1 ? "item deep" : "item" }, `${item[2] ?? "•"} `, inline(item[3], plain)));
    } else if (line.trim() === "") close();
    else paragraph.push(line);
  }
  close();
  if (code) closeCode();
  return nodes;
}

/** Code, bold and slanted words of a line. */
function inline(text, plain) {
  return text.split(INLINE).map((part, place) => {
    if (place % 2 === 0) return plain(part);
    if (part.startsWith("`")) return el("code", {}, plain(part.slice(1, -1)));
    return part.startsWith("**") ? el("strong", {}, plain(part.slice(2, -2))) : el("em", {}, plain(part.slice(1, -1)));
  });
}
