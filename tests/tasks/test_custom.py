"""One's own data: every form of files and folders, renamed columns, templates, verl's and TRL's
rows as they are."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import huggingface_hub
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from scoring import score
from tiny_runs import PLAIN, Workshop, groups, metrics

import shoal
from shoal import cli
from shoal.checks.settings import check_before_weights, reward_preset_notes
from shoal.config.merge import compose
from shoal.config.sections.reward import RewardSection
from shoal.config.sections.task import TaskSection
from shoal.job.task import (
    check_truths,
    load_task,
    note_missing_sources,
    with_system_prompt,
)
from shoal.records import Example, ShoalError
from shoal.tasks.data_folder import Published
from shoal.tasks.generated import LazyRows
from shoal.tasks.splits import evaluating, read_splits
from shoal.tasks.task import Task
from shoal.tasks.template import parse_template

TRAINED = ["steps=1", "task.num_eval_questions=2", "report.groups=true"]


def row(i: int, name: str = "q") -> dict[str, Any]:
    return {"prompt": f"{name}{i}?", "answer": i}


def write(path: Path, rows: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows, indent=1))
    else:
        path.write_text("".join(json.dumps(one) + "\n" for one in rows))
    return path


def load(path: Any, **keys: Any) -> Task:
    return load_task(TaskSection(name="custom", path=str(path), **keys))


def prompts(examples: Any) -> list[Any]:
    return [example.prompt for example in examples]


def asked(*texts: str) -> list[Any]:
    return [[{"role": "user", "content": text}] for text in texts]


def fails(told: str, path: Any, **keys: Any) -> None:
    with pytest.raises(ShoalError) as caught:
        load(path, **keys)
    assert told in str(caught.value) and "\n" not in str(caught.value), caught.value


# ---- files


@pytest.mark.parametrize("name", ["data.jsonl", "data.json", "data.parquet"])
def test_a_file_of_any_kind(tmp_path: Path, name: str) -> None:
    task = load(write(tmp_path / name, [row(i) for i in range(20)]))
    assert prompts(task.train) == [f"q{i}?" for i in range(18)]
    assert prompts(task.evaluations["held_out"]) == ["q18?", "q19?"]
    assert task.train[3].columns == {"answer": 3} and [one.row for one in task.train] == list(
        range(18)
    )
    assert task.notes == (
        f"custom: {name} has no other split to evaluate on; its last 2 of 20 rows are held out; "
        "if the rows are sorted, shuffle them first",
    )
    assert (task.correct, task.rewards) == (None, ())


def test_a_json_file_of_lines_is_read_as_lines(tmp_path: Path) -> None:
    (tmp_path / "data.json").write_text("".join(json.dumps(row(i)) + "\n" for i in range(3)))
    assert prompts(load(tmp_path / "data.json").train) == ["q0?", "q1?"]


def test_a_file_named_after_a_split_finds_the_other(tmp_path: Path) -> None:
    write(tmp_path / "my_test.jsonl", [row(7)])
    task = load(write(tmp_path / "my_train.jsonl", [row(0), row(1)]))
    assert (prompts(task.train), prompts(task.evaluations["held_out"])) == (["q0?", "q1?"], ["q7?"])


def test_prompts_held_out_too_are_not_trained_on(tmp_path: Path) -> None:
    write(tmp_path / "train.jsonl", [row(0), row(1), row(0) | {"answer": 5}, row(2)])
    write(tmp_path / "test.jsonl", [row(0), row(9)])
    task = load(tmp_path)
    assert prompts(task.train) == ["q1?", "q2?"] and [one.row for one in task.train] == [0, 1]
    assert task.data.dropped == {"prompt held out too": 2} and task.notes == ()
    write(tmp_path / "train.jsonl", [row(9)])
    fails("every training prompt is held out too", tmp_path)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('{"prompt": "a"}\n{"prompt": "\n', "data.jsonl, line 2 is not a JSON object"),
        ('{"prompt": "a"}\n\n{"prompt": ""}\n', "data.jsonl, line 3: `prompt` is an empty str"),
        ('{"prompt": "a"}\n{"prompt": null}\n', "data.jsonl, line 2: `prompt` is a NoneType"),
        ('{"prompt": []}\n{"prompt": []}\n', "data.jsonl, line 1: `prompt` is an empty list"),
        (
            '{"prompt": "a"}\n{"prompt": [{"role": "user"}]}\n',
            "data.jsonl, line 2: message 0 of `prompt`",
        ),
        (
            '{"prompt": "a"}\n["b"]\n',
            "data.jsonl, line 2 is a list; an object with columns is needed",
        ),
        (
            '{"prompt": "a"}\n' + "[" * 100000 + "\n",
            "data.jsonl, line 2 is not a JSON object: maximum recursion depth",
        ),
        ('{"prompt": "a", "b": 1}\n{"prompt": "c"}\n', "data.jsonl, line 2 has no column 'b'"),
        (
            '{"prompt": "a", "completions": 1}\n{"prompt": "c", "completions": 1}\n',
            "cannot be called 'completions'",
        ),
        ('{"prompt": "a"}\n', "has 1 row and no other split to evaluate on"),
        ("", "data.jsonl is empty; rows with columns are needed"),
        (
            '{"question": "a", "answer": 1}\n{"question": "b", "answer": 2}\n',
            "line 1 has no column `prompt`; its columns: question, answer. Make a message of one, "
            "task.template='{question}', or use the text unchanged, without the model's chat "
            "template, task.columns=[prompt=question]",
        ),
        (
            '{"tags": ["x"], "question": [{"role": "user", "content": "a"}], "solution": "1"}\n',
            "its columns: tags, question, solution. Take the messages of question, "
            "task.columns=[prompt=question]",
        ),
        ('{"solution": "1", "Problem": "a"}\n', "task.template='{Problem}'"),
        ('{"answer": "1", "note": "a"}\n', "task.template='{note}'"),
        ('{"answer": "1"}\n', "task.template='{answer}'"),
    ],
)
def test_a_row_that_cannot_be_used_is_named(tmp_path: Path, text: str, told: str) -> None:
    (tmp_path / "data.jsonl").write_text(text)
    fails(told, tmp_path / "data.jsonl")


def test_files_that_are_no_data(tmp_path: Path) -> None:
    (tmp_path / "data.json").write_text('[{"prompt": "a"},')
    fails("data.json is not a JSON list of objects", tmp_path / "data.json")
    (tmp_path / "data.json").write_text('[{"prompt": ' + "9" * 5000 + "}]")
    fails("data.json is not a JSON list of objects: Exceeds the limit", tmp_path / "data.json")
    (tmp_path / "data.json").write_text(r'[{"prompt": "a"}, {"prompt": "\ud83d"}]')
    fails(
        r"data.json is not a JSON list of objects: it holds \ud83d, half of a character",
        tmp_path / "data.json",
    )
    fails("task custom needs task.path", "")
    fails("there is no such file or folder", tmp_path / "none.jsonl")
    write(tmp_path / "two/train.jsonl", [row(0), row(1)])
    write(tmp_path / "two/test.jsonl", [{"prompt": asked("a")[0], "answer": 1}])
    fails("test.jsonl, line 1: `prompt` is messages, that of ", tmp_path / "two")


# ---- columns


def test_columns_under_other_names(tmp_path: Path) -> None:
    path = write(
        tmp_path / "data.jsonl", [{"q": f"{i}?", "prompt": "old", "answer": i} for i in range(3)]
    )
    task = load(path, columns=("prompt=q", "old_prompt = prompt"))
    assert prompts(task.train) == ["0?", "1?"]
    assert task.train[1].columns == {"old_prompt": "old", "answer": 1}


@pytest.mark.parametrize(
    ("columns", "told"),
    [
        (("prompt=qestion",), "data.jsonl, line 1 has no column 'qestion', did you mean question?"),
        (("prompt=question", "prompt=answer"), "'prompt' is named twice"),
        (("a=question", "b=question"), "'question' is named twice"),
        (
            ("answer=question",),
            "has a column 'answer' too; rename that as well, task.columns=[answer=",
        ),
    ],
)
def test_columns_that_clash_or_are_missing(
    tmp_path: Path, columns: tuple[str, ...], told: str
) -> None:
    fails(
        told, write(tmp_path / "data.jsonl", [{"question": "a", "answer": 1}] * 2), columns=columns
    )


# ---- prompts


def test_messages_are_asked_without_their_answer(tmp_path: Path) -> None:
    talk = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "ho"},
        {"role": "user", "content": "1?"},
        {"role": "assistant", "content": "2"},
    ]
    rows = [
        {"messages": talk, "id": 0},
        {"messages": talk[:3], "id": 1},
        {"messages": talk[:1], "id": 2},
    ]
    task = load(write(tmp_path / "data.jsonl", rows))
    assert prompts(task.evaluations["held_out"]) == [talk[:1]]
    assert prompts(load(write(tmp_path / "more.jsonl", [*rows[1:], rows[2]])).train) == [talk[:3]]
    assert prompts(task.train) == [talk[:3], talk[:3]]
    assert task.train[0].columns["messages"] == talk
    assert (
        "the prompts are the column `messages`, without the assistant's last message"
        in task.notes[1]
    )
    fails(
        "line 2: `messages` holds nothing but an answer",
        write(tmp_path / "b.jsonl", [rows[0], {"messages": talk[1:2]}]),
    )
    fails("line 1: `messages` is a str", write(tmp_path / "c.jsonl", [{"messages": "hi"}] * 2))


def test_a_template_makes_a_message_and_reads_no_braces_in_values(tmp_path: Path) -> None:
    rows = []
    for n in range(3):
        rows.append({"q": "{n} {{x}} {0.__class__}", "n": n, "all": [1, "ü"]})
    path = write(tmp_path / "data.jsonl", rows)
    task = load(path, template="Solve {q} with {n} of {all}: \\boxed{{}}")
    assert (
        prompts(task.train)[1]
        == asked('Solve {n} {{x}} {0.__class__} with 1 of [1, "ü"]: \\boxed{}')[0]
    )
    assert task.train[1].columns == rows[1]
    assert task.notes[-1] == "custom: task.template makes each prompt, as a user's message"
    (tmp_path / "template.txt").write_text("Think.\n{n}\n")
    assert prompts(load(path, template=str(tmp_path / "template.txt")).train) == asked(
        "Think.\n0", "Think.\n1"
    )


@pytest.mark.parametrize(
    ("template", "told"),
    [
        ("{qestion}", "names 'qestion', which is not a column of "),
        ("{qestion}", "data.jsonl, line 1, did you mean question?; its columns: question, n, none"),
        ("{question.upper}", "names 'question.upper', which is not a column"),
        ("{question!r}", "names 'question!r', which is not a column"),
        ("{n:5}", "names 'n:5', which is not a column"),
        ("{none}", "line 1: the column 'none' is null, and task.template needs it"),
        ("{question} \\boxed{}", "'{}' stands alone"),
        ("a { b {question}", "'{' stands alone after 'a '"),
        ("{question} }", "'}' stands alone"),
        ("{{question}}", "names no column: every prompt would be the same"),
        ("no such file.txt", "names no column, nor is it a file"),
    ],
)
def test_templates_that_cannot_be_filled(tmp_path: Path, template: str, told: str) -> None:
    fails(
        told,
        write(tmp_path / "data.jsonl", [{"question": "a", "n": 1, "none": None}] * 2),
        template=template,
    )


def test_pieces_of_a_template() -> None:
    assert parse_template("{{{a}}} { b }{c}") == (["{", "} ", "", ""], ["a", "b", "c"])


VERL = """def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return float(ground_truth in solution_str)
"""


@pytest.mark.parametrize("reward", ["compute_score", "verl_reward"])
@pytest.mark.parametrize(
    ("model", "told"),
    [
        ('{"style": "rule", "ground_truth": "7"}', "`reward_model` is text"),
        ({"style": "rule"}, "has no `ground_truth`"),
        ({"ground_truth": ""}, "has an empty `ground_truth`"),
        ({"ground_truth": None}, "has an empty `ground_truth`"),
        (None, "`reward_model` is None"),
        ({"ground_truth": "7"}, ""),
    ],
)
def test_a_row_without_the_truth_that_verls_functions_judge_by_is_named(
    tmp_path: Path, reward: str, model: Any, told: str
) -> None:
    good = {"data_source": "openai/gsm8k", "prompt": "a", "reward_model": {"ground_truth": "3"}}
    rows = [good, {**good, "prompt": "b", "reward_model": model}, {**good, "prompt": "c"}]
    path = write(tmp_path / "rows_train.jsonl", rows)
    (tmp_path / "score.py").write_text(VERL)
    name = f"{tmp_path}/score.py:{reward}" if reward == "compute_score" else reward
    task = load_task(
        TaskSection(name="custom", path=str(path), eval_split="train"), RewardSection((name,))
    )
    if not told:
        check_truths(task, task.rewards)
        return
    with pytest.raises(ShoalError) as caught:
        check_truths(task, task.rewards)
    text = str(caught.value)
    assert told in text and f"reward function {reward!r} needs a ground truth" in text
    assert "1 of 3 training rows lack; the first is " in text and "line 2" in text


def test_a_template_is_for_own_data_only(tmp_path: Path) -> None:
    with pytest.raises(
        ShoalError, match=r"task.template has no effect on the task gsm8k.*task=custom"
    ):
        load_task(TaskSection(name="gsm8k", path=str(tmp_path), template="{question}"))
    with pytest.raises(ShoalError, match=r"task words makes its own problems.*task=custom"):
        load_task(TaskSection(path="data.jsonl"))


# ---- folders and the hub


README = """---
license: mit
configs:
- config_name: main
  data_files:
  - split: train
    path: main/fit-*
  - {split: test, path: [main/exam.parquet]}
- config_name: other
  data_dir: more
- config_name: flat
  data_files: "more/*.jsonl"
---
# Rows
"""


def write_hub(folder: Path, readme: str = README) -> Path:
    """A data set as the hub has it; prompts tell the file."""
    for at, name in enumerate(
        (
            "main/fit-0.parquet",
            "main/fit-1.parquet",
            "main/exam.parquet",
            "more/train.jsonl",
            "more/test.jsonl",
        )
    ):
        write(folder / name, [row(10 * at + i) for i in range(2)])
    (folder / "README.md").write_text(readme)
    return folder


MAIN = ["q0?", "q1?", "q10?", "q11?"]
EXAM = ["q20?", "q21?"]
MORE = ["q30?", "q31?"]
MORE_TEST = ["q40?", "q41?"]
SAID = (
    "custom: task.split=main names a subset of the data set, so it is the subset, and the split is "
    "train"
)


@pytest.mark.parametrize(
    ("keys", "train", "held_out", "notes"),
    [
        ({"subset": "main"}, MAIN, EXAM, ()),
        ({"subset": "other"}, MORE, MORE_TEST, ()),
        ({"subset": "main", "split": "test", "eval_split": "train"}, EXAM, MAIN, ()),
        ({"split": "main"}, MAIN, EXAM, (SAID,)),
        ({"split": "main", "files": ("train",)}, MAIN, EXAM, (SAID,)),
        (
            {"split": "main", "files": ("test",), "eval_split": "train"},
            EXAM,
            MAIN,
            (SAID.replace("is train", "is test"),),
        ),
        (
            {"subset": "main", "files": ("main/fit-1*", "more/test.jsonl")},
            [*MAIN[2:], *MORE_TEST],
            EXAM,
            (),
        ),
        ({"subset": "main", "files": ("train",)}, MAIN, EXAM, ()),
    ],
)
def test_subsets_that_a_readme_declares(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    keys: dict[str, Any],
    train: list[str],
    held_out: list[str],
    notes: tuple[str, ...],
) -> None:
    hub = write_hub(tmp_path)
    fetched: list[str] = []

    def download(repo: str, repo_type: str, allow_patterns: list[str]) -> str:
        assert (repo, repo_type) == ("some/data", "dataset")
        fetched.extend(allow_patterns)
        return str(hub)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    for path in (hub, "some/data"):
        task = load(path, **keys)
        assert (prompts(task.train), prompts(task.evaluations["held_out"])) == (train, held_out)
        assert task.notes == notes
    assert fetched[0] == "README.md"
    if keys.get("subset") == "main" and "files" not in keys:
        # nothing of the other subsets
        assert set(fetched[1:]) == {"main/fit-*", "main/exam.parquet"}


def test_a_default_subset_and_a_list_of_files_without_splits(tmp_path: Path) -> None:
    # one row in ten held out
    assert prompts(load(write_hub(tmp_path), subset="flat").train) == MORE_TEST + MORE[:1]
    write_hub(tmp_path, README.replace("config_name: other", "config_name: other\n  default: true"))
    assert prompts(load(tmp_path).train) == MORE
    (tmp_path / "README.md").write_text("---\nconfigs: [broken\n---\n")
    assert prompts(load(tmp_path, subset="more").train) == MORE


def test_a_folder_without_readme_has_its_subsets_as_folders(tmp_path: Path) -> None:
    for subset, at in (("main", 0), ("socratic", 5)):
        for split, add in (("train", 0), ("test", 2)):
            write(
                tmp_path / subset / f"{split}-00000-of-00001.parquet",
                [row(at + add + i) for i in range(2)],
            )
    for keys in ({"subset": "main"}, {"split": "main", "files": ("train",)}, {"split": "main"}):
        task = load(tmp_path, **keys)
        assert (prompts(task.train), prompts(task.evaluations["held_out"])) == (
            ["q0?", "q1?"],
            ["q2?", "q3?"],
        )
    fails("(task.files names others); task.subset is one of main, socratic", tmp_path)
    fails("in the subset 'mian'; it holds test-00000-of-00001.parquet", tmp_path, subset="mian")
    fails("there is no file 'x*' in ", tmp_path, files=("x*",))
    fails(
        "holds no fit.jsonl or parquet file of the split 'fit' in the subset 'main'",
        tmp_path,
        split="fit",
        subset="main",
    )
    (tmp_path / "notes.txt").write_text("x")
    fails(
        "notes.txt is of an unsupported kind: unpack or convert it; expected .jsonl",
        tmp_path,
        files=("notes.txt",),
    )
    task = load(tmp_path / "main", split="main", files=("train",))  # as one subset's folder
    assert prompts(task.train) == ["q0?", "q1?"]


def test_one_file_needs_no_subset(tmp_path: Path) -> None:
    task = load(write(tmp_path / "data.jsonl", [row(0), row(1)]), split="main", files=("train",))
    assert (
        prompts(task.train) == ["q0?"]
        and task.notes[0] == "custom: task.files has no effect, since data.jsonl is one file"
    )


def test_a_hub_data_set_without_names_of_splits_is_fetched_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def download(repo: str, repo_type: str, allow_patterns: list[str]) -> str:
        if "*.jsonl" in allow_patterns:
            write(tmp_path / "rows.jsonl", [row(i) for i in range(3)])
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    fails(
        "holds no train.jsonl or parquet file of the split 'train'; it holds rows.jsonl "
        "(task.files",
        "some/data",
    )
    assert prompts(load("some/data", files=("rows.jsonl",)).train) == ["q0?", "q1?"]


def test_files_named_without_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "a.jsonl", [row(0), row(1)])
    write(tmp_path / "b_train.parquet", [row(2), row(3)])
    write(tmp_path / "b_test.parquet", [row(4)])
    assert prompts(load("", files=(f"{tmp_path}/a.jsonl", f"{tmp_path}/b_tr*")).train) == [
        "q0?",
        "q1?",
        "q2?",
    ]
    monkeypatch.chdir(tmp_path)
    task = load("", files=("b_train.parquet",))
    assert (prompts(task.train), prompts(task.evaluations["held_out"])) == (["q2?", "q3?"], ["q4?"])
    fails("there is no file 'c.jsonl'", "", files=("c.jsonl",))


def test_another_split_to_evaluate_on_is_pointed_out(tmp_path: Path) -> None:
    write(tmp_path / "data/train-0.jsonl", [row(0), row(1)])
    write(tmp_path / "data/validation-0.jsonl", [row(2)])
    task = load(tmp_path)
    assert prompts(task.evaluations["held_out"]) == ["q1?"]
    assert task.notes[0] == (
        "custom: there is no split test to evaluate on, but validation: "
        "task.eval_split=validation takes it"
    )
    assert prompts(load(tmp_path, eval_split="validation").evaluations["held_out"]) == ["q2?"]


def test_a_readme_cannot_point_elsewhere(tmp_path: Path) -> None:
    write(tmp_path / "secret.jsonl", [row(8), row(9)])
    write(tmp_path / "data/train.jsonl", [row(0), row(1)])
    for entry in (
        "data_files: ../secret.jsonl",
        f"data_files: {tmp_path}/secret.jsonl",
        "data_dir: ..",
    ):
        (tmp_path / "data/README.md").write_text(
            f"---\nconfigs:\n- config_name: default\n  {entry}\n---\n"
        )
        if "files" in entry:
            fails(
                "holds no train.jsonl or parquet file of the split 'train'; it holds train.jsonl",
                tmp_path / "data",
            )
        else:
            assert prompts(load(tmp_path / "data").train) == ["q0?"]


@pytest.mark.parametrize(
    "configs", ["configs: 5", "configs: [5]", "configs:\n- {config_name: a, data_files: []}"]
)
def test_what_a_readme_declares_in_no_known_form_is_left_out(tmp_path: Path, configs: str) -> None:
    write(tmp_path / "train.jsonl", [row(0), row(1)])
    (tmp_path / "README.md").write_text(f"---\n{configs}\n---\n")
    assert prompts(load(tmp_path).train) == ["q0?"]


def test_a_readme_may_name_a_file_of_another_kind(tmp_path: Path) -> None:
    (tmp_path / "train.xml").write_text("<a/>")
    (tmp_path / "README.md").write_text(
        "---\nconfigs:\n- config_name: default\n  data_files: train.xml\n---\n"
    )
    fails(
        "train.xml is of an unsupported kind: unpack or convert it; expected .jsonl, .json, "
        ".parquet",
        tmp_path,
    )


def test_a_file_that_is_listed_twice_counts_twice(tmp_path: Path) -> None:
    for name, questions in {"a": (0, 1), "b": (2,), "test": (9,)}.items():
        write(tmp_path / f"{name}.jsonl", [row(number) for number in questions])
    twice = load(tmp_path, files=("a.jsonl", "b.jsonl", "a.jsonl"))
    assert prompts(twice.train) == ["q0?", "q1?", "q2?", "q0?", "q1?"]
    assert [example.row for example in twice.train] == [0, 1, 2, 3, 4]
    assert twice.data.train_files == {"a.jsonl": 2, "b.jsonl": 1, "a.jsonl (time 2)": 2}
    # A pattern that covers a file which is named too does not repeat it.
    once = load(tmp_path, files=("a.jsonl", "[ab].jsonl"))
    assert prompts(once.train) == ["q0?", "q1?", "q2?"]


def test_names_that_are_empty_or_no_pattern(tmp_path: Path) -> None:
    write(tmp_path / "train.jsonl", [row(0), row(1)])
    fails("task.files: there is no file '' in ", tmp_path, files=("",))
    fails(
        "task.split= is empty: expected the name of a split, such as train",
        tmp_path / "train.jsonl",
        split="",
    )
    fails(
        "task.eval_split= is empty: expected the name of a split, such as test",
        tmp_path,
        eval_split=" ",
    )


def test_where_nothing_is_trained_no_row_is_held_out(tmp_path: Path) -> None:
    path = write(tmp_path / "data.jsonl", [row(i) for i in range(20)])
    one = write(tmp_path / "one.jsonl", [row(0)])
    with evaluating():
        task, alone = load(path), load(one)
    assert (
        prompts(task.evaluations["held_out"]) == [f"q{i}?" for i in range(20)]
        and len(task.train) == 0
    )
    assert task.notes == (
        "custom: data.jsonl has no other split to evaluate on; all 20 rows are evaluated on, "
        "those too that a run on this data learned from",
    )
    assert prompts(alone.evaluations["held_out"]) == ["q0?"]
    assert len(load(path).train) == 18
    with evaluating():
        templated = load(write(tmp_path / "t.jsonl", [{"n": 1}, {"n": 2}]), template="{n} + 1?")
    assert prompts(templated.evaluations["held_out"]) == asked("1 + 1?", "2 + 1?")


def test_rows_of_a_published_data_set_keep_all_columns(tmp_path: Path) -> None:
    write(tmp_path / "exam_train.jsonl", [{"q": "a", "level": 3}, {"q": "b", "level": 4}])
    write(tmp_path / "exam_test.jsonl", [{"q": "c", "level": 5}])
    published = Published("exam", "", ("question",), ("exam_{split}",), texts=("question",))
    task = TaskSection(path=str(tmp_path), columns=("question=q",))
    splits = read_splits(task, published, lambda number, place, row: row)
    assert (splits.train, splits.held_out, splits.notes) == (
        [{"question": "a", "level": 3}, {"question": "b", "level": 4}],
        [{"question": "c", "level": 5}],
        [],
    )
    with pytest.raises(
        ShoalError,
        match=r"line 1 has no column 'question'; its columns: q, level \(task.columns=\[",
    ):
        read_splits(TaskSection(path=str(tmp_path)), published, lambda number, place, row: row)


# ---- rewards and whole runs


VERL = """
def helper(text):
    raise RuntimeError("a helper is no reward")


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    assert data_source == "sums" and ground_truth.isdigit() and extra_info["index"] >= 0
    assert type(extra_info) is dict and type(extra_info["tags"]) is list
    return {"score": float(len(solution_str) % 3), "acc": float(solution_str == ground_truth)}
"""


def verl_rows(count: int) -> list[dict[str, Any]]:
    result = []
    for i in range(count):
        result.append(
            {
                "data_source": "sums",
                "prompt": asked(f"{10 + i} + 17 = ?")[0],
                "ability": "math",
                "reward_model": {"style": "rule", "ground_truth": str(27 + i)},
                "extra_info": {"split": "train", "index": i, "tags": ["a", "b"]},
            }
        )
    return result


def test_verl_rows_keep_every_column_in_plain_types(tmp_path: Path) -> None:
    rows = verl_rows(5)
    rows[0]["prompt"][0]["name"] = "ann"  # the others then have a null there
    task = load(write(tmp_path / "train.parquet", rows))
    assert task.train[1].prompt == asked("11 + 17 = ?")[0]
    assert task.train[0].prompt == rows[0]["prompt"] and "name" in rows[0]["prompt"][0]
    assert task.train[1].columns == {
        name: value for name, value in rows[1].items() if name != "prompt"
    }


def test_rewards_are_needed_and_named_ones_count(tmp_path: Path) -> None:
    path = write(tmp_path / "train.parquet", verl_rows(5))
    (tmp_path / "verl.py").write_text(VERL)
    section = TaskSection(name="custom", path=str(path))
    with pytest.raises(
        ShoalError, match=r"task custom: it has no reward of its own.*reward=file.py:function"
    ):
        load_task(section, RewardSection())
    task = load_task(section, RewardSection((f"{tmp_path}/verl.py:compute_score",)))
    found = score(
        task.rewards,
        task.train[:2],
        prompts(task.train[:2]),
        [["27", "2"], ["3", "four"]],
        [[[1]] * 2] * 2,
    )
    np.testing.assert_array_equal(found.rewards, [[2, 1], [1, 1]])
    assert found.metrics["acc"] == [1.0, 0.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("source", "preset", "has_reward"),
    [
        ("openai/gsm8k", "verl", True),
        ("openai/gsm8k", "shoal", False),
        ("sums", "verl", False),
        (None, "verl", False),
    ],
)
def test_rows_of_verl_have_its_reward_with_its_preset(
    tmp_path: Path, source: str | None, preset: str, has_reward: bool
) -> None:
    """recipe=verl sets the preset."""
    rows = verl_rows(20)
    for row in rows[:-1]:
        row["data_source"] = "openai/gsm8k"
    rows[-1]["data_source"] = source  # which is held out
    section = TaskSection(name="custom", path=str(write(tmp_path / "train.parquet", rows)))
    words = [
        *("recipe=verl", "task=custom", f"task.path={section.path}", f"reward.preset={preset}"),
        *("actor_rollout_ref.actor.ppo_mini_batch_size=256", "algorithm.num_minibatches=1"),
    ]
    config, _ = compose("train", words)
    if preset == "shoal":
        with pytest.raises(ShoalError, match="no reward of its own"):
            check_before_weights(config)
    else:
        check_before_weights(config)  # the rows decide
    if not has_reward:
        with pytest.raises(ShoalError, match="no reward of its own"):
            load_task(section, config.reward)
        return
    task = load_task(section, config.reward)
    assert [reward.name for reward in task.rewards] == ["verl_reward"]
    [note] = reward_preset_notes(config, task)
    assert note.startswith("reward: verl_reward, by each row's data_source")
    own = replace(config.reward, functions=("brief_reward",))
    task = load_task(section, own)
    assert [reward.name for reward in task.rewards] == ["brief_reward"]
    assert list(reward_preset_notes(replace(config, reward=own), task)) == []


def train(workshop: Workshop, path: Path, name: str, *changes: str) -> list[dict[str, Any]]:
    """The groups of the one step of a run on these rows."""
    run = workshop.train(name, "task=custom", f"task.path={path}", *TRAINED, *changes)
    assert len(metrics(run)) == 1
    return groups(run, 1)


@pytest.mark.slow
def test_a_run_on_ones_own_rows_with_a_template(
    workshop: Workshop, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(workshop.folder / "own.jsonl", [{"n": 10 + i, "gold": i} for i in range(8)])
    found = train(workshop, path, "own", "task.template=Add {n}, {{x}}: ")
    assert [one["prompt"] for one in found] == asked(
        *(f"Add {one['columns']['n']}, {{x}}: " for one in found)
    )
    assert len(found) == 2 and all(
        one["columns"]["gold"] + 10 == one["columns"]["n"] for one in found
    )
    assert "custom: task.template makes each prompt, as a user's message" in capsys.readouterr().out


def test_one_system_prompt_for_all_rows() -> None:
    system, user = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+3?"}
    own = {"role": "system", "content": "Take your time."}
    answer = {"role": "assistant", "content": "5"}
    rows = [
        Example(0, [user]),
        Example(1, [own, user], {"messages": [own, user, answer]}),
    ]
    task = Task("own", train=rows, evaluations={"held_out": [Example(2, [own, user])]})
    changed = with_system_prompt(task, "Be brief.")
    assert prompts(changed.train) == [[system, user]] * 2
    assert prompts(changed.evaluations["held_out"]) == [[system, user]]
    assert changed.train[1].columns["messages"] == [system, user, answer]
    assert rows[1].columns["messages"][0] == own
    assert with_system_prompt(task, "") is task
    generated = replace(task, train=LazyRows(rows.__getitem__, 2))
    assert prompts(with_system_prompt(generated, "Be brief.").train[:]) == [[system, user]] * 2
    text = Task("own", train=[Example(0, "2+3?", place="rows.jsonl: line 1")])
    with pytest.raises(ShoalError, match=r"rows.jsonl: line 1: task.system is a message") as caught:
        with_system_prompt(text, "Be brief.")
    assert caught.value.key == "task.system"


def test_a_run_with_a_system_prompt(workshop: Workshop) -> None:
    path = write(workshop.folder / "asked.jsonl", [{"prompt": asked(f"{i}?")[0]} for i in range(8)])
    found = train(workshop, path, "asked", "task.system=Be brief.")
    assert [one["prompt"][0] for one in found] == [{"role": "system", "content": "Be brief."}] * 2


def test_a_run_on_verls_rows(workshop: Workshop) -> None:
    (workshop.folder / "verl.py").write_text(VERL)
    path = write(workshop.folder / "verl/train.parquet", verl_rows(8))
    found = train(workshop, path, "verl", f"reward={workshop.folder}/verl.py:compute_score")
    assert len(found) == 2 and all(one["reward_weights"] == {"compute_score": 1.0} for one in found)
    assert [one["columns"]["reward_model"]["ground_truth"] for one in found] == [
        str(27 + one["row"]) for one in found
    ]


def test_a_run_on_trls_rows(workshop: Workshop) -> None:
    (workshop.folder / "trl.py").write_text(
        "def right(completions, solution, level, **_):\n"
        "    assert all(one == 'L' for one in level)\n"
        "    return [float(len(c[0]['content']) + len(s)) for c, s in zip(completions, solution, "
        "strict=True)]\n"
    )
    rows = []
    for i in range(8):
        rows.append({"prompt": asked(f"{10 + i} + 17 = ?")[0], "solution": str(i), "level": "L"})
    write(workshop.folder / "trl/data/train-00000-of-00001.parquet", rows)
    found = train(
        workshop, workshop.folder / "trl", "trl", f"reward={workshop.folder}/trl.py:right"
    )
    assert len(found) == 2 and [one["prompt"] for one in found] == [
        rows[one["row"]]["prompt"] for one in found
    ]
    for one in found:
        for each in one["completions"]:
            assert each["reward"] == len(each["text"]) + 1


@pytest.mark.slow
def test_a_run_from_python_on_a_file(workshop: Workshop) -> None:
    path = write(
        workshop.folder / "python.jsonl", [{"q": f"{10 + i} + 17 = ?", "n": i} for i in range(8)]
    )

    def judge(completions: list[str], n: list[int], **_: Any) -> list[float]:
        result = []
        for text, number in zip(completions, n, strict=True):
            result.append(float(100 * number + len(text)))
        return result

    settings = {"name": "custom", "path": str(path), "columns": ["prompt=q"]}
    run = shoal.train(
        model=str(workshop.model),
        task=settings,
        reward=judge,
        steps=1,
        train__pass_k=4,
        model__template=PLAIN,
        base_output_directory=str(workshop.runs),
        algorithm__kl_coef=0.0,
        batch={"prompts_per_step": 2, "group_size": 4},
        sampling={"max_prompt_tokens": 64, "max_completion_tokens": 12},
    )
    found = [one.group for one in run.groups(step=1)]
    assert [one.example.prompt for one in found] == [
        f"{10 + one.example.row} + 17 = ?" for one in found
    ]
    assert len(found) == 2 and all(one.rewards.min() // 100 == one.example.row for one in found)


def test_a_run_without_a_reward_says_so(
    workshop: Workshop, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(workshop.folder / "own2.jsonl", [row(i) for i in range(4)])
    assert cli.main(workshop.words("none", "task=custom", f"task.path={path}", "reward=[]")) == 2
    assert (
        "task custom: it has no reward of its own; give a function that judges"
        in capsys.readouterr().err
    )


# ---- tables


def test_a_table_of_text(tmp_path: Path) -> None:
    lines = [
        ["question", "answer"],
        ["q0?", "007"],
        ["q1?", ""],
        ["q2?", "NA"],
        ['"a, ""b"""', "1.0"],
    ]
    path = tmp_path / "train.csv"
    path.write_text("\n".join(",".join(line) for line in lines))
    task = load(path, template="Solve: {question}")
    assert [one.columns["answer"] for one in task.train] == ["007", "", "NA"]
    assert task.train[0].prompt == [{"role": "user", "content": "Solve: q0?"}]
    assert task.evaluations["held_out"][0].columns == {"question": 'a, "b"', "answer": "1.0"}
    fails("train.csv, line 2 has no column 'nothing'", path, columns=("prompt=nothing",))


def test_a_broken_table_is_named(tmp_path: Path) -> None:
    path = tmp_path / "train.csv"
    path.write_text("prompt,b\n1,2\n1,2,3\n")
    fails(
        "train.csv, line 3 has 3 values, the header has 2: quote a value that holds a comma", path
    )
    path.write_text('prompt,b\n1,"2\n')
    fails("train.csv cannot be read as a table in UTF-8, near line 2: unexpected end of data", path)
    path.write_text("")
    fails("train.csv is empty", path)


def test_a_hub_data_set_of_another_format_is_taken_as_parquet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked_for: list[str] = []

    def download(
        repo: str, repo_type: str, allow_patterns: list[str], revision: str = "main"
    ) -> str:
        asked_for.append(revision)
        folder = tmp_path / revision.replace("/", "-")
        if revision == "refs/convert/parquet":
            write(folder / "default/train/0000.parquet", [row(0), row(1)])
            write(folder / "default/test/0000.parquet", [row(2)])
        folder.mkdir(exist_ok=True)
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    task = load("some/data")
    assert (prompts(task.train), prompts(task.evaluations["held_out"])) == (["q0?", "q1?"], ["q2?"])
    assert asked_for[-1] == "refs/convert/parquet"


def test_rows_to_evaluate_on_may_be_files_of_their_own(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    path = write(tmp_path / "train.jsonl", [{"prompt": f"q{i}"} for i in range(4)])
    write(tmp_path / "test.jsonl", [{"prompt": "of the split test"}])
    one = write(other / "mine.jsonl", [{"prompt": "mine"}, {"prompt": "q1"}])
    two = write(other / "yours.jsonl", [{"prompt": "yours"}])
    task = load(path, eval_split=f"{one},{two}")
    assert prompts(task.evaluations["held_out"]) == ["mine", "q1", "yours"]
    assert prompts(task.train) == ["q0", "q2", "q3"]  # q1 is held out
    assert task.data.held_out_files == {"mine.jsonl": 2, "yours.jsonl": 1}
    of_folder = load(tmp_path, eval_split=str(one))
    assert prompts(of_folder.evaluations["held_out"]) == ["mine", "q1"]
    assert not any("no split" in note for note in of_folder.notes)
    shared = load(path, eval_split=str(path))
    assert prompts(shared.evaluations["held_out"]) == prompts(shared.train)
    for missing in (f"{other}/none.jsonl", "none.jsonl", f"{one},{other}/none.jsonl"):
        with pytest.raises(ShoalError, match=r"none\.jsonl: there is no such file; give the path"):
            load(path, eval_split=missing)
    with pytest.raises(ShoalError, match=r"^task\.path=.*no_rows"):  # the training file first
        load(tmp_path / "no_rows" / "train.jsonl", eval_split=f"{other}/none.jsonl")


def test_a_row_without_verls_data_source_is_told_once(tmp_path: Path) -> None:
    rows = [{"prompt": f"q{i}", "answer": "1", "source": "a"} for i in range(4)]
    path = write(tmp_path / "train.jsonl", rows)
    (tmp_path / "score.py").write_text(VERL)
    section = TaskSection(name="custom", path=str(path), eval_split="train")
    reward = RewardSection((f"{tmp_path}/score.py:compute_score",))
    task = load_task(section, reward)
    assert note_missing_sources(task, task.rewards) == (
        "reward function 'compute_score' gets data_source='' for 4 of 4 training rows, which have "
        "none; task.columns=[data_source=COLUMN] takes another column"
    )
    task = load_task(replace(section, columns=("data_source=source",)), reward)
    assert note_missing_sources(task, task.rewards) == ""
    assert task.train[0].columns["data_source"] == "a"


def test_the_rows_are_checked_for_functions_of_verl_that_take_lists(tmp_path: Path) -> None:
    (tmp_path / "score.py").write_text(
        "def compute_score(data_sources, solution_strs, ground_truths, extra_infos):\n"
        "    return [1.0 for _ in solution_strs]\n"
    )
    rows = [{"prompt": "q", "answer": "1"}, {"prompt": "r", "answer": None}]
    path = write(tmp_path / "train.jsonl", rows)
    section = TaskSection(name="custom", path=str(path), eval_split="train")
    reward = RewardSection((f"{tmp_path}/score.py:compute_score",))
    task = load_task(section, reward)
    said = "reward function 'compute_score' gets data_source='' for 2 of 2 training rows"
    assert note_missing_sources(task, task.rewards).startswith(said)
    with pytest.raises(ShoalError, match=r"needs a ground truth, which 1 of 2 training rows lack"):
        check_truths(task, task.rewards)


def test_generated_rows_are_not_all_made_to_look_for_a_data_source(tmp_path: Path) -> None:
    (tmp_path / "score.py").write_text(VERL)
    task = load_task(TaskSection(), RewardSection((f"{tmp_path}/score.py:compute_score",)))

    def never(row: int) -> Example:
        raise AssertionError(f"row {row} was made")

    task = replace(task, train=LazyRows(never, 10**9))
    assert task.rewards[0].per_completion and note_missing_sources(task, task.rewards) == ""
