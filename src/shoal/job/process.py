"""A run in several processes: its console, and the checks that all of them do the same with the
same."""

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
from shoal.config.key import get_value, keys_of
from shoal.config.train import Config
from shoal.files import check_local, nearest_folder, writing
from shoal.job.fingerprint import machine
from shoal.mesh import World
from shoal.mesh.processes import NO_SECTION, find_processes, join
from shoal.records import ShoalError
from shoal.report.console import Console
from shoal.weights.source import ModelSource

SHARED_SECONDS = 20.0
"""How long a file may take to appear on the other hosts of a shared folder."""

SAME = ("python", "shoal", "jax", "jaxlib", "numpy", "optax", "orbax-checkpoint", "tokenizers")
"""Versions that must be equal, of those that `machine` gives."""


def open_console(config: Config) -> tuple[Config, Console]:
    """The configuration with the processes that the environment names, and the console: process 0
    prints."""
    config = replace(config, mesh=find_processes(config.mesh))
    return config, Console(open(os.devnull, "w") if config.mesh.process > 0 else None)


def open_world(config: Config, run: Path | None) -> tuple[World, Config]:
    """The processes of a run, together, and its configuration without the keys that are a process's
    own. `run`: the folder of a resumed run.

    ShoalError, the same in all, where configuration, versions, devices or the run folder are not
    the same.
    """
    world, config = join(config.mesh), replace(config, mesh=replace(config.mesh, **NO_SECTION))
    if world.count > 1:
        devices = jax.local_devices()
        check_same(
            world,
            "versions",
            {name: version for name, version in machine().items() if name in SAME},
        )
        check_same(
            world,
            "devices",
            {"number of devices": len(devices), "kind of devices": devices[0].device_kind},
        )
        check_same(
            world, "configuration", {key: repr(get_value(config, key)) for key in keys_of(Config)}
        )
        base = check_local(config.base_output_directory, "base_output_directory", RUNS)
        check_shared(world, run or base, run is not None)
    return world, config


def check_same(
    world: World, what: str, mine: Mapping[str, Any], cure: str = "start all of them alike"
) -> None:
    """ShoalError, naming the first difference and its process, unless all processes have the same
    values."""
    if world.count == 1:
        return
    first, *others = world.exchange_json(what, mine)
    for number, other in enumerate(others, start=1):
        if different := [name for name in {**first, **other} if first.get(name) != other.get(name)]:
            name = different[0]
            more = f" ({len(different) - 1} more differ)" if len(different) > 1 else ""
            raise ShoalError(
                f"processes differ in {what}: {world.names[number]} has {name} {other.get(name)}, "
                f"{world.names[0]} has {first.get(name)}{more}; {cure}"
            )


def check_same_model(world: World, what: str, key: str, spec: ModelSource) -> None:
    """ShoalError unless all processes have the same weights, tokenizer and chat template: each
    reads files of its own, of the weights a part. `key`: what names the model."""
    if world.count == 1:
        return
    cure = f"give every host the same files at {key}"
    tokenizer = _found_everywhere(world, f"the tokenizer of {what}", lambda: spec.tokenizer.facts())
    check_same(world, f"the tokenizer of {what}", tokenizer, cure)
    weights = _found_everywhere(world, f"the weights of {what}", spec.digests)
    check_same(world, f"the weights of {what}", weights, cure)


def _found_everywhere(
    world: World, what: str, find: Callable[[], Mapping[str, Any]]
) -> Mapping[str, Any]:
    """What `find` returns; the ShoalError of one process in all of them, which would wait for
    it."""
    found, fault = {}, ""
    try:
        found = find()
    except ShoalError as error:
        fault = str(error)
    for number, text in enumerate(world.exchange_json(f"whether {what} can be read", fault)):
        if text:
            raise ShoalError(f"{world.names[number]}: {text}")
    return found


def check_shared(world: World, folder: Path, resumed: bool) -> None:
    """ShoalError unless all processes see what process 0 writes in a folder."""
    folder = nearest_folder(folder / "any")
    token = world.exchange_json(
        "the run folder", {"name": f".shoal-{secrets.token_hex(8)}", "resumed": resumed}
    )
    probe = folder / token[0]["name"]
    try:
        if world.is_main:
            with writing(folder):
                probe.touch()
        world.exchange("a file in the run folder", b"")
        deadline = time.monotonic() + SHARED_SECONDS
        while not (seen := probe.exists()) and time.monotonic() < deadline:
            time.sleep(0.5)
        found = world.exchange_json("what is seen of it", seen and resumed == token[0]["resumed"])
    finally:
        if world.is_main:
            probe.unlink(missing_ok=True)
    if blind := [world.names[number] for number, sees in enumerate(found) if not sees]:
        raise ShoalError(
            f"{folder} is not shared: {', '.join(blind)} does not see what {world.names[0]} writes "
            f"there; set {'XDG_CACHE_HOME' if area_of(folder) else 'base_output_directory'} to a "
            "folder that all hosts have"
        )
