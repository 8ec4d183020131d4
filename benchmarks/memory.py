"""How near is `shoal doctor`'s "at most" to what a run takes on a CPU, where RAM is the device's
memory?

    python benchmarks/memory.py [CASE ...] [--model NAME=FOLDER ...] [--keep FOLDER]

For each case: `shoal doctor`, then `shoal train` with the same words for two steps, each in a
process of its own, with compiled programs that no case shares with another. `said` is what doctor
says is needed at most, `measured` the largest resident memory of the run's process plus, at the
same time, what its workers share with no other process. Models are the packaged one and random ones
of 8M and 50M parameters; `--model` adds those of folders. `shoal eval`, of which doctor says
nothing, is measured alone.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

MIB = 2**20
READ_SECONDS = 0.05
REWARD = """\
def short(completions, **_):
    return [-len(one if isinstance(one, str) else one[0]["content"]) / 100 for one in completions]
"""
WORDS = (
    "steps=2",
    "task=custom",
    "task.num_eval_questions=8",
    "train.pass_k=0",
    "algorithm.kl_coef=0",
    "optimizer.warmup_steps=0",
    "sampling.max_prompt_tokens=64",
    "sampling.max_completion_tokens=32",
    "batch.prompts_per_step=4",
    "batch.group_size=4",
)
"""What all cases have in common, after the data and the reward."""

CASES: Mapping[str, tuple[str, str, Sequence[str]]] = {
    "tiny": ("train", "tiny", ()),
    "tiny, bfloat16": ("train", "tiny", ("model.dtype=bfloat16",)),
    "tiny, LoRA": ("train", "tiny", ("model.lora.rank=8",)),
    "8M": ("train", "8M", ()),
    "8M, reference": ("train", "8M", ("algorithm.kl_coef=0.04",)),
    "50M": ("train", "50M", ()),
    "50M, bfloat16": ("train", "50M", ("model.dtype=bfloat16",)),
    "50M, LoRA": ("train", "50M", ("model.lora.rank=8",)),
    "50M, eval": ("eval", "50M", ()),
}
"""Name -> command, model, further words."""


def shapes() -> dict[str, object]:
    from shoal.model.architecture import Architecture

    return {
        "8M": Architecture(4096, 256, 1024, 6, 8, 4, 32, tie_embeddings=True),
        "50M": Architecture(8192, 512, 2048, 12, 8, 4, 64),
    }


def make_models(folder: Path, names: set[str]) -> dict[str, str]:
    """Model -> its folder; random ones are written with the packaged tokenizer."""
    import jax

    from shoal.config.sections.devices import MeshSection
    from shoal.mesh import make_roles
    from shoal.model.parameters import initialise
    from shoal.weights import huggingface
    from shoal.weights.hub import locate

    role, tiny = make_roles(MeshSection(), jax.devices()[:1]).trainer, locate("tiny")
    found = {"tiny": "tiny"}
    for name, a in shapes().items():
        target = folder / name
        if name in names and not target.exists():
            huggingface.save(target, initialise(a, 0, role), a)  # type: ignore[arg-type]
            huggingface.copy_tokenizer(tiny, target)
        found[name] = str(target)
    return found


def write_data(folder: Path) -> None:
    """The rows and the reward of all cases."""
    (folder / "rewards.py").write_text(REWARD)
    rows = []
    for i in range(64):
        rows.append(
            {
                "prompt": [{"role": "user", "content": f"What is {i} + {i % 13}?"}],
                "answer": str(i + i % 13),
            }
        )
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def run_measured(
    command: Sequence[str], environment: Mapping[str, str], log: Path
) -> tuple[int, str]:
    """The largest resident memory of a process and its workers, in bytes, and its standard
    output."""
    from shoal.job.step_trial import children_bytes

    with (
        open(log, "w") as errors,
        subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True
        ) as process,
    ):
        peak, workers = 0, 0
        while process.poll() is None:
            peak = max(peak, peak_bytes(process.pid))
            workers = max(workers, children_bytes(process.pid))
            time.sleep(READ_SECONDS)
        assert process.stdout is not None
        output = process.stdout.read()
    if process.returncode not in (0, 2):  # of doctor 2 says that something is wrong
        raise SystemExit(f"{' '.join(command)}: {log.read_text()[-2000:]}")
    return peak + workers, output


def peak_bytes(pid: int) -> int:
    """VmHWM of a process; 0 once it has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM")), 0)


def measure(
    case: str,
    cases: Mapping[str, tuple[str, str, Sequence[str]]],
    models: Mapping[str, str],
    folder: Path,
) -> tuple[int, int]:
    """What doctor says, 0 of a command that it does not know, and what was measured."""
    command, model, further = cases[case]
    name = case.replace(", ", "-")
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "JAX_COMPILATION_CACHE_DIR": str(folder / f"cache-{name}"),
    }
    words = [
        f"model={models[model]}",
        f"task.path={folder / 'data.jsonl'}",
        f"reward={folder / 'rewards.py'}:short",
        *WORDS,
        f"base_output_directory={folder / 'runs'}",
        f"run_name={name}",
        *further,
    ]
    shoal = [sys.executable, "-m", "shoal"]
    if command == "eval":
        kept = []
        for word in words:
            if word.split("=")[0] in (
                "model",
                "task.path",
                "reward",
                "task",
                "task.num_eval_questions",
                "sampling.max_prompt_tokens",
                "sampling.max_completion_tokens",
            ):
                kept.append(word)
        return 0, run_measured(
            [*shoal, "eval", *kept, "pass_k=0"], environment, folder / f"{name}.log"
        )[0]
    _, said = run_measured(
        [*shoal, "doctor", *words, "json=true"], environment, folder / f"{name}-doctor.log"
    )
    memory = json.loads(said)["memory"]
    (folder / f"{name}.json").write_text(json.dumps(memory, indent=1))
    measured, _ = run_measured([*shoal, "train", *words], environment, folder / f"{name}.log")
    return memory["needed_bytes"], measured


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "cases",
        nargs="*",
        help=f"of {', '.join(map(repr, CASES))}; default: all, and those of models",
    )
    parser.add_argument(
        "--model", action="append", default=[], help="NAME=FOLDER, a model to measure too"
    )
    parser.add_argument(
        "--keep", default="", help="a new folder for logs and runs; else they are removed"
    )
    options = parser.parse_args()
    given = dict(one.split("=", 1) for one in options.model)
    cases = {**CASES}
    for name in given:
        cases |= {
            name: ("train", name, ()),
            f"{name}, LoRA": ("train", name, ("model.lora.rank=8",)),
        }
    chosen = options.cases or list(cases)
    if unknown := set(chosen) - cases.keys():
        parser.error(f"no such case: {', '.join(unknown)}; there are {', '.join(cases)}")
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(options.keep or scratch).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        write_data(folder)
        models = make_models(folder, {cases[case][1] for case in chosen}) | given
        print(f"{'case':20} {'said MiB':>9} {'measured MiB':>13} {'said / measured':>16}")
        for case in chosen:
            said, measured = measure(case, cases, models, folder)
            share = f"{said / measured:.2f}" if said else "-"
            print(f"{case:20} {said / MIB:9,.0f} {measured / MIB:13,.0f} {share:>16}", flush=True)


if __name__ == "__main__":
    main()
