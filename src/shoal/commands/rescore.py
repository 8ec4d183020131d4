"""`shoal rescore`: scores a run's stored groups with other reward functions, without a model, and
compares the rewards."""

from __future__ import annotations

from typing import Any

from shoal.config.commands import RescoreConfig
from shoal.job.rescore import score_again
from shoal.report.console import Console
from shoal.runs.layout import find_run
from shoal.runs.reader import StoredRun
from shoal.tasks.builtin_rewards import PENALTY
from shoal.text import count, figure

SHOWN_FIGURES = (
    "min",
    "max",
    "std",
    "num_distinct",
    "share_of_constant_groups",
    "seconds_per_completion",
    "correlation_with_length",
    "unscorable",
)
"""Figures of the new reward that are printed."""


def rescore(config: RescoreConfig, console: Console | None = None) -> dict[str, Any]:
    """Scores a run's stored training groups with other reward functions, and prints and returns how
    the new rewards compare with the stored ones: the means and how many advantages change their
    sign (`comparison`), what is suspicious about the new reward (`lint`), and completions that only
    the new one scores high (`hacks`). The functions are `reward.functions`, by default those of the
    run, as their files are now. `config.step`: a step, from 1, whose groups are then returned too;
    0: all steps. Changes nothing in the run's folder. ShoalError if the run has no stored groups,
    or not this step. A `console` that is given can be used afterwards; None: one for this
    command."""
    with console or Console() as console:
        run = StoredRun(find_run(config.run))
        algorithm = run.config.algorithm
        if algorithm.kl_placement == "reward" and algorithm.kl_coef:
            console.note(
                "the run subtracted a divergence from its rewards (algorithm.kl_placement=reward): "
                "stored advantages contain it, new ones do not"
            )
        if algorithm.has_critic:
            console.note(
                "the run's advantages came from a critic, whose values are not stored: new "
                "advantages are 0, and only rewards are compared"
            )
        if run.config.turns:
            console.note(
                "environments are not stored, nor are fields of rollout functions: functions get "
                "the messages of rollouts without them, and the environments' own rewards are left "
                "out"
            )
        result = score_again(run, config.reward, config.step)
        if PENALTY in result["functions"] and not config.reward.overlong_buffer_tokens:
            console.note(
                "the run's penalty on long completions (overlong) is part of the new reward, as it "
                "is of the stored one; reward.overlong_buffer_tokens sets another"
            )
        _report(result, console)
    return result


def _report(result: dict[str, Any], console: Console) -> None:
    """Prints the record that `rescore` returns: stored and new rewards side by side, figures and
    warnings about the new reward, and completions that only the new reward scores high, each with
    the first 200 characters of its text."""
    comparison = result["comparison"]
    lint = result["lint"]
    heading = (
        f"{', '.join(result['functions'])} on {count(result['num_groups'], 'group')} of "
        f"{count(len(result['steps']), 'step')}"
    )
    if not result["finished"]:
        heading += " (the run has not finished)"
    console.heading(heading)
    old_mean, new_mean = comparison["reward_mean"]
    old_mixed, new_mixed = comparison["nonzero_std_groups"]
    rows = [
        ("mean reward", figure(old_mean, 3), figure(new_mean, 3)),
        ("mixed groups", str(old_mixed), str(new_mixed)),
    ]
    console.table(("", "stored", "new"), rows)
    compared = count(comparison["completions_compared"], "advantage")
    console.text(f"{comparison['advantages_flipped']} of {compared} change their sign")
    rows = []
    for name in SHOWN_FIGURES:
        rows.append((name.replace("_", " "), figure(lint[name], 3)))
    console.table(("the new reward", ""), rows)
    for warning in lint["warnings"]:
        console.warning(warning)
    num_without_advantages = result["advantages_not_stored"]
    if num_without_advantages:
        verb = "was" if num_without_advantages == 1 else "were"
        console.note(
            f"{count(num_without_advantages, 'group')} {verb} stored without advantages: their old "
            "ones follow the settings"
        )
    for hack in result["hacks"]:
        console.text(
            f"scored {figure(hack['reward'], 3)} where the stored reward was lowest "
            f"({figure(hack['old_reward'], 3)}): step {hack['step']}, group {hack['group']}, "
            f"completion {hack['completion']}: {hack['text'][:200]!r}"
        )
