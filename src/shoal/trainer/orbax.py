"""Access to Orbax, the library that writes and reads arrays: import, errors and free space. No other file imports it.

Orbax reports trouble in several ways (exceptions of any kind, log lines, tracebacks of its event loop); here each
failure becomes one `ShoalError`.
"""

from __future__ import annotations

import errno
import logging
import os
import shutil
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax

from shoal.types import ShoalError

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def load_orbax() -> Any:
    """The module `orbax.checkpoint`, imported late because it takes a second, with its own reports silenced."""
    import orbax.checkpoint as ocp

    for name in ("absl", "asyncio"):  # they log what is raised as well
        logging.getLogger(name).setLevel(logging.CRITICAL)
    warnings.filterwarnings("ignore", "coroutine 'async_serialize_from_host.* was never awaited", RuntimeWarning)
    # Once: each hook wraps the one before, and this function is called for every checkpoint.
    if not isinstance(sys.unraisablehook, _WithoutClosedLoops):
        sys.unraisablehook = _WithoutClosedLoops(sys.unraisablehook)
    return ocp


class _WithoutClosedLoops:
    """Drops the tracebacks "Event loop is closed". When one array of many cannot be read or written, Orbax closes its
    event loop and each of the other arrays' callbacks prints one; the error itself is raised."""

    def __init__(self, before: Callable[[Any], Any]):
        self.before = before

    def __call__(self, unraisable: Any) -> None:
        if not (unraisable.object is None and str(unraisable.exc_value) == "Event loop is closed"):
            self.before(unraisable)


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
    """The first line of an error, shortened in the middle: in Orbax's long ones the reason is at the end."""
    line = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return line if len(line) <= 200 else f"{line[:60]} ... {line[-120:]}"


def check_room(folder: Path, tree: Any) -> None:
    """OSError if the disk has less room than the arrays take, raised before anything is written."""
    needed, free = sum(leaf.nbytes for leaf in jax.tree.leaves(tree)), shutil.disk_usage(folder).free
    if jax.process_count() == 1 and free < needed:
        raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)}: {needed / 2**20:.1f} MiB are needed, "
                                    f"{free / 2**20:.1f} MiB are free")
