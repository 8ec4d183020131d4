"""A job in figures: what its roles hold, from shapes alone, and what its programs cost, where they
were compiled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from shoal.budget.memory import Sizes
from shoal.config.derived import oldest_samples
from shoal.config.train import Config
from shoal.text import gib, seconds_text
from shoal.trainer.schedule import schedule_of, step_seconds

PHASES: Mapping[str, tuple[str, str]] = {
    **dict.fromkeys(("embed", "prefill", "enter", "join", "decode"), ("sampling", "sampling")),
    "score": ("scoring", "always"),
    "reference": ("scoring", "always"),
    "teacher": ("scoring", "always"),
    "accumulate": ("update", "update"),
    "apply": ("update", "update"),
    "publish": ("publication", "always"),
}
"""Program -> the phase of a step in which it runs, and what roles hold then besides what they
always hold."""


LARGEST: Mapping[str, str] = {
    "prefill": "sampler",
    "decode": "sampler",
    "accumulate": "trainer",
    "apply": "trainer",
}
"""The programs that need most memory, and the roles that run them."""


FULL = 0.97
"""Share of a device's memory above which a job is tight: what the compiler cannot see (the batch,
fragments)."""


FRAGMENTS = 0.14
"""On a CPU, of all that a process holds: what its allocator may keep of freed memory for later. It
was up to 13%, of a model of 50M parameters, most of whose arrays come from the heap; 0 to 4% with
models of 1M, 8M and 135M (benchmarks/memory.py)."""


@dataclass(frozen=True)
class Budget:
    """A job's outline and its programs' costs: a plan's compilers say them, or a trial of `shoal
    doctor`."""

    config: Config  # as resolved on the job's devices
    job: Mapping[str, Any]
    programs: Mapping[str, Mapping[str, Any]]  # empty before anything is compiled
    advice: Sequence[Mapping[str, Any]] = ()  # the keys to change, as `advise` gives them

    # ---- memory

    @property
    def memory(self) -> int:
        return self.job["memory_bytes"]

    @cached_property
    def sizes(self) -> Sizes:
        """What roles hold."""
        devices = {name: one["devices"] for name, one in self.job["roles"].items()}
        return Sizes.of(self.config, self.job["held"], devices)

    def needed(self, program: str) -> dict[str, int]:
        """Part -> bytes on a device while a program runs."""
        held = self.sizes.on(self.job["programs"][program]["role"], PHASES[program][1])
        extra = self.programs[program]["extra_bytes"] if program in self.programs else 0
        if program == "publish" and "sampler" in self.sizes.colocated_roles("trainer") and extra:
            extra -= self.programs[program]["memory"].get(
                "output", 0
            )  # a part of the copy, which is counted
        name = "activations" if program == "accumulate" else "temporaries"
        roles = self.sizes.colocated_roles(self.job["programs"][program]["role"])
        code = sum(
            self.programs[other].get("code_bytes", 0)
            for other, one in self.job["programs"].items()
            if other in self.programs and one["role"] in roles
        )
        found = {**held, name: extra} | ({"compiled programs": code} if code else {})
        if "processes" in self.job:  # on a CPU, whose devices share the RAM with what runs on them
            sharing = len(self.job["roles"]["trainer"]["devices"])
            found |= {
                part: -(-size // sharing) for part, size in self.job["processes"].items() if size
            }
            found["freed memory that is not returned"] = round(FRAGMENTS * sum(found.values()))
        return found

    @property
    def fullest(self) -> str:
        """The program that runs when a device needs most."""
        return max(self.job["programs"], key=lambda name: sum(self.needed(name).values()))

    @property
    def peak(self) -> int:
        return sum(self.needed(self.fullest).values())

    def phase_bytes(self) -> dict[str, int]:
        """The most that a device needs while sampling, and while updating."""
        needed = [
            (PHASES[name][1], sum(self.needed(name).values())) for name in self.job["programs"]
        ]
        return {
            phase: max(size for other, size in needed if other == phase)
            for phase in ("sampling", "update")
        }

    @cached_property
    def estimated(self) -> Budget:
        """Before anything is compiled: what is held, and what an update is reckoned to take
        besides."""
        update = {"error": "", "memory": {}, "extra_bytes": self.job["activations"]}
        return Budget(self.config, {**self.job, "peak_flops": None}, {"accumulate": update})

    @property
    def is_compiled(self) -> bool:
        return bool(self.programs) and not any(one["error"] for one in self.programs.values())

    @property
    def fits(self) -> bool:
        return self.peak <= self.memory and (self.is_compiled or not self.programs)

    def changed(self, config: Config, job: Mapping[str, Any]) -> Budget:
        """The memory of a changed job. What sampling needs besides grows as its caches, what an
        update needs as the activations that the table reckons with."""

        def work(name: str, job: Mapping[str, Any]) -> float:
            caches = (
                sum(job["held"]["sampler"]["sampling"].values())
                if PHASES[name][0] == "sampling"
                else 1
            )
            return max(1, job["activations"] if name == "accumulate" else caches)

        def extra(name: str, one: Mapping[str, Any]) -> int:
            return round(one["extra_bytes"] * work(name, job) / work(name, self.job))

        if "processes" in self.job:
            job = {**job, "processes": self.job["processes"]}
        return Budget(
            config,
            job,
            {
                name: {
                    "error": "",
                    "memory": {},
                    "extra_bytes": extra(name, one),
                    "code_bytes": one.get("code_bytes", 0),
                }
                for name, one in self.programs.items()
                if name in job["programs"]
            },
        )

    # ---- time

    @property
    def is_timed(self) -> bool:
        """False where the devices are unknown, or a program was not compiled."""
        return self.job["peak_flops"] is not None and self.is_compiled

    def seconds(self, program: str) -> tuple[float, float, float]:
        """(floor, with transfers wholly hidden, with none hidden) of all its runs in a step."""
        one, runs = self.programs[program], self.job["programs"][program]["runs"]
        compute, transfer = runs * one["compute_seconds"], runs * one["transfer_seconds"]
        if (
            program == "publish" and self.job["published_bytes"]
        ):  # to other devices: no program of theirs
            transfer += (
                self.job["published_bytes"]
                / self.job["link"]
                / self.config.train.weight_sync_interval
            )
        return runs * one["floor_seconds"], max(compute, transfer), compute + transfer

    @property
    def step_seconds(self) -> tuple[float, float, float]:
        """Of a step in a long run: sampling and training overlap where the schedule and the devices
        let them."""
        sampler, trainer = (
            [self.seconds(name) for name in self.programs if PHASES[name][0] in phases]
            for phases in (("sampling",), ("scoring", "update", "publication"))
        )
        if "reference" in self.sizes.colocated_roles("sampler") and self.samples_apart:
            sampler += [
                self.seconds(name) for name in ("reference", "teacher") if name in self.programs
            ]
        floor, hidden, none = (
            step_seconds(
                schedule_of(self.config.train),
                sum(one[bound] for one in sampler),
                sum(one[bound] for one in trainer),
                self.samples_apart,
            )
            for bound in range(3)
        )
        return floor, hidden, none

    @property
    def overlaps(self) -> bool:
        """True where sampling and training go on at the same time."""
        return self.samples_apart and oldest_samples(self.config) > 0

    @property
    def samples_apart(self) -> bool:
        """True where the sampler has devices of its own."""
        return "trainer" not in self.sizes.colocated_roles("sampler")

    def phase_seconds(self) -> dict[str, tuple[float, ...]]:
        found: dict[str, tuple[float, ...]] = {}
        for program in self.programs:
            phase = PHASES[program][0]
            found[phase] = tuple(
                map(sum, zip(found.get(phase, (0.0,) * 3), self.seconds(program), strict=True))
            )
        return found

    @property
    def num_devices(self) -> int:
        return len({device for role in self.job["roles"].values() for device in role["devices"]})

    def mfu(self, seconds: float) -> float:
        return self.job["model_flops"] / (self.job["peak_flops"] * self.num_devices * seconds)

    def transfers(self) -> list[tuple[float, str, Mapping[str, Any]]]:
        """(seconds a step, program, row) of every collective, the longest first."""
        found = [
            (self.job["programs"][name]["runs"] * row["seconds"], name, row)
            for name, one in self.programs.items()
            for row in one["collectives"]
        ]
        return sorted(found, key=lambda item: -item[0])


def parts_text(figures: Budget) -> str:
    """What a device needs at its fullest, by kind, the largest first."""
    parts = sorted(figures.needed(figures.fullest).items(), key=lambda part: -part[1])
    return ", ".join(f"{kind} {gib(size)}" for kind, size in parts if size) + (
        f"; for each device in the host's memory {host}" if (host := host_text(figures)) else ""
    )


def host_text(figures: Budget) -> str:
    """What the host holds for each device, by kind."""
    return ", ".join(
        f"{kind} {gib(size)}" for kind, size in figures.job.get("host", {}).items() if size
    )


def verdict(figures: Budget) -> str:
    """The last line: fits or not, the seconds of a step, the key."""
    used = (
        f"{gib(figures.peak)} of {gib(figures.memory)} a device in {PHASES[figures.fullest][0]} "
        f"({figures.fullest})"
    )
    text = (
        "does not fit"
        if not figures.fits
        else "fits"
        if figures.peak <= FULL * figures.memory
        else "fits, but is tight"
    )
    text += f": {used}"
    if not figures.programs:
        text += f", before anything is compiled ({parts_text(figures)})"
    if figures.is_timed:
        _, low, high = figures.step_seconds
        shown = dict.fromkeys((seconds_text(low), seconds_text(high)))
        tokens = figures.config.sampling.max_completion_tokens
        text += f"; a step with completions of {tokens:,} tokens takes about {' to '.join(shown)}"
    is_free = figures.fits and figures.peak <= FULL * figures.memory
    return (
        f"{text}. {'Faster with ' * is_free}{figures.advice[0]['text']}" if figures.advice else text
    )
