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

from shoal.config.compose import Resolved, texts_of, to_dict
from shoal.config.schema import (
    Config,
    EvalConfig,
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
from shoal.report.lines import json_ready
from shoal.report.sink import Sink, check_sinks, make_sinks
from shoal.runtime.brief import brief, num_updates
from shoal.runtime.compilation import CompilationCounter
from shoal.runtime.interrupt import StopRequest
from shoal.runtime.local import LocalSource, drive, publish_to
from shoal.runtime.output import check_new_folder, check_writable, write_text, writing
from shoal.runtime.profile import Profiler
from shoal.runtime.prompt_file import completion_rows, read_prompts
from shoal.runtime.resume import Settled, compare, facts, settle
from shoal.sampler.engine import Engine
from shoal.task.judge import Judge
from shoal.task.task import Task, load_task
from shoal.trainer.checkpoint import (
    MODEL_FOLDER,
    Checkpoints,
    Restored,
    find_checkpoint,
    load_parameters,
    restore_newest,
)
from shoal.trainer.evaluation import Evaluator
from shoal.trainer.loop import Run, sampling_params
from shoal.trainer.prompts import PassRates, Prepared, PromptStream, prepare
from shoal.trainer.record import Recorder
from shoal.trainer.step import Learner, Objective, ParameterScorer
from shoal.trainer.update import Updater
from shoal.trainer.utilisation import Utilisation
from shoal.types import Address, Params, Purpose, SampleRequest, ShoalError

REMAT_BYTES = 2 << 30
"""Activations of a micro-batch above which blocks are recomputed by default."""


@dataclass(frozen=True)
class Opened:
    """A model as a job uses it."""

    folder: Path  # holds config.json and the tokenizer
    architecture: Architecture
    tokenizer: Tokenizer
    load: Callable[[], Params]  # reads the weights


def open_model(section: ModelSection, role: Role, console: Console, dtype: Any = jnp.float32) -> Opened:
    """A folder or hub id in Hugging Face format, or a run of ours, or one of its checkpoints; weights in `dtype`."""
    local = Path(section.path)
    checkpoint = find_checkpoint(local) if local.is_dir() else None
    folder = checkpoint[0] / MODEL_FOLDER if checkpoint else hf.locate(section.path)
    architecture = hf.architecture_of(folder)
    tokenizer = Tokenizer.load(folder, section.template)
    tokenizer.check_vocabulary(architecture)
    for note in tokenizer.notes:
        console.note(note)
    load = partial(load_parameters, *checkpoint, architecture) if checkpoint else partial(hf.load, folder, architecture)
    return Opened(folder, architecture, tokenizer, partial(load, role, dtype))


def compute_dtype(name: str) -> Any:
    if name == "auto":
        name = "float32" if jax.default_backend() == "cpu" else "bfloat16"
    return jnp.dtype(name)


def activation_bytes(a: Architecture, tokens: int, dtype: Any) -> int:
    """What the backward pass keeps of `tokens` tokens where each layer's products with weights are kept."""
    a_token = 3 * a.width + (a.num_heads + 2 * a.num_key_heads) * a.head_width + 2 * a.feed_forward
    return a_token * a.num_layers * tokens * jnp.dtype(dtype).itemsize


def make_model(section: ModelSection, opened: Opened, role: Role, micro_tokens: int) -> Model:
    dtype, remat = compute_dtype(section.dtype), section.remat
    if remat == "auto":
        remat = "full" if activation_bytes(opened.architecture, micro_tokens, dtype) > REMAT_BYTES else "dots"
    if dtype == jnp.float32:  # accelerators would multiply in fewer bits: float32 was asked for
        jax.config.update("jax_default_matmul_precision", "highest")
    return Model(opened.architecture, role, dtype, remat)


def engine_maker(model: Model, tokenizer: Tokenizer, sampling: SamplingSection, slots: int,
                 truncated: bool) -> Callable[[int], Engine]:
    """Makes the engine for groups of a size; `slots` completions at once in all."""

    def make(group_size: int) -> Engine:
        return Engine(
            model, slots=slots, group_size=group_size, max_prompt_tokens=sampling.max_prompt_tokens,
            max_completion_tokens=sampling.max_completion_tokens, eos_ids=tokenizer.eos_ids,
            decode=tokenizer.decode, truncated=truncated)

    return make


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


def check_trainable(config: Config) -> None:
    s = config.sampling
    if s.top_k or s.top_p < 1 or s.min_p:
        raise ShoalError(f"sampling.top_k={s.top_k}, top_p={s.top_p:g}, min_p={s.min_p:g}: training samples the whole "
                         "distribution, truncated samples would bias the ratio; set them to 0, 1 and 0")
    if s.temperature == 0:
        raise ShoalError("sampling.temperature=0: in training every completion of a group would be the same; "
                         "set it to 1.0")


def warn_of_gspo_clipping(config: Config, console: Console) -> None:
    a = config.algorithm
    if a.loss.startswith("gspo") and max(a.clip_low, a.clip_high) > 0.01:
        console.warning(f"algorithm.loss={a.loss} with clip_low={a.clip_low:g} clip_high={a.clip_high:g} practically "
                        "never clips: a sequence's ratio moves far less than a token's; the paper has 3e-4 and 4e-4")


def assemble_run(settled: Settled, reward_functions: Sequence[Callable], console: Console, stack: ExitStack,
                 task: Task | None = None) -> Run:
    """Everything that can be wrong with a configuration is met here, before the run folder exists. What must be closed
    at the end is put on `stack`."""
    started, config = time.perf_counter(), settled.config
    compilations = CompilationCounter()
    check_trainable(config)
    check_sinks(config.report)
    warn_of_gspo_clipping(config, console)
    task = task or load_task(config.task, config.reward, reward_functions)
    judge = stack.enter_context(closing(Judge(task.rewards, config.reward, config.steps)))  # before JAX has threads
    roles = make_roles(config.mesh)
    if roles.trainer.mesh.size < (there := jax.device_count()):
        console.warning(f"{roles.trainer.mesh.size} of {there} devices are used: mesh.fsdp=-1 takes them all")
    opened = open_settled(settled, roles.trainer, console)
    for note in task.notes:
        console.note(note)
    tokenizer = opened.tokenizer
    prompts = PromptStream(task.train, tokenizer.encode_prompt, config.seed, config.sampling.max_prompt_tokens,
                           config.sampling.long_prompts, PassRates(config.train.retire_above))
    sets = prepare_sets(task, tokenizer, config.sampling, console)
    every = config.sampling.long_prompts == "error"  # a prompt too long ends the run: before it begins
    first = prompts.peek(config.batch.prompts_per_step, config.steps if every else 1)
    console.first_prompt(tokenizer.decode(first.prompt_ids.tolist(), skip_special_tokens=False))
    if not settled.run:
        for finding in brief(config, task, tokenizer, first, judge):
            (console.note if finding.level == "ok" else console.warning)(finding.text)
    has_reference = config.algorithm.kl_coef > 0
    weights = opened.load() if has_reference or not settled.run else None

    folder = open_folder(settled, console, stack)
    console.note(f"run folder {folder.path}")
    model = make_model(config.model, opened, roles.trainer, config.batch.micro_tokens)
    source = make_source(config, model.on(roles.sampler), tokenizer, task, judge, roles)
    stack.enter_context(closing(source))
    learner = Learner(model, Objective.of(config.algorithm), config.optimizer, num_updates(config))
    reference = ParameterScorer(learner, weights) if has_reference else None
    now = facts(task, config.seed, weights if has_reference else None)
    restored = take_up(folder, learner, source, now, config, console) if settled.run else None
    resumed_at = (restored.version if restored else 0) if settled.run else None
    write_head(folder, opened, config, resumed_at or 0)
    sinks = open_sinks(folder, config, resumed_at, console, stack)
    scorings = int(learner.objective.use_old) + int(reference is not None)
    recorder = Recorder(
        folder, console, prompts, config.steps, config.report.groups, source.read_clock, compilations.read, peak_bytes,
        sinks=sinks, started=started,
        utilisation=Utilisation.on(roles.trainer.mesh.devices.flat, opened.architecture, model.dtype,
                                   config.algorithm.num_epochs, scorings))
    checkpoints = stack.enter_context(closing(
        Checkpoints(folder.checkpoints_path, config.checkpoint.keep_last, config.checkpoint.keep_best)))
    if weights is None and restored is None:
        weights = opened.load()
    recorder.spent("start", time.perf_counter() - started)
    return Run(
        config=config,
        parameters=None if restored else weights,
        updater=Updater(learner, config.algorithm, config.batch, config.sampling.temperature, config.seed, reference),
        source=source,
        prompts=prompts,
        evaluator=Evaluator(sets, sampling_params(config.sampling), config.train.pass_k, task.well_formed),
        checkpoints=checkpoints,
        recorder=recorder,
        restored=restored,
        facts=now,
        stopping=stack.enter_context(StopRequest()),
        around_step=Profiler(config.report.profile, folder.path / "profile", console.warning).step,
    )


def open_settled(settled: Settled, role: Role, console: Console) -> Opened:
    """The model; of a run to go on with, as its own folder tells of it: only first weights need `model.path`."""
    section, kept = settled.config.model, settled.run / MODEL_FOLDER if settled.run else None
    if kept is None or not (kept / "config.json").is_file():
        return open_model(section, role, console)
    opened = open_model(replace(section, path=str(kept), template=""), role, console)
    return replace(opened, load=lambda: open_model(section, role, console).load())


def open_folder(settled: Settled, console: Console, stack: ExitStack) -> RunFolder:
    """The run's folder, locked: a new one, or the one to go on with."""
    config = settled.config
    folder = stack.enter_context(
        RunFolder(settled.run) if settled.run else
        RunFolder.create(config.base_output_directory, config.run_name))
    if not settled.run and is_run(folder.path):
        raise ShoalError(f"another process has just started the run {folder.path}: give the same command again to go "
                         "on with it")
    if folder.no_locks:
        console.warning(f"the file system of {folder.path} grants no locks ({folder.no_locks}): nothing keeps a second "
                        "process out of this run")
    folder.groups_format = config.report.groups_format
    return folder


def write_head(folder: RunFolder, opened: Opened, config: Config, version: int) -> None:
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


def take_up(folder: RunFolder, learner: Learner, source: LocalSource, now: Mapping[str, Any], config: Config,
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


def make_source(config: Config, model: Model, tokenizer: Tokenizer, task: Task, judge: Judge,
                roles: Roles) -> LocalSource:
    completions = config.batch.prompts_per_step * config.batch.group_size
    slots = config.sampling.slots_per_device * roles.sampler.mesh.size or completions
    make = engine_maker(model, tokenizer, config.sampling, slots, truncated=False)
    return LocalSource(model, make, task, judge, tokenizer.decode, config.seed)


def copy_model_files(opened: Opened, target: Path) -> None:
    """Tokenizer, the template that was trained with and, last, config.json, so that checkpoints need nothing else."""
    target.mkdir(parents=True, exist_ok=True)
    if opened.tokenizer.template:
        (target / "chat_template.jinja").write_text(opened.tokenizer.template, encoding="utf-8")
    for name in (*(name for name in hf.TOKENIZER_FILES if name != "chat_template.jinja"), "config.json"):
        if (opened.folder / name).is_file():
            shutil.copy2(opened.folder / name, target / name)


def train(config: Config, resolved: Resolved | None = None, reward_functions: Sequence[Callable] = (),
          console: Console | None = None, task: Task | None = None) -> dict[str, Any]:
    """`shoal train`: returns the summary, which also stands in the run folder. Where the folder holds the run already,
    it goes on; one that has ended is left as it is."""
    with console or Console() as console, ExitStack() as stack:
        settled = settle(config, resolved, console)
        if settled.run and (summary := finished_summary(settled)):
            console.note(f"{settled.run} has made its {settled.config.steps} steps already: give more steps to go on, "
                         "or another run_name")
            return summary
        return assemble_run(settled, reward_functions, console, stack, task).train()


def finished_summary(settled: Settled) -> dict[str, Any] | None:
    """The summary of a run that has made all its steps, else None."""
    assert settled.run is not None
    summary = read_summary(settled.run)
    return summary if summary and summary["steps"] == settled.config.steps else None


def evaluate(config: EvalConfig, reward_functions: Sequence[Callable] = (),
             console: Console | None = None, task: Task | None = None) -> dict[str, Any]:
    """`shoal eval`: figures by data set, with their protocol."""
    if config.output:
        check_writable(config.output, "output")
    with console or Console() as console, ExitStack() as stack:
        task = task or load_task(config.task, config.reward, reward_functions)
        judge = stack.enter_context(closing(Judge(task.rewards, config.reward)))
        roles = make_roles(config.mesh)
        opened = open_model(config.model, roles.sampler, console, compute_dtype(config.model.dtype))
        for note in task.notes:
            console.note(note)
        model = make_model(config.model, opened, roles.sampler, 0)
        params = sampling_params(config.sampling)
        make = engine_maker(model, opened.tokenizer, config.sampling, config.batch * roles.sampler.mesh.size,
                            params.truncated)
        source = LocalSource(model, make, task, judge, opened.tokenizer.decode, config.seed)
        source.publish(0, opened.load())
        sets = prepare_sets(task, opened.tokenizer, config.sampling, console)
        figures, _ = Evaluator(sets, params, config.pass_k, task.well_formed).evaluate(source, 0, 0, sampled=True)
        for subset, values in figures.items():
            console.evaluation(subset, values)
        for failure in source.read_clock().failures:
            console.warning(failure.text)
    if config.output:
        write_text(config.output, json.dumps(json_ready(figures), indent=2) + "\n")
    return figures


def generate(config: GenerateConfig, console: Console | None = None) -> dict[str, Any]:
    """`shoal generate`: a row a completion, in the order of the prompts. Everything that can be wrong with a prompt
    is met before the first token is drawn; the file appears whole or not at all."""
    from shoal.config.compose import require_given

    require_given(config, "prompts", "output")
    check_writable(config.output, "output")
    with console or Console() as console:
        prompts = read_prompts(Path(config.prompts))
        roles = make_roles(config.mesh)
        opened = open_model(config.model, roles.sampler, console, compute_dtype(config.model.dtype))
        model, tokenizer = make_model(config.model, opened, roles.sampler, 0), opened.tokenizer
        params, count = sampling_params(config.sampling), config.num_generations
        prompt_ids = [prompt.encode(tokenizer.encode_prompt, config.sampling.max_prompt_tokens) for prompt in prompts]
        make = engine_maker(model, tokenizer, config.sampling, config.batch * roles.sampler.mesh.size,
                            params.truncated)
        engine = make(count)
        engine.load(0, publish_to(model, opened.load()))
        engine.submit([
            SampleRequest(number, ids, count, Address(config.seed, Purpose.GENERATE.value, 0, number), params)
            for number, ids in enumerate(prompt_ids)])
        lines = list(completion_rows(prompt_ids, drive(engine), tokenizer.decode, count))
        write_text(config.output, "".join(line + "\n" for line in lines))
        console.note(f"wrote {len(lines)} completions to {config.output}")
    return {"completions": len(lines), "output": config.output}


def export(config: ExportConfig, console: Console | None = None) -> dict[str, Any]:
    """`shoal export`: the newest weights of a run (or one checkpoint) as a folder that transformers loads."""
    from shoal.config.compose import require_given

    require_given(config, "source", "to")
    check_new_folder(config.to, "to")
    with console or Console() as console:
        roles = make_roles(MeshSection())
        opened = open_model(ModelSection(path=config.source), roles.trainer, console)
        with writing(config.to, "to"):
            hf.save(config.to, opened.load(), opened.architecture, opened.folder, config.dtype)
        console.note(f"wrote {config.to}")
    return {"to": config.to}
