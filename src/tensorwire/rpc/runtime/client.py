"""The client's end of a line: unary calls, as grpcio's callers know them.

A call's answer is read by the thread that waits for it. What becomes of a call is decided once, by
whoever takes its token: its answer, its deadline, a cancellation or the end of the line.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
import weakref
from collections.abc import Callable
from functools import partial
from types import TracebackType
from typing import Any

import grpc

from tensorwire.memory import Node, Peer, Region, RemoteRegion

from ..janitor import JANITOR
from .callbacks import Callbacks
from .deadlines import DEADLINES, Deadline
from .frames import (
    CANCEL,
    END,
    GOAWAY,
    HEAD,
    MESSAGE,
    MORE,
    NO_DEADLINE,
    REFUSED,
    WHOLE,
    Frame,
    FrameError,
    Metadata,
    Number,
    call_frames,
    parse_end,
    parse_head,
    short_frame,
)
from .line import Line, SharedReader, Waiter
from .options import MessageLimits

_LOG = logging.getLogger("tensorwire.rpc")
_LOOK_S = 0.005
_CODES = {code.value[0]: code for code in grpc.StatusCode}


class RuntimeCall(Waiter, grpc.RpcError, grpc.Call, grpc.Future):  # type: ignore[misc]
    """A unary call: what `future` and `with_call` give back, and what is raised where it failed.

    Args:
        client: whose call it is.
        number: of the call.
        deadline: of time.monotonic, None if it has none.
        deserialize: makes the response of bytes.
        ended: told once how the call has ended: its code, None if it was not carried out.
        again: makes the call by grpcio, and gives back its future, if the server refuses to carry
            it out here. None: whoever waits for it does that, see `refused`.

    Attributes:
        refused: it has ended because the server refuses to carry it out here.
    """

    def __init__(
        self,
        client: RuntimeClient,
        number: Number,
        deadline: float | None,
        deserialize: Callable[[bytes], Any],
        ended: Callable[[grpc.StatusCode | None], None],
        again: Callable[[], Any] | None = None,
    ) -> None:
        super().__init__()
        self.number = number
        self.refused = False
        self._client = client
        self._deadline = deadline
        self._deserialize = deserialize
        self._ended: Callable[[grpc.StatusCode | None], None] | None = ended
        self._again = again
        self._second: Any = None
        self._token = [True]
        self._pieces: list[bytes] = []
        self._bytes = 0
        self._initial: Metadata | None = None
        self._trailing: Metadata = ()
        self._code: grpc.StatusCode | None = None
        self._details = ""
        self._response: Any = None
        self._cancelled = False
        self._callbacks: list[Callable[[], None]] | None = []
        self._alarm: Deadline | None = None
        self._unattended = False

    # What arrives.

    def head(self, initial: Metadata) -> None:
        """Initial metadata came ahead."""
        if self._initial is None:
            self._initial = initial

    def piece(self, data: bytes) -> bool:
        """A piece of the response; False if it is longer than it may be, which ends the call."""
        self._bytes += len(data)
        most = self._client.limits.receive_bytes
        if 0 <= most < self._bytes:
            self.end_here(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                f"CLIENT: Received message larger than max ({self._bytes} vs. {most})",
            )
            return False
        self._pieces.append(data)
        return True

    def answered(self, frame: Frame) -> None:
        """The server has ended the call."""
        if frame.flags & REFUSED:
            self._refused()
            return
        body = parse_end(frame.body)
        code = _CODES.get(body.code)
        details = body.details
        if code is None:
            code, details = grpc.StatusCode.UNKNOWN, f"the server sent the unknown code {body.code}"
        if frame.flags & WHOLE and not self.piece(body.piece):
            return
        response = None
        if code is grpc.StatusCode.OK:
            if not frame.flags & WHOLE:
                code, details = grpc.StatusCode.INTERNAL, "the server sent no response"
            else:
                pieces = self._pieces
                data = pieces[0] if len(pieces) == 1 else b"".join(pieces)
                try:
                    response = self._deserialize(data)
                except Exception:
                    _LOG.exception("a response could not be deserialized")
                if response is None:
                    code = grpc.StatusCode.INTERNAL
                    details = "Exception deserializing response!"
        self.conclude(code, details, body.initial, body.trailing, response)

    def conclude(
        self,
        code: grpc.StatusCode,
        details: str,
        initial: Metadata = (),
        trailing: Metadata = (),
        response: Any = None,
        *,
        cancelled: bool = False,
    ) -> bool:
        """Ends the call; False if it had ended."""
        try:
            self._token.pop()
        except IndexError:
            return False
        self._client.forget(self)
        if self._initial is None:
            self._initial = initial
        self._trailing, self._response, self._cancelled = trailing, response, cancelled
        self._details = details
        self._pieces = []
        if self._alarm is not None:
            self._alarm.action = None
        self._tell(code)
        self._code = code
        with self._client.mutex:
            callbacks, self._callbacks = self._callbacks, None
        self.finish()
        self._client.unkeep(self)
        if self._unattended:
            self._client.reader.unwatch()
        if callbacks:
            self._client.callbacks.call(callbacks)
        return True

    def _tell(self, code: grpc.StatusCode | None) -> None:
        ended, self._ended = self._ended, None
        if ended is not None:
            ended(code)

    def _refused(self) -> None:
        if self._again is not None:
            self._client.forget(self)
            self._tell(None)
            self._client.callbacks.call([self._make_again])
            return
        try:
            self._token.pop()
        except IndexError:
            return
        self._client.forget(self)
        self._tell(None)
        self.refused = True
        self.finish()

    def _make_again(self) -> None:
        assert self._again is not None
        try:
            second = self._again()
        except Exception as error:
            self.conclude(grpc.StatusCode.UNAVAILABLE, f"the channel is closed: {error}")
            return
        self._second = second
        if self._token:
            second.add_done_callback(self._take_over)
        else:
            second.cancel()

    def _take_over(self, second: Any) -> None:
        code = second.code()
        response = second.result() if code is grpc.StatusCode.OK else None
        self.conclude(
            code,
            second.details(),
            second.initial_metadata(),
            second.trailing_metadata(),
            response,
            cancelled=second.cancelled(),
        )

    def end_here(self, code: grpc.StatusCode, details: str, *, cancelled: bool = False) -> bool:
        """Ends the call at this end, and tells the server."""
        if not self.conclude(code, details, cancelled=cancelled):
            return False
        if self._second is not None:
            self._second.cancel()
            return True
        self._client.line.send((short_frame(CANCEL, self.number),))
        return True

    def deadline_passed(self) -> None:
        """Ends the call because its time is over."""
        self.end_here(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded")

    def leave_unattended(self) -> None:
        """Lets it end though nobody waits for it. To be called before it begins."""
        self._unattended = True
        self._client.reader.watch()
        if self._deadline is not None:
            late = weakref.WeakMethod(self.deadline_passed)
            self._alarm = DEADLINES.add(self._deadline, partial(_call_weakly, late))

    def __del__(self) -> None:
        # As in grpcio, a call that is forgotten is cancelled. Not in this thread, which may be
        # anywhere, with any lock.
        if self._token:
            JANITOR.soon(self.cancel)

    def wait(self, timeout_s: float | None = None, *, blocking: bool = False) -> bool:
        """Waits until it has ended; True if it has.

        Args:
            timeout_s: None waits for ever.
            blocking: this is the only thread that has the call.
        """
        until = None if timeout_s is None else time.monotonic() + timeout_s
        return self._client.reader.wait(self, until, whole=blocking)

    def wait_blocking(self) -> bool:
        """Waits for a call that nobody else has, until its deadline at most.

        Returns:
            False: it has to be made by grpcio, because the server refuses to carry it out here.
        """
        try:
            if not self._client.reader.wait(self, self._deadline, whole=True):
                self.deadline_passed()
                while not self.finished:  # it is ending at this moment
                    self.wait(1.0)
        except BaseException:
            self.end_here(grpc.StatusCode.CANCELLED, "the caller was interrupted", cancelled=True)
            raise
        return not self.refused

    # grpc.RpcContext, grpc.Call

    def is_active(self) -> bool:
        return self._code is None

    def time_remaining(self) -> float | None:
        return None if self._deadline is None else max(self._deadline - time.monotonic(), 0.0)

    def add_callback(self, callback: Callable[[], None]) -> bool:
        with self._client.mutex:
            if self._callbacks is None:
                return False
            self._callbacks.append(callback)
        self._client.keep(self)  # until it has been called
        return True

    def initial_metadata(self) -> Any:
        while self._initial is None and not self.finished:
            self.wait(_LOOK_S)
        return self._initial

    def trailing_metadata(self) -> Any:
        self.wait()
        return self._trailing

    def code(self) -> Any:
        self.wait()
        return self._code

    def details(self) -> Any:
        self.wait()
        return self._details

    def debug_error_string(self) -> str:
        """What grpcio's objects have too: the status once more."""
        self.wait()
        return f"tensorwire: {self._details}"

    # grpc.Future

    def cancel(self) -> bool:
        return self.end_here(
            grpc.StatusCode.CANCELLED, "Locally cancelled by application!", cancelled=True
        )

    def cancelled(self) -> bool:
        return self._cancelled

    def running(self) -> bool:
        return self._code is None

    def done(self) -> bool:
        return self._code is not None

    def _outcome(self, timeout: float | None) -> Any:
        if not self.finished and not self.wait(timeout):
            raise grpc.FutureTimeoutError()
        if self._cancelled:
            raise grpc.FutureCancelledError()
        return None if self._code is grpc.StatusCode.OK else self

    def result(self, timeout: float | None = None) -> Any:
        error = self._outcome(timeout)
        if error is None:
            return self._response
        raise error

    def exception(self, timeout: float | None = None) -> Any:
        return self._outcome(timeout)

    def traceback(self, timeout: float | None = None) -> TracebackType | None:
        error = self._outcome(timeout)
        if error is None:
            return None
        try:
            raise error
        except grpc.RpcError:
            return sys.exc_info()[2]

    def add_done_callback(self, fn: Callable[[Any], None]) -> None:
        if not self.add_callback(partial(fn, self)):
            fn(self)

    def __repr__(self) -> str:
        if self._code is None:
            return f"<{type(self).__name__} object>"
        text = f"<{type(self).__name__} of RPC that terminated with:\n\tstatus = {self._code}\n"
        return f'{text}\tdetails = "{self._details}"\n>'

    __str__ = __repr__


def _call_weakly(method: weakref.WeakMethod[Callable[[], None]]) -> None:
    if (strong := method()) is not None:
        strong()


class RuntimeClient:
    """The client's end of a line. Any thread may use it.

    Attributes:
        line, reader: of the calls.
        limits: of messages.
        mutex: guards lists of callbacks.
        callbacks: the thread that calls them.

    Args:
        node, memory, other, peer: as for `Line`.
        limits: of messages.
    """

    def __init__(
        self, node: Node, memory: Region, other: RemoteRegion, peer: Peer, limits: MessageLimits
    ) -> None:
        self.line = Line(node, memory, other, peer, self)
        self.reader = SharedReader(self.line)
        self.limits = limits
        self.mutex = threading.Lock()
        self._calls: dict[int, weakref.ref[RuntimeCall]] = {}
        self._kept: dict[int, RuntimeCall] = {}
        self._going_away = False
        self._closed = False
        self.callbacks = Callbacks()

    @property
    def usable(self) -> bool:
        """Calls can begin here."""
        return not (self._going_away or self.line.is_over)

    def begin(self, call: RuntimeCall, method: bytes, metadata: Metadata, message: bytes) -> None:
        """Sends a call and its request."""
        self._calls[call.number[0]] = weakref.ref(call)
        left = call.time_remaining()
        timeout_us = NO_DEADLINE if left is None else min(int(left * 1e6), NO_DEADLINE - 1)
        most = self.limits.send_bytes
        if 0 <= most < len(message):
            call.conclude(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                f"CLIENT: Sent message larger than max ({len(message)} vs. {most})",
            )
            return
        self.line.send(call_frames(call.number, method, timeout_us, metadata, message))
        if self.line.is_over:  # and has perhaps not seen this call
            call.conclude(grpc.StatusCode.UNAVAILABLE, "the connection is over")

    def forget(self, call: RuntimeCall) -> None:
        """A call has ended, or goes on by grpcio; its slot may be that of another one by now."""
        known = self._calls.get(call.number[0])
        if known is not None and known() in (call, None):
            self._calls.pop(call.number[0], None)

    def keep(self, call: RuntimeCall) -> None:
        """A call goes on though its caller may forget it."""
        self._kept[id(call)] = call
        if call.finished:
            self.unkeep(call)

    def unkeep(self, call: RuntimeCall) -> None:
        """A call has ended, after `finish`."""
        if self._kept:
            self._kept.pop(id(call), None)

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
        elif frame.kind == MESSAGE and frame.flags == MORE:
            call.piece(frame.body)
        elif frame.kind == HEAD:
            call.head(parse_head(frame.body))
        else:
            raise FrameError(f"a frame of kind {frame.kind} to a client")

    def over(self, reason: str) -> None:
        """See `LineEnd`."""
        for known in list(self._calls.values()):
            call = known()
            if call is None:
                continue
            if self._closed:
                call.conclude(grpc.StatusCode.CANCELLED, "Channel closed!")
            else:
                call.conclude(grpc.StatusCode.UNAVAILABLE, reason)
        self.reader.stop()
        self.callbacks.stop()

    def close(self, *, lost: bool) -> None:
        """Ends all calls; calling it again does nothing.

        Args:
            lost: the server is gone, and not this channel closed.
        """
        self._closed = not lost
        self.line.end("the server is gone" if lost else "the channel is closed")
