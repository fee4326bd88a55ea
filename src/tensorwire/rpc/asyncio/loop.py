"""Waits in an event loop instead of a thread: waiters, deadlines and callbacks of calls.

All of it belongs to one event loop, and is used in its thread, unless it says otherwise.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from ..runtime.callbacks import call_all
from ..runtime.flow import Waiter

_AWAITED: set[LoopWaiter] = set()
"""Those that a task waits for. A task that nothing leads to is collected, with all it has."""


class LoopWaiter(Waiter):
    """Something that tasks wait for."""

    def __init__(self) -> None:
        super().__init__()
        self._futures: list[asyncio.Future[None]] = []

    def finish(self) -> None:
        """Wakes all who wait for it."""
        self.finished = True
        futures, self._futures = self._futures, []
        for future in futures:
            if not future.done():
                future.set_result(None)

    async def wait(self) -> None:
        """Waits until it has come about."""
        if self.finished:
            return
        future = asyncio.get_running_loop().create_future()
        self._futures.append(future)
        _AWAITED.add(self)
        try:
            await future
        finally:
            self._futures = [each for each in self._futures if each is not future]
            if not self._futures:
                _AWAITED.discard(self)


class LoopDeadline:
    """As a `Deadline`, of an event loop."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, left_s: float, action: Callable[[], object]
    ) -> None:
        self._handle = loop.call_later(max(left_s, 0.0), action)

    @property
    def action(self) -> Callable[[], object] | None:
        """None takes it back."""
        return None

    @action.setter
    def action(self, action: Callable[[], object] | None) -> None:
        self._handle.cancel()


class LoopCallbacks:
    """As `Callbacks`: has what users want to be called called by the event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop

    def call(self, callbacks: Sequence[Callable[[], object]]) -> None:
        """Has them called one after the other, soon. Any thread."""
        in_loop(self._loop, lambda: call_all(callbacks))

    def stop(self) -> None:
        """Nothing is to be stopped."""


def in_loop(loop: asyncio.AbstractEventLoop, work: Callable[[], object]) -> None:
    """Has it done by a loop, unless that is closed. Any thread."""
    try:
        loop.call_soon_threadsafe(work)
    except RuntimeError:
        pass  # closed: nobody waits any more
