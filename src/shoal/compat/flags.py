"""Makes rows of the tables of other systems' flags, one function for each kind of row, and readers
of flags' texts. The tables are in `trl.py`, `verl.py` and the like.

rename     num_generations=4        batch.group_size=4
read       grpo_epsilon=0.2         algorithm.clip_low=0.2, algorithm.clip_high=0.2: from the value
                                    alone
group      epsilon=0.1 epsilon_high=0.3    from several flags together
rule       max_target_length=768    sampling.max_completion_tokens=512: from other keys, too
                                    (rules.py); a flag with a group too is read by that first
idle       lazy_load_tensors=true   nothing: it cannot matter here
refused    repetition_penalty=1.1   an error if it is switched on: it matters and has no counterpart
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Any, TypeVar

from shoal.buckets import is_bucket
from shoal.config.foreign import (
    NOTHING,
    OFF,
    Flag,
    FlagTexts,
    Group,
    KeyValues,
    Reader,
    Rule,
    Yielding,
)
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
    """Returns rows for flags that are only another name of one key: keyword -> key. `__` in a
    keyword stands for a dot: `a__b="batch.group_size"` is the flag `a.b`."""
    return [Flag(name.replace("__", "."), (key,)) for name, key in names.items()]


def reads(name: str, keys: str, read: Reader, meaning: str, **more: Any) -> Flag:
    """Returns a row for a flag whose value is read alone, by `read`, which is called with the
    flag's name and text. `keys`: the keys that it sets, separated by spaces; `meaning`: in words,
    what the flag becomes; `more`: further fields of Flag."""
    return Flag(name, tuple(keys.split()), meaning=meaning, read=read, **more)


def grouped(group: Group, keys: str, meaning: str, *names: str, **more: Any) -> list[Flag]:
    """Returns rows, one for each of the flags `names`, that `group` reads together: it is called
    with name -> text of those that were given. `keys`: the keys that they set, separated by spaces;
    `meaning`: in words, what they become; `more`: further fields of Flag."""
    return [Flag(name, tuple(keys.split()), meaning=meaning, group=group, **more) for name in names]


def derived(rule: Rule, keys: str, meaning: str, *names: str, **more: Any) -> list[Flag]:
    """Returns rows, one for each of the flags `names`, whose values depend on other keys, by a rule
    of `rules.py`. `keys`: the keys that they set, separated by spaces, '' for flags that the rule
    only reads; `meaning`: in words, what they become; `more`: further fields of Flag."""
    return [Flag(name, tuple(keys.split()), meaning=meaning, rule=rule, **more) for name in names]


def idle(meaning: str, *names: str, **more: Any) -> list[Flag]:
    """Returns rows for flags that have no effect here, one for each name; `--name` without a value
    is accepted. A text in `names` may hold several names, separated by spaces. `meaning`: why they
    have none; `more`: further fields of Flag."""
    rows = []
    for text in names:
        for name in text.split():
            rows.append(Flag(name, meaning=meaning, idle=True, is_switch=True, **more))
    return rows


def counts_with(setting: str, *names: str) -> list[Flag]:
    """Returns rows like those of `idle` for flags that count together with another flag alone,
    which is refused. `setting`: the other flag's name."""
    return idle(f"it counts only with {setting}, which is refused", *names)


def refused(meaning: str, *names: str, accepts: tuple[str, ...] = ()) -> list[Flag]:
    """Returns rows, one for each of the flags `names`, that matter and have no counterpart here, so
    that they are errors unless they are off (OFF). `meaning`: what the error says; `accepts`:
    further texts that are no error, because they ask for what happens here. `--name` without a
    value means true."""
    return [
        Flag(name, meaning=meaning, refused=True, accepts=(*OFF, *accepts), is_switch=True)
        for name in names
    ]


def only(meaning: str, *texts: str, names: str) -> list[Flag]:
    """Returns rows for flags of which Shoal supports only the values `texts`, which ask for what it
    does anyway. Any other value is an error, unless it is empty (NOTHING). `names`: the flags,
    separated by spaces. `meaning`: what the error says after the supported values. A flag without a
    value counts as true; `false` is an error too unless it is one of `texts`."""
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
    """Returns a reader that gives each of the keys the flag's text, unchanged, as its value."""

    def read(name: str, text: str) -> KeyValues:
        return dict.fromkeys(keys, text)

    return read


def optional(key: str, none: str = "0") -> Reader:
    """Returns a reader that gives `key` the flag's text, or the text `none` if the flag is None
    (one of NOTHING, in any case)."""

    def read(name: str, text: str) -> KeyValues:
        if text.lower() in NOTHING:
            return {key: none}
        return {key: text}

    return read


def least_zero(key: str) -> Reader:
    """Returns a reader that gives `key` the flag's text; -1 becomes 0, other numbers below 0
    stay."""

    def read(name: str, text: str) -> KeyValues:
        if text == "-1":
            return {key: "0"}
        return {key: text}

    return read


def if_true(values: KeyValues, other: KeyValues) -> Reader:
    """Returns a reader of a switch: `values` if it is true, `other` if it is off (one of OFF, also
    empty); it raises ShoalError for a text that is neither."""

    def read(name: str, text: str) -> KeyValues:
        if to_bool(name, text):
            return values
        return other

    return read


def listed(key: str) -> Reader:
    """Returns a reader that gives `key` the items of the flag's text, as a list: `[a,b]` and `a,b`
    become two items."""

    def read(name: str, text: str) -> KeyValues:
        return {key: items_of(text)}

    return read


def one_of(options: Mapping[str, KeyValues]) -> Reader:
    """Returns a reader of a flag that has one of these texts: `options` is text -> values of keys.
    The reader raises ShoalError for other texts."""

    def read(name: str, text: str) -> KeyValues:
        return value_of_option(name, text, options)

    return read


def value_of_option(name: str, text: str, options: Mapping[str, Chosen]) -> Chosen:
    """Returns what a text stands for in `options`; ShoalError, with all options, if it is not one
    of them. Upper and lower case differ. `name`: the flag's, for the error."""
    if text not in options:
        one_of_several = "one of " if len(options) > 1 else ""
        raise ShoalError(f"{name}={text}: expected {one_of_several}{', '.join(options)}")
    return options[text]


def read_bounds(both: str, low: str, high: str) -> Group:
    """Returns a reader of flags that are read together, for algorithm.clip_low and clip_high.
    `low`, `high`: the names of the flags for one bound; `both`: that of the flag for a bound whose
    own flag is not given or empty. A bound that no flag gives is not set. Names are without their
    sections. The reader raises ShoalError for a text that is not a finite number."""

    def read_clip(given: FlagTexts) -> KeyValues:
        """Returns the clip bounds that the given flags set."""
        named = last_part(given)
        values = {}
        for key, own_name in (("algorithm.clip_low", low), ("algorithm.clip_high", high)):
            name = own_name if named.get(own_name) else both
            text = named.get(name)
            if text:
                values[key] = str(to_float(name, text))
        return values

    return read_clip


def template_variables(given: FlagTexts) -> KeyValues:
    """Reads variables of the chat template: a flag is the JSON object of several, or one entry of
    it, with the entry's name behind a dot. ShoalError for a text that is not a JSON object, and for
    a value that is an object or a list."""
    variables: dict[str, Any] = {}
    for name, text in given.items():
        entry = name.partition("chat_template_kwargs.")[2]
        if entry:
            variables[entry] = text
        else:
            variables |= json_object(name, text)
    entries = []
    for name, value in variables.items():
        text = value if isinstance(value, str) else json.dumps(value)
        if text.startswith(("[", "{")):
            raise ShoalError(
                f"chat_template_kwargs: {name} is {text:.60}: expected a text, a number, true or "
                "false"
            )
        entries.append(f"{name}={text}")
    return {"model.template_variables": entries}


def json_object(name: str, text: str) -> dict[str, Any]:
    """Returns the JSON object that a flag's text holds, {} for a text of NOTHING; ShoalError for
    any other. `name`: the flag's, for the error."""
    if text.lower() in NOTHING:
        return {}
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise ShoalError(
            f'{name}={text:.60}: expected a JSON object, such as {{"enable_thinking": false}}'
        )
    return value


LORA = "model.lora.rank model.lora.alpha model.lora.targets model.lora.rslora"


def lora_values(rank: str, alpha: str, targets: str = "all-linear") -> KeyValues:
    """Returns the values of LoRA's rank, alpha and targets for these texts of flags, which are not
    checked; `targets`: names separated by commas."""
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
"""Other systems' names of data sets -> the task of Shoal."""


def read_data_set(name: str, text: str) -> KeyValues:
    """Reads a flag that names a data set: returns the task of Shoal that it is (KNOWN_TASKS, in any
    case), and '' as its path; else task=custom with the name as its path. Data in the flag
    `hf_path`, that of MaxText's demo, has rows like GSM8K's, so it gets the task gsm8k unless
    another flag names one. Also resets the split, files and subset that a preset sets for other
    data, unless the same layer sets them."""
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


def values_of_files(name: str, files: Sequence[str]) -> dict[str, Any]:
    """Returns the values of keys for files of training rows: one file is task.path; for several, or
    a pattern like `data/*.jsonl`, task.path is the folder above them all, and task.files has their
    paths in it. ShoalError if some are in a bucket and others are not. `files`: at least one;
    `name`: the flag's, for the error."""
    if len({is_bucket(file) for file in files}) > 1:
        raise ShoalError(f"{name}={','.join(files)}: expected files in a bucket or here, not both")
    if len({PurePath(file).is_absolute() for file in files}) > 1:
        files = [os.path.abspath(file) for file in files]
    if len(files) == 1 and "*" not in files[0]:
        return {"task.path": files[0]}
    folder = PurePath(os.path.commonpath([PurePath(file).parent for file in files]))
    return {
        "task.path": str(folder),
        "task.files": [str(PurePath(file).relative_to(folder)) for file in files],
    }


def to_bool(name: str, text: str) -> bool:
    """Returns the text of a switch as bool: True for true, yes, on and 1, False for the texts in
    OFF (also empty or none), in any case; ShoalError for other texts. `name`: the flag's, for the
    error."""
    if text.lower() in ("true", "yes", "on", "1"):
        return True
    if text.lower() in OFF:
        return False
    raise ShoalError(f"{name}={text}: expected true or false")


def to_int(name: str, text: str, least: int = 1) -> int:
    """Returns a text as a whole number (`1e3` and `5.0` are accepted); ShoalError if it is not one,
    or is below `least`. `name`: the flag's, for the error."""
    number = to_float(name, text)
    if not number.is_integer() or number < least:
        raise ShoalError(f"{name}={text}: expected a whole number of {least} or more")
    return int(number)


def to_float(name: str, text: str) -> float:
    """Returns a text as a finite number; ShoalError if it is not one. `name`: the flag's, for the
    error."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise ShoalError(f"{name}={text}: expected a finite number")
    return number


def items_of(text: str) -> list[str]:
    """Returns the items of a text `a,b` or `[a,b]`, without quotes around items; empty items are
    left out."""
    if text.startswith("[") and text.endswith("]"):
        text = text[1:-1]
    items = []
    for item in text.split(","):
        item = item.strip()
        if item:
            items.append(item.strip("'\""))
    return items


def last_part(given: FlagTexts) -> dict[str, str]:
    """Returns the flags' texts by the last part of their dotted names:
    `{"actor.optim.lr": "1"}` -> `{"lr": "1"}`."""
    return {name.rpartition(".")[2]: text for name, text in given.items()}
