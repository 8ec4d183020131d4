"""The sections of keys that a user can set, with defaults and help texts: frozen dataclasses.

The string under a field is its text in `shoal help`. Every key is read by some code (a test checks
it). A section validates itself: a bad value raises `ShoalError` with the key, the value and what is
allowed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from shoal.config.algorithm_parts import (
    ADVANTAGES,
    AGGREGATIONS,
    CORRECTIONS,
    KL_ESTIMATORS,
    POLICY_LOSSES,
    REJECTIONS,
)
from shoal.config.declaration import key
from shoal.text import exact
from shoal.types import SamplingParams, ShoalError

DATA_SUFFIXES = (".jsonl", ".json", ".parquet", ".csv", ".tsv", ".arrow")
"""Ends of the names of data files."""

REWARD_PRESETS: dict[str, str] = {"shoal": "shoal.tasks.gsm8k:SHOAL"}
"""By the names of `reward.preset`, `module:object` of a `RewardPreset`; `shoal/__init__.py` adds
other systems'."""


def require(condition: bool, key: str, value: object, wanted: str) -> None:
    """Raises the one error form for a value out of its range."""
    if not condition:
        raise ShoalError(f"{key}={value!r}: expected {wanted}")


def at_least(section: object, head: str, least: float, *names: str, note: str = "") -> None:
    """Raises ShoalError for a field below `least`. `head`: the key before the field; `note`: what
    `least` means."""
    for name in names:
        value = getattr(section, name)
        require(value >= least, f"{head}{name}", value, f"{least}{note and f' ({note})'} or more")


@dataclass(frozen=True)
class LoraSection:
    rank: int = key(0, stages=("update", "sampling", "evaluation"))
    """Rank of a LoRA adapter, which alone is then trained; 0: all weights are. 16 is usual, with
    five to ten times the learning rate of full training."""
    alpha: float = key(32.0, stages=("update", "sampling", "evaluation"))
    """The adapter's change is multiplied by alpha / rank."""
    targets: tuple[str, ...] = key(("all-linear",), stages=("update", "sampling", "evaluation"))
    """Products that have an adapter, by PEFT's names: all-linear, or [q_proj,v_proj], or a regular
    expression."""
    rslora: bool = key(False, stages=("update", "sampling", "evaluation"))
    """Multiply by alpha / sqrt(rank) in place of alpha / rank."""
    path: str = key("", stages=("update", "sampling", "evaluation"))
    """Folder of an adapter in PEFT's format, or run folder with one, to begin with; its rank, alpha
    and targets hold."""

    def __post_init__(self) -> None:
        at_least(self, "model.lora.", 0, "rank", note="all weights are trained")
        require(self.alpha > 0, "model.lora.alpha", self.alpha, "a number above 0")
        require(
            bool(self.targets),
            "model.lora.targets",
            self.targets,
            "names of products, or all-linear",
        )


@dataclass(frozen=True)
class ModelSection:
    path: str = key("tiny", stages=("sampling", "update", "data", "evaluation"))
    """The model to train: a folder or hub id in Hugging Face format, a run folder, or a packaged
    one: `tiny` for word problems, `tiny-tools` for calculator and guess."""
    name: str = key("", stages=("sampling", "update", "evaluation"))
    """MaxText's name of the architecture (llama3.1-8b, ...), for a checkpoint without config.json.
    Without model.path, the hub's model of that name is loaded."""
    tokenizer: str = key("", stages=("data", "sampling", "rewards", "evaluation"))
    """Folder or hub id of a tokenizer that replaces the model's own."""
    scan_layers: bool = key(True, stages=("sampling", "update", "evaluation"))
    """MaxText checkpoints only: true if the layers are stacked in one array."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = key(
        "auto", stages=("sampling", "update", "evaluation")
    )
    """Type of the computation; auto is float32 on CPU, bfloat16 elsewhere. Master weights and
    optimizer state stay float32. float16, on CPU and GPU, rounds 8 times less than bfloat16, and
    has a loss scale that adapts."""
    template: str = key("", stages=("data", "environment", "evaluation"))
    """Jinja chat template, or a file with one, that replaces the tokenizer's own."""
    remat: Literal["auto", "none", "dots", "attention", "full", "offload"] = key(
        "auto", stages=("update",)
    )
    """What the backward pass recomputes (gradient checkpointing): nothing, all but products with
    weights (dots), the feed-forward part (attention), or whole blocks (full). offload is attention
    with what is kept, and each block's input, in the host's memory. auto keeps what there is memory
    for, nothing on a TPU that computes again as fast as it reads (8B on v6e); where the memory is
    not known, as on a CPU, it is dots, or full where a micro-batch's activations would exceed 2
    GiB."""
    lora: LoraSection = field(default_factory=LoraSection)
    quantise: Literal["none", "int8", "fp8"] = key(
        "none", stages=("sampling", "update", "evaluation")
    )
    """Type of frozen weights of products: 8 bits an element and a scale an output channel, from
    when they are read. In training with model.lora; in eval and generate for any model."""
    attention: Literal["auto", "reference", "blocked", "pallas"] = key(
        "auto", stages=("sampling", "update", "evaluation")
    )
    """How training, scoring and prefill compute attention: all scores of a row at once (reference),
    only the blocks of them that a prompt and its completions need (blocked), or the same by our own
    kernels, on a TPU or an NVIDIA GPU (pallas). auto takes a kernel for rows of 512 tokens and
    more, else blocked. Decoding has a kernel of ours, too, with auto and with pallas. With auto
    they are taken if their results are right in a test at the start, else blocked for
    everything."""

    def __post_init__(self) -> None:
        require(
            self.quantise == "none" or self.dtype != "float16",
            "model.quantise",
            self.quantise,
            "none with model.dtype=float16, whose largest number the products of 8 bits pass",
        )


DOORS = {
    "agent": "agent='python my_agent.py' (environment.agent), beside the task whose prompts it "
    "gets",
    "openenv": "environment=openenv:URL, with task=environment where the server asks the questions",
    "verifiers": "task=custom with agent= and the rows that it writes, by "
    "examples/verifiers_agent.py",
}
"""Who plays rollouts and is no task, by the name before a colon -> what is written in its place."""


@dataclass(frozen=True)
class TaskSection:
    name: str = key("words", stages=("data", "rewards", "evaluation"))
    """words | calculator | guess | gsm8k | math | ifeval | countdown | code, or custom for your own
    data at task.path."""
    path: str = key("", stages=("data", "rewards", "evaluation"))
    """Your own data in place of the task's: a jsonl or parquet file, a folder of them, or a hub
    id."""
    subset: str = key("", stages=("data", "rewards", "evaluation"))
    """Subset (configuration) of a data set on the hub; empty for its only or default one."""
    files: tuple[str, ...] = key((), stages=("data", "rewards", "evaluation"))
    """Files of a folder or hub data set to train on (patterns allowed), in place of task.split's
    files."""
    columns: tuple[str, ...] = key((), stages=("data", "rewards", "evaluation"))
    """Columns to rename, as `wanted=yours`: [prompt=question,answer=final]."""
    template: str = key("", stages=("data", "rewards", "evaluation"))
    """Text (or a file with it) that makes the prompt from a row's columns: `Solve: {question}`."""
    split: str = key("train", stages=("data", "rewards", "evaluation"))
    """Split to train on."""
    eval_split: str = key("test", stages=("evaluation", "data"))
    """Split to evaluate on."""
    num_eval_questions: int = key(500, stages=("evaluation", "data"))
    """Held-out questions in an evaluation; 0 for all."""
    num_steps: int = key(3, stages=("data", "rewards", "evaluation"))
    """words: operations in a problem."""
    max_value: int = key(99, stages=("data", "rewards", "evaluation"))
    """words, countdown: the largest number in a problem."""
    num_numbers: int = key(4, stages=("data", "rewards", "evaluation"))
    """countdown: how many numbers may be combined to reach the target."""

    def __post_init__(self) -> None:
        door = DOORS.get(self.name.partition(":")[0])
        require(door is None, "task.name", self.name, door or "")
        require(
            "/" not in self.name and not self.name.endswith(DATA_SUFFIXES),
            "task.name",
            self.name,
            f"the name of a task; for your own data write task=custom task.path={self.name}",
        )
        at_least(self, "task.", 0, "num_eval_questions", note="all")
        require(1 <= self.num_steps <= 8, "task.num_steps", self.num_steps, "1 to 8")
        at_least(self, "task.", 20, "max_value")
        require(2 <= self.num_numbers <= 6, "task.num_numbers", self.num_numbers, "2 to 6")
        for entry in self.columns:
            wanted, equals, theirs = entry.partition("=")
            require(
                bool(equals and wanted.strip() and theirs.strip()),
                "task.columns",
                entry,
                "wanted=theirs",
            )


@dataclass(frozen=True)
class SamplingSection:
    temperature: float = key(1.0, stages=("sampling", "update", "evaluation"))
    """Sampling temperature in training; the trainer's log-probs use the same."""
    top_k: int = key(0, stages=("sampling", "update", "evaluation"))
    """Sample from the k likeliest tokens; 0 for all. The trainer computes its log-probs over the
    same tokens (algorithm.match_sampling_support)."""
    top_p: float = key(1.0, stages=("sampling", "update", "evaluation"))
    """Sample from the smallest set of tokens with this probability mass; 1 for all."""
    min_p: float = key(0.0, stages=("sampling", "update", "evaluation"))
    """Sample from tokens at least this likely, relative to the likeliest; 0 for all."""
    max_support: int = key(128, stages=("sampling", "update"))
    """In training with top_k, top_p or min_p: largest number of tokens to sample from at a position
    (the likeliest). Their ids are stored, so that the trainer computes log-probs over the same
    set."""
    stop: tuple[str, ...] = key((), stages=("sampling", "evaluation"))
    """Strings that end a completion."""
    max_prompt_tokens: int = key(
        256, stages=("data", "environment", "sampling", "update", "evaluation")
    )
    """Longest prompt (see sampling.long_prompts)."""
    max_completion_tokens: int = key(
        64, stages=("sampling", "environment", "rewards", "update", "evaluation")
    )
    """Longest completion; one that reaches the limit is truncated, and counted. (TRL's
    max_completion_length, verl's max_response_length.)"""
    long_prompts: Literal["drop", "error"] = key(
        "drop", stages=("data", "environment", "evaluation")
    )
    """Prompts over the limit: dropped from the data and counted, or an error. They are never
    truncated."""
    slots_per_device: int = key(0, stages=("sampling", "evaluation"))
    """Completions sampled at once on each device; 0 for all of a step."""
    prompt_slot_tokens: int = key(0, stages=("sampling", "evaluation"))
    """Prompt tokens that a slot has room for. 0: with task=custom and data from Python the longest
    prompt of the data that is not dropped, in steps of 64; else max_prompt_tokens."""
    evaluation_slots: int = key(0, stages=("evaluation",))
    """Completions of an evaluation that each sampler has at once; 0 for as many as of training, and
    no more than the evaluation has."""
    mean_completion_tokens: int = key(0, stages=("sampling", "evaluation"))
    """Decoding by the kernel for TPUs alone: how long completions are in the mean, by which slots
    are counted, in place of the longest (0). Some wait meanwhile where all together have no memory
    (sampler/preempted_rows)."""
    memory_share: float = key(0.85, stages=("sampling", "evaluation"))
    """Share of an accelerator's memory that weights and the sampler's keys and values may take
    while sampling (as vLLM's gpu_memory_utilization): where it leaves no room for all slots, fewer
    completions are sampled at once. The rest is for what programs need besides."""

    def __post_init__(self) -> None:
        at_least(self, "sampling.", 0, "temperature", note="greedy")
        at_least(self, "sampling.", 0, "top_k", note="off")
        require(0 < self.top_p <= 1, "sampling.top_p", self.top_p, "a number in (0, 1]")
        require(0 <= self.min_p < 1, "sampling.min_p", self.min_p, "a number in [0, 1)")
        at_least(self, "sampling.", 1, "max_support", "max_prompt_tokens", "max_completion_tokens")
        at_least(
            self,
            "sampling.",
            0,
            "slots_per_device",
            "prompt_slot_tokens",
            "evaluation_slots",
            note="auto",
        )
        require(
            0 <= self.mean_completion_tokens <= self.max_completion_tokens,
            "sampling.mean_completion_tokens",
            self.mean_completion_tokens,
            f"0 (the longest) to max_completion_tokens={self.max_completion_tokens}",
        )
        require(
            0 < self.memory_share <= 1,
            "sampling.memory_share",
            self.memory_share,
            "a number in (0, 1]",
        )

    @property
    def slot_prompt(self) -> int:
        """Tokens of the longest prompt that a slot has room for."""
        return min(self.prompt_slot_tokens or self.max_prompt_tokens, self.max_prompt_tokens)

    @property
    def params(self) -> SamplingParams:
        """The settings as requests carry them."""
        return SamplingParams(
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            max_tokens=self.max_completion_tokens,
            stop=self.stop,
        )


@dataclass(frozen=True)
class AlgorithmSection:
    name: str = key("", stages=())
    """A paper's settings, loaded under your own keys: dapo, dr_grpo, gspo, cispo, ... (`shoal help
    train algorithm`)."""
    advantage: Annotated[str, ADVANTAGES] = key("grpo", stages=("update", "sampling"))
    """Advantage estimator: how the rewards of a group become advantages. none ignores rewards
    (distillation from a teacher alone). sft learns the data's own answers in place of samples
    (`shoal sft`)."""
    std_ddof: int = key(1, stages=("update",))
    """Delta degrees of freedom of the standard deviation, as in numpy: 1 divides by n - 1 (TRL,
    Tunix), 0 by n (MaxText)."""
    std_eps: float = key(1e-4, stages=("update",))
    """Keeps the division of advantages by the standard deviation finite; std_eps_mode says how."""
    std_eps_mode: Literal["add", "max"] = key("add", stages=("update",))
    """add: divide by the standard deviation + std_eps. max: divide by the larger of the two
    (TorchRL)."""
    whiten_over: Literal["completions", "tokens"] = key("completions", stages=("update",))
    """reinforce++, reinforce++-baseline, gdpo: whether the mean and deviation of a step's
    advantages count each completion once, or once for each of its tokens (verl)."""
    loss: Annotated[str, POLICY_LOSSES] = key("grpo", stages=("update",))
    """Policy loss."""
    clip_low: float = key(0.2, stages=("update",))
    """Lower clipping epsilon: the ratio is clipped below 1 - clip_low (gmpo: exp(-clip_low))."""
    clip_high: float = key(0.2, stages=("update",))
    """Upper clipping epsilon: the ratio is clipped above 1 + clip_high (gmpo: exp(clip_high);
    cispo: see cispo_bound)."""
    clip_dual: float = key(0.0, stages=("update",))
    """Dual clip (verl's clip_ratio_c): for a negative advantage the loss is at most clip_dual x
    |advantage|; 0 for off."""
    cispo_bound: Literal["paper", "absolute", "both"] = key("paper", stages=("update",))
    """cispo: bounds of the importance weight. paper: at most 1 + clip_high; absolute: at most
    clip_high (TRL); both: from 1 - clip_low to 1 + clip_high (verl)."""
    sapo_positive: float = key(1.0, stages=("update",))
    """sapo: temperature of the gate for positive advantages."""
    sapo_negative: float = key(1.05, stages=("update",))
    """sapo: temperature of the gate for negative advantages."""
    kl: Annotated[str, KL_ESTIMATORS] = key("k3", stages=("update",))
    """KL estimator, by Schulman's names: k1 is the log-ratio, k2 half its square, k3 unbiased and
    never negative."""
    kl_coef: float = key(0.0, stages=("update",))
    """Weight of the KL divergence from the reference (beta of TRL and MaxText); 0 loads no
    reference."""
    reference: Literal["start", "base"] = key("start", stages=("update",))
    """The reference of the KL divergence. start: the policy as the run begins, with the adapter
    that it begins with (model.lora.path, a run or folder with one), of which a copy is kept. base:
    the model without its adapter. The two are one for full weights and for a new adapter."""
    kl_metric: bool = key(False, stages=("update",))
    """Report `kl` where kl_coef is 0, too, as TorchRL does: a forward pass a step, and the
    reference's memory."""
    kl_placement: Literal["loss", "reward"] = key("loss", stages=("update",))
    """loss: the KL divergence is a term of the loss. reward: its sum over a completion is
    subtracted from the reward."""
    kl_clamp_input: float = key(0.0, stages=("update",))
    """Bound on the size of the log-ratio inside the KL estimator (verl 20); 0 for no bound."""
    kl_clamp_value: float = key(0.0, stages=("update",))
    """Bound on the size of a token's KL estimate (verl 10); 0 for no bound."""
    kl_weighted: bool = key(False, stages=("update",))
    """Multiply the KL term of the loss by the differentiable ratio exp(logprob - old_logprob)
    (TRL's use_bias_correction_kl)."""
    kl_sampler_coef: float = key(0.0, stages=("update",))
    """Weight of a KL divergence (k3) from the sampler's log-probs in the loss (TorchRL's
    kl_to_inference_coeff)."""
    entropy_coef: float = key(0.0, stages=("update",))
    """Weight of the entropy bonus, which is subtracted from the loss."""
    aggregation: Annotated[str, AGGREGATIONS] = key("token-mean", stages=("update",))
    """How token losses are averaged (verl's loss_agg_mode, TRL's loss_type), over the whole batch
    of an update."""
    aggregation_tokens: int = key(0, stages=("update",))
    """seq-mean-token-sum-norm: the constant length to divide by (verl's loss_scale_factor); 0 for
    sampling.max_completion_tokens."""
    correction: Annotated[str, CORRECTIONS] = key("auto", stages=("update",))
    """Importance weights w = exp(old_logprob - sampler_logprob) that correct the gap between
    sampler and trainer. tis: w clipped to [correction_floor, correction_cap]; mis, icepop: w, and 0
    outside these bounds; none. direct: no weight, but the policy loss's ratio is exp(logprob -
    sampler_logprob) itself, clipped (TorchRL). auto: tis where samples may be of older weights
    (train.max_staleness, train.weight_sync_interval), else none."""
    correction_level: Literal["token", "sequence", "geometric"] = key("token", stages=("update",))
    """Weight of a token: its own, the product over its completion, or the geometric mean over its
    completion."""
    correction_cap: float = key(2.0, stages=("update",))
    """Upper bound of the correction weight; inf for none."""
    correction_floor: float = key(-1.0, stages=("update",))
    """Lower bound of the correction weight; 0 for none, -1 for the correction's own: 0.5 for
    icepop, as in its paper, and none for the others."""
    rejection: Annotated[str, REJECTIONS] = key("none", stages=("update",))
    """Remove tokens (token_*) or completions (seq_*) from the loss whose sampler and trainer are
    too far apart (verl's rollout_rs): by the estimate k1, k2 or k3 of each token, or its sum, mean
    or maximum over a completion. They still count in the denominator. k1 bounds the weight w of
    `correction`: seq_mean_k1 its geometric mean."""
    rejection_cap: float = key(2.0, stages=("update",))
    """Upper bound: with k1 of w, else of the estimate in nats; inf for none."""
    rejection_floor: float = key(-1.0, stages=("update",))
    """With k1, the lower bound of w; 0 for none, -1 for 1 / rejection_cap."""
    match_sampling_support: bool = key(True, stages=("update", "sampling"))
    """Compute the trainer's log-probs over the tokens that top_k, top_p and min_p kept in sampling;
    false biases the ratio."""
    mask_truncated: bool = key(False, stages=("update",))
    """Exclude truncated completions from the loss (TRL's mask_truncated_completions); they still
    count in the group's mean and deviation."""
    dynamic_sampling: bool = key(False, stages=("data", "sampling"))
    """DAPO's dynamic sampling: replace groups without variance by further groups until the step is
    full."""
    dynamic_sampling_by: Literal["correct", "reward"] = key("correct", stages=("data", "sampling"))
    """What must vary in a group to be kept. correct: the task's own check of its completions (the
    paper: some right, some wrong), or without such a check the reward minus the overlong penalty;
    reward: the whole reward."""
    max_sampling_rounds: int = key(10, stages=("data", "sampling"))
    """Largest number of replacement rounds in a step; groups without variance fill the places that
    are left."""
    num_epochs: int = key(1, stages=("update",))
    """Passes over each step's groups (TRL's num_iterations, PPO epochs)."""
    num_minibatches: int = key(1, stages=("update",))
    """Optimizer updates in each pass."""
    zero_std_groups: Literal["include", "exclude"] = key("include", stages=("update",))
    """Whether completions of groups without variance count in the loss's denominator: include (the
    papers) or exclude (DAPO)."""

    def __post_init__(self) -> None:
        require(self.std_ddof in (0, 1), "algorithm.std_ddof", self.std_ddof, "0 or 1")
        require(
            0 <= self.clip_low <= 1 or POLICY_LOSSES[self.loss].in_logarithms,
            "algorithm.clip_low",
            self.clip_low,
            "a number in [0, 1]",
        )
        at_least(
            self,
            "algorithm.",
            0,
            "std_eps",
            "clip_low",
            "clip_high",
            "kl_coef",
            "kl_clamp_input",
            "kl_clamp_value",
            "kl_sampler_coef",
            "entropy_coef",
            "aggregation_tokens",
        )
        for name in ("sapo_positive", "sapo_negative", "correction_cap", "rejection_cap"):
            require(
                getattr(self, name) > 0,
                f"algorithm.{name}",
                getattr(self, name),
                "a number above 0",
            )
        at_least(self, "algorithm.", 1, "num_epochs", "num_minibatches", "max_sampling_rounds")
        require(
            self.clip_dual == 0 or self.clip_dual > 1,
            "algorithm.clip_dual",
            self.clip_dual,
            "0 (off) or above 1",
        )
        for name in ("correction_floor", "rejection_floor"):
            floor = getattr(self, name)
            require(
                floor >= 0 or floor == -1,
                f"algorithm.{name}",
                floor,
                "-1 (its default), 0 (none) or more",
            )
        floor = CORRECTIONS[self.correction].lower_bound(self.correction_floor)
        require(
            floor <= self.correction_cap,
            "algorithm.correction_floor",
            floor,
            f"at most algorithm.correction_cap ({exact(self.correction_cap)})",
        )
        least, most = REJECTIONS[self.rejection].bounds(self.rejection_cap, self.rejection_floor)
        require(
            least <= most,
            "algorithm.rejection_cap",
            self.rejection_cap,
            "at least algorithm.rejection_floor, and with -1 for that at least 1",
        )

    @property
    def uses_rewards(self) -> bool:
        """False if a teacher, or the data's answers, are the only signal."""
        return ADVANTAGES[self.advantage].uses_rewards

    @property
    def learns_from_data(self) -> bool:
        """True if the data's own answers are learned, and nothing is sampled in training."""
        return ADVANTAGES[self.advantage].of_data

    @property
    def scores_reference(self) -> bool:
        """True if a reference is loaded, and scores each step's completions."""
        return self.kl_coef > 0 or self.kl_metric


@dataclass(frozen=True)
class TeacherSection:
    path: str = key("", stages=("update",))
    """Teacher checkpoint with the model's vocabulary, for on-policy distillation: the teacher's
    log-prob minus the policy's is added to each token's advantage; empty for none. With
    algorithm.advantage=none it is the whole advantage."""
    coef: float = key(1.0, stages=("update",))
    """Weight of the teacher's term."""

    def __post_init__(self) -> None:
        at_least(self, "teacher.", 0, "coef")


@dataclass(frozen=True)
class OptimizerSection:
    lr: float = key(1.5e-4, stages=("update",))
    """Peak learning rate of AdamW."""
    warmup_steps: int = key(5, stages=("update",))
    """Updates over which the learning rate rises from 0."""
    schedule: Literal["constant", "linear", "cosine"] = key("constant", stages=("update",))
    """Learning rate after warm-up: constant, or falling to 0 at the last update."""
    weight_decay: float = key(0.0, stages=("update",))
    """Decoupled weight decay; norms and biases are exempt."""
    clip_grad_norm: float = key(1.0, stages=("update",))
    """Largest global gradient norm; 0 for no limit."""
    beta1: float = key(0.9, stages=("update",))
    """Decay of AdamW's first moment."""
    beta2: float = key(0.95, stages=("update",))
    """Decay of AdamW's second moment."""
    eps: float = key(1e-8, stages=("update",))
    """Added to the root of AdamW's second moment."""
    moments: Literal["float32", "bfloat16"] = key("float32", stages=("update",))
    """Type in which AdamW's moments are kept between updates. bfloat16 takes half the memory, 4
    bytes a parameter, and is rounded at random, so that small changes are right in the mean."""
    offload: bool = key(False, stages=("update",))
    """Keep AdamW's moments in the host's memory between updates: 8 bytes a parameter less on the
    devices (4 with optimizer.moments=bfloat16). An update fetches them a layer at a time; its
    result is the same."""
    reduce_dtype: Literal["float32", "bfloat16"] = key("float32", stages=("update",))
    """Type in which the gradients of several devices are summed; those of norms and biases always
    are in float32. bfloat16 halves what moves; it needs a computation in bfloat16."""

    def __post_init__(self) -> None:
        at_least(self, "optimizer.", 0, "lr", "eps", "warmup_steps", "weight_decay")
        at_least(self, "optimizer.", 0, "clip_grad_norm", note="off")
        require(0 <= self.beta1 < 1, "optimizer.beta1", self.beta1, "a number in [0, 1)")
        require(0 <= self.beta2 < 1, "optimizer.beta2", self.beta2, "a number in [0, 1)")


@dataclass(frozen=True)
class BatchSection:
    prompts_per_step: int = key(32, stages=("data", "sampling", "update"))
    """P: prompts in a step (verl's train_batch_size)."""
    prompts_per_device: int = key(0, stages=("data", "sampling", "update"))
    """Prompts in a step for each device of the trainer, in place of prompts_per_step; 0 for off."""
    group_size: int = key(8, stages=("sampling", "update"))
    """G: completions of each prompt (TRL's num_generations, verl's rollout.n)."""
    micro_tokens: int = key(0, stages=("update",))
    """Tokens of a micro-batch on one device, padding included, in one row that prompts and
    completions fill; it holds at least the longest prompt with the longest completion. 0 for 2,048
    on CPU, and on an accelerator for 4,096, or, up to 32,768, as many whole groups as leave a
    quarter of its memory. This replaces micro-batch size and gradient accumulation: it affects
    memory and speed, never the result."""

    def __post_init__(self) -> None:
        at_least(self, "batch.", 0, "prompts_per_device", note="off")
        at_least(self, "batch.", 0, "micro_tokens", note="auto")
        at_least(self, "batch.", 1, "prompts_per_step", "group_size")


@dataclass(frozen=True)
class TrainSection:
    evaluate_every: int = key(-2, stages=("evaluation",))
    """Steps between evaluations; 0 for two, before the first and after the last step; -1 for none
    at all; -2 for 10 with task=words and 0 otherwise."""
    quick_questions: int = key(-1, stages=("evaluation",))
    """How many questions of each set are asked between the first and the last evaluation, and
    sampled for pass@k; 0 for all, -1 for 100 with task=words and all otherwise.
    checkpoint.keep_best compares evaluations: all ask all."""
    pass_k: int = key(-1, stages=("evaluation",))
    """Completions of each question for pass@k in the first and the last evaluation; 0 for off, -1
    for 8 with task=words and off otherwise."""
    weight_sync_interval: int = key(1, stages=("sampling",))
    """Steps between two weight updates of the sampler; with n above 1, samples are up to n-1
    versions old."""
    max_staleness: int = key(-1, stages=("sampling",))
    """Largest age of samples, in versions of the weights: weight_sync_interval - 1 or more; -1 for
    exactly that. What exceeds it lets a sampler with devices of its own go on while the trainer
    learns."""
    versions: Literal["fixed", "newest"] = key("fixed", stages=("sampling",))
    """Which weights samples are from. fixed: those that a step's number and max_staleness name, the
    same in every run. newest: the newest that a sampler has, changed while completions go on; none
    start on older ones than max_staleness allows."""
    retire_above: float = key(1.0, stages=("data",))
    """Curriculum: from the second epoch on, prompts with a pass rate above this are not sampled
    again, and harder prompts are sampled more often; 1 for off."""
    on_warning: Literal["continue", "stop"] = key("continue", stages=())
    """What a warning at the start, or about rewards, completions, updates or accuracy during
    training, does: stop saves a checkpoint and ends the run with the warning as its error."""

    def __post_init__(self) -> None:
        require(
            0 <= self.retire_above <= 1,
            "train.retire_above",
            self.retire_above,
            "a number in [0, 1], 1 for off",
        )
        at_least(self, "train.", -2, "evaluate_every", note="auto")
        at_least(self, "train.", -1, "quick_questions", "pass_k", note="auto")
        at_least(self, "train.", 1, "weight_sync_interval")
        require(
            self.max_staleness == -1 or self.max_staleness >= self.weight_sync_interval - 1,
            "train.max_staleness",
            self.max_staleness,
            f"-1 (auto), or weight_sync_interval - 1 = {self.weight_sync_interval - 1} or more",
        )
        if self.versions == "newest":
            require(
                self.max_staleness >= self.weight_sync_interval,
                "train.max_staleness",
                self.max_staleness,
                f"weight_sync_interval = {self.weight_sync_interval} or more with "
                f"train.versions=newest: samples "
                "that are asked for ahead are of older weights",
            )


@dataclass(frozen=True)
class CheckpointSection:
    every: int = key(10, stages=())
    """Steps between checkpoints; 0 for the last step only, which is always saved."""
    keep_last: int = key(2, stages=())
    """Newest checkpoints to keep."""
    keep_best: int = key(0, stages=("evaluation",))
    """Best evaluated checkpoints to keep in addition (train.evaluate_every); every evaluated
    version is then saved."""
    most_unsaved: int = key(3, stages=())
    """Of a run in a bucket that does not answer: checkpoints that are on this machine alone before
    training waits."""

    def __post_init__(self) -> None:
        at_least(self, "checkpoint.", 0, "every", note="only the last step")
        at_least(self, "checkpoint.", 1, "keep_last")
        at_least(self, "checkpoint.", 0, "keep_best", note="off")
        at_least(self, "checkpoint.", 0, "most_unsaved", note="each save waits for the bucket")


@dataclass(frozen=True)
class WandbSection:
    mode: Literal["off", "online", "offline", "auto"] = key("off", stages=())
    """online sends metrics to Weights & Biases; offline writes them for `wandb sync`; auto: online
    with a login."""
    project: str = key("shoal", stages=())
    """Project of the run."""
    entity: str = key("", stages=())
    """Team or user; empty for your own."""


@dataclass(frozen=True)
class ReportSection:
    groups: bool = key(True, stages=())
    """Write every training group to `groups/`, a parquet file for each step."""
    tensorboard: bool = key(False, stages=())
    """Write metrics for TensorBoard to `tensorboard/`."""
    wandb: WandbSection = field(default_factory=WandbSection)
    completions_every: int = key(0, stages=())
    """Steps between tables of a few completions for TensorBoard and Weights & Biases; 0: none."""
    timeline: bool = key(False, stages=())
    """Write `timeline.json` for Perfetto: when trainer, sampler, rewards and publication worked and
    waited."""
    hydra: bool = key(False, stages=())
    """Write the configuration to `.hydra/` too, as Hydra does: config.yaml, overrides.yaml,
    hydra.yaml."""
    profile: tuple[int, ...] = key((), stages=())
    """Steps (from 1) whose profiler trace is written to `profile/`, for XProf, TensorBoard or
    Perfetto."""

    def __post_init__(self) -> None:
        require(
            self.completions_every >= 0,
            "report.completions_every",
            self.completions_every,
            "0 or more",
        )
        require(
            all(step >= 1 for step in self.profile), "report.profile", self.profile, "steps from 1"
        )
