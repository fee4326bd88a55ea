"""asyncio: call objects that callers have before their calls have begun.

A call may wait for its channel's attachment, and a request may have to be sent again. What callers
get is a call of `grpc.aio` nevertheless, at once: it stands for the one that is made in a task.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Generator
from typing import Any

import grpc
import grpc.aio

LOCALLY = "Locally cancelled by application!"


class Unreadable:
    """In the place of a response whose payload is gone: grpcio gives None if a deserializer raises.

    Args:
        error: says why.
    """

    def __init__(self, error: Exception) -> None:
        self._error = error

    def as_error(self) -> grpc.aio.AioRpcError:
        """What the user gets."""
        none = grpc.aio.Metadata()
        text = f"the payload of a response is gone: {self._error}"
        return grpc.aio.AioRpcError(grpc.StatusCode.INTERNAL, none, none, text)


class LaterCall:
    """What the four kinds of calls have in common.

    Args:
        beginning: makes the call that this one stands for, in a task, and fails where none can be
            made. Cancelled, it leaves none.
        timeout: of the call, in seconds; None for none.
    """

    def __init__(self, beginning: Coroutine[Any, Any, Any], timeout: float | None) -> None:
        self._until = None if timeout is None else time.monotonic() + timeout
        self._cancelled_early = False
        # It goes on where this is forgotten, as in `grpc.aio`: what it makes knows when to end.
        self._task: asyncio.Task[Any] = asyncio.get_running_loop().create_task(beginning)
        self._task.add_done_callback(_look_at)
        self._iterator: AsyncIterator[Any] | None = None

    @property
    def _made(self) -> Any:
        """The call, None if there is none, or none yet."""
        task = self._task
        if not task.done() or task.cancelled() or task.exception() is not None:
            return None
        return task.result()

    async def _begun(self) -> Any:
        """The call, when there is one; None: it was cancelled before. Raises what the task did."""
        if not self._task.done() and not self._cancelled_early:
            await asyncio.wait((self._task,))
        if self._cancelled_early or self._task.cancelled():
            return None
        return self._task.result()

    async def _needed(self) -> Any:
        """As `_begun`, for whoever ends the call when he is cancelled, or needs the call."""
        try:
            call = await self._begun()
        except asyncio.CancelledError:
            self.cancel()
            raise
        if call is None:
            raise asyncio.CancelledError
        return call

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
        if self._cancelled_early or self._task.cancelled():
            return True
        call = self._made
        return call is not None and bool(call.cancelled())

    def done(self) -> bool:
        """See `grpc.aio.RpcContext`."""
        if self._cancelled_early:
            return True
        if not self._task.done():
            return False
        call = self._made
        return call is None or bool(call.done())

    def time_remaining(self) -> float | None:
        """See `grpc.aio.RpcContext`."""
        return None if self._until is None else max(self._until - time.monotonic(), 0.0)

    def add_done_callback(self, callback: Callable[[Any], object]) -> None:
        """See `grpc.aio.RpcContext`."""
        if self.done():
            callback(self)
        elif (call := self._made) is not None:
            call.add_done_callback(lambda _: callback(self))
        else:
            self._task.add_done_callback(lambda _: self.add_done_callback(callback))

    async def initial_metadata(self) -> Any:
        """See `grpc.aio.Call`."""
        call = await self._begun()
        return grpc.aio.Metadata() if call is None else await call.initial_metadata()

    async def trailing_metadata(self) -> Any:
        """See `grpc.aio.Call`."""
        call = await self._begun()
        return grpc.aio.Metadata() if call is None else await call.trailing_metadata()

    async def code(self) -> Any:
        """See `grpc.aio.Call`."""
        call = await self._begun()
        return grpc.StatusCode.CANCELLED if call is None else await call.code()

    async def details(self) -> Any:
        """See `grpc.aio.Call`."""
        call = await self._begun()
        return LOCALLY if call is None else await call.details()

    async def debug_error_string(self) -> Any:
        """What grpcio's objects have too."""
        call = await self._begun()
        return "" if call is None else await call.debug_error_string()

    async def wait_for_connection(self) -> None:
        """See `grpc.aio.Call`."""
        call = await self._needed()
        await call.wait_for_connection()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self._made or self._task}>"


def _look_at(task: asyncio.Task[Any]) -> None:
    """Its error is for whoever asks the call; asyncio would log it where nobody does."""
    if not task.cancelled():
        task.exception()


def _cancel_made(task: asyncio.Task[Any]) -> None:
    """Ends a call that was made in the moment in which its making was cancelled."""
    if not task.cancelled() and task.exception() is None:
        task.result().cancel()


class _LaterResponse(LaterCall):
    def __await__(self) -> Generator[Any, None, Any]:
        call = yield from self._needed().__await__()
        return (yield from call.__await__())


class _LaterResponses(LaterCall):
    def __aiter__(self) -> AsyncIterator[Any]:
        if self._iterator is None:
            self._iterator = self._iterate()
        return self._iterator

    async def _iterate(self) -> AsyncIterator[Any]:
        call = await self._needed()
        async for response in call:
            yield self._readable(response)

    async def read(self) -> Any:
        """See `grpc.aio.UnaryStreamCall`."""
        call = await self._needed()
        return self._readable(await call.read())

    def _readable(self, response: Any) -> Any:
        """A response; the call ends with an error if its payload is gone."""
        if isinstance(response, Unreadable):
            self.cancel()
            raise response.as_error()
        return response


class _LaterRequests(LaterCall):
    """Its task makes a call that may be written to."""

    @property
    def _done_writing_flag(self) -> bool:
        # What grpcio's intercepted calls look at, in calls that they get of interceptors.
        return self._made is not None and bool(self._made._done_writing_flag)

    async def write(self, request: Any) -> None:
        """See `grpc.aio.StreamUnaryCall`."""
        if self._made is None and self.done():
            raise asyncio.InvalidStateError("RPC already finished.")
        call = await self._needed()
        await call.write(request)

    async def done_writing(self) -> None:
        """See `grpc.aio.StreamUnaryCall`."""
        if self._made is not None or not self.done():
            call = await self._needed()
            await call.done_writing()


class LaterUnaryUnary(_LaterResponse, grpc.aio.UnaryUnaryCall):
    """See `grpc.aio.UnaryUnaryCall`."""


class LaterUnaryStream(_LaterResponses, grpc.aio.UnaryStreamCall):
    """See `grpc.aio.UnaryStreamCall`."""


class LaterStreamUnary(_LaterResponse, _LaterRequests, grpc.aio.StreamUnaryCall):
    """See `grpc.aio.StreamUnaryCall`."""


class LaterStreamStream(_LaterResponses, _LaterRequests, grpc.aio.StreamStreamCall):
    """See `grpc.aio.StreamStreamCall`."""


LATER: dict[str, type[LaterCall]] = {
    "unary_unary": LaterUnaryUnary,
    "unary_stream": LaterUnaryStream,
    "stream_unary": LaterStreamUnary,
    "stream_stream": LaterStreamStream,
}


class WrittenCall:
    """A call of grpcio whose requests are written, each in the place of the user's.

    Args:
        call: of grpcio.
        exchange: makes what is written of a request of the user's.
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
