"""The tasks of several turns, `calculator` and `guess`: problems, the tool and the environment,
dialogues, rewards."""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Callable
from typing import Any

import pytest

from shoal.chat.tokenizer import Tokenizer
from shoal.config.merge import compose
from shoal.config.sections.task import TaskSection
from shoal.records import Example, ShoalError
from shoal.tasks import calculator, guess
from shoal.tasks.task import TASKS, Task
from shoal.weights.hub import locate

CALCULATOR, GUESS = (
    module.load(TaskSection(name=name, num_eval_questions=100))
    for name, module in (("calculator", calculator), ("guess", guess))
)


def total(task: Task, text: str, example: Example) -> float:
    """The weighted sum of the task's own rewards for a dialogue that ends with a text."""
    messages = [[{"role": "assistant", "content": text}]]
    columns = {name: [value] for name, value in example.columns.items()}
    return sum(
        one.weight * one.function(completions=messages, **columns)[0] for one in task.rewards
    )


@pytest.mark.parametrize("task", [CALCULATOR, GUESS], ids=["calculator", "guess"])
def test_rows_are_the_same_everywhere_and_held_out_ones_are_never_trained_on(task: Task):
    assert task.name in TASKS and not task.notes
    asked = []
    for one in task.evaluations["held_out"]:
        asked.append(json.dumps([one.prompt, one.columns]))
    assert len({*asked}) == 100
    assert not {*asked} & {
        json.dumps([task.train[row].prompt, task.train[row].columns]) for row in range(2000)
    }
    again = {"calculator": calculator, "guess": guess}[task.name].load(TaskSection(name=task.name))
    assert again.train[7] == task.train[7] and task.train[7].row == 7
    assert list(again.evaluations["held_out"][:100]) == list(task.evaluations["held_out"])
    with pytest.raises(ShoalError, match="makes its own problems"):
        {"calculator": calculator, "guess": guess}[task.name].load(
            TaskSection(name=task.name, path="x.jsonl")
        )


def test_problems_are_beyond_a_table_of_sums():
    for row in range(200):
        example = CALCULATOR.train[row]
        numbers = re.findall(r"\d+", example.prompt[0]["content"])  # type: ignore[index]
        assert len(numbers) in (2, 3) and all(100 <= int(number) <= 999 for number in numbers)


# ---- calculator


def play(
    example: Example, model: Callable[[list[dict[str, Any]]], dict[str, Any]], turns: int = 8
) -> str:
    """A dialogue with a scripted model; the last text."""
    tools = {tool.__name__: tool for tool in CALCULATOR.tools}
    messages: list[dict[str, Any]] = [*example.prompt]  # type: ignore[list-item]
    for _ in range(turns):
        messages.append({"role": "assistant", **model(messages)})
        if "call" not in messages[-1]:
            return messages[-1]["content"]
        name, arguments = messages[-1]["call"]
        try:
            answer = tools[name](**arguments)
        except Exception as error:
            answer = json.dumps({"error": str(error)})
        messages.append({"role": "tool", "content": answer})
    return ""


def well(messages: list[dict[str, Any]]) -> dict[str, Any]:
    if messages[-1]["role"] == "tool":
        return {"content": f"<answer>{messages[-1]['content']}</answer>"}
    expression = re.search(r"[\d][\d +*-]*\d", messages[0]["content"])
    assert expression
    return {"content": "", "call": ("calculate", {"expression": expression[0]})}


def test_dialogues_with_the_tool():
    def without_tags(messages: list[dict[str, Any]]) -> dict[str, Any]:
        turn = well(messages)
        return {**turn, "content": re.sub("<.*?>", "", turn["content"])}

    def of_a_part(messages: list[dict[str, Any]]) -> dict[str, Any]:
        turn = well(messages)
        if "call" not in turn:
            return turn
        return {**turn, "call": ("calculate", {"expression": "1 +"})}

    for example in CALCULATOR.evaluations["held_out"][:20]:
        text = play(example, well)
        assert (
            CALCULATOR.correct
            and CALCULATOR.correct(text, example)
            and total(CALCULATOR, text, example) == 1.1
        )
        assert total(CALCULATOR, play(example, without_tags), example) == 0.0
        assert total(CALCULATOR, play(example, of_a_part), example) == pytest.approx(0.1)
        assert total(CALCULATOR, "<answer>7</answer>", example) == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("expression", "value"),
    [("417 * 236 + 108", "98520"), ("259 - 761", "-502"), ("(3 + 4) * 2", "14"), ("1 / 3", "1/3")],
)
def test_calculate(expression: str, value: str):
    assert calculator.calculate(expression) == value


@pytest.mark.parametrize(
    "expression", ["", "1 +", "1 / 0", "__import__('os')", "2 ** 9", "9" * 300, "(" * 50 + ")" * 50]
)
def test_what_is_no_expression_is_an_error_and_nothing_is_evaluated(expression: str):
    with pytest.raises(ValueError, match="is no expression"):
        calculator.calculate(expression)


# ---- guess


def rollout(
    number: int, ask: Callable[[int, list[tuple[str, str]]], str]
) -> tuple[guess.Guess, str]:
    environment, said = guess.Guess(), []
    assert environment.reset(number=number, row=3) is None
    while True:
        message = ask(len(said), said)
        answer = environment.respond(message)
        if answer is None:
            return environment, message
        said.append((message, answer))


def halving(turn: int, said: list[tuple[str, str]]) -> str:
    low, high = 1, 100
    for message, answer in said:
        low, high = (int(message) + 1, high) if answer == "higher" else (low, int(message) - 1)
    return str((low + high) // 2)


def test_guesses_are_answered_in_words():
    for number in range(1, 101):
        environment, last = rollout(number, halving)
        assert (
            environment.get_reward() == 1.0 and environment.questions <= 7 and int(last) == number
        )
        example = Example(0, "", {"number": number})
        assert (
            GUESS.correct
            and GUESS.correct(last, example)
            and total(GUESS, last, example) == pytest.approx(0.1)
        )
    environment, last = rollout(77, lambda turn, said: str(turn + 1))
    assert (environment.questions, environment.get_reward(), last) == (20, 0.0, "20")
    assert not GUESS.correct(last, Example(0, "", {"number": 77}))
    environment, _ = rollout(7, lambda turn, said: "what?" if turn == 0 else "7")
    assert environment.questions == 2 and environment.get_reward() == 1.0


def test_questions_are_paid_for_what_their_answers_rule_out():
    environment = guess.Guess()
    environment.reset(number=77)
    paid = []
    for message in ("50", "30", "what?", "75", "88", "77"):
        environment.respond(message)
        paid.append(environment.reward)
    # From 100 numbers to 51 to 100, once more, to 76 to 100, to 76 to 87, and to the right one.
    left = [101, 51, 51, 51, 26, 13, 1]
    want = [math.log(a / b) / math.log(101) for a, b in itertools.pairwise(left)]
    assert paid == pytest.approx(want) and paid[1] == paid[2] == 0
    assert sum(paid) == pytest.approx(environment.get_reward()) == 1


@pytest.mark.parametrize("text", ["", "0", "101", "5 6", "-5", "Is it 5?", "5.0", "1000000"])
def test_what_is_no_guess(text: str):
    environment = guess.Guess()
    environment.reset(number=5)
    assert environment.respond(text) == "no number" and not guess.is_number(text)


def test_an_environment_begins_anew():
    environment, _ = rollout(5, halving)
    environment.reset(number=90)
    assert (
        environment.get_reward() == 0.0
        and environment.respond("90") is None
        and environment.get_reward() == 1.0
    )


# ---- the model that they start from


def test_the_packaged_model_knows_calls():
    """Markers of calls are single tokens, and its template shows tools, calls and answers."""
    tokenizer = Tokenizer.load(locate("tiny-tools"))
    for mark in ("<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>"):
        assert mark in tokenizer.vocabulary()
    assert tokenizer.eos_ids == (tokenizer.vocabulary()["<|im_end|>"],)
    call = {"function": {"name": "calculate", "arguments": {"expression": "1 + 2"}}}
    messages = [
        {"role": "user", "content": "1 + 2?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "3"},
    ]
    text = tokenizer.render(
        messages, tools=[{"type": "function", "function": {"name": "calculate"}}]
    )
    assert '<tools>\n{"type": "function", "function": {"name": "calculate"}}\n</tools>' in text
    assert text.endswith(
        "<|im_start|>user\n1 + 2?<|im_end|>\n<|im_start|>assistant\n<tool_call>\n"
        '{"name": "calculate", "arguments": {"expression": "1 + 2"}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\n3\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )
    assert sum(file.stat().st_size for file in locate("tiny-tools").iterdir()) < 2**20
    config, _ = compose("train", ["task=calculator"])
    assert config.model.path == "tiny-tools" and config.environment.max_turns == 4
