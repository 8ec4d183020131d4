"""Compiles decoding for accelerators that are not here: `python compile_decode.py tpu|gpu FOLDER` writes its HLO.

A process of its own, because JAX takes one backend for good. TPU: Llama 70B's layers, 2 and 4 of them, on 8 chips. GPU:
a small model on 2 replicas of 2.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.experimental.topologies import get_topology_desc

from shoal.config.schema import MeshSection
from shoal.mesh import make_roles
from shoal.model.transformer import Architecture, Model
from shoal.rollout.publication import published_shapes
from shoal.sampler.engine import Engine

LLAMA_70B = Architecture(vocab_size=128256, hidden_size=8192, intermediate_size=28672, num_layers=80, num_heads=64,
                         num_kv_heads=8, head_dim=128)
SMALL = Architecture(vocab_size=4096, hidden_size=768, intermediate_size=1280, num_layers=2, num_heads=8,
                     num_kv_heads=2, head_dim=128, qkv_bias=True)
SLOTS, GROUP_SIZE = 64, 8

ENVIRONMENT = {"JAX_PLATFORMS": "cpu", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1", "TPU_SKIP_MDS_QUERY": "1",
               "TPU_ACCELERATOR_TYPE": "v5p-8", "TPU_WORKER_HOSTNAMES": "localhost",
               "JAX_ENABLE_COMPILATION_CACHE": "false", "JAX_DEFAULT_MATMUL_PRECISION": "default",
               "XLA_FLAGS": "--xla_gpu_enable_triton_gemm=false"}
"""Without it libtpu looks for a TPU. XLA's own products for GPUs are chosen by trials on one; cuBLAS's need none."""

H200 = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152 shared_memory_per_core: 233472
  threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128 block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535 block_dim_limit_z: 65535 memory_bandwidth: 4800000000000 l2_cache_size: 52428800
  clock_rate_ghz: 1.98 device_memory_size: 151397597184 shared_memory_per_block_optin: 232448
  cuda_compute_capability { major: 9 feature_extension: ACCELERATED_FEATURES } registers_per_core_limit: 65536
  registers_per_block_limit: 65536 thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
  device_vendor: "NVIDIA Corporation" name: "NVIDIA H200" driver_version: "13.0.0" runtime_version: "13.0.0"
  compile_time_toolkit_version: "13.0.0" dnn_version: "9.10.0"
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 10 patch: 0 }
device_description_str: "NVIDIA H200"
"""


def compiled_decode(devices: list, a: Architecture, data: int, tensor: int) -> str:
    """The optimised HLO of decoding in bfloat16, for prompts of 256 tokens and completions of 512."""
    role = make_roles(MeshSection(data, 1, tensor), devices).sampler
    engine = Engine(Model(a, role, jnp.bfloat16), slots=SLOTS, group_size=GROUP_SIZE, max_prompt_tokens=256,
                    max_completion_tokens=512, eos_ids=(1,))
    stopped = jax.ShapeDtypeStruct((engine.num_groups, GROUP_SIZE), bool)
    program = engine.programs["decode"]
    return program.compile(published_shapes(engine.model), state=engine.state_shapes(), stopped=stopped).as_text()


def main(platform: str, folder: Path) -> None:
    if platform == "gpu":
        devices = get_topology_desc(platform="cuda", target_config=H200, topology="1x4x1").devices
        (folder / "2.hlo").write_text(compiled_decode(list(devices), SMALL, 2, 2))
        return
    devices = get_topology_desc("v5p:2x2x2", platform="tpu").devices
    for layers in (2, 4):
        a = replace(LLAMA_70B, num_layers=layers)
        (folder / f"{layers}.hlo").write_text(compiled_decode(list(devices), a, 1, 8))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
