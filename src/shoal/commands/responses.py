"""`shoal eval responses=FILE`: answers made elsewhere, judged by a task without any model or device.

    rows of FILE -> the example that each answers (its own columns, else the task's data) -> verdicts -> figures

A question that is text is looked up as it is, a conversation by all its messages, else without the system's, else, of
data whose questions are text, by its last one.
"""

from __future__ import annotations

import importlib
import inspect
import json
import unicodedata
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from shoal.config.schema import EvalConfig, RewardSection, TaskSection
from shoal.files import check_local, check_writable, write_text
from shoal.report.console import Console
from shoal.report.lines import json_ready
from shoal.report.metrics import known_mean, wilson_interval
from shoal.rewards.judge import Judge
from shoal.rewards.scores import Failure, Scores, failed_figures, failure_lines
from shoal.run.task import load_task, with_rewards
from shoal.tasks.data import evaluating
from shoal.tasks.generated import MadeRows
from shoal.tasks.task import TASKS, Task
from shoal.types import GOLD_COLUMNS, Example, ShoalError, ground_truth

NOT_FOUND = "its question is not in the task's data"
TEXT = "response"
"""The column that holds an answer's text."""
QUESTIONS = ("question", "prompt", "problem")
"""Columns of which the first that a row has is its question, where it lacks the task's own."""
_LAST = object()
"""Begins the key of a conversation's last message alone."""
_QUOTES = str.maketrans({"‘": "'", "’": "'", "“": '"', "”": '"', "–": "-", "−": "-"})


Conversation = tuple[tuple[str, str], ...]
"""Each message's role and content, as `spelled` has it."""
Key = tuple[Any, ...]
"""What a question is looked up by."""


@dataclass(frozen=True)
class Response:
    """A row of the file: `place` is `FILE, line N`."""

    place: str
    row: Mapping[str, Any]
    question: str
    text: str
    messages: Conversation = ()
    """What was asked, where it is a conversation; `question` is its last message."""


def judge_responses(config: EvalConfig, functions: Sequence[Callable] = (),
                    console: Console | None = None, given: Task | None = None) -> dict[str, Any]:
    """The figures of the answers in `config.responses`; with each row's verdict they are written to `config.output`.

    Reward functions (`config.reward.functions`, and `functions` from Python) are called where any are given, the task's
    own where they are given weights or a preset. `given`: a task whose data came from Python."""
    file, output = check_local(config.responses, "responses"), None
    if config.output:
        output = check_writable(config.output, "output")
        if output.resolve() == file.resolve():
            raise ShoalError(f"output={output} is the file of responses itself, which would be lost: give another name")
    with console or Console() as console:
        _show_unused(config, console)
        module = importlib.import_module(TASKS[config.task.name]) if config.task.name in TASKS else None
        task, loaded, rewarded = (given, given, bool(given.rewards)) if given else \
            _task(config, module, functions, console)
        responses = read_responses(file, task.question, console)
        columns = set(getattr(getattr(module, "PUBLISHED", None), "columns", ())) - {task.question}
        answered = [_own_example(number, response, task, columns) for number, response in enumerate(responses)]
        own = len(responses) - _count_lost(answered)
        if own < len(responses):
            answered = _look_up(responses, answered, task, loaded, config.task, console)
        if own:
            console.note(f"{own} of {len(responses)} responses are judged by what their own rows say is right")
        lost = _show_unjudged(responses, answered, task, console)
        verdicts = _verdicts(responses, answered, task, rewarded, console)
        failures = _reward(responses, answered, verdicts, task, config.reward, console) if rewarded else []
        protocol = f"answers of {config.responses}" + (f", {lost} of {len(responses)} not judged" if lost else "")
        figures = score_responses(responses, verdicts, task) | failed_figures(failures) | {"protocol": protocol}
        console.evaluation(task.name, {name: value for name, value in figures.items() if name != "num_unjudged"})
        for line in failure_lines(failures):
            console.warning(line)
    if output:
        rows = _told(responses, verdicts, answered)
        text = json.dumps(json_ready({"task": task.name, **figures, "rows": rows}), indent=2, ensure_ascii=False)
        write_text(output, text + "\n")
    return {"task": task.name, **figures}


def _task(config: EvalConfig, module: Any, functions: Sequence[Callable],
          console: Console) -> tuple[Task, Task | None, bool]:
    """The task that judges, the same where its data had to be loaded for that, and whether rewards are asked for."""
    loaded = None if hasattr(module, "blank") else _load(config.task, console)  # of an unknown task: says so
    chosen = config.reward.preset != RewardSection.preset
    has_presets = loaded is None and "reward" in inspect.signature(module.blank).parameters
    if chosen and (functions or config.reward.functions or not has_presets):
        console.warning(f"reward.preset={config.reward.preset} has no effect: it is for the own rewards of task=gsm8k")
        chosen = False
    task = loaded or (module.blank(config.task, config.reward) if has_presets else module.blank(config.task))
    rewarded = bool(functions or config.reward.functions or config.reward.weights or chosen)
    return with_rewards(task, config.task, config.reward, functions) if rewarded else task, loaded, rewarded


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
    asked, text, messages = row.get(column), row.get(TEXT, ...), ()
    if isinstance(asked, list) and asked and all(isinstance(message, dict) for message in asked):
        messages, asked = _conversation(asked), asked[-1].get("content")
    if not isinstance(asked, str):
        came = f"is {json.dumps(row[column]):.60}" if column in row else "is missing"
        raise ShoalError(f"{place}: `{column}` {came}; text is needed")
    if text is ... or isinstance(text, bool | list | dict):
        came = "is missing" if text is ... else f"is {json.dumps(text):.60}"
        raise ShoalError(f"{place}: `{TEXT}` {came}; text is needed")
    return Response(place, row, asked, "" if text is None else str(text), messages)


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
    if not isinstance(loaded.train, MadeRows):  # which are without end
        splits["training"] = loaded.train
    return _found(responses, answered, splits, task.question, console)


def _found(responses: Sequence[Response], answered: Sequence[Example | str], splits: Mapping[str, Sequence[Example]],
           column: str, console: Console) -> list[Example | str]:
    """Examples found by their question in the task's data, in the order of its splits, in place of what is none."""
    found = list(answered)
    keys = {number: _keys(response) for number, response in enumerate(responses) if isinstance(found[number], str)}
    wanted = {key for own in keys.values() for key in own}
    index: dict[str, dict[Key, list[Example]]] = {}
    taken: dict[str, set[int]] = {split: set() for split in splits}
    several: dict[Key, str] = {}  # the place of the first response to each
    for level in range(max(map(len, keys.values()), default=0)):
        for split, rows in splits.items():
            lost = [number for number, own in keys.items() if level < len(own) and isinstance(found[number], str)]
            if lost and split not in index:
                index[split] = _by_key(rows, column, wanted)
            for number in lost:
                key = keys[number][level]
                if examples := index[split].get(key):
                    found[number] = examples[0]
                    taken[split].add(examples[0].row)
                    if len({_gold_text(example) for example in examples}) > 1:
                        several.setdefault(key, responses[number].place)
    for split, here in taken.items():
        if here:
            console.note(f"{len(here)} of {len(splits[split])} {split} questions are answered")
    if several:
        console.warning(f"{len(several)} questions name several rows of the data that differ in what is right, and the "
                        f"first row is taken; the first such question, {next(iter(several.values()))}")
    return found


def _by_key(rows: Sequence[Example], column: str, wanted: Set[Key]) -> dict[Key, list[Example]]:
    """The rows by each wanted key that names them."""
    found: dict[Key, list[Example]] = {}
    for example in rows:
        for key in _keys_of(example, column):
            if key in wanted:
                found.setdefault(key, []).append(example)
    return found


def _keys(response: Response) -> list[Key]:
    """What a response's question is looked up by, one after the other."""
    if not response.messages:
        text = spelled(response.question)
        return [(text,), (_LAST, text)]
    turns = _turns(response.messages)
    return [response.messages, turns, turns[-1:]]


def _keys_of(example: Example, column: str) -> list[Key]:
    """What may name an example: its conversation, that without the system's messages, its last message."""
    own, prompt = example.columns.get(column), example.prompt
    if isinstance(own, str):
        return [(spelled(own),)]
    if isinstance(prompt, str):
        return [(spelled(prompt),)]
    messages = _conversation(prompt)
    turns = _turns(messages)
    return [messages, turns, *([(_LAST, turns[-1])] if len(turns) > 1 else [])]


def _conversation(messages: Sequence[Mapping[str, Any]]) -> Conversation:
    return tuple((str(message.get("role", "")), spelled(str(message.get("content") or ""))) for message in messages)


def _turns(messages: Conversation) -> tuple[str, ...]:
    """The contents of all messages but the system's."""
    return tuple(content for role, content in messages if role != "system") or ("",)


def _gold_text(example: Example) -> str:
    gold = ground_truth(example.columns)
    return repr(example.columns if gold is None else gold)


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
            verdicts: Sequence[dict[str, Any] | None], task: Task, section: RewardSection,
            console: Console) -> list[Failure]:
    """Adds what reward functions give for each response, alone in its group, to its verdict; what they failed at.

    All are submitted before any is waited for, so that a judge behind a network is asked for many at once."""
    judged = [(response.text, example, verdict)
              for response, example, verdict in zip(responses, answered, verdicts, strict=True)
              if isinstance(example, Example) and verdict is not None]
    scores: dict[Any, Scores] = {}

    def take(came: Sequence[tuple[Any, Scores]]) -> None:
        for ticket, found in came:
            scores[ticket] = found
            console.answered("rewards", len(scores), len(batches))

    with Judge(task.rewards, section) as judge:
        batches = [judged] if judge.by_step else [[one] for one in judged]
        for ticket, batch in enumerate(batches):
            judge.submit(ticket, [example for _, example, _ in batch], [[text] for text, _, _ in batch],
                         [[[]] for _ in batch], 0)
            take(judge.collect())
        while len(scores) < len(batches):
            take(judge.collect(wait=True))
    for ticket, batch in enumerate(batches):
        for number, (_, _, verdict) in enumerate(batch):
            verdict["reward"] = float(scores[ticket].rewards[number][0])
            verdict["rewards"] = {name: float(values[number][0])
                                  for name, values in scores[ticket].components.items()}
    return [failure for ticket in range(len(batches)) for failure in scores[ticket].failures]


def score_responses(responses: Sequence[Response], verdicts: Sequence[Mapping[str, Any] | None],
                    task: Task) -> dict[str, Any]:
    """Accuracy over the answers that were judged, its interval, the task's own figures, and their numbers."""
    judged = [(response, verdict) for response, verdict in zip(responses, verdicts, strict=True) if verdict is not None]
    verdicts = [verdict for _, verdict in judged]
    figures: dict[str, Any] = {
        "num_responses": len(judged),
        "num_questions": len({response.messages or response.question for response, _ in judged}),
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
