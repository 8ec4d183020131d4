"""The one table of other systems' flags: MaxText, TorchRL, verl, TRL. What each becomes here; docs/migrating.md is made
of it. Short forms of our own keys are in `arguments.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from shoal.config.foreign import TOKEN, Foreign, Values, choice, items_of, to_bool, to_float, to_int
from shoal.types import ShoalError

Reader = Callable[[str, str], Values]

# ---- readers


def _each(*keys: str) -> Reader:
    """The same text for several keys."""
    return lambda name, text: dict.fromkeys(keys, text)


def _optional(key: str, none: str = "0") -> Reader:
    """A number, or None for off."""
    return lambda name, text: {key: none if text.lower() in ("none", "null", "") else text}


def _least_zero(key: str) -> Reader:
    """A number whose -1 is our 0."""
    return lambda name, text: {key: "0" if text == "-1" else text}


def _if_true(values: Values, other: Values) -> Reader:
    return lambda name, text: values if to_bool(name, text) else other


def _list(key: str) -> Reader:
    return lambda name, text: {key: items_of(text)}


def _parallelism(key: str) -> Reader:
    return lambda name, text: {key: "1" if text == "-1" else str(to_int(name, text))}


def _share(text: str) -> bool:
    return "/" in text


KNOWN_TASKS = {"gsm8k": "gsm8k", "openai/gsm8k": "gsm8k", "ifeval": "ifeval", "google/ifeval": "ifeval",
               "math": "math", "countdown": "countdown"}
"""Data sets, as others name them, that are tasks of ours."""


def _data_set(name: str, text: str) -> dict[str, Any]:
    """A task of ours with its preset, or a data set of the user's own. What a preset says of other data falls away."""
    fresh = {"task.split": "train", "task.files": [], "task.subset": ""}
    if task := KNOWN_TASKS.get(text.lower()):
        return {"task.name": task, "task.path": "", **fresh}
    return {"task.name": "custom", "task.path": text, **fresh}


def _profiler(name: str, text: str) -> dict[str, Any]:
    if text not in ("xplane", ""):
        raise ShoalError(f"{name}={text}: expected xplane, or nothing for off")
    return {"report.profile": ["2", "3", "4"] if text else []}


def _resume_mode(name: str, text: str) -> Values:
    if text != "auto":
        raise ShoalError(f"{name}={text}: a run goes on by the same run_name, or with resume=FOLDER; a new one needs "
                         "another run_name")
    return {}


def _loggers(name: str, text: str) -> dict[str, Any]:
    known = {"console": {}, "wandb": {"report.wandb.mode": "online"}, "tensorboard": {"report.tensorboard": "true"}}
    found: dict[str, Any] = {}
    for item in items_of(text):
        if item not in known:
            raise ShoalError(f"{name}={text}: {item} is not there; expected some of {', '.join(known)}")
        found |= known[item]
    return found


def _only(wanted: str, instead: str) -> Reader:
    """A flag with one value that is possible here."""

    def read(name: str, text: str) -> Values:
        if text.lower() != wanted:
            raise ShoalError(f"{name}={text}: expected {wanted}; {instead}")
        return {}

    return read


def _rounds(name: str, text: str) -> Values:
    """Rounds in all, 0 without limit -> rounds beyond the first."""
    rounds = to_int(name, text, 0)
    return {"algorithm.max_sampling_rounds": str(max(1, rounds - 1) if rounds else 1000)}


_REMAT: Reader = _if_true({"model.remat": "full"}, {"model.remat": "none"})


# ---- kinds of rows


def _same(systems: str, **names: str) -> list[Foreign]:
    """Rows of names that stand for one key; `__` is a dot."""
    return [Foreign("same", systems, name.replace("__", "."), (key,)) for name, key in names.items()]


def _turned(systems: str, name: str, keys: str, read: Reader, meaning: str, **more: Any) -> Foreign:
    return Foreign("turned", systems, name, tuple(keys.split()), meaning, read, **more)


def _derived(systems: str, group: str, keys: str, meaning: str, *names: str) -> list[Foreign]:
    return [Foreign("derived", systems, name, tuple(keys.split()), meaning, group=group) for name in names]


def _accepted(systems: str, name: str, meaning: str, read: Reader | None = None) -> Foreign:
    return Foreign("accepted", systems, name, (), meaning, read, flag=True)


def _missing(systems: str, name: str, meaning: str) -> Foreign:
    return Foreign("missing", systems, name, (), meaning, flag=True)


# ---- the table

_CLIPS = "algorithm.clip_low algorithm.clip_high"
_BOTH = _each("algorithm.clip_low", "algorithm.clip_high")


def _symmetric(name: str, text: str) -> Values:
    return _BOTH(name, str(to_float(name, text)))


_LOSS_ALGO = {name: {"algorithm.loss": name} for name in ("grpo", "gspo-token", "gspo")}

MAXTEXT: list[Foreign] = [
    *_same("MaxText", model_name="model.name", tokenizer_path="model.tokenizer", load_parameters_path="model.path",
           grpo_beta="algorithm.kl_coef", max_prefill_predict_length="sampling.max_prompt_tokens",
           decode_sampling_temperature="sampling.temperature", hf_data_split="task.split",
           inference_rollouts="train.weight_sync_interval", ici_fsdp_parallelism="mesh.fsdp",
           gradient_clipping_threshold="optimizer.clip_grad_norm", adam_b1="optimizer.beta1", adam_b2="optimizer.beta2",
           adam_weight_decay="optimizer.weight_decay", decode_sampling_top_k="sampling.top_k",
           decode_sampling_nucleus_p="sampling.top_p", max_num_checkpoints_to_keep="checkpoint.keep_last"),
    *_same("MaxText, TRL", learning_rate="optimizer.lr", num_generations="batch.group_size",
           num_iterations="algorithm.num_epochs"),
    *_same("MaxText", rl__num_generations="batch.group_size", rl__num_iterations="algorithm.num_epochs",
           rl__grpo_beta="algorithm.kl_coef"),
    Foreign("same", "MaxText", "scan_layers", ("model.scan_layers",), flag=True),
    _turned("MaxText", "per_device_batch_size", "batch.prompts_per_device",
            lambda name, text: {"batch.prompts_per_device": str(to_int(name, text))},
            "prompts on each of the trainer's devices, each with num_generations completions",
            tail="prompts on each of the trainer's devices, each with num_generations completions"),
    *[_turned("MaxText", name, _CLIPS, _symmetric, "both bounds", quiet=True)
      for name in ("grpo_epsilon", "rl.grpo_epsilon")],
    *[_turned("MaxText", name, "algorithm.loss", choice(_LOSS_ALGO), "grpo, gspo-token or gspo", quiet=True)
      for name in ("loss_algo", "rl.loss_algo")],
    *_derived("MaxText", "lengths", "sampling.max_completion_tokens",
              "prompt and completion together: less the prompt's limit, as finally resolved", "max_target_length"),
    _turned("MaxText", "hf_path", "task.name task.path", _data_set,
            "a task of ours for gsm8k, openai/gsm8k, ifeval, math; else task=custom with its path"),
    _turned("MaxText", "hf_data_files", "task.files", _list("task.files"),
            "files to train on; where task.split names a subset, the split", quiet=True),
    _turned("MaxText", "profiler", "report.profile", _profiler, "xplane: steps 2 to 4 are traced into the run's "
            "profile/; empty: none", tail="steps that are traced into the run's profile/"),
    _turned("MaxText", "ici_tensor_parallelism", "mesh.tensor", _parallelism("mesh.tensor"),
            "-1 (auto) is 1: parameters are split by fsdp", tail="-1 (auto) is 1: parameters are split by fsdp"),
    *_derived("MaxText", "fractions", "mesh.trainer", "the first devices", "trainer_devices_fraction",
              "TRAINER_DEVICES_FRACTION"),
    *_derived("MaxText", "fractions", "mesh.sampler", "the last devices", "sampler_devices_fraction",
              "SAMPLER_DEVICES_FRACTION"),
    *_derived("MaxText", "replicas", "mesh.sampler mesh.sampler_tensor", "inference_replicas samplers, each over "
              "inference_devices_per_replica devices (1 and 4 where only the other is given)",
              "inference_devices_per_replica", "inference_replicas"),
    *_derived("MaxText", "warmup", "optimizer.warmup_steps", "that share of the run's updates",
              "warmup_steps_fraction"),
    _accepted("MaxText", TOKEN, "taken as HF_TOKEN of this process, written nowhere"),
    _accepted("MaxText", "use_pathways", "where JAX runs over Pathways its devices are found by themselves"),
    _accepted("MaxText", "skip_jax_distributed_system", "one process starts no distributed system"),
    _accepted("MaxText", "lazy_load_tensors", "weights are always read a tensor at a time"),
    _accepted("MaxText", "hardware", "JAX's own choice of devices is taken; JAX_PLATFORMS=cpu chooses the CPU"),
    _accepted("MaxText", "base_config", "the preset of that name is chosen by --config-name"),
]

TORCHRL: list[Foreign] = [
    *_same("TorchRL", train_model__num_devices="mesh.trainer", ref_model__num_devices="mesh.reference",
           inference_model__num_devices="mesh.sampler", train_model__devices="mesh.trainer",
           ref_model__devices="mesh.reference", inference_model__devices="mesh.sampler",
           env__repeats="batch.group_size", policy__kl_coef="algorithm.kl_coef",
           train__kl_to_ref_coeff="algorithm.kl_coef", train__checkpoint_frequency="checkpoint.every"),
    _turned("TorchRL", "env.num_envs", "batch.prompts_per_step", _each("batch.prompts_per_step"),
            "prompts of a step, each with env.repeats completions; train.dialog_turns_per_batch says how many in all",
            tail="prompts of a step, each with env.repeats completions"),
    _turned("TorchRL", "env.dataset", "task.name task.path", choice(
        {name: _data_set("", name) for name in ("gsm8k", "ifeval")}), "the task of that name"),
    _turned("TorchRL", "model.name", "model.path", _each("model.path"),
            "with a / in it, a folder or hub id; without, our name of the architecture", only=_share, quiet=True),
    *_derived("TorchRL", "turns_per_batch", "batch.prompts_per_step", "completions of a step, env.repeats a prompt",
              "train.dialog_turns_per_batch"),
    *_derived("TorchRL", "turns", "steps", "turns / (prompts x completions of a step), rounded up",
              "train.total_dialog_turns"),
    *_derived("TorchRL", "micro_batch", "batch.micro_tokens", "optim_batch_size / gradient_accumulation_steps "
              "completions at once, each as long as prompt and completion may be", "train.optim_batch_size",
              "train.gradient_accumulation_steps"),
    _turned("TorchRL", "train.mixed_precision", "model.dtype", _if_true({"model.dtype": "bfloat16"}, {
        "model.dtype": "float32"}), "true: computed in bfloat16, with float32 masters; false: in float32",
            flag=True, tail="of the computation; masters and optimizer stay float32"),
    _missing("TorchRL", "train_model.lora.enabled", "LoRA; all weights are trained, leave it out"),
    _accepted("TorchRL", "inference_model.gpu_memory_utilization",
              "the sampler takes what its slots need: sampling.slots_per_device"),
]

_A, _R, _T = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout.", "trainer."
_MODES: dict[str, Values] = {
    "vanilla": {"algorithm.loss": "grpo"}, "gspo": {"algorithm.loss": "gspo"}, "geo_mean": {"algorithm.loss": "gmpo"},
    "cispo": {"algorithm.loss": "cispo", "algorithm.cispo_bound": "both"}, "sapo": {"algorithm.loss": "sapo"}}
_LOW_VAR = {"algorithm.kl": "k3", "algorithm.kl_clamp_input": "20", "algorithm.kl_clamp_value": "10"}
_ESTIMATES: dict[str, Values] = {
    "kl": {"algorithm.kl": "k1"}, "k1": {"algorithm.kl": "k1"}, "mse": {"algorithm.kl": "k2"},
    "k2": {"algorithm.kl": "k2"}, "low_var_kl": _LOW_VAR, "k3": _LOW_VAR}
_AGGREGATIONS = {name: {"algorithm.aggregation": name} for name in (
    "token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")}

VERL: list[Foreign] = [
    *_same("verl", data__train_batch_size="batch.prompts_per_step",
           data__max_prompt_length="sampling.max_prompt_tokens",
           data__max_response_length="sampling.max_completion_tokens", actor_rollout_ref__model__path="model.path",
           trainer__total_training_steps="steps", trainer__project_name="report.wandb.project",
           trainer__experiment_name="run_name", trainer__default_local_dir="base_output_directory"),
    *[Foreign("same", "verl", _A + name, (key,)) for name, key in (
        ("ppo_epochs", "algorithm.num_epochs"), ("clip_ratio_c", "algorithm.clip_dual"),
        ("entropy_coeff", "algorithm.entropy_coef"), ("optim.lr", "optimizer.lr"),
        ("optim.weight_decay", "optimizer.weight_decay"), ("grad_clip", "optimizer.clip_grad_norm"),
        ("ppo_max_token_len_per_gpu", "batch.micro_tokens"))],
    *[Foreign("same", "verl", _R + name, (key,)) for name, key in (
        ("n", "batch.group_size"), ("temperature", "sampling.temperature"), ("top_p", "sampling.top_p"))],
    _turned("verl", _R + "top_k", "sampling.top_k", _least_zero("sampling.top_k"), "-1 is 0: all", quiet=True),
    *_derived("verl", "verl_clip", _CLIPS, "both bounds, where one is not given apart", _A + "clip_ratio"),
    *_derived("verl", "verl_clip", "algorithm.clip_low", "", _A + "clip_ratio_low"),
    *_derived("verl", "verl_clip", "algorithm.clip_high", "", _A + "clip_ratio_high"),
    _turned("verl", _A + "loss_agg_mode", "algorithm.aggregation", choice(_AGGREGATIONS), "the same names", quiet=True),
    _turned("verl", _A + "kl_loss_type", "algorithm.kl", choice(_ESTIMATES), "low_var_kl, k3: k3 with verl's clamps"),
    _turned("verl", _A + "policy_loss.loss_mode", "algorithm.loss", choice(_MODES), "the loss of that name"),
    *_derived("verl", "divergence", "algorithm.kl_coef algorithm.kl_placement", "counts only with use_kl_loss=true (0.001)",
              _A + "use_kl_loss", _A + "kl_loss_coef"),
    *_derived("verl", "divergence", "algorithm.kl_coef algorithm.kl_placement", "taken off the reward where switched on",
              "algorithm.use_kl_in_reward", "algorithm.kl_ctrl.kl_coef"),
    *_derived("verl", "mini_batches", "algorithm.num_minibatches", "prompts of an update", _A + "ppo_mini_batch_size"),
    *_derived("verl", "micro_batch_per_gpu", "batch.micro_tokens", "completions at once on a device",
              _A + "ppo_micro_batch_size_per_gpu", _A + "ppo_micro_batch_size"),
    *_derived("verl", "train_files", "task.path", "a parquet file, or some of one folder", "data.train_files"),
    *_derived("verl", "gpus", "mesh.trainer", "devices of all nodes together, split by fsdp", _T + "n_gpus_per_node",
              _T + "nnodes"),
    *_derived("verl", "reward_file", "reward.functions", "file and name of the reward function",
              *(f"{head}custom_reward_function.{part}" for head in ("reward.", "") for part in ("path", "name"))),
    *_derived("verl", "estimator", "algorithm.advantage", "of groups; there is no critic, so no gae",
              "algorithm.adv_estimator"),
    *_derived("verl", "estimator", "algorithm.advantage", "false: the group's mean alone; counts for grpo",
              "algorithm.norm_adv_by_std_in_grpo"),
    Foreign("same", "verl", "algorithm.filter_groups.enable", ("algorithm.dynamic_sampling",), flag=True),
    _turned("verl", "algorithm.filter_groups.metric", "algorithm.dynamic_sampling_by", choice(
        {"acc": {"algorithm.dynamic_sampling_by": "correct"}, **{name: {"algorithm.dynamic_sampling_by": "reward"} for name in (
            "score", "seq_reward", "seq_final_reward")}}), "acc: by correctness; else by the reward", quiet=True),
    _turned("verl", "algorithm.filter_groups.max_num_gen_batches", "algorithm.max_sampling_rounds", _rounds,
            "rounds beyond the first; 0, no limit there, is 1,000"),
    _turned("verl", "actor_rollout_ref.model.enable_gradient_checkpointing", "model.remat", _REMAT,
            "true: whole blocks are computed again", flag=True),
    *_derived("verl", "long_prompts", "sampling.long_prompts", "error only: a prompt is never cut", "data.truncation"),
    *_derived("verl", "long_prompts", "sampling.long_prompts", "true: dropped, counted; false: an error",
              "data.filter_overlong_prompts"),
    _turned("verl", _T + "save_freq", "checkpoint.every", _least_zero("checkpoint.every"),
            "-1: only the last step"),
    _turned("verl", _T + "test_freq", "train.evaluate_every", _least_zero("train.evaluate_every"),
            "-1: only before and after", quiet=True),
    _turned("verl", _T + "logger", "report.wandb.mode report.tensorboard", _loggers, "console, wandb, tensorboard",
            quiet=True),
    _accepted("verl", "data.val_files", "the evaluation split lies beside the training file, else it is its last rows"),
    _accepted("verl", "actor_rollout_ref.model.use_remove_padding", "micro-batches are always packed by tokens"),
    _accepted("verl", "data.val_batch_size", "an evaluation fills the sampler's slots: sampling.slots_per_device"),
    *[_accepted("verl", f"{head}fsdp_config.{name}_offload", "nothing is moved to the host") for head, name in (
        (_A, "param"), (_A, "optimizer"), (_A, "grad"), ("actor_rollout_ref.ref.", "param"))],
    *[_accepted("verl", f"{head}log_prob_{name}", "scoring is packed as training is: batch.micro_tokens")
      for head in (_R, "actor_rollout_ref.ref.") for name in (
          "micro_batch_size", "micro_batch_size_per_gpu", "use_dynamic_bsz", "max_token_len_per_gpu")],
    *[_accepted("verl", _R + name, "a setting of vLLM; the sampler is the model itself") for name in (
        "enforce_eager", "free_cache_engine", "enable_chunked_prefill", "max_num_batched_tokens", "max_num_seqs",
        "max_model_len", "load_format", "dtype", "layered_summon", "mode")],
    _accepted("verl", _T + "critic_warmup", "there is no critic"),
    _accepted("verl", _T + "balance_batch", "micro-batches are always packed by tokens"),
    _accepted("verl", _A + "use_dynamic_bsz", "micro-batches are always packed by tokens: batch.micro_tokens"),
    _accepted("verl", _A + "use_prefix_grouper", "a group's prompt is always computed once"),
    _accepted("verl", _R + "name", "the sampler is the model itself"),
    _accepted("verl", _R + "tensor_model_parallel_size", "the sampler is split as the trainer is: mesh.tensor"),
    _accepted("verl", _R + "gpu_memory_utilization", "the sampler takes what sampling.slots_per_device needs"),
    _accepted("verl", _T + "total_epochs", "a run's length is in steps: steps, or trainer.total_training_steps"),
    _accepted("verl", _T + "val_before_train", "a run is always evaluated before and after",
              _only("true", "a run is always evaluated before and after")),
    _accepted("verl", _T + "resume_mode", "the same command with the same run_name goes on", _resume_mode),
    _accepted("verl", _T + "rollout_data_dir", "every group is written to the run's groups/"),
    _accepted("verl", _T + "validation_data_dir", "evaluations are written to the run folder"),
    *[_missing("verl", f"algorithm.rollout_correction.{name}", "give algorithm.correction, "
               "algorithm.correction_level and algorithm.correction_cap") for name in ("rollout_is", "rollout_rs")],
]

_SCALES: dict[str, Values] = {text: {"algorithm.advantage": ours} for text, ours in (
    ("group", "grpo"), ("true", "grpo"), ("True", "grpo"), ("batch", "batch_std"), ("none", "dr_grpo"),
    ("false", "dr_grpo"), ("False", "dr_grpo"))}

TRL: list[Foreign] = [
    *_same("TRL", model_name_or_path="model.path", beta="algorithm.kl_coef",
           max_completion_length="sampling.max_completion_tokens", max_prompt_length="sampling.max_prompt_tokens",
           temperature="sampling.temperature", top_p="sampling.top_p", top_k="sampling.top_k",
           entropy_coef="algorithm.entropy_coef", weight_decay="optimizer.weight_decay",
           max_grad_norm="optimizer.clip_grad_norm", adam_beta1="optimizer.beta1", adam_beta2="optimizer.beta2",
           warmup_steps="optimizer.warmup_steps", save_total_limit="checkpoint.keep_last",
           reward_weights="reward.weights", reward_funcs="reward.functions", output_dir="base_output_directory",
           dataset_config="task.subset", dataset_train_split="task.split", dataset_test_split="task.eval_split"),
    *[Foreign("same", "TRL", name, (key,), flag=True) for name, key in (
        ("mask_truncated_completions", "algorithm.mask_truncated"), ("use_bias_correction_kl", "algorithm.kl_weighted"))],
    *_derived("TRL", "trl_clip", _CLIPS, "both bounds, unless epsilon_high is given", "epsilon"),
    *_derived("TRL", "trl_clip", "algorithm.clip_high", "None: as epsilon", "epsilon_high"),
    *_derived("TRL", "trl_updates", "steps", "counted in updates, of which a step may make several", "max_steps"),
    *_derived("TRL", "trl_updates", "checkpoint.every", "likewise", "save_steps"),
    *_derived("TRL", "trl_updates", "train.evaluate_every", "likewise", "eval_steps"),
    *_derived("TRL", "warmup", "optimizer.warmup_steps", "that share of the run's updates", "warmup_ratio"),
    _turned("TRL", "delta", "algorithm.clip_dual", _optional("algorithm.clip_dual"), "None is 0: off", quiet=True),
    _turned("TRL", "min_p", "sampling.min_p", _optional("sampling.min_p"), "None is 0: off", quiet=True),
    *_derived("TRL", "trl_loss", "algorithm.loss algorithm.aggregation", "which loss, and how token losses become one "
              "number", "loss_type"),
    *_derived("TRL", "trl_loss", "algorithm.loss", "sequence: gspo with loss_type's aggregation; token: the loss as it "
              "is", "importance_sampling_level"),
    _turned("TRL", "scale_rewards", "algorithm.advantage", choice(_SCALES),
            "group: grpo; batch: batch_std; none: dr_grpo", quiet=True),
    _turned("TRL", "dataset_name", "task.name task.path", _data_set, "as hf_path"),
    _turned("TRL", "lr_scheduler_type", "optimizer.schedule", choice({
        "linear": {"optimizer.schedule": "linear"}, "cosine": {"optimizer.schedule": "cosine"},
        "constant": {"optimizer.schedule": "constant", "optimizer.warmup_steps": "0"},
        "constant_with_warmup": {"optimizer.schedule": "constant"}}), "constant has no warm-up", quiet=True),
    _turned("TRL", "bf16", "model.dtype", _if_true({"model.dtype": "bfloat16"}, {"model.dtype": "float32"}),
            "true: computed in bfloat16, with float32 masters", flag=True,
            tail="of the computation; masters and optimizer stay float32"),
    _turned("TRL", "gradient_checkpointing", "model.remat", _REMAT,
            "true: whole blocks are computed again", flag=True),
    *_derived("TRL", "trl_batch", "batch.prompts_per_device batch.micro_tokens", "completions on each device: with "
              "those of steps_per_generation, divided by num_generations, prompts", "per_device_train_batch_size"),
    *_derived("TRL", "trl_batch", "batch.prompts_per_device", "batches of an update; multiplies "
              "per_device_train_batch_size (8)", "gradient_accumulation_steps"),
    *_derived("TRL", "trl_batch", "batch.prompts_per_device algorithm.num_minibatches", "batches of a step; divided by "
              "gradient_accumulation_steps, its updates", "steps_per_generation"),
    *_derived("TRL", "rollout_correction", "algorithm.correction algorithm.correction_level algorithm.correction_cap",
              "weights for what sampler and trainer disagree on", "vllm_importance_sampling_correction",
              "vllm_importance_sampling_mode", "vllm_importance_sampling_clip_max", "vllm_importance_sampling_cap"),
    _missing("TRL", "use_vllm", "the sampler is the model itself; leave it out"),
    _missing("TRL", "sync_ref_model", "the reference stays what it was at the start"),
    _missing("TRL", "off_policy_mask_threshold", "algorithm.correction=mis masks by the ratio of trainer and sampler"),
    _accepted("TRL", "top_entropy_quantile", "every drawn token is learnt from",
              _only("1.0", "every drawn token is learnt from")),
    _accepted("TRL", "num_train_epochs", "a run's length is in steps: steps, or max_steps"),
    _accepted("TRL", "disable_dropout", "models here have no dropout"),
    _accepted("TRL", "log_completions", "every group is written to the run's groups/"),
    _accepted("TRL", "logging_steps", "every step is written"),
    _accepted("TRL", "shuffle_dataset", "the order is drawn anew each epoch, by seed",
              _only("true", "the order is drawn anew each epoch, by seed")),
]

FOREIGN: Mapping[str, Foreign] = {row.name: row for row in (*MAXTEXT, *TORCHRL, *VERL, *TRL)}
"""Name -> what it becomes."""


def same_key(name: str) -> str:
    """Our key, where a flag of another system is another name of it; any other name as it is."""
    row = FOREIGN.get(name)
    return row.keys[0] if row and row.kind == "same" else name


def foreign_of(config_type: type, name: str, text: str) -> Foreign | None:
    """The row of a flag that a command takes; None where there is none, or where the name is ours for this text."""
    row = FOREIGN.get(name)
    return row if row and row.fits(config_type) and (row.only is None or row.only(text)) else None
