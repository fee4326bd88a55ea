"""gRPC rendezvous: the receiver reads a large message from the sender's memory, in chunks.

The sender copies a message into memory of its own that the receiver may read, chunk by chunk, and
says after each how far it has come; meanwhile the envelope is on its way, and the receiver reads
chunk after chunk into the message's final place. Knows neither gRPC nor messages.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tensorwire._core import Transfer
from tensorwire.errors import (
    ClosedError,
    PeerLostError,
    StaleHandleError,
    TensorwireError,
    TimeoutError,
)
from tensorwire.memory import Node, Peer, Region, RemoteRegion, Word
from tensorwire.memory.fresh import FreshBytes

from .envelope import BODY, OFFERED_VERSION, PUSHED_VERSION, Envelope, offer_name
from .host import descriptors_are_scarce
from .inbox import GivenUpError, Landed, RefusedError, SenderGoneError
from .leases import SLOTS, AnyLease, Lease, Pool
from .pushing import OF_A_CALL, Pushing
from .threshold import Threshold
from .waiting import GIVEN_UP, finish, wait_word

CHUNK_BYTES = 4 << 20
MAPPED_CHUNK_BYTES = 2 << 20
"""Where the receiver has the memory mapped: each end waits for the other one at every chunk."""
FIRST_BYTES = 1 << 16
"""Copied before the envelope leaves, of a message that is read in chunks: the rest is copied while
that is under way and the receiver wakes up. Of one that is read at once a few times as much is
copied before, and of a longer one nothing."""
AT_ONCE_BYTES = 2 << 20
"""A message that is no longer is copied before its receiver is awake, which reads it in one; where
the receiver does not have the memory mapped, it is pushed."""
BOARD_BYTES = 8 * (1 + 3 * SLOTS)
"""Of a board: what was read of the owner's memory, as for leases; how far the other end has come
with its messages; and which ones it has pushed."""

_STAGED, PUSHED_WORDS = 1 + SLOTS, 1 + 2 * SLOTS
_SLICE_S = 0.05
_UNDER_WAY = 2
_LOOKUP_S = 5.0


class Offered:
    """Memory of the sender that the receiver reads.

    Attributes:
        size_bytes: its length.
    """

    __slots__ = ("_array", "_region", "size_bytes")

    def __init__(self, region: Region) -> None:
        self._region: Region | None = region
        self._array: NDArray[np.uint8] | None = None
        self.size_bytes = region.size_bytes

    @property
    def freed(self) -> bool:
        """Nobody is to read it any more."""
        return self._region is None

    def array(self) -> NDArray[np.uint8]:
        """Its bytes; the same array each time, until it is freed.

        Raises:
            StaleHandleError: it was freed.
        """
        region, array = self._region, self._array
        if region is None:
            raise StaleHandleError("memory for messages of a call is freed, as the call is over")
        if array is None:
            self._array = array = region.array()
            if self._region is None:  # meanwhile
                self._array = None
        return array

    def close(self) -> None:
        """Lets go of its bytes; there are no more of them."""
        self._region = self._array = None

    def free(self) -> None:
        """Frees it, whoever still has this object; calling it again does nothing."""
        region = self._region
        self.close()
        if region is not None:
            region.free()


class OfferPool(Pool[Offered]):
    """Memory of the sender that the receiver reads.

    A turn counts bytes: all that was offered in the slot before, and one more. So a word that only
    grows says how far every message has come.

    Args:
        node: whose memory it is.
        peer, credits, limit_bytes: as of `Pool`.
    """

    def __init__(self, node: Node, peer: Peer, credits: Region, limit_bytes: int) -> None:
        super().__init__(peer, credits, limit_bytes)
        self._node = node

    def _allocate(self, size_bytes: int, serial: int, answer_s: float) -> Offered:
        if descriptors_are_scarce():
            raise MemoryError(
                "this process has three quarters of its descriptors in use, and leaves the others "
                "to connections; see ulimit -n"
            )
        return Offered(self._node.allocate(size_bytes, name=offer_name(serial), access="r"))

    def _free(self, memory: Offered) -> None:
        try:
            memory.free()
        except TensorwireError:
            pass  # the attachment is over

    def _turns_of(self, size_bytes: int) -> int:
        return size_bytes

    def close(self) -> None:
        """Lets go of all memory, as the node is closed."""
        for lease in self.all():
            lease.memory.close()


class Staging:
    """A message that is on its way into memory that the receiver reads.

    Args:
        lease: the memory.
        data: the message; at least a byte.
        board: of the receiver.
        chunk_bytes: copied at a time.

    Attributes:
        lease: as given.

    Raises:
        StaleHandleError: the memory was freed.
    """

    __slots__ = ("_at", "_chunk_bytes", "_data", "_target", "_word", "lease")

    def __init__(
        self, lease: Lease[Offered], data: bytes, board: RemoteRegion, chunk_bytes: int
    ) -> None:
        self.lease = lease
        self._chunk_bytes = chunk_bytes
        self._data = np.frombuffer(data, np.uint8)
        self._target = lease.memory.array()
        self._word = board.word(8 * (_STAGED + lease.slot))
        self._at = 0

    @property
    def left(self) -> bool:
        """Something is to be copied yet, for somebody who may read it."""
        return self._at < len(self._data) and not self.lease.memory.freed

    def step(self, most_bytes: int) -> None:
        """Copies a chunk and tells the receiver.

        Raises:
            TensorwireError: there is no receiver any more.
        """
        start = self._at
        end = min(start + most_bytes, len(self._data))
        self._target[start:end] = self._data[start:end]
        self._at = end
        self._word.set(self.lease.turn - 1 + end)

    def run(self, needed: Callable[[], bool]) -> None:
        """Copies what is left. Whoever reads finds out if there is no receiver any more.

        Args:
            needed: asked before each chunk; False ends it, as does freeing the memory.
        """
        try:
            while self.left and needed():
                self.step(self._chunk_bytes)
        except TensorwireError:
            pass


class Dispatch(NamedTuple):
    """A message that the receiver is to read, or that is pushed to it.

    Attributes:
        lease: its memory.
        version: of its envelope.
        staging: what copies the rest of it; None: nothing is left to be done.
    """

    lease: AnyLease
    version: int
    staging: Staging | None


class Rendezvous:
    """What one end of an attachment has for it. Any thread may use it.

    Attributes:
        offers: memory here that the other end reads.
        threshold: from where messages go this way.
        pushing: as given.
        maps: each end has the memory of the other one mapped.

    Args:
        node: of this end.
        peer: the other end.
        board: of this end, of `BOARD_BYTES`.
        other_board: the other end's.
        offered_bytes: of memory here, at most.
        read_bytes: of a message, that this end reads.
        threshold: as above.
        framed_bytes: a longer message that is below the threshold that is not measured is left to
            frames, for whose limit it is too long, whatever was measured; negative for no limit.
        pushing: for arrays where memory is mapped; else for messages that had better be pushed.
    """

    def __init__(
        self,
        node: Node,
        peer: Peer,
        board: Region,
        other_board: RemoteRegion,
        *,
        offered_bytes: int,
        read_bytes: int,
        threshold: Threshold,
        framed_bytes: int,
        pushing: Pushing,
    ) -> None:
        self.offers = OfferPool(node, peer, board, offered_bytes)
        self.threshold = threshold
        self._framed_bytes = framed_bytes
        self.pushing = pushing
        self._peer = peer
        self._board = board
        self._other_board = other_board
        self._most_bytes = read_bytes
        self._lock = threading.Lock()
        self._telling = threading.Lock()
        self._turns: dict[int, int] = {}
        self._regions: dict[int, tuple[int, RemoteRegion]] = {}
        self._count = 0
        self.maps = peer.path.transport == "shm"
        self._chunk_bytes = MAPPED_CHUNK_BYTES if self.maps else CHUNK_BYTES
        self._looked_at = -1

    def takes(self, size_bytes: int) -> bool:
        """Whether a message is to go this way."""
        if 0 <= self._framed_bytes < size_bytes < self.threshold.most_bytes:
            return False
        return self.threshold.passed(size_bytes)

    def offer(
        self,
        data: bytes,
        call: tuple[int, int],
        patience_s: float,
        needed: Callable[[], bool],
    ) -> Dispatch | None:
        """Takes memory for a message, and copies its first chunk or pushes it; None: there is none.

        Args:
            data: the message; at least a byte.
            call: as for `Pool.take`.
            patience_s: as there.
            needed: as there.

        Raises:
            PeerLostError, ClosedError, StaleHandleError: the attachment is over, or the call.
        """
        until = time.monotonic() + patience_s
        # Where the call has some already, the receiver is behind.
        if self._is_pushed(len(data)) and not self.offers.uses(call):
            pushed = self.pushing.push(data, call, patience_s, needed)
            if pushed is not None:
                return Dispatch(pushed, PUSHED_VERSION, None)
            patience_s = max(until - time.monotonic(), 0.0)
        lease = self.offers.take(len(data), call, patience_s, needed, most=OF_A_CALL)
        return None if lease is None else self._begin(lease, data, call)

    def prepare(self, size_bytes: int, timeout_s: float) -> None:
        """Makes memory for a message that is pushed; waits so long at most.

        Raises:
            PeerLostError, ClosedError: the attachment is over.
        """
        if self._is_pushed(size_bytes):
            self.pushing.prepare(size_bytes, timeout_s)

    def _is_pushed(self, size_bytes: int) -> bool:
        return not self.maps and size_bytes <= AT_ONCE_BYTES

    def _begin(self, lease: Lease[Offered], data: bytes, call: tuple[int, int]) -> Dispatch:
        try:
            size = len(data)
            # One that is read at once is copied so too: nobody waits for a part of it.
            chunk_bytes = size if size <= AT_ONCE_BYTES else self._chunk_bytes
            staging = Staging(lease, data, self._other_board, chunk_bytes)
            if size < 4 * FIRST_BYTES:
                staging.step(size)
            elif size > AT_ONCE_BYTES:
                staging.step(FIRST_BYTES)
        except BaseException:
            self.offers.retire([lease], call)
            raise
        return Dispatch(lease, OFFERED_VERSION, staging if staging.left else None)

    def read(self, envelope: Envelope, needed: Callable[[], bool]) -> bytes:
        """Reads the message of an envelope, which can be done once.

        Args:
            envelope: says where it lies.
            needed: asked while the sender lets this end wait; False ends it.

        Raises:
            GivenUpError: nobody needs it.
            SenderGoneError: the other end is gone.
            RefusedError: it is not there (any more), was read before, or the sender does not go on
                with it.
        """
        if envelope.version == PUSHED_VERSION:
            with self._telling_why(needed):
                return self._pusher().read(envelope, needed)
        size = self._claim(envelope)
        remote = self._known(envelope) or self._look_up(envelope)
        with self._reading(envelope, remote, needed):
            fresh = FreshBytes(size)
            for awaited in self._chunks(envelope, size, remote, fresh, needed):
                if isinstance(awaited, int):
                    wait_word(self._staged(envelope), awaited, self._peer, needed)
                else:
                    finish(awaited, needed)
        return fresh.take()

    def arrays(self, envelope: Envelope, landed: Landed, needed: Callable[[], bool]) -> None:
        """Waits until the arrays of an envelope are there; raises as `read`.

        Args:
            envelope: says where they lie.
            landed: their memory; it is abandoned if they do not come.
            needed: as for `read`.
        """
        self._check_mapped()
        with self._telling_why(needed):
            self.pushing.await_arrays(envelope, landed, needed)

    def _check_mapped(self) -> None:
        if not self.maps:
            raise RefusedError("arrays are pushed where memory is mapped, and not here")

    @contextmanager
    def _reading(
        self, envelope: Envelope, remote: RemoteRegion, needed: Callable[[], bool]
    ) -> Iterator[None]:
        """Tells the sender when its message was read; raises what has become of it otherwise."""
        if envelope.pieces[0][2] > remote.size_bytes:
            raise RefusedError(f"{envelope.pieces[0][2]} bytes in memory of {remote.size_bytes}")
        try:
            with self._telling_why(needed):
                yield
        except BaseException:
            self._forget(envelope.slot, remote)
            raise
        self._tell(envelope.slot, envelope.turn)

    @contextmanager
    def _telling_why(self, needed: Callable[[], bool]) -> Iterator[None]:
        """Raises what has become of a message that cannot be read."""
        try:
            yield
        except TensorwireError as error:
            if not needed():  # the sender gives up its memory when it is told so
                raise GivenUpError(GIVEN_UP) from None
            raise self._unreadable(error) from None

    def _pusher(self) -> Pushing:
        if self.maps:
            raise RefusedError("no messages are pushed where memory is mapped")
        return self.pushing

    def _staged(self, envelope: Envelope) -> Word:
        """How far the sender has come with the message."""
        return self._board.word(8 * (_STAGED + envelope.slot))

    def _chunks(
        self,
        envelope: Envelope,
        size: int,
        remote: RemoteRegion,
        fresh: FreshBytes,
        needed: Callable[[], bool],
    ) -> Iterator[int | Transfer]:
        """Reads a message; yields what is to be waited for: the word of its slot, or a transfer."""
        under_way: deque[Transfer] = deque()
        step = self._chunk_bytes if size > AT_ONCE_BYTES else size
        for at in range(0, size, step):
            if at and not needed():
                raise GivenUpError(GIVEN_UP)
            end = min(at + step, size)
            yield envelope.turn - 1 + end
            under_way.append(remote[at:end].read(fresh[at:end]))
            if len(under_way) > _UNDER_WAY:
                yield under_way.popleft()
        yield from under_way

    def _claim(self, envelope: Envelope) -> int:
        """The size of a message that is to be read by who calls, if that can be."""
        slot, turn = envelope.slot, envelope.turn
        if len(envelope.pieces) != 1 or envelope.pieces[0][0] != BODY:
            raise RefusedError("what is to be read is one message")
        _, offset, size = envelope.pieces[0]
        if slot >= SLOTS or offset:
            raise RefusedError(f"slot {slot} of {SLOTS}, from byte {offset}")
        if not 0 < size <= self._most_bytes:
            raise RefusedError(f"a message of {size} bytes, and pool_bytes is {self._most_bytes}")
        with self._lock:
            if turn <= self._turns.get(slot, 0) or turn + size >= 1 << 63:
                raise RefusedError(f"turn {turn} of slot {slot} was used before")
            self._turns[slot] = turn
        return size

    def _known(self, envelope: Envelope) -> RemoteRegion | None:
        with self._lock:
            known = self._regions.get(envelope.slot)
        return known[1] if known is not None and known[0] == envelope.serial else None

    def _look_up(self, envelope: Envelope) -> RemoteRegion:
        name = offer_name(envelope.serial)
        try:
            remote = self._peer.region(name, timeout_s=_LOOKUP_S)
        except TensorwireError as error:
            raise self._unreadable(error) from None
        except LookupError as error:
            raise RefusedError(f"there is no {name}: {error}") from None
        with self._lock:
            self._regions[envelope.slot] = envelope.serial, remote
        return remote

    def _forget(self, slot: int, remote: RemoteRegion) -> None:
        """The sender has freed this memory, or is about to."""
        with self._lock:
            known = self._regions.get(slot)
            if known is not None and known[1] is remote:
                del self._regions[slot]

    def look(self) -> None:
        """For the janitor: lets go of memory that the sender has freed; looks at some each time.

        What a call has not come to is freed there, and stayed mapped here though nobody uses it.
        """
        if not self.maps:
            return
        with self._lock:
            slots = sorted(self._regions)
            slot = next((each for each in slots if each > self._looked_at), None)
            self._looked_at = -1 if slot is None else slot
            remote = None if slot is None else self._regions[slot][1]
        if slot is None or remote is None:
            return
        try:
            remote[:1].read(bytearray(1)).wait(_SLICE_S)
        except TimeoutError:
            pass
        except TensorwireError:
            self._forget(slot, remote)

    def _unreadable(self, error: TensorwireError) -> RefusedError:
        if isinstance(error, PeerLostError | ClosedError) or self._peer.lost:
            return SenderGoneError(f"the sender is gone, and what it has sent: {error}")
        return RefusedError(f"the sender's memory cannot be read: {error}")

    def _tell(self, slot: int, turn: int) -> None:
        """The sender may use the memory again."""
        with self._telling:
            self._count += 1
            board, place = self._other_board, 8 * (1 + slot)
            try:
                if self.maps:
                    board.word(place).set(turn)
                    board.word(0).set(self._count)
                    return
                # The other end is woken once. Turns rise, so half of a word is never too high.
                board[place : place + 8].write(
                    turn.to_bytes(8, "little"), signal=(board.word(0), self._count)
                )
            except TensorwireError:
                pass  # the attachment is over, and nobody waits
