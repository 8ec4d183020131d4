"""The update compiled for four devices, here or not, and what its collectives move.

    python compiled.py gpu bfloat16 float32      # prints the optimised program for four H200, without any of them
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shoal.config.schema import AlgorithmSection, MeshSection, OptimizerSection
from shoal.mesh import make_roles
from shoal.model.transformer import Architecture, Model
from shoal.trainer.batch import Shape, pack
from shoal.trainer.loss import Objective
from shoal.trainer.step import GradientSum, Learner

SMALL = Architecture(vocab_size=4096, hidden_size=128, intermediate_size=512, num_layers=4, num_heads=4, num_kv_heads=4,
                     head_dim=32, rope_theta=10000.0)
CHUNK = 8
"""Tokens of a row in a chunk of log-probs; a row has 64, so that there are eight."""

H200 = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152 shared_memory_per_core: 233472
  threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128 block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535 block_dim_limit_z: 65535 memory_bandwidth: 4800000000000 l2_cache_size: 52428800
  clock_rate_ghz: 1.98 device_memory_size: 151397597184 shared_memory_per_block_optin: 232448
  cuda_compute_capability { major: 9 feature_extension: ACCELERATED_FEATURES }
  registers_per_core_limit: 65536 registers_per_block_limit: 65536 thread_dim_limit_x: 1024 thread_dim_limit_y: 1024
  thread_dim_limit_z: 64 device_vendor: "NVIDIA Corporation" name: "NVIDIA H200" driver_version: "13.0.0"
  runtime_version: "13.0.0" compile_time_toolkit_version: "13.0.0" dnn_version: "9.10.0"
  device_interconnect_info { active_links: 18 }
}
platform_name: "CUDA" dnn_version_info { major: 9 minor: 10 } device_description_str: "NVIDIA H200"
"""
ENVIRONMENT = {"JAX_PLATFORMS": "cpu", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1", "TPU_SKIP_MDS_QUERY": "1",
               "TPU_ACCELERATOR_TYPE": "v5p-8", "TPU_WORKER_HOSTNAMES": "localhost",
               "XLA_FLAGS": "--xla_gpu_enable_triton_gemm=false"}
"""Of a process that compiles for a TPU or a GPU that is not here."""


def compiled_update(devices: Sequence[Any], dtype: str, reduce_dtype: str = "float32", tensor: int = 1,
                    **changes: Any) -> Any:
    """`accumulate` of a small model with full recomputation; nothing is allocated."""
    role = make_roles(MeshSection(fsdp=-1, tensor=tensor), devices).trainer
    objective = replace(Objective.of(AlgorithmSection()), chunk_elements=CHUNK * SMALL.vocab_size)
    learner = Learner(Model(replace(SMALL, **changes), role, jnp.dtype(dtype).type, "full"), objective,
                      OptimizerSection(reduce_dtype=reduce_dtype), 10)  # type: ignore[arg-type]

    def shaped(x: Any, sharding: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    def whole(tree: Any) -> Any:
        return jax.tree.map(lambda x: shaped(x, role.replicated), tree)

    state = learner.shapes().trainable
    total: GradientSum = jax.eval_shape(learner.programs["zero"].function)
    total = replace(whole(replace(total, gradient=None)), gradient=state)
    (micro,) = pack([], [], np.zeros((0, 2)), np.zeros((0, 2)), Shape(role.row_shards, 16, 2, 32), 1.0)
    batch = jax.tree.map(lambda x: shaped(x, role.sharding(("rows", *(None,) * (x.ndim - 1)), x.shape)),
                         replace(micro.arrays, temperature=None))
    batch = replace(batch, temperature=whole(micro.arrays.temperature))
    program = learner.programs["accumulate"]
    platform = {"gpu": "cuda"}.get(role.platform, role.platform)
    return program._jitted.trace(total, state, batch).lower(lowering_platforms=(platform,)).compile()


@dataclass(frozen=True)
class Collective:
    kind: str
    dtype: str
    elements: int  # of the whole array: gathered, or before it is scattered
    times: int


def arrays(text: str) -> list[tuple[str, int]]:
    """(type, elements) of the arrays in a shape's text."""
    return [(kind, math.prod(int(size) for size in sizes.split(",") if size))
            for kind, sizes in re.findall(r"\b([a-z]+\d+|pred)\[([\d,]*)\]", text)]


def collectives(text: str, devices: int) -> list[Collective]:
    """The collectives of an optimised program, those of loops with the number of turns."""
    bodies: dict[str, list[str]] = {}
    name = entry = ""
    for line in text.splitlines():
        if (start := re.match(r"(ENTRY )?%?([\w.\-]+) .*->.*\{$", line)) and not line.startswith(" "):
            name = start[2]
            bodies[name], entry = [], name if start[1] else entry
        elif name:
            bodies[name].append(line)

    def visit(name: str, times: int) -> Iterator[Collective]:
        for line in bodies.get(name, ()):
            if not (parts := re.match(r"\s+(?:ROOT )?%?([\w.\-]+) = (.*?) ([\w\-]+)\(", line)):
                continue
            label, shape, operation = parts.groups()
            kind = operation.removesuffix("-done")
            if kind in ("all-gather", "all-reduce", "reduce-scatter"):
                for dtype, elements in arrays(shape):
                    yield Collective(kind, dtype, elements * (devices if kind == "reduce-scatter" else 1), times)
            elif operation == "while":
                loop = dict(re.findall(r"\b(condition|body)=%?([\w.\-]+)", line))
                known = re.search(r"known_trip_count\D*(\d+)", line)
                ends = re.findall(r"s32\[\]\S* constant\((\d+)\)", "".join(bodies[loop["condition"]]))
                yield from visit(loop["body"], times * (int(known[1]) if known else max(map(int, ends))))
            # A transfer in parts stands in several fusions: it is counted where it starts.
            elif operation in ("fusion", "call", "async-start") and "async-collective-done" not in label:
                for called in re.findall(r"(?:calls|to_apply)=%?([\w.\-]+)", line):
                    if not called.startswith("async_collective_fusion"):
                        yield from visit(called, times)

    return list(visit(entry, 1))


def main(platform: str, dtype: str, reduce_dtype: str) -> None:
    from jax.experimental.topologies import get_topology_desc

    topology = (get_topology_desc(platform="cuda", target_config=H200, topology="1x4x1") if platform == "gpu"
                else get_topology_desc("v5p:2x2x1", platform="tpu"))
    print(compiled_update(list(topology.devices), dtype, reduce_dtype).as_text())


if __name__ == "__main__":
    main(*sys.argv[1:])
