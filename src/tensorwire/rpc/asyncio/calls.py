"""asyncio: call objects that callers have before their calls have begun.

A call may wait for its channel's attachment, and a request may have to be sent again. Callers get a
call of `grpc.aio` nevertheless, at once: it stands for the one that is made in a task. It ends a
moment after its deadline, also where grpcio does not end the one that was made: see
`threads/calls.py`.
"""

from __future__ import annotations

import asyncio
import time
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Generator
from functools import partialmethod
from typing import Any

import grpc
import grpc.aio

from ..runtime.engine import LOCALLY, TIME_IS_OVER, call_weakly
from ..runtime.served import ARITIES
from ..threads.calls import GRACE_S


class LaterCall:
    """The common part of the four kinds of calls.

    Args:
        beginning: makes the call that this one stands for, in a task, and fails where none can be
            made. Cancelled, it leaves none. Or a future that has the call already.
        timeout: of the call, in seconds; None for none.
    """

    _late: grpc.aio.AioRpcError | None = None
    _alarm: asyncio.TimerHandle | None = None
    _release_at = 0.0
    _cancelled_early = False

    def __init__(
        self, beginning: Coroutine[Any, Any, Any] | asyncio.Future[Any], timeout: float | None
    ) -> None:
        self._loop = loop = asyncio.get_running_loop()
        self._until = None if timeout is None else time.monotonic() + timeout
        if timeout is not None:
            self._release_at = loop.time() + max(timeout, 0.0) + GRACE_S
        self._task: asyncio.Future[Any]
        if isinstance(beginning, asyncio.Future):
            self._task = beginning
        else:
            # It goes on where this is forgotten, as in `grpc.aio`: the made call knows when to end.
            self._task = loop.create_task(beginning)
            self._task.add_done_callback(_look_at)
        self._iterator: AsyncIterator[Any] | None = None
        self._callbacks: list[Callable[[Any], object]] = []

    @property
    def _made(self) -> Any:
        """The call, None if there is none, or none yet."""
        task = self._task
        if not task.done() or task.cancelled() or task.exception() is not None:
            return None
        return task.result()

    async def _begun(self) -> Any:
        """Waits for the call; None: it was cancelled before. Raises the error of the task."""
        if not self._task.done() and not self._cancelled_early:
            await asyncio.wait((self._task,))
        if self._cancelled_early or self._task.cancelled():
            return None
        return self._task.result()

    async def _needed(self) -> Any:
        """Waits for the call like `_begun`, and cancels the call if this task is cancelled."""
        try:
            call = await self._begun()
        except asyncio.CancelledError:
            if not self._is_overdue():
                self.cancel()
            raise
        if call is None:
            raise asyncio.CancelledError
        return call

    def _is_overdue(self) -> bool:
        """Returns whether its deadline was so long ago that grpcio is not waited for any more."""
        return self._until is not None and self._loop.time() >= self._release_at

    async def _in_time(self, begin: Callable[[], Awaitable[Any]]) -> Any:
        """Awaits the result of `begin`, but not for longer than the call may take.

        Raises:
            AioRpcError: the deadline has passed.
        """
        if self._until is None:
            return await begin()
        if self._late is not None:
            raise self._late
        limit = asyncio.timeout_at(self._release_at)
        try:
            async with limit:
                return await begin()
        except TimeoutError:
            if not limit.expired():
                raise
            raise self._end_late() from None
        except asyncio.CancelledError:
            task = asyncio.current_task()
            late: grpc.aio.AioRpcError | None = self._late
            if late is None or (task is not None and task.cancelling()):
                raise
            raise late from None  # another task has noticed it first

    def _end_late(self) -> grpc.aio.AioRpcError:
        """Ends the call as one whose deadline has passed; later news from grpcio is ignored."""
        if self._late is None:
            self._late = late_error()
            if (call := self._made) is not None:
                call.cancel()
            elif not self._task.done():
                self._task.cancel()
                self._task.add_done_callback(_cancel_made)
            for each in list(self._callbacks):
                self._call_back(each)
        return self._late

    def _call_back(self, callback: Callable[[Any], object]) -> None:
        """Calls a callback, if it was not called yet."""
        if callback in self._callbacks:
            self._callbacks.remove(callback)
            if self._alarm is not None and not self._callbacks:
                self._alarm.cancel()
                self._alarm = None
            callback(self)

    def cancel(self) -> bool:
        """See `grpc.aio.RpcContext`."""
        if self.done():
            return False
        if self._task.done():
            return bool(self._made.cancel())
        self._cancelled_early = True
        self._task.cancel()
        self._task.add_done_callback(_cancel_made)
        return True

    def cancelled(self) -> bool:
        """See `grpc.aio.RpcContext`."""
        if self._late is not None:
            return False
        if self._cancelled_early or self._task.cancelled():
            return True
        call = self._made
        return call is not None and bool(call.cancelled())

    def done(self) -> bool:
        """See `grpc.aio.RpcContext`."""
        if self._cancelled_early or self._late is not None:
            return True
        call = self._made
        if self._task.done() and (call is None or bool(call.done())):
            return True
        overdue = self._is_overdue()
        if overdue:
            self._end_late()
        return overdue

    def time_remaining(self) -> float | None:
        """See `grpc.aio.RpcContext`."""
        return None if self._until is None else max(self._until - time.monotonic(), 0.0)

    def add_done_callback(self, callback: Callable[[Any], object]) -> None:
        """See `grpc.aio.RpcContext`."""
        if self.done():
            callback(self)
            return
        self._callbacks.append(callback)
        if self._until is not None and self._alarm is None:
            known = weakref.WeakMethod(self.done)  # which ends the call if it is overdue
            self._alarm = self._loop.call_at(self._release_at, call_weakly, known)
        self._call_back_later(callback)

    def _call_back_later(self, callback: Callable[[Any], object]) -> None:
        """Calls it when the call that is made has ended, or none was made."""
        if self.done():
            self._call_back(callback)
        elif (call := self._made) is not None:
            call.add_done_callback(lambda _: self._call_back(callback))
        else:
            self._task.add_done_callback(lambda _: self._call_back_later(callback))

    async def _ask(self, name: str, without: Any) -> Any:
        """Returns a result of the call's method of this name; `without`, if there is no call."""

        async def ask() -> Any:
            call = await self._begun()
            return without if call is None else await getattr(call, name)()

        try:
            return await self._in_time(ask)
        except grpc.aio.AioRpcError as error:  # its deadline has passed
            return getattr(error, name)()

    async def initial_metadata(self) -> Any:
        """See `grpc.aio.Call`."""
        return await self._ask("initial_metadata", grpc.aio.Metadata())

    async def trailing_metadata(self) -> Any:
        """See `grpc.aio.Call`."""
        return await self._ask("trailing_metadata", grpc.aio.Metadata())

    # See `grpc.aio.Call`; the last one returns the status once more as text.
    code: Any = partialmethod(_ask, "code", grpc.StatusCode.CANCELLED)
    details: Any = partialmethod(_ask, "details", LOCALLY)
    debug_error_string: Any = partialmethod(_ask, "debug_error_string", "")

    async def _done(self, name: str, *given: Any) -> Any:
        """Awaits the result of a method of the call."""

        async def do() -> Any:
            call = await self._needed()
            return await getattr(call, name)(*given)

        return await self._in_time(do)

    async def wait_for_connection(self) -> None:
        """See `grpc.aio.Call`."""
        await self._done("wait_for_connection")

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self._made or self._task}>"


def ended_by(code: grpc.StatusCode, details: str, more: str | None = None) -> grpc.aio.AioRpcError:
    """Returns the error of a call that ends here.

    One takes the place of a response whose payload is gone: grpcio gives None if a deserializer
    raises.

    Args:
        code: of the call.
        details: of the call.
        more: for `debug_error_string`.
    """
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details, more)


def late_error() -> grpc.aio.AioRpcError:
    """Returns the error of a call whose deadline has passed."""
    code = grpc.StatusCode.DEADLINE_EXCEEDED
    return ended_by(code, TIME_IS_OVER, f"tensorwire: {TIME_IS_OVER}")


def _look_at(task: asyncio.Future[Any]) -> None:
    """Reads the error of a task: users of the call get it, and asyncio would log an unread one."""
    if not task.cancelled():
        task.exception()


def _cancel_made(task: asyncio.Future[Any]) -> None:
    """Ends a call that was made in the moment in which its making was cancelled."""
    if not task.cancelled() and task.exception() is None:
        task.result().cancel()


class _LaterResponse(LaterCall):
    def __await__(self) -> Generator[Any, None, Any]:
        return (yield from self._in_time(self._response).__await__())

    async def _response(self) -> Any:
        return await (await self._needed())


class _LaterResponses(LaterCall):
    def __aiter__(self) -> AsyncIterator[Any]:
        if self._iterator is None:
            self._iterator = self._iterate()
        return self._iterator

    async def _iterate(self) -> AsyncIterator[Any]:
        responses = (await self._in_time(self._needed)).__aiter__()
        while True:
            try:
                response = await self._in_time(responses.__anext__)
            except StopAsyncIteration:
                return
            yield self._readable(response)

    async def read(self) -> Any:
        """See `grpc.aio.UnaryStreamCall`."""
        return self._readable(await self._done("read"))

    def _readable(self, response: Any) -> Any:
        """Returns a response; ends the call with an error if its payload is gone."""
        if isinstance(response, grpc.aio.AioRpcError):
            self.cancel()
            raise response
        return response


class _LaterRequests(LaterCall):
    """The part of a call to which requests are written."""

    @property
    def _done_writing_flag(self) -> bool:
        # grpcio's intercepted calls look at it, in calls that they get of interceptors.
        return self._made is not None and bool(self._made._done_writing_flag)

    async def write(self, request: Any) -> None:
        """See `grpc.aio.StreamUnaryCall`."""
        if self._made is None and self.done():
            raise asyncio.InvalidStateError("RPC already finished.")
        await self._done("write", request)

    async def done_writing(self) -> None:
        """See `grpc.aio.StreamUnaryCall`."""
        if self._made is not None or not self.done():
            await self._done("done_writing")


def of_grpcio(arity: str, what: str) -> Any:
    """Returns the class of `grpc.aio` for an arity and a role, such as "Call"."""
    return getattr(grpc.aio, arity.title().replace("_", "") + what)


def _later(arity: str) -> type[LaterCall]:
    """Makes the class of calls of an arity, which is one of `grpc.aio` for that."""
    requests = (_LaterRequests,) if arity.startswith("stream") else ()
    response = _LaterResponses if arity.endswith("stream") else _LaterResponse
    theirs = of_grpcio(arity, "Call")
    return type(f"Later{theirs.__name__}", (response, *requests, theirs), {})


LATER = {arity: _later(arity) for arity in ARITIES.values()}


class WrittenCall:
    """A call of grpcio whose requests are written, each in the place of the user's.

    Args:
        call: of grpcio.
        exchange: makes the object to write from a request of the user's.
    """

    def __init__(self, call: Any, exchange: Callable[[Any], Coroutine[Any, Any, Any]]) -> None:
        self._call = call
        self._exchange = exchange

    def __getattr__(self, name: str) -> Any:
        return getattr(self._call, name)

    def __await__(self) -> Generator[Any, None, Any]:
        return (yield from self._call.__await__())

    def __aiter__(self) -> AsyncIterator[Any]:
        iterator: AsyncIterator[Any] = self._call.__aiter__()
        return iterator

    async def write(self, request: Any) -> None:
        """See `grpc.aio.StreamUnaryCall`."""
        if not self._call.done():
            request = await self._exchange(request)
        await self._call.write(request)
