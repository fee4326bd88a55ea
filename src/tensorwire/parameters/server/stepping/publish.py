"""Writes a server's messages about a version: new values, sums and results."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tensorwire.errors import ClosedError, PeerLostError, StaleHandleError, TensorwireError
from tensorwire.failpoints import failpoint
from tensorwire.membership.server import OfWorkers, ServerMember
from tensorwire.memory import Mailbox, Peer, RemoteMailbox, RemoteRegion, Transfer, take_rows

from ...kernel import Rows
from ...layout import Selection, Share
from ...messages import POISON, Bytes, Result
from ...regions import RegionKind, region_name, result_block
from ...rows import Table, change
from ..opening import Opening

_CHUNK_BYTES = 1 << 20  # new values leave in pieces of about this size, or of a cell


class RemoteView(NamedTuple):
    """The memory in which workers see a selection of the parameters.

    The changes of a step to tables are put into `changes`; without these, into `memory`.
    """

    memory: RemoteRegion
    selection: Selection
    changes: RemoteRegion | None


class Publication:
    """The place of the parameters of a share, its `master`, and the views that get them.

    Attributes:
        master: the parameters.
        place: the server that has them, the kind of its region, and the offset of them there.
    """

    def __init__(self, opening: Opening) -> None:
        regions, servers = opening.regions, opening.member.servers
        self._share = share = regions.share
        self._views: list[RemoteView] = []
        self.master: Bytes = np.empty(0, np.uint8)
        self.place = regions.server, RegionKind.VIEW, share.start
        part, whole = slice(share.start, share.stop), Selection(share.layout)
        if regions.server in opening.homes:
            self.master = opening.allocate(RegionKind.VIEW).array()[part]
        for home in sorted(opening.homes - {regions.server}):
            region = opening.look_up(servers[home], RegionKind.VIEW)
            if region.mapped and not self.master.size:
                self.master = region.array()[part]
                self.place = home, RegionKind.VIEW, share.start
            elif share.size_bytes:
                self._views.append(RemoteView(region, whole, None))
        # In memory that outlives its worker a version comes whole, see `Deliveries`.
        alone = opening.durable and not opening.mode.is_sync
        for rank, each in sorted(opening.descriptions.items()) if not alone else ():
            if each.home == -1 and each.view == rank and share.size_bytes:
                worker, changes = opening.member.workers[rank], None
                region = worker.region(regions.name(RegionKind.VIEW))
                if regions.tables:
                    changes = worker.region(regions.name(RegionKind.CHANGED))
                    changes = changes[regions.changed_start() :]
                selection = Selection(share.layout, each.wants)
                self._views.append(RemoteView(region, selection, changes))
        if not self.master.size:
            self.master = opening.allocate(RegionKind.MASTER).array()[: share.size_bytes]
            self.place = regions.server, RegionKind.MASTER, 0

    def begin(self, version: int) -> Chunks | None:
        """Returns the publisher of a version while it is made; None without views to write to."""
        return Chunks(self._share, self.master, self._views, version) if self._views else None


class Chunks:
    """A publisher that sends new values to the views while other cells are still worked on."""

    def __init__(
        self, share: Share, master: Bytes, views: Sequence[RemoteView], version: int
    ) -> None:
        self._share, self._master, self._views = share, master, views
        self._version = version
        self._piece_bytes = min(_CHUNK_BYTES, share.layout.cell_bytes)
        self._lock = threading.Lock()
        self._ready: list[tuple[int, int]] = []
        self._bytes = 0
        self._sent: list[Transfer] = []

    def __call__(self, start: int, stop: int) -> None:
        """See `Publisher`."""
        with self._lock:
            self._ready.append((start, stop))
            self._bytes += stop - start
            if self._bytes < self._piece_bytes:
                return
            ready = self._take()
        self._write(ready, self._views)

    def rows(self, table: Table, rows: Rows) -> None:
        """See `Publisher`."""
        if not len(rows):
            return
        base = self._share.start
        few = len(rows) <= table.capacity
        whole = [view for view in self._views if not few or view.changes is None]
        self._write([(base + table.start, base + table.stop)], whole)
        if not few:
            return
        values = np.empty(len(rows) * table.row_bytes, np.uint8)
        take_rows(self._master[table.start : table.stop], table.row_bytes, rows, values)
        head = change(self._version, rows)
        for view in self._views:
            if view.changes is None:
                continue
            head_at = view.changes[table.changed : table.changed + head.nbytes]
            values_at = view.changes[table.values_at : table.values_at + values.nbytes]
            self._sent += [head_at.write(head), values_at.write(values)]

    def finish(self) -> list[Transfer]:
        """Sends the rest; returns the transfers of all values."""
        self._write(self._take(), self._views)
        return self._sent

    def _take(self) -> list[tuple[int, int]]:
        ready, self._ready, self._bytes = sorted(self._ready), [], 0
        joined: list[tuple[int, int]] = []
        for start, stop in ready:
            if joined and joined[-1][1] == start:
                joined[-1] = (joined[-1][0], stop)
            else:
                joined.append((start, stop))
        return joined

    def _write(self, ranges: Sequence[tuple[int, int]], views: Sequence[RemoteView]) -> None:
        base = self._share.start
        for view in views:
            for first, last in ranges:
                for start, stop, at in view.selection.of(first, last):
                    piece = self._master[start - base : stop - base]
                    self._sent.append(view.memory[at : at + stop - start].write(piece))


class Norms:
    """The exchange of sums of squares among the servers of a store.

    It is ready when every server has made its own.
    """

    def __init__(self, opening: Opening) -> None:
        regions, region = opening.regions, opening.allocate(RegionKind.NORMS)
        # Two where each worker goes at its own pace: no worker waits until all have read the last.
        places = 1 if opening.mode.is_sync else 2
        self._persist = opening.member.persist
        self._servers, block = regions.servers, regions.norms_block
        self._others = {}
        for server, peer in sorted(opening.member.servers.items()):
            theirs = opening.look_up(peer, RegionKind.NORMS)[block(regions.server)]
            ends = Mailbox(region[block(server)], places), RemoteMailbox(theirs, places)
            self._others[server] = peer, *ends
            self._persist(peer, _say_ready, theirs)
        for peer, inbox, _ in self._others.values():
            self._persist(peer, partial(inbox.wait, 1, peer=peer))

    def exchange(self, version: int, mine: NDArray[np.float64]) -> list[float]:
        """Returns all servers' sums for a version, in the cells' order; `mine` are this one's."""
        for peer, _, outbox in self._others.values():
            self._persist(peer, _send, outbox, mine, version)
        failpoint("norms.sent")
        found: list[float] = []
        for server in range(self._servers):
            theirs = mine
            if server in self._others:
                peer, inbox, _ = self._others[server]
                told = self._persist(peer, partial(inbox.wait, version, peer=peer))
                theirs = told.view(np.float64)
            found += theirs.tolist()
        failpoint("norms.awaited")
        return found


def say_through(opening: Opening, version: int) -> None:
    """Tells the other servers that this one has made the last version of a store.

    A server that knows it of all others may have freed its regions; it is left out.
    """
    regions, member, block = opening.regions, opening.member, opening.regions.norms_block
    nothing = np.zeros(0)
    for peer in member.servers.values():
        with contextlib.suppress(LookupError, PeerLostError, StaleHandleError):
            theirs = member.persist(peer, peer.region, regions.name(RegionKind.NORMS))
            outbox = RemoteMailbox(theirs[block(regions.server)])
            member.persist(peer, _send, outbox, nothing, version)


def await_others(opening: Opening, version: int) -> None:
    """Returns when all servers have made the last version of a store.

    Until then the regions of each must stay, because the successor of another one needs them to
    make it.
    """
    member, block = opening.member, opening.regions.norms_block
    region = opening.region(RegionKind.NORMS)
    for server, peer in member.servers.items():
        with contextlib.suppress(PeerLostError):  # it ended, because all workers have left
            member.persist(peer, partial(Mailbox(region[block(server)]).wait, version, peer=peer))


def _say_ready(block: RemoteRegion) -> None:
    block.word(0).set(1).wait(30.0)


def _send(outbox: RemoteMailbox, data: NDArray[np.float64], number: int) -> None:
    outbox.send(data, number).wait()


class Results:
    """This server's results to all workers of a store, which need not be open yet."""

    def __init__(self, member: ServerMember, number: int) -> None:
        self._member, self._name = member, region_name(number, RegionKind.RESULT)
        block = result_block(member.index)
        self._mailboxes = OfWorkers[RemoteMailbox](member, partial(_mailbox, self._name, block))
        self._over = False
        self._sending = threading.Lock()  # a result must not follow the message that all is over

    def tell_opened(self) -> None:
        """Tells every worker that the store is open; PeerLostError if one of them is gone."""
        mailboxes = self._find()
        if any(r not in mailboxes and not self._is_over(r) for r in range(self._member.count)):
            raise PeerLostError(
                "a worker has left while others make an optimizer; its own messages tell why"
            )
        for mailbox in mailboxes.values():
            mailbox.send(Result(1).to_bytes(), 1).wait(30.0)

    def tell_again(self, version: int, data: Bytes) -> None:
        """Repeats a predecessor's message to all present workers; some may have got it."""
        for rank, peer in list(self._member.workers.items()):
            with contextlib.suppress(LookupError, TensorwireError):
                self._member.persist(peer, self._mailboxes.find, rank)
        self._member.tell_workers(self._living(), data, version)

    def tell(self, result: Result) -> None:
        """Tells every worker that a version is in place; ClosedError if they know of the end."""
        data = result.to_bytes()
        with self._sending:
            if self._over:
                raise ClosedError("the job is over")
            for rank, peer in list(self._member.workers.items()):
                if not self._is_over(rank):  # a worker that has committed has the region
                    with contextlib.suppress(PeerLostError):
                        self._member.persist(peer, self._mailboxes.find, rank)
            self._member.tell_workers(self._living(), data, result.version)

    def _is_over(self, rank: int) -> bool:
        """Tells whether a place has no worker any more, so that it gets no messages."""
        return self._member.is_taken(rank)

    def _living(self) -> dict[int, RemoteMailbox]:
        return {r: box for r, box in self._mailboxes.all().items() if not self._is_over(r)}

    def answer(self, rank: int, number: int, data: bytes, after: list[Transfer]) -> None:
        """Tells one worker, after transfers that are under way; adds its own transfer to these."""
        told = np.frombuffer(data, np.uint8)
        with self._sending:
            if self._over:
                raise ClosedError("the job is over")
            sent = self._mailboxes.find(rank).send(told, number, after or None)
        after.append(sent)

    def answer_surely(self, rank: int, number: int, data: bytes) -> None:
        """Tells one worker, or the process that takes its place when it was killed."""
        with self._sending:
            if self._over:
                raise ClosedError("the job is over")
            boxes = {rank: self._mailboxes.find(rank)}
            self._member.tell_workers(boxes, np.frombuffer(data, np.uint8), number)

    def answer_again(self, rank: int, number: int, data: bytes) -> None:
        """Repeats to one worker, if it is there, a message that a predecessor may have told it."""
        if (peer := self._member.workers.get(rank)) is None:
            return
        with contextlib.suppress(LookupError, TensorwireError):
            self._member.persist(peer, self._mailboxes.find, rank)
        if self._mailboxes.get(rank) is not None:
            with contextlib.suppress(PeerLostError):  # it has left
                self.answer_surely(rank, number, data)

    def poison(self, text: str) -> None:
        """Tells every worker that no version will follow. Called once, by the main thread."""
        if self._over:
            return
        with self._sending:
            self._over = True
        result = Result(0, failed=True, message=text).to_bytes()
        for mailbox in self._find().values():
            with contextlib.suppress(TensorwireError):  # it is the one that is lost, or leaves too
                mailbox.send(result, POISON).wait(2.0)

    def close(self) -> None:
        """Stops answering: no worker waits for a version any more."""
        self._over = True
        self._mailboxes.clear()

    def _find(self) -> dict[int, RemoteMailbox]:
        """Looks for the regions of the present workers; returns all mailboxes that were found."""
        for rank, peer in list(self._member.workers.items()):
            if not peer.lost:
                with contextlib.suppress(LookupError, TensorwireError):
                    self._mailboxes.find(rank)
        return self._mailboxes.all()


def _mailbox(name: str, block: slice, worker: Peer) -> RemoteMailbox:
    return RemoteMailbox(worker.region(name, 5.0)[block])
