"""What the backward pass keeps, where the settings leave it open."""

from __future__ import annotations

from typing import Any

import jax
import pytest
from pods import gpu, tpu

from shoal.config.schema import BatchSection, Config, MeshSection
from shoal.model.names import model_named
from shoal.run.remat import decided_remat
from shoal.run.sampler_size import run_roles

PODS = {"trainer": "64", "sampler": "64", "fsdp": 64, "sampler_tensor": 8}


@pytest.mark.parametrize(("model", "devices", "mesh", "micro_tokens", "remat"), [
    ("llama3.1-70b", tpu("v5p", 4, 4, 8), PODS, 2048, "dots"),
    ("llama3.1-70b", tpu("v5p", 4, 4, 8), PODS, 4352, "attention"),  # all products would take 60 of 54 GiB
    ("llama3.1-70b", tpu("v5p", 2, 4, 4), {"fsdp": 32}, 16384, "full"),
    ("llama3.1-8b", tpu("v5p", 2, 2), {"fsdp": 4}, 4352, "dots"),
    ("llama3.1-8b", tpu("v6e", 2, 4), {"fsdp": 8, "sampler_tensor": 8}, 2048, "full"),  # as fast, whatever fits
    ("qwen2.5-1.5b", gpu("h200", 1, 1), {}, 32768, "dots"),
    ("qwen2.5-1.5b", gpu("h200", 1, 1), {}, 131072, "attention"),
    ("qwen2.5-1.5b", jax.devices(), {}, 512, "dots"),  # a CPU: by 2 GiB alone
    ("qwen2.5-1.5b", jax.devices(), {}, 4096, "full"),
])
def test_as_much_is_kept_as_there_is_memory_for(model: str, devices: Any, mesh: dict[str, Any], micro_tokens: int,
                                                remat: str) -> None:
    config = Config(mesh=MeshSection(**mesh), batch=BatchSection(micro_tokens=micro_tokens))
    a = model_named(model).architecture
    assert decided_remat(config, run_roles(config, a, devices), a) == remat
