"""What flags of other systems become that need other settings beside their own value.

Each derivation is called once, with the texts of those of its flags that were given and with a look at every key as all
else resolves it, and returns (values by key, a sentence for the start).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from shoal.config.foreign import NOTHING, OFF, Get, Values, chosen, items_of, to_bool, to_float, to_int
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
    if "." in str(get("mesh.sampler")):  # a share of the devices, of sampler_devices_fraction
        return {"mesh.sampler_tensor": str(each)}, f"each sampler over {each} devices; how many there are follows " \
            "from sampler_devices_fraction"
    values = {"mesh.sampler": str(each * number), "mesh.sampler_tensor": str(each)}
    if get("mesh.fsdp") != -1 and not get("mesh.trainer"):
        values["mesh.trainer"] = str(get("mesh.data") * get("mesh.fsdp") * get("mesh.tensor"))
    return values, f"{number} samplers, each over {each} devices"


def gpus(given: Given, get: Get) -> tuple[Values, str]:
    """verl: nodes times devices of each, 8 where only the nodes are given."""
    number = math.prod(to_int(name, given.get(name, default)) for name, default in (
        ("trainer.n_gpus_per_node", "8"), ("trainer.nnodes", "1")))
    return {"mesh.trainer": str(number), "mesh.fsdp": "-1"}, "devices in all"


def turns_per_batch(given: Given, get: Get) -> tuple[Values, str]:
    """A dialog turn is one completion: so many a step, of whole groups."""
    [(name, text)] = given.items()
    size, group = to_int(name, text), get("batch.group_size")
    if size % group:
        raise ShoalError(f"{name}={text}: expected a multiple of batch.group_size={group}")
    return {"batch.prompts_per_step": str(size // group)}, f"{size} completions a step, {group} a prompt"


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
    """TRL: a step samples per_device_train_batch_size (8) x steps_per_generation completions on each device, and makes
    steps_per_generation / gradient_accumulation_steps updates of them."""
    size = to_int("per_device_train_batch_size", given.get("per_device_train_batch_size", "8"))
    parts = to_int("gradient_accumulation_steps", given.get("gradient_accumulation_steps", "1"))
    generation = given.get("steps_per_generation", "")
    batches = parts if generation.lower() in OFF else to_int("steps_per_generation", generation)
    if batches % parts:
        raise ShoalError(f"steps_per_generation={batches}: expected a multiple of gradient_accumulation_steps={parts}, "
                         "so that a step ends with an update")
    group, total, updates = get("batch.group_size"), size * batches, batches // parts
    if total % group:
        raise ShoalError(f"per_device_train_batch_size={size} x {batches} batches: expected a multiple of "
                         f"num_generations={group}")
    prompts, several = total // group, f" in {updates} updates" if updates > 1 else ""
    values, said = _micro(size, get)
    return {"batch.prompts_per_device": str(prompts), "algorithm.num_minibatches": str(updates), **values}, \
        f"{total} completions a device and step, {group} a prompt{several}; {said}"


UPDATES = {"max_steps": "steps", "save_steps": "checkpoint.every", "eval_steps": "train.evaluate_every"}


def trl_updates(given: Given, get: Get) -> tuple[Values, str]:
    """TRL counts updates, of which a step here may make several."""
    each = get("algorithm.num_minibatches") * get("algorithm.num_epochs")
    values = {UPDATES[name]: str(-(-to_int(name, text, 0) // each)) for name, text in given.items()}
    return values, f"counted in updates there, {each} to a step here" if each > 1 else ""


def warmup(given: Given, get: Get) -> tuple[Values, str]:
    """A share of all updates."""
    *_, (name, text) = given.items()
    share = to_float(name, text)
    if not 0 <= share <= 1:
        raise ShoalError(f"{name}={text}: expected a share of the run, 0 to 1")
    updates = get("steps") * get("algorithm.num_minibatches") * get("algorithm.num_epochs")
    return {"optimizer.warmup_steps": str(math.ceil(round(share * updates, 6)))}, f"of {updates} updates"


def trl_loss(given: Given, get: Get) -> tuple[Values, str]:
    """TRL: loss_type says how token losses become one number, and for some which loss; importance_sampling_level whose
    ratio is clipped."""
    kind, level = given.get("loss_type", ""), given.get("importance_sampling_level", "token")
    loss, aggregation = chosen("loss_type", kind, _LOSS_TYPES) if kind else ("", "")
    if level != "token" and loss not in ("grpo", ""):
        raise ShoalError(f"importance_sampling_level={level} with loss_type={kind}: expected token, the loss has a "
                         "ratio of its own")
    loss = chosen("importance_sampling_level", level, _LEVELS) or loss
    values = {"algorithm.loss": loss, "algorithm.aggregation": aggregation,
              "algorithm.cispo_bound": "absolute" if loss == "cispo" else ""}
    return {key: text for key, text in values.items() if text}, \
        "which loss, and how token losses become one number" if kind else ""


_LOSS_TYPES = {"grpo": ("grpo", "seq-mean-token-mean"), "bnpo": ("grpo", "token-mean"), "dapo": ("grpo", "token-mean"),
               "dr_grpo": ("grpo", "seq-mean-token-sum-norm"), "cispo": ("cispo", "token-mean"),
               "sapo": ("sapo", "seq-mean-token-mean")}
_LEVELS = {"token": "", "sequence": "gspo", "sequence_token": "gspo-token"}


def trl_clip(given: Given, get: Get) -> tuple[Values, str]:
    """TRL: epsilon is both bounds, unless epsilon_high is given."""
    low, high = given.get("epsilon", ""), given.get("epsilon_high", "")
    return _clips("epsilon", low, low if high.lower() in NOTHING else high)


def verl_clip(given: Given, get: Get) -> tuple[Values, str]:
    """verl: clip_ratio is both bounds, where the one is not given apart."""
    named = {name.rpartition(".")[2]: text for name, text in given.items()}
    low, high = (named.get(f"clip_ratio_{side}", named.get("clip_ratio", "")) for side in ("low", "high"))
    return _clips("clip_ratio", low, high)


def _clips(name: str, low: str, high: str) -> tuple[Values, str]:
    """The bounds that were given."""
    values = {"algorithm.clip_low": low, "algorithm.clip_high": high}
    return {key: str(to_float(name, text)) for key, text in values.items() if text}, ""


def estimator(given: Given, get: Get) -> tuple[Values, str]:
    """verl: whether the deviation is divided by is asked for `grpo` alone."""
    name, flag = "algorithm.adv_estimator", "algorithm.norm_adv_by_std_in_grpo"
    advantage = chosen(name, given.get(name, "grpo"), _ESTIMATORS)
    by_deviation = to_bool(flag, given.get(flag, "true"))
    if advantage != "grpo":
        return {"algorithm.advantage": advantage}, f"{flag} counts for grpo alone" if flag in given else ""
    return {"algorithm.advantage": "grpo" if by_deviation else "dr_grpo"}, \
        "" if by_deviation else "the group's mean alone is taken off"


_ESTIMATORS = {"grpo": "grpo", "rloo": "rloo", "reinforce_plus_plus": "reinforce++",
               "reinforce_plus_plus_baseline": "reinforce++-baseline", "gdpo": "gdpo"}


def mini_batches(given: Given, get: Get) -> tuple[Values, str]:
    """verl: prompts of an update; a step of fewer is one update."""
    [(name, text)] = given.items()
    prompts = get("batch.prompts_per_step")
    size = min(to_int(name, text), prompts)
    if prompts % size:
        raise ShoalError(f"{name}={text}: expected a divisor of batch.prompts_per_step={prompts}")
    return {"algorithm.num_minibatches": str(prompts // size)}, f"{prompts} prompts a step, {size} an update"


def long_prompts(given: Given, get: Get) -> tuple[Values, str]:
    """verl: prompts over the limit are filtered out first; what is left of them is an error."""
    name = "data.truncation"
    chosen(name, given.get(name, "error").strip("'"), {"error": ""})
    name = "data.filter_overlong_prompts"
    dropped = to_bool(name, given.get(name, "false"))
    return {"sampling.long_prompts": "drop" if dropped else "error"}, ""


def divergence(given: Given, get: Get) -> tuple[Values, str]:
    """verl: two places for a divergence, each switched on apart; its coefficient counts only there."""
    head = "actor_rollout_ref.actor."
    in_loss, in_reward = (to_bool(name, given.get(name, "false"))
                          for name in (head + "use_kl_loss", "algorithm.use_kl_in_reward"))
    if in_loss and in_reward:
        raise ShoalError("use_kl_loss and use_kl_in_reward are both on, and there is one divergence at a time: switch "
                         "one of them off")
    if in_loss:
        return {"algorithm.kl_coef": given.get(head + "kl_loss_coef", "0.001"), "algorithm.kl_placement": "loss"}, \
            "a term of the loss"
    if in_reward:
        return {"algorithm.kl_coef": given.get("algorithm.kl_ctrl.kl_coef", "0.001"), "algorithm.kl_placement": "reward"}, \
            "taken off the reward"
    return {"algorithm.kl_coef": "0"}, "off without use_kl_loss=true or use_kl_in_reward=true"


def reward_file(given: Given, get: Get) -> tuple[Values, str]:
    """verl's reward function: a file, and a name in it."""
    named = {name.rpartition(".")[2]: text for name, text in given.items()}
    if not named.get("path"):
        raise ShoalError(f"{next(iter(given))} needs custom_reward_function.path, the file that the function stands in")
    return {"reward.functions": [f"{named['path']}:{named.get('name', 'compute_score')}"]}, \
        "the function, in its file"


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
    return values, "the data set"


DERIVATIONS: Mapping[str, Derivation] = {
    one.__name__: one for one in (
        lengths, fractions, replicas, gpus, turns_per_batch, micro_batch, micro_batch_per_gpu, trl_batch, mini_batches,
        turns, trl_updates, warmup, trl_loss, trl_clip, verl_clip, estimator, long_prompts, divergence, reward_file,
        rollout_correction, train_files)
}
"""In the order in which they are made: later ones see what earlier ones gave."""
