"""Describes the parts of slices in a version: where their gradients lie, and their weights."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .kernel import Lent, Scalars, Weight
from .layout import Cell, Piece, Share
from .messages import POOLED, PUSHED, Bytes, Commit


@dataclass(frozen=True)
class Contribution:
    """The memory for one slice's gradients at one server; arrays have the bytes of its share.

    Attributes:
        slot: for gradients that are pushed.
        produced: for gradients that are produced in their places; None where none can be.
        pool: for gradients produced in any place of a tensor of their size; None where none can be.
        heads: for the numbers of rows of tables; `rows.heads_bytes` long.
    """

    slot: Bytes
    produced: Bytes | None = None
    pool: Bytes | None = None
    heads: Bytes = field(default_factory=lambda: np.zeros(0, np.uint8))


class Stretch(NamedTuple):
    """Tensors of a cell that are treated alike.

    `step` counts the steps applied to them, from 1; `scalars` are theirs before it.
    """

    start: int
    stop: int
    weights: tuple[Weight, ...]
    step: int
    scalars: Scalars


@lru_cache(maxsize=64)
def _weights(
    parts: tuple[tuple[float, float], ...], present: tuple[int, ...]
) -> tuple[tuple[int, float], ...]:
    """Returns (slot, weight) of the slices that have a gradient, from each commit.

    The mean by weight over all slices: one without a gradient has a gradient of 0, and one of
    weight 0 is not read, since it may not be finite. The slots of produced gradients follow all
    slots of pushed ones, and numbers for pools follow these.
    """
    total = math.fsum(weight for _, weight in parts)
    return tuple(
        (i + len(parts) * (how - PUSHED), parts[i][0] * parts[i][1] / total)
        for i, how in enumerate(present)
        if how and parts[i][1]
    )


class Contributions:
    """The contributions of all slices to one version, as their commits tell them.

    Tensors of a cell are treated at once if the same slices have a gradient for them, they had the
    same number of steps, and their scalars are equal; almost always that is the whole cell. For
    each tensor `counts` has the steps applied to it, and `scalars` a row of numbers that the
    optimizer keeps; the tensors `here` are no tables.
    """

    def __init__(
        self,
        commits: Sequence[Commit],
        counts: memoryview,
        scalars: NDArray[np.float64],
        here: Sequence[int],
        share: Share,
        memory: Sequence[Contribution],
    ) -> None:
        self._commits = commits
        self._slices = len(commits)
        self._counts = counts
        self._scalars = scalars
        self._share, self._memory = share, memory
        self._pooled = any(POOLED in commit.present for commit in commits)
        alike = [commit.present[:1] * len(commit.present) for commit in commits]
        self._all_alike = all(
            each == commit.present for each, commit in zip(alike, commits, strict=True)
        )
        # A slice without weight takes no part: its gradient does not count, and is not missed.
        weighed = [each for each in commits if each.weight]
        self.all_present = bool(weighed) and all(b"\0" not in each.present for each in weighed)
        applied = [counts[tensor] for tensor in here]
        same = not applied or min(applied) == max(applied)
        self._first_scalars: Scalars = ()
        if applied and scalars.size:
            mine = scalars[here]
            same = same and bool((mine == mine[0]).all())
            self._first_scalars = tuple(mine[0].tolist())
        self._all_same = self.all_present and same
        self._count = applied[0] + 1 if applied else 1
        self._parts = tuple((commit.scale, commit.weight) for commit in commits)
        self._all = _weights(self._parts, tuple(each[0] for each in alike if each))

    def weights(self, tensor: int) -> tuple[tuple[int, float], ...]:
        """Returns (slot, weight) of the slices that have a gradient for a tensor."""
        return _weights(self._parts, tuple([commit.present[tensor] for commit in self._commits]))

    def scalars(self, tensor: int) -> Scalars:
        """Returns the numbers that the optimizer keeps of a tensor."""
        return tuple(self._scalars[tensor].tolist()) if self._scalars.size else ()

    def of_any(self, tensors: Sequence[int]) -> list[tuple[int, float]]:
        """Returns (slice, weight) of the slices that have a gradient for any of some tensors."""
        found = {
            slot % self._slices: weight for each in tensors for slot, weight in self.weights(each)
        }
        return sorted(found.items())

    def of(self, cell: Cell) -> Iterator[Stretch]:
        """Yields the stretches of a cell for which any slice has a gradient."""
        if self._all_alike and not self._pooled and self._all_same:
            size = cell.stop - cell.start
            yield Stretch(0, size, self._all, self._count, self._first_scalars)
            return

        def treatment(piece: Piece) -> tuple[tuple[Weight, ...], int, Scalars]:
            slots = self.weights(piece.tensor)
            weights: tuple[Weight, ...] = slots
            if self._pooled:
                weights = tuple((self._find(slot, piece), weight) for slot, weight in slots)
            return weights, self._counts[piece.tensor] + 1, self.scalars(piece.tensor)

        for start, stop, (weights, step, scalars) in cell.runs(treatment):
            if weights:
                yield Stretch(start - cell.start, stop - cell.start, weights, step, scalars)

    def summed(self, cell: Cell) -> Iterator[tuple[int, int]]:
        """Yields the parts of a cell that are summed at once for a norm, wherever gradients lie."""
        if self._all_same:
            yield 0, cell.stop - cell.start
            return

        def treatment(piece: Piece) -> tuple[list[tuple[int, float]], int, Scalars]:
            weights = self.weights(piece.tensor)
            slices = [(slot % self._slices, weight) for slot, weight in weights]
            return slices, self._counts[piece.tensor] + 1, self.scalars(piece.tensor)

        for start, stop, (slices, *_) in cell.runs(treatment):
            if slices:
                yield start - cell.start, stop - cell.start

    def _find(self, slot: int, piece: Piece) -> int | Lent:
        """Returns the place of a piece of a gradient, which may be in the pool."""
        index = slot - 2 * self._slices
        if index < 0:
            return slot
        places = self._share.layout.places
        tensor, produced = divmod(self._commits[index].blocks[piece.tensor], 2)
        start = places[tensor].start + piece.start - places[piece.tensor].start - self._share.start
        memory = self._memory[index].produced if produced else self._memory[index].pool
        assert memory is not None
        return Lent(memory[start : start + piece.stop - piece.start])
