"""Runs the servicer of a call at an asyncio server, asynchronous or not, of any arity.

The order of steps, the errors and their texts are `grpc.aio`'s.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial
from typing import Any

import grpc
import grpc.aio

from .. import logs
from ..payload.inbox import RefusedError
from ..payload.incoming import may_wait
from ..payload.outgoing import CallLink, SentMessage
from ..payload.tensors import Holding, drop
from ..runtime.behavior import AnyPerformance, Performance, refuse_payload
from ..runtime.flow import Waiter
from ..runtime.leaving import lenient
from ..runtime.served import Handled, IncomingCall, Receiver
from .loop import LoopWaiter, encode, finish, in_thread, taken, wait_each

_Code = grpc.StatusCode


class _EndedError(Exception):
    """The call has ended while it was carried out, and its client knows."""


class _Unexpected(AnyPerformance):
    def raised(self, error: Exception) -> None:
        """Ends a call whose servicer has raised an error, unless it has ended."""
        if self.call.is_active():
            logs.AIO_SERVER.exception(
                "Unexpected [%s] raised by servicer method [%s]",
                type(error).__name__, self.call.method,
            )  # fmt: skip
            self.finish(_Code.UNKNOWN, f"Unexpected {type(error)}: {error}")


class SyncPerformance(_Unexpected, Performance):
    """One call and its servicer that is not asynchronous, in a thread.

    Args: as of `AnyPerformance`.
    """

    def time_remaining(self) -> float | None:
        return AnyPerformance.time_remaining(self)

    def cancel(self) -> None:
        raise NotImplementedError("a servicer of grpc.aio cannot cancel its call")

    def _failed(self, error: Exception, what: str) -> None:
        if self.aborted:
            super()._failed(error, what)
        elif error not in self.given_up:
            self.raised(error)

    def _unusable(self, error: Exception, what: str) -> None:
        self.raised(error)


class AioPerformance(_Unexpected, grpc.aio.ServicerContext):  # type: ignore[misc,type-arg]
    """One call and its asynchronous servicer, in the event loop.

    Args:
        end, call, handled: as of `AnyPerformance`.

    Attributes:
        abort_error: the error that `abort` has raised.
        callbacks: to be called when the servicer has ended.
    """

    abort_error: grpc.aio.AbortError | None = None
    _trailing: Any = ()
    _details = ""

    def __init__(self, end: Receiver, call: IncomingCall, handled: Handled) -> None:
        super().__init__(end, call, handled)
        self.callbacks: list[Callable[[], object]] = []
        self._serializer = lenient(self.handled.serializer, text=True)
        self._turn = asyncio.Lock()
        self._rest: asyncio.Task[None] | None = None

    def link(self) -> CallLink:
        return super().link().never_blocks()

    async def run(self) -> None:
        """Runs the servicer and ends the call, whether the servicer returns or raises."""
        try:
            await self._run()
            if self.abort_error is not None:
                logs.AIO_SERVER.error("Abort error unexpectedly suppressed: %s", self.abort_error)
        except (_EndedError, grpc.aio.AbortError):
            pass
        except asyncio.CancelledError:
            logs.OWN.debug("a call of %s was cancelled", self.call.method)
            raise
        except Exception as error:
            self.raised(error)
        finally:
            try:
                for callback in self.callbacks:
                    callback()
            except Exception:  # the others are not called, as in grpcio
                logs.AIO_SERVER.exception("Error in callback for method [%s]", self.call.method)

    async def _run(self) -> None:
        handled, call = self.handled, self.call
        holdings: list[Holding] = []
        request: Any
        if not handled.takes_stream:
            request = await self._deserialize(call.only_request(), holdings)
        else:
            request = self._single() if call.requests is None else self._all_requests()
        if handled.gives_stream:
            call.stream_responses()
            await self._stream(handled.behavior(request, self))
            return
        response = await handled.behavior(request, self)
        had = [request]
        del request
        drop(had, holdings, response)
        self._check()
        if self.code() not in (None, _Code.OK):
            self.finish(_Code.OK, "")
            return
        data, message = await self._serialize(response)
        if call.takes_stream:  # and gives credits
            call.stream_responses()
            await wait_each(call.send_message(data, LoopWaiter))
            await finish(message)
            self.finish(_Code.OK, "")
        else:
            self.finish(_Code.OK, "", data)
        self.answered = True
        await finish(message)

    async def _stream(self, responses: Any) -> None:
        if inspect.isawaitable(responses):
            await responses
        else:
            async for response in responses:
                await self.write(response)
        if self._rest is not None:
            async with self._turn:
                await self._finish_rest()
        self._check()
        self.finish(_Code.OK, "")
        self.answered = True

    async def _single(self) -> AsyncIterator[Any]:
        yield await self._deserialize(self.call.only_request())

    async def _all_requests(self) -> AsyncIterator[Any]:
        while (message := await self.read()) is not grpc.aio.EOF:
            yield message

    async def _deserialize(self, data: bytes | None, holdings: list[Holding] | None = None) -> Any:
        if data is None:
            raise _EndedError
        try:
            if may_wait(data):
                return await in_thread(partial(self._decode, data, holdings))
            return self._decode(data, holdings)
        except RefusedError as error:
            refuse_payload(self.call, error)
            raise _EndedError from None

    async def _serialize(self, response: Any) -> tuple[bytes, SentMessage | None]:
        """Returns the bytes of a response, and a message to `finish` after they are sent."""
        data, message = await encode(self, self._serializer, response, last=True)
        if 0 <= self._most_bytes < len(data):
            self._too_long(len(data))
            raise _EndedError
        return data, message

    async def read(self) -> Any:
        """Returns the next request, EOF after the last one."""
        self._check()
        if self.call.requests is None:
            raise grpc.aio.UsageError("the only request of this call is given to the servicer")
        message: Any = grpc.aio.EOF
        if (data := await taken(self.call.request)) is not None:
            try:
                message = await self._deserialize(data)
            finally:
                self.call.settle()
        self._check()
        return message

    async def write(self, response: Any) -> None:
        """Sends one of several responses.

        Messages that several tasks write leave one after the other. A message whose task is
        cancelled while it leaves is sent to its end, as by `grpc.aio`: the client would take the
        next message for the rest of it.
        """
        self._check()
        async with self._turn:
            await self._finish_rest()
            data, message = await self._serialize(response)
            sending = self.call.send_message(data, LoopWaiter), message
            try:
                await self._send(*sending)
            except asyncio.CancelledError:
                self._rest = asyncio.get_running_loop().create_task(self._send(*sending))
                raise
        await asyncio.sleep(0)  # others have their turn, however much there is to send
        self.head_sent = True

    async def _send(self, waiters: Iterator[Waiter], message: SentMessage | None) -> None:
        await wait_each(waiters)
        await finish(message)

    async def _finish_rest(self) -> None:
        """Waits until a message whose task was cancelled has left."""
        if self._rest is not None:
            await asyncio.wait((self._rest,))
            rest, self._rest = self._rest, None
            rest.result()

    # grpc.aio.ServicerContext

    def _check(self) -> None:
        """Raises the error that halts a servicer whose call does not go on."""
        if self.abort_error is not None:
            raise self.abort_error
        if not self.call.is_active():
            raise grpc.aio.UsageError("RPC already finished.")

    async def send_initial_metadata(self, initial_metadata: Any) -> None:
        self._check()
        if self.head_sent:
            raise grpc.aio.UsageError("Send initial metadata failed: already sent")
        metadata = self._initial(initial_metadata)
        self.head_sent = True
        self.call.send_head(metadata)

    async def abort(self, code: Any, details: str = "", trailing_metadata: Any = ()) -> None:
        if self.abort_error is not None:
            raise grpc.aio.UsageError("Abort already called!")
        self.abort_error = grpc.aio.AbortError("Locally aborted.")
        if trailing_metadata or not self._trailing:
            self._trailing = _checked(trailing_metadata)
        self._code = code
        self._details = details or self._details
        self.finish(code, self._details)
        raise self.abort_error

    async def abort_with_status(self, status: Any) -> None:
        await self.abort(status.code, status.details, status.trailing_metadata)

    def set_trailing_metadata(self, trailing_metadata: Any) -> None:
        self._trailing = _checked(trailing_metadata)

    def set_details(self, details: str) -> None:
        self._details = details

    def details(self) -> str:
        return self._details

    def set_compression(self, compression: Any) -> None:
        if self.head_sent:
            raise RuntimeError(
                "Compression setting must be specified before sending initial metadata"
            )

    def add_done_callback(self, callback: Callable[[Any], object]) -> None:
        self.callbacks.append(partial(callback, self))

    def done(self) -> bool:
        return not self.call.is_active()

    def cancelled(self) -> bool:
        return self._code is _Code.CANCELLED

    def _status(self, code: grpc.StatusCode, details: str) -> tuple[int, bytes]:
        """Returns the servicer's code, or the given one where it has none; and the details."""
        chosen = self._code if self._code not in (None, _Code.OK) else code
        number = chosen.value[0] if isinstance(chosen, grpc.StatusCode) else int(chosen)
        return number, (details or self._details).encode()


def _checked(metadata: Any) -> tuple[Any, ...]:
    """Returns trailing metadata as a tuple; TypeError, as in grpcio, if they are none."""
    if not hasattr(metadata, "__iter__") or isinstance(metadata, dict):
        raise TypeError(f"Invalid trailing metadata type, expected pairs: {metadata}")
    entries = tuple(metadata)
    for each in entries:
        if not isinstance(each, tuple) or len(each) != 2:
            raise TypeError(f"Invalid trailing metadatum, expected a pair: {each}")
        if not isinstance(each[0], str) or not isinstance(each[1], str | bytes):
            raise TypeError(f"Invalid trailing metadatum, expected str and str or bytes: {each}")
    return entries
