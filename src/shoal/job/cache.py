"""Sets up JAX's cache that keeps compiled programs between runs. Importing this module does not
import JAX, because the command line sets the cache up before it does."""

from __future__ import annotations

import os

from shoal.buckets import cache_folder

_FOLDER, _SECONDS = "jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs"
MIN_COMPILE_SECONDS = 0.5
"""Programs that compile faster are not cached."""


def cache_by_environment() -> None:
    """Sets the cache up by environment variables, before JAX is imported; variables that are set
    already stay."""
    os.environ.setdefault(_FOLDER.upper(), str(cache_folder("jax")))
    os.environ.setdefault(_SECONDS.upper(), str(MIN_COMPILE_SECONDS))


def cache_by_configuration() -> None:
    """Sets the cache up in `jax.config`, at any time, as in a user's process. Does nothing if the
    user has chosen a cache by the environment or in `jax.config`, or has disabled it. Programs that
    were compiled before are not cached."""
    import jax
    from jax.experimental.compilation_cache import compilation_cache

    values = jax.config.values
    if (
        _FOLDER.upper() in os.environ
        or values[_FOLDER] is not None
        or not values["jax_enable_compilation_cache"]
    ):
        return
    jax.config.update(_FOLDER, str(cache_folder("jax")))
    if _SECONDS.upper() not in os.environ and values[_SECONDS] == 1.0:  # JAX's default: not set
        jax.config.update(_SECONDS, MIN_COMPILE_SECONDS)
    compilation_cache.reset_cache()  # after a first compilation JAX would not open a cache any more
