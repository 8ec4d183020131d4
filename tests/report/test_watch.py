"""Warnings while a run goes on: when each is given, that it is given once, and that a resumed run
remembers."""

from __future__ import annotations

import json
from contextlib import closing, nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from shoal.commands.view.verdict import accuracy_change
from shoal.config.key import values_of
from shoal.config.merge import compose
from shoal.config.stored import texts_of
from shoal.config.train import Config
from shoal.protocols import RolloutStats
from shoal.records import Failure
from shoal.report import watch
from shoal.report.recorder import Recorder
from shoal.report.watch import Watch
from shoal.runs.diagnosis import Row
from shoal.runs.reward_changes import RewardChanges
from shoal.runs.writer import RunWriter

FINE = {
    "groups/nonzero_std": 0.5,
    "completions/truncated": 0.1,
    "update/skipped": 0,
    "update/count": 1,
    "groups/unscorable": 0,
    "version/unchanged": 0,
}


def group(**rewards):
    components = {name: np.array(values, float) for name, values in rewards.items()}
    is_scored = [~np.isnan(values) for values in components.values()]
    return SimpleNamespace(reward_components=components, valid=np.any(is_scored, axis=0))


VARYING = [group(correct=[0, 1] * 8)]


def steps(watch: Watch, number: int, groups=VARYING, first: int = 1, **metrics) -> list[list]:
    """The findings of each of so many equal steps."""
    named = {name.replace("__", "/"): value for name, value in metrics.items()}
    return [watch.step(first + n, FINE | named, groups) for n in range(number)]


@pytest.mark.parametrize(
    ("metrics", "limit", "words", "level"),
    [
        ({"groups__nonzero_std": 0}, 5, "batch.group_size", "warning"),
        ({"completions__truncated": 0.51}, 3, "sampling.max_completion_tokens", "warning"),
        ({"grad_norm": 0.0}, 3, "algorithm.mask_truncated", "warning"),
        ({"update__skipped": 1, "update__count": 0}, 3, "optimizer.lr", "wrong"),
        ({"update__skipped": 3, "update__count": 0}, 1, "optimizer.lr", "wrong"),
        ({"update__skipped": 1}, 1, "update/skipped", "warning"),
        (
            {"update__skipped": 2, "update__overflows": 1, "update__count": 0},
            3,
            "optimizer.lr",
            "wrong",
        ),
        ({"groups__unscorable": 2}, 1, "groups/unscorable", "warning"),
        ({"version__unchanged": 1}, 1, "version/unchanged", "wrong"),
    ],
)
def test_a_rule_warns_once_after_so_many_steps_in_a_row(metrics, limit, words, level):
    watch = Watch()
    if level == "wrong":
        watch.given.add("one skipped")  # the first skipped update has a warning of its own
    assert not any(steps(watch, limit - 1, **metrics))
    assert not any(steps(watch, 1))  # one good step between: the count starts again
    found = steps(watch, limit + 4, **metrics)
    # A run that is hopeless ends at once, also when it was resumed: that is not given only once.
    assert [len(step) for step in found] == [0] * (limit - 1) + [1] + [int(level == "wrong")] * 4
    text = found[limit - 1][0].text
    assert words in text and "{" not in text and found[limit - 1][0].level == level


def test_a_warning_on_a_metric_of_a_step_is_one_row(monkeypatch):
    row = Row("kl", "kl", ">", 10, "the KL is {value:.0f}", "lower optimizer.lr", "optimizer.lr")
    monkeypatch.setattr(watch, "ROWS", (*watch.ROWS, replace(row, steps=2)))
    found = []
    for step in steps(Watch(), 4, kl=20.0):
        for finding in step:
            found.append(finding)
    assert [(finding.text, finding.key) for finding in found] == [
        ("the KL is 20: lower optimizer.lr", "optimizer.lr")
    ]
    assert not any(steps(Watch(), 4, kl=None)) and not any(steps(Watch(), 4, kl=9.0))


def test_a_warning_names_the_section_of_the_documentation_on_its_symptom():
    (finding,) = steps(Watch(), 5, groups__nonzero_std=0)[-1]
    assert finding.text.endswith("(docs/reward-does-not-move.md#the-reward-is-constant)")


def test_a_good_run_is_not_warned_of():
    watch = Watch()
    # float16 finds its scale
    assert not any(steps(watch, 9, update__skipped=1, update__overflows=1, update__count=0))
    assert not any(steps(watch, 30))
    # no update, no other weights
    assert not any(steps(watch, 1, version__unchanged=1, update__count=0))
    found = steps(watch, 9, update__skipped=1, update__count=1)  # skipped now and then
    assert [finding.level for step in found for finding in step] == ["warning"]
    before = {"accuracy": 0.5, "accuracy_interval": [0.4, 0.6]}
    assert not watch.evaluation(5, before, {"accuracy": 0.38, "accuracy_interval": [0.28, 0.48]})


def recorder_of(folder, warnings) -> Recorder:
    """A recorder of 10 steps whose console adds its warnings to a list and prints nothing."""
    console = SimpleNamespace(
        warning=lambda text, key: warnings.append(text),
        evaluation=lambda *_: None,
        note=lambda *_: None,
    )
    return Recorder(
        folder,
        console,  # type: ignore[arg-type]
        10,
        False,
        lambda _: RolloutStats(),
        lambda: 0,
        lambda: 0,
    )


def resumed_recorder(folder, warnings, before: str, now: str, first_answers=()) -> Recorder:
    """The recorder of a run that is resumed from version 2 with the reward `now`."""
    recorder = recorder_of(folder, warnings)
    recorder.folder.missing_steps = lambda version: []
    state = recorder.state()
    state["watch"]["first_answers"] = list(first_answers)
    recorder.restore(
        state,
        2,
        evaluated=True,
        data_sets=["held_out"],
        stored_settings=values_of(compose(Config, [f"reward={before}"])[0]),
        settings=values_of(compose(Config, [f"reward={now}"])[0]),
    )
    return recorder


def judged_by_reward(share: float) -> dict[str, dict[str, Any]]:
    figures = {"accuracy": share, "accuracy_interval": [share - 0.1, share + 0.1]}
    figures |= {"accuracy_by": "reward", "mean_reward": 0.5, "num_questions": 9}
    return {"held_out": figures}


def test_an_accuracy_of_another_reward_is_no_loss(tmp_path):
    warnings: list[str] = []
    with RunWriter.create(tmp_path, "run") as folder:
        folder.write_evaluation(0, *next(iter(judged_by_reward(0.9).items())))
        recorder = resumed_recorder(folder, warnings, "accuracy_reward", "format_reward")
        with closing(recorder):
            for version, share in ((3, 0.5), (4, 0.1)):
                recorder.evaluation(version, judged_by_reward(share), [], 0, 1.0)
                assert len(warnings) == (version == 4)
    assert "accuracy is 10.0%, in the first evaluation it was 50.0%" in warnings[0]


@pytest.mark.parametrize("now", ["accuracy_reward", "format_reward"])
def test_the_best_checkpoint_is_one_of_the_same_reward(tmp_path, now):
    with RunWriter.create(tmp_path, "run") as folder:
        for version, share in ((0, 0.8), (2, 0.9)):
            folder.write_evaluation(version, *next(iter(judged_by_reward(share).items())))
        recorder = resumed_recorder(folder, [], "accuracy_reward", now, [(0, 0.5)])
        changed = now != "accuracy_reward"
        with closing(recorder):
            assert recorder.scores() == ({} if changed else {0: 0.8, 2: 0.9})
            assert bool(recorder.watch.first_answers) == (not changed)
            recorder.evaluation(4, judged_by_reward(0.6), [], 0, 1.0)
            assert recorder.scores() == ({4: 0.6} if changed else {0: 0.8, 2: 0.9, 4: 0.6})


def test_a_change_of_reward_before_the_last_resume_still_counts(tmp_path):
    with RunWriter.create(tmp_path, "run") as folder:
        for version, reward in ((0, "accuracy_reward"), (1, "format_reward")):
            settings = compose(Config, [f"reward={reward}"])[0]
            folder.write_config(*texts_of(settings), version)
        recorder = resumed_recorder(folder, [], "format_reward", "format_reward")
        with closing(recorder):
            assert recorder.reward_changes == RewardChanges(reward=1, functions=1)


def test_a_reward_function_that_never_varies_is_named():
    watch = Watch()
    found = steps(watch, 12, [group(correct=[0, 1] * 8, length=[0.25] * 16)])
    [finding] = found[9]
    assert "length" in finding.text and "0.25" in finding.text and "correct" not in finding.text
    assert sum(map(len, found)) == 1
    assert not any(steps(Watch(), 12, [group(rare=[1] * 15 + [0])]))
    # nothing scored is another fault
    assert not any(steps(Watch(), 12, [group(rare=[np.nan] * 16)]))
    assert not any(steps(Watch(), 12, [group(few=[1, 1])]))  # too few completions to judge by


def test_a_reward_function_that_scores_only_some_completions_varies():
    """None adds 0 to the reward of a completion that another function scored."""
    some = [0.5, np.nan] * 8
    assert not any(steps(Watch(), 12, [group(correct=[0, 1] * 8, bonus=some)]))
    assert not any(steps(Watch(), 12, [group(correct=[0, 1] * 8, penalty=[-1, np.nan] * 8)]))
    # Where None leaves a completion without a reward, or adds as much as the score, nothing varies.
    assert sum(map(len, steps(Watch(), 12, [group(bonus=some)]))) == 1
    same = [group(correct=[0, 1] * 8, nothing=[0, np.nan] * 8)]
    assert sum(map(len, steps(Watch(), 12, same))) == 1


def test_a_reward_function_that_is_nearly_always_0_is_named_after_many_completions():
    rare, watch = [group(rare=[0.0] * 99 + [1.0])], Watch()
    assert not any(steps(watch, 9, rare))
    assert json.loads(json.dumps(watch.state()))["rewards"]["rare"] == [0.0, 1.0, 9, 900, 9]
    resumed = Watch()
    resumed.restore(json.loads(json.dumps(watch.state())))
    [[finding], second] = steps(resumed, 2, rare, first=10)
    assert (
        "reward function rare has given 0 to 990 of 1,000 completions, so next to nothing"
        in finding.text
    )
    assert not second and not any(steps(Watch(), 20, [group(more=[0.0] * 98 + [1.0] * 2)]))
    assert not any(steps(Watch(), 20, [group(penalty=[0.0] * 99 + [-1.0])]))  # as it should be


def test_each_way_in_which_a_function_fails_is_warned_of_once():
    watch = Watch()
    failures = []
    for kind in ("raised", "died"):
        for n in range(2):
            failures.append(Failure("checker", 17, 2, kind, f"{kind} {n}"))
    assert [finding.text for finding in watch.failures(failures)] == ["raised 0", "died 0"]
    assert not watch.failures(failures)


def test_the_loop_sees_the_first_failure_of_a_function():
    """`train.on_warning=stop` ends a run at what the recorder has `warned`; a failure was printed
    and no more."""
    shown: list[str] = []
    failure = Failure("checker", 17, 2, "raised", "checker raised ValueError")

    def during(*_):
        return nullcontext()

    folder = SimpleNamespace(write_groups=None, path="r", during=during)

    def warning(text, key):
        return shown.append(text)

    console = SimpleNamespace(warning=warning)
    recorder = Recorder(
        folder,
        console,
        1,
        False,
        lambda _: RolloutStats(failures=[failure] * 2),  # type: ignore[arg-type]
        lambda: 0,
        lambda: 0,
    )
    with closing(recorder):
        recorder.evaluation(0, {}, [], 0, 0.0)
    assert [finding.text for finding in recorder.warned] == shown == [failure.text]
    assert recorder.failures == {("checker", "raised"): 2}
    # with train.on_warning=stop it becomes the error of the run, which the command prints
    recorder = replace(recorder, warned=[], watch=Watch(), warnings_stop=True)
    with closing(recorder):
        recorder.evaluation(0, {}, [], 0, 0.0)
    assert [finding.text for finding in recorder.warned] == [failure.text] and len(shown) == 1


def test_an_accuracy_that_fell_by_more_than_noise_is_warned_of():
    watch = Watch()
    before = {"accuracy": 0.5, "accuracy_interval": [0.4, 0.6]}
    after = {"accuracy": 0.3, "accuracy_interval": [0.2, 0.4]}
    [finding] = watch.evaluation(20, before, after)
    assert finding.text.startswith(
        "after step 20 accuracy is 30.0%, in the first evaluation it was 50.0%: a loss of 5.9 "
        "points or more (95%)"
    )
    assert not watch.evaluation(40, before, after)
    assert not Watch().evaluation(20, before, {"accuracy": 0.3})  # of too few answers
    [finding] = Watch().evaluation(20, before | {"mean_reward": 0.5}, after | {"mean_reward": 0.6})
    assert "change reward.functions" in finding.text and "optimizer.lr" not in finding.text
    assert not Watch().evaluation(20, {"mean_reward": 0.5}, {"mean_reward": 0.1})
    [finding] = Watch().evaluation(  # a reward that never judges
        20, before | {"mean_reward": None}, after | {"mean_reward": None}
    )
    assert "lower optimizer.lr" in finding.text


def test_a_warning_and_the_page_judge_a_change_of_accuracy_alike():
    """Else the terminal said `worse` where the page said `within noise`."""
    for low, high in ((0.3, 0.5), (0.28, 0.48), (0.22, 0.42), (0.1, 0.3)):
        accuracy = (low + high) / 2
        curve = {"x": [0, 5], "y": [0.5, accuracy], "low": [0.4, low], "high": [0.6, high]}
        before = {"accuracy": 0.5, "accuracy_interval": [0.4, 0.6]}
        after = {"accuracy": accuracy, "accuracy_interval": [low, high]}
        change = accuracy_change(curve)
        assert change
        assert bool(Watch().evaluation(5, before, after)) == (change.sign < 0)


def test_of_fewer_questions_accuracy_must_fall_further():
    before = {"accuracy": 0.37, "accuracy_interval": [0.33, 0.41], "num_questions": 500}
    quick = {"accuracy": 0.3, "accuracy_interval": [0.22, 0.4], "num_questions": 100}
    whole = {"accuracy": 0.3, "accuracy_interval": [0.26, 0.34], "num_questions": 500}
    assert not Watch().evaluation(20, before, quick)
    assert Watch().evaluation(20, before, whole)
    assert Watch().evaluation(
        20, before, quick | {"accuracy": 0.2, "accuracy_interval": [0.13, 0.29]}
    )


def answers(rewards) -> list:
    """Three answers to each of questions 0, 1, ..., of which NaN was not scored."""
    groups = []
    for row, reward in enumerate(rewards):
        groups.append(
            SimpleNamespace(
                example=SimpleNamespace(row=row),
                subset="test",
                rewards=np.array([reward, np.nan, reward]),
                valid=np.array([not np.isnan(reward), False, not np.isnan(reward)]),
            )
        )
    return groups


def test_a_mean_reward_below_that_of_the_first_evaluation_is_warned_of():
    """Of a task without an accuracy; the change of each question counts, not how they differ."""
    first = np.linspace(0, 1, 24)
    watch = Watch()
    assert not watch.answers(0, answers(first))
    assert not watch.answers(5, answers(first + np.tile([0.1, -0.1], 12)))  # noise
    watch = Watch()
    watch.answers(0, answers(first))
    resumed = Watch()
    resumed.restore(json.loads(json.dumps(watch.state())))
    worse = first - 0.1 - np.tile([0.05, -0.05], 12)
    [finding] = resumed.answers(10, answers(worse))
    assert finding.level == "warning" and finding.key == "optimizer.lr"
    assert finding.text.startswith(
        "after step 10 the mean reward of 24 questions is 0.4, in the first evaluation it was 0.5: "
        "a loss of 0.071 or more"
    )
    assert not resumed.answers(20, answers(worse))  # once in a run
    # of too few questions, of which some were not scored
    few = Watch()
    few.answers(0, answers(first))
    assert not few.answers(10, answers([*worse[:9], *[np.nan] * 15]))


def test_the_recorder_asks_of_the_main_set_alone_and_only_without_an_accuracy(tmp_path):
    warnings = []
    with RunWriter.create(tmp_path, "run") as folder:
        for figures in ({"mean_reward": 0.5}, {"mean_reward": 0.5, "accuracy": 0.5}):
            recorder = recorder_of(folder, warnings)
            with closing(recorder):
                for version, reward in ((0, 0.9), (5, 0.1)):
                    main = answers(np.linspace(0, 0.1, 24) + reward)
                    other = answers(np.full(24, 0.9))
                    for group in other:
                        group.subset = "other"
                    asked = {"test": figures, "other": figures}
                    recorder.evaluation(version, asked, [*other, *main], 48, 1.0)
    [text] = warnings
    assert text.startswith("after step 5 the mean reward of 24 questions is 0.15")


def test_a_resumed_watch_goes_on_where_the_stored_one_was():
    watch, sign = Watch(), {"groups__nonzero_std": 0}
    steps(watch, 3, **sign)
    steps(watch, 1, completions__truncated=1, **sign)
    resumed = Watch()
    resumed.restore(json.loads(json.dumps(watch.state())))
    assert [len(step) for step in steps(resumed, 3, first=5, **sign)] == [1, 0, 0]
    assert resumed.rewards["correct"] == [0, 1, 7, 112, 56]
