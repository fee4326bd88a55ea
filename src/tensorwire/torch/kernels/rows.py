"""Tables with sparse gradients: the rows that a step has, and what an optimizer does to them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from tensorwire.parameters import Bytes, Hyper, Rows, Scalars, TableStep

from .tile import tensor_over

# A union by marks looks at every row: only where not many more than that are in it.
_SPARSE = 64

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

    def reduce(self, parts: Sequence[tuple[Rows, Bytes, float]]) -> Rows:
        """See `parameters.Lookup.reduce`."""
        columns, dtype = self._master.shape[1], self._master.dtype
        gradients = [tensor_over(values, dtype).view(-1, columns) for _, values, _ in parts]
        if len(parts) == 1:
            rows, _, weight = parts[0]
            self._total = gradients[0] * weight
        else:
            every = [rows for rows, _, _ in parts] or [np.empty(0, np.int64)]
            rows = _union(every, len(self._master))
            self._total = torch.zeros((len(rows), columns), dtype=dtype)
            for gradient, (mine, _, weight) in zip(gradients, parts, strict=True):
                add_rows(self._total, np.searchsorted(rows, mine), gradient, weight)
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
            taken = {name: take_rows(each, rows) for name, each in whole.items()}
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
        add_rows(self._master, self._rows, total, lr if maximize else -lr)
        return [() for _ in parts]


def _no_step(*_: object) -> Scalars:
    raise NotImplementedError


def _union(every: Sequence[Rows], height: int) -> Rows:
    """The rows that are in any, rising."""
    if height > _SPARSE * sum(map(len, every)):
        return np.unique(np.concatenate(every))
    found = np.zeros(height, np.bool_)
    for rows in every:
        found[rows] = True
    return np.flatnonzero(found)


def _items(target: torch.Tensor) -> NDArray[np.void]:
    """The rows of a contiguous tensor as items; torch's indexing takes several times as long."""
    whole = target.view(-1).view(torch.uint8).numpy()
    items: NDArray[np.void] = whole.view(
        np.dtype((np.void, target.shape[1] * target.element_size()))
    )
    return items


def take_rows(source: torch.Tensor, rows: Rows) -> torch.Tensor:
    """A copy of rows of a contiguous tensor."""
    taken = torch.from_numpy(_items(source)[rows].view(np.uint8)).view(source.dtype)
    return taken.view(len(rows), source.shape[1])


def put_rows(target: torch.Tensor, rows: Rows, values: torch.Tensor) -> None:
    """Overwrites rows, each once, of a contiguous tensor."""
    items = _items(target)
    items[rows] = values.view(-1).view(torch.uint8).numpy().view(items.dtype)


def add_rows(target: torch.Tensor, rows: Rows, values: torch.Tensor, factor: float) -> None:
    """Adds to rows, each once, of a contiguous tensor."""
    taken = take_rows(target, rows)
    taken.add_(values, alpha=factor)
    put_rows(target, rows, taken)
