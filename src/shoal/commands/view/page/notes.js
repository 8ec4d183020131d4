// What people write about a run: a note in plain text, and tags. Both are kept in the run's folder.

import { addressOf } from "./address.js";
import { isFile, send } from "./data.js";
import { el, replace } from "./dom.js";

/** Tags as links to the list of the runs that have them; without a list (`isListed` false) as words. */
export function tagList(tags, isListed) {
  if (!tags.length) return null;
  return el("span", { class: "tags" }, tags.map((tag) => (isListed
    ? el("a", { class: "chip", dir: "auto", href: addressOf("home", { find: `tag=${tag}` }), text: tag })
    : el("span", { class: "chip", dir: "auto", text: tag }))));
}

/** True if a run has every word of `find`: in its name, tags, note or settings; `tag=NAME` is exactly that tag. */
export function isFound({ name, tags, notes, chips }, find) {
  const text = [name, ...tags, notes, ...chips.map(([key, value]) => `${key}=${value}`)].join("\n").toLowerCase();
  return find.split(/\s+/).filter(Boolean).every((word) => (word.startsWith("tag=")
    ? tags.includes(word.slice(4)) : text.includes(word.toLowerCase())));
}

/** The note and tags of a run, with a button that opens a form to change them. */
export class Notes {
  constructor(record, isListed) {
    this.node = el("div", { class: "notes" });
    this.isListed = isListed;
    this.isEdited = false;
    this.update(record);
  }

  /** Shows the notes of a record of the run; while somebody writes, the form stays, and they are shown after it. */
  update({ name, notes, tags }) {
    this.run = name;
    this.newest = { notes, tags };
    if (this.isEdited) return;
    const label = notes || tags.length ? "Edit note and tags" : "Add a note or tags";
    const edit = el("button", { type: "button", class: "plain", text: label, on: { click: () => this.edit() } });
    replace(this.node, tagList(tags, this.isListed), notes ? el("p", { class: "note", dir: "auto", text: notes }) : null,
      isFile ? null : edit);
  }

  edit() {
    this.isEdited = true;
    const before = this.newest, { notes, tags } = before;
    const text = el("textarea", { id: "note", rows: 4, dir: "auto", maxlength: 20_000, value: notes });
    const words = el("input", { id: "tags", type: "text", dir: "auto", autocomplete: "off", value: tags.join(" ") });
    const error = el("p", { class: "down", role: "alert" });
    const close = (record) => {
      this.isEdited = false;
      this.update({ name: this.run, ...record });
      this.node.querySelector("button")?.focus();
    };
    const save = async (event) => {
      event.preventDefault();
      const chosen = words.value.split(/[\s,]+/).filter(Boolean);
      try {
        close(await send("notes", { run: this.run, notes: text.value, tags: chosen, before }));
      } catch (fault) {
        error.textContent = fault.message;
      }
    };
    replace(this.node, el("form", { class: "card noteForm", on: { submit: save } },
      el("label", { for: "note", text: "Note" }), text,
      el("label", { for: "tags", text: "Tags, separated by spaces" }), words, error,
      el("div", { class: "controls" }, el("button", { type: "submit", class: "primary", text: "Save" }),
        el("button", { type: "button", text: "Cancel", on: { click: () => close(this.newest) } }))));
    text.focus();
  }
}
