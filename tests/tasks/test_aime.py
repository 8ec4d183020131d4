"""AIME: integer answers in a box, checked as in the task `math`; rows as they were published; which
of them are evaluated on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from scoring import score

from shoal.config.merge import compose
from shoal.config.sections.task import TaskSection
from shoal.job.task import load_task
from shoal.records import ShoalError
from shoal.tasks.aime import INSTRUCTION, gold
from shoal.tasks.splits import evaluating


def row(number: int, **other: Any) -> dict[str, Any]:
    return {"id": number, "problem": f"Find {number} mod 1000.", "answer": f"{number:03}"} | other


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize(
    ("answer", "read"),
    [
        ("33", "33"),
        ("033", "33"),
        ("000", "0"),
        ("$204$", "204"),
        ("336^\\circ", "336"),
        ("336^{\\circ}", "336"),
        ("1000", None),
        ("-1", None),
        ("1.5", None),
        ("", None),
    ],
)
def test_gold_answers_are_integers_below_1000(answer: str, read: str | None) -> None:
    assert gold(answer) == read


def test_the_published_protocol(tmp_path: Path) -> None:
    path = write(tmp_path / "aime24.jsonl", [row(i) for i in range(30)])
    for name, split in (("aime24", "train"), ("aime25", "test")):
        config = compose("eval", [f"task={name}", f"task.path={path}"])[0]
        sampling = config.sampling
        assert (config.pass_k, sampling.temperature, sampling.top_p) == (64, 0.6, 0.95)
        assert sampling.max_completion_tokens == 32_768
        assert (config.task.split, config.task.eval_split) == (split, split)
        with evaluating():
            task = load_task(config.task)
        questions = task.evaluations["held_out"]
        assert len(questions) == 30 and "all 30 rows are evaluated on" in task.notes[0]
        assert questions[7].prompt == [
            {"role": "user", "content": f"Find 7 mod 1000.\n{INSTRUCTION}"}
        ]
        assert questions[7].columns == {"problem": "Find 7 mod 1000.", "answer": "7"}


def test_to_train_on_it_a_tenth_is_held_out_and_a_note_warns(tmp_path: Path) -> None:
    path = write(tmp_path / "aime24.jsonl", [row(i) for i in range(30)])
    task = load_task(TaskSection(name="aime24", path=str(path)))
    assert (len(task.train), len(task.evaluations["held_out"])) == (27, 3)
    assert "every tenth row of it is held out" in task.notes[0]
    assert task.notes[1].startswith("aime24: an evaluation set: ")


def test_each_year_has_a_data_set_on_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "24/data/train.jsonl", [row(24)])
    write(tmp_path / "25/test.jsonl", [row(25, answer=25)])
    folders = {"HuggingFaceH4/aime_2024": "24", "math-ai/aime25": "25"}

    def snapshot_download(name: str, **keys: Any) -> str:
        return str(tmp_path / folders[name])

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    for name, answer in (("aime24", "24"), ("aime25", "25")):
        with evaluating():
            task = load_task(compose("eval", [f"task={name}"])[0].task)
        assert [one.columns["answer"] for one in task.evaluations["held_out"]] == [answer]


def test_answers_are_judged_as_mathematics(tmp_path: Path) -> None:
    path = write(tmp_path / "aime24.jsonl", [row(33)])
    task = load_task(TaskSection(name="aime24", path=str(path), eval_split="train"))
    one = task.train[0]
    texts = ["so \\boxed{33}", "\\boxed{033}", "\\boxed{33.0}", "\\boxed{34}", "33", "\\boxed{}"]
    scores = score(task.rewards, [one], [one.prompt], [texts], [[[1]] * 6])
    assert scores.rewards.tolist() == [[1, 1, 1, 0, 0, 0]]
    assert task.correct and task.well_formed and task.verdict and task.of_row and task.extract
    assert [task.correct(text, one) for text in texts] == [True, True, True, False, False, False]
    assert [task.well_formed(text) for text in texts] == [True] * 4 + [False] * 2
    assert task.verdict("The answer is $33$.", one)["correct"]
    assert task.extract(texts[0]) == "33" and task.extract(texts[4]) is None
    assert task.of_row(0, row(5)).columns["answer"] == "5"


def test_rows_that_cannot_be_used(tmp_path: Path) -> None:
    def load(rows: list[dict[str, Any]]) -> Any:
        return load_task(TaskSection(name="aime25", path=str(write(tmp_path / "a.jsonl", rows))))

    rows = [row(i) for i in range(21)]
    task = load([*rows[:3], row(3, answer="1/2"), *rows[4:9], row(9, answer="x"), *rows[10:]])
    assert len(task.train) == 18 and len(task.evaluations["held_out"]) == 1
    assert task.data.dropped == {"no answer from 0 to 999": 1}
    assert task.notes[-1] == ("aime25: 1 of 2 held-out rows were dropped: no answer from 0 to 999")
    with pytest.raises(ShoalError, match=r"none of the .* rows has an `answer` that is an integer"):
        load([row(i, answer="x") for i in range(5)])
    with pytest.raises(
        ShoalError,
        match=r"task aime25: .*a\.jsonl, line 1 has no column 'problem'; its columns: .*"
        r"task\.columns=\[problem=OTHER\]",
    ):
        load([{"Problem": "?", "Answer": "1"}])
