"""Flags of asynchronous training: what TRL's AsyncGRPOConfig, verl's fully_async_policy and
TorchRL's grpo-async become, and that a dry run says so."""

from __future__ import annotations

import pytest

from shoal.commands.compat import shim_argv
from shoal.config.merge import compose, from_overrides
from shoal.config.stored import difference_from_defaults
from shoal.config.train import Config
from shoal.records import ShoalError
from shoal.trainer.schedule import Schedule


def became(*words: str) -> tuple[dict, list[str]]:
    """What words set, without the head `train.`, and the lines of a dry run on them."""
    config, resolved = compose("train", list(words))
    return {
        key.removeprefix("train."): value for key, value in difference_from_defaults(config).items()
    }, list(resolved.became)


def ages(interval: int, max_staleness: int) -> list[int]:
    """The ages of samples in two rounds of a run's later steps, between two weight updates each."""
    schedule = Schedule(max_staleness - (interval - 1), interval)
    result = []
    for step in range(10 * interval, 12 * interval):
        result.append(step - schedule.version(step))
    return result


# ---- TRL


@pytest.mark.parametrize(
    ("words", "expected", "said"),
    [
        ("weight_sync_steps=1 max_staleness=4", {"max_staleness": 4}, ""),
        ("weight_sync_steps=4", {"weight_sync_interval": 4}, ""),
        (
            "weight_sync_steps=4 max_staleness=1",
            {"weight_sync_interval": 4, "max_staleness": 7},
            "counted in steps here, 2 x 4 - 1",
        ),
        (
            "max_staleness=0 weight_sync_steps=4",
            {"weight_sync_interval": 4, "max_staleness": 3},
            "counted in steps here, 1 x 4 - 1",
        ),
        (
            "weight_sync_steps=4 max_staleness=1 algorithm.num_minibatches=2",
            {"weight_sync_interval": 2, "max_staleness": 3, "algorithm.num_minibatches": 2},
            "2 updates to a step here; counted in steps here, 2 x 2 - 1",
        ),
    ],
)
def test_trls_staleness_is_counted_in_steps(words, expected, said):
    found, lines = became(*words.split())
    assert found == expected
    assert len(lines) == 1 and lines[0].partition(": ")[2] == said


@pytest.mark.parametrize(("interval", "age"), [(1, 0), (1, 4), (4, 0), (4, 1), (3, 2)])
def test_no_sample_is_older_than_trl_allows(interval, age):
    """TRL's age of a sample is the number of weight updates since its own."""
    config, _ = compose("train", [f"weight_sync_steps={interval}", f"max_staleness={age}"])
    assert ages(interval, config.train.max_staleness) == 2 * [
        age * interval + place for place in range(interval)
    ]


@pytest.mark.parametrize(
    "words", [["max_staleness=3"], ["--max_staleness", "3"], ["train.max_staleness=3"]]
)
def test_max_staleness_is_our_own_name_without_weight_sync_steps(words):
    assert became(*words) == ({"max_staleness": 3}, [])
    assert became(*words, "train.weight_sync_interval=2")[0] == {
        "max_staleness": 3,
        "weight_sync_interval": 2,
    }
    assert from_overrides(Config, max_staleness=3)[0].train.max_staleness == 3
    assert from_overrides(Config, max_staleness=3, weight_sync_steps=2)[0].train.max_staleness == 7


def test_trls_staleness_counts_in_another_layer(tmp_path):
    file = tmp_path / "trl.yml"
    file.write_text("weight_sync_steps: 2\n")
    assert became(str(file), "max_staleness=1")[0] == {
        "weight_sync_interval": 2,
        "max_staleness": 3,
    }


def test_trls_queues_change_nothing():
    found, lines = became(
        "max_inflight_tasks=64",
        "queue_maxsize=1024",
        "heartbeat_stale_after_s=300",
        "request_timeout=600",
    )
    assert not found and all("changes nothing here: " in line for line in lines) and len(lines) == 4


# ---- verl

_A = "async_training."


@pytest.mark.parametrize(
    ("interval", "share", "most"),
    [
        (1, "0", 0),
        (1, "0.1", 1),
        (1, "1", 1),
        (1, "1.5", 2),
        (4, "0", 3),
        (4, "0.1", 4),
        (4, "0.5", 5),
        (4, "1", 7),
        (10, "0.7", 16),
    ],
)
def test_verls_staleness_threshold_is_the_share_of_steps_that_are_sampled_ahead(
    interval, share, most
):
    words = [f"{_A}trigger_parameter_sync_step={interval}", f"{_A}staleness_threshold={share}"]
    config, resolved = compose("train", words)
    assert (config.train.weight_sync_interval, config.train.max_staleness) == (interval, most)
    assert resolved.became[1].startswith(f"{words[1]} became train.max_staleness={most}: ")
    old = [age for age in ages(interval, most) if age >= interval]
    assert max(ages(interval, most)) == most and len(old) == 2 * min(most - interval + 1, interval)


@pytest.mark.parametrize(
    ("words", "versions"),
    [
        ("staleness_threshold=0.5 partial_rollout=True", "newest"),
        ("staleness_threshold=0.5 partial_rollout=False", "fixed"),
        ("staleness_threshold=0 partial_rollout=True", "fixed"),
        ("partial_rollout=True", "fixed"),
        ("partial_rollout=True train.max_staleness=2", "newest"),
    ],
)
def test_verls_partial_rollouts_are_newest_weights(words, versions):
    config, resolved = compose(
        "train", [word if "train." in word else _A + word for word in words.split()]
    )
    assert config.train.versions == versions
    assert f"train.versions={versions}" in " ".join(resolved.became)
    idle = versions == "fixed" and "partial_rollout=True" in words
    assert ("nothing is sampled ahead" in " ".join(resolved.became)) == idle


def test_the_command_of_verls_fully_async_policy():
    found, lines = became(
        "data.train_batch_size=0",
        "data.gen_batch_size=1",
        "actor_rollout_ref.rollout.n=16",
        "actor_rollout_ref.actor.ppo_mini_batch_size=32",
        "trainer.test_freq=10",
        "trainer.save_freq=-1",
        "trainer.nnodes=2",
        "trainer.n_gpus_per_node=6",
        "rollout.nnodes=2",
        "rollout.n_gpus_per_node=2",
        "rollout.total_rollout_steps=51200",
        "trainer.total_epochs=10",
        f"{_A}staleness_threshold=0.1",
        f"{_A}trigger_parameter_sync_step=4",
        f"{_A}require_batches=4",
        f"{_A}partial_rollout=True",
    )
    assert found == {
        "steps": 400,
        "algorithm.num_minibatches": 4,
        "batch.prompts_per_step": 128,
        "batch.group_size": 16,
        "evaluate_every": 40,
        "weight_sync_interval": 4,
        "max_staleness": 4,
        "versions": "newest",
        "checkpoint.every": 0,
        "mesh.fsdp": -1,
        "mesh.trainer": "12",
        "mesh.sampler": "4",
    }
    said = " | ".join(lines)
    for part in (
        f"{_A}trigger_parameter_sync_step=4 became train.weight_sync_interval=4",
        "became train.max_staleness=4, train.versions=newest: 1 of 4 steps sampled before",
        "became steps=400: 128 prompts a step",
        "128 prompts a step, 32 an update",
        "counted in weight updates of the sampler there, one in 4 steps",
    ):
        assert part in said


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            "async_training.staleness_threshold=-1",
            "async_training.staleness_threshold=-1: expected 0 or more",
        ),
        ("async_training.require_batches=4", "needs actor_rollout_ref.actor.ppo_mini_batch_size"),
        (
            "data.train_batch_size=0 actor_rollout_ref.actor.ppo_mini_batch_size=4",
            "needs async_training.require_batches",
        ),
        (
            "async_training.compute_prox_log_prob=false",
            "the ratio is to the trainer's own log-probs",
        ),
        (
            "async_training.use_dynamic_resource_scheduling=true",
            "has its devices for the whole run",
        ),
        ("weight_sync_steps=x", "weight_sync_steps=x: expected a finite number"),
        (
            "weight_sync_steps=2 max_staleness=-1",
            "max_staleness=-1: expected a whole number of 0 or more",
        ),
    ],
)
def test_asynchronous_flags_that_cannot_be_taken_are_named(words, message):
    with pytest.raises(ShoalError, match=message):
        compose("train", words.split())


# ---- TorchRL


def test_the_asynchronous_entry_point_samples_on_devices_of_its_own():
    words = shim_argv("grpo-async", ["train_model.num_devices=1", "inference_model.num_devices=1"])
    config, resolved = compose(words[0], words[1:])
    assert (config.mesh.trainer, config.mesh.sampler, config.train.max_staleness) == ("1", "1", 1)
    assert {
        "train_model.num_devices=1 became mesh.trainer=1",
        "inference_model.num_devices=1 became mesh.sampler=1",
    } <= set(resolved.became)
