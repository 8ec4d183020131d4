"""Rows of flags by their kinds, and readers of their texts. The tables are in `trl.py`, `verl.py`
and the like.

rename     num_generations=4        batch.group_size=4
read       grpo_epsilon=0.2         algorithm.clip_low=0.2, algorithm.clip_high=0.2: from the value
                                    alone
group      epsilon=0.1 epsilon_high=0.3    from several flags together
rule       max_target_length=768    sampling.max_completion_tokens=512: from other keys, too
                                    (rules.py)
idle       lazy_load_tensors=true   nothing: it cannot matter here
refused    repetition_penalty=1.1   an error if it is switched on: it matters and has no counterpart
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, TypeVar

from shoal.config.foreign import NOTHING, OFF, Flag, Given, Group, Reader, Rule, Values, Yielding
from shoal.records import ShoalError

Chosen = TypeVar("Chosen")

REPLICA = (
    "devices that share a sampler, or vLLM's server; dropped where mesh.* counts devices that it "
    "does not divide"
)
REPLICA_KEYS = "mesh.sampler_tensor sampler.devices_per_worker"
MEMORY = (
    "the sampler takes what sampling.slots_per_device needs; with devices of its own the share is "
    "sampling.memory_share, for servers of vLLM vllm.memory"
)
MEMORY_KEYS = "sampling.memory_share vllm.memory"
SHARDED = "mesh.fsdp=-1 shards parameters, gradients and moments over all devices"

# ---- kinds of rows


def renames(**names: str) -> list[Flag]:
    """Rows of names that stand for one key; `__` is a dot."""
    return [Flag(name.replace("__", "."), (key,)) for name, key in names.items()]


def reads(name: str, keys: str, read: Reader, meaning: str, **more: Any) -> Flag:
    return Flag(name, tuple(keys.split()), meaning=meaning, read=read, **more)


def grouped(group: Group, keys: str, meaning: str, *names: str, **more: Any) -> list[Flag]:
    """Rows that are read together."""
    return [Flag(name, tuple(keys.split()), meaning=meaning, group=group, **more) for name in names]


def derived(rule: Rule, keys: str, meaning: str, *names: str, **more: Any) -> list[Flag]:
    """Rows whose values need other keys (`rules.py`)."""
    return [Flag(name, tuple(keys.split()), meaning=meaning, rule=rule, **more) for name in names]


def idle(meaning: str, *names: str, **more: Any) -> list[Flag]:
    """Flags that change nothing here; a text of several names stands for each of them."""
    rows = []
    for text in names:
        for name in text.split():
            rows.append(Flag(name, meaning=meaning, idle=True, is_switch=True, **more))
    return rows


def refused(meaning: str, *names: str, accepts: tuple[str, ...] = ()) -> list[Flag]:
    """Flags that matter and have no counterpart; `accepts`: texts beside OFF that ask for what
    happens here."""
    return [
        Flag(name, meaning=meaning, refused=True, accepts=(*OFF, *accepts), is_switch=True)
        for name in names
    ]


def only(meaning: str, *texts: str, names: str) -> list[Flag]:
    """Flags with few texts that are possible here."""
    return [
        Flag(
            name,
            meaning=meaning,
            refused=True,
            accepts=(*texts, *NOTHING),
            expected=" or ".join(texts),
            is_switch=True,
        )
        for name in names.split()
    ]


# ---- readers


def each(*keys: str) -> Reader:
    """The same text for several keys."""

    def read(name: str, text: str) -> Values:
        return dict.fromkeys(keys, text)

    return read


def optional(key: str, none: str = "0") -> Reader:
    """A number, or None for off."""

    def read(name: str, text: str) -> Values:
        if text.lower() in NOTHING:
            return {key: none}
        return {key: text}

    return read


def least_zero(key: str) -> Reader:
    """A number whose -1 is our 0."""

    def read(name: str, text: str) -> Values:
        if text == "-1":
            return {key: "0"}
        return {key: text}

    return read


def if_true(values: Values, other: Values) -> Reader:
    def read(name: str, text: str) -> Values:
        if to_bool(name, text):
            return values
        return other

    return read


def listed(key: str) -> Reader:
    def read(name: str, text: str) -> Values:
        return {key: items_of(text)}

    return read


def choice(options: Mapping[str, Values]) -> Reader:
    """A reader that knows these texts."""

    def read(name: str, text: str) -> Values:
        return chosen(name, text, options)

    return read


def chosen(name: str, text: str, options: Mapping[str, Chosen]) -> Chosen:
    """What a text stands for."""
    if text not in options:
        raise ShoalError(f"{name}={text}: expected one of {', '.join(options)}")
    return options[text]


def read_bounds(both: str, low: str, high: str) -> Group:
    """A reader of clip bounds: one flag for both, where they have none of their own."""

    def read_clip(given: Given) -> Values:
        named = last_part(given)
        values = {}
        for key, own_name in (("algorithm.clip_low", low), ("algorithm.clip_high", high)):
            name = own_name if named.get(own_name) else both
            if named.get(name):
                values[key] = str(to_float(name, named[name]))
        return values

    return read_clip


LORA = "model.lora.rank model.lora.alpha model.lora.targets model.lora.rslora"


def lora_values(rank: str, alpha: str, targets: str = "all-linear") -> Values:
    """An adapter with another system's defaults."""
    return {
        "model.lora.rank": rank,
        "model.lora.alpha": alpha,
        "model.lora.targets": items_of(targets),
    }


OFFLOAD = if_true({"optimizer.offload": "true"}, {"optimizer.offload": "false"})
REMAT = if_true({"model.remat": "full"}, {"model.remat": "none"})

KNOWN_TASKS = {
    "gsm8k": "gsm8k",
    "openai/gsm8k": "gsm8k",
    "ifeval": "ifeval",
    "google/ifeval": "ifeval",
    "math": "math",
    "countdown": "countdown",
}
"""Data sets, as others name them, that are tasks of ours."""


def read_data_set(name: str, text: str) -> Values:
    """A task of ours, or a data set of the user's own: in MaxText's demo rows as GSM8K's. What a
    preset says of other data falls away."""
    task: str | Yielding | None = KNOWN_TASKS.get(text.lower())
    path = ""
    if not task:
        task = Yielding("gsm8k") if name == "hf_path" else "custom"
        path = text
    return {
        "task.name": task,
        "task.path": path,
        "task.split": Yielding("train"),
        "task.files": Yielding([]),
        "task.subset": Yielding(""),
    }


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
    if text.startswith("[") and text.endswith("]"):
        text = text[1:-1]
    items = []
    for item in text.split(","):
        item = item.strip()
        if item:
            items.append(item.strip("'\""))
    return items


def last_part(given: Given) -> dict[str, str]:
    """The flags of a group by the last part of their names."""
    return {name.rpartition(".")[2]: text for name, text in given.items()}
