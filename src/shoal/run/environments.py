"""The tools and environments of a run: loaded by name, and tried before weights are read."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from shoal.config.environment_section import EnvironmentSection
from shoal.config.schema import SamplingSection
from shoal.model.tokenizer import Tokenizer
from shoal.model.turns import TurnFormat, schema
from shoal.rewards.functions import load_named
from shoal.rollout.player import Player
from shoal.tasks.task import Task
from shoal.text import did_you_mean
from shoal.types import Example, ShoalError
from shoal.workers.environments import OPTIONAL_COLUMNS, EnvironmentKind
from shoal.workers.sessions import Sessions


def section_of(given: Any) -> EnvironmentSection:
    """The settings of a configuration; the defaults where it has none."""
    return getattr(given, "environment", EnvironmentSection())


def with_environment(task: Task, given: Any) -> Task:
    """The task with the tools and the environments that the configuration names, in place of its own. ShoalError for
    what a file does not have."""
    section, file, specs = section_of(given), "", []
    for spec in section.tools:  # file.py:f,g
        file = spec.rpartition(":")[0] or file
        specs.append(spec if ":" in spec else f"{file}:{spec}")
    tools, made = load_named(specs, "tool"), load_named([section.factory] if section.factory else [], "environment")
    for spec, one in [*zip(specs, tools, strict=True), *((section.factory, one) for one in made)]:
        if not (callable(one) or (one in made and isinstance(one, Mapping) and one)):
            raise ShoalError(f"{spec!r} is a {type(one).__name__}: expected a function or a class", "environment.tools"
                             if one in tools else "environment.factory")
    if tools:
        task = replace(task, tools=tuple(tools))
    if made:
        task = replace(task, environments=made[0] if isinstance(made[0], Mapping) else {made[0].__name__: made[0]})
    return task


@dataclass
class TurnFormats:
    """How turns look in tokens, by the tools of a row's environment."""

    tokenizer: Tokenizer
    sessions: Sessions
    section: EnvironmentSection
    _made: dict[EnvironmentKind | None, TurnFormat] = field(default_factory=dict)

    def of(self, columns: Mapping[str, Any]) -> TurnFormat:
        """Of a row with these columns."""
        kind = self.sessions.kind_of(columns)
        if kind not in self._made:
            schemas = [schema(function) for function in self.sessions.functions(columns).values()]
            self._made[kind] = TurnFormat(self.tokenizer, schemas, self.section.call_format)
        return self._made[kind]

    def encode(self, example: Example) -> np.ndarray:
        """Token ids of an example's prompt, int32[T], with its tools."""
        return self.of(example.columns).encode_prompt(example.prompt)


def make_player(turns: TurnFormats | None, places: int, sampling: SamplingSection) -> Player | None:
    """What plays rollouts of several turns on a sampler of so many places; None where they have one."""
    if turns is None:
        return None
    most = turns.section.rollouts or places
    return Player(turns.sessions, turns.of, turns.section, sampling.max_prompt_tokens, most)


def open_sessions(task: Task, given: Any) -> Sessions | None:
    """The sessions of a task's rollouts, forked, and tried on the first row of each set; None without tools and
    environments. ShoalError for a tool that a model cannot be told of, and an environment that cannot begin."""
    if not (task.tools or task.environments):
        return None
    sessions = Sessions(task.tools, task.environments, section_of(given))
    try:
        for rows in (task.train, *task.evaluations.values()):
            if rows:
                _try(sessions, rows[0])
    except BaseException:
        sessions.close()
        raise
    return sessions


def _try(sessions: Sessions, example: Example) -> None:
    columns = {**example.columns, "prompt": example.prompt}
    for function in sessions.functions(columns).values():
        schema(function)
    if kind := sessions.kind_of(columns):
        _check_columns(kind, example.columns)
    sessions.open("tried", columns)
    for end in (False, True):
        if end:
            sessions.end("tried")
        reply, = _wait(sessions)
        if reply.kind:
            what = "get_reward()" if end else "reset(**columns)"
            raise ShoalError(f"environment {kind and kind.type.__name__}: {what} of the first row of the data failed: "
                             f"{reply.error}", "environment.factory")


def _wait(sessions: Sessions) -> list[Any]:
    while True:
        if found := sessions.collect(60.0):
            return found


def _check_columns(kind: EnvironmentKind, columns: Mapping[str, Any]) -> None:
    """ShoalError where `reset` takes no column that the data has, or wants one that it lacks."""
    taken = inspect.signature(kind.type.reset).parameters.values()
    names = [one.name for one in taken][1:]
    reset = f"environment {kind.type.__name__}: reset"
    if not any(one.kind is one.VAR_KEYWORD for one in taken):
        for name in columns:
            if name not in (*names, *OPTIONAL_COLUMNS):
                raise ShoalError(f"{reset} does not take the column {name!r}, and all columns of the data are given: "
                                 f"write reset(self, {', '.join([*names, name])}) or reset(self, **columns)",
                                 "environment.factory")
    for one in [*taken][1:]:
        if one.default is one.empty and one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY) \
                and one.name not in (*columns, "prompt"):
            near = did_you_mean(one.name, columns, lists_all=True)
            raise ShoalError(f"{reset} wants {one.name!r}, which is no column of the data{near} "
                             f"(task.columns=[{one.name}=OTHER] renames one)", "environment.factory")
