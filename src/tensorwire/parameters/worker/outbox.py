"""What a worker sends of its gradients to one server, unit by unit; see `parameters/units.py`."""

from __future__ import annotations

import itertools
from collections.abc import Container, Mapping
from typing import Any, NamedTuple

import numpy as np

from tensorwire.memory import Peer, RemoteRegion, RemoteWord, Transfer

from ..layout import Share
from ..messages import Bytes
from ..rows import Gradient, Table, part_of
from ..units import STAMP_BYTES, units_of


class _Part(NamedTuple):
    """The bytes `piece` of a tensor, which go to `region` with a unit."""

    unit: int
    piece: slice
    region: RemoteRegion


class Outbox:
    """What a worker sends of one slice to one server. Errors are those of writing to a peer.

    Attributes:
        transfers: all that were started; whoever has waited for them clears them.
        bytes_sent: since the start.

    Args:
        peer: the server.
        share: its cells.
        slot: the slice's gradients there.
        words: of the units.
        heads: the slice's row numbers there; None if the server has no rows of tables.
        sends: tensors whose gradients come from this worker.
    """

    def __init__(
        self,
        peer: Peer,
        share: Share,
        slot: RemoteRegion,
        words: RemoteRegion,
        heads: RemoteRegion | None,
        sends: Container[int],
    ) -> None:
        self.transfers: list[Transfer] = []
        self.bytes_sent = 0
        self._peer = peer
        units = units_of(share)
        self._stamps = np.zeros(len(units), np.uint64)
        self._writes = 0
        self._words: list[RemoteWord] = [words.word(STAMP_BYTES * i) for i in range(len(units))]
        self._last: list[Transfer | None] = [None] * len(units)
        self._waiting: list[dict[int, list[tuple[Any, RemoteRegion]]]] = [{} for _ in units]
        self._gradients = [0] * len(units)  # how many a unit has from here
        layout = share.layout
        self._parts: list[list[_Part]] = [[] for _ in layout.spec.tensors]
        for number, unit in enumerate(units):
            begin, end = share.cells[unit.start].start, share.cells[unit.stop - 1].stop
            pieces = [piece for index in unit for piece in share.cells[index].pieces]
            for tensor in dict.fromkeys(piece.tensor for piece in pieces):
                place = layout.places[tensor]
                start, stop = max(place.start, begin), min(place.end, end)
                if start < stop:
                    piece = slice(start - place.start, stop - place.start)
                    region = slot[start - share.start : stop - share.start]
                    self._parts[tensor].append(_Part(number, piece, region))
                    trained = layout.spec.tensors[tensor].kind in ("trained", "rows")
                    self._gradients[number] += trained and tensor in sends
        self._slot, self._heads = slot, heads
        self._unit_of = {cell: number for number, unit in enumerate(units) for cell in unit}

    def push(self, tensor: int, data: Any) -> None:
        """Sends what is complete by it; `data` as in `Store.push`."""
        parts = self._parts[tensor]
        if not parts:
            return
        flat = np.frombuffer(data, np.uint8)
        for unit, piece, region in parts:
            self._wait_for_others(unit, tensor, [(flat[piece], region)])

    def push_rows(self, table: Table, gradients: Mapping[int, Gradient]) -> None:
        """Sends the gradients of a table, all in one."""
        unit = self._unit_of[table.cells.start]
        pieces = remote_part(table, gradients, self._heads, self._slot)
        self._waiting[unit] = {table.tensors[0]: pieces}
        self._send(unit)

    def _wait_for_others(
        self, unit: int, tensor: int, pieces: list[tuple[Any, RemoteRegion]]
    ) -> None:
        waiting = self._waiting[unit]
        waiting[tensor] = pieces
        if len(waiting) == self._gradients[unit]:
            self._send(unit)

    def flush(self) -> None:
        """Sends the rest."""
        for unit, waiting in enumerate(self._waiting):
            if waiting:
                self._send(unit)

    def stamps(self) -> Bytes:
        """Of each unit's last write, as they follow a commit."""
        return self._stamps.view(np.uint8)

    def _send(self, unit: int) -> None:
        waiting, self._waiting[unit] = self._waiting[unit], {}
        last = self._last[unit]
        if last is not None:
            last.wait()  # the word speaks of all that was sent of the unit; seldom still under way
        self._writes += 1
        self._stamps[unit] = self._writes
        locals_, regions = zip(*itertools.chain(*waiting.values()), strict=True)
        signal = self._words[unit], self._writes
        transfer = self._peer.write(locals_, regions, signal=signal)
        self._last[unit] = transfer
        self.transfers.append(transfer)
        self.bytes_sent += sum(each.nbytes for each in locals_)


def remote_part(
    table: Table,
    gradients: Mapping[int, Gradient],
    heads: RemoteRegion | None,
    slot: RemoteRegion,
) -> list[tuple[Any, RemoteRegion]]:
    """What is written of the gradients of a table to one server, and where."""
    assert heads is not None
    head, values = part_of(table, gradients)
    pieces: list[tuple[Any, RemoteRegion]] = [(head, heads[table.head : table.head + head.nbytes])]
    at = table.start
    for each in values:
        pieces.append((each, slot[at : at + each.nbytes]))
        at += each.nbytes
    return pieces
