"""asyncio client side of a line; decides which calls use the runtime and which grpcio.

Its calls have the interface of `grpc.aio`. Everything happens in the client's event loop: frames
arrive there, and so do deadlines. Callers get a call of `calls.py`, which stands for one of these.
"""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import AsyncIterator, Callable, Generator
from functools import partial
from typing import Any

import grpc
import grpc.aio

from .. import logs
from ..payload.attachment import RpcAttachment
from ..payload.incoming import may_wait
from ..payload.outgoing import CallLink, SentMessage
from ..runtime.carry import NOT_SERIALIZED, AnyMethod, RequestSender
from ..runtime.client import AnyClient
from ..runtime.engine import CallState, Ending, StreamState
from ..runtime.frames import EndBody
from ..runtime.leaving import lenient
from .loop import (
    LoopWaiter,
    alarm,
    call_back_in,
    each_of,
    encode,
    finish,
    in_loop,
    in_thread,
    taken,
    wait_each,
)

_Code = grpc.StatusCode
_BOTH = "a call is read by `read` or by iterating, not by both"

METHOD: contextvars.ContextVar[AioMethod | None] = contextvars.ContextVar(
    "tensorwire.rpc.method", default=None
)
"""The method that is called: grpcio's interceptors are told its name and not its serializers."""


class AioCall(LoopWaiter, CallState):
    """A call with one response. It is carried out also where its caller forgets it."""

    unparsed = None  # as in `grpc.aio`

    def __init__(self, *given: Any) -> None:
        CallState.__init__(self, *given)
        self._head = LoopWaiter()
        self._requests: RequestSender | None = None
        self._serializer: Any = None
        self._task: asyncio.Task[None] | None = None
        self._done_writing_flag = False  # grpcio's intercepted calls look at it
        self._turn: asyncio.Lock | None = None

    def link(self) -> CallLink:
        return super().link().never_blocks()

    def head(self, initial: Any) -> None:
        super().head(initial)
        self._head.finish()

    def finish(self) -> None:
        super().finish()
        self._head.finish()

    def _make_soon(self, body: EndBody, *, large: bool) -> None:
        if large and may_wait(self._pieces[0]):  # others have their turn while it is read
            self._task = self._client.loop.create_task(self._make_later(body))
        else:
            self._make(body)

    async def _make_later(self, body: EndBody) -> None:
        self._conclude_with(body, await self._received(b"".join(self._pieces)))

    async def _received(self, data: bytes) -> Any:
        """Returns the same as `_message_of`, without blocking the event loop."""
        if may_wait(data):
            return await in_thread(partial(self._message_of, data))
        return self._message_of(data)

    def _conclude(self, ending: Ending) -> None:
        super()._conclude(ending)
        if ending.cancelled and self._task is not None:
            self._task.cancel()

    async def settled(self) -> bool:
        """Waits until it has ended; False: grpcio has to make it. Ends the call if cancelled."""
        try:
            await self.wait()
        except asyncio.CancelledError:
            self.cancel()
            raise
        return self.done()

    def __await__(self) -> Generator[Any, None, Any]:
        yield from self.settled().__await__()
        self._raise_for_status()
        return self._ending.response

    # grpc.aio.Call

    def cancel(self) -> bool:
        if threading.get_ident() == self._client.thread:
            return super().cancel()
        in_loop(self._client.loop, self.cancel)  # a collector's
        return not self.done()

    def cancelled(self) -> bool:
        return self._ending.code is _Code.CANCELLED

    def add_done_callback(self, callback: Callable[[Any], object]) -> None:
        if self._callbacks is None:
            callback(self)
        else:
            self._callbacks.append(partial(callback, self))  # type: ignore[arg-type]

    async def initial_metadata(self) -> grpc.aio.Metadata:
        await self._head.wait()
        return grpc.aio.Metadata(*(self._initial or ()))

    async def trailing_metadata(self) -> grpc.aio.Metadata:
        await self.wait()
        return grpc.aio.Metadata(*self._ending.trailing)

    async def code(self) -> Any:
        await self.wait()
        return self._ending.code

    async def details(self) -> str:
        await self.wait()
        return self._ending.details

    async def debug_error_string(self) -> str:
        """Returns the status once more as text, as grpcio's objects do."""
        await self.wait()
        return self._error_string()

    async def wait_for_connection(self) -> None:
        if self.done():
            self._raise_for_status()

    def _raise_for_status(self) -> None:
        code, details, _, trailing, _, cancelled = self._ending
        if cancelled:
            raise asyncio.CancelledError
        if code is not _Code.OK:
            metadata = [grpc.aio.Metadata(*each) for each in (self._initial or (), trailing)]
            raise grpc.aio.AioRpcError(
                code or _Code.UNKNOWN, *metadata, details, self._error_string()
            )

    # Requests that are a stream.

    def finish_sending(self, message: SentMessage) -> None:
        """Copies the rest of the only request, whose bytes have been sent, in a thread."""
        if message.staging is not None:
            self._task = self._client.loop.create_task(finish(message))

    def send_by(self, requests: RequestSender, serializer: Any, iterable: Any) -> None:
        """Sends requests, which are written or come from an iterable, synchronous or not.

        Args:
            requests: sends them.
            serializer: of one, see `encode`.
            iterable: of the user's; None: they will be written.
        """
        self._requests, self._serializer = requests, serializer
        if iterable is None:
            self._turn = asyncio.Lock()  # of tasks that write: pieces of two would be one message
        else:
            self._task = self._client.loop.create_task(self._send_all(iterable))

    async def _send_all(self, iterable: Any) -> None:
        try:
            async for request in each_of(iterable):
                if not await self._send(request):
                    return
        except BaseException:
            # As in grpcio: any error of a user's iterator cancels the call.
            logs.OWN.debug("requests could not be sent", exc_info=True)
            self.cancel()
            return
        self._end_requests()

    async def _send(self, request: Any) -> bool:
        """Sends a request; False if the call is over."""
        requests = self._requests
        if self.done() or requests is None:
            return False
        data, message = await encode(self, self._serializer, request, last=True)
        await wait_each(requests.send(data, LoopWaiter))
        await finish(message)
        sent = not self.done()
        await asyncio.sleep(0)  # others have their turn, however much there is to send
        return sent

    def _end_requests(self) -> None:
        self._done_writing_flag = True
        if self._requests is not None:
            self._requests.send_last()

    def _writing(self) -> asyncio.Lock:
        if self._turn is None:
            raise grpc.aio.UsageError("the requests of this call come from an iterable")
        return self._turn

    async def write(self, request: Any) -> None:
        turn = self._writing()
        if self.done():
            raise asyncio.InvalidStateError("RPC already finished.")
        if self._done_writing_flag:
            raise asyncio.InvalidStateError("RPC is half closed: done_writing was called")
        try:
            async with turn:
                sent = await self._send(request)
        except asyncio.CancelledError:
            self.cancel()
            raise
        if not sent:
            self._raise_for_status()

    async def done_writing(self) -> None:
        turn = self._writing()
        if not self.done() and not self._done_writing_flag:
            self._done_writing_flag = True
            try:
                async with turn:
                    self._end_requests()
            except asyncio.CancelledError:
                self.cancel()  # as in `grpc.aio`; the server would wait for the end
                raise


class AioStream(StreamState, AioCall):
    """A call with a stream of responses."""

    _iterator: AsyncIterator[Any] | None = None
    _reads = False

    def __aiter__(self) -> AsyncIterator[Any]:
        if self._reads:
            raise grpc.aio.UsageError(_BOTH)
        if self._iterator is None:
            self._iterator = self._iterate()
        return self._iterator

    async def _iterate(self) -> AsyncIterator[Any]:
        while (message := await self._next()) is not grpc.aio.EOF:
            yield message
        self._raise_for_status()

    async def read(self) -> Any:
        message: Any = grpc.aio.EOF
        if not self.done():
            if self._iterator is not None:
                raise grpc.aio.UsageError(_BOTH)
            self._reads = True
            message = await self._next()
        if message is grpc.aio.EOF:
            self._raise_for_status()
        return message

    async def _next(self) -> Any:
        try:
            data = await taken(self._inflow.take)
            if data is None:
                await self.wait()
                return grpc.aio.EOF
            response = await self._received(data)
        except asyncio.CancelledError:
            self.cancel()
            raise
        return response if self._settle(response) else grpc.aio.EOF


class AioClient(AnyClient):
    """The client's end of a line; all but `__init__`, `over` and `close` runs in its event loop.

    Attributes:
        loop, thread: of the first call.

    Args: as of `AnyClient`.
    """

    patient = False
    loop: asyncio.AbstractEventLoop
    thread: int
    _reading: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begins to read, in the running event loop."""
        if self._reading is None:
            self.loop, self.thread = asyncio.get_running_loop(), threading.get_ident()
            self.call_back = partial(call_back_in, self.loop)
            # Not in the context of that call, which has its method, and the channel.
            apart = contextvars.Context()
            self._reading = apart.run(self.loop.create_task, self.line.serve())

    def over(self, reason: str) -> None:
        """See `LineEnd`. Any thread."""
        if self._reading is not None:
            in_loop(self.loop, partial(self._end_all, self._reading, reason))

    def _end_all(self, reading: asyncio.Task[None], reason: str) -> None:
        super().over(reason)
        reading.cancel()


class AioMethod(AnyMethod[AioCall]):
    """A method of an asyncio channel.

    Args: as of `AnyMethod`.
    """

    kinds = AioCall, AioStream

    def __init__(self, arity: str, serializer: Any, *given: Any) -> None:
        super().__init__(arity, lenient(serializer), *given)

    async def begin(self, attachment: RpcAttachment | None, details: Any, request: Any) -> Any:
        """Begins a call; None: grpcio has to make it, and nothing has been sent.

        Args:
            attachment: of the channel, None if there is none.
            details: `grpc.aio.ClientCallDetails`.
            request: the user's, or an iterable of them; None: they will be written.

        Raises:
            Exception: the error of the serializer of the only request.
        """
        if attachment is None or details.credentials is not None:
            return None
        method = details.method if isinstance(details.method, str) else details.method.decode()
        began = self._new(attachment, method, details.timeout, details.metadata)
        if began is None:
            return None
        client, call, entries = began
        client.start()
        call.set_alarm(partial(alarm, client.loop))
        if not self._takes_stream:
            client.keep(call)
        data: bytes | None = None
        outgoing: SentMessage | None = None
        if not self._sends_stream:
            try:
                data, outgoing = await encode(call, self._serializer, request, last=False)
            except asyncio.CancelledError:
                call.cancel()
                raise
            except Exception:
                logs.COMMON.exception("Exception serializing message!")
                call.conclude(NOT_SERIALIZED)
                raise
            if call.done():  # its time has passed, or the server gone
                return call
            if outgoing is not None:
                call.link().tickets = outgoing.tickets
        client.begin(call, method.encode(), entries, data)
        if outgoing is not None:
            call.finish_sending(outgoing)
        if self._sends_stream:
            call.send_by(RequestSender(client, call), self._serializer, request)
        return call
