"""`shoal eval responses=FILE`: scores answers made elsewhere by a task, without a model or a
device."""

from __future__ import annotations

import importlib
import inspect
import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from shoal.buckets import OUTPUTS
from shoal.config.commands import EvalConfig
from shoal.config.sections.reward import RewardSection
from shoal.files import check_input, check_local, check_new_file, write_text
from shoal.job.rescore import (
    Response,
    add_rewards,
    give_verdicts,
    load_with_data,
    match_examples,
    read_responses,
    report_unscored,
    response_figures,
)
from shoal.job.task import with_rewards
from shoal.records import Failure, ShoalError
from shoal.report.console import Console
from shoal.rewards.scores import failure_counts, failure_lines
from shoal.runs.lines import json_ready
from shoal.tasks.task import TASKS, Task


def score_responses(
    config: EvalConfig,
    functions: Sequence[Callable] = (),
    console: Console | None = None,
    python_task: Task | None = None,
) -> dict[str, Any]:
    """Scores the answers in the file `config.responses`, which were made elsewhere. Prints and
    returns their figures, with the task's name under `task`; writes each row with its verdict to
    `config.output`, if given. Answers without an example are not judged: their rows get `correct`
    None and the reason under `unjudged`. ShoalError if the output exists already, if the file of
    answers cannot be used, or if the task defines nothing correct and no rewards are computed.

    Rewards are computed if reward functions are given (in `config.reward.functions`, or as
    `functions` from Python), or if `reward.weights` or a preset asks for the task's own.
    `python_task`: a task whose data came from Python, with its own rewards, if any (then
    `functions` and the keys of `reward` choose none); None for the task that `config.task` names.
    A `console` that is given can be used afterwards; None: one for this command."""
    file = check_input(config.responses, "responses")
    output = None
    if config.output:
        output = check_local(config.output, "output", OUTPUTS)
        if output.resolve() == file.resolve():
            raise ShoalError(
                f"output={output} is the file of responses itself, which would be overwritten: "
                "give another name"
            )
        check_new_file(config.output, "output")
    with console or Console() as console:
        _report_unused_keys(config, console)
        module = None
        if config.task.name in TASKS:
            module = importlib.import_module(TASKS[config.task.name])
        if python_task:
            task = with_data = python_task
            rewarded = bool(python_task.rewards)
        else:
            task, with_data, rewarded = _load_scoring_task(config, module, functions, console)
        responses = read_responses(file, task.question, console)
        examples = match_examples(
            responses=responses,
            task=task,
            with_data=with_data,
            module=module,
            section=config.task,
            console=console,
        )
        num_unscored = report_unscored(responses, examples, task, console)
        verdicts = give_verdicts(responses, examples, task, rewarded, console)
        failures = []
        if rewarded:
            failures = add_rewards(
                responses=responses,
                examples=examples,
                verdicts=verdicts,
                task=task,
                section=config.reward,
                console=console,
            )
        protocol = f"answers of {config.responses}"
        if num_unscored:
            protocol += f", {num_unscored} of {len(responses)} not judged"
        figures = response_figures(responses, verdicts, task)
        figures |= failure_counts(failures)
        figures["protocol"] = protocol
        shown = {name: value for name, value in figures.items() if name != "num_unjudged"}
        report_evaluation({task.name: shown}, failures, console)
    if output:
        columns: list[Mapping[str, Any]] = []
        # Without a verdict the reason why, as text, takes the example's place.
        for verdict, reason in zip(verdicts, examples, strict=True):
            columns.append({"correct": None, "unjudged": reason} if verdict is None else verdict)
        rows = output_rows(responses, columns)
        write_answers(output, {"task": task.name, **figures, "rows": rows})
    return {"task": task.name, **figures}


def _report_unused_keys(config: EvalConfig, console: Console) -> None:
    """Prints a note if `model` was set, and a warning if `reward.overlong_buffer_tokens` was: both
    have no effect on answers made elsewhere. Other keys are not looked at."""
    if config.model.path != type(config.model)().path:
        console.note(
            f"model={config.model.path} has no effect: answers made elsewhere need no model"
        )
    if config.reward.overlong_buffer_tokens:
        console.warning(
            f"reward.overlong_buffer_tokens={config.reward.overlong_buffer_tokens} has no effect: "
            "the lengths in tokens of answers made elsewhere are not known"
        )


def _load_scoring_task(
    config: EvalConfig, module: Any, functions: Sequence[Callable], console: Console
) -> tuple[Task, Task | None, bool]:
    """Returns (the task that judges answers; the same task if its data was read, else None; True if
    rewards are asked for). Most tasks can judge without their data (`blank`), because each response
    has its question and answer. `module`: the task's; None if it is not one of TASKS, whose data is
    then read. Rewards are asked for by `functions`, `reward.functions`, `reward.weights` or a
    preset that has an effect; the task then has them. Warns of a reward preset that has none."""
    with_data = None
    if not hasattr(module, "blank"):
        with_data = load_with_data(config.task, console)
    has_preset = config.reward.preset != RewardSection.preset
    # A task can be made without data for a preset alone if its `blank` has the argument `reward`.
    takes_preset = with_data is None and "reward" in inspect.signature(module.blank).parameters
    if has_preset and (functions or config.reward.functions or not takes_preset):
        console.warning(
            f"reward.preset={config.reward.preset} has no effect: it is only for the rewards "
            "of task=gsm8k itself"
        )
        has_preset = False
    if with_data is not None:
        task = with_data
    elif takes_preset:
        task = module.blank(config.task, config.reward)
    else:
        task = module.blank(config.task)
    rewarded = bool(functions or config.reward.functions or config.reward.weights or has_preset)
    if rewarded:
        task = with_rewards(task, config.task, config.reward, functions)
    return task, with_data, rewarded


def output_rows(
    responses: Sequence[Response], verdicts: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Returns each response's row of the input joined with its verdict. An input column that some
    verdict has too is renamed to `given_...` in all rows, like `output_names` says. `verdicts`: one
    for each response, in their order, column -> value. Rows need not have the same columns."""
    input_columns: set[str] = set()
    verdict_columns: set[str] = set()
    for response in responses:
        input_columns.update(response.row)
    for verdict in verdicts:
        verdict_columns.update(verdict)
    names = output_names(input_columns, verdict_columns)
    rows = []
    for response, verdict in zip(responses, verdicts, strict=True):
        row = {names[name]: value for name, value in response.row.items()}
        row.update(verdict)
        rows.append(row)
    return rows


def output_names(columns: Iterable[str], taken: Collection[str]) -> dict[str, str]:
    """Returns input column -> its name in the output: `given_NAME` if the output has a column NAME
    of its own (`taken`), else unchanged. `given_` is put before it again if that name is taken or
    another input column has it. Every input column has an entry."""
    columns = set(columns)
    names = {}
    for name in sorted(columns):
        output_name = name
        while output_name in taken or (output_name != name and output_name in columns):
            output_name = f"given_{output_name}"
        names[name] = output_name
    return names


def report_evaluation(
    figures: Mapping[str, Mapping[str, Any]], failures: Sequence[Failure], console: Console
) -> None:
    """Prints the figures of each set of questions (set -> name -> figure), and a warning for each
    reward function that failed."""
    for name, values in figures.items():
        console.evaluation(name, values)
    for line in failure_lines(failures):
        console.warning(line)


def write_answers(output: Path, content: Mapping[str, Any]) -> None:
    """Writes the JSON file of an evaluation, completely or not at all. Whether `output` exists
    already is not checked here."""
    write_text(output, json.dumps(json_ready(content), indent=2, ensure_ascii=False) + "\n")
