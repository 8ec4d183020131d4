"""A tool for arithmetic, and a reward for answers that used it.

shoal train task=gsm8k model=Qwen/Qwen2.5-1.5B-Instruct tools=tools.py:calculate \\
    reward=tools.py:right,tools.py:called
"""

import ast
import operator
import re

OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.USub: operator.neg,
}


def calculate(expression: str) -> float:
    """Computes the value of an arithmetic expression.

    Args:
        expression: Numbers joined by + - * / and brackets, such as 12 * (3 + 4).

    Returns:
        The value.
    """

    def value(node):
        if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
            return node.value
        if isinstance(node, ast.UnaryOp):
            return OPERATORS[type(node.op)](value(node.operand))
        if isinstance(node, ast.BinOp):
            return OPERATORS[type(node.op)](value(node.left), value(node.right))
        raise ValueError(f"{ast.unparse(node)!r} is no number and no operation of numbers")

    return value(ast.parse(expression, mode="eval").body)


def right(completions, answer, **columns):
    """1 where the last number of the last turn is the gold one."""
    rewards = []
    for messages, solution in zip(completions, answer, strict=True):
        numbers = re.findall(r"-?[\d,]*\d", str(messages[-1]["content"]))
        gold = solution.rpartition("#### ")[2]
        rewards.append(float(numbers[-1:] == [gold]))
    return rewards


def called(completions, **columns):
    """A tenth for a call that was answered without an error."""
    rewards = []
    for messages in completions:
        answers = [message["content"] for message in messages if message["role"] == "tool"]
        is_answered = any("error" not in answer for answer in answers)
        rewards.append(0.1 * is_answered)
    return rewards
