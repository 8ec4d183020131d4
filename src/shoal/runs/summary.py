"""A run's figures as lines for people: a step, an evaluation, the summary at the end."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Any

from shoal.text import (
    count,
    duration,
    figure_text,
    is_number,
    is_share,
    number_text,
    one_line,
    speed_text,
)

STEP_FIGURES: Mapping[str, tuple[str, Callable[[float], str]]] = {
    "reward/mean": ("reward", number_text),
    "loss": ("loss", number_text),
    "groups/nonzero_std": ("mixed groups", "{:.0%}".format),
    "kl": ("kl", number_text),
    "completions/length_mean": ("length", "{:.1f}".format),
    "completions/truncated": ("truncated", "{:.0%}".format),
    "turns/mean": ("turns", "{:.1f}".format),
    "tools/call_frequency": ("calls", "{:.1f}".format),
    "tools/failure_frequency": ("failed calls", "{:.0%}".format),
    "tokens/context": ("context tokens", "{:,.0f}".format),
    "completions/ended_by_failed": ("failed rollouts", "{:.0%}".format),
    "throughput/sample_tokens_per_second": ("sampling", speed_text),
    "throughput/train_tokens_per_second": ("training", speed_text),
}
"""Metric -> its name on the step's line, its form; a metric that a step lacks is left out."""


def step_figures(metrics: Mapping[str, float], compiled: int = 0) -> list[str]:
    """A step's metrics as on its line, in the order of STEP_FIGURES, and the skipped updates, if
    any. A step that `compiled` programs has no speeds: most of its time went into that."""
    rewarded = metrics.get("reward/mean") is not None  # else the loss says how it goes
    without = {name for name, (_, form) in STEP_FIGURES.items() if compiled and form is speed_text}
    without |= {"loss"} if rewarded else set()
    without |= {
        name
        for name in ("tools/failure_frequency", "completions/ended_by_failed")
        if not metrics.get(name)
    }
    figures = [
        f"{label} {form(metrics[name])}"
        for name, (label, form) in STEP_FIGURES.items()
        if metrics.get(name) is not None and name not in without
    ]
    if compiled:
        figures.append(f"compiled {count(compiled, 'program')}")
    skipped = metrics.get("update/skipped")
    return figures + ([f"skipped updates {skipped:g}"] if skipped else [])


def version_text(version: int) -> str:
    """When weights were as in this version: `before training`, `after step 20`."""
    return f"after step {version}" if version else "before training"


_SAMPLED = ("pass@", "maj@", "sampled_")


_NUMBERS = {"num_responses": "response", "num_questions": "question"}


_ABOUT = (
    "protocol",
    "data",
    "accuracy_interval",
    "accuracy_any_form",
    "sampled_protocol",
    "sampled_num_questions",
    *_NUMBERS,
)


def evaluation_text(figures: Mapping[str, Any]) -> str:
    """An evaluation's figures in one line; after the first, in brackets: protocol, number of
    questions, interval."""
    names = _shown(figures)
    sampled = next((name for name in names if name.startswith(_SAMPLED)), "")
    terms = [one_line(figures[name]) for name in ("protocol", "data") if figures.get(name)]
    terms += [
        count(figures[name], unit)
        for name, unit in _NUMBERS.items()
        if figures.get(name) is not None
    ]
    about = [", ".join(terms)] if terms else []
    if "accuracy_interval" in figures and names[:1] == ["accuracy"]:
        about.append(
            "95% interval {:.1f}-{:.1f}".format(
                *(100 * end for end in figures["accuracy_interval"])
            )
        )
    parts = [f"({'; '.join(about)})"] if about and not names else []
    for place, name in enumerate(names):
        notes = [*about] if place == 0 else []
        if name == sampled and figures.get("sampled_protocol"):
            notes += [*_fewer(figures), one_line(figures["sampled_protocol"])]
        if (error := figures.get(f"{name}_error")) is not None:
            notes.append(f"standard error {100 * float(error):.1f}")
        title = name if name.startswith("rewards/") else name.replace("_", " ")
        text = f"{title} {figure_text(name, figures[name])}"
        any_form = figures.get("accuracy_any_form")
        if name == "accuracy" and any_form is not None and any_form != figures[name]:
            text += (
                f" in the tags asked for, {figure_text('accuracy_any_form', any_form)} read in any "
                f"form"
            )
        parts.append(text + (f" ({'; '.join(notes)})" if notes else ""))
    return "  ".join(parts)


def _fewer(figures: Mapping[str, Any]) -> list[str]:
    """The number of questions that were sampled, where it is not that of all."""
    number = figures.get("sampled_num_questions")
    return [] if number in (None, figures.get("num_questions")) else [count(number, "question")]


def _shown(figures: Mapping[str, Any]) -> list[str]:
    """The names of figures that stand by themselves: pass@1 is the sampled accuracy, and of several
    pass@k only the largest is shown."""
    largest = max((int(name[5:]) for name in figures if re.fullmatch(r"pass@\d+", name)), default=0)
    return [
        name
        for name in figures
        if name not in _ABOUT
        and not (name.endswith("_error") and name.removesuffix("_error") in figures)
        and not (name.startswith("pass@") and name != f"pass@{largest}")
        and not (name == "pass@1" and "sampled_accuracy" in figures)
    ]


_NOT_IN_SUMMARY = ("mean_length", "truncated", "sampled_mean_reward")


def summary_rows(
    before: Mapping[str, Mapping[str, Any]],
    after: Mapping[str, Mapping[str, Any]],
    reward_since: int = 0,
) -> list[tuple[str, str, str, str]]:
    """One row a figure: its name (with protocol and number of questions), before, after, change; of
    the rewards no change where the run has had another reward only since a version after the first,
    `reward_since`.

    A figure that one side lacks has a dash there. Lengths, truncation and each function's mean
    reward are left out."""
    rows = []
    for subset in dict.fromkeys([*before, *after]):
        old, new = before.get(subset, {}), after.get(subset, {})
        about = new or old
        terms = [str(about["protocol"])] if about.get("protocol") else []
        numbers = list(
            dict.fromkeys(side["num_questions"] for side in (old, new) if "num_questions" in side)
        )
        terms += (
            [" and ".join([*map(str, numbers[:-1]), count(numbers[-1], "question")])]
            if numbers
            else []
        )
        main = "accuracy" if "accuracy" in about else "mean_reward"
        for name in _shown({**old, **new}):
            hidden = name in _NOT_IN_SUMMARY or name.startswith("rewards/")
            if hidden or not is_number(old.get(name, new.get(name))):
                continue
            is_other = reward_since > 0 and name == "mean_reward"
            notes = terms if name == main else _fewer(about) if name.startswith(_SAMPLED) else []
            notes = [*notes, f"another reward since step {reward_since}"] if is_other else notes
            title = f"{subset} {name.replace('_', ' ')}" + (
                f" ({', '.join(notes)})" if notes else ""
            )
            cells = [figure_text(name, side[name]) if name in side else "-" for side in (old, new)]
            rows.append(
                (
                    one_line(title),
                    *cells,
                    "" if is_other else _change(name, old.get(name), new.get(name)),
                )
            )
    return rows


def _change(name: str, old: Any, new: Any) -> str:
    if (
        not is_number(old)
        or not is_number(new)
        or not math.isfinite(difference := float(new) - float(old))
    ):
        return ""
    if is_share(name):
        return f"{100 * difference:+.1f} points"
    return ("+" if difference >= 0 else "") + number_text(difference)


def curve_text(evaluations: Mapping[int, Mapping[str, Mapping[str, Any]]]) -> str:
    """The main figure of three or more evaluations, by version and data set, in one line of at most
    13 points.

    >>> curve_text({step: {"held_out": {"accuracy": 0.37 + step / 200}} for step in (0, 20, 40)})
    'held_out accuracy by step: 0: 37.0%, 20: 47.0%, 40: 57.0%'
    """
    points = [
        (version, *next(iter(sets.items())))
        for version, sets in sorted(evaluations.items())
        if sets
    ]
    if len(points) < 3:  # the table of before and after says it
        return ""
    (_, _, second), (_, main, last) = points[1], points[-1]
    name, few = "accuracy" if "accuracy" in last else "mean_reward", second.get("num_questions")
    all_asked = last.get("num_questions")
    note = (
        f" ({count(few, 'question')}, {all_asked} at both ends)"
        if few not in (None, all_asked)
        else ""
    )
    kept = [*points[: -1 : -(-len(points) // 12)], points[-1]]
    values = ", ".join(
        f"{version}: {figure_text(name, figures.get(name))}" for version, _, figures in kept
    )
    return f"{main} {name.replace('_', ' ')} by step{note}: {values}"


def summary_facts(summary: Mapping[str, Any]) -> str:
    """What a finished run took."""
    return (
        f"{count(summary['steps_made'], 'step')} in {duration(summary['seconds_total'])}: sampling "
        f"{speed_text(summary['sample_tokens_per_second'])}, training "
        f"{speed_text(summary['train_tokens_per_second'])}, "
        f"with the compilation of {count(summary['num_compilations'], 'program')}"
    )


_ENDS_OF_TOKENS = {
    "trained": "trained on",
    "other_terms": "in the KL, entropy or teacher term alone",
    "no_gradient": "without an advantage",
    "discarded": "discarded by dynamic sampling",
    "evaluated": "in evaluations",
    "lost": "lost with their host or trainer",
    "unused": "unfinished",
}


def account_text(tokens: Mapping[str, int]) -> str:
    """What became of all sampled tokens, in one line.

    >>> account_text({"sampled": 5000, "trained": 4000, "evaluated": 1000, "lost": 0})
    '5,000 tokens sampled: 4,000 trained on, 1,000 in evaluations'
    """
    ends = [
        f"{tokens[name]:,} {text}" for name, text in _ENDS_OF_TOKENS.items() if tokens.get(name)
    ]
    return f"{tokens['sampled']:,} tokens sampled: {', '.join(ends)}" if ends else ""
