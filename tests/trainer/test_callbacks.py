"""Callbacks of TRL's users: what they are called with, how they end a run, what they are told that
a run does not have."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from test_loop import Diary, steps_of
from tiny_runs import PLAIN, Workshop, checkpoints, groups, metrics, parameters_of

import shoal
from shoal.compat.trl_objects import take_callbacks
from shoal.config.sections.optimizer import BatchSection
from shoal.config.sections.train import CheckpointSection, TrainSection
from shoal.config.train import Config
from shoal.records import Example, ShoalError
from shoal.runs.metrics import is_clock
from shoal.trainer.callbacks import (
    CALLED,
    NEVER_CALLED,
    Callbacks,
    Control,
    GivenCallbacks,
    KnownArguments,
    TrainingState,
    evaluation_logs,
    make_callbacks,
    step_logs,
)
from shoal.trainer.loop import Run
from shoal.trainer.prompts import PromptStream
from shoal.trainer.schedule import Schedule


class TrainerCallback:
    """Stands in for that of transformers: empty methods, which a subclass replaces."""

    def on_log(self, args, state, control, **kwargs): ...
    def on_epoch_end(self, args, state, control, **kwargs): ...


class Watching(TrainerCallback):
    """Notes each call, and sets the fields of `control` that `sets` names at an event and step."""

    def __init__(self, **sets: tuple[str, int]) -> None:
        self.sets = sets
        self.seen: list[tuple[str, int]] = []
        self.keywords: dict[str, Any] = {}
        self.state: Any = None

    def note(self, event: str, state: Any, control: Any, keywords: dict[str, Any]) -> Any:
        self.seen.append((event, state.global_step))
        self.state = state
        self.keywords |= keywords
        for field, moment in self.sets.items():
            if moment == (event, state.global_step):
                setattr(control, field, True)
        return control


def method_of(event: str) -> Any:
    def method(self, args, state, control, **keywords):
        return self.note(event.removeprefix("on_"), state, control, keywords)

    return method


for event in CALLED:
    setattr(Watching, event, method_of(event))


class Played(Diary):
    """A diary whose run may be ended early."""

    ended: tuple[str, int] | None = None

    def end_early(self, stopped_by: str, last: int) -> None:
        self.ended = (stopped_by, last)

    def evaluation(self, version, figures, answers, num_completions, seconds) -> None:
        super().evaluation(version, figures, answers, num_completions, seconds)
        self.events.append(("evaluated", version))


def play(*objects: Any, lag: int = 0, every: int = 1, steps: int = 4, **changes: Any) -> Played:
    """A run of the loop with callbacks, evaluations of every second step and no checkpoints but the
    last, if `changes` do not say otherwise."""
    diary = changes.get("diary")
    if diary is None:
        diary = Played()
        diary.sets = {"held_out": []}
    config = Config(
        steps=steps,
        batch=BatchSection(prompts_per_step=2, group_size=3),
        train=TrainSection(changes.get("evaluate_every", 2)),
        checkpoint=CheckpointSection(changes.get("period", 0)),
    )
    prompts = PromptStream(
        [Example(row, str(row)) for row in range(50)], lambda prompt: np.array([1]), 0, 10
    )
    diary.finish = lambda last=None, best=None: last  # type: ignore[method-assign]
    run = Run(
        config, ("weights", 0), diary, diary, prompts, diary, diary, diary, Schedule(lag, every)
    )  # type: ignore[arg-type]
    run.resume_command = "shoal train resume=run"
    run.callbacks = Callbacks(
        GivenCallbacks(objects),
        KnownArguments(),
        TrainingState(steps),
        warn=changes.get("warn", lambda text: None),
        has_questions=bool(diary.sets),
    )
    run.train()
    return diary


def test_the_order_of_calls_is_that_of_transformers():
    watching = Watching()
    play(watching, steps=3, period=2)
    assert watching.seen == [
        ("init_end", 0),
        ("train_begin", 0),
        ("log", 0),
        ("evaluate", 0),
        ("step_begin", 0),
        ("step_end", 1),
        ("log", 1),
        ("step_begin", 1),
        ("step_end", 2),
        ("log", 2),
        ("log", 2),
        ("evaluate", 2),
        ("save", 2),
        ("step_begin", 2),
        ("step_end", 3),
        ("log", 3),
        ("save", 3),
        ("log", 3),
        ("evaluate", 3),
        ("train_end", 3),
    ]
    assert set(watching.keywords) >= {"model", "optimizer", "processing_class", "logs", "metrics"}
    steps = [entry["step"] for entry in watching.state.log_history]
    assert steps == [0, 1, 2, 2, 3, 3]


@pytest.mark.parametrize("lag", [0, 1, 3])
@pytest.mark.parametrize("event", ["step_begin", "step_end", "log"])
def test_a_callback_ends_the_run_after_its_step(event, lag):
    step = 1 if event == "step_begin" else 2  # number of steps made at the call
    watching = Watching(should_training_stop=(event, step))
    diary = play(watching, lag=lag)
    assert diary.ended == ("the callback Watching", 2)
    assert steps_of(diary.events, "update") == [0, 1]
    assert steps_of(diary.events, "save") == [2]
    # The last evaluation asks all questions; version 2 has no other, though one was due.
    evaluated = [event[1:] for event in diary.events if event[0] == "evaluate"]
    assert evaluated == [(0, True), (2, True)]
    assert watching.seen[-3:] == [("log", 2), ("evaluate", 2), ("train_end", 2)]


def test_an_evaluation_may_end_the_run_and_stays_its_last():
    diary = play(Watching(should_training_stop=("evaluate", 2)), steps=9)
    assert diary.ended == ("the callback Watching", 2)
    evaluated = [event[1:] for event in diary.events if event[0] == "evaluate"]
    assert evaluated == [(0, True), (2, False)] and steps_of(diary.events, "save") == [2]


def test_a_run_may_end_before_its_first_step():
    diary = play(Watching(should_training_stop=("train_begin", 0)))
    assert diary.ended == ("the callback Watching", 0)
    assert steps_of(diary.events, "update") == [] and steps_of(diary.events, "evaluated") == [0]


def test_a_stop_at_the_last_step_is_the_end_that_the_run_has():
    diary = play(Watching(should_training_stop=("log", 4)))
    assert diary.ended is None and steps_of(diary.events, "update") == [0, 1, 2, 3]


@pytest.mark.parametrize("event", ["step_begin", "step_end", "log"])
def test_a_callback_asks_for_a_checkpoint_and_an_evaluation(event):
    moment = (event, 0 if event == "step_begin" else 1)
    diary = play(Watching(should_save=moment, should_evaluate=moment), evaluate_every=0)
    assert steps_of(diary.events, "save") == [1, 4]
    assert steps_of(diary.events, "evaluated") == [0, 1, 4]


def test_an_evaluation_that_was_not_due_has_its_weights_published():
    watching = Watching(should_evaluate=("log", 1))
    diary = play(watching, every=2, evaluate_every=0)
    assert steps_of(diary.events, "publish") == [0, 1, 2, 4]
    assert steps_of(diary.events, "evaluated") == [0, 1, 4]


class WithoutQuestions(Played):
    """A run without questions to evaluate on."""

    def score(self, version):
        return {}, []

    def evaluation(self, version, figures, answers, num_completions, seconds) -> None:
        self.events.append(("evaluated", version))


def test_an_evaluation_without_questions_is_a_warning_and_no_call():
    warnings: list[str] = []
    watching = Watching(should_evaluate=("step_end", 1))
    diary = WithoutQuestions()
    play(watching, evaluate_every=0, diary=diary, warn=warnings.append)
    [warning] = warnings
    assert "no questions to evaluate on" in warning and "eval_strategy=steps" in warning
    assert steps_of(diary.events, "evaluated") == [0, 4]  # as without callbacks
    assert [event for event, _ in watching.seen if event == "evaluate"] == []


class Failing(TrainerCallback):
    def on_log(self, args, state, control, logs=None, **kwargs):
        if state.global_step == 2:
            raise ValueError("no such figure")


def test_a_callback_that_raises_ends_the_run_after_a_checkpoint(monkeypatch):
    diaries: list[Diary] = []
    monkeypatch.setattr(
        Played, "print_next_steps", lambda self, has_weights: diaries.append(self), raising=False
    )
    with pytest.raises(ShoalError) as caught:
        play(Failing(), steps=5)
    assert str(caught.value).startswith(
        "the callback Failing.on_log raised ValueError: no such figure at test_callbacks.py, line "
    )
    assert str(caught.value).endswith(
        "; stopped after step 2 of 5, which is saved; resume: shoal train resume=run"
    )
    assert isinstance(caught.value.__cause__, ShoalError)
    [diary] = diaries
    assert steps_of(diary.events, "save") == [2] and steps_of(diary.events, "update") == [0, 1]


# ---- what is refused


class EndsEpochs(TrainerCallback):
    def on_log(self, args, state, control, **kwargs):
        control.should_epoch_stop = True


class ReturnsTrue(TrainerCallback):
    def on_log(self, args, state, control, **kwargs):
        return True


class ReadsTheModel(TrainerCallback):
    def on_log(self, args, state, control, model=None, **kwargs):
        assert not hasattr(model, "config")  # as transformers' own callbacks ask
        model.generate()


class ReadsMore(TrainerCallback):
    def on_log(self, args, state, control, **kwargs):
        args.warmup_ratio  # noqa: B018


@pytest.mark.parametrize(
    ("callback", "message"),
    [
        (EndsEpochs(), "set control.should_epoch_stop: .*set should_training_stop"),
        (ReturnsTrue(), "ReturnsTrue.on_log returned True: expected its control, or None"),
        (ReadsTheModel(), "there is no `model` here: the weights are arrays .*`shoal export`"),
        (ReadsMore(), "args has no 'warmup_ratio' here: give shoal.train a GRPOConfig as args"),
    ],
)
def test_what_a_callback_cannot_have_is_named(callback, message):
    callbacks = Callbacks(GivenCallbacks((callback,)), KnownArguments())
    with pytest.raises(ShoalError, match=message):
        callbacks.end_step(1, {"loss": 0.5})


class Epochs(TrainerCallback):
    def on_epoch_end(self, args, state, control, **kwargs): ...


def test_a_method_that_no_run_calls_is_a_warning():
    warnings: list[str] = []
    for callback in (Epochs(), Watching(), Failing()):
        Callbacks(GivenCallbacks((callback,)), warn=warnings.append).begin(0, {}, {})
    [warning] = warnings
    assert "the callback Epochs: on_epoch_end is never called" in warning


class Needs(TrainerCallback):
    def __init__(self, patience): ...


class OfNobody:
    """A callback that is made from no class of transformers."""

    def on_step_begin(self, args, state, control, **kwargs):
        control.should_training_stop = True


def test_a_callback_needs_no_class_of_transformers():
    assert play(OfNobody()).ended == ("the callback OfNobody", 1)
    alone = type("TrainerCallback", (), {"on_step_begin": OfNobody.on_step_begin})
    assert play(alone()).ended == ("the callback TrainerCallback", 1)


def test_callbacks_are_objects_or_classes():
    [made] = make_callbacks(Failing)
    assert isinstance(made, Failing) and make_callbacks([made]) == (made,)
    with pytest.raises(ShoalError, match=r"callbacks=\[int\]: expected objects with methods like"):
        make_callbacks([3])
    with pytest.raises(ShoalError, match=r"callbacks=\[Needs\]: Needs\(\) raised TypeError"):
        make_callbacks([Needs])


def test_callbacks_are_taken_from_the_arguments_with_what_belongs_to_them():
    assert take_callbacks({"steps": 3, "callbacks": []}) == ({"steps": 3}, None)
    remaining, given = take_callbacks(
        {
            "args": {"metric_for_best_model": "reward", "seed": 3},
            "seed": 4,
            "processing_class": "a tokenizer",
            "callbacks": Failing,
            "train": {"pass_k": 0},
        }
    )
    assert given is not None and given.names == ["Failing"] and "callbacks" not in remaining
    assert given.settings["metric_for_best_model"] == "reward" and given.settings["seed"] == 4
    assert given.args is None and given.processing_class == "a tokenizer"
    config = SimpleNamespace(seed=3)
    _, given = take_callbacks({"args": config, "callbacks": [Failing()]})
    assert given is not None and given.args is config


# ---- figures


def test_logs_have_the_names_of_trl_beside_their_own():
    group = SimpleNamespace(rewards=np.array([0.0, 1.0, 5.0]), valid=np.array([True, True, False]))
    logs = step_logs(
        {
            "reward/mean": 0.5,
            "rewards/letters": 0.25,
            "rewards/failed": 1.0,
            "rewards/failed/letters": 1.0,
            "rewards/logged/tries": 2.0,
            "groups/nonzero_std": 0.75,
            "lr": 1e-6,
        },
        [group, group],  # type: ignore[list-item]
    )
    assert logs == {
        "reward/mean": 0.5,
        "reward": 0.5,
        "reward_std": pytest.approx(np.std([0, 1, 0, 1], ddof=1)),
        "rewards/letters": 0.25,
        "rewards/letters/mean": 0.25,
        "rewards/failed": 1.0,
        "rewards/failed/letters": 1.0,
        "rewards/logged/tries": 2.0,
        "tries": 2.0,
        "groups/nonzero_std": 0.75,
        "frac_reward_zero_std": 0.25,
        "lr": 1e-6,
        "learning_rate": 1e-6,
    }


def test_an_evaluation_has_the_names_of_trl():
    logs = evaluation_logs(
        {
            "held_out": {"mean_reward": 0.5, "protocol": "greedy", "rewards/letters": 1.0},
            "harder": {"accuracy": 0.25},
        }
    )
    assert logs == {
        "eval_mean_reward": 0.5,
        "eval_reward": 0.5,
        "eval_rewards/letters": 1.0,
        "eval_rewards/letters/mean": 1.0,
        "eval_harder_accuracy": 0.25,
    }


def test_an_evaluation_of_a_dict_of_data_sets_has_the_names_of_trl():
    logs = evaluation_logs({"a": {"mean_reward": 0.5}, "b": {"mean_reward": 0.25}})
    assert (logs["eval_a_reward"], logs["eval_b_reward"]) == (0.5, 0.25)
    assert logs["eval_reward"] == 0.5  # of the main set, the first


def best_of(rewards: list[float], **args: Any) -> TrainingState:
    state = TrainingState()
    callbacks = Callbacks(GivenCallbacks((Failing(),)), KnownArguments(**args), state)
    for version, reward in enumerate(rewards):
        figures = {"held_out": {"mean_reward": reward}}
        callbacks.evaluated(version + 5 if version == 2 else version, version, figures)
    return state


@pytest.mark.parametrize(
    ("args", "best"),
    [
        ({}, (None, None)),
        ({"metric_for_best_model": "reward"}, (0.75, 1)),
        ({"metric_for_best_model": "eval_reward"}, (0.75, 1)),
        ({"metric_for_best_model": "reward", "greater_is_better": False}, (0.25, 2)),
        ({"metric_for_best_model": "eval_loss"}, (None, None)),
    ],
)
def test_the_best_evaluation_is_that_of_the_metric_in_args(args, best):
    state = best_of([0.5, 0.75, 0.25], **args)
    assert (state.best_metric, state.best_global_step) == best


def test_a_metric_that_no_evaluation_has_is_one_warning():
    warnings: list[str] = []
    args = KnownArguments(metric_for_best_model="eval_loss")
    callbacks = Callbacks(GivenCallbacks((Failing(),)), args, warn=warnings.append)
    for version in (0, 1):
        callbacks.evaluated(version, version, {"held_out": {"mean_reward": 0.5}})
    assert len(warnings) == 1 and "metric_for_best_model=eval_loss" in warnings[0]
    assert "eval_reward" in warnings[0]


def test_a_resumed_run_has_its_history():
    watching = Watching()
    callbacks = Callbacks(
        GivenCallbacks((watching,)),
        KnownArguments(metric_for_best_model="reward"),
        TrainingState(9, epochs_per_step=0.5),
    )
    evaluations = {0: {"held_out": {"mean_reward": 0.5}}, 2: {"held_out": {"mean_reward": 0.25}}}
    callbacks.begin(2, {1: {"loss": 0.5}, 2: {"loss": 0.25}}, evaluations)
    state = watching.state
    assert (state.global_step, state.epoch, state.num_train_epochs) == (2, 1.0, 5)
    assert (state.best_metric, state.best_global_step) == (0.5, 0)
    assert [entry.get("loss") for entry in state.log_history[:2]] == [0.5, 0.25]


# ---- several processes


@pytest.mark.parametrize("fails", [False, True])
def test_all_processes_do_what_the_callbacks_of_the_first_ask_for(fails):
    """Process 1 calls no callback; it gets what process 0 has sent."""
    sent: list[list[Any]] = []

    def exchange(what: str, value: Any) -> list[Any]:
        sent.append(json.loads(json.dumps(value)))
        return [sent[0], value]

    watching = Watching(should_training_stop=("log", 2), should_save=("log", 2))
    failing = Failing()
    objects = (watching, failing) if fails else (watching,)
    for is_main in (True, False):
        callbacks = Callbacks(GivenCallbacks(objects), is_main=is_main, exchange=exchange)
        if fails:
            with pytest.raises(ShoalError, match=r"Failing.on_log raised ValueError"):
                callbacks.end_step(2, {})
        else:
            callbacks.end_step(2, {})
        assert callbacks.stopped_by == "Watching" and callbacks.asks_save
        assert not callbacks.asks_evaluation
    assert watching.seen == [("step_end", 2), ("log", 2)]


PROGRAM = """\
import json, sys
import shoal

class Watching:
    def on_log(self, args, state, control, logs=None, **kwargs):
        if int(PROCESS):
            raise AssertionError("the callback was called in another process than the first")
        if state.global_step == 1:
            control.should_save = True
        if state.global_step == 2:
            FAILURE
            control.should_training_stop = True

def letters(completions, **_):
    return [sum(map(ord, text)) % 3 / 2 for text in completions]

PROCESS, words = sys.argv[1], json.loads(sys.argv[2])
rows = [{"prompt": f"{number} + 17 = ?"} for number in range(20)]
shoal.train(
    task=rows, reward=letters, callbacks=[Watching], **words, **{"mesh.process": int(PROCESS)}
)
"""


@pytest.mark.system
@pytest.mark.parametrize("failure", ["pass", "raise ValueError('mine')"])
def test_two_processes_do_what_the_callbacks_of_the_first_ask_for(workshop, tmp_path, failure):
    with socket.create_server(("localhost", 0)) as free:
        port = free.getsockname()[1]
    words = settings(workshop, "two")
    del words["train_dataset"], words["reward_funcs"]
    words |= {
        "base_output_directory": str(tmp_path),
        "batch": {"prompts_per_step": 4, "group_size": 4, "micro_tokens": 2048},
        "mesh": {"processes": 2, "coordinator": f"localhost:{port}", "fsdp": -1},
    }
    program = PROGRAM.replace("FAILURE", failure)
    flags = os.environ["XLA_FLAGS"].replace("device_count=8", "device_count=2")
    started = []
    for number in range(2):
        started.append(
            subprocess.Popen(
                [sys.executable, "-c", program, str(number), json.dumps(words)],
                text=True,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=os.environ | {"XLA_FLAGS": flags},
            )
        )
    ends = []
    for process in started:
        _, error = process.communicate(timeout=200)
        ends.append((process.returncode, error))
    assert checkpoints(tmp_path / "two") == [1, 2], ends
    summary = tmp_path / "two" / "summary.json"
    if failure == "pass":
        assert [code for code, _ in ends] == [0, 0], ends
        assert json.loads(summary.read_text())["stopped_by"] == "the callback Watching"
        return
    assert not summary.exists()
    for code, error in ends:
        assert code and "the callback Watching.on_log raised ValueError: mine" in error
        assert "stopped after step 2 of 4, which is saved" in error


# ---- whole runs


def letters(completions: Any, **_: Any) -> list[float]:
    return [sum(map(ord, completion[0]["content"])) % 3 / 2 for completion in completions]


def settings(workshop: Workshop, name: str, **changes: Any) -> dict[str, Any]:
    rows = [{"prompt": [{"role": "user", "content": f"{i} + 17 = ?"}]} for i in range(20)]
    return {
        "model": {"path": str(workshop.model), "template": PLAIN},
        "train_dataset": rows,
        "reward_funcs": [letters],
        "run_name": name,
        "base_output_directory": str(workshop.runs),
        "steps": 4,
        "task__num_eval_questions": 2,
        "train": {"pass_k": 0, "evaluate_every": 1},
        "algorithm": {"kl_coef": 0},
        "sampling": {"max_prompt_tokens": 64, "max_completion_tokens": 8},
        "batch": {"prompts_per_step": 2, "group_size": 4, "micro_tokens": 2048},
        "optimizer": {"lr": 1e-2, "warmup_steps": 0},
        **changes,
    }


class StopsAt(TrainerCallback):
    def __init__(self, step: int) -> None:
        self.step = step
        self.rewards: list[float] = []

    def on_log(self, args, state, control, logs=None, **kwargs):
        if "reward" in logs:
            self.rewards.append(logs["reward"])
        control.should_training_stop |= state.global_step == self.step


def reproducible(run: Any, last: int) -> Any:
    rows = []
    for row in metrics(run):
        rows.append({name: value for name, value in row.items() if not is_clock(name)})
    parameters = {name: x.tobytes() for name, x in parameters_of(run, last).items()}
    return rows, [groups(run, step) for step in range(1, last + 1)], parameters


@pytest.mark.slow
@pytest.mark.parametrize("staleness", [0, 2])
def test_a_run_that_a_callback_stopped_goes_on_with_the_same_bits(
    workshop, tmp_path, staleness, capsys
):
    train = {"pass_k": 0, "evaluate_every": 1, "max_staleness": staleness}
    whole = shoal.train(**settings(workshop, f"whole-{staleness}", train=train))
    stopping = StopsAt(2)
    words = settings(workshop, f"stopped-{staleness}", train=train)
    stopped = shoal.train(**words, callbacks=[stopping])
    assert "stopped by the callback StopsAt after step 2 of 4" in capsys.readouterr().out
    assert (stopped["stopped_by"], stopped["steps"], stopped["steps_made"]) == (
        "the callback StopsAt",
        4,
        2,
    )
    assert "2 steps of 4" in repr(stopped) and "stopped by the callback StopsAt" in repr(stopped)
    assert stopping.rewards == whole.metrics["reward/mean"][:2]
    assert checkpoints(stopped.folder) == [2] and stopped.finished
    assert [row["step"] for row in stopped.evaluations] == [0, 1, 2]

    # The same call has nothing left to do; fewer steps than it was started with may be enough.
    again = shoal.train(**words, callbacks=[StopsAt(3)])
    assert again.metrics["step"] == [1, 2]
    assert f"resume={stopped.folder} continues it" in capsys.readouterr().out
    fewer = shutil.copytree(stopped.folder, tmp_path / "fewer")
    data = {"train_dataset": words["train_dataset"], "reward_funcs": [letters]}
    assert shoal.train(**data, resume=fewer, steps=3)["steps_made"] == 3

    watching = Watching()
    rest = shoal.train(**data, resume=stopped.folder, callbacks=[watching])
    assert (rest["stopped_by"], rest["steps_made"]) == ("", 4)
    assert [entry["step"] for entry in watching.state.log_history if "reward" in entry] == [
        1,
        2,
        3,
        4,
    ]
    assert reproducible(rest.folder, 4) == reproducible(whole.folder, 4)
    assert rest.evaluations == whole.evaluations


@pytest.mark.slow
def test_early_stopping_of_transformers(workshop):
    from transformers import EarlyStoppingCallback, TrainerCallback
    from transformers.trainer_callback import DefaultFlowCallback, PrinterCallback

    class Evaluations(TrainerCallback):
        def on_evaluate(self, args, state, control, metrics, **kwargs):
            self.best = state.best_metric

    stopping = EarlyStoppingCallback(early_stopping_patience=1, early_stopping_threshold=10.0)
    words = settings(workshop, "early")
    with pytest.raises(
        ShoalError, match=r"on_train_begin raised AssertionError: .*metric_for_best"
    ):
        shoal.train(**words | {"run_name": "unset"}, callbacks=[stopping])
    evaluations = Evaluations()
    result = shoal.train(
        **words,
        metric_for_best_model="eval_reward",
        callbacks=[stopping, PrinterCallback, evaluations],
    )
    # No reward is better by 10 than the one before training, so the first evaluation ends the run.
    assert result["stopped_by"] == "the callback EarlyStoppingCallback"
    assert result["steps_made"] == 1
    assert evaluations.best == result.evaluations[0]["mean_reward"]
    result = shoal.train(**words | {"run_name": "flow"}, callbacks=[DefaultFlowCallback])
    assert result["stopped_by"] == "" and result["steps_made"] == 4


@pytest.mark.slow
def test_the_methods_are_those_of_transformers():
    from transformers import TrainerCallback
    from transformers.trainer_callback import TrainerControl, TrainerState

    events = {name for name in vars(TrainerCallback) if name.startswith("on_")}
    assert events == {*CALLED, *NEVER_CALLED}
    assert vars(Control()) == vars(TrainerControl())
    missing = set(vars(TrainerState())) - set(vars(TrainingState()))
    assert missing == {
        "train_batch_size",
        "num_input_tokens_seen",
        "total_flos",
        "stateful_callbacks",
    }
