"""Rewards that hang, die, leak and lie: limits, blame and policies of the pool, and that nothing is
left behind."""

from __future__ import annotations

import asyncio
import ctypes
import datetime
import faulthandler
import functools
import logging
import math
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from processes import gone
from scoring import score

from shoal.checks.reward import gold_of
from shoal.config.sections.reward import RewardSection
from shoal.config.sections.task import TaskSection
from shoal.job.interrupt import stop_on_signals
from shoal.job.task import load_task
from shoal.records import Example, Purpose, RewardFunction, ShoalError, ground_truth
from shoal.rewards import pool as pool_module
from shoal.rewards import scores
from shoal.rewards.loading import name_functions
from shoal.rewards.pool import RewardPool
from shoal.rewards.scores import Scores
from shoal.stop import StopRequested
from shoal.workers import pool as worker_pool
from shoal.workers import process

EXAMPLES = [
    Example(17, [{"role": "user", "content": "2 + 3?"}], {"answer": "5"}),
    Example(4, [{"role": "user", "content": "2 * 4?"}], {"answer": "8"}),
]
TEXTS = [["5", "6"], ["bad", "7"]]
IDS = [[[1, 2], [3]], [[4], []]]
BAD = r"data row 4, completion 0 \(prompt '2 \* 4\?', completion 'bad'\)"


def section(**keys: Any) -> RewardSection:
    return RewardSection(**{"timeout_seconds": 20.0, "memory_gib": 0.5, **keys})


def scored(
    *functions: Any,
    examples: Sequence[Example] = EXAMPLES,
    texts: Any = TEXTS,
    ids: Any = IDS,
    weights: Sequence[float] = (),
    **keys: Any,
) -> Scores:
    with RewardPool(name_functions(functions, weights), section(**keys), 10) as pool:
        pool.submit("here", examples, texts, ids, step=3)
        [(ticket, scores)] = pool.collect(wait=True)
    assert ticket == "here"
    return scores


@pytest.mark.parametrize(
    ("step", "purpose", "max_steps", "when"),
    [
        (0, Purpose.TRAIN, 10, "in step 1"),
        (3, Purpose.TRAIN, 10, "in step 4"),
        (0, Purpose.EVALUATE, 10, "in the evaluation before training"),
        (3, Purpose.EVALUATE, 10, "after step 3"),
        (0, Purpose.EVALUATE, 0, "at the start"),  # of `shoal eval`
    ],
)
def test_a_failure_names_the_step_or_the_evaluation(
    step: int, purpose: Purpose, max_steps: int, when: str
) -> None:
    def fails(completions: Any, **kwargs: Any) -> list[float]:
        raise ValueError("no")

    with RewardPool(name_functions([fails]), section(workers=0), max_steps) as pool:
        pool.submit("here", EXAMPLES, TEXTS, IDS, step, purpose=purpose)
        with pytest.raises(ShoalError, match=f"function 'fails' {when} raised ValueError"):
            pool.collect(wait=True)


def texts_of(completions: Any) -> list[str]:
    return [completion[0]["content"] for completion in completions]


def at_bad(act: Callable[[], Any]) -> Callable[..., list[Any]]:
    """A function that gives 1, 2, ... by length, and acts where a completion is `bad`."""

    def checker(completions: Any, **kwargs: Any) -> list[Any]:
        result = []
        for text in texts_of(completions):
            result.append(act() if text == "bad" else float(len(text)))
        return result

    return checker


# ---- what goes wrong, and whose fault it is


def hang() -> None:
    time.sleep(1000)


def hang_with_a_family() -> None:
    subprocess.Popen(["sleep", "1000"])
    subprocess.Popen(["sleep", "1000"], start_new_session=True)
    time.sleep(1000)


def allocate() -> None:
    held = []
    while True:
        held.append(bytearray(20_000_000))


def crash() -> None:
    faulthandler.disable()
    ctypes.string_at(0)


def complain() -> None:
    raise KeyError("no such\nthing")


FAULTS = [
    (hang, "timed out", r"took longer than reward.timeout_seconds=0.6 for BAD"),
    (hang_with_a_family, "timed out", r"took longer than reward.timeout_seconds=0.6 for BAD"),
    (
        allocate,
        "raised",
        r"raised MemoryError \(reward.memory_gib is the limit\) for BAD; test_pool.py, line \d+",
    ),
    (functools.partial(os._exit, 3), "died", r"ended its process \(exit code 3\) for BAD"),
    (crash, "died", r"ended its process \(SIGSEGV\) for BAD"),
    (
        lambda: os.kill(os.getpid(), signal.SIGKILL),
        "died",
        r"ended its process \(SIGKILL, out of memory\?\) for BAD",
    ),
    (
        functools.partial(os.closerange, 3, 256),
        "died",
        r"ended its process \(exit code 1\) for BAD",
    ),
    (complain, "raised", r"raised KeyError: 'no such\\nthing' for BAD; test_pool.py, line \d+"),
    (functools.partial(sys.exit, 2), "raised", "raised SystemExit: 2 for BAD"),
    (lambda: math.nan, "not a number", "returned nan for BAD: expected a finite number"),
    (lambda: "1.0", "not a number", "returned '1.0' for BAD: expected a finite number"),
]


@pytest.mark.parametrize("workers", [0, 1])
def test_an_async_function_that_raises_keyboard_interrupt_fails_as_with_any_other_error(
    workers: int,
) -> None:
    """It ends no event loop, which nobody would be woken by, and no other call on it."""

    async def checker(completions: Any, **kwargs: Any) -> list[float]:
        raise KeyboardInterrupt

    async def other(completions: Any, **kwargs: Any) -> list[float]:
        return [1.0] * len(completions)

    scores = scored(checker, other, workers=workers, on_error="zero")
    assert [failure.kind for failure in scores.failures] == ["raised"] * 4
    np.testing.assert_array_equal(scores.rewards, [[1, 1], [1, 1]])


@pytest.mark.slow
@pytest.mark.parametrize(("act", "kind", "message"), FAULTS)
@pytest.mark.parametrize("on_error", ["zero", "skip"])
def test_one_completion_fails_and_the_others_keep_their_rewards(
    act: Callable[[], Any], kind: str, message: str, on_error: str
) -> None:
    seconds = 0.6 if kind == "timed out" else 20.0
    started = time.monotonic()
    scores = scored(
        at_bad(act),
        lambda **kwargs: [10.0] * len(kwargs["completions"]),
        on_error=on_error,
        timeout_seconds=seconds,
        memory_gib=0.1,
    )
    assert time.monotonic() - started < 20  # two limits and some
    [failure] = scores.failures
    assert (failure.function, failure.row, failure.completion, failure.kind) == (
        "checker",
        4,
        0,
        kind,
    )
    assert re.fullmatch(
        f"reward function 'checker' after step 3 {message.replace('BAD', BAD)}.*", failure.text
    )
    skip = on_error == "skip"
    np.testing.assert_array_equal(
        scores.components["checker"], [[1, 1], [np.nan if skip else 0, 1]]
    )
    np.testing.assert_array_equal(scores.rewards, [[11, 11], [np.nan if skip else 10, 11]])
    np.testing.assert_array_equal(scores.valid, [[True, True], [not skip, True]])


@pytest.mark.parametrize(("act", "kind", "message"), FAULTS)
def test_by_default_the_run_ends_with_the_example_named(
    act: Callable[[], Any], kind: str, message: str
) -> None:
    happened = message.replace("BAD", BAD)
    with pytest.raises(
        ShoalError, match=f"'checker' after step 3 {happened}.*reward.on_error=zero"
    ):
        scored(at_bad(act), timeout_seconds=0.6 if kind == "timed out" else 20.0, memory_gib=0.1)


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("on_error", ["error", "zero", "skip"])
@pytest.mark.parametrize(
    ("result", "message"),
    [
        ([1.0] * 3, "returned 3 values for 4 completions.*row 17"),
        (1.0, "returned 1.0: it must return a list .*; 4 were given"),
        # A set of the right length has no order.
        ({0.0, 1.0, 2.0, 3.0}, r"returned \{.*\}: it must return a list .*; 4 were given"),
        (
            None,
            r"returned None: it must return a list with one number \(or None where .*; 4 were "
            r"given, the first",
        ),
    ],
)
def test_what_is_no_list_of_as_many_is_an_error_under_every_policy(
    result: Any, message: str, on_error: str, workers: int
) -> None:
    with pytest.raises(ShoalError, match=rf"'<lambda>' after step 3 {message}"):
        scored(lambda **kwargs: result, on_error=on_error, workers=workers)


def test_a_wish_that_no_column_meets_is_an_error_through_workers() -> None:
    def checker(completions: Any, answr: Any) -> list[float]:
        return []

    with pytest.raises(
        ShoalError, match=r"'checker' after step 3 needs 'answr'.*did you mean answer\?"
    ):
        scored(checker, on_error="skip")


def test_a_function_that_hangs_on_everything_costs_one_limit_a_completion() -> None:
    def checker(completions: Any, **kwargs: Any) -> list[float]:
        time.sleep(1000)
        return []

    with RewardPool(
        name_functions([checker]), section(on_error="skip", timeout_seconds=0.5, workers=4)
    ) as pool:
        started = time.monotonic()
        for ticket in range(3):
            pool.submit(ticket, EXAMPLES[:1], [["a", "b", "c"]], [[[1]] * 3], step=3)
        found: dict[Any, Scores] = {}
        while len(found) < 3:
            found |= pool.collect(wait=True)
        seconds = time.monotonic() - started
    assert [len(scores.failures) for scores in found.values()] == [3, 3, 3]
    assert not any(scores.valid.any() for scores in found.values())
    # 0.5 * (1 + 9 / 4) and the forks; a limit after the other would be 6 for the calls alone
    assert seconds < 8


def test_a_batch_that_fails_though_no_part_does() -> None:
    def checker(completions: Any, **kwargs: Any) -> list[float]:
        if len(completions) > 1:
            raise RuntimeError("too many")
        return [2.0]

    message = (
        r"raised RuntimeError: too many in a batch of 4 that starts with data row 17.*for no part "
        r"of it alone"
    )
    for workers in (0, 2):
        with pytest.raises(ShoalError, match=message):
            scored(checker, workers=workers)
        scores = scored(checker, workers=workers, on_error="skip")
        np.testing.assert_array_equal(scores.rewards, np.full((2, 2), 2.0))
        [failure] = scores.failures
        assert (failure.row, failure.completion, failure.kind) == (17, None, "raised")
        assert re.search(message, failure.text)


def test_none_is_no_failure() -> None:
    scores = scored(lambda **kwargs: [None, 1.0, None, 2.0], on_error="zero")
    np.testing.assert_array_equal(scores.valid, [[False, True], [False, True]])
    assert np.isnan(scores.rewards[:, 0]).all()
    assert scores.failures == ()


def test_the_run_goes_on_with_the_next_step_after_a_worker_is_lost() -> None:
    with RewardPool(
        name_functions([at_bad(hang)]), section(on_error="zero", timeout_seconds=0.6, workers=1)
    ) as pool:
        pool.submit(0, EXAMPLES, TEXTS, IDS, step=3)
        pool.submit(1, EXAMPLES[:1], [["55", "6"]], [[[1], [1]]], step=4)
        found: dict[Any, Scores] = {}
        while len(found) < 2:
            found |= pool.collect(wait=True)
    np.testing.assert_array_equal(found[1].rewards, [[2.0, 1.0]])
    assert found[1].failures == ()


# ---- functions of every make, and what they are given


def notebook(source: str) -> dict[str, Any]:
    """What a notebook's cells define."""
    module = types.ModuleType("__notebook__")
    exec(textwrap.dedent(source), vars(module))
    return vars(module)


def test_closures_notebook_functions_partials_and_objects_run_in_workers() -> None:
    bonus, here = 0.25, os.getpid()

    def closure(completions: Any, **kwargs: Any) -> list[float]:
        return [bonus + (os.getpid() == here)] * len(completions)

    class Grader:
        def __init__(self, lock: Any) -> None:
            self.lock = lock

        def __call__(self, completions: Any, **kwargs: Any) -> list[float]:
            with self.lock:
                return [3.0] * len(completions)

    cells = notebook("""
        limit = 1
        def brief(completions, **kwargs):
            return [float(len(c[0]["content"]) <= limit) for c in completions]
        """)
    scores = scored(
        closure,
        Grader(threading.Lock()),
        cells["brief"],
        functools.partial(lambda completions, value, **kwargs: [value] * 4, value=7.0),
    )
    assert list(scores.components) == ["closure", "Grader", "brief", "<lambda>"]
    np.testing.assert_array_equal(scores.components["closure"], np.full((2, 2), 0.25))
    np.testing.assert_array_equal(scores.components["brief"], [[1, 1], [0, 1]])
    np.testing.assert_array_equal(scores.rewards, [[11.25, 11.25], [10.25, 11.25]])


def test_results_equal_those_of_the_same_process() -> None:
    def checker(
        prompts: Any,
        completions: Any,
        completion_ids: Any,
        trainer_state: Any,
        log_extra: Any,
        log_metric: Any,
        answer: Any,
        table: Any,
        when: Any,
        nested: Any,
        **kwargs: Any,
    ) -> list[float | None]:
        log_extra("kinds", [type(value).__name__ for value in table])
        log_extra("odd", [np.float32(0.5), np.arange(2), when[0], {1: {2}}])
        log_metric("steps", trainer_state.global_step)
        log_metric("steps", trainer_state.max_steps)
        return [
            None,
            1 / 3,
            table[2].sum() + nested[2]["a"]["b"][1],
            (when[3].day + len(completion_ids[0])) / 7,
        ]

    columns = {
        "table": np.arange(6.0).reshape(2, 3),
        "when": datetime.datetime(2020, 2, 29, 12),
        "nested": {"a": {"b": [1, 2.5]}},
        "answer": "5",
    }
    examples = [Example(one.row, one.prompt, columns) for one in EXAMPLES]
    there = scored(checker, examples=examples, weights=(0.3,))
    here = scored(checker, examples=examples, weights=(0.3,), workers=0)
    np.testing.assert_array_equal(there.rewards, here.rewards)
    np.testing.assert_array_equal(there.components["checker"], here.components["checker"])
    assert there.extra == here.extra
    assert there.extra["kinds"] == [["ndarray"] * 2] * 2
    assert there.extra["odd"] == [[0.5, [0, 1]], ["2020-02-29T12:00:00", {"1": [2]}]]
    assert there.metrics == here.metrics == {"steps": [3.0, 10.0]}


def test_plain_prompts_bring_plain_completions_through_workers() -> None:
    def checker(prompts: Any, completions: Any) -> list[float]:
        result = []
        for prompt, text in zip(prompts, completions, strict=True):
            result.append(float(prompt == "Once" and text == "b"))
        return result

    scores = scored(checker, examples=[Example(0, "Once")], texts=[["a", "b"]], ids=[[[1], [2]]])
    np.testing.assert_array_equal(scores.rewards, [[0.0, 1.0]])


def test_a_column_that_cannot_be_sent_is_named() -> None:
    with pytest.raises(
        ShoalError, match=r"column 'lock' of data row 8 holds a lock.*reward.workers=0"
    ):
        scored(
            lambda **kwargs: [0.0] * 2,
            examples=[Example(8, "p", {"lock": threading.Lock()})],
            texts=[["a", "b"]],
            ids=[[[1], [2]]],
        )


def test_logs_of_completions_that_were_called_alone_are_joined() -> None:
    def checker(completions: Any, log_extra: Any, log_metric: Any, **kwargs: Any) -> list[float]:
        log_metric("size", len(completions))
        values = at_bad(complain)(completions)
        log_extra("seen", texts_of(completions))
        return values

    scores = scored(checker, on_error="skip")
    assert scores.extra == {"seen": [["5", "6"], [None, "7"]]}
    assert scores.metrics == {"size": [1.0, 1.0, 1.0]}


def test_tickets_get_their_own_scores_in_any_order() -> None:
    def checker(completions: Any, **kwargs: Any) -> list[float]:
        number = float(texts_of(completions)[0])
        time.sleep(0.2 if number == 0 else 0.0)
        return [number] * len(completions)

    with RewardPool(name_functions([checker]), section(workers=2)) as pool:
        for ticket in range(12):
            pool.submit(ticket, EXAMPLES[:1], [[str(ticket)] * 2], [[[1]] * 2], step=3)
        order: list[tuple[Any, Scores]] = []
        while len(order) < 12:
            order += pool.collect(wait=True)
        assert pool.collect(wait=True) == []  # nothing is queued
    assert sorted(ticket for ticket, _ in order) == list(range(12))
    assert all((scores.rewards == ticket).all() for ticket, scores in order)


def test_a_tasks_own_functions_run_here_and_no_process_is_made() -> None:
    rewards = load_task(TaskSection(num_eval_questions=1)).rewards
    for one in rewards:
        assert one.runs_in_process
    assert not any(
        one.runs_in_process
        for one in load_task(TaskSection(num_eval_questions=1), functions=[len]).rewards
    )
    seen: list[int] = []

    def own(completions: Any, **kwargs: Any) -> list[float]:
        seen.append(os.getpid())
        return [1.0] * len(completions)

    def other(completions: Any, **kwargs: Any) -> list[float]:
        return [2.0] * len(completions)

    functions = (
        RewardFunction("own", own, runs_in_process=True),
        RewardFunction("other", other, 0.5),
    )
    with RewardPool(functions, section()) as pool:
        pool.submit(0, EXAMPLES, TEXTS, IDS, step=1)
        [(_, scores)] = pool.collect(wait=True)
    assert seen == [os.getpid()]
    assert list(scores.components) == ["own", "other"]
    np.testing.assert_array_equal(scores.rewards, np.full((2, 2), 2.0))
    before = children()
    with RewardPool(rewards, section()):
        assert children() == before


# ---- asynchronous functions


@pytest.mark.slow
def test_asynchronous_calls_of_a_step_run_together() -> None:
    async def slow(completions: Any, **kwargs: Any) -> list[float]:
        await asyncio.sleep(0.5)
        return [float(os.getpid())] * len(completions)

    class Slow:
        async def __call__(self, completions: Any, **kwargs: Any) -> list[float]:
            return await slow(completions)

    def plain(completions: Any, **kwargs: Any) -> list[float]:
        return [1.0] * len(completions)

    for workers in (0, 1):
        with RewardPool(name_functions([slow, Slow(), plain]), section(workers=workers)) as pool:
            started = time.monotonic()
            pool.submit(0, EXAMPLES * 4, TEXTS * 4, IDS * 4, step=1)
            if workers:
                for ticket in range(1, 8):
                    pool.submit(ticket, EXAMPLES, TEXTS, IDS, step=1)
            found: dict[Any, Scores] = {}
            while len(found) < (8 if workers else 1):
                found |= pool.collect(wait=True)
            assert time.monotonic() - started < 3  # one by one, the calls with workers would take 8
        pids = {pid for scores in found.values() for pid in np.unique(scores.components["slow"])}
        assert len(pids) == 1
        assert (os.getpid() in pids) == (workers == 0)
        np.testing.assert_array_equal(found[0].components["plain"], np.ones((8, 2)))


@pytest.mark.slow
@pytest.mark.parametrize("block", [False, True])
def test_an_asynchronous_call_that_hangs_spoils_no_other(block: bool) -> None:
    async def checker(completions: Any, **kwargs: Any) -> list[float]:
        await asyncio.sleep(0.05)
        if "bad" in texts_of(completions):
            if block:
                time.sleep(1000)
            await asyncio.sleep(1000)
        return [float(len(text)) for text in texts_of(completions)]

    with RewardPool(
        name_functions([checker]), section(on_error="skip", timeout_seconds=0.6)
    ) as pool:
        for ticket, texts in enumerate(TEXTS):
            pool.submit(ticket, EXAMPLES[1:], [texts], [[[1], [1]]], step=3)
        found: dict[Any, Scores] = {}
        while len(found) < 2:
            found |= pool.collect(wait=True)
    np.testing.assert_array_equal(found[0].rewards, [[1, 1]])
    np.testing.assert_array_equal(found[1].rewards, [[np.nan, 1]])
    assert found[0].failures == ()
    [failure] = found[1].failures
    assert (failure.kind, failure.completion) == ("timed out", 0)


def test_a_plain_function_may_return_what_must_be_awaited() -> None:
    async def later(completions: Any) -> list[float]:
        await asyncio.sleep(0)
        return [5.0] * len(completions)

    for workers in (0, 1):
        scores = scored(lambda completions, **kwargs: later(completions), workers=workers)
        np.testing.assert_array_equal(scores.rewards, np.full((2, 2), 5.0))


def test_asynchronous_functions_run_where_a_loop_is_running_already() -> None:
    async def later(completions: Any, **kwargs: Any) -> list[float]:
        await asyncio.sleep(0)
        return [5.0] * len(completions)

    async def cell() -> Scores:
        return score(
            name_functions([later]), EXAMPLES, [one.prompt for one in EXAMPLES], TEXTS, IDS
        )

    np.testing.assert_array_equal(asyncio.run(cell()).rewards, np.full((2, 2), 5.0))


# ---- verl's convention


VERL = [
    Example(
        2,
        [{"role": "user", "content": "2 + 3?"}],
        {
            "data_source": "sums",
            "reward_model": {"style": "rule", "ground_truth": "5"},
            "extra_info": {"index": 9},
            "answer": "no",
        },
    )
]


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any]
) -> Any:
    assert data_source == "sums"
    assert (extra_info["index"], extra_info["num_turns"], extra_info["rollout_reward_scores"]) == (
        9,
        2,
        {},
    )
    extra_info["index"] = None  # a copy
    return {
        "score": float(solution_str == ground_truth),
        "length": len(solution_str),
        "read": solution_str,
    }


@pytest.mark.parametrize("workers", [0, 2])
def test_verls_functions_are_called_once_a_completion(workers: int, tmp_path: Path) -> None:
    scores = scored(
        compute_score, examples=VERL, texts=[["5", "six"]], ids=[[[1], [2]]], workers=workers
    )
    np.testing.assert_array_equal(scores.components["compute_score"], [[1, 0]])
    assert scores.metrics == {"length": [1.0, 3.0]}
    assert scores.extra == {"length": [[1, 3]], "read": [["5", "six"]]}

    async def later(solution_str: str, ground_truth: str, **kwargs: Any) -> float:
        await asyncio.sleep(0)
        return float(solution_str == ground_truth)

    scores = scored(
        later,
        examples=[Example(0, "p", {"answer": "5"})],
        texts=[["5", "6"]],
        ids=[[[1], [2]]],
        workers=workers,
    )
    np.testing.assert_array_equal(scores.rewards, [[1, 0]])
    assert scores.metrics == {"acc": [1.0, 0.0]}

    path = tmp_path / "verl.py"
    path.write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    return float('nan') if solution_str == 'bad' else 1.0\n"
    )
    task = load_task(TaskSection(num_eval_questions=1), RewardSection((f"{path}:compute_score",)))
    with RewardPool(task.rewards, section(workers=workers, on_error="skip")) as pool:
        pool.submit(0, EXAMPLES, TEXTS, IDS, step=3)
        [(_, scores)] = pool.collect(wait=True)
    np.testing.assert_array_equal(scores.valid, [[True, True], [False, True]])
    assert [failure.kind for failure in scores.failures] == ["not a number"]


@pytest.mark.parametrize("workers", [0, 1])
def test_verls_batch_functions_are_called_once_a_group_with_lists(workers: int) -> None:
    def compute_score(
        data_sources: list[str],
        solution_strs: list[str],
        ground_truths: list[str],
        extra_infos: list[dict[str, Any]],
        bonus: float = 0.0,
        **kwargs: Any,
    ) -> list[Any]:
        assert not kwargs
        if "bad" in solution_strs:
            raise ValueError("bad")
        numbers = [info["index"] for info in extra_infos]
        returned = []
        for i, text in enumerate(solution_strs):
            score = bonus + len(solution_strs) * (text == ground_truths[i])
            seen = f"{data_sources[i]} {numbers[i]} {text}"
            returned.append({"score": score, "length": len(text), "seen": seen})
        # Each kind of value, and one that has fewer names than the others.
        return [returned[0], {"score": None, "length": 9}, 0.5][: len(solution_strs)]

    texts = [["5", "six", "7"]]
    ids = [[[1], [2], [3]]]
    function = functools.partial(compute_score, bonus=0.25)
    found = scored(function, examples=VERL, texts=texts, ids=ids, workers=workers)
    # 0.25 + 3: one call had all three completions.
    np.testing.assert_array_equal(found.components["compute_score"], [[3.25, np.nan, 0.5]])
    assert found.metrics == {"length": [1.0, 9.0], "acc": [0.5]}
    assert found.extra == {"length": [[1, 9, None]], "seen": [["sums 9 5", None, None]]}

    # After a failure each completion is called by itself, as a list of one.
    found = scored(
        compute_score,
        examples=VERL,
        texts=[["5", "bad", "7"]],
        ids=ids,
        workers=workers,
        on_error="skip",
    )
    np.testing.assert_array_equal(found.components["compute_score"], [[1, np.nan, 0]])
    np.testing.assert_array_equal(found.valid, [[True, False, True]])


def test_what_verls_batch_functions_want_and_may_return() -> None:
    two = {"texts": [["5", "6"]], "ids": [[[1], [2]]], "workers": 0, "on_error": "error"}

    def judge(solution_strs: list[str], ground_truths: list[str]) -> Any:
        return returned

    returned: Any = [1.0]
    with pytest.raises(ShoalError, match="returned 1 values for 2 completions"):
        scored(judge, examples=VERL, **two)
    returned = {"score": [1.0, 2.0]}
    with pytest.raises(ShoalError, match="it must return a list with one number"):
        scored(judge, examples=VERL, **two)
    returned = [1.0, {"value": 1.0}]
    with pytest.raises(ShoalError, match=r"returned {'value': 1\.0}: expected a number, or a dict"):
        scored(judge, examples=VERL, **two)
    returned = [1.0, {"score": "1.0"}]
    with pytest.raises(ShoalError, match=r"'1\.0' as `score` for data row 2, completion 1"):
        scored(judge, examples=VERL, **two)
    with pytest.raises(ShoalError, match="needs a ground truth, which data row 0 lacks"):
        scored(judge, examples=[Example(0, "p", {})], **two)

    def half(solution_strs: list[str], truth: str) -> Any:
        return []

    with pytest.raises(ShoalError, match=r"together with 'ground_truths': .*f\(data_sources, "):
        scored(half, examples=VERL, **two)


@pytest.mark.parametrize("workers", [0, 1])
def test_what_verls_functions_want_and_may_return(workers: int) -> None:
    one = {"texts": [["5"]], "ids": [[[1]]], "workers": workers, "on_error": "zero"}
    with pytest.raises(
        ShoalError,
        match="'compute_score' after step 3 needs a ground truth, which data row 0 lacks: "
        "expected a column `reward_model`",
    ):
        scored(compute_score, examples=[Example(0, "p", {"data_source": "sums"})], **one)
    as_text = {
        "data_source": "sums",
        "reward_model": '{"style": "rule", "ground_truth": "5"}',
        "answer": "6",
    }
    with pytest.raises(ShoalError, match="which rows, line 3 lacks: `reward_model` is text"):
        scored(compute_score, examples=[Example(2, "p", as_text, "rows, line 3")], **one)

    def without(solution_str: str, ground_truth: str) -> Any:
        return {"value": 1.0}

    with pytest.raises(
        ShoalError, match=r"returned {'value': 1\.0}: expected a number, or a dict with `score`"
    ):
        scored(without, examples=VERL, **one)


@pytest.mark.parametrize(
    ("returned", "told"),
    [
        ({"score": "1.0"}, "'1.0' as `score`"),
        ({"score": math.nan}, "nan as `score`"),
        ((1.0, "right"), "(1.0, 'right')"),
        ("1.0", "'1.0'"),
    ],
)
def test_a_score_of_verls_functions_that_is_no_number_is_shown(returned: Any, told: str) -> None:
    def judge(solution_str: str, ground_truth: str) -> Any:
        return returned

    with pytest.raises(ShoalError) as raised:
        scored(judge, examples=VERL, texts=[["5"]], ids=[[[1]]], workers=0, on_error="error")
    message = str(raised.value)
    assert f"reward function 'judge' after step 3 returned {told} for data row 2" in message
    assert ": expected a finite number, a dict with one as `score`, or None to abstain. " in message
    assert "turn" not in message.replace("returned", "")


@pytest.mark.parametrize(
    "columns",
    [
        {"reward_model": {"ground_truth": "1"}, "ground_truth": "2", "answer": "3"},
        {"answer": "3", "ground_truth": "1", "solution": "4"},
        {"solution": "so it is 1", "answer": "1"},
        {"answer": "", "solution": "1", "label": "2"},
        {"label": "2", "target": "1"},
    ],
)
def test_what_is_right_is_one_thing_for_rewards_and_the_doctor(columns: dict[str, Any]) -> None:
    def right(solution_str: str, ground_truth: str) -> float:
        return float(solution_str == ground_truth)

    example = Example(0, "p", columns)
    scores = scored(right, examples=[example], texts=[["1", "2"]], ids=[[[1], [1]]], workers=0)
    np.testing.assert_array_equal(scores.rewards, [[1, 0]])
    assert gold_of(example) == ground_truth(columns) == "1"


# ---- waits that end


def supervisor_of(pool: RewardPool) -> int:
    assert pool._workers is not None
    return pool._workers.pid


def lone(text: str) -> tuple[Any, ...]:
    return EXAMPLES[1:], [[text]], [[[1]]], 3


@pytest.fixture
def stopped(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(worker_pool, "SILENT_SECONDS", 1.0)
    monkeypatch.setattr(process, "SEND_SECONDS", 1.0)
    monkeypatch.setattr(pool_module, "FIRST_REPORT_SECONDS", 0.3)
    with RewardPool(name_functions([at_bad(hang)]), section(timeout_seconds=1.0)) as pool:
        pid = supervisor_of(pool)
        os.kill(pid, signal.SIGSTOP)
        yield pool
    assert gone(pid)


@pytest.mark.slow
def test_a_pool_that_says_nothing_is_an_error_and_the_wait_is_message(
    stopped: RewardPool, capsys: pytest.CaptureFixture[str]
) -> None:
    stopped.submit(0, *lone("5"))
    with pytest.raises(
        ShoalError, match=r"waited \d+ s for rewards \(completions with checker: 1\), but .* stuck"
    ):
        stopped.collect(wait=True)
    line = "waiting for rewards for 0 s: completions with checker: 1; reward.timeout_seconds=1 "
    assert line in capsys.readouterr().err
    with pytest.raises(
        ShoalError, match="the reward workers have ended, so nothing more can be scored"
    ):
        stopped.submit(1, *lone("5"))


@pytest.mark.slow
def test_a_pool_that_takes_nothing_is_an_error(stopped: RewardPool) -> None:
    with pytest.raises(ShoalError, match="is stopped or stuck"):
        stopped.submit(0, *lone("5" * 10_000_000))


@pytest.mark.slow
def test_a_long_call_is_no_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_pool, "PULSE_SECONDS", 0.05)
    monkeypatch.setattr(worker_pool, "SILENT_SECONDS", 1.5)
    scores = scored(
        lambda completions, **kwargs: [float(time.sleep(2.5) is None)] * len(completions)
    )
    assert (scores.rewards == 1).all()


def test_a_pool_that_takes_longer_than_it_can_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "GENEROUS", 0.0)
    with RewardPool(name_functions([at_bad(hang)]), section()) as pool:
        pool.submit(0, *lone("bad"))
        with pytest.raises(ShoalError, match="is stopped or stuck"):
            pool.collect(wait=True)
    assert 7.0 < worker_pool.Limits(1, 7.0).most_seconds(num_calls=0) < 7.0 + 60


@pytest.mark.slow
def test_a_worker_that_cannot_end_stops_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(pid: int, options: int) -> tuple[int, int]:
        if not options & os.WNOHANG:
            time.sleep(20)  # as long as a device does not answer
        return 0, 0

    with monkeypatch.context() as patch:
        patch.setattr(os, "waitpid", never)
        pool = RewardPool(
            name_functions([at_bad(hang)]), section(timeout_seconds=0.5, workers=1, on_error="skip")
        )
    with pool:
        started = time.monotonic()
        pool.submit(0, *lone("bad"))
        pool.submit(1, *lone("77"))
        found: dict[Any, Scores] = {}
        while len(found) < 2:
            found |= pool.collect(wait=True)
        assert time.monotonic() - started < 12
    assert [failure.kind for failure in found[0].failures] == ["timed out"]
    np.testing.assert_array_equal(found[1].rewards, [[2.0]])


@pytest.mark.slow
def test_a_call_that_never_begins_behind_another_is_made_elsewhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def checker(completions: Any, **kwargs: Any) -> list[float]:
        if "bad" in texts_of(completions):
            time.sleep(0.5)  # meanwhile the other call is asked for
            asyncio.get_running_loop().call_soon(time.sleep, 1000)
        return [3.0] * len(completions)

    monkeypatch.setattr(worker_pool, "START_SECONDS", 1.0)
    with RewardPool(name_functions([checker]), section(timeout_seconds=1.0)) as pool:
        pool.submit(0, *lone("bad"))
        time.sleep(0.2)
        pool.submit(1, *lone("5"))
        found: dict[Any, Scores] = {}
        deadline = time.monotonic() + 20
        while len(found) < 2 and time.monotonic() < deadline:
            found |= pool.collect()
            time.sleep(0.02)
    assert sorted(found) == [0, 1]
    assert all((scores.rewards == 3).all() for scores in found.values())


def test_a_pool_closes_at_once_though_a_younger_one_holds_its_link() -> None:
    functions = name_functions([at_bad(hang)])
    with RewardPool(functions, section()) as old, RewardPool(functions, section()) as young:
        started = time.monotonic()
        old.close()
        assert time.monotonic() - started < 6
        young.submit(0, *lone("5"))
        [(_, scores)] = young.collect(wait=True)
        np.testing.assert_array_equal(scores.rewards, [[1.0]])


def test_a_pool_that_is_closed_judges_nothing_by_halves() -> None:
    functions = (
        RewardFunction(
            "own", lambda completions, **kwargs: [1.0] * len(completions), runs_in_process=True
        ),
        *name_functions([at_bad(hang)]),
    )
    pool = RewardPool(functions, section())
    pool.close()
    with pytest.raises(ShoalError, match="the reward workers have ended"):
        pool.submit(0, *lone("5"))
    assert pool.collect() == []


def test_a_supervisor_whose_trainer_gave_up_ends_without_a_word(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    # those of pytest would hide what asyncio says
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    pool = RewardPool(name_functions([at_bad(hang)]), section(workers=2))
    for ticket in range(40):
        pool.submit(ticket, *lone("bad"))
    assert pool._workers is not None
    pool._workers.cancel(range(40))  # each of them is to be replied to
    pool.close()
    assert capfd.readouterr().err == ""


def test_a_worker_that_ends_as_it_starts_is_a_call_that_died(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def limit_memory(_):
        return os._exit(3)

    monkeypatch.setattr(worker_pool, "limit_memory", limit_memory)
    with RewardPool(name_functions([at_bad(hang)]), section(on_error="zero")) as pool:
        pool.submit(0, *lone("5"))
        [(_, scores)] = pool.collect(wait=True)
    assert (
        "ended its process (as it started)" in scores.failures[0].text
        and capfd.readouterr().err == ""
    )


@pytest.mark.slow
@pytest.mark.parametrize("singly", [False, True])
def test_a_trial_ends_with_the_first_completion_that_takes_too_long(singly: bool) -> None:
    def whole(completions: Any, **kwargs: Any) -> list[float]:
        if any(text != "5" for text in texts_of(completions)):
            time.sleep(1000)
        return [1.0] * len(completions)

    def one(solution_str: str, ground_truth: str) -> float:
        return whole([[{"content": solution_str}]])[0]

    with RewardPool(
        name_functions([one if singly else whole]), section(timeout_seconds=0.5, workers=1)
    ) as pool:
        started = time.monotonic()
        pool.submit(
            0,
            EXAMPLES[:1],
            [["5"] + ["6"] * 20],
            [[[1]] * 21],
            0,
            on_error="skip",
            trial=["right", *["wrong"] * 20],
        )
        [(_, scores)] = pool.collect(wait=True)
        assert time.monotonic() - started < 7  # each alone takes 10
    assert [failure.completion for failure in scores.failures] == [1]
    assert " for data row 17, wrong (prompt " in scores.failures[0].text
    np.testing.assert_array_equal(scores.valid, [[True] + [False] * 20])


# ---- processes


def children() -> set[int]:
    return {
        int(pid)
        for thread in Path("/proc/self/task").iterdir()
        for pid in (thread / "children").read_text().split()
    }


def descendants(pid: int) -> set[int]:
    found = {
        int(child)
        for thread in Path(f"/proc/{pid}/task").iterdir()
        for child in (thread / "children").read_text().split()
    }
    return found | {far for child in found for far in descendants(child)}


linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


@linux
def test_nothing_is_left_after_close(tmp_path: Path) -> None:
    files, before, threads = set(os.listdir("/proc/self/fd")), children(), threading.active_count()

    def checker(completions: Any, **kwargs: Any) -> list[float]:
        (tmp_path / str(os.getpid())).touch()
        for own_session in (False, True):
            child = subprocess.Popen(["sleep", "1000"], start_new_session=own_session)
            (tmp_path / str(child.pid)).touch()
        # a daemon: its parent ends before it
        daemon = subprocess.check_output("setsid sleep 1000 >/dev/null 2>&1 & echo $!", shell=True)
        (tmp_path / daemon.decode().strip()).touch()
        if "hang" in texts_of(completions):
            time.sleep(1000)
        return [1.0] * len(completions)

    pool = RewardPool(name_functions([checker]), section(workers=2))
    pool.submit(0, EXAMPLES[:1], [["a", "b"]], [[[1], [1]]], step=1)
    pool.collect(wait=True)
    pool.submit(1, EXAMPLES[:1], [["hang", "b"]], [[[1], [1]]], step=1)
    deadline = time.monotonic() + 20
    while len(list(tmp_path.iterdir())) < 7 and time.monotonic() < deadline:
        time.sleep(0.02)  # the second call may be made by the first worker
    pids = [int(file.name) for file in tmp_path.iterdir()]
    assert len(pids) >= 7
    pool.close()
    for pid in pids:
        assert gone(pid, 5)
    assert children() == before
    assert set(os.listdir("/proc/self/fd")) == files
    assert threading.active_count() == threads
    pool.close()  # a second time does nothing


@pytest.mark.slow
@linux
def test_a_hung_call_takes_its_children_with_it(tmp_path: Path) -> None:
    def checker(completions: Any, **kwargs: Any) -> list[float]:
        for own_session in (False, True):
            child = subprocess.Popen(["sleep", "1000"], start_new_session=own_session)
            (tmp_path / str(child.pid)).touch()
        time.sleep(1000)
        return []

    with RewardPool(
        name_functions([checker]), section(timeout_seconds=1.0, on_error="skip")
    ) as pool:
        pool.submit(0, EXAMPLES[:1], [["a"]], [[[1]]], step=1)
        [(_, scores)] = pool.collect(wait=True)
        pids = [int(file.name) for file in tmp_path.iterdir()]
        assert len(pids) == 2
        assert all(gone(pid, 5) for pid in pids)  # while the pool lives on
    assert [failure.kind for failure in scores.failures] == ["timed out"]


SCRIPT = """
import os, subprocess, sys, time
from shoal.config.train import RewardSection
from shoal.rewards.pool import RewardPool
from shoal.rewards.loading import name_functions
from shoal.records import Example

def checker(completions, **kwargs):
    subprocess.Popen(["sleep", "1000"])
    subprocess.Popen(["sleep", "1000"], start_new_session=True)
    print("calling", flush=True)
    time.sleep(1000)

pool = RewardPool(name_functions([checker]), RewardSection(workers=2))
for ticket in range(2):
    pool.submit(ticket, [Example(0, "p")], [["a"]], [[[1]]], 1)
try:
    pool.collect(wait=True)
except KeyboardInterrupt:
    print("stopped", flush=True)
    pool.close()
"""


def scripted() -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    assert [process.stdout.readline() for _ in range(2)] == ["calling\n"] * 2
    return process


@linux
def test_a_killed_trainer_leaves_no_process_and_no_open_pipe() -> None:
    process = scripted()
    family = descendants(process.pid)
    assert len(family) == 7  # the pool, two workers, two children of each
    process.kill()
    _, errors = process.communicate(timeout=20)  # ends when nobody holds the pipes any more
    assert errors == ""
    for pid in family:
        assert gone(pid)


@linux
def test_an_interrupt_reaches_the_trainer_alone() -> None:
    process = scripted()
    family = descendants(process.pid)
    os.killpg(process.pid, signal.SIGINT)
    out, errors = process.communicate(timeout=20)
    assert (out, errors, process.returncode) == ("stopped\n", "", 0)
    for pid in family:
        assert gone(pid)


@linux
def test_a_pool_that_was_killed_is_an_error() -> None:
    before = children()
    with RewardPool(name_functions([at_bad(hang)]), section()) as pool:
        [watched] = children() - before
        pool.submit(0, EXAMPLES, TEXTS, IDS, step=1)
        deadline = time.monotonic() + 20
        while not (workers := descendants(watched)) and time.monotonic() < deadline:
            time.sleep(0.01)
        os.kill(watched, signal.SIGKILL)
        with pytest.raises(ShoalError, match="the process that starts reward workers has ended"):
            pool.collect(wait=True)
        assert workers
        for pid in workers:
            assert gone(pid)


@linux
def test_calls_of_a_pool_that_was_killed_are_cancelled_with_an_error() -> None:
    before = children()
    with RewardPool(name_functions([at_bad(hang)]), section()) as pool:
        [watched] = children() - before
        os.kill(watched, signal.SIGKILL)
        os.waitid(os.P_PID, watched, os.WEXITED | os.WNOWAIT)
        with pytest.raises(ShoalError, match="the process that starts reward workers has ended"):
            pool._cancel([0])


def test_a_pool_works_after_jax_has_started_and_from_a_thread() -> None:
    import jax

    assert float(jax.jit(lambda x: x + 1)(1.0)) == 2.0
    scores: list[Scores] = []

    def target():
        return scores.append(scored(at_bad(lambda: 8.0)))

    thread = threading.Thread(target=target)
    thread.start()
    thread.join(60)
    scores.append(scored(at_bad(lambda: 8.0)))
    for one in scores:
        np.testing.assert_array_equal(one.rewards, [[1, 1], [8, 1]])
    assert len(scores) == 2


def test_a_pool_that_is_dropped_ends_its_processes() -> None:
    pool = RewardPool(name_functions([at_bad(hang)]), section())
    pid = supervisor_of(pool)
    del pool
    assert gone(pid)


def test_a_system_without_forks_is_message_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "fork")
    with pytest.raises(
        ShoalError, match=r"reward.workers=2: this system cannot fork.*reward.workers=0"
    ):
        RewardPool(name_functions([at_bad(hang)]), section(workers=2))
    assert (scored(at_bad(lambda: 0.0), workers=0).rewards >= 0).all()


def test_input_is_empty_and_prints_are_seen(capfd: pytest.CaptureFixture[str]) -> None:
    def checker(completions: Any, **kwargs: Any) -> list[float]:
        print("read", repr(sys.stdin.read()))
        return [0.0] * len(completions)

    scored(checker)
    assert capfd.readouterr().out == "read ''\n"


# ---- functions that fail for everything, and runs that are to stop


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["zero", "skip"])
@pytest.mark.parametrize(
    ("act", "happened", "keys"),
    [
        (
            hang,
            r"took longer than reward.timeout_seconds=0.1",
            {"timeout_seconds": 0.1, "workers": 8},
        ),
        (complain, r"raised KeyError: 'no such\\nthing'", {"workers": 2}),
        (complain, r"raised KeyError: 'no such\\nthing'", {"workers": 0}),
        (lambda: math.nan, "returned nan", {"workers": 2}),
    ],
)
def test_a_function_that_fails_for_everything_ends_the_run(
    act: Callable[[], Any], happened: str, keys: dict[str, Any], policy: str
) -> None:
    started = time.monotonic()
    with RewardPool(name_functions([at_bad(act)]), section(on_error=policy, **keys)) as pool:
        expected = (
            rf"'checker' failed for 33 of the last \d+ completions, more than "
            rf"reward.max_failed_share=0.5 of "
            rf"64; the first: reward function 'checker' after step 3 {happened} for data row 4, "
            rf"comple"
        )
        with pytest.raises(ShoalError, match=expected):
            for ticket in range(500):
                pool.submit(ticket, *lone("bad"))
            for _ in range(500):
                pool.collect(wait=True)
    # all of them would take 500 * 0.1 / 8 s and as many forks
    assert time.monotonic() - started < 15


@pytest.mark.slow
def test_a_function_that_hangs_on_everything_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of the 32 completions of a step, few are tried: none of so many is enough only where failing
    is fast."""
    monkeypatch.setattr(scores, "HOPELESS_SECONDS", 1.4)
    expected = (
        r"'checker' failed for (\d+) of the last \1 completions, more than "
        r"reward.max_failed_share=0.5, and "
        r"returned nothing in \d s of waiting; the first: .* took longer than"
    )
    with RewardPool(
        name_functions([at_bad(hang)]), section(on_error="skip", timeout_seconds=0.5)
    ) as pool:
        started = time.monotonic()
        for ticket in range(4):
            pool.submit(ticket, EXAMPLES[:1], [["bad"] * 8], [[[1]] * 8], 3)
        with pytest.raises(ShoalError, match=expected) as raised:
            pool.collect(wait=True)
        assert time.monotonic() - started < 4
    assert int(re.findall(r"failed for (\d+)", str(raised.value))[0]) <= 8


@pytest.mark.slow
def test_a_function_that_hangs_on_one_prompt_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scores, "HOPELESS_SECONDS", 0.3)
    with RewardPool(
        name_functions([at_bad(hang)]), section(on_error="skip", timeout_seconds=0.3)
    ) as pool:
        for ticket, text in enumerate(["bad", "5", "5"]):
            pool.submit(ticket, EXAMPLES[:1], [[text] * 3], [[[1]] * 3], 3)
        found: dict[Any, Scores] = {}
        while len(found) < 3:
            found |= pool.collect(wait=True)
    assert [len(scores.failures) for _, scores in sorted(found.items())] == [3, 0, 0]


def test_a_slow_failure_in_this_process_is_not_waited_for_either(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[int] = []

    def monotonic():
        return 50.0 * len(calls)

    monkeypatch.setattr(scores, "time", types.SimpleNamespace(monotonic=monotonic))

    def checker(completions: Any, **kwargs: Any) -> list[float]:
        calls.append(len(completions))
        raise OSError("no answer")

    with RewardPool(name_functions([checker]), section(on_error="zero", workers=0)) as pool:
        pool.submit(0, EXAMPLES[:1], [["a"] * 20], [[[1]] * 20], 3)
        with pytest.raises(
            ShoalError, match=r"failed for (\d) of the last \1 completions.*OSError: no answer"
        ):
            pool.collect()
    assert calls == [20, 1, 1, 1]


@pytest.mark.parametrize("workers", [0, 1])
def test_none_for_everything_ends_the_run(workers: int) -> None:
    def checker(completions: Any, **kwargs: Any) -> list[Any]:
        result = []
        for text in texts_of(completions):
            result.append(1.0 if text == "good" else None)
        return result

    def judge(texts: Sequence[str], trial: bool = False, **keys: Any) -> int:
        with RewardPool(name_functions([checker]), section(workers=workers, **keys)) as pool:
            if trial:
                pool.submit(
                    "tried", EXAMPLES[:1], [["none"] * 40], [[[1]] * 40], 0, trial=["wrong"] * 40
                )
                assert not pool.collect(wait=True)[0][1].valid.any()
            for ticket, text in enumerate(texts):
                pool.submit(ticket, EXAMPLES[1:], [["none", text]], [[[1], [1]]], 3)
            return sum(len(pool.collect(wait=True)) for _ in texts)

    with pytest.raises(
        ShoalError,
        match=r"^checker returned None for every completion of 32 groups in a row, the last "
        r"for data row 4, completion 1 .*: nothing can be learned; return a numb",
    ):
        judge(["none"] * 32)
    with pytest.raises(
        ShoalError,
        match="checker returned None for 40 known answers tried before, and for every completion "
        "of 1 group in a row",
    ):
        judge(["none"], trial=True)
    assert judge((["none"] * 31 + ["good"]) * 2) == 64
    assert judge(["none"] * 40, max_failed_share=1.0) == 40


@pytest.mark.slow
@pytest.mark.parametrize("blocks", [False, True])
def test_a_stop_in_a_notebook_does_not_wait_for_an_asynchronous_function(blocks: bool) -> None:
    async def checker(completions: Any, **kwargs: Any) -> list[float]:
        if blocks:
            time.sleep(8)
        await asyncio.sleep(8)
        return []

    async def cell() -> float:
        with (
            RewardPool(name_functions([checker]), section(workers=0)) as pool,
            stop_on_signals() as stop,
        ):
            threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGTERM)).start()
            with pytest.raises(StopRequested), stop.raising_at_once():
                pool.submit(0, *lone("bad"))
            started = time.monotonic()
        return time.monotonic() - started

    assert asyncio.run(cell()) < 2


def test_failures_within_the_share_do_not_end_the_run() -> None:
    for share, texts in ((0.5, ["5", "bad"]), (1.0, ["bad"])):
        with RewardPool(
            name_functions([at_bad(complain)]),
            section(on_error="zero", workers=0, max_failed_share=share),
        ) as pool:
            for ticket in range(200):
                pool.submit(ticket, *lone(texts[ticket % len(texts)]))
            assert len(pool.collect()) == 200
    with pytest.raises(ShoalError, match=r"reward\.max_failed_share=1\.5"):
        section(max_failed_share=1.5)


def test_a_wait_is_given_up_once_the_run_is_to_stop() -> None:
    pool = RewardPool(name_functions([at_bad(hang_with_a_family)]), section(timeout_seconds=60.0))
    pool.submit(0, *lone("bad"))
    with stop_on_signals() as stop:
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGTERM)).start()
        started = time.monotonic()
        with pytest.raises(StopRequested), stop.raising_at_once():
            pool.collect(wait=True)
    assert time.monotonic() - started < 1.5
    pid, started = supervisor_of(pool), time.monotonic()
    pool.close()
    assert time.monotonic() - started < 2 and gone(pid)


@pytest.mark.slow
def test_pools_start_while_threads_of_jax_are_busy() -> None:
    """As in a second run of a notebook: a process is forked while other threads hold whatever locks
    they hold."""
    import jax
    import jax.numpy as jnp

    multiply = jax.jit(lambda x: x @ x / 100)
    ended = threading.Event()

    def compute() -> None:
        while not ended.is_set():
            multiply(jnp.ones((200, 200))).block_until_ready()

    thread = threading.Thread(target=compute)
    thread.start()
    try:
        for _ in range(15):
            np.testing.assert_array_equal(scored(at_bad(lambda: 8.0)).rewards, [[1, 1], [8, 1]])
    finally:
        ended.set()
        thread.join()
