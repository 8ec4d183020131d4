"""A rollout function: the model answers, looks over its answer, and answers again; the second
answer counts.

shoal train task=gsm8k model=Qwen/Qwen2.5-1.5B-Instruct rollout=rollout.py:think_twice \\
    reward=rollout.py:right,rollout.py:better
"""

import re

AGAIN = "Look over your solution. Correct what is wrong, and end with the answer as #### <number>."


def think_twice(prompts, trainer):
    """Called with one prompt for each rollout; samples as often as it likes. What it returns goes
    to the rewards."""
    messages = list(prompts[0])
    first = trainer.generate(messages)
    messages += [
        {"role": "assistant", "content": first["text"]},
        {"role": "user", "content": AGAIN},
    ]
    second = trainer.generate(messages)  # a branch, whose prompt is the whole conversation
    return {"first": [first["text"]], "second": [second["text"]]}


def number(text):
    match = re.search(r"####\s*(-?[\d,]+)", text or "")
    return match and match[1].replace(",", "")


def right(completions, second, answer, **columns):
    """1 where the second answer is right; None, and so 0, where no tokens were left for it."""
    return [float(number(text) == number(gold)) for text, gold in zip(second, answer, strict=True)]


def better(completions, first, second, **columns):
    """A tenth for changing the answer: models tend to repeat themselves."""
    rewards = []
    for old, new in zip(first, second, strict=True):
        is_changed = new is not None and number(new) != number(old)
        rewards.append(0.1 * is_changed)
    return rewards
