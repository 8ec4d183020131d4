"""The cross-entropy of context, the words of tools and environments, beside the policy loss: a
value worked by hand, its gradient, and that without it nothing is different."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.algorithm.loss import Objective, token_losses
from shoal.config.sections.algorithm import AlgorithmSection
from shoal.records import ShoalError
from shoal.trainer.loss import make_objective
from shoal.trainer.update import needs_all_groups


def objective(**settings: Any) -> Objective:
    return make_objective(AlgorithmSection(**settings))


def losses(o: Objective, lp: Any, loss_mask: Any, weight: Any, advantage: Any) -> Any:
    """(token losses, sums) of rows [R, T] of one completion each."""
    zeros = jnp.zeros_like(lp)
    segment = jnp.ones(lp.shape, jnp.int32)
    tokens, sums, _ = token_losses(
        o,
        lp,
        zeros,
        advantage=advantage,
        weight=weight,
        loss_mask=loss_mask,
        segment=segment,
        old_logprobs=zeros,
        sampler_logprobs=zeros,
        ref_logprobs=zeros,
    )
    return tokens, sums


def test_the_value_by_hand():
    lp = jnp.array([[-1.0, -2.0, -3.0, -4.0, -5.0]])
    sampled = jnp.array([[True, False, False, True, False]])
    # Two sampled tokens of weight 1/2, two tokens of context of weight 1/2, and one that has none.
    weight = jnp.array([[0.5, 0.5, 0.5, 0.5, 0.0]])
    advantage = jnp.array([[2.0, 9.0, 9.0, -4.0, 9.0]])
    tokens, sums = losses(objective(context_coef=0.1), lp, sampled, weight, advantage)
    # Of samples -A with the ratio 1; of context 0.1 times 2 and 3.
    np.testing.assert_allclose(tokens, [[-2.0, 0.2, 0.3, 4.0, 0.0]], rtol=1e-6)
    # The policy's mean of -2 and 4, and 0.1 times the mean of 2 and 3.
    assert float((weight * tokens).sum()) == pytest.approx(1.0 + 0.25)
    nll, count = sums["context/nll"]
    assert (float(nll), float(count)) == (5.0, 2.0)
    objective_sum, _ = sums["objective"]
    assert float(objective_sum) == pytest.approx(1.0)


LOSSES = st.sampled_from(("grpo", "gmpo", "cispo"))


@settings(deadline=None, max_examples=30)
@given(seed=st.integers(0, 2**32 - 1), coef=st.floats(0.01, 3.0), loss=LOSSES)
def test_its_gradient_is_that_of_the_plain_cross_entropy(seed: int, coef: float, loss: str):
    rng = np.random.default_rng(seed)
    shape = (3, 7)
    lp = jnp.asarray(-rng.exponential(1.0, shape))
    sampled = jnp.asarray(rng.random(shape) < 0.6)
    learned = ~sampled & jnp.asarray(rng.random(shape) < 0.7)
    num_learned = max(int(learned.sum()), 1)
    of_policy = jnp.where(sampled, jnp.asarray(rng.random(shape)), 0.0)
    weight = jnp.where(learned, 1 / num_learned, of_policy)
    advantage = jnp.asarray(rng.standard_normal(shape))

    def total(o: Objective, weight: Any, lp: Any) -> Any:
        tokens, _ = losses(o, lp, sampled, weight, advantage)
        return (weight * tokens).sum()

    def cross_entropy(lp: Any) -> Any:
        return -jnp.where(learned, lp, 0.0).sum() / num_learned

    policy, policy_slope = jax.value_and_grad(lambda x: total(objective(loss=loss), of_policy, x))(
        lp
    )
    both, slope = jax.value_and_grad(
        lambda x: total(objective(loss=loss, context_coef=coef), weight, x)
    )(lp)
    assert float(both - policy) == pytest.approx(coef * float(cross_entropy(lp)), abs=1e-5)
    want = policy_slope + coef * jax.grad(cross_entropy)(lp)
    np.testing.assert_allclose(slope, want, rtol=1e-5, atol=1e-6)
    # What the model sampled has the gradient that it has without the term, to the bit.
    np.testing.assert_array_equal(np.asarray(slope)[sampled], np.asarray(policy_slope)[sampled])


def test_what_stands_at_other_context_has_no_part():
    lp = jnp.array([[-1.0, -2.0, -jnp.inf, jnp.nan]])
    sampled = jnp.array([[True, False, False, False]])
    weight = jnp.array([[1.0, 1.0, 0.0, 0.0]])

    def total(lp: Any) -> Any:
        tokens, sums = losses(objective(context_coef=1.0), lp, sampled, weight, jnp.ones_like(lp))
        return tokens.sum(), sums["context/nll"]

    (value, (nll, count)), slope = jax.value_and_grad(total, has_aux=True)(lp)
    assert (float(value), float(nll), float(count)) == (1.0, 2.0, 1.0)
    np.testing.assert_array_equal(slope, [[-1.0, -1.0, 0.0, 0.0]])


def test_without_a_coefficient_the_program_is_the_same():
    def program(o: Objective) -> str:
        shape = (2, 4)
        real = jnp.zeros(shape)
        return str(
            jax.make_jaxpr(lambda lp: losses(o, lp, real > 0, real, real)[0])(jnp.zeros(shape))
        )

    assert program(objective(context_coef=0.0)) == program(objective())
    assert program(objective(context_coef=0.1)) != program(objective())


def test_groups_without_an_advantage_are_computed():
    assert needs_all_groups(AlgorithmSection(context_coef=0.1), False)
    assert not needs_all_groups(AlgorithmSection(), False)
    with pytest.raises(ShoalError, match=r"algorithm\.context_coef=-0\.1: expected"):
        AlgorithmSection(context_coef=-0.1)
