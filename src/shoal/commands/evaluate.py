"""`shoal eval`: the figures of one model on one task, or of answers that were made elsewhere, with
their protocol, and every answer in a file."""

from __future__ import annotations

import importlib
import inspect
import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

from shoal.buckets import OUTPUTS
from shoal.chat.tokenizer import Tokenizer
from shoal.checks.settings import check_model
from shoal.config.commands import EvalConfig
from shoal.config.sections.reward import RewardSection
from shoal.config.sections.task import TaskSection
from shoal.files import check_input, check_local, check_new_file, write_text
from shoal.findings import Findings
from shoal.job.job import Job
from shoal.job.rescore import (
    Response,
    add_rewards,
    give_verdicts,
    load_with_data,
    match_examples,
    question_text,
    read_responses,
    report_unscored,
    response_figures,
)
from shoal.job.task import with_rewards
from shoal.records import Failure, Group, Purpose, ShoalError, ground_truth
from shoal.report.console import Console
from shoal.rewards.scores import failed_figures, failure_lines
from shoal.runs.lines import json_ready
from shoal.tasks.task import ROWS, TASKS, Task
from shoal.trainer.evaluation import Answers, Evaluator

OUTPUT_FIELDS = ("task", "model", "seed", "max_completion_tokens", "rows")
"""Fields of the output file, next to one for each set of questions."""


FEW_WELL_FORMED = 0.05
"""Below this share of answers in the form asked for, the note says how a model learns it."""


HAS_SOLUTIONS = ("gsm8k", "words")
"""Tasks whose rows hold worked solutions, which `shoal sft` puts in that form."""


def evaluate(
    config: EvalConfig,
    reward_functions: Sequence[Callable] = (),
    console: Console | None = None,
    task: Task | None = None,
) -> dict[str, Any]:
    """The figures by set of questions, with their protocol; every answer is written to
    `config.output`."""
    output = check_new_file(config.output, "output") if config.output else None
    check_model(config.model)
    with (
        console or Console() as console,
        Job(config, console, functions=reward_functions, task=task) as job,
    ):
        job.check()
        Findings(console).extend(job.findings.at("warning"))
        task = job.task
        if output and (taken := sorted(set(OUTPUT_FIELDS) & set(task.evaluations))):
            raise ShoalError(
                f"output={output}: a set of questions is called {taken[0]!r}, the name of a field "
                f"of this "
                "file; rename the set"
            )
        params = config.sampling.params
        if config.pass_k and params.temperature == 0:
            console.note(
                "sampling.temperature=0: greedy answers alone; pass@k and maj@k need samples that "
                "differ"
            )
        source, sets, tokenizer = job.source, job.sets, job.tokenizer
        source.publish(0, job.load_weights())
        evaluator = Evaluator(sets, params, config.pass_k, task)
        answers = evaluator.answers(source, 0, 0, full=True)
        failures = source.read_stats(Purpose.EVALUATE).failures
        # A question in several sets belongs to the first.
        owner = {
            group.example.row: name
            for name in reversed(list(answers))
            for group in answers[name].greedy
        }
        failed = {
            subset: [one for one in failures if owner.get(one.row) == subset] for subset in answers
        }
        data = describe_data(config.task, task, tokenizer, bool(config.model.template))
        figures = {
            subset: evaluator.figures(own)
            | read_in_any_form(own, task)
            | failed_figures(failed[subset])
            | {"data": data}
            for subset, own in answers.items()
        }
        report_evaluation(figures, failures, console)
        shares = [
            float(str(values["well_formed"]))
            for values in figures.values()
            if "well_formed" in values
        ]
        if shares and max(shares) < FEW_WELL_FORMED:
            console.note(well_formed_advice(task))
    if output:
        rows = [row for subset, own in answers.items() for row in answer_rows(subset, own, task)]
        write_answers(
            output,
            {
                "task": task.name,
                "model": config.model.path,
                "seed": config.seed,
                "max_completion_tokens": params.max_tokens,
                **figures,
                "rows": rows,
            },
        )
    return figures


def read_in_any_form(answers: Answers, task: Task) -> dict[str, float]:
    """`accuracy_any_form`, the share of questions whose answer is right wherever the text says it,
    as the rows of the output have it; empty where the task reads answers in one way."""
    if task.verdict is None or task.extract is None or not answers.greedy:
        return {}
    verdicts = [task.verdict(group.answers[0], group.example) for group in answers.greedy]
    return {
        "accuracy_any_form": sum(bool(verdict["correct"]) for verdict in verdicts) / len(verdicts)
    }


def well_formed_advice(task: Task) -> str:
    """How a model comes to write answers in the form that the task asks for."""
    data = (
        f"task={task.name}"
        if task.name in HAS_SOLUTIONS
        else "task.path=DIALOGUES.jsonl with answers in that form"
    )
    return (
        f"hardly any answer has the form that the prompt asks for, so a run would get few rewards: "
        f"have the model "
        f"learn the form first, shoal sft {data}, or take an instruct model that follows the prompt"
    )


def describe_data(
    section: TaskSection, task: Task, tokenizer: Tokenizer, template_given: bool
) -> str:
    """The questions' source and the template of their messages: `gsm8k, split test, the model's
    chat template`."""
    if section.name == ROWS:
        source = "rows from Python"
    elif section.path:
        source = f"{section.name} of {section.path}, split {section.eval_split}"
    else:
        source = f"{section.name}, split {section.eval_split}" if task.of_row else section.name
    model_template = "the model's chat template" if tokenizer.has_template else "no template"
    return f"{source}, {'model.template' if template_given else model_template}"


def answer_rows(subset: str, answers: Answers, task: Task) -> Iterator[dict[str, Any]]:
    """A row a question: the question, its ground truth, the scored greedy answer and the scored
    samples."""
    for greedy, sampled in zip_longest(answers.greedy, answers.sampled):
        example = greedy.example
        row = {
            "set": subset,
            "row": example.row,
            "question": question_text(example, task.question),
            "gold": ground_truth(example.columns),
            **_scored_completion(greedy, 0),
        }
        if task.verdict is not None:
            row["verdict"] = task.verdict(greedy.answers[0], example)
        if sampled is not None:
            row["samples"] = [_scored_completion(sampled, index) for index in range(sampled.size)]
        yield row


def _scored_completion(group: Group, index: int) -> Mapping[str, Any]:
    completion = group.completions[index]
    return {
        "response": group.texts[index],
        "correct": None if group.correct is None else bool(group.correct[index]),
        "reward": group.rewards[index],
        "rewards": {name: values[index] for name, values in group.reward_components.items()},
        "length": len(completion),
        "stop_reason": completion.stop_reason,
    }


def score_responses(
    config: EvalConfig,
    functions: Sequence[Callable] = (),
    console: Console | None = None,
    python_task: Task | None = None,
) -> dict[str, Any]:
    """The figures of the answers in `config.responses`; each row with its verdict is written to
    `config.output`.

    Reward functions (`config.reward.functions`, and `functions` from Python) are called if any are
    given, the task's own if weights or a preset are. `python_task`: a task whose data came from
    Python."""
    file, output = check_input(config.responses, "responses"), None
    if config.output:
        output = check_local(config.output, "output", OUTPUTS)
        if output.resolve() == file.resolve():
            raise ShoalError(
                f"output={output} is the file of responses itself, which would be overwritten: "
                f"give "
                "another name"
            )
        check_new_file(config.output, "output")
    with console or Console() as console:
        _report_unused_keys(config, console)
        module = (
            importlib.import_module(TASKS[config.task.name]) if config.task.name in TASKS else None
        )
        if python_task:
            task, with_data, rewarded = python_task, python_task, bool(python_task.rewards)
        else:
            task, with_data, rewarded = _load_scoring_task(config, module, functions, console)
        responses = read_responses(file, task.question, console)
        examples = match_examples(responses, task, with_data, module, config.task, console)
        num_unscored = report_unscored(responses, examples, task, console)
        verdicts = give_verdicts(responses, examples, task, rewarded, console)
        failures = (
            add_rewards(responses, examples, verdicts, task, config.reward, console)
            if rewarded
            else []
        )
        protocol = f"answers of {config.responses}" + (
            f", {num_unscored} of {len(responses)} not judged" if num_unscored else ""
        )
        figures = (
            response_figures(responses, verdicts, task)
            | failed_figures(failures)
            | {"protocol": protocol}
        )
        shown = {name: value for name, value in figures.items() if name != "num_unjudged"}
        report_evaluation({task.name: shown}, failures, console)
    if output:
        rows = output_rows(
            responses,
            [
                {"correct": None, "unjudged": reason} if verdict is None else dict(verdict)
                for verdict, reason in zip(verdicts, examples, strict=True)
            ],
        )
        write_answers(output, {"task": task.name, **figures, "rows": rows})
    return {"task": task.name, **figures}


def _report_unused_keys(config: EvalConfig, console: Console) -> None:
    if config.model.path != type(config.model)().path:
        console.note(
            f"model={config.model.path} has no effect: answers made elsewhere need no model"
        )
    if config.reward.overlong_buffer_tokens:
        console.warning(
            f"reward.overlong_buffer_tokens={config.reward.overlong_buffer_tokens} has no effect: "
            f"the "
            "lengths in tokens of answers made elsewhere are not known"
        )


def _load_scoring_task(
    config: EvalConfig, module: Any, functions: Sequence[Callable], console: Console
) -> tuple[Task, Task | None, bool]:
    """The task, itself again if its data had to be read for it, and whether rewards are asked
    for."""
    with_data = None if hasattr(module, "blank") else load_with_data(config.task, console)
    has_preset = config.reward.preset != RewardSection.preset
    takes_preset = with_data is None and "reward" in inspect.signature(module.blank).parameters
    if has_preset and (functions or config.reward.functions or not takes_preset):
        console.warning(
            f"reward.preset={config.reward.preset} has no effect: it is for the own rewards of "
            f"task=gsm8k"
        )
        has_preset = False
    task = with_data or (
        module.blank(config.task, config.reward) if takes_preset else module.blank(config.task)
    )
    rewarded = bool(functions or config.reward.functions or config.reward.weights or has_preset)
    return (
        with_rewards(task, config.task, config.reward, functions) if rewarded else task,
        with_data,
        rewarded,
    )


def output_rows(
    responses: Sequence[Response], verdicts: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Each row as given, with its verdict; a column that any verdict has too is renamed `given_...`
    in all rows."""
    names = given_names(
        (name for response in responses for name in response.row),
        {name for verdict in verdicts for name in verdict},
    )
    return [
        {**{names[name]: value for name, value in response.row.items()}, **verdict}
        for response, verdict in zip(responses, verdicts, strict=True)
    ]


def given_names(given: Iterable[str], taken: Collection[str]) -> dict[str, str]:
    """The names of an input's columns in the output; one that the output has itself is `given_...`
    there."""
    given, names = set(given), {}
    for name in sorted(given):
        new = name
        while new in taken or (new != name and new in given):
            new = f"given_{new}"
        names[name] = new
    return names


def report_evaluation(
    figures: Mapping[str, Mapping[str, Any]], failures: Sequence[Failure], console: Console
) -> None:
    """Prints the figures of each set of questions and warns of failed reward functions."""
    for name, values in figures.items():
        console.evaluation(name, values)
    for line in failure_lines(failures):
        console.warning(line)


def write_answers(output: Path, content: Mapping[str, Any]) -> None:
    """Writes the JSON file of an evaluation, whole or not at all."""
    write_text(output, json.dumps(json_ready(content), indent=2, ensure_ascii=False) + "\n")
