"""Defines the interface between a store and the code that does its arithmetic.

A store knows bytes, cells and slices; a `Kernel` that is handed in knows numbers, so that this
layer needs no torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from .device import ShareDevice
from .layout import Cell, TensorSpec
from .messages import Bytes, Hyper

AVERAGE_ONLY = "average only"
"""The `Spec.optimizer` of a store whose optimizer worker 0 applies: servers average gradients."""

Rows = NDArray[np.int64]
Scalars = tuple[float, ...]
"""The numbers that an optimizer keeps of one tensor, in the order of `Kernel.scalars`."""


@dataclass(frozen=True, slots=True, eq=False)
class Lent:
    """A gradient that lies in no slot: exactly the bytes that are reduced, valid until then."""

    memory: Bytes


Weight = tuple[int | Lent, float]
"""The place of a slice's gradient, its slot's number in `Kernel.bind` or lent; and its weight."""


class Tile(Protocol):
    """One cell, bound to its memory once; one thread at a time.

    Offsets are bytes from the cell's start, multiples of 64; [start, stop) has whole tensors'
    parts.
    """

    def reduce(self, weights: Sequence[Weight], start: int, stop: int, keep: bool) -> None:
        """Computes the reduced gradient: the sum of weight x gradient, in the order given.

        Args:
            weights: at least one.
            start: first byte.
            stop: byte after the last.
            keep: put it where it is kept, not in memory that the next tile uses too.
        """

    def square_sum(self, start: int, stop: int) -> float:
        """Returns the sum of squares of the kept reduced gradient, in float64, from one thread."""

    def step(
        self,
        hyper: Hyper,
        count: int,
        scalars: Scalars,
        start: int,
        stop: int,
        kept: bool,
        scale: float,
    ) -> Scalars:
        """Applies the reduced gradient: the kept one, or the last one of `reduce`.

        Args:
            hyper: the numbers of the cell's group, in the order of `Kernel.hyper`.
            count: which step of these tensors it is, from 1.
            scalars: of these tensors, before the step.
            start: first byte.
            stop: byte after the last.
            kept: the reduced gradient is kept.
            scale: the gradient is multiplied by this first; 1 changes nothing.

        Returns:
            The scalars after the step.
        """


class TableStep(NamedTuple):
    """The input of `Lookup.step` for rows [first, stop), of tensors with equal numbers."""

    first: int
    stop: int
    step: int  # which of these tensors it is, from 1
    scalars: Scalars


class Lookup(Protocol):
    """The rows of a table that one server has, bound to their memory once.

    One thread at a time. The result of `reduce` is kept until it is called again.
    """

    def reduce(self, parts: Sequence[tuple[Rows, Bytes, float]]) -> Rows:
        """Computes the reduced gradient: the sum of weight x gradient, in the order given.

        Args:
            parts: of every slice that has one: its rows, rising and each once; their values; its
                weight.

        Returns:
            The rows that any of them has, rising.
        """

    def square_sums(self) -> NDArray[np.float64]:
        """Returns the sum of squares of each row that `reduce` returned."""

    def step(self, hyper: Hyper, parts: Sequence[TableStep], scale: float) -> list[Scalars]:
        """Applies the reduced gradient to these rows; other rows stay as they are.

        Args:
            hyper: as in `Tile.step`.
            parts: of the whole table, in its order.
            scale: the gradient is multiplied by this first; 1 changes nothing.

        Returns:
            The scalars of each part after the step.

        Raises:
            ValueError: with these numbers a step changes all rows.
        """


class Kernel(Protocol):
    """An optimizer by its description, on cells.

    Attributes:
        hyper: names of the numbers that a group has.
        states: names of the arrays of state, each with the size and dtype of the parameters.
        scalars: names of the numbers that are kept of each tensor.
        changes_kept: a step changes the reduced gradient that is kept, and no parameters.
    """

    hyper: tuple[str, ...]
    states: tuple[str, ...]
    scalars: tuple[str, ...]
    changes_kept: bool

    def bind(
        self,
        cell: Cell,
        shape: Sequence[int] | None,
        master: Bytes,
        slots: Sequence[Bytes],
        states: Mapping[str, Bytes],
        kept: Bytes,
    ) -> Tile:
        """Prepares a cell: its bytes of parameters, of each slice's gradients, of each state.

        A reduced gradient that stays is `kept` there, perhaps in the first slot. The `shape`
        belongs to the one tensor in the cell, where a tensor must not be cut; else None.
        """

    def device(self, name: str) -> ShareDevice:
        """Returns a device of this host for this arithmetic and its arrays.

        Args:
            name: as workers give it.

        Raises:
            UnavailableError: this process cannot use it, or it is unknown here.
        """

    def average(self, dtype: str, target: Bytes, source: Bytes, weight: float) -> None:
        """Moves `target` towards `source`, by `weight` of the way; 1 copies it."""

    def bind_rows(self, table: TensorSpec, master: Bytes, states: Mapping[str, Bytes]) -> Lookup:
        """Prepares rows of a table, of which `table` is a tensor: the bytes of their parameters.

        Raises:
            ValueError: this optimizer changes more than the rows that have a gradient.
        """
