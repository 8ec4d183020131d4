"""Decides whether two answers in mathematics are the same: by text and value if that suffices, else
by math-verify in supervised processes.

math-verify passes a model's text to a parser and to sympy, which some texts keep busy for ever. So
each check has a limit of processor time and memory: at the limit its process is ended, the answer
counts as wrong, and another process replaces it. math-verify is imported by the process that
supervises the workers, never by the one that trains.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import logging
import os
import re
import signal
import threading
import time
from collections.abc import Collection, Iterator, Sequence
from fractions import Fraction
from typing import Any

from shoal.records import ShoalError
from shoal.tasks.graders.answer import end_of_bracket
from shoal.tasks.graders.numbers import ascii_numbers, latex_numerals, parse_latex
from shoal.tasks.graders.units import measures_of, quantity_of, units_differ, variables_of
from shoal.workers.pool import Limits, WorkerPool, WorkersLost
from shoal.workers.process import Header

MAX_CHARS = 1000
"""An answer with more characters counts as wrong without a check."""
MAX_DEPTH = 25
"""An answer with brackets nested deeper counts as wrong without a check."""

_WRAPPED = re.compile(r"\\(?:text|textbf|textit|mathrm|mathbf|mbox)\{([^{}]*)\}")
_LARGE_FRACTION = re.compile(r"\\[dt]frac(?![A-Za-z])")
_SHORT_FRACTION = re.compile(r"\\frac([0-9])([0-9])(?![0-9])")
_OPTION = re.compile(r"\(([A-Za-z])\)")
_PI = re.compile(r"(?<![\\A-Za-z])pi(?![A-Za-z])")
_ROOT = re.compile(
    r"(?:√|(?<![\\A-Za-z])sqrt)\s*(?:\(([^()√]+)\)|\{([^{}√]+)\}"
    r"|([0-9]+(?:\.[0-9]+)?|[A-Za-z](?![A-Za-z])|\\pi(?![A-Za-z])))"
)
_ROOT_ALONE = re.compile(r"√|(?<![\\A-Za-z])sqrt")
_EXP = re.compile(r"(?<![A-Za-z])\\?exp\s*(?:\\left)?\(")
_DEGREES = re.compile(
    r"([0-9]+(?:\.[0-9]+)?)\s*(?:\^\s*(?:\\circ|\{\s*\\circ\s*\})|\\degree)(?![A-Za-z])\s*"
)
_TRIGONOMETRIC = re.compile(
    r"(?<![A-Za-z])(?<!\\operatorname\{)\\?((?:sin|cos|tan|cot|sec|csc)(?![A-Za-z])"
    r"\s*(?:\^\s*(?:[0-9]|\{[0-9]+\}))?)\s*"
)
_EMPTY_SET = re.compile(
    r"\\varnothing(?![A-Za-z])|(?:\\left\s*)?\\\{(?:\s|\\[ ,;:!])*(?:\\right\s*)?\\\}"
)
_LETTERS = re.compile(
    r"(?:(?<=[0-9])\s*(ab|bc|[cdot])"
    r"|(?:(?<=[-+*])|(?<=\\cdot)|(?<=\\times))\s*(ab|bc|[cdghlmost]))\Z"
)
"""Matches letters at the end that math-verify would take for a unit and leave out: behind a number
only letters that are hardly ever a unit, behind an operator all that it knows as units."""
_LAST_LETTER = re.compile(
    r"(?:(?<=[0-9})\]+*/-])|(?<=[0-9})\]+*/-]\s)|(?<=[A-Za-z]\s))([A-Za-z])\s*\Z"
)
_PERCENT = re.compile(
    r"(?<!\s)\s*(?:\\(?:text|mathrm|mbox)\{\s*per\s?cent\s*\}|(?<![A-Za-z])per\s?cent(?![A-Za-z]))"
)
_BARE_FUNCTION = re.compile(
    r"(?<![A-Za-z\\])((?:arc)?(?:sin|cos|tan|cot|sec|csc)|ln|log)(?=[(_^]|\\left\()"
)
_TWO_SIGNS = {r"\+\s*-": "-", r"-\s*-": "+", r"-\s*\+": "-"}
_ELLIPSIS = re.compile(r"\\[lc]?dots(?![A-Za-z])|\.\.\.|…")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
_SIGNS = {
    "π": "\\pi ",
    "∞": "\\infty ",
    "×": "\\times ",
    "÷": "/",
    "·": "\\cdot ",
    "≤": "\\leq ",
    "≥": "\\geq ",
    "°": "^\\circ ",
    "²": "^2",
    "³": "^3",
    "∪": "\\cup ",
    "∅": "\\emptyset ",
    "~": " ",
}
_SPACING = re.compile(r"\\(?:left|right)(?![A-Za-z])|\\[!,;: ]|(?<![0-9])\s+|\s+(?![0-9])")
_SPACE = re.compile(r"\\[!,;: ]")
_DROPPED = ("^\\circ", "^{\\circ}", "\\$", "$", "\\%", "%")


def same(gold: str, answer: str) -> bool | None:
    """True if two answers mean the same, False if not. None if the check was ended at its limit, or
    was not made because an answer has more than MAX_CHARS characters or brackets nested deeper than
    MAX_DEPTH; both count as wrong. May start worker processes."""
    return same_all([(gold, answer)])[0]


def same_all(pairs: Sequence[tuple[str, str]]) -> list[bool | None]:
    """Returns for each pair (gold, answer): True if both mean the same, False if not, None if the
    check was ended at its limit or not made (an answer is too long or nested too deep). Pairs that
    `quick_verdict` does not decide are checked by math-verify, several at a time. The verdicts are
    in the order of the pairs."""
    verdicts: list[bool | None] = [quick_verdict(gold, answer) for gold, answer in pairs]
    undecided: list[int] = []
    to_check: list[Pair] = []
    for i, (gold, answer) in enumerate(pairs):
        if verdicts[i] is None and _is_readable(gold) and _is_readable(answer):
            undecided.append(i)
            to_check.append(_in_latex(gold, answer))
    if undecided:
        for i, is_same in zip(undecided, checker().compare(to_check), strict=True):
            verdicts[i] = is_same
    return verdicts


def _in_latex(gold: str, answer: str) -> tuple[str, str]:
    """Returns a gold answer and an answer as `latex` writes them, so that a final letter that is a
    variable in either answer is not taken for a unit."""
    variables = _variables_of_either(_unwrapped(gold), _unwrapped(answer))
    return (
        latex(gold, variables | _last_variable(gold)),
        latex(answer, variables | _last_variable(answer)),
    )


def _variables_of_either(gold: str, answer: str) -> set[str]:
    """Returns the letters that are variables in one of two answers (both `_unwrapped`). At the end
    of the other answer such a letter is not a unit: with `m/2`, `0.5 m` has the variable m."""
    return variables_of(gold) | variables_of(answer)


def _last_variable(answer: str) -> set[str]:
    """Returns the letter at the end of an answer, as a set, if the answer has other variables: h in
    `\\pi r^2 h`. Such a letter is a variable too, since a unit would be after a number or in
    \\text. An empty set otherwise."""
    expression = _unwrapped(answer.rpartition("=")[2])
    last = _LAST_LETTER.search(answer)
    if last is None or not variables_of(expression):
        return set()
    return {last[1]}


def is_found_in(gold: str, text: str) -> bool | None:
    """True if math-verify finds the gold answer in `text`, a whole solution without box or tag, of
    any length; False if not; None if the check was ended at its limit."""
    return checker().compare([(latex(gold), ascii_numbers(text))], "text")[0]


def quick_verdict(gold: str, answer: str) -> bool | None:
    """Compares two answers by their texts, units and values, without math-verify. Returns True or
    False if these decide whether the answers are the same, None if math-verify has to. None also if
    an answer has more than MAX_CHARS characters. An empty answer is False.

    >>> quick_verdict("\\\\frac{1}{2}", "0.5"), quick_verdict("7", "8"), quick_verdict("x^2", "x x")
    (True, False, None)
    """
    if not answer.strip():
        return False
    if max(len(gold), len(answer)) > MAX_CHARS:
        return None
    gold, answer = _PERCENT.sub(r"\\%", gold), _PERCENT.sub(r"\\%", answer)
    plain_gold, plain_answer = plain(gold), plain(answer)
    if plain_gold == plain_answer:
        return True
    for text, plain_text in ((gold, plain_gold), (answer, plain_answer)):
        is_word = plain_text.isalpha() and len(plain_text) > 1
        if is_word and _WRAPPED.fullmatch(text.strip()):
            return plain_gold.casefold() == plain_answer.casefold()
    gold_text, answer_text = _unwrapped(gold), _unwrapped(answer)
    variables = _variables_of_either(gold_text, answer_text)
    text_before_gold_unit, gold_unit = quantity_of(gold_text, variables)
    text_before_unit, unit = quantity_of(answer_text, variables)
    if units_differ(gold_unit, unit):
        return False
    if unit is not None and gold_unit == unit:  # `5 in.` and `5 inches`
        plain_gold, plain_answer = plain(text_before_gold_unit), plain(text_before_unit)
        if plain_gold == plain_answer:
            return True
    gold_measures, measures = measures_of(gold_text), measures_of(answer_text)
    if gold_measures and measures and max(len(gold_measures), len(measures)) > 1:
        # math-verify would read only the 3 of `3 hours 20 minutes`.
        return gold_measures == measures
    if "\\equiv" in plain_gold or "\\equiv" in plain_answer:
        # math-verify would read only the 3 of `x \\equiv 1 \\pmod 3`.
        return _congruence(plain_gold) == _congruence(plain_answer)
    if _ELLIPSIS.search(gold) or _ELLIPSIS.search(answer):
        # math-verify reads `1, 2, \\ldots, n` up to the dots.
        return _ELLIPSIS.sub("...", plain_gold) == _ELLIPSIS.sub("...", plain_answer)
    gold_number, number = parse_latex(plain_gold), parse_latex(plain_answer)
    if gold_number is None or number is None:
        return None
    if gold_number == number:
        return True
    if "%" in gold and "%" not in answer:
        return gold_number == 100 * number
    if "%" in answer and "%" not in gold:
        return number == 100 * gold_number
    # Different whole numbers are different answers. Fractions may be equal after rounding.
    are_whole = gold_number.denominator == number.denominator == 1
    return False if are_whole else None


def _congruence(text: str) -> str:
    """Returns a congruence, which `plain` has normalized, with its modulus as `mod3`."""
    return re.sub(r"[(){}]", "", re.sub(r"\\[bp]?mod(?![A-Za-z])", "mod", text))


def _is_readable(answer: str) -> bool:
    """True if math-verify can be given an answer: it has at most MAX_CHARS characters, and brackets
    nested at most MAX_DEPTH deep."""
    depth = most = 0
    # A longer answer is refused by its length below.
    for character in answer[: MAX_CHARS + 1]:
        if character in "([{":
            depth += 1
        elif character in ")]}":
            depth -= 1
        most = max(most, depth)
    return len(answer) <= MAX_CHARS and most <= MAX_DEPTH


def has_balanced_braces(gold: str) -> bool:
    """True if each brace of a gold answer has its partner, and the answer has at most MAX_CHARS
    characters. Braces behind a backslash do not count. A quick check for a whole data set, where
    math-verify would take minutes."""
    depth = 0
    # Also matches `\x`, so that `\{` counts as no brace.
    for brace in _BRACE.findall(gold[: MAX_CHARS + 1]):
        if brace == "{":
            depth += 1
        elif brace == "}":
            depth -= 1
        if depth < 0:
            return False
    return depth == 0 and len(gold) <= MAX_CHARS


def latex(answer: str, variables: Collection[str] = ()) -> str:
    """Returns an answer, in plain text or LaTeX, as LaTeX that math-verify reads: `π/2` -> `\\pi
    /2`, `√10` -> `\\sqrt{10}`, `2 1/2` -> `2\\frac{1}{2}`. If its last letter is one of
    `variables`, it is put in braces, so that math-verify does not take it for a unit. `variables`
    are single letters."""
    answer = _PERCENT.sub(r"\\%", answer)
    answer = _exponentials(_PI.sub(r"\\pi ", _spelled_out(answer)))
    for signs, sign in _TWO_SIGNS.items():
        answer = re.sub(signs, sign, answer)
    num_roots = 1
    while num_roots > 0:  # the inner roots first
        answer, num_roots = _ROOT.subn(_root_in_latex, answer)
    last = _LAST_LETTER.search(answer)
    if last is not None and last[1] in variables:
        answer = f"{answer[: last.start()]}{{{last[1]}}}"
    # Only one of the two groups has matched; the other is empty.
    return _LETTERS.sub(r"(\1\2)", _ROOT_ALONE.sub(r"\\sqrt ", answer))


def _root_in_latex(match: re.Match[str]) -> str:
    inside = match[1] or match[2] or match[3]
    return f"\\sqrt{{{inside}}}"


def _with_commands(answer: str) -> str:
    """Returns an answer with the signs of its numbers in ASCII, and Unicode's other signs as LaTeX
    commands: `2 × –3` -> `2 \\times  -3`."""
    answer = ascii_numbers(answer)
    for sign, command in _SIGNS.items():
        answer = answer.replace(sign, command)
    return answer


def _unwrapped(answer: str) -> str:
    """Returns an answer with LaTeX's spaces as plain spaces, its signs as LaTeX commands, and words
    without \\text or the like around them: `5\\,\\text{cm}` -> `5 cm `. A run of spaces becomes
    one."""
    answer = _with_commands(answer)
    # One space for a run of them, since the search for units tries each.
    return re.sub(r"\s+", " ", _WRAPPED.sub(r" \1 ", _SPACE.sub(" ", answer)))


def _spelled_out(answer: str) -> str:
    """Returns an answer with Unicode signs and names of functions as LaTeX commands, numbers in
    forms that LaTeX parsers read, and degrees inside of sin, cos, ... in radians.

    >>> _spelled_out("2 1/2 × 1e3"), _spelled_out("0.\\\\overline{3}"), _spelled_out("\\\\sin 30°")
    ('2\\\\frac{1}{2} \\\\times  1000', '\\\\frac{1}{3}', '\\\\sin {(\\\\frac{30\\\\pi}{180})}')
    """
    answer = _with_commands(answer)
    answer = _BARE_FUNCTION.sub(r"\\\1", answer)
    answer = _EMPTY_SET.sub(r"\\emptyset ", answer)
    return _in_radians(latex_numerals(answer))


def _in_radians(answer: str) -> str:
    """Returns an answer with the degrees inside of sin, cos, ... converted to radians, and these
    functions as LaTeX commands. Other degree signs stay; `plain` drops them. A bracket that is
    never closed stays as it is."""
    parts = []
    done = 0  # the number of characters that are in `parts`
    for match in _TRIGONOMETRIC.finditer(answer):
        start = match.end()
        if match.start() < done:
            continue
        rest = answer[start:]
        opening = re.match(r"(?:\\left\s*)?[({\[]", rest)
        alone = _DEGREES.match(rest)
        end = start
        if opening:
            end = end_of_bracket(answer, start + opening.end() - 1)
        elif alone:
            end = start + alone.end()
        elif not match[0].startswith("\\"):  # `5 sec`
            continue
        parts.append(f"{answer[done : match.start()]}\\{match[1]}")
        argument = _DEGREES.sub(r"{(\\frac{\1\\pi}{180})}", answer[start:end])
        parts.append(argument or " ")
        done = end
    return "".join(parts) + answer[done:]


def _exponentials(answer: str) -> str:
    """Returns an answer with `exp(x)` written as `e^{x}`. From the first `exp(` on whose bracket is
    never closed it stays as it is."""
    match = _EXP.search(answer)
    while match is not None:
        start = match.end() - 1
        end = end_of_bracket(answer, start)
        if end == start:
            return answer
        answer = f"{answer[: match.start()]}e^{{{answer[start + 1 : end - 1]}}}{answer[end:]}"
        match = _EXP.search(answer)
    return answer


def plain(answer: str) -> str:
    """Returns an answer in a normal form: answers with the same normal form are the same. It has no
    spaces, no dollar, degree and percent signs, no `\\text` or option's parentheses, and fractions
    in one spelling: `\\$ 1{,}000` -> `1,000`, `\\dfrac12` -> `\\frac{1}{2}`."""
    text = _spelled_out(answer.strip().removesuffix(".").replace("{,}", ","))
    text = _LARGE_FRACTION.sub(r"\\frac", text)
    for dropped in _DROPPED:
        text = text.replace(dropped, "")
    text = _SPACING.sub("", _WRAPPED.sub(r"\1", text))
    text = _SHORT_FRACTION.sub(r"\\frac{\1}{\2}", text)
    option = _OPTION.fullmatch(text)
    return option[1] if option else text


# ---- by math-verify

CPU_SECONDS = 3.0
"""Processor time of one check."""
WALL_SECONDS = 30.0
"""Time of one check by the clock. It is generous, for machines that are busy with other things."""
MEMORY_BYTES = 2**30
NUM_WORKERS = 4
CHECKS_A_WORKER = 5000
"""A worker is replaced by a fresh process after this many checks, because sympy's caches grow."""
_NUM_CACHED = 20_000
"""The cache of results is emptied when it holds more than this many."""

Pair = tuple[str, str]
"""(gold, answer)"""


def require_math_verify() -> None:
    """Raises ShoalError if math-verify is not installed. Does not import it."""
    if importlib.util.find_spec("math_verify") is None:
        raise ShoalError(
            "task math: math-verify is not installed: pip install '.[math]' in the clone of Shoal"
        )


@functools.cache
def _checker(process: int) -> Checker:
    return Checker()


def checker() -> Checker:
    """Returns the checker of this process, made at its first use; a forked process makes another
    one."""
    return _checker(os.getpid())


class Checker:
    """Worker processes that compare answers with math-verify, several at a time. They are forked
    when they are first needed, and results are cached. May be used from several threads.

    >>> Checker().compare([("x^2", "x x"), ("1", "9^{9^{9^{9}}}")])
    [True, None]
    """

    def __init__(self, num_workers: int = NUM_WORKERS, cpu_seconds: float = CPU_SECONDS) -> None:
        """The checker has `num_workers` workers, or one for each core if there are fewer cores.
        `cpu_seconds`: the processor time that one check may take. Starts no worker yet."""
        self.num_workers = max(1, min(num_workers, os.cpu_count() or 1))
        self.cpu_seconds = cpu_seconds
        self._workers: WorkerPool | None = None
        self._next_call = 0
        self._cache: dict[tuple[str, ...], bool | None] = {}
        self._lock = threading.Lock()

    def compare(self, pairs: Sequence[Pair], mode: str = "answer") -> list[bool | None]:
        """Compares each pair (gold, answer) with math-verify. Returns True if both are the same,
        False if not, None if the check was ended at its limit or failed.

        `mode` says what the two texts are. `answer`: two answers. `text`: a gold answer and a whole
        solution. `trl`: a solution and a whole completion, read as TRL's `accuracy_reward` does;
        then None means that no answer can be read in the solution, and a check that was ended at
        its limit is False. ShoalError if math-verify cannot be imported. Only pairs that are not in
        the cache are checked; a failed check is cached too.
        """
        keys: list[tuple[str, ...]] = [(mode, *pair) for pair in pairs]
        with self._lock:
            if len(self._cache) > _NUM_CACHED:
                self._cache.clear()
            fresh = [key for key in dict.fromkeys(keys) if key not in self._cache]
            self._cache.update(zip(fresh, self._check(fresh), strict=True))
            return [self._cache[key] for key in keys]

    def close(self) -> None:
        """Ends the worker processes; a later check starts others."""
        if self._workers is not None:
            self._workers.close()
        self._workers = None

    def _check(self, keys: Sequence[tuple[str, ...]]) -> list[bool | None]:
        """Returns math-verify's result for each key (mode, gold, answer), without the cache. Starts
        the workers if there are none. If their supervisor was killed or is stuck, the remaining
        checks count as ended at the limit, and the next call starts other workers."""
        # What stays if a check is ended at its limit: None means something else for `trl`.
        results: list[bool | None] = [False if key[0] == "trl" else None for key in keys]
        limits = Limits(self.num_workers, WALL_SECONDS, MEMORY_BYTES)
        if keys and self._workers is None:
            self._workers = WorkerPool(
                _Handler(self.cpu_seconds).check, limits, prepare=_import_math_verify
            )
        # Numbers of calls are never used twice: late replies to earlier ones are known by them.
        first = self._next_call
        self._next_call += len(keys)
        left = set(range(len(keys)))
        deadline = time.monotonic() + limits.most_seconds(len(keys))
        try:
            for i, key in enumerate(keys):
                assert self._workers is not None
                self._workers.submit(first + i, {"texts": key})
            while left and self._workers is not None and time.monotonic() < deadline:
                for call, reply in self._workers.wait(1.0):
                    number = call - first
                    if number not in left:  # a reply to an earlier check that an interrupt ended
                        continue
                    left.discard(number)
                    if "unusable" in reply:
                        raise ShoalError(
                            f"math-verify cannot be used ({reply['unusable']}): pip install "
                            "'.[math]' in the clone of Shoal"
                        )
                    if "same" in reply:
                        results[number] = reply["same"]
        except WorkersLost:
            pass
        except BaseException:
            # A stop may fall between two halves of a frame: the next check starts other workers.
            self.close()
            raise
        if left:
            self.close()
        return results


# ---- in a worker


_unusable = ""
"""Why math-verify cannot be imported; "" if it can."""


def _import_math_verify() -> None:
    """Runs in the supervisor of the workers: imports math-verify and uses it once, so that workers,
    which are forks, need not. Silences this process's output and logging. If the import fails, the
    reason is kept in `_unusable`."""
    global _unusable
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 1)
    os.dup2(null, 2)
    logging.disable()
    try:
        from math_verify import parse, verify  # pyright: ignore[reportMissingImports]

        verify(
            parse("\\boxed{1}", parsing_timeout=0),
            parse("\\boxed{1}", parsing_timeout=0),
            timeout_seconds=None,
        )
    except Exception as error:
        _unusable = f"{type(error).__name__}: {error}".replace("\n", " ")


class _Handler:
    """Compares two texts with math-verify in a worker process."""

    def __init__(self, cpu_seconds: float) -> None:
        self.cpu_seconds = cpu_seconds
        self.num_checks = 0

    def check(self, header: Header, body: bytes) -> Header:
        """Compares the texts in a call's header (mode, gold, answer). The reply has the result as
        `same`, no `same` if math-verify raised, or `unusable` with the reason if it cannot be
        imported. A timer kills this process if the check exceeds its processor time. After
        CHECKS_A_WORKER checks the reply asks for another worker (`spent`)."""
        if _unusable:
            return {"unusable": _unusable}
        mode, gold, answer = header["texts"]
        self.num_checks += 1
        reply: Header = {"spent": self.num_checks >= CHECKS_A_WORKER}
        # When the timer ends, the system ends the process.
        signal.setitimer(signal.ITIMER_PROF, self.cpu_seconds)
        try:
            if mode == "trl":
                reply["same"] = _trl_accepts(gold, answer)
            elif mode == "text":
                reply["same"] = _math_verify_accepts(gold, answer)
            else:
                reply["same"] = _math_verify_accepts(gold, f"\\boxed{{{answer}}}")
        except (Exception, RecursionError):  # the check failed: the reply has no verdict
            pass
        signal.setitimer(signal.ITIMER_PROF, 0)
        return reply


def _math_verify_accepts(gold: str, text: str) -> bool:
    """True if math-verify finds in `text` the same answer as `gold`, and also with the two
    exchanged, since its verdict may depend on the order. False if it can read no answer in one of
    them. `gold` is LaTeX without a box; `text` is a boxed answer or a whole solution. There is no
    limit of time here: the timer of `_Handler.check` ends the process."""
    from math_verify import parse, verify  # pyright: ignore[reportMissingImports]

    with _patched_math_verify():
        # A `parsing_timeout` of 0 and a `timeout_seconds` of None mean: no limit.
        golds: list[Any] = parse(f"\\boxed{{{gold}}}", parsing_timeout=0)
        answers: list[Any] = parse(text, parsing_timeout=0)
        if not golds or not answers:
            return False
        _unwrap_equations(golds, answers)
        _name_imaginary_units(golds, answers)
        # `allow_set_relation_comp`: by default math-verify accepts an interval in place of an
        # inequality only if the interval is the answer.
        return bool(
            verify(golds, answers, timeout_seconds=None, allow_set_relation_comp=True)
            and verify(answers, golds, timeout_seconds=None, allow_set_relation_comp=True)
        )


_COORDINATES = {"x", "y", "z"}


def _unwrap_equations(golds: list[Any], answers: list[Any]) -> None:
    """Replaces an equation, like `m + n = 7`, by its right side if the other answer is not an
    equation. Equations with x, y or z on the left stay, since they describe curves. Changes the
    first element of the lists in place."""
    from math_verify.grader import is_equation, take_last_relation  # pyright: ignore

    for side, other in ((golds, answers), (answers, golds)):
        if is_equation(side[0]) and not is_equation(other[0]):
            equation = take_last_relation(side[0])
            if not _COORDINATES & {str(symbol) for symbol in equation.lhs.free_symbols}:
                side[0] = equation.rhs


def _name_imaginary_units(*sides: list[Any]) -> None:
    """Replaces `i` by the imaginary unit in an answer whose only letter it is: math-verify takes
    the `i` of `1.0i` for a variable. Changes the lists in place."""
    from sympy import Basic, I  # pyright: ignore[reportMissingImports]

    for side in sides:
        if isinstance(side[0], Basic) and {str(symbol) for symbol in side[0].free_symbols} == {"i"}:
            side[0] = side[0].xreplace(dict.fromkeys(side[0].free_symbols, I))


# ---- numbers

PLACES = 6
"""Two numbers, at least one of them written as a decimal, are the same if they are equal after
rounding to this many places, or to this many significant digits below 0.1. Without a decimal on
either side numbers are compared exactly."""
_IN_BRACES = "_in_braces"
_MOST_DIGITS = 400
"""Two exact numbers that agree in this many digits count as the same."""


@contextlib.contextmanager
def _patched_math_verify() -> Iterator[None]:
    """A context in which this process's math-verify is patched in two ways. It compares numbers by
    `_is_same_number`, because it would round all numbers to six places, and small ones to 0. And a
    set in braces is not equal to a tuple, because it would take both `\\{1,2\\}` and `1,2` for
    `(1,2)`."""
    from latex2sympy2_extended.latex2sympy2 import _Latex2Sympy  # pyright: ignore
    from latex2sympy2_extended.sets import FiniteSet  # pyright: ignore[reportMissingImports]
    from math_verify import grader  # pyright: ignore[reportMissingImports]
    from sympy import Tuple  # pyright: ignore[reportMissingImports]

    read_set = _Latex2Sympy.convert_finite_set
    compare_elements = grader.sympy_deep_compare_set_and_tuple
    compare_numbers = grader.sympy_numeric_eq

    def read_noted_set(self: Any, expr: Any) -> Any:
        """Reads a set like math-verify, and marks it if it was written in braces."""
        elements = read_set(self, expr)
        if isinstance(elements, FiniteSet) and not expr.BOXED_CMD():
            vars(elements)[_IN_BRACES] = True
        return elements

    def compare_noted(first: Any, second: Any, *rest: Any) -> bool:
        """Compares like math-verify, but a tuple is never the same as a set that was written in
        braces."""
        if isinstance(first, Tuple) and getattr(second, _IN_BRACES, False):
            return False
        if isinstance(second, Tuple) and getattr(first, _IN_BRACES, False):
            return False
        return compare_elements(first, second, *rest)

    _Latex2Sympy.convert_finite_set = read_noted_set
    grader.sympy_deep_compare_set_and_tuple = compare_noted
    grader.sympy_numeric_eq = _is_same_number
    try:
        yield
    finally:
        _Latex2Sympy.convert_finite_set = read_set
        grader.sympy_deep_compare_set_and_tuple = compare_elements
        grader.sympy_numeric_eq = compare_numbers


def _is_same_number(
    first: Any, second: Any, float_rounding: int = 0, numeric_precision: int = 0
) -> bool:
    """True if two expressions of sympy are the same number, or matrices of the same numbers; False
    if either has variables. `50\\%` is the same as 50 and as 0.5. The last two parameters are
    unused: the signature is that of the function of math-verify that this replaces."""
    from math_verify.grader import get_pct_val  # pyright: ignore[reportMissingImports]
    from sympy import MatrixBase  # pyright: ignore[reportMissingImports]

    if isinstance(first, MatrixBase) and isinstance(second, MatrixBase):
        return first.shape == second.shape and all(
            map(_is_same_number, first.flat(), second.flat())
        )
    if first.free_symbols or second.free_symbols:
        return False  # left to sympy's simplify
    without_percent = get_pct_val(first), get_pct_val(second)
    match without_percent:
        case (None, None):
            return _is_same_value(first, second)
        case (None, number):
            return _is_same_value(first, number) or _is_same_value(first, number / 100)
        case (number, None):
            return _is_same_value(number, second) or _is_same_value(number / 100, second)
        case (number, other):
            return _is_same_value(number, other)
    return False


def _is_same_value(first: Any, second: Any) -> bool:
    """True if two numbers of sympy are equal: after rounding (`PLACES`) if either is written as a
    decimal, else exactly."""
    from sympy import Float, Rational  # pyright: ignore[reportMissingImports]

    has_decimal = first.is_Float or second.is_Float

    def exact(expression: Any) -> Any:
        """Returns an expression whose decimals are exact fractions."""
        decimals = {number: Rational(str(number)) for number in expression.atoms(Float)}
        return expression.xreplace(decimals).doit()

    first, second = exact(first), exact(second)
    if first == second:
        return True
    if first.is_finite is False or second.is_finite is False:
        # a difference with infinity says nothing
        return False
    if not has_decimal:
        if first.is_Rational and second.is_Rational:
            return False
        # 0 up to _MOST_DIGITS digits: no part of the difference is certainly another number.
        difference = (first - second).evalf(15, maxn=_MOST_DIGITS).as_real_imag()
        return all(
            part.is_number and part.is_finite and not (part.is_comparable and _is_significant(part))
            for part in difference
        )
    # 40 digits are far more than PLACES asks for. Real and imaginary parts are compared each.
    parts = zip(first.evalf(40).as_real_imag(), second.evalf(40).as_real_imag(), strict=True)
    return all(
        a.is_Number and b.is_Number and _rounds_to(Fraction(str(a)), Fraction(str(b)))
        for a, b in parts
    )


def _is_significant(number: Any) -> bool:
    """True if a number that sympy evaluated is certainly not 0. sympy gives a number that may be 0
    no certain digit."""
    # A precision of 1 bit means no certain digit; an exact number has none, so 2 stands for it.
    return number != 0 and getattr(number, "_prec", 2) > 1


def _rounds_to(first: Fraction, second: Fraction) -> bool:
    """True if two numbers are equal after rounding to `PLACES` decimal places, or, if both are
    below 0.1, to that many significant digits."""
    size = max(abs(first), abs(second))
    places = PLACES
    while size and size < Fraction(1, 10):
        size *= 10
        places += 1
    return round(first, places) == round(second, places)


def _trl_accepts(solution: str, completion: str) -> bool | None:
    """Returns TRL's `accuracy_reward` as a bool: whether the completion's answer, which must be
    LaTeX, preferably in a box, is that of the solution. None if no answer can be read in the
    solution. False if none can be read in the completion."""
    from latex2sympy2_extended import NormalizationConfig  # pyright: ignore[reportMissingImports]
    from math_verify import LatexExtractionConfig, parse, verify  # pyright: ignore

    golds: list[Any] = parse(solution, parsing_timeout=0)
    if not golds:
        return None
    config = LatexExtractionConfig(
        boxed_match_priority=0,
        try_extract_without_anchor=False,
        normalization_config=NormalizationConfig(units=True),
    )
    answers = parse(
        completion, extraction_config=[config], extraction_mode="first_match", parsing_timeout=0
    )
    return bool(verify(golds, answers, timeout_seconds=None))
