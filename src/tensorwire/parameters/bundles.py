"""Groups cells that a step changes in one call, since each call on a device takes its time."""

from __future__ import annotations

from collections.abc import Sequence

from .layout import Cell

DEVICE_BUNDLE_BYTES = 16 << 20
"""The bytes of the cells that a device works on at once."""


def bundles_of(cells: Sequence[Cell], most_bytes: int) -> dict[int, tuple[Cell, range]]:
    """Groups the cells with gradients, but for tables, into bundles, by each one's first cell.

    Args:
        cells: of the share.
        most_bytes: of a bundle of several cells; 0: each cell is alone.

    Returns:
        Each bundle as a cell, and the places in the share of the cells that it is made of.
    """
    found: dict[int, tuple[Cell, range]] = {}
    last = -1
    for index, cell in enumerate(cells):
        if cell.kind not in ("trained", "whole"):
            last = -1
            continue
        if last >= 0 and _fits(found[last][0], cell, most_bytes):
            bundle, members = found[last]
            found[last] = _joined(bundle, cell), range(members.start, index + 1)
        else:
            found[index] = cell, range(index, index + 1)
            last = index
    return found


def _fits(bundle: Cell, cell: Cell, most_bytes: int) -> bool:
    alike = (bundle.kind, bundle.group, bundle.dtype) == (cell.kind, cell.group, cell.dtype)
    together = bundle.kind == "trained" and bundle.stop == cell.start
    return alike and together and cell.stop - bundle.start <= most_bytes


def _joined(bundle: Cell, cell: Cell) -> Cell:
    return Cell(
        bundle.index, bundle.kind, bundle.group, bundle.dtype, bundle.start, cell.stop,
        bundle.pieces + cell.pieces, bundle.block,
    )  # fmt: skip
