"""Names the regions of a store and defines their sizes and layout.

No other file does, for workers or servers. docs/internals/parameters.md says what each is for.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from tensorwire.membership.server import ServerMember
from tensorwire.membership.worker import WorkerMember
from tensorwire.memory import Region, mailbox_bytes

from .journal import PROGRESS_AT, SIZE_AT, WORK_AT
from .layout import Share, Spec, padded
from .messages import BLOCK_BYTES, RESULT_BYTES, Bytes, Commit
from .rows import changed_starts, heads_bytes, tables_of
from .snapshot import REPLY_BYTES


class RegionKind(StrEnum):
    """The purpose of a region; also the end of its name, after the number of the store."""

    # At a worker, VIEW also at a server; SENT of each slice.
    RESULT, SPEC, VIEW, CHANGED, SENT = "result", "spec", "view", "changed", "sent"
    # At a server, of each slice.
    SLOT, PRODUCED, POOL, BLOCKS, ROWS = "slot", "produced", "pool", "blocks", "rows"
    # At a server: of each commit of a version, of each state of the optimizer, and once.
    COMMIT, ARRIVED, STATE = "commit", "arrived", "state"
    COUNTS, SCALARS, AVERAGED = "counts", "scalars", "averaged"
    NORMS, MASTER = "norms", "master"
    # At a server whose share is on a device, there: the parameters.
    ON_DEVICE = "on device"
    # At all servers but the first, where each worker goes at its own pace.
    ORDER = "order"
    # Of snapshots of versions: requests, the holders of snapshots, and each snapshot, at a server;
    # the answers, at a worker.
    ASKS, HOLDERS, SNAPSHOT, REPLY = "asks", "holders", "snapshot", "reply"
    # At a server whose memory outlives it.
    OPENING, JOURNAL, UNDO, TABLE_UNDO, KEPT = "opening", "journal", "undo", "table undo", "kept"
    # LEDGER where each worker goes at its own pace and memory outlives the server; PAUSES always.
    LEDGER, PAUSES = "ledger", "pauses"
    # At server 0: where the store stands still while the job is paused, see hold.py; what is
    # written meanwhile, at each server.
    HOLD, WRITTEN = "hold", "written"


AVERAGE = "average of weights"
"""The name of the array of state that has the averages of the values of trained tensors."""


_RESULT_BLOCK_BYTES = mailbox_bytes(RESULT_BYTES)
_REPLY_BLOCK_BYTES = mailbox_bytes(REPLY_BYTES)
_STAMP_BYTES = 8
_ORDER_BYTES = 24
_LEDGER_BYTES, _LEDGER_SLICE_BYTES = 1 << 15, 1 << 13  # pages that are never written need no memory
# Peers may not access these.
_UNSEEN = (
    RegionKind.OPENING, RegionKind.JOURNAL, RegionKind.UNDO, RegionKind.TABLE_UNDO,
    RegionKind.HOLDERS, RegionKind.LEDGER, RegionKind.PAUSES,
)  # fmt: skip
_AT_WORKER = {RegionKind.SPEC: "r", RegionKind.SENT: "none"}
_AT_WORKER |= dict.fromkeys((RegionKind.RESULT, RegionKind.REPLY), "w")
_LEAST_BYTES = 64  # also of a share without cells


def region_name(store: int, kind: RegionKind, which: int | str | None = None) -> str:
    """Returns the name of a region; `which` tells the slice, commit or state that it is of."""
    return f"{store}/{kind}" if which is None else f"{store}/{kind}/{which}"


def allocate_at_worker(
    member: WorkerMember, store: int, kind: RegionKind, size_bytes: int, which: int | None = None
) -> Region:
    """Allocates a region of a worker."""
    name, access = region_name(store, kind, which), _AT_WORKER.get(kind, "rw")
    if kind == RegionKind.VIEW and not member.memory.durable:
        return member.node.allocate(size_bytes, name=name, access=access, mappable=True)
    if access == "r" and member.memory.durable:
        access = "rw"
    return member.memory.allocate(size_bytes, name=name, access=access)


def order_places(spec: Spec) -> int:
    """Returns how many events of ORDER can be under way at once."""
    return 3 * spec.slices + 4


def result_block(server: int) -> slice:
    """Returns the part of a worker's RESULT that a server writes to."""
    return slice(_RESULT_BLOCK_BYTES * server, _RESULT_BLOCK_BYTES * (server + 1))


def reply_block(server: int) -> slice:
    """Returns the part of a worker's REPLY that a server writes to."""
    return slice(_REPLY_BLOCK_BYTES * server, _REPLY_BLOCK_BYTES * (server + 1))


def units_of(share: Share) -> tuple[range, ...]:
    """Returns the units: the runs of a share's cells that travel together over a network.

    A unit has at most `layout.cell_bytes`, or is one cell, or all cells of a table. Its gradients
    are of one block, so that none of them waits long for the others. A worker writes a unit when it
    has all its gradients, and the write raises the unit's word to the number of the write. The
    commit goes ahead and tells these numbers, as stamps. So a server can work on the units that
    come first, and send back new values, while the rest is on its way: both ways of a link are
    used. No result relies on the order of writes.
    """
    units: list[range] = []
    tables = {table.cells.start: table.cells for table in tables_of(share)}
    for index, cell in enumerate(share.cells):
        if cell.kind == "rows":
            if index in tables:
                units.append(tables[index])
        elif (
            units
            and share.cells[units[-1].start].kind != "rows"
            and share.cells[units[-1].start].block == cell.block
            and cell.stop - share.cells[units[-1].start].start <= share.layout.cell_bytes
        ):
            units[-1] = range(units[-1].start, index + 1)
        else:
            units.append(range(index, index + 1))
    return tuple(units)


class ServerRegions:
    """The regions of one store at one server.

    Attributes:
        share, tables, units: of the server.
        unit_words: the offsets of the words of the units in ARRIVED.
    """

    def __init__(self, store: int, shares: Sequence[Share], server: int) -> None:
        self._store, self._shares = store, shares
        self.server, self.servers = server, len(shares)
        self.share = share = shares[server]
        self.tables, self.units = tables_of(share), units_of(share)
        spec, count = share.layout.spec, len(share.layout.spec.tensors)
        commit = Commit.size_bytes(spec.groups, len(spec.hyper), count)
        stamps = _STAMP_BYTES * len(self.units)
        self.unit_words = range(0, stamps, _STAMP_BYTES)
        self._stamps = slice(commit, commit + stamps)
        # In two places, for servers that are a version apart.
        norms = padded(mailbox_bytes(8 * max(len(each.cells) for each in shares), 2))
        self._norms_bytes = norms
        self._sizes = {
            RegionKind.VIEW: share.layout.size_bytes,
            RegionKind.BLOCKS: BLOCK_BYTES * count,
            RegionKind.ROWS: heads_bytes(share),
            RegionKind.COUNTS: 8 * count,
            RegionKind.AVERAGED: 8 * count,
            RegionKind.SCALARS: 8 * count * len(spec.scalars),
            RegionKind.COMMIT: mailbox_bytes(commit + stamps),
            RegionKind.ARRIVED: stamps,
            RegionKind.NORMS: norms * len(shares),
            RegionKind.ORDER: mailbox_bytes(_ORDER_BYTES, order_places(spec)),
            RegionKind.LEDGER: _LEDGER_BYTES + _LEDGER_SLICE_BYTES * spec.slices,
        }  # of all others: the share's
        written = RegionKind.COMMIT, RegionKind.ARRIVED, RegionKind.NORMS, RegionKind.ORDER
        self._access = dict.fromkeys(written, "w")
        # A worker that has a part of the model reads the rest there.
        self._access[RegionKind.MASTER] = "none" if spec.pipeline == 1 else "r"

    def name(self, kind: RegionKind, which: int | str | None = None) -> str:
        """Returns the name of a region; `which` tells the slice, commit or state that it is of."""
        return region_name(self._store, kind, which)

    def allocate(
        self,
        member: ServerMember,
        kind: RegionKind,
        which: int | str | None = None,
        size_bytes: int | None = None,
        device: str | None = None,
    ) -> Region:
        """Allocates a region at the server, never empty; `size_bytes` None: the kind's size."""
        if size_bytes is None:
            size_bytes = self._sizes.get(kind, self.share.size_bytes)
        access = "none" if kind in _UNSEEN else self._access.get(kind, "rw")
        counters: dict[str, int | None] = {}
        if kind == RegionKind.JOURNAL:
            counters = {"progress": PROGRESS_AT, "work": WORK_AT, "size": SIZE_AT}
        name = self.name(kind, which)
        size_bytes = max(size_bytes, _LEAST_BYTES)
        return member.allocate(size_bytes, name=name, access=access, device=device, **counters)

    def changed_start(self) -> int:
        """Returns the offset of the server's part of a worker's CHANGED."""
        return changed_starts(self._shares)[self.server]

    def stamps(self, body: Bytes) -> NDArray[np.uint64]:
        """Returns a copy of the stamps of the units, from the memory after a commit's word."""
        return np.frombuffer(body[self._stamps].tobytes(), np.uint64)

    def norms_block(self, server: int) -> slice:
        """Returns the part of NORMS that a server writes to."""
        return slice(self._norms_bytes * server, self._norms_bytes * (server + 1))
