"""Brings the output of a job's processes to the terminal, line by line.

Bytes come out of the processes' pipes (`Stream`), are cut into lines (`Lines`) and wait for the
terminal, file or program that reads our own output (`Output`). Nothing here blocks: a terminal that
is held with Ctrl-S must not keep the launcher from ending the job. The output is bytes, never text,
so it needs not be valid UTF-8.
"""

from __future__ import annotations

import contextlib
import os
import select
import threading
from collections.abc import Sequence
from typing import Protocol

from tensorwire.aside import Aside, write_all

# More waiting than this, and no more is read: the processes then wait in their own writes.
_MOST_PENDING = 1 << 20
# A longer line is cut, so that a process that never ends one does not fill our memory.
LONGEST_LINE = 1 << 20
_READ_SIZE = 1 << 16
_RESET_COLOUR = b"\x1b[0m"
LONGEST_ADDRESS = 4096


class Output:
    """Our stdout or stderr (or both, if they are the same file); a thread of its own writes.

    A descriptor that polls as writable may block all the same: a terminal that nobody reads does,
    and a pipe that others fill too.

    Attributes:
        descriptor: of the file.
        lost: why nobody can read it any more, None while it works. What comes then is dropped: a
            training run does not end because its `| head` did.
    """

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self.lost: OSError | None = None
        self._writer: Aside[bytes] | None = None
        self._written = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._closed, self._lock = False, threading.Lock()
        try:
            os.fstat(descriptor)
        except OSError as error:
            self.lost = error

    @property
    def pending(self) -> bool:
        """True if something is not written yet."""
        return self._writer is not None and self._writer.waiting > 0

    @property
    def full(self) -> bool:
        """True if too many bytes wait, so that the sources should wait too."""
        return self._writer is not None and self._writer.waiting >= _MOST_PENDING

    def add(self, data: bytes) -> None:
        """Takes bytes, to be written after those taken before; none are left out."""
        if self.lost is None:
            if self._writer is None:
                self._writer = Aside(self._write, delivered=self._note_written)
            self._writer.put(data, len(data))

    def register(self, poll: select.poll) -> None:
        """Registers the descriptor that is ready when output was written since `note_ready`."""
        poll.register(self._written, select.POLLIN)

    def note_ready(self) -> None:
        """Resets the mark that the output is ready; later output sets it again."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._written)

    def close(self) -> None:
        """Ends the thread once all is written, and does not wait for that. Idempotent."""
        if self._writer is not None:
            self._writer.close()
        with self._lock:
            if not self._closed:
                self._closed = True
                os.close(self._written)

    def _write(self, pieces: Sequence[bytes]) -> None:
        try:
            if self.lost is None:
                write_all(self.descriptor, b"".join(pieces))
        except OSError as error:
            self.lost = error

    def _note_written(self) -> None:
        with self._lock:
            if not self._closed:
                os.eventfd_write(self._written, 1)


class Consumer(Protocol):
    """A taker of the bytes of a `Stream`."""

    @property
    def full(self) -> bool:
        """True if the stream should not be read now."""

    def feed(self, data: bytes) -> None:
        """Takes the next bytes, never none."""

    def close(self) -> None:
        """Ends the input; called after the last bytes."""


class Lines:
    """The lines of one stream of a process, which go to an output as soon as they are whole.

    With a prefix the lines are a log: of text that was overwritten with carriage returns, as
    progress bars do, the last state is shown, once the line ends. Without one the bytes stay as
    they are, except that lines longer than `LONGEST_LINE` are cut and the last line gets an end.

    Args:
        output: for the lines.
        prefix: in front of each, such as "[worker 0] "; may be empty.
        colour: number of an ANSI colour for the prefix, None for no colour.

    Attributes:
        output: as given.
    """

    def __init__(self, output: Output, prefix: str, colour: int | None) -> None:
        self.output = output
        self._rest = bytearray()  # the line that has not ended
        self.rename(prefix, colour)

    @property
    def full(self) -> bool:
        """True if the output is full."""
        return self.output.full

    def feed(self, data: bytes) -> None:
        """Takes the next bytes of the stream."""
        ended, newline, rest = data.rpartition(b"\n")
        if newline:
            self._rest += ended
            for line in self._rest.split(b"\n"):
                self._emit(line)
            self._rest.clear()
        self._rest += rest
        if self._prefix and b"\r" in rest:
            # The last \r stays: it may be half of the end of the line.
            end = b"\r" if self._rest.endswith(b"\r") else b""
            self._rest[:] = _visible(self._rest) + end
        while len(self._rest) > LONGEST_LINE:
            self._emit(self._rest[:LONGEST_LINE])
            del self._rest[:LONGEST_LINE]

    def rename(self, prefix: str, colour: int | None) -> None:
        """Changes the prefix of later lines: the process has become another one."""
        self._colour = colour is not None
        self._prefix = prefix.encode()
        if prefix and colour is not None:
            self._prefix = b"\x1b[%dm%s%s" % (colour, self._prefix, _RESET_COLOUR)

    def close(self) -> None:
        """Emits the last line if it had no end."""
        if self._rest:
            self._emit(self._rest)
            self._rest.clear()

    def _emit(self, line: bytearray) -> None:
        shown = _visible(line) if self._prefix else bytes(line)
        # A line may leave a colour on, which is not for the next process.
        reset = _RESET_COLOUR if self._colour and b"\x1b" in shown else b""
        self.output.add(self._prefix + shown + reset + b"\n")


def _visible(line: bytearray) -> bytes:
    """Returns the visible text of a line: the last part between carriage returns that has some."""
    return next((bytes(part) for part in reversed(line.split(b"\r")) if part), b"")


class FirstLine:
    """A process's message for the launcher alone: one line, of at most `longest` bytes.

    Attributes:
        text: what came so far.
        complete: whether there is a line, or more than one can be.
        closed: whether no more comes.
    """

    full = False

    def __init__(self, longest: int) -> None:
        self.text = bytearray()
        self.complete = False
        self.closed = False
        self._longest = longest

    def feed(self, data: bytes) -> None:
        """Takes the next bytes."""
        if not self.complete:
            self.text += data
            self.complete = b"\n" in self.text or len(self.text) > self._longest

    def close(self) -> None:
        """Ends the input; called after the last bytes."""
        self.closed = True


def address_in(told: FirstLine) -> str | None:
    """Returns "host:port" from the line of a server that listens; None from any other line."""
    line, newline, _ = bytes(told.text).partition(b"\n")
    host, colon, port = line.decode("ascii", "replace").rpartition(":")
    good = newline and host and colon and port.isdecimal() and host.isascii()
    return f"{host}:{port}" if good and not {",", " "} & set(host) else None


class Stream:
    """The reading end of a pipe from a process. Owns the descriptor.

    Attributes:
        descriptor: ready for reading when `read` has something; closed at the end of the stream.
        closed: whether the stream has ended.
        consumer: takes what is read.
    """

    def __init__(self, descriptor: int, consumer: Consumer) -> None:
        os.set_blocking(descriptor, False)
        self.descriptor = descriptor
        self.closed = False
        self.consumer = consumer

    @property
    def full(self) -> bool:
        """True if it should not be read now."""
        return self.consumer.full

    def read(self) -> int:
        """Reads a piece if there is one and returns its length."""
        try:
            data = os.read(self.descriptor, _READ_SIZE)
        except BlockingIOError:
            return 0
        if data:
            self.consumer.feed(data)
        else:
            self.close()
        return len(data)

    def finish(self) -> None:
        """Reads the present bytes and closes, also if another process keeps the pipe open."""
        left = _MOST_PENDING  # more than a pipe holds; one that writes for ever is not followed
        while left > 0 and not self.closed and (count := self.read()):
            left -= count
        self.close()

    def close(self) -> None:
        """Gives the last bytes on and the descriptor back; may be called again."""
        if not self.closed:
            self.closed = True
            with contextlib.suppress(OSError):
                os.close(self.descriptor)
            self.consumer.close()
