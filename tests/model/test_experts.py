"""Mixtures of experts against a loop over tokens in float64 and against transformers' own modules;
both forms of the products are one function."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.ad_checkpoint
import jax.numpy as jnp
import numpy as np
import pytest

from shoal.model import experts as experts_module
from shoal.model import grouped_gpu
from shoal.model.activations import ACTIVATIONS
from shoal.model.experts import (
    Form,
    _in_blocks,
    block_sizes,
    load,
    route,
)
from shoal.model.linear import (
    Adapted,
    Biased,
    Cast,
    Quantised,
    matmul_transposed_on_tpu,
    outer_by_group_on_tpu,
    quantise,
    rows_of_step,
)
from shoal.model.transformer import REMAT

TOKENS, HIDDEN, INNER, EXPERTS, CHOSEN = 13, 6, 10, 5, 2
FORMS: tuple[Form, ...] = ("ragged", "triton", "blocks", "mixed_blocks")
STEP = 1e-30

# Kernels for GPUs run as plain JAX.
experts_product = partial(experts_module.experts_product, interpret=True)


def random_arrays(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def plain(seed: int, rows: int, columns: int) -> Any:
    return jnp.asarray(random_arrays(seed, EXPERTS, rows, columns) * rows**-0.5)


def cast(seed: int, rows: int, columns: int) -> Cast:
    master = plain(seed, rows, columns)
    return Cast(master, master)


def biased(seed: int, rows: int, columns: int) -> Biased:
    return Biased(cast(seed, rows, columns), jnp.asarray(random_arrays(seed + 1, EXPERTS, columns)))


def adapted(seed: int, rows: int, columns: int) -> Adapted:
    """An adapter of rank 3 over a quantised kernel."""
    kernel = quantise(plain(seed, rows, columns), "int8")
    a = jnp.asarray(random_arrays(seed + 1, EXPERTS, rows, 3))
    b = jnp.asarray(random_arrays(seed + 2, EXPERTS, 3, columns))
    return Adapted(kernel, a, b, 0.5)


def adapted_with_bias(seed: int, rows: int, columns: int) -> Biased:
    return Biased(
        adapted(seed, rows, columns), jnp.asarray(random_arrays(seed + 3, EXPERTS, columns))
    )


KINDS = {
    "plain": plain,
    "cast": cast,
    "biased": biased,
    "adapted": adapted,
    "adapted_with_bias": adapted_with_bias,
}


def random_kernels(kind: str) -> tuple:
    make = KINDS[kind]
    return make(10, HIDDEN, INNER), make(20, HIDDEN, INNER), make(30, INNER, HIDDEN)


def affine(weight: Any, expert: int) -> tuple[Any, Any]:
    """(matrix, bias) that a weight of any kind is for one expert, in float64 or complex."""
    if isinstance(weight, Biased):
        matrix, _ = affine(weight.kernel, expert)
        return matrix, weight.bias[expert]
    if isinstance(weight, Adapted):
        matrix, bias = affine(weight.kernel, expert)
        return matrix + weight.a[expert] @ weight.b[expert] * weight.scale, bias
    if isinstance(weight, Quantised):
        return weight.values[expert] * weight.scale[expert], 0.0
    return (weight.master if isinstance(weight, Cast) else weight)[expert], 0.0


def activation_of(name: str, gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    if name == "silu":
        return gate / (1 + np.exp(-gate)) * up
    gate = np.where(gate.real > 7, 7, gate)
    up = np.where(up.real > 7, 7, np.where(up.real < -7, -7, up))
    return (up + 1) * gate / (1 + np.exp(-1.702 * gate))


def loop_over_tokens(
    x: np.ndarray,
    logits: np.ndarray,
    kernels: Any,
    experts: np.ndarray,
    normalise: bool,
    activation: str,
) -> np.ndarray:
    """Each token through each of its experts; float64, or complex with an imaginary step."""
    out = np.zeros(x.shape, np.result_type(x, logits, *jax.tree.leaves(kernels)))
    for token in range(len(x)):
        scores = np.exp(logits[token])
        among = scores[experts[token]] if normalise else scores
        for expert in experts[token]:
            matrices = [affine(weight, expert) for weight in kernels]
            (gate, gate_bias), (up, up_bias), (down, down_bias) = matrices
            inner = activation_of(activation, x[token] @ gate + gate_bias, x[token] @ up + up_bias)
            out[token] += scores[expert] / among.sum() * (inner @ down + down_bias)
    return out


def is_trained(path: tuple) -> bool:
    """Whether an array of a weight has a gradient: all but quantised ones and a cast's kernel."""
    return not {"values", "scale", "kernel"} & {str(entry).strip(".") for entry in path[-1:]}


def computed(
    form: Form, activation: str, normalise: bool, k: int, experts: Any, x: Any, logits: Any, w: Any
) -> jax.Array:
    experts, weights = route(logits, k, normalise, experts=experts)
    return experts_product(x, experts, weights, w, ACTIVATIONS[activation], form)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "kind, activation, normalise",
    [
        ("plain", "silu", True),
        ("cast", "silu", False),
        ("biased", "clamped_swiglu", True),
        ("adapted", "silu", True),
        ("adapted_with_bias", "clamped_swiglu", False),
    ],
)
def test_values_and_gradients_are_those_of_a_loop_over_tokens(
    form: Form, kind: str, activation: str, normalise: bool
):
    x = 6 * random_arrays(0, TOKENS, HIDDEN)  # some products pass the clamped activation's limit
    logits = random_arrays(1, TOKENS, EXPERTS)
    kernels = random_kernels(kind)
    of_out = random_arrays(2, TOKENS, HIDDEN)
    experts = np.argsort(-logits, axis=-1)[:, :CHOSEN]
    function = partial(computed, form, activation, normalise, CHOSEN, None)
    out, backward = jax.vjp(jax.jit(function), x, logits, kernels)
    gradients = backward(jnp.asarray(of_out))

    exact = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), (x, logits, kernels))
    expected = loop_over_tokens(*exact, experts, normalise, activation)
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max())

    # A derivative along a random direction of each array is the imaginary part of a step there.
    leaves, structure = jax.tree.flatten(exact)
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(exact)]
    checked = 0
    for number, gradient in enumerate(jax.tree.leaves(gradients)):
        if gradient.dtype == jax.dtypes.float0 or not is_trained(paths[number]):
            continue
        for seed in (3, 4):
            direction = np.random.default_rng(seed).normal(size=gradient.shape)
            stepped = list(leaves)
            stepped[number] = leaves[number] + 1j * STEP * direction
            moved = loop_over_tokens(
                *jax.tree.unflatten(structure, stepped), experts, normalise, activation
            )
            slope = (moved.imag / STEP * of_out).sum()
            size = np.linalg.norm(gradient) * np.linalg.norm(direction)
            assert (np.asarray(gradient) * direction).sum() == pytest.approx(slope, abs=1e-5 * size)
        checked += 1
    assert checked == 2 + {"plain": 3, "cast": 3, "biased": 6, "adapted": 6}.get(kind, 9)


def even(count: int, k: int) -> np.ndarray:
    """Choices that differ from token to token."""
    return (np.arange(count)[:, None] + np.arange(k)) % EXPERTS


CHOICES = {
    "one token": even(1, 2),
    "one token, one expert": np.array([[3]]),
    "all tokens to one expert": np.full((TOKENS, 1), 2),
    "an expert without tokens": even(TOKENS, 2) % 4,
    "the last experts alone": 3 + even(TOKENS, 2) % 2,
    "every expert": even(TOKENS, EXPERTS),
    # Blocks of 16 rows, mixed ones of 16 and 8: expert 1 has 66 of them, the others 22 or none.
    "more than a block for one expert": np.array([[1, 0], [1, 2], [1, 4]] * 22),
}


@pytest.mark.parametrize("name", CHOICES)
def test_any_choice_of_experts_gives_the_same_in_all_forms_and_in_a_loop(name: str):
    experts = CHOICES[name]
    count, k = experts.shape
    x = random_arrays(0, count, HIDDEN)
    logits = random_arrays(1, count, EXPERTS)
    kernels = random_kernels("biased")
    of_out = jnp.asarray(random_arrays(2, count, HIDDEN))
    results = []
    for form in FORMS:
        function = partial(computed, form, "silu", True, k, experts)
        out, backward = jax.vjp(jax.jit(function), x, logits, kernels)
        results.append((out, backward(of_out)))
    exact = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), (x, logits, kernels))
    expected = loop_over_tokens(*exact, experts, True, "silu")
    _, of_first = results[0]
    for out, gradients in results:
        np.testing.assert_allclose(out, expected, atol=1e-5)
        for one, other in zip(jax.tree.leaves(gradients), jax.tree.leaves(of_first), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)
        for unused in set(range(EXPERTS)) - set(experts.flat):
            for gradient in jax.tree.leaves(gradients[2]):
                assert not gradient[unused].any()


@pytest.mark.parametrize("form", FORMS)
def test_experts_that_are_not_here_add_nothing_and_get_no_gradient(form: Form):
    """Two shares of the experts, each with numbers of its own, sum up to the whole."""
    x = jnp.asarray(random_arrays(0, TOKENS, HIDDEN))
    experts, weights = route(jnp.asarray(random_arrays(1, TOKENS, EXPERTS)), CHOSEN, True)
    kernels = random_kernels("biased")
    of_out = jnp.asarray(random_arrays(2, TOKENS, HIDDEN))

    def share(start: int, stop: int, x: Any, weights: Any, kernels: Any) -> jax.Array:
        own = jax.tree.map(lambda leaf: leaf[start:stop], kernels)
        return experts_product(x, experts - start, weights, own, form=form)

    arguments = (x, weights, kernels)
    whole, of_whole = jax.vjp(partial(share, 0, EXPERTS), *arguments)
    first, of_first = jax.vjp(partial(share, 0, 2), *arguments)
    second, of_second = jax.vjp(partial(share, 2, EXPERTS), *arguments)
    np.testing.assert_allclose(first + second, whole, atol=1e-5)
    summed = jax.tree.map(jnp.add, of_first(of_out), of_second(of_out))
    for one, other in zip(jax.tree.leaves(summed), jax.tree.leaves(of_whole(of_out)), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)
    _, of_weights, _ = of_first(of_out)
    assert not np.asarray(of_weights)[np.asarray(experts) >= 2].any()


def test_groups_of_few_rows_have_short_steps_on_a_tpu():
    """As counted for v6e: 256 rows take 2 x 1,127 bundles in steps of 256, 1.5 x 1,874 in steps of
    512; 2,048 rows 9 x 1,127 or 5 x 1,874."""
    found = [rows_of_step(128 * rows_of_group, 128) for rows_of_group in (16, 256, 1024, 2048)]
    assert found == [256, 256, 256, 512]


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_the_kernels_of_tpus_multiply_by_group(dtype: Any):
    """Interpreted: groups without rows, and rows after the last group that are NaN."""
    sizes = [0, 3, 600, 0, 1]
    count = sum(sizes)
    x = random_arrays(0, count + 5, HIDDEN)
    y = random_arrays(1, count + 5, INNER)
    x[count:] = np.nan
    y[count:] = np.nan
    arrays = jnp.asarray(x, dtype), jnp.asarray(y, dtype), jnp.asarray(sizes, jnp.int32)
    sums = outer_by_group_on_tpu(*arrays, jnp.float32, interpret=True)
    assert sums.dtype == jnp.float32
    matrices = jnp.asarray(random_arrays(2, len(sizes), INNER, HIDDEN), dtype)
    of_rows, _, group_sizes = arrays
    products = matmul_transposed_on_tpu(of_rows, matrices, group_sizes, interpret=True)
    assert products.dtype == dtype and products.shape == (count + 5, INNER)
    wide_x, wide_y, _ = (np.asarray(array, np.float64) for array in arrays)
    wide_matrices = np.asarray(matrices, np.float64)
    start = 0
    for group, size in enumerate(sizes):
        rows = slice(start, start + size)
        np.testing.assert_allclose(sums[group], wide_x[rows].T @ wide_y[rows], atol=1e-4)
        expected = wide_x[rows] @ wide_matrices[group].T
        rounding = 1e-5 if dtype == jnp.float32 else 2**-8
        np.testing.assert_allclose(products[rows], expected, atol=1e-5, rtol=rounding)
        start += size


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_kernels_of_gpus_multiply_by_group(dtype: str):
    """Interpreted: sides that parts do not divide, groups without rows and of several tiles, rows
    after the last group that are NaN."""
    sizes = np.array([0, 3, 140, 0, 1])
    count = sizes.sum()
    x = random_arrays(0, count + 5, 20)
    y = random_arrays(1, count + 5, 130)
    x[count:] = np.nan
    y[count:] = np.nan
    x, y = jnp.asarray(x, dtype), jnp.asarray(y, dtype)
    matrices = jnp.asarray(random_arrays(2, len(sizes), 20, 130), dtype)
    tiles = grouped_gpu.tiles_of(jnp.asarray(sizes, jnp.int32), len(x), interpret=True)
    assert tiles.size == 64 and (tiles.ends > tiles.starts).sum() == 5
    products = grouped_gpu.product(x, matrices, tiles, jnp.float32)
    narrow = grouped_gpu.product(x, (30 * matrices).astype(jnp.int8), tiles, jnp.float32)
    transposed = grouped_gpu.transposed_product(y, matrices, tiles)
    sums = grouped_gpu.outer_product(x, y, tiles, jnp.float32)
    assert transposed.dtype == dtype and transposed.shape == x.shape
    start = 0
    wide_x, wide_y, wide = (np.asarray(array, np.float64) for array in (x, y, matrices))
    integers = np.asarray((30 * matrices).astype(jnp.int8), np.float64)
    rounding = 1e-5 if dtype == "float32" else 2**-8
    for group, size in enumerate(sizes):
        rows = slice(start, start + size)
        start += size
        np.testing.assert_allclose(products[rows], wide_x[rows] @ wide[group], atol=1e-4)
        np.testing.assert_allclose(
            narrow[rows], wide_x[rows] @ integers[group], rtol=1e-5, atol=0.01
        )
        np.testing.assert_allclose(
            transposed[rows], wide_y[rows] @ wide[group].T, rtol=rounding, atol=1e-4
        )
        np.testing.assert_allclose(sums[group], wide_x[rows].T @ wide_y[rows], atol=1e-4)


def test_the_kernels_of_gpus_are_tried_before_they_are_used(monkeypatch: pytest.MonkeyPatch):
    """Interpreted: with kernels that leave out the last row of a tile, the trial says so."""
    device = jax.devices()[0]
    for dtype, frozen in (("float32", "float8_e4m3fn"), ("bfloat16", "int8")):
        assert grouped_gpu.fault_on(device, dtype, frozen, interpret=True) == ""
    tiles_of = grouped_gpu.tiles_of

    def shortened(*arguments: Any) -> grouped_gpu.Tiles:
        tiles = tiles_of(*arguments)
        return replace(tiles, ends=tiles.ends - 1)

    monkeypatch.setattr(grouped_gpu, "tiles_of", shortened)
    grouped_gpu.fault_on.cache_clear()
    fault = grouped_gpu.fault_on(device, "float32", "float32", interpret=True)
    grouped_gpu.fault_on.cache_clear()
    assert "products differ" in fault


def test_each_kind_of_device_has_its_form():
    found = {}
    for platform in ("cpu", "gpu", "tpu"):
        for name in ("sampler", "trainer"):
            role: Any = SimpleNamespace(platform=platform, name=name)
            found[platform, name] = experts_module.form_of(role)
    assert found == {
        ("cpu", "sampler"): "blocks",
        ("cpu", "trainer"): "mixed_blocks",
        ("gpu", "sampler"): "triton",
        ("gpu", "trainer"): "triton",
        ("tpu", "sampler"): "ragged",
        ("tpu", "trainer"): "ragged",
    }


@pytest.mark.parametrize(
    ("num_rows", "num_groups", "size"), [(8, 128, 16), (2048, 128, 32), (32768, 128, 64)]
)
def test_tiles_have_the_rows_of_a_group(num_rows: int, num_groups: int, size: int):
    assert grouped_gpu.tile_rows(num_rows, num_groups) == size


@pytest.mark.parametrize("form", FORMS)
def test_bfloat16_is_close_and_gradients_of_masters_are_summed_in_float32(form: Form):
    x = random_arrays(0, 64, HIDDEN)
    logits = random_arrays(1, 64, EXPERTS)
    of_out = random_arrays(2, 64, HIDDEN)

    def rounded(weight: Biased) -> Biased:
        kernel = Cast(weight.kernel.master.astype(jnp.bfloat16), weight.kernel.master)
        return Biased(kernel, weight.bias)

    exact = random_kernels("biased")
    narrow = tuple(rounded(weight) for weight in exact)
    function = partial(computed, form, "silu", True, CHOSEN, None)
    results = []
    for dtype, kernels in ((jnp.float32, exact), (jnp.bfloat16, narrow)):
        out, backward = jax.vjp(jax.jit(function), jnp.asarray(x, dtype), logits, kernels)
        assert out.dtype == dtype
        results.append((out, *backward(jnp.asarray(of_out, dtype))))
    for one, other in zip(jax.tree.leaves(results[1]), jax.tree.leaves(results[0]), strict=True):
        wide = np.asarray(one, np.float32)
        assert np.linalg.norm(wide - other) <= 0.02 * np.linalg.norm(other)
    of_masters = [weight.kernel.master for weight in results[1][3]]
    for gradient in of_masters:
        assert gradient.dtype == jnp.float32
        assert (gradient != gradient.astype(jnp.bfloat16)).any()


@pytest.mark.parametrize("form", FORMS)
def test_given_routes_are_taken_with_the_present_weights_and_gradients(form: Form):
    x = random_arrays(0, TOKENS, HIDDEN)
    logits = random_arrays(1, TOKENS, EXPERTS)
    kernels = random_kernels("plain")
    of_out = jnp.asarray(random_arrays(2, TOKENS, HIDDEN))
    experts, _ = route(jnp.asarray(logits), CHOSEN, True)

    def run(experts: Any, logits: np.ndarray) -> tuple:
        function = partial(computed, form, "silu", True, CHOSEN, experts)
        out, backward = jax.vjp(jax.jit(function), x, logits, kernels)
        return out, backward(of_out)

    for one, other in zip(
        jax.tree.leaves(run(experts, logits)), jax.tree.leaves(run(None, logits)), strict=True
    ):
        np.testing.assert_array_equal(one, other)
    # Other logits choose other experts by themselves, but not with given routes.
    moved = logits[:, ::-1].copy()
    out, (_, of_logits, _) = run(experts, moved)
    exact = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), (x, moved, kernels))
    expected = loop_over_tokens(*exact, np.asarray(experts), True, "silu")
    np.testing.assert_allclose(out, expected, atol=1e-5)
    assert not np.allclose(out, run(None, moved)[0], atol=1e-2)
    is_chosen = np.zeros(moved.shape, bool)
    np.put_along_axis(is_chosen, np.asarray(experts), True, -1)
    assert (np.asarray(of_logits) != 0).tolist() == is_chosen.tolist()


def test_a_route_is_the_largest_logits_and_their_softmax():
    logits = jnp.asarray([[0.0, 3.0, 1.0, 3.0], [2.0, 2.0, 2.0, 2.0]])
    experts, among_all = route(logits, 2, normalise=False)
    assert experts.dtype == jnp.int32 and among_all.dtype == jnp.float32
    assert experts.tolist() == [[1, 3], [0, 1]]  # the lower number first of equal ones
    probability = np.exp(3) / (1 + np.exp(1) + 2 * np.exp(3))
    np.testing.assert_allclose(among_all, [[probability] * 2, [0.25] * 2], rtol=1e-6)
    _, among_chosen = route(logits, 2, normalise=True)
    np.testing.assert_allclose(among_chosen, np.full((2, 2), 0.5), rtol=1e-6)
    scale = jnp.asarray([1.0, 2.0, 3.0, 4.0])
    _, scaled = route(logits, 2, normalise=True, expert_scale=scale)
    np.testing.assert_allclose(scaled, [[1.0, 2.0], [0.5, 1.0]], rtol=1e-6)


def test_a_route_of_far_logits_is_finite():
    logits = jnp.asarray([[1e4, -1e4, 0.0]])
    for normalise in (True, False):
        _, weights = route(logits, 3, normalise)
        np.testing.assert_allclose(weights, [[1.0, 0.0, 0.0]], atol=1e-6)


def test_load_counts_the_tokens_of_each_expert_that_are_no_padding():
    experts = jnp.asarray([[[0, 2], [2, 1]], [[2, 0], [3, 3]]])
    mask = jnp.asarray([[True, True], [True, False]])
    counts = load(experts, mask, 5)
    assert counts.dtype == jnp.float32
    assert counts.tolist() == [2, 1, 3, 0, 0]


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("count, k", [(1, 1), (1, 4), (40, 2), (300, 3)])
def test_every_assignment_is_in_one_row_of_a_block_of_its_expert(count: int, k: int, mixed: bool):
    generator = np.random.default_rng(count)
    num_experts = 6
    candidates = [
        generator.integers(0, num_experts, (count, k)),
        np.full((count, k), num_experts - 1),
        generator.integers(-2, num_experts + 2, (count, k)),  # some are not here
        np.full((count, k), num_experts),
    ]
    cut = jax.jit(partial(_in_blocks, num_experts=num_experts, mixed=mixed))
    for experts in candidates:
        rows, all_blocks = cut(experts)
        assignments = np.asarray(rows.assignments)
        expert_of_row = np.full(assignments.size, -1)
        sizes = block_sizes(count * k, num_experts, mixed)
        assert [blocks.size for blocks in all_blocks] == list(sizes)
        for blocks in all_blocks:
            for number in range(int(blocks.count)):
                start = int(blocks.starts[number])
                assert 0 <= start <= assignments.size - blocks.size
                of_block = slice(start, start + blocks.size)
                assert (expert_of_row[of_block] == -1).all()  # no row is in two blocks
                expert_of_row[of_block] = blocks.experts[number]
        is_here = (experts >= 0) & (experts < num_experts)
        indices = np.asarray(rows.indices)
        assert (indices[~is_here] == assignments.size).all()
        here = indices[is_here]
        assert assignments[here].tolist() == np.flatnonzero(is_here).tolist()
        assert (assignments != count * k).sum() == len(here)  # the other rows are empty
        assert expert_of_row[here].tolist() == experts[is_here].tolist()
        # An expert has fewer empty rows than its smallest block.
        used = np.unique(experts[is_here]).size
        assert (expert_of_row >= 0).sum() - len(here) <= used * (sizes[-1] - 1)


def test_blocks_have_about_as_many_rows_as_an_expert_has_assignments():
    def sizes(*rows_of_expert: int, mixed: bool) -> list[tuple[int, ...]]:
        return [block_sizes(16 * rows, 16, mixed) for rows in rows_of_expert]

    assert sizes(0, 16, 32, 64, 512, 9999, mixed=False) == [
        (8,),
        (8,),
        (16,),
        (32,),
        (128,),
        (128,),
    ]
    assert sizes(0, 15, 16, 64, mixed=True) == [(8,), (8,), (16, 8), (64, 8)]
    assert sizes(128, 511, 512, 9999, mixed=True) == [(128, 16), (256, 32), (512, 64), (512, 64)]


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("count", [16, 90])
@pytest.mark.parametrize("form", ["blocks", "triton"])
def test_a_tokens_bits_do_not_depend_on_the_other_tokens(form: Form, dtype: Any, count: int):
    """Blocks have 8 rows and 32, tiles 16 and 64. The token is at every place, beside others that
    choose as it does, that fill a block before it, or that choose other experts."""
    hidden, inner, k = 24, 40, 2
    kernels = (
        jnp.asarray(random_arrays(10, EXPERTS, hidden, inner), dtype),
        jnp.asarray(random_arrays(20, EXPERTS, hidden, inner), dtype),
        jnp.asarray(random_arrays(30, EXPERTS, inner, hidden), dtype),
    )
    token = random_arrays(0, hidden)
    logits = random_arrays(1, EXPERTS)

    @jax.jit
    def program(x: jax.Array, logits: jax.Array) -> jax.Array:
        experts, weights = route(logits, k, True)
        return experts_product(x, experts, weights, kernels, form=form)

    results = set()
    for place in range(count):
        x = random_arrays(100 + place, count, hidden)
        others = random_arrays(200 + place, count, EXPERTS)
        if place % 3 == 0:
            others[:] = logits
        if place % 3 == 1:
            others[: place // 2] = logits
        x[place] = token
        others[place] = logits
        out = program(jnp.asarray(x, dtype), others)
        results.add(np.asarray(out[place]).tobytes())
    assert len(results) == 1


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_in_decoding_the_first_blocks_are_one_product_with_the_bits_of_the_loop(
    dtype: Any, monkeypatch: pytest.MonkeyPatch
):
    """Some experts have more rows than one block, and one has none."""
    count, k, hidden, inner = 16, 2, 24, 40
    kernels = (
        jnp.asarray(random_arrays(10, EXPERTS, hidden, inner), dtype),
        jnp.asarray(random_arrays(20, EXPERTS, hidden, inner), dtype),
        jnp.asarray(random_arrays(30, EXPERTS, inner, hidden), dtype),
    )
    x = jnp.asarray(random_arrays(0, count, hidden), dtype)
    logits = random_arrays(1, count, EXPERTS)
    logits[:, 0] += 2
    logits[:, 1] -= 100

    def function(x: jax.Array, logits: jax.Array) -> jax.Array:
        experts, weights = route(logits, k, True)
        return experts_product(x, experts, weights, kernels, form="blocks")

    found = []
    for least in (2, 1000):
        monkeypatch.setattr(experts_module, "MIN_BATCHED", least)
        text = str(jax.make_jaxpr(partial(function))(x, logits))
        assert text.count("dot_general") == (6 if least == 2 else 3)
        found.append(np.asarray(jax.jit(partial(function))(x, logits)))
    assert (found[0] == found[1]).all()
    counts = np.bincount(np.asarray(route(logits, k, True)[0]).reshape(-1), minlength=EXPERTS)
    assert counts.max() > 8 and counts[1] == 0


def test_what_is_kept_under_dots_spares_the_products_of_gate_and_up():
    """The backward pass of a checkpointed layer runs one loop, which is the gradient's."""
    x = jnp.asarray(random_arrays(0, TOKENS, HIDDEN))
    logits = jnp.asarray(random_arrays(1, TOKENS, EXPERTS))
    kernels = random_kernels("cast")
    function = REMAT["dots"](partial(computed, "blocks", "silu", True, CHOSEN, None))
    _, backward = jax.vjp(function, x, logits, kernels)
    text = str(jax.make_jaxpr(backward)(x))
    assert text.count("while[") == 1 and "sort[" not in text and "top_k[" not in text


def torch_kernels(experts: Any, interleaved: bool = False) -> tuple:
    """The stacked kernels of one of transformers' modules as (gate, up, down)."""
    gate_up = jnp.asarray(experts.gate_up_proj.detach().numpy())
    down = jnp.asarray(experts.down_proj.detach().numpy())
    if interleaved:  # gpt-oss: [E, in, out], with gate and up in turns
        gate, up = gate_up[..., ::2], gate_up[..., 1::2]
        bias = jnp.asarray(experts.gate_up_proj_bias.detach().numpy())
        of_down = jnp.asarray(experts.down_proj_bias.detach().numpy())
        return Biased(gate, bias[:, ::2]), Biased(up, bias[:, 1::2]), Biased(down, of_down)
    gate, up = jnp.split(gate_up, 2, axis=1)
    return gate.mT, up.mT, down.mT


def randomised(module: Any) -> Any:
    """A module of torch with small random parameters."""
    import torch

    generator = torch.Generator().manual_seed(0)
    for parameter in module.parameters():
        parameter.data = 0.3 * torch.randn(parameter.shape, generator=generator)
    return module.eval()


Reference = tuple[Callable[[Any], Any], Callable[[jax.Array], jax.Array]]
"""(a module of transformers, x[T, D] -> [T, D]; the same by shoal's functions)."""


def as_array(tensor: Any) -> jax.Array:
    return jnp.asarray(tensor.detach().numpy())


def qwen3_moe(form: Form, normalise: bool) -> Reference:
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

    config = Qwen3MoeConfig(
        hidden_size=HIDDEN,
        num_experts=EXPERTS,
        num_experts_per_tok=CHOSEN,
        moe_intermediate_size=INNER,
        norm_topk_prob=normalise,
    )
    module = randomised(Qwen3MoeSparseMoeBlock(config))
    kernels = torch_kernels(module.experts)

    def ours(x: jax.Array) -> jax.Array:
        logits = x @ as_array(module.gate.weight).T
        return experts_product(x, *route(logits, CHOSEN, normalise), kernels, form=form)

    return lambda x: module(x[None])[0], ours


def qwen3_5_moe(form: Form) -> Reference:
    from transformers.models.qwen3_5_moe.configuration_qwen3_5_moe import Qwen3_5MoeTextConfig
    from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeSparseMoeBlock

    config = Qwen3_5MoeTextConfig(
        hidden_size=HIDDEN,
        num_experts=EXPERTS,
        num_experts_per_tok=CHOSEN,
        moe_intermediate_size=INNER,
        shared_expert_intermediate_size=7,
    )
    module = randomised(Qwen3_5MoeSparseMoeBlock(config))
    kernels = torch_kernels(module.experts)
    gate, up, down, gate_of_shared = (
        as_array(product.weight).T
        for product in (
            module.shared_expert.gate_proj,
            module.shared_expert.up_proj,
            module.shared_expert.down_proj,
            module.shared_expert_gate,
        )
    )

    def ours(x: jax.Array) -> jax.Array:
        logits = x @ as_array(module.gate.weight).T
        out = experts_product(x, *route(logits, CHOSEN, True), kernels, form=form)
        shared = ACTIVATIONS["silu"](x @ gate, x @ up) @ down
        return out + jax.nn.sigmoid(x @ gate_of_shared) * shared

    return lambda x: module(x[None])[0], ours


def gpt_oss(form: Form) -> Reference:
    from transformers import GptOssConfig
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssMLP

    config = GptOssConfig(
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        num_local_experts=EXPERTS,
        num_experts_per_tok=CHOSEN,
    )
    module = randomised(GptOssMLP(config))
    kernels = torch_kernels(module.experts, interleaved=True)

    def ours(x: jax.Array) -> jax.Array:
        logits = x @ as_array(module.router.weight).T + as_array(module.router.bias)
        activation = ACTIVATIONS["clamped_swiglu"]
        return experts_product(x, *route(logits, CHOSEN, True), kernels, activation, form)

    return lambda x: module(x[None])[0][0], ours


def gemma4(form: Form) -> Reference:
    import torch
    from transformers.models.gemma4.configuration_gemma4 import Gemma4TextConfig
    from transformers.models.gemma4.modeling_gemma4 import Gemma4TextExperts, Gemma4TextRouter

    config = Gemma4TextConfig(
        hidden_size=HIDDEN,
        num_experts=EXPERTS,
        top_k_experts=CHOSEN,
        moe_intermediate_size=INNER,
    )
    parts = [Gemma4TextRouter(config), Gemma4TextExperts(config)]
    router, experts_of_torch = randomised(torch.nn.ModuleList(parts))
    kernels = torch_kernels(experts_of_torch)

    def theirs(x: Any) -> Any:
        _, weights, chosen = router(x)
        return experts_of_torch(x, chosen, weights)

    def ours(x: jax.Array) -> jax.Array:
        # The router has a norm and a scale before its product.
        size = jnp.sqrt(jnp.mean(x * x, -1, keepdims=True) + config.rms_norm_eps)
        entering = x / size * as_array(router.scale) * HIDDEN**-0.5
        logits = entering @ as_array(router.proj.weight).T
        experts, weights = route(logits, CHOSEN, True, as_array(router.per_expert_scale))
        return experts_product(x, experts, weights, kernels, ACTIVATIONS["gelu_tanh"], form)

    return theirs, ours


FAMILIES: dict[str, Callable[[Form], Reference]] = {
    "qwen3_moe": partial(qwen3_moe, normalise=True),
    "qwen3_moe, not normalised": partial(qwen3_moe, normalise=False),
    "qwen3_5_moe": qwen3_5_moe,
    "gpt_oss": gpt_oss,
    "gemma4": gemma4,
}


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("family", FAMILIES)
def test_outputs_and_gradients_are_those_of_transformers(family: str, form: Form):
    import torch

    x = random_arrays(0, TOKENS, HIDDEN)
    of_out = random_arrays(1, TOKENS, HIDDEN)
    theirs, ours = FAMILIES[family](form)
    asked = torch.tensor(x, requires_grad=True)
    expected = theirs(asked)
    (expected * torch.tensor(of_out)).sum().backward()
    out, backward = jax.vjp(jax.jit(ours), jnp.asarray(x))
    np.testing.assert_allclose(out, expected.detach().numpy(), atol=1e-5)
    (of_x,) = backward(jnp.asarray(of_out))
    assert asked.grad is not None
    np.testing.assert_allclose(of_x, asked.grad.numpy(), atol=1e-5)


@pytest.mark.parametrize("form", ["ragged", "mixed_blocks"])
@pytest.mark.parametrize("remat", ["dots", "attention", "full"])
def test_products_of_gathered_tokens_are_not_kept_for_the_backward_pass(form, remat, capsys):
    """They had the name of the numbers of experts, which every `model.remat` keeps."""
    x = jnp.asarray(random_arrays(0, TOKENS, HIDDEN))
    logits = jnp.asarray(random_arrays(1, TOKENS, EXPERTS))
    kernels = plain(2, HIDDEN, INNER), plain(3, HIDDEN, INNER), plain(4, INNER, HIDDEN)

    def num_kept(keeps: bool) -> int:
        """The arrays with INNER numbers a row that the backward pass gets, without the matrices."""

        @REMAT[remat]
        def layer(x: jax.Array) -> jax.Array:
            chosen, weights = route(logits, CHOSEN, True)
            return experts_product(x, chosen, weights, kernels, form=form, keeps=keeps).sum()

        jax.ad_checkpoint.print_saved_residuals(layer, x)
        lines = capsys.readouterr().out.splitlines()
        return sum(f",{INNER}]" in line and f"[{EXPERTS}," not in line for line in lines)

    assert num_kept(False) == 0
    assert (num_kept(True) > 0) == (remat == "dots")
