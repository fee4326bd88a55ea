"""A worker on the fabric: connected to every server until it leaves."""

from __future__ import annotations

import contextlib
import os

from tensorwire.errors import TensorwireError, UnavailableError
from tensorwire.memory import Node, Peer

from .colocation import Colocation
from .identity import (
    CONTROL,
    CONTROL_BYTES,
    GOODBYE,
    LOOPBACK,
    check_name,
    server_name,
    worker_name,
)
from .world import World


class WorkerMember:
    """A worker on the fabric, connected to every server.

    Attributes:
        place: its place.
        node: its Node.
        servers: Peers, in order.
        colocation: which other workers are on this host.
    """

    def __init__(self, place: World, node: Node, servers: tuple[Peer, ...]) -> None:
        self.place = place
        self.node = node
        self.servers = servers
        self.colocation = Colocation(place, node, servers)
        offset = CONTROL_BYTES * place.rank
        self._control = [peer.region(CONTROL).word(offset) for peer in servers]

    @staticmethod
    def join(place: World, timeout_s: float = 60.0) -> WorkerMember:
        """Connects to the servers.

        Raises:
            UnavailableError: a server cannot be reached; the message names it.
            ValueError: the environment makes no sense.
        """
        place.check()
        node = _worker_node(place)
        try:
            peers = []
            for index, address in enumerate(place.servers):
                try:
                    peers.append(node.connect(address, timeout_s=timeout_s))
                    check_name(peers[-1], server_name(index), address)
                except TensorwireError as error:
                    raise UnavailableError(
                        f"worker {place.rank} cannot join: server {index} at {address}: {error}"
                    ) from error
            return WorkerMember(place, node, tuple(peers))
        except BaseException:
            node.close()
            raise

    def tell(self, value: int) -> None:
        """Raises this worker's control word at every server."""
        for word in self._control:
            word.set(value).wait(30.0)

    def close(self, goodbye: bool = True) -> None:
        """Leaves. Without `goodbye` the others learn that this worker failed. Idempotent."""
        if self.node.closed:
            return
        for word in self._control if goodbye else ():
            # The first server that has everybody's goodbye ends; the others still wait for theirs.
            with contextlib.suppress(TensorwireError):
                word.set(GOODBYE).wait(30.0)
        self.node.close()


def _worker_node(place: World) -> Node:
    """Only workers of this host connect to a worker, so it is not seen on the network.

    Such a Node does not look for rdma by itself; where servers are on other hosts it does.
    """
    name, listen = worker_name(place.rank), "127.0.0.1:0"
    elsewhere = not all(address.startswith(LOOPBACK) for address in place.servers)
    if elsewhere and not os.environ.get("TENSORWIRE_TRANSPORTS"):
        # Else by tcp; a PathWarning tells it if the servers have rdma.
        with contextlib.suppress(UnavailableError, MemoryError):
            return Node(name, listen=listen, transports=["shm", "rdma", "tcp"])
    return Node(name, listen=listen)
