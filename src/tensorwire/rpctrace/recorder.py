"""Counts in a mapped file of each process, so that a process that is killed loses nothing.

The standard library only: it runs in the traced processes, and knows nothing of grpcio. A process
has `NAME.keys`, a line of JSON for each row, and `NAME.rows`, the rows: a distribution each.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import mmap
import os
import sys
import threading
import time

BUCKETS = 48
"""The buckets of a row: bucket k counts values of k bits, from 2^(k-1) to below 2^k."""
COUNT, TOTAL, MOST, LEFT, ENCODED, NS = range(6)
HEAD = 8
WORDS = HEAD + 2 * BUCKETS
"""The 8-byte words of a row: the head; then for each bucket a count and a sum."""
ROWS = 1024
"""The rows of a file; row 0 counts the calls and messages for which no row was left."""

_SETTLE_S = 0.1  # a program that has calls under way may end this much later

Key = tuple[str, ...]
"""("calls", side, arity, method, code); ("messages", side, arity, method, direction, protocol);
("unknown", module, error) of grpcio."""


class Recorder:
    """The rows of this process. Any thread may use it; a forked child gets rows of its own.

    Args:
        folder: of the files. If none can be made there, a line on stderr says that nothing of this
            process is counted, unless the folder is gone: then the trace is over.
    """

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._keys: dict[Key, int] = {("lost",): 0}
        self._words: memoryview | None = None
        self._key_file = -1
        self._running = 0
        self._lock = threading.RLock()  # also entered by a __del__ in the middle of `add`
        os.register_at_fork(after_in_child=self._forked)
        atexit.register(self._settle)

    def row(self, key: Key) -> int:
        """Returns the row of a key; 0 when there is none left."""
        with self._lock:
            found = self._keys.get(key)
            if found is None:
                if len(self._keys) == ROWS:
                    return 0
                found = self._keys[key] = len(self._keys)
                if self._words is not None:
                    self._tell(key)
            return found

    def add(self, row: int, value: int, left: int = 0, encoded: int = 0, ns: int = 0) -> None:
        """Adds a value to a row, and to the sums of its head."""
        at = row * WORDS
        bucket = min(value.bit_length(), BUCKETS - 1)
        with self._lock:
            words = self._words
            if words is None:
                words = self._words = self._open()
            words[at] += 1
            words[at + TOTAL] += value
            if value > words[at + MOST]:
                words[at + MOST] = value
            words[at + LEFT] += left
            words[at + ENCODED] += encoded
            words[at + NS] += ns
            words[at + HEAD + bucket] += 1
            words[at + HEAD + BUCKETS + bucket] += value

    def begin_call(self) -> None:
        """Counts a call as under way, until `end_call`."""
        with self._lock:
            self._running += 1

    def end_call(self) -> None:
        """Counts a call as over."""
        with self._lock:
            self._running -= 1

    def _settle(self) -> None:
        """Waits until other threads of grpcio have counted the calls that have ended."""
        until = time.monotonic() + _SETTLE_S
        while self._running > 0 and time.monotonic() < until:
            time.sleep(0.001)

    def _open(self) -> memoryview:
        size = ROWS * WORDS * 8
        name = os.path.join(self._folder, f"{os.getpid()}-{time.monotonic_ns()}")
        flags = os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC
        try:
            self._key_file = os.open(name + ".keys", flags | os.O_APPEND, 0o600)
            for key in self._keys:
                self._tell(key)
            rows = os.open(name + ".rows", flags, 0o600)
            try:
                os.posix_fallocate(rows, 0, size)  # a full disk is an error here, no SIGBUS later
                return memoryview(mmap.mmap(rows, size)).cast("q")
            finally:
                os.close(rows)
        except OSError as error:
            if os.path.isdir(self._folder):
                text = f"tensorwire rpc trace: process {os.getpid()} is not counted: {error}\n"
                with contextlib.suppress(OSError, ValueError, AttributeError):  # no stderr
                    sys.stderr.write(text)
            return memoryview(bytearray(size)).cast("q")

    def _tell(self, key: Key) -> None:
        with contextlib.suppress(OSError):
            os.write(self._key_file, json.dumps(key).encode() + b"\n")

    def _forked(self) -> None:
        self._lock = threading.RLock()
        self._running = 0  # those of the parent are not ours
        self._words = None
        if self._key_file >= 0:
            os.close(self._key_file)
            self._key_file = -1
