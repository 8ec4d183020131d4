"""Checks a reward on known answers: a right, a wrong, an empty, a repeated one, and many at once.

They are made from the data's gold answers. As the form that a reward expects is unknown, each answer is written in
several (tags, `####`, a box, bare), and the form in which the right answer scores best counts.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from shoal.config.schema import Config
from shoal.model.tokenizer import Tokenizer
from shoal.report.findings import Finding, Level
from shoal.rewards.pool import RewardPool
from shoal.rewards.scores import KNOWN_ANSWERS, Policy, Scores
from shoal.tasks.graders.answer import extract_answer, parse_number
from shoal.trainer.curriculum import TokenizedExample
from shoal.types import Example, ShoalError, ground_truth

KINDS = ("right", "wrong", "empty", "repeated", "many at once")
NUM_EXAMPLES = 3
REPEATS = 8
_KEY = "reward.functions"


@dataclass(frozen=True)
class Form:
    """A way of writing an answer: a whole completion, and the part of it that holds the answer."""

    whole: Callable[[str], str]
    piece: Callable[[str], str]


@dataclass(frozen=True)
class Probe:
    """Mean scores of the known answers over some examples.

    >>> probe.rows["right"]
    {'total': 1.1, 'correct': 1.0, 'format': 1.0}
    """

    form: str  # in which they were written; empty where the data has no gold answer
    rows: Mapping[str, Mapping[str, float]]  # kind -> `total` (weighted) and each function's score; NaN: no score
    texts: Mapping[str, str]  # kind -> the text for the first example
    failures: tuple[str, ...] = ()  # errors of functions, where `reward.on_error` lets a run continue
    useless: tuple[str, ...] = ()  # the first error of each function that failed for every answer, or every right one
    stopped: bool = False  # a function took too long, so not all answers were tried

    def total(self, kind: str) -> float:
        return self.rows[kind]["total"]

    @property
    def functions(self) -> list[str]:
        return [name for name in next(iter(self.rows.values())) if name != "total"]

    def records(self) -> list[dict[str, Any]]:
        return [{"answer": kind, "text": self.texts[kind], **values} for kind, values in self.rows.items()]

    def describe(self) -> str:
        """One line: `right 1.1, wrong 0.1, empty 0, repeated 0, many at once 0`."""
        if all(np.isnan(self.total(kind)) for kind in self.rows):
            return "no score (None or NaN) for any of them"
        return ", ".join(f"{kind} {score_text(self.total(kind))}" for kind in self.rows)


def score_text(score: float) -> str:
    return "no score" if np.isnan(score) else f"{score:.3g}"


# ---- known answers


def gold_of(example: Example) -> str | None:
    """The gold answer of an example as text, from the value that verl's functions receive: the part after `####` or
    within `<answer>`, where there is one."""
    value = ground_truth(example.columns)
    if not isinstance(value, str | int | float) or isinstance(value, bool):
        return None
    text = str(value)
    return (extract_answer(text) or text.rpartition("####")[2]).strip() or None


def reasoning_of(example: Example) -> str:
    """The worked solution without its answer; a short text if the data has none."""
    solution, answer = (str(example.columns.get(name) or "") for name in ("solution", "answer"))
    text = solution or answer
    inner = re.search(r"<reasoning>(.*?)</reasoning>", text, re.DOTALL)
    if inner:
        return inner[1]
    before, separator, _ = text.rpartition("####")
    return before.strip() if separator else (solution if solution != gold_of(example) else "") or "Step by step."


def forms(example: Example, gold: str) -> dict[str, Form]:
    """The forms in which a reward may expect an answer, by name."""
    reasoning = reasoning_of(example)

    def thought(answer: str) -> str:
        """The reasoning with another answer in place of the gold one."""
        return re.sub(rf"(?<!\w){re.escape(gold)}(?!\w)", lambda _: answer, reasoning)

    def tag(answer: str) -> str:
        return f"<answer>{answer}</answer>"

    def boxed(answer: str) -> str:
        return f"\\boxed{{{answer}}}"

    return {
        "<reasoning> and <answer>": Form(lambda a: f"<reasoning>{thought(a)}</reasoning>{tag(a)}", tag),
        "<think> and <answer>": Form(lambda a: f"<think>\n{thought(a)}\n</think>\n<answer>\n{a}\n</answer>", tag),
        "####": Form(lambda a: f"{thought(a)}\n#### {a}", lambda a: f"#### {a}\n"),
        "\\boxed": Form(lambda a: f"{thought(a)}\n{boxed(a)}", boxed),
        "bare": Form(lambda a: a, lambda a: f"{a} "),
    }


def wrong_answers(gold: str) -> list[str]:
    """Five answers that neither equal nor contain the gold one."""
    number = parse_number(gold)
    if number is None:
        return ["none of these", "unknown", "something else", "no such thing", "who knows"]
    found = (f"{number + k:f}" for k in range(1, 100))
    return [text for text in found if gold not in text][:5] or [f"{number + k:f}" for k in range(1, 6)]


def answers(example: Example) -> dict[tuple[str, str], str]:
    """The known answers of an example, (form, kind) -> text; empty without a gold answer."""
    if (gold := gold_of(example)) is None:
        return {}
    wrong, found = wrong_answers(gold), {}
    for name, form in forms(example, gold).items():
        right = form.whole(gold)
        pieces = [form.piece(answer) for answer in (*wrong[1:3], gold, *wrong[3:])]
        texts = (right, form.whole(wrong[0]), "", "\n".join([right] * REPEATS), form.whole(wrong[0]) + "".join(pieces))
        found |= {(name, kind): text for kind, text in zip(KINDS, texts, strict=True)}
    return found


def right_answer(example: Example, form: str = "") -> str | None:
    """The right answer of an example in one form, the first by default; None without a gold answer."""
    gold = gold_of(example)
    if gold is None:
        return None
    known = forms(example, gold)
    return known[form or next(iter(known))].whole(gold)


# ---- their scores


def probe(pool: RewardPool, examples: Sequence[Example], encode: Callable[[str], Iterable[Any]],
          on_error: Policy | None = None) -> Probe:
    """Scores the known answers of the first examples; stops when a function exceeds its time limit. Raises ShoalError
    if a function breaks the convention, or fails with `on_error=error` (by default `reward.on_error`)."""
    examples = list(examples[:NUM_EXAMPLES])
    made = [answers(example) for example in examples]
    known = bool(made) and all(made)
    if not known:  # an empty answer and some text, where there is no gold one
        examples, made = examples[:1], [{("", "empty"): "", ("", "some text"): "The answer is 42."}]
    keys = list(made[0])
    scores = score(pool, examples, [[texts[key] for key in keys] for texts in made],
                   [[[int(id) for id in encode(texts[key])] for key in keys] for texts in made], on_error, trial=True)
    columns = {"total": scores.rewards, **scores.components}
    means = {key: {name: float(np.mean(values[:, place])) for name, values in columns.items()}
             for place, key in enumerate(keys)}

    def worth(form: str) -> tuple[bool, float, float]:
        """Orders forms: first those in which scores differ, then by the right answer's score."""
        totals = [float(np.nan_to_num(means[form, kind]["total"], nan=-np.inf)) for kind in KINDS]
        return len(set(totals)) > 1, totals[0], -totals[1]

    best = max(dict.fromkeys(form for form, _ in keys), key=worth) if known else ""
    kinds = [kind for form, kind in keys if form == best]
    return Probe(best, {kind: means[best, kind] for kind in kinds}, {kind: made[0][best, kind] for kind in kinds},
                 *_failures(scores, [kind for _, kind in keys]))


def _failures(scores: Scores, kinds: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...], bool]:
    """`failures`, `useless` and `stopped` of a Probe; an answer is named by its kind, as it belongs to no group."""
    texts, useless = [], {}
    rights = {index for index, kind in enumerate(kinds) if kind == "right"}
    stopped = {failure.function for failure in scores.failures if failure.kind == "timed out"}
    for failure in scores.failures:
        index = failure.completion or 0
        text = failure.text.replace(f" {KNOWN_ANSWERS} ", " ", 1)
        texts.append(text.replace(f", completion {index} (", f", {kinds[index]} answer (", 1))
        values = scores.components[failure.function]
        same = [one.completion for one in scores.failures if one.function == failure.function
                and one.completion is not None]
        if len(same) == values.size or (same and failure.function in stopped and np.isnan(values).all()):
            useless.setdefault(failure.function, f"{texts[-1]}; it failed at every known answer")
        elif rights and sum(index in rights for index in same) == len(rights) * len(values):
            useless.setdefault(failure.function, f"{texts[-1]}; it failed at every right answer")
    return tuple(texts), tuple(useless.values()), bool(stopped)


def score(pool: RewardPool, examples: Sequence[Example], texts: Sequence[Sequence[str]],
          completion_ids: Sequence[Sequence[Sequence[int]]], on_error: Policy | None = None,
          trial: bool = False) -> Scores:
    """Scores of texts[P][G], waited for; nothing else may be under way in the pool."""
    pool.submit("tried", examples, texts, completion_ids, 0, on_error, trial)
    (_, scores), = pool.collect(wait=True)
    return scores


# ---- findings


def reward_findings(probe: Probe) -> list[Finding]:
    """Faults of the reward that the scores show, the gravest first; one `ok` line without faults."""
    found: list[tuple[Level, str]] = [("warning", f"{text} (reward.on_error lets the run continue)")
                                      for text in probe.failures[:1]]
    silent = [name for name in probe.functions if all(np.isnan(row[name]) for row in probe.rows.values())]
    if silent and len(silent) == len(probe.functions):
        found.append(("wrong", f"{', '.join(silent)} gave no number for any answer tried: nothing would be learned; "
                      "return a number, or set reward.functions to another"))
    elif silent:
        found.append(("warning", f"{', '.join(silent)} gave no number for any answer tried: only the other functions "
                      "would count; fix it, or remove it from reward.functions"))
    found += _faults_of_totals(probe)
    if not found:
        return [Finding("reward", "ok", probe.describe())]
    return [Finding("reward", level, text, _KEY) for level, text in found]


def _faults_of_totals(probe: Probe) -> Iterable[tuple[Level, str]]:
    totals = {kind: probe.total(kind) for kind in probe.rows}
    if all(np.isnan(total) for total in totals.values()):
        return
    scored = {kind: total for kind, total in totals.items() if not np.isnan(total)}
    if probe.form and len(scored) < len(totals) and len({round(total, 9) for total in scored.values()}) == 1:
        silent = [kind for kind in totals if kind not in scored]
        yield ("wrong", f"answers get no score ({_listed(silent)}) or {next(iter(scored.values())):.3g} "
               f"({_listed(list(scored))}): without differences in a group nothing is learned; set "
               "reward.functions to one that tells them apart")
        return
    if len(scored) == len(totals) and len({round(total, 9) for total in scored.values()}) == 1:
        yield ("wrong", f"right, wrong, empty and repeated answers, and many at once, all score {totals['right']:.3g}: "
               "without differences in a group nothing is learned; set reward.functions to one that tells them apart"
               ) if probe.form else (
            "warning", f"an empty answer and some text score the same, {totals['empty']:.3g} (the data has no gold "
            "answer to make others of): make sure that the reward tells answers apart")
        return
    right = totals.get("right", np.nan)
    if probe.form and not right > totals["wrong"]:
        yield "warning", (f"the right answer scores {right:.3g}, a wrong one {totals['wrong']:.3g} (written as "
                          f"{probe.form}): make sure that the reward wants what the data calls right")
    if totals["empty"] > 0:
        yield "warning", (f"an empty answer scores {totals['empty']:.3g}: the model may learn to say nothing; give it "
                          "0 or less")
    for kind, what in (("repeated", f"the right answer written {REPEATS} times"),
                       ("many at once", "many answers at once, right and wrong")):
        if probe.form and right > totals["wrong"] and totals[kind] >= right:
            yield "warning", (f"{what} ({kind}) scores {totals[kind]:.3g}, no less than the right answer alone "
                              f"({right:.3g}): the model will find that out; count one answer only")


def _listed(words: Sequence[str]) -> str:
    return " and ".join(filter(None, [", ".join(words[:-1]), words[-1]]))


def check_first_prompt(config: Config, tokenizer: Tokenizer, first: TokenizedExample,
                       pool: RewardPool) -> list[Finding]:
    """The short check before each run: the reward of known answers to the first prompt, as `ok`, and warnings.

    A reward that fails for some answers is a warning. ShoalError for one that cannot work: it breaks the convention, or
    `reward.on_error` is `error` and it fails for all of them, or for all right ones. Nothing else may be under way in
    the pool."""
    if not config.algorithm.uses_rewards:
        return []
    tried = probe(pool, [first.example], tokenizer.encode_prompt, on_error="skip")
    if tried.useless and config.reward.on_error == "error":
        raise ShoalError(f"{tried.useless[0]} that was tried before the run: fix it")
    rest = "; no more answers were tried" if tried.stopped else ""
    found = [Finding("reward", "warning", f"tried on known answers: {text}{rest}", _KEY) for text in tried.failures[:1]]
    if tried.stopped:
        return found
    known = [finding for finding in reward_findings(replace(tried, failures=())) if finding.level != "ok"]
    return [*found, Finding("reward", "ok", tried.describe()), *known]
