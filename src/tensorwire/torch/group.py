"""Connects the processes that share a model, each with every other one."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from tensorwire.errors import TensorwireError, UnavailableError, consequence
from tensorwire.membership.identity import check_name, listed, turn_away
from tensorwire.membership.world import World
from tensorwire.memory import Node, Peer

from . import rendezvous

_MET_BYTES = 64


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
        """The number of processes."""
        return len(self.peers or {}) + 1

    def next_split(self) -> int:
        """Returns a number for the next model that these processes split, the same for all."""
        return next(self._splits)

    def meet(self, label: str, *, failed: bool = False) -> None:
        """Waits until all have called it with the same label, once each; not if this one `failed`.

        Raises:
            RuntimeError: another one has failed.
            PeerLostError: one of them is gone.
        """
        if self.node is None or not self.peers:
            return
        # The size alone tells of a failure: it is known as soon as the region is there.
        self.node.allocate(_MET_BYTES * (1 + failed), name=label, access="r")
        for rank, peer in self.peers.items() if not failed else ():
            if peer.wait_region(label, None).size_bytes > _MET_BYTES:
                raise consequence(f"rank {rank} has failed; its own error tells why")

    def close(self) -> None:
        """Closes this process's Node. Idempotent."""
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


def address_in(data: bytes, rank: int) -> str:
    """Returns the address in the bytes of worker `rank`, which end with zeros.

    Raises:
        ValueError: the bytes are no address.
    """
    try:
        return data.rstrip(b"\0").decode()
    except UnicodeDecodeError:
        raise ValueError(
            f"worker {rank} sent no valid address: use one version of tensorwire on all workers"
        ) from None


def machine_name(rank: int) -> str:
    """Returns the name of a process's Node."""
    return f"machine-{rank}"


def machines() -> Machines:
    """Returns the processes that an engine started together, connected; or one that is alone.

    The engine is torchrun or another one of docs/launchers.md, but not `tensorwire run`, whose
    servers wait for workers that join.

    Raises:
        RuntimeError: another process has claimed this rank.
        UnavailableError: a process cannot be reached, or `tensorwire run` has started several.
        ValueError: the engine did not say enough.
    """
    place = World.from_environment()
    if place is not None and place.workers > 1:
        raise UnavailableError(
            "tensorwire run has started these processes, and its servers wait for workers that "
            "join: call tw.init(pipeline=…) before, use torchrun, or tw.connect(node, rank, "
            "addresses) and machines="
        )
    if (meeting := rendezvous.meet()) is None:
        return Machines()
    node = Node(machine_name(meeting.rank), listen=f"{meeting.listen}:0")
    try:
        meeting.store.set(f"machines/{meeting.rank}", node.address)
        keys = {f"machines/{rank}": f"rank {rank}" for rank in range(meeting.workers)}
        meeting.wait(keys, "its own error tells why")
        addresses = {rank: meeting.store.get(key).decode() for rank, key in enumerate(keys)}
        return connect(node, meeting.rank, addresses)
    except BaseException:
        node.close()
        raise
