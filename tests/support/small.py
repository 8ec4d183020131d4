"""Small models, groups and batches that several tests share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shoal.algorithm.loss import Objective
from shoal.config.sections.algorithm import AlgorithmSection
from shoal.config.sections.devices import MeshSection
from shoal.config.sections.optimizer import OptimizerSection
from shoal.mesh import Program, Roles, make_roles
from shoal.model.architecture import Architecture, DeltaNet, Layer, RopeScaling, Rotary
from shoal.model.attention.reference import attend
from shoal.model.head import logits
from shoal.model.parameters import Parameters, ParamSpec, param_specs
from shoal.model.passes import PackedRows
from shoal.model.transformer import Model, forward
from shoal.records import Completion, Example, Group, Purpose, StopReason
from shoal.trainer.batch import BatchLayout, LearnerBatch, Shape, TokenTerms, fill_rows, pack
from shoal.trainer.loss import make_objective
from shoal.trainer.step import Learner

LLAMA3 = Architecture(
    vocab_size=96,
    hidden_size=32,
    intermediate_size=64,
    num_layers=4,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    rope_theta=10000.0,
    rope_scaling=RopeScaling("llama3", 8.0, 1.0, 4.0, 64),
)
LLAMA2 = replace(LLAMA3, rope_scaling=None, num_kv_heads=4)
QWEN3 = replace(LLAMA3, rope_scaling=None, qk_norm=True, tie_embeddings=True, model_type="qwen3")
DELTA_NET = Layer(mixer="delta_net")
HYBRID = replace(
    QWEN3,
    pattern=(DELTA_NET, DELTA_NET, DELTA_NET, Layer()),
    delta_net=DeltaNet(num_key_heads=2, num_value_heads=4, key_dim=8, value_dim=8),
    output_gate=True,
    norm="one_plus_weight",
    model_type="qwen3_5_text",
)
"""Three gated delta nets to one layer with attention, as Qwen3.5 has them."""
WINDOWED = replace(QWEN3, num_layers=5, pattern=(Layer(window=16), Layer(window=16), Layer()))
"""Two layers with a window to one without, as Gemma has them; the last layers are no whole
pattern."""
PLAINEST, FULLEST = LLAMA2, replace(LLAMA3, qkv_bias=True, qk_norm=True, tie_embeddings=True)
"""The families' parts: none of them, and all. (Each family as it is: test_parity.py and
test_huggingface.py.)"""
SINKS = replace(
    LLAMA3,
    num_layers=2,
    pattern=(Layer(window=9), Layer()),
    qkv_bias=True,
    output_bias=True,
    norm="weight_float32",
    sinks=True,
    rope_scaling=RopeScaling(
        "yarn", 8.0, original_max_position=64, attention_factor=1.2, truncate=False
    ),
)
"""gpt-oss's attention."""
_OF_GEMMA = Layer(window=9, rotary=Rotary(500.0))
GEMMA = replace(
    QWEN3,
    num_layers=4,
    pattern=(_OF_GEMMA, _OF_GEMMA, Layer()),
    rope_scaling=RopeScaling("linear", 4.0),
    activation="gelu_tanh",
    norm="one_plus_weight",
    post_norms=True,
    query_scale=12**-0.5,
    embedding_scale=QWEN3.hidden_size**0.5,
    logit_cap=6.0,
)
"""Gemma 3, the last of whose layers is the first of a pattern; and a bound of the logits."""
LOCAL = Layer(window=9)
WIDE = Layer(head_dim=16, rotary=Rotary(1e6, share=0.25, over_whole_head=True))
SHARED_KEYS = replace(
    QWEN3,
    num_layers=6,
    pattern=(
        *(LOCAL, WIDE) * 2,
        replace(LOCAL, keys_of=2, intermediate_size=128),
        replace(WIDE, keys_of=3, intermediate_size=128),
    ),
    norm="weight_float32",
    query_scale=0.3,
    v_norm=True,
    layer_embedding_size=4,
)
"""Gemma 4's small models: the last two layers read the keys of the two before; layers without a
window have wider heads; each layer has embeddings of its own."""
ON_POLICY = make_objective(AlgorithmSection())


def roles(
    data: int = 1, fsdp: int = 1, tensor: int = 1, context: int = 1, expert: int = 1
) -> Roles:
    return make_roles(MeshSection(data, fsdp, tensor, context, expert))


def num_compiled(program: Program) -> int:
    """Shapes that calls have compiled a program for."""
    return program._jitted._cache_size()


def random_parameters(a: Architecture, seed: int = 0, scale: float = 8.0) -> Parameters:
    """Weights large enough that attention and logits are far from flat; norms and biases away from
    1 and 0."""
    rng = np.random.default_rng(seed)

    def draw(d: ParamSpec) -> jax.Array:
        noise = rng.standard_normal(d.shape)
        value = noise * d.stddev * scale if d.init == "normal" else (d.init == "ones") + 0.3 * noise
        return jax.device_put(value.astype(np.float32), d.sharding(roles().trainer))

    return jax.tree.map(draw, param_specs(a))


def random_groups(
    a: Architecture,
    prompts: int,
    siblings: int,
    longest_prompt: int,
    longest: int,
    seed: int = 0,
    logprobs: bool = True,
) -> list[Group]:
    """Groups of ragged prompts and completions with random rewards; the first has both at full
    length."""
    rng = np.random.default_rng(seed)
    groups = []
    for row in range(prompts):
        size = longest_prompt if row == 0 else int(rng.integers(1, longest_prompt + 1))
        completions = []
        for index in range(siblings):
            count = longest if row == index == 0 else int(rng.integers(1, longest + 1))
            lp = -rng.exponential(1.0, count) if logprobs else np.zeros(count)
            completions.append(
                Completion(
                    row,
                    index,
                    rng.integers(0, a.vocab_size, count).astype(np.int32),
                    lp.astype(np.float32),
                    np.ones(count, bool),
                    np.zeros(count, np.int32),
                    StopReason.EOS,
                )
            )
        rewards = rng.integers(0, 3, siblings).astype(float)
        groups.append(
            Group(
                Purpose.TRAIN,
                0,
                0,
                Example(row, "q"),
                rng.integers(0, a.vocab_size, size),
                tuple(completions),
                ("",) * siblings,
                rewards,
                {"r": rewards},
                np.ones(siblings, bool),
            )
        )
    return groups


def whole(groups: list[Group], rows: int = 1) -> Shape:
    """The shape of one batch with all completions of these groups."""
    sizes = {}
    for n, group in enumerate(groups):
        sizes[n] = (len(group.prompt_ids), {i: len(c) for i, c in enumerate(group.completions)})
    longest = max(prompt + max(members.values()) for prompt, members in sizes.values())
    length = -(-longest // 16) * 16
    while len(fill_rows(sizes, length)) > rows:
        length += 16
    return Shape(rows, length)


def batches(
    groups: list[Group], shape: Shape | None = None, temperature: float = 1.0, shards: int = 1
) -> list[LearnerBatch]:
    """Packed with advantages and weights that differ everywhere."""
    size = groups[0].size
    shape = shape or whole(groups, shards)
    rng = np.random.default_rng(7)
    advantages = rng.standard_normal((len(groups), size))
    weights = rng.uniform(0.1, 1.0, (len(groups), size)) / 100
    result = []
    for m in pack(
        groups,
        range(len(groups)),
        TokenTerms(advantages, weights),
        BatchLayout([shape], temperature),
    ):
        result.append(m.arrays)
    return result


def learner(
    a: Architecture,
    objective: Objective = ON_POLICY,
    where: Roles | None = None,
    lr: float = 1e-3,
    **model,
) -> Learner:
    section = OptimizerSection(lr=lr, warmup_steps=0)
    return Learner(Model(a, (where or roles()).trainer, **model), objective, section, 10)


def relative(a, b) -> float:
    """|a - b| / |b| by norm."""
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    return float(np.linalg.norm(a - b) / max(np.linalg.norm(b), 1e-30))


class CausalRows:
    """A pass, and the attention of all its layers, in which each row attends to itself."""

    rotates = False

    def attention(self, layer: Layer) -> CausalRows:
        return self

    def recurrence(self) -> Any:
        raise AssertionError("no layer has a recurrence")

    def __call__(
        self, q: jax.Array, k: Any, v: Any, cache: Any, *, sinks: Any = None, rope: Any = None
    ) -> tuple[jax.Array, Any]:
        length = q.shape[1]
        mask = jnp.broadcast_to(
            jnp.tril(jnp.ones((length, length), bool)), (q.shape[0], length, length)
        )
        return attend(q, k, v, mask), cache


def shoal_logits(a: Architecture, parameters: Parameters, tokens: np.ndarray) -> np.ndarray:
    """float32[T, V] of tokens[T]."""
    return np.asarray(logits_program(a)(parameters, jnp.asarray(tokens, jnp.int32)[None]))


def logits_program(a: Architecture) -> Callable[[Parameters, jax.Array], jax.Array]:
    """A compiled function: parameters, ids[1, T] -> float32[T, V]."""
    model = Model(a, roles().trainer)

    @jax.jit
    def run(parameters: Parameters, ids: jax.Array) -> jax.Array:
        positions = jnp.arange(ids.shape[1], dtype=jnp.int32)[None]
        segment = jnp.ones(ids.shape, jnp.int32)
        before = jnp.maximum(positions - 1, 0)
        rows = PackedRows.of(model, segment, segment, positions, before)
        hidden, _ = forward(model, parameters, ids, positions, rows)
        return logits(model, parameters, hidden)[0]

    return run
