"""Prepares memory for the next snapshot: most of a copy's time goes into fresh pages."""

from __future__ import annotations

import mmap
import os
import threading
import time
from collections.abc import Callable

from tensorwire.memory import memory_file

from .room import check_room

KEEP_S = 20.0
"""Seconds that spare memory waits for the next snapshot before it is given back."""
_CHUNK_BYTES = 2 << 20
_REST = 3.0  # after each chunk, as a multiple of its time: the job computes meanwhile


class SpareMemory:
    """A memfd whose pages are made by a thread, little by little. Any thread.

    There is less of it, or none, where the system has no room for twice as much or gives no more.

    Args:
        size_bytes: of it, rounded up to whole pages.
        spend: is told the seconds of each chunk.
        keep_s: how long it waits to be taken.

    Raises:
        BusyError, MemoryError, UnavailableError: see `memory_file`.
    """

    def __init__(
        self, size_bytes: int, spend: Callable[[float], None], keep_s: float = KEEP_S
    ) -> None:
        self.size_bytes = whole_pages(size_bytes)
        self._spend, self._keep_s = spend, keep_s
        self._lock, self._ended = threading.Lock(), threading.Event()
        self._descriptor = memory_file("tensorwire snapshot", self.size_bytes)
        self._thread = threading.Thread(target=self._run, name="tensorwire-spare", daemon=True)
        self._thread.start()

    def take(self) -> int | None:
        """Returns its descriptor with the pages made so far, which the caller closes; or None.

        Nothing was ever written to it.
        """
        self._ended.set()
        with self._lock:
            found, self._descriptor = self._descriptor, -1
        return None if found < 0 else found

    def close(self) -> None:
        """Gives it back. Idempotent."""
        if (found := self.take()) is not None:
            os.close(found)

    def wait(self, timeout_s: float) -> bool:
        """Waits until it is taken or given back; tells whether it is."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            check_room(2 * self.size_bytes)
            for start in range(0, self.size_bytes, _CHUNK_BYTES):
                began = time.monotonic()
                with self._lock:
                    if self._descriptor < 0:
                        return
                    size = min(_CHUNK_BYTES, self.size_bytes - start)
                    os.posix_fallocate(self._descriptor, start, size)
                took = time.monotonic() - began
                self._spend(took)
                self._ended.wait(_REST * took)
            self._ended.wait(self._keep_s)
        except (MemoryError, OSError):
            pass  # a snapshot then finds out whether there is memory for it
        finally:
            self.close()


def whole_pages(size_bytes: int) -> int:
    """Returns the size of the whole pages that hold this number of bytes."""
    return -(-size_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
