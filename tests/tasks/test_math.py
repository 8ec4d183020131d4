"""MATH: answers compared by text, by value and by math-verify, which no text can keep busy; rows,
gold, rewards."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from fractions import Fraction
from pathlib import Path
from typing import Any

import huggingface_hub
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from processes import gone
from scoring import score

from shoal.config.sections.task import TaskSection
from shoal.job.task import load_task
from shoal.records import ShoalError
from shoal.tasks.graders import math_check
from shoal.tasks.graders.math_check import Checker, latex, plain, quick_verdict, same, same_all
from shoal.tasks.graders.numbers import parse_latex
from shoal.tasks.math import SYSTEM_PROMPT, answer_of, gold
from shoal.tasks.task import DataReport, Task
from shoal.workers.pool import WorkerPool

# ---- the same or not


@pytest.mark.parametrize(
    ("wanted", "answer", "told"),
    [
        ("42", "42", True),
        ("42", " 42. ", True),
        ("42", "42.0", True),
        ("42", "43", False),
        ("42", "", False),
        ("1,234", "1234", True),
        ("1{,}234", "1,234", True),
        ("11,\\! 111", "11111", True),
        ("-5", "5", False),
        ("\\frac{1}{2}", "0.5", True),
        ("\\frac12", "\\dfrac{1}{2}", True),
        ("\\frac{1}{2}", "1/2", True),
        ("-\\frac{3}{4}", "-0.75", True),
        ("\\frac{-3}{4}", "-3/4", True),
        ("\\frac{1}{3}", "0.33", None),
        ("\\text{even}", "even", True),
        ("\\text{Evelyn}", "evelyn", True),
        ("\\text{even}", "neve", False),
        ("\\text{(C)}", "C", True),
        ("(3,4)", "(3, 4)", True),
        ("\\left(3,4\\right)", "(3,4)", True),
        ("50\\%", "50", True),
        ("\\$18.90", "18.9", True),
        ("90^\\circ", "90", True),
        ("x^2", "x x", None),
        ("2", "1 + 1", None),
        ("\\frac{31}{2}", "3 1/2", None),
        ("12", "1 2", None),
        ("\\frac{1}{0}", "1/0", None),
        ("7", "9" * 2000, None),
        ("9" * 2000, "7", None),
        ("evelyn", "\\text{Evelyn}", True),
        ("neve", "\\text{even}", False),
        ("1e10", "10000000000", True),
        ("3.0e8", "300000000", True),
        ("1.5E-7", "0.00000015", True),
        ("1e10", "1e11", False),
        ("2e3", "6", False),
        ("10e", "10", None),
        ("\\emptyset", "\\varnothing", True),
        ("\\emptyset", "\\{ \\}", True),
        ("∅", "\\left\\{\\right\\}", True),
        ("\\emptyset", "0", None),
        ("0.\\overline{3}", "1/3", True),
        ("0.1\\overline{6}", "\\frac{1}{6}", True),
        ("-1.\\bar{9}", "-2", True),
        ("0.\\overline3", "0.3", None),
        ("2 1/2", "5/2", True),
        ("-2 1/2", "-2.5", True),
        ("2\\,1/2", "2\\frac{1}{2}", True),
        ("2 1/2", "21/2", None),
        ("2\\,1/2", "21/2", None),
        ("7 1/2\\%", "7.5", True),
        ("2 3/2", "7/2", None),
        ("1 234/500", "1.468", True),
        ("-3", "−3", True),
        ("-3", "–3", True),
        ("-3", "\u20113", True),
        ("3", "–3", False),
        ("\\frac{-1}{2}", "–1/2", True),
        ("2x-3", "2x – 3", True),
        ("x=-3", "x\u202f=\u202f–3", True),
        ("(-\\infty,3]", "(–∞,\u202f3]", True),
        ("10000", "10\u202f000", True),
        ("10,\\!000", "10\u2009000", True),
        ("1234567.5", "1\u2009234\u2009567.5", True),
        ("10", "10\u202f000", False),
        ("10000\\pi", "10\u202f000π", True),
        ("2,3", "2,\u202f3", True),
        ("5\\text{ cm}", "5\u202fcm", True),
        ("5\\text{ cm}", "5\u00a0m", False),
        ("12", "1\u20092", None),
        ("5 cm", "5 m", False),
        ("5\\text{ cm}", "5\\text{ m}", False),
        ("5\\text{ cm}^2", "5\\text{ cm}^3", False),
        ("5\\text{ cm}", "5 \\mathrm{cm}", True),
        ("5\\text{ sq. ft}", "5\\text{ feet}^2", True),
        ("5 cm", "5", None),
        ("12\\pi\\text{ cm}", "12\\pi\\text{ km}", False),
        ("2\\text{ p.m.}", "2 am", False),
        ("\\$5", "5 cents", False),
        ("60\\text{ mph}", "60\\text{ km/h}", False),
        ("60 mph", "60 miles per hour", True),
        ("5 apples", "5 men", None),
        ("25^\\circ", "25^\\circ C", None),
        ("25^\\circ\\text{C}", "25^\\circ\\text{F}", False),
    ],
)
def test_quick_verdicts(wanted: str, answer: str, told: bool | None) -> None:
    assert quick_verdict(wanted, answer) is told


WORKED = [
    ("x\\le 3", "x\u202f≤\u202f3", True),
    ("x\\le 3", "x\u00a0≤\u00a03", True),
    ("(1,2)", "(–1, 2)", False),
    ("x^2+2x+1", "(x+1)^2", True),
    ("10\\sqrt{2}", "\\sqrt{200}", True),
    ("1,2,3", "3, 2, 1", True),
    ("3+2i", "2i+3", True),
    ("x=5", "5", True),
    ("2", "1+1", True),
    ("\\frac{\\pi}{2}", "pi/2", True),
    ("2\\sqrt{3}", "2sqrt(3)", True),
    ("\\sqrt{13}", "√13", True),
    ("3", "√13", False),
    ("\\sqrt{3}", "√13", False),
    ("\\sqrt{10}", "sqrt{10}", True),
    ("\\sqrt{x+1}", "√(x + 1)", True),
    ("\\frac{3\\sqrt{10}}{2}", "3√10/2", True),
    ("0", "√10", False),
    ("\\sqrt{2}+1", "√2 + 1", True),
    ("\\sqrt{1+\\sqrt{2}}", "√(1+√2)", True),
    ("42", "42 \\text{ apples}", True),
    ("\\{1,2\\}", "\\{2,1\\}", True),
    ("x+1", "x+2", False),
    ("\\sqrt{2}", "\\sqrt{3}", False),
    ("(1,2)", "(1,3)", False),
    ("x", "y", False),
    ("\\infty", "-\\infty", False),
    ("\\infty", "5", False),
    ("(0,\\infty)", "(0,5)", False),
    ("(1,2)", "\\{1,2\\}", False),
    ("\\{1,2\\}", "(1,2)", False),
    ("(1,2)", "1,2", True),
    ("5", "5 \\text{ cm}", True),
    ("5\\text{ cm}^2", "5", True),
    ("3c", "3", False),
    ("2t", "2 \\cdot t", True),
    ("\\sin 30^\\circ", "1/2", True),
    ("\\sin 30", "1/2", False),
    ("\\sin 30^\\circ", "\\sin 30", False),
]


DIFFERENT = [
    ("0.000001", "0.0000011"),
    ("0.0000001", "0.0000002"),
    ("\\frac{1}{2^{99}}", "\\frac{1}{2^{98}}"),
    ("\\frac{1}{2004!}", "\\frac{1}{2006!}"),
    ("\\frac{2^{2005}+1}{3 \\cdot 2^{2006}}", "\\frac{1}{3 \\cdot 2^{2006}}"),
    ("10^{-9}", "0"),
    ("10^{100}", "10^{100}+1"),
    ("\\sqrt{10^{200}+1}", "10^{100}"),
    ("x>2^{-99}", "x>2^{-98}"),
    ("\\{0.000001\\}", "\\{0.0000011\\}"),
    ("(0,0.000001)", "(0,0.0000011)"),
    ("0.00001\\%", "0.00002\\%"),
    ("\\begin{pmatrix}0.0000001\\\\1\\end{pmatrix}", "\\begin{pmatrix}0\\\\1\\end{pmatrix}"),
    ("1, 2, \\ldots, n", "1, 3, 5, \\ldots, 2n-1"),
    ("1:2:3:\\ldots", "1:4:9:\\ldots"),
    ("1 - \\frac{1}{e}", "1+\\frac{1}{e}"),
    ("\\sin 1", "\\sin 1.0000000001"),
    ("\\pm 2021", "2021"),
    ("12:00", "1:00"),
    ("n=2,3,4", "n=1,2,3"),
    ("D=(0,1)", "D=(0,1.5)"),
    ("19, 46, \\text{ and } 82", "21, 36, and 82"),
    ("x^2+y^2=25", "25"),
    ("(1,2)", "2,1"),
    ("(0,1)", "[0,1]"),
    ("x<3", "x>3"),
    ("x\\le 3", "(-\\infty,3)"),
    ("50\\%", "5000\\%"),
    ("100!", "101!"),
    ("i", "-i"),
    ("2+3i", "2-3i"),
    ("3\\frac{1}{2}", "3.6"),
    ("1{,}234", "1235"),
    ("5\\text{ cm}", "6\\text{ cm}"),
    ("\\frac{1}{3}", "0.33"),
    ("\\sqrt{2}", "1.41"),
    ("\\infty", "-\\infty"),
    ("\\infty", "10^{100}"),
    ("(0,\\infty)", "(0,5)"),
    ("(0,\\infty)", "(-\\infty,0)"),
    ("[0,\\infty)", "[0,-\\infty)"),
    ("\\{\\infty\\}", "\\{-\\infty\\}"),
    ("\\infty", "\\infty i"),
    ("\\infty-\\infty", "0"),
    ("\\frac{0}{0}", "1"),
    ("\\tan 90^\\circ", "\\infty"),
    ("(1,2)", "\\{1,2\\}"),
    ("[1,2]", "\\{1,2\\}"),
    ("(2,1)", "\\{1,2\\}"),
    ("(1,2,3)", "\\{1,2,3\\}"),
    ("((1,2),3)", "(\\{1,2\\},3)"),
    ("\\{(1,2),(3,4)\\}", "\\{\\{1,2\\},\\{3,4\\}\\}"),
    ("\\{(1,2)\\}", "\\{(2,1)\\}"),
    ("\\emptyset", "0"),
    ("\\emptyset", "\\{0\\}"),
    ("\\emptyset", "\\{\\emptyset\\}"),
    ("2 1/2", "21/2"),
    ("2 1/2", "1"),
    ("2 3/2", "23/2"),
    ("0.\\overline{12}", "0.\\overline{21}"),
    ("0.\\overline{3}", "0.33"),
    ("\\sin 30^\\circ", "\\cos 30^\\circ"),
    ("5\\text{ hours}", "5\\text{ minutes}"),
    ("30^\\circ", "30\\text{ radians}"),
    ("3c", "3d"),
    ("2ab", "2"),
    ("2g+3h", "2g+3s"),
    ("52_8", "52_9"),
    ("1A_{16}", "1A_{12}"),
    ("x\\equiv 1 \\pmod 3", "x\\equiv 2 \\pmod 3"),
    ("x\\equiv 1 \\pmod 3", "3"),
    ("\\pi r^2 h", "\\pi r^2"),
    ("\\frac{1}{3}\\pi r^2h", "\\frac{1}{3}\\pi r^2"),
    ("x+2m", "x+2"),
    ("3\\text{ hours and }20\\text{ minutes}", "3\\text{ hours and }30\\text{ minutes}"),
    ("2\\text{ m }30\\text{ cm}", "2"),
    ("20\\text{ percent}", "30\\%"),
    ("\\text{2:30 p.m.}", "2:30 am"),
]
EQUAL = [
    ("(0, 12.5)", "0 < x < 12.5"),
    ("(-\\infty, 3)", "x<3"),
    ("[-2,7]", "-2\\le x\\le 7"),
    ("x\\in[-2,7]", "-2\\le x\\le 7"),
    ("x\\ge 2", "2 \\le x"),
    ("e^{16} - 1", "-1 + exp(16)"),
    ("e^{2(3+1)}", "exp(2*(3+1))"),
    ("\\exp(2)", "e^2"),
    ("14 - i", "14.0 + -1.0i"),
    ("5 - -3", "8"),
    ("2+3i", "3i+2"),
    ("\\dfrac{\\pi}{2}", "pi/2"),
    ("-2\\pi", "-2*pi"),
    ("7", "3+4=7"),
    ("7", "m+n=7"),
    ("5", "x=5"),
    ("y=2x+1", "2x+1"),
    ("f(2)=7", "7"),
    ("\\{1,2\\}", "2,1"),
    ("50\\%", "0.5"),
    ("50\\%", "50"),
    ("500\\%", "5"),
    ("\\frac{1}{3}", "0.333333"),
    ("0.5\\pi", "\\frac{\\pi}{2}"),
    ("3.141593", "\\pi"),
    ("0.00000033333333", "\\frac{1}{3000000}"),
    ("1.5\\times10^{-7}", "0.00000015"),
    ("3\\frac{1}{2}", "3.5"),
    ("\\frac{1}{2^{99}}", "2^{-99}"),
    ("\\frac{2006!}{2004!}", "2006\\cdot 2005"),
    ("\\sqrt{3+2\\sqrt2}", "1+\\sqrt2"),
    ("\\sqrt[3]{8}", "2"),
    ("(3, \\frac{\\pi}{2})", "(3,pi/2)"),
    ("1,234", "1234.0"),
    ("1, 2, \\ldots, n", "1,2,\\dots,n"),
    ("(1,2)", "1,2"),
    ("\\{1\\}", "1"),
    ("\\{(1,2),(3,4)\\}", "(1,2),(3,4)"),
    ("x\\in\\{1,2\\}", "\\{1,2\\}"),
    ("\\infty", "+\\infty"),
    ("(-\\infty,\\infty)", "\\mathbb{R}"),
    ("\\infty+1", "\\infty"),
    ("(1e3,2)", "(1000,2)"),
    ("2\\times 10^5", "2e5"),
    ("(2 1/2,3)", "(5/2,3)"),
    ("2+0.\\overline{3}", "7/3"),
    ("x\\in\\varnothing", "\\{\\}"),
    ("\\sin(30°)", "\\frac12"),
    ("sin(30^{\\circ})", "0.5"),
    ("3", "\\tan^2 60°"),
    ("\\frac{\\sqrt{3}}{2}", "2\\sin 30^\\circ\\cos 30^\\circ"),
    ("\\sin\\left(45^\\circ\\right)", "\\frac{\\sqrt2}{2}"),
    ("\\sin x", "sin(x)"),
    ("2ab", "2ba"),
    ("x + h", "h+x"),
    ("5\\text{ sq. cm}", "5\\text{ cm}^2"),
    ("5 sec", "5"),
    ("60\\text{ mph}", "60\\text{ miles per hour}"),
    ("5\\text{ inches}", "5 in."),
    ("5 km/h", "5 kilometers per hour"),
    ("\\$1,000", "1000 dollars"),
    ("52_8", "52_{8}"),
    ("2g+3h", "3h+2g"),
    ("2x+3 m", "3 m+2x"),
    ("\\frac{1}{2} m v^2 + m g h", "m g h + \\frac{1}{2} m v^2"),
    ("0.5 m", "m/2"),
    ("\\frac{2}{3} h", "\\frac{2h}{3}"),
    ("x\\equiv 1 \\pmod 3", "x \\equiv 1 (mod 3)"),
    ("sin(cos(x))", "\\sin(\\cos(x))"),
    ("ln(2)", "\\ln 2"),
    ("90^\\circ", "90\\text{ degrees}"),
    ("5~\\text{cm}", "5"),
    ("\\pi r^2 h", "h \\pi r^2"),
    ("2x\\text{ m}", "2x"),
    ("x = 2 m", "2"),
    ("20\\%", "20\\text{ percent}"),
    ("0.2", "20 percent"),
    ("\\text{2:30 p.m.}", "2:30 PM"),
    ("5\\text{ ft }6\\text{ in}", "5 feet, 6 inches"),
    ("5 cm, 12 cm", "12 cm and 5 cm"),
    ("\\begin{pmatrix}0.5\\\\1\\end{pmatrix}", "\\begin{pmatrix}1/2\\\\1\\end{pmatrix}"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("pairs", "wanted"), [(DIFFERENT, False), (EQUAL, True)])
def test_a_pair_has_one_verdict_in_both_orders(pairs: list[tuple[str, str]], wanted: bool) -> None:
    found = same_all(pairs)
    assert [pair for pair, one in zip(pairs, found, strict=True) if one is not wanted] == []
    assert same_all([(answer, gold) for gold, answer in pairs]) == found


@pytest.mark.slow
def test_what_cannot_be_evaluated_in_its_time_is_wrong_in_both_orders(hasty: Checker) -> None:
    pairs = [("9^{9^{9^9}}", "9^{9^{9^{9}}}+0"), ("(10^9)!", "(10^9)!+0")]
    assert hasty.compare([*pairs, *((answer, gold) for gold, answer in pairs)]) == [None] * 4


@pytest.mark.parametrize(
    ("first", "second", "same"),
    [
        ("0.333333", "1/3", True),
        ("0.33333", "1/3", False),
        ("0.000001", "0.0000011", False),
        ("0", "0.0000001", False),
        ("0.0000333333", "1/30000", True),
        ("12345678.1", "12345678.2", False),
        ("-0.333333", "-1/3", True),
        ("0.333333", "-1/3", False),
        ("0", "0", True),
    ],
)
def test_decimals_are_rounded_to_six_places_or_digits(first: str, second: str, same: bool) -> None:
    assert math_check._rounds_to(Fraction(first), Fraction(second)) is same
    assert math_check._rounds_to(Fraction(second), Fraction(first)) is same


@pytest.mark.slow
def test_what_math_verify_works_out() -> None:
    found = same_all([(wanted, answer) for wanted, answer, _ in WORKED])
    assert found == [right for _, _, right in WORKED]


HOSTILE = {  # each would keep a parser or sympy busy, or take all memory
    "towers": "9^{9^{9^{9}}}",
    "powers of powers": "10^{10^{10}}",
    "python's powers": "9**9**9**9",
    "nested fractions": "\\frac{" * 10_000 + "1" + "}{2}" * 10_000,
    "nested brackets": "(" * 300 + "1" + ")" * 300,
    "regular expressions": "1" * 30 + "a" * 900,
    "a megabyte": "x+" * 500_000,
    "many closing": "}" * 900,
    "a line of its own": '"]\n["1", "1"]\n',
    "no text": "\x00\ud800",
}


@pytest.mark.parametrize(
    "text",
    [
        "\\sin(" * 200,
        "2" + "\\ " * 400 + "1/2",
        "1e" * 500,
        "1e99" * 250,
        "0." * 400 + "\\overline{3}",
        "2 1/" * 250,
        "5 square " * 110,
        "5" + " " * 990,
        " " * 990 + "percen",
        "a " * 490 + "cm",
        "^\\circ" * 160,
        "\\{\\ " * 240,
        "1" * 980 + "e9",
        "\\text{ cm}" * 90,
    ],
)
def test_no_notation_takes_long_to_read(text: str) -> None:
    start = time.process_time()
    assert quick_verdict("7", text) is not True
    assert quick_verdict(text, "7") is not True
    assert latex(text)
    assert time.process_time() - start < 2


@pytest.fixture(scope="module")
def hasty() -> Any:
    """Processes with little time."""
    checker = Checker(num_workers=2, cpu_seconds=1.0)
    yield checker
    checker.close()


def workers_of(checker: Checker) -> set[int]:
    assert checker._workers is not None
    pid = checker._workers.pid
    return {int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()}


@pytest.mark.slow
def test_hostile_texts_are_wrong_and_cost_little(
    monkeypatch: pytest.MonkeyPatch, hasty: Checker
) -> None:
    def checker():
        return hasty

    monkeypatch.setattr(math_check, "checker", checker)
    start = time.monotonic()
    found = dict(zip(HOSTILE, same_all([("7", text) for text in HOSTILE.values()]), strict=True))
    assert time.monotonic() - start < 60
    assert not any(found.values())
    unchecked = {name for name, one in found.items() if one is None}
    assert unchecked >= {"towers", "nested fractions", "nested brackets", "a megabyte"}
    assert same("x+1", "1+x") is True  # and the processes that took their place answer


@pytest.mark.slow
def test_a_process_that_is_killed_is_replaced(hasty: Checker) -> None:
    assert hasty.compare([("a+b", "b+a")]) == [True]
    for pid in workers_of(hasty):
        os.kill(pid, signal.SIGKILL)
        assert gone(pid)
    assert hasty.compare([("a+c", "c+a"), ("a+d", "d+b")]) == [True, False]


@pytest.mark.slow
def test_a_process_gives_way_to_a_fresh_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(math_check, "CHECKS_A_WORKER", 2)
    checker = Checker(num_workers=1)
    assert checker.compare([("k+0", "0+k")]) == [True]
    first = workers_of(checker)
    assert checker.compare([(f"k+{i}", f"{i}+k") for i in range(1, 5)]) == [True] * 4
    assert not first & workers_of(checker)
    checker.close()


@pytest.mark.slow
def test_a_supervisor_that_is_killed_is_replaced(hasty: Checker) -> None:
    assert hasty.compare([("s+b", "b+s")]) == [True]
    assert hasty._workers is not None
    os.kill(hasty._workers.pid, signal.SIGKILL)
    assert hasty.compare([("s+c", "c+s")]) == [None]
    assert hasty.compare([("s+d", "d+s")]) == [True]


def test_results_are_cached(hasty: Checker, monkeypatch: pytest.MonkeyPatch) -> None:
    pairs = [("u+v", "v+u"), ("u+v", "u v"), ("u+v", "v+u")]
    assert hasty.compare(pairs) == [True, False, True]
    monkeypatch.setattr(hasty, "_workers", None)
    assert hasty.compare(pairs[:2]) == [True, False]
    assert hasty._workers is None  # none was started


@pytest.mark.slow
def test_a_call_that_is_interrupted_leaves_no_answers_behind(
    hasty: Checker, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: Any) -> Any:
        raise KeyboardInterrupt

    assert hasty.compare([("p+t", "t+p")]) == [True]
    monkeypatch.setattr(WorkerPool, "receive", broken)
    with pytest.raises(KeyboardInterrupt):
        hasty.compare([("p+q", "q+p")])
    monkeypatch.undo()
    assert hasty.compare([("p+r", "p+s"), ("p+q", "q+p")]) == [False, True]


def test_easy_answers_need_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def nobody() -> Any:
        raise AssertionError("a process was asked")

    monkeypatch.setattr(math_check, "checker", nobody)
    start = time.monotonic()
    found = same_all([(str(i), f"{i + i % 2}.0") for i in range(3000)])
    assert time.monotonic() - start < 6  # hundreds a second, also on a busy machine
    assert found == [i % 2 == 0 for i in range(3000)]


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(
    st.text(max_size=40)
    | st.text("\\frac{}()1/2.,$x^ √", max_size=40)
    | st.lists(
        st.sampled_from(
            [
                "The answer is ",
                "Answer: ",
                "sqrt",
                "**",
                "\\[",
                "\\]",
                "\\(",
                "\\)",
                "$",
                "\\$",
                "?",
                "!",
                ".",
                "\n",
                " ",
                "4",
                "x",
                "=",
                "{",
                "}",
                "√",
            ]
        ),
        max_size=10,
    ).map("".join)
)
def test_no_text_breaks_the_quick_verdict(text: str) -> None:
    assert quick_verdict("\\frac{1}{2}", text) in (True, False, None)
    assert quick_verdict(text, text) is (bool(text.strip()))
    assert isinstance(latex(text) + plain(text), str)
    assert isinstance(parse_latex(plain(text)), Fraction | None)
    if "boxed" not in text:
        assert answer_of(f"<answer>{text}</answer>") == text.strip()


# ---- the task


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def row(i: int, **other: Any) -> dict[str, Any]:
    return {
        "problem": f"p{i}?",
        "solution": f"It is $1$, no, $\\boxed{{\\frac{{{i}}}{{7}}}}$.",
    } | other


def load(path: Path, **keys: Any) -> Task:
    return load_task(TaskSection(name="math", path=str(path), **keys))


@pytest.mark.parametrize(
    ("one", "answer"),
    [
        (row(1), "\\frac{1}{7}"),
        (row(1, answer="5"), "5"),
        (row(1, answer=" "), "\\frac{1}{7}"),
        (row(1, answer=3), "3"),
        (row(1, answer=0), "0"),
        ({"problem": "p", "solution": "none"}, None),
        ({"problem": "p"}, None),
        ({"problem": "p", "solution": None}, None),
        ({"problem": "p", "solution": "\\boxed{}"}, None),
    ],
)
def test_gold(one: dict[str, Any], answer: str | None) -> None:
    assert gold(one) == answer


def test_rows_and_what_was_dropped(tmp_path: Path) -> None:
    write(
        tmp_path / "train.jsonl",
        [row(1), row(2), {"problem": "q", "solution": "none"}, row(8), row(3)],
    )
    write(tmp_path / "test.jsonl", [row(8), row(9, answer="9/7"), {"problem": "r", "solution": ""}])
    task = load(tmp_path)
    assert [one.prompt[-1]["content"] for one in task.train] == ["p1?", "p2?", "p3?"]
    assert [one.columns["answer"] for one in task.evaluations["held_out"]] == [
        "\\frac{8}{7}",
        "9/7",
    ]
    assert task.train[2].row == 2
    assert task.train[0].prompt[0] == {"role": "system", "content": SYSTEM_PROMPT}
    assert task.notes == ("math: 1 of 3 held-out rows were dropped: no answer that can be read",)
    assert task.data == DataReport(
        {"train.jsonl": 5},
        {"test.jsonl": 3},
        {"no answer that can be read": 1, "problem held out too": 1},
    )
    assert task.question == "problem" and task.of_row
    assert task.of_row(0, row(1)) == task.train[0]
    with pytest.raises(
        ShoalError, match=r"row 4 has no `problem` with an `answer` or a `solution` that ends in"
    ):
        task.of_row(4, {"problem": "p"})
    write(tmp_path / "train.jsonl", [row(8)])
    with pytest.raises(ShoalError, match="task math: every training problem is held out too"):
        load(tmp_path)
    write(tmp_path / "train.jsonl", [{"problem": "q", "solution": "none"}])
    with pytest.raises(
        ShoalError, match="none of the 1 training rows has an `answer` that can be read, or a"
    ):
        load(tmp_path)


def test_gold_that_cannot_be_read_is_dropped(tmp_path: Path) -> None:
    bad = ["\\frac{1", "}{", "1" * 2000]
    rows = [row(1), *(row(i, answer=one) for i, one in enumerate(bad, 2)), row(7, answer="\\{1\\}")]
    write(tmp_path / "train.jsonl", rows)
    write(tmp_path / "test.jsonl", [row(8)])
    task = load(tmp_path)
    assert [one.columns["answer"] for one in task.train] == ["\\frac{1}{7}", "\\{1\\}"]
    assert task.data.dropped == {"no answer that can be read": 3}
    assert task.of_row
    with pytest.raises(
        ShoalError, match=r"row 3 has no `problem` with an `answer` .* braces in pairs"
    ):
        task.of_row(3, row(3, answer="}{"))


def test_two_data_sets_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "lighteval/train.jsonl", [row(i) for i in range(4)])
    write(tmp_path / "lighteval/test.jsonl", [row(i) for i in range(10, 14)])
    write(tmp_path / "500/test.jsonl", [row(i, answer=f"{i}/7") for i in range(10, 13)])
    folders = {"DigitalLearningGmbH/MATH-lighteval": "lighteval", "HuggingFaceH4/MATH-500": "500"}

    def snapshot_download(name, **keys):
        return str(tmp_path / folders[name])

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    task = load_task(TaskSection(name="math"))
    assert len(task.train) == 4
    assert [one.columns["answer"] for one in task.evaluations["held_out"]] == [
        "10/7",
        "11/7",
        "12/7",
    ]
    assert task.notes == ()
    own = write(tmp_path / "mine.jsonl", [row(20)])
    task = load_task(TaskSection(name="math", eval_split=str(own)))
    assert len(task.train) == 4
    assert [one.columns["answer"] for one in task.evaluations["held_out"]] == ["\\frac{20}{7}"]


@pytest.mark.slow
def test_rewards_and_verdicts(tmp_path: Path) -> None:
    task = load(write(tmp_path / "data.jsonl", [row(i) for i in range(10)]))
    one = task.train[3]  # 3/7
    texts = [
        "<reasoning>r</reasoning><answer>$\\dfrac{3}{7}$</answer>",
        "so \\boxed{3/7}",
        "<answer>\\boxed{1 - \\frac{4}{7}}</answer>",
        "<reasoning>r</reasoning><answer>4/7</answer>",
        "3/7",
        "<answer>" + "\\frac{" * 5000 + "</answer>",
    ]
    scores = score(task.rewards, [one], [one.prompt], [texts], [[[1]] * 6])
    np.testing.assert_array_equal(scores.components["correct"], [[1, 1, 1, 0, 0, 0]])
    np.testing.assert_allclose(scores.rewards, [[1.1, 1, 1, 0.1, 0, 0]], rtol=1e-12)
    # of the last, too little is left to look at
    assert scores.metrics == {"unchecked": [0, 0, 0, 0, 0, 0]}
    assert task.correct and task.extract and task.verdict and task.figures
    assert [task.correct(text, one) for text in texts] == [True, True, True, False, False, False]
    assert task.extract(texts[0]) == task.extract("\\boxed{\\frac{3}{7}}") == "\\frac{3}{7}"
    assert task.extract(texts[4]) is None and task.extract("\\boxed{}") is None
    deep = "\\boxed{" + "(" * 40 + "3/7" + ")" * 40 + "}"
    verdicts = []
    for text in ("The answer is $\\frac{3}{7}$.", "Thus $x$ is $3/7$", "no", deep):
        verdicts.append(task.verdict(text, one))
    assert [found["correct"] for found in verdicts] == [True, True, False, False]
    assert [found["unchecked"] for found in verdicts] == [False, False, False, True]
    assert task.figures(verdicts) == {"unchecked": 1.0}
    json.dumps(verdicts)
    scores = score(task.rewards, [one], [one.prompt], [[texts[0], deep]], [[[1]] * 2])
    assert scores.metrics == {"unchecked": [0, 1]}


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("<answer>1</answer>\\boxed{2}", "1"),
        ("\\boxed{2} <answer>\\boxed{3}</answer>", "3"),
        ("\\boxed{2}", "2"),
        ("x" * 20_000 + "\\boxed{2}", "2"),
        ("\\boxed{2}" + "x" * 20_000, None),
        ("2", None),
    ],
)
def test_where_the_answer_stands(text: str, answer: str | None) -> None:
    assert answer_of(text) == answer


SOLUTIONS = [
    ("so x = 5", "5"),
    ("Thus **5**.", "5"),
    ("#### 42", "42"),
    ("We had $x$.\nSo y = 7", "7"),
    ("A: 5", "5"),
    ("There are 3 of 4,000 left", "4,000"),
    ("<think>\\boxed{3}</think> It is 4.", "4"),
    ("So \\(x = 5\\).", "x = 5"),
    ("The answer is $3! \\times 5! = 720$.", "720"),
    ("Hence $$x\n= 5$$", "x = 5"),
    ("The answer is \\[ 7 \\]", "7"),
    ("**Final Answer**\n\n3", "3"),
    ("### Final answer\n\n\\[ \\text{even} \\]", "\\text{even}"),
    ("Thus $a = 2 \\cdot 3 = 6$.", "6"),
    ("so the total is 3/7", "\\frac{3}{7}"),
    ("We get $x$, then $y+1$.", "y+1"),
]


def test_answers_of_any_form(tmp_path: Path) -> None:
    task = load(write(tmp_path / "data.jsonl", [row(i) for i in range(10)]))
    assert task.verdict and task.of_row
    for text, answer in SOLUTIONS:
        right, wrong = (task.of_row(0, row(1, answer=gold)) for gold in (answer, "-13"))
        assert task.verdict(text, right)["correct"] and not task.verdict(text, wrong)["correct"], (
            text
        )


# ---- without math-verify


@pytest.mark.slow
def test_without_math_verify_the_task_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def find_spec(name):
        return None

    monkeypatch.setattr(math_check.importlib.util, "find_spec", find_spec)
    with pytest.raises(
        ShoalError, match=r"math-verify is not installed: pip install '\.\[math\]' in the clone"
    ):
        load(write(tmp_path / "data.jsonl", [row(i) for i in range(10)]))


@pytest.mark.slow
def test_a_broken_math_verify_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "math_verify.py").write_text("raise ImportError('no antlr\\nhere')")
    monkeypatch.syspath_prepend(tmp_path)
    checker = Checker(num_workers=1)
    with pytest.raises(
        ShoalError, match=r"math-verify cannot be used \(ImportError: no antlr here\): pip install"
    ):
        checker.compare([("x", "y")])
    checker.close()
    assert "math_verify" not in sys.modules  # never imported here
