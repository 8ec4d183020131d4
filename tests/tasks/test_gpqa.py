"""GPQA: the letter behind `Answer:` as simple-evals finds it; options in an order of their own;
rows of our own in the published form."""

from __future__ import annotations

import csv
import json
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import huggingface_hub
import pytest
from huggingface_hub.errors import GatedRepoError
from scoring import score

from shoal.config.merge import compose
from shoal.config.sections.task import TaskSection
from shoal.job.task import load_task
from shoal.records import ShoalError
from shoal.tasks.gpqa import INSTRUCTION, OPTIONS, shuffled
from shoal.tasks.graders.choice import letter_in_answer_line
from shoal.tasks.splits import evaluating


def row(number: int, **other: Any) -> dict[str, Any]:
    """A row in the published form; the right option is the number itself."""
    options = dict(zip(OPTIONS, (f"{number}", f"{number}0", f"{number}1", "none "), strict=True))
    return {"Question": f"Which is {number}?\n", **options, "Record ID": f"rec{number}"} | other


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    """Writes the rows as the published file, a table."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return path


@pytest.mark.parametrize(
    ("text", "letter"),
    [
        ("Step by step.\nAnswer: B", "B"),
        ("Answer: $C$", "C"),
        ("ANSWER : D.", "D"),
        ("**Answer: A**", "A"),
        ("Answer: A\nNo, wait.\nAnswer: B", "A"),  # the first, as theirs
        ("My answer: Based on that, C", "B"),  # theirs reads so, too
        ("answer: c", "c"),  # found, and no option's letter
        ("Answer:\nB", None),
        ("**Answer:** B", None),
        ("The answer is B", None),
        ("Answer: E", None),
        ("", None),
    ],
)
def test_the_letter_is_found_as_simple_evals_finds_it(text: str, letter: str | None) -> None:
    assert letter_in_answer_line(text) == letter


def test_the_published_protocol(tmp_path: Path) -> None:
    path = write(tmp_path / "gpqa_diamond.csv", [row(i) for i in range(40)])
    config = compose("eval", ["task=gpqa", f"task.path={path}"])[0]
    sampling = config.sampling
    assert (config.pass_k, sampling.temperature, sampling.top_p) == (4, 0.5, 1.0)
    assert sampling.max_completion_tokens == 2048
    with evaluating():
        task = load_task(config.task)
    questions = task.evaluations["held_out"]
    assert len(questions) == 40 and "all 40 rows are evaluated on" in task.notes[0]
    one = questions[3]
    options = one.columns["options"]
    assert sorted(options) == ["3", "30", "31", "none"]
    lines = "\n".join(f"{letter}) {option}" for letter, option in zip("ABCD", options, strict=True))
    assert one.prompt == [{"role": "user", "content": f"{INSTRUCTION}\n\nWhich is 3?\n\n{lines}"}]
    assert options["ABCD".index(one.columns["answer"])] == "3"
    letters = Counter(question.columns["answer"] for question in questions)
    assert set(letters) == set("ABCD") and max(letters.values()) < 20
    assert "rec3" not in str(one)


def test_the_order_of_options_follows_from_the_row_alone(tmp_path: Path) -> None:
    assert shuffled("?", ["a", "b", "c", "d"]) == shuffled("?", ["d", "c", "b", "a"])
    assert shuffled("?", ["a", "b", "c", "d"]) == ["b", "c", "a", "d"]
    rows = [row(i) for i in range(10)]
    answers = []
    for name, ordered in (("one.csv", rows), ("other.csv", rows[::-1])):
        path = write(tmp_path / name, ordered)
        task = load_task(TaskSection(name="gpqa", path=str(path), eval_split="train"))
        answers.append({one.columns["Question"]: one.columns["answer"] for one in task.train})
    assert answers[0] == answers[1]


def test_answers_are_judged(tmp_path: Path) -> None:
    path = write(tmp_path / "gpqa_diamond.csv", [row(i) for i in range(20)])
    task = load_task(TaskSection(name="gpqa", path=str(path)))
    assert (len(task.train), len(task.evaluations["held_out"])) == (18, 2)
    assert task.notes[1].startswith("gpqa: an evaluation set: ")
    one = task.train[0]
    right = one.columns["answer"]
    wrong = "ABCD".replace(right, "")[0]
    texts = [f"Answer: {right}", f"Answer: {wrong}", right, f"answer: {right.lower()}"]
    scores = score(task.rewards, [one], [one.prompt], [texts], [[[1]] * 4])
    assert scores.rewards.tolist() == [[1, 0, 0, 0]]
    assert task.correct and task.verdict and task.well_formed and task.of_row
    assert [task.correct(text, one) for text in texts] == [True, False, False, False]
    assert task.verdict(texts[1], one) == {"correct": False, "answer": wrong}
    assert [task.well_formed(text) for text in texts] == [True, True, False, True]
    assert task.of_row(0, row(0)).columns == one.columns
    with pytest.raises(ShoalError, match="row 1 has no `Correct Answer` that is text"):
        task.of_row(1, {"Question": "?"})


def test_a_missing_column_an_unknown_subset_and_a_gated_set_are_each_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"Question": "?", "Correct Answer": "1"}) + "\n")
    with pytest.raises(ShoalError, match=r"line 1 has no column 'Incorrect Answer 1'; its columns"):
        load_task(TaskSection(name="gpqa", path=str(path)))

    folder = tmp_path / "hub"
    write(folder / "gpqa_diamond.csv", [row(1), row(2)])
    configs = "".join(
        f"- config_name: gpqa_{name}\n  data_files: gpqa_{name}.csv\n"
        for name in ("main", "diamond")
    )
    (folder / "README.md").write_text(f"---\nconfigs:\n{configs}---\n")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda name, **keys: str(folder))
    with evaluating():
        task = load_task(TaskSection(name="gpqa", eval_split="train"))
        assert len(task.evaluations["held_out"]) == 2
        with pytest.raises(
            ShoalError, match=r"the subset 'hard'; .*task.subset is one of gpqa_main"
        ):
            load_task(TaskSection(name="gpqa", subset="hard", eval_split="train"))

    def refuse(name: str, **keys: Any) -> str:
        request = httpx.Request("GET", "https://huggingface.co")
        raise GatedRepoError("401", response=httpx.Response(401, request=request))

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    with pytest.raises(ShoalError, match=r"Idavidrein/gpqa is gated: accept its terms .*HF_TOKEN"):
        load_task(TaskSection(name="gpqa"))
