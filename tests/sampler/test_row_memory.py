"""Slots by pages: whose pages they are, and that rows which give way and come back change no
bit."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

import jax
import numpy as np
import pytest
import test_sampler_turns as turns
from hypothesis import given, settings
from hypothesis import strategies as st
from small import QWEN3, roles
from test_sampler import EOS, play, request, same, weights

from shoal.mesh import Role
from shoal.model.attention import decode_tpu, selector
from shoal.model.attention.caches import NO_PAGE, PAGE
from shoal.model.transformer import Model
from shoal.protocols import SampleRequest
from shoal.records import StopReason
from shoal.sampler.engine import Engine
from shoal.sampler.row_memory import PagePool
from shoal.weights.sampler_copy import publish_to

SMALL = replace(QWEN3, num_layers=1)
LONGEST = 3 * PAGE
asked = request
"""In fixtures, whose `request` is pytest's."""


def check(pool: PagePool) -> None:
    """Every page of a replica has one owner or is free."""
    tables, count = pool.table.reshape(len(pool.free), -1), max(map(len, pool.free))
    for table, free in zip(tables, pool.free, strict=True):
        assert sorted([*table[table != NO_PAGE].tolist(), *free]) == list(
            range(len(free) + (table != NO_PAGE).sum())
        )
        assert len(free) <= count
    assert np.array_equal((pool.table != NO_PAGE).sum(-1), pool.held)
    assert (
        (np.arange(pool.table.shape[2]) < pool.held[..., None]) == (pool.table != NO_PAGE)
    ).all()


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(1, 4),
    st.integers(0, 12),
    st.lists(
        st.tuples(st.integers(0, 5), st.lists(st.integers(0, 4), min_size=3, max_size=3)),
        max_size=30,
    ),
)
def test_a_page_has_one_owner_or_is_free(replicas, siblings, most, more, gifts):
    pool = PagePool(2 * replicas, siblings, most, siblings * most + more, replicas)
    for row, wanted in gifts:
        row, wanted = row % (2 * replicas), np.minimum(wanted[:siblings], most)
        before, table = pool.held[row].copy(), pool.table.copy()
        free = len(pool.free[pool.replica_of(row)])
        if pool.give(row, wanted):
            assert np.array_equal(pool.held[row], wanted) and free >= (wanted - before).sum()
        else:
            assert np.array_equal(pool.table, table) and free < (wanted - before).sum()
        check(pool)
    for row in range(2 * replicas):
        pool.take_back(row)
    for replica in range(replicas):
        assert pool.spare(replica) == siblings * most + more


def test_a_pool_holds_a_row_of_whole_limits():
    with pytest.raises(
        ValueError, match="a replica has 5 pages, expected at least 6: a row's 2 completions"
    ):
        PagePool(4, 2, 3, 5)


@pytest.fixture(scope="module", autouse=True)
def by_pages() -> Iterator[None]:
    """As on a TPU, by the kernel in interpret mode. Of that JAX 0.11 makes an empty constant, which
    as an argument of what each replica runs, JAX's default, ends XLA's compiler by a segmentation
    fault."""
    before = jax.config.values["jax_use_simplified_jaxpr_constants"]
    jax.config.update("jax_use_simplified_jaxpr_constants", True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Role, "platform", "tpu")

        def decode_kernel_refusal(model, layer=None):
            return ""

        patch.setattr(selector, "decode_kernel_refusal", decode_kernel_refusal)
        patch.setattr(decode_tpu, "attend_pages", partial(decode_tpu.attend_pages, interpret=True))
        yield
    jax.config.update("jax_use_simplified_jaxpr_constants", before)


def pool_of(engine: Engine) -> PagePool:
    assert engine.pool
    return engine.pool


def make(pages: int = 0, where: Any = None, **changes: Any) -> Engine:
    """An engine whose every dispatch keeps the account of its pages."""
    sizes = {
        "slots": 8,
        "group_size": 4,
        "siblings_per_row": 2,
        "max_prompt_tokens": 100,
        "max_completion_tokens": LONGEST,
        "eos_ids": EOS,
        **changes,
    }
    engine = Engine(Model(SMALL, (where or roles()).sampler), pages=pages, **sizes)
    engine.load(0, publish_to(engine.model, weights(SMALL)))
    whole = engine.programs

    def decode(*args: Any, stopped: np.ndarray, pages: np.ndarray, **arrays: Any) -> Any:
        check(pool_of(engine))
        for row, (id, part) in engine.scheduler.running.items():
            for slot, one in enumerate(engine._partials(part, engine.requests[id])):
                if not stopped[row, slot] and one.reason is None:
                    assert (pages[row, slot] != NO_PAGE).sum() * PAGE >= min(
                        len(one.tokens) + 31, one.limit - 1
                    )
        return whole["decode"](*args, stopped=stopped, pages=pages, **arrays)

    engine.programs = {**whole, "decode": decode}
    return engine


def long(row: int, **changes: Any) -> SampleRequest:
    return request(row, max_tokens=(350, 200, 300, 383, 90, 250, 384)[row], **changes)


@pytest.fixture(scope="module")
def base() -> dict:
    """With as many pages as all limits need, of which nothing gives way."""
    engine = make(eos_ids=())
    assert pool_of(engine).table.shape == (4, 2, 3) and len(pool_of(engine).free[0]) == 24
    played = play(engine, [long(row) for row in range(7)])
    assert engine.counters["preempted_rows"] == 0 and not {"swap_out", "swap_in"} & {
        name for name, _ in engine._started
    }
    return played


@pytest.mark.slow
@pytest.mark.compile_quickly(False)  # thousands of tokens, by an interpreted kernel
@pytest.mark.bitwise
@pytest.mark.parametrize("pages", [8, 11])
def test_rows_that_give_way_have_the_same_bits(base, pages):
    """In rows of half a group, of which the second half joins; the engine takes a second step's
    prompts as well."""
    engine = make(pages, eos_ids=())
    for ids in (0, 100):
        before = engine.counters["preempted_rows"]
        same(play(engine, [long(row, id=ids + row) for row in range(7)]), base)
        assert (
            engine.counters["preempted_rows"] > before + 1 and len(pool_of(engine).free[0]) == pages
        )
        assert (
            not engine.swapped._on_host
            and not engine.swapped._arriving
            and not engine.scheduler.returning
        )


@pytest.mark.slow
@pytest.mark.compile_quickly(False)
def test_a_request_is_cancelled_of_which_rows_gave_way(base):
    engine = make(9, eos_ids=())
    engine.submit([long(row) for row in range(7)])
    found, cancelled = {}, []
    while not engine.idle:
        if engine.scheduler.returning and len(cancelled) < 2:
            id, _ = next(iter(engine.scheduler.returning))
            cancelled.append(id)
            engine.cancel(id)
            check(pool_of(engine))
        found |= {(one.request_id, one.index): one for one in chain(*engine.step().values())}
    assert len(cancelled) == 2 and len(found) == 28
    for key, one in found.items():
        assert (
            (one.stop_reason is StopReason.CANCELLED)
            or key[0] not in cancelled
            or len(one) == len(base[key])
        )
        assert one.token_ids.tolist() == base[key].token_ids[: len(one)].tolist()
    assert len(pool_of(engine).free[0]) == 9 and not engine.swapped._on_host


@pytest.mark.slow
def test_each_replica_has_pages_of_its_own(base):
    engine = make(8, roles(2), eos_ids=())
    assert engine.scheduler.replicas == 2 and engine.state_shapes().caches[0].own_kv.shape[0] == 16
    found = play(engine, [long(row) for row in range(7)])
    assert engine.counters["preempted_rows"] > 1 and [
        len(free) for free in pool_of(engine).free
    ] == [8, 8]
    # Of replicas with half of the rows: another program, with other last bits.
    whole = play(make(0, roles(2), eos_ids=()), [long(row) for row in range(7)])
    same(found, whole)
    assert (
        sum(found[key].token_ids.tolist() == one.token_ids.tolist() for key, one in base.items())
        >= len(base) - 1
    )


def in_turns(row: int) -> SampleRequest:
    asked = turns.in_turns(row, 2)
    return replace(asked, params=replace(asked.params, max_tokens=700))


@pytest.mark.slow
@pytest.mark.parametrize("siblings", [1, 2])
def test_turns_in_few_pages(siblings):
    """Contexts long enough to be fed; rows whose completions wait give way before those that
    sample."""

    def played(pages: int, seed: int) -> tuple[Engine, dict, dict]:
        engine = make(
            pages,
            slots=4,
            group_size=2,
            siblings_per_row=siblings,
            max_completion_tokens=700,
            eos_ids=EOS + tuple(range(40, 44)),
        )
        return engine, *turns.play(
            engine, [in_turns(row) for row in range(5)], seed, turns.long_answer, 700
        )

    _, whole, counts = played(0, 0)
    for seed in range(3):
        engine, done, own = played(6 * siblings + 1, seed)
        assert own == counts and {"feed", "swap_out", "swap_in"} <= {
            name for name, _ in engine._started
        }
        same(done, whole)
        assert len(pool_of(engine).free[0]) == 6 * siblings + 1


@pytest.mark.slow
@pytest.mark.compile_quickly(False)
def test_random_requests_in_few_pages():
    """Groups of any size, cancelled at any time; whoever is left has the bits of a whole pool."""
    requests = []
    for row in range(7):
        requests.append(
            request(row, count=1 + row % 5, max_tokens=(1, 40, 130, 384, 260, 129, 128)[row])
        )
    whole = play(make(eos_ids=()), requests)
    engine = make(9, eos_ids=())
    for seed in range(5):
        rng = random.Random(seed)
        left = rng.sample(requests, 7)
        found: dict = {}
        while left or not engine.idle:
            if left and rng.random() < 0.5:
                engine.submit([left.pop()])
            if engine.requests and rng.random() < 0.03:
                engine.cancel(rng.choice(list(engine.requests)))
            if not engine.idle:
                found |= {
                    (one.request_id, one.index): one for one in chain(*engine.step().values())
                }
            check(pool_of(engine))
        assert (
            len(found) == sum(one.num_completions for one in requests)
            and not engine.swapped._on_host
        )
        same(
            {key: one for key, one in found.items() if one.stop_reason is not StopReason.CANCELLED},
            whole,
        )
    assert engine.counters["preempted_rows"] > 3
