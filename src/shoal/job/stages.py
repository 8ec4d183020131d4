"""The stages of a job: an ordered list of parts, each of which declares which others it needs.

@stage("reward", "reward.functions", needs=("reward_functions",), commands=("train",), forks=True)
def reward_pool(self) -> RewardPool: ...

job.reward_pool   opens `reward_functions` first, then `reward_pool`; each is opened once
job.check()       opens every stage that can refuse the job's command, in the order of the list
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, Generic, Literal, TypeVar, overload

from shoal.findings import NOT_HERE, Findings
from shoal.records import ShoalError
from shoal.stop import NotHere

Command = Literal["train", "doctor", "eval", "generate", "serve", "estimate"]
"""The command that a job is opened for. `estimate`: a job that only estimates, or computes again,
with a model that was passed to it: it checks nothing, reads no data and starts no processes, and
opens only the stages that its caller reads."""

T = TypeVar("T")
R = TypeVar("R")


class Stage(Generic[T]):
    """One part of a job, like its model or its prompts. Reading the attribute `job.NAME` opens the
    stage, after the stages that it needs, and returns what its method returned. The result, or the
    error that the method raised, is kept by the job, so a stage is opened once. The decorator
    `stage` makes one of a method."""

    name: str
    function: Callable[..., T]

    def __init__(
        self,
        finding_name: str,
        fix_key: str,
        needs: Sequence[str],
        after: Sequence[str],
        commands: Sequence[Command],
        forks: bool,
        starts_threads: bool,
    ) -> None:
        """Makes a stage that is not bound to a method yet. `finding_name`, `fix_key`: the name and
        the key of a finding about its failure. `needs`, `after`: names of stages that are opened
        before it; a failure of `needs` makes it fail too, one of `after` is ignored. `commands`:
        those that have it; empty: all. `forks`: opening it forks processes; `starts_threads`:
        opening it starts threads of JAX in this process."""
        self.finding_name = finding_name
        self.fix_key = fix_key
        self.needs = needs
        self.after = after
        self.commands = commands
        self.forks = forks
        self.starts_threads = starts_threads

    def __set_name__(self, owner: type[StagedJob], name: str) -> None:
        """Adds the stage to the list of its class, under the method's name."""
        self.name = name
        owner.stages = owner.stages | {name: self}

    @overload
    def __get__(self, job: None, owner: type) -> Stage[T]: ...

    @overload
    def __get__(self, job: StagedJob, owner: type) -> T: ...

    def __get__(self, job: StagedJob | None, owner: type) -> T | Stage[T]:
        """Opens the stage of a job and returns its result; on the class, returns the `Stage`."""
        if job is None:
            return self
        return job.open(self.name)


def stage(
    finding_name: str = "configuration",
    fix_key: str = "",
    *,
    needs: Sequence[str] = (),
    after: Sequence[str] = (),
    commands: Sequence[Command] = (),
    forks: bool = False,
    starts_threads: bool = False,
) -> Callable[[Callable[..., R]], Stage[R]]:
    """Returns a decorator that makes a method of a job a stage.

    `finding_name`: the name under which findings list this stage. `fix_key`: the configuration key
    that fixes a failure, unless the error names another. `needs`: stages that are opened before
    this one; if one of them fails, this one fails with the same error. `after`: stages that are
    opened before this one too, but whose failure is ignored. While a stage opens it may read only
    stages of `needs` and `after`.

    `commands` decides two things: who has the stage, and that `check` opens it.

    * With commands, a job of one of these opens the stage before weights are read, to learn whether
      the job is refused. A job of another command skips it in checks and where other stages need
      it, and may not read it, unless the job only estimates.
    * Empty, all commands have the stage, and it opens when something reads it.

    `forks`: this stage forks processes, which is safe only while this process has no threads of
    JAX. `starts_threads`: this process has threads of JAX once this stage has been opened.
    """

    def declare(function: Callable[..., R]) -> Stage[R]:
        """Returns the stage that `function`, a method of a job, opens; it has the method's
        docstring."""
        declared: Stage[R] = Stage(
            finding_name=finding_name,
            fix_key=fix_key,
            needs=needs,
            after=after,
            commands=commands,
            forks=forks,
            starts_threads=starts_threads,
        )
        declared.function = function
        declared.__doc__ = function.__doc__
        return declared

    return declare


class StagedJob:
    """Base class of a job: opens its stages, each once and after those that it needs, and keeps
    which of them are open and which have failed."""

    stages: ClassVar[dict[str, Stage[Any]]] = {}
    """Name -> stage, in the order in which they are checked."""

    def __init__(self, command: Command, findings: Findings) -> None:
        """Makes a job of which no stage is open. `command`: decides which stages the job has
        (`has`). `findings`: where stages, and errors of `collect`, are recorded."""
        self.command = command
        self.findings = findings
        self.opened: dict[str, Any] = {}
        self.failed: dict[str, ShoalError] = {}
        self._noted: list[ShoalError] = []
        self._left_out: set[str] = set()
        self._opening: list[Stage[Any]] = []

    def has(self, name: str) -> bool:
        """True if the job's command is among the stage's `commands`, or these are empty, and the
        stage was not left out (`leave_out`)."""
        commands = self.stages[name].commands
        return name not in self._left_out and (not commands or self.command in commands)

    def open(self, name: str) -> Any:
        """Returns the result of a stage. If it is not open yet, first opens the stages that it
        needs, then the stage. Raises the ShoalError with which the stage, or one that it needs,
        failed, each time it is called; RuntimeError if the stage that is being opened reads one
        that it did not declare; LookupError if the job has no such stage (`has`) and does more than
        estimate."""
        if self._opening:
            reader = self._opening[-1]
            if name not in reader.needs and name not in reader.after:
                raise RuntimeError(f"stage {reader.name} reads {name}, which it does not need")
        if name in self.failed:
            raise self.failed[name]
        if name not in self.opened:
            if not self.has(name) and self.command != "estimate":
                raise LookupError(f"a job of shoal {self.command} has no stage {name}")
            try:
                self.opened[name] = self._open_with_needs(self.stages[name])
            except ShoalError as error:
                self.failed[name] = error
                raise
        return self.opened[name]

    def _open_with_needs(self, opening: Stage[T]) -> T:
        """Opens the stages of `after`, whose failure is ignored, and of `needs`, whose failure is
        raised; then calls the method of the stage and returns its result. Stages that the job's
        command does not have are skipped."""
        self._opening.append(opening)
        try:
            for earlier in opening.after:
                if self.has(earlier):
                    self._try_open(earlier)
            for need in opening.needs:
                if self.has(need):
                    self.open(need)
            if opening.forks:
                self._refuse_threads(opening)
            return opening.function(self)
        finally:
            self._opening.pop()

    def _try_open(self, name: str) -> None:
        """Opens a stage, and ignores it if that fails or needs a download in a dry run. After a
        download that was needed (`NotHere`) the stage is neither open nor failed: `is_open` tells
        whether its result is there."""
        # `open` keeps the error, and raises it again for every stage that needs this one.
        with contextlib.suppress(ShoalError, NotHere):
            self.open(name)

    def _refuse_threads(self, forking: Stage[Any]) -> None:
        """Raises RuntimeError, which names both, if a stage that starts threads of JAX is open
        already. `forking`: the stage that is about to fork processes."""
        for name in self.opened:
            if self.stages[name].starts_threads:
                raise RuntimeError(
                    f"stage {forking.name} forks processes, and this one has threads of JAX since "
                    f"stage {name}: open {forking.name} first"
                )

    def leave_out(self, name: str) -> None:
        """Takes a stage out of the job, with every stage that needs it, directly or not: `has` is
        False for them, so they are not checked, and a stage that names one in `after` opens without
        it."""
        self._left_out.add(name)
        for other, declared in self.stages.items():
            if name in declared.needs and other not in self._left_out:
                self.leave_out(other)

    def _stages_to_check(self) -> Iterator[Stage[Any]]:
        """Yields the stages that can refuse this job before its weights are read, in the order of
        the list: those that the job has and whose `commands` are not empty."""
        for name, declared in self.stages.items():
            if declared.commands and self.has(name):
                yield declared

    def check(self) -> None:
        """Opens, in the order of the list, every stage of this command that can refuse the job
        before its weights are read (those whose `commands` are not empty), and raises the first
        ShoalError. In a dry run a stage that needs a download is skipped, with a finding that says
        so."""
        for declared in self._stages_to_check():
            try:
                self.open(declared.name)
            except NotHere as missing:  # only a dry run raises it
                self.findings.of(NOT_HERE).ok(
                    f"{missing} is not on this machine, and so not checked"
                )

    def collect(self, through: str) -> None:
        """Opens the same stages as `check`, up to and including `through`, but records each
        ShoalError as a finding and continues with the next stage in place of raising. What a dry
        run raises for something that is not on this machine (`NotHere`) is not caught. LookupError
        if `check` has no stage `through`; the others have been opened then."""
        for declared in self._stages_to_check():
            try:
                self.open(declared.name)
            except ShoalError as error:
                self._record(error)
            if declared.name == through:
                return
        raise LookupError(f"shoal {self.command} has no stage {through}")

    def _record(self, error: ShoalError) -> None:
        """Records an error as a finding, once: several stages fail with the same error if they need
        the one that raised it."""
        if error in self._noted:  # a stage needs one that has failed already
            return
        self._noted.append(error)
        # The first stage that failed with this error is the one that raised it.
        for name, known in self.failed.items():
            if known is error:
                failed = self.stages[name]
                self.findings.of(failed.finding_name, failed.fix_key).wrong(error)
                return

    def is_open(self, *names: str) -> bool:
        """True if all of these stages have been opened."""
        return all(name in self.opened for name in names)
