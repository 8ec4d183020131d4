"""The settings of every command, and which dataclass belongs to which command."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from shoal.config.key import STAGES, Stage, at_least, keys_of, require
from shoal.config.sections.devices import MeshSection
from shoal.config.sections.model import ModelSection
from shoal.config.sections.reward import RewardSection
from shoal.config.sections.sampling import EvaluationSection, SamplingSection
from shoal.config.sections.task import EnvironmentSection, TaskSection
from shoal.config.train import Config


@dataclass(frozen=True)
class SftConfig(Config):
    """`shoal sft`: fine-tunes a model on given answers: dialogues, or prompts with completions."""

    def __post_init__(self) -> None:
        """Checks the values: raises ShoalError, which names the key, if `algorithm.advantage` does
        not learn from the data's own answers, or if `Config` refuses the values."""
        require(
            self.algorithm.learns_from_data,
            "algorithm.advantage",
            self.algorithm.advantage,
            "sft; to learn from samples, `shoal train`",
        )
        super().__post_init__()


PASS_K = 8
"""Completions of each question for pass@k if `pass_k` is left open and the task judges answers."""


@dataclass(frozen=True)
class EvalConfig:
    """`shoal eval`: evaluates a model on a task, or scores responses made elsewhere."""

    seed: int = 0
    """Seed of sampling."""
    output: str = ""
    """JSON file for the figures and every answer with its score; empty for the terminal only."""
    responses: str = ""
    """jsonl file of responses made elsewhere, scored without a model: rows with `response` and the
    question as the task's data has it (`question`; ifeval: `prompt`)."""
    json: bool = False
    """Print the figures as JSON."""
    batch: int = 128
    """Completions sampled at once on each device."""
    pass_k: int = -1
    """Completions of each question for pass@k, in addition to the greedy answers; 0 for off, -1: 8
    if the task says which answers are right, else 0. Not used with evaluation.temperature, whose
    answers give pass@k themselves."""
    model: ModelSection = field(default_factory=ModelSection)
    task: TaskSection = field(default_factory=TaskSection)
    reward: RewardSection = field(default_factory=RewardSection)
    environment: EnvironmentSection = field(default_factory=EnvironmentSection)
    sampling: SamplingSection = field(default_factory=SamplingSection)
    evaluation: EvaluationSection = field(default_factory=EvaluationSection)
    mesh: MeshSection = field(default_factory=MeshSection)

    @property
    def largest_group(self) -> int:
        """The most completions of a question that may be sampled together."""
        if self.evaluation.is_greedy:
            return max(1, PASS_K if self.pass_k < 0 else self.pass_k)
        return self.evaluation.samples

    def for_task(self, judges: bool) -> EvalConfig:
        """Returns the configuration with `pass_k` decided if it was left open. `judges`: whether
        the task says which answers are right."""
        if self.pass_k >= 0:
            return self
        return replace(self, pass_k=PASS_K if judges else 0)

    def __post_init__(self) -> None:
        """Checks the values: raises ShoalError, which names the key, if `pass_k` is below -1, or
        `batch` is below 1 or, times `mesh.tensor`, below the completions of a question, which need
        room. The first fault found is raised."""
        at_least(self, "", -1, "pass_k", note="auto")
        least = -(-self.largest_group // self.mesh.tensor)
        require(
            self.batch >= least,
            "batch",
            self.batch,
            f"{least} or more, room for the completions of a question",
        )


@dataclass(frozen=True)
class GenerateConfig:
    """`shoal generate`: samples completions of the prompts in a file."""

    prompts: str = ""
    """jsonl, csv or parquet file with a `prompt` (text or messages) or `messages` in each row."""
    output: str = ""
    """The jsonl file to write: a row for each completion."""
    seed: int = 0
    """Seed of sampling."""
    num_generations: int = 1
    """Completions of each prompt."""
    batch: int = 32
    """Completions sampled at once on each device."""
    model: ModelSection = field(default_factory=ModelSection)
    sampling: SamplingSection = field(default_factory=SamplingSection)
    mesh: MeshSection = field(default_factory=MeshSection)

    def __post_init__(self) -> None:
        """Checks the values: raises ShoalError, which names the key, if `num_generations` is below
        1, or `batch` times `mesh.tensor` is below it: the completions of a prompt need room."""
        at_least(self, "", 1, "num_generations")
        least = -(-self.num_generations // self.mesh.tensor)
        require(
            self.batch >= least,
            "batch",
            self.batch,
            f"{least} or more, room for the completions of a prompt",
        )


@dataclass(frozen=True)
class ServeConfig:
    """`shoal serve`: samples for programs that use OpenAI's or vLLM's API, and returns the log-prob
    of every token."""

    host: str = "127.0.0.1"
    """Address to serve at; any but this machine's own needs `token`."""
    port: int = 0
    """Port to serve at; 0 for 8000 or the next free one."""
    token: str = ""
    """The API key that requests must have; `auto` makes one. Without it any key is accepted."""
    publication: bool = False
    """Let requests replace the weights: vLLM's calls pause, resume, collective_rpc and others, for
    a trainer."""
    timeout_seconds: float = 600.0
    """Limit of a request."""
    seed: int = 0
    """Seed of requests that have none."""
    batch: int = 32
    """Completions sampled at once on each device; further ones wait."""
    model: ModelSection = field(default_factory=ModelSection)
    sampling: SamplingSection = field(default_factory=SamplingSection)
    mesh: MeshSection = field(default_factory=MeshSection)

    def __post_init__(self) -> None:
        """Checks the values: raises ShoalError, which names the key, if `port`, `batch` or
        `timeout_seconds` is out of its range. The first fault found is raised. `port` is 0 to
        65535, `batch` 1 or more, `timeout_seconds` above 0."""
        at_least(self, "", 0, "port")
        at_least(self, "", 1, "batch")
        require(self.port < 65_536, "port", self.port, "at most 65535")
        require(self.timeout_seconds > 0, "timeout_seconds", self.timeout_seconds, "more than 0")


@dataclass(frozen=True)
class ExportConfig:
    """`shoal export`: writes a run's weights as a folder that transformers loads. (`from` is
    `source` in Python.)"""

    source: str = ""
    """Run folder (`last` for the run started last), one of its checkpoints, or a model folder."""
    to: str = ""
    """Folder to write, or hub:USER/NAME, a repository of Hugging Face's hub, to push it there (with
    the token in HF_TOKEN)."""
    private: bool = True
    """A new repository of the hub is private."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Type of the weights written."""
    merge: bool = False
    """For a run that trained an adapter: add it to the model's weights (in float32), and write a
    whole model."""


@dataclass(frozen=True)
class ConvertConfig:
    """`shoal convert`: converts a checkpoint to MaxText's layout, or from it to Hugging Face's."""

    source: str = ""
    """Model folder or hub id, run folder (`last` for the run started last) or one of its
    checkpoints, or a MaxText checkpoint (`.../0/items`)."""
    to: str = ""
    """Folder to write; empty for base_output_directory/run_name/0/items."""
    format: Literal["maxtext", "huggingface"] = "maxtext"
    """Format to write."""
    base_output_directory: str = ""
    """Folder in which run_name/0/items is created."""
    run_name: str = ""
    """Name of that folder; empty for base_output_directory/0/items."""
    model_name: str = ""
    """MaxText's name of the architecture (llama3.1-8b, ...), for a checkpoint without config.json.
    Without `from`, the hub's model of that name is converted."""
    tokenizer: str = ""
    """Folder or hub id of the tokenizer (and config.json) to copy into a Hugging Face folder."""
    scan_layers: bool = True
    """True if MaxText's layout stacks the layers in one array."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the weights written."""


@dataclass(frozen=True)
class DoctorConfig(Config):
    """`shoal doctor`: checks a training job before it runs, and estimates its time and memory."""

    json: bool = False
    """Print the report as JSON."""


@dataclass(frozen=True)
class PlanConfig(Config):
    """`shoal plan`: compiles a training job for devices that you do not have, to see whether it
    fits and how fast a step is. With --dry-run it estimates the memory in seconds, without
    compiling."""

    topology: str = ""
    """Devices to plan for: v5p-256, v5p:4x4x8, v6e:4x8@2 (two slices), h100:8, h200:8x8 (eight
    machines); empty for the devices of this machine."""
    layers: Literal["auto", "shallow", "all"] = "auto"
    """Layers to compile: auto compiles few for a deep model's decoding and extrapolates, shallow
    does so for every program, all compiles every layer. Few means 2 and 4, or whole patterns of
    layers."""
    calibration: str = ""
    """File with what `benchmarks/accelerator.py --calibration` measured on such a device; without
    it, the maker's figures for bandwidths, products and links are used."""
    json: bool = False
    """Print the plan as JSON."""


@dataclass(frozen=True)
class ReplayConfig:
    """`shoal replay`: samples a stored group again and compares it bit for bit."""

    run: str = ""
    """Run folder, or `last`."""
    step: int = 1
    """Step, from 1."""
    group: int = 0
    """Index of the group in the step's file, from 0."""
    likeliest: int = 0
    """Likeliest tokens, with the entropy, listed at each token in the JSON and on the page of the
    run; 0 for none."""
    json: bool = False
    """Print the result as JSON."""
    mesh: MeshSection = field(default_factory=MeshSection)

    def __post_init__(self) -> None:
        at_least(self, "", 1, "step")
        at_least(self, "", 0, "group", "likeliest")


@dataclass(frozen=True)
class RescoreConfig:
    """`shoal rescore`: scores a run's stored groups with another reward, and lists what is
    suspicious about it."""

    run: str = ""
    """Run folder, or `last`."""
    step: int = 0
    """Step, from 1; 0 for all."""
    json: bool = False
    """Print the result as JSON."""
    reward: RewardSection = field(default_factory=RewardSection)

    def __post_init__(self) -> None:
        at_least(self, "", 0, "step", note="all")


@dataclass(frozen=True)
class DiffConfig:
    """`shoal diff`: finds the first step and token where two runs differ, and the likeliest
    cause."""

    run: str = ""
    """Run folder, or `last`."""
    other: str = ""
    """Another run folder, or `last`."""
    json: bool = False
    """Print the result as JSON."""


@dataclass(frozen=True)
class GroupsConfig:
    """`shoal groups`: prints a table of a run's groups, or the groups of a step with rewards and
    advantages."""

    run: str = "last"
    """Run folder; `last` for the run started last."""
    step: int = 0
    """Step, from 1, whose groups are printed in full; 0 for the table of all groups."""
    group: int = -1
    """Index of the group in the step's file, from 0; -1 for all."""
    sort: str = "step"
    """Column that the table is sorted by, the largest values first."""
    ascending: bool = False
    """The smallest values first."""
    filter: str = ""
    """Rows of the table: conditions such as `reward>0.5 set=train step=10..20`."""
    limit: int = 20
    """Rows of the table that are printed."""
    json: bool = False
    """Print them as JSON; those of a step with token ids and log-probs."""

    def __post_init__(self) -> None:
        """Checks the values: raises ShoalError, which names the key, if `step`, `group` or `limit`
        is out of its range. The first fault found is raised. `step` is 0 or more, `group` -1 or
        more, `limit` 1 to 10,000."""
        at_least(self, "", 0, "step", note="all")
        at_least(self, "", -1, "group", note="all")
        at_least(self, "", 1, "limit")
        require(
            self.limit <= 10_000,
            "limit",
            self.limit,
            "at most 10000: narrow the table with filter=",
        )


@dataclass(frozen=True)
class ViewConfig:
    """`shoal view`: serves a page with a run's curves, groups and tokens, or writes it to one
    file."""

    runs: tuple[str, ...] = ()
    """Run folders, folders of runs, or `last`; without any, the newest run."""
    port: int = 0
    """Port to serve at; 0 for 8700 or the next free one."""
    host: str = "127.0.0.1"
    """Address to serve at; any other than this machine's own needs `token`."""
    token: str = ""
    """Secret that the address must contain; `auto` makes one."""
    open: bool = True
    """Open a browser if there is a display."""
    to: str = ""
    """File to write the page to, instead of serving it; the file needs no network."""
    groups: tuple[str, ...] = ()
    """Groups to put into that file: 12 (all of a step), 12:3, 12:0-7; without any, groups of the
    newest step."""

    def __post_init__(self) -> None:
        at_least(self, "", 0, "port")
        require(self.port < 65_536, "port", self.port, "at most 65535")


@dataclass(frozen=True)
class CompatConfig:
    """`shoal compat`: writes scripts to the paths of MaxText, TorchRL, TRL, verl and Tunix, so that
    their commands start Shoal."""

    to: str = ""
    """Folder to write them to; nothing in it is overwritten."""


@dataclass(frozen=True)
class LaunchConfig:
    """`shoal launch`: starts a job on a cluster, and prints the command, manifest or script that
    starts it. The job comes after `--`: shoal launch target=gke topology=v5p-256 -- train
    model.name=llama3.3-70b."""

    target: Literal["docker", "ray", "slurm", "gke", "xpk"] = "docker"
    """What starts the job: a container here, `ray job submit`, sbatch, kubectl (a Job, JobSet or
    RayJob), xpk."""
    topology: str = ""
    """Devices of the job, as `shoal plan` names them: v5p-256, v6e:4x8@2, h100:8, h200:8x8; empty
    for none."""
    name: str = ""
    """Name of the job, and of its run unless that has a run_name; empty for the run's, or shoal."""
    image: str = "shoal"
    """Image of the job's containers."""
    mode: Literal["", "cuda", "tpu", "cpu", "grpo", "grpo-experimental"] = ""
    """docker: build the image for these devices. MaxText's grpo and grpo-experimental are both tpu
    with Pathways."""
    push: str = ""
    """docker: the address in a registry that the image is pushed to."""
    cluster: str = ""
    """xpk: the cluster."""
    storage: str = "shoal-runs"
    """gke: PersistentVolumeClaim that is mounted at /work, where run folders and data are."""
    grace_seconds: int = 300
    """Seconds between SIGTERM and the end, in which a run saves its last complete step."""
    restarts: int = 10
    """gke, xpk: how often the job is started again after a failure; being taken away does not
    count."""
    options: tuple[str, ...] = ()
    """Further arguments for the client: for xpk [--zone=Z,--project=P], for ray [--no-wait], for
    Slurm lines of #SBATCH."""
    dry_run: bool = False
    """Only print."""
    job: tuple[str, ...] = ()
    """The job: everything after `--`. A command of shoal, or any other."""

    def __post_init__(self) -> None:
        """Checks the values: raises ShoalError, which names the key, if a number is too small, or a
        text has characters that its place in the job's files or commands does not allow. The first
        fault found is raised. `restarts` is 0 or more, `grace_seconds` 1 or more. image, push,
        cluster and storage have no spaces and no '-' at their start; they and `options` have only
        printable characters; `job` can be written as UTF-8."""
        at_least(self, "", 0, "restarts")
        at_least(self, "", 1, "grace_seconds")
        for name in ("image", "push", "cluster", "storage"):
            text = getattr(self, name)
            require(
                text.isprintable() and " " not in text and not text.startswith("-"),
                name,
                text,
                "a name without spaces, line breaks or a leading '-'",
            )
        for option in self.options:
            require(option.isprintable(), "options", option, "words without line breaks")
        for word in self.job:
            # Python reads bytes of the command line that are no UTF-8 as these characters.
            is_text = not any("\ud800" <= letter <= "\udfff" for letter in word)
            require(is_text, "--", word, "a job in UTF-8")


COMMANDS: Mapping[str, type] = {
    "train": Config,
    "sft": SftConfig,
    "doctor": DoctorConfig,
    "plan": PlanConfig,
    "eval": EvalConfig,
    "generate": GenerateConfig,
    "serve": ServeConfig,
    "export": ExportConfig,
    "convert": ConvertConfig,
    "groups": GroupsConfig,
    "replay": ReplayConfig,
    "rescore": RescoreConfig,
    "diff": DiffConfig,
    "view": ViewConfig,
    "launch": LaunchConfig,
    "compat": CompatConfig,
}
"""Command -> the dataclass that holds its settings."""


def dataclass_of(command: str | type) -> type:
    """Returns the dataclass of a command's settings; returns a dataclass unchanged."""
    return COMMANDS[command] if isinstance(command, str) else command


def command_of(config_type: type) -> str:
    """Returns the command whose settings a dataclass holds; '' if it is no command's."""
    return next((command for command, known in COMMANDS.items() if known is config_type), "")


def stages_of(name: str) -> tuple[Stage, ...]:
    """Returns the stages of a step that a key of training acts on, the likeliest first; all stages
    for a key that this version does not know."""
    known = keys_of(Config).get(name)
    return STAGES if known is None else known.stages or ()
