"""Stages: the parts of a job, in one list, each of which says what it needs.

@stage("reward", "reward.functions", needs=("scorers",), commands=("train", "eval"), forks=True)
def pool(self) -> RewardPool: ...

job.pool        opens `scorers` first, then `pool`; each once
job.check()     opens all that the job's command can be refused for, in the order of the list
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, Generic, Literal, TypeVar, overload

from shoal.findings import NOT_HERE, Findings
from shoal.records import ShoalError
from shoal.stop import NotHere

Command = Literal["train", "doctor", "eval", "generate", "serve", "figures"]
"""What a job is opened for. `figures`: it reckons, or computes again, with a model that was given;
it reads no data and has no processes of its own."""

T = TypeVar("T")
R = TypeVar("R")


class Stage(Generic[T]):
    """A part of a job that opens when it is first read, after what it needs. What it becomes, or
    the error that it raises, is kept. `stage` declares one."""

    name: str
    function: Callable[..., T]

    def __init__(
        self,
        check: str,
        cure: str,
        needs: Sequence[str],
        after: Sequence[str],
        commands: Sequence[Command],
        forks: bool,
        starts_threads: bool,
    ) -> None:
        self.check = check
        self.cure = cure
        self.needs = needs
        self.after = after
        self.commands = commands
        self.forks = forks
        self.starts_threads = starts_threads

    def __set_name__(self, owner: type[StagedJob], name: str) -> None:
        self.name = name
        owner.stages = owner.stages | {name: self}

    @overload
    def __get__(self, job: None, owner: type) -> Stage[T]: ...

    @overload
    def __get__(self, job: StagedJob, owner: type) -> T: ...

    def __get__(self, job: StagedJob | None, owner: type) -> T | Stage[T]:
        if job is None:
            return self
        return job.open(self.name)


def stage(
    check: str = "configuration",
    cure: str = "",
    *,
    needs: Sequence[str] = (),
    after: Sequence[str] = (),
    commands: Sequence[Command] = (),
    forks: bool = False,
    starts_threads: bool = False,
) -> Callable[[Callable[..., R]], Stage[R]]:
    """Makes a method of a job a stage.

    `check`: what it checks, as findings call it. `cure`: the key that fixes it, unless the error
    names another. `needs`: the stages that are opened before it; where one of them fails, this one
    fails with the same error. `after`: those that are opened before it if they can be; it works
    without them. It reads no other stage while it opens.

    `commands`: the commands that have this stage, and open it before weights are read, to see
    whether it can be refused. For others it is nobody's need. Empty: no command opens it for
    itself, and all have it that have a use for it.

    `forks`: it forks processes, for which this one must not have threads of JAX yet.
    `starts_threads`: from here on it has."""

    def declare(function: Callable[..., R]) -> Stage[R]:
        declared: Stage[R] = Stage(check, cure, needs, after, commands, forks, starts_threads)
        declared.function = function
        declared.__doc__ = function.__doc__
        return declared

    return declare


class StagedJob:
    """A job as the list of its stages: which of them are open, which have failed. Each is opened
    once, after what it needs."""

    stages: ClassVar[dict[str, Stage[Any]]] = {}
    """By name, in the order in which they are checked."""

    def __init__(self, command: Command, findings: Findings) -> None:
        self.command = command
        self.findings = findings
        self.opened: dict[str, Any] = {}
        self.failed: dict[str, ShoalError] = {}
        self._noted: list[ShoalError] = []
        self._left_out: set[str] = set()
        self._opening: list[Stage[Any]] = []

    def has(self, name: str) -> bool:
        """True for a stage that this job's command has."""
        commands = self.stages[name].commands
        return name not in self._left_out and (not commands or self.command in commands)

    def open(self, name: str) -> Any:
        """What a stage becomes, opened after what it needs if it is not open yet. Raises the
        ShoalError of a stage that failed, or of the need that did."""
        if self._opening:
            reader = self._opening[-1]
            if name not in reader.needs and name not in reader.after:
                raise RuntimeError(f"stage {reader.name} reads {name}, which it does not need")
        if name in self.failed:
            raise self.failed[name]
        if name not in self.opened:
            try:
                self.opened[name] = self._opened(self.stages[name])
            except ShoalError as error:
                self.failed[name] = error
                raise
        return self.opened[name]

    def _opened(self, opening: Stage[T]) -> T:
        self._opening.append(opening)
        try:
            for need in opening.after:
                if self.has(need):
                    self._try_open(need)
            for need in opening.needs:
                if self.has(need):
                    self.open(need)
            if opening.forks:
                self._refuse_threads(opening)
            return opening.function(self)
        finally:
            self._opening.pop()

    def _try_open(self, name: str) -> None:
        # The error is kept: whoever needs the stage gets it.
        with contextlib.suppress(ShoalError, NotHere):
            self.open(name)

    def _refuse_threads(self, forking: Stage[Any]) -> None:
        for name in self.opened:
            if self.stages[name].starts_threads:
                raise RuntimeError(
                    f"stage {forking.name} forks processes, and this one has threads of JAX since "
                    f"stage {name}: open {forking.name} first"
                )

    def leave_out(self, name: str) -> None:
        """This job has neither the stage nor any that needs it."""
        self._left_out.add(name)
        for other, declared in self.stages.items():
            if name in declared.needs and other not in self._left_out:
                self.leave_out(other)

    def _checked(self) -> Iterator[Stage[Any]]:
        """The stages that this job can be refused for before its weights are read, in order."""
        for name, declared in self.stages.items():
            if declared.commands and self.has(name):
                yield declared

    def check(self) -> None:
        """Opens everything that can be wrong with a job before its weights are read, of a dry run
        what needs no download. Raises the first ShoalError."""
        for declared in self._checked():
            try:
                self.open(declared.name)
            except NotHere as missing:  # raised in a dry run alone
                self.findings.of(NOT_HERE).ok(
                    f"{missing} is not on this machine, and so not checked"
                )

    def collect(self, through: str) -> None:
        """`check` up to the stage `through`, that notes what is wrong with each stage and goes on
        with the next, in place of raising it."""
        for declared in self._checked():
            try:
                self.open(declared.name)
            except ShoalError as error:
                self._note(error)
            if declared.name == through:
                return
        raise LookupError(f"shoal {self.command} has no stage {through}")

    def _note(self, error: ShoalError) -> None:
        if error in self._noted:  # of a stage that others need
            return
        self._noted.append(error)
        # The first to fail with it is the one that raised it.
        for name, known in self.failed.items():
            if known is error:
                failed = self.stages[name]
                self.findings.of(failed.check, failed.cure).wrong(error)
                return

    def is_open(self, *names: str) -> bool:
        return all(name in self.opened for name in names)
