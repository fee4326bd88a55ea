"""Defines rings: memory of one end into which the other writes frames, over and over.

The core reads and writes them, see cpp/rpc/line.h. Here is how its readers and writers are made.
"""

from __future__ import annotations

from tensorwire._core import rpc as core
from tensorwire.errors import UnavailableError
from tensorwire.memory import Node, Peer, Region, RemoteRegion
from tensorwire.memory.core import core_of

from .frames import Frame

CAPACITY_BYTES = core.CAPACITY_BYTES
RING = "ring"
"""The name of the region."""


def make_ring(node: Node) -> Region:
    """The memory that the other end writes into."""
    return node.allocate(core.RING_BYTES, name=RING)


def checked(other: RemoteRegion) -> RemoteRegion:
    """The ring of the other end, which has made it as it liked.

    Raises:
        UnavailableError: it does not have the size of a ring.
    """
    if other.size_bytes != core.RING_BYTES:
        raise UnavailableError(f"the other end has a ring of {other.size_bytes} bytes")
    return other


def line_reader(node: Node, memory: Region, other: RemoteRegion, peer: Peer) -> core.LineReader:
    """What arrives, as `Frame`s. One thread at a time.

    Args:
        node: of the memory.
        memory: of `make_ring`.
        other: the other end's, where it is told how far this one has read.
        peer: the other end.
    """
    return core.LineReader(core_of(node), core_of(memory), core_of(other), core_of(peer), Frame)


def line_writer(node: Node, memory: Region, other: RemoteRegion, peer: Peer) -> core.LineWriter:
    """What leaves. One thread at a time.

    Args:
        node: as for `line_reader`.
        memory: this end's ring, where the other end tells how far it has read.
        other: the other end's, which is written into.
        peer: as for `line_reader`.
    """
    return core.LineWriter(core_of(node), core_of(memory), core_of(other), core_of(peer))
