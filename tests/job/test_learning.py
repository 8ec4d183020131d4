"""The default run learns: a short piece of it, one seed (three seeds and the controls:
benchmarks/learning.py)."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_runs import metrics

import shoal

pytestmark = [pytest.mark.slow, pytest.mark.compile_quickly(False)]


def test_four_steps_of_the_default_run_raise_held_out_accuracy(tmp_path: Path):
    summary = shoal.train(
        seed=0,
        steps=4,
        task={"num_eval_questions": 200},
        train={"pass_k": 0},
        base_output_directory=str(tmp_path),
    )
    before, after = summary["before"]["held_out"], summary["after"]["held_out"]
    assert 0.20 <= before["accuracy"] <= 0.55 and before["well_formed"] >= 0.95
    assert after["accuracy"] >= before["accuracy"] + 0.05
    assert after["well_formed"] >= 0.95
    # Compiled as for users: other tests compare the two with programs compiled quickly. Of 10,000
    # tokens a step the largest gap is a matter of luck (up to 3.7e-5 in 80 steps, whatever computes
    # attention); the mean is not.
    for row in metrics(Path(summary["run_folder"])):
        assert row["sampler_gap/logprob_mean"] < 4e-7 and row["sampler_gap/logprob_max"] < 4e-5
