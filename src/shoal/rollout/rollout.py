"""One rollout while it goes: what was said, its tokens, and the branches that followed prompts of
their own."""

from __future__ import annotations

import enum
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from shoal.types import Branch, Completion, Failure, Prompt, StopReason

if TYPE_CHECKING:
    from shoal.model.turns import ToolCall
    from shoal.rewards.environments import EndedEnvironment
    from shoal.rollout.group import PendingGroup


@dataclass(frozen=True)
class Move:
    """What a host is to do with a completion: go on after tokens of context, or, with None, give up
    its place; or begin a branch of its rollout."""

    entry: PendingGroup
    index: int
    request: int = -1  # the id of the request that it is of
    context: Sequence[int] | None = (
        None  # none of them only after a turn that its own limit has cut
    )
    prompt_ids: np.ndarray | None = None  # of a branch
    branch: int = 0  # its number, from 1
    used: int = 0  # tokens of its rollout before it
    turn_limit: int = (
        0  # tokens after which the turn that begins is cut; 0: no limit but the rollout's
    )


class RolloutState(enum.StrEnum):
    OPENING = "opening"  # its environment has not begun: it has no prompt yet
    SAMPLING = "sampling"  # its host has something to do for it
    ACTING = "acting"  # its host waits for tools, an environment or a rollout function
    ENDED = "ended"  # nothing more is sampled, and its environment is asked for its reward
    DONE = "done"


IDLE = frozenset({RolloutState.ACTING, RolloutState.ENDED, RolloutState.DONE})
"""States in which no host has anything to do for a rollout."""


@dataclass(eq=False)
class Rollout:
    """One of a group's G, while it goes."""

    entry: PendingGroup
    index: int
    attempt: int
    prompt: Prompt
    words: str | None = None  # of its environment's reset, which the prompt ends with
    prompt_ids: np.ndarray | None = None  # of its branch; None until its environment has begun
    completion: Completion | None = None  # of its branch, as its host gave it last
    tokens: list[int] = field(default_factory=list)  # of the completion, that were read or appended
    ended: list[tuple[np.ndarray, Completion]] = field(
        default_factory=list
    )  # branches before this one
    asked: dict[str, Any] = field(default_factory=dict)  # by an agent: its last call
    said: list[dict[str, Any]] = field(default_factory=list)  # the messages of that, and the answer
    turns: int = 0
    # of the turn that is sampled: tokens after which it is cut; 0: no limit but the rollout's
    turn_limit: int = 0
    messages: list[dict[str, Any]] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)  # of the last turn
    answers: list[dict[str, Any]] = field(default_factory=list)  # to the first of them
    _state: RolloutState = RolloutState.OPENING
    is_over: bool = False  # a rollout function asked for more than is left
    reason: StopReason | None = None  # why it has ended
    failure: Failure | None = None  # of its environment
    environment: EndedEnvironment | None = None  # what is left of it

    def __post_init__(self) -> None:
        self.entry.rollout_states[self._state] += 1

    @property
    def state(self) -> RolloutState:
        return self._state

    @state.setter
    def state(self, state: RolloutState) -> None:
        """Counted in its group: the fleet asks many times a second how many are in which state."""
        self.entry.rollout_states[self._state] -= 1
        self.entry.rollout_states[state] += 1
        self._state = state

    @property
    def key(self) -> tuple[int, int, int]:
        return self.entry.id, self.attempt, self.index

    @property
    def result(self) -> Completion:
        """The completion, with its turns."""
        assert (
            self.completion is not None and self.reason is not None and self.prompt_ids is not None
        )
        prompts, parts = zip(*self.ended, (self.prompt_ids, self.completion), strict=True)
        shared = np.array_equal(prompts[0], self.entry.request.prompt_ids)
        return replace(
            joined(prompts, parts),
            stop_reason=self.reason,
            waits=False,
            messages=tuple(self.messages),
            prompt_ids=None if shared else prompts[0],
        )

    @property
    def num_tokens(self) -> int:
        """Of all branches, context too."""
        return sum(len(one) for _, one in self.ended) + len(self.tokens)


def num_shared(prompt: Any, said: Sequence[Mapping[str, Any]]) -> int:
    """Messages that a prompt of an agent begins with and that had been said."""
    pairs = zip(prompt, said, strict=False) if isinstance(prompt, list) else ()
    return sum(1 for _ in itertools.takewhile(lambda pair: _told(pair[0]) == _told(pair[1]), pairs))


def _told(message: Any) -> Any:
    """What of a message counts when two are compared: clients add to them, and have other names for
    calls."""
    if not isinstance(message, Mapping):
        return message
    calls = [
        (one["function"]["name"], one["function"]["arguments"])
        for one in message.get("tool_calls", ())
    ]
    return message["role"], message.get("content") or "", calls


def joined(prompts: Sequence[np.ndarray], parts: Sequence[Completion]) -> Completion:
    """The branches of a rollout, each after its prompt, as one completion."""
    if len(parts) == 1:
        return parts[0]
    starts = np.cumsum([0, *map(len, parts)]).tolist()
    arrays = {
        name: np.concatenate([getattr(one, name) for one in parts])
        for name in ("token_ids", "logprobs", "loss_mask", "versions")
    }
    extra = {name: np.concatenate([one.extra[name] for one in parts]) for name in parts[0].extra}
    return replace(
        parts[0],
        **arrays,
        extra=extra,
        stop_reason=parts[-1].stop_reason,
        branches=tuple(map(Branch, starts[1:], prompts[1:])),
    )


def with_words(prompt: Prompt, words: str) -> Prompt:
    """A prompt with what an environment's `reset` returned, appended to its last user message."""
    if isinstance(prompt, str):
        return prompt + words
    last = max(
        (i for i, message in enumerate(prompt) if message.get("role") == "user"), default=None
    )
    if last is None:
        return [*prompt, {"role": "user", "content": words}]
    return [
        {**message, "content": f"{message.get('content') or ''}{words}"} if i == last else message
        for i, message in enumerate(prompt)
    ]
