"""Drives rollouts with turns: reads each turn that a host has sampled, runs the tools, environments
or rollout functions that answer it, and builds the messages that continue the rollout at its
host."""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from shoal.chat.tool_calls import ToolCall
from shoal.chat.turns import TOKEN_CHARACTERS, completion_record, encode, turn_format
from shoal.config.sections.task import EnvironmentSection
from shoal.protocols import End, Extend, Message, SampleRequest, Submit
from shoal.records import Branch, Completion, Failure, Prompt, Purpose, ShoalError, StopReason
from shoal.rewards.ended_environment import EndedEnvironment
from shoal.rollout.ledger import (
    IDLE,
    Ledger,
    PendingGroup,
    RolloutState,
    branch_request,
    rollout_requests,
    sample_request,
)
from shoal.runs.metrics import ENVIRONMENT
from shoal.text import failed_call

if TYPE_CHECKING:
    from shoal.chat.tokenizer import Tokenizer
    from shoal.chat.turns import TurnFormat
    from shoal.workers.environments import EnvironmentKind
    from shoal.workers.sessions import Reply, Sessions


class GroupMessage(NamedTuple):
    """A message, and the group whose host it is for."""

    entry: PendingGroup
    message: Message


@dataclass(eq=False)
class Rollout:
    """One of a group's G rollouts, while it is under way. The `TurnDriver` owns it."""

    entry: PendingGroup
    index: int
    # the group's `attempt` when the rollout was opened, so that a later attempt has other sessions
    attempt: int
    prompt: Prompt
    # what the environment's `reset` returned, which `prompt` ends with; None if nothing
    reset_text: str | None = None
    # prompt of the current branch; None until the environment has begun
    prompt_ids: np.ndarray | None = None
    # completion of the current branch, as the host returned it last
    completion: Completion | None = None
    # tokens of the current branch: those read from the host, and context appended since
    tokens: list[int] = field(default_factory=list)
    # earlier branches: (prompt, completion)
    ended: list[tuple[np.ndarray, Completion]] = field(default_factory=list)
    # the last call of the model by an agent (see `serve/agent.py`); {} if there is none
    agent_call: dict[str, Any] = field(default_factory=dict)
    # the messages of that call, followed by the model's answer
    agent_messages: list[dict[str, Any]] = field(default_factory=list)
    # number of turns that were read
    turns: int = 0
    # tokens after which the turn that is being sampled is cut; 0: no limit but the rollout's
    turn_limit: int = 0
    messages: list[dict[str, Any]] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)  # tool calls that the last turn contains
    # tool messages that answer `calls` so far, in the same order
    answers: list[dict[str, Any]] = field(default_factory=list)
    _state: RolloutState = RolloutState.OPENING
    is_over: bool = False  # True if a rollout function asked for more tokens than are left
    reason: StopReason | None = None  # why the rollout ended; None while it goes on
    failure: Failure | None = None  # failure of the environment, if it failed
    # the environment's final state and reward, once it has ended
    environment: EndedEnvironment | None = None

    def __post_init__(self) -> None:
        self.entry.rollout_states[self._state] += 1

    @property
    def state(self) -> RolloutState:
        return self._state

    @state.setter
    def state(self, state: RolloutState) -> None:
        """Sets the state, and updates the group's count of rollouts in each state, which the fleet
        reads many times a second."""
        self.entry.rollout_states[self._state] -= 1
        self.entry.rollout_states[state] += 1
        self._state = state

    @property
    def key(self) -> tuple[int, int, int]:
        """The rollout's id for sessions: (id of the group, attempt, index)."""
        return self.entry.id, self.attempt, self.index

    @property
    def result(self) -> Completion:
        """The finished rollout as one completion: the tokens of all branches, the messages, and why
        the rollout ended. Its `prompt_ids` are None if the first prompt is that of the group. Only
        a rollout that has ended has one."""
        assert (
            self.completion is not None and self.reason is not None and self.prompt_ids is not None
        )
        prompts = []
        completions = []
        for prompt_ids, completion in self.ended:
            prompts.append(prompt_ids)
            completions.append(completion)
        prompts.append(self.prompt_ids)
        completions.append(self.completion)
        own_prompt_ids = None
        if not np.array_equal(prompts[0], self.entry.request.prompt_ids):
            own_prompt_ids = prompts[0]
        return replace(
            join_branches(prompts, completions),
            stop_reason=self.reason,
            waits=False,
            messages=tuple(self.messages),
            prompt_ids=own_prompt_ids,
        )

    @property
    def num_tokens(self) -> int:
        """The number of tokens of all branches, including context."""
        return sum(len(completion) for _, completion in self.ended) + len(self.tokens)


def num_shared_messages(prompt: Any, earlier: Sequence[Mapping[str, Any]]) -> int:
    """Returns how many messages at the beginning of an agent's prompt equal those at the beginning
    of `earlier`, an earlier conversation; 0 if the prompt is a text. Two messages are equal if
    their roles, contents, and names and arguments of tool calls are; other fields, such as ids, do
    not count."""
    if not isinstance(prompt, list):
        return 0
    shared = 0
    for message, earlier_message in zip(prompt, earlier, strict=False):
        if _comparable(message) != _comparable(earlier_message):
            break
        shared += 1
    return shared


def _comparable(message: Any) -> Any:
    """Returns what must be equal for two messages to count as the same: role, content, and the
    names and arguments of tool calls, as a tuple; a message that is no mapping itself. Clients add
    other fields, and change the ids of calls."""
    if not isinstance(message, Mapping):
        return message
    functions = [call["function"] for call in message.get("tool_calls", ())]
    calls = [(function["name"], function["arguments"]) for function in functions]
    return message["role"], message.get("content") or "", calls


def join_branches(prompts: Sequence[np.ndarray], completions: Sequence[Completion]) -> Completion:
    """Returns a rollout's branches as one completion: their tokens one after the other, with a
    `Branch` for each but the first. completions[i] was sampled after prompts[i]. There must be at
    least one. The arrays of `extra` are joined too, by the names of the first, the stop reason is
    the last one's, and other fields are the first one's. A single completion is returned itself."""
    first = completions[0]
    if len(completions) == 1:
        return first

    def joined(name: str) -> np.ndarray:
        return np.concatenate([getattr(completion, name) for completion in completions])

    extra = {}
    for name in first.extra:
        extra[name] = np.concatenate([completion.extra[name] for completion in completions])
    branches: list[Branch] = []
    start = len(first)
    for prompt_ids, completion in zip(prompts[1:], completions[1:], strict=True):
        # `start`: index of the branch's first token among those of all branches
        branches.append(Branch(start, prompt_ids, completion.prompt_experts))
        start += len(completion)
    return replace(
        first,
        token_ids=joined("token_ids"),
        logprobs=joined("logprobs"),
        loss_mask=joined("loss_mask"),
        versions=joined("versions"),
        extra=extra,
        stop_reason=completions[-1].stop_reason,
        branches=tuple(branches),
    )


def with_reset_text(prompt: Prompt, reset_text: str) -> Prompt:
    """Returns a prompt with what an environment's `reset` returned appended, without a separator,
    to the text of its last user message; as a new user message at the end if it has none. A prompt
    that is a text is continued by it. The given prompt stays as it is."""
    if isinstance(prompt, str):
        return prompt + reset_text
    for index in reversed(range(len(prompt))):
        message = prompt[index]
        if message.get("role") == "user":
            messages = list(prompt)
            messages[index] = {**message, "content": f"{message.get('content') or ''}{reset_text}"}
            return messages
    return [*prompt, {"role": "user", "content": reset_text}]


@dataclass
class TurnDriver:
    """All rollouts with turns that are under way, and what continues them. The fleet owns it, calls
    it from one thread, and sends the messages that it returns to the hosts of the groups.

    `sessions` run the tools, environments and rollout functions; they belong to whoever made them.
    `format_of` returns how turns look for the columns of a row; `most` is the most rollouts at
    once. The fleet sets `ledger`, which numbers requests, and `seed`, which their noise depends
    on."""

    sessions: Sessions
    format_of: Callable[[Mapping[str, Any]], TurnFormat]
    section: EnvironmentSection
    max_prompt_tokens: int
    most: int
    tokenizer: Tokenizer | None = None  # needed for rollout functions only
    ledger: Ledger = field(default_factory=Ledger)
    seed: int = 0
    rollouts: dict[Hashable, Rollout] = field(default_factory=dict)
    # number of rollouts under way: of training (True) and of other purposes (False)
    _num_under_way: Counter[bool] = field(default_factory=Counter)

    # -- a group begins

    def open(self, entries: Sequence[PendingGroup]) -> None:
        """Opens the rollouts and environments of as many groups as may be under way at once:
        training's groups first, in order, then an evaluation's. At least one group of each purpose
        may always start. The limit keeps an evaluation with many questions from holding up
        training. Sets `rollouts` of the entries that are opened; skips entries that have some, and
        leaves the others, for a later call. `entries`: waiting groups, in the order of the
        requests. ShoalError for a column of a row that cannot be sent to another process."""
        going = self._num_under_way
        # purposes (is it training?) for which no more groups may start, so that no group overtakes
        # an older one
        full = set[bool]()
        training = [entry for entry in entries if entry.request.purpose is Purpose.TRAIN]
        others = [entry for entry in entries if entry.request.purpose is not Purpose.TRAIN]
        for entry in training + others:
            size = entry.request.num_completions
            is_training = entry.request.purpose is Purpose.TRAIN
            if entry.rollouts or is_training in full:
                continue
            if going[is_training] and going.total() + size > self.most:
                full.add(is_training)
                continue
            going[is_training] += size
            prompt = entry.request.example.prompt
            row = {**entry.request.example.columns, "prompt": prompt}
            entry.rollouts = [Rollout(entry, index, entry.attempt, prompt) for index in range(size)]
            for rollout in entry.rollouts:
                self.rollouts[rollout.key] = rollout
                self.sessions.open(rollout.key, dict(row))

    def requests(self, entry: PendingGroup) -> list[SampleRequest]:
        """Returns the requests that a host gets for a group whose rollouts all have their prompts
        (`is_ready`): one for all rollouts, or if the prompts differ one for each, with ids that the
        ledger gives out now."""
        # none is None, because the group is ready
        prompts = [
            rollout.prompt_ids for rollout in entry.rollouts if rollout.prompt_ids is not None
        ]
        return rollout_requests(
            sample_request(entry.request, entry.id, self.seed),
            prompts,
            lambda: self.ledger.new_request_id(entry),
            [rollout.turn_limit for rollout in entry.rollouts],
        )

    def forget(self, entries: Sequence[PendingGroup]) -> None:
        """Gives up the rollouts of groups whose host is lost, and drops their sessions. The groups
        begin again later, in new environments. A group without rollouts is left alone."""
        for entry in entries:
            for rollout in entry.rollouts:
                self.sessions.drop(rollout.key)
            self._remove(entry)
            entry.rollouts = []
            entry.rollout_states.clear()

    def _remove(self, entry: PendingGroup) -> None:
        """Removes a group's rollouts from those that are under way."""
        for rollout in entry.rollouts:
            del self.rollouts[rollout.key]
        self._num_under_way[entry.request.purpose is Purpose.TRAIN] -= len(entry.rollouts)

    def _set_first_prompt(self, rollout: Rollout, reset_text: str | None) -> None:
        """Sets a rollout's prompt once its environment has been reset, and lets it be sampled.
        `reset_text`: what `reset` returned, which is appended to the row's prompt; None if nothing.
        ShoalError if the prompt gets too long, or the chat template refuses it."""
        request = rollout.entry.request
        ids = request.prompt_ids
        if reset_text is not None:
            rollout.prompt = with_reset_text(rollout.prompt, reset_text)
            rollout.reset_text = reset_text
            size = f"{len(reset_text)} characters"
            # more characters than this are too long in any encoding, so they are not encoded
            is_long = len(reset_text) > TOKEN_CHARACTERS * self.max_prompt_tokens
            if not is_long:
                ids = self._format(rollout).encode_prompt(self._prompt_to_encode(rollout))
                size = f"{len(ids)} tokens"
                is_long = len(ids) > self.max_prompt_tokens
            if is_long:
                raise ShoalError(
                    f"row {request.example.row}: with what its environment's reset returned, the "
                    f"prompt has {size}; raise sampling.max_prompt_tokens={self.max_prompt_tokens}",
                    "sampling.max_prompt_tokens",
                )
        rollout.prompt_ids = ids
        rollout.state = RolloutState.SAMPLING

    def _prompt_to_encode(self, rollout: Rollout) -> Prompt:
        """Returns the rollout's prompt for the tokenizer, made from the row's; `rollout.prompt`
        itself is not escaped: the text that `reset` returned is escaped, so that what spells a
        special token in it is encoded as plain text."""
        if rollout.reset_text is None:
            return rollout.prompt
        message = self._format(rollout).split_special_tokens(
            {"role": "user", "content": rollout.reset_text}
        )
        return with_reset_text(rollout.entry.request.example.prompt, message["content"])

    def _format(self, rollout: Rollout) -> TurnFormat:
        """Returns how the turns of a rollout look."""
        return self.format_of(rollout.entry.request.example.columns)

    def _kind(self, rollout: Rollout) -> EnvironmentKind | None:
        """Returns the kind of environment that a rollout has; None if it has none."""
        return self.sessions.kind_of(rollout.entry.request.example.columns)

    # -- what a host answers

    def read_turn(self, entry: PendingGroup, completion: Completion) -> list[GroupMessage]:
        """Reads a turn that a host has returned, and passes it to the tools, environment or rollout
        function that must answer; ends the rollout if none must, or `max_turns` are reached
        (rollout functions have no such limit). Returns messages for the host: [] unless the rollout
        ends or continues at once (after tool calls that are wrong). `completion`: the rollout's
        current branch, with all its tokens so far; they are not checked here (`wrong_turns` does).
        Unless the model is called by a rollout function, adds the turn to the rollout's messages.
        If the environment's `reset` had failed, the rollout ends with that failure."""
        rollout = entry.rollouts[completion.index]
        kind = self._kind(rollout)
        before = len(rollout.tokens)
        tokens = completion.token_ids.tolist()
        rollout.completion = completion
        rollout.tokens = tokens
        rollout.turns += 1
        calls: list[ToolCall] = []
        if not (kind and kind.is_rollout_function):
            # the tokens of this turn alone
            message, calls = self._format(rollout).read(tokens[before:])
            rollout.messages.append(message)
        rollout.calls = calls
        rollout.answers = []
        if rollout.failure:  # the environment's reset had failed
            return self._end_rollout(rollout, StopReason.FAILED, rollout.failure)
        if kind and kind.is_rollout_function:
            rollout.state = RolloutState.ACTING
            self._respond(rollout, {"value": self._turn_result(rollout, before)})
            return []
        if not completion.waits or not (calls or (kind and kind.responds)):
            return self._end_rollout(rollout, completion.stop_reason)
        if rollout.turns == self.section.max_turns:
            return self._end_rollout(rollout, StopReason.MAX_TURNS)
        rollout.state = RolloutState.ACTING
        if calls:
            return self._start_next_tool_call(rollout)
        # no tool was called, so the environment answers
        self.sessions.respond(rollout.key, str(rollout.messages[-1].get("content") or ""))
        return []

    def wrong_turns(self, entry: PendingGroup, completions: Sequence[Completion]) -> str:
        """Returns why a host's answer cannot be the next turns of the group's rollouts, as a text
        ("a turn of 9 tokens, expected at most 4"), or "" if it can."""
        for completion in completions:
            rollout = entry.rollouts[completion.index]
            if rollout.state in IDLE:
                return "a turn of a rollout that waits for its tools or is over"
            num_before = len(rollout.tokens)
            num_new = len(completion) - num_before
            if completion.token_ids[:num_before].tolist() != rollout.tokens or num_new == 0:
                return "a turn that does not go on from the tokens before it"
            if rollout.turn_limit and num_new > rollout.turn_limit:
                return f"a turn of {num_new} tokens, expected at most {rollout.turn_limit}"
        return ""

    def _start_next_tool_call(self, rollout: Rollout) -> list[GroupMessage]:
        """Starts the first tool call of the rollout's last turn that has no answer yet, and returns
        []; a call that could not be parsed is answered with its error instead. Calls run one after
        the other. Once all calls are answered, returns the messages that continue or end the
        rollout."""
        for call in rollout.calls[len(rollout.answers) :]:
            if not call.error:
                self.sessions.call(rollout.key, call.name, call.arguments)
                return []
            rollout.answers.append(_answer(call, failed_call(call.error)))
        return self._continue_with_messages(rollout, rollout.answers)

    def _continue_with_messages(
        self, rollout: Rollout, replies: list[dict[str, Any]]
    ) -> list[GroupMessage]:
        """Continues a rollout after the messages of tools or of an environment. If these and one
        more token do not fit, drops them and ends the rollout (TRL's rule). Returns the messages
        for the host.

        With environment.history=template the whole history is rendered again, which may begin a new
        branch; else, or if the template refuses this history, the messages are appended to the
        tokens so far."""
        assert rollout.completion is not None
        history_ids = None
        if self.section.history == "template":
            # The model wrote the history: its template may refuse it, as Llama 3.1's does two calls
            # in one turn.
            with contextlib.suppress(ShoalError):
                history_ids = self._encode_history(rollout, replies)
        if history_ids is not None:
            host_messages = self._continue_with_prompt(rollout, history_ids)
        else:
            last_token = int(rollout.completion.token_ids[-1])
            context = self._format(rollout).encode_context(replies, rollout.calls, last_token)
            host_messages = self._extend_with_context(rollout, context)
        if not host_messages:
            return self._end_rollout(rollout, StopReason.LENGTH)
        rollout.messages += replies
        return host_messages

    def _encode_history(self, rollout: Rollout, replies: list[dict[str, Any]]) -> np.ndarray:
        """Returns the token ids of a rollout's whole history with `replies`, as the chat template
        renders it, int32[T]. ShoalError if the template refuses it."""
        form = self._format(rollout)
        prompt = self._prompt_to_encode(rollout)
        assert not isinstance(prompt, str)
        # Everything after the prompt was said by the model or its environment.
        history = list(prompt)
        for message in rollout.messages + replies:
            if message["role"] != "assistant":
                message = form.split_special_tokens(message)
            history.append(message)
        return form.encode_prompt(history)

    def _continue_with_prompt(self, rollout: Rollout, ids: np.ndarray) -> list[GroupMessage]:
        """Continues a rollout with a turn after the prompt `ids`, and returns the messages for the
        host: an `Extend` if `ids` begin with the prompt and tokens of the current branch, else a
        `Submit` that begins a new branch (after an `End` of the current one). Returns [], and
        changes nothing, if they do not fit."""
        assert rollout.completion is not None and rollout.prompt_ids is not None
        num_in_slot = self._num_tokens_in_slot(rollout, ids)
        if num_in_slot:
            return self._extend_with_context(rollout, ids[num_in_slot:].tolist())
        used = rollout.num_tokens
        if not 0 < len(ids) <= self.max_prompt_tokens:
            return []
        if used >= rollout.entry.request.params.max_tokens:
            return []
        messages = self._free_slot(rollout)
        rollout.ended.append((rollout.prompt_ids, rollout.completion))
        rollout.prompt_ids = ids
        rollout.tokens = []
        rollout.state = RolloutState.SAMPLING
        request = branch_request(
            sample_request(rollout.entry.request, rollout.entry.id, self.seed),
            self.ledger.new_request_id(rollout.entry),
            rollout.index,
            prompt_ids=ids,
            branch=len(rollout.ended),
            used=used,
            turn_limit=rollout.turn_limit,
        )
        messages.append(GroupMessage(rollout.entry, Submit([request])))
        return messages

    def _free_slot(self, rollout: Rollout) -> list[GroupMessage]:
        """Returns the `End` that frees the slot of a rollout's completion, as a list; [] if the
        completion has no slot, because the host has ended it itself."""
        assert rollout.completion is not None
        if not rollout.completion.waits:
            return []
        end = End(rollout.completion.request_id, rollout.index)
        return [GroupMessage(rollout.entry, end)]

    def _num_tokens_in_slot(self, rollout: Rollout, ids: np.ndarray) -> int:
        """Returns the number of tokens of the current branch (prompt and completion) if its slot
        can be extended to `ids`, else 0. It can if the host still has the slot and `ids` begin with
        these tokens, followed by at least one more; none is needed after a turn that was cut at its
        limit."""
        assert rollout.completion is not None and rollout.prompt_ids is not None
        if not rollout.completion.waits:
            return 0
        held = np.concatenate([rollout.prompt_ids, rollout.completion.token_ids])
        least = len(held)
        if rollout.completion.stop_reason is not StopReason.LENGTH:
            least += 1
        if len(ids) < least or not np.array_equal(ids[: len(held)], held):
            return 0
        return len(held)

    def _extend_with_context(self, rollout: Rollout, context: list[int]) -> list[GroupMessage]:
        """Adds tokens of context to a rollout's current branch, and returns the `Extend` that
        continues it after them, as a list; [], and nothing is added, if they and one more token do
        not fit."""
        assert rollout.completion is not None
        if rollout.num_tokens + len(context) >= rollout.entry.request.params.max_tokens:
            return []
        rollout.tokens += context
        rollout.state = RolloutState.SAMPLING
        extend = Extend(rollout.completion.request_id, rollout.index, context, rollout.turn_limit)
        return [GroupMessage(rollout.entry, extend)]

    def _end_rollout(
        self, rollout: Rollout, reason: StopReason, failure: Failure | None = None
    ) -> list[GroupMessage]:
        """Ends a rollout for a reason. Without a `failure`, asks the environment for its reward,
        and the rollout is done once that has come; with one, the rollout is done. Returns the
        message that frees the rollout's slot at its host, as a list; [] if the host has ended the
        completion itself. A `failure` of before is replaced, also by None."""
        assert rollout.completion is not None
        rollout.reason = reason
        rollout.failure = failure
        if failure:
            rollout.state = RolloutState.DONE
        else:
            rollout.state = RolloutState.ENDED
            self.sessions.end(rollout.key)
        return self._free_slot(rollout)

    # -- what sessions answer

    def collect(self, seconds: float = 0.0) -> list[GroupMessage]:
        """Handles all replies of tools, environments and rollout functions that have come, and
        waits up to `seconds` for the first. Returns the messages that continue or end their
        rollouts at the hosts. Replies for rollouts that are forgotten are ignored. ShoalError if an
        environment failed and environment.on_error=error."""
        messages: list[GroupMessage] = []
        for reply in self.sessions.collect(seconds):
            rollout = self.rollouts.get(reply.rollout)
            if rollout is not None:
                messages += self._take_reply(rollout, reply)
        return messages

    def _take_reply(self, rollout: Rollout, reply: Reply) -> list[GroupMessage]:
        """Handles one reply of a tool, environment or rollout function, by its `what`: "open",
        "call", "respond" or "end"; one that is `fatal` is a failure of the environment, whatever it
        answers. Every reply of a rollout function but that to "end" is its next request. Returns
        the messages that continue or end the rollout at its host; [] if the host has nothing to do
        yet. A reward for the turn is added to that of the rollout's last message."""
        if reply.fatal:
            return self._handle_failure(rollout, reply)
        kind = self._kind(rollout)
        if reply.reward is not None and rollout.messages:
            # A turn with several calls is paid for each.
            turn_reward = rollout.messages[-1].get("reward", 0.0) + reply.reward
            rollout.messages[-1] = {**rollout.messages[-1], "reward": turn_reward}
        if kind and kind.is_rollout_function and reply.what != "end":
            # The value is the function's request as JSON; None once the function has returned.
            return self._do_requested(rollout, reply.value and json.loads(reply.value))
        if reply.what == "open":
            try:
                self._set_first_prompt(rollout, reply.value)
            # what `reset` returned is too long, or the template refuses it
            except ShoalError as error:
                self.sessions.drop(rollout.key)
                return self._handle_failure(
                    rollout, replace(reply, kind="raised", error=str(error))
                )
        elif reply.what == "call":
            rollout.answers.append(
                # calls are answered in order, so this is the first without an answer
                _answer(rollout.calls[len(rollout.answers)], reply.value) | _cut(reply)
            )
            return self._start_next_tool_call(rollout)
        elif reply.what == "respond":
            # the environment says that the rollout is over
            if reply.value is None:
                return self._end_rollout(rollout, StopReason.ENVIRONMENT)
            return self._continue_with_messages(
                rollout, [{"role": "user", "content": reply.value} | _cut(reply)]
            )
        else:  # "end"
            rollout.environment = self._ended_environment(rollout, **reply.value)
            rollout.state = RolloutState.DONE
        return []

    # -- what a rollout function asks for

    def _do_requested(
        self, rollout: Rollout, requested: dict[str, Any] | None
    ) -> list[GroupMessage]:
        """Does what a rollout function (or an agent) requests: to sample after token ids
        ("sample"), to call the model with messages ("call"), or to encode or decode, which is
        answered at once. Returns the messages for the host. `requested`: {"what": one of these,
        "value": its arguments, for "sample" and "call" a dict with "prompt" and "max_tokens"}; None
        once the function has returned, and the rollout then ends.

        The first request to sample only sets the rollout's prompt, because the group is submitted
        when all its rollouts have one. Faults of the request are answered to the function."""
        if requested is None:
            assert rollout.completion is not None
            reason = rollout.completion.stop_reason
            if rollout.is_over:
                reason = StopReason.LENGTH
            return self._end_rollout(rollout, reason)
        call_before = rollout.agent_call
        messages_before = rollout.agent_messages
        try:
            what = requested["what"]
            if what not in ("sample", "call"):
                value = self._use_tokenizer(requested["what"], requested["value"])
                self._respond(rollout, {"value": value})
                return []
            max_tokens = rollout.entry.request.params.max_tokens
            turn_limit = _turn_limit(requested["value"]["max_tokens"], max_tokens)
            if what == "call":
                ids = self._prompt_ids_of_call(rollout, requested["value"])
            else:
                ids = np.array(requested["value"]["prompt"], np.int32)
                self._check_ids(ids)
            rollout.turn_limit = turn_limit
            if rollout.completion is None:
                self._check_length(ids)
                rollout.prompt_ids = ids
                rollout.state = RolloutState.SAMPLING
                return []
            messages = self._continue_with_prompt(rollout, ids)
            if messages:
                return messages
            # It does not fit.
            if what == "call" and not self._num_tokens_in_slot(rollout, ids):
                # The agent's other prompts, such as a sub-agent's, may be shorter, so the rollout
                # is not over.
                if rollout.num_tokens < max_tokens:
                    self._check_length(ids)
            rollout.is_over = True
            over = (
                "no token is left (sampling.max_completion_tokens), or the prompt is too long "
                "(sampling.max_prompt_tokens)"
            )
            self._respond(rollout, {"over": over})
        except (ShoalError, TypeError, ValueError, OverflowError) as error:
            # a faulty call leaves nothing behind
            rollout.agent_call = call_before
            rollout.agent_messages = messages_before
            self._respond(rollout, {"error": str(error)})
        return []

    def _prompt_ids_of_call(self, rollout: Rollout, requested: dict[str, Any]) -> np.ndarray:
        """Returns the token ids of the prompt of an agent's call, int32[T]. If the call only adds
        messages to the conversation so far, they begin with the tokens of the rollout's current
        branch. `requested`: the call, with "prompt" and "tools" (see `AgentSampler.sample`); gets
        "added", its messages that the rollout does not have yet. Stores the call in
        `rollout.agent_call` and `rollout.agent_messages`. ShoalError if the call cannot be
        encoded."""
        assert self.tokenizer is not None
        prompt = requested["prompt"]
        tools = requested["tools"]
        num_shared = num_shared_messages(prompt, rollout.agent_messages)
        # messages; else a text or a list of token ids
        is_chat = isinstance(prompt, list) and isinstance(prompt[0], dict)
        added = prompt[num_shared:] if is_chat and rollout.turns else []
        requested["added"] = added
        calls: list[ToolCall] = []
        # True if the call repeats the whole conversation, with the same tools, and adds messages.
        only_adds = bool(added) and num_shared == len(rollout.agent_messages) > 0
        only_adds = (
            only_adds and tools == rollout.agent_call["tools"] and self.section.history == "keep"
        )
        if only_adds:
            # Context is encoded for messages of the user, or for one answer to each tool call.
            for call in rollout.agent_messages[-1].get("tool_calls", ()):
                # only the names and ids count for the context
                calls.append(ToolCall(call["function"]["name"], {}, id=call.get("id", "")))
            roles = [message["role"] for message in added]
            only_adds = set(roles) == {"user"} or roles == ["tool"] * len(calls)
        if only_adds:
            assert rollout.completion is not None and rollout.prompt_ids is not None
            form = turn_format(self.tokenizer, json.dumps(tools))
            last_token = int(rollout.completion.token_ids[-1])
            context = form.encode_context(added, calls, last_token)
            ids = np.concatenate([rollout.prompt_ids, rollout.completion.token_ids, context])
        else:
            # 2**31: no limit of the length here; `_continue_with_prompt` and `_check_length` have
            # it
            ids = encode(prompt, tools, self.tokenizer, 2**31)
            self._check_ids(ids)  # checked before anything of the call is stored
            # turns are read with this format later: an error here is reported to the agent, there
            # it would end the run
            if tools:
                turn_format(self.tokenizer, json.dumps(tools))
        rollout.agent_call = requested
        rollout.agent_messages = list(prompt) if is_chat else []
        return ids.astype(np.int32)

    def _turn_result(self, rollout: Rollout, before: int) -> dict[str, Any]:
        """Returns what a rollout function or an agent gets for a turn, whose tokens begin at index
        `before` of the current branch. A function gets `completion_ids`, `logprobs`, `text` and
        `stop_reason`; an agent `prompt_ids` and `choices`, a list of one choice as OpenAI's API has
        it. For an agent, also adds the messages of its call and of the model's answer to the
        rollout."""
        assert (
            self.tokenizer is not None
            and rollout.completion is not None
            and rollout.prompt_ids is not None
        )
        # a rollout function, not an agent
        if not rollout.agent_call:
            return {
                "completion_ids": rollout.tokens[before:],
                "logprobs": rollout.completion.logprobs[before:].tolist(),
                "text": self._use_tokenizer("decode", [rollout.tokens[before:]]),
                "stop_reason": str(rollout.completion.stop_reason),
            }
        choice = completion_record(
            rollout.completion,
            rollout.agent_call["tools"],
            self.tokenizer,
            rollout.agent_call["named"],
            before,
        )
        # texts, like the names of weights at other addresses
        choice["versions"] = [str(version) for version in choice["versions"]]
        rollout.messages += rollout.agent_call["added"]
        rollout.messages.append(choice["message"])
        if rollout.agent_messages:
            rollout.agent_messages.append(choice["message"])
        prompt_ids = rollout.prompt_ids.tolist() + rollout.tokens[:before]
        return {"prompt_ids": prompt_ids, "choices": [choice]}

    def _respond(self, rollout: Rollout, answer: Mapping[str, Any]) -> None:
        """Answers a rollout function with `answer`, which has one key: "value" (the result of its
        request), "error" (a text, for a faulty request) or "over" (a text that says why no more can
        be sampled). Does not wait."""
        self.sessions.respond(rollout.key, json.dumps(answer))

    def _check_length(self, ids: np.ndarray) -> None:
        """Raises ShoalError if a prompt is empty or has more than `max_prompt_tokens` ids."""
        if not 0 < len(ids) <= self.max_prompt_tokens:
            raise ShoalError(
                f"a prompt of {len(ids)} tokens: expected 1 to "
                f"sampling.max_prompt_tokens={self.max_prompt_tokens}"
            )

    def _check_ids(self, ids: np.ndarray) -> None:
        """Raises ShoalError if an id is outside the vocabulary: an engine would read another token
        instead, without an error. No ids at all are accepted."""
        assert self.tokenizer is not None
        if len(ids) and not 0 <= ids.min() <= ids.max() < self.tokenizer.vocab_size:
            raise ShoalError(
                f"prompt: expected token ids from 0 and below {self.tokenizer.vocab_size}", "prompt"
            )

    def _use_tokenizer(self, what: str, value: Any) -> Any:
        """Returns what a rollout function requests of the tokenizer: the token ids of a text
        ("encode text") or of a prompt (any other `what`), as a list, or the text of ids ("decode")
        or messages ("render"). `value`: the text or prompt; for "decode" and "render" the list of
        the arguments of the tokenizer's method."""
        assert self.tokenizer is not None
        if what == "encode text":
            return self.tokenizer.encode(value)
        if what == "decode":
            return self.tokenizer.decode(*value)
        if what == "render":
            return self.tokenizer.render(*value)
        return self.tokenizer.encode_prompt(value).tolist()

    def _ended_environment(
        self, rollout: Rollout, state: Mapping[str, Any], reward: float | None
    ) -> EndedEnvironment | None:
        """Returns an environment's name, final `state` and `reward` (None: it gave none); None if
        the rollout has no environment."""
        kind = self._kind(rollout)
        return EndedEnvironment(kind.name, state, reward) if kind else None

    def _handle_failure(self, rollout: Rollout, reply: Reply) -> list[GroupMessage]:
        """Handles an environment that failed: raises ShoalError if environment.on_error=error, else
        ends this rollout alone, with a `Failure`. A rollout that has no prompt yet first samples
        one turn, because a completion must have tokens. Returns the messages for the host."""
        example = rollout.entry.request.example
        row = example.place or f"data row {example.row}"
        text = f"{row}, rollout {rollout.index}, turn {rollout.turns}: {reply.error}"
        if self.section.on_error == "error":
            raise ShoalError(
                f"the environment failed ({text}): fix it, or set environment.on_error=zero or "
                f"skip",
                "environment.on_error",
            )
        # without a name, state or reward
        rollout.environment = EndedEnvironment()
        # also for any other kind of `reply`
        reason = "raised"
        if reply.kind == "timed out" or reply.kind == "died":
            reason = reply.kind
        message = f"an environment failed: {text}"
        failure = Failure(ENVIRONMENT, example.row, rollout.index, reason, message)
        if rollout.prompt_ids is None:
            # A completion must have tokens, so the rollout samples one turn after its row's prompt.
            rollout.failure = failure
            rollout.prompt_ids = rollout.entry.request.prompt_ids
            rollout.state = RolloutState.SAMPLING
            return []
        if rollout.reason is not None:  # the rollout had ended; only its reward is missing
            rollout.failure = failure
            rollout.state = RolloutState.DONE
            return []
        return self._end_rollout(rollout, StopReason.FAILED, failure)

    # -- what the fleet asks

    def is_ready(self, entry: PendingGroup) -> bool:
        """True if the rollouts of a group are opened and all have their prompts; False if none was
        opened."""
        if not entry.rollouts:
            return False
        return all(rollout.prompt_ids is not None for rollout in entry.rollouts)

    def finished_completions(self, entry: PendingGroup) -> list[Completion] | None:
        """If all rollouts of a group are done, stops counting them as under way and returns their
        completions, in the order of their index; else returns None, also if no rollout was opened.
        Each completion has the tokens of all its branches."""
        if not entry.rollouts or entry.rollout_states[RolloutState.DONE] < len(entry.rollouts):
            return None
        self._remove(entry)
        return [rollout.result for rollout in entry.rollouts]

    @property
    def waits(self) -> bool:
        """True if there are rollouts and no host has anything to do for any of them until a session
        answers."""
        return bool(self.rollouts) and all(
            rollout.state is not RolloutState.SAMPLING for rollout in self.rollouts.values()
        )


def _turn_limit(given: Any, most: int) -> int:
    """Returns the number of tokens after which a turn is cut, from the `max_tokens` that a rollout
    function passed; 0 for no limit, if that is None or at least `most`, the rollout's own limit.
    ShoalError if it is neither None nor a positive integer."""
    if given is None:
        return 0
    # not `isinstance`, for which True is an integer too
    if type(given) is not int or given < 1:
        raise ShoalError(f"max_tokens={given!r}: expected an integer from 1, or None", "max_tokens")
    return given if given < most else 0


def _answer(call: ToolCall, text: str) -> dict[str, Any]:
    """Returns the message that answers a tool call, with the call's id if it has one."""
    answer = {"role": "tool", "name": call.name, "content": text}
    return {**answer, "tool_call_id": call.id} if call.id else answer


def _cut(reply: Reply) -> dict[str, int]:
    """Returns the extra fields of a message whose text was cut at environment.result_bytes: how
    many bytes are missing; {} if none."""
    return {"truncated_bytes": reply.cut} if reply.cut else {}
