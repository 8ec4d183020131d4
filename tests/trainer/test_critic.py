"""A critic in the trainer: its values of tokens, its updates, and what a step of policy and critic
computes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest
from small import QWEN3, random_groups, random_parameters, relative, roles, whole

from shoal.algorithm.advantage import gae
from shoal.algorithm.value_loss import ValueObjective
from shoal.config.sections.algorithm import AlgorithmSection
from shoal.config.sections.critic import CriticSection
from shoal.config.sections.optimizer import BatchSection, OptimizerSection
from shoal.mesh import Roles
from shoal.model.architecture import Architecture
from shoal.model.parameters import (
    Parameters,
    frozen_specs,
    param_specs,
    shardings,
    trained_specs,
    value_head_spec,
)
from shoal.model.transformer import Model
from shoal.records import Group
from shoal.runs.metrics import MetricSet
from shoal.trainer.batch import (
    BatchLayout,
    MicroBatch,
    Shape,
    TokenTerms,
    ValueTargets,
    pack,
    unpack,
)
from shoal.trainer.critic import Critic, StepValues, critic_architecture, explained_variance
from shoal.trainer.loss import make_objective
from shoal.trainer.step import GradientSum, Learner, TrainState
from shoal.trainer.step_table import StepTable
from shoal.trainer.update import Updater

SMALL = replace(QWEN3, num_layers=1, vocab_size=48)
VALUED = critic_architecture(SMALL)


def value_learner(where: Roles | None = None, clip: float = 0.0, lr: float = 1e-2) -> Learner:
    model = Model(VALUED, (where or roles()).trainer)
    return Learner(model, ValueObjective(clip), OptimizerSection(lr=lr, warmup_steps=0), 100)


def packed(groups: list[Group], shape: Shape, targets: Any = None) -> list[MicroBatch]:
    zeros = np.zeros((len(groups), groups[0].size))
    return pack(
        groups,
        range(len(groups)),
        TokenTerms(zeros, zeros, targets=targets),
        BatchLayout([shape], 1.0),
    )


def values_of(
    learner: Learner, parameters: Any, batches: list[MicroBatch]
) -> dict[tuple[int, int], np.ndarray]:
    return unpack(
        batches, [np.asarray(learner.score(parameters, batch.arrays)) for batch in batches]
    )


def random_targets(groups: list[Group]) -> dict[tuple[int, int], ValueTargets]:
    rng = np.random.default_rng(5)
    targets = {}
    for g, group in enumerate(groups):
        for c, completion in enumerate(group.completions):
            size = len(completion)
            arrays = rng.normal(size=(2, size)).astype(np.float32)
            weight = (rng.random(size) < 0.8).astype(np.float32) / 50
            targets[g, c] = ValueTargets(arrays[0], arrays[1], weight)
    return targets


def test_a_head_of_values_is_the_only_new_parameter_and_begins_at_zero():
    specs, own = param_specs(VALUED), param_specs(SMALL)
    assert own.lm_head is None  # tied
    assert specs.lm_head.shape == (SMALL.hidden_size, 1) and specs.lm_head.init == "zeros"
    assert replace(specs, lm_head=None) == own


def test_values_do_not_depend_on_what_else_is_in_the_row():
    """Nor on sharing the prompt: each completion alone in its row is the plain sequence."""
    parameters = random_parameters(VALUED)
    learner = value_learner()
    groups = random_groups(SMALL, 2, 3, 9, 8)
    together = values_of(learner, parameters, packed(groups, whole(groups)))
    assert len(together) == 6 and np.std(np.concatenate([*together.values()])) > 0.1
    shape = Shape(1, whole(groups).length)
    for (g, c), values in together.items():
        completion = groups[g].completions[c]
        one = replace(
            groups[g],
            completions=(completion,),
            texts=("",),
            rewards=np.zeros(1),
            reward_components={"r": np.zeros(1)},
            valid=np.ones(1, bool),
        )
        alone = values_of(learner, parameters, packed([one], shape))[0, 0]
        np.testing.assert_allclose(values, alone, atol=2e-6)


def test_a_value_is_of_the_words_before_its_token():
    parameters = random_parameters(VALUED)
    learner = value_learner()
    groups = random_groups(SMALL, 1, 1, 9, 8)
    (completion,) = groups[0].completions
    shape = whole(groups)
    before = values_of(learner, parameters, packed(groups, shape))[0, 0]
    ids = completion.token_ids.copy()
    ids[4] = (ids[4] + 1) % SMALL.vocab_size
    changed = replace(groups[0], completions=(replace(completion, token_ids=ids),))
    after = values_of(learner, parameters, packed([changed], shape))[0, 0]
    np.testing.assert_array_equal(before[:5], after[:5])
    assert np.abs(before[5:] - after[5:]).min() > 1e-4


def gradient_of(where: Roles, groups: list[Group], shape: Shape) -> tuple[Any, Any]:
    learner = value_learner(where, clip=0.3)
    layout = shardings(VALUED, where.trainer)
    parameters = jax.device_put(random_parameters(VALUED), layout)
    total = None
    for batch in packed(groups, shape, random_targets(groups)):
        total, _ = learner.accumulate(total, TrainState(parameters, None, None), batch.arrays)
    assert total is not None
    return float(total.loss), jax.device_get(total.gradient)


def test_any_split_into_micro_batches_gives_the_same_gradient():
    groups = random_groups(SMALL, 4, 2, 9, 8)
    loss, gradient = gradient_of(roles(), groups, whole(groups))
    split_loss, split = gradient_of(roles(), groups, whole(groups[:1]))
    assert abs(loss - split_loss) < 1e-6
    for one, other in zip(jax.tree.leaves(gradient), jax.tree.leaves(split), strict=True):
        assert relative(other, one) < 1e-5


on_meshes = pytest.mark.parametrize(
    "sizes", [{"data": 2}, {"fsdp": 4}, {"fsdp": 2, "tensor": 2}, {"context": 2}], ids=str
)


def shape_on(where: Roles, groups: list[Group]) -> Shape:
    """Of one micro-batch of all groups, in a row for each share of rows."""
    context = where.trainer.context
    rows = where.trainer.row_shards // context
    return Shape(rows, whole(groups, rows).length * context)


@pytest.mark.slow
@on_meshes
def test_the_gradient_is_the_same_on_a_mesh(sizes: dict[str, int]):
    groups = random_groups(SMALL, 8, 2, 9, 8)
    where = roles(**sizes)
    loss, gradient = gradient_of(roles(), groups, whole(groups))
    other_loss, other = gradient_of(where, groups, shape_on(where, groups))
    assert abs(loss - other_loss) < 1e-5 * abs(loss)
    for one, of_mesh in zip(jax.tree.leaves(gradient), jax.tree.leaves(other), strict=True):
        assert relative(of_mesh, one) < 1e-5


# ---- a whole step


A = AlgorithmSection(advantage="gae", lam=0.9, discount=0.95, whiten=False)


def make_updater(a: AlgorithmSection = A, **critic: Any) -> Updater:
    section = OptimizerSection(lr=1e-3, warmup_steps=0)
    model = Model(SMALL, roles().trainer)
    own = CriticSection(lr=1e-2, **critic)
    return Updater(
        Learner(model, make_objective(a, critic=own), section, 100),
        a,
        BatchSection(prompts_per_step=3, group_size=2, micro_tokens=48),
        temperature=1.0,
        seed=0,
        critic=Critic.of(model, own, section, 100, 0),
        max_tokens=8,
        longest=17,
    )


def first_state(updater: Updater) -> TrainState:
    return updater.first_state(random_parameters(SMALL), random_parameters(VALUED, seed=1))


def with_gaps(groups: list[Group]) -> list[Group]:
    """Words of a tool within the longer completions."""
    made = []
    for group in groups:
        completions = []
        for completion in group.completions:
            mask = completion.loss_mask.copy()
            if len(mask) > 4:
                mask[2:4] = False
            completions.append(replace(completion, loss_mask=mask))
        made.append(replace(group, completions=tuple(completions)))
    return made


def test_advantages_and_returns_of_a_step_are_those_of_its_tokens():
    """Tokens of tools are no time steps; the reward stands at the last token of the model."""
    groups = with_gaps(random_groups(SMALL, 3, 2, 9, 8))
    rng = np.random.default_rng(0)
    values = {}
    for g, group in enumerate(groups):
        for c, completion in enumerate(group.completions):
            values[g, c] = rng.normal(size=len(completion)).astype(np.float32)
    penalty = rng.random((3, 2))
    got = StepValues.of(groups, StepTable.of(groups, A), values, A, 0.5, penalty)
    for (g, c), said in values.items():
        mask = groups[g].completions[c].loss_mask
        own = said[mask][None].astype(float)
        rewards = np.zeros(own.shape)
        rewards[0, -1] = groups[g].rewards[c] - penalty[g, c]
        advantages = gae(rewards, own, 0.95, 0.9)[0]
        returns = gae(rewards, own, 0.95, 0.5)[0] + own[0]
        np.testing.assert_allclose(got.advantages[g, c][mask], advantages, atol=1e-6)
        assert not got.advantages[g, c][~mask].any()
        target = got.targets[g, c]
        np.testing.assert_allclose(target.returns[mask], returns, atol=1e-6)
        np.testing.assert_array_equal(target.weight, mask)
        assert got.table.advantages[g, c] == pytest.approx(advantages.mean())
    weights = [target.weight.sum() for target in got.weighted([0, 2]).values()]
    assert sum(weights) == pytest.approx(1)
    assert {key[0] for key in got.weighted([0, 2])} == {0, 2}


def test_turns_are_time_steps_with_credit_by_turn():
    groups = with_gaps(random_groups(SMALL, 1, 2, 9, 8))
    first = groups[0].completions[0]
    assert [len(range(8)[turn]) for turn in first.turns] == [2, 4]
    pay = tuple(np.arange(1.0, 1 + len(c.turns)) for c in groups[0].completions)
    groups = [replace(groups[0], turn_rewards=pay)]
    a = replace(A, credit="turn")
    values = {(0, c): np.full(len(one), 0.5) for c, one in enumerate(groups[0].completions)}
    values[0, 0][4] = 0.25  # before the second turn
    got = StepValues.of(groups, StepTable.of(groups, a), values, a, 1.0)
    second = 2 - 0.25
    want = [1 + 0.95 * 0.25 - 0.5 + 0.95 * 0.9 * second, second]
    np.testing.assert_allclose(got.advantages[0, 0][:2], want[0], rtol=1e-6)
    np.testing.assert_allclose(got.advantages[0, 0][4:], want[1], rtol=1e-6)
    assert not got.advantages[0, 0][2:4].any()
    np.testing.assert_allclose(got.table.turn_advantages[0][0], want)
    np.testing.assert_array_equal(np.flatnonzero(got.targets[0, 0].weight), [0, 4])
    np.testing.assert_allclose(got.targets[0, 0].returns[[0, 4]], [1 + 0.95 * 2, 2])


def test_lambda_follows_the_length_of_a_completion():
    groups = random_groups(SMALL, 1, 2, 9, 8)
    a = replace(A, lam_alpha=0.5, discount=1.0)
    values = {(0, c): np.zeros(len(one), np.float32) for c, one in enumerate(groups[0].completions)}
    got = StepValues.of(groups, StepTable.of(groups, a), values, a, 1.0)
    # Of a reward at the end and values of 0, n tokens before the end lambda^n of the reward.
    lam = 1 - 1 / (0.5 * 8)
    want = groups[0].rewards[0] * lam ** np.arange(7, -1, -1.0)
    np.testing.assert_allclose(got.advantages[0, 0], want, rtol=1e-6)


def test_explained_variance():
    returns = np.array([1.0, 2.0, 4.0])
    assert explained_variance(returns + 3, returns) == 1
    assert explained_variance(np.zeros(3), returns) == 0
    assert explained_variance(-returns, returns) == -3
    assert explained_variance(returns, np.ones(3)) is None
    assert explained_variance(np.zeros(0), np.zeros(0)) is None


def test_a_critic_learns_what_completions_earn():
    """Rewards by the first token of the prompt: values explain more and more of them."""
    groups = []
    for group in random_groups(SMALL, 3, 2, 9, 8):
        reward = float(group.prompt_ids[0]) / 10
        groups.append(replace(group, rewards=np.full(group.size, reward)))
    updater = make_updater(replace(A, lam=1.0, discount=1.0), value_clip=0.0, warmup_steps=100)
    state = first_state(updater)
    weights = jax.device_get(state.trainable)
    explained = []
    losses = []
    for step in range(12):
        state, outcome = updater.update(state, groups, step)
        metrics = outcome.metrics.result()
        explained.append(metrics["critic/vf_explained_var"])
        losses.append(metrics["critic/vf_loss"])
        # In the warm-up the policy stays as it is, to the bit.
        assert metrics["critic/warmup"] == 1 and "loss" not in metrics
    assert losses[-1] < 0.2 * losses[0] and explained[-1] > 0.5 > explained[0]
    for before, after in zip(
        jax.tree.leaves(weights), jax.tree.leaves(jax.device_get(state.trainable)), strict=True
    ):
        np.testing.assert_array_equal(before, after)
    assert int(state.updates) == 0 and int(state.critic.updates) == 12


def test_the_warm_up_ends_after_its_steps_or_when_enough_is_explained():
    critic = make_updater(warmup_steps=5, warmup_until=0.6).critic
    assert critic is not None
    assert not critic.ends_warmup(4, 0, 0.5)
    assert critic.ends_warmup(4, 0, 0.6)
    assert critic.ends_warmup(5, 0, -2.0) and critic.ends_warmup(5, 0, None)
    # Once the policy has been updated, the warm-up is over for good.
    assert critic.ends_warmup(4, 3, 0.1)
    assert not critic.ends_warmup(4, 0, None)


def test_both_are_updated_from_the_same_rows_and_told_of():
    groups = random_groups(SMALL, 3, 2, 9, 8)
    updater = make_updater(replace(A, num_minibatches=2, num_epochs=2, whiten=True))
    state, outcome = updater.update(first_state(updater), groups, 0)
    metrics = outcome.metrics.result()
    assert int(state.updates) == int(state.critic.updates) == metrics["update/count"] == 4
    assert {
        "critic/vf_loss",
        "critic/vf_clipfrac",
        "critic/vpred_mean",
        "critic/values/mean",
        "critic/returns/max",
        "critic/grad_norm",
        "critic/lr",
        "loss",
        "entropy",
    } <= metrics.keys()
    assert metrics["critic/lr"] == pytest.approx(1e-2) and metrics["lr"] == pytest.approx(1e-3)
    assert metrics["critic/skipped"] == 0 and "critic/warmup" not in metrics
    lowest, highest = metrics["critic/values/min"], metrics["critic/values/max"]
    assert lowest < metrics["critic/values/mean"] < highest
    # Whitened over tokens, so the mean over tokens is 0.
    lengths = outcome.table.lengths
    assert (outcome.table.advantages * lengths).sum() == pytest.approx(0, abs=1e-5)


def test_a_policy_without_a_critic_is_given_batches_of_the_same_form():
    groups = random_groups(SMALL, 2, 2, 9, 8)
    (with_targets,) = packed(groups, whole(groups), random_targets(groups))
    (without,) = packed(groups, whole(groups))
    assert without.arrays.targets is None
    policys = with_targets.arrays.of_policy()
    assert jax.tree.structure(policys) == jax.tree.structure(without.arrays)


def test_a_state_with_a_critic_is_stored_and_comes_back():
    state = first_state(make_updater())
    trees = state.to_trees()
    assert sorted(trees) == ["critic", "optimizer", "trainable", "updates"]
    assert sorted(trees["critic"]) == ["optimizer", "trainable", "updates"]
    back = TrainState.from_trees(trees)
    assert jax.tree.structure(back) == jax.tree.structure(state)
    frozen = back.with_frozen("of the policy", "of the critic")
    assert (frozen.frozen, frozen.critic.frozen) == ("of the policy", "of the critic")


def test_metrics_of_values_are_over_time_steps():
    target = ValueTargets(np.array([1.0, 9.0, 3.0]), np.array([2.0, 0.0, 4.0]), np.array([1, 0, 1]))
    metrics = MetricSet()
    table = StepTable.of(random_groups(SMALL, 1, 1, 3, 3), A)
    StepValues({}, {(0, 0): target}, table, 0.25).add_metrics(metrics)
    result = metrics.result()
    assert (result["critic/values/mean"], result["critic/values/max"]) == (2, 3)
    assert (result["critic/returns/min"], result["critic/returns/mean"]) == (2, 3)
    assert result["critic/vf_explained_var"] == 0.25


def test_the_critic_has_the_policys_layers():
    a: Architecture = critic_architecture(SMALL)
    assert a == replace(SMALL, value_head=True)


# ---- a critic on the policy's layers


SHARED = critic_architecture(SMALL, shared=True)


def shared_learner(where: Roles, a: AlgorithmSection, coef: float, clip: float = 0.3) -> Learner:
    critic = CriticSection(shared=True, coef=coef, value_clip=clip)
    model = Model(SMALL, where.trainer)
    return Learner(model, make_objective(a, critic=critic), OptimizerSection(), 100)


def batches_of_both(groups: list[Group], shape: Shape) -> list[MicroBatch]:
    """With advantages and weights for the policy, and targets for the critic."""
    rng = np.random.default_rng(3)
    advantages = rng.normal(size=(len(groups), groups[0].size))
    weights = rng.random(advantages.shape) / 20
    targets = random_targets(groups)
    return pack(
        groups,
        range(len(groups)),
        TokenTerms(advantages, weights, targets=targets),
        BatchLayout([shape], 1.0),
    )


def gradient_of_both(
    where: Roles, groups: list[Group], shape: Shape, a: AlgorithmSection, coef: float
) -> tuple[GradientSum, Any]:
    """Of a policy and the head of values on its layers: (sum of the micro-batches, head)."""
    learner = shared_learner(where, a, coef)
    parameters = jax.device_put(random_parameters(SMALL), shardings(SMALL, where.trainer))
    head = random_parameters(VALUED, seed=1).lm_head
    head = jax.device_put(head, value_head_spec(SMALL).sharding(where.trainer))
    critic = TrainState(Parameters(None, None, None, head), None, None)
    state = TrainState(parameters, None, None, critic=critic)
    total = None
    for batch in batches_of_both(groups, shape):
        total, _ = learner.accumulate(total, state, batch.arrays)
    assert total is not None
    return jax.device_get(total), head


def test_the_gradient_of_shared_layers_is_that_of_both_losses():
    """Policy and critic apart, each with a backward pass of its own, add up to it."""
    groups = random_groups(SMALL, 4, 2, 9, 8)
    a = replace(A, kl_coef=0.0)
    coef = 0.7
    shape = whole(groups[:2])
    both, head = gradient_of_both(roles(), groups, shape, a, coef)
    policy = Learner(Model(SMALL, roles().trainer), make_objective(a), OptimizerSection(), 100)
    critic = value_learner(clip=0.3)
    parameters = random_parameters(SMALL)
    of_policy = None
    of_critic = None
    for batch in batches_of_both(groups, shape):
        arrays = batch.arrays
        state = TrainState(parameters, None, None)
        of_policy, _ = policy.accumulate(of_policy, state, arrays.of_policy())
        state = TrainState(replace(parameters, lm_head=head), None, None)
        of_critic, _ = critic.accumulate(of_critic, state, arrays)
    assert of_policy is not None and of_critic is not None
    value_loss, value_sums = both.sums["values"]
    assert value_loss == pytest.approx(float(of_critic.loss), rel=1e-5)
    assert both.loss == pytest.approx(float(of_policy.loss + coef * of_critic.loss), rel=1e-5)
    for name, (total, count) in of_critic.sums.items():
        assert value_sums[name] == (pytest.approx(float(total), rel=1e-4), float(count)), name
    np.testing.assert_allclose(
        both.value_head, coef * np.asarray(of_critic.gradient.lm_head), rtol=1e-4, atol=1e-7
    )
    layers = replace(of_critic.gradient, lm_head=None)
    want = jax.tree.map(lambda one, other: one + coef * other, of_policy.gradient, layers)
    assert all(np.abs(leaf).max() > 0 for leaf in jax.tree.leaves(layers))
    for got, leaf in zip(jax.tree.leaves(both.gradient), jax.tree.leaves(want), strict=True):
        assert relative(got, leaf) < 1e-5


@pytest.mark.slow
@on_meshes
def test_the_gradient_of_both_losses_is_the_same_on_a_mesh(sizes: dict[str, int]):
    groups = random_groups(SMALL, 8, 2, 9, 8)
    where = roles(**sizes)
    one, _ = gradient_of_both(roles(), groups, whole(groups), A, 0.5)
    other, _ = gradient_of_both(where, groups, shape_on(where, groups), A, 0.5)
    assert relative(other.value_head, one.value_head) < 1e-5
    for leaf, of_mesh in zip(
        jax.tree.leaves(one.gradient), jax.tree.leaves(other.gradient), strict=True
    ):
        assert relative(of_mesh, leaf) < 1e-5


def test_a_critic_that_shares_the_layers_has_a_head_alone():
    specs = trained_specs(SHARED)
    assert jax.tree.leaves(specs) == [specs.lm_head] and specs.lm_head.shape == (
        SMALL.hidden_size,
        1,
    )
    assert frozen_specs(SHARED) is None


def test_a_warm_up_on_the_policys_layers_moves_the_head_alone():
    groups = random_groups(SMALL, 3, 2, 9, 8)
    updater = make_updater(A, shared=True, warmup_steps=1)
    state = first_state(updater)
    weights = jax.device_get(state.trainable)
    state, outcome = updater.update(state, groups, 0)
    metrics = outcome.metrics.result()
    assert metrics["critic/warmup"] == 1 and "loss" not in metrics
    assert metrics["critic/vf_loss"] > 0
    for before, after in zip(
        jax.tree.leaves(weights), jax.tree.leaves(jax.device_get(state.trainable)), strict=True
    ):
        np.testing.assert_array_equal(before, after)
    head = jax.device_get(state.critic.trainable.lm_head)
    state, outcome = updater.update(state, groups, 1)
    metrics = outcome.metrics.result()
    assert "critic/warmup" not in metrics and metrics["update/count"] == 1
    assert {"loss", "critic/vf_clipfrac", "critic/vpred_mean", "critic/grad_norm"} <= metrics.keys()
    assert not np.array_equal(head, state.critic.trainable.lm_head)
    assert int(state.updates) == 1 and int(state.critic.updates) == 2
