"""Counts the bytes that one step of an optimised program moves in main memory. No jax.

The step is followed as a device runs it: loops by their turns, of a conditional the branch that
an ordinary step takes, a fusion as its operands and results. Arrays in fast memory are free; what
brings them there, or back, is counted. An operand that an instruction only slices or gathers from
counts as what is taken, and an update in place as what is put. Collectives are listed beside.

Where the bytes of an array come from is followed too, so that a copy of a weight or of an array
of pages is known for what it is.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from tools.hlo_program import ArrayShape, Computation, Instruction, Program

# Nothing runs for these, or nothing moves.
FREE = frozenset(
    {
        "parameter",
        "tuple",
        "get-tuple-element",
        "bitcast",
        "constant",
        "after-all",
        "optimization-barrier",
        "partition-id",
        "replica-id",
        "copy-done",
        "slice-done",
        "async-done",
        "async-update",
        "domain",
        "all-gather-done",
        "all-reduce-done",
        "collective-permute-done",
        "send-done",
        "recv-done",
    }
)
_FREE_TARGETS = "AllocateBuffer", "ConcatBitcast", "AssumeGatherIndicesInBound"
_TAKES = "dynamic-slice", "slice", "gather"
_PUTS = "dynamic-update-slice", "scatter"
_VIEWS = "bitcast", "reshape", "copy-done", "slice-done", "optimization-barrier", "async-done"
_MOVES = "copy", "copy-start", "transpose", "slice-start", "slice", "reshape", "bitcast-convert"
_NO_ARITHMETIC = (*_VIEWS, *_MOVES, *_TAKES, *_PUTS, "parameter", "tuple", "constant", "convert")
KERNEL = "tpu_custom_call"
COLLECTIVES = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "collective-permute",
    "all-to-all",
    "ragged-all-to-all",
    "collective-broadcast",
)

# Where an array comes from: the name of the program's argument, or None; a list for a tuple.
Origin = Any


class Moved(NamedTuple):
    """Bytes in main memory that one run of an instruction moves."""

    read: float
    written: float


class Kernel(NamedTuple):
    """A call of a kernel: its name, its instruction, and what its operands are."""

    name: str
    instruction: Instruction
    operands: tuple[ArrayShape, ...]
    origins: tuple[Origin, ...]

    @property
    def rest(self) -> Moved:
        """Returns the bytes of operands and results whole, without those that are updated."""
        kept = set(self.instruction.aliases.values())
        read = [one.main_bytes for i, one in enumerate(self.operands) if i not in kept]
        fresh = [
            one.main_bytes
            for i, one in enumerate(self.instruction.shapes)
            if i not in self.instruction.aliases
        ]
        return Moved(sum(read), sum(fresh))


# Returns the bytes that a kernel moves; raises KeyError if it does not know the kernel.
KernelBytes = Callable[[Kernel], Moved]


@dataclasses.dataclass(frozen=True, kw_only=True)
class OrdinaryStep:
    """What a step takes of the branches and loops that depend on data.

    Attributes:
      branches: the branch that is taken, by the number of branches. For two it is 0, "false": no
        row asks for anything more.
      turns: turns of each loop within the step, in the order in which they run; those that the
        compiler knows are left out.
      kernel_bytes: bytes of each kernel.
    """

    turns: Sequence[int]
    kernel_bytes: KernelBytes
    branches: Mapping[int, int] = dataclasses.field(default_factory=lambda: {2: 0, 3: 1})


@dataclasses.dataclass(frozen=True)
class Entry:
    """One instruction of a step, and what all its runs move."""

    instruction: Instruction
    times: int
    read: float
    written: float
    collective_bytes: float = 0.0
    # Arguments of the program that it reads from main memory, and their bytes.
    sources: tuple[tuple[str, float], ...] = ()
    # Arguments that it lays elsewhere in main memory, or exchanges between chips.
    copied: tuple[str, ...] = ()
    is_mere_move: bool = False  # it computes nothing

    @property
    def bytes(self) -> float:
        return self.read + self.written


@dataclasses.dataclass(frozen=True)
class Traffic:
    """Everything that a step runs, in order."""

    entries: tuple[Entry, ...]

    @property
    def bytes(self) -> float:
        """Bytes read and written in main memory."""
        return sum(entry.bytes for entry in self.entries)

    @property
    def num_operations(self) -> int:
        """Operations that are launched."""
        return sum(entry.times for entry in self.entries)

    @property
    def collectives(self) -> list[Entry]:
        return [entry for entry in self.entries if entry.collective_bytes]

    @property
    def num_collectives(self) -> int:
        return sum(entry.times for entry in self.collectives)

    @property
    def collective_bytes(self) -> float:
        """Bytes that collectives give to each chip."""
        return sum(entry.collective_bytes for entry in self.entries)

    def read_of(self, argument: str) -> float:
        """Returns the bytes that are read of the program's arguments of a prefix."""
        pairs = (pair for entry in self.entries for pair in entry.sources)
        return sum(bytes_ for name, bytes_ in pairs if name.startswith(argument))


def step_traffic(program: Program, step: OrdinaryStep) -> Traffic:
    """Returns what one step of a burst moves: one turn of the outermost loop of `burst`.

    What runs before and after that loop, once per burst, is left out. Arguments that stay in fast
    memory from step to step count as read in each: between all layers of a model they would not.

    Raises:
      ValueError: a loop whose turns are not known, or one that was expected and is not there; a
        conditional of an unknown number of branches; a kernel of unknown bytes; no loop over
        steps.
    """
    entry = program.computations[program.entry]
    walk = _Walk(program, step)
    values = walk.origins_before_loop(entry)
    loop = next((one for one in entry.instructions.values() if one.opcode == "while"), None)
    if loop is None:
        raise ValueError("the program has no loop over steps; expected that of a burst.")
    origins = values[loop.operands[0]]
    entries = tuple(walk.computation(loop.called[0], [origins], 1))
    if walk.num_loops != len(step.turns):
        raise ValueError(
            f"the step has {walk.num_loops} loops, and {len(step.turns)} were expected."
        )
    return Traffic((_kept_fast(loop, origins), *entries))


@dataclasses.dataclass
class _Walk:
    """Follows a program; `values` of a computation are the origins of its instructions."""

    program: Program
    step: OrdinaryStep
    result: Origin = None  # of the computation that was followed last
    num_loops: int = 0  # met so far, whose turns the compiler does not know

    def origins_before_loop(self, entry: Computation) -> dict[str, Origin]:
        values: dict[str, Origin] = {}
        for one in entry.instructions.values():
            if one.opcode == "while":
                break
            if one.opcode == "parameter":
                values[one.name] = one.op_name or one.name
            else:
                values[one.name] = self._origin(entry, one, values)
        return values

    def computation(self, name: str, arguments: Sequence[Origin], times: int) -> Iterator[Entry]:
        """Yields what runs in a computation; its result is in `result` afterwards."""
        here = self.program.computations[name]
        values: dict[str, Origin] = {}
        for one in here.instructions.values():
            if one.opcode == "parameter":
                values[one.name] = arguments[one.index]
            elif one.opcode in ("while", "conditional", "call", "async-start"):
                given = [values[operand] for operand in one.operands]
                yield from self._call(one, given, times)
                values[one.name] = self.result
            else:
                values[one.name] = self._origin(here, one, values)
                if not is_free(one):
                    yield self._entry(here, one, values, times)
        self.result = values[here.root.name]

    def _call(self, one: Instruction, given: list[Origin], times: int) -> Iterator[Entry]:
        if one.opcode == "while":
            if turns := self._turns(one):
                yield from self.computation(one.called[0], given, times * turns)
            self.result = given[0]
        elif one.opcode == "conditional":
            branch = self.step.branches.get(len(one.called))
            if branch is None:
                raise ValueError(
                    f"conditional {one.name} ({one.op_name}) has {len(one.called)} branches; "
                    "name the one that an ordinary step takes."
                )
            name, operand = one.branches[branch]
            yield from self.computation(name, [given[one.operands.index(operand)]], times)
        else:
            yield from self.computation(one.called[0], given, times)

    def _turns(self, one: Instruction) -> int:
        known = one.trip_count
        if known is None:
            known = _bound(self.program.computations.get(one.condition))
        if known is not None:
            return known
        turns, met = self.step.turns, self.num_loops
        if met == len(turns):
            raise ValueError(
                f"loop {one.name} ({one.op_name}) is number {met + 1}, and an ordinary step has "
                f"{len(turns)}; say how often it turns."
            )
        self.num_loops += 1
        return turns[met]

    def _origin(self, here: Computation, one: Instruction, values: Mapping[str, Origin]) -> Origin:
        given = [values.get(operand) for operand in one.operands]
        if one.opcode == "tuple":
            return given
        if one.opcode == "get-tuple-element":
            return given[0][one.index] if isinstance(given[0], list) else None
        if one.opcode in (*_VIEWS, *_MOVES) or one.target in _FREE_TARGETS:
            return _only(given)
        if one.opcode.removesuffix("-start").removesuffix("-done") in COLLECTIVES:
            return _only(given) if "all-gather" in one.opcode else None
        if one.opcode in _PUTS:
            return given[0]
        if one.opcode == "custom-call" and one.aliases:
            return _of_results(one, {i: given[operand] for i, operand in one.aliases.items()})
        if one.opcode == "fusion":
            return self._of_fusion(one, given)
        return None

    def _of_fusion(self, one: Instruction, given: Sequence[Origin]) -> Origin:
        """Returns the origins of what a fusion updates in place, or only lays elsewhere."""
        inner = self.program.computations[one.called[0]]
        kept = {}
        for place, root in enumerate(_results(inner)):
            found = _source(inner, root, self.program)
            if found is not None:
                kept[place] = given[found]
        return _of_results(one, kept)

    def _entry(
        self, here: Computation, one: Instruction, values: Mapping[str, Origin], times: int
    ) -> Entry:
        operands = [here.instructions[operand] for operand in one.operands]
        given = [values[operand] for operand in one.operands]
        copied, exchanged = (), 0.0
        read = [self._read(one, place, operand) for place, operand in enumerate(operands)]
        written = self._written(here, one)
        kind = one.opcode.removesuffix("-start")
        if kind in COLLECTIVES:
            exchanged = float(sum(shape.num_bytes for shape in _arrived(one)))
            copied = tuple(_names(given)) if kind != "all-reduce" else ()
        elif one.opcode == "custom-call" and one.target == KERNEL:
            moved = self._kernel(one, operands, given)
            read, written = [moved.read], moved.written
            given = []
        is_move = self._lays_elsewhere(one)
        if is_move and kind not in COLLECTIVES:
            copied = _copied(operands, given, written)
        pairs = zip(map(_name, given), read)
        sources = tuple((name, bytes_ * times) for name, bytes_ in pairs if name and bytes_)
        return Entry(
            instruction=one,
            times=times,
            read=sum(read) * times,
            written=written * times,
            collective_bytes=exchanged * times,
            sources=sources,
            copied=copied,
            is_mere_move=is_move,
        )

    def _read(self, one: Instruction, place: int, operand: Instruction) -> float:
        """Returns the bytes that are read of an operand, in main memory."""
        whole = sum(shape.main_bytes for shape in operand.shapes)
        if not whole:
            return 0
        if one.opcode == "fusion":
            return min(_taken(self.program, one.called[0], place), whole)
        if one.opcode in _TAKES and place == 0:
            return min(sum(shape.num_bytes for shape in one.shapes), whole)
        if one.opcode == "slice-start":
            return min(sum(shape.num_bytes for shape in _arrived(one)), whole)
        if one.opcode in _PUTS and place == 0:
            return 0
        return whole

    def _written(self, here: Computation, one: Instruction) -> float:
        """Returns the bytes that are written to main memory."""
        if one.opcode == "fusion":
            inner = self.program.computations[one.called[0]]
            results = _results(inner)
            return sum(
                min(_put(self.program, inner, root), shape.num_bytes)
                for root, shape in zip(results, one.shapes, strict=True)
                if shape.main_bytes
            )
        if one.opcode in _PUTS:
            return 0 if not one.shapes[0].main_bytes else _update(one, here.instructions)
        return sum(shape.main_bytes for shape in _arrived(one))

    def _kernel(
        self, one: Instruction, operands: Sequence[Instruction], given: Sequence[Origin]
    ) -> Moved:
        parts = one.op_name.split("/")
        name = parts[-2] if parts[-1] == "pallas_call" else one.name.split(".")[0]
        shapes = tuple(operand.shapes[0] for operand in operands)
        try:
            return self.step.kernel_bytes(Kernel(name, one, shapes, tuple(given)))
        except KeyError:
            raise ValueError(
                f"kernel {name} ({one.op_name}) has no known bytes; add a formula."
            ) from None

    def _lays_elsewhere(self, one: Instruction) -> bool:
        """Whether it moves whole arrays and computes nothing with them."""
        if one.opcode == "fusion":
            inner = self.program.computations[one.called[0]].instructions.values()
            return all(i.opcode in _NO_ARITHMETIC for i in inner)
        return one.opcode in _MOVES


def _copied(
    operands: Sequence[Instruction], given: Sequence[Origin], written: float
) -> tuple[str, ...]:
    """Returns the arguments of which half or more is written to main memory again."""
    sizes = (sum(shape.num_bytes for shape in operand.shapes) for operand in operands)
    names = zip(map(_name, given), sizes)
    return tuple(name for name, size in names if name and 2 * written >= size)


def _kept_fast(loop: Instruction, origins: Origin) -> Entry:
    """Returns the arguments that a loop over steps keeps in fast memory, as an entry of it."""
    pairs = zip(map(_name, origins), loop.shapes)
    kept = [(name, float(shape.num_bytes - shape.main_bytes)) for name, shape in pairs if name]
    sources = tuple((name, size) for name, size in kept if size)
    read = sum(size for _, size in sources)
    return Entry(loop, 0, read, 0.0, sources=sources)


def _bound(condition: Computation | None) -> int | None:
    """Returns the turns of a loop that counts from 0 up to a constant, as jax's scan does; None of
    other loops."""
    root = None if condition is None else condition.root
    if condition is None or root is None or root.opcode != "compare":
        return None
    counter, end = (condition.instructions[operand] for operand in root.operands)
    is_scan = counter.opcode == "get-tuple-element" and end.opcode == "constant"
    return int(end.argument) if is_scan and "direction=LT" in root.text else None


def is_free(one: Instruction) -> bool:
    """Returns whether nothing runs for an instruction."""
    return one.opcode in FREE or one.target in _FREE_TARGETS


def _arrived(one: Instruction) -> tuple[ArrayShape, ...]:
    """Returns the arrays that an instruction gives, without those that its start names again."""
    if not one.opcode.endswith("-start"):
        return one.shapes
    if one.opcode == "copy-start":  # (there, here, token)
        return one.shapes[:1]
    if one.opcode == "all-reduce-start":
        return one.shapes
    # (operands, results, tokens)
    return one.shapes[len(one.operands) : 2 * len(one.operands)]


def _results(inner: Computation) -> list[Instruction]:
    """Returns the instruction of each of a computation's results."""
    root = inner.root
    if root.opcode != "tuple":
        return [root] * len(root.shapes)
    return [inner.instructions[operand] for operand in root.operands]


def _taken(program: Program, name: str, place: int) -> float:
    """Returns the most bytes that a fused computation reads of a parameter."""
    inner = program.computations[name]
    parameter = inner.parameters.get(place)
    if parameter is None:
        return 0
    return _taken_of(program, inner, parameter)


def _taken_of(program: Program, inner: Computation, value: Instruction) -> float:
    whole, total = float(sum(shape.num_bytes for shape in value.shapes)), 0.0
    if value.is_root and value.opcode != "parameter":
        return whole
    for user in inner.users[value.name]:
        if user.opcode in _TAKES and user.operands[0] == value.name:
            total += sum(shape.num_bytes for shape in user.shapes)
        elif user.opcode in _PUTS and user.operands[0] == value.name:
            total += 0  # in place
        elif user.opcode in ("bitcast", "get-tuple-element"):
            total += _taken_of(program, inner, user)
        elif user.opcode == "fusion":
            places = [i for i, operand in enumerate(user.operands) if operand == value.name]
            total += sum(_taken(program, user.called[0], i) for i in places)
        else:
            return whole
    return min(total, whole)


def _put(program: Program, inner: Computation, root: Instruction) -> float:
    """Returns the bytes that a fused computation writes for a result."""
    while root.opcode == "bitcast":
        root = inner.instructions[root.operands[0]]
    if root.opcode in _PUTS:
        return _update(root, inner.instructions)
    if root.opcode == "fusion" and not root.is_tuple:
        deeper = program.computations[root.called[0]]
        return _put(program, deeper, deeper.root)
    return float("inf")


def _update(one: Instruction, instructions: Mapping[str, Instruction]) -> float:
    """Returns the bytes of what a dynamic-update-slice or a scatter puts."""
    operand = one.operands[1 if one.opcode == "dynamic-update-slice" else 2]
    return sum(shape.num_bytes for shape in instructions[operand].shapes)


def _source(inner: Computation, one: Instruction, program: Program) -> int | None:
    """Returns the parameter that a result is an update or a mere rearrangement of."""
    while one.opcode in (*_VIEWS, *_MOVES, *_PUTS):
        one = inner.instructions[one.operands[0]]
    if one.opcode == "fusion" and not one.is_tuple:
        deeper = program.computations[one.called[0]]
        place = _source(deeper, deeper.root, program)
        if place is None:
            return None
        return _source(inner, inner.instructions[one.operands[place]], program)
    return one.index if one.opcode == "parameter" else None


def _of_results(one: Instruction, kept: Mapping[int, Origin]) -> Origin:
    if one.is_tuple:
        return [kept.get(place) for place in range(len(one.shapes))]
    return kept.get(0)


def _only(given: Sequence[Origin]) -> Origin:
    """Returns the one origin of several arrays, if they have one."""
    return given[0] if given and all(one == given[0] for one in given) else None


def _name(origin: Origin) -> str | None:
    return origin if isinstance(origin, str) else None


def _names(origins: Sequence[Origin]) -> Iterator[str]:
    return filter(None, map(_name, origins))
