"""Delivers output in a thread of its own, so that no thread that serves others waits for a reader.

Where nobody reads (a terminal that is held with Ctrl-S, a full pipe, a log daemon that is stopped),
write(2) waits for ever. Knows nothing of what is delivered.
"""

from __future__ import annotations

import atexit
import collections
import contextlib
import io
import math
import os
import select
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Generic, TextIO, TypeVar

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

_MOST_BYTES = 1 << 20  # that wait for one reader
_LAST_S = 2.0  # for what waits when the process ends

Piece = TypeVar("Piece")


class Aside(Generic[Piece]):
    """A queue of pieces and a daemon thread that delivers them in order. `put` never waits.

    A piece that comes while too much waits is left out; once there is room, `note_missing` says how
    many were. Any thread may call it, and a handler of a signal, too.

    Args:
        deliver: delivers pieces, and may wait; raises nothing.
        most: the most that may wait, in the sizes of pieces; a piece that is alone always may.
        note_missing: makes the piece that says how many were left out before it.
        delivered: is called in the thread each time when `waiting` has become less.

    Attributes:
        waiting: sizes of all pieces that are not delivered yet.
    """

    def __init__(
        self,
        deliver: Callable[[Sequence[Piece]], None],
        most: float = math.inf,
        note_missing: Callable[[int], Piece] | None = None,
        delivered: Callable[[], object] = lambda: None,
    ) -> None:
        self._deliver, self._delivered = deliver, delivered
        self._most, self._note_missing = most, note_missing
        self._changed = threading.Condition()
        self._pieces: collections.deque[Piece] = collections.deque()
        self._missing = 0
        self._closed = False
        self.waiting = 0
        threading.Thread(target=self._run, name="tensorwire-output", daemon=True).start()

    def put(self, piece: Piece, size: int = 1) -> None:
        """Queues a piece, to be delivered after all earlier ones, unless too much waits."""
        with self._changed:
            if self.waiting and self.waiting + size > self._most:
                self._missing += 1
                return
            self._tell_missing()
            self._pieces.append(piece)
            self.waiting += size
            self._changed.notify_all()

    def wait(self, timeout_s: float) -> bool:
        """Waits until all is delivered; returns whether it is."""
        with self._changed:
            return self._changed.wait_for(lambda: not (self.waiting or self._missing), timeout_s)

    def close(self) -> None:
        """Ends the thread once all is delivered; does not wait for that."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _tell_missing(self) -> None:
        """Queues a note about dropped pieces, if there are any. Call it with the lock held."""
        if self._missing and self._note_missing is not None:
            self._pieces.append(self._note_missing(self._missing))
            self._missing = 0

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._pieces or self._missing or self._closed)
                if not self._pieces:
                    self._tell_missing()
                pieces, size = list(self._pieces), self.waiting
                self._pieces.clear()
                if not pieces:
                    return
            self._deliver(pieces)
            del pieces  # what they hold is not kept until the next ones come
            with self._changed:
                self.waiting -= size
                self._changed.notify_all()
            self._delivered()


def write_all(descriptor: int, data: bytes) -> None:
    """Writes all of `data`, however long that takes, also to a descriptor that is non-blocking.

    Raises:
        OSError: nobody can read it any more.
    """
    left = memoryview(data)
    while left:
        try:
            left = left[os.write(descriptor, left) :]
        except BlockingIOError:
            poll = select.poll()
            poll.register(descriptor, select.POLLOUT)
            poll.poll()


def put_output_aside() -> None:
    """Makes this process print in a thread of its own from now on, so that serving never waits.

    It takes the place of `sys.stdout` and `sys.stderr`: `print`, `warnings`, `logging` and
    tracebacks never wait. Output that nobody reads is left out after 1 MiB, with a line that says
    how much. The end of the process waits up to two seconds for what is left.
    """
    asides: dict[int, Aside[bytes]] = {}
    streams = []
    for name in ("stdout", "stderr"):
        stream: TextIO | None = getattr(sys, name)
        try:
            if stream is None:
                continue
            descriptor = stream.fileno()
            stream.flush()
            found = [other for other in asides if os.path.sameopenfile(other, descriptor)]
        except (OSError, ValueError):  # no file, or one that is broken already
            continue
        aside = asides[found[0]] if found else _writer_to(descriptor)
        asides[descriptor] = aside
        raw = _AsideFile(descriptor, aside)
        told = io.TextIOWrapper(  # type: ignore[type-var]  # only its methods that write are used
            raw,
            encoding=stream.encoding,
            errors=stream.errors,
            line_buffering=True,
        )
        setattr(sys, name, told)
        streams.append(told)
    atexit.register(_finish, streams, list(asides.values()))


def _finish(streams: Sequence[TextIO], asides: Sequence[Aside[bytes]]) -> None:
    deadline = time.monotonic() + _LAST_S
    for stream in streams:
        with contextlib.suppress(ValueError):  # closed
            stream.flush()
    for aside in asides:
        aside.wait(max(0.0, deadline - time.monotonic()))


def _writer_to(descriptor: int) -> Aside[bytes]:
    def deliver(pieces: Sequence[bytes]) -> None:
        with contextlib.suppress(OSError):  # nobody can read it any more: it has no other place
            write_all(descriptor, b"".join(pieces))

    return Aside(deliver, _MOST_BYTES, _missing_line)


def _missing_line(count: int) -> bytes:
    return f"tensorwire: {count} messages are missing here: nobody read this output\n".encode()


class _AsideFile(io.BufferedIOBase):
    """The file to which `sys.stdout` or `sys.stderr` writes."""

    def __init__(self, descriptor: int, aside: Aside[bytes]) -> None:
        self._descriptor, self._aside = descriptor, aside

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._descriptor

    def isatty(self) -> bool:
        return os.isatty(self._descriptor)

    def write(self, data: ReadableBuffer, /) -> int:
        piece = bytes(data)
        self._aside.put(piece, len(piece))
        return len(piece)
