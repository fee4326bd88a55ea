"""Runs the work of calls that may block in threads of this process."""

from __future__ import annotations

import contextvars
import os
import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue

from .. import logs

_KEEP_S = 2.0


class Threads:
    """Threads for work that may block, each used again if there is more within two seconds."""

    def __init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        self._lock = threading.RLock()  # a handler of a signal may have work in here
        self._queue: SimpleQueue[Callable[[], object]] = SimpleQueue()
        self._idle = 0

    def forked(self) -> None:
        """Resets the state in a forked child, where the threads do not run."""
        self._begin()

    def run(self, work: Callable[[], object]) -> None:
        """Runs work in a thread of its own."""
        with self._lock:
            if self._idle:
                self._idle -= 1
                self._queue.put(work)
                return
        threading.Thread(
            target=self._run, args=([work],), name="tensorwire-rpc-work", daemon=True
        ).start()

    def _run(self, first: list[Callable[[], object]]) -> None:
        queue = self._queue
        # Its Thread keeps its arguments as long as it goes on, and with them messages of a call.
        work: Callable[[], object] | None = first.pop()
        while work is not None:
            try:
                contextvars.Context().run(work)
            except Exception:
                logs.OWN.exception("work of a call failed")
            work = None
            with self._lock:
                self._idle += 1
            try:
                work = queue.get(timeout=_KEEP_S)
            except Empty:
                with self._lock:
                    if self._idle:  # no work counts on this one
                        self._idle -= 1
                        return
                work = queue.get()


THREADS = Threads()
"""The threads of this process."""

os.register_at_fork(after_in_child=THREADS.forked)
