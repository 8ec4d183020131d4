// Elements and figures. Text goes into the page as text nodes alone: nothing here, or in any other module, parses HTML.

const shownOf = (children) => children.flat(Infinity).filter((child) => ![null, undefined, false].includes(child));

/** An element. `props`: class, text, on (events), and attributes; null and false attributes are left out. */
export function el(tag, props = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "class") node.className = value;
    else if (name === "text") node.textContent = value;
    else if (name === "on") for (const [event, call] of Object.entries(value)) node.addEventListener(event, call);
    else if (name === "value") node.value = value;
    else node.setAttribute(name, value === true ? "" : String(value));
  }
  node.append(...shownOf(children));
  return node;
}

export function replace(node, ...children) {
  node.replaceChildren(...shownOf(children));
  return node;
}

/** A state of a view: loading, empty or failed. */
export function stateBox(kind, text, retry) {
  const again = retry ? el("button", { type: "button", text: "Try again", on: { click: retry } }) : null;
  return el("div", { class: `state ${kind}`, role: kind === "failed" ? "alert" : "status" },
    el("p", { text }), again);
}

/** A link that looks like a button, off where it leads nowhere. */
export function stepLink(text, key, href) {
  return el("a", { class: href ? "button" : "button off", "aria-disabled": href ? null : "true", title: `key ${key}`, href, text });
}

/** Selects the row or card so many places after the selected one, and brings it into sight. */
export function selectNext(nodes, by) {
  const place = Math.max(0, Math.min(nodes.length - 1, nodes.findIndex((node) => node.classList.contains("selected")) + by));
  nodes.forEach((node, index) => node.classList.toggle("selected", index === place));
  nodes[place]?.scrollIntoView({ block: "nearest" });
  return place;
}

/** A number for reading: few digits, no noise; an en dash for none. */
export function num(value, digits = 3) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (typeof value === "boolean") return value ? "yes" : "no";
  if (typeof value !== "number") return String(value);
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size < 1e-4 || size >= 1e9) return value.toExponential(2).replace("-", "−");
  if (Number.isInteger(value)) return value.toLocaleString("en-US").replace("-", "−");
  const places = Math.min(8, Math.max(0, digits - 1 - Math.floor(Math.log10(size))));
  return value.toLocaleString("en-US", { maximumFractionDigits: places }).replace("-", "−");
}

/** A value of a setting or of the data, for reading. */
export function asText(value) {
  return value === null || value === undefined ? "–" : typeof value === "string" ? value : JSON.stringify(value);
}

/** A change: a loss is not taken for a gain at a glance. `sign`: 0 where it lies within noise. */
export function changeMark(value, text, sign) {
  return el("span", { class: `gain ${sign > 0 ? "up" : sign < 0 ? "down" : "faint"}`,
    text: (value > 0 ? "▲ +" : value < 0 ? "▼ " : "") + text });
}

/** The change of a figure, as its row in the table before and after training has it. */
export function gainMark(change, sign) {
  return changeMark(Number.parseFloat(change) || 0, minus(change).replace("+", ""), sign);
}

/** Text with what stands between backticks as code. */
export function coded(text) {
  return text.split("`").map((part, place) => (place % 2 ? el("code", { text: part }) : part));
}

/** A number with its noun: 1 step, 2 steps. */
export function count(number, noun) {
  return `${num(number)} ${noun}${number === 1 ? "" : "s"}`;
}

/** When weights were as in this version. */
export function versionText(version) {
  return version ? `after step ${num(version)}` : "before training";
}

/** Which step of training a group is of, or of which data set and version; null: a group of an evaluation. */
export function trainedWhen({ set, step }) {
  if (set === "train") return `step ${num(step)}`;
  return set === "discarded" ? `step ${num(step)}, discarded` : null;
}

/** The filter of the groups of evaluations. */
export const EVALUATIONS = "set!=train set!=discarded";

/** What a groups file is of: step_000012 is step 12, evaluate_held_out_000040 is held_out, after step 40. */
export function fileText(stem) {
  const [, kind, number] = /^(.*)_(\d+)$/.exec(stem) ?? [null, stem, 0];
  const trained = trainedWhen({ set: kind === "step" ? "train" : kind, step: Number(number) });
  return trained ?? `${kind.replace(/^evaluate_/, "")}, ${versionText(Number(number))}`;
}

/** A text from Python with the sign for minus. */
export function minus(text) {
  return text.replace(/(^|\s)-(?=\d)/g, "$1−");
}

/** A share in the form of the terminal: 37.0%. */
export function percent(value) {
  return value === null || value === undefined ? "–" : `${(100 * value).toFixed(1)}%`;
}

export function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  const whole = Math.max(0, Math.round(seconds));
  const hours = Math.floor(whole / 3600), minutes = Math.floor((whole % 3600) / 60), rest = whole % 60;
  const two = (value) => String(value).padStart(2, "0");
  return hours ? `${hours}:${two(minutes)}:${two(rest)}` : `${minutes}:${two(rest)}`;
}

export function card(title, ...children) {
  return el("section", { class: "card" }, el("h2", { text: title }), children);
}

/** A name and what it is, in a list of facts. */
export function fact(name, value, kind) {
  return el("div", {}, el("dt", { text: name }), el("dd", { class: kind || null }, value));
}

/** A table in a card, or why there is none. */
export function tableCard(title, head, rows, none) {
  return card(title, rows.length ? table(head, rows, title) : el("p", { class: "faint", text: none }));
}

/** A table in a box of its own that scrolls sideways, so that a narrow page never does. */
export function table(head, rows, label) {
  const cells = (tag, row) => row.map((cell, place) => el(tag, {
    scope: tag === "th" ? "col" : null, class: place ? "number" : null,
  }, cell));
  return el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": label },
    el("table", {}, el("thead", {}, el("tr", {}, cells("th", head))),
      el("tbody", {}, rows.map((row) => el("tr", {}, cells("td", row))))));
}
