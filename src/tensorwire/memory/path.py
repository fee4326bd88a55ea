"""Describes how bytes get to a peer, and the speed that this path should reach."""

from __future__ import annotations

from dataclasses import dataclass

from tensorwire import _core

from .bandwidth import memory_gb_per_s, network_gb_per_s, rdma_gb_per_s


@dataclass(frozen=True, slots=True)
class MemoryPath:
    """How bytes get from one kind of memory to another, in either direction.

    Attributes:
        local, remote: "host", "pinned" (memory of the host that a GPU reaches: torch's, or a
            region's) or "gpu".
        how: in words, with the copies; "" if it cannot be had by this transport.
    """

    local: str
    remote: str
    how: str


_ONE_COPY = "one copy by the GPU"
_CHUNKS = "through pinned chunks: a copy by the GPU and one by a CPU"
_PAIRS = (("host", "gpu"), ("pinned", "gpu"), ("gpu", "host"), ("gpu", "gpu"))


def memory_paths(transport: str) -> tuple[MemoryPath, ...]:
    """Returns how a transport moves each pair of kinds of memory of which one is a GPU's."""
    if transport == "shm":
        hows = (
            _CHUNKS,
            _ONE_COPY,
            f"{_ONE_COPY}, or {_CHUNKS} where no memory can be pinned",
            f"{_ONE_COPY}; none where the peer's memory is used as a tensor",
        )
    elif transport == "tcp":
        there, here = "the peer copies by its GPU from pinned chunks", "pinned chunks here"
        hows = (there, there, f"by the GPU into {here}", f"by the GPU into {here}; {there}")
    else:
        hows = ("", "", "", "")
    return tuple(MemoryPath(*pair, how) for pair, how in zip(_PAIRS, hows, strict=True))


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
        encrypted: the bytes travel by TLS 1.3: nobody on their way can read or change them.
        reason: why this transport was chosen, and what excluded the faster ones.
        gpu: how memory of GPUs gets there, for each pair of kinds of memory.
    """

    transport: str
    wire: str
    copies: int
    encrypted: bool
    expected_gb_per_s: float | None
    reason: str
    gpu: tuple[MemoryPath, ...] = ()


def path_to(peer: _core.Peer) -> Path:
    """Returns the path of a connection of the core. The first look takes some milliseconds."""
    transport, reason = peer.transport, peer.reason
    gpu = memory_paths(transport)
    if transport == "tcp":
        wire = f"TCP{' with TLS 1.3' if peer.encrypted else ''} to {peer.address}"
        speed = network_gb_per_s(peer.address)
        return Path("tcp", wire, 2, peer.encrypted, speed, reason, gpu)
    if transport == "rdma":
        wire, speed = f"RDMA by {peer.wire}, not encrypted", rdma_gb_per_s(peer.wire)
        return Path("rdma", wire, 0, False, speed, reason, gpu)
    wire = "memory of this host that both processes have mapped"
    return Path(transport, wire, 1, False, memory_gb_per_s(), reason, gpu)
