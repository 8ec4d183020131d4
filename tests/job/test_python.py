"""From Python: data and rewards of one's own, the result, a run read back, a notebook."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pandas
import polars
import pyarrow
import pytest
from tiny_runs import PLAIN, Workshop, metrics, parameters_of

import shoal
from shoal import cli
from shoal.config.key import build
from shoal.config.merge import compose, from_overrides
from shoal.config.sections.reward import RewardSection
from shoal.config.sections.task import TaskSection
from shoal.config.train import Config
from shoal.job.cache import cache_by_configuration
from shoal.job.task import given_rewards, load_task, task_of_data
from shoal.records import ground_truth
from shoal.runs.card import _command
from shoal.runs.lines import Summary
from shoal.runs.metrics import is_clock
from shoal.runs.reader import read_config
from shoal.runs.result import Result, Table
from shoal.tasks.custom import is_data, rows_task
from shoal.tasks.examples import TAKEN
from shoal.tasks.task import Task

MESSAGES = [{"role": "user", "content": "2 + 3 = ?"}]


def ones(completions: Any, **_: Any) -> list[float]:
    return [1.0] * len(completions)


def rows(count: int = 20, add: int = 17) -> list[dict[str, Any]]:
    result = []
    for i in range(count):
        result.append(
            {
                "prompt": [{"role": "user", "content": f"{10 + i} + {add} = ?"}],
                "answer": 10 + i + add,
            }
        )
    return result


# ---- rows


def test_rows_become_a_task():
    task = rows_task(rows(30))
    assert [example.row for example in task.train] == list(range(27))
    assert task.train[3].prompt == [{"role": "user", "content": "13 + 17 = ?"}]
    assert task.train[3].columns == {"answer": 30}
    assert [example.row for example in task.evaluations["held_out"]] == [27, 28, 29]
    assert task.notes == (
        "rows: task has no other split to evaluate on; its last 3 of 30 rows are held out; if the "
        "rows are sorted, shuffle them first",
    )


@pytest.mark.parametrize(
    ("count", "num_questions", "kept"), [(100, 5, 5), (100, 500, 10), (100, 0, 10), (2, 500, 1)]
)
def test_how_many_are_held_out(count, num_questions, kept):
    task = rows_task(rows(count), num_questions=num_questions)
    assert (len(task.train), len(task.evaluations["held_out"])) == (count - kept, kept)


def test_rows_from_python_have_the_settings_of_rows_from_files():
    ours, theirs = (from_overrides(Config, task=name)[0] for name in ("rows", "custom"))
    assert (
        replace(ours, task=theirs.task) == theirs
        and ours.optimizer.lr == 1e-6
        and ours.task.name == "rows"
    )


def test_rows_to_evaluate_on_keep_all_others_for_training():
    task = rows_task(rows(20), rows(4, add=58))
    assert len(task.train) == 20 and task.notes == ()
    assert [example.columns["answer"] for example in task.evaluations["held_out"]] == [
        68,
        69,
        70,
        71,
    ]


PLAIN_ROWS = [{"prompt": f"{i}?", "answer": i} for i in range(4)]


class Hub:
    """What `datasets` has: iteration over dicts, and a `to_dict` of another meaning than
    pandas'."""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(PLAIN_ROWS)

    def to_dict(self, batch_size: int | None = None) -> dict[str, list[Any]]:
        raise AssertionError("not needed")


@pytest.mark.parametrize(
    "data",
    [
        PLAIN_ROWS,
        tuple(PLAIN_ROWS),
        iter(PLAIN_ROWS),
        Hub(),
        {"prompt": [row["prompt"] for row in PLAIN_ROWS], "answer": list(range(4))},
        pandas.DataFrame(PLAIN_ROWS),
        pandas.DataFrame(PLAIN_ROWS).iloc[::1].set_index("answer", drop=False),
        polars.DataFrame(PLAIN_ROWS),
        pyarrow.Table.from_pylist(PLAIN_ROWS),
    ],
    ids=[
        "list",
        "tuple",
        "iterator",
        "datasets",
        "columns",
        "pandas",
        "pandas index",
        "polars",
        "arrow",
    ],
)
def test_every_kind_of_table_gives_the_same_rows(data):
    assert is_data(data)
    task = rows_task(data, [{"prompt": "other?", "answer": 9}])
    assert [(example.prompt, dict(example.columns)) for example in task.train] == [
        (f"{i}?", {"answer": i}) for i in range(4)
    ]


def test_messages_in_a_table_are_arrays_there():
    table = pandas.DataFrame({"prompt": [np.array(MESSAGES, dtype=object), MESSAGES]})
    assert [example.prompt for example in rows_task(table, "train").train] == [MESSAGES, MESSAGES]


def test_columns_of_a_table_are_plain(tmp_path):
    table = pandas.DataFrame(
        {
            "prompt": ["a", "b", "c"],
            "answer": [["x"], ["y", "z"], []],
            "level": [1, None, 3],
            "when": [pandas.NaT, pandas.Timestamp("2026-01-01"), pandas.NaT],
            "model": [{"gold": np.array([1.0, np.nan])}, {}, {}],
        }
    )
    table["grade"] = pandas.array([1, None, 3], dtype="Int64")
    table.to_parquet(tmp_path / "rows.parquet")
    for data in (table, pandas.read_parquet(tmp_path / "rows.parquet")):
        first, second, third = rows_task(data, "train").train
        assert (first.columns["answer"], second.columns["answer"], third.columns["answer"]) == (
            ["x"],
            ["y", "z"],
            [],
        )
        assert first.columns["when"] is None and second.columns["when"] is not None
        assert (
            second.columns["level"] is None is second.columns["grade"]
            and third.columns["level"] == 3
        )
        assert first.columns["model"]["gold"] == [1, None]
        assert (
            ground_truth(second.columns) == ["y", "z"]
            and ground_truth({"label": np.array([1, 2])}) is not None
        )
        assert ground_truth({"target": None, "label": first.columns["answer"]}) == ["x"]


GOOD = {"prompt": "2 + 3", "answer": 5}
MISTAKES: list[tuple[Any, str]] = [
    ([], "task is empty"),
    (
        [GOOD],
        "task has 1 row and no other split to evaluate on: add rows, evaluate on the row that "
        "is trained on, held_out='train', or on none, task.hold_out=false",
    ),
    (
        [GOOD, {"question": "?", "answer": 1}],
        "task row 1 has no `prompt`: its columns are question, answer",
    ),
    ([GOOD, {}], "task row 1 has no `prompt`: its columns are none"),
    ([GOOD, "2 + 3"], "task row 1 is a str: expected a dict"),
    ([GOOD, {**GOOD, "prompt": 7}], "task row 1: `prompt` is a int: expected text, or messages"),
    ([GOOD, {**GOOD, "prompt": None}], "task row 1: `prompt` is a NoneType"),
    ([GOOD, {**GOOD, "prompt": float("nan")}], "task row 1: `prompt` is a float"),
    ([GOOD, {**GOOD, "prompt": ""}], "task row 1: `prompt` is an empty str"),
    (
        [GOOD, {**GOOD, "prompt": "a \ud83d"}],
        "task row 1: `prompt` holds \\ud83d, half of a character",
    ),
    (
        [{**GOOD, "prompt": [{"role": "user", "content": "\udc00"}]}],
        "task row 0: `prompt` holds \\udc00, half",
    ),
    ([GOOD, {**GOOD, "prompt": []}], "task row 1: `prompt` is an empty list"),
    ([GOOD, {**GOOD, "prompt": ["hello"]}], "task row 1: message 0 of `prompt` is 'hello'"),
    (
        [GOOD, {**GOOD, "prompt": [*MESSAGES, {"role": "user"}]}],
        "task row 1: message 1 of `prompt`",
    ),
    (
        [GOOD, {**GOOD, "prompt": [{"role": "user", "content": 5}]}],
        "with role and content, both text",
    ),
    (
        [GOOD, {**GOOD, "prompt": MESSAGES}],
        "task row 1: `prompt` is messages, that of task row 0 is text: make all prompts of one "
        "kind",
    ),
    ([GOOD, {"prompt": "7"}], "task row 1 has no column 'answer', task row 0 has"),
    ([GOOD, {**GOOD, "level": 3}], "task row 0 has no column 'level', task row 1 has"),
    ([{**GOOD, 7: 1}], "task row 0: a column cannot be called 7: expected text"),
    (7, "task is a int: expected rows"),
    ({"train": [GOOD]}, "task row 0 has no `prompt`: its columns are train"),
    (
        {"prompt": ["a", "b"], "answer": [1]},
        "must be of one length, they have prompt 2, answer 1 values",
    ),
    ({"prompt": ["a", "b"], "answer": "ab"}, "the column 'answer' is a str; expected a list"),
    *(
        ([GOOD, {**GOOD, name: 1}], f"task row 1: a column cannot be called {name!r}")
        for name in TAKEN
    ),
]


@pytest.mark.parametrize(("data", "message"), MISTAKES)
def test_a_mistake_in_the_data_is_one_line_with_its_row(data, message):
    with pytest.raises(shoal.ShoalError) as raised:
        rows_task(data)
    assert message in str(raised.value) and "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("held_out", "message"),
    [
        ([], "held_out is empty"),
        ([GOOD, 3], "held_out row 1 is a int"),
        ([GOOD, {"prompt": "7"}], "held_out row 1 has no column 'answer', held_out row 0 has"),
        (
            [{"prompt": MESSAGES, "answer": 1}],
            "held_out row 0: `prompt` is messages, that of task row 0 is text",
        ),
    ],
)
def test_a_mistake_in_the_rows_held_out(held_out, message):
    with pytest.raises(shoal.ShoalError) as raised:
        rows_task([GOOD, GOOD], held_out)
    assert message in str(raised.value)


def test_what_solves_an_example():
    def correct(text, example):
        return int(text) == example.columns["answer"]

    task = rows_task(rows(), correct=correct)
    assert task.correct is not None
    assert task.correct("27", task.train[0]) is True and task.correct("28", task.train[0]) is False
    with pytest.raises(
        shoal.ShoalError, match=r"correct raised ValueError: .* for data row 0, completion 'x'"
    ):
        task.correct("x", task.train[0])
    with pytest.raises(shoal.ShoalError, match="correct is a str: expected a function"):
        rows_task(rows(), correct="27")  # type: ignore[arg-type]


def test_what_goes_with_rows_and_what_does_not():
    one = rows_task(rows(), correct=None)
    with pytest.raises(shoal.ShoalError, match="reward is not given: your data needs a function"):
        task_of_data(rows(), None, None, TaskSection(), RewardSection(), ())
    with pytest.raises(
        shoal.ShoalError, match=r"task.path='x' has no effect on data given from Python"
    ):
        task_of_data(
            rows(), None, None, TaskSection(name="rows", path="x"), RewardSection(), (ones,)
        )
    with pytest.raises(
        shoal.ShoalError,
        match=r"held_out is for rows; a shoal.Task has `evaluations` and `correct`",
    ):
        task_of_data(one, rows(), None, TaskSection(), RewardSection(), (ones,))
    for key, value in (("held_out", rows()), ("correct", ones)):
        with pytest.raises(
            shoal.ShoalError, match=f"{key} is for data of your own, .* task is 'words'"
        ):
            shoal.train(task="words", **{key: value})
    with pytest.raises(shoal.ShoalError, match="train_dataset and task are two names of one thing"):
        shoal.train(task=rows(), train_dataset=rows())
    with pytest.raises(shoal.ShoalError, match="train_dataset='openai/gsm8k': expected rows"):
        shoal.train(train_dataset="openai/gsm8k")
    judged = task_of_data(
        one, None, None, TaskSection(num_eval_questions=1), RewardSection(weights=(2.0,)), (ones,)
    )
    assert [(reward.name, reward.weight) for reward in judged.rewards] == [("ones", 2.0)]
    assert len(judged.evaluations["held_out"]) == 1


@pytest.mark.parametrize(
    ("task", "data"),
    [
        ("words", False),
        (None, False),
        ({"num_eval_questions": 3, "path": ""}, False),
        ({}, False),
        ({"prompt": ["a"]}, True),
        ([], True),
        (Task("t", [], {}, ()), True),
    ],
)
def test_what_is_data_and_what_settings(task, data):
    assert is_data(task) is data


def test_a_run_whose_data_or_reward_came_from_python_says_so():
    with pytest.raises(
        shoal.ShoalError, match=r"task.name='rows': the data of this run came from Python"
    ):
        load_task(TaskSection(name="rows"))
    section = RewardSection(functions=("python:ones",))
    with pytest.raises(shoal.ShoalError, match=r"this reward came from Python; pass it again"):
        load_task(TaskSection(), section)
    assert [reward.name for reward in load_task(TaskSection(), section, (ones,)).rewards] == [
        "ones"
    ]


def test_functions_and_names_may_be_mixed_in_one_list():
    """TRL takes functions and names of models in one list."""

    def ones(completions, **kwargs):
        return [1.0] * len(completions)

    mixed = ["think_format_reward", ones, "think_format_reward"]
    config, _, functions = from_overrides(Config, reward_funcs=mixed, reward_weights=[1, 2, 3])
    names = ("think_format_reward", "python:ones", "think_format_reward")
    assert config.reward.functions == names and functions == (ones,)
    given = given_rewards(config.reward, functions)
    assert [(one.name, one.weight) for one in given] == [
        ("think_format_reward", 1.0),
        ("ones", 2.0),
        ("think_format_reward_2", 3.0),
    ]
    again = r"reward=\['think_format_reward', ones, 'think_format_reward'\]"
    with pytest.raises(shoal.ShoalError, match=again):
        given_rewards(config.reward)


# ---- a dry run


def test_a_dry_run_prints_what_the_command_prints_and_returns_the_settings(tmp_path, capsys):
    runs = tmp_path / "runs"
    words = [f"base_output_directory={runs}", "steps=3", "num_generations=4"]
    assert cli.main(["train", "--dry-run", *words]) == 0
    of_command = capsys.readouterr().out
    keywords = {"base_output_directory": runs, "steps": 3, "num_generations": 4}
    settings = shoal.train(**keywords, dry_run=True)
    of_command = of_command.replace("# command line", "# Python")
    of_command = of_command.replace("# --num_generations", "# the argument num_generations")
    # The settings are in what is returned, so their YAML is not printed.
    comments = [line for line in of_command.splitlines() if line.startswith("#")]
    assert capsys.readouterr().out.splitlines() == comments
    assert (settings["steps"], settings["batch.group_size"]) == (3, 4)
    assert settings["base_output_directory"] == str(runs)
    assert not runs.exists()


def test_a_dry_run_returns_the_prompts_of_a_step_on_all_devices(tmp_path):
    keywords = {"output_dir": tmp_path, "batch__prompts_per_device": 2, "dry_run": True}
    assert shoal.train(**keywords)["batch.prompts_per_step"] == 2


def test_an_interrupt_that_says_how_to_resume_has_a_short_traceback(monkeypatch):
    def run(message):
        raise KeyboardInterrupt(*message)

    frames = {}
    for message in (["stopped after step 8 of 10"], []):
        monkeypatch.setattr("shoal.commands.train.train", lambda *_, message=message: run(message))
        with pytest.raises(KeyboardInterrupt) as stopped:
            shoal.train()
        frames[bool(message)] = len(stopped.traceback)
    assert frames[True] == 2  # the call, and the line that raises it
    assert frames[False] > 3  # whoever is interrupted elsewhere sees where


def test_a_dry_run_checks_rows_and_functions_from_python(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    keywords = {"train_dataset": rows(), "max_steps": 2, "batch__prompts_per_step": 2}
    settings = shoal.train(**keywords, reward_funcs=[ones], dry_run=True)
    assert (settings["task.name"], settings["reward.functions"]) == ("rows", ("python:ones",))
    printed = capsys.readouterr().out
    assert "reward.functions=[python:ones]  # the argument reward_funcs" in printed
    assert "max_steps=2 became steps=2" in printed
    assert "reward: of the answers tried all score 1" in printed  # the function was called

    def one(completions, **_):
        return 1.0

    with pytest.raises(shoal.ShoalError, match="one"):
        shoal.train(**keywords, reward_funcs=[one], dry_run=True)
    with pytest.raises(shoal.ShoalError, match=r"fewer than batch.prompts_per_step=64"):
        shoal.train(
            task=rows(), reward=ones, eval_dataset=rows(2), batch__prompts_per_step=64, dry_run=True
        )
    assert list(tmp_path.iterdir()) == []


def test_answers_in_rows_from_python_are_learned_without_a_reward(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    answered = [{"prompt": f"{number} + 1 =", "completion": " 7"} for number in range(20)]
    keywords = {"algorithm": "sft", "num_train_epochs": 2, "batch__prompts_per_step": 4}
    settings = shoal.train(**keywords, train_dataset=answered, dry_run=True)
    assert settings["algorithm.advantage"] == "sft"
    assert settings["steps"] == 10  # no row is held out
    said = "2 epochs of 20 training rows from Python, 4 prompts a step"
    assert said in capsys.readouterr().out
    # Rows to evaluate on are used, where there are some.
    section = TaskSection(eval_split="train")
    for held_out, number in ((None, 20), (answered[:2], 2)):
        task = task_of_data(
            answered, held_out, None, section, RewardSection(), (), needs_reward=False
        )
        assert len(task.evaluations["held_out"]) == number
        assert task.rewards == ()
    asked = [{"prompt": row["prompt"]} for row in answered]
    with pytest.raises(shoal.ShoalError, match="answer"):
        shoal.train(**keywords, train_dataset=asked, dry_run=True)
    with pytest.raises(shoal.ShoalError, match=r"task.eval_split='test2' has no effect"):
        shoal.train(**keywords, train_dataset=answered, task__eval_split="test2", dry_run=True)


def test_a_dry_run_of_an_evaluation_samples_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    settings = shoal.evaluate(task=rows(), reward=ones, seed=3, dry_run=True)
    assert settings["seed"] == 3
    assert "#   seed=3  # Python (default 0)" in capsys.readouterr().out
    answers = tmp_path / "answers.jsonl"
    answers.write_text("")
    keywords = {"task": rows(), "reward": ones, "responses": answers}
    assert shoal.evaluate(**keywords, dry_run=True)["responses"] == str(answers)
    with pytest.raises(shoal.ShoalError, match="there is no such file"):
        shoal.evaluate(**{**keywords, "responses": tmp_path / "none"}, dry_run=True)


def is_sum(text: str, example: Any) -> bool:
    return text == str(example.columns["answer"])


@pytest.mark.parametrize(
    "given",
    [
        {"recipe": "trl", "eval_dataset": rows(4, add=50), "eval_strategy": "steps"},
        {"recipe": "trl", "held_out": "train", "correct": is_sum, "train__evaluate_every": 0},
        # A value that is Shoal's default, but not that of the recipe, and one that is infinite.
        {"recipe": "trl", "optimizer__beta2": 0.95, "algorithm__correction_cap": float("inf")},
        {"correct": is_sum},
    ],
)
def test_the_command_of_a_model_card_asks_for_the_run_from_python(given, monkeypatch, capsys):
    data = {
        "train_dataset": rows(40),
        "reward_funcs": [ones, lambda prompts, **_: [0.5] * len(prompts)],
    }
    asked = {"max_steps": 2, "batch__prompts_per_step": 8, "num_generations": 4}
    settings = shoal.train(**data, **asked, **given, dry_run=True)
    block = _command(build(Config, settings), has_accuracy="correct" in given)
    code = block.removeprefix("```python\n").removesuffix("\n```")
    names = {"rows": rows(40), "ones": ones, "lambda_": data["reward_funcs"][1]}
    names |= {"correct": is_sum, "eval_rows": given.get("eval_dataset")}
    calls = []
    train = shoal.train
    monkeypatch.setattr(shoal, "train", lambda **keywords: calls.append(keywords))
    exec(code, names)
    [call] = calls
    again = train(**call, dry_run=True)
    assert again == settings
    assert call.get("held_out") == given.get("eval_dataset")
    assert call.get("correct") == given.get("correct")


# ---- a table, a result


def test_a_table_of_metrics():
    table = Table([{"step": 1, "reward/mean": 0.5}, {"step": 2, "reward/mean": 0.75, "kl": 0.1}])
    assert len(table) == 2 and table["reward/mean"] == [0.5, 0.75] and table["kl"] == [None, 0.1]
    assert table.columns.keys() == {"step", "reward/mean", "kl"} and [
        row["step"] for row in table
    ] == [1, 2]
    assert "kl" in table and "loss" not in table
    assert dict(table) == dict(table.items()) == table.columns
    frame = table.to_pandas()
    assert list(frame.columns) == list(table.columns) and frame["reward/mean"].mean() == 0.625
    with pytest.raises(
        shoal.ShoalError, match="no column 'reward/meen'; did you mean 'reward/mean'"
    ):
        table["reward/meen"]
    assert repr(table).splitlines()[2].split() == ["2", "0.75", "0.1"] and "2 rows" in repr(table)
    # both ends, and how many there are
    assert len(repr(Table([{"step": i} for i in range(1000)])).splitlines()) == 23
    assert len(Table([])) == 0 and "no columns" in repr(Table([]))
    assert Table([{"a": 1}, {}]).get("a") == [1, None] and Table([]).get("a", 7) == 7
    with pytest.raises(shoal.ShoalError, match="the table is empty"):
        Table([])["step"]


def test_a_table_without_pandas(monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(shoal.ShoalError, match=r"pandas is not installed: .*, or use .columns"):
        Table([{"step": 1}]).to_pandas()


def settings(workshop: Workshop, **changes: Any) -> dict[str, Any]:
    return {
        "model": {"path": str(workshop.model), "template": PLAIN},
        "steps": 2,
        "base_output_directory": str(workshop.runs),
        "train": {"pass_k": 0, "evaluate_every": 0},
        "algorithm": {"kl_coef": 0},
        "sampling": {"max_prompt_tokens": 64, "max_completion_tokens": 12},
        "batch": {"prompts_per_step": 2, "group_size": 4, "micro_tokens": 2048},
        "optimizer": {"lr": 1e-2, "warmup_steps": 0},
        **changes,
    }


def closure(factor: float) -> Any:
    def letters(completions: Any, answer: Any, **_: Any) -> list[float]:
        result = []
        for completion, number in zip(completions, answer, strict=True):
            result.append(factor * (sum(map(ord, completion[0]["content"])) % 3) + 0 * number)
        return result

    return letters


@pytest.fixture(scope="module")
def result(workshop: Workshop) -> Result:
    def correct(text, example):
        return str(example.columns["answer"]) in text

    return shoal.train(
        train_dataset=rows(40),  # TRL's names of task and reward
        reward_funcs=[closure(0.5)],
        run_name="own",
        tags=["baseline"],
        notes="a closure",
        task__num_eval_questions=3,
        **settings(workshop),
        correct=correct,
    )


def test_a_run_on_rows_with_a_closure(result, workshop):
    assert (
        result.folder == workshop.runs / "own"
        and result["accuracy_after"] == 0
        and result["steps"] == 2
    )
    assert result == result.summary == json.loads(result.summary_path.read_text())
    assert result.metrics["step"] == [1, 2] and all(
        0 <= value <= 1 for value in result.metrics["reward/mean"]
    )
    assert result.metrics["rewards/letters"] == result.metrics["reward/mean"]
    assert [(row["step"], row["name"], row["num_questions"]) for row in result.evaluations] == [
        (0, "held_out", 3),
        (2, "held_out", 3),
    ]
    for path in (
        result.config_path,
        result.metrics_path,
        result.evaluations_path,
        result.groups_path,
        result.checkpoints_path,
    ):
        assert path.exists()
    assert result.steps == [1, 2] and (result.tags, result.notes) == (("baseline",), "a closure")
    first = result.groups(1)[0]
    assert first.group.example.columns["answer"] == rows(40)[first.group.example.row]["answer"]
    assert first.advantages is not None and first.advantages.shape == (4,)


def test_the_stored_configuration_says_where_data_and_reward_came_from(result, workshop, capsys):
    text = result.config_path.read_text()
    assert "name: rows" in text and "python:letters" in text
    requested = compose("train", [str(result.config_path)])[0]
    assert requested.task.num_eval_questions == 3
    assert requested.sampling.evaluation_slots == 0  # what the run decides stands apart
    assert read_config(result.folder).sampling.evaluation_slots > 0
    assert cli.main(["train", f"resume={result.folder}", "steps=3"]) == 2
    assert (
        "the data of this run came from Python: pass it again in Python" in capsys.readouterr().err
    )


@pytest.mark.slow
def test_a_run_goes_on_with_the_same_rows(result, tmp_path):
    run = Path(shutil.copytree(result.folder, tmp_path / "copy"))
    with pytest.raises(
        shoal.ShoalError, match="the training data is not what this run was started with"
    ):
        shoal.train(resume=run, task=rows(40, add=18), reward=closure(0.5), steps=3)
    with pytest.raises(shoal.ShoalError, match="this reward came from Python; pass it again"):
        shoal.train(resume=run, task=rows(40), steps=3)
    more = shoal.train(resume=run, task=rows(40), reward=closure(0.5), steps=3)
    assert more.folder == run and more["num_questions"] == 3 and more["steps"] == 3
    assert shoal.load_run(run).metrics["step"] == [1, 2, 3]
    assert more.metrics["reward/mean"][:2] == result.metrics["reward/mean"]


def test_keys_beside_resume_are_judged_by_the_run(tmp_path, monkeypatch):
    run, file = tmp_path / "first", tmp_path / "mine.yaml"
    run.mkdir()
    (run / "config.yaml").write_text(
        compose("train", ["sampling.max_prompt_tokens=100", "run_name=first"])[1].text
    )
    (tmp_path / "last").write_text("first\n")
    file.write_text(f"resume: last\nbase_output_directory: {tmp_path}\n")
    made: list[Any] = []

    def train(config, *_):
        return made.append(config) or Summary(run_folder=str(run))

    monkeypatch.setattr(
        "shoal.commands.train.train",
        train,
    )
    ways: list[dict[str, Any]] = [
        {"resume": run},
        {"resume": "last", "base_output_directory": tmp_path},
        {"resume": "last", "trainer__default_local_dir": str(tmp_path)},
        {"config_name": file},
        {"resume": run, "config_name": "gsm8k"},
    ]
    for given in ways:
        shoal.train(**given, max_target_length=150, optimizer={"lr": 1e-3})
        config = made.pop()
        assert (config.resume, config.run_name, config.task.name) == (str(run), "first", "words")
        assert (config.sampling.max_completion_tokens, config.optimizer.lr) == (50, 1e-3)
    with pytest.raises(shoal.ShoalError, match="max_prefill_predict_length=100"):
        shoal.train(resume=run, max_target_length=90)


@pytest.mark.slow
def test_rows_are_evaluated_as_the_run_evaluates_them(result, workshop):
    chosen = {}
    for key, value in settings(workshop).items():
        if key in ("model", "sampling"):
            chosen[key] = value
    figures = shoal.evaluate(task=rows(40)[-3:], reward=closure(0.5), **chosen, batch=3, pass_k=0)
    assert figures["held_out"]["mean_reward"] == result.before["held_out"]["mean_reward"]
    assert figures["held_out"]["num_questions"] == 3 and "accuracy" not in figures["held_out"]
    # The run's own folder as the model, with the rows given again, by TRL's names.
    run = str(result.folder)
    figures = shoal.evaluate(model=run, eval_dataset=rows(40)[-3:], reward=closure(0.5), batch=8)
    assert figures["held_out"]["mean_reward"] == result.after["held_out"]["mean_reward"]
    # Nothing says which answers are right, so there are no samples for pass@k.
    assert "sampled_mean_reward" not in figures["held_out"]
    with pytest.raises(shoal.ShoalError, match="the task of this run came from Python"):
        shoal.evaluate(model=run, reward=closure(0.5))
    with pytest.raises(shoal.ShoalError, match="the reward of this run came from Python"):
        shoal.evaluate(model=run, task=rows(40))


def reproducible(run: Path) -> tuple[Any, ...]:
    """What two equal runs have bit for bit: metrics, groups and weights."""
    rows = []
    for row in metrics(run):
        rows.append({name: value for name, value in row.items() if not is_clock(name)})
    stored = {}
    for file in (run / "groups").iterdir():
        stored[file.name] = file.read_bytes()
    return rows, stored, {name: value.tobytes() for name, value in parameters_of(run, 2).items()}


@pytest.mark.slow
def test_runs_of_one_process_know_nothing_of_each_other(result, workshop, tmp_path):
    """Another model with other data, rewards and settings between two equal runs: it is the run of
    a process of its own, and they are equal. Rewards are called in forked processes although JAX
    has threads by then."""
    other = Workshop(tmp_path, "llama3", "llama3", num_hidden_layers=1)
    calls = tmp_path / "calls"
    other.rewards.write_text(f"""\
import os

def vowels(completions, **kwargs):
    with open({str(calls)!r}, "a") as file:
        print(os.getpid(), file=file)
    texts = [completion[0]["content"] for completion in completions]
    return [sum(letter in "aeiou" for letter in text) / 10 for text in texts]
""")
    keys = settings(
        other,
        task={"name": "gsm8k", "path": str(other.data)},
        reward=f"{other.rewards}:vowels",
        batch={"prompts_per_step": 3, "group_size": 3},
        seed=5,
        optimizer={"lr": 3e-2, "warmup_steps": 0},
        train={"evaluate_every": -1},
        algorithm={"name": "gspo-token", "num_minibatches": 3, "kl_coef": 0.1},
    )
    # XLA's threads are not Python's
    assert len(os.listdir("/proc/self/task")) > threading.active_count()
    between = shoal.train(**keys, run_name="between")
    assert {int(line) for line in calls.read_text().split()}.isdisjoint({os.getpid()})
    code = f"""import jax, shoal
misses = []
jax.monitoring.register_event_listener(
    lambda name, **_: misses.append(name) if name.endswith("cache_misses") else 0)
shoal.train(**{keys!r}, run_name='alone')
print(len(misses))"""
    alone = subprocess.run(
        [sys.executable, "-c", code], check=True, timeout=200, capture_output=True, text=True
    )
    # Else the tests compile twice what processes run: JAX finds a program only with all flags and
    # options equal.
    assert int(alone.stdout.split()[-1]) < 3
    assert reproducible(between.folder) == reproducible(other.runs / "alone")

    def correct(text, example):
        return str(example.columns["answer"]) in text

    again = shoal.train(
        task=rows(40),
        reward=closure(0.5),
        run_name="again",
        task__num_eval_questions=3,
        **settings(workshop),
        correct=correct,
    )
    assert reproducible(again.folder) == reproducible(result.folder)
    assert reproducible(again.folder)[0] != reproducible(between.folder)[0]


def test_a_result_shows_itself(result):
    assert "held_out accuracy (greedy, 3 questions)" in repr(result) and "2 steps in" in repr(
        result
    )


def test_a_run_is_read_back(result, workshop, tmp_path):
    again = shoal.load_run(str(result.folder))
    assert again == result and again.metrics.columns == result.metrics.columns
    assert again.evaluations == result.evaluations and again.finished
    assert shoal.diff(result.folder, again.folder)["identical"] is True
    (workshop.runs / "last").write_text("own\n")
    assert shoal.load_run("last", str(workshop.runs)).folder == result.folder
    with pytest.raises(shoal.ShoalError, match="is not a run folder"):
        shoal.load_run(tmp_path)


def test_a_run_that_was_stopped_is_read_back(result, tmp_path):
    folder = tmp_path / "stopped"
    folder.mkdir()
    (folder / "config.yaml").write_text(result.config_path.read_text())
    empty = shoal.load_run(folder)
    assert (
        not empty.finished
        and len(empty.metrics) == 0
        and empty.evaluations == []
        and "not finished" in repr(empty)
    )
    lines = result.metrics_path.read_text()
    (folder / "metrics.jsonl").write_text(lines + '{"step": 3, "rew')
    (folder / "evaluations.jsonl").write_text(
        result.evaluations_path.read_text().splitlines()[0] + "\n"
    )
    stopped = shoal.load_run(folder)
    assert (
        stopped.metrics["step"] == [1, 2]
        and stopped.before.keys() == {"held_out"}
        and stopped.after == {}
    )
    assert "2 steps done" in repr(stopped)
    with pytest.raises(shoal.ShoalError, match="has no summary: the run has not finished"):
        stopped["accuracy_after"]


@pytest.mark.slow
def test_a_plot(result, monkeypatch):
    pytest.importorskip("matplotlib").use("agg")
    figure = result.plot()
    titles = [axis.get_title() for axis in figure.axes]
    assert titles == ["reward", "accuracy", "entropy and KL, nats", "length, tokens"]
    assert list(figure.axes[0].lines[0].get_ydata()) == result.metrics["reward/mean"]
    assert list(figure.axes[1].lines[0].get_xdata()) == [0, 2]
    from matplotlib import pyplot

    assert pyplot.get_fignums() == []  # nothing is left open


def test_a_plot_without_matplotlib_names_the_extra(result, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(shoal.ShoalError, match=r"matplotlib is not installed: .*\.\[plot\]"):
        result.plot()


# ---- the compilation cache, the import


@pytest.fixture
def no_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """JAX as it comes, with nothing set by environment or configuration."""
    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    old = {name: jax.config.values[name] for name in names}
    for name, value in zip(names, (None, 1.0), strict=True):
        monkeypatch.delenv(name.upper(), raising=False)
        jax.config.update(name, value)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    yield tmp_path / "shoal" / "jax"
    for name, value in old.items():
        jax.config.update(name, value)
    from jax.experimental.compilation_cache import compilation_cache

    compilation_cache.reset_cache()


def cache_now() -> tuple[Any, float]:
    values = jax.config.values
    return values["jax_compilation_cache_dir"], values["jax_persistent_cache_min_compile_time_secs"]


def test_programs_are_kept_although_jax_has_compiled_before(no_cache):
    jax.jit(lambda x: x + 1)(1.0)
    cache_by_configuration()
    assert cache_now() == (str(no_cache), 0.5)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.jit(lambda x: x * 3.25)(np.ones(7))
    assert list(no_cache.iterdir())


def test_a_cache_that_the_user_has_set_stays(no_cache, monkeypatch):
    jax.config.update("jax_compilation_cache_dir", "mine")
    cache_by_configuration()
    assert cache_now() == ("mine", 1.0)
    jax.config.update("jax_compilation_cache_dir", None)
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "mine")
    cache_by_configuration()
    assert cache_now() == (None, 1.0)
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR")
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 3.0)
    cache_by_configuration()
    assert cache_now() == (str(no_cache), 3.0)


def test_the_import_is_light_and_names_are_there():
    code = (
        "import sys, shoal\n"
        "assert not {'jax', 'hydra', 'rich', 'IPython', 'matplotlib', 'pandas'} & "
        "set(sys.modules)\n"
        "assert shoal.Task and shoal.Result and shoal.RewardFunction and shoal.Example\n"
        "assert 'jax' not in sys.modules\n"
        "try:\n    shoal.tarin\nexcept AttributeError as error:\n    assert 'tarin' in str(error)\n"
        "else:\n    raise AssertionError\n"
    )
    subprocess.run(
        [sys.executable, "-c", code],
        check=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": "src"},
    )
