"""Holds up a stream that sends payload beside gRPC, until its reader takes it.

gRPC sees the envelopes only, which are short. Knows neither gRPC nor messages.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from tensorwire.errors import TimeoutError
from tensorwire.memory import Peer, Region

from .leases import SLOTS, Lease

WINDOW_BYTES = 1 << 22
"""The bytes that stock gRPC has under way in a stream, of messages of 1 MiB."""

_SLICE_S = 0.05


class Window:
    """The payload of one stream that its reader has not taken. One thread uses it at a time.

    Taken is not given back: a reader may keep what it has, and gets the next message.

    Args:
        peer: the reader.
        board: memory here with the words that it raises.
        taken: the offset of these: a count, and one for each slot.
    """

    def __init__(self, peer: Peer, board: Region, taken: int) -> None:
        self._peer = peer
        self._count = board.word(taken)
        self._taken = board.array("uint64")[taken // 8 + 1 : taken // 8 + 1 + SLOTS]
        self._sent: deque[tuple[int, int, int]] = deque()
        self._bytes = 0

    @property
    def full(self) -> bool:
        """True when the next message has to wait, or to travel inside."""
        while self._sent:
            slot, turn, size = self._sent[0]
            if self._taken[slot] < turn:
                break
            self._sent.popleft()
            self._bytes -= size
        return self._bytes >= WINDOW_BYTES

    def add(self, lease: Lease) -> None:
        """Notes that a message was written into a lease."""
        size = int(lease.memory.size_bytes)
        self._sent.append((lease.slot, lease.turn, size))
        self._bytes += size

    def wait(self, needed: Callable[[], bool]) -> bool:
        """Waits until the reader has taken enough; False if the message is not needed any more.

        Raises:
            PeerLostError, ClosedError: the attachment is over.
        """
        while True:
            seen = self._count.value
            if not self.full:
                return True
            if not needed():
                return False
            try:
                self._count.wait_until(seen + 1, _SLICE_S, peer=self._peer)
            except TimeoutError:
                pass
