"""Every key of other systems' files (`files/`) acts here, or is listed once as one that cannot
matter, or is an error once it is switched on. A key acts where another value of it makes another
configuration, or is refused as a value."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from stand_ins import VERL
from test_files import FILES

from shoal.compat import rules
from shoal.compat.front import SYSTEMS, find_row, likely_system
from shoal.config.key import keys_of
from shoal.config.merge import compose
from shoal.config.train import Config
from shoal.config.yaml_files import read_files
from shoal.records import ShoalError

CORRECTION = "algorithm.rollout_correction."
ACTOR, ROLLOUT, MODEL = (f"actor_rollout_ref.{part}." for part in ("actor", "rollout", "model"))
ROWS = "train.parquet"
GROUPS = {"algorithm.adv_estimator": "grpo", ROLLOUT + "n": 5}
GIVEN: dict[str, dict[str, Any]] = {
    "ppo_trainer.yaml": {**GROUPS, "trainer.total_training_steps": 10},
    "grpo_gsm8k.yaml": {"train.kl_to_inference_coeff": 0},
    "grpo_ifeval.yaml": {"train.kl_to_inference_coeff": 0},
}
"""What a file needs to be a job here."""

OTHER: dict[str, Any] = {
    "decode_sampling_nucleus_p": 0.5,
    "ici_fsdp_parallelism": 4,
    ACTOR + "policy_loss.loss_mode": "gspo",
    ACTOR + "loss_agg_mode": "seq-mean-token-mean",
    ROLLOUT + "top_k": 5,
    "data.train_max_samples": 7,
    "data.val_max_samples": 7,
}
"""Another value of a key, where twice or half of it, or the other truth value, is none."""

CHECKED_OF_CRITIC = [flag.name for flag in SYSTEMS["verl"] if flag.rule is rules.verl_critic]
OF_CRITIC = [*CHECKED_OF_CRITIC, "critic.optim.lr", "critic.model.path", "critic.cliprange_value"]

BESIDE: dict[str, dict[str, Any]] = {
    "num_epoch": {"num_batches": 4},
    "eval_interval": {"train_fraction": 0.5},
    "env.num_envs": {"train.dialog_turns_per_batch": None},
    "train.kl_to_ref_coeff": {"train.use_kl_to_ref": True},
    "train.use_kl_to_ref": {"train.kl_to_ref_coeff": 0.1},
    ACTOR + "clip_ratio": {ACTOR + "clip_ratio_low": None, ACTOR + "clip_ratio_high": None},
    ACTOR + "kl_loss_coef": {ACTOR + "use_kl_loss": True},
    ACTOR + "kl_loss_type": {ACTOR + "use_kl_loss": True},
    ACTOR + "grad_clip": {ACTOR + "optim.clip_grad": None},
    MODEL + "lora_alpha": {MODEL + "lora_rank": 8},
    MODEL + "target_modules": {MODEL + "lora_rank": 8},
    "trainer.total_epochs": {
        "trainer.total_training_steps": None,
        "data.train_files": ROWS,
        "data.val_files": None,
        "data.train_batch_size": 8,
        ACTOR + "ppo_mini_batch_size": 8,
    },
    "trainer.resume_from_path": {"trainer.resume_mode": "resume_path"},
    ROLLOUT + "gpu_memory_utilization": {"sampler.kind": "vllm", "vllm.python": "python"},
    ROLLOUT + "val_kwargs.n": {ROLLOUT + "val_kwargs.temperature": 0.6},
    ROLLOUT + "val_kwargs.top_p": {ROLLOUT + "val_kwargs.temperature": 0.6},
    ROLLOUT + "val_kwargs.top_k": {ROLLOUT + "val_kwargs.temperature": 0.6},
    ROLLOUT + "prompt_length": {"data.max_prompt_length": None},
    ROLLOUT + "response_length": {"data.max_response_length": None},
    CORRECTION + "rollout_is_threshold": {CORRECTION + "rollout_is": "token"},
    CORRECTION + "loss_type": {CORRECTION + "bypass_mode": True},
    CORRECTION + "rollout_rs_threshold": {CORRECTION + "rollout_rs": "seq_mean_k1"},
    **{key: {"algorithm.adv_estimator": "gae"} for key in OF_CRITIC},
    "algorithm.kl_penalty": {"algorithm.use_kl_in_reward": True},
    "algorithm.kl_ctrl.kl_coef": {"algorithm.use_kl_in_reward": True},
    "custom_reward_function.name": {"custom_reward_function.path": "mine.py"},
}
"""Key -> what it acts with; None leaves out a key that decides in its place."""


def entries(file: Path) -> dict[str, Any]:
    result = {}
    for _, found in read_files("train", file, lambda name: name in keys_of(Config)):
        for one in found:
            result[one.name] = one.value
    return result


def others(name: str, value: Any) -> list[Any]:
    if name in OTHER:
        return [OTHER[name]]
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int | float):
        return [2 * value or 1, value / 2 or 0.5]
    return ["something/else", "64"]


def outcome(file: Path, values: dict[str, Any]) -> Any:
    """The configuration, or the error."""
    file.write_text(yaml.safe_dump(values))
    try:
        return compose("train", [str(file)])[0]
    except ShoalError as error:
        return str(error)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(file.name for file in FILES.iterdir()))
def test_every_key_acts_or_cannot_matter_or_is_an_error(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pq.write_table(pa.Table.from_pylist(VERL[:32]), tmp_path / ROWS)
    monkeypatch.chdir(tmp_path)
    values = entries(FILES / name)
    system, is_sure = likely_system(values)
    rows = {
        key: row
        for key, value in values.items()
        if (row := find_row(Config, key, value, system, is_sure))
    }
    own = {key for key in values if key not in rows}
    assert own <= keys_of(Config).keys() | {"checkpoint_period"}  # names that are ours too
    idle = {key for key, row in rows.items() if row.idle}
    refused = {key for key, row in rows.items() if row.refused}
    for key in idle | refused:
        assert rows[key].meaning, f"{key}: why?"
        exact = [row for row in SYSTEMS[system] if row.name == key]
        assert len(exact) == 1 or not exact, f"{key} is listed more than once"
    acting = {key: values[key] for key in (*own, *rows) if key not in idle | refused} | GIVEN.get(
        name, {}
    )
    referred = {}
    for key in idle:
        sibling = f"{{.{key.rpartition('.')[2]}}}"  # {.save_contents}
        if any(name in str(acting) for name in (f"{{{key}}}", f":{key},", sibling)):
            referred[key] = values[key]
    silent = []
    for key in acting.keys() - GIVEN.get(name, {}).keys():
        beside = BESIDE.get(key, {})
        job = {}
        for one, value in {**referred, **acting, **beside}.items():
            if one not in beside or value is not None:
                job[one] = value
        before = outcome(tmp_path / name, job)
        if all(
            outcome(tmp_path / name, job | {key: other}) == before
            for other in others(key, values[key])
        ):
            silent.append(key)
    assert not silent, silent
    said = outcome(tmp_path / name, referred | acting | dict.fromkeys(refused, "something/else"))
    assert not refused or (
        isinstance(said, str) and not [key for key in refused if key not in said]
    )
