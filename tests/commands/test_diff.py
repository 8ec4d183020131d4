"""Where two runs diverge, and the key that caused it: whole runs, and stored steps that differ in
one place."""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tiny_runs import Workshop, metrics, read_lines, rewrite_groups

from shoal.commands.diff import diff, exact_figure, likely_cause
from shoal.config.commands import DiffConfig
from shoal.config.key import STAGES, keys_of, open_keys
from shoal.config.sections.reward import RewardSection
from shoal.config.sections.task import TaskSection
from shoal.config.stored import texts_of
from shoal.config.train import Config
from shoal.records import Completion, Example, Group, Purpose, ShoalError, StopReason
from shoal.runs.compare import (
    GroupDifference,
    SettingDifference,
    automatic_keys,
    chosen_differences,
    find_divergence,
    likely_keys,
    step_difference,
    without_idle_limits,
)
from shoal.runs.groups import StoredGroup
from shoal.runs.reader import read_decisions, read_requested, short_name
from shoal.runs.reward_changes import RewardChanges
from shoal.tasks.task import TASKS, load_by_name


@pytest.fixture(scope="module")
def first(workshop) -> Path:
    return workshop.train("first", "task.num_eval_questions=2", "train.pass_k=0")


def compared(a: Path, b: Path) -> dict:
    result = diff(DiffConfig(run=str(a), other=str(b)))
    assert json.loads(json.dumps(result, allow_nan=False)) == result
    return result


def trained(workshop: Workshop, name: str, *changes: str) -> Path:
    return workshop.train(name, "task.num_eval_questions=2", "train.pass_k=0", *changes)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (float(np.float32(2e-4)), "0.0002"),
        (float(np.float32(1) / 3), "0.33333334"),
        (1 / 3, "0.333333333"),
        (1e300, "1e+300"),
        (2.0, "2"),
        (float("nan"), "nan"),
        (None, "-"),
        (7, "7"),
    ],
)
def test_a_figure_has_the_fewest_digits_that_tell_it_apart(value, text):
    assert exact_figure(value) == text


@pytest.mark.parametrize(
    ("one", "other", "names"),
    [
        ("outputs/first", "outputs/second", ("first", "second")),
        ("sweep/0", "sweep/1", ("sweep/0", "sweep/1")),
        ("a/0", "b/0", ("a/0", "b/0")),
        ("a/x/0", "b/x/0", ("a/x/0", "b/x/0")),
        ("a/x", "a/x", ("x", "x")),
        ("a/0", "b/x", ("a/0", "x")),
    ],
)
def test_runs_are_named_by_what_tells_them_apart(one, other, names):
    assert tuple(short_name(Path(run), [Path(one), Path(other)]) for run in (one, other)) == names


def test_the_same_run_twice_is_identical(workshop, first, capsys):
    result = compared(first, trained(workshop, "second"))
    assert (
        result["identical"] is True and result["divergence"] is None and result["likely_keys"] == []
    )
    assert result["steps_compared"] == result["group_steps_compared"] == "1-2"
    assert list(result["config"]) == ["run_name"]
    assert "identical over steps 1-2 and 2 evaluations, clocks aside" in capsys.readouterr().out


@pytest.mark.slow
def test_a_learning_rate_acts_at_the_end_of_the_first_step(workshop, first, capsys):
    other = trained(workshop, "rate", "optimizer.lr=2e-2")
    result = compared(first, other)
    assert result["identical"] is False
    assert (result["divergence"]["stage"], result["divergence"]["step"]) == ("update", 1)
    assert result["first_metrics"]["step"] == 1
    assert result["first_metrics"]["metrics"] == {"lr": pytest.approx([0.01, 0.02])}
    assert result["first_group_difference"] is None and result["likely_keys"] == ["optimizer.lr"]
    assert "the likeliest cause is optimizer.lr" in capsys.readouterr().out


def edited(
    run: Path,
    folder: Path,
    setting: tuple[str, str],
    change: Callable[[list[StoredGroup]], list[StoredGroup]] = list,
) -> Path:
    """A copy with another setting and what it would have done to the groups of its first step."""
    copy = shutil.copytree(run, folder / "copy")
    config = copy / "config.yaml"
    assert setting[0] in config.read_text()
    config.write_text(config.read_text().replace(*setting))
    # A run stores no decision for a key that was set.
    requested = read_requested(copy)
    still_open = open_keys(requested)
    decisions = {}
    for key, decision in read_decisions(copy).items():
        if key in still_open:
            decisions[key] = decision
    (copy / "decided.yaml").write_text(texts_of(requested, decisions)[1])
    rewrite_groups(copy / "groups" / "step_000001.parquet", change)
    return copy


def with_completion(stored: StoredGroup, index: int, **changes) -> StoredGroup:
    """The group with one completion changed."""
    completions = list(stored.group.completions)
    completions[index] = dataclasses.replace(completions[index], **changes)
    return dataclasses.replace(
        stored, group=dataclasses.replace(stored.group, completions=tuple(completions))
    )


def test_another_seed_gives_other_prompts(first, tmp_path):
    def other_row(stored: list[StoredGroup]) -> list[StoredGroup]:
        example = dataclasses.replace(stored[1].group.example, row=19)
        return [
            stored[0],
            dataclasses.replace(
                stored[1], group=dataclasses.replace(stored[1].group, example=example)
            ),
        ]

    copy = edited(first, tmp_path, ("seed: 0", "seed: 1"), other_row)
    (copy / "metrics.jsonl").write_text(json.dumps(metrics(first)[0]) + "\n")
    (copy / "groups" / "step_000002.parquet").unlink()
    result = compared(first, copy)
    assert result["divergence"] == {
        "step": 1,
        "stage": "data",
        "sentence": "the data or its order differs first, at step 1",
    }
    assert result["likely_keys"] == ["seed"] == list(result["config"])
    assert result["num_steps"] == [2, 1] and result["steps_compared"] == "1"
    place = result["first_group_difference"]
    assert (place["what"], place["group"], place["values"][1]) == ("data row", 1, 19)


def test_another_temperature_gives_other_tokens(first, tmp_path, capsys):
    def other_token(stored: list[StoredGroup]) -> list[StoredGroup]:
        ids = stored[0].group.completions[2].token_ids.copy()
        rewards = stored[1].group.rewards.copy()
        ids[5] += 1
        rewards[0] = 7.0
        rewarded = dataclasses.replace(
            stored[1], group=dataclasses.replace(stored[1].group, rewards=rewards)
        )
        return [with_completion(stored[0], 2, token_ids=ids), rewarded]

    result = compared(
        first, edited(first, tmp_path, ("temperature: 1.0", "temperature: 0.5"), other_token)
    )
    place = result["first_group_difference"]
    assert result["divergence"]["stage"] == place["stage"] == "sampling"
    assert (place["group"], place["completion"], place["token"]) == (0, 2, 5)
    assert place["values"][1] == place["values"][0] + 1 and result["likely_keys"] == [
        "sampling.temperature"
    ]
    assert "group 0, completion 2, token 5: token is" in capsys.readouterr().out


def test_a_limit_that_is_first_felt_later_is_no_difference_of_weights(first, tmp_path):
    def shorter(stored: list[StoredGroup]) -> list[StoredGroup]:
        completions = stored[0].group.completions
        longest = max(completions, key=len)
        arrays = []
        for i, one in enumerate(stored[0].token_arrays):
            arrays.append(
                {name: values[:-1] for name, values in one.items()} if i == longest.index else one
            )
        names = ("token_ids", "logprobs", "loss_mask", "versions")
        changed = with_completion(
            stored[0], longest.index, **{name: getattr(longest, name)[:-1] for name in names}
        )
        return [dataclasses.replace(changed, token_arrays=tuple(arrays)), *stored[1:]]

    copy = edited(first, tmp_path, ("max_completion_tokens: 12", "max_completion_tokens: 11"))
    rewrite_groups(copy / "groups" / "step_000002.parquet", shorter)
    result = compared(first, copy)
    assert result["divergence"] == {
        "step": 2,
        "stage": "sampling",
        "sentence": "sampling differs first, at step 2",
    }
    assert result["likely_keys"] == ["sampling.max_completion_tokens"]


def test_evaluations_are_compared_too(first, tmp_path, capsys):
    copy = shutil.copytree(first, tmp_path / "copy")
    lines = read_lines(copy / "evaluations.jsonl")
    name, value = next(
        (name, value) for name, value in lines[-1].items() if isinstance(value, float)
    )
    lines[-1][name] = value + 1
    (copy / "evaluations.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    result = compared(first, copy)
    assert result["identical"] is False and result["divergence"]["stage"] == "evaluation"
    assert result["first_evaluation"]["version"] == 2 == result["divergence"]["step"]
    assert result["first_evaluation"]["figures"] == {name: [value, value + 1]}
    assert "the steps are identical, the evaluation after step 2" in capsys.readouterr().out
    (copy / "evaluations.jsonl").write_text(json.dumps(lines[0]) + "\n")
    result = compared(first, copy)
    assert result["identical"] is True and result["evaluations_compared"] == 1
    assert "of which 1 of the same step and data set are compared" in capsys.readouterr().out


def test_a_damaged_line_of_evaluations_is_named(first, tmp_path):
    copy = shutil.copytree(first, tmp_path / "copy")
    with (copy / "evaluations.jsonl").open("a") as file:
        file.write('{"foo": 1}\n' + (copy / "evaluations.jsonl").read_text())
    with pytest.raises(ShoalError, match=r"evaluations.jsonl, line \d+ is damaged"):
        compared(first, copy)


def test_runs_that_are_cut_or_have_no_groups(first, tmp_path, capsys):
    copy = shutil.copytree(first, tmp_path / "copy")
    text = (copy / "metrics.jsonl").read_text()
    (copy / "metrics.jsonl").write_text(text[:-9])
    (copy / "summary.json").unlink()
    result = compared(first, copy)
    assert (
        result["identical"] is True
        and result["num_steps"] == [2, 1]
        and result["finished"] == [True, False]
    )
    assert "copy has not finished" in capsys.readouterr().out
    shutil.rmtree(copy / "groups")
    rows = metrics(first)
    rows[1]["reward/mean"] += 1
    (copy / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    result = compared(first, copy)
    assert result["divergence"]["step"] == 2 and result["divergence"]["stage"] == "rewards"
    assert "only metrics are compared" in capsys.readouterr().out
    (copy / "metrics.jsonl").unlink()
    assert compared(first, copy)["identical"] is False
    assert "nothing can be compared" in capsys.readouterr().out
    with pytest.raises(ShoalError, match="is not a run folder"):
        compared(first, tmp_path)


# ---- one step


def stored(**changes) -> StoredGroup:
    ids = np.array([4, 5, 6], np.int32)
    completions = tuple(
        Completion(
            0,
            i,
            ids,
            np.array([-1, -2, -3], np.float32),
            np.ones(3, bool),
            np.full(3, 1, np.int32),
            StopReason.EOS,
        )
        for i in range(2)
    )
    group = Group(
        Purpose.TRAIN,
        1,
        1,
        Example(7, "prompt", {"answer": "5"}),
        np.array([1, 2], np.int32),
        completions,
        ("a", "b"),
        np.array([1.0, np.nan]),
        {"f": np.array([1.0, np.nan])},
        np.array([True, False]),
    )
    beside = {}
    for name in ("advantages", "token_arrays"):
        if name in changes:
            beside[name] = changes.pop(name)
    arrays = ({"trainer_logprobs": np.array([-1, -2, -3], np.float32)}, {})
    return dataclasses.replace(
        StoredGroup(dataclasses.replace(group, **changes), np.array([0.5, 0.0]), arrays), **beside
    )


def changed_completions(index: int, **changes) -> tuple[Completion, ...]:
    """The completions, one of them changed."""
    both = list(stored().group.completions)
    both[index] = dataclasses.replace(both[index], **changes)
    return tuple(both)


OTHER = np.array([-1, -2, np.nextafter(np.float32(-3), np.float32(0))], np.float32)


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({"example": Example(8, "prompt", {"answer": "5"})}, ("data", "data row", None, None)),
        ({"example": Example(7, "prompt", {"answer": "6"})}, ("data", "data column", None, None)),
        ({"prompt_ids": np.array([1, 3], np.int32)}, ("data", "prompt token", None, 1)),
        (
            {"completions": changed_completions(1, token_ids=np.array([4, 9, 6], np.int32))},
            ("sampling", "token", 1, 1),
        ),
        ({"completions": changed_completions(0, logprobs=OTHER)}, ("sampling", "log-prob", 0, 2)),
        (
            {
                "completions": changed_completions(
                    0, token_ids=np.array([4], np.int32), logprobs=np.array([-1], np.float32)
                )
            },
            ("sampling", "length", 0, 1),
        ),
        (
            {"completions": changed_completions(1, stop_reason=StopReason.LENGTH)},
            ("sampling", "stop reason", 1, None),
        ),
        (
            {
                "completions": changed_completions(
                    0, token_ids=np.array([4, 9, 6], np.int32), loss_mask=np.arange(3) != 1
                )
            },
            ("sampling", "context token", 0, 1),
        ),
        (
            {"completions": changed_completions(1, prompt_ids=np.array([1, 8], np.int32))},
            ("sampling", "token of an environment's prompt", 1, 0),
        ),
        (
            {"completions": changed_completions(1, messages=({"role": "tool", "content": "5"},))},
            ("sampling", "message", 1, None),
        ),
        (
            {"completions": changed_completions(0)[:1]},
            ("sampling", "number of completions", 1, None),
        ),
        ({"rewards": np.array([1.5, np.nan])}, ("rewards", "reward", 0, None)),
        ({"rewards": np.array([1.0, 2.0])}, ("rewards", "reward", 1, None)),
        ({"reward_components": {"f": np.array([2.0, np.nan])}}, ("rewards", "rewards/f", 0, None)),
        ({"valid": np.array([True, True])}, ("rewards", "valid", 1, None)),
        ({"advantages": np.array([0.5, 0.1])}, ("update", "advantage", 1, None)),
        ({"token_arrays": ({"trainer_logprobs": OTHER}, {})}, ("update", "trainer_logprobs", 0, 2)),
        ({"token_arrays": ({}, {})}, ("update", "trainer_logprobs", 0, 0)),
    ],
)
def test_the_first_place_of_a_step_is_found_by_stage(changes, wanted):
    # group 1: rewards come after sampling, whatever the group
    late = stored(rewards=np.array([3.0, np.nan]))
    found = step_difference(4, [stored(), stored(**changes)], [stored(), stored()])
    assert found is not None
    assert (found.step, found.group, found.stage, found.what, found.completion, found.token) == (
        4,
        1,
        *wanted[:2],
        *wanted[2:],
    )
    if wanted[0] in ("data", "sampling"):
        again = step_difference(4, [late, stored(**changes)], [stored(), stored()])
        assert again is not None and (again.stage, again.group) == (wanted[0], 1)
    assert step_difference(4, [stored()], [stored()]) is None


def test_a_step_with_more_groups():
    found = step_difference(1, [stored()], [stored(), stored()])
    assert found == GroupDifference(1, "data", "number of groups", 1, values=(1, 2))


def differing(*keys: str) -> list[SettingDifference]:
    """Settings that differ, whatever their values are."""
    return [SettingDifference(key, ()) for key in keys]


def test_the_stage_that_differs_first():
    token = GroupDifference(3, "sampling", "token", 0, 0, 0)
    assert find_divergence(None, None, None, [1]) is None
    weights = find_divergence(token, 2, None, [1, 2, 3])
    assert (
        weights is not None
        and weights.stages == ("update", "sampling")
        and "version 2" in weights.sentence
    )
    unseen = find_divergence(token, 2, None, [1, 3])
    assert unseen is not None and unseen.stages == ("update", "sampling")
    assert "not all groups of steps 1 to 2 were compared" in unseen.sentence
    warmer = find_divergence(token, 2, None, [1, 2, 3], differing("sampling.temperature"))
    assert warmer is not None and warmer.stages == ("sampling", "update")
    assert "equal in all else" not in warmer.sentence
    rate = find_divergence(token, 2, None, [1, 2, 3], differing("optimizer.lr", "run_name"))
    assert rate is not None and rate.sentence == weights.sentence
    for what in ("length", "stop reason", "number of completions"):
        ends = find_divergence(GroupDifference(3, "sampling", what, 0, 0, 0), 2, None, [1, 2, 3])
        assert ends is not None and ends.stages == ("sampling",)
        assert ends.sentence == "sampling differs first, at step 3"
    answered = find_divergence(
        GroupDifference(3, "sampling", "context token", 0, 0, 4), 2, None, [1, 2, 3]
    )
    assert answered is not None and answered.stages == ("environment",)
    assert answered.sentence == "what tools or environments said differs first, at step 3"
    first_weights = find_divergence(token, 0, None, [1])
    assert first_weights is not None and first_weights.stages == ("sampling",)
    update = find_divergence(None, None, (2, {"grad_norm": (1, 2)}), [1, 2])
    assert update is not None and update.stages == ("update",) and update.step == 2
    unknown = find_divergence(
        None, None, (2, {"completions/truncated": (0, 1), "loss": (0, 1)}), []
    )
    assert unknown is not None and unknown.stages[0] == "sampling"


def test_likely_keys_are_those_of_the_stage_the_likeliest_first():
    keys = differing("optimizer.lr", "seed", "task.path", "report.groups", "algorithm.clip_low")
    assert likely_keys(["data"], keys) == ["seed", "task.path"]
    assert likely_keys(["update", "sampling"], keys) == [
        "algorithm.clip_low",
        "optimizer.lr",
        "seed",
    ]
    assert likely_keys(["update"], differing("of.another_version")) == ["of.another_version"]
    idle = differing("run_name", "task.num_eval_questions", "reward.workers")
    assert likely_keys(["rewards"], idle) == []
    limit = "sampling.max_prompt_tokens"
    both = differing("seed", limit)
    assert without_idle_limits(both, [0, None, math.nan]) == differing("seed")
    assert without_idle_limits(both, [0, 2]) == both
    # nothing else can be the cause
    inert = differing("run_name", limit)
    assert without_idle_limits(inert, [0]) == inert
    evaluated = differing("task.num_eval_questions")
    assert likely_keys(["evaluation"], evaluated) == ["task.num_eval_questions"]
    # Rows of one file that are held out are not trained on: the last that is thought of.
    assert likely_keys(["data"], differing("task.num_eval_questions", "task.path")) == [
        "task.path",
        "task.num_eval_questions",
    ]


INERT_BUT_KEPT = {"recipe", "algorithm.name"}
"""Keys that change no number of a step and yet are not free when a run is resumed."""


@pytest.mark.parametrize("name", keys_of(Config))
def test_each_key_that_alone_differs_is_named_in_the_stages_that_it_acts_on(name):
    """`stages=` of every field says which; none is forgotten, and those without a stage are so on
    purpose."""
    key = keys_of(Config)[name]
    values = {one: known.default for one, known in keys_of(Config).items()}
    assert key.stages is not None, f"declare {name} by `key(default, stages=...)`"
    found = chosen_differences(
        [
            values | {"task.path": "data.jsonl"},
            values | {"task.path": "data.jsonl", name: "another"},
        ]
    )
    assert [difference.key for difference in found] == [name]
    of_steps = [stage for stage in key.stages if stage != "evaluation"]
    for stage in STAGES:
        likely = likely_keys([stage], without_idle_limits(found, [1.0]))
        assert likely == ([name] if stage in key.stages else []), stage
        said = likely_cause(likely, found)
        if stage in key.stages:
            assert said == f"the likeliest cause is {name}"
        else:
            assert ("no key that differs acts there" in said) == bool(of_steps)
    is_free = key.on_resume == "free"
    assert not (is_free and of_steps) or name == "steps"
    assert bool(key.stages) or is_free or name in INERT_BUT_KEPT


@pytest.mark.parametrize(
    ("setting", "what", "stages"),
    [
        (("alpha: 32.0", "alpha: 16.0"), "trainer_logprobs", ("update", "model.lora.alpha")),
        (("  rank: 0", "  rank: 4"), "trainer_logprobs", ("update", "model.lora.rank")),
        (("  coef: 1.0", "  coef: 0.5"), "advantages", ("update", "teacher.coef")),
        (
            ("max_staleness: -1", "max_staleness: 1"),
            "token_ids",
            ("sampling", "train.max_staleness"),
        ),
        (
            ("  attention: auto", "  attention: blocked"),
            "token_ids",
            ("sampling", "model.attention"),
        ),
        (("tensor: 1", "tensor: 2"), "token_ids", ("sampling", "mesh.tensor")),
        (
            ("judge:\n    model: ''", "judge:\n    model: strict"),
            "rewards",
            ("rewards", "reward.judge.model"),
        ),
    ],
)
def test_the_cause_is_named_not_denied(first, tmp_path, setting, what, stages, capsys):
    def changed(groups: list[StoredGroup]) -> list[StoredGroup]:
        one = groups[0]
        if what == "rewards":
            one = dataclasses.replace(
                one, group=dataclasses.replace(one.group, rewards=np.full(one.group.size, 7.0))
            )
        elif what == "advantages":
            one = dataclasses.replace(one, advantages=one.advantages + 1)
        elif what == "token_ids":
            one = with_completion(one, 0, token_ids=one.group.completions[0].token_ids + 1)
        else:
            arrays = {}
            for name, values in one.token_arrays[0].items():
                arrays[name] = values - 1
            one = dataclasses.replace(one, token_arrays=(arrays, *one.token_arrays[1:]))
        return [one, *groups[1:]]

    result = compared(first, edited(first, tmp_path, setting, changed))
    assert (result["divergence"]["stage"], result["likely_keys"]) == (stages[0], [stages[1]])
    assert f"the likeliest cause is {stages[1]}" in " ".join(capsys.readouterr().out.split())


def test_an_update_that_is_seen_in_what_follows_alone_is_a_cause(first, tmp_path):
    """AdamW's beta2 changes no metric of the first step: the second samples other completions, or
    is evaluated."""
    copy = edited(first, tmp_path, ("beta2: 0.95", "beta2: 0.5"))
    shutil.rmtree(copy / "groups")
    rows = metrics(first)
    rows[1]["completions/length"] = rows[1].get("completions/length", 0) + 1
    (copy / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    result = compared(first, copy)
    assert result["divergence"]["stage"] == "sampling" and result["likely_keys"] == [
        "optimizer.beta2"
    ]
    (copy / "metrics.jsonl").write_text((first / "metrics.jsonl").read_text())
    lines = read_lines(copy / "evaluations.jsonl")
    lines[-1]["mean_reward"] = -7.0
    (copy / "evaluations.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    result = compared(first, copy)
    assert result["divergence"]["stage"] == "evaluation" and result["likely_keys"] == [
        "optimizer.beta2"
    ]


def test_a_reward_can_be_the_cause_of_other_prompts_where_it_chooses_them():
    row = GroupDifference(2, "data", "data row", 0)
    for feeds_back, named in ((False, []), (True, ["reward.functions"])):
        found = find_divergence(row, None, None, [1], differing("reward.functions"), feeds_back)
        assert found is not None and found.stages[0] == "data"
        assert likely_keys(found.stages, differing("reward.functions")) == named


@pytest.mark.parametrize(
    ("before", "after", "since"),
    [
        ({}, {"reward.judge.model": "strict"}, 4),
        ({}, {"reward.judge.score_range": [0, 5]}, 4),
        ({"reward.judge.template": "a"}, {"reward.judge.template": "b"}, 4),
        ({}, {"reward.on_error": "zero"}, 4),
        ({"reward.functions": ["a.py:f"]}, {"reward.functions": ["a.py:g"]}, 4),
        ({}, {"environment.tools": ["t.py:f"]}, 4),
        # the default, in a file of another version
        ({}, {"reward.judge.score_range": [0.0, 10.0]}, 0),
        ({}, {"reward.timeout_seconds": 5.0}, 0),
        ({}, {"reward.workers": 8, "optimizer.lr": 1.0}, 0),
    ],
)
def test_rewards_are_another_where_a_setting_differs_that_they_depend_on(before, after, since):
    assert RewardChanges.of_parts({0: before, 4: after}).reward == since
    parts = {0: before, 2: before, 4: after, 6: after}
    assert RewardChanges.of_parts(parts).reward == since
    assert RewardChanges.of_parts({}) == RewardChanges()


def test_keys_of_data_that_is_read_do_not_act_where_questions_are_made():
    errors = {}
    for name in TASKS:
        with pytest.raises(ShoalError) as raised:
            load_by_name(TaskSection(name=name, path="nothere"), RewardSection())
        errors[name] = str(raised.value)
    made = {name for name, text in errors.items() if "makes its own problems" in text}
    assert (
        made
        and {name for name in TASKS if "task.split" in automatic_keys({"task.name": name})} == made
    )


def test_rescoring_and_comparing_load_no_jax():
    code = (
        "import sys, shoal.commands.rescore, shoal.commands.diff\n"
        "assert not {'jax', 'orbax'} & set(sys.modules), sorted(sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr[-500:]
