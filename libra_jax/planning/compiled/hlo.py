"""Reads the text of a program that XLA has optimised: computations, instructions, and how often each one runs.

XLA's Python bindings give neither shapes nor attributes of an instruction, and its cost analysis does not exist for a
compiled GPU program, so this module reads the printed text. The grammar is that of `HloModule::ToString`.
"""

from __future__ import annotations

import collections
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from libra_jax import protocols

_BYTES = {
    "pred": 1.0,
    **dict.fromkeys(("s4", "u4", "f4e2m1fn"), 0.5),
    **{f"{kind}{bits}": bits / 8 for kind in "suf" for bits in (8, 16, 32, 64)},
    "bf16": 2.0,
    "c64": 8.0,
    "c128": 16.0,
}
"""Bytes of an element; every float8 variant has one byte."""

_SHAPE = re.compile(r"\b(pred|bf16|c64|c128|[suf]\d+[a-z0-9]*)\[([\d,]*)\]")
_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\) -> .* \{$")
_OPCODE = re.compile(r"\s*([\w\-]+)\(")
_NAME = re.compile(r"%([\w.\-]+)")
_LABEL = re.compile(r'op_name="([^"]*)"')
_TRIPS = re.compile(r'known_trip_count":\{"n":"(\d+)"')
_CONSTANT = re.compile(r"^[su]32\[\]\S* constant\((\d+)\)")
_CALLED = re.compile(r"\b(?:calls|to_apply|true_computation|false_computation)=%?([\w.\-]+)")
_CALLED_LIST = re.compile(r"\b(?:branch_computations|called_computations)=\{([^}]*)\}")
_MESH = re.compile(r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\((\[.*?)\))? *\{([^}]*)\}")
_IOTA = re.compile(r"\[([\d,]+)\](?:<=\[([\d,]+)\])?(?:T\(([\d,]+)\))?")
_GROUPS = re.compile(r"replica_groups=(\{\{.*?\}\}|\{\}|\[[^ ]*?\](?:T\([\d,]+\))?)(?:, |$)")
# XLA's TPU compiler writes a kernel's metadata in lines of their own, in the middle of the instruction.
_CONTINUED = re.compile(r'\n(?="|\}\})')
_PAIRS = re.compile(r"source_target_pairs=\{(\{.*?\})\}")


@dataclass(frozen=True)
class ArrayShape:
    """An array's element type, in XLA's spelling, and its sizes."""

    dtype: str
    sizes: tuple[int, ...]

    @property
    def elements(self) -> int:
        """Number of elements."""
        return math.prod(self.sizes)

    @property
    def bytes(self) -> float:
        """Bytes of the array, without padding."""
        return self.elements * _BYTES.get(self.dtype, 1.0)


@dataclass(frozen=True)
class Instruction:
    """One instruction of a computation.

    Attributes:
      name: name in the text, unique in its computation.
      opcode: XLA's name of the operation, such as "dot" or "all-gather-start".
      shapes: arrays of the result; several for a tuple.
      operands: names of the operands.
      attributes: text behind the operands.
      text: the whole line behind the name.
    """

    name: str
    opcode: str
    shapes: tuple[ArrayShape, ...]
    operands: tuple[str, ...]
    attributes: str
    text: str

    @property
    def label(self) -> str:
        """Path of the JAX operation that the instruction comes from; empty if XLA added the instruction."""
        match = _LABEL.search(self.attributes)
        return match[1] if match else ""


@dataclass(frozen=True)
class Loop:
    """A `while` loop.

    Attributes:
      body: name of the body's computation.
      trips: iterations of one execution; 1 if the text does not give their number.
      has_trip_count: the text gives the number of iterations.
      label: path of the JAX operation that the loop comes from.
    """

    body: str
    trips: float
    has_trip_count: bool
    label: str


@dataclass(frozen=True)
class InstructionPlace:
    """Where an instruction stands.

    Attributes:
      computation: name of its computation.
      executions: how often one run of the program executes the computation.
      loops: bodies of the loops around the computation, outermost first.
    """

    computation: str
    executions: float
    loops: tuple[str, ...]


@dataclass(frozen=True)
class _Call:
    callee: str
    times: float
    loop: Loop | None


class Module:
    """A parsed program.

    Attributes:
      computations: instructions by computation, in the order of the text.
      loops: all `while` loops by the name of their body.
      places: places of all computations that run; a computation with several callers has several.
      fused: names of the computations inside fusions; their intermediate results are never in memory.
    """

    def __init__(self, text: str) -> None:
        """Parses the text.

        Raises:
          DataError: the text has no entry computation, so it is no HLO module.
        """
        self.computations: dict[str, list[Instruction]] = {}
        entry = ""
        current: list[Instruction] | None = None
        for line in _CONTINUED.sub("", text).splitlines():
            header = _HEADER.match(line) if line.endswith("{") and not line.startswith(" ") else None
            if header is not None:
                current = self.computations.setdefault(header[2], [])
                entry = header[2] if header[1] else entry
            elif line == "}":
                current = None
            elif current is not None and (instruction := _instruction(line)) is not None:
                current.append(instruction)
        if not entry:
            raise protocols.DataError("the text is no HLO module: it has no ENTRY computation")
        self._shapes = {
            name: {instruction.name: instruction.shapes for instruction in body}
            for name, body in self.computations.items()
        }
        self.loops: dict[str, Loop] = {}
        calls = {name: list(self._calls(body)) for name, body in self.computations.items()}
        self.places = list(_places(entry, calls))
        self.fused = {
            name
            for body in self.computations.values()
            for instruction in body
            if instruction.opcode == "fusion"
            for name in _CALLED.findall(instruction.attributes)
        }

    def instructions(self) -> Iterator[tuple[InstructionPlace, Instruction]]:
        """Yields every instruction that runs, with its place."""
        for place in self.places:
            for instruction in self.computations.get(place.computation, ()):
                yield place, instruction

    def operands(self, place: InstructionPlace, instruction: Instruction) -> list[ArrayShape]:
        """Returns the arrays of the operands."""
        return [shape for name in instruction.operands for shape in self._shapes[place.computation].get(name, ())]

    def _calls(self, instructions: Sequence[Instruction]) -> Iterator[_Call]:
        """Yields the calls that a computation's instructions make, and enters its loops in `loops`."""
        for instruction in instructions:
            if instruction.opcode == "while":
                body, condition = (
                    re.search(rf"\b{part}=%?([\w.\-]+)", instruction.attributes)[1]  # type: ignore[index]
                    for part in ("body", "condition")
                )
                match = _TRIPS.search(instruction.attributes)
                trips = float(match[1]) if match else None
                # TPU's text has no trip count: there it is the condition's only constant.
                constants = [_CONSTANT.match(item.text) for item in self.computations.get(condition, ())]
                counts = [float(item[1]) for item in constants if item]
                if trips is None and len(counts) == 1:
                    # XLA's TPU compiler unrolls its loops of windowed products by two.
                    trips = counts[0] / (2 if "windowed_dot_general" in body else 1)
                loop = Loop(body, 1.0 if trips is None else trips, trips is not None, instruction.label)
                self.loops[body] = loop
                yield _Call(body, loop.trips, loop)
                yield _Call(condition, 1.0, None)
                continue
            for name in _CALLED.findall(instruction.attributes):
                yield _Call(name, 1.0, None)
            for names in _CALLED_LIST.findall(instruction.attributes):
                for name in names.split(","):
                    yield _Call(name.strip().lstrip("%"), 1.0, None)


def device_groups(instruction: Instruction, devices: int) -> list[list[int]]:
    """Returns the groups of devices that a collective joins, by their positions in the mesh.

    Args:
      devices: devices of the program; an empty list of groups means all of them.

    Raises:
      DataError: the groups are written in an unknown form.
    """
    text = instruction.attributes
    if pairs := _PAIRS.search(text):
        return [sorted({int(number) for number in pair.split(",")}) for pair in re.findall(r"\{([\d,]+)\}", pairs[1])]
    if mesh := _MESH.search(text):
        return _mesh_groups(mesh[1], mesh[2], mesh[3])
    match = _GROUPS.search(text)
    if "replica_groups=" not in text or (match and match[1] == "{}"):
        return [list(range(devices))]
    if match is None:
        raise protocols.DataError(f"unknown form of replica groups: {text.partition('replica_groups=')[2][:80]}")
    if match[1].startswith("{"):
        return [[int(number) for number in group.split(",")] for group in re.findall(r"\{([\d,]+)\}", match[1])]
    if (grid := _iota(match[1])) is not None and grid.ndim == 2:
        return [[int(number) for number in row] for row in grid]
    raise protocols.DataError(f"unknown form of replica groups: {match[1][:80]}")


def _mesh_groups(axes: str, ids: str | None, grouped: str) -> list[list[int]]:
    """Reads groups written as axes of a mesh: `mesh['a'=4,'b'=2] {'b'}` joins the devices that differ in `b` only."""
    sizes = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", axes)}
    order = None if ids is None else _iota(ids)
    if ids is not None and order is None:
        raise protocols.DataError(f"unknown form of replica groups: {ids[:80]}")
    flat = np.arange(math.prod(sizes.values())) if order is None else order.reshape(-1)
    chosen = re.findall(r"'([^']+)'(:\(\d+\)\d+)?", grouped)
    if any(part for _, part in chosen):
        raise protocols.DataError(f"unknown form of replica groups: part of an axis, {grouped[:80]}")
    names = [name for name, _ in chosen]
    grid = flat.reshape(tuple(sizes.values()))
    # With the grouped axes last, each row of the flattened grid is a group.
    other_axes = [index for index, name in enumerate(sizes) if name not in names]
    group_axes = [list(sizes).index(name) for name in names]
    width = math.prod(sizes[name] for name in names)
    return [[int(number) for number in row] for row in grid.transpose(*other_axes, *group_axes).reshape(-1, width)]


def _iota(text: str) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]] | None:
    """Reads `[4,2]<=[2,4]T(1,0)`: a range in the shape behind the arrow, transposed, in the shape before it."""
    match = _IOTA.match(text)
    if match is None:
        return None
    result, source, order = (tuple(map(int, group.split(","))) if group else () for group in match.groups())
    # Both the arrow and the transposition may be missing.
    grid = np.arange(math.prod(result)).reshape(source or result)
    return (grid.transpose(order) if order else grid).reshape(result)


def _instruction(line: str) -> Instruction | None:
    name, separator, text = line.strip().removeprefix("ROOT ").partition(" = ")
    if not separator:
        return None
    # A tuple's type ends at its parenthesis, because it has spaces inside; any other type ends at the first space.
    end = _closing(text, 0) + 1 if text.startswith("(") else text.find(" ")
    opcode = _OPCODE.match(text, end)
    if end <= 0 or opcode is None:
        return None
    stop = _closing(text, opcode.end() - 1)
    return Instruction(
        name=name.lstrip("%"),
        opcode=opcode[1],
        shapes=tuple(
            ArrayShape(dtype, tuple(int(size) for size in sizes.split(",") if size))
            for dtype, sizes in _SHAPE.findall(text[:end])
        ),
        operands=tuple(_NAME.findall(text, opcode.end(), stop)),
        attributes=text[stop + 1 :],
        text=text,
    )


def _closing(text: str, start: int) -> int:
    """Returns the position of the parenthesis that closes the one at `start`; types nest them."""
    depth = 0
    for position in range(start, len(text)):
        depth += (text[position] == "(") - (text[position] == ")")
        if depth == 0:
            return position
    return len(text)


def _places(entry: str, calls: Mapping[str, Sequence[_Call]]) -> Iterator[InstructionPlace]:
    """Yields the places of all computations that run, callers first; equal places are joined."""
    # A computation is complete once all of its callers are, because calls form no cycle.
    callers = collections.Counter(call.callee for name in calls for call in calls[name])
    counts: dict[str, dict[tuple[str, ...], float]] = collections.defaultdict(dict)
    counts[entry][()] = 1.0
    ready = [name for name in calls if not callers[name]]
    while ready:
        name = ready.pop()
        for call in calls[name]:
            for loops, executions in counts[name].items():
                inner = (*loops, call.callee) if call.loop else loops
                counts[call.callee][inner] = counts[call.callee].get(inner, 0.0) + executions * call.times
            callers[call.callee] -= 1
            if not callers[call.callee] and call.callee in calls:
                ready.append(call.callee)
        for loops, executions in counts[name].items():
            yield InstructionPlace(name, executions, loops)
