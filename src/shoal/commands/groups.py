"""`shoal groups`: prints a table of all groups of a run, or the groups of one step, as text or as
JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

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
    """Prints and returns a run's groups as a table like the one in `shoal view`; or, with the keys
    `step` and `group`, all groups of a step or one of them in full. Steps are counted from 1 (0:
    all steps), groups from 0 (below 0: all groups); `group` alone is of step 1. These are groups
    of training, unless there is a `filter`: then those that it leaves, also of evaluations, as many
    as `limit` allows. With `json` groups are not printed.

    Returns `run` and `groups`, which are rows of the table or records of groups; with the table
    also `total`, the number of groups that the filter leaves, else `step`. ShoalError if the run,
    the step or the group does not exist. A `console` that is given can be used afterwards; None:
    one for this command."""
    with console or Console() as console:
        run = StoredRun(find_run(config.run))
        if not config.step and config.group < 0:
            return _table(run, config, console)
        step = config.step or 1
        stored: dict[str, StoredGroup] = {}
        if config.filter:
            stored = _filtered(run, config, step, console)
        elif config.group >= 0:
            stored[f"step {step}, group {config.group}"] = run.group(step, config.group)
        else:
            for number, group in enumerate(run.groups(step)):
                stored[f"step {step}, group {number}"] = group
        if not config.json:
            for title, group in stored.items():
                _show(title, group, console)
    records = [group_record(group) for group in stored.values()]
    return {"run": str(run.path), "step": step, "groups": records}


def _filtered(
    run: StoredRun, config: GroupsConfig, step: int, console: Console
) -> dict[str, StoredGroup]:
    """Returns title -> group, of training and evaluations, for the groups of a step that the filter
    leaves. Errors and warnings are those of `_rows`."""
    conditions = f"{config.filter} step={step}"
    if config.group >= 0:
        conditions += f" group={config.group}"
    rows, _, _ = _rows(run, replace(config, filter=conditions), console)
    if not rows:
        raise ShoalError(
            f"filter={config.filter}: step {step} of {run.path} has no such group; without step= "
            "and group= all groups are searched"
        )
    groups_of: dict[str, list[StoredGroup]] = {}  # the groups of each file, read once
    stored = {}
    for row in rows:
        name, _, _ = row["file"].rpartition("_")
        if name not in groups_of:
            groups_of[name] = run.groups(step, name)
        title = f"step {step}, group {row['group']} of {row['set']}"
        stored[title] = groups_of[name][int(row["group"])]
    return stored


def _table(run: StoredRun, config: GroupsConfig, console: Console) -> dict[str, Any]:
    """Prints and returns the rows of the table of groups, filtered and sorted as the keys say, at
    most `config.limit`; `total` counts all that the filter leaves. With `config.json` only warnings
    are printed. Errors and warnings are those of `_rows`."""
    rows, total, functions = _rows(run, config, console)
    if not config.json:
        if rows:
            _print_rows(rows, functions, console)
        console.note(f"{count(len(rows), 'group')} of {total:,}; step=1 group=0 prints one in full")
    return {"run": str(run.path), "total": total, "groups": rows}


def _rows(
    run: StoredRun, config: GroupsConfig, console: Console
) -> tuple[list[dict[str, Any]], int, Sequence[str]]:
    """Returns (rows of the table of groups, the number of all that the filter leaves, the names of
    the reward functions). Warns of each file that cannot be read, and leaves it out. ShoalError if
    the run has no stored groups, if the filter is wrong, or if the database of groups cannot be
    opened."""
    from shoal.runs.group_table import Database, GroupTable, reason

    if not run.group_files("discarded"):  # the first step may have ended for lack of groups
        run.require_groups()  # called for its error alone
    lenient = StoredRun(run.path, lenient=True)
    try:
        database = Database([lenient.root])
    except ShoalError as error:
        raise ShoalError(f"{error}; step=1 prints the groups of a step without it") from error
    table = GroupTable(lenient, database)
    try:
        has_more = True
        while has_more:  # each call reads some more files into the database
            has_more = table.refresh()
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
    return rows, total, table.functions


def _print_rows(
    rows: Sequence[Mapping[str, Any]], functions: Sequence[str], console: Console
) -> None:
    """Prints rows of the table of groups: the columns in TABLE, the mean of each reward function in
    `functions`, and the beginning of the prompt. `rows`: column -> value, those functions' under
    `mean/NAME`."""
    columns: list[str] = list(TABLE)
    titles: list[str] = list(TABLE)
    for function in functions:
        columns.append(f"mean/{function}")
        titles.append(function)
    titles.append("prompt")
    shown = []
    for row in rows:
        cells = [figure(row[column]) for column in columns]
        cells.append(shorten(one_line(row["prompt"]), 60))
        shown.append(tuple(cells))
    console.table(tuple(titles), shown)


def _show(title: str, stored: StoredGroup, console: Console) -> None:
    """Prints one group: a heading that begins with `title`, its prompt, and each completion, from
    0, with its rewards, length and end. The advantage is left out if it was not stored."""
    group = stored.group
    console.heading(
        f"{title}: row {group.example.row}, {len(group.prompt_ids)} prompt tokens, sampled by the "
        f"weights {version_text(group.version)}"
    )
    console.passage("prompt", prompt_text(group.example.prompt))
    for index, completion in enumerate(group.completions):
        facts = [f"reward {figure(float(group.rewards[index]))}"]
        for name, values in group.reward_components.items():
            facts.append(f"{name} {figure(float(values[index]))}")
        if stored.advantages is not None:
            facts.append(f"advantage {figure(float(stored.advantages[index]))}")
        if group.turn_rewards:
            facts.append(f"rewards of its turns {_listed(group.turn_rewards[index])}")
        if stored.turn_advantages:
            facts.append(f"their advantages {_listed(stored.turn_advantages[index])}")
        if group.correct is not None and "correct" not in group.reward_components:
            facts.append("correct" if group.correct[index] else "not correct")
        if not group.valid[index]:
            facts.append("unscorable")
        tokens = f"{completion.num_sampled} tokens"
        if completion.messages:
            tokens += f" and {len(completion) - completion.num_sampled} of context"
        facts.append(f"{tokens}, ended by {completion.stop_reason.value}")
        if completion.branches:
            facts.append(count(len(completion.branches), "branch", "branches"))
        if completion.prompt_ids is not None:
            facts.append(f"{len(completion.prompt_ids)} prompt tokens of its own")
        title_text = f"completion {index}: {', '.join(facts)}"
        console.passage(title_text, completion_text(group, index))


def _listed(values: np.ndarray) -> str:
    """Returns numbers as a text, such as "0.5 -0.25"."""
    return " ".join(figure(float(value)) for value in values)
