"""Finds the folder of a model: a local one, a packaged one, or that of a hub id, which is
downloaded."""

from __future__ import annotations

import http.client
import json
import os
import threading
import urllib.request
from importlib import resources
from pathlib import Path
from typing import Any

from shoal.buckets import is_bucket
from shoal.chat.tokenizer_files import NAMED_TEMPLATES
from shoal.files import HUB_ID, find_input, from_hub, is_offline, waits_for_hub
from shoal.records import ShoalError
from shoal.stop import NotHere

CONFIG_SECONDS, CONFIG_BYTES = 5.0, 1 << 20
"""How long a dry run waits for a model's config.json, and how much of it is read; published ones
have a few kB, and come in a tenth of a second."""


PACKAGED = ("tiny", "tiny-tools")
"""Names of the models that come with Shoal: for word problems, and for the tasks calculator and
guess."""


def locate(path: str | Path, token: str | None = None, weights: bool = True) -> Path:
    """Returns the folder of a model: a local folder, the copy of one in a bucket, a packaged model
    by its name, or the folder to which a hub id is downloaded.

    `token` is the hub's access token; None means the one in HF_TOKEN. Without `weights`, only
    config and tokenizer are downloaded, from the hub or a bucket. To name a local folder called
    `tiny`, write `./tiny`. ShoalError if there is no such model; NotHere if it would have to be
    downloaded during a dry run.
    """
    # Packaged names come before folders: a run must not change because a folder `tiny` happens to
    # be where it is started.
    if str(path) in PACKAGED:
        folder = Path(str(resources.files("shoal").joinpath("assets", str(path))))
        if not folder.is_dir():
            raise ShoalError(
                f"This installation lacks its packaged model `{path}` ({folder}): reinstall shoal."
            )
        return folder
    if not str(path):  # as a path it would be the working folder
        raise ShoalError(
            "A model's path is empty: give a folder, a hub id (org/name), or `tiny`; the working "
            "folder is `.`"
        )
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
            # a snapshot without a tokenizer is not a whole download
            if folder is None or (weights and not (folder / "tokenizer.json").is_file()):
                raise NotHere(path)
            return folder
        return _download(str(path), token or os.environ.get("HF_TOKEN"), weights)
    raise ShoalError(
        f"There is no model folder {path}. Give a folder, a hub id (org/name), or `tiny`."
    )


def no_model(key: str) -> ShoalError:
    """Returns the error for settings that name no model. `key`: the key that names it."""
    return ShoalError(
        f"{key}: no model is given; set it to a folder or a hub id (in MaxText "
        "load_parameters_path, in TRL model_name_or_path, in verl "
        "actor_rollout_ref.model.path, in Tunix model_config.model_id), or model.name to a "
        "known name (in MaxText model_name)",
        key,
    )


PUSHED = "hub:"
"""Begins the value of `to` that names a repository of the hub, as hub:USER/NAME."""


def repository_of(to: str) -> str:
    """Returns USER/NAME of `to=hub:USER/NAME`; "" if `to` is a folder. ShoalError if what follows
    `hub:` is no repository's name."""
    if not to.startswith(PUSHED):
        return ""
    repository = to.removeprefix(PUSHED)
    if not HUB_ID.fullmatch(repository):
        raise ShoalError(f"to={to}: expected hub:USER/NAME, the name of a repository of models")
    return repository


def check_may_push(repository: str) -> None:
    """Raises ShoalError if nothing can be pushed: without a token, or with HF_HUB_OFFLINE."""
    from huggingface_hub import get_token
    from huggingface_hub.constants import HF_HUB_OFFLINE

    if HF_HUB_OFFLINE:
        raise ShoalError(f"to={PUSHED}{repository}: HF_HUB_OFFLINE is set; unset it to push")
    if not get_token():
        raise ShoalError(
            f"to={PUSHED}{repository} needs a token of yours that may write: set HF_TOKEN, or run "
            "`hf auth login`"
        )


def push(folder: Path, repository: str, private: bool) -> str:
    """Makes a repository of the hub, unless it exists, pushes the files of a folder as one commit,
    and returns the address of its page. `private` acts on a new repository alone. ShoalError if
    the hub refuses it or cannot be reached."""
    from huggingface_hub import HfApi

    api = HfApi()
    try:
        page = api.create_repo(repository, private=private, exist_ok=True)
        api.upload_folder(
            repo_id=repository, folder_path=folder, commit_message="Exported by shoal"
        )
    except Exception as error:  # of the network, the hub, the library's own transport
        status = getattr(getattr(error, "response", None), "status_code", "")
        reason = f"{type(error).__name__} {status}".strip()
        advice = "export to a folder, and push it later with `hf upload`"
        if status in (401, 403):
            advice = "set HF_TOKEN to a token that may write there"
        raise ShoalError(
            f"to={PUSHED}{repository} could not be pushed ({reason}): {advice}"
        ) from error
    return str(page)


def cached_folder(path: str) -> Path | None:
    """Returns the folder of a model if it is on this machine: that of a packaged model, a local
    folder, or, for a hub id, the snapshot of `main` in the hub's cache. Downloads nothing. None if
    there is no such folder, if the snapshot has no config.json, or if `path` is an address in a
    bucket. Weights may be missing."""
    if path in PACKAGED or Path(path).expanduser().is_dir():
        return locate(path)
    if not HUB_ID.fullmatch(path):
        return None
    # The cache is read by hand, because a dry run should not wait for huggingface_hub to be
    # imported.
    home = Path(os.environ.get("HF_HOME") or "~/.cache/huggingface")
    cache = Path(os.environ.get("HF_HUB_CACHE") or home / "hub").expanduser()
    model = cache / f"models--{path.replace('/', '--')}"
    revision = model / "refs" / "main"
    if not revision.is_file():
        return None
    folder = model / "snapshots" / revision.read_text().strip()
    return folder if (folder / "config.json").is_file() else None


def config_on_hub(repository: str) -> dict[str, Any] | None:
    """Returns the content of a model's config.json on the hub, which is kept nowhere. None if the
    hub has not answered after CONFIG_SECONDS, or gives none: there may be no such model, or one
    that HF_TOKEN may not read."""
    endpoint = os.environ.get("HF_ENDPOINT") or "https://huggingface.co"
    address = f"{endpoint.rstrip('/')}/{repository}/resolve/main/config.json"
    token = os.environ.get("HF_TOKEN")
    found: list[Any] = []

    def ask() -> None:
        try:
            request = urllib.request.Request(address)
            if token:
                # not sent on to another address that the hub names
                request.add_unredirected_header("Authorization", f"Bearer {token}")
            with urllib.request.urlopen(request, timeout=CONFIG_SECONDS) as answer:
                found.append(json.loads(answer.read(CONFIG_BYTES)))
        except (OSError, ValueError, http.client.HTTPException):
            pass  # whatever the network, the hub or its file has: the run itself will say it

    # A look-up of the hub's name has no limit of its own.
    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(CONFIG_SECONDS)
    if found and isinstance(found[0], dict):
        return found[0]
    return None


def _other_folders() -> tuple[str, ...]:
    """Returns patterns of files in subfolders, which are not downloaded with a model because they
    hold the same weights in other formats. The folder NAMED_TEMPLATES (chat templates) is spared:
    patterns cannot exclude one name, so each after the first matches names that differ from it at
    one letter (for a folder `ab`: `[!a]*/*` and `a[!b]*/*`). The first matches all deeper
    folders."""
    patterns = ["*/*/*"]
    for length, letter in enumerate(NAMED_TEMPLATES):
        patterns.append(f"{NAMED_TEMPLATES[:length]}[!{letter}]*/*")
    return tuple(patterns)


OTHER_FOLDERS = _other_folders()


def _download(repository: str, token: str | None, weights: bool) -> Path:
    """Downloads config and tokenizer of a model, with `weights` also its safetensors, and returns
    its folder in the hub's cache. `token`: the hub's access token, or None. ShoalError if that
    fails."""
    from huggingface_hub import errors

    # Without *.bin: pickles are never read.
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
        advice = "is this machine online? Try again later, or give a local folder: model=FOLDER"
        if status in (401, 403):
            advice = "set HF_TOKEN to a token that may read it"
        reason = f"{type(error).__name__} {status}".strip()
        fault = f"could not be downloaded ({reason}): {advice}"
    raise ShoalError(f"{repository} is not a local folder, and as a hub id it {fault}.") from cause
