"""Averages and scales gradients on servers where worker 0 makes the optimizer's steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from tensorwire.parameters import AVERAGE_ONLY as AVERAGE_ONLY
from tensorwire.parameters import Bytes, Cell, Hyper, Lookup, Scalars, TensorSpec, Tile

from .tile import Averaging, CellTile


class AveragedTile(CellTile):
    """A cell whose gradients are averaged, and no more."""

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
        """Scales the gradient kept for worker 0; parameters are as they were."""
        if not kept:
            raise ValueError("gradients that worker 0 applies must be kept")
        if scale != 1.0:
            self._part(self._kept, start, stop).mul_(scale)
        return scalars


class ReductionKernel(Averaging):
    """`parameters.Kernel` without an optimizer."""

    changes_kept = True
    hyper: tuple[str, ...] = ()
    states: tuple[str, ...] = ()
    scalars: tuple[str, ...] = ()
    keeps_count = False

    def hyper_of(self, optimizer: torch.optim.Optimizer) -> tuple[Hyper, ...]:
        """Returns no numbers, as none matters to the servers."""
        return ((),) * len(optimizer.param_groups)

    def bind(
        self,
        cell: Cell,
        shape: Sequence[int] | None,
        master: Bytes,
        slots: Sequence[Bytes],
        states: Mapping[str, Bytes],
        kept: Bytes,
    ) -> Tile:
        """Binds a cell, see `parameters.Kernel.bind`."""
        return AveragedTile(cell.dtype, master, slots, states, kept)

    def bind_rows(self, table: TensorSpec, master: Bytes, states: Mapping[str, Bytes]) -> Lookup:
        """Refuses rows of a table."""
        raise ValueError("sparse gradients need an optimizer on the servers")
