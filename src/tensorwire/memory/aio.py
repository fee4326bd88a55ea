"""Waits for words and transfers without blocking an asyncio event loop.

One descriptor per Node and event loop is watched by the loop; the core rings it at completions and
doorbells while somebody here waits. asyncio is imported at the first wait, not before.

The order is always: arm, look at the condition, sleep. The core changes the condition first and
then looks at whether somebody is armed, so no wake-up is lost.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from sys import modules
from typing import TYPE_CHECKING

from tensorwire._core import Node, Notifier, Transfer, exiting
from tensorwire.errors import TimeoutError

from .arguments import seconds

if TYPE_CHECKING:
    import asyncio


class _Bell:
    """The descriptor that wakes one event loop for one Node, and the loop's waiting futures.

    The loop alone owns it, through its registered reader: it goes away when the loop is closed or
    its Node is. All methods run in the loop's thread.
    """

    __slots__ = ("__weakref__", "_notifier", "_waiters", "loop")

    def __init__(self, source: Node | Transfer, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._notifier = Notifier(source)
        self._waiters: dict[asyncio.Future[None], Callable[[], bool]] = {}
        loop.add_reader(self._notifier.fileno(), self._ring)

    async def wait(self, ready: Callable[[], bool], timeout_s: float | None) -> bool:
        """Returns True when ready() is, False after the timeout. Cancelling ends the wait only."""
        future = self.loop.create_future()
        self._notifier.arm()
        self._waiters[future] = ready
        timer = None
        try:
            if ready():
                return True
            if timeout_s is not None:
                timer = self.loop.call_later(timeout_s, _wake, future)
            await future
            return ready()
        finally:
            if timer is not None:
                timer.cancel()
            self._waiters.pop(future, None)
            if not self._waiters:
                self._notifier.disarm()

    def _ring(self) -> None:
        self._notifier.drain()
        if exiting():
            return  # the loop of a daemon thread: nothing of it is to end before the process does
        for future, ready in self._waiters.items():
            if ready():
                _wake(future)

    def close(self) -> None:
        """Wakes all waiters and gives the descriptor back, once the Node is closed."""
        for future in self._waiters:
            _wake(future)
        self.loop.remove_reader(self._notifier.fileno())


def _wake(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


# (Node.progress_id, id of the loop). Weak: the loops own the bells. A bell keeps both numbers from
# being used again.
_bells: weakref.WeakValueDictionary[tuple[int, int], _Bell] = weakref.WeakValueDictionary()


def _bell(source: Node | Transfer) -> _Bell:
    import asyncio

    loop = asyncio.get_running_loop()
    key = source.progress_id, id(loop)
    bell = _bells.get(key)
    if bell is None:
        bell = _bells[key] = _Bell(source, loop)
    return bell


def release(node: Node) -> None:
    """Gives back the descriptors of a Node that was closed. Any thread may call it."""
    if exiting():
        return  # with the process; see _ring
    for reference in _bells.valuerefs():  # a copy: other threads begin to wait meanwhile
        bell = reference()
        if bell is not None and reference.key[0] == node.progress_id:
            try:
                bell.loop.call_soon_threadsafe(bell.close)
            except RuntimeError:
                pass  # the loop is closed, and the bell with it


def silence_loop() -> None:
    """Silences the event loop of a daemon thread that ends because the interpreter does.

    The loop would report that nobody took the exception that ends its tasks.
    """
    asyncio = modules.get("asyncio")
    if asyncio is not None and (loop := asyncio._get_running_loop()) is not None:
        loop.set_exception_handler(lambda loop, context: None)


async def wait_until(
    source: Node | Transfer, ready: Callable[[], bool], timeout_s: float | None
) -> bool:
    """Waits in the running event loop until ready() is true or the timeout has passed.

    Args:
        source: the Node whose completions and doorbells may make it true, or a transfer of it.
        ready: cheap and without side effects; called in the loop's thread, must not raise, and must
            be true once the Node is closed.
        timeout_s: None waits for ever.

    Returns:
        What ready() said last.
    """
    if timeout_s is not None:
        timeout_s = seconds(timeout_s, "timeout_s")
    if ready():
        return True
    return await _bell(source).wait(ready, timeout_s)


async def wait_transfer(transfer: Transfer, timeout_s: float | None = None) -> None:
    """Waits for a transfer in the running event loop; `await transfer` does this without timeout.

    Cancelling the task stops the waiting. The transfer goes on and keeps its buffers.

    Raises:
        TimeoutError: `timeout_s` has passed; the transfer goes on and can be awaited again.
        ClosedError, PeerLostError, StaleHandleError, ...: the transfer failed, as from
            `Transfer.wait`.
    """
    if not await wait_until(transfer, transfer.done, timeout_s):
        raise TimeoutError(
            f"the transfer of {transfer.bytes} bytes was not complete after {timeout_s:g} s; "
            "it goes on"
        )
    transfer.wait(0)
