"""Rollouts with several processes: deals a step's requests to the processes of a run, which then
exchange their finished groups.

    requests 0 1 2 3 4 -> process 0 samples 0 2 4, process 1 samples 1 3
                       -> all have the groups 0 1 2 3 4

Further requests of the same step (for dynamic sampling) continue from there: the next one goes to
process 1.

A sampler is local to its process: it has whole replicas, and samples without waiting for other
processes. Every process continues with the exchanged form of all groups, including its own, so that
all train on the same numbers."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from shoal.mesh import World
from shoal.protocols import GroupRequest, RolloutSource, RolloutStats
from shoal.records import Example, Failure, Group, Params, Purpose, ShoalError
from shoal.runs.groups import from_table, to_table
from shoal.stop import StopRequested, StopSignal

NOWHERE = Example(0, "")
"""Example that stands for a group's own while it is exchanged: every process has the request, which
contains the real one."""


class DealtRequest(NamedTuple):
    """A request, and the index of the process that samples it."""

    request: GroupRequest
    process: int


class Share(NamedTuple):
    """What one process contributes to an exchange: its groups, its figures, and the reason why it
    ended, if it did."""

    groups: Sequence[Group]
    stats: Mapping[str, Any] = {}  # fields of a RolloutStats, by name
    is_stopped: bool = False  # True if the process was asked to stop
    error: str | None = None


@dataclass
class MultiProcessSource:
    """A `RolloutSource` for a run of several processes: in each of them `source` samples a share of
    the requests.

    If one process is asked to stop, or a reward or a publication raises an error there, all
    processes raise the same."""

    source: RolloutSource
    world: World
    stop: StopSignal
    stats: dict[Purpose, RolloutStats] = field(default_factory=lambda: defaultdict(RolloutStats))
    requested: list[DealtRequest] = field(default_factory=list)
    # number of requests so far, by (purpose, step)
    num_dealt: dict[tuple[Purpose, int], int] = field(default_factory=dict)

    def request(self, requests: Sequence[GroupRequest]) -> None:
        """Deals requests to the processes in turn, each step's first to process 0, and requests
        this process's share. All processes call it with the same requests. Calls nothing of
        `source` if no request is this process's."""
        # The first request of every step goes to process 0, so a resumed run deals alike.
        own_requests = []
        for request in requests:
            number = self.num_dealt.get((request.purpose, request.step), 0)
            self.num_dealt[request.purpose, request.step] = number + 1
            process = number % self.world.count
            self.requested.append(DealtRequest(request, process))
            if process == self.world.index:
                own_requests.append(request)
        if own_requests:
            self.source.request(own_requests)

    def take(self, purpose: Purpose, step: int) -> list[Group]:
        """Waits for this process's groups of a step, exchanges them with the other processes, and
        returns the groups of all in the order of the requests. All processes call it for the same
        step, and each waits for the others. StopRequested if any process was asked to stop,
        ShoalError if taking its share failed in any. ValueError if the step has requested none."""
        wanted: list[DealtRequest] = []
        others: list[DealtRequest] = []
        for dealt in self.requested:
            if dealt.request.purpose == purpose and dealt.request.step == step:
                wanted.append(dealt)
            else:
                others.append(dealt)
        if not wanted:
            raise ValueError(f"{purpose} at step {step} has requested no groups")
        has_share = any(dealt.process == self.world.index for dealt in wanted)
        own_share = self._take_own(purpose, step, has_share)
        name = f"groups of {purpose} step {step}, {wanted[0].request.subset}"
        shares = [_unpacked(data) for data in self.world.exchange(name, _packed(own_share))]
        for share in shares:
            self._add(self.stats[purpose], share.stats)
        # Every process sees all shares, so all of them raise the same.
        if any(share.is_stopped for share in shares):
            raise StopRequested
        for share in shares:
            if share.error is not None:
                raise ShoalError(share.error)
        self.requested = others
        for dealt_purpose, dealt_step in list(self.num_dealt):
            if dealt_step < step:
                del self.num_dealt[dealt_purpose, dealt_step]
        # For each process an iterator of its groups, which are in the order of its requests.
        groups_left = [iter(share.groups) for share in shares]
        groups = []
        for request, process in wanted:
            group = next(groups_left[process])
            group = replace(
                group,
                example=request.example,
                prompt_ids=request.prompt_ids,
                step=request.step,
            )
            groups.append(group)
        return groups

    def _take_own(self, purpose: Purpose, step: int, has_share: bool) -> Share:
        """Returns this process's groups and figures of a step, as a `Share` to be exchanged; a
        StopRequested or ShoalError is not raised but noted in the share; other errors are raised.
        `has_share`: False if no group was dealt to this process."""
        groups: Sequence[Group] = []
        is_stopped = False
        error = None
        try:
            self.stop.check()  # a process without a share may be asked to stop, too
            if has_share:
                groups = self.source.take(purpose, step)
        except StopRequested:
            is_stopped = True
        except ShoalError as raised:
            error = str(raised)
        return Share(groups, vars(self.source.read_stats(purpose)), is_stopped, error)

    def check_logprobs(
        self, groups: Sequence[Group], logprobs: Mapping[tuple[int, int], np.ndarray], version: int
    ) -> None:
        """Compares the log-probs of the groups that this process's own hosts sampled with the
        trainer's, `logprobs`, and gives up hosts that differ too much. Passes all groups to
        `source`, which skips those that its hosts did not sample."""
        self.source.check_logprobs(groups, logprobs, version)

    def is_busy_with(self, purpose: Purpose, step: int) -> bool:
        """Always False: the processes exchange groups when they are taken, all at the same step, so
        none may decide by itself to take them later."""
        return False

    def publish_frozen(self, params: Params) -> None:
        publish = partial(self.source.publish_frozen, params)
        self._in_all_processes("publication of frozen weights", publish)

    def publish(self, version: int, params: Params, keep_from: int | None = None) -> None:
        publish = partial(self.source.publish, version, params, keep_from)
        self._in_all_processes(f"publication of version {version}", publish)

    def _in_all_processes(self, name: str, publish: Callable[[], None]) -> None:
        """Calls `publish` and waits until all processes have called theirs; if it raised ShoalError
        in one, all processes raise a ShoalError with that text; other errors are raised at once,
        here alone. `name`: what is published, the same text in all processes."""
        own_error = ""
        try:
            publish()
        except ShoalError as raised:  # for example, the disk of one machine is full
            own_error = str(raised)
        for error in self.world.exchange_json(name, own_error):
            if error:
                raise ShoalError(error)

    def published_shapes(self) -> Params:
        return self.source.published_shapes()

    def published(self) -> Mapping[int, Params]:
        return self.source.published()

    def _add(self, total: RolloutStats, stats: Mapping[str, Any]) -> None:
        """Adds a process's figures (fields of `RolloutStats`) to `total`: of seconds and
        publications the largest number of all processes counts, all others are summed."""
        total.sample_seconds = max(total.sample_seconds, stats["sample_seconds"])
        total.reward_seconds = max(total.reward_seconds, stats["reward_seconds"])
        total.busy_seconds = max(total.busy_seconds, stats["busy_seconds"])
        total.unchanged = max(total.unchanged, stats["unchanged"])
        total.publish = _largest(total.publish, stats["publish"])
        total.tokens += stats["tokens"]
        total.counters.update(stats["counters"])
        total.failures += stats["failures"]

    def read_stats(self, purpose: Purpose) -> RolloutStats:
        """Returns one purpose's figures of all processes that `take` has exchanged since the last
        call, and resets them. Of what happened since the last `take` only this process's
        publications are included; its other figures since then are dropped."""
        stats = self.stats.pop(purpose, RolloutStats())
        own = self.source.read_stats(purpose)
        stats.unchanged = max(stats.unchanged, own.unchanged)
        stats.publish = _largest(stats.publish, own.publish)
        return stats

    def close(self) -> None:
        self.source.close()


def _largest(figures: Mapping[str, float], others: Mapping[str, float]) -> dict[str, float]:
    """Returns, for each name of `figures`, the larger of both values. `others` must have these
    names; further names of `others` are left out."""
    return {name: max(value, others[name]) for name, value in figures.items()}


def _packed(share: Share) -> bytes:
    """Returns a share as bytes: one line of JSON with everything but the groups, followed by the
    groups' table (Arrow's stream format), if there are groups. The groups' examples are left out:
    `take` adds them from the requests."""
    import pyarrow as pa

    failures = [asdict(failure) for failure in share.stats["failures"]]
    head = {
        "stats": {**share.stats, "failures": failures},
        "logged": [dict(group.logged) for group in share.groups],
        "is_stopped": share.is_stopped,
        "error": share.error,
    }
    line = json.dumps(head).encode() + b"\n"
    if not share.groups:
        return line
    table = to_table([replace(group, example=NOWHERE) for group in share.groups])
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return line + sink.getvalue().to_pybytes()


def _unpacked(data: bytes) -> Share:
    """Returns the share that `_packed` made the bytes from, but with NOWHERE as each group's
    example. There are no groups if the bytes have no table."""
    import pyarrow as pa

    line, _, table = data.partition(b"\n")
    head = json.loads(line)
    failures = [Failure(**failure) for failure in head["stats"]["failures"]]
    groups: list[Group] = []
    if table:
        stored_groups = from_table(pa.ipc.open_stream(table).read_all())
        for stored, logged in zip(stored_groups, head["logged"], strict=True):
            groups.append(replace(stored.group, logged=logged))  # which the table lacks
    return Share(groups, {**head["stats"], "failures": failures}, head["is_stopped"], head["error"])
