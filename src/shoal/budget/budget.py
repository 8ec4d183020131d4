"""The budget of a job: the bytes that its roles hold on their devices, from shapes alone, and what
its programs cost once they have been compiled or tried.

`job/memory.py` makes the budget of a job; `plan/` and `job/step_trial.py` add the costs of its
programs. Decisions about open settings, advice, findings and the plan's tables all read this one
object.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from shoal.config.derived import oldest_samples, price_per_hour
from shoal.config.train import Config
from shoal.text import count, gib, number_text, seconds_text
from shoal.trainer.schedule import schedule_of, step_seconds

_PHASES: Mapping[str, str] = {
    "embed": "sampling",
    "prefill": "sampling",
    "begin": "sampling",
    "join": "sampling",
    "decode": "sampling",
    "score": "scoring",
    "reference": "scoring",
    "teacher": "scoring",
    "accumulate": "update",
    "apply": "update",
    "publish": "publication",
}
"""Program -> the phase of a step in which it runs, see `phase_of`."""

TRAINER_PHASES = ("scoring", "update", "publication")
"""The phases of a step that run on the trainer's devices, or wait for these."""

LARGEST: Mapping[str, str] = {
    "prefill": "sampler",
    "decode": "sampler",
    "accumulate": "trainer",
    "apply": "trainer",
}
"""The programs that need most memory -> the role that runs each."""

PLAN_FOR = 0.75
"""Share of a device's memory that decisions about the sampler's replicas and the rows of
micro-batches aim to fill. It is low, because these decisions are made before anything is compiled,
and a smaller choice costs little time."""

TIGHT = 0.9
"""Share of a device's memory, or of its free memory, above which a job counts as tight before its
programs are compiled. `model.remat` is chosen by it."""

FULL = 0.97
"""Share of a device's memory above which a compiled job counts as tight: the rest is for what the
compiler cannot see (the batch, fragments)."""

FRAGMENTS = 0.14
"""Freed memory that the allocator of a process on a CPU may keep for later, as a share of all that
the process holds. It was up to 13%, of a model of 50M parameters, most of whose arrays come from
the heap; 0 to 4% with models of 1M, 8M and 135M (benchmarks/memory.py)."""


@dataclass(frozen=True)
class Item:
    """One part of what a role holds, with its bytes on each of the role's devices; with `on_host`,
    the bytes in the host's memory for each of these devices."""

    part: str  # like `Adam's moments`
    role: str
    phase: str  # always, sampling or update
    bytes: int
    on_host: bool = False


@dataclass(frozen=True)
class RolePlacement:
    """The devices that a role uses, and the axes of its mesh."""

    mesh: Mapping[str, int]  # axis -> size, without axes of one device
    devices: tuple[int, ...]  # JAX's ids


@dataclass(frozen=True)
class ModelSize:
    """The facts about a model that decide what it costs."""

    parameters: int = 0
    layers: int = 0
    dtype: str = ""
    remat: str = ""
    active: int = 0  # parameters that take part in one token's computation

    def text(self) -> str:
        """Returns a text like `7.62e9 parameters`, with experts `30.53e9 parameters (3.35e9 for a
        token)`."""
        text = f"{_short_number(self.parameters)} parameters"
        if self.active < self.parameters:
            text += f" ({_short_number(self.active)} for a token)"
        return text


def _short_number(parameters: int) -> str:
    """Returns a number of parameters as text, above 1e8 like `7.62e9`."""
    if parameters > 1e8:
        return f"{parameters / 1e9:.2f}e9"
    return f"{parameters:,}"


@dataclass(frozen=True)
class BatchSize:
    """The shape of a micro-batch over all devices of the trainer: `rows` of `length` tokens,
    `tokens` in all."""

    rows: int = 0
    length: int = 0
    tokens: int = 0


@dataclass(frozen=True)
class StepProgram:
    """A program of a step: the role on whose devices it runs, and how often it runs in a step."""

    role: str
    runs: float = 1


@dataclass(frozen=True)
class Transfers:
    """The transfers between devices of one kind (like all-gather), along some axes of a mesh, that
    one line of source code makes in one run of a program. `bytes`: of the whole arrays; `seconds`:
    by the speed of the links; `times`: how many transfers."""

    kind: str
    axis: str
    source: str
    times: float
    bytes: float
    seconds: float


@dataclass(frozen=True)
class ProgramCost:
    """What one run of a program costs on a device. A plan fills all fields; a trial of a step
    measures only `extra_bytes` and `code_bytes`."""

    program: str = ""
    layers: int = 0
    compiled_seconds: float = 0.0  # how long its compilation took
    error: str = ""  # why the compiler refused the program; empty if it did not
    flops: float = 0.0
    floor_seconds: float = 0.0  # the least that is possible
    # bytes besides the arguments: temporaries, and results that do not overwrite an argument
    extra_bytes: int = 0
    # kind -> bytes that the compiler reports
    memory: Mapping[str, int] = field(default_factory=dict)
    largest: Sequence[tuple[int, str, str]] = ()  # largest temporaries: (bytes, shape, source)
    collectives: Sequence[Transfers] = ()
    code_bytes: int = 0
    compute_seconds: float = 0.0
    transfer_seconds: float = 0.0
    launches: float = 0.0
    kernel_flops: float = 0.0
    sources: Mapping[str, float] = field(default_factory=dict)  # source -> seconds
    assumed: Sequence[str] = ()  # loops whose number of rounds the plan assumed
    extrapolated: Sequence[int] = ()  # the two numbers of layers that were compiled instead of all


@dataclass(frozen=True)
class DeviceRates:
    """The speeds that a plan assumes of a device, measured or as its maker says: operations and
    bytes a second."""

    peak_flops: float | None  # in the type of the computation; None: not known
    link: float  # bytes a second between devices
    hbm: float  # bytes a second of a device's memory
    kernels: float  # share of the peak rate that attention's kernels reach
    launch: float  # seconds until an operation begins
    is_tpu: bool
    calibration: Mapping[str, Any] | None


@dataclass(frozen=True)
class PlannedStep:
    """What only a plan knows of a job: a text that describes its devices, the number of hosts, the
    tokens of a step."""

    devices: str
    hosts: int
    refusal: str  # why the job cannot run as one process on each host; empty if it can
    sampled_tokens: int
    prompt_tokens: int
    model_flops: float
    published_bytes: int = 0  # copied to each of the sampler's own devices
    rates: DeviceRates | None = None  # None if the kind of device is unknown


@dataclass(frozen=True)
class Advice:
    """Keys to change, with a text for the user that says what the change does."""

    key: str  # the key that the advice is about, the first of `values`
    values: Mapping[str, Any]
    text: str
    bytes: int  # how much less a device then needs; negative if more


@dataclass(frozen=True)
class Budget:
    """What a job needs in memory and time. If its model has not been made yet, only its weights are
    counted.

    >>> budget.held("trainer", "update")
    {"parameters": 3437568, "Adam's moments": 6875136, "the sampler's copy": 1718784,
     "gradient": 3437568}
    >>> budget.peak(), budget.peak("sampling"), budget.fits()
    """

    config: Config  # with open keys decided for the job's devices
    memory: int  # bytes of a device
    roles: Mapping[str, RolePlacement]
    items: Sequence[Item]
    num_devices: int = 0  # devices of the job; roles may use fewer
    machines: int = 1
    model: ModelSize = ModelSize()
    batch: BatchSize = BatchSize()
    slots: int = 0
    prompts_per_step: int = 0
    activations: int = 0  # estimated bytes that an update needs besides what roles hold
    programs: Mapping[str, StepProgram] = field(default_factory=dict)
    costs: Mapping[str, ProgramCost] = field(default_factory=dict)  # empty before compilation
    process_bytes: Mapping[str, int] | None = None
    """Part -> bytes of RAM besides arrays, of all devices together. None unless a step was tried on
    a CPU."""
    step: PlannedStep | None = None
    advice: Sequence[Advice] = ()

    # ---- memory

    def colocated_roles(self, role: str) -> list[str]:
        """Returns the names of the roles that share a device with `role`, which is among them, in
        the order of `roles`. A remote sampler shares no device."""
        colocated = []
        for other in self.roles:
            if other == role or self._devices_of(role) & self._devices_of(other):
                colocated.append(other)
        return colocated

    def _devices_of(self, role: str) -> set[int]:
        """Returns the numbers of the devices that a role uses; none for a remote sampler, whose
        devices do not belong to this job."""
        if role == "sampler" and self.config.sampler.is_remote:
            return set()
        return set(self.roles[role].devices)

    def held(self, role: str, phase: str = "always") -> dict[str, int]:
        """Returns part -> bytes that a device of `role` holds, for this role and for the roles that
        share the device, without what programs need while they run. `phase`: `always`, for what is
        held all the time; `sampling` or `update`, for that and what is held only in this phase."""
        parts = {}
        for colocated in self.colocated_roles(role):
            for item_phase in ("always", phase):
                for item in self.items_of(colocated, item_phase):
                    parts[item.part] = item.bytes
        return parts

    def items_of(self, role: str, phase: str) -> list[Item]:
        """Returns the items of one role on its devices in exactly this phase: for `sampling` or
        `update`, without those that are held `always`. Roles that share the devices are not
        counted. Items in the host's memory are left out."""
        return [
            item
            for item in self.items
            if item.role == role and item.phase == phase and not item.on_host
        ]

    def on_host(self) -> dict[str, int]:
        """Returns part -> bytes that the host's memory holds for each device."""
        return {item.part: item.bytes for item in self.items if item.on_host}

    def needed(self, program: str) -> dict[str, int]:
        """Returns part -> bytes that a device needs while a program runs: what roles hold in its
        phase, what the program itself takes (`activations` of accumulate, `temporaries` of others;
        0 without a cost), and compiled code. If a step was tried on a CPU (`process_bytes`), also
        each device's share of the memory that the process takes besides arrays. KeyError if the job
        has no such program."""
        role = self.programs[program].role
        parts = self.held(role, held_phase(program))
        cost = self.costs.get(program, ProgramCost())
        extra = cost.extra_bytes
        if program == "publish" and extra and not self.samples_apart:
            # The program's output is a part of the sampler's copy, which is counted already.
            extra -= cost.memory.get("output", 0)
        if program == "accumulate":
            parts["activations"] = extra
        else:
            parts["temporaries"] = extra
        code_bytes = self._code_bytes(role)
        if code_bytes:
            parts["compiled programs"] = code_bytes
        if self.process_bytes is not None:
            # The devices of a CPU share their RAM with the process itself.
            sharing = len(self.roles["trainer"].devices)
            for part, size in self.process_bytes.items():
                if size:
                    parts[part] = -(-size // sharing)
            parts["freed memory that is not returned"] = round(FRAGMENTS * sum(parts.values()))
        return parts

    def _code_bytes(self, role: str) -> int:
        """Returns the bytes of all compiled programs that run on the devices of a role, also those
        of roles that share them."""
        roles = self.colocated_roles(role)
        total = 0
        for name, program in self.programs.items():
            # a program without a cost is not compiled yet
            if program.role in roles and name in self.costs:
                total += self.costs[name].code_bytes
        return total

    def needed_bytes(self, program: str) -> int:
        """Returns the sum of `needed`."""
        return sum(self.needed(program).values())

    @property
    def fullest(self) -> str:
        """The name of the program during which a device needs the most memory."""
        return max(self.programs, key=self.needed_bytes)

    def peak(self, phase: str = "") -> int:
        """Returns the most bytes that a device ever needs; with a `phase`, `sampling` or `update`,
        the most in that phase. ValueError if the budget has no program, or none that runs in the
        phase."""
        if not phase:
            return self.needed_bytes(self.fullest)
        return max(
            self.needed_bytes(program) for program in self.programs if held_phase(program) == phase
        )

    def fits(self, share: float = 1.0) -> bool:
        """True if a device needs at most `share` of its memory, and no program was refused by the
        compiler."""
        return self.peak() <= share * self.memory and (self.is_compiled or not self.costs)

    @property
    def is_compiled(self) -> bool:
        """True if programs have costs, and the compiler refused none. True also for a budget of
        `estimated`, which has the cost of one program without compiling."""
        return bool(self.costs) and not any(cost.error for cost in self.costs.values())

    def estimated(self) -> Budget:
        """Returns the budget as it is before anything is compiled: what roles hold, and the
        estimated activations of an update as the only cost, that of `accumulate`. It has no times
        (the peak rate of its devices is None) and no advice. `fits` and `peak` then count these
        estimates."""
        step = self.step
        if step is not None and step.rates is not None:
            step = replace(step, rates=replace(step.rates, peak_flops=None))
        update = ProgramCost(extra_bytes=self.activations)
        return replace(self, step=step, costs={"accumulate": update}, advice=())

    def with_scaled_costs(self, changed: Budget) -> Budget:
        """Estimates the costs of programs in a changed job from the compiled costs of this one.
        Returns `changed`, the budget of the same job with other settings, with these estimates as
        its costs: the memory of each program of this budget, scaled for sampling like the bytes of
        the caches, and for an update like the estimated activations. Programs that the changed job
        does not have are left out."""
        costs = {}
        for name, cost in self.costs.items():
            if name in changed.programs:
                extra = cost.extra_bytes * changed._memory_scale(name) / self._memory_scale(name)
                costs[name] = ProgramCost(extra_bytes=round(extra), code_bytes=cost.code_bytes)
        return replace(changed, costs=costs, process_bytes=self.process_bytes)

    def _memory_scale(self, program: str) -> int:
        """Returns what the memory of a program is taken to be proportional to: of `accumulate` the
        estimated activations, of a sampling program the bytes of the caches, of others 1."""
        if program == "accumulate":
            # at least 1, because the result is a divisor
            return max(1, self.activations)
        if phase_of(program) == "sampling":
            # the only items that the sampler holds just while it samples are its caches
            return max(1, sum(item.bytes for item in self.items_of("sampler", "sampling")))
        return 1

    # ---- time

    @property
    def peak_flops(self) -> float | None:
        """Operations a second of a device at its peak; None if that is not known."""
        if self.step is None or self.step.rates is None:
            return None
        return self.step.rates.peak_flops

    @property
    def is_timed(self) -> bool:
        """True if the seconds of a step can be computed: the devices' speeds are known and all
        programs are compiled."""
        return self.peak_flops is not None and self.is_compiled

    def seconds(self, program: str) -> tuple[float, float, float]:
        """Returns the seconds of all runs of a program in a step, as three bounds: (the least that
        is possible; if transfers between devices are hidden behind computation; if none is hidden).
        The program must have a cost."""
        cost = self.costs[program]
        runs = self.programs[program].runs
        compute = runs * cost.compute_seconds
        transfer = runs * cost.transfer_seconds
        if program == "publish":
            transfer += self._publication_seconds()
        return runs * cost.floor_seconds, max(compute, transfer), compute + transfer

    def _publication_seconds(self) -> float:
        """Returns the seconds a step for copying weights to a sampler that shares no device with
        the trainer, which no program's cost contains. 0 if nothing is copied, or if the speed of
        the links is unknown."""
        step = self.step
        if step is None or step.rates is None or not step.published_bytes:
            return 0.0
        # shared by the steps between two publications
        return step.published_bytes / step.rates.link / self.config.train.weight_sync_interval

    @property
    def step_seconds(self) -> tuple[float, float, float]:
        """Seconds of a step in a long run, as three bounds: (the least that is possible; if
        transfers between devices are hidden behind computation; if none is hidden). Sampling and
        training overlap if the schedule and the devices allow it."""
        sampler = []
        trainer = []
        scores_on_sampler = self.samples_apart and "reference" in self.colocated_roles("sampler")
        for program in self.costs:
            seconds = self.seconds(program)
            phase = phase_of(program)
            if phase == "sampling":
                sampler.append(seconds)
            if phase in TRAINER_PHASES:
                trainer.append(seconds)
        if scores_on_sampler:  # scoring then takes the sampler's time too
            for program in ("reference", "teacher"):
                if program in self.costs:
                    sampler.append(self.seconds(program))
        schedule = schedule_of(self.config.train)

        def of_bound(bound: int) -> float:
            """Returns the seconds of a step by one of the three bounds."""
            sampling = sum(seconds[bound] for seconds in sampler)
            training = sum(seconds[bound] for seconds in trainer)
            return step_seconds(schedule, sampling, training, self.samples_apart)

        return of_bound(0), of_bound(1), of_bound(2)

    @property
    def overlaps(self) -> bool:
        """True if sampling and training go on at the same time."""
        return self.samples_apart and oldest_samples(self.config) > 0

    @property
    def samples_apart(self) -> bool:
        """True if the sampler shares no device with the trainer."""
        return "trainer" not in self.colocated_roles("sampler")

    def phase_seconds(self) -> dict[str, tuple[float, float, float]]:
        """Returns phase -> seconds of a step in it, summed over the programs that run in it, as
        three bounds: (the least that is possible; if transfers are hidden behind computation; if
        none is hidden). Only phases with a program that has a cost."""
        phases: dict[str, tuple[float, float, float]] = {}
        for program in self.costs:
            phase = phase_of(program)
            floor, hidden, none_hidden = phases.get(phase, (0.0, 0.0, 0.0))
            more = self.seconds(program)
            phases[phase] = (floor + more[0], hidden + more[1], none_hidden + more[2])
        return phases

    @property
    def num_used_devices(self) -> int:
        """Number of devices that have a role."""
        used: set[int] = set()
        for placement in self.roles.values():
            used.update(placement.devices)
        return len(used)

    def mfu(self, seconds: float) -> float:
        """Returns the model FLOPs utilisation of a step that takes `seconds`, a share from 0 to 1.
        AssertionError if the budget has no `peak_flops`, so only for a budget of a plan on known
        devices."""
        assert self.step is not None and self.peak_flops is not None
        return self.step.model_flops / (self.peak_flops * self.num_used_devices * seconds)

    def transfers(self) -> list[tuple[float, str, Transfers]]:
        """Returns (seconds a step, program, transfers) for all transfers of a step, the longest
        first."""
        rows = []
        for program, cost in self.costs.items():
            for transfers in cost.collectives:
                rows.append((self.programs[program].runs * transfers.seconds, program, transfers))
        return sorted(rows, key=lambda row: -row[0])


def step_of(program: str) -> str:
    """Returns the step of sampling or training that a program computes, such as "prefill": the
    program's name without the number of a kind of layers, which "prefill 1" has, or without the
    model, as "apply critic" has it."""
    return program.partition(" ")[0]


def phase_of(program: str) -> str:
    """Returns the phase of a step in which a program runs, such as "sampling"."""
    return _PHASES[step_of(program)]


def held_phase(program: str) -> str:
    """Returns the phase to pass to `Budget.held` for what is held while a program runs: "sampling"
    or "update" if the program runs in that phase, else "always", because nothing is held for other
    phases alone."""
    phase = phase_of(program)
    if phase in ("sampling", "update"):
        return phase
    return "always"


# ---- as text


def parts_text(budget: Budget) -> str:
    """Returns a text that lists what a device needs during the program that needs most, by part,
    the largest first; then what the host's memory holds for each device, if anything."""
    parts = sorted(budget.needed(budget.fullest).items(), key=lambda part: -part[1])
    text = sizes_text(parts)
    on_host = host_text(budget)
    if on_host:
        text += f"; for each device in the host's memory {on_host}"
    return text


def host_text(budget: Budget) -> str:
    """Returns a text that lists what the host's memory holds for each device, by part; '' if
    nothing."""
    return sizes_text(list(budget.on_host().items()))


def sizes_text(parts: Sequence[tuple[str, int]]) -> str:
    """Returns a text like `gradient 1.0 GiB, reference 0.5 GiB`, without parts of 0 bytes."""
    return ", ".join(f"{part} {gib(size)}" for part, size in parts if size)


def _cost_text(budget: Budget) -> str:
    """Returns a text like ` and costs 0.01 to 0.02 (40 steps: 0.4 to 0.8)`, by the two bounds of a
    step's seconds that can occur; '' if `price` is not known. The seconds must be known."""
    price = price_per_hour(budget.config, budget.num_used_devices)
    if not price:
        return ""
    _, low, high = budget.step_seconds

    def cost(steps: int) -> str:
        """Returns the cost of so many steps, as one figure if the two bounds have the same text."""
        least = number_text(price * steps * low / 3600)
        most = number_text(price * steps * high / 3600)
        return least if least == most else f"{least} to {most}"

    steps = budget.config.steps
    return f" and costs {cost(1)} ({count(steps, 'step')}: {cost(steps)})"


def verdict(budget: Budget) -> str:
    """Returns the last line of a plan: whether the job fits, the memory it needs, the seconds
    and the cost of a step if they are known, and the first piece of advice if there is any."""
    leaves_free = budget.fits(FULL)
    if not budget.fits():
        text = "does not fit"
    elif leaves_free:
        text = "fits"
    else:
        text = "fits, but is tight"
    text += (
        f": {gib(budget.peak())} of {gib(budget.memory)} a device in "
        f"{phase_of(budget.fullest)} ({budget.fullest})"
    )
    if not budget.costs:
        text += f", before anything is compiled ({parts_text(budget)})"
    if budget.is_timed:
        # the two bounds that can occur: all transfers hidden, or none
        _, low, high = budget.step_seconds
        seconds = seconds_text(low)
        if seconds_text(high) != seconds:
            seconds += f" to {seconds_text(high)}"
        tokens = budget.config.sampling.max_completion_tokens
        text += f"; a step with completions of {tokens:,} tokens takes about {seconds}"
        text += _cost_text(budget)
    if not budget.advice:
        return text
    advice = budget.advice[0].text
    if leaves_free:
        return f"{text}. Faster with {advice}"
    return f"{text}. {advice}"
