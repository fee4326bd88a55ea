"""Calculates the least bytes that one step must move, and elements that it must apply.

A dense gradient is moved whole, a sparse one as the rows that the batch looked up, each once and
with its index. New values come back for the rows that any worker changed, with their indices: a
worker does not know the lookups of the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

FLOAT_BYTES = 4
INDEX_BYTES = 8


class TableLookups(NamedTuple):
    """The lookups of all workers in one table in one step.

    Attributes:
        wide: elements of a row.
        rows: the number of rows that exactly one worker looked up, exactly two, and so on.
    """

    wide: int
    rows: Sequence[int]


class Traffic(NamedTuple):
    """The bytes and elements of a step, as the mean over the batches.

    Attributes:
        up_bytes: the gradients of one worker.
        down_bytes: the new values for one worker.
        applied: the number of elements with gradients of exactly one worker, of exactly two, and
            so on.
        looked_up: whether there are sparse gradients.
    """

    up_bytes: int
    down_bytes: int
    applied: tuple[int, ...]
    looked_up: bool = False

    @classmethod
    def dense(cls, elements: int, workers: int) -> Traffic:
        """Returns the traffic of dense gradients."""
        size_bytes = FLOAT_BYTES * elements
        return cls(size_bytes, size_bytes, (*[0] * (workers - 1), elements))

    @classmethod
    def of_rows(
        cls, elements: int, workers: int, lookups: Sequence[TableLookups], steps: int
    ) -> Traffic:
        """Returns the mean traffic of `steps` steps with dense elements and table lookups."""
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
        """The number of elements that a server applies."""
        return sum(self.applied)
