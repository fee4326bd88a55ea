"""Bytes that one process writes into memory of the other, over and over, in order.

A ring is a region of the receiver. Its first word counts the bytes that were ever written into it,
its second those that this receiver's own writes have had taken at the other end: each end thus
tells the other how far it has read, which is the room to write on. What is behind the first word is
whole, and in order: a batch's word waits for those before. Knows nothing of frames.
"""

from __future__ import annotations

from collections.abc import Sequence

from tensorwire._core import Transfer
from tensorwire.errors import TimeoutError, UnavailableError
from tensorwire.memory import Node, Pace, Peer, Region, RemoteRegion

CAPACITY_BYTES = 1 << 19
RING = "ring"
"""The name of the region."""

_START = 64
_TAKEN = 8
_PATIENCE_S = 0.001
_TELL_BYTES = CAPACITY_BYTES // 4


class RingError(Exception):
    """The other end counts what cannot be."""


def make_ring(node: Node) -> Region:
    """The memory that the other end writes into."""
    return node.allocate(_START + CAPACITY_BYTES, name=RING)


def checked(other: RemoteRegion) -> RemoteRegion:
    """The ring of the other end, which has made it as it liked.

    Raises:
        UnavailableError: it does not have the size of a ring.
    """
    if other.size_bytes != _START + CAPACITY_BYTES:
        raise UnavailableError(f"the other end has a ring of {other.size_bytes} bytes")
    return other


class RingReader:
    """What arrives. One thread at a time.

    Args:
        memory: of `make_ring`.
        other: the other end's, where it is told how far this one has read.
        peer: the other end.
    """

    def __init__(self, memory: Region, other: RemoteRegion, peer: Peer) -> None:
        self._word = memory.word(0)
        self._view = memory[_START:].memoryview()
        self._taken_word = other.word(_TAKEN)
        self._peer = peer
        self._pace = Pace()
        self._taken = 0
        self._told = 0

    def wait(self, timeout_s: float | None) -> None:
        """Blocks until there is something to take.

        Raises:
            TimeoutError, PeerLostError, ClosedError, StaleHandleError: as for `Word.wait_until`.
        """
        self._word.wait_until(self._taken + 1, timeout_s, peer=self._peer, pace=self._pace)

    async def arrive(self) -> None:
        """As `wait`, without an end, and without blocking the event loop."""
        await self._word.reached(self._taken + 1, peer=self._peer)

    def take(self) -> bytes:
        """A copy of what there is, in whole batches; b"" if there is nothing.

        Raises:
            RingError: the other end counts more than fits.
            PeerLostError, ClosedError, StaleHandleError: there is no other end.
        """
        end, start = self._word.value, self._taken
        size = end - start
        if size == 0:
            return b""
        if not 0 < size <= CAPACITY_BYTES:
            raise RingError(f"{size} bytes are in a ring of {CAPACITY_BYTES}")
        at = start % CAPACITY_BYTES
        data = bytes(self._view[at : at + size])
        if len(data) < size:
            data += bytes(self._view[: size - len(data)])
        self._taken = end
        if end - self._told >= _TELL_BYTES:
            self._told = end
            self._taken_word.set(end)
        return data


class RingWriter:
    """What leaves. One thread at a time.

    Args:
        memory: this end's ring, where the other end tells how far it has read.
        other: of the other end, which is written into.
        peer: the other end.
        patient: a write may wait for the one before.
    """

    def __init__(
        self, memory: Region, other: RemoteRegion, peer: Peer, *, patient: bool = True
    ) -> None:
        self._patient = patient
        self._taken_word = memory.word(_TAKEN)
        self._word = other.word(0)
        self._space = other[_START:]
        self._peer = peer
        self._written = 0
        self._under_way: Transfer | None = None

    @property
    def room(self) -> int:
        """Bytes that can be written now.

        Raises:
            RingError: the other end has read more than there was.
        """
        used = self._written - self._taken_word.value
        if not 0 <= used <= CAPACITY_BYTES:
            raise RingError(f"{-used} bytes were read that nobody wrote")
        return CAPACITY_BYTES - used

    def wait_room(self, size_bytes: int, timeout_s: float | None) -> None:
        """Blocks until so much can be written.

        Raises:
            TimeoutError, PeerLostError, ClosedError, StaleHandleError: as for `Word.wait_until`.
        """
        least = max(self._written + size_bytes - CAPACITY_BYTES, 0)
        self._taken_word.wait_until(least, timeout_s, peer=self._peer)

    def write(self, data: bytes) -> None:
        """Starts to write what there is room for, at most a millisecond after the write before.

        Raises:
            PeerLostError, ClosedError, StaleHandleError: there is no other end.
        """
        at = self._written % CAPACITY_BYTES
        self._written += len(data)
        signal = self._word, self._written
        before = self._under_way
        if before is not None and before.done():
            before = None
        if before is not None and self._patient:
            # Meanwhile others leave what they have to whoever writes: fewer and larger writes.
            try:
                before.wait(_PATIENCE_S)
                before = None
            except TimeoutError:
                pass
        parts: Sequence[bytes] = (data,)
        places = [self._space[at : min(at + len(data), CAPACITY_BYTES)]]
        if at + len(data) > CAPACITY_BYTES:
            cut = CAPACITY_BYTES - at
            parts = data[:cut], data[cut:]
            places.append(self._space[: len(parts[1])])
        if before is not None:  # nothing orders two transfers by themselves
            placed = self._peer.write(list(parts), places)
            transfer = self._word.set(self._written, after=[before, placed])
        elif len(parts) == 1:
            transfer = places[0].write(data, signal=signal)
        else:
            transfer = self._peer.write(list(parts), places, signal=signal)
        self._under_way = None if transfer.done() else transfer

    def drain(self, timeout_s: float) -> None:
        """Waits until what was written is there.

        Raises:
            TimeoutError, PeerLostError, ClosedError, StaleHandleError: as for `Transfer.wait`.
        """
        if self._under_way is not None:
            self._under_way.wait(timeout_s)
