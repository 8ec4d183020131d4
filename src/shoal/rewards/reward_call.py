"""One call of a reward function: its arguments, the values that it may return, and its result in a
plain form.

A function in TRL's convention is called once a batch, with keywords only: `prompts`, `completions`,
`completion_ids`, every data column, `trainer_state`, `log_extra`, `log_metric`. The lists are flat,
P*G long, the G completions of a prompt side by side. The function returns as many numbers, with
None where it cannot judge. If the prompt is messages, a completion is `[{"role": "assistant",
"content": text}]` with the whole text in `content`, or all messages of a rollout with turns; if the
prompt is text, a completion is text. If rollouts have environments, `environments` are these after
their rollouts (`EndedEnvironment`). A function in verl's convention (one that takes `solution_str`
and `ground_truth`) is called once for each completion. One in the convention of verl's
BatchRewardManager (`solution_strs` and `ground_truths`) is called once a batch, with lists of what
the former gets.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import math
import threading
import traceback
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence, Set
from concurrent.futures import Future
from dataclasses import dataclass, field, fields, replace
from itertools import chain, groupby
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import numpy as np

from shoal.records import (
    Example,
    Prompt,
    Purpose,
    RewardFunction,
    ShoalError,
    ground_truth,
    truth_fault,
)
from shoal.text import count, describe_error, did_you_mean, shorten
from shoal.workers.process import Header, end_copies_of_loop, exit_forked_copies, pickled
from shoal.workers.rollout_function import ROLLOUT

_NOT_COLUMNS = ("prompt", "completion", "completion_ids")
_ARGUMENTS = (
    "prompts",
    "completions",
    "completion_ids",
    "environments",
    "trainer_state",
    "log_extra",
    "log_metric",
)
WRONG = "wrong"
"""`CallResult.kind` of a function that breaks its convention: an error whatever `reward.on_error`
says."""
CLOSE_SECONDS = 1.0
"""How long closing an event loop waits for the tasks that still run on it."""


@dataclass(frozen=True)
class TrainerState:
    """The run's progress as reward functions get it in `trainer_state`: the fields of transformers'
    `TrainerState` that rewards use."""

    global_step: int = 0
    max_steps: int = 0
    epoch: float = 0.0  # the share of the run that is done
    num_train_epochs: int = 1
    num_input_tokens_seen: int = 0
    log_history: tuple[dict[str, float], ...] = ()
    is_world_process_zero: bool = True

    @classmethod
    def at(cls, step: int, max_steps: int, num_input_tokens_seen: int = 0) -> TrainerState:
        """Returns the state after `step` of `max_steps` steps (0: not known, then `epoch` is 0).
        `step` is a number of steps that are done, so the first state has 0. `num_train_epochs` is
        always 1."""
        epoch = step / max_steps if max_steps else 0.0
        return cls(step, max_steps, epoch, 1, num_input_tokens_seen)


@dataclass(frozen=True)
class PaidTurns:
    """What the reward function of an environment returns for a rollout whose turns were paid."""

    turns: Sequence[float]  # what each turn earned, the last one what was not paid before
    # What the rollout earned; the sum of `turns` may differ from it in its last bit, and rollouts
    # that earned the same would then seem to differ.
    total: float


@dataclass(frozen=True)
class CallResult:
    """The result of one call for `n` completions: its values, or how it failed. Every field but
    `cause` can be written as JSON.

    >>> # None where it cannot judge, and where `bad` has a reason
    >>> CallResult(values=[1.0, None], bad=[(1, "nan")])
    >>> CallResult(kind="raised", text="ValueError: ...", where="rewards.py, line 3")
    """

    values: list[float | None] = field(default_factory=list)
    # for each completion its rewards by turn, which add up to its value; None where the function
    # gave one number for all turns; [] if it did so for all
    turns: list[list[float] | None] = field(default_factory=list)
    # (index in the call, the value that is no number)
    bad: list[tuple[int, str]] = field(default_factory=list)
    extra: dict[str, list[Any]] = field(default_factory=dict)  # log_extra: column -> n values
    metrics: dict[str, list[float]] = field(default_factory=dict)  # log_metric: name -> values
    kind: str = ""  # how it failed: "raised", "timed out", "died" or `WRONG`; "" if it returned
    text: str = ""  # one line: what happened
    where: str = ""  # file and line at which it was raised
    cause: BaseException | None = None  # the exception; only in the process that made the call

    @property
    def failed(self) -> bool:
        """True if the whole call failed, or if any of its values is not a number."""
        return bool(self.kind or self.bad)

    def to_be_split(self, size: int) -> bool:
        """True if a call for `size` > 1 completions failed, so that each is called by itself next,
        which shows which one is at fault. False for a broken convention, which every call would
        break. False also for a call that returned, whatever its values, and for a `size` of 1."""
        return size > 1 and self.kind not in ("", WRONG)

    def ends_run(self, on_error: str) -> bool:
        """True if this result ends the run: a broken convention always does, a failure (also of one
        value) only if `on_error`, one of `error`, `zero` and `skip`, is `error`."""
        return self.kind == WRONG or (on_error == "error" and self.failed)

    def as_json(self) -> dict[str, Any]:
        """Returns field name -> value of all fields that are not empty, but `cause`. {} for a call
        that returned no values and logged nothing."""
        values = {}
        for of_class in fields(self):
            value = getattr(self, of_class.name)
            if of_class.name != "cause" and value:
                values[of_class.name] = value
        return values


@dataclass(frozen=True)
class Batch:
    """P groups of G completions as the flat lists of P*G entries that reward functions are called
    with."""

    shape: tuple[int, int]
    rows: list[tuple[int, int]]  # the data row and the completion's index in its group
    prompts: list[Prompt]
    texts: list[str]
    completion_ids: list[list[int]]
    columns: dict[str, list[Any]]
    state: TrainerState
    places: list[str]  # where each row was read, `FILE, line 3`; "" if it has no file
    # Names of the known answers of a group that are scored before the run; () in a run.
    trial: tuple[str, ...] = ()
    purpose: Purpose | None = None  # what a run sampled the completions for; None: no run did
    # All messages after each prompt; empty unless rollouts have turns.
    messages: Sequence[Sequence[Mapping[str, Any]]] = ()
    environments: Sequence[Any] = ()  # the `EndedEnvironment` of each completion; may be empty
    # The number of the model's turns in each completion; may be empty, if each is one turn.
    num_turns: Sequence[int] = ()

    @classmethod
    def of(
        cls,
        examples: Sequence[Example],
        prompts: Sequence[Prompt],
        texts: Sequence[Sequence[str]],
        completion_ids: Sequence[Sequence[Sequence[int] | np.ndarray]],
        state: TrainerState,
        trial: Sequence[str] = (),
        messages: Sequence[Sequence[Sequence[Mapping[str, Any]]]] = (),
        environments: Sequence[Sequence[Any]] = (),
        num_turns: Sequence[Sequence[int]] = (),
        purpose: Purpose | None = None,
    ) -> Batch:
        """Returns the batch of P examples with G completions each. `prompts` are the P prompts that
        were sampled from; texts, ids, messages, environments and numbers of turns are [P][G], the
        last three () if there are none. The columns are those of the examples, but `prompt`,
        `completion` and `completion_ids`; a column that only some examples have is None for the
        others. The entries are in the order of the examples, the completions of one side by side.
        The lengths of `messages`, `environments` and `num_turns` are not checked.

        `trial` names the G known answers of a group, such as `right answer`, if the completions are
        these; () if they were sampled. `purpose`: what a run sampled them for, for messages; None
        if no run did. ValueError if the lengths differ or the groups have different sizes.
        """
        if not len(examples) == len(prompts) == len(texts) == len(completion_ids):
            raise ValueError("examples, prompts, texts and completion_ids must be of one length, P")
        sizes = {len(group) for group in texts} | {len(group) for group in completion_ids}
        if len(sizes) != 1 or 0 in sizes:
            raise ValueError(
                "every group must hold the same number of completions, G, which is 1 or more"
            )
        (group_size,) = sizes
        rows = []
        prompts_by_completion = []
        flat_texts = []
        ids = []
        places = []
        columns: dict[str, list[Any]] = {}
        for example in examples:
            for name in example.columns:
                if name not in _NOT_COLUMNS:
                    columns[name] = []
        for number, example in enumerate(examples):
            for index in range(group_size):
                rows.append((example.row, index))
                prompts_by_completion.append(prompts[number])
                flat_texts.append(texts[number][index])
                ids.append([int(id) for id in completion_ids[number][index]])
                places.append(example.place)
                for name, values in columns.items():
                    values.append(example.columns.get(name))
        return cls(
            shape=(len(texts), group_size),
            rows=rows,
            prompts=prompts_by_completion,
            texts=flat_texts,
            completion_ids=ids,
            columns=columns,
            state=state,
            places=places,
            trial=tuple(trial),
            purpose=purpose,
            messages=list(chain.from_iterable(messages)),
            environments=list(chain.from_iterable(environments)),
            num_turns=list(chain.from_iterable(num_turns)),
        )

    def __len__(self) -> int:
        return len(self.texts)

    @property
    def has_turns(self) -> bool:
        """True if the completions are rollouts with turns, each of which may have its reward."""
        return bool(self.messages) or any(number > 1 for number in self.num_turns)

    def single(self, i: int) -> Batch:
        """Returns a batch that holds completion `i` of this batch alone. `rows` still has the
        completion's index in its group, and `trial` the names for all of the group."""
        return replace(
            self,
            shape=(1, 1),
            rows=[self.rows[i]],
            prompts=[self.prompts[i]],
            texts=[self.texts[i]],
            completion_ids=[self.completion_ids[i]],
            places=[self.places[i]],
            messages=self.messages[i : i + 1],
            environments=self.environments[i : i + 1],
            num_turns=self.num_turns[i : i + 1],
            columns={name: [values[i]] for name, values in self.columns.items()},
        )

    def describe(self, i: int) -> str:
        """Returns a text that identifies completion `i` in messages: its file and line (or data
        row), its index in its group (or its name in a trial), and the prompt and the completion,
        shortened. Of a prompt of messages only the last is shown."""
        row, index = self.rows[i]
        prompt = self.prompts[i]
        question = ""
        if isinstance(prompt, str):
            question = prompt
        elif prompt:
            question = str(prompt[-1].get("content"))
        answer = shorten(self.texts[i])
        place = self.places[i] or f"data row {row}"
        which = self.trial[index] if self.trial else f"completion {index}"
        return f"{place}, {which} (prompt {shorten(question)!r}, completion {answer!r})"


# ---- calling


def call(reward: RewardFunction, batch: Batch, wait: Callable[[Awaitable[Any]], Any]) -> CallResult:
    """Calls a reward function once for a batch and returns the result. If the function raises,
    exits, breaks its convention or is cancelled, the result says so; only a KeyboardInterrupt is
    raised. If the function returns an awaitable, `wait` runs that and returns its value. Forked
    copies of this process end after the call. The `kind` of a failure is then "raised" or WRONG."""
    call_log = _CallLog(len(batch))
    try:
        with exit_forked_copies():
            result = reward.function(**_arguments(reward, batch, call_log))
            result = wait(result) if inspect.isawaitable(result) else result
        return _result_of_return(reward, result, batch, call_log)
    except (Exception, SystemExit, asyncio.CancelledError) as error:
        return _result_of_error(reward, batch, error)


async def call_async(
    reward: RewardFunction, batch: Batch, limit_seconds: float | None = None
) -> CallResult:
    """Awaits an `async` reward function once for a batch, on the running event loop, and returns
    the result, which says so if the function raises, exits, breaks its convention or is cancelled;
    a KeyboardInterrupt too counts as raised by the function. After `limit_seconds` (None: no limit)
    the result's `kind` is "timed out"."""
    call_log = _CallLog(len(batch))
    scope = asyncio.timeout(limit_seconds)
    try:
        async with scope:
            result = await reward.function(**_arguments(reward, batch, call_log))
        return _result_of_return(reward, result, batch, call_log)
    # Ctrl-C is raised in the main thread, where no event loop runs: a KeyboardInterrupt here is the
    # function's own.
    except (Exception, SystemExit, KeyboardInterrupt, asyncio.CancelledError) as error:
        return (
            CallResult(kind="timed out")
            if scope.expired()
            else _result_of_error(reward, batch, error)
        )


class _BrokenConvention(Exception):
    """A function's signature or result is against its convention."""


@dataclass
class _CallLog:
    """The values that a reward function logs during one call, besides its rewards."""

    size: int
    extra: dict[str, list[Any]] = field(default_factory=dict)
    metrics: dict[str, list[float]] = field(default_factory=dict)

    def log_extra(self, column: str, values: Sequence[Any]) -> None:
        """Adds a column of one value for each completion, as JSON can hold it. A second column of
        the same name gets a number added. ValueError for another number of values."""
        if len(values) != self.size:
            raise ValueError(
                f"log_extra({column!r}): expected {self.size} values, got {len(values)}"
            )
        self.extra[unused_name(column, self.extra)] = [_json_value(value) for value in values]

    def log_metric(self, name: str, value: float) -> None:
        """Adds a value to those logged under a metric's name. TypeError or ValueError for a value
        that `float` refuses."""
        self.metrics.setdefault(str(name), []).append(float(value))


def _result_of_error(reward: RewardFunction, batch: Batch, error: BaseException) -> CallResult:
    """Returns the result of a call that raised `error`. Its kind is `WRONG` for a broken convention
    and for a ShoalError, else "raised"; the text then has a hint for two common causes. `where` is
    the line of the function at which it was raised."""
    if isinstance(error, _BrokenConvention):
        # The error itself is of this module; what caused it, if anything did, is the user's.
        return CallResult(kind=WRONG, text=str(error), cause=error.__cause__)
    if isinstance(error, ShoalError):  # the user has to fix it, and every completion would get it
        return CallResult(kind=WRONG, text=f"cannot score: {error}", cause=error)
    text = shorten(describe_error(error), 300)
    if isinstance(error, MemoryError):
        text += " (reward.memory_gib is the limit)"
    indexes_a_string = isinstance(error, TypeError) and "string ind" in str(error)
    if indexes_a_string and isinstance(batch.prompts[0], str):
        text += (
            " (completions are strings here, because the prompts are text; give messages as "
            "prompts to get lists of messages)"
        )
    where = line_of_function(reward.function, error)
    return CallResult(kind="raised", text=text, where=where, cause=error)


def line_of_function(function: Any, error: BaseException) -> str:
    """Returns `FILE, line N` (FILE without its folder): the innermost line of the traceback that is
    in the file of the function. "" if no line is, or if the function has no Python code."""
    if isinstance(function, functools.partial):
        function = function.func
    code = getattr(function, "__code__", None) or getattr(type(function).__call__, "__code__", None)
    if code is None:
        return ""
    where = ""
    for frame in traceback.extract_tb(error.__traceback__):
        if frame.filename == code.co_filename:
            where = f"{Path(code.co_filename).name}, line {frame.lineno}"
    return where


# ---- arguments


def _arguments(reward: RewardFunction, batch: Batch, call_log: _CallLog) -> dict[str, Any]:
    """Returns the keyword arguments with which a reward function is called for a batch, in TRL's
    convention or one of verl's. Lists and messages are copies (the values in them are not), so a
    function that changes them affects no other call. _BrokenConvention if the function requires an
    argument that there is not. Fields that rollout functions returned are arguments too in TRL's
    convention; they replace columns of the same name. `log_extra` and `log_metric` write to
    `call_log`."""
    if reward.follows_verl:
        by_completion = [_verl_arguments(batch.single(i)) for i in range(len(batch))]
        if reward.per_completion:  # the batch holds one completion
            return _accepted_arguments(reward.function, by_completion[0])
        lists = {}
        for name in by_completion[0]:
            # verl's names: `solution_strs` is the list of each `solution_str`.
            lists[f"{name}s"] = [of_completion[name] for of_completion in by_completion]
        return _accepted_arguments(reward.function, lists)
    arguments: dict[str, Any] = {}
    for name, values in batch.columns.items():
        arguments[name] = list(values)
    if batch.environments:
        arguments["environments"] = list(batch.environments)
    # The fields that rollout functions returned.
    returned = [environment.fields for environment in batch.environments]
    for names in returned:
        for name in names:
            arguments[name] = [of_rollout.get(name) for of_rollout in returned]
    prompts = []
    completions = []
    for i, prompt in enumerate(batch.prompts):
        text = batch.texts[i]
        if isinstance(prompt, str):
            prompts.append(prompt)
            completions.append(text)
            continue
        prompts.append([dict(message) for message in prompt])
        if batch.messages:
            completions.append([dict(message) for message in batch.messages[i]])
        else:
            completions.append([{"role": "assistant", "content": text}])
    arguments["prompts"] = prompts
    arguments["completions"] = completions
    arguments["completion_ids"] = [list(ids) for ids in batch.completion_ids]
    arguments["trainer_state"] = batch.state
    arguments["log_extra"] = call_log.log_extra
    arguments["log_metric"] = call_log.log_metric
    # Rollout functions may return different fields, and a failed rollout returns none. So where all
    # environments are rollout functions (or failed), a missing argument is None for each rollout.
    kinds = {vars(environment)["_kind"] for environment in batch.environments}
    # Without environments `kinds` is empty and `returned` too: 0.
    num_rollouts = len(returned) if kinds <= {ROLLOUT, ""} else 0
    return _accepted_arguments(reward.function, arguments, num_rollouts)


def _verl_arguments(batch: Batch) -> dict[str, Any]:
    """Returns the arguments of verl's convention for a batch of one completion: `data_source` (""
    if the row has none), `solution_str`, `ground_truth` and `extra_info`. The last is a copy of the
    row's, with `num_turns` (the prompt, and each run of messages of one side) and an empty
    `rollout_reward_scores`. _BrokenConvention if the row has no ground truth."""
    columns = {name: values[0] for name, values in batch.columns.items()}
    fault = truth_fault(columns)
    if fault:
        place = batch.places[0] or f"data row {batch.rows[0][0]}"
        raise _BrokenConvention(f"needs a ground truth, which {place} lacks: {fault}")
    are_of_model = []
    for messages in batch.messages:
        for message in messages:
            are_of_model.append(message["role"] == "assistant")
    # Consecutive messages of one side are one turn; without messages the completion is one.
    turns = list(groupby(are_of_model or [True]))
    info = columns.get("extra_info")
    extra_info = dict(info) if isinstance(info, Mapping) else {}
    extra_info["num_turns"] = 1 + len(turns)  # the prompt is the first
    extra_info["rollout_reward_scores"] = {}
    return {
        "data_source": columns.get("data_source") or "",
        "solution_str": batch.texts[0],
        "ground_truth": ground_truth(columns),
        "extra_info": extra_info,
    }


def _accepted_arguments(
    function: Callable[..., Any], given: dict[str, Any], num_rollouts: int = 0
) -> dict[str, Any]:
    """Returns the arguments that a function takes: `given` itself if it has `**kwargs` or no
    signature that can be read, else a dict of those that its signature names.

    If the signature requires an argument that is not in `given`: with `num_rollouts` the argument
    is a list of that many None, since a rollout function may return a field for some rollouts only,
    and is added to `given`; with 0 _BrokenConvention is raised. It is also raised for a required
    argument that is taken by position only.
    """
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # some compiled functions have no signature
        return given
    named: dict[str, inspect.Parameter] = {}
    takes_all = False
    for p in parameters:
        if p.kind is p.POSITIONAL_ONLY and p.default is p.empty:
            raise _BrokenConvention(
                f"takes {p.name!r} by position only, but is called with keywords; remove the `/`"
            )
        if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY):
            named[p.name] = p
        elif p.kind is p.VAR_KEYWORD:
            takes_all = True
    for name, p in named.items():
        if name in given or p.default is not p.empty:
            continue
        if num_rollouts:
            given[name] = [None] * num_rollouts
        else:
            raise _BrokenConvention(f"needs {name!r}, {_what_is_near(name, given)}")
    if takes_all:
        return given
    return {name: value for name, value in given.items() if name in named}


def _what_is_near(name: str, given: Mapping[str, Any]) -> str:
    """Returns the end of the sentence on an argument `name` that a function requires and `given`
    does not have: the column or argument that was probably meant, else the data's columns."""
    arguments = [argument for argument in given if argument in _ARGUMENTS]
    columns = [column for column in given if column not in _ARGUMENTS]
    near_argument = did_you_mean(name, arguments)
    if near_argument and not did_you_mean(name, columns):
        return f"which is neither an argument of reward functions nor a column{near_argument}"
    # With the truth too it would be called as verl calls it.
    if name in ("solution_str", "solution_strs"):
        plural = "s" if name == "solution_strs" else ""
        others = [f"{other}{plural}" for other in ("data_source", "ground_truth", "extra_info")]
        return (
            f"which functions of verl take together with {others[1]!r}: name both, as in "
            f"def f({others[0]}, {name}, {others[1]}, {others[2]})"
        )
    near = did_you_mean(name, columns, lists_all=True)
    other = columns[0] if len(columns) == 1 else "OTHER"
    return f"which is not a column of the data{near} (task.columns=[{name}={other}] renames one)"


# ---- results


def _result_of_return(
    reward: RewardFunction, result: Any, batch: Batch, call_log: _CallLog
) -> CallResult:
    """Returns the result of a call that returned `result`. Its `values` are finite floats or None;
    `bad` lists the values that are neither, which are None in `values`. A list with a number for
    each of a completion's turns has their sum as value, and is in `turns`; of `PaidTurns` the value
    is the total. What the function logged, `call_log`, becomes its `extra` and `metrics`.
    _BrokenConvention if `result` has another form than the function's convention asks for."""
    returned = [result] if reward.per_completion else _checked_list(result, batch)
    scores = _verl_scores(returned, call_log) if reward.follows_verl else returned
    values: list[float | None] = []
    turns: list[list[float] | None] = []
    bad: list[tuple[int, str]] = []
    for i, value in enumerate(scores):
        rewards = None
        if _is_by_turn(value):
            num_turns = batch.num_turns[i] if batch.num_turns else 1
            of_turns = value.turns if isinstance(value, PaidTurns) else value
            rewards = _turn_rewards(of_turns, num_turns)
            if isinstance(rewards, str):
                # Without turns the function meant something else than a reward for each of them.
                number = rewards if batch.has_turns else shorten(repr(value))
                rewards = None
            else:
                number = value.total if isinstance(value, PaidTurns) else math.fsum(rewards)
        else:
            number = _finite_or_text(value)
        if isinstance(number, str):
            if reward.follows_verl and isinstance(returned[i], Mapping):
                number += " as `score`"
            bad.append((i, number))
            number = None
        values.append(number)
        turns.append(rewards)
    if all(rewards is None for rewards in turns):
        turns = []
    return CallResult(values, turns, bad, call_log.extra, call_log.metrics)


def _is_by_turn(value: Any) -> bool:
    """True if a function's value for one completion has a reward for each turn: it is a list, a
    tuple, an array or `PaidTurns`."""
    return isinstance(value, list | tuple | PaidTurns) or getattr(value, "ndim", 0) == 1


def _turn_rewards(value: Sequence[Any], num_turns: int) -> list[float] | str:
    """Returns the rewards of a completion's turns as floats; a text that shows what is wrong if
    there is not one for each turn, or if one is not a finite number."""
    rewards = []
    for entry in value:
        number = _finite_or_text(entry)
        if not isinstance(number, float):
            return f"{number} among the rewards of turns"
        rewards.append(number)
    if len(rewards) != num_turns:
        return f"{count(len(rewards), 'reward')} for {count(num_turns, 'turn')}"
    return rewards


def _checked_list(result: Any, batch: Batch) -> list[Any]:
    """Returns the result of a function that is called with lists as a list. _BrokenConvention
    unless it has a length and can be iterated (a list, a tuple, an array, ...) with one entry for
    each completion. Text, bytes, dicts and sets are refused. What the entries are is not
    checked."""
    wanted = (
        "it must return a list with one number (or None where it cannot judge) for each "
        f"completion; {count(len(batch), 'was', 'were')} given, the first {batch.describe(0)}"
    )
    # A set has no order, so its entries could be given to the wrong completions.
    is_refused = isinstance(result, str | bytes | Mapping | Set)
    if is_refused or not (hasattr(result, "__len__") and hasattr(result, "__iter__")):
        raise _BrokenConvention(f"returned {shorten(repr(result))}: {wanted}")
    values = list(result)
    if len(values) != len(batch):
        raise _BrokenConvention(
            f"returned {len(values)} values for {len(batch)} completions: {wanted}"
        )
    return values


def _verl_scores(returned: Sequence[Any], call_log: _CallLog) -> list[Any]:
    """Returns the score of each completion, given what a function of verl's conventions returned
    for it: the score itself, or a dict with `score`. Logs the dicts' other values in `call_log` as
    extra columns (None for a completion without that value), and their numbers as metrics too. Logs
    a score that is not in a dict as the metric `acc`, as verl does. _BrokenConvention for a dict
    without `score`. The scores are not checked here."""
    scores = []
    columns: dict[Any, list[Any]] = {}
    for i, entry in enumerate(returned):
        if not isinstance(entry, Mapping):
            number = _finite_or_text(entry)
            if isinstance(number, float):
                call_log.log_metric("acc", number)
            scores.append(entry)
            continue
        if "score" not in entry:
            raise _BrokenConvention(
                f"returned {shorten(repr(entry))}: expected a number, or a dict with `score`"
            )
        scores.append(entry["score"])
        for name, value in entry.items():
            if name == "score":
                continue
            number = _finite_or_text(value)
            if isinstance(number, float):
                call_log.log_metric(name, number)
            columns.setdefault(name, [None] * len(returned))[i] = value
    for name, values in columns.items():
        call_log.log_extra(str(name), values)
    return scores


def _finite_or_text(value: Any) -> float | str | None:
    """Returns a number as a float, and None for None. Returns a text that shows the value if it is
    anything else: text (also `1.0`), bytes, nan, inf, or what `float` refuses. A bool counts as a
    number."""
    if value is None:
        return None
    if isinstance(value, str | bytes):
        return shorten(repr(value))
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return shorten(repr(value))
    return number if math.isfinite(number) else str(number)


def _json_value(value: Any) -> Any:
    """Returns a value as JSON can hold it: arrays become lists, dates ISO texts, and unknown
    objects their `str`. Names in dicts become text. nan and inf stay as they are."""
    if isinstance(value, np.ndarray | np.generic):
        return _json_value(value.tolist())
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if isinstance(value, Mapping):
        return {str(name): _json_value(item) for name, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_json_value(item) for item in value]
    if hasattr(value, "isoformat"):
        return value.isoformat()
    return str(value)


# ---- in the process that calls


class EventLoopThread:
    """An event loop in a daemon thread, started when it is first needed and kept until `close`, so
    that network clients that functions keep stay usable. It is a thread because a notebook's own
    thread already has a running loop."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    def run(self, wanted: Awaitable[Any]) -> Any:
        """Runs an awaitable on the loop's thread, which is started if there is none, and waits for
        it. Returns its value, or raises what it raised (a KeyboardInterrupt as RuntimeError). Other
        threads' calls run on the same loop at the same time. Not to be called on that loop."""

        async def wait() -> tuple[Any, BaseException | None]:
            """Returns (the value, None), or (None, an error that must not be raised in a task)."""
            try:
                with exit_forked_copies():
                    return await wanted, None
            # Raised in a task, these two would end the loop, and the wait for the task would not
            # end. Raised by the caller, a KeyboardInterrupt would look like Ctrl-C.
            except SystemExit as error:
                return None, error
            except KeyboardInterrupt:
                return None, RuntimeError("KeyboardInterrupt")

        if self._loop is None:
            made: Future[asyncio.AbstractEventLoop] = Future()
            self._thread = threading.Thread(
                target=_run_loop, args=(made,), name="async rewards", daemon=True
            )
            self._thread.start()
            self._loop = made.result()
        result, error = asyncio.run_coroutine_threadsafe(wait(), self._loop).result()
        if error is not None:
            raise error
        return result

    def close(self) -> None:
        """Stops the loop, cancels its tasks, and waits up to `CLOSE_SECONDS` for its thread. A task
        that runs longer is left to end with the process. A later `run` starts another loop. If
        there is no loop, nothing is done."""
        loop, self._loop = self._loop, None
        if loop is not None and self._thread is not None:
            loop.call_soon_threadsafe(loop.stop)
            self._thread.join(CLOSE_SECONDS)


def _run_loop(made: Future[asyncio.AbstractEventLoop]) -> None:
    """Runs an event loop in this thread until it is stopped. Sets the loop as the result of the
    future `made` as soon as it exists."""
    with asyncio.Runner() as runner:  # at its end all tasks are cancelled
        end_copies_of_loop(runner.get_loop())
        made.set_result(runner.get_loop())
        runner.get_loop().run_forever()


class CallHandler:
    """Runs in a worker process: calls the function that a header names for the batch in the body.
    After a MemoryError the worker process is replaced."""

    def __init__(self, functions: Sequence[RewardFunction], timeout_seconds: float) -> None:
        """`functions` are called by their position in this list. `timeout_seconds` is the limit of
        an `async` call. Starts no thread yet."""
        self.functions = functions
        self.timeout_seconds = timeout_seconds
        self.loop = EventLoopThread()

    def call(self, header: Header, body: bytes) -> Header:
        """Calls the function number `header["function"]` for the batch that is pickled in `body`,
        and returns the result as the reply to send. If the batch cannot be unpickled, the reply
        says so."""
        batch = _unpickled(body)
        if isinstance(batch, CallResult):
            return _reply(batch)
        function = self.functions[header["function"]]
        return _reply(call(function, batch, self.loop.run))

    async def call_async(self, header: Header, body: bytes) -> Header:
        """Awaits the `async` function number `header["function"]` for the batch that is pickled in
        `body`, and returns the result as the reply to send. If the batch cannot be unpickled, the
        reply says so. The time limit of the call is applied here, since the process that would be
        killed runs other calls too."""
        batch = _unpickled(body)
        if isinstance(batch, CallResult):
            return _reply(batch)
        function = self.functions[header["function"]]
        return _reply(await call_async(function, batch, self.timeout_seconds))


def _reply(result: CallResult) -> Header:
    """Returns a result as a worker's reply; `spent` asks the supervisor to replace the worker."""
    return {**result.as_json(), "spent": isinstance(result.cause, MemoryError)}


def pickled_batch(batch: Batch) -> bytes:
    """Returns a batch as the bytes that a worker is sent. If a value cannot be pickled, raises a
    ShoalError that names its column and data row."""
    return pickled(
        batch,
        _named_values(batch),
        "leave it out, or call rewards in this process: reward.workers=0",
    )


def _named_values(batch: Batch) -> Iterator[tuple[str, Any]]:
    """Yields (`column 'answer' of data row 3`, value) for each value of the batch's columns."""
    for name, values in batch.columns.items():
        for (row, _), value in zip(batch.rows, values, strict=True):
            yield f"column {name!r} of data row {row}", value


def _unpickled(body: bytes) -> Batch | CallResult:
    """Returns the batch from the bytes that `pickled_batch` returned. If they cannot be unpickled
    in this process: a failed `CallResult` of the kind WRONG, which ends the run."""
    try:
        return ForkingPickler.loads(body)  # pyright: ignore[reportAttributeAccessIssue]
    except Exception as error:
        return CallResult(
            kind=WRONG,
            text=f"cannot be sent its batch: {type(error).__name__}: {error}; "
            f"reward.workers=0 calls it in this process",
        )


# ---- words


def unused_name(name: str, taken: Iterable[str]) -> str:
    """Returns the name, or the first of `name_2`, `name_3`, ... that is not in `taken`. `taken` is
    not changed."""
    taken = set(taken)
    candidate = name
    number = 1
    while candidate in taken:
        number += 1
        candidate = f"{name}_{number}"
    return candidate
