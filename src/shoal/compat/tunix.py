"""Tunix 0.1.7: the dotted keys of its command line (tunix/cli/base_config.yaml)."""

from __future__ import annotations

from shoal.compat.flags import LORA, Flag, Values, choice, each, idle, only, optional, reads, refused, renames

AGGREGATIONS: dict[str, Values] = {
    "token-mean": {"algorithm.aggregation": "token-mean"},
    "sequence-mean-token-mean": {"algorithm.aggregation": "seq-mean-token-mean"},
    "sequence-mean-token-scale": {"algorithm.aggregation": "seq-mean-token-sum-norm"},
    "seq-mean-token-sum": {"algorithm.aggregation": "seq-mean-token-sum"},
    "sequence-mean-token-sum-norm": {"algorithm.aggregation": "seq-mean-token-sum"}}  # it passes no norm
KL_MODES: dict[str, Values] = {"kl": {"algorithm.kl": "k1"}, "mse_kl": {"algorithm.kl": "k2"},
                               "low_var_kl": {"algorithm.kl": "k3"}}
ESTIMATORS: dict[str, Values] = {"grpo": {"algorithm.advantage": "grpo"}, "drgrpo": {"algorithm.advantage": "dr_grpo"},
                                 "rloo": {"algorithm.advantage": "rloo"}}
LOSSES: dict[str, Values] = {name: {"algorithm.loss": name} for name in ("grpo", "gspo-token")}
BOTH = each("algorithm.clip_low", "algorithm.clip_high")

FLAGS: list[Flag] = [
    *renames(
        grpo_config__num_generations="batch.group_size", grpo_config__num_iterations="algorithm.num_epochs",
        grpo_config__beta="algorithm.kl_coef", rollout_config__max_prompt_length="sampling.max_prompt_tokens",
        rollout_config__total_generation_steps="sampling.max_completion_tokens",
        rollout_config__temperature="sampling.temperature", rollout_config__top_p="sampling.top_p",
        rollout_config__top_k="sampling.top_k", model_config__model_id="model.path",
        tokenizer_config__tokenizer_path="model.tokenizer", rl_training_config__max_steps="steps",
        rl_training_config__eval_every_n_steps="train.evaluate_every",
        rl_training_config__checkpoint_root_directory="base_output_directory",
        rl_training_config__checkpointing_options__max_to_keep="checkpoint.keep_last",
        rl_training_config__checkpointing_options__save_interval_steps="checkpoint.every",
        rl_training_config__metrics_logging_options__project_name="report.wandb.project",
        rl_training_config__actor_optimizer_config__peak_value="optimizer.lr",
        rl_training_config__actor_optimizer_config__b1="optimizer.beta1",
        rl_training_config__actor_optimizer_config__b2="optimizer.beta2",
        rl_training_config__actor_optimizer_config__weight_decay="optimizer.weight_decay",
        rl_training_config__actor_optimizer_config__warmup_steps="optimizer.warmup_steps",
        rl_training_config__actor_optimizer_config__max_grad_norm="optimizer.clip_grad_norm"),
    reads("grpo_config.epsilon", "algorithm.clip_low algorithm.clip_high", BOTH, "both bounds"),
    reads("grpo_config.loss_algo", "algorithm.loss", choice(LOSSES), "the loss of that name"),
    reads("grpo_config.loss_agg_mode", "algorithm.aggregation", choice(AGGREGATIONS),
          "sequence-mean-token-scale: seq-mean-token-sum-norm"),
    reads("grpo_config.kl_loss_mode", "algorithm.kl", choice(KL_MODES), "kl: k1; mse_kl: k2; low_var_kl: k3"),
    reads("grpo_config.advantage_estimator", "algorithm.advantage", choice(ESTIMATORS), "grpo, rloo; drgrpo: dr_grpo"),
    reads("grpo_config.kl_clamp_value", "algorithm.kl_clamp_value", optional("algorithm.kl_clamp_value"),
          "None is 0: no clamp", keeps_nothing=True),
    *refused(LORA, "*_model_config.lora_config.*", "model_config.lora_config.*"),
    *only("AdamW is the optimizer", "adamw", names="rl_training_config.actor_optimizer_config.opt_type"),
    *only("the learning rate warms up and falls to 0: optimizer.schedule=cosine", "warmup_cosine_decay_schedule",
          names="rl_training_config.actor_optimizer_config.schedule_type"),
    *idle("devices are shared by mesh.*, weights come from model.path", "actor_model_config.*",
          "reference_model_config.*", "rollout_model_config.*", "critic_model_config", "model_config.*"),
    *idle("it has no effect on what is computed here", "rl_training_config.*", "training_config.*",
          "optimizer_config.*", "ppo_config.*", "tokenizer_config.*", "rollout_engine", "vllm_config*",
          "sglang_jax_config*",
          "offload_to_cpu", "verl_compatible", "reward_functions", "data_source", "data_directory", "data_module",
          "apply_chat_template_to_dataset", "tfds_download"),
]
