"""`shoal eval`: what is counted of answers, by hand; files of answers; models from everywhere;
progress."""

from __future__ import annotations

import io
import json
import math
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_runs import PLAIN, Workshop, read_lines

import shoal
from shoal import cli
from shoal.commands.evaluate import (
    answer_rows,
    read_in_any_form,
    shared_questions,
    well_formed_advice,
)
from shoal.config.keywords import PYTHON_OBJECTS
from shoal.config.merge import compose
from shoal.config.sections.sampling import EvaluationSection
from shoal.config.sections.task import TaskSection
from shoal.job.job import Job
from shoal.protocols import GroupRequest
from shoal.records import (
    Completion,
    Example,
    Group,
    Purpose,
    RewardFunction,
    SamplingParams,
    StopReason,
)
from shoal.report.console import Console
from shoal.runs.metrics import majority_at_k, pass_at_k, standard_error, wilson_interval
from shoal.runs.summary import evaluation_text, summary_rows
from shoal.tasks.aime import blank as blank_aime
from shoal.tasks.gsm8k import blank
from shoal.tasks.task import Task
from shoal.text import figure_text
from shoal.trainer.evaluation import Answers, Evaluator, score_answers, score_sampled
from shoal.trainer.prompts import TokenizedExample

# ---- by hand


@pytest.mark.parametrize(
    ("answers", "correct", "expected"),
    [
        (["5"], [True], True),
        (["5", "6", "6"], [True, False, False], False),  # two for the wrong one
        (["6", "5", "5"], [False, True, True], True),
        (["5", "6"], [True, False], True),  # a tie: the one drawn first
        (["6", "5"], [False, True], False),
        (["6", "5", "5", "6", "7"], [False, True, True, False, False], False),
        ([None, None, "5"], [False, False, True], True),  # no answer, no vote
        ([None, None], [False, False], False),
        ([], [], False),
        (["5", "5"], [False, True], False),  # one answer, judged twice: the first to give it
    ],
)
def test_majority(answers, correct, expected):
    assert majority_at_k(answers, correct) is expected


@pytest.mark.parametrize(
    ("n", "c", "k", "expected"),
    [
        (8, 0, 8, 0),
        (8, 1, 8, 1),
        (4, 1, 1, 0.25),
        (4, 1, 2, 0.5),
        (5, 2, 3, 1 - 1 / 10),
        (10, 3, 4, 1 - 35 / 210),
    ],
)
def test_pass_at_k(n, c, k, expected):
    assert pass_at_k(n, c, k) == pytest.approx(expected, abs=1e-15)


def test_standard_error():
    assert standard_error([0, 1, 1, 0]) == pytest.approx(math.sqrt((4 * 0.25) / 3 / 4))
    assert standard_error([0.5] * 9) == 0
    assert standard_error([1]) is None and standard_error([]) is None


# ---- answers in another form than the tags asked for


@pytest.mark.parametrize(
    ("texts", "tagged", "any_form"),
    [
        (["It is 5.", "#### 6", "no"], 0, 1),
        (["<reasoning>a</reasoning><answer>5</answer>", "5", "6"], 1, 2),
    ],
)
def test_right_answers_without_the_tags_are_counted_too(texts, tagged, any_form):
    gsm8k = blank(TaskSection(name="gsm8k"))
    groups = []
    for row, text in enumerate(texts):
        groups.append(
            replace(
                group("a", "a"),
                texts=(text,),
                example=Example(row, "?", {"answer": "5"}),
                correct=np.array([gsm8k.correct(text, Example(row, "?", {"answer": "5"}))]),
            )
        )
    answers = Answers(groups, [])
    figures = score_answers(groups, gsm8k) | read_in_any_form(answers, gsm8k)
    assert figures["accuracy"] == tagged / 3 and figures["accuracy_any_form"] == any_form / 3
    line = evaluation_text(figures)
    assert (
        f"accuracy {100 * tagged / 3:.1f}% in the tags asked for, {100 * any_form / 3:.1f}% read "
        "in any form" in line
    )
    assert "any form" not in evaluation_text(figures | {"accuracy_any_form": figures["accuracy"]})
    assert "shoal sft task=gsm8k" in well_formed_advice(gsm8k)
    assert read_in_any_form(answers, replace(gsm8k, extract=None)) == {}


# ---- figures of groups


def group(texts: str, right: str, row: int = 0, with_correct: bool = True) -> Group:
    """One completion a letter of `texts`; those in `right` are right. Rewards are 3 and 0.5."""
    correct = np.array([text in right for text in texts])
    completions = tuple(
        Completion(
            0,
            i,
            np.zeros(2 + i, np.int32),
            np.zeros(2 + i, np.float32),
            np.ones(2 + i, bool),
            np.zeros(2 + i, np.int32),
            StopReason.EOS if i else StopReason.LENGTH,
        )
        for i in range(len(texts))
    )
    rewards = np.where(correct, 3.0, 0.5)
    return Group(
        Purpose.EVALUATE,
        0,
        0,
        Example(row, "?", {"answer": right}),
        np.zeros(3, np.int32),
        completions,
        tuple(texts),
        rewards,
        {"own": rewards},
        np.ones(len(texts), bool),
        correct if with_correct else None,
    )


def task(**parts: Any) -> Task:
    return Task("own", (), {}, (), **parts)


def test_samples_by_hand():
    groups = [group("abba", "a"), group("ccde", "e"), group("xaab", "a"), group("zzzz", "a")]

    def extract(text):
        return None if text == "x" else text

    figures = score_sampled(groups, SamplingParams(top_k=5), task(extract=extract))
    assert figures["pass@4"] == 3 / 4  # 2, 1, 2 and 0 of 4 are right
    assert figures["pass@1"] == figures["sampled_accuracy"] == 5 / 16
    # 1 - C(4-c, 2) / C(4, 2)
    assert figures["pass@2"] == pytest.approx((5 / 6 + 1 / 2 + 5 / 6 + 0) / 4)
    assert figures["pass@2_error"] == pytest.approx(
        np.array([5 / 6, 1 / 2, 5 / 6, 0]).std(ddof=1) / 2
    )
    assert figures["maj@4"] == 2 / 4  # a (drawn before b), c, a, z
    shares = np.array([0.5, 0.25, 0.5, 0])
    assert figures["sampled_accuracy_error"] == pytest.approx(shares.std(ddof=1) / 2)
    assert figures["pass@4_error"] == pytest.approx(np.array([1, 1, 1, 0]).std(ddof=1) / 2)
    assert figures["sampled_mean_reward"] == pytest.approx((5 * 3 + 11 * 0.5) / 16)
    assert figures["sampled_protocol"] == "4 completions a question at temperature 1, top_k 5"


@pytest.mark.parametrize(
    ("k", "names"),
    [
        (1, {"pass@1"}),
        (2, {"pass@1", "pass@2"}),
        (3, {"pass@1", "pass@2", "pass@3"}),
        (8, {"pass@1", "pass@2", "pass@4", "pass@8"}),
    ],
)
def test_fewer_samples_than_were_drawn(k, names):
    figures = score_sampled([group("a" + "b" * (k - 1), "a")], SamplingParams(), task())
    assert {
        name for name in figures if name.startswith("pass@") and not name.endswith("_error")
    } == names
    text = evaluation_text(figures)
    assert f"pass@{k} 100.0% (" in text if k > 1 else "sampled accuracy" in text
    assert text.count("pass@") == (k > 1)  # the others are in the files


def test_greedy_by_hand():
    groups = [group("a", "a"), group("b", "a"), group("b", "b"), group("b", "b")]

    def verdict(text: str, example: Example) -> dict[str, Any]:
        return {"correct": text == "b", "row": example.row}

    figures = score_answers(
        groups,
        task(
            verdict=verdict,
            figures=lambda verdicts: {
                "prompt_strict": sum(one["correct"] for one in verdicts) / len(verdicts)
            },
        ),
    )
    assert (figures["accuracy"], figures["num_questions"], figures["protocol"]) == (
        3 / 4,
        4,
        "greedy",
    )
    assert figures["accuracy_interval"] == pytest.approx([0.3006, 0.9544], abs=1e-4)
    assert (
        figures["prompt_strict"] == 3 / 4
        and figures["mean_reward"] == figures["rewards/own"] == 9.5 / 4
    )
    assert (figures["mean_length"], figures["truncated"]) == (2, 1)
    assert "well_formed" not in figures


def test_numbers_that_rewards_store_with_answers_have_means():
    groups = [
        replace(group("a", "a"), extra={"acc": [1.0], "read": ["a"]}),
        replace(group("b", "a"), extra={"acc": [0.0], "read": [2]}),
        replace(group("b", "a"), extra={"acc": [None]}),
    ]
    figures = score_answers(groups, task())
    assert figures["rewards/logged/acc"] == 0.5
    assert figures["accuracy_by"] == "reward" and "accuracy by" not in evaluation_text(figures)
    judged = task(correct=lambda text, example: text == "a")
    assert "accuracy_by" not in score_answers(groups, judged)
    assert "rewards/logged/read" not in figures  # not all of it are numbers


def test_a_group_without_verdicts_among_others_has_no_right_answer():
    groups = [group("ab", "a"), replace(group("aa", "a", 1), correct=None)]  # its reward failed
    figures = score_answers(groups, task(extract=str))
    assert (figures["accuracy"], figures["pass@2"], figures["maj@2"]) == (1 / 4, 1 / 2, 1 / 2)
    figures = score_answers([replace(one, correct=None) for one in groups], task(extract=str))
    assert not {"accuracy", "accuracy_interval", "pass@2", "maj@2"} & set(figures)


def test_each_data_source_has_figures_of_its_own():
    def of_source(source: str, texts: str, row: int, acc: float) -> Group:
        example = Example(row, "?", {"answer": "a", "data_source": source})
        return replace(group(texts, "a", row), example=example, extra={"acc": [acc]})

    groups = [of_source("me/sums", "a", 0, 1.0), of_source("me/sums", "b", 1, 0.5)]
    assert "accuracy/me/sums" not in score_answers(groups, task())  # it would say the same again
    groups.append(of_source("other sums", "a", 2, 0.0))
    figures = score_answers(groups, task())
    assert figures["accuracy"] == 2 / 3 and figures["accuracy/me/sums"] == 0.5
    assert figures["accuracy/other_sums"] == 1.0
    assert figures["mean_reward/me/sums"] == 1.75
    assert figures["rewards/logged/acc/me/sums"] == 0.75
    assert "accuracy/me/sums 50.0%" in evaluation_text(figures)
    figures = score_answers([replace(one, correct=None) for one in groups], task())
    assert "accuracy/me/sums" not in figures and figures["mean_reward/other_sums"] == 3.0


def test_means_over_several_answers_by_hand():
    groups = [group("abba", "a"), group("bbbb", "a", row=1)]

    def verdict(text: str, example: Example) -> dict[str, bool]:
        return {"correct": text == "a"}

    own = task(
        verdict=verdict,
        figures=lambda verdicts: {"strict": sum(one["correct"] for one in verdicts)},
        well_formed=lambda text: text == "b",
        extract=str,
    )
    figures = score_answers(groups, own, "mean of 4")
    assert (figures["accuracy"], figures["num_questions"], figures["protocol"]) == (
        2 / 8,
        2,
        "mean of 4",
    )
    # as if each question had one answer: never too narrow
    assert figures["accuracy_interval"] == list(wilson_interval(0.5, 2))
    assert (figures["strict"], figures["well_formed"]) == (2, 6 / 8)
    assert figures["mean_reward"] == figures["rewards/own"] == (2 * 3 + 6 * 0.5) / 8
    assert (figures["mean_length"], figures["truncated"]) == (3.5, 1 / 4)
    assert (figures["pass@4"], figures["pass@1"], figures["maj@4"]) == (1 / 2, 1 / 4, 1 / 2)
    assert figures["pass@2"] == pytest.approx((1 - 1 / 6) / 2)
    assert figures["pass@4_error"] == pytest.approx(0.5)
    assert "sampled_accuracy" not in figures and "best_reward" not in figures
    assert read_in_any_form(Answers(groups), own) == {"accuracy_any_form": 2 / 8}
    rows = list(answer_rows("main", Answers(groups), replace(own, question="q")))
    assert [len(row["samples"]) for row in rows] == [4, 4] and rows[0]["correct"]


def test_several_answers_without_verdicts_have_a_best_reward():
    first = group("ab", "a", with_correct=False)
    lost = replace(group("bb", "a", with_correct=False), rewards=np.array([np.nan, 0.25]))
    figures = score_answers([first, lost], task())
    assert figures["best_reward"] == (3 + 0.25) / 2
    assert figures["mean_reward"] == pytest.approx((3 + 0.5 + 0.25) / 3)
    assert "pass@2" not in figures and "best_reward" not in score_answers([group("a", "a")], task())


def first_answers(groups: Sequence[Group]) -> list[Group]:
    """The groups with their first completion alone."""
    alone = []
    for one in groups:
        correct = None if one.correct is None else one.correct[:1]
        alone.append(
            replace(
                one,
                completions=one.completions[:1],
                texts=one.texts[:1],
                rewards=one.rewards[:1],
                reward_components={name: row[:1] for name, row in one.reward_components.items()},
                valid=one.valid[:1],
                correct=correct,
            )
        )
    return alone


def test_without_a_right_answer_there_is_no_accuracy():
    groups = [group("ab", "a", with_correct=False), group("aa", "a", with_correct=False)]
    figures = score_answers(first_answers(groups), task()) | score_sampled(
        groups, SamplingParams(), task(extract=str)
    )
    assert not [
        name
        for name in figures
        if name.startswith(("accuracy", "pass@", "maj@", "sampled_accuracy"))
    ]
    assert figures["mean_reward"] == 3 and figures["sampled_mean_reward"] == 9.5 / 4
    assert evaluation_text(figures).startswith("mean reward 3 (greedy, 2 questions)  rewards/own 3")
    assert (
        "sampled mean reward 2.375 (2 completions a question at temperature 1)"
        in evaluation_text(figures)
    )
    assert summary_rows({"held_out": figures}, {"held_out": figures})[0] == (
        "held_out mean reward (greedy, 2 questions)",
        "3",
        "3",
        "+0",
    )
    assert figure_text("rewards/accuracy", 4.5) == "4.5"


def test_the_line_has_protocol_size_interval_and_errors():
    groups = [group("aa", "a"), group("ba", "a")]
    figures = score_answers(first_answers(groups), task()) | score_sampled(
        groups, SamplingParams(), task(extract=str)
    )
    text = evaluation_text(figures | {"data": "gsm8k, split test"})
    assert text.startswith(
        "accuracy 50.0% (greedy, gsm8k, split test, 2 questions; 95% interval 9.5-90.5)"
    )
    assert (
        "pass@2 100.0% (2 completions a question at temperature 1; standard error 0.0)  maj@2 "
        "50.0% (stand" in text
    )
    assert (
        text.count("2 completions") == 1
        and "pass@1" not in text
        and "sampled accuracy 75.0%" in text
    )


# ---- what is asked


class Source:
    """Answers with the number of the request."""

    def __init__(self) -> None:
        self.asked: list[GroupRequest] = []

    def request(self, requests) -> None:
        self.asked.extend(requests)

    def take(self, purpose, step) -> list[Group]:
        assert purpose is Purpose.EVALUATE and step == 3
        result = []
        for request in self.asked:
            result.append(group("a" * request.num_completions, "a", request.example.row))
        return result


def prepared(*rows: int) -> list[TokenizedExample]:
    result = []
    for row in rows:
        result.append(TokenizedExample(Example(row, "?"), np.ones(3, np.int32)))
    return result


def test_each_set_is_asked_once_and_the_first_is_sampled():
    source = Source()
    evaluator = Evaluator(
        {"main": prepared(4, 7), "other": prepared(5)}, SamplingParams(top_p=0.9), 3, task()
    )
    answers = evaluator.answers(source, 3, 3, full=True)  # pyright: ignore[reportArgumentType]
    assert [
        (one.subset, one.example.row, one.num_completions, one.params.temperature)
        for one in source.asked
    ] == [
        ("main", 4, 1, 0),
        ("main", 7, 1, 0),
        ("main", 4, 3, 1),
        ("main", 7, 3, 1),
        ("other", 5, 1, 0),
    ]
    assert {name: (len(own.main), len(own.sampled)) for name, own in answers.items()} == {
        "main": (2, 2),
        "other": (1, 0),
    }
    assert [one.example.row for one in answers["main"].sampled] == [4, 7] and answers[
        "main"
    ].sampled[0].size == 3


def test_a_quick_evaluation_and_the_samples_take_the_first_questions():
    evaluator = Evaluator(
        {"main": prepared(4, 7, 9), "other": prepared(5, 6)}, SamplingParams(), 3, task(), 2
    )
    for full, greedy, sampled in (
        (True, {"main": [4, 7, 9], "other": [5, 6]}, [4, 7]),
        (False, {"main": [4, 7], "other": [5, 6]}, []),
    ):
        source = Source()
        answers = evaluator.answers(source, 3, 3, full)  # pyright: ignore[reportArgumentType]
        assert {
            name: [one.example.row for one in own.main] for name, own in answers.items()
        } == greedy
        assert [one.example.row for one in answers["main"].sampled] == sampled
        assert evaluator.num_completions(full) == sum(one.num_completions for one in source.asked)
        figures = evaluator.score(answers)[0]["main"]
        assert figures["num_questions"] == len(greedy["main"])
        assert figures.get("sampled_num_questions", 0) == len(sampled)


def test_every_evaluation_samples_the_answers_that_it_is_told_to():
    params = SamplingParams(top_p=0.9, max_tokens=7)
    answer_params = EvaluationSection(2, 0.6, top_k=5).params(params)
    evaluator = Evaluator(
        {"main": prepared(4, 7), "other": prepared(5)}, params, 3, task(), 1, 2, answer_params
    )
    for full, rows in ((True, [4, 7, 5]), (False, [4, 5])):
        source = Source()
        answers = evaluator.answers(source, 3, 3, full)  # pyright: ignore[reportArgumentType]
        assert [one.example.row for one in source.asked] == rows
        # no samples for pass@k beside them
        assert {one.num_completions for one in source.asked} == {2}
        assert {one.params for one in source.asked} == {
            SamplingParams(temperature=0.6, top_k=5, top_p=1.0, max_tokens=7)
        }
        assert evaluator.num_completions(full) == 2 * len(rows)
        figures = evaluator.score(answers)[0]["main"]
        assert figures["protocol"] == "mean of 2 completions a question at temperature 0.6, top_k 5"
        assert figures["accuracy"] == figures["pass@2"] == 1 and "sampled_protocol" not in figures
    one = replace(evaluator, num_samples=1)
    assert one.protocol == "1 completion a question at temperature 0.6, top_k 5"


@pytest.mark.parametrize(
    ("temperature", "pass_k", "sampled"), [(0, 3, True), (1, 0, True), (1, 3, False)]
)
def test_samples_are_left_out(temperature, pass_k, sampled):
    source = Source()
    evaluator = Evaluator({"main": prepared(4)}, SamplingParams(temperature), pass_k, task())
    figures, groups = evaluator.score(evaluator.answers(source, 3, 3, sampled))  # pyright: ignore
    assert len(source.asked) == len(groups) == 1 and "sampled_protocol" not in figures["main"]


def test_progress_is_printed_early_and_then_every_ten_seconds():
    now, stream = [0.0], io.StringIO()

    def clock():
        return now[0]

    console = Console(stream, terminal=False, clock=clock)
    for part in ("held_out, greedy", "held_out, sampled"):
        for done in range(1, 31):
            now[0] += 1 if done > 1 else 600  # programs are compiled before the first answer
            console.answered(part, done, 30)
    assert stream.getvalue().splitlines() == [
        f"{part}: {done} of 30, 0:{left} left"
        for part in ("held_out, greedy", "held_out, sampled")
        for done, left in ((3, 27), (13, 17), (23, "07"))
    ]


# ---- shoal eval


@pytest.fixture(scope="module")
def run(workshop) -> Path:
    return workshop.train(
        "run", "steps=1", "checkpoint_period=1", f"reward={workshop.rewards}:vowels"
    )


def words(workshop: Workshop, model: object, *changes: str) -> list[str]:
    return [
        "eval",
        f"model={model}",
        "task=gsm8k",
        f"task.path={workshop.data}",
        f"reward={workshop.rewards}:vowels",
        f"model.template={PLAIN}",
        "sampling.max_prompt_tokens=64",
        "sampling.max_completion_tokens=12",
        "batch=8",
        "pass_k=4",
        "task.num_eval_questions=0",
        *changes,
    ]


@pytest.mark.parametrize("opens", ["", "<think>\n"])
def test_rewards_that_would_not_see_a_tag_that_the_prompt_opens_are_warned_of(
    opens: str, tmp_path: Path
):
    rows = []
    for i in range(3):
        rows.append({"prompt": [{"role": "user", "content": f"{i} + 1 = ?"}], "answer": str(i + 1)})
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tiny = Path(cli.__file__).parent / "assets" / "tiny"
    config, _ = compose(
        "eval",
        [
            f"model={tiny}",
            "task=custom",
            f"task.path={tmp_path / 'rows.jsonl'}",
            "reward=think_format_reward",
            f"model.template={PLAIN}{opens}",
            "max_prompt_tokens=64",
            "max_new_tokens=12",
        ],
    )
    with Job(config, Console(io.StringIO())) as job:
        job.check()
        warned = [found.text for found in job.findings.at("warning")]
    assert len(warned) == bool(opens)
    assert not opens or "the prompt ends with <think>, so a completion begins after it" in warned[0]


@pytest.mark.slow
def test_a_file_holds_every_answer_and_a_run_its_checkpoint_and_its_export_have_the_same(
    workshop, run, tmp_path, capsys
):
    assert cli.main(["export", f"from={run}", f"to={tmp_path / 'model'}"]) == 0
    files = []
    for model in (run, run / "checkpoints" / "1", tmp_path / "model"):
        file = tmp_path / "new" / "folder" / f"{len(files)}.json"
        assert cli.main(words(workshop, model, f"output={file}")) == 0
        files.append(json.loads(file.read_text()))
    assert {file.pop("model") for file in files} == {
        str(run),
        str(run / "checkpoints" / "1"),
        str(tmp_path / "model"),
    }
    # Only of a run is it known what it was trained on.
    overlaps = [file["held_out"].pop("overlapping_questions", None) for file in files]
    assert overlaps == [0, 0, None]
    assert files[0] == files[1] == files[2]
    first = files[0]
    assert (first["task"], first["seed"], first["max_completion_tokens"]) == ("gsm8k", 0, 12)
    figures, rows = first["held_out"], first["rows"]
    last = read_lines(run / "evaluations.jsonl")[-1]
    for name in (
        "accuracy",
        "num_questions",
        "protocol",
        "mean_reward",
        "rewards/vowels",
        "mean_length",
        "pass@4",
    ):
        assert figures[name] == last[name]
    assert [row["row"] for row in rows] == [0, 1, 2, 3] and {row["set"] for row in rows} == {
        "held_out"
    }
    assert rows[0]["question"] == "10 + 58 = ?" and rows[0]["gold"] == "68"
    for row in rows:
        assert len(row["samples"]) == 4 and row["correct"] is False
        for answer in (row, *row["samples"]):
            assert (
                answer["reward"]
                == answer["rewards"]["vowels"]
                == pytest.approx(sum(letter in "aeiou" for letter in answer["response"]) / 10)
            )
    assert len({one["response"] for row in rows for one in row["samples"]}) > 4
    assert figures["mean_reward"] == pytest.approx(np.mean([row["reward"] for row in rows]))
    assert figures["sampled_mean_reward"] == pytest.approx(
        np.mean([one["reward"] for row in rows for one in row["samples"]])
    )
    line = next(
        line
        for line in capsys.readouterr().out.splitlines()
        if line.startswith("held_out: accuracy")
    )
    assert (
        f"(greedy, gsm8k of {workshop.data}, split test, model.template, 4 questions; 95% interval "
        "0.0-49.0)" in line
    )


@pytest.mark.slow
def test_json_on_stdout_and_greedy_alone(workshop, capsys):
    assert cli.main(words(workshop, workshop.model, "json=true", "temperature=0")) == 0
    out, err = capsys.readouterr()
    figures = json.loads(out)
    assert figures["held_out"]["num_questions"] == 4 and figures["held_out"]["accuracy"] == 0
    assert "sampled_protocol" not in figures["held_out"]
    assert "only greedy answers; pass@k and maj@k need samples that differ" in err


@pytest.mark.slow
def test_words(workshop):
    figures = shoal.evaluate(
        model={"path": str(workshop.model), "template": PLAIN},
        task="words",
        pass_k=2,
        batch=6,
        task__num_eval_questions=3,
        sampling={"max_prompt_tokens": 256, "max_completion_tokens": 4},
    )
    assert list(figures) == ["held_out", "unseen_templates"]
    for own in figures.values():
        assert own["num_questions"] == 3 and own["truncated"] == 1
    assert {"pass@2", "maj@2"} & set(figures["held_out"]) and "pass@2" not in figures[
        "unseen_templates"
    ]
    assert figures["held_out"]["data"] == "words, model.template"


@pytest.mark.slow
def test_the_overlong_penalty_is_part_of_the_reward(workshop, capsys):
    assert (
        cli.main(
            words(
                workshop,
                workshop.model,
                "json=true",
                "pass_k=0",
                "reward.overlong_buffer_tokens=12",
                "task.num_eval_questions=2",
            )
        )
        == 0
    )
    figures = json.loads(capsys.readouterr().out)["held_out"]
    assert figures["rewards/overlong"] == pytest.approx(-figures["mean_length"] / 12)
    assert figures["mean_reward"] == pytest.approx(
        figures["rewards/vowels"] + figures["rewards/overlong"]
    )


@pytest.mark.slow
def test_failures_are_counted_by_set_and_the_first_is_shown(workshop, capsys):
    def fails(completions: Any, answer: Any, **_: Any) -> list[float]:
        raise KeyError(answer[0])

    figures = shoal.evaluate(
        model={"path": str(workshop.model), "template": PLAIN},
        task="words",
        pass_k=2,
        batch=6,
        task__num_eval_questions=3,
        sampling={"max_prompt_tokens": 256, "max_completion_tokens": 4},
        reward=fails,
        reward__on_error="zero",
        reward__workers=0,
    )
    # greedy and sampled
    assert figures["held_out"]["failed"] == figures["held_out"]["failed/fails"] == 3 + 6
    assert figures["unseen_templates"]["failed"] == 3 and figures["held_out"]["rewards/fails"] == 0
    warnings = []
    for line in capsys.readouterr().out.splitlines():
        if line.startswith("warning: reward"):
            warnings.append(line)
    assert len(warnings) == 2 and "raised KeyError" in warnings[0]
    assert warnings[1] == "warning: reward function fails: raised for 12 completions"


@pytest.mark.slow
def test_a_file_alone_is_asked_whole(workshop, tmp_path, capsys):
    data = tmp_path / "data.jsonl"
    data.write_text(
        "".join(
            json.dumps({"question": f"{i} + 1 = ?", "answer": str(i + 1)}) + "\n" for i in range(3)
        )
    )
    assert (
        cli.main(words(workshop, workshop.model, "json=true", "pass_k=0", f"task.path={data}")) == 0
    )
    out, err = capsys.readouterr()
    assert (
        json.loads(out)["held_out"]["num_questions"] == 3 and "all 3 rows are evaluated on" in err
    )


def test_an_output_that_cannot_be_written_is_an_error_first(workshop, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert cli.main(words(workshop, "no-such-model", f"output={tmp_path / 'file' / 'a.json'}")) == 2
    assert "is a file, not a folder" in capsys.readouterr().err
    assert cli.main(words(workshop, "no-such-model", "output=/proc/none/a.json")) == 2
    assert "output=/proc/none/a.json cannot be written" in capsys.readouterr().err
    own = Task("own", (), {"rows": (Example(0, "?"),)}, ())
    with pytest.raises(shoal.ShoalError, match="is called 'rows', the name of a field"):

        def reward(completions, **_):
            return [0.0] * len(completions)

        shoal.evaluate(
            task=own,
            model=str(workshop.model),
            output=str(tmp_path / "a.json"),
            reward=reward,
        )


@pytest.mark.system
def test_rewards_are_forked_before_jax_has_threads(workshop, run, tmp_path):
    """By each command that scores, in a process of which each ends at the fork: the next finds it
    without JAX too."""
    trained = []
    for word in workshop.words("forks"):
        if not word.startswith("reward.workers"):
            trained.append(word)
    commands = [
        words(workshop, workshop.model),
        trained,
        ["doctor", *trained[1:]],
        ["rescore", str(run), f"reward={workshop.rewards}:letters"],
    ]
    code = f"""if True:
        from jax._src import xla_bridge
        from shoal import cli
        from shoal.rewards.pool import RewardPool

        def forked(*_):
            print("forked", xla_bridge.backends_are_initialized())
            raise KeyboardInterrupt

        RewardPool.__init__ = forked
        for words in {commands!r}:
            cli.main(words)
        """
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert [line for line in done.stdout.splitlines() if "forked" in line] == [
        "forked False"
    ] * 4, done


@pytest.mark.parametrize("place", ["", "/checkpoints", "/checkpoints/3"])
def test_a_run_is_asked_its_own_task(tmp_path, place):
    own = [
        "task=custom",
        "task.path=one.jsonl",
        "reward=r.py:f",
        "sampling.max_completion_tokens=20",
        "seed=3",
    ]
    model = f"model={stored_run(tmp_path, own)}{place}"
    config, resolved = cli._compose("eval", [model, "sampling.max_prompt_tokens=9"])
    assert (config.task.name, config.task.path, config.reward.functions) == (
        "custom",
        "one.jsonl",
        ("r.py:f",),
    )
    assert (
        config.sampling.max_completion_tokens,
        config.sampling.max_prompt_tokens,
        config.seed,
    ) == (20, 9, 0)
    assert resolved.notes == (
        f"{model[6:]}: evaluates its own task (custom, one.jsonl), reward and lengths; task=NAME "
        "for another",
    )
    assert (
        cli._compose("eval", [model, "task=gsm8k"])[0]
        == cli._compose("eval", ["task=gsm8k", model])[0]
    )
    assert cli._compose("eval", [model, "task=gsm8k"])[0].reward.functions == ()
    # Other questions of the same task are asked with the run's lengths and reward.
    other = cli._compose("eval", [model, "task=custom", "task.path=two.jsonl"])[0]
    assert (other.task.path, other.sampling.max_completion_tokens, other.reward.functions) == (
        "two.jsonl",
        20,
        ("r.py:f",),
    )


def test_other_questions_are_answered_as_long_as_the_runs_own(tmp_path):
    own = ["task=custom", "task.path=one.jsonl", "reward=r.py:f", "temperature=0.7"]
    own += ["max_completion_length=32", "evaluation.samples=2", "evaluation.temperature=0.5"]
    model = f"model={stored_run(tmp_path, own)}"
    words_of_rows = ["task=rows", "reward=python:f", "max_completion_length=32"]
    of_python = stored_run(tmp_path / "rows", words_of_rows)

    # A run on rows from Python whose answers are judged by a file, as its error message suggests.
    other = ["task=custom", "task.path=two.jsonl", "reward=r.py:f"]
    config, resolved = cli._compose("eval", [f"model={of_python}", *other])
    assert config.sampling.max_completion_tokens == 32
    assert config.sampling.max_prompt_tokens == 1024  # the preset's, for other prompts
    assert resolved.notes[0] == (
        f"{of_python}: evaluates custom with sampling.max_completion_tokens=32, as the run had"
    )

    def of(*words):
        config, resolved = cli._compose("eval", [model, *words])
        return config.sampling, config.evaluation, resolved.notes[0]

    sampling, evaluation, note = of("task=words")
    assert (sampling.max_completion_tokens, sampling.temperature) == (32, 0.7)
    assert (evaluation.samples, evaluation.temperature) == (2, 0.5)
    assert note.endswith("evaluates words with sampling.max_completion_tokens=32, as the run had")
    # What the user gives wins, by any of its names and in a file.
    for words in (["max_completion_length=48"], [str(tmp_path / "mine.yaml")]):
        (tmp_path / "mine.yaml").write_text("sampling: {max_completion_tokens: 48}\n")
        sampling, evaluation, note = of("task=words", *words)
        assert (sampling.max_completion_tokens, sampling.temperature) == (48, 0.7)
        assert note.endswith("evaluates words with sampling.max_completion_tokens=48")
    # A published benchmark has a protocol of its own.
    sampling, evaluation, note = of("task=gsm8k")
    assert (sampling.max_completion_tokens, sampling.temperature) == (512, 1.0)
    assert evaluation.samples == 1
    assert note.endswith(
        "evaluates gsm8k with sampling.max_completion_tokens=512, of the benchmark's own protocol; "
        "the run had sampling.max_completion_tokens=32"
    )


@pytest.mark.parametrize("questions", [[], ["task=custom", "task.path=two.jsonl"], ["task=words"]])
def test_greedy_answers_of_a_run_that_took_several_are_one_a_question(tmp_path, questions):
    own = ["task=custom", "task.path=one.jsonl", "reward=r.py:f"]
    own += ["evaluation.samples=4", "evaluation.temperature=0.5"]
    model = f"model={stored_run(tmp_path, own)}"
    note = (
        f"{tmp_path}: evaluation.temperature=0 takes one greedy answer a question; the run took "
        "evaluation.samples=4"
    )
    for greedy in (
        "evaluation.temperature=0",
        "actor_rollout_ref.rollout.val_kwargs.temperature=0",
    ):
        config, resolved = cli._compose("eval", [model, *questions, greedy])
        assert (config.evaluation.samples, config.evaluation.is_greedy) == (1, True)
        assert note in resolved.notes
    config, resolved = cli._compose("eval", [model, *questions, "evaluation.temperature=1"])
    assert config.evaluation.samples == 4 and note not in resolved.notes
    with pytest.raises(shoal.ShoalError, match="samples=3: expected 1, or "):
        words = [*questions, "evaluation.temperature=0", "evaluation.samples=3"]
        cli._compose("eval", [model, *words])


def test_only_tasks_with_right_answers_are_sampled_for_pass_k():
    config, _ = cli._compose("eval", ["task=words"])
    assert config.for_task(judges=True).pass_k == 8 == config.largest_group
    left_out = config.for_task(judges=False)
    assert left_out.pass_k == 0 and left_out.largest_group == 1
    given = replace(config, pass_k=3)
    assert given.for_task(judges=False) == given == given.for_task(judges=True)
    by_reward = task(correct=None, correct_by="right")
    assert not by_reward.judges and task(correct=lambda text, example: True).judges
    assert replace(by_reward, rewards=(RewardFunction("right", len),)).judges


def test_the_run_started_last_is_asked_its_own_task(tmp_path):
    run = stored_run(tmp_path, ["task=custom", "task.path=one.jsonl", "reward=r.py:f"])
    (tmp_path / "last").write_text(f"{run.relative_to(tmp_path)}\n")
    config, resolved = cli._compose("eval", [f"model={tmp_path}/last"])
    assert (config.model.path, config.task.path) == (str(run), "one.jsonl")
    own, last = resolved.notes
    assert own.startswith(f"{run}: evaluates its own task (custom, one.jsonl)")
    assert last == f"model.path={tmp_path}/last is {run}, the run that was started last"


def test_a_run_whose_task_came_from_python_asks_for_it_again(tmp_path):
    with pytest.raises(
        shoal.ShoalError, match="the task of this run came from Python: pass it again in Python"
    ):
        cli._compose("eval", [f"model={stored_run(tmp_path / 'rows', ['task.name=rows'])}"])
    run = stored_run(tmp_path / "f", ["reward=python:f"])
    with pytest.raises(shoal.ShoalError, match="the reward of this run came from Python"):
        cli._compose("eval", [f"model={run}"])
    assert cli._compose("eval", [f"model={run}", "reward=r.py:f"])[0].reward.functions == (
        "r.py:f",
    )


def test_a_run_is_evaluated_with_its_own_tools(tmp_path, monkeypatch):
    own = ["task=custom", "task.path=one.jsonl", "reward=r.py:f", "environment.max_turns=3"]
    model = f"model={stored_run(tmp_path, [*own, 'tools=t.py:look'])}"
    config, resolved = cli._compose("eval", [model])
    assert (config.environment.tools, config.environment.max_turns) == (("t.py:look",), 3)
    assert (
        "evaluates its own task (custom, one.jsonl), reward, environment and lengths;"
        in resolved.notes[0]
    )
    config = cli._compose("eval", [model, "agent=python a.py"])[0]
    assert (config.environment.tools, config.environment.agent) == ((), "python a.py")
    given = f"model={stored_run(tmp_path / 'python', [*own, 'environment=python:House'])}"
    with pytest.raises(
        shoal.ShoalError,
        match=r"environment.factory=python:House of this run came from Python: pass "
        r"it again in Python, shoal.evaluate\(model=RUN, environment=...\), or as",
    ):
        cli._compose("eval", [given])
    assert cli._compose("eval", [given, "tools=t.py:look"])[0].environment.factory == ""
    monkeypatch.setitem(PYTHON_OBJECTS._objects, "python:House", object)
    assert cli._compose("eval", [given])[0].environment.factory == "python:House"


PROBLEM = "Find the number of pairs of positive integers whose product is 2024 and whose sum is odd"


def test_questions_that_the_run_was_trained_on_are_counted_and_warned_of(tmp_path):
    rows = [{"prompt": f"Solve: {PROBLEM}!", "answer": "8"}, {"prompt": "2 + 3 = ?", "answer": "5"}]
    data = tmp_path / "train.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    test = tmp_path / "test.jsonl"
    test.write_text(json.dumps({"prompt": "1 + 1 = ?", "answer": "2"}) + "\n")
    own = ["task=custom", f"task.path={data}", "reward=r.py:f"]
    model = str(stored_run(tmp_path / "run", own))
    aime = blank_aime(TaskSection(name="aime24"))
    questions = []
    for number, problem in enumerate([f"{PROBLEM}.", "Find the 7th prime."]):
        assert aime.of_row
        questions.append(aime.of_row(number, {"problem": problem, "answer": "17"}))
    task = replace(aime, evaluations={"held_out": questions})
    out = io.StringIO()
    overlaps = shared_questions(model, task, Console(out))
    assert overlaps["held_out"].num_shared == overlaps["held_out"].num_whole == 1
    printed = " ".join(out.getvalue().split())
    assert (
        "held_out: 1 of 2 questions shares 13 consecutive words with the training data of"
        in printed
    )
    assert "train.jsonl, line 1" in printed

    later = str(stored_run(tmp_path / "later", ["task=words", f"model={model}"]))
    assert shared_questions(later, task, Console(io.StringIO())) == overlaps
    data.unlink()
    out = io.StringIO()
    assert shared_questions(model, task, Console(out)) == {}
    assert "was trained on the evaluated questions: " in " ".join(out.getvalue().split())
    of_python = str(stored_run(tmp_path / "rows", ["task=rows", "reward=python:f"]))
    out = io.StringIO()
    assert shared_questions(of_python, task, Console(out)) == {}
    printed = " ".join(out.getvalue().split())
    assert (
        "was trained on the evaluated questions: its rows came from Python, and a run does not "
        "keep them" in printed
    )
    assert "resume" not in printed
    generated = str(stored_run(tmp_path / "words", ["task=words"]))
    assert shared_questions(generated, task, Console(out)) == {}
    assert shared_questions("tiny", task, Console(out)) == {}


@pytest.mark.slow
def test_a_benchmark_is_evaluated_from_a_file_of_its_own(tmp_path, capsys):
    question = {"Question": "Which is 2?", "Correct Answer": "2"}
    for number in (1, 2, 3):
        question[f"Incorrect Answer {number}"] = f"{number}0"
    data = tmp_path / "gpqa_diamond.jsonl"
    data.write_text(json.dumps(question) + "\n")
    words = ["eval", "model=tiny", "task=gpqa", f"task.path={data}", "batch=8", "json=true"]
    assert cli.main([*words, "sampling.max_completion_tokens=8"]) == 0
    figures = json.loads(capsys.readouterr().out)["held_out"]
    assert figures["num_questions"] == 1 and figures["accuracy_interval"][0] == 0
    assert figures["sampled_protocol"] == "4 completions a question at temperature 0.5"
    assert "overlapping_questions" not in figures  # the packaged model's data is not known


def stored_run(folder: Path, words: list[str]) -> Path:
    """A run folder that holds its settings and the place of a checkpoint."""
    (folder / "checkpoints" / "3").mkdir(parents=True)
    (folder / "config.yaml").write_text(compose("train", words)[1].text)
    return folder


@pytest.mark.slow
def test_a_run_without_a_right_answer_reports_its_reward(workshop, capsys):
    def reward(completions, **_):
        return [float(len(text)) for text in completions]

    result = shoal.train(
        task=[{"prompt": f"{i} + 1 ="} for i in range(20)],
        reward=reward,
        run_name="rewarded",
        base_output_directory=str(workshop.runs),
        model={"path": str(workshop.model), "template": PLAIN},
        steps=2,
        reward__workers=0,
        task__num_eval_questions=2,
        train={"pass_k": 0, "evaluate_every": 1},
        batch={"prompts_per_step": 2, "group_size": 2},
        checkpoint={"keep_best": 1, "keep_last": 1},
        algorithm__kl_coef=0,
        sampling={"max_prompt_tokens": 64, "max_completion_tokens": 6},
    )
    assert result["accuracy_before"] is None is result["accuracy_after"]
    assert result["mean_reward_after"] == result.after["held_out"]["mean_reward"] > 1
    assert "accuracy" not in result.after[
        "held_out"
    ] and "held_out mean reward (greedy, 2 questions)" in repr(result)
    scores = {row["step"]: row["mean_reward"] for row in result.evaluations}
    kept = {int(folder.name) for folder in result.checkpoints_path.iterdir()}
    best = max((1, 2), key=lambda step: (scores[step], step))
    assert best in kept
    [line] = [line for line in capsys.readouterr().out.splitlines() if "best evaluation" in line]
    assert line == (
        f"the best evaluation of a checkpoint is that of step {best}: `shoal export "
        f"from={result.checkpoints_path}/{best} to=FOLDER` writes its weights"
    )
