"""Deals a step's requests to the processes of a run, which exchange the groups that they have
finished.

    requests 0 1 2 3 4 -> process 0 samples 0 2 4, process 1 samples 1 3
                       -> all have the groups 0 1 2 3 4

More requests of the same step (dynamic sampling's) are dealt on from there: the next is process
1's.

A sampler is local to its process: it has whole replicas, and samples without waiting for others.
Every process continues with what was exchanged, its own groups too, so that all learn from the same
numbers.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from shoal.mesh import World
from shoal.protocols import GroupRequest, RolloutSource, RolloutStats
from shoal.records import Example, Failure, Group, Params, Purpose, ShoalError
from shoal.runs.groups import from_table, to_table
from shoal.stop import StopRequested, StopSignal

NOWHERE = Example(0, "")
"""In place of an exchanged group's example: every process has the request, which holds it."""


@dataclass
class MultiProcessSource:
    """A `RolloutSource` of several processes: in each of them `source` samples a share of the
    requests.

    Where a process is asked to stop, or a reward or a publication raises there, all of them raise
    that.
    """

    source: RolloutSource
    world: World
    stop: StopSignal
    stats: dict[Purpose, RolloutStats] = field(default_factory=lambda: defaultdict(RolloutStats))
    requested: list[tuple[GroupRequest, int]] = field(
        default_factory=list
    )  # each with the process that samples it
    dealt: dict[tuple[Purpose, int], int] = field(
        default_factory=dict
    )  # by purpose and step: requests so far

    def request(self, requests: Sequence[GroupRequest]) -> None:
        # Every step begins at process 0, so a resumed run deals alike.
        mine = []
        for one in requests:
            number = self.dealt.get((one.purpose, one.step), 0)
            self.dealt[one.purpose, one.step] = number + 1
            self.requested.append((one, number % self.world.count))
            if number % self.world.count == self.world.index:
                mine.append(one)
        if mine:
            self.source.request(mine)

    def take(self, purpose: Purpose, step: int) -> list[Group]:
        wanted = [
            pair for pair in self.requested if (pair[0].purpose, pair[0].step) == (purpose, step)
        ]
        if not wanted:
            raise ValueError(f"{purpose} at step {step} has requested no groups")
        groups, ended = self._take_mine(
            purpose, step, any(holder == self.world.index for _, holder in wanted)
        )
        stats = self.source.read_stats(purpose)
        failures = [asdict(failure) for failure in stats.failures]
        head = {**ended, "stats": {**vars(stats), "failures": failures}}
        what = f"groups of {purpose} step {step}, {wanted[0][0].subset}"
        parts = [part.partition(b"\n") for part in self.world.exchange(what, _joined(head, groups))]
        heads = [json.loads(line) for line, *_ in parts]
        for head in heads:
            self._add(self.stats[purpose], head["stats"])
        if any("stop" in head for head in heads):
            raise StopRequested
        if errors := [head["error"] for head in heads if "error" in head]:
            raise ShoalError(errors[0])
        taken = {id(request) for request, _ in wanted}
        self.requested = [pair for pair in self.requested if id(pair[0]) not in taken]
        self.dealt = {asked: number for asked, number in self.dealt.items() if asked[1] >= step}
        played = [iter(_groups(table)) for *_, table in parts]
        return [
            replace(
                next(played[holder]),
                example=request.example,
                prompt_ids=request.prompt_ids,
                step=request.step,
            )
            for request, holder in wanted
        ]

    def _take_mine(
        self, purpose: Purpose, step: int, has_share: bool
    ) -> tuple[list[Group], dict[str, Any]]:
        """This process's groups, and what ended it."""
        try:
            self.stop.check()  # a process without a share is asked to stop, too
            return self.source.take(purpose, step) if has_share else [], {}
        except StopRequested:
            return [], {"stop": True}
        except ShoalError as error:
            return [], {"error": str(error)}

    def check_logprobs(
        self, groups: Sequence[Group], logprobs: Mapping[tuple[int, int], np.ndarray], version: int
    ) -> None:
        self.source.check_logprobs(groups, logprobs, version)

    def is_ready(self, purpose: Purpose, step: int) -> bool:
        return True  # groups are exchanged when they are taken

    def publish_frozen(self, params: Params) -> None:
        self._everywhere(
            "publication of frozen weights", partial(self.source.publish_frozen, params)
        )

    def publish(self, version: int, params: Params, keep_from: int | None = None) -> None:
        self._everywhere(
            f"publication of version {version}",
            partial(self.source.publish, version, params, keep_from),
        )

    def _everywhere(self, name: str, publish: Callable[[], None]) -> None:
        error = ""
        try:
            publish()
        except ShoalError as failed:  # a disk of one process's machine is full
            error = str(failed)
        if errors := [one for one in self.world.exchange_json(name, error) if one]:
            raise ShoalError(errors[0])

    def published_shapes(self) -> Params:
        return self.source.published_shapes()

    def published(self) -> Mapping[int, Params]:
        return self.source.published()

    def _add(self, total: RolloutStats, stats: dict) -> None:
        """Adds a process's figures: the seconds of the one that took longest since they were last
        read, else sums."""
        for name in ("sample_seconds", "reward_seconds", "busy_seconds", "unchanged"):
            setattr(total, name, max(getattr(total, name), stats[name]))
        total.tokens += stats["tokens"]
        total.counters.update(stats["counters"])
        total.publish = _largest(total.publish, stats["publish"])
        total.failures += [Failure(**failure) for failure in stats["failures"]]
        for name, values in stats["logged"].items():
            total.logged.setdefault(name, []).extend(values)

    def read_stats(self, purpose: Purpose) -> RolloutStats:
        """The figures of all processes since the last call."""
        stats, own = self.stats.pop(purpose, RolloutStats()), self.source.read_stats(purpose)
        stats.unchanged = max(stats.unchanged, own.unchanged)
        stats.publish = _largest(stats.publish, own.publish)
        return stats

    def close(self) -> None:
        self.source.close()


def _largest(figures: dict[str, float], others: dict[str, float]) -> dict[str, float]:
    return {name: max(value, others[name]) for name, value in figures.items()}


def _joined(head: dict, groups: Sequence[Group]) -> bytes:
    import pyarrow as pa

    line = json.dumps(head).encode() + b"\n"
    if not groups:
        return line
    table, sink = (
        to_table([replace(group, example=NOWHERE) for group in groups]),
        pa.BufferOutputStream(),
    )
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return line + sink.getvalue().to_pybytes()


def _groups(data: bytes) -> Iterator[Group]:
    import pyarrow as pa

    return (
        stored.group for stored in (from_table(pa.ipc.open_stream(data).read_all()) if data else ())
    )
