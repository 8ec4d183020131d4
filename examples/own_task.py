"""A model learns to estimate, with your own data and reward. `python own_task.py [STEPS]`, half a
minute on 2 cores."""

import random
import re
import sys

import shoal

NEAR_ENOUGH = 10


def row(number):
    """One sum in words. The packaged model knows such sentences, but has only seen problems of
    three steps."""
    rng = random.Random(number)
    name = rng.choice(["Amy", "Ben", "Clara", "Dan"])
    things = rng.choice(["apples", "coins", "books", "keys"])
    a, b = rng.randint(10, 60), rng.randint(2, 30)
    question = (
        f"{name} has {a} {things}. {name} finds {b} more {things}. How many {things} does {name} "
        "have now?"
    )
    return {"prompt": [{"role": "user", "content": question}], "total": a + b}


def distance(text, total):
    found = re.search(r"<answer>(\d+)</answer>", text)
    return abs(int(found[1]) - total) if found else float("inf")


def nearness(completions, total, **_):
    """1 for the exact number, up to 0.5 for one that is near, 0 for one that is 20 off or none at
    all."""
    distances = []
    for message, wanted in zip(completions, total, strict=True):
        distances.append(distance(message[0]["content"], wanted))
    return [1.0 if d == 0 else max(0.0, 0.5 - d / 40) for d in distances]


if __name__ == "__main__":
    result = shoal.train(
        task=[row(i) for i in range(2000)],
        held_out=[row(10_000 + i) for i in range(100)],
        reward=nearness,
        correct=lambda text, example: distance(text, example.columns["total"]) <= NEAR_ENOUGH,
        steps=int(sys.argv[1]) if len(sys.argv) > 1 else 20,
        optimizer={"lr": 2e-4},
        algorithm={"kl_coef": 0},
        batch={"prompts_per_step": 32, "micro_tokens": 2048},
        sampling={"max_prompt_tokens": 256, "max_completion_tokens": 64},
        train={"pass_k": 0, "evaluate_every": 0},
    )
    print(
        f"near enough: {result['accuracy_before']:.0%} before, {result['accuracy_after']:.0%} after"
    )
