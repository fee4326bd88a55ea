"""Implements calls of a client on a line with the interface of grpcio.

An answer is read by the thread that waits for it. What becomes of a call is decided once, by what
ends it first: its answer, its deadline, a cancellation or the end of the line.
"""

from __future__ import annotations

import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from types import TracebackType
from typing import Any, Protocol

import grpc

from .. import logs
from ..payload.envelope import MAGIC
from ..payload.janitor import JANITOR
from .callbacks import Callbacks
from .deadlines import DEADLINES, Deadline
from .flow import Outflow, Waiter
from .frames import (
    CANCEL,
    MORE,
    PLAIN_END,
    REFUSED,
    WHOLE,
    EndBody,
    Frame,
    FrameError,
    Metadata,
    Number,
    parse_end,
    short_frame,
)
from .line import SharedReader
from .options import MessageLimits
from .outcome import NoResponse, failure_of, status_of

_LOOK_S = 0.005
_LARGE_BYTES = 1 << 16
"""Of a response whose making holds up others too long, as does one that travelled beside."""
PLAIN_END_BYTES = len(PLAIN_END)
_PLAIN_BODY = EndBody(0, "", (), (), b"")
_OK = grpc.StatusCode.OK
TIME_IS_OVER = "Deadline Exceeded"
"""The details of a call that has met its deadline, as grpcio writes them."""
_ENDED: dict[int, object] = {0: None}


class ClientEnd(Protocol):
    """What calls need of their client.

    Attributes:
        reader: lets them wait.
        limits: of messages.
        mutex: guards lists of callbacks.
        callbacks: the thread that calls them.
    """

    reader: SharedReader
    limits: MessageLimits
    mutex: threading.RLock
    callbacks: Callbacks

    def send(self, frames: Sequence[bytes]) -> None:
        """Sends frames; nobody waits for it."""

    def forget(self, call: RuntimeCall) -> None:
        """A call has ended, or goes on by grpcio."""

    def keep(self, call: RuntimeCall) -> None:
        """A call goes on though its caller may forget it; sets its `kept`, so `unkeep` follows."""

    def unkeep(self, call: RuntimeCall) -> None:
        """A call has ended, after `finish`."""


class RuntimeCall(Waiter, grpc.RpcError, grpc.Call, grpc.Future):  # type: ignore[misc]
    """A call with one response: what `future` and `with_call` give back, and what is raised.

    Args:
        client: whose call it is.
        number: of the call.
        deadline: of time.monotonic, None if it has none.
        deserialize: makes the response of bytes.
        ended: told once how the call has ended: its code, None if it was not carried out.
        again: makes the call by grpcio, and gives back its future, if the server refuses to carry
            it out here. None: whoever waits for it does that, see `refused`.
        outflow: of its requests, if they are a stream.

    Attributes:
        number, deadline, outflow: as given.
        kept: its client keeps it, until it has ended.
        refused: it has ended because the server refuses to carry it out here.
    """

    # What is so at first stands here: a small call takes little longer than to set all of it.
    finished = False
    kept = False
    refused = False
    _endings: dict[int, object] = _ENDED  # of one that could not be made
    _second: Any = None
    _bytes = 0
    _whole = False
    _has_ended = False
    _forgotten = False
    _initial: Metadata | None = None
    _trailing: Metadata = ()
    _code: grpc.StatusCode | None = None
    _details = ""
    _response: Any = None
    _cancelled = False
    _alarm: Deadline | None = None
    _unattended = False
    _hurries = False

    def __init__(
        self,
        client: ClientEnd,
        number: Number,
        deadline: float | None,
        deserialize: Callable[[bytes], Any],
        ended: Callable[[grpc.StatusCode | None], None],
        again: Callable[[], Any] | None = None,
        outflow: Outflow | None = None,
    ) -> None:
        self.args = ()  # as of an exception, which has all of the above in it
        self.latches = []
        self.number = number
        self.outflow = outflow
        self._client = client
        self.deadline = deadline
        self._deserialize = deserialize
        self._ended: Callable[[grpc.StatusCode | None], None] | None = ended
        self._again = again
        self._endings: dict[int, object] = {}  # at most one; it is that of who ends the call
        self._pieces: list[bytes] = []
        self._callbacks: list[Callable[[], None]] | None = []

    # What arrives.

    def head(self, initial: Metadata) -> None:
        """Initial metadata came ahead."""
        if self._initial is None:
            self._initial = initial

    def message(self, frame: Frame) -> None:
        """A piece of the response came ahead of the end."""
        if frame.flags not in (MORE, WHOLE):
            raise FrameError(f"a piece of a response with the flags {frame.flags}")
        if self._whole:
            return  # of one response too many, which grpcio does not look at either
        self._piece(frame.body)
        self._whole = frame.flags == WHOLE

    def _piece(self, data: bytes) -> bool:
        """A piece of the response; False if it is longer than it may be, which ends the call."""
        self._bytes += len(data)
        if 0 <= self._client.limits.receive_bytes < self._bytes:
            self._too_long(self._bytes)
            return False
        self._pieces.append(data)
        return True

    def _too_long(self, size: int) -> None:
        self.end_here(*self._excess(size))

    def _excess(self, size: int) -> NoResponse:
        most = self._client.limits.receive_bytes
        text = f"CLIENT: Received message larger than max ({size} vs. {most})"
        return NoResponse(grpc.StatusCode.RESOURCE_EXHAUSTED, text)

    def granted(self, size_bytes: int) -> None:
        """The server has taken so much of the requests."""
        if self.outflow is not None:
            self.outflow.grant(size_bytes)

    def answered(self, frame: Frame) -> None:
        """The server has ended the call."""
        if frame.flags == WHOLE and not self._pieces and self._answered_plainly(frame.body):
            return
        if frame.flags & REFUSED:
            self._refused()
            return
        body = parse_end(frame.body)
        code, details = status_of(body)
        if frame.flags & WHOLE and not self._whole:
            if not self._piece(body.piece):
                return
            self._whole = True
        if code is grpc.StatusCode.OK and self._whole:
            if self._has_ended:
                raise FrameError("an end behind the end of a call")
            self._has_ended = True
            reader, beside = self._client.reader, self._pieces[0].startswith(MAGIC)
            if not beside:
                self._client.forget(self)  # what becomes of the server changes nothing any more
                self._forgotten = True
            if beside or self._bytes >= _LARGE_BYTES:
                reader.leave(self, partial(self._make, body), attended=not self._unattended)
            else:
                reader.aside(self._make, body)
            return
        if code is grpc.StatusCode.OK:
            code, details = grpc.StatusCode.INTERNAL, "the server sent no response"
        self.conclude(code, details, body.initial, body.trailing)

    def _answered_plainly(self, body: bytes) -> bool:
        """Ends the call, if it is the end of nearly all small ones: OK, a response, and no more."""
        if self._whole or len(body) >= _LARGE_BYTES or not body.startswith(PLAIN_END):
            return False
        most = self._client.limits.receive_bytes
        if body.startswith(MAGIC, PLAIN_END_BYTES) or 0 <= most < len(body) - PLAIN_END_BYTES:
            return False
        self._has_ended = self._whole = self._forgotten = True
        self._client.forget(self)  # what becomes of the server changes nothing any more
        self._pieces = [body[PLAIN_END_BYTES:]]
        self._client.reader.aside(self._make, _PLAIN_BODY)
        return True

    def _make(self, body: EndBody) -> None:
        """Ends the call with its response, once that is had."""
        pieces = self._pieces
        if not pieces:  # it has ended otherwise
            return
        try:
            response = self._message_of(pieces[0] if len(pieces) == 1 else b"".join(pieces))
            code, details = _OK, body.details
            if isinstance(response, NoResponse):
                (code, details), response = response, None
            self.conclude(code, details, body.initial, body.trailing, response)
        except BaseException:
            self.end_here(grpc.StatusCode.CANCELLED, "the thread was interrupted", cancelled=True)
            raise

    def _message_of(self, data: bytes) -> Any:
        """The user's response, or a `NoResponse`."""
        response = None
        try:
            response = self._deserialize(data)
        except Exception as error:
            if (failure := failure_of(error)) is not None:
                return failure
            logs.COMMON.exception("Exception deserializing message!")
        if response is None:
            return NoResponse(grpc.StatusCode.INTERNAL, "Exception deserializing response!")
        return response

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
        """Ends the call; False if it had ended. What interrupts that comes behind the end."""
        ending = code, details, initial, trailing, response, cancelled
        try:
            if self._endings.setdefault(0, ending) is not ending:
                return False
            self._conclude(*ending)
        except BaseException:
            if self._endings.get(0) is ending:
                self._conclude(*ending)  # what was done already is not done again
            raise
        return True

    def _conclude(
        self,
        code: grpc.StatusCode,
        details: str,
        initial: Metadata,
        trailing: Metadata,
        response: Any,
        cancelled: bool,
    ) -> None:
        if not self._forgotten:
            self._client.forget(self)
        if self._initial is None:
            self._initial = initial
        self._trailing, self._response, self._cancelled = trailing, response, cancelled
        self._details = details
        self._pieces = []
        # It may be kept for long; the request and the channel are not.
        self._again, self._deserialize = None, _nothing
        if self._alarm is not None:
            self._alarm.action = None
        self._stop_messages()
        ended, self._ended = self._ended, None
        if ended is not None:
            ended(code)
        self._code = code
        with self._client.mutex:
            callbacks, self._callbacks = self._callbacks, None
        self.finish()
        if self.kept:
            self._client.unkeep(self)
        if self._unattended:
            self._unattended = False
            self._client.reader.unwatch()
            if self._hurries:
                self._client.reader.unhurry()
        if callbacks:
            self._client.callbacks.call(callbacks)

    def _stop_messages(self) -> None:
        """The call has ended: nobody waits for messages, nor to send them, any more."""
        if self.outflow is not None:
            self.outflow.close()

    def _tell(self, code: grpc.StatusCode | None) -> None:
        ended, self._ended = self._ended, None
        if ended is not None:
            ended(code)

    def _refused(self) -> None:
        if self.outflow is not None:  # requests cannot be sent again
            self.conclude(grpc.StatusCode.UNAVAILABLE, "the server refuses the call")
            return
        if self._again is not None:
            self._client.forget(self)
            self._tell(None)
            self._client.callbacks.call([self._make_again])
            return
        mine = object()
        if self._endings.setdefault(0, mine) is not mine:
            return
        self._client.forget(self)
        self._tell(None)
        self.refused = True
        self.finish()

    def _make_again(self) -> None:
        again, self._again = self._again, None
        if again is None:  # it has ended meanwhile
            return
        try:
            second = again()
        except Exception as error:
            self.conclude(grpc.StatusCode.UNAVAILABLE, f"the channel is closed: {error}")
            return
        self._second = second
        if not self._endings:
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
        self._client.send((short_frame(CANCEL, self.number),))
        return True

    def sends_again(self, again: Callable[[], Any]) -> None:
        """See `again`. To be called before it begins."""
        self._again = again

    def leave_to_grpcio(self) -> None:
        """It has not begun, and will not."""
        if not self._endings:
            self._endings[0] = None
            self._tell(None)

    def deadline_passed(self) -> None:
        """Ends the call because its time is over."""
        self.end_here(grpc.StatusCode.DEADLINE_EXCEEDED, TIME_IS_OVER)

    def leave_unattended(self) -> None:
        """Lets it end though nobody waits for it. To be called before it begins."""
        self._unattended = True
        self._client.reader.watch()
        if self.deadline is not None:
            late = weakref.WeakMethod(self.deadline_passed)
            self._alarm = DEADLINES.add(self.deadline, partial(call_weakly, late))

    def __del__(self) -> None:
        # As in grpcio, a call that is forgotten is cancelled. Not in this thread, which may be
        # anywhere, with any lock.
        if not self._endings:
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
            # Whoever sends the requests may end it too.
            whole = self.outflow is None
            if not self._client.reader.wait(self, self.deadline, whole=whole):
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
        return None if self.deadline is None else max(self.deadline - time.monotonic(), 0.0)

    def add_callback(self, callback: Callable[[], None]) -> bool:
        with self._client.mutex:
            if self._callbacks is None:
                return False
            self._callbacks.append(callback)
            hurries = self._unattended and not self._hurries
            self._hurries = self._hurries or hurries
            if hurries:  # nobody is to wait for it
                self._client.reader.hurry()
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
        return "" if self._code is grpc.StatusCode.OK else f"tensorwire: {self._details}"

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
        if self.finished and self._code is _OK:
            return self._response
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


def _nothing(data: bytes) -> None:
    """What is made of a response to a call that has ended."""


def call_weakly(method: weakref.WeakMethod[Callable[[], Any]]) -> None:
    """Calls a method of an object that is still there."""
    if (strong := method()) is not None:
        strong()
