"""Rules: functions that convert flags of other systems whose values depend on the final values of
other keys. All of them are in RULES.

Each rule is called once, after presets, file and command line are merged:

    (given, get)  ->  (values, sentence)

`given`: those of its flags that were given, name -> text; `get`: returns the final value of a key
of Shoal. `values`: key -> what the flags become; `sentence`: what to show at the start of the run
about that, '' for nothing. A rule raises ShoalError for a text that it cannot convert."""

from __future__ import annotations

import heapq
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from shoal.compat.flags import (
    MEMORY,
    items_of,
    last_part,
    to_bool,
    to_float,
    to_int,
    value_of_option,
)
from shoal.compat.verl_readers import NO_LIMIT_OF_ROUNDS
from shoal.config.foreign import (
    NOTHING,
    OFF,
    FlagTexts,
    GetValue,
    KeyValues,
    Rule,
    Sentence,
    read_once,
)
from shoal.config.keywords import ROWS
from shoal.config.sections.model import ModelSection
from shoal.config.sections.reward import RewardSection
from shoal.config.sections.task import TaskSection
from shoal.config.train import samples_for_pass_k
from shoal.files import offline
from shoal.job.resume import run_to_resume
from shoal.records import Example, ShoalError
from shoal.runs.layout import LAST, is_run, last_run
from shoal.runs.reader import read_requested
from shoal.stop import NotHere
from shoal.tasks.custom import given_task
from shoal.tasks.task import OWN_DATA, Task, load_by_name
from shoal.text import count, exact


def last_of(given: FlagTexts) -> tuple[str, str]:
    """Returns (name, text) of the flag that was given last: of several names for one thing the last
    counts."""
    return list(given.items())[-1]


# ---- lengths and devices


def maxtext_lengths(given: FlagTexts, get: GetValue) -> tuple[KeyValues, Sentence]:
    """Converts MaxText's and Tunix's max_target_length, which counts prompt and completion
    together, to sampling.max_completion_tokens. ShoalError if nothing is left for a completion."""
    prompt = get("sampling.max_prompt_tokens")
    name, text = last_of(given)
    completion = to_int(name, text) - prompt
    if completion < 1:
        raise ShoalError(
            f"{name}={text}: expected more than max_prefill_predict_length={prompt} "
            "(sampling.max_prompt_tokens), since it counts prompt and completion together"
        )
    sentence = f"prompt and completion together, less {prompt} for the prompt"
    return {"sampling.max_completion_tokens": str(completion)}, sentence


def maxtext_devices(given: FlagTexts, get: GetValue) -> tuple[KeyValues, Sentence]:
    """Converts MaxText's flags about devices. trainer_devices_fraction and sampler_devices_fraction
    become mesh.trainer and mesh.sampler: shares of all devices, of which the trainer gets the first
    and the sampler the last. If both shares are 1.0, both use the same devices; ShoalError if they
    sum up to more than 1 otherwise, or if one is not above 0 and at most 1.

    inference_devices_per_replica (by default 4) becomes mesh.sampler_tensor. Unless the sampler has
    a share, that number times inference_replicas (by default 1) becomes mesh.sampler, and, if
    mesh.fsdp is a number, mesh.trainer is computed from the mesh unless it has a share."""
    shares = {}
    for name, text in given.items():
        if name.lower().endswith("fraction"):
            shares[name.lower()] = to_float(name, text)
    for name, share in shares.items():
        if not 0 < share <= 1:
            raise ShoalError(
                f"{name}={exact(share)}: expected a number above 0, up to 1.0 for all devices"
            )
    are_all_devices = set(shares.values()) == {1.0}
    if len(shares) == 2 and sum(shares.values()) > 1 and not are_all_devices:
        shown = " and ".join(f"{name}={exact(share)}" for name, share in shares.items())
        raise ShoalError(
            f"{shown} are more than all devices: expected 1.0 for both (the same devices), or a "
            "sum of at most 1"
        )
    # trainer_devices_fraction becomes mesh.trainer, sampler_devices_fraction mesh.sampler.
    values = {f"mesh.{name.partition('_')[0]}": str(share) for name, share in shares.items()}
    if len(given) == len(shares):  # only shares are given
        return values, "the trainer's devices are the first, the sampler's the last"
    replica_size = to_int(
        "inference_devices_per_replica", given.get("inference_devices_per_replica", "4")
    )
    replicas = to_int("inference_replicas", given.get("inference_replicas", "1"))
    values["mesh.sampler_tensor"] = str(replica_size)
    if "mesh.sampler" in values:
        sentence = (
            f"each sampler over {count(replica_size, 'device')}; how many there are follows from "
            "sampler_devices_fraction"
        )
        return values, sentence
    if get("mesh.fsdp") != -1:
        trainer_devices = math.prod(get(f"mesh.{axis}") for axis in AXES)
        values.setdefault("mesh.trainer", str(trainer_devices))
    values["mesh.sampler"] = str(replica_size * replicas)
    return values, f"{count(replicas, 'sampler')}, each over {count(replica_size, 'device')}"


def maxtext_pathways(given: FlagTexts, get: GetValue) -> tuple[KeyValues, Sentence]:
    """Converts MaxText's switch for Pathways to mesh.pathways. If it is on and no devices of roles
    are set, the sentence says that here all roles then share all devices, while in MaxText the
    sampler has four devices of its own."""
    name, text = last_of(given)
    sentence = ""
    if to_bool(name, text) and not (get("mesh.trainer") or get("mesh.sampler")):
        sentence = (
            "all roles share all devices; inference_devices_per_replica=4 "
            "inference_replicas=1, MaxText's defaults, give the sampler 4 of its own"
        )
    return {"mesh.pathways": text}, sentence


AXES = ("data", "fsdp", "expert", "context", "tensor")
"""Axes of the trainer's mesh. `shoal.mesh` has them too, but imports JAX."""


def sampler_tensor(given: FlagTexts, get: GetValue) -> tuple[KeyValues, Sentence]:
    """Converts the number of devices that share a sampler (MaxText, TRL, verl) to
    mesh.sampler_tensor, with sampler.kind=vllm to sampler.devices_per_worker; -1 and 1 leave it
    open (mesh.sampler_tensor=0). Scripts often set it for a machine with eight devices, so nothing
    is set if the sampler's number of devices is known and no multiple of it."""
    name, text = last_of(given)
    # -1 and 1 are defaults that scripts write out. Left open, a replica gets more devices if it
    # does not fit on one.
    if text in ("-1", "1"):
        sentence = "left open: a sampler has several devices only if it does not fit on one"
        return {"mesh.sampler_tensor": "0"}, sentence
    size = to_int(name, text)
    if get("sampler.kind") == "vllm":
        sentence = f"each server over {count(size, 'device')}"
        return {"sampler.devices_per_worker": str(size)}, sentence
    devices = _sampler_devices(get)
    if devices and devices % size:
        sentence = (
            f"it does not divide the sampler's {count(devices, 'device')}; mesh.fsdp=-1 takes all "
            "devices"
        )
        return {}, sentence
    return {"mesh.sampler_tensor": str(size)}, f"each sampler over {count(size, 'device')}"


def sampler_memory(given: FlagTexts, get: GetValue) -> tuple[KeyValues, Sentence]:
    """Converts the share of a GPU that vLLM takes (TRL, verl, MaxText) to vllm.memory with
    sampler.kind=vllm, else to sampling.memory_share. Sets nothing if the share is None, or if the
    servers of vLLM run already (no vllm.python). ShoalError unless it is above 0 and at most 1. It
    becomes the share of Shoal's own sampler only if that has devices of its own: on devices shared
    with the trainer, Shoal's share counts the trainer's weights and optimizer too, vLLM's does not.
    On shared devices nothing is set."""
    if not get("mesh.sampler") and get("sampler.kind") != "vllm":
        return {}, MEMORY
    return torchrl_memory(given, get)


def torchrl_memory(given: FlagTexts, get: GetValue) -> tuple[KeyValues, Sentence]:
    """Converts the share of a device that vLLM takes in TorchRL, whose recipe gives the sampler
    devices of its own, to sampling.memory_share, with sampler.kind=vllm to vllm.memory. Sets
    nothing if the share is None, or if the servers of vLLM run already (no vllm.python). ShoalError
    unless it is above 0 and at most 1."""
    name, text = last_of(given)
    is_served = get("sampler.kind") == "vllm"
    if text.lower() in NOTHING or (is_served and not get("vllm.python")):
        return {}, MEMORY
    share = to_float(name, text)
    if not 0 < share <= 1:
        raise ShoalError(
            f"{name}={text}: expected a share of a device's memory, above 0 and up to 1"
        )
    key = "vllm.memory" if is_served else "sampling.memory_share"
    return {key: str(share)}, ""


def _trainer_devices(get: GetValue) -> int | None:
    """Returns the number of the trainer's devices: the product of the mesh's axes, or with
    mesh.fsdp=-1 what mesh.trainer names. None if the keys leave it open."""
    if get("mesh.fsdp") == -1:
        return _listed_devices(get("mesh.trainer"))
    return math.prod(get(f"mesh.{axis}") for axis in (*AXES, "dcn_data", "dcn_fsdp"))


def _prompts_of_step(get: GetValue) -> int | None:
    """Returns how many prompts a step has on all devices; None if batch.prompts_per_device is set
    and the keys leave the number of devices open."""
    each = get("batch.prompts_per_device")  # 0: not set
    if not each:
        return get("batch.prompts_per_step")
    devices = _trainer_devices(get)
    return each * devices if devices else None


def _sampler_devices(get: GetValue) -> int | None:
    """Returns the number of the sampler's devices, which are the trainer's unless it has its own;
    None if the keys leave it open."""
    own = get("mesh.sampler")
    if own:
        return _listed_devices(own)
    return _trainer_devices(get)


def _listed_devices(text: str) -> int | None:
    """Returns how many devices a value of mesh.trainer or mesh.sampler names: 8 for `8`, 2 for
    `[0,1]`; None for a share like `0.5` or an empty text, which depend on the machine."""
    if text.isdigit():
        return int(text)
    if text.startswith("["):
        return len(text.split(","))
    return None


# ---- sizes of a step, and how many there are


def torchrl_batch(given: FlagTexts, get: GetValue) -> tuple[KeyValues, Sentence]:
    """Converts TorchRL's train.dialog_turns_per_batch, the number of completions in a step (a
    dialog turn is one completion), to batch.prompts_per_step; ShoalError if it does not fill whole
    groups. env.num_envs is then how many completions are sampled at once, and becomes
    sampling.slots_per_device. Without dialog_turns_per_batch, a step has env.repeats completions of
    each of env.num_envs environments, which are the prompts of a step."""
    name = "train.dialog_turns_per_batch"
    if name not in given:
        sentence = "prompts of a step, each with env.repeats completions"
        return {"batch.prompts_per_step": given["env.num_envs"]}, sentence
    text = given[name]
    size, group = to_int(name, text), get("batch.group_size")
    if size % group:
        raise ShoalError(f"{name}={text}: expected a multiple of batch.group_size={group}")
    values = {"batch.prompts_per_step": str(size // group)}
    sentence = f"{count(size, 'completion')} a step, {group} a prompt"
    if "env.num_envs" not in given:
        return values, sentence
    at_once = to_int("env.num_envs", given["env.num_envs"])
    slots, sentence_on_slots = _slots_per_device(at_once, size, group, get)
    values["sampling.slots_per_device"] = str(slots)
    return values, f"{sentence}; {sentence_on_slots}"


def _slots_per_device(at_once: int, step: int, group: int, get: GetValue) -> tuple[int, Sentence]:
    """Returns (sampling.slots_per_device, a sentence on it) so that the sampler's devices together
    sample `at_once` of the `step` completions of a step at a time, rounded up; (0, a sentence) if
    `at_once` is `step` or more. If the keys leave the number of devices open, each device gets
    `at_once` slots. There are never fewer than the `group` completions of a prompt, or those of
    pass@k."""
    if at_once >= step:
        return 0, "all at once"
    devices = _sampler_devices(get)
    samples = samples_for_pass_k(get("train.pass_k"), get("task.name"))
    slots = max(-(-at_once // (devices or 1)), group, samples)  # the share rounded up
    if not devices:
        return slots, f"{slots} at once on each device"
    return slots, f"{slots * devices} at once, {slots} on each device"


def torchrl_steps(given: FlagTexts, get: GetValue) -> tuple[KeyValues, Sentence]:
    """Converts the length of a TorchRL run, which is a number of completions (dialog turns), to
    steps, rounded up. ShoalError if batch.prompts_per_device leaves the size of a step open."""
    name, text = last_of(given)
    if get("batch.prompts_per_device"):
        raise ShoalError(
            f"{name}={text} needs env.num_envs (batch.prompts_per_step): the number of devices "
            "that batch.prompts_per_device is for is known only later; or give steps"
        )
    total = to_int(name, text)
    step = get("batch.prompts_per_step") * get("batch.group_size")
    sentence = f"{count(step, 'completion')} a step"
    if total % step:
        sentence += ", rounded up"
    return {"steps": str(-(-total // step))}, sentence


def _micro_tokens(completions: int, get: GetValue) -> tuple[dict[str, str], Sentence]:
    """Returns ({"batch.micro_tokens": TOKENS}, a sentence on it). TOKENS is the room, as text, for
    `completions` of the longest completions with their prompts. `completions`: what other systems
    compute at once on a device."""
    tokens = get("sampling.max_prompt_tokens") + get("sampling.max_completion_tokens")
    sentence = (
        f"{count(completions, 'completion')} of {tokens} tokens at once on a device: "
        "batch.micro_tokens decides memory, never the result"
    )
    return {"batch.micro_tokens": str(completions * tokens)}, sentence


def torchrl_micro_batch(given: FlagTexts, get: GetValue) -> tuple[KeyValues, Sentence]:
    """Converts TorchRL's optim_batch_size, the completions of an update (by default of a step), and
    gradient_accumulation_steps, the parts in which an update is computed, to batch.micro_tokens.
    With optim_batch_size also sets algorithm.num_minibatches: here an update has whole groups, so a
    step has at most as many updates as prompts."""
    named = last_part(given)
    prompts = get("batch.prompts_per_step")
    parts = to_int(
        "train.gradient_accumulation_steps", named.get("gradient_accumulation_steps", "1")
    )
    step = prompts * get("batch.group_size")
    size = to_int("train.optim_batch_size", named.get("optim_batch_size", str(step)))
    values, sentence = _micro_tokens(-(-size // parts), get)
    if "optim_batch_size" not in named:
        return values, sentence
    theirs = max(1, step // size)
    updates = min(theirs, prompts)
    shown = f"{count(updates, 'update')} a step"
    if updates < theirs:
        shown += f" of whole groups ({theirs} there)"
    values["algorithm.num_minibatches"] = str(updates)
    return values, f"{shown}; {sentence}"


def verl_micro_batch(given: FlagTexts, get: GetValue) -> tuple[KeyValues, Sentence]:
    """Converts the number of completions that a device computes at once in verl to
    batch.micro_tokens: the tokens of so many of the longest completions with their prompts; of
    several flags the largest counts."""
    return _micro_tokens(max(to_int(name, text) for name, text in given.items()), get)


VERL_MINI_BATCH = 256
"""verl's default of ppo_mini_batch_size."""


def verl_mini_batches(given: FlagTexts, get: GetValue) -> tuple[KeyValues, Sentence]:
    """Converts verl's ppo_mini_batch_size, the prompts of an update, to algorithm.num_minibatches.
    In fully_async_policy a step has require_batches updates, which also gives
    batch.prompts_per_step. ShoalError if ppo_mini_batch_size does not divide the prompts of a step,
    is more than these or is missing, or if the prompts are 0 without require_batches. A step of
    fewer prompts than verl's default, which recipe=verl sets, is one update."""
    named = last_part(given)
    if "ppo_mini_batch_size" not in named:
        raise ShoalError(
            f"async_training.require_batches={named['require_batches']} needs "
            "actor_rollout_ref.actor.ppo_mini_batch_size, the prompts of an update"
        )
    name = "actor_rollout_ref.actor.ppo_mini_batch_size"
    text = named["ppo_mini_batch_size"]
    size = to_int(name, text)
    values = {}
    if "require_batches" in named:
        prompts = size * to_int("async_training.require_batches", named["require_batches"])
        values["batch.prompts_per_step"] = str(prompts)
    else:
        prompts = get("batch.prompts_per_step")
    if not prompts:
        raise ShoalError(
            "data.train_batch_size=0 needs async_training.require_batches, the updates of a step"
        )
    if size == VERL_MINI_BATCH:
        size = min(size, prompts)
    if size > prompts:
        raise ShoalError(
            f"{name}={text}: expected at most batch.prompts_per_step={prompts} (in verl "
            f"data.train_batch_size), the prompts of a step; {prompts} is one update a step"
        )
    if prompts % size:
        raise ShoalError(f"{name}={text}: expected a divisor of batch.prompts_per_step={prompts}")
    values["algorithm.num_minibatches"] = str(prompts // size)
    return values, f"{count(prompts, 'prompt')} a step, {size} an update"


def verl_staleness(given: FlagTexts, get: GetValue) -> tuple[KeyValues, Sentence]:
    """Converts flags of verl's fully_async_policy. staleness_threshold, the share of the steps
    between two weight updates that is sampled before the first of the two, becomes
    train.max_staleness: rounded up to whole steps, plus train.weight_sync_interval - 1.
    partial_rollout, whether completions continue through a weight update, becomes train.versions:
    newest if it is on and something is sampled ahead, else fixed."""
    name = "async_training.staleness_threshold"
    partial = "async_training.partial_rollout"
    interval = get("train.weight_sync_interval")
    values = {}
    reasons = []
    if name in given:
        share = to_float(name, given[name])
        if share < 0:
            raise ShoalError(f"{name}={given[name]}: expected 0 or more")
        ahead = math.ceil(round(share * interval, 6))  # steps; 6 digits hide the error of floats
        values["train.max_staleness"] = str(interval - 1 + ahead)
        reasons.append(
            f"{ahead} of {count(interval, 'step')} sampled before the sampler's weight update"
        )
    else:
        # The same quantity, solved from train.max_staleness = interval - 1 + ahead.
        ahead = get("train.max_staleness") - interval + 1
    if partial in given:
        wanted = to_bool(partial, given[partial])
        values["train.versions"] = "newest" if wanted and ahead > 0 else "fixed"
        if wanted and ahead <= 0:
            reasons.append("nothing is sampled ahead, so no completion is partial")
    return values, "; ".join(reasons)


def verl_counts(given: FlagTexts, get: GetValue) -> tuple[KeyValues, Sentence]:
    """Converts verl's save_freq to checkpoint.every. It counts weight updates of the sampler, and
    there may be several steps between them. -1 becomes 0."""
    name, text = last_of(given)
    return {"checkpoint.every": str(_steps_between(name, text, get))}, _of_weight_updates(get)


def verl_evaluations(given: FlagTexts, get: GetValue) -> tuple[KeyValues, Sentence]:
    """Converts when verl evaluates: test_freq, counted in weight updates of the sampler, to
    train.evaluate_every, val_before_train to train.evaluate_first.

    With a test_freq of 0 or less verl evaluates neither during training nor after it: without
    val_before_train never, so that train.evaluate_every becomes -1; with it before training alone,
    which becomes 0, before and after. With verl's own defaults (recipe=verl) this holds without
    test_freq, too, unless something else sets train.evaluate_every."""
    values = {}
    first = get("train.evaluate_first")
    name = "trainer.val_before_train"
    if name in given:
        first = to_bool(name, given[name])
        values["train.evaluate_first"] = str(first).lower()
    frequencies = {flag: text for flag, text in given.items() if flag.endswith(".test_freq")}
    if frequencies:
        every = _steps_between(*last_of(frequencies), get)
        values["train.evaluate_every"] = str(every)
    elif get("recipe") == "verl" and get("train.evaluate_every") == 0:
        every = 0
    else:
        return values, ""
    if every:
        return values, _of_weight_updates(get)
    if first:
        sentence = "there is an evaluation after the last step too, which verl does not make"
        return values, sentence if frequencies else ""
    values["train.evaluate_every"] = "-1"
    return values, "no evaluation, as there; trainer.test_freq=N evaluates after each N steps"


def verl_steps(given: FlagTexts, get: GetValue) -> tuple[KeyValues, Sentence]:
    """Converts verl's total_training_steps to steps, which val_only makes 0: an evaluation is then
    all that a run does. ShoalError with val_before_train=False, with which verl trains, whatever
    val_only says."""
    named = last_part(given)
    name = "trainer.val_only"
    if to_bool(name, named.get("val_only", "false")):
        if not get("train.evaluate_first"):
            raise ShoalError(
                f"{name}={named['val_only']} is for the evaluation that "
                "trainer.val_before_train=False leaves out: give one of them alone"
            )
        return {"steps": "0"}, "an evaluation is all that the run does"
    if "total_training_steps" in named:
        return {"steps": named["total_training_steps"]}, ""
    return {}, ""


def _steps_between(name: str, text: str, get: GetValue) -> int:
    """Returns an interval that verl counts in weight updates of the sampler, in steps; -1 is 0.
    `name`, `text`: the flag's."""
    return max(0, to_int(name, text, -1)) * get("train.weight_sync_interval")


def _of_weight_updates(get: GetValue) -> Sentence:
    """Returns a sentence on what verl's intervals count; '' if it is steps."""
    each = get("train.weight_sync_interval")
    if each == 1:
        return ""
    return f"counted in weight updates of the sampler there, one in {each} steps"


def verl_rollout_steps(given: FlagTexts, get: GetValue) -> tuple[KeyValues, Sentence]:
    """Converts the length of a run of verl's fully_async_policy, a number of prompts, to steps,
    rounded down, but at least 1."""
    name, text = last_of(given)
    prompts = get("batch.prompts_per_step")
    steps = max(1, to_int(name, text) // prompts)
    return {"steps": str(steps)}, f"{count(prompts, 'prompt')} a step"


def _without_nothing(given: FlagTexts) -> FlagTexts:
    """Returns the flags (name -> text) without those that are left at their default, whose text is
    one of NOTHING in any case."""
    return {name: text for name, text in given.items() if text.lower() not in NOTHING}


def trl_batch(given: FlagTexts, get: GetValue) -> tuple[KeyValues, Sentence]:
    """Converts TRL's batch sizes to algorithm.num_minibatches, batch.micro_tokens and
    batch.prompts_per_device, or with generation_batch_size batch.prompts_per_step. In TRL a step
    samples per_device_train_batch_size (by default 8) x steps_per_generation completions on each
    device, and makes steps_per_generation / gradient_accumulation_steps updates of them.
    generation_batch_size is the number of completions on all devices, in place of
    steps_per_generation. By default gradient_accumulation_steps is 1, and steps_per_generation
    equals it. With num_mini_batches, of PPOConfig, that is the number of updates. ShoalError if a
    step is no whole number of groups and updates, or if an update has less than a group, which TRL
    allows."""
    given = _without_nothing(given)
    size = to_int("per_device_train_batch_size", given.get("per_device_train_batch_size", "8"))
    parts = to_int("gradient_accumulation_steps", given.get("gradient_accumulation_steps", "1"))
    batches = to_int("steps_per_generation", given.get("steps_per_generation", str(parts)))
    whole = to_int("generation_batch_size", given.get("generation_batch_size", "0"), 0)
    if whole:
        batches = _steps_per_generation(whole, size, given, get)
    if batches % parts:
        raise ShoalError(
            f"steps_per_generation={batches}: expected a multiple of "
            f"gradient_accumulation_steps={parts}, so that a step ends with an update"
        )
    group = get("batch.group_size")
    total = whole or size * batches  # completions of a step: in all, or of one device
    # Of PPOConfig, whose steps are never of several batches.
    updates = to_int("num_mini_batches", given.get("num_mini_batches", str(batches // parts)))
    if total % group:
        shown = f"per_device_train_batch_size={size} x {batches} batches"
        if whole:
            shown = f"generation_batch_size={whole}"
        raise ShoalError(f"{shown}: expected a multiple of num_generations={group}")
    devices = 1 if whole else _trainer_devices(get)
    prompts = total // group * (devices or updates)  # enough if the number of devices is open
    if updates > prompts and "num_mini_batches" not in given:
        advice = f"raise per_device_train_batch_size to {size * -(-updates // prompts)}"
        if batches % prompts == 0:
            advice += f", or gradient_accumulation_steps to {batches // prompts}"
        raise ShoalError(
            f"per_device_train_batch_size={size} with num_generations={group}: a step has "
            f"{count(prompts, 'prompt')} and {updates} updates, each of whole groups here; {advice}"
        )
    values, sentence = _micro_tokens(size, get)
    values["algorithm.num_minibatches"] = str(updates)
    if whole:
        values["batch.prompts_per_step"] = str(total // group)
        completions = f"{total} completions a step, {group} a prompt"
    else:
        values["batch.prompts_per_device"] = str(total // group)
        completions = f"{total} completions a device and step, {group} a prompt"
    if updates > 1:
        completions += f" in {updates} updates"
    return values, f"{completions}; {sentence}"


def _steps_per_generation(whole: int, size: int, given: FlagTexts, get: GetValue) -> int:
    """Returns TRL's steps_per_generation for a generation_batch_size (`whole`): how many batches of
    `size` completions on each device it has. ShoalError if steps_per_generation is given too, if
    the number of devices is open, or if it does not divide."""
    if "steps_per_generation" in given:
        raise ShoalError(
            f"generation_batch_size={whole} and "
            f"steps_per_generation={given['steps_per_generation']} say the same: give one of them"
        )
    devices = _trainer_devices(get)
    if not devices:
        raise ShoalError(
            f"generation_batch_size={whole} is divided by the number of devices, which "
            "mesh.fsdp=-1 leaves open: set mesh.fsdp, or give steps_per_generation"
        )
    if whole % (size * devices):
        raise ShoalError(
            f"generation_batch_size={whole}: expected a multiple of {size * devices} "
            f"(per_device_train_batch_size={size} x {devices} of mesh.*)"
        )
    return whole // (size * devices)


def trl_updates(given: FlagTexts, get: GetValue) -> tuple[KeyValues, Sentence]:
    """Converts the length of a TRL run, a number of updates, to steps, which may make several
    updates each, rounded up; -1 means that the number of epochs decides, and sets nothing."""
    [(name, text)] = given.items()
    if to_int(name, text, -1) == -1:
        return {}, "num_train_epochs says how long the run is"
    return {"steps": _steps_of(name, text, 0, get)}, _counted_in_updates(name, text, get)


def trl_episodes(given: FlagTexts, get: GetValue) -> tuple[KeyValues, Sentence]:
    """Converts the length of a run of TRL's PPO, a number of completions (None: by epochs), to
    steps, rounded up. ShoalError if batch.prompts_per_device needs a number of devices that the
    keys leave open."""
    [(name, text)] = given.items()
    if text.lower() in NOTHING:
        return {}, "num_train_epochs says how long the run is"
    episodes = to_int(name, text)
    prompts = _prompts_of_step(get)
    if prompts is None:
        raise ShoalError(
            f"{name}={text} needs the number of devices, which mesh.fsdp=-1 leaves open: set "
            "mesh.fsdp, or give steps in its place"
        )
    completions = prompts * get("batch.group_size")
    return {"steps": str(math.ceil(episodes / completions))}, f"{completions} completions a step"


TRL_INTERVALS = {
    "train.evaluate_every": ("eval_strategy", "eval_steps", "-1", "there is no evaluation"),
    "checkpoint.every": ("save_strategy", "save_steps", "0", "only the last step is saved"),
}
"""Key -> the flag that says when there are evaluations or checkpoints, the flag that counts the
updates between two, the key's value for none, and what that means."""

TRL_STRATEGIES = {"no": "no", "false": "no", "steps": "steps", "epoch": "epoch"}
"""Text of a strategy, in lower case -> what it asks for. YAML reads `no` as false."""

NO_ROWS_HELD_OUT = {"task.hold_out": "false"}
"""What eval_strategy=no means besides: without evaluations no row is held out for them."""

TRL_SAVE_STRATEGIES = {**TRL_STRATEGIES, "best": "best"}
"""The same for when the run is saved."""

TRL_LOGGING_STEPS = 10
"""Updates between evaluations in TRL if eval_steps is not given: logging_steps, by default."""


def trl_counts(given: FlagTexts, get: GetValue) -> tuple[KeyValues, Sentence]:
    """Converts when TRL evaluates and saves (TRL_INTERVALS) to steps between evaluations and
    between checkpoints. Strategy `steps`: a number of updates, rounded up; a number below 1 is a
    share of all updates, which is rounded up first. `epoch`: the steps of an epoch. `no`: none,
    whatever the number says; eval_steps=-1 means none too. Without evaluations no rows are held out
    for them (`task.hold_out`, unless it is given). `best`, of save_strategy: each evaluation saves,
    and of the checkpoints the best one is kept and the last ones, by TRL's default one. Without a
    strategy the number counts, but with TRL's own defaults (recipe=trl) eval_steps does not,
    because eval_strategy is `no` there.
    ShoalError for an unknown strategy."""
    values: dict[str, str] = {}
    reasons = []
    given_strategies = [given.get(row[0], "").lower() for row in TRL_INTERVALS.values()]
    training = read_once(_training_rows, get) if "epoch" in given_strategies else None
    for key, (strategy_flag, steps_flag, none, meaning_of_none) in TRL_INTERVALS.items():
        if strategy_flag not in given and steps_flag not in given:
            continue
        text = given.get(strategy_flag, "steps").lower()
        saves = key == "checkpoint.every"
        # As in transformers, 0 updates between evaluations count as not given.
        has_number = steps_flag in given and (saves or given[steps_flag] != "0")
        strategies = TRL_SAVE_STRATEGIES if saves else TRL_STRATEGIES
        strategy = value_of_option(strategy_flag, text, strategies)
        if strategy == "no" or (not saves and given.get(steps_flag) == "-1"):
            values[key] = none
            if not saves:
                values |= NO_ROWS_HELD_OUT
            reasons.append(meaning_of_none)
        elif not saves and strategy_flag not in given and get("recipe") == "trl":
            reasons.append(
                f"{steps_flag} has no effect without {strategy_flag}=steps, as in TRL, whose "
                "default is no evaluation"
            )
        elif strategy == "epoch":
            value, reason = _interval_of_epochs(key, strategy_flag, steps_flag, training, get)
            values |= value
            reasons.append(reason)
        elif strategy == "best":
            values |= {key: "0", "checkpoint.keep_best": "1"}
            if get("checkpoint.keep_last") == 0:  # TRL's default of save_total_limit keeps all
                values["checkpoint.keep_last"] = "1"
            reasons.append("each evaluated step is saved, and the best of them kept, and the last")
        elif has_number:
            updates = _whole_updates(steps_flag, given, get)
            values[key] = _steps_of(steps_flag, updates, 0, get)
            reasons.append(_counted_in_updates(steps_flag, updates, get))
        elif not saves and (steps_flag in given or get(key) == -1):
            values[key] = _steps_of(steps_flag, str(TRL_LOGGING_STEPS), 0, get)
            reasons.append(f"without eval_steps after each {TRL_LOGGING_STEPS} updates")
        else:
            reasons.append(f"{steps_flag} says after how many updates")
    return values, "; ".join(reason for reason in dict.fromkeys(reasons) if reason)


def trl_evaluation_samples(given: FlagTexts, get: GetValue) -> tuple[KeyValues, Sentence]:
    """Converts TRL's num_generations_eval to evaluation.samples. As there, these answers are
    sampled like those of training: evaluation.* has the values of sampling.*."""
    [(name, text)] = given.items()
    values = {"evaluation.samples": str(to_int(name, text))}
    for key in ("temperature", "top_k", "top_p", "min_p"):
        values[f"evaluation.{key}"] = str(get(f"sampling.{key}"))
    return values, "sampled as in training, not greedily"


def trl_first_evaluation(given: FlagTexts, get: GetValue) -> tuple[KeyValues, Sentence]:
    """Converts TRL's eval_on_start to train.evaluate_first. If it is on and there is no other
    evaluation (train.evaluate_every=-1), that key becomes 0: before the first step and after the
    last, which is nearest to the one evaluation that TRL makes."""
    [(name, text)] = given.items()
    values = {"train.evaluate_first": text}
    if to_bool(name, text) and get("train.evaluate_every") == -1:
        values["train.evaluate_every"] = "0"
        return values, "there is an evaluation after the last step too"
    return values, ""


def _whole_updates(name: str, given: FlagTexts, get: GetValue) -> str:
    """Returns the text of the flag `name`, a number of updates; if it is below 1, the number of
    updates that this share of the run has, rounded up. ShoalError if it is no number."""
    text = given[name]
    share = to_float(name, text)
    if 0 < share < 1:
        # Rounded to 6 digits first, so that 0.07 * 100 = 7.000000000000001 does not become 8.
        return str(math.ceil(round(share * _updates(get), 6)))
    return text


def _interval_of_epochs(
    key: str, strategy_flag: str, steps_flag: str, training: _Rows | None, get: GetValue
) -> tuple[dict[str, str], Sentence]:
    """Returns ({key: the steps of an epoch of the training rows}, a sentence on it). If the data
    are not here, nothing is set, unless the key says that there is no evaluation: the run then
    evaluates before the first and after the last step. ShoalError if the number of devices that the
    keys leave open is needed."""
    prompts = _prompts_of_step(get)
    if training is None:
        value = {key: "0"} if get(key) == -1 else {}
        sentence = (
            "the steps of an epoch are known only when the data is read; "
            f"{strategy_flag}=steps with {steps_flag} says after how many updates"
        )
        return value, sentence
    if prompts is None:
        raise ShoalError(
            f"{strategy_flag}=epoch needs the number of devices, which mesh.fsdp=-1 leaves open: "
            f"set mesh.fsdp to it, or give {strategy_flag}=steps with {steps_flag}"
        )
    steps = max(1, _steps_of_epoch(training.number, prompts, get))
    sentence = (
        f"an epoch of {training.number:,} training rows {training.place} has {count(steps, 'step')}"
    )
    return {key: str(steps)}, sentence


def _updates_of_a_step(get: GetValue) -> int:
    """Returns the number of updates in a step."""
    return get("algorithm.num_minibatches") * get("algorithm.num_epochs")


def _updates(get: GetValue) -> int:
    """Returns the number of updates in the run."""
    return get("steps") * _updates_of_a_step(get)


def _steps_of(name: str, text: str, least: int, get: GetValue) -> str:
    """Returns, as text, how many steps make this many updates, rounded up. `text`: the value of the
    flag `name`; ShoalError if it is no whole number of `least` or more."""
    return str(-(-to_int(name, text, least) // _updates_of_a_step(get)))


def _counted_in_updates(name: str, text: str, get: GetValue) -> str:
    """Returns the sentence that the flag `name`, whose value is `text`, counts updates, if a step
    makes several; else ''. It says so if its updates are no whole number of steps."""
    each = _updates_of_a_step(get)
    if each == 1:
        return ""
    sentence = f"counted in updates there, {each} to a step here"
    updates = to_int(name, text)
    if updates % each:
        steps = count(-(-updates // each), "step")
        sentence += f", so {name}={updates} is rounded up to {steps}"
    return sentence


def trl_staleness(given: FlagTexts, get: GetValue) -> tuple[KeyValues, Sentence]:
    """Converts the age of samples in TRL's AsyncGRPOConfig to train.max_staleness and
    train.weight_sync_interval, in steps. There it is counted in weight updates of the sampler, one
    after each weight_sync_steps updates of the trainer. weight_sync_steps must be given. Without
    max_staleness only the interval is set."""
    each = _updates_of_a_step(get)
    steps = -(-to_int("weight_sync_steps", given["weight_sync_steps"]) // each)  # rounded up
    values = {"train.weight_sync_interval": str(steps)}
    reasons = []
    if each > 1:
        reasons.append(f"{each} updates to a step here")
    if "max_staleness" in given:
        age = to_int("max_staleness", given["max_staleness"], 0)
        # Between two weight updates the samples grow `steps - 1` versions older.
        values["train.max_staleness"] = str((age + 1) * steps - 1)
        if steps > 1:
            reasons.append(f"counted in steps here, {age + 1} x {steps} - 1")
    return values, "; ".join(reasons)


def trl_resume(given: FlagTexts, get: GetValue) -> tuple[KeyValues, Sentence]:
    """Converts resume_from_checkpoint to `resume`: `true` is the run that was started last in the
    output folder; a path is a run or a checkpoint of one. If it is off, nothing is set, and the
    sentence says that a run goes on under its run_name anyway. ShoalError if the checkpoint is not
    the run's newest. A path that is in no run is passed on."""
    name, text = last_of(given)
    if text.lower() in OFF:
        run_name = get("run_name")
        if not run_name:
            return {}, "a run without a run_name always begins anew"
        sentence = (
            f"if {get('base_output_directory')} has a run of the name {run_name}, that run goes on "
            "where it was; another run_name begins a new one"
        )
        return {}, sentence
    if text.lower() == "true":
        return {"resume": LAST}, ""
    return {"resume": run_to_resume(name, text)}, ""


def verl_run_folder(given: FlagTexts, get: GetValue) -> tuple[KeyValues, Sentence]:
    """Converts verl's names of a run to base_output_directory and run_name, and the project's to
    report.wandb.project, report.mlflow.experiment and report.trackio.project. There the run's
    folder is default_local_dir, by default checkpoints/PROJECT/EXPERIMENT, so here:

        default_local_dir=D/EXPERIMENT    base_output_directory=D, run_name=EXPERIMENT
        default_local_dir=D               base_output_directory=D, run_name=EXPERIMENT
        neither                           run_name=PROJECT/EXPERIMENT

    A run that was begun before this rule, in D/EXPERIMENT/EXPERIMENT or, with the same project,
    without PROJECT/, goes on where it is. What is not given is not set."""
    named = last_part(given)
    project = named.get("project_name", "")
    experiment = named.get("experiment_name", "")
    directory = named.get("default_local_dir", "")
    values = {}
    if project:
        for key in ("report.wandb.project", "report.mlflow.experiment", "report.trackio.project"):
            values[key] = project
    if directory:
        values["base_output_directory"] = directory
    if not experiment:
        return values, ""
    # Each is the directory of runs and the run's name in it.
    if directory:
        before = (directory, experiment)
        now = (_folder_above(directory, experiment) or directory, experiment)
    else:
        base = get("base_output_directory")
        before = (base, experiment)
        now = (base, f"{project}/{experiment}" if project else experiment)
    old = Path(*before).expanduser()
    new = Path(*now).expanduser()
    chosen = now
    sentence = ""
    if old != new and _is_of_project(old, project) and not is_run(new):
        chosen = before
        sentence = f"the run that was begun in {old} goes on there; a new one is in {new}"
    base, values["run_name"] = chosen
    if directory:
        values["base_output_directory"] = base
    return values, sentence


def _folder_above(directory: str, name: str) -> str:
    """Returns the folder that holds `directory` if this ends with `name`, `.` for the working
    folder; '' if it ends otherwise, or is a bucket alone.

    >>> _folder_above("checkpoints/mine/first/", "first"), _folder_above("first", "first")
    ('checkpoints/mine', '.')
    """
    directory = directory.rstrip("/")
    if directory == name:
        return "."
    if not directory.endswith(f"/{name}"):
        return ""
    above = directory.removesuffix(f"/{name}")
    if above.endswith(":/"):  # gs://BUCKET
        return ""
    return above or "/"


def _is_of_project(folder: Path, project: str) -> bool:
    """True if a folder is a run's that has this project's name, or any if `project` is ''."""
    if not is_run(folder):
        return False
    try:
        stored = read_requested(folder)
    except ShoalError:  # settings of another version
        return False
    return project in ("", stored.report.wandb.project)


VERL_RESUME_MODES = ("auto", "disable", "resume_path")


def verl_resume(given: FlagTexts, get: GetValue) -> tuple[KeyValues, Sentence]:
    """Converts how a run of verl is resumed, other than by `auto`, which is what a run_name means
    here. `resume_path`: resume_from_path, a run or the newest checkpoint of one, becomes `resume`.
    `disable` is a new run: ShoalError if its folder holds one, which verl would overwrite."""
    named = last_part(given)
    mode = named.get("resume_mode", "auto")  # not given, or auto
    value_of_option("trainer.resume_mode", mode, dict.fromkeys(VERL_RESUME_MODES))
    path = named.get("resume_from_path", "")
    if mode == "resume_path":
        if not path:
            raise ShoalError("trainer.resume_mode=resume_path needs trainer.resume_from_path")
        return {"resume": run_to_resume("trainer.resume_from_path", path)}, ""
    run_name = get("run_name")
    folder = Path(get("base_output_directory")).expanduser() / run_name
    if mode == "disable" and run_name and is_run(folder):
        raise ShoalError(
            f"trainer.resume_mode=disable: {folder} holds a run, which a new one does not "
            "overwrite: give another trainer.experiment_name, remove the folder, or continue "
            "the run by trainer.resume_mode=auto"
        )
    if path:
        return {}, "trainer.resume_from_path counts only with trainer.resume_mode=resume_path"
    return {}, "the run is a new one; an error if its folder has one"


MOST_MEASURED = 50_000
"""Of more training rows than these the prompts are not measured before the run: some seconds."""


@dataclass(frozen=True)
class _Rows:
    """The training rows of a run, as far as they are known before it."""

    number: int  # without those that are dropped
    place: str  # where they are, for a sentence
    dropped: str = ""  # on those that are dropped, for a sentence


def _task_here(get: GetValue) -> tuple[Task | None, str]:
    """Returns the task whose rows are in the files that task.path names, or were given from Python,
    and where they are, for a sentence; the task is None if they are not here. ShoalError if they
    cannot be used."""
    settings = {field.name: get(f"task.{field.name}") for field in fields(TaskSection)}
    section = TaskSection(**settings)
    path = Path(section.path).expanduser()
    if section.name == ROWS:
        return given_task(section), "from Python"
    if section.path and path.exists():
        # The rewards do not change the rows, so those of the run are not needed.
        return load_by_name(section, RewardSection()), f"in {_files_text(section)}"
    return None, ""


def _files_text(section: TaskSection) -> str:
    """Returns the name of the file or folder that `task.path` is, or those of up to two files that
    `task.files` names in it; of more files their number."""
    if not section.files:
        return Path(section.path).expanduser().resolve().name
    if len(section.files) > 2:
        return count(len(section.files), "file")
    return " and ".join(Path(file).name for file in section.files)


def _training_rows(get: GetValue) -> _Rows | None:
    """Returns the training rows without those whose prompts will be dropped (`_task_here`). None if
    the data is not here. ShoalError if it cannot be used."""
    task, place = read_once(_task_here, get)
    if task is None:
        return None
    number = len(task.train)
    left: int | None = number
    limit = get("sampling.max_prompt_tokens")
    dropped = []
    if get("sampling.long_prompts") != "error":
        left = _num_short_rows(task, get)
    if left is None:
        dropped.append(f"those with more than sampling.max_prompt_tokens={limit} tokens included")
    elif left < number:
        dropped.append(
            f"{number - left:,} of {number:,} are dropped by sampling.max_prompt_tokens={limit}"
        )
    held_out = task.data.dropped_as_held_out
    if held_out:
        dropped.append(
            f"{held_out:,} more are left out, since rows to evaluate on have their prompt; no key "
            "keeps them"
        )
    return _Rows(number if left is None else left, place, "; ".join(dropped))


def _num_short_rows(task: Task, get: GetValue) -> int | None:
    """Returns how many training rows have a prompt that the run does not drop. None where that is
    not known before the run: of more than MOST_MEASURED rows, and without their lengths
    (`_prompt_lengths`)."""
    if len(task.train) > MOST_MEASURED:
        return None
    lengths = _prompt_lengths(task, task.train, get)
    if lengths is None:
        return None
    return sum(length <= get("sampling.max_prompt_tokens") for length in lengths)


def _prompt_lengths(task: Task, examples: Sequence[Example], get: GetValue) -> list[int] | None:
    """Returns the numbers of tokens of these examples' prompts, by the tokenizer and the chat
    template of the run; those that are empty or that the template refuses are left out. None where
    they are not known before the run: with tools or environments, which may write into prompts, and
    if the model is not here. `task`: of the examples."""
    # Here, because they import JAX, and most configurations do not get here.
    from shoal.job.data_source import up_to_answer
    from shoal.job.task import with_system_prompt
    from shoal.trainer.prompts import prepare
    from shoal.weights.source import open_model

    in_turns = any(get(f"environment.{key}") for key in ("tools", "factory", "rollout", "agent"))
    if in_turns or task.tools or task.environments:
        return None
    names = ("path", "name", "tokenizer", "template", "template_variables")
    settings = {name: get(f"model.{name}") for name in names}
    try:
        settings["path"] = (
            last_run(settings["path"], get("base_output_directory")) or settings["path"]
        )
        model = ModelSection(**settings)
        with offline():
            tokenizer = open_model(model, None).tokenizer
    except (ShoalError, NotHere):  # the run says what is wrong with the model, or downloads it
        return None
    learns_from_data = get("algorithm.name") == "sft"
    task = with_system_prompt(replace(task, train=examples), get("task.system"))
    refused: list[str] = []
    lengths = []
    for example in task.train:
        if learns_from_data:
            example = up_to_answer(example)
        prompt = prepare(
            example,
            lambda example: tokenizer.encode_prompt(example.prompt),
            sys.maxsize,
            "drop",
            refused.append,
        )
        if prompt is not None:
            lengths.append(len(prompt.prompt_ids))
    return lengths


ROOM_FOR_PROMPTS = 1024
"""Tokens that prompts of the user's data may have with TRL's defaults at least, as in the preset of
task=custom."""

MOST_TOKENIZED = 2000
"""Of more rows than these only those with the longest texts are tokenized to find the longest
prompt: about a second."""


def _prompt_bytes(example: Example) -> int:
    """Returns the bytes of a prompt's text, without what a chat template adds. No tokenizer makes
    more tokens of a text."""
    return len(str(example.prompt).encode("utf-8", "replace"))


def trl_prompts(given: FlagTexts, get: GetValue) -> tuple[KeyValues, Sentence]:
    """Converts max_prompt_length to sampling.max_prompt_tokens. None is no limit, which TRL 1.16
    has for no prompt: for the user's data it becomes the longest prompt of the rows to train and
    evaluate on, or ROOM_FOR_PROMPTS if that is more or if the lengths are not known before the run
    (`_prompt_lengths`). A task of Shoal keeps its own limit, so nothing is set."""
    _, text = last_of(given)
    if text.lower() not in NOTHING:
        return {"sampling.max_prompt_tokens": text}, ""
    task, place = read_once(_task_here, get)
    if task is None and get("task.name") not in OWN_DATA:
        return {}, "a task of Shoal has its own limit"
    unknown = f"{ROOM_FOR_PROMPTS:,} tokens, as the longest prompt is not known before the run"
    if task is None:
        return {"sampling.max_prompt_tokens": str(ROOM_FOR_PROMPTS)}, unknown
    examples = [*task.train]
    for questions in task.evaluations.values():
        examples += questions
    longest_texts = heapq.nlargest(MOST_TOKENIZED, examples, key=_prompt_bytes)
    # The other half is room for the template's own words.
    long_texts = [each for each in longest_texts if _prompt_bytes(each) > ROOM_FOR_PROMPTS // 2]
    if not long_texts:
        sentence = f"no limit: no prompt {place} has as many as {ROOM_FOR_PROMPTS:,} tokens"
        return {"sampling.max_prompt_tokens": str(ROOM_FOR_PROMPTS)}, sentence
    lengths = _prompt_lengths(task, long_texts, get)
    if not lengths:
        return {"sampling.max_prompt_tokens": str(ROOM_FOR_PROMPTS)}, unknown
    longest = max(lengths)
    values = {"sampling.max_prompt_tokens": str(max(ROOM_FOR_PROMPTS, longest))}
    return values, f"no limit: the longest prompt {place} has {count(longest, 'token')}"


def _steps_of_epoch(rows: int, prompts: int, get: GetValue) -> int:
    """Returns the number of steps in which `rows` training rows pass once if a step has `prompts`
    of them: rounded up in supervised fine-tuning, down in reinforcement learning. ShoalError if a
    step has none."""
    if prompts == 0:
        raise ShoalError(
            "batch.prompts_per_step=0: the steps of an epoch need the prompts of a step; give more "
            "than 0, or steps in place of epochs",
            "batch.prompts_per_step",
        )
    if get("algorithm.name") == "sft":
        return math.ceil(rows / prompts)
    return rows // prompts


def epochs(given: FlagTexts, get: GetValue) -> tuple[KeyValues, Sentence]:
    """Converts the length of a run in verl and TRL, a number of passes over the training rows
    (without those held out), to steps, at least 1. As there, the steps of an epoch are rounded up
    in supervised fine-tuning, and down in reinforcement learning, and those of the run up. Reads
    the data to count its rows, without those whose prompts are dropped; if they are not here, sets
    nothing and says how to compute the steps. ShoalError if batch.prompts_per_device needs a number
    of devices that the keys leave open."""
    name, text = last_of(given)
    epochs = to_float(name, text)
    each = get("batch.prompts_per_device")  # 0: not set
    prompts = _prompts_of_step(get)  # None: open
    rounds_up = get("algorithm.name") == "sft"
    training = read_once(_training_rows, get)
    if training is None:
        a_step = "prompts of a step" if each else str(prompts)
        steps_of_epoch = f"(rows / {a_step}, rounded up)" if rounds_up else f"rows // {a_step}"
        sentence = (
            "a run's length is in steps, and those of an epoch are known only when the data is "
            f"read; set steps to {exact(epochs)} x {steps_of_epoch}"
        )
        return {}, sentence

    rows = training.number

    def steps_of(prompts: int) -> int:
        """Returns the number of steps in the run if a step has this many prompts."""
        return max(1, math.ceil(epochs * _steps_of_epoch(rows, prompts, get)))

    noun = "epoch" if epochs == 1 else "epochs"
    sentence = f"{exact(epochs)} {noun} of {rows:,} training rows {training.place}"
    if training.dropped:
        sentence += f" ({training.dropped})"
    if prompts is None:
        raise ShoalError(
            f"{name}={text} needs the number of devices, which mesh.fsdp=-1 leaves open: set "
            f"mesh.fsdp to it, or give steps in its place, {steps_of(each)} on 1 device, "
            f"{steps_of(each * 4)} on 4, {steps_of(each * 8)} on 8 ({sentence}, "
            f"{count(each, 'prompt')} a device)"
        )
    steps = steps_of(prompts)
    sentence += f", {count(prompts, 'prompt')} a step"
    if get("algorithm.dynamic_sampling"):
        sentence += (
            "; dynamic sampling takes more prompts for a step than it trains on, so the run may "
            "pass over the rows more often (verl counts data.gen_batch_size prompts a step)"
        )
    if each and prompts != each:
        sentence += f" ({each} a device x {prompts // each})"
    wanted = round(epochs * rows)
    trained = steps * prompts
    if trained < wanted:
        sentence += (
            f"; {trained:,} of {wanted:,} rows, as an epoch's last rows that fill no step are not "
            "counted"
        )
    elif trained > wanted:
        sentence += f"; {trained:,} rows, the last {trained - wanted:,} of a further epoch"
    return {"steps": str(steps)}, sentence


def _share(name: str, text: str) -> float:
    """Returns the text of a share as a number; ShoalError if it is not from 0 to 1."""
    share = to_float(name, text)
    if not 0 <= share <= 1:
        raise ShoalError(f"{name}={text}: expected a share of the run, 0 to 1")
    return share


TRL_SCHEDULES = {
    "linear": "linear",
    "cosine": "cosine",
    "constant": "constant",
    "constant_with_warmup": "constant",
}


def trl_schedule(given: FlagTexts, get: GetValue) -> tuple[KeyValues, Sentence]:
    """Converts TRL's schedule and warm-up to optimizer.schedule and optimizer.warmup_steps. Warm-up
    is a number of updates, or if below 1 (always for warmup_ratio) a share of all updates, rounded
    up; warmup_ratio counts before warmup_steps, and `constant` has none. What is not given is not
    set."""
    given = _without_nothing(given)
    values = {}
    kind = given.get("lr_scheduler_type", "")
    if kind:
        values["optimizer.schedule"] = value_of_option("lr_scheduler_type", kind, TRL_SCHEDULES)
    if kind == "constant":
        values["optimizer.warmup_steps"] = "0"
        return values, "constant has no warm-up"
    if "warmup_ratio" in given:
        share = _share("warmup_ratio", given["warmup_ratio"])
    else:
        share = to_float("warmup_steps", given.get("warmup_steps", "0"))
    if 0 < share < 1 or "warmup_ratio" in given:
        updates = _updates(get)
        values["optimizer.warmup_steps"] = str(math.ceil(round(share * updates, 6)))
        return values, f"of {updates} updates"
    if "warmup_steps" in given:
        values["optimizer.warmup_steps"] = str(to_int("warmup_steps", given["warmup_steps"], 0))
    return values, ""


def verl_warmup(given: FlagTexts, get: GetValue) -> tuple[KeyValues, Sentence]:
    """Converts verl's warm-up to optimizer.warmup_steps, in updates: a number of training steps
    (lr_warmup_steps, if it is above 0) or a share of them (lr_warmup_steps_ratio, rounded down).
    Sets nothing if lr_warmup_steps is missing, 0 or -1 and no share is given. In verl all updates
    of a step have one learning rate."""
    named = last_part(given)
    each = _updates_of_a_step(get)
    steps = to_int("lr_warmup_steps", named.get("lr_warmup_steps", "-1"), -1)
    if steps <= 0:
        if "lr_warmup_steps_ratio" not in named:
            return {}, ""
        share = _share("lr_warmup_steps_ratio", named["lr_warmup_steps_ratio"])
        steps = int(share * get("steps"))
    sentence = f"{count(steps, 'step')} of {get('steps')}"
    if each > 1:
        sentence += f", each of {each} updates"
    return {"optimizer.warmup_steps": str(steps * each)}, sentence


VERL_TRUNCATIONS = ("error", "left", "right", "middle")
"""Texts of verl's data.truncation."""


def verl_long_prompts(given: FlagTexts, get: GetValue) -> tuple[KeyValues, Sentence]:
    """Converts what verl does with prompts over the limit to sampling.long_prompts: with
    filter_overlong_prompts they are dropped, whatever truncation says. Else they are an error,
    because a prompt is never cut here, unless sampling.long_prompts=drop is set together with
    truncation: a script that names a side to cut runs if no prompt is too long. ShoalError for an
    unknown side."""
    filtering, cutting = "data.filter_overlong_prompts", "data.truncation"
    side = given.get(cutting, "error").strip("'")
    value_of_option(cutting, side, dict.fromkeys(VERL_TRUNCATIONS))
    if filtering in given and to_bool(filtering, given[filtering]):
        return {"sampling.long_prompts": "drop"}, ""
    if filtering not in given and get("sampling.long_prompts") == "drop":
        return {}, "prompts that are too long are dropped: sampling.long_prompts=drop"
    sentence = ""
    if side != "error":
        sentence = (
            f"a prompt is never cut: one that is too long is an error; {filtering}=true drops it"
        )
    return {"sampling.long_prompts": "error"}, sentence


def verl_validation(given: FlagTexts, get: GetValue) -> tuple[KeyValues, Sentence]:
    """Converts val_kwargs, how verl answers the questions of a validation, to evaluation.*. As in
    verl 0.9, the temperature (0 if nothing sets one) decides whether answers are greedy. Greedy
    answers to a question are all the same, so one stands for the n. ShoalError for an n below 1,
    and for a temperature that is no number."""
    named = last_part(given)
    temperature = get("evaluation.temperature")
    values = {}
    if "temperature" in named:
        temperature = to_float("val_kwargs.temperature", named["temperature"])
        values["evaluation.temperature"] = named["temperature"]
    number = to_int("val_kwargs.n", named.get("n", "1"))
    if temperature == 0:
        if "n" in named:
            values["evaluation.samples"] = "1"
        if number > 1:
            sentence = (
                "greedy, as there: val_kwargs.temperature is 0, so one answer to each question "
                f"stands for all {number}"
            )
            return values, sentence
        return values, "" if values else "evaluations are greedy: val_kwargs.temperature is 0"
    if "n" in named:
        values["evaluation.samples"] = str(number)
    if "top_p" in named:
        values["evaluation.top_p"] = named["top_p"]
    if "top_k" in named:
        values["evaluation.top_k"] = "0" if named["top_k"] == "-1" else named["top_k"]
    return values, ""


VERL_CRITIC: dict[str, str] = {
    "critic.ppo_epochs": "algorithm.num_epochs",
    "critic.grad_clip": "optimizer.clip_grad_norm",
    "critic.optim.clip_grad": "optimizer.clip_grad_norm",
    "critic.optim.weight_decay": "optimizer.weight_decay",
    "critic.optim.warmup_style": "optimizer.schedule",
    "critic.optim.lr_scheduler_type": "optimizer.schedule",
    "critic.model.lora_rank": "model.lora.rank",
}
"""Flag of verl's critic -> the key of the policy that counts for the critic here too."""

VERL_CRITIC_FIXED: dict[str, str | float] = {
    "critic.optim.min_lr_ratio": 0.0,
    "critic.optim.num_cycles": 0.5,
    "critic.optim.optimizer": "AdamW",
    "critic.optim.override_optimizer_config": "null",
}
"""Flag of verl's critic -> what the policy and the critic have here in any case."""


def verl_critic(given: FlagTexts, get: GetValue) -> tuple[KeyValues, Sentence]:
    """Checks flags of verl's critic that change numbers: with the advantage `gae` they must ask for
    what the policy has, because the critic here takes the policy's epochs, mini-batches and
    optimizer. Sets nothing. ShoalError, which names all flags that differ."""
    if get("algorithm.advantage") != "gae":
        return {}, "only algorithm.adv_estimator=gae has a critic"
    faults = []
    for name, text in given.items():
        asked, of_policy = _of_critic(name, text, get)
        if asked != of_policy:
            shown = exact(of_policy) if isinstance(of_policy, float) else of_policy
            faults.append(f"{name}={text} (the policy's is {shown})")
    if faults:
        raise ShoalError(
            "the critic takes the policy's epochs, mini-batches and optimizer, all but the "
            f"learning rate, so these cannot differ: {', '.join(faults)}; leave them out, or give "
            "the policy the same"
        )
    return {}, "the critic takes the policy's value anyway"


def _of_critic(name: str, text: str, get: GetValue) -> tuple[Any, Any]:
    """Returns (what a flag of verl's critic asks for, what the policy has), to be compared; the two
    are equal where the flag leaves it to another flag. ShoalError for a text that is no number
    where one is expected."""
    if name == "critic.optim.betas":
        betas = [to_float(name, item) for item in items_of(text)]
        return betas, [get("optimizer.beta1"), get("optimizer.beta2")]
    if name == "critic.ppo_mini_batch_size":
        prompts = get("batch.prompts_per_step")
        # A step of fewer prompts is one update.
        return min(to_int(name, text), prompts), prompts // get("algorithm.num_minibatches")
    if name.startswith("critic.optim.lr_warmup_steps"):
        if name.endswith("_ratio"):
            steps = int(_share(name, text) * get("steps"))
        else:
            steps = to_int(name, text, -1)
            if steps <= 0:  # lr_warmup_steps_ratio decides
                return steps, steps
        return steps, get("optimizer.warmup_steps") / _updates_of_a_step(get)
    if name == "critic.loss_agg_mode":
        # The critic's mean is over tokens. Files of verl give it the policy's aggregation.
        is_of_policy = text == get("algorithm.aggregation")
        return text, text if is_of_policy else "token-mean"
    if name in VERL_CRITIC_FIXED:
        of_policy = VERL_CRITIC_FIXED[name]
    else:
        of_policy = get(VERL_CRITIC[name])
    if isinstance(of_policy, str):
        return text.lower(), of_policy.lower()
    return to_float(name, text), of_policy


def maxtext_warmup(given: FlagTexts, get: GetValue) -> tuple[KeyValues, Sentence]:
    """Converts MaxText's warm-up, a share of all updates, rounded down, to
    optimizer.warmup_steps."""
    name, text = last_of(given)
    updates = _updates(get)
    steps = int(_share(name, text) * updates)
    return {"optimizer.warmup_steps": str(steps)}, f"of {updates} updates"


def maxtext_schedule_length(given: FlagTexts, get: GetValue) -> tuple[KeyValues, Sentence]:
    """Checks the number of updates over which the learning rate warms up and falls in MaxText and
    Tunix, after which it is 0. Sets nothing, because here these are always all updates of the run;
    ShoalError if the flag gives another positive number, unless the schedule is constant. 0 and -1
    say nothing."""
    name, text = last_of(given)
    length = to_int(name, text, -1)
    updates = _updates(get)
    if length > 0 and length != updates and get("optimizer.schedule") != "constant":
        raise ShoalError(
            f"{name}={text}: expected {updates}, the updates of this run: the learning rate falls "
            f"over the whole run here; leave {name} out"
        )
    return {}, f"the learning rate falls over all {updates} updates"


def maxtext_train_rl(given: FlagTexts, get: GetValue) -> tuple[KeyValues, Sentence]:
    """Converts flags of MaxText's train_rl. num_batches x train_fraction, rounded down, x num_epoch
    becomes steps, and eval_interval train.evaluate_every, -1 as 0. With a given train_fraction of 1
    no rows are left to evaluate on between steps, so that is then 0. train_fraction is 1.0 by
    default, and num_epoch 1."""
    share = to_float("train_fraction", given.get("train_fraction", "1.0"))
    values = {}
    reasons = []
    if "num_batches" in given:
        epochs = to_int("num_epoch", given.get("num_epoch", "1"))
        number = to_int("num_batches", given["num_batches"])
        values["steps"] = str(int(number * share) * epochs)
        reasons.append(f"{number} batches x {exact(share)} x {epochs} epochs")
    every = given.get("eval_interval")
    if every:
        has_no_rows = "train_fraction" in given and share >= 1
        if has_no_rows:
            reasons.append("train_fraction=1.0 leaves no rows to evaluate on between steps")
        if has_no_rows or every == "-1":
            every = "0"
        values["train.evaluate_every"] = every
    return values, "; ".join(reasons)


def maxtext_test_batches(given: FlagTexts, get: GetValue) -> tuple[KeyValues, Sentence]:
    """Converts the size of an evaluation in MaxText's train_rl, num_test_batches, which must be
    given, of eval_batch_size questions, to task.num_eval_questions. Without eval_batch_size (or -1)
    a batch has the prompts of a step; if the number of devices is open, those of one device."""
    own = given.get("eval_batch_size", "-1")
    if own == "-1" or own in NOTHING:
        size = get("batch.prompts_per_device") * (_trainer_devices(get) or 1)
        if not size:
            size = get("batch.prompts_per_step")
    else:
        size = to_int("eval_batch_size", own)
    number = to_int("num_test_batches", given["num_test_batches"])
    return {"task.num_eval_questions": str(number * size)}, f"{number} x {count(size, 'question')}"


# ---- rewards and losses


def trl_reward_model(given: FlagTexts, get: GetValue) -> tuple[KeyValues, Sentence]:
    """Converts the flag of TRL's scripts for a classifier as reward to reward.functions=model:PATH;
    ShoalError if other rewards are given, because there it comes before the functions of
    reward_funcs."""
    name, text = last_of(given)
    others = get("reward.functions")
    if others:
        raise ShoalError(
            f"{name}={text} with other rewards: give all in one list, reward_funcs=[model:{text},"
            f"{','.join(others)}]"
        )
    return {"reward.functions": f"model:{text}"}, ""


def trl_delta(given: FlagTexts, get: GetValue) -> tuple[KeyValues, Sentence]:
    """Converts TRL's delta, an upper bound of the ratio, to algorithm.clip_dual. It becomes 0 (off)
    if it is None, or with the losses cispo and sapo, which do not read it. Below 1 + epsilon_high
    it would cut positive advantages too, which the dual clip here does not do, so that is a
    ShoalError."""
    text = given["delta"]
    high = get("algorithm.clip_high")
    reads_delta = get("algorithm.loss") not in ("cispo", "sapo")
    if text.lower() in NOTHING or not reads_delta:
        return {"algorithm.clip_dual": "0"}, ""
    bound = to_float("delta", text)
    if bound < 1 + high - 1e-9:  # 1e-9: rounding of floats
        raise ShoalError(
            f"delta={text}: expected {exact(1 + high)} (1 + epsilon_high) or more; below it TRL "
            "cuts positive advantages too, which algorithm.clip_dual does not"
        )
    return {"algorithm.clip_dual": text}, ""


def verl_dual_clip(given: FlagTexts, get: GetValue) -> tuple[KeyValues, Sentence]:
    """Converts verl's dual clip to algorithm.clip_dual. Only verl's loss vanilla
    (algorithm.loss=grpo) has one; for other losses it becomes 0."""
    [text] = given.values()
    loss = get("algorithm.loss")
    if loss != "grpo":
        return {"algorithm.clip_dual": "0"}, f"algorithm.loss={loss} has no dual clip there"
    return {"algorithm.clip_dual": text}, ""


def trl_shuffle(given: FlagTexts, get: GetValue) -> tuple[KeyValues, Sentence]:
    """Converts TRL's shuffle_dataset to train.shuffle. In supervised fine-tuning it only shuffles
    the data before the sampler draws rows at random, so there it sets nothing."""
    name, text = last_of(given)
    shuffles = to_bool(name, text)
    if get("algorithm.name") == "sft":
        return {}, "rows are drawn at random anyway, there too"
    return {"train.shuffle": str(shuffles).lower()}, ""


def verl_reward_manager(given: FlagTexts, get: GetValue) -> tuple[KeyValues, Sentence]:
    """Converts verl's reward manager and its arguments to reward.overlong_buffer_tokens and
    overlong_penalty. `naive` gives a completion what the reward function returns; `batch` does too,
    but calls the function with lists, which Shoal reads from its parameters; `dapo` also subtracts,
    with overlong_buffer_cfg.enable, a penalty over the last `len` tokens of the longest completion,
    penalty_factor at the limit. What is not given is not set. ShoalError for another manager, for a
    penalty without its two numbers or with another manager than `dapo`, and if max_resp_len is not
    the longest completion."""
    named = last_part(given)
    manager = ""  # not given
    for name, text in given.items():
        if "reward_manager" in name:
            manager = text
            _check_manager(name, manager)
    if "enable" not in named:
        if manager == "batch":
            return {}, (
                "a function with solution_strs and ground_truths gets lists, here of the "
                "completions of one prompt at a time, there of a whole step"
            )
        return {}, "a completion gets what the reward function returns"
    switch = next(name for name in given if name.endswith(".enable"))
    head = switch.removesuffix("enable")
    if not to_bool(switch, named["enable"]):
        return {"reward.overlong_buffer_tokens": "0"}, "no penalty on long completions"
    if manager in ("naive", "batch"):
        raise ShoalError(f"{switch}=true: expected reward_manager=dapo, which alone reads it")
    for part in ("len", "penalty_factor"):
        if part not in named:
            raise ShoalError(f"{switch}=true needs {head}{part}")
    limit = get("sampling.max_completion_tokens")
    longest = to_int("max_resp_len", named.get("max_resp_len", str(limit)))
    if longest != limit:
        raise ShoalError(
            f"max_resp_len={longest}: expected {limit} (data.max_response_length), since the "
            "penalty is over the last tokens of the longest completion"
        )
    values = {
        "reward.overlong_buffer_tokens": str(to_int(f"{head}len", named["len"])),
        "reward.overlong_penalty": named["penalty_factor"],
    }
    return values, f"over the last {named['len']} of {limit} tokens"


def _check_manager(name: str, manager: str) -> None:
    """Raises ShoalError if a reward manager of verl is not one that Shoal follows. `name`: the
    flag's."""
    if manager not in ("naive", "dapo", "batch"):
        raise ShoalError(
            f"{name}={manager}: expected naive, dapo or batch; or give reward=FILE:FUNCTION"
        )


VERL_CONTENTS = ("model", "optimizer", "extra")
"""Parts of a checkpoint of verl."""


def verl_load_contents(given: FlagTexts, get: GetValue) -> tuple[KeyValues, Sentence]:
    """Checks what a resumed run of verl restores. Sets nothing, because here it is everything;
    ShoalError if a part is left out, which would begin anew there."""
    name, text = last_of(given)
    for part in VERL_CONTENTS:
        if part not in items_of(text):
            raise ShoalError(
                f"{name}={text}: expected {', '.join(VERL_CONTENTS)}: a resumed run restores all "
                "of its checkpoint; to begin with new moments and a new schedule, start a new run "
                "from its weights, model=RUN"
            )
    return {}, ""


def verl_gdpo_keys(given: FlagTexts, get: GetValue) -> tuple[KeyValues, Sentence]:
    """Checks what verl's GDPO makes its parts of: numbers that one function returns. Sets nothing,
    because here each part is a reward function; ShoalError if there is a single one, whose other
    numbers would have no effect."""
    name, text = last_of(given)
    functions = get("reward.functions")
    if text.lower() in OFF or len(functions) != 1:
        return {}, ""
    file = functions[0].partition(":")[0]
    parts = items_of(text)
    separate = ",".join(f"{file}:{part}" for part in parts)
    raise ShoalError(
        f"{name}={text}: GDPO's parts are reward functions here, and {functions[0]} is a single "
        f"one: only its score would count; leave the keys out and give a function for each, "
        f"reward={separate}, with algorithm.gdpo_reward_weights in the same order"
    )


def verl_gen_batch(given: FlagTexts, get: GetValue) -> tuple[KeyValues, Sentence]:
    """Converts verl's max_num_gen_batches, the most batches of gen_batch_size prompts (by default
    those of a step) that a step may sample in dynamic sampling, to algorithm.max_sampling_rounds,
    so that as many prompts are sampled at most, rounded up to whole steps; 0, no limit, becomes
    NO_LIMIT_OF_ROUNDS. Without max_num_gen_batches sets nothing.

    Without dynamic sampling ShoalError if gen_batch_size is not the prompts of a step, because verl
    then trains on all of them. 1 is what fully_async_policy requires."""
    named = last_part(given)
    prompts = _prompts_of_step(get)
    is_dynamic = get("algorithm.dynamic_sampling")
    size = prompts  # of a batch
    # The reference is left in a file like verl's dapo_trainer.yaml, which does not set that name.
    if named.get("gen_batch_size", "${data.train_batch_size}") != "${data.train_batch_size}":
        size = to_int("data.gen_batch_size", named["gen_batch_size"])
        if not is_dynamic and prompts is not None and size not in (1, prompts):
            raise ShoalError(
                f"data.gen_batch_size={size}: expected {prompts} (data.train_batch_size), or "
                "algorithm.filter_groups.enable=true; without it verl trains on all prompts that "
                f"are sampled, which is data.train_batch_size={size} here"
            )
    if "max_num_gen_batches" not in named:
        if is_dynamic:
            return {}, "dynamic sampling asks for as many prompts as are likely to be needed"
        return {}, "the prompts of a step are asked for one by one"
    name = "algorithm.filter_groups.max_num_gen_batches"
    batches = to_int(name, named["max_num_gen_batches"], 0)
    if not batches:
        return {"algorithm.max_sampling_rounds": str(NO_LIMIT_OF_ROUNDS)}, "no limit, as there"
    steps = batches  # how many times the prompts of a step
    sentence = ""
    if prompts and size:
        steps = -(-batches * size // prompts)  # rounded up
        sentence = f"a step samples at most {count(steps * prompts, 'prompt')}"
        if steps * prompts != batches * size:
            sentence += f", {batches * size:,} there"
    if not is_dynamic:
        sentence = "it counts with algorithm.filter_groups.enable=true"
    return {"algorithm.max_sampling_rounds": str(steps - 1)}, sentence


CHECKS: tuple[Rule, ...] = (
    verl_critic,
    verl_reward_manager,
    verl_gen_batch,
    verl_load_contents,
    verl_gdpo_keys,
)
"""The rules that check flags which set no key: each is called whatever sets the keys of its
flags."""

RULES: tuple[Rule, ...] = (
    verl_run_folder,
    verl_resume,
    verl_long_prompts,
    trl_prompts,
    maxtext_lengths,
    maxtext_devices,
    maxtext_pathways,
    sampler_tensor,
    sampler_memory,
    torchrl_memory,
    trl_delta,
    verl_dual_clip,
    torchrl_batch,
    verl_mini_batches,
    trl_batch,
    torchrl_micro_batch,
    verl_micro_batch,
    trl_staleness,
    verl_staleness,
    verl_counts,
    verl_evaluations,
    verl_steps,
    verl_validation,
    trl_updates,
    trl_episodes,
    maxtext_train_rl,
    maxtext_test_batches,
    epochs,
    torchrl_steps,
    verl_rollout_steps,
    trl_counts,
    trl_first_evaluation,
    trl_evaluation_samples,
    trl_resume,
    trl_schedule,
    verl_warmup,
    verl_critic,
    maxtext_warmup,
    maxtext_schedule_length,
    trl_reward_model,
    trl_shuffle,
    verl_reward_manager,
    verl_gen_batch,
    verl_load_contents,
    verl_gdpo_keys,
)
"""All rules, in the order in which they are applied: each after the rules that set the keys which
it reads."""
