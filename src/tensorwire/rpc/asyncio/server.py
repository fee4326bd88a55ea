"""asyncio: a `grpc.aio` server whose large payload travels beside its messages.

One interceptor, outside of the user's, replaces the functions that turn grpcio's bytes into
messages and back; the behaviours, of any kind, are the user's own. Parsing and serializing happen
in the event loop, as in grpcio.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import grpc
import grpc.aio

from ..attach.registry import DeclinedError
from ..attach.terms import OPEN
from ..payload.attachment import RpcAttachment
from ..payload.envelope import MAGIC
from ..payload.incoming import find_only
from ..payload.limits import Limits
from ..payload.outgoing import PLAIN, CallLink, always, at_once
from ..runtime.options import kept
from ..runtime.served import ARITIES, Caller
from ..threads.factories import chosen_transports, new_server, server_terms
from ..threads.originals import original
from ..threads.server import (
    LOOK_S,
    Handlers,
    ServedHandler,
    ServerPorts,
    is_encrypted,
    why_declined,
)
from .runtime_service import AioService


class AioServedCall(ServedHandler):
    """A `ServedHandler` of an event loop, which keeps the behaviors of the user's handler.

    Args: as of `ServedHandler`.
    """

    def __init__(self, handler: Any, attachment: RpcAttachment | None, mark: Any) -> None:
        super().__init__(handler, attachment, mark)
        for name in ARITIES.values():
            setattr(self, name, getattr(handler, name, None))
        # A message without a mark that looks like an envelope is a message.
        self.request_deserializer = self._reader.plain if mark is None else self._receive
        self.response_serializer = self._encode
        # A stream has its mark alone.
        streams = self.response_streaming
        self._window = attachment.window() if attachment is not None and streams else None

    def _link(self, *context: Any) -> CallLink:
        if self._attachment is None:
            return PLAIN
        link = CallLink(self._attachment, self._call, at_once, always)
        link.patience_s = 0.0  # memory may be given back in this event loop
        link.window = self._window
        return link

    def _receive(self, data: bytes) -> Any:
        if not data.startswith(MAGIC):
            return self._reader.inside(data)
        message = self._reader.read(data, partial(find_only, self._attachment))
        if not self.request_streaming:
            self.confirm()
        return message


class AioInterceptor(Handlers, grpc.aio.ServerInterceptor):
    """Answers the reserved method, and wraps the handlers of all others.

    Args: as of `Handlers`.
    """

    kind = AioServedCall

    async def intercept_service(self, continuation: Any, handler_call_details: Any) -> Any:
        if handler_call_details.method == OPEN:
            return self.reserved
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        call = self.of(handler, handler_call_details.invocation_metadata)
        if handler.request_streaming:
            call.confirm()
        return call

    async def _open(self, request: bytes, context: Any) -> bytes:
        open_attachment = partial(self._registry.open, encrypted=is_encrypted(context))
        try:
            return await asyncio.to_thread(open_attachment, request, Caller.of(context))
        except (DeclinedError, ValueError) as error:
            await context.abort(why_declined(error), str(error))
        raise AssertionError


class AioRpcServer(ServerPorts, grpc.aio.Server):
    """A `grpc.aio.Server`; made by `server`.

    Args: as of `ServerPorts`.
    """

    new_service, new_interceptor = AioService, AioInterceptor

    async def start(self) -> None:
        if self._service is not None:
            self._service.loop = asyncio.get_running_loop()
        await self.inner.start()
        self._started = True

    async def stop(self, grace: float | None) -> None:
        until = time.monotonic() + (grace or 0.0)
        self._begin_stop(grace)
        await self.inner.stop(grace)
        for _ in self._end_stop(until, lambda: True):
            await asyncio.sleep(LOOK_S)

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
    """Makes a server like `grpc.aio.server`; further keywords as of `tensorwire.rpc.server`.

    Payload travels by shared memory only, unless transports name tcp too: over a network the event
    loop would wait for it.
    """
    options = kept(options)
    most = maximum_concurrent_rpcs
    given = migration_thread_pool, handlers, interceptors, options, most, compression
    if plain := original("aio.server"):
        return plain(*given)  # type: ignore[no-any-return]
    transports = chosen_transports(transports, ("shm",))
    terms = server_terms(limits, transports, listen, plaintext_transports, options)
    return new_server(AioRpcServer, "aio.server", terms, runtime, given)
