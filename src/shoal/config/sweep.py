"""Parses the values of a swept key: `a,b`, `choice(a,b)`, `range(1,4)`; `[a,b]` and quoted text are one value.

    optimizer.lr=1e-4,1e-5     ["0.0001", "1e-05"]
    sampling.stop=[a,b],[c]    ['["a","b"]', '["c"]']
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from shoal.types import ShoalError

_CLOSING = {"[": "]", "(": ")", "{": "}"}
_CALL = re.compile(r"(\w+)\((.*)\)\s*", re.DOTALL)


def sweep_texts(shown: str, text: str) -> list[str] | str:
    """The texts of a sweep, or one text for a value that is not swept. `shown`: the argument, for an error."""
    call = _CALL.fullmatch(text.strip())
    if call and call[1] == "interval":
        raise ShoalError(f"{shown}: an interval has no end of values; write a,b or range(from,to,step)")
    try:
        items = list(_split(text))
        if call and call[1] == "range":
            return _range([float(item) for item in _split(call[2])])
        if call and call[1] == "choice":
            return [_item_text(item) for item in _split(call[2])] if call[2].strip() else []
        if call and ("," in text or "*" in text):
            raise ValueError
    except ValueError as error:
        if "," not in text and "*" not in text:
            return text
        raise ShoalError(f"{shown} cannot be read as values of a sweep: write a,b or choice(a,b) or range(1,4), and "
                         "put '...' around text that holds commas but is one value") from error
    if len(items) > 1:
        return [_item_text(item) for item in items]
    return _unquoted(text.strip()) if text.lstrip()[:1] in ("'", '"') else text


def _split(text: str) -> Iterator[str]:
    """The parts between commas outside quotes and brackets; ValueError if a quote or bracket is left open."""
    open_brackets: list[str] = []
    quote, start, place = "", 0, 0
    while place < len(text):
        char = text[place]
        if quote:
            place += char == "\\"
            quote = "" if char == quote else quote
        elif char in "'\"" and (open_brackets or not text[start:place].strip()):
            quote = char
        elif char in _CLOSING:
            open_brackets.append(_CLOSING[char])
        elif open_brackets and char == open_brackets[-1]:
            open_brackets.pop()
        elif char == "," and not open_brackets:
            yield text[start:place].strip()
            start = place + 1
        place += 1
    if quote or open_brackets:
        raise ValueError(text)
    yield text[start:].strip()


def _item_text(item: str) -> str:
    """A value in normal form: without quotes, numbers as Python prints them, items of a list in quotes."""
    if item[:1] in ("'", '"'):
        return _unquoted(item)
    if item.startswith("[") and item.endswith("]"):
        parts = [_item_text(part) for part in _split(item[1:-1])] if item[1:-1].strip() else []
        quoted = (part.replace("\\", "\\\\").replace('"', '\\"') for part in parts)
        return "[" + ",".join(f'"{part}"' for part in quoted) + "]"
    try:
        return str(float(item)) if re.search(r"\d[.e]|[.]\d", item) else item
    except ValueError:
        return item


def _unquoted(text: str) -> str:
    quote = text[0]
    return re.sub(rf"\\([\\{quote}])", r"\1", text[1:-1]) if len(text) > 1 and text[-1] == quote else text


def _range(numbers: list[float]) -> list[str]:
    """The numbers of `range(stop)`, `range(start,stop)` or `range(start,stop,step)`, the stop excluded."""
    start, stop, step = {1: (0.0, *numbers, 1.0), 2: (*numbers, 1.0)}.get(len(numbers), tuple(numbers))
    if step == 0:
        raise ValueError(step)
    count = max(0, -int((start - stop) // step))
    values = [start + number * step for number in range(count)]
    return [str(int(value)) if all(x.is_integer() for x in (start, step)) else str(value) for value in values]
