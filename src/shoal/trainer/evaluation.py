"""Evaluation as requests for completions: accuracy of greedy or sampled answers, and unbiased
pass@k and maj@k of samples, with a text that says how they were sampled."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np

from shoal.config.commands import EvalConfig
from shoal.config.train import Config
from shoal.protocols import GroupRequest, RolloutSource
from shoal.records import Group, Purpose, SamplingParams
from shoal.runs.metrics import (
    known_mean,
    logged_name,
    majority_at_k,
    name_part,
    pass_at_k,
    standard_error,
    wilson_interval,
)
from shoal.runs.reward_changes import ACCURACY_BY
from shoal.tasks.task import Task
from shoal.text import count, exact
from shoal.trainer.prompts import TokenizedExample


@dataclass(frozen=True)
class Answers:
    """The answers of one version to the Q questions of a data set."""

    main: Sequence[Group]  # Q groups of `num_samples` completions each
    # At most Q groups of `pass_k` completions each; empty if none were requested.
    sampled: Sequence[Group] = ()


@dataclass(frozen=True)
class Evaluator:
    """Evaluates one version of the weights.

    A full evaluation requests answers to each question of each data set, and `pass_k` sampled
    completions for the first `quick_questions` (0: all) questions of the main data set, which is
    the first of `sets`. A quick evaluation requests answers alone, for the first `quick_questions`
    of each set. `task` decides which figures are computed.

    `num_samples`, `answer_params`: how many answers each question gets, and how they are
    sampled; None: greedily. `params`: how the completions for pass@k are sampled.
    """

    sets: Mapping[str, Sequence[TokenizedExample]]
    params: SamplingParams
    pass_k: int
    task: Task
    quick_questions: int = 0
    num_samples: int = 1
    answer_params: SamplingParams | None = None

    @property
    def main_params(self) -> SamplingParams:
        """How the answers are sampled."""
        return self.answer_params or self.params.as_greedy()

    @property
    def protocol(self) -> str:
        """A text that says how the answers are sampled."""
        if self.main_params.temperature == 0:
            return "greedy"
        text = sampled_protocol(self.num_samples, self.main_params)
        return f"mean of {text}" if self.num_samples > 1 else text

    def passes(
        self, subset: str, full: bool
    ) -> list[tuple[Sequence[TokenizedExample], int, SamplingParams]]:
        """Returns the passes over a data set, each as (questions, completions a question, sampling
        settings): the answers first, to all questions if `full`, else to the first
        `quick_questions` (0: all); then, if the answers are greedy, in a full evaluation of the
        main set a sampled one, of the first `quick_questions`, if `pass_k` and the temperature are
        above 0."""
        questions = self.sets[subset]
        quick_questions = questions[: self.quick_questions or None]
        answered = questions if full else quick_questions
        passes = [(answered, self.num_samples, self.main_params)]
        is_main = subset == next(iter(self.sets))
        # Sampled answers give pass@k themselves. Not at temperature 0, where every sample would be
        # the greedy answer: pass@k would say nothing and cost k times as much.
        is_greedy = self.main_params.temperature == 0
        can_differ = self.params.temperature > 0
        if full and is_main and is_greedy and self.pass_k > 0 and can_differ:
            passes.append((quick_questions, self.pass_k, self.params))
        return passes

    def num_completions(self, full: bool) -> int:
        """Returns how many completions an evaluation takes; a full one, which is made at a run's
        start and end, includes those for pass@k."""
        total = 0
        for subset in self.sets:
            for questions, size, _ in self.passes(subset, full):
                total += len(questions) * size
        return total

    def request_answers(self, source: RolloutSource, step: int, version: int, full: bool) -> None:
        """Requests the answers of one version; `collect` waits for them. `step` is the number under
        which they are collected; with `full` all questions are asked and the main set may be
        sampled too, else the first `quick_questions` of each set are asked."""
        for subset in self.sets:
            for questions, size, params in self.passes(subset, full):
                requests = []
                for question in questions:
                    request = GroupRequest(
                        purpose=Purpose.EVALUATE,
                        step=step,
                        version=version,
                        example=question.example,
                        prompt_ids=question.prompt_ids,
                        num_completions=size,
                        params=params,
                        subset=subset,
                    )
                    requests.append(request)
                source.request(requests)

    def collect(self, source: RolloutSource, step: int, full: bool) -> dict[str, Answers]:
        """Waits for the requested answers, and returns them by data set; {} if there is no data
        set. `step` and `full` must be those of the request."""
        if not self.sets:
            return {}
        # Groups come in the order in which they were requested, whichever finished first.
        taken = iter(source.take(Purpose.EVALUATE, step))
        answers = {}
        for subset in self.sets:
            by_pass = []
            for questions, _, _ in self.passes(subset, full):
                by_pass.append(list(islice(taken, len(questions))))
            # in the order of `passes`: the answers first
            sampled = by_pass[1] if len(by_pass) > 1 else ()
            answers[subset] = Answers(by_pass[0], sampled)
        return answers

    def answers(
        self, source: RolloutSource, step: int, version: int, full: bool
    ) -> dict[str, Answers]:
        """Requests the answers of one version, waits for them, and returns them by data set. `step`
        is the number under which they are requested and collected. With `full` all questions are
        asked, and the main set may be sampled too; else the first `quick_questions` of each set are
        asked."""
        self.request_answers(source, step, version, full)
        return self.collect(source, step, full)

    def figures(self, answers: Answers) -> dict[str, Any]:
        """Returns the figures of one data set's answers, by name. `accuracy`, `mean_length` and the
        like come first; then those of samples, such as `pass@8`, if there are any."""
        return score_answers(answers.main, self.task, self.protocol) | score_sampled(
            answers.sampled, self.params, self.task
        )

    def score(
        self, answers: Mapping[str, Answers]
    ) -> tuple[dict[str, dict[str, Any]], list[Group]]:
        """Returns (figures by data set, the groups of answers of all sets) of collected answers,
        whose rewards are known already."""
        figures = {}
        groups: list[Group] = []
        for subset, of_set in answers.items():
            figures[subset] = self.figures(of_set)
            groups.extend(of_set.main)
        return figures, groups


def make_evaluator(
    config: Config | EvalConfig, sets: Mapping[str, Sequence[TokenizedExample]], task: Task
) -> Evaluator:
    """Returns the evaluator of a run, or of `shoal eval`, as its configuration says. `sets`: name
    -> questions, the main set first."""
    if isinstance(config, EvalConfig):
        quick_questions = 0
        pass_k = config.for_task(task.judges).pass_k
    else:
        quick_questions = config.quick_questions
        pass_k = config.pass_k
    params = config.sampling.params
    return Evaluator(
        sets=sets,
        params=params,
        pass_k=pass_k,
        task=task,
        quick_questions=quick_questions,
        num_samples=config.evaluation.samples,
        answer_params=config.evaluation.params(params),
    )


def score_answers(groups: Sequence[Group], task: Task, protocol: str = "greedy") -> dict[str, Any]:
    """Returns figures of answers by name, each a mean over all answers to a question and over the
    questions: `accuracy` and `accuracy_interval` if the answers have verdicts, `accuracy_by` if
    these are what a reward function logged as `acc`, the task's own figures, `well_formed` (the
    share of answers in the form that the task requires, if it requires one), `mean_reward`, the
    mean of each function as `rewards/<name>`, the mean of each number that functions stored with
    the answers as `rewards/logged/<name>` (such as `acc` of verl's functions), `mean_length` in
    sampled tokens, and `truncated` (the share of answers that reached the limit). If questions have
    several answers, pass@k and maj@k of them follow, with their errors (`_figures_of_samples`), or
    without verdicts `best_reward`, the mean of the highest reward of each question. If the
    questions have several values in the column `data_source`, the figures of each follow
    (`_figures_by_source`). Without groups there are only `num_questions`, 0, and `protocol`.

    `groups`: a group for each question, all of one size. `protocol`: a text that says how the
    answers were sampled."""
    total = len(groups)
    figures: dict[str, Any] = {"num_questions": total, "protocol": protocol}
    if total == 0:
        return figures
    size = groups[0].size
    rewards = np.concatenate([group.rewards for group in groups])
    solved = _solved(groups)
    if solved is None:
        figures["mean_reward"] = known_mean(rewards)
    else:
        right = int(solved.sum())
        figures["accuracy"] = right / (total * size)
        # Questions are independent, answers to one question are not. So the interval is that of one
        # answer a question, which is never too narrow.
        figures["accuracy_interval"] = list(wilson_interval(right / size, total))
        if not task.judges:
            figures[ACCURACY_BY] = "reward"
    # The task judges the texts again, because a reward may be a mixture, and IFEval has four
    # verdicts on one answer.
    if task.figures is not None and task.verdict is not None:
        verdicts = []
        for group in groups:
            verdicts.extend(task.verdict(answer, group.example) for answer in group.answers)
        figures |= task.figures(verdicts)
    if task.well_formed is not None:
        well_formed = [task.well_formed(answer) for group in groups for answer in group.answers]
        figures["well_formed"] = float(np.mean(well_formed))
    # Set above already if there are no verdicts: it then takes the place of the accuracy.
    figures.setdefault("mean_reward", known_mean(rewards))
    for name in groups[0].reward_components:
        of_function = np.concatenate([group.reward_components[name] for group in groups])
        figures[f"rewards/{name}"] = known_mean(of_function)
    figures |= _means_of_logged_numbers(groups)
    completions = [completion for group in groups for completion in group.completions]
    figures["mean_length"] = float(np.mean([c.num_sampled for c in completions]))
    figures["truncated"] = float(np.mean([c.stop_reason == "length" for c in completions]))
    if size > 1 and solved is not None:
        figures |= _figures_of_samples(groups, solved, task)
    elif size > 1:
        highest = [float(np.fmax.reduce(group.rewards)) for group in groups]  # NaN if none is known
        figures["best_reward"] = known_mean(highest)
    return figures | _figures_by_source(groups)


def _figures_by_source(groups: Sequence[Group]) -> dict[str, float | None]:
    """Returns the accuracy, if the answers have verdicts, the mean reward and the means of logged
    numbers of the questions of each data set that the column `data_source` names, such as
    `accuracy/<source>` and `mean_reward/<source>`. {} if they name fewer than two."""
    by_source: dict[str, list[Group]] = {}
    for group in groups:
        source = group.example.columns.get("data_source")
        if source:
            by_source.setdefault(name_part(source), []).append(group)
    if len(by_source) < 2:
        return {}
    figures: dict[str, float | None] = {}
    for source, of_source in by_source.items():
        solved = _solved(of_source)
        if solved is not None:
            figures[f"accuracy/{source}"] = float(solved.mean())
        rewards = np.concatenate([group.rewards for group in of_source])
        figures[f"mean_reward/{source}"] = known_mean(rewards)
        for name, mean in _means_of_logged_numbers(of_source).items():
            figures[f"{name}/{source}"] = mean
    return figures


def _means_of_logged_numbers(groups: Sequence[Group]) -> dict[str, float]:
    """Returns the mean of each column that reward functions stored with answers, if it holds
    numbers alone; answers without a value are left out."""
    names = []
    for group in groups:
        names.extend(name for name in group.extra if name not in names)
    means = {}
    for name in names:
        values = []
        for group in groups:
            values.extend(group.extra.get(name, ()))
        known = [value for value in values if value is not None]
        if known and all(isinstance(value, int | float) for value in known):
            means[logged_name(name)] = float(np.mean(known))
    return means


def score_sampled(groups: Sequence[Group], params: SamplingParams, task: Task) -> dict[str, Any]:
    """Returns figures of sampled answers by name: if the answers have verdicts, pass@k for k
    samples, for 1 and for the powers of 2 between, `sampled_accuracy` (the same as pass@1), and
    maj@k if the task extracts answers; `sampled_mean_reward`, `sampled_num_questions`, and
    `sampled_protocol`, a text that says how they were sampled. {} if there are no groups.

    Each figure of verdicts has a second one, `<name>_error`: the standard error of the mean over
    questions, which are independent; samples of one question are not.
    """
    if not groups:
        return {}
    k = groups[0].size
    figures: dict[str, Any] = {}
    solved = _solved(groups)
    if solved is not None:
        figures = _figures_of_samples(groups, solved, task)
        for part in ("", "_error"):
            figures[f"sampled_accuracy{part}"] = figures[f"pass@1{part}"]
    figures["sampled_mean_reward"] = known_mean(np.concatenate([group.rewards for group in groups]))
    figures["sampled_num_questions"] = len(groups)
    figures["sampled_protocol"] = sampled_protocol(k, params)
    return figures


def _figures_of_samples(
    groups: Sequence[Group], solved: np.ndarray, task: Task
) -> dict[str, float | None]:
    """Returns pass@k for the k samples of a question, for 1 and for the powers of 2 between, and
    maj@k if the task extracts answers, each with its standard error. `solved` is bool[Q, k]: which
    answers are right."""
    k = groups[0].size
    numbers_right = [int(row.sum()) for row in solved]
    by_question: dict[str, list[float]] = {}  # figure -> one value for each question
    by_question[f"pass@{k}"] = [pass_at_k(k, right, k) for right in numbers_right]
    if task.extract is not None:
        by_question[f"maj@{k}"] = _majorities(groups, solved, task.extract)
    by_question["pass@1"] = [right / k for right in numbers_right]
    fewer = 2
    while fewer < k:
        by_question[f"pass@{fewer}"] = [pass_at_k(k, right, fewer) for right in numbers_right]
        fewer *= 2
    figures: dict[str, float | None] = {}
    for name, values in by_question.items():
        figures[name] = float(np.mean(values))
        figures[f"{name}_error"] = standard_error(values)
    return figures


def _majorities(
    groups: Sequence[Group], solved: np.ndarray, extract: Callable[[str], Any]
) -> list[float]:
    """Returns maj@k of each question: 1.0 if its most frequent answer is right, else 0.0. `solved`
    is bool[Q, k]: which answers are right; `extract` returns the answer in a completion's text."""
    majorities = []
    for group, row in zip(groups, solved, strict=True):
        answers = [extract(text) for text in group.answers]
        majorities.append(float(majority_at_k(answers, row.tolist())))
    return majorities


def sampled_protocol(k: int, params: SamplingParams) -> str:
    """Returns a text that says how samples were taken, for example `8 completions a question at
    temperature 1, top_k 50`. A setting that is off is left out."""
    text = f"{count(k, 'completion')} a question at temperature {exact(params.temperature)}"
    truncation = (
        ("top_k", params.top_k, 0),
        ("top_p", params.top_p, 1),
        ("min_p", params.min_p, 0),
    )
    for name, value, off in truncation:
        if value != off:
            text += f", {name} {exact(value)}"
    return text


def _solved(groups: Sequence[Group]) -> np.ndarray | None:
    """Returns bool[Q, G]: which completions are right; None if no group has verdicts, because
    neither the task nor a reward function says which answers are right. A group without verdicts
    among others that have some, such as one whose reward function failed, has no right answer."""
    if all(group.correct is None for group in groups):
        return None
    rows = []
    for group in groups:
        unknown = np.zeros(group.size, dtype=bool)
        rows.append(unknown if group.correct is None else group.correct)
    return np.stack(rows)
