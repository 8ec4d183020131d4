"""Generated problems: training rows without end, the same on every machine, and held-out problems
that never occur in training."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any, Generic, TypeVar

from shoal.config.sections.task import TaskSection
from shoal.records import Example, ShoalError
from shoal.tasks.task import Task

T = TypeVar("T")
Problem = TypeVar("Problem")

NUM_TRAIN = 1_000_000
NUM_HELD_OUT = 500  # if task.num_eval_questions is 0
NUM_BUCKETS = 16  # one of this many problems is held out, chosen by a hash
MAX_IDLE_DRAWS = 20_000  # draws without a new held-out problem, after which there are no more


class LazyRows(Sequence[Example]):
    """A sequence whose row r is `make(r)`, computed at each access, for rows 0 to num_rows - 1."""

    def __init__(self, make: Callable[[int], Example], num_rows: int) -> None:
        self._make = make
        self._num_rows = num_rows

    def __len__(self) -> int:
        return self._num_rows

    def __getitem__(self, index: Any) -> Any:
        """Returns the example of a row; a negative index counts from the end. Returns a list for a
        slice. IndexError for a row that there is not."""
        rows = range(self._num_rows)
        if isinstance(index, slice):
            return [self._make(row) for row in rows[index]]
        if not -self._num_rows <= index < self._num_rows:
            raise IndexError(f"row {index} of {self._num_rows}")
        # `range` turns a negative index into a row.
        return self._make(rows[index])


def _as_drawn(rng: Random, drawn: Any, purpose: str) -> Any:
    return drawn


@dataclass(frozen=True)
class Problems(Generic[Problem]):
    """The generated problems of a task: those of training rows, and held-out ones, which no
    training row has. The same task, row and values of `settings` give the same problems on
    every machine.

    >>> problems = Problems("calculator", draw, key=lambda problem: problem.expression)
    >>> problems.train(7, section), problems.held_out(500, section)
    """

    task: str
    draw: Callable[[Random, TaskSection], Any]  # returns a problem, or what `finish` completes
    key: Callable[[Any], str]  # (drawn) -> a text; problems with the same key are the same
    settings: tuple[str, ...] = ()  # fields of `TaskSection` on which the problems depend
    finish: Callable[[Random, Any, str], Problem] = _as_drawn

    def _generator(self, purpose: str, row: int, section: TaskSection) -> Random:
        """Returns the random numbers of a row for a purpose."""
        values = [getattr(section, setting) for setting in self.settings]
        return generator(self.task, purpose, row, *values)

    def train(self, row: int, section: TaskSection, purpose: str = "train") -> Problem:
        """Returns the problem of a training row. Draws until the problem is not a held-out one. A
        row has another problem for each `purpose`. The same row always has the same problem. It is
        not stored: each call draws it again."""
        rng = self._generator(purpose, row, section)
        while True:
            drawn = self.draw(rng, section)
            if not is_held_out(self.key(drawn)):
                return self.finish(rng, drawn, purpose)

    @functools.cache  # noqa: B019 # half a second; a command may load its task more than once
    def held_out(
        self, count: int, section: TaskSection, purpose: str = "held_out"
    ) -> tuple[Problem, ...]:
        """Returns `count` held-out problems with different keys, or fewer if MAX_IDLE_DRAWS draws
        in a row found no new one. A smaller `count` gives the first of the same problems.
        Cached."""
        rng = self._generator(purpose, 0, section)
        problems: dict[str, Problem] = {}
        idle = 0
        while len(problems) < count and idle < MAX_IDLE_DRAWS:
            drawn = self.draw(rng, section)
            key = self.key(drawn)
            idle += 1
            if is_held_out(key) and key not in problems:
                problems[key] = self.finish(rng, drawn, purpose)
                idle = 0
        return tuple(problems.values())


def generated_task(
    section: TaskSection,
    task: Task,
    problems: Problems[Problem],
    example: Callable[[int, Problem], Example],
    sets: Sequence[str] = ("held_out",),
) -> Task:
    """Returns the task with generated rows, each made by `example(row, problem)`: NUM_TRAIN
    training rows, and for each of `sets` an evaluation of this name with held-out problems (the
    name is also their purpose in `Problems.held_out`). The rows of set k are numbered from k *
    NUM_TRAIN. Everything else of `task` is kept.

    Adds a note if a set has fewer problems than `task.num_eval_questions` (0: NUM_HELD_OUT) with
    these settings. ShoalError if `task.path` is set.
    """
    refuse_path(section, task.name)
    count = section.num_eval_questions or NUM_HELD_OUT

    def training_example(row: int) -> Example:
        return example(row, problems.train(row, section))

    evaluations: dict[str, tuple[Example, ...]] = {}
    notes: list[str] = []
    for number, name in enumerate(sets):
        held_out = problems.held_out(count, section, name)
        first_row = number * NUM_TRAIN  # no two sets share row numbers, and so sampling noise
        examples = [example(first_row + i, problem) for i, problem in enumerate(held_out)]
        evaluations[name] = tuple(examples)
        if len(held_out) < count:
            settings = " ".join(
                f"task.{setting}={getattr(section, setting)}" for setting in problems.settings
            )
            notes.append(
                f"{task.name}: {name} has {len(held_out)} problems, not {count}: there are no more "
                f"at {settings}"
            )
    return replace(
        task,
        train=LazyRows(training_example, NUM_TRAIN),
        evaluations=evaluations,
        notes=tuple(notes),
    )


# ---- drawing


def refuse_path(section: TaskSection, name: str) -> None:
    """Raises ShoalError if `task.path` is set, because this task reads no data."""
    if section.path:
        raise ShoalError(
            f"task.path={section.path!r}: the task {name} makes its own problems; leave task.path "
            "out, or choose the task that reads it, task=custom for data of your own"
        )


def is_held_out(key: str) -> bool:
    """True if problems with this key are held out; that depends on the key's hash alone. One key in
    NUM_BUCKETS is."""
    return _hash(key) % NUM_BUCKETS == 0


def generator(*parts: object) -> Random:
    """Returns a random generator seeded by the parts: the same parts give the same numbers on every
    machine."""
    return Random(_hash("/".join(map(str, parts))))


def _hash(text: str) -> int:
    """Returns 64 bits of a text's hash as a number."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def pick(rng: Random, items: Sequence[T]) -> T:
    """Returns one of the items at random. Uses only `Random.random`, the one method whose numbers
    Python promises to keep between versions. IndexError without items."""
    return items[int(rng.random() * len(items))]
