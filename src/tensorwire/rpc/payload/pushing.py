"""Pushes messages: writes them into the receiver's memory while the envelope is under way.

The arrays of a message, where the sender has that memory mapped; where it has not, messages of
middling size: to read them in the sender's memory would take one way more. A word of the receiver
says that they are there. Knows neither gRPC nor messages.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial

import numpy as np
from numpy.typing import NDArray

from tensorwire.errors import TensorwireError
from tensorwire.memory import Node, Pace, Peer, Region, RemoteRegion, RemoteWord, Word
from tensorwire.memory.fresh import copied

from .envelope import BODY, Envelope
from .inbox import GivenUpError, Inbox, Landed, RefusedError
from .leases import SLOTS, Lease, LeasePool
from .threads import THREADS
from .waiting import GIVEN_UP, STALLED_S, nothing_new, wait_word

OF_A_CALL = 2
"""Messages of a call at a time for which memory is taken: one is under way, or copied, while the
other one is read. New memory is slow, and more would not be read any sooner."""

LEAST_ARRAYS_BYTES = 1 << 19
"""Shorter arrays are there before their envelope leaves: to wait for them costs the receiver more
than it gains."""

_ANSWER_S = 5.0
_AGAIN_S = 1.0
"""Until the receiver is asked again, when it has given no memory."""
_AT_A_TIME_BYTES = 1 << 26
_LAST_BYTES = 1 << 20
"""The last of arrays, which are copied while their receiver wakes up."""
_LEAST_BYTES_PER_S = 100e6
"""Slower copies of arrays are taken for none."""


class PushedArrays:
    """Arrays on their way into memory of the receiver that is mapped here, behind their envelope.

    They are copied by who calls, so none is looked at any more when that returns: their owner may
    change them when the call has ended, and the receiver never takes what was copied by halves.

    Args:
        memory: of the receiver.
        sources: the arrays, as bytes.
        offsets: where they go in it.
        word: of the receiver, for their slot.
        turn: of the slot.
    """

    __slots__ = ("_left_bytes", "_memory", "_offsets", "_sources", "_turn", "_word")

    def __init__(
        self,
        memory: RemoteRegion,
        sources: list[NDArray[np.uint8]],
        offsets: list[int],
        word: RemoteWord,
        turn: int,
    ) -> None:
        self._memory = memory
        self._word = word
        self._turn = turn
        self._sources = sources
        self._offsets = offsets
        self._left_bytes = sum(each.nbytes for each in sources)

    def _step(self, most_bytes: int) -> None:
        """Copies some, and says how far it has come where somebody waits for that."""
        sources, offsets = self._sources, self._offsets
        count, cut = 0, 0
        while count < len(sources) and most_bytes > 0:
            size = sources[count].nbytes
            if size > most_bytes:
                cut = most_bytes
                break
            most_bytes -= size
            count += 1
        now, places = sources[:count], offsets[:count]
        self._sources, self._offsets = sources[count:], offsets[count:]
        if cut:
            now.append(sources[count][:cut])
            places.append(offsets[count])
            self._sources[0] = sources[count][cut:]
            self._offsets[0] += cut
        self._left_bytes -= sum(each.nbytes for each in now)
        signal = None
        if self._left_bytes <= _LAST_BYTES:
            said = _there(self._turn) if self._left_bytes == 0 else _soon_there(self._turn)
            signal = self._word, said
        self._memory.write_at(now, places, signal=signal).wait()

    def run(self, needed: Callable[[], bool]) -> None:
        """Copies them. Whoever waits for them finds out if there is no receiver any more.

        Args:
            needed: asked now and then; False ends it.
        """
        try:
            while self._sources and needed():
                most = max(self._left_bytes - _LAST_BYTES, _LAST_BYTES)
                self._step(min(most, _AT_A_TIME_BYTES))
        except TensorwireError:
            pass


def _there(turn: int) -> int:
    """The value of the word of a slot when what was pushed in a turn is there."""
    return 2 * turn


def _soon_there(turn: int) -> int:
    """The same when it is about to be."""
    return 2 * turn - 1


class Pushing:
    """What one end of an attachment has for it. Any thread may use it.

    Args:
        node: of this end.
        peer: the other end.
        leases: memory there.
        inbox: what the other end has here.
        board: of this end, with a word for each slot that the other end raises to twice the turn
            of what is there, or to one less shortly before.
        other_board: the other end's.
        first_word: of the board, for slot 0.
        most_bytes: of memory here that the other end writes into.
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
        most_bytes: int,
    ) -> None:
        self._node = node
        self._peer = peer
        self._leases = leases
        self._inbox = inbox
        self._board = board
        self._other_board = other_board
        self._first_word = first_word
        self._most_bytes = most_bytes
        self._lock = threading.Lock()
        self._last_pace = Pace()
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
            lease.memory[: len(data)].write(data, signal=(landed, _there(lease.turn)))
        except BaseException:
            self._leases.retire([lease], call)
            raise
        return lease

    def push_arrays(
        self, lease: Lease[RemoteRegion], sources: list[NDArray[np.uint8]], offsets: list[int]
    ) -> PushedArrays:
        """What copies arrays into memory of the receiver, when their envelope has left.

        Args:
            lease: the memory, which is mapped.
            sources: the arrays, as bytes.
            offsets: where they go in it.
        """
        word = self._other_board.word(self._place(lease.slot))
        return PushedArrays(lease.memory, sources, offsets, word, lease.turn)

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
        wait_word(self._board.word(place), _there(envelope.turn), self._peer, needed, self._news)
        return self._taken(envelope)

    def await_arrays(self, envelope: Envelope, landed: Landed, needed: Callable[[], bool]) -> None:
        """Waits until the arrays of an envelope are there.

        Args:
            envelope: says where they lie.
            landed: their memory; it is abandoned if they do not come.
            needed: asked meanwhile; False ends it.

        Raises:
            GivenUpError, RefusedError, TensorwireError: as `read`.
        """
        word = self._board.word(self._place(envelope.slot))
        turn = envelope.turn
        if word.value == _there(turn):
            return
        try:
            longest_s = self._longest_s(envelope)
            wait_word(word, _soon_there(turn), self._peer, needed, nothing_new, longest_s)
            wait_word(word, _there(turn), self._peer, needed, pace=self._last_pace)
            self._check_turn(word, turn)
        except BaseException:
            landed.abandon()
            raise

    def _check_turn(self, word: Word, turn: int) -> None:
        """Refuses what is waited for, if its slot has other memory by now.

        The sender has given up the call then, and perhaps its arrays, half of them copied.
        """
        if word.value > _there(turn):
            raise GivenUpError(GIVEN_UP)

    def _longest_s(self, envelope: Envelope) -> float:
        """How long the arrays of an envelope may take until they are nearly there."""
        end = max((offset + size for _, offset, size in envelope.pieces), default=0)
        return STALLED_S + min(end, self._most_bytes) / _LEAST_BYTES_PER_S

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
