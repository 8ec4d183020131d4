"""Layers with experts in an update."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small import LLAMA2, ON_POLICY, batches, learner, random_groups, random_parameters, roles

from shoal.mesh import Role
from shoal.model.architecture import Experts, Layer
from shoal.model.mixing import row_mixing
from shoal.model.parameters import shardings
from shoal.model.transformer import Model, forward
from shoal.runs.metrics import MetricSet
from shoal.trainer.loss import LOAD, batch_loss
from shoal.trainer.step import put_batch
from shoal.trainer.update import _record_loads

MOE = replace(
    LLAMA2,
    num_layers=3,
    layers=(Layer(feed_forward="experts"), Layer(), Layer(feed_forward="experts")),
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
            mixing = row_mixing(model, tokens * 0 + 1, tokens * 0, numbers)
            out, _ = forward(model, parameters, tokens, numbers, mixing)
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
