"""The tools and environments of a run: loaded by name, and tried before weights are read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from shoal.config.environment_section import EnvironmentSection
from shoal.config.loading import FROM_PYTHON
from shoal.config.schema import SamplingSection
from shoal.model.tokenizer import Tokenizer
from shoal.model.turns import TurnFormat, schema
from shoal.rewards.functions import load_functions, load_named
from shoal.rollout.player import Player
from shoal.run.sandbox import enter_sandbox
from shoal.serve.agent import AgentProgram
from shoal.serve.server import require_packages
from shoal.tasks.openenv import PREFIX, openenv
from shoal.tasks.task import Task
from shoal.types import Example, ShoalError
from shoal.workers.environments import EnvironmentKind, name_of
from shoal.workers.rollout_function import ROLLOUT, Agent, RolloutCall
from shoal.workers.sessions import Reply, Sessions


def section_of(given: Any) -> EnvironmentSection:
    """The settings of a configuration; the defaults where it has none."""
    return getattr(given, "environment", EnvironmentSection())


def with_environment(task: Task, given: Any) -> Task:
    """The task with the tools and the environments that a configuration names, in place of its own.
    ShoalError for what a file does not have."""
    section, file, specs = section_of(given), "", []
    for spec in section.tools:  # file.py:f,g
        file = spec.rpartition(":")[0] or file
        specs.append(spec if ":" in spec else f"{file}:{spec}")
    task = replace(task, tools=tuple(load_functions(specs, "tool", "")) or task.tools)
    if spec := section.factory:
        if is_server := spec.startswith(PREFIX):
            require_packages("openenv", "websockets")
        made = openenv(spec) if is_server else load_named([spec], "environment")[0]
        task = replace(
            task, environments=made if isinstance(made, Mapping) else {name_of(made): made}
        )
    if section.rollout:
        (function,) = load_functions([section.rollout], "rollout", "")
        task = replace(task, tools=(), environments={ROLLOUT: partial(RolloutCall, function)})
    if section.agent:
        is_function = (
            section.agent.startswith(FROM_PYTHON) or ".py:" in section.agent.partition(" ")[0]
        )
        named = load_functions([section.agent], "agent", "")[0] if is_function else section.agent
        agent = AgentProgram(named, given.sampling, given.model.path)
        task = replace(task, tools=(), environments={ROLLOUT: partial(Agent, agent)})
    return task


@dataclass
class TurnFormats:
    """How turns look in tokens, by the tools of a row's environment. `note` is called with what the
    chat template would change in earlier turns, once for each line."""

    tokenizer: Tokenizer
    sessions: Sessions
    section: EnvironmentSection
    note: Callable[[str], None] = lambda line: None
    limit: int = 1 << 30  # sampling.max_completion_tokens
    _made: dict[EnvironmentKind | None, TurnFormat] = field(default_factory=dict)

    def of(self, columns: Mapping[str, Any]) -> TurnFormat:
        """Of a row with these columns. ShoalError where no answer fits a completion."""
        kind = self.sessions.kind_of(columns)
        if kind not in self._made:
            functions = self.sessions.functions(columns)
            known = {line for made in self._made.values() for line in made.notes}
            form = TurnFormat(
                self.tokenizer,
                list(map(schema, functions.values())),
                self.section.call_format,
                self.section.special_tokens,
            )
            answer = (
                {"role": "tool", "name": name, "content": "1"}
                if (name := next(iter(functions), ""))
                else {"role": "user", "content": "1"}
            )
            if self.limit < (
                least := 2 + len(form.encode_context([answer]))
            ):  # a token before it, and one after
                raise ShoalError(
                    f"sampling.max_completion_tokens={self.limit}: all tokens of a rollout count, "
                    f"and one "
                    f"answer takes at least {least}: raise it",
                    "sampling.max_completion_tokens",
                )
            self._made[kind] = form
            for line in form.notes if self.section.history == "keep" else ():
                if line not in known:
                    self.note(line)
        return self._made[kind]

    def encode(self, example: Example) -> np.ndarray:
        """Token ids of an example's prompt, int32[T], with its tools."""
        kind = self.sessions.kind_of(example.columns)
        return (self.tokenizer if kind and kind.asks else self.of(example.columns)).encode_prompt(
            example.prompt
        )


def make_player(turns: TurnFormats, places: int, sampling: SamplingSection) -> Player:
    """What plays rollouts of several turns on a sampler of so many places."""
    most = turns.section.rollouts or places
    return Player(
        turns.sessions, turns.of, turns.section, sampling.max_prompt_tokens, most, turns.tokenizer
    )


def open_sessions(task: Task, given: Any) -> Sessions | None:
    """The sessions of a task's rollouts, forked, and tried on the first row of each set; None
    without tools and environments. ShoalError for a tool without a schema, and an environment that
    cannot begin."""
    if not (task.tools or task.environments):
        return None
    section = section_of(given)
    sessions = Sessions(
        task.tools,
        task.environments,
        section,
        enter_sandbox(task, section) if section.sandbox == "bwrap" else None,
    )
    try:
        for rows in (task.train, *task.evaluations.values()):
            if rows:
                _try(sessions, rows[0])
    except BaseException:
        sessions.close()
        raise
    return sessions


def _try(sessions: Sessions, example: Example) -> None:
    for function in sessions.functions(example.columns).values():
        schema(function)
    sessions.open("tried", {**example.columns, "prompt": example.prompt})
    sessions.end("tried")
    replies: list[Reply] = []
    while not any(reply.fatal or reply.what == "end" for reply in replies):
        replies += sessions.collect(1.0)
    for reply in filter(lambda one: one.kind, replies):
        kind, row = sessions.kind_of(example.columns), example.place or f"data row {example.row}"
        if kind and kind.asks:
            what = (
                ("agent", "environment.agent")
                if kind.type is Agent
                else ("rollout function", "environment.rollout")
            )
            raise ShoalError(f"the {what[0]} failed for {row}: {reply.error}", what[1])
        method, cure = (
            ("get_reward", "a number or None")
            if reply.what == "end"
            else (
                "reset",
                f"a text or None, of the columns {', '.join(example.columns)}; **columns takes "
                f"what has no name",
            )
        )
        raise ShoalError(
            f"environment {kind and kind.type.__name__}: {method} failed for {row}: {reply.error}; "
            f"it "
            f"must return {cure}",
            "environment.factory",
        )
