"""Evaluation as requests: greedy accuracy and unbiased pass@k of one version, with their protocol."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from shoal.report.metrics import pass_at_k, wilson_interval
from shoal.trainer.prompts import Prepared
from shoal.types import Group, GroupRequest, Purpose, RolloutSource, SamplingParams


@dataclass(frozen=True)
class Evaluator:
    """Asks for each data set's questions: one greedy completion each, and `pass_k` sampled ones where asked."""

    sets: Mapping[str, Sequence[Prepared]]
    params: SamplingParams
    pass_k: int

    def request(self, source: RolloutSource, step: int, version: int, sampled: bool) -> None:
        greedy = replace(self.params, temperature=0.0, top_k=0, top_p=1.0, min_p=0.0)
        for subset, questions in self.sets.items():
            def ask(prepared: Prepared, count: int, params: SamplingParams, subset: str = subset) -> GroupRequest:
                return GroupRequest(Purpose.EVALUATE, step, version, prepared.example, prepared.prompt_ids, count,
                                    params, subset)

            source.request([ask(question, 1, greedy) for question in questions])
            if sampled and self.pass_k:
                source.request([ask(question, self.pass_k, self.params) for question in questions])

    def evaluate(self, source: RolloutSource, step: int, version: int,
                 sampled: bool) -> tuple[dict[str, dict[str, Any]], list[Group]]:
        """Figures by data set, and the greedy groups."""
        self.request(source, step, version, sampled)
        groups = source.take(Purpose.EVALUATE, step)
        figures = {subset: self._figures([group for group in groups if group.subset == subset])
                   for subset in self.sets}
        return figures, [group for group in groups if group.size == 1]

    def _figures(self, groups: Sequence[Group]) -> dict[str, Any]:
        greedy = [group for group in groups if group.size == 1]
        figures = score_greedy(greedy)
        sampled = [group for group in groups if group.size > 1]
        if sampled and sampled[0].correct is not None:
            solved = [int(group.correct.sum()) for group in sampled if group.correct is not None]
            k, p = self.pass_k, self.params
            figures[f"pass@{k}"] = float(np.mean([pass_at_k(k, c, k) for c in solved]))
            figures["sampled_accuracy"] = float(np.mean(solved) / k)
            figures["sampled_protocol"] = f"{k} completions a question at temperature {p.temperature:g}" + "".join(
                f", {name} {value:g}" for name, value, off in
                (("top_k", p.top_k, 0), ("top_p", p.top_p, 1), ("min_p", p.min_p, 0)) if value != off)
        return figures


def score_greedy(groups: Sequence[Group]) -> dict[str, Any]:
    """Accuracy (mean reward where a task defines no `correct`), its interval, and the mean of each reward."""
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
        figures["accuracy"] = float(np.nanmean(rewards))
    figures["mean_reward"] = float(np.nanmean(rewards)) if not np.isnan(rewards).all() else None
    for name in groups[0].reward_components:
        figures[f"rewards/{name}"] = float(np.nanmean([group.reward_components[name][0] for group in groups]))
    figures["mean_length"] = float(np.mean([len(group.completions[0]) for group in groups]))
    figures["cut"] = float(np.mean([group.completions[0].stop_reason == "length" for group in groups]))
    return figures
