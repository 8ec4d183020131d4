"""Does the default run learn, and from the rewards alone? Five seeds, and two controls of three
seeds and one.

    python benchmarks/learning.py [--seeds 0 1 2 3 4] [--steps 40]
                                  [--kinds trained permuted "lr 0"] [--keys KEY=VALUE]

`trained`: `shoal train` as it is. `permuted`: the same rewards, exchanged at random among the
completions of each group, so that they carry no signal. `exchanged`: the same for groups of one
completion (`batch.group_size=1`), each of which gets the reward of an earlier one. `lr 0`: nothing
may change at all. Greedy accuracy on the 500 held-out problems. `no tools`: the task without what
it acts with. Of `task=guess` also `by turn`: each question is paid for what its answer rules out,
with algorithm.credit=turn; `permuted turns`: these payments, exchanged at random among the turns of
each completion. `--keys`: other settings, as `model.lora.rank=8 optimizer.lr=1.5e-3`, or another
task that is made here: `task=calculator`, `task=guess`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from statistics import mean
from typing import Any

from shoal.config.sections.reward import RewardSection
from shoal.config.sections.task import TaskSection
from shoal.config.train import Config
from shoal.tasks.guess import Guess
from shoal.tasks.task import load_by_name

SEEDS = {
    "trained": None,
    "permuted": 3,
    "exchanged": 3,
    "lr 0": 1,
    "no tools": 1,
    "by turn": None,
    "permuted turns": 1,
}
"""Of each kind of run; None: all."""
TASK = "LEARNING_TASK"
"""The variable with the name of the task, for the processes that score."""
NUM_EXCHANGED = 256
"""Earlier completions of a process, one of which gives its reward to the next."""


class SilentGuess:
    """The environment of `guess` without a reward of its own."""

    def __init__(self) -> None:
        self._game, self.found = Guess(), False

    def reset(self, **columns: Any) -> None:
        self._game.reset(**columns)
        self.found = False

    def respond(self, message: str) -> str | None:
        words = self._game.respond(message)
        self.found = self._game.found
        return words


class PaidGuess(SilentGuess):
    """The same, which pays each question for what its answer rules out, and nothing in the end."""

    def respond(self, message: str) -> str | None:
        words = super().respond(message)
        self.reward = self._game.reward
        return words


def permuted_turns(
    completions: list[Any], number: list[int], trainer_state: Any, **columns: Any
) -> list[list[float]]:
    """What PaidGuess pays the questions of each completion, permuted among them; and the task's own
    reward for a number at the end."""
    [form] = load_by_name(TaskSection(name="guess"), RewardSection()).rewards
    well_formed = form.function(completions=completions, number=number, **columns)
    rng = random.Random(trainer_state.global_step)
    rewards = []
    for messages, secret, is_number in zip(completions, number, well_formed, strict=True):
        game = Guess()
        game.reset(secret)
        paid = []
        for message in messages:
            if message["role"] == "assistant":
                game.respond(message["content"])
                paid.append(game.reward)
        rng.shuffle(paid)
        paid[-1] += form.weight * is_number
        rewards.append(paid)
    return rewards


def own_rewards(
    prompts: list[Any], environments: Sequence[Any] = (), **columns: Any
) -> list[float]:
    """The rewards of the task itself, and of its environment."""
    task = load_by_name(TaskSection(name=os.environ[TASK]), RewardSection())
    values = [
        [one.weight * value for value in one.function(prompts=prompts, **columns)]
        for one in task.rewards
    ]
    values += [[float(one.found) for one in environments]] if environments else []
    return [sum(of_completion) for of_completion in zip(*values, strict=True)]


class ExchangedReward:
    """The rewards of the task itself, each given to a later completion, which it says nothing of.
    Only the first completions, while there are fewer than NUM_EXCHANGED, may get their own."""

    def __init__(self) -> None:
        self._earlier: list[float] = []
        self._draws = random.Random(0)

    def __call__(self, prompts: list[Any], **columns: Any) -> list[float]:
        given = []
        for reward in own_rewards(prompts, **columns):
            if len(self._earlier) < NUM_EXCHANGED:
                self._earlier.append(reward)
            index = self._draws.randrange(len(self._earlier))
            given.append(self._earlier[index])
            self._earlier[index] = reward
        return given


EXCHANGED = ExchangedReward()


def exchanged_reward(prompts: list[Any], **columns: Any) -> list[float]:
    """The reward of an earlier completion, of those that this process has scored."""
    return EXCHANGED(prompts, **columns)


def permuted_reward(
    prompts: list[Any], trainer_state: Any, environments: Sequence[Any] = (), **columns: Any
) -> list[float]:
    """The rewards of the task itself, and of its environment, permuted within each group."""
    values = own_rewards(prompts, environments, **columns)
    rng = random.Random(trainer_state.global_step)
    out: list[float] = []
    rewards = zip(map(str, prompts), values, strict=True)
    for _, members in itertools.groupby(rewards, key=lambda pair: pair[0]):
        group = [reward for _, reward in members]
        rng.shuffle(group)
        out += group
    return out


def one(kind: str, seed: int, steps: int, keys: Sequence[str]) -> dict[str, Any]:
    """One run, in this process; its summary."""
    import shoal

    with tempfile.TemporaryDirectory() as folder:
        given: dict[str, Any] = dict(key.split("=", 1) for key in keys)
        os.environ[TASK] = name = given.get("task", "words")
        silent = {"environment": f"{__file__}:SilentGuess"} if name == "guess" else {}
        bare = replace(
            load_by_name(TaskSection(name=name), RewardSection()), tools=(), environments={}
        )
        by_turn = {
            "algorithm.credit": "turn",
            "algorithm.advantage": "rloo",
            "algorithm.discount": 0.0,
        }
        controls: dict[str, Any] = {
            "by turn": {"environment": f"{__file__}:PaidGuess", **by_turn},
            "permuted turns": {"reward": permuted_turns, **silent, **by_turn},
            "permuted": {"reward": permuted_reward, **silent},
            "exchanged": {"reward": exchanged_reward, **silent},
            "lr 0": {"optimizer.lr": 0.0},
            "no tools": {
                "task": bare,
                "model": "tiny-tools",
                "train.evaluate_every": 20,
                "sampling.max_prompt_tokens": 256,
            },
        }
        given |= controls.get(kind, {})
        return shoal.train(seed=seed, steps=steps, base_output_directory=folder, **given).summary


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n\n")[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--steps", type=int, default=Config().steps)
    parser.add_argument("--kinds", nargs="+", default=["trained", "permuted", "lr 0"])
    parser.add_argument("--keys", nargs="+", default=[])
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(
            "\n" + json.dumps(one(options.one[0], int(options.one[1]), options.steps, options.keys))
        )
        return
    print(f"{options.steps} steps; greedy accuracy in percent; {os.cpu_count()} CPU cores")
    head = (
        f"{'run':>9} {'seed':>5}",
        f"{'before':>7} {'after':>7} {'change':>7}",
        f"{'pass@8':>15}",
        f"{'well-formed':>15} {'seconds':>8}",
    )
    print(*head)
    for kind in options.kinds:
        changes = []
        for seed in options.seeds[: SEEDS[kind]]:
            command = [
                sys.executable,
                __file__,
                "--one",
                kind,
                str(seed),
                "--steps",
                str(options.steps),
                *(["--keys", *options.keys] if options.keys else []),
            ]
            out = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
            changes.append(show(kind, seed, json.loads(out.splitlines()[-1])))
        print(f"{kind:>9}  mean {mean(changes):+23.1f}", flush=True)


def show(kind: str, seed: int, summary: dict[str, Any]) -> float:
    """Prints a run's row; its change in points."""
    before, after = (next(iter(summary[side].values())) for side in ("before", "after"))
    change = 100 * (after["accuracy"] - before["accuracy"])
    well_formed, pass_8 = (
        [side.get(name, math.nan) for side in (before, after)] for name in ("well_formed", "pass@8")
    )
    print(
        f"{kind:>9} {seed:>5} {100 * before['accuracy']:7.1f} {100 * after['accuracy']:7.1f} "
        f"{change:+7.1f} {_pair(*pass_8):>15} {_pair(*well_formed):>15} "
        f"{summary['seconds_total']:8.1f}",
        flush=True,
    )
    return change


def _pair(before: float, after: float) -> str:
    return f"{100 * before:.1f} -> {100 * after:.1f}"


if __name__ == "__main__":
    main()
