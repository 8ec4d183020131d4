"""Prints the head of a run: a dozen lines that say what the run will do and with what, then the
warnings."""

from __future__ import annotations

from collections.abc import Mapping

from shoal.budget.memory import (
    active_parameter_count,
    parameter_count,
    reference_architecture,
)
from shoal.budget.shapes import micro_batch_shapes
from shoal.budget.slots import slots_text
from shoal.checks.inputs import devices_text
from shoal.checks.settings import stop_on_warnings
from shoal.config.derived import (
    learning_rate_text,
    price_text,
    staleness_text,
    step_text,
    their_sizes,
)
from shoal.config.sections.model import ModelSection
from shoal.config.train import Config
from shoal.findings import Findings
from shoal.job.job import Job
from shoal.job.recipe import follow
from shoal.model.architecture import EXPERT_PRODUCTS
from shoal.model.attention.selector import attention_kind
from shoal.model.config_json import read_config
from shoal.model.transformer import Model
from shoal.tasks.task import Task
from shoal.text import shorten
from shoal.weights.checkpoints import versions
from shoal.weights.source import ModelSource

FIRST_PROMPT = 240
"""Most characters of the first prompt that are shown."""


def print_head(job: Job) -> None:
    """Prints what a run will do and with what, then the warnings of its stages. ShoalError if there
    are warnings and `train.on_warning` is `stop`. Opens the stages of the job that it reads."""
    config, roles, model, console = job.config, job.roles, job.model, job.console
    shape = micro_batch_shapes(config, model.role.row_shards)[0]
    lengths = job.prompt_lengths
    rewards = [finding.text for finding in job.reward_findings if finding.level == "ok"]
    memory = job.memory_finding
    first_prompt = job.first_prompt.prompt_ids.tolist()
    text = job.tokenizer.decode(first_prompt, skip_special_tokens=False)
    evaluations = [f"{len(questions):,} {name}" for name, questions in job.evaluation_sets.items()]
    lines = {
        "devices": devices_text(config, roles),
        "model": model_text(config.model, job.model_source, model),
        "files": "; ".join(note.text for note in job.model_source.notes if note.level == "ok"),
        "reference": reference_note(config, model),
        "attention": attention_kind(model, shape.rows, shape.length),
        **data_lines(job.task),
        "evaluation": ", ".join(evaluations) or "none",
        "prompts": f"{lengths}, each answered by at most {config.sampling.max_completion_tokens:,} "
        f"tokens",
        "sampler": slots_text(config, roles, model.architecture),
        "price": price_text(config, roles.num_devices),
        "critic": critic_text(config, model),
        "samples": staleness_text(config, roles.disaggregated or config.sampler.is_remote),
        "first prompt": shorten(text.replace("\n", "\\n"), FIRST_PROMPT),
    }
    if rewards:
        lines["rewards of known answers"] = "; ".join(rewards)
    if memory.level == "ok":  # else it is among the warnings
        lines["memory"] = memory.text
    for name, line in lines.items():
        if line:
            console.note(f"{name}: {line}")
    console.note(step_text(config))
    checkpoints = versions(job.resumed) if job.resumed else []
    console.note(learning_rate_text(config, max(checkpoints, default=0)))
    theirs = their_sizes(config)
    if theirs:
        console.note(theirs)
    followed = follow(job)
    if followed:
        for line in followed.start_texts():
            console.note(line)
    stop_on_warnings(config, job.findings)
    Findings(console).extend(job.findings.at("wrong", "warning"))


def model_text(section: ModelSection, loaded: ModelSource, model: Model) -> str:
    """Returns a text like `tiny (llama), 859,392 parameters, float32, from .../assets/tiny`, and
    how many parameters an adapter trains. With experts also how many parameters a token has."""
    family = (loaded.config or read_config(loaded.folder)).get("model_type")
    base = parameter_count(model.architecture.base)
    active = active_parameter_count(model.architecture.base)
    parameters = f"{base:,} parameters"
    if active < base:
        parameters += f", {active:,} of them active per token"
    text = f"{section.path} ({family}), {parameters}, {model.dtype.name}"
    if str(loaded.folder) != section.path:
        text += f", from {loaded.folder}"
    adapter = model.architecture.adapter
    if adapter:
        trained = parameter_count(model.architecture) - base
        text += (
            f"; LoRA of rank {adapter.rank} trains {trained:,} more, usually with 5 to 10 times "
            "the learning rate of full training"
        )
        adapts_experts = not set(adapter.targets).isdisjoint(EXPERT_PRODUCTS)
        if model.architecture.experts and not adapts_experts:
            text += f" (experts have none: name {', '.join(EXPERT_PRODUCTS)} in model.lora.targets)"
    return text


def critic_text(config: Config, model: Model) -> str:
    """Returns a text that says how a critic with layers of its own is trained in a run with an
    adapter; '' if there is no such critic or no adapter."""
    adapter = model.architecture.adapter
    has_layers = config.algorithm.has_critic and not config.critic.shared
    if not adapter or not has_layers:
        return ""
    return f"trained as the policy, by LoRA of rank {adapter.rank}; its head is trained whole"


def reference_note(config: Config, model: Model) -> str:
    """Returns a text that says which policy is the reference of the KL term in a run with an
    adapter: the one that the run begins with, or the model without an adapter. '' if there is no
    adapter or no KL term."""
    if not config.algorithm.scores_reference or not model.architecture.adapter:
        return ""
    if reference_architecture(config, model.architecture).adapter:
        return "the policy with the adapter that the run begins with (algorithm.reference=start)"
    return "the model without an adapter"


def data_lines(task: Task) -> dict[str, str]:
    """Returns a dict (title -> text) for the head of a run. For data from files `data`, the files
    that were read with their rows, and `training prompts`, how many training rows are kept and why
    others are not. For generated data `data` alone, with the number of training prompts."""
    report = task.data
    count = len(task.train)
    if not (report.train_files or report.held_out_files):
        return {"data": f"{task.name}, {count:,} training prompts"}
    read = sum(report.train_files.values())
    kept = "none"
    if read:
        kept = f"{count:,} of {read:,} rows"
    if report.dropped:
        dropped = [f"{number:,} ({reason})" for reason, number in report.dropped.items()]
        kept += f"; dropped: {', '.join(dropped)}"
    trained_on = files_text(report.train_files) or "nothing"
    held_out = files_text(report.held_out_files) or "nothing"
    return {
        "data": f"trains on {trained_on}; holds out {held_out}",
        "training prompts": kept,
    }


def files_text(files: Mapping[str, int]) -> str:
    """Returns a text like `data/train-0.parquet and 3 more files (7,473 rows)`; '' for no files.
    `files`: file -> number of rows; the first one is named."""
    if not files:
        return ""
    text = next(iter(files))
    if len(files) > 1:
        others = len(files) - 1
        noun = "file" if others == 1 else "files"
        text += f" and {others} more {noun}"
    return f"{text} ({sum(files.values()):,} rows)"
