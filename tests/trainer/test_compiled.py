"""The compiled update: how often weights and gradients move between devices, in which type, and how
many are held."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiled import SMALL, Collective, arrays, collectives, compiled_elsewhere, compiled_update
from small import ON_POLICY, QWEN3, batches, random_groups, random_parameters, relative, roles

from shoal.config.sections.optimizer import OptimizerSection
from shoal.mesh import Roles
from shoal.model.parameters import param_specs, shardings
from shoal.model.transformer import Model
from shoal.trainer.step import Learner, TrainState

pytestmark = pytest.mark.system

HEAD = SMALL.vocab_size * SMALL.hidden_size
WEIGHTS = sum(math.prod(spec.shape) for spec in jax.tree.leaves(param_specs(SMALL)))
SIZES = {"bf16": 2, "f32": 4}


def of_weights(text: str) -> list[Collective]:
    """Collectives of matrices: of the head, and of layers (the smallest matrix has hidden_size^2
    elements)."""
    result = []
    for one in collectives(text):
        if one.elements >= SMALL.hidden_size**2:
            result.append(one)
    return result


def check_movement(text: str, dtype: str, reduce_dtype: str, is_sliced: bool = False) -> None:
    found = of_weights(text)
    gathered = [one for one in found if one.kind == "all-gather"]
    summed = [one for one in found if one.kind != "all-gather"]
    assert {one.dtype for one in gathered} == {dtype} and {one.dtype for one in summed} == {
        reduce_dtype
    }
    assert (
        0.99 * (WEIGHTS - HEAD) < sum(one.elements * one.times for one in summed) <= 1.05 * WEIGHTS
    )
    assert sum(one.elements * one.times for one in gathered) <= 2.3 * WEIGHTS
    head = [one for one in found if one.elements >= HEAD]
    assert {one.times for one in head} == (set() if is_sliced else {1})  # in no loop over tokens
    assert sum(one.elements * SIZES[one.dtype] for one in head) <= 3 * HEAD * SIZES[dtype]
    assert (
        max(
            elements
            for line in text.splitlines()
            if " = " in line and " parameter(" not in line
            for _, elements in arrays(line.split(" = ")[1].split("(")[0])
        )
        <= HEAD
    )


@pytest.mark.parametrize(("tied", "tensor"), [(False, 1), (True, 2)])
def test_weights_are_gathered_twice_the_head_once_and_gradients_summed_once(tied, tensor):
    text = compiled_update(
        jax.devices()[: 4 * tensor], "float32", tensor=tensor, tie_embeddings=tied
    ).as_text()
    if tensor == 1:
        check_movement(text, "f32", "f32")
    vocabulary = []
    for one in collectives(text):
        if one.elements >= HEAD // tensor:
            vocabulary.append(one)
    assert vocabulary and {(one.elements, one.times) for one in vocabulary} == {(HEAD // tensor, 1)}


@pytest.mark.parametrize(
    ("topology", "reduce_dtypes"),
    [("h200:4", ("float32", "bfloat16")), ("v5p:2x2x2", ("float32",))],
)
def test_accelerators_gather_bfloat16_and_sum_gradients_in_reduce_dtype(topology, reduce_dtypes):
    texts = compiled_elsewhere(topology, "update", "bfloat16", *reduce_dtypes).split("\f")
    for text, reduce_dtype in zip(texts, reduce_dtypes, strict=False):
        check_movement(
            text,
            "bf16",
            {"float32": "f32", "bfloat16": "bf16"}[reduce_dtype],
            is_sliced="v5p" in topology,
        )
        # On a torus of three dimensions XLA's defaults sum each gradient whole on each chip.
        assert not [one for one in of_weights(text) if one.kind == "all-reduce"]


def test_the_kernels_for_gpus_fit_the_one_with_least_shared_memory():
    """An L4 has 99 KiB, of which heads of 128 take 96: with one more array there it would fall back
    on `blocked`."""
    text = compiled_elsewhere("l4:1", "kernels", 128)
    for name in ("forward", "query", "key"):
        assert f"{name}_kernel" in text


@pytest.mark.parametrize("topology", ["l4:1", "h200:1"])
def test_experts_on_gpus_are_multiplied_by_kernels(topology):
    """Which fit the least shared memory, that of an L4. No array has all 8,192 pairs of a token and
    an expert for each expert, and kernels of 8 bits are nowhere widened as a whole."""
    trained, frozen, _ = compiled_elsewhere(topology, "experts").split("\f")
    for text, of_kernels in ((trained, 3), (frozen, 0)):
        names = re.findall(r'custom-call\(.*op_name="[^"]*\b(grouped_\w+)', text)
        # Gate and up, and the gradients of all three's rows: nothing reads the product of down.
        assert names.count("grouped_product") == 5
        assert names.count("grouped_outer_product") == of_kernels
        largest = max(elements for _, elements in arrays(text))
        assert largest <= 8192 * 512
    assert not re.search(r"(?:bf16|f32)\[16,(?:512,256|256,512)\]", frozen)


def test_between_products_and_attention_a_tpu_moves_nothing():
    """Three kernels, one of them again, and no array in which heads and tokens are dimensions of
    their own: on a TPU that is another order in memory, and a product that makes it takes twice as
    long."""
    text = compiled_elsewhere("v6e:2x2", "update by kernels")
    kernels = re.findall(r'custom-call\(.*op_name="[^"]*/(\w+)_kernel/', text)
    assert sorted(kernels) == ["forward", "forward", "key", "query"]
    assert not re.findall(r"bf16\[(?:1,)?(?:1024,[26]|[26],1024),128\]", text)


def test_the_update_holds_one_gradient():
    """Each layer adds to the sum where it stands: a stack of new gradients beside it would be as
    large as the sum."""
    memory = compiled_update(jax.devices()[:1], "float32", num_layers=24).memory_analysis()
    gradient = 4 * (WEIGHTS - 2 * HEAD) // SMALL.num_layers * 24
    assert memory.temp_size_in_bytes < 0.8 * gradient < memory.alias_size_in_bytes


def test_adamw_writes_over_what_it_reads():
    """One array beside those that are held, the clipped gradient: neither gradient nor moments are
    copied before new ones are written over them."""
    model = Model(SMALL, roles().trainer, jnp.float32)
    learner = Learner(model, ON_POLICY, OptimizerSection(), num_updates=10)
    state = learner.shapes()
    loss = jax.ShapeDtypeStruct((), jnp.float32, sharding=model.role.replicated)
    lowered = learner.programs["apply"].lower(
        loss,
        state.trainable,
        state.updates,
        gradient=state.trainable,
        optimizer_state=state.optimizer,
    )
    memory = lowered.compile().memory_analysis()
    gradient = 4 * WEIGHTS
    assert memory.temp_size_in_bytes < 1.1 * gradient
    assert memory.alias_size_in_bytes >= 3 * gradient


def test_in_bfloat16_a_mesh_gives_the_gradient_of_one_device():
    """Both types of reduction, the head's products by parts of the rows included."""
    groups = random_groups(QWEN3, 8, 2, 9, 12)
    (batch,) = batches(groups, shards=4)
    objective = replace(ON_POLICY, chunk_elements=8 * QWEN3.vocab_size)

    def gradient(
        where: Roles, reduce_dtype: Any = "float32", dtype: Any = jnp.bfloat16
    ) -> np.ndarray:
        one = Learner(
            Model(QWEN3, where.trainer, dtype),
            objective,
            OptimizerSection(reduce_dtype=reduce_dtype),
            10,
        )
        parameters = jax.device_put(random_parameters(QWEN3), shardings(QWEN3, where.trainer))
        total, _ = one.accumulate(None, TrainState(parameters, None, None), batch)
        return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(total.gradient)])

    exact = gradient(roles(), dtype=jnp.float32)
    rounding = relative(gradient(roles()), exact)
    for reduce_dtype in ("float32", "bfloat16"):
        assert 0 < relative(gradient(roles(fsdp=4, tensor=2), reduce_dtype), exact) < 1.5 * rounding
