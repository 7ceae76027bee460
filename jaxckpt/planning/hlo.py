"""What a scheduled XLA program does with host memory: its copies, what runs beside them, and what must not be there."""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

HOST = "S(5)"
"""XLA's memory space of the host, as its text names it in a layout"""

_BITS = {"pred": 8, "token": 0, "opaque": 0, "bf16": 16, "c64": 64, "c128": 128}
# Costs no time on the device: names, views, and the two ends of what runs beside.
_FREE = {"parameter", "constant", "get-tuple-element", "tuple", "bitcast", "opt-barrier", "after-all", "partition-id"}
_COLLECTIVES = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")
_ARRAY = re.compile(r"([a-z]\w*)\[([\d,<=]*)\](\{[^}]*\})?")
_CALLED = re.compile(r"(?:body|condition|to_apply|calls|true_computation|false_computation)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')


@dataclass(frozen=True)
class HostCopy:
    """A transfer between host and device in the schedule of one device."""

    name: str
    direction: Literal["h2d", "d2h"]
    nbytes: int
    times: int
    """how often a step makes it: the trip count of the loops it is in, where XLA knows it"""
    is_overlapped: bool
    """whether something computes, or the other direction copies, between its start and its end"""
    beside_compute: bool
    """whether something computes between its start and its end"""


@dataclass(frozen=True)
class HostUse:
    copies: tuple[HostCopy, ...]
    host_compute: tuple[str, ...]
    """instructions that XLA runs on the host, or that would make a value in host memory without being a copy"""
    host_collectives: tuple[str, ...]
    """collectives on host memory"""

    def total(self, direction: str) -> tuple[int, int]:
        """(number of copies, bytes) a step in the direction 'h2d' or 'd2h'."""
        found = [c for c in self.copies if c.direction == direction]
        return sum(c.times for c in found), sum(c.times * c.nbytes for c in found)

    def exposed_bytes(self, direction: str) -> int:
        """Of the copies in one direction beside which nothing computes."""
        return sum(c.times * c.nbytes for c in self.copies if c.direction == direction and not c.beside_compute)


@dataclass(frozen=True)
class _Instruction:
    name: str
    shape: str
    opcode: str
    operands: tuple[str, ...]
    text: str


def host_use(text: str) -> HostUse:
    """Reads the text of a scheduled module (`is_scheduled=true`), every computation that its entry reaches."""
    computations, entry = _computations(text)
    copies: list[HostCopy] = []
    compute: dict[str, None] = {}
    collectives: dict[str, None] = {}
    for name, times in _reached(computations, entry).items():
        body = computations[name]
        copies += _copies(body, times)
        for ins in body:
            if "HostExecute" in ins.text or '_xla_compute_type="host"' in ins.text:
                compute[f"{ins.name} ({ins.opcode})"] = None
            elif ins.opcode.startswith(_COLLECTIVES) and HOST in ins.shape:
                collectives[f"{ins.name} ({ins.opcode})"] = None
    return HostUse(tuple(copies), tuple(compute), tuple(collectives))


def shape_bytes(shape: str, *, of: Literal["all", "host", "device"] = "all") -> int:
    """Bytes of an array or tuple in HLO's notation, of all its arrays or of those in one memory."""
    total = 0
    for dtype, dims, layout in _ARRAY.findall(shape):
        if of != "all" and (HOST in layout) != (of == "host"):
            continue
        count = math.prod(int(d.lstrip("<=")) for d in dims.split(",") if d)
        total += -(-count * _bits(dtype) // 8)
    return total


def _bits(dtype: str) -> int:
    if dtype in _BITS:
        return _BITS[dtype]
    found = re.match(r"[suf](\d+)", dtype)
    return int(found[1]) if found else 0


def _computations(text: str) -> tuple[dict[str, list[_Instruction]], str]:
    found: dict[str, list[_Instruction]] = {}
    entry = ""
    current: list[_Instruction] | None = None
    for line in text.splitlines():
        if current is None:
            head = re.match(r"(ENTRY )?%?([\w.\-]+) \(.*\{$", line)
            if head:
                current = found[head[2]] = []
                entry = head[2] if head[1] else entry
        elif line.startswith("}"):
            current = None
        elif instruction := _instruction(line):
            current.append(instruction)
    return found, entry


def _instruction(line: str) -> _Instruction | None:
    name, equals, rest = line.strip().removeprefix("ROOT ").partition(" = ")
    if not equals:
        return None
    end = _closing(rest, 0) + 1 if rest.startswith("(") else rest.index(" ")
    opcode, _, arguments = rest[end:].strip().partition("(")
    operands = re.findall(r"%([\w.\-]+)", arguments[: _closing(arguments, 1)])
    return _Instruction(name.lstrip("%"), rest[:end], opcode, tuple(operands), rest)


def _closing(text: str, depth: int) -> int:
    """Where the parenthesis ends that is open after `depth` of them."""
    for found in re.finditer(r"[()]", text):
        depth += 1 if found[0] == "(" else -1
        if depth == 0:
            return found.start()
    return len(text)


def _reached(computations: dict[str, list[_Instruction]], entry: str) -> dict[str, int]:
    """{computation that runs as a schedule of its own: how often a step runs it}; bodies of fusions are no schedules."""
    times: dict[str, int] = {}

    def visit(name: str, count: int) -> None:
        times[name] = times.get(name, 0) + count
        for ins in computations[name]:
            if ins.opcode not in ("while", "call", "conditional", "call-start", "async-start"):
                continue
            trips = _TRIPS.search(ins.text)
            for called in _called(ins):
                if called in computations:
                    visit(called, count * (int(trips[1]) if trips else 1))

    visit(entry, 1)
    return times


def _called(ins: _Instruction) -> Iterator[str]:
    yield from _CALLED.findall(ins.text)
    for names in _BRANCHES.findall(ins.text):
        yield from re.findall(r"%?([\w.\-]+)", names)


def _copies(body: list[_Instruction], times: int) -> Iterator[HostCopy]:
    shapes = {ins.name: ins.shape for ins in body}
    done = {ins.operands[0]: i for i, ins in enumerate(body) if ins.opcode.endswith("-done") and ins.operands}
    moves = {ins.name: move for ins in body if (move := _move(ins, shapes))}
    for i, ins in enumerate(body):
        if ins.name not in moves:
            continue
        direction, nbytes = moves[ins.name]
        between = body[i + 1 : done.get(ins.name, i + 1)]
        computes = any(_computes(other, shapes, moves) for other in between)
        other_way = any(moves[other.name][0] != direction for other in between if other.name in moves)
        yield HostCopy(ins.name, direction, nbytes, times, computes or other_way, computes)


def _move(ins: _Instruction, shapes: dict[str, str]) -> tuple[Literal["h2d", "d2h"], int] | None:
    """(direction, bytes) where an instruction begins to move data between host and device."""
    if ins.opcode in _FREE or ins.opcode.endswith("-done") or '_xla_compute_type="host"' in ins.text:
        return None
    if ins.opcode in ("while", "call", "conditional") or ins.opcode.startswith(_COLLECTIVES):
        return None
    operands = [shapes[name] for name in ins.operands if name in shapes]
    result = _result(ins)
    from_host, to_host = any(HOST in s for s in operands), HOST in result
    if from_host and not to_host:
        return "h2d", shape_bytes(result)
    if to_host and any(HOST not in s for s in operands):
        # An update in place names the whole host array too: what moves is what comes from the device.
        return "d2h", min(shape_bytes(result), sum(shape_bytes(s, of="device") for s in operands))
    return None


def _result(ins: _Instruction) -> str:
    """The shape of what an instruction makes; of an asynchronous one, of what its end will hand over."""
    if not ins.opcode.endswith("-start"):
        return ins.shape
    parts = _elements(ins.shape)
    return parts[0] if ins.opcode == "copy-start" else parts[1] if len(parts) > 1 else ins.shape


def _elements(shape: str) -> list[str]:
    """The elements of a tuple's shape."""
    parts, depth, start = [], 0, 1
    for found in re.finditer(r"[(){}\[\],]", shape):
        if found[0] in "({[":
            depth += 1
        elif found[0] in ")}]":
            depth -= 1
        if (found[0] == "," and depth == 1) or depth == 0:
            parts.append(shape[start : found.start()].strip())
            start = found.end()
    return parts


def _computes(ins: _Instruction, shapes: dict[str, str], moves: Mapping[str, object]) -> bool:
    """Whether an instruction keeps the device busy with more than a scalar."""
    if ins.opcode in _FREE or ins.opcode.endswith(("-start", "-done")) or ins.name in moves:
        return False
    if ins.opcode in ("while", "call", "conditional", "custom-call"):
        return True
    return max([shape_bytes(ins.shape), *(shape_bytes(shapes.get(name, "")) for name in ins.operands)]) > 16
