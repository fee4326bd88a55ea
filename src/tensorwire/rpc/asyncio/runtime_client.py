"""asyncio client side of a line; decides which calls use the runtime and which grpcio."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from functools import partial
from typing import Any

import grpc

from tensorwire.memory import Node, Peer, Region, RemoteRegion

from .. import logs
from ..payload.attachment import RpcAttachment
from ..payload.outgoing import SentMessage
from ..runtime.carry import AnyMethod
from ..runtime.client import AnyClient
from ..runtime.flow import Outflow
from ..runtime.leaving import lenient
from ..runtime.options import MessageLimits
from ..runtime.requests import RequestSender
from .encoding import encode
from .loop import LoopCallbacks, LoopDeadline, in_loop
from .runtime_call import AioCall, AioStream

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

    def start(self) -> None:
        """Begins to read, in the running event loop."""
        if self._reading is None:
            self.loop, self.thread = asyncio.get_running_loop(), threading.get_ident()
            self.callbacks = LoopCallbacks(self.loop)
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
        self._sends_stream = arity.startswith("stream")

    async def begin(self, attachment: RpcAttachment | None, details: Any, request: Any) -> Any:
        """Begins a call; None: it is one for grpcio, and nothing has been sent.

        Args:
            attachment: of the channel, None if there is none.
            details: `grpc.aio.ClientCallDetails`.
            request: the user's, or an iterable of them; None: they will be written.

        Raises:
            Exception: what the serializer of the only request raises.
        """
        if attachment is None or details.credentials is not None:
            return None
        method = details.method if isinstance(details.method, str) else details.method.decode()
        outflow = Outflow() if self._sends_stream else None
        began = self._new(attachment, method, details.timeout, details.metadata, outflow)
        if began is None:
            return None
        client, call, link, entries = began
        client.start()
        call.set_alarm(partial(LoopDeadline, client.loop))
        link.patience_s = 0.0  # of the event loop
        link.in_loop = True
        if not self._takes_stream:
            client.keep(call)
        encoded = partial(encode, attachment, lambda: link, self._serializer, link.traced)
        data: bytes | None = None
        outgoing: SentMessage | None = None
        if not self._sends_stream:
            try:
                data, outgoing = await encoded(request, last=False)
            except asyncio.CancelledError:
                call.cancel()
                raise
            except Exception:
                logs.COMMON.exception("Exception serializing message!")
                call.conclude(grpc.StatusCode.INTERNAL, "Exception serializing request!")
                raise
            if call.done():  # its time has passed, or the server gone
                return call
            if outgoing is not None:
                link.leaves(outgoing)
        client.begin(call, method.encode(), entries, data, streams=self._takes_stream)
        if outgoing is not None:
            call.finish_sending(outgoing)
        if outflow is not None:
            call.send_by(RequestSender(client, call), encoded, request)
        return call
