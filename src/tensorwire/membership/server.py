"""Server side of membership: which members have connected, which have left, which are lost."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, ParamSpec, TypeVar

import numpy as np
from numpy.typing import NDArray

from tensorwire.durability.descriptor_store import LISTENER, DescriptorStore
from tensorwire.durability.durable_memory import RESTORED, DurableMemory
from tensorwire.errors import PeerLostError, TensorwireError
from tensorwire.membership.identity import (
    CONTROL,
    CONTROL_BYTES,
    GOODBYE,
    called,
    check_name,
    ended_in_order,
    is_open,
    listed,
    lost,
    server_name,
    taken_by,
    taker_in,
    turn_away,
    was_never_there,
    worker_name,
)
from tensorwire.membership.status import DOCTOR, READER, StatusRegion
from tensorwire.membership.takeovers import deal_places
from tensorwire.memory import Node, Peer, RemoteMailbox, Transfer

Arguments = ParamSpec("Arguments")
Answer = TypeVar("Answer")
Found = TypeVar("Found")

_TAKEOVER_S = 2.0  # for a successor to answer, before others are looked after


class ServerMember:
    """A server on the fabric, for `workers` workers.

    Args:
        count: how many servers there are; None: nobody knows yet, they come one after another.
        store: keeps the memory of this server for a successor, and has its predecessor's; None:
            memory ends with this process.
        restarts: how many servers before this one had its place, and have died.
        present: with how many workers the job began, the first ones; None: all.

    Attributes:
        index: its place among the servers.
        node: its Node.
        count: how many places for workers there are.
        workers: Peers by rank, complete after `gather`.
        servers: Peers of the other servers by index.
        readers: Peers that look at the job and are no members of it.
        durable: what it allocates outlives this process.
        allocate, free, forget, is_left: its memory, see `DurableMemory`.
    """

    def __init__(
        self,
        index: int,
        workers: int,
        node: Node,
        count: int | None = None,
        store: DescriptorStore | None = None,
        restarts: int = 0,
        present: int | None = None,
    ) -> None:
        self.index = index
        self.node = node
        self._restarts = restarts
        self.count = workers
        self._servers = count
        self._ranks = {worker_name(rank): rank for rank in range(workers)}
        self.workers: dict[int, Peer] = {}
        self.servers: dict[int, Peer] = {}
        self.readers: list[Peer] = []
        self._gone = False  # a server, for good
        self._store = store
        memory = DurableMemory(node, store)
        self.durable = memory.durable
        self.allocate, self.free, self.forget = memory.allocate, memory.free, memory.forget
        self.is_left = memory.is_left
        self._status = StatusRegion(node)
        self.control = self.allocate(CONTROL_BYTES * workers, name=CONTROL, access="w")
        self.words = [self.control.word(CONTROL_BYTES * rank) for rank in range(workers)]
        for owner, places in deal_places(workers, range(present or workers)).items():
            for rank in places[1:]:
                self.words[rank].set(taken_by(owner, 0))

    def persist(
        self,
        peer: Peer,
        action: Callable[Arguments, Answer],
        *args: Arguments.args,
        **options: Arguments.kwargs,
    ) -> Answer:
        """Repeats an action that concerns another member if that is replaced. Not the main thread.

        Raises:
            PeerLostError: it is gone for good.
        """  # fmt: skip
        while True:
            try:
                return action(*args, **options)
            except PeerLostError:
                rank = self._ranks.get(peer.name, -1)
                if not self.durable or ended_in_order(peer):
                    raise
                if rank >= 0 and self.workers.get(rank) is not peer:
                    raise  # another process has joined in its place
                while peer.lost:  # the main thread finds its successor
                    if self.node.closed or self._gone or (rank >= 0 and self.has_left(rank)):
                        raise
                    time.sleep(0.005)

    def tell_workers(
        self, boxes: Mapping[int, RemoteMailbox], data: NDArray[np.uint8], number: int
    ) -> None:
        """Writes a message to workers, by rank; to one that was killed when it was replaced.

        Not the main thread.

        Raises:
            PeerLostError: one is gone for good.
        """
        sent: dict[int, Transfer] = {}
        for rank, box in boxes.items():
            with contextlib.suppress(PeerLostError):  # the others need not wait for it
                sent[rank] = box.send(data, number)
        for rank, box in boxes.items():
            try:
                sent.pop(rank).wait()
            except (KeyError, PeerLostError):
                try:
                    self.persist(self.workers[rank], _send, box, data, number)
                except PeerLostError:
                    if not self.is_taken(rank):
                        raise

    def decline_successor(self) -> None:
        """Declines a successor of this process, because the job wants it so."""
        if self._store is not None:
            self._store.drop(LISTENER)

    def give_up(self) -> None:
        """Stops waiting for lost members: the job is over."""
        self._gone = True

    def connect(self, addresses: tuple[str, ...], timeout_s: float = 60.0) -> None:
        """Connects to the servers that were started before this one, unless all workers left."""
        for index, address in enumerate(addresses):
            deadline = time.monotonic() + timeout_s
            while True:
                if self.all_left():
                    return  # that server has ended, as this one will
                left_s = deadline - time.monotonic()
                try:
                    wait_s = min(left_s, _TAKEOVER_S) if self.durable else left_s
                    peer = self.node.connect(address, timeout_s=max(wait_s, 0.1))
                    break
                except TimeoutError:
                    if time.monotonic() > deadline:
                        raise
                except PeerLostError:  # it was killed meanwhile, and may have a successor
                    if not self.durable or time.monotonic() > deadline or not is_open(address):
                        raise
            check_name(peer, server_name(index), address)
            self.servers[index] = peer

    def gather(self, look: Callable[[], None] = lambda: None) -> None:
        """Waits until every worker has connected, and servers that came later.

        Where the number of servers is unknown, later ones have connected before any worker was
        started. A process that is not expected, or is here already, is turned away. Meanwhile
        `look` is called now and then.

        Raises:
            PeerLostError: one that had connected is gone.
        """
        while not self.all_left() and (
            self._expected() or (self._servers and self._next_servers())
        ):
            try:
                peer = self.node.accept(timeout_s=1.0)
            except TimeoutError:
                self.check()
            else:
                self._admit(peer)
            self.tell_readers()
            look()

    def _expected(self) -> list[int]:
        """Returns the workers that have neither come nor left (before a successor began)."""
        ranks = range(self.count)
        return [rank for rank in ranks if rank not in self.workers and not self.has_left(rank)]

    def _next_servers(self) -> list[int]:
        """Returns the numbers of the servers that may come now."""
        if self._servers is None:
            return [len(self.servers) + 1]  # earlier ones are here, later ones come in turn
        return [i for i in range(self.index + 1, self._servers) if i not in self.servers]

    def _admit(self, peer: Peer) -> None:
        if self._is_reader(peer) or self._take_member(peer):
            return
        missing = {
            name: (self.workers, rank)
            for name, rank in self._ranks.items()
            if rank not in self.workers
        }
        missing |= {server_name(i): (self.servers, i) for i in self._next_servers()}
        if peer.name in missing:
            table, number = missing[peer.name]
            table[number] = peer
            return
        known = [*self.workers.values(), *self.servers.values()]
        here = [called(other) for other in known if other.name == peer.name]
        why = f"{here[0]} is here already" if here else "it is no member of this job"
        self._turn_away(peer, f"{why}; expected: {listed(list(missing))}")

    def _turn_away(self, peer: Peer, reason: str) -> None:
        turn_away(peer, f"server {self.index}", reason)

    def returned(self) -> tuple[Peer, Peer] | None:
        """Returns the old and the new Peer of a worker that came back while the job runs, or None.

        The new one is another incarnation, which knows nothing of the job; the old one is gone, or
        silent and not yet missed. On one host an end is seen at once, so that a second process of
        a name is none of the job's: it is turned away, as strangers are.
        """
        with contextlib.suppress(TimeoutError):
            while True:
                peer = self.node.accept(timeout_s=0)
                if self._is_reader(peer) or self._take_member(peer) or self._take_newcomer(peer):
                    continue
                before = self.workers.get(self._ranks.get(peer.name, -1))
                if before is None:
                    self._turn_away(peer, "it is no member of this job, which runs")
                elif before.lost or before.path.transport != "shm":
                    return before, peer
                else:
                    self._turn_away(peer, f"{called(before)} is here already, and the job runs")
        return None

    def _take_member(self, peer: Peer) -> bool:
        """Takes the successor of a worker or server that had connected to this server."""
        found = {server_name(i): each for i, each in self.servers.items() if i > self.index}
        found |= {worker_name(rank): each for rank, each in self.workers.items()}
        before = found.get(peer.name)
        if not self.durable or before is None or before.incarnation != peer.incarnation:
            return False
        before.close()  # nobody is there any more
        before.succeed(peer)
        return True

    def _take_newcomer(self, peer: Peer) -> bool:
        """Takes a worker that joins in a place without one; its word will say when it is there."""
        rank = self._ranks.get(peer.name, -1)
        if rank < 0 or not self.is_taken(rank):
            return False
        if (before := self.workers.get(rank)) is not None:
            before.close()  # it has ended, or is about to
        self.workers[rank] = peer
        return True

    def _is_reader(self, peer: Peer) -> bool:
        """Takes a peer that only looks at the job or measures the way to it, at any time."""
        if peer.name.startswith((READER, DOCTOR)):
            self.readers.append(peer)
            return True
        return False

    def tell_readers(self, stores: Sequence[Mapping[str, Any]] = ()) -> None:
        """Writes the status for `tensorwire status`, if anybody reads it.

        Args:
            stores: of this server, as they are shown.
        """
        self.readers = [peer for peer in self.readers if not peer.lost]
        if self.readers:
            names = [peer.name for peer in self.readers]
            self._status.write({"readers": names, **self.described(stores)})

    def described(self, stores: Sequence[Mapping[str, Any]] = ()) -> dict[str, Any]:
        """Describes this server and the members of the job, as `tensorwire status` shows them.

        Args:
            stores: of this server, as they are shown.
        """
        workers = [self._described(rank, self.workers.get(rank)) for rank in range(self.count)]
        servers = {index: peer.address for index, peer in self.servers.items()}
        servers[self.index] = self.node.address
        processes = {(_host(peer.address), peer.pid) for peer in self.servers.values()}
        return {
            "index": self.index,
            "address": self.node.address,
            "pid": os.getpid(),
            "restarts": self._restarts if self.durable else None,
            "servers": [servers[index] for index in sorted(servers)],
            "server_processes": len(processes | {(_host(self.node.address), os.getpid())}),
            "workers": workers,
            "stores": list(stores),
        }

    def _described(self, rank: int, peer: Peer | None) -> dict[str, Any]:
        if self.is_taken(rank):
            never = was_never_there(self.words[rank].value)
            about = {"rank": rank, "state": "absent" if never else "taken", "by": self.owner(rank)}
            return about if peer is None else {**about, "pid": peer.pid}
        if peer is None:
            return {"rank": rank, "state": "expected"}
        state = "left" if self.has_left(rank) else "lost" if peer.lost else "connected"
        path = peer.path
        about = {"pid": peer.pid, "address": peer.address, "transport": path.transport}
        return {"rank": rank, "state": state, **about, "encrypted": path.encrypted}

    def await_ends(self, timeout_s: float) -> None:
        """Waits until the processes of lost workers are gone, so that their end is seen first.

        A launcher then blames them, and not the processes that end because of them.
        """
        deadline = time.monotonic() + timeout_s
        for rank, peer in self.workers.items():
            while (peer.lost or self.has_left(rank)) and time.monotonic() < deadline:
                if not os.path.exists(f"/proc/{peer.pid}"):
                    break
                time.sleep(0.01)

    def has_left(self, rank: int) -> bool:
        """Tells whether a worker said goodbye, or its place is empty and another has its slices."""
        word = self.words[rank].value
        return word >= GOODBYE and taker_in(word) != rank

    def has_said_goodbye(self, rank: int) -> bool:
        """Tells whether the worker itself said so, and no other one has its slices."""
        word = self.words[rank].value
        return word >= GOODBYE and taker_in(word) is None

    def is_taken(self, rank: int) -> bool:
        """Tells whether another worker has the slices of this one.

        This one was killed, has left, or never came.
        """
        return self.owner(rank) != rank

    def owner(self, rank: int) -> int:
        """Returns the rank that computes a worker's slices now, dead or alive."""
        word = self.words[rank].value
        while (taker := taker_in(word)) is not None and taker != rank:
            rank, word = taker, self.words[taker].value
        return rank

    def all_left(self) -> bool:
        """Tells whether all workers have left in good order."""
        return all(self.has_left(rank) for rank in range(self.count))

    def check(self) -> None:
        """Raises PeerLostError if a worker is gone without a goodbye, or a server is gone."""
        for rank, peer in self.workers.items():
            if peer.lost and not self.has_left(rank) and not self._returns(peer):
                self._gone = True
                raise lost(peer)
        for index, peer in self.servers.items():
            if not peer.lost:
                continue
            if self.durable and not ended_in_order(peer):
                self._recover(index, peer)
            elif not self._all_leave(2.0):
                raise lost(peer)

    def _returns(self, worker: Peer) -> bool:
        """Tells whether a lost worker may have a successor: it was killed, its socket is kept."""
        return self.durable and not ended_in_order(worker) and is_open(worker.address)

    def _recover(self, index: int, peer: Peer) -> None:
        """Connects to the successor of a server, if it does not connect itself.

        Raises:
            PeerLostError: there will be none.
        """
        if index > self.index or self.all_left():
            return  # it comes, and `returned` takes it
        try:
            successor = self.node.connect(peer.address, timeout_s=_TAKEOVER_S, require="shm")
            successor.wait_region(RESTORED)
        except TimeoutError:
            return
        except TensorwireError as error:
            if isinstance(error, PeerLostError) and is_open(peer.address):
                return  # it was killed too
            self._gone = True
            raise lost(peer, error) from error
        if successor.incarnation == peer.incarnation:
            peer.succeed(successor)
        else:
            successor.close()

    def _all_leave(self, timeout_s: float) -> bool:
        """Waits until all workers have said goodbye; tells whether they did in time.

        A lost server may have had all goodbyes while ours are still on their way.
        """
        deadline = time.monotonic() + timeout_s
        while not self.all_left():
            if time.monotonic() > deadline:
                return False
            time.sleep(0.01)
        return True


def _send(box: RemoteMailbox, data: NDArray[np.uint8], number: int) -> None:
    box.send(data, number).wait()


class OfWorkers(Generic[Found]):
    """A cache of one object per worker, looked up again for a worker that joins in its place.

    Args:
        member: the server.
        find: looks it up. It must not refer to the owner of this cache: a closed store gives its
            memory back once nothing refers to it, and a cycle waits for the garbage collector.
    """

    def __init__(self, member: ServerMember, find: Callable[[Peer], Found]) -> None:
        self._member, self._find = member, find
        self._found: dict[int, tuple[Peer, Found]] = {}

    def get(self, rank: int) -> Found | None:
        """Returns the object of the worker that is there now, if it was looked up."""
        peer, found = self._found.get(rank, (None, None))
        return found if peer is not None and self._member.workers.get(rank) is peer else None

    def find(self, rank: int) -> Found:
        """Returns the object of the worker that is there now, after a look-up if need be.

        Raises:
            PeerLostError, LookupError, ...: it is not found.
        """
        if (known := self.get(rank)) is not None:
            return known
        peer = self._member.workers[rank]
        found = self._find(peer)
        self._found[rank] = peer, found
        return found

    def all(self) -> dict[int, Found]:
        """Returns the objects of the workers that are there now, by rank."""
        return {r: found for r in list(self._found) if (found := self.get(r)) is not None}

    def clear(self) -> None:
        """Forgets all objects."""
        self._found.clear()


def _host(address: str) -> str:
    return address.rpartition(":")[0]
