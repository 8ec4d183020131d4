"""Rollouts of several turns in the engine: context enters as forced tokens, and changes no bit of
anything else."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain, groupby

import numpy as np
import pytest
import scipy.special
from small_engine import EOS, SMALL, TOLERANCE, full_logits, make, prompt, request, same, text

from shoal.mesh import Role
from shoal.model.attention import decode_tpu, selector
from shoal.model.transformer import Model
from shoal.protocols import SampleRequest
from shoal.records import Completion, StopReason
from shoal.sampler.engine import Engine
from shoal.sampler.programs import DECODE_CHUNK

SIZES = (20, 1, 70, 33, 64, 100)  # of the prompts
MAX_TOKENS = 240
MOST_TURNS = 6


def in_turns(row: int, count: int = 4, **changes) -> SampleRequest:
    asked = request(
        row,
        SIZES[row],
        count=count,
        max_tokens=MAX_TOKENS,
        **{key: value for key, value in changes.items() if key in ("stop", "id", "temperature")},
    )
    return replace(
        asked,
        has_turns=True,
        first=changes.get("first", 0),
        turn_limits=changes.get("turn_limits", ()),
    )


def answer(row: int, index: int, turn: int) -> list[int]:
    """A deterministic tool's answer: from 1 to 80 tokens, ends of sequences among them."""
    rng = np.random.default_rng([row, index, turn])
    return rng.integers(0, SMALL.vocab_size, (1, 7, 40, 80)[rng.integers(4)]).tolist()


Key = tuple[int, int]
Tool = Callable[[int, int, int], list[int]]


def play(
    engine: Engine,
    requests: Sequence[SampleRequest],
    seed: int = 0,
    tool: Tool = answer,
    limit: int = MAX_TOKENS,
    turn_limit: Callable[[int, int, int], int] = lambda *_: 0,
) -> tuple[dict[Key, Completion], dict[Key, int]]:
    """Plays rollouts to their ends, tools being answered in a random order after random waits; the
    completions, and turns, by (row, index). `turn_limit`: of the turn of a number, from 1."""
    rng, rows = random.Random(seed), {one.id: one.noise_key.row for one in requests}
    done, turns, waiting = {}, {}, []
    engine.submit(requests)
    while not engine.idle or waiting:
        for one in chain(*engine.step().values()):
            key = rows[one.request_id], one.index
            turns[key] = turns.get(key, 0) + 1
            (waiting.append(one) if one.waits else done.update({key: one}))
        rng.shuffle(waiting)
        for _ in range(rng.randrange(len(waiting) + 1) if engine.in_flight else len(waiting)):
            one = waiting.pop()
            key = rows[one.request_id], one.index
            context = tool(*key, turns[key])
            if turns[key] == MOST_TURNS or len(one) + len(context) >= limit:
                engine.end(one.request_id, one.index)
                done[key] = one
            else:
                engine.extend(one.request_id, one.index, context, turn_limit(*key, turns[key] + 1))
    assert len(engine.scheduler.free) == engine.num_rows and not engine.scheduler.ids
    return done, turns


@pytest.fixture(scope="module")
def engine() -> Engine:
    return make(
        max_completion_tokens=MAX_TOKENS, siblings_per_row=1, eos_ids=EOS + tuple(range(40, 44))
    )


@pytest.fixture(scope="module")
def base(engine: Engine) -> tuple[dict, dict]:
    return play(engine, [in_turns(row) for row in range(6)])


def test_tokens_of_context_are_not_sampled_and_the_others_are_the_trainers(engine, base):
    done, turns = base
    assert (
        len(done) == 24 and max(turns.values()) == MOST_TURNS and min(turns.values()) < MOST_TURNS
    )
    assert not all(one.loss_mask.all() for one in done.values())
    for (row, index), one in done.items():
        context = []
        for turn in range(1, turns[row, index]):
            context.append(answer(row, index, turn))
        given = one.token_ids[~one.loss_mask].tolist()
        assert given == list(chain(*context))
        assert (one.logprobs[~one.loss_mask] == 0).all() and (one.logprobs[one.loss_mask] < 0).all()
        ends = np.flatnonzero(np.isin(one.token_ids, engine.eos_ids) & one.loss_mask)
        assert len(ends) >= turns[row, index] - 1  # each turn but the last ended with one
        logits = full_logits(engine, prompt(row, SIZES[row]), one)
        logprobs = scipy.special.log_softmax(logits.astype(np.float64), -1)[
            np.arange(len(one)), one.token_ids
        ]
        assert np.abs(logprobs - one.logprobs)[one.loss_mask].max() < TOLERANCE


@pytest.mark.slow
def test_waits_and_company_change_no_bit(engine, base):
    for seed, rows in ((1, range(6)), (2, (5, 1)), (3, (3,))):
        done, turns = play(engine, [in_turns(row) for row in rows], seed)
        same(done, base[0])
        assert turns == {key: base[1][key] for key in turns}
    same(play(engine, [in_turns(2, 1)])[0], base[0])


@pytest.mark.slow
def test_a_rollout_of_a_request_of_its_own_differs_in_its_first_token_alone(engine, base):
    """Which entered by a join in a request of four: another program, whose last bits differ on some
    processors."""
    (one,), other = play(engine, [in_turns(2, 1, first=3)])[0].values(), base[0][2, 3]
    assert one.token_ids.tolist() == other.token_ids.tolist()
    assert one.logprobs[1:].tobytes() == other.logprobs[1:].tobytes()
    assert abs(one.logprobs[0] - other.logprobs[0]) < TOLERANCE


@pytest.mark.slow
def test_siblings_in_one_row(base):
    engine = make(max_completion_tokens=MAX_TOKENS, eos_ids=EOS + tuple(range(40, 44)))
    done, _ = play(engine, [in_turns(row) for row in range(6)])
    assert {key: one.token_ids.tolist() for key, one in done.items()} == {
        key: one.token_ids.tolist() for key, one in base[0].items()
    }


@pytest.mark.slow
def test_more_rollouts_than_places(base, monkeypatch):
    """While they wait their keys go to the host's memory and come back; no prompt is computed
    twice."""
    monkeypatch.setattr("shoal.sampler.engine.SWAP_SHARE", 2)
    engine = make(
        slots=4,
        max_completion_tokens=MAX_TOKENS,
        siblings_per_row=1,
        eos_ids=EOS + tuple(range(40, 44)),
    )
    assert engine.scheduler.swap_rows == 2
    calls = dict.fromkeys(engine.programs, 0)

    def counting(name, program):
        def call(*args, **kwargs):
            calls[name] += (
                (kwargs["new_rows"].rows < engine.num_rows).sum()
                if name in ("prefill", "join")
                else 1
            )
            return program(*args, **kwargs)

        return call

    monkeypatch.setattr(
        engine, "programs", {name: counting(name, one) for name, one in engine.programs.items()}
    )
    first, kept, take = None, [], engine.swapped.take
    monkeypatch.setattr(
        engine.swapped,
        "take",
        lambda positions: [
            kept.extend(
                engine.swapped._on_host[part].caches[0].own_v[0].shape[2] for part, _ in positions
            ),
            take(positions),
        ][1],
    )
    for seed in (0, 1):
        done, turns = play(engine, [in_turns(row) for row in range(6)], seed)
        assert len(done) == 24 and turns == base[1]
        assert {key: one.token_ids.tolist() for key, one in done.items()} == {
            key: one.token_ids.tolist() for key, one in base[0].items()
        }
        same(done, first := first or done)
        assert not engine.swapped._on_host and not engine.swapped._arriving
    assert calls["prefill"] == 2 * 6 and calls["join"] == 2 * 18
    assert calls["swap_out"] >= calls["swap_in"] > 2 * 6
    # keys that are there, not room for all
    assert min(kept) < MAX_TOKENS / 8 and max(kept) <= MAX_TOKENS


@pytest.mark.parametrize("slots", [1, 8, 32, 256])
def test_rows_that_give_way_take_little_room_beside_the_others(slots):
    """They were four of however few, half of eight, which the memory of caches did not count."""
    count = make(slots=slots, siblings_per_row=1).scheduler.swap_rows
    assert 1 <= count <= max(1, slots / 16) and (count == 4) == (slots >= 64)


def long_answer(row: int, index: int, turn: int) -> list[int]:
    rng = np.random.default_rng([row, index, turn, 1])
    return rng.integers(0, SMALL.vocab_size, (3, 256, 300, 600)[rng.integers(4)]).tolist()


@pytest.mark.slow
@pytest.mark.parametrize(("siblings", "slots"), [(1, 4), (4, 8)])
def test_long_contexts_enter_in_pieces(siblings, slots, monkeypatch):
    monkeypatch.setattr(Model, "ffn_chunks", int(siblings > 1))  # layers apart
    engine = make(
        slots=slots,
        max_completion_tokens=1000,
        siblings_per_row=siblings,
        eos_ids=EOS + tuple(range(40, 44)),
    )
    requests = []
    for row in (0, 2):
        requests.append(
            replace(in_turns(row, 2), params=replace(in_turns(row).params, max_tokens=1000))
        )
    done, turns = play(engine, requests, tool=long_answer, limit=1000)
    assert (
        max(turns.values()) == MOST_TURNS
        and [name for name, _ in engine._started].count("feed") == 1
    )
    again, _ = play(engine, requests[1:], 1, long_answer, limit=1000)
    same(again, done)
    for (row, index), one in list(done.items())[:2]:
        context = []
        for turn in range(1, turns[row, index]):
            context.append(long_answer(row, index, turn))
        assert one.token_ids[~one.loss_mask].tolist() == list(chain(*context))
        logits = full_logits(engine, prompt(row, SIZES[row]), one)
        logprobs = scipy.special.log_softmax(logits.astype(np.float64), -1)[
            np.arange(len(one)), one.token_ids
        ]
        assert np.abs(logprobs - one.logprobs)[one.loss_mask].max() < TOLERANCE


@pytest.mark.slow
def test_turns_by_pages(monkeypatch):
    """As a TPU has its keys: long contexts enter, rows give way and come back, and tokens are those
    of a CPU."""

    def played(longest: int) -> dict[Key, Completion]:
        engine = make(
            slots=2,
            group_size=2,
            max_completion_tokens=longest,
            siblings_per_row=1,
            eos_ids=EOS + tuple(range(40, 44)),
        )
        requests = []
        for row in (0, 2):
            requests.append(
                replace(in_turns(row, 2), params=replace(in_turns(row).params, max_tokens=600))
            )
        done, _ = play(engine, requests, tool=long_answer, limit=600)
        assert {"feed", "swap_out", "swap_in"} <= {name for name, _ in engine._started}
        return done

    theirs = played(600)
    monkeypatch.setattr(Role, "platform", "tpu")

    def decode_kernel_refusal(model, layer=None):
        return ""

    monkeypatch.setattr(selector, "decode_kernel_refusal", decode_kernel_refusal)
    monkeypatch.setattr(
        decode_tpu, "attend_pages", partial(decode_tpu.attend_pages, interpret=True)
    )
    ours = played(700)  # else one set of programs would be taken for both
    assert {key: one.token_ids.tolist() for key, one in ours.items()} == {
        key: one.token_ids.tolist() for key, one in theirs.items()
    }
    assert (
        max(np.abs(ours[key].logprobs - theirs[key].logprobs).max() for key in theirs) < TOLERANCE
    )


@pytest.mark.slow
def test_a_turn_ends_with_a_stop_string(engine, base):
    ((key, whole),) = [
        (key, one) for key, one in base[0].items() if one.loss_mask[:12].all() and len(one) > 12
    ][:1]
    string = text(whole.token_ids[9:11])
    done, turns = play(engine, [in_turns(key[0], stop=(string,))])
    assert turns[key] > 1 and done[key].token_ids[:11].tolist() == whole.token_ids[:11].tolist()
    assert done[key].token_ids[11:12].tolist() == answer(*key, 1)[:1]
    again, _ = play(engine, [in_turns(row, stop=(string,)) for row in range(6)], 1)
    same(done, again)
    logits = full_logits(engine, prompt(key[0], SIZES[key[0]]), done[key])
    logprobs = scipy.special.log_softmax(logits, -1)[np.arange(len(done[key])), done[key].token_ids]
    assert np.abs(logprobs - done[key].logprobs)[done[key].loss_mask].max() < TOLERANCE


def own_limit(row: int, index: int, turn: int) -> int:
    """Of a turn: none, within a compiled step, at its border, beyond it, and beyond what is
    left."""
    return (0, 1, 2, 5, DECODE_CHUNK, DECODE_CHUNK + 1, 1000)[(row + 3 * index + 2 * turn) % 7]


def with_limits(row: int, count: int = 4, **changes) -> SampleRequest:
    return in_turns(
        row, count, turn_limits=tuple(own_limit(row, i, 1) for i in range(count)), **changes
    )


@pytest.fixture(scope="module")
def cut(engine: Engine) -> tuple[dict, dict]:
    return play(engine, [with_limits(row) for row in range(6)], turn_limit=own_limit)


def turn_sizes(one: Completion) -> list[int]:
    """The tokens of each turn that has some."""
    result = []
    for is_own, own in groupby(one.loss_mask.tolist()):
        if is_own:
            result.append(len([*own]))
    return result


def test_a_turn_is_cut_at_a_limit_of_its_own_and_the_rollout_goes_on(engine, base, cut):
    done, turns = cut
    cut_turns = 0
    for key, one in done.items():
        sizes = turn_sizes(one)
        limits = [own_limit(*key, turn) for turn in range(1, turns[key] + 1)]
        assert len(sizes) == turns[key] and len(one) <= MAX_TOKENS
        for size, limit in zip(sizes, limits, strict=True):
            if limit:
                assert size <= limit
        # the same tokens as without a limit, as far as it lets
        first = min(sizes[0], turn_sizes(base[0][key])[0])
        assert one.token_ids[:first].tolist() == base[0][key].token_ids[:first].tolist()
        ends = np.flatnonzero(np.diff(one.loss_mask.astype(int)) == -1)  # of each turn but the last
        is_cut = []
        for id in one.token_ids[ends].tolist():
            is_cut.append(id not in engine.eos_ids)
        for size, limit, by_limit in zip(sizes, limits, is_cut, strict=False):
            if by_limit:
                assert size == limit
        cut_turns += sum(is_cut)
        context = [answer(*key, turn) for turn in range(1, turns[key])]
        assert one.token_ids[~one.loss_mask].tolist() == list(chain(*context))
        if key[1]:
            continue
        logits = full_logits(engine, prompt(key[0], SIZES[key[0]]), one)
        logprobs = scipy.special.log_softmax(logits.astype(np.float64), -1)[
            np.arange(len(one)), one.token_ids
        ]
        assert np.abs(logprobs - one.logprobs)[one.loss_mask].max() < TOLERANCE
    assert cut_turns > 20


@pytest.mark.slow
@pytest.mark.bitwise
def test_where_turns_are_cut_neither_waits_nor_company_change_a_bit(engine, cut):
    for seed, rows in ((1, range(6)), (2, (4,))):
        done, turns = play(engine, [with_limits(row) for row in rows], seed, turn_limit=own_limit)
        same(done, cut[0])
        assert turns == {key: cut[1][key] for key in turns}


@pytest.mark.slow
@pytest.mark.parametrize(("siblings", "slots"), [(4, 8), (1, 4)])
def test_turns_are_cut_alike_in_one_row_and_in_few_places(cut, siblings, slots):
    engine = make(
        slots=slots,
        siblings_per_row=siblings,
        max_completion_tokens=MAX_TOKENS,
        eos_ids=EOS + tuple(range(40, 44)),
    )
    done, turns = play(engine, [with_limits(row) for row in range(6)], turn_limit=own_limit)
    assert turns == cut[1]
    assert {key: one.token_ids.tolist() for key, one in done.items()} == {
        key: one.token_ids.tolist() for key, one in cut[0].items()
    }


@pytest.mark.slow
@pytest.mark.bitwise
def test_a_cut_turn_that_is_continued_without_context_is_that_without_a_limit(engine):
    plain = {}
    for row in range(6):
        for one in chain(*_drained(engine, replace(in_turns(row), has_turns=False))):
            plain[(row, one.index)] = one
    pieces, whole = 0, {}
    engine.submit([in_turns(row, turn_limits=(1, 2, 3, 4)) for row in range(6)])
    while not engine.idle:
        for one in chain(*engine.step().values()):
            pieces += 1
            whole[one.request_id, one.index] = one
            if one.waits and one.stop_reason is StopReason.LENGTH:
                engine.extend(one.request_id, one.index, [], 2 + one.index)
            elif one.waits:
                engine.end(one.request_id, one.index)
    same(whole, plain)
    assert pieces > 2 * len(plain) and all(one.loss_mask.all() for one in whole.values())


def test_one_turn_is_a_completion_of_today(engine):
    plain = {}
    for row in range(3):
        for one in chain(*_drained(engine, replace(in_turns(row), has_turns=False))):
            plain[(row, one.index)] = one

    def tool(*_):
        return [0] * MAX_TOKENS

    done, turns = play(engine, [in_turns(row) for row in range(3)], tool=tool)
    same(done, plain)
    assert set(turns.values()) == {1}


def _drained(engine: Engine, one: SampleRequest) -> list[list[Completion]]:
    engine.submit([one])
    found = []
    while not engine.idle:
        found += engine.step().values()
    return found


@pytest.mark.slow
def test_what_cannot_be_extended(engine):
    engine.submit([in_turns(0, 1)])
    while not (found := engine.step()):
        assert not engine.stuck
    ((one,),) = found.values()
    assert one.waits and one.stop_reason is StopReason.EOS and engine.step() == {} and engine.stuck
    for context in ([], [1] * (MAX_TOKENS - len(one))):
        with pytest.raises(ValueError, match="tokens of context after"):
            engine.extend(0, 0, context)
    engine.extend(0, 0, [1] * (MAX_TOKENS - len(one) - 1))
    with pytest.raises(ValueError, match="only a completion whose turn has ended"):
        engine.extend(0, 0, [1])
    while not engine.idle:
        found = engine.step()
    ((last,),) = found.values()
    assert len(last) == MAX_TOKENS and not last.waits and last.loss_mask[-1]
