"""Parameters between files and devices: every row is read once, by one process, and comes back."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tiny_models import write_model

from shoal.config.sections.devices import MeshSection
from shoal.mesh import make_roles
from shoal.model.families import architecture_of
from shoal.model.parameters import ParamSpec
from shoal.records import ShoalError
from shoal.weights import huggingface
from shoal.weights import layout as weight_layout
from shoal.weights.checksum import checksum
from shoal.weights.layout import ParamLayout
from shoal.weights.tensor_files import StoredParameter, read_header, with_scales, write_file

LAYER, EXPERT = ("layer",), ("layer", "expert")
EXPERTS = ("layers", None, "embed", "mlp")
PARAMETERS = {
    "a kernel": ParamSpec((3, 8, 24), ("layers", "embed", "mlp"), indices=LAYER, transposed=True),
    "a kernel back": ParamSpec(
        (4, 24, 8), ("layers", "mlp", "embed"), indices=LAYER, transposed=True
    ),
    "an odd vocabulary": ParamSpec((37, 8), ("vocab", "embed")),
    "a head": ParamSpec((8, 48), ("embed", "vocab"), transposed=True),
    "norms": ParamSpec((3, 8), ("layers", "embed"), indices=LAYER),
    "one norm": ParamSpec((8,), ("embed",)),
    "experts": ParamSpec((3, 5, 8, 24), EXPERTS, indices=EXPERT, transposed=True),
    "experts on devices of their own": ParamSpec(
        (3, 4, 8, 24), ("layers", "mlp", "embed", None), indices=EXPERT, transposed=True
    ),
    "experts by number": ParamSpec(
        (3, 4, 8, 24), ("layers", "experts", "embed", "mlp"), indices=EXPERT, transposed=True
    ),
    "norms of experts": ParamSpec((3, 4, 8), ("layers", "mlp", "embed"), indices=EXPERT),
    "experts in one tensor a layer": ParamSpec(
        (3, 5, 8, 24), EXPERTS, indices=LAYER, transposed=True
    ),
    "a tensor of four dimensions": ParamSpec((2, 9, 8, 6), (None, None, "embed", "mlp")),
}


class Stored:
    """Random values, and how often each row was read."""

    def __init__(self, declared: ParamSpec, dtype: Any):
        shape = (*declared.index_shape, *declared.tensor_shape)
        values = np.random.default_rng(0).standard_normal(shape)
        values.flat[0] = 2.0**-20  # subnormal in float16
        self.values = values.astype(dtype)
        self.reads = np.zeros(shape[: len(declared.indices) + 1], int)
        self.shape, self.dtype = shape, self.values.dtype

    by_columns = None

    def read(self, index: list[slice]) -> np.ndarray:
        self.reads[tuple(index)] += 1
        return self.values[tuple(index)].copy()


def check(name: str, mesh: MeshSection, source: Any, target: Any) -> np.ndarray:
    """Spreads a parameter and returns how often each of its rows was read; compares this process's
    shards."""
    declared = PARAMETERS[name]
    layout = ParamLayout.of(declared, make_roles(mesh).trainer)
    stored: Any = Stored(declared, source)
    array = weight_layout.load_sharded(stored, layout, target)
    wanted = declared.transpose(stored.values).astype(target)
    assert (
        array.shape == declared.shape
        and array.dtype == target
        and array.sharding == layout.sharding
    )
    for shard in array.addressable_shards:
        np.testing.assert_array_equal(shard.data, wanted[shard.index])
    if not layout.mesh.is_multi_process:
        found = np.zeros(stored.shape, target)
        for index in np.ndindex(declared.index_shape):
            for row, values in weight_layout.collect(array, layout, index, target):
                found[index][row : row + len(values)] += values
        np.testing.assert_array_equal(found, stored.values.astype(target))
    return stored.reads


def small_windows() -> None:
    weight_layout.SMALL_BYTES, weight_layout.WINDOW_BYTES = 0, 200


MESHES = {"8x1": MeshSection(fsdp=8), "2x2x2": MeshSection(data=2, fsdp=2, tensor=2)}


@pytest.mark.parametrize("name", PARAMETERS)
def test_every_row_is_read_once_and_comes_back(monkeypatch, name):
    monkeypatch.setattr(weight_layout, "SMALL_BYTES", 0)
    monkeypatch.setattr(weight_layout, "WINDOW_BYTES", 200)
    reads = check(name, MESHES["2x2x2"], np.float16, np.dtype(np.float32))
    assert (reads == 1).all()


@pytest.mark.parametrize("name", ["a kernel", "experts", "experts in one tensor a layer"])
@pytest.mark.parametrize(
    ("mesh", "window"),
    [
        (MeshSection(fsdp=8), 200),
        (MeshSection(fsdp=8), 1 << 20),
        (MeshSection(tensor=8, fsdp=1), 200),
    ],
    ids=["fsdp", "whole", "tensor"],
)
def test_other_meshes_and_windows(monkeypatch, mesh, window, name):
    monkeypatch.setattr(weight_layout, "SMALL_BYTES", 0)
    monkeypatch.setattr(weight_layout, "WINDOW_BYTES", window)
    assert (check(name, mesh, np.float32, np.dtype(jnp.bfloat16)) == 1).all()


@pytest.mark.parametrize(
    "mesh", [MeshSection(fsdp=2, tensor=2, expert=2), MeshSection(2, expert=4)]
)
def test_experts_on_devices_of_their_own(monkeypatch, mesh):
    monkeypatch.setattr(weight_layout, "SMALL_BYTES", 0)
    monkeypatch.setattr(weight_layout, "WINDOW_BYTES", 700)
    assert (check("experts by number", mesh, np.float32, np.dtype(jnp.bfloat16)) == 1).all()


@pytest.mark.parametrize("small_bytes", [0, 1 << 20], ids=["in windows", "on the host"])
@pytest.mark.parametrize("name", ["experts", "experts on devices of their own"])
def test_a_parameter_of_four_dimensions_comes_back_from_a_file(
    tmp_path, monkeypatch, name, small_bytes
):
    """A tensor for each expert of each layer: read, spread, summed, written and read again."""
    monkeypatch.setattr(weight_layout, "SMALL_BYTES", small_bytes)
    monkeypatch.setattr(weight_layout, "WINDOW_BYTES", 700)
    declared = replace(PARAMETERS[name], name="model.layers.{layer}.experts.{expert}.up.weight")
    num_layers, num_experts, rows, columns = declared.shape
    values = np.random.default_rng(0).standard_normal(declared.shape).astype(np.float32)
    tensors = {}
    for layer in range(num_layers):
        for expert in range(num_experts):
            tensor = np.ascontiguousarray(
                values[layer, expert].T
            )  # files hold kernels as [out, in]
            tensors[f"model.layers.{layer}.experts.{expert}.up.weight"] = tensor
    save_file(tensors, tmp_path / "model.safetensors")
    role = make_roles(MESHES["2x2x2"]).trainer

    def read(file: Path) -> jax.Array:
        stored = huggingface.check_tensors(read_header(file), [declared], str(file))
        (array,) = huggingface.read_tensors(stored, [declared], role, np.float32)
        return array

    array = read(tmp_path / "model.safetensors")
    assert array.sharding == declared.sharding(role) and declared.weight_decay
    np.testing.assert_array_equal(array, values)
    assert checksum([array]) == checksum([values]) != checksum([values[:, ::-1]])
    written = list(huggingface.output_tensors([array], [declared]))
    assert [tensor.shape for tensor in written] == [(columns, rows)] * len(tensors)
    write_file(tmp_path / "again.safetensors", written, np.dtype(np.float32))
    again = load_file(tmp_path / "again.safetensors")
    assert again.keys() == tensors.keys()
    for tensor_name, tensor in tensors.items():
        np.testing.assert_array_equal(again[tensor_name], tensor)
    del tensors["model.layers.1.experts.2.up.weight"]
    save_file(tensors, tmp_path / "short.safetensors")
    with pytest.raises(ShoalError, match=r"missing: model\.layers\.1\.experts\.2\.up\.weight\."):
        read(tmp_path / "short.safetensors")


@pytest.mark.parametrize("rows", [1, 9, 16, 17])
@pytest.mark.parametrize("kind", ["a vector", "a matrix", "scaled blocks"])
def test_devices_beyond_the_last_row_read_nothing_from_the_file(tmp_path, monkeypatch, kind, rows):
    """Of 9 rows on 8 devices each has a run of 2: three have none, as 64 of 192 devices have none
    of 128 rows."""
    monkeypatch.setattr(weight_layout, "SMALL_BYTES", 0)
    random = np.random.default_rng(0)
    shape = (rows,) if kind == "a vector" else (rows, 6)
    values = random.standard_normal(shape).astype(np.float32)
    tensors = {"weight": values}
    if kind == "scaled blocks":
        tensors["weight"] = values.astype(jnp.float8_e4m3fn)
        scales = random.standard_normal((-(-rows // 4), 2)).astype(np.float32)
        tensors["weight_scale_inv"] = scales
        values = (
            tensors["weight"].astype(np.float32) * scales.repeat(4, 0)[:rows].repeat(4, 1)[:, :6]
        )
    save_file(tensors, tmp_path / "model.safetensors")
    stored = with_scales(read_header(tmp_path / "model.safetensors"), (4, 4))["weight"]
    declared = ParamSpec(shape, (None,) * len(shape))
    layout = ParamLayout.of(declared, make_roles(MeshSection(fsdp=8)).trainer)
    found = weight_layout.load_sharded(StoredParameter([stored]), layout, np.float32)
    np.testing.assert_array_equal(found, values)


def test_windows_are_of_few_sizes():
    role = make_roles(MeshSection()).trainer
    layout = ParamLayout.of(
        ParamSpec((28, 64, 96), ("layers", "embed", "mlp"), indices=LAYER, transposed=True), role
    )
    windows = list(layout.windows(1024))
    assert (
        len({(layers.stop - layers.start, rows.stop - rows.start) for layers, rows in windows}) == 1
    )
    for layers, _ in windows:
        assert (layers.stop - layers.start) * 64 * 96 * 1024 <= weight_layout.WINDOW_BYTES


TWO = """
import sys, jax
jax.distributed.initialize(sys.argv[1], 2, int(sys.argv[2]))
import numpy as np
import test_layout
test_layout.small_windows()
for name in ("a kernel", "an odd vocabulary", "norms", "experts"):
    reads = test_layout.check(name, test_layout.MESHES["2x2x2"], np.float16, np.dtype(np.float32))
    print("reads", "".join(map(str, reads.flat)))
"""


@pytest.mark.system
def test_two_processes_read_each_row_once_between_them():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    folders = (
        Path(huggingface.__file__).parents[2],
        Path(__file__).parent,
        Path(__file__).parents[1] / "support",
    )
    env = {
        **os.environ,
        "XLA_FLAGS": os.environ["XLA_FLAGS"].replace("device_count=8", "device_count=4"),
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": os.pathsep.join(map(str, folders)),
    }
    both = []
    for number in range(2):
        both.append(
            subprocess.Popen(
                [sys.executable, "-c", TWO, address, str(number)],
                env=env,
                text=True,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
        )
    outputs = [process.communicate(timeout=120) for process in both]
    assert [process.returncode for process in both] == [0, 0], outputs
    reads = []
    for out, _ in outputs:
        reads.append(
            [
                np.array([*line.split()[1]], int)
                for line in out.splitlines()
                if line.startswith("reads")
            ]
        )
    assert len(reads[0]) == 4
    for one, other in zip(*reads, strict=True):
        assert (one + other == 1).all() and one.any() and other.any()


def test_a_file_cut_short_while_it_is_read_is_named_with_the_byte(tmp_path):
    folder = write_model(tmp_path)
    down = huggingface.open_tensors(folder, architecture_of(folder))[
        "model.layers.0.mlp.down_proj.weight"
    ]
    file, last = folder / "model.safetensors", down.tensors[1]
    os.truncate(file, last.offset + 100)
    with pytest.raises(ShoalError) as error:
        down.read([slice(0, 2), slice(0, 32)])
    assert str(error.value) == (
        f"{file} ends at byte {last.offset + 100}, within the tensor "
        f"model.layers.1.mlp.down_proj.weight: bytes up to {last.offset + 32 * 48 * 4} were "
        "expected. Download it again."
    )
    file.unlink()
    with pytest.raises(
        ShoalError, match=rf"cannot be read at byte {last.offset}, in the tensor .*No such file"
    ):
        down.read([slice(1, 2), slice(0, 32)])
