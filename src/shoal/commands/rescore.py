"""`shoal rescore`: scores a run's stored groups with other rewards, without a model, and compares the two.

    groups/step_* -> RewardPool -> rewards, advantages by the step's own settings -> compared with the stored ones

It reports which advantages change their sign, and what is suspicious about the new reward.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from typing import Any

import numpy as np

from shoal.commands.reward_comparison import Rescored, RewardComparison, rank_correlation
from shoal.config.schema import AlgorithmSection, Config, RescoreConfig
from shoal.config.text import require_given
from shoal.report.console import Console
from shoal.report.folder import find_run
from shoal.report.groups import StoredGroup
from shoal.report.lines import json_ready
from shoal.report.reading import (
    at_version,
    figure,
    is_finished,
    ranges,
    read_config,
    read_file,
    read_segments,
    read_stored,
    require_groups,
)
from shoal.rewards.functions import name_functions
from shoal.rewards.pool import RewardPool
from shoal.rewards.scores import Scores
from shoal.run.task import find_functions, load_task, with_overlong
from shoal.tasks.task import Task
from shoal.text import count
from shoal.trainer.step_table import step_advantages
from shoal.types import RewardFunction

MANY_CONSTANT_GROUPS, STRONG_LENGTH_CORRELATION, SLOW_SECONDS = 0.5, 0.5, 1.0
"""A share of groups, a rank correlation and seconds a completion, each warned of when exceeded."""


def rescore(config: RescoreConfig, console: Console | None = None) -> dict[str, Any]:
    """Scores stored training groups with `reward.functions` (by default the task's own), a step at a time.

    Only numbers are kept of a step, so a run of any length fits into memory; with `config.step`, `groups` has that
    step's groups in full."""
    require_given(config, "run")
    with console or Console() as console:
        run = find_run(config.run)
        settings, segments, files = read_config(run), read_segments(run), require_groups(run)
        if config.step and config.step not in files:
            read_stored(run, config.step)  # raises: it lists the steps that exist
        steps = [config.step] if config.step else list(files)
        functions = reward_functions(config, settings)
        if settings.algorithm.kl_placement == "reward" and settings.algorithm.kl_coef:
            console.note("the run subtracted a divergence from its rewards (algorithm.kl_placement=reward): stored "
                         "advantages contain it, new ones do not")
        comparison, groups = RewardComparison(skips_failures=config.reward.on_error == "skip"), []
        with closing(RewardPool(functions, config.reward, settings.steps)) as pool:
            for step in steps:
                algorithm = at_version(segments, step - 1).algorithm
                rescored = rescore_step(read_file(files[step]), step, pool, algorithm, comparison)
                comparison.add(step, rescored)
                groups += [group.record() for group in rescored] if config.step else []
        lint = lint_reward(comparison)
        result = json_ready({
            "run": str(run), "finished": is_finished(run), "steps": steps, "num_groups": comparison.num_groups,
            "num_completions": comparison.num_completions,
            "functions": {one.name: one.weight for one in functions}, "comparison": comparison.figures(),
            "lint": lint, "hacks": comparison.hacks(), "flips": [group.record() for group in comparison.flips],
            "by_step": comparison.by_step, "other_settings": comparison.other_settings,
            "advantages_not_stored": comparison.not_stored, "groups": groups if config.step else None,
        })
        report_rescored(result, console)
    return result


def reward_functions(config: RescoreConfig, run: Config) -> tuple[RewardFunction, ...]:
    """The functions given, else the task's own; with the run's overlong penalty, unless another is given."""
    if config.reward.functions:
        found = name_functions(find_functions(config.reward.functions), config.reward.weights)
    else:
        found = load_task(run.task, config.reward).rewards
    penalty = config.reward if config.reward.overlong_buffer_tokens else run.reward
    return with_overlong(Task(run.task.name, (), {}, found), penalty, run.sampling.max_completion_tokens).rewards


def rescore_step(stored: Sequence[StoredGroup], step: int, pool: RewardPool, algorithm: AlgorithmSection,
                 comparison: RewardComparison) -> list[Rescored]:
    """A step's groups in order; functions are called a group or a step at a time, as in a run."""
    groups = [entry.group for entry in stored]
    batches = [groups] if pool.by_step else [[group] for group in groups]
    started = time.perf_counter()
    for ticket, batch in enumerate(batches):
        pool.submit(ticket, [group.example for group in batch], [group.texts for group in batch],
                    [[c.token_ids.tolist() for c in group.completions] for group in batch], batch[0].step)
    scores: dict[Any, Scores] = {}
    while len(scores) < len(batches):
        scores |= pool.collect(wait=True)
    comparison.seconds += time.perf_counter() - started
    for ticket in range(len(batches)):
        comparison.add_failures(scores[ticket].failures)
    places = [(scores[0], n) if pool.by_step else (scores[n], 0) for n in range(len(stored))]
    rewards = np.stack([found.rewards[place] for found, place in places])
    valid = np.stack([found.valid[place] for found, place in places])
    components = [{name: values[place] for name, values in found.components.items()} for found, place in places]
    weights = {one.name: one.weight for one in pool.functions}
    lengths = np.array([[int(c.loss_mask.sum()) for c in group.completions] for group in groups])
    new = step_advantages(algorithm, rewards, valid, lengths, components, weights)
    by_settings = step_advantages(
        algorithm, np.stack([group.rewards for group in groups]), np.stack([group.valid for group in groups]), lengths,
        [group.reward_components for group in groups], groups[0].reward_weights)
    return [Rescored(step, n, entry.group, rewards[n], components[n], valid[n], entry.advantages, by_settings[n],
                     new[n]) for n, entry in enumerate(stored)]


def lint_reward(comparison: RewardComparison) -> dict[str, Any]:
    """The new reward's distribution, cost and failures, and `warnings` about them."""
    rewards, found = comparison.column("rewards"), comparison
    figures = {
        "mean": float(rewards.mean()) if len(rewards) else None,
        "std": float(rewards.std()) if len(rewards) else None,
        "min": float(rewards.min()) if len(rewards) else None, "max": float(rewards.max()) if len(rewards) else None,
        "num_distinct": len(np.unique(rewards)), "share_of_constant_groups": found.share_of_constant_groups,
        "seconds_per_completion": found.seconds / found.num_completions,
        "correlation_with_length": rank_correlation(found.column("lengths"), rewards),
        "none": {name: count - found.skipped[name] for name, count in found.unscored.items()},
        "failed": dict(found.failed), "first_failure": found.first_failure, "unscorable": found.unscorable,
    }
    return figures | {"warnings": list(_warnings(figures))}


def _warnings(found: dict[str, Any]) -> Iterator[str]:
    if found["num_distinct"] <= 1:
        yield "every completion has the same reward: it gives no training signal"
    elif found["share_of_constant_groups"] > MANY_CONSTANT_GROUPS:
        yield (f"{found['share_of_constant_groups']:.0%} of the groups have one reward for all their completions: "
               "they give no training signal")
    length = found["correlation_with_length"]
    if length is not None and abs(length) > STRONG_LENGTH_CORRELATION:
        yield (f"it correlates with length (rank correlation {length:+.2f}): training may yield "
               f"{'longer' if length > 0 else 'shorter'} completions, and little else")
    if found["seconds_per_completion"] > SLOW_SECONDS:
        yield f"it takes {found['seconds_per_completion']:.1f} s a completion: sampling will wait for it"
    for name, number in found["none"].items():
        if number:
            yield (f"{name} returned None for {count(number, 'completion')}: the other functions alone score them, "
                   "or they are left out")
    if found["failed"]:
        kinds = ", ".join(f"{what}: {number}" for what, number in found["failed"].items())
        yield f"it failed ({kinds}): {found['first_failure']}"


# ---- the report


def report_rescored(result: dict[str, Any], console: Console) -> None:
    """Prints what `rescore` found."""
    c, lint = result["comparison"], result["lint"]
    console.heading(f"{', '.join(result['functions'])} on {count(result['num_groups'], 'group')} of "
                    f"{count(len(result['steps']), 'step')}"
                    + ("" if result["finished"] else " (the run has not finished)"))
    if flips := result["flips"]:
        console.text(f"groups with flipped advantages, {len(flips)} of {c['groups_with_flips']}:")
        columns = ("old_rewards", "rewards", "old_advantages", "advantages", "flipped")
        console.table(("step, group", "old rewards", "new rewards", "old advantages", "new advantages", "flipped"), [
            (f"{group['step']}, {group['group']}",
             *(" ".join(figure(value, 3) for value in group[name]) for name in columns)) for group in flips])
    console.table(("", "stored", "new"), [
        ("mean reward", *(figure(value, 3) for value in c["reward_mean"])),
        ("mixed groups", *map(str, c["nonzero_std_groups"]))])
    share = c["share_flipped"] or 0
    console.table(("compared", ""), [
        ("flipped advantages", f"{c['advantages_flipped']} of {c['completions_compared']} ({share:.1%})"),
        *((name.replace("_", " "), figure(c[name], 3)) for name in (
            "rank_correlation", "rank_correlation_within_groups", "groups_that_gain_variance",
            "groups_that_lose_variance"))])
    console.table(("the new reward", ""), [(name.replace("_", " "), figure(lint[name], 3)) for name in (
        "min", "max", "std", "num_distinct", "share_of_constant_groups", "seconds_per_completion",
        "correlation_with_length", "unscorable")])
    for warning in lint["warnings"]:
        console.warning(warning)
    if steps := result["other_settings"]:
        console.warning(f"the settings on file (algorithm.*) give other advantages than those trained on, at step "
                        f"{ranges(steps)}: old advantages are the stored ones, new ones follow the settings")
    if number := result["advantages_not_stored"]:
        verb = "was" if number == 1 else "were"
        console.note(f"{count(number, 'group')} {verb} stored without advantages: their old ones follow the settings")
    for hack in result["hacks"]:
        console.text(f"scored {figure(hack['reward'], 3)} where the stored reward was lowest "
                     f"({figure(hack['old_reward'], 3)}): step {hack['step']}, group {hack['group']}, completion "
                     f"{hack['completion']}: {hack['text'][:200]!r}")
