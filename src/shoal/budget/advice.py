"""Which keys to change: of a job that does not fit those that make it fit, of one that fits those
that use the rest.

Each change is tried by describing the job again (nothing is compiled), so what the roles would hold
is exact, and a mesh that does not divide the model is never advised. What a change does to the time
of a step is not guessed: a plan of the changed job says it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from shoal.budget.budget import FULL, Budget
from shoal.budget.shapes import computed_tokens, group_rows
from shoal.config.derived import MICRO_TOKENS, longest_sequence, oldest_samples
from shoal.config.key import build, get_value, keys_of
from shoal.config.train import Config
from shoal.records import ShoalError
from shoal.text import gib

Describe = Callable[[Config], Mapping[str, Any]]
"""A configuration -> the outline of its job."""


TIGHT = 0.9
"""Share of the free memory above which a job is tight."""


WORTH_SAVING = 0.02
"""Share of an update's tokens for which longer rows are advised."""


RANK = 16
"""Of the adapter that is advised where masters and moments take too much."""


MOST_CHANGES = 8
"""How often one change is made upon another to make a job fit."""


@dataclass(frozen=True)
class Change:
    """Other values of some keys; the first is what it is about."""

    values: Mapping[str, Any]
    cost: str = ""
    kept: Mapping[str, Any] = field(
        default_factory=dict
    )  # values with which the batch stays as it is

    @property
    def key(self) -> str:
        return next(iter(self.values))

    def words(self, config: Any) -> str:
        """`mesh.trainer=32 mesh.sampler=96 (now 64 and 64)`"""
        now = {key: get_value(config, key) for key in self.values}
        unset = {"model.lora.rank": "off", "sampling.mean_completion_tokens": "the longest"}
        shown = " and ".join(
            unset.get(key, "auto")
            if value == 0 and value is not False
            else _short(value) or "unset"
            for key, value in now.items()
        )
        kept = f" with {_assigned(self.kept)}" if self.kept else ""
        return f"{_assigned(self.values)} (now {shown}){kept}"


def _assigned(values: Mapping[str, Any]) -> str:
    return " ".join(f"{key}={_short(value)}" for key, value in values.items())


def _short(value: Any) -> str:
    """A value as it is typed; of a long list of devices the first and the last."""
    text = str(value).lower() if isinstance(value, bool) else str(value)
    return re.sub(r"^(\[\d+,).*(,\d+\])$", r"\1...\2", text) if len(text) > 30 else text


@dataclass(frozen=True)
class Trial:
    """A change, and what it would make of the job."""

    change: Change
    before: Budget
    after: Budget

    @property
    def bytes(self) -> int:
        """That a device needs less at its fullest, of the memory that it has now: on a CPU more
        devices have less."""
        return self.before.peak - round(self.after.peak * self.before.memory / self.after.memory)

    def text(self) -> str:
        parts = [self.change.cost] * bool(self.change.cost)
        if (
            self.change.key.startswith("sampling.")
            and (slots := self.after.job["slots"]) != self.before.job["slots"]
        ):
            parts.insert(0, f"{slots} completions at once instead of {self.before.job['slots']}")
        if abs(self.bytes) > FULL * self.before.memory / 1000:
            parts.insert(
                0, f"about {gib(abs(self.bytes))} {'less' if self.bytes > 0 else 'more'} a device"
            )
        return f"{self.change.words(self.before.config)}{': ' * bool(parts)}{', '.join(parts)}"

    def record(self) -> dict[str, Any]:
        return {
            "key": self.change.key,
            "values": {**self.change.values, **self.change.kept},
            "text": self.text(),
            "bytes": self.bytes,
        }


def advise(figures: Budget, describe: Describe, room: float = 0) -> list[dict[str, Any]]:
    """Keys to change, the best first. `room`: bytes of a device that may be used, if not all but a
    little."""
    room = room or FULL * figures.memory
    if not figures.fits or figures.peak > room:
        return [suggest_fit(figures, describe, room)]
    tried = _tried(figures, describe, faster(figures.config, figures.job))
    return [one.record() for one in tried if figures.peak - one.bytes <= room]


def memory_trials(figures: Budget, describe: Describe) -> Iterator[Trial]:
    """The changes of no result after which the fullest device needs less, what costs least
    first."""
    return (
        one
        for one in _tried(figures, describe, memory_saving_changes(figures.config, figures.job))
        if one.bytes > 0
    )


def lossy_changes(figures: Budget, describe: Describe) -> Iterator[Trial]:
    """Those that change results."""
    return (
        one
        for one in _tried(figures, describe, other_results(figures.config, figures.job))
        if one.bytes > 0
    )


def _tried(figures: Budget, describe: Describe, some: Iterable[Change]) -> Iterator[Trial]:
    values = {name: get_value(figures.config, name) for name in keys_of(Config)}
    for change in some:
        new = {**change.values, **change.kept}
        if all(values[key] == value for key, value in change.values.items()):
            continue
        try:
            other = build(Config, values | new)
            job = describe(other)
        except (ShoalError, ValueError):  # sizes that do not divide, devices that are not there
            continue
        yield Trial(change, figures, figures.changed(other, job))


def _upon(figures: Budget, describe: Describe, changes: Iterable[Change]) -> list[Trial]:
    """The trials of changes, one upon the other."""
    trials: list[Trial] = []
    for change in changes:
        trials += _tried(trials[-1].after if trials else figures, describe, [change])
    return trials


def suggest_fit(figures: Budget, describe: Describe, room: float) -> dict[str, Any]:
    """The changes after which a device needs at most `room` bytes, one upon the other, as one piece
    of advice: the first that is enough, else the one that saves most and others upon it, without
    those that a later one replaces."""
    chain: dict[str, Trial] = {}
    now, share = figures, room / figures.memory

    def is_enough(one: Budget) -> bool:
        return one.peak <= share * one.memory

    for _ in range(MOST_CHANGES):
        if chain and is_enough(now):
            break
        if not (better := list(memory_trials(now, describe)) or list(lossy_changes(now, describe))):
            break
        best = next(
            (one for one in better if is_enough(one.after)), max(better, key=lambda one: one.bytes)
        )
        first = chain.get(best.change.key, best)  # the same key again: its last value counts
        chain[best.change.key] = Trial(best.change, first.before, best.after)
        now = best.after
    for key in list(chain) if is_enough(now) else ():
        others = _upon(
            figures, describe, [one.change for name, one in chain.items() if name != key]
        )
        if others and is_enough(others[-1].after):
            chain = {one.change.key: one for one in others}
    texts = [one.text() for one in chain.values()]
    if not is_enough(now):
        needed = -(-now.peak * now.num_devices // int(share * now.memory))
        texts.append(f"a smaller model, or more devices (mesh.fsdp): some {needed} of these")
    record = next(
        (one.record() for one in chain.values()), {"key": "model.path", "values": {}, "bytes": 0}
    )
    return record | {"text": "; then ".join(texts)}


# ---- the keys


def memory_saving_changes(config: Config, job: Mapping[str, Any]) -> Iterator[Change]:
    """What may take less memory and changes no result, what costs least first."""
    b, m, mesh = config.batch, config.mesh, job["roles"]["trainer"]["mesh"]
    same = _same_batch(config, job)
    if (
        half := min(b.micro_tokens, job["shape"]["length"] // m.context) // 2
    ) * m.context >= longest_sequence(config):
        yield Change({"batch.micro_tokens": half}, "weights are gathered more often")
    if job["model"]["remat"] not in ("full", "offload"):
        yield Change({"model.remat": "full"}, "the backward pass computes products again")
    each, least = (
        -(-job["slots"] // len(job["roles"]["sampler"]["devices"])),
        max(b.group_size, config.pass_k),
    )
    for fewer in dict.fromkeys((each // 2, least)):
        if least <= fewer < each:
            yield Change({"sampling.slots_per_device": fewer})
    yield from _idle(config, job)
    if m.data > 1:
        yield Change({"mesh.fsdp": -1, "mesh.data": 1}, "more devices exchange weights")
    tensor, own = mesh.get("tensor", 1), job["roles"]["sampler"]["mesh"].get("tensor", 1)
    yield Change(
        {"mesh.tensor": 2 * tensor, "mesh.fsdp": -1},
        "layers are split over more devices",
        {} if m.sampler_tensor else {"mesh.sampler_tensor": own},
    )
    context = mesh.get("context", 1)
    yield Change(
        {"mesh.context": 2 * context, "mesh.fsdp": -1, "batch.micro_tokens": b.micro_tokens // 2},
        "the tokens of a row are split over more devices",
        {} if m.sampler_tensor else {"mesh.sampler_tensor": own},
    )
    yield Change({"mesh.sampler_tensor": 2 * own}, "a replica of the sampler has more devices")
    yield Change(
        {"model.remat": "offload"},
        "what layers store goes to the host and back in each micro-batch",
    )
    yield Change(
        {"optimizer.offload": True}, "Adam's moments come from the host and go back in each update"
    )
    yield from _placement(config, job, same)


def faster(config: Config, job: Mapping[str, Any]) -> Iterator[Change]:
    """What shortens a step for memory that is free."""
    b, slots = config.batch, job["slots"]
    yield from _idle(config, job)
    longer = list(_whole_groups(config, job))
    yield from (change for saves, change in longer if saves)
    for kept in {"full": ("dots", "attention"), "attention": ("dots",)}.get(
        job["model"]["remat"], ()
    ):
        yield Change({"model.remat": kept}, "the backward pass computes less again")
    if slots < job["prompts"] * b.group_size:
        yield Change({"sampling.slots_per_device": 0})
        if (
            half := config.sampling.max_completion_tokens
            // 2
            * (not config.sampling.mean_completion_tokens)
        ):
            yield Change(
                {"sampling.mean_completion_tokens": half},
                "if they take half of their limit on average",
            )
    yield from (change for saves, change in longer if not saves)
    trainer, sampler = (job["roles"][name]["devices"] for name in ("trainer", "sampler"))
    if set(trainer) != set(sampler) and not oldest_samples(config):
        yield Change(
            {"mesh.trainer": "1.0", "mesh.sampler": "1.0", "mesh.fsdp": -1},
            f"all {len({*trainer, *sampler})} devices sample and train in turn, so none waits",
            _same_batch(config, job),
        )
    if job["machines"] > 1 and config.mesh.dcn_data == 1:
        yield Change(
            {"mesh.dcn_data": job["machines"], "mesh.dcn_fsdp": 1, "mesh.data": 1, "mesh.fsdp": -1},
            "machines exchange gradients alone, and each holds the whole model",
        )


def _whole_groups(config: Config, job: Mapping[str, Any]) -> Iterator[tuple[bool, Change]]:
    """Longer rows of whole groups, by the numbers of them that divide those of a device: no prompt
    is computed twice, and little of a row is padding. With each whether tokens are saved; what
    layers store stays as it is."""
    b, shards = config.batch, job["shape"]["rows"] * config.mesh.context
    prompts = -(-job["prompts"] // config.algorithm.num_minibatches)

    longer = [size for size in group_rows(config, shards) if size > b.micro_tokens][:2]
    if not longer:
        return
    before = computed_tokens(config, shards, prompts, b.micro_tokens)
    same = {"model.remat": job["model"]["remat"]} if config.model.remat == "auto" else {}
    for size in longer:
        saved = 1 - computed_tokens(config, shards, prompts, size) / before
        yield (
            saved > WORTH_SAVING,
            Change(
                {"batch.micro_tokens": size},
                f"{saved:.0%} fewer tokens are computed"
                if saved > WORTH_SAVING
                else "weights and gradients are moved less often",
                same,
            ),
        )


def _same_batch(config: Config, job: Mapping[str, Any]) -> dict[str, Any]:
    """Keys with which another number of devices has the same batch."""
    return (
        {"batch.prompts_per_device": 0, "batch.prompts_per_step": job["prompts"]}
        if config.batch.prompts_per_device
        else {}
    )


def _idle(config: Config, job: Mapping[str, Any]) -> Iterator[Change]:
    """All devices, where some have no role."""
    m, used = config.mesh, {device for role in job["roles"].values() for device in role["devices"]}
    if len(used) < job["num_devices"]:
        fsdp = job["num_devices"] // (m.data * m.dcn_data * m.dcn_fsdp * m.tensor * m.context)
        named = {f"mesh.{role}": "1.0" for role in ("trainer", "sampler") if getattr(m, role)}
        yield Change(
            {"mesh.fsdp": -1 if m.fsdp < 0 else fsdp, **named},
            f"{job['num_devices']} devices instead of {len(used)}",
            _same_batch(config, job),
        )


def _placement(config: Config, job: Mapping[str, Any], same: Mapping[str, Any]) -> Iterator[Change]:
    """Other devices for the roles."""
    trainer, sampler, reference = (
        job["roles"][name]["devices"] for name in ("trainer", "sampler", "reference")
    )
    count = len({*trainer, *sampler})
    apart = set(trainer) != set(sampler)
    waits = "" if oldest_samples(config) else "each waits for the other"
    for own in (2 * len(sampler), len(sampler) // 2) if apart else (count // 2,):
        if 0 < own < count:
            yield Change(
                {"mesh.trainer": str(count - own), "mesh.sampler": str(own), "mesh.fsdp": -1},
                waits,
                same,
            )
    if config.algorithm.scores_reference or config.teacher.path:
        for devices, whose in ((sampler, "sampler"), (trainer, "trainer")):
            if set(devices) != set(reference):
                yield Change(
                    {"mesh.reference": f"[{','.join(map(str, devices))}]"},
                    f"scored on the {whose}'s devices",
                )


def other_results(config: Config, job: Mapping[str, Any]) -> Iterator[Change]:
    """What takes less memory and changes what is computed or trained on."""
    if job["model"]["dtype"] == "float32":
        yield Change({"model.dtype": "bfloat16"}, "computed in fewer bits")
    held = job["held"]["trainer"]["always"]
    if "frozen parameters" not in held and sum(held.values()) > job["activations"]:
        yield Change(
            {"model.lora.rank": RANK},
            "an adapter is trained, with five to ten times the learning rate",
        )
    yield Change({"optimizer.moments": "bfloat16"}, "Adam's moments rounded at random")
    scored = {"algorithm.kl_coef": 0.0, "algorithm.kl_metric": False}
    if off := {key: none for key, none in scored.items() if get_value(config, key)}:
        yield Change(off, "without a reference")
    for key in ("batch.group_size", "sampling.max_completion_tokens", "sampling.max_prompt_tokens"):
        for part in (2, 16, 256):
            if (now := get_value(config, key)) >= part:
                slots = config.sampling.slots_per_device // part if key == "batch.group_size" else 0
                yield Change(
                    {key: now // part}, "", {"sampling.slots_per_device": slots} if slots else {}
                )


def plain_changes(config: Any) -> Iterator[Change]:
    """What takes less memory in any command, where its job cannot be described again; the keys that
    it lacks are left out."""
    keys = keys_of(type(config))
    for key in (
        "batch",
        "batch.micro_tokens",
        "batch.group_size",
        "sampling.max_completion_tokens",
        "sampling.max_prompt_tokens",
    ):
        if key in keys and (now := get_value(config, key) or MICRO_TOKENS) > 1:
            yield Change({key: now // 2})
    for key, less in (("model.remat", "full"), ("model.dtype", "bfloat16")):
        if get_value(config, key) != less and (
            key == "model.dtype" or "batch.micro_tokens" in keys
        ):
            yield Change({key: less})
