"""Names of keys: short forms, the key that a typed name stands for, and for an unknown name the
nearest known one or the reason why Shoal has no such key."""

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
    """A short form of a key: the key, the commands that accept the short form (empty for all
    commands that have the key), and a note for the help."""

    key: str
    commands: tuple[str, ...] = ()
    note: str = ""


_SAMPLING = ("eval", "generate", "serve")


ALIASES: Mapping[str, Alias] = {
    "model": Alias("model.path"),
    "task": Alias("task.name", note="loads the preset of that name, which your own keys override"),
    "reward": Alias("reward.functions", note="file.py:function, several with commas"),
    "tools": Alias("environment.tools", note="file.py:f,g: functions that the model may call"),
    "environment": Alias("environment.factory", note="file.py:Factory"),
    "rollout": Alias("environment.rollout", note="file.py:f, in TRL's convention"),
    "agent": Alias("environment.agent", note="a program that asks OPENAI_BASE_URL, or file.py:f"),
    "algorithm": Alias("algorithm.name", note="a paper's settings, which your own keys override"),
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
"""Short forms of Shoal's keys, by name."""


OURS_FIRST = 0.1
"""By how much (in similarity, 0 to 1) another system's flag must be nearer to a misspelled name
than the nearest key of Shoal, for the flag to be suggested instead."""


QUANTISED = (
    "8-bit weights are model.quantise=int8 or fp8, only for LoRA's frozen weights, or "
    "sampler.quantise"
)
UNSUPPORTED: Mapping[str, str] = {
    "^dataset$|^(train|eval)_(dataset|data|files?)$": "data is task=, a name or rows from Python, "
    "and held_out= the rows to evaluate on; from "
    "files task=custom "
    "task.path=FILE, or dataset_name=FILE",
    "lora|peft|dora": "LoRA is model.lora.rank, alpha, targets, rslora and path; DoRA and other "
    "variants are not supported",
    "quant|4bit|8bit|fp8|int8": QUANTISED,
    "vllm|sglang": "the sampler is the model itself, or with sampler.kind=vllm a server of vLLM",
    "tool|agent|multi_turn|environment": "tools are tools=file.py:f,g, environments "
    "environment=file.py:Factory or openenv:URL, an agent "
    "agent='python my_agent.py', their limits environment.*",
    "critic|value_model|value_function": "a critic comes with algorithm.advantage=gae; its "
    "settings are critic.shared, coef, path, lr, lam, value_clip, warmup_steps and warmup_until",
    "image|video|audio|vision": "models and data are text only",
    "expert_parallel|^ep_size$": "experts are split over devices by mesh.expert",
    "megatron|deepspeed|pipeline_parallel": "devices share the work by mesh.data, mesh.fsdp, "
    "mesh.tensor, mesh.context and mesh.expert alone",
    "context_parallel|sequence_parallel|^cp_size$": "rows are split over devices by mesh.context",
    r"^(num_|n_)?(device|gpu|tpu|core)s?$|^cuda$": "JAX_PLATFORMS chooses the platform, "
    "mesh.trainer the devices, mesh.data, "
    "mesh.fsdp, mesh.tensor, mesh.context, "
    "mesh.expert their shares",
}
"""Regular expression that an unknown name matches -> why Shoal has no such key, for the error
message. The first match counts."""


@functools.cache
def aliases_of(config_type: type) -> dict[str, Alias]:
    """Returns the short forms that a command accepts, by name: those of ALIASES whose key the
    command has and whose `commands` are empty or contain it. All calls for a class return the same
    dict, so it must not be changed."""
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
    """Returns a mapping from every name of Shoal's that a command accepts (full names first, then
    short forms) to its dotted key. Other systems' flags are not included. All calls for a class
    return the same dict, so it must not be changed."""
    names = {name: name for name in keys_of(config_type)}
    for name, alias in aliases_of(config_type).items():
        names[name] = alias.key
    return names


class UnknownKey(ShoalError):
    """An error for a name that is no key of a command."""

    @classmethod
    def of_all(cls, errors: Sequence[str], config_type: type) -> UnknownKey:
        """Returns one error that joins the messages of all unknown names, with one hint at its
        end."""
        return cls(f"{'; '.join(errors)} (`shoal {command_of(config_type)} --help` lists all keys)")


def find_key(config_type: type, name: str) -> Key:
    """Returns the key for a full name or a short form. If there is none, raises ShoalError that
    says why, or suggests the nearest name. It is an UnknownKey, unless the name is that of a
    section or is known to `shoal train` alone. Other systems' flags are not found here, only
    suggested."""
    names = names_of(config_type)
    if name in names:
        return keys_of(config_type)[names[name]]
    for section in sections_of(config_type):
        # `lora` means the section `model.lora` too.
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
    reason = f"there is no such key{_suggestion(config_type, name)}"
    # `dataset` looks like a misspelled mesh.data, but nobody who writes it means that.
    if name == "dataset" or not did_you_mean(name, names):
        reason = _why_unsupported(name) or reason
    raise UnknownKey(f"{name}: {reason}")


def _suggestion(config_type: type, name: str) -> str:
    """Returns the end of a message about an unknown name, `, did you mean lr (optimizer.lr)?`, for
    the nearest key, short form or flag of another system that the command accepts; '' if none is
    near. A flag is suggested only if it is nearer than Shoal's own names by more than OURS_FIRST,
    or if it alone has the sections that the name has, all before the last dot. A flag that sets no
    key is never suggested."""
    names = names_of(config_type)
    # Names to suggest: a key, a short form or another system's flag -> its key, or several keys
    # with commas.
    keys_by_name = {}
    for flag_name, rows in front_end().flags_of(config_type).items():
        if rows[0].keys:  # the row of the first system that has the flag
            keys_by_name[flag_name] = ", ".join(rows[0].keys)
    keys_by_name.update(names)
    meant = nearest(name, keys_by_name)
    ours = nearest(name, names)
    sections = _sections(name)
    flag_alone_has_sections = (
        sections != "" and _sections(meant) == sections and _sections(ours) != sections
    )
    ours_is_near = nearness(name, ours) >= nearness(name, meant) - OURS_FIRST
    if ours_is_near and not flag_alone_has_sections:
        meant = ours
    shown_as = {}  # name to suggest -> how the message writes it, like `lr (optimizer.lr)`
    for known, key in keys_by_name.items():
        shown_as[known] = known
        if known != key:
            shown_as[known] = f"{known} ({key})"
    return did_you_mean(name, [meant], shown_as)


def _sections(name: str) -> str:
    """Returns the sections of a dotted name, all before the last dot; "" if it has none."""
    return name.rpartition(".")[0]


def _why_unsupported(name: str) -> str:
    """Returns the reason in UNSUPPORTED why there is no key of this name; '' if no reason is known.
    Upper and lower case are the same; the first pattern that matches counts."""
    for pattern, reason in UNSUPPORTED.items():
        if re.search(pattern, name.lower()):
            return reason
    return ""


def key_of(config_type: type, name: str) -> Key | None:
    """Returns the key that a name stands for: a key of Shoal, a short form, or another system's
    flag that is only a renamed key. None if there is none, or if the command does not have the key,
    also for other flags."""
    key = names_of(config_type).get(name, "")
    flag = front_end().find_flag(config_type, name)
    if not key and flag and flag.is_rename:
        key = flag.keys[0]
    return keys_of(config_type).get(key)
