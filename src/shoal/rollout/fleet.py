"""The one `RolloutSource`: asks hosts for groups by address, has them rewarded, hands them over in
the order asked.

    request -> ledger -> a host with room -> completions -> rewards -> ledger -> take

With a host in the caller's thread all of this happens in `take`. With hosts that run by themselves
a thread of the fleet's does it while the caller learns; only one thread at a time touches the
ledger.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import jax
import numpy as np

from shoal.protocols import GroupRequest, Host, HostProgress, Manifest, RolloutStats
from shoal.records import Completion, Group, HostLost, HostRefused, Params, Purpose, ShoalError
from shoal.report.timeline import Timeline
from shoal.rollout.host_health import HostHealth, wrong_answer, wrong_versions
from shoal.rollout.ledger import (
    GroupRewards,
    Ledger,
    PendingGroup,
    Stage,
    branch_request,
    sample_request,
    whereabouts,
)
from shoal.rollout.turn_driver import HostCommand, TurnDriver
from shoal.runs.summary import version_text
from shoal.stop import StopSignal
from shoal.text import count
from shoal.weights.store import Publisher

Answer = TypeVar("Answer")

POLL_SECONDS = 0.01
"""How often the fleet's thread looks for answers and rewards while some are awaited."""
WAIT_SECONDS = 0.5
"""How long a wait lasts before it looks again, though nobody has woken it."""
LONG_WAIT_SECONDS = 60.0
"""How long `take` waits before it says what for."""
END_SECONDS = 5.0
"""How long the end of a run waits for the fleet's thread."""

QUEUES = {
    "waiting": (Stage.WAITING,),
    "running": (Stage.RUNNING,),
    "sampled": (Stage.SAMPLED, Stage.REWARDED),
}
"""Metric -> stages of groups."""


@dataclass
class Fleet:
    """Groups of any purpose from any number of hosts.

    Which groups a step learns from is what it asked for, not what finishes first: a restarted run
    asks again, and gets the same. `by_itself`: the hosts sample whenever they have requests; else
    only while their groups are taken, by `poll` in the caller's thread.
    """

    publisher: Publisher
    hosts: Mapping[str, Host]
    rewards: GroupRewards
    seed: int
    by_itself: bool = False
    shares_memory: bool = (
        False  # the hosts' devices are the caller's, who learns only while they have nothing to do
    )
    restart: Callable[[str], Host] | None = (
        None  # makes a host anew that was lost; None where hosts are this process's
    )
    restarts: int = 3  # of each host
    stall_seconds: float = 0.0  # that a host may make no progress; 0 for auto
    logprob_tolerance: float = (
        0.0  # mean difference from the trainer's beyond which a host is lost; 0: none is
    )
    on_note: Callable[[str], None] = lambda text: None
    stop: StopSignal = field(default_factory=StopSignal)
    on_progress: Callable[[str, int, int], None] | None = (
        None  # (part of an evaluation, groups done, groups in all)
    )
    ledger: Ledger = field(default_factory=Ledger)
    keep_from: int = 0  # the oldest version that may yet be requested
    timeline: Timeline = field(default_factory=Timeline)
    woken: threading.Event = field(default_factory=threading.Event)
    player: TurnDriver | None = None  # where rollouts have turns

    def __post_init__(self) -> None:
        self._stats, self._read_at = (
            defaultdict[Purpose, RolloutStats](RolloutStats),
            time.monotonic(),
        )
        self._last: tuple[int, Any] | None = (
            None  # the newest publication: its version, and an array of what was given
        )
        restarts = None if self.restart is None else self.restarts
        self.members = {
            name: HostHealth(name, host, restarts, self.stall_seconds)
            for name, host in self.hosts.items()
        }
        self._lost = self._lost_tokens = 0
        # (step, data row) of the newest step's groups -> the host that sampled it, and its losses
        # before
        self._sampled_by: dict[tuple[int, int], tuple[str, int]] = {}
        self._patience = max(LONG_WAIT_SECONDS, 2 * self.stall_seconds)
        self._taking: tuple[Purpose, int] | None = None
        self._failure: BaseException | None = None
        self._closed = False
        self._changed = threading.Condition()  # holds the lock of the ledger
        self._thread = (
            threading.Thread(target=self._run, name="fleet", daemon=True)
            if self.by_itself
            else None
        )
        if self._thread:
            self._thread.start()

    def follow(self, timeline: Timeline) -> None:
        """Writes what hosts and rewards do to a timeline."""
        self.timeline = timeline
        for member in self.members.values():
            member.timeline = timeline

    # -- the RolloutSource

    def request(self, requests: Sequence[GroupRequest]) -> None:
        with self._changed:
            self.ledger.add(requests)
        self.woken.set()

    def publish_frozen(self, params: Params) -> None:
        self.publisher.publish_frozen(params)

    def publish(self, version: int, params: Params, keep_from: int | None = None) -> None:
        with self._changed:
            self.keep_from = version if keep_from is None else keep_from
            # before the new version: on a device that is nearly full both may not fit
            self._release()
        started = time.perf_counter()
        manifest = self.publisher.publish(
            version, params
        )  # without the lock: hosts go on meanwhile
        seconds = time.perf_counter() - started
        given = min(jax.tree.leaves(params), key=lambda leaf: leaf.nbytes)
        with self._changed:
            # An update makes new arrays, so those of the last version are its old weights.
            last, self._last = self._last, (version, given)
            stats = self._stats[Purpose.TRAIN]
            stats.unchanged += last is not None and last[0] != version and last[1] is given
            stats.publish["seconds"] += seconds
            stats.publish["bytes"] += self.publisher.num_bytes
            for member in self.members.values():
                self._give_version(member, manifest)
        self.woken.set()

    def take(self, purpose: Purpose, step: int) -> list[Group]:
        started = time.perf_counter()
        with self._changed:
            wanted = self.ledger.of(purpose, step)
            if not wanted:
                raise ValueError(f"{purpose} at step {step} has requested no groups")
            if missing := [
                one.request.version for one in wanted if not self._is_published(one.request)
            ]:
                # A fault of the schedule: sampling from another version would break the bound on
                # staleness unseen.
                raise RuntimeError(
                    f"version {missing[0]} is requested, but only "
                    f"{sorted(self.publisher.versions)} are "
                    "published"
                )
            self._taking = purpose, step
            try:
                self._wait_until(wanted, {Stage.SAMPLED, Stage.REWARDED})
                sampled = time.perf_counter()
                self._wait_until(wanted, {Stage.REWARDED})
            finally:
                self._taking = None
            stats = self._stats[purpose]
            stats.sample_seconds += sampled - started
            stats.reward_seconds += time.perf_counter() - sampled
            _count(stats, wanted)
            if purpose is Purpose.TRAIN and self.logprob_tolerance:
                self._remember_hosts(step, wanted)
            groups = self.ledger.hand_over(wanted)
            if purpose is Purpose.TRAIN:
                for member in self.members.values():
                    member.count_step()
            self._release()
            return groups

    def _remember_hosts(self, step: int, entries: Sequence[PendingGroup]) -> None:
        """Keeps who sampled a step's groups until the next step's are taken."""
        self._sampled_by = {key: host for key, host in self._sampled_by.items() if key[0] == step}
        for entry in entries:
            if entry.host:
                host = entry.host, self.members[entry.host].all_losses
                self._sampled_by[step, entry.request.example.row] = host

    def check_logprobs(
        self, groups: Sequence[Group], logprobs: Mapping[tuple[int, int], np.ndarray], version: int
    ) -> None:
        if not self.logprob_tolerance:
            return
        differences = defaultdict[tuple[str, int], list[np.ndarray]](list)
        for (number, index), trained in logprobs.items():
            group = groups[number]
            completion = group.completions[index]
            host = self._sampled_by.get((group.step, group.example.row))
            # Of older tokens the difference is the trainer's own progress, too. A NaN is the
            # trainer's own: an answer with one is refused when it comes.
            compared = (
                completion.loss_mask & (completion.versions == version) & np.isfinite(trained)
            )
            if host is not None and compared.any():
                differences[host].append(np.abs(trained - completion.logprobs)[compared])
        with self._changed:
            for (name, losses), values in differences.items():
                member, gap = self.members[name], float(np.concatenate(values).mean())
                was_lost_since = member.host is None or member.all_losses != losses
                if was_lost_since or gap <= self.logprob_tolerance:
                    continue
                self._lose(
                    member,
                    f"the log-probs of its tokens differ from the trainer's by {gap:.3g} in the "
                    f"mean at "
                    f"version {version}, more than {self.logprob_tolerance:.3g}, three times "
                    "vllm.tolerance: its answers are of other weights, prompts or tokens",
                )

    def published_shapes(self) -> Params:
        return self.publisher.published_shapes()

    def is_ready(self, purpose: Purpose, step: int) -> bool:
        with self._changed:
            return (
                not self.by_itself
                or self.shares_memory
                or all(one.stage is Stage.REWARDED for one in self.ledger.of(purpose, step))
            )

    def read_stats(self, purpose: Purpose) -> RolloutStats:
        with self._changed:
            stats = self._stats.pop(purpose, RolloutStats())
            if purpose is Purpose.TRAIN or not self.by_itself:
                self._add_hosts(stats)
            return stats

    def _add_hosts(self, stats: RolloutStats) -> None:
        """What hosts did since this was last asked for; in the caller's thread that was all for one
        purpose."""
        now, before, self._read_at = time.monotonic(), self._read_at, time.monotonic()
        for member in self.members.values():
            self._ask(member, lambda host, member=member: member.look(now))
            stats.active_slots, stats.total_slots = (
                stats.active_slots + member.total.active_slots,
                stats.total_slots + member.total.total_slots,
            )
            stats.host_tokens += member.total.tokens
            stats.preempted += member.total.preempted
            stats.busy_seconds += member.total.busy_seconds / len(self.members)
            stats.publish["pause_seconds"] += member.total.pause_seconds / len(self.members)
            member.total = HostProgress()
        if not self.by_itself:
            # In the caller's thread rewards that are called there, and texts, are part of sampling.
            stats.busy_seconds = stats.sample_seconds
            return
        busy = min(1.0, stats.busy_seconds / max(now - before, 1e-9))
        stats.sampler_idle = 1.0 - busy * (
            stats.active_slots / stats.total_slots if stats.total_slots else 1.0
        )
        stats.queue = {name: self.ledger.count(*stages) for name, stages in QUEUES.items()}
        members = self.members.values()
        stats.fleet = {
            "hosts": sum(one.host is not None for one in members),
            "lost": self._lost,
            "tokens_lost": self._lost_tokens,
            "asked_again": self.ledger.asked_again,
            "duplicates": self.ledger.duplicates,
            "refused": sum(one.refused or one.progress.differs for one in members),
        }
        self._lost = self._lost_tokens = self.ledger.asked_again = self.ledger.duplicates = 0

    def published(self) -> Mapping[int, Params]:
        with self._changed:
            return {
                number: one.parameters(self.publisher.model)
                for number, one in self.publisher.versions.items()
            }

    def close(self) -> None:
        self._closed = True
        self.woken.set()
        if self._thread:
            self._thread.join(END_SECONDS)  # a function of a user's may hang there
        for member in self.members.values():
            if member.host is not None:
                with contextlib.suppress(HostLost):
                    member.host.close()
        self.publisher.close()
        self.rewards.pool.close()
        if self.player is not None:
            self.player.sessions.close()

    # -- waiting

    def _wait_until(self, entries: Sequence[PendingGroup], stages: set[Stage]) -> None:
        began = time.time()
        while not all(one.stage in stages for one in entries):
            self.stop.check()
            if self._failure is not None:
                raise self._failure
            if self._thread:
                self._say_waiting(entries, began)
                with self.stop.raising_at_once():
                    self._changed.wait(WAIT_SECONDS)
            else:
                # Once all is sampled there is nothing to do but to wait for rewards, which may
                # hang.
                self._turn(
                    self.stop.raising_at_once,
                    wait=all(
                        one.stage is not Stage.RUNNING and one.stage is not Stage.WAITING
                        for one in entries
                    ),
                )

    def _say_waiting(self, entries: Sequence[PendingGroup], began: float) -> None:
        """Says what is waited for, once that takes long, and then where it takes twice as long as
        was said before."""
        if (seconds := time.time() - began) < self._patience:
            return
        self._patience *= 2
        request, versions = (
            entries[0].request,
            {name: one.progress.version for name, one in self.members.items()},
        )
        weights = {
            name: f"weights {version_text(version)}" if version >= 0 else "no weights yet"
            for name, version in versions.items()
        }
        hosts = {name: f"{name} ({text})" for name, text in weights.items()}
        what = (
            f"the groups of step {request.step + 1}"
            if request.purpose is Purpose.TRAIN
            else f"the evaluation {version_text(request.version)}"
        )
        self.on_note(
            f"waiting for {what} since {time.strftime('%H:%M:%S', time.localtime(began))}, "
            f"{seconds:.0f} s: "
            f"{whereabouts(entries, hosts)}"
        )

    def _run(self) -> None:
        """The fleet's thread."""
        while not self._closed:
            self.woken.clear()
            try:
                self._turn()
            except (
                BaseException
            ) as error:  # raised by `take`: whoever waits for these groups must learn of it
                with self._changed:
                    self._failure = error
                    self._changed.notify_all()
                return
            with self._changed:
                awaits = self.ledger.count(Stage.RUNNING, Stage.SAMPLED) > 0
            self.woken.wait(POLL_SECONDS if awaits else WAIT_SECONDS)

    def _turn(
        self,
        guard: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
        wait: bool = False,
    ) -> None:
        """Gives groups to hosts, gathers their answers, has them rewarded. `guard` is around what
        may hang.

        The lock is not held where functions of a user's may be called: a caller who gives up must
        not wait for them."""
        with self._changed:
            now, ready = time.monotonic(), self._play(guard)
            for member in self.members.values():
                self._tend(member, now)
            self._assign()
            for member in list(self.members.values()):
                if self.by_itself or member.given:
                    for id, completions in (
                        self._ask(member, lambda host: host.poll()) or {}
                    ).items():
                        if member.host is not None:  # else an answer before this one was wrong
                            ready.append(self._enter(member, id, completions))
        for entry in [one for one in ready if one is not None]:
            with guard(), self.timeline.span("rewards", "submit"):
                self.rewards.submit(entry)
        with guard(), self.timeline.span("rewards", "collect"):
            found = self.rewards.pool.collect(wait=wait)
        with self._changed:
            self.rewards.enter(found, self.ledger)
            self._changed.notify_all()

    # -- what is done with the ledger's lock held

    def _play(
        self, guard: Callable[[], contextlib.AbstractContextManager[None]]
    ) -> list[PendingGroup | None]:
        """Has rollouts go on whose tools have answered; the groups that can be rewarded now."""
        if self.player is None:
            return []
        # In the caller's thread nothing else is to be done while every rollout waits for its tools.
        with guard():
            moves = self.player.collect(
                0.0 if self.by_itself or not self.player.waits else POLL_SECONDS
            )
        self._move(moves)
        running = self.ledger.at(Stage.RUNNING)
        acting = Counter[str]()
        for entry in running:
            acting[entry.host] += entry.num_idle
        for name, member in self.members.items():
            member.acting = acting[name]
        return [self._settle(one) for one in running]

    def _move(self, moves: Sequence[HostCommand]) -> None:
        for move in moves:
            entry, member = move.entry, self.members[move.entry.host]
            if move.prompt_ids is not None:
                asked = sample_request(entry.request, entry.id, self.seed)
                request = branch_request(
                    asked,
                    self.ledger.add_part(entry),
                    move.index,
                    move.prompt_ids,
                    move.branch,
                    move.used,
                    move.turn_limit,
                )
                self._ask(member, lambda host, request=request: host.submit([request]))
            elif move.context is not None:
                self._ask(
                    member,
                    lambda host, move=move, context=move.context: host.extend(
                        move.request, move.index, context, move.turn_limit
                    ),
                )
            else:
                self._ask(member, lambda host, move=move: host.end(move.request, move.index))

    def _settle(self, entry: PendingGroup) -> PendingGroup | None:
        """Enters a group all of whose rollouts are over."""
        assert self.player is not None
        if (completions := self.player.done(entry)) is None:
            return None
        member = self.members[entry.host]
        member.given.pop(entry.id, None)
        return self._answer(member, entry.id, completions)

    def _enter(
        self, member: HostHealth, id: int, completions: Sequence[Completion]
    ) -> PendingGroup | None:
        """Enters a host's answer; the group that can be rewarded now, if there is one. A host whose
        answer is wrong is lost, with all that it has."""
        id = self.ledger.parts.get(id, id)
        entry = self.ledger.entries.get(id)
        if self.player is None:
            member.given.pop(id, None)
        elif entry is None or id not in member.given:
            return None
        if entry is not None:
            # While a version is copied, the one that hosts sample from may be released already.
            newest = max([self._last[0] if self._last else -1, *self.publisher.versions])
            request = replace(
                sample_request(entry.request, id, self.seed), has_turns=self.player is not None
            )
            # This process's own engine is right about the rest; weights that are not finite are the
            # trainer's to see.
            reason = (
                wrong_versions(request, completions, newest)
                if member.restarts is None
                else wrong_answer(
                    request, completions, self.publisher.model.architecture.vocab_size, newest
                )
            )
            if self.player is not None and member.restarts is not None:
                reason = reason or self.player.wrong_turns(entry, completions)
            if reason:
                self._lose(member, f"it answered with {reason}")
                return None
            if self.player is not None:
                for one in completions:
                    if (
                        entry.rollouts
                    ):  # else the host was lost by what was asked of it for the one before
                        self._move(self.player.take(entry, one))
                return self._settle(entry)
        return self._answer(member, id, completions)

    def _answer(
        self, member: HostHealth, id: int, completions: Sequence[Completion]
    ) -> PendingGroup | None:
        """Enters all completions of a group."""
        if (entry := self.ledger.answer(id, completions)) is None:
            return None
        member.answers(sum(one.num_sampled for one in completions))
        self._show_progress(entry)
        return entry

    def _assign(self) -> None:
        """Gives what waits to hosts with room, each to the one that should end it first: training's
        groups, the oldest first, then an evaluation's, which have a share of their own."""
        batches: dict[str, list[PendingGroup]] = {}
        waiting = [one for one in self.ledger.at(Stage.WAITING) if self._may_start(one)]
        if self.player is not None:
            self.player.open(waiting)
            waiting = [one for one in waiting if self.player.is_ready(one)]
        purposes = {
            one.request.purpose is Purpose.TRAIN
            for one in self.ledger.entries.values()
            if one.stage in (Stage.WAITING, Stage.RUNNING)
        }
        seconds = {name: member.step_seconds() for name, member in self.members.items()}
        fastest = min((one for one in seconds.values() if one), default=1.0)
        for is_training in (True, False) if waiting else ():
            given = {name: member.completions(*Purpose) for name, member in self.members.items()}
            for entry in waiting:
                request, size = entry.request, entry.request.num_completions
                if (request.purpose is Purpose.TRAIN) != is_training:
                    continue
                # By room alone one host of four that is ten times slower made every step 4 to 6
                # times as long.
                name = min(
                    (
                        name
                        for name, member in self.members.items()
                        if member.may_start(request)
                        and member.has_room(size, is_training, len(purposes) > 1)
                    ),
                    default="",
                    key=lambda name: (given[name] + size) * (seconds[name] or fastest),
                )
                if not name:
                    break
                self.ledger.start(entry, name)
                self.members[name].given[entry.id] = request
                given[name] += size
                batches.setdefault(name, []).append(entry)
        for name, entries in batches.items():
            requests = [
                request
                for one in entries
                for request in (
                    [sample_request(one.request, one.id, self.seed)]
                    if self.player is None
                    else self.player.requests(one, self.ledger, self.seed)
                )
            ]
            self._ask(self.members[name], lambda host, requests=requests: host.submit(requests))

    # -- hosts that come and go

    def _tend(self, member: HostHealth, now: float) -> None:
        """Looks whether a host makes progress, and makes a lost one anew when its time has come."""
        if member.host is not None:
            self._ask(member, lambda host: member.look(now))
            if member.restarts is not None and (idle := member.stalled_seconds(now)):
                self._lose(member, f"it has made no progress for {idle:.0f} s")
        elif self.restart is not None and not member.is_gone and now >= member.retry_at:
            try:
                member.begin(self.restart(member.name), now)
                member.look(now)
            except (HostLost, ShoalError) as error:
                self._lose(member, error)
                return
            for version in sorted(self.publisher.versions):
                self._give_version(member, self.publisher.versions[version])

    def _give_version(self, member: HostHealth, manifest: Manifest) -> None:
        self._ask(member, lambda host: host.load(manifest))
        if member.host is not None:
            member.versions.add(manifest.version)

    def _ask(self, member: HostHealth, call: Callable[[Host], Answer]) -> Answer | None:
        """What a host answers to a call; None where it is lost."""
        if member.host is None:
            return None
        try:
            return call(member.host)
        except HostLost as reason:
            self._lose(member, reason)
            return None

    def _lose(self, member: HostHealth, reason: str | Exception) -> None:
        """A host is taken out, and its groups wait again; with the last one gone, `take` raises."""
        refused = isinstance(reason, HostRefused)
        text = f"sampler host {member.name} is {'refused' if refused else 'lost'}: {reason}"
        if member.restarts is None:
            raise RuntimeError(text)
        if member.host is not None:
            with contextlib.suppress(HostLost):
                member.look(time.monotonic())  # at what it told last
            with contextlib.suppress(HostLost):
                member.host.close()
        if self.player is not None:
            self.player.forget(
                [one for one in self.ledger.at(Stage.RUNNING) if one.host == member.name]
            )
        self._lost_tokens += member.lose(time.monotonic(), refused)
        asked = self.ledger.lose(member.name)
        self._lost += not refused
        self.on_note(
            f"{text}; {count(asked, 'group')} asked again"
            + (
                ", its last restart is used up (sampler.restarts)"
                if member.is_gone and not refused
                else ""
            )
        )
        if all(one.is_gone for one in self.members.values()):
            raise ShoalError(
                f"no sampler host is left: {text}; see what ended them, then resume the run"
            )

    def _may_start(self, entry: PendingGroup) -> bool:
        """True if a host has the weights, and, in the caller's thread, its step is being taken."""
        request = entry.request
        return (self.by_itself or (request.purpose, request.step) == self._taking) and any(
            member.may_start(request) for member in self.members.values()
        )

    def _is_published(self, request: GroupRequest) -> bool:
        versions = self.publisher.versions
        return (
            request.version in versions
            if request.exact
            else max(versions, default=-1) >= request.version
        )

    def _show_progress(self, entry: PendingGroup) -> None:
        request = entry.request
        if self.on_progress and request.purpose is Purpose.EVALUATE:
            kind = "greedy" if request.params.temperature == 0 else "sampled"
            batch = [
                one
                for one in self.ledger.of(request.purpose, request.step)
                if (one.request.subset, one.request.params) == (request.subset, request.params)
            ]
            done = sum(one.stage in (Stage.SAMPLED, Stage.REWARDED) for one in batch)
            self.on_progress(f"{request.subset}, {kind}", done, len(batch))

    def _release(self) -> None:
        """Drops weights that no pending request names and no later one may name."""
        needed = {one.request.version for one in self.ledger.entries.values() if one.request.exact}
        self.publisher.release(lambda version: version in needed or version >= self.keep_from)
        for member in self.members.values():
            member.versions &= set(self.publisher.versions)


def _count(stats: RolloutStats, entries: Sequence[PendingGroup]) -> None:
    for one in entries:
        stats.tokens += sum(completion.num_sampled for completion in one.completions)
        if one.scores is not None:
            stats.failures.extend(one.scores.failures)
            for name, values in one.scores.metrics.items():
                stats.logged.setdefault(name, []).extend(values)
