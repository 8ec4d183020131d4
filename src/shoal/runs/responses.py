"""Answers made elsewhere: read from a file, matched to a task's examples, judged and rewarded
without a model.

rows of a file -> the example that each answers (its own columns, else the task's data) -> verdicts
-> figures
"""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

from shoal.config.schema import RewardSection, TaskSection
from shoal.ground_truth import GOLD_COLUMNS, ground_truth
from shoal.report.console import Console
from shoal.report.metrics import known_mean, wilson_interval
from shoal.rewards.pool import RewardPool
from shoal.run.task import load_task
from shoal.runs.rescore import score_texts
from shoal.tasks.data import evaluating
from shoal.tasks.generated import MadeRows
from shoal.tasks.task import Task
from shoal.types import Example, Failure, ShoalError

NOT_FOUND = "its question is not in the task's data"
TEXT = "response"
"""The column of an answer's text."""
QUESTIONS = ("question", "prompt", "problem")
"""Columns that may hold the question, where a row lacks the task's own; the first present
counts."""

Key: TypeAlias = "tuple[Any, ...]"
"""What a question is looked up by: a whole conversation, or a text that is a question alone or the
last of several messages."""


@dataclass(frozen=True)
class Response:
    """A row of the file; `place` is `FILE, line N`, `keys` are what its question is looked up by,
    in order."""

    place: str
    row: Mapping[str, Any]
    question: str  # of a conversation the last message
    keys: tuple[Key, ...]
    text: str


def load_with_data(section: TaskSection, console: Console) -> Task:
    """The task with all its questions."""
    with evaluating():
        task = load_task(replace(section, num_eval_questions=0))
    for note in task.notes:
        console.note(note)
    return task


# ---- the file


def read_responses(path: Path, question: str, console: Console) -> list[Response]:
    """The rows of a jsonl file; ShoalError naming the first line without a question or a
    response."""
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        raise ShoalError(
            f"responses={path} is not UTF-8 text ({error.reason} at byte {error.start}): convert it"
        ) from error
    except OSError as error:
        raise ShoalError(f"responses={path} cannot be read: {error.strerror or error}") from error
    responses = [
        _response(line, f"{path}, line {number}", question)
        for number, line in enumerate(lines, 1)
        if line.strip()
    ]
    if not responses:
        raise ShoalError(
            f"responses={path} holds no row: expected a JSON object on each line, with "
            f"`{question}` and "
            f"`{TEXT}`"
        )
    if others := sum(not isinstance(response.row[TEXT], str) for response in responses):
        console.warning(
            f"{others} of {len(responses)} responses are no text: numbers are scored as text, null "
            f"as"
            " empty"
        )
    return responses


def _response(line: str, place: str, question: str) -> Response:
    try:
        row = json.loads(line)
        if "\\u" in line:  # half of a surrogate pair, which UTF-8 files cannot hold, becomes ?
            row = json.loads(json.dumps(row, ensure_ascii=False).encode("utf-8", "replace"))
    except (ValueError, RecursionError) as error:
        raise ShoalError(
            f"{place} is no JSON object ({error}): expected one on each line"
        ) from error
    if not isinstance(row, dict):
        raise ShoalError(
            f"{place} is a {type(row).__name__}: expected an object with `{question}` and `{TEXT}`"
        )
    column = next((name for name in (question, *QUESTIONS) if row.get(name) is not None), question)
    asked: Any = row.get(column)
    text = row.get(TEXT)
    messages = (
        asked
        if isinstance(asked, list) and asked and all(isinstance(one, dict) for one in asked)
        else []
    )
    last: Any = messages[-1].get("content") if messages else asked
    for name, is_text in (
        (column, isinstance(last, str)),
        (TEXT, TEXT in row and not isinstance(text, bool | list | dict)),
    ):
        if not is_text:
            given = f"is {json.dumps(row[name]):.60}" if name in row else "is missing"
            raise ShoalError(f"{place}: `{name}` {given}; expected text")
    keys = (_conversation(messages), _alone(last)) if messages else (_alone(last), _last(last))
    return Response(place, row, last, keys, "" if text is None else str(text))


# ---- the example that each response answers


def match_examples(
    responses: Sequence[Response],
    task: Task,
    with_data: Task | None,
    module: Any,
    section: TaskSection,
    console: Console,
) -> list[Example | str]:
    """The example of each response: from its own columns, else from the task's data; a reason where
    there is none."""
    published = set(getattr(getattr(module, "PUBLISHED", None), "columns", ())) - {task.question}
    examples = [
        _own_example(number, response, task, published) for number, response in enumerate(responses)
    ]
    lost = [number for number, example in enumerate(examples) if isinstance(example, str)]
    if lost:
        try:
            with_data = with_data or load_with_data(section, console)
        except ShoalError as error:  # the rows with their own answers need no data
            if NOT_FOUND in examples and len(lost) == len(examples):
                raise
            console.warning(f"the other questions cannot be looked up: {error}")
        else:
            splits = dict(with_data.evaluations)
            if not isinstance(with_data.train, MadeRows):  # generated rows have no end
                splits["training"] = with_data.train
            for number, example in find_examples(
                {number: responses[number] for number in lost}, splits, task.question, console
            ).items():
                examples[number] = example
    if len(lost) < len(responses):
        console.note(
            f"{len(responses) - len(lost)} of {len(responses)} responses are scored by the ground "
            f"truth in "
            "their own rows"
        )
    return examples


def _own_example(number: int, response: Response, task: Task, published: Set[str]) -> Example | str:
    """The example in a row's own columns: the published ones, or for a task without these any of
    GOLD_COLUMNS."""
    given = {column for column, value in response.row.items() if value is not None and value != ""}
    if task.of_row is None or not (
        published <= given if published else given.intersection(GOLD_COLUMNS)
    ):
        return NOT_FOUND
    try:
        return task.of_row(number, {**response.row, task.question: response.question})
    except ShoalError as error:
        return str(error)


def find_examples(
    responses: Mapping[int, Response],
    splits: Mapping[str, Sequence[Example]],
    column: str,
    console: Console,
) -> dict[int, Example]:
    """The example of each response, by its first key that the first split with any of them has.

    Warns of questions that match several examples with different ground truth; the first is
    taken."""
    found: dict[int, Example] = {}
    ambiguous: list[str] = []
    for split, examples in splits.items():
        left = {number: response for number, response in responses.items() if number not in found}
        wanted = {key for response in left.values() for key in response.keys}
        index: dict[Key, list[Example]] = {}
        for example in examples if wanted else ():
            for key in example_keys(example, column):
                if key in wanted:
                    index.setdefault(key, []).append(example)
        for number, response in left.items():
            if matching := next((index[key] for key in response.keys if key in index), []):
                found[number] = matching[0]
                if len(set(map(_gold_text, matching))) > 1:
                    ambiguous.append(response.place)
        if answered := {found[number].row for number in left.keys() & found.keys()}:
            console.note(f"{len(answered)} of {len(examples)} {split} questions are answered")
    if ambiguous:
        console.warning(
            f"{len(ambiguous)} of {len(responses)} responses match several rows of the data with "
            f"different "
            f"ground truth, and the first row is used; the first such response, {ambiguous[0]}"
        )
    return found


def example_keys(example: Example, column: str) -> list[Key]:
    """The keys that an example is found by."""
    own, prompt = example.columns.get(column), example.prompt
    if isinstance(own, str):
        return [_alone(own)]
    if isinstance(prompt, str):
        return [_alone(prompt)]
    is_alone = sum(message.get("role") != "system" for message in prompt) == 1
    text = str(prompt[-1].get("content") or "")
    return [_conversation(prompt), _alone(text) if is_alone else _last(text)]


def _conversation(messages: Sequence[Mapping[str, Any]]) -> Key:
    return "conversation", *(
        (str(message.get("role", "")), normalized(str(message.get("content") or "")))
        for message in messages
    )


def _alone(text: str) -> Key:
    return "question", normalized(text)


def _last(text: str) -> Key:
    return "last message", normalized(text)


_QUOTES = str.maketrans({"‘": "'", "’": "'", "“": '"', "”": '"', "–": "-", "−": "-"})


def normalized(question: str) -> str:
    """A question with one form for equivalent characters, quotes and white space.

    >>> normalized("Janet\\u2019s\\u00a0 eggs?\\n")
    "Janet's eggs?"
    """
    return " ".join(unicodedata.normalize("NFKC", question).translate(_QUOTES).split())


def _gold_text(example: Example) -> str:
    gold = ground_truth(example.columns)
    return repr(example.columns if gold is None else gold)


def question_text(example: Example, column: str) -> str:
    """The question of an example as published: its column of that name, else the last message, else
    the prompt."""
    own = example.columns.get(column)
    if isinstance(own, str):
        return own
    return (
        example.prompt
        if isinstance(example.prompt, str)
        else str(example.prompt[-1].get("content", ""))
    )


def report_unscored(
    responses: Sequence[Response], examples: Sequence[Example | str], task: Task, console: Console
) -> int:
    """The number of responses without an example, with a warning; ShoalError if all are."""
    lost = [
        f"{response.place}: {reason}"
        for response, reason in zip(responses, examples, strict=True)
        if isinstance(reason, str)
    ]
    if lost and len(lost) == len(responses):
        raise ShoalError(
            f"none of the {len(lost)} responses can be scored by task {task.name}; the first, "
            f"{lost[0]}. "
            f"Its data must contain each `{task.question}` literally"
        )
    if lost:
        console.warning(
            f"{len(lost)} of {len(responses)} responses cannot be scored and are not counted; the "
            f"first, "
            f"{lost[0]}"
        )
    return len(lost)


# ---- verdicts and rewards


def give_verdicts(
    responses: Sequence[Response],
    examples: Sequence[Example | str],
    task: Task,
    rewarded: bool,
    console: Console,
) -> list[dict[str, Any] | None]:
    """The task's verdict on each response; None where there is no example."""
    verdict, correct = task.verdict, task.correct
    if verdict is None and correct is None and not rewarded:
        raise ShoalError(
            f"task {task.name} does not define what is correct, so answers made elsewhere cannot "
            f"be "
            "scored: give a function that scores them, reward=file.py:function"
        )
    verdicts: list[dict[str, Any] | None] = []
    for response, example in zip(responses, examples, strict=True):
        if isinstance(example, str):
            verdicts.append(None)
        elif verdict is not None:
            verdicts.append(dict(verdict(response.text, example)))
        else:
            verdicts.append(
                {"correct": bool(correct(response.text, example))} if correct is not None else {}
            )
        console.answered("responses", len(verdicts), len(responses))
    return verdicts


def add_rewards(
    responses: Sequence[Response],
    examples: Sequence[Example | str],
    verdicts: Sequence[dict[str, Any] | None],
    task: Task,
    section: RewardSection,
    console: Console,
) -> list[Failure]:
    """Adds each response's rewards to its verdict, every response a group of one; returns the
    failures."""
    scorable = [
        (response.text, example, verdict)
        for response, example, verdict in zip(responses, examples, verdicts, strict=True)
        if isinstance(example, Example) and verdict is not None
    ]
    texts, asked, scored = zip(*scorable, strict=True)
    with RewardPool(task.rewards, section) as pool:
        found = score_texts(
            pool,
            asked,
            [[text] for text in texts],
            [[[]] for _ in texts],
            progress=lambda done, total: console.answered("rewards", done, total),
        )
    for verdict, one in zip(scored, found, strict=True):
        verdict["reward"] = float(one.rewards[0, 0])
        verdict["rewards"] = {name: float(values[0, 0]) for name, values in one.components.items()}
    return [failure for one in found for failure in one.failures]


def response_figures(
    responses: Sequence[Response], verdicts: Sequence[Mapping[str, Any] | None], task: Task
) -> dict[str, Any]:
    """Accuracy over the scored responses, its interval, the task's own figures, mean rewards, and
    their numbers."""
    scored = [verdict for verdict in verdicts if verdict is not None]
    figures: dict[str, Any] = {
        "num_responses": len(scored),
        "num_questions": len(
            {
                response.keys[0]
                for response, verdict in zip(responses, verdicts, strict=True)
                if verdict is not None
            }
        ),
        "num_unjudged": len(responses) - len(scored),
    }
    if "correct" in scored[0]:
        right = sum(bool(verdict["correct"]) for verdict in scored)
        figures |= {
            "accuracy": right / len(scored),
            "accuracy_interval": list(wilson_interval(right, len(scored))),
        }
    if task.figures is not None:
        figures |= task.figures(scored)
    if "reward" in scored[0]:
        figures["mean_reward"] = known_mean([verdict["reward"] for verdict in scored])
        for name in scored[0]["rewards"]:
            figures[f"rewards/{name}"] = known_mean(
                [verdict["rewards"][name] for verdict in scored]
            )
    return figures
