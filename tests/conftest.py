"""Eight simulated CPU devices for every test, most use the first one alone; programs compiled once; the order."""

import os
import signal
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"

import jax
import pytest

jax.config.update("jax_default_matmul_precision", "highest")
# Many tests compile the same small programs: once in a run is enough, and once for several runs.
jax.config.update("jax_compilation_cache_dir", str(Path(__file__).parent.parent / ".pytest_cache" / "jax"))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # so in a shell's background; processes under test inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)

LONGEST = ("test_resume", "test_learning", "test_objectives_runs", "test_assembly", "test_step", "test_mesh",
           "test_examples")
"""Files that take minutes: begun first, so that no worker ends with one of them while the other has nothing to do."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: LONGEST.index(item.path.stem) if item.path.stem in LONGEST else len(LONGEST))
