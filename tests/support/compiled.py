"""Programs compiled for devices that are here or not, and what their collectives move.

python compiled.py v5p:2x2x2 update bfloat16 float32

prints the optimised program, one for each reduce_dtype.
"""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shoal.config.sections.algorithm import AlgorithmSection
from shoal.config.sections.devices import MeshSection
from shoal.config.sections.optimizer import OptimizerSection
from shoal.mesh import make_roles
from shoal.mesh.topology import ENVIRONMENT, parse_topology, topology_devices
from shoal.model.architecture import Architecture
from shoal.model.attention import gpu as gpu_attention
from shoal.model.attention.decode_tpu import attend_pages
from shoal.model.attention.rule import Tokens
from shoal.model.experts import experts_product, route
from shoal.model.linear import Quantised
from shoal.model.transformer import Model
from shoal.plan.hlo import Instruction, Module
from shoal.plan.transfers import device_groups, groups_text
from shoal.sampler.engine import Engine
from shoal.trainer.batch import BatchLayout, Shape, TokenTerms, pack
from shoal.trainer.loss import make_objective
from shoal.trainer.step import Learner
from shoal.weights.sampler_copy import published_shapes

SMALL = Architecture(
    vocab_size=4096,
    hidden_size=128,
    intermediate_size=512,
    num_layers=4,
    num_heads=4,
    num_kv_heads=4,
    head_dim=32,
    rope_theta=10000.0,
)
CHUNK = 8
"""Tokens of a row in a chunk of log-probs; a row has 64, so that there are eight."""
DEEP: dict[str, Any] = {"num_layers": 32, "vocab_size": 512}
"""Changes of SMALL after which layers hold nearly all of it."""

LLAMA_70B = Architecture(
    vocab_size=128256,
    hidden_size=8192,
    intermediate_size=28672,
    num_layers=80,
    num_heads=64,
    num_kv_heads=8,
    head_dim=128,
)
LLAMA_8B = replace(
    LLAMA_70B, hidden_size=4096, intermediate_size=14336, num_layers=32, num_heads=32
)
SAMPLED = Architecture(
    vocab_size=4096,
    hidden_size=768,
    intermediate_size=1280,
    num_layers=2,
    num_heads=8,
    num_kv_heads=2,
    head_dim=128,
    qkv_bias=True,
)
SLOTS, GROUP_SIZE = 64, 8


def compiled_elsewhere(topology: str, program: str, *arguments: object) -> str:
    """The optimised program for devices that are not here, by a process of its own: JAX takes one
    backend for good."""
    compiler = "libtpu" if parse_topology(topology).accelerator.is_tpu else "jax_cuda13_plugin"
    if find_spec(compiler) is None:
        pytest.skip(f"{compiler} is not installed")
    done = subprocess.run(
        [sys.executable, __file__, topology, program, *map(str, arguments)],
        capture_output=True,
        text=True,
        env=os.environ
        | ENVIRONMENT
        | {"JAX_DEFAULT_MATMUL_PRECISION": "default", "JAX_DISABLE_MOST_OPTIMIZATIONS": "false"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def compiled_update(
    devices: Sequence[Any],
    dtype: str,
    reduce_dtype: str = "float32",
    tensor: int = 1,
    remat: Any = "full",
    size: int = 80,
    **changes: Any,
) -> Any:
    """`accumulate` of a small model, rows of so many tokens; nothing is allocated."""
    role = make_roles(MeshSection(fsdp=-1, tensor=tensor), devices).trainer
    objective = replace(make_objective(AlgorithmSection()), chunk_elements=CHUNK * SMALL.vocab_size)
    learner = Learner(
        Model(replace(SMALL, **changes), role, jnp.dtype(dtype).type, remat),
        objective,
        OptimizerSection(reduce_dtype=reduce_dtype),
        10,
    )  # type: ignore[arg-type]
    (micro,) = pack(
        [],
        [],
        TokenTerms(np.zeros((0, 2)), np.zeros((0, 2))),
        BatchLayout([Shape(role.row_shards, size)], 1.0),
    )

    def by_row(x: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(
            x.shape, x.dtype, sharding=role.sharding(("rows",) + (None,) * (x.ndim - 1), x.shape)
        )

    batch = jax.tree.map(by_row, replace(micro.arrays, temperature=None))
    batch = replace(
        batch, temperature=jax.ShapeDtypeStruct((), jnp.float32, sharding=role.replicated)
    )
    programs: dict[str, Any] = learner.programs
    state = learner.shapes()
    return programs["accumulate"].compile(
        programs["zero"].eval_shape(), state.trainable, state.frozen, batch
    )


def compiled_apply(devices: Sequence[Any], offload: bool) -> Any:
    """The optimizer's update of a deep small model; nothing is allocated."""
    role = make_roles(MeshSection(fsdp=-1), devices).trainer
    learner = Learner(
        Model(replace(SMALL, **DEEP), role),
        make_objective(AlgorithmSection()),
        OptimizerSection(offload=offload),
        10,
    )
    programs: dict[str, Any] = learner.programs
    state, total = learner.shapes(), programs["zero"].eval_shape()
    return programs["apply"].compile(
        total.loss,
        state.trainable,
        state.updates,
        gradient=total.gradient,
        optimizer_state=state.optimizer,
    )


def memory_of(compiled: Any) -> dict[str, int]:
    """Bytes on a device, and in the memory of its host."""
    found = compiled.memory_analysis()
    result = {}
    for name in ("argument", "temp", "host_argument", "host_alias", "host_temp"):
        result[name] = getattr(found, f"{name}_size_in_bytes")
    return result


def call_of(engine: Engine, program: str) -> tuple[tuple, dict[str, Any]]:
    """The shapes of what a program of an engine is called with."""
    state, count = engine.state_shapes(), engine.scheduler.swap_rows
    if program in ("swap_out", "swap_in"):
        args = [state, jax.ShapeDtypeStruct((count,), jnp.int32)]
        if program == "swap_in":
            args.append(engine.swapped.shapes)
        table = engine._empty_page_table(count)
        if table is not None:
            args.append(jax.ShapeDtypeStruct(table.shape, table.dtype))
        return tuple(args), {}
    whole = {"embed": "prefill", "begin": "prefill"}.get(program, program)
    return engine.calls(whole, published_shapes(engine.model))[program][1:]


def compiled_decode(
    devices: Sequence[Any],
    a: Architecture,
    data: int,
    tensor: int,
    program: str = "decode",
    siblings: int = 0,
) -> Any:
    """Decoding in bfloat16, for prompts of 256 tokens and completions of 512; nothing is
    allocated."""
    role = make_roles(MeshSection(data, 1, tensor), devices).sampler
    engine = Engine(
        Model(a, role, jnp.bfloat16),
        slots=SLOTS,
        group_size=GROUP_SIZE,
        max_prompt_tokens=256,
        max_completion_tokens=512,
        eos_ids=(1,),
        siblings_per_row=siblings,
    )
    args, arrays = call_of(engine, program)
    return engine.programs[program].compile(*args, **arrays)


def compiled_kernels(device: Any, head_dim: int) -> Any:
    """Training's attention by the kernels for GPUs and its gradient, of three query heads to a key
    head."""
    where = jax.sharding.SingleDeviceSharding(device)
    q, k = (
        jax.ShapeDtypeStruct((1, 256, heads, head_dim), jnp.bfloat16, sharding=where)
        for heads in (3, 1)
    )
    row = jax.ShapeDtypeStruct((1, 256), jnp.int32, sharding=where)

    def loss(q: jax.Array, k: jax.Array, v: jax.Array, segment: jax.Array) -> jax.Array:
        tokens = Tokens.of(segment, segment)
        lists = gpu_attention.block_lists(
            tokens, tokens, gpu_attention.block_size(head_dim, q.dtype)
        )
        return gpu_attention.attend_rows(q, k, v, lists).astype(jnp.float32).sum()

    traced = jax.jit(jax.grad(loss, (0, 1, 2))).trace(q, k, k, row)
    return traced.lower(lowering_platforms=("cuda",)).compile()


def compiled_experts(device: Any, frozen: bool) -> Any:
    """A layer's experts with their gradients: 1,024 tokens with 8 of 16 experts each, in bfloat16.
    `frozen`: kernels of 8 bits, which have no gradient."""
    where = jax.sharding.SingleDeviceSharding(device)

    def shape(*sizes: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(sizes, dtype, sharding=where)

    def kernel(rows: int, columns: int) -> Any:
        if not frozen:
            return shape(16, rows, columns)
        values = shape(16, rows, columns, dtype=jnp.int8)
        return Quantised(values, shape(16, columns, dtype=jnp.float32))

    def loss(x: jax.Array, logits: jax.Array, trained: Any, held: Any) -> jax.Array:
        out = experts_product(x, *route(logits, 8, True), trained or held, form="triton")
        return out.astype(jnp.float32).sum()

    kernels = kernel(512, 256), kernel(512, 256), kernel(256, 512)
    logits = shape(1024, 16, dtype=jnp.float32)
    trained, held = ((), kernels) if frozen else (kernels, ())
    traced = jax.jit(jax.grad(loss, (0, 1, 2))).trace(shape(1024, 512), logits, trained, held)
    return traced.lower(lowering_platforms=("cuda",)).compile()


def compiled_kernel(device: Any, width: int, dtype: Any) -> Any:
    """Decoding's kernel for TPUs: eight rows of 16 slots, prompts of 256 tokens, completions of
    512."""
    here = jax.sharding.SingleDeviceSharding(device)

    def shape(*sizes: int, dtype: Any = jnp.int32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(sizes, dtype, sharding=here)

    inputs = ((8, 16, 12, width), (8, 4, 256, 2 * width), (512, 4, 128, 2 * width))
    with jax.default_matmul_precision("highest"):  # as a run in float32 has it
        return (
            jax.jit(attend_pages)
            .lower(
                *(shape(*sizes, dtype=dtype) for sizes in inputs),
                shape(8),
                shape(8, 16),
                shape(8, 16, 4),
            )
            .compile()
        )


@dataclass(frozen=True)
class Collective:
    kind: str
    dtype: str
    elements: int  # of the whole array: gathered, or before it is scattered
    times: int


def arrays(shape: str) -> list[tuple[str, int]]:
    """(type, elements) of the arrays in a shape's text."""
    result = []
    for kind, sizes in re.findall(r"\b([a-z]+\d+|pred)\[([\d,]*)\]", shape):
        result.append((kind, math.prod(int(size) for size in sizes.split(",") if size)))
    return result


def replica_groups(one: Instruction) -> list[list[int]]:
    """The groups of devices that a collective joins."""
    return device_groups(groups_text(one.attributes))


def collectives(text: str) -> list[Collective]:
    """The sums and gathers of an optimised program, those of loops with the number of turns."""
    module = Module(text)

    def visit(name: str, times: int) -> Iterator[Collective]:
        by_name = {one.name: one for one in module.computations[name]}
        for one in by_name.values():
            kind = one.op.removesuffix("-done")
            if kind in ("all-gather", "all-reduce", "reduce-scatter"):
                start = one if kind == one.op else by_name[one.operands[0]]
                parts = len(replica_groups(start)[0]) if kind == "reduce-scatter" else 1
                # TPU: a part of it is kept
                if name.startswith("all-reduce-scatter"):
                    kind = "reduce-scatter"
                else:
                    kind = kind
                for dtype, elements in arrays(one.shape):
                    yield Collective(kind, dtype, elements * parts, times)
            elif one.op == "while":
                turns = module.trip_count(one)
                assert turns is not None, one
                yield from visit(one.named("body"), times * turns)
            # A transfer in parts stands in several fusions: it is counted where it starts.
            elif (
                one.op in ("fusion", "call", "async-start", "call-start")
                and "async-collective-done" not in one.name
            ):
                for called in filter(None, (one.named("calls"), one.named("to_apply"))):
                    if not called.startswith("async_collective_fusion"):
                        yield from visit(called, times)

    return list(visit(module.entry, 1))


def main(topology: str, program: str, *arguments: str) -> None:
    devices = topology_devices(parse_topology(topology))
    if program == "update":
        dtype, *reduce_dtypes = arguments
        for reduce_dtype in reduce_dtypes:
            print(compiled_update(devices, dtype, reduce_dtype).as_text(), end="\f")
    elif program == "update by kernels":
        heads = {
            "num_layers": 2,
            "num_heads": 6,
            "num_kv_heads": 2,
            "head_dim": 128,
            "qkv_bias": True,
        }
        print(compiled_update(devices, "bfloat16", size=1024, **heads).as_text())
    elif program == "host":
        print(
            json.dumps(
                [
                    *(memory_of(compiled_apply(devices, offload)) for offload in (False, True)),
                    *(
                        memory_of(compiled_update(devices, "bfloat16", remat=remat, **DEEP))
                        for remat in ("attention", "offload")
                    ),
                ]
            )
        )
    elif program == "context":  # of rollouts that act, on one device with 8 key/value heads
        for name in ("feed", "swap_out", "swap_in"):
            compiled = compiled_decode(
                devices[:1], replace(SAMPLED, num_layers=1, num_kv_heads=8), 1, 1, name, siblings=1
            )
            print(compiled.as_text(), end="\f")
    elif program == "decode kernel":  # of a TPU: bytes of temporaries
        for width, dtype in (
            (64, jnp.bfloat16),
            (64, jnp.float32),
            (128, jnp.bfloat16),
            (128, jnp.float32),
        ):
            print(compiled_kernel(devices[0], width, dtype).memory_analysis().temp_size_in_bytes)
    elif program == "decode of 8 bits":  # on one device
        print(compiled_decode(devices[:1], replace(SAMPLED, quantised="int8"), 1, 1).as_text())
    elif program == "decode":
        print(compiled_decode(devices, SAMPLED, 2, 2).as_text())
    elif program == "kernels":
        print(compiled_kernels(devices[0], int(arguments[0])).as_text())
    elif program == "experts":
        for frozen in (False, True):
            print(compiled_experts(devices[0], frozen).as_text(), end="\f")
    elif program == "prefill of 70b":
        print(
            compiled_decode(
                devices, replace(LLAMA_70B, num_layers=1), 1, len(devices), "prefill"
            ).as_text()
        )
    else:
        a = {"70b": LLAMA_70B, "8b": LLAMA_8B}[program]
        for layers in map(int, arguments):
            print(
                compiled_decode(devices, replace(a, num_layers=layers), 1, len(devices)).as_text(),
                end="\f",
            )


if __name__ == "__main__":
    main(*sys.argv[1:])
