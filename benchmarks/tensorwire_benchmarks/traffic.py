"""What one step must move and apply at least, in bytes and elements.

Pure arithmetic. Of a dense gradient all of it moves, of a sparse one the rows that the batch looked
up, each once and with its index. New values come back for the rows that any worker changed, with
their indices: a worker does not know what the others looked up.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

FLOAT_BYTES = 4
INDEX_BYTES = 8


class TableLookups(NamedTuple):
    """What all workers looked up in one table in one step.

    Attributes:
        wide: elements of a row.
        rows: how many rows exactly one worker looked up, how many exactly two, and so on.
    """

    wide: int
    rows: Sequence[int]


class Traffic(NamedTuple):
    """The mean of the steps that workers take in turn.

    Attributes:
        up_bytes: the gradients of one worker.
        down_bytes: the new values for one worker.
        applied: elements that exactly one worker has gradients of, exactly two, and so on: what a
            server must read of that many gradients, and of the parameters, and write.
        looked_up: whether there are sparse gradients.
    """

    up_bytes: int
    down_bytes: int
    applied: tuple[int, ...]
    looked_up: bool = False

    @classmethod
    def dense(cls, elements: int, workers: int) -> Traffic:
        """Of gradients that all workers have whole."""
        size_bytes = FLOAT_BYTES * elements
        return cls(size_bytes, size_bytes, (*[0] * (workers - 1), elements))

    @classmethod
    def of_rows(
        cls, elements: int, workers: int, lookups: Sequence[TableLookups], steps: int
    ) -> Traffic:
        """Of gradients with so many dense elements, and all lookups in so many steps."""
        rows = np.array([counts for _, counts in lookups]).sum(0)  # by how many looked them up
        row_elements = np.array([np.multiply(wide, counts) for wide, counts in lookups]).sum(0)
        moved = (INDEX_BYTES * rows + FLOAT_BYTES * row_elements) / steps
        applied = np.rint(row_elements / steps).astype(int)
        applied[-1] += elements
        dense_bytes = FLOAT_BYTES * elements
        up_bytes = dense_bytes + round(float(moved @ np.arange(1, workers + 1)) / workers)
        down_bytes = dense_bytes + round(float(moved.sum()))
        return cls(up_bytes, down_bytes, tuple(applied.tolist()), True)

    @property
    def elements(self) -> int:
        """That a server applies."""
        return sum(self.applied)
