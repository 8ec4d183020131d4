"""Callbacks that were given from Python: objects with the methods of `TrainerCallback` of
transformers, which is not imported. The loop calls them; they see figures, and can end the run."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, NoReturn

import numpy as np

from shoal.records import Group, ShoalError
from shoal.rewards.reward_call import line_of_function
from shoal.runs.lines import scalars
from shoal.runs.metrics import RESERVED_FUNCTIONS
from shoal.tasks.task import HELD_OUT
from shoal.text import describe_error, shorten

CALLED = (
    "on_init_end",
    "on_train_begin",
    "on_step_begin",
    "on_step_end",
    "on_log",
    "on_evaluate",
    "on_save",
    "on_train_end",
)
"""Methods of callbacks that a run calls."""

NEVER_CALLED = (
    "on_epoch_begin",
    "on_epoch_end",
    "on_substep_end",
    "on_pre_optimizer_step",
    "on_optimizer_step",
    "on_predict",
    "on_prediction_step",
    "on_push_begin",
)
"""Methods of `TrainerCallback` for which a run has no moment: its steps are not grouped in epochs,
and an update is one compiled program."""

TRL_NAMES: Mapping[str, str] = {
    "reward/mean": "reward",
    "rewards/{function}": "rewards/{function}/mean",
    "completions/length_mean": "completions/mean_length",
    "completions/length_min": "completions/min_length",
    "completions/length_max": "completions/max_length",
    "completions/length_ended_mean": "completions/mean_terminated_length",
    "completions/truncated": "completions/clipped_ratio",
    "loss": "loss",
    "kl": "kl",
    "entropy": "entropy",
    "clip/fraction": "clip_ratio/region_mean",
    "clip/low": "clip_ratio/low_mean",
    "clip/high": "clip_ratio/high_mean",
    "sampler_gap/logprob_mean": "sampling/sampling_logp_difference/mean",
    "sampler_gap/logprob_max": "sampling/sampling_logp_difference/max",
    "grad_norm": "grad_norm",
    "lr": "learning_rate",
    "staleness": "sample/staleness_mean",
    "staleness/max": "sample/staleness_max",
    "time/step_seconds": "step_time",
    "mfu": "perf/mfu_wall_clock",
}
"""Metric -> TRL's name of the same figure."""

TRL_EVALUATION_NAMES: Mapping[str, str] = {
    "mean_reward": "reward",
    "mean_length": "completions/mean_length",
    "truncated": "completions/clipped_ratio",
}
"""Figure of an evaluation -> TRL's name of the same figure, without `eval_`."""


def step_logs(metrics: Mapping[str, Any], groups: Sequence[Group] = ()) -> dict[str, float]:
    """Returns a step's metrics under their own names and under TRL's. `groups`: the step's, from
    which `reward_std` is computed, which is none of the metrics; left out without groups."""
    logs = scalars(metrics)
    for name, value in scalars(metrics).items():
        logs[_trl_name(name)] = value
    if "groups/nonzero_std" in logs:
        logs["frac_reward_zero_std"] = 1 - logs["groups/nonzero_std"]
    rewards = [group.rewards[group.valid] for group in groups]
    if "reward" in logs and rewards:
        every_reward = np.concatenate(rewards)
        if len(every_reward) > 1:
            logs["reward_std"] = float(every_reward.std(ddof=1))  # as TRL's `nanstd`
    return logs


def _trl_name(name: str) -> str:
    """Returns TRL's name of a metric; its own name if TRL has none. What a reward function logged
    has the name that the function gave it, as in TRL."""
    section, _, function = name.partition("/")
    if section != "rewards":
        return TRL_NAMES.get(name, name)
    if name.startswith("rewards/logged/"):
        return name.removeprefix("rewards/logged/")
    if function.partition("/")[0] in RESERVED_FUNCTIONS:
        return name
    return f"{name}/mean"


def evaluation_logs(figures: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """Returns the numbers of an evaluation (data set -> figure -> value) under their own names and
    TRL's: those of the first data set after `eval_`, and those of each data set with a name of its
    own, as of a dict of data sets, after `eval_<data set>_`."""
    logs = {}
    for number, (data_set, values) in enumerate(figures.items()):
        prefixes = []
        if number == 0:
            prefixes.append("eval_")
        if data_set != HELD_OUT:
            prefixes.append(f"eval_{data_set}_")
        for name, value in scalars(values).items():
            trl_name = TRL_EVALUATION_NAMES.get(name, _trl_name(name))
            for prefix in prefixes:
                logs[prefix + name] = value
                logs[prefix + trl_name] = value
    return logs


# ---- what callbacks get


class Absent:
    """Stands for an object of TRL's trainer that a run does not have. Any attribute of it, and
    calling it, is an AttributeError that says what there is instead."""

    _text = ""

    def __init__(self, name: str, instead: str) -> None:
        self._text = f"there is no `{name}` here: {instead}"

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(self._text)

    def __call__(self, *args: Any, **keywords: Any) -> NoReturn:
        raise AttributeError(self._text)


_ABSENT_OPTIMIZER = "the update is one compiled program; logs have its learning_rate and grad_norm"

ABSENT: Mapping[str, Any] = {
    "model": Absent(
        "model",
        "the weights are arrays of JAX on the run's devices. The folder state.run_folder has them "
        "in `checkpoints`, and `shoal export` writes them for transformers",
    ),
    "optimizer": Absent("optimizer", _ABSENT_OPTIMIZER),
    "lr_scheduler": Absent("lr_scheduler", _ABSENT_OPTIMIZER),
    "processing_class": Absent("processing_class", "give shoal.train one as processing_class=..."),
    # None, as transformers has them before there are any
    "train_dataloader": None,
    "eval_dataloader": None,
}
"""Keyword arguments of each call for which a run has no object."""


class KnownArguments(SimpleNamespace):
    """The `args` of callbacks in a run that was given none: what of TRL's arguments is known."""

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(
            f"args has no {name!r} here: give shoal.train a GRPOConfig as args, or {name}=..."
        )


@dataclass
class TrainingState:
    """The `state` of callbacks, as `TrainerState` of transformers. A step is one of Shoal's, which
    may make several updates."""

    max_steps: int = 0
    run_folder: str = ""  # not in transformers
    epochs_per_step: float = 0.0  # not in transformers
    global_step: int = 0  # number of steps made
    epoch: float = 0.0  # rows of the steps made / rows of the data
    num_train_epochs: int = 0
    logging_steps: int = 1
    eval_steps: int = 0
    save_steps: int = 0
    log_history: list[dict[str, float]] = field(default_factory=list)
    best_metric: float | None = None  # only with args.metric_for_best_model
    best_global_step: int | None = None
    best_model_checkpoint: str | None = None
    is_local_process_zero: bool = True
    is_world_process_zero: bool = True
    is_hyper_param_search: bool = False
    trial_name: str | None = None
    trial_params: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        self.num_train_epochs = math.ceil(self.max_steps * self.epochs_per_step)


@dataclass
class Control:
    """The `control` of callbacks, as `TrainerControl` of transformers."""

    should_training_stop: bool = False
    should_epoch_stop: bool = False  # an error: a run has no epochs to stop
    should_save: bool = False
    should_evaluate: bool = False
    should_log: bool = False  # without effect: each step is logged


@dataclass(frozen=True)
class GivenCallbacks:
    """The callbacks that `shoal.train` was given, with what belongs to them."""

    objects: tuple[Any, ...] = ()
    args: Any = None  # the object that was given as `args`; None if it was a mapping, or none
    # Keyword arguments by TRL's names, for the `args` of callbacks if there is no object.
    settings: Mapping[str, Any] = field(default_factory=dict)
    processing_class: Any = None

    @property
    def names(self) -> list[str]:
        """The names of the callbacks' classes."""
        return [type(callback).__name__ for callback in self.objects]


def _only_mine(what: str, value: Any) -> list[Any]:
    """Exchanges with no other process: returns the value of this one."""
    return [value]


class Callbacks:
    """Calls the callbacks of a run, in the order in which transformers does, and holds what they
    ask for. Each method is called by all processes of a run; process 0 alone calls the callbacks,
    and the others learn what they asked for.

    Raises ShoalError, in all processes, if a callback raises an exception."""

    def __init__(
        self,
        given: GivenCallbacks | None = None,
        args: Any = None,
        state: TrainingState | None = None,
        warn: Callable[[str], None] = lambda text: None,
        is_main: bool = True,
        exchange: Callable[[str, Any], list[Any]] = _only_mine,
        has_questions: bool = True,
    ) -> None:
        """`args`, `state`: those of the calls. `warn` prints a warning. `exchange(what, value)`
        returns the values of all processes (`World.exchange_json`). `has_questions`: True if the
        run has questions to evaluate on."""
        given = given or GivenCallbacks()
        self.objects = given.objects
        self.args = args
        self.state = state or TrainingState()
        self.control: Any = Control()
        self.stopped_by = ""
        """The class of the first callback that set `should_training_stop`; "" until then."""
        self._warn = warn
        self._is_main = is_main
        self._exchange = exchange
        self._has_questions = has_questions
        self._keywords = dict(ABSENT)
        if given.processing_class is not None:
            self._keywords["processing_class"] = given.processing_class
        self._error: tuple[str, Exception | None] = ("", None)  # text and cause
        self._warned_of_no_best = False
        self._warned_of_no_questions = False

    @property
    def asks_save(self) -> bool:
        """True if a callback asks for a checkpoint of this step."""
        return bool(self.control.should_save)

    @property
    def asks_evaluation(self) -> bool:
        """True if a callback asks for an evaluation of this step, and there are questions."""
        return bool(self.control.should_evaluate)

    def wants(self, event: str) -> bool:
        """True if a callback has a method of its own for an event."""
        return any(_module_of(callback, event) for callback in self.objects)

    # -- events

    def begin(
        self,
        version: int,
        steps: Mapping[int, Mapping[str, Any]],
        evaluations: Mapping[int, Mapping[str, Mapping[str, Any]]],
    ) -> None:
        """Begins training after `version` steps. `steps`, `evaluations`: what a resumed run has
        recorded before, by step and by version."""
        for callback in self.objects:
            self._warn_of_never_called(callback)
        for step, metrics in sorted(steps.items()):
            self._log(step, step_logs(metrics))
        for evaluated, figures in sorted(evaluations.items()):
            logs = evaluation_logs(figures)
            self._log(evaluated, logs)
            self._note_best(evaluated, logs)
        self._move_to(version)
        self._call("on_init_end")
        self._call("on_train_begin")
        self._settle()

    def begin_step(self, version: int) -> None:
        """Begins the step after `version` steps."""
        self._move_to(version)
        self.control.should_save = False
        self.control.should_evaluate = False
        self.control.should_log = False
        if self.wants("on_step_begin"):
            self._call("on_step_begin")
            self._settle()

    def end_step(
        self, version: int, metrics: Mapping[str, Any], groups: Sequence[Group] = ()
    ) -> None:
        """Ends a step, the `version`-th, with its metrics and the groups that it trained on."""
        self._move_to(version)
        self._call("on_step_end")
        logs = self._log(version, step_logs(metrics, groups))
        self._call("on_log", logs=logs)
        self._settle()
        if self.asks_evaluation and not self._has_questions:
            self._refuse_evaluation()

    def evaluated(
        self, version: int, of_version: int, figures: Mapping[str, Mapping[str, Any]]
    ) -> None:
        """Passes on an evaluation, data set -> figure -> value, after `version` steps. It is of
        `of_version`, which is older if the evaluation took longer than a step."""
        self._move_to(version)
        logs = self._log(of_version, evaluation_logs(figures))
        self._call("on_log", logs=dict(logs))
        self.control.should_evaluate = False
        self._call("on_evaluate", metrics=logs)
        # After the calls, as in transformers: EarlyStoppingCallback compares with the best before.
        self._note_best(of_version, logs)
        self._settle()

    def saved(self, version: int) -> None:
        """Says that the checkpoint of `version` was saved."""
        self.control.should_save = False
        self._call("on_save")
        self._settle()

    def end(self) -> None:
        """Ends training."""
        self._call("on_train_end")
        self._settle()

    # -- calls

    def _move_to(self, version: int) -> None:
        """Sets the state to `version` steps made."""
        self.state.global_step = version
        self.state.epoch = version * self.state.epochs_per_step

    def _log(self, version: int, logs: Mapping[str, float]) -> dict[str, float]:
        """Adds figures of a version to the state's history, and returns them with the epoch."""
        logs = {**logs, "epoch": version * self.state.epochs_per_step}
        self.state.log_history.append({**logs, "step": version})
        return logs

    def _note_best(self, version: int, logs: Mapping[str, float]) -> None:
        """Updates the state's best evaluation by `args.metric_for_best_model`, if that is set.
        Warns once if the evaluation has no such figure."""
        name = getattr(self.args, "metric_for_best_model", None)
        if not name:
            return
        figure = name if name.startswith("eval_") else f"eval_{name}"
        value = logs.get(figure)
        if value is None:
            if not self._warned_of_no_best:
                self._warn(
                    f"metric_for_best_model={name}: an evaluation has no {figure}, so callbacks "
                    f"find no best one; it has {', '.join(sorted(logs))}"
                )
            self._warned_of_no_best = True
            return
        greater_is_better = getattr(self.args, "greater_is_better", None)
        if greater_is_better is None:
            greater_is_better = not name.endswith("loss")
        best = self.state.best_metric
        if best is None:
            is_better = True
        elif greater_is_better:
            is_better = value > best
        else:
            is_better = value < best
        if is_better:
            self.state.best_metric = value
            self.state.best_global_step = version

    def _call(self, event: str, **more: Any) -> None:
        """Calls one method of all callbacks, in process 0. Calls none after one that has failed;
        `_settle` raises that error."""
        for callback in self.objects:
            error_text, _ = self._error
            if error_text or not self._is_main:
                return
            method = getattr(callback, event, None)
            if method is None:
                continue
            name = f"the callback {type(callback).__name__}.{event}"
            try:
                returned = method(self.args, self.state, self.control, **self._keywords, **more)
            except (Exception, SystemExit) as error:
                where = line_of_function(method, error)
                at = f" at {where}" if where else ""
                cause = error if isinstance(error, Exception) else None
                self._error = (f"{name} raised {shorten(describe_error(error), 500)}{at}", cause)
                return
            if returned is not None:
                if not hasattr(returned, "should_training_stop"):
                    text = f"{name} returned {shorten(repr(returned), 100)}: expected its control"
                    self._error = (f"{text}, or None", None)
                    return
                self.control = returned
            if self.control.should_epoch_stop:
                text = (
                    f"{name} set control.should_epoch_stop: a run is counted in steps, not in "
                    "epochs; set should_training_stop, which ends it after this step"
                )
                self._error = (text, None)
            if self.control.should_training_stop and not self.stopped_by:
                self.stopped_by = type(callback).__name__

    def _settle(self) -> None:
        """Gives all processes what the callbacks of process 0 asked for. Raises the error of a
        callback in all of them."""
        text, cause = self._error
        self._error = ("", None)
        asked = [text, self.stopped_by, self.asks_save, self.asks_evaluation]
        asked_of_main, *_ = self._exchange("what the callbacks ask for", asked)
        text, self.stopped_by, self.control.should_save, self.control.should_evaluate = (
            asked_of_main
        )
        if text:
            raise ShoalError(text) from cause

    def _refuse_evaluation(self) -> None:
        """Makes no evaluation that a callback asks for, in a run without questions; warns once."""
        self.control.should_evaluate = False
        if not self._warned_of_no_questions:
            self._warn(
                "a callback set control.should_evaluate, but the run has no questions to evaluate "
                "on: give it some, and eval_strategy=steps (train.evaluate_every above 0)"
            )
        self._warned_of_no_questions = True

    def _warn_of_never_called(self, callback: Any) -> None:
        """Warns of the methods of a callback that no run calls, but for those of classes of
        transformers and TRL, which do without."""
        names = []
        for event in NEVER_CALLED:
            package = _module_of(callback, event).partition(".")[0]
            if package not in ("", "transformers", "trl"):
                names.append(event)
        if names:
            self._warn(
                f"the callback {type(callback).__name__}: {', '.join(names)} is never called, "
                "because steps are not grouped in epochs and an update is one compiled program; "
                f"called are {', '.join(CALLED)}"
            )


def _module_of(callback: Any, event: str) -> str:
    """Returns the module of the class that defines a callback's method for an event; "" if it has
    none but the empty one of the TrainerCallback that it is made from."""
    for base in type(callback).__mro__:
        if event in vars(base):
            is_empty = base.__name__ == "TrainerCallback" and base is not type(callback)
            return "" if is_empty else base.__module__
    return "an object" if event in getattr(callback, "__dict__", {}) else ""


def make_callbacks(given: Any) -> tuple[Any, ...]:
    """Returns the callbacks given as `callbacks`: objects, or classes, of which an object is made,
    as transformers does; one or several. ShoalError for anything else."""
    items = given if isinstance(given, list | tuple) else [given]
    callbacks = []
    for item in items:
        name = item.__name__ if isinstance(item, type) else type(item).__name__
        if not any(hasattr(item, event) for event in CALLED):
            raise ShoalError(
                f"callbacks=[{name}]: expected objects with methods like on_log(args, state, "
                "control, logs, **kwargs), such as a TrainerCallback of transformers"
            )
        if isinstance(item, type):
            try:
                item = item()
            except Exception as error:
                raise ShoalError(
                    f"callbacks=[{name}]: {name}() raised {describe_error(error)}; give an object "
                    "of the class"
                ) from error
        callbacks.append(item)
    return tuple(callbacks)
