"""Finds which keys to change: in a job that does not fit, the changes that make it fit; in one that
fits, those that use the free memory to save time.

Each change is tried by computing the budget of the changed job (nothing is compiled). So the bytes
that roles would hold are exact, and a mesh that does not divide the model is never advised. The
time of a step is not estimated: a plan of the changed job says it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from shoal.budget.budget import FULL, Advice, Budget
from shoal.budget.shapes import computed_tokens, group_rows
from shoal.config.derived import MICRO_TOKENS, longest_sequence, needs_first_weights, oldest_samples
from shoal.config.key import build, get_value, keys_of, values_of
from shoal.config.train import Config
from shoal.records import ShoalError
from shoal.text import gib

Describe = Callable[[Config], Budget]
"""A function: configuration -> the budget of its job, before anything is compiled. It raises
ShoalError or ValueError if such a job is impossible."""

WORTH_SAVING = 0.02
"""Longer rows are advised for saving tokens if they save more than this share of an update's."""

RANK = 16
"""Rank of the adapter that is advised if masters and moments take too much memory."""

MOST_CHANGES = 8
"""Most changes that are made one after the other to make a job fit."""

UNSET = {"model.lora.rank": "off", "sampling.mean_completion_tokens": "the longest"}
"""What 0 means, for the keys whose 0 does not mean `auto`."""


@dataclass(frozen=True)
class Change:
    """New values for some keys. `values`: the keys to change; the first is the one that the advice
    is about. `cost`: what the change costs or does, as text."""

    values: Mapping[str, Any]
    cost: str = ""
    kept: Mapping[str, Any] = field(default_factory=dict)
    """Further keys and values, which keep something else, like the batch, as it is now."""

    @property
    def key(self) -> str:
        """The key that the change is about."""
        return next(iter(self.values))

    def words(self, config: Any) -> str:
        """Returns the change as a user types it, with the values of now: `mesh.trainer=32
        mesh.sampler=96 (now 64 and 64)`. A 0 of now is written as what it means (UNSET, else
        `auto`), an empty value as `unset`. Then follow the values that keep something, if any:
        `with ...`."""
        before = []
        for key in self.values:
            value = get_value(config, key)
            if value == 0 and value is not False:  # False == 0
                before.append(UNSET.get(key, "auto"))
            else:
                before.append(_short(value) or "unset")
        text = f"{_assigned(self.values)} (now {' and '.join(before)})"
        if self.kept:
            text += f" with {_assigned(self.kept)}"
        return text


def _assigned(values: Mapping[str, Any]) -> str:
    """Returns the values as they are typed, like `mesh.trainer=32 mesh.sampler=96`."""
    return " ".join(f"{key}={_short(value)}" for key, value in values.items())


def _short(value: Any) -> str:
    """Returns a value as a user types it: `true` and `false` for a bool. A list of devices of more
    than 30 characters is shortened to its first and last: `[0,1,...,63]` becomes `[0,...,63]`."""
    text = str(value)
    if isinstance(value, bool):
        text = text.lower()
    if len(text) > 30:
        return re.sub(r"^(\[\d+,).*(,\d+\])$", r"\1...\2", text)
    return text


@dataclass(frozen=True)
class Trial:
    """A change, with the budgets of the job before and after it."""

    change: Change
    before: Budget
    after: Budget

    @property
    def saved_bytes(self) -> int:
        """How many bytes less a device needs when it is fullest; negative if more. Counted in the
        memory that a device has now, because on a CPU each device has less if there are more of
        them."""
        after = self.after.peak() * self.before.memory / self.after.memory
        return self.before.peak() - round(after)

    def text(self) -> str:
        """Returns the change as text, with what it saves and what it costs:
        `batch.micro_tokens=4096 (now 8192): about 1.2 GiB less a device, weights are gathered more
        often`. Bytes are left out if they are about a thousandth of the memory or less; how many
        completions are sampled at once is added for changes of `sampling.*`."""
        parts = []
        saved = self.saved_bytes
        if abs(saved) > FULL * self.before.memory / 1000:
            parts.append(f"about {gib(abs(saved))} {'less' if saved > 0 else 'more'} a device")
        slots, slots_before = self.after.slots, self.before.slots
        if self.change.key.startswith("sampling.") and slots != slots_before:
            parts.append(f"{slots} completions at once instead of {slots_before}")
        if self.change.cost:
            parts.append(self.change.cost)
        words = self.change.words(self.before.config)
        if not parts:
            return words
        return f"{words}: {', '.join(parts)}"

    def advice(self) -> Advice:
        """Returns the trial as a piece of advice, whose values are all of the change's, those that
        keep something too."""
        values = {**self.change.values, **self.change.kept}
        return Advice(self.change.key, values, self.text(), self.saved_bytes)


def advise(budget: Budget, describe: Describe, available: float = 0) -> list[Advice]:
    """Returns pieces of advice, the best first: if the job does not fit, a single one that makes it
    fit; else those that shorten a step and still fit, in the order of `faster_changes`; [] if there
    are none. `describe` computes the budget of a changed job. `available`: bytes of a device that
    may be used; 0: the share FULL of its memory. Nothing is compiled, and the budget stays as it
    is."""
    available = available or FULL * budget.memory
    if not budget.fits() or budget.peak() > available:
        return [suggest_fit(budget, describe, available)]
    advice = []
    for trial in try_changes(budget, describe, faster_changes(budget)):
        if budget.peak() - trial.saved_bytes <= available:
            advice.append(trial.advice())
    return advice


def try_changes(budget: Budget, describe: Describe, changes: Iterable[Change]) -> list[Trial]:
    """Computes the budget of the job with each change alone. Returns a trial for each change, in
    order, but none for a change whose `values` are those of now (`kept` does not count), and none
    for an impossible one, for example because sizes do not divide."""
    values = values_of(budget.config)
    trials = []
    for change in changes:
        if all(values[key] == value for key, value in change.values.items()):
            continue  # it changes nothing
        try:
            config = build(Config, {**values, **change.values, **change.kept})
            described = describe(config)
        except (ShoalError, ValueError):  # sizes that do not divide, or too few devices
            continue
        # the compiled costs of now, scaled to the changed job, which is not compiled
        after = budget.with_scaled_costs(replace(described, config=config))
        trials.append(Trial(change, budget, after))
    return trials


def saving_trials(budget: Budget, describe: Describe, changes: Iterable[Change]) -> list[Trial]:
    """Returns the trials of those changes, each tried alone, with which the fullest device needs
    less memory, in order."""
    return [trial for trial in try_changes(budget, describe, changes) if trial.saved_bytes > 0]


def suggest_fit(budget: Budget, describe: Describe, available: float) -> Advice:
    """Finds changes with which a device needs at most `available` bytes, and returns them as a
    single piece of advice: its text lists all of them, its `key`, `values` and `bytes` are those of
    the first.

    Changes are added one by one, at most MOST_CHANGES: one that is enough, else the one that saves
    most. Changes that alter results are tried only if no other saves memory, and changes that turn
    out to be needless are removed. If all together are not enough, the text ends with the number of
    devices that would be. If no change saves memory, the text has that alone ("" if the job, which
    the compiler refused, seems to be small enough), `key` is "model.path" and `values` are
    empty."""
    # a share, because on a CPU a change of the devices changes the memory of each
    share = available / budget.memory
    chain: dict[str, Trial] = {}
    now = budget
    for _ in range(MOST_CHANGES):
        # At least one change is made: a job that the compiler refused may seem to fit.
        if chain and _is_enough(now, share):
            break
        trials = saving_trials(now, describe, memory_saving_changes(now))
        if not trials:
            trials = saving_trials(now, describe, lossy_changes(now))
        if not trials:
            break
        best = _first_enough(trials, share) or max(trials, key=lambda trial: trial.saved_bytes)
        now = best.after
        replaced = chain.get(best.change.key)
        if replaced is not None:
            # The key was changed before: its last value counts, and the trial covers both changes.
            best = replace(best, before=replaced.before)
        chain[best.change.key] = best
    if _is_enough(now, share):
        chain = _without_needless(budget, describe, chain, share)
    texts = [trial.text() for trial in chain.values()]
    if not _is_enough(now, share):
        # devices that together have the bytes which all devices need now
        needed = -(-now.peak() * now.num_used_devices // int(share * now.memory))
        texts.append(f"a smaller model, or more devices (mesh.fsdp): about {needed} of them")
    text = "; then ".join(texts)
    if not chain:
        return Advice("model.path", {}, text, 0)
    first = next(iter(chain.values()))
    return replace(first.advice(), text=text)


def _is_enough(budget: Budget, share: float) -> bool:
    """True if a device needs at most `share` of its memory."""
    return budget.peak() <= share * budget.memory


def _first_enough(trials: Sequence[Trial], share: float) -> Trial | None:
    """Returns the first trial, in their order, after whose change a device needs at most `share` of
    its memory; None if there is none."""
    for trial in trials:
        if _is_enough(trial.after, share):
            return trial
    return None


def _without_needless(
    budget: Budget, describe: Describe, chain: Mapping[str, Trial], share: float
) -> dict[str, Trial]:
    """Returns the chain of trials (by key, each made on top of the one before) without those that
    are not needed for a device to need at most `share` of its memory. Each is left out in turn,
    from the first on, and stays out if the others are enough; at least one stays. The others are
    computed again without it, from `budget`, the job before all changes."""
    needed = dict(chain)
    for key in chain:
        others = [trial.change for name, trial in needed.items() if name != key]
        trials = _tried_in_turn(budget, describe, others)
        if trials and _is_enough(trials[-1].after, share):
            needed = {trial.change.key: trial for trial in trials}
    return needed


def _tried_in_turn(budget: Budget, describe: Describe, changes: Iterable[Change]) -> list[Trial]:
    """Makes changes one after the other, each in the job that the one before gave, and returns
    their trials. Changes that change nothing there, or are impossible, are left out."""
    trials: list[Trial] = []
    now = budget
    for change in changes:
        for trial in try_changes(now, describe, [change]):  # one, or none
            trials.append(trial)
            now = trial.after
    return trials


# ---- the keys


def memory_saving_changes(budget: Budget) -> list[Change]:
    """Returns candidate changes that may save memory and alter no result, the cheapest first. The
    value -1 of `mesh.fsdp` means all devices that remain. The changes need not be possible:
    `try_changes` drops those that change nothing or that cannot be made."""
    batch = budget.config.batch
    mesh = budget.config.mesh
    changes = []
    # Half the tokens of a row on each device. The `mesh.context` devices that share a row must
    # still have room for the longest prompt with its completion.
    half = min(batch.micro_tokens, budget.batch.length // mesh.context) // 2
    if half * mesh.context >= longest_sequence(budget.config):
        changes.append(Change({"batch.micro_tokens": half}, "weights are gathered more often"))
    if budget.model.remat not in ("full", "offload"):
        changes.append(Change({"model.remat": "full"}, "the backward pass computes products again"))
    changes += _fewer_slots(budget)
    changes += _idle_devices(budget)
    if mesh.data > 1:
        changes.append(Change({"mesh.fsdp": -1, "mesh.data": 1}, "more devices exchange weights"))
    replica = budget.roles["sampler"].mesh.get("tensor", 1)
    # An open `mesh.sampler_tensor` follows `mesh.tensor`: changes of the trainer's axes set it to
    # the size that the sampler's replicas have now.
    same_replica = {}
    if not mesh.sampler_tensor:
        same_replica = {"mesh.sampler_tensor": replica}
    axes = budget.roles["trainer"].mesh
    changes += [
        # Refused for a model without experts, and where their number is not divided.
        Change(
            {"mesh.expert": 2 * axes.get("expert", 1), "mesh.fsdp": -1},
            "experts are split over more devices, which exchange tokens",
            same_replica,
        ),
        Change(
            {"mesh.tensor": 2 * axes.get("tensor", 1), "mesh.fsdp": -1},
            "layers are split over more devices",
            same_replica,
        ),
        Change(
            {
                "mesh.context": 2 * axes.get("context", 1),
                "mesh.fsdp": -1,
                "batch.micro_tokens": batch.micro_tokens // 2,
            },
            "the tokens of a row are split over more devices",
            same_replica,
        ),
        Change({"mesh.sampler_tensor": 2 * replica}, "a replica of the sampler has more devices"),
        Change(
            {"model.remat": "offload"},
            "what layers store goes to the host and back in each micro-batch",
        ),
        Change(
            {"optimizer.offload": True},
            "Adam's moments come from the host and go back in each update",
        ),
    ]
    return changes + _other_placements(budget)


def faster_changes(budget: Budget) -> list[Change]:
    """Returns candidate changes that may shorten a step and use free memory for it, the best first.
    `try_changes` drops those that change nothing or that cannot be made."""
    config = budget.config
    fewer_tokens, same_tokens = _longer_rows(budget)
    changes = _idle_devices(budget) + fewer_tokens
    # `model.remat` of now -> values with which more is stored and less is computed again
    computing_less = {"full": ("dots", "attention"), "attention": ("dots",)}
    for remat in computing_less.get(budget.model.remat, ()):
        changes.append(Change({"model.remat": remat}, "the backward pass computes less again"))
    if budget.slots < budget.prompts_per_step * config.batch.group_size:
        # 0: open, so as many as the step has completions and memory has room for
        changes.append(Change({"sampling.slots_per_device": 0}))
        # 0 for a limit of one token, which cannot be halved
        half = config.sampling.max_completion_tokens // 2
        if half and not config.sampling.mean_completion_tokens:
            changes.append(
                Change(
                    {"sampling.mean_completion_tokens": half},
                    "if they take half of their limit on average",
                )
            )
    changes += same_tokens
    trainer = set(budget.roles["trainer"].devices)
    sampler = set(budget.roles["sampler"].devices)
    if trainer != sampler and not oldest_samples(config):
        changes.append(
            Change(
                {"mesh.trainer": "1.0", "mesh.sampler": "1.0", "mesh.fsdp": -1},
                f"all {len(trainer | sampler)} devices sample and train in turn, so none waits",
                _same_batch(budget),
            )
        )
    if budget.machines > 1 and config.mesh.dcn_data == 1:
        changes.append(
            Change(
                {
                    "mesh.dcn_data": budget.machines,
                    "mesh.dcn_fsdp": 1,
                    "mesh.data": 1,
                    "mesh.fsdp": -1,
                },
                "machines exchange only gradients, and each holds the whole model",
            )
        )
    return changes


def lossy_changes(budget: Budget) -> list[Change]:
    """Returns candidate changes that save memory but alter what is computed or trained on.
    `try_changes` drops those that change nothing or that cannot be made."""
    config = budget.config
    changes = []
    if budget.model.dtype == "float32":
        changes.append(Change({"model.dtype": "bfloat16"}, "computed in fewer bits"))
    always = budget.items_of("trainer", "always")
    has_adapter = any(item.part == "frozen parameters" for item in always)
    if not has_adapter and sum(item.bytes for item in always) > budget.activations:
        changes.append(
            Change(
                {"model.lora.rank": RANK},
                "an adapter is trained, with five to ten times the learning rate",
            )
        )
    changes.append(
        Change({"optimizer.moments": "bfloat16"}, "Adam's moments rounded stochastically")
    )
    without_reference = {}
    for key, off in (("algorithm.kl_coef", 0.0), ("algorithm.kl_metric", False)):
        if get_value(config, key):
            without_reference[key] = off
    if without_reference:
        changes.append(Change(without_reference, "without a reference"))
    for key in ("batch.group_size", "sampling.max_completion_tokens", "sampling.max_prompt_tokens"):
        now = get_value(config, key)
        # Much smaller values too: from a job that is far too large one half would not be enough.
        for divisor in (2, 16, 256):
            if now < divisor:
                continue
            fewer_slots = {}
            slots = config.sampling.slots_per_device // divisor
            if key == "batch.group_size" and slots:
                fewer_slots = {"sampling.slots_per_device": slots}
            changes.append(Change({key: now // divisor}, "", fewer_slots))
    return changes


def plain_changes(config: Any) -> list[Change]:
    """Returns changes that save memory in any command, for an error when memory ran out and no
    budget can be computed. Sizes are halved. Keys that the command's configuration lacks are left
    out, and so are changes that change nothing."""
    keys = keys_of(type(config))
    changes = []
    for key in (
        "batch",
        "batch.micro_tokens",
        "batch.group_size",
        "sampling.max_completion_tokens",
        "sampling.max_prompt_tokens",
    ):
        if key not in keys:
            continue
        now = get_value(config, key) or MICRO_TOKENS  # 0: an open `batch.micro_tokens`
        if now > 1:
            changes.append(Change({key: now // 2}))
    trains = "batch.micro_tokens" in keys
    if trains and get_value(config, "model.remat") != "full":
        changes.append(Change({"model.remat": "full"}))
    if get_value(config, "model.dtype") != "bfloat16":
        changes.append(Change({"model.dtype": "bfloat16"}))
    return changes


def _fewer_slots(budget: Budget) -> list[Change]:
    """Returns changes of `sampling.slots_per_device` to half as many slots as now, and to as few as
    a group (or an evaluation's) needs; without those that are no fewer than now, or too few for a
    group."""
    now = -(-budget.slots // len(budget.roles["sampler"].devices))
    config = budget.config
    least = max(config.batch.group_size, config.pass_k, config.evaluation.samples)
    changes = []
    # a dict, so that two equal sizes give one change
    for fewer in dict.fromkeys((now // 2, least)):
        if least <= fewer < now:
            changes.append(Change({"sampling.slots_per_device": fewer}))
    return changes


def _longer_rows(budget: Budget) -> tuple[list[Change], list[Change]]:
    """Returns (changes with which fewer tokens are computed, other changes), all of
    `batch.micro_tokens` to longer rows that hold whole groups: the two next sizes, at most. Fewer
    tokens are computed if no prompt is computed twice and little of a row is padding. What layers
    store for the backward pass stays the same."""
    config = budget.config
    # each of the `rows` rows of a micro-batch is shared by `context` devices
    shards = budget.batch.rows * config.mesh.context
    # of one update, rounded up
    prompts = -(-budget.prompts_per_step // config.algorithm.num_minibatches)
    now = config.batch.micro_tokens
    longer = [size for size in group_rows(config, shards) if size > now][:2]
    fewer_tokens: list[Change] = []
    same_tokens: list[Change] = []
    if not longer:
        return fewer_tokens, same_tokens
    before = computed_tokens(config, shards, prompts, now)
    # An open `model.remat` could be decided otherwise for longer rows.
    same_remat = {}
    if config.model.remat == "auto":
        same_remat = {"model.remat": budget.model.remat}
    for size in longer:
        values = {"batch.micro_tokens": size}
        saved = 1 - computed_tokens(config, shards, prompts, size) / before
        if saved > WORTH_SAVING:
            cost = f"{saved:.0%} fewer tokens are computed"
            fewer_tokens.append(Change(values, cost, same_remat))
        else:
            cost = "weights and gradients are moved less often"
            same_tokens.append(Change(values, cost, same_remat))
    return fewer_tokens, same_tokens


def _same_batch(budget: Budget) -> dict[str, Any]:
    """Returns keys and values that keep the number of prompts in a step on another number of
    devices; empty if that number does not depend on the devices (`batch.prompts_per_device` is
    0)."""
    if not budget.config.batch.prompts_per_device:
        return {}
    return {
        "batch.prompts_per_device": 0,
        "batch.prompts_per_step": budget.prompts_per_step,
    }


def _idle_devices(budget: Budget) -> list[Change]:
    """Returns a list with one change, which gives all devices a role; [] if all have one."""
    mesh = budget.config.mesh
    used = budget.num_used_devices
    if used >= budget.num_devices:
        return []
    fsdp = -1
    if mesh.fsdp >= 0:
        others = mesh.data * mesh.dcn_data * mesh.dcn_fsdp
        others *= mesh.tensor * mesh.context * mesh.expert
        fsdp = budget.num_devices // others
    values: dict[str, Any] = {"mesh.fsdp": fsdp}
    if mesh.trainer:
        values["mesh.trainer"] = "1.0"
    if mesh.sampler:
        values["mesh.sampler"] = "1.0"
    cost = f"{budget.num_devices} devices instead of {used}"
    return [Change(values, cost, _same_batch(budget))]


def _other_placements(budget: Budget) -> list[Change]:
    """Returns candidate changes that divide the devices differently between trainer and sampler
    (half each if they share all; else twice or half as many for the sampler, if the trainer keeps
    some); and, if a reference or teacher scores, changes that move it to the sampler's or to the
    trainer's devices."""
    config = budget.config
    trainer = budget.roles["trainer"].devices
    sampler = budget.roles["sampler"].devices
    reference = budget.roles["reference"].devices
    num_devices = len({*trainer, *sampler})
    cost = "each waits for the other"
    if oldest_samples(config):  # samples of an older version: both work at the same time
        cost = ""
    sampler_sizes = [num_devices // 2]
    if set(trainer) != set(sampler):
        sampler_sizes = [2 * len(sampler), len(sampler) // 2]
    changes = []
    for size in sampler_sizes:
        if 0 < size < num_devices:
            values = {
                "mesh.trainer": str(num_devices - size),
                "mesh.sampler": str(size),
                "mesh.fsdp": -1,
            }
            changes.append(Change(values, cost, _same_batch(budget)))
    if needs_first_weights(config) or config.teacher.path:
        for devices, whose in ((sampler, "sampler"), (trainer, "trainer")):
            if set(devices) != set(reference):
                numbers = ",".join(map(str, devices))
                changes.append(
                    Change({"mesh.reference": f"[{numbers}]"}, f"scored on the {whose}'s devices")
                )
    return changes
