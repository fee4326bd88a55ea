"""Runtime, client side: the calls of a channel on their line, by their numbers."""

from __future__ import annotations

import threading
import time
import weakref

import grpc

from tensorwire.errors import TensorwireError

from ..payload.threads import CallBack, Callbacks
from . import frames
from .engine import CallState, Ending
from .frames import Frame, FrameError, Metadata, short_frame
from .line import Line, SharedReader
from .options import MessageLimits
from .ring import Rings

_MOST_WAITING = 1024
"""The most frames that wait for a server: beyond it no calls begin.

Else overdue ones would pile up.
"""
_CHANNEL_CLOSED = Ending(grpc.StatusCode.CANCELLED, "Channel closed!")


class AnyClient:
    """The client's end of a line, in either world.

    Attributes:
        line: of the calls.
        send: see `Line.send`.
        limits: of messages.
        mutex: guards lists of callbacks.
        call_back: calls them.
        patient: see `LineEnd`.

    Args:
        rings: of the line.
        limits: of messages.
    """

    call_back: CallBack
    patient = True

    def __init__(self, rings: Rings, limits: MessageLimits) -> None:
        self.line = Line(rings, self)
        self.send = self.line.send
        self.limits = limits
        self.mutex = threading.RLock()
        self._calls: dict[int, weakref.ref[CallState]] = {}
        self._kept: dict[int, CallState] = {}
        self._going_away = False
        self._closed = False

    @property
    def usable(self) -> bool:
        """True if calls can begin here."""
        line = self.line
        return not self._going_away and not line.is_over and len(line.outbox) <= _MOST_WAITING

    def begin(
        self, call: CallState, method: bytes, metadata: Metadata, message: bytes | None
    ) -> None:
        """Sends the first frames of a call, with its request if that is the only one.

        Args:
            call: ends here if sending fails.
            method: its name.
            metadata: of the user's.
            message: None: a stream of requests follows.
        """
        self._calls[call.number[0]] = weakref.ref(call)
        timeout_us = frames.NO_DEADLINE
        if call.deadline is not None:
            left_us = int(max(call.deadline - time.monotonic(), 0.0) * 1e6)
            timeout_us = min(left_us, frames.NO_DEADLINE - 1)
        most = self.limits.send_bytes
        if message is not None and 0 <= most < len(message):
            text = f"CLIENT: Sent message larger than max ({len(message)} vs. {most})"
            call.conclude(Ending(grpc.StatusCode.RESOURCE_EXHAUSTED, text))
            return
        given = call.number, method, timeout_us, metadata, message
        self.line.send(frames.call_frames(*given, streams=call.streams))
        if self.line.is_over:  # and has perhaps not seen this call
            self._conclude(call, "the connection is over")

    def forget(self, call: CallState) -> None:
        """Forgets a call that has ended, or goes on by grpcio, unless its slot has another one."""
        known = self._calls.get(call.number[0])
        if known is not None and known() in (call, None):
            self._calls.pop(call.number[0], None)

    def keep(self, call: CallState) -> None:
        """Keeps a call that goes on though its caller may forget it."""
        call.kept = True
        self._kept[id(call)] = call
        if call.finished:  # perhaps before `kept` was set
            self.unkeep(call)

    def unkeep(self, call: CallState) -> None:
        """Lets go of a kept call that has ended, after `finish`."""
        if self._kept:
            self._kept.pop(id(call), None)

    def arrived(self, frame: Frame) -> None:
        """Handles a frame, see `LineEnd`. Ignores late frames of calls that are over."""
        if frame.kind == frames.GOAWAY:
            self._going_away = True
            return
        known = self._calls.get(frame.number[0])
        call = None if known is None else known()
        if call is None or call.number != frame.number:
            return
        if frame.kind == frames.END:
            try:
                call.answered(frame)
            except (FrameError, TensorwireError):
                raise
            except BaseException as error:  # it may be forgotten, and `over` does not find it then
                self._conclude(call, f"a thread was interrupted that read for all: {error!r}")
                raise
        elif frame.kind == frames.MESSAGE:
            call.message(frame)
        elif frame.kind == frames.CREDIT:
            call.granted(frames.parse_credit(frame.body))
        elif frame.kind == frames.HEAD:
            call.head(frames.parse_head(frame.body))
        else:
            raise FrameError(f"a server sent a frame of kind {frame.kind}, which only clients send")

    def over(self, reason: str) -> None:
        """See `LineEnd`."""
        for known in list(self._calls.values()):
            call = known()
            if call is None:
                continue
            self._conclude(call, reason)

    def end_calls_of(self, owner: object) -> None:
        """Ends the calls of one channel, which is closed."""
        for known in list(self._calls.values()):
            call = known()
            if call is not None and call.owner is owner:
                if call.conclude(_CHANNEL_CLOSED):
                    self.send((short_frame(frames.CANCEL, call.number),))

    def _conclude(self, call: CallState, reason: str) -> None:
        """Ends a call because the line is over."""
        gone = Ending(grpc.StatusCode.UNAVAILABLE, reason)
        call.conclude(_CHANNEL_CLOSED if self._closed else gone)

    def close(self, *, lost: bool) -> None:
        """Ends all calls; calling it again does nothing. Any thread.

        Args:
            lost: the server is gone, and not this channel closed.
        """
        self._closed = not lost
        self.line.end("the server is gone" if lost else "the channel is closed")


class RuntimeClient(AnyClient):
    """The client's end of a line. Any thread may use it.

    Attributes:
        reader: of the line.

    Args: as of `AnyClient`.
    """

    def __init__(self, rings: Rings, limits: MessageLimits) -> None:
        super().__init__(rings, limits)
        self.reader = SharedReader(self.line)
        self.call_back = Callbacks().call

    def over(self, reason: str) -> None:
        """See `LineEnd`."""
        super().over(reason)
        self.reader.stop()
