"""Runs quick calls of a client in one thread of the user's pool, which reads the next ones too.

The largest cost of a small call is to hand it from the thread that reads to another one, and to
wake both. So a thread of the pool that has answered goes on reading for a moment, and runs the
calls that have come by itself. Only methods whose servicers were quick lately run this way. If one
is slow after all, the thread that otherwise reads finds out within milliseconds, and everything
goes on without the thread that is held up.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from .flow import open_latch
from .line import LOOK_S, MOST_BACKLOG, Line

QUICK_S = 0.0005
"""A servicer that takes longer is not quick."""

_LINGER_S = 0.0005
_STUCK_S = 0.002
_HELD_S = 0.0002
_LONGEST_S = 0.1
_TRUSTED, _MOST_TRUST, _DISTRUST = 4, 12, 6
_MOST_METHODS = 1024  # a client may name any that a generic handler takes
_FRUITLESS, _TRY_EVERY = 4, 16


class Runner:
    """A scheduler for one client's line: chooses the thread that reads and the one that runs calls.

    Args:
        line: of the client.
        pool: the user's threads.

    Attributes:
        ready: functions for each call that a thread of the pool will run: one runs it, and raises
            nothing; one ends it, because the pool takes nothing any more.
    """

    def __init__(self, line: Line, pool: Any) -> None:
        self._line = line
        self._pool = pool
        # The queue of the pool shows if others wait for a thread; without one, it runs each call.
        queue = getattr(pool, "_work_queue", None)
        self._others: Callable[[], bool] | None = getattr(queue, "empty", None)
        if not isinstance(pool, ThreadPoolExecutor):
            self._others = None
        self._turn = threading.Lock()
        self.ready: deque[tuple[Callable[[], object], Callable[[Exception], object]]] = deque()
        self._trust: dict[str, int] = {}
        self._running = False
        self._stuck = False
        self._parked = threading.Lock()
        self._count = 0
        self._fruitless = 0

    def took(self, method: str, seconds: float) -> None:
        """Notes how many seconds a servicer of a method has run."""
        trust = self._trust.get(method, 0)
        if seconds > QUICK_S:
            if trust:
                self._trust[method] = max(trust - _DISTRUST, 0)
        elif trust < _MOST_TRUST and (trust or len(self._trust) < _MOST_METHODS):
            self._trust[method] = trust + 1

    def takes(self, method: str) -> bool:
        """Returns whether to add a call to `ready` instead of giving it to the pool.

        In the thread that reads.
        """
        if self._others is None or self._stuck:
            return False
        return self._trust.get(method, 0) >= _TRUSTED

    def serve(self) -> None:
        """Reads until the line is over, in a thread of its own."""
        line = self._line
        while not line.is_over:
            while self.ready and not line.is_over:
                self._start()
            with self._turn:
                line.read(None)
            while len(line.outbox) > MOST_BACKLOG and not line.is_over:
                time.sleep(LOOK_S)

    def _start(self) -> None:
        """Lets a thread of the pool run the calls that are ready, and waits until it leaves."""
        self._parked.acquire(blocking=False)
        self._running = True
        try:
            self._pool.submit(self._run)
        except RuntimeError as error:
            self._running = False
            while self.ready:
                self.ready.popleft()[1](error)
            return
        seen = -1
        while self._running and not self._line.is_over:
            if self._parked.acquire(timeout=_STUCK_S):
                continue
            before, seen = seen, self._count
            if before == seen and not self._turn.locked():
                self._go_on_without()

    def _go_on_without(self) -> None:
        """Reads while the thread that runs calls is held up by one, or has not begun."""
        self._stuck = True
        self._line.flush()  # perhaps the servicer waits for an answer to these frames
        try:
            while self._running and not self._line.is_over:
                self._hand_over()
                if not self._turn.acquire(blocking=False):
                    return  # it reads again
                try:
                    self._line.read(_STUCK_S)
                finally:
                    self._turn.release()
        finally:
            self._stuck = False

    def _hand_over(self) -> None:
        """Gives the calls that wait for the thread that is held up to the pool."""
        while True:
            try:
                run, gone = self.ready.popleft()
            except IndexError:
                return
            try:
                self._pool.submit(run)
            except RuntimeError as error:
                gone(error)

    def _run(self) -> None:
        """Runs the calls that are ready, and those right after, in a thread of the pool."""
        until = time.monotonic() + _LONGEST_S
        try:
            while True:
                self._run_ready()
                if not self._lingers(until) or not self._turn.acquire(blocking=False):
                    return
                try:
                    self._line.read(_LINGER_S)
                finally:
                    self._turn.release()
                if not self.ready:
                    self._fruitless += 1
                    return
                self._fruitless = 0
        finally:
            self._running = False
            open_latch(self._parked)

    def _run_ready(self) -> None:
        """Runs the calls that are ready, and writes their frames together.

        That wakes the client less often.
        """
        line = self._line
        line.hold()
        try:
            written = time.monotonic()
            while True:
                try:
                    run, _ = self.ready.popleft()
                except IndexError:
                    return
                self._count += 1
                run()
                if (now := time.monotonic()) > written + _HELD_S:
                    line.flush()
                    written = now
        finally:
            line.release()

    def _lingers(self, until: float) -> bool:
        """Returns whether to read on: calls come quickly, and no other work needs the thread."""
        line = self._line
        if line.is_over or self._others is None or not self._others():
            return False
        if len(line.outbox) > MOST_BACKLOG or time.monotonic() > until:
            return False
        if self._fruitless >= _FRUITLESS:
            self._fruitless += 1
            return self._fruitless % _TRY_EVERY == 0
        return True
