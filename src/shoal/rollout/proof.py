"""What a host shows when it joins: what its numbers depend on, and a known group, drawn from known weights.

Known weights, because a host that joins late could not draw from those that the first one began with.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np

from shoal.model.checksum import mixed
from shoal.model.parameters import ParamSpec, param_specs
from shoal.model.transformer import Model
from shoal.rollout.publication import publish_to
from shoal.sampler.engine import Engine, run_until_idle
from shoal.types import Address, Params, SampleRequest, SamplingParams

TOKENS, PROMPT_TOKENS = 4, 8
"""Most tokens of each completion of the known group, and of its prompt."""
KNOWN_VERSION = -2


@dataclass(frozen=True)
class Proof:
    """`facts`: versions, device kind, threads, by name. `tokens` and `logprobs` of the known group, one after the
    other."""

    facts: Mapping[str, str]
    tokens: np.ndarray
    logprobs: np.ndarray

    def other_facts(self, wanted: Mapping[str, str]) -> str:
        """Which facts are not as wanted; empty where all are."""
        return ", ".join(f"{name} is {self.facts.get(name) or 'not set'}, not {value or 'not set'}"
                         for name, value in wanted.items() if self.facts.get(name) != value)

    def difference(self, other: Proof) -> str:
        """How another host's numbers differ, and what may be why; empty where they do not."""
        facts = [text] if (text := other.other_facts(self.facts)) else []
        if not np.array_equal(self.tokens, other.tokens):
            facts.append("it draws other tokens")
        elif not np.array_equal(self.logprobs.view(np.uint32), other.logprobs.view(np.uint32)):
            largest = np.abs(self.logprobs - other.logprobs).max()
            facts.append(f"it draws with other log-probs (by up to {largest:.2g})")
        return ", ".join(facts)


def prove(engine: Engine, params: SamplingParams, num_completions: int, facts: Mapping[str, str]) -> Proof:
    """The known group of an engine that has nothing else to do; its programs are compiled by it."""
    limit = min(TOKENS, params.max_tokens)
    size = min(PROMPT_TOKENS, engine.max_prompt_tokens, engine.model.architecture.vocab_size)
    engine.load(KNOWN_VERSION, known_parameters(engine.model))
    engine.submit([SampleRequest(0, np.arange(size, dtype=np.int32), num_completions, Address(0, "proof", 0, 0),
                                 replace(params, max_tokens=limit, stop=()))])
    (_, completions), = run_until_idle(engine)
    engine.release_memory()
    engine.read_places()
    return Proof(facts, np.concatenate([one.token_ids for one in completions]),
                 np.concatenate([one.logprobs for one in completions]))


def known_parameters(model: Model) -> Params:
    """Weights of a model's shapes that are a function of their positions: the same bits on every device."""
    specs, structure = jax.tree.flatten(param_specs(model.architecture))
    return publish_to(model, jax.tree.unflatten(structure, [_known(model, spec, number)
                                                            for number, spec in enumerate(specs)]))


def _known(model: Model, spec: ParamSpec, number: int) -> jax.Array:
    def make() -> jax.Array:
        if spec.init != "normal":
            return jnp.full(spec.shape, spec.init == "ones", model.dtype)
        position = jnp.full(spec.shape, number, jnp.uint32)
        for axis, size in enumerate(spec.shape):
            position = position * jnp.uint32(size) + jax.lax.broadcasted_iota(jnp.uint32, spec.shape, axis)
        # Of 16 bits, which any type of float holds up to its own rounding.
        steps = (mixed(position) >> 16).astype(jnp.int32) - 2**15
        return (steps.astype(jnp.float32) * (2 * spec.stddev / 2**15)).astype(model.dtype)

    return model.role.jit(make, out_shardings=spec.sharding(model.role))()
