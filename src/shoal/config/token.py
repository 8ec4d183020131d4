"""The token of the Hugging Face hub, given as a flag: into the environment of this process and
nowhere else."""

from __future__ import annotations

import os
from collections.abc import Sequence

from shoal.records import ShoalError

TOKEN = "hf_access_token"


def take_token(text: str) -> None:
    """Sets HF_TOKEN."""
    if text.strip():
        os.environ["HF_TOKEN"] = text.strip()


def redact_token(words: Sequence[str]) -> list[str]:
    """The words of a command line without the hub's token, which is put into the environment."""
    kept = []
    for word in words:
        name, equals, text = word.partition("=")
        if name.lstrip("-+").replace("-", "_") == TOKEN:
            if not equals:
                raise ShoalError(
                    f"{TOKEN}: expected a value: write {TOKEN}=VALUE, or set HF_TOKEN in the "
                    "environment"
                )
            take_token(text)
            word = f"{TOKEN}="
        kept.append(word)
    return kept
