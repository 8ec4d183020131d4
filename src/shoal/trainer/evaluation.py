"""Evaluation as requests for completions: greedy accuracy, and unbiased pass@k and maj@k of
samples, with a text that says how they were sampled."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np

from shoal.protocols import GroupRequest, RolloutSource
from shoal.records import Group, Purpose, SamplingParams
from shoal.runs.metrics import (
    known_mean,
    logged_name,
    majority_at_k,
    pass_at_k,
    standard_error,
    wilson_interval,
)
from shoal.tasks.task import Task
from shoal.text import exact
from shoal.trainer.prompts import TokenizedExample


@dataclass(frozen=True)
class Answers:
    """The answers of one version to the Q questions of a data set."""

    greedy: Sequence[Group]  # Q groups of one completion each
    # At most Q groups of `pass_k` completions each; empty if none were requested.
    sampled: Sequence[Group] = ()


@dataclass(frozen=True)
class Evaluator:
    """Evaluates one version of the weights.

    A full evaluation requests a greedy completion for each question of each data set, and `pass_k`
    sampled ones for the first `quick_questions` (0: all) questions of the main data set, which is
    the first of `sets`. A quick evaluation requests greedy completions alone, for the first
    `quick_questions` of each set. `task` decides which figures are computed.
    """

    sets: Mapping[str, Sequence[TokenizedExample]]
    params: SamplingParams
    pass_k: int
    task: Task
    quick_questions: int = 0

    def passes(
        self, subset: str, full: bool
    ) -> list[tuple[Sequence[TokenizedExample], int, SamplingParams]]:
        """Returns the passes over a data set, each as (questions, completions a question, sampling
        settings): a greedy one first, of all questions if `full`, else of the first
        `quick_questions` (0: all); then in a full evaluation of the main set a sampled one, of the
        first `quick_questions`, if `pass_k` and the temperature are above 0."""
        questions = self.sets[subset]
        quick_questions = questions[: self.quick_questions or None]
        greedy_questions = questions if full else quick_questions
        passes = [(greedy_questions, 1, self.params.as_greedy())]
        is_main = subset == next(iter(self.sets))
        # Not at temperature 0, where every sample would be the greedy answer: pass@k would say
        # nothing and cost k times as much.
        if full and is_main and self.pass_k > 0 and self.params.temperature > 0:
            passes.append((quick_questions, self.pass_k, self.params))
        return passes

    def num_completions(self, full: bool) -> int:
        """Returns how many completions an evaluation takes; a full one, which is made at a run's
        start and end, includes those for pass@k."""
        total = 0
        for subset in self.sets:
            for questions, count, _ in self.passes(subset, full):
                total += len(questions) * count
        return total

    def request_answers(self, source: RolloutSource, step: int, version: int, full: bool) -> None:
        """Requests the answers of one version; `collect` waits for them. `step` is the number under
        which they are collected; with `full` all questions are asked and the main set may be
        sampled too, else the first `quick_questions` of each set are asked."""
        for subset in self.sets:
            for questions, count, params in self.passes(subset, full):
                requests = []
                for question in questions:
                    request = GroupRequest(
                        purpose=Purpose.EVALUATE,
                        step=step,
                        version=version,
                        example=question.example,
                        prompt_ids=question.prompt_ids,
                        num_completions=count,
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
            # in the order of `passes`: greedy first
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
        """Returns the figures of one data set's answers, by name. Those of its greedy answers, such
        as `accuracy` and `mean_length`, come first; then those of its sampled ones, such as
        `pass@8`, if there are any."""
        return score_greedy(answers.greedy, self.task) | score_sampled(
            answers.sampled, self.params, self.task
        )

    def score(
        self, answers: Mapping[str, Answers]
    ) -> tuple[dict[str, dict[str, Any]], list[Group]]:
        """Returns (figures by data set, the greedy groups of all sets) of collected answers, whose
        rewards are known already."""
        figures = {}
        greedy_groups: list[Group] = []
        for subset, of_set in answers.items():
            figures[subset] = self.figures(of_set)
            greedy_groups.extend(of_set.greedy)
        return figures, greedy_groups


def score_greedy(groups: Sequence[Group], task: Task) -> dict[str, Any]:
    """Returns figures of greedy answers by name: `accuracy` and `accuracy_interval` if the answers
    have verdicts, the task's own figures, `well_formed` (the share of answers in the form that the
    task requires, if it requires one), `mean_reward`, the mean of each function as
    `rewards/<name>`, the mean of each number that functions stored with the answers as
    `rewards/logged/<name>` (such as `acc` of verl's functions), `mean_length` in sampled tokens,
    and `truncated` (the share of answers that reached the limit). Without groups there are only
    `num_questions`, 0, and `protocol`."""
    total = len(groups)
    rewards = [group.rewards[0] for group in groups]
    figures: dict[str, Any] = {"num_questions": total, "protocol": "greedy"}
    if total == 0:
        return figures
    solved = _solved(groups)
    if solved is None:
        figures["mean_reward"] = known_mean(rewards)
    else:
        # a greedy group has one completion
        right = int(solved[:, 0].sum())
        figures["accuracy"] = right / total
        figures["accuracy_interval"] = list(wilson_interval(right, total))
    # The task judges the texts again, because a reward may be a mixture, and IFEval has four
    # verdicts on one answer.
    if task.figures is not None and task.verdict is not None:
        verdicts = [task.verdict(group.answers[0], group.example) for group in groups]
        figures |= task.figures(verdicts)
    if task.well_formed is not None:
        well_formed = [task.well_formed(group.answers[0]) for group in groups]
        figures["well_formed"] = float(np.mean(well_formed))
    # Set above already if there are no verdicts: it then takes the place of the accuracy.
    figures.setdefault("mean_reward", known_mean(rewards))
    for name in groups[0].reward_components:
        of_function = [group.reward_components[name][0] for group in groups]
        figures[f"rewards/{name}"] = known_mean(of_function)
    figures |= _means_of_logged_numbers(groups)
    completions = [group.completions[0] for group in groups]
    figures["mean_length"] = float(np.mean([c.num_sampled for c in completions]))
    figures["truncated"] = float(np.mean([c.stop_reason == "length" for c in completions]))
    return figures


def _means_of_logged_numbers(groups: Sequence[Group]) -> dict[str, float]:
    """Returns the mean of each column that reward functions stored with greedy answers, if it holds
    numbers alone; answers without a value are left out."""
    names = []
    for group in groups:
        names.extend(name for name in group.extra if name not in names)
    means = {}
    for name in names:
        values = [group.extra[name][0] for group in groups if name in group.extra]
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
    by_question: dict[str, list[float]] = {}  # figure -> one value for each question
    solved = _solved(groups)
    if solved is not None:
        counts = [int(row.sum()) for row in solved]
        by_question[f"pass@{k}"] = [pass_at_k(k, count, k) for count in counts]
        if task.extract is not None:
            by_question[f"maj@{k}"] = _majorities(groups, solved, task.extract)
        shares = [count / k for count in counts]
        by_question["sampled_accuracy"] = shares
        by_question["pass@1"] = shares
        fewer = 2
        while fewer < k:
            by_question[f"pass@{fewer}"] = [pass_at_k(k, count, fewer) for count in counts]
            fewer *= 2
    figures: dict[str, Any] = {}
    for name, values in by_question.items():
        figures[name] = float(np.mean(values))
        figures[f"{name}_error"] = standard_error(values)
    figures["sampled_mean_reward"] = known_mean(np.concatenate([group.rewards for group in groups]))
    figures["sampled_num_questions"] = len(groups)
    figures["sampled_protocol"] = sampled_protocol(k, params)
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
    text = f"{k} completions a question at temperature {exact(params.temperature)}"
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
    """Returns bool[Q, G]: which completions are right; None if the groups have no verdicts, because
    the task defines no `correct`. If only some have verdicts, the others have no row."""
    known = [group.correct for group in groups if group.correct is not None]
    return np.stack(known) if known else None
