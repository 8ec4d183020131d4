"""Plays one step's requests: a sampler completes them, reward functions score the completions.

    requests -> Sampler of the group's size -> completions -> texts -> RewardPool -> groups with rewards

Rewards are computed while sampling goes on: a group is submitted to the pool as soon as its last completion ends.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field

from shoal.rewards.pool import RewardPool
from shoal.rewards.scores import Scores
from shoal.rollout.group import make_group, sample_request
from shoal.sampler.engine import run_until_idle
from shoal.tasks.task import Task
from shoal.types import Completion, Group, GroupRequest, Params, Purpose, RolloutStats, Sampler, StopSignal


@dataclass(frozen=True)
class SampledGroup:
    """The finished completions of one request, in order of their index, and their texts."""

    completions: list[Completion]
    texts: list[str]


@dataclass
class Player:
    """Turns requests for one version and one group size into groups.

    `make_sampler` is asked once for each purpose and group size (evaluation's greedy answers are groups of one), and
    may give one sampler for several. One that is not in use keeps its compiled programs and frees its caches.
    """

    make_sampler: Callable[[Purpose, int], Sampler]  # for groups of a size
    task: Task
    pool: RewardPool
    decode: Callable[[Sequence[int]], str]
    seed: int
    stop: StopSignal = field(default_factory=StopSignal)
    on_progress: Callable[[str, int, int], None] | None = None  # (part of an evaluation, groups done, groups in all)
    stats: RolloutStats = field(default_factory=RolloutStats)
    samplers: dict[tuple[Purpose, int], Sampler] = field(default_factory=dict)
    next_id: int = 0

    def play(self, requests: Sequence[GroupRequest], version: int, params: Params) -> list[Group]:
        """The groups of these requests, in their order; all ask for groups of one size."""
        by_id = dict(enumerate(requests, start=self.next_id))
        self.next_id += len(requests)
        started = time.perf_counter()
        finished, scores = self._sample(by_id, version, params)
        sampled = time.perf_counter()
        tickets = self._wait(by_id, finished, scores)
        self.stats.sample_seconds += sampled - started
        self.stats.reward_seconds += time.perf_counter() - sampled
        self.stats.tokens += sum(len(completion) for one in finished.values() for completion in one.completions)
        groups = []
        for number, (id, request) in enumerate(by_id.items()):
            found, position = (scores["step"], number) if self.pool.by_step else (scores[id], 0)
            one = finished[id]
            groups.append(make_group(self.task, request, one.completions, one.texts, found, position))
        for ticket in tickets:
            self._count(scores[ticket])
        return groups

    def _sample(self, by_id: Mapping[int, GroupRequest], version: int,
                params: Params) -> tuple[dict[int, SampledGroup], dict[Hashable, Scores]]:
        """Completions by request, and the scores that were ready when sampling ended."""
        first = next(iter(by_id.values()))
        sampler = self._sampler(first.purpose, first.num_completions)
        sampler.load(version, params)
        sampler.submit([sample_request(request, id, self.seed) for id, request in by_id.items()])
        finished: dict[int, SampledGroup] = {}
        scores: dict[Hashable, Scores] = {}
        for id, completions in run_until_idle(sampler, self.stop):
            finished[id] = SampledGroup(completions, [self.decode(one.token_ids.tolist()) for one in completions])
            if not self.pool.by_step:
                # At once: workers score this group while the device samples the others.
                self._submit(id, [by_id[id]], [finished[id]])
            scores |= self.pool.collect()
            if self.on_progress and first.purpose is Purpose.EVALUATE:
                kind = "greedy" if first.params.temperature == 0 else "sampled"
                self.on_progress(f"{first.subset}, {kind}", len(finished), len(by_id))
        # Before rewards are waited for: the update that follows needs the memory of the caches.
        sampler.release_memory()
        drawing, places = sampler.read_places()
        self.stats.drawing += drawing
        self.stats.places += places
        return finished, scores

    def _wait(self, by_id: Mapping[int, GroupRequest], finished: Mapping[int, SampledGroup],
              scores: dict[Hashable, Scores]) -> list[Hashable]:
        """Fills `scores` up; the tickets under which they stand, in the order of the requests."""
        tickets: list[Hashable] = ["step"] if self.pool.by_step else list(by_id)
        if self.pool.by_step:
            # TRL's convention, reward.call=step: functions that compare the groups of a step need them together.
            self._submit("step", list(by_id.values()), [finished[id] for id in by_id])
        while not scores.keys() >= set(tickets):
            with self.stop.raising_at_once():
                scores |= self.pool.collect(wait=True)
        return tickets

    def _sampler(self, purpose: Purpose, size: int) -> Sampler:
        # By purpose too: training's sampler stores the support of truncated sampling and is bounded by it.
        if (purpose, size) not in self.samplers:
            self.samplers[purpose, size] = self.make_sampler(purpose, size)
        return self.samplers[purpose, size]

    def _submit(self, ticket: Hashable, requests: Sequence[GroupRequest], finished: Sequence[SampledGroup]) -> None:
        token_ids = [[completion.token_ids.tolist() for completion in one.completions] for one in finished]
        with self.stop.raising_at_once():  # functions that are called in this process may hang
            self.pool.submit(ticket, [request.example for request in requests], [one.texts for one in finished],
                             token_ids, requests[0].step)

    def _count(self, scores: Scores) -> None:
        self.stats.failures.extend(scores.failures)
        for name, values in scores.metrics.items():
            self.stats.logged.setdefault(name, []).extend(values)

    def read_stats(self) -> RolloutStats:
        """The figures since the last call."""
        stats, self.stats = self.stats, RolloutStats()
        return stats

    def close(self) -> None:
        self.samplers.clear()
        self.pool.close()
