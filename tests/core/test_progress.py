"""Stop strings are found in a window of the newest tokens, wherever the whole text has them."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import example, given, settings
from hypothesis import strategies as st

from shoal.sampler.progress import stop_length

CHARACTERS = "ab \n\u00e9\u4e16\U0001f600"


def in_whole_text(decode, stop: Sequence[str], tokens: Sequence[int], new: int) -> int | None:
    """By decoding everything for each length."""
    def stopped(length: int) -> bool:
        return any(string in decode(tokens[:length]) for string in stop)

    if not stopped(len(tokens)):
        return None
    return next(length for length in range(len(tokens) - new + 1, len(tokens) + 1) if stopped(length))


class Vocabulary:
    """Tokens of one to three bytes, so that a character may span tokens and a token characters; id 0 has no text. Like
    SentencePiece's, the decoder drops a leading space."""

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self.pieces, self.decoded = [b"", *pieces], 0

    def decode(self, ids: Sequence[int]) -> str:
        self.decoded += len(ids)
        return b"".join(self.pieces[id] for id in ids).decode("utf-8", errors="replace").removeprefix(" ")


@settings(max_examples=150, deadline=None)
@given(text=st.text(CHARACTERS, max_size=80), cuts=st.lists(st.integers(1, 3), min_size=1, max_size=8),
       stop=st.lists(st.text(CHARACTERS, min_size=1, max_size=6), min_size=1, max_size=2),
       news=st.lists(st.integers(1, 7), min_size=1, max_size=5), skipped=st.integers(0, 3))
@example(text="a" * 30 + "\U0001f600b", cuts=[1], stop=["\U0001f600"], news=[1], skipped=0)
@example(text="a" * 30 + " b", cuts=[1], stop=[" b"], news=[1], skipped=3)
def test_a_window_finds_what_the_whole_text_has(text, cuts, stop, news, skipped):
    data, pieces, begin = text.encode(), [], 0
    while begin < len(data):
        size = cuts[len(pieces) % len(cuts)]
        pieces.append(data[begin:begin + size])
        begin += size
    vocabulary = Vocabulary(pieces)
    tokens: list[int] = []
    for number, id in enumerate(range(1, len(pieces) + 1)):  # tokens without text among the others
        tokens += [id, *[0] * (skipped * (number % 5 == 0))]
    length, turn = 0, 0
    while length < len(tokens):  # as decoding does: some new tokens, until one of them completes a stop string
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
