"""Describes one version while a shard makes it: what is asked for, and what is found."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from .contributions import Contributions
from .journal import Journal
from .kernel import Rows, Scalars
from .messages import APPLY, CHECK_FINITE, PUBLISH, REDUCE, REDUCED, Commit
from .rows import Table

Exchange = Callable[[NDArray[np.float64]], Sequence[float]]
"""Takes the sums of squares of a shard's cells; returns the sums of all cells, in order."""


class Publisher(Protocol):
    """A listener for new values, while others are still being worked on. Any thread."""

    def __call__(self, start: int, stop: int) -> None:
        """Tells that bytes [start, stop) of the store have their new values."""

    def rows(self, table: Table, rows: Rows) -> None:
        """Tells that some rows of a table have their new values."""


class Arrivals(Protocol):
    """The gradients that are still on their way when a version begins; cells by their place."""

    def order(self, cells: Sequence[int]) -> list[int]:
        """Returns the cells in the order in which they are expected."""

    def wait(self, cell: int) -> None:
        """Waits until all gradients of a cell are there. Any thread."""


class Step:
    """A version while a shard makes it.

    Args:
        commits: one per slice, agreed.
        exchange: see `Exchange`.
        publisher: is told of new values; None: there is none.
        arrivals: what is still on its way; None: nothing.
        contribute: makes `given`; called once, while the tensors' numbers are as before the step.
        journal: of the progress, for a successor; None: all cells are made anew.

    Attributes:
        publishes: it takes parameters from slot 0, or those that were written.
        trains: it applies a gradient, unless that turns out not to be finite.
        reduces: it keeps the reduced gradient before anything else.
        looks: it takes the norm of the reduced gradient.
        reduced: the reduced gradient is kept.
        sums: of its squares, per cell.
        finite: the gradient is finite, or that was not asked for.
        norm: of the reduced gradient; nan: it was not asked for.
        scale: what the reduced gradient is multiplied by where it is applied.
        after: tensors and their numbers, once all cells are done.
    """

    def __init__(
        self,
        commits: Sequence[Commit],
        exchange: Exchange,
        publisher: Publisher | None,
        arrivals: Arrivals | None,
        contribute: Callable[[], Contributions],
        journal: Journal | None,
    ) -> None:
        self.commits, self.publisher, self.arrivals = commits, publisher, arrivals
        self.journal, self._exchange, self._contribute = journal, exchange, contribute
        self.head = head = commits[0]
        self.trains, self.publishes = head.operation == APPLY, head.operation == PUBLISH
        self.looks = head.looks
        self.reduces = self.looks or head.operation == REDUCE
        self.reduced = bool(head.flags & REDUCED)
        self.sums = np.empty(0)
        self.finite, self.norm, self.scale = True, math.nan, 1.0
        self.after: list[tuple[Sequence[int], Scalars]] = []

    @cached_property
    def given(self) -> Contributions:
        """The contributions of the slices."""
        return self._contribute()

    @property
    def applies(self) -> bool:
        """True if parameters are to be changed."""
        return self.trains and (self.finite or not self.head.flags & CHECK_FINITE)

    def take_norm(self) -> None:
        """Combines the sums of all servers into the norm of the gradient."""
        self.know_norm(_root_of_sum(self._exchange(self.sums)))

    def take_noted(self, norm: float) -> None:
        """Takes the norm that a predecessor has noted, before it may have changed the gradient."""
        self.looks = self.reduces = False
        self.know_norm(norm)

    def know_norm(self, norm: float) -> None:
        """Takes the norm, and computes the scale from it."""
        self.norm = norm
        self.finite = math.isfinite(self.norm)
        if self.head.max_norm < math.inf:
            # As torch.nn.utils.clip_grad_norm_.
            self.scale = min(self.head.max_norm / (self.norm + 1e-6), 1.0)


def _root_of_sum(squares: Sequence[float]) -> float:
    try:
        return math.sqrt(math.fsum(squares))
    except OverflowError:
        return math.inf
