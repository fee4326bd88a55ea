"""The asyncio client's end of a line, and which of its calls go by it. All others go by grpcio."""

from __future__ import annotations

import asyncio
import contextvars
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import grpc

from tensorwire.memory import Node, Peer, Region, RemoteRegion

from ..attachment import RpcAttachment
from ..outgoing import CallLink, SentMessage
from . import observed
from .aio_call import KINDS, AioCall, as_bytes
from .carry import LONGEST_S, Ended, Told
from .flow import Outflow
from .frames import (
    CREDIT,
    END,
    GOAWAY,
    HEAD,
    MESSAGE,
    NO_DEADLINE,
    Frame,
    FrameError,
    as_metadata,
    call_frames,
    parse_credit,
    parse_head,
)
from .line import Line
from .loop import in_loop
from .options import MessageLimits

_AT_ONCE_S = 0.1

METHOD: contextvars.ContextVar[AioMethod | None] = contextvars.ContextVar(
    "tensorwire.rpc.method", default=None
)
"""The method that is called: grpcio's interceptors are told its name and not its serializers."""


class AioClient:
    """The client's end of a line; all but making, `over` and `close` in its event loop.

    Attributes:
        line: of the calls.
        limits: of messages.
        loop, thread: of the first call.

    Args:
        node, memory, other, peer: as for `Line`.
        limits: of messages.
    """

    loop: asyncio.AbstractEventLoop
    thread: int

    def __init__(
        self, node: Node, memory: Region, other: RemoteRegion, peer: Peer, limits: MessageLimits
    ) -> None:
        self.line = Line(node, memory, other, peer, self, patient=False)
        self.limits = limits
        self._calls: dict[int, weakref.ref[AioCall]] = {}
        self._going_away = False
        self._closed = False
        self._reading: asyncio.Task[None] | None = None

    @property
    def usable(self) -> bool:
        """Calls can begin here."""
        return not self._going_away and self.line.takes_calls

    def send(self, frames: Sequence[bytes]) -> None:
        """See `Line.send`."""
        self.line.send(frames)

    def start(self) -> None:
        """Begins to read, in the running event loop."""
        if self._reading is None:
            self.loop, self.thread = asyncio.get_running_loop(), threading.get_ident()
            self._reading = self.loop.create_task(self.line.serve())

    def begin(
        self, call: AioCall, method: bytes, metadata: Any, message: bytes | None, *, streams: bool
    ) -> None:
        """Sends a call, with its request if that is the only one; see `RuntimeClient.begin`."""
        self._calls[call.number[0]] = weakref.ref(call)
        left = call.time_remaining()
        timeout_us = NO_DEADLINE if left is None else min(int(left * 1e6), NO_DEADLINE - 1)
        most = self.limits.send_bytes
        if message is not None and 0 <= most < len(message):
            text = f"CLIENT: Sent message larger than max ({len(message)} vs. {most})"
            call.conclude(grpc.StatusCode.RESOURCE_EXHAUSTED, text)
            return
        self.send(call_frames(call.number, method, timeout_us, metadata, message, streams=streams))
        if self.line.is_over:  # and has perhaps not seen this call
            call.conclude(grpc.StatusCode.UNAVAILABLE, "the connection is over")

    def forget(self, call: AioCall) -> None:
        """A call has ended, or goes on by grpcio."""
        known = self._calls.get(call.number[0])
        if known is not None and known() in (call, None):
            del self._calls[call.number[0]]

    def arrived(self, frame: Frame) -> None:
        """See `LineEnd`. Frames of calls that are over are on their way when that happens."""
        if frame.kind == GOAWAY:
            self._going_away = True
            return
        known = self._calls.get(frame.number[0])
        call = None if known is None else known()
        if call is None or call.number != frame.number:
            return
        if frame.kind == END:
            call.answered(frame)
        elif frame.kind == MESSAGE:
            call.message(frame)
        elif frame.kind == CREDIT:
            call.granted(parse_credit(frame.body))
        elif frame.kind == HEAD:
            call.head(parse_head(frame.body))
        else:
            raise FrameError(f"a frame of kind {frame.kind} to a client")

    def over(self, reason: str) -> None:
        """See `LineEnd`. Any thread."""
        if self._reading is not None:
            in_loop(self.loop, partial(self._end_all, reason))

    def _end_all(self, reason: str) -> None:
        for known in list(self._calls.values()):
            call = known()
            if call is None:
                continue
            if self._closed:
                call.conclude(grpc.StatusCode.CANCELLED, "Channel closed!")
            else:
                call.conclude(grpc.StatusCode.UNAVAILABLE, reason)
        if self._reading is not None:
            self._reading.cancel()

    def close(self, *, lost: bool) -> None:
        """Ends all calls; calling it again does nothing. Any thread.

        Args:
            lost: the server is gone, and not this channel closed.
        """
        self._closed = not lost
        self.line.end("the server is gone" if lost else "the channel is closed")


class AioMethod:
    """A method of an asyncio channel.

    Args:
        arity: "unary_unary" and so on.
        serializer: the user's, of requests.
        deserialize: makes the user's response of bytes.
        ended: told of each call how it has ended.
    """

    def __init__(
        self, arity: str, serializer: Any, deserialize: Callable[[bytes], Any], ended: Ended
    ) -> None:
        self.arity = arity
        self._serializer = serializer
        self._deserialize = deserialize
        self._ended = ended

    def begin(self, attachment: RpcAttachment | None, details: Any, request: Any) -> Any:
        """Begins a call; None: it is one for grpcio, and nothing has been sent.

        Args:
            attachment: of the channel, None if there is none.
            details: `grpc.aio.ClientCallDetails`.
            request: the user's, or an iterable of them.

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
        link = CallLink(attachment, number, _at_once, lambda: not call.done())
        link.patience_s = 0.0  # of the event loop
        method = details.method
        name = method if isinstance(method, bytes) else method.encode()
        told = Told(self._ended, link, observed.watched("client", self.arity, name.decode()))
        deserialize = self._deserialize
        if told.traced is not None:
            deserialize = partial(told.traced.deserialize, deserialize, protocol="runtime")
        call = KINDS[self.arity](client, number, deadline, deserialize, told, outflow)
        data: Any = None
        if not streams:
            outgoing = told.outgoing = SentMessage(request, link, last=False)
            try:
                data = observed.serialize(told.traced, outgoing, self._serializer)
                data = as_bytes(data, self._serializer)
            except BaseException:
                call.conclude(grpc.StatusCode.INTERNAL, "Exception serializing request!")
                raise
        client.begin(call, name, entries, data, streams=self.arity.endswith("stream"))
        if streams:
            call.send_all(request, link, self._serializer, told.traced)
        return call


def _at_once() -> float:
    """What is left to a call whose event loop must not wait."""
    return _AT_ONCE_S
