"""Runs the servicer of a call at an asyncio server, asynchronous or not, of any arity.

The order of things, what they raise and what it is called are those of `grpc.aio`.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Iterator
from functools import partial
from typing import Any

import grpc
import grpc.aio

from .. import logs
from ..payload.attachment import RpcAttachment
from ..payload.inbox import RefusedError
from ..payload.incoming import Reader, find_only
from ..payload.outgoing import CallLink, SentMessage, at_once
from ..payload.tensors import Holding, drop
from ..runtime import observed
from ..runtime.behavior import finish, refuse_payload
from ..runtime.context import Caller
from ..runtime.flow import Waiter
from ..runtime.served import IncomingCall, behavior_of
from .loop import LoopWaiter
from .runtime_context import AioContext, SyncContext

_Code = grpc.StatusCode
_OVER = object()


class _EndedError(Exception):
    """The call has ended while it was carried out, and everybody was told."""


class AioPerformance:
    """One call and its servicer, in the event loop.

    Args:
        attachment: of the line.
        caller: the client.
        call: what came.
        handler: the user's.
        pool: threads for servicers that are not asynchronous, None for the loop's own.
        traced: what counts messages, None if nobody does.
        most_bytes: of a response; negative for no limit.

    Attributes:
        context: for the servicer.
        answered: it has a response.
    """

    def __init__(
        self,
        attachment: RpcAttachment,
        caller: Caller,
        call: IncomingCall,
        handler: Any,
        pool: Any,
        traced: Any,
        most_bytes: int,
    ) -> None:
        self._find = partial(find_only, attachment)
        self._call = call
        self._handler = handler
        self._pool = pool
        self._traced = traced
        self._most_bytes = most_bytes
        self._reader = Reader(handler.request_deserializer)
        self._link = CallLink(attachment, call.number, at_once, call.is_active)
        self._link.patience_s = 0.0  # of the event loop
        self._link.offers = self._link.in_loop = True
        self._turn = asyncio.Lock()
        self._rest: asyncio.Task[None] | None = None
        self.context = AioContext(caller, call, self)
        self.answered = False

    async def run(self) -> None:
        """Runs the servicer and ends the call, whatever comes of it."""
        try:
            await self._run()
            if self.context.abort_error is not None:
                logs.AIO_SERVER.error(
                    "Abort error unexpectedly suppressed: %s", self.context.abort_error
                )
        except (_EndedError, grpc.aio.AbortError):
            pass
        except asyncio.CancelledError:
            logs.OWN.debug("a call of %s was cancelled", self._call.method)
            raise
        except Exception as error:
            if self._call.is_active():
                logs.AIO_SERVER.exception(
                    "Unexpected [%s] raised by servicer method [%s]",
                    type(error).__name__, self._call.method,
                )  # fmt: skip
                self.finish(_Code.UNKNOWN, f"Unexpected {type(error)}: {error}")
        finally:
            try:
                for callback in self.context.callbacks:
                    callback()
            except Exception:  # the others are not called, as in grpcio
                logs.AIO_SERVER.exception("Error in callback for method [%s]", self._call.method)

    async def _run(self) -> None:
        handler, call = self._handler, self._call
        behavior = behavior_of(handler)
        holdings: list[Holding] = []
        request: Any
        if not handler.request_streaming:
            request = await self._deserialize(call.only_request(), holdings)
        elif call.requests is None:
            request = self._single()
        else:
            request = _ContextRequests(self.context)
        asynchronous = (
            inspect.isawaitable(behavior)
            or inspect.iscoroutinefunction(behavior)
            or inspect.isasyncgenfunction(behavior)
        )
        if handler.request_streaming and not asynchronous:
            request = _in_thread(request, asyncio.get_running_loop())
        if handler.response_streaming:
            call.stream_responses()
            await self._stream(behavior, request)
            return
        if asynchronous:
            response = await behavior(request, self.context)
        else:
            context = SyncContext(self.context, asyncio.get_running_loop())
            response = await self._in_pool(behavior, request, context)
            for callback in context.callbacks:
                callback()
        had = [request]
        del request
        drop(had, holdings, response)
        self.context.check()
        if self.context.code() not in (None, _Code.OK):
            self.finish(_Code.OK, "")
            return
        data, message = await self._serialize(response)
        if call.takes_stream:  # and gives credits
            call.stream_responses()
            await self._send(call.lots(data, LoopWaiter), message)
            self.finish(_Code.OK, "")
        else:
            self.finish(_Code.OK, "", data)
        self.answered = True
        await message.finish_later()

    async def _stream(self, behavior: Any, request: Any) -> None:
        if inspect.iscoroutinefunction(behavior):
            await behavior(request, self.context)
        else:
            if inspect.isasyncgenfunction(behavior):
                responses = behavior(request, self.context)
            else:
                context = SyncContext(self.context, asyncio.get_running_loop())
                responses = self._from_thread(behavior(request, context))
            async for response in responses:
                await self.context.write(response)
        if self._rest is not None:
            async with self._turn:
                await self._finish_rest()
        self.context.check()
        self.finish(_Code.OK, "")
        self.answered = True

    async def _in_pool(self, work: Any, *given: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._pool, work, *given)

    async def _from_thread(self, responses: Any) -> AsyncIterator[Any]:
        responses = iter(responses)
        while (response := await self._in_pool(next, responses, _OVER)) is not _OVER:
            yield response

    async def _single(self) -> AsyncIterator[Any]:
        yield await self._deserialize(self._call.only_request())

    async def _deserialize(self, data: bytes | None, holdings: list[Holding] | None = None) -> Any:
        if data is None:
            raise _EndedError
        try:
            return await self._reader.read_later(
                data, self._find, holdings, needed=self._call.is_active, traced=self._traced
            )
        except RefusedError as error:
            refuse_payload(self._call, error)
            raise _EndedError from None

    async def _serialize(self, response: Any) -> tuple[bytes, SentMessage]:
        """The bytes of a response, and what is to `finish_later` when they have been sent."""
        message = SentMessage(response, self._link, last=True)
        serializer = self._handler.response_serializer
        data = await observed.serialize_later(self._traced, message, serializer, text=True)
        if 0 <= self._most_bytes < len(data):
            text = f"SERVER: Sent message larger than max ({len(data)} vs. {self._most_bytes})"
            self.finish(_Code.RESOURCE_EXHAUSTED, text)
            raise _EndedError
        return data, message

    async def read(self) -> Any:
        """See `Messages`."""
        if self._call.requests is None:
            raise grpc.aio.UsageError("the only request of this call is given to the servicer")
        taken = self._call.request(LoopWaiter)
        while isinstance(taken, LoopWaiter):
            await taken.wait()
            taken = self._call.request(LoopWaiter)
        if not isinstance(taken, bytes):
            return grpc.aio.EOF
        try:
            return await self._deserialize(taken)
        finally:
            self._call.settle()

    async def write(self, response: Any) -> None:
        """See `Messages`.

        Of messages that several tasks write, one leaves after the other. One whose task is
        cancelled while it leaves is sent to its end, as by `grpc.aio`: the client would take what
        comes next for the rest of it.
        """
        async with self._turn:
            await self._finish_rest()
            data, message = await self._serialize(response)
            lots = self._call.lots(data, LoopWaiter)
            try:
                await self._send(lots, message)
            except asyncio.CancelledError:
                self._rest = asyncio.get_running_loop().create_task(self._send(lots, message))
                raise
        await asyncio.sleep(0)  # others have their turn, however much there is to send

    async def _finish_rest(self) -> None:
        """Waits until a message whose task was cancelled has left."""
        if self._rest is not None:
            await asyncio.wait((self._rest,))
            rest, self._rest = self._rest, None
            rest.result()

    async def _send(self, lots: Iterator[list[bytes] | Waiter], message: SentMessage) -> None:
        for lot in lots:
            if not isinstance(lot, list):
                assert isinstance(lot, LoopWaiter)
                await lot.wait()
            elif not self._call.send_frames(lot):
                return
        await message.finish_later()

    def finish(self, code: grpc.StatusCode, details: str, message: bytes | None = None) -> None:
        """Ends the call as its servicer has said, or else with a status."""
        number, text = self.context.status(code, details)
        finish(self._call, number, text, self.context.trailing_metadata(), message)


class _ContextRequests:
    """The requests of a stream, for an asynchronous servicer."""

    def __init__(self, context: AioContext) -> None:
        self._context = context

    def __aiter__(self) -> _ContextRequests:
        return self

    async def __anext__(self) -> Any:
        message = await self._context.read()
        if message is grpc.aio.EOF:
            raise StopAsyncIteration
        return message


def _in_thread(requests: Any, loop: asyncio.AbstractEventLoop) -> Iterator[Any]:
    """The requests of a stream, for a servicer in a thread."""

    async def following() -> Any:
        try:
            return await requests.__anext__()
        except StopAsyncIteration:
            return _OVER

    while True:
        request = asyncio.run_coroutine_threadsafe(following(), loop).result()
        if request is _OVER:
            return
        yield request
