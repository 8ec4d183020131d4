"""Every key that a user can set, by command: frozen dataclasses made of the sections in `sections.py`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from shoal.config.sections import (
    AlgorithmSection,
    BatchSection,
    CheckpointSection,
    MeshSection,
    ModelSection,
    OptimizerSection,
    ReportSection,
    RewardSection,
    SamplingSection,
    TaskSection,
    TeacherSection,
    TrainSection,
    WandbSection,
    require,
)
from shoal.types import ShoalError

__all__ = [
    "AlgorithmSection", "BatchSection", "CheckpointSection", "Config", "ConvertConfig", "DiffConfig",
    "DoctorConfig", "EvalConfig", "ExportConfig", "ExportRolloutsConfig", "GenerateConfig", "GroupsConfig",
    "MeshSection", "ModelSection", "OptimizerSection", "PretrainConfig", "ReplayConfig", "ReportSection",
    "RescoreConfig", "RewardSection", "SamplingSection", "ShoalError", "TaskSection", "TeacherSection", "TrainSection",
    "WandbSection", "require",
]


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
    recipe: str = ""
    """Another system's defaults, all of them, under your own keys: trl, verl, maxtext, tunix, torchrl, scalerl."""
    model: ModelSection = field(default_factory=ModelSection)
    task: TaskSection = field(default_factory=TaskSection)
    reward: RewardSection = field(default_factory=RewardSection)
    sampling: SamplingSection = field(default_factory=SamplingSection)
    algorithm: AlgorithmSection = field(default_factory=AlgorithmSection)
    teacher: TeacherSection = field(default_factory=TeacherSection)
    optimizer: OptimizerSection = field(default_factory=OptimizerSection)
    batch: BatchSection = field(default_factory=BatchSection)
    train: TrainSection = field(default_factory=TrainSection)
    mesh: MeshSection = field(default_factory=MeshSection)
    checkpoint: CheckpointSection = field(default_factory=CheckpointSection)
    report: ReportSection = field(default_factory=ReportSection)

    def __post_init__(self) -> None:
        require(self.steps >= 0, "steps", self.steps, "0 or more")
        require(self.algorithm.num_minibatches <= self.batch.prompts_per_step or self.batch.prompts_per_device > 0,
                "algorithm.num_minibatches", self.algorithm.num_minibatches,
                f"at most batch.prompts_per_step ({self.batch.prompts_per_step})")
        if slots := self.sampling.slots_per_device * self.mesh.tensor:
            for name, size in (("batch.group_size", self.batch.group_size), ("train.pass_k", self.pass_k)):
                require(slots >= size, "sampling.slots_per_device", self.sampling.slots_per_device,
                        f"0 (auto), or room for the completions of a prompt ({name}={size})")


    @property
    def pass_k(self) -> int:
        """Completions a question for pass@k, resolved: by default 8 for word problems, which are quick, else none."""
        return self.train.pass_k if self.train.pass_k >= 0 else 8 * (self.task.name == "words")


@dataclass(frozen=True)
class EvalConfig:
    """`shoal eval`: the figures of one model on one task, or of answers made elsewhere."""

    seed: int = 0
    """Of sampling."""
    output: str = ""
    """A JSON file for the figures and every answer with its verdict; empty for the terminal only."""
    responses: str = ""
    """A jsonl file of answers made elsewhere, to be judged without any model: rows with the question as the task's
    data has it (`question`; ifeval: `prompt`) and `response`."""
    json: bool = False
    """Print the figures as JSON."""
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
class ConvertConfig:
    """`shoal convert`: a checkpoint in MaxText's layout from one of Hugging Face's or ours, and back."""

    source: str = ""
    """A model folder or hub id, a run folder or one of its checkpoints, or a MaxText checkpoint (`.../0/items`)."""
    to: str = ""
    """The folder to write; empty for base_output_directory/run_name/0/items."""
    format: Literal["maxtext", "huggingface"] = "maxtext"
    """What to write."""
    base_output_directory: str = ""
    """Where the folder run_name/0/items is made."""
    run_name: str = ""
    """Name of that folder; empty for none: base_output_directory/0/items."""
    model_name: str = ""
    """Name of the architecture (llama3.1-8b, ...) where the checkpoint does not tell it; alone, the model of that name
    on the hub."""
    tokenizer: str = ""
    """A folder or hub id with the tokenizer (and config.json), to go with a Hugging Face folder."""
    scan_layers: bool = True
    """Whether layers are stacked in one array each in MaxText's layout."""
    dtype: Literal["float32", "bfloat16"] = "float32"
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
    hidden_size: int = 128
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
        require(self.hidden_size >= 64 and self.hidden_size % 64 == 0, "hidden_size", self.hidden_size,
                "a multiple of 64: heads are 32 wide")
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
    """`shoal replay`: samples a stored group again and compares it bit for bit."""

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
    """`shoal rescore`: scores a run's stored groups with other rewards and shows which advantages flip."""

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
    """`shoal diff`: the first step and token where two runs differ, and the likeliest cause."""

    run: str = ""
    """A run folder, or `last`."""
    other: str = ""
    """Another run folder."""
    json: bool = False
    """Print the result as JSON."""


@dataclass(frozen=True)
class GroupsConfig:
    """`shoal groups`: prints the groups that a step trained on, with rewards and advantages."""

    run: str = ""
    """The run folder, or `last`."""
    step: int = 1
    """The step, from 1."""
    group: int = -1
    """The group's place in the step's file, from 0; -1 for all."""
    json: bool = False
    """Print them as JSON, token ids and log-probs included."""

    def __post_init__(self) -> None:
        require(self.step >= 1, "step", self.step, "1 or more")
        require(self.group >= -1, "group", self.group, "-1 (all) or more")


@dataclass(frozen=True)
class ExportRolloutsConfig:
    """`shoal export-rollouts`: a run's training groups in another system's format."""

    run: str = ""
    """The run folder, or `last`."""
    format: Literal["trl", "verl"] = "trl"
    """trl: completions_00001.parquet, a file a step; verl: 1.jsonl, a file a step."""
    to: str = ""
    """The folder to write."""
