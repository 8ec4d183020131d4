"""`shoal groups`: the groups of one step as text, or as JSON."""

from __future__ import annotations

from typing import Any

from shoal.config.schema import GroupsConfig
from shoal.config.text import require_given
from shoal.report.console import Console, prompt_text
from shoal.report.folder import find_run
from shoal.report.groups import StoredGroup, group_record
from shoal.report.reading import figure, read_stored
from shoal.text import count
from shoal.types import ShoalError


def groups(config: GroupsConfig, console: Console | None = None) -> dict[str, Any]:
    """Prints every group of a step, or the one at place `group` in the step's file; the records are returned."""
    require_given(config, "run")
    with console or Console() as console:
        run = find_run(config.run)
        stored = read_stored(run, config.step)
        if config.group >= len(stored):
            raise ShoalError(f"group={config.group}: step {config.step} of {run} has "
                             f"{count(len(stored), 'group')}, 0 to {len(stored) - 1}")
        places = [config.group] if config.group >= 0 else list(range(len(stored)))
        for place in () if config.json else places:
            _show(f"step {config.step}, group {place}", stored[place], console)
    return {"run": str(run), "step": config.step, "groups": [group_record(stored[place]) for place in places]}


def _show(place: str, stored: StoredGroup, console: Console) -> None:
    group = stored.group
    console.heading(f"{place}: row {group.example.row}, {len(group.prompt_ids)} prompt tokens, sampled by "
                    f"version {group.version}")
    console.passage("prompt", prompt_text(group.example.prompt))
    for i, completion in enumerate(group.completions):
        facts = [f"reward {figure(float(group.rewards[i]))}"]
        facts += [f"{name} {figure(float(values[i]))}" for name, values in group.reward_components.items()]
        if stored.advantages is not None:
            facts.append(f"advantage {figure(float(stored.advantages[i]))}")
        if group.correct is not None and "correct" not in group.reward_components:
            facts.append("correct" if group.correct[i] else "not correct")
        if not group.valid[i]:
            facts.append("unscorable")
        facts.append(f"{len(completion)} tokens, ended by {completion.stop_reason.value}")
        console.passage(f"completion {i}: {', '.join(facts)}", group.texts[i])
