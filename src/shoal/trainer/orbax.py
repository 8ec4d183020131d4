"""Access to Orbax, the library that writes and reads arrays: import, errors and free space. No other file imports it.

Orbax reports trouble in several ways (exceptions of any kind, log lines, tracebacks of its event loop); here each
failure becomes one `ShoalError`.
"""

from __future__ import annotations

import errno
import gc
import logging
import os
import shutil
import sys
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax

from shoal.types import ShoalError

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def load_orbax() -> Any:
    """The module `orbax.checkpoint`, imported late because it takes a second."""
    import orbax.checkpoint as ocp

    return ocp


@contextmanager
def orbax_silenced() -> Iterator[None]:
    """Drops what Orbax prints beside the errors that it raises, until the end of the block.

    When one array of many cannot be read or written, Orbax closes its event loop, and the callback of each other array
    prints a traceback."""
    loggers = [logging.getLogger(name) for name in ("absl", "asyncio")]
    levels, hook = [logger.level for logger in loggers], sys.unraisablehook

    def without_closed_loops(unraisable: Any) -> None:
        if not (unraisable.object is None and str(unraisable.exc_value) == "Event loop is closed"):
            hook(unraisable)

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "coroutine 'async_serialize_from_host.* was never awaited", RuntimeWarning)
        for logger in loggers:
            logger.setLevel(logging.CRITICAL)
        sys.unraisablehook = without_closed_loops
        try:
            yield
        finally:
            sys.unraisablehook = hook
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)


@contextmanager
def writing(path: Path, then: str = "; it resumes from the checkpoint before") -> Iterator[None]:
    """Turns whatever Orbax raises while it writes `path` into one ShoalError."""
    try:
        yield
    except Exception as error:
        full = getattr(error, "errno", None) in _FULL or any(os.strerror(number) in str(error) for number in _FULL)
        cure = "make room" if full else "mend that"
        raise ShoalError(f"the checkpoint {path} cannot be written ({cause(error)}): {cure}, then give the same "
                         f"command again{then}") from error


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turns whatever Orbax raises while it reads `path` into one ShoalError."""
    try:
        yield
    except Exception as error:
        raise ShoalError(f"the checkpoint {path} cannot be read ({cause(error)}): copy it again, whole") from error


def cause(error: BaseException) -> str:
    """The first line of an error, shortened in the middle: in Orbax's long ones the reason is at the end.

    Frees what the error's frames hold: a closed event loop that is freed later would print its tracebacks then, after
    the end of `orbax_silenced`."""
    found: list[BaseException | None] = [error]
    while found:
        if one := found.pop():
            traceback.clear_frames(one.__traceback__)
            found += [one.__cause__, *([] if one.__cause__ else [one.__context__]), *getattr(one, "exceptions", ())]
    gc.collect()
    line = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return line if len(line) <= 200 else f"{line[:60]} ... {line[-120:]}"


def check_room(folder: Path, tree: Any) -> None:
    """OSError if the disk has less room than the arrays take, raised before anything is written."""
    needed, free = sum(leaf.nbytes for leaf in jax.tree.leaves(tree)), shutil.disk_usage(folder).free
    if jax.process_count() == 1 and free < needed:
        raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)}: {needed / 2**20:.1f} MiB are needed, "
                                    f"{free / 2**20:.1f} MiB are free")
