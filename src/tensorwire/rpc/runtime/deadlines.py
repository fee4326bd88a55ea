"""Runs the actions of deadlines that have passed, in one thread per process."""

from __future__ import annotations

import heapq
import itertools
import os
import threading
import time
from collections.abc import Callable
from typing import Protocol

from .. import logs

_KEPT = 1000


class Alarm(Protocol):
    """An action that is due at a deadline."""

    def cancel(self) -> None:
        """Takes the action back."""


class Deadline:
    """A deadline, until it has passed or is taken back.

    Attributes:
        action: runs then; None once it is taken back.
    """

    __slots__ = ("action",)

    def __init__(self, action: Callable[[], object]) -> None:
        self.action: Callable[[], object] | None = action

    def cancel(self) -> None:
        """Takes it back."""
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
        self._compact_at = _KEPT
        self._started = False

    def add(self, at: float, action: Callable[[], object]) -> Deadline:
        """Schedules an action for a time of time.monotonic, in the thread: it must not block."""
        deadline = Deadline(action)
        with self._changed:
            heap = self._heap
            if len(heap) >= self._compact_at:  # most calls end long before their deadline
                heap = self._heap = [each for each in heap if each[2].action is not None]
                heapq.heapify(heap)
                self._compact_at = max(2 * len(heap), _KEPT)
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

os.register_at_fork(after_in_child=DEADLINES.forked)
