"""Looks at a training job before it runs: every part of it in order, what it will cost, and whatever is wrong.

    configuration -> devices -> tokenizer, template -> data -> reward -> model -> a trial of one step -> memory, time

A part that is wrong does not hide what is wrong with those that do not need it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shoal.config.schema import Config, DoctorConfig, MeshSection, TaskSection
from shoal.mesh import Roles, make_roles
from shoal.model.hf import dotted
from shoal.model.transformer import Model
from shoal.report.console import Console
from shoal.report.findings import Findings, gib
from shoal.rewards.pool import RewardPool
from shoal.run import checks
from shoal.run.assembly import LoadedModel, find_teacher, make_model, open_model, training_engines, with_prompts
from shoal.run.estimate import Advice, add_measured, advise, agreement_of, estimate, relieve
from shoal.run.learning import make_learner
from shoal.run.memory import (
    Need,
    There,
    explain_out_of_memory,
    memory_there,
    parameter_count,
    static_need,
    weights_on_a_device,
)
from shoal.run.probe import findings_of, probe
from shoal.run.task import load_task, with_overlong
from shoal.run.trial import Trial, learn, sample
from shoal.sampler.engine import Engine
from shoal.tasks.task import Task
from shoal.trainer.curriculum import Prepared, PromptStream
from shoal.types import Params, ShoalError

__all__ = ["doctor", "explain_out_of_memory"]

LARGEST_DIFFERENCE = {"float32": 1e-3, "bfloat16": 0.1}
"""Of a token's log-probs, sampler's against trainer's: above it the two do not draw from one policy."""
FULL = 0.9
"""Share of memory above which a job is tight."""


@dataclass
class Look:
    """A job, as far as it could be put together."""

    config: Config
    findings: Findings
    reward_functions: Sequence[Callable]
    stack: ExitStack
    task: Task | None = None
    judge: RewardPool | None = None
    roles: Roles | None = None
    opened: LoadedModel | None = None
    teacher: LoadedModel | None = None
    first: Prepared | None = None
    result: dict[str, Any] = field(default_factory=dict)


def doctor(config: DoctorConfig, console: Console, reward_functions: Sequence[Callable] = ()) -> dict[str, Any]:
    """`shoal doctor`: prints what it finds; `ok` is False where the run would stop or could not learn."""
    with console, ExitStack() as stack:
        findings = Findings(console)
        look = Look(config, findings, reward_functions, stack)
        look.result = {"ok": False, "findings": [], "first_prompt": "", "rewards": [], "agreement": {}, "memory": {},
                       "time": {}, "advice": {}}
        checks.check_configuration(config, findings)
        look_at_task(look)
        usable = look_at_devices(look)
        look_at_tokenizer(look)
        look_at_data(look, console)
        look_at_reward(look, console)
        if look.opened is not None and look.roles is not None:
            look_at_model(look, usable and look.first is not None and look.judge is not None)
        wrong, warnings = len(findings.at("wrong")), len(findings.at("warning"))
        console.heading("nothing is wrong" + f", {warnings} to look at" * bool(warnings) if findings.ok else
                        f"{wrong} wrong, {warnings} more to look at")
        look.result |= {"ok": findings.ok, "findings": findings.records()}
        return look.result


# ---- without weights


def look_at_task(look: Look) -> None:
    """Reads data and reward functions, apart. The reward's processes start here, before JAX has threads."""
    config, loaded = look.config, None
    try:
        look.task = load_task(config.task)
    except ShoalError as error:
        look.findings.add("data", "wrong", str(error), checks.key_in(str(error), "task.path"))
    replaced = bool(config.reward.functions or look.reward_functions)
    try:
        if replaced or look.task is not None:
            source = TaskSection(num_questions=1) if replaced else config.task
            loaded = load_task(source, config.reward, look.reward_functions, config.algorithm.advantage != "none")
            loaded = with_overlong(loaded, config.reward, config.sampling.max_completion_tokens)
    except ShoalError as error:
        look.findings.add("reward", "wrong", str(error), _reward_key(error))
    if loaded is not None:
        if look.task is not None:
            look.task = Task(**{**vars(look.task), "rewards": loaded.rewards})
        look.judge = look.stack.enter_context(closing(RewardPool(loaded.rewards, config.reward, config.steps)))


def look_at_devices(look: Look) -> bool:
    """Whether the mesh can be made; where it cannot, one device serves for the looks that follow."""
    mesh = look.config.mesh
    try:
        look.roles = make_roles(mesh)
        look.config = with_prompts(look.config, look.roles)
    except ShoalError as error:
        key = max(("fsdp", "data", "tensor"), key=lambda name: getattr(mesh, name))
        look.findings.add("devices", "wrong", str(error), f"mesh.{key}")
        look.roles = make_roles(MeshSection())
        return False
    checks.check_devices(look.config, look.roles, look.findings)
    return True


def look_at_tokenizer(look: Look) -> None:
    assert look.roles is not None
    try:
        look.opened = open_model(look.config.model, look.roles.trainer, checks.Told())  # type: ignore[arg-type]
    except ShoalError as error:
        told = str(error)
        template = "template=" in told or "chat template" in told
        look.findings.add("tokenizer", "wrong", told, "model.template" if template else "model.path")
        return
    checks.check_tokenizer(look.config, look.opened.tokenizer, look.findings)
    if look.config.teacher.path:
        try:
            look.teacher = find_teacher(look.config, look.opened, look.roles.reference, checks.Told())  # type: ignore[arg-type]
        except ShoalError as error:
            look.findings.add("teacher", "wrong", str(error), "teacher.path")


def look_at_data(look: Look, console: Console) -> None:
    if look.task is None or look.opened is None:
        return
    tokenizer, examples = look.opened.tokenizer, [look.task.train[row] for row in range(min(8, len(look.task.train)))]
    if checks.check_template(tokenizer, examples, look.findings):
        look.first = checks.check_data(look.config, look.task, tokenizer, look.findings)
    if look.first is not None:
        text = tokenizer.decode(look.first.prompt_ids.tolist(), skip_special_tokens=False)
        console.first_prompt(text)
        look.result["first_prompt"] = text


def look_at_reward(look: Look, console: Console) -> None:
    """What the reward says of known answers, of the run's first prompt and of the data's first rows."""
    if look.judge is None or look.task is None:
        return
    examples = [look.task.train[row] for row in range(min(2, len(look.task.train)))]
    if look.first is not None:
        examples = [look.first.example, *examples]
    encode = look.opened.tokenizer.encode_prompt if look.opened else lambda text: np.frombuffer(text.encode(), np.uint8)
    try:
        tried = probe(look.judge, examples, encode)
    except ShoalError as error:
        look.findings.add("reward", "wrong", str(error), _reward_key(error))
        look.judge = None
        return
    look.result["rewards"] = tried.records()
    head = (f"reward of answers as {tried.form}" if tried.form else "reward", "total", *tried.functions)
    console.table(head, [(kind, *(f"{value:.3g}" for value in row.values())) for kind, row in tried.rows.items()])
    look.findings.extend(findings_of(tried))


def _reward_key(error: ShoalError) -> str:
    return "reward.weights" if str(error).startswith("reward.weights") else "reward.functions"


# ---- with weights


def look_at_model(look: Look, trial: bool) -> None:
    """Weights, then a trial of a step, what it needs and takes; no weights are read where they would not fit."""
    assert look.opened is not None and look.roles is not None
    config, opened, roles, findings = look.config, look.opened, look.roles, look.findings
    model = make_model(config.model, opened, roles.trainer, config.batch.micro_tokens)
    count = parameter_count(opened.architecture)
    checks.check_size(config, count, findings)
    engines = make_engines(look, model)
    need = static_need(model, roles, config.algorithm.kl_coef > 0, engines)
    if look.teacher is not None:
        need.always["teacher"] = weights_on_a_device(look.teacher.architecture, roles.reference, model.dtype)
    there = memory_there(roles.trainer.mesh.devices.flat)
    if trial and there.free and need.total * there.shared > there.free:
        tell_memory(look, need, there)
        return
    try:
        parameters = opened.load()
        if not check_weights(look, parameters, count) or not trial:
            return
        tried = try_a_step(look, model, engines["training"], parameters)
    except ShoalError as error:
        findings.add("model", "wrong", str(error), checks.key_in(str(error), "model.path"))
        return
    except Exception as error:
        explained = explain_out_of_memory(error, config)
        if explained is None:
            raise
        findings.add("memory", "wrong", str(explained), checks.key_in(str(explained), "batch.micro_tokens"))
        return
    if tried is None:
        return
    tell_agreement(look, tried, model)
    add_measured(need, tried, config, roles.trainer.row_shards, engines)
    tell_memory(look, need, there)
    tell_time(look, tried, model, engines["training"], need, there)


def make_engines(look: Look, model: Model) -> dict[str, Engine]:
    """The engines of a run: of training's groups, of greedy answers, of pass@k's groups. Nothing is compiled."""
    assert look.opened is not None and look.roles is not None
    config, sampler = look.config, look.roles.sampler
    make = training_engines(config, model.on(sampler), look.opened.tokenizer)
    engines = {"training": make(config.batch.group_size), "evaluation": make(1)}
    return engines | ({"pass@k": make(config.pass_k)} if config.pass_k else {})


def check_weights(look: Look, parameters: Params, count: int) -> bool:
    """Whether every weight is finite."""
    finite = jax.device_get(jax.jit(lambda tree: jax.tree.map(lambda x: jnp.isfinite(x).all(), tree))(parameters))
    bad = [dotted(path) for path, good in jax.tree_util.tree_leaves_with_path(finite) if not good]
    if bad:
        look.findings.add("model", "wrong", f"NaN or infinity in the weights {', '.join(bad[:5])} of "
                          f"{look.config.model.path}: take another checkpoint", "model.path")
        return False
    look.findings.add("model", "ok", f"{count / 1e6:.1f}M parameters, all finite")
    return True


def try_a_step(look: Look, model: Model, engine: Engine, parameters: Params) -> Trial | None:
    assert look.task is not None and look.opened is not None and look.judge is not None
    config, tokenizer = look.config, look.opened.tokenizer
    stream = PromptStream(look.task.train, tokenizer.encode_prompt, config.seed, config.sampling.max_prompt_tokens,
                          config.sampling.long_prompts)
    prompts = stream.next(config.batch.prompts_per_step)
    learner = make_learner(config, model)
    with ThreadPoolExecutor(1) as pool:
        try:
            trial = sample(config, look.task, tokenizer, look.judge, engine, parameters, prompts, pool)
        except ShoalError as error:
            look.findings.add("reward", "wrong", str(error), _reward_key(error))
            return None
        learn(trial, config, learner, parameters, pool)
    return trial


# ---- what the trial says


def tell_agreement(look: Look, trial: Trial, model: Model) -> None:
    findings, dtype = look.findings, jnp.dtype(model.dtype).name
    figures = look.result["agreement"] = agreement_of(trial, trial.groups, dtype)
    text = (f"log-probs of sampler and trainer differ by {figures['mean_difference']:.1e} in the mean, "
            f"{figures['largest_difference']:.1e} at most ({figures['tokens']} tokens, {dtype})")
    if not np.isfinite(trial.differences).all() or trial.skipped:
        findings.add("agreement", "wrong", f"{text}; the update has no finite gradient: set model.dtype=float32",
                     "model.dtype")
    elif float(figures["largest_difference"]) > LARGEST_DIFFERENCE[dtype]:
        findings.add("agreement", "warning", f"{text}: more than {LARGEST_DIFFERENCE[dtype]:g} is to be expected; try "
                     "model.dtype=float32, and watch sampler_gap/logprob_mean", "model.dtype")
    else:
        findings.add("agreement", "ok", text)
    size = trial.lengths.size
    findings.add("samples", "ok", f"{size} completions: entropy {trial.entropy:.2f}, {100 * trial.cut:.0f}% cut at "
                 f"{look.config.sampling.max_completion_tokens} tokens, {100 * trial.nonzero_std:.0f}% of "
                 f"{len(trial.groups)} groups with variance, mean reward {figures['mean_reward']:.3g}")
    if trial.cut > 0.5:
        findings.add("samples", "warning", f"{100 * trial.cut:.0f}% of completions are cut at "
                     f"sampling.max_completion_tokens={look.config.sampling.max_completion_tokens}: raise it",
                     "sampling.max_completion_tokens")
    if trial.nonzero_std == 0:
        values = {round(float(r), 9) for group in trial.groups for r in group.rewards[group.valid]}
        same = f"every completion scored {next(iter(values)):.3g}" if len(values) == 1 else \
            "within each group all completions scored the same"
        findings.add("samples", "warning", f"{same}, so this step would teach nothing: make the task easier or harder, "
                     f"or raise batch.group_size={look.config.batch.group_size}", "batch.group_size")


def tell_memory(look: Look, need: Need, there: There) -> None:
    config, roles = look.config, look.roles
    assert roles is not None
    total = need.total * there.shared
    look.result["memory"] = {
        "needed_bytes": total, "free_bytes": there.free, "total_bytes": there.total, "phase": need.phase,
        "phases": need.phases, "parts": need.parts, "sharing_devices": there.shared, "where": there.what,
        "devices": [{"device": str(device), "needed_bytes": need.total} for device in roles.trainer.mesh.devices.flat]}
    shared = f" on each of {there.shared} devices that share it" if there.shared > 1 else ""
    text = f"{gib(need.total)}{shared} at most, in the {need.phase} phase ({need.text()})"
    if not there.free:
        look.findings.add("memory", "ok", f"{text}; the device does not say what it has")
        return
    text += f"; {gib(there.free)} of {gib(there.total)} free ({there.what})"
    cure, key = relieve(config, need, roles, jax.device_count())
    if total > there.free:
        look.findings.add("memory", "wrong", f"too little: {text}. {cure}", key)
        look.result["advice"] = vars(Advice(cure, key))
    elif total > FULL * there.free:
        look.findings.add("memory", "warning", f"tight: {text}. {cure}", key)
    else:
        look.findings.add("memory", "ok", text)


def tell_time(look: Look, trial: Trial, model: Model, engine: Engine, need: Need, there: There) -> None:
    assert look.task is not None and look.roles is not None
    config, roles = look.config, look.roles
    evaluated = checks.evaluation_completions(config, checks.counts(look.task))
    times = estimate(config, trial, engine.num_groups, evaluated)
    look.result["time"] = times.record()
    look.findings.add("time", "ok", times.text())
    if not look.result["advice"]:
        advice = advise(config, model, trial, times, need, there, roles, jax.device_count())
        look.result["advice"] = vars(advice)
        look.findings.add("advice", "ok", advice.text, advice.key)
