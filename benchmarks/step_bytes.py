"""Bytes of main memory (HBM) that the body of a compiled loop reads and writes, counted in the text of the program.

`cost_analysis()` of a compiled program adds everything outside of a loop to one pass of its body, and counts arrays that lie in a
TPU's fast memory as if they lay in HBM. Here, each instruction of the body counts the arrays it reads and writes that lie in HBM,
with the padding of their tiles. An instruction that reads or writes a slice in place counts the slice. A fusion counts its
operands and results, a copy into fast memory its source.

A branch counts as its cheapest arm, and a loop inside of the body counts nothing: in a decode step these are for rows that
truncate, or that have a temperature of their own.
"""

import dataclasses
import math
import re
from collections.abc import Iterator, Sequence

_ARRAY = re.compile(r"(\w+)\[([\d,]*)\](?:\{([^}]*)\})?")
_COMPUTATION = re.compile(r"^(?:ENTRY )?%([\w.\-]+) \(.*\{$")
_ITEM_BYTES = {
    "pred": 1,
    "s8": 1,
    "u8": 1,
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
}
# Instructions that name, group or await arrays, and move nothing.
_FREE = ("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id", "replica-id")
_FREE_CALLS = ('"ConcatBitcast"', '"AllocateBuffer"')
_SLICES = ("slice", "dynamic-slice", "gather")


@dataclasses.dataclass(frozen=True)
class _Array:
    dtype: str
    shape: tuple[int, ...]
    layout: str

    @property
    def in_hbm(self) -> bool:
        """Memory space 0, which layouts do not name; the others are fast memories and semaphores."""
        return "S(" not in self.layout

    @property
    def bytes(self) -> int:
        """With the padding of tiles."""
        order, _, rest = self.layout.partition(":")
        shape = [self.shape[int(axis)] for axis in order.split(",")][::-1] if order and self.shape else list(self.shape)
        tile = re.match(r"T\(([\d,]+)\)", rest)
        sizes = [int(size) for size in tile[1].split(",")] if tile else []
        for place, size in zip(range(-1, -1 - len(shape), -1), reversed(sizes), strict=False):
            shape[place] = -(-shape[place] // size) * size
        return math.prod(shape) * _ITEM_BYTES.get(self.dtype, 4)


@dataclasses.dataclass(frozen=True)
class _Instruction:
    """results: of a tuple, all of its arrays. attributes: the text after the operands."""

    name: str
    results: tuple[_Array, ...]
    operation: str
    operands: tuple[str, ...]
    attributes: str
    is_root: bool

    def called(self, attribute: str = "calls") -> str:
        found = re.search(rf"\b{attribute}=%([\w.\-]+)", self.attributes)
        return found[1] if found else ""


class Traffic:
    """The computations of a program's text, as compiled.as_text() gives it."""

    def __init__(self, text: str):
        self._computations: dict[str, dict[str, _Instruction]] = {}
        current: dict[str, _Instruction] = {}
        for line in text.splitlines():
            if found := _COMPUTATION.match(line):
                current = self._computations[found[1]] = {}
            elif " = " in line and (instruction := _parse(line)) is not None:
                current[instruction.name] = instruction

    def loops(self) -> list[str]:
        """The bodies of all loops, those with the largest state first."""
        found = [x for computation in self._computations.values() for x in computation.values() if x.operation == "while"]
        found.sort(key=lambda loop: -sum(array.bytes for array in loop.results))
        return [loop.called("body") for loop in found]

    def of_loop(self) -> int:
        """Bytes of one pass of the loop with the largest state. Raises ValueError: the program has no loop."""
        loops = self.loops()
        if not loops:
            raise ValueError("the program has no loop")
        return self.of(loops[0])

    def of(self, computation: str) -> int:
        """Bytes that one run of a computation reads and writes."""
        return sum(size for _, size in self.by_instruction(computation))

    def by_instruction(self, computation: str) -> Iterator[tuple[str, int]]:
        """(name, bytes) of each instruction of a computation that moves bytes."""
        instructions = self._computations[computation]
        for instruction in instructions.values():
            size = self._bytes(instruction, instructions)
            if size:
                yield instruction.name, size

    def _bytes(self, it: _Instruction, beside: dict[str, _Instruction]) -> int:
        if it.operation in _FREE or it.operation == "while" or it.operation.endswith("-done"):
            return 0
        if it.operation == "custom-call" and any(name in it.attributes for name in _FREE_CALLS):
            return 0
        if it.operation == "conditional":
            branches = re.search(r"branch_computations=\{([^}]*)\}", it.attributes)
            names = (
                re.findall(r"%([\w.\-]+)", branches[1])
                if branches
                else [it.called("true_computation"), it.called("false_computation")]
            )
            return min(self.of(name) for name in names)
        if it.operation == "call":
            return self.of(it.called("to_apply"))
        operands = [_array(beside, name) for name in it.operands]
        if it.operation == "copy-start":  # (target, source, semaphore)
            return sum(_hbm(array) for array in it.results[:2])
        if it.operation.endswith("-start"):  # ((sources), target, semaphore): a slice, or a collective
            target = it.results[-2] if len(it.results) > 2 else it.results[-1]
            moved = min(target.bytes, operands[0].bytes) if operands else target.bytes
            return moved * sum(array.in_hbm for array in (operands[0], target))
        if it.operation == "fusion":
            return self._of_fusion(it, operands)
        if it.operation in _SLICES:
            return sum(it.results[0].bytes for array in (operands[0], it.results[0]) if array.in_hbm)
        if it.operation == "dynamic-update-slice":
            return sum(operands[1].bytes for array in (operands[1], it.results[0]) if array.in_hbm)
        return sum(map(_hbm, operands)) + sum(map(_hbm, it.results))

    def _of_fusion(self, it: _Instruction, operands: Sequence[_Array]) -> int:
        inside = self._computations[it.called()]
        parameters = [x for x in inside.values() if x.operation == "parameter"]
        parameters.sort(key=lambda x: int(re.search(r"parameter\((\d+)\)", x.attributes)[1]))  # type: ignore[index]
        read = sum(
            self._read_inside(inside, p.name, p.results[0]) for p, array in zip(parameters, operands, strict=True) if array.in_hbm
        )
        root = next(x for x in inside.values() if x.is_root)
        made = [inside[name] for name in root.operands] if root.operation == "tuple" else [root]
        if len(made) != len(it.results):  # one instruction with several results, such as a reduction of pairs
            return read + sum(map(_hbm, it.results))
        written = sum(self._written(inside, each, array) for each, array in zip(made, it.results, strict=True) if array.in_hbm)
        return read + written

    def _read_inside(self, inside: dict[str, _Instruction], name: str, whole: _Array) -> int:
        """What a fused computation reads of one of its parameters."""
        size = 0
        for user in (x for x in inside.values() if name in x.operands):
            if self._renames(user):
                size += self._read_inside(inside, user.name, whole)
            elif user.operation in _SLICES and user.operands[0] == name:
                size += user.results[0].bytes
            elif user.operation == "dynamic-update-slice" and user.operands[0] == name:
                continue
            else:
                return whole.bytes
        return min(size, whole.bytes)

    def _written(self, inside: dict[str, _Instruction], made: _Instruction, whole: _Array) -> int:
        while self._renames(made) and made.operands:
            made = inside[made.operands[0]]
        return inside[made.operands[1]].results[0].bytes if made.operation == "dynamic-update-slice" else whole.bytes

    def _renames(self, it: _Instruction) -> bool:
        """Whether an instruction gives its operand another shape and moves nothing."""
        if it.operation != "fusion":
            return it.operation == "bitcast"
        return all(x.operation in ("parameter", "bitcast") for x in self._computations[it.called()].values())


def _hbm(array: _Array) -> int:
    return array.bytes if array.in_hbm else 0


def _array(beside: dict[str, _Instruction], name: str) -> _Array:
    return beside[name].results[0]


def _closing(text: str, begin: int) -> int:
    """The index behind the parenthesis that closes the one at `begin`."""
    depth = 0
    for i in range(begin, len(text)):
        depth += (text[i] == "(") - (text[i] == ")")
        if depth == 0:
            return i + 1
    raise ValueError(f"no closing parenthesis: {text[:80]}")


def _parse(line: str) -> _Instruction | None:
    """An instruction of a computation; None where a line is none."""
    left, _, right = line.strip().partition(" = ")
    if not left.removeprefix("ROOT ").startswith("%"):
        return None
    end = _closing(right, 0) if right.startswith("(") else right.index(" ")
    results = tuple(
        _Array(dtype, tuple(int(size) for size in shape.split(",") if size), layout)
        for dtype, shape, layout in _ARRAY.findall(right[:end])
    )
    rest = right[end:].strip()
    begin = rest.index("(")
    close = _closing(rest, begin)
    operands = tuple(re.findall(r"%([\w.\-]+)", rest[begin:close]))
    name = left.removeprefix("ROOT ").removeprefix("%")
    return _Instruction(name, results, rest[:begin], operands, rest, left.startswith("ROOT "))
