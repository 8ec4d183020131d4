"""`shoal rescore`: stored groups under other rewards, without a model: which advantages flip, and what the new reward
is like.

    groups/step_* -> Judge -> rewards, advantages by the step's own settings -> compared with the stored -> Tally
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from shoal.algorithm.advantage import nonzero_std
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
    read_parts,
    read_stored,
    require_groups,
)
from shoal.rewards.judge import Judge
from shoal.rewards.scores import Failure, Scores, load_functions, name_functions
from shoal.run.task import load_task, with_overlong
from shoal.tasks.task import Task
from shoal.trainer.step_table import step_advantages
from shoal.types import Group, RewardFunction

NUM_SHOWN = 5
"""Groups and completions that are shown in full."""

_MANY_CONSTANT, _CLOSE_TO_LENGTH, _SLOW_SECONDS = 0.5, 0.5, 1.0
"""From where on a share of constant groups, a correlation with length and a cost are warned of."""


@dataclass(frozen=True)
class Judged:
    """A stored group with its stored and its new scores; [G] each.

    `by_settings`: the advantages of the stored rewards under the settings that are on file for its step."""

    step: int
    number: int  # its place in the step's file
    group: Group
    rewards: np.ndarray
    components: dict[str, np.ndarray]
    valid: np.ndarray
    stored_advantages: np.ndarray | None
    by_settings: np.ndarray
    advantages: np.ndarray

    @property
    def old_advantages(self) -> np.ndarray:
        """Those that were learnt from; by the settings where none were stored."""
        return self.by_settings if self.stored_advantages is None else self.stored_advantages

    @property
    def settings_differ(self) -> bool:
        return not np.allclose(self.old_advantages, self.by_settings, rtol=1e-6, atol=1e-9, equal_nan=True)

    @property
    def nonzero_std(self) -> tuple[bool, bool]:
        """Whether the stored and the new rewards vary in the group."""
        old, new = (nonzero_std(rewards[None], valid[None])[0]
                    for rewards, valid in ((self.group.rewards, self.group.valid), (self.rewards, self.valid)))
        return bool(old), bool(new)

    @property
    def both(self) -> np.ndarray:
        """Completions that both rewards could score."""
        return self.valid & self.group.valid

    @property
    def flipped(self) -> np.ndarray:
        """Completions that the one reward pushes up and the other down."""
        return self.both & (np.sign(self.advantages) * np.sign(self.old_advantages) < 0)


@dataclass
class Tally:
    """What all steps came to: sums, and of each completion three numbers. `skips`: a failed completion's score is NaN,
    as None's is."""

    skips: bool
    seconds: float = 0.0  # of the clock: worker processes judge beside each other
    num_groups: int = 0
    num_completions: int = 0
    unscorable: int = 0
    failed: Counter[str] = field(default_factory=Counter)  # function: kind
    skipped: Counter[str] = field(default_factory=Counter)
    first_failure: str | None = None
    nothing: Counter[str] = field(default_factory=Counter)  # by function, scores that are NaN
    old: list[np.ndarray] = field(default_factory=list)  # by step, of the completions that both could score
    new: list[np.ndarray] = field(default_factory=list)
    rewards: list[np.ndarray] = field(default_factory=list)  # by step, of those that the new reward could score
    lengths: list[np.ndarray] = field(default_factory=list)
    within: list[float] = field(default_factory=list)  # rank correlations of groups
    informs: Counter[tuple[bool, bool]] = field(default_factory=Counter)  # groups whose old, new rewards vary
    flips: list[Judged] = field(default_factory=list)  # the groups with the most
    likeliest: list[tuple[float, float, dict[str, Any]]] = field(default_factory=list)  # old and new reward, the place
    other_settings: list[int] = field(default_factory=list)  # steps
    not_stored: int = 0  # groups
    by_step: list[dict[str, Any]] = field(default_factory=list)

    def fail(self, failures: Sequence[Failure]) -> None:
        self.failed.update(f"{one.function}: {one.kind}" for one in failures)
        if self.skips:
            self.skipped.update(one.function for one in failures if one.completion is not None)
        if failures and self.first_failure is None:
            self.first_failure = failures[0].text

    def add(self, step: int, judged: Sequence[Judged]) -> None:
        """A step's groups."""
        old, new = _joined([e.group.rewards[e.both] for e in judged]), _joined([e.rewards[e.both] for e in judged])
        rewards = _joined([e.rewards[e.valid] for e in judged])
        lengths = _joined([np.array([len(c) for c in e.group.completions])[e.valid] for e in judged])
        for kept, values in ((self.old, old), (self.new, new), (self.rewards, rewards), (self.lengths, lengths)):
            kept.append(values)
        self.num_groups += len(judged)
        self.num_completions += sum(e.group.size for e in judged)
        self.unscorable += sum(int((~e.valid).sum()) for e in judged)
        for e in judged:
            self.nothing.update({name: int(np.isnan(values).sum()) for name, values in e.components.items()})
        within = [rank_correlation(e.group.rewards[e.both], e.rewards[e.both]) for e in judged]
        self.within += [value for value in within if value is not None]
        self.informs.update(e.nonzero_std for e in judged)
        if any(e.settings_differ for e in judged):
            self.other_settings.append(step)
        self.not_stored += sum(e.stored_advantages is None for e in judged)
        flipped = [e for e in judged if e.flipped.any()]
        self.flips = sorted([*self.flips, *flipped], key=lambda e: -int(e.flipped.sum()))[:NUM_SHOWN]
        self._like(judged)
        self.by_step.append({
            "step": step, "groups": len(judged), "completions_compared": len(old), "groups_with_flips": len(flipped),
            "advantages_flipped": sum(int(e.flipped.sum()) for e in judged), "old_reward_mean": _mean(old),
            "reward_mean": _mean(new)})

    def _like(self, judged: Sequence[Judged]) -> None:
        """Keeps, of the completions with the lowest stored reward so far, those that the new one likes best."""
        found = [*self.likeliest, *(
            (float(e.group.rewards[i]), float(e.rewards[i]),
             {"step": e.step, "group": e.number, "completion": int(i), "text": e.group.texts[i]})
            for e in judged for i in np.flatnonzero(e.both))]
        lowest = min((old for old, _, _ in found), default=0.0)
        found = [entry for entry in found if entry[0] == lowest]
        self.likeliest = sorted(found, key=lambda entry: -entry[1])[:NUM_SHOWN]  # stable: by step, group, completion


def rescore(config: RescoreConfig, console: Console | None = None) -> dict[str, Any]:
    """Judges a run's stored training groups with `reward.functions` (the task's own where empty), a step at a time:
    what is kept of a step are its rewards. `groups` has each group in full where `config.step` names one."""
    require_given(config, "run")
    with console or Console() as console:
        run = find_run(config.run)
        own, parts, files = read_config(run), read_parts(run), require_groups(run)
        if config.step and config.step not in files:
            read_stored(run, config.step)  # says which there are
        steps = [config.step] if config.step else list(files)
        functions = reward_functions(config, own)
        if own.algorithm.kl_placement == "reward" and own.algorithm.kl_coef:
            console.note("the run took a divergence off its rewards (algorithm.kl_placement=reward): stored advantages hold "
                         "it, new ones do not")
        tally, groups = Tally(skips=config.reward.on_error == "skip"), []
        with closing(Judge(functions, config.reward, own.steps)) as judge:
            for step in steps:
                judged = _judge(read_file(files[step]), step, judge, at_version(parts, step - 1).algorithm, tally)
                tally.add(step, judged)
                groups += map(group_record, judged) if config.step else []
        result = json_ready({
            "run": str(run), "finished": is_finished(run), "steps": steps, "num_groups": tally.num_groups,
            "num_completions": tally.num_completions,
            "functions": {one.name: one.weight for one in functions}, "comparison": compare(tally),
            "lint": lint(tally), "hacks": hacks(tally), "flips": [group_record(entry) for entry in tally.flips],
            "by_step": tally.by_step, "other_settings": tally.other_settings,
            "advantages_not_stored": tally.not_stored, "groups": groups if config.step else None,
        })
        _show(result, console)
    return result


def reward_functions(config: RescoreConfig, run: Config) -> tuple[RewardFunction, ...]:
    """Those that were named; else the task's own, for which its data is opened."""
    if config.reward.functions:
        found = name_functions(load_functions(config.reward.functions), config.reward.weights)
    else:
        found = load_task(run.task, config.reward).rewards
    asked = config.reward if config.reward.overlong_buffer_tokens else run.reward
    return with_overlong(Task(run.task.name, (), {}, found), asked, run.sampling.max_completion_tokens).rewards


def _judge(stored: Sequence[StoredGroup], step: int, judge: Judge, algorithm: AlgorithmSection,
           tally: Tally) -> list[Judged]:
    """The groups of a step in order; functions are called a group at a time or a step at a time, as in a run."""
    groups = [entry.group for entry in stored]
    parts = [groups] if judge.by_step else [[group] for group in groups]
    started = time.perf_counter()
    for ticket, part in enumerate(parts):
        judge.submit(ticket, [group.example for group in part], [group.texts for group in part],
                     [[c.token_ids.tolist() for c in group.completions] for group in part], part[0].step)
    scores: dict[Any, Scores] = {}
    while len(scores) < len(parts):
        scores |= judge.collect(wait=True)
    tally.seconds += time.perf_counter() - started
    for ticket in range(len(parts)):
        tally.fail(scores[ticket].failures)
    places = [(scores[0], n) if judge.by_step else (scores[n], 0) for n in range(len(stored))]
    rewards = np.stack([found.rewards[place] for found, place in places])
    valid = np.stack([found.valid[place] for found, place in places])
    components = [{name: values[place] for name, values in found.components.items()} for found, place in places]
    weights = {one.name: one.weight for one in judge.functions}
    lengths = np.array([[int(c.loss_mask.sum()) for c in group.completions] for group in groups])
    new = step_advantages(algorithm, rewards, valid, lengths, components, weights)
    by_settings = step_advantages(
        algorithm, np.stack([group.rewards for group in groups]), np.stack([group.valid for group in groups]), lengths,
        [group.reward_components for group in groups], groups[0].reward_weights)
    return [Judged(step, n, entry.group, rewards[n], components[n], valid[n], entry.advantages, by_settings[n], new[n])
            for n, entry in enumerate(stored)]


# ---- figures


def compare(tally: Tally) -> dict[str, Any]:
    """Old and new side by side: flips, rank correlation (over all completions, and the mean of groups), variance."""
    old, new, informs = _joined(tally.old), _joined(tally.new), tally.informs
    flipped = sum(step["advantages_flipped"] for step in tally.by_step)
    return {
        "reward_mean": [_mean(old), _mean(new)], "completions_compared": len(old),
        "advantages_flipped": flipped, "share_flipped": flipped / len(old) if len(old) else None,
        "groups_with_flips": sum(step["groups_with_flips"] for step in tally.by_step),
        "rank_correlation": rank_correlation(old, new),
        "rank_correlation_within_groups": sum(tally.within) / len(tally.within) if tally.within else None,
        "groups_that_gain_variance": informs[False, True], "groups_that_lose_variance": informs[True, False],
        "informative_groups": [informs[True, False] + informs[True, True], informs[False, True] + informs[True, True]],
    }


def lint(tally: Tally) -> dict[str, Any]:
    """What the new reward is like, and `warnings` in words."""
    rewards = _joined(tally.rewards)
    constant = (tally.informs[False, False] + tally.informs[True, False]) / tally.num_groups
    found = {
        "mean": _mean(rewards), "std": float(rewards.std()) if len(rewards) else None,
        "min": float(rewards.min()) if len(rewards) else None, "max": float(rewards.max()) if len(rewards) else None,
        "num_distinct": len(np.unique(rewards)), "share_of_constant_groups": constant,
        "seconds_per_completion": tally.seconds / tally.num_completions,
        "correlation_with_length": rank_correlation(_joined(tally.lengths), rewards),
        "none": {name: count - tally.skipped[name] for name, count in tally.nothing.items()},
        "failed": dict(tally.failed), "first_failure": tally.first_failure, "unscorable": tally.unscorable,
    }
    return found | {"warnings": list(_warnings(found))}


def _warnings(found: dict[str, Any]) -> Iterator[str]:
    if found["num_distinct"] <= 1:
        yield "every completion has the same reward: nothing can be learnt from it"
    elif found["share_of_constant_groups"] > _MANY_CONSTANT:
        yield (f"{found['share_of_constant_groups']:.0%} of the groups have one reward for all their completions and "
               "teach nothing")
    with_length = found["correlation_with_length"]
    if with_length is not None and abs(with_length) > _CLOSE_TO_LENGTH:
        yield (f"it goes with length (rank correlation {with_length:+.2f}): it may teach {'longer' * (with_length > 0)}"
               f"{'shorter' * (with_length < 0)} completions, and little else")
    if found["seconds_per_completion"] > _SLOW_SECONDS:
        yield f"it takes {found['seconds_per_completion']:.1f} s a completion: sampling will wait for it"
    for name, count in found["none"].items():
        if count:
            yield f"{name} returned None for {count} completions: they are judged by the other functions, or left out"
    if found["failed"]:
        kinds = ", ".join(f"{what}: {count}" for what, count in found["failed"].items())
        yield f"it failed ({kinds}): {found['first_failure']}"


def hacks(tally: Tally) -> list[dict[str, Any]]:
    """The completions that the new reward likes best among those that the stored one scored lowest."""
    old, new = _joined(tally.old), _joined(tally.new)
    if not len(old) or old.min() == old.max():
        return []
    median = np.median(new)
    return [{**place, "old_reward": before, "reward": after} for before, after, place in tally.likeliest
            if after > median]


def rank_correlation(a: np.ndarray, b: np.ndarray) -> float | None:
    """Spearman's, equal values sharing their mean rank; None where one of the two does not vary."""
    if len(a) < 2 or a.min() == a.max() or b.min() == b.max():
        return None
    return float(np.corrcoef(_ranks(a), _ranks(b))[0, 1])


def _ranks(values: np.ndarray) -> np.ndarray:
    _, place, count = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(count) - (count - 1) / 2)[place]


def _joined(parts: Sequence[np.ndarray]) -> np.ndarray:
    return np.concatenate(parts) if parts else np.zeros(0)


def _mean(values: np.ndarray) -> float | None:
    return float(values.mean()) if len(values) else None


def group_record(e: Judged) -> dict[str, Any]:
    return {
        "step": e.step, "group": e.number, "row": e.group.example.row,
        "old_rewards": e.group.rewards, "rewards": e.rewards, "components": e.components,
        "old_advantages": e.old_advantages, "advantages": e.advantages, "flipped": np.flatnonzero(e.flipped),
        "old_nonzero_std": e.nonzero_std[0], "nonzero_std": e.nonzero_std[1],
    }


# ---- the terminal


def _show(result: dict[str, Any], console: Console) -> None:
    c, found = result["comparison"], result["lint"]
    console.heading(f"{', '.join(result['functions'])} on {result['num_groups']} groups of {len(result['steps'])} steps"
                    + ("" if result["finished"] else " (the run has not ended)"))
    if shown := result["flips"]:
        console.text(f"groups whose advantages flip, {len(shown)} of {c['groups_with_flips']}:")
        console.table(("step, group", "old rewards", "new rewards", "old advantages", "new advantages", "flipped"), [
            (f"{g['step']}, {g['group']}", *(_figures(g[name]) for name in
             ("old_rewards", "rewards", "old_advantages", "advantages")), _figures(g["flipped"])) for g in shown])
    console.table(("", "stored", "new"), [
        ("mean reward", *(figure(value, 3) for value in c["reward_mean"])),
        ("groups that teach", *map(str, c["informative_groups"]))])
    share = c["share_flipped"] or 0
    console.table(("compared", ""), [
        ("advantages that flip", f"{c['advantages_flipped']} of {c['completions_compared']} ({share:.1%})"),
        ("rank correlation", figure(c["rank_correlation"], 3)),
        ("rank correlation within groups", figure(c["rank_correlation_within_groups"], 3)),
        ("groups that gain variance", str(c["groups_that_gain_variance"])),
        ("groups that lose variance", str(c["groups_that_lose_variance"]))])
    console.table(("the new reward", ""), [
        *((name.replace("_", " "), figure(found[name], 3)) for name in (
            "min", "max", "std", "num_distinct", "share_of_constant_groups", "seconds_per_completion",
            "correlation_with_length", "unscorable"))])
    for warning in found["warnings"]:
        console.warning(warning)
    if others := result["other_settings"]:
        console.warning(f"the settings on file (algorithm.*) give other advantages than those that were learnt from, "
                        f"at step {ranges(others)}: old advantages are the stored, new ones are by the settings")
    if count := result["advantages_not_stored"]:
        console.note(f"{count} groups were stored without advantages: their old ones are by the settings")
    for hack in result["hacks"]:
        console.text(f"scored {figure(hack['reward'], 3)}, where the stored reward gave its lowest "
                     f"({figure(hack['old_reward'], 3)}): step {hack['step']}, group {hack['group']}, completion "
                     f"{hack['completion']}: {hack['text'][:200]!r}")


def _figures(values: Sequence[float | None]) -> str:
    return " ".join(figure(value, 3) for value in values)
