"""The texts of `--help` and `--dry-run`, made from the schema."""

from __future__ import annotations

import re
import shutil
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from shoal.config.commands import COMMANDS, PlanConfig, command_of
from shoal.config.derived import step_text
from shoal.config.key import Key, keys_of, overridden_keys, sections_of, shown
from shoal.config.sections.model import ModelSection
from shoal.config.train import Config
from shoal.config.words import (
    POSITIONALS,
    ForeignFlag,
    aliases_of,
    find_key,
    names_of,
    packaged,
    positionals_text,
    presets_of,
    translator,
)
from shoal.records import ShoalError
from shoal.text import did_you_mean

if TYPE_CHECKING:
    from shoal.config.merge import Resolved

EXAMPLES = """\
shoal train                                        a tiny model, word problems, one to three \
minutes on a CPU
shoal train model=Qwen/Qwen2.5-1.5B-Instruct task=gsm8k
shoal train resume=last                            resumes the run started last
shoal doctor model=... task=... reward=f.py:g      checks a job before it runs
shoal plan model.name=llama3.1-8b topology=v5p-8   what a job costs on devices that are not here
shoal train --multirun optimizer.lr=1e-5,1e-4      a run for each value
shoal train --help                                 every key, with its default and meaning
shoal train --help optimizer                       the keys of one topic"""

OPTIONS: Mapping[str, str] = {
    "--config-name": "NAME: a preset or a YAML file; a file may also stand as a word by itself",
    "--preset": "NAME: a preset beneath that file",
    "--dry-run": "print the resolved configuration and touch nothing",
    "--plan": "train only: `shoal plan` of the same words",
    "--multirun": "train only, also -m: a run for each combination of a,b and range(a,b) values",
    "--help": "TOPIC: this text, or only one topic or key",
}
"""Options of a command that are not keys."""

TOPICS: Mapping[str, str] = {
    "model": "the model to train, and the type of its computation",
    "model.lora": "an adapter that is trained in place of all weights",
    "task": "questions to train and evaluate on",
    "reward": "functions that score completions",
    "reward.judge": "a language model that scores completions",
    "environment": "tools and environments, in rollouts of several turns",
    "sampling": "how completions are sampled",
    "algorithm": "from rewards to a loss",
    "teacher": "a second model for on-policy distillation",
    "optimizer": "AdamW and its learning rate",
    "batch": "sizes of a step, a group and a micro-batch",
    "train": "evaluation, staleness and curriculum",
    "mesh": "how devices share the work",
    "sampler": "samplers in processes of their own",
    "publish": "how samplers get new weights",
    "ray": "the cluster that samplers are in",
    "vllm": "servers of vLLM that sample",
    "checkpoint": "when the run is saved, and which checkpoints are kept",
    "report": "metrics and groups that a run writes",
    "report.wandb": "Weights & Biases",
}
"""Section -> its title in the help."""


def overview() -> str:
    """The text of `shoal --help`."""
    width = max(map(len, COMMANDS)) + 2
    lines = [
        f"  {command:<{width}}{purpose(config_type)}" for command, config_type in COMMANDS.items()
    ]
    return "\n".join(
        [
            "Post-trains language models by reinforcement learning from verifiable rewards.",
            "",
            "usage: shoal COMMAND [PRESET.yml] [key=value ...]",
            "",
            *lines,
            "",
            textwrap.indent(EXAMPLES, "  "),
        ]
    )


def purpose(config_type: type) -> str:
    """The purpose of a command: the first sentence of its dataclass's docstring, without the
    command's name."""
    text = " ".join((config_type.__doc__ or "").partition("\n\n")[0].split())
    text = (text.partition(": ")[2] or text).partition(". ")[0]
    return text[:1].lower() + text[1:].rstrip(".")


def command_help(command: str, topics: Sequence[str] = ()) -> str:
    """The text of `shoal COMMAND --help`: every key by topic with type, default and meaning, and
    the short forms; with `topics` only these sections or keys."""
    config_type = COMMANDS[command]
    if topics:
        return "\n\n".join(_topic_help(config_type, topic) for topic in topics)
    words = positionals_text(command)
    lines = [
        f"shoal {command}: {purpose(config_type)}",
        "",
        f"usage: shoal {command} {words or '[PRESET.yml | --config-name PRESET]'} [key=value ...]",
        *[f"  {name:<15}{text}" for name, text in options_of(command).items()],
        "",
        *_listing(keys_of(config_type).values()),
    ]
    if aliases := aliases_of(config_type):
        lines += ["", "short forms"]
        lines += [
            f"  {name}= is {alias.key}=" + (f"  ({alias.note})" if alias.note else "")
            for name, alias in aliases.items()
        ]
    if systems := sorted(
        {system for flag in translator().flags(config_type).values() for system in flag.systems}
    ):
        lines += [
            "",
            f"flags of {', '.join(systems)} are accepted, too; what one becomes: shoal {command} "
            f"--help FLAG",
        ]
    if topics := [topic for topic in TOPICS if topic in sections_of(config_type)]:
        lines += [
            "",
            f"one topic alone: shoal {command} --help TOPIC, of",
            *textwrap.wrap(
                ", ".join(topics), _width(), initial_indent="  ", subsequent_indent="  "
            ),
        ]
    return "\n".join(lines)


def options_of(command: str) -> dict[str, str]:
    """The options that a command accepts."""
    without = {"--multirun", "--plan"} if command != "train" else set()
    without |= {"--config-name", "--preset"} if command in POSITIONALS else set()
    return {name: text for name, text in OPTIONS.items() if name not in without}


def _topic_help(config_type: type, topic: str) -> str:
    """The help of one section, key or flag."""
    if topic in sections_of(config_type):
        lines = _listing(
            key for key in keys_of(config_type).values() if key.name.startswith(f"{topic}.")
        )
        return "\n".join([*lines, *_packaged_lines(config_type, topic)])
    if topic in names_of(config_type):
        key = names_of(config_type)[topic]
        other = [f"{topic}: another name of {key}"] if topic != key else []
        return "\n".join(
            [
                *other,
                *_key_lines(find_key(config_type, topic)),
                *_packaged_lines(config_type, topic),
            ]
        )
    if flag := translator().flags(config_type).get(topic):
        return "\n".join(_flag_lines(config_type, flag))
    # `lora` for `model.lora`: a part of a name names all that has it.
    if keys := [key for key in keys_of(config_type).values() if topic in key.name.split(".")]:
        return "\n".join(_listing(keys))
    known = [*sections_of(config_type), *names_of(config_type)]
    raise ShoalError(
        f"{topic}: there is no such topic or key{did_you_mean(topic, known) or ';'} "
        f"`shoal {command_of(config_type)} --help` lists all"
    )


def _packaged_lines(config_type: type, topic: str) -> list[str]:
    """The presets that a topic's key names, each with the first line of its file."""
    key = {"recipe": "recipe", "algorithm": "algorithm.name"}.get(topic, "")
    names = presets_of(topic) if key in keys_of(config_type) else []
    files = [file for name in names if (file := packaged(topic, name))]
    heads = [
        re.split(r"(?<!Dr)[.] | \(|[.,]?\n", file.read_text(encoding="utf-8"))[0].lstrip("# ")
        for file in files
    ]
    width = max((len(file.stem) for file in files), default=0) + 2
    lines = [f"  {file.stem:<{width}}{head}" for file, head in zip(files, heads, strict=True)]
    return ["", f"settings by name: {topic}=", *lines] if files else []


def _flag_lines(config_type: type, flag: ForeignFlag) -> list[str]:
    """The help of another system's flag, with the keys that it sets."""
    keys = [keys_of(config_type)[key] for key in flag.keys if key in keys_of(config_type)]
    text = flag.meaning or "another name of this key"
    lines = textwrap.wrap(
        text, _width(), initial_indent=" " * 6, subsequent_indent=" " * 6, break_on_hyphens=False
    )
    return [
        f"  {flag.name} ({', '.join(flag.systems)})",
        *lines,
        *(line for key in keys for line in _key_lines(key)),
    ]


def _listing(keys: Iterable[Key]) -> list[str]:
    """Keys by section, each section under its name."""
    lines: list[str] = []
    sections: dict[str, list[Key]] = {}
    for key in keys:
        sections.setdefault(key.section, []).append(key)
    for section, inside in sections.items():
        lines += [""] if lines else []
        lines += [f"{section}: {TOPICS[section]}"] if section else []
        lines += [line for key in inside for line in _key_lines(key)]
    return lines


def _key_lines(key: Key) -> list[str]:
    head = f"  {key.name}={shown(key.default)}"
    text = f"{key.help} [{key.type_text}]"
    return [
        head,
        *textwrap.wrap(
            text,
            _width(),
            initial_indent=" " * 6,
            subsequent_indent=" " * 6,
            break_on_hyphens=False,
        ),
    ]


def _width() -> int:
    return max(60, min(shutil.get_terminal_size((110, 24)).columns, 140))


# ---- before a run


def dry_run(config: Any, resolved: Resolved, warnings: Sequence[str] = ()) -> str:
    """The resolved configuration as YAML, but that of a plan, with comments: values that differ
    from the defaults and their origins, the keys that other systems' flags became, a step's size,
    and the warnings given."""
    from shoal.config.merge import origin_text
    from shoal.config.stored import difference_from_defaults

    keys = keys_of(type(config))
    lines = [note for note in resolved.notes if note not in resolved.became]
    if resolved.became:
        lines += ["flags of other systems:", *(f"  {line}" for line in resolved.became)]
    if changed := difference_from_defaults(config):
        lines += [
            "differs from the defaults:",
            *(
                f"  {name}={shown(value)}  # {origin_text(resolved.origins.get(name, 'Shoal'))} "
                f"(default {shown(keys[name].default) or 'empty'})"
                for name, value in changed.items()
                if name not in overridden_keys(config)
            ),
        ]
    else:
        lines.append("nothing differs from the defaults")
    if isinstance(config, Config):
        if config.model.name and config.model.path == ModelSection.path:
            from shoal.model.published import model_named

            name = config.model.name
            lines.append(
                f"model.name={name} loads {name if '/' in name else model_named(name).hub_id}"
            )
        lines.append(step_text(config))
        if config.resume:
            lines.append(
                "a resumed run has its own configuration, changed by the keys that you give"
            )
    # A plan's reader wants the estimate, and `shoal train --dry-run` prints the settings.
    text = "" if isinstance(config, PlanConfig) else resolved.text
    return text + "".join(
        f"# {' '.join(line.splitlines())}".rstrip() + "\n" for line in [*lines, *warnings]
    )
