"""The devices of one replica of the sampler, where the settings leave them open."""

from __future__ import annotations

from types import SimpleNamespace

import jax.numpy as jnp
import pytest

from shoal.config.schema import MeshSection
from shoal.model.names import model_named
from shoal.run.sampler_size import with_sampler_tensor


@pytest.mark.parametrize(("model", "kind", "count", "section", "tensor"), [
    ("llama3.1-8b", "TPU v5", 4, {"fsdp": 4}, 0),  # 24 GB of masters and moments a device, 16 GB of weights
    ("llama3.1-8b", "TPU v6 lite", 8, {"fsdp": 8}, 2),  # 12 GB and 16 GB of 33.6
    ("llama3.1-70b", "TPU v5", 128, {"trainer": "64", "sampler": "64", "fsdp": 64}, 2),
    ("llama3.1-70b", "TPU v5", 128, {"trainer": "64", "sampler": "64", "fsdp": 64, "sampler_tensor": 8}, 8),
    ("llama3.1-70b", "TPU v6 lite", 64, {"fsdp": 32, "tensor": 2}, 16),
    ("llama3.1-8b", "cpu", 8, {"fsdp": 8}, 0),
    ("qwen2.5-1.5b", "NVIDIA H200", 1, {}, 0),
])
def test_a_replica_has_the_least_devices_that_hold_it(model, kind, count, section, tensor):
    devices = [SimpleNamespace(device_kind=kind)] * count
    found = with_sampler_tensor(MeshSection(**section), model_named(model).architecture, jnp.bfloat16, devices)
    assert found.sampler_tensor == tensor
