"""Brings a slice's gradients to a server: by copies into mapped memory, or by writes."""

from __future__ import annotations

import itertools
from collections.abc import Container, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from tensorwire.memory import Peer, RemoteMailbox, RemoteRegion, Transfer, mailbox_bytes

from ..layout import WITH_GRADIENT, Spec
from ..messages import POOLED, Bytes, Commit
from ..regions import RegionKind, ServerRegions
from ..rows import Gradient, Table, part_of

_BUCKET_BYTES = 512 << 10


class _Sender:
    """The way of a slice to a server; `commit` is the number of this worker's commit for it.

    Attributes:
        transfers: all that were started; the caller clears them after it has waited.
        bytes_sent: since the start.
    """

    def __init__(self, peer: Peer, regions: ServerRegions, slice_index: int, commit: int) -> None:
        self.transfers: list[Transfer] = []
        self.bytes_sent = 0
        self._peer, self._regions = peer, regions
        self._slot = peer.region(regions.name(RegionKind.SLOT, slice_index))
        self._heads: RemoteRegion | None = None
        if regions.tables:
            self._heads = peer.region(regions.name(RegionKind.ROWS, slice_index))
        self._commit = peer.region(regions.name(RegionKind.COMMIT, commit))
        self._commits = RemoteMailbox(self._commit)

    def read_commit(self, spec: Spec) -> Commit:
        """Returns the last commit of the slice, from any worker; where the memory is mapped."""
        shape = spec.groups, len(spec.hyper), len(spec.tensors)
        return Commit.from_bytes(self._commit.array()[mailbox_bytes(0) :], *shape)

    @property
    def committed(self) -> int:
        """The last version that was committed; where the memory is mapped."""
        return int(self._commit.array()[:8].view(np.uint64)[0])

    def _find(self, tensor: int, begin: int, end: int) -> tuple[RemoteRegion, slice | None] | None:
        """Returns the target of a tensor's bytes in [begin, end), and the part if it is not all."""
        place = self._regions.share.layout.places[tensor]
        start, stop = max(place.start, begin), min(place.end, end)
        if start >= stop:
            return None
        base = self._regions.share.start
        piece = slice(start - place.start, stop - place.start)
        whole = (start, stop) == (place.start, place.end)
        return self._slot[start - base : stop - base], None if whole else piece

    def _part(
        self, table: Table, gradients: Mapping[int, Gradient]
    ) -> list[tuple[Any, RemoteRegion]]:
        """Returns the pieces of a table's gradients to write, each with its target."""
        assert self._heads is not None
        head, values = part_of(table, gradients)
        pieces: list[Any] = [(head, self._heads[table.head : table.head + head.nbytes])]
        at = table.start
        for each in values:
            pieces.append((each, self._slot[at : at + each.nbytes]))
            at += each.nbytes
        return pieces


class Copier(_Sender):
    """A sender to a server whose memory is mapped here: it copies, small gradients together."""

    def __init__(self, peer: Peer, regions: ServerRegions, slice_index: int, commit: int) -> None:
        super().__init__(peer, regions, slice_index, commit)
        count, share = len(regions.share.layout.places), regions.share
        self._blocks = peer.region(regions.name(RegionKind.BLOCKS, slice_index)).array("uint32")[
            :count
        ]
        self._targets = [self._find(tensor, share.start, share.stop) for tensor in range(count)]
        self._locals: list[Any] = []
        self._remotes: list[RemoteRegion] = []
        self._pending_bytes = 0

    def read_commit(self, spec: Spec) -> Commit:
        """See `_Sender`."""
        commit = super().read_commit(spec)
        pools = POOLED in commit.present
        return replace(commit, blocks=self._blocks.tolist()) if pools else commit

    def push(self, tensor: int, data: Any) -> int:
        """Copies a tensor's bytes, now or with others; `data` and the result as in `Store.push`."""
        target = self._targets[tensor]
        if target is None:
            return 0
        region, piece = target
        self._locals.append(data if piece is None else memoryview(data).cast("B")[piece])
        self._remotes.append(region)
        size = region.size_bytes
        self._pending_bytes += size
        if self._pending_bytes >= _BUCKET_BYTES:
            self.flush()
        return size

    def push_rows(self, table: Table, gradients: Mapping[int, Gradient]) -> None:
        """Copies the gradients of a table with the next `flush`."""
        for data, region in self._part(table, gradients):
            self._locals.append(data)
            self._remotes.append(region)
            self._pending_bytes += data.nbytes

    def flush(self) -> None:
        """Copies pending gradients."""
        if not self._locals:
            return
        transfer = self._peer.write(self._locals, self._remotes)
        transfer.wait()  # it is complete; if the server was lost all stays pending
        self.transfers.append(transfer)
        self.bytes_sent += self._pending_bytes
        self._locals, self._remotes, self._pending_bytes = [], [], 0

    def commit(self, commit: Commit, data: Bytes) -> None:
        """Writes the commit; its word is raised after all copies of the slice."""
        if commit.blocks:
            pooled = np.flatnonzero(np.frombuffer(commit.present, np.uint8) == POOLED)
            self._blocks[pooled] = np.array(commit.blocks, np.uint32)[pooled]
        self._commits.send(data, commit.version, self.transfers).wait()


class Outbox(_Sender):
    """A sender to a server over a network: it writes unit by unit; see `regions.units_of`.

    Only gradients of tensors that this worker `sends` are waited for to complete a unit.
    """

    def __init__(
        self,
        peer: Peer,
        regions: ServerRegions,
        slice_index: int,
        commit: int,
        sends: Container[int],
    ) -> None:
        super().__init__(peer, regions, slice_index, commit)
        units, share, tensors = regions.units, regions.share, regions.share.layout.spec.tensors
        arrived = peer.region(regions.name(RegionKind.ARRIVED, commit))
        self._words = [arrived.word(offset) for offset in regions.unit_words]
        self._stamps = np.zeros(len(units), np.uint64)
        self._writes = 0
        self._last: list[Transfer | None] = [None] * len(units)
        self._waiting: list[dict[int, list[tuple[Any, RemoteRegion]]]] = [{} for _ in units]
        self._gradients = [0] * len(units)  # how many a unit has from here
        self._parts: list[list[tuple[int, RemoteRegion, slice | None]]] = [[] for _ in tensors]
        for number, unit in enumerate(units):
            begin, end = share.cells[unit.start].start, share.cells[unit.stop - 1].stop
            pieces = [piece for index in unit for piece in share.cells[index].pieces]
            for tensor in dict.fromkeys(piece.tensor for piece in pieces):
                if found := self._find(tensor, begin, end):
                    self._parts[tensor].append((number, *found))
                    trained = tensors[tensor].kind in WITH_GRADIENT
                    self._gradients[number] += trained and tensor in sends
        self._unit_of = {cell: number for number, unit in enumerate(units) for cell in unit}

    def push(self, tensor: int, data: Any) -> int:
        """Sends units that are complete by a tensor; `data` and the result as in `Store.push`."""
        parts = self._parts[tensor]
        if not parts:
            return 0
        flat = np.frombuffer(data, np.uint8)
        for unit, region, piece in parts:
            waiting = self._waiting[unit]
            waiting[tensor] = [(flat if piece is None else flat[piece], region)]
            if len(waiting) == self._gradients[unit]:
                self._send(unit)
        return 0

    def push_rows(self, table: Table, gradients: Mapping[int, Gradient]) -> None:
        """Sends the gradients of a table, all in one."""
        unit = self._unit_of[table.cells.start]
        self._waiting[unit] = {table.tensors[0]: self._part(table, gradients)}
        self._send(unit)

    def flush(self) -> None:
        """Sends the units that wait for gradients which do not come."""
        for unit, waiting in enumerate(self._waiting):
            if waiting:
                self._send(unit)

    def commit(self, commit: Commit, data: Bytes) -> None:
        """Sends the commit and the stamps of units, ahead of units under way."""
        announced = np.concatenate([data, self._stamps.view(np.uint8)])
        self.transfers.append(self._commits.send(announced, commit.version))

    def _send(self, unit: int) -> None:
        waiting, self._waiting[unit] = self._waiting[unit], {}
        last = self._last[unit]
        if last is not None:
            last.wait()  # the word stands for all writes of the unit; seldom still under way
        self._writes += 1
        self._stamps[unit] = self._writes
        locals_, regions = zip(*itertools.chain(*waiting.values()), strict=True)
        signal = self._words[unit], self._writes
        transfer = self._peer.write(locals_, regions, signal=signal)
        self._last[unit] = transfer
        self.transfers.append(transfer)
        self.bytes_sent += sum(each.nbytes for each in locals_)
