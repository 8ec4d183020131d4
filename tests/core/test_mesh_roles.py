"""The devices of the roles: shared ones are used, all else is refused before a model is loaded."""

from __future__ import annotations

import pytest

from shoal.config.schema import MeshSection
from shoal.mesh import devices_asked, make_roles, shared_devices
from shoal.types import ShoalError


@pytest.mark.parametrize(("there", "asked", "numbers"), [
    (4, {}, [0, 1, 2, 3]),
    (4, {"trainer": "4", "sampler": "4"}, [0, 1, 2, 3]),
    (8, {"trainer": "4"}, [0, 1, 2, 3]),
    (8, {"trainer": "0.5"}, [0, 1, 2, 3]),
    (8, {"trainer": "1.0", "sampler": "1.0"}, list(range(8))),
    (1, {"trainer": "1", "sampler": "1", "reference": "1"}, [0]),
    (8, {"trainer": "[2,1]", "sampler": "[1,2]"}, [2, 1]),
    (4, {"sampler": "4", "sampler_tensor": 1}, [0, 1, 2, 3]),
])
def test_shared_devices(there, asked, numbers):
    assert shared_devices(MeshSection(**asked), there) == numbers


@pytest.mark.parametrize(("there", "asked", "part"), [
    (1, {"trainer": "2", "sampler": "2", "reference": "2"},
     "2 (trainer) + 2 (sampler) + 2 (reference) devices are requested, but JAX finds 1 device"),
    (4, {"trainer": "2", "sampler": "2", "reference": "2"}, "but JAX finds 4 devices"),
    (4, {"trainer": "3", "sampler": "2"}, "3 (trainer) + 2 (sampler) devices are requested"),
    (8, {"trainer": "4", "sampler": "4"}, "are not supported yet"),
    (8, {"trainer": "4", "reference": "4"}, "are not supported yet"),
    (8, {"trainer": "[0,1]", "sampler": "[1,2]"}, "are not supported yet"),
    (8, {"sampler": "4", "sampler_tensor": 2}, "mesh.sampler=4 (replicas of 2): sampler or reference on other devices"),
    (8, {"trainer": "[0,9]"}, "there is no device 9; JAX finds 8 devices, numbered from 0"),
    (4, {"sampler": "4", "sampler_tensor": 4}, "is split as the trainer is, over mesh.tensor=1"),
])
def test_what_is_refused(there, asked, part):
    with pytest.raises(ShoalError) as caught:
        shared_devices(MeshSection(**asked), there)
    assert part in str(caught.value)


@pytest.mark.parametrize("text", ["x", "0", "-1", "0.0", "1.5", "[0,0]", "[-1]", "[a]", "[]", "nan", "1e9"])
def test_what_is_no_number_of_devices(text):
    with pytest.raises(ShoalError, match=r"expected a fraction up to 1.0, a number of devices, or a list"):
        devices_asked("mesh.trainer", text, 8)


def test_all_roles_are_on_the_devices_of_the_trainer():
    import jax

    there = jax.devices()
    made = make_roles(MeshSection(trainer="[0]", fsdp=-1), there)
    assert [list(role.mesh.devices.flat) for role in (made.trainer, made.sampler, made.reference)] == [[there[0]]] * 3
