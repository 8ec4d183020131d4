"""Finds the presets that come with the package. They are YAML files: a folder for each command, and
one each for algorithms, for other systems' defaults, and for measured recipes of training."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from shoal.records import ShoalError
from shoal.text import did_you_mean

PRESETS = Path(__file__).parent / "presets"
"""The folder of Shoal's own presets, with a folder for each command, and one for algorithms."""


PRESETS_OF_SYSTEMS = Path(__file__).parents[1] / "compat" / "presets"
"""The folder of presets of other systems, with a folder for each command, and one for recipes."""


RECIPES = Path(__file__).parents[1] / "assets" / "recipes"
"""The folder of the recipes (`recipe_files`), which `shoal train` finds among its presets. None has
the name of a task, because a task's preset is found by that."""


COMMAND_OF_PRESETS: Mapping[str, str] = {"doctor": "train", "plan": "train"}
"""Command -> the command whose presets it shares."""


OWN_FILES: Mapping[str, tuple[str, ...]] = {
    "verl": (
        "ppo_trainer",
        "ppo_megatron_trainer",
        "dapo_trainer",
        "dapo_megatron_trainer",
        # What ppo_trainer.yaml itself names in its `defaults`.
        "legacy_reward_impl",
        "actor/dp_actor",
        "actor/megatron_actor",
        "algorithm/rollout_correction",
        "critic/dp_critic",
        "critic/megatron_critic",
        "data/legacy_data",
        "model/hf_model",
        "ref/dp_ref",
        "ref/megatron_ref",
        "reward/reward",
        "rollout/rollout",
    ),
}
"""Preset of another system -> the names of that system's own YAML files, without ending, whose
settings the preset has."""


def preset_of_own_file(name: str) -> str:
    """Returns the name of the preset that has the settings of another system's own file
    (OWN_FILES); '' if none has. `name`: the file's name with or without ending, or an entry of
    Hydra's `defaults`, which may begin with `/` and end with `@` and the place of its settings.

    >>> preset_of_own_file("/ppo_trainer@_here_")
    'verl'
    """
    stem = name.partition("@")[0].removeprefix("/").removesuffix(".yaml").removesuffix(".yml")
    for preset, files in OWN_FILES.items():
        if stem in files:
            return preset
    return ""


def preset_folders(folder: str) -> tuple[Path, ...]:
    """Returns the folders, Shoal's and the other systems', with the presets of a command, or of
    `recipe` or `algorithm`; for training also that of the recipes. A folder may be missing."""
    folder = COMMAND_OF_PRESETS.get(folder, folder)
    folders = (PRESETS / folder, PRESETS_OF_SYSTEMS / folder)
    return (*folders, RECIPES) if folder == "train" else folders


def recipe_names() -> list[str]:
    """Returns the sorted names of the packaged recipes."""
    return sorted(file.stem for file in RECIPES.glob("*.yaml"))


def presets_of(folder: str) -> list[str]:
    """Returns the sorted names, without ending, of the packaged presets of a command, or of
    `recipe` or `algorithm`; [] if there are none."""
    if not folder:
        return []
    names = []
    for path in preset_folders(folder):
        names += [file.stem for file in path.glob("*.yaml")]
    return sorted(names)


def packaged(folder: str, name: str) -> Path | None:
    """Returns the file of a packaged preset; None if there is none of this name, if a text is
    empty, or if `name` has a `/`. `folder`: a command, `recipe` or `algorithm`; `name`: without
    ending. A preset of Shoal's own counts before another system's."""
    if not folder or not name or "/" in name:
        return None
    for path in preset_folders(folder):
        file = path / f"{name}.yaml"
        if file.is_file():
            return file
    return None


def is_packaged(file: Path) -> bool:
    """True if a file is a preset of the package."""
    folders = (PRESETS, PRESETS_OF_SYSTEMS, RECIPES)
    return any(file.is_relative_to(folder) for folder in folders)


def find_file(command: str, name: str) -> Path:
    """Returns the file that `--config-name X` or an argument `X.yml` means: an existing YAML file,
    as an absolute path, otherwise the packaged preset of that name for the command; of a path its
    last part without ending is the name. Raises ShoalError if there is neither."""
    path = Path(name)
    is_yaml = path.suffix in (".yml", ".yaml")
    if is_yaml and path.is_file():
        return path.absolute()
    preset_name = path.stem if is_yaml else name
    preset = packaged(command, preset_name)
    if preset:
        return preset
    known = presets_of(command)
    if not known:
        raise ShoalError(
            f"{name}: expected a YAML file that exists; {command or 'this command'} has no presets"
        )
    raise ShoalError(
        f"{name}: no preset or YAML file has this name{did_you_mean(path.stem, known) or '.'} "
        f"Presets: {', '.join(known)}"
    )
