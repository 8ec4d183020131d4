"""Pathways: one process has the devices of all hosts, by way of a proxy.

    JAX_PLATFORMS=proxy JAX_BACKEND_TARGET=grpc://HOST:PORT    or that address and mesh.pathways=true
"""

from __future__ import annotations

import os

import jax
from jax._src import xla_bridge

from shoal.config.schema import MeshSection
from shoal.types import ShoalError

PROXY = "proxy"
"""JAX's name for this platform."""
ANSWER_SECONDS = 15
"""How long a proxy may take to answer; without a limit JAX waits for ever."""


def uses_pathways(section: MeshSection) -> bool:
    """True if the environment asks for Pathways, or `mesh.pathways` does and the environment names a proxy."""
    return _is_chosen() or (section.pathways and bool(jax.config.values["jax_backend_target"]))


def start_pathways() -> None:
    """Registers the proxy as JAX's platform, which it has to be before JAX looks for its devices."""
    if not (target := jax.config.values["jax_backend_target"]):
        raise ShoalError(f"JAX_PLATFORMS={PROXY}: JAX_BACKEND_TARGET is missing; set it to the address of the proxy of "
                         "Pathways, as grpc://HOST:29000, or unset JAX_PLATFORMS")
    if not _is_chosen() and xla_bridge.backends_are_initialized():
        raise ShoalError("mesh.pathways=true: JAX has found its devices before; set JAX_PLATFORMS=proxy in the "
                         "environment")
    try:
        import pathwaysutils  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ShoalError(f"JAX_BACKEND_TARGET={target}: Pathways needs the package pathwaysutils; install "
                         "'.[pathways]'") from error
    os.environ.setdefault("PATHWAYS_PROXY_CONNECTION_TIMEOUT_SECS", str(ANSWER_SECONDS))
    if not _is_chosen():
        jax.config.update("jax_platforms", PROXY)
    pathwaysutils.initialize()


def _is_chosen() -> bool:
    return PROXY in (jax.config.values["jax_platforms"] or "").split(",")
