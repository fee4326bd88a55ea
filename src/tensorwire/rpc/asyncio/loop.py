"""Does in an event loop what blocks a thread: waiters, deadlines and callbacks, and sending.

All of it belongs to one event loop, and is used in its thread, unless it says otherwise.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

from ..payload import push
from ..payload.fields import may_have_tensors
from ..payload.outgoing import SentMessage
from ..payload.threads import THREADS, call_all
from ..runtime.flow import Waiter
from ..runtime.leaving import OfCall, leaving

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
        """Waits until `finish` was called."""
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


async def encode(
    call: OfCall, serializer: Callable[[Any], bytes], message: Any, *, last: bool
) -> tuple[bytes, SentMessage | None]:
    """Makes the bytes of a message, as `leaving` does, without waiting in the loop.

    The loop serializes. A thread sends ahead payload that travels over a network and may wait.

    Arrays are copied by the loop, whose other tasks may change them.

    Args:
        call: that the message leaves in.
        serializer: a `lenient` one.
        message: the user's.
        last: as for `SentMessage`.
    """
    if may_have_tensors(type(message)):
        return leaving(message, call, serializer, last=last)
    body = serializer(message)
    encode = partial(leaving, body, call, None, last=last)
    return await in_thread(encode) if _may_wait(call, len(body)) else encode()


def _may_wait(call: OfCall, size_bytes: int) -> bool:
    """Returns whether sending a message of this size may wait: for new memory, or for room.

    If not, the memory for it is taken already.
    """
    attachment = call.attachment
    if attachment.maps or size_bytes < attachment.runtime_threshold_bytes:
        return False
    if size_bytes > push.CHUNK_BYTES:
        return True
    if not attachment.may_send(size_bytes):
        return False
    link = call.link()
    link.lease = attachment.leases_there.take_idle(size_bytes, link.call)
    return link.lease is None


async def finish(message: SentMessage | None) -> None:
    """Copies the rest of a message whose bytes have been sent, in a thread."""
    if message is not None and message.staging is not None:
        await in_thread(message.finish)
