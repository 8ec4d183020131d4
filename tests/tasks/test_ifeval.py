"""IFEval: each kind of instruction by hand, strict and loose, the four figures, the reward, what
load refuses."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scoring import score

from shoal.config.sections.task import TaskSection
from shoal.job.task import load_task
from shoal.records import Example, ShoalError
from shoal.tasks.graders.instructions import (
    CHECKS,
    MAX_CHARACTERS,
    follows,
    read_arguments,
    variants,
)
from shoal.tasks.graders.instructions_text import (
    count_capital_words,
    count_words,
    detect_language,
    sentences,
)
from shoal.tasks.ifeval import (
    blank,
    checked_text,
    figures,
    form_points,
    instruction_points,
    is_correct,
    load,
    verdict,
    well_formed,
)
from shoal.tasks.splits import evaluating

ENGLISH = (
    "the children walked slowly through the garden and looked at all the flowers that grew beside "
    "the old wall"
)
GERMAN = (
    "Die Kinder gingen langsam durch den Garten und sahen sich die Blumen an, die neben der alten "
    "Mauer wuchsen."
)
LENGTH, NTH = "length_constraints:number_words", "length_constraints:nth_paragraph_first_word"
AT_LEAST, LESS = {"relation": "at least"}, {"relation": "less than"}


def case(kind: str, arguments: dict[str, Any], followed: list[str], not_followed: list[str]) -> Any:
    name = f"{kind}-{sorted(arguments.values(), key=str)}"[:60]
    return pytest.param(kind, arguments, followed, not_followed, id=name)


CASES = [
    case(
        "keywords:existence",
        {"keywords": ["mom", "ice cream"]},
        ["Mom likes ICE CREAM", "moments of ice creams"],
        ["mom likes ice", "ice  cream for mom", "mother"],
    ),
    case(
        "keywords:existence",
        {"keywords": ["c++", "a.b"]},
        ["C++ and A.B", "a.b.c++"],
        ["c and aXb", "ccc a.b"],
    ),
    case(
        "keywords:frequency",
        {"keyword": "war", "frequency": 3, **AT_LEAST},
        ["War, warm toward", "wAr wAr wAr wAr"],
        ["war war", "w a r war"],
    ),
    case(
        "keywords:frequency",
        {"keyword": " aa ", "frequency": 2, **LESS},
        ["aaa", "none"],
        ["aaaa", "aa b AA"],
    ),
    case(
        "keywords:forbidden_words",
        {"forbidden_words": ["rock", "thanks"]},
        ["rocks and bedrock", "rock_n_roll"],
        ["ROCK!", "no thanks", "hard-rock"],
    ),
    case(
        "keywords:letter_frequency",
        {"letter": "N", "let_frequency": 3, "let_relation": "at least"},
        ["nNn", "banana nut"],
        ["banana", "n n"],
    ),
    case(
        "keywords:letter_frequency",
        {"letter": "#", "let_frequency": 2, "let_relation": "less than"},
        ["# one", "none"],
        ["##", "# a #"],
    ),
    case(
        "language:response_language",
        {"language": "de"},
        [GERMAN, "12345 !!"],
        [ENGLISH, "это короткая история о собаке"],
    ),
    case(
        "language:response_language",
        {"language": "hi"},
        ["यह बच्चों के बारे में एक छोटी कहानी है।", "..."],
        [ENGLISH, GERMAN],
    ),
    case(
        "length_constraints:number_sentences",
        {"num_sentences": 3, **AT_LEAST},
        ["One. Two! Three?", 'Hi?! Yes. "No." Go'],
        ["One. Two", "Dr. Who met Mr. T. at 5 p.m. today. Ok."],
    ),
    case(
        "length_constraints:number_sentences",
        {"num_sentences": 2, **LESS},
        ["one\n\ntwo\n\n- three", "It costs 3.50 in the U.S. market."],
        ["One. Two.", "**Bold.** rest"],
    ),
    case(
        "length_constraints:number_paragraphs",
        {"num_paragraphs": 2},
        ["one\n***\ntwo", "***one***two***"],
        ["one", "one\n***\n***\ntwo", "one\n\ntwo", "a***b***c"],
    ),
    case(
        "length_constraints:number_words",
        {"num_words": 4, **AT_LEAST},
        ["one two three four", "it's non-stop"],
        ["one two three", "one - two & three"],
    ),
    case(
        "length_constraints:number_words",
        {"num_words": 3, **LESS},
        ["well-known", "snake_case_word here"],
        ["one two three", "3.14 m"],
    ),
    case(
        "length_constraints:nth_paragraph_first_word",
        {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "Peace"},
        ["First.\n\npeace, at last", "First.\n\n\"Peace's here", "\n\nPeace\n\nFirst"],
        [
            "First.\n\nThe peace",
            "peace\n\nFirst",
            "First.\n\npeace\n\nthird",
            "First.\n\npeaceful",
            "First.\npeace",
        ],
    ),
    case(
        "detectable_content:number_placeholders",
        {"num_placeholders": 2},
        ["[name] and [address]", "[][]", "[a] b] [c]"],
        ["[name]", "[na\nme] [a]", "][", "[[a]"],
    ),
    case(
        "detectable_content:postscript",
        {"postscript_marker": "P.S."},
        ["Bye\nP.S. one more", "bye p. s. x"],
        ["PS: one more", "p.s", "P.P.S"],
    ),
    case(
        "detectable_content:postscript",
        {"postscript_marker": "P.P.S"},
        ["P.P.S. more", "x p. p. s"],
        ["P.S. more", "PPS more"],
    ),
    case(
        "detectable_content:postscript",
        {"postscript_marker": "N.B."},
        ["n.b. this", "see N.B."],
        ["nxbx", "N. B."],
    ),
    case(
        "detectable_format:number_bullet_lists",
        {"num_bullets": 2},
        ["* one\n* two", "- one\n  * two\ntext", "*\nx\n- y", "\n\n*a\n\n\n--"],
        ["* one", "* one\n* two\n- three", "** one\n** two", "1. one\n2. two", "*\n* one"],
    ),
    case(
        "detectable_format:constrained_response",
        {},
        ["My answer is yes.", "Well. My answer is maybe. So."],
        ["my answer is yes.", "My answer is yes", "Yes."],
    ),
    case(
        "detectable_format:number_highlighted_sections",
        {"num_highlights": 2},
        ["*one* and *two*", "**one** *two*", "**a** **b**"],
        ["*one*", "**one**", "* *\n**", "*a\nb* *c*"],
    ),
    case(
        "detectable_format:multiple_sections",
        {"section_spliter": "SECTION ", "num_sections": 2},
        ["SECTION 1\na\nSECTION 2\nb", "SECTION1SECTION 3 SECTION 9"],
        ["SECTION 1", "Section 1\nSection 2", "SECTION one SECTION two", "SECTION  1 SECTION  2"],
    ),
    case(
        "detectable_format:json_format",
        {},
        ['{"a": [1, 2]}', '```json\n{"a": 1}\n```', "```\n[]\n```", "3"],
        ["{'a': 1}", 'Here: {"a": 1}', "```json", '{"a": 1,}', "[" * 50_000],
    ),
    case(
        "detectable_format:title",
        {},
        ["<<poem of joy>>\nx", "a <<b>> c", "<<>> x >>"],
        ["<poem>", "<<>>", "<<  >>", "<<a\nb>>", "<<<>>>", ">>a<<"],
    ),
    case(
        "combination:two_responses",
        {},
        ["one\n******\ntwo", "******one******two******"],
        ["one", "one******one ", "one******two******three", "one************two", "one *** two"],
    ),
    case(
        "combination:repeat_prompt",
        {"prompt_to_repeat": "Write a haiku.\nNow. "},
        ["Write a haiku.\nNow.\nOld pond", "  WRITE A HAIKU.\nNOW."],
        ["Sure! Write a haiku.\nNow.", "Write a haiku. Now"],
    ),
    case(
        "startend:end_checker",
        {"end_phrase": " Any other questions?"},
        ["Done. any other questions?\n", '"Yes. Any other questions?"'],
        ["Any other questions? No.", "Any other questions?.", "Any other question"],
    ),
    case(
        "startend:quotation",
        {},
        ['"all of it"', ' "a" and "b"\n', '""'],
        ['"', '"open', "'single'", "“curly”"],
    ),
    case(
        "change_case:capital_word_frequency",
        {"capital_frequency": 2, "capital_relation": "at least"},
        ["NASA and ESA", "I am OK", "DON'T"],
        ["NASA and Esa", "Nasa", "ALL-CAPS", "3 4"],
    ),
    case(
        "change_case:capital_word_frequency",
        {"capital_frequency": 2, "capital_relation": "less than"},
        ["only ONE here", "none"],
        ["I'M", "CANNOT"],
    ),
    case(
        "change_case:english_capital",
        {},
        [ENGLISH.upper(), ENGLISH.upper() + " 123!"],
        [ENGLISH, ENGLISH.upper() + " x", GERMAN.upper(), "123"],
    ),
    case(
        "change_case:english_lowercase",
        {},
        [ENGLISH, ENGLISH + ", 123!"],
        [ENGLISH.upper(), ENGLISH.capitalize(), GERMAN.lower(), "123"],
    ),
    case("punctuation:no_comma", {}, ["one; two", "eins、zwei"], ["one, two", "1,000"]),
]


# ---- the kinds


@pytest.mark.parametrize(("kind", "arguments", "followed", "not_followed"), CASES)
def test_a_kind_by_hand(
    kind: str, arguments: dict[str, Any], followed: list[str], not_followed: list[str]
) -> None:
    read = read_arguments(kind, arguments)
    assert {text: follows(text, kind, read) for text in followed} == dict.fromkeys(followed, True)
    assert {text[:80]: follows(text, kind, read) for text in not_followed} == {
        text[:80]: False for text in not_followed
    }


def test_every_kind_has_its_cases_and_an_empty_text_follows_none() -> None:
    arguments = {entry.values[0]: entry.values[1] for entry in CASES}
    assert arguments.keys() == CHECKS.keys() and len(CHECKS) == 25
    for kind, given_ in arguments.items():
        read = read_arguments(kind, given_)
        assert not follows("", kind, read) and not follows(" \n\t", kind, read)
        assert not follows("a" * (MAX_CHARACTERS + 1), kind, read)
    assert follows("a" * MAX_CHARACTERS, "punctuation:no_comma", {})


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("One sentence", 1),
        ("One. two. Three.", 3),
        ("Mr. and Mrs. Li met Dr. Wu.", 1),
        ("At 5 p.m. They left.", 2),
        ("At 5 p.m. We left.", 1),
        ("At 5 p.m. Smith left.", 1),
        ("J. K. Rowling wrote.", 1),
        ("That is plan B. It works.", 2),
        ("Eat fruit, e.g. apples.", 2),
        ("Apples, pears etc. are fruit.", 2),
        ("1. Wash\n2. Dry", 3),
        ("1. wash\n2. dry", 1),
        ("In 1999. the end", 1),
        ("Wait... what", 1),
        ("Wait... The end", 2),
        ("What?! No!!! Yes", 3),
        ('"Go." (Stop.) Now', 3),
        ("**Bold.** rest", 2),
        ("**Bold.**", 2),
        ("He said “no.” Then", 1),
        ("Version 2.0.1 is out", 1),
        ("see shoal.ai for more", 1),
        ('Really?"', 1),
        ("U.S. troops. Left.", 2),
        ("A line\n\nanother\n- one\n- two", 1),
        ("!", 1),
        ("Harald's. Yes", 2),
    ],
)
def test_sentences_by_hand(text: str, count: int) -> None:
    found = sentences(text)
    assert len(found) == count, found
    assert "".join("".join(found).split()) == "".join(text.split())


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("NASA's plan", 1),
        ("I'm, I'll and I'd", 3),
        ("WE'LL", 2),
        ("We'LL", 1),
        ("DON'T", 2),
        ("IT’S", 2),
        ("GIMME", 2),
        ("ALL-IN and A/B", 2),
        ("X:Y and 1:2 PM", 3),
        ("10AM U.S. A.B.", 3),
        ("**BOLD** [NAME] <B>", 3),
        ("R&D", 2),
        ("END...START", 2),
        ("'TIS", 1),
        ("ROCK'A", 2),
        ("You CAN'T. I WON'T.", 5),
        ("ÜBER straße", 1),
        ("1234 !?", 0),
    ],
)
def test_words_in_capitals_by_hand(text: str, count: int) -> None:
    assert count_capital_words(text) == count


def test_words_are_counted_in_every_script() -> None:
    assert count_words("Ünï_code 日本語 don't 3.5") == 6


def test_a_text_has_one_language_and_signs_alone_have_none() -> None:
    short = "no real hotel"
    detect_language.cache_clear()
    told = set()
    for _ in range(5):
        told.add(detect_language(short))
        detect_language.cache_clear()
    assert len(told) == 1
    assert (detect_language(ENGLISH), detect_language(GERMAN), detect_language("123 ...")) == (
        "en",
        "de",
        None,
    )
    assert follows("THE 123", "change_case:english_capital", {}) == (
        detect_language("THE 123") in ("en", None)
    )


# ---- strict and loose


def test_the_variants_of_the_loose_figures() -> None:
    assert variants("*a*\n b \nc*") == [
        "*a*\n b \nc*",
        "b \nc*",
        "*a*\n b",
        "b",
        "a\n b \nc",
        "b \nc",
        "a\n b",
    ]
    assert variants("one") == ["one", ""]


def example(*instructions: tuple[str, dict[str, Any]]) -> Example:
    return Example(
        0,
        "...",
        {
            "instruction_id_list": [name for name, _ in instructions],
            "kwargs": [read_arguments(name, arguments) for name, arguments in instructions],
        },
    )


@pytest.mark.parametrize(
    ("text", "strict", "loose"),
    [
        ("Sure, here it is:\nno comma", [False, True], [True, True]),  # without its first line
        ('no comma\n"done, bye"', [False, True], [True, True]),  # without its last
        ("a, b\nno comma\nc, d", [False, True], [True, True]),  # without both
        ("one, comma", [False, True], [False, True]),
        ("two words with\n*words\nmany, more\nand, more", [False, False], [False, True]),
        ("a, b c d e\nplain\nf, g h i", [False, False], [True, True]),
        ("   ", [False, False], [False, False]),
    ],
)
def test_strict_and_loose(text: str, strict: list[bool], loose: list[bool]) -> None:
    row = example(
        ("punctuation:no_comma", {}), ("length_constraints:number_words", {"num_words": 8, **LESS})
    )
    assert verdict(text, row) == {
        "correct": all(strict),
        "prompt_strict": all(strict),
        "instruction_strict": strict,
        "prompt_loose": all(loose),
        "instruction_loose": loose,
        "instruction_id_list": ["punctuation:no_comma", "length_constraints:number_words"],
    }
    assert is_correct(text, row) == all(strict)


def test_loose_without_stars() -> None:
    row = example(("combination:repeat_prompt", {"prompt_to_repeat": "Say hello."}))
    found = verdict("**Say hello.** Hello!", row)
    assert (found["prompt_strict"], found["prompt_loose"]) == (False, True)


def test_the_four_figures_by_hand() -> None:
    verdicts = [
        {
            "prompt_strict": True,
            "instruction_strict": [True],
            "prompt_loose": True,
            "instruction_loose": [True],
        },
        {
            "prompt_strict": False,
            "instruction_strict": [True, False, False],
            "prompt_loose": False,
            "instruction_loose": [True, True, False],
        },
        {
            "prompt_strict": False,
            "instruction_strict": [False, True],
            "prompt_loose": True,
            "instruction_loose": [True, True],
        },
    ]
    assert figures(verdicts) == {
        "prompt_strict": 1 / 3,
        "instruction_strict": 3 / 6,
        "prompt_loose": 2 / 3,
        "instruction_loose": 5 / 6,
    }


# ---- the reward


def test_what_is_checked_of_a_completion() -> None:
    assert checked_text("plain") == "plain"
    assert checked_text("<think>a, b</think>\n<answer>\nhi\n</answer>") == "hi"
    for text in (
        "<answer>a</answer><answer>b</answer>",
        "<answer>open",
        "a</answer>",
        "</answer>a<answer>",
    ):
        assert checked_text(text) == text


@pytest.mark.parametrize(
    ("text", "instructions", "form"),
    [
        ("no comma at all", 1.0, 0.0),
        ("<think>a, b</think><answer>no comma at all</answer>", 1.0, 0.15),
        ("<answer>no comma at all</answer>", 1.0, 0.1),
        ("<think>hm</think> three short words, or five", 0.3 * 0.5 + 0.1 * 0.5, 0.05),
        ("<answer>Here, for you:\nthese are four words</answer>", 0.3 * 0.5 + 0.2 + 0.1, 0.1),
        ("<answer></answer>", 0.0, 0.1),
        ("<think></think><think></think>,", 0.3 * 0.5 + 0.1 * 0.5, 0.0),  # the tags are words,
        ("</think>no comma at all<think>", 1.0, 0.0),
    ],
)
def test_the_reward_by_hand(text: str, instructions: float, form: float) -> None:
    row = example(
        ("punctuation:no_comma", {}),
        ("length_constraints:number_words", {"num_words": 4, **AT_LEAST}),
    )
    assert instruction_points(
        text, row.columns["instruction_id_list"], row.columns["kwargs"], tags=True
    ) == pytest.approx(instructions)
    assert form_points(text) == pytest.approx(form)


def test_the_task_scores_with_components_apart(published: Path) -> None:
    task = load_task(TaskSection(name="ifeval", path=str(published)))
    row = task.train[0]
    scores = score(
        task.rewards,
        [row],
        [row.prompt],
        [["<think>x</think><answer>fine</answer>", "a, b"]],
        [[[1], [1]]],
    )
    assert scores.rewards.tolist() == [[pytest.approx(1.15), 0.0]]
    assert {name: values.tolist() for name, values in scores.components.items()} == {
        "instructions": [[1.0, 0.0]],
        "format": [[pytest.approx(0.15), 0.0]],
    }
    assert well_formed("<think>x</think><answer>fine</answer>") and not well_formed(
        "<answer>fine</answer>"
    )


# ---- data


def row(i: int, **changes: Any) -> dict[str, Any]:
    return {
        "key": 1000 + i,
        "prompt": f"Question {i}, please.",
        "instruction_id_list": ["punctuation:no_comma"],
        "kwargs": [{}],
    } | changes


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(one) + "\n" for one in rows), encoding="utf-8")
    return path


@pytest.fixture
def published(tmp_path: Path) -> Path:
    return write(tmp_path / "ifeval_input_data.jsonl", [row(i) for i in range(25)])


def asked(examples: Any) -> list[int]:
    result = []
    for one in examples:
        result.append(int(one.prompt[-1]["content"].split()[1].strip(",")))
    return result


def test_training_holds_out_every_tenth_row_and_warns(published: Path) -> None:
    for path in (published, published.parent):
        task = load_task(TaskSection(name="ifeval", path=str(path)))
        held_out = task.evaluations["held_out"]
        assert asked(held_out) == [9, 19]
        assert asked(task.train) == [i for i in range(25) if i not in (9, 19)]
        assert [one.row for one in task.train] == list(range(23)) and [
            one.row for one in held_out
        ] == [0, 1]
        prompt = task.train[0].prompt
        assert not isinstance(prompt, str) and [message["role"] for message in prompt] == [
            "system",
            "user",
        ]
        assert (
            "every tenth row of it is held out, 2 of 25" in task.notes[0]
            and "no longer has fair figures" in task.notes[1]
        )
        assert len(task.notes) == 2
    few = load(
        TaskSection(
            name="ifeval", path=str(write(published.parent / "few.jsonl", [row(0), row(1), row(2)]))
        )
    )
    assert (asked(few.train), asked(few.evaluations["held_out"])) == ([0, 1], [2])


def test_evaluation_alone_takes_all_rows_with_their_bare_prompts(published: Path) -> None:
    task = load_task(
        TaskSection(name="ifeval", path=str(published), eval_split="train", num_eval_questions=0)
    )
    assert asked(task.evaluations["held_out"]) == list(range(25))
    assert task.evaluations["held_out"][3].prompt == [
        {"role": "user", "content": "Question 3, please."}
    ]
    # no tags were asked for
    assert task.well_formed is None and [one.name for one in task.rewards] == ["instructions"]
    text, one = "Well, <answer>no comma</answer>", example(("punctuation:no_comma", {}))
    assert task.verdict and task.correct
    assert not task.verdict(text, one)["correct"] and not task.correct(text, one)
    assert score(task.rewards, [one], [one.prompt], [[text]], [[[1]]]).rewards.tolist() == [[0.0]]
    assert "all 25 rows are evaluated on" in task.notes[0]
    assert (
        len(
            load_task(
                TaskSection(
                    name="ifeval", path=str(published), eval_split="train", num_eval_questions=7
                )
            ).evaluations["held_out"]
        )
        == 7
    )


def test_one_row_is_enough_to_evaluate(tmp_path: Path) -> None:
    path = write(tmp_path / "one.jsonl", [row(0)])
    with evaluating():
        task = load(TaskSection(name="ifeval", path=str(path)))
    assert (
        asked(task.evaluations["held_out"]) == [0]
        and "all 1 rows are evaluated on" in task.notes[0]
    )
    assert task.evaluations["held_out"][0].prompt == [
        {"role": "user", "content": "Question 0, please."}
    ]


def test_several_letters_together_occur_never() -> None:
    arguments = {"letter": "ab", "let_frequency": 1, "let_relation": "at least"}
    assert not is_correct("ab ab", example(("keywords:letter_frequency", arguments)))
    assert is_correct(
        "ab ab", example(("keywords:letter_frequency", arguments | {"let_relation": "less than"}))
    )


def test_splits_of_ones_own_stay_as_they_are(tmp_path: Path) -> None:
    write(tmp_path / "train.jsonl", [row(i) for i in range(12)])
    write(tmp_path / "test.jsonl", [row(i) for i in range(10, 15)])
    task = load(TaskSection(name="ifeval", path=str(tmp_path)))
    assert (asked(task.train), asked(task.evaluations["held_out"])) == (
        list(range(10)),
        list(range(10, 15)),
    )
    assert task.data.dropped == {"prompt held out too": 2} and task.notes == ()
    write(tmp_path / "test.jsonl", [row(i) for i in range(12)])
    with pytest.raises(ShoalError, match="every training prompt is held out too"):
        load(TaskSection(name="ifeval", path=str(tmp_path)))


def test_rows_as_the_hub_has_them(tmp_path: Path) -> None:
    """There every argument is a column, None where it is another kind's."""
    kwargs = {"num_words": 3.0, "relation": "less than", "keywords": None, "letter": None}
    path = write(
        tmp_path / "a.jsonl",
        [row(i, instruction_id_list=[LENGTH], kwargs=[kwargs]) for i in range(2)],
    )
    task = load(TaskSection(name="ifeval", path=str(path)))
    assert task.train[0].columns["kwargs"] == [{"num_words": 3, "relation": "less than"}]
    assert is_correct("one two", task.train[0]) and not is_correct("one two three", task.train[0])


def test_a_row_that_brings_its_instructions_needs_no_data() -> None:
    task = blank(TaskSection(name="ifeval"))
    assert task.of_row is not None and task.question == "prompt"
    own = task.of_row(4, row(4))
    assert (own.row, own.prompt) == (4, [{"role": "user", "content": "Question 4, please."}])
    assert not is_correct("a, b", own) and is_correct("a b", own)
    with pytest.raises(ShoalError, match="row 5: there is no instruction 'x'"):
        task.of_row(5, row(5, instruction_id_list=["x"]))


SHAPE = "`instruction_id_list` must be a list of names, and `kwargs` a list of as many objects"


@pytest.mark.parametrize(
    ("ids", "kwargs", "told"),
    [
        (
            ["punctuation:no_coma"],
            [{}],
            "there is no instruction 'punctuation:no_coma', did you mean punctuation:no_comma?",
        ),
        ([LENGTH], [{"num_words": 3}], f"{LENGTH} needs 'relation'"),
        ([LENGTH], [{"num_words": None, "relation": "at least"}], f"{LENGTH} needs 'num_words'"),
        (
            [LENGTH],
            [{"num_words": -1, "relation": "at least"}],
            "num_words=-1, expected a whole number, 0 or more",
        ),
        (
            [LENGTH],
            [{"num_words": 2.5, "relation": "at least"}],
            "num_words=2.5, expected a whole number, 0 or more",
        ),
        (
            [LENGTH],
            [{"num_words": "3", "relation": "at least"}],
            "num_words='3', expected a whole number, 0 or more",
        ),
        (
            [LENGTH],
            [{"num_words": True, "relation": "at least"}],
            "num_words=True, expected a whole number, 0 or more",
        ),
        (
            [LENGTH],
            [{"num_words": 3, "relation": "at most"}],
            "relation='at most', expected 'less than' or 'at least'",
        ),
        (
            ["punctuation:no_comma"],
            [{"num_words": 3}],
            "punctuation:no_comma takes no arguments, but there is num_words",
        ),
        (
            ["keywords:letter_frequency"],
            [{"letter": " ", "let_frequency": 1, "let_relation": "at least"}],
            "letter=' ', expected a letter or sign",
        ),
        (
            ["keywords:existence"],
            [{"keywords": "word"}],
            "keywords='word', expected a list of words that is not empty",
        ),
        (
            ["keywords:existence"],
            [{"keywords": []}],
            "keywords=[], expected a list of words that is not empty",
        ),
        (
            ["keywords:existence"],
            [{"keywords": [1]}],
            "keywords=[1], expected a list of words that is not empty",
        ),
        (
            ["startend:end_checker"],
            [{"end_phrase": " "}],
            "end_phrase=' ', expected text that is not empty",
        ),
        (
            ["language:response_language"],
            [{"language": "tlh"}],
            "language='tlh', expected one of af, ar,",
        ),
        (
            ["language:response_language"],
            [{"language": ["de"]}],
            "language=['de'], expected one of af, ar,",
        ),
        (
            [NTH],
            [{"num_paragraphs": 2, "nth_paragraph": 3, "first_word": "a"}],
            "nth_paragraph=3, expected 1 to num_paragraphs=2",
        ),
        (["punctuation:no_comma"], [], SHAPE),
        ([], [], SHAPE),
        ("punctuation:no_comma", {}, SHAPE),
        ([3], [{}], SHAPE),
        (["punctuation:no_comma"], ["{}"], SHAPE),
    ],
)
def test_a_row_that_no_check_can_take_is_named(
    tmp_path: Path, ids: Any, kwargs: Any, told: str
) -> None:
    path = write(
        tmp_path / "a.jsonl", [row(0), row(1), row(2, instruction_id_list=ids, kwargs=kwargs)]
    )
    with pytest.raises(ShoalError) as caught:
        load(TaskSection(name="ifeval", path=str(path)))
    assert str(caught.value).startswith(f"task ifeval: {path}, line 3: ") and told in str(
        caught.value
    )


# ---- text built to hurt

READ = [(entry.values[0], read_arguments(entry.values[0], entry.values[1])) for entry in CASES]
PIECES = [
    "*",
    "**",
    "-",
    "[",
    "]",
    "<<",
    ">>",
    "<",
    '"',
    "'",
    "p.",
    "s.",
    ".",
    "...",
    "!",
    "?",
    "SECTION 1",
    "{",
    "}",
    ",",
    "\n",
    " ",
    "\t",
    "\r",
    "Dr.",
    "i.e.",
    "N'T",
    "a@b",
    "http://a",
    "<answer>",
    "</answer>",
    "\0",
    "é",
    "İ",
    "漢",
    "🙂",
]


@settings(max_examples=60, deadline=None)
@given(
    st.one_of(st.text(max_size=200), st.lists(st.sampled_from(PIECES), max_size=60).map("".join))
)
def test_no_text_raises_and_loose_holds_where_strict_does(text: str) -> None:
    columns = {
        "instruction_id_list": [kind for kind, _ in READ],
        "kwargs": [arguments for _, arguments in READ],
    }
    found = verdict(text, Example(0, "", columns))
    for strict, loose in zip(found["instruction_strict"], found["instruction_loose"], strict=True):
        assert loose or not strict
    for i in range(len(READ)):
        if not text.strip():
            assert found["instruction_strict"][i] is False
    assert "".join("".join(sentences(text)).split()) == "".join(text.split())


@pytest.mark.parametrize(
    "unit",
    [
        "*",
        "* ",
        "\n",
        " ",
        "[",
        "]",
        "<<",
        "\n*\n",
        "p.",
        "a",
        "a.",
        ". ",
        "Dr. ",
        "Dr." + " " * 50,
        "'",
        '"',
        ".",
        "!",
        "-",
        "a@",
        "a-.@",
        "SECTION ",
        "1",
        "\t\n ",
        "**a*",
        "a,",
        "N'T ",
        "I ",
        "((",
        '{"a":',
        "```",
    ],
)
def test_a_long_text_takes_bounded_time(unit: str) -> None:
    """A quadratic check would take minutes here."""
    text = "x" + unit * (30_000 // len(unit)) + "x"
    started = time.monotonic()
    for kind, arguments in READ:
        assert follows(text, kind, arguments) in (True, False)
    assert time.monotonic() - started < 20
