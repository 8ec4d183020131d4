"""What checkers of instructions count in a text: words, sentences, words in capitals; and its
language. Nothing is downloaded.

Published figures count sentences with NLTK's Punkt (Kiss and Strunk, 2006) and its English model: a
full stop ends a sentence unless it ends an abbreviation, an initial, an ordinal or an ellipsis;
after these the next word decides. `sentences` follows Punkt's rules, with short tables in place of
the model's statistics: only after those four can the two differ.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable

LANGUAGE_CHARACTERS = 20_000
"""A text's language is detected from this many first characters; langdetect reads only 10,000."""

_CLOSING = r")\";}\]*:@'({\[!?"
# The longest beginning of a word that may end a sentence: up to a `.`, `?` or `!` that the word's
# end or a closing mark follows; in _INNER_CANDIDATE only a closing mark.
_CANDIDATE = re.compile(rf".*[.?!](?=[{_CLOSING}]|$)", re.DOTALL)
_INNER_CANDIDATE = re.compile(rf".*[.?!](?=[{_CLOSING}])", re.DOTALL)
_INNER_END = re.compile(rf"[?!](?=[{_CLOSING}]|--|\.\.)")
# Splits a word into tokens; the last one is looked up among the abbreviations.
_TOKEN_BREAK = re.compile(r"[)\";}\]*:@({\[!?]|--|(?=')")
# Closing marks at the beginning of a piece that belong to the piece before it.
_REALIGNED = re.compile(r"[\"')\]}]+(?=\s|--|$)\s*")
_PUNCTUATION = (";", ":", ",", ".", "!", "?")
_NUMBER = re.compile(r"-?[.,]?\d[\d,.-]*")
_WORD_START = re.compile(r"[^\W\d][\w-]*")


def _split_words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_ABBREVIATIONS = _split_words("""
    mr mrs ms messrs dr prof jr sr st lt col maj gen sen rep reps
    inc co corp cos ltd bros cie conn chg adm ala
    jan feb aug sep sept oct nov dec tues wed fri yr
    ariz calif colo ct fla ga ill kan ky mich minn nev okla ore pa tenn va vt wash wis
    ave ft mg vs ok sw c d e f g h k l m n p r s t v w
    a.m p.m ph.d u.s u.k u.n u.s.a u.s.s.r d.c n.y n.j n.c s.c n.d n.h n.m l.a w.va a.d a.c d.h d.w
    m.b.a j.b j.c j.j j.k j.p j.r r.j r.h r.k t.j h.f g.k w.c w.w c.v s.a n.v b.v s.p.a
""")
"""Words before a full stop that Punkt's English model takes for abbreviations. The model knows
neither `etc` nor `e.g`."""

_OPENERS = _split_words("""
    i he it they him her them us myself yourself himself itself the this these there here your mine
    some many most both such same whole enough neither either various in without under into inside
    beyond between above upon within through throughout along when whenever wherever if unless
    although though while whereas since whether but so yet nor even still however therefore moreover
    furthermore meanwhile instead indeed finally overall thus hence besides anyway otherwise
    similarly likewise accordingly subsequently nevertheless nonetheless separately eventually
    ultimately suddenly soon earlier previously recently currently afterwards initially typically
    sometimes always essentially notably importantly specifically certainly surprisingly
    unfortunately sadly personally honestly according despite among regardless given depending
    tomorrow yesterday yes thanks thank please okay were does cannot try think remember consider
    imagine suppose assume believe guess feeling wish need ask learn choose enjoy explore include
    ensure finish note call contact send submit apply follow wait listen turn walk using being going
    looking working right better nothing anything someone anyone mother mom team question response
    conclusion title section step page figure fig chart list item example examples
""")
"""Words that, with a capital, begin a sentence even after an abbreviation or an ellipsis."""

_COMMON = _OPENERS - {"i"} | _split_words("""
    a an that those its she we you me my our their his what who whose where why how as because after
    before during until once also and or first second third next then just only not no none well now
    today on at by for from to with over about of off out up down near against across around outside
    past plus all each every few several other another much more less little own half certain let do
    did don can could will would should may might must have has had is are was been be say said make
    made take use keep get go come see look know show tell give find help read write start end visit
    avoid add heat place stay stop watch open close move run eat sleep wake live love like want hope
    feel share join perhaps maybe sure great good best bad big small large old young new long short
    high low late fast hard easy free full clean weak strong rich poor left wrong false one two
    three four five everyone everybody everything nobody something people time life day way work
    money food water home homes house car cars cat dog job school college university health music
    art science technology history summer winter spring children students teachers parents friends
    women men customers users players members companies countries cities doctors scientists often
    never usually generally basically later rather whatever based due apart aside having getting
    making coming knowing answer summary introduction chapter part table point option reason steps
    reasons
""")
"""Words that are common in small letters: one of them with a capital is no name, and so begins a
sentence after an initial."""

LANGUAGES = _split_words("""
    af ar bg bn ca cs cy da de el en es et fa fi fr gu he hi hr hu id it ja kn ko lt lv mk ml mr ne
    nl no pa pl pt ro ru sk sl so sq sv sw ta te th tl tr uk ur vi zh-cn zh-tw
""")
"""All results of `detect_language` except None."""


def count_words(text: str) -> int:
    """Returns the number of words: runs of letters, digits and underscores.

    >>> count_words("It's 3.5 well-known words")
    7
    """
    return len(re.findall(r"\w+", text))


# ---- sentences


def sentences(text: str) -> list[str]:
    """Splits a text into sentences like NLTK's Punkt tokenizer with its English model, and returns
    them in order, stripped. A line end alone ends no sentence.

    >>> sentences('Dr. Lee left at 5 p.m. on Monday. "Why?" he asked')
    ['Dr. Lee left at 5 p.m. on Monday.', '"Why?"', 'he asked']
    """
    pieces = []
    start = 0
    words = list(re.finditer(r"\S+", text))
    for number, word in enumerate(words):
        following = words[number + 1] if number + 1 < len(words) else None
        pattern = _CANDIDATE if following else _INNER_CANDIDATE
        candidate = pattern.match(word.group())
        if candidate is None:
            continue
        # A word like `end."Next` may go on behind the sign: then that is what comes after it.
        rest = word.group()[candidate.end() :]
        after = ""
        if rest:
            after = rest[0]
        elif following:
            after = following.group()
        if _ends_sentence(candidate.group(), after) or (not rest and _ends_within(after)):
            end = word.start() + candidate.end()
            pieces.append((start, end))
            start = end
            if following and not rest:
                start = following.start()
    pieces.append((start, len(text.rstrip())))
    return _with_closing_marks_moved(text, pieces)


def _with_closing_marks_moved(text: str, pieces: list[tuple[int, int]]) -> list[str]:
    """Returns the texts of the pieces of a text, given as (start, end). Closing quotes and brackets
    at the beginning of a piece are moved to the end of the piece before it. Empty pieces are left
    out."""
    realigned = []
    num_given = 0  # characters of a piece that the one before it got
    for number, (start, end) in enumerate(pieces):
        start += num_given
        num_given = 0
        if number + 1 < len(pieces):
            next_start, next_end = pieces[number + 1]
            closing = _REALIGNED.match(text[next_start:next_end])
            if closing:
                num_given = closing.end()
                end = next_start + len(closing.group().rstrip())
        if text[start:end]:
            realigned.append(text[start:end])
    return realigned


def _ends_sentence(word: str, after: str) -> bool:
    """True if a word ends a sentence; `word` ends with its `.`, `?` or `!`. `after` is what comes
    next: the next word, or the next character if no space is between."""
    # `?` and `!` end it whatever follows, also inside of the word: `No!).`
    if word[-1] != "." or _INNER_END.search(word):
        return True
    if word.endswith(".."):
        return _begins_sentence(after)
    # The word without its period and what is before it: `p.m` for `(p.m.`.
    stem = _TOKEN_BREAK.split(word)[-1].lstrip("`&#-,").lower().removesuffix(".")
    is_initial = len(stem) == 1 and stem.isalpha()
    # Of `vice-pres` the part behind the last hyphen counts too.
    if stem in _ABBREVIATIONS or stem.rpartition("-")[2] in _ABBREVIATIONS:
        return not is_initial and _begins_sentence(after)
    if not is_initial and not _NUMBER.fullmatch(stem):
        return True
    following = _first_word(after)
    if after in _PUNCTUATION or following[:1].islower():
        return False
    # `J. Smith`: an initial before a name ends nothing.
    return not (is_initial and following[:1].isupper() and following.lower() not in _COMMON)


def _ends_within(word: str) -> bool:
    """True if a word has the end of a sentence before its last character, as `(No!)` has."""
    candidate = _INNER_CANDIDATE.match(word)
    if candidate is None:
        return False
    after = word[candidate.end() :][:1]
    return _ends_sentence(candidate.group(), after)


def _begins_sentence(after: str) -> bool:
    """True if the text after an abbreviation or an ellipsis begins a new sentence."""
    word = _first_word(after)
    return word[:1].isupper() and word.lower() in _OPENERS


def _first_word(text: str) -> str:
    """Returns the word that a text begins with; "" if it does not begin with a letter. Its letters
    may be followed by digits, `_` and hyphens."""
    start = _WORD_START.match(text)
    return start.group() if start else ""


# ---- words in capitals

# Punctuation that is dropped and separates words; an apostrophe before a letter may be a quote.
_BREAK = re.compile(
    r"[\"«»“”‘’„`()\[\]{}<>;@#$%&?!*]|''|--|\.{2,}|[:,](?!\d)|(?i:(?<=')(?![mtsdn])(?=\w\b))"
)
_CLOSERS = "])}>\"'»”’ "
# Endings that are split off as words of their own, short ones (`'m`) and then long ones (`'ll`).
_CLITIC = re.compile(r"(?<=[^'])(?:'[sSmMdD]|')$")
_LONG_CLITIC = re.compile(r"(?<=[^'])(?:'ll|'LL|'re|'RE|'ve|'VE|n't|N'T)$")
_JOINED = re.compile(
    r"\b(?:(can)(not)|(d)('ye)|(gim)(me)|(gon)(na)|(got)(ta)|(lem)(me)|(more)('n)|(wan)(na))\b",
    re.IGNORECASE,
)


def count_capital_words(text: str) -> int:
    """Returns the number of words in capitals, after splitting words like the Penn Treebank: `I'm`
    and `NASA's` contain one such word, `WE'LL` two.

    >>> count_capital_words("NASA's DON'T-ASK rule: I agree, OK?")
    4
    """
    count = 0
    for sentence in sentences(text):
        for word in _treebank_words(sentence):
            count += word.isupper()
    return count


def _treebank_words(sentence: str) -> list[str]:
    """Splits a sentence into words like the Penn Treebank, and returns them: `I'm` -> `I`, `'m`.
    Punctuation is dropped unless it is part of a word."""
    words = []
    # The sentence's own period is dropped, an ellipsis is not.
    body = sentence.rstrip().rstrip(_CLOSERS)
    if body.endswith(".") and not body.endswith(".."):
        sentence = body[:-1]
    spaced = _BREAK.sub(" ", sentence)
    for piece, space in re.findall(r"(\S+)(\s|$)", spaced):
        parts = [piece]
        if space in ("", " "):  # before a line's end clitics stay
            for clitic_pattern in (_CLITIC, _LONG_CLITIC):
                clitic = clitic_pattern.search(parts[0])
                if clitic:
                    # `we'll` -> `we`, `'ll`
                    parts[:1] = [parts[0][: clitic.start()], clitic.group()]
        for part in parts:
            words += _JOINED.sub(_split_joined, part).split()
    return words


def _split_joined(joined: re.Match[str]) -> str:
    """Returns a match of `_JOINED` as two words with spaces around: `cannot` -> ` can not `."""
    parts = [part for part in joined.groups() if part]
    return f" {parts[0]} {parts[1]} "


# ---- language


@functools.lru_cache(maxsize=256)
def detect_language(text: str) -> str | None:
    """Returns the ISO 639-1 code of a text's language (`zh-cn` and `zh-tw` for Chinese); None if it
    cannot be detected. Only the first LANGUAGE_CHARACTERS characters are read.

    langdetect draws random numbers: a fixed seed makes the result the same each time.
    """
    detect, unknown = _detector()
    try:
        return detect(text[:LANGUAGE_CHARACTERS])
    except unknown:
        return None


@functools.cache
def _detector() -> tuple[Callable[[str], str], type[Exception]]:
    """Returns langdetect's function with a fixed seed, and the exception that it raises for a text
    whose language it cannot detect."""
    from langdetect import DetectorFactory, LangDetectException, detect

    DetectorFactory.seed = 0
    return detect, LangDetectException
