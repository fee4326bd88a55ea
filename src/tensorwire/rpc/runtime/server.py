"""Runtime, server side: finds the servicer of a call and runs it in the user's thread pool.

The order of steps, the errors and their texts are grpcio's: see its `_server.py`.
"""

from __future__ import annotations

import contextvars
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import grpc

from .. import logs
from ..payload.attachment import CALLS, RpcAttachment
from ..payload.threads import DEADLINES, CallBack, Callbacks
from . import frames
from .behavior import Performance
from .frames import Frame, FrameError
from .line import Line
from .options import MessageLimits
from .ring import Rings
from .runner import Runner
from .served import CallDetails, Caller, Handled, IncomingCall

_Code = grpc.StatusCode
_MOST_KNOWN = 1024
_OF_GRPCIO = type(grpc.method_handlers_generic_handler("", {}))
"""The class of generic handlers that find the same handler each time."""


class ServerEnd:
    """The server's end of one line. Its thread reads, and runs interceptors.

    Attributes:
        line, caller, attachment: as given; `line` is made of the rings.
        send, flush: see `Line`.
        limits: of messages.
        mutex: guards the state of calls.
        call_back: for threads that must not be held up.
        patient: see `LineEnd`.
        runner: reads, and runs quick calls.

    Args:
        service: of the server.
        attachment: to which the line belongs.
        caller: the client.
        rings: of the line.
    """

    patient = True
    runner: Runner

    def __init__(
        self, service: AnyService, attachment: RpcAttachment, caller: Caller, rings: Rings
    ) -> None:
        self.caller = caller
        self.attachment = attachment
        self.limits = service.limits
        self.mutex = threading.Lock()
        self.call_back: CallBack = Callbacks().call
        self._service = service
        self._calls: dict[int, IncomingCall] = {}
        self.line = Line(rings, self)
        self.send, self.flush = self.line.send, self.line.flush

    def start(self) -> None:
        """Begins to read."""
        self.runner = Runner(self.line, self._service.pool)
        threading.Thread(target=self.runner.serve, name="tensorwire-rpc-serve", daemon=True).start()

    @property
    def active(self) -> int:
        """The number of calls under way."""
        return len(self._calls)

    def forget(self, call: IncomingCall) -> None:
        """Forgets a call that has ended."""
        self._calls.pop(call.number[0], None)

    def arrived(self, frame: Frame) -> None:
        """Handles a frame, see `LineEnd`. Ignores late frames of calls that are over."""
        if frame.kind == frames.CALL:
            self._begins(frame)
            return
        if frame.kind not in (frames.CANCEL, frames.MESSAGE, frames.CREDIT):
            raise FrameError(f"a client sent a frame of kind {frame.kind}, which only servers send")
        known = self._calls.get(frame.number[0])
        if known is None or known.number != frame.number:
            return
        if frame.kind == frames.CANCEL:
            known.finish((), reading=True, cancelled=True)
        elif frame.kind == frames.CREDIT:
            known.granted(frames.parse_credit(frame.body))
        elif known.requests is None:
            self._piece(known, frame.body, frame.flags)
        else:
            known.arrived(frame.body, frame.flags)

    def _begins(self, frame: Frame) -> None:
        slot = frame.number[0]
        before = self._calls.get(slot)
        if slot >= CALLS or (before is not None and before.number == frame.number):
            raise FrameError(f"the call number {frame.number} is in use or out of range")
        if before is not None:  # one of the two was given up; its CANCEL is on its way, or was
            if before.number[1] > frame.number[1]:
                return
            before.finish((), reading=True, cancelled=True)
        body = frames.parse_call(frame.body)
        flags = frame.flags & ~frames.STREAM
        takes_stream = flags != frame.flags
        call = IncomingCall(self, frame.number, body, streams=not flags, takes_stream=takes_stream)
        self._calls[slot] = call
        if flags:
            self._piece(call, body.piece, flags)
        elif body.piece:
            raise FrameError(f"the call {call.number} has request bytes without the flag for them")
        else:
            self._service.begin(self, call)

    def _piece(self, call: IncomingCall, data: bytes, flags: int) -> None:
        if flags not in (frames.MORE, frames.WHOLE) or call.whole:
            raise FrameError(f"the call {call.number} sent flags {flags}, which cannot follow here")
        call.whole = flags == frames.WHOLE
        call.pieces.append(data)
        call.size_bytes += len(data)
        if 0 <= self.limits.receive_bytes < call.size_bytes:
            call.too_long(call.size_bytes)
        elif flags == frames.WHOLE:
            self._service.begin(self, call)

    def over(self, reason: str) -> None:
        """See `LineEnd`."""
        for call in list(self._calls.values()):
            call.finish((), reading=True, cancelled=True)

    def go_away(self) -> None:
        """Tells the client to begin no more calls here."""
        self.line.send((frames.short_frame(frames.GOAWAY),))

    def cancel_all(self) -> None:
        """Ends all calls with UNAVAILABLE."""
        for call in list(self._calls.values()):
            call.fail(_Code.UNAVAILABLE, "the server is stopped", cancelled=True)

    def close(self, *, lost: bool) -> None:
        """Ends this end of the line; calling it again does nothing."""
        if not lost:
            self.line.drain(1.0)
        self.line.end("the server is closed")


class AnyService:
    """The part of a server that begins calls, for all its lines, in either world.

    Any thread may use it.

    Attributes:
        limits: of messages.
        pool: as given.
        kind_of_end: of its ends of lines.

    Args:
        pool: the user's threads.
        handlers: generic ones.
        interceptors: the user's, outermost first.
        most: calls at a time, None for no limit.
        limits: of messages.
    """

    kind_of_end: type[ServerEnd] = ServerEnd

    def __init__(
        self,
        pool: Any,
        handlers: Sequence[Any],
        interceptors: Sequence[Any],
        most: int | None,
        limits: MessageLimits,
    ) -> None:
        self._interceptors = interceptors
        self.limits = limits
        self.pool = pool
        self._generic: list[Any] = []
        self._registered: dict[str, Any] = {}
        self._most = most
        self._lock = threading.Lock()
        self._ends: weakref.WeakSet[ServerEnd] = weakref.WeakSet()
        self._stopping = False
        self._running = 0
        self._known: dict[str, Handled] = {}
        self._static = not interceptors
        self.add_generic(handlers)

    def add_generic(self, handlers: Sequence[Any]) -> None:
        """See `grpc.Server`."""
        self._generic.extend(handlers)
        self._static = self._static and all(type(each) is _OF_GRPCIO for each in handlers)

    def add_registered(self, service_name: str, handlers: Mapping[str, Any]) -> None:
        """See `grpc.Server`."""
        self._registered |= {f"/{service_name}/{name}": each for name, each in handlers.items()}

    def _find(self, details: Any) -> Any:
        """Returns the user's handler of a method, None if there is none."""
        found = self._registered.get(details.method)
        if found is not None:
            return found
        for generic in self._generic:
            found = generic.service(details)
            if found is not None:
                return found
        return None

    def attach(self, attachment: RpcAttachment, caller: Caller, rings: Rings) -> ServerEnd:
        """Returns the server's end of a new line; `start` lets calls come."""
        end = self.kind_of_end(self, attachment, caller, rings)
        with self._lock:
            self._ends.add(end)
        if self._stopping:
            end.go_away()
        return end

    @property
    def active(self) -> int:
        """The number of calls under way."""
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
        """Ends all calls of all lines."""
        for end in self._all():
            end.cancel_all()

    def begin(self, end: ServerEnd, call: IncomingCall) -> None:
        """Begins a call whose only request, or whose stream of requests, is there.

        In the thread that reads.
        """
        raise NotImplementedError

    def _is_refused(self, call: IncomingCall) -> bool:
        """Ends a call if the server is stopping; True if so.

        The client makes it by grpcio if it can.
        """
        if self._stopping and call.once:
            call.refuse()
        elif self._stopping:
            call.fail(_Code.UNAVAILABLE, "the server is stopping", reading=True)
        return self._stopping

    def _admits(self, call: IncomingCall, handled: Handled) -> bool:
        """Admits a call, whose servicer then runs and `_ran` follows; False: the call has ended."""
        if call.once and not handled.is_unary:
            call.refuse()  # grpcio makes the right error of that
            return False
        if self._most is None:
            return True
        with self._lock:
            admitted = self._running < self._most
            self._running += admitted
        if not admitted:
            call.fail(_Code.RESOURCE_EXHAUSTED, "Concurrent RPC limit exceeded!", reading=True)
        return admitted

    def _ran(self) -> None:
        if self._most is not None:
            with self._lock:
                self._running -= 1

    def _handled(self, method: str, handler: Any) -> Handled:
        """Returns a handler taken apart.

        Keeps the result only for grpcio's own, which are tuples: others may change.
        """
        known = self._known.get(method)
        if known is not None and known.handler is handler:
            return known
        handled = Handled(handler)
        if isinstance(handler, tuple):
            if len(self._known) >= _MOST_KNOWN:  # a generic handler may take any
                self._known.clear()
            self._known[method] = handled
        return handled


class Service(AnyService):
    """The part of a synchronous server that begins calls.

    Args: as of `AnyService`.
    """

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        find: Callable[[Any], Any] = self._find
        for each in reversed(self._interceptors):
            find = partial(each.intercept_service, find)
        self._pipeline = find

    def begin(self, end: ServerEnd, call: IncomingCall) -> None:
        """See `AnyService`."""
        if self._stopping and self._is_refused(call):
            return
        context = contextvars.Context()
        try:
            handled = self._known.get(call.method) if self._static else None
            if handled is None:
                details = CallDetails(call.method, call.metadata)
                handler = context.run(self._pipeline, details)
                handled = None if handler is None else self._handled(call.method, handler)
        except Exception as error:
            logs.SERVER.exception("Exception servicing handler: %s", error)
            call.fail(_Code.UNKNOWN, "Error in service handler!", reading=True)
            return
        if handled is None:
            call.fail(_Code.UNIMPLEMENTED, "Method not found!", reading=True)
            return
        if (self._most is not None or not handled.is_unary) and not self._admits(call, handled):
            return
        if call.deadline is not None:
            call.alarm = DEADLINES.add(call.deadline, call.deadline_passed)
        if call.requests is None or handled.takes_stream:
            self._submit(context, end, call, handled)
        else:  # the first one of the stream is the only one
            call.awaited.append(partial(self._submit, context, end, call, handled))
            never = partial(self._never_ran, call)
            if not call.add_callback(never):
                never()

    def _never_ran(self, call: IncomingCall) -> None:
        """Takes back the admission of a call that has ended before its only request came."""
        if call.take_awaited() is not None:
            self._ran()

    def _submit(
        self, context: contextvars.Context, end: ServerEnd, call: IncomingCall, handled: Handled
    ) -> None:
        pool = handled.pool
        if pool is None and call.once and end.runner.takes(call.method):
            run = partial(context.run, self._run, end, call, handled)
            end.runner.ready.append((run, partial(self._gone, call)))
            return
        try:
            (pool or self.pool).submit(context.run, self._run, end, call, handled)
        except RuntimeError as error:
            self._gone(call, error)

    def _gone(self, call: IncomingCall, error: Exception) -> None:
        """Fails a call, because the pool takes nothing any more."""
        self._ran()
        call.fail(_Code.UNAVAILABLE, f"the server's threads are gone: {error}", reading=True)

    def _run(self, end: ServerEnd, call: IncomingCall, handled: Handled) -> None:
        """Runs the servicer of a call, in a thread of the user's."""
        performance = Performance(end, call, handled)
        began = time.monotonic()
        try:
            if call.is_active():
                performance.run()
        except Exception as error:
            logs.OWN.exception("a call could not be carried out")
            call.fail(_Code.INTERNAL, f"the call could not be carried out: {error}")
        finally:
            end.runner.took(call.method, time.monotonic() - began)
            if performance.traced is not None:
                performance.ended()
            if self._most is not None:
                self._ran()
