"""Benchmarks run: on models of no size, in this process; what they say of faults and times is
right."""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from shoal.mesh.accelerators import read_calibration


@pytest.fixture
def folder(monkeypatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "benchmarks"))


@pytest.fixture
def benchmark(monkeypatch, folder) -> Any:
    import accelerator

    def run(command: list[str], stdout: Any = None, **_: Any) -> SimpleNamespace:
        """Its parts in this process."""
        text = io.StringIO()
        with (
            contextlib.redirect_stdout(text)
            if stdout == subprocess.PIPE
            else contextlib.nullcontext()
        ):
            accelerator.main(command[2:])
        return SimpleNamespace(stdout=text.getvalue(), returncode=0)

    monkeypatch.setattr(accelerator.subprocess, "run", run)
    return accelerator


@pytest.mark.system
def test_a_run_takes_no_more_memory_than_doctor_says(folder, tmp_path, monkeypatch):
    """It took half as much again: libraries, compilation and the process itself were not
    counted. The processes have one device and a user's flags, as on a user's machine."""
    import memory

    for name in ("XLA_FLAGS", "JAX_DISABLE_MOST_OPTIMIZATIONS", "JAX_DEFAULT_MATMUL_PRECISION"):
        monkeypatch.delenv(name, raising=False)
    memory.write_data(tmp_path)
    said, measured = memory.measure("tiny", memory.CASES, {"tiny": "tiny"}, tmp_path)
    assert 0 < measured <= said


@pytest.mark.slow
def test_the_accelerator_benchmark_measures_every_part(benchmark, tmp_path, capsys):
    file = tmp_path / "calibration.json"
    benchmark.main(["--tiny", "--calibration", str(file)])
    found = read_calibration(str(file), "cpu", None)
    assert found["devices"] == 8 and {*found["figures"]} == {
        "hbm",
        "bfloat16",
        "float32",
        "launch",
        "link",
    }
    for middle, least, most in found["figures"].values():
        assert least <= middle <= most
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("8 x cpu: ") and "GB/s a link, as measured" in lines[0]
    for what in (
        "prefill, 1 prompts of 16",
        "decode, 4 places",
        "decode, 16 places",
        "update, 128 tokens",
        "whole step, 4 x 4 x 8",
    ):
        [line] = [line for line in lines if what in line]
        assert line.startswith(" tiny  shoal") and line.endswith("%")
    for peer in ("vllm", "trl"):
        assert any(peer in line and "not installed" in line for line in lines)


@pytest.mark.slow
def test_what_the_time_does_not_hold_is_skipped(benchmark, capsys):
    benchmark.main(["--tiny", "--minutes", "0"])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[2:] for line in lines if "skipped" in line] == [
        [part, "skipped:", "0", "minutes", "are", "over"] for part in ("decode", "update", "step")
    ]


def test_a_size_beyond_the_memory_is_a_line(benchmark):
    def large() -> Any:
        yield "prefill", "1 ms", "1%"
        raise RuntimeError("RESOURCE_EXHAUSTED: out of memory")

    assert (
        list(benchmark.guarded("decode, 1024 places", large()))[1][1] == "does not fit the memory"
    )
    with pytest.raises(ValueError, match="another"):
        list(benchmark.guarded("decode", (int("another") for _ in range(1))))


@pytest.mark.parametrize(
    ("mode", "k", "seconds", "idle_trainer", "age"),
    [
        ("fixed", 0, 16, 10 / 16, 0),
        # the longest of a version is waited for before the next is loaded
        ("fixed", 1, 10, 4 / 10, 1),
        ("fixed", 3, 10, 4 / 10, 3),
        ("newest", 1, 8, 2 / 8, 1),  # two steps under way: (10 + 6) / 2
        ("newest", 2, 6, 0, 2),  # the trainer alone: more than (10 + 6) / 3
        ("auto", 4, 6, 0, 2),  # no more than it takes
    ],
)
def test_the_simulation_is_what_is_worked_out_by_hand(folder, mode, k, seconds, idle_trainer, age):
    """Each step has one completion of 10 s beside short ones; an update takes 6 s."""
    import simulation

    case = simulation.Case(mode, k, prompts=2, group_size=2, update=0.6)
    lengths = np.tile([[[1, 2], [10, 1]]], (60, 1, 1))
    found = simulation.simulate(case, lengths, 1.0)
    if mode == "auto":
        assert found.seconds < 7 and found.staleness_max == age
        return
    assert (found.seconds, found.staleness_max) == pytest.approx((seconds, age))
    assert found.idle_trainer == pytest.approx(idle_trainer)
    # the ends of the run
    assert found.idle_sampler == pytest.approx(1 - 14 / seconds / 4, abs=0.02)


def test_too_few_places_are_never_idle(folder):
    import simulation

    case = simulation.Case("newest", 2, prompts=4, group_size=2, update=0.1, places=2)
    found = simulation.simulate(case, np.full((30, 4, 2), 5), 1.0)
    assert (found.seconds, found.idle_sampler) == pytest.approx((20, 0))


CHAOS = [
    "--steps",
    "6",
    "--kills",
    "4",
    "--stops",
    "1",
    "--interruptions",
    "2",
    "--leaves",
    "0",
    "--trainer-kills",
    "1",
    "--seeds",
    "0",
]


@pytest.fixture
def chaos(monkeypatch, folder) -> Any:
    import chaos
    import unruly

    monkeypatch.setattr(unruly, "TOKEN_SECONDS", 0.0005)
    monkeypatch.setattr(chaos, "STALL_SECONDS", 0.3)
    monkeypatch.setattr(chaos.host_health, "MOST_PAUSE_SECONDS", 0.01)  # to be as before afterwards
    return chaos


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["fixed-1", "newest-2"])
def test_chaos_changes_nothing(chaos, capsys, mode):
    with pytest.raises(SystemExit) as end:
        chaos.main([*CHAOS, "--modes", mode])
    assert not end.value.code and "kill 4" in capsys.readouterr().out


@pytest.mark.slow
def test_chaos_finds_a_fault(chaos, monkeypatch, capsys):
    from shoal.rollout.ledger import Ledger

    hand_over = Ledger.hand_over
    monkeypatch.setattr(
        Ledger, "hand_over", lambda ledger, entries: hand_over(ledger, entries[::-1])
    )
    with pytest.raises(chaos.Wrong, match="it asked for"):
        chaos.main([*CHAOS, "--modes", "fixed-0"])


def test_a_model_fits_with_the_keys_that_need_less_where_it_does_not_with_the_usual_ones(
    folder, monkeypatch
):
    import plans

    def needs(calls):
        """Of a small, a middling and a large model, on a device of 20 GiB."""
        sizes = {"small": (10, 5), "middle": (30, 15), "large": (60, 50)}
        result = []
        for _, _, words in calls:
            result.append(
                (sizes[words[0].partition("=")[2]][plans.LEAN.split()[0] in words] << 30, 20 << 30)
            )
        return result

    monkeypatch.setattr(plans, "FITTED", {"small": "1B", "middle": "2B", "large": "3B"})
    monkeypatch.setattr(plans, "TOPOLOGIES", ("l4:1",))

    def compilers(*_):
        return contextlib.nullcontext(needs)

    monkeypatch.setattr(plans, "compilers", compilers)
    assert (
        plans.fits([]).splitlines()[-1] == "| `l4:1` | 1 L4 | 20.0 | **10.0** | **15.0** | no: 50 |"
    )


ANSWERS = {
    "RAY_AUTH_TOKEN=wrong": "AuthenticationError: Authentication token is missing or incorrect",
    "ray status": "Active:\n 1 node_4c\n 1 node_89\nTotal Usage:\n 0.0/2.0 CPU",
    "sampler.kind=ray": "3 steps in 0:58",
    "grep -ls": "/tmp/ray/session_latest/logs/worker-7e.out",
}
"""What machines of a cluster answer to commands with these words."""


@pytest.mark.parametrize(
    "words, answer, error",
    [
        ("ray status", ANSWERS["ray status"], ""),
        ("ray status", "Active:\n 1 node_4c", "of 2 machines 1 are in the cluster"),
        ("RAY_AUTH_TOKEN=wrong", ANSWERS["ray status"], "the head answers"),
        ("grep -ls", "", "no worker of the run was on m1"),
    ],
)
def test_the_trial_of_ray_on_several_machines_ends_well_with_a_worker_on_each_alone(
    tmp_path, words, answer, error
):
    """It ended with exit code 0 whatever `ray status` said, and wherever the workers were."""
    cases = []
    for word, text in {**ANSWERS, words: answer}.items():
        cases.append(f"*{word!r}*) printf '%b\\n' {text!r}; [ -n {text!r} ];;")
    machine = tmp_path / "on"
    machine.write_text("\n".join(["#!/bin/bash", 'case "$2" in', *cases, "esac", ""]))
    machine.chmod(0o755)
    script = Path(__file__).parents[1] / "benchmarks" / "ray_nodes.sh"
    done = subprocess.run(
        ["bash", script, "m1=10.0.0.1", "m2=10.0.0.2"],
        env={"PATH": os.environ["PATH"], "ON": str(machine), "WAIT": "0"},
        capture_output=True,
        text=True,
    )
    assert (done.returncode != 0) == bool(error), done.stderr
    assert error in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("name", ["brief", "sums", "form"])
def test_each_lesson_of_the_real_model_trains(folder, monkeypatch, name):
    import real_model

    lesson = real_model.LESSONS[name]
    smaller = lesson.settings | {
        "steps": 1,
        "batch.prompts_per_step": 2,
        "sampling.max_prompt_tokens": 128,
    }
    monkeypatch.setitem(real_model.LESSONS, name, replace(lesson, settings=smaller))
    found = real_model.learn(Path("tiny"), name, seed=0, is_permuted=True)
    assert 0 <= found["before"] <= 1 and 0 <= found["after"] <= 1


def test_permuted_rewards_are_those_of_the_same_group(folder):
    import real_model

    def lengths(completions, **_):
        return [float(len(text)) for text in completions]

    texts = ["a" * number for number in range(1, 17)]
    rewards = real_model.permuted(lengths, 8)(texts)
    assert rewards != lengths(texts)
    assert sorted(rewards[:8]) == lengths(texts[:8]) and sorted(rewards[8:]) == lengths(texts[8:])


def test_exchanged_rewards_are_those_of_earlier_completions(folder, monkeypatch):
    import learning

    def number_of_prompt(prompts, **_):
        return [float(prompt) for prompt in prompts]

    monkeypatch.setattr(learning, "own_rewards", number_of_prompt)
    exchanged = learning.ExchangedReward()
    exchanged(range(learning.NUM_EXCHANGED))
    later = range(learning.NUM_EXCHANGED, 2000)
    rewards = exchanged(later)
    assert all(reward < number for number, reward in zip(later, rewards, strict=True))
    # Once the first have been given away, each reward is given once.
    of_later = [reward for reward in rewards if reward >= learning.NUM_EXCHANGED]
    assert len(of_later) > 1000 and len(set(of_later)) == len(of_later)


def test_the_form_of_an_answer(folder):
    import real_model

    def reward(text):
        return real_model.in_form([[{"content": text}]])[0]

    assert reward("The answer is yellow.") == 1.0
    assert reward("The answer is yellow. Lemons are.") == 0.5
    assert reward("The answer is yellow") == 0.5
    assert reward("Yellow. The answer is yellow.") == 0.0
