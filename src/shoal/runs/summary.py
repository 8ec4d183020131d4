"""Texts about a run's figures for people: a step's line, an evaluation's line, the summary at the
end."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from shoal.runs.lines import Summary
from shoal.runs.reward_changes import ACCURACY_BY, NO_CHANGES, RewardChanges
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
    "critic/vf_explained_var": ("explained variance", "{:.0%}".format),
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
    "cost/run": ("cost", number_text),
}
"""Metric -> (its name on a step's line, the function that formats it). A metric that a step lacks
is left out."""

_SHOWN_ABOVE_ZERO = ("tools/failure_frequency", "completions/ended_by_failed")


def step_texts(metrics: Mapping[str, float], compiled: int = 0) -> list[str]:
    """Returns the texts on a step's line: its metrics in the order of STEP_FIGURES, then the number
    of skipped updates, if any. A metric that the step lacks is left out, the loss if there is a
    reward, and failures if they are 0. [] if nothing is left.

    `compiled`: the number of programs compiled during the step. If it is not 0, the number is shown
    in place of speeds, because most of the time went into compiling.

    >>> step_texts({"reward/mean": 0.5, "completions/length_mean": 20.0}, compiled=3)
    ['reward 0.5', 'length 20.0', 'compiled 3 programs']
    """
    figures = []
    for name, (label, form) in STEP_FIGURES.items():
        value = metrics.get(name)
        if value is None:
            continue
        if name == "loss" and metrics.get("reward/mean") is not None:
            continue  # the loss is shown only if there are no rewards
        if name in _SHOWN_ABOVE_ZERO and not value:
            continue
        if compiled and form is speed_text:
            continue
        figures.append(f"{label} {form(value)}")
    if compiled:
        figures.append(f"compiled {count(compiled, 'program')}")
    skipped = metrics.get("update/skipped")
    if skipped:
        figures.append(f"skipped updates {skipped:g}")
    return figures


def version_text(version: int) -> str:
    """Returns a text for a version of the weights: "before training", "after step 20"."""
    return f"after step {version}" if version else "before training"


_SAMPLED = ("pass@", "maj@", "sampled_")


_NUMBERS = {"num_responses": "response", "num_questions": "question"}


_ABOUT = (
    "protocol",
    "data",
    "accuracy_interval",
    ACCURACY_BY,
    "accuracy_any_form",
    "sampled_protocol",
    "sampled_num_questions",
    "overlapping_questions",
    *_NUMBERS,
)


def evaluation_text(figures: Mapping[str, Any]) -> str:
    """Returns an evaluation's figures (name -> value) in one line; if there is none to show, only
    the parentheses of how they were measured, and "" without that too. After the first figure
    stand, in parentheses, how all were measured: protocol, number of questions, interval; after the
    first figure of sampled answers the protocol of these; after a figure with a standard error
    that. If an accuracy differs from `accuracy_any_form`, both are named.

    >>> evaluation_text({"accuracy": 0.5, "protocol": "greedy", "num_questions": 4})
    'accuracy 50.0% (greedy, 4 questions)'
    """
    names = _shown(figures)
    about = _about_evaluation(figures, names)
    if not names:
        return f"({'; '.join(about)})" if about else ""
    # "": no figure is of sampled answers
    first_sampled = next((name for name in names if name.startswith(_SAMPLED)), "")
    parts = []
    for number, name in enumerate(names):
        notes = list(about) if number == 0 else []
        if name == first_sampled and figures.get("sampled_protocol"):
            notes += _sampled_questions(figures)
            notes.append(one_line(figures["sampled_protocol"]))
        error = figures.get(f"{name}_error")
        if error is not None:
            notes.append(f"standard error {100 * float(error):.1f}")
        title = name if name.startswith("rewards/") else name.replace("_", " ")
        text = f"{title} {figure_text(name, figures[name])}"
        any_form = figures.get("accuracy_any_form")
        if name == "accuracy" and any_form is not None and any_form != figures[name]:
            any_form_text = figure_text("accuracy_any_form", any_form)
            text += f" in the tags asked for, {any_form_text} read in any form"
        if notes:
            text += f" ({'; '.join(notes)})"
        parts.append(text)
    return "  ".join(parts)


def _about_evaluation(figures: Mapping[str, Any], names: Sequence[str]) -> list[str]:
    """Returns texts that say how an evaluation was measured: one of protocol, data and number of
    questions, and one of the interval of the accuracy, if that is the first of the shown figures
    (`names`). A text without content is left out."""
    terms = [one_line(figures[name]) for name in ("protocol", "data") if figures.get(name)]
    for name, unit in _NUMBERS.items():
        if figures.get(name) is not None:
            terms.append(count(figures[name], unit))
    about = []
    if terms:
        about.append(", ".join(terms))
    if "accuracy_interval" in figures and names[:1] == ["accuracy"]:
        low, high = figures["accuracy_interval"]
        about.append(f"95% interval {100 * low:.1f}-{100 * high:.1f}")
    return about


def _sampled_questions(figures: Mapping[str, Any]) -> list[str]:
    """Returns a list with one text such as "20 questions": the number of questions that got sampled
    answers. [] if all questions did, or if the number is unknown. `figures`: those of one data
    set."""
    number = figures.get("sampled_num_questions")
    if number is None or number == figures.get("num_questions"):
        return []
    return [count(number, "question")]


def _shown(figures: Mapping[str, Any]) -> list[str]:
    """Returns the names of the figures that have a text of their own, in order. Left out are those
    that qualify another figure (_ABOUT, standard errors), pass@1 if it repeats the sampled
    accuracy, and every pass@k but the one of the largest k."""
    pass_ks = []  # k of each pass@k
    for name in figures:
        if re.fullmatch(r"pass@\d+", name):
            pass_ks.append(int(name.removeprefix("pass@")))
    largest_pass = f"pass@{max(pass_ks, default=0)}"
    shown = []
    for name in figures:
        if name in _ABOUT:
            continue
        if name.endswith("_error") and name.removesuffix("_error") in figures:
            continue
        if name.startswith("pass@") and name != largest_pass:
            continue
        if name == "pass@1" and "sampled_accuracy" in figures:
            continue
        shown.append(name)
    return shown


_NOT_IN_SUMMARY = ("mean_length", "truncated", "sampled_mean_reward")


def summary_rows(
    before: Mapping[str, Mapping[str, Any]],
    after: Mapping[str, Mapping[str, Any]],
    changes: RewardChanges = NO_CHANGES,
) -> list[tuple[str, str, str, str]]:
    """Returns the rows of the table before and after training: (name, before, after, change), all
    texts. The name includes the data set, and for its main figure protocol and number of questions:
    "held_out accuracy (greedy, 500 questions)".

    `before`, `after`: data set -> figures. A figure that one of them lacks is "-" there. Lengths,
    truncation, each function's mean reward and values that are no numbers are left out.
    `changes`: those of the reward between the two evaluations; a figure that depends on what
    changed has no change in the table, ""."""
    rows = []
    for subset in dict.fromkeys([*before, *after]):
        old, new = before.get(subset, {}), after.get(subset, {})
        about = new or old  # what says how the answers were measured
        main = main_figure(about)
        for name in _shown({**old, **new}):
            if name in _NOT_IN_SUMMARY or name.startswith("rewards/"):
                continue
            if not is_number(old.get(name, new.get(name))):
                continue
            notes = []
            if name == main:
                notes = _protocol_and_questions(old, new)
            elif name.startswith(_SAMPLED):
                notes = _sampled_questions(about)
            change = _change(name, old.get(name), new.get(name))
            since = changes.comparable_since(name, {**old, **new})
            if since > 0:
                notes.append(f"another reward since step {since}")
                change = ""
            title = f"{subset} {name.replace('_', ' ')}"
            if notes:
                title += f" ({', '.join(notes)})"
            old_text = figure_text(name, old[name]) if name in old else "-"
            new_text = figure_text(name, new[name]) if name in new else "-"
            rows.append((one_line(title), old_text, new_text, change))
    return rows


def _protocol_and_questions(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Returns the protocol of two evaluations and their number of questions as texts, such as
    ["greedy", "500 questions"], or "50 and 500 questions" if the numbers differ; what is unknown is
    left out."""
    terms = []
    about = new or old
    if about.get("protocol"):
        terms.append(str(about["protocol"]))
    numbers = [side["num_questions"] for side in (old, new) if "num_questions" in side]
    if numbers:
        text = count(numbers[-1], "question")
        if numbers[0] != numbers[-1]:
            text = f"{numbers[0]} and {text}"
        terms.append(text)
    return terms


def _change(name: str, old: Any, new: Any) -> str:
    """Returns `new - old` of the figure `name` as text with its sign: a share in points ("+24.0
    points"), another one in its unit ("+0.12"); "" if one of the two is not a finite number."""
    if not is_number(old) or not is_number(new):
        return ""
    difference = float(new) - float(old)
    if not math.isfinite(difference):
        return ""
    if is_share(name):
        return f"{100 * difference:+.1f} points"
    sign = "+" if difference >= 0 else ""
    return sign + number_text(difference)


def main_figure(figures: Mapping[str, Any]) -> str:
    """Returns the name of the figure by which evaluations on a data set are compared: `accuracy`
    if there is one, else `mean_reward`."""
    return "accuracy" if "accuracy" in figures else "mean_reward"


def curve_text(
    evaluations: Mapping[int, Mapping[str, Mapping[str, Any]]],
    changes: RewardChanges = NO_CHANGES,
) -> str:
    """Returns a line with the main figure of a run's evaluations, by version, with at most 13
    points, the first and the last always; "" if there are fewer than three evaluations. The main
    figure is the accuracy on the first data set, else its mean reward. `evaluations`: version ->
    data set -> figures; those whose figure is not comparable since `changes` of the reward are left
    out.

    >>> curve_text({step: {"held_out": {"accuracy": 0.37 + step / 200}} for step in (0, 20, 40)})
    'held_out accuracy by step: 0: 37.0%, 20: 47.0%, 40: 57.0%'
    """
    points = []
    for version, sets in sorted(evaluations.items()):
        if sets:
            main_set, figures = next(iter(sets.items()))
            name = main_figure(figures)
            if changes.is_comparable(version, name, figures):
                points.append((version, main_set, figures))
    if len(points) < 3:  # the table of before and after says the same
        return ""
    # The evaluations before and after training may have more questions than those between.
    _, _, second = points[1]
    _, main_set, last = points[-1]
    name = main_figure(last)
    asked_between = second.get("num_questions")
    asked_last = last.get("num_questions")
    note = ""
    if asked_between is not None and asked_between != asked_last:
        note = f" ({count(asked_between, 'question')}, {asked_last} at both ends)"
    stride = math.ceil(len(points) / 12)  # 12 points and the last one
    kept = points[:-1:stride]
    kept.append(points[-1])
    values = [f"{version}: {figure_text(name, figures.get(name))}" for version, _, figures in kept]
    return f"{main_set} {name.replace('_', ' ')} by step{note}: {', '.join(values)}"


def summary_facts(summary: Summary) -> str:
    """Returns a text on the steps, time, cost and speeds of a finished run: "20 steps in 3:05 for
    1.2, 2:21 of it in training steps: sampling ... tokens/s, ...". The time is that of the whole
    run, with evaluations and checkpoints. The cost is left out if it is not known."""
    steps = count(summary.steps_made, "step")
    if summary.stopped_by:
        steps = f"{steps} of {summary.steps}, stopped by {summary.stopped_by},"
    sampling = speed_text(summary.sample_tokens_per_second)
    training = speed_text(summary.train_tokens_per_second)
    programs = count(summary.num_compilations, "program")
    cost = ""
    if summary.cost is not None:
        cost = f" for {number_text(summary.cost)}"
    return (
        f"{steps} in {duration(summary.seconds_total)}{cost}, {duration(summary.seconds_training)} "
        f"of it in training steps: sampling {sampling}, training {training}, with the compilation "
        f"of {programs} in this process"
    )


_ENDS_OF_TOKENS = {
    "trained": "trained on",
    "masked": "cut off, so left out of the loss",
    "other_terms": "only in the KL, entropy, context or teacher term",
    "no_gradient": "without an advantage",
    "discarded": "discarded by dynamic sampling",
    "evaluated": "in evaluations",
    "lost": "lost with their host or trainer",
    "unused": "unfinished",
}


def account_text(tokens: Mapping[str, int]) -> str:
    """Returns a line that says what became of all sampled tokens (`tokens`: the result of
    `token_account`); ends that are 0 are left out, and "" if all are.

    >>> account_text({"sampled": 5000, "trained": 4000, "evaluated": 1000, "lost": 0})
    '5,000 tokens sampled: 4,000 trained on, 1,000 in evaluations'
    """
    ends = []
    for name, text in _ENDS_OF_TOKENS.items():
        if tokens.get(name):
            ends.append(f"{tokens[name]:,} {text}")
    if not ends:
        return ""
    return f"{tokens['sampled']:,} tokens sampled: {', '.join(ends)}"
