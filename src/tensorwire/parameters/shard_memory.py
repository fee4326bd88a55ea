"""Describes the memory of one server's share of a store, which its steps read and change."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from .bundles import DEVICE_BUNDLE_BYTES, bundles_of
from .contributions import Contribution
from .device import DeviceBytes, ShareDevice
from .kernel import Kernel
from .layout import Cell, Share
from .messages import Bytes
from .rows import tables_of


@dataclass(frozen=True)
class ShardMemory:
    """The memory of a shard; arrays have the bytes of its share.

    Attributes:
        master: the parameters.
        contributions: of each slice.
        states: optimizer state by name.
        counts: int64, one per tensor of the whole store: steps that were applied to it.
        scalars: float64, a row per tensor of the whole store: numbers that the optimizer keeps.
        average: the averages of the values that trained tensors had; None: they are not wanted.
        averaged: int64, one per tensor of the whole store: how many values its average has.
        kept: for the reduced gradient; None: it is kept in slot 0.
        written: for parameters that are written while the job is paused; None: they never are.
        device: has what steps change: the states, averages and what is produced; None: the host.
        on_device: the parameters there, of which `master` gets the new values.
    """

    master: Bytes
    contributions: Sequence[Contribution]
    states: Mapping[str, Bytes] = field(default_factory=dict)
    counts: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    scalars: NDArray[np.float64] = field(default_factory=lambda: np.zeros((0, 0)))
    average: Bytes | None = None
    averaged: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    kept: Bytes | None = None
    written: Bytes | None = None
    device: ShareDevice | None = None
    on_device: DeviceBytes = None

    @property
    def worked_on(self) -> Bytes | DeviceBytes:
        """The parameters that steps change."""
        return self.master if self.device is None else self.on_device

    def bundles(self, share: Share) -> dict[int, tuple[Cell, range]]:
        """Returns the bundles of cells that a step changes at once; see `bundles_of`."""
        return bundles_of(share.cells, 0 if self.device is None else DEVICE_BUNDLE_BYTES)

    def bring(self, target: Bytes, source: Bytes | DeviceBytes) -> None:
        """Copies bytes of one of these arrays to memory of the host; returns when that is done."""
        if self.device is None or isinstance(source, np.ndarray):
            target[:] = source
        else:
            self.device.copy(target, source)
            self.device.synchronize()

    def on_host(self, array: Bytes | DeviceBytes) -> Bytes:
        """Returns one of these arrays; from a device as a copy."""
        if self.device is None or isinstance(array, np.ndarray):
            return array
        found = np.empty(len(array), np.uint8)
        self.bring(found, array)
        return found

    def changed_by_cell(self, share: Share, kernel: Kernel) -> dict[int, list[Bytes]]:
        """Returns, for each bundle that a step changes, the parts of the arrays that it changes."""
        average = [] if self.average is None else [self.average]
        whole = [self.worked_on, *self.states.values(), *average]
        if kernel.changes_kept and self.kept is not None:
            whole = [self.kept, *average]
        return {
            index: [each[cell.start - share.start : cell.stop - share.start] for each in whole]
            for index, (cell, _) in self.bundles(share).items()
        }

    def changed_by_table(self, share: Share) -> dict[int, list[Bytes]]:
        """Returns, for each table by its first cell, the parts of arrays that a step changes."""
        whole = [self.master, *self.states.values()]
        return {
            table.cells.start: [each[table.start : table.stop] for each in whole]
            for table in tables_of(share)
        }
