"""Asks servers for snapshots of a store, each of one version, and reads them, for a worker."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from tensorwire.errors import TensorwireError, TimeoutError, consequence
from tensorwire.failpoints import failpoint
from tensorwire.membership.worker import WorkerMember
from tensorwire.memory import Mailbox, Peer, RemoteMailbox, RemoteRegion, mailbox_bytes

from ..layout import Extent, Layout
from ..messages import Bytes
from ..regions import RegionKind, allocate_at_worker, reply_block
from ..snapshot import (
    AVERAGED,
    BELL_BYTES,
    COUNTS,
    REQUEST_BYTES,
    REQUEST_PLACES,
    SCALARS,
    VALUES,
    Parts,
    Reply,
    Request,
    RequestKind,
    RequestOutcome,
    busy,
    state,
)
from .link import Answers, Link

_AGAIN_S = 1.0  # without an answer the server is asked again
_HELD_LOOK_S = 0.05  # whether others have written what is held for them
_HELD_S = 300.0  # the longest wait for others' snapshots
_BLOCK_BYTES = mailbox_bytes(REQUEST_BYTES, REQUEST_PLACES)


class Readable(Protocol):
    """One version of a store, to be read."""

    def value(self, place: Extent) -> Bytes:
        """Returns the parameter at a place of the layout."""

    def state(self, name: str, place: Extent) -> Bytes:
        """Returns a state of the optimizer for the parameter there."""

    def counts(self, averaged: bool = False) -> NDArray[np.int64]:
        """See `Store.counts`."""

    def scalars(self) -> NDArray[np.float64]:
        """See `Store.scalars`."""


class Snapshot(Readable, Protocol):
    """A version of a store, unchanged by the store's later versions. Any thread, one at a time.

    The results of `value` and `state` are complete after `fetch`, never change, and may be used
    until `release`.
    """

    version: int

    def has(self, address: int) -> bool:
        """Tells whether an address is in memory that `value` or `state` has returned."""

    def fetch(self) -> None:
        """Fills returned arrays that lie in other memory: of other hosts, cut between servers.

        Raises:
            RuntimeError: the job is over.
            PeerLostError: a server is gone.
        """

    def release(self) -> None:
        """Gives the memory back, here and at the servers; idempotent."""


class Source(Protocol):
    """The parts of a store that are read; see `Store`."""

    layout: Layout

    def read_values(self, target: Bytes) -> None:
        """See `Store`."""

    def read_state(self, name: str, target: Bytes) -> None:
        """See `Store`."""

    def counts(self, averaged: bool = False) -> NDArray[np.int64]:
        """See `Store`."""

    def scalars(self) -> NDArray[np.float64]:
        """See `Store`."""


class PresentVersion:
    """See `Readable`: the present version of a store, for as long as it stays.

    Every array is read once.
    """

    def __init__(self, store: Source) -> None:
        self._store, self.counts, self.scalars = store, store.counts, store.scalars
        self._arrays: dict[str, Bytes] = {}

    def value(self, place: Extent) -> Bytes:
        """See `Readable`."""
        return self._read("", self._store.read_values)[place.start : place.end]

    def state(self, name: str, place: Extent) -> Bytes:
        """See `Readable`."""
        read = partial(self._store.read_state, name)
        return self._read(name, read)[place.start : place.end]

    def _read(self, name: str, read: Callable[[Bytes], None]) -> Bytes:
        if name not in self._arrays:
            array = np.empty(self._store.layout.size_bytes, np.uint8)
            read(array)
            self._arrays[name] = array
        return self._arrays[name]


class Given:
    """The addresses of arrays that a snapshot has returned."""

    def __init__(self) -> None:
        self._addresses: set[int] = set()

    def add(self, part: Bytes) -> Bytes:
        """Notes the address of a part, and returns the part."""
        if part.nbytes:
            self._addresses.add(part.ctypes.data)
        return part

    def has(self, address: int) -> bool:
        """See `Snapshot`."""
        return address in self._addresses


class LocalSnapshot:
    """See `Snapshot`: copies in this process.

    Args:
        version: of the store.
        parts: what is copied, by the names of a snapshot's parts.
        released: called once.
    """

    def __init__(
        self, version: int, parts: Mapping[str, NDArray[Any]], released: Callable[[], object]
    ) -> None:
        self.version = version
        self._parts = {name: part.copy() for name, part in parts.items()}
        self._released, self._given = released, Given()
        self.has = self._given.has

    def value(self, place: Extent) -> Bytes:
        """See `Readable`."""
        return self._given.add(self._parts[VALUES][place.start : place.end])

    def state(self, name: str, place: Extent) -> Bytes:
        """See `Readable`."""
        return self._given.add(self._parts[state(name)][place.start : place.end])

    def counts(self, averaged: bool = False) -> NDArray[np.int64]:
        """See `Readable`."""
        return self._parts[AVERAGED if averaged else COUNTS]

    def scalars(self) -> NDArray[np.float64]:
        """See `Readable`."""
        return self._parts[SCALARS]

    def fetch(self) -> None:
        """See `Snapshot`."""

    def release(self) -> None:
        """See `Snapshot`."""
        if self._parts:
            self._parts.clear()
            self._released()


class ServerPart(NamedTuple):
    """A server's part of a snapshot; `memory` is its region's, if it is mapped."""

    link: Link
    region: RemoteRegion
    parts: Parts
    memory: Bytes | None

    def bytes_of(self, name: str, start: int, stop: int) -> slice:
        """Returns the place in the region of bytes [start, stop) of the store."""
        first = self.parts.place(name).start - self.link.share.start
        return slice(first + start, first + stop)


class RemoteSnapshot:
    """See `Snapshot`: in memory of the servers.

    Args:
        asker: has asked for it.
        version: of the store.
        number: of the request.
        layout: of the store.
        found: what each server has of it.
    """

    def __init__(
        self, asker: Asker, version: int, number: int, layout: Layout, found: list[ServerPart]
    ) -> None:
        self.version, self._asker, self._number, self._layout = version, asker, number, layout
        self._found, self._given = found, Given()
        self._pending: list[tuple[ServerPart, slice, Bytes]] = []
        self.has = self._given.has

    def value(self, place: Extent) -> Bytes:
        """See `Readable`."""
        return self._part(VALUES, place)

    def state(self, name: str, place: Extent) -> Bytes:
        """See `Readable`."""
        return self._part(state(name), place)

    def _part(self, name: str, place: Extent) -> Bytes:
        owners = [each for each in self._found if each.link.has(place)]
        if len(owners) == 1 and (memory := owners[0].memory) is not None:
            return self._given.add(memory[owners[0].bytes_of(name, place.start, place.end)])
        target = np.empty(place.end - place.start, np.uint8)
        for each in owners:
            start = max(place.start, each.link.share.start)
            stop = min(place.end, each.link.share.stop)
            part = target[start - place.start : stop - place.start]
            self._pending.append((each, each.bytes_of(name, start, stop), part))
        return self._given.add(target)

    def counts(self, averaged: bool = False) -> NDArray[np.int64]:
        """See `Readable`."""
        name = AVERAGED if averaged else COUNTS
        total = np.zeros(len(self._layout.places), np.int64)
        for each in self._found:
            np.maximum(total, self._whole(each, name).view(np.int64), out=total)
        return total

    def scalars(self) -> NDArray[np.float64]:
        """See `Readable`."""
        places, spec = self._layout.places, self._layout.spec
        total = np.zeros((len(places), len(spec.scalars)))
        for each in self._found if total.size else ():
            part = self._whole(each, SCALARS).view(np.float64).reshape(total.shape)
            # All servers of a cut tensor know the same.
            here = [tensor for tensor, place in enumerate(places) if each.link.has(place)]
            total[here] = part[here]
        return total

    @staticmethod
    def _whole(found: ServerPart, name: str) -> Bytes:
        place = found.parts.place(name)
        data = np.empty(place.stop - place.start, np.uint8)
        if data.size:
            found.link.read(found.region[place], data)
        return data

    def fetch(self) -> None:
        """See `Snapshot`."""
        for each, place, target in self._pending:
            each.link.read(each.region[place], target)
        self._pending.clear()

    def release(self) -> None:
        """See `Snapshot`. Where the job is over the servers have freed it."""
        if self._found:
            self._found.clear()
            self._pending.clear()
            with contextlib.suppress(TensorwireError, RuntimeError):
                self._asker.free(self._number)


class Asker:
    """A worker's side of the snapshots of one store. Any thread.

    Args:
        member: this worker.
        number: of the store.
        layout: of the store.
        links: to the servers.
        answers: of the servers.
    """

    def __init__(
        self,
        member: WorkerMember,
        number: int,
        layout: Layout,
        links: Sequence[Link],
        answers: Answers,
    ) -> None:
        self._member, self._store, self._layout = member, number, layout
        self._links, self._answers = links, answers
        self._asking = threading.Lock()  # a request has its answer before the next one
        self._outboxes: list[tuple[RemoteRegion, RemoteMailbox]] = []
        self._inboxes: list[Mailbox] = []
        self._requests = 0

    def make(self, version: int) -> Snapshot:
        """Makes a snapshot of the present version; this worker has not committed the next one.

        Where others hold as many as there may be, it waits until one of them gives one back.

        Raises:
            BusyError: this worker holds as many as there may be, or others did for 300 s; the
                message names them.
            MemoryError: a server has none left for it.
            RuntimeError: the job is over, or the version is not in place.
            PeerLostError: a server is gone.
        """
        deadline = time.monotonic() + _HELD_S
        number, refused = self._try(version)
        while RequestOutcome.HELD in refused and time.monotonic() < deadline:
            time.sleep(_HELD_LOOK_S)  # not asking: a thread of this one may give one back
            number, refused = self._try(version)
        if not refused:
            failpoint("snapshot.held")
            found = [self._find(link, number) for link in self._links]
            return RemoteSnapshot(self, version, number, self._layout, found)
        outcome, text = next(iter(refused.items()))
        if outcome in (RequestOutcome.BUSY, RequestOutcome.HELD):
            raise busy(text)
        if outcome == RequestOutcome.NO_MEMORY:
            raise MemoryError(text)
        raise RuntimeError(f"no snapshot of version {version} can be made: {text}")

    def _try(self, version: int) -> tuple[int, dict[RequestOutcome, str]]:
        """Asks for a snapshot; returns the request's number, and each refusal with its text."""
        with self._asking:
            replies = self._ask(Request(RequestKind.MAKE, version))
            number = self._requests
            told: dict[RequestOutcome, str] = {each.outcome: each.text for each in replies}
            refused = {outcome: told[outcome] for outcome in told if outcome}
            if refused:
                self._ask(Request(RequestKind.FREE, number=number))
        return number, refused

    def pause(self) -> int:
        """Waits until all servers stand still after the same version, and returns it.

        Raises:
            RuntimeError: the job is over.
            PeerLostError: a server is gone.
        """
        with self._asking:
            versions = {int(each.text) for each in self._ask(Request(RequestKind.PAUSE))}
        failpoint("pause.held")
        if len(versions) > 1:
            raise RuntimeError(f"the servers paused at different versions: {sorted(versions)}")
        return versions.pop()

    def go_on(self) -> None:
        """Ends the pause of the servers."""
        with self._asking:
            self._ask(Request(RequestKind.GO_ON))

    def _find(self, link: Link, number: int) -> ServerPart:
        region = link.region(RegionKind.SNAPSHOT, f"{self._member.place.rank}.{number}")
        head = np.empty(Parts.head_bytes(), np.uint8)
        link.read(region[: len(head)], head)
        return ServerPart(link, region, Parts.read(head), region.array() if link.mapped else None)

    def free(self, number: int) -> None:
        """Gives the memory of a snapshot back to the servers."""
        with self._asking:
            self._ask(Request(RequestKind.FREE, number=number))

    def free_all(self) -> None:
        """Gives back all snapshots of a predecessor of this process.

        The servers do not wait for its pauses any more.
        """
        with self._asking:
            self._ask(Request(RequestKind.FREE_ALL))

    def _ask(self, request: Request) -> list[Reply]:
        """Returns every server's answer."""
        if not self._outboxes:
            self._open()
        self._requests += 1
        boxes = list(zip(self._links, self._outboxes, self._inboxes, strict=True))
        data, number = request.to_bytes(), self._requests
        for link, (bell, outbox), _ in boxes:
            self._answers.attempt(link.peer, _send, bell, outbox, data, number)
        if request.kind == RequestKind.MAKE:
            failpoint("snapshot.asked")
        elif request.kind == RequestKind.PAUSE:
            failpoint("pause.asked")
        return [
            self._answers.attempt(link.peer, self._wait, link.peer, bell, inbox, number)
            for link, (bell, _), inbox in boxes
        ]

    def _wait(self, peer: Peer, bell: RemoteRegion, inbox: Mailbox, number: int) -> Reply:
        while True:
            try:
                return Reply.from_bytes(inbox.wait(number, _AGAIN_S, peer=peer))
            except TimeoutError:
                if reason := self._answers.reason():
                    raise consequence(reason) from None
                bell.word(0).fetch_add(1)

    def _open(self) -> None:
        size = reply_block(len(self._links)).start
        region = allocate_at_worker(self._member, self._store, RegionKind.REPLY, size)
        self._inboxes = [Mailbox(region[reply_block(i)]) for i in range(len(self._links))]
        start = BELL_BYTES + self._member.place.rank * _BLOCK_BYTES
        block = slice(start, start + _BLOCK_BYTES)
        found = []
        for link in self._links:
            asks, word = link.region(RegionKind.ASKS), np.zeros(1, np.uint64)
            link.read(asks[start : start + 8], word)  # the last request of a predecessor
            self._requests = max(self._requests, int(word[0]))
            found.append((asks, RemoteMailbox(asks[block], REQUEST_PLACES)))
        self._outboxes = found


def _send(bell: RemoteRegion, outbox: RemoteMailbox, data: Bytes, number: int) -> None:
    outbox.send(data, number).wait()
    bell.word(0).fetch_add(1)  # many write this word: no addition is lost
