"""Calls users' callbacks in a thread of their own, so that no reading thread is held up."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Protocol

from .. import logs

_Queue = SimpleQueue[Sequence[Callable[[], object]] | None]


class Calling(Protocol):
    """What calls callbacks elsewhere."""

    def call(self, callbacks: Sequence[Callable[[], object]]) -> None:
        """Has them called one after the other, soon."""

    def stop(self) -> None:
        """Nothing is called any more that comes later."""


class Callbacks:
    """The thread, which starts with the first callback. Any thread may use it."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a handler of a signal may end a call in here
        self._queue: _Queue | None = None
        self._stopped = False

    def call(self, callbacks: Sequence[Callable[[], object]]) -> None:
        """Has them called one after the other, soon."""
        with self._lock:
            queue = self._queue
            if queue is None:
                queue = SimpleQueue()
                if not self._stopped:
                    self._queue = queue
                threading.Thread(
                    target=_run, args=(queue,), name="tensorwire-rpc-callbacks", daemon=True
                ).start()
            queue.put(callbacks)
            if self._queue is None:  # of a call that went on elsewhere: nobody ends the thread
                queue.put(None)

    def stop(self) -> None:
        """Ends the thread when it has called what it has been given."""
        with self._lock:
            self._stopped = True
            queue, self._queue = self._queue, None
        if queue is not None:
            queue.put(None)


def _run(queue: _Queue) -> None:
    while (callbacks := queue.get()) is not None:
        for each in callbacks:
            try:
                call_all((each,))
            except BaseException:  # sys.exit(): there are callbacks of other calls
                logs.OWN.exception("a callback of a call failed")
        del callbacks, each


def call_all(callbacks: Sequence[Callable[[], object]]) -> None:
    """Calls them one after the other, whatever they raise."""
    for callback in callbacks:
        try:
            callback()
        except Exception:
            logs.OWN.exception("a callback of a call failed")
