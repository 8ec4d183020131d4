// The page's frame: which view is open, which runs there are, keys, themes, and what a live run writes.

import { addressOf, goTo, here, onAddress, remember, remembered } from "./address.js";
import { showCompletions } from "./completions.js";
import { fileNote, isFile, load } from "./data.js";
import { el, replace, stateBox } from "./dom.js";
import { showGroup } from "./group.js";
import { showGroups } from "./groups.js";
import { showHome } from "./home.js";
import { findingsIn, readFindings, showLint } from "./lint.js";
import { showPrompt } from "./prompt.js";
import { chosenRuns, showRun } from "./run.js";
import { showTokens } from "./tokens.js";

const POLL_MILLISECONDS = 2000;
const VIEWS = { home: showHome, run: showRun, groups: showGroups, completions: showCompletions, group: showGroup, prompt: showPrompt, tokens: showTokens, lint: showLint };
const TABS = [["run", "Run"], ["groups", "Groups"], ["completions", "Completions"], ["lint", "Lint"]];
const KEYS = [["0", "all runs"], ["1 2 3 4", "Run, Groups, Completions, Lint"], ["/", "search"], ["j k", "next, previous row or completion"],
  ["n p", "next, previous group, question or page; next marked token"], ["] [", "next, previous step"],
  ["Enter", "open what is selected"], ["t", "tokens of the selected completion"], ["← →", "next, previous token"],
  ["c", "next colour of tokens"], ["Esc", "back"], ["d", "dark or light"], ["?", "this list"]];

const dark = matchMedia("(prefers-color-scheme: dark)");
const content = document.getElementById("content");
const header = document.getElementById("top");
const context = { runs: [], findings: new Map(),
  showFindings: (run, number) => { context.findings.set(run, number); drawCount(); } };
let open = null, shown = null, opening = 0;

async function start() {
  applyTheme(remembered("theme"));
  try {
    Object.assign(context, await load("runs"));
  } catch (error) {
    replace(content, stateBox("failed", error.message, start));
    return;
  }
  onAddress(show);
  addEventListener("keydown", onKey);
  dark.addEventListener("change", () => applyTheme(remembered("theme")));
  await show(here());
  if (!isFile) setTimeout(poll, POLL_MILLISECONDS);
}

async function show({ view: asked, parameters }) {
  const view = asked === "home" && !context.home && !parameters.runs ? "run" : asked;
  drawHeader(view, parameters);
  if (open && shown === view && open.moved?.(parameters)) return;
  const number = ++opening;
  open?.close?.();
  open = null;
  shown = view;
  const node = el("div", { class: `view view-${view}` });
  replace(content, node);
  const name = TABS.find(([key]) => key === view)?.[1] ?? view;
  document.title = `${name} · ${parameters.run ?? context.runs[0]?.name ?? ""} · Shoal`;
  try {
    if (!(view in VIEWS)) throw new Error(`There is no view ${view}.`);
    const opened = await VIEWS[view](node, parameters, context);
    if (number !== opening) opened?.close?.();
    else open = opened;
    if (number === opening) countFindings(view, header.dataset.run);
    if (number > 1 && number === opening && !content.contains(document.activeElement)) content.focus({ preventScroll: true });
  } catch (error) {
    if (number === opening) replace(node, el("h1", { text: "This cannot be shown" }), stateBox("failed", error.message, () => show(here())));
  }
}

/** The number on Lint's tab, on the views that do not read it themselves. */
function countFindings(view, run) {
  if (["home", "run", "lint"].includes(view) || !run || context.findings.has(run)) return;
  const number = opening;
  readFindings(run, (record) => context.showFindings(run, findingsIn(record).length), () => number !== opening);
}

function drawHeader(view, parameters) {
  const run = parameters.run || (parameters.runs ?? "").split(",")[0] || context.runs[0]?.name, isHome = view === "home";
  const tab = { group: "groups", prompt: "groups", tokens: "groups" }[view] ?? view, several = context.runs.length > 1;
  const tabs = TABS.map(([key, name]) => el("a", { href: addressOf(key, key === "run" && parameters.runs
    ? { runs: parameters.runs } : { run }), "aria-current": key === tab ? "page" : null, "data-tab": key, text: name }));
  const picker = several ? el("select", { id: "run", "aria-label": "Run", on: { change: (event) =>
    goTo(tab, { run: event.target.value }) } }, context.runs.map((one) => el("option", { value: one.name, text: one.name })))
    : el("span", { class: "runName", dir: "auto", text: run ?? "" });
  if (several) picker.value = run;
  replace(header, el("span", { class: "brand", text: "Shoal" }),
    several ? el("nav", { class: "all", "aria-label": "Runs" }, el("a", { href: "#/home", "aria-current": isHome ? "page" : null,
      text: "All runs" })) : null,
    isHome ? null : [picker, el("nav", { "aria-label": "Views" }, tabs)],
    el("span", { class: "live", id: "live", role: "status" }),
    isFile ? el("span", { class: "faint fileNote", text: fileNote }) : null,
    el("button", { type: "button", class: "plain", title: "key d", text: "Theme", on: { click: turnTheme } }),
    el("button", { type: "button", class: "plain wide", title: "key ?", text: "Keys", on: { click: showKeys } }));
  header.dataset.run = run ?? "";
  drawCount();
  showLive();
}

/** How much lint has found, on its tab. */
function drawCount() {
  const tab = header.querySelector("[data-tab=lint]"), number = context.findings.get(header.dataset.run);
  if (tab) replace(tab, "Lint", number ? el("span", { class: "number", "aria-label": `${number} findings`, text: number }) : null);
}

function showLive(text = "") {
  const node = document.getElementById("live");
  if (!node) return;
  const isShown = ({ name }) => here().view === "home" || name === header.dataset.run;
  const running = context.runs.some((run) => isShown(run) && run.progress.state === "running");
  node.textContent = text || (running && !isFile ? "live" : "");
}

/** Runs that began, and what running ones have written since, are read; the open view is drawn again where it changed. */
async function poll() {
  let wait = POLL_MILLISECONDS;
  if (document.visibilityState === "visible") {
    const before = context.runs;
    try {
      Object.assign(context, await load("runs"));
      const { parameters } = here();
      if (String(before.map((run) => run.name)) !== String(context.runs.map((run) => run.name))) {
        drawHeader(shown, parameters);
      }
      const isHome = shown === "home", isRun = shown === "run";
      const names = isRun ? chosenRuns(parameters, context) : [parameters.run || context.runs[0]?.name];
      const marks = (runs) => String(runs.filter((run) => isHome || names.includes(run.name)).map((run) => (isHome || isRun
        ? `${run.name} ${run.revision} ${run.progress.state} ${run.notes_written} ${run.waiting > 0}` : `${run.index} ${run.waiting}`)));
      header.classList.remove("lost");
      // Against the records before: the view was drawn after them, and a run may have ended since.
      if (marks(before) !== marks(context.runs)) await open?.update?.();
      showLive();
    } catch (error) {
      context.runs = before;
      header.classList.add("lost");
      showLive("the server does not answer");
      wait *= 3;
    }
  }
  setTimeout(poll, wait);
}

// ---- keys and themes

function onKey(event) {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const typing = /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName) && event.target.type !== "checkbox";
  if (typing) {
    if (event.key === "Escape") event.target.blur();
    return;
  }
  if (document.querySelector("dialog[open]")) return;
  if (event.key === "Enter" && event.target.closest?.("a, button, summary")) return;
  const { parameters } = here();
  const run = parameters.run;
  const common = {
    "/": () => (document.getElementById("search") ? document.getElementById("search").focus()
      : (goTo("groups", { run }), setTimeout(() => document.getElementById("search")?.focus(), 50))),
    "?": showKeys, d: turnTheme, 0: () => goTo("home", {}),
    ...Object.fromEntries(TABS.map(([key], place) => [String(place + 1), () => goTo(key, { run })])),
  };
  const call = open?.keys?.[event.key] ?? common[event.key];
  if (!call) return;
  event.preventDefault();
  call();
}

function showKeys() {
  const dialog = el("dialog", { "aria-labelledby": "keysTitle" }, el("h2", { id: "keysTitle", text: "Keys" }),
    el("dl", { class: "keys" }, KEYS.flatMap(([key, text]) => [el("dt", {}, el("kbd", { text: key })), el("dd", { text })])),
    el("button", { type: "button", text: "Close", on: { click: () => dialog.close() } }));
  dialog.addEventListener("close", () => dialog.remove());
  document.body.append(dialog);
  dialog.showModal();
}

function applyTheme(theme) {
  document.documentElement.dataset.theme = theme ?? (dark.matches ? "dark" : "light");
  open?.restyle?.();
}

function turnTheme() {
  const next = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
  remember("theme", next);
  applyTheme(next);
}

start();
