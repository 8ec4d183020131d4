"""Ledger of a fleet: an entry for each group, from its request until it is handed over.

    waiting -> running -> sampled -> rewarded -> handed over
       ^          |
       +---lost---+

Whatever hosts answer, in whatever order and however often, a group is handed over once, in the
order of the requests.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from shoal.protocols import GroupRequest, SampleRequest
from shoal.records import Completion, Group, NoiseKey, Purpose
from shoal.rewards.pool import RewardPool
from shoal.rewards.scores import Policy, Scores, with_failed
from shoal.tasks.task import Task

if TYPE_CHECKING:
    from shoal.rollout.turn_driver import Rollout


class Stage(enum.StrEnum):
    WAITING = "waiting"  # for a host with room
    RUNNING = "running"  # at a host
    SAMPLED = "sampled"  # all completions are there
    REWARDED = "rewarded"  # rewards are there
    HANDED_OVER = "handed over"


TRANSITIONS: dict[Stage, frozenset[Stage]] = {
    # An answer may come when the group waits again: its host had been given up too early.
    Stage.WAITING: frozenset({Stage.RUNNING, Stage.SAMPLED}),
    Stage.RUNNING: frozenset({Stage.WAITING, Stage.SAMPLED}),
    Stage.SAMPLED: frozenset({Stage.REWARDED}),
    Stage.REWARDED: frozenset({Stage.HANDED_OVER}),
    Stage.HANDED_OVER: frozenset(),
}


@dataclass(eq=False)
class PendingGroup:
    """A group that was requested and not handed over yet."""

    id: int
    request: GroupRequest
    stage: Stage = Stage.WAITING
    attempt: int = 0  # how often it was given to a host
    host: str = ""  # that has it
    # its completions while they are under way, where these have turns
    rollouts: list[Rollout] = field(default_factory=list)
    # how many of them are in each state
    rollout_states: Counter[RolloutState] = field(default_factory=Counter)
    completions: Sequence[Completion] = ()
    texts: Sequence[str] = ()
    group: Group | None = None
    scores: Scores | None = None  # whose failures and figures count with this group

    @property
    def num_idle(self) -> int:
        """Rollouts that its host has nothing to do for: they wait for tools, or are over."""
        return sum(self.rollout_states[state] for state in IDLE)

    def move(self, stage: Stage) -> None:
        """The only way from one stage to another."""
        if stage not in TRANSITIONS[self.stage]:
            raise RuntimeError(
                f"group {self.id} of {self.request.purpose} step {self.request.step} cannot become "
                f"{stage}: it is {self.stage}"
            )
        self.stage = stage


@dataclass
class Ledger:
    """All groups that were requested and not handed over yet. The fleet owns it."""

    entries: dict[int, PendingGroup] = field(default_factory=dict)  # in the order of requests
    next_id: int = 0
    # id of a request for a part of a group -> the group's
    parts: dict[int, int] = field(default_factory=dict)
    duplicates: int = 0  # answers to groups that had been answered
    asked_again: int = 0  # groups whose host was lost

    def add(self, requests: Iterable[GroupRequest]) -> None:
        for request in requests:
            self.entries[self.next_id] = PendingGroup(self.next_id, request)
            self.next_id += 1

    def add_part(self, entry: PendingGroup) -> int:
        """The id of a request for a part of a group."""
        id = self.next_id
        self.next_id += 1
        self.parts[id] = entry.id
        return id

    def of(self, purpose: Purpose, step: int) -> list[PendingGroup]:
        """The groups that a step requested, in that order."""
        entries = []
        for entry in self.entries.values():
            if entry.request.purpose == purpose and entry.request.step == step:
                entries.append(entry)
        return entries

    def at(self, stage: Stage) -> list[PendingGroup]:
        """The groups of a stage, the oldest first."""
        return [entry for entry in self.entries.values() if entry.stage is stage]

    def start(self, entry: PendingGroup, host: str) -> None:
        """A host gets the group."""
        entry.move(Stage.RUNNING)
        entry.host = host
        entry.attempt += 1

    def answer(self, id: int, completions: Sequence[Completion]) -> PendingGroup | None:
        """The entry that a host's answer is for; None, and counted, if it has been answered."""
        entry = self.entries.get(id)
        if entry is None or entry.stage not in (Stage.WAITING, Stage.RUNNING):
            if id < self.next_id:
                self.duplicates += 1
            return None
        entry.move(Stage.SAMPLED)
        entry.completions = completions
        return entry

    def lose(self, host: str) -> int:
        """The groups of a lost host wait again, before those that were requested later. Returns how
        many they are."""
        lost = [entry for entry in self.at(Stage.RUNNING) if entry.host == host]
        for entry in lost:
            entry.move(Stage.WAITING)
        self.asked_again += len(lost)
        return len(lost)

    def hand_over(self, entries: Collection[PendingGroup]) -> list[Group]:
        groups = []
        for entry in entries:
            entry.move(Stage.HANDED_OVER)
            assert entry.group is not None
            groups.append(entry.group)
            del self.entries[entry.id]
        if len(entries):
            for part, id in list(self.parts.items()):
                if id not in self.entries:
                    del self.parts[part]
        return groups

    def count(self, *stages: Stage) -> int:
        return sum(entry.stage in stages for entry in self.entries.values())


def describe_stages(entries: Sequence[PendingGroup], hosts: Mapping[str, str]) -> str:
    """How many groups of these are in each stage, and at which host. `hosts`: the text for each
    host."""
    num_rewarded = 0
    counts = Counter[str]()
    for entry in entries:
        if entry.stage is Stage.REWARDED:
            num_rewarded += 1
        elif entry.stage is Stage.RUNNING:
            counts[f"at {hosts[entry.host]}"] += 1
        else:
            counts[str(entry.stage)] += 1
    parts = [f"{num_rewarded} of {len(entries)} groups are there"]
    for stage_text, number in counts.items():
        parts.append(f"{number} {stage_text}")
    parts.append(f"attempt {max(entry.attempt for entry in entries)}")
    return ", ".join(parts)


def sample_request(request: GroupRequest, id: int, seed: int) -> SampleRequest:
    """The sampler's request for a group.

    Purpose, data set and greedy or sampled are part of the noise's address, with step and row: a
    prompt occurs once in each of them, so no two completions of a run share their noise.
    """
    # An evaluation's step is a version and may equal a training step: without the purpose both
    # would share noise.
    mode = "greedy" if request.params.temperature == 0 else "sampled"
    purpose = f"{request.purpose}/{request.subset}/{mode}"
    noise_key = NoiseKey(seed, purpose, request.step, request.example.row)
    return SampleRequest(
        id,
        request.prompt_ids,
        request.num_completions,
        noise_key,
        request.params,
        request.purpose,
        request.version,
        request.exact,
    )


def rollout_requests(
    request: SampleRequest,
    prompts: Sequence[np.ndarray],
    new_id: Callable[[], int],
    turn_limits: Sequence[int],
) -> list[SampleRequest]:
    """The requests for a group's rollouts of several turns, whose prompts are `prompts`: one for
    all, or, where environments began them differently, one for each. `turn_limits`: of their first
    turns, 0 for none."""
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
    """The request for what follows another prompt in a rollout of a group that has `used` so many
    tokens; `branch`: its number, from 1. Two branches may reach one position: their noise differs
    by that number. `turn_limit`: of its first turn, 0 for none."""
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
    """A group from its completions, in order of their index, and their texts; its rewards are at
    `position` of `scores`."""
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
    )
    # Judged without the rewards: a weighted sum, or a reward of the user's own, says nothing about
    # accuracy.
    if task.correct_by in scores.components:
        return replace(group, correct=scores.components[task.correct_by][position] == 1)
    if task.correct is not None:
        correct = [bool(task.correct(text, request.example)) for text in group.answers]
        return replace(group, correct=np.array(correct))
    return group


@dataclass
class GroupRewards:
    """A group is submitted to the pool as soon as it is sampled, so that workers score it while
    others are sampled."""

    task: Task
    pool: RewardPool
    decode: Callable[[Sequence[int]], str]
    # of an environment that failed: zero or skip; with error the run has ended before
    on_error: Policy = "error"

    def submit(self, entry: PendingGroup) -> None:
        """Submits a sampled group to the pool; functions that are called in this process are called
        here."""
        texts = []
        sampled_ids = []
        for completion in entry.completions:
            texts.append(self.decode(completion.token_ids.tolist()))
            sampled_ids.append(completion.token_ids[completion.loss_mask].tolist())
        entry.texts = texts
        turns: dict[str, Any] = {}
        if entry.rollouts:
            messages = [rollout.messages for rollout in entry.rollouts]
            turns["messages"] = [messages] if messages[0] else ()
            environments = []
            for rollout in entry.rollouts:
                if rollout.environment:
                    environments.append(rollout.environment)
            turns["environments"] = [environments]
        self.pool.submit(
            entry.id,
            [entry.request.example],
            [entry.texts],
            [sampled_ids],
            entry.request.step,
            **turns,
        )

    def enter(self, scored: Sequence[tuple[Hashable, Scores]], ledger: Ledger) -> None:
        """Makes groups of the scores that the pool has given."""
        for ticket, scores in scored:
            assert isinstance(ticket, int)
            entry = ledger.entries[ticket]
            entry.move(Stage.REWARDED)
            failures = [rollout.failure for rollout in entry.rollouts if rollout.failure]
            if failures:
                scores = with_failed(scores, failures, self.on_error)
            entry.scores = scores
            entry.group = make_group(
                self.task, entry.request, entry.completions, entry.texts, scores
            )


class RolloutState(enum.StrEnum):
    OPENING = "opening"  # its environment has not begun: it has no prompt yet
    SAMPLING = "sampling"  # its host has something to do for it
    ACTING = "acting"  # its host waits for tools, an environment or a rollout function
    ENDED = "ended"  # nothing more is sampled, and its environment is asked for its reward
    DONE = "done"


IDLE = frozenset({RolloutState.ACTING, RolloutState.ENDED, RolloutState.DONE})
"""States in which no host has anything to do for a rollout."""
