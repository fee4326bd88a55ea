"""Applies an optimizer to the rows of tables with sparse gradients that a step has."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from tensorwire import memory
from tensorwire.parameters import Bytes, Hyper, Rows, Scalars, TableStep

from .tile import tensor_over

# A union by marks looks at every row: only where not many more than that are in it.
_SPARSE = 64
# Memory for rows that is so many times as large as needed is dropped, unless it is small.
_SPARE, _SMALL = 16, 1 << 16

RowsStep = Callable[
    [Hyper, torch.Tensor, torch.Tensor, dict[str, torch.Tensor], TableStep], Scalars
]
"""Steps some rows: with the numbers of the group, changes the rows of parameters and of each state
by a gradient of these rows; returns the scalars after it."""


class TableRows:
    """See `parameters.Lookup`.

    Args:
        step: what a step does to rows.
        dtype: of the parameters, by its name.
        columns: of the table.
        master: its parameters.
        states: its arrays of state.
    """

    def __init__(
        self,
        step: RowsStep,
        dtype: str,
        columns: int,
        master: Bytes,
        states: Mapping[str, Bytes],
    ) -> None:
        kind = getattr(torch, dtype)
        self._step = step
        self._master = tensor_over(master, kind).view(-1, columns)
        self._states = {
            name: tensor_over(state, kind).view(-1, columns) for name, state in states.items()
        }
        self._rows: Rows = np.empty(0, np.int64)
        self._total = self._master[:0]
        self._sum, self._one = _Room(), _Room()
        self._taken = {name: _Room() for name in ("", *states)}

    def reduce(self, parts: Sequence[tuple[Rows, Bytes, float]]) -> Rows:
        """See `parameters.Lookup.reduce`."""
        height, columns = self._master.shape
        dtype = self._master.dtype
        gradients = [tensor_over(values, dtype).view(-1, columns) for _, values, _ in parts]
        if len(parts) == 1:
            rows, _, weight = parts[0]
            self._total = torch.mul(gradients[0], weight, out=self._sum.of(len(rows), self._master))
        else:
            every = [rows for rows, _, _ in parts] or [np.empty(0, np.int64)]
            rows = _union(every, height)
            self._total = self._sum.of(len(rows), self._master).zero_()
            for gradient, (mine, _, weight) in zip(gradients, parts, strict=True):
                places = np.searchsorted(rows, mine)
                add_rows(self._total, places, gradient, weight, self._one)
        self._rows = rows
        return rows

    def square_sums(self) -> NDArray[np.float64]:
        """See `parameters.Lookup.square_sums`."""
        norms = torch.linalg.vector_norm(self._total, dim=1, dtype=torch.float64)
        found: NDArray[np.float64] = norms.square_().numpy()
        return found

    def step(self, hyper: Hyper, parts: Sequence[TableStep], scale: float) -> list[Scalars]:
        """See `parameters.Lookup.step`."""
        total = self._total if scale == 1.0 else self._total * scale
        after = []
        for part in parts:
            first, stop = np.searchsorted(self._rows, (part.first, part.stop)).tolist()
            rows = self._rows[first:stop]
            whole = {"": self._master, **self._states}
            taken = {name: take_rows(each, rows, self._taken[name]) for name, each in whole.items()}
            states = {name: taken[name] for name in self._states}
            after.append(self._step(hyper, taken[""], total[first:stop], states, part))
            for name, each in whole.items():
                put_rows(each, rows, taken[name])
        return after


class PlainRows(TableRows):
    """Rows of a table under SGD without momentum and decay."""

    def __init__(self, dtype: str, columns: int, master: Bytes) -> None:
        super().__init__(_no_step, dtype, columns, master, {})

    def step(self, hyper: Hyper, parts: Sequence[TableStep], scale: float) -> list[Scalars]:
        """See `parameters.Lookup.step`."""
        lr, momentum, _, decay, _, maximize = hyper
        if momentum or decay:
            raise ValueError("momentum and weight decay change all rows of a table")
        total = self._total if scale == 1.0 else self._total * scale
        add_rows(self._master, self._rows, total, lr if maximize else -lr, self._taken[""])
        return [() for _ in parts]


def _no_step(*_: object) -> Scalars:
    raise NotImplementedError


def _union(every: Sequence[Rows], height: int) -> Rows:
    """Returns the rows that are in any, rising."""
    if height > _SPARSE * sum(map(len, every)):
        return np.unique(np.concatenate(every))
    found = np.zeros(height, np.bool_)
    for rows in every:
        found[rows] = True
    return np.flatnonzero(found)


class _Room:
    """Memory for some rows that is kept from step to step: new pages take as long as the copy."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.float32, device="cpu")

    def of(self, count: int, like: torch.Tensor) -> torch.Tensor:
        """Returns `count` rows like a table's, with any values; earlier rows are overwritten."""
        size, there = count * like.shape[1], self._memory.numel()
        if there < size or there > _SPARE * max(size, _SMALL) or self._memory.dtype != like.dtype:
            self._memory = like.new_empty(0)  # before there is other memory
            self._memory = like.new_empty(min(size + size // 4, max(size, like.numel())))
        return self._memory[:size].view(count, like.shape[1])


def take_rows(source: torch.Tensor, rows: Rows, room: _Room) -> torch.Tensor:
    """Returns a copy of rows of a contiguous tensor, in some room."""
    taken = room.of(len(rows), source)
    memory.take_rows(_bytes(source), _row_bytes(source), rows, _bytes(taken))
    return taken


def put_rows(target: torch.Tensor, rows: Rows, values: torch.Tensor) -> None:
    """Overwrites rows, each once, of a contiguous tensor."""
    memory.put_rows(_bytes(target), _row_bytes(target), rows, _bytes(values))


def _bytes(tensor: torch.Tensor) -> Bytes:
    found: Bytes = tensor.view(-1).view(torch.uint8).numpy()
    return found


def _row_bytes(tensor: torch.Tensor) -> int:
    return int(tensor.shape[1] * tensor.element_size())


def add_rows(
    target: torch.Tensor, rows: Rows, values: torch.Tensor, factor: float, room: _Room
) -> None:
    """Adds to rows, each once, of a contiguous tensor; by way of some room."""
    taken = take_rows(target, rows, room)
    taken.add_(values, alpha=factor)
    put_rows(target, rows, taken)
