"""Checks a reward on known answers: a right, a wrong, an empty, a repeated one, and many at once.

The answers are made from the data's gold answers. Because the form that a reward expects is
unknown, each answer is written in several forms (tags, `####`, a box, bare), and the form in which
the right answer scores best counts. A reward gets the answers in the way in which it will get
completions: as what follows the prompt, encoded and decoded.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from shoal.chat.tokenizer import Tokenizer
from shoal.config.train import Config
from shoal.findings import Finding, Level
from shoal.records import Example, ShoalError, ground_truth
from shoal.rewards.pool import RewardPool
from shoal.rewards.scores import Policy, Scores
from shoal.runs.diagnosis import Figure, diagnose
from shoal.tasks.graders.answer import extract_answer
from shoal.tasks.graders.numbers import parse_number
from shoal.text import shorten
from shoal.trainer.dynamic_sampling import check_logged

KINDS = ("right", "wrong", "empty", "repeated", "many at once")
"""Kinds of known answers. `repeated`: the right answer REPEATS times; `many at once`: several wrong
answers with the right one among them."""
FORMS = {
    "<reasoning> and <answer>": ("<reasoning>{thought}</reasoning>{answer}", "<answer>{}</answer>"),
    "<think> and <answer>": ("<think>\n{thought}\n</think>\n{answer}", "<answer>\n{}\n</answer>"),
    "####": ("{thought}\n{answer}", "#### {}"),
    "\\boxed": ("{thought}\n{answer}", "\\boxed{{{}}}"),
    "bare": ("{answer}", "{}"),
    "Answer:": ("{thought}\n{answer}", "Answer: {}"),
}
"""Form -> templates of a completion, and of the part of it that holds the answer."""
NUM_EXAMPLES = 3
OTHER_EXAMPLES = 16
"""Most further examples to try a function on that gave no number for the first ones: a function may
score some rows only."""
REPEATS = 8
_ANY_ANSWER = "42"
"""Used as the right answer if the data has none."""
_OPENED = re.compile(r"(<[^<>/|\s][^<>/|]*>)(\s*)\Z")
"""Matches a tag that a prompt ends with, and the white space after it."""
_KEY = "reward.functions"
DATA_SOURCE = "data_source"
"""The column that says which data set a row is from, in verl's data."""


@dataclass(frozen=True)
class Probe:
    """Result of a check: the mean scores of the known answers over some examples.

    >>> probe.rows["right"]
    {'total': 1.1, 'correct': 1.0, 'format': 1.0}
    """

    form: str  # the form in which the answers were written; empty if the data has no gold answer
    # kind -> `total` (weighted) and each function's score; NaN: no score
    rows: Mapping[str, Mapping[str, float]]
    texts: Mapping[str, str]  # kind -> the text for the first example
    # Errors of functions with which `reward.on_error` lets a run continue.
    failures: tuple[str, ...] = ()
    # The first error of each function that gave no right answer a score.
    useless: tuple[str, ...] = ()
    stopped: bool = False  # a function took too long, so not all answers were tried
    # The warning of `lost_in_decoding`: what a completion cannot contain of the form that the
    # reward wants, and what that costs.
    lost: str = ""
    logged: tuple[str, ...] = ()  # names of the columns that the functions logged (`log_extra`)
    # Functions that gave a number for another example alone, whose score is not in `rows`.
    scored_elsewhere: tuple[str, ...] = ()

    @property
    def functions(self) -> list[str]:
        """Names of the reward functions."""
        first_row = next(iter(self.rows.values()))
        return [name for name in first_row if name != "total"]

    @property
    def silent(self) -> list[str]:
        """Names of the functions that gave no number for any answer to any example."""
        silent = []
        for name in self.functions:
            has_number = any(not np.isnan(row[name]) for row in self.rows.values())
            if not has_number and name not in self.scored_elsewhere:
                silent.append(name)
        return silent

    def total(self, kind: str) -> float:
        """Returns the weighted score of the answers of a kind (one of KINDS); NaN if they got no
        score."""
        return self.rows[kind]["total"]

    def records(self) -> list[dict[str, Any]]:
        """Returns a record for each kind of answer: {"answer": kind, "text": its text for the first
        example, "total": weighted score, and each function's score by its name}."""
        records = []
        for kind, values in self.rows.items():
            records.append({"answer": kind, "text": self.texts[kind], **values})
        return records

    def describe(self) -> str:
        """Returns one line: `right 1.1, wrong 0.1, empty 0, repeated 0, many at once 0`."""
        return ", ".join(f"{kind} {score_text(self.total(kind))}" for kind in self.rows)


def score_text(score: float) -> str:
    """Returns a score with three digits, or `no score` for NaN."""
    return "no score" if np.isnan(score) else f"{score:.3g}"


# ---- as completions


@dataclass(frozen=True)
class ModelText:
    """A text as it would come from the model.

    >>> as_model_text(tokenizer, "...assistant\\n<think>\\n", "<think>\\n2 + 3\\n</think>\\n5")
    ModelText(text='2 + 3\\n</think>\\n5', ids=[17, 220, ...], opened='<think>')
    """

    text: str
    ids: Sequence[int]
    opened: str = ""  # the tag that was removed from its beginning, because the prompt has it
    skipped: tuple[str, ...] = ()  # special tokens in the text, which decoding leaves out


MakeModelText = Callable[[Example, str], ModelText]
"""A function: (example, known answer) -> the answer as a completion of the example's prompt."""


def as_model_text(tokenizer: Tokenizer, prompt: str, text: str) -> ModelText:
    """Returns what a reward would get if a model answered `prompt` (rendered by the template) with
    `text`. A tag that the text begins with and the prompt ends with (only white space may follow it
    there) is removed, because the model would not repeat it. Then the text is encoded, cut off
    behind its first end-of-sequence token, or ended by one if it has none and the tokenizer has
    one, and decoded without special tokens."""
    opened = ""
    tag_at_end = _OPENED.search(prompt)
    if tag_at_end:
        tag, space = tag_at_end.groups()
        if text.startswith(tag):
            opened = tag
            text = text.removeprefix(tag).removeprefix(space)
    ids = list(tokenizer.encode(text))
    is_ended = False
    for position, token_id in enumerate(ids):
        if token_id in tokenizer.eos_ids:
            ids = ids[: position + 1]
            is_ended = True
            break
    if not is_ended:
        ids += tokenizer.eos_ids[:1]
    skipped = []
    for token, is_special in tokenizer.added_tokens().values():
        if is_special and token in text:
            skipped.append(token)
    return ModelText(tokenizer.text(ids), ids, opened, tuple(skipped))


def model_text_maker(tokenizer: Tokenizer, encode: Callable[[Example], Any]) -> MakeModelText:
    """Returns a function (example, text) -> the text as a completion of the example's prompt, by
    `as_model_text`. `encode`: example -> the token ids of its prompt."""

    def make(example: Example, text: str) -> ModelText:
        """Returns a text as a completion of the example's prompt. A prompt that the template
        refuses counts as an empty one."""
        try:
            prompt = tokenizer.decode(encode(example), skip_special_tokens=False)
        except ShoalError:  # the template refuses this prompt; another check reports it
            prompt = ""
        return as_model_text(tokenizer, prompt, text)

    return make


# ---- known answers


def gold_of(example: Example) -> str | None:
    """Returns the right answer that the data has for an example, as text: the part within
    `<answer>` or after `####` if the value has one, else the whole value (the one that verl's
    functions receive as `ground_truth`). None if the example has no answer, or one that is no text
    or number."""
    value = ground_truth(example.columns)
    if not isinstance(value, str | int | float) or isinstance(value, bool):
        return None
    text = str(value)
    return (extract_answer(text) or text.rpartition("####")[2]).strip() or None


def worked_solution(example: Example, gold: str) -> str:
    """Returns the reasoning that the data has for an example: the text in `<reasoning>` or before
    `####` in its column `solution` or `answer`. "" if there is none besides `gold`, the right
    answer."""
    text = str(example.columns.get("solution") or example.columns.get("answer") or "")
    reasoning = re.search(r"<reasoning>(.*?)</reasoning>", text, re.DOTALL)
    if reasoning:
        thought = reasoning[1]
    else:
        thought = text.partition("####")[0].strip()
    return "" if thought == gold else thought


def write_answer(example: Example, gold: str, answer: str, form: str = next(iter(FORMS))) -> str:
    """Returns a made-up completion: the example's worked solution (`Step by step.` if it has none),
    then `answer`, in one of FORMS (`form`: a key of it, by default the first). In the solution
    `gold`, the right answer, is replaced by `answer`, so that a wrong answer does not mention the
    right one."""
    thought = worked_solution(example, gold) or "Step by step."

    def in_place_of_gold(_: re.Match[str]) -> str:
        # `re.sub` gets a function, because in a template a backslash would be an escape.
        return answer

    thought = re.sub(rf"(?<!\w){re.escape(gold)}(?!\w)", in_place_of_gold, thought)
    completion, part = FORMS[form]
    return completion.format(thought=thought, answer=part.format(answer))


def wrong_answers(gold: str) -> list[str]:
    """Returns up to five answers, as texts, that neither equal nor contain `gold`, the right
    answer: for a number the next larger numbers. If all of the next 99 numbers contain it, the
    first five of these are returned all the same. For any other text five phrases that are the same
    for all."""
    number = parse_number(gold)
    if number is None:
        return ["none of these", "unknown", "something else", "no such thing", "who knows"]
    larger = [f"{number + difference:f}" for difference in range(1, 100)]
    without_gold = [text for text in larger if gold not in text]
    return without_gold[:5] or larger[:5]


def known_answers(example: Example) -> dict[tuple[str, str], str]:
    """Returns answers to an example of which one knows what they are worth: (form of FORMS, kind of
    KINDS) -> text. {} if the data has no right answer. The text of an `empty` answer is ''."""
    gold = gold_of(example)
    if gold is None:
        return {}
    first_wrong, *others = wrong_answers(gold)
    known = {}
    for form, (_, part) in FORMS.items():
        right = write_answer(example, gold, gold, form)
        wrong = write_answer(example, gold, first_wrong, form)
        many = [wrong]
        for answer in (*others[:2], gold, *others[2:]):
            many.append(part.format(answer))
        texts = (right, wrong, "", "\n".join([right] * REPEATS), "\n".join(many))
        for kind, text in zip(KINDS, texts, strict=True):
            known[form, kind] = text
    return known


def texts_without_gold(example: Example) -> dict[tuple[str, str], str]:
    """Returns texts to try on an example without a right answer, which differ in length, in letters
    and in what they name: ("", name) -> text. The text of `empty` is ''."""
    question = example.prompt
    if not isinstance(question, str):
        contents = [message.get("content") for message in question]
        question = next((text for text in reversed(contents) if isinstance(text, str)), "")
    return {
        ("", "empty"): "",
        ("", "some text"): "The answer is 42.",
        ("", "one word"): "yes",
        ("", "prompt in small letters"): question.lower(),
        ("", "long text"): "First I read what is asked, and then I answer it. " * 12,
    }


def answer_name(form: str, kind: str) -> str:
    """Returns what a known answer is called in messages, like `right answer written as ####`.
    `form`: '' if the answer has no form; `kind`: one of KINDS, or a name of `texts_without_gold`,
    which stays as it is."""
    what = f"{kind} answer" if kind in KINDS else kind
    if kind == "many at once":
        what = "many answers at once"
    if form and kind != "empty":
        return f"{what} written as {form}"
    return what


# ---- their scores


def probe(
    pool: RewardPool,
    examples: Sequence[Example],
    to_model_text: MakeModelText,
    on_error: Policy | None = None,
    others: Sequence[Example] = (),
) -> Probe:
    """Scores the known answers of the first NUM_EXAMPLES examples, as a model would write them, and
    returns their mean scores, in the form of FORMS that suits the reward best. If the data has no
    right answer for one of the examples, some texts are tried on the first (`texts_without_gold`).
    A function that gave no number for any of these is tried on at most OTHER_EXAMPLES of the
    `others`, one after the other, until it gives one.
    If a function exceeds its time limit, the result has `stopped`: the means of answers that were
    not tried are NaN, and `lost` is ''.

    ShoalError if a function breaks the convention, or if it fails and `on_error` (None:
    `reward.on_error`) is `error`. The pool must have no other request."""
    examples = list(examples[:NUM_EXAMPLES])
    known = [known_answers(example) for example in examples]
    have_gold = bool(known) and all(known)
    if not have_gold:
        examples = examples[:1]
        known = [texts_without_gold(examples[0])]
    keys = list(known[0])  # (form, kind)
    scores = score_known(pool, examples, known, to_model_text, on_error)

    columns = {"total": scores.rewards, **scores.components}
    means: dict[tuple[str, str], dict[str, float]] = {}
    for position, key in enumerate(keys):  # values: [examples, keys]
        means[key] = {name: _mean(values[:, position]) for name, values in columns.items()}

    def worth(form: str) -> tuple[bool, float, float]:
        """Returns a sort key, larger for a form that suits the reward better, by these in turn:
        whether the kinds of answers get different scores; the score of the right answer, the higher
        the better; that of the wrong one, the lower the better. No score counts as one of
        -infinity."""
        totals = []
        for key in keys:
            if key[0] == form:
                totals.append(float(np.nan_to_num(means[key]["total"], nan=-np.inf)))
        right, wrong = totals[:2]  # in the order of KINDS; without gold answers there is one form
        return len(set(totals)) > 1, right, -wrong

    forms = dict.fromkeys(form for form, _ in keys)
    best = max(forms, key=worth)
    rows = {}
    first_texts = {}
    for form, kind in keys:
        if form == best:
            rows[kind] = means[form, kind]
            first_texts[kind] = known[0][form, kind]
    right_positions = []  # in `keys`, of right answers; without gold answers, of all
    for position, (form, kind) in enumerate(keys):
        if kind == "right" or not form:
            right_positions.append(position)
    first_failures: dict[str, str] = {}
    for failure in reversed(scores.failures):  # so that the first of a function stays
        first_failures[failure.function] = failure.text
    useless = []
    for function, text in first_failures.items():
        if np.isnan(scores.components[function][:, right_positions]).all():
            useless.append(text)
    stopped = any(failure.kind == "timed out" for failure in scores.failures)
    tried = Probe(
        form=best,
        rows=rows,
        texts=first_texts,
        failures=tuple(failure.text for failure in scores.failures),
        useless=tuple(useless),
        stopped=stopped,
        lost="" if stopped else lost_in_decoding(pool, examples, to_model_text),
        logged=tuple(scores.extra),
    )
    if tried.failures or not tried.silent:
        return tried
    scored = _functions_that_score(pool, others, to_model_text, tried.silent)
    return replace(tried, scored_elsewhere=tuple(scored))


def _mean(scores: np.ndarray) -> float:
    """Returns the mean of the scores that are there; NaN if none is."""
    there = scores[~np.isnan(scores)]
    return float(there.mean()) if there.size else float("nan")


def _functions_that_score(
    pool: RewardPool,
    examples: Sequence[Example],
    to_model_text: MakeModelText,
    functions: Sequence[str],
) -> list[str]:
    """Returns the names out of `functions` that give a number for some answer to one of the first
    OTHER_EXAMPLES examples. Stops at the first answer that a function fails for: a run reports
    it."""
    found: list[str] = []
    for example in examples[:OTHER_EXAMPLES]:
        known = known_answers(example) or texts_without_gold(example)
        scores = score_known(pool, [example], [known], to_model_text, "skip")
        if scores.failures:
            break
        for name in functions:
            if name not in found and not np.isnan(scores.components[name]).all():
                found.append(name)
        if len(found) == len(functions):
            break
    return found


def score_known(
    pool: RewardPool,
    examples: Sequence[Example],
    known: Sequence[Mapping[tuple[str, str], str]],
    to_model_text: MakeModelText,
    on_error: Policy | None,
) -> Scores:
    """Returns the scores of known answers, arrays [examples, answers]. `known`: those of each
    example, as `known_answers` returns them, with the same keys for all; `on_error`: that of
    `probe`."""
    texts = []
    ids = []
    for example, texts_of_example in zip(examples, known, strict=True):
        completions = [to_model_text(example, text) for text in texts_of_example.values()]
        texts.append([completion.text for completion in completions])
        ids.append([completion.ids for completion in completions])
    names = [answer_name(form, kind) for form, kind in known[0]]
    return score(pool, examples, texts, ids, on_error, trial=names)


def lost_in_decoding(
    pool: RewardPool, examples: Sequence[Example], to_model_text: MakeModelText
) -> str:
    """Compares the scores of right answers as whole texts with their scores as completions of a
    model, which lack special tokens and what the prompt opens. Returns a warning with the cause if
    the reward gives completions less in every form than the whole text in the best form; '' if it
    does not. Answers are written with another number if the data has none. Functions that fail are
    left out, whatever `reward.on_error` says."""
    written = []  # for each example the right answer in each form
    completions = []  # the same answers as completions
    for example in examples:
        gold = gold_of(example) or _ANY_ANSWER
        right = [write_answer(example, gold, gold, form) for form in FORMS]
        written.append(right)
        completions.append([to_model_text(example, text) for text in right])
    texts = []
    ids = []
    are_equal = True
    for right, right_completions in zip(written, completions, strict=True):
        decoded = [completion.text for completion in right_completions]
        are_equal = are_equal and decoded == right
        texts.append(right + decoded)
        ids.append([completion.ids for completion in right_completions] * 2)
    if are_equal:
        return ""
    names = [answer_name(form, "right") for form in FORMS] * 2
    scores = score(pool, examples, texts, ids, "skip", trial=names)
    # The mean over the examples, [2 x forms]; a text without a score is worth least.
    totals = np.nan_to_num(scores.rewards.mean(axis=0), nan=-np.inf)
    as_text, as_completion = totals.reshape(2, len(FORMS))  # a score for each form
    best = int(as_text.argmax())
    if not as_text[best] > as_completion.max() + 1e-9:  # 1e-9: rounding is no loss
        return ""
    form = list(FORMS)[best]
    loss = (
        f"an answer written as {form} scores {as_completion[best]:.3g} in place of "
        f"{as_text[best]:.3g}"
    )
    completion = completions[0][best]
    if completion.opened:
        return (
            f"the prompt ends with {completion.opened}, so a completion begins after it, and the "
            f"reward never sees it: {loss}; give another model.template, whose generation prompt "
            f"ends before {completion.opened}, or a reward that takes completions without it"
        )
    if completion.skipped:
        return (
            f"{', '.join(completion.skipped)} are special tokens, which decoding leaves out, so "
            f"the reward never sees them: {loss}; give other tags, or set their `special` to false "
            "in the model's tokenizer.json and tokenizer_config.json"
        )
    return (
        f"the tokenizer does not keep the text: {loss}; {shorten(written[0][best])!r} is decoded "
        f"as {shorten(completion.text)!r}"
    )


def score(
    pool: RewardPool,
    examples: Sequence[Example],
    texts: Sequence[Sequence[str]],
    completion_ids: Sequence[Sequence[Sequence[int]]],
    on_error: Policy | None = None,
    trial: Sequence[str] = (),
) -> Scores:
    """Submits texts[P][G], G answers to each of P examples, to the pool and waits for their scores.
    The pool must have no other request. Returns Scores, whose arrays are [P, G]. ShoalError if a
    function breaks the convention, or if one fails and the policy is `error`. `trial`: names of the
    G answers for messages. `completion_ids`: the ids of each text; `on_error`: None for
    `reward.on_error`."""
    pool.submit("tried", examples, texts, completion_ids, 0, on_error, trial)  # 0: no step is done
    ((_, scores),) = pool.collect(wait=True)  # the one ticket, `tried`
    return scores


# ---- findings


def reward_findings(probe: Probe, has_calls: bool = False) -> list[Finding]:
    """Returns findings about faults of the reward that the scores show; a single `ok` finding with
    the scores if there are none.

    `has_calls`: completions have calls of tools, or turns with an environment. Nobody knows these
    before the run, so the answers tried have none, and faults that their scores show are only
    warnings.
    """
    faults: list[tuple[Level, str]] = []
    if probe.failures:
        text = f"{probe.failures[0]} (reward.on_error lets the run continue)"
        faults.append(("warning", text))
    if probe.lost:
        faults.append(("warning", probe.lost))
    if probe.silent:
        level: Level = "wrong" if len(probe.silent) == len(probe.functions) else "warning"
        text = (
            f"{', '.join(probe.silent)} gave no number for any answer tried, so nothing is learned "
            "from it: return a number, or set reward.functions to others"
        )
        faults.append((level, text))
    faults += _faults_of_totals(probe)
    if not faults:
        return [Finding("reward", "ok", probe.describe())]
    findings = []
    for level, text in faults:
        if has_calls and level == "wrong":
            level = "warning"
            text += "; tried without calls of tools and their answers, which a reward may need"
        findings.append(Finding("reward", level, text, _KEY))
    return findings


def _faults_of_totals(probe: Probe) -> list[tuple[Level, str]]:
    """Returns (level, text) of each fault of the weighted scores of the known answers; [] without
    faults. A level of `diagnose` other than `wrong` becomes `warning`."""
    faults: list[tuple[Level, str]] = []
    for diagnosis in diagnose(_figures_of_totals(probe)):
        level: Level = "wrong" if diagnosis.row.level == "wrong" else "warning"
        faults.append((level, diagnosis.text))
    return faults


def _figures_of_totals(probe: Probe) -> list[Figure]:
    """Returns figures that compare the weighted scores of the known answers, in the form that
    `diagnose` judges. If all scores are equal, the only figure says so; if fewer than two kinds
    have one, there is none. Else there is a figure for the empty answer, and with gold answers one
    for right over wrong if right is not better, or else one for the repeated answer and one for
    many at once."""
    totals = {}
    scored = {}  # without the kinds that got no score
    for kind in probe.rows:
        totals[kind] = probe.total(kind)
        if not np.isnan(totals[kind]):
            scored[kind] = round(totals[kind], 9)
    num_different = len(set(scored.values()))
    all_have_one = len(scored) == len(totals)
    if num_different == 1 and (probe.form or all_have_one):
        words = {
            "kinds": "all" if all_have_one else f"only {', '.join(scored)}",
            "score": score_text(next(iter(scored.values()))),
        }
        name = "distinct_scores" if probe.form else "distinct_scores_without_gold"
        return [Figure(name, num_different, words=words)]
    if num_different < 2:
        return []
    figures = [Figure("empty_answer", totals["empty"])]
    if not probe.form:
        return figures
    right = totals.get("right", np.nan)
    wrong = totals.get("wrong", np.nan)
    if not right > wrong:  # true also if one of them is NaN
        words = {"right": score_text(right), "wrong": score_text(wrong), "form": probe.form}
        figures.append(Figure("right_over_wrong", min(0.0, right - wrong), words=words))
        return figures
    repeated = totals["repeated"]
    words = {"repeats": REPEATS, "score": repeated, "right": right}
    figures.append(Figure("repeated_over_right", repeated - right, words=words))
    many = totals["many at once"]
    words = {"score": many, "right": right}
    figures.append(Figure("many_over_right", many - right, words=words))
    return figures


def check_first_prompts(
    config: Config,
    firsts: Mapping[str, Example],
    others: Sequence[Example],
    to_model_text: MakeModelText,
    pool: RewardPool,
    has_calls: bool = False,
) -> list[Finding]:
    """Tries the reward on known answers before each run. `firsts`: one row of each data source, by
    its name; `others`: further rows, for functions that give no number for these. Returns for each
    source an `ok` finding with the scores, and warnings, which name the source if there are
    several; nothing if the algorithm uses no rewards.

    A reward that fails for some answers is a warning. If a function exceeds its time limit, this
    warning is the last finding. ShoalError if it cannot work: it breaks the convention, fails for
    all right answers while `reward.on_error` is `error`, or lacks the number by which
    `algorithm.dynamic_sampling_by` chooses groups. Nothing else may be under way in the pool.
    """
    if not config.algorithm.uses_rewards:
        return []
    sources: dict[Finding, list[str]] = {}  # finding -> the data sources that have it
    for source, example in firsts.items():
        tried = probe(pool, [example], to_model_text, on_error="skip", others=others)
        if tried.useless and config.reward.on_error == "error":
            of_what = "right answer" if tried.form else "answer"
            raise ShoalError(
                f"{_source_names([source], firsts)}{tried.useless[0]}. The function gave no "
                f"{of_what} a score. Fix it before the run."
            )
        for finding in _findings_of_prompt(config, tried, has_calls):
            sources.setdefault(finding, []).append(source)
        if tried.stopped:  # the function would take as long for the other prompts
            break
    findings = []
    for finding, names in sources.items():
        findings.append(replace(finding, text=_source_names(names, firsts) + finding.text))
    return findings


def _source_names(names: Sequence[str], sources: Collection[str]) -> str:
    """Returns what stands before a text about some data sources, `data_source a, b: `; "" if the
    data has only one source."""
    return f"{DATA_SOURCE} {', '.join(names)}: " if len(sources) > 1 else ""


def _findings_of_prompt(config: Config, tried: Probe, has_calls: bool) -> list[Finding]:
    """Returns what `check_first_prompts` finds about one prompt, from the scores of its known
    answers."""
    a = config.algorithm
    if a.dynamic_sampling and not tried.failures:
        check_logged(a.dynamic_sampling_by, tried.logged)
    findings = []
    if tried.failures:
        text = tried.failures[0]
        if tried.stopped:
            text += ". No more answers were tried"
        findings.append(Finding("reward", "warning", text, _KEY))
    if tried.stopped:
        return findings
    findings.append(Finding("reward", "ok", tried.describe()))
    for finding in reward_findings(replace(tried, failures=()), has_calls):
        if finding.level != "ok":
            findings.append(finding)
    return findings
