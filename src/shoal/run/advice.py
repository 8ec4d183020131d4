"""Which keys to change: of a job that does not fit those that make it fit, of one that fits those that save time.

`changes` is the one list of them. Each is tried by describing the job again (nothing is compiled), so what the roles
would hold is exact, and a mesh that does not divide the model is never advised.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from shoal.config.keys import keys_of
from shoal.config.schema import Config
from shoal.config.values import build, get_value
from shoal.report.findings import gib, seconds_text
from shoal.run.derived import MICRO_TOKENS, oldest_samples
from shoal.run.figures import FULL, Figures
from shoal.run.predict import predict
from shoal.types import ShoalError

Describe = Callable[[Config], Mapping[str, Any]]
"""A configuration -> the outline of its job, as `outline_here` gives it."""

LEAST_GAIN = 0.05
"""Share of a step's time below which no key is advised."""

MOST_CHANGES = 4
"""Keys that are changed together at most to make a job fit."""

MOST_TRIES = 8
"""How often one change is made upon another."""

NAMED = 0.05
"""Share of a step from which a single transfer is named."""

LEFT = 0.6
"""Share of a transfer that a change may leave and still be named as what removes it."""


_AUTO = {"mesh.sampler_tensor": "auto", "sampling.slots_per_device": "auto"}
"""What 0 stands for."""


@dataclass(frozen=True)
class Change:
    """Other values of some keys; the first is what it is about."""

    values: Mapping[str, Any]
    cost: str
    kept: Mapping[str, Any] = field(default_factory=dict)  # values with which the batch stays as it is
    exact: bool = True  # else any lower value helps

    @property
    def key(self) -> str:
        return next(iter(self.values))

    def words(self, config: Config) -> str:
        """`mesh.trainer=32 mesh.sampler=96 (now 64 and 64)`"""
        now = " and ".join(_AUTO.get(key, _short(value)) if value == 0 else _short(value) or "unset"
                           for key in self.values for value in [get_value(config, key)])
        if not self.exact:
            return f"a lower {self.key} (now {now})"
        kept = f" with {_assigned(self.kept)}" if self.kept else ""
        return f"{_assigned(self.values)} (now {now}){kept}"


@dataclass(frozen=True)
class Trial:
    """A change, and what it would make of the job."""

    change: Change
    before: Figures
    after: Figures

    @property
    def bytes(self) -> int:
        """That a device needs less at its fullest."""
        return self.before.peak - self.peak

    @property
    def peak(self) -> int:
        """What a device needs at its fullest, of the memory that it has now: on a CPU more devices have less each."""
        return round(self.after.peak * self.before.memory / self.after.memory)

    @property
    def seconds(self) -> float:
        """Of a step that are saved; 0 where they are not known."""
        return _middle(self.before) - _middle(self.after) if self.before.is_timed else 0.0

    @property
    def saves(self) -> float:
        return self.seconds / _middle(self.before) if self.before.is_timed else 0.0

    def text(self) -> str:
        parts = []
        if abs(self.bytes) > FULL * self.before.memory / 1000:
            parts.append(f"about {gib(abs(self.bytes))} {'less' if self.bytes > 0 else 'more'} a device")
        if abs(self.saves) > LEAST_GAIN / 10:
            parts.append(f"about {seconds_text(abs(self.seconds))} ({100 * abs(self.saves):.0f}%) "
                         f"{'less' if self.saves > 0 else 'more'} a step")
        parts += [self.change.cost] * bool(self.change.cost)
        return f"{self.change.words(self.before.config)}{': ' * bool(parts)}{', '.join(parts)}"

    def record(self) -> dict[str, Any]:
        return {"key": self.change.key, "values": {**self.change.values, **self.change.kept}, "text": self.text(),
                "bytes": self.bytes, "seconds": self.seconds, "saves": self.saves}


def _assigned(values: Mapping[str, Any]) -> str:
    return " ".join(f"{key}={_short(value)}" for key, value in values.items())


def _short(value: Any) -> str:
    """A value as it is typed; of a long list of devices the first and the last."""
    text = str(value)
    return re.sub(r"^(\[\d+,).*(,\d+\])$", r"\1...\2", text) if len(text) > 30 else text


def _middle(figures: Figures) -> float:
    return sum(figures.step_seconds[1:]) / 2


def advise(figures: Figures, describe: Describe, room: float = 0) -> dict[str, list[dict[str, Any]]]:
    """`advice`: keys to change, the best first; `named_transfers`: collectives that take NAMED of a step, with the key
    that would remove most of each. `room`: bytes of a device that advice may use, if not all but a little."""
    room = room or FULL * figures.memory
    if not figures.fits:
        return {"advice": [fitting(figures, describe, room)], "named_transfers": []}
    if not figures.is_timed:
        return {"advice": [], "named_transfers": []}
    tried = [one for one in _tried(figures, describe) if one.peak <= room]
    faster: dict[str, Trial] = {}
    for one in sorted(tried, key=lambda one: -one.saves):
        if one.saves >= LEAST_GAIN:
            faster.setdefault(one.change.key, one)
    return {"advice": [one.record() for one in faster.values()], "named_transfers": _transfers(figures, tried)}


def smaller(figures: Figures, describe: Describe) -> list[Trial]:
    """The changes after which the fullest device needs less, those that change no result first."""
    return [one for one in _tried(figures, describe, change_results=True) if one.bytes > 0]


def _tried(figures: Figures, describe: Describe, *, change_results: bool = False) -> Iterator[Trial]:
    config = figures.config
    values = {name: get_value(config, name) for name in keys_of(Config)}
    for change in changes(config, figures.job, change_results):
        try:
            other = build(Config, values | {**change.values, **change.kept})
            job = describe(other)
        except (ShoalError, ValueError):  # sizes that do not divide, devices that are not there
            continue
        yield Trial(change, figures, predict(figures, other, job))


def fitting(figures: Figures, describe: Describe, room: float) -> dict[str, Any]:
    """The changes after which a device needs at most `room` bytes, one upon the other: in one piece of advice, the
    first key's. Those that change results come where no others help."""
    chain: dict[str, Trial] = {}
    now, share = figures, room / figures.memory

    def is_within(figures: Figures, share: float = share) -> bool:
        return figures.peak <= share * figures.memory

    for _ in range(MOST_TRIES):
        better = [one for one in _tried(now, describe) if one.bytes > 0] or smaller(now, describe)
        better = [one for one in better if len(chain) < MOST_CHANGES or one.change.key in chain]
        if not better or (chain and is_within(now)):
            break
        enough = [one for one in better if is_within(one.after)]
        best = min(enough, key=lambda one: -one.seconds) if enough else max(better, key=lambda one: one.bytes)
        first = chain.get(best.change.key, best)  # the same key again: its last value counts
        chain[best.change.key] = Trial(best.change, first.before, best.after)
        now = best.after
    texts = [one.text() for one in chain.values()]
    if not is_within(now, share / FULL):
        needed = -(-now.peak * now.num_devices // int(share * now.memory))
        texts.append(f"a smaller model, or more devices (mesh.fsdp): some {needed} of these")
    elif not is_within(now):
        texts.append("it is tight then")
    record = next((one.record() for one in chain.values()), None) or {
        "key": "model.path", "values": {}, "bytes": 0, "seconds": 0.0, "saves": 0.0}
    return record | {"text": "; then ".join(texts)}


def _transfers(figures: Figures, tried: list[Trial]) -> list[dict[str, Any]]:
    step, found = figures.step_seconds[2], []
    for seconds, program, row in figures.transfers():
        if seconds <= NAMED * step:
            break
        left = [(_seconds_of(one.after, program, row), number) for number, one in enumerate(tried) if one.saves > 0]
        least, number = min(left, default=(seconds, 0))
        cure = ""
        if least <= LEFT * seconds:
            verb = "would remove it" if least < NAMED * seconds else f"would leave {seconds_text(least)} of it"
            cure = f"{tried[number].change.words(figures.config)} {verb}"
        found.append({"program": program, "kind": row["kind"], "axis": row["axis"], "source": row["source"],
                      "seconds": seconds, "share": seconds / step, "cure": cure})
    return found


def _seconds_of(figures: Figures, program: str, row: Mapping[str, Any]) -> float:
    """The seconds a step of one collective, or of what stands in its place."""
    same = (row["kind"], row["source"])
    return sum(seconds for seconds, name, other in figures.transfers()
               if name == program and ((other["kind"], other["source"]) == same or not other["source"]))


# ---- the keys


def changes(config: Config, job: Mapping[str, Any], change_results: bool = False) -> Iterator[Change]:
    """Other values worth a trial, those that cost least first; with `change_results` also those that change the
    run's results, last."""
    same = {"batch.prompts_per_device": 0, "batch.prompts_per_step": job["prompts"]} \
        if config.batch.prompts_per_device else {}
    each = _batch(config, job), _mesh(config, job, same), _placement(config, job, same)
    for change in (one for group in each for one in group):
        values = {key: value for key, value in change.values.items() if get_value(config, key) != value}
        if values:
            yield replace(change, values=values)
    if change_results:
        yield from other_results(config, job)


def _batch(config: Config, job: Mapping[str, Any]) -> Iterator[Change]:
    b, s = config.batch, config.sampling
    half = min(b.micro_tokens, job["shape"]["length"]) // 2  # an update may have fewer tokens than would be taken
    if half >= s.max_prompt_tokens + s.max_completion_tokens:
        yield Change({"batch.micro_tokens": half}, "weights are gathered more often")
    group = s.max_prompt_tokens + b.group_size * s.max_completion_tokens
    for more in (2 * b.micro_tokens, group):
        if more > b.micro_tokens:
            cost = "" if more < group else "a prompt is computed once for its group"
            yield Change({"batch.micro_tokens": more}, cost)
    if job["model"]["remat"] in ("attention", "full"):
        yield Change({"model.remat": "dots"}, "the backward pass keeps products and does not compute them again")
    if job["model"]["remat"] == "full":
        yield Change({"model.remat": "attention"}, "the backward pass computes only the feed-forward part again")
    else:
        yield Change({"model.remat": "full"}, "the backward pass computes products again")
    each = -(-job["slots"] // len(job["roles"]["sampler"]["devices"]))
    least = max(b.group_size, config.pass_k)
    for fewer in dict.fromkeys((each // 2, least)):
        if least <= fewer < each:
            yield Change({"sampling.slots_per_device": fewer}, "fewer completions at once")
    if job["slots"] < job["prompts"] * b.group_size:
        yield Change({"sampling.slots_per_device": 0}, "all completions of a step at once")
    if job["model"]["dtype"] == "bfloat16":
        yield Change({"optimizer.reduce_dtype": "bfloat16"}, "gradients are summed in fewer bits")


def _mesh(config: Config, job: Mapping[str, Any], same: Mapping[str, Any]) -> Iterator[Change]:
    """Other divisions of each role's devices."""
    m, mesh = config.mesh, job["roles"]["trainer"]["mesh"]
    used = {device for role in job["roles"].values() for device in role["devices"]}
    if len(used) < job["num_devices"]:
        fsdp = job["num_devices"] // (m.data * m.dcn_data * m.dcn_fsdp * m.tensor)
        named = {f"mesh.{role}": "1.0" for role in ("trainer", "sampler") if getattr(m, role)}
        yield Change({"mesh.fsdp": -1 if m.fsdp < 0 else fsdp, **named},
                     f"{job['num_devices']} devices instead of {len(used)}", same)
        return
    if m.data > 1:
        yield Change({"mesh.fsdp": -1, "mesh.data": 1}, "more devices exchange weights")
    if job["machines"] > 1 and m.dcn_data == 1:
        yield Change({"mesh.dcn_data": job["machines"], "mesh.dcn_fsdp": 1, "mesh.data": 1, "mesh.fsdp": -1},
                     "machines exchange gradients alone, and each holds the whole model")
    tensor, own = mesh.get("tensor", 1), job["roles"]["sampler"]["mesh"].get("tensor", 1)
    for other in (2 * tensor, tensor // 2):
        if other:
            kept = {} if m.sampler_tensor else {"mesh.sampler_tensor": own}
            yield Change({"mesh.tensor": other, "mesh.fsdp": -1, **kept}, "")
    for other in (2 * own, own // 2):
        if other:
            yield Change({"mesh.sampler_tensor": other}, "")


def _placement(config: Config, job: Mapping[str, Any], same: Mapping[str, Any]) -> Iterator[Change]:
    """Other devices for the roles."""
    trainer, sampler, reference = (job["roles"][name]["devices"] for name in ("trainer", "sampler", "reference"))
    count = len({*trainer, *sampler})
    if set(trainer) != set(sampler):
        yield Change({"mesh.trainer": "1.0", "mesh.sampler": "1.0", "mesh.fsdp": -1},
                     f"all {count} devices sample and train in turn", same)
        splits = (2 * len(sampler), len(sampler) // 2)
    else:
        splits = (count // 2,)
    waits = "" if oldest_samples(config) else "each waits for the other"
    for own in splits:
        if 0 < own < count:
            yield Change({"mesh.trainer": str(count - own), "mesh.sampler": str(own), "mesh.fsdp": -1}, waits,
                         same)
    if config.algorithm.kl_coef > 0 or config.teacher.path:
        for devices, whose in ((sampler, "sampler"), (trainer, "trainer")):
            if set(devices) != set(reference):
                yield Change({"mesh.reference": f"[{','.join(map(str, devices))}]"}, f"scored on the {whose}'s devices")


def other_results(config: Config, job: Mapping[str, Any]) -> Iterator[Change]:
    """Changes of what is computed or trained on."""
    if job["model"]["dtype"] == "float32":
        yield Change({"model.dtype": "bfloat16"}, "computed in fewer bits")
    if config.algorithm.kl_coef:
        yield Change({"algorithm.kl_coef": 0.0}, "without a reference")
    for key in ("batch.group_size", "sampling.max_completion_tokens", "sampling.max_prompt_tokens"):
        for part in (2, 16, 256):
            if (now := get_value(config, key)) >= part:
                slots = config.sampling.slots_per_device // part if key == "batch.group_size" else 0
                kept = {"sampling.slots_per_device": slots} if slots else {}
                yield Change({key: now // part}, "", kept, exact=False)


def plain_changes(config: Any) -> Iterator[Change]:
    """What takes less memory in any command, where its job cannot be described again; the keys that it lacks are left
    out."""
    s, keys = config.sampling, keys_of(type(config))
    tokens = s.max_prompt_tokens + s.max_completion_tokens
    halves = {"batch": (max(1, getattr(config, "pass_k", 0), getattr(config, "num_generations", 0)), 0),
              "batch.micro_tokens": (tokens, MICRO_TOKENS)}
    for key, (least, auto) in halves.items():
        if key in keys and (half := max(least, (now := get_value(config, key) or auto) // 2)) < now:
            yield Change({key: half}, "")
    if "batch.micro_tokens" in keys and config.model.remat != "full":
        yield Change({"model.remat": "full"}, "")
    for key in ("batch.group_size", "sampling.max_completion_tokens", "sampling.max_prompt_tokens"):
        if key in keys and (now := get_value(config, key)) > 1:
            yield Change({key: now // 2}, "", exact=False)
    if config.model.dtype != "bfloat16":
        yield Change({"model.dtype": "bfloat16"}, "")
