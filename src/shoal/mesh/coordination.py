"""JAX's coordination service in a process of its own, which outlives process 0 for some seconds.

In process 0, where JAX would have it, it ends with that process, and JAX's clients in all others abort with a page of
text, often before they can say who has ended.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import jaxlib._jax as jaxlib

from shoal.types import ShoalError

OUTLIVES_SECONDS = 5
"""By then the other processes have seen that process 0 has ended."""

PROGRAM = f"""
import json, os, sys, time
from jaxlib import _jax
address, count, options = json.loads(sys.argv[1])
service = _jax.get_distributed_runtime_service(address, count, **options)
print("ready", flush=True)
time.sleep(0 if sys.stdin.read() else {OUTLIVES_SECONDS})
os._exit(0)
"""


class CoordinationService:
    """The service of an address, with JAX's arguments; it listens once this is made."""

    def __init__(self, address: str, count: int, **options: Any):
        self.process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, json.dumps([address, count, options])], stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, start_new_session=True)  # no Ctrl-C
        assert self.process.stdout
        if self.process.stdout.readline() != "ready\n":
            raise ShoalError(f"mesh.coordinator: JAX's coordination service cannot listen at {address}; choose another "
                             "port")

    def shutdown(self) -> None:
        self.process.communicate("stop")


@contextlib.contextmanager
def service_apart() -> Iterator[None]:
    """Inside, `jax.distributed.initialize` starts the service in a process of its own."""
    usual = jaxlib.get_distributed_runtime_service
    jaxlib.get_distributed_runtime_service = CoordinationService
    try:
        yield
    finally:
        jaxlib.get_distributed_runtime_service = usual
