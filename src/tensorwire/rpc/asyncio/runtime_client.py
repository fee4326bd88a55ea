"""asyncio client side of a line; decides which calls use the runtime and which grpcio."""

from __future__ import annotations

import asyncio
import contextvars
import threading
import time
import weakref
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import grpc

from tensorwire.memory import Node, Peer, Region, RemoteRegion

from .. import logs
from ..payload.attachment import RpcAttachment
from ..payload.outgoing import SentMessage, always, at_once
from ..runtime import observed
from ..runtime.carry import LONGEST_S, CarriedLink, Ended
from ..runtime.client import AnyClient, ClientCall
from ..runtime.flow import Outflow, Waiter
from ..runtime.frames import as_metadata
from ..runtime.options import MessageLimits
from .loop import in_loop
from .runtime_call import KINDS, AioCall, Receive

METHOD: contextvars.ContextVar[AioMethod | None] = contextvars.ContextVar(
    "tensorwire.rpc.method", default=None
)
"""The method that is called: grpcio's interceptors are told its name and not its serializers."""


class AioClient(AnyClient):
    """The client's end of a line; all but making, `over` and `close` in its event loop.

    Attributes:
        loop, thread: of the first call.

    Args: as of `AnyClient`.
    """

    loop: asyncio.AbstractEventLoop
    thread: int

    def __init__(
        self, node: Node, memory: Region, other: RemoteRegion, peer: Peer, limits: MessageLimits
    ) -> None:
        super().__init__(node, memory, other, peer, limits, patient=False)
        self._reading: asyncio.Task[None] | None = None
        self._kept: set[ClientCall] = set()

    def start(self) -> None:
        """Begins to read, in the running event loop."""
        if self._reading is None:
            self.loop, self.thread = asyncio.get_running_loop(), threading.get_ident()
            # Not in the context of that call, which has its method, and the channel.
            apart = contextvars.Context()
            self._reading = apart.run(self.loop.create_task, self.line.serve())

    def begin(self, call: ClientCall, *given: Any, **named: Any) -> None:
        """See `AnyClient`."""
        if isinstance(call, AioCall) and call.is_kept:
            self._kept.add(call)
        super().begin(call, *given, **named)

    def forget(self, call: ClientCall) -> None:
        """See `AnyClient`."""
        super().forget(call)
        self._kept.discard(call)

    def await_probe(self, waiter: Waiter, until: float) -> bool:
        """See `AnyClient`. In the thread that connects, before the loop reads."""
        while not (waiter.finished or self.line.is_over):
            left = until - time.monotonic()
            if left <= 0:
                return False
            self.line.read(left)
        return waiter.finished

    def over(self, reason: str) -> None:
        """See `LineEnd`. Any thread."""
        if self._reading is not None:
            in_loop(self.loop, partial(self._end_all, self._reading, reason))

    def _end_all(self, reading: asyncio.Task[None], reason: str) -> None:
        super().over(reason)
        reading.cancel()


class AioMethod:
    """A method of an asyncio channel.

    Args:
        arity: "unary_unary" and so on.
        serializer: the user's, of requests.
        receive: makes the user's response of bytes: see `AioCall`, and what counts messages.
        ended: told of each call how it has ended.
    """

    def __init__(
        self, arity: str, serializer: Any, receive: Callable[..., Awaitable[Any]], ended: Ended
    ) -> None:
        self.arity = arity
        self._serializer = serializer
        self._receive = receive
        self._ended = ended

    async def begin(self, attachment: RpcAttachment | None, details: Any, request: Any) -> Any:
        """Begins a call; None: it is one for grpcio, and nothing has been sent.

        Args:
            attachment: of the channel, None if there is none.
            details: `grpc.aio.ClientCallDetails`.
            request: the user's, or an iterable of them; None: they will be written.

        Raises:
            Exception: what the serializer of the only request raises.
        """
        client = None if attachment is None else attachment.runtime
        if attachment is None or not isinstance(client, AioClient) or not client.usable:
            return None
        timeout = details.timeout
        if details.credentials is not None or (timeout is not None and not 0 < timeout < LONGEST_S):
            return None
        entries = as_metadata(details.metadata)
        number = None if entries is None else attachment.begin_call()
        if number is None or entries is None:
            return None
        client.start()
        streams = self.arity.startswith("stream")
        outflow = Outflow() if streams else None
        deadline = None if timeout is None else time.monotonic() + timeout
        method = details.method
        name = method if isinstance(method, bytes) else method.encode()
        traced = observed.watched("client", self.arity, name.decode())
        link = CarriedLink(attachment, number, at_once, always, self._ended, traced)
        link.patience_s = 0.0  # of the event loop
        link.in_loop = True
        receive: Receive = partial(self._receive, traced=traced)
        call: Any = KINDS[self.arity](client, number, deadline, receive, link.tell, outflow)
        link.needed = partial(_goes_on, weakref.ref(call))
        takes_stream = self.arity.endswith("stream")
        if streams:
            client.begin(call, name, entries, None, streams=takes_stream)
            if request is None:
                call.write_with(link, self._serializer, traced)
            else:
                call.send_all(request, link, self._serializer, traced)
            return call
        outgoing = SentMessage(request, link, last=False)
        try:
            data = await observed.serialize_later(traced, outgoing, self._serializer)
        except asyncio.CancelledError:
            call.cancel()
            raise
        except BaseException as error:
            if isinstance(error, Exception):
                logs.COMMON.exception("Exception serializing message!")
            call.conclude(grpc.StatusCode.INTERNAL, "Exception serializing request!")
            raise
        if call.done():  # its time has passed, or the server gone, while it waited for memory
            return call
        link.leaves(outgoing, timed=not takes_stream)
        client.begin(call, name, entries, data, streams=takes_stream)
        if outgoing.staging is not None:
            call.finish_sending(outgoing)
        return call


def _goes_on(known: weakref.ref[AioCall]) -> bool:
    """Somebody has the call, and it has not ended."""
    call = known()
    return call is not None and not call.done()
