"""asyncio: channels and servers of `grpc.aio` whose large payload travels beside messages.

Calls of a channel without interceptors are grpcio's own where nothing of ours is to be done, and
otherwise stand for one of grpcio's, or for one of the runtime. Interceptors of the user's are
grpcio's business; within them ours does the same. `sending.py` has the steps on the way.
"""

from __future__ import annotations

import asyncio
import time
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import grpc
import grpc.aio

from tensorwire.errors import TensorwireError

from .. import logs
from ..attach.marks import SmallCall, SmallRequests
from ..attach.terms import Terms
from ..payload.envelope import MAGIC
from ..payload.inbox import RefusedError
from ..payload.incoming import Reader
from ..payload.limits import Limits
from ..payload.outgoing import CallLink, SentMessage, is_kept
from ..runtime.options import kept, offer
from ..threads.channel import AttachedChannel
from ..threads.factories import (
    channel_terms,
    chosen_transports,
    secure_transports,
    share_of,
)
from ..threads.originals import make, original
from .calls import LATER, LaterCall, ended_by, of_grpcio
from .runtime_client import METHOD, AioCall, AioClient, AioMethod
from .sending import AioSender, chained


class _Method:
    """A method of grpcio's channel whose interceptors are told which one it is.

    The channel stays alive as long as a stub has its methods.

    Args:
        channel: whose method it is.
        arity: "unary_unary" and so on.
        method: its full name.
        serializer, deserializer, registered: the user's, as for grpcio.
    """

    def __init__(
        self,
        channel: AioRpcChannel,
        arity: str,
        method: str,
        serializer: Any,
        deserializer: Any,
        registered: Any,
    ) -> None:
        self._channel = channel
        self._method = method
        reader = Reader(deserializer, streams=arity.endswith("stream"))
        self._reading = _of_grpcio(channel, reader, streams=arity.endswith("stream"))
        writing = partial(_serialized, channel.share.plain, serializer)
        self._inner = getattr(channel.inner, arity)(method, writing, self._reading, registered)
        self._carried = None
        if channel.share.carries:
            read = partial(_read, channel, reader)
            given = arity, serializer, read, channel.sender.fail, channel.share
            self._carried = AioMethod(*given)
        self._streams = arity.startswith("stream")
        self._later = LATER[arity]
        self._make = getattr(channel.sender, "stream" if self._streams else arity)
        self._is_intercepted = arity in channel.intercepted

    def _told(self, compression: Any, begin: Callable[[], Any]) -> Any:
        """Begins a call; the task that makes it, if any, finds the method in its context."""
        token = METHOD.set(self._carried if compression is None else None)
        try:
            return begin()
        finally:
            METHOD.reset(token)

    def _call(
        self,
        request: Any,
        timeout: float | None = None,
        metadata: Any = None,
        credentials: Any = None,
        wait_for_ready: Any = None,
        compression: Any = None,
    ) -> Any:
        given = self._method, timeout, metadata, credentials, wait_for_ready
        details = grpc.aio.ClientCallDetails(*given)
        if self._is_intercepted:  # it is grpcio's
            begin = partial(self._inner, request, **_named(details, compression))
            return self._told(compression, begin)
        return self._begin(request, details, compression)

    def _begin(self, request: Any, details: Any, compression: Any) -> Any:
        if self._channel.is_plain(details.credentials):
            return self._plain(request, details, compression)
        making = self._make(partial(self._of_grpcio, compression), details, request)
        call = self._told(compression, partial(self._later, making, details.timeout))
        self._channel.live.add(call)
        return call

    def _plain(self, request: Any, details: Any, compression: Any) -> Any:
        outgoing, plain = None, self._channel.share.plain
        if not self._streams:
            outgoing = SentMessage(request, plain, last=False).with_arrays()
        call = self._inner(outgoing or request, **_named(details, compression))
        self._channel.sender.watch(call, plain, outgoing)
        return self._in_time(call, details.timeout)

    def _in_time(self, call: Any, timeout: float | None) -> Any:
        """Returns a call for one of grpcio that has begun: it ends when its deadline has passed."""
        if timeout is None:
            return call
        made = asyncio.get_running_loop().create_future()
        made.set_result(call)
        return self._later(made, timeout)

    async def _of_grpcio(self, compression: Any, details: Any, request: Any) -> Any:
        return self._inner(request, **_named(details, compression))


def _read(channel: AioRpcChannel, reader: Reader, data: bytes, call: AioCall) -> Any:
    """Returns the user's message of a call by the runtime, which keeps its channel."""
    needed = call.link().awaits_messages if data.startswith(MAGIC) else None
    return reader.read(data, channel.share.find, needed=needed)


def _serialized(plain: CallLink, serializer: Any, outgoing: Any) -> Any:
    """Returns the bytes of a request, for grpcio."""
    if type(outgoing) is not SentMessage:  # of a stream without an attachment
        outgoing = SentMessage(outgoing, plain, last=True)
    try:
        return outgoing.serialize(serializer)
    except Exception as error:
        logs.COMMON.exception("Exception serializing message!")
        return error  # which grpcio refuses; it would send an empty message if this raised


def _of_grpcio(channel: AioRpcChannel, reader: Reader, *, streams: bool) -> Callable[[bytes], Any]:
    """Returns the deserializer of grpcio's calls."""
    share = channel.share

    def deserialize(data: bytes) -> Any:
        if len(data) >= share.least_bytes and not data.startswith(MAGIC):
            share.notice(len(data))
        try:
            # Each call keeps the channel, without whose attachment an answer cannot be read.
            return reader.read(data, channel.share.find)
        except (RefusedError, TensorwireError) as error:
            if streams:
                text = f"the payload of a response is gone: {error}"
                return ended_by(grpc.StatusCode.INTERNAL, text)
            logs.OWN.error("the payload of a response is gone: %s", error)
            return grpc.aio.EOF  # which fails the call; grpcio would give None if this raised

    return deserialize


def _named(details: Any, compression: Any) -> dict[str, Any]:
    """Returns the arguments of grpcio's methods besides the request."""
    named = {**details._asdict(), "compression": compression}
    del named["method"]
    return named


class _OneRequest(_Method):
    def __call__(self, request: Any, **named: Any) -> Any:
        return self._call(request, **named)


class _ManyRequests(_Method):
    def __call__(self, request_iterator: Any = None, *given: Any, **named: Any) -> Any:
        return self._call(request_iterator, *given, **named)


class _Small(_OneRequest):
    """A method whose calls with small requests are grpcio's own, without anything of ours.

    Args: as of `_Method`.
    """

    def __init__(self, channel: AioRpcChannel, arity: str, method: str, *given: Any) -> None:
        super().__init__(channel, arity, method, *given)
        # `tensorwire rpc trace` counts the work of serializers that grpcio calls.
        watched = hasattr(self._inner, "_tensorwire_trace")
        self._small = SmallRequests(channel.share, given[0], watched=watched)
        self._stock = channel.inner.unary_unary(method, None, self._reading, given[-1])

    def _begin(self, request: Any, details: Any, compression: Any) -> Any:
        # The request of another call is encoded where it is made.
        small, channel = None, self._channel
        if channel.is_connected:
            small = self._small.begin(request, details.metadata, channel.share.current)
        if type(small) is not SmallCall:
            return super()._begin(request if small is None else small, details, compression)
        named = _named(details, compression)
        try:
            call = self._stock(small.body, **{**named, "metadata": small.metadata})
        except BaseException:
            small.end(False)
            raise
        channel.sender.watch_small(call, small)
        return self._in_time(call, details.timeout) if is_kept(small.body) else call


_METHODS: dict[str, Any] = {
    arity: type(kind.__name__, (kind, of_grpcio(arity, "MultiCallable")), {})
    for arity, kind in (
        ("unary_unary", _Small),
        ("unary_stream", _OneRequest),
        ("stream_unary", _ManyRequests),
        ("stream_stream", _ManyRequests),
    )
}
"""The classes of methods by arity; each is one of grpc.aio's for that."""


class AioRpcChannel(AttachedChannel, grpc.aio.Channel):
    """A `grpc.aio.Channel`; made by `insecure_channel` and `secure_channel`.

    Args:
        name: of the factory of grpcio.
        given: its arguments, without interceptors.
        interceptors: the user's.
        terms: for payload.
        encrypted: it is a secure one.

    Attributes:
        inner: of grpcio.
        sender: sends its calls.
        live: calls that end with the channel.
        intercepted: the arities whose calls interceptors of the user's see.
    """

    def __init__(
        self,
        name: str,
        given: tuple[Any, ...],
        interceptors: Sequence[Any] | None,
        terms: Terms,
        *,
        encrypted: bool,
    ) -> None:
        try:
            world: object = asyncio.get_running_loop()
        except RuntimeError:  # it will be used in an event loop that is not known here
            world = object()
        # A line that stays would be a task of an event loop that is to end.
        lingers = terms.runtime.limits is None
        share = share_of(terms, name, *given, world=world, new_client=AioClient, lingers=lingers)
        super().__init__(share)
        self.sender = AioSender(share)
        chain, self.intercepted = chained(interceptors or (), self.sender)
        self.inner = self.sender.inner = make("aio." + name, *given, chain or None)
        self.live: weakref.WeakSet[LaterCall] = weakref.WeakSet()
        self._encrypted = encrypted
        self._closed = False

    @property
    def is_connected(self) -> bool:
        """Tells whether grpcio has a connection to a server."""
        return not self._closed and self.inner.get_state() is grpc.ChannelConnectivity.READY

    def is_plain(self, credentials: Any) -> bool:
        """Tells whether a call that begins now is grpcio's alone, and asks for no attachment."""
        if self._closed or (credentials is not None and not self._encrypted):
            return True  # grpcio raises the right error
        share = self.share
        if share.current is not None:
            return False
        if self.inner.get_state() is not grpc.ChannelConnectivity.READY:
            share.disconnected()  # the end of a plain call is not watched
        return True

    def _kind_of(self, arity: str) -> Any:
        return _METHODS[arity]

    async def attach(self, timeout_s: float = 5.0) -> bool:
        """Opens the attachment now, and waits until it is there; see `RpcChannel.attach`."""
        return await asyncio.to_thread(self.share.attach, timeout_s)

    async def __aenter__(self) -> AioRpcChannel:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self, grace: float | None = None) -> None:
        self._closed = True
        until = time.monotonic() + (grace or 0.0)
        live = [call for call in self.live if not call.done()]
        if grace and grace > 0 and live:
            ends = [asyncio.ensure_future(call.code()) for call in live]
            await asyncio.wait(ends, timeout=grace)
            for end in ends:
                end.cancel()
            await asyncio.gather(*ends, return_exceptions=True)
        for call in live:
            call.cancel()
        if grace is not None:
            grace = max(until - time.monotonic(), 0.0)
        await self.inner.close(grace)
        self.share.close()

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
    limits: Limits | None = None,
    transports: tuple[str, ...] | None = None,
    runtime: bool | None = None,
) -> AioRpcChannel:
    """Makes a `grpc.aio.insecure_channel`; keywords as of `tensorwire.rpc.insecure_channel`.

    Payload travels by shared memory only, unless transports name tcp too: over a network the event
    loop would wait for it.
    """
    if plain := original("aio.insecure_channel"):
        return plain(target, options, compression, interceptors)  # type: ignore[no-any-return]
    options = kept(options)
    offered = offer(runtime, options, compression)
    transports = chosen_transports(transports, ("shm",))
    terms, options = channel_terms(target, options, limits, transports, offered)
    given = target, options, compression
    return AioRpcChannel("insecure_channel", given, interceptors, terms, encrypted=False)


def secure_channel(
    target: str,
    credentials: Any,
    options: Any = None,
    compression: Any = None,
    interceptors: Sequence[Any] | None = None,
    *,
    limits: Limits | None = None,
    plaintext_transports: tuple[str, ...] = (),
) -> AioRpcChannel:
    """Makes a `grpc.aio.secure_channel`; keywords as of `tensorwire.rpc.secure_channel`."""
    if plain := original("aio.secure_channel"):
        return plain(  # type: ignore[no-any-return]
            target, credentials, options, compression, interceptors
        )
    transports = secure_transports(plaintext_transports)
    terms, options = channel_terms(target, kept(options), limits, transports)
    given = target, credentials, options, compression
    return AioRpcChannel("secure_channel", given, interceptors, terms, encrypted=True)
