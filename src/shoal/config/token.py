"""The token of the Hugging Face hub given as a flag: it is put into the environment of this process
and kept nowhere else."""

from __future__ import annotations

import os
from collections.abc import Sequence

from shoal.records import ShoalError

TOKEN = "hf_access_token"


def take_token(text: str) -> None:
    """Sets HF_TOKEN in the environment, unless the text is empty."""
    if text.strip():
        os.environ["HF_TOKEN"] = text.strip()


def redact_token(arguments: Sequence[str]) -> list[str]:
    """Returns a command line's arguments without the hub's token; puts the token into the
    environment."""
    kept = []
    for argument in arguments:
        name, equals, text = argument.partition("=")
        if name.lstrip("-+").replace("-", "_") == TOKEN:
            if not equals:
                raise ShoalError(
                    f"{TOKEN}: expected a value: write {TOKEN}=VALUE, or set HF_TOKEN in the "
                    "environment"
                )
            take_token(text)
            argument = f"{TOKEN}="
        kept.append(argument)
    return kept
