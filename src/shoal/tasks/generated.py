"""Generated problems: rows without end, the same on every machine, and held-out ones that training never has."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from random import Random
from typing import Any, TypeVar

from shoal.config.schema import TaskSection
from shoal.tasks.task import Task
from shoal.types import Example, ShoalError

T = TypeVar("T")
Problem = TypeVar("Problem")

NUM_TRAIN = 1_000_000
NUM_HELD_OUT = 500  # where task.num_eval_questions is 0
NUM_BUCKETS = 16  # a problem is held out by a hash, one in so many
MAX_IDLE_DRAWS = 20_000  # draws without a new held-out problem, after which there are no more


class MadeRows(Sequence[Example]):
    """`make(row)` for rows 0 to num_rows - 1."""

    def __init__(self, make: Callable[[int], Example], num_rows: int) -> None:
        self._make = make
        self._num_rows = num_rows

    def __len__(self) -> int:
        return self._num_rows

    def __getitem__(self, index: Any) -> Any:
        rows = range(self._num_rows)
        if isinstance(index, slice):
            return [self._make(row) for row in rows[index]]
        if not -self._num_rows <= index < self._num_rows:
            raise IndexError(f"row {index} of {self._num_rows}")
        return self._make(rows[index])


def generated_task(section: TaskSection, task: Task, dials: Sequence[str], sets: Mapping[str, Callable[[int], Any]],
                   train: Callable[[int], Problem], example: Callable[[int, Problem], Example]) -> Task:
    """The task with its rows: `train` makes the problem of a row, `sets` the first problems of each evaluation.

    Notes say which sets have fewer problems than `task.num_eval_questions` (0: NUM_HELD_OUT) at the section's `dials`.
    """
    if section.path:
        raise ShoalError(f"task.path={section.path!r}: the task {task.name} makes its own problems; leave task.path "
                         "out, or choose the task that reads it, task=custom for data of your own")
    count = section.num_eval_questions or NUM_HELD_OUT
    held_out = {name: draw(count) for name, draw in sets.items()}
    at = " ".join(f"task.{dial}={getattr(section, dial)}" for dial in dials)
    return replace(
        task, train=MadeRows(lambda row: example(row, train(row)), NUM_TRAIN),
        evaluations={name: tuple(example(i * NUM_TRAIN + row, problem) for row, problem in enumerate(problems))
                     for i, (name, problems) in enumerate(held_out.items())},
        notes=tuple(f"{task.name}: {name} has {len(problems)} problems, not {count}: there are no more at {at}"
                    for name, problems in held_out.items() if len(problems) < count))


# ---- drawing


def draw_held_out(count: int, draw: Callable[[], T], key: Callable[[T], str], finish: Callable[[T], Problem]
                  ) -> tuple[Problem, ...]:
    """`count` held-out problems with different keys, the first n the same for every count; fewer where there are no
    more. `finish` is called for those that are kept."""
    problems: dict[str, Problem] = {}
    idle = 0
    while len(problems) < count and idle < MAX_IDLE_DRAWS:
        found = draw()
        idle += 1
        if is_held_out(key(found)) and key(found) not in problems:
            problems[key(found)] = finish(found)
            idle = 0
    return tuple(problems.values())


def draw_for_training(draw: Callable[[], T], key: Callable[[T], str]) -> T:
    """The first draw that is not held out."""
    while is_held_out(key(found := draw())):
        pass
    return found


def is_held_out(key: str) -> bool:
    """True if the problems with this key are held out, by nothing but its hash."""
    return _hash(key) % NUM_BUCKETS == 0


def generator(*parts: object) -> Random:
    """The random numbers of an address: the same parts give the same ones on every machine."""
    return Random(_hash("/".join(map(str, parts))))


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def pick(rng: Random, items: Sequence[T]) -> T:
    """One of the items. `Random.random` is the one method whose numbers Python promises to keep between versions."""
    return items[int(rng.random() * len(items))]
