"""Defines rings: memory of one end into which the other writes frames, over and over.

The core reads and writes them, see cpp/rpc/line.h. This module makes its readers and writers.
"""

from __future__ import annotations

from typing import NamedTuple

from tensorwire._core import rpc as core
from tensorwire.memory import Node, Peer, Region, RemoteRegion
from tensorwire.memory.core import core_of

from .frames import Frame

CAPACITY_BYTES = core.CAPACITY_BYTES
RING = "ring"
"""The name of the region."""


def make_ring(node: Node) -> Region:
    """Allocates the memory that the other end writes into."""
    return node.allocate(core.RING_BYTES, name=RING)


class Rings(NamedTuple):
    """The memory of a line, as one end has it.

    Attributes:
        node: of this end.
        memory: this end's ring, of `make_ring`. The other end writes there how far it has read.
        other: the other end's ring, written from here, also how far this end has read.
        peer: the other end.
    """

    node: Node
    memory: Region
    other: RemoteRegion
    peer: Peer

    def reader(self) -> core.LineReader:
        """Returns the reader of the frames that arrive, as `Frame`s. One thread at a time."""
        node, memory, other, peer = map(core_of, self)
        return core.LineReader(node, memory, other, peer, Frame)

    def writer(self) -> core.LineWriter:
        """Returns the writer of the frames that leave. One thread at a time."""
        return core.LineWriter(*map(core_of, self))
