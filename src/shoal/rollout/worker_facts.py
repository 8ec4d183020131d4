"""Checks that sampling workers compute the same numbers. A worker that joins shows what its numbers
depend on (software, device, settings) and samples a known group from known weights; both are
compared with what they must be.

The weights are known ones rather than those of the run, because a worker that joins late cannot
sample from the weights that the first worker began with."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from shoal.mesh import Program, Role
from shoal.model.parameters import ParamSpec, param_specs
from shoal.model.transformer import Model
from shoal.protocols import SampleRequest
from shoal.records import HostRefused, NoiseKey, Params, SamplingParams, ShoalError
from shoal.rollout.host_health import FIRST_SECONDS
from shoal.runs.layout import WORKER_PROOF
from shoal.runs.lines import write_atomically
from shoal.sampler.engine import Engine, run_until_idle
from shoal.weights.checksum import mixed
from shoal.weights.sampler_copy import PROGRAMS_KEPT, publish_to, published_dtype

TOKENS, PROMPT_TOKENS = 4, 8
"""Most tokens of each completion of the known group, and of the group's prompt."""
# the version of the known weights; a run's versions are 0 and more, and -1 stands for none
KNOWN_VERSION = -2


@dataclass(frozen=True)
class WorkerFingerprint:
    """What a worker shows when it joins. `facts`: versions of software, kind of device, threads, a
    digest of the settings, by name. `tokens` and `logprobs`: those of the known group's
    completions, concatenated."""

    facts: Mapping[str, str]
    tokens: np.ndarray
    logprobs: np.ndarray

    def other_facts(self, wanted: Mapping[str, str]) -> str:
        """Returns a text that names the facts which differ from `wanted` ("jax is 0.10, not 0.11");
        "" if none does. Facts that `wanted` does not name are not compared; one that this worker
        lacks differs from any value."""
        texts = []
        for name, value in wanted.items():
            own_value = self.facts.get(name)
            if own_value != value:
                texts.append(f"{name} is {own_value or 'not set'}, not {value or 'not set'}")
        return ", ".join(texts)

    def difference(self, other: WorkerFingerprint) -> str:
        """Returns a text that says how another worker's facts, tokens or log-probs differ from
        these; "" if they do not. Facts that only `other` has are not compared, and log-probs only
        if the tokens are equal: they must be equal to the last bit."""
        differences = []
        facts_text = other.other_facts(self.facts)
        if facts_text:
            differences.append(facts_text)
        if not np.array_equal(self.tokens, other.tokens):
            differences.append("it samples other tokens")
        elif not np.array_equal(self.logprobs.view(np.uint32), other.logprobs.view(np.uint32)):
            largest = np.abs(self.logprobs - other.logprobs).max()
            differences.append(f"it samples with other log-probs (by up to {largest:.2g})")
        return ", ".join(differences)

    def write(self, file: Path) -> None:
        """Writes the fingerprint to a file as JSON, in place of what the file had, atomically."""
        stored = {
            "facts": dict(self.facts),
            "tokens": self.tokens.tolist(),
            "logprobs": self.logprobs.tolist(),
        }
        write_atomically(file, [json.dumps(stored)])

    @classmethod
    def read(cls, file: Path) -> WorkerFingerprint:
        """Reads a fingerprint from a file that `write` made. ShoalError if the file is missing,
        damaged or cannot be read."""
        try:
            stored = json.loads(file.read_text(encoding="utf-8"))
            tokens = np.array(stored["tokens"], np.int32)
            logprobs = np.array(stored["logprobs"], np.float32)
            if len(tokens) != len(logprobs):
                raise ValueError("tokens and log-probs are not as many")
            return cls(dict(stored["facts"]), tokens, logprobs)
        except (OSError, KeyError, TypeError, ValueError) as error:
            raise ShoalError(
                f"{file}, which the workers of a resumed run are compared with, is damaged "
                f"({error}): restore it from a backup, or remove it, and a present worker becomes "
                "the reference for the others"
            ) from error


@dataclass
class WorkerParity:
    """Decides which numbers a run's workers must have, and whether each worker has them. `strict`,
    which is for fixed versions: a worker that differs is refused, instead of only reported.

    The right numbers are the trainer's, or those of the run's earlier workers, if some worker has
    the same devices and settings as these; else they are the first worker's. This is decided as
    soon as such a worker or all workers are ready, or FIRST_SECONDS after the first became
    ready."""

    strict: bool
    say: Callable[[str], None]
    # facts of the trainer that every worker must share
    facts: Mapping[str, str] = field(default_factory=dict)
    # candidates for the right numbers, by a text that says whose they are; the first that fits is
    # taken
    wanted: dict[str, WorkerFingerprint] = field(default_factory=dict)
    # fingerprints of the workers that are ready, by name
    proofs: dict[str, WorkerFingerprint] = field(default_factory=dict)
    different: set[str] = field(default_factory=set)  # names of the workers whose numbers differ
    # file that a worker's fingerprint is written to if it becomes the measure for the others
    file: Path | None = None
    _chosen: tuple[str, WorkerFingerprint] | None = None
    # time since which a ready worker waits for the decision; 0: none waits
    _undecided_at: float = 0.0

    def keep(self, folder: Path) -> None:
        """Sets the file, in a run's folder, to which a worker's fingerprint is written if it
        becomes the measure for the others. If `strict` and the file exists, because the run is
        resumed, adds its fingerprint to `wanted`. ShoalError if the file is damaged."""
        self.file = folder / WORKER_PROOF
        if self.strict and self.file.exists():
            self.wanted["the run's earlier workers"] = WorkerFingerprint.read(self.file)

    def numbers_differ(self, name: str, alive: Set[str]) -> bool | None:
        """Returns True if worker `name` computes other numbers than it must, False if it computes
        the right ones, None if that cannot be decided yet, because other workers are still
        preparing. `proofs` must have the worker's fingerprint, else KeyError. `alive`: names of all
        workers that have a process. Without `strict`, passes a difference to `say`, once for each
        worker, and adds the worker to `different`. HostRefused if the numbers differ and `strict`
        is set."""
        proof = self.proofs[name]
        owner = "the trainer"
        difference = proof.other_facts(self.facts)
        # the trainer's facts are shared; now compare with the chosen fingerprint
        if not difference:
            if self._chosen is None:
                self._chosen = self._choose(name, alive)
            if self._chosen is None:
                return None
            owner, wanted = self._chosen
            difference = wanted.difference(proof)
        if difference:
            text = f"{name} differs from {owner}: {difference}"
            if self.strict:
                raise HostRefused(
                    f"{text}; refused, as train.versions=fixed promises the same tokens from every "
                    "host: install the same everywhere, or set train.versions=newest"
                )
            if name not in self.different:
                self.say(f"{text}; it samples nevertheless (train.versions=newest)")
            self.different.add(name)
        return bool(difference)

    def _choose(self, name: str, alive: Set[str]) -> tuple[str, WorkerFingerprint] | None:
        """Returns (a text that says whose it is, the fingerprint that all workers must match): one
        of `wanted` that has the facts of a ready worker, else that of worker `name`, which is then
        written to `file`. Returns None while other workers are still preparing that may have the
        facts of a wanted fingerprint, for at most FIRST_SECONDS."""
        for owner, wanted in self.wanted.items():
            for proof in self.proofs.values():
                if not proof.other_facts(wanted.facts):
                    return owner, wanted
        others = sorted(alive - self.proofs.keys())
        if self.wanted and others:
            if not self._undecided_at:
                self._undecided_at = time.monotonic()
            seconds = time.monotonic() - self._undecided_at
            if seconds < FIRST_SECONDS:
                return None
            self.say(
                "no worker that is ready has the devices and settings of "
                f"{' or '.join(self.wanted)}, and after {seconds:.0f} s {', '.join(others)} still "
                f"prepare: {name}'s numbers are the measure of others'"
            )
        if self.file is not None:
            self.proofs[name].write(self.file)
        return name, self.proofs[name]


def fingerprint_of(
    engine: Engine, params: SamplingParams, num_completions: int, facts: Mapping[str, str]
) -> WorkerFingerprint:
    """Loads known weights into an idle engine, samples a known group of `num_completions` with the
    sampling settings `params`, but at most TOKENS tokens each and no stop strings, and returns the
    fingerprint: `facts`, and the group's tokens and log-probs. This also compiles the engine's
    programs; the engine's memory and weights are released afterwards, so it needs a `load` before
    it samples for anybody."""
    limit = min(TOKENS, params.max_tokens)
    size = min(PROMPT_TOKENS, engine.max_prompt_tokens, engine.model.architecture.vocab_size)
    engine.load(KNOWN_VERSION, known_parameters(engine.model))
    request = SampleRequest(
        0,
        np.arange(size, dtype=np.int32),
        num_completions,
        NoiseKey(0, "proof", 0, 0),
        replace(params, max_tokens=limit, stop=()),
    )
    engine.submit([request])
    # one request, so one pair
    ((_, completions),) = run_until_idle(engine)
    engine.release_memory()
    tokens = np.concatenate([completion.token_ids for completion in completions])
    logprobs = np.concatenate([completion.logprobs for completion in completions])
    return WorkerFingerprint(facts, tokens, logprobs)


def known_parameters(model: Model) -> Params:
    """Returns weights with the shapes of a model's, whose values are a function of their positions:
    the same bits on every device. They are in the layout and types of published weights, on the
    model's devices."""
    specs, structure = jax.tree.flatten(param_specs(model.architecture))
    leaves = []
    for number, spec in enumerate(specs):
        make_leaf = _known(model.role, spec, published_dtype(model, spec))
        leaves.append(make_leaf(np.uint32(number)))
    return publish_to(
        model,
        jax.tree.unflatten(structure, leaves),
        delete_source=True,
    )


@lru_cache(PROGRAMS_KEPT)
def _known(role: Role, spec: ParamSpec, dtype: np.dtype) -> Program:
    """Returns a program that makes the known weights of one parameter (`spec`) from the parameter's
    number, compiled at its first call."""

    def make(number: jax.Array) -> jax.Array:
        """Returns the parameter's values in the shape and type of the copy for samplers: all 1 if
        it begins as ones, else all 0 if it has no weight decay, else numbers that depend on
        `number` and the position."""
        # A parameter whose `init` is zeros, such as an adapter's B, gets other values here, so that
        # its effect is tested, too.
        if spec.init == "ones" or not spec.weight_decay:
            # ones, or zeros for other parameters without weight decay
            return jnp.full(spec.shape, spec.init == "ones", dtype)
        position = jnp.full(spec.shape, number, jnp.uint32)
        for axis, size in enumerate(spec.shape):
            position = position * jnp.uint32(size) + jax.lax.broadcasted_iota(
                jnp.uint32, spec.shape, axis
            )
        # Values have 16 bits, which any float type holds up to its own rounding.
        steps = (mixed(position) >> 16).astype(jnp.int32) - 2**15
        if dtype.kind == "i":
            return (steps >> 8).astype(dtype)
        return (steps.astype(jnp.float32) * (2 * spec.stddev / 2**15)).astype(dtype)

    return role.jit(make, out_shardings=spec.sharding(role))
