"""The folder of a model: of a path, of a packaged one, or of a hub id, which is downloaded."""

from __future__ import annotations

import os
import re
from importlib import resources
from pathlib import Path

from shoal.buckets import is_bucket
from shoal.chat.tokenizer_files import NAMED_TEMPLATES
from shoal.files import find_input, from_hub, is_offline, waits_for_hub
from shoal.records import ShoalError
from shoal.stop import NotHere

HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*")


PACKAGED = ("tiny", "tiny-tools")
"""Models that come with Shoal: for word problems, and for the tasks calculator and guess."""


def locate(path: str | Path, token: str | None = None, weights: bool = True) -> Path:
    """The folder of a model: a local one, the copy of one in a bucket, a packaged one by its name,
    or a downloaded one of a hub id.

    `token` is the hub's access token; None for the one in HF_TOKEN. Without `weights`, config and
    tokenizer alone are downloaded. A local folder called `tiny` is `./tiny`. ShoalError if there is
    no such model.
    """
    # Before folders are looked at: a run must not change because a folder `tiny` lies where it is
    # started.
    if str(path) in PACKAGED:
        folder = Path(str(resources.files("shoal").joinpath("assets", str(path))))
        if not folder.is_dir():
            raise ShoalError(
                f"This installation lacks its packaged model `{path}` ({folder}): reinstall shoal."
            )
        return folder
    if is_offline() and weights and is_bucket(path):
        raise NotHere(path)
    folder = find_input(path, "model.path", weights)
    if folder.is_dir():
        return folder
    if folder.exists():
        raise ShoalError(f"{folder} is a file; expected a model folder in Hugging Face format.")
    if HUB_ID.fullmatch(str(path)):
        if waits_for_hub():
            folder = cached_folder(str(path))
            if folder is None or (weights and not (folder / "tokenizer.json").is_file()):
                raise NotHere(path)
            return folder
        return _download(str(path), token or os.environ.get("HF_TOKEN"), weights)
    raise ShoalError(
        f"There is no model folder {path}. Give a folder, a hub id (org/name), or `tiny`."
    )


def cached_folder(path: str) -> Path | None:
    """The folder of a model whose config.json is on this machine: a local one, or one in the hub's
    cache."""
    if path in PACKAGED or Path(path).expanduser().is_dir():
        return locate(path)
    if not HUB_ID.fullmatch(path):
        return None
    # By hand: a dry run does not wait for huggingface_hub to be imported.
    home = Path(os.environ.get("HF_HOME") or "~/.cache/huggingface")
    cache = Path(os.environ.get("HF_HUB_CACHE") or home / "hub").expanduser()
    model = cache / f"models--{path.replace('/', '--')}"
    revision = model / "refs" / "main"
    if not revision.is_file():
        return None
    folder = model / "snapshots" / revision.read_text().strip()
    return folder if (folder / "config.json").is_file() else None


def _other_folders() -> tuple[str, ...]:
    """Patterns of the hub's files in subfolders that are not downloaded with a model: other
    subfolders hold the same weights in other formats. Each pattern names the folders that differ
    from the folder of templates in their next letter."""
    patterns = ["*/*/*"]
    for length, letter in enumerate(NAMED_TEMPLATES):
        patterns.append(f"{NAMED_TEMPLATES[:length]}[!{letter}]*/*")
    return tuple(patterns)


OTHER_FOLDERS = _other_folders()


def _download(repository: str, token: str | None, weights: bool) -> Path:
    """The folder in the cache of the hub to which a model is downloaded; ShoalError if it cannot
    be."""
    from huggingface_hub import errors

    # No *.bin: pickles are never read.
    patterns = ["*.json", "*.jinja", "merges.txt", "tokenizer.model"]
    if weights:
        patterns.append("*.safetensors")
    try:
        return from_hub(
            repository, token=token, allow_patterns=patterns, ignore_patterns=OTHER_FOLDERS
        )
    except errors.GatedRepoError as error:
        cause: Exception = error
        fault = "is gated: ask for access on its page, then set HF_TOKEN to a token that has it"
    except errors.RepositoryNotFoundError as error:
        cause = error
        fault = "was not found; where it is private, set HF_TOKEN"
    except Exception as error:  # of the network, the disk, the library's own transport
        cause = error
        status = getattr(getattr(error, "response", None), "status_code", "")
        advice = "is this machine online? Try again later, or give a local folder"
        if status in (401, 403):
            advice = "set HF_TOKEN to a token that may read it"
        reason = f"{type(error).__name__} {status}".strip()
        fault = f"could not be downloaded ({reason}): {advice}"
    raise ShoalError(f"{repository} is no local folder, and as a hub id it {fault}.") from cause
