"""Gives memory back in one thread per process, where the noticing thread must not.

Events without a report (a message was dropped, a peer died) are looked for in turns, as long as an
object is watched. Work that may block is put into a queue.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Protocol

from .. import logs

_TURN_S = 0.05
_TURN_OF_ONE_S = 1e-4  # so that looking takes a few percent of a core, however many are watched


class Watched(Protocol):
    """An object that the janitor looks at every turn."""

    def look(self) -> bool:
        """Gives back memory that is no longer needed. False: there is nothing left to look for."""


class Janitor:
    """The thread, which starts when there is work and belongs to the process that started it."""

    def __init__(self) -> None:
        self._is_forked = False
        self._begin()

    def _begin(self) -> None:
        self._queue: SimpleQueue[Callable[[], object]] = SimpleQueue()
        self._watched: weakref.WeakSet[Watched] = weakref.WeakSet()
        self._lock = threading.RLock()  # a handler of a signal may come back in here
        self._started = False

    def forked(self) -> None:
        """Resets the state in a forked child, without the thread and the watched objects."""
        self._is_forked = True
        self._begin()

    def soon(self, work: Callable[[], object]) -> None:
        """Runs `work` in the thread; here, if the thread was never needed, as little is there then.

        In a forked child it waits until the thread is needed there: locks may be held for ever by
        threads that only the parent has.
        """
        if self._started or self._is_forked:
            self._queue.put(work)
        else:
            _attempt(work)

    def watch(self, watched: Watched) -> None:
        """Looks at an object every turn until its `look` returns False, or it is gone."""
        with self._lock:
            asleep = not self._watched
            self._watched.add(watched)
            start, self._started = not self._started, True
        if start:  # a finalizer may run in it, and come to here, before that returns
            try:
                threading.Thread(target=self._run, name="tensorwire-rpc", daemon=True).start()
            except BaseException:  # no thread is left, or this one is interrupted
                self._started = False
                raise
        if asleep:
            self._queue.put(_wake)

    def _run(self) -> None:
        last = time.monotonic()
        while True:
            count = len(self._watched)
            turn_s = max(_TURN_S, _TURN_OF_ONE_S * count)
            left_s = max(last + turn_s - time.monotonic(), 0.0)
            try:
                _attempt(self._queue.get(timeout=left_s if count else None))
                if left_s:
                    continue
            except Empty:
                pass
            self._look()
            last = time.monotonic()

    def _look(self) -> None:
        with self._lock:
            watched = list(self._watched)
        for each in watched:
            if not _attempt(each.look):
                with self._lock:
                    self._watched.discard(each)


def _wake() -> None:
    """Does nothing: as work in the queue, it wakes the thread, which checks how long to sleep."""


def _attempt(work: Callable[[], object]) -> object:
    try:
        return work()
    except BaseException:  # any error: there is other work
        logs.OWN.exception("giving memory back failed")
        return True


JANITOR = Janitor()
"""The janitor of this process."""

os.register_at_fork(after_in_child=JANITOR.forked)
