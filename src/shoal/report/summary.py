"""The end of a run in figures: accuracy before and after, speeds, and a problem that was learned on the way."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from shoal.types import Group, Prompt

EvaluationFigures: TypeAlias = "Mapping[str, Mapping[str, Any]]"
"""Data set -> figure -> value, of one evaluation."""
WrongAnswers: TypeAlias = "dict[str, dict[int, str]]"
"""Data set -> row -> text of a greedy answer that was wrong."""


@dataclass(frozen=True)
class SolvedProblem:
    """A problem that was wrong before training and is right after it: the prompt and both answers."""

    prompt: Prompt
    before: str
    after: str


def wrong_answers(groups: Sequence[Group]) -> WrongAnswers:
    found: WrongAnswers = {}
    for group in groups:
        if group.correct is not None and not group.correct[0]:
            found.setdefault(group.subset, {})[group.example.row] = group.texts[0]
    return found


def solved_problem(before: WrongAnswers, after: Sequence[Group]) -> SolvedProblem | None:
    """The first question that was answered wrong before and is answered right after."""
    for group in after:
        wrong = before.get(group.subset, {}).get(group.example.row)
        if wrong is not None and group.correct is not None and group.correct[0]:
            return SolvedProblem(group.example.prompt, wrong, group.texts[0])
    return None


def token_account(counts: Mapping[str, int]) -> dict[str, int]:
    """Tokens that hosts sampled, and what became of them; `unused` are those of cancelled groups, and under way."""
    ends = {name: counts.get(name, 0) for name in ("trained", "discarded", "evaluated", "lost")}
    return {"sampled": counts.get("sampled", 0), **ends, "unused": counts.get("sampled", 0) - sum(ends.values())}


def summarise(evaluations: Mapping[int, EvaluationFigures], last: int, started: float, seconds: Mapping[str, float],
              totals: Mapping[str, float]) -> dict[str, Any]:
    """What summary.json says of evaluations and speed. `last`: the version after the last step; `seconds`: by phase."""
    before, after = evaluations.get(0, {}), evaluations.get(last, {})
    main = next(iter(after), None)
    first, final = (before[main], after[main]) if main else ({}, {})
    phases = {name: value for name, value in seconds.items() if name != "training"}

    def speed(total: str, phase: str) -> float | None:
        return totals[total] / phases[phase] if phases.get(phase) else None

    return {
        "accuracy_before": first.get("accuracy"),
        "accuracy_after": final.get("accuracy"),
        "mean_reward_before": first.get("mean_reward"),
        "mean_reward_after": final.get("mean_reward"),
        "num_questions": final["num_questions"] if main else 0,
        "protocol": final["protocol"] if main else None,
        "before": before,
        "after": after,
        "seconds_total": time.perf_counter() - started,
        "seconds_by_phase": phases,
        "seconds_training": seconds.get("training", 0.0),
        "sample_tokens_per_second": speed("tokens/sampled", "sample"),
        "train_tokens_per_second": speed("tokens/trained", "update"),
    }
