"""Serves one call from its first frame to its last: what arrives, and what leaves."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

import grpc

from ..payload.attachment import RpcAttachment
from ..payload.incoming import Reader
from . import frames
from .callbacks import CallBack, call_all
from .deadlines import Alarm
from .flow import Inflow, Outflow, TooLongError, Waiter
from .frames import CallBody, Metadata, Number
from .options import MessageLimits

_Code = grpc.StatusCode
ARITIES = {  # by whether requests and responses are streams
    (False, False): "unary_unary",
    (False, True): "unary_stream",
    (True, False): "stream_unary",
    (True, True): "stream_stream",
}


def arity_of(handler: Any) -> str:
    """The name of the method of a handler; what it says of its streams need not be a bool."""
    return ARITIES[bool(handler.request_streaming), bool(handler.response_streaming)]


class Handled:
    """What is known of a user's handler; made once for those that are asked for again and again.

    Args:
        handler: the user's.

    Attributes:
        handler: as given.
        arity: as `arity_of` says.
        behavior: the user's function.
        takes_stream, gives_stream: requests and responses are streams.
        reader: of its requests.
        serializer: of its responses.
        pool: the threads that it wants for itself, None if it wants none.

    Raises:
        AttributeError: it has no function of its arity.
    """

    def __init__(self, handler: Any) -> None:
        self.handler = handler
        self.arity = arity_of(handler)
        self.behavior = getattr(handler, self.arity)
        self.takes_stream = bool(handler.request_streaming)
        self.gives_stream = bool(handler.response_streaming)
        self.reader = Reader(handler.request_deserializer)
        self.serializer = handler.response_serializer
        pool = getattr(self.behavior, "experimental_thread_pool", None)
        self.pool = pool if isinstance(pool, ThreadPoolExecutor) else None


@dataclass(frozen=True, slots=True)
class Caller:
    """The client of a line, as grpcio saw it when the line was asked for.

    Attributes:
        peer, auth_context, identities, identity_key: of its `ServicerContext`.
        user_agent: what its channel says of itself.
    """

    peer: str
    auth_context: Mapping[str, Sequence[bytes]]
    identities: Sequence[bytes] | None
    identity_key: str | None
    user_agent: Metadata

    @classmethod
    def of(cls, context: grpc.ServicerContext) -> Caller:
        """The client of a call by grpcio."""
        agent = [each for each in context.invocation_metadata() or () if each[0] == "user-agent"]
        return cls(
            context.peer(),
            dict(context.auth_context()),
            context.peer_identities(),
            context.peer_identity_key(),
            frames.as_metadata(agent, reserved=True) or (),
        )


class Receiver(Protocol):
    """What calls need of their end of a line.

    Attributes:
        caller: the client.
        attachment: to which the line belongs.
        limits: of messages.
        mutex: guards the state of calls.
        call_back: for threads that must not be held up.
    """

    caller: Caller
    attachment: RpcAttachment
    limits: MessageLimits
    mutex: threading.Lock
    call_back: CallBack

    def send(self, frames: Sequence[bytes]) -> None:
        """Sends frames; nobody waits for it."""

    def flush(self) -> None:
        """Sends what is held back, if anything is."""

    def forget(self, call: IncomingCall) -> None:
        """A call has ended."""


class IncomingCall:
    """A call at its server. Any thread may use it.

    Attributes:
        number, method, metadata: of the call.
        deadline: of time.monotonic, None if it has none.
        alarm: at the deadline.
        takes_stream: the client takes any number of responses.
        pieces, bytes, whole: of the only request.
        requests: a stream of them; None: there is only one.
        awaited: who is told when the first request of a stream has come, if anybody is.
        first: the first one of a stream of requests, if it was taken already.
        cancelled: it has ended otherwise than by its servicer.
        once: it is unary at the client, which can make it again by grpcio.

    Args:
        end: of the line it came by.
        number: of the call.
        body: of its first frame.
        streams: its requests come as a stream.
        takes_stream: as above.
    """

    def __init__(
        self,
        end: Receiver,
        number: Number,
        body: CallBody,
        *,
        streams: bool,
        takes_stream: bool,
    ) -> None:
        self.number = number
        self.method = body.method
        self.metadata: Metadata = body.metadata + end.caller.user_agent
        self.deadline: float | None = None
        if body.timeout_us != frames.NO_DEADLINE:
            self.deadline = time.monotonic() + body.timeout_us / 1e6
        self.takes_stream = takes_stream
        self.once = not (streams or takes_stream)
        self.pieces: list[bytes] = []
        self.bytes = 0
        self.whole = False
        self.requests = Inflow(end.limits.receive_bytes) if streams else None
        self.awaited: list[Callable[[], object]] = []
        self.first: bytes | None = None
        self.cancelled = False
        self.alarm: Alarm | None = None
        self._responses: Outflow | None = None
        self._end = end
        self._token = [True]
        self._callbacks: list[Callable[[], None]] = []

    def is_active(self) -> bool:
        """The call goes on."""
        return bool(self._token)

    def add_callback(self, callback: Callable[[], None]) -> bool:
        """See `grpc.RpcContext`."""
        with self._end.mutex:
            if not self._token:
                return False
            self._callbacks.append(callback)
            return True

    # What arrives.

    def arrived(self, data: bytes, flags: int) -> None:
        """A piece of a request of the stream, or LAST. In the thread that reads."""
        assert self.requests is not None
        try:
            credit = self.requests.add(data, flags)
        except TooLongError as error:
            self.too_long(error.args[0])
            return
        if credit:
            self._end.send((frames.credit_frame(self.number, credit),))
        if not self.awaited:
            return
        if flags == frames.LAST:
            self.lacks_request()
        elif flags == frames.WHOLE and (awaited := self.take_awaited()) is not None:
            awaited()

    def take_awaited(self) -> Callable[[], object] | None:
        """Who is to be told of the first request of a stream; once."""
        try:
            return self.awaited.pop()
        except IndexError:
            return None

    def lacks_request(self) -> None:
        """A stream of requests for a method that takes one has ended before the first one."""
        text = f'"{self.method}" requires exactly one request message.'
        self.fail(_Code.UNIMPLEMENTED, text, reading=True)

    def too_long(self, size: int) -> None:
        """A request is longer than it may be."""
        most = self._end.limits.receive_bytes
        text = f"SERVER: Received message larger than max ({size} vs. {most})"
        # Cancelled: whoever iterates over the requests must not take this for their end.
        self.fail(_Code.RESOURCE_EXHAUSTED, text, reading=True, cancelled=True)

    def request(self, new: Callable[[], Waiter] = Waiter) -> bytes | Waiter | None:
        """The next request of a stream, see `Inflow.take`; `settle` follows."""
        assert self.requests is not None
        return self.requests.take(new)

    def settle(self) -> None:
        """The request that was taken last is done with."""
        assert self.requests is not None
        credit, _ = self.requests.settle()
        if credit and self._token:
            self._end.send((frames.credit_frame(self.number, credit),))

    def only_request(self) -> bytes | None:
        """The request of a method that takes one; it has arrived. None: the call is over."""
        if self.requests is not None:
            taken = self.requests.take() if self.first is None else self.first
            self.requests.discard()
            self.settle()
            return taken if isinstance(taken, bytes) else None
        pieces, self.pieces = self.pieces, []
        if not pieces:
            return None
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def granted(self, size_bytes: int) -> None:
        """The client has taken so much of the responses."""
        if self._responses is not None:
            self._responses.grant(size_bytes)

    # What leaves.

    def send_head(self, initial: Metadata) -> bool:
        """Sends initial metadata; False if the call does not go on."""
        if not self._token:
            return False
        if text := frames.excess(initial):
            self.fail(_Code.RESOURCE_EXHAUSTED, text, cancelled=True)
            return False
        self._end.send((frames.head_frame(self.number, initial),))
        return True

    def stream_responses(self) -> None:
        """There will be any number of responses. To be called before the first one."""
        with self._end.mutex:
            self._responses = Outflow(limited=self.takes_stream)
            if not self._token:
                self._responses.close()

    def send_message(self, message: bytes, new: Callable[[], Waiter] = Waiter) -> Iterator[Waiter]:
        """Sends one of several responses; yields what is to be waited for before it goes on.

        It ends early with the call.

        Args:
            message: the bytes.
            new: makes what is waited for.
        """
        assert self._responses is not None
        for lot in self._responses.lots(frames.message_frames(self.number, message), new):
            if isinstance(lot, Waiter):
                yield lot
            elif not self._token:
                return
            else:
                self._end.send(lot)

    def flush(self) -> None:
        """Sends now what is held back of it: this thread goes on with what follows."""
        self._end.flush()

    # How it ends.

    def finish(
        self,
        frames: Sequence[bytes],
        *,
        rest: Callable[[], None] | None = None,
        reading: bool = False,
        cancelled: bool = False,
    ) -> None:
        """Ends the call, unless it has ended.

        Args:
            frames: tell the client.
            rest: sends what is left of the response, before anybody hears of the end.
            reading: this thread must not be held up.
            cancelled: it is not the servicer that ends it.
        """
        with self._end.mutex:
            if not self._token:
                return
            self._token.pop()
            self.cancelled = cancelled
            # Who finds it ended finds its slot free: the client may use that again.
            self._end.forget(self)
            callbacks, self._callbacks = self._callbacks, []
            responses = self._responses
        self.pieces = []  # the call itself may be in the queue of the user's threads for long
        if self.alarm is not None:
            self.alarm.cancel()
        if frames:
            self._end.send(frames)
        if rest is not None:
            self._end.flush()  # the client wakes up meanwhile
            rest()
        if responses is not None:
            responses.close()
        if self.requests is not None:
            self.requests.close()
        if callbacks:
            (self._end.call_back if reading else call_all)(callbacks)

    def fail(
        self,
        code: grpc.StatusCode,
        details: str,
        *,
        reading: bool = False,
        cancelled: bool = False,
    ) -> None:
        """Ends the call with a status of the server itself."""
        end = frames.end_frames(self.number, code.value[0], details.encode())
        self.finish(end, reading=reading, cancelled=cancelled)

    def deadline_passed(self) -> None:
        """Ends the call because its time is over."""
        self.fail(_Code.DEADLINE_EXCEEDED, "Deadline Exceeded", reading=True, cancelled=True)

    def cancel(self) -> None:
        """Ends the call as its servicer wants."""
        self.fail(_Code.CANCELLED, "CANCELLED", cancelled=True)

    def refuse(self) -> None:
        """Lets the client make the call by grpcio; the servicer has not run."""
        self.finish(frames.end_frames(self.number, 0, refused=True), reading=True)
