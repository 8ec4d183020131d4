"""Where a model's folder is: on this machine, in the package, or on the Hugging Face hub."""

from __future__ import annotations

import os
import re
from importlib import resources
from pathlib import Path

from shoal.types import ShoalError

HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*")


def locate(path: str | Path, token: str | None = None, weights: bool = True) -> Path:
    """The folder of a model: a local one, the packaged one under the name `tiny`, or a downloaded one of a hub id.

    `token` is the hub's access token; None for the one in HF_TOKEN. Without `weights`, config and tokenizer alone are
    downloaded. A local folder called `tiny` is `./tiny`. ShoalError if there is no such model.
    """
    # Before folders are looked at: a run must not change because a folder `tiny` lies where it is started.
    if str(path) == "tiny":
        folder = Path(str(resources.files("shoal").joinpath("assets", "tiny")))
        if not folder.is_dir():
            raise ShoalError(f"This installation lacks its packaged model `tiny` ({folder}): reinstall shoal.")
        return folder
    folder = Path(path).expanduser()
    if folder.is_dir():
        return folder
    if folder.exists():
        raise ShoalError(f"{folder} is a file; expected a model folder in Hugging Face format.")
    if HUB_ID.fullmatch(str(path)):
        return _download(str(path), token or os.environ.get("HF_TOKEN"), weights)
    raise ShoalError(f"There is no model folder {path}. Give a folder, a hub id (org/name), or `tiny`.")


def _download(repository: str, token: str | None, weights: bool) -> Path:
    """The folder in the cache of the hub to which a model is downloaded; ShoalError if it cannot be."""
    from huggingface_hub import errors, snapshot_download

    # No subfolders: they hold the same weights in other formats. No *.bin: pickles are never read.
    patterns = ["*.json", "*.jinja", "merges.txt", "tokenizer.model", *(["*.safetensors"] if weights else [])]
    try:
        return Path(snapshot_download(repository, token=token, allow_patterns=patterns, ignore_patterns=["*/*"]))
    except errors.GatedRepoError as error:
        fault, cause = "is gated: ask for access on its page, then set HF_TOKEN to a token that has it", error
    except errors.RepositoryNotFoundError as error:
        fault, cause = "was not found; where it is private, set HF_TOKEN", error
    except Exception as error:  # of the network, the disk, the library's own transport
        status = getattr(getattr(error, "response", None), "status_code", "")
        advice = "set HF_TOKEN to a token that may read it" if status in (401, 403) else \
            "is this machine online? Try again later, or give a local folder"
        fault, cause = f"could not be downloaded ({type(error).__name__} {status}): {advice}".replace(" )", ")"), error
    raise ShoalError(f"{repository} is no local folder, and as a hub id it {fault}.") from cause
