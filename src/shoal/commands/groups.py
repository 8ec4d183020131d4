"""`shoal groups`: a table of all groups of a run, or the groups of one step, as text or as JSON."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from shoal.config.commands import GroupsConfig
from shoal.records import ShoalError
from shoal.report.console import Console, completion_text, prompt_text
from shoal.runs.groups import StoredGroup, group_record
from shoal.runs.layout import find_run
from shoal.runs.reader import StoredRun
from shoal.runs.summary import version_text
from shoal.text import count, figure, one_line, shorten

TABLE = ("step", "group", "set", "reward", "spread", "pass", "length", "truncated", "staleness")


def groups(config: GroupsConfig, console: Console | None = None) -> dict[str, Any]:
    """Prints the table that `shoal view` shows; with `step` every group of a step, or the one at
    place `group` in the step's file. The records are returned."""
    with console or Console() as console:
        run = StoredRun(find_run(config.run))
        if not config.step and config.group < 0:
            return _table(run, config, console)
        config = replace(config, step=config.step or 1)
        found = (
            {config.group: run.group(config.step, config.group)}
            if config.group >= 0
            else dict(enumerate(run.groups(config.step)))
        )
        for number, stored in () if config.json else found.items():
            _show(f"step {config.step}, group {number}", stored, console)
    return {
        "run": str(run.path),
        "step": config.step,
        "groups": list(map(group_record, found.values())),
    }


def _table(run: StoredRun, config: GroupsConfig, console: Console) -> dict[str, Any]:
    """The rows of the page's Groups view, of all files that can be read, with a warning for each
    that cannot."""
    from shoal.runs.group_table import Database, GroupTable, reason

    run.require_groups()
    lenient = StoredRun(run.path, lenient=True)
    try:
        database = Database([lenient.root])
    except ShoalError as error:
        raise ShoalError(f"{error}; step=1 prints the groups of a step without it") from error
    table = GroupTable(lenient, database)
    try:
        while table.refresh():
            pass
        rows, total = table.rows(
            config.filter, config.sort, descending=not config.ascending, limit=config.limit
        )
    except database.error as error:
        raise ShoalError(
            f"{run.path}: its groups cannot be listed ({reason(error)}); step=1 prints those of a "
            "step"
        ) from error
    for text in lenient.problems.values():
        console.warning(text)
    names = {**{name: name for name in TABLE}, **{f"mean/{one}": one for one in table.functions}}
    if not config.json and rows:
        console.table(
            (*names.values(), "prompt"),
            [
                (*(figure(row[name]) for name in names), shorten(one_line(row["prompt"]), 60))
                for row in rows
            ],
        )
    if not config.json:
        console.note(f"{count(len(rows), 'group')} of {total:,}; step=1 group=0 prints one in full")
    return {"run": str(run.path), "total": total, "groups": rows}


def _show(place: str, stored: StoredGroup, console: Console) -> None:
    group = stored.group
    console.heading(
        f"{place}: row {group.example.row}, {len(group.prompt_ids)} prompt tokens, sampled by the "
        f"weights {version_text(group.version)}"
    )
    console.passage("prompt", prompt_text(group.example.prompt))
    for i, completion in enumerate(group.completions):
        facts = [f"reward {figure(float(group.rewards[i]))}"]
        facts += [
            f"{name} {figure(float(values[i]))}" for name, values in group.reward_components.items()
        ]
        if stored.advantages is not None:
            facts.append(f"advantage {figure(float(stored.advantages[i]))}")
        if group.correct is not None and "correct" not in group.reward_components:
            facts.append("correct" if group.correct[i] else "not correct")
        if not group.valid[i]:
            facts.append("unscorable")
        context = (
            f" and {len(completion) - completion.num_sampled} of context"
            if completion.messages
            else ""
        )
        facts.append(
            f"{completion.num_sampled} tokens{context}, ended by {completion.stop_reason.value}"
        )
        if completion.branches:
            facts.append(count(len(completion.branches), "branch", "branches"))
        if completion.prompt_ids is not None:
            facts.append(f"{len(completion.prompt_ids)} prompt tokens of its own")
        console.passage(f"completion {i}: {', '.join(facts)}", completion_text(group, i))
