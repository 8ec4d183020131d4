"""Recipes: files of settings that say in one more section, `about`, what a run with them reaches.

    model: {path: tiny}         settings, as in every file
    about:
      what: ...                 one sentence
      hardware: ...             what it needs
      seconds: 160              what it took there
      expected:                 absent if nobody has measured it
        metric: evaluate/held_out/accuracy
        seeds: 5
        steps: {0: [0.37, 0.37], 40: [0.626, 0.648]}    step: lowest, highest of the seeds
      measured: {command, date, cpu, versions, parameters, weights}
      unmeasured: ...           instead of the two: why there is no band, and what others reached

Not the key `recipe`, which names the defaults of another system, and can be given together with
one."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.records import ShoalError
from shoal.text import did_you_mean

ABOUT = "about"
"""The section that makes a file of settings a recipe."""


@dataclass(frozen=True)
class Band:
    """What several seeds reached: of each evaluated step the lowest and the highest value of a
    metric. The metric has the name that sinks and the page give it.

    >>> Band("evaluate/held_out/accuracy", 5, {0: (0.37, 0.37), 40: (0.626, 0.648)})
    """

    metric: str
    seeds: int
    steps: Mapping[int, tuple[float, float]]


@dataclass(frozen=True)
class Measurement:
    """How a band was measured: the command, the day, the processor, the versions of packages, and
    the model, by its number of parameters and the checksum of its first weights with their type."""

    command: str
    date: str
    cpu: str
    versions: Mapping[str, str]
    parameters: int
    weights: str


@dataclass(frozen=True)
class Recipe:
    """A recipe as its file has it. `band` and `measured` are None for one that nobody has measured,
    and `unmeasured` then says why."""

    name: str
    what: str
    hardware: str
    about: Mapping[str, Any]  # the whole section, as plain values
    seconds: float = 0.0  # 0: not measured
    band: Band | None = None
    measured: Measurement | None = None
    unmeasured: str = ""
    # the settings of its file alone, a Config; None where only the section was read
    config: Any = None
    # Of a run's own copy: the weights that the run began with, what made its band mean less when it
    # began, and whether its evaluations are held against the band all the same.
    weights_here: str = ""
    apart: str = ""
    holds: bool = True


_FIELDS = ("what", "hardware", "seconds", "expected", "measured", "unmeasured")
_OF_RUNS = ("name", "weights_here", "apart", "holds")
"""Fields that a run adds to its own copy."""


def read_recipe(about: Any, file: Path | str, name: str) -> Recipe:
    """Returns the recipe of a section `about`, without settings. `name`: used unless the section
    has one, as a run's copy does; `file`: for errors. Raises ShoalError if a field is missing,
    unknown or of a wrong form."""
    where = f"{file}: {ABOUT}"
    values = _mapping(about, where)
    of_run = {field: values.pop(field) for field in _OF_RUNS if field in values}
    _refuse_unknown(values, _FIELDS, where)
    recipe = Recipe(
        name=str(of_run.get("name", name)),
        what=_text(values, "what", where),
        hardware=_text(values, "hardware", where),
        about=values,
        weights_here=str(of_run.get("weights_here", "")),
        apart=str(of_run.get("apart", "")),
        holds=of_run.get("holds") is not False,
    )
    if "expected" not in values:
        if "measured" in values:
            raise ShoalError(
                f"{where}.expected is missing, and {ABOUT}.measured is there: write it"
            )
        if "unmeasured" not in values:
            raise ShoalError(
                f"{where} has no `expected`: write the band that was measured, or `unmeasured` "
                "with the reason why there is none"
            )
        return dataclasses.replace(recipe, unmeasured=_text(values, "unmeasured", where))
    if "unmeasured" in values:
        raise ShoalError(f"{where} has `expected` and `unmeasured`: write one of them")
    return dataclasses.replace(
        recipe,
        seconds=_number(values, "seconds", where),
        band=_band(values["expected"], f"{where}.expected"),
        measured=_measurement(values.get("measured"), f"{where}.measured"),
    )


def _band(value: Any, where: str) -> Band:
    """Returns the band of a section `expected`; `where`: its place, for errors."""
    values = _mapping(value, where)
    _refuse_unknown(values, [one.name for one in dataclasses.fields(Band)], where)
    steps = {}
    for step, ends in _mapping(values.get("steps"), f"{where}.steps").items():
        at = f"{where}.steps.{step}"
        if not isinstance(step, int) or isinstance(step, bool) or step < 0:
            raise ShoalError(f"{at}: expected the number of a step, 0 or more")
        is_pair = isinstance(ends, list | tuple) and len(ends) == 2
        if not is_pair or not all(_is_number(end) for end in ends) or ends[0] > ends[1]:
            raise ShoalError(f"{at}: expected [lowest, highest] of the seeds, got {ends!r}")
        steps[step] = (float(ends[0]), float(ends[1]))
    seeds = _number(values, "seeds", where)
    if seeds != int(seeds) or seeds < 2:
        raise ShoalError(
            f"{where}.seeds: expected 2 or more, got {seeds:g}: one seed does not make a band"
        )
    return Band(_text(values, "metric", where), int(seeds), dict(sorted(steps.items())))


def _measurement(value: Any, where: str) -> Measurement:
    """Returns the contents of a section `measured`; `where`: its place, for errors."""
    values = _mapping(value, where)
    _refuse_unknown(values, [one.name for one in dataclasses.fields(Measurement)], where)
    versions = _mapping(values.get("versions"), f"{where}.versions")
    return Measurement(
        command=_text(values, "command", where),
        date=_text(values, "date", where),
        cpu=_text(values, "cpu", where),
        versions={str(package): str(version) for package, version in versions.items()},
        parameters=int(_number(values, "parameters", where)),
        weights=_text(values, "weights", where),
    )


def _mapping(value: Any, where: str) -> dict[Any, Any]:
    """Returns the fields of a section; ShoalError if it is missing, empty or no section."""
    if not isinstance(value, Mapping) or not value:
        fault = "is missing" if value is None else f"is {value!r}"
        raise ShoalError(f"{where} {fault}: expected a section with fields (docs/recipes.md)")
    return dict(value)


def _text(values: Mapping[Any, Any], name: str, where: str) -> str:
    """Returns the text of a field, in one line; ShoalError if it is missing or empty."""
    value = values.get(name)
    if value is None or isinstance(value, Mapping | list) or not str(value).strip():
        raise ShoalError(f"{where}.{name} is missing: expected a text (docs/recipes.md)")
    return " ".join(str(value).split())


def _number(values: Mapping[Any, Any], name: str, where: str) -> float:
    """Returns the number of a field; ShoalError if it is missing, no number, or not above 0."""
    value = values.get(name)
    if value is None:
        raise ShoalError(f"{where}.{name} is missing: expected a number (docs/recipes.md)")
    if not _is_number(value) or value <= 0:
        raise ShoalError(f"{where}.{name}: expected a number above 0, got {value!r}")
    return float(value)


def _is_number(value: Any) -> bool:
    """True for a number of a size that figures have; a run's copy may be anybody's file."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e15


def _refuse_unknown(values: Mapping[Any, Any], known: Any, where: str) -> None:
    """Raises ShoalError for the first field that is not among the `known` ones."""
    for name in values:
        if name not in known:
            near = did_you_mean(str(name), known) or "."
            raise ShoalError(
                f"{where}.{name}: there is no such field{near} There are: {', '.join(known)}"
            )
