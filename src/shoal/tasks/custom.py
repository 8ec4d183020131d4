"""The task of a user's own rows, scored by the user's reward functions.

`task=custom` reads the rows from files or the hub at `task.path`; `shoal.train(task=rows)` gets
them from Python. `examples.py` makes an example of each row.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from itertools import islice
from typing import Any, TypeGuard

from shoal.config.keywords import ROWS
from shoal.config.sections.reward import RewardSection
from shoal.config.sections.task import TaskSection
from shoal.records import Example, ShoalError, ground_truth
from shoal.tasks.builtin_rewards import find_builtin, has_verl_reward
from shoal.tasks.data_folder import Published
from shoal.tasks.examples import SHARE_GPT_ADVICE, ExampleMaker, is_share_gpt, prompt_key
from shoal.tasks.splits import Splits, read_splits, with_rows
from shoal.tasks.task import CUSTOM, Task, with_fewer_rows
from shoal.tasks.template import fill, parse_template, template_text
from shoal.text import count

# ---- rows from files

_LIKELY = ("question", "problem", "instruction", "query", "input", "text")
"""Usual names of columns that hold prompts, the likeliest first."""


_UNLIKELY = ("solution", "answer", "target", "response", "completion", "label", "ground_truth")
"""Usual names of columns that hold answers."""


def load(task: TaskSection, reward: RewardSection | None = None) -> Task:
    """Loads the task of the rows at `task.path`. It has no accuracy, and no reward functions unless
    `reward.preset` is verl: of rows that verl prepared it then has verl's (`with_verls_reward`).

    With `task.template` each prompt is one user message, made of the row's columns. Raises
    `ShoalError`, with file and line, for a row that cannot be used. Training rows whose prompt is
    also a held-out prompt are dropped; all other rows are kept.
    """
    maker = ExampleMaker()

    def make(number: int, place: str, row: dict[str, Any]) -> Example:
        """Makes the example of a row. ShoalError, which advises a column, if it has no prompt."""
        if "prompt" not in row and "messages" not in row:
            raise _no_prompt(row, place)
        return maker(number, place, row)

    preset = (reward or RewardSection()).preset
    if not task.template:
        splits = read_splits(task, Published(CUSTOM), make)
        return with_verls_reward(task_of_examples(splits, maker), preset)

    pieces, names = parse_template(template_text(task.template))

    def make_by_template(number: int, place: str, row: dict[str, Any]) -> Example:
        text = fill(pieces, names, row, place)
        return maker(number, place, row | {"prompt": [{"role": "user", "content": text}]})

    # Without the template, which `read_splits` refuses: only this task uses it.
    splits = read_splits(replace(task, template=""), Published(CUSTOM), make_by_template)
    splits.notes.append(f"{CUSTOM}: task.template makes each prompt, as a user's message")
    return with_verls_reward(task_of_examples(splits, maker), preset)


def with_verls_reward(task: Task, preset: str) -> Task:
    """Returns the task with `verl_reward` as its own reward function if `preset`, which recipe=verl
    sets, is verl, and if this function can score each row, as those that verl prepared of GSM8K,
    MATH or DAPO's data; else unchanged."""
    if preset != "verl":
        return task
    for examples in (task.train, *task.evaluations.values()):
        for example in examples:
            columns = example.columns
            if "reward_model" not in columns or not has_verl_reward(columns.get("data_source")):
                return task
    function = find_builtin("verl_reward")
    assert function is not None
    return replace(task, rewards=(function,))


def _no_prompt(row: Mapping[str, Any], place: str) -> ShoalError:
    """Returns the error for a row without `prompt` or `messages`. It advises the column that most
    likely holds the prompts, by its name."""
    candidates = []
    for name, value in row.items():
        if is_share_gpt(value):
            return ShoalError(
                f"task {CUSTOM}: {place} has no column `prompt` or `messages`, but {name!r}: "
                f"{SHARE_GPT_ADVICE}, in a column `messages`"
            )
        are_messages = isinstance(value, list) and value and isinstance(value[0], dict)
        if isinstance(value, str) or are_messages:
            candidates.append(name)
    likely = min(candidates, default="OTHER", key=_unlikeliness)
    if isinstance(row.get(likely), list):
        advice = f"Take the messages of {likely}"
    else:
        advice = (
            f"Make a message of one, task.template='{{{likely}}}', or use the text unchanged, "
            "without the model's chat template"
        )
    return ShoalError(
        f"task {CUSTOM}: {place} has no column `prompt`; its columns: {', '.join(row) or 'none'}. "
        f"{advice}, task.columns=[prompt={likely}]"
    )


def _unlikeliness(column: str) -> int:
    """Returns the rank of a column by its name: the lower, the likelier the column holds prompts.
    Names of answers come last, unknown names before them. Upper and lower case count as the
    same."""
    name = column.lower()
    if name in _LIKELY:
        return _LIKELY.index(name)
    if name in _UNLIKELY:
        return len(_LIKELY) + 1
    return len(_LIKELY)


# ---- rows from Python

SAME = "train"
"""The value of `held_out=` that evaluates on the training rows."""


_GIVEN = "rows from Python"


_LISTS = ("files", "columns")
"""Names of task settings whose values are lists; `is_data` must not take them for columns."""


Correct = Callable[[str, Example], bool]


def is_data(task: Any) -> bool:
    """True if the argument `task=` holds data rather than a name or settings. Of two dicts, one
    with plain values is settings, one with lists is columns of data. An empty dict is settings too.
    None, a name and a dict of settings are no data; any other object is."""
    if not isinstance(task, Mapping):
        return task is not None and not isinstance(task, str | bytes)
    for name, value in task.items():
        is_plain = value is None or isinstance(value, str | bool | int | float)
        if not is_plain and name not in _LISTS:
            return True
    return False


def is_sets(data: Any) -> TypeGuard[Mapping[Any, Any]]:
    """True if data from Python is a dict of data sets (name -> rows), as TRL takes for
    `eval_dataset`, and not a dict of columns, of which one is `prompt` or `messages`."""
    return isinstance(data, Mapping) and bool(data) and not {"prompt", "messages"} & data.keys()


_GIVEN_DATA: ContextVar[tuple[Any, Any] | None] = ContextVar("given_data", default=None)


@contextmanager
def given_data(task: Any, held_out: Any) -> Iterator[None]:
    """Context manager in which `given_task` counts the training rows of `task`, if it is data
    from Python."""
    token = _GIVEN_DATA.set((task, held_out) if is_data(task) else None)
    try:
        yield
    finally:
        _GIVEN_DATA.reset(token)


def given_task(section: TaskSection) -> Task | None:
    """Returns the data of `given_data` as a task, with the rows held out that `section` says; None
    if no data were given. ShoalError for rows that cannot be used."""
    given = _GIVEN_DATA.get()
    if given is None:
        return None
    data, held_out = given
    if isinstance(data, Task):
        return with_fewer_rows(data, section)
    return rows_of_section(data, held_out, None, section)


def rows_of_section(
    data: Any, held_out: Any, correct: Correct | None, section: TaskSection
) -> Task:
    """Returns the task of rows given from Python (`rows_task`) with these settings. If they name
    the training split as the one to evaluate on, as supervised fine-tuning does, and `held_out` is
    None, the evaluation rows are the training rows."""
    if held_out is None and section.eval_split == section.split:
        held_out = SAME
    task = rows_task(data, held_out, correct, section.num_eval_questions, section.hold_out)
    return with_fewer_rows(task, section)


def listed(task: Any, held_out: Any) -> tuple[Any, Any]:
    """Returns `task` and `held_out` with rows from Python, also those of a table or an iterator, as
    lists, which can be read more than once. A name, settings and a `Task` stay as they are.
    ShoalError if there are no rows."""
    if not is_data(task) or isinstance(task, Task):
        return task, held_out
    if is_sets(held_out):
        held_out = {name: _rows(rows, f"held_out {name}") for name, rows in held_out.items()}
    elif held_out is not None and not isinstance(held_out, str):
        held_out = _rows(held_out, "held_out")
    return _rows(task, "task"), held_out


def rows_task(
    data: Any,
    held_out: Any = None,
    correct: Correct | None = None,
    num_questions: int = 500,
    hold_out: bool = True,
) -> Task:
    """Returns the task of rows given from Python. Each row has `prompt` (text or messages) or
    `messages`; all other columns are passed to the reward functions.

    `data` and `held_out` are lists of dicts, dicts of columns, or tables; `held_out` may also be a
    dict of several (`is_sets`), which are evaluated each under its name. Without `held_out` the
    last tenth of `data` is held out, at most `num_questions` rows (0: no limit), and none if
    `hold_out` is False; inside `evaluating()` all of it. `held_out="train"` evaluates on the
    training rows. `correct` decides whether a completion's text is right; without it there is no
    accuracy. `correct` is not called here. Training rows whose prompt is also held out are dropped.
    ShoalError for rows that cannot be used.
    """
    if correct is not None and not callable(correct):
        raise ShoalError(
            f"correct is a {type(correct).__name__}: expected a function (text, example) -> bool"
        )
    maker = ExampleMaker()
    train = _examples(maker, data, "task")
    splits = Splits(ROWS, train, [], on_purpose="held_out='train'", keeps_row_numbers=True)
    splits.data.train_files[_GIVEN] = len(splits.train)
    sizes: dict[str, int] = {}  # name of an evaluation set -> number of its rows
    if isinstance(held_out, str) and held_out == SAME:
        splits.share(splits.on_purpose, num_questions)
    elif is_sets(held_out):
        for name, rows in held_out.items():
            # Numbered through all sets: no two questions of a task have the same number.
            first = len(splits.held_out)
            splits.held_out += _examples(maker, rows, f"held_out {name}", first)
            sizes[str(name)] = len(splits.held_out) - first
        splits.data.held_out_files[_GIVEN] = len(splits.held_out)
    elif held_out is not None:
        splits.held_out = _examples(maker, held_out, "held_out")
        splits.data.held_out_files[_GIVEN] = len(splits.held_out)
    else:
        splits.divide("task", num_questions, hold_out=hold_out)
    checked = functools.partial(_call_correct, correct) if correct else None
    task = task_of_examples(splits, maker, checked)
    if not sizes:
        return task
    questions = iter(splits.held_out)
    evaluations = {name: list(islice(questions, size)) for name, size in sizes.items()}
    return replace(task, evaluations=evaluations)


def _call_correct(correct: Correct, text: str, example: Example) -> bool:
    """Returns the result of the user's function `correct` as a bool. If the function raises, raises
    a ShoalError that names the example."""
    try:
        return bool(correct(text, example))
    except Exception as error:
        raise ShoalError(
            f"correct raised {type(error).__name__}: {error} for data row {example.row}, "
            f"completion {text[:80]!r}: it must accept any text"
        ) from error


def _examples(maker: ExampleMaker, data: Any, name: str, first: int = 0) -> list[Example]:
    """Returns an example for each row of `data`, which was given from Python as the argument
    `name`. The examples are numbered from `first`."""
    examples = []
    for number, row in enumerate(_rows(data, name)):
        examples.append(maker(first + number, f"{name} row {number}", row))
    return examples


def _rows(data: Any, name: str) -> Sequence[Any]:
    """Returns the rows of any object that holds rows: a list of dicts, a dict of columns, or a
    table of pandas, polars, arrow or datasets. ShoalError for anything else, and if there are no
    rows. `name` names the argument in messages. Any other iterable is read to its end."""
    rows: Any
    to_rows = getattr(data, "to_dicts", None) or getattr(data, "to_pylist", None)
    if isinstance(data, Mapping):
        rows = _rows_of_columns(data, name)
    elif hasattr(data, "iloc") and hasattr(data, "to_dict"):  # pandas
        rows = data.to_dict("records") if hasattr(data, "columns") else data.tolist()
    elif callable(to_rows):  # polars, arrow
        rows = to_rows()
    elif isinstance(data, str | bytes) or not isinstance(data, Iterable):
        other = "or a shoal.Task"
        if name == "held_out":
            other = f"or {SAME!r}, for those that are trained on"
        raise ShoalError(
            f"{name} is a {type(data).__name__}: expected rows, a list of dicts with `prompt`, a "
            f"table of pandas, polars, arrow or datasets, {other}"
        )
    else:
        rows = list(data)
    if not len(rows):
        raise ShoalError(f"{name} is empty: expected rows with `prompt`")
    return rows


def _rows_of_columns(columns: Mapping[Any, Any], name: str) -> list[dict[str, Any]]:
    """Returns a dict of columns as a list of rows. ShoalError if their lengths differ, or if a
    column is no list. `name` names the data in messages. [] without columns."""
    for column, values in columns.items():
        if isinstance(values, str | bytes) or not hasattr(values, "__len__"):
            raise ShoalError(
                f"{name}: the column {column!r} is a {type(values).__name__}; expected a list, a "
                "value a row"
            )
    lengths = {column: len(values) for column, values in columns.items()}
    if len(set(lengths.values())) > 1:
        shown = ", ".join(f"{column} {length}" for column, length in lengths.items())
        raise ShoalError(f"{name}: its columns must be of one length, they have {shown} values")
    rows = []
    for values in zip(*columns.values(), strict=True):
        rows.append(dict(zip(columns, values, strict=True)))
    return rows


# ---- both


def task_of_examples(splits: Splits, maker: ExampleMaker, correct: Correct | None = None) -> Task:
    """Returns the task whose examples are in `splits`, which `maker` made. Drops training rows
    whose prompt is also held out, and gives rows to evaluate on None for columns that only training
    rows have, so that a reward function can be called alike. Adds notes on prompts from `messages`,
    prompts that end with an assistant's message, unknown roles and empty answers. Changes `splits`.
    `correct` decides whether a completion's text is right; without it there is no accuracy."""
    splits.drop_held_out(prompt_key, "prompt")
    if splits.train and splits.held_out:
        missing = splits.train[0].columns.keys() - splits.held_out[0].columns.keys()
        if missing:
            nothing = dict.fromkeys(sorted(missing))
            splits.notes.append(
                f"{splits.task}: the rows to evaluate on have no column {', '.join(nothing)}, "
                "which training rows have: it is None for them"
            )
            splits.held_out = [
                replace(example, columns={**example.columns, **nothing})
                for example in splits.held_out
            ]
    if maker.from_messages:
        splits.notes.append(
            f"{splits.task}: the prompts are the column `messages`, without the assistant's last "
            "message"
        )
    if maker.num_continued:
        splits.notes.append(
            f"{splits.task}: {count(maker.num_continued, 'prompt ends', 'prompts end')} with an "
            "assistant's message, which the completion continues"
        )
    splits.notes += [f"{splits.task}: {note}" for note in maker.roles.notes]
    note_empty_answers(splits)
    return with_rows(Task(splits.task, question="prompt", correct=correct), splits)


def note_empty_answers(splits: Splits) -> None:
    """Adds a note to `splits` on rows whose answer column is empty, if only some rows are so: no
    completion can match an empty answer. The answer is the row's ground truth: None and blank text
    are empty."""
    rows = splits.all_rows
    empty = [example for example in rows if _is_blank(ground_truth(example.columns))]
    if empty and len(empty) < len(rows):
        place = f", the first {empty[0].place}" if empty[0].place else ""
        splits.notes.append(
            f"{splits.task}: {len(empty)} of {len(rows)} rows have an empty answer{place}: fill "
            "them in or leave these rows out, unless the reward needs no answer"
        )


def _is_blank(answer: Any) -> bool:
    """True for None and for text without visible characters."""
    return answer is None or (isinstance(answer, str) and not answer.strip())
