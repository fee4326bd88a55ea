"""What a store needs of whoever does its arithmetic.

A store knows bytes, cells and slices; numbers are the business of an `Kernel` that is handed in, so
that this layer needs no torch and the kernels can be anybody's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from .messages import Bytes, Hyper

Rows = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Lent:
    """A gradient that lies in no slot: exactly the bytes that are reduced, valid until then."""

    memory: Bytes


Weight = tuple[int | Lent, float]
"""Where a slice's gradient lies, by its slot's number in `Kernel.bind` or lent, and its share."""


class Tile(Protocol):
    """One cell, bound to its memory once; one thread at a time.

    Offsets are bytes from the cell's start, multiples of 64; [start, stop) has whole tensors'
    parts.
    """

    def reduce(self, weights: Sequence[Weight], start: int, stop: int, keep: bool) -> None:
        """Reduced gradient := sum of weight x gradient, in the order given.

        Args:
            weights: at least one.
            start: first byte.
            stop: byte after the last.
            keep: put it where it stays (slot 0), not in memory that the next tile uses too.
        """

    def square_sum(self, start: int, stop: int) -> float:
        """Sum of the squares of the reduced gradient that was kept, in float64, one thread."""

    def step(
        self, hyper: Hyper, count: int, start: int, stop: int, kept: bool, scale: float
    ) -> None:
        """Applies the reduced gradient, that of [start, stop) of the last `reduce` unless kept.

        Args:
            hyper: the numbers of the cell's group, in the order of `Kernel.hyper`.
            count: which step of these tensors it is, from 1.
            start: first byte.
            stop: byte after the last.
            kept: the reduced gradient lies in slot 0.
            scale: the gradient is multiplied by this first; 1 changes nothing.
        """


class Lookup(Protocol):
    """The rows of a table that one server has, bound to their memory once.

    One thread at a time. What `reduce` made is kept until it is called again.
    """

    def reduce(self, parts: Sequence[tuple[Rows, Bytes, float]]) -> Rows:
        """Reduced gradient := sum of weight x gradient, in the order given.

        Args:
            parts: of every slice that has one: its rows, rising and each once; their values; its
                weight.

        Returns:
            The rows that any of them has, rising.
        """

    def square_sums(self) -> NDArray[np.float64]:
        """Returns for each of these rows the sum of the squares of the reduced gradient."""

    def step(self, hyper: Hyper, scale: float) -> None:
        """Applies the reduced gradient to these rows; what is not in it stays as it is.

        Args:
            hyper: as in `Tile.step`.
            scale: the gradient is multiplied by this first; 1 changes nothing.

        Raises:
            ValueError: with these numbers a step changes all rows.
        """


class Kernel(Protocol):
    """An optimizer by its class path, on cells.

    Attributes:
        hyper: names of the numbers that a group has.
        states: names of the arrays of state, each with the size and dtype of the parameters.
    """

    hyper: tuple[str, ...]
    states: tuple[str, ...]

    def bind(
        self,
        dtype: str,
        master: Bytes,
        slots: Sequence[Bytes],
        states: Mapping[str, Bytes],
    ) -> Tile:
        """Prepares a cell: its bytes of parameters, of each slice's gradients, of each state."""

    def bind_rows(self, dtype: str, columns: int, master: Bytes) -> Lookup:
        """Prepares rows of a table: the bytes of their parameters.

        Raises:
            ValueError: this optimizer changes more than the rows that have a gradient.
        """
