"""The processes that share a model: who they are, and a connection between each two of them."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from tensorwire.edges import wait_for_region
from tensorwire.errors import TensorwireError, UnavailableError, consequence
from tensorwire.membership import Place, check_name, listed, turn_away
from tensorwire.memory import Node, Peer

from . import bootstrap

_MET_BYTES = 64
_uses = itertools.count()  # of machines(), which all processes call in the same order


@dataclass(frozen=True)
class Machines:
    """The processes of a split model.

    Attributes:
        rank: this one, 0 to size - 1.
        node: this process on the fabric; None if it is alone.
        peers: all others, by rank.
    """

    rank: int = 0
    node: Node | None = None
    peers: Mapping[int, Peer] | None = None
    _splits: Iterator[int] = field(default_factory=itertools.count, repr=False, compare=False)

    @property
    def size(self) -> int:
        """How many there are."""
        return len(self.peers or {}) + 1

    def meet(self, label: str, *, failed: bool = False) -> None:
        """Returns when all have called it with the same label, once each; at once if this failed.

        Raises:
            RuntimeError: another one has failed.
            PeerLostError: one of them is gone.
        """
        if self.node is None or not self.peers:
            return
        # Only its size tells, which is there as soon as it is.
        self.node.allocate(_MET_BYTES * (1 + failed), name=label, access="r")
        for rank, peer in self.peers.items() if not failed else ():
            if wait_for_region(peer, label, None, f"rank {rank}").size_bytes > _MET_BYTES:
                raise consequence(f"rank {rank} has failed; its own error tells why")

    def close(self) -> None:
        """Leaves. Idempotent."""
        if self.node is not None:
            self.node.close()


def connect(
    node: Node, rank: int, addresses: Mapping[int, str], timeout_s: float = 60.0
) -> Machines:
    """Connects this process with all others; each calls it.

    Args:
        node: this process; named `machine_name(rank)`.
        rank: this one.
        addresses: of all Nodes, by rank, 0 to their number - 1.
        timeout_s: for each of the others.

    Raises:
        UnavailableError: a process cannot be reached or did not come.
        ValueError: the ranks are not 0 to their number - 1.
    """
    if sorted(addresses) != list(range(len(addresses))) or rank not in addresses:
        raise ValueError(f"ranks are 0 to n - 1 and rank {rank} is one of them: {addresses}")
    if node.name != machine_name(rank):
        raise ValueError(f"the Node of rank {rank} is named {machine_name(rank)!r}: {node.name!r}")
    peers: dict[int, Peer] = {}
    for other in range(rank):
        try:
            peers[other] = node.connect(addresses[other], timeout_s=timeout_s)
            check_name(peers[other], machine_name(other), addresses[other])
        except (TensorwireError, ValueError) as error:
            raise UnavailableError(
                f"rank {rank} cannot reach rank {other} at {addresses[other]}: {error}"
            ) from error
    names = {machine_name(other): other for other in range(rank + 1, len(addresses))}
    deadline = time.monotonic() + timeout_s
    while len(peers) < len(addresses) - 1:
        missing = {name: other for name, other in names.items() if other not in peers}
        try:
            peer = node.accept(max(deadline - time.monotonic(), 0.0))
        except TensorwireError as error:
            ranks = sorted(missing.values())
            raise UnavailableError(f"rank {rank} waits for ranks {ranks}: {error}") from error
        if peer.name in missing:
            peers[missing[peer.name]] = peer
            deadline = time.monotonic() + timeout_s
        else:
            why = "that rank is here already" if peer.name in names else "it is no process of these"
            turn_away(peer, f"rank {rank}", f"{why}; expected: {listed(list(missing))}")
    return Machines(rank, node, peers)


def machine_name(rank: int) -> str:
    """The name of a process's Node."""
    return f"machine-{rank}"


def machines() -> Machines:
    """The processes that torchrun started, connected; a process that nobody started is alone.

    Raises:
        UnavailableError: a process cannot be reached, or something else than torchrun started
            several.
    """
    environ = os.environ
    size = int(environ.get("WORLD_SIZE", "1"))
    place = Place.from_environment()
    if "TORCHELASTIC_RUN_ID" not in environ and (size > 1 or (place and place.workers > 1)):
        raise UnavailableError(
            "torchrun did not start these processes, so they cannot find each other by themselves: "
            "call tw.init(pipeline=…) before, use torchrun, or tw.connect(node, rank, addresses) "
            "and machines="
        )
    if size == 1:
        return Machines()
    rank = int(environ["RANK"])
    store = bootstrap.torchrun_store()
    several = int(environ["GROUP_WORLD_SIZE"]) > 1
    host = bootstrap.address_towards(environ["MASTER_ADDR"]) if several else "127.0.0.1"
    node = Node(machine_name(rank), listen=f"{host}:0")
    # The store keeps what it got: a use that follows must not find what this one left.
    prefix = f"machines/{next(_uses)}"
    try:
        store.set(f"{prefix}/{rank}", node.address)
        addresses = {other: store.get(f"{prefix}/{other}").decode() for other in range(size)}
        return connect(node, rank, addresses)
    except BaseException:
        node.close()
        raise
