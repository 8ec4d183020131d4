"""Reward functions in TRL's convention: what they are given, what they may return, and errors that
name the place."""

from __future__ import annotations

import functools
import json
import math
import pickle
import re
import sys
from collections.abc import Iterator, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scoring import score

from shoal.config.sections.reward import RewardSection
from shoal.config.sections.task import TaskSection
from shoal.job.task import load_task
from shoal.records import Example, RewardFunction, ShoalError
from shoal.rewards import loading
from shoal.rewards.loading import load_functions, load_reward_functions, name_functions
from shoal.rewards.pool import RewardPool
from shoal.rewards.scores import Scores
from shoal.tasks.graders.answer import (
    completion_text,
    extract_answer,
    single_answer,
    well_formed,
)
from shoal.tasks.graders.numbers import parse_number, same_number

EXAMPLES = [
    Example(17, [{"role": "user", "content": "2 + 3?"}], {"answer": "5", "prompt": "hidden"}),
    Example(4, [{"role": "user", "content": "2 * 4?"}], {"answer": "8", "level": 2}),
]
TEXTS = [["5", "6", "five"], ["8", "7", ""]]
IDS = [[np.array([1, 2]), np.array([3]), np.array([4])], [[5], [6, 7], []]]


def run(
    *functions: Any,
    weights: Sequence[float] = (),
    examples: Sequence[Example] = EXAMPLES,
    texts: Any = TEXTS,
    ids: Any = IDS,
    step: int = 3,
) -> Scores:
    return score(
        name_functions(functions, weights),
        examples,
        [e.prompt for e in examples],
        texts,
        ids,
        step,
        10,
    )


# ---- what functions are given


def test_arguments_are_flat_with_the_groups_side_by_side() -> None:
    seen: dict[str, Any] = {}

    def look(**kwargs: Any) -> list[float]:
        seen.update(kwargs)
        return [0.0] * 6

    run(look)
    message = {"role": "assistant"}
    assert seen["completions"] == [
        [message | {"content": text}] for text in ("5", "6", "five", "8", "7", "")
    ]
    assert [prompt[0]["content"] for prompt in seen["prompts"]] == ["2 + 3?"] * 3 + ["2 * 4?"] * 3
    assert seen["completion_ids"] == [[1, 2], [3], [4], [5], [6, 7], []]
    for ids in seen["completion_ids"]:
        for token in ids:
            assert type(token) is int
    assert seen["answer"] == ["5"] * 3 + ["8"] * 3
    assert seen["level"] == [None] * 3 + [2] * 3
    assert set(seen) == {
        "prompts",
        "completions",
        "completion_ids",
        "answer",
        "level",
        "trainer_state",
        "log_extra",
        "log_metric",
    }
    state = seen["trainer_state"]
    assert (state.global_step, state.max_steps, state.epoch, state.num_train_epochs) == (
        3,
        10,
        0.3,
        1,
    )
    assert (state.num_input_tokens_seen, list(state.log_history), state.is_world_process_zero) == (
        0,
        [],
        True,
    )


def test_plain_prompts_bring_plain_completions() -> None:
    seen: list[Any] = []

    def look(prompts: list[str], completions: list[str]) -> list[float]:
        seen.extend((prompts, completions))
        return [1.0] * 2

    run(look, examples=[Example(0, "Once")], texts=[["a", "b"]], ids=[[[1], [2]]])
    assert seen == [["Once", "Once"], ["a", "b"]]


def test_a_function_gets_only_what_it_names() -> None:
    def judge(completions: Any, answer: Any, unset: float = 0.5) -> list[float]:
        result = []
        for c, a in zip(completions, answer, strict=True):
            result.append(float(c[0]["content"] == a) + unset)
        return result

    np.testing.assert_array_equal(run(judge).rewards, [[1.5, 0.5, 0.5], [1.5, 0.5, 0.5]])
    np.testing.assert_array_equal(
        run(functools.partial(judge, unset=0.0)).rewards, [[1, 0, 0], [1, 0, 0]]
    )


def test_a_wish_that_no_column_meets_names_the_nearest() -> None:
    def judge(completions: Any, answr: Any) -> list[float]:
        return []

    with pytest.raises(
        ShoalError, match=r"'judge' after step 3 needs 'answr'.*did you mean answer\?"
    ):
        run(judge)

    def mistyped(completion: Any) -> list[float]:
        return []

    with pytest.raises(
        ShoalError,
        match="neither an argument of reward functions nor a column, did you mean "
        r"completions\?",
    ):
        run(mistyped)

    def half_verl(solution_str: str, truth: str) -> float:
        return 0.0

    with pytest.raises(ShoalError, match=r"'solution_str', which .* together with 'ground_truth'"):
        run(half_verl)

    def by_position(completions: Any, /) -> list[float]:
        return []

    def worked(completions: Any, solution: Any) -> list[float]:
        return []

    columns = (
        r"not a column of the data; there are: answer, level \(task.columns=\[solution=OTHER\]"
    )
    with pytest.raises(ShoalError, match=columns):
        run(worked)
    with pytest.raises(
        ShoalError, match="'by_position' after step 3 takes 'completions' by position only"
    ):
        run(by_position)


def test_a_reward_for_messages_is_told_that_its_prompts_are_text() -> None:
    def chat(completions: Any, **kwargs: Any) -> list[float]:
        result = []
        for completion in completions:
            result.append(float(len(completion[0]["content"])))
        return result

    texts = [Example(1, "2 + 3 =", {"answer": "5"}, place="sums.jsonl line 37")]
    with pytest.raises(
        ShoalError, match=r"completions are strings here.* for sums\.jsonl line 37, completion 0 \("
    ):
        run(chat, examples=texts, texts=[["5"]], ids=[[[1]]])


def test_a_function_cannot_spoil_the_lists_of_another_or_the_data() -> None:
    def spoil(prompts: Any, completions: Any, completion_ids: Any, answer: Any) -> list[float]:
        prompts[0][0]["content"] = completions[0][0]["content"] = "spoilt"
        completion_ids[0].clear()
        answer.clear()
        return [0.0] * 6

    def look(prompts: Any, completions: Any, completion_ids: Any, answer: Any) -> list[float]:
        assert prompts[0][0]["content"] == "2 + 3?"
        assert completions[0][0]["content"] == "5"
        assert completion_ids[0] == [1, 2]
        return [float(number) for number in answer]

    assert run(spoil, look).rewards[0, 0] == 5.0
    assert EXAMPLES[0].prompt == [{"role": "user", "content": "2 + 3?"}]


def test_callable_objects_and_logs() -> None:
    class Judge:
        def __call__(self, completions: Any, log_extra: Any, log_metric: Any, **kwargs: Any) -> Any:
            log_extra("seen", [c[0]["content"] for c in completions])
            log_metric("share", 0.25)
            log_metric("share", 0.75)
            return np.arange(6.0)

    scores = run(Judge(), Judge())
    assert list(scores.components) == ["Judge", "Judge_2"]
    assert scores.extra == {"seen": TEXTS, "seen_2": TEXTS}
    assert scores.metrics == {"share": [0.25, 0.75] * 2}
    np.testing.assert_array_equal(scores.rewards, [[0, 2, 4], [6, 8, 10]])


def test_a_logged_column_of_another_length_is_an_error() -> None:
    def judge(completions: Any, log_extra: Any) -> list[float]:
        log_extra("seen", ["one"])
        return [0.0] * 6

    with pytest.raises(
        ShoalError,
        match=r"'judge' after step 3 raised .*log_extra\('seen'\): expected 6 values, got",
    ):
        run(judge)


# ---- what they may return


def test_none_is_left_out_of_the_weighted_sum() -> None:
    def first(**kwargs: Any) -> list[float | None]:
        return [1.0, None, None, 2.0, None, 0.0]

    def second(**kwargs: Any) -> list[float | None]:
        return [1.0, 4.0, None, None, None, 1.0]

    scores = run(first, second, weights=(2.0, 0.5))
    np.testing.assert_array_equal(scores.rewards, [[2.5, 2.0, np.nan], [4.0, np.nan, 0.5]])
    np.testing.assert_array_equal(scores.valid, [[True, True, False], [True, False, True]])
    np.testing.assert_array_equal(scores.components["first"], [[1, np.nan, np.nan], [2, np.nan, 0]])
    assert scores.rewards.dtype == np.float64
    assert scores.components["second"].shape == (2, 3)


@settings(deadline=None)
@given(
    st.lists(st.tuples(*[st.none() | st.floats(-10, 10)] * 2), min_size=6, max_size=6),
    st.tuples(st.floats(-3, 3), st.floats(-3, 3)),
)
def test_the_weighted_sum_is_what_a_loop_would_sum(
    values: list[tuple[Any, Any]], weights: tuple[float, float]
) -> None:
    scores = run(
        *(lambda i=i, **kwargs: [pair[i] for pair in values] for i in range(2)), weights=weights
    )
    for (p, g), pair in zip(np.ndindex(2, 3), values, strict=True):
        known = []
        for weight, value in zip(weights, pair, strict=True):
            if value is not None:
                known.append(weight * value)
        assert scores.valid[p, g] == bool(known)
        assert (
            scores.rewards[p, g] == pytest.approx(sum(known), abs=1e-12)
            if known
            else math.isnan(scores.rewards[p, g])
        )


@pytest.mark.parametrize(
    "value", [True, 1, Decimal(1), np.float32(1), np.array(1.0), np.bool_(True)]
)
def test_all_kinds_of_numbers_count(value: Any) -> None:
    np.testing.assert_array_equal(run(lambda **kwargs: (value,) * 6).rewards, np.ones((2, 3)))


@pytest.mark.parametrize(
    ("bad", "told"),
    [
        (math.nan, "nan"),
        (math.inf, "inf"),
        (-math.inf, "-inf"),
        ("1.0", "'1.0'"),
        ([1.0, 2.0], r"\[1\.0, 2\.0\]"),
        (1j, "1j"),
        (10**400, "1000"),
    ],
)
def test_what_is_no_finite_number_names_function_step_and_example(bad: Any, told: str) -> None:
    def judge(**kwargs: Any) -> list[Any]:
        return [0.0, 0.0, 0.0, 0.0, bad, 0.0]

    with pytest.raises(
        ShoalError,
        match=rf"'judge' after step 3 returned .*{told}.* for data row 4, completion 1 "
        r"\(prompt '2 \* 4\?', completion '7'\).*None",
    ):
        run(judge)


@pytest.mark.parametrize("result", [[0.0] * 5, [0.0] * 7, []])
def test_a_wrong_count_is_an_error(result: list[float]) -> None:
    with pytest.raises(
        ShoalError, match=rf"after step 3 returned {len(result)} values for 6 completions.*row 17"
    ):
        run(lambda **kwargs: result)


@pytest.mark.parametrize("result", [None, 1.0, "111111", {1: 2}, (x for x in range(6))])
def test_what_is_no_list_is_an_error(result: Any) -> None:
    wanted = (
        r"after step 3 returned .*: it must return a list .* for each completion; 6 were given, "
        r".*row 17"
    )
    with pytest.raises(ShoalError, match=wanted):
        run(lambda **kwargs: result)


def test_an_exception_names_the_completion_at_which_it_is_raised() -> None:
    def judge(completions: Any, **kwargs: Any) -> list[float]:
        return [float(int(c[0]["content"] or "0")) for c in completions]

    with pytest.raises(
        ShoalError,
        match=r"'judge' after step 3 raised ValueError: invalid literal.*row 17, "
        r"completion 2 \(prompt '2 \+ 3\?', completion 'five'\)",
    ) as caught:
        run(judge)
    assert isinstance(caught.value.__cause__, ValueError)


def test_an_exception_of_the_whole_batch_names_where_it_starts() -> None:
    def judge(completions: Any) -> list[float]:
        if len(completions) == 6:
            raise RuntimeError
        return [0.0] * len(completions)

    with pytest.raises(
        ShoalError, match="raised RuntimeError in a batch of 6 that starts with data row 17, comple"
    ):
        run(judge)


def test_long_texts_are_shortened_in_errors() -> None:
    with pytest.raises(ShoalError, match=r"completion 'xxx.* \.\.\. xxx+'\)") as caught:
        run(
            lambda **kwargs: [math.nan],
            examples=[Example(0, "p\n" * 900)],
            texts=[["x" * 5000]],
            ids=[[[1]]],
        )
    assert len(str(caught.value)) < 400


def test_asynchronous_functions_are_known_by_their_make() -> None:
    async def judge(completions: Any, unset: float = 0.0, **kwargs: Any) -> list[float]:
        return [1.0 + unset] * len(completions)

    class Judge:
        async def __call__(self, completions: Any, **kwargs: Any) -> list[float]:
            return await judge(completions)

    for function, value in ((judge, 1.0), (Judge(), 1.0), (functools.partial(judge, unset=1), 2.0)):
        assert name_functions([function])[0].awaits
        np.testing.assert_array_equal(run(function).rewards, np.full((2, 3), value))
    np.testing.assert_array_equal(
        run(lambda completions: judge(completions)).rewards, np.ones((2, 3))
    )


@pytest.mark.parametrize("policy", ["zero", "skip"])
def test_policies_hold_in_this_process_too(policy: Any) -> None:
    def judge(completions: Any, **kwargs: Any) -> list[float]:
        return [float(c[0]["content"]) for c in completions]

    functions = name_functions([judge, lambda completions, **kwargs: [1.0] * len(completions)])
    scores = score(
        functions, EXAMPLES, [e.prompt for e in EXAMPLES], TEXTS, IDS, 3, 10, on_error=policy
    )
    failed = np.array([[False, False, True], [False, False, True]])
    np.testing.assert_array_equal(
        scores.valid, ~failed if policy == "skip" else np.ones((2, 3), bool)
    )
    np.testing.assert_array_equal(
        scores.rewards,
        np.where(failed, np.nan if policy == "skip" else 1.0, [[6, 7, 0], [9, 8, 0]]),
    )
    assert [(one.row, one.completion, one.kind) for one in scores.failures] == [
        (17, 2, "raised"),
        (4, 2, "raised"),
    ]
    assert (
        "data row 17, completion 2 (prompt '2 + 3?', completion 'five'); test_reward.py, line "
        in scores.failures[0].text
    )


@pytest.mark.parametrize("texts", [[["a"], ["b", "c"]], [["a"]], [[], []]])
def test_groups_of_different_sizes_are_a_fault_of_the_caller(texts: Any) -> None:
    with pytest.raises(ValueError, match=r"one length, P|the same number of completions"):
        run(lambda **kwargs: [], texts=texts, ids=texts)
    with pytest.raises(ValueError, match="one function or more"):
        run()


# ---- finding functions


@pytest.fixture
def fresh_imports(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Leaves the path and the modules of Python's imports as they were."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(loading, "_FOLDERS", set())
    yield
    for name in [name for name in sys.modules if name.startswith("shoal_test_")]:
        del sys.modules[name]


@pytest.fixture
def file(tmp_path: Path, fresh_imports: None) -> Path:
    path = tmp_path / "rewards.py"
    path.write_text("""\
from __future__ import annotations
import dataclasses
from shoal_test_beside import LIMIT

calls = []

@dataclasses.dataclass
class Judge:
    limit: int

    def __call__(self, completions, **kwargs):
        calls.append(len(completions))
        return [float(len(c) < self.limit) for c in completions]

def helper(text):
    raise RuntimeError("a helper is no reward")

def brief(completions, **kwargs):
    return [float(len(calls))] * len(completions)

judge = Judge(LIMIT)
number = 3
""")
    (tmp_path / "shoal_test_beside.py").write_text("LIMIT = 3\n")
    return path


def test_only_the_named_functions_of_a_file_count(file: Path) -> None:
    functions = load_functions([f"{file}:judge", f"{file}:brief"])
    scores = run(*functions, examples=[Example(0, "p")], texts=[["a", "long"]], ids=[[[1], [2]]])
    np.testing.assert_array_equal(scores.components["Judge"], [[1, 0]])
    # the file was run once: `calls` is shared
    np.testing.assert_array_equal(scores.components["brief"], [[1, 1]])
    assert pickle.loads(pickle.dumps(functions[0])) == functions[0]


@pytest.mark.usefixtures("fresh_imports")
@pytest.mark.parametrize("workers", [0, 1])
def test_a_function_imports_its_neighbour_when_it_is_called(tmp_path: Path, workers: int) -> None:
    (tmp_path / "rewards.py").write_text("""\
def score(completions, **kwargs):
    import shoal_test_late
    from shoal_test_package.points import POINTS
    return [shoal_test_late.LIMIT + POINTS] * len(completions)
""")
    (tmp_path / "shoal_test_late.py").write_text(
        "import shoal_test_later\nLIMIT = shoal_test_later.LIMIT\n"
    )
    (tmp_path / "shoal_test_later.py").write_text("LIMIT = 3.0\n")
    (tmp_path / "shoal_test_package").mkdir()
    (tmp_path / "shoal_test_package" / "points.py").write_text("POINTS = 0.5\n")
    before = list(sys.path)
    functions = name_functions(load_functions([f"{tmp_path / 'rewards.py'}:score"] * 2))
    assert sys.path == [*before, str(tmp_path)]  # once, and behind all that is installed
    with RewardPool(functions, RewardSection(workers=workers)) as pool:
        pool.submit(0, [Example(0, "p")], [["a"]], [[[1]]], 1)
        scores = pool.collect(wait=True)[0][1]
    assert not scores.failures and scores.components["score"].tolist() == [[3.5]]


@pytest.mark.usefixtures("fresh_imports")
@pytest.mark.parametrize(
    "line",
    [
        "import shoal_test_same",
        "def g():\n    from shoal_test_same import f",
        "import shoal_test_own",
    ],
)
def test_modules_of_one_name_in_two_folders_are_an_error(tmp_path: Path, line: str) -> None:
    for folder in ("first", "second"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "shoal_test_same.py").write_text(
            "def f(completions, **kwargs): return [1.0]\n"
        )
        (tmp_path / folder / "rewards.py").write_text(
            f"{line}\ndef score(completions, **kwargs): return [1.0]\n"
        )
    (tmp_path / "first" / "rewards.py").write_text(
        "import shoal_test_same\nscore = shoal_test_same.f\n"
    )
    (tmp_path / "second" / "shoal_test_own.py").write_text("import shoal_test_same\n")
    before = list(sys.path)
    for _ in range(2):  # a file of the same folder is no conflict
        load_functions([f"{tmp_path}/first/rewards.py:score"])
    with pytest.raises(
        ShoalError, match=r"imports 'shoal_test_same' from its folder, but .*first.* rename one"
    ):
        load_functions([f"{tmp_path}/second/rewards.py:score"])
    assert sys.path == [*before, str(tmp_path / "first")]


@pytest.mark.usefixtures("fresh_imports")
@pytest.mark.parametrize(
    "line",
    [
        "from shoal_test_joined.points import POINTS",
        "import importlib\nPOINTS = importlib.import_module('shoal_test_joined.points').POINTS",
        "from shoal_test_joined import points\nPOINTS = points.POINTS",
    ],
)
def test_packages_of_one_name_without_an_init_are_an_error_too(tmp_path: Path, line: str) -> None:
    """Python joins them, and takes what both have from the first."""
    for points, folder in enumerate(("first", "second")):
        (tmp_path / folder / "shoal_test_joined").mkdir(parents=True)
        (tmp_path / folder / "shoal_test_joined" / "points.py").write_text(f"POINTS = {points}\n")
        (tmp_path / folder / "rewards.py").write_text(
            f"{line}\ndef score(completions, **kwargs): return [POINTS]\n"
        )
    (score,) = load_functions([f"{tmp_path}/first/rewards.py:score"])
    assert score([]) == [0]
    with pytest.raises(
        ShoalError, match=r"imports 'shoal_test_joined' from its folder, but .*first.* rename one"
    ):
        load_functions([f"{tmp_path}/second/rewards.py:score"])


@pytest.mark.usefixtures("fresh_imports")
def test_a_module_where_python_was_started_is_no_neighbour(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by PYTHONPATH or a script's folder: without an error the reward would get its module."""
    folder = tmp_path / "rewards"
    folder.mkdir()
    for place in (tmp_path, folder):
        (place / "shoal_test_near.py").write_text("VALUE = 1.0\n")
    (folder / "score.py").write_text(
        "import shoal_test_near\ndef score(completions, **kwargs): return [1.0]\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ShoalError, match=r"imports 'shoal_test_near' from its folder, but"):
        load_functions([f"{folder}/score.py:score"])
    (folder / "shoal_test_near.py").unlink()
    (folder / "shoal_test_near").mkdir()  # of data
    assert len(load_functions([f"{folder}/score.py:score"])) == 1


@pytest.mark.usefixtures("fresh_imports")
def test_a_neighbour_hides_no_installed_module(tmp_path: Path) -> None:
    (tmp_path / "json.py").write_text("dumps = None\n")
    (tmp_path / "rewards.py").write_text(
        "import json\ndef score(completions, **kwargs): return [json.dumps]\n"
    )
    (score,) = load_functions([f"{tmp_path / 'rewards.py'}:score"])
    assert score([]) == [json.dumps]


def test_a_file_is_run_without_leaving_one_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    (tmp_path / "mine.py").write_text(
        "def score(completions, **kwargs):\n    return [1.0] * len(completions)\n"
    )
    load_functions([f"{tmp_path / 'mine.py'}:score"])
    assert [path.name for path in tmp_path.iterdir()] == ["mine.py"]


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("brif", r"defines no 'brif', did you mean brief\?"),
        ("zzz", "there are: .*brief"),
        ("number", "expected a function, or an object that can be called, not a int"),
        ("Judge", "an object that can be called, not a class"),
    ],
)
def test_a_name_that_is_no_function_is_an_error(file: Path, name: str, told: str) -> None:
    with pytest.raises(ShoalError, match=told):
        load_functions([f"{file}:{name}"])


@pytest.mark.parametrize("spec", ["rewards.py", "rewards.py:", ":f", ""])
def test_a_function_without_its_file_or_name_is_an_error(spec: str) -> None:
    with pytest.raises(ShoalError, match=r"expected `file\.py:function`"):
        load_functions([spec])


def test_a_file_without_a_name_lists_its_functions(file: Path) -> None:
    with pytest.raises(ShoalError, match=r"expected `file\.py:function`; there are: .*brief"):
        load_functions([str(file)])


def test_a_model_is_no_reward() -> None:
    for find in (
        lambda: load_functions(["Qwen/Reward-1.5B"]),
        lambda: name_functions(["Qwen/Reward-1.5B"]),
    ):  # type: ignore
        with pytest.raises(
            ShoalError, match=r"'Qwen/Reward-1\.5B': expected .*; a reward model is model:PATH"
        ):
            find()


def test_a_missing_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ShoalError, match=r"there is no file .*none\.py"):
        load_functions([f"{tmp_path}/none.py:f"])
    with pytest.raises(ShoalError, match="there is no file"):
        load_functions([f"{tmp_path}:f"])


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("x = 1\ny = x / 0\n", "ZeroDivisionError: division by zero at line 2"),
        ("def f(:\n", "SyntaxError"),
        # annotations are as the file has them, not as in ours
        ("def f(x: nothing): pass\n", "NameError"),
        ("import shoal_not_there\n", "ModuleNotFoundError"),
        ("raise SystemExit(2)\n", "SystemExit: 2"),
    ],
)
def test_a_file_that_raises_says_what_and_where(tmp_path: Path, text: str, told: str) -> None:
    path = tmp_path / "broken.py"
    path.write_text(text)
    with pytest.raises(ShoalError, match=rf"broken.py cannot be loaded: {told}") as caught:
        load_functions([f"{path}:f"])
    assert caught.value.__cause__ is not None
    assert not [
        name
        for name in sys.modules
        if name.startswith("shoal_reward_")
        and getattr(sys.modules[name], "__file__", "") == str(path)
    ]


def test_weights_must_be_one_a_function() -> None:
    with pytest.raises(ShoalError, match="expected 1 number, one for each reward function, got 2"):
        name_functions([len], (1.0, 2.0))


# ---- a task with functions of one's own


def test_own_functions_replace_the_rewards_and_not_what_is_correct(file: Path) -> None:
    task = load_task(TaskSection(num_eval_questions=2), RewardSection((f"{file}:brief",), (0.5,)))
    assert [(one.name, one.weight) for one in task.rewards] == [("brief", 0.5)]
    assert task.correct is not None

    def judge(completions: Any) -> list[float]:
        return [2.0] * len(completions)

    rewards = load_task(TaskSection(num_eval_questions=2), functions=[judge, judge]).rewards
    assert rewards == (RewardFunction("judge", judge, 1.0), RewardFunction("judge_2", judge, 1.0))


def test_weights_alone_weigh_the_tasks_own_functions() -> None:
    task = load_task(TaskSection(num_eval_questions=1), RewardSection(weights=(0.5, 0.25)))
    assert [(one.name, one.weight) for one in task.rewards] == [("correct", 0.5), ("format", 0.25)]
    with pytest.raises(ShoalError, match=r"expected 2 numbers.*\(correct, format\), got 1"):
        load_task(TaskSection(num_eval_questions=1), RewardSection(weights=(0.5,)))


def test_an_unknown_task_names_the_nearest() -> None:
    with pytest.raises(
        ShoalError, match=r"task.name='gsm8': there is no such task; did you mean 'gsm8k'\?"
    ):
        load_task(TaskSection(name="gsm8"))


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("agent", "agent='python my_agent.py'"),
        ("openenv:http://127.0.0.1:8000", "environment=openenv:URL"),
        ("verifiers:gsm8k", "examples/verifiers_agent.py"),
    ],
)
def test_who_plays_and_is_no_task_has_a_key_of_its_own(name: str, instead: str) -> None:
    with pytest.raises(ShoalError, match=f"task.name={name!r}: expected .*{re.escape(instead)}"):
        TaskSection(name=name)


# ---- answers


@pytest.mark.parametrize(
    ("text", "last", "only"),
    [
        ("<answer>5</answer>", "5", "5"),
        ("a <answer> 5\n</answer> b", "5", "5"),
        ("5", None, None),
        ("", None, None),
        ("<answer>5", None, None),
        ("5</answer>", None, None),
        ("<answer></answer>", "", ""),
        ("<answer>4</answer><answer>5</answer>", "5", None),
        ("<answer>4 <answer>5</answer>", "5", None),
        ("<answer>4</answer><answer>5", "4", None),
        ("<answer>4</answer></answer>", "4", None),
    ],
)
def test_extracted_answers(text: str, last: str | None, only: str | None) -> None:
    assert extract_answer(text) == last
    assert single_answer(text) == only


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("7", 7),
        ("-7", -7),
        ("+7", 7),
        ("−7", -7),
        ("–7", -7),
        ("\u20117", -7),
        ("–$1\u2009234.5", -1234.5),
        ("10–20", None),
        ("7.50", 7.5),
        (".5", 0.5),
        ("$1,234", 1234),
        ("-$5", -5),
        ("12 %", 12),
        ("72.", 72),
        (" 1,000,000.25 ", 1000000.25),
        ("007", 7),
        ("", None),
        (".", None),
        ("-", None),
        ("1/2", None),
        ("1e3", None),
        ("12 apples", None),
        ("1,2,3", None),
        ("nan", None),
        ("inf", None),
        ("2+3", None),
        ("٣", None),
        (None, None),
        ("__import__('os')", None),
        ("1_000", None),
    ],
)
def test_numbers_are_read_and_never_evaluated(text: str | None, number: float | None) -> None:
    assert parse_number(text) == (None if number is None else Decimal(str(number)))


@settings(deadline=None)
@given(st.decimals(-(10**9), 10**9, places=2))
def test_any_way_to_write_a_number_is_the_same_number(value: Decimal) -> None:
    for text in (f"{value:,}", f"${value}", f" {value}% ", f"{value}0", f"{value}."):
        assert same_number(text, str(value))
        assert not same_number(text, str(value + Decimal("0.01")))


@settings(deadline=None)
@given(st.text(alphabet="0123456789.,$%+- e_()", max_size=12))
def test_reading_a_number_never_fails(text: str) -> None:
    number = parse_number(text)
    assert number is None or number.is_finite()


@pytest.mark.parametrize(
    ("text", "good"),
    [
        ("<reasoning>a</reasoning><answer>5</answer>", True),
        ("<reasoning>a < b\n</reasoning>\n<answer>5</answer>\n", True),
        ("<answer>5</answer><reasoning>a</reasoning>", False),
        ("<reasoning>a</reasoning>", False),
        ("", False),
        ("<reasoning></reasoning><answer>5</answer>", False),
        ("<reasoning>a</reasoning><answer></answer>", False),
        ("so <reasoning>a</reasoning><answer>5</answer>", False),
        ("<reasoning>a</reasoning><answer>5</answer>!", False),
        ("<reasoning>a</reasoning><answer>5</answer><answer>6</answer>", False),
        ("<reasoning>a<reasoning>b</reasoning></reasoning><answer>5</answer>", False),
        ("<reasoning>a<answer>4</answer></reasoning><answer>5</answer>", False),
        ("<reasoning>a</reasoning> so <answer>5</answer>", False),
    ],
)
def test_the_form_is_of_the_whole_text(text: str, good: bool) -> None:
    assert well_formed(text) is good


def test_texts_of_both_styles() -> None:
    assert completion_text("a") == "a"
    assert completion_text([{"role": "assistant", "content": "a"}]) == "a"
    assert (
        completion_text(
            [{"role": "assistant", "content": "a"}, {"role": "assistant", "content": None}]
        )
        == ""
    )
    assert completion_text([]) == ""


def test_fixed_arguments_are_literals_by_name(tmp_path):
    file = tmp_path / "score.py"
    file.write_text("def f(completions, x=0, **kw):\n    return [x] * len(completions)\n")
    [one, other] = load_reward_functions([f"{file}:f(x='a, (b)')", f"{file}:f"])
    assert one(completions=["c"]) == ["a, (b)"] and other(completions=["c"]) == [0]
    assert [function.name for function in name_functions([one, other])] == ["f", "f_2"]
    for arguments in ("1", "x", "x=y", "**{'x': 1}", "x=1, x=2", "x="):
        with pytest.raises(ShoalError, match=r"expected file\.py:function\(KEY=VALUE, \.\.\.\)"):
            load_reward_functions([f"{file}:f({arguments})"])
