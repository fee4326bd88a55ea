"""Gives memory back in one thread per process, where the noticing thread must not.

What nobody reports (a message that was dropped, a peer that died) is looked for in turns, as long
as somebody has asked for that. What may block is put into a queue.
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
_TURN_OF_ONE_S = 1e-4  # so that looking takes a few percent of a core, however much there is


class Watched(Protocol):
    """What the janitor looks at every turn."""

    def look(self) -> bool:
        """Gives back what is no longer needed. False: there is nothing to look for any more."""


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
        """In a forked child, where the thread is not, and nothing of what it cared for."""
        self._is_forked = True
        self._begin()

    def soon(self, work: Callable[[], object]) -> None:
        """Has `work` done by the thread; here, if it was never needed, as then little is there.

        In a forked child nobody does it until the thread is needed there: locks may be held for
        ever by threads that only the parent has.
        """
        if self._started or self._is_forked:
            self._queue.put(work)
        else:
            _attempt(work)

    def watch(self, watched: Watched) -> None:
        """Looks at it every turn until it says no, or is gone."""
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
    """What is put into the queue of a thread that is to look at once how long it may sleep."""


def _attempt(work: Callable[[], object]) -> object:
    try:
        return work()
    except BaseException:  # whatever it is, there is other work
        logs.OWN.exception("giving memory back failed")
        return True


JANITOR = Janitor()
"""The one of this process."""

os.register_at_fork(after_in_child=JANITOR.forked)
