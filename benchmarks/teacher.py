"""How many steps does a student need until it is as good as its teacher: from the teacher, and from
rewards?

    python benchmarks/teacher.py FOLDER [--seeds 0 1 2] [--steps 32] [--teacher-steps 60]

On word problems. The teacher is the packaged model after `--teacher-steps` of GRPO with a seed of
its own; the student is the packaged model. It learns by GRPO, or from the teacher alone (no
rewards): by sampled tokens, or by the whole distribution. All else is equal: prompts, samples,
learning rate, one update a step. Greedy accuracy on 250 held-out problems every 4 steps; a student
is as good as its teacher once its accuracy is at most 2 percentage points below. Runs that FOLDER
already has are not made again.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from shoal.runs.lines import read_lines

EVERY = 4
NEAR = 2.0
"""Percentage points below the teacher at which a student counts as equally good: less than the
standard error of 250 answers."""

WAYS: dict[str, dict[str, Any]] = {
    "grpo": {},
    "sampled": {"teacher__divergence": "sampled"},
    "full, reverse": {"teacher__divergence": "full", "teacher__beta": 1.0},
    "full, forward": {"teacher__divergence": "full", "teacher__beta": 0.0},
}


def train(folder: Path, name: str, seed: int, steps: int, **changes: Any) -> Path:
    """Makes a run, unless it is there, and returns its folder."""
    import shoal

    run = folder / name
    if not (run / "summary.json").exists():
        shoal.train(
            seed=seed,
            steps=steps,
            base_output_directory=str(folder),
            run_name=name,
            train__pass_k=0,
            train__evaluate_every=EVERY,
            train__quick_questions=0,
            task__num_eval_questions=250,
            algorithm__kl_coef=0.0,
            **changes,
        )
    return run


def accuracies(run: Path) -> dict[int, float]:
    """Step -> accuracy in percent; the step 0 is before the first."""
    found = {}
    for row in read_lines(run / "evaluations.jsonl"):
        if row["name"] == "held_out":
            found[row["step"]] = 100 * row["accuracy"]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Steps that a student needs to be as good as its teacher"
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--teacher-steps", type=int, default=60)
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=list(WAYS))
    options = parser.parse_args()
    folder = options.folder
    teacher = train(folder, "teacher", 100, options.teacher_steps)
    target = list(accuracies(teacher).values())[-1]
    print(f"teacher: {target:.1f}% after {options.teacher_steps} steps of GRPO")
    print(f"{'student by':>14} {'seed':>5} {'near after':>11}  accuracy by step")
    for way in options.ways:
        changes = dict(WAYS[way])
        if changes:
            changes |= {"algorithm__advantage": "none", "teacher__path": str(teacher)}
        for seed in options.seeds:
            name = f"{way.replace(', ', '-')}-{seed}"
            run = train(folder, name, seed, options.steps, **changes)
            by_step = accuracies(run)
            near = [step for step, value in by_step.items() if value >= target - NEAR]
            first = str(near[0]) if near else f"> {options.steps}"
            curve = " ".join(f"{value:.1f}" for value in by_step.values())
            print(f"{way:>14} {seed:>5} {first:>11}  {curve}", flush=True)


if __name__ == "__main__":
    main()
