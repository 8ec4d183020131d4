"""Puts a job together in one process: from a configuration to devices, model, data, sampler, trainer, and back.

    config -> roles -> model, tokenizer -> task, prompts -> engine, source -> learner, updater -> Run.train
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from shoal.run.prompt_file import completion_rows, read_prompts
from shoal.config.loading import Resolved
from shoal.config.text import texts_of, to_dict
from shoal.config.schema import (
    Config,
    ExportConfig,
    GenerateConfig,
    MeshSection,
    ModelSection,
    SamplingSection,
)
from shoal.mesh import Role, Roles, make_roles
from shoal.model import hf
from shoal.model.tokenizer import Tokenizer
from shoal.model.transformer import Architecture, Model
from shoal.report.console import Console
from shoal.report.folder import RunFolder, is_run, read_summary
from shoal.report.sink import Sink, check_sinks, make_sinks
from shoal.rewards.judge import Judge
from shoal.rollout.player import Player
from shoal.rollout.publication import publish_to
from shoal.rollout.source import LocalSource
from shoal.run.brief import brief
from shoal.run.compilation import CompilationCounter
from shoal.run.interrupt import StopRequest
from shoal.run.learning import (
    algorithm_warnings,
    check_trainable,
    make_learner,
    make_updater,
    max_support,
    schedule_of,
)
from shoal.run.loading import resolve_model
from shoal.run.output import check_local, check_new_folder, check_writable, write_text, writing
from shoal.run.profile import Profiler
from shoal.run.resume import ResumePlan, compare, fingerprint, resolve_run
from shoal.run.task import load_task, with_overlong
from shoal.sampler.engine import Engine, drain
from shoal.tasks.task import Task
from shoal.trainer.array_tree import find_tree
from shoal.trainer.checkpoint import MODEL_FOLDER, Checkpoints, Restored, restore_newest
from shoal.trainer.curriculum import PassRates, Prepared, PromptStream, prepare
from shoal.trainer.evaluation import Evaluator
from shoal.trainer.loop import Run, sampling_params
from shoal.trainer.recorder import Recorder
from shoal.trainer.step import Learner, ModelScorer
from shoal.trainer.update import num_scorings
from shoal.trainer.utilisation import Utilisation
from shoal.types import Address, Params, Purpose, SampleRequest, ShoalError

REMAT_BYTES = 2 << 30
"""Activations of a micro-batch above which blocks are recomputed by default."""


@dataclass(frozen=True)
class LoadedModel:
    """A model as a job uses it."""

    folder: Path  # holds the tokenizer, and config.json unless there is `config`
    architecture: Architecture
    tokenizer: Tokenizer
    load: Callable[[], Params]  # reads the weights
    config: dict[str, Any] | None = None  # in place of the folder's config.json


def open_model(section: ModelSection, role: Role, console: Console, dtype: Any = jnp.float32) -> LoadedModel:
    """A folder or hub id in Hugging Face format, a run of ours or one of its checkpoints, a MaxText checkpoint; weights
    in `dtype`."""
    found = resolve_model(section)
    tokenizer = Tokenizer.load(found.tokenizer, section.template)
    tokenizer.check_vocabulary(found.architecture)
    for note in (*found.notes, *tokenizer.notes):
        console.note(note)
    return LoadedModel(found.tokenizer, found.architecture, tokenizer, partial(found.load, role, dtype), found.config)


def compute_dtype(name: str) -> Any:
    if name == "auto":
        name = "float32" if jax.default_backend() == "cpu" else "bfloat16"
    return jnp.dtype(name)


def activation_bytes(a: Architecture, tokens: int, dtype: Any) -> int:
    """What the backward pass keeps of `tokens` tokens where each layer's products with weights are kept."""
    a_token = 3 * a.hidden_size + (a.num_heads + 2 * a.num_kv_heads) * a.head_dim + 2 * a.intermediate_size
    return a_token * a.num_layers * tokens * jnp.dtype(dtype).itemsize


def make_model(section: ModelSection, opened: LoadedModel, role: Role, micro_tokens: int) -> Model:
    dtype, remat = compute_dtype(section.dtype), section.remat
    if remat == "auto":
        remat = "full" if activation_bytes(opened.architecture, micro_tokens, dtype) > REMAT_BYTES else "dots"
    if dtype == jnp.float32:  # accelerators would multiply in fewer bits: float32 was asked for
        jax.config.update("jax_default_matmul_precision", "highest")
    return Model(opened.architecture, role, dtype, remat)


def engine_maker(model: Model, tokenizer: Tokenizer, sampling: SamplingSection, slots: int,
                 max_support: int = 0) -> Callable[[int], Engine]:
    """Makes the engine for groups of a size; `slots` completions at once in all."""

    def make(group_size: int) -> Engine:
        return Engine(
            model, slots=slots, group_size=group_size, max_prompt_tokens=sampling.max_prompt_tokens,
            max_completion_tokens=sampling.max_completion_tokens, eos_ids=tokenizer.eos_ids,
            decode=tokenizer.decode, truncated=sampling_params(sampling).truncated, max_support=max_support)

    return make


def training_engines(config: Config, model: Model, tokenizer: Tokenizer) -> Callable[[int], Engine]:
    """Makes the engines of a training run; `model` is the sampler's. Only groups of training's size tell what was
    kept, and are bounded by it."""
    slots = config.sampling.slots_per_device * model.role.mesh.size
    slots = slots or config.batch.prompts_per_step * config.batch.group_size
    training = engine_maker(model, tokenizer, config.sampling, slots, max_support(config))
    others = engine_maker(model, tokenizer, config.sampling, slots)
    return lambda group_size: (training if group_size == config.batch.group_size else others)(group_size)


def prepare_sets(task: Task, tokenizer: Tokenizer, sampling: SamplingSection,
                 console: Console) -> dict[str, list[Prepared]]:
    """Each evaluation set's questions with their tokens; those too long are dropped, counted and said."""
    sets = {}
    for subset, examples in task.evaluations.items():
        prepared = [prepare(example, tokenizer.encode_prompt, sampling.max_prompt_tokens, sampling.long_prompts)
                    for example in examples]
        sets[subset] = [entry for entry in prepared if entry is not None]
        if dropped := len(prepared) - len(sets[subset]):
            console.warning(f"{dropped} of {len(prepared)} questions of {subset} have more than "
                            f"sampling.max_prompt_tokens={sampling.max_prompt_tokens} tokens and are left out")
        if not sets[subset]:
            raise ShoalError(f"no question of {subset} has at most {sampling.max_prompt_tokens} tokens: raise "
                             "sampling.max_prompt_tokens")
    return sets


def peak_bytes() -> int:
    """Most memory used on a device: the accelerator's own figure, on CPU the process's resident peak."""
    stats = jax.local_devices()[0].memory_stats()
    if stats and "peak_bytes_in_use" in stats:
        return int(stats["peak_bytes_in_use"])
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def with_prompts(config: Config, roles: Roles) -> Config:
    """P counted for all of the trainer's devices, where it was given for one of them."""
    if not config.batch.prompts_per_device:
        return config
    devices, parts = roles.trainer.mesh.size, config.algorithm.num_minibatches
    count = config.batch.prompts_per_device * devices
    if parts > count:
        each = config.batch.prompts_per_device
        raise ShoalError(f"batch.prompts_per_device={each} on {devices} devices gives {count} "
                         f"prompts a step, fewer than algorithm.num_minibatches={parts}: raise it or lower that")
    return replace(config, batch=replace(config.batch, prompts_per_step=count))


def open_teacher(config: Config, student: LoadedModel, role: Role, console: Console) -> ModelScorer | None:
    """The teacher with its weights, in the type of the computation."""
    if not config.teacher.path:
        return None
    opened = find_teacher(config, student, role, console)
    return ModelScorer(make_model(config.model, opened, role, config.batch.micro_tokens), opened.load())


def find_teacher(config: Config, student: LoadedModel, role: Role, console: Console) -> LoadedModel:
    """The teacher before its weights are read; ShoalError where it does not read the same tokens."""
    section = replace(config.model, path=config.teacher.path, name="", tokenizer="", template="")
    opened = open_model(section, role, console, compute_dtype(section.dtype))
    if opened.tokenizer.vocabulary() != student.tokenizer.vocabulary():
        raise ShoalError(f"teacher.path={config.teacher.path}: its vocabulary is not that of the model "
                         f"{config.model.path}, its log-probs would be of other tokens; take one of the same family")
    return opened


def assemble_run(plan: ResumePlan, reward_functions: Sequence[Callable], console: Console, stack: ExitStack,
                 task: Task | None = None) -> Run:
    """Everything that can be wrong with a configuration is met here, before the run folder exists. What must be closed
    at the end is put on `stack`."""
    started, config = time.perf_counter(), plan.config
    compilations = CompilationCounter()
    check_trainable(config)
    check_sinks(config.report)
    for text in algorithm_warnings(config):
        console.warning(text)
    task = task or load_task(config.task, config.reward, reward_functions, config.algorithm.advantage != "none")
    task = with_overlong(task, config.reward, config.sampling.max_completion_tokens)
    judge = stack.enter_context(closing(Judge(task.rewards, config.reward, config.steps)))  # before JAX has threads
    roles = make_roles(config.mesh)
    config = with_prompts(config, roles)
    if plan.run and (before := plan.config.batch.prompts_per_step) != (now := config.batch.prompts_per_step):
        console.warning(f"batch.prompts_per_step changes from {before} to {now}: the trainer has other devices")
    if roles.trainer.mesh.size < (there := jax.device_count()):
        console.warning(f"{roles.trainer.mesh.size} of {there} devices are used: mesh.fsdp=-1 takes them all")
    opened = open_planned(plan, roles.trainer, console)
    for note in task.notes:
        console.note(note)
    tokenizer = opened.tokenizer
    prompts = PromptStream(task.train, tokenizer.encode_prompt, config.seed, config.sampling.max_prompt_tokens,
                           config.sampling.long_prompts, PassRates(config.train.retire_above))
    sets = prepare_sets(task, tokenizer, config.sampling, console)
    every = config.sampling.long_prompts == "error"  # a prompt too long ends the run: before it begins
    first = prompts.peek(config.batch.prompts_per_step, config.steps if every else 1)
    console.first_prompt(tokenizer.decode(first.prompt_ids.tolist(), skip_special_tokens=False))
    if not plan.run:
        for finding in brief(config, task, tokenizer, first, judge):
            (console.note if finding.level == "ok" else console.warning)(finding.text)
    has_reference = config.algorithm.kl_coef > 0
    weights = opened.load() if has_reference or not plan.run else None
    teacher = open_teacher(config, opened, roles.reference, console)

    folder = open_folder(plan, console, stack)
    console.note(f"run folder {folder.path}")
    model = make_model(config.model, opened, roles.trainer, config.batch.micro_tokens)
    source = make_source(config, model.on(roles.sampler), tokenizer, task, judge)
    source.player.on_progress = console.answered
    stack.enter_context(closing(source))
    updater = make_updater(config, make_learner(config, model), weights, teacher)
    learner = updater.learner
    now = fingerprint(task, config.seed, weights if has_reference else None, teacher.parameters if teacher else None)
    restored = restore_latest(folder, learner, source, now, config, console) if plan.run else None
    resumed_at = (restored.version if restored else 0) if plan.run else None
    write_head(folder, opened, config, resumed_at or 0)
    sinks = open_sinks(folder, config, resumed_at, console, stack)
    recorder = Recorder(
        folder, console, prompts, config.steps, config.report.groups, source.read_clock, compilations.read, peak_bytes,
        sinks=sinks, started=started,
        utilisation=Utilisation.on(roles.trainer.mesh.devices.flat, opened.architecture, model.dtype,
                                   config.algorithm.num_epochs,
                                   num_scorings(config.algorithm, teacher is not None)))
    checkpoints = stack.enter_context(closing(
        Checkpoints(folder.checkpoints_path, config.checkpoint.keep_last, config.checkpoint.keep_best)))
    if weights is None and restored is None:
        weights = opened.load()
    recorder.spent("start", time.perf_counter() - started)
    return Run(
        config=config,
        parameters=None if restored else weights,
        updater=updater,
        source=source,
        prompts=prompts,
        evaluator=Evaluator(sets, sampling_params(config.sampling), config.train.pass_k, task),
        checkpoints=checkpoints,
        recorder=recorder,
        schedule=schedule_of(config.train),
        restored=restored,
        fingerprint=now,
        stopping=stack.enter_context(StopRequest()),
        around_step=Profiler(config.report.profile, folder.path / "profile", console.warning).step,
    )


def open_planned(plan: ResumePlan, role: Role, console: Console) -> LoadedModel:
    """The model; of a run to go on with, as its own folder tells of it: only first weights need `model.path`."""
    section, kept = plan.config.model, plan.run / MODEL_FOLDER if plan.run else None
    if kept is None or not (kept / "config.json").is_file():
        return open_model(section, role, console)
    own = replace(section, path=str(kept), name="", tokenizer="", template="")
    opened = open_model(own, role, console)
    return replace(opened, load=lambda: open_model(section, role, console).load())


def open_folder(plan: ResumePlan, console: Console, stack: ExitStack) -> RunFolder:
    """The run's folder, locked: a new one, or the one to go on with."""
    config = plan.config
    folder = stack.enter_context(
        RunFolder(plan.run) if plan.run else
        RunFolder.create(config.base_output_directory, config.run_name))
    if not plan.run and is_run(folder.path):
        raise ShoalError(f"another process has just started the run {folder.path}: give the same command again to go "
                         "on with it")
    if folder.no_locks:
        console.warning(f"the file system of {folder.path} grants no locks ({folder.no_locks}): nothing keeps a second "
                        "process out of this run")
    folder.groups_format = config.report.groups_format
    return folder


def write_head(folder: RunFolder, opened: LoadedModel, config: Config, version: int) -> None:
    """What a run folder holds from the start: the configuration (of the part that begins at `version`) and the model's
    files. From here on `last` means this run."""
    folder.write_config(*texts_of(config), version)
    folder.remember(config.base_output_directory)
    if opened.folder != folder.path / MODEL_FOLDER:
        with writing(folder.path, "base_output_directory"):
            copy_model_files(opened, folder.path / MODEL_FOLDER)


def open_sinks(folder: RunFolder, config: Config, resumed_at: int | None, console: Console,
               stack: ExitStack) -> list[Sink]:
    sinks = make_sinks(folder.path, config.report, to_dict(config), config.run_name or folder.path.name, resumed_at,
                       console.note, console.warning)
    for sink in sinks:
        stack.callback(sink.close)
    return sinks


def restore_latest(folder: RunFolder, learner: Learner, source: LocalSource, now: Mapping[str, Any], config: Config,
            console: Console) -> Restored | None:
    """The newest whole checkpoint of a run to go on with; None where it starts again from its beginning."""
    restored = restore_newest(folder.path, learner, source.shapes(), console.warning)
    if restored is None:
        console.note("no checkpoint of the run is there: it starts from its beginning, what it wrote is made anew")
        folder.rewind(-1)
        return None
    compare(restored.extra["facts"], now, console)
    if restored.version > config.steps:
        raise ShoalError(f"steps={config.steps}: the run {folder.path} has made {restored.version} already; give as "
                         "many or more")
    console.note(f"goes on from the checkpoint of step {restored.version}")
    return restored


def make_source(config: Config, model: Model, tokenizer: Tokenizer, task: Task, judge: Judge) -> LocalSource:
    player = Player(training_engines(config, model, tokenizer), task, judge, tokenizer.decode, config.seed)
    return LocalSource(model, player)


def copy_model_files(opened: LoadedModel, target: Path) -> None:
    """Tokenizer, the template that was trained with and, last, config.json, so that checkpoints need nothing else."""
    target.mkdir(parents=True, exist_ok=True)
    if opened.tokenizer.template:
        (target / "chat_template.jinja").write_text(opened.tokenizer.template, encoding="utf-8")
    own = () if opened.config else ("config.json",)
    for name in (*(name for name in hf.TOKENIZER_FILES if name != "chat_template.jinja"), *own):
        if (opened.folder / name).is_file():
            shutil.copy2(opened.folder / name, target / name)
    if opened.config:
        write_text(target / "config.json", json.dumps(opened.config, indent=2) + "\n", "base_output_directory")


def train(config: Config, resolved: Resolved | None = None, reward_functions: Sequence[Callable] = (),
          console: Console | None = None, task: Task | None = None) -> dict[str, Any]:
    """`shoal train`: returns the summary, which also stands in the run folder. Where the folder holds the run already,
    it goes on; one that has ended is left as it is."""
    with console or Console() as console, ExitStack() as stack:
        plan = resolve_run(config, resolved, console)
        if plan.run and (summary := finished_summary(plan)):
            console.note(f"{plan.run} has made its {plan.config.steps} steps already: give more steps to go on, "
                         "or another run_name")
            return summary
        return assemble_run(plan, reward_functions, console, stack, task).train()


def finished_summary(plan: ResumePlan) -> dict[str, Any] | None:
    """The summary of a run that has made all its steps, else None."""
    assert plan.run is not None
    summary = read_summary(plan.run)
    return summary if summary and summary["steps"] == plan.config.steps else None


def generate(config: GenerateConfig, console: Console | None = None) -> dict[str, Any]:
    """`shoal generate`: a row a completion, in the order of the prompts. Everything that can be wrong with a prompt
    is met before the first token is drawn; the file appears whole or not at all."""
    from shoal.config.text import require_given

    require_given(config, "prompts", "output")
    output = check_writable(config.output, "output")
    with console or Console() as console:
        prompts = read_prompts(check_local(config.prompts, "prompts"))
        roles = make_roles(config.mesh)
        opened = open_model(config.model, roles.sampler, console, compute_dtype(config.model.dtype))
        model, tokenizer = make_model(config.model, opened, roles.sampler, 0), opened.tokenizer
        params, count = sampling_params(config.sampling), config.num_generations
        prompt_ids = [prompt.encode(tokenizer.encode_prompt, config.sampling.max_prompt_tokens) for prompt in prompts]
        make = engine_maker(model, tokenizer, config.sampling, config.batch * roles.sampler.mesh.size)
        engine = make(count)
        engine.load(0, publish_to(model, opened.load()))
        engine.submit([
            SampleRequest(number, ids, count, Address(config.seed, Purpose.GENERATE.value, 0, number), params)
            for number, ids in enumerate(prompt_ids)])
        lines = list(completion_rows(prompt_ids, drain(engine), tokenizer.decode, count))
        write_text(output, "".join(line + "\n" for line in lines))
        console.note(f"wrote {len(lines)} completions to {output}")
    return {"completions": len(lines), "output": str(output)}


def export(config: ExportConfig, console: Console | None = None) -> dict[str, Any]:
    """`shoal export`: the newest weights of a run (or one checkpoint) as a folder that transformers loads."""
    from shoal.config.text import require_given

    require_given(config, "source", "to")
    to, source = check_new_folder(config.to, "to"), check_local(config.source, "from")
    if find_tree(source):
        raise ShoalError(f"from={config.source} is a MaxText checkpoint: take `shoal convert format=huggingface`, "
                         "which writes it as a folder that transformers loads")
    with console or Console() as console:
        roles = make_roles(MeshSection())
        opened = open_model(ModelSection(path=config.source), roles.trainer, console)
        with writing(to, "to"):
            hf.save(to, opened.load(), opened.architecture, opened.folder, config.dtype, config=opened.config)
        console.note(f"wrote {to}")
    return {"to": str(to)}
