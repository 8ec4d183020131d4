"""AdamW: the learning rate at every update, what decays, what clipping does, where the moments
lie."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from small import FULLEST, HYBRID, QWEN3, SINKS, roles

from shoal.config.sections.optimizer import OptimizerSection
from shoal.model.parameters import param_specs, shardings
from shoal.trainer.optimizer import learning_rate, make_optimizer, state_shardings

SMALL = replace(FULLEST, num_layers=1, tie_embeddings=False)  # biases, norms and matrices


@pytest.mark.parametrize(
    ("schedule", "warmup", "expected"),
    [
        ("constant", 0, [8, 8, 8, 8, 8, 8, 8, 8]),
        ("constant", 4, [2, 4, 6, 8, 8, 8, 8, 8]),
        ("linear", 0, [8, 7, 6, 5, 4, 3, 2, 1]),
        ("linear", 4, [2, 4, 6, 8, 8, 6, 4, 2]),
        ("cosine", 4, [2, 4, 6, 8, 8, 4 + 8**0.5, 4, 4 - 8**0.5]),
        ("cosine", 10, [0.8, 1.6, 2.4, 3.2, 4.0, 4.8, 5.6, 6.4]),  # cut short while it still rises
    ],
)
def test_learning_rate_by_hand(schedule, warmup, expected):
    rate = learning_rate(
        OptimizerSection(lr=8.0, warmup_steps=warmup, schedule=schedule), num_updates=8
    )
    assert np.allclose([float(rate(jnp.int32(n))) for n in range(8)], expected, rtol=1e-5)


@pytest.mark.slow
def test_decay_reaches_near_zero_at_the_last_update():
    for schedule in ("linear", "cosine"):
        rate = learning_rate(
            OptimizerSection(lr=1.0, warmup_steps=10, schedule=schedule), num_updates=1010
        )
        values = np.asarray(jax.vmap(rate)(jnp.arange(1010)))
        assert values[0] == pytest.approx(0.1) and values.max() == pytest.approx(1.0)
        assert 0 < values[-1] <= 1.01e-3 and (np.diff(values[10:]) <= 0).all()


def weight_decay() -> dict:
    return {"matrix": True, "norm": False}


def run(section: OptimizerSection, gradients: list[dict], start: dict) -> list[dict]:
    optimizer = make_optimizer(section, learning_rate(section, 100), weight_decay())
    parameters, state, path = start, optimizer.init(start), []
    for gradient in gradients:
        change, state = optimizer.update(gradient, state, parameters)
        parameters = optax.apply_updates(parameters, change)
        path.append(parameters)
    return path


def by_hand(section: OptimizerSection, gradients: list[dict], start: dict) -> list[dict]:
    """AdamW (Loshchilov and Hutter, 2019, algorithm 2) after clipping by global norm, float64."""
    p = {k: np.asarray(v, np.float64) for k, v in start.items()}
    m, v = ({k: 0 * x for k, x in p.items()} for _ in range(2))
    path = []
    for n, gradient in enumerate(gradients):
        norm = np.sqrt(sum((np.asarray(g, np.float64) ** 2).sum() for g in gradient.values()))
        limit = section.clip_grad_norm
        scale = min(1.0, limit / norm) if limit else 1.0
        lr = section.lr * min(1.0, (n + 1) / max(1, section.warmup_steps))
        for k in p:
            g = np.asarray(gradient[k], np.float64) * scale
            m[k] = section.beta1 * m[k] + (1 - section.beta1) * g
            v[k] = section.beta2 * v[k] + (1 - section.beta2) * g * g
            step = (
                m[k]
                / (1 - section.beta1 ** (n + 1))
                / (np.sqrt(v[k] / (1 - section.beta2 ** (n + 1))) + 1e-8)
            )
            p[k] = p[k] - lr * (step + section.weight_decay * p[k] * weight_decay()[k])
        path.append(dict(p))
    return path


@pytest.mark.slow
@pytest.mark.parametrize("clip", [0.0, 0.5])
def test_updates_are_adamw_after_clipping(clip):
    rng = np.random.default_rng(0)
    start = {"matrix": jnp.asarray(rng.normal(size=(3, 4)), jnp.float32), "norm": jnp.ones(4)}
    # over the limit, under it, over it
    gradients = []
    for scale in (100.0, 0.01, 1.0):
        gradients.append(
            {
                k: jnp.asarray(rng.normal(size=x.shape) * scale, jnp.float32)
                for k, x in start.items()
            }
        )
    section = OptimizerSection(lr=0.1, warmup_steps=2, weight_decay=0.3, clip_grad_norm=clip)
    path, expected = run(section, gradients, start), by_hand(section, gradients, start)
    for ours, theirs in zip(path, expected, strict=True):
        for name in start:
            assert np.allclose(ours[name], theirs[name], rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_clipping_acts():
    start = {"matrix": jnp.ones((2, 2)), "norm": jnp.ones(2)}
    gradients = []
    for s in (1000.0, 1.0):
        gradients.append(jax.tree.map(lambda x, s=s: x * s, start))
    free, clipped = (
        run(OptimizerSection(lr=0.1, warmup_steps=0, clip_grad_norm=c), gradients, start)[1]["norm"]
        for c in (0.0, 1.0)
    )
    assert np.abs(np.asarray(free) - np.asarray(clipped)).min() > 0.01


@pytest.mark.parametrize(
    ("a", "exempt"),
    [
        (HYBRID, {"A_log", "dt_bias", "norm", "input_layernorm", "post_attention_layernorm"}),
        (SINKS, {"sinks", "input_layernorm", "post_attention_layernorm"}),
    ],
    ids=["delta nets", "sinks"],
)
def test_numbers_of_heads_and_channels_have_no_weight_decay(a, exempt):
    """The convolution of a delta net is a matrix: a row for each channel."""
    found = {True: set(), False: set()}
    for spec in jax.tree.leaves(param_specs(a).blocks):
        *_, last = spec.name.removesuffix(".weight").split(".")
        found[spec.weight_decay].add("bias" if last == "bias" else last)
    assert exempt <= found[False] and not exempt & found[True]
    assert found[False] <= exempt | {"bias", "q_norm", "k_norm"}
    assert ("conv1d" in found[True]) is (a is HYBRID)


@pytest.mark.slow
def test_weight_decay_exempts_norms_and_biases():
    declared = param_specs(SMALL)
    mask = jax.tree.map(lambda d: d.weight_decay, declared)
    parameters = jax.tree.map(lambda d: jnp.ones(d.shape), declared)
    section = OptimizerSection(lr=0.1, warmup_steps=0, weight_decay=0.5)
    optimizer = make_optimizer(section, learning_rate(section, 10), mask)
    still = jax.tree.map(jnp.zeros_like, parameters)
    change, _ = jax.jit(optimizer.update)(still, jax.jit(optimizer.init)(parameters), parameters)
    after = jax.tree.map(lambda p, c: float((p + c).max()), parameters, change)
    exempt = [
        after.final_norm,
        after.blocks.attention_norm,
        after.blocks.mlp_norm,
        after.blocks.q_norm,
        after.blocks.k_norm,
        *(getattr(after.blocks, name).bias for name in "qkv"),
    ]
    decayed = [
        after.embed_tokens,
        after.lm_head,
        *(getattr(after.blocks, name).kernel for name in "qkv"),
        after.blocks.o,
        after.blocks.gate,
        after.blocks.up,
        after.blocks.down,
    ]
    assert exempt == [1.0] * 8 and decayed == pytest.approx([0.95] * 9)
    assert len(exempt) + len(decayed) == len(jax.tree.leaves(after))


def test_moments_lie_where_their_parameters_do_and_counters_everywhere():
    role = roles(fsdp=4, tensor=2).trainer
    declared = param_specs(QWEN3)
    split = shardings(QWEN3, role)
    section = OptimizerSection()
    optimizer = make_optimizer(
        section, learning_rate(section, 10), jax.tree.map(lambda d: d.weight_decay, declared)
    )
    shapes = jax.tree.map(lambda d: jax.ShapeDtypeStruct(d.shape, jnp.float32), declared)
    layout = state_shardings(optimizer, shapes, split, role.replicated)
    assert jax.tree.structure(layout) == jax.tree.structure(jax.eval_shape(optimizer.init, shapes))
    (adam,) = [
        s
        for s in jax.tree.leaves(layout, is_leaf=lambda x: isinstance(x, optax.ScaleByAdamState))
        if isinstance(s, optax.ScaleByAdamState)
    ]
    assert adam.count == role.replicated
    for moment in (adam.mu, adam.nu):
        assert jax.tree.leaves(moment) == jax.tree.leaves(split)
    assert split.blocks.gate == NamedSharding(
        role.mesh, PartitionSpec(None, ("fsdp", "expert", "context"), "tensor")
    )
