"""`shoal eval`: evaluates one model on one task; prints the figures and how they were measured, and
writes every answer to a file."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any

from shoal.chat.tokenizer import Tokenizer
from shoal.checks.overlap import Overlap, find_overlap
from shoal.checks.settings import check_model
from shoal.commands.responses import report_evaluation, write_answers
from shoal.config.commands import EvalConfig
from shoal.config.keywords import ROWS
from shoal.config.sections.task import TaskSection
from shoal.files import check_new_file
from shoal.findings import Findings
from shoal.job.job import Job
from shoal.job.own_task import rows_trained_on
from shoal.job.rescore import question_text
from shoal.records import Group, Purpose, ShoalError, ground_truth
from shoal.report.console import Console
from shoal.rewards.scores import failure_counts
from shoal.tasks.task import Task
from shoal.trainer.evaluation import Answers, make_evaluator

OUTPUT_FIELDS = ("task", "model", "seed", "max_completion_tokens", "rows")
"""Fields of the output file besides the figures, which are under the names of sets of questions."""
FEW_WELL_FORMED = 0.05
"""If a smaller share of answers has the form that the prompt asks for, a note says how a model
learns the form."""
HAS_SOLUTIONS = ("gsm8k", "words")
"""Tasks whose rows have worked solutions, which `shoal sft` writes in the form that the prompt asks
for."""


def evaluate(
    config: EvalConfig,
    reward_functions: Sequence[Callable] = (),
    console: Console | None = None,
    task: Task | None = None,
) -> dict[str, Any]:
    """Evaluates a model on the task's sets of questions, with greedy or sampled answers and, for
    pass@k, samples. Prints and returns set -> figures, with how they were measured. Writes every
    answer to `config.output`, if given; ShoalError if that file exists already, if a set of
    questions has the name of one of its fields, or if a check of the job fails. `reward_functions`,
    `task`: given from Python in place of those that the configuration names; an empty sequence or
    None for the configuration's. A `console` that is given can be used afterwards."""
    output = check_new_file(config.output, "output") if config.output else None
    check_model(config.model)
    with (
        console or Console() as console,
        Job(config, console, functions=reward_functions, task=task) as job,
    ):
        job.check()
        Findings(console).extend(job.findings.at("warning"))
        task = job.task
        taken = sorted(set(OUTPUT_FIELDS) & set(task.evaluations))
        if output and taken:
            raise ShoalError(
                f"output={output}: a set of questions is called {taken[0]!r}, the name of a field "
                "of this file; rename the set"
            )
        overlaps = shared_questions(config.model.path, task, console)
        params = config.sampling.params
        evaluator = make_evaluator(config, job.evaluation_sets, task)
        if config.evaluation.is_greedy and evaluator.pass_k and params.temperature == 0:
            console.note(
                "sampling.temperature=0: only greedy answers; pass@k and maj@k need samples that "
                "differ"
            )
        source = job.rollout_source
        source.publish(0, job.load_weights())  # as version 0
        answers = evaluator.answers(source, 0, 0, full=True)  # of version 0
        failures = source.read_stats(Purpose.EVALUATE).failures
        set_of_row: dict[int, str] = {}
        for name, of_set in answers.items():
            for group in of_set.main:  # a question in several sets belongs to the first
                set_of_row.setdefault(group.example.row, name)
        data = describe_data(config.task, task, job.tokenizer, bool(config.model.template))
        figures = {}
        shares = []
        for name, of_set in answers.items():
            # Failures of the reward functions on rows of this set.
            failed = [failure for failure in failures if set_of_row.get(failure.row) == name]
            of_name: dict[str, Any] = dict(evaluator.figures(of_set))
            of_name |= read_in_any_form(of_set, task)
            of_name |= failure_counts(failed)
            of_name["data"] = data
            if name in overlaps:
                of_name["overlapping_questions"] = overlaps[name].num_shared
            figures[name] = of_name
            if "well_formed" in of_name:
                shares.append(float(of_name["well_formed"]))
        report_evaluation(figures, failures, console)
        if shares and max(shares) < FEW_WELL_FORMED:
            console.note(well_formed_advice(task))
    if output:
        rows = []
        for name, of_set in answers.items():
            rows.extend(answer_rows(name, of_set, task))
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


def shared_questions(model: str, task: Task, console: Console) -> dict[str, Overlap]:
    """Returns set of questions -> how many of them the training data of the run `model` holds too,
    and warns of each set that shares any. {} if the model is no run, or its data is not known."""
    rows = rows_trained_on(model, console)
    if rows is None:
        return {}
    overlaps = {}
    for name, examples in task.evaluations.items():
        questions = [question_text(example, task.question) for example in examples]
        overlaps[name] = find_overlap(questions, rows)
        warning = overlaps[name].warning(name, model)
        if warning:
            console.warning(warning)
    return overlaps


def read_in_any_form(answers: Answers, task: Task) -> dict[str, float]:
    """Returns `accuracy_any_form`, the share of answers that are right when the answer is looked
    for anywhere in the text: judged by `task.verdict`. {} if the task has no `verdict` or no
    `extract`, and so reads answers in only one way, or if there are no answers."""
    if task.verdict is None or task.extract is None or not answers.main:
        return {}
    judged = []
    for group in answers.main:
        for answer in group.answers:
            judged.append(bool(task.verdict(answer, group.example)["correct"]))
    return {"accuracy_any_form": sum(judged) / len(judged)}


def well_formed_advice(task: Task) -> str:
    """Returns a sentence that advises `shoal sft` to teach a model the form of answers that the
    task's prompt asks for: on the task's own data if it is one of HAS_SOLUTIONS, else on a file of
    dialogues."""
    data = "task.path=DIALOGUES.jsonl with answers in that form"
    if task.name in HAS_SOLUTIONS:
        data = f"task={task.name}"
    return (
        "hardly any answer has the form that the prompt asks for, so a run would get few rewards: "
        f"have the model learn the form first, shoal sft {data}, or take an instruct model that "
        "follows the prompt"
    )


def describe_data(
    section: TaskSection, task: Task, tokenizer: Tokenizer, template_given: bool
) -> str:
    """Returns where the questions come from and which chat template their messages get: `gsm8k,
    split test, the model's chat template`. The split is left out for rows from Python and for a
    task that generates its questions. `template_given`: True if the key model.template chooses the
    template."""
    if section.name == ROWS:
        source = "rows from Python"
    elif section.path:
        source = f"{section.name} of {section.path}, split {section.eval_split}"
    elif task.of_row:
        source = f"{section.name}, split {section.eval_split}"
    else:
        source = section.name
    if template_given:
        template = "model.template"
    elif tokenizer.has_template:
        template = "the model's chat template"
    else:
        template = "no template"
    return f"{source}, {template}"


def answer_rows(subset: str, answers: Answers, task: Task) -> Iterator[dict[str, Any]]:
    """Yields a row for each question of a set named `subset`: `set`, `row` in the data, `question`,
    `gold` (its ground truth), and of its first answer `response`, `correct`, `reward`, `rewards`
    (function -> score), `length` in tokens and `stop_reason`; with `verdict` if the task makes one
    of an answer, and `samples`, a list with the same fields: of the samples for pass@k if there are
    any, or of all answers if the question has several."""
    for main, sampled in zip_longest(answers.main, answers.sampled):
        example = main.example
        row = {
            "set": subset,
            "row": example.row,
            "question": question_text(example, task.question),
            "gold": ground_truth(example.columns),
            **_scored_completion(main, 0),
        }
        if task.verdict is not None:
            row["verdict"] = task.verdict(main.answers[0], example)
        if main.size > 1:
            sampled = main
        if sampled is not None:
            row["samples"] = [_scored_completion(sampled, index) for index in range(sampled.size)]
        yield row


def _scored_completion(group: Group, index: int) -> Mapping[str, Any]:
    """Returns completion `index`, counted from 0, of a group as a row: `response` (its text),
    `correct` (None if the task does not judge it), `reward`, `rewards` (function -> score),
    `length` in tokens, and `stop_reason`."""
    completion = group.completions[index]
    return {
        "response": group.texts[index],
        "correct": None if group.correct is None else bool(group.correct[index]),
        "reward": group.rewards[index],
        "rewards": {name: values[index] for name, values in group.reward_components.items()},
        "length": len(completion),
        "stop_reason": completion.stop_reason,
    }
