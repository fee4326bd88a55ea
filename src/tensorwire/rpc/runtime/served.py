"""Serves one call from its first frame to its last: its requests, its responses and its end."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import grpc

from ..payload.attachment import RpcAttachment
from ..payload.incoming import Reader
from ..payload.threads import Alarm, CallBack, call_all
from . import frames
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
    """Returns the name of the method of a handler, whose marks of streams need not be bools."""
    return ARITIES[bool(handler.request_streaming), bool(handler.response_streaming)]


class Handled:
    """A user's handler, taken apart; made once for a handler that serves many calls.

    Args:
        handler: the user's.

    Attributes:
        handler: as given.
        arity: the result of `arity_of`.
        is_unary: it has one request and one response.
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
        self.is_unary = not (self.takes_stream or self.gives_stream)
        self.reader = Reader(handler.request_deserializer)
        self.serializer = handler.response_serializer
        pool = getattr(self.behavior, "experimental_thread_pool", None)
        self.pool = pool if isinstance(pool, ThreadPoolExecutor) else None


@dataclass(frozen=True, slots=True)
class Caller:
    """The client of a line, as grpcio saw it when the line was asked for.

    Attributes:
        peer, auth_context, identities, identity_key: of its `ServicerContext`.
        user_agent: the name that its channel gives itself.
    """

    peer: str
    auth_context: Mapping[str, Sequence[bytes]]
    identities: Sequence[bytes] | None
    identity_key: str | None
    user_agent: Metadata

    @classmethod
    def of(cls, context: grpc.ServicerContext) -> Caller:
        """Returns the client of a call that came by grpcio."""
        agent = [each for each in context.invocation_metadata() or () if each[0] == "user-agent"]
        return cls(
            context.peer(),
            dict(context.auth_context()),
            context.peer_identities(),
            context.peer_identity_key(),
            frames.as_metadata(agent, reserved=True) or (),
        )


class CallDetails(NamedTuple):
    """A `grpc.HandlerCallDetails`, which interceptors and generic handlers are given."""

    method: str
    invocation_metadata: Metadata


class Receiver(Protocol):
    """The end of a line, as its calls see it.

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
        """Sends frames, without waiting."""

    def flush(self) -> None:
        """Sends the frames that are held back, if there are any."""

    def forget(self, call: IncomingCall) -> None:
        """Forgets a call that has ended."""


class IncomingCall:
    """A call at its server. Any thread may use it.

    Attributes:
        number, method, metadata: of the call.
        deadline: of time.monotonic, None if it has none.
        alarm: at the deadline.
        takes_stream: the client takes any number of responses.
        pieces, size_bytes, whole: of the only request.
        requests: a stream of them; None: there is only one.
        awaited: at most one function, called when the first request of a stream has come.
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

    # Defaults are the class's: setting them all would take nearly as long as a small call.
    deadline: float | None = None
    size_bytes = 0
    whole = False
    first: bytes | None = None
    cancelled = False
    alarm: Alarm | None = None
    _responses: Outflow | None = None

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
        if body.timeout_us != frames.NO_DEADLINE:
            self.deadline = time.monotonic() + body.timeout_us / 1e6
        self.takes_stream = takes_stream
        self.once = not (streams or takes_stream)
        self.pieces: list[bytes] = []
        self.requests = Inflow(end.limits.receive_bytes) if streams else None
        self.awaited: list[Callable[[], object]] = []
        self._end = end
        self._token = [True]
        self._callbacks: list[Callable[[], None]] = []

    def is_active(self) -> bool:
        """Returns whether the call goes on."""
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
        """Takes a piece of a request of the stream, or LAST. In the thread that reads."""
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
        """Returns the function to call when the first request of a stream has come; once."""
        try:
            return self.awaited.pop()
        except IndexError:
            return None

    def lacks_request(self) -> None:
        """Fails a call that has to have one request: its stream has ended without any."""
        text = f'"{self.method}" requires exactly one request message.'
        self.fail(_Code.UNIMPLEMENTED, text, reading=True)

    def too_long(self, size: int) -> None:
        """Fails the call, because a request is longer than it may be."""
        most = self._end.limits.receive_bytes
        text = f"SERVER: Received message larger than max ({size} vs. {most})"
        # Cancelled: a servicer that iterates over the requests must not take this for their end.
        self.fail(_Code.RESOURCE_EXHAUSTED, text, reading=True, cancelled=True)

    def request(self, new: Callable[[], Waiter] = Waiter) -> bytes | Waiter | None:
        """Returns the next request of a stream, see `Inflow.take`; `settle` follows."""
        assert self.requests is not None
        return self.requests.take(new)

    def settle(self) -> None:
        """Ends the use of the request that was taken last."""
        assert self.requests is not None
        credit, _ = self.requests.settle()
        if credit and self._token:
            self._end.send((frames.credit_frame(self.number, credit),))

    def only_request(self) -> bytes | None:
        """Returns the only request of a method, which has arrived; None: the call is over."""
        if self.requests is not None:
            taken = self.requests.take() if self.first is None else self.first
            self.requests.discard()
            self.settle()
            return taken if isinstance(taken, bytes) else None
        pieces, self.pieces = self.pieces, []
        return b"".join(pieces) if pieces else None

    def granted(self, size_bytes: int) -> None:
        """Opens the window of the responses by the bytes that the client has taken."""
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
        """Prepares for any number of responses. To be called before the first one."""
        with self._end.mutex:
            self._responses = Outflow(limited=self.takes_stream)
            if not self._token:
                self._responses.close()

    def send_message(self, message: bytes, new: Callable[[], Waiter] = Waiter) -> Iterator[Waiter]:
        """Sends one of several responses; yields each waiter to wait for before it goes on.

        It ends early with the call.

        Args:
            message: the bytes.
            new: makes a waiter.
        """
        assert self._responses is not None
        return self._responses.send(
            frames.message_frames(self.number, message), self._send_if_active, new
        )

    def _send_if_active(self, lot: Sequence[bytes]) -> None:
        if self._token:
            self._end.send(lot)

    def flush(self) -> None:
        """Sends now the frames that are held back: this thread goes on with other work."""
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
            rest: sends the rest of the response, before any callback learns of the end.
            reading: this thread must not be held up.
            cancelled: it is not the servicer that ends it.
        """
        with self._end.mutex:
            if not self._token:
                return
            self._token.pop()
            self.cancelled = cancelled
            # A thread that finds it ended finds its slot free: the client may use that again.
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
        """Ends the call with a status that the server itself chooses."""
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
