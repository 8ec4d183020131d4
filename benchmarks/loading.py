"""What do loading and converting a large checkpoint take, in seconds and in memory of the host?

    python benchmarks/loading.py FOLDER [--layers 16] [--window-mib 32]

Writes a synthetic checkpoint of Llama 3.1 8B's widths into FOLDER unless it is there (bfloat16,
five shards; 16 layers are 9.1 GB), then in processes of their own: reads its files plainly; loads
it in bfloat16 onto 8 simulated devices, in one process and in two of 4 devices; converts it to
MaxText's layout and back. `beyond` is the largest resident memory of a process less its arrays, the
interpreter and the libraries included; `read` is how often the bytes of the tensors were read by
all processes together: exactly once, or the line says so.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from shoal.weights.tensor_files import DTYPES, read_header

GIB = 2**30


def make_checkpoint(folder: Path, layers: int) -> None:
    import jax
    import ml_dtypes
    import numpy as np

    from shoal.model.architecture import Architecture, RopeScaling
    from shoal.model.parameters import param_specs
    from shoal.weights import huggingface
    from shoal.weights.tensor_files import OutputTensor

    scaling = RopeScaling("llama3", 8.0, 1.0, 4.0, 8192)
    a = Architecture(128256, 4096, 14336, layers, 32, 8, 128, 500000.0, scaling, norm_eps=1e-5)
    numbers = np.random.default_rng(0).standard_normal(1 << 24).astype(ml_dtypes.bfloat16)

    def tensor(name: str, number: int, shape: tuple[int, ...]) -> OutputTensor:
        def rows(_: Any) -> Iterator[tuple[int, np.ndarray]]:
            columns = math.prod(shape[1:])
            step = numbers.size // 2 // columns
            for row in range(0, shape[0], step):
                height, start = (
                    min(step, shape[0] - row),
                    (row + 997 * number) % (numbers.size // 2),
                )
                yield row, numbers[start : start + height * columns].reshape(height, *shape[1:])

        return OutputTensor(name, shape, rows)

    specs = jax.tree.leaves(param_specs(a))
    size = sum(math.prod(spec.shape) for spec in specs) * 2
    tensors = [
        tensor(name, number, spec.tensor_shape)
        for spec in specs
        for number, name in enumerate(spec.names_by_index.values())
    ]
    huggingface.save(folder, tensors, a, dtype="bfloat16", shard_bytes=int(size / 4.8))


def peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIB


def load(folder: Path, address: str, processes: int, number: int, window: int) -> dict[str, Any]:
    import jax

    if processes > 1:
        jax.distributed.initialize(address, processes, number)
    import jax.numpy as jnp

    from shoal.config.sections.devices import MeshSection
    from shoal.mesh import make_roles
    from shoal.model.families import architecture_of
    from shoal.weights import huggingface
    from shoal.weights import layout as weight_layout
    from shoal.weights.tensor_files import StoredTensor

    weight_layout.WINDOW_BYTES, read = window << 20, []
    plain_read = StoredTensor.read

    def counted(self: StoredTensor, start: int, values: Any) -> None:
        first = self.offset + start * values[0].nbytes
        read.append((self.file.name, first, first + values.nbytes))
        plain_read(self, start, values)

    StoredTensor.read = counted
    role = make_roles(MeshSection(fsdp=-1)).trainer
    started = time.perf_counter()
    cpu = time.process_time()
    params = jax.block_until_ready(
        huggingface.load(folder, architecture_of(folder), role, jnp.bfloat16)
    )
    seconds, cpu = time.perf_counter() - started, time.process_time() - cpu
    arrays = sum(
        shard.data.nbytes for leaf in jax.tree.leaves(params) for shard in leaf.addressable_shards
    )
    return {"seconds": seconds, "cpu": cpu, "peak": peak(), "arrays": arrays / GIB, "read": read}


def convert(source: Path, target: Path, to: Any) -> dict[str, Any]:
    from shoal.commands.convert import convert
    from shoal.config.commands import ConvertConfig

    started, cpu = time.perf_counter(), time.process_time()
    tokenizer = str(source.parent / "hf") if to == "huggingface" else ""
    convert(
        ConvertConfig(
            source=str(source), to=str(target), format=to, tokenizer=tokenizer, dtype="bfloat16"
        )
    )
    return {
        "seconds": time.perf_counter() - started,
        "cpu": time.process_time() - cpu,
        "peak": peak(),
        "arrays": 0.0,
    }


def in_processes(words: list[list[str]], devices: int) -> list[dict[str, Any]]:
    """The results of this script with other arguments, each in a process, all at once."""
    env = {
        **os.environ,
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
        "JAX_PLATFORMS": "cpu",
    }
    running = []
    for one in words:
        running.append(
            subprocess.Popen(
                [sys.executable, __file__, *one], env=env, stdout=subprocess.PIPE, text=True
            )
        )
    return [json.loads(process.communicate()[0].splitlines()[-1]) for process in running]


def read_plainly(folder: Path) -> tuple[float, int]:
    buffer, started, size = bytearray(32 << 20), time.perf_counter(), 0
    for file in sorted(folder.glob("*.safetensors")):
        with open(file, "rb", buffering=0) as stream:
            while count := stream.readinto(buffer):
                size += count
    return time.perf_counter() - started, size


def times_read(folder: Path, results: list[dict[str, Any]]) -> str:
    read = sorted(tuple(one) for result in results for one in result["read"])
    wanted = sorted(
        (file.name, t.offset, t.offset + math.prod(t.shape) * DTYPES[t.dtype].itemsize)
        for file in folder.glob("*.safetensors")
        for t in read_header(file).values()
    )

    def joined(runs: list) -> list:
        out: list = []
        for file, start, stop in runs:
            if out and out[-1][0] == file and out[-1][2] == start:
                out[-1] = (file, out[-1][1], stop)
            else:
                out.append((file, start, stop))
        return out

    return "once" if joined(read) == joined(wanted) else "NOT ONCE"


def values_of(tensor: Any) -> bytes:
    with open(tensor.file, "rb") as stream:
        stream.seek(tensor.offset)
        return stream.read(2 * math.prod(tensor.shape))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--window-mib", type=int, default=32)
    parser.add_argument("--part", nargs="+", default=[], help=argparse.SUPPRESS)
    options = parser.parse_args()
    folder, (name, *rest) = options.folder / "hf", options.part or [""]
    if name == "load":
        print(json.dumps(load(folder, rest[0], int(rest[1]), int(rest[2]), options.window_mib)))
        return
    if name == "convert":
        print(json.dumps(convert(Path(rest[0]), Path(rest[1]), rest[2])))
        return
    if not folder.is_dir():
        make_checkpoint(folder, options.layers)
    seconds, size = read_plainly(folder)
    print(f"{size / 1e9:.1f} GB in {len([*folder.glob('*.safetensors')])} files\n")
    print(f"{'':34}{'seconds':>9}{'CPU s':>8}{'peak GiB':>10}{'arrays':>8}{'beyond':>8}  read")
    print(f"{'plain read of the files':34}{seconds:9.1f}")

    def line(what: str, results: list[dict[str, Any]], read: str = "") -> None:
        worst = max(results, key=lambda result: result["peak"] - result["arrays"])
        seconds, cpu = max(r["seconds"] for r in results), sum(r["cpu"] for r in results)
        print(
            f"{what:34}{seconds:9.1f}{cpu:8.1f}"
            f"{worst['peak']:10.2f}{worst['arrays']:8.2f}{worst['peak'] - worst['arrays']:8.2f}  "
            f"{read}",
            flush=True,
        )

    common = [str(options.folder), "--window-mib", str(options.window_mib), "--part"]
    for processes in (1, 2):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{free.getsockname()[1]}"
        results = in_processes(
            [
                [*common, "load", address, str(processes), str(number)]
                for number in range(processes)
            ],
            8 // processes,
        )
        what = f"load, {processes} x {8 // processes} devices" + " (each process)" * (processes > 1)
        line(what, results, times_read(folder, results))
    items, back = options.folder / "maxtext", options.folder / "back"
    for what, source, target, to in (
        ("convert to MaxText's layout", folder, items, "maxtext"),
        ("convert back", items, back, "huggingface"),
    ):
        line(what, in_processes([[*common, "convert", str(source), str(target), to]], 1))
    both = []
    for place in (folder, back):
        both.append(
            {
                name: tensor
                for file in place.glob("*.safetensors")
                for name, tensor in read_header(file).items()
            }
        )
    changed = {
        name.split(".")[-2]
        for name, tensor in both[0].items()
        if name not in both[1] or values_of(tensor) != values_of(both[1][name])
    }
    # Queries are divided by the square root of 128 in MaxText's layout, which rounds bfloat16 once
    # more.
    others = ", ".join(sorted(changed - {"q_proj"})) or "none but the queries"
    print(f"\nafter both conversions, tensors that changed: {others}")


if __name__ == "__main__":
    main()
