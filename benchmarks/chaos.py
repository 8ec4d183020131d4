"""Does a run over hosts that die, hang, lie and come and go train on every group exactly once, and
in time?

    python benchmarks/chaos.py [--steps 100] [--kills 50] [--stops 10] [--seeds 0 1 2]
                               [--modes fixed-0 newest-2 ...]

The fleet and the training loop are the real ones; engines and updates sleep (benchmarks/fakes.py).
A token is a function of its address, so groups can be compared bit for bit. One host is ten times
slower than the others. On the way

    kills          a host dies with an answer in its hands, and is made anew
    stops          a host hangs: no answers, no progress
    interruptions  a host dies while it reads new weights
    trainer kills  the trainer is killed in an update, and resumes with other hosts from a
                   checkpoint up to 3 steps old
    leaves         a host leaves and comes back a second later; another is not there at the start
    answers        10% come up to three steps later, 5% never, 5% twice, 2% are rubbish

Checked at each step: its groups are those that it asked for, each once, in order; each token's
version is within the bound, and with fixed versions the one asked for; what was sampled is what the
undisturbed run has; no more groups are under way than the bound allows. Every tenth version is
evaluated on the way, by the answers of that version alone. Nothing waits longer than
DEADLINE_SECONDS. All tokens that hosts sampled were taken, or lost with their host.
"""

from __future__ import annotations

import argparse
import itertools
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fakes import FakeTrainer, make_fleet, make_run
from shoal.records import Group, Purpose
from shoal.rollout import host_health
from shoal.trainer.schedule import Schedule
from unruly import GROUP_SIZE, NAMES, PROMPTS, STEP_SECONDS, Absent, Hosts, Plan

QUESTIONS = 3
UPDATE_SECONDS = 0.03
PUBLISH_SECONDS = 0.005
STALL_SECONDS = 1.0
DEADLINE_SECONDS = 20.0
"""Several hosts in a row may hang with the same group, each for STALL_SECONDS."""


class Wrong(Exception):
    """What the run must never do."""


class Killed(Exception):
    """The trainer's end, in an update."""


@dataclass
class Account:
    """What a run trained on, checked step by step, and its evaluations."""

    mode: str
    k: int
    expected: Mapping[str, Any] = field(default_factory=dict)  # of the undisturbed run
    kills: set[int] = field(default_factory=set)  # steps in whose update the trainer is killed
    seen: dict[str, Any] = field(default_factory=dict)
    asked: Mapping[int, Sequence[int]] = field(default_factory=dict)  # step -> rows
    under_way: Callable[[], int] = lambda: 0  # groups for training that were not handed over
    rows: dict[int, list[int]] = field(default_factory=dict)  # by step
    oldest: int = 0

    def note(self, step: int, groups: Sequence[Group]) -> None:
        if step in self.kills:
            self.kills.discard(step)
            raise Killed
        self.rows[step] = [group.example.row for group in groups]
        if self.rows[step] != self.asked[step]:
            raise Wrong(
                f"step {step} trained on rows {self.rows[step]}; it asked for {self.asked[step]}"
            )
        if (under_way := self.under_way()) > self.k * PROMPTS:
            raise Wrong(f"beside those of step {step} {under_way} groups are under way")
        ages = np.concatenate(
            [step - one.versions for group in groups for one in group.completions]
        )
        if (
            ages.min() < 0
            or ages.max() > self.k
            or (self.mode == "fixed" and set(ages) != {min(step, self.k)})
        ):
            raise Wrong(f"step {step} trained on tokens {ages.min()} to {ages.max()} versions old")
        self.oldest = max(self.oldest, int(ages.max()))
        self.compare(f"step {step} trained on", contents(groups, self.mode == "fixed"))

    def end(self, steps: int, evaluations: Mapping[int, Sequence[Group]]) -> None:
        for version, groups in evaluations.items():
            if any(
                (one.versions != version).any() for group in groups for one in group.completions
            ):
                raise Wrong(f"the evaluation of version {version} has answers of another")
            self.compare(f"the evaluation of version {version} has", contents(groups, True))
        if sorted(self.rows) != list(range(steps)) or sorted(evaluations) != sorted(
            {*range(0, steps, 10), steps}
        ):
            raise Wrong(
                f"made were steps {sorted(self.rows)}, evaluated versions {sorted(evaluations)}"
            )
        if sorted(itertools.chain.from_iterable(self.rows.values())) != list(
            range(steps * PROMPTS)
        ):
            raise Wrong("a group was trained on twice, or never")

    def compare(self, what: str, found: Any) -> None:
        if self.expected and found != self.expected[what]:
            raise Wrong(f"{what} other tokens than in the undisturbed run, or in another order")
        self.seen[what] = found


def contents(groups: Sequence[Group], with_version: bool) -> list[Any]:
    return [
        (
            group.example.row,
            group.version if with_version else 0,
            group.rewards.tobytes(),
            *((one.token_ids.tobytes(), one.logprobs.tobytes()) for one in group.completions),
        )
        for group in groups
    ]


def play(
    mode: str,
    k: int,
    steps: int,
    plan: Plan,
    expected: Mapping[str, Any],
    kills: Sequence[int] = (),
    on_note: Callable[[str], None] = lambda text: None,
) -> tuple[Account, str]:
    """One run, resumed as often as its trainer is killed; its account and a line of figures. Raises
    Wrong."""
    account = Account(mode, k, expected, set(kills))
    trainer, hosts = FakeTrainer(UPDATE_SECONDS, account.note), Hosts(plan)
    newest, ended, began = mode == "newest", False, time.perf_counter()
    longest = 0.0
    while not ended:
        trainer.updates, hosts.woken = [], threading.Event()
        first: dict[str, Any] = {}
        for name in NAMES:
            first[name] = hosts.make(name) if name not in hosts.away else Absent()
        fleet = make_fleet(
            first,
            hosts.woken,
            PUBLISH_SECONDS,
            restart=hosts.make,
            restarts=10**6,
            stall_seconds=STALL_SECONDS,
            on_note=on_note,
        )
        run = make_run(
            fleet,
            trainer,
            steps,
            PROMPTS,
            GROUP_SIZE,
            Schedule(k, takes_newest=newest),
            QUESTIONS,
            pins=newest,
        )
        account.asked, started, read = run.pending, time.perf_counter(), len(trainer.stats)
        account.under_way = lambda ledger=fleet.ledger: sum(
            one.request.purpose is Purpose.TRAIN for one in ledger.entries.values()
        )
        try:
            run.train()
            ended = True
            stats = [*trainer.stats[read:], fleet.read_stats(Purpose.TRAIN)]
            if (
                spare := sum(
                    one.counters["tokens"] - one.tokens - one.fleet["tokens_lost"] for one in stats
                )
                - fleet.read_stats(Purpose.EVALUATE).tokens
            ):
                raise Wrong(f"{spare} sampled tokens were neither taken nor lost")
            if left := len(fleet.ledger.entries):
                raise Wrong(f"{left} groups are left")
        except Killed:
            pass
        finally:
            fleet.close()
        begins, ends = zip(*trainer.updates, strict=True)
        longest = max([longest, *(b - e for b, e in zip(begins, (started, *ends), strict=False))])
    account.end(steps, trainer.evaluations)
    if longest > DEADLINE_SECONDS:
        raise Wrong(f"a step waited {longest:.1f} s for its groups")
    total = Counter[str]()
    for one in trainer.stats:
        total.update(one.fleet)
    return account, (
        f"{time.perf_counter() - began:5.1f} s, longest wait {longest:4.1f} s, oldest "
        f"{account.oldest}, groups asked again {total['asked_again']}, tokens lost "
        f"{total['tokens_lost']}, second answers {total['duplicates']}, hosts made "
        f"{sum(hosts.made.values())}"
    )


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--stops", type=int, default=10)
    parser.add_argument("--interruptions", type=int, default=20)
    parser.add_argument("--leaves", type=int, default=2)
    parser.add_argument("--trainer-kills", type=int, default=10)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument(
        "--modes", nargs="+", default=["fixed-0", "fixed-1", "fixed-3", "newest-1", "newest-4"]
    )
    parser.add_argument("--notes", action="store_true", help="what the fleet says of lost hosts")
    options = parser.parse_args(words)
    say = print if options.notes else lambda text: None
    host_health.MOST_PAUSE_SECONDS = STEP_SECONDS  # between a loss and the next host of that name
    failed = 0
    for text in options.modes:
        mode, _, k = text.partition("-")
        whole, figures = play(mode, int(k), options.steps, Plan(random.Random(0)), {}, on_note=say)
        print(f"{text}, undisturbed: {figures}", flush=True)
        for seed in options.seeds:
            plan = Plan.of(options, seed)
            kills = plan.random_.sample(range(options.steps), options.trainer_kills)
            try:
                _, figures = play(mode, int(k), options.steps, plan, whole.seen, kills, say)
            except Wrong as error:
                figures, failed = f"WRONG: {error}", failed + 1
            happened = ", ".join(f"{name} {count}" for name, count in sorted(plan.happened.items()))
            print(f"{text}, seed {seed}: {figures}\n  {happened}", flush=True)
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
