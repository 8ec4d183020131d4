"""The gated delta rule: against a plain recurrence in float64, and against transformers."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small import QWEN3, relative, roles

from shoal.mesh import Role
from shoal.model import delta_gpu, delta_net, delta_tpu
from shoal.model.architecture import DeltaNet, Layer
from shoal.model.attention import trials
from shoal.model.delta_net import (
    CHUNK,
    _unit_lower_inverse,
    chain_before,
    convolve,
    convolve_after,
)
from shoal.model.recurrence import step_of, steps_by_kernel
from shoal.model.transformer import Model

KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM = 2, 4, 8, 6
delta_rows = partial(delta_net.delta_rows, platform="cpu")
delta_sequence = partial(delta_net.delta_sequence, platform="cpu")
delta_step = partial(delta_net.delta_step, platform="cpu")


def inputs(rows: int, size: int, seed: int = 0, decay: float = 1.0) -> tuple:
    """(q, k, v, log_decay, beta) of random tokens, float32."""
    rng = np.random.default_rng(seed)
    q = rng.normal(size=(rows, size, KEY_HEADS, KEY_DIM))
    k = rng.normal(size=(rows, size, KEY_HEADS, KEY_DIM))
    v = rng.normal(size=(rows, size, VALUE_HEADS, VALUE_DIM))
    log_decay = -decay * rng.exponential(size=(rows, size, VALUE_HEADS)) / 4
    beta = rng.uniform(size=(rows, size, VALUE_HEADS))
    return tuple(jnp.asarray(x, jnp.float32) for x in (q, k, v, log_decay, beta))


def packed(groups: list[tuple[int, list[int]]], size: int) -> tuple[np.ndarray, np.ndarray]:
    """segment[1, size] and prompt[1, size] of (tokens of a prompt, tokens of its completions)."""
    segment, prompt, number = [], [], 0
    for length, completions in groups:
        number += 1
        own_prompt = number
        segment += [number] * length
        prompt += [number] * length
        for tokens in completions:
            number += 1
            segment += [number] * tokens
            prompt += [own_prompt] * tokens
    segment += [0] * (size - len(segment))
    prompt += [0] * (size - len(prompt))
    return np.array([segment], np.int32), np.array([prompt], np.int32)


def before_of(segment: np.ndarray, prompt: np.ndarray) -> jax.Array:
    """`LearnerBatch.before` of one packed row."""
    before = np.arange(segment.shape[1], dtype=np.int32)
    last: dict[int, int] = {}  # index of the last token so far of each segment
    for index, (own, of_prompt) in enumerate(zip(segment[0], prompt[0], strict=True)):
        if own == 0:
            continue
        before[index] = last.get(own, last.get(of_prompt, index))
        last[own] = index
    return jnp.asarray(before[None])


def recurrence(q, k, v, log_decay, beta, segment, prompt, numbers=np) -> np.ndarray:
    """The rule token by token, with the state after each token kept by segment; numbers: numpy, or
    jax.numpy for a gradient. Arrays are those of one row."""
    share = VALUE_HEADS // KEY_HEADS

    def unit(x):
        return x / numbers.sqrt((x * x).sum(-1, keepdims=True) + 1e-6)

    q = numbers.repeat(unit(q) * KEY_DIM**-0.5, share, axis=-2)
    k = numbers.repeat(unit(k), share, axis=-2)
    states = {}
    out = []
    zeros = numbers.zeros((VALUE_HEADS, KEY_DIM, VALUE_DIM), q.dtype)
    for t, (own, of_prompt) in enumerate(zip(segment.tolist(), prompt.tolist(), strict=True)):
        if own == 0:
            out.append(numbers.zeros((VALUE_HEADS, VALUE_DIM), q.dtype))
            continue
        state = states.get(own, states.get(of_prompt, zeros))
        state = state * numbers.exp(log_decay[t])[:, None, None]
        read = (k[t][:, :, None] * state).sum(1)
        change = beta[t][:, None] * (v[t] - read)
        state = state + k[t][:, :, None] * change[:, None]
        states[own] = state
        out.append((q[t][:, :, None] * state).sum(1))
    return numbers.stack(out)


PACKINGS = {
    "one chunk": ([(5, [3, 4, 2])], 16),
    "prompt longer than chunks": ([(150, [40, 70, 1])], 261),
    "prompt ends within a chunk": ([(90, [20, 30, 64, 5])], 220),
    "prompts of one token": ([(1, [70, 1]), (1, [2, 66])], 150),
    "prompt ends with a chunk": ([(64, [64, 10]), (3, [1, 1, 1])], 150),
    "several groups": ([(20, [30, 30]), (70, [5, 80]), (2, [2])], 256),
}


@pytest.mark.parametrize("platform", ["cpu", "tpu"])
@pytest.mark.parametrize("name", PACKINGS)
def test_packed_rows_equal_the_recurrence(name, platform):
    groups, size = PACKINGS[name]
    segment, prompt = packed(groups, size)
    arrays = inputs(1, size)
    exact = [np.asarray(x[0], np.float64) for x in arrays]
    expected = recurrence(*exact, segment[0], prompt[0])
    out = jax.jit(partial(delta_rows, platform=platform))(*arrays, segment, prompt)
    assert relative(out[0], expected) < 1e-6
    assert not np.asarray(out)[segment == 0].any()


@pytest.mark.parametrize(
    ("name", "platform"),
    [
        ("one chunk", "cpu"),
        pytest.param("prompt longer than chunks", "cpu", marks=pytest.mark.slow),
        pytest.param("prompts of one token", "cpu", marks=pytest.mark.slow),
        pytest.param("prompt ends with a chunk", "cpu", marks=pytest.mark.slow),
        pytest.param("several groups", "cpu", marks=pytest.mark.slow),
        pytest.param("several groups", "tpu", marks=pytest.mark.slow),
    ],
)
def test_gradients_equal_those_of_the_recurrence(name, platform):
    groups, size = PACKINGS[name]
    segment, prompt = packed(groups, size)
    arrays = inputs(1, size, seed=1)
    weights = np.random.default_rng(2).normal(size=(size, VALUE_HEADS, VALUE_DIM))

    def loss(*arrays):
        out = delta_rows(*arrays, segment, prompt, platform=platform)
        return (out[0] * jnp.asarray(weights, jnp.float32)).sum()

    found = jax.jit(jax.grad(loss, argnums=range(5)))(*arrays)
    with jax.enable_x64(True):

        def exact_loss(*arrays):
            out = recurrence(*arrays, segment[0], prompt[0], numbers=jnp)
            return (out * weights).sum()

        exact = [jnp.asarray(np.asarray(x[0], np.float64)) for x in arrays]
        expected = jax.grad(exact_loss, argnums=range(5))(*exact)
        expected = [np.asarray(x) for x in expected]
    for gradient, of_recurrence in zip(found, expected, strict=True):
        assert relative(gradient[0], of_recurrence) < 5e-6
        assert not np.asarray(gradient)[segment == 0].any()


def test_a_completion_does_not_depend_on_its_neighbours():
    """In value and in gradient: what stands elsewhere in the row changes nothing."""
    segment, prompt = packed([(70, [40, 30, 20])], 170)
    arrays = inputs(1, 170)
    second = segment == 3
    others = (segment == 2) | (segment == 4)

    def of_second(*arrays):
        return (delta_rows(*arrays, segment, prompt)[second] ** 2).sum()

    gradients = jax.grad(of_second, argnums=range(5))(*arrays)
    for gradient in gradients:
        assert not np.asarray(gradient)[others].any()
    for gradient in gradients[1:]:  # all but the queries, which leave no trace in a state
        assert np.asarray(gradient)[segment == 1].any()
    changed = [jnp.where(np.expand_dims(others, tuple(range(2, x.ndim))), -0.1, x) for x in arrays]
    before = np.asarray(delta_rows(*arrays, segment, prompt))[second]
    after = np.asarray(delta_rows(*changed, segment, prompt))[second]
    assert relative(after, before) < 1e-6


@pytest.mark.parametrize("cuts", [(100,), (1, 99), (64, 36), (30, 0, 70)])
def test_a_sequence_in_pieces_equals_the_recurrence_and_single_steps(cuts):
    size = 100
    arrays = inputs(2, size, seed=3)
    segment = np.ones(size, np.int32)
    state = jnp.zeros((2, VALUE_HEADS, KEY_DIM, VALUE_DIM), jnp.float32)
    outs, start = [], 0
    for count in cuts:
        # Each piece is filled up with tokens that are not real.
        piece = [
            jnp.pad(x[:, start : start + count], [(0, 0), (0, 7)] + [(0, 0)] * (x.ndim - 2)) + 0.0
            for x in arrays
        ]
        out, state = delta_sequence(*piece, state, jnp.array([count, count]))
        outs.append(np.asarray(out)[:, :count])
        start += count
    out = np.concatenate(outs, axis=1)
    for row in range(2):
        exact = [np.asarray(x[row], np.float64) for x in arrays]
        assert relative(out[row], recurrence(*exact, segment, segment)) < 2e-6
    stepped = jnp.zeros((2, 1, VALUE_HEADS, KEY_DIM, VALUE_DIM), jnp.float32)
    step = jax.jit(delta_step)
    for t in range(size):
        q, k, v, log_decay, beta = (x[:, t : t + 1] for x in arrays)
        of_token, stepped = step(q, k, v, log_decay, beta, stepped)
        assert relative(of_token[:, 0], out[:, t]) < 1e-5
    assert relative(stepped[:, 0], state) < 1e-5


def test_counts_differ_by_row_and_none_leaves_the_state():
    arrays = inputs(3, 70, seed=4)
    start = jnp.asarray(np.random.default_rng(5).normal(size=(3, 4, 8, 6)), jnp.float32)
    _, state = delta_sequence(*arrays, start, jnp.array([70, 0, 33]))
    assert np.array_equal(state[1], start[1])
    shorter = [x[2:, :33] for x in arrays]
    _, alone = delta_sequence(*shorter, start[2:], jnp.array([33]))
    assert relative(state[2], alone[0]) < 1e-6


@pytest.mark.parametrize("decay", [0.0, 200.0])
def test_no_decay_and_strong_decay_are_finite(decay):
    segment, prompt = packed([(70, [40, 30])], 150)
    arrays = inputs(1, 150, decay=decay)

    def loss(*arrays):
        return (delta_rows(*arrays, segment, prompt) ** 2).sum()

    value, gradients = jax.value_and_grad(loss, argnums=range(5))(*arrays)
    for array in (value, *gradients):
        assert np.isfinite(array).all()


@pytest.mark.parametrize("at_once", [8, 64])
def test_equal_keys_are_solved_without_cancellation(at_once):
    """All keys equal and all rates 1: the system's powers have binomial coefficients, the inverse
    has 1 and -1."""
    lower = jnp.tril(jnp.ones((1, 64, 64)), -1)
    expected = np.eye(64) - np.eye(64, k=-1)
    np.testing.assert_array_equal(_unit_lower_inverse(lower, at_once)[0], expected)


@pytest.mark.parametrize("at_once", [4, 16, 64])
def test_triangular_inverses_are_exact(at_once):
    lower = np.tril(np.random.default_rng(0).normal(size=(2, 3, 64, 64)) / 8, -1)
    found = _unit_lower_inverse(jnp.asarray(lower, jnp.float32), at_once)
    assert relative(found, np.linalg.inv(np.eye(64) + lower)) < 1e-6


def test_small_decays_are_exact_after_strong_ones():
    """Every fourth token forgets nearly all, the others nearly nothing. A decay that is a
    difference of sums over hundreds would have no more than four digits."""
    size = 128
    segment = np.ones((1, size), np.int32)
    q, k, v, log_decay, beta = inputs(1, size, seed=7)
    strong = (jnp.arange(size) % 4 == 0)[:, None]
    arrays = (q, k, v, jnp.where(strong, -50.0, log_decay / 10), beta)
    exact = [np.asarray(x[0], np.float64) for x in arrays]
    expected = recurrence(*exact, segment[0], segment[0])
    assert relative(delta_rows(*arrays, segment, segment)[0], expected) < 5e-7


@pytest.mark.parametrize("platform", ["cpu", "tpu"])
def test_bfloat16_rounds_no_more_than_a_few_products(platform):
    """Each of the rule's products rounds its arrays; the state is not rounded from chunk to chunk,
    so that the error does not grow along the row."""
    groups, size = [(100, [300, 200])], 600
    segment, prompt = packed(groups, size)
    arrays = inputs(1, size, seed=8, decay=0.05)
    q, k, v = (x.astype(jnp.bfloat16) for x in arrays[:3])
    found = delta_rows(q, k, v, *arrays[3:], segment, prompt, platform=platform)
    assert found.dtype == jnp.bfloat16
    wide = [x.astype(jnp.float32) for x in (q, k, v)]
    exact = [np.asarray(x[0], np.float64) for x in (*wide, *arrays[3:])]
    expected = recurrence(*exact, segment[0], prompt[0])
    own_rounding = relative(expected.astype(jnp.bfloat16).astype(np.float64), expected)
    assert relative(np.asarray(found[0], np.float64), expected) < 4 * own_rounding
    late = slice(500, 600)
    assert relative(np.asarray(found[0, late], np.float64), expected[late]) < 4 * own_rounding


def test_a_step_is_the_same_on_each_platform():
    rng = np.random.default_rng(9)
    tokens = [x.reshape(3, 2, *x.shape[2:]) for x in inputs(3, 2, seed=9)]
    state = jnp.asarray(rng.normal(size=(3, 2, VALUE_HEADS, KEY_DIM, VALUE_DIM)), jnp.float32)
    expected = delta_step(*tokens, state)
    for platform in CHUNK:
        for found, same in zip(
            delta_step(*tokens, state, platform=platform), expected, strict=True
        ):
            assert relative(found, same) < 1e-6


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kernel", [delta_gpu, delta_tpu])
def test_the_kernels_of_decoding_compute_a_step(kernel, dtype, monkeypatch):
    """Interpreted, for heads of other sizes than the values'; where they are wrong it is noticed
    before they are used."""
    device = jax.devices()[0]

    trials.state_fault_on.cache_clear()
    assert trials.state_fault_on(kernel, device, 32, 64, dtype, interpret=True) == ""
    right = kernel.step_by_kernel

    def wrong(q, k, v, log_decay, beta, state, interpret):
        return right(q, k, v, log_decay, 1.1 * beta, state, interpret)

    monkeypatch.setattr(kernel, "step_by_kernel", wrong)
    fault = trials.state_fault_on(kernel, device, 16, 32, dtype, interpret=True)
    trials.state_fault_on.cache_clear()
    assert "results of delta nets differ" in fault


def test_the_kernels_of_decoding_are_used_where_they_can_compute_the_heads(monkeypatch):
    sizes = DeltaNet(num_key_heads=2, num_value_heads=4, key_dim=128, value_dim=64)
    a = replace(QWEN3, pattern=(Layer("delta_net"),), delta_net=sizes)
    model = Model(a, roles(1, 1, 1).sampler)
    wide = replace(model, architecture=replace(a, delta_net=replace(sizes, value_dim=256)))
    found = {}
    for platform in ("cpu", "gpu", "tpu"):
        monkeypatch.setattr(Role, "platform", platform)
        assert not steps_by_kernel(replace(model, attention="blocked"))
        found[platform] = steps_by_kernel(model), steps_by_kernel(wide)
    assert found == {"cpu": (False, False), "gpu": (True, False), "tpu": (False, True)}


@pytest.mark.parametrize(("platform", "kernel"), [("gpu", delta_gpu), ("tpu", delta_tpu)])
def test_on_several_devices_each_steps_its_heads(platform, kernel, monkeypatch):
    """Two devices, each with one of two key heads and its value heads; 6 slots, of which a TPU's
    step takes several."""
    monkeypatch.setattr(Role, "platform", platform)
    monkeypatch.setattr(kernel, "step_by_kernel", partial(kernel.step_by_kernel, interpret=True))
    side = 128 if platform == "tpu" else 16
    sizes = DeltaNet(num_key_heads=2, num_value_heads=4, key_dim=side, value_dim=side)
    a = replace(QWEN3, pattern=(Layer("delta_net"),), delta_net=sizes)
    rng = np.random.default_rng(10)
    shapes = (2, side), (2, side), (4, side), (4,), (4,), (4, side, side)
    q, k, v, decay, beta, state = (
        jnp.asarray(rng.normal(size=(3, 2, *shape)), jnp.float32) for shape in shapes
    )
    arrays = q, k, v, -abs(decay), beta, state
    results = []
    for tensor in (1, 2):
        model = Model(a, roles(1, 1, tensor).sampler)
        assert steps_by_kernel(model)
        results.append([np.asarray(x) for x in jax.jit(step_of(model))(*arrays)])
    for one, two, plain in zip(*results, delta_step(*arrays), strict=True):
        assert np.array_equal(one, two)
        assert relative(one, plain) < 1e-6


def test_the_chain_goes_through_the_prompts_end():
    segment, prompt = packed([(2, [1, 4]), (1, [2])], 11)
    before = chain_before(before_of(segment, prompt), 3)[0].tolist()
    none = 11
    assert before == [
        [none, none, none],
        [0, none, none],
        [1, 0, none],  # the first completion, after the prompt's two tokens
        [1, 0, none],
        [3, 1, 0],
        [4, 3, 1],
        [5, 4, 3],
        [none, none, none],
        [7, none, none],
        [8, 7, none],
        [none, none, none],  # padding
    ]


def test_the_convolution_of_rows_equals_that_of_sequences():
    rng = np.random.default_rng(0)
    weight = jnp.asarray(rng.normal(size=(5, 4)), jnp.float32)
    segment, prompt = packed([(6, [3, 5])], 16)
    x = jnp.asarray(rng.normal(size=(1, 16, 5)), jnp.float32)
    rows = convolve(x, weight, chain_before(before_of(segment, prompt), 3))
    zeros = jnp.zeros((1, 3, 5))
    of_prompt, tail = convolve_after(x[:, :8], zeros, weight, jnp.array([6]))
    np.testing.assert_array_equal(tail[0], x[0, 3:6])
    np.testing.assert_allclose(rows[:, :6], of_prompt[:, :6], atol=1e-6)
    second, _ = convolve_after(x[:, 9:14], tail, weight, jnp.array([5]))
    np.testing.assert_allclose(rows[:, 9:14], second, atol=1e-6)
    # Fewer tokens than the tail has: a part of the old tail stays.
    _, short = convolve_after(x[:, 9:14], tail, weight, jnp.array([1]))
    np.testing.assert_array_equal(short[0], jnp.stack([x[0, 4], x[0, 5], x[0, 9]]))


def test_gradients_of_the_convolution_go_through_the_prompts_end():
    """Also where a prompt is shorter than the convolution and several completions add to one
    token."""
    rng = np.random.default_rng(1)
    size = 24
    segment, prompt = packed([(2, [1, 4, 3]), (6, [5])], size)
    before = chain_before(before_of(segment, prompt), 3)
    weight = rng.normal(size=(5, 4))
    x = rng.normal(size=(1, size, 5))
    factors = rng.normal(size=(1, size, 5))

    def loss(x, weight):
        return (convolve(x, weight, before) * jnp.asarray(factors, x.dtype)).sum()

    arrays = [jnp.asarray(array, jnp.float32) for array in (x, weight)]
    found = jax.grad(loss, argnums=(0, 1))(*arrays)

    def exact_loss(x, weight):
        """Each token's sum over itself and what `before` says, T being zeros."""
        filled = jnp.pad(x, ((0, 0), (0, 1), (0, 0)))
        total = x * weight[:, 3]
        for step in range(3):
            total = total + filled[:, before[0, :, step]] * weight[:, 2 - step]
        return (jax.nn.silu(total) * factors).sum()

    with jax.enable_x64(True):
        exact = jax.grad(exact_loss, argnums=(0, 1))(jnp.asarray(x), jnp.asarray(weight))
        exact = [np.asarray(gradient) for gradient in exact]
    for gradient, expected in zip(found, exact, strict=True):
        assert relative(gradient, expected) < 1e-6


@pytest.mark.slow
def test_the_rule_equals_that_of_transformers():
    torch = pytest.importorskip("torch")
    from transformers.models.qwen3_5.modeling_qwen3_5 import torch_chunk_gated_delta_rule

    arrays = inputs(2, 100, seed=6)
    q, k, v, log_decay, beta = (torch.tensor(np.asarray(x)) for x in arrays)
    share = VALUE_HEADS // KEY_HEADS
    expected, last = torch_chunk_gated_delta_rule(
        q.repeat_interleave(share, 2),
        k.repeat_interleave(share, 2),
        v,
        g=log_decay,
        beta=beta,
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    zeros = jnp.zeros((2, VALUE_HEADS, KEY_DIM, VALUE_DIM))
    out, state = jax.jit(partial(delta_sequence))(*arrays, zeros, jnp.array([100, 100]))
    assert relative(out, expected) < 2e-6
    assert relative(state, last) < 2e-6
