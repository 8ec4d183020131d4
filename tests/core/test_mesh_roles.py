"""The devices of the roles, their meshes, and what is refused before a model is loaded."""

from __future__ import annotations

import jax
import pytest

from shoal.config.schema import MeshSection
from shoal.mesh import devices_asked, make_mesh, make_roles, role_devices
from shoal.types import ShoalError

FOUR, EIGHT = list(range(4)), list(range(8))


@pytest.mark.parametrize(("there", "asked", "trainer", "sampler", "reference"), [
    (4, {}, FOUR, FOUR, FOUR),
    (4, {"trainer": "4", "sampler": "4"}, FOUR, FOUR, FOUR),
    (8, {"trainer": "4"}, FOUR, FOUR, FOUR),
    (8, {"trainer": "0.5"}, FOUR, FOUR, FOUR),
    (8, {"trainer": "1.0", "sampler": "1.0"}, EIGHT, EIGHT, EIGHT),
    (1, {"trainer": "1", "sampler": "1", "reference": "1"}, [0], [0], [0]),
    (8, {"trainer": "[2,1]", "sampler": "[1,2]"}, [2, 1], [1, 2], [1, 2]),
    (8, {"trainer": "4", "sampler": "4"}, FOUR, [4, 5, 6, 7], [4, 5, 6, 7]),
    (8, {"trainer": "0.5", "sampler": "0.25"}, FOUR, [6, 7], [6, 7]),
    (8, {"sampler": "2"}, [0, 1, 2, 3, 4, 5], [6, 7], [6, 7]),
    (8, {"trainer": "4", "sampler": "2", "reference": "2"}, FOUR, [6, 7], [4, 5]),
    (8, {"trainer": "4", "reference": "4"}, FOUR, FOUR, [4, 5, 6, 7]),
    (8, {"trainer": "4", "sampler": "4", "reference": "[0,1,2,3]"}, FOUR, [4, 5, 6, 7], FOUR),
])
def test_devices_of_the_roles(there, asked, trainer, sampler, reference):
    found = role_devices(MeshSection(**asked), there)
    assert (found.trainer, found.sampler, found.reference) == (trainer, sampler, reference)


@pytest.mark.parametrize(("there", "asked", "part"), [
    (1, {"trainer": "2", "sampler": "2", "reference": "2"},
     "2 (trainer) + 2 (sampler) + 2 (reference) devices are requested, but JAX finds 1 device"),
    (4, {"trainer": "3", "sampler": "2"}, "3 (trainer) + 2 (sampler) devices are requested"),
    (4, {"reference": "5"}, "5 (reference) devices are requested"),
    (8, {"trainer": "[0,1]", "sampler": "[1,2]"}, "device 1 would be both the trainer's and the sampler's"),
    (8, {"trainer": "[0,1,2]", "sampler": "[1,2]"}, "devices 1, 2 would be both"),
    (8, {"trainer": "[0,9]"}, "there is no device 9; JAX finds 8 devices, numbered from 0. All roles share all devices "
     "with mesh.trainer="),
    (1, {"trainer": "4", "sampler": "4", "fsdp": 4, "sampler_tensor": 2},
     "with mesh.trainer= mesh.sampler= mesh.sampler_tensor=0 mesh.fsdp=-1"),
])
def test_what_is_refused(there, asked, part):
    with pytest.raises(ShoalError) as caught:
        role_devices(MeshSection(**asked), there)
    assert part in str(caught.value)


@pytest.mark.parametrize(("asked", "sizes"), [
    ({"fsdp": 8}, {"data": 8, "tensor": 1}),
    ({"fsdp": 8, "sampler_tensor": 4}, {"data": 2, "tensor": 4}),
    ({"fsdp": 4, "tensor": 2}, {"data": 4, "tensor": 2}),
    ({"trainer": "4", "sampler": "4", "fsdp": 4, "sampler_tensor": 2}, {"data": 2, "tensor": 2}),
    ({"trainer": "6", "sampler": "2", "fsdp": 3, "tensor": 2}, {"data": 1, "tensor": 2}),
])
def test_the_sampler_is_replicas_times_tensor(asked, sizes):
    assert dict(make_roles(MeshSection(**asked)).sampler.mesh.shape) == sizes


@pytest.mark.parametrize(("asked", "part"), [
    ({"fsdp": 8, "sampler_tensor": 3}, "mesh.sampler_tensor=3 does not divide the sampler's 8 devices; use 1, 2, 4 or"),
    ({"trainer": "6", "sampler": "2", "tensor": 3}, "mesh.tensor=3 does not divide the sampler's 2 devices; use 1 or 2 "
                                                    "for mesh.sampler_tensor"),
    ({"dcn_data": 3}, "mesh.dcn_data=3 x mesh.dcn_fsdp=1 does not divide 8 devices into 3 slices"),
    ({"dcn_data": 2, "fsdp": 8}, "mesh.fsdp=8 does not divide 4 devices of a slice; use 1, 2 or 4"),
])
def test_sizes_that_do_not_divide(asked, part):
    with pytest.raises(ShoalError) as caught:
        make_roles(MeshSection(**asked))
    assert part in str(caught.value)


def test_a_view_has_the_trainers_order_of_devices():
    """A program that publishes within the devices needs one order for both meshes."""
    made = make_roles(MeshSection(trainer="[3,1,2,0]", fsdp=4, sampler_tensor=2))
    assert list(made.sampler.mesh.devices.flat) == list(made.trainer.mesh.devices.flat)
    assert made.sampler.in_flight is made.trainer.in_flight and not made.apart
    apart = make_roles(MeshSection(trainer="4", sampler="4"))
    assert apart.sampler.in_flight is not apart.trainer.in_flight and apart.apart


def test_slices_are_outermost_on_their_axis():
    """Eight devices as two slices of four: neighbours on `fsdp` are of one slice, the copies of `data` of both."""
    mesh = make_mesh(MeshSection(data=2, fsdp=2, dcn_data=2), jax.devices())
    numbers = [[device.id for device in row] for row in mesh.devices[..., 0]]
    assert dict(mesh.shape) == {"data": 4, "fsdp": 2, "tensor": 1}
    assert numbers == [[0, 1], [2, 3], [4, 5], [6, 7]]
    mesh = make_mesh(MeshSection(data=2, fsdp=2, dcn_fsdp=2), jax.devices())
    assert [[device.id for device in row] for row in mesh.devices[..., 0]] == [[0, 1, 4, 5], [2, 3, 6, 7]]


@pytest.mark.parametrize("text", ["x", "0", "-1", "0.0", "1.5", "[0,0]", "[-1]", "[a]", "[]", "nan", "1e9"])
def test_what_is_no_number_of_devices(text):
    with pytest.raises(ShoalError, match=r"expected a fraction up to 1.0, a number of devices, or a list"):
        devices_asked("mesh.trainer", text, 8)


def test_all_roles_are_on_the_devices_of_the_trainer():
    there = jax.devices()
    made = make_roles(MeshSection(trainer="[0]", fsdp=-1), there)
    assert [list(role.mesh.devices.flat) for role in (made.trainer, made.sampler, made.reference)] == [[there[0]]] * 3
