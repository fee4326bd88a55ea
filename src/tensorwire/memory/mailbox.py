"""Sends messages through memory that one process lends another: a counting word and a ring.

A message is written into its place, and then the word is raised to its number: a reader that sees
the number sees the whole message. Message n lies in place n modulo the number of places, until
another one takes that place. The user of the mailbox decides when the sender may write on, and what
a message says. docs/internals/parameters.md has the layout.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tensorwire._core import Transfer
from tensorwire.errors import TimeoutError

from .peer import Peer, RemoteRegion
from .region import Region

WORD_BYTES = 64
"""The word and padding, before the places."""


def mailbox_bytes(message_bytes: int, places: int = 1) -> int:
    """Returns the size of the memory of a mailbox whose messages have at most `message_bytes`."""
    return WORD_BYTES + places * message_bytes


class Mailbox:
    """The end of a mailbox in whose process the memory is. Any thread may use it.

    Args:
        memory: zeroed; a word of 64 bytes and `places` places of equal size.
        places: how many of the latest messages stay.
    """

    def __init__(self, memory: Region, places: int = 1) -> None:
        self._word = memory.word(0)
        self._places: NDArray[np.uint8] = memory[WORD_BYTES:].array().reshape(places, -1)

    @property
    def count(self) -> int:
        """The number of the latest message, 0 before the first."""
        return self._word.value

    def message(self, number: int) -> NDArray[np.uint8]:
        """Returns the place of a message; nothing is copied."""
        place: NDArray[np.uint8] = self._places[number % len(self._places)]
        return place

    def wait(
        self, number: int, timeout_s: float | None = None, *, peer: Peer | None = None
    ) -> NDArray[np.uint8]:
        """Returns the place of a message, as soon as it, or a later one, is there.

        Raises:
            TimeoutError, PeerLostError, ClosedError, StaleHandleError: as for `Word.wait_until`.
        """
        self._word.wait_until(number, timeout_s, peer=peer)
        return self.message(number)

    def post(self, data: NDArray[np.uint8]) -> None:
        """Writes the next message, which others read by `RemoteMailbox.latest`. One thread."""
        number = self.count + 1
        self.message(number)[: len(data)] = data
        self._word.set(number)


class RemoteMailbox:
    """The end of a mailbox whose memory is at a peer.

    Args:
        memory: the whole of it.
        places: as at the other end.
    """

    def __init__(self, memory: RemoteRegion, places: int = 1) -> None:
        self._word = memory.word(0)
        self._memory = memory
        self._place_bytes = (memory.size_bytes - WORD_BYTES) // places
        self._count = places

    def send(self, data: Any, number: int, after: Sequence[Transfer] | None = None) -> Transfer:
        """Starts to write a message; the word follows it.

        Args:
            data: as for `RemoteRegion.write`; at most a place long.
            number: of the message, larger than all before.
            after: the word also waits for these transfers, of which the caller keeps the list.

        Raises:
            TypeError, ValueError, PermissionError, ClosedError, PeerLostError, StaleHandleError: as
                for `RemoteRegion.write`.
        """
        place = self._place(number)
        if after is None:
            return place.write(data, signal=(self._word, number))
        return self._word.set(number, [*after, place.write(data)])

    def latest(self, deadline: float) -> tuple[int, NDArray[np.uint8]]:
        """Returns a copy of the latest message, and its number; the number 0 means no message.

        Several places are needed: while one is read, the next message may be written.

        Args:
            deadline: of time.monotonic.

        Raises:
            TimeoutError: messages came faster than they could be read.
            PermissionError, ClosedError, PeerLostError, StaleHandleError: as for
                `RemoteRegion.read`.
        """
        before, after = np.zeros(1, np.uint64), np.zeros(1, np.uint64)
        data = np.zeros(self._place_bytes, np.uint8)
        head = self._memory[:8]
        while (left := deadline - time.monotonic()) > 0:
            head.read(before).wait(left)
            self._place(int(before[0])).read(data).wait(left)
            head.read(after).wait(left)
            if before == after:
                return int(before[0]), data
        raise TimeoutError(f"messages in {self._memory!r} came faster than they could be read")

    def _place(self, number: int) -> RemoteRegion:
        start = WORD_BYTES + number % self._count * self._place_bytes
        return self._memory[start : start + self._place_bytes]
