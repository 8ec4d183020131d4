"""`shoal diff`: two run folders side by side, from the settings down to the first token that differs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from shoal.config.text import require_given
from shoal.config.schema import DiffConfig
from shoal.report.console import Console
from shoal.report.difference import (
    NAMES_AND_PLACES,
    Parting,
    as_dict,
    config_difference,
    evaluation_difference,
    group_difference,
    is_under,
    metric_difference,
    parting,
    suspects,
)
from shoal.report.folder import find_run
from shoal.report.lines import json_ready
from shoal.report.reading import figure, is_finished, ranges, read_config, read_evaluations, read_groups, read_metrics


def diff(config: DiffConfig, console: Console | None = None) -> dict[str, Any]:
    """`identical` over the steps that both runs have; where they part first, and the key that most likely did it."""
    require_given(config, "run", "other")
    with console or Console() as console:
        runs = find_run(config.run), find_run(config.other)
        configs, metrics = [read_config(run) for run in runs], [read_metrics(run) for run in runs]
        keys = config_difference(*configs)
        apart = metric_difference(*metrics)
        place, group_steps = group_difference(*runs, last=apart[0] if apart else None)
        version = read_groups(runs[0], place.step)[place.group or 0].version if place and place.stage == "sampling" \
            else None
        found = parting(place, version, apart, group_steps, keys)
        evaluations = [read_evaluations(run) for run in runs]
        evaluated = evaluation_difference(*evaluations)
        if found is None and evaluated:
            found = Parting(evaluated[0], ("evaluation",), f"the steps are the same, the evaluation of version "
                            f"{evaluated[0]} on {evaluated[1]} is not")
        likely = suspects(found.stages, keys) if found else []
        shared = sorted(metrics[0].steps.keys() & metrics[1].steps.keys() | set(group_steps))
        result = json_ready({
            "run": str(runs[0]), "other": str(runs[1]), "identical": found is None and bool(shared),
            "config": keys, "num_steps": [len(stored.steps) for stored in metrics], "steps_compared": ranges(shared),
            "group_steps_compared": ranges(group_steps), "torn": [stored.torn for stored in metrics],
            "finished": [is_finished(run) for run in runs],
            "first_metrics": {"step": apart[0], "metrics": apart[1]} if apart else None,
            "num_evaluations": [len(stored) for stored in evaluations],
            "evaluations_compared": len(evaluations[0].keys() & evaluations[1].keys()),
            "first_evaluation": evaluated and dict(zip(("version", "name", "figures"), evaluated, strict=True)),
            "first_group_difference": as_dict(place), "parted": found and {
                "step": found.step, "stage": found.stages[0], "says": found.sentence},
            "likely_keys": likely,
        })
        _show(result, console)
    return result


def _show(result: dict[str, Any], console: Console) -> None:
    names = Path(result["run"]).name, Path(result["other"]).name
    console.heading(f"{result['run']} and {result['other']}, steps {result['steps_compared'] or 'none'}")
    if result["num_steps"][0] != result["num_steps"][1]:
        console.note(f"they have {result['num_steps'][0]} and {result['num_steps'][1]} steps: compared is what both "
                     "have")
    for name, torn, finished in zip(names, result["torn"], result["finished"], strict=True):
        if torn:
            console.warning(f"the last line of metrics.jsonl of {name} is not whole and is left out")
        if not finished:
            console.note(f"{name} has not ended: it is running, or was stopped")
    if result["evaluations_compared"] < max(result["num_evaluations"]):
        console.note(f"they have {result['num_evaluations'][0]} and {result['num_evaluations'][1]} evaluations (of a "
                     f"version, on a data set): the {result['evaluations_compared']} that both have are compared")
    if not result["group_steps_compared"]:
        console.note("no step has its groups in both runs (report.groups): metrics alone are compared")
    if result["config"]:
        console.table(("key", *names), [(key, *map(str, values)) for key, values in result["config"].items()])
    else:
        console.text("no key differs")
    if apart := result["first_metrics"]:
        console.table((f"step {apart['step']}", *names), [
            (name, *(figure(value, 9) for value in values)) for name, values in apart["metrics"].items()])
    if place := result["first_group_difference"]:
        where = ", ".join(f"{name} {place[name]}" for name in ("group", "completion", "token")
                          if place[name] is not None)
        first, second = (figure(value, 9) for value in place["values"])
        console.text(f"step {place['step']}, {where}: {place['what']} is {first} in {names[0]}, {second} in {names[1]}")
    if evaluation := result["first_evaluation"]:
        console.table((f"version {evaluation['version']}, {evaluation['name']}", *names), [
            (name, *(figure(value, 9) for value in values)) for name, values in evaluation["figures"].items()])
    console.text(_verdict(result), "bold")


def _verdict(result: dict[str, Any]) -> str:
    if result["identical"]:
        return (f"identical over steps {result['steps_compared']} and {result['evaluations_compared']} evaluations, "
                "clocks apart")
    if result["parted"] is None:
        return "nothing can be compared: no step is in both runs"
    if result["likely_keys"]:
        first, *others = result["likely_keys"]
        cause = f"most likely by {first}" + (f" (or {', '.join(others)})" if others else "")
    elif any(not is_under(key, NAMES_AND_PLACES) for key in result["config"]):
        cause = ("by none of the keys that act there: by one of the others, or by other files (data, model, rewards), "
                 "machine or versions")
    else:
        cause = "by no key: other files (data, model, rewards), another machine, threads or versions"
    return f"{result['parted']['says']}; {cause}"
