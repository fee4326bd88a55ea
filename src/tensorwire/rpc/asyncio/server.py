"""asyncio: a `grpc.aio` server whose large payload travels beside its messages.

One interceptor, outside of the user's, changes what turns grpcio's bytes into messages and back;
the behaviours, of whatever kind they are, are the user's own. Parsing and serializing happen in the
event loop, as in grpcio.
"""

from __future__ import annotations

import asyncio
import time
import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any

import grpc
import grpc.aio

from ..attach.registry import DeclinedError, Registry
from ..attach.terms import OPEN
from ..payload.attachment import RpcAttachment
from ..payload.envelope import MAGIC, read_mark
from ..payload.incoming import find_only
from ..payload.limits import Limits, given_limits
from ..payload.outgoing import PLAIN, CallLink, Responses, always, at_once
from ..runtime.context import Caller
from ..runtime.options import kept, offer, roomy
from ..runtime.served import ARITIES
from ..threads.factories import chosen_transports, server_terms
from ..threads.originals import make, original
from ..threads.server import DRAIN_S, Handlers, ServerPorts, is_encrypted, reader_of
from .runtime_service import AioService


class AioServedCall(grpc.RpcMethodHandler):
    """The handler of calls with one mark, in the place of the user's, whose behaviours it keeps.

    Args:
        handler: the user's.
        attachment: of the calls; None: their mark names none of this server, or they have none.
        mark: of the calls, if they have one.
    """

    def __init__(self, handler: Any, attachment: RpcAttachment | None, mark: Any) -> None:
        self.handler = handler
        self.mark = mark
        self.request_streaming = handler.request_streaming
        self.response_streaming = handler.response_streaming
        for name in ARITIES.values():
            setattr(self, name, getattr(handler, name, None))
        self._reader = reader = reader_of(handler)
        # A message without a mark that looks like an envelope is a message.
        self.request_deserializer = reader.plain if mark is None else self._receive
        self.response_serializer = self._send
        self._responses = Responses(handler.response_serializer, attachment)
        self._attachment = attachment
        found = read_mark(mark)
        self._call = (0, 0) if found is None else found[1:]
        # A stream has its mark alone.
        streams = attachment is not None and self.response_streaming
        self._window = attachment.window() if attachment is not None and streams else None

    def confirm(self) -> None:
        """Tells the client whose calls these are."""
        if self._attachment is not None:
            self._attachment.confirm(self._call)

    def _link(self) -> CallLink:
        if self._attachment is None:
            return PLAIN
        link = CallLink(self._attachment, self._call, at_once, always)
        link.patience_s = 0.0  # who gives memory back may be in this event loop
        link.window = self._window
        return link

    def _receive(self, data: bytes) -> Any:
        if not data.startswith(MAGIC):
            return self._reader.inside(data)
        message = self._reader.read(data, partial(find_only, self._attachment))
        if not self.request_streaming:
            self.confirm()
        return message

    def _send(self, message: Any) -> bytes:
        return self._responses.encode(message, self._link)


class AioInterceptor(grpc.aio.ServerInterceptor):
    """Answers the reserved method, and wraps the handlers of all others."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._handlers = Handlers(registry, AioServedCall)
        self._reserved = grpc.unary_unary_rpc_method_handler(self._open)

    async def intercept_service(self, continuation: Any, handler_call_details: Any) -> Any:
        if handler_call_details.method == OPEN:
            return self._reserved
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        call = self._handlers.of(handler, handler_call_details.invocation_metadata)
        if handler.request_streaming:
            call.confirm()
        return call

    async def _open(self, request: bytes, context: Any) -> bytes:
        open_attachment = partial(self._registry.open, encrypted=is_encrypted(context))
        try:
            return await asyncio.to_thread(open_attachment, request, Caller.of(context))
        except DeclinedError as error:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
        except ValueError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        raise AssertionError


class AioRpcServer(ServerPorts, grpc.aio.Server):
    """A `grpc.aio.Server`; made by `server`.

    Args:
        inner: of grpcio, with an AioInterceptor of the registry as its first one.
        registry: the attachments.
        service: carries out calls that do not come by grpcio; None: there are none.
        reason: why there are none.

    Attributes:
        inner: of grpcio.
    """

    _service: AioService | None

    def __init__(
        self, inner: grpc.aio.Server, registry: Registry, service: AioService | None, reason: str
    ) -> None:
        self.inner = inner
        self._registry = registry
        self._service = service
        self._reason = reason
        weakref.finalize(self, registry.close).atexit = False

    async def start(self) -> None:
        if self._service is not None:
            self._service.loop = asyncio.get_running_loop()
        await self.inner.start()
        self._started = True

    async def stop(self, grace: float | None) -> None:
        service = self._service
        until = time.monotonic() + (grace or 0.0)
        if service is not None:
            service.stop()
            if grace is None:
                service.cancel_all()
        await self.inner.stop(grace)
        if service is not None:
            while service.active and time.monotonic() < until:
                await asyncio.sleep(0.005)
            service.cancel_all()
        until = time.monotonic() + DRAIN_S
        while self._registry.awaited and time.monotonic() < until:
            await asyncio.sleep(0.005)
        self._registry.close()

    async def wait_for_termination(self, timeout: float | None = None) -> bool:
        return bool(await self.inner.wait_for_termination(timeout))


def server(
    migration_thread_pool: Any = None,
    handlers: Any = None,
    interceptors: Sequence[Any] | None = None,
    options: Any = None,
    maximum_concurrent_rpcs: Any = None,
    compression: Any = None,
    *,
    limits: Limits | None = None,
    transports: tuple[str, ...] | None = None,
    plaintext_transports: tuple[str, ...] = (),
    listen: str = "",
    runtime: bool | None = None,
) -> AioRpcServer:
    """As `grpc.aio.server`; further keywords as `tensorwire.rpc.server`.

    Payload travels by shared memory only, unless transports name tcp too: over a network the event
    loop would wait for it.
    """
    if plain := original("aio.server"):
        return plain(  # type: ignore[no-any-return]
            *(migration_thread_pool, handlers, interceptors, options, maximum_concurrent_rpcs),
            compression,
        )
    limits = given_limits(limits)
    transports = chosen_transports(transports, ("shm",))
    options = kept(options)
    terms = server_terms(limits, transports, listen, plaintext_transports, options)
    handlers, interceptors = kept(handlers) or (), kept(interceptors) or ()
    carried = offer(runtime, options, compression)
    service = None
    if carried.limits is not None:
        service = AioService(
            migration_thread_pool, handlers, interceptors, maximum_concurrent_rpcs, carried.limits
        )
    registry = Registry(terms, service)
    if transports:
        options = roomy(options, limits.pool_bytes)
    outermost = (AioInterceptor(registry), *interceptors)
    inner = make(
        "aio.server",
        *(migration_thread_pool, handlers, outermost, options, maximum_concurrent_rpcs),
        compression,
    )
    return AioRpcServer(inner, registry, service, carried.reason)
