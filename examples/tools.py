"""A tool for arithmetic, and a reward for answers that used it.

shoal train task=gsm8k model=Qwen/Qwen2.5-1.5B-Instruct tools=tools.py:calculate
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
        return OPERATORS[type(node.op)](
            *(value(one) for one in ast.iter_child_nodes(node) if hasattr(one, "lineno"))
        )

    return value(ast.parse(expression, mode="eval").body)


def right(completions, answer, **columns):
    """1 where the last number of the last turn is the gold one."""
    last = [re.findall(r"-?[\d,]*\d", str(messages[-1]["content"])) for messages in completions]
    return [
        float(found[-1:] == [gold.rpartition("#### ")[2]])
        for found, gold in zip(last, answer, strict=True)
    ]


def called(completions, **columns):
    """A tenth for a call that was answered without an error."""
    good = [
        [one for one in turns if one["role"] == "tool" and "error" not in one["content"]]
        for turns in completions
    ]
    return [0.1 * bool(answered) for answered in good]
