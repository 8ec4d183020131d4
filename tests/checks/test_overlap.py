"""Questions that training data holds too: 13 words in a row, counted by hand."""

from __future__ import annotations

from shoal.checks.overlap import NUM_WORDS, Overlap, find_overlap, words_of
from shoal.records import Example


def words(first: int, number: int) -> str:
    """Words in a row, each another one: `w3 w4 w5`."""
    return " ".join(f"w{first + index}" for index in range(number))


def row(text: str, **columns: object) -> Example:
    return Example(4, [{"role": "user", "content": text}], columns, "train.jsonl, line 5")


def test_words() -> None:
    assert words_of("If $x^2 = 9$, find |X|!\n") == ["if", "x", "2", "9", "find", "x"]


def test_thirteen_words_in_a_row_are_counted_twelve_are_not() -> None:
    questions = [words(0, 20), words(100, 20)]
    assert find_overlap(questions, [row(words(0, 12)), row(words(101, 12))]) == Overlap(2)
    found = find_overlap(questions, [row(f"Say: {words(103, NUM_WORDS)}, please.")])
    assert (found.num_shared, found.num_whole) == (1, 0)
    assert found.question == questions[1] and found.place == "train.jsonl, line 5"


def test_punctuation_case_and_the_place_do_not_matter() -> None:
    question = words(0, 20)
    text = question.upper().replace(" ", ",\n")
    rows = [
        row(f"x {text} y"),
        row("", solution=text),
        row("", messages=[{"role": "assistant", "content": text}]),
        Example(0, text, {}),
    ]
    for one in rows:
        found = find_overlap([question], [one])
        assert (found.num_shared, found.num_whole) == (1, 1)
    assert find_overlap([question], [rows[3]]).place == "training row 0"


def test_a_question_is_whole_once_all_its_words_were_found() -> None:
    question = words(0, 26)
    halves = [row(words(0, 20)), row(words(8, 18))]
    assert find_overlap([question], halves).num_whole == 1
    halves = [row(words(0, 13)), row(words(13, 13))]
    found = find_overlap([question], halves)
    assert (found.num_shared, found.num_whole) == (1, 0)


def test_words_that_several_questions_have_do_not_count() -> None:
    instruction = words(500, 30)
    questions = [f"{instruction} {words(0, 20)}", f"{instruction} {words(100, 20)}"]
    assert find_overlap(questions, [row(instruction)]).num_shared == 0
    found = find_overlap(questions, [row(f"{instruction} {words(0, 20)}")])
    assert (found.num_shared, found.num_whole) == (1, 1)


def test_a_question_that_is_asked_twice_is_found_twice() -> None:
    questions = ["Why is that?", "What is 2 + 3?", "what is 2+3"]
    found = find_overlap(questions, [row("What is 2 + 3?")])
    assert (found.num_shared, found.num_whole, found.question) == (2, 2, questions[1])


def test_a_short_question_must_be_a_whole_text() -> None:
    questions = ["What is 2 + 3?", "Why?"]
    assert find_overlap(questions, [row("What is 2 + 3? And why?")]).num_shared == 0
    found = find_overlap(questions, [row("what is 2+3")])
    assert (found.num_shared, found.num_whole, found.question) == (1, 1, questions[0])
    assert find_overlap(["", "?"], [row("")]) == Overlap(2)


def test_the_warning() -> None:
    assert Overlap(30).warning("held_out", "outputs/a") == ""
    found = Overlap(30, 3, 1, "Find the number " + "x " * 90, "train.jsonl, line 812")
    text = found.warning("held_out", "outputs/a")
    assert text.startswith(
        "held_out: 3 of 30 questions share 13 consecutive words with the training data of "
        "outputs/a, 1 of them completely, so figures on them say little; the first is 'Find "
    )
    assert text.endswith("in train.jsonl, line 812")
