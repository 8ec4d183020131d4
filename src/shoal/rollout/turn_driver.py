"""Plays rollouts of several turns: what was said, its tokens, and the branches that followed
prompts of their own; tools and environments between the turns of a host."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from shoal.chat.tool_calls import ToolCall
from shoal.chat.turns import TOKEN_CHARACTERS, described, encode, turn_format
from shoal.config.sections.task import EnvironmentSection
from shoal.protocols import SampleRequest
from shoal.records import Branch, Completion, Failure, Prompt, Purpose, ShoalError, StopReason
from shoal.rewards.environments import EndedEnvironment
from shoal.rollout.ledger import (
    IDLE,
    Ledger,
    PendingGroup,
    RolloutState,
    rollout_requests,
    sample_request,
)
from shoal.runs.metrics import ENVIRONMENT
from shoal.text import failed_call

if TYPE_CHECKING:
    from shoal.chat.tokenizer import Tokenizer
    from shoal.chat.tool_calls import ToolCall
    from shoal.chat.turns import TurnFormat
    from shoal.workers.environments import EnvironmentKind
    from shoal.workers.sessions import Reply, Sessions


@dataclass(frozen=True)
class HostCommand:
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


@dataclass
class TurnDriver:
    """All rollouts that go. `format_of`: how turns look, by the columns of a row; `most`: rollouts
    at once."""

    sessions: Sessions
    format_of: Callable[[Mapping[str, Any]], TurnFormat]
    section: EnvironmentSection
    max_prompt_tokens: int
    most: int
    tokenizer: Tokenizer | None = None  # that rollout functions need
    rollouts: dict[Hashable, Rollout] = field(default_factory=dict)
    _going: Counter[bool] = field(
        default_factory=Counter
    )  # of these, training's (True) and an evaluation's

    # -- a group begins

    def open(self, entries: Sequence[PendingGroup]) -> None:
        """Begins groups, as many as may go at once: training's in order, then an evaluation's, one
        of each in any case. An evaluation of many questions would hold up training."""
        going = self._going
        full = set[bool]()  # kinds of which no more may go: none overtakes an older one
        for entry in sorted(entries, key=lambda one: one.request.purpose is not Purpose.TRAIN):
            size, is_training = (
                entry.request.num_completions,
                entry.request.purpose is Purpose.TRAIN,
            )
            if entry.rollouts or is_training in full:
                continue
            if going[is_training] and going.total() + size > self.most:
                full.add(is_training)
                continue
            going[is_training] += size
            prompt = entry.request.example.prompt
            entry.rollouts = [Rollout(entry, index, entry.attempt, prompt) for index in range(size)]
            for one in entry.rollouts:
                self.rollouts[one.key] = one
                self.sessions.open(
                    one.key,
                    {**entry.request.example.columns, "prompt": entry.request.example.prompt},
                )

    def requests(self, entry: PendingGroup, ledger: Ledger, seed: int) -> list[SampleRequest]:
        """What a host is asked for."""
        prompts = [one.prompt_ids for one in entry.rollouts if one.prompt_ids is not None]
        return rollout_requests(
            sample_request(entry.request, entry.id, seed),
            prompts,
            lambda: ledger.add_part(entry),
            [one.turn_limit for one in entry.rollouts],
        )

    def forget(self, entries: Sequence[PendingGroup]) -> None:
        """Gives up groups' rollouts, whose host is lost; they begin anew with new environments."""
        for entry in entries:
            for one in entry.rollouts:
                self.sessions.drop(one.key)
            self._remove(entry)
            entry.rollouts = []
            entry.rollout_states.clear()

    def _remove(self, entry: PendingGroup) -> None:
        """Takes a group's rollouts out of those that go."""
        for one in entry.rollouts:
            del self.rollouts[one.key]
        self._going[entry.request.purpose is Purpose.TRAIN] -= len(entry.rollouts)

    def _begin(self, one: Rollout, words: str | None) -> None:
        request = one.entry.request
        ids = request.prompt_ids
        if words is not None:
            one.prompt, one.words = with_words(one.prompt, words), words
            size = f"{len(words)} characters"
            is_long = (
                len(words) > TOKEN_CHARACTERS * self.max_prompt_tokens
            )  # it is not worth encoding
            if not is_long:
                ids = self._format(one).encode_prompt(self._plain_prompt(one))
                is_long, size = len(ids) > self.max_prompt_tokens, f"{len(ids)} tokens"
            if is_long:
                raise ShoalError(
                    f"row {request.example.row}: with what its environment's reset returned, the "
                    f"prompt "
                    f"has {size}; raise sampling.max_prompt_tokens={self.max_prompt_tokens}",
                    "sampling.max_prompt_tokens",
                )
        one.prompt_ids, one.state = ids, RolloutState.SAMPLING

    def _plain_prompt(self, one: Rollout) -> Prompt:
        """The prompt as it is encoded, where words of its environment may spell out special
        tokens."""
        if one.words is None:
            return one.prompt
        message = self._format(one).plain({"role": "user", "content": one.words})
        return with_words(one.entry.request.example.prompt, message["content"])

    def _format(self, one: Rollout) -> TurnFormat:
        return self.format_of(one.entry.request.example.columns)

    def _kind(self, one: Rollout) -> EnvironmentKind | None:
        return self.sessions.kind_of(one.entry.request.example.columns)

    # -- what a host answers

    def take(self, entry: PendingGroup, completion: Completion) -> list[HostCommand]:
        """Reads a turn that has ended."""
        one = entry.rollouts[completion.index]
        kind = self._kind(one)
        before, tokens = len(one.tokens), completion.token_ids.tolist()
        one.completion, one.tokens, one.turns, calls = completion, tokens, one.turns + 1, []
        if not (kind and kind.asks):
            message, calls = self._format(one).read(tokens[before:])
            one.messages.append(message)
        one.calls, one.answers = calls, []
        if one.failure:  # its reset had failed
            return self._end(one, StopReason.FAILED, one.failure)
        if kind and kind.asks:
            one.state = RolloutState.ACTING
            self._tell(one, value=self._sampled(one, before))
            return []
        if not completion.waits or not (calls or (kind and kind.responds)):
            return self._end(one, completion.stop_reason)
        if one.turns == self.section.max_turns:
            return self._end(one, StopReason.MAX_TURNS)
        one.state = RolloutState.ACTING
        if calls:
            return self._act(one)
        self.sessions.respond(one.key, str(one.messages[-1].get("content") or ""))
        return []

    def wrong_turns(self, entry: PendingGroup, completions: Sequence[Completion]) -> str:
        """What makes turns unusable, as a host that is out of order gives them; "" if nothing
        does."""
        for one in completions:
            rollout = entry.rollouts[one.index]
            if rollout.state in IDLE:
                return "a turn of a rollout that waits for its tools or is over"
            if one.token_ids[: len(rollout.tokens)].tolist() != rollout.tokens or len(one) == len(
                rollout.tokens
            ):
                return "a turn that does not go on from the tokens before it"
            num_new = len(one) - len(rollout.tokens)
            if rollout.turn_limit and num_new > rollout.turn_limit:
                return f"a turn of {num_new} tokens, expected at most {rollout.turn_limit}"
        return ""

    def _act(self, one: Rollout) -> list[HostCommand]:
        """Makes the next call of a turn; with all of them answered the rollout goes on."""
        for call in one.calls[len(one.answers) :]:
            if not call.error:
                self.sessions.call(one.key, call.name, call.arguments)
                return []
            one.answers.append(_answer(call, failed_call(call.error)))
        return self._go_on(one, one.answers)

    def _go_on(self, one: Rollout, messages: list[dict[str, Any]]) -> list[HostCommand]:
        """Appends messages; where they, and one token more, do not fit, they are dropped and the
        rollout ends (TRL's rule)."""
        assert one.completion is not None
        form = self._format(one)
        if self.section.history == "template":
            prompt = self._plain_prompt(one)
            assert not isinstance(prompt, str)
            # Only the model and its environment have spoken since the prompt.
            said = [
                message if message["role"] == "assistant" else form.plain(message)
                for message in (*one.messages, *messages)
            ]
            moves = self._follow(one, form.encode_prompt([*prompt, *said]))
        else:
            moves = self._append(
                one, form.encode_context(messages, one.calls, int(one.completion.token_ids[-1]))
            )
        if not moves:
            return self._end(one, StopReason.LENGTH)
        one.messages += messages
        return moves

    def _follow(self, one: Rollout, ids: np.ndarray) -> list[HostCommand]:
        """Samples after these tokens: those that are there and some more, or others, in a branch.
        No move where they do not fit."""
        assert one.completion is not None and one.prompt_ids is not None
        if held := self._num_held(one, ids):
            return self._append(one, ids[held:].tolist())
        used = one.num_tokens
        if (
            not 0 < len(ids) <= self.max_prompt_tokens
            or used >= one.entry.request.params.max_tokens
        ):
            return []
        left = (
            [HostCommand(one.entry, one.index, one.completion.request_id)]
            if one.completion.waits
            else []
        )
        one.ended.append((one.prompt_ids, one.completion))
        one.prompt_ids, one.tokens, one.state = ids, [], RolloutState.SAMPLING
        return [
            *left,
            HostCommand(
                one.entry,
                one.index,
                prompt_ids=ids,
                branch=len(one.ended),
                used=used,
                turn_limit=one.turn_limit,
            ),
        ]

    def _num_held(self, one: Rollout, ids: np.ndarray) -> int:
        """How many of these tokens the rollout has, if they go on from it; else 0. A turn that its
        own limit has cut is continued by its tokens alone."""
        assert one.completion is not None and one.prompt_ids is not None
        held = np.concatenate([one.prompt_ids, one.completion.token_ids])
        least = len(held) + (one.completion.stop_reason is not StopReason.LENGTH)
        goes_on = (
            one.completion.waits and len(ids) >= least and np.array_equal(ids[: len(held)], held)
        )
        return len(held) if goes_on else 0

    def _append(self, one: Rollout, context: list[int]) -> list[HostCommand]:
        assert one.completion is not None
        if one.num_tokens + len(context) >= one.entry.request.params.max_tokens:
            return []
        one.tokens += context
        one.state = RolloutState.SAMPLING
        return [
            HostCommand(
                one.entry, one.index, one.completion.request_id, context, turn_limit=one.turn_limit
            )
        ]

    def _end(
        self, one: Rollout, reason: StopReason, failure: Failure | None = None
    ) -> list[HostCommand]:
        assert one.completion is not None
        one.reason, one.failure = reason, failure
        if failure:
            one.state = RolloutState.DONE
        else:
            one.state = RolloutState.ENDED
            self.sessions.end(one.key)
        return (
            [HostCommand(one.entry, one.index, one.completion.request_id)]
            if one.completion.waits
            else []
        )

    # -- what sessions answer

    def collect(self, seconds: float = 0.0) -> list[HostCommand]:
        """What follows from the answers of sessions, waiting so long for the first."""
        moves = []
        for reply in self.sessions.collect(seconds):
            if (one := self.rollouts.get(reply.rollout)) is not None:
                moves += self._take_reply(one, reply)
        return moves

    def _take_reply(self, one: Rollout, reply: Reply) -> list[HostCommand]:
        if reply.fatal:
            return self._fail(one, reply)
        kind = self._kind(one)
        if reply.reward is not None and one.messages:
            one.messages[-1] = {**one.messages[-1], "reward": reply.reward}
        if kind and kind.asks and reply.what != "end":
            return self._serve(one, reply.value and json.loads(reply.value))
        if reply.what == "open":
            try:
                self._begin(one, reply.value)
            except ShoalError as error:  # what it returned is too long, or refused by the template
                self.sessions.drop(one.key)
                return self._fail(one, replace(reply, kind="raised", error=str(error)))
        elif reply.what == "call":
            one.answers.append(_answer(one.calls[len(one.answers)], reply.value) | _cut(reply))
            return self._act(one)
        elif reply.what == "respond":
            if reply.value is None:
                return self._end(one, StopReason.ENVIRONMENT)
            return self._go_on(one, [{"role": "user", "content": reply.value} | _cut(reply)])
        else:
            one.environment, one.state = self._ended(one, **reply.value), RolloutState.DONE
        return []

    # -- what a rollout function asks for

    def _serve(self, one: Rollout, asked: dict[str, Any] | None) -> list[HostCommand]:
        """Does what a rollout function asks for; None once it has returned."""
        if asked is None:
            assert one.completion is not None
            return self._end(one, StopReason.LENGTH if one.is_over else one.completion.stop_reason)
        before = one.asked, one.said
        try:
            if asked["what"] not in ("sample", "call"):
                self._tell(one, value=self._encoded(**asked))
                return []
            turn_limit = _turn_limit(
                asked["value"]["max_tokens"], one.entry.request.params.max_tokens
            )
            if asked["what"] == "call":
                ids = self._called(one, asked["value"])
            else:
                ids = np.array(asked["value"]["prompt"], np.int32)
                self._check_ids(ids)
            one.turn_limit = turn_limit
            if one.completion is not None:
                if moves := self._follow(one, ids):
                    return moves
                # An agent's other prompts, as a sub-agent's, may be shorter.
                if (
                    asked["what"] == "call"
                    and not self._num_held(one, ids)
                    and one.num_tokens < one.entry.request.params.max_tokens
                ):
                    self._check_length(ids)
                one.is_over = True
                self._tell(
                    one,
                    over="no token is left (sampling.max_completion_tokens), or the prompt is too "
                    "long "
                    "(sampling.max_prompt_tokens)",
                )
            else:
                self._check_length(ids)
                one.prompt_ids, one.state = ids, RolloutState.SAMPLING
        except (ShoalError, TypeError, ValueError, OverflowError) as error:
            one.asked, one.said = before
            self._tell(one, error=str(error))
        return []

    def _called(self, one: Rollout, asked: dict[str, Any]) -> np.ndarray:
        """The tokens that an agent's call is answered after. Messages that are added to what has
        been said go on from the tokens that are there."""
        assert self.tokenizer is not None
        prompt, tools, held = asked["prompt"], asked["tools"], num_shared(asked["prompt"], one.said)
        is_chat, calls = isinstance(prompt, list) and isinstance(prompt[0], dict), []
        asked["added"] = added = prompt[held:] if is_chat and one.turns else []
        if (
            goes_on := bool(added)
            and held == len(one.said) > 0
            and tools == one.asked["tools"]
            and self.section.history == "keep"
        ):
            calls = [
                ToolCall(call["function"]["name"], {})
                for call in one.said[-1].get("tool_calls", ())
            ]
            roles = [message["role"] for message in added]
            goes_on = {*roles} == {"user"} or roles == ["tool"] * len(calls)
        if goes_on:
            assert one.completion is not None and one.prompt_ids is not None
            form, last = (
                turn_format(self.tokenizer, json.dumps(tools)),
                int(one.completion.token_ids[-1]),
            )
            ids = np.concatenate(
                [one.prompt_ids, one.completion.token_ids, form.encode_context(added, calls, last)]
            )
        else:
            ids = encode(prompt, tools, self.tokenizer, 2**31)
            self._check_ids(ids)  # before anything is kept of the call
            if tools:  # which a turn is read with: here an error is the agent's, there the run's
                turn_format(self.tokenizer, json.dumps(tools))
        one.asked, one.said = asked, [*prompt] if is_chat else []
        return ids.astype(np.int32)

    def _sampled(self, one: Rollout, before: int) -> dict[str, Any]:
        """What a rollout function, or an agent, learns of a turn."""
        assert (
            self.tokenizer is not None and one.completion is not None and one.prompt_ids is not None
        )
        if not one.asked:
            return {
                "completion_ids": one.tokens[before:],
                "logprobs": one.completion.logprobs[before:].tolist(),
                "text": self._encoded("decode", [one.tokens[before:]]),
                "stop_reason": str(one.completion.stop_reason),
            }
        choice = described(
            one.completion, one.asked["tools"], self.tokenizer, one.asked["named"], before
        )
        choice["versions"] = list(map(str, choice["versions"]))
        one.messages += [*one.asked["added"], choice["message"]]
        one.said += [choice["message"]] * bool(one.said)
        return {"prompt_ids": [*one.prompt_ids.tolist(), *one.tokens[:before]], "choices": [choice]}

    def _tell(self, one: Rollout, **answer: Any) -> None:
        self.sessions.respond(one.key, json.dumps(answer))

    def _check_length(self, ids: np.ndarray) -> None:
        if not 0 < len(ids) <= self.max_prompt_tokens:
            raise ShoalError(
                f"a prompt of {len(ids)} tokens: expected 1 to "
                f"sampling.max_prompt_tokens={self.max_prompt_tokens}"
            )

    def _check_ids(self, ids: np.ndarray) -> None:
        """ShoalError for what is no token: an engine would sample on after another one."""
        assert self.tokenizer is not None
        if len(ids) and not 0 <= ids.min() <= ids.max() < self.tokenizer.vocab_size:
            raise ShoalError(
                f"prompt: expected token ids from 0 and below {self.tokenizer.vocab_size}", "prompt"
            )

    def _encoded(self, what: str, value: Any) -> Any:
        assert self.tokenizer is not None
        if what == "encode text":
            return self.tokenizer.encode(value)
        if what == "decode":
            return self.tokenizer.decode(*value)
        return (
            self.tokenizer.render(*value)
            if what == "render"
            else self.tokenizer.encode_prompt(value).tolist()
        )

    def _ended(
        self, one: Rollout, state: Mapping[str, Any], reward: float | None
    ) -> EndedEnvironment | None:
        kind = self._kind(one)
        return EndedEnvironment(kind.name, state, reward) if kind else None

    def _fail(self, one: Rollout, reply: Reply) -> list[HostCommand]:
        """An environment has failed: an error, or the end of its rollout alone."""
        example = one.entry.request.example
        text = (
            f"{example.place or f'data row {example.row}'}, rollout {one.index}, turn {one.turns}: "
            f"{reply.error}"
        )
        if self.section.on_error == "error":
            raise ShoalError(
                f"the environment failed ({text}): fix it, or set environment.on_error=zero or "
                f"skip",
                "environment.on_error",
            )
        one.environment = EndedEnvironment()
        failure = Failure(
            ENVIRONMENT,
            example.row,
            one.index,
            "timed out"
            if reply.kind == "timed out"
            else "died"
            if reply.kind == "died"
            else "raised",
            f"an environment failed: {text}",
        )
        if (
            one.prompt_ids is None
        ):  # a completion has tokens: it is given one turn, on the prompt of its row
            one.failure, one.prompt_ids = failure, one.entry.request.prompt_ids
            one.state = RolloutState.SAMPLING
            return []
        if one.reason is not None:  # it had ended: its reward could not be had
            one.failure, one.state = failure, RolloutState.DONE
            return []
        return self._end(one, StopReason.FAILED, failure)

    # -- what the fleet asks

    def is_ready(self, entry: PendingGroup) -> bool:
        """True once all rollouts of a group have their prompts."""
        return bool(entry.rollouts) and all(one.prompt_ids is not None for one in entry.rollouts)

    def done(self, entry: PendingGroup) -> list[Completion] | None:
        """The completions of a group all of whose rollouts are over; they are then the fleet's."""
        if not entry.rollouts or entry.rollout_states[RolloutState.DONE] < len(entry.rollouts):
            return None
        self._remove(entry)
        return [one.result for one in entry.rollouts]

    @property
    def waits(self) -> bool:
        """True if nothing can go on before a session answers."""
        return bool(self.rollouts) and all(
            one.state is not RolloutState.SAMPLING for one in self.rollouts.values()
        )


def _turn_limit(given: Any, most: int) -> int:
    """After how many tokens a turn is cut, of what was asked for; 0 where the rollout's limit,
    `most`, comes first."""
    if given is None:
        return 0
    if type(given) is not int or given < 1:
        raise ShoalError(f"max_tokens={given!r}: expected an integer from 1, or None", "max_tokens")
    return given if given < most else 0


def _answer(call: ToolCall, text: str) -> dict[str, Any]:
    return {"role": "tool", "name": call.name, "content": text}


def _cut(reply: Reply) -> dict[str, int]:
    """What a message holds beside its text, where environment.result_bytes cut that."""
    return {"truncated_bytes": reply.cut} if reply.cut else {}
