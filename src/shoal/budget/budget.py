"""The budget of a job: what its roles hold in the memory of their devices, from shapes alone, and
what its programs cost, where they were compiled or tried.

`job/memory.py` makes the budget of a job, `plan/` and `job/step_trial.py` add the costs of its
programs. What settings leave open, advice, findings and the plan's tables ask it alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from shoal.config.derived import oldest_samples
from shoal.config.train import Config
from shoal.text import gib, seconds_text
from shoal.trainer.schedule import schedule_of, step_seconds

PROGRAM_PHASES: Mapping[str, str] = {
    "embed": "sampling",
    "prefill": "sampling",
    "enter": "sampling",
    "join": "sampling",
    "decode": "sampling",
    "score": "scoring",
    "reference": "scoring",
    "teacher": "scoring",
    "accumulate": "update",
    "apply": "update",
    "publish": "publication",
}
"""Program -> the phase of a step in which it runs."""

TRAINER_PHASES = ("scoring", "update", "publication")
"""The phases that run on the trainer's devices, or wait for them."""

LARGEST: Mapping[str, str] = {
    "prefill": "sampler",
    "decode": "sampler",
    "accumulate": "trainer",
    "apply": "trainer",
}
"""The programs that need most memory, and the roles that run them."""

PLAN_FOR = 0.75
"""Share of a device's memory that a replica of the sampler and the rows of a micro-batch are chosen
to fill: before anything is compiled, and while a smaller choice costs little time."""

TIGHT = 0.9
"""Share of the memory, or of what of it is free, above which a job is tight as far as it is known
before its programs are compiled for their devices. `model.remat` is chosen by it."""

FULL = 0.97
"""Share of a device's memory above which a compiled job is tight: what the compiler cannot see (the
batch, fragments)."""

FRAGMENTS = 0.14
"""On a CPU, of all that a process holds: what its allocator may keep of freed memory for later. It
was up to 13%, of a model of 50M parameters, most of whose arrays come from the heap; 0 to 4% with
models of 1M, 8M and 135M (benchmarks/memory.py)."""


@dataclass(frozen=True)
class Item:
    """One part of what a role holds: bytes on each of the role's devices, or for each of them in
    the memory of its host."""

    part: str  # as `Adam's moments`
    role: str
    phase: str  # always, sampling or update
    bytes: int
    on_host: bool = False


@dataclass(frozen=True)
class RolePlacement:
    """The devices of a role."""

    mesh: Mapping[str, int]  # axis -> size, without axes of one device
    devices: tuple[int, ...]  # their numbers


@dataclass(frozen=True)
class ModelSize:
    """What of a model decides its cost."""

    parameters: int = 0
    layers: int = 0
    dtype: str = ""
    remat: str = ""


@dataclass(frozen=True)
class BatchSize:
    """A micro-batch on all devices of the trainer."""

    rows: int = 0
    length: int = 0
    tokens: int = 0


@dataclass(frozen=True)
class StepProgram:
    """A program of a step: the role whose devices run it, and how often in a step."""

    role: str
    runs: float = 1


@dataclass(frozen=True)
class Transfers:
    """The transfers of one kind that a line of code makes along axes of a mesh, in one run of a
    program: bytes of the whole arrays, and seconds by the links."""

    kind: str
    axis: str
    source: str
    times: float
    bytes: float
    seconds: float


@dataclass(frozen=True)
class ProgramCost:
    """What one run of a program costs on a device. A trial of a step measures `extra_bytes` and
    `code_bytes` alone."""

    program: str = ""
    layers: int = 0
    compiled_seconds: float = 0.0  # that its compilation took
    error: str = ""  # of a program that the compiler refused
    flops: float = 0.0
    floor_seconds: float = 0.0
    extra_bytes: int = 0  # besides its arguments: temporaries, and results that overwrite none
    memory: Mapping[str, int] = field(default_factory=dict)  # as the compiler reports it, by kind
    largest: Sequence[tuple[int, str, str]] = ()  # (bytes, shape, source) of temporaries
    collectives: Sequence[Transfers] = ()
    code_bytes: int = 0
    compute_seconds: float = 0.0
    transfer_seconds: float = 0.0
    launches: float = 0.0
    kernel_flops: float = 0.0
    sources: Mapping[str, float] = field(default_factory=dict)  # source -> seconds
    assumed: Sequence[str] = ()  # loops whose number of rounds was assumed
    extrapolated: Sequence[int] = ()  # the two numbers of layers that were compiled instead of all


@dataclass(frozen=True)
class DeviceRates:
    """What a planned device does, as its maker says or as it was measured: bytes and operations a
    second."""

    peak_flops: float | None  # in the type of the computation; None: not known
    link: float
    hbm: float
    kernels: float  # share of the peak rate that attention's kernels reach
    launch: float  # seconds until an operation begins
    is_tpu: bool
    calibration: Mapping[str, Any] | None


@dataclass(frozen=True)
class PlannedStep:
    """What a plan alone knows of a job: its devices as text, its hosts, the tokens of a step."""

    devices: str
    hosts: int
    refusal: str  # why it does not run as a process on each host; empty where it does
    sampled_tokens: int
    prompt_tokens: int
    model_flops: float
    published_bytes: int = 0  # copied to each of the sampler's own devices
    rates: DeviceRates | None = None  # None: devices of an unknown kind


@dataclass(frozen=True)
class Advice:
    """Keys to change, in words."""

    key: str  # the first of them
    values: Mapping[str, Any]
    text: str
    bytes: int  # that a device then needs less


@dataclass(frozen=True)
class Budget:
    """What a job takes of memory and time; of a job whose model is not made yet, its weights alone.

    >>> budget.held("trainer", "update")
    {"parameters": 3437568, "Adam's moments": 6875136, "the sampler's copy": 1718784,
     "gradient": 3437568}
    >>> budget.peak(), budget.peak("sampling"), budget.fits()
    """

    config: Config  # as resolved on the job's devices
    memory: int  # bytes of a device
    roles: Mapping[str, RolePlacement]
    items: Sequence[Item]
    num_devices: int = 0  # that there are; roles may use fewer
    machines: int = 1
    model: ModelSize = ModelSize()
    batch: BatchSize = BatchSize()
    slots: int = 0
    prompts_per_step: int = 0
    activations: int = 0  # bytes that an update is reckoned to need besides what roles hold
    programs: Mapping[str, StepProgram] = field(default_factory=dict)
    costs: Mapping[str, ProgramCost] = field(default_factory=dict)  # empty before compilation
    process_bytes: Mapping[str, int] | None = None
    """On a CPU, after a trial: part -> bytes of RAM besides arrays, of all devices together."""
    step: PlannedStep | None = None
    advice: Sequence[Advice] = ()

    # ---- memory

    def colocated_roles(self, role: str) -> list[str]:
        """The roles that use devices of this one, itself included."""
        colocated = []
        for other in self.roles:
            if other == role or self._devices_of(role) & self._devices_of(other):
                colocated.append(other)
        return colocated

    def _devices_of(self, role: str) -> set[int]:
        """Numbers of a role's devices; those of a remote sampler are no devices of this job."""
        if role == "sampler" and self.config.sampler.is_remote:
            return set()
        return set(self.roles[role].devices)

    def held(self, role: str, phase: str = "always") -> dict[str, int]:
        """What a device of a role holds in a phase, by part."""
        parts = {}
        for colocated in self.colocated_roles(role):
            for item_phase in ("always", phase):
                for item in self.items_of(colocated, item_phase):
                    parts[item.part] = item.bytes
        return parts

    def items_of(self, role: str, phase: str) -> list[Item]:
        """What a role itself adds to its devices' memory in a phase."""
        return [
            item
            for item in self.items
            if item.role == role and item.phase == phase and not item.on_host
        ]

    def on_host(self) -> dict[str, int]:
        """What the host holds for each device, by part."""
        return {item.part: item.bytes for item in self.items if item.on_host}

    def needed(self, program: str) -> dict[str, int]:
        """Part -> bytes on a device while a program runs."""
        role = self.programs[program].role
        parts = self.held(role, held_phase(program))
        cost = self.costs.get(program, ProgramCost())
        extra = cost.extra_bytes
        if program == "publish" and extra and not self.samples_apart:
            # Its output is a part of the sampler's copy, which is counted.
            extra -= cost.memory.get("output", 0)
        if program == "accumulate":
            parts["activations"] = extra
        else:
            parts["temporaries"] = extra
        code_bytes = self._code_bytes(role)
        if code_bytes:
            parts["compiled programs"] = code_bytes
        if self.process_bytes is not None:  # devices of a CPU share the RAM with what runs on them
            sharing = len(self.roles["trainer"].devices)
            for part, size in self.process_bytes.items():
                if size:
                    parts[part] = -(-size // sharing)
            parts["freed memory that is not returned"] = round(FRAGMENTS * sum(parts.values()))
        return parts

    def _code_bytes(self, role: str) -> int:
        """Bytes of the compiled programs that devices of a role run."""
        roles = self.colocated_roles(role)
        total = 0
        for name, program in self.programs.items():
            if program.role in roles and name in self.costs:
                total += self.costs[name].code_bytes
        return total

    def needed_bytes(self, program: str) -> int:
        return sum(self.needed(program).values())

    @property
    def fullest(self) -> str:
        """The program that runs when a device needs most."""
        return max(self.programs, key=self.needed_bytes)

    def peak(self, phase: str = "") -> int:
        """The most that a device needs; with a `phase`, sampling or update, in it."""
        if not phase:
            return self.needed_bytes(self.fullest)
        return max(
            self.needed_bytes(program) for program in self.programs if held_phase(program) == phase
        )

    def fits(self, share: float = 1.0) -> bool:
        """True where a device needs at most a share of its memory, and every program compiled."""
        return self.peak() <= share * self.memory and (self.is_compiled or not self.costs)

    @property
    def is_compiled(self) -> bool:
        return bool(self.costs) and not any(cost.error for cost in self.costs.values())

    def estimated(self) -> Budget:
        """Before anything is compiled: what is held, and what an update is reckoned to take
        besides. Its time is not known."""
        step = self.step
        if step is not None and step.rates is not None:
            step = replace(step, rates=replace(step.rates, peak_flops=None))
        update = ProgramCost(extra_bytes=self.activations)
        return replace(self, step=step, costs={"accumulate": update}, advice=())

    def with_scaled_costs(self, changed: Budget) -> Budget:
        """The budget of a changed job with the memory that this one's programs need besides. What
        sampling needs grows as its caches, what an update needs as the activations that the budget
        reckons with."""
        costs = {}
        for name, cost in self.costs.items():
            if name in changed.programs:
                extra = cost.extra_bytes * changed._work(name) / self._work(name)
                costs[name] = ProgramCost(extra_bytes=round(extra), code_bytes=cost.code_bytes)
        return replace(changed, costs=costs, process_bytes=self.process_bytes)

    def _work(self, program: str) -> int:
        """What the memory of a program besides what roles hold is proportional to."""
        if program == "accumulate":
            return max(1, self.activations)
        if PROGRAM_PHASES[program] == "sampling":
            return max(1, sum(item.bytes for item in self.items_of("sampler", "sampling")))
        return 1

    # ---- time

    @property
    def peak_flops(self) -> float | None:
        """Operations a second of a device at its peak; None where they are not known."""
        if self.step is None or self.step.rates is None:
            return None
        return self.step.rates.peak_flops

    @property
    def is_timed(self) -> bool:
        """False where the devices are unknown, or a program was not compiled."""
        return self.peak_flops is not None and self.is_compiled

    def seconds(self, program: str) -> tuple[float, float, float]:
        """(floor, with transfers wholly hidden, with none hidden) of all its runs in a step."""
        cost = self.costs[program]
        runs = self.programs[program].runs
        compute = runs * cost.compute_seconds
        transfer = runs * cost.transfer_seconds
        if program == "publish":
            transfer += self._publication_seconds()
        return runs * cost.floor_seconds, max(compute, transfer), compute + transfer

    def _publication_seconds(self) -> float:
        """Seconds a step to copy weights to the sampler's own devices, which no program does."""
        step = self.step
        if step is None or step.rates is None or not step.published_bytes:
            return 0.0
        return step.published_bytes / step.rates.link / self.config.train.weight_sync_interval

    @property
    def step_seconds(self) -> tuple[float, float, float]:
        """Of a step in a long run: sampling and training overlap where the schedule and the devices
        let them."""
        sampler = []
        trainer = []
        scores_on_sampler = self.samples_apart and "reference" in self.colocated_roles("sampler")
        for program in self.costs:
            seconds = self.seconds(program)
            phase = PROGRAM_PHASES[program]
            if phase == "sampling":
                sampler.append(seconds)
            if phase in TRAINER_PHASES:
                trainer.append(seconds)
        if scores_on_sampler:  # they take the sampler's time too
            for program in ("reference", "teacher"):
                if program in self.costs:
                    sampler.append(self.seconds(program))
        schedule = schedule_of(self.config.train)
        floor, hidden, none_hidden = (
            step_seconds(
                schedule,
                sum(seconds[bound] for seconds in sampler),
                sum(seconds[bound] for seconds in trainer),
                self.samples_apart,
            )
            for bound in range(3)
        )
        return floor, hidden, none_hidden

    @property
    def overlaps(self) -> bool:
        """True where sampling and training go on at the same time."""
        return self.samples_apart and oldest_samples(self.config) > 0

    @property
    def samples_apart(self) -> bool:
        """True where the sampler has devices of its own."""
        return "trainer" not in self.colocated_roles("sampler")

    def phase_seconds(self) -> dict[str, tuple[float, float, float]]:
        """Phase -> `seconds` of all its programs."""
        phases: dict[str, tuple[float, float, float]] = {}
        for program in self.costs:
            phase = PROGRAM_PHASES[program]
            floor, hidden, none_hidden = phases.get(phase, (0.0, 0.0, 0.0))
            more = self.seconds(program)
            phases[phase] = (floor + more[0], hidden + more[1], none_hidden + more[2])
        return phases

    @property
    def num_used_devices(self) -> int:
        """Devices that have a role."""
        used: set[int] = set()
        for placement in self.roles.values():
            used.update(placement.devices)
        return len(used)

    def mfu(self, seconds: float) -> float:
        """Model FLOPs utilisation of a step that takes so many seconds; of a timed job alone."""
        assert self.step is not None and self.peak_flops is not None
        return self.step.model_flops / (self.peak_flops * self.num_used_devices * seconds)

    def transfers(self) -> list[tuple[float, str, Transfers]]:
        """(seconds a step, program, transfers), the longest first."""
        rows = []
        for program, cost in self.costs.items():
            for transfers in cost.collectives:
                rows.append((self.programs[program].runs * transfers.seconds, program, transfers))
        return sorted(rows, key=lambda row: -row[0])


def held_phase(program: str) -> str:
    """The phase in which roles hold more than always while a program runs."""
    phase = PROGRAM_PHASES[program]
    if phase in ("sampling", "update"):
        return phase
    return "always"


# ---- in words


def parts_text(budget: Budget) -> str:
    """What a device needs at its fullest, by part, the largest first."""
    parts = sorted(budget.needed(budget.fullest).items(), key=lambda part: -part[1])
    text = sizes_text(parts)
    on_host = host_text(budget)
    if on_host:
        text += f"; for each device in the host's memory {on_host}"
    return text


def host_text(budget: Budget) -> str:
    """What the host holds for each device, by part."""
    return sizes_text(list(budget.on_host().items()))


def sizes_text(parts: Sequence[tuple[str, int]]) -> str:
    return ", ".join(f"{part} {gib(size)}" for part, size in parts if size)


def verdict(budget: Budget) -> str:
    """The last line: fits or not, the seconds of a step, the key."""
    leaves_free = budget.fits(FULL)
    if not budget.fits():
        text = "does not fit"
    elif leaves_free:
        text = "fits"
    else:
        text = "fits, but is tight"
    text += (
        f": {gib(budget.peak())} of {gib(budget.memory)} a device in "
        f"{PROGRAM_PHASES[budget.fullest]} ({budget.fullest})"
    )
    if not budget.costs:
        text += f", before anything is compiled ({parts_text(budget)})"
    if budget.is_timed:
        _, low, high = budget.step_seconds
        seconds = seconds_text(low)
        if seconds_text(high) != seconds:
            seconds += f" to {seconds_text(high)}"
        tokens = budget.config.sampling.max_completion_tokens
        text += f"; a step with completions of {tokens:,} tokens takes about {seconds}"
    if not budget.advice:
        return text
    advice = budget.advice[0].text
    if leaves_free:
        return f"{text}. Faster with {advice}"
    return f"{text}. {advice}"
