"""Pathways: the order of its calls, and a proxy that does not answer. `pathwaysutils` has a
stand-in, which registers either JAX's own client of the proxy or the CPU in its place."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jax
import pytest
from tiny_runs import Workshop

from shoal.config.sections.devices import MeshSection
from shoal.mesh import devices, memory_stats
from shoal.mesh.processes import find_processes
from shoal.records import ShoalError

STAND_IN = """\
import os

import jax
from jax._src import xla_bridge
from jax.extend.backend import ifrt_proxy


def connect():
    options = ifrt_proxy.ClientConnectionOptions()
    seconds = int(os.environ["PATHWAYS_PROXY_CONNECTION_TIMEOUT_SECS"])
    options.connection_timeout_in_seconds = seconds
    return ifrt_proxy.get_client(jax.config.read("jax_backend_target"), options)


def initialize():
    assert "proxy" in jax.config.jax_platforms and not xla_bridge.backends_are_initialized()
    print("initialised")
    answers = os.environ["JAX_BACKEND_TARGET"].endswith(":1")
    make = xla_bridge.make_cpu_client if answers else connect
    xla_bridge.register_backend_factory("proxy", make, priority=-1)
"""
ANSWERING, MUTE = "grpc://localhost:1", "grpc://localhost:2"


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("packages")
    (folder / "pathwaysutils.py").write_text(STAND_IN)
    return folder


def shoal(packages: Path, words: list[str], **environment: str) -> tuple[int, str, str]:
    own = {}
    for name, value in os.environ.items():
        if name != "JAX_PLATFORMS":
            own[name] = value
    path = os.pathsep.join([str(packages), *filter(None, [own.get("PYTHONPATH")])])
    ran = subprocess.run(
        [sys.executable, "-m", "shoal", *words],
        capture_output=True,
        text=True,
        check=False,
        env=own | {"PYTHONPATH": path} | environment,
    )
    return ran.returncode, ran.stdout, ran.stderr


@pytest.mark.system
def test_pathways_is_set_up_before_jax_looks_for_devices(packages: Path, workshop: Workshop):
    code, out, err = shoal(
        packages,
        workshop.words("run", "mesh.fsdp=3"),
        JAX_PLATFORMS="proxy",
        JAX_BACKEND_TARGET=ANSWERING,
    )
    assert (code, err) == (2, "error: mesh.fsdp=3 does not divide 8 devices; use 1, 2, 4 or 8\n")
    assert out.count("initialised") == 1


@pytest.mark.system
def test_a_proxy_that_does_not_answer_is_one_error(packages: Path):
    began = time.monotonic()
    code, out, err = shoal(
        packages,
        ["train", "--dry-run", "use_pathways=true"],
        JAX_BACKEND_TARGET=MUTE,
        PATHWAYS_PROXY_CONNECTION_TIMEOUT_SECS="1",
    )
    assert (code, out) == (2, "") and time.monotonic() - began < 30
    assert err.startswith(
        f"initialised\nerror: JAX_BACKEND_TARGET={MUTE}: no proxy of Pathways answers there; start"
    )
    assert err.count("\n") == 2


@pytest.fixture
def configured(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """JAX's settings, to be changed."""
    settings = {"jax_platforms": None, "jax_backend_target": ""}
    monkeypatch.setattr(devices.jax, "config", type("Config", (), {"values": settings}))
    return settings


def test_the_key_or_the_environment_asks_for_pathways(configured: dict[str, Any]):
    asked = MeshSection(pathways=True)
    assert not devices.uses_pathways(asked)  # a line says that no proxy is named
    with pytest.raises(ShoalError, match="JAX_BACKEND_TARGET is missing"):
        devices.start_pathways()
    configured["jax_backend_target"] = MUTE
    assert devices.uses_pathways(asked) and not devices.uses_pathways(MeshSection())
    with pytest.raises(ShoalError, match="JAX has found its devices before"):
        jax.devices()
        devices.start_pathways()
    configured["jax_platforms"] = "proxy,cpu"
    assert devices.uses_pathways(MeshSection())
    if not any((Path(folder) / "pathwaysutils").exists() for folder in sys.path):
        with pytest.raises(ShoalError, match=r"install '\.\[pathways\]'"):
            devices.start_pathways()


def test_under_pathways_there_is_one_process(
    configured: dict[str, Any], monkeypatch: pytest.MonkeyPatch
):
    configured["jax_platforms"] = "proxy"
    for name, value in {
        "JOB_ID": "1",
        "STEP_NODELIST": "n[1-2]",
        "NTASKS": "2",
        "PROCID": "1",
        "LOCALID": "0",
    }.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    assert find_processes(MeshSection()) == MeshSection()
    with pytest.raises(ShoalError, match="one process has the devices of all hosts"):
        find_processes(MeshSection(coordinator="here:1", processes=2, process=0))


def test_a_device_that_does_not_count_its_memory_has_no_figures():
    class Device:
        def memory_stats(self) -> None:
            raise jax.errors.JaxRuntimeError(
                "MemoryStats is only supported for addressable PjRt devices"
            )

    assert memory_stats(Device()) == memory_stats(jax.devices()[0]) == {}


@pytest.mark.parametrize(
    "words", [["train"], ["train", "--dry-run"], ["doctor", "--dry-run"], ["eval", "--dry-run"]]
)
def test_without_its_client_pathways_is_refused_before_anything_is_read(words, monkeypatch, capsys):
    from shoal import cli

    def find_spec(name):
        return None

    monkeypatch.setattr(devices, "find_spec", find_spec)
    monkeypatch.setattr(
        devices.jax,
        "config",
        type(
            "Config",
            (),
            {
                "values": {"jax_platforms": "proxy", "jax_backend_target": MUTE},
                "update": lambda *_: None,
            },
        ),
    )
    monkeypatch.setenv("JAX_PLATFORMS", "proxy")
    assert cli.main([*words, "task.path=not/there.jsonl"]) == 2
    assert capsys.readouterr().err == (
        f"error: JAX_BACKEND_TARGET={MUTE}: Pathways needs the package pathwaysutils; "
        "install '.[pathways]'\n"
    )
