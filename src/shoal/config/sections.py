"""The sections of keys that a user can set, with defaults and meanings: frozen dataclasses.

The comment line under a field is its help text. A key stands here only when something reads it (a test looks).
Building a section checks it; a bad value raises `ShoalError` naming the key, what came and what is allowed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from shoal.types import ShoalError


def require(condition: bool, key: str, value: object, wanted: str) -> None:
    """Raises the one error form for a value out of its range."""
    if not condition:
        raise ShoalError(f"{key}={value!r}: expected {wanted}")


@dataclass(frozen=True)
class ModelSection:
    path: str = "tiny"
    """A folder or hub id in Hugging Face format, or `tiny`: the packaged model that learns word problems."""
    name: str = ""
    """Name of the architecture (llama3.1-8b, ...) where the checkpoint does not tell it: one of MaxText's. Alone, it
    is the model of that name on the hub."""
    tokenizer: str = ""
    """A folder or hub id of the tokenizer, in place of the model's own."""
    scan_layers: bool = True
    """MaxText checkpoints only: whether their layers are stacked in one array each."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Type of the computation; auto is float32 on CPU, bfloat16 elsewhere. Masters and optimizer stay float32."""
    template: str = ""
    """A Jinja chat template, or a file that holds one, in place of the tokenizer's own."""
    remat: Literal["auto", "none", "dots", "full"] = "auto"
    """What the backward pass computes again: nothing, all but products with weights, or whole blocks. auto is dots,
    and full where a micro-batch's activations would take over 2 GiB."""


@dataclass(frozen=True)
class TaskSection:
    name: str = "words"
    """words | gsm8k | math | ifeval | countdown, or custom: one's own data at task.path."""
    path: str = ""
    """A local jsonl or parquet file, a folder of them, or a hub id, in place of the task's own data."""
    subset: str = ""
    """Subset (configuration) of a data set on the hub; empty for its only or default one."""
    files: tuple[str, ...] = ()
    """Files of a folder or a data set on the hub to train on (patterns allowed), in place of those of task.split."""
    columns: tuple[str, ...] = ()
    """Columns under other names, as `wanted=theirs`: [prompt=question,answer=final]."""
    template: str = ""
    """Text (or a file that holds it) that makes the prompt from a row's columns: `Solve: {question}`."""
    split: str = "train"
    """The split to train on."""
    eval_split: str = "test"
    """The split to evaluate on."""
    num_questions: int = 500
    """Held-out questions in an evaluation; 0 for all."""
    num_steps: int = 3
    """words: operations a problem needs."""
    max_value: int = 99
    """words, countdown: the largest number that occurs."""
    num_numbers: int = 4
    """countdown: numbers to reach the target with."""

    def __post_init__(self) -> None:
        require(self.num_questions >= 0, "task.num_questions", self.num_questions, "0 (all) or more")
        require(1 <= self.num_steps <= 8, "task.num_steps", self.num_steps, "1 to 8")
        require(self.max_value >= 20, "task.max_value", self.max_value, "20 or more")
        require(2 <= self.num_numbers <= 6, "task.num_numbers", self.num_numbers, "2 to 6")
        for entry in self.columns:
            wanted, equals, theirs = entry.partition("=")
            require(bool(equals and wanted.strip() and theirs.strip()), "task.columns", entry, "wanted=theirs")


@dataclass(frozen=True)
class RewardSection:
    functions: tuple[str, ...] = ()
    """Reward functions as `file.py:function`; empty for the task's own."""
    weights: tuple[float, ...] = ()
    """One weight a function; empty for 1.0 each (or the task's own)."""
    preset: Literal["shoal", "maxtext", "tunix", "torchrl", "verl"] = "shoal"
    """gsm8k: whose prompt and rewards are used."""
    overlong_buffer_tokens: int = 0
    """DAPO's overlong penalty: over this many last tokens before sampling.max_completion_tokens the reward falls
    linearly; -1 for a fifth of them, as in the paper, 0 for none."""
    overlong_penalty: float = 1.0
    """What a completion at the limit loses of its reward by it."""
    timeout_seconds: float = 60.0
    """Time limit of one call of a reward function; its process is killed at the end of it."""
    memory_gib: float = 4.0
    """Memory that a reward process may take beyond what it starts with; 0 for no limit."""
    on_error: Literal["error", "zero", "skip"] = "error"
    """When a function raises, hangs, dies or returns NaN for a completion: end the run, score it 0, or take that
    completion out of its group (mean, deviation and loss). Each is counted and shown with its example."""
    max_failed_share: float = 0.5
    """With on_error=zero or skip: the run ends with an error where a function failed for more than this share of 64
    completions, the last that it was called for; 1 for no limit."""
    workers: int = 2
    """Processes that call reward functions; 0 calls them in this one, without limits of time and memory."""
    call: Literal["group", "step"] = "group"
    """Call functions as soon as a group is drawn, while sampling goes on, or once for all groups of a step."""

    def __post_init__(self) -> None:
        require(self.timeout_seconds > 0, "reward.timeout_seconds", self.timeout_seconds, "a number above 0")
        require(0 <= self.max_failed_share <= 1, "reward.max_failed_share", self.max_failed_share, "a share, 0 to 1")
        require(self.memory_gib >= 0, "reward.memory_gib", self.memory_gib, "0 (no limit) or more")
        require(self.overlong_buffer_tokens >= -1, "reward.overlong_buffer_tokens", self.overlong_buffer_tokens,
                "-1 (a fifth), 0 (off) or more")
        require(self.overlong_penalty >= 0, "reward.overlong_penalty", self.overlong_penalty, "0 or more")
        require(self.workers >= 0, "reward.workers", self.workers, "0 (in this process) or more")
        if self.weights and self.functions:
            require(len(self.weights) == len(self.functions), "reward.weights", self.weights,
                    f"{len(self.functions)} numbers, one for each of reward.functions")


@dataclass(frozen=True)
class SamplingSection:
    temperature: float = 1.0
    """Temperature of training samples; the trainer's log-probs use the same."""
    top_k: int = 0
    """Keep the k likeliest tokens; 0 for all. What training samples were kept from is replayed by the trainer."""
    top_p: float = 1.0
    """Keep the smallest set of tokens with this mass; 1 for all."""
    min_p: float = 0.0
    """Keep tokens at least this likely, relative to the likeliest; 0 for all."""
    max_support: int = 128
    """In training with top_k, top_p or min_p, at most so many of the likeliest tokens are kept at each place: the
    kept ones are stored, so that the trainer's log-probs are over the same set."""
    stop: tuple[str, ...] = ()
    """Strings that end a completion."""
    max_prompt_tokens: int = 256
    """Longest prompt."""
    max_completion_tokens: int = 64
    """Longest completion; one that reaches it is cut, and counted."""
    long_prompts: Literal["drop", "error"] = "drop"
    """A prompt over the limit leaves the data, counted, or is an error. It is never cut."""
    slots_per_device: int = 0
    """Completions drawn at once on each device; 0 for a whole step's."""

    def __post_init__(self) -> None:
        require(self.temperature >= 0, "sampling.temperature", self.temperature, "0 (greedy) or more")
        require(self.top_k >= 0, "sampling.top_k", self.top_k, "0 (off) or more")
        require(0 < self.top_p <= 1, "sampling.top_p", self.top_p, "a number in (0, 1]")
        require(0 <= self.min_p < 1, "sampling.min_p", self.min_p, "a number in [0, 1)")
        require(self.max_support >= 1, "sampling.max_support", self.max_support, "1 or more")
        require(self.max_prompt_tokens >= 1, "sampling.max_prompt_tokens", self.max_prompt_tokens, "1 or more")
        require(self.max_completion_tokens >= 1, "sampling.max_completion_tokens", self.max_completion_tokens,
                "1 or more")
        require(self.slots_per_device >= 0, "sampling.slots_per_device", self.slots_per_device, "0 (auto) or more")


@dataclass(frozen=True)
class AlgorithmSection:
    name: str = ""
    """A paper's settings, under your own keys: dapo, dr_grpo, gspo, cispo, ... (`shoal help train algorithm`)."""
    advantage: Literal["grpo", "dr_grpo", "rloo", "batch_std", "reinforce++", "reinforce++-baseline", "maxrl", "gdpo",
                       "none"] = "grpo"
    """How rewards of a group become advantages; none: rewards have no part (a teacher alone)."""
    std_ddof: int = 1
    """Degrees of freedom taken off in the standard deviation (TRL, Tunix 1; MaxText 0)."""
    std_eps: float = 1e-4
    """Added to the standard deviation."""
    std_eps_mode: Literal["add", "max"] = "add"
    """Whether std_eps is added to the standard deviation or is the least that it is taken for (TorchRL)."""
    whiten_over: Literal["completions", "tokens"] = "completions"
    """reinforce++, reinforce++-baseline, gdpo: whether each completion counts once in the step's mean and deviation, or
    once a token (verl)."""
    loss: Literal["grpo", "gspo", "gspo-token", "cispo", "gmpo", "sapo"] = "grpo"
    """The policy loss."""
    clip_low: float = 0.2
    """The ratio is clipped below 1 - clip_low (gmpo: exp(-clip_low))."""
    clip_high: float = 0.2
    """The ratio is clipped above 1 + clip_high (gmpo: exp(clip_high); cispo: by cispo_bound)."""
    clip_dual: float = 0.0
    """Dual clip: where the advantage is negative the loss is at most this times its size; 0 for off."""
    cispo_bound: Literal["paper", "absolute", "both"] = "paper"
    """cispo: weights at most 1 + clip_high (the paper), at most clip_high itself (TRL), or also at least 1 - clip_low
    (verl)."""
    sapo_positive: float = 1.0
    """sapo: temperature of the gate where the advantage is positive."""
    sapo_negative: float = 1.05
    """sapo: temperature of the gate where it is negative."""
    kl: Literal["k1", "k2", "k3"] = "k3"
    """Estimator of the divergence from the reference."""
    kl_coef: float = 0.0
    """Weight of that divergence; at 0 no reference is kept."""
    kl_placement: Literal["loss", "reward"] = "loss"
    """Whether the divergence is a term of the loss or taken off the reward, summed over a completion."""
    kl_clamp_input: float = 0.0
    """Largest size of the difference of log-probs that the estimator sees (verl 20); 0 for no limit."""
    kl_clamp_value: float = 0.0
    """Largest size of a token's estimate (verl 10); 0 for no limit."""
    kl_weighted: bool = False
    """Multiply the estimate in the loss by the ratio exp(lp - old), gradient included (TRL)."""
    entropy_coef: float = 0.0
    """Weight of the entropy that is taken off the loss."""
    aggregation: Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm",
                         "prompt-mean"] = "token-mean"
    """How token losses become one number, over the whole update's batch."""
    aggregation_tokens: int = 0
    """seq-mean-token-sum-norm: the constant length to divide by; 0 for sampling.max_completion_tokens."""
    correction: Literal["none", "tis", "mis", "icepop"] = "none"
    """Weights w = exp(old - sampler) for the difference of sampler and trainer. tis: w clipped to [correction_floor,
    correction_cap]; mis, icepop: 0 outside these bounds, else w."""
    correction_level: Literal["token", "sequence", "geometric"] = "token"
    """Whether that weight is a token's, a completion's product, or its geometric mean."""
    correction_cap: float = 2.0
    """Upper bound of the weight; inf for none."""
    correction_floor: float = 0.0
    """Lower bound of the weight; 0 for none, with icepop for its paper's 0.5."""
    match_sampling_support: bool = True
    """Compute log-probs over the tokens that top_k, top_p and min_p had kept; without, the ratio is biased."""
    mask_truncated: bool = False
    """Leave completions that were cut at the limit out of the loss; they stay in mean and deviation."""
    dynamic_sampling: bool = False
    """DAPO: ask for further groups in place of those without variance, until the step is full."""
    dynamic_sampling_by: Literal["correct", "reward"] = "correct"
    """What has to vary in a group there. correct: what the task's check says of its completions (the paper: some are
    right, some wrong), or without a check the reward less the overlong penalty; reward: the whole reward."""
    max_sampling_rounds: int = 10
    """Most times that a step asks for further groups; what is missing then stays without variance."""
    num_epochs: int = 1
    """Passes over each step's groups."""
    num_minibatches: int = 1
    """Updates in each pass."""
    zero_std_groups: Literal["include", "exclude"] = "include"
    """Whether completions of groups without variance count in the denominator (the papers) or not (DAPO)."""

    def __post_init__(self) -> None:
        require(self.std_ddof in (0, 1), "algorithm.std_ddof", self.std_ddof, "0 or 1")
        require(0 <= self.clip_low <= 1 or self.loss == "gmpo", "algorithm.clip_low", self.clip_low,
                "a number in [0, 1]")
        for name in ("std_eps", "clip_low", "clip_high", "kl_coef", "kl_clamp_input", "kl_clamp_value", "entropy_coef",
                     "correction_floor", "aggregation_tokens"):
            require(getattr(self, name) >= 0, f"algorithm.{name}", getattr(self, name), "0 or more")
        for name in ("sapo_positive", "sapo_negative", "correction_cap"):
            require(getattr(self, name) > 0, f"algorithm.{name}", getattr(self, name), "a number above 0")
        for name in ("num_epochs", "num_minibatches", "max_sampling_rounds"):
            require(getattr(self, name) >= 1, f"algorithm.{name}", getattr(self, name), "1 or more")
        require(self.clip_dual == 0 or self.clip_dual > 1, "algorithm.clip_dual", self.clip_dual, "0 (off) or above 1")
        require(self.correction_floor <= self.correction_cap, "algorithm.correction_floor", self.correction_floor,
                f"at most algorithm.correction_cap ({self.correction_cap:g})")


@dataclass(frozen=True)
class TeacherSection:
    path: str = ""
    """A teacher checkpoint with the model's vocabulary: its log-prob minus the policy's is added to each token's
    advantage (on-policy distillation); empty for none. With algorithm.advantage=none it is the only one."""
    coef: float = 1.0
    """Weight of that term."""

    def __post_init__(self) -> None:
        require(self.coef >= 0, "teacher.coef", self.coef, "0 or more")


@dataclass(frozen=True)
class OptimizerSection:
    lr: float = 5e-5
    """Peak learning rate of AdamW."""
    warmup_steps: int = 5
    """Updates over which the learning rate rises from 0."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """What the learning rate does after warm-up, down to 0 at the last update."""
    weight_decay: float = 0.0
    """Decoupled weight decay; norms and biases are exempt."""
    clip_grad_norm: float = 1.0
    """Largest global norm of a gradient; 0 for no limit."""
    beta1: float = 0.9
    """Decay of AdamW's first moment."""
    beta2: float = 0.95
    """Decay of AdamW's second moment."""
    eps: float = 1e-8
    """Added to the root of AdamW's second moment."""

    def __post_init__(self) -> None:
        require(self.lr >= 0, "optimizer.lr", self.lr, "0 or more")
        require(self.eps >= 0, "optimizer.eps", self.eps, "0 or more")
        require(self.warmup_steps >= 0, "optimizer.warmup_steps", self.warmup_steps, "0 or more")
        require(self.weight_decay >= 0, "optimizer.weight_decay", self.weight_decay, "0 or more")
        require(self.clip_grad_norm >= 0, "optimizer.clip_grad_norm", self.clip_grad_norm, "0 (off) or more")
        require(0 <= self.beta1 < 1, "optimizer.beta1", self.beta1, "a number in [0, 1)")
        require(0 <= self.beta2 < 1, "optimizer.beta2", self.beta2, "a number in [0, 1)")


@dataclass(frozen=True)
class BatchSection:
    prompts_per_step: int = 32
    """P: prompts a step."""
    prompts_per_device: int = 0
    """P for each of the trainer's devices, in place of prompts_per_step; 0 for off."""
    group_size: int = 8
    """G: completions a prompt."""
    micro_tokens: int = 2048
    """Tokens a device computes at once in the update, padding included (one completion with its prompt at least); it
    decides memory, never the result."""

    def __post_init__(self) -> None:
        require(self.prompts_per_device >= 0, "batch.prompts_per_device", self.prompts_per_device, "0 (off) or more")
        require(self.prompts_per_step >= 1, "batch.prompts_per_step", self.prompts_per_step, "1 or more")
        require(self.group_size >= 2, "batch.group_size", self.group_size,
                "2 or more: a group of one has nothing to be compared with")
        require(self.micro_tokens >= 1, "batch.micro_tokens", self.micro_tokens, "1 or more")


@dataclass(frozen=True)
class TrainSection:
    evaluate_every: int = 0
    """Steps between evaluations; 0 for only before and after."""
    pass_k: int = -1
    """Completions a question for pass@k in the first and the last evaluation; 0 for off; -1 for 8 with task=words, else
    off."""
    weight_sync_interval: int = 1
    """Steps between two publications of weights to the sampler; n above 1 means samples up to n-1 versions old."""
    max_staleness: int = -1
    """Most versions that samples may be older than the trainer's weights, at least weight_sync_interval - 1; -1 for
    just that."""
    retire_above: float = 1.0
    """Prompts of a higher pass rate are not drawn again, and the harder the others are the more often they are; 1 for
    off. Rates act from the next epoch on."""

    def __post_init__(self) -> None:
        require(0 <= self.retire_above <= 1, "train.retire_above", self.retire_above, "a number in [0, 1], 1 for off")
        require(self.evaluate_every >= 0, "train.evaluate_every", self.evaluate_every, "0 (only at the ends) or more")
        require(self.pass_k >= -1, "train.pass_k", self.pass_k, "-1 (auto), 0 (off) or more")
        require(self.weight_sync_interval >= 1, "train.weight_sync_interval", self.weight_sync_interval, "1 or more")
        require(self.max_staleness == -1 or self.max_staleness >= self.weight_sync_interval - 1, "train.max_staleness",
                self.max_staleness, f"-1 (auto), or weight_sync_interval - 1 = {self.weight_sync_interval - 1} or more")


@dataclass(frozen=True)
class MeshSection:
    data: int = 1
    """Copies of the model that share the rows of a batch."""
    fsdp: int = 1
    """Devices over which parameters, optimizer and rows are split; -1 for all that remain."""
    tensor: int = 1
    """Devices over which heads and feed-forward are split."""
    trainer: str = ""
    """Devices of the trainer: a fraction (0.5, or 1.0 for all), a count (2), or a list of numbers ([0,1]); empty for
    all. The first ones are its."""
    sampler: str = ""
    """Devices of the sampler, likewise; the last ones are its. The same devices as the trainer's, or none of them."""
    reference: str = ""
    """Devices of the reference, likewise; empty for the trainer's."""
    sampler_tensor: int = 0
    """Where the sampler has devices of its own: devices over which it splits heads; 0 for mesh.tensor."""

    def __post_init__(self) -> None:
        for name in ("data", "fsdp", "tensor"):
            value = getattr(self, name)
            require(value >= 1 or (name == "fsdp" and value == -1), f"mesh.{name}", value, "1 or more")


@dataclass(frozen=True)
class CheckpointSection:
    every: int = 10
    """Steps between checkpoints; the last step is always saved. 0 for only the last."""
    keep_last: int = 2
    """Newest checkpoints kept."""
    keep_best: int = 0
    """Beside them, this many of the best evaluated ones (train.evaluate_every); each evaluated version is then
    saved."""

    def __post_init__(self) -> None:
        require(self.every >= 0, "checkpoint.every", self.every,
                "0 (only the last step) or more")
        require(self.keep_last >= 1, "checkpoint.keep_last", self.keep_last, "1 or more")
        require(self.keep_best >= 0, "checkpoint.keep_best", self.keep_best, "0 (off) or more")


@dataclass(frozen=True)
class WandbSection:
    mode: Literal["off", "online", "offline"] = "off"
    """Send metrics to Weights & Biases, or write them for `wandb sync`."""
    project: str = "shoal"
    """Project of the run."""
    entity: str = ""
    """Team or user; empty for your own."""


@dataclass(frozen=True)
class ReportSection:
    groups: bool = True
    """Write every sampled group to `groups/`, a parquet file a step."""
    tensorboard: bool = False
    """Write metrics for TensorBoard to `tensorboard/`."""
    wandb: WandbSection = field(default_factory=WandbSection)
    profile: tuple[int, ...] = ()
    """Steps (from 1) of which a profiler trace is written to `profile/`, for XProf, TensorBoard or Perfetto."""

    def __post_init__(self) -> None:
        require(all(step >= 1 for step in self.profile), "report.profile", self.profile, "steps from 1")


