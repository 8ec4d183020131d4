"""Ledger of a fleet: one entry for each group, from its request until it is handed over to `take`.

    waiting -> running -> sampled -> rewarded -> handed over
       ^          |
       +---lost---+

Whatever hosts answer, in whatever order and however often, each group is handed over once, in the
order of the requests. The module also builds the requests for samplers and the finished groups."""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from shoal.protocols import GroupRequest, SampleRequest
from shoal.records import Completion, Group, NoiseKey, Purpose
from shoal.rewards.pool import RewardPool
from shoal.rewards.scores import Policy, Scores, logged_verdicts, with_failed_environments
from shoal.tasks.task import Task

if TYPE_CHECKING:
    from shoal.rollout.turn_driver import Rollout


class GroupState(enum.StrEnum):
    """State of a group, from its request until `take` returns it."""

    WAITING = "waiting"  # waits for a host with room
    RUNNING = "running"  # a host samples it
    SAMPLED = "sampled"  # all its completions have arrived; it waits for rewards
    REWARDED = "rewarded"  # its rewards have arrived
    HANDED_OVER = "handed over"


UNSAMPLED = frozenset({GroupState.WAITING, GroupState.RUNNING})
"""States of groups whose completions have not all arrived."""

TRANSITIONS: dict[GroupState, frozenset[GroupState]] = {
    # An answer may come while the group waits again, if its host was given up too early.
    GroupState.WAITING: frozenset({GroupState.RUNNING, GroupState.SAMPLED}),
    GroupState.RUNNING: frozenset({GroupState.WAITING, GroupState.SAMPLED}),
    GroupState.SAMPLED: frozenset({GroupState.REWARDED}),
    GroupState.REWARDED: frozenset({GroupState.HANDED_OVER}),
    GroupState.HANDED_OVER: frozenset(),
}


@dataclass(eq=False)
class PendingGroup:
    """A group that was requested and not handed over yet. The ledger owns it."""

    id: int
    request: GroupRequest
    state: GroupState = GroupState.WAITING
    attempt: int = 0  # how often the group was given to a host
    host: str = ""  # name of the host that has the group, or had it last; "" before the first
    # the group's rollouts, if they have turns; [] otherwise, and until they are opened
    rollouts: list[Rollout] = field(default_factory=list)
    # number of `rollouts` in each state
    rollout_states: Counter[RolloutState] = field(default_factory=Counter)
    completions: Sequence[Completion] = ()
    texts: Sequence[str] = ()
    group: Group | None = None
    # the scores, whose failures are counted when the group is taken
    scores: Scores | None = None

    @property
    def num_idle(self) -> int:
        """The number of rollouts for which the host has nothing to do, because they wait for tools
        or are over."""
        return sum(self.rollout_states[state] for state in IDLE)

    def move(self, state: GroupState) -> None:
        """Sets the state, and is the only place that does. RuntimeError if TRANSITIONS has no such
        transition."""
        if state not in TRANSITIONS[self.state]:
            raise RuntimeError(
                f"group {self.id} of {self.request.purpose} step {self.request.step} cannot become "
                f"{state}: it is {self.state}"
            )
        self.state = state


@dataclass
class Ledger:
    """All groups that were requested and not handed over yet. The fleet owns the ledger."""

    # by id, in the order of the requests
    entries: dict[int, PendingGroup] = field(default_factory=dict)
    next_id: int = 0
    # id of a request to a host -> id of its group, for the requests beyond a group's first:
    # rollouts with other prompts, and branches, are requested one by one
    group_ids: dict[int, int] = field(default_factory=dict)
    duplicates: int = 0  # number of answers to groups that had been answered already
    asked_again: int = 0  # number of groups that wait again because their host was lost

    def add(self, requests: Iterable[GroupRequest]) -> None:
        """Makes an entry for each request, waiting for a host, with the next unused id."""
        for request in requests:
            self.entries[self.next_id] = PendingGroup(self.next_id, request)
            self.next_id += 1

    def new_request_id(self, entry: PendingGroup) -> int:
        """Returns an unused id for one more request for a group (the first has the group's own id),
        and notes that it belongs to the group."""
        id = self.next_id
        self.next_id += 1
        self.group_ids[id] = entry.id
        return id

    def entries_of(self, purpose: Purpose, step: int) -> list[PendingGroup]:
        """Returns the entries of the groups that a step requested, in the order of the requests; []
        if it requested none, or all were handed over."""
        entries = []
        for entry in self.entries.values():
            if entry.request.purpose == purpose and entry.request.step == step:
                entries.append(entry)
        return entries

    def in_state(self, state: GroupState) -> list[PendingGroup]:
        """Returns the entries that are in a state, the oldest request first."""
        return [entry for entry in self.entries.values() if entry.state is state]

    def start(self, entry: PendingGroup, host: str) -> None:
        """Notes that the host named `host` gets the group, one more attempt. RuntimeError if the
        group does not wait."""
        entry.move(GroupState.RUNNING)
        entry.host = host
        entry.attempt += 1

    def answer(self, id: int, completions: Sequence[Completion]) -> PendingGroup | None:
        """Stores `completions`, which must be all of the group `id`, without checking them, and
        returns its entry, now sampled. Returns None if the group had been answered before, also if
        it was handed over since, and counts a duplicate; None without counting if no request ever
        had this id."""
        entry = self.entries.get(id)
        if entry is None or entry.state not in UNSAMPLED:
            if id < self.next_id:
                self.duplicates += 1
            return None
        entry.move(GroupState.SAMPLED)
        entry.completions = completions
        return entry

    def lose(self, host: str) -> int:
        """Makes the running groups of the lost host named `host` wait again, ahead of groups that
        were requested later. Returns their number, and adds it to `asked_again`. Their `host` stays
        the lost one's name until another gets them."""
        lost = [entry for entry in self.in_state(GroupState.RUNNING) if entry.host == host]
        for entry in lost:
            entry.move(GroupState.WAITING)
        self.asked_again += len(lost)
        return len(lost)

    def hand_over(self, entries: Collection[PendingGroup]) -> list[Group]:
        """Removes entries, all of which must be rewarded, and returns their groups in the same
        order. Also forgets the ids of the groups' further requests. RuntimeError if an entry is not
        rewarded yet."""
        groups = []
        for entry in entries:
            entry.move(GroupState.HANDED_OVER)
            assert entry.group is not None
            groups.append(entry.group)
            del self.entries[entry.id]
        if groups:
            for request_id, group_id in list(self.group_ids.items()):
                if group_id not in self.entries:
                    del self.group_ids[request_id]
        return groups

    def count(self, *states: GroupState) -> int:
        """Returns how many groups are in any of the states."""
        return sum(entry.state in states for entry in self.entries.values())


def describe_states(entries: Sequence[PendingGroup], hosts: Mapping[str, str]) -> str:
    """Returns a text that says how many groups are in each state, and at which host, like "1 of 4
    groups are there, 2 at sampler-0 (weights 3), 1 waiting, attempt 2". `entries`: at least one.
    `hosts`: name of a host -> the text to use for it, for each host that has one of the groups.
    "There" are groups with rewards; those that were sampled count as "sampled". The attempt is the
    highest of any group."""
    num_rewarded = 0
    counts = Counter[str]()
    for entry in entries:
        if entry.state is GroupState.REWARDED:
            num_rewarded += 1
        elif entry.state is GroupState.RUNNING:
            counts[f"at {hosts[entry.host]}"] += 1
        else:
            counts[str(entry.state)] += 1
    parts = [f"{num_rewarded} of {len(entries)} groups have arrived"]
    for state_text, number in counts.items():
        parts.append(f"{number} {state_text}")
    parts.append(f"attempt {max(entry.attempt for entry in entries)}")
    return ", ".join(parts)


def sample_request(request: GroupRequest, id: int, seed: int) -> SampleRequest:
    """Returns the request to a host for all completions of a group, with the id `id` and without
    turns. `seed`: the run's.

    The address of the noise contains purpose, data set, greedy or sampled, step and row. A prompt
    occurs once at each such address, so no two completions of a run share their noise."""
    # An evaluation's step is a version of the weights, which may equal a training step: without the
    # purpose both would share noise.
    mode = "greedy" if request.params.temperature == 0 else "sampled"
    purpose = f"{request.purpose}/{request.subset}/{mode}"
    noise_key = NoiseKey(seed, purpose, request.step, request.example.row)
    return SampleRequest(
        id=id,
        prompt_ids=request.prompt_ids,
        num_completions=request.num_completions,
        noise_key=noise_key,
        params=request.params,
        purpose=request.purpose,
        version=request.version,
        exact=request.exact,
    )


def rollout_requests(
    request: SampleRequest,
    prompts: Sequence[np.ndarray],
    new_id: Callable[[], int],
    turn_limits: Sequence[int],
) -> list[SampleRequest]:
    """Returns the requests to a host for a group's rollouts with turns: one request for the whole
    group if all `prompts` are equal, else one request for each rollout, with an id from `new_id`.
    `request`: the group's, from `sample_request`. `prompts`, `turn_limits`: for each rollout, its
    prompt (token ids) and the most tokens of its first turn (0 for no limit). `new_id` is called
    once for each request of a single rollout, and never for the whole group, which keeps the id of
    `request`."""
    request = replace(request, has_turns=True)
    if all(np.array_equal(ids, prompts[0]) for ids in prompts):
        return [replace(request, prompt_ids=prompts[0], turn_limits=tuple(turn_limits))]
    requests = []
    for index, (ids, turn_limit) in enumerate(zip(prompts, turn_limits, strict=True)):
        own_request = replace(
            request,
            id=new_id(),
            prompt_ids=ids,
            num_completions=1,
            first=index,
            turn_limits=(turn_limit,),
        )
        requests.append(own_request)
    return requests


def branch_request(
    request: SampleRequest,
    id: int,
    index: int,
    prompt_ids: np.ndarray,
    branch: int,
    used: int,
    turn_limit: int,
) -> SampleRequest:
    """Returns the request to a host that continues rollout `index` of a group after another prompt
    (`Branch`). `request`: the group's, from `sample_request`. `used`: tokens that the rollout has
    already, which count towards its `max_tokens`. `branch`: number of the branch, from 1; it enters
    the address of the noise, since two branches may reach the same position. `turn_limit`: the most
    tokens of the branch's first turn, 0 for no limit. The request is one of a single completion."""
    noise_key = replace(request.noise_key, purpose=f"{request.noise_key.purpose}/branch {branch}")
    params = replace(request.params, max_tokens=request.params.max_tokens - used)
    return replace(
        request,
        id=id,
        prompt_ids=prompt_ids,
        num_completions=1,
        first=index,
        has_turns=True,
        noise_key=noise_key,
        params=params,
        branch=branch,
        turn_limits=(turn_limit,),
    )


def make_group(
    task: Task,
    request: GroupRequest,
    completions: Sequence[Completion],
    texts: Sequence[str],
    scores: Scores,
    position: int = 0,
) -> Group:
    """Returns a finished group from its completions, in order of their index, their texts, and
    their scores: row `position` of `scores`, which may be of several groups. The group's version is
    the requested one with `exact`, else the oldest that a token was sampled from (ValueError if no
    completion has a sampled token).

    `correct` of the group is whether the reward `task.correct_by` is 1; without such a reward what
    the task's `correct` function says, which is called here; without that function what a reward
    function logged as `acc`; else it is None."""
    version = request.version
    if not request.exact:
        sampled = [completion for completion in completions if completion.num_sampled]
        version = min(int(completion.sampled_versions.min()) for completion in sampled)
    group = Group(
        purpose=request.purpose,
        step=request.step,
        version=version,
        example=request.example,
        prompt_ids=request.prompt_ids,
        completions=tuple(completions),
        texts=tuple(texts),
        rewards=scores.rewards[position],
        reward_components={name: values[position] for name, values in scores.components.items()},
        valid=scores.valid[position],
        subset=request.subset,
        extra={name: column[position] for name, column in scores.extra.items()},
        reward_weights={reward.name: reward.weight for reward in task.rewards},
        turn_rewards=tuple(scores.turn_rewards[position]) if scores.turn_rewards else (),
    )
    # Whether a completion is correct does not come from the sum of rewards: a weighted sum, or a
    # user's own reward, says nothing about accuracy.
    if task.correct_by in scores.components:
        return replace(group, correct=scores.components[task.correct_by][position] == 1)
    if task.correct is not None:
        correct = [bool(task.correct(text, request.example)) for text in group.answers]
        return replace(group, correct=np.array(correct))
    return replace(group, correct=logged_verdicts(group.extra))


@dataclass
class GroupRewards:
    """Submits each group to the pool of reward workers as soon as it is sampled, so that it is
    scored while other groups are still sampled; and builds the finished groups."""

    task: Task
    pool: RewardPool
    decode: Callable[[Sequence[int]], str]
    # what to do with a rollout whose environment failed: zero or skip; with "error" the run has
    # stopped before
    on_error: Policy = "error"

    def submit(self, entry: PendingGroup) -> None:
        """Decodes a sampled group's texts, stores them in `entry`, and submits the group to the
        pool, as a batch of one group. Reward functions that run in this process are called before
        it returns."""
        texts = []
        sampled_ids = []
        for completion in entry.completions:
            texts.append(self.decode(completion.token_ids.tolist()))
            sampled_ids.append(completion.token_ids[completion.loss_mask].tolist())
        entry.texts = texts
        # Of the one group, if its rollouts have turns.
        messages = []
        environments = []
        num_turns = []
        if entry.rollouts:
            # All rollouts of a group have messages, or none has.
            if entry.rollouts[0].messages:
                messages.append([rollout.messages for rollout in entry.rollouts])
            environments.append(
                [rollout.environment for rollout in entry.rollouts if rollout.environment]
            )
            num_turns.append([len(completion.turns) for completion in entry.completions])
        self.pool.submit(
            entry.id,
            [entry.request.example],
            [entry.texts],
            [sampled_ids],
            entry.request.step,
            purpose=entry.request.purpose,
            messages=messages,
            environments=environments,
            num_turns=num_turns,
        )

    def enter(self, scored: Sequence[tuple[Hashable, Scores]], ledger: Ledger) -> None:
        """Builds the finished group of each pair (id of an entry of `ledger`, its scores), which
        `pool.collect` has returned, and stores it in the entry, which is then rewarded.
        RuntimeError if an entry is not in the state sampled. A completion whose environment failed
        gets the score that the policy `on_error` ("zero" or "skip") gives it."""
        for ticket, scores in scored:
            # the id that `submit` passed
            assert isinstance(ticket, int)
            entry = ledger.entries[ticket]
            entry.move(GroupState.REWARDED)
            failures = [rollout.failure for rollout in entry.rollouts if rollout.failure]
            if failures:
                scores = with_failed_environments(scores, failures, self.on_error)
            entry.scores = scores
            group = make_group(self.task, entry.request, entry.completions, entry.texts, scores)
            # `scores` are of this group alone.
            entry.group = replace(group, logged=scores.metrics)


class RolloutState(enum.StrEnum):
    """State of a rollout with turns."""

    OPENING = "opening"  # the environment has not been reset yet, so there is no prompt
    SAMPLING = "sampling"  # the host samples, or is about to
    ACTING = "acting"  # the host waits, because a tool, an environment or a rollout function acts
    ENDED = "ended"  # nothing more is sampled; the environment is asked for its reward
    DONE = "done"


IDLE = frozenset({RolloutState.ACTING, RolloutState.ENDED, RolloutState.DONE})
"""States in which a host has nothing to do for a rollout."""
