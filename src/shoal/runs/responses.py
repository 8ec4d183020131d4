"""Answers made elsewhere: read from a file, matched to a task's examples, judged and rewarded without a model.

    rows of a file -> the example that each answers (its own columns, else the task's data) -> verdicts -> figures
"""

from __future__ import annotations

import functools
import json
import unicodedata
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

from shoal.config.schema import RewardSection, TaskSection
from shoal.report.console import Console
from shoal.report.metrics import known_mean, wilson_interval
from shoal.rewards.pool import RewardPool
from shoal.run.task import load_task
from shoal.runs.rescore import score_texts
from shoal.tasks.data import evaluating
from shoal.tasks.generated import MadeRows
from shoal.tasks.task import Task
from shoal.text import count
from shoal.types import GOLD_COLUMNS, Example, Failure, ShoalError, ground_truth

NOT_FOUND = "its question is not in the task's data"
TEXT = "response"
"""The column of an answer's text."""
QUESTIONS = ("question", "prompt", "problem")
"""Columns that may hold the question, where a row lacks the task's own; the first present counts."""


@dataclass(frozen=True)
class Response:
    """A row of the file; `place` is `FILE, line N`."""

    place: str
    row: Mapping[str, Any]
    question: Question
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
    """The rows of a jsonl file; ShoalError naming the first line without a question or a response."""
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        raise ShoalError(f"responses={path} is not UTF-8 text ({error.reason} at byte {error.start}): convert "
                         "it") from error
    except OSError as error:
        raise ShoalError(f"responses={path} cannot be read: {error.strerror or error}") from error
    found = [_response(line, f"{path}, line {number}", question) for number, line in enumerate(lines, 1)
             if line.strip()]
    if not found:
        raise ShoalError(f"responses={path} holds no row: expected a JSON object on each line, with `{question}` and "
                         f"`{TEXT}`")
    kinds = [response.row[TEXT] for response in found if not isinstance(response.row[TEXT], str)]
    if nulls := kinds.count(None):
        console.warning(f"{nulls} of {len(found)} responses are null and are scored as empty")
    if numbers := len(kinds) - nulls:
        console.warning(f"{numbers} of {len(found)} responses are numbers and are scored as text")
    return found


def _response(line: str, place: str, question: str) -> Response:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ShoalError(f"{place} is no JSON object ({error}): expected one on each line") from error
    if not isinstance(row, dict):
        raise ShoalError(f"{place} is a {type(row).__name__}: expected an object with `{question}` and `{TEXT}`")
    row = _encodable(row) if "\\u" in line else row
    column = next((name for name in (question, *QUESTIONS) if row.get(name) is not None), question)
    try:
        asked = Question.of(row.get(column))
    except TypeError:
        given = f"is {json.dumps(row[column]):.60}" if column in row else "is missing"
        raise ShoalError(f"{place}: `{column}` {given}; expected text") from None
    text = row.get(TEXT, ...)
    if text is ... or isinstance(text, bool | list | dict):
        given = "is missing" if text is ... else f"is {json.dumps(text):.60}"
        raise ShoalError(f"{place}: `{TEXT}` {given}; expected text")
    return Response(place, row, asked, "" if text is None else str(text))


def _encodable(value: Any) -> Any:
    """The value with each unpaired surrogate written as its escape, `\\ud83d`: UTF-8 files cannot hold one."""
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode("utf-8")
    if isinstance(value, list):
        return [_encodable(one) for one in value]
    if isinstance(value, dict):
        return {_encodable(name): _encodable(one) for name, one in value.items()}
    return value


# ---- the example that each response answers


def match_examples(responses: Sequence[Response], task: Task, with_data: Task | None, module: Any,
                   section: TaskSection, console: Console) -> list[Example | str]:
    """The example of each response: from its own columns, else from the task's data; a reason where there is none."""
    published = set(getattr(getattr(module, "PUBLISHED", None), "columns", ())) - {task.question}
    examples = [_own_example(number, response, task, published) for number, response in enumerate(responses)]
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
            questions = {number: (responses[number].place, responses[number].question) for number in lost}
            for number, example in find_examples(questions, splits, task.question, console).items():
                examples[number] = example
    if len(lost) < len(responses):
        console.note(f"{len(responses) - len(lost)} of {len(responses)} responses are scored by the ground truth in "
                     "their own rows")
    return examples


def _own_example(number: int, response: Response, task: Task, published: Set[str]) -> Example | str:
    """The example in a row's own columns: the published ones, or for a task without these any of GOLD_COLUMNS."""
    given = {column for column, value in response.row.items() if value is not None and value != ""}
    if task.of_row is None or not (published <= given if published else given.intersection(GOLD_COLUMNS)):
        return NOT_FOUND
    try:
        return task.of_row(number, {**response.row, task.question: response.question.text})
    except ShoalError as error:
        return str(error)


def report_unscored(responses: Sequence[Response], examples: Sequence[Example | str], task: Task,
                     console: Console) -> int:
    """The number of responses without an example, with a warning; ShoalError if all are."""
    lost = [(response.place, reason) for response, reason in zip(responses, examples, strict=True)
            if isinstance(reason, str)]
    if not lost:
        return 0
    first = "{}: {}".format(*lost[0])
    if len(lost) == len(responses):
        raise ShoalError(f"none of the {len(lost)} responses can be scored by task {task.name}; the first, {first}. "
                         f"Its data must contain each `{task.question}` literally")
    console.warning(f"{len(lost)} of {len(responses)} responses cannot be scored and are not counted; the first, "
                    f"{first}")
    return len(lost)


# ---- verdicts and rewards


def give_verdicts(responses: Sequence[Response], examples: Sequence[Example | str], task: Task, rewarded: bool,
                  console: Console) -> list[dict[str, Any] | None]:
    """The task's verdict on each response; None where there is no example."""
    verdict, correct = task.verdict, task.correct
    if verdict is None and correct is None and not rewarded:
        raise ShoalError(f"task {task.name} does not define what is correct, so answers made elsewhere cannot be "
                         "scored: give a function that scores them, reward=file.py:function")
    verdicts: list[dict[str, Any] | None] = []
    for response, example in zip(responses, examples, strict=True):
        if isinstance(example, str):
            verdicts.append(None)
        elif verdict is not None:
            verdicts.append(dict(verdict(response.text, example)))
        else:
            verdicts.append({"correct": bool(correct(response.text, example))} if correct is not None else {})
        console.answered("responses", len(verdicts), len(responses))
    return verdicts


def add_rewards(responses: Sequence[Response], examples: Sequence[Example | str],
                 verdicts: Sequence[dict[str, Any] | None], task: Task, section: RewardSection,
                 console: Console) -> list[Failure]:
    """Adds each response's rewards to its verdict, every response a group of one; returns the failures."""
    scorable = [(response.text, example, verdict)
                for response, example, verdict in zip(responses, examples, verdicts, strict=True)
                if isinstance(example, Example) and verdict is not None]
    texts, asked, scored = zip(*scorable, strict=True)
    with RewardPool(task.rewards, section) as pool:
        found = score_texts(pool, asked, [[text] for text in texts], [[[]] for _ in texts],
                            progress=lambda done, total: console.answered("rewards", done, total))
    for verdict, one in zip(scored, found, strict=True):
        verdict["reward"] = float(one.rewards[0, 0])
        verdict["rewards"] = {name: float(values[0, 0]) for name, values in one.components.items()}
    return [failure for one in found for failure in one.failures]


def response_figures(responses: Sequence[Response], verdicts: Sequence[Mapping[str, Any] | None],
                     task: Task) -> dict[str, Any]:
    """Accuracy over the scored responses, its interval, the task's own figures, mean rewards, and their numbers."""
    scored = [verdict for verdict in verdicts if verdict is not None]
    figures: dict[str, Any] = {
        "num_responses": len(scored),
        "num_questions": len({response.question.messages or response.question.text
                              for response, verdict in zip(responses, verdicts, strict=True) if verdict is not None}),
        "num_unjudged": len(responses) - len(scored),
    }
    if "correct" in scored[0]:
        right = sum(bool(verdict["correct"]) for verdict in scored)
        figures |= {"accuracy": right / len(scored), "accuracy_interval": list(wilson_interval(right, len(scored)))}
    if task.figures is not None:
        figures |= task.figures(scored)
    if "reward" in scored[0]:
        figures["mean_reward"] = known_mean([verdict["reward"] for verdict in scored])
        for name in scored[0]["rewards"]:
            figures[f"rewards/{name}"] = known_mean([verdict["rewards"][name] for verdict in scored])
    return figures


# ---- the example of a question that was asked elsewhere

Key: TypeAlias = "tuple[Any, ...]"
"""What a question is looked up by."""

_LAST = object()
"""Starts the key of a conversation's last message, so that it differs from a question of that text."""
_QUOTES = str.maketrans({"‘": "'", "’": "'", "“": '"', "”": '"', "–": "-", "−": "-"})


@dataclass(frozen=True)
class Question:
    """A question as asked elsewhere: text, or a conversation whose last message is `text`."""

    text: str
    messages: tuple[tuple[str, str], ...] = ()  # role and normalized content

    @classmethod
    def of(cls, value: Any) -> Question:
        """From a row's text or list of messages; TypeError for anything else."""
        if isinstance(value, list) and value and all(isinstance(message, dict) for message in value):
            text, messages = value[-1].get("content"), _conversation(value)
        else:
            text, messages = value, ()
        if not isinstance(text, str):
            raise TypeError(type(text))
        return cls(text, messages)

    def lookup_keys(self) -> list[Key]:
        """The keys to look it up by, in order: text as a question or as a conversation's last message; a conversation
        by all its messages, by those but the system's, by its last."""
        if not self.messages:
            text = normalized(self.text)
            return [(text,), (_LAST, text)]
        turns = _turns(self.messages)
        return [self.messages, turns, turns[-1:]]


def example_keys(example: Example, column: str) -> list[Key]:
    """The keys that an example is found by, the counterpart of `Question.lookup_keys`."""
    own, prompt = example.columns.get(column), example.prompt
    if isinstance(own, str):
        return [(normalized(own),)]
    if isinstance(prompt, str):
        return [(normalized(prompt),)]
    messages = _conversation(prompt)
    turns = _turns(messages)
    return [messages, turns, *([(_LAST, turns[-1])] if len(turns) > 1 else [])]


def _conversation(messages: Sequence[Mapping[str, Any]]) -> tuple[tuple[str, str], ...]:
    return tuple((str(message.get("role", "")), normalized(str(message.get("content") or ""))) for message in messages)


def _turns(messages: Sequence[tuple[str, str]]) -> tuple[str, ...]:
    """The contents of all messages but the system's."""
    return tuple(content for role, content in messages if role != "system") or ("",)


def normalized(question: str) -> str:
    """A question with one form for equivalent characters, quotes and white space.

    >>> normalized("Janet\\u2019s\\u00a0 eggs?\\n")
    "Janet's eggs?"
    """
    return " ".join(unicodedata.normalize("NFKC", question).translate(_QUOTES).split())


def find_examples(questions: Mapping[int, tuple[str, Question]], splits: Mapping[str, Sequence[Example]], column: str,
                  console: Console) -> dict[int, Example]:
    """The example of each question (number -> its place in a file, the question), by its first key that any split has.

    Warns of questions that match several examples with different ground truth; the first is taken."""
    wanted = {key for _, question in questions.values() for key in question.lookup_keys()}

    @functools.cache
    def index(split: str) -> dict[Key, list[Example]]:
        found: dict[Key, list[Example]] = {}
        for example in splits[split]:
            for key in example_keys(example, column):
                if key in wanted:
                    found.setdefault(key, []).append(example)
        return found

    examples: dict[int, Example] = {}
    rows: dict[str, set[int]] = {split: set() for split in splits}
    ambiguous: dict[Key, str] = {}  # -> the place of the first such question
    for number, (place, question) in questions.items():
        matches = ((key, split, index(split)[key]) for key in question.lookup_keys() for split in splits
                   if key in index(split))
        key, split, matching = next(matches, ((), "", []))
        if matching:
            examples[number] = matching[0]
            rows[split].add(matching[0].row)
            if len(set(map(_gold_text, matching))) > 1:
                ambiguous.setdefault(key, place)
    for split, found in rows.items():
        if found:
            console.note(f"{len(found)} of {len(splits[split])} {split} questions are answered")
    if ambiguous:
        matches = "matches" if len(ambiguous) == 1 else "match"
        console.warning(f"{count(len(ambiguous), 'question')} {matches} several rows of the data with different ground "
                        f"truth, and the first row is used; the first such question, {next(iter(ambiguous.values()))}")
    return examples


def _gold_text(example: Example) -> str:
    gold = ground_truth(example.columns)
    return repr(example.columns if gold is None else gold)


def question_text(example: Example, column: str) -> str:
    """The question of an example as published: its column of that name, else the last message, else the prompt."""
    own = example.columns.get(column)
    if isinstance(own, str):
        return own
    return example.prompt if isinstance(example.prompt, str) else str(example.prompt[-1].get("content", ""))
