"""Worker side of membership: a worker's connections to all servers until it leaves."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from tensorwire import failpoints
from tensorwire.durability.descriptor_store import JOINS, STORE, TERM, DescriptorStore
from tensorwire.durability.durable_memory import RESTORED, DurableMemory, open_node
from tensorwire.durability.history import HISTORY_BYTES, POSITIONS_AT, History
from tensorwire.errors import PeerLostError, TensorwireError, UnavailableError
from tensorwire.jobs.host import LOOPBACK
from tensorwire.membership.colocation import Colocation
from tensorwire.membership.identity import (
    CONTROL,
    CONTROL_BYTES,
    FAREWELL,
    GOODBYE,
    check_name,
    ended_in_order,
    is_open,
    server_name,
    told_of_plain,
    worker_name,
)
from tensorwire.membership.takeovers import Takeovers
from tensorwire.membership.world import World
from tensorwire.memory import Node, Peer, RemoteWord

_WATCH_S = 0.05
_TAKEOVER_S = 60.0  # a successor may have to be started first, on a busy machine
Arguments = ParamSpec("Arguments")
Answer = TypeVar("Answer")


class WorkerMember:
    """A worker on the fabric, connected to every server.

    Attributes:
        place: its place.
        node: its Node.
        servers: Peers, in order.
        colocation: which other workers are on this host.
        memory: its regions.
        history: what it has got from others; None: no process could take its place.
        takeovers: of the slices of workers that are gone; None: there are none.
        without_server_s: for each server that was killed, how long this worker was without it.
    """

    def __init__(
        self,
        place: World,
        node: Node,
        servers: tuple[Peer, ...],
        memory: DurableMemory,
        history: History | None,
        store: DescriptorStore | None,
    ) -> None:
        self.place = place
        self.node = node
        self.memory, self.history = memory, history
        self._store = store
        self.takeovers = None
        if place.takeover and store is not None:
            self.takeovers = Takeovers(place, store, joins=store.joins)
        self.servers = servers
        self.colocation = Colocation(place, node, servers)
        self.without_server_s: list[float] = []
        self._recovering = threading.Lock()
        self._words = [self.persist(peer, peer.region, CONTROL) for peer in servers]
        self._closing = threading.Event()
        if place.durable:
            name = "tensorwire-servers"
            threading.Thread(target=self._watch_servers, name=name, daemon=True).start()
        if self.takeovers is not None:
            self.takeovers.start(self._tell)

    @staticmethod
    def join(place: World, timeout_s: float = 60.0) -> WorkerMember:
        """Connects to the servers.

        Raises:
            UnavailableError: a server cannot be reached; the message names it.
            RuntimeError: this process cannot take the place of the worker that was killed.
            ValueError: the environment makes no sense.
        """
        place.check()
        store = _descriptor_store(place.rank, place.durable)
        node = _worker_node(place, store)
        try:
            memory, history = DurableMemory(node, store), None
            if memory.durable:
                region = memory.allocate(
                    HISTORY_BYTES, name="history", access="none", progress=POSITIONS_AT
                )
                joins = store is not None and store.joins
                if store is not None and joins:
                    begun = History.begin_of(store.map_donor())
                    region.array()[: len(begun)] = begun
                history = History(region, place.rank, joins=joins, within=not place.takeover)
                history.check()
                if place.pipeline > 1:
                    history.refuse("its model is split over several workers")
            peers = []
            for index, address in enumerate(place.servers):
                try:
                    peers.append(_connect(node, address, timeout_s, memory.durable))
                    check_name(peers[-1], server_name(index), address)
                except TensorwireError as error:
                    raise UnavailableError(
                        f"worker {place.rank} cannot join: server {index} at {address}: {error}"
                    ) from error
            plain = told_of_plain(peers, os.environ.get("TENSORWIRE_TLS", "").strip())
            if plain and place.rank == 0:
                print(plain, file=sys.stderr, flush=True)
            return WorkerMember(place, node, tuple(peers), memory, history, store)
        except BaseException:
            node.close()
            raise

    def tell(self, value: int) -> None:
        """Raises this worker's control word at every server."""
        self._tell(self.place.rank, value)

    def _tell(self, rank: int, value: int) -> None:
        for peer, words in zip(self.servers, self._words, strict=True):
            self.persist(peer, _raise_word, words.word(CONTROL_BYTES * rank), value)

    def persist(
        self,
        peer: Peer,
        action: Callable[Arguments, Answer],
        *args: Arguments.args,
        **options: Arguments.kwargs,
    ) -> Answer:
        """Repeats an action that concerns a server if that was killed and has a successor.

        Raises:
            PeerLostError: there is none in its place.
        """  # fmt: skip
        while True:
            try:
                return action(*args, **options)
            except PeerLostError:
                if not self.recover(peer):
                    raise

    def recover(self, peer: Peer) -> bool:
        """Waits for the successor of a server that was lost, which has its memory. Any thread.

        Afterwards the Peer reaches the successor.

        Returns:
            True if there is one.

        Raises:
            PeerLostError: there is none, as the launcher has ended.
        """
        if not self.place.durable or peer not in self.servers:
            return False
        if self._find_successor(peer):
            return True
        if self._store is not None and self._store.abandoned:
            raise PeerLostError(
                "the launcher of this job has ended, and its servers with it; its own messages "
                "tell why, unless it was killed. The job can go on from its last checkpoint: "
                "job.load"
            )
        return False

    def _find_successor(self, peer: Peer) -> bool:
        with self._recovering:
            started = time.perf_counter()
            while peer.lost:
                if ended_in_order(peer) or self.node.closed:
                    return False
                try:
                    successor = self.node.connect(
                        peer.address, timeout_s=_TAKEOVER_S, require="shm"
                    )
                    successor.wait_region(RESTORED)
                except TimeoutError:
                    continue  # the launcher holds the door open; if it gives up it ends this worker
                except PeerLostError:
                    if not is_open(peer.address):
                        return False
                    continue  # a successor that was killed too
                except TensorwireError:
                    return False
                if successor.incarnation != peer.incarnation:
                    successor.close()
                    return False
                peer.succeed(successor)
                self.without_server_s.append(time.perf_counter() - started)
        return True

    def _watch_servers(self) -> None:
        """Connects to successors at once: they need all workers, also those that wait elsewhere."""
        watched = list(self.servers)
        while not self._closing.wait(_WATCH_S):
            for peer in [each for each in watched if each.lost]:
                try:
                    found = self.recover(peer)
                except TensorwireError:
                    found = False
                if not found:
                    watched.remove(peer)  # code that needs it gets the error

    def close(self, goodbye: bool = True) -> None:
        """Leaves. Without `goodbye` the others learn that this worker failed. Idempotent."""
        self._closing.set()
        if self.node.closed:
            return
        own, says = CONTROL_BYTES * self.place.rank, goodbye
        if self.takeovers is not None and self.takeovers.is_gone:
            says = False  # the others know already
        for peer, words in zip(self.servers, self._words, strict=True) if says else ():
            # The first server that has everybody's goodbye ends; the others still wait for theirs.
            with contextlib.suppress(TensorwireError):
                value = GOODBYE if self.takeovers is None else FAREWELL
                self.persist(peer, _raise_word, words.word(own), value)
        if self._store is not None:
            self._store.leave(goodbye)
        self.node.close()


def _raise_word(word: RemoteWord, value: int) -> None:
    word.set(value).wait(30.0)


def _descriptor_store(rank: int, durable: bool) -> DescriptorStore | None:
    """Returns the launcher's store, with everything kept for a worker that this one succeeds."""
    number, term = os.environ.pop(STORE, ""), os.environ.pop(TERM, "")
    joins = os.environ.pop(JOINS, "")
    if not number or not _is_store(int(number)):
        return None  # a process that the launcher's has started does not inherit it
    if not durable:
        os.close(int(number))
        if term or joins:
            raise RuntimeError(
                f"worker {rank} was killed, and the process that took its place says "
                "tw.init(durable=False), which the former one did not"
            )
        return None
    store = DescriptorStore.of_descriptor(int(number))
    store.joins = bool(joins)
    if term or joins:
        store.wait_for_takeover()
    failpoints.arm(
        worker_name(rank), os.environ.get("TENSORWIRE_FAIL", ""), int(term or joins or 0)
    )
    return store


def _is_store(descriptor: int) -> bool:
    """Tells whether it is an open socket such as a launcher gives out."""
    try:
        with socket.socket(fileno=os.dup(descriptor)) as found:
            return (found.family, found.type) == (socket.AF_UNIX, socket.SOCK_SEQPACKET)
    except OSError:
        return False


def _connect(node: Node, address: str, timeout_s: float, durable: bool) -> Peer:
    """Connects to a server, or to the successor of one that is killed meanwhile."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            peer = node.connect(address, timeout_s=max(deadline - time.monotonic(), 0.1))
            if durable:
                peer.wait_region(RESTORED)
            return peer
        except PeerLostError:
            if not (durable and is_open(address)) or time.monotonic() > deadline:
                raise


def _worker_node(place: World, store: DescriptorStore | None) -> Node:
    """Opens a worker's Node, for workers of this host only: it is not seen on the network.

    Such a Node does not try rdma by itself; it is told to where servers are on other hosts.
    """
    name, listen = worker_name(place.rank), "127.0.0.1:0"
    elsewhere = not all(address.startswith(LOOPBACK) for address in place.servers)
    if elsewhere and not os.environ.get("TENSORWIRE_TRANSPORTS"):
        # Without it tcp is used; a PathWarning says so if the servers have rdma.
        with contextlib.suppress(UnavailableError, MemoryError):
            return Node(name, listen=listen, transports=["shm", "rdma", "tcp"])
    return open_node(name, store, listen=listen)
