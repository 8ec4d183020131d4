"""What flags of other systems become that need other settings beside their own value.

Each derivation is called once, with the texts of those of its flags that were given and with a look at every key as all
else resolves it, and returns (values by key, a sentence for the start).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from shoal.config.foreign import OFF, Get, Values, items_of, to_bool, to_float, to_int
from shoal.types import ShoalError

Given = Mapping[str, str]
Derivation = Callable[[Given, Get], tuple[Values, str]]


def lengths(given: Given, get: Get) -> tuple[Values, str]:
    """max_target_length counts prompt and completion together."""
    prompt = get("sampling.max_prompt_tokens")
    [(name, text)] = given.items()
    completion = to_int(name, text) - prompt
    if completion < 1:
        raise ShoalError(f"{name}={text}: expected more than sampling.max_prompt_tokens={prompt}, since it counts "
                         "prompt and completion together")
    return {"sampling.max_completion_tokens": str(completion)}, \
        f"prompt and completion together, less {prompt} for the prompt"


def fractions(given: Given, get: Get) -> tuple[Values, str]:
    """Shares of the devices; both 1.0 are the same devices."""
    shares = {name.lower(): to_float(name, text) for name, text in given.items()}
    for name, share in shares.items():
        if not 0 < share <= 1:
            raise ShoalError(f"{name}={share:g}: expected a number above 0, up to 1.0 for all devices")
    if len(shares) == 2 and sum(shares.values()) > 1 and set(shares.values()) != {1.0}:
        shown = " and ".join(f"{name}={share:g}" for name, share in shares.items())
        raise ShoalError(f"{shown} are more than all devices: expected 1.0 for both (the same devices), or a sum of at "
                         "most 1")
    keys = {"trainer_devices_fraction": "mesh.trainer", "sampler_devices_fraction": "mesh.sampler"}
    return {keys[name]: str(share) for name, share in shares.items()}, "the trainer's devices are the first, the " \
        "sampler's the last"


def replicas(given: Given, get: Get) -> tuple[Values, str]:
    """So many samplers of so many devices each; where fsdp is fixed, the trainer's number is known with it."""
    each = to_int("inference_devices_per_replica", given.get("inference_devices_per_replica", "4"))
    number = to_int("inference_replicas", given.get("inference_replicas", "1"))
    values = {"mesh.sampler": str(each * number), "mesh.sampler_tensor": str(each)}
    if get("mesh.fsdp") != -1 and not get("mesh.trainer"):
        values["mesh.trainer"] = str(get("mesh.data") * get("mesh.fsdp") * get("mesh.tensor"))
    return values, f"{number} samplers, each over {each} devices"


def gpus(given: Given, get: Get) -> tuple[Values, str]:
    number = math.prod(to_int(name, text) for name, text in given.items())
    return {"mesh.trainer": str(number), "mesh.fsdp": "-1"}, "devices in all"


def turns(given: Given, get: Get) -> tuple[Values, str]:
    """A dialog turn is one completion."""
    [(name, text)] = given.items()
    if get("batch.prompts_per_device"):
        raise ShoalError(f"{name}={text} needs env.num_envs (batch.prompts_per_step): the number of devices that "
                         "batch.prompts_per_device is for is known only later; or give steps")
    total, step = to_int(name, text), get("batch.prompts_per_step") * get("batch.group_size")
    return {"steps": str(-(-total // step))}, f"{step} completions a step" + (", rounded up" if total % step else "")


def _micro(completions: int, get: Get) -> tuple[Values, str]:
    tokens = get("sampling.max_prompt_tokens") + get("sampling.max_completion_tokens")
    return {"batch.micro_tokens": str(completions * tokens)}, \
        f"{completions} completions of {tokens} tokens at once on a device; it decides memory, never the result"


def micro_batch(given: Given, get: Get) -> tuple[Values, str]:
    """TorchRL: completions of an optimizer step, and the parts that it is computed in."""
    parts = to_int("train.gradient_accumulation_steps", given.get("train.gradient_accumulation_steps", "1"))
    name = "train.optim_batch_size"
    size = to_int(name, given[name]) if name in given else get("batch.prompts_per_step") * get("batch.group_size")
    return _micro(-(-size // parts), get)


def micro_batch_per_gpu(given: Given, get: Get) -> tuple[Values, str]:
    """verl: completions that a device computes at once."""
    return _micro(max(to_int(name, text) for name, text in given.items()), get)


def trl_batch(given: Given, get: Get) -> tuple[Values, str]:
    """TRL: a step samples per_device_train_batch_size x steps_per_generation completions on each device."""
    parts = to_int("gradient_accumulation_steps", given.get("gradient_accumulation_steps", "1"))
    generation = given.get("steps_per_generation", "")
    parts = parts if generation.lower() in OFF else to_int("steps_per_generation", generation)
    if "per_device_train_batch_size" not in given:
        return {}, "a step's completions are computed in parts of batch.micro_tokens"
    size, group = to_int("per_device_train_batch_size", given["per_device_train_batch_size"]), get("batch.group_size")
    if size * parts % group:
        raise ShoalError(f"per_device_train_batch_size={size} x {parts} accumulated: expected a multiple of "
                         f"num_generations={group}")
    values, said = _micro(size, get)
    return {"batch.prompts_per_device": str(size * parts // group), **values}, \
        f"{size * parts} completions a device and step are {size * parts // group} prompts; {said}"


def mini_batches(given: Given, get: Get) -> tuple[Values, str]:
    [(name, text)] = given.items()
    size, prompts = to_int(name, text), get("batch.prompts_per_step")
    if prompts % size:
        raise ShoalError(f"{name}={text}: expected a divisor of batch.prompts_per_step={prompts}")
    return {"algorithm.num_minibatches": str(prompts // size)}, f"{prompts} prompts a step, {size} an update"


def kl_loss(given: Given, get: Get) -> tuple[Values, str]:
    """verl: the coefficient counts only where the term is switched on."""
    head = "actor_rollout_ref.actor."
    used = to_bool(head + "use_kl_loss", given.get(head + "use_kl_loss", "false"))
    coef = given.get(head + "kl_loss_coef", "0.001") if used else "0"
    return {"algorithm.kl_coef": coef, "algorithm.kl_in": "loss"}, "" if used else "off without use_kl_loss=true"


def kl_reward(given: Given, get: Get) -> tuple[Values, str]:
    used = to_bool("algorithm.use_kl_in_reward", given.get("algorithm.use_kl_in_reward", "false"))
    if not used:
        return {}, "off without algorithm.use_kl_in_reward=true"
    return {"algorithm.kl_coef": given.get("algorithm.kl_ctrl.kl_coef", "0.001"), "algorithm.kl_in": "reward"}, ""


def reward_file(given: Given, get: Get) -> tuple[Values, str]:
    """verl's reward function: a file, and a name in it."""
    named = {name.rpartition(".")[2]: text for name, text in given.items()}
    if not named.get("path"):
        raise ShoalError(f"{next(iter(given))} needs custom_reward_function.path, the file that the function stands in")
    return {"reward.functions": [f"{named['path']}:{named.get('name', 'compute_score')}"]}, ""


def rollout_correction(given: Given, get: Get) -> tuple[Values, str]:
    """TRL: truncated or masked importance weights for what sampler and trainer disagree on."""
    name = "vllm_importance_sampling_correction"
    if not to_bool(name, given.get(name, "true")):
        return {"algorithm.correction": "none"}, ""
    mode = given.get("vllm_importance_sampling_mode", "sequence_mask")
    level, _, kind = mode.partition("_")
    if level not in ("token", "sequence") or kind not in ("mask", "truncate"):
        raise ShoalError(f"vllm_importance_sampling_mode={mode}: expected token_truncate, token_mask, "
                         "sequence_truncate or sequence_mask")
    cap = given.get("vllm_importance_sampling_clip_max", given.get("vllm_importance_sampling_cap", "3.0"))
    return {"algorithm.correction": "mis" if kind == "mask" else "tis", "algorithm.correction_level": level,
            "algorithm.correction_cap": cap}, "between the sampler here and the trainer"


def train_files(given: Given, get: Get) -> tuple[Values, str]:
    """verl: parquet files; one is the data set itself, several are files of their folder."""
    [(name, text)] = given.items()
    files = items_of(text)
    if not files:
        raise ShoalError(f"{name}={text}: expected a file, or a list of files")
    values: dict[str, Any] = {"task.path": files[0]}
    folders = {file.rpartition("/")[0] for file in files}
    if len(files) > 1 and len(folders) > 1:
        raise ShoalError(f"{name}={text}: expected files of one folder")
    if len(files) > 1:
        values = {"task.path": folders.pop() or ".", "task.files": [file.rpartition("/")[2] for file in files]}
    if get("task.name") == "words":
        values["task.name"] = "custom"
    return values, ""


DERIVATIONS: Mapping[str, Derivation] = {
    one.__name__: one for one in (lengths, fractions, replicas, gpus, turns, micro_batch, micro_batch_per_gpu,
                                  trl_batch, mini_batches, kl_loss, kl_reward, reward_file, rollout_correction,
                                  train_files)
}
"""In the order in which they are made: later ones see what earlier ones gave."""
