"""Expressions of + - * / and brackets over whole numbers, read by a small parser: nothing is evaluated as code."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

MAX_CHARS = 200
"""A longer text is no expression."""
MAX_DEPTH = 20
"""Most brackets and signs that stand inside one another."""
MAX_DIGITS = 9

_TOKEN = re.compile(r"\s*([0-9]+|[-+*/()])\s*")
_SIGNS = str.maketrans({"×": "*", "·": "*", "÷": "/", "−": "-", "–": "-"})


@dataclass(frozen=True)
class Expression:
    """What an expression comes to, and the numbers in it, in order.

    >>> read("(3 + 4) * 2")
    Expression(value=Fraction(14, 1), numbers=(3, 4, 2))
    """

    value: Fraction
    numbers: tuple[int, ...]


class _Wrong(Exception):
    """The text is no expression."""


def read(text: str) -> Expression | None:
    """The expression that the whole text is; None for anything else, a division by 0 among it."""
    if len(text) > MAX_CHARS:
        return None
    try:
        reader = _Reader(_tokens(text.translate(_SIGNS)))
        value = reader.sum(0)
        return Expression(value, tuple(reader.numbers)) if reader.next() == "" else None
    except (_Wrong, ZeroDivisionError):
        return None


def _tokens(text: str) -> list[str]:
    tokens, at = [], 0
    while at < len(text):
        match = _TOKEN.match(text, at)
        if match is None or len(match[1]) > MAX_DIGITS:
            raise _Wrong
        tokens.append(match[1])
        at = match.end()
    return tokens


class _Reader:
    """Reads tokens from left to right; a method a rule of the grammar."""

    def __init__(self, tokens: list[str]) -> None:
        self.tokens, self.at = tokens, 0
        self.numbers: list[int] = []

    def next(self) -> str:
        return self.tokens[self.at] if self.at < len(self.tokens) else ""

    def take(self) -> str:
        token = self.next()
        self.at += 1
        return token

    def sum(self, depth: int) -> Fraction:
        value = self.product(depth)
        while self.next() in ("+", "-"):
            sign = self.take()
            value = value + self.product(depth) if sign == "+" else value - self.product(depth)
        return value

    def product(self, depth: int) -> Fraction:
        value = self.factor(depth)
        while self.next() in ("*", "/"):
            sign = self.take()
            value = value * self.factor(depth) if sign == "*" else value / self.factor(depth)
        return value

    def factor(self, depth: int) -> Fraction:
        token = self.take()
        if depth >= MAX_DEPTH:
            raise _Wrong
        if token == "-":
            return -self.factor(depth + 1)
        if token == "(":
            value = self.sum(depth + 1)
            if self.take() != ")":
                raise _Wrong
            return value
        if not token.isdigit():
            raise _Wrong
        self.numbers.append(int(token))
        return Fraction(self.numbers[-1])
