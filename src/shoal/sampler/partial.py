"""Requests that are being sampled: the tokens of their completions so far, and where stop strings
or limits end them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import NamedTuple

import jax
import numpy as np

from shoal.protocols import SampleRequest
from shoal.records import Completion, ShoalError, StopReason
from shoal.sampler.programs import DECODE_CHUNK, FEED, SampledTokens

Decode = Callable[[Sequence[int]], str]

SLACK = 4
"""Number of characters by which the text of a few tokens may differ at either end from the same
part of the whole text: a character that is cut decodes to up to three replacement characters, and
some decoders drop a leading space."""


class Phase(Enum):
    """What happens next to a completion.

                            a decode begins
            +--------------------------------------------------+
            v                                                  |
        SAMPLING ---a turn ends---> WAITING ---extend-----> FEEDING
            |                         |  |                     ^
            | the last one ends       |  +------extend----+    | its state is there again
            v                         |                   v    |
          OVER <--------end-----------+               RECOMPUTING

    It is RECOMPUTING only if the model has recurrent states, after a turn that the host has cut:
    the device may have sampled beyond it. Keys of dropped tokens are written over, but a state
    cannot go back, so it is computed again from the first token on."""

    SAMPLING = auto()  # decodes sample its tokens, after the rest of its context
    WAITING = auto()  # its turn has ended: it is to be extended or ended
    RECOMPUTING = auto()  # feeds compute its tokens but the last again
    FEEDING = auto()  # it has been extended: feeds compute the context, if that is long
    OVER = auto()


@dataclass
class PartialCompletion:
    """A completion that is being sampled: its tokens so far, and its `Phase`.

    All lists with a value per token have the length of `tokens`, except that `support_ids` is empty
    if they are not recorded. Its `ActiveRequest` owns it."""

    limit: int  # most tokens of the completion, including context
    # tokens after which the current turn is cut; 0: no limit but the completion's
    turn_limit: int = 0
    turn_start: int = 0  # number of tokens before the current turn, including context
    tokens: list[int] = field(default_factory=list)
    # per token: True if the model sampled it, False if it is context
    is_sampled: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    # int32[K] per token; empty if they are not recorded
    support_ids: list[np.ndarray] = field(default_factory=list)
    # The experts of all tokens but the last, which has not been computed: arrays [tokens, layers
    # with experts, k] to be joined; empty if they are not recorded.
    experts: list[np.ndarray] = field(default_factory=list)
    # why the completion, or its last turn, ended; None while it is sampled
    reason: StopReason | None = None
    phase: Phase = Phase.SAMPLING
    num_recomputed: int = 0  # while it is RECOMPUTING: of so many tokens
    context: list[int] = field(default_factory=list)  # context to be appended, not yet in `tokens`

    @property
    def waits(self) -> bool:
        """True if the turn has ended and the completion is to be extended or ended next."""
        return self.phase is Phase.WAITING

    @property
    def needs_feed(self) -> bool:
        """True if the next decode has to wait for a feed of this completion. The rest of a context,
        shorter than FEED, is left to the decode."""
        has_long_context = self.phase is Phase.FEEDING and len(self.context) >= FEED
        return has_long_context or self.phase is Phase.RECOMPUTING

    @property
    def turn_end(self) -> int:
        """The number of tokens at which the current turn is cut, at the latest."""
        if not self.turn_limit:
            return self.limit
        return min(self.limit, self.turn_start + self.turn_limit)

    def most_keys_after(self, decodes_in_flight: int) -> int:
        """Returns the most keys that the completion may have in a cache once the decodes in flight
        and the next decode have ended; 0 if it is over. `decodes_in_flight`: number of decodes that
        have started and sample this completion."""
        if self.phase is Phase.OVER:
            return 0
        num_keys = max(1, len(self.tokens))
        if self.phase is not Phase.WAITING:
            num_keys += DECODE_CHUNK * (1 + decodes_in_flight)
        if self.phase in (Phase.RECOMPUTING, Phase.FEEDING):
            # the part of the context that feeds compute before the next decode
            num_keys += len(self.context) // FEED * FEED
        return min(self.limit, num_keys) - 1  # the last token has no key yet

    def extend(self, context: Sequence[int], turn_limit: int = 0, has_states: bool = False) -> None:
        """Continues a completion whose turn has ended, after tokens of context, with a turn of at
        most `turn_limit` tokens (0: no limit), which counts from the end of the context. `context`
        may be empty only after a turn that was cut. `has_states` is whether the model has recurrent
        states (see `Phase`). ValueError if the completion does not wait, or if the context and one
        more token do not fit within `limit`."""
        if not self.waits:
            raise ValueError("only a completion whose turn has ended can be extended")
        # after an end token a turn begins with context; a turn that was cut may simply go on
        least = 0 if self.reason is StopReason.LENGTH else 1
        if not least <= len(context) < self.limit - len(self.tokens):
            raise ValueError(
                f"{len(context)} tokens of context after {len(self.tokens)}: expected at least "
                f"{least}, and room for one more within {self.limit}"
            )
        self.context = list(context)
        # The host has cut every turn that did not end with an end-of-sequence token.
        was_cut = self.reason is not StopReason.EOS
        self.phase = Phase.RECOMPUTING if has_states and was_cut else Phase.FEEDING
        self.num_recomputed = 0
        self.reason = None
        self.turn_limit = turn_limit
        self.turn_start = len(self.tokens) + len(context)

    def end_turn(self, reason: StopReason, has_turns: bool) -> None:
        """Notes that the current turn has ended, and why. The completion then waits to be extended
        if its request has turns (`has_turns`), the turn ended regularly (with an end token, a stop
        string or at its limit; not cancelled) and one more turn fits; otherwise it is over."""
        self.reason = reason
        has_room = len(self.tokens) < self.limit - 1  # for one token of context, and one after it
        is_turn = reason in (StopReason.EOS, StopReason.STOP) or len(self.tokens) == self.turn_end
        may_go_on = has_turns and has_room and is_turn
        self.phase = Phase.WAITING if may_go_on else Phase.OVER

    def end(self) -> None:
        """Ends a completion whose turn has ended. Changes nothing if it is still being sampled."""
        if self.phase is Phase.WAITING:
            self.phase = Phase.OVER

    def cancel(self) -> None:
        """Ends the completion, whatever its phase."""
        self.reason = self.reason or StopReason.CANCELLED
        self.phase = Phase.OVER

    def begin_decode(self) -> None:
        """Notes that a decode has begun that samples the completion."""
        self.phase = Phase.SAMPLING

    def recompute(self, count: int) -> tuple[int, list[int]]:
        """Returns (index of the first, tokens) of the next tokens to be computed again, at most
        `count`, and counts them as computed; no token if there is only one, whose state is the
        prompt's. Only for a completion that is RECOMPUTING, until the last of these tokens."""
        start = self.num_recomputed
        last = len(self.tokens) - 1
        self.num_recomputed = min(start + count, last)
        if self.num_recomputed == last:
            self.phase = Phase.FEEDING
        return start, self.tokens[start : self.num_recomputed]

    def feed(self, count: int, version: int, max_support: int) -> list[int]:
        """Moves the first `count` tokens of `context` to `tokens`, as tokens of `version` with
        log-prob 0. `context` must have that many, and `tokens` at least one: neither is checked.
        Returns the `count` tokens whose keys are to be computed next: the last token before the
        context, which has no key yet, and the moved tokens but the last. `max_support`: ids per
        token in `support_ids`, all 0 for these tokens; 0: none are recorded."""
        fed = self.context[:count]
        self.context = self.context[count:]
        inputs = self.tokens[-1:] + fed[:-1]
        self.tokens += fed
        self.is_sampled += [False] * count
        self.logprobs += [0.0] * count
        self.versions += [version] * count
        if max_support:
            self.support_ids += [np.zeros(max_support, np.int32)] * count
        return inputs

    def add(
        self,
        step: SampledTokens,
        position: int,
        slot: int,
        version: int,
        request: SampleRequest,
        decode: Decode | None,
    ) -> int:
        """Adds the tokens of one slot of a step: first those of `context` that the step was given,
        then those that it sampled. Ends the turn if they complete a stop string, reach its limit,
        or end with an end-of-sequence token. Returns how many sampled tokens were added and kept.
        `step` is on the host, and `position` is the row's in its arrays; `version` is that of the
        weights. `decode` turns token ids into text; None only if the request has no stop strings.

        The device knows only the completion's limit. Tokens that it sampled beyond the limit of the
        turn, or after a stop string, are dropped here."""
        count = int(step.count[position, slot])  # tokens of the slot that are kept
        stop = request.params.stop
        reason = None
        # A decode appends what remains of the context before it samples.
        forced = min(count, len(self.context))
        del self.context[:forced]
        self.is_sampled.extend([False] * forced + [True] * (count - forced))
        self.tokens.extend(step.token[:count, position, slot].tolist())
        self.logprobs.extend(step.logprob[:count, position, slot].tolist())
        self.versions.extend([version] * count)
        if step.support_ids is not None:
            self.support_ids.extend(step.support_ids[:count, position, slot])
        if step.experts is not None:
            # A copy, so that the step's array, which has all slots, is not kept.
            self.experts.append(step.experts[:count, position, slot].copy())
        surplus = max(0, len(self.tokens) - self.turn_end)
        if surplus:
            self._cut(self.turn_end)
            count -= surplus
        # an end token beyond the limit is dropped like the others
        elif step.eos[position, slot]:
            reason = StopReason.EOS
        if reason is None and len(self.tokens) == self.turn_end:
            reason = StopReason.LENGTH
        # also after an end token or at the limit: a stop string goes before them as the reason
        if stop and count > forced:
            assert decode is not None
            # Search in the tokens that the model sampled, back to the last context: a tool's answer
            # ends nothing, even if the model's first tokens complete it to a stop string.
            begin = len(self.tokens)
            while begin > 0 and self.is_sampled[begin - 1]:
                begin -= 1
            length = stop_length(decode, stop, self.tokens[begin:], count - forced)
            if length is not None:
                count -= len(self.tokens) - begin - length
                self._cut(begin + length)
                reason = StopReason.STOP
        if reason is not None:
            self.end_turn(reason, request.has_turns)
        return count - forced

    def _cut(self, size: int) -> None:
        """Drops the tokens after the first `size`. `support_ids` may be empty, and then stays
        so."""
        for values in (
            self.tokens,
            self.is_sampled,
            self.logprobs,
            self.versions,
            self.support_ids,
        ):
            del values[size:]
        if self.experts:
            # The last token is computed again if the completion goes on.
            self.experts = [np.concatenate(self.experts)[: max(0, size - 1)]]

    def completion(
        self,
        request_id: int,
        index: int,
        max_support: int,
        prompt_experts: np.ndarray | None = None,
    ) -> Completion:
        """Returns the tokens so far as a `Completion`, with copies of the lists. Called when a turn
        has ended. `request_id`: id of the completion's request; `index`: the completion's index
        within its group; `max_support`: ids per token in `extra["support_ids"]`, 0: none.
        `prompt_experts`: the experts of the prompt's tokens, which all completions of the prompt
        then have, and their own in `extra["experts"]`; None: none are recorded."""
        assert self.reason is not None
        extra = {}
        if max_support:
            support_ids = np.array(self.support_ids, np.int32)
            extra["support_ids"] = support_ids.reshape(len(self.tokens), max_support)
        if prompt_experts is not None:
            known = np.concatenate([prompt_experts[:0], *self.experts])
            experts = np.zeros((len(self.tokens), *known.shape[1:]), known.dtype)
            experts[: len(known)] = known
            extra["experts"] = experts
        return Completion(
            request_id=request_id,
            index=index,
            token_ids=np.asarray(self.tokens, np.int32),
            logprobs=np.asarray(self.logprobs, np.float32),
            loss_mask=np.asarray(self.is_sampled, bool),
            versions=np.asarray(self.versions, np.int32),
            stop_reason=self.reason,
            extra=extra,
            waits=self.waits,
            prompt_experts=prompt_experts,
        )


@dataclass
class ActiveRequest:
    """A request that an engine was given and has not finished, with its completions so far. The
    engine owns it."""

    request: SampleRequest
    partials: list[PartialCompletion]
    # The experts of the prompt's tokens, unsigned[tokens, layers with experts, k]; None if they
    # are not recorded, and until the prompt has entered.
    prompt_experts: np.ndarray | None = None
    # True once the engine has forgotten the request, because it finished or was cancelled
    is_forgotten: bool = False

    @property
    def is_done(self) -> bool:
        """True if all completions are over: none is sampled or waits to be extended."""
        return all(partial.phase is Phase.OVER for partial in self.partials)


def stop_length(decode: Decode, stop: Sequence[str], tokens: Sequence[int], new: int) -> int | None:
    """Returns how many of `tokens` remain if the completion is cut after the token that completes a
    stop string; None if no stop string ends within the last `new` tokens. `stop`: the stop strings,
    at least one. `new`: number of tokens at the end that have not been searched yet.

    A stop string, or one character of it, may span tokens. So the new tokens are decoded together
    with as many earlier ones as the longest stop string needs; decoding all tokens would repeat the
    whole text every few tokens."""
    longest = max(len(string) for string in stop)
    first_new = len(tokens) - new
    # Tokens from here on are decoded: go back, in steps that double, until the text before the new
    # tokens is long enough.
    decoded_from = first_new
    text_before = ""
    while decoded_from > 0 and len(text_before) < longest + 2 * SLACK:
        decoded_from = max(0, decoded_from - max(longest, first_new - decoded_from))
        text_before = decode(tokens[decoded_from:first_new])
    # A stop string that ends in the new text begins at most this far before it.
    searched_from = max(0, len(text_before) - longest - SLACK)

    def stopped(length: int) -> bool:
        """True if the first `length` tokens contain a stop string."""
        text = decode(tokens[decoded_from:length])
        return any(text.find(string, searched_from) >= 0 for string in stop)

    if not stopped(len(tokens)):
        return None
    length = first_new + 1
    while not stopped(length):
        length += 1
    return length


class RowOwner(NamedTuple):
    """The request and subgroup that a row belongs to in a step, with the row's position in the
    arrays of the step."""

    position: int
    row: int
    subgroup: int
    active: ActiveRequest


class FedTokens(NamedTuple):
    """The tokens of a completion that one feed computes, whose experts are recorded."""

    partial: PartialCompletion
    position: int  # the completion's position in the arrays of the feed
    num_tokens: int
    experts: Sequence[jax.Array]  # of each layer with experts: unsigned[M, C, k], on the devices


class InFlightStep(NamedTuple):
    """A compiled step whose tokens have not been gathered."""

    sampled: SampledTokens
    owners: list[RowOwner]
    # bool[N, W]: the slots that a decode samples; None for other programs
    live: np.ndarray | None
    version: int  # version of the weights that the step samples from
    fed: Sequence[FedTokens] = ()  # what feeds computed before this decode


def experts_in_row(layers: Sequence[jax.Array], position: int, count: int) -> np.ndarray:
    """Returns the experts of the first `count` tokens of one row, unsigned[count, layers, k], from
    those of several rows in each layer, [rows, T, k]."""
    return np.stack([np.asarray(layer)[position, :count] for layer in layers], axis=1)


def check_request(
    request: SampleRequest, longest: int, limit: int, can_truncate: bool, can_stop: bool
) -> None:
    """Raises an error if an engine for prompts of `longest` and completions of `limit` tokens
    cannot sample a request: ShoalError if a length exceeds what the settings allow, ValueError for
    any other fault. `can_truncate`: the engine has top-k, top-p and min-p; `can_stop`: it can
    search for stop strings. Without this check a compiled step would clamp what is out of range and
    sample on without an error.

    The request's `id`, `first` and `noise_key`, and the ids of its prompt, are not checked."""
    params = request.params
    size = len(request.prompt_ids)
    if not 1 <= size <= longest:
        raise ShoalError(
            f"a prompt has {size} tokens, expected 1 to {longest} (sampling.max_prompt_tokens)"
        )
    if not 1 <= params.max_tokens <= limit:
        raise ShoalError(
            f"a request has max_tokens={params.max_tokens}, expected 1 to {limit} "
            "(sampling.max_completion_tokens)"
        )
    has_limit_for_each = len(request.turn_limits) == request.num_completions
    if request.turn_limits and not (request.has_turns and has_limit_for_each):
        raise ValueError(
            f"{len(request.turn_limits)} limits of turns: expected one for each of the "
            f"{request.num_completions} completions of a request with turns, or none"
        )
    if min(request.turn_limits, default=0) < 0:
        raise ValueError(f"limits of turns {request.turn_limits}: expected 0 or more tokens")
    if request.num_completions < 1:
        raise ValueError(
            f"a request has {request.num_completions} completions, expected at least 1"
        )
    if params.truncated and not can_truncate:
        raise ValueError("this engine was made without truncation (top_k, top_p, min_p)")
    if params.stop and not can_stop:
        raise ValueError("stop strings need an engine that was made with `decode`")
