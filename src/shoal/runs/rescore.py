"""Scores a run's stored groups with other rewards, without a model, and compares the two.

    groups/step_* -> RewardPool -> rewards, advantages by the step's own settings
                  -> compared with the stored ones

It counts the advantages that change their sign, and finds what is suspicious about the new reward.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from shoal.buckets import address
from shoal.config.schema import AlgorithmSection, Config, RewardSection
from shoal.model.tokenizer import read_date
from shoal.report.folder import MODEL_FOLDER
from shoal.report.groups import read_file
from shoal.report.lines import json_ready
from shoal.report.metrics import known_mean
from shoal.rewards.functions import name_functions
from shoal.rewards.pool import RewardPool
from shoal.rewards.scores import Scores
from shoal.run.task import find_functions, load_task, with_overlong
from shoal.runs.stored_run import StoredRun
from shoal.text import count
from shoal.trainer.step_table import StepTable
from shoal.types import Example, RewardFunction

NUM_SHOWN = 5
"""Completions that are shown in full."""
MANY_CONSTANT_GROUPS, STRONG_LENGTH_CORRELATION, SLOW_SECONDS = 0.5, 0.5, 1.0
"""A share of groups, a rank correlation and seconds a completion, each warned of when exceeded."""


def score_again(run: StoredRun, reward: RewardSection, step: int = 0) -> dict[str, Any]:
    """Scores stored training groups with `reward.functions` (by default the task's own), a step at
    a time.

    Only numbers are kept of a step, so a run of any length fits into memory; of the one `step`, if
    given, `groups` are in full."""
    files = run.require_groups()
    if step and step not in files:
        run.groups(step)  # raises: it lists the steps that exist
    chosen = [step] if step else list(files)
    functions = reward_functions(reward, run.config)
    if any(spec.startswith("model:") for spec in reward.functions):
        from shoal.run.reward_model import reward_models  # imports JAX

        for model in reward_models(functions):
            model.date = read_date(run.path / MODEL_FOLDER)
    with closing(RewardPool(functions, reward, run.config.steps)) as pool:
        steps = [
            rescore_step(number, files[number], pool, run.config_at(number - 1).algorithm)
            for number in chosen
        ]
    old = np.concatenate([one.old.rewards[one.both] for one in steps])
    new = np.concatenate([one.new.rewards[one.both] for one in steps])
    return json_ready(
        {
            "run": address(run.path),
            "finished": run.is_finished,
            "steps": chosen,
            "num_groups": sum(len(one.rows) for one in steps),
            "num_completions": sum(one.new.valid.size for one in steps),
            "functions": {one.name: one.weight for one in functions},
            "comparison": {
                "completions_compared": len(old),
                "reward_mean": [known_mean(old), known_mean(new)],
                "nonzero_std_groups": [
                    sum(int(one.old.nonzero_std.sum()) for one in steps),
                    sum(int(one.new.nonzero_std.sum()) for one in steps),
                ],
                "advantages_flipped": sum(int(one.flipped.sum()) for one in steps),
            },
            "lint": lint_reward(steps, reward.on_error == "skip"),
            "hacks": find_hacks(steps, files, old, new),
            "advantages_not_stored": sum(one.not_stored for one in steps),
            "groups": [one.record(n) for one in steps for n in range(len(one.rows))]
            if step
            else None,
        }
    )


def reward_functions(reward: RewardSection, run: Config) -> tuple[RewardFunction, ...]:
    """The functions given, else the task's own; with the run's overlong penalty, unless another is
    given."""
    if reward.functions:
        found = name_functions(find_functions(reward, reward.functions), reward.weights)
    else:
        found = load_task(run.task, reward).rewards
    penalty = reward if reward.overlong_buffer_tokens else run.reward
    return with_overlong(found, penalty, run.sampling.max_completion_tokens)


@dataclass(frozen=True)
class RescoredStep:
    """One step's groups with their stored and their new scores; arrays are [P, G]."""

    step: int
    rows: list[int]  # of the data, by group
    old: StepTable  # its advantages are those by the settings on file
    new: StepTable
    components: list[Mapping[str, np.ndarray]]  # of the new functions, by group
    old_advantages: np.ndarray  # those trained on; by the settings where none were stored
    not_stored: int  # groups without stored advantages
    seconds: float  # wall time: worker processes score at the same time
    failed: Counter[str]  # `function: kind`
    failed_completions: Counter[str]  # by function
    first_failure: str | None

    @property
    def both(self) -> np.ndarray:
        """Completions that both rewards scored."""
        return self.new.valid & self.old.valid

    @property
    def flipped(self) -> np.ndarray:
        """Completions whose advantage is positive by one reward and negative by the other."""
        return self.both & (np.sign(self.new.advantages) * np.sign(self.old_advantages) < 0)

    def record(self, n: int) -> dict[str, Any]:
        """One group in full."""
        return {
            "step": self.step,
            "group": n,
            "row": self.rows[n],
            "old_rewards": self.old.rewards[n],
            "rewards": self.new.rewards[n],
            "components": self.components[n],
            "old_advantages": self.old_advantages[n],
            "advantages": self.new.advantages[n],
        }


def rescore_step(
    step: int, file: Path, pool: RewardPool, algorithm: AlgorithmSection
) -> RescoredStep:
    """A step's groups in order; functions are called a group at a time, as in a run."""
    stored = read_file(file)
    groups = [entry.group for entry in stored]
    started = time.perf_counter()
    scored = score_texts(
        pool,
        [group.example for group in groups],
        [group.texts for group in groups],
        [[c.token_ids[c.loss_mask].tolist() for c in group.completions] for group in groups],
        groups[0].step,
        messages=[[c.messages for c in group.completions] for group in groups],
    )
    seconds = time.perf_counter() - started
    failures = [failure for one in scored for failure in one.failures]
    weights = {one.name: one.weight for one in pool.functions}
    again = [
        replace(
            group,
            rewards=one.rewards[0],
            valid=one.valid[0],
            reward_weights=weights,
            reward_components={name: values[0] for name, values in one.components.items()},
        )
        for group, one in zip(groups, scored, strict=True)
    ]
    old, new = StepTable.of(groups, algorithm), StepTable.of(again, algorithm)
    old_advantages = np.stack(
        [
            old.advantages[n] if entry.advantages is None else entry.advantages
            for n, entry in enumerate(stored)
        ]
    )
    return RescoredStep(
        step,
        [group.example.row for group in groups],
        old,
        new,
        [group.reward_components for group in again],
        old_advantages,
        sum(entry.advantages is None for entry in stored),
        seconds,
        Counter(f"{one.function}: {one.kind}" for one in failures),
        Counter(one.function for one in failures if one.completion is not None),
        next((one.text for one in failures), None),
    )


# ---- what is suspicious


def find_hacks(
    steps: Sequence[RescoredStep], files: Mapping[int, Path], old: np.ndarray, new: np.ndarray
) -> list[dict[str, Any]]:
    """Completions that the new reward scores above its median and the stored one scored lowest.
    `old`, `new`: the rewards of all completions that both scored."""
    if not len(old) or old.min() == old.max():
        return []
    lowest, median = old.min(), np.median(new)
    places = [
        (one, n, i)
        for one in steps
        for n, i in np.argwhere(
            one.both & (one.old.rewards == lowest) & (one.new.rewards > median)
        ).tolist()
    ]
    places.sort(
        key=lambda place: -place[0].new.rewards[place[1], place[2]]
    )  # stable: by step, group
    return [
        {
            "step": one.step,
            "group": n,
            "completion": i,
            "text": read_file(files[one.step])[n].group.texts[i],
            "old_reward": lowest,
            "reward": one.new.rewards[n, i],
        }
        for one, n, i in places[:NUM_SHOWN]
    ]


def lint_reward(steps: Sequence[RescoredStep], skips_failures: bool) -> dict[str, Any]:
    """The new reward's distribution, cost and failures, and `warnings` about them."""
    rewards = np.concatenate([one.new.rewards[one.new.valid] for one in steps])
    lengths = np.concatenate([one.new.lengths[one.new.valid] for one in steps])
    failed, failed_completions = (
        sum((getattr(one, name) for one in steps), Counter[str]())
        for name in ("failed", "failed_completions")
    )
    nothing: Counter[str] = Counter()
    for components in (components for one in steps for components in one.components):
        nothing.update({name: int(np.isnan(values).sum()) for name, values in components.items()})
    if skips_failures:  # a failed completion's score is NaN, as that of a None
        nothing.subtract(failed_completions)
    some = len(rewards) > 0
    figures = {
        "mean": known_mean(rewards),
        "std": float(rewards.std()) if some else None,
        "min": float(rewards.min()) if some else None,
        "max": float(rewards.max()) if some else None,
        "num_distinct": len(np.unique(rewards)),
        "share_of_constant_groups": float(
            np.mean(np.concatenate([~one.new.nonzero_std for one in steps]))
        ),
        "seconds_per_completion": sum(one.seconds for one in steps)
        / sum(one.new.valid.size for one in steps),
        "correlation_with_length": rank_correlation(lengths, rewards),
        "none": dict(nothing),
        "failed": dict(failed),
        "first_failure": next((one.first_failure for one in steps if one.first_failure), None),
        "unscorable": sum(int((~one.new.valid).sum()) for one in steps),
    }
    return figures | {"warnings": list(_warnings(figures))}


def _warnings(found: dict[str, Any]) -> Iterator[str]:
    if found["num_distinct"] <= 1:
        yield "every completion has the same reward: it gives no training signal"
    elif found["share_of_constant_groups"] > MANY_CONSTANT_GROUPS:
        yield (
            f"{found['share_of_constant_groups']:.0%} of the groups have one reward for all their "
            f"completions: "
            "they give no training signal"
        )
    length = found["correlation_with_length"]
    if length is not None and abs(length) > STRONG_LENGTH_CORRELATION:
        yield (
            f"it correlates with length (rank correlation {length:+.2f}): training may yield "
            f"{'longer' if length > 0 else 'shorter'} completions, and little else"
        )
    if found["seconds_per_completion"] > SLOW_SECONDS:
        yield (
            f"it takes {found['seconds_per_completion']:.1f} s a completion: sampling will wait "
            f"for it"
        )
    for name, number in found["none"].items():
        if number:
            yield (
                f"{name} returned None for {count(number, 'completion')}: the other functions "
                f"alone score them, "
                "or they are left out"
            )
    if found["failed"]:
        kinds = ", ".join(f"{what}: {number}" for what, number in found["failed"].items())
        yield f"it failed ({kinds}): {found['first_failure']}"


def rank_correlation(a: np.ndarray, b: np.ndarray) -> float | None:
    """Spearman's rank correlation, ties sharing their mean rank; None where a or b is constant."""
    if len(a) < 2 or a.min() == a.max() or b.min() == b.max():
        return None
    return float(np.corrcoef(_ranks(a), _ranks(b))[0, 1])


def _ranks(values: np.ndarray) -> np.ndarray:
    _, place, count = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(count) - (count - 1) / 2)[place]


# ---- scores


def score_texts(
    pool: RewardPool,
    examples: Sequence[Example],
    texts: Sequence[Sequence[str]],
    token_ids: Sequence[Sequence[Sequence[int]]],
    step: int = 0,
    progress: Callable[[int, int], None] = lambda done, total: None,
    messages: Sequence[Sequence[Sequence[Mapping[str, Any]]]] = (),
) -> list[Scores]:
    """The scores of each group, arrays [1, G]; `progress` is called with the groups done and their
    number. `messages`, [P][G], are those of rollouts with turns, empty for others."""
    scores: dict[Any, Scores] = {}

    def take(wait: bool) -> None:
        for number, found in pool.collect(wait=wait):
            scores[number] = found
            progress(len(scores), len(examples))

    for number, example in enumerate(
        examples
    ):  # all before the first wait: remote rewards get many at once
        turns = [messages[number]] if messages and any(messages[number]) else ()
        pool.submit(number, [example], [texts[number]], [token_ids[number]], step, messages=turns)
        take(wait=False)
    while len(scores) < len(examples):
        take(wait=True)
    return [scores[number] for number in range(len(examples))]
