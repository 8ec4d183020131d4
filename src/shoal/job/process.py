"""A run in several processes: its console, and checks that all processes have the same settings,
versions, files and weights."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax

from shoal.buckets import RUNS, area_of
from shoal.config.key import values_of
from shoal.config.sections.devices import MeshSection
from shoal.config.train import Config
from shoal.files import check_local, explain_write_errors, nearest_folder
from shoal.job.fingerprint import machine
from shoal.mesh import World
from shoal.mesh.processes import NO_SECTION, find_processes, join
from shoal.records import ShoalError
from shoal.report.console import Console
from shoal.weights.source import ModelSource

SHARED_SECONDS = 20.0
"""Seconds that a file in a shared folder may take to appear on other hosts."""

SAME = ("python", "shoal", "jax", "jaxlib", "numpy", "optax", "orbax-checkpoint", "tokenizers")
"""The versions, among what `machine` returns, that must be equal in all processes."""


def open_console(config: Config) -> tuple[Config, Console]:
    """Returns (configuration, console): the configuration, with the number of processes and of this
    one as the environment gives them, and the console, which prints only in process 0; other
    processes' text goes to the null device. Waits for no other process. ShoalError if the keys of
    `mesh` about processes are wrong."""
    config = replace(config, mesh=find_processes(config.mesh))
    is_main = config.mesh.process <= 0  # -1: the run has one process
    return config, Console(None if is_main else open(os.devnull, "w"))


def without_process_keys(config: Config) -> Config:
    """Returns the configuration without the keys that differ between the processes of a run:
    `mesh.coordinator`, `mesh.processes` and `mesh.process`."""
    return replace(config, mesh=replace(config.mesh, **NO_SECTION))


def open_world(process_mesh: MeshSection, config: Config, run: Path | None) -> World:
    """Joins the processes of a run and returns their world. `process_mesh`: the mesh section that
    says how many processes there are, and which of them this one is. `config`: the configuration
    without these keys. `run`: the folder of a resumed run, else None.

    A run of one process is not checked. ShoalError, the same in all processes, if their
    configurations, versions, devices or run folders differ.
    """
    world = join(process_mesh)
    if world.count == 1:
        return world
    facts = machine()
    check_same(world, "versions", {name: facts[name] for name in SAME})
    devices = jax.local_devices()
    device_facts = {"number of devices": len(devices), "kind of devices": devices[0].device_kind}
    check_same(world, "devices", device_facts)
    values = {key: repr(value) for key, value in values_of(config).items()}
    check_same(world, "configuration", values)
    base = check_local(config.base_output_directory, "base_output_directory", RUNS)
    check_shared(world, run or base, run is not None)
    return world


def check_same(
    world: World,
    what: str,
    mine: Mapping[str, Any],
    cure: str = "start all of them in the same way",
) -> None:
    """Raises ShoalError, in all processes, unless all of them pass the same values in `mine`; the
    error names the first difference and its process. Waits until all have called it; with a single
    process returns at once. `what`: what the values are, for the error; `cure`: what the error
    recommends. `mine`: name -> a value that JSON can hold."""
    if world.count == 1:
        return
    of_processes = world.exchange_json(what, mine)
    first = of_processes[0]
    for process in range(1, world.count):
        other = of_processes[process]
        different = []
        for name in {**first, **other}:
            if first.get(name) != other.get(name):
                different.append(name)
        if not different:
            continue
        name = different[0]
        more = f" ({len(different) - 1} more differ)" if len(different) > 1 else ""
        raise ShoalError(
            f"processes differ in {what}: {world.names[process]} has {name} {other.get(name)}, "
            f"{world.names[0]} has {first.get(name)}{more}; {cure}"
        )


def check_same_model(world: World, what: str, key: str, spec: ModelSource) -> None:
    """Raises ShoalError unless all processes have the same weights, tokenizer and chat template,
    because each reads its own files, and only a part of the weights. Reads the tokenizer and
    samples of the weight files. `what`: the model's name in errors, like `the teacher`; `key`: the
    configuration key that names the model. Waits until all processes have called it; a single
    process reads nothing and returns at once."""
    if world.count == 1:
        return
    cure = f"give every host the same files at {key}"

    def tokenizer_facts() -> Mapping[str, Any]:
        return spec.tokenizer.facts()

    tokenizer = _read_everywhere(world, f"the tokenizer of {what}", tokenizer_facts)
    check_same(world, f"the tokenizer of {what}", tokenizer, cure)
    weights = _read_everywhere(world, f"the weights of {what}", spec.digests)
    check_same(world, f"the weights of {what}", weights, cure)


def _read_everywhere(
    world: World, what: str, read: Callable[[], Mapping[str, Any]]
) -> Mapping[str, Any]:
    """Calls `read`, as all processes do at this point, and returns what it returned here. If it
    raises ShoalError in one process, all raise that error, because the others would wait for the
    failed process for ever. `what`: what is read, for the message of the exchange."""
    facts: Mapping[str, Any] = {}
    fault = ""
    try:
        facts = read()
    except ShoalError as error:
        fault = str(error)
    faults = world.exchange_json(f"whether {what} can be read", fault)
    for process, text in enumerate(faults):
        if text:
            raise ShoalError(f"{world.names[process]}: {text}")
    return facts


def check_shared(world: World, folder: Path, resumed: bool) -> None:
    """Raises ShoalError unless all processes share a folder, and all or none of them resume a run.
    Process 0 writes a file into `folder` (or the nearest folder above it that exists), which the
    others must see within SHARED_SECONDS, and removes it. Waits until all have called it. Both
    faults have the same text, which says that the folder is not shared. `resumed`: whether this
    process resumes a run."""
    folder = nearest_folder(folder / "any")  # begins above its argument
    mine = {"name": f".shoal-{secrets.token_hex(8)}", "resumed": resumed}
    first = world.exchange_json("the run folder", mine)[0]
    probe = folder / first["name"]
    try:
        if world.is_main:
            with explain_write_errors(folder):
                probe.touch()
        world.exchange("a file in the run folder", b"")
        deadline = time.monotonic() + SHARED_SECONDS
        is_seen = probe.exists()
        while not is_seen and time.monotonic() < deadline:
            time.sleep(0.5)
            is_seen = probe.exists()
        does_the_same = resumed == first["resumed"]  # both resume a run, or neither
        sees = world.exchange_json("what is seen of it", is_seen and does_the_same)
    finally:
        if world.is_main:
            probe.unlink(missing_ok=True)
    blind = [name for process, name in enumerate(world.names) if not sees[process]]
    if blind:
        raise ShoalError(
            f"{folder} is not shared: {', '.join(blind)} does not see what {world.names[0]} writes "
            f"there; set {'XDG_CACHE_HOME' if area_of(folder) else 'base_output_directory'} to a "
            "folder that all hosts have"
        )
