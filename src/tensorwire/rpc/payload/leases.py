"""Manages leases: the memory at the peer into which this side writes payload.

A lease is a region of the receiver that the sender allocated there. It is used over and over: the
receiver raises a word when the payload of a use is read, which is the credit for the next one. A
turn of a lease counts bytes: all that its slot was used for before, and one more. Knows neither
gRPC nor messages.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from tensorwire.errors import PeerLostError, TensorwireError, TimeoutError, UnavailableError
from tensorwire.memory import Peer, Region, RemoteRegion

from .envelope import lease_name
from .host import SCARCE, descriptors_are_scarce
from .janitor import JANITOR

SLOTS = 512
"""The most leases that one side may have; the other side has a word for each."""

IDLE_S = 300.0
"""The seconds after which memory that was not used is freed."""

ALIGNMENT = 64
_SMALLEST_STEP = 1 << 16
_SLICE_S = 0.05
_FREED_AT_ONCE = 16
_PAUSES = 10
"""The pause before a receiver that did not answer is asked again, as a multiple of the time that
it was waited for, of which one second counts at most.
"""


@dataclass(slots=True, eq=False, repr=False)
class Lease:
    """Memory, and the use that is made of it. Its pool's lock guards it.

    Attributes:
        slot: its number at both sides.
        serial: of the region, see `lease_name`.
        memory: where to write.
        turn: of the use; higher than any before in this slot.
        call: that uses it, None while it is idle.
        seen: its turn when `LeasePool.free_idle` first found it idle after that, and when that was.
    """

    slot: int
    serial: int
    memory: RemoteRegion
    turn: int = 0
    call: tuple[int, int] | None = None
    seen: tuple[int, float] = (-1, 0.0)


class LeasePool:
    """All memory of the receiver that one side of an attachment writes into. Any thread may use it.

    Args:
        peer: the receiver.
        credits: memory here with a word that counts what the receiver has given back, and a word
            for each slot with the last turn that it gave back.
        limit_bytes: of all leases together.
    """

    def __init__(self, peer: Peer, credits: Region, limit_bytes: int) -> None:
        self._peer = peer
        self._count = credits.word(0)
        self._given_back: NDArray[np.uint64] = credits.array("uint64")[1 : 1 + SLOTS]
        self._limit_bytes = limit_bytes
        # A handler of a signal may make a call in here, after any call of a function. So a value
        # that was taken from these lists is checked once more, without any call, before its use.
        self._lock = threading.RLock()
        self._bytes = 0
        self._serial = 0
        # Why there was no new memory last; and until when the receiver is not asked again, unless
        # it has given some back since, as it did not answer.
        self.failure = ""
        self._silent = (-1, 0.0)
        self._in_vain = -1  # the credits that there were when a call had waited for more
        self._turns = [0] * SLOTS
        self._slots = list(range(SLOTS))
        self._idle: list[Lease] = []
        self._used: dict[int, Lease] = {}

    @property
    def used(self) -> int:
        """The number of leases that the receiver has not given back yet."""
        with self._lock:
            self._collect()
            return len(self._used)

    @property
    def leased_bytes(self) -> int:
        """The bytes of memory at the receiver, used and idle."""
        return self._bytes

    def take(
        self,
        size_bytes: int,
        call: tuple[int, int],
        patience_s: float,
        needed: Callable[[], bool],
        answer_s: float = 5.0,
    ) -> Lease | None:
        """Takes memory for one message.

        Waits for credits where the limit is reached and the receiver has some to give. Does not
        wait if a call has waited in vain, and the receiver has given none since.

        Args:
            size_bytes: the least size of the memory.
            call: the number of the call in its attachment.
            patience_s: how long to wait for credits.
            needed: asked while waiting; False ends it.
            answer_s: how long the receiver may take to allocate.

        Returns:
            None: there is none, so the message has to travel without.

        Raises:
            PeerLostError, ClosedError: the attachment is over.
        """
        if (lease := self.take_idle(size_bytes, call)) is not None:
            return lease
        until = time.monotonic()
        if self._count.value != self._in_vain:
            until += patience_s
        while True:
            seen, left = self._count.value, until - time.monotonic()
            lease, again = self._attempt(size_bytes, call, answer_s)
            if lease is not None or not again or left <= 0 or not needed():
                if lease is None and left <= 0 < patience_s:
                    self._in_vain = seen
                return lease
            try:
                self._count.wait_until(seen + 1, min(left, _SLICE_S), peer=self._peer)
            except TimeoutError:
                pass

    def _attempt(
        self, size_bytes: int, call: tuple[int, int], answer_s: float
    ) -> tuple[Lease | None, bool]:
        """Takes memory if there is some now.

        The second result says whether there may be some once the receiver gives some back.
        """
        wanted_bytes, size_bytes = size_bytes, _rounded(size_bytes)
        if size_bytes > self._limit_bytes:
            return None, False
        slot: int | None = None
        freed: list[RemoteRegion] = []
        with self._lock:
            self._collect()
            lease = self._pick(size_bytes)
            if lease is None:
                slot = self._reserve(size_bytes, freed)
            if slot is not None:
                self._serial += 1
            serial = self._serial
        if lease is not None:
            return self._use(lease, call, wanted_bytes), False
        for each in freed:  # first, as the new memory is to be where it was
            self._free(each)
        if slot is None:
            self.failure = ""
            return None, bool(self._used)
        new = self._make(slot, serial, size_bytes, answer_s)
        if new is None:
            return None, bool(self._used or freed)
        return self._use(new, call, wanted_bytes), False

    def _make(self, slot: int, serial: int, size_bytes: int, answer_s: float) -> Lease | None:
        """Makes new memory for a reserved slot; None: there is none, and the slot is free again."""
        seen, until = self._silent
        try:
            if seen == self._count.value and time.monotonic() < until:
                raise TimeoutError(self.failure)
            if descriptors_are_scarce():
                raise UnavailableError(SCARCE)
            return Lease(slot, serial, self._allocate(size_bytes, serial, answer_s))
        except PeerLostError:
            raise
        except (TensorwireError, MemoryError) as error:  # used up, or it does not answer
            self.failure = str(error)
            if isinstance(error, TimeoutError) and time.monotonic() >= until:
                pause_s = _PAUSES * min(answer_s, 1.0)
                self._silent = self._count.value, time.monotonic() + pause_s
            with self._lock:
                self._bytes -= size_bytes
                self._slots.append(slot)
            return None

    def take_idle(self, size_bytes: int, call: tuple[int, int]) -> Lease | None:
        """Takes memory for one message from idle leases; None: there is none that fits."""
        with self._lock:
            self._collect()
            lease = self._pick(_rounded(size_bytes))
        return None if lease is None else self._use(lease, call, size_bytes)

    def _allocate(self, size_bytes: int, serial: int, answer_s: float) -> RemoteRegion:
        return self._peer.allocate(size_bytes, lease_name(serial), timeout_s=answer_s)

    def _free(self, memory: RemoteRegion) -> None:
        try:
            memory.free(timeout_s=0.05)
        except TensorwireError:
            pass  # the receiver frees it later, or it is gone with the attachment

    def all(self) -> list[Lease]:
        """Returns all leases, used and idle."""
        with self._lock:
            return [*self._used.values(), *self._idle]

    def used_of(self, leases: Sequence[Lease], call: tuple[int, int]) -> list[Lease]:
        """Returns the leases that are used for a call, and not given back yet."""
        if not leases:
            return []
        with self._lock:
            self._collect()
            used = self._used
            return [each for each in leases if each.call == call and used.get(each.slot) is each]

    def retire(self, leases: Sequence[Lease], call: tuple[int, int]) -> None:
        """Gives up uses by a call that the receiver may never see, with their memory.

        The memory is freed: if the receiver still comes to it, the name is unknown. Payload that
        the receiver looks at already stays, for the receiver alone. A lease that came back
        meanwhile just stays one.
        """
        with self._lock:
            self._collect()
            gone = []
            for lease in leases:
                slot = lease.slot
                if slot in self._used and self._used[slot] is lease and lease.call == call:
                    del self._used[slot]
                    self._forget(lease)
                    gone.append(lease)  # of this pool
        for lease in gone:
            JANITOR.soon(partial(self._free, lease.memory))

    def retire_calls(self, over: Callable[[tuple[int, int]], bool]) -> None:
        """Retires the leases that are used for calls that are over."""
        with self._lock:
            self._collect()
            used = list(self._used.values())
        for call in {each.call for each in used if each.call is not None}:
            if over(call):
                self.retire(used, call)

    def free_idle(self) -> None:
        """Frees memory that has been idle for IDLE_S, to be called now and then.

        A receiver that has stopped takes up to 0.05 s for each, so a call frees only a few.
        """
        now = time.monotonic()
        gone: list[Lease] = []
        with self._lock:
            self._collect()
            for lease in list(self._idle):
                turn, since = lease.seen
                if turn != lease.turn:
                    lease.seen = (lease.turn, now)
                elif now - since >= IDLE_S and len(gone) < _FREED_AT_ONCE:
                    gone.append(lease)
            for lease in gone:
                self._idle.remove(lease)
                self._forget(lease)
        for lease in gone:
            self._free(lease.memory)

    def _use(self, lease: Lease, call: tuple[int, int], size_bytes: int) -> Lease:
        with self._lock:
            lease.turn = self._turns[lease.slot] + 1
            self._turns[lease.slot] += size_bytes
            lease.call = call
            self._used[lease.slot] = lease
        return lease

    def _collect(self) -> None:
        for slot, lease in list(self._used.items()):
            if slot in self._used and self._used[slot] is lease:
                if self._given_back[slot] >= lease.turn:
                    del self._used[slot]
                    lease.call = None
                    self._idle.append(lease)

    def _pick(self, size_bytes: int) -> Lease | None:
        """Takes the smallest idle lease that fits, and is at most four times as large.

        The one that was used last, if several have that size.
        """
        best = None
        for lease in self._idle:
            size = lease.memory.size_bytes
            if size_bytes <= size <= 4 * size_bytes and (
                best is None or size <= best.memory.size_bytes
            ):
                best = lease
        if best is not None and best in self._idle:
            self._idle.remove(best)
            return best
        return None

    def _reserve(self, size_bytes: int, freed: list[RemoteRegion]) -> int | None:
        """Reserves a slot for new memory; None: wait for credits.

        Adds idle memory that has to make room for it to `freed`; the caller frees that.
        """
        while self._bytes + size_bytes > self._limit_bytes or not self._slots:
            if not self._idle:
                return None
            lease = self._idle.pop(0)
            self._forget(lease)
            freed.append(lease.memory)
        self._bytes += size_bytes
        return self._slots.pop()

    def _forget(self, lease: Lease) -> None:
        self._bytes -= lease.memory.size_bytes
        self._slots.append(lease.slot)


def _rounded(size_bytes: int) -> int:
    """Returns the size of a lease, one of few, so that it serves messages of similar length."""
    step = max(_SMALLEST_STEP, 1 << max(size_bytes.bit_length() - 4, 0))
    return -(-size_bytes // step) * step


def place(sizes: Sequence[int]) -> tuple[list[int], int]:
    """Returns the offsets of pieces of these lengths in a lease, and the bytes in all."""
    offsets, end = [], 0
    for size in sizes:
        offsets.append(end)
        end += -(-size // ALIGNMENT) * ALIGNMENT
    return offsets, end
