"""Calls users' callbacks in a thread of their own, so that no reading thread is held up."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence

from .. import logs
from ..payload.threads import THREADS

CallBack = Callable[[Sequence[Callable[[], object]]], None]
"""Calls callbacks elsewhere, one after the other, soon."""


class Callbacks:
    """A queue of callbacks, called in a thread that runs while there are any.

    Any thread may use it.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a handler of a signal may end a call in here
        self._waiting: deque[Callable[[], object]] = deque()
        self._running = False

    def call(self, callbacks: Sequence[Callable[[], object]]) -> None:
        """Queues callbacks, which are called one after the other, soon."""
        with self._lock:
            self._waiting.extend(callbacks)
            start, self._running = not self._running, True
        if start:
            THREADS.run(self._run)

    def _run(self) -> None:
        while True:
            with self._lock:
                self._running = bool(self._waiting)
                if not self._running:
                    return
                callback = self._waiting.popleft()
            try:
                call_all((callback,))
            except BaseException:  # sys.exit(): there are callbacks of other calls
                logs.OWN.exception("a callback of a call failed")
            del callback


def call_all(callbacks: Sequence[Callable[[], object]]) -> None:
    """Calls callbacks one after the other, and logs the errors that they raise."""
    for callback in callbacks:
        try:
            callback()
        except Exception:
            logs.OWN.exception("a callback of a call failed")
