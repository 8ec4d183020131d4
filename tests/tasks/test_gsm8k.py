"""GSM8K: every way to name the data, how splits are found, and errors that say what the data
lacks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import huggingface_hub
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from scoring import score

from shoal.config.sections.task import TaskSection
from shoal.job.task import load_task
from shoal.records import ShoalError
from shoal.tasks.gsm8k import SYSTEM_PROMPT, gold
from shoal.tasks.splits import evaluating
from shoal.tasks.task import DataReport, Task


def row(i: int, name: str = "q") -> dict[str, str]:
    return {
        "question": f"{name}{i}?",
        "answer": f"{i} + 1000 = <<{i}+1000={i + 1000}>>{i + 1000}\n#### {i + 1000:,}",
    }


def write(path: Path, rows: list[Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    else:
        path.write_text("".join(json.dumps(one) + "\n" for one in rows), encoding="utf-8")
    return path


def load(path: Any, **keys: Any) -> Task:
    return load_task(TaskSection(name="gsm8k", path=str(path), **keys))


def questions(examples: Any) -> list[str]:
    return [example.prompt[-1]["content"] for example in examples]


def names(prefix: str, numbers: Any) -> list[str]:
    return [f"{prefix}{i}?" for i in numbers]


# ---- where the data is


@pytest.mark.parametrize(
    ("train", "test"),
    [
        ("gsm8k_train.jsonl", "gsm8k_test.jsonl"),
        ("train.jsonl", "test.jsonl"),
        ("train.parquet", "test.parquet"),
        ("main/train-00000-of-00001.parquet", "main/test-00000-of-00001.parquet"),
        ("train.jsonl", "test.parquet"),
    ],
)
def test_a_folder_of_two_splits(tmp_path: Path, train: str, test: str) -> None:
    write(tmp_path / train, [row(i) for i in range(5)])
    write(tmp_path / test, [row(i, "t") for i in range(4)])
    task = load(tmp_path)
    assert questions(task.train) == names("q", range(5))
    assert [example.row for example in task.train] == list(range(5))
    assert list(task.evaluations) == ["held_out"]
    assert questions(task.evaluations["held_out"]) == names("t", range(4))
    assert task.notes == ()
    assert questions(load(tmp_path, num_eval_questions=2).evaluations["held_out"]) == ["t0?", "t1?"]
    assert questions(load(tmp_path, num_eval_questions=0).evaluations["held_out"]) == names(
        "t", range(4)
    )


def test_shards_and_other_names_of_splits(tmp_path: Path) -> None:
    for shard in (1, 0):
        write(
            tmp_path / f"fit-0000{shard}-of-00002.parquet", [row(10 * shard + i) for i in range(2)]
        )
    write(tmp_path / "judge.jsonl", [row(7, "t")])
    task = load(tmp_path, split="fit", eval_split="judge")
    assert questions(task.train) == ["q0?", "q1?", "q10?", "q11?"]
    assert questions(task.evaluations["held_out"]) == ["t7?"]


def test_a_file_finds_its_sibling(tmp_path: Path) -> None:
    train = write(tmp_path / "train_gsm8k_train.jsonl", [row(i) for i in range(3)])
    test = write(tmp_path / "train_gsm8k_test.jsonl", [row(i, "t") for i in range(2)])
    for path in (train, test):  # a file named after the split to evaluate on is that split
        task = load(path)
        assert questions(task.train) == names("q", range(3))
        assert questions(task.evaluations["held_out"]) == names("t", range(2))
        # It is said if the file to evaluate on is one that nobody named.
        note = f"held out: {test.name}, which lies next to {train.name}; task.eval_split=FILE names"
        assert task.notes == (f"{note} another",) if path is train else task.notes == ()


@pytest.mark.parametrize(
    ("num_rows", "num_questions", "held"), [(40, 500, 4), (40, 3, 3), (40, 0, 4), (3, 500, 1)]
)
def test_a_file_alone_holds_out_its_last_rows(
    tmp_path: Path, num_rows: int, num_questions: int, held: int
) -> None:
    path = write(tmp_path / "data.jsonl", [row(i) for i in range(num_rows)])
    task = load(path, num_eval_questions=num_questions)
    assert questions(task.train) == names("q", range(num_rows - held))
    assert questions(task.evaluations["held_out"]) == names("q", range(num_rows - held, num_rows))
    assert task.notes == (
        f"gsm8k: data.jsonl has no other split to evaluate on; its last {held} of {num_rows} rows "
        "are held out; if the rows are sorted, shuffle them first",
    )


def test_a_folder_without_the_split_to_evaluate_on_holds_out_rows_too(tmp_path: Path) -> None:
    write(tmp_path / "train.jsonl", [row(i) for i in range(20)])
    task = load(tmp_path)
    assert (len(task.train), questions(task.evaluations["held_out"])) == (18, ["q18?", "q19?"])
    assert "its last 2 of 20 rows are held out; if" in task.notes[0]
    # an experiment on purpose: can it learn these rows at all?
    task = load(tmp_path, eval_split="train")
    assert questions(task.train) == questions(task.evaluations["held_out"]) == names("q", range(20))
    assert task.notes == (
        "gsm8k: task.eval_split=train: evaluated on the rows that are trained on",
    )


def test_where_nothing_is_trained_all_rows_are_evaluated_on(tmp_path: Path) -> None:
    for number in (1, 20):
        path = write(tmp_path / f"data{number}.jsonl", [row(i) for i in range(number)])
        with evaluating():
            task = load(path, num_eval_questions=0)
        assert (
            questions(task.evaluations["held_out"]) == names("q", range(number)) and not task.train
        )
        assert f"all {number} rows are evaluated on" in task.notes[0]


def test_a_question_that_is_held_out_is_not_trained_on(tmp_path: Path) -> None:
    write(tmp_path / "train.jsonl", [row(0), row(1), row(2)])
    write(tmp_path / "test.jsonl", [row(1), row(5)])
    task = load(tmp_path)
    assert questions(task.train) == ["q0?", "q2?"]
    assert [example.row for example in task.train] == [0, 1]
    assert task.data.dropped == {"question held out too": 1} and task.notes == ()
    write(tmp_path / "train.jsonl", [row(1)])
    with pytest.raises(ShoalError, match="every training question is held out too"):
        load(tmp_path)


def test_the_hub_is_asked_where_there_is_no_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "main/train-00000-of-00001.parquet", [row(i) for i in range(3)])
    write(tmp_path / "main/test-00000-of-00001.parquet", [row(9, "t")])
    asked: list[Any] = []

    def download(repo: str, **keys: Any) -> str:
        asked.append((repo, keys["repo_type"], keys["allow_patterns"]))
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert questions(load("").train) == names("q", range(3))
    assert questions(load("some/copy").evaluations["held_out"]) == ["t9?"]
    assert {(repo, kind) for repo, kind, _ in asked} == {
        ("openai/gsm8k", "dataset"),
        ("some/copy", "dataset"),
    }
    assert asked[0][2] == ["README.md"] and "main/*.parquet" in asked[1][2]


def test_a_hub_that_cannot_be_reached_says_what_to_give(monkeypatch: pytest.MonkeyPatch) -> None:
    def download(repo: str, **keys: Any) -> str:
        raise OSError("no network\nat all")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(
        ShoalError, match=r"openai/gsm8k could not be fetched \(no network\).*task.path=FOLDER"
    ):
        load("")
    with pytest.raises(
        ShoalError, match=r"task.path='some/copy': there is no such file or folder here, and"
    ):
        load("some/copy")


# ---- questions, gold, rewards


def test_prompts_and_columns(tmp_path: Path) -> None:
    task = load(write(tmp_path / "data.jsonl", [row(i) for i in range(10)]))
    example = task.train[3]
    assert example.prompt == [
        {"role": "system", "content": SYSTEM_PROMPT},
        {"role": "user", "content": "q3?"},
    ]
    for tag in ("<reasoning>", "</reasoning>", "<answer>", "</answer>"):
        assert tag in SYSTEM_PROMPT
    assert example.columns == {"answer": "1003", "solution": row(3)["answer"]}


@pytest.mark.parametrize(
    ("answer", "number"),
    [
        ("a\n#### 72", "72"),
        ("#### 1,234,567", "1234567"),
        ("#### -5", "-5"),
        ("#### −5", "-5"),
        ("#### 12\u202f000", "12000"),
        ("#### 1.5\n", "1.5"),
        ("####7", "7"),
        ("#### 3\n#### 4", "4"),
        ("72", "72"),
        ("$1,200.50", "1200.50"),
        ("6 * 3\nA: 18", "18"),
        ("####", None),
        ("#### 1 200", "1200"),
        ("4 2", None),
        ("#### none", None),
        ("", None),
        ("6 * 3 = 18", None),
        ("A: six", None),
        ("A: 5\nso", None),
    ],
)
def test_gold(answer: str, number: str | None) -> None:
    assert gold(answer) == number


def test_numbers_are_taken_as_text(tmp_path: Path) -> None:
    answers = [18, 18.0, -2.5, 10**18]
    rows = []
    for i, one in enumerate([*answers, 1]):
        rows.append({"question": f"q{i}?", "answer": one})
    path = write(tmp_path / "data.jsonl", rows)
    assert [one.columns["answer"] for one in load(path).train] == ["18", "18", "-2.5", str(10**18)]


def test_rewards_and_correctness(tmp_path: Path) -> None:
    task = load(write(tmp_path / "data.jsonl", [row(i) for i in range(10)]))
    example = task.train[3]
    texts = [
        "<reasoning>r</reasoning>\n<answer>$1,003.00</answer>",
        "<answer>1003.</answer>",
        "#### 1003",
        "<reasoning>r</reasoning><answer>1004</answer>",
        "<answer>1004</answer> no, <answer>1003</answer>",
    ]
    scores = score(task.rewards, [example], [example.prompt], [texts], [[[1]] * 5])
    np.testing.assert_array_equal(scores.components["correct"], [[1, 1, 0, 0, 1]])
    np.testing.assert_array_equal(scores.components["format"], [[1, 0, 0, 1, 0]])
    np.testing.assert_allclose(scores.rewards, [[1.1, 1.0, 0, 0.1, 1.0]], rtol=1e-12)
    assert task.correct is not None and task.well_formed is not None
    assert [task.correct(text, example) for text in texts] == [True, True, False, False, True]
    assert task.well_formed(texts[0])


def test_rows_without_gold_are_dropped_and_counted(tmp_path: Path) -> None:
    rows = [
        row(0),
        {"question": "x?", "answer": "5!"},
        {"question": "y?", "answer": "#### five"},
        row(3),
    ]
    write(tmp_path / "train.jsonl", rows)
    write(tmp_path / "test.jsonl", [row(8, "t"), {"question": "z?", "answer": ""}])
    task = load(tmp_path)
    assert questions(task.train) == ["q0?", "q3?"]
    assert task.train[1].row == 1
    assert questions(task.evaluations["held_out"]) == ["t8?"]
    assert task.data == DataReport({"train.jsonl": 4}, {"test.jsonl": 2}, {"no `#### <number>`": 2})
    assert task.notes == ("gsm8k: 1 of 2 held-out rows were dropped: no `#### <number>`",)
    write(tmp_path / "train.jsonl", rows[1:3])
    with pytest.raises(
        ShoalError, match="none of the 2 training rows has an answer that is a number or ends in"
    ):
        load(tmp_path)


# ---- bad data


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "data.jsonl is empty; rows with `question` and `answer` are needed"),
        ("\n\n", "data.jsonl is empty"),
        (
            '{"question": "a", "answer": "#### 1"}\n\n{"question": \n',
            "line 3 is not a JSON object: Expecting value",
        ),
        ("[1]\n", "row 0 is a int; an object with"),
        (
            '{"question": "a", "solution": "s"}\n',
            "line 1 has no column 'answer'; its columns: question, solution",
        ),
        (
            '{"problem": "a", "answer": "s"}\n',
            "line 1 has no column 'question'; its columns: problem, answer",
        ),
        (
            '{"question": "a", "answer": "#### 1"}\n{}\n',
            "line 2 has no column 'question'; its columns: none",
        ),
        ('{"question": "a", "answer": [1]}\n', "line 1: 'answer' is a list; text is needed"),
        ('{"question": "a", "answer": true}\n', "line 1: 'answer' is a bool; text is needed"),
        ('{"question": "a", "answer": NaN}\n', "line 1: 'answer' is a float; text is needed"),
        ('{"question": 1, "answer": "#### 1"}\n', "line 1: 'question' is a int; text is needed"),
        (
            '{"question": "a", "answer": "#### 1"}\n{"question": "a", "answer": '
            + "9" * 5000
            + "}",
            "line 2 is not a JSON object: Exceeds the limit",
        ),
        (
            '{"question": "a \\ud83d b", "answer": "#### 1"}\n',
            r"line 1 is not a JSON object.* holds \\ud83d, half of a char",
        ),
        ('{"question": "a", "answer": "#### 1"}\n', "has 1 row and no other split to evaluate on"),
    ],
)
def test_bad_rows_say_where(tmp_path: Path, text: str, told: str) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text(text)
    with pytest.raises(ShoalError, match=told):
        load(path)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "data.jsonl").write_bytes(b'{"question": "\xff"}')
    with pytest.raises(
        ShoalError, match=r"data\.jsonl, line 1 is not a JSON object: it is not UTF-8 text"
    ):
        load(tmp_path / "data.jsonl")
    (tmp_path / "data.parquet").write_bytes(b"no parquet")
    with pytest.raises(ShoalError, match=r"data\.parquet cannot be read as parquet"):
        load(tmp_path / "data.parquet")
    with pytest.raises(ShoalError, match=r"row 0 has no column 'answer'; its columns: question"):
        load(write(tmp_path / "short.parquet", [{"question": "a"}]))


def test_a_byte_order_mark_and_unicode_line_separators_are_no_trouble(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    lines = [json.dumps(row(0) | {"question": "a\u2028b"}, ensure_ascii=False), json.dumps(row(1))]
    path.write_text("\ufeff" + "\r\n".join(lines), encoding="utf-8", newline="")
    assert questions(load(path).train) == ["a\u2028b"]


def test_missing_files_and_splits(tmp_path: Path) -> None:
    for path in (tmp_path / "none", "none.jsonl", "a/none.jsonl", "./a/b/c"):
        with pytest.raises(
            ShoalError, match=f"task.path='{path}': there is no such file or folder"
        ):
            load(path)
    with pytest.raises(ShoalError, match="it holds nothing"):
        load(tmp_path)
    write(tmp_path / "test.jsonl", [row(0)])
    with pytest.raises(
        ShoalError, match=r"holds no train.jsonl, gsm8k_train.jsonl.*it holds test.jsonl"
    ):
        load(tmp_path)
