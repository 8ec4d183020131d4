"""What a reward says of answers whose worth is known: a right, a wrong, an empty, a repeated and a tag-stuffed one.

They are made of the data's gold answers. Which form a reward wants is not known to a stranger, so each answer is
written in several (tags, `####`, a box, bare), and the form in which the right answer scores best counts.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from shoal.report.findings import Finding
from shoal.rewards.pool import RewardPool
from shoal.rewards.scores import Policy, Scores, describe_step
from shoal.tasks.graders.answer import extract_answer, parse_number
from shoal.types import Example, ground_truth

KINDS = ("right", "wrong", "empty", "repeated", "tag-stuffed")
NUM_EXAMPLES = 3
REPEATS = 8
_KEY = "reward.functions"


@dataclass(frozen=True)
class Form:
    """A way of writing an answer: a whole completion, and the piece of it that holds the answer."""

    whole: Callable[[str], str]
    piece: Callable[[str], str]


@dataclass(frozen=True)
class Probe:
    """Mean scores of the answers over some examples.

    >>> probe.rows["right"]
    {'total': 1.1, 'correct': 1.0, 'format': 1.0}
    """

    form: str  # the form in which they were written; empty where the data has no gold answer
    rows: Mapping[str, Mapping[str, float]]  # kind -> `total` (weighted) and each function's score; NaN: not judged
    texts: Mapping[str, str]  # kind -> the text for the first example
    failures: tuple[str, ...] = ()  # what functions failed at, where `reward.on_error` lets a run go on
    useless: tuple[str, ...] = ()  # of them the first of each function that failed at all answers that were tried
    stopped: bool = False  # a function took too long, so not all answers were tried

    def total(self, kind: str) -> float:
        return self.rows[kind]["total"]

    @property
    def functions(self) -> list[str]:
        return [name for name in next(iter(self.rows.values())) if name != "total"]

    def records(self) -> list[dict[str, Any]]:
        return [{"answer": kind, "text": self.texts[kind], **values} for kind, values in self.rows.items()]


def gold_of(example: Example) -> str | None:
    """The gold answer of an example as text, of the value that verl's functions are given: what is after `####` or
    within `<answer>` where it has such."""
    value = ground_truth(example.columns)
    if not isinstance(value, str | int | float) or isinstance(value, bool):
        return None
    text = str(value)
    return (extract_answer(text) or text.rpartition("####")[2]).strip() or None


def worked(example: Example) -> str:
    """The worked solution without its answer, where the data has one; else a short stand-in."""
    solution, answer = (str(example.columns.get(name) or "") for name in ("solution", "answer"))
    text = solution or answer
    inner = re.search(r"<reasoning>(.*?)</reasoning>", text, re.DOTALL)
    if inner:
        return inner[1]
    before, separator, _ = text.rpartition("####")
    return before.strip() if separator else (solution if solution != gold_of(example) else "") or "Step by step."


def forms(example: Example, gold: str) -> dict[str, Form]:
    """Ways in which an answer may be wanted, by name."""
    reasoning = worked(example)

    def thought(answer: str) -> str:
        """The reasoning as if it had led to this answer."""
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


def others(gold: str) -> list[str]:
    """Five answers that are not the gold one, nor hold it as a part."""
    number = parse_number(gold)
    if number is None:
        return ["none of these", "unknown", "something else", "no such thing", "who knows"]
    found = (f"{number + k:f}" for k in range(1, 100))
    return [text for text in found if gold not in text][:5] or [f"{number + k:f}" for k in range(1, 6)]


def answers(example: Example) -> dict[tuple[str, str], str]:
    """(form, kind) -> text; empty where the example has no gold answer."""
    if (gold := gold_of(example)) is None:
        return {}
    wrong, found = others(gold), {}
    for name, form in forms(example, gold).items():
        right = form.whole(gold)
        pieces = [form.piece(answer) for answer in (*wrong[1:3], gold, *wrong[3:])]
        texts = (right, form.whole(wrong[0]), "", "\n".join([right] * REPEATS), form.whole(wrong[0]) + "".join(pieces))
        found |= {(name, kind): text for kind, text in zip(KINDS, texts, strict=True)}
    return found


def right_answer(example: Example, form: str = "") -> str | None:
    """The right answer of an example in one form (the first unless named)."""
    gold = gold_of(example)
    if gold is None:
        return None
    known = forms(example, gold)
    return known[form or next(iter(known))].whole(gold)


def probe(judge: RewardPool, examples: Sequence[Example], encode: Callable[[str], Iterable[Any]],
          on_error: Policy | None = None) -> Probe:
    """Has the answers of the first examples judged, no more once a function has taken too long. ShoalError where a
    function breaks the convention, or fails and `reward.on_error`, or what stands in for it, is `error`."""
    examples = list(examples[:NUM_EXAMPLES])
    made = [answers(example) for example in examples]
    if not examples or not all(made):
        return _probe_blindly(judge, examples[:1], encode, on_error)
    keys = list(made[0])
    scores = _try(judge, examples, [[texts[key] for key in keys] for texts in made], encode, on_error)
    means = {key: _means(scores, place) for place, key in enumerate(keys)}
    names = list(dict.fromkeys(form for form, _ in keys))

    def worth(form: str) -> tuple[bool, float, float]:
        """A form in which all answers score the same says nothing; of the others, the right answer's best."""
        totals = [float(np.nan_to_num(means[form, kind]["total"], nan=-np.inf)) for kind in KINDS]
        return len(set(totals)) > 1, totals[0], -totals[1]

    best = max(names, key=worth)
    return Probe(best, {kind: means[best, kind] for kind in KINDS}, {kind: made[0][best, kind] for kind in KINDS},
                 *_failed(scores, [kind for _, kind in keys]))


def _probe_blindly(judge: RewardPool, examples: Sequence[Example], encode: Callable[[str], Iterable[Any]],
                   on_error: Policy | None) -> Probe:
    """Without a gold answer: an empty one and some text."""
    texts = {"empty": "", "some text": "The answer is 42."}
    scores = _try(judge, examples, [list(texts.values())], encode, on_error)
    rows = {kind: _means(scores, place) for place, kind in enumerate(texts)}
    return Probe("", rows, texts, *_failed(scores, list(texts)))


def _try(judge: RewardPool, examples: Sequence[Example], texts: Sequence[Sequence[str]],
         encode: Callable[[str], Iterable[Any]], on_error: Policy | None) -> Scores:
    ids = [[[int(id) for id in encode(text)] for text in row] for row in texts]
    return judged(judge, examples, texts, ids, on_error, trial=True)


def _failed(scores: Scores, kinds: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...], bool]:
    """The last three fields of a Probe. Answers of a trial are told by their kind: they are no group of a run."""
    texts, useless = [], {}
    stopped = {failure.function for failure in scores.failures if failure.kind == "timed out"}
    for failure in scores.failures:
        place = failure.completion or 0
        text = failure.text.replace(f" {describe_step(0)} ", " ", 1)
        texts.append(text.replace(f", completion {place} (", f", {kinds[place]} answer (", 1))
        values = scores.components[failure.function]
        mine = [one for one in scores.failures if one.function == failure.function and one.completion is not None]
        if len(mine) == values.size or (mine and failure.function in stopped and np.isnan(values).all()):
            useless.setdefault(failure.function, texts[-1])
    return tuple(texts), tuple(useless.values()), bool(stopped)


def judged(judge: RewardPool, examples: Sequence[Example], texts: Sequence[Sequence[str]],
           completion_ids: Sequence[Sequence[Sequence[int]]], on_error: Policy | None = None,
           trial: bool = False) -> Scores:
    """Scores of texts[P][G], waited for; the judge must have nothing else to do."""
    judge.submit("tried", examples, texts, completion_ids, 0, on_error, trial)
    (_, scores), = judge.collect(wait=True)
    return scores


def _means(scores: Scores, place: int) -> dict[str, float]:
    columns = {"total": scores.rewards, **scores.components}
    return {name: float(np.mean(values[:, place])) for name, values in columns.items()}


# ---- what it means


def findings_of(probe: Probe) -> list[Finding]:
    """What the scores say of the reward, the gravest first; one `ok` line where nothing is amiss."""
    found = [Finding("reward", "warning", f"{text} (reward.on_error lets the run go on)", _KEY)
             for text in probe.failures[:1]]
    found += _of_functions(probe)
    totals = {kind: probe.total(kind) for kind in probe.rows}
    if not all(np.isnan(total) for total in totals.values()):
        found += _of_totals(probe, totals)
    if all(finding.level == "ok" for finding in found):
        found.append(Finding("reward", "ok", totals_text(probe), ""))
    return found


def totals_text(probe: Probe) -> str:
    """One line: `right 1.1, wrong 0.1, empty 0, repeated 0, tag-stuffed 0`."""
    return ", ".join(f"{kind} {probe.total(kind):.3g}" for kind in probe.rows)


def _of_functions(probe: Probe) -> list[Finding]:
    silent = [name for name in probe.functions if all(np.isnan(row[name]) for row in probe.rows.values())]
    if not silent:
        return []
    if len(silent) == len(probe.functions):
        return [Finding("reward", "wrong", f"{', '.join(silent)} gave no number for any answer tried: nothing would "
                        "be learnt; have it return a number, or set reward.functions to another", _KEY)]
    return [Finding("reward", "warning", f"{', '.join(silent)} gave no number for any answer tried: only the other "
                    "functions would count; mend it, or leave it out of reward.functions", _KEY)]


def _of_totals(probe: Probe, totals: Mapping[str, float]) -> list[Finding]:
    tried = f"written as {probe.form}" if probe.form else "the data has no gold answer to make others of"
    if len({round(total, 9) for total in totals.values() if not np.isnan(total)}) == 1:
        if not probe.form:
            return [Finding("reward", "warning", f"an empty answer and some text score the same, "
                            f"{totals['empty']:.3g} ({tried}): make sure that the reward tells answers apart", _KEY)]
        return [Finding("reward", "wrong", f"right, wrong, empty, repeated and tag-stuffed answers all score "
                        f"{totals['right']:.3g}: without differences in a group nothing is learnt; set "
                        f"reward.functions to one that tells them apart", _KEY)]
    found = []
    if probe.form and not totals["right"] > totals["wrong"]:
        found.append(Finding("reward", "warning", f"the right answer scores {totals['right']:.3g}, a wrong one "
                             f"{totals['wrong']:.3g} ({tried}): make sure that the reward wants what the data calls "
                             "right", _KEY))
    if totals["empty"] > 0:
        found.append(Finding("reward", "warning", f"an empty answer scores {totals['empty']:.3g}: the model may learn "
                             "to say nothing; give it 0 or less", _KEY))
    for kind, what in (("repeated", f"the right answer written {REPEATS} times"),
                       ("tag-stuffed", "many answers at once, right and wrong")):
        if probe.form and totals["right"] > totals["wrong"] and totals[kind] >= totals["right"]:
            found.append(Finding("reward", "warning", f"{what} ({kind}) scores {totals[kind]:.3g}, no less than the "
                                 f"right answer alone ({totals['right']:.3g}): the model will find that out; count one "
                                 "answer only", _KEY))
    return found
