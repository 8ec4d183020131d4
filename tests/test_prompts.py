"""The order of prompts: a permutation an epoch, no row twice a step, a cursor that resumes, none cut in silence."""

from __future__ import annotations

import numpy as np
import pytest

from shoal.trainer.prompts import PromptStream, prepare
from shoal.types import Example, ShoalError


def stream(count: int = 12, seed: int = 0, max_tokens: int = 100, cursor: int = 0, long_prompts: str = "drop",
           lengths: list[int] | None = None) -> PromptStream:
    """Row r's prompt is r's text; its tokens are `lengths[r]` times r."""
    examples = [Example(row, str(row)) for row in range(count)]

    def encode(prompt) -> np.ndarray:
        row = int(prompt)
        return np.full(lengths[row] if lengths else 3, row, np.int32)

    return PromptStream(examples, encode, seed, max_tokens, long_prompts, cursor)


def rows(prepared) -> list[int]:
    return [p.example.row for p in prepared]


def test_each_epoch_is_a_permutation_in_an_order_of_its_own():
    s = stream()
    epochs = [rows(s.next(4)) + rows(s.next(4)) + rows(s.next(4)) for _ in range(4)]
    assert all(sorted(epoch) == list(range(12)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 4 and s.cursor == 48


@pytest.mark.parametrize("count", [5, 7, 11, 12])
def test_a_step_has_different_rows_across_epoch_borders(count):
    s = stream()
    taken, border = [], False
    for _ in range(40):
        before = s.cursor
        step = rows(s.next(count))
        assert len(set(step)) == count
        border |= before // 12 != (s.cursor - 1) // 12 and before % 12 != 0
        taken += step
    assert border == (count != 12)
    often = np.bincount(taken, minlength=12)
    assert often.min() > 0.7 * often.mean()  # a row is passed over only where its step has it already


def test_what_is_prepared_is_the_row():
    for prepared in stream().next(5):
        assert prepared.prompt_ids.tolist() == [prepared.example.row] * 3


def test_the_seed_changes_the_order_and_only_the_seed():
    orders = [rows(stream(seed=seed).next(12)) for seed in (0, 0, 1, 2)]
    assert orders[0] == orders[1] and len({tuple(order) for order in orders}) == 3


def test_the_cursor_resumes_the_same_order():
    s = stream()
    for _ in range(5):
        s.next(5)
    resumed = stream(cursor=s.cursor)
    for _ in range(6):
        assert rows(resumed.next(5)) == rows(s.next(5))
    assert resumed.cursor == s.cursor


def test_peek_takes_nothing():
    s = stream(lengths=[200, 3] * 6)
    first = s.peek()
    assert (s.cursor, s.dropped) == (0, 0) and rows([first]) == rows(s.next(1))


def test_long_prompts_are_dropped_and_counted():
    s = stream(lengths=[3, 200, 3, 3, 0, 3, 3, 100, 101, 3, 3, 3])
    seen = rows(s.next(4)) + rows(s.next(5))
    assert sorted(seen) == [0, 2, 3, 5, 6, 7, 9, 10, 11]  # 100 is within the limit, 0 and 101 are not
    assert s.dropped + (12 - s.cursor) == 3  # those not met yet are at the end of the epoch


def test_long_prompts_are_an_error_where_asked():
    with pytest.raises(ShoalError, match=r"row 1 has 200 tokens.*max_prompt_tokens is 100.*long_prompts=drop"):
        stream(lengths=[3, 200, 3], count=3, long_prompts="error").next(3)


def test_fewer_rows_than_a_step_needs():
    with pytest.raises(ShoalError, match=r"12 prompts, fewer than batch.prompts_per_step=13"):
        stream().next(13)


@pytest.mark.parametrize("short", [0, 3])
def test_too_many_long_prompts_are_an_error_not_a_loop(short):
    with pytest.raises(ShoalError, match=r"fewer than 4 prompts.*at most 100 tokens"):
        stream(lengths=[3] * short + [101] * (12 - short)).next(4)


def test_prepare_alone():
    example = Example(8, "x")
    assert prepare(example, lambda _: np.arange(5), 4, "drop") is None
    kept = prepare(example, lambda _: np.arange(5), 5, "error")
    assert kept is not None and kept.example is example and kept.prompt_ids.tolist() == [0, 1, 2, 3, 4]
