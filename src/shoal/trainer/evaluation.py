"""Evaluation as requests: greedy accuracy, and unbiased pass@k and maj@k of samples, with their
protocol."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np

from shoal.protocols import GroupRequest, RolloutSource
from shoal.records import Group, Purpose, SamplingParams
from shoal.runs.metrics import known_mean, majority_at_k, pass_at_k, standard_error, wilson_interval
from shoal.tasks.task import Task
from shoal.text import exact
from shoal.trainer.prompts import TokenizedExample


@dataclass(frozen=True)
class Answers:
    """The answers of one version to the Q questions of a set."""

    greedy: Sequence[Group]  # Q, of one completion each
    # At most Q, of `pass_k` completions each; empty where none were requested.
    sampled: Sequence[Group] = ()


@dataclass(frozen=True)
class Evaluator:
    """Evaluates one version. A full evaluation requests a greedy completion for each question of
    each data set, and `pass_k` sampled ones for the first `quick_questions` (0: all) of the main
    set, the first; a quick evaluation requests greedy completions alone, for these questions of
    each set. `task` decides what is counted of them."""

    sets: Mapping[str, Sequence[TokenizedExample]]
    params: SamplingParams
    pass_k: int
    task: Task
    quick_questions: int = 0

    def passes(
        self, subset: str, full: bool
    ) -> list[tuple[Sequence[TokenizedExample], int, SamplingParams]]:
        """The passes over a set, each as questions, completions a question and their settings: a
        greedy one, and in a full evaluation of the main set a sampled one."""
        questions = self.sets[subset]
        quick_questions = questions[: self.quick_questions or None]
        greedy_questions = questions if full else quick_questions
        passes = [(greedy_questions, 1, self.params.as_greedy())]
        is_main = subset == next(iter(self.sets))
        # At temperature 0 every sample would be the greedy answer: pass@k would say nothing and
        # cost k times as much.
        if full and is_main and self.pass_k > 0 and self.params.temperature > 0:
            passes.append((quick_questions, self.pass_k, self.params))
        return passes

    def num_completions(self, full: bool) -> int:
        """How many completions an evaluation takes; a full one, as at a run's ends, those of pass@k
        too."""
        total = 0
        for subset in self.sets:
            for questions, count, _ in self.passes(subset, full):
                total += len(questions) * count
        return total

    def request_answers(self, source: RolloutSource, step: int, version: int, full: bool) -> None:
        """Requests the answers of one version; `collect` takes them."""
        for subset in self.sets:
            for questions, count, params in self.passes(subset, full):
                requests = []
                for question in questions:
                    request = GroupRequest(
                        Purpose.EVALUATE,
                        step,
                        version,
                        question.example,
                        question.prompt_ids,
                        count,
                        params,
                        subset,
                    )
                    requests.append(request)
                source.request(requests)

    def collect(self, source: RolloutSource, step: int, full: bool) -> dict[str, Answers]:
        """The requested answers by data set; nothing where there is no data set."""
        if not self.sets:
            return {}
        # In the order in which they were requested, whichever finished first.
        taken = iter(source.take(Purpose.EVALUATE, step))
        answers = {}
        for subset in self.sets:
            by_pass = []
            for questions, _, _ in self.passes(subset, full):
                by_pass.append(list(islice(taken, len(questions))))
            sampled = by_pass[1] if len(by_pass) > 1 else ()
            answers[subset] = Answers(by_pass[0], sampled)
        return answers

    def answers(
        self, source: RolloutSource, step: int, version: int, full: bool
    ) -> dict[str, Answers]:
        """The answers by data set, requested and waited for."""
        self.request_answers(source, step, version, full)
        return self.collect(source, step, full)

    def figures(self, answers: Answers) -> dict[str, Any]:
        return score_greedy(answers.greedy, self.task) | score_sampled(
            answers.sampled, self.params, self.task
        )

    def score(
        self, answers: Mapping[str, Answers]
    ) -> tuple[dict[str, dict[str, Any]], list[Group]]:
        """Figures by data set, and the greedy groups."""
        figures = {}
        greedy_groups: list[Group] = []
        for subset, of_set in answers.items():
            figures[subset] = self.figures(of_set)
            greedy_groups.extend(of_set.greedy)
        return figures, greedy_groups


def score_greedy(groups: Sequence[Group], task: Task) -> dict[str, Any]:
    """Accuracy and its interval where the task defines `correct`, the task's own figures, the share
    of answers in the form that the task requires, if it requires one, the mean of each reward,
    lengths."""
    total = len(groups)
    rewards = [group.rewards[0] for group in groups]
    figures: dict[str, Any] = {"num_questions": total, "protocol": "greedy"}
    if total == 0:
        return figures
    solved = _solved(groups)
    if solved is None:
        figures["mean_reward"] = known_mean(rewards)
    else:
        right = int(solved[:, 0].sum())
        figures["accuracy"] = right / total
        figures["accuracy_interval"] = list(wilson_interval(right, total))
    # The text alone is judged again: a reward may be a mixture, and IFEval has four verdicts of one
    # answer.
    if task.figures is not None and task.verdict is not None:
        verdicts = [task.verdict(group.answers[0], group.example) for group in groups]
        figures |= task.figures(verdicts)
    if task.well_formed is not None:
        well_formed = [task.well_formed(group.answers[0]) for group in groups]
        figures["well_formed"] = float(np.mean(well_formed))
    figures.setdefault("mean_reward", known_mean(rewards))
    for name in groups[0].reward_components:
        of_function = [group.reward_components[name][0] for group in groups]
        figures[f"rewards/{name}"] = known_mean(of_function)
    completions = [group.completions[0] for group in groups]
    figures["mean_length"] = float(np.mean([c.num_sampled for c in completions]))
    figures["truncated"] = float(np.mean([c.stop_reason == "length" for c in completions]))
    return figures


def score_sampled(groups: Sequence[Group], params: SamplingParams, task: Task) -> dict[str, Any]:
    """pass@k of all k samples, of 1 and of the powers of 2 between, maj@k where the task extracts
    answers, the samples' mean reward, and their protocol.

    A figure's `_error` is the standard error of its mean over questions, which are independent;
    samples of one question are not."""
    if not groups:
        return {}
    k = groups[0].size
    by_question: dict[str, list[float]] = {}  # figure -> a value a question
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
    """maj@k of each question."""
    majorities = []
    for group, row in zip(groups, solved, strict=True):
        answers = [extract(text) for text in group.answers]
        majorities.append(float(majority_at_k(answers, row.tolist())))
    return majorities


def sampled_protocol(k: int, params: SamplingParams) -> str:
    """`8 completions a question at temperature 1, top_k 50`."""
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
    """bool[Q, G]: which completions are right; None where the task defines no `correct`."""
    known = [group.correct for group in groups if group.correct is not None]
    return np.stack(known) if known else None
