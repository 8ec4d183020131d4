"""Stop strings are found in a window of the newest tokens, wherever the whole text has them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from shoal.protocols import SampleRequest
from shoal.records import NoiseKey, SamplingParams, StopReason
from shoal.sampler.partial import PartialCompletion, stop_length
from shoal.sampler.programs import SampledTokens

CHARACTERS = "ab \n\u00e9\u4e16\U0001f600"


def in_whole_text(decode, stop: Sequence[str], tokens: Sequence[int], new: int) -> int | None:
    """By decoding everything for each length."""

    def stopped(length: int) -> bool:
        return any(string in decode(tokens[:length]) for string in stop)

    if not stopped(len(tokens)):
        return None
    return next(
        length for length in range(len(tokens) - new + 1, len(tokens) + 1) if stopped(length)
    )


class Vocabulary:
    """Tokens of one to three bytes, so that a character may span tokens and a token characters; id
    0 has no text. Like SentencePiece's, the decoder drops a leading space."""

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self.pieces, self.decoded = [b"", *pieces], 0

    def decode(self, ids: Sequence[int]) -> str:
        self.decoded += len(ids)
        return (
            b"".join(self.pieces[id] for id in ids)
            .decode("utf-8", errors="replace")
            .removeprefix(" ")
        )


@settings(max_examples=150, deadline=None)
@given(
    text=st.text(CHARACTERS, max_size=80),
    cuts=st.lists(st.integers(1, 3), min_size=1, max_size=8),
    stop=st.lists(st.text(CHARACTERS, min_size=1, max_size=6), min_size=1, max_size=2),
    news=st.lists(st.integers(1, 7), min_size=1, max_size=5),
    skipped=st.integers(0, 3),
)
@example(text="a" * 30 + "\U0001f600b", cuts=[1], stop=["\U0001f600"], news=[1], skipped=0)
@example(text="a" * 30 + " b", cuts=[1], stop=[" b"], news=[1], skipped=3)
def test_a_window_finds_what_the_whole_text_has(text, cuts, stop, news, skipped):
    data, pieces, begin = text.encode(), [], 0
    while begin < len(data):
        size = cuts[len(pieces) % len(cuts)]
        pieces.append(data[begin : begin + size])
        begin += size
    vocabulary = Vocabulary(pieces)
    tokens: list[int] = []
    for number, id in enumerate(range(1, len(pieces) + 1)):  # tokens without text among the others
        tokens += [id, *[0] * (skipped * (number % 5 == 0))]
    length, turn = 0, 0
    while length < len(tokens):
        # as decoding does: some new tokens, until one of them completes a stop string
        new = min(news[turn % len(news)], len(tokens) - length)
        length, turn = length + new, turn + 1
        found = stop_length(vocabulary.decode, stop, tokens[:length], new)
        assert found == in_whole_text(vocabulary.decode, stop, tokens[:length], new)
        if found is not None:
            break


def test_only_the_newest_tokens_are_decoded():
    vocabulary = Vocabulary([b"a", b"b"])
    tokens = [1] * 10_000
    assert stop_length(vocabulary.decode, ["ab"], tokens, 32) is None
    assert vocabulary.decoded < 150
    assert stop_length(vocabulary.decode, ["ab", "zzzz"], [*tokens, 2, 2], 2) == 10_001


END = 9
"""The token that ends a sequence, in the tests below."""


def sample_step(*tokens: int, limit: int, before: int = 0) -> SampledTokens:
    """What a compiled step gives of one slot, which ends at an END and at the limit of its
    completion."""
    size = next((number for number, token in enumerate(tokens, 1) if token == END), len(tokens))
    size = min(size, limit - before)
    has_end = tokens[size - 1] == END
    return SampledTokens(
        token=np.array(tokens[:size])[:, None, None],
        logprob=np.full((size, 1, 1), -1.0),
        count=np.array([[size]]),
        done=np.array([[has_end or before + size == limit]]),
        eos=np.array([[has_end]]),
    )


@pytest.mark.parametrize(
    ("turn_limit", "tokens", "kept", "reason", "waits"),
    [
        (0, (1, 2, 3, 4), 4, None, False),
        (5, (1, 2, 3, 4), 4, None, False),
        (4, (1, 2, 3, 4), 4, StopReason.LENGTH, True),
        (2, (1, 2, 3, 4), 2, StopReason.LENGTH, True),
        (2, (1, END), 2, StopReason.EOS, True),
        (2, (1, 2, END), 2, StopReason.LENGTH, True),
        (3, (1, 2, 5, 6, 3), 3, StopReason.LENGTH, True),  # in mid stop string
        (4, (1, 2, 5, 6, 3), 4, StopReason.STOP, True),
        (4, (5, 6, 3, 3), 2, StopReason.STOP, True),
        (7, (1, 2, 3, 4, 1, 2, 3, 4), 7, StopReason.LENGTH, False),  # no room for another turn
        (8, (1, 2, 3, 4, 1, 2, 3, 4), 8, StopReason.LENGTH, False),
        (100, (1, 2, 3, 4, 1, 2, 3, 4), 8, StopReason.LENGTH, False),
    ],
)
def test_where_a_turn_is_cut(turn_limit, tokens, kept, reason, waits):
    request = SampleRequest(
        0,
        np.array([1]),
        1,
        NoiseKey(0, "train", 0, 0),
        SamplingParams(stop=("56",)),
        has_turns=True,
    )
    one = PartialCompletion(8, turn_limit)
    added = one.add(
        sample_step(*tokens, limit=8), 0, 0, 3, request, lambda ids: "".join(map(str, ids))
    )
    assert added == kept and one.tokens == list(tokens[:kept])
    assert {len(one.is_sampled), len(one.logprobs), len(one.versions)} == {kept}
    assert (one.reason, one.waits) == (reason, waits)


def test_context_does_not_count_in_the_limit_of_a_turn():
    request = SampleRequest(
        0, np.array([1]), 1, NoiseKey(0, "train", 0, 0), SamplingParams(), has_turns=True
    )
    one = PartialCompletion(20, 1)
    one.add(sample_step(1, 2, limit=20), 0, 0, 3, request, None)
    one.extend([7, 7, 7], 2)
    one.add(sample_step(7, 7, 7, 1, 2, 3, limit=20, before=1), 0, 0, 3, request, None)
    assert one.tokens == [1, 7, 7, 7, 1, 2] and one.waits
    assert one.is_sampled == [True, False, False, False, True, True]
    one.extend([7])  # without a limit of its own
    one.add(sample_step(7, 1, 2, 3, 4, limit=20, before=6), 0, 0, 3, request, None)
    assert len(one.tokens) == 11 and one.reason is None
