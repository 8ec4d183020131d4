"""Reads numbers in answers: all reading of digits that models and data sets write is here.

Which function reads a text depends on what the text is:

    parse_number  all of it is a number as people write it   `$1,234.50.`
    number_in     a short text with a number in it           `x = 7/2 cups`
    parse_latex   all of it is a number in plain LaTeX       `2\\frac{1}{2}`
    parse_float   all of it is a number to Python's `float`  `1e3`

Values are exact, except those of `parse_float`. Nothing is evaluated, and every search is linear in
the text's length.
"""

from __future__ import annotations

import re
from decimal import Decimal, localcontext
from fractions import Fraction

MAX_NUMBER_CHARS = 100
"""`number_in` and `answer_key` do not take a longer run of digits for a number."""
MAX_LATEX_CHARS = 60
MAX_FLOAT_CHARS = 400
MAX_CHARS = 1000
"""`number_in` reads only the last characters of a longer text, `is_bare` the first."""

# ---- what digits are

_SPACE = "[ \u00a0\u2009\u202f]"
_BY_COMMAS = "[0-9]{1,3}(?:,[0-9]{3})+"  # 1,234,567
_BY_COMMAS_IN_INDIA = "[0-9]{1,2}(?:,[0-9]{2})+,[0-9]{3}"  # 12,34,567
_BY_ANY_SPACES = f"[0-9]{{1,3}}(?:{_SPACE}[0-9]{{3}})+"  # 1 234 567
# In a text spaces also separate numbers: `1 234` is one number, `12 1 234` and `1 234 5` are more.
_BY_SPACES_IN_TEXT = r"(?<![0-9.,] )(?<![0-9.,])[0-9]{1,3}(?: [0-9]{3})+(?! ?[0-9/])"
_DECIMALS = r"\.[0-9]+"
DECIMAL = r"[0-9]{1,30}(?:\.[0-9]{1,30})?"
"""Pattern of a decimal number without separators between groups of digits."""

_SEPARATORS = re.compile(rf"{_SPACE}|,")

MINUS_SIGNS = {"\u2212": "-", "\u2013": "-", "\u2011": "-"}
"""Characters that models write for `-`: minus sign, en dash, non-breaking hyphen."""
_MINUS_SIGNS = str.maketrans(MINUS_SIGNS)
_THIN_SPACES = "[\u2009\u202f]"
_BY_THIN_SPACES = re.compile(f"(?<![0-9])[0-9]{{1,3}}(?:{_THIN_SPACES}[0-9]{{3}})+(?![0-9])")
_SPACES = str.maketrans({"\u00a0": " ", "\u2009": " ", "\u202f": " "})


def ascii_numbers(text: str) -> str:
    """Returns a text with each minus sign as `-`, without thin spaces between groups of three
    digits, and with all other thin and no-break spaces as plain spaces.

    >>> ascii_numbers("–12\u202f000\u2009km")
    '-12000 km'
    """

    def without_spaces(match: re.Match[str]) -> str:
        return re.sub(_THIN_SPACES, "", match[0])

    return _BY_THIN_SPACES.sub(without_spaces, text.translate(_MINUS_SIGNS)).translate(_SPACES)


# ---- a text that is a number

_ALONE = re.compile(
    rf"(?P<sign>[+-]?)[\s$]*"
    rf"(?P<digits>(?:[0-9]+|{_BY_COMMAS}|{_BY_ANY_SPACES})?(?:{_DECIMALS})?)"
)
_MARKS = "$% \t\n\r\f\v\u00a0\u2009\u202f"


def parse_number(text: str | None) -> Decimal | None:
    """Returns the exact value of a text that is one number as people write it; None for any other
    text. The number may have a sign, commas or spaces between groups of three digits, `$` and `%`
    around it, and a final period.

    >>> parse_number("$1,234.50."), parse_number("12 apples"), parse_number("4 2")
    (Decimal('1234.50'), None, None)
    """
    unmarked = (text or "").strip(_MARKS).removesuffix(".").strip(_MARKS).translate(_MINUS_SIGNS)
    match = _ALONE.fullmatch(unmarked)
    if match is None or not match["digits"]:
        return None
    return Decimal(match["sign"] + _SEPARATORS.sub("", match["digits"]))


def same_number(text: str | None, gold: str) -> bool:
    """True if both texts are numbers for `parse_number` and have the same value, as `7.0` and `$7`
    have. False if either is no number."""
    number = parse_number(text)
    return number is not None and number == parse_number(gold)


def parse_float(text: str) -> float | None:
    """Returns the value that Python's `float` reads in a text, also nan and inf; None if `float`
    refuses the text, or if it has more than MAX_FLOAT_CHARS characters."""
    if len(text) > MAX_FLOAT_CHARS:
        return None
    try:
        return float(text)
    except ValueError:
        return None


# ---- a number in a text

_DIGITS = (
    rf"(?:(?:{_BY_COMMAS}|{_BY_COMMAS_IN_INDIA}|{_BY_SPACES_IN_TEXT})(?![0-9])|[0-9]+)"
    rf"(?:{_DECIMALS})?|(?<![0-9A-Za-z]){_DECIMALS}"
)
_IN_TEXT = re.compile(
    r"(?P<minus>(?<![0-9A-Za-z)\]}.])-)?(?:\$\s?(?P<minus_after_dollar>-)?)?"
    rf"(?P<digits>{_DIGITS})"
    r"(?:(?P<above>\s[0-9]{1,9})?\s?/\s?(?P<below>[0-9]{1,9})(?![0-9./]))?"
)
"""Matches `-$5`, `$-5`, `5/2`, and `5 1/2`; in the last the group `above` is 1."""
_UNITS = r"(?:[\s*]*(?:[^\W\d_][\w'./^²³-]{0,20}|[%°]))"
_BARE = re.compile(
    rf"[~≈\s]*(?:about\s|approximately\s)?-?\s?\$?(?:{_DIGITS})"
    rf"(?:\s?[0-9]{{0,9}}\s?/\s?[0-9]{{1,9}})?{_UNITS}{{0,3}}[\s.!*]*",
    re.IGNORECASE,
)
_WRAPS = str.maketrans("", "", '$*\\()[]{}`"')
_MINUS_WITH_SPACE = re.compile(r"^([\s$({]*-)\s+(?=[$0-9.])")
_BEFORE_FIRST = " \t\n$*({[\\`\"'~≈:"
"""What may be before the number that a text begins with."""

_TYPED = {
    "\\$": "$",
    "\\%": "%",
    "{,}": ",",
    "\\!": "",
    "\\,": "",
    "\\;": " ",
    "\\ ": " ",
    "~": " ",
    "\\left": "",
    "\\right": "",
    "&nbsp;": " ",
    "€": "$",
    "£": "$",
}
_FRACTION = re.compile(
    r"(?P<whole>[0-9]\s?)?\\[dt]?frac\s?(?:\{\s?(?P<above>-?[0-9]{1,9})\s?\}|(?P<above_digit>[0-9]))"
    r"\s?(?:\{\s?(?P<below>[0-9]{1,9})\s?\}|(?P<below_digit>[0-9]))"
)
_WORDS = re.compile(r"\\(?:text|textbf|mathrm|mathbf|mbox)\s*\{([^{}]*)\}")


def number_in(text: str) -> Fraction | None:
    """Returns the exact value of the number in a short text; None if there is no number. The number
    may have units, or be a fraction `a/b`, `\\frac{a}{b}` or `1 1/2`. Only the text after the last
    `=` counts if it has digits. Of several numbers the first is taken if the text begins with it,
    else the last. Only the last MAX_CHARS characters are read. None also if the number has more
    than MAX_NUMBER_CHARS digits or divides by 0.

    >>> number_in("$42.00 per day"), number_in("x = 7/2"), number_in("none")
    (Fraction(42, 1), Fraction(7, 2), None)
    """
    text = _as_typed(text[-MAX_CHARS:])
    behind_equals = text.rpartition("=")[2]
    if has_digit(behind_equals):
        text = behind_equals
    text = _MINUS_WITH_SPACE.sub(r"\1", text)
    matches = list(_IN_TEXT.finditer(text))
    if not matches:
        return None
    first = matches[0]
    begins_with_it = not text[: first.start()].strip(_BEFORE_FIRST)
    return _value_in_text(first if begins_with_it else matches[-1])


def is_bare(text: str) -> bool:
    """True if a text is one number, perhaps with "about" before it and up to three words of units
    after it, and nothing else. Only the first MAX_CHARS characters are read."""
    unwrapped = _as_typed(text[:MAX_CHARS]).translate(_WRAPS)
    return _BARE.fullmatch(unwrapped) is not None


def has_digit(text: str) -> bool:
    return any(character in "0123456789" for character in text)


def _as_typed(text: str) -> str:
    """Returns a text with LaTeX's signs, fractions and words as people type them:
    `-\\frac{1}{2}\\text{ cup}` -> `-1/2 cup`. Minus signs and spaces become ASCII. € and £ become
    `$`."""
    text = ascii_numbers(text)
    for latex, typed in _TYPED.items():
        text = text.replace(latex, typed)
    return _WORDS.sub(r" \1 ", _FRACTION.sub(_typed_fraction, text))


def _typed_fraction(match: re.Match[str]) -> str:
    """Returns a match of `_FRACTION` as people type it: `\\frac{3}{4}` -> `3/4 `, `1\\frac34` ->
    `1 3/4 `."""
    above = match["above"] or match["above_digit"]
    below = match["below"] or match["below_digit"]
    if match["whole"]:
        return f"{match['whole'].strip()} {above}/{below} "
    return f"{above}/{below} "


def _value_in_text(match: re.Match[str]) -> Fraction | None:
    """Returns the value of a match of `_IN_TEXT`; None if it has more than MAX_NUMBER_CHARS digits
    or divides by 0."""
    digits = match["digits"].replace(",", "").replace(" ", "")
    if len(digits) > MAX_NUMBER_CHARS:
        return None
    number = Fraction(digits)
    if match["below"] is not None:
        below = int(match["below"])
        if below == 0:
            return None
        if match["above"]:
            number += Fraction(int(match["above"]), below)
        else:
            number /= below
    is_negative = bool(match["minus"] or match["minus_after_dollar"])
    return -number if is_negative else number


# ---- numbers in LaTeX

_LATEX_DECIMAL = re.compile(rf"(?P<sign>[+-]?)(?P<digits>(?:[0-9]+|{_BY_COMMAS})?(?:{_DECIMALS})?)")
_LATEX_FRACTION = re.compile(
    r"(?P<sign>[+-]?)(?P<whole>[0-9]{1,30})?"
    r"\\frac\{(?P<above>[+-]?[0-9]{1,30})\}\{(?P<below>[0-9]{1,30})\}"
)
_RATIO = re.compile(r"(?P<sign>[+-]?)(?P<above>[0-9]{1,30})/(?P<below>[0-9]{1,30})")


def parse_latex(text: str) -> Fraction | None:
    """Returns the exact value of an answer that is one number in LaTeX, without spaces, `$` and
    `%`; None for anything else. The number is a decimal, `a/b`, `\\frac{a}{b}`, or a mixed number
    like `2\\frac{1}{2}`, whose fraction must be below 1 and have no sign. None also for more than
    MAX_LATEX_CHARS characters, and if it divides by 0.

    >>> parse_latex("-1,234.5"), parse_latex("2\\\\frac{1}{2}"), parse_latex("\\\\pi")
    (Fraction(-2469, 2), Fraction(5, 2), None)
    """
    if len(text) > MAX_LATEX_CHARS:
        return None
    match = _LATEX_DECIMAL.fullmatch(text)
    if match is not None:
        return Fraction(text.replace(",", "")) if match["digits"] else None
    match = _LATEX_FRACTION.fullmatch(text) or _RATIO.fullmatch(text)
    if match is None:
        return None
    above, below = int(match["above"]), int(match["below"])
    if below == 0:
        return None
    number = Fraction(above, below)
    whole = match.groupdict().get("whole")
    if whole is not None:
        if match["above"][0] in "+-" or above >= below:
            return None
        number += int(whole)
    return -number if match["sign"] == "-" else number


_SCIENTIFIC = re.compile(
    r"(?<![0-9A-Za-z.\\])([0-9]{1,99}(?:\.[0-9]{1,99})?|\.[0-9]{1,99})[eE]([+-]?[0-9]{1,2})"
    r"(?![0-9A-Za-z_^]|\.[0-9])"
)
_REPEATING = re.compile(
    r"(?<![0-9.])(?P<whole>[0-9]{0,50})\.(?P<once>[0-9]{0,50})\\(?:overline|bar|dot)\s*"
    r"(?:\{(?P<again>[0-9]{1,50})\}|(?P<again_digit>[0-9]))(?![0-9])"
)
_MIXED_IN_LINE = re.compile(
    r"(?<![0-9A-Za-z.,/^_})\\])([0-9]{1,9})(?:\s|\\[ ,;:!])+([0-9]{1,9})\s*/\s*([0-9]{1,9})"
    r"(?![0-9A-Za-z/^!_]|\.[0-9]|,[0-9]{3})"
)
"""Matches a mixed number in a line, `2 1/2`."""


def latex_numerals(text: str) -> str:
    """Returns a text with its numbers rewritten for LaTeX parsers: scientific notation becomes
    plain digits, repeating decimals become fractions, and mixed numbers get `\\frac`.

    >>> latex_numerals("2 1/2 + 1e3"), latex_numerals("0.1\\\\overline{6}")
    ('2\\\\frac{1}{2} + 1000', '\\\\frac{1}{6}')
    """
    text = _SCIENTIFIC.sub(_without_exponent, text)
    text = _REPEATING.sub(_repeating_as_fraction, text)
    return _MIXED_IN_LINE.sub(_mixed_in_latex, text)


def _without_exponent(match: re.Match[str]) -> str:
    return f"{Decimal(match[0]):f}"


def _repeating_as_fraction(match: re.Match[str]) -> str:
    """Returns a match of `_REPEATING` as a fraction: `0.1\\overline{6}` -> `\\frac{1}{6}`."""
    whole, once = match["whole"], match["once"]
    again = match["again"] or match["again_digit"]
    # 0.1666... = (16 - 1) / 90: its digits with one period, minus those before the first period.
    above = int(f"0{whole}{once}{again}") - int(f"0{whole}{once}")
    number = Fraction(above, (10 ** len(again) - 1) * 10 ** len(once))
    return f"\\frac{{{number.numerator}}}{{{number.denominator}}}"


def _mixed_in_latex(match: re.Match[str]) -> str:
    """Returns `2 1/2` as `2\\frac{1}{2}`, so that it is never read as 21/2; unchanged if the
    fraction is not below 1."""
    whole, above, below = match.groups()
    if int(above) >= int(below):
        return match[0]
    return f"{whole}\\frac{{{above}}}{{{below}}}"


# ---- numbers as text


def write_number(number: Fraction | None) -> str | None:
    """Returns a number as text: `42`, `2.5`, or `7/3` if its decimals do not end. None for None."""
    if number is None:
        return None
    # Its decimals end if and only if 2 and 5 are the only primes in the denominator.
    without_2_and_5 = number.denominator
    for prime in (2, 5):
        while without_2_and_5 % prime == 0:
            without_2_and_5 //= prime
    if without_2_and_5 > 1:
        return str(number)
    # Enough digits that no number that is read here is rounded.
    with localcontext(prec=4 * MAX_NUMBER_CHARS):
        return f"{Decimal(number.numerator) / Decimal(number.denominator):f}"


def answer_key(text: str | None) -> str | None:
    """Returns an answer in a canonical spelling, under which maj@k counts equal answers: numbers by
    their value, any other text as it is. None for None. A text of more than MAX_NUMBER_CHARS
    characters stays as it is too.

    >>> answer_key("$1,200.0"), answer_key("twelve")
    ('1200', 'twelve')
    """
    if text is not None and len(text) > MAX_NUMBER_CHARS:
        return text
    number = parse_number(text)
    return text if number is None else write_number(Fraction(number))
