"""The order of prompts: a permutation an epoch, no row twice a step, a cursor that resumes, none
cut in silence."""

from __future__ import annotations

import json

import numpy as np
import pytest

from shoal.records import Example, Group, Purpose, ShoalError
from shoal.trainer.prompts import DataExhausted, PassRates, PromptStream, prepare


def stream(
    count: int = 12,
    seed: int = 0,
    max_tokens: int = 100,
    long_prompts: str = "drop",
    lengths: list[int] | None = None,
    bound: float = 1.0,
) -> PromptStream:
    """Row r's prompt is r's text; its tokens are `lengths[r]` times r."""
    examples = [Example(row, str(row)) for row in range(count)]

    def encode(example) -> np.ndarray:
        row = example.row
        return np.full(lengths[row] if lengths else 3, row, np.int32)

    return PromptStream(examples, encode, seed, max_tokens, long_prompts, PassRates(bound))


def rows(prepared) -> list[int]:
    return [p.example.row for p in prepared]


def test_each_epoch_is_a_permutation_in_an_order_of_its_own():
    s = stream()
    epochs = []
    for _ in range(4):
        epochs.append(rows(s.next(4)) + rows(s.next(4)) + rows(s.next(4)))
    for epoch in epochs:
        assert sorted(epoch) == list(range(12))
    assert len({tuple(epoch) for epoch in epochs}) == 4 and (s.epoch, s.cursor) == (3, 12)


@pytest.mark.parametrize("count", [1, 5, 7, 8, 11, 12])
def test_a_step_has_different_rows_and_no_row_is_lost_at_an_epochs_border(count):
    s = stream()
    taken = []
    border = False
    for _ in range(400):
        before = s.epoch, s.cursor
        step = rows(s.next(count))
        assert len(set(step)) == count
        border |= before[0] != s.epoch and before[1] != 12
        taken += step
        # Every row that was read is in a step, or waits for the next one.
        read = np.bincount(taken, minlength=12) + np.bincount(s.postponed, minlength=12)
        assert read.min() >= s.epoch and read.max() <= s.epoch + 1 and len(s.postponed) < 12
    assert border == (12 % count != 0) and s.epoch > 3


def test_until_rows_meet_again_the_order_is_that_of_the_permutations():
    orders = stream(), stream()
    permutations = [orders[0]._order_of(epoch).tolist() for epoch in range(2)]
    first, second = rows(orders[1].next(8)), rows(orders[1].next(8))
    assert first == permutations[0][:8] and second[:4] == permutations[0][8:]
    assert second[4:] == [row for row in permutations[1] if row not in permutations[0][8:]][:4]
    read = permutations[1][: permutations[1].index(second[-1]) + 1]
    passed_over = [row for row in read if row in permutations[0][8:]]
    assert orders[1].postponed == passed_over and passed_over
    assert rows(orders[1].next(8))[: len(passed_over)] == passed_over


def test_rows_that_a_step_has_already_are_taken_in_the_next():
    s = stream(10)
    step = rows(s.next(8))
    step += rows(s.more(2, step))  # the rest of the epoch
    assert sorted(step) == list(range(10)) and not s.more(4, step) and s.postponed == []
    step = rows(s.next(7))
    step += rows(s.more(3, step))
    assert sorted(step) == list(range(10)) and s.epoch == 1 and s.postponed == []
    third = s._order_of(2).tolist()
    assert rows(s.more(3, third[:2])) == third[2:5] and s.postponed == third[:2]
    assert rows(s.next(4)) == [*third[:2], *third[5:7]] and s.postponed == []


def test_what_is_prepared_is_the_row():
    for prepared in stream().next(5):
        assert prepared.prompt_ids.tolist() == [prepared.example.row] * 3


def test_the_seed_changes_the_order_and_only_the_seed():
    orders = [rows(stream(seed=seed).next(12)) for seed in (0, 0, 1, 2)]
    assert orders[0] == orders[1] and len({tuple(order) for order in orders}) == 3


@pytest.mark.parametrize("bound", [1.0, 0.8])
def test_its_state_resumes_the_same_order(bound):
    s = stream(bound=bound, lengths=[200, 3] * 6)
    for step in range(9):
        taken = s.next(3)
        s.rates.add(
            [
                judged(p.example, [(p.example.row + step) % 3 > 0, p.example.row % 4 == 1])
                for p in taken
            ]
        )
    resumed = stream(bound=bound, lengths=[200, 3] * 6)
    resumed.restore(json.loads(json.dumps(s.state())))
    for _ in range(6):
        assert rows(resumed.next(3)) == rows(s.next(3))
    assert resumed.state() == s.state() and s.dropped > 0


@pytest.mark.parametrize("steps", [1, 2, 3, 4, 9])
def test_its_state_resumes_with_the_rows_that_wait(steps):
    s = stream(10)
    for _ in range(steps):
        s.next(8)
    state = json.loads(json.dumps(s.state()))
    resumed = stream(10)
    resumed.restore(state)
    s.peek(8)
    assert s.state() == resumed.state() == state
    for _ in range(6):
        assert rows(resumed.next(8)) == rows(s.next(8))
    del state["postponed"]  # as of a checkpoint from before there were any
    resumed.restore(state)
    assert resumed.postponed == []


def judged(
    example: Example,
    correct: list[bool],
    rewards: list[float] | None = None,
    valid: list[bool] | None = None,
) -> Group:
    """A group whose completions were right or not."""
    values = np.array(rewards if rewards is not None else correct, float)
    return Group(
        Purpose.TRAIN,
        0,
        0,
        example,
        np.array([1]),
        (),
        (),
        values,
        {},
        np.array(valid if valid is not None else [True] * len(values)),
        None if rewards is not None else np.array(correct),
    )


def test_pass_rates_are_of_valid_completions():
    rates, example = PassRates(), Example(7, "7")
    rates.add([judged(example, [True, False, True, True], valid=[True, True, False, True])])
    assert rates.counts == {7: (3, 2.0)}
    # no `correct`: the reward within [0, 1]
    rates.add([judged(example, [], rewards=[0.25, 7.0, -3.0])])
    assert rates.counts == {7: (6, 3.25)}


def test_solved_prompts_are_retired_and_hard_ones_drawn_more_from_the_next_epoch_on():
    s = stream(bound=0.8)
    for prepared in s.next(12):
        row = prepared.example.row
        s.rates.add(
            [judged(prepared.example, [row < 3] * 4 if row < 6 else [True, False, False, False])]
        )
    drawn = np.zeros(12, int)
    for _ in range(9):
        seen = rows(s.next(3))
        assert not set(seen) & {0, 1, 2} and len(set(seen)) == 3
        drawn[seen] += 1
    assert sorted(s.rates.retired()) == [0, 1, 2] and s.epoch >= 1
    often = np.zeros(12, int)
    for seed in range(60):
        one = stream(bound=0.8, seed=seed)
        one.rates.at_epoch = {
            row: 1.0 if row < 3 else 0.0 if row < 6 else 0.75 for row in range(12)
        }
        often += np.bincount(one._order_of(0), minlength=12)
    assert (often[:3] == 0).all() and (often[3:6] == 120).all()  # rate 0: twice an epoch
    assert np.abs(often[6:] / 60 - 1.25).max() < 0.25  # rate 3/4: 1.25 times in the mean


def test_off_by_default_though_rates_are_recorded():
    s = stream()
    for _ in range(6):
        s.rates.add([judged(p.example, [True, True]) for p in s.next(4)])
    assert len(s.rates.counts) == 12 and sorted(rows(s.next(12))) == list(range(12))


@pytest.mark.parametrize(
    ("left", "count", "words"),
    [
        (0, 1, "12 prompts are retired .*fewer than 1 are left"),
        (2, 4, "10 prompts are retired .*fewer than 4 are left"),
    ],
)
def test_too_few_prompts_left_end_the_data(left, count, words):
    s = stream(bound=0.5)
    for prepared in s.next(12):
        s.rates.add([judged(prepared.example, [prepared.example.row >= left] * 2)])
    before = s.state()
    assert (
        s.is_exhausted(count)
        and s.is_exhausted(max(left, 1)) == (left == 0)
        and s.state() == before
    )
    assert not stream(bound=0.5).is_exhausted(12)
    for _ in range(2):
        with pytest.raises(DataExhausted, match=words):
            s.next(count)
    place = s.state()
    assert s.more(count, range(left)) == [] and s.state() == place
    # nothing is solved any more
    s.rates.add([judged(Example(row, str(row)), [False] * 9) for row in range(12)])
    for bound, ended in ((0.5, True), (0.9, False)):
        # what ended a run stays so, unless the bound was changed
        resumed = stream(bound=bound)
        resumed.restore(json.loads(json.dumps(s.state())))
        assert resumed.is_exhausted(count) == ended
    other = stream(bound=1.0)
    other.restore(json.loads(json.dumps(before)))
    assert not other.is_exhausted(count)  # resumed with another bound


def test_peek_takes_nothing():
    s = stream(lengths=[200, 3] * 6)
    first = s.peek()
    assert (s.epoch, s.cursor, s.dropped) == (0, 0, 0) and rows([first]) == rows(s.next(1))


def test_long_prompts_are_dropped_and_counted():
    s = stream(lengths=[3, 200, 3, 3, 0, 3, 3, 100, 101, 3, 3, 3])
    seen = rows(s.next(4)) + rows(s.next(5))
    # 100 is within the limit, 0 and 101 are not
    assert sorted(seen) == [0, 2, 3, 5, 6, 7, 9, 10, 11]
    assert s.dropped + (12 - s.cursor) == 3  # those not met yet are at the end of the epoch


def test_long_prompts_are_an_error_where_asked():
    with pytest.raises(
        ShoalError, match=r"row 1 has 200 tokens.*max_prompt_tokens is 100.*long_prompts=drop"
    ):
        stream(lengths=[3, 200, 3], count=3, long_prompts="error").next(3)


def test_prompts_of_later_steps_are_checked_with_each_row_read_once():
    with pytest.raises(ShoalError, match=r"row 1 has 200 tokens"):
        stream(lengths=[3, 200, 3], count=3, long_prompts="error").check(3)
    read: list[str] = []
    s = stream(long_prompts="error")
    tokens = s.encode
    s.encode = lambda example: read.append(example.prompt) or tokens(example)
    s.check(4 * 500)
    assert sorted(map(int, read)) == list(range(12)) and (s.epoch, s.cursor) == (0, 0)
    read.clear()
    s.check(4)
    assert list(map(int, read)) == rows(s.next(4))


def test_fewer_rows_than_a_step_needs():
    with pytest.raises(ShoalError, match=r"12 prompts, fewer than batch.prompts_per_step=13"):
        stream().next(13)
    by_device = stream()
    by_device.size_key = "batch.prompts_per_device"
    with pytest.raises(
        ShoalError, match=r"the 13 of a step \(batch.prompts_per_device on"
    ) as error:
        by_device.next(13)
    assert error.value.key == "batch.prompts_per_device"


@pytest.mark.parametrize("short", [0, 3])
def test_too_many_long_prompts_are_an_error_not_a_loop(short):
    with pytest.raises(ShoalError, match=r"fewer than 4 prompts.*at most 100 tokens"):
        stream(lengths=[3] * short + [101] * (12 - short)).next(4)


def test_prepare_alone():
    example = Example(8, "x")
    assert prepare(example, lambda _: np.arange(5), 4, "drop") is None
    kept = prepare(example, lambda _: np.arange(5), 5, "error")
    assert (
        kept is not None and kept.example is example and kept.prompt_ids.tolist() == [0, 1, 2, 3, 4]
    )


def test_a_prompt_that_the_template_refuses_is_like_one_that_is_too_long():
    def encode(example) -> np.ndarray:
        if example.prompt in refused:
            raise ShoalError("The chat template refused a prompt: no roles")
        return np.ones(3, np.int32)

    refused, examples = {"1", "2"}, [Example(row, str(row)) for row in range(6)]
    s = PromptStream(examples, encode, 0, 100)
    assert sorted(rows(s.next(4))) == [0, 3, 4, 5] and s.dropped + (6 - s.cursor) == 2
    with pytest.raises(
        ShoalError, match=r"^the prompt of row \d: The chat template refused a prompt: no roles$"
    ):
        PromptStream(examples, encode, 0, 100, "error").next(6)
    with pytest.raises(
        ShoalError,
        match=r"fewer than 5 prompts .*; the prompt of row [12]: The chat template refused",
    ):
        PromptStream(examples, encode, 0, 100).next(5)


@pytest.mark.parametrize("bound", [1.0, 0.5])
def test_a_run_that_is_resumed_with_fewer_rows_goes_on_with_these(bound):
    longer, shorter = stream(bound=bound), stream(count=6, bound=bound)
    longer.rates.counts = dict.fromkeys(range(12), (4, 1.0))
    longer.rates.begin_epoch()
    longer.postponed = [11, 2, 7]
    shorter.restore(longer.state())
    assert rows(shorter.next(4))[0] == 2
    for _ in range(6):
        for row in rows(shorter.next(4)):
            assert row < 6


def test_rows_in_the_order_of_the_data_are_the_same_in_each_epoch():
    rows = [Example(row, "x") for row in range(4)]

    def rows_of(steps: int, **more) -> list[list[int]]:
        stream = PromptStream(rows, lambda example: np.zeros(1, int), 0, 5, shuffles=False, **more)
        return [[prompt.example.row for prompt in stream.next(2)] for _ in range(steps)]

    assert rows_of(4) == [[0, 1], [2, 3], [0, 1], [2, 3]]
    # With the curriculum the retired row is left out, and hard ones come again in their order.
    rates = PassRates(0.9, counts={0: (4, 0.0), 1: (4, 4.0), 2: (4, 0.0)}, at_epoch={})
    rates.begin_epoch()
    assert rows_of(3, rates=rates) == [[0, 2], [3, 0], [2, 0]]
