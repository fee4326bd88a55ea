"""The server's end of a line: finds the servicer of a call and runs it in the user's threads.

The order of things, what they raise and what it is called are grpcio's: see its `_server.py`.
"""

from __future__ import annotations

import contextvars
import logging
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import grpc

from tensorwire.memory import Node, Peer, Region, RemoteRegion

from ..attachment import CALLS, RpcAttachment
from ..inbox import RefusedError
from ..incoming import Reader
from ..outgoing import CallLink, SentMessage, no_deadline
from ..tensors import Holding
from . import observed
from .callbacks import Callbacks, call_all
from .context import CallContext, CallDetails, Caller
from .deadlines import DEADLINES, Deadline
from .frames import (
    CALL,
    CANCEL,
    GOAWAY,
    MESSAGE,
    MORE,
    MOST_METADATA_BYTES,
    NO_DEADLINE,
    WHOLE,
    CallBody,
    Frame,
    FrameError,
    Metadata,
    Metadatum,
    Number,
    as_metadata,
    end_frames,
    head_frame,
    parse_call,
    short_frame,
)
from .line import Line
from .options import MessageLimits

_LOG = logging.getLogger("tensorwire.rpc")
_Code = grpc.StatusCode
_MOST_BACKLOG = 256
_LOOK_S = 0.001
REFUSED_PAYLOAD = Metadatum("tensorwire-refused", "1")


class IncomingCall:
    """A call at its server, from its first frame to its last. Any thread may use it.

    Args:
        end: of the line it came by.
        number: of the call.
        body: of its first frame.
    """

    def __init__(self, end: ServerEnd, number: Number, body: CallBody) -> None:
        self.number = number
        self.method = body.method
        self.metadata: Metadata = body.metadata + end.caller.user_agent
        self.deadline: float | None = None
        if body.timeout_us != NO_DEADLINE:
            self.deadline = time.monotonic() + body.timeout_us / 1e6
        self.pieces: list[bytes] = []
        self.bytes = 0
        self.whole = False
        self._end = end
        self._token = [True]
        self._callbacks: list[Callable[[], None]] = []
        self.alarm: Deadline | None = None

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

    def send_head(self, initial: Metadata) -> bool:
        """Sends initial metadata; False if the call does not go on."""
        if not self._token:
            return False
        self._end.line.send((head_frame(self.number, initial),))
        return True

    def finish(self, frames: Sequence[bytes], *, reading: bool = False) -> None:
        """Ends the call, unless it has ended.

        Args:
            frames: tell the client.
            reading: this thread must not be held up.
        """
        with self._end.mutex:
            if not self._token:
                return
            self._token.pop()
            # Who finds it ended finds its slot free: the client may use that again.
            self._end.forget(self)
            callbacks, self._callbacks = self._callbacks, []
        if self.alarm is not None:
            self.alarm.action = None
        if frames:
            self._end.line.send(frames)
        if callbacks:
            (self._end.callbacks.call if reading else call_all)(callbacks)

    def fail(self, code: grpc.StatusCode, details: str, *, reading: bool = False) -> None:
        """Ends the call with a status of the server itself."""
        self.finish(end_frames(self.number, code.value[0], details.encode()), reading=reading)

    def cancel(self) -> None:
        """Ends the call as its servicer wants."""
        self.fail(_Code.CANCELLED, "CANCELLED")

    def refuse(self) -> None:
        """Lets the client make the call by grpcio; the servicer has not run."""
        self.finish(end_frames(self.number, 0, refused=True), reading=True)


class ServerEnd:
    """The server's end of one line. Its thread reads, and runs interceptors.

    Attributes:
        line, caller, attachment: as given, or made of that.
        mutex: guards the state of calls.
        callbacks: for threads that must not be held up.

    Args:
        service: of the server.
        attachment: to which the line belongs.
        caller: the client.
        node, memory, other, peer: as for `Line`.
    """

    def __init__(
        self,
        service: Service,
        attachment: RpcAttachment,
        caller: Caller,
        node: Node,
        memory: Region,
        other: RemoteRegion,
        peer: Peer,
    ) -> None:
        self.caller = caller
        self.attachment = attachment
        self.mutex = threading.Lock()
        self.callbacks = Callbacks()
        self._service = service
        self._calls: dict[int, IncomingCall] = {}
        self.line = Line(node, memory, other, peer, self)

    def start(self) -> None:
        """Begins to read."""
        threading.Thread(target=self._run, name="tensorwire-rpc-serve", daemon=True).start()

    def _run(self) -> None:
        line = self.line
        while not line.is_over:
            line.read(None)
            while line.backlog > _MOST_BACKLOG and not line.is_over:
                time.sleep(_LOOK_S)  # a client that takes no answers gets no more calls

    @property
    def active(self) -> int:
        """Calls under way."""
        return len(self._calls)

    def find(self, id: bytes) -> RpcAttachment | None:
        """The attachment of an id: memory is of the line's own, and of no other one."""
        return self.attachment if id == self.attachment.id else None

    def forget(self, call: IncomingCall) -> None:
        """A call has ended."""
        self._calls.pop(call.number[0], None)

    def arrived(self, frame: Frame) -> None:
        """See `LineEnd`. Frames of calls that are over are on their way when that happens."""
        slot = frame.number[0]
        if frame.kind == CALL:
            before = self._calls.get(slot)
            if slot >= CALLS or (before is not None and before.number == frame.number):
                raise FrameError(f"a call with the number {frame.number}")
            if before is not None:  # one of the two was given up; its CANCEL is on its way, or was
                if before.number[1] > frame.number[1]:
                    return
                before.finish((), reading=True)
            body = parse_call(frame.body)
            call = self._calls[slot] = IncomingCall(self, frame.number, body)
            self._piece(call, body.piece, frame.flags)
            return
        known = self._calls.get(slot)
        if known is not None and known.number != frame.number:
            known = None
        if frame.kind == CANCEL:
            if known is not None:
                known.finish((), reading=True)
        elif frame.kind == MESSAGE:
            if known is not None:
                self._piece(known, frame.body, frame.flags)
        else:
            raise FrameError(f"a frame of kind {frame.kind} to a server")

    def _piece(self, call: IncomingCall, data: bytes, flags: int) -> None:
        if flags not in (MORE, WHOLE) or call.whole:
            raise FrameError(f"a piece with the flags {flags} of the call {call.number}")
        call.whole = flags == WHOLE
        call.pieces.append(data)
        call.bytes += len(data)
        most = self._service.limits.receive_bytes
        if 0 <= most < call.bytes:
            text = f"SERVER: Received message larger than max ({call.bytes} vs. {most})"
            call.fail(_Code.RESOURCE_EXHAUSTED, text, reading=True)
        elif flags == WHOLE:
            self._service.begin(self, call)

    def over(self, reason: str) -> None:
        """See `LineEnd`."""
        for call in list(self._calls.values()):
            call.finish((), reading=True)
        self.callbacks.stop()

    def go_away(self) -> None:
        """Tells the client to begin no more calls here."""
        self.line.send((short_frame(GOAWAY),))

    def cancel_all(self) -> None:
        """Ends all calls."""
        for call in list(self._calls.values()):
            call.fail(_Code.UNAVAILABLE, "the server is stopped")

    def close(self, *, lost: bool) -> None:
        """Ends it; calling it again does nothing."""
        if not lost:
            self.line.drain(1.0)
        self.line.end("the server is closed")


class Service:
    """What a server does for calls of all its lines. Any thread may use it.

    Args:
        pool: the user's threads.
        handlers: generic ones.
        interceptors: the user's, outermost first.
        most: calls at a time, None for no limit.
        limits: of messages.
    """

    def __init__(
        self,
        pool: Any,
        handlers: Sequence[Any],
        interceptors: Sequence[Any],
        most: int | None,
        limits: MessageLimits,
    ) -> None:
        self.limits = limits
        self._pool = pool
        self._generic = list(handlers)
        self._registered: dict[str, Any] = {}
        self._most = most
        self._running = 0
        self._lock = threading.Lock()
        self._ends: weakref.WeakSet[ServerEnd] = weakref.WeakSet()
        self._stopping = False
        find: Callable[[Any], Any] = self._find
        for each in reversed(tuple(interceptors)):
            find = partial(each.intercept_service, find)
        self._pipeline = find

    def add_generic(self, handlers: Sequence[Any]) -> None:
        """See `grpc.Server`."""
        self._generic.extend(handlers)

    def add_registered(self, service_name: str, handlers: Mapping[str, Any]) -> None:
        """See `grpc.Server`."""
        self._registered |= {f"/{service_name}/{name}": each for name, each in handlers.items()}

    def attach(
        self,
        attachment: RpcAttachment,
        caller: Caller,
        node: Node,
        memory: Region,
        other: RemoteRegion,
        peer: Peer,
    ) -> ServerEnd:
        """The server's end of a new line; `start` lets calls come."""
        end = ServerEnd(self, attachment, caller, node, memory, other, peer)
        with self._lock:
            self._ends.add(end)
        if self._stopping:
            end.go_away()
        return end

    @property
    def active(self) -> int:
        """Calls under way."""
        return sum(end.active for end in self._all())

    def _all(self) -> list[ServerEnd]:
        with self._lock:
            return list(self._ends)

    def stop(self) -> None:
        """Lets no more calls begin."""
        self._stopping = True
        for end in self._all():
            end.go_away()

    def cancel_all(self) -> None:
        """Ends all calls."""
        for end in self._all():
            end.cancel_all()

    def _find(self, details: Any) -> Any:
        found = self._registered.get(details.method)
        if found is not None:
            return found
        for generic in self._generic:
            found = generic.service(details)
            if found is not None:
                return found
        return None

    def begin(self, end: ServerEnd, call: IncomingCall) -> None:
        """A call has its request: has it carried out. In the thread that reads."""
        if self._stopping:
            call.refuse()
            return
        context = contextvars.Context()
        details = CallDetails(call.method, call.metadata)
        try:
            handler = context.run(self._pipeline, details)
        except Exception as error:
            _LOG.exception("Exception servicing handler: %s", error)
            call.fail(_Code.UNKNOWN, "Error in service handler!", reading=True)
            return
        if handler is None:
            call.fail(_Code.UNIMPLEMENTED, "Method not found!", reading=True)
            return
        if handler.request_streaming or handler.response_streaming:
            call.refuse()
            return
        with self._lock:
            if self._most is not None and self._running >= self._most:
                handler = None
            else:
                self._running += 1
        if handler is None:
            call.fail(_Code.RESOURCE_EXHAUSTED, "Concurrent RPC limit exceeded!", reading=True)
            return
        if call.deadline is not None:
            late = partial(call.fail, _Code.DEADLINE_EXCEEDED, "Deadline Exceeded", reading=True)
            call.alarm = DEADLINES.add(call.deadline, late)
        pool = getattr(handler.unary_unary, "experimental_thread_pool", None) or self._pool
        try:
            pool.submit(context.run, self._run, end, call, handler)
        except RuntimeError as error:
            self._ran()
            call.fail(_Code.UNAVAILABLE, f"the server's threads are gone: {error}", reading=True)

    def _ran(self) -> None:
        with self._lock:
            self._running -= 1

    def _run(self, end: ServerEnd, call: IncomingCall, handler: Any) -> None:
        """In a thread of the user's."""
        traced = observed.watched("server", call.method)
        began_ns = 0 if traced is None else traced.begin()
        answered = False
        try:
            if call.is_active():
                answered = _carry_out(end, call, handler, traced, self.limits.send_bytes)
        except Exception as error:
            _LOG.exception("a call could not be carried out")
            call.fail(_Code.INTERNAL, f"the call could not be carried out: {error}")
        finally:
            if traced is not None:
                traced.ended(began_ns, "answered" if answered else "not answered")
            self._ran()


def _carry_out(
    end: ServerEnd, call: IncomingCall, handler: Any, traced: Any, most_bytes: int
) -> bool:
    """Runs the servicer and ends the call; True if it has a response."""
    context = CallContext(end.caller, call)
    holdings: list[Holding] = []
    request = _request(end, call, handler, holdings, traced)
    if request is None:
        return False
    try:
        response = handler.unary_unary(request, context)
    except Exception as error:
        if context.aborted:
            _finish(call, context, _Code.UNKNOWN, "RPC Aborted")
        elif error not in context.given_up:
            try:
                details = f"Exception calling application: {error}"
            except Exception:
                details = "Calling application raised unprintable Exception!"
            _LOG.exception(details)
            _finish(call, context, _Code.UNKNOWN, details)
        return False
    del request
    for holding in holdings:
        holding.look()  # the servicer has the message no longer, unless it keeps it
    remaining = no_deadline if call.deadline is None else context.time_remaining
    link = CallLink(end.attachment, call.number, remaining, call.is_active)
    outgoing = SentMessage(response, link, last=True)
    try:
        data = observed.serialize(traced, outgoing, handler.response_serializer)
    except Exception:
        _LOG.exception("a response could not be serialized")
        data = None
    if not isinstance(data, bytes):
        _finish(call, context, _Code.INTERNAL, "Failed to serialize response!")
        return False
    if 0 <= most_bytes < len(data):
        text = f"SERVER: Sent message larger than max ({len(data)} vs. {most_bytes})"
        _finish(call, context, _Code.RESOURCE_EXHAUSTED, text)
        return False
    _finish(call, context, _Code.OK, "", data)
    return True


def _request(
    end: ServerEnd, call: IncomingCall, handler: Any, holdings: list[Holding], traced: Any
) -> Any:
    """The user's request; None if there is none, and the call has ended."""
    data = call.pieces[0] if len(call.pieces) == 1 else b"".join(call.pieces)
    call.pieces = []
    reader = Reader(handler.request_deserializer)
    request = None
    try:
        if traced is not None:
            read = partial(reader.read, find=end.find, holdings=holdings)
            request = traced.deserialize(read, data, protocol="runtime")
        else:
            request = reader.read(data, end.find, holdings)
    except RefusedError as error:
        text = f"payload that is not where the message says: {error}"
        code = _Code.INVALID_ARGUMENT.value[0]
        call.finish(end_frames(call.number, code, text.encode(), trailing=(REFUSED_PAYLOAD,)))
        return None
    except Exception:
        _LOG.exception("a request could not be deserialized")
    if request is None:
        call.fail(_Code.INTERNAL, "Exception deserializing request!")
    return request


def _finish(
    call: IncomingCall,
    context: CallContext,
    code: grpc.StatusCode,
    details: str,
    message: bytes | None = None,
) -> None:
    """Ends a call as its servicer has said, or else with a status."""
    number, text = context.status(code, details)
    trailing = as_metadata(context.trailing_metadata(), reserved=True)
    if trailing is None:
        number, trailing, message = _Code.INTERNAL.value[0], (), None
        text = b"the trailing metadata of the servicer are not valid, or too long"
    if len(text) > MOST_METADATA_BYTES:
        number, message = _Code.RESOURCE_EXHAUSTED.value[0], None
        text = b"the details of the status are too long"
    if number != 0:
        message = None
    call.finish(end_frames(call.number, number, text, (), trailing, message))
