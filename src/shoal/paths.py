"""Checks names of files that come from outside: keys of a bucket, lines of a manifest, entries of a
model's index."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from shoal.records import ShoalError


def path_within(folder: Path, name: Any, named_by: str) -> Path:
    """Returns the path in `folder` for a name that comes from outside, with slashes between its
    parts; it need not exist. `named_by` says where the name was read, for the message.

    ShoalError for a name that is not a text, or not a plain relative path: otherwise a bucket or a
    model that somebody else made could write, or have read, any file of this machine. A `.`, a `//`
    and a backslash are refused as well, because two names could then be one file, or a name could
    be a path on another system.

    >>> path_within(Path("/cache/run"), "checkpoints/2/array", "s3://bucket/run")
    PosixPath('/cache/run/checkpoints/2/array')
    """
    is_plain = isinstance(name, str)
    if is_plain:
        for part in name.split("/"):
            if part in ("", ".", "..") or "\\" in part or "\0" in part:
                is_plain = False
    if not is_plain:
        raise ShoalError(
            f"{named_by} names the file {name!r}, which is refused: expected a relative path "
            "without '..', '//' or a backslash; remove or rename it there"
        )
    return folder / name
