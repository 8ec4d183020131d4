"""`stage`: a part of a job that opens when it is first asked for; and which of them check a job."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Generic, TypeVar, overload

from shoal.config.schema import Config, EvalConfig, GenerateConfig, ServeConfig
from shoal.types import ShoalError

if TYPE_CHECKING:
    from shoal.run.job import Job

T = TypeVar("T")
R = TypeVar("R")

CHECKS: Mapping[type, Sequence[str]] = {
    Config: (
        "settings",
        "inputs",
        "folder_note",
        "questions",
        "sessions",
        "pool",
        "cluster",
        "world",
        "given_roles",
        "placement",
        "positions",
        "model",
        "tensors",
        "teacher",
        "sets",
        "prompts",
        "lengths",
        "slots",
        "reward_findings",
        "sizes",
        "room",
    ),
    EvalConfig: (
        "questions",
        "sessions",
        "pool",
        "given_roles",
        "positions",
        "model",
        "tensors",
        "sets",
        "slots",
        "lost_answers",
    ),
    **dict.fromkeys(
        (GenerateConfig, ServeConfig), ("given_roles", "positions", "model", "tensors")
    ),
}
"""The stages in which a job can be refused before its weights are read, of the run and of its dry
run."""


class stage(Generic[T]):
    """A part of a job that opens when it is first asked for. What it becomes, or the error that it
    raises, is kept.

    `check`: what it checks, as findings call it. `key`: what mends it, unless the error names
    another."""

    name: str
    function: Callable[[Job], T]

    def __init__(self, check: str = "configuration", key: str = "") -> None:
        self.check, self.key = check, key

    def __call__(self, function: Callable[[Job], R]) -> stage[R]:
        made: stage[R] = stage(self.check, self.key)
        made.function, made.__doc__ = function, function.__doc__
        return made

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    @overload
    def __get__(self, job: None, owner: type) -> stage[T]: ...

    @overload
    def __get__(self, job: Job, owner: type) -> T: ...

    def __get__(self, job: Job | None, owner: type) -> T | stage[T]:
        if job is None:
            return self
        if self.name in job.failed:
            raise job.failed[self.name]
        if self.name not in job.opened:
            try:
                job.opened[self.name] = self.function(job)
            except ShoalError as error:
                job.failed[self.name] = error
                raise
        return job.opened[self.name]
