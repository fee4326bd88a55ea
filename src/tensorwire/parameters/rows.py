"""Tables, of which a step touches a few rows: their numbers and values travel, and nothing else.

A slice's gradient of a table is two arrays: the rows that it has, in rising order and each once,
and their values. At each server that has rows of the table, the numbers lie behind their count in
a *head*, and the values at the beginning of the table's place in the slice's slot. What a step
changed goes back in the same form to workers that do not see the parameters mapped.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from .apply import Rows
from .layout import ALIGN_BYTES, Share
from .messages import Bytes

_NUMBER_BYTES = 8
_COMPACT = 4  # if more than one row of so many changed, all are sent


class Table(NamedTuple):
    """The rows of one tensor that one server has.

    Attributes:
        tensor: its index.
        first: the first of the rows.
        height: how many.
        row_bytes: of each.
        start: where the first lies in the share's memory.
        cells: of the share, by their place in it.
        head: where the slices' row numbers lie, in the memory of heads.
        changed: where what a step changed lies, in the memory of a worker.
        capacity: how many rows fit there.
    """

    tensor: int
    first: int
    height: int
    row_bytes: int
    start: int
    cells: range
    head: int
    changed: int
    capacity: int

    @property
    def head_bytes(self) -> int:
        """A count and as many numbers."""
        return _NUMBER_BYTES * (1 + self.height)

    @property
    def values_at(self) -> int:
        """Where the values of changed rows lie, behind version, count and numbers."""
        return self.changed + _padded(_NUMBER_BYTES * (2 + self.capacity))

    @property
    def stop(self) -> int:
        """The byte after the last row in the share's memory."""
        return self.start + self.height * self.row_bytes


def tables_of(share: Share) -> tuple[Table, ...]:
    """The tables that a server has rows of, in the order of the layout."""
    layout, found = share.layout, []
    head = changed = 0
    numbers: dict[int, list[int]] = {}
    for index, cell in enumerate(share.cells):
        if cell.kind == "rows":
            numbers.setdefault(cell.pieces[0].tensor, []).append(index)
    for tensor, cells in numbers.items():
        place, row_bytes = layout.places[tensor], layout.spec.tensors[tensor].row_bytes
        start, stop = share.clip(place.start, place.end)
        count = (stop - start) // row_bytes
        table = Table(
            tensor,
            (start - place.start) // row_bytes,
            count,
            row_bytes,
            start - share.start,
            range(cells[0], cells[-1] + 1),
            head,
            changed,
            count // _COMPACT,
        )
        head += _padded(table.head_bytes)
        changed = _padded(table.values_at + table.capacity * row_bytes)
        found.append(table)
    return tuple(found)


def heads_bytes(share: Share) -> int:
    """Of the heads of one slice at one server."""
    return sum(_padded(table.head_bytes) for table in tables_of(share))


def changed_starts(shares: Sequence[Share]) -> list[int]:
    """Where each server's part of a worker's memory for changes begins, and where the last ends."""
    starts = [0]
    for share in shares:
        tables = tables_of(share)
        size = max((_padded(t.values_at + t.capacity * t.row_bytes) for t in tables), default=0)
        starts.append(starts[-1] + size)
    return starts


def part_of(table: Table, rows: Rows, values: Bytes) -> tuple[Rows, Bytes]:
    """What goes to one server of a gradient: the head, and the values of its rows.

    Args:
        table: the rows there.
        rows: of the whole tensor, rising.
        values: of all these rows.
    """
    begin, end = np.searchsorted(rows, [table.first, table.first + table.height]).tolist()
    head = np.empty(1 + end - begin, np.int64)
    head[0] = end - begin
    np.subtract(rows[begin:end], table.first, out=head[1:])
    return head, values[begin * table.row_bytes : end * table.row_bytes]


def read_part(table: Table, heads: Bytes, slot: Bytes) -> tuple[Rows, Bytes]:
    """The other way round, at the server; the numbers are copied, then checked.

    Raises:
        ValueError: these are no rows of the table, in rising order and each once.
    """
    numbers = heads[table.head : table.head + table.head_bytes].view(np.int64)
    count = int(numbers[0])
    if not 0 <= count <= table.height:
        raise ValueError(f"a gradient of {count} rows; the table has {table.height} here")
    rows = numbers[1 : 1 + count].copy()
    if count and (rows[0] < 0 or rows[-1] >= table.height or np.any(np.diff(rows) <= 0)):
        raise ValueError(
            f"rows of a gradient that are not rising numbers from 0 to {table.height - 1}"
        )
    return rows, slot[table.start : table.start + count * table.row_bytes]


def change(version: int, rows: Rows) -> Rows:
    """What goes ahead of the values of changed rows."""
    return np.concatenate([np.array([version, len(rows)], np.int64), rows])


def take_change(table: Table, version: int, memory: Bytes, view: Bytes) -> None:
    """At the worker: puts what the version changed into its view of the tensor.

    Args:
        table: the rows of one server.
        version: that is in place.
        memory: what this server has written.
        view: the whole tensor.

    Raises:
        ValueError: what is written there cannot be.
    """
    end = table.changed + _NUMBER_BYTES * (2 + table.capacity)
    numbers = memory[table.changed : end].view(np.int64)
    if numbers[0] != version:
        return
    count = int(numbers[1])
    rows = numbers[2 : 2 + count].copy()
    if not 0 <= count <= table.capacity or not np.all((rows >= 0) & (rows < table.height)):
        raise ValueError("a server changed rows that it does not have")
    values = memory[table.values_at : table.values_at + count * table.row_bytes]
    kind = np.dtype((np.void, table.row_bytes))
    begin = table.first * table.row_bytes
    whole = view[begin : begin + table.height * table.row_bytes]
    whole.view(kind)[rows] = values.view(kind)


def _padded(size: int) -> int:
    return -(-size // ALIGN_BYTES) * ALIGN_BYTES
