"""What does publication cost? A model of 1 GiB, from a trainer to four samplers on this machine, by
each channel.

    python benchmarks/publication.py [--channels memory,files,ray] [--workers 4] [--layers 16]
                                     [--repeat 3] [--no-pause]

memory: the samplers are simulated devices of the trainer's process. files, ray: they are processes
of their own. Of every figure the median over `--repeat` publications is printed, after a first one
that compiles; `copy` is one copy of the model's bytes to memory that was written before
(`numpy.copyto`), in the trainer's process between the publications.

    write      the trainer's publish()
    alone      a sampler's fetch(), verified by checksum, while the others do nothing
    together   the slowest fetch() of all samplers at once
    peak       the trainer's largest memory while it publishes, less that before, as a multiple of
               the largest tensor; /dev/shm and the samplers' devices apart
    copies     a sampler's memory while it holds a version and has fetched the next, less that
               before, over the model's bytes; of shared pages its share
    pause      by how much longer a sampler takes for its dispatches because it loads the next
               version on the way, while completions go on; beside it the median time of a dispatch
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from shoal.model.architecture import Architecture

GIB, KEEP = 2**30, 2
BEFORE, AFTER = 8, 4
"""How often a sampler is polled before it is told of the next version, and after."""


def architecture(layers: int) -> Architecture:
    """A Qwen3 of 1 GiB in float32 with 16 layers."""
    return Architecture(
        vocab_size=32768,
        hidden_size=1024,
        intermediate_size=3072,
        num_layers=layers,
        num_heads=16,
        num_kv_heads=8,
        head_dim=64,
        qk_norm=True,
    )


def held_bytes() -> int:
    """Bytes of this process's own, and its share of the shared memory that it has read."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()[1:]
    found = {}
    for name, _, rest in (line.partition(":") for line in lines):
        found[name] = int(rest.split()[0]) * 1024
    return found["Anonymous"] + found["Pss_Shmem"]


def anonymous() -> int:
    """Bytes of this process that no file stands for; shared memory is not among them."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields["RssAnon"].split()[0]) * 1024


@contextmanager
def peak() -> Iterator[list[int]]:
    """The most bytes that this process has beyond those at the start, in the list at the end."""
    found, before, done = [0], anonymous(), threading.Event()

    def watch() -> None:
        while not done.wait(0.002):
            found[0] = max(found[0], anonymous() - before)

    thread = threading.Thread(target=watch)
    thread.start()
    yield found
    done.set()
    thread.join()


def timed(call: Callable[[], Any]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


class Reader:
    """A sampler in a process of its own."""

    def __init__(self, layers: int) -> None:
        from shoal.config.sections.devices import MeshSection
        from shoal.mesh import make_roles
        from shoal.model.transformer import Model

        self.model, self.held = (
            Model(architecture(layers), make_roles(MeshSection(data=1)).sampler),
            None,
        )
        self.before = held_bytes()

    def fetch(self, manifest: Any) -> tuple[float, int]:
        """Seconds, and bytes held with the version before."""
        import jax

        started = time.perf_counter()
        params = jax.block_until_ready(manifest.read(self.model).result()())
        seconds, before = time.perf_counter() - started, self.held
        self.held = params
        held = held_bytes() - self.before
        del before
        return seconds, held

    def drop(self) -> None:
        self.held = None

    def pause(self, first: Any, second: Any) -> tuple[float, float]:
        """Seconds: the median of a dispatch, and those around a load beyond what their dispatches
        usually take. The load itself also waits for the dispatches that are under way, in which the
        sampler does not stand still."""
        from shoal.protocols import Load, SampleRequest, Submit
        from shoal.records import NoiseKey, SamplingParams
        from shoal.rollout.host import EngineHost
        from shoal.sampler.engine import Engine
        from shoal.sampler.programs import DECODE_CHUNK

        self.held, seconds, tokens = None, [], 0
        engine = Engine(
            self.model,
            slots=4,
            group_size=4,
            max_prompt_tokens=16,
            max_completion_tokens=1024,
            eos_ids=(),
        )
        host = EngineHost(lambda purpose, size: engine, shares_memory=False)
        request = SampleRequest(
            0,
            np.arange(1, 9, dtype=np.int32),
            4,
            NoiseKey(0, "train", 0, 0),
            SamplingParams(max_tokens=1024),
            version=0,
            exact=False,
        )
        host.handle(Load(first))
        host.handle(Submit([request]))
        for number in range(BEFORE + AFTER):
            if number == BEFORE:
                tokens = engine.counters["tokens"]
                host.handle(Load(second))
            seconds.append(timed(host.poll))
        assert engine.version == 1, "the next version was not loaded"
        usual = statistics.median(seconds[2:BEFORE])
        tokens = engine.counters["tokens"] - tokens
        return usual, sum(seconds[BEFORE:]) - usual * tokens / (4 * DECODE_CHUNK)


def serve(layers: int, link: Any) -> None:
    """A `Reader` behind a pipe."""
    reader = Reader(layers)
    while (call := link.recv()) is not None:
        link.send(getattr(reader, call[0])(*call[1]))


class Piped:
    """A `Reader` in another process."""

    def __init__(self, layers: int) -> None:
        context = multiprocessing.get_context("spawn")
        self.link, other = context.Pipe()
        self.process = context.Process(target=serve, args=(layers, other))
        self.process.start()

    def ask(self, name: str, *args: Any) -> Any:
        self.link.send((name, args))
        return self.link.recv()

    def close(self) -> None:
        self.link.send(None)
        self.process.join()


class Actor:
    """A `Reader` in a Ray actor."""

    def __init__(self, layers: int) -> None:
        import ray

        self.actor: Any = ray.remote(Reader).options(num_cpus=0).remote(layers)

    def ask(self, name: str, *args: Any) -> Any:
        import ray

        return ray.get(getattr(self.actor, name).remote(*args))

    def close(self) -> None:
        pass


class Trainer:
    """Weights that change, their publication, and copies to compare with."""

    def __init__(self, layers: int, mesh: Any) -> None:
        import jax

        from shoal.mesh import make_roles
        from shoal.model.parameters import param_specs
        from shoal.model.transformer import Model

        self.roles = make_roles(mesh)
        self.model, specs = (
            Model(architecture(layers), self.roles.sampler),
            param_specs(architecture(layers)),
        )
        random = np.random.default_rng(0)
        self.params = jax.tree.map(
            lambda spec: jax.device_put(
                random.standard_normal(spec.shape, np.float32) * spec.stddev,
                spec.sharding(self.roles.trainer),
            ),
            specs,
        )
        self.bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(self.params))
        self.largest = max(leaf.nbytes for leaf in jax.tree.leaves(self.params))
        self.copies: list[float] = []

    def update(self) -> None:
        import jax

        self.params = jax.block_until_ready(jax.tree.map(lambda leaf: leaf * 1.001, self.params))

    def copy(self) -> None:
        source = np.ones(self.bytes, np.uint8)
        target = np.ones_like(source)
        self.copies.append(timed(lambda: np.copyto(target, source)))

    def publish(self, store: Any, version: int) -> tuple[float, int]:
        """Seconds, and the peak in bytes."""
        self.update()
        with peak() as found:
            seconds = timed(lambda: store.put(version, self.params))
        store.drop([number for number in store.versions if number <= version - KEEP])
        return seconds, found[0]


def line(
    name: str,
    trainer: Trainer,
    writes: list[tuple[float, int]],
    alone: list[float],
    together: list[float],
    copies: float,
    pauses: list[tuple[float, float]],
) -> None:
    copy, write = statistics.median(trainer.copies), statistics.median(one for one, _ in writes)

    def shown(seconds: list[float]) -> str:
        if seconds:
            return f"{statistics.median(seconds):9.2f} ({statistics.median(seconds) / copy:4.1f}x)"
        return " " * 17

    last = f"  {pauses[0][1]:.2f} s, a dispatch {pauses[0][0]:.2f} s" if pauses else ""
    print(
        f"{name:7s}{trainer.bytes / GIB:5.2f} GiB  {copy:6.2f} "
        f"{shown([write])}{shown(alone)}{shown(together)} "
        f"{max(one for _, one in writes) / trainer.largest:6.2f} {copies:7.2f}{last}",
        flush=True,
    )


def head() -> None:
    print(
        f"{'seconds, and over copy':23s}{'copy':>6s}{'write':>17s}{'alone':>17s}{'together':>17s}"
        f"{'peak':>7s}{'copies':>8s}  pause"
    )


def measure_memory(args: argparse.Namespace) -> None:
    """Samplers that are devices of the trainer's process: what they are given is copied by
    `publish`."""
    import jax

    from shoal.config.sections.devices import MeshSection
    from shoal.weights.store import MemoryStore

    trainer = Trainer(args.layers, MeshSection(trainer="1", sampler=str(args.workers)))
    store = MemoryStore(trainer.model, in_parts=True)
    hosts = [trainer.model.on(role) for role in trainer.roles.hosts]
    before = anonymous()
    trainer.publish(store, 0)
    writes, fetches = [], []
    for version in range(1, args.repeat + 1):
        trainer.copy()
        store.drop(list(store.versions))
        seconds, found = trainer.publish(store, version)
        # what the samplers hold is theirs
        writes.append((seconds, found - args.workers * trainer.bytes))
        manifest = store.versions[version]
        fetches += [
            timed(
                lambda model=model, manifest=manifest: jax.block_until_ready(
                    manifest.read(model).result()()
                )
            )
            for model in hosts
        ]
    trainer.publish(store, args.repeat + 1)  # beside the last
    held = (anonymous() - before) / args.workers
    line("memory", trainer, writes, fetches, [max(fetches)], held / trainer.bytes, [])


def measure_stored(args: argparse.Namespace) -> None:
    from shoal.config.sections.devices import MeshSection
    from shoal.weights.publish_folder import default_folder
    from shoal.weights.store import FileStore

    with ExitStack() as stack:
        if args.part == "ray":
            import ray

            ray.init(
                address="local",
                num_cpus=2,
                log_to_driver=False,
                logging_level="ERROR",
                include_dashboard=False,
                object_store_memory=int((KEEP + 2) * 1.1 * GIB),
            )
            stack.callback(ray.shutdown)
        trainer = Trainer(args.layers, MeshSection(data=1))
        if args.part == "ray":
            from shoal.weights.ray_store import RayStore

            store: Any = RayStore(trainer.model)
        else:
            store = FileStore(default_folder(trainer.bytes), trainer.model)
        stack.callback(store.close)
        readers: list[Any] = [
            (Actor if args.part == "ray" else Piped)(args.layers) for _ in range(args.workers)
        ]
        for reader in readers:
            stack.callback(reader.close)
        pool = stack.enter_context(ThreadPoolExecutor(len(readers)))
        writes, alone, together, held = [], [], [], 0
        for version in range(args.repeat + 1):
            write = trainer.publish(store, version)
            stored = store.versions[version]
            first = readers[0].ask("fetch", stored)
            trainer.copy()
            found = list(
                pool.map(lambda reader, stored=stored: reader.ask("fetch", stored), readers)
            )
            if version:  # the first compiles
                writes.append(write)
                alone.append(first[0])
                together.append(max(seconds for seconds, _ in found))
                # which still hold the version before
                held = max([held, *(size for _, size in found[1:])])
        pauses = []
        if not args.no_pause:
            for reader in readers[1:]:
                reader.ask("drop")
            pauses.append(
                readers[0].ask("pause", *(store.versions[args.repeat - back] for back in (1, 0)))
            )
        line(args.part, trainer, writes, alone, together, held / trainer.bytes, pauses)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--channels", default="memory,files,ray")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--no-pause", action="store_true")
    parser.add_argument("--part", default="", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.part:
        measure_memory(args) if args.part == "memory" else measure_stored(args)
        return
    head()
    for channel in args.channels.split(","):
        flags = (
            f"{os.environ.get('XLA_FLAGS', '')} "
            f"--xla_force_host_platform_device_count={args.workers + 1}"
        )
        # What a run sets for itself: large pages, which memory that is written anew comes in.
        environment = (
            {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1", "JAX_PLATFORMS": "cpu"}
            | os.environ
            | ({"XLA_FLAGS": flags} if channel == "memory" else {})
        )
        subprocess.run(
            [sys.executable, __file__, "--part", channel, *(argv or sys.argv[1:])],
            env=environment,
            check=True,
        )


if __name__ == "__main__":
    main()
