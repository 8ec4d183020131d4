"""`shoal compat`: writes scripts that run Shoal under the paths of scripts of MaxText, TorchRL,
TRL, verl and Tunix, so that their users can type their usual command lines. Where no command takes
a script's flags, its script ends with a line that says what to type.

src/MaxText/rl/train_rl.py -> run_as("train_rl") -> shoal train --config-name train_rl ..."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from shoal.config.arguments import is_file_argument, is_file_option, is_folder_option
from shoal.config.commands import CompatConfig
from shoal.config.preset_files import preset_of_own_file
from shoal.config.stored import require_given
from shoal.files import check_local, check_writable, write_text
from shoal.records import ShoalError
from shoal.report.console import Console
from shoal.text import count

MARK = "written by `shoal compat`"
"""Stands in every script that is written. A file without it was not written by Shoal and is never
replaced."""

SCRIPT = f'''#!/usr/bin/env python3
"""{{name}}, run by Shoal; {MARK}."""

import sys

from shoal.cli import run_as

if __name__ == "__main__":
    sys.exit(run_as("{{name}}"))
'''


@dataclass(frozen=True)
class ScriptShim:
    """What takes the place of one script of another system: a command of Shoal with a preset, and
    the paths under which users know the script."""

    preset: str  # the preset to load, or to lie beneath the file that the user names
    paths: tuple[str, ...]  # where the script is written, below the folder `to`
    words: tuple[str, ...] = ()  # words that the user's words may override
    configs: tuple[str, ...] = ()  # folders in which the user's YAML files may lie
    # For a script with subcommands: subcommand -> words for it.
    commands: Mapping[str, tuple[str, ...]] | None = None
    command: str = "train"  # the command of Shoal
    # For a script whose flags no command takes: what the error says to type in its place.
    instead: str = ""


_ENVIRONMENT = ("TRAINER_DEVICES_FRACTION", "SAMPLER_DEVICES_FRACTION")
"""Flags that MaxText's trainers read from environment variables, too."""
_TORCHRL = "sota-implementations/grpo/"
_CONFIGS = ("config", f"{_TORCHRL}config")

SHIMS: Mapping[str, ScriptShim] = {
    "grpo_demo": ScriptShim("grpo_demo", ("src/MaxText/examples/grpo_demo.py", "grpo_demo.py")),
    "grpo_llama3_1_70b_demo_pw": ScriptShim(
        "grpo_llama3_1_70b_demo_pw", ("src/MaxText/examples/grpo_llama3_1_70b_demo_pw.py",)
    ),
    "train_rl": ScriptShim(
        "train_rl",
        (
            "src/MaxText/rl/train_rl.py",
            "MaxText/rl/train_rl.py",
            "src/maxtext/trainers/post_train/rl/train_rl.py",
            "maxtext/trainers/post_train/rl/train_rl.py",
        ),
    ),
    "to_maxtext": ScriptShim(
        "base",
        (
            "MaxText/utils/ckpt_conversion/to_maxtext.py",
            "src/MaxText/utils/ckpt_conversion/to_maxtext.py",
            "maxtext/checkpoint_conversion/to_maxtext.py",
        ),
        command="convert",
    ),
    "to_huggingface": ScriptShim(
        "base",
        ("maxtext/checkpoint_conversion/to_huggingface.py",),
        ("format=huggingface",),
        command="convert",
    ),
    "grpo": ScriptShim(
        "grpo_gsm8k",
        (f"{_TORCHRL}grpo.py", f"{_TORCHRL}grpo-sync.py", "grpo.py", "grpo-sync.py"),
        configs=_CONFIGS,
    ),
    "grpo-async": ScriptShim(
        "grpo_gsm8k",
        (f"{_TORCHRL}grpo-async.py", "grpo-async.py"),
        ("train.max_staleness=1",),
        _CONFIGS,
    ),
    "trl": ScriptShim("trl", ("bin/trl",), commands={"grpo": (), "rloo": ("algorithm=rloo",)}),
    # DAPO's script has main_ppo's flags and defaults, but for the reward manager `dapo`, which
    # subtracts nothing by default.
    "verl": ScriptShim("verl", ("verl/trainer/main_ppo.py", "recipe/dapo/main_dapo.py")),
    "verl.model_merger": ScriptShim(
        "",
        ("verl/model_merger/__main__.py",),
        instead="a checkpoint here is in one piece: `shoal export from=RUN to=FOLDER` writes the "
        "model of a run, or of one of its checkpoints, in Hugging Face's format",
    ),
    "verl.trainer.main_generation": ScriptShim(
        "",
        ("verl/trainer/main_generation.py", "verl/trainer/main_generation_server.py"),
        instead="`shoal generate model=MODEL prompts=FILE output=FILE.jsonl num_generations=N` "
        "samples completions of the prompts in a parquet or jsonl file",
    ),
    "verl.trainer.main_eval": ScriptShim(
        "",
        ("verl/trainer/main_eval.py",),
        instead="`shoal eval responses=FILE.jsonl task=custom task.path=DATA "
        "reward=FILE.py:compute_score` scores responses made elsewhere, rows with `prompt` and "
        "`response`",
    ),
    "tunix": ScriptShim("base_config", ("tunix/cli/grpo_main.py",)),
}
"""Name for `run_as` -> what takes the place of the script of that name."""

SHELL = (
    "end_to_end/tpu/test_grpo.sh",
    "docker_build_dependency_image.sh",
    "docker_upload_runner.sh",
)
"""Paths of shell scripts to write; their contents are in `assets/doors` under the same file
names."""

REQUIREMENTS = tuple(
    f"{folder}requirements_{name}.txt" for folder in ("", _TORCHRL) for name in ("gsm8k", "ifeval")
)
"""Paths of requirement files from which TorchRL's users install; their contents, in `assets/doors`
under the same file names, require nothing."""


def compat(config: CompatConfig, console: Console | None = None) -> dict[str, Any]:
    """Writes a script at each path at which other systems' scripts are, below the folder `to`; each
    runs `shoal` in their place (`SHIMS`). Returns {"to": the folder, "scripts": the number of
    files}. Raises ShoalError, and writes nothing, if `to` is missing or if a path holds a file that
    Shoal did not write; files that it did write are replaced. All but the files that end in .txt
    are made executable. A console that was given can still be used afterwards."""
    require_given(config, "to")
    with console or Console() as console:
        scripts = checked_scripts(config)
        for path, text in scripts.items():
            write_text(path, text, "to")
            if path.suffix != ".txt":  # a requirements file is only read
                path.chmod(0o755)
        console.note(
            f"wrote {count(len(scripts), 'script')} to {config.to}: type your command lines there, "
            f"or the scripts' paths elsewhere; {Path(config.to) / 'bin' / 'trl'} stands for `trl`"
        )
    return {"to": config.to, "scripts": len(scripts)}


def checked_scripts(config: CompatConfig) -> dict[Path, str]:
    """Returns path -> text of all scripts that `compat` writes, without writing them. Raises
    ShoalError if a path holds a file without MARK, which Shoal did not write, as in a checkout of
    the other system, or if the folder `to` cannot be written. Paths are below the folder `to`;
    files that end in .txt are no scripts, but are among them."""
    folder = check_local(config.to, "to")
    check_writable(folder, "to", within=True)
    scripts = {}
    for name, shim in SHIMS.items():
        for path in shim.paths:
            scripts[folder / path] = SCRIPT.format(name=name)
    assets = resources.files("shoal").joinpath("assets", "doors")
    for path in SHELL + REQUIREMENTS:
        scripts[folder / path] = assets.joinpath(Path(path).name).read_text(encoding="utf-8")
    foreign = []
    for path in scripts:
        if path.exists() and MARK not in path.read_text(errors="replace"):
            foreign.append(path)
    if foreign:
        raise ShoalError(
            f"to={config.to}: nothing was written, for {', '.join(map(str, foreign))} would be "
            "replaced: give a folder outside, to=DIR, and type here python3 "
            f"DIR/{foreign[0].relative_to(folder)} ...; your own configuration files are read"
        )
    return scripts


def shim_argv(name: str, words: Sequence[str]) -> list[str]:
    """Returns the arguments of `shoal` that do what another system's script would do with the
    arguments `words`. `name`: the script's key in SHIMS; KeyError for another. The user's file and
    words have precedence over the script's preset and words. ShoalError if a script with
    subcommands gets none or an unknown one, and for a script with `instead`. Every script that
    trains reads the environment for flags that MaxText's trainers take from it; one with `configs`
    also looks there, below the current folder, for the user's YAML files, unless the words name a
    folder.

    >>> shim_argv("grpo_demo", ["--steps=4"])
    ['train', '--config-name', 'grpo_demo', '--steps=4']
    """
    shim = SHIMS[name]
    if shim.instead:
        raise ShoalError(f"{name} has no counterpart that takes its flags: {shim.instead}")
    words = list(words)
    beneath = []  # words that come before the user's, so that the user's have precedence
    if shim.configs:  # only TorchRL's scripts have some
        beneath += _torchrl_words()
    beneath += shim.words
    if shim.command == "train":
        for flag in _ENVIRONMENT:
            if os.environ.get(flag):
                beneath.append(f"{flag}={os.environ[flag]}")
    if shim.commands is not None:
        given = words.pop(0) if words else ""
        if given not in shim.commands:
            known = ", ".join(f"`{name} {subcommand}`" for subcommand in shim.commands)
            raise ShoalError(f"{name}: expected one of {known}")
        beneath += shim.commands[given]
    words = _without_own_file(words, shim)
    is_file_first = bool(words) and is_file_argument(words[0])
    names_file = any(is_file_argument(word) or is_file_option(word) for word in words)
    folder = ""  # the folder of the user's YAML files, relative to the current folder
    if not any(is_folder_option(word) for word in words):
        for config_folder in shim.configs:
            if Path(config_folder).is_dir():
                folder = config_folder
                break
    line = [shim.command]
    if is_file_first:
        line.append(words.pop(0))
    # With a file of the user the preset lies beneath it; without one it is the configuration. A
    # folder may hold a file with the preset's name, which then lies above the packaged one.
    if names_file or folder:
        line += ["--preset", shim.preset]
    if not names_file:
        line += ["--config-name", shim.preset]
    if folder:
        line += ["--config-dir", folder]
    return line + beneath + words


def _without_own_file(words: Sequence[str], shim: ScriptShim) -> list[str]:
    """Returns the arguments without the option that names one of the script's own files, and
    without Hydra's option for its folder, which is relative to the script: the preset has the
    settings of that file. Returns them unchanged if the user has a file of that name, in the named
    folder or, without one, in the current folder."""
    rest = []
    name = ""
    folder = ""
    unread = list(words)
    while unread:
        word = unread.pop(0)
        if not (is_file_option(word) or is_folder_option(word)):
            rest.append(word)
            continue
        _, equals, value = word.partition("=")
        if not equals and unread:
            value = unread.pop(0)
        if is_folder_option(word):
            folder = value
        else:
            name = value
    stem = name.removesuffix(".yaml").removesuffix(".yml")
    if preset_of_own_file(stem) != shim.preset or (Path(folder) / f"{stem}.yaml").is_file():
        return list(words)
    return rest


def _torchrl_words() -> list[str]:
    """Returns words for what TorchRL's recipe also writes: Hydra's files, the KL divergence as a
    metric (which costs a forward pass each step if its weight is 0), and Weights & Biases if the
    package is installed. All are words `key=value` of `shoal train`."""
    words = ["report.hydra=true", "algorithm.kl_metric=true"]
    if find_spec("wandb"):
        words.append("report.wandb.mode=auto")
    return words
