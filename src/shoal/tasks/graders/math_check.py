"""Whether two answers in mathematics are the same: by text and value, else by math-verify in processes of its own.

math-verify hands a model's text to a parser and to sympy, which some texts keep busy for ever. So it runs in child
processes, each check with a limit of processor time and memory: at the limit the process ends, the answer counts as
wrong, and another process takes its place. Nothing of it is imported here.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import json
import os
import re
import select
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from fractions import Fraction
from pathlib import Path

from shoal.types import ShoalError

MAX_CHARS = 1000
"""A longer answer is wrong without being looked at."""
MAX_DEPTH = 25
"""So is one with more brackets inside one another."""
CPU_SECONDS = 3.0
"""Processor time of one check."""
WALL_SECONDS = 30.0
"""Time of one check by the clock, and of a process to start: a machine that is busy with other things gets it."""
MEMORY_BYTES = 2**30
NUM_CHILDREN = 4
_ENDED = "ended"
_CHECKS_A_CHILD = 5000
_REMEMBERED = 20_000
_CHILD = Path(__file__).with_name("math_child.py")

_NUMBER = re.compile(r"([+-]?)([0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)?(?:\.([0-9]+))?")
_RATIO = re.compile(r"([+-]?)(?:\\frac\{([+-]?[0-9]{1,30})\}\{([0-9]{1,30})\}|([0-9]{1,30})/([0-9]{1,30}))")
_WRAPPED = re.compile(r"\\(?:text|textbf|textit|mathrm|mathbf|mbox)\{([^{}]*)\}")
_LARGE_FRACTION = re.compile(r"\\[dt]frac(?![A-Za-z])")
_SHORT_FRACTION = re.compile(r"\\frac([0-9])([0-9])(?![0-9])")
_OPTION = re.compile(r"\(([A-Za-z])\)")
_PI = re.compile(r"(?<![\\A-Za-z])pi(?![A-Za-z])")
_ROOT = re.compile(r"√\s*|(?<![\\A-Za-z])sqrt\s*(?=[({])")
_RADICAND = re.compile(r"[0-9]+(?:\.[0-9]+)?|[A-Za-z](?![A-Za-z])|\\pi(?![A-Za-z])")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
_CLOSING = {"(": ")", "{": "}"}
_SIGNS = {"−": "-", "π": "\\pi ", "∞": "\\infty ", "×": "\\times ", "÷": "/", "·": "\\cdot ", "≤": "\\leq ",
          "≥": "\\geq ", "°": "^\\circ ", "²": "^2", "³": "^3", "∪": "\\cup "}
_SPACING = re.compile(r"\\(?:left|right)(?![A-Za-z])|\\[!,;: ]|(?<![0-9])\s+|\s+(?![0-9])")
_DROPPED = ("^\\circ", "^{\\circ}", "\\$", "$", "\\%", "%")


def same(gold: str, answer: str) -> bool | None:
    """Whether they are the same answer; None where the check came to no end, which counts as wrong."""
    return same_all([(gold, answer)])[0]


def same_all(pairs: Sequence[tuple[str, str]]) -> list[bool | None]:
    """`same` for pairs (gold, answer), several at a time."""
    found: list[bool | None] = [at_a_glance(gold, answer) for gold, answer in pairs]
    asked = [i for i, (_, answer) in enumerate(pairs) if found[i] is None and _is_readable(answer)]
    if asked:
        said = checker().ask([(latex(pairs[i][0]), latex(pairs[i][1])) for i in asked])
        for i, one in zip(asked, said, strict=True):
            found[i] = one
    return found


def at_a_glance(gold: str, answer: str) -> bool | None:
    """Whether two answers are the same, where their text or value tells; None where it has to be worked out.

    >>> at_a_glance("\\\\frac{1}{2}", "0.5"), at_a_glance("7", "8"), at_a_glance("x^2", "x x")
    (True, False, None)
    """
    if not answer.strip():
        return False
    if len(answer) > MAX_CHARS:
        return None
    wanted, came = plain(gold), plain(answer)
    if wanted == came:
        return True
    if _WRAPPED.fullmatch(gold.strip()) and wanted.isalpha() and len(wanted) > 1:
        return wanted.casefold() == came.casefold()
    first, second = value(wanted), value(came)
    if first is None or second is None:
        return None
    if first == second:
        return True
    return False if first.denominator == second.denominator == 1 else None


def _is_readable(answer: str) -> bool:
    depth = most = 0
    for character in answer[:MAX_CHARS + 1]:
        depth += (character in "([{") - (character in ")]}")
        most = max(most, depth)
    return len(answer) <= MAX_CHARS and most <= MAX_DEPTH


def is_whole(gold: str) -> bool:
    """Whether a gold answer can be read, by a cheap look: it is not too long, and its braces come in pairs. All of a
    large data set is looked at, which math-verify would take minutes for."""
    depth = 0
    for brace in _BRACE.findall(gold[:MAX_CHARS + 1]):
        depth += {"{": 1, "}": -1}.get(brace, 0)
        if depth < 0:
            return False
    return depth == 0 and len(gold) <= MAX_CHARS


def latex(answer: str) -> str:
    """An answer with signs and names of plain text in LaTeX: `π/2`, `sqrt(2)`, `√10`."""
    for sign, command in _SIGNS.items():
        answer = answer.replace(sign, command)
    return _with_roots(_PI.sub(r"\\pi ", answer))


def _with_roots(text: str) -> str:
    """Roots of brackets, of a run of digits or of one letter as LaTeX has them; the inner ones first."""
    for match in reversed(list(_ROOT.finditer(text))):
        begin = end = match.end()
        under = ""
        if text[begin:begin + 1] in _CLOSING:
            end = _behind_bracket(text, begin)
            under = text[begin + 1:end - 1]
        elif found := _RADICAND.match(text, begin):
            end, under = found.end(), found[0]
        root = f"\\sqrt{{{under}}}" if end > begin else "\\sqrt "
        text = text[:match.start()] + root + text[end:]
    return text


def _behind_bracket(text: str, begin: int) -> int:
    """The place behind what closes the bracket at `begin`; `begin` itself where nothing does."""
    opening, depth = text[begin], 0
    for at in range(begin, len(text)):
        depth += (text[at] == opening) - (text[at] == _CLOSING[opening])
        if depth == 0:
            return at + 1
    return begin


def plain(answer: str) -> str:
    """An answer without spacing, dollars, degrees, percent signs and words' wrapping, fractions in one spelling."""
    text = _LARGE_FRACTION.sub(r"\\frac", answer.strip().removesuffix(".").replace("{,}", ","))
    for dropped in _DROPPED:
        text = text.replace(dropped, "")
    text = _SPACING.sub("", _WRAPPED.sub(r"\1", text))
    text = _SHORT_FRACTION.sub(r"\\frac{\1}{\2}", text)
    option = _OPTION.fullmatch(text)
    return option[1] if option else text


def value(text: str) -> Fraction | None:
    """The number that a plain answer is; None for anything else."""
    if len(text) > 60:
        return None
    if match := _RATIO.fullmatch(text):
        above, below = int(match[2] or match[4]), int(match[3] or match[5])
        return None if below == 0 else Fraction(-above if match[1] == "-" else above, below)
    match = _NUMBER.fullmatch(text)
    return Fraction(text.replace(",", "")) if match and (match[2] or match[3]) else None


# ---- processes


def require_math_verify() -> None:
    """ShoalError where it is not installed."""
    if importlib.util.find_spec("math_verify") is None:
        raise ShoalError("task math checks answers with math-verify, which is not installed: pip install 'shoal[math]'")


@functools.cache
def _checker(process: int) -> Checker:
    return Checker()


def checker() -> Checker:
    """This process's own; a forked one starts another."""
    return _checker(os.getpid())


class Checker:
    """Child processes that are asked, in parallel; started when they are needed, remembering what they said.

    >>> Checker().ask([("x^2", "x x"), ("1", "9^{9^{9^{9}}}")])
    [True, None]
    """

    def __init__(self, num_children: int = NUM_CHILDREN, cpu_seconds: float = CPU_SECONDS) -> None:
        self.num_children = max(1, min(num_children, os.cpu_count() or 1))
        self.cpu_seconds = cpu_seconds
        self._children: list[_Child] = []
        self._known: OrderedDict[tuple[str, str], bool | None] = OrderedDict()
        self._lock = threading.Lock()
        self._end = weakref.finalize(self, _end_all, self._children, os.getpid())

    def ask(self, pairs: Sequence[tuple[str, str]]) -> list[bool | None]:
        """Whether each (gold, answer) is the same; None where a check was ended at its limit or failed."""
        with self._lock:
            fresh = [pair for pair in dict.fromkeys(pairs) if pair not in self._known]
            found = dict(zip(fresh, self._check(fresh), strict=True))
            came = [found[pair] if pair in found else self._known[pair] for pair in pairs]
            self._known.update(found)
            while len(self._known) > _REMEMBERED:
                self._known.popitem(last=False)
            return came

    def close(self) -> None:
        """Ends the processes."""
        with self._lock:
            _end_all(self._children, os.getpid())

    def _check(self, pairs: Sequence[tuple[str, str]]) -> list[bool | None]:
        found: list[bool | None] = [None] * len(pairs)
        left = deque(enumerate(pairs))
        busy: dict[_Child, int] = {}
        try:
            while left or busy:
                self._give(left, busy)
                for child in _first(busy):
                    if said := child.hear():
                        number = busy.pop(child)
                        found[number] = {"1": True, "0": False}.get(said)
                        if said == _ENDED:
                            self._drop(child)
        finally:
            for child in busy:  # of a call that was broken off: what it says next would be taken for another's
                self._drop(child)
        return found

    def _give(self, left: deque[tuple[int, tuple[str, str]]], busy: dict[_Child, int]) -> None:
        """Gives pairs to processes that are free, starting as many as are needed and may be."""
        for child in [child for child in self._children if child not in busy and child.is_spent]:
            self._drop(child)
        while left:
            child = next((child for child in self._children if child not in busy), None)
            if child is None:
                if len(self._children) >= self.num_children:
                    return
                child = _Child(self.cpu_seconds)
                self._children.append(child)
            number, pair = left.popleft()
            busy[child] = number
            child.ask(*pair)

    def _drop(self, child: _Child) -> None:
        self._children.remove(child)
        child.end()


def _first(busy: Iterable[_Child]) -> list[_Child]:
    """The processes that have said something, ended or used up their time, once there is one."""
    poll = select.poll()
    children = {child.output: child for child in busy}
    for output in children:
        poll.register(output, select.POLLIN)
    seconds = max(0.0, min(child.deadline for child in children.values()) - time.monotonic())
    ready = {number for number, _ in poll.poll(int(1000 * seconds) + 1)}
    now = time.monotonic()
    return [child for child in children.values() if child.output in ready or child.deadline <= now]


class _Child:
    """A process of math-verify, which is asked one pair at a time."""

    def __init__(self, cpu_seconds: float) -> None:
        self.asked = 0
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(_CHILD), str(cpu_seconds), str(MEMORY_BYTES)], stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "JAX_PLATFORMS": "cpu"})
        assert self._process.stdin is not None and self._process.stdout is not None
        self.input, self.output = self._process.stdin.fileno(), self._process.stdout.fileno()
        self.deadline = time.monotonic() + WALL_SECONDS
        self._inbox = b""
        self._ready = False

    @property
    def is_spent(self) -> bool:
        """It has ended by itself, or been asked so often that what it remembers takes room."""
        return self.asked >= _CHECKS_A_CHILD or self._process.poll() is not None

    def ask(self, gold: str, answer: str) -> None:
        self.asked += 1
        self.deadline = time.monotonic() + WALL_SECONDS * (1 if self._ready else 2)
        with contextlib.suppress(BrokenPipeError):  # it has ended, which is seen where it is heard
            os.write(self.input, json.dumps([gold, answer]).encode() + b"\n")

    def hear(self) -> str:
        """What it has said by now: a word, `""` for nothing yet, `ended` once it has or its time is up."""
        if self.deadline <= time.monotonic():
            return _ENDED
        if b"\n" not in self._inbox:  # else it has said two things at once, and reading would wait for a third
            data = os.read(self.output, 4096)
            if not data:
                return _ENDED
            self._inbox += data
        line, newline, rest = self._inbox.partition(b"\n")
        if not newline:
            return ""
        self._inbox = rest
        said = line.decode("utf-8", "replace")
        if said.startswith("no "):
            raise ShoalError(f"math-verify cannot be used ({said[3:]}): pip install 'shoal[math]'")
        if said == "ready":
            self._ready = True
            return self.hear() if b"\n" in rest else ""
        return said

    def end(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
        self._process.wait(WALL_SECONDS)


def _end_all(children: list[_Child], process: int) -> None:
    """Ends the processes, where this is the one that started them."""
    while children and os.getpid() == process:
        children.pop().end()
