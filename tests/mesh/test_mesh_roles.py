"""The devices of the roles, their meshes, and what is refused before a model is loaded."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import mesh_utils
from pods import gpu, tpu

from shoal.config.sections.devices import MeshSection
from shoal.mesh import devices_asked, make_mesh, make_roles, role_devices, roles
from shoal.model.layers import ffn_chunks
from shoal.model.published import model_named
from shoal.records import ShoalError

FOUR, EIGHT = list(range(4)), list(range(8))


@pytest.mark.parametrize(
    ("there", "asked", "trainer", "sampler", "reference"),
    [
        (4, {}, FOUR, FOUR, FOUR),
        (4, {"trainer": "1.0", "sampler": "4"}, FOUR, FOUR, FOUR),
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
        (8, {"trainer": "[4,5,6,7]", "reference": "2"}, [4, 5, 6, 7], [4, 5, 6, 7], [0, 1]),
        (
            8,
            {"trainer": "[0,1]", "sampler": "[2,3]", "reference": "4"},
            [0, 1],
            [2, 3],
            [4, 5, 6, 7],
        ),
        (8, {"trainer": "4", "sampler": "2", "reference": "[6,7]"}, FOUR, [6, 7], [6, 7]),
        (8, {"trainer": "[4,5,6,7]", "sampler": "2"}, [4, 5, 6, 7], [2, 3], [2, 3]),
        (6, {"trainer": "2", "sampler": "2", "reference": "2"}, [0, 1], [4, 5], [2, 3]),
        (4, {"reference": "2"}, [0, 1], [0, 1], [2, 3]),
        (4, {"sampler": "1", "reference": "[0]"}, [1, 2], [3], [0]),
        (4, {"trainer": "1.0", "reference": "1.0"}, FOUR, FOUR, FOUR),
    ],
)
def test_devices_of_the_roles(there, asked, trainer, sampler, reference):
    found = role_devices(MeshSection(**asked), there)
    assert (found.trainer, found.sampler, found.reference) == (trainer, sampler, reference)


@pytest.mark.parametrize(
    ("there", "asked", "part"),
    [
        (
            1,
            {"trainer": "2", "sampler": "2", "reference": "2"},
            "2 (trainer) + 2 (sampler) + 2 (reference) devices are requested, but JAX finds 1 "
            "device",
        ),
        (4, {"trainer": "3", "sampler": "2"}, "3 (trainer) + 2 (sampler) devices are requested"),
        (
            4,
            {"trainer": "4", "sampler": "4"},
            "4 (trainer) + 4 (sampler) devices are requested, but JAX finds 4 devices",
        ),
        (
            4,
            {"trainer": "2", "sampler": "2", "reference": "2"},
            "2 (trainer) + 2 (sampler) + 2 (reference) devices are requested, but JAX finds 4 "
            "devices",
        ),
        (
            8,
            {"trainer": "4", "sampler": "2", "reference": "4"},
            "4 (trainer) + 2 (sampler) + 4 (reference) devices are",
        ),
        (
            4,
            {"trainer": "[0,1]", "sampler": "[2,3]", "reference": "1"},
            "2 (trainer) + 2 (sampler) + 1 (reference)",
        ),
        (
            4,
            {"trainer": "1.0", "sampler": "1.0", "reference": "0.5"},
            "4 (trainer) + 4 (sampler) + 2 (reference)",
        ),
        (4, {"reference": "4"}, "4 (reference) + 1 or more (trainer) devices are requested"),
        (4, {"reference": "5"}, "5 (reference) + 1 or more (trainer) devices are requested"),
        (
            6,
            {"trainer": "[0,1]", "sampler": "[4,5]", "reference": "[1,2]"},
            "device 1 would be both the trainer's and the reference's; they share all of their "
            "devices or none",
        ),
        (
            6,
            {"trainer": "[0,1]", "sampler": "[4,5]", "reference": "[3,4]"},
            "device 4 would be both the sampler's and the reference's",
        ),
        (
            4,
            {"trainer": "2", "sampler": "2", "reference": "1.0"},
            "both the trainer's and the reference's",
        ),
        (
            8,
            {"trainer": "[0,1]", "sampler": "[1,2]"},
            "device 1 would be both the trainer's and the sampler's",
        ),
        (8, {"trainer": "4", "sampler": "[3,4]"}, "device 3 would be both"),
        (
            8,
            {"reference": "[]"},
            "mesh.reference=[]: expected a fraction up to 1.0, a number of devices, or a list",
        ),
        (
            8,
            {"reference": "0"},
            "mesh.reference=0: expected a fraction up to 1.0, a number of devices, or a list",
        ),
        (8, {"trainer": "[0,1,2]", "sampler": "[1,2]"}, "devices 1, 2 would be both"),
        (
            8,
            {"trainer": "[0,9]"},
            "there is no device 9; JAX finds 8 devices, numbered from 0. All roles share all "
            "devices with mesh.trainer=",
        ),
        (
            1,
            {"trainer": "4", "sampler": "4", "fsdp": 4, "sampler_tensor": 2},
            "with mesh.trainer= mesh.sampler= mesh.sampler_tensor=0 mesh.fsdp=-1",
        ),
    ],
)
def test_what_is_refused(there, asked, part):
    with pytest.raises(ShoalError) as caught:
        role_devices(MeshSection(**asked), there)
    assert part in str(caught.value)


@pytest.mark.parametrize(
    ("asked", "sizes"),
    [
        ({"fsdp": 8}, {"data": 8, "tensor": 1}),
        ({"fsdp": 8, "sampler_tensor": 4}, {"data": 2, "tensor": 4}),
        ({"fsdp": 4, "tensor": 2}, {"data": 4, "tensor": 2}),
        (
            {"trainer": "4", "sampler": "4", "fsdp": 4, "sampler_tensor": 2},
            {"data": 2, "tensor": 2},
        ),
        ({"trainer": "6", "sampler": "2", "fsdp": 3, "tensor": 2}, {"data": 1, "tensor": 2}),
    ],
)
def test_the_sampler_is_replicas_times_tensor(asked, sizes):
    assert dict(make_roles(MeshSection(**asked)).sampler.mesh.shape) == sizes


@pytest.mark.parametrize(
    ("asked", "part"),
    [
        (
            {"fsdp": 8, "sampler_tensor": 3},
            "mesh.sampler_tensor=3 does not divide the sampler's 8 devices; use 1, 2, 4 or",
        ),
        (
            {"trainer": "6", "sampler": "2", "tensor": 3},
            "mesh.tensor=3 does not divide the sampler's 2 devices; use 1 or 2 for "
            "mesh.sampler_tensor",
        ),
        (
            {"dcn_data": 3},
            "mesh.dcn_data=3 x mesh.dcn_fsdp=1 does not divide 8 devices into 3 slices",
        ),
        (
            {"dcn_data": 2, "fsdp": 8},
            "mesh.fsdp=8 does not divide 4 devices of a slice; use 1, 2 or 4",
        ),
    ],
)
def test_sizes_that_do_not_divide(asked, part):
    with pytest.raises(ShoalError) as caught:
        make_roles(MeshSection(**asked))
    assert part in str(caught.value)


def test_a_view_has_the_trainers_order_of_devices():
    """A program that publishes within the devices needs one order for both meshes."""
    made = make_roles(MeshSection(trainer="[3,1,2,0]", fsdp=4, sampler_tensor=2))
    assert list(made.sampler.mesh.devices.flat) == list(made.trainer.mesh.devices.flat)
    again = make_roles(MeshSection(fsdp=4)).trainer  # another run's
    queues = []
    for role in (made.trainer, made.sampler, again):
        queues.append(role.jit(len)._in_flight)
    assert queues[0] is queues[1] is queues[2] and not made.disaggregated
    made = make_roles(MeshSection(trainer="4", sampler="4"))
    assert (
        made.sampler.jit(len)._in_flight is not made.trainer.jit(len)._in_flight
        and made.disaggregated
    )


@pytest.mark.parametrize(
    ("devices", "tensor"),
    [
        (tpu("v5p", 2, 4, 4), 2),
        (tpu("v5p", 2, 4, 4), 4),
        (tpu("v5p", 4, 4, 4), 4),
        (tpu("v6e", 4, 4), 2),
        (tpu("v6e", 4, 4), 4),
        (tpu("v6e", 2, 4), 4),
        (gpu("h200", 2, 8), 8),
    ],
)
def test_a_replica_lies_within_a_host(devices, tensor):
    """The trainer's order is the torus's, whose neighbours are on different hosts."""
    made = make_roles(MeshSection(fsdp=-1, sampler_tensor=tensor), devices)
    for replica in made.sampler.mesh.devices:
        assert len({device.process_index for device in replica}) == 1
    assert set(made.sampler.mesh.devices.flat) == set(devices)
    count = (1, len(devices), 1)
    torus = mesh_utils.create_device_mesh(count, devices, allow_split_physical_axes=True)
    assert (made.trainer.mesh.devices == torus[..., None, None]).all()


@pytest.mark.parametrize(
    ("devices", "tensor"),
    [
        (tpu("v5p", 2, 4, 4), 1),
        (tpu("v5p", 2, 4, 4), 8),
        (tpu("v6e", 2, 2), 2),
        (tpu("v6e", 2, 4), 2),
        (gpu("h200", 2, 8), 4),
    ],
)
def test_the_trainers_order_stays_where_hosts_make_no_difference(devices, tensor):
    made = make_roles(MeshSection(fsdp=-1, sampler_tensor=tensor), devices)
    assert list(made.sampler.mesh.devices.flat) == list(made.trainer.mesh.devices.flat)


def test_a_replica_over_two_processes_is_refused_with_a_size_that_is_not(monkeypatch):
    def process_count():
        return 8

    monkeypatch.setattr(roles.jax, "process_count", process_count)
    devices = tpu("v5p", 2, 4, 4)
    with pytest.raises(ShoalError, match=r"which have 4 devices each: set mesh.sampler_tensor=4$"):
        make_roles(MeshSection(fsdp=-1, sampler_tensor=8), devices)
    made = make_roles(MeshSection(fsdp=-1, sampler_tensor=4), devices)
    assert made.sampler.local.mesh.devices.shape == (1, 4)


def test_slices_may_give_some_of_their_devices():
    pod = tpu("v6e", 4, 4, slices=2)
    made = make_mesh(MeshSection(fsdp=8, dcn_data=2), pod).devices
    assert [{device.slice_index for device in copy.flat} for copy in made] == [{0}, {1}]
    made = make_mesh(MeshSection(fsdp=4, dcn_data=2), gpu("h200", 2, 8)).devices
    assert [{device.process_index for device in copy.flat} for copy in made] == [{0}, {1}]
    # Of a list of devices as many of each slice as the smallest gives.
    made = make_mesh(MeshSection(fsdp=-1, dcn_data=2), pod[:24]).devices
    assert made.shape == (2, 8, 1, 1, 1) and [
        {device.slice_index for device in copy.flat} for copy in made
    ] == [{0}, {1}]


@pytest.mark.parametrize(
    ("section", "text"),
    [
        (
            {"fsdp": 32},
            "these 32 devices are 2 slices, but mesh.dcn_data x mesh.dcn_fsdp is 1: set "
            "mesh.dcn_data=2 mesh.dcn_fsdp=1 (the slices exchange only gradients) or "
            "mesh.dcn_data=1 mesh.dcn_fsdp=2",
        ),
        (
            {"fsdp": 4, "dcn_data": 4},
            "are 2 slices, but mesh.dcn_data x mesh.dcn_fsdp is 4: set mesh.dcn_data=2 ",
        ),
        (
            {"trainer": "[0,1,2,3]", "dcn_data": 2},
            "are 1 slice, but mesh.dcn_data x mesh.dcn_fsdp is 2: leave both out",
        ),
    ],
)
def test_another_number_of_slices_is_refused(section, text):
    with pytest.raises(ShoalError) as caught:
        make_roles(MeshSection(**section), tpu("v6e", 4, 4, slices=2))
    assert text in str(caught.value)


def test_a_sampler_of_its_own_may_span_slices():
    """Replicas and copies of the reference are independent: each lies within a slice, however many
    a slice has."""
    made = make_roles(
        MeshSection(trainer="8", sampler="24", fsdp=8, sampler_tensor=4), tpu("v6e", 4, 4, slices=2)
    )
    for mesh, shape in ((made.sampler.mesh, (6, 4)), (made.reference.mesh, (3, 8, 1, 1, 1))):
        assert mesh.devices.shape == shape
        for copy in mesh.devices:
            assert len({device.slice_index for device in copy.flat}) == 1
    # one of them over both
    assert make_roles(
        MeshSection(trainer="8", sampler="24", fsdp=8, sampler_tensor=3), tpu("v6e", 4, 4, slices=2)
    ).sampler.mesh.devices.shape == (8, 3)


def test_a_reference_has_copies_where_its_devices_do_not_divide_the_model():
    section = MeshSection(trainer="2", sampler="6", fsdp=2)
    assert make_roles(section, jax.devices(), hidden_size=3584).reference.mesh.devices.shape == (
        3,
        2,
        1,
        1,
        1,
    )
    assert make_roles(section, jax.devices(), hidden_size=3072).reference.mesh.devices.shape == (
        1,
        6,
        1,
        1,
        1,
    )


def test_slices_are_outermost_on_their_axis():
    """Eight devices as two slices of four: neighbours on `fsdp` are of one slice, the copies of
    `data` of both."""
    mesh = make_mesh(MeshSection(data=2, fsdp=2, dcn_data=2), jax.devices())
    numbers = []
    for row in mesh.devices[..., 0, 0, 0]:
        numbers.append([device.id for device in row])
    assert dict(mesh.shape) == {
        "data": 4,
        "fsdp": 2,
        "expert": 1,
        "context": 1,
        "tensor": 1,
    }
    assert numbers == [[0, 1], [2, 3], [4, 5], [6, 7]]
    mesh = make_mesh(MeshSection(data=2, fsdp=2, dcn_fsdp=2), jax.devices())
    assert [[device.id for device in row] for row in mesh.devices[..., 0, 0, 0]] == [
        [0, 1, 4, 5],
        [2, 3, 6, 7],
    ]


@pytest.mark.parametrize(
    "text", ["x", "0", "-1", "0.0", "1.5", "[0,0]", "[-1]", "[a]", "[]", "nan", "1e9"]
)
def test_what_is_no_number_of_devices(text):
    with pytest.raises(
        ShoalError, match=r"expected a fraction up to 1.0, a number of devices, or a list"
    ):
        devices_asked("mesh.trainer", text, 8)


def test_all_roles_are_on_the_devices_of_the_trainer():
    there = jax.devices()
    made = make_roles(MeshSection(trainer="[0]", fsdp=-1), there)
    assert [
        list(role.mesh.devices.flat) for role in (made.trainer, made.sampler, made.reference)
    ] == [[there[0]]] * 3


@pytest.mark.parametrize(
    ("name", "devices", "changes", "pieces"),
    [
        ("llama3.1-70b", tpu("v5p", 2, 2, 2), {}, 4),
        ("llama3.1-8b", tpu("v6e", 1, 1), {}, 8),
        ("llama3.1-8b", tpu("v6e", 2, 4), {}, 0),
        ("llama3.1-8b", tpu("v6e", 1, 1), {"quantised": "int8"}, 1),
        ("llama3.1-8b", gpu("h200", 1, 1), {}, 1),
        # Experts' kernels read whole arrays.
        ("qwen3-30b-a3b", tpu("v6e", 2, 4), {}, 1),
    ],
)
def test_a_tpus_sampler_is_given_large_matrices_in_pieces(name, devices, changes, pieces):
    """Not where they may be the trainer's own arrays: frozen, or in float32; weights of 8 bits
    never are."""
    a = replace(model_named(name).architecture, **changes)
    role = make_roles(MeshSection(tensor=len(devices)), devices).sampler
    assert ffn_chunks(a, role, jnp.bfloat16) == pieces
    assert ffn_chunks(a, role, jnp.float32) == (pieces == 1)
