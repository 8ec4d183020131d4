"""Deals a step's requests to the processes of a run, which exchange the groups that they have finished.

    requests 0 1 2 3 4 -> process 0 plays 0 2 4, process 1 plays 1 3 -> all have the groups 0 1 2 3 4

More requests of the same step (dynamic sampling's) are dealt on from there: the next is process 1's.

A sampler is local to its process: it has whole replicas, and samples without waiting for others. Every process
continues with what was exchanged, its own groups too, so that all learn from the same numbers.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace

from shoal.mesh import World
from shoal.model.transformer import Model
from shoal.report.groups import from_table, to_table
from shoal.rollout.player import Player
from shoal.rollout.publication import local_part
from shoal.types import Example, Failure, Group, GroupRequest, Params, Purpose, RolloutStats, ShoalError, StopRequested

NOWHERE = Example(0, "")
"""In place of an exchanged group's example: every process has the request, which holds it."""


@dataclass
class DealtPlayer:
    """Plays as `Player` does, a share of the requests in each process. `model` is the sampler's, on all devices.

    Where a process is asked to stop, or a reward raises there, all of them raise that.
    """

    player: Player
    world: World
    model: Model
    stats: RolloutStats = field(default_factory=RolloutStats)
    dealt: tuple[Purpose | None, int, int] = None, 0, 0  # purpose and step, and how many of their requests were dealt

    def play(self, requests: Sequence[GroupRequest], version: int, params: Params) -> list[Group]:
        """The groups of these requests, in their order; all ask for groups of one size."""
        world, first, ended = self.world, requests[0], {}
        groups: list[Group] = []
        holders = self._deal(requests)
        try:
            self.player.stop.check()  # a process without a share is asked to stop, too
            if mine := [one for one, holder in zip(requests, holders, strict=True) if holder == world.index]:
                groups = self.player.play(mine, version, local_part(self.model, params))
        except StopRequested:
            ended = {"stop": True}
        except ShoalError as error:
            ended = {"error": str(error)}
        head = {**ended, "stats": asdict(self.player.read_stats())}
        what = f"groups of {first.purpose} step {first.step}, {first.subset}"
        parts = [_split(part) for part in world.exchange(what, _joined(head, groups))]
        heads = [head for head, _ in parts]
        for head in heads:
            self._add(head["stats"])
        if any("stop" in head for head in heads):
            raise StopRequested
        if errors := [head["error"] for head in heads if "error" in head]:
            raise ShoalError(errors[0])
        played = [iter(_groups(table)) for _, table in parts]
        return [_restored(next(played[holder]), request) for holder, request in zip(holders, requests, strict=True)]

    def _deal(self, requests: Sequence[GroupRequest]) -> list[int]:
        """The process that plays each request. Every step begins at process 0, so a resumed run deals alike."""
        purpose, step = requests[0].purpose, requests[0].step
        begin = self.dealt[2] if self.dealt[:2] == (purpose, step) else 0
        self.dealt = purpose, step, begin + len(requests)
        return [number % self.world.count for number in range(begin, begin + len(requests))]

    def _add(self, stats: dict) -> None:
        """Adds a process's figures: the seconds of the one that took longest since they were last read, else sums."""
        for name in ("sample_seconds", "reward_seconds"):
            setattr(self.stats, name, max(getattr(self.stats, name), stats[name]))
        for name in ("tokens", "drawing", "places"):
            setattr(self.stats, name, getattr(self.stats, name) + stats[name])
        self.stats.failures += [Failure(**failure) for failure in stats["failures"]]
        for name, values in stats["logged"].items():
            self.stats.logged.setdefault(name, []).extend(values)

    def read_stats(self) -> RolloutStats:
        """The figures of all processes since the last call."""
        stats, self.stats = self.stats, RolloutStats()
        return stats

    def close(self) -> None:
        self.player.close()


def _joined(head: dict, groups: Sequence[Group]) -> bytes:
    import pyarrow as pa

    line = json.dumps(head).encode() + b"\n"
    if not groups:
        return line
    table, sink = to_table([replace(group, example=NOWHERE) for group in groups]), pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return line + sink.getvalue().to_pybytes()


def _split(part: bytes) -> tuple[dict, bytes]:
    head, _, table = part.partition(b"\n")
    return json.loads(head), table


def _groups(data: bytes) -> Iterator[Group]:
    import pyarrow as pa

    return (stored.group for stored in (from_table(pa.ipc.open_stream(data).read_all()) if data else ()))


def _restored(group: Group, request: GroupRequest) -> Group:
    return replace(group, example=request.example, prompt_ids=request.prompt_ids, step=request.step)
