"""Records the progress of a server through a version, in memory that outlives its process.

A step overwrites parameters and state where they lie. A server that is killed in the middle of it
leaves cells of three kinds: untouched, complete, and for each thread at most one that is torn. The
journal tells them apart and has a copy of each torn cell as it was. A successor, which has the same
memory, restores the torn cells, changes those that are not complete, and so makes the very same
version. A published version is never made again: workers may have overwritten their gradients.

No store needs a fence or a flush: a process that is killed leaves a prefix of what each of its
threads has done, in the order of the program. Source: the undo log of write-ahead logging (Mohan
et al., ARIES, 1992), with a cell for a page.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tensorwire.memory import put_rows, take_rows

from .kernel import Rows, Scalars
from .layout import Share, padded
from .messages import RESULT_BYTES, Bytes
from .rows import Table, tables_of

MOST_THREADS = 64
"""The most threads, each of which can be in the middle of a cell."""

PROGRESS_AT = 0
"""The offset of the number of the last published version in a journal's memory."""

WORK_AT = 40
"""The offset of the nanoseconds that the server has worked, on all versions together."""

SIZE_AT = 48
"""The offset of the size in bytes of the memory that the server applies gradients to."""

_PUBLISHED, _BEGUN, _RELEASED, _NORMED, _NORM = 0, 1, 2, 3, 4
_WORKED, _SIZE = WORK_AT // 8, SIZE_AT // 8
_HEAD_WORDS = 8
_CELL_BITS = 24  # of an armed word, which also has the version; Layout has fewer cells


class Numbers(NamedTuple):
    """The numbers that a shard keeps of each tensor, in memory that a step overwrites too.

    Attributes:
        counts: steps that were applied to it.
        averaged: values that are averaged.
        scalars: a row of numbers of its optimizer.
    """

    counts: NDArray[np.int64]
    averaged: NDArray[np.int64]
    scalars: NDArray[np.float64]


class Change:
    """A cell, or the table that begins with it, while a step changes it.

    Attributes:
        cell: its place in the share.
        version: that is made.
        rows: of a table, that are changed.
        slot: which of the copies of cells is its own.
    """

    __slots__ = ("cell", "rows", "slot", "version")

    def __init__(self, cell: int, version: int, rows: Rows) -> None:
        self.cell, self.version, self.rows, self.slot = cell, version, rows, -1


class Journal:
    """The journal of one store at one server.

    Its methods are steps of a server in the rows of transitions.py. One thread at a time calls
    them; but methods that take a `Change` may be called by several threads, for different cells.

    Args:
        share: the cells of the server.
        scalars: how many numbers an optimizer keeps of a tensor.
        memory: of `size_bytes`, zeroed at first.
        undo: of `undo_bytes`.
        table_undo: of `table_undo_bytes`.
        arrays: for each cell that a step changes, the arrays that it changes.
        tables: for each table, by its first cell, the whole arrays that a step changes.
        settle: returns when all copies between arrays and `undo` that were begun are complete.
    """

    def __init__(
        self,
        share: Share,
        scalars: int,
        memory: Bytes,
        undo: Bytes,
        table_undo: Bytes,
        arrays: Mapping[int, Sequence[Bytes]],
        tables: Mapping[int, Sequence[Bytes]],
        settle: Callable[[], None] = lambda: None,
    ) -> None:
        self._settle = settle
        tensors, cells = len(share.layout.spec.tensors), len(share.cells)
        self._arrays, self._undo = arrays, undo
        parts = _parts(share, scalars)
        words = memory[: parts.result].view(np.uint64)
        self._head = words[:_HEAD_WORDS]
        self._armed = words[_HEAD_WORDS : _HEAD_WORDS + MOST_THREADS]
        self._done = words[_HEAD_WORDS + MOST_THREADS :][:cells]
        self._armed_tables = words[_HEAD_WORDS + MOST_THREADS + cells :][:cells]
        self._result = memory[parts.result : parts.counts]
        counts = memory[parts.counts : parts.scalars].view(np.int64).reshape(2, -1)[:, :tensors]
        numbers = memory[parts.scalars : parts.reduced].view(np.float64)[: 2 * tensors * scalars]
        before, self._scalars_after = numbers.reshape(2, tensors, scalars)
        self._before = Numbers(counts[0], counts[1], before)
        self._room = _room(arrays)
        # Parts of `undo`; pop and append are atomic.
        self._free = list(range(len(undo) // self._room))
        self._spent_s = [0.0] * (len(self._free) + 1)  # by each of them, and for the rest
        self._spent_before_s = 0.0
        self._bytes = len(memory) + len(undo) + len(table_undo)
        self._tables: dict[int, _TableUndo] = {}
        self._reduced: dict[int, NDArray[np.float64]] = {}  # of each table
        weights = memory[parts.reduced : parts.stop].view(np.float64)
        start = 0
        for number, table in enumerate(tables_of(share)):
            first, size = table.cells.start, _reduced_words(share)
            self._reduced[first] = weights[number * size :][:size]
            self._tables[first] = _TableUndo(table, table_undo[start:], tables[first])
            start += _table_bytes(table, len(tables[first]))
        self._head[_SIZE] = share.size_bytes
        self._restore()

    @staticmethod
    def size_bytes(share: Share, scalars: int) -> int:
        """Returns the size of the memory of a journal."""
        return _parts(share, scalars).stop

    @staticmethod
    def undo_bytes(arrays: Mapping[int, Sequence[Bytes]], threads: int) -> int:
        """Returns the size of the memory for copies of cells, one for each thread."""
        return min(threads, MOST_THREADS) * _room(arrays)

    @staticmethod
    def table_undo_bytes(share: Share, states: int) -> int:
        """Returns the size of the memory for copies of rows, with this many arrays of state."""
        return sum(_table_bytes(table, 1 + states) for table in tables_of(share))

    def cost(self, threads: int) -> tuple[float, int]:
        """Returns the seconds that it took since the last call, per thread, and its bytes."""
        before, self._spent_before_s = self._spent_before_s, sum(self._spent_s)
        return (self._spent_before_s - before) / threads, self._bytes

    # ---- versions

    @property
    def published(self) -> int:
        """The last version that was published; 0: none, and the store is not open."""
        return int(self._head[_PUBLISHED])

    @property
    def result(self) -> Bytes:
        """The result of the last published version, without a copy."""
        return _place(self._result, self.published)

    @staticmethod
    def last(share: Share, scalars: int, memory: Bytes) -> tuple[int, Bytes] | None:
        """Returns the last version that a store will have and its result; None: not made yet.

        Args:
            share: as of the class.
            scalars: as of the class.
            memory: as of the class.
        """
        parts = _parts(share, scalars)
        head = memory[: 8 * _HEAD_WORDS].view(np.uint64)
        if not head[_PUBLISHED] or head[_RELEASED] != head[_PUBLISHED]:
            return None
        version = int(head[_PUBLISHED])
        return version, _place(memory[parts.result : parts.counts], version)

    def publish(self, version: int, result: Bytes, last: bool = False) -> None:
        """Notes that a version is complete, before anybody is told; `last`: none will follow."""
        _place(self._result, version)[: len(result)] = result  # the one before it stays
        if last:
            self._head[_RELEASED] = version
        self._head[_PUBLISHED] = version

    def worked(self, spent_s: float) -> None:
        """Counts time that was spent on a version."""
        self._head[_WORKED] += np.uint64(max(spent_s, 0.0) * 1e9)

    def save_numbers(self, version: int, numbers: Numbers) -> None:
        """Copies the numbers that a step will overwrite; restores them if that step was begun."""
        begun = self._head[_BEGUN] == version
        for kept, each in zip(self._before, numbers, strict=True):
            if begun:
                each[:] = kept[: len(each)]
            else:
                kept[: len(each)] = each

    def begin(self, version: int) -> None:
        """Notes that a version is begun, with the numbers that are saved."""
        self._head[_BEGUN] = version

    def note_norm(self, version: int, norm: float) -> None:
        """Notes the norm of a version, before the gradient that it was taken of is changed."""
        self._head[_NORM : _NORM + 1].view(np.float64)[0] = norm
        self._head[_NORMED] = version

    def norm(self, version: int) -> float | None:
        """Returns the norm of a version, if it is noted."""
        if self._head[_NORMED] != version:
            return None
        return float(self._head[_NORM : _NORM + 1].view(np.float64)[0])

    def note_reduced(self, cell: int, version: int, weights: Sequence[tuple[int, float]]) -> None:
        """Notes by which weights of slices a version has reduced the gradient of a table.

        Args:
            cell: the first of the table's.
            version: whose gradient it is.
            weights: the slices that have given something, and the weight of each.
        """
        noted = self._reduced[cell]
        noted[1] = len(weights)
        noted[2 : 2 + 2 * len(weights)] = [number for pair in weights for number in pair]
        noted[0] = version

    def noted_reduced(self, cell: int) -> list[tuple[int, float]] | None:
        """Returns the last weights given to `note_reduced` for a table; None: there are none."""
        noted = self._reduced[cell]
        if not noted[0]:
            return None
        pairs = noted[2:].reshape(-1, 2)[: int(noted[1])].tolist()
        return [(int(which), weight) for which, weight in pairs]

    # ---- cells

    def is_done(self, cell: int, version: int) -> bool:
        """Tells whether a cell, or the table that begins with it, has its values of a version."""
        return bool(self._done[cell] == version)

    def save(self, change: Change) -> None:
        """Copies the arrays of a cell."""
        started, change.slot = time.perf_counter(), self._free.pop()
        at = change.slot * self._room
        for array in self._arrays[change.cell]:
            self._undo[at : at + len(array)] = array
            at += len(array)
        self._settle()
        self._spent_s[change.slot] += time.perf_counter() - started

    def arm(self, change: Change) -> None:
        """Puts the copy of a cell into force."""
        self._armed[change.slot] = change.version << _CELL_BITS | change.cell

    def mark(self, change: Change) -> None:
        """Marks a cell or table as having its values of the version."""
        self._done[change.cell] = change.version

    def disarm(self, change: Change) -> None:
        """Ends the validity of the copy of a cell."""
        self._armed[change.slot] = 0
        self._free.append(change.slot)

    def save_rows(self, change: Change) -> None:
        """Copies rows of a table."""
        started, spent = time.perf_counter(), self._spent_s
        self._tables[change.cell].save(change.rows)
        spent[-1] += time.perf_counter() - started

    def arm_rows(self, change: Change) -> None:
        """Puts the copy of rows into force."""
        self._armed_tables[change.cell] = change.version

    def disarm_rows(self, change: Change) -> None:
        """Ends the validity of the copy of rows."""
        self._armed_tables[change.cell] = 0

    def note(self, tensors: Sequence[int], scalars: Scalars) -> None:
        """Keeps the numbers of tensors after a step, until all cells are done."""
        self._scalars_after[tensors] = scalars

    def noted(self, tensor: int) -> Scalars:
        """Returns the numbers given to `note` for a tensor."""
        return tuple(self._scalars_after[tensor].tolist())

    def _restore(self) -> None:
        """Restores the cells and rows that a process was changing when it ended."""
        for slot in np.flatnonzero(self._armed).tolist():
            version, cell = divmod(int(self._armed[slot]), 1 << _CELL_BITS)
            if self._done[cell] < version:
                at = slot * self._room
                for array in self._arrays[cell]:
                    array[:] = self._undo[at : at + len(array)]
                    at += len(array)
                self._settle()
            self._armed[slot] = 0
        for cell in np.flatnonzero(self._armed_tables).tolist():
            if self._done[cell] < self._armed_tables[cell]:
                self._tables[cell].put_back()
            self._armed_tables[cell] = 0


class _TableUndo:
    """The copies of the rows of a table that a step changes."""

    def __init__(self, table: Table, memory: Bytes, arrays: Sequence[Bytes]) -> None:
        numbers = 8 * (1 + table.height)
        self._numbers = memory[:numbers].view(np.int64)
        self._arrays, self._row_bytes = arrays, table.row_bytes
        start, size = padded(numbers), table.height * table.row_bytes
        self._copies = [memory[start + i * padded(size) :][:size] for i in range(len(arrays))]

    def save(self, rows: Rows) -> None:
        self._numbers[0] = len(rows)
        self._numbers[1 : 1 + len(rows)] = rows
        for array, copy in zip(self._arrays, self._copies, strict=True):
            take_rows(array, self._row_bytes, rows, copy)

    def put_back(self) -> None:
        rows = self._numbers[1 : 1 + int(self._numbers[0])]
        for array, copy in zip(self._arrays, self._copies, strict=True):
            put_rows(array, self._row_bytes, rows, copy)


def _room(arrays: Mapping[int, Sequence[Bytes]]) -> int:
    """Returns the bytes of a copy of the largest cell."""
    return padded(max((sum(map(len, each)) for each in arrays.values()), default=1))


def _table_bytes(table: Table, arrays: int) -> int:
    numbers = padded(8 * (1 + table.height))
    return numbers + arrays * padded(table.height * table.row_bytes)


class _Parts(NamedTuple):
    """The places of the parts of a journal's memory, after its words."""

    result: int
    counts: int
    scalars: int
    reduced: int
    stop: int


def _place(results: Bytes, version: int) -> Bytes:
    """Returns the memory of a version's result, in the memory for two of them."""
    size = len(results) // 2
    return results[size * (version % 2) :][:RESULT_BYTES]


def _reduced_words(share: Share) -> int:
    """Returns how many words `note_reduced` writes at most: two, and two for each slice."""
    return 2 + 2 * share.layout.spec.slices


def _parts(share: Share, scalars: int) -> _Parts:
    tensors, cells = len(share.layout.spec.tensors), len(share.cells)
    result = padded(8 * (_HEAD_WORDS + MOST_THREADS + 2 * cells))
    counts = result + 2 * padded(RESULT_BYTES)
    at = counts + 2 * padded(8 * tensors)
    reduced = at + padded(2 * 8 * tensors * scalars)
    size = 8 * len(tables_of(share)) * _reduced_words(share)
    return _Parts(result, counts, at, reduced, reduced + padded(size))
