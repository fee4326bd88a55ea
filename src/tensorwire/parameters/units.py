"""Units: the runs of cells of one share that travel together over a network.

The worker writes a unit when it has all its gradients, and the write raises the unit's word at the
server to a stamp, the number of the worker's write. The commit goes ahead of the units and tells
the stamps. So a server can work on the units that come first, and send back their new values, while
others are on their way: both directions of a link are used. No result relies on the order of
writes. Pure.
"""

from __future__ import annotations

from .layout import Share
from .rows import tables_of

UNIT_BYTES = 1 << 20
"""Of one write: large enough to be worth it, small beside what is under way."""

STAMP_BYTES = 8


def units_of(share: Share) -> tuple[range, ...]:
    """Runs of the share's cells, by their place in it.

    Of at most UNIT_BYTES, or one cell, or all cells of a table.
    """
    units: list[range] = []
    tables = {table.cells.start: table.cells for table in tables_of(share)}
    for index, cell in enumerate(share.cells):
        if cell.kind == "rows":
            if index in tables:
                units.append(tables[index])
        elif (
            units
            and share.cells[units[-1].start].kind != "rows"
            and cell.stop - share.cells[units[-1].start].start <= UNIT_BYTES
        ):
            units[-1] = range(units[-1].start, index + 1)
        else:
            units.append(range(index, index + 1))
    return tuple(units)
