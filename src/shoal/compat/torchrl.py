"""The table of TorchRL 0.14: the dotted keys of its GRPO recipe
(sota-implementations/grpo/config)."""

from __future__ import annotations

from shoal.compat import flags, rules
from shoal.compat.flags import (
    Flag,
    FlagTexts,
    KeyValues,
    derived,
    idle,
    only,
    reads,
    refused,
    renames,
)
from shoal.config.names import QUANTISED


def read_divergence(given: FlagTexts) -> KeyValues:
    """Converts the flags of KL divergence: kl_to_ref_coeff or kl_coef to algorithm.kl_coef (0 with
    use_kl_to_ref=false; of both the later counts), and kl_coef_in_loss to algorithm.kl_placement,
    loss or reward. In the reward the estimator algorithm.kl is k1. What is not given is not set."""
    named = flags.last_part(given)
    values = {}
    for name, text in named.items():
        if name in ("kl_to_ref_coeff", "kl_coef"):
            values["algorithm.kl_coef"] = text
    if not flags.to_bool("train.use_kl_to_ref", named.get("use_kl_to_ref", "true")):
        values["algorithm.kl_coef"] = "0"
    if "kl_coef_in_loss" in named:
        if flags.to_bool("train.kl_coef_in_loss", named["kl_coef_in_loss"]):
            values["algorithm.kl_placement"] = "loss"
        else:
            values["algorithm.kl_placement"] = "reward"
            values["algorithm.kl"] = "k1"
    return values


def read_lora(given: FlagTexts) -> KeyValues:
    """Converts the flags of the recipe's adapter, which is on all matrices, to model.lora: `r` (by
    default 8) to the rank, `alpha` (by default 16) to alpha. Without `enabled` nothing is set."""
    named = flags.last_part(given)
    if not flags.to_bool("train_model.lora.enabled", named.get("enabled", "false")):
        return {}
    return flags.lora_values(named.get("r", "8"), named.get("alpha", "16"))


_ROLE = "devices of {}: a count or a list"

FLAGS: list[Flag] = [
    *[
        Flag(f"{name}_model.{part}", (key,), meaning=_ROLE.format(role))
        for name, key, role in (
            ("train", "mesh.trainer", "the trainer"),
            ("ref", "mesh.reference", "the reference"),
            ("inference", "mesh.sampler", "the sampler"),
        )
        for part in ("num_devices", "devices")
    ],
    *renames(
        env__repeats="batch.group_size",
        train__checkpoint_frequency="checkpoint.every",
        train__entropy_coeff="algorithm.entropy_coef",
        train__epochs="algorithm.num_epochs",
        train__weight_update_frequency="train.weight_sync_interval",
        inference_model__temperature="sampling.temperature",
        inference_model__top_p="sampling.top_p",
        inference_model__max_tokens="sampling.max_completion_tokens",
    ),
    *[
        Flag(
            name,
            ("algorithm.kl_coef",),
            meaning="off with train.use_kl_to_ref=false",
            group=read_divergence,
        )
        for name in ("policy.kl_coef", "train.kl_to_ref_coeff")
    ],
    Flag(
        "train.use_kl_to_ref",
        ("algorithm.kl_coef",),
        meaning="false: no divergence",
        group=read_divergence,
        is_switch=True,
    ),
    Flag(
        "train.kl_coef_in_loss",
        ("algorithm.kl_placement", "algorithm.kl"),
        meaning="false: subtracted from the reward, as k1",
        group=read_divergence,
        is_switch=True,
    ),
    reads(
        "env.dataset",
        "task.name task.path",
        flags.one_of(
            {
                name: flags.read_data_set("", name)
                for name in ("gsm8k", "ifeval", "math", "countdown")
            }
        ),
        "the task of that name",
        is_quiet=False,
        has_tail=False,
    ),
    reads(
        "model.name",
        "model.path",
        flags.each("model.path"),
        "with a / in it, a folder or hub id; without, our name of the architecture",
        value_filter=lambda text: "/" in text,
    ),
    *derived(
        rules.torchrl_batch,
        "batch.prompts_per_step sampling.slots_per_device",
        "prompts of a step, each with env.repeats completions; with train.dialog_turns_per_batch "
        "completions that are sampled at once",
        "env.num_envs",
        is_quiet=False,
    ),
    *derived(
        rules.torchrl_batch,
        "batch.prompts_per_step",
        "completions of a step, env.repeats a prompt",
        "train.dialog_turns_per_batch",
    ),
    *derived(
        rules.torchrl_steps,
        "steps",
        "turns / (prompts x completions of a step), rounded up",
        "train.total_dialog_turns",
    ),
    *derived(
        rules.torchrl_micro_batch,
        "algorithm.num_minibatches batch.micro_tokens",
        "completions of an update, in whole groups",
        "train.optim_batch_size",
    ),
    *derived(
        rules.torchrl_micro_batch,
        "batch.micro_tokens",
        "optim_batch_size / gradient_accumulation_steps completions at once, each as long as "
        "prompt and completion may be",
        "train.gradient_accumulation_steps",
    ),
    reads(
        "train.mixed_precision",
        "model.dtype",
        flags.if_true({"model.dtype": "bfloat16"}, {"model.dtype": "float32"}),
        "of the computation; master weights and optimizer stay float32",
        is_switch=True,
        is_quiet=False,
    ),
    reads(
        "train_model.gradient_checkpointing",
        "model.remat",
        flags.REMAT,
        "true: whole blocks are computed again",
        is_switch=True,
    ),
    Flag(
        "train_model.lora.enabled",
        tuple(flags.LORA.split()[:3]),
        meaning="an adapter of all products: r 8 and alpha 16, unless they are given",
        group=read_lora,
        is_switch=True,
        is_quiet=False,
    ),
    *[
        Flag(
            f"train_model.lora.{name}",
            (f"model.lora.{key}",),
            meaning="counts only with train_model.lora.enabled=true",
            group=read_lora,
            is_quiet=False,
        )
        for name, key in (("r", "rank"), ("alpha", "alpha"))
    ],
    *refused(
        QUANTISED,
        "train_model.quantization.enabled",
        "inference_model.quantization.enabled",
        "ref_model.quantization.enabled",
    ),
    *refused(
        "the reasoning prompt is reward.preset=torchrl's own; set task.template for another",
        "env.reasoning",
    ),
    reads(
        "train.kl_to_inference_coeff",
        "algorithm.kl_sampler_coef",
        flags.optional("algorithm.kl_sampler_coef"),
        "null is 0: off",
        keeps_nothing=True,
    ),
    *refused("environments, with several turns", "env.openenv.name"),
    *only("each completion is trained on once an epoch", "true", names="train.empty_replay_buffer"),
    *only("AdamW is the optimizer", "adamw", names="optimizer.name"),
    *derived(
        rules.torchrl_memory,
        "sampling.memory_share vllm.memory",
        "the sampler's share of a device's memory; of servers of vLLM that are started here, "
        "vllm.memory",
        "inference_model.gpu_memory_utilization",
    ),
    *idle("an episode of these tasks is one turn", "env.max_steps"),
    *idle("a run's folder is named by run_name", "train.exp_name", "logging.experiment_name"),
    *idle(
        "train.max_staleness says how old samples may be",
        "train.sync",
        "train.buffer_size",
        "train.steps_per_batch",
    ),
    *idle("completions are always packed into rows, which changes no number", "train.packing"),
    *idle("every step is written", "train.logging_frequency"),
    *idle("the reference has the trainer's settings", "ref_model.*"),
    *idle(
        "there, too, the policy is trained in evaluation mode, without dropout",
        "train_model.lora.dropout",
    ),
    *idle(
        "JAX compiles every step and chooses kernels",
        "model.compile",
        "train_model.attn_implementation",
        "train_model.torch_dtype",
        "train_model.quantization.*",
    ),
    *idle("the sampler is the model itself, not vLLM", "inference_model.*"),
    *idle(
        "samplers in a Ray cluster are sampler.kind=ray; Hydra is not used",
        "ray.*",
        "hydra.*",
        "mode",
    ),
    *idle("checkpoints are in the run folder, by train.checkpoint_frequency", "logging.*"),
]
