"""How bytes get to a peer, and what that way should reach."""

from __future__ import annotations

from dataclasses import dataclass

from tensorwire import _core

from .bandwidth import memory_gb_per_s, network_gb_per_s, rdma_gb_per_s


@dataclass(frozen=True, slots=True)
class Path:
    """How bytes get to a peer; nothing is chosen silently.

    Attributes:
        transport: "shm", "rdma" or "tcp".
        wire: what the bytes travel on, in words.
        copies: how often a CPU copies each payload byte from source to target, both hosts together.
        expected_gb_per_s: what one transfer should come near to: on shm the memcpy speed measured
            in this process, on tcp and rdma what the NIC promises (None for loopback and virtual
            ones).
        reason: why this transport was chosen, and what excluded the faster ones.
    """

    transport: str
    wire: str
    copies: int
    expected_gb_per_s: float | None
    reason: str


def path_to(peer: _core.Peer) -> Path:
    """The path of a connection of the core. The first look takes some milliseconds."""
    transport, reason = peer.transport, peer.reason
    if transport == "tcp":
        return Path("tcp", f"TCP to {peer.address}", 2, network_gb_per_s(peer.address), reason)
    if transport == "rdma":
        return Path("rdma", f"RDMA by {peer.wire}", 0, rdma_gb_per_s(peer.wire), reason)
    wire = "memory of this host that both processes have mapped"
    return Path(transport, wire, 1, memory_gb_per_s(), reason)
