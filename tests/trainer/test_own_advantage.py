"""A user's advantage function: what it is called with, and what is wrong with what it returns."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_step_table import group

from shoal.config.sections.algorithm import AlgorithmSection
from shoal.records import Example, Group, ShoalError
from shoal.trainer.own_advantage import ARGUMENTS, OwnAdvantage, load_advantage
from shoal.trainer.step_table import StepTable

NAN = np.nan
EXAMPLES = Path(__file__).parents[2] / "examples"


def of_completions(rewards: list[float], row: int = 0, **columns: Any) -> Group:
    """A group of three completions with these rewards; of NaN the completion has none."""
    values = np.array(rewards)
    return replace(
        group(rewards=values, valid=~np.isnan(values), turn_rewards=()),
        example=Example(row, "q", columns),
        reward_components={"f": values * 2},
        reward_weights={"f": 0.5},
    )


def loaded(file: Path, source: str, name: str = "f", **settings: Any) -> OwnAdvantage:
    file.write_text(source)
    own = load_advantage(AlgorithmSection(advantage=f"{file}:{name}", **settings))
    assert own is not None
    return own


def of(function: Callable[..., Any], *names: str) -> OwnAdvantage:
    return OwnAdvantage("f", function, names or ("rewards",))


# ---- what it gets


def test_the_function_gets_the_steps_rewards_and_rows():
    seen: dict[str, Any] = {}

    def f(**given: Any) -> np.ndarray:
        seen.update(given)
        return given["rewards"] * 10

    groups = [of_completions([1.0, 2.0, NAN], 4, weight=0.5), of_completions([3.0, 4.0, 5.0], 9)]
    a = AlgorithmSection(advantage="file.py:f")
    table = StepTable.of(groups, a, own_advantage=of(f, *ARGUMENTS))
    assert seen.keys() == ARGUMENTS.keys()
    np.testing.assert_array_equal(seen["rewards"], [[1, 2, NAN], [3, 4, 5]])
    np.testing.assert_array_equal(seen["valid"], [[True, True, False], [True, True, True]])
    np.testing.assert_array_equal(seen["lengths"], [[5, 2, 1], [5, 2, 1]])
    np.testing.assert_array_equal(seen["components"]["f"], [[2, 4, NAN], [6, 8, 10]])
    assert seen["rows"] == [{"weight": 0.5}, {}]
    # NaN where there is no reward is no fault, and becomes 0.
    np.testing.assert_array_equal(table.advantages, [[10, 20, 0], [30, 40, 50]])
    assert table.advantages.dtype == np.float64


def test_a_penalty_is_subtracted_before_the_function_is_called():
    table = StepTable.of(
        [of_completions([1.0, 2.0, 4.0])],
        AlgorithmSection(advantage="file.py:f"),
        penalty=np.array([[0.5, 1.0, 0.0]]),
        own_advantage=of(lambda rewards: rewards),
    )
    np.testing.assert_array_equal(table.advantages, [[0.5, 1.0, 4.0]])
    np.testing.assert_array_equal(table.rewards, [[1.0, 2.0, 4.0]])


def test_with_credit_by_turn_it_gets_and_returns_turns():
    seen: dict[str, Any] = {}

    def f(**given: Any) -> np.ndarray:
        seen.update(given)
        return given["rewards"] + 1

    a = AlgorithmSection(advantage="file.py:f", credit="turn")
    table = StepTable.of([group()], a, own_advantage=of(f, *ARGUMENTS))
    np.testing.assert_array_equal(seen["rewards"], [[[0, 1, 2], [1, 0, 0], [0, 0, 0]]])
    np.testing.assert_array_equal(seen["valid"][0, 1], [True, True, False])
    np.testing.assert_array_equal(seen["lengths"], [[[2, 1, 2], [1, 1, 0], [1, 0, 0]]])
    np.testing.assert_array_equal(table.advantages, [[[1, 2, 3], [2, 1, 0], [0, 0, 0]]])
    turns = table.turn_advantages[0]
    assert [values.tolist() for values in turns] == [[1, 2, 3], [2, 1], [0]]


def test_it_may_change_what_it_is_given():
    def f(rewards: np.ndarray, rows: list[dict]) -> np.ndarray:
        rewards -= rewards.mean(axis=1, keepdims=True)
        rows[0].clear()
        return rewards

    one = of_completions([1.0, 2.0, 3.0], weight=1.0)
    own = of(f, "rewards", "rows")
    table = StepTable.of([one], AlgorithmSection(advantage="file.py:f"), own_advantage=own)
    np.testing.assert_array_equal(table.advantages, [[-1, 0, 1]])
    np.testing.assert_array_equal(one.rewards, [1, 2, 3])
    assert one.example.columns == {"weight": 1.0}


def test_a_list_of_lists_is_an_array(tmp_path: Path):
    own = loaded(tmp_path / "a.py", "def f(rewards): return (rewards * 2).tolist()")
    table = StepTable.of([of_completions([1.0, 2.0, 3.0])], AlgorithmSection(), own_advantage=own)
    np.testing.assert_array_equal(table.advantages, [[2, 4, 6]])


# ---- how it is named


def test_the_file_is_loaded_as_a_reward_is(tmp_path: Path):
    (tmp_path / "beside.py").write_text("FACTOR = 3.0\n")
    own = loaded(
        tmp_path / "advantages.py",
        "from beside import FACTOR\ndef f(rewards, **others): return rewards * FACTOR\n",
    )
    assert own.name == "f" and own.arguments == tuple(ARGUMENTS)
    assert load_advantage(AlgorithmSection(advantage="rloo")) is None


def test_an_object_that_can_be_called_is_a_function(tmp_path: Path):
    source = "class C:\n    def __call__(self, valid, rewards): return rewards\nf = C()\n"
    assert loaded(tmp_path / "a.py", source).arguments == ("rewards", "valid")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("def g(rewards): ...", r"advantage function '.*a.py:f': a.py defines no 'f'"),
        ("1 / 0", r"a.py cannot be loaded: ZeroDivisionError: .* at line 1"),
        ("f = 3", r"expected a function, or an object that can be called, not a int"),
        ("class f: ...", r"not a class"),
        ("async def f(rewards): ...", r"is `async`: expected a plain function"),
        (
            "def f(rewards, scores): ...",
            r"cannot be called: missing a required argument: 'scores'; it gets, by keyword, "
            "rewards, valid, lengths, components, rows",
        ),
        ("def f(rewards, /): ...", r"cannot be called: 'rewards' parameter is positional only"),
    ],
)
def test_a_function_that_cannot_be_used(source: str, message: str, tmp_path: Path):
    with pytest.raises(ShoalError, match=message) as error:
        loaded(tmp_path / "a.py", source)
    assert "load" in message or error.value.key in ("", "algorithm.advantage")


def test_without_the_file():
    with pytest.raises(ShoalError, match=r"advantage function 'nowhere\.py:f': there is no file"):
        load_advantage(AlgorithmSection(advantage="nowhere.py:f"))


# ---- what it returns

GROUPS = [of_completions([1.0, 2.0, 3.0], 7), of_completions([1.0, NAN, 3.0], 8)]


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (None, r"returned None: expected the advantages of \[prompts, completions\]"),
        (1.0, r"returned numbers of the shape \(\): expected .* of the shape \(2, 3\)"),
        ([1.0, 2.0], r"returned numbers of the shape \(2,\): expected"),
        (np.zeros((3, 2)), r"returned numbers of the shape \(3, 2\): expected"),
        ([[1.0], [1.0, 2.0]], r"returned \[\[1.0\], \[1.0, 2.0\]\]: expected"),
        ("abc", r"returned 'abc': expected"),
        (np.zeros((2, 3), complex), r"returned .*: expected"),
        ([[0.0, NAN, 0.0], [0.0, 0.0, 0.0]], r"returned nan for data row 7, completion 1$"),
        ([[0.0, 0.0, -np.inf], [0.0, 0.0, 0.0]], r"returned -inf for data row 7, completion 2$"),
        (
            [[0.0, 0.0, 0.0], [0.0, 0.0, NAN]],
            r"returned nan for data row 8, completion 2; where `valid` is False there is no reward",
        ),
    ],
)
def test_what_is_no_advantage_is_an_error(returned: Any, message: str):
    own = of(lambda rewards: returned)
    a = AlgorithmSection(advantage="file.py:f")
    with pytest.raises(ShoalError, match=f"advantage function 'f' {message}") as error:
        StepTable.of(GROUPS, a, own_advantage=own)
    assert error.value.key == "algorithm.advantage"


def test_a_wrong_turn_is_named():
    own = of(lambda rewards: np.where(rewards == 2, NAN, rewards))
    a = AlgorithmSection(advantage="file.py:f", credit="turn")
    with pytest.raises(ShoalError, match="returned nan for data row 0, completion 0, turn 2"):
        StepTable.of([group()], a, own_advantage=own)


def test_a_function_that_raises_is_named_with_its_line(tmp_path: Path):
    own = loaded(tmp_path / "a.py", "def f(rewards):\n    raise ValueError('no weights')\n")
    with pytest.raises(ShoalError, match=r"'f' raised ValueError: no weights at a\.py, line 2$"):
        StepTable.of(GROUPS, AlgorithmSection(), own_advantage=own)
    own = loaded(tmp_path / "a.py", "import sys\ndef f(rewards): sys.exit(3)\n")
    with pytest.raises(ShoalError, match="'f' raised SystemExit: 3"):
        StepTable.of(GROUPS, AlgorithmSection(), own_advantage=own)


def test_a_function_that_keeps_something_is_an_error():
    calls: list[int] = []

    def f(rewards: np.ndarray) -> np.ndarray:
        calls.append(0)
        return rewards + len(calls)

    one = [of_completions([1.0, 2.0, 3.0], 7)]
    with pytest.raises(
        ShoalError,
        match="'f' is not deterministic: for data row 7, completion 0 it returned 2, and called "
        "again with the same arguments 3; a run could not be resumed or replayed",
    ):
        StepTable.of(one, AlgorithmSection(), own_advantage=of(f))


def test_the_comparison_is_made_once():
    calls: list[int] = []
    own = of(lambda rewards: (calls.append(0), rewards)[1])
    for _ in range(3):
        StepTable.of([of_completions([1.0, 2.0, 3.0])], AlgorithmSection(), own_advantage=own)
    assert len(calls) == 4


# ---- settings


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"credit": "state"}, "expected grpo or dr_grpo or rloo with algorithm.credit=state"),
        ({"credit": "turn", "discount": 0.5}, "expected 1 with your own function"),
        ({"credit": "turn", "loss": "gspo"}, "expected a loss by token"),
    ],
)
def test_settings_that_a_function_cannot_have(settings: dict, message: str):
    with pytest.raises(ShoalError, match=message):
        AlgorithmSection(advantage="file.py:f", **settings)


def test_a_function_uses_rewards():
    a = AlgorithmSection(advantage="file.py:f", credit="turn")
    assert a.has_own_advantage and a.uses_rewards and not a.learns_from_data


# ---- the examples


def example(name: str, **settings: Any) -> tuple[AlgorithmSection, OwnAdvantage]:
    a = AlgorithmSection(advantage=f"{EXAMPLES / 'advantage.py'}:{name}", **settings)
    own = load_advantage(a)
    assert own is not None
    return a, own


def test_the_example_of_completions():
    a, own = example("weighed")
    groups = [of_completions([1.0, NAN, 2.0], weight=4.0), of_completions([1.0, 2.0, 3.0])]
    table = StepTable.of(groups, a, own_advantage=own)
    np.testing.assert_array_equal(table.advantages, [[-2, 0, 2], [-1, 0, 1]])


def test_the_example_of_turns():
    a, own = example("next_turns", credit="turn")
    table = StepTable.of([group()], a, own_advantage=own)
    # Earned: 1, 3, 2 and 1, 0; the third turn is compared with nobody.
    np.testing.assert_array_equal(table.advantages, [[[0, 3, 2], [0, -3, 0], [0, 0, 0]]])
