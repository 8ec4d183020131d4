"""Whole runs that take a second: a tiny model, a tiny GSM8K, and the command line called in this
process."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax._src import compiler
from tiny_models import write_model_with_tokenizer

from shoal import cli
from shoal.config.sections.devices import MeshSection
from shoal.config.sections.model import ModelSection
from shoal.mesh import Role, make_roles
from shoal.runs.groups import StoredGroup, group_record, read_file, write_file
from shoal.sampler import engine
from shoal.trainer import step
from shoal.weights.checkpoints import load_parameters
from shoal.weights.source import resolve_model

REWARDS = '''\
"""Rewards for models that know nothing: they judge the letters."""


def _texts(completions):
    return [completion if isinstance(completion, str) else completion[0]["content"]
            for completion in completions]


def letters(completions, **kwargs):
    return [sum(map(ord, text)) % 3 for text in _texts(completions)]


def vowels(completions, **kwargs):
    return [sum(letter in "aeiou" for letter in text) / 10 for text in _texts(completions)]


def silent(completions, **kwargs):
    return [None] * len(completions)


def raises(completions, **kwargs):
    raise KeyError("no such thing")


def raises_later(completions, trainer_state, **kwargs):
    if trainer_state.global_step == 1:
        raise ValueError("tired")
    return letters(completions)


def nan(completions, **kwargs):
    return [float("nan")] * len(completions)


def too_few(completions, **kwargs):
    return [0.0] * (len(completions) - 1)


def text(completions, **kwargs):
    return ["good"] * len(completions)


def number(completions, **kwargs):
    return 1.0
'''
PLAIN = "{{ messages[-1].content }}="
"""A chat template that keeps prompts short."""
PROGRAMS_OF_TWO = ("sampling.slots_per_device=8", "batch.micro_tokens=160")
"""Words that let a step of more prompts use the programs of a step of two: 8 slots, and
micro-batches of 2 rows with a prompt and 4 completions of 16 tokens."""


FLAGS = os.environ.get("XLA_FLAGS", "")
LITTLE_EFFORT = " --xla_cpu_use_fusion_emitters=false"
usual_options = compiler.get_compile_options


def thorough_options(
    *args: Any, env_options_overrides: dict[str, Any] | None = None, **kwargs: Any
) -> Any:
    thorough = {"xla_cpu_use_fusion_emitters": True} if LITTLE_EFFORT in FLAGS else {}
    return usual_options(
        *args, env_options_overrides=(env_options_overrides or {}) | thorough, **kwargs
    )


def compile_quickly(quick: bool) -> None:
    """Compiles programs with little effort, as conftest.py has it, or as usual from now on, in this
    process and in those that it starts."""
    if jax.config.values["jax_disable_most_optimizations"] != quick:
        jax.devices()  # XLA has read its flags by then: what follows is for other processes
        os.environ["XLA_FLAGS"] = FLAGS if quick else FLAGS.replace(LITTLE_EFFORT, "")
        os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = str(quick).lower()
        jax.config.update("jax_disable_most_optimizations", quick)
        compiler.get_compile_options = usual_options if quick else thorough_options


PROGRAMS = [
    (step, "_optimizer_programs"),
    (step, "_gradient_programs"),
    (step, "score_program"),
    (engine, "make_programs"),
]


def kept(make: Callable[..., Any]) -> Callable[..., Any]:
    """What was made, by the effort of compilation and a pretended platform too: files and tests of
    either kind come by turns. A process trains one or two models, tests a dozen."""
    made = lru_cache(32)(lambda effort, platform, *args: make(*args))

    def get(*args: Any) -> Any:
        return made(jax.config.values["jax_disable_most_optimizations"], Role.platform, *args)

    get.cache_clear = made.cache_clear
    return get


for module, name in PROGRAMS:
    setattr(module, name, kept(getattr(module, name).__wrapped__))


def forget_programs() -> None:
    """The next engine and learner of this process are traced and compiled anew, or read from the
    cache of files."""
    for module, name in PROGRAMS:
        getattr(module, name).cache_clear()


def write_data(folder: Path, count: int = 20, held_out: int = 4) -> Path:
    """gsm8k_train.jsonl and gsm8k_test.jsonl, all questions of one length; returns the first."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows, add in (("train", count, 17), ("test", held_out, 58)):
        lines = [
            json.dumps(
                {"question": f"{10 + i} + {add} = ?", "answer": f"Added.\n#### {10 + i + add}"}
            )
            for i in range(rows)
        ]
        (folder / f"gsm8k_{name}.jsonl").write_text("".join(line + "\n" for line in lines))
    return folder / "gsm8k_train.jsonl"


class Workshop:
    """A folder with a model, data and rewards, and short ways to run commands on them."""

    def __init__(self, folder: Path, family: str = "qwen3", style: str = "chatml", **changes: Any):
        self.folder = folder
        self.model = write_model_with_tokenizer(folder / "model", family, style, **changes)
        self.data = write_data(folder / "data")
        self.rewards = folder / "rewards.py"
        self.rewards.write_text(REWARDS)
        self.runs = folder / "runs"

    def words(self, name: str, *changes: str) -> list[str]:
        """The command line of a short run called `name`; later words win. Rewards are called in
        this process: forking the tests' own process for workers costs 0.2 s of kernel time a
        run."""
        return [
            "train",
            f"model={self.model}",
            "task=gsm8k",
            f"task.path={self.data}",
            f"reward={self.rewards}:letters",
            f"base_output_directory={self.runs}",
            f"run_name={name}",
            "steps=2",
            f"model.template={PLAIN}",
            "sampling.max_prompt_tokens=64",
            "sampling.max_completion_tokens=12",
            "batch.prompts_per_step=2",
            "batch.group_size=4",
            "train.pass_k=4",
            "algorithm.kl_coef=0",
            "optimizer.lr=1e-2",
            "optimizer.warmup_steps=0",
            "reward.workers=0",
            *changes,
        ]

    def train(self, name: str, *changes: str) -> Path:
        """Runs it and returns the run folder."""
        assert cli.main(self.words(name, *changes)) == 0
        return self.runs / name


def read_lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def metrics(run: Path) -> list[dict[str, Any]]:
    return read_lines(run / "metrics.jsonl")


def groups(run: Path, step: int) -> list[dict[str, Any]]:
    return read_records(run / "groups" / f"step_{step:06d}.parquet")


def read_records(file: Path) -> list[dict[str, Any]]:
    """A file of groups as JSON's own types."""
    return [group_record(stored) for stored in read_file(file)]


def rewrite_groups(file: Path, change: Callable[[list[StoredGroup]], list[StoredGroup]]) -> None:
    """Replaces the groups of a file."""
    stored = change(read_file(file))
    logprobs = {}
    for number, entry in enumerate(stored):
        for index, arrays in enumerate(entry.token_arrays):
            if arrays:
                logprobs[(number, index)] = arrays["trainer_logprobs"]
    write_file(
        file, [entry.group for entry in stored], [entry.advantages for entry in stored], logprobs
    )


def checkpoints(run: Path) -> list[int]:
    """Versions of which a checkpoint is there."""
    return sorted(int(entry.name) for entry in (run / "checkpoints").iterdir())


def trainer(mesh: Sequence[int] = (1, 1, 1)) -> Role:
    return make_roles(MeshSection(*mesh)).trainer


def parameters_of(
    run: Path, version: int, mesh: Sequence[int] = (1, 1, 1)
) -> dict[str, np.ndarray]:
    """A checkpoint's parameters on the host, by path."""
    architecture = resolve_model(ModelSection(path=str(run))).architecture
    return by_path(load_parameters(run, version, architecture, trainer(mesh)))


def by_path(tree: Any) -> dict[str, np.ndarray]:
    result = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        result[jax.tree_util.keystr(path)] = np.asarray(leaf)
    return result


def same_bits(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> bool:
    assert a.keys() == b.keys() and a
    return all(a[name].tobytes() == b[name].tobytes() for name in a)
