"""Limits the bytes of a stream that one end may send until the other end takes them.

Each direction of a call that streams has a window of `WINDOW_BYTES`. A message that has arrived and
is not taken uses it up, with its payload beside the frames, so a slow reader bounds memory at both
ends. Taking the message opens it again, by credits that travel back. A message that is longer than
the window arrives while a thread waits for it, or it is next in turn. Knows neither lines nor
threads.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence

from ..payload.envelope import payload_bytes
from ..payload.window import WINDOW_BYTES
from .frames import HEADER, LAST, MORE, WHOLE, FrameError

_OVERHEAD_BYTES = 64  # so that messages of no bytes use up the window too
_TELL_BYTES = WINDOW_BYTES // 4


class TooLongError(Exception):
    """A message is longer than it may be; the argument is its size so far, in bytes."""


class Waiter:
    """An event that threads wait for, such as the end of a call; an arriving frame ends it.

    Attributes:
        finished: it has come about.
        has_work: a thread that waits has something to do, before it comes about.
        latches: of the threads that wait for it.
    """

    has_work = False
    _work: Callable[[], object] | None = None
    _takers: dict[int, object]

    def __init__(self) -> None:
        self.finished = False
        self.latches: list[threading.Lock] = []

    def finish(self) -> None:
        """Wakes all threads that wait for it, because it has come about."""
        self.finished = True
        for latch in list(self.latches):
            open_latch(latch)

    def leave(self, work: Callable[[], object]) -> None:
        """Leaves work to a thread that waits for it, and wakes all of them. Once."""
        self._takers, self._work = {}, work
        self._offer()

    def _offer(self) -> None:
        self.has_work = True
        for latch in list(self.latches):
            open_latch(latch)

    def work(self) -> None:
        """Does the work that was left, unless another thread does.

        An interrupted thread leaves it again.
        """
        work, mine = self._work, object()
        if work is None:
            return
        takers = self._takers
        try:
            # Taken this way, not from a list, so that a thread interrupted right here knows of it.
            if takers.setdefault(0, mine) is mine:
                self.has_work = False
                work()
                self._work = None  # it leads back here
        except BaseException:
            if takers.get(0) is mine and not self.finished:
                takers.clear()
                self._offer()
            raise

    def block(self) -> None:
        """Sleeps until another thread finishes it."""
        latch = threading.Lock()
        latch.acquire()
        self.latches.append(latch)
        if not self.finished:  # a thread that finishes it from here on finds the latch
            latch.acquire()


def open_latch(latch: threading.Lock) -> None:
    """Lets the thread that waits for a latch go on; an open one stays open."""
    try:
        latch.release()
    except RuntimeError:
        pass


NewWaiter = Callable[[], Waiter]


class _Direction:
    """One direction of a call, and the waiter that is finished when it goes on."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._waiter: Waiter | None = None

    def _goes_on(self) -> bool:
        """Returns whether no thread has to wait."""
        raise NotImplementedError

    def _awaited(self, new: NewWaiter) -> Waiter:
        """Returns the waiter to wait for; with the lock."""
        if self._waiter is None or self._waiter.finished:
            made = new()  # a handler of a signal may come in there
            if self._goes_on():
                made.finished = True  # to be asked for again
                return made
            self._waiter = made
        return self._waiter

    def _wake(self) -> None:
        """Wakes the threads that wait; without the lock."""
        if (waiter := self._waiter) is not None and not waiter.finished:
            waiter.finish()


class Outflow(_Direction):
    """The room for sending in one direction of a call. Any thread may use it.

    Args:
        limited: False: the other end takes one message, of any length, and gives no credits.
    """

    def __init__(self, *, limited: bool = True) -> None:
        super().__init__()
        self._left = WINDOW_BYTES
        self._limited = limited
        self._closed = False

    @property
    def closed(self) -> bool:
        """True when the call is over."""
        return self._closed

    def _goes_on(self) -> bool:
        return self._left > 0 or self._closed or not self._limited

    def reserve(self, size_bytes: int, new: NewWaiter = Waiter) -> Waiter | None:
        """Takes room for a frame; None: taken, else the waiter to wait for before asking again."""
        with self._lock:
            if not self._goes_on():
                return self._awaited(new)
            self._left -= size_bytes + _OVERHEAD_BYTES
            return None

    def grant(self, size_bytes: int) -> None:
        """Opens the window by the bytes that the other end has taken.

        Raises:
            FrameError: it has taken more than was sent.
        """
        with self._lock:
            self._left += size_bytes
            if self._left > WINDOW_BYTES and self._limited and not self._closed:
                raise FrameError(f"it confirmed {size_bytes} bytes, more than were sent")
            if self._left <= 0:
                return
        self._wake()

    def send(
        self,
        frames: Iterable[bytes],
        write: Callable[[Sequence[bytes]], object],
        new: NewWaiter = Waiter,
    ) -> Iterator[Waiter]:
        """Sends a message, as many frames together as there is room for; ends with the call.

        Each write wakes threads at both ends.

        Args:
            frames: of one message, in order.
            write: sends some of them.
            new: makes a waiter.

        Yields:
            Each waiter to wait for before it goes on.
        """
        lot: list[bytes] = []
        for number, frame in enumerate(frames):
            size = len(frame) - HEADER.size
            if number == 0:
                size += payload_bytes(frame[HEADER.size :])
            while (waiter := self.reserve(size, new)) is not None:
                if lot:
                    write(lot)
                    lot = []
                yield waiter
            lot.append(frame)
        if lot and not self._closed:
            write(lot)

    def close(self) -> None:
        """Wakes every thread that waits, because the call is over."""
        with self._lock:
            self._closed = True
        self._wake()


class Inflow(_Direction):
    """The messages that have arrived in one direction of a call, until they are taken.

    Any thread may use it; one takes at a time.

    Args:
        most_bytes: of a message; negative for no limit.
    """

    def __init__(self, most_bytes: int) -> None:
        super().__init__()
        self._most_bytes = most_bytes
        self._messages: deque[tuple[list[bytes], int]] = deque()
        self._pieces: list[bytes] = []
        self._bytes = 0
        self._cost = 0
        self._open = WINDOW_BYTES
        self._owed = 0
        self._ended = False
        self._discards = False
        self._begun = False
        self._taking = False

    def _goes_on(self) -> bool:
        return self._ended or bool(self._messages)

    def add(self, data: bytes, flags: int) -> int:
        """Adds a piece of a message that has arrived, or LAST.

        Returns:
            The credit that is to be sent now, in bytes; 0 for none.

        Raises:
            FrameError: more has arrived than there was credit for, or after the last message.
            TooLongError: the message is longer than it may be.
        """
        if flags not in (MORE, WHOLE, LAST):
            raise FrameError(f"a part of a stream has flags {flags}, which are unknown")
        with self._lock:
            if self._ended and not self._discards:
                raise FrameError("a message came after the end of its stream")
            if flags == LAST:
                if self._pieces or data:
                    raise FrameError("a stream ended in the middle of a message")
                self._ended = True
            else:
                if self._open <= 0:
                    raise FrameError("it sent more of a stream than its window allows")
                cost = len(data) + _OVERHEAD_BYTES
                if not self._begun:
                    cost += payload_bytes(data)
                self._begun = flags == MORE
                self._open -= cost
                if self._discards:
                    self._owed += cost
                    return self._credit()
                self._pieces.append(data)
                self._bytes += len(data)
                self._cost += cost
                if 0 <= self._most_bytes < self._bytes:
                    raise TooLongError(self._bytes)
                if flags == WHOLE:
                    self._messages.append((self._pieces, self._cost))
                    self._pieces, self._bytes, self._cost = [], 0, 0
                elif not self._messages:  # it is the next one in turn, however long it is
                    self._owed, self._cost = self._owed + self._cost, 0
            credit = self._credit()
        if flags != MORE:
            self._wake()
        return credit

    def take(self, new: NewWaiter = Waiter) -> bytes | Waiter | None:
        """Returns the next message, or a waiter to wait for first; None: there are no more.

        A thread that has got a message calls `settle` when it is of use, or is not.
        """
        with self._lock:
            if self._messages:
                pieces, cost = self._messages.popleft()
                self._owed += cost
                self._taking = True
                if not self._messages:
                    self._owed, self._cost = self._owed + self._cost, 0
            elif self._ended:
                return None
            else:
                return self._awaited(new)
        return b"".join(pieces)

    def settle(self) -> tuple[int, bool]:
        """Ends the use of the message that was taken last.

        Returns:
            The credit that is to be sent now, in bytes; and whether that was the last message.
        """
        with self._lock:
            self._taking = False
            return self._credit(), self._ended and not self._messages

    def _credit(self) -> int:
        owed = self._owed
        if owed < _TELL_BYTES:
            return 0
        self._owed = 0
        self._open += owed
        return owed

    def discard(self) -> None:
        """Drops all messages that arrive from now on."""
        with self._lock:
            self._discards = True
            self._pieces = []
            self._owed, self._cost = self._owed + self._cost, 0

    def close(self, *, drop: bool = True) -> bool:
        """Takes no more messages; True if nothing is left to be taken, or to be settled.

        Args:
            drop: discards the messages that were not taken.
        """
        with self._lock:
            self._ended = self._discards = True
            if drop:
                self._messages.clear()
            self._pieces = []
            drained = not self._messages and not self._taking
        self._wake()
        return drained
