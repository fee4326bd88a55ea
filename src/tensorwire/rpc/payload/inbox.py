"""gRPC: the memory here into which the peer writes payload, and how it is given back.

Everything that an envelope says is checked before it is used. Knows neither gRPC nor messages.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial

import numpy as np
from numpy.typing import NDArray

from tensorwire.errors import ClosedError, TensorwireError
from tensorwire.memory import Node, Region, RemoteRegion, RemoteWord

from .envelope import Envelope, lease_name
from .leases import SLOTS

_FORKED = (
    "this array arrived in the process that this one was forked from, and its memory is not mapped "
    "here: copy what a child needs before the fork, with embed(message) or array(message).copy()"
)


class RefusedError(Exception):
    """An envelope names memory that this side does not have, or that does not fit.

    The sender sends the message again, with its payload inside.
    """


class GivenUpError(RefusedError):
    """The message is not needed any more: its call is over, or has no time left."""


class StalledError(RefusedError):
    """The sender paused for long in the middle of a message: stopped, or its machine asleep."""


class SenderGoneError(RefusedError):
    """The attachment is over, and the memory of the message with it."""


class Landed:
    """The memory of one message, until `give_back`.

    Args:
        memory: of the lease.
        pieces: as in the envelope, within the memory.
        give_back: lets the sender use the memory again if it is given True.

    Attributes:
        pieces: as given.
    """

    __slots__ = ("_disowned", "_give_back", "_memory", "pieces")

    def __init__(
        self,
        memory: memoryview,
        pieces: dict[int, tuple[int, int]],
        give_back: Callable[[bool], None],
    ) -> None:
        self._memory = memory
        self.pieces = pieces
        self._give_back: Callable[[bool], None] | None = give_back
        self._disowned = False

    def piece(self, ticket: int) -> NDArray[np.uint8]:
        """Returns the bytes of a piece, where they are; arrays made from it refer to this one.

        Raises:
            ClosedError: in a forked child, see `disown`.
        """
        offset, size = self.pieces[ticket]
        if self._disowned:
            raise ClosedError(_FORKED)
        return np.frombuffer(self._memory, np.uint8, size, offset)

    def disown(self) -> None:
        """Lets go in a forked child: only the parent has the memory mapped, and gives it back."""
        self._disowned = True
        self._give_back = None

    def give_back(self, *, reusable: bool = True) -> None:
        """Lets the sender use the memory again; calling it again does nothing.

        Args:
            reusable: False: the sender may still write into it, and frees it with the call.
        """
        give_back, self._give_back = self._give_back, None
        if give_back is None:
            return
        try:
            give_back(reusable)
        except BaseException:
            self._give_back = give_back  # it was interrupted
            raise


class Inbox:
    """All leases that the other side has here. Any thread may use it.

    Args:
        node: the only peer of it is the sender.
        credits: the sender's memory with a word that counts, and one for each slot.
        taken: offset of as many words for messages that the reader has taken.
    """

    def __init__(self, node: Node, credits: RemoteRegion, taken: int) -> None:
        self._node = node
        self._count_word = credits.word(0)
        self._credits = credits
        self._count = 0
        self._taken = taken
        self._taken_word = credits.word(taken)
        self._taken_count = 0
        # A handler of a signal, or a finalizer, may come back in here while it is held.
        self._lock = threading.RLock()
        self._turns: dict[int, int] = {}
        self._held: set[tuple[int, int]] = set()

    @property
    def held(self) -> int:
        """The number of messages that are still here, or a view of them."""
        return len(self._held)

    def arrive(self, envelope: Envelope) -> Landed:
        """Finds the memory of an envelope, which can be used once.

        Raises:
            RefusedError: it is not here (any more), was used before, or is smaller than the pieces
                that the envelope places there.
        """
        slot, turn = envelope.slot, envelope.turn
        if slot >= SLOTS:
            raise RefusedError(f"the message names slot {slot}, and there are {SLOTS} slots")
        with self._lock:
            if turn <= self._turns.get(slot, 0) or turn >= 1 << 63:
                raise RefusedError(
                    f"the payload of turn {turn} in slot {slot} was used before, or is out of range"
                )
            region = self._region(envelope.serial)
            pieces = {}
            for ticket, offset, size in envelope.pieces:
                if offset + size > region.size_bytes:
                    raise RefusedError(
                        f"the message names bytes {offset} to {offset + size} of "
                        f"{lease_name(envelope.serial)}, which has {region.size_bytes}"
                    )
                pieces[ticket] = offset, size
            try:
                memory = region.memoryview()
            except TensorwireError as error:  # the sender frees it at this moment
                raise RefusedError(
                    f"the payload in {lease_name(envelope.serial)} cannot be read: {error}"
                ) from None
            self._turns[slot] = turn
            self._held.add((slot, turn))
        return Landed(memory, pieces, partial(self._give_back, slot, turn))

    def take(self, envelope: Envelope) -> None:
        """Tells the sender that the reader of a stream has got to a message, and may keep it."""
        with self._lock:
            self._taken_count += 1
            self._raise(
                self._taken, envelope.slot, envelope.turn, self._taken_word, self._taken_count
            )

    def _region(self, serial: int) -> Region:
        # Looked up each time: a region kept here is not given back when the sender frees it, and
        # counts as used when the sender wants other memory.
        try:
            return self._node.region(lease_name(serial))
        except LookupError:
            raise RefusedError(
                f"the message names {lease_name(serial)}, memory that this process does not have"
            ) from None

    def _give_back(self, slot: int, turn: int, reusable: bool) -> None:
        with self._lock:
            if (slot, turn) not in self._held:
                return  # it was interrupted after that
            # A later turn: the sender has given up this one, and must not see its word fall.
            if reusable and self._turns[slot] == turn:
                self._tell(slot, turn)
            self._held.discard((slot, turn))

    def _tell(self, slot: int, turn: int) -> None:
        self._count += 1
        self._raise(0, slot, turn, self._count_word, self._count)

    def _raise(self, at: int, slot: int, turn: int, counter: RemoteWord, count: int) -> None:
        try:
            # One frame by TCP. Turns of a slot rise, so half a word is never too high.
            place = at + 8 * (1 + slot)
            self._credits[place : place + 8].write(
                turn.to_bytes(8, "little"), signal=(counter, count)
            )
        except TensorwireError:
            pass  # the attachment is over, so the sender does not wait
