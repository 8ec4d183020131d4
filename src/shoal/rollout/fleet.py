"""The one `RolloutSource`: asks hosts for groups by address, has them judged, hands them over in the order asked.

    request -> ledger -> a host with room -> completions -> judge -> ledger -> take

With a host in the caller's thread all of this happens in `take`. With hosts that run by themselves a thread of the
fleet's does it while the caller learns; only one thread at a time touches the ledger.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax

from shoal.rollout.group import sample_request
from shoal.rollout.judge import Judge
from shoal.rollout.ledger import Entry, Ledger, Stage, check_pending, pending_addresses
from shoal.rollout.publish import Channel
from shoal.types import Group, GroupRequest, Host, HostProgress, Params, Purpose, RolloutStats, StopSignal

JUDGED_POLL_SECONDS = 0.01
"""How often the fleet's thread looks for rewards while some are awaited."""
WAIT_SECONDS = 0.5
"""How long a wait lasts before it looks again, though nobody has woken it."""


@dataclass
class Fleet:
    """Groups of any purpose from any number of hosts.

    Which groups a step learns from is what it asked for, not what finishes first: a restarted run asks again, and gets
    the same. `by_itself`: the hosts sample whenever they have requests; else only while their groups are taken, by
    `poll` in the caller's thread.
    """

    channel: Channel
    hosts: Mapping[str, Host]
    judge: Judge
    seed: int
    by_itself: bool = False
    stop: StopSignal = field(default_factory=StopSignal)
    on_progress: Callable[[str, int, int], None] | None = None  # (part of an evaluation, groups done, groups in all)
    ledger: Ledger = field(default_factory=Ledger)
    keep_from: int = 0  # the oldest version that may yet be requested
    woken: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self._stats, self._read = RolloutStats(), HostProgress()
        self._last: tuple[int, Any] | None = None  # the newest publication: its version, and an array of what was given
        self._given = dict.fromkeys(self.hosts, 0)  # completions that a host has
        self._taking: tuple[Purpose, int] | None = None
        self._failure: BaseException | None = None
        self._closed = False
        self._changed = threading.Condition()  # holds the lock of the ledger
        self._thread = threading.Thread(target=self._run, name="fleet", daemon=True) if self.by_itself else None
        if self._thread:
            self._thread.start()

    # -- the RolloutSource

    def request(self, requests: Sequence[GroupRequest]) -> None:
        with self._changed:
            self.ledger.add(requests)
        self.woken.set()

    def cancel(self, purpose: Purpose, step: int) -> None:
        with self._changed:
            for entry in self.ledger.cancel(purpose, step):
                self._given[entry.host] -= entry.request.num_completions
                self.hosts[entry.host].cancel(entry.id)

    def publish(self, version: int, params: Params, keep_from: int | None = None) -> None:
        with self._changed:
            self.keep_from = version if keep_from is None else keep_from
            self._release()  # before the new version: on a device that is nearly full both may not fit
        manifests = self.channel.publish(version, params)  # without the lock: hosts go on meanwhile
        given = min(jax.tree.leaves(params), key=lambda leaf: leaf.nbytes)
        with self._changed:
            # An update makes new arrays, so those of the last version are its old weights.
            last, self._last = self._last, (version, given)
            self._stats.unchanged += last is not None and last[0] != version and last[1] is given
            for name, manifest in manifests.items():
                self.hosts[name].load(version, manifest)
        self.woken.set()

    def take(self, purpose: Purpose, step: int) -> list[Group]:
        started = time.perf_counter()
        with self._changed:
            wanted = self.ledger.of(purpose, step)
            if not wanted:
                raise ValueError(f"{purpose} at step {step} has requested no groups")
            self._check_versions(wanted)
            self._taking = purpose, step
            try:
                self._wait_until(wanted, {Stage.DRAWN, Stage.JUDGED})
                drawn = time.perf_counter()
                self._wait_until(wanted, {Stage.JUDGED})
            finally:
                self._taking = None
            self._stats.sample_seconds += drawn - started
            self._stats.reward_seconds += time.perf_counter() - drawn
            self._count(wanted)
            groups = self.ledger.hand_over(wanted)
            self._release()
            return groups

    def published_shapes(self) -> Params:
        return self.channel.published_shapes()

    def read_stats(self) -> RolloutStats:
        with self._changed:
            stats, self._stats = self._stats, RolloutStats()
            before, self._read = self._read, self._total()
            stats.drawing, stats.places = self._read.drawing - before.drawing, self._read.places - before.places
            # In the caller's thread rewards that are called there, and texts, are part of sampling.
            stats.busy_seconds = (self._read.busy_seconds - before.busy_seconds) / len(self.hosts) if self.by_itself \
                else stats.sample_seconds
            return stats

    def state(self) -> dict[str, Any]:
        """Addresses of pending training groups, and the weights that are still sampled from."""
        with self._changed:
            pending = pending_addresses(one.request for one in self.ledger.entries.values())
            return {"pending": pending, "published": self.channel.versions}

    def restore(self, state: dict[str, Any]) -> None:
        check_pending(state, self.state()["pending"])

    def close(self) -> None:
        with self._changed:
            self._closed = True
        self.woken.set()
        if self._thread:
            self._thread.join()
        for host in self.hosts.values():
            host.close()
        self.channel.close()
        self.judge.pool.close()

    # -- waiting

    def _wait_until(self, entries: Sequence[Entry], stages: set[Stage]) -> None:
        while not all(one.stage in stages for one in entries):
            self.stop.check()
            if self._failure is not None:
                raise self._failure
            if self._thread:
                with self.stop.raising_at_once():
                    self._changed.wait(WAIT_SECONDS)
            else:
                # Once all is drawn there is nothing to do but to wait for rewards, which may hang.
                self._turn(self.stop.raising_at_once, wait=all(one.stage is not Stage.RUNNING
                                                               and one.stage is not Stage.WAITING for one in entries))

    def _run(self) -> None:
        """The fleet's thread."""
        while True:
            self.woken.clear()
            try:
                with self._changed:
                    if self._closed:
                        return
                    self._turn()
                    self._changed.notify_all()
                    scoring = self.ledger.count(Stage.DRAWN) > 0
            except BaseException as error:  # raised by `take`: whoever waits for these groups must learn of it
                with self._changed:
                    self._failure = error
                    self._changed.notify_all()
                return
            self.woken.wait(JUDGED_POLL_SECONDS if scoring else WAIT_SECONDS)

    # -- what is done with the ledger's lock held

    def _turn(self, guard: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
              wait: bool = False) -> None:
        """Gives groups to hosts, gathers their answers, has them judged. `guard` is around what may hang."""
        self._assign()
        for host in self.hosts.values():
            for id, completions in host.poll().items():
                entry = self.ledger.entries.get(id)
                if entry is not None and entry.stage is Stage.RUNNING:
                    self._given[entry.host] -= entry.request.num_completions
                if (entry := self.ledger.answer(id, completions)) is not None:
                    with guard():  # functions that are called in this process
                        self.judge.submit(entry, self.ledger)
                    self._show_progress(entry)
        with guard():
            self.judge.collect(self.ledger, wait)

    def _assign(self) -> None:
        """Gives what waits to hosts, the oldest first, each to the one with the most room."""
        capacity = {name: host.progress().capacity for name, host in self.hosts.items()}
        taken = None if self.by_itself else lambda entry: (entry.request.purpose, entry.request.step) == self._taking
        batches: dict[str, list[Entry]] = {}
        while (entry := self.ledger.first_waiting(taken)) is not None:
            room = {name: size - self._given[name] if size else 1 for name, size in capacity.items()}
            name = max(room, key=lambda name: room[name], default="")
            if not name or room[name] <= 0:
                break
            self.ledger.start(entry, name)
            self._given[name] += entry.request.num_completions
            batches.setdefault(name, []).append(entry)
        for name, entries in batches.items():
            self.hosts[name].submit([sample_request(one.request, one.id, self.seed) for one in entries])

    def _check_versions(self, entries: Sequence[Entry]) -> None:
        known = sorted(self.channel.versions)
        for request in {(one.request.version, one.request.exact) for one in entries}:
            version, exact = request
            if (version not in known) if exact else (not known or version > known[-1]):
                # A fault of the schedule: sampling from another version would break the bound on staleness unseen.
                raise RuntimeError(f"version {version} is requested, but only {known} are published")

    def _show_progress(self, entry: Entry) -> None:
        request = entry.request
        if self.on_progress and request.purpose is Purpose.EVALUATE:
            kind = "greedy" if request.params.temperature == 0 else "sampled"
            batch = self.ledger.of_batch(entry.batch)
            done = sum(one.stage in (Stage.DRAWN, Stage.JUDGED) for one in batch)
            self.on_progress(f"{request.subset}, {kind}", done, len(batch))

    def _count(self, entries: Sequence[Entry]) -> None:
        stats = self._stats
        for one in entries:
            stats.tokens += sum(map(len, one.completions))
            if one.scores is not None:
                stats.failures.extend(one.scores.failures)
                for name, values in one.scores.metrics.items():
                    stats.logged.setdefault(name, []).extend(values)

    def _total(self) -> HostProgress:
        found = [host.progress() for host in self.hosts.values()]
        return HostProgress(drawing=sum(one.drawing for one in found), places=sum(one.places for one in found),
                            busy_seconds=sum(one.busy_seconds for one in found))

    def _release(self) -> None:
        """Drops weights that no pending request names and no later one may name."""
        needed = {one.request.version for one in self.ledger.entries.values() if one.request.exact}
        self.channel.release(lambda version: version in needed or version >= self.keep_from)
