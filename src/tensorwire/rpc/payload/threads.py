"""Runs work beside calls: in threads that may block, in their order, or at a time."""

from __future__ import annotations

import contextvars
import heapq
import itertools
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Protocol

from .. import logs

_KEEP_S = 2.0
_KEPT_DEADLINES = 1000


class Threads:
    """Threads for work that may block, each used again if there is more within two seconds."""

    def __init__(self) -> None:
        self.forked()

    def forked(self) -> None:
        """Resets the state; again in a forked child, where the threads do not run."""
        self._lock = threading.RLock()  # a handler of a signal may have work in here
        self._queue: SimpleQueue[Callable[[], object]] = SimpleQueue()
        self._idle = 0

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


class Alarm(Protocol):
    """An action that is due at a deadline."""

    def cancel(self) -> None:
        """Takes the action back."""


@dataclass(slots=True, eq=False)
class Deadline:
    """A deadline, until it has passed or is taken back.

    Attributes:
        action: runs then; None once it is taken back.
    """

    action: Callable[[], object] | None

    def cancel(self) -> None:
        """Takes the deadline back: its action does not run."""
        self.action = None


class Deadlines:
    """All deadlines of a process. Any thread may use it; the thread starts with the first one."""

    def __init__(self) -> None:
        self.forked()

    def forked(self) -> None:
        """Resets the state; again in a forked child, where the thread does not run."""
        self._changed = threading.Condition()
        self._heap: list[tuple[float, int, Deadline]] = []
        self._numbers = itertools.count()
        self._compact_at = _KEPT_DEADLINES
        self._started = False

    def add(self, at: float, action: Callable[[], object]) -> Deadline:
        """Schedules an action for a time of time.monotonic, in the thread: it must not block."""
        deadline = Deadline(action)
        with self._changed:
            heap = self._heap
            if len(heap) >= self._compact_at:  # most calls end long before their deadline
                heap = self._heap = [each for each in heap if each[2].action is not None]
                heapq.heapify(heap)
                self._compact_at = max(2 * len(heap), _KEPT_DEADLINES)
            heapq.heappush(heap, (at, next(self._numbers), deadline))
            if not self._started:
                self._started = True
                threading.Thread(
                    target=self._run, name="tensorwire-rpc-deadlines", daemon=True
                ).start()
            elif heap[0][2] is deadline:
                self._changed.notify()
        return deadline

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._heap or self._heap[0][0] > (now := time.monotonic()):
                    # A peer may name any deadline; no lock waits for more than TIMEOUT_MAX.
                    left_s = self._heap[0][0] - now if self._heap else threading.TIMEOUT_MAX
                    self._changed.wait(min(left_s, threading.TIMEOUT_MAX))
                action = heapq.heappop(self._heap)[2].action
            if action is not None:
                try:
                    action()
                except Exception:
                    logs.OWN.exception("what was to be done at a deadline failed")
            action = None  # a thread that waits must not keep what it holds


DEADLINES = Deadlines()
"""The deadlines of this process."""

os.register_at_fork(after_in_child=THREADS.forked)
os.register_at_fork(after_in_child=DEADLINES.forked)
