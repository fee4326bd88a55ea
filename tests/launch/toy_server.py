"""A real server whose arithmetic is numpy's, so that it starts at once: SGD with momentum.

Or, for an optimizer called "sum", what parameters are the sum of all gradients of, and state too.
"""

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tensorwire.parameters import (
    Bytes,
    Cell,
    Hyper,
    Kernel,
    Lookup,
    Rows,
    Scalars,
    TableStep,
    TensorSpec,
    Tile,
    Weight,
    serve,
)


class ToyTile:
    """See `parameters.Tile`."""

    def __init__(self, master: Bytes, slots: Sequence[Bytes], velocity: Bytes, kept: Bytes) -> None:
        self._master, self._velocity = master.view(np.float32), velocity.view(np.float32)
        self._slots, self._kept = [each.view(np.float32) for each in slots], kept.view(np.float32)
        self._reduced = self._kept

    def reduce(self, weights: Sequence[Weight], start: int, stop: int, keep: bool) -> None:
        part = slice(start // 4, stop // 4)
        total = sum(self._slots[where][part] * np.float32(w) for where, w in weights)  # type: ignore[index]
        self._reduced = np.asarray(total, np.float32)
        if keep:
            self._kept[part] = self._reduced

    def square_sum(self, start: int, stop: int) -> float:
        part = self._kept[start // 4 : stop // 4].astype(np.float64)
        return float(part @ part)

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
        part = slice(start // 4, stop // 4)
        gradient = (self._kept[part] if kept else self._reduced) * np.float32(scale)
        self._velocity[part] = np.float32(0.9) * self._velocity[part] + gradient
        self._master[part] -= np.float32(hyper[0] * scalars[0]) * self._velocity[part]
        return (scalars[0] * 0.99 + 0.01 * count,)


class SumTile(ToyTile):
    """Whatever is applied twice, or not at all, is seen."""

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
        part = slice(start // 4, stop // 4)
        gradient = self._kept[part] if kept else self._reduced
        self._velocity[part] += gradient
        self._master[part] += gradient
        return (scalars[0] + 1.0,)


class ToyLookup:
    """See `parameters.Lookup`: plain SGD on rows."""

    def __init__(self, columns: int, master: Bytes) -> None:
        self._master = master.view(np.float32).reshape(-1, columns)
        self._rows: Rows = np.zeros(0, np.int64)
        self._total = self._master[:0].copy()

    def reduce(self, parts: Sequence[tuple[Rows, Bytes, float]]) -> Rows:
        self._rows = np.unique(np.concatenate([np.zeros(0, np.int64), *(p[0] for p in parts)]))
        self._total = np.zeros((len(self._rows), self._master.shape[1]), np.float32)
        for rows, values, weight in parts:
            at = np.searchsorted(self._rows, rows)
            self._total[at] += values.view(np.float32).reshape(len(rows), -1) * np.float32(weight)
        return self._rows

    def square_sums(self) -> Any:
        return (self._total.astype(np.float64) ** 2).sum(1)

    def step(self, hyper: Hyper, parts: Sequence[TableStep], scale: float) -> list[Scalars]:
        self._master[self._rows] -= np.float32(hyper[0] * scale) * self._total
        return [(part.scalars[0] * 0.5 + 1.0,) for part in parts]


class ToyKernel:
    """See `parameters.Kernel`."""

    hyper: tuple[str, ...] = ("lr",)
    states: tuple[str, ...] = ("velocity",)
    scalars: tuple[str, ...] = ("warmth",)
    changes_kept = False

    def __init__(self, tile: type[ToyTile] = ToyTile) -> None:
        self._tile = tile

    def bind(
        self,
        cell: Cell,
        shape: Sequence[int] | None,
        master: Bytes,
        slots: Sequence[Bytes],
        states: Mapping[str, Bytes],
        kept: Bytes,
    ) -> Tile:
        return self._tile(master, slots, states.get("velocity", master), kept)

    def average(self, dtype: str, target: Bytes, source: Bytes, weight: float) -> None:
        a, b = target.view(np.float32), source.view(np.float32)
        a += np.float32(weight) * (b - a)

    def bind_rows(self, table: TensorSpec, master: Bytes, states: Mapping[str, Bytes]) -> Lookup:
        return ToyLookup(table.shape[1], master)


def kernels(options: Any) -> Any:
    kernels: dict[str, Kernel] = {"toy": ToyKernel(), "sum": ToyKernel(SumTile)}
    return kernels.__getitem__


if __name__ == "__main__":
    sys.exit(serve(None, "toy_server", kernels))
