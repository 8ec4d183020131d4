"""`shoal eval responses=FILE`: answers made elsewhere, judged by a task without any model or device.

    rows of FILE -> the example that each answers (its own columns, else the task's data) -> verdicts -> figures
"""

from __future__ import annotations

import importlib
import json
import unicodedata
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from shoal.config.schema import EvalConfig, RewardSection, TaskSection
from shoal.report.console import Console
from shoal.report.lines import json_ready
from shoal.report.metrics import known_mean, wilson_interval
from shoal.runtime.output import check_writable, write_text
from shoal.task.answer import GOLD_COLUMNS
from shoal.task.data import evaluating
from shoal.task.judge import Judge
from shoal.task.task import TASKS, Task, load_task, with_rewards
from shoal.types import Example, ShoalError

NOT_FOUND = "its question is not in the task's data"
TEXT = "response"
"""The column that holds an answer's text."""
QUESTIONS = ("question", "prompt", "problem")
"""Columns of which the first that a row has is its question, where it lacks the task's own."""
_QUOTES = str.maketrans({"‘": "'", "’": "'", "“": '"', "”": '"', "–": "-", "−": "-"})


@dataclass(frozen=True)
class Response:
    """A row of the file: `place` is `FILE, line N`."""

    place: str
    row: Mapping[str, Any]
    question: str
    text: str


def judge_responses(config: EvalConfig, functions: Sequence[Callable] = (),
                    console: Console | None = None) -> dict[str, Any]:
    """The figures of the answers in `config.responses`; with each row's verdict they are written to `config.output`.

    Reward functions (`config.reward.functions`, and `functions` from Python) are called where any are given."""
    if config.output:
        check_writable(config.output, "output")
        if Path(config.output).resolve() == Path(config.responses).resolve():
            raise ShoalError(f"output={config.output} is the file of responses itself, which would be lost: give "
                             "another name")
    rewarded = bool(config.reward.functions or functions)
    with console or Console() as console:
        _show_unused(config, console)
        module = importlib.import_module(TASKS[config.task.name]) if config.task.name in TASKS else None
        loaded = None if hasattr(module, "blank") else _load(config.task, console)  # of an unknown task: says so
        task = loaded or module.blank(config.task)  # pyright: ignore[reportOptionalMemberAccess]
        if rewarded:
            task = with_rewards(task, config.task, config.reward, functions)
        responses = read_responses(Path(config.responses), task.question, console)
        columns = set(getattr(getattr(module, "PUBLISHED", None), "columns", ())) - {task.question}
        answered = [_own_example(number, response, task, columns) for number, response in enumerate(responses)]
        own = len(responses) - _count_lost(answered)
        if own < len(responses):
            answered = _look_up(responses, answered, task, loaded, config.task, console)
        if own:
            console.note(f"{own} of {len(responses)} responses are judged by what their own rows say is right")
        lost = _show_unjudged(responses, answered, task, console)
        verdicts = _verdicts(responses, answered, task, rewarded, console)
        if rewarded:
            _reward(responses, answered, verdicts, task, config.reward, console)
        protocol = f"answers of {config.responses}" + (f", {lost} of {len(responses)} not judged" if lost else "")
        figures = score_responses(responses, verdicts, task) | {"protocol": protocol}
        console.evaluation(task.name, {name: value for name, value in figures.items() if name != "num_unjudged"})
    if config.output:
        rows = _told(responses, verdicts, answered)
        text = json.dumps(json_ready({"task": task.name, **figures, "rows": rows}), indent=2, ensure_ascii=False)
        write_text(config.output, text + "\n")
    return {"task": task.name, **figures}


def _show_unused(config: EvalConfig, console: Console) -> None:
    """Warns of keys that say nothing about answers made elsewhere."""
    if config.model.path != type(config.model)().path:
        console.note(f"model={config.model.path} has no effect: answers made elsewhere are judged without a model")
    if config.reward.overlong_buffer_tokens:
        console.warning(f"reward.overlong_buffer_tokens={config.reward.overlong_buffer_tokens} has no effect: the "
                        "lengths in tokens of answers made elsewhere are not known")


def _told(responses: Sequence[Response], verdicts: Sequence[Mapping[str, Any] | None],
          answered: Sequence[Example | str]) -> list[dict[str, Any]]:
    """Each row as it came, with its verdict. A column that the verdict of any row has too becomes `given_...` in all
    rows, so that a name means the same in each."""
    told = [{"correct": None, "unjudged": reason} if verdict is None else dict(verdict)
            for verdict, reason in zip(verdicts, answered, strict=True)]
    taken = {name for verdict in told for name in verdict}
    given = {name for response in responses for name in response.row}
    names: dict[str, str] = {}
    for name in sorted(given):
        new = name
        while new in taken or (new != name and new in given):
            new = f"given_{new}"
        names[name] = new
    return [{**{names[name]: value for name, value in response.row.items()}, **verdict}
            for response, verdict in zip(responses, told, strict=True)]


def _load(section: TaskSection, console: Console) -> Task:
    """The task with all its questions."""
    with evaluating():
        task = load_task(replace(section, num_questions=0))
    for note in task.notes:
        console.note(note)
    return task


def read_responses(path: Path, question: str, console: Console) -> list[Response]:
    """The rows of a jsonl file; ShoalError naming the first line without a question or a response."""
    if not path.is_file():
        raise ShoalError(f"responses={path}: there is no such file; give a jsonl file with `{question}` and `{TEXT}` "
                         "a line")
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        raise ShoalError(f"responses={path} is no text in UTF-8 ({error.reason} at byte {error.start}): convert "
                         "it") from error
    except OSError as error:
        raise ShoalError(f"responses={path} cannot be read: {error.strerror or error}") from error
    found = [_response(line, f"{path}, line {number}", question) for number, line in enumerate(lines, 1)
             if line.strip()]
    if not found:
        raise ShoalError(f"responses={path} holds no row: one JSON object a line is needed, with `{question}` and "
                         f"`{TEXT}`")
    kinds = [response.row[TEXT] for response in found if not isinstance(response.row[TEXT], str)]
    if nulls := kinds.count(None):
        console.warning(f"{nulls} of {len(found)} responses are null and are judged as empty")
    if numbers := len(kinds) - nulls:
        console.warning(f"{numbers} of {len(found)} responses are numbers and are judged as text")
    return found


def _response(line: str, place: str, question: str) -> Response:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ShoalError(f"{place} is no JSON object ({error}): one a line is needed") from error
    if not isinstance(row, dict):
        raise ShoalError(f"{place} is a {type(row).__name__}: an object with `{question}` and `{TEXT}` is needed")
    row = _encodable(row) if "\\u" in line else row
    column = next((name for name in (question, *QUESTIONS) if row.get(name) is not None), question)
    asked, text = row.get(column), row.get(TEXT, ...)
    if isinstance(asked, list) and asked and isinstance(asked[-1], dict):  # messages: the last one
        asked = asked[-1].get("content")
    if not isinstance(asked, str):
        came = f"is {json.dumps(row[column]):.60}" if column in row else "is missing"
        raise ShoalError(f"{place}: `{column}` {came}; text is needed")
    if text is ... or isinstance(text, bool | list | dict):
        came = "is missing" if text is ... else f"is {json.dumps(text):.60}"
        raise ShoalError(f"{place}: `{TEXT}` {came}; text is needed")
    return Response(place, row, asked, "" if text is None else str(text))


def _encodable(value: Any) -> Any:
    """JSON's value with each half of a surrogate pair that stands alone written out, `\\ud83d`: no file can hold it."""
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode("utf-8")
    if isinstance(value, list):
        return [_encodable(one) for one in value]
    if isinstance(value, dict):
        return {_encodable(name): _encodable(one) for name, one in value.items()}
    return value


def _own_example(number: int, response: Response, task: Task, columns: Set[str]) -> Example | str:
    """What a row answers where it holds what is right itself, in the published columns (where those are not all
    fixed: in any of GOLD_COLUMNS); NOT_FOUND where it does not, the fault where they cannot be read."""
    given = {column for column, value in response.row.items() if value is not None and value != ""}
    if task.of_row is None or not (columns <= given if columns else given.intersection(GOLD_COLUMNS)):
        return NOT_FOUND
    try:
        return task.of_row(number, {**response.row, task.question: response.question})
    except ShoalError as error:
        return str(error)


def _count_lost(answered: Sequence[Example | str]) -> int:
    return sum(isinstance(one, str) for one in answered)


def _look_up(responses: Sequence[Response], answered: Sequence[Example | str], task: Task, loaded: Task | None,
             section: TaskSection, console: Console) -> list[Example | str]:
    """Those that are not judged by their own row, found in the task's data; where it cannot be read, that is the end
    only if no row is judged by itself."""
    try:
        loaded = loaded or _load(section, console)
    except ShoalError as error:
        if NOT_FOUND in answered and _count_lost(answered) == len(answered):
            raise
        console.warning(f"the other questions cannot be looked up: {error}")
        return list(answered)
    splits = dict(loaded.evaluations)
    if section.path or task.of_row:  # else problems are made to train on, without end
        splits["training"] = loaded.train
    return _found(responses, answered, splits, task.question, console)


def _found(responses: Sequence[Response], answered: Sequence[Example | str], splits: Mapping[str, Sequence[Example]],
           column: str, console: Console) -> list[Example | str]:
    """Examples found by their question in the task's data, in the order of its splits, in place of what is none."""
    wanted = {spelled(response.question) for response, own in zip(responses, answered, strict=True)
              if isinstance(own, str)}
    known: dict[str, Example] = {}
    for split, rows in splits.items():
        by_question = {spelled(question_of(example, column)): example for example in reversed(rows)}
        here = (wanted - known.keys()) & by_question.keys()
        known.update({question: by_question[question] for question in here})
        if here:
            console.note(f"{len(here)} of {len(rows)} {split} questions are answered")
        if known.keys() >= wanted:
            break
    return [known.get(spelled(response.question), own) if isinstance(own, str) else own
            for response, own in zip(responses, answered, strict=True)]


def spelled(question: str) -> str:
    """A question in one spelling of its characters, quotes and white space.

    >>> spelled("Janet\\u2019s\\u00a0 eggs?\\n")
    "Janet's eggs?"
    """
    return " ".join(unicodedata.normalize("NFKC", question).translate(_QUOTES).split())


def _show_unjudged(responses: Sequence[Response], answered: Sequence[Example | str], task: Task,
                   console: Console) -> int:
    """The number of responses that cannot be judged, with a warning; ShoalError where none can."""
    lost = [(response, reason) for response, reason in zip(responses, answered, strict=True) if isinstance(reason, str)]
    if len(lost) == len(responses):
        raise ShoalError(f"none of the {len(lost)} responses can be judged by task {task.name}; the first, "
                         f"{lost[0][0].place}: {lost[0][1]}. Its data must have each `{task.question}` as it stands")
    if lost:
        console.warning(f"{len(lost)} of {len(responses)} responses cannot be judged and are not counted; the first, "
                        f"{lost[0][0].place}: {lost[0][1]}")
    return len(lost)


def question_of(example: Example, column: str) -> str:
    """The question of an example as published: its column of that name, else the last message, else the prompt."""
    own = example.columns.get(column)
    if isinstance(own, str):
        return own
    return example.prompt if isinstance(example.prompt, str) else str(example.prompt[-1].get("content", ""))


def _verdicts(responses: Sequence[Response], answered: Sequence[Example | str], task: Task, rewarded: bool,
              console: Console) -> list[dict[str, Any] | None]:
    """By the task; None where a response is not judged."""
    verdict, correct = task.verdict, task.correct
    if verdict is None and correct is None and not rewarded:
        raise ShoalError(f"task {task.name} does not say what is right, so answers made elsewhere cannot be judged: "
                         "give a function that judges them, reward=file.py:function")
    verdicts: list[dict[str, Any] | None] = []
    for response, example in zip(responses, answered, strict=True):
        if isinstance(example, str):
            verdicts.append(None)
        elif verdict is not None:
            verdicts.append(dict(verdict(response.text, example)))
        else:
            verdicts.append({"correct": bool(correct(response.text, example))} if correct is not None else {})
        console.answered("responses", len(verdicts), len(responses))
    return verdicts


def _reward(responses: Sequence[Response], answered: Sequence[Example | str],
            verdicts: Sequence[dict[str, Any] | None], task: Task, section: RewardSection, console: Console) -> None:
    """Adds what reward functions give for each response, alone in its group, to its verdict."""
    judged = [(response.text, example, verdict)
              for response, example, verdict in zip(responses, answered, verdicts, strict=True)
              if isinstance(example, Example) and verdict is not None]
    with Judge(task.rewards, section) as judge:
        for batch in [judged] if judge.by_step else [[one] for one in judged]:
            judge.submit("batch", [example for _, example, _ in batch], [[text] for text, _, _ in batch],
                         [[[]] for _ in batch], 0)
            [(_, scores)] = judge.collect(wait=True)
            for number, (_, _, verdict) in enumerate(batch):
                verdict["reward"] = float(scores.rewards[number][0])
                verdict["rewards"] = {name: float(values[number][0]) for name, values in scores.components.items()}
            for failure in scores.failures:
                console.warning(failure.text)


def score_responses(responses: Sequence[Response], verdicts: Sequence[Mapping[str, Any] | None],
                    task: Task) -> dict[str, Any]:
    """Accuracy over the answers that were judged, its interval, the task's own figures, and their numbers."""
    judged = [(response, verdict) for response, verdict in zip(responses, verdicts, strict=True) if verdict is not None]
    verdicts = [verdict for _, verdict in judged]
    figures: dict[str, Any] = {
        "num_responses": len(judged),
        "num_questions": len({response.question for response, _ in judged}),
        "num_unjudged": len(responses) - len(judged),
    }
    if "correct" in verdicts[0]:
        right = sum(bool(verdict["correct"]) for verdict in verdicts)
        figures |= {"accuracy": right / len(judged), "accuracy_interval": list(wilson_interval(right, len(judged)))}
    if task.figures is not None:
        figures |= task.figures(verdicts)
    if "reward" in verdicts[0]:
        figures["mean_reward"] = known_mean([verdict["reward"] for verdict in verdicts])
        for name in verdicts[0]["rewards"]:
            figures[f"rewards/{name}"] = known_mean([verdict["rewards"][name] for verdict in verdicts])
    return figures
