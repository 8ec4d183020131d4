"""Makes the texts of `--help` and `--dry-run` from the configuration's dataclasses."""

from __future__ import annotations

import re
import shutil
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from shoal.config.arguments import POSITIONALS, positionals_text
from shoal.config.commands import COMMANDS, PlanConfig, command_of
from shoal.config.derived import learning_rate_text, step_text
from shoal.config.foreign import Flag, front_end
from shoal.config.key import Key, keys_of, overridden_keys, sections_of, shown
from shoal.config.names import aliases_of, find_key, names_of
from shoal.config.preset_files import (
    RECIPES,
    packaged,
    preset_folders,
    presets_of,
    recipe_names,
)
from shoal.config.recipe_files import ABOUT, read_recipe
from shoal.config.sections.model import ModelSection
from shoal.config.stored import to_yaml
from shoal.config.train import Config
from shoal.config.yaml_files import flat_values
from shoal.records import ShoalError
from shoal.text import did_you_mean, duration

if TYPE_CHECKING:
    from shoal.config.merge import Resolved
    from shoal.tasks.task import Task

EXAMPLES = """\
shoal train                                        trains a tiny model, one to three minutes \
on a CPU
shoal train model=Qwen/Qwen2.5-1.5B-Instruct task=gsm8k
shoal train resume=last                            resumes the run started last
shoal doctor model=... task=... reward=f.py:g      checks a job before it runs
shoal plan model.name=llama3.1-8b topology=v5p-8   says what a job costs on other devices
shoal train --multirun optimizer.lr=1e-5,1e-4      makes a run for each value
shoal train --help                                 lists every key, with its default and meaning
shoal train --help optimizer                       lists the keys of one topic"""

OPTIONS: Mapping[str, str] = {
    "--config-name": "NAME: a preset, a recipe (--help recipes) or a YAML file, also alone",
    "--preset": "NAME: a preset below that file",
    "--dry-run": "print the resolved configuration and change nothing",
    "--plan": "train only: `shoal plan` with the same arguments",
    "--multirun": "train only, also -m: a run for each combination of a,b and range(a,b) values",
    "--help": "TOPIC: this text, or only one topic or key",
}
"""Options of a command that are not keys."""

TOPICS: Mapping[str, str] = {
    "model": "the model to train, and the type of its computation",
    "model.lora": "an adapter that is trained instead of all weights",
    "task": "questions to train and evaluate on",
    "reward": "functions that score completions",
    "reward.judge": "a language model that scores completions",
    "environment": "tools and environments, in rollouts of several turns",
    "sampling": "how completions are sampled",
    "algorithm": "from rewards to a loss",
    "teacher": "models for on-policy distillation, or the model itself with a hint",
    "optimizer": "AdamW and its learning rate",
    "critic": "a second model that learns what a rollout will earn",
    "batch": "sizes of a step, a group and a micro-batch",
    "train": "evaluation, staleness and curriculum",
    "evaluation": "how the questions of an evaluation are answered",
    "mesh": "how devices share the work",
    "sampler": "samplers in processes of their own",
    "publish": "how samplers get new weights",
    "ray": "the cluster in which samplers run",
    "vllm": "vLLM servers that sample",
    "checkpoint": "when the run is saved, and which checkpoints are kept",
    "report": "metrics and groups that a run writes",
    "report.wandb": "Weights & Biases",
    "report.mlflow": "MLflow",
    "report.trackio": "Trackio",
}
"""Section of the configuration -> its title in the help."""


def overview() -> str:
    """Returns the text of `shoal --help`: the purpose of each command, and examples."""
    lines = [
        "Post-trains language models by reinforcement learning from verifiable rewards.",
        "",
        "usage: shoal COMMAND [PRESET.yml] [key=value ...]",
        "",
    ]
    width = max(map(len, COMMANDS)) + 2
    for command, config_type in COMMANDS.items():
        lines.append(f"  {command:<{width}}{purpose(config_type)}")
    lines += ["", textwrap.indent(EXAMPLES, "  ")]
    return "\n".join(lines)


def purpose(config_type: type) -> str:
    """Returns what a command does: the first sentence of its dataclass's docstring, without the
    command's name (what is before the first `: `), its final point and its capital. "" without a
    docstring."""
    text = " ".join((config_type.__doc__ or "").partition("\n\n")[0].split())
    text = (text.partition(": ")[2] or text).partition(". ")[0]
    return text[:1].lower() + text[1:].rstrip(".")


def command_help(command: str, topics: Sequence[str] = ()) -> str:
    """Returns the text of `shoal COMMAND --help`: every key by section with type, default and
    meaning, and the short forms; with `topics` only these sections, keys, flags of other systems or
    parts of dotted names, in the order given, with an empty line between two. ShoalError for a
    topic that is none of these. `command`: a key of COMMANDS; KeyError for another."""
    config_type = COMMANDS[command]
    if topics:
        return "\n\n".join(_topic_help(config_type, topic) for topic in topics)
    words = positionals_text(command) or "[PRESET.yml | --config-name PRESET]"
    lines = [
        f"shoal {command}: {purpose(config_type)}",
        "",
        f"usage: shoal {command} {words} [key=value ...]",
    ]
    for name, text in options_of(command).items():
        lines.append(f"  {name:<15}{text}")
    lines.append("")
    lines += _listing(keys_of(config_type).values())
    aliases = aliases_of(config_type)
    if aliases:
        lines += ["", "short forms"]
    for name, alias in aliases.items():
        note = f"  ({alias.note})" if alias.note else ""
        lines.append(f"  {name}= is {alias.key}={note}")
    systems: set[str] = set()
    for rows in front_end().flags_of(config_type).values():
        systems.update(flag.system for flag in rows)
    if systems:
        names = ", ".join(sorted(systems))
        lines.append("")
        lines.append(
            f"flags of {names} are accepted, too; what one becomes: shoal {command} --help FLAG"
        )
    topics = [topic for topic in TOPICS if topic in sections_of(config_type)]
    if topics:
        lines += ["", f"a single topic: shoal {command} --help TOPIC, of"]
        lines += _wrapped(", ".join(topics), indent=2, break_on_hyphens=True)
    return "\n".join(lines)


def options_of(command: str) -> dict[str, str]:
    """Returns option -> help text of the options that a command accepts, such as `--dry-run`.
    Options are not keys. All have --dry-run and --help; only `train` has --multirun and --plan; a
    command in POSITIONALS, which takes arguments that are not keys, has no --config-name and no
    --preset."""
    options = dict(OPTIONS)
    if command != "train":
        del options["--multirun"]
        del options["--plan"]
    if command in POSITIONALS:
        del options["--config-name"]
        del options["--preset"]
    return options


def _topic_help(config_type: type, topic: str) -> str:
    """Returns the help of one topic of `shoal COMMAND --help TOPIC`: of the first of these that has
    this name: a section, a key (or a short form of one), another system's flag, a part of dotted
    names such as `lora`, for all keys with this part. ShoalError if there is none. `config_type`:
    the command's dataclass."""
    keys = keys_of(config_type).values()
    names = names_of(config_type)
    if topic in sections_of(config_type):
        lines = _listing(key for key in keys if key.name.startswith(f"{topic}."))
        return "\n".join(lines + _packaged_lines(config_type, topic))
    if topic in names:
        lines = []
        if topic != names[topic]:
            lines.append(f"{topic}: another name of {names[topic]}")
        lines += _key_lines(find_key(config_type, topic))
        return "\n".join(lines + _packaged_lines(config_type, topic))
    if topic == "recipes" and RECIPES in preset_folders(command_of(config_type)):
        return "\n".join(_recipe_lines())
    rows = front_end().flags_of(config_type).get(topic)
    if rows:
        return "\n".join(_flag_lines(config_type, rows))
    # A part of a dotted name, like `lora`, shows all keys that have this part.
    with_part = [key for key in keys if topic in key.name.split(".")]
    if with_part:
        return "\n".join(_listing(with_part))
    known = list(sections_of(config_type)) + list(names)
    raise ShoalError(
        f"{topic}: there is no such topic or key{did_you_mean(topic, known) or ';'} `shoal "
        f"{command_of(config_type)} --help` lists all"
    )


def _packaged_lines(config_type: type, topic: str) -> list[str]:
    """Returns lines to put below a topic's help: an empty one, a title, and one for each packaged
    preset that `recipe=` or `algorithm=` can name, with the first sentence of its file. [] if
    `topic` is neither `recipe` nor `algorithm`, or if the command does not have that key."""
    # "" for other topics is no key, so that the condition below holds for them, too
    key = {"recipe": "recipe", "algorithm": "algorithm.name"}.get(topic, "")
    if key not in keys_of(config_type):
        return []
    heads = {}  # name -> the first sentence of its file
    for name in presets_of(topic):
        file = packaged(topic, name)
        if file:
            text = file.read_text(encoding="utf-8")
            # Up to a point (but not that of "Dr."), a parenthesis or the end of the first line.
            sentence = re.split(r"(?<!Dr)[.] | \(|[.,]?\n", text)[0]
            heads[file.stem] = sentence.lstrip("# ")
    if not heads:
        return []
    width = max(map(len, heads)) + 2
    lines = ["", f"settings by name: {topic}="]
    for name, head in heads.items():
        lines.append(f"  {name:<{width}}{head}")
    return lines


def _recipe_lines() -> list[str]:
    """Returns a title, and two lines for each packaged recipe: what it is, and what it took."""
    lines = ["recipes: config_name= (docs/recipes.md)"]
    for name in recipe_names():
        file = RECIPES / f"{name}.yaml"
        recipe = read_recipe(flat_values(file, (ABOUT,)).get(ABOUT), file, name)
        took = f"{duration(recipe.seconds)} on {recipe.hardware}"
        if recipe.band is None:
            took = f"{recipe.hardware}; not measured"
        lines += [f"  {name}", *_wrapped(f"{recipe.what} ({took})")]
    return lines


def _flag_lines(config_type: type, rows: Sequence[Flag]) -> list[str]:
    """Returns the help of another system's flag, and of the keys that it sets. `rows`: one for each
    system that has a flag of this name, at least one; the first one's meaning and keys are shown.
    Keys that the command does not have are left out."""
    flag = rows[0]
    lines = [f"  {flag.name} ({', '.join(row.system for row in rows)})"]
    lines += _wrapped(flag.meaning or "another name of this key")
    known = keys_of(config_type)
    for key in flag.keys:
        if key in known:
            lines += _key_lines(known[key])
    return lines


def _listing(keys: Iterable[Key]) -> list[str]:
    """Returns the lines of the help of keys, grouped by section under the section's title, with an
    empty line between two sections. Keys without a section have no title. Sections are in the order
    of their first key. KeyError for a section without a title in TOPICS."""
    lines: list[str] = []
    sections: dict[str, list[Key]] = {}
    for key in keys:
        sections.setdefault(key.section, []).append(key)
    for section, keys_of_section in sections.items():
        if lines:
            lines.append("")
        if section:
            lines.append(f"{section}: {TOPICS[section]}")
        for key in keys_of_section:
            lines += _key_lines(key)
    return lines


def _key_lines(key: Key) -> list[str]:
    """Returns the help of one key."""
    lines = [f"  {key.name}={shown(key.default)}"]
    return lines + _wrapped(f"{key.help} [{key.type_text}]")


def _wrapped(text: str, indent: int = 6, break_on_hyphens: bool = False) -> list[str]:
    """Wraps a text to the terminal's width (110 if unknown), but at least 60 and at most 140
    columns, and returns its lines, each indented by `indent` spaces, which count as columns. A
    longer word without a break is split."""
    width = max(60, min(shutil.get_terminal_size((110, 24)).columns, 140))
    margin = " " * indent
    return textwrap.wrap(
        text,
        width,
        initial_indent=margin,
        subsequent_indent=margin,
        break_on_hyphens=break_on_hyphens,
    )


# ---- before a run


def dry_run(
    config: Any,
    resolved: Resolved,
    functions: Sequence[Callable] = (),
    task: Task | None = None,
    with_settings: bool = True,
) -> str:
    """Checks a configuration as its command would, and returns the text that a dry run prints: the
    resolved configuration as YAML, then comments (lines that begin with `#`): notes of the merge,
    what other systems' flags became, values that differ from the defaults with their origins, and
    what the check found; for a training also the hub id that `model.name` loads and the size of a
    step. For `shoal plan`, and without `with_settings`, it has no YAML. Prints nothing itself; a
    reward function that the check calls may. ShoalError if the command would refuse the
    configuration. `resolved`: the merge that made `config`; `functions`, `task`: reward functions
    and data that were given from Python."""
    from shoal.config.merge import origin_text
    from shoal.config.stored import difference_from_defaults

    keys = keys_of(type(config))
    lines = list(resolved.notes)
    if resolved.became:
        lines.append("flags of other systems:")
        lines += [f"  {line}" for line in resolved.became]
    changed = difference_from_defaults(config)
    if changed:
        lines.append("differs from the defaults:")
    else:
        lines.append("nothing differs from the defaults")
    for name, value in changed.items():
        if name not in overridden_keys(config):  # keys whose value another key replaces
            origin = origin_text(resolved.origins.get(name, "Shoal"))
            default = shown(keys[name].default) or "empty"
            lines.append(f"  {name}={shown(value)}  # {origin} (default {default})")
    if isinstance(config, Config):
        if config.model.name and config.model.path == ModelSection.path:
            from shoal.model.published import model_named

            name = config.model.name
            hub_id = name if "/" in name else model_named(name).hub_id
            lines.append(f"model.name={name} loads {hub_id}")
        lines += [step_text(config), learning_rate_text(config)]
        if config.resume:
            lines.append(
                "a resumed run has its own configuration, changed by the keys that you give"
            )
    lines += _checked(config, resolved, functions, task)
    # For a plan only the estimate matters; `shoal train --dry-run` prints the settings.
    text = to_yaml(config) if with_settings and not isinstance(config, PlanConfig) else ""
    for line in lines:
        comment = f"# {' '.join(line.splitlines())}"
        text += comment.rstrip() + "\n"
    return text


def _checked(
    config: Any, resolved: Resolved, functions: Sequence[Callable], task: Task | None
) -> list[str]:
    """Returns the lines that a dry run shows besides the settings: notes, warnings, and for some
    commands an estimate or the files that they would write. Arguments and errors as for
    `dry_run`."""
    from shoal.compat.front import typed_names_adder
    from shoal.job.dry_run import adapter_lines, check_dry_run

    command = command_of(type(config))
    add_typed_names = typed_names_adder(resolved)
    lines = []
    for finding in check_dry_run(config, functions, task):
        label = "note" if finding.level == "ok" else "warning"
        lines.append(f"{label}: {add_typed_names(str(finding))}")
    lines += adapter_lines(config)
    if command == "plan":
        from shoal.commands.plan import estimate

        lines += estimate(config)
    elif command == "export" and config.source:
        from shoal.commands.export import card_lines

        lines += card_lines(config)
    elif command == "compat":
        from shoal.commands.compat import checked_scripts

        lines += map(str, checked_scripts(config))
    return lines
