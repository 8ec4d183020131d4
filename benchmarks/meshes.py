"""Is every mesh right? Updates and sampling of a small model on all meshes of N simulated devices,
against one device.

    python benchmarks/meshes.py [--devices 8] [--dtype float32|bfloat16]

Trainer meshes: every data x fsdp x tensor = N. Sampler meshes: views of the trainer's devices with
every `sampler_tensor`, and the other half of the devices. Differences of loss and gradient are
relative, by norm; a sampler's are the largest of a token's log-prob from those that one device
gives for the same tokens. In bfloat16 both are compared with float32, beside what one device
differs by.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from typing import Any

import numpy as np

PROMPTS, GROUP_SIZE, LONGEST = 32, 2, 24


def factors(devices: int) -> Iterator[tuple[int, int, int]]:
    """(data, fsdp, tensor) of as many devices."""
    for data in divisors(devices):
        for fsdp in divisors(devices // data):
            yield data, fsdp, devices // data // fsdp


def divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]


class Trial:
    """What each mesh computes: one model, one batch of random completions, one set of prompts to
    sample from."""

    def __init__(self, tensor: int, dtype: str) -> None:
        import jax
        import jax.numpy as jnp

        from shoal.model.architecture import Architecture
        from shoal.model.parameters import param_specs

        self.architecture = Architecture(
            vocab_size=256,
            hidden_size=64,
            intermediate_size=128,
            num_layers=2,
            num_heads=tensor,
            num_kv_heads=2,
            head_dim=8,
            qk_norm=True,
            qkv_bias=True,
            rope_theta=10000.0,
            tie_embeddings=False,
        )
        self.dtype = jnp.dtype(dtype).type
        rng = np.random.default_rng(0)
        self.weights = jax.tree.map(
            lambda d: ((d.init == "ones") + 0.15 * rng.standard_normal(d.shape)).astype(np.float32),
            param_specs(self.architecture),
        )
        self.prompts = [
            rng.integers(0, 256, size).astype(np.int32) for size in rng.integers(1, 17, PROMPTS)
        ]
        self.lengths = rng.integers(1, LONGEST + 1, (PROMPTS, GROUP_SIZE))
        self.lengths[0, 0] = LONGEST
        self.tokens = [
            [rng.integers(0, 256, size).astype(np.int32) for size in sizes]
            for sizes in self.lengths
        ]

    def groups(self, completions: Any = None) -> list[Any]:
        from shoal.records import Completion, Example, Group, Purpose, StopReason

        def drawn(row: int, index: int) -> Any:
            if completions is not None:
                return completions[row, index]
            ids = self.tokens[row][index]
            return Completion(
                row,
                index,
                ids,
                np.zeros(len(ids), np.float32),
                np.ones(len(ids), bool),
                np.zeros(len(ids), np.int32),
                StopReason.EOS,
            )

        return [
            Group(
                Purpose.TRAIN,
                0,
                0,
                Example(row, ""),
                ids,
                tuple(drawn(row, i) for i in range(GROUP_SIZE)),
                ("",) * GROUP_SIZE,
                np.zeros(GROUP_SIZE),
                {},
                np.ones(GROUP_SIZE, bool),
            )
            for row, ids in enumerate(self.prompts)
        ]

    def batch(self, groups: list[Any], shards: int) -> Any:
        from shoal.trainer.batch import BatchLayout, Shape, TokenTerms, pack

        signs = np.resize([1.0, -0.7, 0.4], (PROMPTS, GROUP_SIZE))
        longest = 16 + GROUP_SIZE * 32
        shape = Shape(shards, -(-PROMPTS // shards) * longest)
        (batch,) = pack(
            groups,
            range(PROMPTS),
            TokenTerms(signs, np.full_like(signs, 1e-2)),
            BatchLayout([shape], 1.0),
        )
        return batch

    def learner(self, role: Any, dtype: Any = None) -> Any:
        from shoal.config.sections.algorithm import AlgorithmSection
        from shoal.config.sections.optimizer import OptimizerSection
        from shoal.model.transformer import Model
        from shoal.trainer.loss import make_objective
        from shoal.trainer.step import Learner

        return Learner(
            Model(self.architecture, role, dtype or self.dtype),
            make_objective(AlgorithmSection()),
            OptimizerSection(),
            10,
        )

    def state(self, learner: Any) -> Any:
        import jax

        from shoal.model.parameters import shardings

        return learner.init(
            jax.device_put(self.weights, shardings(self.architecture, learner.model.role))
        )

    def update(self, role: Any, dtype: Any = None) -> tuple[float, np.ndarray]:
        """(loss, gradient)"""
        import jax

        learner = self.learner(role, dtype)
        total, _ = learner.accumulate(
            None, self.state(learner), self.batch(self.groups(), role.row_shards).arrays
        )
        gradient = jax.device_get(total.gradient)
        return float(total.loss), np.concatenate(
            [np.ravel(leaf) for leaf in jax.tree.leaves(gradient)]
        )

    def sample(self, roles: Any) -> dict[tuple[int, int], Any]:
        """The completions that the sampler draws with the trainer's weights, published to it."""
        from shoal.model.transformer import Model
        from shoal.protocols import SampleRequest
        from shoal.records import NoiseKey, SamplingParams
        from shoal.sampler.engine import Engine, drain
        from shoal.weights.sampler_copy import publish_to

        model = Model(self.architecture, roles.sampler, self.dtype)
        engine = Engine(
            model,
            slots=PROMPTS * GROUP_SIZE,
            group_size=GROUP_SIZE,
            max_prompt_tokens=16,
            max_completion_tokens=LONGEST,
            eos_ids=(5,),
        )
        engine.load(0, publish_to(model, self.state(self.learner(roles.trainer)).trainable))
        engine.submit(
            [
                SampleRequest(
                    row,
                    ids,
                    GROUP_SIZE,
                    NoiseKey(0, "train", 0, row),
                    SamplingParams(max_tokens=LONGEST),
                )
                for row, ids in enumerate(self.prompts)
            ]
        )
        return drain(engine)

    def gap(self, scorer: Any, completions: dict[tuple[int, int], Any]) -> float:
        """The largest difference of a token's log-prob from the scorer's, which is of one
        device."""
        from shoal.trainer.batch import unpack

        batch = self.batch(self.groups(completions), 1)
        scored = np.asarray(scorer.score(self.state(scorer).trainable, batch.arrays))
        return max(
            float(np.abs(lp - completions[key].logprobs).max())
            for key, lp in unpack([batch], [scored]).items()
        )


def relative(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.linalg.norm(a.astype(np.float64) - b) / np.linalg.norm(b))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--devices", type=int, default=8)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    options = parser.parse_args()
    os.environ |= {
        "JAX_PLATFORMS": "cpu",
        "JAX_DEFAULT_MATMUL_PRECISION": "highest",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={options.devices}",
    }
    import jax.numpy as jnp

    from shoal.config.sections.devices import MeshSection
    from shoal.mesh import make_roles

    trial, alone = Trial(options.devices, options.dtype), make_roles(MeshSection())
    loss, gradient = trial.update(alone.trainer, jnp.float32)
    drawn, scorer = trial.sample(alone), trial.learner(alone.trainer, jnp.float32)
    own = trial.update(alone.trainer)
    print(
        f"{options.devices} devices, {options.dtype}; one device differs from itself in float32: "
        f"gradient "
        f"{relative(own[1], gradient):.1e}, log-probs {trial.gap(scorer, drawn):.1e}\n"
    )
    print("trainer (data, fsdp, tensor) | loss | gradient | twice the same bits")
    print("--- | --- | --- | ---")
    for data, fsdp, tensor in factors(options.devices):
        role = make_roles(MeshSection(data, fsdp, tensor)).trainer
        (a, first), (b, second) = trial.update(role), trial.update(role)
        same = a == b and (first == second).all()
        print(
            f"{data}, {fsdp}, {tensor} | {abs(a - loss) / abs(loss):.1e} | "
            f"{relative(first, gradient):.1e} | {'yes' if same else 'NO'}",
            flush=True,
        )
    print("\ntrainer; sampler (replicas x tensor) | log-probs | completions equal to one device's")
    print("--- | --- | ---")
    half = options.devices // 2
    for apart in (False, True):
        size = half if apart else options.devices
        for data, fsdp, tensor in factors(size):
            for sampler_tensor in divisors(size):
                more = {"trainer": str(half), "sampler": str(half)} if apart else {}
                roles = make_roles(
                    MeshSection(data, fsdp, tensor, sampler_tensor=sampler_tensor, **more)
                )
                played = trial.sample(roles)
                equal = sum(
                    played[key].token_ids.tolist() == drawn[key].token_ids.tolist() for key in drawn
                )
                print(
                    f"{data}, {fsdp}, {tensor}; {size // sampler_tensor} x {sampler_tensor}"
                    f"{' of its own' if apart else ''} | {trial.gap(scorer, played):.1e} | {equal} "
                    f"of {len(drawn)}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
