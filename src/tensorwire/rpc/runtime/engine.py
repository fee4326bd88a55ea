"""Keeps the protocol of a client's call, without I/O: the frames that may arrive, and its end.

Frames that arrive change the state of a call, which may send some in turn. Knows neither threads
nor event loops: `call.py` has calls that threads wait for, and `asyncio/runtime_client.py` those
that tasks wait for. A call ends once, by the first of these: its answer, its deadline, a
cancellation or the end of the line.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import grpc

from .. import logs
from ..payload.attachment import RpcAttachment
from ..payload.envelope import MAGIC
from ..payload.inbox import GivenUpError, RefusedError, SenderGoneError
from ..payload.janitor import JANITOR
from ..payload.outgoing import CallLink, always, no_deadline
from ..payload.threads import Alarm, CallBack
from . import frames
from .flow import Inflow, Outflow, TooLongError, Waiter
from .frames import MORE, PLAIN_END, WHOLE, EndBody, Frame, FrameError, Metadata, Number
from .options import MessageLimits

PLAIN_END_BYTES = len(PLAIN_END)
TIME_IS_OVER = "Deadline Exceeded"
"""The details of a call that has met its deadline, as grpcio writes them."""
LOCALLY = "Locally cancelled by application!"

_Code = grpc.StatusCode
_CODES = {code.value[0]: code for code in _Code}
_OK = _Code.OK
_LARGE_BYTES = 1 << 16
"""The size from which a response, like one with payload beside it, is made in another thread."""


class Ending(NamedTuple):
    """How a call ends, as its client sees it.

    Attributes:
        code: None while it goes on, and of one that the server refuses to carry out here.
        details: of the status.
        initial, trailing: metadata; initial ones that came ahead of the end count.
        response: the user's, of a call that has one.
        cancelled: it was cancelled here.
    """

    code: Any
    details: str
    initial: Metadata = ()
    trailing: Metadata = ()
    response: Any = None
    cancelled: bool = False


def cancelled(details: str) -> Ending:
    """Returns the ending of a call that is cancelled here."""
    return Ending(_Code.CANCELLED, details, cancelled=True)


_new = tuple.__new__  # takes less time than the class itself
GOES_ON = Ending(None, "")
OVERDUE = Ending(_Code.DEADLINE_EXCEEDED, TIME_IS_OVER)
_PLAIN_BODY = EndBody(0, "", (), (), b"")
_NOT_READ = Ending(_Code.INTERNAL, "Exception deserializing response!")
_ENDED: dict[int, object] = {0: None}


class CallClient(Protocol):
    """The client of a call, as the call sees it.

    Attributes:
        limits: of messages.
        mutex: guards lists of callbacks.
        call_back: calls them.
    """

    limits: MessageLimits
    mutex: threading.RLock
    call_back: CallBack

    def send(self, frames: Sequence[bytes]) -> None:
        """Sends frames, without waiting."""

    def forget(self, call: Any) -> None:
        """Forgets a call that has ended, or goes on by grpcio."""

    def keep(self, call: Any) -> None:
        """Keeps a call though its caller may forget it; sets its `kept`, so `unkeep` follows."""

    def unkeep(self, call: Any) -> None:
        """Lets go of a kept call that has ended, after `finish`."""


class CallState(Waiter):
    """The state of a call with one response.

    Args:
        client: whose call it is.
        number: of the call.
        deadline: of time.monotonic, None if it has none.
        deserialize: makes a response of bytes and of the call.
        ended: told once, with the call, how it has ended: its code, None if it was not carried out.
        outflow: of its requests, if they are a stream.

    Attributes:
        number, deadline, outflow: as given.
        attachment: of the channel; set before the call begins.
        streams: it takes any number of responses.
        owner: the channel that has begun it.
        kept: its client keeps it, until it has ended.
        unparsed: the response in the place of one that cannot be deserialized; an `Ending` ends the
            call.
        traced, began_ns: count its messages, and when it began; None if calls are not counted.
        known_link: the result of `link`; None: it was not needed.
        watched: no thread waits for it, so another one reads for it until it ends.
    """

    # Defaults are the class's: setting them all would take nearly as long as a small call.
    streams = False
    finished = False
    owner: object = None
    kept = False
    unparsed: Any = _NOT_READ
    attachment: RpcAttachment
    traced: Any = None
    began_ns = 0
    known_link: CallLink | None = None
    _client: Any
    _endings: dict[int, object] = _ENDED  # of one that could not be made
    _ending = GOES_ON
    _bytes = 0
    _whole = False
    _has_ended = False
    _forgotten = False
    _initial: Metadata | None = None
    _alarm: Alarm | None = None
    watched = False

    def __init__(
        self,
        client: CallClient,
        number: Number,
        deadline: float | None,
        deserialize: Callable[[bytes, Any], Any],
        ended: Callable[[Any, grpc.StatusCode | None], None],
        outflow: Outflow | None = None,
    ) -> None:
        self.args: Any = ()  # the arguments of an exception would keep all of the above
        self.latches = []
        self.number = number
        self.outflow = outflow
        self._client = client
        self.deadline = deadline
        self._deserialize = deserialize
        self._ended: Callable[[Any, grpc.StatusCode | None], None] | None = ended
        self._endings: dict[int, object] = {}  # at most one; the first one set ends the call
        self._pieces: list[bytes] = []
        self._callbacks: list[Callable[[], None]] | None = []

    def __del__(self) -> None:
        # As in grpcio, a call that is forgotten is cancelled. Not in this thread, which may be
        # anywhere, with any lock.
        if not self._endings:
            JANITOR.soon(self.cancel)

    def link(self) -> CallLink:
        """Returns the link for payload that travels beside the call, or may."""
        link = self.known_link
        if link is None:
            remaining = no_deadline if self.deadline is None else partial(_left, self.deadline)
            link = CallLink(self.attachment, self.number, remaining, always)
            link.by_runtime = True
            self.known_link = link
            if self._endings:  # perhaps by a thread that has not seen it
                link.ended = True
        return link

    # What arrives.

    def head(self, initial: Metadata) -> None:
        """Takes initial metadata that came ahead."""
        if self._initial is None:
            self._initial = initial

    def message(self, frame: Frame) -> None:
        """Adds a piece of the response that came ahead of the end."""
        if frame.flags not in (MORE, WHOLE):
            raise FrameError(f"a part of a response has flags {frame.flags}, which are unknown")
        if self._whole:
            return  # of one response too many, which grpcio does not look at either
        self._piece(frame.body)
        self._whole = frame.flags == WHOLE

    def _piece(self, data: bytes) -> bool:
        """Adds a piece of the response; False if that is too long, which ends the call."""
        self._bytes += len(data)
        if 0 <= self._client.limits.receive_bytes < self._bytes:
            self._too_long(self._bytes)
            return False
        self._pieces.append(data)
        return True

    def _too_long(self, size: int) -> None:
        self.end_here(self._excess(size))

    def _excess(self, size: int) -> Ending:
        most = self._client.limits.receive_bytes
        text = f"CLIENT: Received message larger than max ({size} vs. {most})"
        return Ending(_Code.RESOURCE_EXHAUSTED, text)

    def granted(self, size_bytes: int) -> None:
        """Opens the window of the requests by the bytes that the server has taken."""
        if self.outflow is not None:
            self.outflow.grant(size_bytes)

    def answered(self, frame: Frame) -> None:
        """Ends the call as the server says."""
        data = frame.body
        if (
            frame.flags == WHOLE
            and data.startswith(PLAIN_END)
            and len(data) < _LARGE_BYTES
            and not (self._pieces or self._whole or data.startswith(MAGIC, PLAIN_END_BYTES))
            and not 0 <= self._client.limits.receive_bytes < len(data) - PLAIN_END_BYTES
        ):  # the end of nearly all small calls: OK, a response, and no more
            self._has_ended = self._whole = self._forgotten = True
            self._client.forget(self)  # the fate of the server changes nothing any more
            self._pieces = [data[PLAIN_END_BYTES:]]
            self._make_soon(_PLAIN_BODY, large=False)
            return
        if frame.flags & frames.REFUSED:
            self._refused()
            return
        body = frames.parse_end(data)
        code, details = status_of(body)
        if frame.flags & WHOLE and not self._whole:
            if not self._piece(body.piece):
                return
            self._whole = True
        if code is _OK and self._whole:
            if self._has_ended:
                raise FrameError("a call was ended twice")
            self._has_ended = True
            beside = self._pieces[0].startswith(MAGIC)
            if not beside:
                self._client.forget(self)  # the fate of the server changes nothing any more
                self._forgotten = True
            self._make_soon(body, large=beside or self._bytes >= _LARGE_BYTES)
            return
        if code is _OK:
            code, details = _Code.INTERNAL, "the server sent no response"
        self.conclude(Ending(code, details, body.initial, body.trailing))

    def _make_soon(self, body: EndBody, *, large: bool) -> None:
        """Calls `_make` where a user's code may run, soon; a large response takes its time."""
        raise NotImplementedError

    def _make(self, body: EndBody) -> None:
        """Ends the call with its response, once that is made."""
        if not self._pieces:  # it has ended otherwise
            return
        try:
            self._conclude_with(body, self._message_of(b"".join(self._pieces)))
        except BaseException:
            self.end_here(cancelled("the thread was interrupted"))
            raise

    def _conclude_with(self, body: EndBody, response: Any) -> None:
        """Ends the call with the given response, or with an `Ending` in its place."""
        if isinstance(response, Ending):
            ending = response._replace(initial=body.initial, trailing=body.trailing)
        else:
            values = _OK, body.details, body.initial, body.trailing, response, False
            ending = _new(Ending, values)
        self.conclude(ending)

    def _message_of(self, data: bytes) -> Any:
        """Returns the user's response, or how the call ends without one."""
        response = None
        try:
            if self.traced is None:
                response = self._deserialize(data, self)
            else:
                response = self.traced.deserialize(
                    lambda data: self._deserialize(data, self), data, protocol="runtime"
                )
        except Exception as error:
            if isinstance(error, GivenUpError):  # unless the call has ended already
                return OVERDUE
            if isinstance(error, SenderGoneError):
                return Ending(_Code.UNAVAILABLE, str(error))
            logs.COMMON.exception("Exception deserializing message!")
            if isinstance(error, RefusedError):
                return _NOT_READ
        return self.unparsed if response is None else response

    # How it ends.

    def conclude(self, ending: Ending) -> bool:
        """Ends the call; False if it had ended. An interruption is raised after the end."""
        try:
            if self._endings.setdefault(0, ending) is not ending:
                return False
            self._conclude(ending)
        except BaseException:
            if self._endings.get(0) is ending:
                self._conclude(ending)  # the steps that were done already are not done again
            raise
        return True

    def _conclude(self, ending: Ending) -> None:
        if not self._forgotten:
            self._client.forget(self)
        if self._initial is None:
            self._initial = ending.initial
        self._pieces = []
        self._let_go()
        ended, self._ended = self._ended, None
        if ended is not None:
            ended(self, ending.code)
        self._ending = ending
        with self._client.mutex:
            callbacks, self._callbacks = self._callbacks, None
        self.finish()
        if self.kept:
            self._client.unkeep(self)
        if callbacks:
            self._client.call_back(callbacks)

    def _let_go(self) -> None:
        """Releases, after the end, all that only a call that goes on needs."""
        self._deserialize = _nothing
        if self.watched:
            self.watched = False
            self._stop_watching()
        if self._alarm is not None:
            self._alarm.cancel()
        if self.outflow is not None:
            self.outflow.close()

    def _stop_watching(self) -> None:
        """Stops the reading that goes on while the call is `watched`."""
        raise NotImplementedError

    def _tell(self, code: grpc.StatusCode | None) -> None:
        ended, self._ended = self._ended, None
        if ended is not None:
            ended(self, code)

    def _refused(self) -> None:
        """Ends a call that the server has refused; its caller makes it by grpcio if it can."""
        if self.outflow is not None:  # requests cannot be sent again
            self.conclude(Ending(_Code.UNAVAILABLE, "the server refuses the call"))
            return
        self.conclude(Ending(None, ""))

    def end_here(self, ending: Ending) -> bool:
        """Ends the call at this end, and tells the server; False if it had ended."""
        if not self.conclude(ending):
            return False
        self._client.send((frames.short_frame(frames.CANCEL, self.number),))
        return True

    def leave_to_grpcio(self) -> None:
        """Marks a call as not begun: grpcio makes it."""
        if not self._endings:
            self._endings[0] = None
            self._tell(None)

    def set_alarm(self, new: Callable[[float, Callable[[], object]], Alarm]) -> None:
        """Sets an alarm that ends the call at its deadline, unless it was forgotten.

        Args:
            new: arranges that a function is called at a time of time.monotonic.
        """
        if self.deadline is not None:
            late = weakref.WeakMethod(self.deadline_passed)
            self._alarm = new(self.deadline, lambda: call_weakly(late))

    def deadline_passed(self) -> None:
        """Ends the call because its time is over."""
        self.end_here(OVERDUE)

    # Methods that are equal in both worlds.

    def cancel(self) -> bool:
        """Ends the call; False if it had ended."""
        return self.end_here(cancelled(LOCALLY))

    def done(self) -> bool:
        """Returns whether the call has ended; False too if it was refused."""
        return self._ending.code is not None

    def time_remaining(self) -> float | None:
        """Returns the seconds to the deadline, None if there is none."""
        return None if self.deadline is None else max(self.deadline - time.monotonic(), 0.0)

    def _error_string(self) -> str:
        """Returns the status once more as text, for `debug_error_string` of grpcio's objects."""
        return "" if self._ending.code is _OK else f"tensorwire: {self._ending.details}"


class StreamState(CallState):
    """The state of a call with a stream of responses.

    Args: as of `CallState`.
    """

    streams = True
    _end: Ending | None = None

    def __init__(self, client: CallClient, *given: Any, **named: Any) -> None:
        super().__init__(client, *given, **named)
        self._inflow = Inflow(client.limits.receive_bytes)

    def message(self, frame: Frame) -> None:
        """Adds a piece of a response."""
        if frame.flags not in (MORE, WHOLE):
            raise FrameError(f"a part of a response has flags {frame.flags}, which are unknown")
        self.head(())
        self._add(frame.body, frame.flags)

    def _add(self, data: bytes, flags: int) -> bool:
        try:
            self._credit(self._inflow.add(data, flags))
        except TooLongError as error:
            self._too_long(error.args[0])
            return False
        return True

    def _credit(self, size_bytes: int) -> None:
        if size_bytes:
            self._client.send((frames.credit_frame(self.number, size_bytes),))

    def _too_long(self, size: int) -> None:
        # After the responses that came before it, as in grpcio.
        if self._end is None:
            self._client.send((frames.short_frame(frames.CANCEL, self.number),))
            self._ends_with(self._excess(size))

    def answered(self, frame: Frame) -> None:
        """Ends the call as the server says, after the responses that came before."""
        if self._end is not None:
            return  # on its way when a response was too long
        body = frames.parse_end(frame.body)
        code, details = status_of(body)
        if frame.flags & frames.REFUSED:
            code, details = _Code.UNAVAILABLE, "the server refuses the call"
        elif frame.flags & WHOLE and not self._add(body.piece, WHOLE):
            return
        self.head(body.initial)
        self._ends_with(Ending(code, details, body.initial, body.trailing))

    def _ends_with(self, ending: Ending) -> None:
        """Ends the call when all that came before its end is taken, as in grpcio."""
        self._end = ending
        if self._inflow.close(drop=False):
            self.conclude(ending)

    def _let_go(self) -> None:
        super()._let_go()
        self._inflow.close()

    def _settle(self, response: Any) -> bool:
        """Settles a response that was taken; False if it is an `Ending`, which ends the call."""
        credit, was_last = self._inflow.settle()
        if isinstance(response, Ending):
            self.end_here(response)
            return False
        self._credit(credit)
        if was_last and self._end is not None:
            self.conclude(self._end)
        return True


def _nothing(data: bytes, call: object) -> None:
    """Makes None of the bytes: the deserializer of a call that has ended."""


def _left(deadline: float) -> float:
    return max(deadline - time.monotonic(), 0.0)


def call_weakly(method: weakref.WeakMethod[Callable[[], Any]]) -> None:
    """Calls a method of an object that is still there."""
    if (strong := method()) is not None:
        strong()


def status_of(body: EndBody) -> tuple[grpc.StatusCode, str]:
    """Returns the code and the details of an END."""
    code = _CODES.get(body.code)
    if code is None:
        return _Code.UNKNOWN, f"the server sent the unknown code {body.code}"
    return code, body.details
