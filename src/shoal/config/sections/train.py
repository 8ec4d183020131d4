"""Settings of the course of a run: evaluations, staleness, checkpoints and reports."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from shoal.config.key import at_least, key, require


@dataclass(frozen=True)
class TrainSection:
    """The keys `train.*`: evaluation, staleness and curriculum."""

    evaluate_every: int = key(
        -2, stages=("evaluation",), on_resume="free", decided_from=("task.name",)
    )
    """Steps between evaluations; 0 for two, before the first and after the last step; -1 for none
    at all; -2 for 10 with task=words and 0 otherwise."""
    evaluate_first: bool = key(True, stages=("evaluation",), on_resume="free")
    """Evaluate before the first step (verl's val_before_train, TRL's eval_on_start); false saves
    its time, and the run then has no figures from before training."""
    quick_questions: int = key(
        -1,
        stages=("evaluation",),
        on_resume="free",
        decided_from=("task.name", "checkpoint.keep_best"),
    )
    """How many questions of each set are asked between the first and the last evaluation, and
    sampled for pass@k; 0 for all, -1 for 100 with task=words and all otherwise. With
    checkpoint.keep_best, which compares evaluations, every evaluation asks all."""
    pass_k: int = key(
        -1, stages=("evaluation",), decided_from=("task.name", "evaluation.temperature")
    )
    """Completions of each question for pass@k in the first and the last evaluation, in addition to
    the greedy answers; 0 for off, -1 for 8 with task=words and off otherwise. With
    evaluation.temperature, every evaluation's answers give pass@k instead."""
    weight_sync_interval: int = key(1, stages=("sampling",))
    """Steps between two weight updates of the sampler; with n above 1, samples are up to n-1
    versions old."""
    max_staleness: int = key(-1, stages=("sampling",), decided_from=("train.weight_sync_interval",))
    """Largest age of samples, in versions of the weights: weight_sync_interval - 1 or more; -1 for
    exactly that. A larger value lets a sampler with devices of its own continue while the trainer
    learns."""
    versions: Literal["fixed", "newest"] = key("fixed", stages=("sampling",))
    """Which weights samples come from. fixed: those that follow from the step's number and
    max_staleness, the same in every run. newest: the newest that a sampler has, which may change in
    the middle of a completion; no completion starts on older weights than max_staleness allows."""
    shuffle: bool = key(True, stages=("data",))
    """Read the training rows in a new random order in each epoch, by seed; false keeps the order of
    the data, the same in each epoch (verl's data.shuffle, TRL's shuffle_dataset)."""
    retire_above: float = key(1.0, stages=("data",))
    """Curriculum: from the second epoch on, prompts with a pass rate above this are not sampled
    again, and harder prompts are sampled more often; 1 for off."""
    on_warning: Literal["continue", "stop"] = key("continue", stages=())
    """What a warning at the start, or about rewards, completions, updates or accuracy during
    training, does: stop saves a checkpoint and ends the run with the warning as its error."""

    def __post_init__(self) -> None:
        """Checks the values: raises ShoalError, which names the key, if a number is out of its
        range, or `max_staleness` does not allow the interval and versions of the sampler's weights.
        The first fault found is raised. retire_above is 0 to 1, evaluate_every -2 or more,
        quick_questions and pass_k -1 or more, weight_sync_interval 1 or more."""
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
                "train.versions=newest: samples that are requested ahead come from older weights",
            )


@dataclass(frozen=True)
class CheckpointSection:
    """The keys `checkpoint.*`: when the run is saved, and which checkpoints are kept."""

    every: int = key(10, stages=())
    """Steps between checkpoints; 0 for the last step only, which is always saved."""
    keep_last: int = key(2, stages=())
    """Newest checkpoints to keep; 0 for all."""
    keep_best: int = key(0, stages=("evaluation",), on_resume="free")
    """Best evaluated checkpoints to keep in addition (train.evaluate_every); every evaluated
    version is then saved."""
    most_unsaved: int = key(3, stages=())
    """For a run in a bucket that does not answer: how many checkpoints may be on this machine alone
    before training waits."""

    def __post_init__(self) -> None:
        """Checks the values: raises ShoalError, which names the key, if a number is out of its
        range. The first fault found is raised. All of them are 0 or more."""
        at_least(self, "checkpoint.", 0, "every", note="only the last step")
        at_least(self, "checkpoint.", 0, "keep_last", note="all")
        at_least(self, "checkpoint.", 0, "keep_best", note="off")
        at_least(self, "checkpoint.", 0, "most_unsaved", note="each save waits for the bucket")


@dataclass(frozen=True)
class WandbSection:
    """The keys `report.wandb.*`: Weights & Biases."""

    mode: Literal["off", "online", "offline", "auto"] = key("off", stages=())
    """online sends metrics to Weights & Biases; offline writes them for `wandb sync`; auto: online
    with a login."""
    project: str = key("shoal", stages=())
    """Project of the run."""
    entity: str = key("", stages=())
    """Team or user; empty for your own."""


@dataclass(frozen=True)
class MlflowSection:
    """The keys `report.mlflow.*`: MLflow."""

    mode: Literal["off", "online", "offline", "auto"] = key("off", stages=())
    """online sends metrics to MLflow's tracking server; offline writes them to `mlflow/mlflow.db`;
    auto: online with an address."""
    tracking_uri: str = key("", stages=())
    """Address of the server; empty for MLFLOW_TRACKING_URI."""
    experiment: str = key("shoal", stages=())
    """Experiment of the run."""


@dataclass(frozen=True)
class TrackioSection:
    """The keys `report.trackio.*`: Trackio."""

    mode: Literal["off", "online", "offline", "auto"] = key("off", stages=())
    """online sends metrics to a Space or a server of Trackio; offline writes them for `trackio
    show`; auto: online with an address."""
    project: str = key("shoal", stages=())
    """Project of the run."""
    space_id: str = key("", stages=())
    """Space of the hub, USER/NAME; empty for TRACKIO_SPACE_ID or TRACKIO_SERVER_URL."""


@dataclass(frozen=True)
class ReportSection:
    """The keys `report.*`: metrics and groups that a run writes."""

    groups: bool = key(True, stages=())
    """Write every training group to `groups/`, a parquet file for each step, and a second one for
    the groups that dynamic sampling discarded."""
    tensorboard: bool = key(False, stages=())
    """Write metrics for TensorBoard to `tensorboard/`."""
    wandb: WandbSection = field(default_factory=WandbSection)
    mlflow: MlflowSection = field(default_factory=MlflowSection)
    trackio: TrackioSection = field(default_factory=TrackioSection)
    completions_every: int = key(0, stages=())
    """Every so many steps, the terminal shows a prompt's lowest-rewarded and highest-rewarded
    answer, and TensorBoard, Weights & Biases, MLflow and Trackio get a table of a few completions;
    0: never."""
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
        """Checks the values: raises ShoalError, which names the key, if `completions_every` or a
        step of `profile` is out of its range. The first fault found is raised. completions_every is
        0 or more; steps count from 1."""
        require(
            self.completions_every >= 0,
            "report.completions_every",
            self.completions_every,
            "0 or more",
        )
        require(
            all(step >= 1 for step in self.profile), "report.profile", self.profile, "steps from 1"
        )
