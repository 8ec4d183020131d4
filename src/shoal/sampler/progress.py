"""A request on its way: the tokens of its completions so far, and where their stop strings end them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from shoal.sampler.programs import SampledTokens
from shoal.types import Completion, SampleRequest, StopReason

Decode = Callable[[Sequence[int]], str]

SLACK = 4
"""Characters by which the text of a few tokens may differ at either end from the same part of the whole text: the bytes
of a character that is cut are up to three replacement characters, and some decoders drop a leading space."""


@dataclass
class PartialCompletion:
    """The tokens of one completion so far."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    support_ids: list[np.ndarray] = field(default_factory=list)  # int32[K] by token, where they are recorded
    reason: StopReason | None = None

    def add(self, step: SampledTokens, position: int, slot: int, version: int, stop: Sequence[str],
            decode: Decode | None) -> None:
        """Adds the tokens of one slot of a step (on the host), sampled from the weights of one version, and ends the
        completion where they say so."""
        count = int(step.count[position, slot])
        self.tokens.extend(step.token[:count, position, slot].tolist())
        self.logprobs.extend(step.logprob[:count, position, slot].tolist())
        self.versions.extend([version] * count)
        if step.support_ids is not None:
            self.support_ids.extend(step.support_ids[:count, position, slot])
        if step.done[position, slot]:
            self.reason = StopReason.EOS if step.eos[position, slot] else StopReason.LENGTH
        if stop and count:
            assert decode is not None
            length = stop_length(decode, stop, self.tokens, count)
            if length is not None:
                del self.tokens[length:], self.logprobs[length:], self.versions[length:], self.support_ids[length:]
                self.reason = StopReason.STOP

    def completion(self, id: int, index: int, max_support: int) -> Completion:
        assert self.reason is not None
        count, extra = len(self.tokens), {}
        if max_support:
            extra["support_ids"] = np.array(self.support_ids, np.int32).reshape(count, max_support)
        return Completion(
            request_id=id, index=index, token_ids=np.asarray(self.tokens, np.int32),
            logprobs=np.asarray(self.logprobs, np.float32), loss_mask=np.ones(count, bool),
            versions=np.asarray(self.versions, np.int32), stop_reason=self.reason, extra=extra)


@dataclass
class Progress:
    """One request and its completions so far."""

    request: SampleRequest
    partials: list[PartialCompletion]

    @property
    def is_done(self) -> bool:
        return all(partial.reason is not None for partial in self.partials)


def stop_length(decode: Decode, stop: Sequence[str], tokens: Sequence[int], new: int) -> int | None:
    """Tokens up to the one that completed a stop string; None if no stop string ends in the last `new` tokens.

    A stop string, or one character of it, may span tokens, so the new ones are decoded with earlier ones, whose text
    is as long as the longest stop string: not with all, which every few tokens would be the whole text again.
    """
    first, longest = len(tokens) - new, max(map(len, stop))
    begin, before = first, ""
    while begin > 0 and len(before) < longest + 2 * SLACK:
        begin = max(0, begin - max(longest, first - begin))
        before = decode(tokens[begin:first])
    # What ends in the new text begins at most so far before it.
    start = max(0, len(before) - longest - SLACK)

    def stopped(length: int) -> bool:
        text = decode(tokens[begin:length])
        return any(text.find(string, start) >= 0 for string in stop)

    if not stopped(len(tokens)):
        return None
    return next(length for length in range(first + 1, len(tokens) + 1) if stopped(length))
