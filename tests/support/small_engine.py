"""A small engine, its requests, and what the model itself says of their completions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from small import QWEN3, roles

from shoal.model.architecture import Architecture
from shoal.model.head import logits
from shoal.model.parameters import Parameters, param_specs
from shoal.model.passes import Prompts
from shoal.model.transformer import Model, forward
from shoal.protocols import SampleRequest
from shoal.records import (
    Completion,
    Example,
    Group,
    NoiseKey,
    Purpose,
    SamplingParams,
)
from shoal.sampler.engine import Engine, drain
from shoal.weights.sampler_copy import publish_to

TOLERANCE = 2e-5
SMALL = replace(QWEN3, num_layers=2)
EOS = (0, 7)  # 0 is also what padding is filled with
LENGTHS = (20, 1, 70, 100, 64, 65, 33)  # of the prompts: two buckets, in mixed order
MAX_TOKENS = 90  # prefill's token, then three pieces of decoding


def text(ids: Sequence[int]) -> str:
    """A character a token."""
    return "".join(chr(0x4E00 + i) for i in ids)


def weights(a: Architecture, seed: int = 0, scale: float = 10.0) -> Parameters:
    """Large enough that logits have standard deviation 1 and more; drawn by NumPy, nothing is
    compiled."""
    rng = np.random.default_rng(seed)

    def draw(d) -> jax.Array:
        spread, centre = (
            (d.stddev * scale, 0.0) if d.init == "normal" else (0.3, float(d.init == "ones"))
        )
        return jnp.asarray(centre + spread * rng.standard_normal(d.shape), jnp.float32)

    return jax.tree.map(draw, param_specs(a))


def model(a: Architecture) -> Model:
    return Model(a, roles().sampler)


def make(a: Architecture = SMALL, **changes) -> Engine:
    sizes = {
        "slots": 16,
        "group_size": 4,
        "max_prompt_tokens": 100,
        "max_completion_tokens": 100,
        "eos_ids": EOS,
        "decode": text,
    }
    engine = Engine(model(a), **{**sizes, **changes})
    engine.load(0, publish_to(engine.model, weights(a)))
    return engine


def prompt(row: int, size: int, vocab: int = SMALL.vocab_size) -> np.ndarray:
    return np.random.default_rng(row).integers(0, vocab, size).astype(np.int32)


def request(
    row: int,
    size: int | None = None,
    *,
    id: int | None = None,
    step: int = 0,
    count: int = 4,
    params: SamplingParams | None = None,
    **changes,
) -> SampleRequest:
    params = replace(params or SamplingParams(max_tokens=MAX_TOKENS), **changes)
    return SampleRequest(
        row if id is None else id,
        prompt(row, LENGTHS[row] if size is None else size),
        count,
        NoiseKey(0, "train", step, row),
        params,
    )


asked = request
"""In fixtures, whose `request` is pytest's."""


def play(engine: Engine, requests: Sequence[SampleRequest]) -> dict[tuple[int, int], Completion]:
    """By (row, index)."""
    engine.submit(requests)
    rows = {r.id: r.noise_key.row for r in requests}
    return {(rows[id], index): c for (id, index), c in drain(engine).items()}


def same(ours: dict, theirs: dict) -> None:
    """Bit for bit, wherever both have a completion."""
    common = ours.keys() & theirs.keys()
    assert common
    for key in common:
        x, y = ours[key], theirs[key]
        assert x.token_ids.tolist() == y.token_ids.tolist() and x.stop_reason == y.stop_reason, key
        assert x.logprobs.tobytes() == y.logprobs.tobytes(), key


@partial(jax.jit, static_argnums=0)
def _all_logits(m: Model, parameters, tokens: jax.Array, length: jax.Array) -> jax.Array:
    positions = jnp.arange(tokens.shape[1])[None]
    hidden, _ = forward(m, parameters, tokens, positions, Prompts.of(m, length, tokens.shape[1]))
    return logits(m, parameters, hidden)[0]


def full_logits(engine: Engine, row_prompt: np.ndarray, completion: Completion) -> np.ndarray:
    """Of each of the completion's tokens, float32[T, V], from one forward over prompt and
    completion."""
    whole = np.concatenate([row_prompt, completion.token_ids])
    tokens = np.zeros((1, 192 if len(whole) <= 192 else 2176), np.int32)
    tokens[0, : len(whole)] = whole
    values = _all_logits(engine.model, engine.parameters, tokens, np.array([len(whole)], np.int32))
    return np.asarray(values)[len(row_prompt) - 1 : len(whole) - 1]


def played_groups(requests, played) -> list[Group]:
    """Returns the groups of requests of four completions that `play` answered; rewards are 0."""
    groups = []
    for request in requests:
        groups.append(
            Group(
                purpose=Purpose.TRAIN,
                step=0,
                version=0,
                example=Example(request.id, ""),
                prompt_ids=request.prompt_ids,
                completions=tuple(played[request.id, i] for i in range(4)),
                texts=("",) * 4,
                rewards=np.zeros(4),
                reward_components={},
                valid=np.ones(4, bool),
            )
        )
    return groups
