"""Messages that are pushed: written into memory of the receiver while their envelope is under way.

For messages of middling size where the receiver does not have the sender's memory mapped: to read
them there would take one way more. A word of the receiver says that one is there. Knows neither
gRPC nor messages.
"""

from __future__ import annotations

from collections.abc import Callable

from tensorwire.memory import Peer, Region, RemoteRegion
from tensorwire.memory.fresh import copied

from .envelope import BODY, Envelope
from .inbox import Inbox, RefusedError
from .leases import SLOTS, Lease, LeasePool
from .waiting import wait_word, wait_word_later

OF_A_CALL = 2
"""Messages of a call at a time for which memory is taken: one is under way, or copied, while the
other one is read. New memory is slow, and more would not be read any sooner."""

_ANSWER_S = 5.0


class Pushing:
    """What one end of an attachment has for it. Any thread may use it.

    Args:
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
        peer: Peer,
        leases: LeasePool,
        inbox: Inbox,
        board: Region,
        other_board: RemoteRegion,
        first_word: int,
    ) -> None:
        self._peer = peer
        self._leases = leases
        self._inbox = inbox
        self._board = board
        self._other_board = other_board
        self._first_word = first_word

    def push(
        self, data: bytes, call: tuple[int, int], patience_s: float, needed: Callable[[], bool]
    ) -> Lease[RemoteRegion] | None:
        """Starts to write a message into memory of the receiver; None: there is none.

        Args:
            data: the message; at least a byte.
            call: as for `Pool.take`.
            patience_s: as there; the receiver is given no longer for making memory either.
            needed: as there.

        Raises:
            PeerLostError, ClosedError, StaleHandleError: the attachment is over, or the call.
        """
        answer_s = min(patience_s, _ANSWER_S)
        lease = self._leases.take(len(data), call, patience_s, needed, answer_s, OF_A_CALL)
        if lease is None:
            return None
        try:
            landed = self._other_board.word(self._place(lease.slot))
            lease.memory[: len(data)].write(data, signal=(landed, lease.turn))
        except BaseException:
            self._leases.retire([lease], call)
            raise
        return lease

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
        wait_word(self._board.word(place), envelope.turn, self._peer, needed)
        return self._taken(envelope)

    async def read_later(self, envelope: Envelope, needed: Callable[[], bool]) -> bytes:
        """As `read`, without blocking the event loop."""
        place = self._checked(envelope)
        await wait_word_later(self._board.word(place), envelope.turn, self._peer, needed)
        return self._taken(envelope)

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
