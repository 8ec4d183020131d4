"""Eight simulated devices: the same update and the same log-probs as one, with everything really
split."""

from __future__ import annotations

import contextlib
import io
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec
from small import (
    DELTA_NET,
    GEMMA,
    HYBRID,
    LOCAL,
    ON_POLICY,
    QWEN3,
    SHARED_KEYS,
    SINKS,
    WIDE,
    batches,
    learner,
    random_groups,
    relative,
    roles,
)
from tiny_runs import forget_programs

from shoal.config.sections.algorithm import AlgorithmSection
from shoal.config.sections.devices import MeshSection
from shoal.config.sections.optimizer import OptimizerSection
from shoal.config.train import Config
from shoal.job.job import Job
from shoal.mesh import Roles, devices, make_mesh, make_roles
from shoal.mesh.accelerators import ACCELERATORS
from shoal.mesh.devices import as_mesh
from shoal.model.architecture import (
    EXPERT_PRODUCTS,
    Adapter,
    Architecture,
    DeltaNet,
    Experts,
    Layer,
)
from shoal.model.layers import ffn_chunks
from shoal.model.parameters import Parameters, param_specs, shardings
from shoal.model.transformer import Model
from shoal.protocols import SampleRequest
from shoal.records import Completion, Example, Group, NoiseKey, Purpose, SamplingParams, ShoalError
from shoal.report.console import Console
from shoal.sampler import programs
from shoal.sampler.engine import Engine, drain
from shoal.trainer.batch import BatchLayout, Shape, TokenTerms, pack, unpack
from shoal.trainer.scorers import ModelScorer
from shoal.trainer.step import Learner, put_batch
from shoal.weights import sampler_copy
from shoal.weights.checksum import array_checksum, checksum
from shoal.weights.sampler_copy import publish_to

SMALL = replace(QWEN3, num_layers=2, tie_embeddings=False, qkv_bias=True)  # every kind of parameter
MESHES = {
    "fsdp8": (1, 8, 1),
    "fsdp4-tensor2": (1, 4, 2),
    "data2-fsdp2-tensor2": (2, 2, 2),
    "fsdp2-tensor2-context2": (1, 2, 2, 2),
    "data2-context4": (2, 1, 1, 4),
}
EMBED = ("fsdp", "expert", "context")
FEW_HEADS = (1, 2, 4)  # the model has 2 key/value heads
SHAPE = Shape(rows=16, length=48)  # more rows than 12 groups fill
# Without the layers' own embeddings, whose norm divides random numbers by others near 0; and with
# fewer layers: an element whose gradient is 1e-8 among thousands is moved by its rounding.
KEYS_OF_OTHERS = replace(
    SHARED_KEYS,
    layer_embedding_size=0,
    num_layers=4,
    pattern=(LOCAL, WIDE, replace(LOCAL, keys_of=0), replace(WIDE, keys_of=1)),
)


def weights(seed: int = 0, a: Architecture = SMALL) -> Parameters:
    rng = np.random.default_rng(seed)

    def draw(d) -> np.ndarray:
        spread, centre = (
            (d.stddev * 10, 0.0) if d.init == "normal" else (0.3, float(d.init == "ones"))
        )
        return (centre + spread * rng.standard_normal(d.shape)).astype(np.float32)

    return jax.tree.map(draw, param_specs(a))


@dataclass
class Updated:
    learner: Learner
    before: Any
    gradient: Any
    loss: float
    logprobs: np.ndarray
    sums: dict[str, tuple[float, float]]
    state: Any
    norm: float


def update(where: Roles, micro_batches: int = 1, a: Architecture = SMALL) -> Updated:
    """Twelve groups, in one micro-batch or two, and one update."""
    one = learner(a, where=where)
    state = before = one.init(jax.device_put(weights(a=a), shardings(a, where.trainer)))
    total, lps = None, []
    for batch in batches(
        random_groups(a, 12, 3, 16, 16), replace(SHAPE, rows=SHAPE.rows // micro_batches)
    ):
        total, lp = one.accumulate(total, state, batch)
        lps.append(np.asarray(lp))
    assert total is not None and len(lps) == micro_batches
    gradient, sums = jax.device_get((total.gradient, total.sums))
    state, applied = one.apply(state, total)
    loss, norm = float(applied.loss), float(applied.grad_norm)
    return Updated(one, before, gradient, loss, np.concatenate(lps), sums, state, norm)


@pytest.fixture(scope="module")
def alone() -> Updated:
    return update(roles())


MIXED = "fsdp2-tensor2-context2"
"""Splits in every way but one; of the others the slow tier has the proof."""


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(name, marks=[pytest.mark.slow] if name != MIXED else []) for name in MESHES
    ],
)
def where(request) -> Roles:
    return roles(*MESHES[request.param])


@pytest.fixture(scope="module")
def spread(where) -> Updated:
    two = where.trainer.row_shards == 4 and where.trainer.mesh.shape["data"] == 1
    return update(where, micro_batches=1 + two)


def parts(role, split: tuple[str, ...]) -> int:
    return int(np.prod([role.mesh.shape[axis] for axis in split]))


def share(array: jax.Array) -> float:
    """Part of the array's bytes that one device holds, the same on all."""
    sizes = {shard.data.nbytes for shard in array.addressable_shards}
    assert len(sizes) == 1 and len(array.sharding.device_set) == len(array.addressable_shards)
    return sizes.pop() / array.nbytes


# The update


@pytest.mark.slow
def test_with_fewer_key_value_heads_than_tensor_an_update_is_that_of_one_device(alone):
    """Key/value heads are repeated in groups; the products that make them are whole on each device
    of `tensor`."""
    assert SMALL.num_kv_heads < FEW_HEADS[2]
    spread = update(roles(*FEW_HEADS))
    assert share(spread.state.trainable.blocks.k.kernel) == 1 / 2
    assert share(spread.state.trainable.blocks.q.kernel) == 1 / 8
    test_one_update_is_that_of_one_device(alone, spread)


def test_one_update_is_that_of_one_device(alone, spread):
    assert abs(spread.loss - alone.loss) < 1e-5 and abs(alone.loss) > 1e-3
    assert abs(spread.norm - alone.norm) < 1e-5 * alone.norm
    assert np.abs(spread.logprobs - alone.logprobs).max() < 2e-5
    for (value, count), (other, same) in zip(
        spread.sums.values(), alone.sums.values(), strict=True
    ):
        assert np.isclose(value, other, rtol=1e-4, atol=1e-4).all() and count == same
    for ours, theirs in zip(
        jax.tree.leaves(spread.gradient), jax.tree.leaves(alone.gradient), strict=True
    ):
        assert np.linalg.norm(theirs) > 0 and relative(ours, theirs) < 1e-5
    moved = 0.0
    for ours, theirs, start in zip(
        *(jax.tree.leaves(s.trainable) for s in (spread.state, alone.state, alone.before)),
        strict=True,
    ):
        assert relative(ours, theirs) < 1e-5
        moved = max(moved, relative(theirs, start))
    assert moved > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("a", [SINKS, GEMMA, KEYS_OF_OTHERS], ids=["sinks", "gemma", "shared keys"])
@pytest.mark.parametrize("mesh", [FEW_HEADS, (2, 2, 2), (1, 2, 2, 2)])
def test_sinks_and_windows_are_split_too(mesh, a):
    """By heads, also where a key/value head has two devices; and in rows of two parts."""
    spread = update(roles(*mesh), a=a)
    if a.sinks:
        assert share(spread.state.trainable.blocks.blocks[0].sinks) == 1 / mesh[2]
    test_one_update_is_that_of_one_device(update(roles(), a=a), spread)


STATES = replace(
    HYBRID,
    num_layers=2,
    pattern=(DELTA_NET, Layer()),
    delta_net=DeltaNet(num_key_heads=4, num_value_heads=8, key_dim=16, value_dim=16),
)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [(2, 1, 4), (1, 2, 4), (2, 2, 2)])
def test_states_are_those_of_one_device(mesh):
    spread = update(roles(*mesh), a=STATES)
    test_one_update_is_that_of_one_device(update(roles(), a=STATES), spread)


@pytest.mark.slow
def test_a_device_of_tensor_computes_the_states_of_its_own_heads():
    """Read from the compiled update, of a model whose recurrence is most of its work. XLA found
    this split before `_by_head` asked for it."""
    a = replace(STATES, num_layers=1, pattern=(DELTA_NET,))
    flops = {}
    for tensor in (1, 4):
        one = learner(a, where=roles(1, 1, tensor))
        batch = put_batch(one.model, batches(random_groups(a, 2, 3, 16, 16))[0])
        compiled = one.programs["accumulate"].compile(
            one.programs["zero"].eval_shape(), one.shapes().trainable, None, batch
        )
        costs = compiled.cost_analysis()
        flops[tensor] = costs["flops"]
    assert flops[4] < 0.4 * flops[1]


MOE = replace(
    SMALL,
    num_layers=3,
    pattern=(Layer(feed_forward="experts"), Layer(), Layer(feed_forward="experts")),
    experts=Experts(4, 2, intermediate_size=24, shared_size=16),
)
MOE_ADAPTER = replace(MOE, adapter=Adapter(4, 8.0, ("q_proj", *EXPERT_PRODUCTS)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("a", "axes"),
    [
        (MOE, {"fsdp": 2, "tensor": 2, "expert": 2}),
        (MOE, {"data": 2, "expert": 4}),
        (MOE, {"expert": 2, "context": 2, "tensor": 2}),
        (MOE_ADAPTER, {"fsdp": 2, "tensor": 2, "expert": 2}),
        (replace(MOE, experts=replace(MOE.experts, bias=True)), {"fsdp": 4, "tensor": 2}),
    ],
    ids=lambda value: " ".join(f"{k}={v}" for k, v in value.items()) if type(value) is dict else "",
)
def test_experts_on_several_devices_are_updated_as_on_one(a, axes):
    where = roles(**axes)
    spread = update(where, a=a)
    down = spread.state.parameters.blocks.blocks[0].experts.down
    kernel = down if isinstance(down, jax.Array) else down.kernel
    assert kernel.sharding.spec[:2] == (None, "expert")
    shard = kernel.addressable_shards[0].data
    assert shard.shape[1] == 4 // axes.get("expert", 1)
    assert share(kernel) == 1 / (8 // axes.get("data", 1))
    test_one_update_is_that_of_one_device(update(roles(), a=a), spread)


@pytest.mark.slow
@pytest.mark.parametrize(
    "section",
    [
        {"fsdp": 4, "expert": 2, "sampler_tensor": 2},
        {"trainer": "4", "sampler": "4", "expert": 4, "sampler_tensor": 4},
    ],
    ids=lambda section: " ".join(f"{key}={value}" for key, value in section.items()),
)
def test_the_experts_of_a_replica_are_split_over_its_devices(section):
    """By their number; tokens and log-probs are those of one device, and so are the weights that
    the trainer publishes."""
    a = replace(MOE, num_heads=8)
    expected = sampled(engine_of_long_rows(MeshSection(), MOE), (65, 1))
    where = make_roles(MeshSection(**section))
    engine = engine_of_long_rows(MeshSection(**section), MOE)
    split = jax.device_put(weights(a=a), shardings(a, where.trainer))
    published = publish_to(engine.model, split)
    down = published.blocks.blocks[0].experts.down
    assert down.sharding.spec == PartitionSpec(None, "tensor", None, None)
    for ours, theirs in zip(jax.tree.leaves(published), jax.tree.leaves(split), strict=True):
        assert (np.asarray(ours) == np.asarray(theirs)).all()
    engine.load(1, published)
    ours = sampled(engine, (65, 1))
    for key, one in expected.items():
        assert one.token_ids.tolist() == ours[key].token_ids.tolist()
        assert np.abs(one.logprobs - ours[key].logprobs).max() < 2e-5
    for key, one in sampled(engine, (65,)).items():
        # without companions
        assert one.logprobs.tobytes() == ours[key].logprobs.tobytes()


def test_parameters_and_moments_are_split(spread):
    """Of each matrix, and of both its moments, a device holds 1 / (fsdp x context x tensor), before
    and after an update."""
    role = spread.learner.model.role
    whole = 1 / parts(role, (*EMBED, "tensor"))
    for state in (spread.before, spread.state):
        for leaf, d in zip(
            jax.tree.leaves(state.trainable), jax.tree.leaves(param_specs(SMALL)), strict=True
        ):
            assert leaf.sharding == d.sharding(role)
            assert share(leaf) == whole or not d.weight_decay
    leaves = jax.tree.leaves(spread.state.optimizer)
    matrices = [leaf for leaf in leaves if leaf.ndim == 3]
    assert len(matrices) == 2 * 7 and all(share(leaf) == whole for leaf in matrices)
    held = sum(leaf.addressable_shards[0].data.nbytes for leaf in leaves)
    assert held < 1.15 * whole * sum(leaf.nbytes for leaf in leaves)


@pytest.mark.slow
def test_the_compiled_update_holds_its_part_alone():
    """Read from the compiled program: shardings of what goes in and out, and the bytes a device
    takes for them."""
    one = learner(SMALL, where=roles(fsdp=4, tensor=2))
    role = one.model.role
    shapes = jax.tree.map(
        lambda d, s: jax.ShapeDtypeStruct(d.shape, jnp.float32, sharding=s),
        param_specs(SMALL),
        shardings(SMALL, role),
    )
    moments = jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
        jax.eval_shape(one.optimizer.init, shapes),
        one.layout.optimizer,
    )
    number = jax.ShapeDtypeStruct((), jnp.float32, sharding=role.replicated)
    count = jax.ShapeDtypeStruct((), jnp.int32, sharding=role.replicated)
    compiled = (
        one.programs["apply"]
        .lower(number, shapes, count, gradient=shapes, optimizer_state=moments)
        .compile()
    )
    (_, trainable, _), named = compiled.input_shardings
    for found in (trainable, named["gradient"], compiled.output_shardings[0].trainable):
        assert found.blocks.gate.spec == PartitionSpec(None, EMBED, "tensor")
        assert found.blocks.o.spec == PartitionSpec(None, "tensor", EMBED)
        assert found.embed_tokens.spec == PartitionSpec("tensor", EMBED)
    assert jax.tree.leaves(compiled.output_shardings[0].optimizer) == jax.tree.leaves(
        one.layout.optimizer
    )
    total = sum(x.size * 4 for tree in (shapes, shapes, moments) for x in jax.tree.leaves(tree))
    memory = compiled.memory_analysis()
    assert memory is not None and total / 8 <= memory.argument_size_in_bytes < 1.15 * total / 8


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [(2, 4, 1), (2, 2, 2), (2, 2, 1, 2)])
def test_no_array_is_made_whole_for_want_of_a_way_between_two_layouts(mesh, capfd):
    """So were the embeddings of all tokens, forward and backward, where both `data` and `fsdp`
    split rows."""
    forget_programs()  # what is compiled already would say nothing
    one = Learner(Model(SMALL, roles(*mesh).trainer), ON_POLICY, OptimizerSection(), 10)
    batch = put_batch(one.model, batches(random_groups(SMALL, 12, 3, 16, 16), SHAPE)[0])
    jax.config.update("jax_enable_compilation_cache", False)  # the compiler is to speak
    try:
        one.programs["accumulate"].compile(
            one.programs["zero"].eval_shape(), one.shapes().trainable, None, batch
        )
    finally:
        jax.config.update("jax_enable_compilation_cache", True)
    assert "full rematerialization" not in capfd.readouterr().err


# Sampling


@pytest.mark.slow
@pytest.mark.parametrize(
    "section",
    [
        {"data": 2, "fsdp": 2, "tensor": 2},
        {"fsdp": 4, "tensor": 2, "sampler_tensor": 1},
        {"trainer": "4", "sampler": "4", "fsdp": 2, "tensor": 2, "sampler_tensor": 4},
        {"trainer": "6", "sampler": "2", "fsdp": 2, "sampler_tensor": 2},
        {"fsdp": 2, "tensor": 4, "pieces": 4},
    ],
    ids=lambda section: " ".join(f"{key}={value}" for key, value in section.items()),
)
def test_sampled_log_probs_are_those_of_one_device(section, alone, monkeypatch):
    """On one mesh, on another view of its devices, on others; with fewer key/value heads than
    `tensor` too; with siblings that share a row, or have one each; with layers apart and
    feed-forward matrices in pieces."""
    monkeypatch.setattr(Model, "ffn_chunks", section.get("pieces", 0))
    section = {key: value for key, value in section.items() if key != "pieces"}
    where = make_roles(MeshSection(**section))
    siblings = 1 if section.get("data") or "sampler" in section else 2
    split = jax.device_put(weights(), shardings(SMALL, where.trainer))
    model = Model(SMALL, where.sampler)
    parameters = publish_to(model, split)
    engine = Engine(
        model,
        slots=16,
        group_size=2,
        siblings_per_row=siblings,
        max_prompt_tokens=16,
        max_completion_tokens=16,
        eos_ids=(5,),
    )
    assert engine.num_groups == 8 and engine.num_groups % where.sampler.row_shards == 0
    engine.load(0, parameters)
    rng = np.random.default_rng(0)
    prompts = []
    for n in (16, 1, 5, 9, 3, 7, 12, 2, 4):
        prompts.append(rng.integers(0, SMALL.vocab_size, n).astype(np.int32))
    engine.submit(
        [
            SampleRequest(row, ids, 2, NoiseKey(0, "train", 0, row), SamplingParams(max_tokens=16))
            for row, ids in enumerate(prompts)
        ]
    )
    played = drain(engine)
    assert len(played) == 18
    cache = engine._state.caches[0]  # type: ignore[union-attr]
    tensor = where.sampler.mesh.shape["tensor"]
    for array in cache.of_slots:
        assert array.shape[-3] == max(SMALL.num_kv_heads, tensor)
        assert share(array) == 1 / where.sampler.row_shards / tensor
    groups = []
    for row, ids in enumerate(prompts):
        groups.append(
            Group(
                Purpose.TRAIN,
                0,
                0,
                Example(row, ""),
                ids,
                tuple(played[row, i] for i in range(2)),
                ("", ""),
                np.zeros(2),
                {},
                np.ones(2, bool),
            )
        )
    one = alone.learner
    for batch in pack(
        groups, range(9), TokenTerms(np.zeros((9, 2)), np.zeros((9, 2))), BatchLayout([SHAPE], 1.0)
    ):
        for (g, i), lp in unpack(
            [batch], [np.asarray(one.score(alone.before.trainable, batch.arrays))]
        ).items():
            assert np.abs(lp - groups[g].completions[i].logprobs).max() < 2e-5


def engine_of_long_rows(section: MeshSection, a: Architecture = SMALL) -> Engine:
    a = replace(a, num_heads=8)
    model = Model(a, make_roles(section).sampler)
    one = Engine(
        model,
        slots=8,
        group_size=2,
        siblings_per_row=1,
        max_prompt_tokens=300,
        max_completion_tokens=140,
        eos_ids=(5,),
    )
    one.load(0, publish_to(model, jax.device_put(weights(a=a), shardings(a, model.role))))
    return one


def sampled(engine: Engine, prompts: tuple[int, ...]) -> dict[tuple[int, int], Completion]:
    """Two completions for each prompt of so many tokens, by (tokens, index)."""
    engine.submit(
        [
            SampleRequest(
                size,
                np.random.default_rng(size).integers(0, SMALL.vocab_size, size).astype(np.int32),
                2,
                NoiseKey(0, "train", 0, size),
                SamplingParams(max_tokens=140),
            )
            for size in prompts
        ]
    )
    return drain(engine)


@pytest.fixture(scope="module")
def long_rows() -> dict[tuple[int, int], Completion]:
    """Of one device."""
    return sampled(engine_of_long_rows(MeshSection()), (300, 1, 65))


@pytest.mark.slow
@pytest.mark.parametrize(("tensor", "piece"), [(4, 1024), (8, 64)])
def test_with_keys_split_by_position_tokens_are_those_of_one_device(
    tensor, piece, long_rows, monkeypatch
):
    """A key/value head is on 2 devices, then on 4. Their parts of the longest prompt and of
    completions are longer than a block, and some hold no key of the shortest; second siblings join;
    in the second case prompts enter in pieces, and weights are given in pieces too."""
    monkeypatch.setattr(programs, "PREFILL_CHUNK", piece)
    monkeypatch.setattr(Model, "ffn_chunks", 2 * (piece < 1024))
    engine = engine_of_long_rows(MeshSection(fsdp=8, sampler_tensor=tensor))
    ours = sampled(engine, (300, 1, 65))
    cache = engine._state.caches[0]  # type: ignore[union-attr]
    assert cache.prefix_k.shape[1:3] == (tensor, 192 if tensor == 4 else 128)
    assert share(cache.own_k) == share(cache.prefix_k) == 1 / 8
    assert max(map(len, ours.values())) == 140 and ours.keys() == long_rows.keys()
    for key, one in long_rows.items():
        assert one.token_ids.tolist() == ours[key].token_ids.tolist()
        assert np.abs(one.logprobs - ours[key].logprobs).max() < 2e-5
    for key, one in sampled(engine, (65,)).items():
        # without companions, where others left their keys
        assert one.logprobs.tobytes() == ours[key].logprobs.tobytes()


@pytest.mark.slow
@pytest.mark.parametrize("a", [SINKS, GEMMA, KEYS_OF_OTHERS], ids=["sinks", "gemma", "shared keys"])
@pytest.mark.parametrize(("tensor", "piece"), [(2, 1024), (4, 1024), (8, 64)])
def test_sinks_and_windows_on_several_devices_give_the_tokens_of_one(tensor, piece, a, monkeypatch):
    """Windows are rings if each device has whole key/value heads (tensor=2), else all keys are
    kept, in parts by position."""
    monkeypatch.setattr(programs, "PREFILL_CHUNK", piece)
    expected = sampled(engine_of_long_rows(MeshSection(), a), (300, 1, 65))
    ours = sampled(engine_of_long_rows(MeshSection(fsdp=8, sampler_tensor=tensor), a), (300, 1, 65))
    assert max(map(len, ours.values())) > 120 and ours.keys() == expected.keys()
    for key, one in expected.items():
        assert one.token_ids.tolist() == ours[key].token_ids.tolist()
        assert np.abs(one.logprobs - ours[key].logprobs).max() < 2e-5


@pytest.mark.slow
def test_a_reference_on_other_devices_scores_split_rows_too(alone):
    where = make_roles(MeshSection(trainer="4", sampler="4", data=2, context=2))
    assert where.reference.mesh.shape == {
        "data": 1,
        "fsdp": 2,
        "expert": 1,
        "context": 2,
        "tensor": 1,
    }
    model = Model(SMALL, where.reference)
    one = ModelScorer(model, jax.device_put(weights(), shardings(SMALL, model.role)))
    (batch,) = batches(random_groups(SMALL, 12, 3, 16, 16), SHAPE)
    # rows that its devices do not divide
    odd = jax.tree.map(lambda x: x[:15] if x.ndim else x, batch)
    assert np.abs(np.asarray(one.score(odd)) - alone.logprobs[:15]).max() < 2e-5


def test_publishing_lays_whole_matrices_out_for_sampling(where, monkeypatch):
    split = jax.device_put(weights(), shardings(SMALL, where.trainer))
    model = Model(SMALL, where.sampler)
    published = publish_to(model, split)
    tensor = where.sampler.mesh.shape["tensor"]
    assert share(published.blocks.gate) == share(published.embed_tokens) == 1 / tensor
    assert int(checksum(published)) == int(checksum(split)) == int(checksum(weights()))
    for ours, theirs in zip(jax.tree.leaves(published), jax.tree.leaves(weights()), strict=True):
        assert (np.asarray(ours) == theirs).all()
    make = sampler_copy.publication_program

    def loses_a_tensor(*which):
        def convert(array, number):
            copy, expected = make(*which)(array, number)
            return (copy * 0 if array.ndim == 1 else copy), expected

        return convert

    monkeypatch.setattr(sampler_copy, "publication_program", loses_a_tensor)
    with pytest.raises(
        RuntimeError, match=r"weights differ from the trainer's \(checksums 0x.*resume the run"
    ):
        publish_to(model, split)


def test_a_reference_is_the_same_in_a_new_run_and_in_a_resumed_one(monkeypatch):
    """Also where the sampler reads layers one by one: a resumed run compares the reference's
    checksum."""
    monkeypatch.setattr(Model, "ffn_chunks", 1)
    where, first = roles(), jax.device_put(weights())
    model, config = Model(SMALL, where.trainer), Config(algorithm=AlgorithmSection(kl_coef=0.1))

    def read(role, dtype):
        return first

    spec: Any = SimpleNamespace(read=read)
    assert isinstance(publish_to(model, first).blocks, tuple)
    with Job(config, Console(io.StringIO()), model_source=spec) as job:
        job.opened |= {"config": config, "model": model, "roles": where}
        new, resumed = (job.open_reference(given) for given in (first, None))
    assert new and resumed and int(checksum(new.parameters)) == int(checksum(resumed.parameters))


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [(1, 1, 1), (2, 2, 2)])
def test_what_is_published_after_an_update_has_another_checksum(mesh):
    """The old weights, published again, would go unnoticed by everything else."""
    where = roles(*mesh)
    model, one = Model(SMALL, where.sampler), learner(SMALL, where=where)
    state = one.init(jax.device_put(weights(), shardings(SMALL, where.trainer)))
    (batch,) = batches(random_groups(SMALL, 12, 3, 16, 16), SHAPE)
    sums = [int(checksum(publish_to(model, state.trainable)))]
    for scale in (1.0, 0.0):
        total, _ = one.accumulate(
            None, state, replace(batch, weight=batch.weight * np.float32(scale))
        )
        state, applied = one.apply(state, total)
        assert (float(applied.grad_norm) > 0) == (scale > 0)
        sums.append(int(checksum(publish_to(model, state.trainable))))
        assert sums[-1] == int(checksum(state.trainable))
    assert sums[1] != sums[0]


@pytest.mark.parametrize(
    ("changes", "dtype", "kind", "tensor", "pieces"),
    [
        ({}, "bfloat16", "TPU v6 lite", 1, 8),
        ({}, "bfloat16", "TPU v6 lite", 4, 0),
        ({}, "float32", "TPU v6 lite", 1, 0),
        ({"adapter": Adapter(4, 8.0, ("q_proj",))}, "bfloat16", "TPU v5p", 1, 0),
        ({}, "bfloat16", "cpu", 1, 0),
        ({"quantised": "int8"}, "bfloat16", "TPU v5p", 1, 1),
        ({}, "bfloat16", "NVIDIA H200", 1, 1),
    ],
)
def test_a_samplers_matrices_are_apart_where_that_is_faster(changes, dtype, kind, tensor, pieces):
    role: Any = SimpleNamespace(
        device_kind=kind, platform={"T": "tpu", "N": "gpu"}.get(kind[0], "cpu"), tensor=tensor
    )
    a = replace(SMALL, hidden_size=4096, intermediate_size=14336, **changes)
    assert ffn_chunks(a, role, jnp.dtype(dtype)) == pieces


@pytest.mark.slow
def test_on_one_device_publishing_copies_nothing():
    parameters = jax.device_put(weights())
    assert publish_to(Model(SMALL, roles().sampler), parameters) is parameters
    half = publish_to(Model(SMALL, roles().sampler, jnp.bfloat16), parameters)
    assert {leaf.dtype for leaf in jax.tree.leaves(half)} == {jnp.dtype(jnp.bfloat16)}


@pytest.mark.slow
def test_publishing_to_the_same_devices_in_another_order():
    """As where a replica is to lie within a host, and the trainer's order is a torus's: the parts
    change places."""
    where = roles(data=2, fsdp=2, tensor=2)
    mesh = as_mesh(
        np.asarray(jax.devices())[[0, 5, 2, 7, 4, 1, 6, 3]].reshape(4, 2), ("data", "tensor")
    )
    model = Model(SMALL, replace(where.sampler, mesh=mesh))
    for get in (lambda tree: tree.blocks.gate, lambda tree: tree.final_norm):
        leaf = jax.device_put(get(weights()), get(shardings(SMALL, where.trainer)))
        place = get(shardings(SMALL, model.role))
        published, _ = sampler_copy._publish(model, leaf, place, leaf.dtype, np.uint32(0))
        assert published.sharding == place and (np.asarray(published) == get(weights())).all()
        for shard in published.addressable_shards:
            assert (shard.data == get(weights())[shard.index]).all()


# The checksum


def flipped(tree: dict, name: str, place: int, bit: int) -> dict:
    changed = {k: np.array(v) for k, v in tree.items()}
    changed[name].reshape(-1).view(np.uint32)[place] ^= np.uint32(1 << bit)
    return changed


def test_checksum_sees_every_bit_and_every_exchange():
    tree = {
        "a": np.random.default_rng(0).normal(size=(6, 8)).astype(np.float32),
        "b": np.zeros((6, 8), np.float32),
    }
    whole = int(checksum(tree))
    assert whole == int(checksum({k: v.copy() for k, v in tree.items()}))
    seen = {whole}
    for name in "ab":
        for place in (0, 1, 2, 7, 47):
            for bit in (0, 1, 15, 22, 30, 31):  # 31 is the sign
                seen.add(int(checksum(flipped(tree, name, place, bit))))
    assert len(seen) == 1 + 2 * 5 * 6
    swapped, negated = tree["a"].copy(), tree["a"].copy()
    swapped[0, [0, 1]] = swapped[0, [1, 0]]
    negated[:, ::2] *= -1
    for other in (swapped, tree["a"][::-1], tree["a"][:, ::-1], negated, -tree["a"]):
        assert int(checksum({**tree, "a": other})) != whole
    assert int(checksum({"a": tree["b"], "b": tree["a"]})) != whole
    # differ in their sign alone: exchanging them shows
    signs = {k: np.ones_like(v) for k, v in tree.items()}
    signs["a"][0, 1] = -1
    moved = {**signs, "a": np.ones((6, 8), np.float32)}
    moved["a"][0, 3] = -1
    assert int(checksum(signs)) != int(checksum(moved))


def test_layers_beyond_what_a_position_can_count_differ(monkeypatch):
    """Of 80 layers of 2^26 elements, layers 0 and 64 have the same 32 bits of position."""
    a = np.random.default_rng(0).normal(size=(4, 3, 5)).astype(np.float32)
    number = jnp.uint32(0)
    before = int(array_checksum(a, number))
    assert before == int(checksum(a))
    monkeypatch.setattr("shoal.weights.checksum.POSITIONS", 30)
    assert (
        len({before, int(array_checksum(a, number)), int(array_checksum(a[[2, 1, 0, 3]], number))})
        == 3
    )


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("shape", [(), (5,), (3, 4, 6), (4, 3, 16)])
def test_checksums_are_those_of_their_definition(shape, dtype):
    """However neighbours are added, and from any layout: by integers of any size, an element at a
    time."""

    def mix(x: int) -> int:
        x = (x ^ x >> 16) * 0x85EBCA6B % 2**32
        x = (x ^ x >> 13) * 0xC2B2AE35 % 2**32
        return x ^ x >> 16

    array = jnp.asarray(np.random.default_rng(0).normal(size=shape), dtype)
    bits = np.asarray(array).reshape(-1).view(np.uint32 if dtype == jnp.float32 else np.uint16)
    expected = (
        sum(mix(int(one) ^ mix((place + mix(8)) % 2**32)) for place, one in enumerate(bits)) % 2**32
    )
    split = jax.device_put(
        array,
        jax.sharding.NamedSharding(
            roles(tensor=2).trainer.mesh,
            jax.sharding.PartitionSpec(
                *(None,) * (len(shape) - 1), *("tensor",) if shape and shape[-1] % 2 == 0 else ()
            ),
        ),
    )
    assert (
        int(array_checksum(array, jnp.uint32(7)))
        == int(jax.jit(array_checksum)(split, np.uint32(7)))
        == expected
    )
    assert int(checksum({"a": array})) != int(checksum({"a": -array}))


# Meshes


def test_axes_and_all_that_remain():
    def shape(*section: int) -> dict[str, int]:
        return dict(make_mesh(MeshSection(*section), jax.devices()).shape)

    names = ("data", "fsdp", "expert", "context", "tensor")
    assert shape(1, -1, 1) == dict(zip(names, (1, 8, 1, 1, 1), strict=True))
    assert shape(1, -1, 2, 2) == dict(zip(names, (1, 2, 1, 2, 2), strict=True))
    assert shape(1, -1, 2, 1, 2) == dict(zip(names, (1, 2, 2, 1, 2), strict=True))
    assert shape(2, 2, 2) == dict(zip(names, (2, 2, 1, 1, 2), strict=True))
    assert shape(1, 2, 1)["fsdp"] == 2  # the first two of the eight


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ((1, 3, 1), "mesh.fsdp=3 does not divide 8 devices; use 1, 2, 4 or 8"),
        ((1, 16, 1), "mesh.fsdp=16 does not divide 8 devices; use 1, 2, 4 or 8"),
        (
            (2, 4, 2),
            "mesh.fsdp=4 does not divide the 2 of 8 devices that the other axes leave; use 1 or 2",
        ),
        ((3, -1, 4), "mesh.data=3 does not divide 8 devices; use 1, 2, 4 or 8"),
        ((1, 1, 1, 3), "mesh.context=3 does not divide 8 devices; use 1, 2, 4 or 8"),
        (
            (8, 1, 2),
            "mesh.tensor=2 does not divide the 1 of 8 devices that the other axes leave; use 1",
        ),
    ],
)
def test_sizes_that_do_not_divide_the_devices_are_refused(section, message):
    with pytest.raises(ShoalError, match=message):
        make_mesh(MeshSection(*section), jax.devices())


@pytest.mark.parametrize(
    ("mesh", "changes", "message"),
    [
        (
            (1, 1, 8),
            {},
            "mesh.tensor=8 does not divide the model's num_attention_heads=4; use 1, 2 or 4",
        ),
        (
            (1, 1, 4),
            {"intermediate_size": 90},
            "mesh.tensor=4 does not divide the model's intermediate_size=90; use 1 or 2",
        ),
        (
            (1, 8, 1),
            {"hidden_size": 36},
            "mesh.fsdp=8 does not divide the model's hidden_size=36; use 1, 2 or 4",
        ),
        (
            (1, 2, 1, 4),
            {"hidden_size": 36},
            "mesh.fsdp=2 x mesh.context=4 does not divide the model's hidden_size=36; use 1, 2 or "
            "4",
        ),
        (
            (1, 1, 4),
            {"num_heads": 12, "num_kv_heads": 6},
            "mesh.tensor=4 neither divides the model's num_key_value_heads=6 nor is a multiple of "
            "it; use 1 or 2",
        ),
        # of other kinds of layers
        (
            (1, 1, 4),
            {"pattern": (Layer(), Layer(num_kv_heads=3))},
            "mesh.tensor=4 neither divides the model's num_key_value_heads=3 nor is a multiple of "
            "it; use 1$",
        ),
        (
            (1, 1, 4),
            {"pattern": (Layer(), Layer(intermediate_size=90))},
            "mesh.tensor=4 does not divide the model's intermediate_size=90; use 1 or 2",
        ),
        (
            (1, 1, 4),
            {"pattern": (DELTA_NET, Layer()), "delta_net": DeltaNet(2, 4, 8, 8)},
            "mesh.tensor=4 does not divide the model's linear_num_key_heads=2; use 1 or 2",
        ),
        (
            (1, 1, 4),
            {"pattern": (DELTA_NET, Layer()), "delta_net": DeltaNet(4, 6, 8, 8)},
            "mesh.tensor=4 does not divide the model's linear_num_value_heads=6; use 1 or 2",
        ),
        (
            (1, 1, 1, 2),
            {"pattern": (DELTA_NET, Layer()), "delta_net": DeltaNet(2, 4, 8, 8)},
            "mesh.context=2: a row cannot be split over devices in a model with linear attention",
        ),
        (
            (1, 1, 1, 1, 4),
            {"pattern": (Layer(feed_forward="experts"),), "experts": Experts(6, 2, 24)},
            "mesh.expert=4 does not divide the model's num_experts=6; use 1 or 2",
        ),
        (
            (1, 2, 1, 1, 4),
            {"hidden_size": 36},
            "mesh.fsdp=2 x mesh.expert=4 does not divide the model's hidden_size=36; use 1, 2 or 4",
        ),
    ],
)
def test_sizes_that_do_not_divide_the_model_are_refused(mesh, changes, message):
    role = roles(*mesh).trainer
    with pytest.raises(ShoalError, match=message):
        Model(replace(SMALL, **changes), role)
    with pytest.raises(ShoalError, match=message.replace("mesh.", "mesh.reference: ", 1)):
        Model(replace(SMALL, **changes), replace(role, name="reference"))


def test_a_vocabulary_that_does_not_divide_stays_whole():
    a = replace(SMALL, vocab_size=97)
    role = Model(a, roles(tensor=2).trainer).role
    assert shardings(a, role).embed_tokens.spec == PartitionSpec(None, EMBED)
    assert shardings(a, role).lm_head.spec == PartitionSpec(EMBED, None)


def test_roles_name_dimensions():
    r = roles(data=2, fsdp=2, tensor=2)
    axes = ("layers", "embed", "heads")
    assert r.trainer.spec(axes, (4, 32, 16)) == PartitionSpec(None, EMBED, "tensor")
    assert r.sampler.spec(axes, (4, 32, 16)) == PartitionSpec(None, None, "tensor")
    with pytest.raises(
        ValueError, match=r"embed of \(4, 33, 16\) has 33 elements, which 2 devices do not divide"
    ):
        r.trainer.spec(axes, (4, 33, 16))
    assert r.trainer.row_shards == 4 and r.reference.rules == r.trainer.rules
    placed = r.trainer.put_rows({"x": np.arange(24.0, dtype=np.float32).reshape(8, 3)})["x"]
    assert placed.sharding.spec == PartitionSpec(("data", "fsdp", "expert"), None)
    assert share(placed) == 1 / 4
    assert (np.asarray(placed) == np.arange(24).reshape(8, 3)).all()


@pytest.mark.parametrize(
    ("file", "content", "possible"),
    [
        ("sys/bus/pci/devices/0/vendor", "0x8086\n", False),
        ("sys/bus/pci/devices/0/vendor", "0x1ae0\n", True),
        ("sys/../dev/accel0", "", True),
        ("sys/../dev/vfio/0", "", True),
        ("sys/../dev/vfio/vfio", "", False),
        ("sys/../dev/nvidia0", "", True),
        ("not/linux", "", True),
    ],
)
def test_jax_tries_accelerators_only_where_there_may_be_some(
    file, content, possible, tmp_path, monkeypatch
):
    """Asked in vain, the compilers that `shoal plan` needs print a page of errors at each start."""

    def missing(name):
        raise OSError(name)

    monkeypatch.setattr(devices.ctypes, "CDLL", missing)
    (tmp_path / file.split("/")[0]).mkdir()
    path = (tmp_path / file).resolve()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content)
    assert devices.accelerators_possible(tmp_path) == possible

    def CDLL(name):
        return name

    monkeypatch.setattr(devices.ctypes, "CDLL", CDLL)
    assert devices.accelerators_possible(tmp_path)  # with a driver


def test_jax_tries_plug_ins_that_no_entry_point_names(tmp_path, monkeypatch):
    (tmp_path / "sys").mkdir()

    def entry_points(group):
        return ()

    monkeypatch.setattr(devices, "entry_points", entry_points)
    monkeypatch.setattr(devices, "find_spec", lambda name: None)

    def CDLL(name):
        return (tmp_path / "missing").read_text()

    monkeypatch.setattr(devices.ctypes, "CDLL", CDLL)
    assert not devices.accelerators_possible(tmp_path)

    def find_spec(name):
        return SimpleNamespace(submodule_search_locations=[str(tmp_path / "plugins")])

    monkeypatch.setattr(
        devices,
        "find_spec",
        find_spec,
    )
    (tmp_path / "plugins" / "xla_cuda13").mkdir(parents=True)
    (tmp_path / "plugins" / "xla_cuda13" / "__init__.py").touch()
    assert not devices.accelerators_possible(tmp_path)
    (tmp_path / "plugins" / "other.py").touch()
    assert devices.accelerators_possible(tmp_path)
    (tmp_path / "plugins" / "other.py").unlink()
    monkeypatch.setenv("PJRT_NAMES_AND_LIBRARY_PATHS", "other:/lib/other.so")
    assert devices.accelerators_possible(tmp_path)


@pytest.mark.parametrize(
    ("platforms", "file", "lacks"),
    [
        ("cuda", "", "NVIDIA GPU"),
        ("cuda,cpu", "dev/accel0", "NVIDIA GPU"),
        ("cuda", "dev/nvidia0", ""),
        ("tpu", "dev/nvidia0", "TPU"),
        ("tpu", "dev/vfio/0", ""),
        ("cpu", "", ""),
        ("kpu", "", ""),
        (None, "", ""),
    ],
)
def test_a_platform_that_this_machine_lacks_is_refused_before_jax_looks(
    platforms, file, lacks, tmp_path, monkeypatch
):
    def CDLL(name):
        return (tmp_path / "missing").read_text()

    monkeypatch.setattr(devices.ctypes, "CDLL", CDLL)
    monkeypatch.setattr(
        devices.jax,
        "config",
        SimpleNamespace(values={"jax_platforms": platforms, "jax_backend_target": ""}),
    )
    (tmp_path / "sys").mkdir()
    path = tmp_path / (file or "other")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    with (
        pytest.raises(
            ShoalError, match=f"finds no such devices .this machine has no {lacks}.; unset it"
        )
        if lacks
        else contextlib.nullcontext()
    ):
        devices.check_platforms(root=tmp_path)


def test_a_machine_without_accelerators_is_asked_for_its_cpu_alone(monkeypatch):
    jax.config.update("jax_platforms", None)
    try:
        monkeypatch.setattr(devices, "accelerators_possible", lambda: True)
        assert devices.available_devices() and jax.config.values["jax_platforms"] is None

        def accelerators_possible():
            return False

        monkeypatch.setattr(devices, "accelerators_possible", accelerators_possible)
        assert devices.available_devices() and jax.config.values["jax_platforms"] == "cpu"
    finally:
        jax.config.update("jax_platforms", "cpu")


def test_a_run_takes_the_share_of_a_gpu_that_its_plan_counts_on(monkeypatch):
    name, kind = "XLA_PYTHON_CLIENT_MEM_FRACTION", ACCELERATORS["h200"]
    monkeypatch.delenv(name, raising=False)
    devices.available_devices()
    assert (
        kind.usable_bytes == int(float(devices.os.environ[name]) * kind.hbm_bytes) < kind.hbm_bytes
    )
    monkeypatch.setenv(name, "0.5")
    devices.available_devices()
    assert devices.os.environ[name] == "0.5"
    monkeypatch.delenv(pool := "XLA_PYTHON_CLIENT_ALLOCATOR", raising=False)
    devices.available_devices()
    assert pool not in devices.os.environ
    monkeypatch.setenv(pool, "")
    monkeypatch.delenv(pool)
    devices.available_devices(shared=True)
    assert devices.os.environ[pool] == "platform"
    assert ACCELERATORS["v5p"].usable_bytes == ACCELERATORS["v5p"].hbm_bytes
