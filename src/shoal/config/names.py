"""Names of keys: short forms of ours, the key of a name that a user typed, and for a name that is
no key the nearest one, or why there is none."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shoal.config.commands import command_of
from shoal.config.foreign import front_end
from shoal.config.key import Key, keys_of, sections_of
from shoal.config.train import Config
from shoal.records import ShoalError
from shoal.text import did_you_mean, nearest, nearness


@dataclass(frozen=True)
class Alias:
    """A short form of a key: the key, the commands that accept it (empty: all that have it), a note
    for the help."""

    key: str
    commands: tuple[str, ...] = ()
    note: str = ""


_SAMPLING = ("eval", "generate", "serve")


ALIASES: Mapping[str, Alias] = {
    "model": Alias("model.path"),
    "task": Alias("task.name", note="loads the preset of that name, under your own keys"),
    "reward": Alias("reward.functions", note="file.py:function, several with commas"),
    "tools": Alias("environment.tools", note="file.py:f,g: functions that the model may call"),
    "environment": Alias("environment.factory", note="file.py:Factory"),
    "rollout": Alias("environment.rollout", note="file.py:f, in TRL's convention"),
    "agent": Alias("environment.agent", note="a program that asks OPENAI_BASE_URL, or file.py:f"),
    "algorithm": Alias("algorithm.name", note="a paper's settings, under your own keys"),
    "checkpoint_period": Alias("checkpoint.every"),
    "max_staleness": Alias("train.max_staleness"),
    "temperature": Alias("sampling.temperature", _SAMPLING),
    "max_new_tokens": Alias("sampling.max_completion_tokens", _SAMPLING),
    "max_prompt_tokens": Alias("sampling.max_prompt_tokens", _SAMPLING),
    "top_k": Alias("sampling.top_k", _SAMPLING),
    "top_p": Alias("sampling.top_p", _SAMPLING),
    "min_p": Alias("sampling.min_p", _SAMPLING),
    "stop": Alias("sampling.stop", _SAMPLING, note="several as [a,b]"),
    "from": Alias("source", ("export", "convert")),
    "MODE": Alias("mode", ("launch",), note="as MaxText's scripts"),
    "CLOUD_IMAGE_NAME": Alias("push", ("launch",), note="as MaxText's scripts"),
}
"""Short forms of our own keys."""


OURS_FIRST = 0.1
"""How much nearer to a misspelled name another system's flag must be to be named in place of a key
of ours."""


QUANTISED = (
    "8-bit weights are model.quantise=int8 or fp8, for LoRA's frozen weights alone, or "
    "sampler.quantise"
)
UNSUPPORTED: Mapping[str, str] = {
    "^dataset$|^(train|eval)_(dataset|data|files?)$": "data is task=, a name or rows from Python, "
    "and held_out= the rows to evaluate on; from "
    "files task=custom "
    "task.path=FILE, or dataset_name=FILE",
    "lora|peft|dora": "LoRA is model.lora.rank, alpha, targets, rslora and path; of its relatives "
    "none is supported",
    "quant|4bit|8bit|fp8|int8": QUANTISED,
    "vllm|sglang": "the sampler is the model itself, or with sampler.kind=vllm a server of vLLM",
    "tool|agent|multi_turn|environment": "tools are tools=file.py:f,g, environments "
    "environment=file.py:Factory or openenv:URL, an agent "
    "agent='python my_agent.py', their limits environment.*",
    "critic|value_model|value_function": "there is no critic: advantages come from groups",
    "image|video|audio|vision": "models and data are text only",
    "megatron|deepspeed|pipeline_parallel|expert_parallel": "devices share the work by mesh.data, "
    "mesh.fsdp, mesh.tensor and "
    "mesh.context alone",
    "context_parallel|sequence_parallel|^cp_size$": "rows are split over devices by mesh.context",
    r"^(num_|n_)?(device|gpu|tpu|core)s?$|^cuda$": "JAX_PLATFORMS chooses the platform, "
    "mesh.trainer the devices, mesh.data, "
    "mesh.fsdp, mesh.tensor, mesh.context "
    "their shares",
}
"""Parts of a name, as a pattern -> why no key has it."""


@functools.cache
def aliases_of(config_type: type) -> dict[str, Alias]:
    """The short forms that a command accepts."""
    keys = keys_of(config_type)
    command = command_of(config_type)
    aliases = {}
    for name, alias in ALIASES.items():
        is_accepted = not alias.commands or command in alias.commands
        if is_accepted and alias.key in keys:
            aliases[name] = alias
    return aliases


@functools.cache
def names_of(config_type: type) -> dict[str, str]:
    """Every name of ours that a command accepts -> its dotted key; full names first."""
    names = {name: name for name in keys_of(config_type)}
    for name, alias in aliases_of(config_type).items():
        names[name] = alias.key
    return names


class UnknownKey(ShoalError):
    """Raised for a name that is no key of a command."""

    @classmethod
    def of_all(cls, errors: Sequence[str], config_type: type) -> UnknownKey:
        """One error for all unknown names, with one hint at its end."""
        return cls(f"{'; '.join(errors)} (`shoal {command_of(config_type)} --help` lists all keys)")


def find_key(config_type: type, name: str) -> Key:
    """The key of one of our names; raises ShoalError with the nearest name if there is none."""
    names = names_of(config_type)
    if name in names:
        return keys_of(config_type)[names[name]]
    for section in sections_of(config_type):
        if name in (section, section.rpartition(".")[2]):
            inside = next(key for key in names if key.startswith(f"{section}."))
            raise ShoalError(
                f"{name}: that is a section of keys, not a key; set one of its keys, such as "
                f"{inside}"
            )
    if name in names_of(Config) or front_end().find_flag(Config, name):
        raise ShoalError(
            f"{name}: shoal {command_of(config_type)} has no use for it, shoal train does"
            f"{did_you_mean(name, names) or ': leave it out here'}"
        )
    keys_by_name = {}  # of ours and of other systems' flags
    for flag_name, rows in front_end().flags_of(config_type).items():
        if rows[0].keys:
            keys_by_name[flag_name] = ", ".join(rows[0].keys)
    keys_by_name.update(names)
    meant = nearest(name, keys_by_name)
    ours = nearest(name, names)
    if nearness(name, ours) >= nearness(name, meant) - OURS_FIRST:
        meant = ours
    shown_as = {}
    for known, key in keys_by_name.items():
        shown_as[known] = known
        if known != key:
            shown_as[known] = f"{known} ({key})"
    reason = f"there is no such key{did_you_mean(name, [meant], shown_as)}"
    # mesh.data is near to `dataset`, and never meant.
    if name == "dataset" or not did_you_mean(name, names):
        reason = _why_unsupported(name) or reason
    raise UnknownKey(f"{name}: {reason}")


def _why_unsupported(name: str) -> str:
    """Why a name that is no key or flag has none; empty where nothing is known of it."""
    for pattern, reason in UNSUPPORTED.items():
        if re.search(pattern, name.lower()):
            return reason
    return ""


def key_of(config_type: type, name: str) -> Key | None:
    """The key of a name, ours or another system's; None if there is none."""
    key = names_of(config_type).get(name, "")
    flag = front_end().find_flag(config_type, name)
    if not key and flag and flag.is_rename:
        key = flag.keys[0]
    return keys_of(config_type).get(key)
