"""Pushes payload: writes it into the receiver's memory while its envelope is under way.

A word of the receiver says how far the sender has come. The receiver takes a message out of the
memory piece by piece, as it comes. Knows neither gRPC nor the classes of messages.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from tensorwire._core import Transfer
from tensorwire.errors import ClosedError, PeerLostError, TensorwireError, TimeoutError
from tensorwire.memory import Node, Pace, Peer, Region, RemoteRegion, RemoteWord, Word
from tensorwire.memory.fresh import FreshBytes, copied

from .envelope import BODY, Envelope
from .inbox import GivenUpError, Landed, RefusedError, SenderGoneError, StalledError
from .leases import SLOTS, Lease

BOARD_BYTES = 8 * SLOTS
"""The size of a board: a word for each slot."""
CHUNK_BYTES, MAPPED_CHUNK_BYTES = 4 << 20, 2 << 20
"""The bytes of a message that the receiver takes at a time: memory not mapped, and mapped."""

_AT_A_TIME_BYTES = 1 << 26
_LAST_BYTES = 1 << 20
"""The last bytes of arrays, which are copied while their receiver wakes up."""
_SLICE_S = 0.05
STALLED_S = 10.0
_GIVEN_UP = "nobody needs the message any more"
_UNDER_WAY = 2
"""The most writes of a message at a time, where its memory is not mapped."""
_LEAST_BYTES_PER_S = 100e6
"""The least speed of a copy of arrays; a slower one is taken for stopped."""


@dataclass(slots=True, eq=False, repr=False)
class Push:
    """Payload on its way into memory of the receiver.

    Where that is mapped, the thread that calls copies the payload. So arrays may change when `run`
    has returned, and the receiver never takes half of one. Where it is not mapped, the payload is a
    message, which cannot change, and no thread waits until it is written.

    Attributes:
        memory: of the receiver.
        sources: the payload, as bytes.
        offsets: where each goes in the memory; they rise.
        word: of the receiver, for the slot of the memory.
        turn: of the slot.
        maps: the memory is mapped here.
        chunk_bytes: of one message, that the receiver takes at a time; 0: the payload is arrays.
        left_bytes: that are not written yet.
    """

    memory: RemoteRegion
    sources: list[NDArray[np.uint8]]
    offsets: list[int]
    word: RemoteWord
    turn: int
    maps: bool
    chunk_bytes: int
    left_bytes: int = field(init=False)
    _under_way: deque[Transfer] = field(default_factory=deque, init=False)  # words

    def __post_init__(self) -> None:
        self.left_bytes = sum(each.nbytes for each in self.sources)

    def _step(self, most_bytes: int) -> None:
        """Writes a part, and raises the word where the receiver waits for that."""
        now: list[NDArray[np.uint8]] = []
        places: list[int] = []
        end = 0
        while self.sources and most_bytes > 0:
            source, offset = self.sources[0], self.offsets[0]
            size = min(source.nbytes, most_bytes)
            now.append(source[:size])
            places.append(offset)
            end = offset + size
            most_bytes -= size
            self.left_bytes -= size
            if size < source.nbytes:
                self.sources[0], self.offsets[0] = source[size:], end
            else:
                del self.sources[0], self.offsets[0]
        said = _there(self.turn, end)
        if self.maps:
            heard = self.chunk_bytes or self.left_bytes <= _LAST_BYTES
            signal = (self.word, said) if heard else None
            self.memory.write_at(now, places, signal=signal).wait()
            return
        if not self.left_bytes and not self._under_way:  # it is the only one
            self.memory.write_at(now, places, signal=(self.word, said))
            return
        # Two writes may overtake each other, so each is said after all before it.
        written = self.memory.write_at(now, places)
        self._under_way.append(self.word.set(said, after=(written, *self._under_way)))

    def _settle(self, needed: Callable[[], bool]) -> None:
        """Waits until only a few writes are under way."""
        while len(self._under_way) > _UNDER_WAY and needed():
            try:
                self._under_way[0].wait(_SLICE_S)
            except TimeoutError:
                continue
            self._under_way.popleft()

    def run(self, needed: Callable[[], bool]) -> None:
        """Writes the rest of the payload. If there is no sender any more, its receiver finds out.

        Args:
            needed: asked now and then; False ends it.
        """
        try:
            while self.sources and needed():
                most = min(max(self.left_bytes - _LAST_BYTES, _LAST_BYTES), _AT_A_TIME_BYTES)
                self._step(self.chunk_bytes or most)
                self._settle(needed)
        except TensorwireError:
            self.sources.clear()


def _there(turn: int, end: int) -> int:
    """Returns the value of a slot's word when the first `end` bytes of its memory are there.

    A turn is higher than all bytes that were sent in the slot before.
    """
    return turn - 1 + end


class Pushing:
    """The part of one end of an attachment that pushes and waits. Any thread may use it.

    Attributes:
        maps: each end has the memory of the other one mapped.

    Args:
        node: of this end.
        peer: the other end.
        board: of this end, of `BOARD_BYTES`; the other end raises its words.
        other_board: the other end's.
    """

    def __init__(self, node: Node, peer: Peer, board: Region, other_board: RemoteRegion) -> None:
        self.maps = peer.path.transport == "shm"
        self._chunk_bytes = MAPPED_CHUNK_BYTES if self.maps else CHUNK_BYTES
        self._peer = peer
        self._board = board
        self._other_board = other_board
        self._last_pace = Pace()
        # Where memory is mapped, the word alone shows that the sender goes on.
        self._news = lambda: 0 if self.maps else node.stats()["bytes_received"]

    def push(
        self,
        lease: Lease,
        sources: list[NDArray[np.uint8]],
        offsets: list[int],
        *,
        chunked: bool,
    ) -> Push | None:
        """Begins to push payload. Returns the `Push` to run when its envelope has left, if any.

        Args:
            lease: memory of the receiver.
            sources: the payload, as bytes.
            offsets: where each goes in the memory.
            chunked: it is one message.

        Raises:
            PeerLostError, ClosedError, StaleHandleError: the attachment is over, or the call.
        """
        word = self._other_board.word(8 * lease.slot)
        push = Push(
            *(lease.memory, sources, offsets, word, lease.turn, self.maps),
            chunk_bytes=self._chunk_bytes if chunked else 0,
        )
        if self.maps or push.left_bytes > self._chunk_bytes:
            return push
        # Its envelope would only go by the same connection, ahead of it.
        push.run(lambda: True)
        return None

    def read(self, envelope: Envelope, landed: Landed, needed: Callable[[], bool]) -> bytes:
        """Returns the message of an envelope, piece by piece as it comes.

        Args:
            envelope: says where it lies.
            landed: its memory, which is given back; or abandoned if the message does not come.
            needed: asked while it is not there yet; False ends it.

        Raises:
            GivenUpError: it is not needed any more.
            SenderGoneError: the other end is gone.
            RefusedError: the sender does not go on with it.
        """
        _, offset, size = envelope.pieces[0]
        fresh = FreshBytes(size) if size > self._chunk_bytes else None
        with self._abandoning(landed, needed):
            data = landed.piece(BODY)
            for at in range(0, size, self._chunk_bytes):
                end = min(at + self._chunk_bytes, size)
                value = _there(envelope.turn, offset + end)
                wait_word(self._word(envelope), value, self._peer, needed, self._news)
                if fresh is not None:
                    fresh.fill(at, data[at:end])
            self._check_turn(envelope)
        try:
            return copied(data) if fresh is None else fresh.take()
        finally:
            landed.give_back()

    def is_short_and_there(self, envelope: Envelope) -> bool:
        """Returns whether all payload of an envelope is there, and is read in a moment."""
        end = _end(envelope)
        if end > CHUNK_BYTES or envelope.slot >= SLOTS:
            return False
        return self._word(envelope).value == _there(envelope.turn, end)

    def wait(self, envelope: Envelope, landed: Landed, needed: Callable[[], bool]) -> None:
        """Waits until all payload of an envelope is there.

        Args:
            envelope: says where it lies.
            landed: its memory; it is abandoned if the payload does not come.
            needed: as for `read`.

        Raises:
            GivenUpError, SenderGoneError, RefusedError: as for `read`.
        """
        word, end = self._word(envelope), _end(envelope)
        if word.value == _there(envelope.turn, end):
            return
        soon, longest_s = max(end - _LAST_BYTES, 1), STALLED_S + end / _LEAST_BYTES_PER_S
        with self._abandoning(landed, needed):
            value = _there(envelope.turn, soon)
            wait_word(word, value, self._peer, needed, self._news, longest_s)
            value, pace = _there(envelope.turn, end), self._last_pace
            wait_word(word, value, self._peer, needed, self._news, pace=pace)
            self._check_turn(envelope)

    @contextmanager
    def _abandoning(self, landed: Landed, needed: Callable[[], bool]) -> Iterator[None]:
        """Lets go of memory, if an error ends the wait: the sender may still write into it.

        Raises the reason why payload does not come, as a `RefusedError`.
        """
        try:
            yield
        except BaseException as error:
            landed.give_back(reusable=False)
            if not isinstance(error, TensorwireError):
                raise
            if not needed():  # the sender gives up its memory when it is told so
                raise GivenUpError(_GIVEN_UP) from None
            if isinstance(error, PeerLostError | ClosedError) or self._peer.lost:
                text = f"the sender is gone, and what it has sent: {error}"
                raise SenderGoneError(text) from None
            raise RefusedError(f"the sender's payload cannot be read: {error}") from None

    def _check_turn(self, envelope: Envelope) -> None:
        """Refuses payload whose slot has other memory by now.

        The sender has given up the call then, and perhaps its arrays, half of them copied.
        """
        if self._word(envelope).value > _there(envelope.turn, _end(envelope)):
            raise GivenUpError(_GIVEN_UP)

    def _word(self, envelope: Envelope) -> Word:
        return self._board.word(8 * envelope.slot)


def wait_word(
    word: Word,
    value: int,
    peer: Peer,
    needed: Callable[[], bool],
    news: Callable[[], int],
    longest_s: float | None = None,
    pace: Pace | None = None,
) -> None:
    """Waits until the sender has raised a word.

    Args:
        word: of this end.
        value: to which it is to be raised.
        peer: the sender.
        needed: asked meanwhile; False ends it.
        news: a number that changes while the sender goes on.
        longest_s: how long it may take without news; None: `STALLED_S`.
        pace: of earlier waits for the same kind of word, see `Word.wait_until`.

    Raises:
        GivenUpError: it is not needed any more.
        RefusedError: the sender has not gone on for `longest_s`.
        TensorwireError: the sender, or the memory, is gone.
    """
    longest_s = STALLED_S if longest_s is None else longest_s
    seen, until = -1, time.monotonic() + longest_s
    while word.value < value:
        try:
            word.wait_until(value, _SLICE_S, peer=peer, pace=pace)
        except TimeoutError:
            if not needed():
                raise GivenUpError(_GIVEN_UP) from None
            before, seen, now = seen, news(), time.monotonic()
            if seen != before:
                until = now + longest_s
            elif now > until:
                text = f"the sender has not come further for {longest_s:.3g} s"
                raise StalledError(text) from None


def _end(envelope: Envelope) -> int:
    """Returns the offset of the end of an envelope's payload in its memory."""
    return max((offset + size for _, offset, size in envelope.pieces), default=0)
