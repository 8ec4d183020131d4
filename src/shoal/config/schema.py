"""Every key that a user can set, with its default and its meaning: frozen dataclasses, one a section.

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
    """words | gsm8k."""
    path: str = ""
    """A local jsonl file or folder, or a hub id, in place of the task's own data."""
    split: str = "train"
    """The split to train on."""
    eval_split: str = "test"
    """The split to evaluate on."""
    num_questions: int = 500
    """Held-out questions in an evaluation; 0 for all."""
    num_steps: int = 3
    """words: operations a problem needs."""
    max_value: int = 99
    """words: the largest number that occurs."""

    def __post_init__(self) -> None:
        require(self.num_questions >= 0, "task.num_questions", self.num_questions, "0 (all) or more")
        require(1 <= self.num_steps <= 8, "task.num_steps", self.num_steps, "1 to 8")
        require(self.max_value >= 20, "task.max_value", self.max_value, "20 or more")


@dataclass(frozen=True)
class RewardSection:
    functions: tuple[str, ...] = ()
    """Reward functions as `file.py:function`; empty for the task's own."""
    weights: tuple[float, ...] = ()
    """One weight a function; empty for 1.0 each (or the task's own)."""
    timeout_seconds: float = 60.0
    """Time limit of one call of a reward function; its process is killed at the end of it."""
    memory_gib: float = 4.0
    """Memory that a reward process may take beyond what it starts with; 0 for no limit."""
    on_error: Literal["error", "zero", "skip"] = "error"
    """When a function raises, hangs, dies or returns NaN for a completion: end the run, score it 0, or take that
    completion out of its group (mean, deviation and loss). Each is counted and shown with its example."""
    workers: int = 2
    """Processes that call reward functions; 0 calls them in this one, without limits of time and memory."""
    call: Literal["group", "step"] = "group"
    """Call functions as soon as a group is drawn, while sampling goes on, or once for all groups of a step."""

    def __post_init__(self) -> None:
        require(self.timeout_seconds > 0, "reward.timeout_seconds", self.timeout_seconds, "a number above 0")
        require(self.memory_gib >= 0, "reward.memory_gib", self.memory_gib, "0 (no limit) or more")
        require(self.workers >= 0, "reward.workers", self.workers, "0 (in this process) or more")
        if self.weights and self.functions:
            require(len(self.weights) == len(self.functions), "reward.weights", self.weights,
                    f"{len(self.functions)} numbers, one for each of reward.functions")


@dataclass(frozen=True)
class SamplingSection:
    temperature: float = 1.0
    """Temperature of training samples; the trainer's log-probs use the same."""
    top_k: int = 0
    """Keep the k likeliest tokens; 0 for all. In training any truncation is an error: the ratio would be biased."""
    top_p: float = 1.0
    """Keep the smallest set of tokens with this mass; 1 for all."""
    min_p: float = 0.0
    """Keep tokens at least this likely, relative to the likeliest; 0 for all."""
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
        require(self.max_prompt_tokens >= 1, "sampling.max_prompt_tokens", self.max_prompt_tokens, "1 or more")
        require(self.max_completion_tokens >= 1, "sampling.max_completion_tokens", self.max_completion_tokens,
                "1 or more")
        require(self.slots_per_device >= 0, "sampling.slots_per_device", self.slots_per_device, "0 (auto) or more")


@dataclass(frozen=True)
class AlgorithmSection:
    advantage: Literal["grpo"] = "grpo"
    """How rewards of a group become advantages."""
    std_ddof: int = 1
    """Degrees of freedom taken off in the group's standard deviation (TRL, Tunix 1; MaxText 0)."""
    std_eps: float = 1e-4
    """Added to the standard deviation."""
    loss: Literal["grpo", "gspo-token"] = "grpo"
    """The policy loss."""
    clip_low: float = 0.2
    """The ratio is clipped below 1 - clip_low."""
    clip_high: float = 0.2
    """The ratio is clipped above 1 + clip_high."""
    kl: Literal["k3"] = "k3"
    """Estimator of the divergence from the reference."""
    kl_coef: float = 0.0
    """Weight of that divergence in the loss; at 0 no reference is kept."""
    aggregation: Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum"] = "token-mean"
    """How token losses become one number, over the whole update's batch."""
    num_epochs: int = 1
    """Passes over each step's groups."""
    num_minibatches: int = 1
    """Updates in each pass."""
    degenerate: Literal["count", "renormalise"] = "count"
    """Whether completions of groups without variance count in the denominator (the papers) or not (DAPO)."""

    def __post_init__(self) -> None:
        require(self.std_ddof in (0, 1), "algorithm.std_ddof", self.std_ddof, "0 or 1")
        require(self.std_eps >= 0, "algorithm.std_eps", self.std_eps, "0 or more")
        require(0 <= self.clip_low <= 1, "algorithm.clip_low", self.clip_low, "a number in [0, 1]")
        require(self.clip_high >= 0, "algorithm.clip_high", self.clip_high, "0 or more")
        require(self.kl_coef >= 0, "algorithm.kl_coef", self.kl_coef, "0 or more")
        require(self.num_epochs >= 1, "algorithm.num_epochs", self.num_epochs, "1 or more")
        require(self.num_minibatches >= 1, "algorithm.num_minibatches", self.num_minibatches, "1 or more")


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

    def __post_init__(self) -> None:
        require(self.lr >= 0, "optimizer.lr", self.lr, "0 or more")
        require(self.warmup_steps >= 0, "optimizer.warmup_steps", self.warmup_steps, "0 or more")
        require(self.weight_decay >= 0, "optimizer.weight_decay", self.weight_decay, "0 or more")
        require(self.clip_grad_norm >= 0, "optimizer.clip_grad_norm", self.clip_grad_norm, "0 (off) or more")
        require(0 <= self.beta1 < 1, "optimizer.beta1", self.beta1, "a number in [0, 1)")
        require(0 <= self.beta2 < 1, "optimizer.beta2", self.beta2, "a number in [0, 1)")


@dataclass(frozen=True)
class BatchSection:
    prompts_per_step: int = 32
    """P: prompts a step."""
    group_size: int = 8
    """G: completions a prompt."""
    micro_tokens: int = 2048
    """Tokens a device computes at once in the update, padding included (one completion with its prompt at least); it
    decides memory, never the result."""

    def __post_init__(self) -> None:
        require(self.prompts_per_step >= 1, "batch.prompts_per_step", self.prompts_per_step, "1 or more")
        require(self.group_size >= 2, "batch.group_size", self.group_size,
                "2 or more: a group of one has nothing to be compared with")
        require(self.micro_tokens >= 1, "batch.micro_tokens", self.micro_tokens, "1 or more")


@dataclass(frozen=True)
class TrainSection:
    evaluate_every: int = 0
    """Steps between evaluations; 0 for only before and after."""
    pass_k: int = 8
    """Completions a question for pass@k in the first and the last evaluation; 0 leaves it out."""
    retire_above: float = 1.0
    """Prompts of a higher pass rate are not drawn again, and the harder the others are the more often they are; 1 for
    off. Rates act from the next epoch on."""

    def __post_init__(self) -> None:
        require(0 <= self.retire_above <= 1, "train.retire_above", self.retire_above, "a number in [0, 1], 1 for off")
        require(self.evaluate_every >= 0, "train.evaluate_every", self.evaluate_every, "0 (only at the ends) or more")
        require(self.pass_k >= 0, "train.pass_k", self.pass_k, "0 (off) or more")


@dataclass(frozen=True)
class MeshSection:
    data: int = 1
    """Copies of the model that share the rows of a batch."""
    fsdp: int = 1
    """Devices over which parameters, optimizer and rows are split; -1 for all that remain."""
    tensor: int = 1
    """Devices over which heads and feed-forward are split."""

    def __post_init__(self) -> None:
        for name in ("data", "fsdp", "tensor"):
            value = getattr(self, name)
            require(value >= 1 or (name == "fsdp" and value == -1), f"mesh.{name}", value, "1 or more")


@dataclass(frozen=True)
class CheckpointSection:
    checkpoint_period: int = 10
    """Steps between checkpoints; the last step is always saved. 0 for only the last."""
    keep_last: int = 2
    """Newest checkpoints kept."""
    keep_best: int = 0
    """Beside them, this many of the best evaluated ones (train.evaluate_every); each evaluated version is then
    saved."""

    def __post_init__(self) -> None:
        require(self.checkpoint_period >= 0, "checkpoint.checkpoint_period", self.checkpoint_period,
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
    """Write every sampled group to `groups/`."""
    groups_format: Literal["jsonl", "parquet"] = "jsonl"
    """Format of those files."""
    tensorboard: bool = False
    """Write metrics for TensorBoard to `tensorboard/`."""
    wandb: WandbSection = field(default_factory=WandbSection)
    profile: tuple[int, ...] = ()
    """Steps (from 1) of which a profiler trace is written to `profile/`, for XProf, TensorBoard or Perfetto."""

    def __post_init__(self) -> None:
        require(all(step >= 1 for step in self.profile), "report.profile", self.profile, "steps from 1")


@dataclass(frozen=True)
class Config:
    """A whole training run."""

    seed: int = 0
    """Of data order and sampling."""
    steps: int = 80
    """Training steps: each samples P x G completions and learns from them."""
    run_name: str = ""
    """Name of the run's folder under base_output_directory; empty for date and time under outputs/."""
    base_output_directory: str = "outputs"
    """Where run folders are made."""
    resume: str = ""
    """A run folder to go on with, or `last`: the one started last under base_output_directory. Its own configuration
    is taken; keys given beside it change it. The same command with the same run_name goes on by itself."""
    model: ModelSection = field(default_factory=ModelSection)
    task: TaskSection = field(default_factory=TaskSection)
    reward: RewardSection = field(default_factory=RewardSection)
    sampling: SamplingSection = field(default_factory=SamplingSection)
    algorithm: AlgorithmSection = field(default_factory=AlgorithmSection)
    optimizer: OptimizerSection = field(default_factory=OptimizerSection)
    batch: BatchSection = field(default_factory=BatchSection)
    train: TrainSection = field(default_factory=TrainSection)
    mesh: MeshSection = field(default_factory=MeshSection)
    checkpoint: CheckpointSection = field(default_factory=CheckpointSection)
    report: ReportSection = field(default_factory=ReportSection)

    def __post_init__(self) -> None:
        require(self.steps >= 0, "steps", self.steps, "0 or more")
        require(self.algorithm.num_minibatches <= self.batch.prompts_per_step, "algorithm.num_minibatches",
                self.algorithm.num_minibatches, f"at most batch.prompts_per_step ({self.batch.prompts_per_step})")
        if slots := self.sampling.slots_per_device * self.mesh.tensor:
            for name, size in (("batch.group_size", self.batch.group_size), ("train.pass_k", self.train.pass_k)):
                require(slots >= size, "sampling.slots_per_device", self.sampling.slots_per_device,
                        f"0 (auto), or room for the completions of a prompt ({name}={size})")


@dataclass(frozen=True)
class EvalConfig:
    """`shoal eval`: the figures of one model on one task."""

    seed: int = 0
    """Of sampling."""
    output: str = ""
    """A JSON file for the figures; empty for the terminal only."""
    batch: int = 128
    """Completions drawn at once on each device."""
    pass_k: int = 8
    """Completions a question for pass@k; 0 leaves it out."""
    model: ModelSection = field(default_factory=ModelSection)
    task: TaskSection = field(default_factory=TaskSection)
    reward: RewardSection = field(default_factory=RewardSection)
    sampling: SamplingSection = field(default_factory=SamplingSection)
    mesh: MeshSection = field(default_factory=MeshSection)

    def __post_init__(self) -> None:
        require(self.pass_k >= 0, "pass_k", self.pass_k, "0 (off) or more")
        least = max(1, -(-self.pass_k // self.mesh.tensor))
        require(self.batch >= least, "batch", self.batch, f"{least} or more, room for the completions of a question")


@dataclass(frozen=True)
class GenerateConfig:
    """`shoal generate`: completions of the prompts in a jsonl file."""

    prompts: str = ""
    """A jsonl file with a `prompt` (text or messages) a line."""
    output: str = ""
    """The jsonl file to write: a row a completion."""
    seed: int = 0
    """Of sampling."""
    num_generations: int = 1
    """Completions a prompt."""
    batch: int = 32
    """Completions drawn at once on each device."""
    model: ModelSection = field(default_factory=ModelSection)
    sampling: SamplingSection = field(default_factory=SamplingSection)
    mesh: MeshSection = field(default_factory=MeshSection)

    def __post_init__(self) -> None:
        require(self.num_generations >= 1, "num_generations", self.num_generations, "1 or more")
        least = -(-self.num_generations // self.mesh.tensor)
        require(self.batch >= least, "batch", self.batch, f"{least} or more, room for the completions of a prompt")


@dataclass(frozen=True)
class ExportConfig:
    """`shoal export`: a run's weights as a folder that transformers loads. (`from` is spelled `source` in Python.)"""

    source: str = ""
    """A run folder, one of its checkpoints, or a model folder."""
    to: str = ""
    """The folder to write."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Type of the weights written."""


@dataclass(frozen=True)
class PretrainConfig:
    """`shoal pretrain`: supervised training of a tiny model from nothing on the solutions of `words`."""

    output: str = ""
    """The folder to write, in Hugging Face format."""
    seed: int = 0
    """Of initial weights and data."""
    steps: int = 3000
    """Updates that the learning rate's schedule is laid out for; training stops earlier where stop_at_accuracy says."""
    batch: int = 64
    """Problems an update."""
    lr: float = 2e-3
    """Peak learning rate; it warms up over 100 updates and falls to a tenth."""
    width: int = 128
    """D: model width."""
    layers: int = 4
    """L: layers."""
    vocabulary: int = 1024
    """Size of the tokenizer that is trained first."""
    stop_at_accuracy: float = 0.35
    """Stop when this share of held-out problems is solved greedily (looked at every 100 updates); 0 for never."""
    task: TaskSection = field(default_factory=TaskSection)

    def __post_init__(self) -> None:
        require(self.steps >= 1, "steps", self.steps, "1 or more")
        require(self.batch >= 1, "batch", self.batch, "1 or more")
        require(self.lr >= 0, "lr", self.lr, "0 or more")
        require(self.width >= 64 and self.width % 64 == 0, "width", self.width, "a multiple of 64: heads are 32 wide")
        require(self.layers >= 1, "layers", self.layers, "1 or more")
        require(self.vocabulary >= 300, "vocabulary", self.vocabulary, "300 or more: all bytes and the special tokens")
        require(0 <= self.stop_at_accuracy <= 1, "stop_at_accuracy", self.stop_at_accuracy, "a number in [0, 1]")


@dataclass(frozen=True)
class DoctorConfig(Config):
    """`shoal doctor`: looks at a training job before it runs: every part of it, what it will cost, what is wrong."""

    json: bool = False
    """Print the report as JSON."""


@dataclass(frozen=True)
class ReplayConfig:
    """`shoal replay`: draws a group of a run again and says whether it is the one that was stored."""

    run: str = ""
    """The run folder, or `last`."""
    step: int = 1
    """The step, from 1."""
    group: int = 0
    """The group's place in the step's file, from 0."""
    json: bool = False
    """Print the result as JSON."""
    mesh: MeshSection = field(default_factory=MeshSection)

    def __post_init__(self) -> None:
        require(self.step >= 1, "step", self.step, "1 or more")
        require(self.group >= 0, "group", self.group, "0 or more")


@dataclass(frozen=True)
class RescoreConfig:
    """`shoal rescore`: judges a run's stored groups with other rewards and says which advantages flip."""

    run: str = ""
    """The run folder, or `last`."""
    step: int = 0
    """The step, from 1; 0 for all."""
    json: bool = False
    """Print the result as JSON."""
    reward: RewardSection = field(default_factory=RewardSection)

    def __post_init__(self) -> None:
        require(self.step >= 0, "step", self.step, "0 (all) or more")


@dataclass(frozen=True)
class DiffConfig:
    """`shoal diff`: the first step and token where two runs part, and the keys that differ."""

    run: str = ""
    """A run folder, or `last`."""
    other: str = ""
    """Another run folder."""
    json: bool = False
    """Print the result as JSON."""


@dataclass(frozen=True)
class ExportRolloutsConfig:
    """`shoal export-rollouts`: a run's training groups in another system's format."""

    run: str = ""
    """The run folder, or `last`."""
    format: Literal["trl", "verl"] = "trl"
    """trl: completions_00001.parquet, a file a step; verl: 1.jsonl, a file a step."""
    to: str = ""
    """The folder to write."""
