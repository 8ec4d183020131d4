"""The table of verl 0.9.1: the dotted keys of its trainer
(verl/trainer/config/ppo_trainer.yaml)."""

from __future__ import annotations

from typing import Any

from shoal.compat import flags, rules, verl_readers
from shoal.compat.flags import (
    Flag,
    FlagTexts,
    KeyValues,
    counts_with,
    derived,
    grouped,
    idle,
    only,
    reads,
    refused,
    renames,
    template_variables,
)
from shoal.config.names import QUANTISED

_A, _R, _T = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout.", "trainer."
_REF, _MODEL = "actor_rollout_ref.ref.", "actor_rollout_ref.model."


def same(key: str, *names: str) -> list[Flag]:
    """Returns rows for several flags (`names`) that all stand for one key and often occur together
    in verl's files; the one given last counts, with its text unchanged."""

    def read(given: FlagTexts) -> KeyValues:
        return {key: list(given.values())[-1]}

    read.__name__ = key
    return [Flag(name, (key,), group=read) for name in names]


def _under(head: str, names: str) -> list[str]:
    """Returns names, separated by spaces in the text, each after `head`."""
    return [head + name for name in names.split()]


def _grouped(group: Any, keys: str, meaning: str, *names: str, **more: Any) -> list[Flag]:
    """Returns rows, one for each of the flags `names`, that `group` reads together. `group`: a
    Group, from the flags' texts to values of keys; `keys`: the keys that they set, without
    `algorithm.`, separated by spaces; `meaning`: in words, what they become; `more`: further fields
    of Flag."""
    full_keys = " ".join(f"algorithm.{key}" for key in keys.split())
    return grouped(group, full_keys, meaning, *names, **more)


_DTYPES: dict[str, KeyValues] = {
    one: {"model.dtype": full}
    for one, full in (
        ("bfloat16", "bfloat16"),
        ("bf16", "bfloat16"),
        ("float16", "float16"),
        ("fp16", "float16"),
        ("float32", "float32"),
        ("fp32", "float32"),
    )
}
_OVERLONG = (
    "reward_model.reward_kwargs.overlong_buffer_cfg.",
    "reward.reward_kwargs.overlong_buffer_cfg.",
    "reward_model.overlong_buffer.",
    "reward.overlong_buffer.",
)
_KL = "kl kl_clamp_input kl_clamp_value"
_ALL_OF_CHECKPOINT = (
    "a checkpoint always holds all that a resumed run restores: weights, moments and progress; "
    "shoal export writes the model in Hugging Face's format"
)

FLAGS: list[Flag] = [
    *renames(
        async_training__trigger_parameter_sync_step="train.weight_sync_interval",
        actor_rollout_ref__model__path="model.path",
        actor_rollout_ref__model__tokenizer_path="model.tokenizer",
        actor_rollout_ref__model__custom_chat_template="model.template",
        algorithm__gdpo_reward_weights="reward.weights",
        algorithm__gamma="algorithm.discount",
        data__seed="seed",
    ),
    *[
        Flag(_A + name, (key,))
        for name, key in (
            ("ppo_epochs", "algorithm.num_epochs"),
            ("entropy_coeff", "algorithm.entropy_coef"),
            ("optim.lr", "optimizer.lr"),
            ("optim.weight_decay", "optimizer.weight_decay"),
            ("ppo_max_token_len_per_gpu", "batch.micro_tokens"),
            ("ulysses_sequence_parallel_size", "mesh.context"),
            ("loss_scale_factor", "algorithm.aggregation_tokens"),
            ("tau_pos", "algorithm.sapo_positive"),
            ("tau_neg", "algorithm.sapo_negative"),
        )
    ],
    *derived(
        rules.verl_run_folder,
        "report.wandb.project report.mlflow.experiment report.trackio.project run_name",
        "the run is project_name/experiment_name under base_output_directory, unless "
        "default_local_dir is given",
        _T + "project_name",
    ),
    *derived(
        rules.verl_run_folder,
        "run_name",
        "with project_name and without default_local_dir: project_name/experiment_name",
        _T + "experiment_name",
    ),
    *derived(
        rules.verl_run_folder,
        "base_output_directory",
        "if it ends with experiment_name it is the run's folder itself, else that of runs: "
        "default_local_dir/experiment_name",
        _T + "default_local_dir",
    ),
    *derived(
        rules.verl_resume,
        "resume",
        "auto: the same script resumes its run, if there is one; disable: a new run, an error "
        "if its folder has one; resume_path: the run of resume_from_path",
        _T + "resume_mode",
        as_here="auto",
    ),
    *derived(
        rules.verl_resume,
        "resume",
        "a run of Shoal or its newest checkpoint; counts with resume_mode=resume_path",
        _T + "resume_from_path",
    ),
    reads(
        _T + "remove_previous_ckpt_in_save",
        "checkpoint.keep_last",
        flags.if_true({"checkpoint.keep_last": "1"}, {}),
        "of older versions; true: the newest alone",
        is_switch=True,
    ),
    reads(
        _T + "max_actor_ckpt_to_keep",
        "checkpoint.keep_last",
        flags.optional("checkpoint.keep_last"),
        "null, its default there: all",
        keeps_nothing=True,
    ),
    *same("sampling.max_prompt_tokens", "data.max_prompt_length", _R + "prompt_length"),
    *same("sampling.max_completion_tokens", "data.max_response_length", _R + "response_length"),
    *same("optimizer.clip_grad_norm", _A + "grad_clip", _A + "optim.clip_grad"),
    *[
        Flag(_R + name, (key,))
        for name, key in (
            ("n", "batch.group_size"),
            ("temperature", "sampling.temperature"),
            ("top_p", "sampling.top_p"),
        )
    ],
    reads(_R + "top_k", "sampling.top_k", flags.least_zero("sampling.top_k"), "-1 is 0: all"),
    *_grouped(
        verl_readers.clip,
        "clip_low clip_high",
        "both bounds, where one is not given by itself",
        _A + "clip_ratio",
    ),
    *_grouped(verl_readers.clip, "clip_low", "", _A + "clip_ratio_low"),
    *_grouped(verl_readers.clip, "clip_high", "", _A + "clip_ratio_high"),
    *_grouped(
        verl_readers.read_loss,
        "loss clip_dual cispo_bound aggregation",
        "the loss of that name; all but vanilla without dual clip, geo_mean and sapo with their "
        "own mean",
        _A + "policy_loss.loss_mode",
    ),
    *_grouped(verl_readers.read_loss, "aggregation", "the same names", _A + "loss_agg_mode"),
    *derived(rules.verl_dual_clip, "algorithm.clip_dual", "only for vanilla", _A + "clip_ratio_c"),
    *_grouped(
        verl_readers.read_divergence,
        "kl_coef kl_placement",
        "a term of the loss",
        _A + "use_kl_loss",
        is_switch=True,
    ),
    *_grouped(
        verl_readers.read_divergence,
        "kl_coef",
        "counts only with use_kl_loss=true (0.001)",
        _A + "kl_loss_coef",
    ),
    *_grouped(
        verl_readers.read_divergence,
        _KL,
        "low_var_kl, k3: k3 with verl's clamps",
        _A + "kl_loss_type",
    ),
    *_grouped(
        verl_readers.read_divergence,
        f"kl_coef kl_placement {_KL}",
        "subtracted from the reward, by kl_penalty's estimator",
        "algorithm.use_kl_in_reward",
        is_switch=True,
    ),
    *_grouped(
        verl_readers.read_divergence,
        "kl_coef",
        "counts only with use_kl_in_reward=true (0.001)",
        "algorithm.kl_ctrl.kl_coef",
    ),
    *_grouped(
        verl_readers.read_divergence,
        _KL,
        "counts only with use_kl_in_reward=true; kl, k1: k1 without clamps",
        "algorithm.kl_penalty",
    ),
    *flags.grouped(
        verl_readers.read_estimator,
        "algorithm.advantage algorithm.whiten_over algorithm.credit batch.group_size critic.lr",
        "of groups, of 8 completions if nothing says how many (verl has one there); gae, by a "
        "critic, has one completion of each prompt and critic.lr=1e-5 if nothing says more",
        "algorithm.adv_estimator",
    ),
    *flags.grouped(
        verl_readers.read_estimator,
        "algorithm.advantage",
        "an error if it is switched on without gae",
        "critic.enable",
        is_switch=True,
    ),
    *flags.grouped(
        verl_readers.read_estimator, "critic.path", "counts with gae", "critic.model.path"
    ),
    *flags.grouped(verl_readers.read_estimator, "critic.lr", "counts with gae", "critic.optim.lr"),
    *flags.grouped(
        verl_readers.read_estimator,
        "critic.value_clip",
        "counts with gae",
        "critic.cliprange_value",
    ),
    *flags.grouped(
        verl_readers.read_estimator,
        "critic.warmup_steps",
        "with gae; else it must be 0",
        _T + "critic_warmup",
    ),
    *_grouped(
        verl_readers.read_estimator,
        "advantage",
        "verl-agent's: mean_norm is dr_grpo, mean_std_norm grpo; counts for gigpo",
        "algorithm.gigpo.mode",
    ),
    *_grouped(
        verl_readers.read_estimator,
        "advantage",
        "false: only the group's mean; counts for grpo",
        "algorithm.norm_adv_by_std_in_grpo",
        is_switch=True,
    ),
    *_grouped(
        verl_readers.read_correction,
        "correction correction_level correction_cap correction_floor",
        "token or sequence: truncated importance weights (tis)",
        "algorithm.rollout_correction.rollout_is",
        keeps_nothing=True,
    ),
    *_grouped(
        verl_readers.read_correction,
        "correction_cap correction_floor",
        "2.0: truncated (tis); 0.5_2.0: 0 outside these bounds (mis)",
        "algorithm.rollout_correction.rollout_is_threshold",
    ),
    *_grouped(
        verl_readers.read_correction,
        "correction",
        "true: direct, the ratio to the sampler's log-probs, without weights",
        "algorithm.rollout_correction.bypass_mode",
        is_switch=True,
    ),
    *_grouped(
        verl_readers.read_correction,
        "correction",
        "only ppo_clip; counts with bypass_mode=true",
        "algorithm.rollout_correction.loss_type",
    ),
    *_grouped(
        verl_readers.read_rejection,
        "rejection rejection_cap rejection_floor",
        "one rule, by its name there; null: none",
        "algorithm.rollout_correction.rollout_rs",
        keeps_nothing=True,
    ),
    *_grouped(
        verl_readers.read_rejection,
        "rejection_cap rejection_floor",
        "2.0; with k1 low_high, the inverse of the weight's bounds",
        "algorithm.rollout_correction.rollout_rs_threshold",
    ),
    reads(
        "data.train_batch_size",
        "batch.prompts_per_step",
        verl_readers.read_batch,
        "0: by async_training.require_batches",
    ),
    *derived(
        rules.verl_mini_batches,
        "algorithm.num_minibatches",
        "prompts of an update",
        _A + "ppo_mini_batch_size",
    ),
    *derived(
        rules.verl_mini_batches,
        "batch.prompts_per_step algorithm.num_minibatches",
        "updates of a step, each of ppo_mini_batch_size prompts",
        "async_training.require_batches",
    ),
    *derived(
        rules.verl_staleness,
        "train.max_staleness",
        "n - 1 + that share of n steps, rounded up; n: trigger_parameter_sync_step",
        "async_training.staleness_threshold",
    ),
    *derived(
        rules.verl_staleness,
        "train.versions",
        "true: newest, if samples may be older than the weights; false: fixed",
        "async_training.partial_rollout",
        is_switch=True,
    ),
    *derived(
        rules.verl_rollout_steps, "steps", "prompts of the run", "rollout.total_rollout_steps"
    ),
    *derived(
        rules.verl_micro_batch,
        "batch.micro_tokens",
        "completions at once on a device",
        _A + "ppo_micro_batch_size_per_gpu",
        _A + "ppo_micro_batch_size",
    ),
    *derived(rules.verl_steps, "steps", "with val_only 0", _T + "total_training_steps"),
    *derived(
        rules.verl_steps,
        "steps",
        "true: 0, an evaluation alone, whatever total_training_steps says",
        _T + "val_only",
        as_here="false",
        is_switch=True,
    ),
    *derived(
        rules.epochs,
        "steps",
        "passes over the training rows of local files or from Python, without prompts that are too "
        "long and dropped, and without those that val_files have too (verl trains on them; no key "
        "keeps them here); without effect next to total_training_steps; for other data set steps",
        _T + "total_epochs",
        low_priority=True,
    ),
    *derived(
        rules.verl_warmup,
        "optimizer.warmup_steps",
        "that share of the run's steps, rounded down, times the updates of a step",
        _A + "optim.lr_warmup_steps_ratio",
    ),
    *derived(
        rules.verl_warmup,
        "optimizer.warmup_steps",
        "steps, times the updates of each; -1: by lr_warmup_steps_ratio",
        _A + "optim.lr_warmup_steps",
    ),
    reads(
        _A + "optim.betas",
        "optimizer.beta1 optimizer.beta2",
        verl_readers.read_betas,
        "both betas of AdamW",
    ),
    *[
        reads(
            _A + f"optim.{name}",
            "optimizer.schedule",
            flags.one_of({one: {"optimizer.schedule": one} for one in ("constant", "cosine")}),
            "constant or cosine",
        )
        for name in ("warmup_style", "lr_scheduler_type")
    ],
    reads(
        _A + "fsdp_config.dtype",
        "model.dtype",
        flags.one_of(_DTYPES),
        "of the computation; master weights stay float32",
    ),
    *derived(
        rules.verl_validation,
        "evaluation.samples",
        "answers to each question of an evaluation: accuracy (without acc mean_reward) is mean@n, "
        "pass@n best@n; with temperature 0 one",
        _R + "val_kwargs.n",
    ),
    *derived(
        rules.verl_validation,
        "evaluation.temperature",
        "0, the default there: greedy",
        _R + "val_kwargs.temperature",
    ),
    *derived(
        rules.verl_validation,
        "evaluation.top_p",
        "counts with temperature above 0",
        _R + "val_kwargs.top_p",
    ),
    *derived(
        rules.verl_validation,
        "evaluation.top_k",
        "-1 is 0: all; counts with temperature above 0",
        _R + "val_kwargs.top_k",
    ),
    reads(
        "data.train_max_samples",
        "task.num_train_questions",
        flags.least_zero("task.num_train_questions"),
        "the first so many rows, before long prompts are dropped, where verl draws them with "
        "data.shuffle; -1 is 0: all",
    ),
    reads(
        "data.val_max_samples",
        "task.num_eval_questions",
        flags.least_zero("task.num_eval_questions"),
        "-1 is 0: all",
    ),
    reads(
        "data.train_files",
        "task.path",
        verl_readers.read_train_files,
        "a parquet file, or some of one folder",
        keeps_nothing=True,
    ),
    reads(
        "data.val_files",
        "task.eval_split",
        verl_readers.read_val_files,
        "the files by their paths; figures of each data_source are accuracy/<source>, "
        "mean_reward/<source>, ...",
    ),
    *grouped(
        verl_readers.read_columns,
        "task.columns",
        "the column of the prompts",
        "data.prompt_key",
    ),
    *grouped(
        verl_readers.read_columns,
        "task.columns",
        "the column that reward functions get as data_source",
        "data.reward_fn_key",
    ),
    *[
        Flag(
            _T + name,
            ("mesh.trainer", "mesh.fsdp"),
            meaning="devices of all nodes together, split by fsdp",
            group=verl_readers.read_gpus,
        )
        for name in ("n_gpus_per_node", "nnodes")
    ],
    *[
        Flag(
            f"rollout.{name}",
            ("mesh.sampler",),
            group=verl_readers.read_sampler_gpus,
            meaning="devices of the sampler alone, on all nodes together; one_step_off_policy is "
            "train.max_staleness=1",
        )
        for name in ("n_gpus_per_node", "nnodes")
    ],
    *[
        Flag(
            f"{head}custom_reward_function.{part}",
            ("reward.functions",),
            group=verl_readers.read_reward_file,
            meaning="file and name of the reward function",
            keeps_nothing=part == "path",
        )
        for head in ("reward.", "")
        for part in ("path", "name")
    ],
    *grouped(
        verl_readers.read_reward_file,
        "reward.functions",
        "fixed arguments of the function: file.py:function(NAME=VALUE)",
        "reward.custom_reward_function.reward_kwargs",
        "custom_reward_function.reward_kwargs",
        is_mapping=True,
        keeps_nothing=True,
    ),
    *derived(
        rules.verl_reward_manager,
        "",
        "naive; batch, whose function gets lists; or dapo, whose overlong_buffer_cfg is a penalty "
        "on long completions",
        "reward_manager.name",
        "reward_model.reward_manager",
        "reward.reward_manager.name",
    ),
    *derived(
        rules.verl_reward_manager,
        "reward.overlong_buffer_tokens",
        "true: DAPO's penalty over the last len tokens; false: none",
        *(f"{head}enable" for head in _OVERLONG),
        is_switch=True,
    ),
    *derived(
        rules.verl_reward_manager,
        "reward.overlong_buffer_tokens",
        "counts with enable=true",
        *(f"{head}len" for head in _OVERLONG),
    ),
    *derived(
        rules.verl_reward_manager,
        "reward.overlong_penalty",
        "counts with enable=true",
        *(f"{head}penalty_factor" for head in _OVERLONG),
    ),
    *derived(
        rules.verl_reward_manager,
        "",
        "the longest completion, for the penalty: data.max_response_length",
        "reward_model.reward_kwargs.max_resp_len",
        "reward.reward_kwargs.max_resp_len",
    ),
    *idle("the penalty is logged anyway: rewards/overlong", *(f"{head}log" for head in _OVERLONG)),
    reads(
        "algorithm.filter_groups.enable",
        "algorithm.dynamic_sampling algorithm.on_too_few_groups algorithm.max_sampling_rounds",
        verl_readers.read_filter,
        "a step that lacks groups after max_num_gen_batches ends the run with an error, as there",
        is_switch=True,
    ),
    reads(
        "algorithm.filter_groups.metric",
        "algorithm.dynamic_sampling_by",
        verl_readers.read_metric,
        "acc: correct, which is the function's acc if it returns one; score; seq_reward and "
        "seq_final_reward: reward; else the entry of that name that the function returns",
    ),
    *derived(
        rules.verl_gen_batch,
        "algorithm.max_sampling_rounds",
        "times data.gen_batch_size, the most prompts of a step, rounded up to whole steps; 0, no "
        "limit, is 1,000 steps",
        "algorithm.filter_groups.max_num_gen_batches",
    ),
    reads(
        _MODEL + "enable_gradient_checkpointing",
        "model.remat",
        flags.REMAT,
        "true: whole blocks are computed again",
        is_switch=True,
    ),
    reads(
        _A + "fsdp_config.optimizer_offload",
        "optimizer.offload",
        flags.OFFLOAD,
        "true: AdamW's moments",
        is_switch=True,
    ),
    *derived(
        rules.verl_long_prompts,
        "sampling.long_prompts",
        "true: dropped, counted; false: an error",
        "data.filter_overlong_prompts",
        is_switch=True,
    ),
    *derived(
        rules.verl_long_prompts,
        "sampling.long_prompts",
        "a prompt is never cut: one that is too long is an error, or filtered",
        "data.truncation",
        low_priority=True,
    ),
    *[
        Flag(_MODEL + name, tuple(keys.split()), meaning=meaning, group=verl_readers.read_lora)
        for name, keys, meaning in (
            (
                "lora_rank",
                flags.LORA,
                "0: off; with lora_alpha 16 on all products, unless they are given",
            ),
            ("lora_alpha", "model.lora.alpha", "counts only with lora_rank"),
            ("target_modules", "model.lora.targets", "counts only with lora_rank"),
            (
                "lora_adapter_path",
                "model.lora.path algorithm.reference",
                "an adapter in PEFT's format: its rank, alpha and targets are used; the reference "
                "is the model without it",
            ),
        )
    ],
    *derived(
        rules.verl_counts,
        "checkpoint.every",
        "-1: only the last step; times trigger_parameter_sync_step",
        _T + "save_freq",
    ),
    *derived(
        rules.verl_evaluations,
        "train.evaluate_every",
        "times trigger_parameter_sync_step; -1: before training and after it, with "
        "val_before_train=False never",
        _T + "test_freq",
        "rollout.test_freq",
    ),
    *derived(
        rules.verl_evaluations,
        "train.evaluate_first train.evaluate_every",
        "false with recipe=verl, without test_freq: no evaluation, as there",
        _T + "val_before_train",
        is_switch=True,
    ),
    Flag("data.shuffle", ("train.shuffle",), is_switch=True),
    reads(
        _T + "logger",
        "report.wandb.mode report.tensorboard report.mlflow.mode report.trackio.mode",
        verl_readers.read_loggers,
        "console, file (metrics.jsonl), wandb, tensorboard, mlflow, trackio",
    ),
    # ---- what matters and has no counterpart
    *refused(
        "a third kind of weight than algorithm.correction's: the mean of the weights is not made 1",
        "algorithm.rollout_correction.rollout_is_batch_normalize",
    ),
    *refused(
        "of older versions: algorithm.rollout_correction.rollout_is=token and "
        "rollout_is_threshold=2.0 say the same",
        _A + "tis_imp_ratio_cap",
        "algorithm.rollout_is",
        accepts=("-1",),
    ),
    *counts_with("algorithm.rollout_is", "algorithm.rollout_is_threshold"),
    *only(
        "the ratio is to the trainer's own log-probs",
        "true",
        names="async_training.compute_prox_log_prob",
    ),
    *only(
        "a sampler has its devices for the whole run",
        "false",
        names="async_training.use_dynamic_resource_scheduling",
    ),
    *derived(
        rules.verl_gen_batch,
        "",
        "with filter_groups.enable the prompts of one of max_num_gen_batches; else it must be "
        "data.train_batch_size",
        "data.gen_batch_size",
    ),
    *only(
        "turns of equal states count as much as completions",
        "1.0",
        "1",
        names="algorithm.gigpo.step_advantage_w",
    ),
    *refused("states are equal or not", "algorithm.gigpo.enable_similarity"),
    *counts_with("algorithm.gigpo.enable_similarity", "algorithm.gigpo.similarity_thresh"),
    *refused("groups are never weighted by a preference", "algorithm.use_pf_ppo"),
    *refused(
        "model.lora.targets names the products that have an adapter",
        _MODEL + "exclude_modules",
        accepts=(".*visual.*", "visual"),  # a text model has none
    ),
    *refused("heads for several tokens", _MODEL + "mtp.enable"),
    *only(
        "no model has dropout here",
        "0",
        "0.",
        "0.0",
        names=" ".join(
            f"{_MODEL}override_config.{name}"
            for name in ("attention_dropout", "embd_pdrop", "resid_pdrop", "hidden_dropout")
        ),
    ),
    *idle(
        "model.attention chooses how attention is computed",
        _MODEL + "override_config.attn_implementation",
    ),
    *refused(
        "the model's shape comes with its checkpoint",
        _MODEL + "override_config",
        _MODEL + "hf_config_path",
        _MODEL + "external_lib",
    ),
    *refused(
        "the reference is the model at the start of the run (for an adapter: algorithm.reference)",
        _REF + "model.path",
    ),
    *refused("the learning rate falls to 0", _A + "optim.min_lr_ratio"),
    *refused(
        "AdamW has optimizer.beta1, beta2, eps and weight_decay",
        _A + "optim.override_optimizer_config",
    ),
    *only("half a cosine", "0.5", names=_A + "optim.num_cycles"),
    *only("AdamW is the optimizer", "adamw", names=_A + "optim.optimizer"),
    *only(
        "master weights are float32, and products have model.dtype; leave it out",
        "fp32",
        "float32",
        names=_A + "fsdp_config.model_dtype",
    ),
    reads(
        _A + "router_replay.mode",
        "model.router_replay",
        flags.one_of(
            {"disabled": {"model.router_replay": "off"}, "R3": {"model.router_replay": "on"}}
        ),
        "R3 or disabled: the sampler's routes, not the trainer's own (R2)",
    ),
    *idle("the sampler returns its routes with R3", _R + "enable_rollout_routing_replay"),
    reads(
        _R + "quantization",
        "sampler.quantise",
        flags.one_of({"fp8": {"sampler.quantise": "fp8"}}),
        "fp8: only of weights, by output channel",
    ),
    *refused("completions are always sampled", _R + "skip_rollout"),
    *only(
        "log-probs are over the tokens that temperature, top_k and top_p leave",
        "processed_logprobs",
        names=_R + "logprobs_mode",
    ),
    *only("one turn", "single_turn_agent", names=_R + "agent.default_agent_loop"),
    *refused(
        "turns come from tools=FILE.py:FUNCTION, environment=FILE.py:CLASS or a rollout function, "
        "rollout=FILE.py:FUNCTION; docs/agents.md has them",
        _R + "agent.agent_loop_config_path",
        _R + "multi_turn.enable",
    ),
    *refused(
        "data are read by task.name=custom",
        "data.custom_cls.path",
        "data.sampler.class_path",
        "data.datagen.path",
    ),
    *grouped(
        template_variables,
        "model.template_variables",
        "variables of the chat template",
        "data.apply_chat_template_kwargs",
        is_mapping=True,
    ),
    *refused("set model.tokenizer", "data.tokenizer"),
    *refused(
        "of a reward manager's arguments there are dapo's max_resp_len and overlong_buffer_cfg; "
        "those that batch hands to the function are custom_reward_function.reward_kwargs.NAME",
        *(f"{head}reward_kwargs.*" for head in ("reward_model.", "reward.")),
    ),
    *refused(
        "give reward=FILE:FUNCTION",
        "reward_manager.module.path",
        "reward_model.reward_loop_module_path",
        "reward_model.sandbox_fusion.url",
        "reward.sandbox_fusion.url",
    ),
    *only("a divergence has a fixed weight", "fixed", names="algorithm.kl_ctrl.type"),
    *only("training samples, it is never greedy", "true", names=_R + "do_sample"),
    *refused("a completion ends where the model ends it", _R + "ignore_eos"),
    *refused("every sampled prompt is trained on", _R + "over_sample_rate"),
    *refused(
        "give reward=model:PATH, a sequence classifier",
        "reward_model.enable",
        "reward.reward_model.enable",
    ),
    *refused(QUANTISED, _A + "qat.enable"),
    *refused("a sampler does prefill and decoding", _R + "disaggregation.enabled"),
    *refused(
        "set actor_rollout_ref.model.lora_rank", _MODEL + "lora.rank", _MODEL + "lora.adapter_path"
    ),
    *refused("tools are tools=file.py:f,g", "data.function_tool_path"),
    *refused("distillation is teacher.path=MODEL with teacher.divergence", "distillation.enabled"),
    *refused(
        "completions are always sampled",
        "skip.rollout.enable",
        "skip.rollout_tq.enable",
        "skip.async_rollout.enable",
    ),
    *refused("give reward=FILE:FUNCTION", "sandbox_fusion.url"),
    *only(
        "steps of the schedule are counted from the first",
        "true",
        names=_A + "optim.zero_indexed_step",
    ),
    *only("asynchronous training is train.max_staleness", "sync", names=_T + "v1.trainer_mode"),
    # ---- what cannot matter here
    *idle(
        "an evaluation fills the sampler's slots: sampling.slots_per_device", "data.val_batch_size"
    ),
    *idle(
        "padding is always removed: prompts and completions fill rows one after the other",
        _MODEL + "use_remove_padding",
        _A + "use_remove_padding",
    ),
    *idle(
        "completions are not sorted over devices by their lengths, which changes no number",
        _T + "balance_batch",
    ),
    *idle("batch.micro_tokens always bounds a micro-batch by its tokens", _A + "use_dynamic_bsz"),
    *idle(
        "scoring takes the micro-batches of training: batch.micro_tokens",
        *(
            f"{head}log_prob_{name}"
            for head in (_R, _REF)
            for name in (
                "micro_batch_size",
                "micro_batch_size_per_gpu",
                "use_dynamic_bsz",
                "max_token_len_per_gpu",
            )
        ),
    ),
    *idle(
        "parameters and gradients stay on the devices; optimizer_offload is optimizer.offload",
        *_under(_A + "fsdp_config.", "param_offload grad_offload"),
        _REF + "fsdp_config.param_offload",
    ),
    *idle(
        "a setting of vLLM; the sampler is the model itself",
        *_under(
            _R,
            """
        enforce_eager free_cache_engine enable_chunked_prefill max_num_batched_tokens
        max_num_seqs max_model_len load_format dtype layered_summon mode""",
        ),
    ),
    *idle("the sampler is the model itself; servers of vLLM are sampler.kind=vllm", _R + "name"),
    *counts_with(
        "algorithm.kl_ctrl.type=adaptive", "algorithm.kl_ctrl.horizon algorithm.kl_ctrl.target_kl"
    ),
    *counts_with("algorithm.use_pf_ppo", "algorithm.pf_ppo.*"),
    *counts_with("policy_loss.loss_mode=dro", _A + "policy_loss.dro_beta"),
    *counts_with(
        "policy_loss.loss_mode=clip_cov",
        *_under(_A + "policy_loss.", "clip_cov_ratio clip_cov_lb clip_cov_ub"),
    ),
    *counts_with(
        "policy_loss.loss_mode=kl_cov", *_under(_A + "policy_loss.", "kl_cov_ratio ppo_kl_coef")
    ),
    *counts_with("a router_replay.mode that is not R3", _A + "router_replay.*"),
    *counts_with(_MODEL + "mtp.enable", _MODEL + "mtp.*", _R + "mtp"),
    *counts_with(_R + "multi_turn.enable", _R + "multi_turn.*", "data.tool_config_path"),
    *counts_with("a rollout.quantization that is not fp8", _R + "quantization_config_file"),
    *counts_with(_R + "skip_rollout", _R + "skip_dump_dir"),
    *counts_with("data.custom_cls.path", "data.custom_cls.*"),
    *counts_with("data.sampler.class_path", "data.sampler.*"),
    *counts_with("data.datagen.path", "data.datagen.*"),
    *counts_with(_A + "qat.enable", _A + "qat.*", _R + "qat"),
    *counts_with(_R + "disaggregation.enabled", _R + "disaggregation.*"),
    *counts_with(_MODEL + "lora.rank", _MODEL + "lora.*"),
    *counts_with("distillation.enabled", "distillation.*"),
    *counts_with("skip.rollout.enable", "skip.*"),
    *counts_with("sandbox_fusion.url", "sandbox_fusion.*"),
    *idle(
        "a round of dynamic sampling is one batch",
        "algorithm.filter_groups.max_inflight_gen_batches",
    ),
    *counts_with("reward_model.enable", "reward_model.*"),
    *counts_with("reward.reward_model.enable", "reward.*"),
    *counts_with("reward_manager.module.path", "reward_manager.*"),
    *idle(
        "a sampler has sampling.slots_per_device completions at once",
        "async_training.concurrent_samples_per_replica",
    ),
    *idle(
        "an evaluation is sampled where the training samples are",
        "async_training.use_trainer_do_validate",
    ),
    *idle("actor_rollout_ref.rollout.n is the size of a group", "rollout.n"),
    *counts_with(
        "async_training.use_dynamic_resource_scheduling", "async_training.dynamic_schedule_*"
    ),
    *derived(
        rules.verl_critic,
        "",
        "with gae an error unless it is the policy's, which the critic takes",
        *_under(
            "critic.",
            """
        ppo_epochs ppo_mini_batch_size grad_clip optim.clip_grad optim.weight_decay optim.betas
        optim.lr_warmup_steps optim.lr_warmup_steps_ratio optim.warmup_style
        optim.lr_scheduler_type optim.min_lr_ratio optim.num_cycles optim.optimizer
        optim.override_optimizer_config loss_agg_mode model.lora_rank""",
        ),
    ),
    *idle(
        "the critic's micro-batches are the policy's: batch.micro_tokens",
        *_under(
            "critic.",
            """
        ppo_micro_batch_size ppo_micro_batch_size_per_gpu ppo_max_token_len_per_gpu
        ppo_infer_max_token_len_per_gpu forward_micro_batch_size forward_micro_batch_size_per_gpu
        forward_max_token_len_per_gpu use_dynamic_bsz""",
        ),
    ),
    *idle(
        "model.remat says for the policy and the critic what is computed again",
        "critic.model.enable_gradient_checkpointing",
        "critic.model.enable_activation_offload",
    ),
    *idle(
        "padding is always removed: prompts and completions fill rows one after the other",
        "critic.model.use_remove_padding",
    ),
    *idle(
        "the critic is split over devices as the policy is: mesh.*",
        *_under(
            "critic.",
            "strategy ulysses_sequence_parallel_size model.fsdp_config.* fsdp.* megatron.*",
        ),
    ),
    *idle(
        "the critic has the policy's tokenizer and shape; only algorithm.adv_estimator=gae has one",
        *_under(
            "critic.",
            "rollout_n shuffle data_loader_seed loss_scale_factor nccl_timeout ppo_* forward_* "
            "optim.* model.* checkpoint.* profiler.* engine.*",
        ),
    ),
    *idle(
        "val_kwargs.temperature, by default 0, decides whether an evaluation is greedy, as in "
        "verl 0.9",
        _R + "val_kwargs.do_sample",
    ),
    *idle("a group's prompt is always computed once", _A + "use_prefix_grouper"),
    *derived(
        rules.sampler_tensor, flags.REPLICA_KEYS, flags.REPLICA, _R + "tensor_model_parallel_size"
    ),
    *idle(flags.SHARDED, _A + "strategy", _A + "fsdp_config.fsdp_size"),
    *derived(rules.sampler_memory, flags.MEMORY_KEYS, flags.MEMORY, _R + "gpu_memory_utilization"),
    *idle(flags.MEMORY, _R + "standalone_gpu_memory_utilization", is_quiet=False),
    *idle("the sampler's log-probs are always kept", _R + "calculate_log_probs"),
    *idle(
        "every group is written to the run's groups/",
        _T + "rollout_data_dir",
        _T + "log_val_generations",
    ),
    *idle("evaluations are written to the run folder", _T + "validation_data_dir"),
    *idle("the reference has the trainer's settings", _REF + "*"),
    *derived(
        rules.verl_gdpo_keys,
        "",
        "its parts are the reward functions; an error with a single one, of whose numbers verl "
        "makes the parts",
        "algorithm.gdpo_reward_keys",
    ),
    *idle(
        "each epoch has new random mini-batches, from seed", _A + "shuffle", _A + "data_loader_seed"
    ),
    *derived(rules.verl_load_contents, "", _ALL_OF_CHECKPOINT, _A + "checkpoint.load_contents"),
    *idle(_ALL_OF_CHECKPOINT, _A + "checkpoint.save_contents"),
    *idle(
        "a setting of verl's engines; it changes no number",
        "actor_rollout_ref.hybrid_engine",
        "actor_rollout_ref.nccl_timeout",
        *_under(
            _R,
            """
        *_size cudagraph_* update_weights_bucket_megabytes enable_prefix_caching scheduling_policy
        disable_log_stats engine_kwargs.* multi_stage_wake_up agent.* checkpoint_engine.*
        skip_tokenizer_init trace.* profiler.* prometheus.*""",
        ),
        *_under(
            _MODEL,
            """
        use_shm trust_remote_code enable_activation_offload use_liger *fused_kernel* tiled_mlp.*""",
        ),
        *_under(
            _A,
            """
        checkpoint.* profiler.* fsdp_config.* use_torch_compile use_fused_kernels
        entropy_from_logits_with_chunking entropy_checkpointing rollout_n
        freeze_vision_tower calculate_entropy calculate_sum_pi_squared sum_pi_squared_checkpointing
        optim.optimizer_impl optim.total_training_steps""",
        ),
    ),
    *idle(
        "a setting for reading data; it changes no number",
        *_under(
            "data.",
            """
        use_shm *_workers trust_remote_code return_* validation_shuffle image_* video_*""",
        ),
    ),
    *idle(
        "a run's folder is trainer.default_local_dir/experiment_name (base_output_directory, "
        "run_name)",
        "hydra.run hydra.sweep hydra.job hydra.output_subdir",
        "hydra.*",
    ),
    *idle(
        "a file's `defaults` name files of its own folder, or verl's own, which are recipe=verl",
        "hydra.searchpath",
    ),
    *idle(
        "Hydra is not used",
        "hydra.mode hydra.verbose hydra.launcher hydra.sweeper hydra.hydra_logging "
        "hydra.job_logging hydra.env hydra.help hydra.hydra_help",
    ),
    *idle(
        "a setting of verl's processes",
        "global_profiler.*",
        "ray_kwargs.*",
        "ray_init.*",
        "transfer_queue.*",
        *_under(
            _T,
            """
        esi_redundant_time default_hdfs_dir del_local_ckpt_after_load max_critic_ckpt_to_keep device
        ray_wait_register_center_timeout use_legacy_worker_impl""",
        ),
    ),
    *idle(
        "algorithm.rollout_correction.bypass_mode says whose log-probs the ratio is to",
        _A + "use_rollout_log_probs",
    ),
    *idle("every draw has its key from seed", _R + "seed", _R + "full_determinism"),
    *idle("devices of the sampler alone are mesh.sampler", _R + "nnodes", _R + "n_gpus_per_node"),
    *idle(
        "only text models",
        "data.audio_key",
        "data.mm_processor_kwargs",
        _R + "router_config_path",
        _R + "moe_load_balance_metrics_interval",
    ),
    *idle(
        "a setting of verl's trainers; it changes no number",
        _A + "entropy_from_logits_chunk_size",
        _A + "pad_to_length",
        _T + "checkpoint_callback_class",
        _T + "use_v1",
        _T + "v1.*",
    ),
    *idle("a name of verl's classes", "*._target_"),
]
