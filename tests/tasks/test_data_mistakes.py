"""Mistakes with data: each ends in one line that names file, row and cure, or is read as it was
meant."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

import shoal
from shoal.config.merge import compose
from shoal.config.sections.task import TaskSection
from shoal.job.task import load_task
from shoal.records import ShoalError
from shoal.tasks.custom import rows_task
from shoal.tasks.data_files import read_file
from shoal.tasks.splits import evaluating
from shoal.tasks.task import DataReport, Task
from shoal.trainer.prompts import PromptStream

GOOD = [{"prompt": f"{i}?", "answer": i} for i in range(4)]


def lines(*rows: Any) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def parquet(table: pyarrow.Table) -> bytes:
    sink = pyarrow.BufferOutputStream()
    pyarrow.parquet.write_table(table, sink)
    return sink.getvalue().to_pybytes()


def load(path: Path, **keys: Any) -> Task:
    return load_task(TaskSection(**{"name": "custom", "path": str(path), **keys}))


SHARE_GPT = [{"from": "human", "value": "1?"}, {"from": "gpt", "value": "1"}]
CASES: dict[str, tuple[str, bytes, dict[str, Any], list[str]]] = {
    "empty file": ("a.jsonl", b"", {}, ["a.jsonl is empty"]),
    "blank lines": ("a.jsonl", b"\n \r\n\n", {}, ["a.jsonl is empty"]),
    "an empty list": ("a.json", b"[]", {}, ["a.json is empty"]),
    "images in messages": (
        "a.jsonl",
        lines(
            GOOD[0],
            {"prompt": [{"role": "user", "content": [{"type": "image", "image": "a.png"}]}]},
        ),
        {},
        ["a.jsonl, line 2", "message 0", "content of type image", "text only"],
    ),
    "a column of images": (
        "a.jsonl",
        lines(GOOD[0], {**GOOD[1], "images": ["a.png"]}),
        {},
        ["a.jsonl, line 2", "column 'images'", "text only"],
    ),
    "a csv of a header": ("a.csv", b"prompt,answer\n", {}, ["a.csv is empty"]),
    "one row": (
        "a.jsonl",
        lines(*GOOD[:1]),
        {},
        ["a.jsonl has 1 row", "add rows", "task.eval_split=train"],
    ),
    "no prompt": (
        "a.jsonl",
        lines(GOOD[0], {"question": "a", "answer": 1}),
        {},
        [
            "a.jsonl, line 2 has no column `prompt`",
            "task.columns=[prompt=question]",
            "task.template='{question}'",
        ],
    ),
    "a prompt of null": (
        "a.jsonl",
        lines(*GOOD, {"prompt": None, "answer": 1}),
        {},
        ["line 5: `prompt` is a NoneT"],
    ),
    "a prompt of a number": (
        "a.jsonl",
        lines(*GOOD, {"prompt": 5, "answer": 1}),
        {},
        ["line 5: `prompt` is a int", "expected text, or messages"],
    ),
    "an empty prompt": (
        "a.jsonl",
        lines({"prompt": ""}, *GOOD),
        {},
        ["line 1: `prompt` is an empty str"],
    ),
    "text and messages": (
        "a.jsonl",
        lines(*GOOD, {"prompt": [{"role": "user", "content": "a"}], "answer": 1}),
        {},
        ["line 5: `prompt` is messages", "a.jsonl, line 1 is text", "all prompts of one kind"],
    ),
    "a column missing": (
        "a.jsonl",
        lines(*GOOD, {"prompt": "a"}),
        {},
        ["line 5 has no column 'answer'", "line 1 has", "None where there is no value"],
    ),
    "ShareGPT": (
        "a.jsonl",
        lines(*[{"conversations": SHARE_GPT}] * 3),
        {},
        [
            "a.jsonl, line 1 has no column `prompt` or `messages`, but 'conversations'",
            "human is user, gpt is assistant",
            "in a column `messages`",
        ],
    ),
    "ShareGPT, renamed to messages": (
        "a.jsonl",
        lines(*[{"conversations": SHARE_GPT}] * 3),
        {"columns": ("messages=conversations",)},
        ["line 1: message 0 of `prompt` is", "ShareGPT's `from` and `value`"],
    ),
    "semicolons": (
        "a.csv",
        b"prompt;answer\n1?;1\n2?;2\n",
        {},
        ["a.csv: its header, 'prompt;answer', has semicolons between its columns; expected commas"],
    ),
    "tabs": (
        "a.csv",
        b"prompt\tanswer\n1?\t1\n2?\t2\n",
        {},
        ["has tabs between its columns; expected commas"],
    ),
    "Latin-1": (
        "a.jsonl",
        lines(*GOOD) + b'{"prompt": "caf\xe9", "answer": 1}',
        {},
        ["a.jsonl, line 5 is not a JSON object", "not UTF-8 text", "save the file as UTF-8"],
    ),
    "Latin-1 in a table": (
        "a.csv",
        b"prompt,answer\ncaf\xe9,1\n",
        {},
        ["a.csv cannot be read as a table in UTF-8"],
    ),
    "UTF-16": (
        "a.jsonl",
        lines(*GOOD).decode().encode("utf-16"),
        {},
        ["line 1 is not a JSON object", "not UTF-8 text"],
    ),
    "a list a line": (
        "a.jsonl",
        json.dumps(GOOD).encode() * 2,
        {},
        ["not a JSON list of objects: Extra data", "one list"],
    ),
    "a comma behind a row": (
        "a.jsonl",
        b'{"prompt": "a"},\n{"prompt": "b"}',
        {},
        ["line 1 is not a JSON object: Extra", "one object per line"],
    ),
    "a comma within a row": (
        "a.jsonl",
        b'{"prompt": "a",}',
        {},
        ["line 1 is not a JSON object", "one object per line"],
    ),
    "a broken list": (
        "a.json",
        b'[{"prompt": "a"},\n]',
        {},
        ["a.json is not a JSON list of objects", "line "],
    ),
    "too deep": (
        "a.jsonl",
        lines(GOOD[0]) + b"[" * 100_000,
        {},
        ["line 2 is not a JSON object: maximum recursion depth"],
    ),
    "an open quote": (
        "a.csv",
        b'prompt,answer\n"a,1\nb,2\n',
        {},
        ["a.csv cannot be read as a table in UTF-8, near line 3: unexpected end"],
    ),
    "a comma too many": (
        "a.csv",
        b"prompt,answer\na,b,1\n",
        {},
        ["a.csv, line 2 has 3 values, the header has 2", "quote a value"],
    ),
    "a column twice": (
        "a.csv",
        b"prompt,answer,answer\na,1,2\n",
        {},
        ["two columns of its header have the same name, prompt, answer, answer"],
    ),
    "parquet without columns": (
        "a.parquet",
        parquet(pyarrow.table({})),
        {},
        ["a.parquet is empty"],
    ),
    "parquet that is text": (
        "a.parquet",
        lines(*GOOD),
        {},
        ["a.parquet cannot be read as parquet"],
    ),
    "packed": (
        "a.jsonl.gz",
        gzip.compress(lines(*GOOD), mtime=0),
        {},
        ["a.jsonl.gz is of an unsupported kind", "unpack or convert it"],
    ),
    "a workbook": ("a.xlsx", b"PK", {}, ["a.xlsx is of an unsupported kind", ".parquet, .csv"]),
    "no such column": (
        "a.jsonl",
        lines(*GOOD),
        {"columns": ("prompt=promt",)},
        ["did you mean prompt?"],
    ),
    "no answers": (
        "a.jsonl",
        lines({"question": "a", "answer": "?"}, {"question": "b", "answer": "!"}),
        {"name": "gsm8k"},
        ["none of the 1 training rows has an answer that is a number"],
    ),
    "no column of answers": (
        "a.jsonl",
        lines({"question": "a"}),
        {"name": "gsm8k"},
        ["a.jsonl, line 1 has no column 'answer'", "task.columns=[answer=OTHER]"],
    ),
    "all held out": (
        "a.jsonl",
        lines(*GOOD[:1] * 3),
        {},
        ["all rows have the same prompt", "task.eval_split=train"],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_mistake_in_a_file_is_one_line(tmp_path: Path, case: str) -> None:
    name, content, keys, words = CASES[case]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ShoalError) as caught:
        load(tmp_path / name, **keys)
    assert "\n" not in str(caught.value) and all(word in str(caught.value) for word in words), (
        caught.value
    )


def test_a_folder_or_split_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ShoalError, match=r"it holds nothing"):
        load(tmp_path)
    (tmp_path / "train.jsonl").write_bytes(lines(*GOOD))
    with pytest.raises(
        ShoalError, match=r"of the split 'fit'; it holds train.jsonl \(task.files names others\)"
    ):
        load(tmp_path, split="fit")
    with pytest.raises(
        ShoalError, match=r"task.path='.*none.jsonl': there is no such file or folder"
    ):
        load(tmp_path / "none.jsonl")


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.jsonl", b"\xef\xbb\xbf" + lines(*GOOD)),
        ("a.jsonl", lines(*GOOD).replace(b"\n", b"\r\n")),
        ("a.json", lines(*GOOD)),
        ("a.json", b"\xef\xbb\xbf \n" + json.dumps(GOOD).encode()),
        ("a.jsonl", json.dumps(GOOD).encode()),
        ("a.jsonl", lines(*GOOD).rstrip()),
        ("a.parquet", parquet(pyarrow.Table.from_pylist(GOOD))),
    ],
    ids=[
        "byte order mark",
        "CRLF",
        "lines in json",
        "list in json",
        "list in jsonl",
        "no last newline",
        "parquet",
    ],
)
def test_what_is_read_as_it_was_meant(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    task = load(tmp_path / name)
    assert [(one.prompt, one.columns["answer"]) for one in task.train] == [
        ("0?", 0),
        ("1?", 1),
        ("2?", 2),
    ]
    assert task.data == DataReport({name: 3}, {name: 1})


@pytest.mark.parametrize(
    ("answers", "said"),
    [
        (
            ["1", "", " ", "4"],
            "2 of 4 rows have an empty answer, the first {file}, line 2: fill them",
        ),
        (["1", None, "3", "4"], "1 of 4 rows have an empty answer, the first {file}, line 2"),
        (["1", "2", "3", "4"], ""),
        (["", "", "", ""], ""),
        ([0, False, 3, 4], ""),
    ],
)
def test_rows_with_empty_answers_are_counted(tmp_path: Path, answers: list[Any], said: str) -> None:
    file = tmp_path / "a.jsonl"
    file.write_bytes(
        lines(*[{"prompt": f"{i}?", "answer": answer} for i, answer in enumerate(answers)])
    )
    found = [note for note in load(file).notes if "empty answer" in note]
    assert len(found) == bool(said) and said.format(file=file) in "".join(found)
    rows = []
    for i, answer in enumerate(answers):
        rows.append({"prompt": f"{i}?", "reward_model": {"ground_truth": answer}})
    assert bool([note for note in rows_task(rows).notes if "empty answer" in note]) == bool(said)


def test_a_long_value_with_quotes_and_lines(tmp_path: Path) -> None:
    text = 'He said "a, b".\r\n' + "x" * 200_000
    (tmp_path / "a.csv").write_bytes(
        b"\xef\xbb\xbfprompt,answer\r\n"
        + b'"'
        + text.replace('"', '""').encode()
        + b'",007\r\n"b",1\r\n'
    )
    assert (
        load(tmp_path / "a.csv").train[0].prompt,
        load(tmp_path / "a.csv").train[0].columns,
    ) == (text, {"answer": "007"})


def test_prompts_that_are_all_too_long() -> None:
    stream = PromptStream(rows_task(GOOD).train, lambda prompt: np.zeros(9, np.int32), 0, 8)
    with pytest.raises(
        ShoalError,
        match=r"fewer than 2 prompts of the data have at most 8 tokens: raise sampling.max",
    ):
        stream.next(2)


def test_prompts_that_the_template_refuses_are_not_said_to_be_too_long() -> None:
    def refuses(prompt):
        raise ShoalError("the chat template has no place for tools")

    stream = PromptStream(rows_task(GOOD).train, refuses, 0, 8)
    with pytest.raises(ShoalError, match=r"of the data can be used; .*has no place for tools"):
        stream.next(2)


def test_lines_are_json_each_with_its_number(tmp_path: Path) -> None:
    odd = [
        b'{"prompt": "a\xe2\x80\xa8b"}',
        b' {"prompt": "c", "n": [1, {"x": null}]} ',
        b"",
        b"0",
        b'"0"',
        b"[0]",
        b"{}",
        b'{"prompt": NaN}',
        b'{"a": 1, "a": 2}',
    ]
    (tmp_path / "a.jsonl").write_bytes(b"\n".join(odd))
    rows = list(read_file(tmp_path / "a.jsonl"))
    assert [place.rpartition(", ")[2] for place, _ in rows] == [
        f"line {at}" for at in (1, 2, 4, 5, 6, 7, 8, 9)
    ]
    assert repr([row for _, row in rows]) == repr([json.loads(line) for line in odd if line])
    for torn in (
        b'{"a": [{}\n{}]},{"b": 3}',
        b'{"a": [{}\n{}]},0,{"b": 3}',
        b"1,0,2\n3",
        b"1\n2,0",
        b"1,2\n3",
    ):
        (tmp_path / "b.jsonl").write_bytes(torn)
        with pytest.raises(ShoalError, match=r"line [12] is not a JSON object"):
            list(read_file(tmp_path / "b.jsonl"))


# ---- one rule, from a file and from Python


def test_rows_that_are_held_out_too_are_left_out_and_counted(tmp_path: Path) -> None:
    rows = [*GOOD, GOOD[3]]
    (tmp_path / "a.jsonl").write_bytes(lines(*rows))
    from_file, from_python = load(tmp_path / "a.jsonl"), rows_task(rows)
    for task in (from_file, from_python):
        assert [(one.row, one.prompt) for one in task.train] == [(0, "0?"), (1, "1?"), (2, "2?")]
        assert task.data.dropped == {"prompt held out too": 1}
    given = rows_task(rows, GOOD[:2])
    assert [(one.row, one.prompt) for one in given.train] == [(0, "2?"), (1, "3?"), (2, "3?")]
    assert given.data == DataReport(
        {"rows from Python": 5}, {"rows from Python": 2}, {"prompt held out too": 2}
    )
    with pytest.raises(
        ShoalError, match=r"every training prompt is held out too: .*, held_out='train'"
    ):
        rows_task(GOOD, GOOD)


def test_training_rows_are_evaluated_on_where_that_is_asked_for(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(lines(GOOD[0]))
    from_file = load(tmp_path / "a.jsonl", eval_split="train")
    from_python = rows_task(GOOD[:1], "train")
    for task, key in ((from_file, "task.eval_split=train"), (from_python, "held_out='train'")):
        assert list(task.train) == list(task.evaluations["held_out"]) and len(task.train) == 1
        assert key in task.notes[0] and "evaluated on the rows that are trained on" in task.notes[0]
    with pytest.raises(ShoalError, match=r"held_out is a str: expected rows.*, or 'train'"):
        rows_task(GOOD, "test")


def test_rows_that_an_evaluation_leaves_out_are_said(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_bytes(lines(*GOOD))
    val = tmp_path / "val.jsonl"
    val.write_bytes(lines(*({"prompt": f"{i} + 1?", "answer": i + 1} for i in range(3))))
    keys: dict[str, Any] = {"eval_split": str(val)}
    cut = load(tmp_path / "train.jsonl", num_eval_questions=2, **keys)
    said = "held_out: the first 2 of 3 rows are evaluated on; task.num_eval_questions=0"
    assert len(cut.evaluations["held_out"]) == 2
    assert any(note.startswith(said) for note in cut.notes)
    for count in (0, 3):
        whole = load(tmp_path / "train.jsonl", num_eval_questions=count, **keys)
        assert len(whole.evaluations["held_out"]) == 3
        assert not any("num_eval_questions" in note for note in whole.notes)


@pytest.mark.parametrize("recipe", ["verl", "trl"])
def test_recipes_of_systems_that_evaluate_on_all_rows_do_so(recipe: str) -> None:
    config, _ = compose("train", [f"recipe={recipe}"])
    assert config.task.num_eval_questions == 0


def test_rows_to_evaluate_on_may_have_other_columns(tmp_path: Path) -> None:
    """As in verl, whose two files are read apart from each other."""
    train, val = tmp_path / "train.jsonl", tmp_path / "val.jsonl"
    train.write_bytes(lines(*({**row, "level": 2} for row in GOOD)))
    rows = [{"prompt": "6?", "answer": 6, "difficulty": 1}, {"prompt": "7?", "answer": 7}]
    val.write_bytes(lines(rows[0]))
    from_files = load(train, eval_split=str(val))
    from_python = rows_task([{**row, "level": 2} for row in GOOD], rows[:1])
    for task in (from_files, from_python):
        assert task.train[0].columns == {"answer": 0, "level": 2}
        [example] = task.evaluations["held_out"]
        assert example.columns == {"answer": 6, "difficulty": 1, "level": None}
        assert any("no column level, which training rows have" in note for note in task.notes)
    # Within one of the two they may not differ.
    val.write_bytes(lines(*rows))
    with pytest.raises(ShoalError, match=r"val.jsonl, line 2 has no column 'difficulty', .*line 1"):
        load(train, eval_split=str(val))
    val.write_bytes(lines({"prompt": "6?", "completions": 1}))
    with pytest.raises(ShoalError, match="a column cannot be called 'completions'"):
        load(train, eval_split=str(val))


def test_pandas_index_is_no_column(tmp_path: Path) -> None:
    train, val = tmp_path / "train.parquet", tmp_path / "val.parquet"
    table = pyarrow.Table.from_pylist(GOOD)
    pyarrow.parquet.write_table(table, train)
    indexed = table.slice(0, 1).append_column("__index_level_0__", pyarrow.array([7]))
    pyarrow.parquet.write_table(indexed, val)
    task = load(train, eval_split=str(val))
    assert [example.columns for example in task.evaluations["held_out"]] == [{"answer": 0}]
    assert {tuple(example.columns) for example in task.train} == {("answer",)}


def test_only_a_run_says_that_it_trains_on_what_it_evaluates_on(tmp_path: Path) -> None:
    """`shoal eval` of a run with task.path=TEST, which the run's task.eval_split names too."""
    file = tmp_path / "test.jsonl"
    file.write_bytes(lines(GOOD[0]))
    [note] = load(file, eval_split=str(file)).notes
    assert note == f"custom: task.eval_split={file}: evaluated on the rows that are trained on"
    with evaluating():
        from_file = load(file, eval_split=str(file))
        from_python = rows_task(GOOD[:1], "train")
    assert from_file.notes == (f"custom: task.eval_split={file}: all 1 rows are evaluated on",)
    assert from_python.notes == ("rows: held_out='train': all 1 rows are evaluated on",)


def test_no_row_is_held_out_where_that_is_asked_for(tmp_path: Path) -> None:
    same = [GOOD[0]] * 20
    (tmp_path / "a.jsonl").write_bytes(lines(*same))
    asked = TaskSection(name="custom", path=str(tmp_path / "a.jsonl"), hold_out=False)
    for task in (load_task(asked), rows_task(same, hold_out=False)):
        assert len(task.train) == 20 and not task.evaluations
        assert "none of its 20 rows is held out (task.hold_out=false)" in task.notes[0]
        assert sum(task.data.train_files.values()) == 20 and not task.data.held_out_files
    # Rows that are given to evaluate on are evaluated on.
    assert rows_task(GOOD, GOOD[:1], hold_out=False).evaluations["held_out"]
    with evaluating():
        assert len(load_task(asked).evaluations["held_out"]) == 20
    with pytest.raises(ShoalError, match=r"the same prompt.* or on none, task.hold_out=false"):
        rows_task(same)


def test_where_nothing_is_trained_all_rows_are_evaluated_on(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(lines(*GOOD))
    with evaluating():
        for task in (load(tmp_path / "a.jsonl"), rows_task(GOOD)):
            assert [one.prompt for one in task.evaluations["held_out"]] == [
                "0?",
                "1?",
                "2?",
                "3?",
            ] and not task.train
        assert [one.prompt for one in rows_task(GOOD, GOOD[:1]).evaluations["held_out"]] == ["0?"]
        assert len(rows_task(GOOD[:1], GOOD[:1]).evaluations["held_out"]) == 1


def test_rows_that_are_evaluated_on_are_counted_as_they_are_asked(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(lines(*GOOD))
    with evaluating():
        for task in (
            load(tmp_path / "a.jsonl", num_eval_questions=3),
            rows_task(GOOD, num_questions=3),
        ):
            assert "the first 3 of 4 rows are evaluated on" in task.notes[0]


def test_messages_stand_for_prompts_from_python_too() -> None:
    talk = [{"role": "user", "content": "1?"}, {"role": "assistant", "content": "2"}]
    task = rows_task([{"messages": talk}] * 2, "train")
    assert task.train[0].prompt == talk[:1] and "the column `messages`, without" in task.notes[1]
    begun = rows_task([{"prompt": talk}] * 2, "train")
    assert (
        begun.train[0].prompt == talk
        and "2 prompts end with an assistant's message" in begun.notes[1]
    )


def test_evaluate_asks_all_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Task] = []

    def evaluate(*given):
        return asked.append(given[-1])

    monkeypatch.setattr("shoal.commands.evaluate.evaluate", evaluate)
    for rows in (GOOD, [{"prompt": str(i), "answer": i} for i in range(100)]):

        def reward(completions, **_):
            return [0.0] * len(completions)

        shoal.evaluate(task=rows, reward=reward)
        assert len(asked.pop().evaluations["held_out"]) == len(rows)


def test_a_role_that_is_none_is_named_with_its_first_row(tmp_path: Path) -> None:
    rows = []
    for role in ("user", "usr", "usr", "human", "tool"):
        rows.append({"prompt": [{"role": role, "content": "2 + 3 = ?"}], "answer": "5"})
    (tmp_path / "a.jsonl").write_bytes(lines(*rows))
    from_file = load(tmp_path / "a.jsonl", eval_split="train")
    from_python = rows_task(rows, "train")
    for task, place in ((from_file, "a.jsonl, line 2"), (from_python, "task")):
        notes = [note for note in task.notes if "role" in note]
        assert len(notes) == 2 and "2 prompts have a message of the role 'usr' (first" in notes[0]
        assert place in notes[0] and "1 prompt has a message of the role 'human'" in notes[1]
        assert notes[0].endswith("expected system, developer, user, assistant, tool")
