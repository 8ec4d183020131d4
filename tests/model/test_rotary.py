"""Frequencies of rotary positions and their scaling, against transformers' and by hand."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest
from small import LLAMA3

from shoal.model.architecture import RopeScaling, Rotary
from shoal.model.config_json import Entries
from shoal.model.config_rope import rotary_of
from shoal.model.rotary import frequencies, rotary

YARN = RopeScaling("yarn", 4.0, original_max_position=1000, attention_factor=1.5, truncate=False)


def test_yarn_keeps_fast_frequencies_and_divides_slow_ones():
    """By hand: frequency i of 8 dimensions is 10^-i. It makes 1000 * 10^-i / 2 pi turns within 1000
    positions: 159, 15.9, 1.6, 0.2. At 32 turns i is 0.697, at one it is 2.202."""
    kept = 1 - np.clip((np.arange(4) - 0.6967) / (2.2018 - 0.6967), 0, 1)
    base = 10.0 ** -np.arange(4)
    expected = base * (kept + (1 - kept) / 4)
    found = np.asarray(frequencies(Rotary(10.0**4, YARN), 8))
    np.testing.assert_allclose(found, expected, rtol=2e-4)
    assert found[0] == 1 and found[3] == pytest.approx(1e-3 / 4)
    # rounded to whole numbers, 0 and 3, the bounds are further apart
    whole = np.asarray(frequencies(Rotary(10.0**4, replace(YARN, truncate=True)), 8))
    np.testing.assert_allclose(whole, base * [1, 3 / 4, 1 / 2, 1 / 4], rtol=1e-6)


def test_yarn_makes_queries_and_keys_longer():
    a = replace(LLAMA3, rope_scaling=YARN)
    ((cos, sin),) = rotary(a, jnp.arange(50)[None])
    np.testing.assert_allclose(np.hypot(cos, sin), 1.5, rtol=1e-6)
    ((cos, sin),) = rotary(replace(a, rope_scaling=None), jnp.arange(50)[None])
    np.testing.assert_allclose(np.hypot(cos, sin), 1.0, rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    "entries",
    [
        {"factor": 32.0, "original_max_position_embeddings": 4096, "truncate": False},
        {"factor": 4.0, "original_max_position_embeddings": 32768},
        {"factor": None, "original_max_position_embeddings": 8192},
        {"factor": 40, "original_max_position_embeddings": 4096, "mscale": 1.0}
        | {"mscale_all_dim": 0.707, "beta_fast": 16, "beta_slow": 2},
        {"factor": 4.0, "original_max_position_embeddings": 16384, "attention_factor": 1.2},
        # both bounds beyond the first frequency
        {"factor": 4.0, "original_max_position_embeddings": 6},
        {"factor": 4.0, "original_max_position_embeddings": 32768, "partial_rotary_factor": 0.5},
    ],
)
def test_yarn_is_that_of_transformers(tmp_path, transformers, entries):
    pytest.importorskip("torch")
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    theta, head_dim = 150000.0, 64
    rope = {"rope_type": "yarn", "rope_theta": theta, **entries}
    config = SimpleNamespace(
        rope_parameters=rope,
        head_dim=head_dim,
        hidden_size=4 * head_dim,
        num_attention_heads=4,
        max_position_embeddings=131072,
        standardize_rope_params=lambda: None,
    )
    theirs, length = ROPE_INIT_FUNCTIONS["yarn"](config)
    ours = rotary_of(Entries(tmp_path, {"max_position_embeddings": 131072, **rope}))
    np.testing.assert_allclose(frequencies(ours, head_dim), theirs.numpy(), rtol=1e-6)
    assert ours.scaling is not None
    assert math.isclose(ours.scaling.attention_factor, length)
