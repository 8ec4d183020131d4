"""The task of a run: its data by name or from Python, judged by the reward functions that the run names."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from shoal.config.schema import RewardSection, TaskSection
from shoal.rewards.functions import load_functions, name_functions
from shoal.tasks.library import PENALTY, find_builtin, overlong_punishment
from shoal.tasks.rows import Correct, rows_task
from shoal.tasks.task import FROM_PYTHON, ROWS, Task, load_by_name
from shoal.types import RewardFunction, ShoalError


def _unrewarded(completions: Sequence[Any], **kwargs: Any) -> list[float]:
    return [0.0] * len(completions)


def load_task(task: TaskSection, reward: RewardSection | None = None,
              functions: Sequence[Callable[..., Any]] = (), needs_reward: bool = True) -> Task:
    """Loads a task by name; functions given (`reward.functions` first, then `functions`) replace its own rewards.

    Every evaluation is cut to its first `task.num_questions` (0: all). Raises `ShoalError` for an unknown task, and
    whatever the task's data or the functions' files lack. Where nothing `needs_reward` (a teacher alone teaches), data
    without a function is rewarded with 0.
    """
    judged, reward = reward is not None, reward or RewardSection()
    if task.name == ROWS:
        raise ShoalError("task.name='rows': the data of this run came from Python, give it again there with its "
                         "reward: shoal.train(resume=FOLDER, task=rows, reward=f)")
    loaded = with_rewards(load_by_name(task, reward), task, reward, functions)
    if not needs_reward and not loaded.rewards:
        return replace(loaded, rewards=(RewardFunction("unrewarded", _unrewarded, builtin=True),))
    if judged and not loaded.rewards:
        raise ShoalError(f"task {task.name}: own data needs a function that judges it, reward=file.py:function with "
                         "function(completions, **columns) -> list of numbers")
    return loaded


def find_functions(specs: Sequence[str]) -> list[Callable[..., Any] | RewardFunction]:
    """The functions that are named: ready ones, or `file.py:function`."""
    ready = {spec: one for spec in specs if (one := find_builtin(spec))}
    loaded = iter(load_functions([spec for spec in specs if spec not in ready]))
    return [ready.get(spec) or next(loaded) for spec in specs]


def with_rewards(loaded: Task, task: TaskSection, reward: RewardSection,
                 functions: Sequence[Callable[..., Any]] = ()) -> Task:
    """A task as a run uses it: evaluations cut to `task.num_questions`, judged by the functions that were given."""
    files = [spec for spec in reward.functions if not spec.startswith(FROM_PYTHON)]
    if len(files) < len(reward.functions) and not functions:
        names = ", ".join(spec.removeprefix(FROM_PYTHON) for spec in reward.functions)
        raise ShoalError(f"reward.functions={list(reward.functions)}: this reward came from Python; give it again "
                         f"there, shoal.train(resume=FOLDER, reward={names}), or name a file, reward=file.py:function")
    given = [*find_functions(files), *functions]
    count = task.num_questions or None
    return replace(loaded, evaluations={name: rows[:count] for name, rows in loaded.evaluations.items()},
                   rewards=name_functions(given, reward.weights) if given else _weigh(loaded.rewards, reward.weights))


def _weigh(own: tuple[RewardFunction, ...], weights: Sequence[float]) -> tuple[RewardFunction, ...]:
    if weights and len(weights) != len(own):
        raise ShoalError(f"reward.weights: expected {len(own)} numbers, one for each of the task's own functions "
                         f"({', '.join(one.name for one in own)}), got {len(weights)}")
    return tuple(replace(one, weight=float(w)) for one, w in zip(own, weights, strict=True)) if weights else own


def own_task(data: Any, held_out: Any, correct: Correct | None, task: TaskSection, reward: RewardSection,
             functions: Sequence[Callable[..., Any]]) -> Task:
    """The task of a run from Python: rows, or a `Task` as it is, judged by the reward functions that were given."""
    if isinstance(data, Task):
        if held_out is not None or correct is not None:
            raise ShoalError(f"{'held_out' if held_out is not None else 'correct'} goes with rows; a shoal.Task has "
                             "its own `evaluations` and `correct`: set them there")
        own = data
    else:
        _check_settings(task)
        own = rows_task(data, held_out, correct, task.num_questions)
        if not (functions or reward.functions):
            raise ShoalError("reward is not given: own data needs a function that judges it, "
                             "reward=f with f(completions, **columns) -> list of numbers")
    return with_rewards(own, task, reward, functions)


def _check_settings(task: TaskSection) -> None:
    default = TaskSection()
    for key, value in vars(task).items():
        if key not in ("name", "num_questions") and value != getattr(default, key):
            raise ShoalError(f"task.{key}={value!r} has no effect on data given from Python: leave it out")


def with_overlong(task: Task, reward: RewardSection, max_tokens: int) -> Task:
    """The task with the penalty beside its rewards, where `reward.overlong_buffer_tokens` asks for one."""
    buffer = max(1, max_tokens // 5) if reward.overlong_buffer_tokens == -1 else reward.overlong_buffer_tokens
    if not buffer:
        return task
    if buffer > max_tokens:
        raise ShoalError(f"reward.overlong_buffer_tokens={buffer}: expected at most sampling.max_completion_tokens "
                         f"({max_tokens}), of which it is the last part")
    if any(one.name == PENALTY for one in task.rewards):
        raise ShoalError("reward function 'overlong': reward.overlong_buffer_tokens adds one of this name; give yours "
                         "another, or leave that key at 0")
    penalty = RewardFunction(PENALTY, overlong_punishment(max_tokens, buffer), reward.overlong_penalty, builtin=True)
    return replace(task, rewards=(*task.rewards, penalty))
