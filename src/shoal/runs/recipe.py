"""A run that follows a recipe: what differs from the recipe, and where its evaluations lie in the
recipe's band.

    start           `settings_apart`, `Followed.start_texts`: once, before weights are read
    an evaluation   `Followed.position`: "step 20: 51.2%, 5 seeds had 48.9% to 53.1%"
    below the band  `Position.differs` first: settings, weights, versions"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from shoal.config.key import keys_of, shown, values_of
from shoal.config.recipe_files import ABOUT, Band, Measurement, Recipe
from shoal.config.stored import to_dict, to_yaml
from shoal.config.train import Config
from shoal.runs.compare import SettingDifference, chosen_differences, of_other_scores
from shoal.runs.lines import evaluation_scalars
from shoal.text import duration, figure_text

APART = ("seed", "model.path")
"""Keys that may differ from a recipe's: a band is over seeds, and models are compared by their
parameters and weights, wherever these are."""
MOST_DIFFERENCES = 8
"""Most differences that one sentence names."""


def settings_apart(recipe: Recipe, requested: Config) -> list[SettingDifference]:
    """Returns the settings that change what a run reaches and differ from the recipe's, as (the
    recipe's value, the run's). Both are as requested, so what is left open in both is equal. Left
    out are keys that a resumed run may change freely, those on devices, and those in APART."""
    keys = keys_of(Config)
    apart = []
    for difference in chosen_differences([values_of(recipe.config), values_of(requested)]):
        key = keys.get(difference.key)
        acts = key is not None and key.stages and key.on_resume in ("warn", "fixed")
        if acts and difference.key not in APART:
            apart.append(difference)
    return apart


@dataclass(frozen=True)
class Position:
    """Where an evaluation lies: the value and the ends of the band at this step, `text` for people,
    and `differs`: what differs from the recipe, with which a warning begins if the value is
    below."""

    version: int
    value: float
    low: float
    high: float
    text: str
    differs: str

    @property
    def shortfall(self) -> float:
        """How far the value is below the band; 0 or less if it is not."""
        return self.low - self.value


@dataclass(frozen=True)
class Followed:
    """The recipe of a run, and what differs from it. `parameters`: of the run's model, without an
    adapter; `versions`: of the packages here; `weights`: of the first weights, as in `Measurement`,
    "" before they are read, and if the run was resumed without them."""

    recipe: Recipe
    settings: Sequence[SettingDifference]
    parameters: int
    versions: Mapping[str, str]
    weights: str = ""

    @property
    def is_other_model(self) -> bool:
        """True if the run's model has another size than that of the band."""
        measured = self.recipe.measured
        return measured is not None and measured.parameters != self.parameters

    @property
    def band(self) -> Band | None:
        """The band, if the run's evaluations can be held against it: not if its model is another
        one, or is asked other questions, or is scored by other rewards and the metric is one."""
        band = self.recipe.band
        of_questions, of_rewards = of_other_scores(self.settings)
        if band is None or self.is_other_model or of_questions:
            return None
        if of_rewards and "reward" in band.metric:
            return None
        return band

    def start_texts(self) -> list[str]:
        """Returns the lines for the start of a run: what the recipe is, what it reaches, and what
        makes its band mean less or nothing here."""
        recipe = self.recipe
        band, measured = recipe.band, recipe.measured
        lines = [f"recipe {recipe.name}: {recipe.what}"]
        if band is None or measured is None:
            return [*lines, f"recipe {recipe.name} has no band: {recipe.unmeasured}"]
        last = max(band.steps)
        lines.append(
            f"recipe {recipe.name} took {duration(recipe.seconds)} on {recipe.hardware}; "
            f"{band_text(band, last)} at step {last} ({band.metric}, {measured.date})"
        )
        apart = self.apart_text()
        return [*lines, apart] if apart else lines

    def apart_text(self) -> str:
        """Returns a line on what makes the band mean less or nothing for this run, as far as is
        known before weights are read: another model or other settings; "" if nothing does."""
        recipe, measured = self.recipe, self.recipe.measured
        if measured is None:
            return ""
        apart = ""
        if self.is_other_model:
            apart = (
                f"the band was measured with a model of {measured.parameters:,} parameters "
                f"({recipe.config.model.path}); this run has one of {self.parameters:,}"
            )
        elif self.settings:
            theirs = settings_text(self.settings, 0)
            ours = settings_text(self.settings, 1)
            apart = f"the band was measured with {theirs}; this run has {ours}"
        if apart and self.band is None:
            apart += ": its evaluations are not compared with the band"
        return apart

    def weights_text(self) -> str:
        """Returns a line that says that the first weights are others; "" if they are the same, or
        if that is not known, because they are of another type here."""
        measured = self.recipe.measured
        if not measured or not self.weights or self.is_other_model:
            return ""
        if _type_of(measured.weights) != _type_of(self.weights):
            return ""
        if measured.weights == self.weights:
            return ""
        return f"the band was measured with weights {measured.weights}; this run has {self.weights}"

    def differs(self) -> str:
        """Returns a sentence on what is known to differ from the recipe: settings, then weights,
        then versions of packages."""
        recipe, measured = self.recipe, self.recipe.measured
        parts = []
        for difference in self.settings[:MOST_DIFFERENCES]:
            theirs, ours = map(_value, difference.values)
            parts.append(f"{difference.key}={ours} (there {theirs})")
        if len(self.settings) > MOST_DIFFERENCES:
            parts.append(f"{len(self.settings) - MOST_DIFFERENCES} more settings")
        if self.weights_text():
            parts.append("the first weights")
        if measured:
            parts += _versions_apart(measured, self.versions)
        if parts:
            return f"this run differs from recipe {recipe.name} in {', '.join(parts)}"
        seeds = recipe.band.seeds if recipe.band else 0
        return (
            f"nothing that is known differs from recipe {recipe.name}; by chance one seed in "
            f"{seeds + 1} is below {seeds} others"
        )

    def position(self, version: int, figures: Mapping[str, Mapping[str, Any]]) -> Position | None:
        """Returns where an evaluation lies in the band; None if there is no band, or none for this
        step or metric. `figures`: data set -> figure -> value."""
        band = self.band
        if band is None or version not in band.steps:
            return None
        values: dict[str, float] = {}
        for name, of_set in figures.items():
            values |= evaluation_scalars(name, of_set)
        value = values.get(band.metric)
        if value is None:
            return None
        low, high = band.steps[version]
        text = (
            f"recipe {self.recipe.name}, step {version}: {figure_text(band.metric, value)}, "
            f"{band_text(band, version)}"
        )
        return Position(version, value, low, high, text, self.differs())

    def stored_text(self) -> str:
        """Returns the text of the run's recipe.yaml: all settings of the recipe and its section
        `about`, which also says from which weights this run began, and what sets it apart."""
        about = {
            **self.recipe.about,
            "name": self.recipe.name,
            "weights_here": self.weights,
            "apart": self.apart_text(),
            "holds": self.band is not None,
        }
        return to_yaml({**to_dict(self.recipe.config), ABOUT: about})

    def with_weights(self, weights: str) -> Followed:
        return replace(self, weights=weights)


def band_text(band: Band, step: int) -> str:
    """Returns what the seeds had at a step: "5 seeds had 48.9% to 53.1%"."""
    low, high = (figure_text(band.metric, end) for end in band.steps[step])
    return f"{band.seeds} seeds had {low} to {high}"


def settings_text(differing: Sequence[SettingDifference], place: int) -> str:
    """Returns the settings with the value of one of the two runs: "optimizer.lr=1e-06, ..."."""
    texts = []
    for difference in differing[:MOST_DIFFERENCES]:
        texts.append(f"{difference.key}={_value(difference.values[place])}")
    if len(differing) > MOST_DIFFERENCES:
        texts.append("...")
    return ", ".join(texts)


def _value(value: Any) -> str:
    return shown(value) or "''"


def _type_of(weights: str) -> str:
    """Returns the type in a text of weights: `float32` of `0x0012ab34 float32`."""
    return weights.partition(" ")[2]


def _versions_apart(measured: Measurement, here: Mapping[str, str]) -> list[str]:
    """Returns texts on packages whose version is not that of the measurement."""
    texts = []
    for package, version in measured.versions.items():
        if here.get(package, version) != version:
            texts.append(f"{package} {here[package]} (there {version})")
    return texts
