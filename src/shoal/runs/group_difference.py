"""The first difference in the stored groups of two runs, stage by stage: data, sampling, rewards, update."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from shoal.report.groups import StoredGroup, read_file
from shoal.runs.stored_run import StoredRun
from shoal.types import Completion


@dataclass(frozen=True)
class GroupDifference:
    """The first difference in two runs' groups; `values` has None where a run has nothing in that place."""

    step: int
    stage: str
    what: str
    group: int
    completion: int | None = None
    token: int | None = None
    values: tuple[Any, Any] = (None, None)


def group_difference(a: StoredRun, b: StoredRun,
                     last: int | None = None) -> tuple[GroupDifference | None, list[int]]:
    """The first difference in the groups that both runs stored, up to step `last`, and the steps compared."""
    files = a.group_files(), b.group_files()
    steps = [step for step in sorted(files[0].keys() & files[1].keys()) if last is None or step <= last]
    for number, step in enumerate(steps, 1):
        if found := step_difference(step, read_file(files[0][step]), read_file(files[1][step])):
            return found, steps[:number]
    return None, steps


def step_difference(step: int, a: Sequence[StoredGroup], b: Sequence[StoredGroup]) -> GroupDifference | None:
    """The first difference of one step: stage by stage, each over all groups."""
    for stage, compare in _STAGES.items():
        for number, (x, y) in enumerate(zip(a, b, strict=False)):
            for what, completion, token, values in compare(x, y):
                return GroupDifference(step, stage, what, number, completion, token, values)
        if stage == "data" and len(a) != len(b):
            return GroupDifference(step, stage, "number of groups", min(len(a), len(b)), values=(len(a), len(b)))
    return None


_Found: TypeAlias = "Iterator[tuple[str, int | None, int | None, tuple[Any, Any]]]"
"""Each difference of two groups in one stage: what differs, in which completion, at which token, the two values."""


def _data(a: StoredGroup, b: StoredGroup) -> _Found:
    x, y = a.group, b.group
    if x.example.row != y.example.row:
        yield "data row", None, None, (x.example.row, y.example.row)
    if (at := first_difference(x.prompt_ids, y.prompt_ids)) is not None:
        yield "prompt token", None, at, _values(x.prompt_ids, y.prompt_ids, at)
    if x.example.columns != y.example.columns:
        yield "data column", None, None, (dict(x.example.columns), dict(y.example.columns))


def _sampling(a: StoredGroup, b: StoredGroup) -> _Found:
    for i, (x, y) in enumerate(zip(a.group.completions, b.group.completions, strict=False)):
        if found := completion_difference(x, y):
            what, at = found
            if what == "stop reason":
                yield what, i, None, (x.stop_reason.value, y.stop_reason.value)
            else:
                name = "logprobs" if what == "log-prob" else "token_ids"
                yield what, i, at, _values(getattr(x, name), getattr(y, name), at)
    if a.group.size != b.group.size:
        yield "number of completions", min(a.group.size, b.group.size), None, (a.group.size, b.group.size)
    if a.group.version != b.group.version:
        yield "version", None, None, (a.group.version, b.group.version)


def _rewards(a: StoredGroup, b: StoredGroup) -> _Found:
    x, y = a.group, b.group
    names = {**x.reward_components, **y.reward_components}
    components = ((f"rewards/{name}", x.reward_components.get(name, np.zeros(0)),
                   y.reward_components.get(name, np.zeros(0))) for name in names)
    for what, one, other in (("reward", x.rewards, y.rewards), *components, ("valid", x.valid, y.valid)):
        if (at := first_difference(one, other)) is not None:
            yield what, at, None, _values(one, other, at)


def _update(a: StoredGroup, b: StoredGroup) -> _Found:
    nothing = np.zeros(0)
    x, y = (nothing if stored.advantages is None else stored.advantages for stored in (a, b))
    if (at := first_difference(x, y)) is not None:
        yield "advantage", at, None, _values(x, y, at)
    for i, (one, other) in enumerate(zip(a.token_arrays, b.token_arrays, strict=True)):
        for name in {**one, **other}:
            x, y = one.get(name, nothing), other.get(name, nothing)
            if (at := first_difference(x, y)) is not None:
                yield name, i, at, _values(x, y, at)


_STAGES = {"data": _data, "sampling": _sampling, "rewards": _rewards, "update": _update}


def completion_difference(a: Completion, b: Completion) -> tuple[str, int] | None:
    """The first difference of two completions, its kind and its token; None where they are equal bit for bit.

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


def first_difference(a: np.ndarray, b: np.ndarray) -> int | None:
    """The first place where two arrays differ, or where the shorter ends; NaN equals NaN."""
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
