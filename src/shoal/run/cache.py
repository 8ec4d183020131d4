"""Where compiled programs are kept between runs. Light: the command line asks before JAX is imported."""

from __future__ import annotations

import os
from pathlib import Path

_FOLDER, _SECONDS = "jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs"
MIN_COMPILE_SECONDS = 0.5
"""Programs that compile more quickly are not kept."""


def cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "shoal" / "jax"


def cache_by_environment() -> None:
    """Before jax is imported: lets it keep compiled programs between runs, unless the environment says otherwise."""
    os.environ.setdefault(_FOLDER.upper(), str(cache_folder()))
    os.environ.setdefault(_SECONDS.upper(), str(MIN_COMPILE_SECONDS))


def cache_by_configuration() -> None:
    """The same in a process of the user's, at any time: `os.environ` and what was set of `jax.config` stay."""
    import jax
    from jax.experimental.compilation_cache import compilation_cache

    values = jax.config.values
    if _FOLDER.upper() in os.environ or values[_FOLDER] is not None or not values["jax_enable_compilation_cache"]:
        return
    jax.config.update(_FOLDER, str(cache_folder()))
    if _SECONDS.upper() not in os.environ and values[_SECONDS] == 1.0:  # JAX's own default: nobody has set it
        jax.config.update(_SECONDS, MIN_COMPILE_SECONDS)
    compilation_cache.reset_cache()  # a program compiled before has settled that there is no cache
