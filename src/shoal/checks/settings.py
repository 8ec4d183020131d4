"""Checks settings alone: errors before any weights are read, and warnings of probable mistakes.

A run, `--dry-run` and `shoal doctor` share these checks, which neither import JAX nor download.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from shoal.buckets import COPIES, address
from shoal.config.choices import (
    ADVANTAGES,
    AGGREGATIONS,
    KL_ESTIMATORS,
    POLICY_LOSSES,
    RATIO_BOUNDS,
    advantage_of,
)
from shoal.config.derived import max_support, num_updates, oldest_samples, step_text
from shoal.config.key import get_value, keys_of, shown
from shoal.config.keywords import ROWS
from shoal.config.merge import packaged_values
from shoal.config.sections.algorithm import AlgorithmSection
from shoal.config.sections.critic import CriticSection
from shoal.config.sections.model import LoraSection, ModelSection
from shoal.config.sections.reward import RewardSection
from shoal.config.sections.task import TaskSection
from shoal.config.train import Config
from shoal.files import check_base, check_local, check_writable, find_input
from shoal.findings import Findings
from shoal.records import ShoalError
from shoal.runs.layout import find_named, is_run, named_folder, refuse_foreign
from shoal.runs.notes import RunNotes
from shoal.tasks.task import CUSTOM, TASKS, Task, load_by_name, no_reward
from shoal.text import CLOSE, count, exact, likeness

HIGHEST_LR = 1e-2
HIGHEST_USUAL_LR = 2e-5
"""With a higher learning rate models of LARGE parameters or more seldom train well."""
LARGE = 100_000_000
HIGH_RANK = 64
"""Rank of an adapter from which training by GRPO collapses in published runs (openreview
XGZHI14m8P)."""


_ACCELERATORS = {"cuda", "tpu", "proxy"}
"""Platforms of JAX that JAX_PLATFORMS may name although this machine does not have them."""

_PATHS = (
    "base_output_directory",
    "output",
    "to",
    "model.path",
    "model.tokenizer",
    "teacher.path",
    "critic.path",
    "task.path",
    "publish.folder",
)
"""Keys whose value may be the address of a bucket in place of a folder."""


# ---- errors


def check_before_weights(config: Any, functions_given: bool = False, resumed: bool = False) -> None:
    """Raises ShoalError if what the settings of a command name cannot be used: platforms of JAX,
    folders, the model and the teacher, the task; or if training has no reward. Reads no weights and
    asks no hub. Of these, only the keys that the command has are checked.

    `functions_given`: reward functions were passed from Python. `resumed`: the run has the model's
    files in its own folder, so `model.path` is not checked.
    """
    known = keys_of(type(config))
    named_platforms = os.environ.get("JAX_PLATFORMS", "").split(",")
    has_devices_here = "mesh.pathways" in known and not getattr(config, "topology", "")
    if has_devices_here and (_ACCELERATORS & set(named_platforms) or config.mesh.pathways):
        from shoal.mesh.devices import check_platforms  # imports JAX, which other dry runs avoid

        check_platforms(config.mesh)
    faults = []
    for key in _PATHS:
        if key not in known:
            continue
        # Weights can be published only to a folder: a bucket has no local copy.
        copies = "" if key == "publish.folder" else COPIES
        try:
            check_local(get_value(config, key), key, copies)
        except ShoalError as error:
            faults.append(str(error))
    if faults:
        raise ShoalError("; ".join(faults))
    if isinstance(config, Config):
        folder = Path(config.publish.folder).expanduser()
        if config.publish.folder and not folder.absolute().parent.is_dir():
            raise ShoalError(
                f"publish.folder={config.publish.folder}: there is no folder {folder.parent}; "
                "make it, or mount what trainer and samplers share"
            )
        # With the preset verl the rows decide whether there is a reward, once they are read.
        is_open = config.task.name == CUSTOM and config.reward.preset == "verl"
        has_no_own_reward = config.task.name in (CUSTOM, "environment") and not is_open
        environment_rewards = config.environment.factory or config.environment.agent
        has_reward = config.reward.functions or functions_given or environment_rewards
        if has_no_own_reward and config.algorithm.uses_rewards and not has_reward:
            raise no_reward(config.task)
        if config.run_name:
            run = find_named(config.base_output_directory, config.run_name)
            resumed = resumed or is_run(run)
        if config.resume:
            resumed = True
    if "model.path" in known and not resumed:
        check_model(config.model)
    if "teacher.path" in known:
        for path in config.teacher.paths.values():
            check_model(ModelSection(path=path), key="teacher.path")
    if "critic.path" in known and config.critic.path:
        check_model(ModelSection(path=config.critic.path), key="critic.path")
    if "task.name" in known:
        check_task(config.task)


def check_trainable(config: Config) -> None:
    """Raises ShoalError for the first reason why a run with these settings could not train or would
    learn nothing: Ray is missing; temperature 0; nothing to learn from; a KL penalty in rewards
    that are ignored or that cancel it; dynamic sampling by rewards that are ignored."""
    a = config.algorithm
    advantage = f"algorithm.advantage={a.advantage}"
    kl_in_reward = a.kl_placement == "reward" and a.kl_coef
    faults = [
        (
            config.sampler.kind == "ray" and find_spec("ray") is None,
            "sampler.kind",
            "sampler.kind=ray: Ray is not installed; pip install '.[ray]' in the clone of Shoal, "
            "or leave it out",
        ),
        (
            config.sampling.temperature == 0,
            "sampling.temperature",
            "sampling.temperature=0: in training every completion of a group would be the same; "
            "set it to 1.0",
        ),
        (
            not (a.uses_rewards or a.learns_from_data or config.teacher.exists),
            "algorithm.advantage",
            f"{advantage}: nothing would be learned, as rewards are ignored and there is no "
            "teacher; set teacher.path, or another advantage",
        ),
        (
            kl_in_reward and not a.uses_rewards,
            "algorithm.kl_placement",
            f"algorithm.kl_placement=reward with {advantage}: rewards, and the KL penalty in them, "
            "are ignored; set algorithm.kl_placement=loss",
        ),
        (
            kl_in_reward and advantage_of(a.advantage).by_function,
            "algorithm.kl_placement",
            f"algorithm.kl_placement=reward with {advantage}: each reward function is divided by "
            "its own deviation, so algorithm.kl_coef would cancel; set algorithm.kl_placement=loss",
        ),
        (
            a.dynamic_sampling and not a.uses_rewards,
            "algorithm.dynamic_sampling",
            f"algorithm.dynamic_sampling=true with {advantage}: groups are chosen by their "
            "rewards, which are ignored; change one of the two",
        ),
    ]
    for holds, key, text in faults:
        if holds:
            raise ShoalError(text, key)


def check_model(section: ModelSection, key: str = "model.path") -> None:
    """Raises ShoalError if no model is given, its name is unknown, its folder or that of
    `model.tokenizer` is missing, or the folder's model is of an unknown family or not the one that
    `model.name` names. A hub id is not looked up, and a `model.name` with a `/` is not checked.
    `key`: the configuration key that names the model, for the error."""
    from shoal.model.families import architecture_of
    from shoal.model.published import check_name, model_named
    from shoal.weights.hub import HUB_ID, PACKAGED, no_model

    if not (section.path or section.name):
        raise no_model(key)
    local = find_input(section.path, key)
    tokenizer = find_input(section.tokenizer, "model.tokenizer")
    # Runs or checkpoints that lie in the folder in which the model should be.
    neighbours: list[str] = []
    if local.parent.is_dir():
        for path in local.parent.iterdir():
            if is_run(path) or path.name.isdigit():
                neighbours.append(path.name)
        neighbours.sort()
    is_packaged = section.path in ("", *PACKAGED)
    is_among_runs = bool(neighbours) or local.parent.name == Config.base_output_directory
    looks_like_hub_id = bool(HUB_ID.fullmatch(section.path))
    is_hub_id = looks_like_hub_id and not is_among_runs
    if not (is_packaged or local.exists() or is_hub_id):
        shown = local if section.path.startswith("~") else section.path
        hint = "Give a folder, a hub id (org/name), or `tiny`."
        # All of them say why `mine/run` is no hub id; elsewhere only a name that is near helps.
        if not looks_like_hub_id:
            neighbours = [name for name in neighbours if _is_near(local.name, name)]
        if neighbours:
            hint = f"{local.parent} holds {', '.join(neighbours[-5:])}."
        raise ShoalError(f"{key}={section.path}: there is no model folder {shown}. {hint}")
    is_packaged_tokenizer = section.tokenizer == ModelSection.path
    if not (tokenizer.exists() or is_packaged_tokenizer or HUB_ID.fullmatch(section.tokenizer)):
        raise ShoalError(
            f"model.tokenizer={section.tokenizer}: there is no such folder; give a folder with a "
            "tokenizer.json, or a hub id (org/name)"
        )
    if section.name and "/" not in section.name:
        model_named(section.name)
    if section.path and (local / "config.json").is_file():
        a = architecture_of(local)
        if section.name and "/" not in section.name:
            check_name(section.name, a, local, "model.name")


def _is_near(wanted: str, name: str) -> bool:
    """True if a folder of this name may have been meant: both are numbers of checkpoints, or the
    names are alike."""
    return (wanted.isdigit() and name.isdigit()) or likeness(wanted, name) >= CLOSE


def check_task(section: TaskSection) -> None:
    """Raises ShoalError if the task is unknown, or is `custom` without data. The name may be one of
    TASKS, or that of rows from Python. Nothing is read of a task that is known."""
    if section.name not in TASKS and section.name != ROWS:
        load_by_name(section, RewardSection())  # raises, with the nearest name
    if section.name == "custom" and not (section.path or section.files):
        raise ShoalError(
            "task custom: task.path is not given; expected a jsonl or parquet file, a folder or a "
            "hub id"
        )


# ---- warnings


def algorithm_warnings(config: Config) -> Iterator[tuple[str, str]]:
    """Yields (key, warning) for each combination of settings that is allowed but probably a
    mistake. Those about keys that the chosen loss, advantage or aggregation does not read come
    last."""
    a = config.algorithm
    s = config.sampling
    oldest = oldest_samples(config)
    loss = POLICY_LOSSES[a.loss]
    kl = KL_ESTIMATORS[a.kl]
    truncated = config.sampling.params.truncated
    kl_in_reward = a.kl_coef and a.kl_placement == "reward"
    has_own_check = config.task.name in TASKS and config.task.name != "custom"
    below_zero = (
        config.reward.overlong_buffer_tokens
        or kl_in_reward
        or min(config.reward.weights, default=0) < 0
    )
    rows = [
        (
            loss.ratio != "token" and max(a.clip_low, a.clip_high) > 0.01,
            "algorithm.loss",
            f"algorithm.loss={a.loss} with clip_low={exact(a.clip_low)} "
            f"clip_high={exact(a.clip_high)} practically never clips: a sequence's ratio moves far "
            "less than a token's; the paper has 3e-4 and 4e-4",
        ),
        (
            a.kl_coef and not kl_in_reward and not kl.in_loss,
            "algorithm.kl",
            f"algorithm.kl={a.kl} in the loss regularises nothing: its on-policy gradient is zero "
            "in expectation; set algorithm.kl_placement=reward, or kl=k2 or k3",
        ),
        (
            kl_in_reward and not kl.in_reward,
            "algorithm.kl",
            f"algorithm.kl={a.kl} in the reward: k1 is the unbiased one there",
        ),
        (
            truncated and not a.match_sampling_support,
            "algorithm.match_sampling_support",
            "algorithm.match_sampling_support=false: log-probs are over all tokens, samples over "
            "those that top_k, top_p and min_p keep; the ratio is biased by the mass that is kept",
        ),
        (
            truncated and a.match_sampling_support,
            "sampling.max_support",
            f"samples are truncated: at each position at most {max_support(config)} tokens "
            f"(sampling.max_support={s.max_support}, the likeliest) are kept, stored and replayed "
            "by the trainer",
        ),
        (
            oldest > 0 and a.correction == "none",
            "algorithm.correction",
            f"samples may be {oldest} version{'s' * (oldest > 1)} old (train.max_staleness, "
            "train.weight_sync_interval), and algorithm.correction=none treats them as on-policy: "
            "leave it out, or set algorithm.correction=tis",
        ),
        (
            config.teacher.scores_samples and loss.one_gradient,
            "algorithm.loss",
            f"a teacher with algorithm.loss={a.loss}: its token bonuses are averaged over the "
            "completion, all of whose tokens have one gradient; set algorithm.loss=gspo-token, or "
            "grpo",
        ),
        (
            a.dynamic_sampling
            and a.dynamic_sampling_by == "correct"
            and config.reward.functions
            and has_own_check,
            "algorithm.dynamic_sampling_by",
            f"dynamic sampling keeps groups that the check of task={config.task.name} finds partly "
            "right, unless reward.functions log `acc` next to their score; "
            "algorithm.dynamic_sampling_by=reward uses what they return",
        ),
        (
            "cispo_bound" in loss.reads and a.cispo_bound == "absolute" and a.clip_high <= 1,
            "algorithm.clip_high",
            f"algorithm.clip_high={exact(a.clip_high)} with algorithm.cispo_bound=absolute bounds "
            "every weight below the 1 that it starts from; 5 is usual",
        ),
        (
            advantage_of(a.advantage).of_positive and below_zero,
            "algorithm.advantage",
            f"algorithm.advantage={a.advantage} is for rewards of 0 or more: a group with one "
            "below 0 (a penalty, a KL term, a weight below 0) has no effect",
        ),
    ]
    for holds, key, text in rows:
        if holds:
            yield key, text
    yield from critic_warnings(config)
    yield from unread_algorithm_keys(config)


def critic_warnings(config: Config) -> Iterator[tuple[str, str]]:
    """Yields (key, warning) for settings of the critic that have no effect."""
    defaults = CriticSection()
    preset = packaged_values(config)
    c = config.critic
    for name, value in vars(c).items():
        is_changed = value not in (getattr(defaults, name), preset.get(f"critic.{name}"))
        if is_changed and not config.algorithm.has_critic:
            yield (
                f"critic.{name}",
                f"critic.{name}={shown(value)} has no effect: only "
                "algorithm.advantage=gae has a critic",
            )
    if c.coef != defaults.coef and not c.shared and config.algorithm.has_critic:
        yield (
            "critic.coef",
            f"critic.coef={exact(c.coef)} has no effect without critic.shared=true: "
            "critic.lr sets how fast a critic with layers of its own learns",
        )
    if c.warmup_until < 1 and not c.warmup_steps and config.algorithm.has_critic:
        yield (
            "critic.warmup_until",
            f"critic.warmup_until={exact(c.warmup_until)} has no effect without "
            "critic.warmup_steps, the most steps that the warm-up lasts",
        )
    if c.warmup_steps >= config.steps > 0 and config.algorithm.has_critic:
        yield (
            "critic.warmup_steps",
            f"critic.warmup_steps={c.warmup_steps}: the policy is not updated in a run of "
            f"{count(config.steps, 'step')}; lower it",
        )


def unread_algorithm_keys(config: Config) -> Iterator[tuple[str, str]]:
    """Yields (key, warning) for each key of `algorithm` that the user changed although the chosen
    loss, advantage or aggregation does not read it. Also one warning if bounds of the ratio were
    changed although every ratio is 1. Values that a recipe or a preset sets are not warned of."""
    a = config.algorithm
    defaults = AlgorithmSection()
    preset = packaged_values(config)
    changed: dict[str, str] = {}
    for name, value in vars(a).items():
        if value in (getattr(defaults, name), preset.get(f"algorithm.{name}")):
            continue
        text = exact(value) if isinstance(value, float) else str(value)
        changed[name] = f"algorithm.{name}={text}"
    parts = {"loss": POLICY_LOSSES, "advantage": ADVANTAGES, "aggregation": AGGREGATIONS}
    for part, registry in parts.items():
        chosen = getattr(a, part)
        for name in changed:
            users = [choice for choice, row in registry.items() if name in row.reads]
            if users and chosen not in users:
                yield (
                    f"algorithm.{name}",
                    f"{changed[name]} has no effect on algorithm.{part}={chosen}: it is for "
                    f"{', '.join(users)}",
                )
    keys_of_loss = POLICY_LOSSES[a.loss].reads
    bounds = [name for name in RATIO_BOUNDS if name in changed and name in keys_of_loss]
    if bounds and a.num_epochs * a.num_minibatches == 1 and a.correction != "direct":
        yield (
            f"algorithm.{bounds[0]}",
            f"{', '.join([changed[name] for name in bounds])} cannot act: with one update a step "
            "every ratio is 1 and nothing is clipped; set algorithm.num_minibatches or "
            "algorithm.num_epochs above 1",
        )


def reward_preset_notes(config: Any, task: Task) -> Iterator[str]:
    """Yields a line if `reward.preset` is set and the task has no use for it; not if a recipe set
    it, or the run that is evaluated. Yields another if it gives the user's rows their reward.
    `config`: of a command that has tasks and rewards; `task`: with its own rewards."""
    preset = config.reward.preset
    if preset == RewardSection.preset or config.task.name == "gsm8k":
        return
    if config.task.name == CUSTOM and task.rewards:
        if not config.reward.functions:
            yield (
                f"reward: {task.rewards[0].name}, by each row's data_source, since "
                f"reward.preset={preset}; reward=FILE:FUNCTION names another"
            )
        return
    # Here, because the checks of a configuration alone do without JAX, which it imports.
    from shoal.weights.source import settings_of_run

    if isinstance(config, Config):
        is_given = packaged_values(config).get("reward.preset") != preset
    else:
        of_run = settings_of_run(config.model)
        is_given = of_run is None or of_run.reward.preset != preset
    if is_given:
        yield f"{config.task.name}: reward.preset={preset} has no effect: it is for task=gsm8k"


def adapter_warnings(lora: LoraSection) -> Iterator[tuple[str, str]]:
    """Yields at most one (key, warning), for all settings of an adapter that have no effect,
    because there is no adapter or because the adapter's folder has its own. The key is that of the
    first such setting."""
    if lora.rank and not lora.path:
        return
    values = {name: value for name, value in vars(lora).items() if name not in ("rank", "path")}
    # An attribute of the class is the field's default.
    changed = [name for name, value in values.items() if value != getattr(LoraSection, name)]
    if not changed:
        return
    key = f"model.lora.{changed[0]}"
    texts = ", ".join(f"model.lora.{name}={shown(values[name])}" for name in changed)
    verb = "have" if len(changed) > 1 else "has"
    if lora.path:
        yield key, f"{texts} {verb} no effect: the adapter in model.lora.path has its own"
    else:
        yield (
            key,
            f"{texts} {verb} no effect without an adapter: set model.lora.rank, 16 is usual, or "
            "leave it out",
        )


def check_settings(config: Config, findings: Findings) -> None:
    """Adds findings about settings that are probably mistakes. ShoalError if the run would refuse
    the settings (`check_trainable`, a tag that is no word); the findings are added before that. If
    there is nothing to say, an `ok` finding gives the size of a step."""
    check = findings.of("configuration")
    before = len(findings.found)
    s = config.sampling
    o = config.optimizer
    updates = num_updates(config)
    for key, text in algorithm_warnings(config):
        check.warning(text, key)
    for key, text in adapter_warnings(config.model.lora):
        check.warning(text, key)
    usual = "1e-6 for a large model, 1e-4 for a tiny one"
    rows = [
        (
            check.wrong,
            o.lr == 0,
            "optimizer.lr",
            f"optimizer.lr=0: nothing would be learned; {usual}",
        ),
        (
            check.wrong,
            o.lr > HIGHEST_LR,
            "optimizer.lr",
            f"optimizer.lr={exact(o.lr)} would destroy the model in a few updates: {usual}",
        ),
        (
            check.warning,
            o.warmup_steps >= updates > 0 and o.lr > 0,
            "optimizer.warmup_steps",
            f"optimizer.warmup_steps={o.warmup_steps}: the learning rate only begins to rise in a "
            f"run of {count(updates, 'update')}; lower it",
        ),
        (
            check.warning,
            config.steps == 0,
            "steps",
            "steps=0: the run only evaluates; `shoal eval` does so without a trainer's memory",
        ),
        (
            check.warning,
            0 < s.temperature < 0.3 or s.temperature > 1.5,
            "sampling.temperature",
            f"sampling.temperature={exact(s.temperature)}: groups of "
            f"{'nearly equal' if s.temperature < 1 else 'rambling'} completions teach little; 1.0 "
            "is usual",
        ),
        (
            check.warning,
            config.model.lora.rank >= HIGH_RANK,
            "model.lora.rank",
            f"model.lora.rank={config.model.lora.rank}: in published runs of GRPO 73% accuracy "
            "fell to 9% at rank 64 with batches of 128; 8 to 16 is usual",
        ),
        (
            check.wrong,
            config.reward.weights and not any(config.reward.weights),
            "reward.weights",
            "reward.weights are all 0, so is every reward: set one above 0",
        ),
        (
            check.warning,
            config.algorithm.kl_coef >= 1,
            "algorithm.kl_coef",
            f"algorithm.kl_coef={exact(config.algorithm.kl_coef)} holds the model where it is: 0 "
            "to 0.1 is usual",
        ),
    ]
    for say, holds, key, text in rows:
        if holds:
            say(text, key)
    check_trainable(config)
    RunNotes.of_keys(config.notes, config.tags)  # called for its error alone
    if len(findings.found) == before:
        check.ok(step_text(config))


def stop_on_warnings(config: Config, findings: Findings) -> None:
    """Raises ShoalError if there are warnings or faults among the findings and `train.on_warning`
    is `stop`. Otherwise does nothing."""
    faults = findings.at("wrong", "warning")
    if faults and config.train.on_warning == "stop":
        texts = [str(fault) for fault in faults]
        raise ShoalError(
            "stopped before the first step by train.on_warning=stop: "
            f"{'; '.join(texts)}; set train.on_warning=continue to train nevertheless"
        )


def check_run_folder(config: Config) -> str:
    """Returns a note if a run of this name exists already, which a run would resume; else '', also
    without run_name or with `resume=`. ShoalError if the run's folder cannot be made, or if it
    exists with files and is no run. Makes no folder."""
    if config.resume:
        return ""
    check_base(config.base_output_directory)
    if not config.run_name:
        return ""
    folder = named_folder(config.base_output_directory, config.run_name)
    check_writable(folder, "base_output_directory", within=True)
    run = find_named(config.base_output_directory, config.run_name)
    if is_run(run):
        return f"{address(run)} is a run already, which `shoal train` would resume"
    if run.is_dir():
        refuse_foreign(run)
    return ""


def check_lr_for_size(config: Config, parameters: int, findings: Findings) -> None:
    """Warns if the learning rate is higher than is usual for a model with this number of
    parameters: above HIGHEST_USUAL_LR for LARGE parameters or more. Does not warn of a run with an
    adapter, nor of a rate above HIGHEST_LR, which `check_settings` reports."""
    # An adapter needs a higher learning rate, so it is not warned of.
    is_adapter = bool(config.model.lora.rank or config.model.lora.path)
    is_high = HIGHEST_USUAL_LR < config.optimizer.lr <= HIGHEST_LR
    if parameters >= LARGE and is_high and not is_adapter:
        findings.of("configuration").warning(
            f"optimizer.lr={exact(config.optimizer.lr)} is high for {parameters / 1e9:.1f}B "
            "parameters: 1e-6 to 1e-5 is usual",
            "optimizer.lr",
        )
