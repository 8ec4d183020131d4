"""`shoal view` without a browser: what it reads of runs, live, damaged or hostile, and what its
server answers."""

from __future__ import annotations

import csv
import io
import itertools
import json
import os
import random
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scripts import load
from stored_runs import (
    HOSTILE,
    MESSAGES,
    append_step,
    in_turns,
    stored_group,
    write_lines,
    write_run,
)

pytest.importorskip("duckdb", reason="shoal view needs the extra `view`")
pytest.importorskip("starlette")

from starlette.testclient import TestClient

from shoal import cli
from shoal.commands.diff import diff
from shoal.commands.view import lint as lint_view
from shoal.commands.view import one_file, view
from shoal.commands.view import views as views_module
from shoal.commands.view.completions import CUT_CHARS
from shoal.commands.view.curves import MAX_POINTS, Curves, spikes
from shoal.commands.view.run import comparison, settings_rows, shown_differences
from shoal.commands.view.server import make_app, page_files
from shoal.commands.view.views import Viewer
from shoal.config.commands import DiffConfig, ViewConfig
from shoal.config.merge import compose
from shoal.config.stored import Decision, texts_of
from shoal.config.train import Config
from shoal.records import ShoalError
from shoal.runs import group_table
from shoal.runs.groups import read_file, write_file
from shoal.runs.layout import process_start
from shoal.runs.lines import flat_yaml
from shoal.runs.metrics import wilson_interval
from shoal.runs.reader import MAX_LINE_BYTES, StoredRun, _newest, open_runs
from shoal.runs.reward_changes import RewardChanges
from shoal.runs.writer import RunWriter
from shoal.serve.server import host_name, listen


def opened(*paths: Path) -> Viewer:
    viewer = Viewer(list(map(str, paths)))
    viewer.read_all()
    return viewer


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    return write_run(
        tmp_path_factory.mktemp("runs") / "first", steps=40, spike=37, settings=["seed=7"]
    )


@pytest.fixture(scope="module")
def viewer(run):
    viewer = opened(run)
    yield viewer
    viewer.close()


def problems(viewer: Viewer) -> list[str]:
    result = []
    for one in viewer.runs.values():
        for text in one.run.problems.values():
            result.append(text)
    return result


def rows(viewer: Viewer, run: str = "first", **parameters: Any) -> list[dict[str, Any]]:
    texts = {name: str(value) for name, value in parameters.items()}
    return viewer.answer("groups", {"run": run, "limit": "500", **texts})["rows"]


# ---- groups


def test_the_table_has_the_figures_of_the_files(viewer, run):
    found = {(row["file"], row["group"]): row for row in rows(viewer)}
    assert len(found) == 40 * 2 + 2 * 2 and not problems(viewer)
    for path in run.joinpath("groups").glob("*.parquet"):
        for place, stored in enumerate(read_file(path)):
            row, group = found[path.stem, place], stored.group
            lengths = [len(one) for one in group.completions]
            assert group.correct is not None
            assert row["reward"] == pytest.approx(group.rewards.mean())
            assert row["spread"] == pytest.approx(group.rewards.std())
            assert row["pass"] == pytest.approx(group.correct.mean())
            assert row["length"] == pytest.approx(np.mean(lengths)) and row["longest"] == max(
                lengths
            )
            assert (row["set"], row["row"], row["version"]) == (
                group.subset,
                group.example.row,
                group.version,
            )
            assert row["mean/correct"] == pytest.approx(group.reward_components["correct"].mean())
            assert row["prompt"] == f"question {group.example.row}" and row["staleness"] == 0


@pytest.mark.parametrize(
    ("filter", "number"),
    [
        ("", 84),
        ("set=train", 80),
        ("set=held_out", 4),
        ("spread>0", 40),
        ("spread=0 set=train", 40),
        ("step=3..4", 4),
        ("reward<0.11 and set=train", 40),
        ("row=11", 1),
        ("correct=0.5", 40),
        ("pass!=0.5 set=train", 40),
        ("advantage=none", 4),
        ('set="held_out" reward>1', 3),
    ],
)
def test_filters(viewer, filter, number):
    assert len(rows(viewer, filter=filter)) == number


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"filter": "rewrad>1"}, "there is no column 'rewrad', did you mean reward?"),
        ({"filter": "reward"}, "'reward' is not a condition"),
        ({"filter": "reward>x"}, "reward is a number"),
        ({"filter": "set>train"}, "compare it with = or !="),
        ({"sort": "step; DROP TABLE groups_0"}, "there is no column"),
        ({"sort": "change"}, "there is no column 'change'"),
        ({"prompts": "some"}, "prompts=some: expected 1, learned, lost"),
        ({"offset": "-1"}, "offset=-1: expected 0"),
        ({"limit": "many"}, "expected an integer"),
    ],
)
def test_what_cannot_be_asked_is_said_in_a_line(viewer, parameters, message):
    with pytest.raises(ShoalError, match=re.escape(message)):
        rows(viewer, **parameters)


def test_rows_are_sorted_by_any_column_and_page_by_page(viewer):
    steps = [row["step"] for row in rows(viewer, sort="step", desc=1)]
    assert steps == sorted(steps, reverse=True)
    lengths = [row["length"] for row in rows(viewer, sort="length")]
    assert lengths == sorted(lengths)
    pages = []
    for at in (0, 30, 60):
        pages.append(viewer.answer("groups", {"run": "first", "limit": "30", "offset": str(at)}))
    assert [len(page["rows"]) for page in pages] == [30, 30, 24] and pages[0]["total"] == 84
    assert len({(row["file"], row["group"]) for page in pages for row in page["rows"]}) == 84


@pytest.mark.parametrize(
    ("parameters", "number"),
    [
        ({"text": "Step 7"}, 2),
        ({"text": "question 11"}, 1),
        ({"text": "step 7", "filter": "spread>0"}, 1),
        ({"text": "'; DROP TABLE groups_0; --"}, 0),
    ],
)
def test_text_is_found_in_prompts_and_completions(viewer, parameters, number):
    assert found(viewer, "first", **parameters) == number


def found(viewer: Viewer, run: str, text: str, **parameters: Any) -> int:
    """Groups with a text, once all files were searched."""
    texts = {"run": run, "text": text, **{name: str(value) for name, value in parameters.items()}}
    answer = viewer.answer("groups", texts)
    for _ in range(100):
        if answer["search"]["done"]:
            break
        answer = viewer.answer("groups", texts)
    assert answer["search"]["searched"] == len(viewer.runs[run].index.files)
    return answer["total"]


def test_a_group_has_everything_that_scored_it(viewer):
    group = viewer.answer("group", {"run": "first", "file": "step_000002", "group": "0"})
    assert (
        group["prompt"] == [{"role": "user", "content": "question 1"}]
        and group["columns"]["answer"] == "1"
    )
    assert (group["previous_group"], group["next_group"]) == (None, 1)
    assert (group["previous_file"], group["next_file"]) == ("step_000001", "step_000003")
    one = group["completions"][1]
    assert one["components"] == {"correct": 1.0, "format": 1.0} and group["weights"] == {
        "correct": 1.0,
        "format": 0.1,
    }
    assert one["extra"] == {"verdict": "grader says 1.1"} and one["advantage"] == pytest.approx(0.5)
    assert (
        one["stop_reason"] == "eos"
        and one["correct"] is True
        and one["text"] == "answer 1.1 of step 1"
    )


def test_the_prompt_stands_there_as_the_model_read_it(viewer, run):
    from shoal.chat.tokenizer import Tokenizer

    where = {"run": "first", "file": "step_000002", "group": "0"}
    stored = read_file(run / "groups" / "step_000002.parquet")[0].group
    text = Tokenizer.load(run / "model").decode(
        stored.prompt_ids.tolist(), skip_special_tokens=False
    )
    assert text and viewer.answer("group", where)["prompt_read"] == text


def test_tokens_have_what_the_loss_saw(viewer, run):
    data = viewer.answer(
        "tokens", {"run": "first", "file": "step_000002", "group": "0", "completion": "0"}
    )
    stored = read_file(run / "groups" / "step_000002.parquet")[0]
    own = stored.group.completions[0]
    assert data["ids"] == own.token_ids.tolist() and len(data["tokens"]) == len(own)
    assert data["logprob"] == pytest.approx(own.logprobs.tolist(), rel=1e-4)
    assert data["gap"] == pytest.approx([0.01] * len(own), rel=1e-3)
    assert data["ratio"] == pytest.approx([np.exp(0.01)] * len(own), rel=1e-4)
    assert stored.advantages is not None
    assert data["weighted"] == pytest.approx(
        [stored.advantages[0] * np.exp(0.01)] * len(own), rel=1e-4
    )
    assert data["clipped"] == [False] * len(own) and data["versions"] == [1] * len(own)
    assert data["entropy"] is data["likeliest"] is None
    other = viewer.answer(
        "tokens", {"run": "first", "file": "step_000002", "group": "0", "completion": "1"}
    )
    assert other["trainer"] == [None] * len(other["ids"]) and not other["is_trained"]


def test_rewards_and_advantages_by_turn(tmp_path):
    run = write_run(tmp_path / "turns", 1)
    group = in_turns(stored_group(0, 1, [1.0, 0.5]))
    group = replace(group, turn_rewards=(np.array([0.75, 0.25]), np.array([0.5])))
    advantages = [[np.array([0.5, -0.25]), np.array([-0.5])]]
    path = run / "groups" / "step_000001.parquet"
    trained = {(0, 0): group.completions[0].logprobs}
    write_file(path, [group], [[0.1, -0.5]], trained, advantages)
    where = {"run": "turns", "file": "step_000001", "group": "0"}
    viewer = opened(run)
    one, other = viewer.answer("group", where)["completions"]
    assert (one["turn_rewards"], one["turn_advantages"]) == ([0.75, 0.25], [0.5, -0.25])
    assert (other["turn_rewards"], other["turn_advantages"]) == ([0.5], [-0.5])
    tokens = viewer.answer("tokens", where | {"completion": "0"})
    size = len(tokens["ids"])
    # Tokens 1 and 2 are context.
    want = [0.5, 0, 0, *[-0.25] * (size - 3)]
    assert tokens["advantages"] == want and tokens["advantage"] == 0.1
    # The trainer's log-probs are the sampler's, so that every ratio is 1.
    assert tokens["weighted"] == want
    assert viewer.answer("tokens", where | {"completion": "1"})["advantages"][0] == -0.5
    viewer.close()


def test_rollouts_with_turns(tmp_path, capsys):
    def make(step: int) -> list[Any]:
        plain = stored_group(step, 1, [0.1, 1.1, 0.1, 1.1])
        return [in_turns(plain) if step else plain, plain]  # of step 1 no rollout has messages

    viewer = opened(path := write_run(tmp_path / "turns", 2, make))
    found = {}
    for row in rows(viewer, "turns", filter="set=train"):
        found[(row["step"], row["group"])] = row
    assert (found[2, 0]["turns"], found[2, 0]["calls"]) == (1.25, 0.25) and found[1, 0][
        "turns"
    ] is None
    # tokens of context are not the model's
    assert found[2, 0]["length"] == found[1, 0]["length"] - 2 / 4
    assert [row["group"] for row in rows(viewer, "turns", filter="calls>0")] == [0]
    where = {"run": "turns", "file": "step_000002", "group": "0"}
    one, other = viewer.answer("group", where)["completions"][:2]
    assert one["messages"] == list(MESSAGES) and other["messages"][0]["role"] == "assistant"
    assert (
        viewer.answer("group", where | {"file": "step_000001"})["completions"][0]["messages"]
        is None
    )
    tokens = viewer.answer("tokens", where | {"completion": "0"})
    assert tokens["mask"][:4] == [True, False, False, True] and len(tokens["prompt"]) == 7
    assert len(viewer.answer("tokens", where | {"completion": "1"})["prompt"]) == 5
    assert cli.main(["groups", str(path), "step=2", "group=0"]) == 0
    shown = capsys.readouterr().out
    assert "and 2 of context, ended by max_turns, 7 prompt tokens of its own:" in shown
    for line in (
        "assistant: I add.",
        '  calls add({"a": 2, "b": "<b>3</b>"})',
        "tool add: 5 zz",
        "user: And then?",
    ):
        assert f"\n    {line}" in shown


def test_the_text_of_tokens_is_the_text_of_the_completion(viewer, run):
    from shoal.chat.tokenizer import Tokenizer

    tokenizer = Tokenizer.load(run / "model")
    text = "Größe: 你好 👩‍🔬 end"
    ids = tokenizer.encode_prompt(text).tolist()
    pieces = viewer.runs["first"].pieces(ids)
    assert "".join(pieces) == tokenizer.decode(ids, skip_special_tokens=False)
    assert len(pieces) == len(ids) and not any("\ufffd" in piece for piece in pieces[:-1])


def test_prompts_through_time(viewer):
    found = rows(viewer, prompts=1, filter="set!=train", sort="change", desc=1)
    assert [(row["row"], row["step"], row["times"], row["change"]) for row in found] == [
        (0, 40, 2, 1),
        (1, 40, 2, 0),
    ]
    # A question that is answered as before was neither learned nor lost.
    learned = rows(viewer, prompts="learned", filter="set!=train", sort="change", desc=1)
    assert [row["row"] for row in learned] == [0]
    assert rows(viewer, prompts="lost", filter="set!=train") == []
    trained = viewer.answer("groups", {"run": "first", "prompts": "1", "filter": "set=train"})
    assert {row["row"]: row["times"] for row in trained["rows"]} == {
        0: 14,
        1: 13,
        2: 13,
    } and trained["total"] == 3
    assert [row["step"] for row in rows(viewer, filter="set=held_out row=0", sort="step")] == [
        0,
        40,
    ]


def test_a_prompt_has_all_its_groups_and_its_neighbours(viewer):
    found = viewer.answer("prompt", {"run": "first", "set": "train", "row": "1"})
    assert [group["step"] for group in found["groups"]] == list(range(2, 41, 3))
    assert (found["total"], found["previous"], found["next"]) == (13, 0, 2)
    assert {(group["row"], group["set"]) for group in found["groups"]} == {(1, "train")}
    of_question = viewer.answer("prompt", {"run": "first", "set": "held_out", "row": "0"})
    values = [(group["file"], group["pass"]) for group in of_question["groups"]]
    assert values == [("evaluate_held_out_000000", 0), ("evaluate_held_out_000040", 1)]
    assert (of_question["previous"], of_question["next"]) == (None, 1)
    nothing = viewer.answer("prompt", {"run": "first", "set": "'; DROP", "row": "0"})
    assert nothing["groups"] == [] and nothing["total"] == 0
    with pytest.raises(ShoalError, match="row='x': expected an integer"):
        viewer.answer("prompt", {"run": "first", "set": "train", "row": "x"})


def test_the_questions_that_two_runs_share(tmp_path):
    def evaluated(name: str, rights: Sequence[bool], words: str = "question") -> Path:
        """A run whose newest evaluation answers questions 0, 1, ... right or wrong."""
        path = write_run(tmp_path / name, 4)
        asked = []
        for row, right in enumerate(rights):
            group = stored_group(4, row, [1.1 if right else 0.1], subset="held_out")
            prompt = [{"role": "user", "content": f"{words} {row}"}]
            asked.append(replace(group, example=replace(group.example, prompt=prompt)))
        write_file(path / "groups" / "evaluate_held_out_000004.parquet", asked)
        return path

    paths = (
        evaluated("a", [True, False, True, False]),
        evaluated("b", [True, True, False, True]),
        evaluated("c", [True] * 4, "another question"),
    )
    viewer = opened(*paths)
    shared = viewer.answer("shared", {"run": "a", "other": "b"})
    assert (shared["total"], shared["num_better"], shared["num_worse"]) == (4, 2, 1)
    better = [(one["row"], one["prompt"], one["a"], one["b"]) for one in shared["better"]]
    assert better == [(1, "question 1", 0, 1), (3, "question 3", 0, 1)]
    assert [one["row"] for one in shared["worse"]] == [2]
    # Rows 0 and 1 were asked in the same words before training; the others have other words.
    assert viewer.answer("shared", {"run": "a", "other": "c"})["total"] == 2
    with pytest.raises(ShoalError, match="there is no run 'nowhere' here"):
        viewer.answer("shared", {"run": "a", "other": "nowhere"})
    viewer.close()


# ---- completions


def completions(viewer: Viewer, run: str = "first", **parameters: Any) -> dict[str, Any]:
    texts = {name: str(value) for name, value in parameters.items()}
    return viewer.answer("completions", {"run": run, **texts})


def test_the_table_of_completions_has_the_figures_of_the_files(viewer, run):
    rows = completions(viewer, limit=200, filter="step<=20")["rows"]
    assert len(rows) == 20 * 8 + 2  # the evaluation before training has two answers
    for row in rows:
        stored = read_file(run / "groups" / f"{row['file']}.parquet")[row["group"]]
        group, place = stored.group, row["completion"]
        advantage = None if stored.advantages is None else stored.advantages[place]
        assert row["reward"] == pytest.approx(group.rewards[place])
        assert row["advantage"] == (None if advantage is None else pytest.approx(advantage))
        assert row["right"] == int(group.correct[place]) and row["unscored"] == 0
        assert row["length"] == len(group.completions[place]) and row["truncated"] == 0
        assert row["score/correct"] == group.reward_components["correct"][place]
        assert (row["set"], row["row"]) == (group.subset, group.example.row)
        assert (row["text"], row["chars"]) == (group.texts[place], len(group.texts[place]))
        assert row["prompt"] == f"question {group.example.row}"


@pytest.mark.parametrize(
    ("filter", "number"),
    [
        ("", 324),
        ("set=train right=1", 80),
        ("right=0 reward>0.05 step=3..4", 12),
        ("correct<0.5 set=held_out", 1),
        ("score/correct=1 set=held_out", 3),
        ("advantage=none", 4),
        ("length>0.5", 324),
        ("truncated=1", 0),
        ("row=11 completion=2", 1),
    ],
)
def test_filters_of_completions(viewer, filter, number):
    assert completions(viewer, filter=filter)["total"] == number


def test_completions_are_sorted_searched_and_cut_off(tmp_path):
    texts = ["short", "needle " + "y" * 5_000, "Needle", "<b>bold</b>"]

    def make(step: int) -> list[Any]:
        return [stored_group(step, step, [0.1, 0.2, 0.3, 0.4], texts)]

    viewer = opened(write_run(tmp_path / "first", 3, make))
    found = completions(viewer, sort="reward", desc=1, filter="set=train", limit=3)
    assert [row["text"] for row in found["rows"]] == ["<b>bold</b>"] * 3 and found["total"] == 12
    assert [row["step"] for row in found["rows"]] == [1, 2, 3]
    while True:
        searched = completions(viewer, text="NEEDLE", sort="length", filter="step=2")
        if searched["search"]["done"]:
            break
    assert {row["completion"] for row in searched["rows"]} == {1, 2}
    (long,) = [row for row in searched["rows"] if row["completion"] == 1]
    assert (len(long["text"]), long["chars"]) == (CUT_CHARS, 5_007)
    # What is 0 or missing in the whole run is known, so that the page leaves its column out.
    assert {"truncated", "unscored", "turns", "calls"} <= set(searched["blank"])
    assert not {"reward", "advantage", "right", "length"} & set(searched["blank"])
    groups = viewer.answer("groups", {"run": "first", "text": "needle"})
    assert groups["total"] == 3 and {"staleness", "truncated"} <= set(groups["blank"])
    with pytest.raises(ShoalError, match="limit=999999: expected 1 to"):
        completions(viewer, limit=999_999)
    with pytest.raises(ShoalError, match="there is no column 'spread'"):
        completions(viewer, filter="spread>0")
    viewer.close()


def test_a_table_without_place_says_how_many_completions_it_lacks(tmp_path, monkeypatch):
    monkeypatch.setattr(group_table, "MAX_COMPLETIONS", 20)
    monkeypatch.setattr(group_table, "FILES_AT_ONCE", 1)
    viewer = opened(write_run(tmp_path / "first", 4))
    found = completions(viewer)
    # Two evaluations of two answers and two steps of eight completions have a place.
    assert (found["total"], found["left_out"]) == (20, 16)
    assert len(rows(viewer)) == 12
    viewer.close()


def test_exported_files_have_whole_texts_of_what_is_chosen(tmp_path):
    texts = ["=SUM(A1)", 'a "quote", a comma\nand a line', "x" * 2_000, "<script>", "\ud800 half"]

    def make(step: int) -> list[Any]:
        return [stored_group(step, 1, [0.1, 0.2, 0.3, 0.4, 1.0], texts)]

    viewer = opened(write_run(tmp_path / "first", 2, make))
    chosen = {"run": "first", "filter": "set=train step=2"}
    lines = "".join(viewer.export(chosen | {"format": "jsonl"})).splitlines()
    read = [json.loads(line) for line in lines]
    assert [one["text"] for one in read][:4] == texts[:4] and len(read) == 5
    assert read[4]["right"] == 1 and read[4]["score/format"] == 1.0
    assert json.loads(read[0]["prompt"]) == [{"role": "user", "content": "question 1"}]
    table = list(csv.DictReader(io.StringIO("".join(viewer.export(chosen | {"format": "csv"})))))
    # A spreadsheet must not take a model's text for a formula.
    assert [one["text"] for one in table][:4] == ["'=SUM(A1)", *texts[1:4]]
    assert [float(one["reward"]) for one in table] == [0.1, 0.2, 0.3, 0.4, 1.0]
    found = list(viewer.export({"run": "first", "text": "sum(", "format": "jsonl"}))
    assert len("".join(found).splitlines()) == 2  # one in each step
    for wrong, message in (
        ({"format": "xls"}, "format=xls: expected csv or jsonl"),
        ({"filter": "reward"}, "is not a condition"),
        ({"run": "nowhere"}, "there is no run 'nowhere' here"),
    ):
        with pytest.raises(ShoalError, match=re.escape(message)):
            viewer.export(chosen | wrong)
    client = TestClient(make_app(viewer, "secret"), base_url="http://127.0.0.1")
    assert client.get("/api/export", params=chosen).status_code == 401
    answer = client.get("/api/export", params=chosen, headers={"x-shoal-token": "secret"})
    assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/csv")
    assert len(list(csv.reader(io.StringIO(answer.text)))) == 6
    wrong = client.get(
        "/api/export", params={"run": "first", "format": "x"}, headers={"x-shoal-token": "secret"}
    )
    assert wrong.status_code == 400 and "expected csv or jsonl" in wrong.json()["error"]
    viewer.close()


# ---- the run


def test_the_weights_of_rewards_are_known_before_the_groups_are_read(run, tmp_path):
    path = shutil.copytree(run, tmp_path / "first")
    unread = Viewer([str(path)])
    unread.refresh(groups=False)
    drivers = unread.answer("overview", {"run": "first"})["drivers"]
    assert [(row["function"], row["weight"], row["sign"]) for row in drivers[1:]] == [
        ("correct", 1.0, 1),
        ("format", 0.1, 0),
    ]
    for file in (path / "groups").glob("step_*"):  # as with report.groups=false
        file.unlink()
    assert unread.runs["first"].index.weights == {"correct": 1.0, "format": 0.1}
    unread.close()


def test_the_overview_answers_how_it_goes(viewer):
    found = viewer.answer("overview", {"run": "first"})
    assert found["progress"]["state"] == "finished" and found["progress"]["step"] == 40
    assert found["progress"]["has_ended"] and found["progress"]["stopped_by"] == ""
    assert found["reward_since"] == 0
    # of two questions: noise
    assert found["table"][0][1:] == ["50.0%", "100.0%", "+50.0 points", 0]
    driver = found["drivers"][1]
    assert driver["function"] == "correct" and driver["adds"] == pytest.approx(0.4375, abs=0.01)
    spike = next(event for event in found["events"] if event["level"] == "spike")
    assert spike["step"] == 37 and spike["text"].startswith("grad_norm 90")
    warning = next(event for event in found["events"] if event["level"] == "warning")
    assert warning["step"] == 2 and warning["text"] == "something to look at <b>here</b>"
    assert {row["key"] for row in found["settings"] if row["differs"]} == {"seed"}
    assert viewer.answer("curves", {"run": "first", "first": "10", "last": "12"})["x"] == [
        10,
        11,
        12,
    ]


def test_a_run_under_way_has_its_progress_and_is_read_as_it_grows(tmp_path):
    path = write_run(tmp_path / "live", steps=6, finished=False, settings=["steps=60"])
    viewer = opened(path)
    try:
        progress = viewer.answer("overview", {"run": "live"})["progress"]
        assert (progress["state"], progress["step"], progress["steps"]) == ("running", 6, 60)
        assert progress["seconds_left"] == pytest.approx(54)
        (before,) = viewer.answer("runs", {})["runs"]
        assert found(viewer, "live", "of step 6") == 2  # the evaluation of version 6
        append_step(path, 7, [stored_group(6, 99, [0.1, 1.1])])
        (path / "groups" / "step_000008.parquet.tmp").write_bytes(b"PAR1")
        with (path / "metrics.jsonl").open("a") as file:
            file.write('{"step": 8, "reward/me')  # a line that is being written
        viewer.read_all()
        (after,) = viewer.answer("runs", {})["runs"]
        assert after["revision"] == before["revision"] + 1 and after["progress"]["step"] == 7
        assert rows(viewer, "live", filter="row=99")[0]["step"] == 7 and not problems(viewer)
        assert found(viewer, "live", "of step 6") == 3
        # Resumed from step 5: the steps after it are written anew.
        write_lines(
            path / "new.jsonl", [{"step": step, "reward/mean": 0.0} for step in range(1, 6)]
        )
        (path / "new.jsonl").replace(path / "metrics.jsonl")
        (path / "groups" / "step_000007.parquet").unlink()
        viewer.read_all()
        assert viewer.answer("overview", {"run": "live"})["progress"]["step"] == 5
        assert not rows(viewer, "live", filter="row=99")
        # another content under the same name
        append_step(path, 6, [stored_group(5, 98, [0.1, 1.1])])
        viewer.read_all()
        assert [row["row"] for row in rows(viewer, "live", filter="step=6 set=train")] == [98]
    finally:
        viewer.close()


def test_warnings_and_resumptions_stand_at_their_steps(tmp_path):
    path = write_run(tmp_path / "killed", steps=9, finished=False, settings=["steps=60"])
    (path / "events.jsonl").unlink()
    with RunWriter(path) as folder:
        folder.write_event("warning", "data: short", "task.path")
        folder.begin("evaluation", 0)
        folder.write_event("phase", "evaluation before training")
        folder.begin("training", 9)
        folder.write_event("warning", "lost with its step")
    with RunWriter(path) as folder:
        folder.begin("start", 6)
        folder.write_event("wrong", "WRONG data: shorter")
        folder.rewind(6)
        folder.begin("training", 7)
        folder.write_event("warning", "late")
    viewer = opened(path)
    try:
        happened = viewer.answer("overview", {"run": "killed"})["events"]
    finally:
        viewer.close()
    assert [
        (event["step"], event["level"], event["text"])
        for event in happened
        if event["level"] in ("warning", "note", "error")
    ] == [
        (0, "warning", "data: short"),
        (6, "error", "WRONG data: shorter"),
        (6, "note", "resumed from the checkpoint of step 6"),
        (7, "warning", "late"),
    ]


def test_the_time_of_a_step_is_that_of_steps_which_compile_nothing(tmp_path):
    rows = []
    for step, seconds, number in ((1, 365.0, 19), (2, 60.0, 21), (3, 4.0, 21), (4, 5.0, 21)):
        rows.append({"step": step, "time/step_seconds": seconds, "compilations": number})
    for count, expected in ((2, None), (3, 4.0), (4, 4.5)):
        write_lines(tmp_path / "metrics.jsonl", rows[:count])
        curves = Curves(StoredRun(tmp_path, "young", lenient=True))
        curves.read(5)
        assert curves.step_seconds == expected


def test_long_curves_keep_their_spikes(tmp_path):
    write_lines(
        tmp_path / "metrics.jsonl",
        [{"step": n, "a": float(n == 4321), "b": None} for n in range(20_000)],
    )
    curves = Curves(StoredRun(tmp_path, "long", lenient=True))
    while not curves.complete:
        curves.read()
    thin = curves.thinned()
    assert len(thin["x"]) <= MAX_POINTS + 2 and max(thin["y"]["a"]) == 1.0
    assert curves.thinned(4000, 4500)["y"]["a"][321] == 1.0


def test_spikes_are_found_where_they_are(tmp_path):
    noise = np.random.default_rng(0).normal(1, 0.05, 200)
    noise[61] = 9
    write_lines(
        tmp_path / "metrics.jsonl",
        [{"step": step, "grad_norm": value} for step, value in enumerate(noise, 1)],
    )
    curves = Curves(StoredRun(tmp_path, "long", lenient=True))
    curves.read(5)
    assert [event["step"] for event in spikes(curves)] == [62]


def test_the_seconds_of_a_step_that_compiled_or_began_a_process_are_no_spike(tmp_path):
    seconds = np.random.default_rng(0).normal(1, 0.05, 200)
    seconds[[61, 101, 151]] = 30
    # two programs in step 62, another process from step 102 on
    compiled = np.repeat([9, 11, 3], [61, 40, 99])
    write_lines(
        tmp_path / "metrics.jsonl",
        [
            {"step": step, "time/step_seconds": value, "compilations": int(number)}
            for step, (value, number) in enumerate(zip(seconds, compiled, strict=True), 1)
        ],
    )
    curves = Curves(StoredRun(tmp_path, "long", lenient=True))
    curves.read(5)
    assert [event["step"] for event in spikes(curves)] == [152]


def test_steps_after_a_collapse_are_compared_with_those_before_them(tmp_path):
    """A collapse is one event, and the healthy steps before it are none."""
    values = (
        np.r_[np.full(40, 0.6), np.full(10, 0.05), np.full(10, 0.055)] + np.arange(60) % 3 * 1e-3
    )
    write_lines(
        tmp_path / "metrics.jsonl",
        [{"step": step, "entropy": value} for step, value in enumerate(values, 1)],
    )
    curves = Curves(StoredRun(tmp_path, "long", lenient=True))
    curves.read(5)
    (event,) = spikes(curves)
    assert event["step"] == 41 and event["text"] == "entropy 0.051 after 0.601; so until step 50"


def test_a_collapse_names_what_moved_first(tmp_path):
    entropy = np.r_[np.full(40, 0.6), np.full(8, 0.05)]
    reward = np.r_[np.full(42, 0.5), np.full(6, 0.1)]
    write_lines(
        tmp_path / "metrics.jsonl",
        [
            {"step": step, "entropy": a, "reward/mean": b}
            for step, (a, b) in enumerate(zip(entropy, reward, strict=True), 1)
        ],
    )
    curves = Curves(StoredRun(tmp_path, "long", lenient=True))
    curves.read(5)
    (event,) = spikes(curves)
    assert (event["level"], event["step"], event["last_step"]) == ("collapse", 41, 48)
    assert event["metrics"] == ["entropy", "reward/mean"]
    assert (
        event["text"] == "entropy 0.05 after 0.6; then reward/mean from step 43; so until step 48"
    )


def test_a_run_that_a_callback_stopped_is_stopped_by_it(tmp_path):
    path = write_run(tmp_path / "stopped", steps=3, settings=["steps=60"])
    summary = json.loads((path / "summary.json").read_text())
    summary |= {"stopped_by": "the callback <b>Patience", "steps": 60, "steps_made": 3}
    (path / "summary.json").write_text(json.dumps(summary))
    viewer = opened(path)
    try:
        progress = viewer.answer("overview", {"run": "stopped"})["progress"]
        assert (progress["state"], progress["step"], progress["steps"]) == ("stopped", 3, 60)
        assert progress["stopped_by"] == "the callback <b>Patience" and progress["has_ended"]
        assert progress["resume"] == f"shoal train resume={path}"
    finally:
        viewer.close()


def test_a_run_that_was_killed_is_stopped_at_once(tmp_path):
    path = write_run(tmp_path / "killed", steps=3, finished=False, settings=["steps=60"])
    viewer = opened(path)
    try:
        # this process holds the lock
        assert viewer.answer("runs", {})["runs"][0]["progress"]["state"] == "running"
        child = subprocess.Popen([sys.executable, "-c", ""])
        child.wait()
        (path / ".lock").write_text(f"process {child.pid} on {socket.gethostname()}\n")
        progress = viewer.answer("runs", {})["runs"][0]["progress"]
        assert progress["state"] == "killed" and progress["seconds_left"] is None
        assert progress["resume"] == f"shoal train resume={path}" and progress["saved"] == 0
        before = (path / "events.jsonl").read_text()

        def progress_after(*events: tuple[str, str]) -> dict[str, Any]:
            lines = []
            for level, text in events:
                lines.append(
                    {"time": 1.0, "step": 3, "phase": "training", "level": level, "text": text}
                )
            write_lines(path / "new.jsonl", lines)
            (path / "events.jsonl").write_text(before + (path / "new.jsonl").read_text())
            return viewer.answer("runs", {})["runs"][0]["progress"]

        progress = progress_after(("error", "no grader; stopped after step 3"))
        assert (progress["state"], progress["cause"]) == (
            "failed",
            "no grader; stopped after step 3",
        )
        assert progress["resume"]
        happened = viewer.answer("overview", {"run": "killed"})["events"]
        (failure,) = [event for event in happened if event["level"] == "error"]
        assert failure["step"] == 3 and failure["text"].startswith("no grader; ")
        progress = progress_after(("error", "tired"), ("warning", "W&B is switched off"))
        assert progress["cause"] == "tired"
        progress = progress_after(("error", "tired"), ("note", "resumed after step 3"))
        assert progress["state"] == "killed"
        (path / "events.jsonl").write_text(before)
        (path / "checkpoints" / "3").mkdir(parents=True)  # nothing is lost: it was stopped
        progress = viewer.answer("home", {})["rows"][0]["progress"]
        assert progress["state"] == "stopped" and progress["saved"] == 3
        for elsewhere in (f"process {child.pid} on elsewhere\n", "", "process x on y"):
            (path / ".lock").write_text(elsewhere)
            assert viewer.answer("runs", {})["runs"][0]["progress"]["state"] == "running"
        mine = f"process {os.getpid()} on {socket.gethostname()}"
        for started, state in (
            (process_start(os.getpid()), "running"),
            ("1", "stopped"),
            ("", "running"),
        ):
            # a killed run's id may be another process's now
            (path / ".lock").write_text(f"{mine}\n{started}\n")
            assert viewer.answer("runs", {})["runs"][0]["progress"]["state"] == state
    finally:
        viewer.close()


def compared(settings: Sequence[Mapping], decided: Sequence = ()) -> dict:
    """The page's record of the settings in which runs differ."""
    return comparison(shown_differences(settings, decided))


def test_values_that_a_run_chose_are_no_settings_that_differ(tmp_path):
    chosen = {
        "batch.micro_tokens": 17408,
        "algorithm.correction": "none",
        "optimizer.lr": 1e-3,
        "unknown.key": 1,
    }
    decided = {"batch.micro_tokens", "algorithm.correction"}
    assert [row["key"] for row in settings_rows(chosen, decided) if row["differs"]] == [
        "optimizer.lr",
        "unknown.key",
    ]
    # a user's, all of them
    assert {row["key"] for row in settings_rows(chosen) if row["differs"]} == chosen.keys()
    other = chosen | {
        "batch.micro_tokens": 4096,
        "train.max_staleness": 1,
        "algorithm.correction": "tis",
    }
    found = compared([chosen | {"train.max_staleness": 0}, other], [decided, decided])
    assert [row["key"] for row in found["differing"]] == ["train.max_staleness"]
    # Tags and notes are shown as such.
    labelled = [chosen | {"tags": ["a"], "notes": ""}, chosen | {"tags": [], "notes": "why"}]
    assert compared(labelled)["differing"] == []
    assert "algorithm.correction" in {
        row["key"] for row in compared([chosen, other], [decided, set()])["differing"]
    }

    values = {"batch.micro_tokens": 640, "algorithm.correction": "tis"}
    decisions = {key: Decision(value, {}) for key, value in values.items()}
    given = [f"{key}={value}" for key, value in values.items()]
    for name, words, own in (("chosen", [], decisions), ("set", given, {})):
        config = compose(Config, words)[0]
        with RunWriter(write_run(tmp_path / name)) as folder:
            folder.write_config(*texts_of(config, own))
        viewer = opened(tmp_path / name)
        rows = {}
        for row in viewer.answer("overview", {"run": name})["settings"]:
            rows[row["key"]] = row["differs"]
        viewer.close()
        assert [rows[key] for key in sorted(decided)] == [name == "set"] * 2


def test_keys_that_an_older_version_lacks_are_no_difference_at_their_default():
    old = {"seed": 0, "task.name": "words"}
    assert compared([old, old | {"task.system": ""}])["differing"] == []
    chosen = compared([old, old | {"task.system": "Be brief."}])
    assert [row["key"] for row in chosen["differing"]] == ["task.system"]
    # A key that this version does not know has no default.
    unknown = compared([old, old | {"task.nothing": ""}])["differing"]
    assert [row["key"] for row in unknown] == ["task.nothing"]


def test_keys_of_data_that_is_read_mean_nothing_for_questions_that_are_made():
    made = {"task.name": "words", "task.split": "main", "reward.preset": "tunix"}
    assert compared([made, {"task.name": "words", "optimizer.lr": 1e-3}])["warning"] == ""
    read = made | {"task.path": "mine.jsonl"}
    assert "differ in task.split" in compared([read, read | {"task.split": "train"}])["warning"]


def test_one_file_that_runs_name_by_two_paths_is_no_difference(tmp_path):
    """A relative path begins in the folder that its run was started in."""
    project = tmp_path / "project"
    for folder, name, data, held_out, reward in (
        (project, "a", "data/train.jsonl", "./test.jsonl", "mine.py:f"),
        (project, "b", project / "data/train.jsonl", "test.jsonl", project / "mine.py:f"),
        (project / "below", "c", "../data/train.jsonl", "../test.jsonl", "../mine.py:f"),
        (project / "below", "d", "data/train.jsonl", "../test.jsonl", "mine.py:f"),
    ):
        settings = [
            f"run_name=runs/{name}",
            "task=custom",
            f"task.path={data}",
            f"task.eval_split={held_out}",
            f"reward={reward}",
        ]
        write_run(folder / f"outputs/runs/{name}", settings=settings)
    runs = [project / "outputs/runs/a", project / "outputs/runs/b"]
    runs += [project / "below/outputs/runs/c", project / "below/outputs/runs/d"]
    viewer = Viewer([str(run) for run in runs])
    try:
        record = viewer.answer("compare", {"runs": "a,b,c"})
        assert record["warning"] == "" and record["differing"] == []
        assert "differ in task.path" in viewer.answer("compare", {"runs": "b,d"})["warning"]
        chips = {row["name"]: dict(row["chips"]) for row in viewer.answer("home", {})["rows"]}
    finally:
        viewer.close()
    assert chips["a"]["task.path"] == "data/train.jsonl"  # since one of the four has another
    result = diff(DiffConfig(run=str(runs[0]), other=str(runs[1])))
    assert not {"task.path", "task.eval_split", "reward.functions"} & set(result["config"])


def test_of_runs_with_other_rewards_all_but_rewards_is_compared():
    found = compared([{"task.name": "words", "reward.functions": ["x"]}, {"task.name": "words"}])
    assert (
        "differ in reward.functions: their rewards cannot be compared; accuracies"
        in found["warning"]
    )


@pytest.mark.parametrize(
    ("key", "values", "part"),
    [
        ("reward.judge.model", ("large", "small"), "their rewards cannot be compared"),
        ("reward.overlong_penalty", (1.0, 0.5), "their rewards cannot be compared"),
        ("task.num_steps", (2, 3), "are of other questions"),
        ("task.num_eval_questions", (100, 500), ""),
        ("seed", (0, 1), ""),
        ("optimizer.lr", (1e-4, 1e-5), ""),
    ],
)
def test_what_of_two_runs_cannot_be_compared_follows_from_the_stages_of_the_keys(key, values, part):
    warning = compared([{"task.name": "words", key: value} for value in values])["warning"]
    assert part in warning and bool(warning) == bool(part)


def test_where_two_runs_first_differ(tmp_path):
    def changed(step: int) -> list:
        texts = ["no", "yes"] if step != 1 else ["no", "thus yes"]
        return [stored_group(step, 0, [0, 1], texts)]

    def first(*names: str) -> dict:
        return viewer.answer("compare", {"runs": ",".join(names)})["first"]

    for name, groups, settings in (
        ("a", lambda step: [stored_group(step, 0, [0, 1], ["no", "yes"])], []),
        (
            "b",
            changed,
            [
                "sampling.temperature=0.7",
                "optimizer.lr=0.1",
                "reward.workers=7",
                "reward=accuracy_reward",
                "sampling.max_prompt_tokens=99",
            ],
        ),
        ("c", None, ["sampling.temperature=0.7"]),
    ):
        write_run(tmp_path / name, 3, groups, spike=0 if name == "a" else 2, settings=settings)
    viewer = Viewer([str(tmp_path / name) for name in "abc"])
    for name in "abc":
        # a run's groups are read once somebody has opened it
        viewer.answer("overview", {"run": name})
    viewer.read_all()
    found = first("a", "b")
    assert (found["step"], found["stage"], found["file"], found["group"], found["completion"]) == (
        2,
        "sampling",
        "step_000002",
        0,
        1,
    )
    assert (
        found["causes"] == ["sampling.temperature", "reward.functions", "optimizer.lr"]
        and found["num_shared"] == 3
    )
    assert first("a", "c")["stage"] == "data"
    assert first("b", "c")["step"] is None  # their metrics are the same
    in_file = dict(one_file._records(viewer, ["3"]))
    assert {f"group&file=step_000002&group=0&run={name}" for name in "ab"} <= in_file.keys()
    (tmp_path / "b" / "groups" / "step_000002.parquet").unlink()
    viewer.read_all()
    found = first("a", "b")
    assert (found["step"], found["stage"], found["causes"]) == (2, None, [])
    viewer.close()


def test_a_run_that_collapses_got_worse_by_the_answers_of_its_evaluations(tmp_path):
    """Its reward in training rises. Without the answers, that alone is known, and named."""
    path = write_run(tmp_path / "collapsed", 12)
    before = np.linspace(0.1, 1, 24)
    after = np.full(24, 0.1)
    lines = []
    with RunWriter(path) as folder:
        for version, rewards in ((0, before), (12, after)):
            asked = []
            for row, reward in enumerate(rewards.tolist()):
                asked.append(stored_group(version, row, [reward], subset="held_out"))
            folder.write_groups(version, asked)
            figures = {"mean_reward": rewards.mean(), "num_questions": 24, "protocol": "greedy"}
            lines.append({"step": version, "name": "held_out", **figures})
    write_lines(path / "evaluations.jsonl", lines)
    (path / "summary.json").unlink()
    viewer = opened(path)
    try:
        found = viewer.answer("overview", {"run": "collapsed"})
        assert found["verdict"]["level"] == "bad"
        assert "got worse: held_out mean reward 0.55 → 0.1 in 12 steps" in found["verdict"]["text"]
        assert found["verdict"]["detail"].startswith(
            "Interval of the change: held_out mean reward -0.61 to -0.29 (99%, 24 questions"
        )
        assert found["table"][0][1:] == ["0.55", "0.1", "-0.45", -1]
        [row] = viewer.answer("home", {})["rows"]
        assert row["verdict"]["text"].startswith("got worse: held_out mean reward 0.55 → 0.1")
        (path / "groups/evaluate_held_out_000012.parquet").unlink()
        time.sleep(0.02)
        found = viewer.answer("overview", {"run": "collapsed"})
        assert "reward in training" in found["verdict"]["text"] + found["verdict"]["detail"]
        assert "held_out" not in found["verdict"]["text"] + found["verdict"]["detail"]
    finally:
        viewer.close()


def test_after_a_resume_with_another_reward_the_rewards_are_not_compared(tmp_path):
    path = write_run(tmp_path / "changed", 6, settings=["reward=accuracy_reward"], finished=False)
    write_lines(
        path / "evaluations.jsonl",
        [
            {
                "step": step,
                "name": "held_out",
                "accuracy": 0.5,
                "mean_reward": step / 10,
                "num_questions": 4,
            }
            for step in (0, 3, 6)
        ],
    )
    with RunWriter(path) as folder:
        folder.write_config(*texts_of(compose(Config, ["steps=6", "reward=format_reward"])[0]), 3)
    viewer = opened(path)
    try:
        found = viewer.answer("overview", {"run": "changed"})
        assert [row[1:] for row in found["table"]] == [
            ["50.0%", "50.0%", "+0.0 points", 0],
            ["0", "0.6", "", 0],
        ]
        assert found["table"][1][0] == "held_out mean reward (another reward since step 3)"
        assert found["drivers"] == [] and "reward" not in found["verdict"]["text"]  # of 3 steps
        assert found["reward_since"] == 3
        evaluations = viewer.runs["changed"].evaluations
        evaluations.lines = [
            replace(line, figures={"mean_reward": line.figures["mean_reward"]})
            for line in evaluations.lines
        ]
        _, since_change = evaluations.main_curve(RewardChanges(reward=3))
        assert since_change["x"] == [6] and evaluations.main_curve()[1]["x"][0] == 0
        del evaluations.lines[2:]  # no evaluation since the resume: both are of the first reward
        assert viewer.runs["changed"].run.before_after(evaluations, None)[0][3] == "+0.3"
    finally:
        viewer.close()


@pytest.mark.parametrize("change", ["reward=format_reward", "reward.weights=0.5"])
def test_an_accuracy_that_a_reward_judges_is_compared_since_its_function_changed(tmp_path, change):
    path = write_run(tmp_path / "changed", 6, settings=["reward=accuracy_reward"], finished=False)
    lines = []
    for step, accuracy in ((0, 0.9), (3, 0.8), (6, 0.1)):
        figures = {"accuracy": accuracy, "accuracy_interval": [accuracy - 0.05, accuracy + 0.05]}
        figures |= {"accuracy_by": "reward", "accuracy/sums": accuracy, "num_questions": 500}
        figures |= {"mean_reward": 0.5, "mean_reward/sums": 0.5}
        lines.append({"step": step, "name": "held_out", **figures})
    write_lines(path / "evaluations.jsonl", lines)
    settings = ["steps=6", "reward=accuracy_reward", change]
    with RunWriter(path) as folder:
        folder.write_config(*texts_of(compose(Config, settings)[0]), 3)
    is_judge = change == "reward=format_reward"
    viewer = opened(path)
    try:
        found = viewer.answer("overview", {"run": "changed"})
        changes = {row[0].partition(" (")[0]: row[3:] for row in found["table"]}
        expected = ["", 0] if is_judge else ["-80.0 points", -1]
        assert changes["held_out accuracy"] == expected
        assert changes["held_out accuracy/sums"][0] == expected[0]
        assert changes["held_out mean reward/sums"] == ["", 0]
        assert ("accuracy 90.0%" in found["verdict"]["text"]) != is_judge
        changes = RewardChanges(reward=3, functions=3 if is_judge else 0)
        _, curve = viewer.runs["changed"].evaluations.main_curve(changes)
        assert curve["x"] == ([6] if is_judge else [0, 3, 6])
    finally:
        viewer.close()


def test_runs_of_other_tasks_are_not_compared():
    found = compared([{"task.name": "words", "steps": 5}, {"task.name": "gsm8k", "steps": 6}])
    assert "task.name: their rewards, accuracies, groups and lengths" in found["warning"]
    assert [row["key"] for row in found["differing"]] == ["task.name", "steps"]
    assert compared([{"steps": 5}, {"steps": 6}])["warning"] == ""


# ---- lint


def cheating(step: int) -> list[Any]:
    """Groups whose faults are known: what is longer scores better, whatever is right."""
    long = "step by step " * 40
    texts = ["<answer>1</answer>", "", long, f"{long} <answer>2</answer>"]
    result = []
    for place in range(8):
        result.append(
            stored_group(
                step, place, [0.1, 0.2, 1.1, 1.2], texts, correct=[True, False, False, step == 0]
            )
        )
    return result


def test_discarded_groups_are_a_set_of_their_own(tmp_path, capsys):
    """No update used them, so what the page says of training leaves them out."""
    paths = [write_run(tmp_path / name, 6) for name in ("plain", "dynamic")]
    with RunWriter(paths[1]) as folder:
        for step in range(6):
            replaced = [stored_group(step, row, [0.1] * 4) for row in (step % 3, 40 + step)]
            folder.write_groups(step + 1, replaced, discarded=True)
    viewer = opened(*paths)
    try:
        asked = {one["name"]: one for one in viewer.answer("runs", {})["runs"]}
        assert not asked["plain"]["discarded"] and asked["dynamic"]["discarded"]
        for name in ("train", "held_out"):
            [plain, dynamic] = [rows(viewer, run, filter=f"set={name}") for run in asked]
            assert plain == dynamic
        of_discarded = rows(viewer, "dynamic", filter="set=discarded")
        assert len(of_discarded) == 12 and not rows(viewer, "plain", filter="set=discarded")
        assert {row["advantage"] for row in of_discarded} == {None}
        assert {row["staleness"] for row in of_discarded} == {0}
        [plain, dynamic] = [viewer.answer("lint", {"run": run})["findings"] for run in asked]
        assert plain == dynamic
        [plain, dynamic] = [viewer.answer("overview", {"run": run})["verdict"] for run in asked]
        assert plain == dynamic
        group = {"run": "dynamic", "file": "discarded_000002", "group": "1"}
        found = viewer.answer("group", group)
        assert (found["set"], found["row"], found["step"]) == ("discarded", 41, 2)
        assert (found["previous_file"], found["next_file"]) == (
            "discarded_000001",
            "discarded_000003",
        )
        # A prompt of training has both kinds, by step.
        for name in ("train", "discarded"):
            prompt = viewer.answer("prompt", {"run": "dynamic", "set": name, "row": "0"})
            assert [(one["step"], one["set"]) for one in prompt["groups"]] == [
                (1, "discarded"),
                (1, "train"),
                (4, "discarded"),
                (4, "train"),
            ]
        shared = viewer.answer("shared", {"run": "plain", "other": "dynamic"})
        assert shared["total"] == 2  # the questions of the evaluation
    finally:
        viewer.close()
    run = str(paths[1])
    assert cli.main(["groups", run, "step=2", "filter=set=discarded", "json=true"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert [group["subset"] for group in record["groups"]] == ["discarded"] * 2
    assert cli.main(["groups", run, "step=2", "filter=set=discarded"]) == 0
    assert "step 2, group 1 of discarded: row 41" in capsys.readouterr().out
    assert cli.main(["groups", run, "step=2", "json=true"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert [group["subset"] for group in record["groups"]] == ["train"] * 2


def test_lint_finds_what_is_wrong_and_links_to_it(tmp_path):
    viewer = opened(write_run(tmp_path / "cheat", 10, cheating))
    try:
        while not (found := viewer.answer("lint", {"run": "cheat"}))["done"]:
            pass
        levels = {one["kind"]: one for one in found["findings"]}
        for kind in ("length", "repeated", "wrong_best", "unvarying"):
            assert levels[kind]["level"] == "warning", kind
        assert "format never varies" in levels["unvarying"]["title"]
        example = levels["repeated"]["examples"][0]
        group = viewer.answer(
            "group", {"run": "cheat", "file": example["file"], "group": str(example["group"])}
        )
        assert "step by step" in group["completions"][example["completion"]]["text"]
        assert len(rows(viewer, "cheat", filter=levels["length"]["filter"])) == 80
        assert levels["empty"]["title"].endswith("of completions are empty (80)")
    finally:
        viewer.close()


def findings(path: Path) -> dict[str, dict[str, Any]]:
    viewer = opened(path)
    try:
        while not (found := viewer.answer("lint", {"run": path.name}))["done"]:
            pass
        return {one["kind"]: one for one in found["findings"]}
    finally:
        viewer.close()


def rewards_some(step: int) -> list[Any]:
    """A group whose function `format` gives 1 to one completion of four in the first ten steps, to
    three later, and None to the others."""
    scores = [1.0, 1.0, 1.0, np.nan] if step >= 10 else [1.0, np.nan, np.nan, np.nan]
    right = np.array([0.0, 1.0, 0.0, 1.0])
    group = stored_group(step, step % 3, right + 0.1 * np.nan_to_num(scores))
    components = {"correct": right, "format": np.array(scores)}
    return [replace(group, reward_components=components)]


def test_a_function_that_scores_some_completions_adds_what_the_reward_gains(tmp_path):
    viewer = opened(write_run(tmp_path / "some", 20, rewards_some))
    try:
        found = viewer.answer("overview", {"run": "some"})["drivers"]
        [row] = [row for row in found if row["function"] == "format"]
        assert (row["adds"], row["sign"]) == (pytest.approx(0.1 * (0.75 - 0.25)), 1)
        assert row["scored"] == [0.25, 0.75]
        [row] = [row for row in found if row["function"] == "correct"]
        assert row["scored"] is None
    finally:
        viewer.close()


def test_a_function_that_scores_some_completions_varies(tmp_path):
    """None adds 0 to the reward of a completion that another function scored."""
    path = write_run(tmp_path / "some", 40, rewards_some)
    assert "unvarying" not in findings(path)

    def alone(step: int) -> list[Any]:
        """None leaves a completion without a reward, so that nothing varies."""
        scores = np.array([1.0, np.nan, 1.0, 1.0])
        group = stored_group(step, step % 3, scores)
        return [replace(group, reward_components={"format": scores})]

    found = findings(write_run(tmp_path / "alone", 40, alone))
    assert found["unvarying"]["title"] == "format never varies"


def test_a_short_text_that_is_one_loop_repeats_itself(tmp_path):
    assert lint_view.repeats("2." * 32) and not lint_view.repeats(
        "16 - 3 - 4 = 9 eggs, 9 * 2 = 18. <answer>18</answer>"
    )
    found = findings(
        write_run(
            tmp_path / "loop", 3, lambda step: [stored_group(step, 0, [1.0] * 8, ["2." * 32] * 8)]
        )
    )
    assert found["repeated"]["title"] == "100.0% of completions repeat themselves (24)"


def test_a_single_digit_or_letter_is_an_answer(tmp_path):
    def groups(step: int) -> list[Any]:
        return [stored_group(step, 0, [0.1, 1.1, 0.1, 0.1], ["7", " B ", "四", "."])]

    found = findings(write_run(tmp_path / "short", 2, groups))
    assert found["empty"]["title"] == "25.0% of completions are empty (2)"


def test_nothing_is_said_on_right_answers_that_nobody_measured(tmp_path):
    def groups(step: int) -> list[Any]:
        return [replace(stored_group(step, 0, [0.1, 1.1]), correct=None)]

    path = write_run(tmp_path / "custom", 2, groups)
    for file in path.glob("groups/evaluate_*"):
        file.unlink()
    assert "wrong_best" not in findings(path) and "empty" in findings(path)
    for own, known in ((path, False), (write_run(tmp_path / "words", 2), True)):
        viewer = opened(own)
        assert viewer.answer("runs", {})["runs"][0]["measured"] is known
        viewer.close()


@pytest.mark.parametrize("answer", ["<answer>1</answer>", "\\boxed{1}", "Then:\n#### 1\n"])
def test_several_answers_are_counted_and_few_of_them_by_number(tmp_path, answer):
    def groups(step: int) -> list[Any]:
        texts = [answer] * 510 + ["<answer>1</answer></answer>", "#### 1. Eggs\n#### 1"]
        texts[0] = texts[0] * 2 if step == 0 else texts[0]
        return [stored_group(step, 0, [1.0] * 512, texts)]

    assert (
        findings(write_run(tmp_path / "several", 5, groups))["many_answers"]["title"]
        == "1 of 2,560 completions give several answers"
    )


@pytest.mark.slow
def test_answers_stand_in_a_tag_only_where_the_task_or_a_prompt_says_so(tmp_path):
    def groups(step: int) -> list[Any]:
        return [
            stored_group(
                step, 0, [0.1, 0.1, 0.1, 1.0], ["<answer>1</answer>"] * 3 + ["four words, no tag"]
            )
        ]

    assert findings(write_run(tmp_path / "own", 5, groups))["no_answer"]["title"].startswith(
        "25.0% of completions"
    )
    words = ["task=custom", "task.path=rows.jsonl", "reward=f.py:g"]
    assert "no_answer" not in findings(write_run(tmp_path / "custom", 5, groups, settings=words))


def test_lint_and_search_pass_over_what_is_null(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = write_run(tmp_path / "nulls", 3)
    for number, column in enumerate(("text", "group", "reward"), 1):
        file = path / "groups" / f"step_{number:06d}.parquet"
        table = pq.read_table(file)
        place = table.column_names.index(column)
        pq.write_table(
            table.set_column(place, column, pa.nulls(len(table), table.schema.field(place).type)),
            file,
        )
    viewer = opened(path)
    try:
        until = time.monotonic() + 20
        while (
            not (answer := viewer.answer("lint", {"run": "nulls"}))["done"]
            and time.monotonic() < until
        ):
            time.sleep(0.01)
        assert answer["done"] and answer["read"] == 3
        levels = {one["kind"]: one for one in answer["findings"]}
        assert levels["empty"]["title"].endswith("of completions are empty (8)")
        # two groups of step 3, four of evaluations; step 2 has no numbers
        assert found(viewer, "nulls", "answer") == 6
    finally:
        viewer.close()


# ---- damaged and hostile runs: one line each


def test_damaged_files_are_passed_over(tmp_path):
    path = write_run(tmp_path / "torn", 5)
    groups = path / "groups"
    whole = (groups / "step_000003.parquet").read_bytes()
    (groups / "step_000003.parquet").write_bytes(whole[: len(whole) // 2])
    (groups / "step_000004.parquet").write_bytes(b"PAR1 no parquet PAR1")
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"text": ["a"]}), groups / "step_000005.parquet")
    table = pq.read_table(groups / "step_000002.parquet")
    pq.write_table(
        table.set_column(
            table.column_names.index("token_ids"), "token_ids", pa.array(["x"] * len(table))
        ),
        groups / "step_000006.parquet",
    )
    (path / "summary.json").write_text('{"before": [')
    (path / "evaluations.jsonl").write_text(
        '[1]\n{"step": 0, "name": "held_out", "accuracy": "<b>"}\n'
    )
    viewer = opened(path)
    try:
        assert {row["step"] for row in rows(viewer, "torn", filter="set=train")} == {1, 2}
        said = problems(viewer)
        assert sum(text.startswith("groups/") for text in said) == 4
        assert any("lacks the column token_ids" in text for text in said)
        assert any("lacks the column" in text for text in said)
        assert any(
            text.startswith("summary.json: is damaged")
            for text in said + viewer.answer("overview", {"run": "torn"})["problems"]
        )
        for text in said:
            assert "\n" not in text
    finally:
        viewer.close()


def test_links_out_of_a_run_are_not_followed(tmp_path, run):
    path = write_run(tmp_path / "linked", 2)
    secret = tmp_path / "secret.jsonl"
    secret.write_text('{"step": 1, "secret": 42}\n')
    for name, target in (
        ("metrics.jsonl", secret),
        ("summary.json", secret),
        ("events.jsonl", secret),
        ("groups/step_000009.parquet", run / "groups" / "step_000001.parquet"),
    ):
        (path / name).unlink(missing_ok=True)
        (path / name).symlink_to(target)
    # a cycle
    (path / "groups" / "step_000008.parquet").symlink_to(path / "groups" / "step_000008.parquet")
    (path / "groups" / "loop").symlink_to(path)
    viewer = opened(path)
    try:
        overview = viewer.answer("overview", {"run": "linked"})
        assert (
            "secret" not in json.dumps(overview["topics"])
            and viewer.answer("curves", {"run": "linked"})["x"] == []
        )
        assert {row["step"] for row in rows(viewer, "linked", filter="set=train")} == {1, 2}
        assert sum("leads out of the run" in text for text in problems(viewer)) >= 3
        with pytest.raises(viewer.database.error):
            viewer.database.rows("SELECT * FROM read_text(?)", str(secret))
        with pytest.raises(viewer.database.error):
            viewer.database.run("SET enable_external_access = true")
    finally:
        viewer.close()


def test_hostile_metrics_are_read_without_harm(tmp_path):
    path = tmp_path / "metrics.jsonl"
    lines = [
        b'{"step": 1, "a": 1, "<script>": 2}',
        b'{"step": "x"}',
        b"[1, 2]",
        b"\xff\xfe",
        b"NaN",
        b'{"step": 1e999}',
        b'{"step": 2, "a": NaN, "b": 1e999, "c": true, "d": "text"}',
        b'{"a": ' + b"[" * 100_000,
        b'{"step": 3, "pad": "' + b"x" * (MAX_LINE_BYTES + 5_000_000) + b'"}',
        b'{"step": 4, "a": 4}',
        json.dumps({"step": 5, **{f"name{place}": place for place in range(2000)}}).encode(),
    ]
    path.write_bytes(b"\n".join(lines) + b'\n{"step": 6, "a"')
    run = StoredRun(tmp_path, "hostile", lenient=True)
    curves = Curves(run)
    while not curves.complete:
        curves.read()
    assert list(curves.steps) == [1, 2, 4, 5] and len(curves.columns) <= 400
    assert len(run.problems) == 1 and curves.thinned()["y"]["<script>"][0] == 2


def test_a_small_file_cannot_stand_for_billions_of_settings():
    letters = "abcdefghijklmnop"
    bomb = "a: &a [x, x]\n" + "".join(
        f"{b}: &{b} [*{a}, *{a}]\n" for a, b in itertools.pairwise(letters)
    )
    with pytest.raises(ValueError, match="aliases"):
        flat_yaml(bomb)
    with pytest.raises(ValueError):
        flat_yaml("!!python/object/apply:os.system ['true']")
    assert flat_yaml("steps: 5\ntask: {name: words, columns: {}}") == {
        "steps": 5,
        "task.name": "words",
        "task.columns": {},
    }


@pytest.mark.parametrize(
    "text",
    [
        "a: " + "{a: " * 20_000 + "}" * 20_000,
        "- " * 20_000,
        "? " * 20_000,
        "a: " + "[" * 20_000,
        "steps: 0x" + "f" * 5_000,
        "steps: " + "9" * 5_000,
        "steps: 1" + ":1" * 50_000,
        "lr: 1" + ":1" * 50_000 + ".5",
        "{" + "a," * 60_000 + "}",
        "steps: !!int ''",
        "steps: !!bool foo",
        "steps: !!timestamp foo",
        "a: !!float {}",
    ],
)
def test_settings_of_any_depth_and_length_are_refused_at_once(text):
    started = time.process_time()
    with pytest.raises(ValueError):
        flat_yaml(text)
    assert time.process_time() - started < 5


def test_a_hostile_run_leaves_the_others_to_be_seen(tmp_path):
    good, deep, long = (
        write_run(tmp_path / name, 2, finished=False) for name in ("good", "deep", "long")
    )
    (deep / "config.yaml").write_text("a: " + "{a: " * 20_000 + "}" * 20_000)
    (deep / "summary.json").write_text('{"before": ' + "[" * 500 + "]" * 500 + "}")
    (long / "config.yaml").write_text("steps: 0x" + "f" * 5_000)
    write_lines(
        long / "evaluations.jsonl",
        [
            {"step": 0, "name": "held_out", "accuracy": 10**400},
            {"step": 10**400, "name": "held_out", "accuracy": 1},
        ],
    )
    with (long / "metrics.jsonl").open("a") as file:
        file.write(
            '{"step": ' + "9" * 5_000 + '}\n{"step": NaN}\n{"step": 3, "kl": ' + "9" * 400 + "}\n"
        )
    viewer = opened(good, deep, long)
    try:
        with TestClient(make_app(viewer), base_url="http://127.0.0.1:8700") as client:
            assert [one["progress"]["step"] for one in client.get("/api/runs").json()["runs"]] == [
                2,
                2,
                2,
            ]
            for name in ("deep", "long"):
                assert client.get(f"/api/overview?run={name}").status_code == 200
        assert {text.partition(":")[0] for text in problems(viewer)} == {
            "config.yaml",
            "summary.json",
            "evaluations.jsonl",
            "metrics.jsonl",
        }
    finally:
        viewer.close()


# ---- which runs


def test_runs_are_found_by_folder_and_named_apart(tmp_path, monkeypatch):
    for day in ("a", "b"):
        write_run(tmp_path / day / "same", 1)
    assert [run.name for run in open_runs([str(tmp_path)])] == ["a/same", "b/same"]
    assert [run.name for run in open_runs([str(tmp_path / "a" / "same")])] == ["same"]
    sweep = [write_run(tmp_path / "sweep" / number, 1) for number in "01"]
    assert [run.name for run in open_runs([str(sweep[0].parent)])] == ["sweep/0", "sweep/1"]
    assert [run.name for run in open_runs([str(tmp_path / "a"), str(tmp_path / "b")])] == [
        "a/same",
        "b/same",
    ]
    shutil.rmtree(tmp_path / "sweep")
    (tmp_path / "empty").mkdir()
    assert open_runs([str(tmp_path / "empty")]) == []
    timed = [write_run(tmp_path / "2026-07-30" / time, 1) for time in ("19-29-57", "19-29-57-1")]
    # a time says of no day
    assert [run.name for run in open_runs([str(timed[0])])] == ["2026-07-30/19-29-57"]
    assert [run.name for run in open_runs([str(timed[0].parent)])] == [
        f"2026-07-30/{run.name}" for run in timed
    ]
    with pytest.raises(ShoalError, match="there is no such folder"):
        open_runs([str(tmp_path / "nowhere")])
    monkeypatch.chdir(tmp_path / "empty")
    with pytest.raises(
        ShoalError, match="no run under outputs: name a run, or the folder that runs are in"
    ):
        open_runs([])
    os.utime(write_run(tmp_path / "empty" / "outputs" / "old", 1) / "config.yaml", (1, 1))
    write_run(tmp_path / "empty" / "outputs" / "new", 1)
    assert [run.name for run in open_runs([])] == ["new"]


def test_runs_that_begin_after_the_page_are_listed(tmp_path):
    write_run(tmp_path / "a" / "same", 1)
    viewer = opened(tmp_path)
    try:
        viewer.find_new_runs()
        assert list(viewer.runs) == ["a/same"]
        write_run(tmp_path / "b" / "same", 2)
        viewer.find_new_runs()
        viewer.read_all()
        assert [one["name"] for one in viewer.answer("runs", {})["runs"]] == ["a/same", "b/same"]
        assert len(rows(viewer, "b/same", filter="set=train")) == 4 and not problems(viewer)
        shutil.rmtree(tmp_path)
        viewer.find_new_runs()
        assert "there is no such folder" in viewer.answer("runs", {})["notice"]
    finally:
        viewer.close()


def test_the_list_of_runs_says_which_one_looks_hacked(tmp_path):
    write_run(tmp_path / "fine", 12)
    write_lines(
        write_run(tmp_path / "hacked", 12) / "evaluations.jsonl",
        [
            {
                "step": step,
                "name": "held_out",
                "accuracy": share,
                "num_questions": 500,
                "accuracy_interval": list(wilson_interval(500 * share, 500)),
            }
            for step, share in ((0, 0.6), (12, 0.2))
        ],
    )
    viewer = Viewer([str(tmp_path)])
    viewer.start()
    said = {}
    for row in viewer.answer("home", {})["rows"]:
        said[row["name"]] = row["verdict"]
    viewer.close()
    assert said["hacked"]["level"] == "bad" and said["hacked"]["text"].endswith(
        "accuracy -40.0 points: looks hacked"
    )
    assert said["fine"]["level"] == "note"


def test_an_empty_folder_has_a_home_that_fills(tmp_path):
    viewer = Viewer([str(tmp_path)])
    try:
        viewer.start()
        assert viewer.answer("home", {})["rows"] == []
        assert (
            "none of its folders is a run yet" in viewer.answer("runs", {})["notice"]
            and viewer.has_home
        )
        write_run(tmp_path / "first", 1)
        viewer.find_new_runs()
        viewer.refresh()
        assert [row["name"] for row in viewer.answer("home", {})["rows"]] == [
            "first"
        ] and not viewer.notice
    finally:
        viewer.close()
    (tmp_path / "none").mkdir()
    with pytest.raises(ShoalError, match="none of these folders is a run, and a file needs one"):
        one_file.write_page(ViewConfig(runs=(str(tmp_path / "none"),)), tmp_path / "page.html")


def test_of_more_runs_than_fit_on_a_page_the_newest_are_shown(tmp_path, monkeypatch):
    def began(name: str, seconds: int) -> None:
        os.utime(write_run(tmp_path / name, 1) / "config.yaml", (seconds, seconds))

    monkeypatch.setattr(views_module, "MAX_RUNS", 2)
    for seconds, name in enumerate(("c", "a", "b"), 1):
        began(name, seconds)
    viewer = opened(tmp_path)
    try:
        assert set(viewer.runs) == {"a", "b"} and viewer.notice.startswith(
            "3 runs found: the newest 2 are shown"
        )
        began("d", 9)
        viewer.find_new_runs()
        assert [row["name"] for row in viewer.answer("home", {})["rows"]] == ["d", "b"]
        assert viewer.answer("runs", {})["notice"].startswith("4 runs found")
        shutil.rmtree(tmp_path / "a")
        shutil.rmtree(tmp_path / "c")
        viewer.find_new_runs()
        assert not viewer.notice and len(rows(viewer, "b")) == 6
    finally:
        viewer.close()


def test_a_copied_run_began_when_its_folders_name_says(tmp_path):
    times = ["2026-11-22/20-00-00", "2026-11-23/08-30-05", "copies/2026-11-23/08-30-05"]
    first, second, copied = (StoredRun(write_run(tmp_path / name, 1)) for name in times)
    os.utime(first.path / "config.yaml", (0, 0))
    assert second.began == copied.began == first.began + 12.5 * 3600 + 5
    assert _newest(str(tmp_path)) in (str(second.path), str(copied.path))


def test_settings_that_cannot_be_served(run):
    with pytest.raises(
        ShoalError, match="whoever reaches this address could read the runs and write notes; set"
    ):
        view(ViewConfig((str(run),), host="0.0.0.0"))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(ShoalError, match="choose another port"):
            listen("127.0.0.1", taken.getsockname()[1])
    listen("127.0.0.1", 0).close()


# ---- the server


@pytest.fixture(scope="module")
def client(viewer):
    with TestClient(make_app(viewer), base_url="http://127.0.0.1:8700") as client:
        yield client


def test_the_page_and_its_headers(client):
    answer = client.get("/")
    assert answer.status_code == 200 and "<script" in answer.text
    policy = answer.headers["content-security-policy"]
    assert (
        "default-src 'none'" in policy
        and "unsafe" not in policy
        and "frame-ancestors 'none'" in policy
    )
    for name, data in page_files().items():
        answer = client.get(f"/static/{name}")
        assert answer.content == data and answer.headers["x-content-type-options"] == "nosniff"
        assert "javascript" in answer.headers["content-type"] or not name.endswith(".js")


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"host": "localhost:9"}, 200),
        ({"host": "[::1]:8700"}, 200),
        ({"host": "evil.example"}, 403),
        ({"host": "127.0.0.1.evil.example"}, 403),
        ({"host": "[::1].evil.com"}, 403),
        ({"host": "evil.example:127.0.0.1"}, 403),
        ({"host": ""}, 403),
        ({"origin": "http://127.0.0.1:8700"}, 200),
        ({"origin": "http://evil.example"}, 403),
        ({"origin": "null"}, 403),
        ({"sec-fetch-site": "cross-site"}, 403),
        ({"sec-fetch-site": "same-origin"}, 200),
    ],
)
def test_only_this_machine_and_this_page_are_answered(client, headers, status):
    assert client.get("/api/runs", headers=headers).status_code == status


def test_a_token_is_asked_for_where_one_was_set(viewer):
    with TestClient(make_app(viewer, "secret"), base_url="http://elsewhere:8700") as client:
        assert client.get("/").status_code == 200  # the page itself says nothing of a run
        assert client.get("/api/runs").status_code == 401
        assert client.get("/api/runs", headers={"x-shoal-token": "wrong"}).status_code == 401
        assert client.get("/api/runs", headers={"x-shoal-token": "secret"}).status_code == 200


@pytest.mark.parametrize(
    "path",
    [
        "/static/../server.py",
        "/static/..%2fserver.py",
        "/static/%2e%2e/viewer.py",
        "/config.yaml",
        "/static//etc/passwd",
        "/static/LICENSE.txt",
        "/api/",
        "/api/overview/first",
    ],
)
def test_no_file_is_reached_by_its_path(client, path):
    answer = client.get(path)
    assert answer.status_code in (400, 404) and "import" not in answer.text


@pytest.mark.slow
def test_random_requests_are_refused_in_order(client):
    viewing = load("benchmarks/viewing.py")
    chance, statuses = random.Random(1), Counter()
    for _ in range(400):
        method, path, headers = viewing.fuzz_request(chance, ["first"])
        answer = client.request(
            method, path, headers={name.lower(): value for name, value in headers.items()}
        )
        statuses[answer.status_code] += 1
        assert answer.status_code < 500, (method, path, answer.text)
        assert "root:x:0" not in answer.text
        if answer.status_code >= 400 and method != "HEAD" and path.startswith("/api"):
            assert "\n" not in answer.json()["error"]
    assert statuses[200] > 20 and statuses[400] > 50


def test_names_of_hosts():
    hosts = {
        "LocalHost:80": "localhost",
        "[::1]:80": "::1",
        "[::1]": "::1",
        "a:b": "",
        "": "",
        "x": "x",
        "[::1].evil.com": "",
        "[::1]x:80": "",
        "[::1": "",
        "a:1:2": "",
    }
    assert {text: host_name(text) for text in hosts} == hosts


# ---- one file


def test_modules_become_one_script():
    files = {name: data.decode() for name, data in page_files().items()}
    assert set(one_file.MODULES) == {name for name in files if name.endswith(".js")}
    own = [files[name] for name in one_file.MODULES]
    names = [
        found
        for text in own
        for found in re.findall(
            r"^(?:export )?(?:async )?(?:function|class|const|let)\s+(\w+)", text, re.MULTILINE
        )
    ]
    assert not [name for name, times in Counter(names).items() if times > 1]
    script = one_file.script_of(files)
    assert not re.search(r"^(import|export)\b", script, re.MULTILINE)
    for text in own:
        assert not re.search(
            r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(|new Function|\.style\b",
            text,
        )


@pytest.mark.slow
def test_a_page_in_one_file(tmp_path, capsys):
    path = write_run(
        tmp_path / "sent", 3, lambda step: [stored_group(step, 0, [0, 0.1, 1, 1.1], HOSTILE)]
    )
    to = tmp_path / "page.html"
    assert cli.main(["view", str(path), f"to={to}", "groups=1,2:0"]) == 0
    page = to.read_text()
    assert page.count("<script") == 2 + sum(
        data.count(b"<script") for name, data in page_files().items() if name.endswith(".js")
    )
    assert 'http-equiv="Content-Security-Policy"' in page and "unsafe-inline" not in page
    assert not re.search(r"(src|href)=\"(http|/)", page)
    pattern = r'<script type="application/json" id="data">(.*?)</script>'
    embedded = re.search(pattern, page, re.DOTALL)
    assert embedded is not None
    found = json.loads(embedded[1])
    assert [row["step"] for row in found["records"]["groups&run=sent"]["rows"]] == [1, 2]
    assert (
        found["records"]["group&file=step_000001&group=0&run=sent"]["completions"][0]["text"]
        == HOSTILE[0]
    )
    assert cli.main(["view", str(path), f"to={to}"]) == 2 and "exists" in capsys.readouterr().err
    assert cli.main(["view", str(path), f"to={to}x", "groups=9"]) == 2
    assert "groups: sent has none with set=train step=9" in capsys.readouterr().err
    assert cli.main(["view", str(path), f"to={to}x", "groups=x"]) == 2
    assert "expected a step (12)" in capsys.readouterr().err


@pytest.mark.slow
def test_the_terminal_prints_the_same_table(viewer, run, capsys):
    assert cli.main(["groups", str(run), "sort=reward", "filter=set=train step>38", "limit=3"]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0].split() == [
        "step",
        "group",
        "set",
        "reward",
        "spread",
        "pass",
        "length",
        "truncated",
        "staleness",
        "correct",
        "format",
        "prompt",
    ]
    assert [line.split()[:4] for line in out[1:4]] == [
        ["39", "0", "train", "0.6"],
        ["40", "0", "train", "0.6"],
        ["39", "1", "train", "0.1"],
    ]
    assert cli.main(["groups", str(run), "filter=set=train step>38", "json=true"]) == 0
    assert json.loads(capsys.readouterr().out)["groups"] == rows(
        viewer, filter="set=train step>38", desc=1
    )
    assert cli.main(["groups", str(run), "limit=10001"]) == 2
    assert "limit=10001: expected at most 10000" in capsys.readouterr().err.replace(
        "; expected", ": expected"
    )
    assert cli.main(["groups", str(run), "sort=nothing"]) == 2
    assert "there is no column 'nothing'" in capsys.readouterr().err


def test_a_missing_package_is_named(run, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "duckdb", None)
    for words, more in (
        (["view", str(run)], ""),
        (["view", str(run), "to=x.html"], ""),
        (["groups", str(run)], "step=1 prints"),
    ):
        assert cli.main(words) == 2
        said = capsys.readouterr().err
        assert "pip install '.[view]'` in the clone" in said and more in said


def test_nothing_is_left_running(viewer):
    before = set(threading.enumerate())
    other = opened(viewer.runs["first"].run.path)
    other.start()
    other.close()
    assert not [thread.name for thread in set(threading.enumerate()) - before if thread.is_alive()]


def test_old_searches_are_dropped(viewer):
    for text in "abcdefa":
        assert found(viewer, "first", text) == 84 if text in "ae" else True
    tables = viewer.database.rows(
        "SELECT table_name AS name FROM duckdb_tables() WHERE table_name LIKE 'hits%'"
    )
    assert len(tables) == 4
