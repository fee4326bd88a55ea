"""A server on the fabric: who has connected, who has left, who is lost."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

from tensorwire.memory import Node, Peer

from .identity import (
    CONTROL,
    CONTROL_BYTES,
    GOODBYE,
    called,
    check_name,
    listed,
    lost,
    server_name,
    turn_away,
    worker_name,
)
from .status import READER, StatusRegion


class ServerMember:
    """A server on the fabric, of so many `workers`.

    Args:
        count: how many servers there are; None: nobody knows yet, they come one after another.

    Attributes:
        index: its place among the servers.
        node: its Node.
        count: how many workers there are.
        workers: Peers by rank, complete after `gather`.
        servers: Peers of the other servers by index.
        readers: Peers that look at the job and are no members of it.
    """

    def __init__(self, index: int, workers: int, node: Node, count: int | None = None) -> None:
        self.index = index
        self.node = node
        self.count = workers
        self._servers = count
        self._ranks = {worker_name(rank): rank for rank in range(workers)}
        self.workers: dict[int, Peer] = {}
        self.servers: dict[int, Peer] = {}
        self.readers: list[Peer] = []
        self._status = StatusRegion(node)
        self.control = node.allocate(CONTROL_BYTES * workers, name=CONTROL, access="w")
        self.words = [self.control.word(CONTROL_BYTES * rank) for rank in range(workers)]

    def connect(self, addresses: tuple[str, ...], timeout_s: float = 60.0) -> None:
        """Connects to the servers that were started before this one."""
        for index, address in enumerate(addresses):
            peer = self.node.connect(address, timeout_s=timeout_s)
            check_name(peer, server_name(index), address)
            self.servers[index] = peer

    def gather(self) -> None:
        """Waits until every worker has connected, and servers that came later.

        Where nobody knows how many servers there are, later ones have connected before any worker
        was started. Who is not expected, or is here already, is turned away.

        Raises:
            PeerLostError: one that had connected is gone.
        """
        while len(self.workers) < self.count or (self._servers and self._next_servers()):
            try:
                peer = self.node.accept(timeout_s=1.0)
            except TimeoutError:
                self.check()
            else:
                self._admit(peer)
            self.tell_readers()

    def _next_servers(self) -> list[int]:
        """Returns the numbers of the servers that may come now."""
        if self._servers is None:
            return [len(self.servers) + 1]  # earlier ones are here, later ones come in turn
        return [i for i in range(self.index + 1, self._servers) if i not in self.servers]

    def _admit(self, peer: Peer) -> None:
        if self._is_reader(peer):
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
        """A worker that came back while the job runs: as it was, and as it is. After `gather`.

        It is another incarnation, which knows nothing of the job; the first one is gone, or cannot
        be heard although it was not yet missed. On one host an end is seen at once, so that a
        second one of a name is none of the job's; it is turned away, as strangers are.
        """
        with contextlib.suppress(TimeoutError):
            while True:
                peer = self.node.accept(timeout_s=0)
                if self._is_reader(peer):
                    continue
                before = self.workers.get(self._ranks.get(peer.name, -1))
                if before is None:
                    self._turn_away(peer, "it is no member of this job, which runs")
                elif before.lost or before.path.transport != "shm":
                    return before, peer
                else:
                    self._turn_away(peer, f"{called(before)} is here already, and the job runs")
        return None

    def _is_reader(self, peer: Peer) -> bool:
        """Takes a peer that only looks at the job, at any time."""
        if peer.name.startswith(READER):
            self.readers.append(peer)
            return True
        return False

    def tell_readers(self, stores: Sequence[Mapping[str, Any]] = ()) -> None:
        """Writes what `tensorwire status` shows, if anybody reads it.

        Args:
            stores: of this server, as they are shown.
        """
        self.readers = [peer for peer in self.readers if not peer.lost]
        if not self.readers:
            return
        workers = [self._described(rank, self.workers.get(rank)) for rank in range(self.count)]
        servers = {index: peer.address for index, peer in self.servers.items()}
        servers[self.index] = self.node.address
        self._status.write(
            {
                "readers": [peer.name for peer in self.readers],
                "index": self.index,
                "address": self.node.address,
                "pid": os.getpid(),
                "servers": [servers[index] for index in sorted(servers)],
                "workers": workers,
                "stores": list(stores),
            }
        )

    def _described(self, rank: int, peer: Peer | None) -> dict[str, Any]:
        if peer is None:
            return {"rank": rank, "state": "expected"}
        state = "left" if self.has_left(rank) else "lost" if peer.lost else "connected"
        about = {"pid": peer.pid, "address": peer.address, "transport": peer.path.transport}
        return {"rank": rank, "state": state, **about}

    def await_ends(self, timeout_s: float) -> None:
        """Waits until the processes of lost workers are gone, so that their end is seen first.

        A launcher then blames them, and not those who end because of them.
        """
        deadline = time.monotonic() + timeout_s
        for rank, peer in self.workers.items():
            while (peer.lost or self.has_left(rank)) and time.monotonic() < deadline:
                if not os.path.exists(f"/proc/{peer.pid}"):
                    break
                time.sleep(0.01)

    def has_left(self, rank: int) -> bool:
        """The worker said goodbye."""
        return self.words[rank].value >= GOODBYE

    def all_left(self) -> bool:
        """All workers have left in good order."""
        return all(self.has_left(rank) for rank in range(self.count))

    def check(self) -> None:
        """Raises PeerLostError if a worker is gone without a goodbye, or a server is gone."""
        for rank, peer in self.workers.items():
            if peer.lost and not self.has_left(rank):
                raise lost(peer)
        for peer in self.servers.values():
            if peer.lost and not self._all_leave(2.0):
                raise lost(peer)

    def _all_leave(self, timeout_s: float) -> bool:
        """A server that is lost may have had all goodbyes; those to this one are on their way."""
        deadline = time.monotonic() + timeout_s
        while not self.all_left():
            if time.monotonic() > deadline:
                return False
            time.sleep(0.01)
        return True
