"""Makes a server's snapshots of a store: copies of its share of one version, lent to readers.

A thread of its own copies while the store's thread waits for commits. The reader is a worker that
has the version that it asks for and has not committed the next one. So the version stays in place,
at all servers, until the copy is there: a successor can make the copy again, and all servers have
the same version in it. Holds are noted in memory that outlives this process.

Readers that are no workers cannot hold a version back; lending.py makes their copies.
"""

from __future__ import annotations

import contextlib
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import NamedTuple

import numpy as np

from tensorwire.errors import ClosedError, StaleHandleError, TensorwireError, TimeoutError
from tensorwire.failpoints import failpoint
from tensorwire.membership.server import OfWorkers
from tensorwire.memory import Mailbox, Peer, Region, RemoteMailbox, mailbox_bytes

from ...messages import Bytes
from ...regions import AVERAGE, RegionKind, reply_block
from ...shard_memory import ShardMemory
from ...snapshot import (
    AVERAGED,
    BELL_BYTES,
    COUNTS,
    MOST_SNAPSHOTS,
    REQUEST_BYTES,
    REQUEST_PLACES,
    SCALARS,
    VALUES,
    Parts,
    Reply,
    Request,
    RequestKind,
    RequestOutcome,
    state,
)
from ..opening import Opening
from .pauses import Pauses

_LOOK_S = 1.0  # whether the holders of snapshots are still there
_FIND_S = 5.0
_CHUNK_BYTES = 16 << 20
_BLOCK_BYTES = mailbox_bytes(REQUEST_BYTES, REQUEST_PLACES)
_NOTE_WORDS = 8  # of each snapshot: 1 + rank of its holder, number, version


class Loan(NamedTuple):
    """A snapshot: the worker that holds it, by its rank, the number of its request, the version."""

    rank: int
    number: int
    version: int


class Snapshots:
    """The snapshots of one store at this server, and the thread that makes them.

    Args:
        opening: of the store.
        memory: what is copied.
        fail: is told of an error after which the thread cannot go on.

    Attributes:
        present: the version in place; set when all of it is written, before anybody is told.
        pauses: in which versions stand still for a worker.
        ask_pause: is called, at server 0, when a worker has asked for one: rank and number.
    """

    def __init__(
        self,
        opening: Opening,
        memory: ShardMemory,
        fail: Callable[[BaseException], None],
    ) -> None:
        self._opening, self._member, self._memory = opening, opening.member, memory
        self.present, self._fail = 1, fail
        count = self._member.count
        asks = opening.allocate(RegionKind.ASKS, None, BELL_BYTES + count * _BLOCK_BYTES)
        self._bell = asks.word(0)
        starts = [BELL_BYTES + rank * _BLOCK_BYTES for rank in range(count)]
        blocks = [asks[start : start + _BLOCK_BYTES] for start in starts]
        self._inboxes = [Mailbox(block, REQUEST_PLACES) for block in blocks]
        words = _NOTE_WORDS * MOST_SNAPSHOTS
        notes = opening.allocate(RegionKind.HOLDERS, None, 8 * words).array("int64")[:words]
        self._notes = notes.reshape(MOST_SNAPSHOTS, -1)
        self._answered = [0] * count  # by rank, the number of the request
        self.pauses, self._pausing = Pauses(opening), [0] * count
        self.ask_pause: Callable[[int, int], None] = lambda rank, number: None
        found = opening.regions.name(RegionKind.REPLY), reply_block(self._member.index)
        self._outboxes = OfWorkers[RemoteMailbox](self._member, partial(_outbox, *found))
        # Those of a predecessor go on; what it was about to make or to free is not kept.
        self._regions = {held: self._allocate(held) for _, held in self._noted()}
        self._member.forget(f"{opening.regions.name(RegionKind.SNAPSHOT)}/")
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="tensorwire-snapshots", daemon=True)

    def start(self) -> None:
        """Begins to answer requests, after `present` was set."""
        self._thread.start()

    def look(self) -> None:
        """Makes the thread look at requests again. Any thread."""
        with contextlib.suppress(ClosedError, StaleHandleError):
            self._bell.set(self._bell.value + 1)

    def close(self) -> None:
        """Ends the thread and frees all snapshots: the store is about to be freed."""
        self._closing = True
        self.look()
        if self._thread.ident is not None:
            self._thread.join()
        for held in list(self._regions):
            self._free(held)

    def _run(self) -> None:
        try:
            while True:
                seen = self._bell.value
                for held in list(self._regions):  # first: the next request may need the place
                    if self._is_gone(held.rank):
                        self._free(held)
                for rank in range(self._member.count):
                    if self._closing:
                        return
                    self._serve(rank)
                with contextlib.suppress(TimeoutError):
                    self._bell.wait_until(seen + 1, _LOOK_S if self._regions else None)
        except (ClosedError, StaleHandleError):
            return  # the job is over
        except BaseException as error:
            if not self._closing:
                traceback.print_exc()
                self._fail(error)

    def _serve(self, rank: int) -> None:
        """Does a worker's last request, unless it was done and answered."""
        number = self._inboxes[rank].count
        if number <= self._answered[rank]:
            return
        request = Request.from_bytes(self._inboxes[rank].message(number))
        reply, kind = Reply(RequestOutcome.DONE), request.kind
        if kind == RequestKind.PAUSE:
            if not self.pauses.is_begun(rank, number):  # the answer is sent once it is
                if self._pausing[rank] < number:
                    self._pausing[rank] = number
                    self.ask_pause(rank, number)
                return
            reply = Reply(RequestOutcome.DONE, str(self.pauses.version))
        if kind in (RequestKind.GO_ON, RequestKind.FREE_ALL):
            self.pauses.end(rank, number)
            failpoint("pause.ended")
        if kind == RequestKind.MAKE:
            reply = self._made(Loan(rank, number, request.version))
        # Both are idempotent, as a successor of this process repeats them.
        if kind in (RequestKind.FREE, RequestKind.FREE_ALL):
            for held in list(self._regions):
                is_meant = kind == RequestKind.FREE_ALL or held.number == request.number
                if held.rank == rank and is_meant:
                    self._free(held)
            failpoint("snapshot.freed")
        # For a worker that is gone a process in its place asks anew.
        with contextlib.suppress(TensorwireError, LookupError):
            outbox = self._outboxes.find(rank)
            outbox.send(reply.to_bytes(), number).wait(_FIND_S)
            self._answered[rank] = number
        failpoint("snapshot.told")

    def _made(self, asked: Loan) -> Reply:
        if asked in self._regions:
            return Reply(RequestOutcome.DONE)
        where = f"server {self._member.index}"
        if self._is_gone(asked.rank):
            return Reply(RequestOutcome.REFUSED, f"worker {asked.rank} has ended")
        if self.present != asked.version:
            text = f"{where} is at version {self.present}, and {asked.version} was asked for"
            return Reply(RequestOutcome.REFUSED, text)
        if all(self._notes[:, 0]):
            listed = ", ".join(f"version {h.version} for worker {h.rank}" for h in self._regions)
            text = (
                f"{where} holds {len(self._regions)} snapshots of one optimizer's store, the most "
                f"at a time: {listed}"
            )
            mine = all(held.rank == asked.rank for held in self._regions)
            return Reply(RequestOutcome.BUSY if mine else RequestOutcome.HELD, text)
        region = None
        try:
            region = self._allocate(asked)
            failpoint("snapshot.allocated")
            self._copy(asked.version, region)
            failpoint("snapshot.copied")
            self._regions[asked] = region
            row = self._notes[next(i for i in range(MOST_SNAPSHOTS) if not self._notes[i, 0])]
            row[1], row[2] = asked.number, asked.version
            row[0] = 1 + asked.rank  # last: then it is held
            failpoint("snapshot.noted")
        except MemoryError as error:
            if region is not None:
                self._member.free(region)
            return Reply(RequestOutcome.NO_MEMORY, f"{where} has no memory for a snapshot: {error}")
        return Reply(RequestOutcome.DONE)

    def _copy(self, version: int, region: Region) -> None:
        memory, arrays = region.array(), self._arrays()
        parts = Parts.of(version, arrays)
        parts.write_head(memory)
        for name, array in arrays.items():
            target = memory[parts.place(name)]
            for start in range(0, len(array), _CHUNK_BYTES):
                if self._closing:
                    raise ClosedError("the store is freed")
                part = slice(start, start + _CHUNK_BYTES)
                self._memory.bring(target[part], array[part])

    def _arrays(self) -> Mapping[str, Bytes]:
        """Returns the parts of a snapshot, by name."""
        memory, size = self._memory, self._opening.regions.share.size_bytes
        return {VALUES: memory.master[:size], **whole_arrays(memory, size)}

    def _allocate(self, held: Loan) -> Region:
        size = Parts.of(held.version, self._arrays()).size_bytes
        which = f"{held.rank}.{held.number}"
        return self._opening.regions.allocate(self._member, RegionKind.SNAPSHOT, which, size)

    def _noted(self) -> Iterator[tuple[int, Loan]]:
        """Yields the noted holds, with their rows."""
        for row, (holder, number, version, *_) in enumerate(self._notes.tolist()):
            if holder:
                yield row, Loan(holder - 1, number, version)

    def _free(self, held: Loan) -> None:
        for row, each in self._noted():
            if each == held:
                self._notes[row, 0] = 0
        self._member.free(self._regions.pop(held))

    def _is_gone(self, rank: int) -> bool:
        """Tells whether the holder of a snapshot has ended; its successor has none.

        A worker that leaves by a change still writes its snapshots.
        """
        peer = self._member.workers.get(rank)
        return peer is None or peer.lost or self._member.has_said_goodbye(rank)


def whole_arrays(memory: ShardMemory, size_bytes: int) -> Mapping[str, Bytes]:
    """Returns a shard's arrays besides values, by the names of a snapshot's parts."""
    arrays = {state(name): each[:size_bytes] for name, each in memory.states.items()}
    if memory.average is not None:
        arrays[state(AVERAGE)] = memory.average[:size_bytes]
    arrays[COUNTS] = memory.counts.view(np.uint8)
    arrays[AVERAGED] = memory.averaged.view(np.uint8)
    arrays[SCALARS] = memory.scalars.reshape(-1).view(np.uint8)
    return arrays


def arrays_on_host(memory: ShardMemory, size_bytes: int) -> Mapping[str, Bytes]:
    """Returns a shard's arrays besides values, with copies of arrays on a device."""
    arrays = whole_arrays(memory, size_bytes)
    return {name: memory.on_host(array) for name, array in arrays.items()}


def _outbox(name: str, block: slice, worker: Peer) -> RemoteMailbox:
    return RemoteMailbox(worker.region(name, _FIND_S)[block])
