"""Reads expressions of + - * / and brackets over whole numbers. Nothing is evaluated as Python
code: Python's grammar only parses the tokens."""

from __future__ import annotations

import ast
import operator
import re
from dataclasses import dataclass
from fractions import Fraction

from shoal.tasks.graders.numbers import MINUS_SIGNS

MAX_CHARS = 200
"""A text with more characters is not read as an expression."""
MAX_DEPTH = 20
"""The deepest nesting of brackets, and the most signs before one number."""
MAX_DIGITS = 9

_TOKEN = re.compile(r"[0-9]+|[-+*/()]")
_SIGNS = str.maketrans({"×": "*", "·": "*", "÷": "/"} | MINUS_SIGNS)
_OPERATIONS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


@dataclass(frozen=True)
class Expression:
    """The value of an expression, and the numbers in it in their order.

    >>> parse_expression("(3 + 4) * 2")
    Expression(value=Fraction(14, 1), numbers=(3, 4, 2))
    """

    value: Fraction
    numbers: tuple[int, ...]


def parse_expression(text: str) -> Expression | None:
    """Returns the value and the numbers of a text that is one expression, with `×`, `÷` and the
    like for operators. None for any other text (also one with a plus sign before a number, `+3`),
    for one of more than MAX_CHARS characters, with brackets or signs nested deeper than MAX_DEPTH
    or a number of more than MAX_DIGITS digits, and if it divides by 0."""
    text = text.translate(_SIGNS)
    tokens: list[str] = []
    if len(text) <= MAX_CHARS:
        tokens = _TOKEN.findall(text)
    if "".join(tokens) != "".join(text.split()):
        return None
    depth = 0
    for token in tokens:
        if token == "(":
            depth += 1
        elif token == ")":
            depth -= 1
        if depth > MAX_DEPTH or len(token) > MAX_DIGITS:
            return None
    numbers: list[int] = []
    try:
        # Tokens are separated by spaces, so that `* *` is no power, and `007` is a number to Python
        # too.
        tree = ast.parse(" ".join(token.lstrip("0") or "0" for token in tokens), mode="eval")
        return Expression(_value(tree.body, numbers, 0), tuple(numbers))
    except (SyntaxError, TypeError, ZeroDivisionError):
        return None


def _value(node: ast.expr, numbers: list[int], num_signs: int) -> Fraction:
    """Returns the exact value of a node of Python's syntax tree, and appends its numbers to
    `numbers`. `num_signs` counts the minus signs directly around the node. TypeError for anything
    but numbers and the four operations, and for more than MAX_DEPTH signs."""
    match node:
        case ast.Constant(value=int(number)):
            numbers.append(number)
            return Fraction(number)
        case ast.UnaryOp(op=ast.USub(), operand=operand) if num_signs < MAX_DEPTH:
            return -_value(operand, numbers, num_signs + 1)
        case ast.BinOp(left=left, op=op, right=right):
            first = _value(left, numbers, num_signs)
            return _OPERATIONS[type(op)](first, _value(right, numbers, num_signs))
    raise TypeError(node)
