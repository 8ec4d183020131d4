"""Flags of other systems: what kinds there are, and how a value of theirs becomes ours. The table is in `aliases.py`.

    same       num_generations=4           batch.group_size=4: another name
    turned     grpo_epsilon=0.2            algorithm.clip_low=0.2, algorithm.clip_high=0.2: from the value alone
    derived    max_target_length=768       sampling.max_completion_tokens=512: from other settings, too
    accepted   lazy_load_tensors=true      nothing: what it asks for is so anyway, or has no counterpart
    missing    train_model.lora.enabled    an error where it is switched on
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from shoal.config.keys import command_of, keys_of
from shoal.types import ShoalError

Chosen = TypeVar("Chosen")

Values = Mapping[str, Any]
"""Dotted key -> text, or list of texts."""

Get = Callable[[str], Any]
"""The value of one of our keys as all else resolves it."""

NOTHING = ("", "none", "null")
"""Texts of a flag that is left at its default."""

OFF = ("", "false", "no", "off", "0", "none", "null", "-1")
"""Texts of a flag that is not switched on."""

EVERYWHERE = ("train", "doctor", "eval", "generate", "convert")
"""Commands that take a flag which becomes no key."""

INSTEAD: Mapping[str, str] = {"model.path": "source", "model.tokenizer": "tokenizer"}
"""Keys that `shoal convert` has under another name."""

TOKEN = "hf_access_token"


@dataclass(frozen=True)
class Foreign:
    """One flag of another system.

    >>> Foreign("same", "MaxText, TRL", "num_generations", ("batch.group_size",))
    """

    kind: Literal["same", "turned", "derived", "accepted", "missing"]
    systems: str
    name: str
    keys: tuple[str, ...] = ()  # what it sets; what a reader gives beyond them yields to all else on the line
    meaning: str = ""  # what it becomes, where that is more than another name
    read: Callable[[str, str], Values] | None = None  # turned: (name, text) -> values
    group: str = ""  # derived: the derivation that reads it
    flag: bool = False  # may stand bare
    quiet: bool = False  # not worth a line at the start
    tail: str = ""  # said after what it became
    only: Callable[[str], bool] | None = None  # a name that is ours, too: the texts that are theirs

    def becomes(self, value: Any, config_type: type) -> dict[str, Any]:
        """Our values for one of theirs; ShoalError where it cannot be, or is not there yet."""
        if self.kind == "missing":
            if text_of(value).lower() in OFF:
                return {}
            raise ShoalError(f"{self.name}={text_of(value)} is not there yet: {self.meaning}")
        if self.kind == "same":
            found: Values = {self.keys[0]: value}
        else:
            found = self.read(self.name, text_of(value)) if self.read else {}
        keys = keys_of(config_type)
        renamed = {key if key in keys else INSTEAD.get(key, ""): text for key, text in found.items()}
        return {key: text for key, text in renamed.items() if key in keys}

    def fits(self, config_type: type) -> bool:
        """Whether a command takes it."""
        if not self.keys:
            return command_of(config_type) in EVERYWHERE
        keys, converting = keys_of(config_type), command_of(config_type) == "convert"
        return any(key in keys or (converting and key in INSTEAD) for key in self.keys)


@dataclass(frozen=True)
class Became:
    """What a flag of another system became: said at the start where `said`, shown by --dry-run in any case."""

    name: str
    text: str
    values: Values
    meaning: str = ""
    said: bool = False

    @property
    def line(self) -> str:
        """`max_target_length=768 became sampling.max_completion_tokens=512: prompt and completion together`."""
        head, tail = f"{self.name}={self.text}", f": {self.meaning}" if self.meaning else ""
        if not self.values:
            return f"{head} changes nothing here{tail}"
        became = (f"{key}={text_of(value) or 'empty'}" for key, value in self.values.items())
        return f"{head} became {', '.join(became)}{tail}"


def became(row: Foreign, value: Any, values: Values) -> Became:
    tail = row.meaning if row.kind == "accepted" else row.tail
    shown = {key: text for key, text in values.items() if key in row.keys or row.kind != "turned"}
    return Became(row.name, text_of(value), shown, tail, row.kind != "same" and not row.quiet)


# ---- texts


def text_of(value: Any) -> str:
    """A value of Python, YAML or the command line as a user types it."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return "[" + ",".join(map(text_of, value)) + "]"
    return "null" if value is None else str(value)


def to_bool(name: str, text: str) -> bool:
    if text.lower() in ("true", "yes", "on", "1"):
        return True
    if text.lower() in OFF:
        return False
    raise ShoalError(f"{name}={text}: expected true or false")


def to_int(name: str, text: str, least: int = 1) -> int:
    number = to_float(name, text)
    if not number.is_integer() or number < least:
        raise ShoalError(f"{name}={text}: expected a whole number of {least} or more")
    return int(number)


def to_float(name: str, text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise ShoalError(f"{name}={text}: expected a finite number")
    return number


def items_of(text: str) -> list[str]:
    """The items of `a,b` or `[a,b]`, with or without quotes."""
    inside = text[1:-1] if text.startswith("[") and text.endswith("]") else text
    return [item.strip().strip("'\"") for item in inside.split(",") if item.strip()]


def choice(options: Mapping[str, Values]) -> Callable[[str, str], Values]:
    """A reader that knows these texts."""
    return lambda name, text: chosen(name, text, options)


def chosen(name: str, text: str, options: Mapping[str, Chosen]) -> Chosen:
    """What a text stands for."""
    if text not in options:
        raise ShoalError(f"{name}={text}: expected one of {', '.join(options)}")
    return options[text]


# ---- secrets


def take_token(text: str) -> None:
    """The token for the hub, into this process's environment and nowhere else."""
    if text.strip():
        os.environ["HF_TOKEN"] = text.strip()


def blank_token(words: Sequence[str]) -> list[str]:
    """The words of a command line with nothing in place of the hub's token, which is taken."""
    kept = []
    for word in words:
        name, equals, text = word.partition("=")
        if name.lstrip("-+").replace("-", "_") == TOKEN:
            if not equals:
                raise ShoalError(f"{TOKEN}: expected a value: write {TOKEN}=VALUE, or set HF_TOKEN in the environment")
            take_token(text)
            word = f"{TOKEN}="
        kept.append(word)
    return kept
