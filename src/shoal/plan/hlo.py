"""Reads a compiled program, XLA's optimised HLO as text, and computes what it moves between
devices, what it reads, and how long it takes.

All figures are for one device. What is in a loop is multiplied by the loop's trip count; if the
compiler does not know it, by the number that the caller assumes.

A TPU's copies into its on-chip memory and out of it run in parallel with other operations, and the
compiler's estimate has no cycles for them. They are queued (`_Copies`): the device's memory serves
the operations first, then the copies in their order, and what needs a copy waits for it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from shoal.plan.transfers import group_size, groups_text

_SIZES = {
    "pred": 1,
    "s8": 1,
    "u8": 1,
    "s4": 1,
    "u4": 1,
    "f8e4m3fn": 1,
    "f8e5m2": 1,
    "bf16": 2,
    "f16": 2,
    "s16": 2,
    "u16": 2,
    "f32": 4,
    "s32": 4,
    "u32": 4,
    "f64": 8,
    "s64": 8,
    "u64": 8,
    "c64": 8,
}
_ARRAY = re.compile(rf"\b({'|'.join(_SIZES)})\[([\d,]*)\]")
_ON_CHIP = re.compile(r"\b\w+\[[\d,]*\]\{[^}]*S\(\d+\)\}")
"""Matches an array that a TPU holds on the chip, not in the device's memory."""

COLLECTIVES = (
    "all-gather",
    "all-reduce",
    "reduce-scatter",
    "all-to-all",
    "collective-permute",
    "ragged-all-to-all",
)

_FREE = {
    "parameter",
    "constant",
    "get-tuple-element",
    "tuple",
    "bitcast",
    "after-all",
    "partition-id",
    "replica-id",
    "opt-barrier",
    "optimization-barrier",
    "while",
    "conditional",
    "call",
    "async-start",
    "async-update",
    "call-start",
    "iota",
}
"""Operations that themselves read and write nothing; those whose names end in `-done` do not
either."""

_COPIES = {"copy-start", "slice-start"}
"""Operations that start a copy, of all or a part of an array."""

_KERNEL = "__gpu$xla.gpu.triton"
"""The target of custom calls that are the program's own kernels for GPUs."""

_CALLERS = ("mesh/programs.py:", "plan/")
"""Where the frames begin of the code that compiles a program; the frames further out are its
callers. JAX leaves out some frames, so either may come first."""

_SLICES = {"dynamic-slice", "gather", "slice"}

_BITCASTS = frozenset({"bitcast", "copy", "convert"})

_ELEMENTWISE = frozenset(
    {"add", "divide", "exponential", "maximum", "multiply", "pad", "reshape", "select", "subtract"}
)
"""Operations of which a fusion computes only what a slice of their result needs."""

_UPDATES = {"dynamic-update-slice": 1, "scatter": 2}
"""Operations that overwrite a part of their first operand in place -> the number of the operand
that has the new values."""


def arrays_of(shape: str) -> list[int]:
    """Returns the bytes of each array in the text of a shape. Arrays of a type without a size in
    _SIZES, such as `token[]`, are left out.

    >>> arrays_of("(bf16[2,4]{1,0}, f32[])")
    [16, 4]
    """
    return [_array_bytes(dtype, sizes) for dtype, sizes in _ARRAY.findall(shape)]


def _array_bytes(dtype: str, sizes: str) -> int:
    """Returns the bytes of an array of type `dtype` whose sizes are a text like `2,4`."""
    return _SIZES[dtype] * math.prod(_numbers(sizes))


def _numbers(text: str) -> list[int]:
    """Returns the whole numbers in a text like `2,4`; none for an empty text."""
    return [int(number) for number in re.findall(r"\d+", text)]


class Instruction(NamedTuple):
    """A line of a computation: `%name = shape op(operands), attributes`."""

    name: str
    shape: str
    op: str
    operands: tuple[str, ...]
    attributes: str
    root: bool

    @property
    def bytes(self) -> int:
        return sum(arrays_of(self.shape))

    def named(self, attribute: str) -> str:
        """Returns the name of the computation that an attribute such as `body` or `to_apply` gives;
        "" if the instruction has no such attribute."""
        match = re.search(rf"\b{attribute}=%?([\w.\-]+)", self.attributes)
        if match is None:
            return ""
        return match[1]

    @property
    def collective(self) -> str:
        """The kind of collective that the instruction is or starts, such as `all-gather`; "" if it
        is none."""
        kind = self.op.removesuffix("-start")
        if kind not in COLLECTIVES:
            return ""
        return kind

    @property
    def is_free(self) -> bool:
        """True if the instruction itself reads and writes nothing."""
        return self.op in _FREE or self.op.endswith("-done")

    @property
    def is_decoding_kernel(self) -> bool:
        return self.op == "custom-call" and "/decode_kernel/" in self.attributes

    @property
    def steps_states(self) -> bool:
        """True for the kernel of delta nets' decoding, which writes all that it reads of states."""
        return self.op == "custom-call" and "/delta_step/" in self.attributes

    @property
    def is_tpu_kernel(self) -> bool:
        return '"tpu_custom_call"' in self.attributes

    @property
    def is_gpu_kernel(self) -> bool:
        return f'"{_KERNEL}"' in self.attributes


@dataclass(frozen=True)
class Collective:
    """A transfer between devices. `bytes`: of the whole array, as a device holds it after a gather
    or before a scatter."""

    kind: str
    bytes: int
    times: float
    groups: str  # which devices exchange, as the program's text says it
    source: str

    @property
    def total(self) -> float:
        return self.bytes * self.times


class Operation(NamedTuple):
    """An operation: how often it runs, and for each time the bytes that it reads and writes, and
    the FLOPs of its products."""

    times: float
    bytes: float
    flops: float


@dataclass
class Costs:
    """What one run of a program does on a device."""

    collectives: list[Collective] = field(default_factory=list)
    cycles: dict[str, float] = field(default_factory=dict)
    """Source -> cycles. Only for TPUs: the compiler's estimate, with the waits for copies."""
    bytes: dict[str, float] = field(default_factory=dict)  # source -> bytes read and written
    operations: list[Operation] = field(default_factory=list)  # without collectives
    unknown: list[Operation] = field(default_factory=list)  # those without an estimate of cycles
    in_kernels: float = 0.0  # bytes moved by kernels with products of matrices
    memory: float = 0.0
    """Bytes that operations read from a device's memory and write to it, without copies that run at
    the same time."""
    largest: list[tuple[int, str, str]] = field(default_factory=list)  # (bytes, shape, source)
    assumed: list[str] = field(default_factory=list)  # loops whose trip count was assumed
    awaited: float = 0.0  # how often a GPU's host is asked whether such a loop goes on


class _Copies:
    """The copies of a computation that run in parallel with its operations. `rate`: bytes a cycle
    of the device's memory."""

    def __init__(self, rate: float) -> None:
        self.rate = rate
        self.left: dict[str, float] = {}  # copy -> its bytes that are not copied yet, oldest first

    def advance(self, cycles: float, size: float) -> None:
        """Lets the copies proceed, in order, while an operation runs for `cycles` cycles: they get
        the memory's bandwidth that the operation's own `size` bytes leave free. Changes `left`; a
        copy that is done stays in it with 0 bytes."""
        free = cycles * self.rate - size
        for name, left in self.left.items():
            moved = max(0.0, min(left, free))
            free -= moved
            self.left[name] -= moved

    def wait(self, name: str) -> float:
        """Completes a copy and those before it, removes them, and returns the cycles that this
        takes; 0 if the copy is done already, and for a name that is no copy."""
        waited = 0.0
        while name in self.left:
            oldest = next(iter(self.left))
            waited += self.left.pop(oldest) / self.rate
        return waited


class Module:
    """A compiled program, parsed into its computations.

    >>> Module(compiled.as_text()).costs(assumed_trips=[32, 6])
    """

    def __init__(self, text: str) -> None:
        """Parses a program. `text`: the optimised HLO that `compiled.as_text()` returns."""
        self.text = text
        self.computations: dict[str, list[Instruction]] = {}
        self.entry = ""
        current = ""
        for line in text.splitlines():
            if line.startswith((" ", "\t")):
                instruction = _instruction(line)
                if current and instruction:
                    self.computations[current].append(instruction)
            elif line.rstrip().endswith("{") and "->" in line:  # `%name (parameters) -> shape {`
                head = re.match(r"(ENTRY )?%?([\w.\-]+)", line)
                assert head is not None
                current = head[2]
                self.computations[current] = []
                if head[1]:
                    self.entry = current
            elif re.match(r"\}(,|$)", line):
                # `}}` does not end a computation: it belongs to the description of a kernel.
                current = ""

    def costs(
        self,
        assumed_trips: Sequence[float] = (),
        memory_rate: float = 0.0,
        kernel_share: float = 1.0,
    ) -> Costs:
        """Returns the costs of one run of the program. `assumed_trips`: rounds of loops whose trip
        count the compiler does not know, the outermost first; too few: 1. `memory_rate`: bytes a
        cycle of a TPU's memory, for which `cycles` then include the waits for copies, and `memory`
        is counted; 0: neither. `kernel_share`: the share of its caches that the kernel of decoding
        reads. `largest` of the result has each array (shape and source) once, at most 20, the
        largest first."""
        visit = _Visit(self, memory_rate, kernel_share)
        visit.computation(self.entry, 1.0, tuple(assumed_trips))
        costs = visit.costs
        bytes_by_array: dict[tuple[str, str], int] = {}
        for size, shape, source in costs.largest:
            bytes_by_array[shape, source] = size
        largest = [(size, shape, source) for (shape, source), size in bytes_by_array.items()]
        costs.largest = sorted(largest, reverse=True)[:20]
        return costs

    def inside(self, computation: str) -> Iterator[Instruction]:
        """Yields the instructions of a computation, such as the one of a fusion, and of all
        computations that these call, each call behind the instruction that makes it. Bodies of
        loops and branches of conditions are not followed. An unknown name yields nothing."""
        for instruction in self.computations.get(computation, []):
            yield instruction
            if instruction.op in ("fusion", "call", "async-start"):
                for called in self.called(instruction):
                    yield from self.inside(called)

    def called(self, instruction: Instruction) -> list[str]:
        """Returns the names of the computations that an instruction calls; for a condition, of its
        branches, of which only one runs. A loop's condition and body are not among them."""
        computations = []
        for attribute in ("to_apply", "calls", "called_computations"):
            name = instruction.named(attribute)
            if name:
                computations.append(name)
        branches = re.search(r"branch_computations=\{([^}]*)\}", instruction.attributes)
        if branches:
            computations += [name.strip().lstrip("%") for name in branches[1].split(",")]
        return computations

    # ---- where an operation comes from

    def source(self, instruction: Instruction) -> str:
        """Returns where an operation comes from: `model/linear.py:29 < model/transformer.py:251
        dot_general`, the line of code that made it, the line that called that one, and the
        operation's name. The lines are left out if they are unknown. The name is the last part of
        JAX's `op_name`, else XLA's own. A fusion without a name has the source of the last
        operation in it that has one."""
        name = re.search(r'op_name="([^"]*)"', instruction.attributes)
        if name is None and instruction.op == "fusion":
            # A fusion of several operations has no name: the last of them that has one counts.
            for part in reversed(self.computations.get(instruction.named("calls"), [])):
                if "op_name=" in part.attributes:
                    return self.source(part)
            return instruction.op
        operation_name = instruction.op
        if name:
            operation_name = name[1].rpartition("/")[2]
        lines = self._lines_of(instruction)
        if not lines:
            return operation_name
        return f"{' < '.join(lines)} {operation_name}"

    def _lines_of(self, instruction: Instruction) -> list[str]:
        """Returns the innermost two lines of this package that made an operation, such as
        `["model/linear.py:29", "model/transformer.py:251"]`; empty if unknown, and only one if XLA
        says no more. Only lines of the program itself count, not those of the code that compiles
        it; a line that follows itself counts once."""
        frame = re.search(r"stack_frame_id=(\d+)", instruction.attributes)
        if frame is None:
            line = re.search(r'source_file="([^"]*)" source_line=(\d+)', instruction.attributes)
            if line is None:
                return []
            text = _line_of_package(line[1], line[2])
            return [text] if text else []
        lines: list[str] = []
        frame_id = int(frame[1])
        seen = set()
        while frame_id in self._frames and frame_id not in seen and len(lines) < 2:
            seen.add(frame_id)
            location, frame_id = self._frames[frame_id]
            text = self._locations.get(location, "")
            if text.startswith(_CALLERS):
                break  # This frame and those around it say nothing about the model.
            if text and text not in lines:
                lines.append(text)
        return lines

    @cached_property
    def _frames(self) -> dict[int, tuple[int, int]]:
        """Stack frame -> (its location, the frame that called it, 0 for none)."""
        frames = {}
        for frame_id, location, parent in re.findall(
            r"^(\d+) \{file_location_id=(\d+)(?: parent_frame_id=(\d+))\}", self.text, re.MULTILINE
        ):
            frames[int(frame_id)] = (int(location), int(parent) - 1)  # XLA counts parents from 1
        return frames

    @cached_property
    def _locations(self) -> dict[int, str]:
        """Location -> a text like `model/linear.py:29`; "" for one outside of this package."""
        head = self.text.partition("\n%")[0]
        names_table = head.partition("FileNames")[2].partition("FunctionNames")[0]
        names = dict(re.findall(r'^(\d+) "([^"]*)"$', names_table, re.MULTILINE))
        locations = {}
        for location_id, name, line in re.findall(
            r"^(\d+) \{file_name_id=(\d+) function_name_id=\d+ line=(\d+)", head, re.MULTILINE
        ):
            locations[int(location_id)] = _line_of_package(names.get(name, ""), line)
        return locations

    # ---- loops

    def trip_count(self, loop: Instruction) -> int | None:
        """Returns how many rounds a loop runs: what XLA notes at it, else the bound of a condition
        `counter < constant`, divided by what a round adds to the counter and rounded up. None if
        the program's text says neither."""
        known = re.search(r'known_trip_count":\{"n":"(\d+)"', loop.attributes)
        if known:
            return int(known[1])
        condition = self.computations.get(loop.named("condition"), [])
        root = _root(condition)
        # Counted loops of JAX and XLA start from 0 and have the condition `i < constant`.
        if root is None or root.op != "compare" or "direction=LT" not in root.attributes:
            return None
        counter, bound = (_named(condition, operand) for operand in root.operands)
        bound_value = _constant(bound)
        if bound_value is None:
            return None
        return -(-bound_value // self._step(loop, counter))  # rounded up

    def _step(self, loop: Instruction, counter: Instruction | None) -> int:
        """Returns what a loop adds to its counter in a round: 1, or 2 if XLA has unrolled a product
        together with the exchange of its parts; 1 too if the body does not show it. `counter`: the
        loop's counter in its condition."""
        if counter is None:
            return 1
        index = re.search(r"index=(\d+)", counter.attributes)
        body = self.computations.get(loop.named("body"), [])
        root = _root(body)
        if root is None or root.op != "tuple" or index is None:
            return 1
        # The body returns the loop's values as a tuple; `index` is the counter's place in it.
        next_counter = _named(body, root.operands[int(index[1])])
        if next_counter is None or next_counter.op != "add":
            return 1
        for operand in next_counter.operands:
            step = _constant(_named(body, operand))
            if step:
                return step
        return 1

    # ---- bytes

    @cached_property
    def by_name(self) -> dict[str, Instruction]:
        """Name -> instruction, of all computations of the program, in which names are unique."""
        instructions = {}
        for computation in self.computations.values():
            for instruction in computation:
                instructions[instruction.name] = instruction
        return instructions

    def moved_bytes(self, instruction: Instruction, shapes: Mapping[str, str]) -> int:
        """Returns the bytes that an operation reads and writes. Only what it needs of an operand
        counts, such as the slice that it takes; of an update in place only the new values, once
        read and once written. `shapes`: operand -> text of its shape; one that is missing counts 0
        bytes. Operations that are free (`is_free`) are not told apart here."""
        op = instruction.op
        written = instruction.bytes - _workspace_bytes(instruction)
        # Bytes of each operand.
        read = [sum(arrays_of(shapes.get(name, ""))) for name in instruction.operands]
        if op == "fusion":
            written, read = self._fused_bytes(instruction, read)
        elif op in _SLICES:
            read = [written]
        elif op in _UPDATES:
            written = read[_UPDATES[op]]
            read = [written]
        elif op == "copy-start":
            written = sum(read)
        elif op == "custom-call" and instruction.is_gpu_kernel and not instruction.steps_states:
            # The result contains operands of which it overwrites a little; they count as read
            # alone.
            written -= sum(read[operand_index] for operand_index in _aliased(instruction))
        elif op.endswith("-start"):  # its shape also contains what it reads
            written = sum(arrays_of(_results(instruction)))
        return written + sum(read)

    def _fused_bytes(self, fusion: Instruction, operands: list[int]) -> tuple[int, list[int]]:
        """Returns (bytes that a fusion writes, bytes that it reads of each operand, in order).
        `operands`: the bytes of the whole operands; the list is not changed. Of an operand that the
        fusion only slices, only the slices count; if it only updates an operand in place, only the
        update counts, as written, and 0 as read."""
        inside = self.computations.get(fusion.named("calls"), [])
        users: dict[str, list[Instruction]] = {}
        for instruction in inside:
            for operand in instruction.operands:
                users.setdefault(operand, []).append(instruction)
        written = fusion.bytes
        read = list(operands)
        for parameter in inside:
            if parameter.op != "parameter" or not parameter.operands:
                continue
            if not parameter.operands[0].isdigit() or int(parameter.operands[0]) >= len(read):
                continue
            operand_index = int(parameter.operands[0])  # a parameter's only operand is its number
            uses = _through(parameter.name, users)
            if uses and all(use.op in _UPDATES for use in uses):
                updates = [self.by_name[use.operands[_UPDATES[use.op]]].bytes for use in uses]
                # The result contains the whole operand, of which only the updates are written.
                written = max(0, written - read[operand_index]) + sum(updates)
                read[operand_index] = 0
                continue
            readers = _through(parameter.name, users, _ELEMENTWISE)
            if readers:
                needed = sum(self._needed(reader, parameter) for reader in readers)
                read[operand_index] = min(read[operand_index], needed)
        return written, read

    def _needed(self, use: Instruction, operand: Instruction) -> int:
        """Returns how many bytes of an operand the operation `use` in a fusion reads: those of the
        slice if it takes one, else all. `use` may be a fusion itself, which is then looked into."""
        if use.op == "fusion" and operand.name in use.operands:
            # With 0 bytes for the other operands, the sum of what is read is this operand's.
            alone = [operand.bytes if name == operand.name else 0 for name in use.operands]
            _, read = self._fused_bytes(use, alone)
            return sum(read)
        if use.op in _SLICES:
            return use.bytes
        return operand.bytes

    def product_flops(self, instruction: Instruction, shapes: Mapping[str, str]) -> float:
        """Returns the FLOPs of the matrix products of an instruction; of a fusion, of all in it; 0
        for any other. A custom call counts if its attributes name contracted dimensions. `shapes`:
        operand -> text of its shape; not needed for a fusion."""
        if instruction.op != "fusion":
            if instruction.op in ("dot", "convolution", "custom-call"):
                return _product_flops(instruction, shapes)
            return 0.0
        inside = list(self.inside(instruction.named("calls")))
        inner_shapes = {inner.name: inner.shape for inner in inside}
        flops = 0.0
        for inner in inside:
            if inner.op in ("dot", "convolution"):
                flops += _product_flops(inner, inner_shapes)
        return flops


class _Visit:
    """Visits the instructions of a program and adds up their costs. `memory_rate` and
    `kernel_share`: like in `Module.costs`."""

    def __init__(self, module: Module, memory_rate: float, kernel_share: float) -> None:
        """Begins with empty `costs`. `memory_rate`: bytes that a TPU's memory moves in a cycle,
        from which the waits for copies are computed; 0: they are not counted."""
        self.module = module
        self.memory_rate = memory_rate
        self.kernel_share = kernel_share
        self.costs = Costs()
        self.channels: set[str] = set()  # channels of the collectives that were counted

    def computation(self, name: str, times: float, trips: tuple[float, ...]) -> None:
        """Adds the costs of a computation, and of all that it calls, to `costs`; it runs `times`
        times. `trips`: rounds of loops in it without a known trip count, the outermost first. Loops
        side by side get the same numbers. A `name` that the program lacks adds nothing."""
        instructions = self.module.computations.get(name, [])
        shapes = {instruction.name: instruction.shape for instruction in instructions}
        copies = _Copies(self.memory_rate)
        costs = self.costs
        for instruction in instructions:
            cycles_before = sum(costs.cycles.values())
            memory_before = costs.memory
            self.instruction(instruction, shapes, name, times, trips)
            # Costs count all `times` runs of the computation, copies proceed in one.
            cycles = (sum(costs.cycles.values()) - cycles_before) / times
            copies.advance(cycles, (costs.memory - memory_before) / times)
            if instruction.op in _COPIES and self.memory_rate:
                size = _copied_bytes(instruction)
                copies.left[instruction.name] = size
                costs.memory += times * size
            elif instruction.op.endswith("-done"):
                waited = copies.wait(instruction.operands[0])  # the `-start`; 0 if it is no copy
                if waited:
                    self.add_cycles(f"waits for {self.module.source(instruction)}", times * waited)

    def add_cycles(self, source: str, cycles: float) -> None:
        """Adds cycles to those of a source."""
        self.costs.cycles[source] = self.costs.cycles.get(source, 0) + cycles

    def instruction(
        self,
        instruction: Instruction,
        shapes: Mapping[str, str],
        computation: str,
        times: float,
        trips: tuple[float, ...],
    ) -> None:
        """Adds the costs of one instruction, and of the computations that it calls, to `costs`.
        `shapes`: instruction of the same computation -> text of its shape. `computation`: the name
        of the computation that it is in, which runs `times` times. `trips`: rounds of loops without
        a known trip count, the outermost first. Of a condition one branch alone counts: the one
        whose results have most bytes."""
        op = instruction.op
        if op == "while":
            self.loop(instruction, times, trips)
            return
        self.collective(instruction, instruction, computation, times)
        estimate = re.search(r'"estimated_cycles":"(\d+)"', instruction.attributes)
        # The largest integer means that the compiler has no estimate, for example of products with
        # 8-bit weights on v6e.
        lacks_cycles = estimate is not None and int(estimate[1]) >= 2**62
        if estimate is not None and not lacks_cycles:
            self.add_cycles(self.module.source(instruction), times * int(estimate[1]))
        if op in ("call", "async-start"):
            for called in self.module.called(instruction):
                self.computation(called, times, trips)
        elif op == "conditional":  # only one branch runs: assume the one that makes most bytes
            branches = self.module.called(instruction)
            self.computation(max(branches, key=self._made_bytes), times, trips)
        elif op in ("fusion", "call-start"):  # TPU: the second is run by a SparseCore
            fused = instruction.named("calls") or instruction.named("to_apply")
            for inner in self.module.inside(fused):
                self.collective(inner, instruction, fused, times)
        if instruction.is_free:
            return
        operation = self.operation(instruction, shapes, times)
        if not instruction.collective:
            self.costs.operations.append(operation)
            if lacks_cycles:
                self.costs.unknown.append(operation)

    def _made_bytes(self, computation: str) -> int:
        """Returns the bytes of all results of a computation."""
        return sum(instruction.bytes for instruction in self.module.computations[computation])

    def loop(self, loop: Instruction, times: float, trips: tuple[float, ...]) -> None:
        """Adds the costs of a loop, which is entered `times` times. Its trip count is the known
        one, else the first of `trips`, else 1; the last two are listed in `costs.assumed`. Loops
        inside get `trips` without the number that this one took."""
        count: float | None = self.module.trip_count(loop)
        if count is None:
            count = 1
            if trips:
                count = trips[0]
                trips = trips[1:]
            self.costs.assumed.append(f"{self.module.source(loop)}: {count:g} times")
            self.costs.awaited += times * count
        self.computation(loop.named("condition"), times * count, trips)
        self.computation(loop.named("body"), times * count, trips)

    def collective(
        self, instruction: Instruction, around: Instruction, computation: str, times: float
    ) -> None:
        """Adds a transfer to `costs.collectives` if the instruction is a collective that was not
        counted yet; else does nothing. Parts with one channel, operation and `times` count once.
        `around`: the fusion that contains it, or the instruction itself. `computation`: the name of
        the computation that it is in, which shows whether only a part of a sum is kept. `times`:
        how often it runs."""
        kind = instruction.collective
        if not kind:
            return
        # TPU: one gather may be split over several fusions that compute meanwhile; all its parts
        # have one channel.
        channel = re.search(r"channel_id=(\d+)", instruction.attributes)
        key = ""
        if channel:
            key = f"{channel[1]} {instruction.op} {times}"
        if key and key in self.channels:
            return
        self.channels.add(key)  # "" without a channel, which is never looked up
        groups = groups_text(instruction.attributes)
        size = _whole_bytes(instruction, kind, max(1, group_size(groups)))
        if kind == "all-reduce" and computation.startswith("all-reduce-scatter"):
            kind = "reduce-scatter"  # TPU: a fusion that keeps a part of the sum
        source = self._collective_source(instruction, around)
        self.costs.collectives.append(Collective(kind, size, times, groups, source))

    def _collective_source(self, instruction: Instruction, around: Instruction) -> str:
        """Returns the source of a collective: the first one with a line of code among those of the
        collective, its fusion, and the operand that it sends. In a fusion the collective may have
        no line, and neither may a sum that the compiler made, but its operand has."""
        sent = around
        if around.operands:
            sent = self.module.by_name.get(around.operands[0], around)
        for candidate in (instruction, around, sent):
            source = self.module.source(candidate)
            if " " in source:  # it has a line of code before the operation's name
                return source
        return self.module.source(instruction)

    def operation(
        self,
        instruction: Instruction,
        shapes: Mapping[str, str],
        times: float,
    ) -> Operation:
        """Adds the bytes and the memory traffic of one operation to the costs, and returns what it
        does each time it runs: an `Operation`, which is not stored here. Its largest result goes
        into `costs.largest`, the bytes of kernels into `costs.in_kernels`. Memory traffic, without
        what stays on the chip, is counted for TPUs alone."""
        costs = self.costs
        source = self.module.source(instruction)
        share = 1.0
        if instruction.is_decoding_kernel:
            share = self.kernel_share
        size = share * self.module.moved_bytes(instruction, shapes)
        flops = self.module.product_flops(instruction, shapes)
        if instruction.is_gpu_kernel and not instruction.steps_states:
            costs.in_kernels += times * size
        if self.memory_rate and instruction.op not in _COPIES:
            off_chip = {}  # operand -> its shape without arrays on the chip, which count 0 bytes
            for name in instruction.operands:
                off_chip[name] = _ON_CHIP.sub("", shapes.get(name, ""))
            result = instruction._replace(shape=_ON_CHIP.sub("", instruction.shape))
            moved = times * share * self.module.moved_bytes(result, off_chip)
            costs.memory += moved
            if instruction.is_tpu_kernel:
                # The compiler has no estimate of kernels: they take as long as they read and write,
                # or longer for their products of matrices.
                self.add_cycles(source, moved / self.memory_rate)
                if not instruction.steps_states:
                    costs.in_kernels += moved
        costs.bytes[source] = costs.bytes.get(source, 0) + times * size
        arrays = _ARRAY.findall(instruction.shape)
        if arrays:
            dtype, sizes = max(arrays, key=lambda array: _array_bytes(array[0], array[1]))
            costs.largest.append((_array_bytes(dtype, sizes), f"{dtype}[{sizes}]", source))
        return Operation(times, size, flops)


def _named(computation: Sequence[Instruction], name: str) -> Instruction | None:
    """Returns the instruction of this name; None if there is none."""
    for instruction in computation:
        if instruction.name == name:
            return instruction
    return None


def _root(computation: Sequence[Instruction]) -> Instruction | None:
    """Returns the instruction whose result is that of the computation; None if there is none."""
    for instruction in computation:
        if instruction.root:
            return instruction
    return None


def _aliased(instruction: Instruction) -> list[int]:
    """Returns the numbers, from 0, of the operands that a custom call overwrites in place; [] if
    there are none."""
    aliases = re.search(r"output_to_operand_aliasing=\{(.*?)\}, \w+=", instruction.attributes)
    if aliases is None:
        return []
    return [int(number) for number in re.findall(r"\((\d+),", aliases[1])]


def _workspace_bytes(instruction: Instruction) -> int:
    """Returns the bytes that a product by cuBLAS has for its own use, the last part of its result,
    of which it need write nothing; 0 for any other instruction."""
    parts = _parts(instruction.shape)
    is_product = instruction.op == "custom-call" and '"__cublas$' in instruction.attributes
    if not is_product or not parts or not parts[-1].startswith("s8["):
        return 0
    return sum(arrays_of(parts[-1]))


def _whole_bytes(instruction: Instruction, kind: str, devices: int) -> int:
    """Returns the bytes of the whole arrays of a collective: of the operand of a reduce-scatter, of
    the result of any other. `kind`: one of COLLECTIVES; `devices`: how many exchange, which only a
    reduce-scatter needs."""
    if kind != "reduce-scatter":
        return sum(arrays_of(_results(instruction)))
    # The shape of its start contains the whole operands; otherwise the shape is only the part that
    # each device of the group keeps.
    parts = _parts(instruction.shape)
    if instruction.op.endswith("-start") and parts:
        return sum(arrays_of(parts[0]))
    return devices * sum(arrays_of(instruction.shape))


def _results(instruction: Instruction) -> str:
    """Returns the shape of what an operation returns. The shape of a `-start` is `(operands,
    results, ...)`, each one array or several in parentheses; that of an `all-reduce-start` is only
    the results, and so is the shape of an operation that is no `-start`."""
    if instruction.op.endswith("-start") and instruction.op != "all-reduce-start":
        parts = _parts(instruction.shape)
        if len(parts) > 1:
            return parts[1]
    return instruction.shape


def _copied_bytes(instruction: Instruction) -> int:
    """Returns the bytes that a copy (an operation in _COPIES) moves through the device's memory:
    those of the copied array or slice once if one side is on the chip, twice if neither is."""
    parts = _parts(instruction.shape)
    first, second = parts[0], parts[1]
    # A copy's shape is (target, source, ..), both whole; a slice's (source, target, ..), of which
    # only the target has the slice's size.
    moved = sum(arrays_of(second))
    if instruction.op == "copy-start":
        moved = sum(arrays_of(first))
    if "S(1)" in first + second:  # the memory on the chip
        return moved
    return 2 * moved


_DEPTHS = {"(": 1, "[": 1, "{": 1, ")": -1, "]": -1, "}": -1}


def _parts(shape: str) -> list[str]:
    """Returns the parts of a tuple's shape, of the outermost tuple alone; empty for an array.

    >>> _parts("((f32[8]{0}, f32[16]{0}), (f32[2]{0}, f32[4]{0}))")
    ['(f32[8]{0}, f32[16]{0})', '(f32[2]{0}, f32[4]{0})']
    """
    if not shape.startswith("("):
        return []
    parts = [""]
    depth = 0
    for letter in shape[1:-1]:
        depth += _DEPTHS.get(letter, 0)
        if letter == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return [part.strip() for part in parts if part]


def _through(
    name: str, users: Mapping[str, list[Instruction]], more: frozenset[str] = frozenset()
) -> list[Instruction]:
    """Returns the instructions that use a value. Bitcasts, copies and conversions, and operations
    in `more`, do not count themselves: the instructions that use their results count instead, if
    there are any. `users`: value -> the instructions that use it. An instruction is returned once
    for each way to it."""
    seen_through = _BITCASTS | more
    uses: list[Instruction] = []
    for use in users.get(name, []):
        if use.op in seen_through and use.name in users:
            uses += _through(use.name, users, more)
        else:
            uses.append(use)
    return uses


def _constant(instruction: Instruction | None) -> int | None:
    """Returns the value of an instruction that is a constant whole number of 0 or more; None for
    any other instruction, and for None."""
    if instruction is None or instruction.op != "constant":
        return None
    if not instruction.operands[0].isdigit():
        return None
    return int(instruction.operands[0])


def _product_flops(instruction: Instruction, shapes: Mapping[str, str]) -> float:
    """Returns the FLOPs of a matrix product: two for each element of the result and each index of
    the contracted dimensions of the left operand; 0 if a shape or these dimensions are unknown, so
    for a convolution without them. `shapes`: operand -> text of its shape."""
    if not instruction.operands:
        return 0.0
    contracted = re.search(
        r'lhs_contracting_dim(?:ension)?s"?[=:][{\[]([\d,"]*)[}\]]', instruction.attributes
    )
    left = _ARRAY.search(shapes.get(instruction.operands[0], ""))
    result = _ARRAY.search(instruction.shape)
    if contracted is None or left is None or result is None:
        return 0.0
    left_sizes = _numbers(left[2])
    inner = 1
    for text in re.findall(r"\d+", contracted[1]):
        if int(text) < len(left_sizes):
            inner *= left_sizes[int(text)]
    return 2.0 * inner * math.prod(_numbers(result[2]))


def _instruction(line: str) -> Instruction | None:
    """Parses a line of a computation; None if it is no instruction. The operands are names without
    `%`; of a constant its value, of a parameter its number. `root` is True for `ROOT`.

        ROOT %add.3 = f32[8]{0} add(%x, %y), metadata={op_name="jit(f)/add"}
    """
    head = re.match(r"\s+(ROOT )?%?([\w.\-]+) = ", line)
    if head is None:
        return None
    rest = line[head.end() :]
    if rest.startswith("("):
        end = _closing(rest, 0) + 1
        shape = rest[:end]
        rest = rest[end:].lstrip()
    else:
        end = rest.find(" ")
        shape = rest[:end]
        rest = rest[end + 1 :]
    op, _, _ = rest.partition("(")
    end = _closing(rest, len(op))
    inside = rest[len(op) + 1 : end]
    operands = re.findall(r"%([\w.\-]+)", inside)
    if not operands:  # the value of a constant, or the number of a parameter
        operands = [part.strip() for part in inside.split(",") if part.strip()]
    attributes = rest[end + 1 :]
    return Instruction(head[2], shape, op.strip(), tuple(operands), attributes, bool(head[1]))


def _closing(text: str, start: int) -> int:
    """Returns the position of the parenthesis that closes the one at `start`. The text's length if
    none closes it; `start` if no parenthesis opens there."""
    depth = 0
    for position in range(start, len(text)):
        if text[position] == "(":
            depth += 1
        elif text[position] == ")":
            depth -= 1
        if depth == 0:
            return position
    return len(text)


def _line_of_package(file: str, line: str) -> str:
    """Returns a text like `model/linear.py:29` for a line of a file of this package; "" for other
    files."""
    if "/shoal/" not in file:
        return ""
    name = file.rpartition("/shoal/")[2]
    if "/site-packages/" in name:  # of another package, installed below a checkout named `shoal`
        return ""
    return f"{name}:{line}"
