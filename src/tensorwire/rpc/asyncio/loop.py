"""Waits in an event loop instead of a thread: waiters, deadlines and callbacks of calls.

All of it belongs to one event loop, and is used in its thread, unless it says otherwise.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from ..payload.threads import THREADS
from ..runtime.callbacks import call_all
from ..runtime.flow import Waiter

_Given = TypeVar("_Given")
_AWAITED: set[LoopWaiter] = set()
"""The waiters that tasks wait for. Else a task that nothing refers to would be collected."""


class LoopWaiter(Waiter):
    """A waiter that tasks wait for."""

    _futures: Sequence[asyncio.Future[None]] = ()

    def finish(self) -> None:
        """Wakes all tasks that wait for it."""
        self.finished = True
        futures, self._futures = self._futures, ()
        for future in futures:
            if not future.done():
                future.set_result(None)

    async def wait(self) -> None:
        """Waits until it has come about."""
        if self.finished:
            return
        future = asyncio.get_running_loop().create_future()
        self._futures = *self._futures, future
        _AWAITED.add(self)
        try:
            await future
        finally:
            self._futures = tuple(each for each in self._futures if each is not future)
            if not self._futures:
                _AWAITED.discard(self)


async def taken(take: Callable[[Callable[[], Waiter]], bytes | Waiter | None]) -> bytes | None:
    """Waits for the next message of a stream; None after the last one. See `Inflow.take`."""
    while isinstance(found := take(LoopWaiter), LoopWaiter):
        await found.wait()
    assert not isinstance(found, Waiter)
    return found


async def each_of(iterable: Any) -> AsyncIterator[Any]:
    """Iterates over an iterable of asyncio, or a plain one."""
    if hasattr(iterable, "__aiter__"):
        async for each in iterable:
            yield each
    else:
        for each in iterable:
            yield each


async def wait_each(waiters: Any) -> None:
    """Waits for one `LoopWaiter` after the other, while the generator of them goes on."""
    for each in waiters:
        await each.wait()


def alarm(
    loop: asyncio.AbstractEventLoop, at: float, action: Callable[[], object]
) -> asyncio.TimerHandle:
    """Schedules an action of a loop for a time of time.monotonic; see `Deadlines.add`."""
    return loop.call_later(max(at - time.monotonic(), 0.0), action)


def call_back_in(
    loop: asyncio.AbstractEventLoop, callbacks: Sequence[Callable[[], object]]
) -> None:
    """Schedules callbacks in a loop, which calls them one after the other, soon. Any thread."""
    in_loop(loop, lambda: call_all(callbacks))


def in_loop(loop: asyncio.AbstractEventLoop, work: Callable[[], object]) -> None:
    """Schedules work in a loop, unless the loop is closed. Any thread."""
    try:
        loop.call_soon_threadsafe(work)
    except RuntimeError:
        pass  # closed: no task waits any more


async def in_thread(work: Callable[[], _Given]) -> _Given:
    """Runs work that may wait long in a thread of its own, and returns its result."""
    done: Future[_Given] = Future()

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as error:
            done.set_exception(error)

    THREADS.run(run)
    return await asyncio.shield(asyncio.wrap_future(done))
