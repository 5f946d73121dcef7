"""Reads the text of an optimised program: its computations and instructions. No jax.

The text is that of `compiled.as_text()`: HLO after all passes, in the order in which instructions
run. Shapes carry their layout, as in f32[160,1000]{1,0:T(8,128)S(1)}: the order of dimensions from
the fastest, tiles, and the memory space, which is 0, the main memory, if none is named.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Mapping
from typing import NamedTuple

MAIN_MEMORY = 0

_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\) -> .*\{$")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = (.*)$")
_ARRAY = re.compile(r"([a-z]\w*)\[([\d,<=]*)\](?:\{([^{}]*)\})?")
_NAME = re.compile(r"%([\w.\-]+)")
_BITS = {"pred": 8, "token": 0, "opaque": 0}


@dataclasses.dataclass(frozen=True)
class ArrayShape:
    """One array: its dtype, dimensions, layout and memory space."""

    dtype: str
    dims: tuple[int, ...]
    order: tuple[int, ...] = ()  # dimensions, the fastest first; (): the last is the fastest
    tile: tuple[int, ...] = ()  # of the fastest dimensions, the slowest of them first
    space: int = MAIN_MEMORY

    @functools.cached_property
    def num_bytes(self) -> int:
        """Bytes in memory, dimensions rounded up to whole tiles."""
        order = self.order or tuple(reversed(range(len(self.dims))))
        sizes = [self.dims[axis] for axis in order]
        for place, size in enumerate(reversed(self.tile)):
            if place < len(sizes):
                sizes[place] = -(-sizes[place] // size) * size
        return -(-math.prod(sizes) * _bits(self.dtype) // 8)

    @property
    def main_bytes(self) -> int:
        """Bytes in main memory: `num_bytes`, or 0 elsewhere."""
        return self.num_bytes if self.space == MAIN_MEMORY else 0


class Instruction(NamedTuple):
    """One instruction.

    Attributes:
      shapes: of its result; several if that is a tuple, nested tuples laid flat.
      operands: names of instructions of the same computation.
      text: what follows the operands: attributes, metadata and the backend's configuration.
      argument: what stands between the parentheses: a parameter's number, a constant's value.
    """

    name: str
    opcode: str
    shapes: tuple[ArrayShape, ...]
    operands: tuple[str, ...]
    text: str
    argument: str = ""
    is_tuple: bool = False
    is_root: bool = False

    @property
    def op_name(self) -> str:
        """Path of jax's operations: "jit(burst)/while/body/dot_general"; "" if unknown."""
        return self._first(r'op_name="((?:[^"\\]|\\.)*)"').replace("\\", "")

    @property
    def target(self) -> str:
        """What a custom call calls."""
        return self._first(r'custom_call_target="([^"]*)"')

    @property
    def index(self) -> int:
        """Which element a get-tuple-element takes; which argument a parameter is."""
        if self.opcode == "parameter":
            return int(self.argument)
        return int(self._first(r"\bindex=(\d+)"))

    @property
    def called(self) -> tuple[str, ...]:
        """Computations that it calls: of a while loop the body, of a conditional all branches."""
        for key in ("body", "calls", "to_apply", "called_computations"):
            if found := self._first(rf"\b{key}=\{{?%?([\w.\-]+)"):
                return (found,)
        if found := self._first(r"branch_computations=\{([^}]*)\}"):
            return tuple(_NAME.findall(found))
        # Of a predicate: the branch of "false" is number 0.
        pair = [self._first(rf"\b{key}_computation=%?([\w.\-]+)") for key in ("false", "true")]
        return tuple(filter(None, pair))

    @property
    def branches(self) -> tuple[tuple[str, str], ...]:
        """Computation and operand of each branch of a conditional; of a predicate "false" first."""
        operands = self.operands[1:]
        if not self._first(r"(branch_computations)"):
            operands = operands[::-1]  # true, false
        return tuple(zip(self.called, operands, strict=True))

    @property
    def trip_count(self) -> int | None:
        """Turns of a while loop, where the compiler knows them."""
        found = self._first(r'known_trip_count[":={]+"?n"?:"?(\d+)')
        return int(found) if found else None

    @property
    def condition(self) -> str:
        """The computation that says whether a while loop goes on; "" of other instructions."""
        return self._first(r"\bcondition=%?([\w.\-]+)")

    @property
    def aliases(self) -> dict[int, int]:
        """Results of a custom call that lie where an operand lay, by their number."""
        found = self._first(r"output_to_operand_aliasing=\{((?:\{[^}]*\}: \([^)]*\)(?:, )?)*)\}")
        pairs = re.findall(r"\{(\d*)\}: \((\d+),", found)
        return {int(result or 0): int(operand) for result, operand in pairs}

    def _first(self, pattern: str) -> str:
        found = re.search(pattern, self.text)
        return found.group(1) if found else ""


@dataclasses.dataclass(frozen=True)
class Computation:
    """Instructions in the order in which they run."""

    name: str
    instructions: Mapping[str, Instruction]

    @functools.cached_property
    def root(self) -> Instruction:
        return next(one for one in self.instructions.values() if one.is_root)

    @functools.cached_property
    def parameters(self) -> dict[int, Instruction]:
        """Its parameters, by their number."""
        found = (one for one in self.instructions.values() if one.opcode == "parameter")
        return {one.index: one for one in found}

    @functools.cached_property
    def users(self) -> dict[str, list[Instruction]]:
        """The instructions that read each instruction."""
        found: dict[str, list[Instruction]] = {name: [] for name in self.instructions}
        for one in self.instructions.values():
            for operand in dict.fromkeys(one.operands):
                found[operand].append(one)
        return found


@dataclasses.dataclass(frozen=True)
class Program:
    """All computations of a program, and the name of the one that it begins with."""

    computations: Mapping[str, Computation]
    entry: str


def parse(text: str) -> Program:
    """Returns the program of a text.

    Raises:
      ValueError: the text holds no entry computation, or a line that cannot be read.
    """
    computations: dict[str, Computation] = {}
    entry, current = "", None
    body: dict[str, Instruction] = {}
    for line in text.splitlines():
        if current is None:
            if header := _HEADER.match(line):
                current, body = header.group(2), {}
                entry = current if header.group(1) else entry
        elif line.startswith("}"):
            computations[current] = Computation(current, body)
            current = None
        elif line.strip():
            one = _instruction(line)
            body[one.name] = one
    if entry not in computations:
        raise ValueError("the text holds no entry computation; expected that of as_text().")
    return Program(computations, entry)


def array_shapes(text: str) -> tuple[ArrayShape, ...]:
    """Returns the arrays of a type, as "(f32[2]{0}, s32[])"."""
    return tuple(_array(*found) for found in _ARRAY.findall(text))


def _array(dtype: str, dims: str, layout: str) -> ArrayShape:
    order, _, rest = layout.partition(":")
    tile = re.match(r"T\(([\d,]+)\)", rest)
    space = re.search(r"S\((\d+)\)", layout)
    return ArrayShape(
        dtype,
        _numbers(dims.replace("<=", "")),
        _numbers(order) if "(" not in order else (),
        _numbers(tile.group(1)) if tile else (),
        int(space.group(1)) if space else MAIN_MEMORY,
    )


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split(",") if number)


def _bits(dtype: str) -> int:
    if dtype in _BITS:
        return _BITS[dtype]
    found = re.match(r"[a-z]+?(\d+)", dtype)
    if found is None:
        raise ValueError(f"{dtype=} has no known size.")
    return int(found.group(1))


def _instruction(line: str) -> Instruction:
    found = _INSTRUCTION.match(line)
    if found is None:
        raise ValueError(f"no instruction can be read in {line.strip()!r:.200}.")
    is_root, name, rest = found.groups()
    is_tuple = rest.startswith("(")
    end = _closing(rest, 0) + 1 if is_tuple else rest.index(" ")
    kind, rest = rest[:end], rest[end:].lstrip()
    begin = rest.index("(")
    close = _closing(rest, begin)
    inside = rest[begin + 1 : close]
    return Instruction(
        name,
        rest[:begin],
        array_shapes(kind),
        tuple(_NAME.findall(inside)),
        rest[close + 1 :],
        inside,
        is_tuple,
        bool(is_root),
    )


def _closing(text: str, begin: int) -> int:
    """Returns where the parenthesis closes that opens at `begin`."""
    depth = 0
    for place in range(begin, len(text)):
        if text[place] == "(":
            depth += 1
        elif text[place] == ")":
            depth -= 1
            if depth == 0:
                return place
    raise ValueError(f"a parenthesis is left open in {text!r:.200}.")
