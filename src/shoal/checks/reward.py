"""Checks a reward on known answers: a right, a wrong, an empty, a repeated one, and many at once.

They are made from the data's gold answers. As the form that a reward expects is unknown, each
answer is written in several (tags, `####`, a box, bare), and the form in which the right answer
scores best counts. A reward gets them as it will get completions: as what follows the prompt,
encoded and decoded.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from shoal.chat.tokenizer import Tokenizer
from shoal.config.train import Config
from shoal.findings import Finding, Level
from shoal.records import Example, ShoalError, ground_truth
from shoal.rewards.pool import RewardPool
from shoal.rewards.scores import Policy, Scores
from shoal.tasks.graders.answer import extract_answer, parse_number
from shoal.text import shorten
from shoal.trainer.prompts import TokenizedExample

KINDS = ("right", "wrong", "empty", "repeated", "many at once")
FORMS = {
    "<reasoning> and <answer>": ("<reasoning>{thought}</reasoning>{answer}", "<answer>{}</answer>"),
    "<think> and <answer>": ("<think>\n{thought}\n</think>\n{answer}", "<answer>\n{}\n</answer>"),
    "####": ("{thought}\n{answer}", "#### {}"),
    "\\boxed": ("{thought}\n{answer}", "\\boxed{{{}}}"),
    "bare": ("{answer}", "{}"),
}
"""Name -> a completion, and the part of it that holds the answer."""
NUM_EXAMPLES = 3
REPEATS = 8
_ANY_ANSWER = "42"
"""Stands for the right answer where the data has none."""
_OPENED = re.compile(r"(<[^<>/|\s][^<>/|]*>)(\s*)\Z")
"""A tag that a prompt ends with, and the space behind it."""
_KEY = "reward.functions"


@dataclass(frozen=True)
class Probe:
    """Mean scores of the known answers over some examples.

    >>> probe.rows["right"]
    {'total': 1.1, 'correct': 1.0, 'format': 1.0}
    """

    form: str  # in which they were written; empty where the data has no gold answer
    rows: Mapping[
        str, Mapping[str, float]
    ]  # kind -> `total` (weighted) and each function's score; NaN: no score
    texts: Mapping[str, str]  # kind -> the text for the first example
    failures: tuple[
        str, ...
    ] = ()  # errors of functions, where `reward.on_error` lets a run continue
    useless: tuple[
        str, ...
    ] = ()  # the first error of each function that gave no right answer a score
    stopped: bool = False  # a function took too long, so not all answers were tried
    lost: str = (
        ""  # what a completion cannot hold of the form that the reward wants, and what that costs
    )

    @property
    def functions(self) -> list[str]:
        return [name for name in next(iter(self.rows.values())) if name != "total"]

    def total(self, kind: str) -> float:
        return self.rows[kind]["total"]

    def records(self) -> list[dict[str, Any]]:
        return [
            {"answer": kind, "text": self.texts[kind], **values}
            for kind, values in self.rows.items()
        ]

    def describe(self) -> str:
        """One line: `right 1.1, wrong 0.1, empty 0, repeated 0, many at once 0`."""
        return ", ".join(f"{kind} {score_text(self.total(kind))}" for kind in self.rows)


def score_text(score: float) -> str:
    return "no score" if np.isnan(score) else f"{score:.3g}"


# ---- as completions


@dataclass(frozen=True)
class Sampled:
    """A text as it would come from the model.

    >>> sampled(tokenizer, "<|im_start|>assistant\\n<think>\\n", "<think>\\n2 + 3\\n</think>\\n5")
    Sampled(text='2 + 3\\n</think>\\n5', ids=[17, 220, ...], opened='<think>')
    """

    text: str
    ids: Sequence[int]
    opened: str = ""  # the tag at its beginning that the prompt has already
    skipped: tuple[str, ...] = ()  # its special tokens, which decoding leaves out


Sample = Callable[[Example, str], Sampled]
"""(a prompt, a known answer) -> the answer as a completion of that prompt would come."""


def sampled(tokenizer: Tokenizer, prompt: str, text: str) -> Sampled:
    """A text as a completion of a rendered prompt would come: without what the prompt has opened,
    encoded, ended by an end-of-sequence token, and decoded as completions are."""
    opened, found = "", _OPENED.search(prompt)
    if found and text.startswith(found[1]):
        opened = found[1]
        text = text.removeprefix(opened).removeprefix(found[2])
    ids = tokenizer.encode(text)
    end = next((at for at, id in enumerate(ids) if id in tokenizer.eos_ids), None)
    ids = [*ids, *tokenizer.eos_ids[:1]] if end is None else ids[: end + 1]
    skipped = tuple(
        token for token, special in tokenizer.added_tokens().values() if special and token in text
    )
    return Sampled(tokenizer.decode(ids), ids, opened, skipped)


def sampled_by(tokenizer: Tokenizer, encode: Callable[[Example], Any]) -> Sample:
    """`sampled` for the prompts that `encode` makes of examples."""

    def sample(example: Example, text: str) -> Sampled:
        try:
            prompt = tokenizer.decode(encode(example), skip_special_tokens=False)
        except ShoalError:  # the template refuses this prompt, which is said elsewhere
            prompt = ""
        return sampled(tokenizer, prompt, text)

    return sample


# ---- known answers


def gold_of(example: Example) -> str | None:
    """The gold answer of an example as text, from the value that verl's functions receive: the part
    after `####` or within `<answer>`, where there is one."""
    value = ground_truth(example.columns)
    if not isinstance(value, str | int | float) or isinstance(value, bool):
        return None
    text = str(value)
    return (extract_answer(text) or text.rpartition("####")[2]).strip() or None


def write_answer(example: Example, gold: str, answer: str, form: str = next(iter(FORMS))) -> str:
    """A completion with the example's worked solution, `answer` in place of the gold one."""
    text = str(example.columns.get("solution") or example.columns.get("answer") or "")
    inner = re.search(r"<reasoning>(.*?)</reasoning>", text, re.DOTALL)
    thought = inner[1] if inner else text.partition("####")[0].strip()
    thought = "Step by step." if thought in ("", gold) else thought
    whole, part = FORMS[form]
    return whole.format(
        thought=re.sub(rf"(?<!\w){re.escape(gold)}(?!\w)", lambda _: answer, thought),
        answer=part.format(answer),
    )


def wrong_answers(gold: str) -> list[str]:
    """Five answers that neither equal nor contain the gold one."""
    number = parse_number(gold)
    if number is None:
        return ["none of these", "unknown", "something else", "no such thing", "who knows"]
    found = (f"{number + k:f}" for k in range(1, 100))
    return [text for text in found if gold not in text][:5] or [
        f"{number + k:f}" for k in range(1, 6)
    ]


def answers(example: Example) -> dict[tuple[str, str], str]:
    """The known answers of an example, (form, kind) -> text; empty without a gold answer."""
    found: dict[tuple[str, str], str] = {}
    if (gold := gold_of(example)) is None:
        return found
    first, *others = wrong_answers(gold)
    for form, (_, part) in FORMS.items():
        right, wrong = (write_answer(example, gold, answer, form) for answer in (gold, first))
        many = [wrong, *(part.format(answer) for answer in (*others[:2], gold, *others[2:]))]
        texts = (right, wrong, "", "\n".join([right] * REPEATS), "\n".join(many))
        found |= {(form, kind): text for kind, text in zip(KINDS, texts, strict=True)}
    return found


def answer_name(form: str, kind: str) -> str:
    """`right answer written as ####`"""
    what = {"many at once": "many answers at once", "some text": kind}.get(kind, f"{kind} answer")
    return f"{what} written as {form}" if form and kind != "empty" else what


# ---- their scores


def probe(
    pool: RewardPool, examples: Sequence[Example], sample: Sample, on_error: Policy | None = None
) -> Probe:
    """Scores the known answers of the first examples, as completions; stops when a function exceeds
    its time limit. Raises ShoalError if a function breaks the convention, or fails with
    `on_error=error` (by default `reward.on_error`)."""
    examples = list(examples[:NUM_EXAMPLES])
    made = [answers(example) for example in examples]
    if not (made and all(made)):  # an empty answer and some text, where there is no gold one
        examples, made = examples[:1], [{("", "empty"): "", ("", "some text"): "The answer is 42."}]
    keys = list(made[0])
    given = [
        [sample(example, texts[key]) for key in keys]
        for example, texts in zip(examples, made, strict=True)
    ]
    scores = score(
        pool,
        examples,
        [[one.text for one in group] for group in given],
        [[one.ids for one in group] for group in given],
        on_error,
        trial=[answer_name(*key) for key in keys],
    )
    columns = {"total": scores.rewards, **scores.components}
    means = {
        key: {name: float(np.mean(values[:, place])) for name, values in columns.items()}
        for place, key in enumerate(keys)
    }

    def worth(form: str) -> tuple[bool, float, float]:
        """Orders forms: first those in which scores differ, then by the right answer's score, and
        the wrong one's."""
        totals = [
            float(np.nan_to_num(means[key]["total"], nan=-np.inf)) for key in keys if key[0] == form
        ]
        return len(set(totals)) > 1, totals[0], -totals[1]

    best = max(dict.fromkeys(form for form, _ in keys), key=worth)
    chosen = {kind: (form, kind) for form, kind in keys if form == best}
    rights = [place for place, (form, kind) in enumerate(keys) if not form or kind == "right"]
    failed = {failure.function: failure.text for failure in reversed(scores.failures)}
    stopped = any(failure.kind == "timed out" for failure in scores.failures)
    return Probe(
        best,
        {kind: means[key] for kind, key in chosen.items()},
        {kind: made[0][key] for kind, key in chosen.items()},
        tuple(failure.text for failure in scores.failures),
        tuple(
            text
            for name, text in failed.items()
            if np.isnan(scores.components[name][:, rights]).all()
        ),
        stopped,
        "" if stopped else lost_in_tokens(pool, examples, sample),
    )


def lost_in_tokens(pool: RewardPool, examples: Sequence[Example], sample: Sample) -> str:
    """What right answers lose as completions, where the reward gives less for it; empty where it
    gives the same.

    The form in which the reward scores the whole text best is the one that it wants.
    """
    whole = []
    for example in examples:
        gold = gold_of(example) or _ANY_ANSWER
        whole.append([write_answer(example, gold, gold, form) for form in FORMS])
    given = [
        [sample(example, text) for text in texts]
        for example, texts in zip(examples, whole, strict=True)
    ]
    if all(
        one.text == text
        for group, texts in zip(given, whole, strict=True)
        for one, text in zip(group, texts, strict=True)
    ):
        return ""
    texts = [
        [*written, *(one.text for one in group)]
        for written, group in zip(whole, given, strict=True)
    ]
    ids = [[one.ids for one in (*group, *group)] for group in given]
    names = [answer_name(form, "right") for form in FORMS] * 2
    scores = score(pool, examples, texts, ids, "skip", trial=names)
    totals = np.nan_to_num(scores.rewards.mean(axis=0), nan=-np.inf).reshape(2, len(FORMS))
    as_text, as_completion = totals
    at = int(as_text.argmax())
    if not as_text[at] > as_completion.max() + 1e-9:
        return ""
    form, one = list(FORMS)[at], given[0][at]
    loss = (
        f"an answer written as {form} scores {as_completion[at]:.3g} in place of {as_text[at]:.3g}"
    )
    if one.opened:
        return (
            f"the prompt ends with {one.opened}, so a completion begins behind it, and the reward "
            f"never sees it: "
            f"{loss}; give another model.template, whose generation prompt ends before "
            f"{one.opened}, or a reward "
            "that takes completions without it"
        )
    if one.skipped:
        return (
            f"{', '.join(one.skipped)} are special tokens, which decoding leaves out, so the "
            f"reward never sees "
            f"them: {loss}; give other tags, or set their `special` to false in the model's "
            f"tokenizer.json and "
            "tokenizer_config.json"
        )
    return (
        f"the tokenizer does not keep the text: {loss}; {shorten(whole[0][at])!r} is decoded as "
        f"{shorten(one.text)!r}"
    )


def score(
    pool: RewardPool,
    examples: Sequence[Example],
    texts: Sequence[Sequence[str]],
    completion_ids: Sequence[Sequence[Sequence[int]]],
    on_error: Policy | None = None,
    trial: Sequence[str] = (),
) -> Scores:
    """Scores of texts[P][G], waited for; nothing else may be under way in the pool."""
    pool.submit("tried", examples, texts, completion_ids, 0, on_error, trial)
    ((_, scores),) = pool.collect(wait=True)
    return scores


# ---- findings


def reward_findings(probe: Probe, has_calls: bool = False) -> list[Finding]:
    """Faults of the reward that the scores show, the gravest first; one `ok` line without faults.

    With `has_calls` completions have calls of tools, or turns with an environment, whose answers
    nobody knows before the run: the answers tried have none, so what they score does not show that
    a reward is wrong."""
    found: list[tuple[Level, str]] = [
        ("warning", f"{text} (reward.on_error lets the run continue)")
        for text in probe.failures[:1]
    ]
    if probe.lost:
        found.append(("warning", probe.lost))
    if silent := [
        name for name in probe.functions if all(np.isnan(row[name]) for row in probe.rows.values())
    ]:
        found.append(
            (
                "wrong" if len(silent) == len(probe.functions) else "warning",
                f"{', '.join(silent)} gave no number for any answer tried, so nothing is learned "
                f"from it: return "
                "a number, or set reward.functions to others",
            )
        )
    found += _faults_of_totals(probe)
    if has_calls:
        without = "; tried without calls of tools and their answers, which a reward may need"
        found = [
            ("warning", f"{text}{without}") if level == "wrong" else (level, text)
            for level, text in found
        ]
    if not found:
        return [Finding("reward", "ok", probe.describe())]
    return [Finding("reward", level, text, _KEY) for level, text in found]


def _faults_of_totals(probe: Probe) -> Iterable[tuple[Level, str]]:
    totals = {kind: probe.total(kind) for kind in probe.rows}
    scored = {kind: round(total, 9) for kind, total in totals.items() if not np.isnan(total)}
    if len(set(scored.values())) == 1 and (probe.form or len(scored) == len(totals)):
        kinds = "all" if len(scored) == len(totals) else f"only {', '.join(scored)}"
        yield (
            "wrong" if probe.form else "warning",
            f"of the answers tried {kinds} score {score_text(next(iter(scored.values())))}: if the "
            f"model's do too, "
            "nothing is learned; set reward.functions to one that tells answers apart",
        )
    if len(set(scored.values())) < 2:
        return
    right, wrong = totals.get("right", np.nan), totals.get("wrong", np.nan)
    if totals["empty"] > 0:
        yield (
            "warning",
            (
                f"an empty answer scores {totals['empty']:.3g}: the model may learn to say "
                f"nothing; give it "
                "0 or less"
            ),
        )
    if not probe.form:
        return
    if not right > wrong:
        yield (
            "warning",
            (
                f"the right answer scores {score_text(right)}, a wrong one {score_text(wrong)} "
                f"(written as "
                f"{probe.form}): make sure that the reward wants what the data calls right"
            ),
        )
        return
    if totals["repeated"] > right:
        yield (
            "warning",
            (
                f"the right answer written {REPEATS} times scores {totals['repeated']:.3g}, more "
                f"than once "
                f"({right:.3g}): the model will repeat itself; count one answer only"
            ),
        )
    if totals["many at once"] >= right:  # the same is enough: who gives them all is never wrong
        yield (
            "warning",
            (
                f"many answers at once, right and wrong, score {totals['many at once']:.3g}, no "
                f"less than "
                f"the right answer alone ({right:.3g}): the model will guess; count one answer only"
            ),
        )


def check_first_prompt(
    config: Config,
    tokenizer: Tokenizer,
    first: TokenizedExample,
    pool: RewardPool,
    has_calls: bool = False,
) -> list[Finding]:
    """The short check before each run: the reward of known answers to the first prompt, as `ok`,
    and warnings.

    A reward that fails for some answers is a warning. ShoalError for one that cannot work: it
    breaks the convention, or `reward.on_error` is `error` and it fails for all right ones. Nothing
    else may be under way in the pool."""
    if not config.algorithm.uses_rewards:
        return []
    tried = probe(
        pool, [first.example], sampled_by(tokenizer, lambda _: first.prompt_ids), on_error="skip"
    )
    if tried.useless and config.reward.on_error == "error":
        raise ShoalError(f"{tried.useless[0]}; it gave no right answer a score: fix it")
    rest = "; no more answers were tried" if tried.stopped else ""
    found = [Finding("reward", "warning", f"{text}{rest}", _KEY) for text in tried.failures[:1]]
    if tried.stopped:
        return found
    all_known = reward_findings(replace(tried, failures=()), has_calls)
    known = [finding for finding in all_known if finding.level != "ok"]
    return [*found, Finding("reward", "ok", tried.describe()), *known]
