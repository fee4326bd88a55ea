"""Finds the workers of one host, which share one view of the parameters.

Over a network, what a server sends is then sent once per host.
"""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Sequence

from tensorwire.errors import TensorwireError
from tensorwire.jobs.host import this_host
from tensorwire.membership.identity import worker_name
from tensorwire.membership.world import World
from tensorwire.memory import Node, Peer

_FORMAT = struct.Struct("<QQ")  # host and port


class Colocation:
    """One worker's knowledge of the others' hosts.

    Args:
        world: which worker this is.
        node: its Node.
        servers: the servers' Peers.
    """

    def __init__(self, world: World, node: Node, servers: Sequence[Peer]) -> None:
        self._world = world
        self._node = node
        self._servers = servers
        self._told: Sequence[tuple[int, int]] = ()
        self._neighbour: tuple[int, Peer] | None = None

    def introduction(self) -> bytes:
        """Returns this host and a port on it for the others, equally long for all workers.

        Both are 0 where a view cannot or need not be shared: a server is on this host, or memory
        must not be shared.
        """
        here = any(peer.path.transport == "shm" for peer in self._servers)
        if here or "shm" not in self._node.transports:
            return _FORMAT.pack(0, 0)
        return _FORMAT.pack(this_host(), int(self._node.address.rpartition(":")[2]))

    def learn(self, introductions: Sequence[bytes]) -> None:
        """Takes the introductions of all workers, by rank.

        Raises:
            ValueError: one of them is none; the message names the worker.
        """
        self._told = [_read(rank, data) for rank, data in enumerate(introductions)]

    def neighbour(self) -> tuple[int, Peer] | None:
        """Returns rank and Peer of the worker of this host that shares its view of the parameters.

        Over a network, what a server sends is then sent once per host. It is the first worker of
        the host, or with pipelines the first with the same part of the model; None: this one has a
        view of its own, or a server on this host has. Called when all open a store.
        """
        world, told = self._world, self._told
        if self._neighbour is not None or not told or not told[world.rank][0]:
            return self._neighbour
        for rank in range(world.stage, world.rank, world.pipeline):
            if told[rank][0] == told[world.rank][0]:
                # Hosts can look the same and not be; then each worker has its view, as elsewhere.
                with contextlib.suppress(TensorwireError):
                    peer = self._node.connect(f"127.0.0.1:{told[rank][1]}")
                    if peer.path.transport == "shm" and peer.name == worker_name(rank):
                        self._neighbour = rank, peer
                    else:
                        peer.close()
                break
        self._told = ()
        return self._neighbour


def _read(rank: int, data: bytes) -> tuple[int, int]:
    host, port = _FORMAT.unpack(data) if len(data) == _FORMAT.size else (-1, -1)
    if not (0 <= host < 1 << 48 and 0 <= port < 1 << 16):
        raise ValueError(
            f"worker {rank} introduced itself with host {host} and port {port}, which "
            "makes no sense; all workers are of one version of tensorwire"
        )
    return host, port
