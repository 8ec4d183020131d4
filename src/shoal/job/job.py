"""The job: everything that a command needs, as an ordered list of stages that lead from a
configuration to what samples and trains."""

from __future__ import annotations

import functools
import io
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing, nullcontext
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from shoal.buckets import RUNS
from shoal.budget.auto import (
    decided_micro_tokens,
    decided_remat,
    run_roles,
    trained_model,
    with_expert_split,
)
from shoal.budget.budget import Budget
from shoal.budget.memory import parameter_count, reference_architecture
from shoal.budget.shapes import micro_batch_shapes
from shoal.chat.tokenizer import Tokenizer
from shoal.chat.tokenizer_files import read_date
from shoal.checks.inputs import check_devices, check_prompts, check_tokenizer, open_prompts
from shoal.checks.reward import (
    DATA_SOURCE,
    OTHER_EXAMPLES,
    check_first_prompts,
    lost_in_decoding,
    model_text_maker,
)
from shoal.checks.settings import (
    adapter_warnings,
    check_before_weights,
    check_lr_for_size,
    check_run_folder,
    check_settings,
    reward_preset_notes,
)
from shoal.config.commands import (
    DoctorConfig,
    EvalConfig,
    GenerateConfig,
    PlanConfig,
    ServeConfig,
)
from shoal.config.derived import (
    decided_by_settings,
    for_devices,
    longest_sequence,
    max_support,
    needs_first_weights,
    num_updates,
    replays_routes,
    router_replay_of,
    vllm_tolerance,
)
from shoal.config.key import get_value, keys_of, open_keys, shown, with_values
from shoal.config.recipe_files import Recipe
from shoal.config.sections.devices import MeshSection
from shoal.config.sections.sampling import SamplingSection
from shoal.config.stored import Decision, resolved
from shoal.config.train import Config
from shoal.files import check_local, is_offline, nearest_folder
from shoal.findings import Finding, Findings
from shoal.job.compilations import CompilationCounter
from shoal.job.data_source import DataSource, for_training
from shoal.job.environments import (
    TurnFormats,
    make_turn_driver,
    open_sessions,
    section_of,
    with_environment,
    written_call_format,
)
from shoal.job.hosts import (
    caller_fleet,
    decided_channel,
    open_cluster,
    run_engines,
    sampling_engine_maker,
    training_engine_maker,
    training_fleet,
)
from shoal.job.memory import check_memory, job_budget
from shoal.job.process import open_world, without_process_keys
from shoal.job.reward_model import reward_models
from shoal.job.stages import Command, StagedJob, stage
from shoal.job.task import (
    MOST_MEASURED,
    UNREWARDED,
    check_truths,
    encode_all,
    given_rewards,
    load_questions,
    longest_prompt,
    note_missing_sources,
    own_rewards,
    with_overlong,
    with_system_prompt,
)
from shoal.job.teacher_server import TeacherServer
from shoal.mesh import Role, Roles, World, available_devices, make_roles
from shoal.model.architecture import Architecture
from shoal.model.attention.caches import KEY_BLOCK
from shoal.model.attention.selector import (
    attention_kind,
    decode_kernel_refusal,
    decodes_by_kernel,
    kernel_fault,
)
from shoal.model.parameters import (
    as_frozen,
    initialise_specs,
    joined,
    param_specs,
    quantiser,
    without_adapter,
)
from shoal.model.transformer import Model
from shoal.records import Example, Params, Purpose, RewardFunction, ShoalError
from shoal.report.console import Console
from shoal.report.sinks import check_sinks
from shoal.rewards.ended_environment import environment_rewards
from shoal.rewards.pool import RewardPool
from shoal.rollout.fleet import Fleet
from shoal.rollout.ledger import GroupRewards
from shoal.rollout.multi_process import MultiProcessSource
from shoal.runs.layout import MODEL_FOLDER
from shoal.runs.reader import read_decisions, read_requested
from shoal.sampler.engine import Engine
from shoal.stop import StopSignal
from shoal.tasks.splits import evaluating
from shoal.tasks.task import OWN_DATA, Task
from shoal.tasks.template import Hint
from shoal.text import gib
from shoal.trainer.callbacks import GivenCallbacks
from shoal.trainer.critic import Critic, find_critic
from shoal.trainer.evaluation import make_evaluator
from shoal.trainer.loss import make_objective
from shoal.trainer.own_advantage import OwnAdvantage, load_advantage
from shoal.trainer.prompts import PromptStream, TokenizedExample
from shoal.trainer.scorers import ModelScorer, find_teachers, load_scorer
from shoal.trainer.step import Learner, TrainState
from shoal.trainer.teachers import Teachers, check_rows
from shoal.trainer.update import Updater
from shoal.weights import peft
from shoal.weights.checkpoints import checkpoint_bytes
from shoal.weights.orbax import orbax_silenced
from shoal.weights.sampler_copy import place_parameters
from shoal.weights.source import (
    ModelSource,
    adapted,
    check_experts,
    check_positions,
    compute_dtype,
    make_model,
    model_path,
    multiply_exactly,
    open_run_model,
    with_run,
)
from shoal.weights.store import MemoryStore
from shoal.workers.sessions import Sessions

if TYPE_CHECKING:
    from shoal.rollout.ray_host import Cluster


TRAIN: Sequence[Command] = ("train",)
TRAIN_OR_DOCTOR: Sequence[Command] = ("train", "doctor")
WITH_TASK: Sequence[Command] = ("train", "doctor", "eval")
"""Commands whose jobs have data and rewards."""
SAMPLES_ALONE: Sequence[Command] = ("eval", "generate", "serve")
WITH_MODEL: Sequence[Command] = ("train", "doctor", "eval", "generate", "serve")
ESTIMATES: Sequence[Command] = ("train", "doctor", "estimate")
"""Commands whose configuration has the keys of `Config`, so that a training job follows from it."""

SOURCE_ROWS = 256
"""Training rows that are searched for data sources, on whose prompts the reward is tried."""
MOST_SOURCES = 4
"""Data sources on whose prompts the reward is tried."""


class Job(StagedJob):
    """Everything that a command needs, as stages in the order in which they are checked. Reading a
    stage opens it. Leaving the `with` block closes everything that was opened, each thing once and
    the newest first: the source of groups, then the reward pool and the sessions of tools that it
    used.

    >>> with Job(config, console) as job:
    ...     job.check()
    ...     open_run(job).train()
    """

    def __init__(
        self,
        config: Config | EvalConfig | GenerateConfig | ServeConfig,
        console: Console,
        *,
        resumed: Path | None = None,
        functions: Sequence[Callable] = (),
        task: Task | None = None,
        recipe: Recipe | None = None,
        callbacks: GivenCallbacks | None = None,
        devices: Sequence[Any] = (),
        model_source: ModelSource | None = None,
        findings: Findings | None = None,
        command: Command | None = None,
    ) -> None:
        """Makes a job without opening a stage. `resumed`: the folder of the run that is resumed;
        None for a new run. `functions`, `task`: reward functions and data that were passed from
        Python; if `task` is given, its own reward functions are used in place of `functions`.
        `recipe`: the recipe that a training run follows. `callbacks`: those of a training run that
        were passed from Python; None if there are none. `devices`: devices to use in place of this
        machine's; empty: all that JAX finds. `model_source`: a model to use in place of the one
        that `model.path` names; with it a training job is one of `estimate` unless `command` says
        otherwise. `findings`: where stages record what they find; None: a new object. `command`:
        the command that the job is opened for; None: the one that the type of `config` belongs to.
        If `model.path` is a run, its `scan_layers` and `quantise` are the defaults."""
        super().__init__(command or _command_of(config, model_source), findings or Findings())
        requested: Any = replace(config, model=with_run(config.model))
        # Tells this process from the others of its run, and so is no part of `requested`.
        self.process_mesh: MeshSection = requested.mesh
        if self.has("world"):
            requested = without_process_keys(requested)
        # Typed Any, because each stage reads keys that the commands which open it have.
        self.requested: Any = requested
        self.console = console
        self.resumed = resumed
        self.functions = functions
        self._given_task = task
        self.recipe = recipe
        self.callbacks = callbacks or GivenCallbacks()
        if devices:
            self.opened["devices"] = devices
        if model_source is not None:
            self.opened["model_source"] = model_source
        # True if the configuration is a training job's: for sft, doctor and plan too. Whether this
        # command trains is another question: `command`.
        self.trains = isinstance(config, Config)
        self.stop = StopSignal()
        self.stack = ExitStack()
        self.decisions: dict[str, Decision] = {}
        self.stored_decisions = read_decisions(resumed) if resumed else {}
        self.started = time.perf_counter()
        self.compilations = CompilationCounter()

    def __enter__(self) -> Job:
        self.stack.enter_context(orbax_silenced())
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Closes everything that the job has opened, the newest first. An exception of the block is
        not suppressed."""
        self.stack.__exit__(kind, error, traceback)

    # ---- the stages: settings, files

    @stage(commands=TRAIN_OR_DOCTOR)
    def check_configuration(self) -> None:
        """Raises ShoalError if settings contradict each other, or a sink of reports cannot be used.
        Adds warnings about settings to the findings."""
        check_settings(self.requested, self.findings)
        check_sinks(self.requested.report)

    @stage(commands=TRAIN)
    def check_named_files(self) -> None:
        """Raises ShoalError if files or names that the configuration gives are wrong, as far as
        this machine can tell."""
        from_python = bool(self.functions) or self._given_task is not None
        check_before_weights(self.requested, from_python, self.resumed is not None)

    @stage(fix_key="base_output_directory", commands=TRAIN_OR_DOCTOR)
    def run_folder_note(self) -> str:
        """Returns a note if the run's folder exists already, which `shoal train` would resume; else
        '', also for a run that is resumed. ShoalError if the folder cannot be made, or exists and
        holds something else than a run."""
        if self.resumed:
            return ""
        return check_run_folder(self.requested)

    # ---- data and rewards, in processes that are forked before this one has threads

    @stage("data", "task.path", commands=WITH_TASK)
    def loaded_task(self) -> Task:
        """Loads the task and returns it: its questions, its own reward functions, and the tools and
        environments of the section `environment`. The task is the one passed from Python or else
        the one that `task.name` names. For training it is changed by `for_training`; other commands
        read data for an evaluation alone. Prints the task's notes. ShoalError if the task or its
        data is wrong."""
        c = self.requested
        with nullcontext() if self.trains else evaluating():
            task = self._given_task or load_questions(c.task, c.reward)
            task = with_environment(with_system_prompt(task, c.task.system), c)
        if self.trains:
            task = for_training(task, c)
        for note in (*task.notes, *reward_preset_notes(c, task)):
            self.console.note(note)
        return task

    @stage(
        "environment", "environment.factory", needs=("loaded_task",), commands=WITH_TASK, forks=True
    )
    def sessions(self) -> Sessions | None:
        """Starts the processes that run tools and environments, and returns their sessions; None if
        rollouts use neither. The processes are forked, so JAX must not have threads yet. They end
        when the job is closed."""
        sessions = open_sessions(self.loaded_task, self.requested)
        if sessions:
            self.stack.enter_context(closing(sessions))
        return sessions

    @stage("tokenizer", "model.path")
    def template_date(self) -> datetime:
        """Returns the date that chat templates write into prompts. A resumed run uses the one of
        its first start; if that was not stored, the present one, with a warning if the template
        writes a date."""
        if self.resumed:
            folder = self.resumed / MODEL_FOLDER
            date = read_date(folder)
            if date:
                return date
            template = folder / "chat_template.jinja"
            if template.is_file() and "strftime_now" in template.read_text(encoding="utf-8"):
                self.findings.of("template", "model.template").warning(
                    "the chat template writes the date, and the run was started by a version of "
                    "Shoal that did not store it: from now on prompts have today's"
                )
        return datetime.now().replace(microsecond=0)

    @stage("reward", "reward.functions", needs=("template_date",), after=("loaded_task",))
    def reward_functions(self) -> tuple[RewardFunction, ...]:
        """Returns the functions that score answers: those of `reward.functions` and those passed
        from Python, or, if there are none, the task's own; then those of its environments, and the
        penalty on long completions if it is set. An algorithm without rewards, if none are given,
        gets UNREWARDED, a function that scores 0. If a task was passed from Python, its own
        functions take the place of the first ones. ShoalError if there is none although the job
        needs rewards. Only the task's own functions need the data. Side effect: sets the model
        settings and devices with which reward models compute."""
        c = self.requested
        needs_rewards = not self.trains or c.algorithm.uses_rewards
        # Not open if loading failed, or if a dry run lacks the data.
        environments = self.loaded_task.environments if self.is_open("loaded_task") else {}
        by_turn = self.trains and c.algorithm.credit != "completion"
        of_environments = environment_rewards(environments, by_turn=by_turn)
        if self._given_task:
            of_task = self._given_task.rewards
        else:
            of_task = given_rewards(c.reward, self.functions)
            if not of_task:
                required = needs_rewards and not of_environments
                of_task = own_rewards(self.loaded_task, c.task, c.reward, required)
        rewards = tuple(of_task) + tuple(of_environments)

        # Called when the weights of reward models are read: only then are the devices known.
        def reference_role() -> Role:
            return self.roles.reference

        for model in reward_models(rewards):
            model.prepare(c.model, c.sampling, reference_role)
            if self.trains:
                model.date = self.template_date
        if not rewards and not needs_rewards:
            rewards = UNREWARDED
        return with_overlong(rewards, c.reward, c.sampling.max_completion_tokens)

    @property
    def task(self) -> Task:
        """The task with the reward functions that this job uses."""
        return replace(self.loaded_task, rewards=self.reward_functions)

    @stage(
        "reward",
        "reward.functions",
        needs=("reward_functions",),
        after=("loaded_task",),
        commands=WITH_TASK,
        forks=True,
    )
    def reward_pool(self) -> RewardPool:
        """Starts the processes that score answers, and returns their pool. ShoalError if the data
        lacks the answers that the functions compare with, and a note if it lacks verl's
        `data_source`; that is not checked if the data could not
        be loaded, or is not on this machine in a dry run. The processes end when the job is
        closed."""
        if self.is_open("loaded_task"):
            check_truths(self.loaded_task, self.reward_functions)
            note = note_missing_sources(self.loaded_task, self.reward_functions)
            if note:
                self.console.note(note)
        steps = (self.requested.steps,) if self.trains else ()
        pool = RewardPool(self.reward_functions, self.requested.reward, *steps)
        return self.stack.enter_context(closing(pool))

    @stage("reward", "algorithm.advantage", commands=TRAIN_OR_DOCTOR)
    def own_advantage(self) -> OwnAdvantage | None:
        """Loads and returns the user's function that `algorithm.advantage` names; None if that is
        an estimator of Shoal's. ShoalError if there is no such function, or if it requires another
        argument than there are."""
        return load_advantage(self.requested.algorithm)

    # ---- other processes and machines, which must be known before JAX looks for devices

    @stage(after=("sessions", "reward_pool"), commands=TRAIN)
    def cluster(self) -> Cluster | None:
        """Joins the run's Ray cluster, or starts one, and returns it; None if `sampler.kind` is not
        `ray`, and in a dry run. The job leaves the cluster when it is closed."""
        return open_cluster(self.requested, self.console, self.stack)

    @stage(
        needs=("cluster",), after=("sessions", "reward_pool"), commands=TRAIN, starts_threads=True
    )
    def world(self) -> World:
        """Joins the processes of the run and returns their world; for a run of one process a world
        of that process alone. Waits until all processes have come. ShoalError, the same in all of
        them, if their configurations, versions, devices or run folders differ."""
        world = open_world(self.process_mesh, self.requested, self.resumed)
        return self.stack.enter_context(world)

    # ---- devices, and the model on them

    @stage(
        "devices",
        "mesh",
        needs=("cluster", "world"),
        after=("sessions", "reward_pool"),
        starts_threads=True,
    )
    def devices(self) -> Sequence[Any]:
        """Returns all devices that JAX finds, or those that the job was given. Starts JAX's
        threads, and configures JAX before that, which has an effect only if JAX has not looked for
        its devices yet."""
        shares_gpu = getattr(self.requested, "shares_gpu", False)
        return available_devices(self.requested.mesh, shares_gpu)

    @property
    def mesh(self) -> MeshSection:
        """The requested mesh section. If Ray has assigned devices to this process, `mesh.trainer`
        is their number."""
        mesh = self.requested.mesh
        cluster = self.opened.get("cluster")  # not there if the command joins none
        if cluster is None or not cluster.trainer_devices:
            return mesh
        return replace(mesh, trainer=str(cluster.trainer_devices))

    @stage("devices", "mesh", needs=("cluster", "devices"), commands=(*WITH_MODEL, "estimate"))
    def requested_roles(self) -> Roles:
        """Returns the mesh of each role from the settings alone, so that a wrong mesh is refused
        before the model is known."""
        return make_roles(self.mesh, self.devices)

    @stage("tokenizer", "model.path", needs=("template_date", "world"))
    def model_source(self) -> ModelSource:
        """Finds the model's files and returns its sizes, its tokenizer, and the functions that read
        its weights; reads no weights. In training its chat template writes `template_date`, in a
        run of several processes that of process 0. ShoalError if there is no such model; in other
        commands than training prints warnings about the keys of `model.lora`."""
        if not self.trains:
            for _, text in adapter_warnings(self.requested.model.lora):
                self.console.warning(text)
        console = None if self.trains else self.console
        spec = open_run_model(self.requested.model, self.resumed, console)
        if not self.trains:
            return spec
        date = self.template_date
        # Processes may start on two days, or in two time zones: all use the first process's date.
        if self.has("world") and self.world.count > 1:
            dates = self.world.exchange_json("the date", date.isoformat())
            date = datetime.fromisoformat(dates[0])
        return replace(spec, date=date)

    @stage("devices", "mesh", needs=("cluster", "devices", "requested_roles", "model_source"))
    def roles(self) -> Roles:
        """Returns the mesh of each role for this model. In training: `requested_roles` with each
        replica of the sampler over as many devices as its weights need. A command that only samples
        uses `requested_roles`, because it has no trainer to share the devices with. How a replica
        splits experts is decided in both (`with_expert_split`). Side effects in
        training: decides `mesh.sampler_tensor` if it was left open, and prints a note if a replica
        has other devices than were requested."""
        roles = self.requested_roles
        architecture = self.model_source.architecture
        if not self.trains:
            return with_expert_split(roles, architecture)
        mesh = self.mesh
        roles = run_roles(replace(self.requested, mesh=mesh), architecture, self.devices)
        requested_tensor = mesh.sampler_tensor or mesh.tensor
        config = self.decide_sampler_tensor(roles)
        if not config.sampler.is_remote and config.mesh.sampler_tensor != roles.sampler.tensor:
            # A resumed run keeps its replicas, although this version would decide otherwise.
            mesh = replace(mesh, sampler_tensor=config.mesh.sampler_tensor)
            roles = run_roles(replace(config, mesh=mesh), architecture, self.devices)
        if roles.sampler.tensor != requested_tensor:
            self.console.note(
                f"mesh.sampler_tensor={roles.sampler.tensor}: a replica of the sampler does not "
                "fit fewer devices"
            )
        return roles

    @stage("devices", "mesh", needs=("cluster", "roles", "model_source"), commands=ESTIMATES)
    def config_for_devices(self) -> Config:
        """Returns the configuration of a training job with every open key decided that follows from
        settings, devices and model, like `batch.micro_tokens`. Each decision is recorded in
        `decisions`. Only the sampler's slots and the form of tool calls may still be open, because
        they follow from the data: `config` has them too."""
        trainer = self.roles.trainer
        num_devices = trainer.mesh.size
        # What the number and platform of the devices decide; `config` gets it key by key.
        followed = for_devices(self.requested, num_devices, trainer.platform)
        config = self.requested
        sampler_tensor = self.decisions.get("mesh.sampler_tensor")  # by the stage `roles`
        if sampler_tensor is not None:
            config = with_values(config, {"mesh.sampler_tensor": sampler_tensor.value})
        config = self.decide(
            config,
            "batch.prompts_per_step",
            followed.batch.prompts_per_step,
            {"devices of the trainer": num_devices},
        )
        for key, value in decided_by_settings(self.requested).items():
            config = self.decide(config, key, value)
        platform = {"platform of the trainer": trainer.platform}
        dtype = compute_dtype(self.requested.model.dtype, trainer.platform).name
        # Of a float32 computation, layers are summed in float32 whatever is requested: that pair
        # cannot be written down, so it stays open.
        if dtype == "bfloat16" or config.optimizer.reduce_dtype == "float32":
            config = self.decide(config, "model.dtype", dtype, platform)
        if config.sampler.kind == "vllm":
            config = self.decide(config, "vllm.tolerance", vllm_tolerance(dtype), platform)
        cluster = self.opened.get("cluster")
        channel = decided_channel(self.requested, cluster)
        if channel:
            spans_machines = cluster is not None and cluster.may_span_machines
            facts = {"Ray may span machines": str(spans_machines).lower()}
            config = self.decide(config, "publish.channel", channel, facts)
        architecture = self.model_source.architecture
        devices = {"devices of the trainer": _devices_text(trainer)}
        # The condition saves packing a step, which each change that advice tries would do.
        if "batch.micro_tokens" in open_keys(self.requested):
            micro_tokens = decided_micro_tokens(followed, self.roles, architecture)
            config = self.decide(config, "batch.micro_tokens", micro_tokens, devices)
        if config.model.remat == "auto":
            remat = decided_remat(config, self.roles, architecture)
            config = self.decide(config, "model.remat", remat, devices)
        return self._with_router_replay(config, architecture)

    def _with_router_replay(self, config: Config, a: Architecture) -> Config:
        """Returns the configuration with `model.router_replay` decided, if it was left open.
        Prints a warning if a model has experts and another engine samples. ShoalError if it is on
        and the model has none."""
        num_experts = a.experts.num_experts if a.experts else 0
        if self.requested.model.router_replay == "on" and not num_experts:
            raise ShoalError(
                "model.router_replay=on: the model has no experts, so there are no routes; leave "
                "it out",
                "model.router_replay",
            )
        engine = config.sampler.engine
        if num_experts and engine and not config.algorithm.learns_from_data:
            self.console.warning(
                f"{engine} returns no routes, so the trainer sends tokens to experts of its own "
                "choice, and log-probs of some will differ a lot: watch sampler_gap/logprob_max",
                "model.router_replay",
            )
        replay = router_replay_of(self.requested, num_experts)
        facts = {"experts of the model": num_experts}
        return self.decide(config, "model.router_replay", replay, facts)

    @stage("devices", "mesh", needs=("config_for_devices", "roles"), commands=TRAIN_OR_DOCTOR)
    def check_device_use(self) -> None:
        """Adds findings about the devices: what each role uses, and warnings, for example of idle
        devices."""
        check_devices(self.config_for_devices, self.roles, self.findings)

    @stage("model", "sampling.max_completion_tokens", needs=("model_source",), commands=WITH_MODEL)
    def check_longest_sequence(self) -> None:
        """Raises ShoalError if a prompt with its completion may be longer than the positions that
        the model has. The reference has the same positions, so it is not checked."""
        check_positions(
            self.model_source.architecture,
            self.requested.sampling,
            f"model.path={model_path(self.requested.model)}",
            self.requested.teacher.room if self.trains else 0,
        )

    @stage(
        "model",
        "model.path",
        needs=("config_for_devices", "roles", "model_source"),
        commands=(*WITH_MODEL, "estimate"),
    )
    def model(self) -> Model:
        """Returns the model on the devices of the trainer, or of the sampler if the command does
        not train. Side effects: prints a note if attention or decoding cannot use its kernel, and,
        for a float32 model, makes JAX multiply at full precision until the job is closed.
        ShoalError if the requested kernel of attention cannot compute the job's longest rows, or if
        the kernels that multiply experts do not work on this device."""
        if self.trains:
            model = trained_model(self.config_for_devices, self.model_source, self.roles)
        else:
            model = make_model(
                self.requested.model,
                self.model_source.architecture,
                self.roles.sampler,
                longest_sequence(self.requested),
            )
        # Asked with the requested attention: the model has `blocked` already if there is a fault.
        fault = kernel_fault(replace(model, attention=self.requested.model.attention))
        if fault:
            self.console.note(
                "attention is blocked: our kernels do not work on this "
                f"{model.role.platform.upper()} ({fault})"
            )
        sampler = model.on(self.roles.sampler)
        check_experts(model)
        check_experts(sampler)
        is_without_kernel = not decodes_by_kernel(sampler) and sampler.role.platform != "cpu"
        if is_without_kernel and model.attention == "auto":
            self.console.note(f"decoding goes without its kernel: {decode_kernel_refusal(sampler)}")
        if self.trains:
            largest = micro_batch_shapes(self.config_for_devices, model.role.row_shards)[0]
            rows = largest.rows
            length = largest.length
        else:
            rows = 1
            length = self.requested.sampling.max_prompt_tokens
        # Raises ShoalError if the kernel cannot compute this shape.
        attention_kind(model, rows, length)
        multiply_exactly(model.dtype, self.stack)
        return model

    @stage("model", "model.path", needs=("model_source",), commands=("train", *SAMPLES_ALONE))
    def check_weight_files(self) -> None:
        """Checks the weights' files by their headers; raises ShoalError if they do not fit the
        model."""
        self.model_source.check()

    @stage("teacher", "teacher.path", needs=("model_source",), commands=TRAIN_OR_DOCTOR)
    def teacher_sources(self) -> dict[str, ModelSource]:
        """Finds the models that `teacher.path` names and returns them by their teachers' names,
        each like `model_source`, without its weights; {} if it names none."""
        return find_teachers(self.requested, self.model_source, self.console)

    @stage("critic", "critic.path", needs=("model_source",), commands=TRAIN_OR_DOCTOR)
    def critic_source(self) -> ModelSource | None:
        """Finds the model that the critic begins with and returns it like `model_source`, without
        its weights; None if it begins with the model's own."""
        if not self.requested.critic_path:
            return None
        return find_critic(self.requested, self.model_source, self.console)

    # ---- prompts

    @stage("tokenizer", "model.path", needs=("model_source",), commands=WITH_MODEL)
    def tokenizer(self) -> Tokenizer:
        """Returns the model's tokenizer. In training its notes and those of the model are added to
        the findings."""
        tokenizer = self.model_source.tokenizer
        if self.trains:
            notes = list(self.model_source.notes) + list(tokenizer.notes)
            check_tokenizer(tokenizer, notes, self.findings)
        return tokenizer

    @stage(
        "teacher",
        "teacher.address",
        needs=("model_source", "tokenizer", "world"),
        commands=TRAIN_OR_DOCTOR,
    )
    def teacher_servers(self) -> dict[str, TeacherServer]:
        """Reaches the servers that `teacher.address` names and returns them by their teachers'
        names; {} if it names none. ShoalError if one cannot say what the run wants to know."""
        world = self.world if self.has("world") else World()
        servers = {}
        for name, address in self.requested.teacher.addresses.items():
            servers[name] = TeacherServer.open(
                address,
                config=self.requested,
                tokenizer=self.tokenizer,
                vocab_size=self.model_source.architecture.vocab_size,
                world=world,
            )
        return servers

    @stage("template", "model.template", needs=("sessions", "tokenizer"), commands=WITH_TASK)
    def turn_formats(self) -> TurnFormats | None:
        """Returns how the turns of tools and environments are written as tokens; None if a rollout
        is a single answer, because there are no `sessions`. Side effect: decides
        `environment.call_format`, if it was left open and the tokenizer's form is known."""
        if not self.sessions:
            return None
        settings = self.requested
        call_format = written_call_format(self.tokenizer, self.sessions)
        if call_format:
            settings = self.decide(settings, "environment.call_format", call_format)
        return TurnFormats(
            self.tokenizer,
            self.sessions,
            section_of(settings),
            self.console.note,
            settings.sampling.max_completion_tokens,
        )

    def encode(self, example: Example) -> np.ndarray:
        """Returns the token ids of an example's prompt, int32[T], including the description of its
        tools."""
        if self.has("turn_formats") and self.turn_formats:
            return self.turn_formats.encode(example)
        return self.tokenizer.encode_prompt(example.prompt)

    def encode_with_hint(self, example: Example) -> np.ndarray:
        """Returns the token ids of the prompt that teachers read in place of an example's,
        int32[T], by `teacher.hint`."""
        return self.encode(self.hint.in_example(example))

    @functools.cached_property
    def hint(self) -> Hint:
        """What `teacher.hint` makes of a row's prompt. ShoalError if it is no template."""
        return Hint.parse(self.requested.teacher.hint)

    @stage(
        "data", "task.path", needs=("loaded_task", "tokenizer", "turn_formats"), commands=WITH_TASK
    )
    def evaluation_sets(self) -> Mapping[str, Sequence[TokenizedExample]]:
        """Returns the tokenized questions of each evaluation set, by name; {} if the task has none.
        A set whose prompts are all too long is left out with a warning; if that is the first set,
        its ShoalError is raised. Any other fault of a set is raised too."""
        warn = self.findings.of("data").warning if self.trains else self.console.warning
        note = self.console.note
        sampling = self.requested.sampling
        sets = {}
        for name, examples in self.loaded_task.evaluations.items():
            try:
                sets[name] = encode_all(name, examples, self.encode, sampling, warn, note)
            except ShoalError as error:
                if not sets or error.key != "sampling.max_prompt_tokens":
                    raise
                warn(f"{name} is not evaluated: {error}")
        return sets

    @property
    def prompts_per_step(self) -> int:
        """The number of prompts of a step. Until the devices are known it is
        `batch.prompts_per_device` if that is set, as in a run on one device, else
        `batch.prompts_per_step`."""
        if self.is_open("config_for_devices"):
            return self.config_for_devices.batch.prompts_per_step
        batch = self.requested.batch
        return batch.prompts_per_device or batch.prompts_per_step

    @stage(
        "data",
        "task.path",
        needs=("loaded_task", "tokenizer", "turn_formats"),
        after=("config_for_devices",),
        commands=TRAIN_OR_DOCTOR,
    )
    def prompts(self) -> PromptStream:
        """Returns the stream of training prompts, in the order of the run, from its beginning."""
        return open_prompts(self.requested, self.prompts_per_step, self.loaded_task, self.encode)

    @stage(
        "teacher",
        "teacher.hint",
        needs=("loaded_task", "tokenizer", "turn_formats"),
        commands=TRAIN_OR_DOCTOR,
    )
    def check_teachers_rows(self) -> None:
        """Raises ShoalError if a training row names no teacher although there are several, or if
        `teacher.hint` cannot be put into it or makes its prompt too long. Of more rows than are
        measured a part is checked, spread over the data."""
        section = self.requested.teacher
        if len(section.names) == 1 and not section.hint:
            return
        check_rows(
            section,
            self.loaded_task.train,
            encode=self.encode,
            encode_with_hint=self.encode_with_hint if section.hint else None,
            max_tokens=self.requested.sampling.max_prompt_tokens,
            most_rows=MOST_MEASURED,
        )

    @property
    def first_prompt(self) -> TokenizedExample:
        """The first prompt of the first step. The stream does not advance."""
        return self.prompts.peek(self.prompts_per_step)

    @stage(
        "template",
        "model.template",
        needs=("loaded_task", "tokenizer", "turn_formats"),
        after=("config_for_devices", "evaluation_sets"),
        commands=TRAIN_OR_DOCTOR,
    )
    def prompt_lengths(self) -> str:
        """Checks training prompts that are spread over the data, and those of the evaluation sets,
        adds findings, and returns a text with their lengths, like `36 to 55 tokens (held_out 37 to
        55)`. ShoalError if the template refuses all of these prompts."""
        sets = self.evaluation_sets if self.is_open("evaluation_sets") else {}
        return check_prompts(
            config=self.requested,
            prompts_per_step=self.prompts_per_step,
            task=self.loaded_task,
            tokenizer=self.tokenizer,
            encode=self.encode,
            findings=self.findings,
            sets=sets,
        )

    # ---- what follows from the data

    @stage(
        "memory",
        "sampling.prompt_slot_tokens",
        needs=(
            "loaded_task",
            "sessions",
            "reward_functions",
            "config_for_devices",
            "tokenizer",
            "turn_formats",
            "evaluation_sets",
        ),
        commands=WITH_TASK,
    )
    def sampling_settings(self) -> SamplingSection:
        """Returns the settings of sampling with `sampling.prompt_slot_tokens` and
        `sampling.evaluation_slots` decided from the data, if they were left open: the room for the
        longest prompt (0, which means `sampling.max_prompt_tokens`, if not all prompts are known
        before the run), and the number of completions of a whole evaluation."""
        settings = self.config_for_devices if self.trains else self.requested
        evaluator = make_evaluator(settings, self.evaluation_sets, self.task)
        settings = self.with_prompt_slot_tokens(settings)
        completions = evaluator.num_completions(full=True)
        settings = self.decide(
            settings,
            "sampling.evaluation_slots",
            completions,
            {"completions of an evaluation": completions},
        )
        return settings.sampling

    @stage("devices", "mesh", needs=("config_for_devices", "sampling_settings"), commands=ESTIMATES)
    def config(self) -> Config:
        """Returns the configuration that a training job works with: what was requested, with every
        key that was left open decided. A job of `estimate` reads no data, so there the sampler's
        slots stay open."""
        # `sampling_settings` needs `turn_formats`, which decides `environment.call_format`.
        return resolved(self.config_for_devices, self.decisions)

    @stage(
        needs=(
            "loaded_task",
            "reward_functions",
            "reward_pool",
            "roles",
            "config_for_devices",
            "config",
            "tokenizer",
            "turn_formats",
            "prompts",
        ),
        commands=TRAIN,
    )
    def reward_findings(self) -> list[Finding]:
        """Scores known answers (right, wrong, empty, ...) to the first prompt of the run and to one
        of each other data source, and returns what is found about the reward functions. The
        findings are also added to the job's. Returns [] for a resumed run, because it was tried
        when it began; in a dry run with a reward model, because weights are not read; and with
        environments, because their right answers are not known. ShoalError if the functions cannot
        work at all."""
        if self.resumed or self.loaded_task.environments:
            return []
        if is_offline() and reward_models(self.reward_functions):
            return []
        findings = check_first_prompts(
            self.config,
            self._examples_by_source(),
            spread_rows(self.loaded_task.train, OTHER_EXAMPLES),
            model_text_maker(self.tokenizer, self.encode),
            self.reward_pool,
            has_calls=bool(self.loaded_task.tools),
        )
        self.findings.extend(findings)
        return findings

    def _examples_by_source(self) -> dict[str, Example]:
        """Returns the first prompt's row of the run, and one of each other data source that is
        among SOURCE_ROWS rows spread over the training data, by the source's name; at most
        MOST_SOURCES of them."""
        rows = spread_rows(self.loaded_task.train, SOURCE_ROWS)
        by_source: dict[str, Example] = {}
        for example in [self.first_prompt.example, *rows]:
            source = str(example.columns.get(DATA_SOURCE) or "")
            if len(by_source) < MOST_SOURCES:
                by_source.setdefault(source, example)
        return by_source

    @stage(
        "reward",
        "reward.functions",
        needs=("loaded_task", "reward_functions", "reward_pool", "tokenizer", "evaluation_sets"),
        commands=("eval",),
    )
    def check_lost_answers(self) -> None:
        """Warns if the reward functions of an evaluation would find no answer in any completion,
        for example because the prompt already opens the tag that they look for: every answer would
        count as wrong. Tries it on the first question of the first set that has one. Does nothing
        with environments or reward models."""
        if self.loaded_task.environments or reward_models(self.reward_functions):
            return
        sets_with_questions = [
            questions for questions in self.evaluation_sets.values() if questions
        ]
        if not sets_with_questions:
            return
        first = sets_with_questions[0][0]

        def prompt_ids_of(_: Example) -> np.ndarray:
            return first.prompt_ids

        to_model_text = model_text_maker(self.tokenizer, prompt_ids_of)
        lost = lost_in_decoding(self.reward_pool, [first.example], to_model_text)
        if lost:
            self.findings.of("reward").warning(lost)

    # ---- memory and disk

    @stage(
        "memory",
        "model.path",
        needs=("devices", "model_source", "roles", "config", "model"),
        after=("teacher_sources", "critic_source"),
        commands=TRAIN,
    )
    def memory_finding(self) -> Finding:
        """Compares the memory that a device must hold with what it has, as far as this is known
        before anything is compiled, and returns the finding, which is also added to the job's. Adds
        a warning if the learning rate is high for the model's size. ShoalError if a device would
        need more than its whole memory, free or not."""
        check_lr_for_size(self.config, parameter_count(self.model.architecture), self.findings)
        finding = check_memory(self)
        self.findings.extend([finding])
        return finding

    @stage(needs=("config", "model"))
    def learner(self) -> Learner:
        """Makes the trainer's compiled steps, which compute gradients and apply them; reads no
        weights."""
        return Learner(
            self.model,
            make_objective(self.config.algorithm, self.config.teacher, self.config.critic),
            self.config.optimizer,
            num_updates(self.config),
            self.config.seed,
        )

    @stage(needs=("config", "model", "learner"))
    def critic(self) -> Critic | None:
        """Makes the critic's compiled steps; reads no weights. None if advantages come from groups
        alone."""
        if not self.config.algorithm.has_critic:
            return None
        return Critic.of(
            self.model,
            self.config.critic,
            self.config.optimizer,
            num_updates(self.config),
            self.config.seed,
        )

    @property
    def state_shapes(self) -> TrainState:
        """The shapes of the trainer's state, with the critic's if there is one."""
        shapes = self.learner.shapes()
        if self.critic is None:
            return shapes
        return replace(shapes, critic=self.critic.learner.shapes())

    @stage(fix_key="base_output_directory", needs=("config", "learner", "critic"), commands=TRAIN)
    def check_disk_space(self) -> None:
        """Raises ShoalError if the disk of the run's folder has less free space than one checkpoint
        takes. Nothing is refused for a run of no steps. With several processes nothing is refused
        either: each writes a part, perhaps to another disk."""
        base = self.resumed or check_local(
            self.config.base_output_directory, "base_output_directory", RUNS
        )
        needed = checkpoint_bytes(self.state_shapes)
        # `nearest_folder` begins above its argument: at `base`.
        free = shutil.disk_usage(nearest_folder(base / "any")).free
        if free < needed and self.config.steps and jax.process_count() == 1:
            raise ShoalError(
                f"base_output_directory={base}: a checkpoint takes {gib(needed)}, and the disk has "
                f"{gib(free)} free: make room, or choose a folder on another disk"
            )

    # ---- what samples

    @stage(
        "memory",
        "sampling.slots_per_device",
        needs=("config", "roles", "model", "tokenizer"),
        commands=("doctor",),
    )
    def engines(self) -> dict[str, Engine]:
        """Makes the sampler's engines of a training run, by name: `training`, `evaluation`,
        `pass@k`. Several names may have the same engine. Nothing is compiled yet."""
        return dict(run_engines(self.config, self.model, self.roles, self.tokenizer))

    @stage(needs=("loaded_task", "reward_functions", "reward_pool", "tokenizer"))
    def group_rewards(self) -> GroupRewards:
        """Makes the object that scores sampled completions in the `reward_pool` and joins each
        prompt's completions and scores to a `Group`."""
        return GroupRewards(
            self.task, self.reward_pool, self.tokenizer.text, section_of(self.requested).on_error
        )

    @stage(
        needs=(
            "loaded_task",
            "reward_functions",
            "group_rewards",
            "cluster",
            "world",
            "roles",
            "model_source",
            "config",
            "model",
            "tokenizer",
            "turn_formats",
            "sampling_settings",
        )
    )
    def rollout_source(self) -> Fleet | MultiProcessSource | DataSource:
        """Makes the source from which groups of completions are requested and taken. A command that
        does not train samples in this thread, by a fleet with a single host. Training has the fleet
        that its `sampler.kind` and devices ask for; around that a `MultiProcessSource` if the run
        has several processes; and around that a `DataSource` if training learns answers of the
        data, so that only evaluations are sampled. The source is closed with the job."""
        c = self.requested
        if not self.trains:
            turn_driver = None
            if self.turn_formats:
                num_slots = c.batch * self.model.role.mesh.size
                turn_driver = make_turn_driver(self.turn_formats, num_slots, c.sampling)
            fleet = caller_fleet(
                MemoryStore(self.model, delete_source=True),
                self.engine_maker(),
                self.group_rewards,
                c.seed,
                self.console.answered,
                turn_driver=turn_driver,
            )
            return self.stack.enter_context(closing(fleet))
        fleet = training_fleet(
            config=self.config,
            model=self.model,
            roles=self.roles,
            spec=self.model_source,
            rewards=self.group_rewards,
            stop=self.stop,
            console=self.console,
            cluster=self.cluster,
            turns=self.turn_formats,
        )
        source = fleet
        if self.world.count > 1:
            source = MultiProcessSource(fleet, self.world, self.stop)
        self.stack.enter_context(closing(source))
        if self.config.algorithm.learns_from_data:
            return DataSource(source, self.tokenizer, self.config)
        return source

    def engine_maker(self) -> Callable[[Purpose, int], Engine]:
        """Returns a function (purpose, group size) -> engine, which makes the engines of the
        sampler's first host. Each call of `engine_maker` returns a function with engines of its
        own."""
        if self.trains:
            return training_engine_maker(self.config, self.model, self.roles, self.tokenizer)
        c = self.requested
        group_size = 1
        truncated = isinstance(c, ServeConfig)
        if isinstance(c, GenerateConfig):
            group_size = max(1, c.num_generations)
        sampling = c.sampling
        slots = c.batch * self.model.role.mesh.size
        if isinstance(c, EvalConfig):
            group_size = c.for_task(self.task.judges).largest_group
            truncated = c.evaluation.params(sampling.params).truncated
            sampling = self.sampling_settings
            # 0 slots: no limit but the batch's.
            slots = min(slots, sampling.evaluation_slots or slots)
        return sampling_engine_maker(
            model=self.model,
            tokenizer=self.tokenizer,
            sampling=sampling,
            slots=slots,
            group_size=group_size,
            truncated=truncated,
        )

    # ---- keys that the configuration left open

    def decide(
        self, config: Any, key: str, value: Any, facts: Mapping[str, str | int] | None = None
    ) -> Any:
        """Returns the configuration with `value` (or the earlier value, see below) for `key` if the
        user left that key open, else `config` unchanged. Side effect: records the decision in
        `decisions` with what it was made from, the keys and `facts` that the key's declaration
        names in `decided_from`. A resumed run keeps its earlier value while all of these are the
        same, and warns if the value changes. `facts`: name -> value, for sources that are no
        keys."""
        if key not in open_keys(self.requested):
            return config
        known_facts = facts or {}
        sources: dict[str, Any] = {}
        for source in keys_of(type(config))[key].decided_from:
            if source in known_facts:
                sources[source] = known_facts[source]
            else:
                from_key = get_value(config, source)
                # A stored decision has lists, because it is read back from a file.
                sources[source] = list(from_key) if isinstance(from_key, tuple) else from_key
        before = self.stored_decisions.get(key)
        if before is not None and before.sources == sources:
            value = before.value
        self.decisions[key] = Decision(value, sources)
        if self.resumed:
            self._warn_of_change(key, before, self.decisions[key])
        return with_values(config, {key: value})

    def _warn_of_change(self, key: str, before: Decision | None, now: Decision) -> None:
        """Warns, with the reason, if the value that a resumed run now decides for `key` differs
        from the one that it worked with before. `before`: the stored decision; None if the user had
        given the key then, or if it was not stored."""
        assert self.resumed
        if before is None:
            requested_before = read_requested(self.resumed)
            if key in open_keys(requested_before):
                return  # decided before too, but that value was not stored
            # the user's own value then
            value_before = get_value(requested_before, key)
            reason = "it was given before, and is left open now"
        else:
            value_before = before.value
            changes = []
            for source, value in now.sources.items():
                if before.sources.get(source) != value:
                    was = shown(before.sources.get(source))
                    changes.append(f"{source} was {was}, and is {shown(value)} now")
            reason = "; ".join(changes)
        if value_before != now.value:
            self.console.warning(
                f"{key} changes from {shown(value_before)} to {shown(now.value)}, which the run "
                f"decides itself: {reason}"
            )

    def decide_sampler_tensor(self, roles: Roles) -> Config:
        """Returns the requested configuration with `mesh.sampler_tensor` decided, and recorded in
        `decisions`: the devices of a replica in `roles`, or, with `sampler.kind=ray`, all devices
        of a worker. A value that the user set stays. Of vLLM it stays open, because its servers
        split a model themselves."""
        config = self.requested
        if config.sampler.kind == "vllm":
            return config
        tensor = roles.sampler.tensor
        devices = _devices_text(roles.sampler)
        if config.sampler.is_remote:
            tensor = config.sampler.devices_per_worker
            devices = "each worker's own"
        return self.decide(
            config, "mesh.sampler_tensor", tensor, {"devices of the sampler": devices}
        )

    def with_prompt_slot_tokens(self, settings: Any) -> Any:
        """Returns the configuration `settings` with `sampling.prompt_slot_tokens` decided, if it
        was left open, and recorded in `decisions`. It is the number of tokens that a slot of the
        sampler holds for a prompt: the longest prompt, rounded up to a multiple of KEY_BLOCK, if
        all prompts are known before the run. 0, which means `sampling.max_prompt_tokens`, if they
        are not, or if that limit is not larger. ShoalError if the user set fewer than needed."""
        sampling = settings.sampling
        requested = self.requested.sampling.prompt_slot_tokens
        is_known = self.requested.task.name in OWN_DATA and self.sessions is None
        if not is_known:
            if requested and requested < sampling.max_prompt_tokens:
                raise ShoalError(
                    f"sampling.prompt_slot_tokens={requested}: the prompts of this job are known "
                    "only when it runs, and may have "
                    f"sampling.max_prompt_tokens={sampling.max_prompt_tokens} tokens; leave it out"
                )
            return self.decide(
                settings,
                "sampling.prompt_slot_tokens",
                0,
                {"longest prompt": "not known before the run"},
            )
        # A run that learns from the data's answers samples no completions in training.
        is_sampled = self.trains and not self.requested.algorithm.learns_from_data
        examples = self.loaded_task.train if is_sampled else ()
        longest = longest_prompt(examples, self.evaluation_sets, self.encode, sampling)
        if requested and longest > requested:
            raise ShoalError(
                f"sampling.prompt_slot_tokens={requested}: the longest prompt of the data has "
                f"{longest} tokens; leave it out, or lower sampling.max_prompt_tokens"
            )
        needed = -(-longest // KEY_BLOCK) * KEY_BLOCK  # rounded up to whole blocks
        room = needed if needed < sampling.max_prompt_tokens else 0
        return self.decide(
            settings, "sampling.prompt_slot_tokens", room, {"longest prompt": needed}
        )

    @property
    def advised_config(self) -> Config:
        """The configuration that advice changes: `config` with `model.remat` and
        `mesh.sampler_tensor` as they were requested. Where they are open they stay so, because they
        are decided again for each change that advice tries."""
        requested = self.requested
        return with_values(
            self.config,
            {
                "model.remat": requested.model.remat,
                "mesh.sampler_tensor": requested.mesh.sampler_tensor,
            },
        )

    def budget_for(self, config: Config) -> Budget:
        """Returns the budget that the job would have with another configuration, for the same model
        on the same devices: usually `advised_config` with some keys changed. ShoalError if such a
        job is impossible. Prints nothing and decides nothing in this job."""
        spec = self.model_source
        if config.model.lora != self.config.model.lora:
            spec = replace(spec, architecture=adapted(config.model.lora, spec.architecture))
        other = Job(config, Console(io.StringIO()), devices=self.devices, model_source=spec)
        # The other job, one of `estimate`, opens neither of them itself.
        for name in ("teacher_sources", "critic_source", "cluster"):
            if name in self.opened:
                other.opened[name] = self.opened[name]
        with other:
            return job_budget(other)

    # ---- what trains

    def open_reference(self, first: Params | None) -> ModelScorer | None:
        """Returns the model with the weights that the run begins with on the devices of the
        reference, in the data type of the computation; None if neither the algorithm needs
        reference log-probs nor the model is its own teacher (`needs_first_weights`). `first`: the
        weights that the run begins with, or only those that an adapter freezes, if they have been
        read already; None: they are read here."""
        if not needs_first_weights(self.config):
            return None
        policy = self.model.architecture
        a = reference_architecture(self.config, policy)
        model = replace(self.model, architecture=a, role=self.roles.reference)
        if first is None:
            base = self.model_source.read(model.role, model.dtype)
        else:
            base_model = replace(model, architecture=a.base)
            base = place_parameters(base_model, without_adapter(policy, first))
        if not a.adapter:
            return ModelScorer(model, base)
        # Read once more, not shared with the policy: that adapter is trained, and in a resumed run
        # it comes from a checkpoint.
        adapter = self.model_source.read_adapter(model.role, model.dtype, self.requested.seed)
        return ModelScorer(model, joined(adapter, as_frozen(a, base)))

    def load_teachers(self) -> dict[str, ModelScorer]:
        """Loads the teachers that have weights of their own onto the devices of the reference, and
        returns their scorers by name."""
        scorers = {}
        for name, source in self.teacher_sources.items():
            scorers[name] = load_scorer(self.config, source, self.roles.reference)
        return scorers

    def make_updater(
        self,
        initial: ModelScorer | None,
        teachers: Mapping[str, ModelScorer] | None,
        servers: Mapping[str, TeacherServer] | None = None,
    ) -> Updater:
        """Makes the updater, which turns groups with rewards into updates of the weights.
        `initial`: the model with the weights that the run begins with, None if nothing needs it;
        `teachers`: those that have weights of their own here, by name; `servers`: those that are
        behind an address; None for none."""
        c = self.config
        scorers = dict(teachers or {})
        if c.teacher.is_first_policy and initial is not None:
            scorers[""] = initial
        all_teachers = None
        if scorers or servers or c.teacher.is_live_policy:
            prompt_of = self.encode_with_hint if c.teacher.hint else None
            all_teachers = Teachers.of(c.teacher, scorers, self.learner.model, prompt_of, servers)
        return Updater(
            self.learner,
            c.algorithm,
            c.batch,
            temperature=c.sampling.temperature,
            seed=c.seed,
            reference=initial if c.algorithm.scores_reference else None,
            teachers=all_teachers,
            critic=self.critic,
            max_tokens=c.sampling.max_completion_tokens,
            longest=longest_sequence(c),
            max_support=max_support(c),
            replays_routes=replays_routes(c),
            own_advantage=self.own_advantage,
        )

    def load_critic(self, policy: Params) -> Params | None:
        """Returns the first weights of the critic, trained and frozen; None without a critic.
        `policy`: all weights that the run begins with, of which the critic has the same arrays, if
        it does not begin with a model of its own (`critic.path`): no update changes an array. Of a
        critic that shares the policy's layers only the head counts."""
        if self.critic is None:
            return None
        model = self.critic.learner.model
        a = model.architecture
        seed = self.requested.seed
        # New, so that all values are 0 at first.
        head = initialise_specs(param_specs(a).lm_head, seed, model.role)
        if self.critic_source is None:
            return replace(policy, lm_head=head)
        if a.adapter is None:
            whole = self.critic_source.read(model.role, np.float32)
            return replace(whole, lm_head=head)
        adapter = peft.begin(a, model.role, np.float32, seed)
        return joined(adapter, self.load_frozen_of_critic(None))

    def load_frozen_of_critic(self, policy: Params | None) -> Params | None:
        """Returns the weights of the critic that training does not change, with None in place of
        the others; None if there are none, as in a critic that shares the policy's layers.
        `policy`: those of the policy, which are the critic's too, unless it begins with a model of
        its own."""
        if self.critic is None or self.critic.shares_layers:
            return None
        model = self.critic.learner.model
        a = model.architecture
        if a.adapter is None:
            return None
        if self.critic_source is None:
            return None if policy is None else replace(policy, lm_head=None)
        keep = quantiser(a.base, model.role)
        base = self.critic_source.read(model.role, model.dtype, keep=keep)
        return as_frozen(a, replace(base, lm_head=None))

    def load_weights(self, model_source: ModelSource | None = None) -> Params:
        """Reads the first weights and returns them. In training they are on the trainer's devices,
        in float32, or, if an adapter freezes them, in the model's data type; a new adapter is made
        from `seed`. Else they are on the sampler's devices, in the model's data type. The job keeps
        no reference to them, because they would occupy a model's memory for all of the run.
        `model_source`: the model whose weights are read, in training, if it is not the job's; None:
        the job's."""
        if not self.trains:
            return self.model_source.load(self.roles.sampler, self.model.dtype)
        source = model_source or self.model_source
        return source.load(self.roles.trainer, np.float32, self.model.dtype, self.requested.seed)


def spread_rows(rows: Sequence[Example], most: int) -> list[Example]:
    """Returns at most `most` rows, from the first to the last, with equal distances between
    them."""
    numbers = np.linspace(0, len(rows) - 1, min(most, len(rows))).astype(int)
    return [rows[number] for number in numbers]


def _devices_text(role: Role) -> str:
    """Returns number and kind of a role's devices, like `8 x TPU v6 lite`."""
    return f"{role.mesh.size} x {role.mesh.devices.flat[0].device_kind}"


def _command_of(config: Any, model_source: ModelSource | None) -> Command:
    """Returns the command that a configuration's type belongs to: `eval`, `generate` or `serve` for
    theirs, also if the job was given a model; of the others `estimate` for a plan or if the job was
    given a model, else `doctor` or `train`."""
    if isinstance(config, EvalConfig):
        return "eval"
    if isinstance(config, GenerateConfig):
        return "generate"
    if isinstance(config, ServeConfig):
        return "serve"
    if model_source is not None or isinstance(config, PlanConfig):
        return "estimate"
    if isinstance(config, DoctorConfig):
        return "doctor"
    return "train"
