"""Where two runs part: the first metric, the first token, the stage that it belongs to and the key that may have done
it. Clocks are left out.

    data -> sampling -> rewards -> update: what parts first in a step parts what comes after it
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from shoal.config.keys import keys_of
from shoal.config.schema import Config
from shoal.report.groups import StoredGroup
from shoal.report.metrics import is_clock
from shoal.report.reading import StoredMetrics, group_files, read_file

Evaluations: TypeAlias = "Mapping[tuple[int, str], Mapping[str, Any]]"
"""(version, data set) -> figures."""

SUSPECTS: Mapping[str, tuple[str, ...]] = {
    "data": ("seed", "task.", "batch.prompts_per_step", "train.retire_above", "model.template", "model.path",
             "sampling.max_prompt_tokens", "sampling.long_prompts"),
    "sampling": ("seed", "model.path", "model.dtype", "sampling.", "batch.group_size", "mesh.",
                 "batch.prompts_per_step"),
    "rewards": ("reward.", "task."),
    "update": ("algorithm.", "optimizer.", "batch.micro_tokens", "steps", "mesh.", "model.remat", "model.dtype",
               "seed"),
    "evaluation": ("task.", "sampling.", "train.", "seed", "model.", "mesh.", "reward."),
}
"""By stage, the keys (and sections) that act on it, the likeliest first."""

NAMES_AND_PLACES = ("run_name", "base_output_directory", "resume", "report.", "checkpoint.", "train.evaluate_every",
                    "train.pass_k")
"""Keys (and sections) that touch no number of a step."""


@dataclass(frozen=True)
class Place:
    """The first difference in the groups. `values`: what the two runs have there; None where one has nothing."""

    step: int
    stage: str
    what: str
    group: int | None = None
    completion: int | None = None
    token: int | None = None
    values: tuple[Any, Any] = (None, None)


def config_difference(a: Config, b: Config) -> dict[str, tuple[Any, Any]]:
    """Dotted key -> both values, of the keys that differ."""
    from shoal.config.values import get_value

    both = {key: (get_value(a, key), get_value(b, key)) for key in keys_of(Config)}
    return {key: values for key, values in both.items() if values[0] != values[1]}


def changes_of_settings(values: Iterable[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """From the settings of a run's parts, nested and in order: dotted key -> the values that it had, of the keys that
    changed and that touch a number."""
    found: dict[str, list[Any]] = {}
    for nested in values:
        for key, value in _flat(nested):
            known = found.setdefault(key, [])
            if not known or known[-1] != value:
                known.append(value)
    return {key: known for key, known in found.items() if len(known) > 1 and not is_under(key, NAMES_AND_PLACES)}


def _flat(nested: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in nested.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, list(value) if isinstance(value, tuple) else value


def suspects(stages: Iterable[str], keys: Iterable[str]) -> list[str]:
    """Of the keys that differ, those that act on these stages, the likeliest first."""
    found: dict[str, None] = {}
    for stage in stages:
        for suspect in SUSPECTS[stage]:
            found |= dict.fromkeys(key for key in keys if is_under(key, (suspect,)))
    return list(found)


def is_under(key: str, names: Sequence[str]) -> bool:
    """Whether a key is one of these, or lies in one of these sections (`reward.`)."""
    return any(key == name or (name.endswith(".") and key.startswith(name)) for name in names)


# ---- metrics


def metric_difference(a: StoredMetrics, b: StoredMetrics) -> tuple[int, dict[str, tuple[Any, Any]]] | None:
    """The first step that both have and where a metric differs, with every metric that does; clocks apart."""
    for step in sorted(a.steps.keys() & b.steps.keys()):
        x, y = a.steps[step], b.steps[step]
        names = [name for name in {**x, **y} if not is_clock(name) and x.get(name) != y.get(name)]
        if names:
            return step, {name: (x.get(name), y.get(name)) for name in names}
    return None


def evaluation_difference(a: Evaluations, b: Evaluations) -> tuple[int, str, dict[str, tuple[Any, Any]]] | None:
    """The first version and data set that both evaluated and where a figure of both differs, with all that do."""
    for version, name in sorted(a.keys() & b.keys()):
        x, y = a[version, name], b[version, name]
        figures = {key: (x[key], y[key]) for key in x if key in y and not is_clock(key) and x[key] != y[key]}
        if figures:
            return version, name, figures
    return None


# ---- groups


def group_difference(a: Path, b: Path, last: int | None = None) -> tuple[Place | None, list[int]]:
    """The first difference in the groups of the steps that both runs have, up to step `last`; and these steps."""
    files = group_files(a), group_files(b)
    steps = [step for step in sorted(files[0].keys() & files[1].keys()) if last is None or step <= last]
    for number, step in enumerate(steps):
        found = step_difference(step, read_file(files[0][step]), read_file(files[1][step]))
        if found:
            return found, steps[: number + 1]
    return None, steps


def step_difference(step: int, a: Sequence[StoredGroup], b: Sequence[StoredGroup]) -> Place | None:
    """The first difference of one step, stage by stage over all its groups."""
    for find in (_data, _sampling, _rewards, _update):
        for number, (x, y) in enumerate(zip(a, b, strict=False)):
            if found := find(step, number, x, y):
                return found
        if find is _data and len(a) != len(b):
            return Place(step, "data", "number of groups", min(len(a), len(b)), values=(len(a), len(b)))
    return None


def _data(step: int, number: int, a: StoredGroup, b: StoredGroup) -> Place | None:
    x, y = a.group, b.group
    if x.example.row != y.example.row:
        return Place(step, "data", "data row", number, values=(x.example.row, y.example.row))
    if (at := _first_apart(x.prompt_ids, y.prompt_ids)) is not None:
        return Place(step, "data", "prompt token", number, token=at, values=_values(x.prompt_ids, y.prompt_ids, at))
    if x.example.columns != y.example.columns:
        return Place(step, "data", "data column", number, values=(dict(x.example.columns), dict(y.example.columns)))
    return None


def _sampling(step: int, number: int, a: StoredGroup, b: StoredGroup) -> Place | None:
    for i, (x, y) in enumerate(zip(a.group.completions, b.group.completions, strict=False)):
        token, logprob = _first_apart(x.token_ids, y.token_ids), _first_apart(x.logprobs, y.logprobs)
        if token is not None and (logprob is None or token <= logprob):
            what = "token" if token < min(len(x), len(y)) else "length"
            return Place(step, "sampling", what, number, i, token, _values(x.token_ids, y.token_ids, token))
        if logprob is not None:
            return Place(step, "sampling", "log-prob", number, i, logprob, _values(x.logprobs, y.logprobs, logprob))
        if x.stop_reason != y.stop_reason:
            return Place(step, "sampling", "stop reason", number, i, values=(x.stop_reason.value, y.stop_reason.value))
    if a.group.size != b.group.size:
        return Place(step, "sampling", "number of completions", number, min(a.group.size, b.group.size),
                     values=(a.group.size, b.group.size))
    if a.group.version != b.group.version:
        return Place(step, "sampling", "version", number, values=(a.group.version, b.group.version))
    return None


def _rewards(step: int, number: int, a: StoredGroup, b: StoredGroup) -> Place | None:
    x, y = a.group, b.group
    if (at := _first_apart(x.rewards, y.rewards)) is not None:
        return Place(step, "rewards", "reward", number, at, values=_values(x.rewards, y.rewards, at))
    for name in {**x.reward_components, **y.reward_components}:
        one, other = (group.reward_components.get(name, np.zeros(0)) for group in (x, y))
        if (at := _first_apart(one, other)) is not None:
            return Place(step, "rewards", f"rewards/{name}", number, at, values=_values(one, other, at))
    if (at := _first_apart(x.valid, y.valid)) is not None:
        return Place(step, "rewards", "valid", number, at, values=_values(x.valid, y.valid, at))
    return None


def _update(step: int, number: int, a: StoredGroup, b: StoredGroup) -> Place | None:
    nothing = np.zeros(0)
    x, y = (nothing if s.advantages is None else s.advantages for s in (a, b))
    if (at := _first_apart(x, y)) is not None:
        return Place(step, "update", "advantage", number, at, values=_values(x, y, at))
    for i, (one, other) in enumerate(zip(a.token_arrays, b.token_arrays, strict=True)):
        for name in {**one, **other}:
            x, y = one.get(name, nothing), other.get(name, nothing)
            if (at := _first_apart(x, y)) is not None:
                return Place(step, "update", name, number, i, at, _values(x, y, at))
    return None


def _first_apart(a: np.ndarray, b: np.ndarray) -> int | None:
    """The first place where two arrays differ (NaN equals NaN), or where the shorter ends; None where they are
    equal."""
    shared = min(len(a), len(b))
    same = a[:shared] == b[:shared]
    if a.dtype.kind == "f":
        same |= np.isnan(a[:shared]) & np.isnan(b[:shared])
    if not same.all():
        return int(np.argmin(same))
    return None if len(a) == len(b) else shared


def _values(a: np.ndarray, b: np.ndarray, at: int) -> tuple[Any, Any]:
    x, y = (values[at].item() if at < len(values) else None for values in (a, b))
    return x, y


# ---- together


@dataclass(frozen=True)
class Parting:
    """Where two runs part first: `stages` that may be its cause, the likeliest first; `sentence` says it in words."""

    step: int
    stages: tuple[str, ...]
    sentence: str


def parting(place: Place | None, version: int | None, metrics: tuple[int, Mapping[str, Any]] | None,
            same_groups: Container[int], keys: Iterable[str] = ()) -> Parting | None:
    """From the first difference in groups (drawn by `version`) and in metrics, where the groups of `same_groups` were
    compared and are the same before that, and from the keys that differ; None where there is no difference.

    Tokens or log-probs that differ may be of other weights; where the same tokens end elsewhere, a limit or a stop
    string did it."""
    if place and place.stage == "sampling" and version and place.what in ("token", "log-prob"):
        return _weights_or_sampling(place.step, version, same_groups, keys)
    if place:
        return Parting(place.step, (place.stage,), f"{_WORDS[place.stage]}, at step {place.step}")
    if metrics is None:
        return None
    step, names = metrics[0], list(metrics[1])
    if step in same_groups:
        return Parting(step, ("update",), f"{_WORDS['update']}, at step {step}")
    if any(name.startswith(("completions/", "prompts/", "tokens/sampled")) for name in names):
        return Parting(step, ("sampling", "data"), f"sampling or the data parts first, at step {step}")
    if any(name.startswith(("reward/", "rewards/")) for name in names):
        return Parting(step, ("rewards", "sampling", "data"), f"rewards or the samples part first, at step {step}")
    return Parting(step, ("update", "sampling", "data"), f"the update or the samples part first, at step {step}")


def _weights_or_sampling(step: int, version: int, same_groups: Container[int], keys: Iterable[str]) -> Parting:
    """Later than the first weights: the weights alone, where all else is known to be the same."""
    if any(is_under(key, SUSPECTS["sampling"]) for key in keys):
        return Parting(step, ("sampling", "update"), f"sampling or the weights part first, at step {step}")
    if not all(before in same_groups for before in range(1, version + 1)):
        return Parting(step, ("update", "sampling"), f"the weights or sampling part first, at step {step} or before: "
                       f"the groups of steps 1 to {version} were not all compared")
    return Parting(step, ("update", "sampling"),
                   f"the weights part first: step {step} was drawn by version {version}, and step {version} was the "
                   "same in all else but the update at its end")


_WORDS = {"data": "the data or its order parts first", "sampling": "sampling parts first",
          "rewards": "rewards part first, of the same completions",
          "update": "the update parts first, from the same completions and rewards"}


def as_dict(place: Place | None) -> dict[str, Any] | None:
    return None if place is None else asdict(place)


