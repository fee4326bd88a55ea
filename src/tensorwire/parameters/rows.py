"""Describes tables of which a step touches few rows: only their numbers and values travel.

Tensors of kind "rows" whose rows are equally long lie one after another and are one *table*. A
slice's gradient for a server's part of it is two arrays: the numbers of the rows, in rising order
and each once, and their values. The numbers follow their count in a *head*, the values lie at the
beginning of the table's place in the slice's slot. The changes of a step go back in the same form
to workers that do not see the parameters mapped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import NamedTuple

import numpy as np

from tensorwire.memory import put_rows

from .kernel import Rows
from .layout import Share, padded, table_of
from .messages import APPLY, REDUCE, Bytes, Commit

Gradient = tuple[Rows, Bytes]
"""The gradient of one tensor: rows, rising and each once, and their values in this order."""

_NUMBER_BYTES = 8
_COMPACT = 4  # if more than one row of so many changed, all are sent


class TensorRows(NamedTuple):
    """The rows of one tensor in a table.

    Attributes:
        tensor: its index.
        first: the first of its rows that are here.
        height: how many are.
        at: the table's number of that row.
    """

    tensor: int
    first: int
    height: int
    at: int


class Table(NamedTuple):
    """The rows that one server has of a table.

    Attributes:
        members: the tensors that they are of.
        height: how many rows.
        row_bytes: of each.
        start: where the first lies in the share's memory.
        cells: of the share, by their place in it.
        head: where the slices' row numbers lie, in the memory of heads.
        changed: where what a step changed lies, in the memory of a worker.
        capacity: how many rows fit there.
    """

    members: tuple[TensorRows, ...]
    height: int
    row_bytes: int
    start: int
    cells: range
    head: int
    changed: int
    capacity: int

    @property
    def tensors(self) -> tuple[int, ...]:
        """Indices of the tensors."""
        return tuple([member.tensor for member in self.members])

    @property
    def head_bytes(self) -> int:
        """Bytes of a head: a count, and a number for each row."""
        return _NUMBER_BYTES * (1 + self.height)

    @property
    def values_at(self) -> int:
        """The offset of the values of changed rows, after version, count and numbers."""
        return self.changed + padded(_NUMBER_BYTES * (2 + self.capacity))

    @property
    def stop(self) -> int:
        """The byte after the last row in the share's memory."""
        return self.start + self.height * self.row_bytes

    @property
    def changed_stop(self) -> int:
        """The end of the bytes that a step can have changed, in the memory of a worker."""
        return padded(self.values_at + self.capacity * self.row_bytes)


def tables_of(share: Share) -> tuple[Table, ...]:
    """Returns the tables that a server has rows of, in the order of the layout."""
    layout, tensors = share.layout, share.layout.spec.tensors
    indices = [index for index, cell in enumerate(share.cells) if cell.kind == "rows"]

    def key(index: int) -> tuple[int, str, tuple[int, int]]:
        cell = share.cells[index]
        return cell.group, cell.dtype, table_of(tensors, cell.pieces[0].tensor)

    found: list[Table] = []
    for _, group in groupby(indices, key):
        cells = list(group)
        begin, end = share.cells[cells[0]].start, share.cells[cells[-1]].stop
        pieces = [piece.tensor for index in cells for piece in share.cells[index].pieces]
        row_bytes = tensors[pieces[0]].row_bytes
        members = []
        for tensor in dict.fromkeys(pieces):
            place = layout.places[tensor]
            start, stop = max(place.start, begin), min(place.end, end)
            first, at = (start - place.start) // row_bytes, (start - begin) // row_bytes
            members.append(TensorRows(tensor, first, (stop - start) // row_bytes, at))
        height = sum(member.height for member in members)
        table = Table(
            tuple(members),
            height,
            row_bytes,
            begin - share.start,
            range(cells[0], cells[-1] + 1),
            padded(found[-1].head + found[-1].head_bytes) if found else 0,
            found[-1].changed_stop if found else 0,
            height // _COMPACT,
        )
        found.append(table)
    return tuple(found)


def heads_bytes(share: Share) -> int:
    """Returns the size of the heads of one slice at one server."""
    return sum(padded(table.head_bytes) for table in tables_of(share))


def changed_starts(shares: Sequence[Share]) -> list[int]:
    """Returns where each server's part of a worker's memory for changes begins, and the end."""
    starts = [0]
    for share in shares:
        tables = tables_of(share)
        starts.append(starts[-1] + (tables[-1].changed_stop if tables else 0))
    return starts


def rows_here(member: TensorRows, rows: Rows) -> tuple[int, int]:
    """Returns the range of a tensor's rising rows that a table has: from, to."""
    begin, end = np.searchsorted(rows, (member.first, member.first + member.height)).tolist()
    return begin, end


def take_meant(gradients: dict[int, Gradient], commit: Commit) -> dict[int, Gradient]:
    """Empties `gradients` of tables; returns those that a commit means."""
    means = commit.operation in (APPLY, REDUCE)
    found = {i: each for i, each in gradients.items() if means and commit.present[i]}
    gradients.clear()
    return found


def part_of(table: Table, gradients: Mapping[int, Gradient]) -> tuple[Rows, list[Bytes]]:
    """Returns the part for one server: the head, and the values in their order there."""
    numbers: list[Rows] = [np.zeros(1, np.int64)]
    values: list[Bytes] = []
    for member in table.members:
        if (gradient := gradients.get(member.tensor)) is None:
            continue
        begin, end = rows_here(member, gradient[0])
        if begin < end:
            numbers.append(gradient[0][begin:end] + (member.at - member.first))
            values.append(gradient[1][begin * table.row_bytes : end * table.row_bytes])
    head = np.concatenate(numbers)
    head[0] = len(head) - 1
    return head, values


def read_part(table: Table, heads: Bytes, slot: Bytes) -> Gradient:
    """Returns rows of the table, copied and checked, and their values, at the server.

    Raises:
        ValueError: these are no rows of the table, in rising order and each once.
    """
    numbers = heads[table.head : table.head + table.head_bytes].view(np.int64)
    count = int(numbers[0])
    if not 0 <= count <= table.height:
        raise ValueError(f"a gradient has {count} rows, and the table has {table.height} here")
    rows = numbers[1 : 1 + count].copy()
    if np.any((rows < 0) | (rows >= table.height)) or np.any(rows[1:] <= rows[:-1]):
        raise ValueError(
            f"the rows of a gradient are not rising numbers from 0 to {table.height - 1}"
        )
    return rows, slot[table.start : table.start + count * table.row_bytes]


def change(version: int, rows: Rows) -> Rows:
    """Returns the head of changed rows, which precedes their values."""
    return np.concatenate([np.array([version, len(rows)], np.int64), rows])


def take_change(table: Table, version: int, memory: Bytes, view: Bytes) -> None:
    """Puts a version's changes, if there are any, into a worker's view of a table's rows.

    Args:
        table: the rows of one server.
        version: that is in place.
        memory: where this server writes its changes.
        view: these rows.

    Raises:
        ValueError: the server has written rows that it does not have.
    """
    end = table.changed + _NUMBER_BYTES * (2 + table.capacity)
    numbers = memory[table.changed : end].view(np.int64)
    if numbers[0] != version:
        return
    count = int(numbers[1])
    rows = numbers[2 : 2 + count].copy()
    if not 0 <= count <= table.capacity or not np.all((rows >= 0) & (rows < table.height)):
        raise ValueError(
            "a server sent rows that are not its own: use the same version of tensorwire in all "
            "processes"
        )
    values = memory[table.values_at : table.values_at + count * table.row_bytes]
    put_rows(view, table.row_bytes, rows, values)
