"""From the costs of its programs to the figures of a job: memory by phase, seconds of a step, the key to change."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from shoal.config.schema import Config
from shoal.report.findings import gib, seconds_text
from shoal.run.loading import activation_bytes
from shoal.run.plan.job import planned_architecture
from shoal.run.preflight.estimate import DOTS_GAIN, LEAST_GAIN
from shoal.run.preflight.memory import MemoryBudget, suggest_saving

PHASES: Mapping[str, tuple[str, str]] = {
    "prefill": ("sampling", "sampling"), "decode": ("sampling", "sampling"), "score": ("scoring", "always"),
    "reference": ("scoring", "always"), "teacher": ("scoring", "always"),
    "accumulate": ("update", "update"), "apply": ("update", "update"), "publish": ("publication", "always")}
"""Program -> the phase of a step in which it runs, and what roles hold then besides what they always hold."""

FULL = 0.97
"""Share of a device's memory above which a job is tight: what the compiler cannot see (the batch, fragments)."""


@dataclass(frozen=True)
class Figures:
    """A job's description and its programs' costs, both as `worker` gives them."""

    config: Config  # as resolved on the topology's devices
    job: Mapping[str, Any]
    programs: Mapping[str, Mapping[str, Any]]  # empty where the job was found impossible before compiling

    # ---- memory

    @property
    def memory(self) -> int:
        return self.job["memory_bytes"]

    def shared_roles(self, role: str) -> list[str]:
        """The roles that use devices of this one, itself included."""
        mine = set(self.job["roles"][role]["devices"])
        return [name for name, one in self.job["roles"].items() if mine & set(one["devices"])]

    def held(self, role: str, when: str) -> dict[str, int]:
        """Kind -> bytes that a device of a role holds: always, and in `sampling` or `update`."""
        found: dict[str, int] = {}
        for name in self.shared_roles(role):
            held = self.job["held"][name]
            found |= held["always"] | (held[when] if when != "always" else {})
        return found

    def needed(self, program: str) -> dict[str, int]:
        """Kind -> bytes on a device while a program runs."""
        held = self.held(self.job["programs"][program]["role"], PHASES[program][1])
        extra = self.programs[program]["extra_bytes"] if program in self.programs else 0
        if program == "publish" and "sampler" in self.shared_roles("trainer") and extra:
            extra -= self.programs[program]["memory"].get("output", 0)  # a part of the copy, which is counted
        name = "activations" if program == "accumulate" else "temporaries"
        return {**held, name: extra}

    @property
    def fullest(self) -> str:
        """The program that runs when a device needs most."""
        return max(self.job["programs"], key=lambda name: sum(self.needed(name).values()))

    @property
    def peak(self) -> int:
        return sum(self.needed(self.fullest).values())

    @property
    def fits(self) -> bool:
        return self.peak <= self.memory and not any(one["error"] for one in self.programs.values())

    def budget(self) -> MemoryBudget:
        """What the fullest device needs, with the parts that SAVINGS name."""
        role = self.job["programs"][self.fullest]["role"]
        found = MemoryBudget(self.held(role, "always"))
        needed, always = self.needed(self.fullest), self.held(role, "always")
        rest = {kind if kind != "temporaries" or self.fullest in ("accumulate", "apply") else "sampler's temporaries":
                size for kind, size in needed.items() if kind not in always}
        (found.sampling if PHASES[self.fullest][0] == "sampling" else found.update).update(rest)
        return found

    # ---- time

    @property
    def is_timed(self) -> bool:
        """False where the devices are unknown, or a program was not compiled."""
        compiled = bool(self.programs) and not any(one["error"] for one in self.programs.values())
        return self.job["peak_flops"] is not None and compiled

    def seconds(self, program: str) -> tuple[float, float, float]:
        """(floor, with transfers wholly hidden, with none hidden) of all its runs in a step."""
        one, runs = self.programs[program], self.job["programs"][program]["runs"]
        compute, transfer = runs * one["compute_seconds"], runs * one["transfer_seconds"]
        if program == "publish" and self.job["published_bytes"]:  # to other devices: no program of theirs
            transfer += self.job["published_bytes"] / self.job["link"] / self.config.train.weight_sync_interval
        return runs * one["floor_seconds"], max(compute, transfer), compute + transfer

    @property
    def step_seconds(self) -> tuple[float, float, float]:
        each = [self.seconds(program) for program in self.programs]
        return tuple(map(sum, zip(*each, strict=True)))  # type: ignore[return-value]

    def phase_seconds(self) -> dict[str, tuple[float, float, float]]:
        found: dict[str, tuple[float, float, float]] = {}
        for program in self.programs:
            phase = PHASES[program][0]
            before = found.get(phase, (0.0, 0.0, 0.0))
            found[phase] = tuple(a + b for a, b in zip(before, self.seconds(program), strict=True))  # type: ignore[assignment]
        return found

    @property
    def num_devices(self) -> int:
        return len({device for role in self.job["roles"].values() for device in role["devices"]})

    def mfu(self, seconds: float) -> float:
        return self.job["model_flops"] / (self.job["peak_flops"] * self.num_devices * seconds)

    def transfers(self) -> list[tuple[float, str, Mapping[str, Any]]]:
        """(seconds a step, program, row) of every collective, the longest first."""
        found = [(self.job["programs"][name]["runs"] * row["seconds"], name, row)
                 for name, one in self.programs.items() for row in one["collectives"]]
        return sorted(found, key=lambda item: -item[0])

    # ---- the key to change

    def advice(self) -> list[dict[str, Any]]:
        """Keys whose change would make the job fit, or save LEAST_GAIN of a step: the text, the key, the share."""
        if not self.fits:
            text, key = suggest_saving(self.config, self.budget(), self.peak - self.memory, self.job["num_devices"])
            return [{"key": key, "text": text, "saves": 0.0}]
        if not self.is_timed:
            return []
        found = [one for one in self._faster() if one["saves"] >= LEAST_GAIN]
        return sorted(found, key=lambda one: -one["saves"])

    def _faster(self) -> Iterator[dict[str, Any]]:
        low, high = self.step_seconds[1:]
        step, free = (low + high) / 2, FULL * self.memory - sum(self.needed("accumulate").values())
        c, update = self.config, self.programs["accumulate"]
        runs, phases = self.job["programs"]["accumulate"]["runs"], self.phase_seconds()
        updates = c.algorithm.num_epochs * c.algorithm.num_minibatches
        if runs > updates and free > update["extra_bytes"]:
            # Weights are gathered and gradients reduced once a micro-batch, however long it is.
            saved = runs / 2 * update["transfer_seconds"] / 2
            yield _advice("batch.micro_tokens", 2 * c.batch.micro_tokens, c.batch.micro_tokens, saved / step,
                          f"{gib(update['extra_bytes'])} more, half as many gathers of weights")
        more = activation_bytes_of(self.job, c)
        if c.model.remat == "full" and free > more:
            yield _advice("model.remat", "dots", "full", DOTS_GAIN * phases["update"][1] / step,
                          f"{gib(more)} more, products are not computed again")
        completions = self.job["prompts"] * c.batch.group_size
        caches = sum(size for kind, size in self.held("sampler", "sampling").items() if kind.startswith("KV caches"))
        sampling_free = FULL * self.memory - sum(self.needed("decode").values())
        if self.job["slots"] < completions and sampling_free > caches * (completions / self.job["slots"] - 1):
            share = (1 - self.job["slots"] / completions) * phases["sampling"][1] / step
            yield _advice("sampling.slots_per_device", 0, c.sampling.slots_per_device, share / 2,
                          f"all {completions} completions of a step at once instead of {self.job['slots']}")
        used, there = self.num_devices, self.job["num_devices"]
        if used < there:
            yield _advice("mesh.fsdp", -1, c.mesh.fsdp, 1 - used / there, f"{there} devices instead of {used}")


def activation_bytes_of(job: Mapping[str, Any], config: Config) -> int:
    """Bytes that model.remat=dots stores on a device for a micro-batch."""
    mesh = job["roles"]["trainer"]["mesh"]
    shards = mesh.get("data", 1) * mesh.get("fsdp", 1)
    return activation_bytes(planned_architecture(config.model), job["shape"]["tokens"] // shards,
                            job["model"]["dtype"]) // mesh.get("tensor", 1)


def _advice(key: str, new: Any, now: Any, saves: float, what: str) -> dict[str, Any]:
    return {"key": key, "saves": saves,
            "text": f"{key}={new} (now {now}): {what}; saves about {100 * saves:.0f}% of a step"}


def resolved(config: Config, job: Mapping[str, Any]) -> Config:
    """The configuration with what `auto` became on the topology's devices."""
    return replace(config, model=replace(config.model, remat=job["model"]["remat"], dtype=job["model"]["dtype"]))


def verdict(figures: Figures) -> str:
    """The last line: fits or not, the seconds of a step, the key."""
    used = f"{gib(figures.peak)} of {gib(figures.memory)} a device in {PHASES[figures.fullest][0]} ({figures.fullest})"
    advice = figures.advice()
    text = "does not fit" if not figures.fits else "fits" if figures.peak <= FULL * figures.memory else \
        "fits, but is tight"
    text += f": {used}"
    if figures.is_timed:
        _, low, high = figures.step_seconds
        shown = dict.fromkeys((seconds_text(low), seconds_text(high)))
        text += f"; a step takes about {' to '.join(shown)}"
    return f"{text}. {advice[0]['text']}" if advice else text
