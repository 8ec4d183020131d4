"""Reads a compiled program, XLA's optimised HLO as text: what moves between devices, what it reads,
how long it takes.

Figures are of one device. Loops are multiplied by their trip counts; where the compiler does not
know one, by the number that the caller assumes.

A TPU's copies into its on-chip memory and out of it run beside other operations, and the compiler's
account has no cycles for them. They are queued (`_Copies`): the device's memory serves the
operations first, then the copies in their order, and what needs one waits for it.
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
"""An array that a TPU holds on the chip, not in the device's memory."""

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
"""Operations that read and write nothing themselves, besides those that end in `-done`."""

_COPIES = {"copy-start", "slice-start"}
"""Operations that start a copy, of all or a part of an array."""

_KERNEL = "__gpu$xla.gpu.triton"
"""The target of a kernel for GPUs that is a program's own."""

_SLICES = {"dynamic-slice", "gather", "slice"}

_BITCASTS = frozenset({"bitcast", "copy", "convert"})

_ELEMENTWISE = frozenset(
    {"add", "divide", "exponential", "maximum", "multiply", "pad", "reshape", "select", "subtract"}
)
"""Of these a fusion computes only what a slice of their result needs."""

_UPDATES = {"dynamic-update-slice": 1, "scatter": 2}
"""Operations that write a part of their first operand, in place -> the operand that is written."""


def arrays_of(shape: str) -> list[int]:
    """Bytes of the arrays in a shape's text.

    >>> arrays_of("(bf16[2,4]{1,0}, f32[])")
    [16, 4]
    """
    return [
        _SIZES[kind] * math.prod(int(size) for size in sizes.split(",") if size)
        for kind, sizes in _ARRAY.findall(shape)
    ]


class Instruction(NamedTuple):
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
        """The computation that an attribute such as `body` names; empty without."""
        found = re.search(rf"\b{attribute}=%?([\w.\-]+)", self.attributes)
        return found[1] if found else ""


@dataclass(frozen=True)
class Collective:
    """One transfer at one place of a program. `bytes` are those of the whole array, as a device
    holds it after a gather or before a scatter."""

    kind: str
    bytes: int
    times: float
    groups: str  # as in the text: which devices exchange
    source: str

    @property
    def total(self) -> float:
        return self.bytes * self.times


@dataclass
class Costs:
    """What one run of a program does on a device."""

    collectives: list[Collective] = field(default_factory=list)
    cycles: dict[str, float] = field(
        default_factory=dict
    )  # by source; TPU: the compiler's estimate
    bytes: dict[str, float] = field(default_factory=dict)  # by source: read and written
    operations: list[tuple[float, float, float]] = field(
        default_factory=list
    )  # (times, bytes, FLOPs), no collectives
    unknown: list[tuple[float, float, float]] = field(
        default_factory=list
    )  # those whose cycles the compiler lacks
    in_kernels: float = 0.0  # bytes of operations that are kernels for GPUs, or decoding's for TPUs
    # bytes that operations read from a device's memory and write to it, without copies beside them
    memory: float = 0.0
    largest: list[tuple[int, str, str]] = field(default_factory=list)  # (bytes, shape, source)
    assumed: list[str] = field(default_factory=list)  # loops whose trip count was assumed,
    awaited: float = 0.0  # and how often these are asked whether they go on: of a GPU, by its host


class _Copies:
    """The copies of one computation that run beside its operations."""

    def __init__(self, rate: float) -> None:
        self.rate, self.left = (
            rate,
            dict[str, float](),
        )  # bytes a cycle of the memory; name -> bytes, in their order

    def beside(self, cycles: float, size: float) -> None:
        """Copies while an operation of so many cycles leaves the memory free, which reads or writes
        `size` bytes."""
        free = cycles * self.rate - size
        for name, left in self.left.items():
            free -= (moved := max(0.0, min(left, free)))
            self.left[name] -= moved

    def wait(self, name: str) -> float:
        """Cycles until a copy is done, and with it those before it."""
        waited = 0.0
        while name in self.left:
            waited += self.left.pop(next(iter(self.left))) / self.rate
        return waited


class Module:
    """The computations of a program.

    >>> Module(compiled.as_text()).costs(assumed_trips=[32, 6])
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self.computations: dict[str, list[Instruction]] = {}
        self.entry = ""
        current = ""
        for line in text.splitlines():
            if line.startswith((" ", "\t")):
                if current and (one := _instruction(line)):
                    self.computations[current].append(one)
            elif line.rstrip().endswith("{") and "->" in line:
                found = re.match(r"(ENTRY )?%?([\w.\-]+)", line)
                assert found is not None
                current = found[2]
                self.computations[current] = []
                self.entry = current if found[1] else self.entry
            elif re.match(
                r"\}(,|$)", line
            ):  # not `}}`: what a kernel says of itself has lines of its own
                current = ""

    @cached_property
    def _by_name(self) -> dict[str, Instruction]:
        return {one.name: one for some in self.computations.values() for one in some}

    @cached_property
    def _frames(self) -> dict[int, tuple[int, int]]:
        """Stack frame -> (its location, its parent, 0 for none)."""
        return {
            int(a): (int(b), int(c) - 1)
            for a, b, c in re.findall(
                r"^(\d+) \{file_location_id=(\d+)(?: parent_frame_id=(\d+))\}",
                self.text,
                re.MULTILINE,
            )
        }

    @cached_property
    def _locations(self) -> dict[int, str]:
        """Location -> `model/linear.py:29`."""
        head = self.text.partition("\n%")[0]
        names = dict(
            re.findall(
                r'^(\d+) "([^"]*)"$',
                head.partition("FileNames")[2].partition("FunctionNames")[0],
                re.MULTILINE,
            )
        )
        return {
            int(a): _place(names.get(b, ""), line)
            for a, b, line in re.findall(
                r"^(\d+) \{file_name_id=(\d+) function_name_id=\d+ line=(\d+)", head, re.MULTILINE
            )
        }

    def source(self, one: Instruction) -> str:
        """The line of code that made an operation, with the one that called it, and the operation's
        name."""
        name = re.search(r'op_name="([^"]*)"', one.attributes)
        if name is None and one.op == "fusion":  # nameless, as of several: the last that has a name
            inside = [
                i
                for i in self.computations.get(one.named("calls"), [])
                if "op_name=" in i.attributes
            ]
            return self.source(inside[-1]) if inside else one.op
        lines: list[str] = []
        if frame := re.search(r"stack_frame_id=(\d+)", one.attributes):
            number, seen = int(frame[1]), set()
            while number in self._frames and number not in seen and len(lines) < 2:
                seen.add(number)
                location, number = self._frames[number]
                place = self._locations.get(location, "")
                lines += [place] if place and place not in lines else []
        elif line := re.search(r'source_file="([^"]*)" source_line=(\d+)', one.attributes):
            lines = [place] if (place := _place(line[1], line[2])) else []
        last = name[1].rpartition("/")[2] if name else one.op
        return f"{' < '.join(lines)} {last}" if lines else last

    def costs(self, assumed_trips: Sequence[float] = (), memory_rate: float = 0.0) -> Costs:
        """The costs of one run. `assumed_trips`: of loops without a known trip count, the outermost
        first. `memory_rate`: bytes a cycle of a TPU's memory; `cycles` then hold what waits for
        copies."""
        found = Costs()
        self._rate = memory_rate
        self._visit(self.entry, 1.0, tuple(assumed_trips), found, set())
        largest: dict[tuple[str, str], int] = {}
        for bytes_, shape, source in found.largest:
            largest[shape, source] = bytes_
        found.largest = sorted(((size, *key) for key, size in largest.items()), reverse=True)[:20]
        return found

    def _visit(
        self, name: str, times: float, trips: tuple[float, ...], found: Costs, channels: set[str]
    ) -> None:
        instructions = self.computations.get(name, [])
        shapes, copies = {one.name: one.shape for one in instructions}, _Copies(self._rate)
        for one in instructions:
            before = sum(found.cycles.values()), found.memory
            self._visit_one(one, shapes, name, times, trips, found, channels)
            copies.beside(
                (sum(found.cycles.values()) - before[0]) / times, (found.memory - before[1]) / times
            )
            if one.op in _COPIES and self._rate:
                copies.left[one.name] = (size := _copied_bytes(one))
                found.memory += times * size
            elif one.op.endswith("-done") and (waited := copies.wait(one.operands[0])):
                source = f"waits for {self.source(one)}"
                found.cycles[source] = found.cycles.get(source, 0) + times * waited

    def _visit_one(
        self,
        one: Instruction,
        shapes: Mapping[str, str],
        name: str,
        times: float,
        trips: tuple[float, ...],
        found: Costs,
        channels: set[str],
    ) -> None:
        if one.op == "while":
            self._visit_loop(one, times, trips, found, channels)
            return
        self._collective(one, one, name, times, found, channels)
        cycles = re.search(r'"estimated_cycles":"(\d+)"', one.attributes)
        # The largest integer stands where the compiler has no estimate, as of products with 8-bit
        # weights on v6e.
        is_known = cycles and int(cycles[1]) < 2**62
        if cycles and is_known:
            found.cycles[self.source(one)] = found.cycles.get(self.source(one), 0) + times * int(
                cycles[1]
            )
        if one.op in ("call", "conditional", "async-start"):
            called = [*self._called(one)]
            if one.op == "conditional":  # one of its branches runs: that which makes most
                called = [
                    max(
                        called,
                        key=lambda name: sum(inner.bytes for inner in self.computations[name]),
                    )
                ]
            for inside in called:
                self._visit(inside, times, trips, found, channels)
        elif one.op in ("fusion", "call-start"):  # TPU: the second is run by a SparseCore
            where = one.named("calls") or one.named("to_apply")
            for inner in self._inside(where):
                self._collective(inner, one, where, times, found, channels)
        if one.op not in _FREE and not one.op.endswith("-done"):
            operation = self._operation(one, shapes, times, found, trips)
            if one.op.removesuffix("-start") not in COLLECTIVES:
                found.operations.append(operation)
                found.unknown += [operation] * bool(cycles and not is_known)

    def _visit_loop(
        self,
        one: Instruction,
        times: float,
        trips: tuple[float, ...],
        found: Costs,
        channels: set[str],
    ) -> None:
        count = self.trip_count(one)
        if count is None:
            count, trips = (trips[0], trips[1:]) if trips else (1, ())
            found.assumed.append(f"{self.source(one)}: {count:g} times")
            found.awaited += times * count
        for part in ("condition", "body"):
            self._visit(one.named(part), times * count, trips, found, channels)

    def trip_count(self, loop: Instruction) -> int | None:
        """How often a loop runs, where the program says it."""
        if known := re.search(r'known_trip_count":\{"n":"(\d+)"', loop.attributes):
            return int(known[1])
        condition = self.computations.get(loop.named("condition"), [])
        by_name = {one.name: one for one in condition}
        root = next((one for one in condition if one.root), None)
        # `i < constant` from 0, as JAX and XLA make counted loops.
        if root is None or root.op != "compare" or "direction=LT" not in root.attributes:
            return None
        counter, bound = (by_name.get(operand) for operand in root.operands)
        number = _constant(bound)
        return None if number is None else -(-number // self._step(loop, counter))

    def _step(self, loop: Instruction, counter: Instruction | None) -> int:
        """What a loop adds to its counter: 2 where XLA has unrolled a product with the exchange of
        its parts."""
        body = {one.name: one for one in self.computations.get(loop.named("body"), [])}
        root = next((one for one in body.values() if one.root), None)
        index = re.search(r"index=(\d+)", counter.attributes) if counter else None
        if root is None or root.op != "tuple" or index is None:
            return 1
        last = body.get(root.operands[int(index[1])])
        steps = (
            [_constant(body.get(name)) for name in last.operands]
            if last and last.op == "add"
            else []
        )
        return next(filter(None, steps), 1)

    def _called(self, one: Instruction) -> Iterator[str]:
        for attribute in ("to_apply", "calls", "called_computations"):
            if name := one.named(attribute):
                yield name
        if branches := re.search(r"branch_computations=\{([^}]*)\}", one.attributes):
            yield from (name.strip().lstrip("%") for name in branches[1].split(","))

    def _inside(self, name: str) -> Iterator[Instruction]:
        """The instructions of a fused computation, and of those that it calls."""
        for one in self.computations.get(name, []):
            yield one
            if one.op in ("fusion", "call", "async-start"):
                yield from (inner for called in self._called(one) for inner in self._inside(called))

    def _collective(
        self,
        one: Instruction,
        around: Instruction,
        where: str,
        times: float,
        found: Costs,
        channels: set[str],
    ) -> None:
        """Adds one if it is a collective, of the computation `where`, inside of the fusion
        `around`."""
        kind = one.op.removesuffix("-start")
        if kind not in COLLECTIVES:
            return
        # TPU: one gather may be split over several fusions that compute meanwhile; all its parts
        # have one channel.
        channel = re.search(r"channel_id=(\d+)", one.attributes)
        key = f"{channel[1]} {one.op} {times}" if channel else ""
        if key and key in channels:
            return
        channels.add(key)
        groups = groups_text(one.attributes)
        size = _whole_bytes(one, kind, max(1, group_size(groups)))
        if kind == "all-reduce" and where.startswith("all-reduce-scatter"):
            kind = "reduce-scatter"  # TPU: a fusion that keeps a part of the sum
        # The parts of a fusion may be unnamed, and a sum that the compiler made: what it sums is
        # not.
        made = self._by_name.get(around.operands[0], around) if around.operands else around
        sources = [self.source(other) for other in (one, around, made)]
        source = next((text for text in sources if " " in text), sources[0])
        found.collectives.append(Collective(kind, size, times, groups, source))

    def _operation(
        self,
        one: Instruction,
        shapes: Mapping[str, str],
        times: float,
        found: Costs,
        trips: tuple[float, ...],
    ) -> tuple[float, float, float]:
        """(times, bytes that one operation reads and writes, FLOPs of its products). Of decoding's
        kernel the first of `trips` is the share that it reads of its caches."""
        is_decoding = one.op == "custom-call" and "/decode_kernel/" in one.attributes
        share = (*trips, 1.0)[0] if is_decoding else 1.0
        flops, size, source = 0.0, share * self._bytes(one, shapes), self.source(one)
        if one.op == "fusion":
            flops = sum(
                self._dot_flops(inner, one.named("calls"))
                for inner in self._inside(one.named("calls"))
            )
        elif one.op in ("dot", "convolution", "custom-call"):
            flops = _product_flops(one, shapes)
        if f'"{_KERNEL}"' in one.attributes:
            found.in_kernels += times * size
        if self._rate and one.op not in _COPIES:
            off_chip = {name: _ON_CHIP.sub("", shapes.get(name, "")) for name in one.operands}
            moved = (
                times
                * share
                * self._bytes(one._replace(shape=_ON_CHIP.sub("", one.shape)), off_chip)
            )
            found.memory += moved
            if is_decoding:  # which has no cycles: as long as it reads
                found.in_kernels += moved
                found.cycles[source] = found.cycles.get(source, 0) + moved / self._rate
        found.bytes[source] = found.bytes.get(source, 0) + times * size
        if arrays := _ARRAY.findall(one.shape):
            kind, sizes = max(arrays, key=lambda array: sum(arrays_of(f"{array[0]}[{array[1]}]")))
            shape = f"{kind}[{sizes}]"
            found.largest.append((sum(arrays_of(shape)), shape, source))
        return times, size, flops

    def _bytes(self, one: Instruction, shapes: Mapping[str, str]) -> int:
        """Bytes that an operation reads and writes, of arrays of these shapes."""
        written, read = one.bytes, [sum(arrays_of(shapes.get(name, ""))) for name in one.operands]
        if one.op == "fusion":
            written, read = self._fused_bytes(one, read)
        elif one.op in _SLICES:
            read = [written]
        elif one.op in _UPDATES:
            written = read[_UPDATES[one.op]]
            read = [written]
        elif one.op == "copy-start":
            written = sum(read)
        elif one.op == "custom-call" and f'"{_KERNEL}"' in one.attributes:
            written -= sum(read[number] for number in _aliased(one))
        elif one.op.endswith("-start"):  # its shape holds what it reads, too
            written = sum(arrays_of(_results(one)))
        return written + sum(read)

    def _fused_bytes(self, one: Instruction, read: list[int]) -> tuple[int, list[int]]:
        """(written, read) of a fusion: of an operand that it only slices, the slices; of a result
        that it updates in place, the update."""
        users: dict[str, list[Instruction]] = {}
        for inner in (inside := self.computations.get(one.named("calls"), [])):
            for operand in inner.operands:
                users.setdefault(operand, []).append(inner)
        written, read = one.bytes, list(read)
        for inner in inside:
            if inner.op != "parameter" or not inner.operands or not inner.operands[0].isdigit():
                continue
            number, uses = int(inner.operands[0]), _through(inner.name, users)
            if number < len(read) and uses and all(use.op in _UPDATES for use in uses):
                update = sum(self._by_name[use.operands[_UPDATES[use.op]]].bytes for use in uses)
                written, read[number] = max(0, written - read[number]) + update, 0
            elif number < len(read) and (sliced := _through(inner.name, users, _ELEMENTWISE)):
                read[number] = min(read[number], sum(self._needed(use, inner) for use in sliced))
        return written, read

    def _needed(self, use: Instruction, operand: Instruction) -> int:
        """Bytes of an operand that an operation of a fusion reads, which may be a fusion itself."""
        if use.op != "fusion" or operand.name not in use.operands:
            return use.bytes if use.op in _SLICES else operand.bytes
        return sum(
            self._fused_bytes(
                use, [operand.bytes * (name == operand.name) for name in use.operands]
            )[1]
        )

    def _dot_flops(self, inner: Instruction, computation: str) -> float:
        return (
            _product_flops(inner, {one.name: one.shape for one in self._inside(computation)})
            if inner.op in ("dot", "convolution")
            else 0.0
        )


def _aliased(one: Instruction) -> list[int]:
    """The operands that a custom call writes in place."""
    found = re.search(r"output_to_operand_aliasing=\{(.*?)\}, \w+=", one.attributes)
    return [int(number) for number in re.findall(r"\((\d+),", found[1])] if found else []


def _whole_bytes(one: Instruction, kind: str, devices: int) -> int:
    """Bytes of the whole arrays of a collective: what a gather makes, what a reduce-scatter
    takes."""
    if kind != "reduce-scatter":
        return sum(arrays_of(_results(one)))
    # Its start shows the operands, whole; else only the part that each of the group keeps is shown.
    if one.op.endswith("-start") and (parts := _parts(one.shape)):
        return sum(arrays_of(parts[0]))
    return devices * sum(arrays_of(one.shape))


def _results(one: Instruction) -> str:
    """The shape of what an operation makes. That of a `-start` is `(operands, results, ...)`, each
    one array or several in parentheses, and of an `all-reduce-start` the results alone."""
    if (
        one.op.endswith("-start")
        and one.op != "all-reduce-start"
        and len(parts := _parts(one.shape)) > 1
    ):
        return parts[1]
    return one.shape


def _copied_bytes(one: Instruction) -> int:
    """Bytes that a copy moves through the device's memory: in, out, or both where neither side is
    on the chip."""
    first, second, *_ = _parts(one.shape)
    moved = sum(arrays_of(first if one.op == "copy-start" else second))
    return moved if "S(1)" in first + second else 2 * moved


def _parts(shape: str) -> list[str]:
    """The parts of a tuple's shape; empty for an array.

    >>> _parts("((f32[8]{0}, f32[16]{0}), (f32[2]{0}, f32[4]{0}))")
    ['(f32[8]{0}, f32[16]{0})', '(f32[2]{0}, f32[4]{0})']
    """
    parts, depth = [""], 0
    for letter in shape[1:-1] if shape.startswith("(") else "":
        depth += {"(": 1, "[": 1, "{": 1, ")": -1, "]": -1, "}": -1}.get(letter, 0)
        if letter == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return [part.strip() for part in parts if part]


def _through(
    name: str, users: Mapping[str, list[Instruction]], more: frozenset[str] = frozenset()
) -> list[Instruction]:
    """The users of a value, seen through bitcasts and operations of `more` kinds."""
    found: list[Instruction] = []
    for use in users.get(name, []):
        is_seen_through = use.op in _BITCASTS | more and use.name in users
        found += _through(use.name, users, more) if is_seen_through else [use]
    return found


def _constant(one: Instruction | None) -> int | None:
    """The value of a constant whole number."""
    return (
        int(one.operands[0]) if one and one.op == "constant" and one.operands[0].isdigit() else None
    )


def _product_flops(one: Instruction, shapes: Mapping[str, str]) -> float:
    """Operations of a matrix product: two for each element of the result and of the contracted
    dimensions."""
    sizes = (
        [
            [int(n) for n in dims.split(",") if n]
            for _, dims in _ARRAY.findall(shapes.get(one.operands[0], ""))
        ]
        if one.operands
        else []
    )
    contracted = re.search(
        r'lhs_contracting_dim(?:ension)?s"?[=:][{\[]([\d,"]*)[}\]]', one.attributes
    )
    results = _ARRAY.findall(one.shape)
    if contracted and sizes and results:
        inner = math.prod(
            sizes[0][int(n)] for n in re.findall(r"\d+", contracted[1]) if int(n) < len(sizes[0])
        )
        return 2.0 * inner * math.prod(int(n) for n in results[0][1].split(",") if n)
    return 0.0


def _instruction(line: str) -> Instruction | None:
    found = re.match(r"\s+(ROOT )?%?([\w.\-]+) = ", line)
    if found is None:
        return None
    rest = line[found.end() :]
    end = _closing(rest, 0) if rest.startswith("(") else rest.find(" ")
    if rest.startswith("("):
        shape, rest = rest[: end + 1], rest[end + 1 :].lstrip()
    else:
        shape, rest = rest[:end], rest[end + 1 :]
    op, _, _ = rest.partition("(")
    end = _closing(rest, len(op))
    inside = rest[len(op) + 1 : end]
    operands = tuple(re.findall(r"%([\w.\-]+)", inside)) or tuple(
        filter(None, (part.strip() for part in inside.split(",")))
    )
    return Instruction(found[2], shape, op.strip(), operands, rest[end + 1 :], bool(found[1]))


def _closing(text: str, start: int) -> int:
    """The place of the parenthesis that closes the one at `start`."""
    depth = 0
    for place in range(start, len(text)):
        depth += {"(": 1, ")": -1}.get(text[place], 0)
        if depth == 0:
            return place
    return len(text)


def _place(file: str, line: str) -> str:
    """`model/linear.py:29`; empty outside of the package, and for what calls programs."""
    name = file.rpartition("/shoal/")[2] if "/shoal/" in file else ""
    return f"{name}:{line}" if name and not name.startswith(("mesh/", "run/")) else ""
