"""Loads the task of a run: its data, by name or from Python, and its reward functions."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from shoal.config.keywords import FROM_PYTHON, HELD_OUT_ROWS, ROWS
from shoal.config.sections.reward import RewardSection
from shoal.config.sections.sampling import SamplingSection
from shoal.config.sections.task import TaskSection
from shoal.records import Example, Messages, RewardFunction, ShoalError, truth_fault
from shoal.rewards.loading import load_reward_functions, name_functions
from shoal.tasks.builtin_rewards import PENALTY, find_builtin, overlong_punishment, verl_reward
from shoal.tasks.custom import Correct, rows_of_section
from shoal.tasks.generated import LazyRows
from shoal.tasks.graders.judge_model import JudgeFunction
from shoal.tasks.splits import asked_rows
from shoal.tasks.task import Task, load_by_name, no_reward, with_fewer_rows
from shoal.text import count
from shoal.trainer.prompts import Encode, TokenizedExample, prepare


def _zero_reward(completions: Sequence[Any], **kwargs: Any) -> list[float]:
    """Gives each completion a reward of 0."""
    return [0.0] * len(completions)


MOST_MEASURED = 10_000
"""Most training prompts for which all are tokenised before a run begins, to find the longest; that
takes some five seconds."""


UNREWARDED = (RewardFunction("unrewarded", _zero_reward, runs_in_process=True),)
"""The rewards of a run that uses none, because only a teacher gives the signal."""


def load_task(
    task: TaskSection,
    reward: RewardSection | None = None,
    functions: Sequence[Callable[..., Any]] = (),
) -> Task:
    """Loads the task that `task.name` names. Its reward functions are those of `reward.functions`
    followed by `functions`; only if there are none of either, the task's own. ShoalError if the
    task is unknown, if its data or a function's file is wrong, or if `reward` is given and there is
    no reward function at all."""
    section = reward or RewardSection()
    return with_rewards(
        load_questions(task, section), task, section, functions, required=reward is not None
    )


def load_questions(task: TaskSection, reward: RewardSection) -> Task:
    """Loads the task that `task.name` names, with its own rewards; each evaluation set is cut to
    its first `task.num_eval_questions`. ShoalError if the task is unknown, its data is wrong, or
    the data came from Python (`rows`)."""
    if task.name == ROWS:
        raise ShoalError(
            "task.name='rows': the data of this run came from Python: pass it again in Python "
            "with its reward: shoal.train(resume=FOLDER, task=rows, reward=f)"
        )
    return with_fewer_questions(load_by_name(task, reward), task)


def own_rewards(
    loaded: Task, task: TaskSection, reward: RewardSection, required: bool
) -> tuple[RewardFunction, ...]:
    """Returns the task's own reward functions, with the weights of `reward.weights`, or, if that is
    empty, with their own. Empty if the task has none and none is required. ShoalError if there is
    none although one is `required`, or if the number of weights is wrong."""
    rewards = loaded.rewards
    if required and not rewards:
        raise no_reward(task)
    if reward.weights and len(reward.weights) != len(rewards):
        raise ShoalError(
            f"reward.weights: expected {count(len(rewards), 'number')}, one for each of the task's "
            f"own functions ({', '.join(function.name for function in rewards)}), got "
            f"{len(reward.weights)}",
            "reward.weights",
        )
    if not reward.weights:
        return rewards
    weighted = []
    for function, weight in zip(rewards, reward.weights, strict=True):
        weighted.append(replace(function, weight=float(weight)))
    return tuple(weighted)


def named_functions(reward: RewardSection) -> list[str]:
    """Returns the entries of `reward.functions` without those that stand for functions from
    Python."""
    return [spec for spec in reward.functions if not spec.startswith(FROM_PYTHON)]


def find_functions(
    reward: RewardSection, specs: Sequence[str]
) -> list[Callable[..., Any] | RewardFunction]:
    """Returns the function for each text in `specs`: a packaged function's name, `model:PATH`,
    `judge:URL`, or `file.py:function`, with arguments or without; in the order of `specs`.
    ShoalError if a file or a function in it does not exist. A packaged function or a model comes as
    a `RewardFunction`, a judge as an object that is called like a function."""
    ready = {}
    for spec in specs:
        function = _find_model(spec, reward) or find_builtin(spec)
        if function:
            ready[spec] = function
    # Loaded in one call, so that functions of one file share one module.
    loaded = iter(load_reward_functions([spec for spec in specs if spec not in ready]))
    return [ready.get(spec) or next(loaded) for spec in specs]


def _find_model(spec: str, reward: RewardSection) -> Any:
    """Returns the reward model of `model:PATH`, as a `RewardFunction`, or the judge of `judge:URL`,
    as a `JudgeFunction`; None for any other text."""
    kind, _, address = spec.partition(":")
    if kind == "judge":
        return JudgeFunction(address, reward)
    if kind != "model":
        return None
    from shoal.job.reward_model import RewardModel  # imports JAX

    model = RewardModel(address)
    return RewardFunction(model.__name__, model, runs_in_process=True)


def with_rewards(
    loaded: Task,
    task: TaskSection,
    reward: RewardSection,
    functions: Sequence[Callable[..., Any]] = (),
    required: bool = False,
) -> Task:
    """Returns the task with its evaluation sets cut to `task.num_eval_questions`, and with the
    reward functions that are given in place of its own, if any are. ShoalError if there is no
    reward function at all although one is `required`."""
    rewards = given_rewards(reward, functions) or own_rewards(loaded, task, reward, required)
    return replace(with_fewer_questions(loaded, task), rewards=rewards)


def given_rewards(
    reward: RewardSection, functions: Sequence[Callable[..., Any]] = ()
) -> tuple[RewardFunction, ...]:
    """Returns the reward functions of `reward.functions`, in their order, with the weights of
    `reward.weights`; () if none are given. `functions`: those passed from Python, for which
    `reward.functions` has names like `python:f`, or no names. ShoalError if a function is missing,
    also if a stored configuration names one from Python and it was not passed again."""
    named = named_functions(reward)
    if len(named) < len(reward.functions) and not functions:
        names = [spec.removeprefix(FROM_PYTHON) for spec in reward.functions]
        again = ", ".join(names)
        if named:
            again = f"[{', '.join(repr(name) if name in named else name for name in names)}]"
        raise ShoalError(
            f"reward.functions={list(reward.functions)}: this reward came from Python; pass it "
            f"again in Python, shoal.train(resume=FOLDER, reward={again}), or name a file, "
            "reward=file.py:function"
        )
    found = iter(find_functions(reward, named))
    from_python = iter(functions)
    given: list[Callable[..., Any] | RewardFunction] = []
    for spec in reward.functions:
        given.append(next(from_python if spec.startswith(FROM_PYTHON) else found))
    given += from_python  # those without names
    if not given:
        return ()
    return name_functions(given, reward.weights)


def with_fewer_questions(loaded: Task, task: TaskSection) -> Task:
    """Returns the task with each evaluation set cut to its first `task.num_eval_questions` (0:
    all), and with a note on each that was longer, unless the task itself says it. The given task is
    not changed."""
    limit = task.num_eval_questions
    evaluations: dict[str, Sequence[Example]] = {}
    notes = list(loaded.notes)
    for name, rows in loaded.evaluations.items():
        evaluations[name] = rows[: limit or None]
        asked = asked_rows(len(rows), limit)
        is_said = any(asked in note for note in notes)
        if len(evaluations[name]) < len(rows) and not is_said:
            notes.append(
                f"{name}: {asked} are evaluated on; task.num_eval_questions=0 evaluates on all"
            )
    return replace(loaded, evaluations=evaluations, notes=tuple(notes))


def with_system_prompt(task: Task, text: str) -> Task:
    """Returns the task with the system prompt `text` in every example, in place of its own; the
    task itself if `text` is empty. ShoalError, when a row is read, if its prompt is a text, which
    has no messages."""
    if not text:
        return task

    def changed(example: Example) -> Example:
        if isinstance(example.prompt, str):
            raise ShoalError(
                f"{example.place or f'data row {example.row}'}: task.system is a message, and this "
                "row's `prompt` is text: give messages, or put the words into the text",
                "task.system",
            )
        columns = dict(example.columns)
        if columns.get("messages"):  # a dialogue of which supervised fine-tuning learns
            columns["messages"] = _after_system_prompt(text, columns["messages"])
        prompt = _after_system_prompt(text, example.prompt)
        return replace(example, prompt=prompt, columns=columns)

    evaluations = {}
    for name, examples in task.evaluations.items():
        evaluations[name] = [changed(example) for example in examples]
    train: Sequence[Example]
    if isinstance(task.train, LazyRows):
        original = task.train
        train = LazyRows(lambda row: changed(original[row]), len(original))
    else:
        train = [changed(example) for example in task.train]
    return replace(task, train=train, evaluations=evaluations)


def _after_system_prompt(text: str, messages: Sequence[Mapping[str, Any]]) -> Messages:
    """Returns the messages with one system prompt, the first of them."""
    others = [
        dict(message) for message in messages if message["role"] not in ("system", "developer")
    ]
    return [{"role": "system", "content": text}, *others]


def task_of_data(
    data: Any,
    held_out: Any,
    correct: Correct | None,
    task: TaskSection,
    reward: RewardSection,
    functions: Sequence[Callable[..., Any]],
    needs_reward: bool = True,
) -> Task:
    """Makes the task of data that were passed from Python, rows or a whole `Task`, with the reward
    functions that are given. ShoalError if rows come without a reward function although
    `needs_reward`, or with keys of `task.` that have no effect on them. `held_out`, `correct`:
    evaluation rows and the function that says which answers are right, for rows only; None if they
    are not given. ShoalError if they come with a `Task`."""
    if isinstance(data, Task):
        if held_out is not None or correct is not None:
            raise ShoalError(
                f"{'held_out' if held_out is not None else 'correct'} is for rows; a shoal.Task "
                "has `evaluations` and `correct` itself: set them there"
            )
        return with_rewards(with_fewer_rows(data, task), task, reward, functions)
    default = TaskSection()
    for key, value in vars(task).items():
        has_effect = key in (
            "name",
            "num_train_questions",
            "num_eval_questions",
            "hold_out",
            "system",
        )
        # The training rows, or what a run noted of the rows that it was given.
        is_split = key == "eval_split" and value in (task.split, HELD_OUT_ROWS)
        if not (has_effect or is_split) and value != getattr(default, key):
            raise ShoalError(
                f"task.{key}={value!r} has no effect on data given from Python: leave it out"
            )
    if needs_reward and not (functions or reward.functions):
        raise ShoalError(
            "reward is not given: your data needs a function that judges completions, reward=f "
            "with f(completions, **columns) -> list of numbers"
        )
    rows = rows_of_section(data, held_out, correct, task)
    return with_rewards(rows, task, reward, functions)


def check_truths(task: Task, rewards: Sequence[RewardFunction]) -> None:
    """Raises ShoalError, which names the first such row, if rows, of training or an evaluation set,
    lack the right answer (`ground_truth`) and a function in one of verl's conventions compares with
    it. Rows that a packaged task generates are not checked."""
    if not task.data.train_files:  # generated rows always have their answers
        return
    for reward in rewards:
        is_verls_own = reward.function is verl_reward
        if not (reward.follows_verl or is_verls_own):
            continue
        for name, examples in {"training": task.train, **task.evaluations}.items():
            first = ""
            num_lacking = 0
            for example in examples:
                columns = example.columns
                # verl's own function reads only this column; without it, the fault names every
                # argument that could hold the truth.
                if is_verls_own and "reward_model" in columns:
                    columns = {"reward_model": columns["reward_model"]}
                fault = truth_fault(columns)
                if not fault:
                    continue
                num_lacking += 1
                if not first:
                    first = f"{example.place or f'data row {example.row}'}: {fault}"
            if num_lacking:
                raise ShoalError(
                    f"reward function {reward.name!r} needs a ground truth, which "
                    f"{num_lacking:,} of {len(examples):,} {name} rows lack; the first is {first}",
                    "task.path",
                )


def note_missing_sources(task: Task, rewards: Sequence[RewardFunction]) -> str:
    """Returns a note if training rows lack the column `data_source`, and a function in one of
    verl's conventions takes it by name; '' if none does. Rows that a packaged task generates are
    not read for it."""
    if not task.data.train_files:
        return ""
    for reward in rewards:
        if not reward.follows_verl:
            continue
        name = "data_source" if reward.per_completion else "data_sources"
        if name not in inspect.signature(reward.function).parameters:
            continue
        num_lacking = sum(not example.columns.get("data_source") for example in task.train)
        if num_lacking:
            return (
                f"reward function {reward.name!r} gets data_source='' for {num_lacking:,} of "
                f"{len(task.train):,} training rows, which have none; "
                "task.columns=[data_source=COLUMN] takes another column"
            )
    return ""


def with_overlong(
    rewards: tuple[RewardFunction, ...], reward: RewardSection, max_tokens: int
) -> tuple[RewardFunction, ...]:
    """Returns the reward functions; if `reward.overlong_buffer_tokens` is set, with the penalty on
    long completions as one more, the last. -1 means a fifth of `max_tokens` (at least 1 token), 0
    no penalty. ShoalError if the buffer is longer than `max_tokens`, or if a function has the
    penalty's name."""
    buffer = reward.overlong_buffer_tokens
    if buffer == -1:
        buffer = max(1, max_tokens // 5)
    if not buffer:
        return rewards
    if buffer > max_tokens:
        raise ShoalError(
            f"reward.overlong_buffer_tokens={buffer}: expected at most "
            f"sampling.max_completion_tokens ({max_tokens}): it is the last part of a completion",
            "reward.overlong_buffer_tokens",
        )
    if any(function.name == PENALTY for function in rewards):
        raise ShoalError(
            "reward function 'overlong': reward.overlong_buffer_tokens adds one of this name; give "
            "yours another, or leave that key at 0",
            "reward.overlong_buffer_tokens",
        )
    penalty = RewardFunction(
        PENALTY,
        overlong_punishment(max_tokens, buffer),
        reward.overlong_penalty,
        runs_in_process=True,
    )
    return (*rewards, penalty)


def longest_prompt(
    train: Sequence[Example],
    sets: Mapping[str, Sequence[TokenizedExample]],
    encode: Encode,
    sampling: SamplingSection,
) -> int:
    """Returns the number of tokens of the longest prompt in `train` and in the evaluation `sets`;
    prompts that will be dropped do not count. If there are more than MOST_MEASURED training rows,
    they are not read, and the result is the limit `sampling.max_prompt_tokens`. 0 if there is none.
    `encode`: an example -> the token ids of its prompt."""
    if len(train) > MOST_MEASURED:
        return sampling.max_prompt_tokens
    longest = 0
    for questions in sets.values():
        for question in questions:
            longest = max(longest, len(question.prompt_ids))
    refused: list[str] = []  # the check of prompts warns of these
    for example in train:
        prompt = prepare(example, encode, sampling.max_prompt_tokens, "drop", refused.append)
        if prompt is not None:
            longest = max(longest, len(prompt.prompt_ids))
    return longest


def encode_all(
    name: str,
    examples: Sequence[Example],
    encode: Encode,
    sampling: SamplingSection,
    warn: Callable[[str], None],
    note: Callable[[str], None],
) -> list[TokenizedExample]:
    """Returns the prompts of the evaluation set `name` with their tokens. Prompts that are too
    long, or that the template refuses, are dropped, and `warn` is called with how many; `note`
    instead for long ones with `sampling.long_prompts=drop`, which asks for it. With
    `sampling.long_prompts=error` they raise ShoalError. ShoalError if no prompt remains, because
    the set would have no figures. `examples`: at least one. `encode`: an example -> the token ids
    of its prompt."""
    refused: list[str] = []
    limit = sampling.max_prompt_tokens
    prepared = []
    for example in examples:
        prompt = prepare(example, encode, limit, sampling.long_prompts, refused.append)
        if prompt is not None:
            prepared.append(prompt)
    all_of = f"{count(len(examples), 'prompt')} of {name}"
    # the others: they are too long
    dropped = len(examples) - len(prepared) - len(refused)
    if dropped:
        say = note if sampling.long_prompts == "drop" else warn
        say(
            f"{dropped} of {all_of} have more than "
            f"sampling.max_prompt_tokens={sampling.max_prompt_tokens} tokens and are dropped"
        )
    if refused and prepared:
        warn(f"{len(refused)} of {all_of} are dropped; the last: {refused[-1]}")
    if not prepared:
        if refused:
            raise ShoalError(refused[-1])
        # None was refused, so all can be encoded, and all are too long.
        longest = max(len(encode(example)) for example in examples)
        raise ShoalError(
            f"no prompt of {name} has at most {sampling.max_prompt_tokens} tokens: raise "
            f"sampling.max_prompt_tokens to {longest}, its longest",
            "sampling.max_prompt_tokens",
        )
    return prepared
