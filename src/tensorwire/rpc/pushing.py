"""Messages that are pushed: written into memory of the receiver while their envelope is under way.

For messages of middling size where the receiver does not have the sender's memory mapped: to read
them there would take one way more. A word of the receiver says that one is there. Knows neither
gRPC nor messages.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial

from tensorwire.errors import TensorwireError
from tensorwire.memory import Node, Peer, Region, RemoteRegion
from tensorwire.memory.fresh import copied

from .envelope import BODY, Envelope
from .inbox import Inbox, RefusedError
from .leases import SLOTS, Lease, LeasePool
from .runtime.threads import THREADS
from .waiting import wait_word, wait_word_later

OF_A_CALL = 2
"""Messages of a call at a time for which memory is taken: one is under way, or copied, while the
other one is read. New memory is slow, and more would not be read any sooner."""

_ANSWER_S = 5.0
_AGAIN_S = 1.0
"""Until the receiver is asked again, when it has given no memory."""


class Pushing:
    """What one end of an attachment has for it. Any thread may use it.

    Args:
        node: of this end.
        peer: the other end.
        leases: memory there.
        inbox: what the other end has here.
        board: of this end, with a word for each slot that the other end raises to the turn of what
            is there.
        other_board: the other end's.
        first_word: of the board, for slot 0.
    """

    def __init__(
        self,
        node: Node,
        peer: Peer,
        leases: LeasePool,
        inbox: Inbox,
        board: Region,
        other_board: RemoteRegion,
        first_word: int,
    ) -> None:
        self._node = node
        self._peer = peer
        self._leases = leases
        self._inbox = inbox
        self._board = board
        self._other_board = other_board
        self._first_word = first_word
        self._lock = threading.Lock()
        self._asking = False
        self._asks_from = 0.0

    def push(
        self, data: bytes, call: tuple[int, int], patience_s: float, needed: Callable[[], bool]
    ) -> Lease[RemoteRegion] | None:
        """Starts to write a message into memory of the receiver; None: it had better be offered.

        The receiver is not waited for: where no memory is there yet, it is asked for it in another
        thread, for the messages that follow.

        Args:
            data: the message; at least a byte.
            call: the number of the call in its attachment.
            patience_s: how long to wait for the receiver to come to what it has of the call.
            needed: asked meanwhile; False ends it.

        Raises:
            PeerLostError, ClosedError, StaleHandleError: the attachment is over, or the call.
        """
        if self._leases.uses(call) >= OF_A_CALL:
            until = time.monotonic() + patience_s
            self._leases.await_credit(call, OF_A_CALL, until, needed)
        lease = self._leases.take_idle(len(data), call)
        if lease is None:
            self._ask_for(len(data))
            return None
        try:
            landed = self._other_board.word(self._place(lease.slot))
            lease.memory[: len(data)].write(data, signal=(landed, lease.turn))
        except BaseException:
            self._leases.retire([lease], call)
            raise
        return lease

    def prepare(self, size_bytes: int, timeout_s: float) -> None:
        """Makes memory for a message; waits so long at most.

        Raises:
            PeerLostError, ClosedError: the attachment is over.
        """
        if not self._leases.has_idle(size_bytes):
            self._leases.grow(size_bytes, timeout_s)

    def _ask_for(self, size_bytes: int) -> None:
        with self._lock:
            if self._asking or time.monotonic() < self._asks_from:
                return
            self._asking = True
        THREADS.run(partial(self._grow, size_bytes))

    def _grow(self, size_bytes: int) -> None:
        grown = False
        try:
            grown = self._leases.grow(size_bytes, _ANSWER_S)
        except TensorwireError:
            pass  # the attachment is over
        finally:
            with self._lock:
                self._asking = False
                self._asks_from = 0.0 if grown else time.monotonic() + _AGAIN_S

    def read(self, envelope: Envelope, needed: Callable[[], bool]) -> bytes:
        """The message of an envelope, which can be had once; its memory is given back.

        Args:
            envelope: says where it lies.
            needed: asked while it is not there yet; False ends it.

        Raises:
            GivenUpError: nobody needs it.
            RefusedError: it is not there (any more), was read before, or the sender does not go on
                with it.
            TensorwireError: the attachment is over.
        """
        place = self._checked(envelope)
        wait_word(self._board.word(place), envelope.turn, self._peer, needed, self._news)
        return self._taken(envelope)

    async def read_later(self, envelope: Envelope, needed: Callable[[], bool]) -> bytes:
        """As `read`, without blocking the event loop."""
        place = self._checked(envelope)
        await wait_word_later(
            self._board.word(place), envelope.turn, self._peer, needed, self._news
        )
        return self._taken(envelope)

    def _news(self) -> int:
        return self._node.stats()["bytes_received"]

    def _place(self, slot: int) -> int:
        return 8 * (self._first_word + slot)

    def _checked(self, envelope: Envelope) -> int:
        """Where the word of an envelope's slot is."""
        if [ticket for ticket, _, _ in envelope.pieces] != [BODY]:
            raise RefusedError("what is pushed is one message")
        if envelope.slot >= SLOTS or envelope.turn >= 1 << 63:
            raise RefusedError(f"turn {envelope.turn} of slot {envelope.slot} of {SLOTS}")
        return self._place(envelope.slot)

    def _taken(self, envelope: Envelope) -> bytes:
        landed = self._inbox.arrive(envelope)
        try:
            return copied(landed.piece(BODY))
        finally:
            landed.give_back()
