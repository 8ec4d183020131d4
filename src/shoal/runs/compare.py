"""Compares two runs, from the settings to the first token that differs, and names the likely cause.

    data -> sampling -> rewards -> update      the stages of a step: a difference in one causes
                                               differences after it

The first difference belongs to a stage; the keys that differ and act on that stage are likely its
cause. Clocks are never compared.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import zip_longest
from typing import Any, TypeAlias

import numpy as np

from shoal.buckets import address
from shoal.config.commands import stages_of
from shoal.config.key import get_value, keys_of
from shoal.config.train import Config
from shoal.records import Completion
from shoal.runs.groups import StoredGroup, read_file
from shoal.runs.lines import json_ready
from shoal.runs.metrics import is_clock
from shoal.runs.reader import StoredRun
from shoal.runs.summary import version_text
from shoal.text import ranges

Values: TypeAlias = "dict[str, tuple[Any, Any]]"
"""Name -> what the first run has and what the second has."""

PROMPT_KEYS = ("sampling.max_prompt_tokens", "sampling.long_prompts")
"""Keys that change at most the last bits (by the shapes of programs) unless a prompt is too
long."""

GENERATED = ("words", "calculator", "guess", "countdown", "environment")
"""Tasks whose questions are made, not read."""
UNREAD_KEYS = ("task.split", "task.subset", "task.files", "task.eval_split", "reward.preset")
"""Keys of data that is read, and of its presets."""


@dataclass(frozen=True)
class Divergence:
    """Where two runs diverge: the stages that may be the cause, the likeliest first, and a sentence
    about it."""

    step: int
    stages: tuple[str, ...]
    sentence: str


def compare(a: StoredRun, b: StoredRun) -> dict[str, Any]:
    """Compares the steps and evaluations that both runs have; `identical` is true where nothing but
    clocks differs."""
    metrics, evaluations = (
        [run.metrics() for run in (a, b)],
        [run.evaluations().by_version() for run in (a, b)],
    )
    keys = settings_difference(
        [{key: get_value(run.config, key) for key in keys_of(Config)} for run in (a, b)],
        [run.decided_keys for run in (a, b)],
    )
    in_metrics = metric_difference(*metrics)
    in_groups, group_steps = group_difference(a, b, last=in_metrics[0] if in_metrics else None)
    version = None
    if in_groups and in_groups.stage == "sampling":
        version = a.groups(in_groups.step)[in_groups.group].group.version
    acting = acting_keys(
        keys, (row.get("prompts/dropped") for run in metrics for row in run.values())
    )
    feeds_back = any(
        run.config.algorithm.dynamic_sampling or run.config.train.retire_above < 1 for run in (a, b)
    )
    found = find_divergence(in_groups, version, in_metrics, group_steps, acting, feeds_back)
    evaluated = evaluation_difference(*evaluations)
    if found is None and evaluated:
        # The last update is seen in the weights alone.
        stages = ("evaluation", "update") if evaluated[0] else ("evaluation",)
        found = Divergence(
            evaluated[0],
            stages,
            "the steps are identical, the evaluation "
            f"{version_text(evaluated[0])} on {evaluated[1]} differs",
        )
    shared = sorted(metrics[0].keys() & metrics[1].keys() | set(group_steps))
    return json_ready(
        {
            "run": address(a.path),
            "other": address(b.path),
            "identical": found is None and bool(shared),
            "config": keys,
            "num_steps": list(map(len, metrics)),
            "steps_compared": ranges(shared),
            "group_steps_compared": ranges(group_steps),
            "finished": [a.is_finished, b.is_finished],
            "first_metrics": in_metrics and {"step": in_metrics[0], "metrics": in_metrics[1]},
            "num_evaluations": list(map(len, evaluations)),
            "evaluations_compared": len(evaluations[0].keys() & evaluations[1].keys()),
            "first_evaluation": evaluated
            and dict(zip(("version", "name", "figures"), evaluated, strict=True)),
            "first_group_difference": in_groups and asdict(in_groups),
            "divergence": found
            and {"step": found.step, "stage": found.stages[0], "sentence": found.sentence},
            "likely_keys": likely_keys(found.stages, acting) if found else [],
        }
    )


# ---- what differs


def automatic_keys(settings: Mapping[str, Any], decided: Collection[str] = ()) -> set[str]:
    """The keys whose value nobody chose: those that the run `decided` itself, and those that have
    no effect on a task whose questions are made.

    `settings`: dotted key -> value."""
    is_made = settings.get("task.name") in GENERATED and not settings.get("task.path")
    return {*decided, *(UNREAD_KEYS if is_made else ())}


def settings_difference(
    runs: Sequence[Mapping[str, Any]], decided: Sequence[Collection[str]] = ()
) -> dict[str, tuple[Any, ...]]:
    """Dotted key -> the value of each run, None where it has none; of the keys that differ, but for
    those that all runs chose themselves: those `decided` by each."""
    decided = decided or [()] * len(runs)
    automatic = [automatic_keys(settings, own) for settings, own in zip(runs, decided, strict=True)]
    nobodys = set.intersection(*automatic) if automatic else set()
    keys = dict.fromkeys(key for settings in runs for key in settings)
    values = {key: tuple(settings.get(key) for settings in runs) for key in keys}
    return {
        key: own
        for key, own in values.items()
        if key not in nobodys and any(one != own[0] for one in own)
    }


def metric_difference(
    a: Mapping[int, Mapping[str, Any]], b: Mapping[int, Mapping[str, Any]]
) -> tuple[int, Values] | None:
    """The first shared step with a metric that differs, and all its metrics that do."""
    for step in sorted(a.keys() & b.keys()):
        x, y = a[step], b[step]
        names = [name for name in {**x, **y} if not is_clock(name) and x.get(name) != y.get(name)]
        if names:
            return step, {name: (x.get(name), y.get(name)) for name in names}
    return None


def evaluation_difference(
    a: Mapping[tuple[int, str], Mapping[str, Any]], b: Mapping[tuple[int, str], Mapping[str, Any]]
) -> tuple[int, str, Values] | None:
    """The first shared (version, data set) with a figure of both that differs, and all its figures
    that do."""
    for version, name in sorted(a.keys() & b.keys()):
        x, y = a[version, name], b[version, name]
        figures = {
            key: (x[key], y[key])
            for key in x
            if key in y and not is_clock(key) and x[key] != y[key]
        }
        if figures:
            return version, name, figures
    return None


# ---- what caused it


def find_divergence(
    in_groups: GroupDifference | None,
    version: int | None,
    in_metrics: tuple[int, Mapping[str, Any]] | None,
    same_groups: Container[int],
    keys: Iterable[str] = (),
    feeds_back: bool = False,
) -> Divergence | None:
    """The stage where two runs diverge; None where they do not.

    `version`: the weights that sampled the group that differs. `same_groups`: the steps whose
    groups were compared, and are equal before the difference. `keys`: the settings that differ.
    `feeds_back`: rewards choose prompts, in dynamic sampling and in a curriculum."""
    if in_groups:
        stage = "environment" if in_groups.what in OF_ENVIRONMENTS else in_groups.stage
        step, stages, text = in_groups.step, (stage,), _SENTENCES[stage]
        if stage == "data" and feeds_back:
            stages = ("data", "rewards", "sampling", "update")
        # Where the same tokens end elsewhere, a limit or a stop string caused it, not the weights.
        if version and in_groups.what in ("token", "log-prob"):
            stages, text = _weights_or_sampling(version, same_groups, keys)
    elif in_metrics:
        step, names = in_metrics[0], list(in_metrics[1])
        samples = ("sampling", "environment", "data")
        # An update before it shows in the weights alone, and in what follows from them.
        before = ("rewards", "update") if step > 1 else ()
        if step in same_groups:
            stages, text = ("update",), _SENTENCES["update"]
        elif any(name.startswith(("completions/", "prompts/", "tokens/sampled")) for name in names):
            stages, text = (*samples, *before), "sampling or the data differs first"
        elif any(name.startswith(("reward/", "rewards/")) for name in names):
            stages, text = ("rewards", *samples, *before), "rewards or samples differ first"
        else:
            stages, text = ("update", *samples, "rewards"), "the update or samples differ first"
    else:
        return None
    return Divergence(step, stages, f"{text}, at step {step}")


_SENTENCES = {
    "data": "the data or its order differs first",
    "sampling": "sampling differs first",
    "environment": "what tools or environments said differs first",
    "rewards": "rewards differ first, for the same completions",
    "update": "the update differs first, for the same completions and rewards",
}


def _weights_or_sampling(
    version: int, same_groups: Container[int], keys: Iterable[str]
) -> tuple[tuple[str, ...], str]:
    """Stages and sentence for tokens sampled by later weights than the first: the weights alone
    differ, if all else is known to be equal."""
    if likely_keys(("sampling",), keys):
        return ("sampling", "update"), "sampling or the weights differ first"
    if not all(before in same_groups for before in range(1, version + 1)):
        return ("update", "sampling"), (
            "the weights or sampling differ first (not all groups of steps 1 to "
            f"{version} were compared)"
        )
    return ("update", "sampling"), (
        f"the weights differ first, by the update at the end of step {version}, which was "
        f"equal in all else: version {version} sampled"
    )


def acting_keys(keys: Iterable[str], dropped: Iterable[float | None]) -> list[str]:
    """The keys without those on long prompts, if no step of the runs has dropped one and another
    key may be the cause."""
    keys, has_dropped = list(keys), any(number and number > 0 for number in dropped)
    others = [key for key in keys if key not in PROMPT_KEYS]
    return others if act_on_steps(others) and not has_dropped else keys


def likely_keys(stages: Iterable[str], keys: Iterable[str]) -> list[str]:
    """Of the keys that differ, those that act on these stages (`stages=` of their declaration):
    stage by stage, first those that act on it before all."""
    order = {name: number for number, name in enumerate(keys_of(Config))}
    found: list[str] = []
    for stage in stages:
        acting = [key for key in keys if stage in stages_of(key)]
        found += sorted(
            acting, key=lambda key: (stages_of(key).index(stage), order.get(key, len(order)))
        )
    return list(dict.fromkeys(found))


def act_on_steps(keys: Iterable[str]) -> bool:
    """True if one of the keys changes a number of a step, not of evaluations alone."""
    return any(stage != "evaluation" for key in keys for stage in stages_of(key))


# ---- the groups


@dataclass(frozen=True)
class GroupDifference:
    """The first difference in two runs' groups; `values` has None where a run has nothing in that
    place."""

    step: int
    stage: str
    what: str
    group: int
    completion: int | None = None
    token: int | None = None
    values: tuple[Any, Any] = (None, None)


def group_difference(
    a: StoredRun, b: StoredRun, last: int | None = None
) -> tuple[GroupDifference | None, list[int]]:
    """The first difference in the groups that both runs stored, up to step `last`, and the steps
    compared."""
    files = a.group_files(), b.group_files()
    steps = [
        step for step in sorted(files[0].keys() & files[1].keys()) if last is None or step <= last
    ]
    for number, step in enumerate(steps, 1):
        if found := step_difference(step, read_file(files[0][step]), read_file(files[1][step])):
            return found, steps[:number]
    return None, steps


def step_difference(
    step: int, a: Sequence[StoredGroup], b: Sequence[StoredGroup]
) -> GroupDifference | None:
    """The first difference of one step: stage by stage, each over all groups."""
    for stage, compare in _STAGES.items():
        for number, (x, y) in enumerate(zip(a, b, strict=False)):
            for what, completion, token, values in compare(x, y):
                return GroupDifference(step, stage, what, number, completion, token, values)
        if stage == "data" and len(a) != len(b):
            return GroupDifference(
                step, stage, "number of groups", min(len(a), len(b)), values=(len(a), len(b))
            )
    return None


OF_ENVIRONMENTS = ("token of an environment's prompt", "context token", "message")
"""What differs where tools or environments said something else after the same sampled tokens."""

_Found: TypeAlias = "Iterator[tuple[str, int | None, int | None, tuple[Any, Any]]]"
"""Each difference of two groups in one stage: what differs, in which completion, at which token,
the two values."""

NOTHING = np.zeros(0)


def _data(a: StoredGroup, b: StoredGroup) -> _Found:
    x, y = a.group, b.group
    if x.example.row != y.example.row:
        yield "data row", None, None, (x.example.row, y.example.row)
    if found := first_difference(x.prompt_ids, y.prompt_ids):
        yield "prompt token", None, *found
    if x.example.columns != y.example.columns:
        yield "data column", None, None, (dict(x.example.columns), dict(y.example.columns))


def _sampling(a: StoredGroup, b: StoredGroup) -> _Found:
    for i, (x, y) in enumerate(zip(a.group.completions, b.group.completions, strict=False)):
        own = [
            np.concatenate(
                [
                    NOTHING if one.prompt_ids is None else one.prompt_ids,
                    *(branch.prompt_ids for branch in one.branches),
                ]
            )
            for one in (x, y)
        ]
        if prompt := first_difference(*own):
            yield OF_ENVIRONMENTS[0], i, *prompt
        if found := completion_difference(x, y):
            what, at = found
            if what == "stop reason":
                yield what, i, None, (x.stop_reason.value, y.stop_reason.value)
            else:
                if what == "token" and not (x.loss_mask[at] and y.loss_mask[at]):
                    what = OF_ENVIRONMENTS[1]
                name = "logprobs" if what == "log-prob" else "token_ids"
                yield what, i, at, _values(getattr(x, name), getattr(y, name), at)
        elif x.messages != y.messages:
            at = next(
                n
                for n, both in enumerate(zip_longest(x.messages, y.messages))
                if both[0] != both[1]
            )
            yield (
                OF_ENVIRONMENTS[2],
                i,
                None,
                (str(x.messages[at : at + 1]), str(y.messages[at : at + 1])),
            )
    if a.group.size != b.group.size:
        yield (
            "number of completions",
            min(a.group.size, b.group.size),
            None,
            (a.group.size, b.group.size),
        )
    if a.group.version != b.group.version:
        yield "version", None, None, (a.group.version, b.group.version)


def _rewards(a: StoredGroup, b: StoredGroup) -> _Found:
    x, y = a.group, b.group
    names = {**x.reward_components, **y.reward_components}
    components = (
        (f"rewards/{name}", *(group.reward_components.get(name, NOTHING) for group in (x, y)))
        for name in names
    )
    for what, one, other in (
        ("reward", x.rewards, y.rewards),
        *components,
        ("valid", x.valid, y.valid),
    ):
        if found := first_difference(one, other):
            yield what, found[0], None, found[1]


def _update(a: StoredGroup, b: StoredGroup) -> _Found:
    if found := first_difference(
        *(NOTHING if one.advantages is None else one.advantages for one in (a, b))
    ):
        yield "advantage", found[0], None, found[1]
    for i, (one, other) in enumerate(zip(a.token_arrays, b.token_arrays, strict=True)):
        for name in {**one, **other}:
            if found := first_difference(one.get(name, NOTHING), other.get(name, NOTHING)):
                yield name, i, *found


_STAGES = {"data": _data, "sampling": _sampling, "rewards": _rewards, "update": _update}


def completion_difference(a: Completion, b: Completion) -> tuple[str, int] | None:
    """The first difference of two completions, its kind and its token; None where they are equal
    bit for bit.

    >>> completion_difference(stored, sampled)      # or "log-prob", "length", "stop reason"
    ('token', 17)
    """
    shared = min(len(a), len(b))
    ids = a.token_ids[:shared] != b.token_ids[:shared]
    logprobs = a.logprobs[:shared].view(np.uint32) != b.logprobs[:shared].view(np.uint32)
    if (ids | logprobs).any():
        at = int(np.argmax(ids | logprobs))
        return "token" if ids[at] else "log-prob", at
    if len(a) != len(b):
        return "length", shared
    return None if a.stop_reason == b.stop_reason else ("stop reason", shared)


def first_difference(a: np.ndarray, b: np.ndarray) -> tuple[int, tuple[Any, Any]] | None:
    """The first place where two arrays differ, or where the shorter ends, and both values; NaN
    equals NaN."""
    shared = min(len(a), len(b))
    same = a[:shared] == b[:shared]
    if a.dtype.kind == "f":
        same |= np.isnan(a[:shared]) & np.isnan(b[:shared])
    if same.all() and len(a) == len(b):
        return None
    at = shared if same.all() else int(np.argmin(same))
    return at, _values(a, b, at)


def _values(a: np.ndarray, b: np.ndarray, at: int) -> tuple[Any, Any]:
    x, y = (values[at].item() if at < len(values) else None for values in (a, b))
    return x, y
