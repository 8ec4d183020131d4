"""Writes the page with its scripts, styles and the records of chosen groups into one file, which
makes no requests.

The modules become one script in the order of their imports, so every top-level name may be in only
one module. The page's Content-Security-Policy allows only this script and style, by their hashes,
so nothing in the records can run and nothing is fetched."""

from __future__ import annotations

import base64
import hashlib
import itertools
import json
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from shoal.commands.view.completions import with_texts
from shoal.commands.view.groups import MAX_SIBLINGS
from shoal.commands.view.server import page_files
from shoal.commands.view.views import OpenRun, Viewer
from shoal.config.commands import ViewConfig
from shoal.files import atomic_write, explain_write_errors
from shoal.records import ShoalError
from shoal.runs.lines import json_ready
from shoal.runs.reader import StoredRun

MODULES = (
    "dom.js",
    "address.js",
    "render.js",
    "text.js",
    "data.js",
    "plot.js",
    "charts.js",
    "lint.js",
    "notes.js",
    "home.js",
    "compare.js",
    "run.js",
    "listing.js",
    "groups.js",
    "completions.js",
    "group.js",
    "prompt.js",
    "tokens.js",
    "main.js",
)
"""The page's modules, each after those that it imports."""
DEFAULT_GROUPS, MAX_GROUPS, MAX_PAIRED, LINT_SECONDS = 32, 2000, 8, 120.0
_SPEC = re.compile(r"(\d{1,9})(?::(\d{1,9})(?:-(\d{1,9}))?)?")


def write_page(config: ViewConfig, to: Path) -> tuple[list[StoredRun], int]:
    """Writes the page with all its data to one HTML file, which replaces `to` only when it is
    whole. Returns (the runs that it shows, its size in bytes). Of groups it has those that
    `config.groups` names, or some (`_chosen`). ShoalError if no run is found, or if a run lacks
    groups that are named."""
    viewer = Viewer(config.runs)
    try:
        if not viewer.runs:
            raise ShoalError(
                f"{', '.join(config.runs)}: none of these folders is a run, and a file needs one"
            )
        viewer.read_all()
        records = dict(_records(viewer, config.groups))
    finally:
        viewer.close()
    note = f"written by shoal view, {time.strftime('%Y-%m-%d %H:%M')}"
    data = page_text({"records": records, "note": note}).encode("utf-8", "backslashreplace")
    with atomic_write(to) as temporary, explain_write_errors(to):
        temporary.write_bytes(data)
    return [opened.run for opened in viewer.runs.values()], len(data)


def page_text(content: Mapping[str, Any]) -> str:
    """Returns the HTML of the page with script, style and data inside. `content`: `records`, by
    their keys (`record_key`), and a `note`, which says when the page was written."""
    files = {name: data.decode() for name, data in page_files().items()}
    script = script_of(files)
    style = files["page.css"]
    policy = (
        f"default-src 'none'; script-src {_hash(script)}; style-src {_hash(style)}; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    # In JSON a `<` can only be inside a text. Escaped there, no record can end the element that
    # holds the data.
    data = json.dumps(json_ready(content), ensure_ascii=False, allow_nan=False).replace(
        "<", "\\u003c"
    )
    page = files["index.html"]
    head = (
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n<style>{style}</style>\n'
        f'<script type="application/json" id="data">{data}</script>'
    )
    page = re.sub(r"<link rel=\"stylesheet\"[^>]*>\n", "", page)

    # A function, because in a template a backslash would be an escape.
    def head_of_page(_: re.Match[str]) -> str:
        return head

    page = re.sub(r"<script type=\"module\"[^>]*></script>", head_of_page, page)
    # The script comes after the elements that it uses, because not every browser waits with an
    # inline module until it has read the page.
    return page.replace("</body>", f'<script type="module">{script}</script>\n</body>')


def _hash(text: str) -> str:
    """Returns the hash of a text as a Content-Security-Policy has it."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def script_of(files: Mapping[str, str]) -> str:
    """Returns the modules in MODULES joined to one script, in that order, without imports and
    without the word `export`. `files`: texts by file name, with one for each module (else
    KeyError); others are not read."""
    parts = []
    for name in MODULES:
        text = re.sub(r"^import\b[^;]*;\n", "", files[name], flags=re.MULTILINE)
        text = re.sub(_EXPORT, "", text, flags=re.MULTILINE)
        parts.append(text)
    return "\n".join(parts).replace("</script", "<\\/script")


_EXPORT = r"^export (?=async function|function|const|let|class)"


# ---- the records


def record_key(view: str, parameters: Mapping[str, Any]) -> str:
    """Returns the key of a record: the view and its parameters, sorted by name, without those that
    are "" or None, such as "group&file=step_000012&group=0&run=first". It must equal that of
    `recordKey` in data.js."""
    pairs = [view]
    for name, value in sorted(parameters.items()):
        if value not in ("", None):
            pairs.append(f"{name}={value}")
    return "&".join(pairs)


def _records(viewer: Viewer, specs: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """Yields (key, record) for each view that the page can show, of each run and of the groups
    that `_chosen` chooses; `specs` as there. Runs are compared in pairs only among the first
    MAX_PAIRED."""

    def record(view: str, **parameters: Any) -> tuple[str, Any]:
        """Returns the key and the record of a view."""
        texts = {name: str(value) for name, value in parameters.items()}
        return record_key(view, parameters), viewer.answer(view, texts)

    # Run -> filters of the groups in which pairs of runs first differ.
    differing: dict[str, set[str]] = {name: set() for name in viewer.runs}
    yield record("runs")
    if len(viewer.runs) > 1:
        yield record("home")
        compared = [tuple(viewer.runs)]
        compared += itertools.permutations(list(viewer.runs)[:MAX_PAIRED], 2)
        # The comparison of all runs, then that of each pair in both orders.
        for names in compared:
            key, comparison = record("compare", runs=",".join(names))
            yield key, comparison
            first = comparison.get("first", {})
            if first.get("stage"):
                for name in names:
                    differing[name].add(f"set=train step={first['step']} group={first['group']}")
    for name, opened in viewer.runs.items():
        yield record("overview", run=name)
        yield record("curves", run=name)
        lint = _whole_lint(viewer, name)
        yield record_key("lint", {"run": name}), lint
        rows = _chosen(opened, specs, lint, differing[name])
        page = viewer.answer("groups", {"run": name, "limit": "1"})
        yield record_key("groups", {"run": name}), page | {"rows": rows, "total": len(rows)}
        yield record_key("completions", {"run": name}), _completions_of(viewer, opened, rows)
        for row in rows:
            of_group = {"run": name, "file": row["file"], "group": row["group"]}
            key, group = record("group", **of_group)
            yield key, group
            for completion in group["completions"]:
                yield record("tokens", **of_group, completion=completion["completion"])


def _whole_lint(viewer: Viewer, name: str) -> dict[str, Any]:
    """Returns the Lint record of a run after all texts were read, or LINT_SECONDS have passed;
    `done` is True in either case, so that the page does not wait for more."""
    until = time.monotonic() + LINT_SECONDS
    # Each request reads further texts.
    lint = viewer.answer("lint", {"run": name})
    while not lint["done"] and time.monotonic() < until:
        lint = viewer.answer("lint", {"run": name})
    return lint | {"done": True}


def _completions_of(
    viewer: Viewer, opened: OpenRun, groups: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Returns the record of the Completions view with all completions of these groups (rows of the
    Groups view)."""
    page = viewer.answer("completions", {"run": opened.run.name, "limit": "1"})
    rows = []
    for group in groups:
        file = opened.index.files[group["file"]]
        where = f"group={group['group']}"
        found, _ = opened.index.completion_rows(where, "completion", limit=MAX_SIBLINGS, file=file)
        rows += found
    return page | {"rows": with_texts(opened.index, rows), "total": len(rows)}


def _chosen(
    opened: OpenRun, specs: Sequence[str], lint: Mapping[str, Any], also: Iterable[str]
) -> list[dict[str, Any]]:
    """Returns rows of the Groups view, by step and group, for the groups that `specs` name
    ("12:0-7", see `_filter`); without any, for the newest step's groups and the examples of `lint`
    (the record of the Lint view), at most DEFAULT_GROUPS for each filter. `also`: filters of
    further groups, which may match nothing. ShoalError if a spec matches nothing, or if there are
    more than MAX_GROUPS groups."""
    if specs:
        filters = [_filter(spec) for spec in specs]
        limit = MAX_GROUPS
    else:
        filters = _default_filters(opened, lint)
        limit = DEFAULT_GROUPS
    rows: dict[tuple[str, int], dict[str, Any]] = {}
    for text in (*filters, *also):
        # The first `limit` groups of the filter, in ascending order of their numbers.
        found, _ = opened.index.rows(text, "group", False, 0, limit)
        if specs and not found and text in filters:
            raise ShoalError(f"groups: {opened.run.name} has none with {text}")
        for row in found:
            rows[row["file"], row["group"]] = row
    if len(rows) > MAX_GROUPS:
        raise ShoalError(
            f"groups: {len(rows):,} groups make too large a file; choose {MAX_GROUPS:,} or fewer"
        )
    return sorted(rows.values(), key=lambda row: (row["step"], row["group"]))


def _default_filters(opened: OpenRun, lint: Mapping[str, Any]) -> list[str]:
    """Returns filters of the Groups view: one for all groups of the newest training step, if there
    is one, and one for each of the first three examples of each finding in `lint`. [] if there is
    neither."""
    filters = []
    steps = []
    for stem in opened.index.files:
        if stem.startswith("step_"):
            steps.append(int(stem.removeprefix("step_")))
    if steps:
        filters.append(f"set=train step={max(steps)}")
    for finding in lint["findings"]:
        for example in finding["examples"][:3]:
            step = int(example["file"].removeprefix("step_"))
            filters.append(f"set=train step={step} group={example['group']}")
    return filters


def _filter(spec: str) -> str:
    """Converts a spec like `12:0-7` (step, groups, the last included) to a filter of the Groups
    view: "set=train step=12 group=0..7". ShoalError if the text is no spec."""
    matched = _SPEC.fullmatch(spec.strip())
    if not matched:
        raise ShoalError(
            f"groups={spec}: expected a step (12), a group of it (12:3) or several (12:0-7)"
        )
    step, first, last = matched.groups()
    text = f"set=train step={step}"
    if first is not None:
        text += f" group={first}..{last or first}"
    return text
