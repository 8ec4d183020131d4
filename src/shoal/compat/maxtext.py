"""The tables of MaxText, with the flat flags of its trainers (base.yml, grpo.yml, rl.yml), and of
Tunix 0.1.7, whose learner MaxText's `train_rl` uses, with the dotted keys of its command line
(tunix/cli/base_config.yaml)."""

from __future__ import annotations

import re
from collections.abc import Callable

from shoal.compat import flags, rules
from shoal.compat.flags import (
    Flag,
    FlagTexts,
    KeyValues,
    derived,
    grouped,
    idle,
    only,
    reads,
    refused,
    renames,
)
from shoal.config.names import QUANTISED
from shoal.config.token import HUB_TOKEN_KEY
from shoal.records import ShoalError

read_clip = flags.read_bounds("grpo_epsilon", "", "epsilon_high")


def read_profiler(name: str, text: str) -> KeyValues:
    """Reads the switch of the profiler: with `xplane` the steps 2, 3 and 4 are profiled, with ''
    none; ShoalError for other texts."""
    if text not in ("xplane", ""):
        raise ShoalError(f"{name}={text}: expected xplane, or nothing for off")
    return {"report.profile": ["2", "3", "4"] if text else []}


def parallelism(key: str) -> Callable[[str, str], KeyValues]:
    """Returns a reader (name, text) -> values of a flag with a number of devices or slices, which
    sets `key`; -1 (auto) becomes 1. The reader raises ShoalError for other numbers below 1."""

    def read(name: str, text: str) -> KeyValues:
        if text == "-1":
            return {key: "1"}
        return {key: str(flags.to_int(name, text))}

    return read


_THREE = ("q_proj", "k_proj", "v_proj")
_PRODUCTS: dict[str, tuple[str, ...]] = {
    "attn/q_einsum": ("q_proj",),
    "attn/kv_einsum": ("k_proj", "v_proj"),
    "attn/qkv_einsum": _THREE,
    "attn/attn_vec_einsum": ("o_proj",),
    **{f"attn/{name}": (name,) for name in (*_THREE, "o_proj")},
    "self_attention/query": ("q_proj",),
    "self_attention/key": ("k_proj",),
    "self_attention/value": ("v_proj",),
    "self_attention/qkv_proj": _THREE,
    "self_attention/out": ("o_proj",),
    **{f"mlp/{name}": (name,) for name in ("gate_proj", "up_proj", "down_proj")},
    "mlp/wi": ("gate_proj", "up_proj"),
    "mlp/wi_0": ("gate_proj",),
    "mlp/wi_1": ("up_proj",),
    "mlp/wo": ("down_proj",),
}
"""Ends of paths in Tunix's and MaxText's models -> the names of the matrices here."""


def read_lora(given: FlagTexts) -> KeyValues:
    """Converts MaxText's flags of an adapter (name -> text) to model.lora.rank, alpha and targets
    (all matrices without lora_module_path). With enable_lora both lora_rank and lora_alpha must be
    given, else it is a ShoalError; without it nothing is set."""
    is_on = flags.to_bool("enable_lora", flags.last_part(given).get("enable_lora", "false"))
    if not is_on:
        return {}
    return read_adapter(given)


def read_adapter(given: FlagTexts) -> KeyValues:
    """Converts an adapter's rank and alpha, which must be given, and module_path, to
    model.lora.rank, alpha and targets. module_path is a regular expression over paths in Tunix's
    and MaxText's models; the matrices that it matches become the targets, all of them without it.
    ShoalError if it matches none, or if rank or alpha is missing. Names of flags may have `lora_`
    at their start."""
    named = {name.removeprefix("lora_"): text for name, text in flags.last_part(given).items()}
    missing = {"rank", "alpha"} - named.keys()
    if missing:
        raise ShoalError(
            f"{next(iter(given))} is given without {min(missing)}: expected rank and alpha"
        )
    pattern = named.get("module_path", ".*")
    targets: list[str] = []  # may name a product twice
    for path, products in _PRODUCTS.items():
        if _is_matched(pattern, path):
            targets += products
    if not targets:
        raise ShoalError(
            f"module_path={pattern}: expected a regular expression for some products; in their "
            "place set model.lora.targets, such as [q_proj,v_proj]"
        )
    if pattern == ".*":
        return flags.lora_values(named["rank"], named["alpha"], "all-linear")
    # `dict.fromkeys` keeps each target once, in order.
    return flags.lora_values(named["rank"], named["alpha"], ",".join(dict.fromkeys(targets)))


def _is_matched(pattern: str, path: str) -> bool:
    """True if a regular expression matches a path that ends with `path` (one of _PRODUCTS) in some
    layer of Tunix's or MaxText's models; False also for an invalid expression."""
    for head in ("layers/0/", "decoder/layers/", "decoder/layers/0/"):
        try:
            if re.fullmatch(pattern, head + path):
                return True
        except re.error:
            return False
    return False


def read_mesh(given: FlagTexts) -> KeyValues:
    """Converts Tunix's meshes, `(FSDP,TENSOR)` for each role, to mesh.fsdp and mesh.tensor.
    ShoalError if roles have different ones, or if one is not two sizes. The mesh of model_config
    counts only if no role has its own."""
    shapes: dict[str, None] = {}  # as texts, each once
    shapes_of_roles: dict[str, None] = {}
    for name, text in given.items():
        shape = text.strip("()[]").replace(" ", "")
        shapes[shape] = None
        if not name.startswith("model_"):
            shapes_of_roles[shape] = None
    wanted = list(shapes_of_roles or shapes)
    sizes = wanted[0].split(",")
    if len(wanted) > 1 or len(sizes) != 2:
        raise ShoalError(
            f"{', '.join(given)}: expected (FSDP,TENSOR), the same for all roles; got "
            f"{tuple(wanted)}"
        )
    return {"mesh.fsdp": sizes[0], "mesh.tensor": sizes[1]}


def _under_lora(name: str) -> tuple[str, str]:
    """Returns the two names of a flag: `rank` -> ("rank", "lora.rank")."""
    return name, f"lora.{name}"


# No norm is passed for sequence-mean-token-sum-norm, so it is seq-mean-token-sum here.
_AGGREGATIONS: dict[str, KeyValues] = {
    "token-mean": {"algorithm.aggregation": "token-mean"},
    "sequence-mean-token-mean": {"algorithm.aggregation": "seq-mean-token-mean"},
    "sequence-mean-token-scale": {"algorithm.aggregation": "seq-mean-token-sum-norm"},
    "seq-mean-token-sum": {"algorithm.aggregation": "seq-mean-token-sum"},
    "sequence-mean-token-sum-norm": {"algorithm.aggregation": "seq-mean-token-sum"},
}
_KL_MODES: dict[str, KeyValues] = {
    "kl": {"algorithm.kl": "k1"},
    "mse_kl": {"algorithm.kl": "k2"},
    "low_var_kl": {"algorithm.kl": "k3"},
}
_ESTIMATORS: dict[str, KeyValues] = {
    "grpo": {"algorithm.advantage": "grpo"},
    "drgrpo": {"algorithm.advantage": "dr_grpo"},
    "rloo": {"algorithm.advantage": "rloo"},
}
_TUNIX_LOSSES: dict[str, KeyValues] = {
    name: {"algorithm.loss": name} for name in ("grpo", "gspo-token")
}
_BOTH = flags.each("algorithm.clip_low", "algorithm.clip_high")
_LOSSES: dict[str, KeyValues] = {
    name: {"algorithm.loss": name} for name in ("grpo", "gspo-token", "gspo")
}
_PROMPTS = "prompts on each of the trainer's devices, each with num_generations completions"

FLAGS: list[Flag] = [
    *renames(
        learning_rate="optimizer.lr",
        num_generations="batch.group_size",
        num_iterations="algorithm.num_epochs",
        model_name="model.name",
        tokenizer_path="model.tokenizer",
        load_parameters_path="model.path",
        save_dtype="dtype",
        hf_model_path="source",
        grpo_beta="algorithm.kl_coef",
        max_prefill_predict_length="sampling.max_prompt_tokens",
        decode_sampling_temperature="sampling.temperature",
        hf_data_split="task.split",
        train_split="task.split",
        eval_split="task.eval_split",
        hf_eval_split="task.eval_split",
        hf_name="task.subset",
        hf_subset="task.subset",
        batch_size="batch.prompts_per_step",
        inference_rollouts="train.weight_sync_interval",
        ici_fsdp_parallelism="mesh.fsdp",
        ici_data_parallelism="mesh.data",
        gradient_clipping_threshold="optimizer.clip_grad_norm",
        adam_b1="optimizer.beta1",
        adam_b2="optimizer.beta2",
        adam_eps="optimizer.eps",
        adam_weight_decay="optimizer.weight_decay",
        max_num_checkpoints_to_keep="checkpoint.keep_last",
        data_shuffle_seed="seed",
        wandb_project_name="report.wandb.project",
        enable_tensorboard="report.tensorboard",
        rl__num_generations="batch.group_size",
        rl__num_iterations="algorithm.num_epochs",
        rl__grpo_beta="algorithm.kl_coef",
        rl__off_policy_steps="train.max_staleness",
    ),
    Flag("scan_layers", ("model.scan_layers",), is_switch=True),
    *derived(
        rules.maxtext_pathways,
        "mesh.pathways",
        "alone: all roles share all devices; MaxText gives the sampler four",
        "use_pathways",
        is_switch=True,
    ),
    reads("decode_sampling_top_k", "sampling.top_k", flags.each("sampling.top_k"), "0 is all"),
    reads(
        "decode_sampling_nucleus_p",
        "sampling.top_p",
        lambda name, text: {"sampling.top_p": "1" if text in ("-1", "0") else text},
        "-1 is 1: all",
    ),
    reads(
        "per_device_batch_size",
        "batch.prompts_per_device",
        lambda name, text: {"batch.prompts_per_device": str(flags.to_int(name, text))},
        _PROMPTS,
        is_quiet=False,
    ),
    *[
        Flag(name, keys, meaning=meaning, group=read_clip)
        for name, keys, meaning in (
            ("grpo_epsilon", ("algorithm.clip_low", "algorithm.clip_high"), "both bounds"),
            ("rl.grpo_epsilon", ("algorithm.clip_low", "algorithm.clip_high"), "both bounds"),
            ("rl.epsilon_high", ("algorithm.clip_high",), "None: as rl.grpo_epsilon"),
        )
    ],
    *[
        reads(name, "algorithm.loss", flags.one_of(_LOSSES), "grpo, gspo-token or gspo")
        for name in ("loss_algo", "rl.loss_algo")
    ],
    reads(
        "rl.loss_agg_mode",
        "algorithm.aggregation",
        flags.one_of(_AGGREGATIONS),
        "as Tunix: sequence-mean-token-scale is seq-mean-token-sum-norm",
    ),
    *derived(
        rules.maxtext_lengths,
        "sampling.max_completion_tokens",
        "prompt and completion together: less the prompt's limit, as finally resolved",
        "max_target_length",
    ),
    *[
        reads(
            name,
            "task.name task.path",
            flags.read_data_set,
            f"a task of ours for gsm8k, openai/gsm8k, ifeval, math; else {own}",
            is_quiet=False,
            has_tail=name == "hf_path",
        )
        for name, own in (
            ("hf_path", "questions and answers as GSM8K's: task=custom with reward= takes others"),
            ("dataset_name", "task=custom with its path"),
        )
    ],
    *[
        reads(
            name,
            "task.files",
            flags.listed("task.files"),
            "files to train on; where task.split names a subset, the split",
        )
        for name in ("hf_data_files", "hf_train_files")
    ],
    reads(
        "profiler",
        "report.profile",
        read_profiler,
        "steps that are traced into the run's profile/; xplane: 2 to 4",
        is_quiet=False,
        keeps_nothing=True,
    ),
    reads(
        "ici_tensor_parallelism",
        "mesh.tensor",
        parallelism("mesh.tensor"),
        "-1 (auto) is 1: parameters are split by fsdp",
        is_quiet=False,
    ),
    reads(
        "ici_context_parallelism",
        "mesh.context",
        parallelism("mesh.context"),
        "-1 (auto) is 1: rows stay whole",
        is_quiet=False,
    ),
    reads(
        "ici_expert_parallelism",
        "mesh.expert",
        parallelism("mesh.expert"),
        "-1 (auto) is 1: each expert is split by fsdp",
        is_quiet=False,
    ),
    *[
        reads(
            f"dcn_{axis}_parallelism",
            f"mesh.dcn_{axis}",
            parallelism(f"mesh.dcn_{axis}"),
            "slices; -1 (auto) is 1",
            is_quiet=False,
        )
        for axis in ("data", "fsdp")
    ],
    *derived(
        rules.maxtext_devices,
        "mesh.trainer",
        "that share of the devices, the first ones",
        "trainer_devices_fraction",
        "TRAINER_DEVICES_FRACTION",
    ),
    *derived(
        rules.maxtext_devices,
        "mesh.sampler",
        "that share of the devices, the last ones",
        "sampler_devices_fraction",
        "SAMPLER_DEVICES_FRACTION",
    ),
    *derived(
        rules.maxtext_devices,
        "mesh.sampler mesh.sampler_tensor",
        "inference_replicas samplers, each over inference_devices_per_replica devices (1 and 4 "
        "where only the other is given)",
        "inference_devices_per_replica",
        "inference_replicas",
        default_only=("mesh.trainer",),
    ),
    *derived(
        rules.sampler_tensor,
        flags.REPLICA_KEYS,
        flags.REPLICA,
        "rollout_tensor_parallelism",
        low_priority=True,
    ),
    *derived(
        rules.maxtext_warmup,
        "optimizer.warmup_steps",
        "that share of the run's updates, rounded down",
        "warmup_steps_fraction",
    ),
    *derived(
        rules.maxtext_schedule_length,
        "optimizer.schedule",
        "-1, or the updates of the run: over them all the learning rate falls",
        "learning_rate_schedule_steps",
    ),
    *derived(
        rules.maxtext_train_rl,
        "steps",
        "batches of an epoch, times train_fraction and num_epoch",
        "num_batches",
    ),
    *derived(
        rules.maxtext_train_rl,
        "train.evaluate_every",
        "off with train_fraction=1.0",
        "eval_interval",
    ),
    *derived(
        rules.maxtext_train_rl,
        "",
        "read with num_batches and eval_interval",
        "train_fraction",
        "num_epoch",
        is_quiet=False,
    ),
    *derived(
        rules.maxtext_test_batches,
        "task.num_eval_questions",
        "batches of questions in an evaluation",
        "num_test_batches",
    ),
    *derived(
        rules.maxtext_test_batches,
        "",
        "read with num_test_batches",
        "eval_batch_size",
        is_quiet=False,
    ),
    reads(
        "dtype",
        "model.dtype",
        flags.one_of({one: {"model.dtype": one} for one in ("bfloat16", "float16", "float32")}),
        "of the computation; masters and optimizer stay float32",
    ),
    reads(
        "stop_strings",
        "sampling.stop",
        flags.listed("sampling.stop"),
        "strings that end a completion",
    ),
    reads(
        "enable_wandb",
        "report.wandb.mode",
        flags.if_true({"report.wandb.mode": "auto"}, {"report.wandb.mode": "off"}),
        "true: online with a login, else offline",
        is_switch=True,
    ),
    reads(
        "remat_policy",
        "model.remat",
        flags.one_of(
            {
                "full": {"model.remat": "full"},
                "minimal": {"model.remat": "dots"},
                "custom": {"model.remat": "auto"},
                "save_dot_with_context_except_mlp": {"model.remat": "dots"},
                "none": {"model.remat": "none"},
                "minimal_offloaded": {"model.remat": "offload"},
                "qkv_proj_offloaded": {"model.remat": "offload"},
            }
        ),
        "full, minimal (dots) or none; custom: auto; minimal_offloaded, qkv_proj_offloaded: "
        "offload",
    ),
    reads(
        "optimizer_memory_host_offload",
        "optimizer.offload",
        flags.OFFLOAD,
        "true: AdamW's moments",
        is_switch=True,
    ),
    *[
        Flag(one, keys, meaning=meaning, group=read_lora, is_switch="enable" in one, is_quiet=False)
        for name, keys, meaning in (
            (
                "enable_lora",
                tuple(flags.LORA.split()[:3]),
                "only an adapter is trained, where it is true",
            ),
            ("lora_rank", ("model.lora.rank",), "counts only with enable_lora=true"),
            ("lora_alpha", ("model.lora.alpha",), "counts only with enable_lora=true"),
            (
                "lora_module_path",
                ("model.lora.targets",),
                "products by MaxText's paths; empty: all",
            ),
        )
        for one in _under_lora(name)
    ],
    # ---- what matters and has no counterpart
    *refused(
        QUANTISED,
        "quantization",
        "use_qwix_quantization",
        "quantize_kvcache",
        "checkpoint_is_quantized",
        "quant_cfg_path",
    ),
    *refused(
        "set num_generations and batch_size; batch.micro_tokens bounds memory",
        "gradient_accumulation_steps",
        accepts=("1",),
    ),
    *refused(
        "shoal plan compiles for devices that you do not have: there it is topology=v5p-8, two "
        "slices v5p-8@2",
        "compile_topology",
        "compile_topology_num_slices",
        accepts=("1",),
    ),
    *refused(
        "another trainer; this one makes groups of samples", "use_dpo", "use_sft", "enable_diloco"
    ),
    *refused(
        "an adapter in PEFT's format is model.lora.path=FOLDER",
        "lora_input_adapters_path",
        "hf_lora_adapter_path",
        *_under_lora("lora_restore_path"),
    ),
    *refused("all weights are trained, or an adapter alone", "trainable_parameters_mask"),
    *refused(QUANTISED, *_under_lora("lora_weight_qtype")),
    *refused("agents and environments", "rl.use_agentic_rollout"),
    *refused("a system prompt; write it into task.template", "rl.system_prompt"),
    *refused(
        "give reward=FILE:FUNCTION",
        "reward_functions_path",
        "reward_functions",
        "dataset_processor_path",
    ),
    *refused("a step is never skipped", "skip_step_on_spikes"),
    *refused("models here have no dropout", "dropout_rate"),
    *refused(
        "an auxiliary loss",
        "z_loss_multiplier",
        "mtp_num_layers",
        "load_balance_loss_weight",
        "indexer_loss_scaling_factor",
    ),
    *refused("resume=FOLDER resumes a run", "load_full_state_path"),
    *refused(
        "only data, fsdp, tensor, context and expert axes, as keys of mesh",
        "dcn_*_parallelism",
        "ici_*_parallelism",
        "rollout_expert_parallelism",
        accepts=("1",),
    ),
    *only("AdamW is the optimizer", "adamw", names="opt_type"),
    *refused(
        "AdamW has optimizer.beta1, beta2, eps and weight_decay", "adam_eps_root", "adamw_mask"
    ),
    Flag("enable_data_shuffling", ("train.shuffle",), is_switch=True),
    *refused("every step has the same number of prompts", "enable_rampup_batch_size"),
    *refused("every step has rows of its own", "reuse_example_batch"),
    *only(
        "training samples by temperature, top_k and top_p; evaluation is greedy",
        "weighted",
        "greedy",
        "nucleus",
        "topk",
        names="decode_sampling_strategy",
    ),
    *only("evaluation is greedy, and sampled for pass@k", "greedy", names="eval_sampling_strategy"),
    *only("each completion is scored on its own", "pass", names="eval_mode"),
    *only("text of the model alone", "causal_lm", names="training_objective"),
    *only("the learning rate falls along a cosine here", "cosine", names="lr_schedule_type"),
    # ---- what differs, with a line each
    *idle("checkpoints are always written", "enable_checkpointing", is_quiet=False),
    *idle(
        "that file is not read: recipe=maxtext sets MaxText's defaults, --config-name or "
        "`defaults` a preset",
        "base_config",
        is_quiet=False,
    ),
    *idle("the learning rate falls to 0 here", "learning_rate_final_fraction", is_quiet=False),
    *idle(
        "the prompt and the rewards of the task are reward.preset's (tunix, maxtext, ...)",
        "reward_*_match",
        "reward_exact_answer",
        "reward_ratio_*",
        "penalty_incorrect_*",
        "reasoning_*_token*",
        "solution_*_token",
        "chat_template_path",
        "data_template_path",
        "chat_template",
        "use_chat_template",
    ),
    # ---- what cannot matter here
    *idle("taken as HF_TOKEN of this process, written nowhere", HUB_TOKEN_KEY),
    *idle(
        "mesh.pathways=true or JAX_PLATFORMS=proxy chooses Pathways",
        "use_pathways_reshard",
        "enable_single_controller",
    ),
    *idle(
        "one process starts no distributed system",
        "skip_jax_distributed_system",
        "jax_distributed_initialization_timeout",
    ),
    *idle("weights are always read a tensor at a time", "lazy_load_tensors", "lazy_load_tensor"),
    *idle("JAX's own choice of devices is taken; JAX_PLATFORMS=cpu chooses the CPU", "hardware"),
    *idle("there is one trainer, and this is it", "use_grpo"),
    *idle(
        "master weights and moments are float32",
        "weight_dtype",
        "grad_dtype",
        "mu_dtype",
        is_quiet=False,
    ),
    *idle(
        "an evaluation takes its questions from task.eval_split",
        "test_batch_start_index",
        "eval_dataset_name",
        "num_eval_passes",
        "eval_corr_lst",
        "eval_make_lst",
        "generation_configs.*",
        "eval_start_step",
        "eval_steps",
        "eval_per_device_batch_size",
        "eval_data_columns",
        "eval_image_column",
        "target_eval_loss",
    ),
    *idle(
        "the model's shape comes with its checkpoint",
        """
        decoder_block base_* head_dim global_* local_* attention_* share_kv_projections mlp_*
        num_experts* normalization_layer_epsilon vocab_size logits_* normalize_embedding_logits
        rope_* *rope_proportion mscale beta_fast beta_slow max_position_embeddings
        original_max_position_embeddings partial_rotary_factor trainable_position_size
        use_untrainable_positional_embedding use_iota_embed use_qk_norm* use_qk_clip
        qk_clip_threshold q_lora_rank kv_lora_rank o_lora_rank o_groups qk_*_head_dim
        qk_norm_with_scale v_head_dim v_norm_with_scale use_post_* sliding_window_size
        chunk_attn_window_size attn_logits_soft_cap final_logits_soft_cap moba* indexer_*
        use_indexer compress* gdn_* mhc_* enable_mhc_lite use_mhc_* engram* sinkhorn_iterations
        n_routing_groups topk_routing_group first_num_* shared_experts routed_* norm_topk_prob
        interleave_moe_layer_step nope_layer_interval temperature_tuning inhomogeneous_layer_*
        hidden_size_per_layer_input vocab_size_per_layer_input num_kv_shared_layers
        use_double_wide_mlp fused_qkv fused_mlp mla_* use_mrope mrope_section mtp_* dense_init_scale
        causal_block_size override_model_config position_id_per_seconds use_sequential_layers
        """,
    ),
    *idle(
        "text only",
        """
        use_multimodal use_audio* use_audio_in_video freeze_*_encoder_params *_for_vit *_for_audio
        *_placeholder image_path video_* audio_path dtype_mm max_num_images_per_example
        vision_output_length *_image_column
        """,
    ),
    *idle(
        "kernels, compilation and layout are chosen here, and change no number beyond rounding",
        """
        attention sa_* local_sa_* use_tokamax_* use_jax_splash use_splash_scheduler
        local_use_splash_scheduler use_ragged_* ragged_* w?_tile_* megablox sparse_matmul
        capacity_factor use_gmm_v2 merge_gating_gmm use_custom_sort_vjp use_random_routing
        use_ring_of_experts num_moe_* moe_* use_gather_mosaic_kernel use_batch_split_schedule
        batch_split_factor matmul_precision activations_in_float32 float32_* cast_logits_to_fp32
        cost_estimate_* dq_reduction_steps use_max_logit_estimate force_* fused_* context context_*
        decoder_layer_input *_proj mlpw* query_wa_proj kv_wa_proj attention_out *_offload*
        param_scan_axis scan_* num_layers_per_pipeline_stage num_pipeline_* pipeline_*
        set_remat_policy_* te_* shard_* shardy sharding_tolerance logical_axis_rules* mesh_axes
        data_sharding input_data_sharding_* custom_mesh* allow_split_physical_axes
        optimize_mesh_for_* remove_size_one_* subslice_shape ulysses_* override_logical_axis_rules
        num_slices dense_fsdp_* use_2d_fsdp_sharding check_vma num_vocab_tiling vocab_tiling_*
        enable_nnx pure_nnx* use_sliced_mla_proj compile* internal_compile* jax_*
        constant_bound_config quantization_local_* replicate_quant_scale kv_quant_* *_quantization_*
        save_quantized_*
        use_manual_quantization weight_sparsity_* experimental_sa_* ring_scan_unroll
        global_parameter_scale prefill_* ar_cache_axis_order compute_axis_order reshape_q
        use_chunked_prefill enable_prefix_caching prefix_caching_* stack_prefill_result_cache
        enable_padding_causal_mask record_internal_nn_metrics
        """,
    ),
    *derived(rules.sampler_memory, flags.MEMORY_KEYS, flags.MEMORY, "hbm_utilization_vllm"),
    *idle(
        "the sampler is the model itself, not vLLM, and shares the trainer's program",
        """
        kv_cache_buffer swap_space_vllm_gb vllm_* enable_dp_attention max_num_batched_tokens
        max_num_seqs async_scheduling rollout_data_parallelism rollout_subslice_shape
        rollout_enable_single_controller rollout_micro_batch_size train_micro_batch_size
        micro_batch_size num_trainer_slices num_samplers_slices chips_per_vm rl.max_concurrency
        rl.reshard_chunk_size inference_* multi_sampling return_log_prob enable_model_warmup
        enable_llm_inference_pool autoregressive_decode_assert load_from_prefill_dir model_call_mode
        generate_slice
        """,
    ),
    *idle(
        "data come from task.*: hub id, jsonl or parquet",
        """
        dataset_type dataset_path hf_data_dir hf_eval_files grain_* olmo_* colocated_python_*
        train_data_columns tokenizer_type tokenize_* add_bos add_eos use_truncation max_corpus_chars
        packing default_prompt prompt generate_padding_* max_segments_per_seq
        expansion_factor_real_data
        sft_* enable_rampup_* per_device_batch_size_* global_rampup_samples
        """,
    ),
    *idle(
        "checkpoints are written as checkpoint.* says",
        """
        async_checkpointing save_checkpoint_on_* enable_continuous_checkpointing
        checkpoint_storage_* checkpoint_storage_use_ocdbt checkpoint_storage_use_zarr3
        checkpoint_storage_concurrent_gb checkpoint_storage_target_data_file_size_bytes
        checkpoint_todelete_* checkpoint_conversion_fn convert_checkpoint_if_possible
        source_checkpoint_layout enable_single_replica_* enable_orbax_v1 enable_emergency_checkpoint
        enable_multi_tier_* multi_tier_* mtc_* local_checkpoint_* enable_autocheckpoint
        enable_checkpoint_* save_config_to_gcs
        """,
    ),
    *idle(
        "logs, profiles and monitoring are report.*",
        """
        log_period log_config debug debug.* debug_* gcs_* metrics_file enable_tunix_perf_metrics
        wandb_run_name use_vertex_* vertex_* enable_goodput_* monitor_* goodput_*
        enable_pathways_goodput step_deviation_* enable_gcp_* enable_goodput_recording
        monitor_goodput goodput_upload_interval_seconds enable_gcp_goodput_metrics
        monitor_step_time_deviation
        report_* heartbeat_* profile_* skip_first_n_steps_for_profiler profiler_steps
        hide_profiler_* upload_all_* enable_tpu_* tpu_* managed_* dump_* xprof_* enable_jax_profiler
        jax_profiler_port prometheus_port max_checkify write_estimator_result
        block_for_accurate_timing max_inflight_computations
        """,
    ),
    *idle(
        "it belongs to another trainer of MaxText",
        """
        distill_* diloco_* dcn_bandwidth_* enable_streaming_diloco num_diloco_fragments
        num_communication_* communication_* elastic_* block_diffusion_* muon_* skip_step_* wsd_*
        enable_dropout init_weights_seed abort_on_* math_verify_*
        """,
    ),
]

TUNIX_FLAGS: list[Flag] = [
    *renames(
        grpo_config__num_generations="batch.group_size",
        grpo_config__num_iterations="algorithm.num_epochs",
        grpo_config__beta="algorithm.kl_coef",
        rollout_config__max_prompt_length="sampling.max_prompt_tokens",
        rollout_config__total_generation_steps="sampling.max_completion_tokens",
        rollout_config__temperature="sampling.temperature",
        rollout_config__top_p="sampling.top_p",
        rollout_config__top_k="sampling.top_k",
        model_config__model_id="model.path",
        tokenizer_config__tokenizer_path="model.tokenizer",
        rl_training_config__max_steps="steps",
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
        rl_training_config__actor_optimizer_config__max_grad_norm="optimizer.clip_grad_norm",
    ),
    reads("grpo_config.epsilon", "algorithm.clip_low algorithm.clip_high", _BOTH, "both bounds"),
    reads(
        "grpo_config.loss_algo",
        "algorithm.loss",
        flags.one_of(_TUNIX_LOSSES),
        "the loss of that name",
    ),
    reads(
        "grpo_config.loss_agg_mode",
        "algorithm.aggregation",
        flags.one_of(_AGGREGATIONS),
        "sequence-mean-token-scale: seq-mean-token-sum-norm",
    ),
    reads(
        "grpo_config.kl_loss_mode",
        "algorithm.kl",
        flags.one_of(_KL_MODES),
        "kl: k1; mse_kl: k2; low_var_kl: k3",
    ),
    reads(
        "grpo_config.advantage_estimator",
        "algorithm.advantage",
        flags.one_of(_ESTIMATORS),
        "grpo, rloo; drgrpo: dr_grpo",
    ),
    reads(
        "grpo_config.kl_clamp_value",
        "algorithm.kl_clamp_value",
        flags.optional("algorithm.kl_clamp_value"),
        "None is 0: no clamp",
        keeps_nothing=True,
    ),
    *[
        Flag(
            f"{role}.lora_config.{name}",
            (f"model.lora.{key}",),
            meaning=meaning,
            group=read_adapter,
        )
        for role in ("model_config", "actor_model_config")
        for name, key, meaning in (
            ("rank", "rank", "only an adapter is trained; with alpha"),
            ("alpha", "alpha", "with rank"),
            ("module_path", "targets", "products by Tunix's paths; by default all"),
        )
    ],
    *refused(
        QUANTISED,
        "model_config.lora_config.weight_qtype",
        "actor_model_config.lora_config.weight_qtype",
    ),
    *refused(
        "the reference is the model without its adapter", "reference_model_config.lora_config.*"
    ),
    *grouped(
        read_mesh,
        "mesh.fsdp mesh.tensor",
        "(2,4): fsdp and tensor, one mesh of all roles",
        *(f"{role}model_config.mesh.shape" for role in ("", "actor_", "reference_", "rollout_")),
    ),
    *only(
        "give reward=FILE:FUNCTION; Tunix's own rewards are reward.preset=tunix",
        "['tunix/cli/reward_fn/gsm8k.py']",
        "[tunix/cli/reward_fn/gsm8k.py]",
        names="reward_functions",
    ),
    *refused("give task=TASK or task.path=FILE", "data_module"),
    *only(
        "AdamW is the optimizer",
        "adamw",
        names="rl_training_config.actor_optimizer_config.opt_type",
    ),
    *only(
        "the learning rate warms up and falls to 0: optimizer.schedule=cosine",
        "warmup_cosine_decay_schedule",
        names="rl_training_config.actor_optimizer_config.schedule_type",
    ),
    *derived(
        rules.maxtext_schedule_length,
        "optimizer.schedule",
        "0, or the updates of the run: over them all the learning rate falls",
        "rl_training_config.actor_optimizer_config.decay_steps",
    ),
    *only(
        "the learning rate rises from 0 and falls to 0",
        "0.0",
        "0",
        names="rl_training_config.actor_optimizer_config.init_value "
        "rl_training_config.actor_optimizer_config.end_value",
    ),
    *idle(
        "devices are shared by mesh.*, weights come from model.path",
        "actor_model_config.*",
        "reference_model_config.*",
        "rollout_model_config.*",
        "critic_model_config",
        "model_config.*",
    ),
    *idle(
        "it has no effect on what is computed here",
        "rl_training_config.*",
        "training_config.*",
        "optimizer_config.*",
        "ppo_config.*",
        "tokenizer_config.*",
        "rollout_engine",
        "vllm_config*",
        "sglang_jax_config*",
        "offload_to_cpu",
        "verl_compatible",
        "data_source",
        "data_directory",
        "apply_chat_template_to_dataset",
        "tfds_download",
    ),
]
