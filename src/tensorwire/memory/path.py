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


# transport -> (wire, copies)
_WIRES = {
    "shm": ("memory of this host that both processes have mapped", 1),
    "rdma": ("RDMA", 0),
    "tcp": ("TCP", 2),
}


def path_to(peer: _core.Peer) -> Path:
    """The path of a connection of the core. The first look takes some milliseconds."""
    transport = peer.transport
    wire, copies = _WIRES[transport]
    if transport == "tcp":
        wire = f"TCP to {peer.address}"
        expected = network_gb_per_s(peer.address)
    elif transport == "rdma":
        device = peer.wire
        wire = f"RDMA by {device}"
        expected = rdma_gb_per_s(device)
    else:
        expected = memory_gb_per_s()
    return Path(transport, wire, copies, expected, peer.reason)
