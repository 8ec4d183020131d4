"""The settings of `shoal train`: `Config`, made of the sections in `sections/`, with the rules that
hold between sections."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from shoal.config.key import at_least, key, require
from shoal.config.sections.algorithm import AlgorithmSection
from shoal.config.sections.critic import CriticSection
from shoal.config.sections.devices import (
    MeshSection,
    PublishSection,
    RaySection,
    SamplerSection,
    VllmSection,
)
from shoal.config.sections.model import ModelSection, TeacherSection
from shoal.config.sections.optimizer import BatchSection, OptimizerSection
from shoal.config.sections.reward import RewardSection
from shoal.config.sections.sampling import EvaluationSection, SamplingSection
from shoal.config.sections.task import EnvironmentSection, TaskSection
from shoal.config.sections.train import CheckpointSection, ReportSection, TrainSection
from shoal.text import exact

Turns = Literal["", "tools", "environments"]
"""What makes rollouts have several turns: tools or environments; '' if they have one turn.
Environments may begin each rollout with words of their own."""


def samples_for_pass_k(pass_k: int, task: str) -> int:
    """Returns how many completions are sampled of each question for pass@k, 0 for none. `pass_k` -1
    means 8 for the task `words` and 0 for other tasks."""
    if pass_k >= 0:
        return pass_k
    return 8 if task == "words" else 0


FOLDER_KEYS = ("run_name", "base_output_directory", "resume")
"""Keys that say in which folder a run is, not what it does."""


LABEL_KEYS = ("tags", "notes")
"""Keys with what people write about a run, not what it does."""


@dataclass(frozen=True)
class Config:
    """`shoal train`: trains a model by reinforcement learning, or resumes a run."""

    seed: int = key(0, stages=("data", "sampling", "update", "evaluation"), on_resume="fixed")
    """Seed of the data order and of sampling."""
    steps: int = key(40, stages=("evaluation", "update"), on_resume="free")
    """Training steps: each samples completions of batch.prompts_per_step prompts and trains on
    them."""
    run_name: str = key("", stages=())
    """Name of the run's folder in base_output_directory; empty for date and time in outputs/. The
    same command with the same name resumes the run."""
    base_output_directory: str = key("outputs", stages=())
    """Folder in which run folders are created."""
    resume: str = key("", stages=())
    """Run folder to resume (or its newest checkpoint), or `last`: the newest run in
    base_output_directory. The run's own configuration is loaded, and your keys override it."""
    recipe: str = key("", stages=(), on_resume="warn")
    """All defaults of another system, which your own keys override: trl, verl, maxtext, tunix,
    torchrl, scalerl, prime-rl."""
    price: float = key(0.0, stages=())
    """Price of a device for an hour, in any currency: the run and the plan then say what they cost;
    0 for not known."""
    tags: tuple[str, ...] = key((), stages=())
    """Words by which the run is found in `shoal view`, Weights & Biases and MLflow, several as a,b;
    kept in notes.json."""
    notes: str = key("", stages=())
    """A note on why the run is made, kept and shown with its tags."""
    model: ModelSection = field(default_factory=ModelSection)
    task: TaskSection = field(default_factory=TaskSection)
    reward: RewardSection = field(default_factory=RewardSection)
    environment: EnvironmentSection = field(default_factory=EnvironmentSection)
    sampling: SamplingSection = field(default_factory=SamplingSection)
    algorithm: AlgorithmSection = field(default_factory=AlgorithmSection)
    teacher: TeacherSection = field(default_factory=TeacherSection)
    optimizer: OptimizerSection = field(default_factory=OptimizerSection)
    critic: CriticSection = field(default_factory=CriticSection)
    batch: BatchSection = field(default_factory=BatchSection)
    train: TrainSection = field(default_factory=TrainSection)
    evaluation: EvaluationSection = field(default_factory=EvaluationSection)
    mesh: MeshSection = field(default_factory=MeshSection)
    sampler: SamplerSection = field(default_factory=SamplerSection)
    publish: PublishSection = field(default_factory=PublishSection)
    ray: RaySection = field(default_factory=RaySection)
    vllm: VllmSection = field(default_factory=VllmSection)
    checkpoint: CheckpointSection = field(default_factory=CheckpointSection)
    report: ReportSection = field(default_factory=ReportSection)

    def __post_init__(self) -> None:
        """Checks the values: raises ShoalError, which names the key, if values of several sections
        contradict each other, or if `steps` is negative. The sections have checked the ranges of
        their own values. The first fault found is raised."""
        at_least(self, "", 0, "steps")
        at_least(self, "", 0, "price", note="not known")
        require(
            self.optimizer.reduce_dtype == "float32" or self.model.dtype in ("auto", "bfloat16"),
            "optimizer.reduce_dtype",
            self.optimizer.reduce_dtype,
            "float32, or together with model.dtype=bfloat16",
        )
        self._check_groups()
        self._check_teacher()
        self._check_critic()
        self._check_schedule()
        self._check_samplers()
        self._check_vllm()
        self._check_router_replay()
        self._check_sampler_quantise()

    def _check_groups(self) -> None:
        """Checks how many answers a prompt has, sampled or in the data."""
        if self.algorithm.learns_from_data:
            require(
                self.batch.group_size == 1,
                "batch.group_size",
                self.batch.group_size,
                "1: the data has one answer",
            )
            require(
                self.sampling.temperature == 1,
                "sampling.temperature",
                self.sampling.temperature,
                "1 with sft",
            )
            require(
                not self.teacher.scores_samples,
                "teacher.divergence",
                self.teacher.divergence,
                "full or topk with sft: sampled estimates a divergence from samples of the policy, "
                "and the data's answers are none",
            )
            require(
                not self.teacher.hint,
                "teacher.hint",
                self.teacher.hint,
                "empty with sft: answers of the data follow dialogues, not prompts with a hint",
            )
        elif self.algorithm.has_critic:
            require(
                self.batch.group_size >= 2 or not self.algorithm.dynamic_sampling,
                "batch.group_size",
                self.batch.group_size,
                "2 or more with algorithm.dynamic_sampling, which keeps groups that differ",
            )
        else:
            require(
                self.batch.group_size >= 2,
                "batch.group_size",
                self.batch.group_size,
                "2 or more, or algorithm.advantage=gae with it: a group of one has nothing to be "
                "compared with",
            )

    def _check_teacher(self) -> None:
        """Checks that a teacher can score what the run samples."""
        rewrites_prompts = bool(
            self.environment.factory or self.environment.rollout or self.environment.agent
        )
        require(
            not self.teacher.hint
            or not (rewrites_prompts or self.environment.history == "template"),
            "teacher.hint",
            self.teacher.hint,
            "empty with environment.factory, rollout, agent or history=template: their rollouts "
            "have prompts of their own, into which no hint goes",
        )
        require(
            not self.teacher.address or self.sampling.temperature == 1,
            "sampling.temperature",
            self.sampling.temperature,
            "1 with teacher.address: the log-probs that a server gives are of that temperature",
        )
        matches_support = self.sampling.params.truncated and self.algorithm.match_sampling_support
        require(
            not (self.teacher.address and self.teacher.scores_samples and matches_support),
            "teacher.divergence",
            self.teacher.divergence,
            "topk with teacher.address and sampling.top_k, top_p or min_p: a server's log-probs "
            "are over all tokens, not over those that were sampled from",
        )
        require(
            self.teacher.quantise == "none" or self.model.dtype != "float16",
            "teacher.quantise",
            self.teacher.quantise,
            "none with model.dtype=float16, whose largest number products of 8-bit weights exceed",
        )

    def _check_critic(self) -> None:
        """Checks that a critic is used, and can share the policy's layers."""
        require(
            not self.critic.path or self.algorithm.has_critic,
            "critic.path",
            self.critic.path,
            "empty, or algorithm.advantage=gae with it: other advantages have no critic",
        )
        require(
            not self.critic.shared or self.model.dtype != "float16",
            "critic.shared",
            self.critic.shared,
            "false with model.dtype=float16, whose gradients have a scale for each loss; bfloat16 "
            "needs none",
        )

    def _check_schedule(self) -> None:
        """Checks mini-batches, the age of weights, slots and evaluations."""
        require(
            self.algorithm.num_minibatches <= self.batch.prompts_per_step
            or self.batch.prompts_per_device > 0,
            "algorithm.num_minibatches",
            self.algorithm.num_minibatches,
            f"at most batch.prompts_per_step ({self.batch.prompts_per_step})",
        )
        require(
            # A staleness of 1 is allowed with one step, too.
            self.steps == 0 or self.train.max_staleness < max(2, self.steps),
            "train.max_staleness",
            self.train.max_staleness,
            f"less than steps={self.steps}: all samples would be of the first weights",
        )
        require(
            self.train.weight_sync_interval <= max(1, self.steps),
            "train.weight_sync_interval",
            self.train.weight_sync_interval,
            f"at most steps={self.steps}: weights would never be published",
        )
        slots = self.sampling.slots_per_device * self.mesh.tensor
        if slots:
            for name, size in (
                ("batch.group_size", self.batch.group_size),
                ("train.pass_k", self.pass_k),
                ("evaluation.samples", self.evaluation.samples),
            ):
                require(
                    slots >= size,
                    "sampling.slots_per_device",
                    self.sampling.slots_per_device,
                    f"0 (auto), or room for the completions of a prompt ({name}={size})",
                )
        require(
            self.train.pass_k <= 0 or self.evaluation.is_greedy,
            "train.pass_k",
            self.train.pass_k,
            "0 with evaluation.temperature above 0: the evaluation.samples answers to each "
            "question give pass@k in every evaluation",
        )
        require(
            not (self.checkpoint.keep_best and self.train.quick_questions > 0),
            "train.quick_questions",
            self.train.quick_questions,
            "0 (all) with checkpoint.keep_best, which compares evaluations",
        )

    def _check_samplers(self) -> None:
        """Checks how weights reach the samplers, and which devices these have."""
        allowed = self.sampler.channels
        require(
            self.publish.channel in allowed,
            "publish.channel",
            self.publish.channel,
            f"{', '.join(allowed)} with sampler.kind={self.sampler.kind}",
        )
        if self.sampler.is_remote:
            require(
                self.sampler.devices_per_worker % (self.mesh.sampler_tensor or 1) == 0,
                "sampler.devices_per_worker",
                self.sampler.devices_per_worker,
                f"a multiple of mesh.sampler_tensor={self.mesh.sampler_tensor}",
            )
            for name, unset in (("sampler", ""), ("processes", 0), ("pathways", False)):
                value = getattr(self.mesh, name)
                require(
                    value == unset or (name == "processes" and value == 1),
                    f"mesh.{name}",
                    value,
                    f"{unset!r} with sampler.kind={self.sampler.kind}: its workers have devices of "
                    "their own (sampler.devices_per_worker), and the trainer is one process",
                )

    def _check_vllm(self) -> None:
        """Checks what servers of vLLM can do."""
        if self.sampler.kind == "vllm":
            require(
                bool(self.vllm.urls) != bool(self.vllm.python),
                "vllm.python",
                self.vllm.python,
                "a Python that has vLLM, to start servers, or vllm.urls, those that run already; "
                "one of the two",
            )
            require(
                not self.vllm.memory
                or (
                    bool(self.vllm.python)
                    and self.train.versions == "fixed"
                    and max(self.train.max_staleness, self.train.weight_sync_interval - 1) == 0
                ),
                "vllm.memory",
                self.vllm.memory,
                "0 (vLLM's default), or vllm.python in a run with train.max_staleness=0: on the "
                "trainer's GPU a server sleeps while the trainer learns; on others give "
                f"vllm.arguments=[--gpu-memory-utilization={exact(self.vllm.memory)}]",
            )
            require(
                self.model.quantise == "none",
                "model.quantise",
                self.model.quantise,
                "none with sampler.kind=vllm",
            )
            stores_support = (
                self.sampling.params.truncated and self.algorithm.match_sampling_support
            )
            require(
                self.evaluation.is_greedy or not stores_support,
                "evaluation.temperature",
                self.evaluation.temperature,
                "0 (greedy) with sampler.kind=vllm and algorithm.match_sampling_support, for which "
                "its servers return all tokens that an answer was sampled from",
            )

    def _check_router_replay(self) -> None:
        """Checks that the samplers return the routes of tokens, if the update repeats them."""
        if self.model.router_replay == "on":
            require(
                not self.sampler.engine,
                "model.router_replay",
                "on",
                f"off or auto with sampler.kind={self.sampler.kind}, because {self.sampler.engine} "
                "returns no routes: which experts it sent a token to",
            )
            require(
                not self.algorithm.learns_from_data,
                "model.router_replay",
                "on",
                "off or auto in a run that learns from data, which has no routes",
            )

    def _check_sampler_quantise(self) -> None:
        """Checks that the samplers can quantise the weights that they get."""
        kind = self.sampler.quantise
        if kind != "none":
            require(
                self.sampler.kind != "vllm",
                "sampler.quantise",
                kind,
                "none with sampler.kind=vllm, whose servers quantise by vllm.arguments",
            )
            require(
                self.model.quantise == "none",
                "sampler.quantise",
                kind,
                f"none with model.quantise={self.model.quantise}, which the sampler has too",
            )
            require(
                self.model.dtype != "float16",
                "sampler.quantise",
                kind,
                "none with model.dtype=float16, which overflows in products of 8 bits",
            )

    @property
    def critic_path(self) -> str:
        """The checkpoint that the critic begins with; '' for the model's own weights, also if
        `critic.path` names the model itself, as it often does in command lines of verl."""
        is_model = Path(self.critic.path).resolve() == Path(self.model.path).resolve()
        return "" if is_model else self.critic.path

    @property
    def shares_gpu(self) -> bool:
        """True if vLLM's servers and the trainer take turns on a GPU."""
        return self.sampler.kind == "vllm" and self.vllm.memory > 0

    @property
    def num_workers(self) -> int:
        """Returns the number of samplers outside of this process: of the servers in vllm.urls, or
        else `sampler.workers`."""
        return len(self.vllm.urls) or self.sampler.workers

    @property
    def turns(self) -> Turns:
        """Returns what makes this run's rollouts have several turns: `environments` (environments,
        a rollout function or an agent), else `tools`; '' if they have one turn. The task `guess`
        brings environments, and `calculator` tools."""
        if (
            self.environment.factory
            or self.environment.rollout
            or self.environment.agent
            or self.task.name == "guess"
        ):
            return "environments"
        return "tools" if self.environment.tools or self.task.name == "calculator" else ""

    @property
    def pass_k(self) -> int:
        """Returns how many completions are sampled of each question for pass@k besides its greedy
        answer, 0 for none; by default 8 for word problems, which are quick, and 0 for other tasks.
        Answers that are sampled (evaluation.temperature) give pass@k themselves."""
        if not self.evaluation.is_greedy:
            return 0
        return samples_for_pass_k(self.train.pass_k, self.task.name)

    @property
    def evaluate_every(self) -> int:
        """Returns how many steps are between evaluations: 0 means only before the first and after
        the last step, -1 never. By default 10 for word problems, else 0."""
        if self.train.evaluate_every >= -1:
            return self.train.evaluate_every
        return 10 * (self.task.name == "words")

    @property
    def quick_questions(self) -> int:
        """Returns how many questions quick evaluations and pass@k have, 0 for all; by default 100
        for word problems, else 0."""
        few = 0 if self.checkpoint.keep_best else self.train.quick_questions
        return few if few >= 0 else 100 * (self.task.name == "words")
