"""Computes where every tensor of a store lies, purely from the workers' declarations.

A `Spec` says which tensors there are. A `Layout` gives each its place in one flat range of bytes,
cuts that range into cells and deals the cells out. The cuts do not depend on the number of servers,
and steps work on cells, so the bits of a result do not depend on which server owns a cell. No
memory, no processes.

Backward makes gradients from the last tensor of a model to the first. Each server has consecutive
cells: with the layout in that order it would get all its bytes in one part of backward, and its
link would idle in the others. So tensors whose gradients come one after the other make a block, and
the blocks lie in bit-reversed order of their times (0, 4, 2, 6, 1, 5, 3, 7): every consecutive part
of the layout, for any number of servers, has blocks of all of backward.
"""

from __future__ import annotations

import dataclasses
import json
import math
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import TypeVar

K = TypeVar("K")

ALIGN_BYTES = 64
"""Tensors start here; their padding belongs to them, so that no kernel has a scalar tail."""

CELL_BYTES = 1 << 20
"""The reduced gradient of a cell stays in a core's cache; in smaller ones the calls weigh more."""

_LEAST_CELL_BYTES = 128 << 10
_CELLS = 8
"""The least number of cells of a store, as long as they are not smaller than the least cell. So
several servers share the work, and gradients leave over a network before backward has made the
last.
"""

_BLOCKS = 16
_LEAST_BLOCK_BYTES = 64 << 10
"""The least size of a block of tensors.

A store has about `_BLOCKS` blocks, twice as many as usual servers, as far as they are not smaller
than this. The last gradients of backward are the end of a push, and their block has them at one
server. Cells do not go on from one block to the next, and a cell that is not full costs as much as
a full one.
"""

FORMAT = 8

ITEM_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "int64": 8, "int32": 4}
_ITEM_BYTES = {**ITEM_BYTES, "int16": 2, "int8": 1, "uint8": 1, "bool": 1}

MALFORMED = (AttributeError, KeyError, OverflowError, RecursionError, TypeError, ValueError)
"""The errors of reading JSON of another process that is malformed."""

KINDS = ("trained", "rows", "constant", "broadcast", "average", "whole")
"""The kinds of tensors, by the effect of a step.

It gets gradients; it is a table that gets gradients of some rows; it never changes in a step; it is
slice 0's value after every step; it is the mean of the slices' values after every step; it gets
gradients, and must not be cut.
"""

WITH_GRADIENT = frozenset({"trained", "rows", "whole"})
"""Kinds of tensors that get gradients."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor as a worker declares it.

    Attributes:
        name: unique in the store.
        dtype: its name in torch and numpy ("float32").
        shape: as the user sees it.
        kind: one of KINDS.
        group: index of its group of hyper-parameters; 0 where it has none.
        order: its dimensions, the longest stride first; (): as in `shape`.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    kind: str = "trained"
    group: int = 0
    order: tuple[int, ...] = ()

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """The shape in which its elements lie one after the other, in C order."""
        return tuple(self.shape[i] for i in self.order) if self.order else self.shape

    @property
    def elements(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def size_bytes(self) -> int:
        """Bytes without padding."""
        return self.elements * _ITEM_BYTES[self.dtype]

    @property
    def row_bytes(self) -> int:
        """The bytes of one index of the first dimension."""
        return self.size_bytes // self.shape[0] if self.shape and self.shape[0] else 0

    def __str__(self) -> str:
        return f"{self.name!r} ({self.dtype}, shape {self.shape}, {self.kind})"


@dataclass(frozen=True, slots=True)
class Spec:
    """The facts on which all workers of a store agree.

    Attributes:
        optimizer: the text of the optimizer, for the process that applies it.
        hyper: names of the numbers that each group has in every step.
        groups: how many groups.
        slices: parts of a step, each with its own gradients.
        tensors: in the order of the model.
        pipeline: workers that compute a slice together, each the gradients of other tensors.
        scalars: names of the numbers that the optimizer keeps of each tensor.
        ema: decay of the average of all values that each trained tensor had; 0: there is none.
    """

    optimizer: str
    hyper: tuple[str, ...]
    groups: int
    slices: int
    tensors: tuple[TensorSpec, ...]
    pipeline: int = 1
    scalars: tuple[str, ...] = ()
    ema: float = 0.0

    def to_json(self) -> bytes:
        """Returns the text by which it travels."""
        raw = {each.name: getattr(self, each.name) for each in dataclasses.fields(self)}
        names = [each.name for each in dataclasses.fields(TensorSpec)]
        raw["tensors"] = [{name: getattr(each, name) for name in names} for each in self.tensors]
        return json.dumps({"format": FORMAT, **raw}).encode()

    @staticmethod
    def from_json(data: bytes) -> Spec:
        """Returns the Spec of a text of `to_json`, checked: it comes from another process.

        Raises:
            ValueError: it is no Spec, with what is wrong.
        """
        try:
            raw = json.loads(data)
            if (found := raw.pop("format")) != FORMAT:
                raise ValueError(
                    f"its format is {found!r:.20}, not {FORMAT}: use the same version of "
                    "tensorwire in all processes"
                )
            tensors = tuple(
                TensorSpec(
                    str(each["name"]),
                    str(each["dtype"]),
                    tuple(int(size) for size in each["shape"]),
                    str(each["kind"]),
                    int(each["group"]),
                    tuple(int(dimension) for dimension in each["order"]),
                )
                for each in raw.pop("tensors")
            )
            hyper = tuple(str(name) for name in raw.pop("hyper"))
            scalars = tuple(str(name) for name in raw.pop("scalars"))
            spec = Spec(hyper=hyper, tensors=tensors, scalars=scalars, **raw)
        except MALFORMED as error:
            raise ValueError(
                f"the description of a model and optimizer cannot be read: {error!r}"
            ) from error
        spec.check()
        return spec

    def check(self) -> None:
        """Raises ValueError if the parts contradict each other."""
        numbers = {"groups": self.groups, "slices": self.slices, "workers per slice": self.pipeline}
        for what, number in numbers.items():
            if not isinstance(number, int) or not 1 <= number <= 1 << 16:
                raise ValueError(f"a store has 1 to 65536 {what}, not {number!r}")
        if not (isinstance(self.ema, float) and 0.0 <= self.ema < 1.0):
            raise ValueError(f"the decay of an average is from 0 up to 1, not {self.ema!r}")
        if self.ema and any(tensor.kind == "rows" for tensor in self.tensors):
            raise ValueError(
                "tables with sparse gradients have no average: leave ema= out, or use sparse=False "
                "in the model"
            )
        if not isinstance(self.optimizer, str):
            raise ValueError(f"an optimizer is named by text, not {self.optimizer!r}")
        names = set()
        for tensor in self.tensors:
            if tensor.dtype not in _ITEM_BYTES:
                raise ValueError(f"{tensor}: dtype {tensor.dtype!r} is not supported")
            if tensor.kind not in KINDS:
                raise ValueError(f"{tensor}: its kind {tensor.kind!r} is unknown")
            if tensor.order and sorted(tensor.order) != list(range(len(tensor.shape))):
                raise ValueError(f"{tensor}: {tensor.order} is not an order of its dimensions")
            if not 0 <= tensor.group < self.groups:
                raise ValueError(
                    f"{tensor}: it is in parameter group {tensor.group}, and the optimizer has "
                    f"{self.groups}"
                )
            if any(size < 0 for size in tensor.shape) or tensor.elements > 1 << 48:
                raise ValueError(f"{tensor}: a size is negative, or it has over 2**48 elements")
            if tensor.kind == "rows" and (len(tensor.shape) != 2 or not tensor.elements):
                raise ValueError(f"{tensor}: a table has two dimensions, neither of size 0")
            if tensor.name in names:
                raise ValueError(f"two tensors are called {tensor.name!r}: rename one")
            names.add(tensor.name)

    def difference(self, other: Spec, here: str = "here", there: str = "there") -> str | None:
        """Returns the first difference in words; None if there is none.

        Args:
            other: another worker's.
            here: the words that follow a value of this one.
            there: the words that follow a value of the other one.
        """
        if self is other:
            return None
        for mine, theirs in zip(self.tensors, other.tensors, strict=False):
            if mine != theirs:
                return f"{mine} {here}, {theirs} {there}"
        if len(self.tensors) != len(other.tensors):
            longer = max(self.tensors, other.tensors, key=len)
            extra = longer[min(len(self.tensors), len(other.tensors))]
            return f"{extra} is on one side only"
        for field in ("optimizer", "hyper", "groups", "slices", "pipeline", "scalars", "ema"):
            mine, theirs = getattr(self, field), getattr(other, field)
            if mine != theirs:
                return f"{field} {mine!r} {here}, {theirs!r} {there}"
        return None


@dataclass(frozen=True, slots=True)
class Extent:
    """The place of a tensor: bytes [start, stop) with padding, [start, end) without."""

    start: int
    end: int
    stop: int


@dataclass(frozen=True, slots=True)
class Piece:
    """The part [start, stop) of a cell that belongs to one tensor, padding included."""

    tensor: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Cell:
    """A unit of work: bytes [start, stop) of one kind, group and dtype.

    Gradients of cells of one block come one after the other.
    """

    index: int
    kind: str
    group: int
    dtype: str
    start: int
    stop: int
    pieces: tuple[Piece, ...]  # one after the other, from start to stop
    block: int = 0

    def runs(self, key: Callable[[Piece], K]) -> Iterator[tuple[int, int, K]]:
        """Yields the longest parts [start, stop) whose pieces have one key, and that key."""
        for found, run in groupby(self.pieces, key):
            pieces = list(run)
            yield pieces[0].start, pieces[-1].stop, found


class Layout:
    """The places of all tensors of a Spec, and the grid of cells.

    Attributes:
        spec: what it was made from.
        places: one per tensor, in the Spec's order.
        cells: in the order of their bytes; together they cover [0, size_bytes) exactly once.
        size_bytes: of the whole range, a multiple of ALIGN_BYTES, at least that.
        cell_bytes: of a cell at most, but for tables and tensors that must not be cut.

    Raises:
        ValueError: `cell_bytes` is no multiple of ALIGN_BYTES above 0.
    """

    def __init__(self, spec: Spec, cell_bytes: int | None = None) -> None:
        sizes = [each.size_bytes for each in spec.tensors]
        rooms = [padded(size) for size in sizes]
        if cell_bytes is None:
            cell_bytes = _cell_bytes_of(sum(rooms))
        if cell_bytes <= 0 or cell_bytes % ALIGN_BYTES:
            raise ValueError(f"a cell has a multiple of {ALIGN_BYTES} bytes, not {cell_bytes}")
        self.spec, self.cell_bytes = spec, cell_bytes
        places: dict[int, Extent] = {}
        cells: list[Cell] = []
        offset = block = 0
        for (kind, group, dtype), members, is_next in _blocks(spec.tensors, rooms, cell_bytes):
            begin, step = offset, cell_bytes
            block += is_next
            if kind == "rows":
                step = _whole_rows(spec.tensors[members[0]].row_bytes, cell_bytes)
            elif kind == "whole":
                step = max(rooms[members[0]], ALIGN_BYTES)
            for tensor in members:
                stop = offset + rooms[tensor]
                places[tensor] = Extent(offset, offset + sizes[tensor], stop)
                offset = stop
            if kind == "trained":  # equal cells, so that none is small
                count = max(-(-(offset - begin) // cell_bytes), 1)
                step = max(padded(-(-(offset - begin) // count)), ALIGN_BYTES)
            owners = deque((tensor, places[tensor]) for tensor in members)
            for start in range(begin, offset, step):
                stop = min(start + step, offset)
                while owners and owners[0][1].stop <= start:
                    owners.popleft()
                pieces = []
                for tensor, place in owners:
                    if place.start >= stop:
                        break
                    if place.stop > place.start:
                        first, last = max(place.start, start), min(place.stop, stop)
                        pieces.append(Piece(tensor, first, last))
                cells.append(
                    Cell(len(cells), kind, group, dtype, start, stop, tuple(pieces), block)
                )
        self.places = tuple(places[tensor] for tensor in range(len(spec.tensors)))
        self.cells = tuple(cells)
        self.size_bytes = max(offset, ALIGN_BYTES)

    def deal(self, servers: int) -> tuple[Share, ...]:
        """Returns consecutive cells for each server, equal in bytes as far as whole cells allow."""
        shares, first = [], 0
        for server in range(servers):
            goal = self.size_bytes * (server + 1) / servers
            last = first
            while last < len(self.cells):
                cell = self.cells[last]
                if (cell.start + cell.stop) / 2 > goal and server + 1 < servers:
                    break
                last += 1
            shares.append(Share(self, first, last))
            first = last
        return tuple(shares)

    @cached_property
    def trained(self) -> tuple[int, ...]:
        """Indices of the tensors that get gradients."""
        return tuple(i for i, each in enumerate(self.spec.tensors) if each.kind in WITH_GRADIENT)


@dataclass(frozen=True)
class Share:
    """The cells [first, last) of one server."""

    layout: Layout
    first: int
    last: int

    @cached_property
    def cells(self) -> Sequence[Cell]:
        """The cells."""
        return self.layout.cells[self.first : self.last]

    @cached_property
    def start(self) -> int:
        """First byte."""
        return self.cells[0].start if self.cells else 0

    @cached_property
    def stop(self) -> int:
        """Byte after the last."""
        return self.cells[-1].stop if self.cells else 0

    @property
    def size_bytes(self) -> int:
        """Bytes of all cells."""
        return self.stop - self.start

    def clip(self, start: int, stop: int) -> tuple[int, int]:
        """Returns the part of [start, stop) that is here; empty when start >= stop."""
        return max(start, self.start), min(stop, self.stop)


class Selection:
    """Some tensors of a layout, packed in its order into memory of their own.

    Attributes:
        size_bytes: of that memory, a multiple of ALIGN_BYTES, at least that.
        ranges: (start, stop, at): the bytes [start, stop) of the layout lie at `at`.

    Args:
        layout: of all tensors.
        tensors: indices; None means all, and then everything lies where the layout has it.
    """

    def __init__(self, layout: Layout, tensors: Collection[int] | None = None) -> None:
        self._places = layout.places
        self.ranges: list[tuple[int, int, int]] = []
        if tensors is None:
            self.ranges.append((0, layout.size_bytes, 0))
            self.size_bytes = layout.size_bytes
        else:
            offset = 0
            for place in sorted((layout.places[i] for i in tensors), key=lambda each: each.start):
                if self.ranges and self.ranges[-1][1] == place.start:
                    start, _, at = self.ranges.pop()
                else:
                    start, at = place.start, offset
                if place.stop > start:
                    self.ranges.append((start, place.stop, at))
                offset += place.stop - place.start
            self.size_bytes = max(offset, ALIGN_BYTES)
        self._starts = [start for start, _, _ in self.ranges]

    def of(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """Yields the parts of the layout's bytes [start, stop) that are here, as in `ranges`."""
        begins = max(bisect_right(self._starts, start) - 1, 0)
        for begin, end, at in self.ranges[begins : bisect_left(self._starts, stop)]:
            first, last = max(begin, start), min(end, stop)
            if first < last:
                yield first, last, at + first - begin

    def has(self, place: Extent) -> bool:
        """Tells whether all bytes of a tensor are here."""
        index = bisect_right(self._starts, place.start) - 1
        return index >= 0 and place.end <= self.ranges[index][1]

    def place(self, tensor: int) -> slice:
        """Returns the bytes of a selected tensor, without padding."""
        place = self._places[tensor]
        index = bisect_right(self._starts, place.start) - 1
        begin, _, at = self.ranges[index] if index >= 0 else (place.start, 0, 0)
        return slice(at + place.start - begin, at + place.end - begin)


def checked_wants(raw: object, spec: Spec) -> list[int] | None:
    """Returns the tensors whose values a worker wants, checked; None: all tensors.

    Raises:
        ValueError: these are no indices of tensors, or one is there twice.
    """
    if raw is None:
        return None
    count = len(spec.tensors)
    if not isinstance(raw, list) or not all(type(i) is int and 0 <= i < count for i in raw):
        raise ValueError(f"wanted tensors are numbers from 0 to {count - 1}, not {raw!r:.80}")
    if len(set(raw)) < len(raw):
        raise ValueError(f"one tensor is wanted twice: {raw!r:.80}")
    return raw


def _segments(
    tensors: Sequence[TensorSpec],
) -> Iterable[tuple[tuple[str, int, str], list[int]]]:
    """Yields groups of tensors that may share cells, last of the model first, as gradients come."""
    found: dict[tuple[int, int, str, tuple[int, int]], list[int]] = {}
    for index in reversed(range(len(tensors))):
        tensor = tensors[index]
        key = KINDS.index(tensor.kind), tensor.group, tensor.dtype, table_of(tensors, index)
        found.setdefault(key, []).append(index)
    for (kind, group, dtype, _), members in sorted(found.items()):
        yield (KINDS[kind], group, dtype), members


def _blocks(
    tensors: Sequence[TensorSpec], rooms: Sequence[int], cell_bytes: int
) -> Iterator[tuple[tuple[str, int, str], list[int], bool]]:
    """Yields segments, in blocks where they are cut, in the order of the layout.

    The last item of each tells that its gradients do not come right after the previous segment's.
    `rooms` are the padded sizes of the tensors.
    """
    goal = max(min(cell_bytes, _LEAST_BLOCK_BYTES), sum(rooms) // _BLOCKS)
    for key, members in _segments(tensors):
        blocks, sizes = [[members[0]]], [rooms[members[0]]]
        for tensor in members[1:]:
            more = rooms[tensor]
            if key[0] == "trained" and 2 * sizes[-1] >= goal and sizes[-1] + more > goal:
                blocks.append([])
                sizes.append(0)
            blocks[-1].append(tensor)
            sizes[-1] += more
        if len(blocks) > 1 and 2 * sizes[-1] < goal:
            blocks[-2:] = [blocks[-2] + blocks[-1]]
        for number, index in enumerate(_bit_reversed(len(blocks))):
            yield key, blocks[index], number > 0


def _bit_reversed(count: int) -> list[int]:
    """Returns the numbers below `count`, by their binary digits read from the last to the first."""
    digits = (count - 1).bit_length()
    return sorted(range(count), key=lambda number: f"{number:0{digits}b}"[::-1])


def table_of(tensors: Sequence[TensorSpec], index: int) -> tuple[int, int]:
    """Returns a key that is equal for tensors of one kind, group and dtype that may share cells.

    For rows it is equal within one table: rows are equally long, and the next tensor begins where
    the last row ends. A tensor that must not be cut shares cells with no other.
    """
    tensor = tensors[index]
    if tensor.kind == "whole":
        return 0, -index
    if tensor.kind != "rows":
        return 0, 0
    return tensor.row_bytes, 0 if tensor.row_bytes % ALIGN_BYTES == 0 else -index


def _cell_bytes_of(size_bytes: int) -> int:
    """Returns the cell size of a store: CELL_BYTES, halved while the store is small."""
    found = CELL_BYTES
    while found > _LEAST_CELL_BYTES and size_bytes < _CELLS * found:
        found //= 2
    return found


def _whole_rows(row_bytes: int, cell_bytes: int) -> int:
    """Returns the size of a table's cells: whole rows, and a multiple of ALIGN_BYTES."""
    least = math.lcm(row_bytes, ALIGN_BYTES)
    return max(cell_bytes // least, 1) * least


def padded(size: int) -> int:
    """Returns a size rounded up to a multiple of ALIGN_BYTES."""
    return -(-size // ALIGN_BYTES) * ALIGN_BYTES
