"""Layers with experts in an update."""

from __future__ import annotations

from dataclasses import replace

import jax
import numpy as np
import pytest
from small import LLAMA2, ON_POLICY, batches, learner, random_groups, random_parameters, roles

from shoal.model.architecture import Experts, Layer
from shoal.model.parameters import shardings
from shoal.model.transformer import Model
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


def test_figures_of_loads_are_means_over_layers():
    metrics = MetricSet()
    loads = np.array([[6.0, 2.0, 0.0, 0.0], [2.0, 2.0, 2.0, 2.0]])
    _record_loads(metrics, loads, 4.0)
    figures = metrics.result()
    assert figures["experts/load_max"] == (3.0 + 1.0) / 2
    assert figures["experts/unused"] == 2 / 8
    _record_loads(metrics, loads * 0, 0.0)  # an update of no groups says nothing
    assert metrics.result() == figures
