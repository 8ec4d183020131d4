"""Numbers and texts computed from a configuration. Imports no JAX, because a dry run needs them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from shoal.config.choices import CORRECTIONS
from shoal.config.sections.devices import MeshSection
from shoal.config.train import Config
from shoal.records import ShoalError
from shoal.text import count, number_text

MICRO_TOKENS = 2**12
"""Default of `batch.micro_tokens` on accelerators. 8B on 8 v6e has room for a few more: 4,352 need
28.5 of 31.2 GiB (`benchmarks/aot.py`)."""


CPU_MICRO_TOKENS = 2**11
"""Default of `batch.micro_tokens` on CPUs. Longer rows leave a CPU's caches, and more of a small
update is padding. If a group does not fit into them, `budget.auto.cpu_micro_tokens` takes up to
twice as many."""


ROUNDS = 64
"""After this many publications of weights a run counts as steady; then the same number of
publications follows, over which its steps are averaged."""


def for_devices(config: Config, devices: int, platform: str) -> Config:
    """Returns the configuration with the values that are known only once devices are:
    `batch.micro_tokens` if it is 0; `batch.prompts_per_step` if `batch.prompts_per_device` is set;
    also `algorithm.correction` with auto decided. `devices`: the number of the trainer's devices,
    which counts only with batch.prompts_per_device; `platform`: JAX's name, of which `cpu` has its
    own micro_tokens. Raises ShoalError if `devices` times batch.prompts_per_device are fewer
    prompts than a step has mini-batches."""
    # This is not done when the configuration is made: devices are known only when JAX has started.
    micro_tokens = config.batch.micro_tokens
    if not micro_tokens:
        micro_tokens = CPU_MICRO_TOKENS if platform == "cpu" else MICRO_TOKENS
    config = replace(
        config,
        batch=replace(config.batch, micro_tokens=micro_tokens),
        algorithm=replace(config.algorithm, correction=correction_of(config)),
    )
    prompts_per_device = config.batch.prompts_per_device
    if not prompts_per_device:
        return config
    num_prompts = prompts_per_device * devices
    num_minibatches = config.algorithm.num_minibatches
    if num_minibatches > num_prompts:
        raise ShoalError(
            f"batch.prompts_per_device={prompts_per_device} on {count(devices, 'device')} gives "
            f"{count(num_prompts, 'prompt')} a step, fewer than "
            f"algorithm.num_minibatches={num_minibatches}: raise it or lower that"
        )
    return replace(config, batch=replace(config.batch, prompts_per_step=num_prompts))


def oldest_samples(config: Config) -> int:
    """Returns the largest age, in versions of the weights, that samples may have when the trainer
    learns from them."""
    return max(config.train.max_staleness, config.train.weight_sync_interval - 1)


def samples_are_the_trainers(config: Config) -> bool:
    """True if samples come from the trainer's own current weights and programs, so that log-probs
    of sampler and trainer are equal."""
    sampler = config.sampler
    return not oldest_samples(config) and not sampler.engine and sampler.quantise == "none"


def router_replay_of(config: Config, num_experts: int) -> str:
    """Returns the value of `model.router_replay`; if it is auto, the value that the run decides for
    a model with so many experts: on if there are any and Shoal's own engine samples."""
    chosen = config.model.router_replay
    if chosen != "auto":
        return chosen
    records_routes = not config.sampler.engine and not config.algorithm.learns_from_data
    return "on" if num_experts and records_routes else "off"


def replays_routes(config: Config) -> bool:
    """True if the policy uses the sampler's choices of experts again (`model.router_replay`, which
    must be decided)."""
    return config.model.router_replay == "on"


def correction_of(config: Config) -> str:
    """Returns the value of `algorithm.correction`; if it is auto, the value that the run decides:
    none if samples are the trainer's own (`samples_are_the_trainers`), else tis."""
    chosen = config.algorithm.correction
    if chosen != "auto":
        return chosen
    if samples_are_the_trainers(config):
        return "none"
    return "tis"


def decided_by_settings(config: Config) -> dict[str, Any]:
    """Returns dotted key -> value for seven keys about the age and correction of samples, the
    loss's tokens, and evaluation, which other keys alone decide if they are left open. For a key
    that is set the value is the one that it has, but algorithm.aggregation_tokens always gets
    sampling.max_completion_tokens. A key comes after the keys that its value follows from."""
    correction = correction_of(config)
    floor = CORRECTIONS[correction].lower_bound(config.algorithm.correction_floor)
    return {
        "train.max_staleness": oldest_samples(config),
        "algorithm.correction": correction,
        "algorithm.correction_floor": floor,
        "algorithm.aggregation_tokens": config.sampling.max_completion_tokens,
        "train.evaluate_every": config.evaluate_every,
        "train.quick_questions": config.quick_questions,
        "train.pass_k": config.pass_k,
    }


def vllm_tolerance(dtype: str) -> float:
    """Returns the value of `vllm.tolerance` if it is left open: 1e-3 for float32, else 0.1.
    `dtype`: the name of the data type that the trainer computes in."""
    if dtype == "float32":
        return 1e-3
    return 0.1


def staleness_text(config: Config, own_devices: bool) -> str:
    """Returns a sentence on how old samples may be or which other engine samples them, and how that
    is corrected; '' if all samples are of the trainer's own current weights and programs.
    `own_devices`: True if the sampler has devices of its own.

    up to 1 version old, corrected by importance weights (algorithm.correction=tis)"""
    oldest = oldest_samples(config)
    correction = correction_of(config)
    how = "corrected by importance weights"
    if correction == "none":
        how = "not corrected"
    elif correction == "direct":
        how = "with the ratio to the sampler's log-probs"
    age = "of the current weights"
    if oldest:
        age = f"up to {count(oldest, 'version')} old"
    text = f"{age}, {how} (algorithm.correction={correction})"
    engine = config.sampler.engine
    if engine:
        return (
            f"by {engine}, whose numbers are not the trainer's and which samples other tokens when "
            f"it is asked again; {text}"
        )
    if config.sampler.quantise != "none":
        text = f"by weights in {config.sampler.quantise}, which are not quite the trainer's; {text}"
        if not oldest:
            return text
    if not oldest:
        return ""
    takes_newest = config.train.versions == "newest"
    if own_devices and takes_newest:
        return f"{text}; the sampler takes new weights in the middle of completions"
    if own_devices:
        return f"{text}; the sampler continues while the trainer learns"
    if takes_newest:
        return (
            f"{text}; sampler and trainer share devices and take turns, so with "
            "train.versions=newest none is that old"
        )
    return text


def num_updates(config: Config) -> int:
    """Returns the number of the optimizer's updates in a whole run."""
    return config.steps * config.algorithm.num_epochs * config.algorithm.num_minibatches


def num_paid_devices(config: Config, num_devices: int) -> int:
    """Returns how many devices a run needs: `num_devices` of its own processes, and those of
    samplers in Ray or vLLM, which each have `sampler.devices_per_worker`, unless they share a GPU
    with the trainer."""
    if not config.sampler.is_remote or config.shares_gpu:
        return num_devices
    return num_devices + config.num_workers * config.sampler.devices_per_worker


def price_per_hour(config: Config, num_devices: int) -> float:
    """Returns the price of all devices of a run for an hour, 0 if `price` is not known.
    `num_devices`: of the run's own processes."""
    return config.price * num_paid_devices(config, num_devices)


def price_text(config: Config, num_devices: int) -> str:
    """Returns a line like `2.5 a device and hour, 20 an hour for 8 devices`; '' if `price` is not
    known. `num_devices`: of the run's own processes."""
    if not config.price:
        return ""
    all_devices = number_text(price_per_hour(config, num_devices))
    devices = count(num_paid_devices(config, num_devices), "device")
    return f"{number_text(config.price)} a device and hour, {all_devices} an hour for {devices}"


def longest_prompt(config: Config) -> int:
    """Returns the most tokens of a prompt, a teacher's with a hint included. `config`: also that of
    a command that does not train, and has no teacher."""
    room = config.teacher.room if isinstance(config, Config) else 0
    return config.sampling.max_prompt_tokens + room


def longest_sequence(config: Config) -> int:
    """Returns the most tokens that a prompt (`longest_prompt`) and its completion have together."""
    return longest_prompt(config) + config.sampling.max_completion_tokens


def needs_first_weights(config: Config) -> bool:
    """True if a run keeps the weights that it began with: as its reference, or as a teacher that
    reads a hint."""
    return config.algorithm.scores_reference or config.teacher.is_first_policy


def max_support(config: Config) -> int:
    """Returns how many token ids are stored at each position for `match_sampling_support`:
    sampling.max_support, or sampling.top_k if that is set and smaller. 0 if it is off, if sampling
    cuts no tokens off (top_k, top_p, min_p), or if the run learns from data."""
    sampling = config.sampling
    matches_support = sampling.params.truncated and config.algorithm.match_sampling_support
    if config.algorithm.learns_from_data or not matches_support:
        return 0
    return min(sampling.max_support, sampling.top_k or sampling.max_support)


def evaluates_as_in_training(config: Config) -> bool:
    """True if the compiled programs that sample in training can sample evaluations too. False if
    they store the tokens that truncation left (`max_support`), or have no truncation and the
    answers of an evaluation need it (evaluation.top_k, top_p, min_p)."""
    training = config.sampling.params
    answers = config.evaluation.params(training)
    needs_truncation = answers.truncated and not training.truncated
    return not max_support(config) and not needs_truncation


def trainer_devices(mesh: MeshSection) -> int:
    """Returns the number of the trainer's devices, the product of the mesh's axes; 0 if
    mesh.fsdp=-1 leaves it open."""
    devices = mesh.data * mesh.fsdp * mesh.expert * mesh.context * mesh.tensor
    devices *= mesh.dcn_data * mesh.dcn_fsdp
    return max(0, devices)


def step_text(config: Config) -> str:
    """Returns the size of a step in one line. With batch.prompts_per_device it says `32 prompts a
    device`, and the total only if the number of devices is known from the mesh.

    this step = 32 prompts x 8 completions = 256 completions, 1 update (1 epoch x 1 mini-batch); 80
    steps"""
    batch, algorithm = config.batch, config.algorithm
    completions, updates = step_sizes(config)
    if batch.prompts_per_device:
        devices = trainer_devices(config.mesh)
        whole = ""
        if devices:
            whole = f" x {count(devices, 'device')} = {devices * completions} completions"
        return (
            f"this step = {count(batch.prompts_per_device, 'prompt')} a device x "
            f"{count(batch.group_size, 'completion')}{whole}, {count(updates, 'update')}; "
            f"{count(config.steps, 'step')}"
        )
    return (
        f"this step = {count(batch.prompts_per_step, 'prompt')} x "
        f"{count(batch.group_size, 'completion')} = {count(completions, 'completion')}, "
        f"{count(updates, 'update')} ({count(algorithm.num_epochs, 'epoch')} x "
        f"{count(algorithm.num_minibatches, 'mini-batch', 'mini-batches')}); "
        f"{count(config.steps, 'step')}"
    )


def learning_rate_text(config: Config, steps_made: int = 0) -> str:
    """Returns how the learning rate changes in the run, in one line. `steps_made`: the steps that a
    resumed run has made; they may have had another rate, so the line is about those that follow.

    learning rate: rises to 1e-06 in the first 5 of 15 updates, then stays"""
    optimizer = config.optimizer
    updates = num_updates(config)
    warmup = optimizer.warmup_steps
    after = {
        "constant": "stays",
        "linear": "falls linearly to 0",
        "cosine": "falls to 0 in a half cosine",
    }[optimizer.schedule]
    if warmup > updates:
        reached = optimizer.lr * updates / warmup
        return (
            f"learning rate: rises to {reached:.2g} in {count(updates, 'update')}; its warm-up to "
            f"{optimizer.lr:g} takes {warmup}"
        )
    updates_made = steps_made * updates // max(1, config.steps)
    if updates_made >= max(1, warmup) and optimizer.schedule == "constant":
        return f"learning rate: {optimizer.lr:g} from update {updates_made + 1} on"
    if warmup <= 1:
        text = f"learning rate: {optimizer.lr:g} from the first update, which {after}"
        if updates_made:
            text += f"; this run continues at update {updates_made + 1}"
        return text
    return (
        f"learning rate: rises to {optimizer.lr:g} in the first {warmup} of "
        f"{count(updates, 'update')}, then {after}"
    )


THEIR_SIZES = {
    "torchrl": "TorchRL counts {completions:,} dialog turns a batch, {all:,} in all, {updates:,} "
    "updates of {each:,}",
    "maxtext": "MaxText counts {completions:,} sequences a step of at most {length:,} tokens: "
    "{tokens:,} tokens",
    "tunix": "Tunix counts {prompts:,} prompts a batch, {completions:,} completions in "
    "mini-batches of {each:,}",
    "trl": "in TRL's words: generation_batch_size={completions}, max_steps={updates}, each of "
    "{each:,} completions",
    "verl": "in verl's words: train_batch_size={prompts}, ppo_mini_batch_size={part}, "
    "{all_updates} in all",
}
"""Recipe -> a sentence with a run's sizes in the terms of the recipe's system."""


def their_sizes(config: Config) -> str:
    """Returns a run's sizes in the terms of the system whose recipe it uses, as one sentence of
    THEIR_SIZES; '' without a recipe or for a recipe that is not there. The configuration must be
    that of `for_devices`."""
    prompts = config.batch.prompts_per_step
    num_minibatches = config.algorithm.num_minibatches
    completions = prompts * config.batch.group_size
    return THEIR_SIZES.get(config.recipe, "").format(
        prompts=prompts,
        completions=completions,
        all=config.steps * completions,
        updates=num_updates(config),
        all_updates=count(num_updates(config), "update"),
        part=prompts // num_minibatches,
        each=completions // num_minibatches,
        length=longest_sequence(config),
        tokens=completions * longest_sequence(config),
    )


def step_sizes(config: Config) -> tuple[int, int]:
    """Returns (completions, updates) of a step. With batch.prompts_per_device the completions are
    those of one device."""
    prompts = config.batch.prompts_per_device or config.batch.prompts_per_step
    updates = config.algorithm.num_epochs * config.algorithm.num_minibatches
    return prompts * config.batch.group_size, updates


def evaluation_completions(config: Config, sets: Mapping[str, int]) -> int:
    """Returns how many completions all evaluations of a run sample together: two whole ones, before
    and after it, and the quick ones between. `sets`: name -> number of questions, the main set
    first. Each question gets evaluation.samples answers. The whole ones also sample for
    pass@k, but only the quick questions of the main set. With
    train.evaluate_every of 0 or -1 there are no quick ones, but the whole ones are counted in any
    case, without train.evaluate_first or without steps the last alone; without questions (`sets` is
    empty) the result is 0."""
    # The questions of each set in a quick evaluation; quick_questions=0 means all.
    quick = [min(size, config.quick_questions or size) for size in sets.values()]
    every = config.evaluate_every
    between = 0  # evaluations between the first and the last
    if every > 0:
        # After `every` steps, 2 * `every` and so on, without the one at the last step or behind it.
        between = max(0, -(-config.steps // every) - 1)
    for_pass_k = sum(quick[:1]) * config.pass_k  # of the main set alone
    num_whole = 2 if config.train.evaluate_first and config.steps else 1
    answers = config.evaluation.samples
    of_whole = answers * sum(sets.values()) + for_pass_k
    return num_whole * of_whole + between * answers * sum(quick)
