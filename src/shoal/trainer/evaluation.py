"""Evaluation as requests: greedy accuracy and unbiased pass@k of one version, with their protocol."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np

from shoal.report.metrics import pass_at_k, wilson_interval
from shoal.trainer.prompts import Prepared
from shoal.types import Group, GroupRequest, Purpose, RolloutSource, SamplingParams


@dataclass(frozen=True)
class Evaluator:
    """Asks for each data set's questions one greedy completion each; of the first set, where asked, `pass_k` sampled
    ones beside."""

    sets: Mapping[str, Sequence[Prepared]]
    params: SamplingParams
    pass_k: int
    well_formed: Callable[[str], bool] | None = None

    def request(self, source: RolloutSource, step: int, version: int, sampled: bool) -> None:
        greedy = self.params.as_greedy()
        for subset, questions in self.sets.items():

            def ask(prepared: Prepared, count: int, params: SamplingParams, subset: str = subset) -> GroupRequest:
                return GroupRequest(Purpose.EVALUATE, step, version, prepared.example, prepared.prompt_ids, count,
                                    params, subset)

            source.request([ask(question, 1, greedy) for question in questions])
            if sampled and self._is_sampled(subset):
                source.request([ask(question, self.pass_k, self.params) for question in questions])

    def _is_sampled(self, subset: str) -> bool:
        """pass@k is measured on the main set, the first."""
        return self.pass_k > 0 and subset == next(iter(self.sets))

    def evaluate(self, source: RolloutSource, step: int, version: int,
                 sampled: bool) -> tuple[dict[str, dict[str, Any]], list[Group]]:
        """Figures by data set, and the greedy groups; nothing where there is no data set."""
        if not self.sets:
            return {}, []
        self.request(source, step, version, sampled)
        taken = iter(source.take(Purpose.EVALUATE, step))  # in the order asked
        figures, answers = {}, []
        for subset, questions in self.sets.items():
            greedy = list(islice(taken, len(questions)))
            several = list(islice(taken, len(questions))) if sampled and self._is_sampled(subset) else []
            figures[subset] = score_greedy(greedy, self.well_formed) | self._score_sampled(several)
            answers += greedy
        return figures, answers

    def _score_sampled(self, groups: Sequence[Group]) -> dict[str, Any]:
        """pass@k and its protocol; nothing where the task defines no `correct`."""
        solved = [int(group.correct.sum()) for group in groups if group.correct is not None]
        if not solved:
            return {}
        k, p = self.pass_k, self.params
        truncation = (("top_k", p.top_k, 0), ("top_p", p.top_p, 1), ("min_p", p.min_p, 0))
        return {
            f"pass@{k}": float(np.mean([pass_at_k(k, c, k) for c in solved])),
            "sampled_accuracy": float(np.mean(solved) / k),
            "sampled_protocol": f"{k} completions a question at temperature {p.temperature:g}" + "".join(
                f", {name} {value:g}" for name, value, off in truncation if value != off),
        }


def score_greedy(groups: Sequence[Group], well_formed: Callable[[str], bool] | None = None) -> dict[str, Any]:
    """Accuracy (mean reward where a task defines no `correct`), its interval, the share of answers in the asked form
    where the task defines one, and the mean of each reward."""
    total = len(groups)
    rewards = np.array([group.rewards[0] for group in groups])
    figures: dict[str, Any] = {"num_questions": total, "protocol": "greedy"}
    if total == 0:
        return figures
    if groups[0].correct is not None:
        right = sum(int(group.correct[0]) for group in groups if group.correct is not None)
        figures |= {"accuracy": right / total, "accuracy_interval": list(wilson_interval(right, total))}
    else:
        figures["protocol"] = "greedy; mean reward stands in for accuracy, the task defines none"
        figures["accuracy"] = _known_mean(rewards)
    if well_formed is not None:
        figures["well_formed"] = float(np.mean([well_formed(group.texts[0]) for group in groups]))
    figures["mean_reward"] = _known_mean(rewards)
    for name in groups[0].reward_components:
        figures[f"rewards/{name}"] = _known_mean(np.array([group.reward_components[name][0] for group in groups]))
    figures["mean_length"] = float(np.mean([len(group.completions[0]) for group in groups]))
    figures["cut"] = float(np.mean([group.completions[0].stop_reason == "length" for group in groups]))
    return figures


def _known_mean(values: np.ndarray) -> float | None:
    """Mean of what is not NaN; None where all is."""
    known = values[~np.isnan(values)]
    return float(known.mean()) if len(known) else None
