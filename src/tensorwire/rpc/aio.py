"""The asyncio side: channels and servers of `grpc.aio` whose large payload goes ahead.

By interceptors: the innermost of a channel, the outermost of a server. So what a call gives back is
grpcio's own. The event loop makes the copy of a payload, as it makes grpcio's; it waits for memory
of the other end no longer than a moment.
"""

from __future__ import annotations

import asyncio
import time
import weakref
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from typing import Any

import grpc
import grpc.aio

from .aio_server import server
from .attachment import RpcAttachment
from .calls import explain, is_refused
from .envelope import mark
from .factories import as_limits, as_transports
from .incoming import Reader
from .janitor import JANITOR
from .methods import call_is_confirmed
from .negotiation import MARK, OPEN, AttachmentKeeper, Terms
from .originals import make, original
from .outgoing import AGAIN, PLAIN, CallLink, SentMessage, always, at_once
from .runtime.aio_client import METHOD, AioClient, AioMethod
from .runtime.options import kept, offer
from .tensors import delivered

__all__ = ["AioRpcChannel", "insecure_channel", "secure_channel", "server"]

_NEGOTIATE_S = 5.0
_PROOF = (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN)
"""What a server says that cannot parse an envelope."""


class _Client:
    """What the four interceptors of a channel share."""

    def __init__(self, bare: grpc.aio.Channel, terms: Terms) -> None:
        self.bare = bare
        self.keeper = AttachmentKeeper(terms, explain, AioClient)
        self._asking: asyncio.Task[RpcAttachment | None] | None = None

    async def carry(self, details: Any, request: Any) -> tuple[Any, Any]:
        """A call that has begun by the runtime, None: it is for grpcio; and its details."""
        method = METHOD.get()
        if method is None or not self.keeper.carries:
            return None, details
        attachment, details = await self._attach(details)
        return await method.begin(attachment, details, request), details

    async def begin(self, details: Any) -> tuple[CallLink, Any]:
        """The link of a new call, and its details with the mark of its attachment."""
        attachment, details = await self._attach(details)
        call = None if attachment is None else attachment.begin_call()
        if attachment is None or call is None:
            return PLAIN, details
        metadata = grpc.aio.Metadata(*(details.metadata or ()), (MARK, mark(attachment.id, *call)))
        link = CallLink(attachment, call, at_once, always)
        link.patience_s = 0.0  # who gives memory back may be in this event loop
        return link, details._replace(metadata=metadata)

    async def _attach(self, details: Any) -> tuple[RpcAttachment | None, Any]:
        """The channel's attachment, for which the server is asked if need be."""
        attachment = self.keeper.ready
        if attachment is None and not self.keeper.settled():
            wait_s = _NEGOTIATE_S
            if details.timeout is not None:
                wait_s = min(wait_s, max(details.timeout / 2, 0.0))
            started = time.monotonic()
            asking = self._asking
            if asking is None or asking.done():
                # One for all calls: each would take a thread of the loop's pool.
                ask = partial(self._ask, asyncio.get_running_loop(), started + wait_s)
                asking = asyncio.create_task(asyncio.to_thread(self.keeper.get, ask, wait_s))
                self._asking = asking
            await asyncio.wait((asking,), timeout=wait_s)
            attachment = self.keeper.ready
            if details.timeout is not None:
                left = details.timeout - (time.monotonic() - started)
                details = details._replace(timeout=left)
        return attachment, details

    def _ask(self, loop: asyncio.AbstractEventLoop, until: float, request: bytes) -> bytes:
        """In a thread, while the loop goes on."""

        async def ask() -> bytes:
            left_s = max(until - time.monotonic(), 0.001)
            answer: bytes = await self.bare.unary_unary(OPEN)(request, timeout=left_s)
            return answer

        return asyncio.run_coroutine_threadsafe(ask(), loop).result()

    def watch(self, call: Any, link: CallLink, tickets: Sequence[int] = ()) -> None:
        """Takes back what nobody has seen when the call has ended."""
        if link is not PLAIN:
            call.add_done_callback(partial(self._ended, link, tickets))

    def _ended(self, link: CallLink, tickets: Sequence[int], call: Any) -> None:
        code = _code_now(call)
        self.ended(link, code is grpc.StatusCode.OK, code)

    def ended(self, link: CallLink, ok: bool, code: Any) -> None:
        """The call is over: what it sent and nobody has seen is taken back."""
        if code is grpc.StatusCode.UNAVAILABLE:
            self.keeper.disconnected()
        if link.attachment is not None:
            link.ended = True
            end = partial(link.attachment.end_call, link.call, link.leases, ok)
            if ok:
                end()
            else:  # perhaps by a collector, in a thread that has the locks
                JANITOR.soon(end)

    async def is_to_be_sent_again(self, outgoing: SentMessage, call: Any) -> bool:
        """Of a call that has ended: whether its payload went ahead to somebody else."""
        if not outgoing.ahead:
            return False
        if is_refused(await call.trailing_metadata()):
            self.keeper.pause()
            return True
        if await call.code() in _PROOF and not call_is_confirmed(outgoing.link):
            self.keeper.pause()
            return True
        return False

    async def send_stream(self, continuation: Any, details: Any, requests: Any) -> Any:
        """Begins a call with a stream of requests."""
        carried, details = await self.carry(details, requests)
        if carried is not None:
            return carried
        link, marked = await self.begin(details)
        call = await continuation(marked, self.requests(requests, link))
        self.watch(call, link)
        return call

    async def requests(self, requests: Any, link: CallLink) -> AsyncIterator[SentMessage]:
        """The user's requests, each with its link."""
        link.must_confirm = link is not PLAIN
        async for each in _each(requests):
            if link.must_confirm and not link.foreign and link.attachment is not None:
                # What may be large waits until it is known who has the call.
                patience_s = link.attachment.limits.patience_s
                link.foreign = not await link.attachment.confirmed_later(link.call, patience_s)
                link.must_confirm = False
            yield SentMessage(each, link, last=True)


def _code_now(call: Any) -> Any:
    """The code of a call that has ended, without awaiting it."""
    if call.cancelled():
        return grpc.StatusCode.CANCELLED
    task = call.code()
    try:
        task.send(None)
    except StopIteration as done:
        return done.value
    finally:
        task.close()
    return None


async def _each(requests: Any) -> AsyncIterator[Any]:
    if hasattr(requests, "__aiter__"):
        async for each in requests:
            yield each
    else:
        for each in requests:
            yield each


class _UnaryUnaryPayload(grpc.aio.UnaryUnaryClientInterceptor):
    def __init__(self, client: _Client) -> None:
        self._client = client

    async def intercept_unary_unary(self, continuation: Any, details: Any, request: Any) -> Any:
        client = self._client
        carried, details = await client.carry(details, request)
        if carried is not None:
            if await carried.settled():
                return carried
            details = details._replace(timeout=carried.time_remaining())
        link, marked = await client.begin(details)
        outgoing = SentMessage(request, link, last=False)
        call = await continuation(marked, outgoing)
        client.watch(call, link)
        try:
            await call  # a call that could not even begin fails here, and never has a code
        except asyncio.CancelledError:
            if not call.done():
                call.cancel()
                raise
        except grpc.aio.AioRpcError:
            pass  # which the user gets from the call
        ok = await call.code() is grpc.StatusCode.OK
        if not ok and await client.is_to_be_sent_again(outgoing, call):
            outgoing = SentMessage(request, AGAIN, last=False)
            call = await continuation(details, outgoing)
            ok = await call.code() is grpc.StatusCode.OK
        if ok and outgoing.tickets:
            delivered(outgoing.tickets)
        return call


class _UnaryStreamPayload(grpc.aio.UnaryStreamClientInterceptor):
    def __init__(self, client: _Client) -> None:
        self._client = client

    async def intercept_unary_stream(self, continuation: Any, details: Any, request: Any) -> Any:
        client = self._client
        carried, details = await client.carry(details, request)
        if carried is not None:
            return carried
        link, marked = await client.begin(details)
        outgoing = SentMessage(request, link, last=False)
        call = await continuation(marked, outgoing)
        client.watch(call, link)
        try:
            await call.wait_for_connection()
        except asyncio.CancelledError:
            call.cancel()
            raise
        except grpc.aio.AioRpcError:
            pass  # which the user gets from the call
        if outgoing.ahead:
            await call.initial_metadata()
            if not call_is_confirmed(link) or call.done():
                if await client.is_to_be_sent_again(outgoing, call):
                    outgoing = SentMessage(request, AGAIN, last=False)
                    call = await continuation(details, outgoing)
        if outgoing.tickets:
            call.add_done_callback(partial(_let_go, outgoing))
        return call


def _let_go(outgoing: SentMessage, call: Any) -> None:
    if _code_now(call) is grpc.StatusCode.OK:
        delivered(outgoing.tickets)


class _StreamUnaryPayload(grpc.aio.StreamUnaryClientInterceptor):
    def __init__(self, client: _Client) -> None:
        self._client = client

    async def intercept_stream_unary(self, continuation: Any, details: Any, requests: Any) -> Any:
        return await self._client.send_stream(continuation, details, requests)


class _StreamStreamPayload(grpc.aio.StreamStreamClientInterceptor):
    def __init__(self, client: _Client) -> None:
        self._client = client

    async def intercept_stream_stream(self, continuation: Any, details: Any, requests: Any) -> Any:
        return await self._client.send_stream(continuation, details, requests)


async def _receive(
    reader: Reader, find: Any, data: bytes, needed: Callable[[], bool], *, traced: Any
) -> Any:
    """The user's message that came by the runtime."""
    return await reader.read_later(data, find, lenient=True, needed=needed, traced=traced)


class _Method:
    """A method of grpcio's channel whose interceptors are told which one it is.

    The channel stays alive as long as a stub has its methods.
    """

    def __init__(self, channel: AioRpcChannel, inner: Any, carried: AioMethod) -> None:
        self._channel = channel
        self._inner = inner
        self._carried = carried

    def __call__(self, *given: Any, **named: Any) -> Any:
        # The task of the call, which grpcio makes here, gets a copy of the context.
        token = METHOD.set(self._carried)
        try:
            return self._inner(*given, **named)
        finally:
            METHOD.reset(token)


class _UnaryUnary(_Method, grpc.aio.UnaryUnaryMultiCallable):
    pass


class _UnaryStream(_Method, grpc.aio.UnaryStreamMultiCallable):
    pass


class _StreamUnary(_Method, grpc.aio.StreamUnaryMultiCallable):
    pass


class _StreamStream(_Method, grpc.aio.StreamStreamMultiCallable):
    pass


_METHODS = {
    "unary_unary": _UnaryUnary,
    "unary_stream": _UnaryStream,
    "stream_unary": _StreamUnary,
    "stream_stream": _StreamStream,
}


class AioRpcChannel(grpc.aio.Channel):
    """A `grpc.aio.Channel`; made by `insecure_channel` and `secure_channel`."""

    def __init__(self, inner: grpc.aio.Channel, client: _Client) -> None:
        self.inner = inner
        self._client = client
        weakref.finalize(self, client.keeper.close).atexit = False

    @property
    def payload(self) -> str:
        """As of `tensorwire.rpc.insecure_channel`."""
        attachment = self.attachment
        return (
            f"inside: {self._client.keeper.reason}" if attachment is None else attachment.transport
        )

    @property
    def runtime(self) -> str:
        """By which calls travel now: "shm", "tcp", or "grpcio: " and the reason."""
        attachment = self._client.keeper.ready
        if attachment is not None and attachment.runtime is not None:
            return attachment.transport
        return f"grpcio: {self._client.keeper.carried_reason}"

    @property
    def rendezvous_bytes(self) -> int | None:
        """From this size messages of the runtime travel by rendezvous now; None: none does."""
        attachment = self.attachment
        if attachment is None or attachment.rendezvous is None:
            return None
        return attachment.rendezvous.threshold.size_bytes

    @property
    def attachment(self) -> RpcAttachment | None:
        """What joins this channel with its server, if anything does."""
        return self._client.keeper.ready

    def _method(
        self, arity: str, method: str, serializer: Any, deserializer: Any, registered: Any
    ) -> Any:
        reader = Reader(deserializer)
        find = self._client.keeper.find

        def deserialize(data: bytes) -> Any:
            return reader.read(data, find, lenient=True)

        inner = getattr(self.inner, arity)(
            method, lambda outgoing: outgoing.serialize(serializer), deserialize, registered
        )
        if not self._client.keeper.carries:
            return inner
        receive = partial(_receive, reader, find)
        carried = AioMethod(arity, serializer, receive, self._client.ended)
        return _METHODS[arity](self, inner, carried)

    def unary_unary(
        self,
        method: str,
        request_serializer: Any = None,
        response_deserializer: Any = None,
        _registered_method: Any = False,
    ) -> Any:
        return self._method(
            "unary_unary", method, request_serializer, response_deserializer, _registered_method
        )

    def unary_stream(
        self,
        method: str,
        request_serializer: Any = None,
        response_deserializer: Any = None,
        _registered_method: Any = False,
    ) -> Any:
        return self._method(
            "unary_stream", method, request_serializer, response_deserializer, _registered_method
        )

    def stream_unary(
        self,
        method: str,
        request_serializer: Any = None,
        response_deserializer: Any = None,
        _registered_method: Any = False,
    ) -> Any:
        return self._method(
            "stream_unary", method, request_serializer, response_deserializer, _registered_method
        )

    def stream_stream(
        self,
        method: str,
        request_serializer: Any = None,
        response_deserializer: Any = None,
        _registered_method: Any = False,
    ) -> Any:
        return self._method(
            "stream_stream", method, request_serializer, response_deserializer, _registered_method
        )

    async def __aenter__(self) -> AioRpcChannel:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self, grace: float | None = None) -> None:
        await self.inner.close(grace)
        await self._client.bare.close()
        self._client.keeper.close()

    def get_state(self, try_to_connect: bool = False) -> Any:
        return self.inner.get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: Any) -> None:
        await self.inner.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        await self.inner.channel_ready()


def insecure_channel(
    target: str,
    options: Any = None,
    compression: Any = None,
    interceptors: Sequence[Any] | None = None,
    *,
    threshold_bytes: int | None = None,
    pool_bytes: int | None = None,
    patience_s: float | None = None,
    transports: tuple[str, ...] = ("shm",),
    runtime: bool | None = None,
) -> AioRpcChannel:
    """As `grpc.aio.insecure_channel`; further keywords as `tensorwire.rpc.insecure_channel`.

    Payload travels by shared memory only, unless transports name tcp too: over a network the event
    loop would wait for it.
    """
    if plain := original("aio.insecure_channel"):
        return plain(target, options, compression, interceptors)  # type: ignore[no-any-return]
    options = kept(options)
    offered = offer(runtime, options, compression)
    inner = partial(make, "aio.insecure_channel", target, options, compression)
    limits = as_limits(threshold_bytes, pool_bytes, patience_s)
    terms = Terms(limits, as_transports(transports), runtime=offered)
    return _channel(inner, interceptors, terms)


def secure_channel(
    target: str,
    credentials: Any,
    options: Any = None,
    compression: Any = None,
    interceptors: Sequence[Any] | None = None,
    *,
    threshold_bytes: int | None = None,
    pool_bytes: int | None = None,
    patience_s: float | None = None,
    plaintext_transports: tuple[str, ...] = (),
) -> AioRpcChannel:
    """As `grpc.aio.secure_channel`; further keywords as `tensorwire.rpc.secure_channel`."""
    if plain := original("aio.secure_channel"):
        return plain(  # type: ignore[no-any-return]
            target, credentials, options, compression, interceptors
        )
    inner = partial(make, "aio.secure_channel", target, credentials, kept(options), compression)
    transports = as_transports(("shm", *plaintext_transports))
    terms = Terms(as_limits(threshold_bytes, pool_bytes, patience_s), transports)
    return _channel(inner, interceptors, terms)


def _channel(inner: Any, interceptors: Sequence[Any] | None, terms: Terms) -> AioRpcChannel:
    client = _Client(inner(None), terms)
    kinds = (_UnaryUnaryPayload, _UnaryStreamPayload, _StreamUnaryPayload, _StreamStreamPayload)
    innermost = [kind(client) for kind in kinds]
    return AioRpcChannel(inner([*(interceptors or ()), *innermost]), client)
