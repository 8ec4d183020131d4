"""Fleet of hosts, the `RolloutSource` of a process: requests groups from hosts, has them rewarded,
and returns them in the order of the requests.

    request -> ledger -> a host with room -> completions -> rewards -> ledger -> take

If the host runs in the caller's thread, all of this happens inside `take`. If hosts run by
themselves, a thread of the fleet does it while the caller trains. Only one thread at a time uses
the ledger."""

from __future__ import annotations

import contextlib
import operator
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import numpy as np

from shoal.protocols import (
    GroupRequest,
    Host,
    HostProgress,
    Load,
    Message,
    RolloutStats,
    SampleRequest,
    Submit,
    Version,
)
from shoal.records import Completion, Group, HostLost, HostRefused, Params, Purpose, ShoalError
from shoal.report.timeline import Timeline
from shoal.rollout.host_health import HostHealth, versions_fault, wrong_answer
from shoal.rollout.ledger import (
    UNSAMPLED,
    GroupRewards,
    GroupState,
    Ledger,
    PendingGroup,
    describe_states,
    sample_request,
)
from shoal.rollout.turn_driver import GroupMessage, TurnDriver
from shoal.runs.summary import version_text
from shoal.stop import StopSignal
from shoal.text import count
from shoal.weights.store import WeightStore

POLL_SECONDS = 0.01
"""How often the fleet's thread looks for answers and rewards while it expects some."""
WAIT_SECONDS = 0.5
"""Longest time that a wait lasts before it looks again even if nothing has woken it."""
LONG_WAIT_SECONDS = 60.0
"""How long `take` waits silently before it prints what it waits for."""
END_SECONDS = 5.0
"""How long `close` waits for the fleet's thread to end."""

Guard = Callable[[], contextlib.AbstractContextManager[None]]
"""Returns a context in which a user's code may be called, such as `StopSignal.raising_at_once`."""

QUEUES = {
    "waiting": (GroupState.WAITING,),
    "running": (GroupState.RUNNING,),
    "sampled": (GroupState.SAMPLED, GroupState.REWARDED),
}
"""Name of the metric -> the states whose groups it counts."""


@dataclass
class Fleet:
    """Makes groups for any purpose with any number of hosts.

    A step trains on the groups that it requested, not on the groups that finish first: a resumed
    run requests them again, and gets the same. `in_background`: True if the hosts sample whenever
    they have requests; False if they sample only while their groups are taken, through `poll` in
    the caller's thread.

    The fleet owns its hosts and the store of weights, and closes them. It only uses the reward pool
    in `rewards` and the sessions in `turn_driver`, which a `Job` owns."""

    store: WeightStore
    # The hosts at first; `members` has the present ones.
    hosts: Mapping[str, Host]
    rewards: GroupRewards
    seed: int
    in_background: bool = False
    # Of hosts in the background: True if they sleep while the caller trains on the same devices, so
    # that they sample only while it waits; False without background.
    shares_memory: bool = False
    # makes a new host to replace the lost one of that name; None if hosts live in this process
    restart: Callable[[str], Host] | None = None
    restarts: int = 3  # how often each host may be restarted
    # longest time without progress after which a host counts as lost; 0: chosen automatically
    stall_seconds: float = 0.0
    # a host counts as lost if its log-probs differ from the trainer's by more than this in the
    # mean; 0: no check
    logprob_tolerance: float = 0.0
    on_note: Callable[[str], None] = lambda text: None
    stop: StopSignal = field(default_factory=StopSignal)
    # called while an evaluation is sampled with (its questions, as "held_out, greedy"; groups that
    # are sampled; groups in all)
    on_progress: Callable[[str, int, int], None] | None = None
    ledger: Ledger = field(default_factory=Ledger)
    keep_from: int = 0  # the oldest version that may still be requested
    timeline: Timeline = field(default_factory=Timeline)
    woken: threading.Event = field(default_factory=threading.Event)
    turn_driver: TurnDriver | None = None  # None if completions are single-turn

    def __post_init__(self) -> None:
        """Makes a `HostHealth` for each host, sets the ledger and seed of `turn_driver`, and starts
        the fleet's thread if `in_background`."""
        self._stats = defaultdict[Purpose, RolloutStats](RolloutStats)
        self._read_at = time.monotonic()
        # the newest publication: its version, and the smallest of its arrays, whose identity shows
        # whether the next publication has other weights
        self._last_published: tuple[int, Any] | None = None
        if self.turn_driver is not None:
            self.turn_driver.ledger = self.ledger
            self.turn_driver.seed = self.seed
        restarts = None if self.restart is None else self.restarts
        # name of a host -> what the fleet knows of it, also while it is lost
        self.members = {
            name: HostHealth(name, host, restarts, self.stall_seconds)
            for name, host in self.hosts.items()
        }
        self._lost = 0
        self._lost_tokens = 0
        # (step, data row) of a group of the newest step -> the host that sampled it, and how often
        # that host had been lost by then
        self._sampled_by: dict[tuple[int, int], tuple[str, int]] = {}
        # Doubled at each notice and never lowered: a run whose steps are all long would otherwise
        # print one at each step.
        self._patience = max(LONG_WAIT_SECONDS, 2 * self.stall_seconds)
        self._taking: tuple[Purpose, int] | None = None
        self._failure: BaseException | None = None
        self._closed = False
        # Guards the ledger; notified after each round of work, and when the thread fails.
        # Reentrant, because `take` holds it during `_run_round` if the fleet has no thread.
        self._ledger_lock = threading.Condition()
        self._thread: threading.Thread | None = None
        if self.in_background:
            self._thread = threading.Thread(target=self._run_rounds, name="fleet", daemon=True)
            self._thread.start()

    def follow(self, timeline: Timeline) -> None:
        """Sets the timeline to which the work of hosts and rewards is written from now on. The
        timeline before is not closed."""
        self.timeline = timeline
        for member in self.members.values():
            member.timeline = timeline

    # -- the RolloutSource

    def request(self, requests: Sequence[GroupRequest]) -> None:
        """Queues groups; hosts get them as soon as they have room, and once `take` waits for them
        if hosts run in the caller's thread. Returns at once."""
        with self._ledger_lock:
            self.ledger.add(requests)
        self.woken.set()

    def publish_frozen(self, params: Params) -> None:
        """Stores the weights that are the same in every version."""
        self.store.put_frozen(params)

    def publish(self, version: int, params: Params, keep_from: int | None = None) -> None:
        """Stores weights as `version` and announces it to all hosts. Before that, releases the
        stored versions older than `keep_from` (None: older than `version`) that no pending request
        names as `exact`. Waits until the weights are stored, not until hosts have read them."""
        with self._ledger_lock:
            self.keep_from = version if keep_from is None else keep_from
            # Release old versions before storing the new one: a device that is nearly full may not
            # hold both.
            self._drop_unneeded_versions()
        started = time.perf_counter()
        # Store without the lock, so that hosts go on meanwhile.
        stored_version = self.store.put(version, params)
        seconds = time.perf_counter() - started
        smallest_array = min(jax.tree.leaves(params), key=operator.attrgetter("nbytes"))
        with self._ledger_lock:
            last = self._last_published
            self._last_published = (version, smallest_array)
            stats = self._stats[Purpose.TRAIN]
            # An update makes new arrays; if the array is the same object, the weights did not
            # change.
            if last is not None and last[0] != version and last[1] is smallest_array:
                stats.unchanged += 1
            stats.publish["seconds"] += seconds
            stats.publish["bytes"] += self.store.num_bytes
            for member in self.members.values():
                self._give_version(member, stored_version)
        self.woken.set()

    def take(self, purpose: Purpose, step: int) -> list[Group]:
        """Waits until the groups of a step are sampled and rewarded, then returns them in the order
        of the requests and forgets them. ValueError if the step has requested none; RuntimeError if
        it requested a version that is not published; ShoalError if no host is left; StopRequested
        if the run is to stop; any error that ended the fleet's thread or, without a thread, that
        its work raises here."""
        started = time.perf_counter()
        with self._ledger_lock:
            entries = self.ledger.entries_of(purpose, step)
            if not entries:
                raise ValueError(f"{purpose} at step {step} has requested no groups")
            for entry in entries:
                if not self._is_published(entry.request):
                    # An error in the program's schedule: sampling from another version would break
                    # the bound on staleness unnoticed.
                    raise RuntimeError(
                        f"version {entry.request.version} is requested, but only "
                        f"{sorted(self.store.versions)} are published"
                    )
            self._taking = purpose, step
            try:
                self._wait_until(entries, {GroupState.SAMPLED, GroupState.REWARDED})
                sampled = time.perf_counter()
                self._wait_until(entries, {GroupState.REWARDED})
            finally:
                self._taking = None
            stats = self._stats[purpose]
            stats.sample_seconds += sampled - started
            stats.reward_seconds += time.perf_counter() - sampled
            _count_groups(stats, entries)
            if purpose is Purpose.TRAIN and self.logprob_tolerance:
                self._remember_hosts(step, entries)
            groups = self.ledger.hand_over(entries)
            if purpose is Purpose.TRAIN:
                for member in self.members.values():
                    member.count_step()
            self._drop_unneeded_versions()
            return groups

    def _remember_hosts(self, step: int, entries: Sequence[PendingGroup]) -> None:
        """Notes which host sampled each group of a step, and how often that host has been lost so
        far, for `check_logprobs`; forgets the groups of earlier steps."""
        self._sampled_by = {key: host for key, host in self._sampled_by.items() if key[0] == step}
        for entry in entries:
            if entry.host:
                losses = self.members[entry.host].all_losses
                self._sampled_by[step, entry.request.example.row] = (entry.host, losses)

    def check_logprobs(
        self, groups: Sequence[Group], logprobs: Mapping[tuple[int, int], np.ndarray], version: int
    ) -> None:
        """Gives up each host that sampled groups of this step with log-probs that differ from the
        trainer's by more than `logprob_tolerance` in the mean over these tokens, as if it were
        lost: it is closed, and restarted if it may be; does nothing if `logprob_tolerance` is 0.
        Only tokens of `version` are compared.

        `logprobs`: by (number of the group in `groups`, index of the completion), the trainer's
        log-probs, float32[T]. A host that was lost since it sampled them is not blamed again."""
        if not self.logprob_tolerance:
            return
        differences = defaultdict[tuple[str, int], list[np.ndarray]](list)
        for (number, index), trained in logprobs.items():
            group = groups[number]
            completion = group.completions[index]
            host = self._sampled_by.get((group.step, group.example.row))
            # Compare only tokens of this version, because for older ones the difference includes
            # the progress of training. Skip NaN: the trainer made it, since an answer of a host
            # that contains one is rejected on arrival.
            compared = (
                completion.loss_mask & (completion.versions == version) & np.isfinite(trained)
            )
            if host is not None and compared.any():
                differences[host].append(np.abs(trained - completion.logprobs)[compared])
        with self._ledger_lock:
            for (name, losses), values in differences.items():
                member = self.members[name]
                gap = float(np.concatenate(values).mean())
                # a restarted host is another one: it did not sample these tokens
                was_lost_since = member.host is None or member.all_losses != losses
                if was_lost_since or gap <= self.logprob_tolerance:
                    continue
                self._mark_lost(
                    member,
                    f"the log-probs of its tokens differ from the trainer's by {gap:.3g} in the "
                    f"mean at version {version}, more than {self.logprob_tolerance:.3g}, three "
                    "times vllm.tolerance: its answers come from other weights, prompts or tokens",
                )

    def published_shapes(self) -> Params:
        return self.store.published_shapes()

    def is_busy_with(self, purpose: Purpose, step: int) -> bool:
        """True while a step's groups are sampled or scored in the background, so that the caller
        may do other work before it calls `take`. False once they are complete, if the step has
        requested nothing, and always if the hosts sample only while the caller waits in `take`."""
        with self._ledger_lock:
            if not self.in_background or self.shares_memory:
                return False
            entries = self.ledger.entries_of(purpose, step)
            return any(entry.state is not GroupState.REWARDED for entry in entries)

    def read_stats(self, purpose: Purpose) -> RolloutStats:
        """Returns the figures of one purpose since the last call, and resets them. What the hosts
        did is part of training's figures; if hosts run in the caller's thread, also of an
        evaluation's."""
        with self._ledger_lock:
            stats = self._stats.pop(purpose, RolloutStats())
            if purpose is Purpose.TRAIN or not self.in_background:
                self._add_host_figures(stats)
            return stats

    def _add_host_figures(self, stats: RolloutStats) -> None:
        """Adds to `stats` what the hosts did since the last call, and resets those figures. If the
        hosts run in the caller's thread, all of that was for the purpose of `stats`, and only
        counters and seconds are added. Else also idle time, queue, and the figures `fleet`."""
        now = time.monotonic()
        elapsed = now - self._read_at
        self._read_at = now
        for member in self.members.values():
            self._refresh_progress(member, now)
            stats.counters.update(member.total.counters)
            stats.busy_seconds += member.total.busy_seconds / len(self.members)
            stats.publish["pause_seconds"] += member.total.pause_seconds / len(self.members)
            member.total = HostProgress()
        if not self.in_background:
            # In the caller's thread, decoding texts and calling rewards in this process count as
            # sampling.
            stats.busy_seconds = stats.sample_seconds
            return
        busy_share = min(1.0, stats.busy_seconds / max(elapsed, 1e-9))
        active_share = 1.0
        if stats.counters["total_slots"]:
            active_share = stats.counters["active_slots"] / stats.counters["total_slots"]
        stats.sampler_idle = 1.0 - busy_share * active_share
        stats.queue = {name: self.ledger.count(*states) for name, states in QUEUES.items()}
        members = self.members.values()
        stats.fleet = {
            "hosts": sum(member.host is not None for member in members),
            "lost": self._lost,
            "tokens_lost": self._lost_tokens,
            "asked_again": self.ledger.asked_again,
            "duplicates": self.ledger.duplicates,
            "refused": sum(member.refused or member.progress.differs for member in members),
        }
        self._lost = 0
        self._lost_tokens = 0
        self.ledger.asked_again = 0
        self.ledger.duplicates = 0

    def published(self) -> Mapping[int, Params]:
        """Returns the weights that are still stored, by version: reads each from the store."""
        with self._ledger_lock:
            published: dict[int, Params] = {}
            for number, version in self.store.versions.items():
                published[number] = version.parameters(self.store.model)
            return published

    def close(self) -> None:
        """Ends the fleet's thread and the hosts, and releases the weights. Waits at most
        END_SECONDS for the thread, and goes on if it has not ended by then. The reward pool and the
        sessions of tools stay open: their maker closes them, after the fleet."""
        self._closed = True
        self.woken.set()
        if self._thread:
            # limited, because a user's function may hang in that thread
            self._thread.join(END_SECONDS)
        for member in self.members.values():
            if member.host is not None:
                with contextlib.suppress(HostLost):
                    member.host.close()
        self.store.close()

    # -- waiting

    def _wait_until(self, entries: Sequence[PendingGroup], states: set[GroupState]) -> None:
        """Waits until all `entries` have one of the `states`; called with the lock held. If the
        fleet has no thread of its own, runs its rounds meanwhile. Raises the error that ended the
        fleet's thread or, without a thread, of a round, and StopRequested if the run is to stop."""
        began = time.time()
        while not all(entry.state in states for entry in entries):
            self.stop.check()
            if self._failure is not None:
                raise self._failure
            if self._thread:
                self._report_long_wait(entries, began)
                with self.stop.raising_at_once():
                    self._ledger_lock.wait(WAIT_SECONDS)
            else:
                # Once all is sampled, only rewards are waited for, and those may hang.
                all_sampled = all(entry.state not in UNSAMPLED for entry in entries)
                self._run_round(self.stop.raising_at_once, wait=all_sampled)

    def _report_long_wait(self, entries: Sequence[PendingGroup], began: float) -> None:
        """Reports to `on_note` what `take` waits for, once the wait is long; then again whenever it
        has become twice as long as at the last report. `entries`: the groups that `take` waits for.
        `began`: the time when the wait began, from `time.time`."""
        seconds = time.time() - began
        if seconds < self._patience:
            return
        self._patience *= 2
        host_texts: dict[str, str] = {}
        for name, member in self.members.items():
            weights = "no weights yet"
            if member.progress.version >= 0:
                weights = f"weights {version_text(member.progress.version)}"
            host_texts[name] = f"{name} ({weights})"
        request = entries[0].request
        if request.purpose is Purpose.TRAIN:
            # people count steps from 1
            what = f"the groups of step {request.step + 1}"
        else:
            what = f"the evaluation {version_text(request.version)}"
        since = time.strftime("%H:%M:%S", time.localtime(began))
        states = describe_states(entries, host_texts)
        self.on_note(f"waiting for {what} since {since}, {seconds:.0f} s: {states}")

    def _run_rounds(self) -> None:
        """Runs in the fleet's thread: repeats `_run_round` until the fleet is closed. An error is
        stored for `take` to raise."""
        while not self._closed:
            self.woken.clear()
            try:
                self._run_round()
            except BaseException as error:
                # `take` raises it, so that whoever waits for these groups learns of it
                with self._ledger_lock:
                    self._failure = error
                    self._ledger_lock.notify_all()
                return
            with self._ledger_lock:
                expects_answers = self.ledger.count(GroupState.RUNNING, GroupState.SAMPLED) > 0
            self.woken.wait(POLL_SECONDS if expects_answers else WAIT_SECONDS)

    def _run_round(
        self,
        guard_user_code: Guard = contextlib.nullcontext,
        wait: bool = False,
    ) -> None:
        """Does one round of work: continues rollouts with turns, checks the hosts, gives waiting
        groups to them, collects their answers (a host in this thread samples one compiled step),
        submits sampled groups to the rewards, and enters the rewards that have come.
        `guard_user_code` is called each time, and returns a context that surrounds calls that may
        hang in a user's code. `wait`: wait for a reward, if any is queued.

        The lock is held for all but scoring. In the fleet's own thread it is free while reward
        functions are called, so that a caller of `take` who gives up need not wait for them; only a
        task's `correct` function is called with the lock held. In the caller's thread `take` holds
        the lock all the time, also while reward functions are called; nobody else uses the fleet
        then."""
        with self._ledger_lock:
            now = time.monotonic()
            ready = self._advance_turns(guard_user_code)
            for member in self.members.values():
                self._check_health(member, now)
            self._assign()
            for member in list(self.members.values()):
                # A host in this thread samples inside of `poll`, and this one has no groups.
                if not self.in_background and not member.assigned:
                    continue
                answers = self._poll(member)
                for id, completions in answers.items():
                    # lost, because an earlier answer of this round was wrong
                    if member.host is None:
                        break
                    entry = self._accept_answer(member, id, completions)
                    if entry is not None:
                        ready.append(entry)
        for entry in ready:
            with guard_user_code(), self.timeline.span("rewards", "submit"):
                self.rewards.submit(entry)
        with guard_user_code(), self.timeline.span("rewards", "collect"):
            scores = self.rewards.pool.collect(wait=wait)
        with self._ledger_lock:
            self.rewards.enter(scores, self.ledger)
            self._ledger_lock.notify_all()

    # -- what is done with the ledger's lock held

    def _advance_turns(self, guard_user_code: Guard) -> list[PendingGroup]:
        """Continues rollouts whose tools or environments have answered, and notes for each host how
        many of its completions wait for tools. Returns the groups whose rollouts are all over by
        that, to be rewarded; [] if completions are single-turn."""
        if self.turn_driver is None:
            return []
        with guard_user_code():
            seconds = 0.0
            if not self.in_background and self.turn_driver.waits:
                # In the caller's thread there is nothing else to do meanwhile, so wait for a reply.
                seconds = POLL_SECONDS
            messages = self.turn_driver.collect(seconds)
        self._send_all(messages)
        running = self.ledger.in_state(GroupState.RUNNING)
        waiting_for_tools = Counter[str]()
        for entry in running:
            waiting_for_tools[entry.host] += entry.num_idle
        for name, member in self.members.items():
            member.waiting_for_tools = waiting_for_tools[name]
        ready: list[PendingGroup] = []
        for entry in running:
            sampled = self._finish_if_sampled(entry)
            if sampled is not None:
                ready.append(sampled)
        return ready

    def _send_all(self, messages: Sequence[GroupMessage]) -> None:
        """Sends each message to the host that has its group."""
        for entry, message in messages:
            self._send(self.members[entry.host], message)

    def _finish_if_sampled(self, entry: PendingGroup) -> PendingGroup | None:
        """If all rollouts of a group are over, takes the group from its host, enters its
        completions in the ledger and returns its entry; else returns None. None too if the group
        had been answered before."""
        assert self.turn_driver is not None
        completions = self.turn_driver.finished_completions(entry)
        if completions is None:
            return None
        member = self.members[entry.host]
        member.assigned.pop(entry.id, None)
        return self._record_answer(member, entry.id, completions)

    def _accept_answer(
        self, member: HostHealth, id: int, completions: Sequence[Completion]
    ) -> PendingGroup | None:
        """Checks a host's answer to request `id`. Enters it in the ledger, or with turns passes it
        to the turn driver. Returns the group's entry if the group is complete and can be rewarded
        now, else None. If the answer is wrong, the host counts as lost, and all its groups wait
        again. An answer to a group that had been answered before counts as a duplicate, or with
        turns is ignored; so is, with turns, one to a group that the host no longer has."""
        # a group's further requests have ids of their own
        id = self.ledger.group_ids.get(id, id)
        entry = self.ledger.entries.get(id)
        if self.turn_driver is None:
            member.assigned.pop(id, None)
        elif entry is None or id not in member.assigned:
            return None
        if entry is None:
            return self._record_answer(member, id, completions)
        newest = max(self.store.versions, default=-1)
        if self._last_published is not None:
            # While a version is being copied, the version that hosts sample from may be released
            # already.
            newest = max(newest, self._last_published[0])
        request = sample_request(entry.request, id, self.seed)
        request = replace(request, has_turns=self.turn_driver is not None)
        if member.in_process:
            # The engine of this process is trusted about the rest; weights that are not finite are
            # detected by the trainer.
            reason = versions_fault(request, completions, newest)
        else:
            vocab_size = self.store.model.architecture.vocab_size
            reason = wrong_answer(request, completions, vocab_size, newest)
            if not reason and self.turn_driver is not None:
                reason = self.turn_driver.wrong_turns(entry, completions)
        if reason:
            self._mark_lost(member, f"it answered with {reason}")
            return None
        if self.turn_driver is None:
            return self._record_answer(member, id, completions)
        for completion in completions:
            # Sending a message for the previous completion may have shown that the host is lost.
            if entry.rollouts:
                self._send_all(self.turn_driver.read_turn(entry, completion))
        return self._finish_if_sampled(entry)

    def _record_answer(
        self, member: HostHealth, id: int, completions: Sequence[Completion]
    ) -> PendingGroup | None:
        """Enters all completions of a group in the ledger, counts their sampled tokens for the
        host, and reports an evaluation's progress. Returns the group's entry, or None if it had
        been answered before."""
        entry = self.ledger.answer(id, completions)
        if entry is None:
            return None
        member.count_answered(sum(completion.num_sampled for completion in completions))
        self._show_progress(entry)
        return entry

    def _assign(self) -> None:
        """Gives waiting groups to hosts with room, each group to the host that is expected to
        finish it first, and sends the requests. Groups without room keep waiting, and so do all
        later groups of the same purpose. Training's groups come first, in order; then those of an
        evaluation, for which each host reserves a share. With turns, also opens the environments of
        waiting groups; a group is given to a host once all of its environments have begun."""
        waiting = [
            entry for entry in self.ledger.in_state(GroupState.WAITING) if self._can_start(entry)
        ]
        if self.turn_driver is not None:
            self.turn_driver.open(waiting)
            waiting = [entry for entry in waiting if self.turn_driver.is_ready(entry)]
        if not waiting:
            return
        purposes = {
            entry.request.purpose
            for entry in self.ledger.entries.values()
            if entry.state in UNSAMPLED
        }
        # Groups of training and others both need a host, so they share each host.
        is_shared = Purpose.TRAIN in purposes and len(purposes) > 1
        step_seconds = {name: member.step_seconds() for name, member in self.members.items()}
        # 0 is a host whose speed is not known yet. If none is known, any number does: only
        # completions count then.
        fastest = min(filter(None, step_seconds.values()), default=1.0)
        batches: dict[str, list[PendingGroup]] = {}
        for is_training in (True, False):
            num_running = {name: member.num_completions() for name, member in self.members.items()}
            for entry in waiting:
                request = entry.request
                size = request.num_completions
                if (request.purpose is Purpose.TRAIN) != is_training:
                    continue
                # When only free room decided, one host of four that was ten times slower made every
                # step 4 to 6 times as long.
                expected_seconds: dict[str, float] = {}
                for name, member in self.members.items():
                    if not member.may_start(request):
                        continue
                    if not member.has_room(size, is_training, is_shared):
                        continue
                    # an unknown host counts as fast as the fastest, so that it is tried
                    seconds = step_seconds[name] or fastest
                    expected_seconds[name] = (num_running[name] + size) * seconds
                # In order: a later group must not overtake this one.
                if not expected_seconds:
                    break
                name = min(expected_seconds, key=expected_seconds.__getitem__)
                self.ledger.start(entry, name)
                self.members[name].assigned[entry.id] = request
                num_running[name] += size
                batches.setdefault(name, []).append(entry)
        for name, entries in batches.items():
            requests: list[SampleRequest] = []
            for entry in entries:
                if self.turn_driver is None:
                    requests.append(sample_request(entry.request, entry.id, self.seed))
                else:
                    requests.extend(self.turn_driver.requests(entry))
            self._send(self.members[name], Submit(requests))

    # -- hosts that come and go

    def _check_health(self, member: HostHealth, now: float) -> None:
        """Checks that a host makes progress, and marks it as lost if not; a host in this process is
        only asked for its progress. Restarts a lost host once its pause is over, unless it is gone
        for good or hosts cannot be restarted, and gives it all stored versions. `now`:
        `time.monotonic()`."""
        if member.host is not None:
            self._refresh_progress(member, now)
            if member.in_process:
                return
            idle_seconds = member.stalled_seconds(now)
            if idle_seconds:
                self._mark_lost(member, f"it has made no progress for {idle_seconds:.0f} s")
        elif self.restart is not None and not member.is_gone and now >= member.retry_at:
            try:
                member.restart_with(self.restart(member.name), now)
                member.update_progress(now)
            except (HostLost, ShoalError) as error:
                self._mark_lost(member, error)
                return
            for version in sorted(self.store.versions):
                self._give_version(member, self.store.versions[version])

    def _give_version(self, member: HostHealth, version: Version) -> None:
        """Announces a version to a host, and notes that it has it."""
        self._send(member, Load(version))
        if member.host is not None:
            member.versions.add(version.version)

    def _refresh_progress(self, member: HostHealth, now: float) -> None:
        """Asks a host for its progress, unless it is lost; a host that cannot answer is marked as
        lost."""
        if member.host is None:
            return
        try:
            member.update_progress(now)
        except HostLost as reason:
            self._mark_lost(member, reason)

    def _send(self, member: HostHealth, message: Message) -> None:
        """Sends a message to a host; does nothing if the host is lost. If sending fails, marks the
        host as lost."""
        host = member.host
        if host is None:
            return
        try:
            host.handle(message)
        except HostLost as reason:
            self._mark_lost(member, reason)

    def _poll(self, member: HostHealth) -> dict[int, list[Completion]]:
        """Returns a host's answers since the last call, by request id; {} if the host is lost, or
        if asking shows that it is: it is then marked as lost. Answers are not checked here."""
        host = member.host
        if host is None:
            return {}
        try:
            return host.poll()
        except HostLost as reason:
            self._mark_lost(member, reason)
            return {}

    def _mark_lost(self, member: HostHealth, reason: str | Exception) -> None:
        """Gives a host up: closes it, unless it is closed already, lets its groups wait again, and
        sets when it is restarted, if it may be. Reports why to `on_note`. `reason`: a text or an
        error that says why; after `HostRefused` the host is never restarted. ShoalError if no host
        is left that is alive or may be restarted. RuntimeError if the host is in this process,
        where a fault is an error of the program."""
        refused = isinstance(reason, HostRefused)
        state = "refused" if refused else "lost"
        text = f"sampler host {member.name} is {state}: {reason}"
        if member.in_process:
            raise RuntimeError(text)
        if member.host is not None:
            with contextlib.suppress(HostLost):
                member.update_progress(time.monotonic())  # so that its last tokens are counted
            with contextlib.suppress(HostLost):
                member.host.close()
        if self.turn_driver is not None:
            running = self.ledger.in_state(GroupState.RUNNING)
            self.turn_driver.forget([entry for entry in running if entry.host == member.name])
        self._lost_tokens += member.lose(time.monotonic(), refused)
        num_asked_again = self.ledger.lose(member.name)
        note = f"{text}; {count(num_asked_again, 'group')} requested again"
        if not refused:
            self._lost += 1
            if member.is_gone:
                note += ", its last restart is used up (sampler.restarts)"
        self.on_note(note)
        if all(other.is_gone for other in self.members.values()):
            raise ShoalError(
                f"no sampler host is left: {text}; see what ended them, then resume the run"
            )

    def _can_start(self, entry: PendingGroup) -> bool:
        """True if some host has the weights for a group and, if hosts run in the caller's thread,
        `take` is waiting for the group's step."""
        request = entry.request
        if not self.in_background and (request.purpose, request.step) != self._taking:
            return False
        return any(member.may_start(request) for member in self.members.values())

    def _is_published(self, request: GroupRequest) -> bool:
        """True if the version of a request, or a newer one unless the request is `exact`, is
        stored."""
        versions = self.store.versions
        if request.exact:
            return request.version in versions
        return max(versions, default=-1) >= request.version

    def _show_progress(self, entry: PendingGroup) -> None:
        """Reports to `on_progress`, if it is set, how many of an evaluation's groups are sampled,
        of those with the same set of questions and the same sampling parameters as this group; does
        nothing for training."""
        request = entry.request
        if self.on_progress is None or request.purpose is not Purpose.EVALUATE:
            return
        mode = "greedy" if request.params.temperature == 0 else "sampled"
        num_done = 0
        num_groups = 0
        for other in self.ledger.entries_of(request.purpose, request.step):
            if other.request.subset != request.subset or other.request.params != request.params:
                continue
            num_groups += 1
            if other.state in (GroupState.SAMPLED, GroupState.REWARDED):
                num_done += 1
        self.on_progress(f"{request.subset}, {mode}", num_done, num_groups)

    def _drop_unneeded_versions(self) -> None:
        """Drops the stored versions older than `keep_from`, which no later request may name; keeps
        those that a pending request names as `exact`."""
        needed = {
            entry.request.version for entry in self.ledger.entries.values() if entry.request.exact
        }
        unneeded = []
        for version in self.store.versions:
            if version < self.keep_from and version not in needed:
                unneeded.append(version)
        self.store.drop(unneeded)
        for member in self.members.values():
            member.versions &= set(self.store.versions)


def _count_groups(stats: RolloutStats, entries: Sequence[PendingGroup]) -> None:
    """Adds the groups' sampled tokens and reward failures to `stats`, which it changes."""
    for entry in entries:
        stats.tokens += sum(completion.num_sampled for completion in entry.completions)
        if entry.scores is not None:
            stats.failures.extend(entry.scores.failures)
