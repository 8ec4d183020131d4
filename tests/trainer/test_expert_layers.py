"""Layers with experts in an update."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small import (
    LLAMA2,
    ON_POLICY,
    batches,
    learner,
    random_groups,
    random_parameters,
    relative,
    roles,
)

from shoal.mesh import Role
from shoal.model.architecture import Experts, Layer
from shoal.model.parameters import shardings
from shoal.model.passes import PackedRows
from shoal.model.transformer import Model, forward
from shoal.runs.metrics import MetricSet
from shoal.trainer.batch import LearnerBatch
from shoal.trainer.loss import LOAD, REROUTED, batch_logprobs, batch_loss, hidden_states
from shoal.trainer.step import put_batch
from shoal.trainer.update import _record_loads

MOE = replace(
    LLAMA2,
    num_layers=3,
    pattern=(Layer(feed_forward="experts"), Layer(), Layer(feed_forward="experts")),
    experts=Experts(num_experts=6, experts_per_token=2, intermediate_size=24),
)


def loads_of(where, batch) -> tuple[np.ndarray, float]:
    model = Model(MOE, where.trainer)

    def loads(parameters, batch):
        _, (sums, _, _) = batch_loss(model, ON_POLICY, parameters, batch)
        return sums[LOAD]

    parameters = jax.device_put(random_parameters(MOE), shardings(MOE, where.trainer))
    loads_and_tokens = jax.jit(loads)(parameters, put_batch(model, batch))
    return jax.device_get(loads_and_tokens)


@pytest.mark.slow
def test_loads_have_each_token_once_and_no_padding():
    (batch,) = batches(random_groups(MOE, 3, 4, 40, 30), shards=4)
    loads, num_tokens = loads_of(roles(), batch)
    assert num_tokens == (batch.segment > 0).sum() < batch.segment.size
    assert loads.shape == (2, 6)
    np.testing.assert_array_equal(loads.sum(1), 2 * num_tokens)
    assert (loads.std(1) > 0).all()
    split, _ = loads_of(roles(data=2, context=2, tensor=2), batch)
    np.testing.assert_array_equal(split, loads)


@pytest.mark.slow
def test_an_update_sums_the_loads_of_its_micro_batches():
    groups = random_groups(MOE, 4, 2, 20, 20)
    one = learner(MOE)
    state = one.init(random_parameters(MOE))
    total = None
    expected = np.zeros((2, 6))
    for batch in (*batches(groups[:2]), *batches(groups[2:])):
        total, _ = one.accumulate(total, state, batch)
        expected += loads_of(roles(), batch)[0]
    assert total is not None
    loads, _ = jax.device_get(total.sums[LOAD])
    np.testing.assert_array_equal(loads, expected)


def test_training_has_blocks_of_two_sizes_and_sampling_of_one():
    """Scoring and update have one form, so that their log-probs are equal."""
    where = roles()
    numbers = jnp.arange(64)[None]
    parameters = random_parameters(MOE)

    def num_loops(role: Role) -> int:
        model = Model(MOE, role)

        def hidden(tokens: jax.Array) -> jax.Array:
            rows = PackedRows.of(model, tokens * 0 + 1, tokens * 0, numbers, numbers)
            out, _ = forward(model, parameters, tokens, numbers, rows)
            return out

        return str(jax.make_jaxpr(hidden)(numbers)).count(" while[")

    assert num_loops(where.sampler) == 2  # one in each layer with experts
    assert num_loops(where.trainer) == num_loops(replace(where.trainer, name="reference")) == 4


def test_figures_of_loads_are_means_over_layers():
    metrics = MetricSet()
    loads = np.array([[6.0, 2.0, 0.0, 0.0], [2.0, 2.0, 2.0, 2.0]])
    _record_loads(metrics, loads, 4.0)
    figures = metrics.result()
    assert figures["experts/load_max"] == (3.0 + 1.0) / 2
    assert figures["experts/unused"] == 2 / 8
    _record_loads(metrics, loads * 0, 0.0)  # an update of no groups says nothing
    assert metrics.result() == figures


# ---- experts that are given (replay of routes)


@pytest.fixture(scope="module")
def batch() -> LearnerBatch:
    (one,) = batches(random_groups(MOE, 3, 4, 40, 30), shards=4)
    return one


def given(batch: LearnerBatch, experts: np.ndarray) -> LearnerBatch:
    """The batch with these experts of its tokens, [R, T, layers with experts, k]; none of
    padding."""
    is_token = (batch.segment > 0)[..., None, None]
    return replace(batch, experts=np.where(is_token, experts, -1).astype(np.int16))


def own_experts(batch: LearnerBatch, parameters) -> np.ndarray:
    """Those that layers use, [R, T, layers with experts, k]: their own where none are given."""
    model = Model(MOE, roles().trainer)

    @jax.jit
    def run(parameters, batch):
        _, _, aux = hidden_states(model, parameters, batch)
        return [layer.experts for layer in aux if layer.experts is not None]

    return np.stack(run(parameters, batch), axis=2)


def loss_of(batch: LearnerBatch, where=None):
    """Returns a function parameters -> (loss, (REROUTED of the sums, log-probs), gradient)."""
    model = Model(MOE, (where or roles()).trainer)

    def loss(parameters, batch):
        value, (sums, _, logprobs) = batch_loss(model, ON_POLICY, parameters, batch)
        return value, (sums[REROUTED], logprobs)

    run = jax.jit(jax.value_and_grad(loss, has_aux=True))

    def of(parameters):
        placed = jax.device_put(parameters, shardings(MOE, model.role))
        return jax.device_get(run(placed, put_batch(model, batch)))

    return of


@pytest.mark.slow
def test_experts_that_the_router_would_choose_change_nothing(batch):
    parameters = random_parameters(MOE)
    own = own_experts(batch, parameters)
    (loss, (none, logprobs)), gradient = loss_of(batch)(parameters)
    assert none == (0, 0)
    (same_loss, (rerouted, same_logprobs)), same = loss_of(given(batch, own))(parameters)
    assert rerouted == (0, (batch.segment > 0).sum() * 2 * 2)
    assert abs(same_loss - loss) < 1e-6 * abs(loss)
    np.testing.assert_allclose(same_logprobs, logprobs, atol=1e-5)
    for one, other in zip(jax.tree.leaves(same), jax.tree.leaves(gradient), strict=True):
        assert relative(one, other) < 1e-5


@pytest.fixture(scope="module")
def other_routes(batch) -> np.ndarray:
    """The experts that a sampler chooses whose router is a little different."""

    def changed(path, leaf):
        noise = np.random.default_rng(1).standard_normal(leaf.shape).astype(np.float32)
        return leaf + 0.1 * noise if "router" in jax.tree_util.keystr(path) else leaf

    sampler = jax.tree_util.tree_map_with_path(changed, random_parameters(MOE))
    return own_experts(batch, sampler)


@pytest.mark.slow
def test_given_experts_are_used_and_those_that_the_router_would_not_choose_are_counted(
    batch, other_routes
):
    parameters = random_parameters(MOE)
    replayed = given(batch, other_routes)
    (_, (rerouted, logprobs)), _ = loss_of(replayed)(parameters)
    (_, (_, own_logprobs)), _ = loss_of(batch)(parameters)
    is_token = batch.segment > 0
    np.testing.assert_array_equal(
        own_experts(replayed, parameters)[is_token], other_routes[is_token]
    )
    # What the router of a layer would choose depends on the experts of the layers before it.
    of_first_layer = own_experts(given(batch, np.full_like(other_routes, -1)), parameters)
    first_given = other_routes.copy()
    first_given[:, :, 1] = -1
    own = own_experts(given(batch, first_given), parameters)
    own[:, :, 0] = of_first_layer[:, :, 0]
    is_own = (other_routes[..., None] == own[..., None, :]).any(-1)  # [R, T, layers, k]
    expected = (~is_own[is_token]).sum()
    assert rerouted == (expected, is_own[is_token].size)
    assert 0 < expected < is_own[is_token].size / 2
    differences = np.abs(logprobs - own_logprobs)[batch.loss_mask]
    assert differences.max() > 0.05  # tokens that go elsewhere
    split = roles(data=2, context=2, tensor=2)
    (_, (split_rerouted, split_logprobs)), _ = loss_of(replayed, split)(parameters)
    assert split_rerouted == rerouted
    np.testing.assert_allclose(split_logprobs, logprobs, atol=2e-5)


@pytest.mark.slow
def test_the_router_learns_through_the_weights_of_given_experts(batch, other_routes):
    """The gradient is the slope of the log-probs: nothing jumps while the experts stay."""
    model = Model(MOE, roles().trainer)
    replayed = given(batch, other_routes)

    @jax.jit
    def total(parameters):
        logprobs, _ = batch_logprobs(model, parameters, replayed)
        return logprobs.sum()

    parameters = random_parameters(MOE)
    gradient = jax.grad(total)(parameters)

    def along(path, leaf):
        noise = np.random.default_rng(2).standard_normal(leaf.shape).astype(np.float32)
        return noise * ("router" in jax.tree_util.keystr(path))

    direction = jax.tree_util.tree_map_with_path(along, parameters)
    products = jax.tree.map(lambda one, other: (one * other).sum(), gradient, direction)
    slope = float(sum(jax.tree.leaves(products)))
    step = 3e-3

    def moved(amount):
        return jax.tree.map(lambda leaf, change: leaf + amount * change, parameters, direction)

    measured = (float(total(moved(step))) - float(total(moved(-step)))) / (2 * step)
    assert abs(slope) > 1
    assert measured == pytest.approx(slope, rel=0.02)
