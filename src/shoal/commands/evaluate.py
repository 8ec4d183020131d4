"""`shoal eval`: the figures of one model on one task, with their protocol, and every answer in a file."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from itertools import zip_longest
from typing import Any

from shoal.commands.responses import question_of
from shoal.config.schema import EvalConfig, TaskSection
from shoal.mesh import make_roles
from shoal.model.tokenizer import Tokenizer
from shoal.report.console import Console
from shoal.report.lines import json_ready
from shoal.rewards.judge import Judge
from shoal.rewards.scores import Failure, failed_figures, failure_lines
from shoal.rollout.player import Player
from shoal.rollout.source import LocalSource
from shoal.run.assembly import compute_dtype, engine_maker, make_model, open_model, prepare_sets
from shoal.run.output import check_writable, write_text
from shoal.run.task import load_task, with_overlong
from shoal.tasks.data import evaluating
from shoal.tasks.task import ROWS, Task
from shoal.trainer.evaluation import Answers, Evaluator
from shoal.trainer.loop import sampling_params
from shoal.types import Group, ShoalError, ground_truth

BESIDE = ("task", "model", "seed", "max_completion_tokens", "rows")
"""What stands in the file of answers beside the sets of questions."""


def evaluate(config: EvalConfig, reward_functions: Sequence[Callable] = (),
             console: Console | None = None, task: Task | None = None) -> dict[str, Any]:
    """`shoal eval`: figures by data set, with their protocol."""
    output = check_writable(config.output, "output") if config.output else None
    with console or Console() as console, ExitStack() as stack:
        with evaluating():
            task = task or load_task(config.task, config.reward, reward_functions)
        task = with_overlong(task, config.reward, config.sampling.max_completion_tokens)
        if output and (taken := sorted(set(BESIDE) & set(task.evaluations))):
            raise ShoalError(f"output={output}: a set of questions cannot be called {taken[0]!r} there; give it "
                             "another name")
        judge = stack.enter_context(closing(Judge(task.rewards, config.reward)))
        roles = make_roles(config.mesh)
        opened = open_model(config.model, roles.sampler, console, compute_dtype(config.model.dtype))
        for note in task.notes:
            console.note(note)
        params = sampling_params(config.sampling)
        if config.pass_k and params.temperature == 0:
            console.note("sampling.temperature=0: greedy answers alone; pass@k and maj@k need samples that differ")
        model = make_model(config.model, opened, roles.sampler, 0)
        make = engine_maker(model, opened.tokenizer, config.sampling, config.batch * roles.sampler.mesh.size)
        source = LocalSource(model, Player(make, task, judge, opened.tokenizer.decode, config.seed))
        source.player.on_progress = console.answered
        source.publish(0, opened.load())
        sets = prepare_sets(task, opened.tokenizer, config.sampling, console)
        evaluator = Evaluator(sets, params, config.pass_k, task)
        answers = evaluator.answers(source, 0, 0, sampled=True)
        data = data_text(config.task, task, opened.tokenizer, bool(config.model.template))
        failures = source.read_clock().failures
        failed = _failures_by_set(answers, failures)
        figures = {subset: evaluator.figures(own) | failed_figures(failed[subset]) | {"data": data}
                   for subset, own in answers.items()}
        for subset, values in figures.items():
            console.evaluation(subset, values)
        for line in failure_lines(failures):
            console.warning(line)
    if output:
        about = {"task": task.name, "model": config.model.path, "seed": config.seed,
                 "max_completion_tokens": params.max_tokens}
        rows = [row for subset, own in answers.items() for row in answer_rows(subset, own, task)]
        write_text(output, json.dumps(json_ready({**about, **figures, "rows": rows}), indent=2,
                                      ensure_ascii=False) + "\n")
    return figures


def _failures_by_set(answers: Mapping[str, Answers], failures: Sequence[Failure]) -> dict[str, list[Failure]]:
    """Those of each set's questions; of one that several sets have, the first set's."""
    owner = {group.example.row: name for name in reversed(list(answers)) for group in answers[name].greedy}
    return {subset: [failure for failure in failures if owner.get(failure.row) == subset] for subset in answers}


def data_text(section: TaskSection, task: Task, tokenizer: Tokenizer, given: bool) -> str:
    """Which questions were asked, and how their messages were written; `given`: by model.template."""
    template = "model.template" if given else "the model's chat template" if tokenizer.has_template else "no template"
    return f"{_source_text(section, task)}, {template}"


def _source_text(section: TaskSection, task: Task) -> str:
    if section.name == ROWS:
        return "rows from Python"
    if section.path:
        return f"{section.name} of {section.path}, split {section.eval_split}"
    return f"{section.name}, split {section.eval_split}" if task.of_row else section.name


def answer_rows(subset: str, answers: Answers, task: Task) -> Iterator[dict[str, Any]]:
    """A row a question: what was asked, what is right, the greedy answer and the samples, judged."""
    for greedy, sampled in zip_longest(answers.greedy, answers.sampled):
        example = greedy.example
        row = {"set": subset, "row": example.row, "question": question_of(example, task.question),
               "gold": ground_truth(example.columns), **_judged(greedy, 0)}
        if task.verdict is not None:
            row["verdict"] = task.verdict(greedy.texts[0], example)
        if sampled is not None:
            row["samples"] = [_judged(sampled, index) for index in range(sampled.size)]
        yield row


def _judged(group: Group, index: int) -> Mapping[str, Any]:
    """One completion of a group, and how it did."""
    completion = group.completions[index]
    return {
        "response": group.texts[index],
        "correct": None if group.correct is None else bool(group.correct[index]),
        "reward": group.rewards[index],
        "rewards": {name: values[index] for name, values in group.reward_components.items()},
        "length": len(completion),
        "stop_reason": completion.stop_reason,
    }
