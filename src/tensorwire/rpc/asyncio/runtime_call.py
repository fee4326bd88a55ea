"""Implements calls of an asyncio client on a line with the interface of `grpc.aio`.

Everything happens in the client's event loop: frames arrive there, and so do deadlines.
"""

from __future__ import annotations

import asyncio
import threading
import time
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Generator, Sequence
from functools import partial
from typing import Any, Protocol

import grpc
import grpc.aio

from .. import logs
from ..payload.envelope import is_awaited
from ..payload.inbox import RefusedError
from ..payload.outgoing import CallLink, SentMessage
from ..runtime import observed
from ..runtime.call import call_weakly
from ..runtime.flow import Inflow, Outflow, TooLongError
from ..runtime.frames import (
    CANCEL,
    MORE,
    REFUSED,
    WHOLE,
    EndBody,
    Frame,
    FrameError,
    Metadata,
    Number,
    credit_frame,
    last_frame,
    message_frames,
    parse_end,
    short_frame,
)
from ..runtime.options import MessageLimits
from ..runtime.outcome import NoResponse, failure_of, status_of
from .loop import LoopDeadline, LoopWaiter, in_loop

_Code = grpc.StatusCode
_LOCALLY = "Locally cancelled by application!"


Receive = Callable[[bytes, Callable[[], bool]], Awaitable[Any]]


class AioClientEnd(Protocol):
    """What calls need of their client.

    Attributes:
        loop: its event loop.
        thread: the identity of the thread that runs it.
        limits: of messages.
    """

    loop: asyncio.AbstractEventLoop
    thread: int
    limits: MessageLimits

    def send(self, frames: Sequence[bytes]) -> None:
        """Sends frames; nobody waits for it."""

    def forget(self, call: AioCall) -> None:
        """A call has ended."""


class AioCall:
    """What the four kinds of calls have in common.

    Args:
        client: whose call it is.
        number: of the call.
        deadline: of time.monotonic, None if it has none.
        receive: makes a response of bytes, and is asked whether it is needed while it waits.
        ended: told once how the call has ended; None: it was not carried out.
        outflow: of its requests, if they are a stream.

    Attributes:
        number, deadline, outflow: as given.
        refused: it has ended because the server refuses to carry it out here.
        is_kept: it is carried out where its caller forgets it; else it is cancelled then.
    """

    is_kept = False

    def __init__(
        self,
        client: AioClientEnd,
        number: Number,
        deadline: float | None,
        receive: Receive,
        ended: Callable[[grpc.StatusCode | None], None],
        outflow: Outflow | None,
    ) -> None:
        self.number = number
        self.outflow = outflow
        self.refused = False
        self._client = client
        self.deadline = deadline
        self._receive = receive
        self._ended: Callable[[grpc.StatusCode | None], None] | None = ended
        self._initial: Metadata | None = None
        self._trailing: Metadata = ()
        self._code: grpc.StatusCode | None = None
        self._details = ""
        self._cancelled_here = False
        self._over = LoopWaiter()
        self._head = LoopWaiter()
        self._callbacks: list[Callable[[], object]] = []
        self._sender: asyncio.Task[None] | None = None
        self._done_writing_flag = False  # grpcio's intercepted calls look at it
        self._alarm: LoopDeadline | None = None
        if deadline is not None:
            left = deadline - time.monotonic()
            late = weakref.WeakMethod(self.deadline_passed)  # a forgotten call is cancelled
            self._alarm = LoopDeadline(client.loop, left, partial(call_weakly, late))

    def __del__(self) -> None:
        # Perhaps in another thread, with any lock.
        if not (self.done() or self.refused):
            in_loop(self._client.loop, self.cancel)

    # What arrives.

    def head(self, initial: Metadata) -> None:
        """Initial metadata came ahead."""
        if self._initial is None:
            self._initial = initial
            self._head.finish()

    def message(self, frame: Frame) -> None:
        """A piece of a response came."""
        raise NotImplementedError

    def answered(self, frame: Frame) -> None:
        """The server has ended the call."""
        raise NotImplementedError

    def granted(self, size_bytes: int) -> None:
        """The server has taken so much of the requests."""
        if self.outflow is not None:
            self.outflow.grant(size_bytes)

    def too_long(self, size: int) -> None:
        """A response is longer than it may be."""
        self.end_here(_Code.RESOURCE_EXHAUSTED, self._too_long(size))

    def _too_long(self, size: int) -> str:
        most = self._client.limits.receive_bytes
        return f"CLIENT: Received message larger than max ({size} vs. {most})"

    # How it ends.

    def conclude(
        self, code: grpc.StatusCode, details: str, initial: Metadata = (), trailing: Metadata = ()
    ) -> bool:
        """Ends the call; False if it had ended."""
        if self._code is not None or self.refused:
            return False
        self._client.forget(self)
        self.head(initial)
        self._code, self._details, self._trailing = code, details, trailing
        self._stop()
        self._tell(code)
        self._over.finish()
        callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            self._client.loop.call_soon(callback)
        return True

    def _tell(self, code: grpc.StatusCode | None) -> None:
        ended, self._ended = self._ended, None
        assert ended is not None
        ended(code)

    def _stop(self) -> None:
        if self._alarm is not None:
            self._alarm.action = None
        if self.outflow is not None:
            self.outflow.close()
        sender = self._sender
        if sender is not None and not sender.done() and self._cancelled_here:
            sender.cancel()

    def end_here(self, code: grpc.StatusCode, details: str) -> bool:
        """Ends the call at this end, and tells the server."""
        if not self.conclude(code, details):
            return False
        self._client.send((short_frame(CANCEL, self.number),))
        return True

    def _awaited(self) -> bool:
        """Somebody needs what is still to come."""
        return not self.done()

    async def _message_of(self, data: bytes) -> Any:
        """The user's response; None, as in `grpc.aio`, if it cannot be deserialized.

        The call has ended if it could not be read from the server's memory.
        """
        try:
            return await self._receive(data, self._awaited)
        except RefusedError as error:
            failure = failure_of(error)
            if failure is None:
                logs.OWN.exception("a response could not be read")
                failure = NoResponse(_Code.INTERNAL, "Exception deserializing response!")
            self.end_here(*failure)
        except Exception:
            logs.COMMON.exception("Exception deserializing message!")
        return None

    def deadline_passed(self) -> None:
        """Ends the call because its time is over."""
        self.end_here(_Code.DEADLINE_EXCEEDED, "Deadline Exceeded")

    def refuse(self) -> None:
        """The server does not carry it out here."""
        self._client.forget(self)
        self.refused = True
        self._stop()
        self._tell(None)
        self._over.finish()

    async def settled(self) -> bool:
        """Waits until it has ended; False: it has to be made by grpcio. Cancelled, it is ended."""
        try:
            await self._over.wait()
        except asyncio.CancelledError:
            self.cancel()
            raise
        return not self.refused

    # grpc.aio.Call

    def cancel(self) -> bool:
        if threading.get_ident() != self._client.thread:  # a collector's
            in_loop(self._client.loop, self.cancel)
            return self._code is None
        if self._code is not None or self.refused:
            return False
        self._cancelled_here = True
        if self.conclude(_Code.CANCELLED, _LOCALLY):
            # Not at once: grpcio's call cancels when it is collected, even while another is sent.
            in_loop(
                self._client.loop, partial(self._client.send, (short_frame(CANCEL, self.number),))
            )
        return True

    def cancelled(self) -> bool:
        return self._code is _Code.CANCELLED

    def done(self) -> bool:
        return self._code is not None

    def time_remaining(self) -> float | None:
        return None if self.deadline is None else max(self.deadline - time.monotonic(), 0.0)

    def add_done_callback(self, callback: Callable[[Any], object]) -> None:
        if self._code is not None:
            callback(self)
        else:
            self._callbacks.append(partial(callback, self))

    async def initial_metadata(self) -> grpc.aio.Metadata:
        await self._head.wait()
        return grpc.aio.Metadata(*(self._initial or ()))

    async def trailing_metadata(self) -> grpc.aio.Metadata:
        await self._over.wait()
        return grpc.aio.Metadata(*self._trailing)

    async def code(self) -> Any:
        await self._over.wait()
        return self._code

    async def details(self) -> str:
        await self._over.wait()
        return self._details

    async def debug_error_string(self) -> str:
        """What grpcio's objects have too: the status once more."""
        await self._over.wait()
        return "" if self._code is _Code.OK else f"tensorwire: {self._details}"

    async def wait_for_connection(self) -> None:
        if self._code is not None:
            self._raise_for_status()

    def _raise_for_status(self) -> None:
        if self._cancelled_here:
            raise asyncio.CancelledError
        if self._code is not _Code.OK:
            raise grpc.aio.AioRpcError(
                self._code or _Code.UNKNOWN,
                grpc.aio.Metadata(*(self._initial or ())),
                grpc.aio.Metadata(*self._trailing),
                self._details,
                f"tensorwire: {self._details}",
            )

    # Requests that are a stream.

    def send_all(self, requests: Any, link: CallLink, serializer: Any, traced: Any) -> None:
        """Sends all requests of an iterable, synchronous or not, in a task."""
        sending = self._send_all(requests, link, serializer, traced)
        self._sender = self._client.loop.create_task(sending)

    def finish_sending(self, message: SentMessage) -> None:
        """Copies what is left of the only request; what is too long for that now, in a task."""
        if message.finish_some():
            self._sender = self._client.loop.create_task(message.finish_later())

    async def _send_all(self, requests: Any, link: CallLink, serializer: Any, traced: Any) -> None:
        try:
            if hasattr(requests, "__aiter__"):
                async for request in requests:
                    if not await self._send(request, link, serializer, traced):
                        return
            else:
                for request in requests:
                    if not await self._send(request, link, serializer, traced):
                        return
        except BaseException:
            # As in grpcio: whatever a user's iterator raises cancels the call.
            logs.OWN.debug("requests could not be sent", exc_info=True)
            self.cancel()
            return
        self._done_writing_flag = True
        if self._code is None:
            self._client.send((last_frame(self.number),))

    async def _send(self, request: Any, link: CallLink, serializer: Any, traced: Any) -> bool:
        assert self.outflow is not None
        if self.done():
            return False
        message = SentMessage(request, link, last=True)
        data = await observed.serialize_later(traced, message, serializer)
        most = self._client.limits.send_bytes
        if 0 <= most < len(data):
            text = f"CLIENT: Sent message larger than max ({len(data)} vs. {most})"
            self.end_here(_Code.RESOURCE_EXHAUSTED, text)
            return False
        for lot in self.outflow.lots(message_frames(self.number, data), LoopWaiter):
            if not isinstance(lot, list):
                assert isinstance(lot, LoopWaiter)
                await lot.wait()
            elif self.done():
                return False
            else:
                self._client.send(lot)
        await message.finish_later()
        await asyncio.sleep(0)  # others have their turn, however much there is to send
        return True


class _OneResponse(AioCall):
    """Of a call with one response."""

    is_kept = True

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._pieces: list[bytes] = []
        self._bytes = 0
        self._whole = False
        self._response: Any = None
        self._making: asyncio.Task[None] | None = None

    def message(self, frame: Frame) -> None:
        if frame.flags not in (MORE, WHOLE):
            raise FrameError(f"a piece of a response with the flags {frame.flags}")
        if not self._whole:  # of one response too many nobody looks at
            self._whole = self._piece(frame.body) and frame.flags == WHOLE

    def _piece(self, data: bytes) -> bool:
        self._bytes += len(data)
        if 0 <= self._client.limits.receive_bytes < self._bytes:
            self.too_long(self._bytes)
            return False
        self._pieces.append(data)
        return True

    def answered(self, frame: Frame) -> None:
        if frame.flags & REFUSED:
            if self.outflow is None:
                self.refuse()
            else:  # requests cannot be sent again
                self.conclude(_Code.UNAVAILABLE, "the server refuses the call")
            return
        if self._making is not None:
            raise FrameError("an end behind the end of a call")
        body = parse_end(frame.body)
        code, details = status_of(body)
        if frame.flags & WHOLE and not self._whole:
            if not self._piece(body.piece):
                return
            self._whole = True
        data, self._pieces = b"".join(self._pieces), []
        if code is _Code.OK and self._whole:
            making = self._conclude_with(data, details, body)
            if is_awaited(data):  # others have their turn while it is read
                self._making = self._client.loop.create_task(making)
            else:
                run_now(making)
            return
        if code is _Code.OK:
            code, details = _Code.INTERNAL, "the server sent no response"
        self.conclude(code, details, body.initial, body.trailing)

    async def _conclude_with(self, data: bytes, details: str, body: EndBody) -> None:
        self._response = await self._message_of(data)
        self.conclude(_Code.OK, details, body.initial, body.trailing)

    def __await__(self) -> Generator[Any, None, Any]:
        yield from self.settled().__await__()
        self._raise_for_status()
        return self._response


class _ManyResponses(AioCall):
    """Of a call with a stream of responses."""

    def __init__(self, client: AioClientEnd, *given: Any) -> None:
        super().__init__(client, *given)
        self._inflow = Inflow(client.limits.receive_bytes)
        self._end: tuple[grpc.StatusCode, str, Metadata, Metadata] | None = None
        self._iterator: AsyncIterator[Any] | None = None
        self._reads = False

    def message(self, frame: Frame) -> None:
        if frame.flags not in (MORE, WHOLE):
            raise FrameError(f"a piece of a response with the flags {frame.flags}")
        self.head(())
        self._add(frame.body, frame.flags)

    def _add(self, data: bytes, flags: int) -> bool:
        try:
            credit = self._inflow.add(data, flags)
        except TooLongError as error:
            self.too_long(error.args[0])
            return False
        if credit:
            self._client.send((credit_frame(self.number, credit),))
        return True

    def too_long(self, size: int) -> None:
        # Behind the responses that came before, as in grpcio.
        if self._end is None:
            self._client.send((short_frame(CANCEL, self.number),))
            self._end = _Code.RESOURCE_EXHAUSTED, self._too_long(size), (), ()
            if self._inflow.close(drop=False):
                self.conclude(*self._end)

    def answered(self, frame: Frame) -> None:
        if self._end is not None:
            return  # on its way when a response was too long
        body = parse_end(frame.body)
        code, details = status_of(body)
        if frame.flags & REFUSED:
            code, details = _Code.UNAVAILABLE, "the server refuses the call"
        elif frame.flags & WHOLE and not self._add(body.piece, WHOLE):
            return
        self.head(body.initial)
        self._end = code, details, body.initial, body.trailing
        if self._inflow.close(drop=False):
            self.conclude(*self._end)

    def _stop(self) -> None:
        super()._stop()
        self._inflow.close()

    def __aiter__(self) -> AsyncIterator[Any]:
        if self._reads:
            raise grpc.aio.UsageError("a call is read by `read` or by iterating, not by both")
        if self._iterator is None:
            self._iterator = self._iterate()
        return self._iterator

    async def _iterate(self) -> AsyncIterator[Any]:
        while (message := await self._next()) is not grpc.aio.EOF:
            yield message
        self._raise_for_status()

    async def read(self) -> Any:
        message: Any = grpc.aio.EOF
        if self._code is None:
            if self._iterator is not None:
                raise grpc.aio.UsageError("a call is read by `read` or by iterating, not by both")
            self._reads = True
            message = await self._next()
        if message is grpc.aio.EOF:
            self._raise_for_status()
        return message

    async def _next(self) -> Any:
        try:
            taken = self._inflow.take(LoopWaiter)
            while isinstance(taken, LoopWaiter):
                await taken.wait()
                taken = self._inflow.take(LoopWaiter)
            if not isinstance(taken, bytes):
                await self._over.wait()
                return grpc.aio.EOF
            response = await self._message_of(taken)
        except asyncio.CancelledError:
            self.cancel()
            raise
        credit, was_last = self._inflow.settle()
        if credit:
            self._client.send((credit_frame(self.number, credit),))
        if response is None and self.done():
            return grpc.aio.EOF
        if was_last and self._end is not None:
            self.conclude(*self._end)
        return response


def run_now(coroutine: Coroutine[Any, Any, Any]) -> None:
    """Runs what does not wait for anything."""
    try:
        coroutine.send(None)
    except StopIteration:
        return
    coroutine.close()
    raise AssertionError("it waits")


class _Writer(AioCall):
    """Of a call whose requests come from an iterable, or are written."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._written: tuple[CallLink, Any, Any] | None = None
        self._turn = asyncio.Lock()  # of those who write: pieces of two messages would be one

    def write_with(self, link: CallLink, serializer: Any, traced: Any) -> None:
        """Its requests will be written."""
        self._written = link, serializer, traced

    async def write(self, request: Any) -> None:
        if self._written is None:
            raise grpc.aio.UsageError("the requests of this call come from an iterable")
        if self.done():
            raise asyncio.InvalidStateError("RPC already finished.")
        if self._done_writing_flag:
            raise asyncio.InvalidStateError("RPC is half closed: done_writing was called")
        try:
            async with self._turn:
                sent = await self._send(request, *self._written)
        except asyncio.CancelledError:
            self.cancel()
            raise
        if not sent:
            self._raise_for_status()

    async def done_writing(self) -> None:
        if self._written is None:
            raise grpc.aio.UsageError("the requests of this call come from an iterable")
        if not self.done() and not self._done_writing_flag:
            self._done_writing_flag = True
            try:
                async with self._turn:
                    if not self.done():
                        self._client.send((last_frame(self.number),))
            except asyncio.CancelledError:
                self.cancel()  # as in `grpc.aio`; the server would wait for the end
                raise


class AioUnaryUnary(_OneResponse, grpc.aio.UnaryUnaryCall):
    """See `grpc.aio.UnaryUnaryCall`."""


class AioUnaryStream(_ManyResponses, grpc.aio.UnaryStreamCall):
    """See `grpc.aio.UnaryStreamCall`."""


class AioStreamUnary(_OneResponse, _Writer, grpc.aio.StreamUnaryCall):
    """See `grpc.aio.StreamUnaryCall`."""


class AioStreamStream(_ManyResponses, _Writer, grpc.aio.StreamStreamCall):
    """See `grpc.aio.StreamStreamCall`."""


KINDS = {
    "unary_unary": AioUnaryUnary,
    "unary_stream": AioUnaryStream,
    "stream_unary": AioStreamUnary,
    "stream_stream": AioStreamStream,
}
