"""The token of the Hugging Face hub given as a flag: it is put into the environment of this process
and kept nowhere else."""

from __future__ import annotations

import os
from collections.abc import Sequence

from shoal.records import ShoalError

HUB_TOKEN_KEY = "hf_access_token"
"""The name of the flag whose value is the token."""


def take_token(text: str) -> None:
    """Sets HF_TOKEN in the environment, unless the text is empty."""
    if text.strip():
        os.environ["HF_TOKEN"] = text.strip()


def redact_token(arguments: Sequence[str]) -> list[str]:
    """Returns a command line's arguments with `hf_access_token=` in place of each argument that has
    the hub's token, and puts the token into the environment (HF_TOKEN). Dashes or `+` may be before
    the name. ShoalError if the name has no `=`, because the next argument may be the token."""
    kept = []
    for argument in arguments:
        name, equals, text = argument.partition("=")
        if name.lstrip("-+").replace("-", "_") == HUB_TOKEN_KEY:
            if not equals:
                raise ShoalError(
                    f"{HUB_TOKEN_KEY}: expected a value: write {HUB_TOKEN_KEY}=VALUE, or set "
                    "HF_TOKEN in the environment"
                )
            take_token(text)
            argument = f"{HUB_TOKEN_KEY}="
        kept.append(argument)
    return kept
