"""`shoal rescore`: stored groups under other rewards, without a model: which advantages flip, and what the new reward
is like.

    groups/step_* -> Judge -> rewards, advantages by the run's own settings -> compared with the stored, and looked at
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from shoal.algorithm.advantage import ADVANTAGES, informative
from shoal.config.compose import require_given
from shoal.config.schema import AlgorithmSection, Config, RescoreConfig
from shoal.report.console import Console
from shoal.report.folder import find_run
from shoal.report.lines import json_ready
from shoal.report.reading import is_finished, read_config, read_stored, require_groups
from shoal.task.judge import Judge
from shoal.task.reward import Failure, RewardFunction, Scores, load_functions, name_functions
from shoal.task.task import load_task
from shoal.types import Group

NUM_SHOWN = 5
"""Groups and completions that are shown in full."""

_MANY_CONSTANT, _CLOSE_TO_LENGTH, _SLOW_SECONDS = 0.5, 0.5, 1.0
"""From where on a share of constant groups, a correlation with length and a cost are warned of."""


@dataclass
class Tally:
    """What judging came to beside scores. `skips`: a failed completion's score is NaN, as None's is."""

    skips: bool
    seconds: float = 0.0  # of the clock: worker processes judge beside each other
    failures: list[Failure] = field(default_factory=list)


@dataclass(frozen=True)
class Judged:
    """A stored group with its stored and its new scores; [G] each."""

    step: int
    number: int  # its place in the step's file
    group: Group
    rewards: np.ndarray
    components: dict[str, np.ndarray]
    valid: np.ndarray
    old_advantages: np.ndarray
    advantages: np.ndarray

    @property
    def both(self) -> np.ndarray:
        """Completions that both rewards could score."""
        return self.valid & self.group.valid

    @property
    def flipped(self) -> np.ndarray:
        """Completions that the one reward pushes up and the other down."""
        return self.both & (np.sign(self.advantages) * np.sign(self.old_advantages) < 0)


def rescore(config: RescoreConfig, console: Console | None = None) -> dict[str, Any]:
    """Judges a run's stored training groups with `reward.functions` (the task's own where empty)."""
    require_given(config, "run")
    with console or Console() as console:
        run = find_run(config.run)
        own = read_config(run)
        steps = [config.step] if config.step else list(require_groups(run))
        functions = reward_functions(config, own)
        tally = Tally(skips=config.reward.on_error == "skip")
        with closing(Judge(functions, config.reward, own.steps)) as judge:
            judged = [entry for step in steps for entry in _judge(run, step, judge, own.algorithm, tally)]
        total = sum(entry.group.size for entry in judged)
        result = json_ready({
            "run": str(run), "finished": is_finished(run), "steps": steps, "num_groups": len(judged),
            "num_completions": total,
            "functions": {one.name: one.weight for one in functions}, "comparison": compare(judged),
            "lint": lint(judged, tally),
            "hacks": hacks(judged), "groups": [_group(entry) for entry in judged],
        })
        _show(result, console)
    return result


def reward_functions(config: RescoreConfig, run: Config) -> tuple[RewardFunction, ...]:
    """Those that were named; else the task's own, for which its data is opened."""
    if config.reward.functions:
        return name_functions(load_functions(config.reward.functions), config.reward.weights)
    return load_task(run.task, config.reward).rewards


def _judge(run: Path, step: int, judge: Judge, algorithm: AlgorithmSection, tally: Tally) -> Iterator[Judged]:
    """The groups of a step in order; functions are called a group at a time or a step at a time, as in a run."""
    groups = [stored.group for stored in read_stored(run, step)]
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
        tally.failures.extend(scores[ticket].failures)
    for number, group in enumerate(groups):
        found, place = (scores[0], number) if judge.by_step else (scores[number], 0)
        rewards, valid = found.rewards[place], found.valid[place]
        yield Judged(step, number, group, rewards, {name: v[place] for name, v in found.components.items()}, valid,
                     _advantages(group.rewards, group.valid, algorithm), _advantages(rewards, valid, algorithm))


def _advantages(rewards: np.ndarray, valid: np.ndarray, a: AlgorithmSection) -> np.ndarray:
    form = ADVANTAGES[a.advantage]
    return form(rewards[None], valid[None], std_ddof=a.std_ddof, std_eps=a.std_eps)[0]


# ---- figures


def compare(judged: Sequence[Judged]) -> dict[str, Any]:
    """Old and new side by side: flips, rank correlation (over all completions, and the mean of groups), variance."""
    old, new = _both(judged)
    informs = [(bool(informative(e.group.rewards[None], e.group.valid[None])[0]),
                bool(informative(e.rewards[None], e.valid[None])[0])) for e in judged]
    within = [rank_correlation(e.group.rewards[e.both], e.rewards[e.both]) for e in judged]
    known = [value for value in within if value is not None]
    flipped = sum(int(e.flipped.sum()) for e in judged)
    return {
        "reward_mean": [_mean(old), _mean(new)], "completions_compared": len(old),
        "advantages_flipped": flipped, "share_flipped": flipped / len(old) if len(old) else None,
        "groups_with_flips": sum(bool(e.flipped.any()) for e in judged),
        "rank_correlation": rank_correlation(old, new),
        "rank_correlation_within_groups": sum(known) / len(known) if known else None,
        "groups_that_gain_variance": sum(after and not before for before, after in informs),
        "groups_that_lose_variance": sum(before and not after for before, after in informs),
        "informative_groups": [sum(before for before, _ in informs), sum(after for _, after in informs)],
    }


def lint(judged: Sequence[Judged], tally: Tally) -> dict[str, Any]:
    """What the new reward is like, and `warnings` in words."""
    rewards = np.concatenate([e.rewards[e.valid] for e in judged])
    lengths = np.concatenate([np.array([len(c) for c in e.group.completions])[e.valid] for e in judged])
    constant = sum(not informative(e.rewards[None], e.valid[None])[0] for e in judged) / len(judged)
    failed = Counter(f"{failure.function}: {failure.kind}" for failure in tally.failures)
    skipped = Counter(one.function for one in tally.failures if tally.skips and one.completion is not None)
    names = dict.fromkeys(name for e in judged for name in e.components)
    nothing = {name: sum(int(np.isnan(e.components[name]).sum()) for e in judged) - skipped[name] for name in names}
    found = {
        "mean": _mean(rewards), "std": float(rewards.std()) if len(rewards) else None,
        "min": float(rewards.min()) if len(rewards) else None, "max": float(rewards.max()) if len(rewards) else None,
        "num_distinct": len(np.unique(rewards)), "share_of_constant_groups": constant,
        "seconds_per_completion": tally.seconds / sum(e.group.size for e in judged),
        "correlation_with_length": rank_correlation(lengths, rewards),
        "none": nothing, "failed": dict(failed), "first_failure": tally.failures[0].text if tally.failures else None,
        "unscorable": sum(int((~e.valid).sum()) for e in judged),
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


def hacks(judged: Sequence[Judged]) -> list[dict[str, Any]]:
    """The completions that the new reward likes best among those that the stored one scored lowest."""
    old, new = _both(judged)
    if not len(old) or old.min() == old.max():
        return []
    entries = [(e.rewards[i], e, i) for e in judged for i in np.flatnonzero(e.both)
               if e.group.rewards[i] == old.min() and e.rewards[i] > np.median(new)]
    entries.sort(key=lambda entry: -entry[0])  # stable: by step, group and completion
    return [{"step": e.step, "group": e.number, "completion": int(i), "old_reward": float(old.min()),
             "reward": float(reward), "text": e.group.texts[i]} for reward, e, i in entries[:NUM_SHOWN]]


def rank_correlation(a: np.ndarray, b: np.ndarray) -> float | None:
    """Spearman's, equal values sharing their mean rank; None where one of the two does not vary."""
    if len(a) < 2 or a.min() == a.max() or b.min() == b.max():
        return None
    return float(np.corrcoef(_ranks(a), _ranks(b))[0, 1])


def _ranks(values: np.ndarray) -> np.ndarray:
    _, place, count = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(count) - (count - 1) / 2)[place]


def _both(judged: Sequence[Judged]) -> tuple[np.ndarray, np.ndarray]:
    """Old and new rewards of the completions that both could score."""
    return (np.concatenate([e.group.rewards[e.both] for e in judged]),
            np.concatenate([e.rewards[e.both] for e in judged]))


def _mean(values: np.ndarray) -> float | None:
    return float(values.mean()) if len(values) else None


def _group(e: Judged) -> dict[str, Any]:
    return {
        "step": e.step, "group": e.number, "row": e.group.example.row,
        "old_rewards": e.group.rewards, "rewards": e.rewards, "components": e.components,
        "old_advantages": e.old_advantages, "advantages": e.advantages, "flipped": np.flatnonzero(e.flipped),
        "old_informative": bool(informative(e.group.rewards[None], e.group.valid[None])[0]),
        "informative": bool(informative(e.rewards[None], e.valid[None])[0]),
    }


# ---- the terminal


def _show(result: dict[str, Any], console: Console) -> None:
    c, found = result["comparison"], result["lint"]
    console.heading(f"{', '.join(result['functions'])} on {result['num_groups']} groups of {len(result['steps'])} steps"
                    + ("" if result["finished"] else " (the run has not ended)"))
    flipped = [g for g in result["groups"] if g["flipped"]]
    if flipped:
        shown = sorted(flipped, key=lambda g: -len(g["flipped"]))[:NUM_SHOWN]
        console.text(f"groups whose advantages flip, {len(shown)} of {len(flipped)}:")
        console.table(("step, group", "old rewards", "new rewards", "old advantages", "new advantages", "flipped"), [
            (f"{g['step']}, {g['group']}", *(_figures(g[name]) for name in
             ("old_rewards", "rewards", "old_advantages", "advantages")), _figures(g["flipped"])) for g in shown])
    console.table(("", "stored", "new"), [
        ("mean reward", *map(_figure, c["reward_mean"])),
        ("groups that teach", *map(str, c["informative_groups"]))])
    share = c["share_flipped"] or 0
    console.table(("compared", ""), [
        ("advantages that flip", f"{c['advantages_flipped']} of {c['completions_compared']} ({share:.1%})"),
        ("rank correlation", _figure(c["rank_correlation"])),
        ("rank correlation within groups", _figure(c["rank_correlation_within_groups"])),
        ("groups that gain variance", str(c["groups_that_gain_variance"])),
        ("groups that lose variance", str(c["groups_that_lose_variance"]))])
    console.table(("the new reward", ""), [
        *((name.replace("_", " "), _figure(found[name])) for name in (
            "min", "max", "std", "num_distinct", "share_of_constant_groups", "seconds_per_completion",
            "correlation_with_length", "unscorable"))])
    for warning in found["warnings"]:
        console.warning(warning)
    for hack in result["hacks"]:
        console.text(f"scored {_figure(hack['reward'])}, where the stored reward gave its lowest "
                     f"({_figure(hack['old_reward'])}): step {hack['step']}, group {hack['group']}, completion "
                     f"{hack['completion']}: {hack['text'][:200]!r}")


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def _figures(values: Sequence[float | None]) -> str:
    return " ".join(map(_figure, values))
