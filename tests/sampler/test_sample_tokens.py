"""One uniform an address, and the inverse of the distribution: which token it gives, and at which
log-prob."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiled import arrays
from hypothesis import given, settings
from hypothesis import strategies as st
from small import roles

from shoal.plan.hlo import COLLECTIVES, Module
from shoal.records import NoiseKey
from shoal.sampler.sample_tokens import (
    BLOCK,
    TPU_BLOCK,
    SamplingArrays,
    inverse,
    sample_tokens,
    sampling_support,
    uniform,
)

ADDRESS = NoiseKey(seed=0, purpose="train", step=3, row=17)
# of ADDRESS, completion 2, positions 0, 1, 2
GOLDEN = [0.6257759928703308, 0.013721287250518799, 0.18219202756881714]

_inverse = jax.jit(inverse)
_choose = jax.jit(sample_tokens, static_argnums=3)
_kept = jax.jit(sampling_support)
ROWS = 64  # of every call of `drawn`: few programs are compiled


def uniforms(keys: list[np.ndarray], positions) -> np.ndarray:
    """[keys, positions]"""
    shape = (len(keys), len(positions))
    places = np.broadcast_to(np.asarray(positions, np.int32), shape)
    return np.asarray(
        jax.jit(uniform)(np.broadcast_to(np.stack(keys)[:, None], (*shape, 2)), places)
    )


def how(
    rows: int, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> SamplingArrays:
    return SamplingArrays(
        np.full(rows, temperature, np.float32),
        np.full(rows, top_k, np.int32),
        np.full(rows, top_p, np.float32),
        np.full(rows, min_p, np.float32),
    )


def drawn(masses: np.ndarray, u) -> np.ndarray:
    """`inverse` of any number of rows."""
    u = np.asarray(u, np.float32)
    masses = np.broadcast_to(np.asarray(masses, np.float32), (len(u), np.shape(masses)[-1]))
    padding = -len(u) % ROWS
    masses = np.pad(masses, ((0, padding), (0, 0)), constant_values=1)
    u = np.pad(u, (0, padding), constant_values=0.5)
    parts = []
    for at in range(0, len(u), ROWS):
        parts.append(_inverse(masses[at : at + ROWS], u[at : at + ROWS]))
    return np.concatenate(parts)[: len(u) - padding]


def grid(count: int) -> np.ndarray:
    """`count` uniforms, evenly spread: each token is drawn as often as its mass says, to one."""
    return ((np.arange(count) + 0.5) / count).astype(np.float32)


def truncated_probabilities(
    logits: np.ndarray, temperature: float, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> np.ndarray:
    """What is sampled from, float64[V], token by token: top_k, then top_p of the rest, then
    min_p."""
    scaled = np.asarray(logits, np.float64) / temperature
    p = np.exp(scaled - scaled.max())
    p /= p.sum()
    if top_k:
        p = np.where(p >= np.sort(p)[::-1][min(top_k, len(p)) - 1], p, 0)
        p /= p.sum()
    if top_p < 1:
        alive, mass = [], 0.0
        for token in np.argsort(-p, kind="stable"):
            if mass >= top_p:
                break
            alive.append(token)
            mass += p[token]
        p = np.where(np.isin(np.arange(len(p)), alive), p, 0)
        p /= p.sum()
    p = np.where(p >= min_p * p.max(), p, 0)
    return p / p.sum()


# The uniform of an address


def test_a_uniform_is_a_bitwise_function_of_its_address():
    key = ADDRESS.key(2)
    assert key.dtype == np.uint32 and key.tolist() == ADDRESS.key(2).tolist()
    assert uniforms([key], range(3))[0].tolist() == GOLDEN
    companions = [NoiseKey(1, "train", 0, r).key(0) for r in range(5)]
    assert uniforms([*companions, key], range(40))[-1, :3].tolist() == GOLDEN


@pytest.mark.parametrize(
    "other",
    [
        NoiseKey(1, "train", 3, 17).key(2),
        NoiseKey(0, "evaluate", 3, 17).key(2),
        NoiseKey(0, "train", 4, 17).key(2),
        NoiseKey(0, "train", 3, 18).key(2),
        ADDRESS.key(1),
    ],
    ids=["seed", "purpose", "step", "row", "completion"],
)
def test_each_part_of_an_address_counts(other):
    ours, theirs = uniforms([ADDRESS.key(2), other], range(64))
    assert not (ours == theirs).any() and abs(np.corrcoef(ours, theirs)[0, 1]) < 0.5


def test_uniforms_are_uniform_and_unrelated():
    keys = [
        NoiseKey(seed, "train", step, row).key(c)
        for seed in range(2)
        for step in range(5)
        for row in range(10)
        for c in range(4)
    ]
    u = uniforms(keys, range(100))
    assert u.dtype == np.float32 and u.min() > 0 and u.max() < 1
    assert len(np.unique(u)) > 0.99 * u.size
    assert abs(u.mean() - 0.5) < 5 * (1 / 12 / u.size) ** 0.5
    assert abs(u.var() - 1 / 12) < 0.002
    counts = np.histogram(u, 20, (0, 1))[0]
    # chi-square, 19 degrees of freedom
    assert ((counts - u.size / 20) ** 2 / (u.size / 20)).sum() < 50
    along = np.corrcoef(u[:, :-1].ravel(), u[:, 1:].ravel())
    across = np.corrcoef(u[:-1].ravel(), u[1:].ravel())
    assert abs(along[0, 1]) < 0.025 and abs(across[0, 1]) < 0.025


# The inverse


@pytest.mark.parametrize(
    ("masses", "u", "token"),
    [
        ([1, 2, 1], 0.2, 0),
        ([1, 2, 1], 0.25, 1),
        ([1, 2, 1], 0.74, 1),
        ([1, 2, 1], 0.75, 2),
        ([1, 2, 1], 0.999, 2),
        ([0, 4, 0, 4, 0], 2**-24, 1),
        ([0, 4, 0, 4, 0], 0.5, 3),
        ([0, 4, 0, 4, 0], 1 - 2**-24, 3),
        ([7], 0.6, 0),
    ],
)
def test_inverse_by_hand(masses, u, token):
    assert drawn(np.pad(masses, (0, 7 - len(masses))), [u]).tolist() == [token]


def test_inverse_by_hand_over_blocks():
    masses = np.zeros((4, 1500), np.float32)
    masses[:, [3, 511, 512, 1499]] = 1, 1, 1, 1  # in three blocks, at their borders
    assert drawn(masses, [0.1, 0.3, 0.5, 0.8]).tolist() == [3, 511, 512, 1499]


@pytest.mark.parametrize("size", [7, 512, 1500])
def test_inverse_follows_the_distribution(size):
    rng = np.random.default_rng(size)
    masses = rng.exponential(1, size).astype(np.float32) ** 2
    count = 4096
    tokens = drawn(masses, grid(count))
    expected = count * masses.astype(np.float64) / masses.sum(dtype=np.float64)
    # a grid point more or less
    assert np.abs(np.bincount(tokens, minlength=size) - expected).max() < 1.01


@pytest.mark.slow
def test_a_split_vocabulary_is_searched_by_part():
    """12,000 tokens on eight devices: 1,500 on each, so that its last block is not full. Blocks are
    as on TPUs."""
    role, size = roles(tensor=8).sampler, 12_000
    # whole: their sums are exact
    masses = np.random.default_rng(1).integers(0, 3, (64, size)).astype(np.float32)
    u = jnp.asarray(grid(64))
    split = jax.device_put(masses, role.sharding((None, "vocab"), masses.shape))
    found = role.jit(lambda masses, u: inverse(masses, u, role, TPU_BLOCK))(split, u)
    assert found.tolist() == inverse(jnp.asarray(masses), u).tolist()


@pytest.mark.slow
@pytest.mark.parametrize(
    "cut", [{"top_k": 40}, {"top_p": 0.9}, {"top_k": 300, "top_p": 0.8, "min_p": 0.01}], ids=str
)
def test_truncation_of_a_split_vocabulary_moves_no_logits(cut):
    role, (rows, size) = roles(tensor=8).sampler, (ROWS, 4096)
    # with many ties
    logits = np.random.default_rng(6).integers(-20, 20, (rows, size)).astype(np.float32) / 4
    logits[:, ::3] += (
        np.random.default_rng(7).normal(0, 3, (rows, -(-size // 3))).astype(np.float32)
    )
    split = jax.device_put(logits, role.sharding((None, "vocab"), logits.shape))
    program = role.jit(lambda logits, u: sample_tokens(logits, how(rows, **cut), u, True, 16, role))
    token, logprob, ids = program(split, grid(rows))
    whole = jax.jit(lambda logits, u: sample_tokens(logits, how(rows, **cut), u, True, 16))(
        logits, grid(rows)
    )
    assert (
        (token == whole[0]).all()
        and (ids == whole[2]).all()
        and np.abs(logprob - whole[1]).max() < 1e-5
    )
    hlo = Module(program.compile(split, grid(rows)).as_text())
    moved = [
        elements
        for some in hlo.computations.values()
        for one in some
        if one.op.removesuffix("-start") in COLLECTIVES
        for _, elements in arrays(one.shape)
    ]
    assert 0 < max(moved) <= rows * BLOCK  # candidates, sums and one block


def test_drawing_by_address_follows_the_distribution():
    p = np.array([0.02, 0.3, 0.08, 0.25, 0.05, 0.2, 0.1])
    u = uniforms([NoiseKey(0, "train", 0, row).key(0) for row in range(80)], range(50)).ravel()
    tokens, *_ = _choose(np.tile(np.log(p).astype(np.float32), (len(u), 1)), how(len(u)), u, False)
    counts = np.bincount(np.asarray(tokens), minlength=len(p))
    # chi-square, 6 degrees of freedom
    assert ((counts - len(u) * p) ** 2 / (len(u) * p)).sum() < 25


@settings(deadline=None, max_examples=25)
@given(
    seed=st.integers(0, 2**32 - 1),
    size=st.sampled_from([7, 512, 1500]),
    power=st.floats(0.2, 8),
    empty=st.sampled_from([0.0, 0.5, 0.99]),
)
def test_inverse_equals_a_search_in_float64(seed, size, power, empty):
    rng = np.random.default_rng(seed)
    masses = (rng.exponential(1, (64, size)) ** power).astype(np.float32)
    masses[rng.random(masses.shape) < empty] = 0
    masses[np.arange(64), rng.integers(0, size, 64)] += 1e-3
    u = rng.random(64).astype(np.float32).clip(2**-24, 1 - 2**-24)
    u[:4] = 2**-24, 1 - 2**-24, 2**-20, 1 - 2**-20
    tokens = drawn(masses, u)
    assert (masses[np.arange(64), tokens] > 0).all()
    sums = np.cumsum(masses.astype(np.float64), -1)
    for row in range(64):
        target, edge = u[row] * sums[row, -1], 1e-5 * sums[row, -1]
        low, high = (np.searchsorted(sums[row], target + d, side="right") for d in (-edge, edge))
        if low == high:
            assert tokens[row] == low
        else:
            assert low <= tokens[row] <= min(high, size - 1)


def test_never_a_token_without_mass_where_a_parallel_sum_steps_up_by_rounding():
    rng = np.random.default_rng(0)
    masses = rng.exponential(1, (1000, 512)).astype(np.float32)
    masses[rng.random(masses.shape) < 0.5] = 0
    sums = np.asarray(jax.jit(lambda x: jnp.cumsum(x, -1))(masses))
    total = np.asarray(jnp.asarray(masses).sum(-1))
    row, place = np.nonzero((masses[:, 1:] == 0) & (sums[:, 1:] > sums[:, :-1]))
    assert len(row) > 100  # the sum does step up where nothing is added
    for nudge in range(-2, 3):  # aims at the gap
        u = sums[row, place] / total[row] * (1 + nudge * 2.0**-24)
        assert (masses[row, drawn(masses[row], u)] > 0).all()


def test_extreme_logits_draw_the_only_token_left():
    logits = np.full((ROWS, 600), -1e4, np.float32)
    logits[:, 550] = 0
    u = grid(ROWS)
    u[[0, -1]] = 2**-24, 1 - 2**-24
    token, logprob, _ = _choose(logits, how(ROWS), u, False)
    assert token.tolist() == [550] * ROWS and logprob.tolist() == [0.0] * ROWS


# Log-probs, greedy, truncation


def test_log_probs_are_those_of_the_temperature():
    logits = np.random.default_rng(1).normal(0, 3, (ROWS, 600)).astype(np.float32)
    for temperature in (1.0, 0.7, 1.6):
        token, logprob, _ = _choose(logits, how(ROWS, temperature), grid(ROWS), False)
        expected = []
        for x, t in zip(logits, np.asarray(token), strict=True):
            expected.append(np.log(truncated_probabilities(x, temperature)[t]))
        assert np.abs(np.asarray(logprob) - expected).max() < 1e-5


@pytest.mark.parametrize("truncated", [False, True])
def test_greedy_is_the_likeliest_at_temperature_1_untruncated(truncated):
    logits = np.random.default_rng(2).normal(0, 2, (ROWS, 600)).astype(np.float32)
    cut = how(ROWS, 0.0, 3, 0.2, 0.5) if truncated else how(ROWS, 0.0)
    token, logprob, _ = _choose(logits, cut, grid(ROWS), truncated)
    assert (np.asarray(token) == logits.argmax(-1)).all()
    expected = [np.log(truncated_probabilities(x, 1.0).max()) for x in logits]
    assert np.abs(np.asarray(logprob) - expected).max() < 1e-5


def test_greedy_and_sampled_slots_stand_side_by_side():
    logits = np.random.default_rng(3).normal(0, 1, (ROWS, 600)).astype(np.float32)
    mixed = how(ROWS)._replace(temperature=np.array([0, 1] * (ROWS // 2), np.float32))
    token, logprob = (np.asarray(x) for x in _choose(logits, mixed, grid(ROWS), False)[:2])
    alone = []
    for x in _choose(logits, how(ROWS), grid(ROWS), False)[:2]:
        alone.append(np.asarray(x))
    assert (token[::2] == logits.argmax(-1)[::2]).all()
    assert (token[1::2] == alone[0][1::2]).all() and (logprob[1::2] == alone[1][1::2]).all()


@pytest.mark.parametrize(
    "cut",
    [
        {"top_k": 1},
        {"top_k": 5},
        {"top_k": 10**6},
        {"top_p": 0.8},
        {"top_p": 1e-6},
        {"min_p": 0.05},
        {"min_p": 0.999},
        {"top_k": 20, "top_p": 0.9},
        {"top_k": 20, "top_p": 0.9, "min_p": 0.1},
        {"top_p": 0.95, "min_p": 0.02},
    ],
    ids=str,
)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_truncation_equals_an_independent_one(cut, temperature):
    rows, points = 6, 400
    logits = np.random.default_rng(4).normal(0, 2, (rows, 90)).astype(np.float32)
    repeated = np.repeat(logits, points, 0)
    token, logprob = (
        np.asarray(x).reshape(rows, points)
        for x in _choose(
            repeated, how(rows * points, temperature, **cut), np.tile(grid(points), rows), True
        )[:2]
    )
    for row in range(rows):
        p = truncated_probabilities(logits[row], temperature, **cut)
        # -inf where a token should not be drawn
        assert np.abs(logprob[row] - np.log(p[token[row]])).max() < 1e-5
        assert np.abs(np.bincount(token[row], minlength=90) - points * p).max() < 1.01


def kept_of(p: list[float], **cut: float) -> list[int]:
    return np.flatnonzero(
        np.asarray(_kept(np.array([p], np.float32) / max(p), how(1, **cut)))[0]
    ).tolist()  # type: ignore[arg-type]


def test_order_of_truncation_by_hand():
    p = [0.1, 0.4, 0.2, 0.3]  # top_k=3 leaves 0.44, 0.33, 0.22 after normalising
    assert kept_of(p, top_k=3, top_p=0.75) == [1, 3]  # top_p first would keep three
    assert kept_of(p, top_p=0.75) == [1, 2, 3]
    assert kept_of(p, top_p=0.65) == [1, 3]
    assert kept_of(p, min_p=0.6) == [1, 3]
    assert kept_of(p, top_k=3, top_p=0.75, min_p=0.8) == [1]
    assert kept_of(p) == [0, 1, 2, 3]


def test_equals_stay_together():
    assert kept_of([0.3, 0.2, 0.2, 0.2, 0.1], top_k=2) == [0, 1, 2, 3]
    assert kept_of([0.3, 0.2, 0.2, 0.2, 0.1], top_p=0.4) == [0, 1, 2, 3]
    assert kept_of([0.25] * 4, min_p=0.99) == [0, 1, 2, 3]


@settings(deadline=None, max_examples=25)
@given(
    seed=st.integers(0, 2**32 - 1),
    top_k=st.integers(0, 30),
    top_p=st.floats(0.01, 1),
    distinct=st.integers(1, 40),
)
def test_support_equals_that_of_sorted_masses(seed, top_k, top_p, distinct):
    """Masses are small multiples of 2^-10: their sums are exact in any order."""
    masses = (np.random.default_rng(seed).integers(0, distinct, (16, 25)) * 2.0**-10).astype(
        np.float32
    )
    masses[:, 7] = 1.0
    ordered = -np.sort(-masses, -1)
    smallest = ordered[:, min(top_k or 25, 25) - 1, None]
    ordered = np.where(ordered >= smallest, ordered, 0)
    inside = np.cumsum(ordered, -1) - ordered < np.float32(top_p) * ordered.sum(-1, keepdims=True)
    if np.float32(top_p) < 1:
        nucleus = np.where(inside & (ordered > 0), ordered, np.inf).min(-1, keepdims=True)
    else:
        nucleus = 0
    keep = np.asarray(_kept(masses, how(16, 1.0, top_k, top_p)))
    assert (keep == ((masses >= smallest) & (masses >= nucleus))).all()


@settings(deadline=None, max_examples=25)
@given(
    seed=st.integers(0, 2**32 - 1),
    top_k=st.integers(0, 30),
    top_p=st.floats(1e-7, 1),
    min_p=st.floats(0, 0.999),
)
def test_the_likeliest_always_stays(seed, top_k, top_p, min_p):
    logits = np.random.default_rng(seed).normal(0, 4, (16, 25)).astype(np.float32)
    masses = np.exp(logits - logits.max(-1, keepdims=True))
    keep = np.asarray(_kept(masses, how(16, 1.0, top_k, top_p, min_p)))
    assert keep[np.arange(16), logits.argmax(-1)].all()
    for row, stays in zip(masses, keep, strict=True):
        # what stays is at least as likely as what goes
        assert row[stays].min() >= row[~stays].max(initial=0)


def test_truncation_that_is_off_changes_no_bit():
    # most masses are below any rounding
    logits = np.random.default_rng(5).normal(0, 9, (ROWS, 600)).astype(np.float32)
    plain, open_ = (
        _choose(logits, how(ROWS), grid(ROWS), truncated) for truncated in (False, True)
    )
    for x, y in zip(plain[:2], open_[:2], strict=True):
        assert (np.asarray(x) == np.asarray(y)).all()
    masses = np.exp(logits - logits.max(-1, keepdims=True))
    assert np.asarray(_kept(masses, how(ROWS))).all()
