"""Implements calls of a client on a line with the interface of grpcio.

An answer is read by the thread that waits for it.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from types import TracebackType
from typing import Any

import grpc

from ..payload.outgoing import CallLink
from ..payload.threads import DEADLINES
from .client import RuntimeClient
from .engine import CallState, Ending, StreamState, cancelled
from .flow import Waiter
from .frames import EndBody

_LOOK_S = 0.005
_Code = grpc.StatusCode
_OK = _Code.OK


class RuntimeCall(CallState, grpc.RpcError, grpc.Call, grpc.Future):  # type: ignore[misc]
    """A call with one response: `future` and `with_call` give it back, and raise it if it fails."""

    _client: RuntimeClient
    _again: Callable[[], Any] | None = None
    _second: Any = None
    _hurries = False
    waits = True
    """True if its caller may wait for memory."""

    def link(self) -> CallLink:
        link = super().link()
        if not self.waits:
            link.never_waits()
        return link

    def _make_soon(self, body: EndBody, *, large: bool) -> None:
        if large:
            work = partial(self._make, body)
            self._client.reader.leave(self, work, attended=not self.watched)
            return
        line = self._client.line
        line.may_nest = True  # a user's code may wait for something that arrives
        try:
            self._make(body)
        finally:
            line.may_nest = False

    def _stop_watching(self) -> None:
        self._again = None
        self._client.reader.unwatch()
        if self._hurries:
            self._client.reader.unhurry()

    def _refused(self) -> None:
        if self.outflow is not None or self._again is None:
            super()._refused()
            return
        self._client.forget(self)
        self._tell(None)
        self._client.call_back([self._make_again])

    def _make_again(self) -> None:
        again, self._again = self._again, None
        if again is None:  # it has ended meanwhile
            return
        try:
            second = again()
        except Exception as error:
            self.conclude(Ending(_Code.UNAVAILABLE, f"the channel is closed: {error}"))
            return
        self._second = second
        if not self._endings:
            second.add_done_callback(self._take_over)
        else:
            second.cancel()

    def _take_over(self, second: Any) -> None:
        code = second.code()
        response = second.result() if code is _OK else None
        given = second.details(), second.initial_metadata(), second.trailing_metadata()
        self.conclude(Ending(code, *given, response, second.cancelled()))

    def end_here(self, ending: Ending) -> bool:
        if self._second is None:
            return super().end_here(ending)
        if not self.conclude(ending):
            return False
        self._second.cancel()
        return True

    def sends_again(self, again: Callable[[], Any]) -> None:
        """Arranges that grpcio makes the call if the server refuses to carry it out here.

        To be called before the call begins, and if no thread waits for it.

        Args:
            again: makes the call by grpcio, and gives back its future.
        """
        self._again = again

    def leave_unattended(self) -> None:
        """Lets the call end though no thread waits for it. To be called before it begins."""
        self.watched = True
        self._client.reader.watch()
        self.set_alarm(DEADLINES.add)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Waits until it has ended, or for some seconds; True if it has ended."""
        until = None if timeout_s is None else time.monotonic() + timeout_s
        return self._client.reader.wait(self, until)

    def wait_blocking(self) -> bool:
        """Waits for a call that no other thread has, until its deadline at most.

        Returns:
            False: it has to be made by grpcio, because the server refuses to carry it out here.
        """
        try:
            # The thread that sends the requests may end it too.
            whole = self.outflow is None
            if not self._client.reader.wait(self, self.deadline, whole=whole):
                self.deadline_passed()
                while not self.finished:  # it is ending at this moment
                    self.wait(1.0)
        except BaseException:
            self.end_here(cancelled("the caller was interrupted"))
            raise
        return self._ending.code is not None

    # grpc.RpcContext, grpc.Call

    def is_active(self) -> bool:
        return not self.done()

    def add_callback(self, callback: Callable[[], None]) -> bool:
        with self._client.mutex:
            if self._callbacks is None:
                return False
            self._callbacks.append(callback)
            hurries = self.watched and not self._hurries
            self._hurries = self._hurries or hurries
            if hurries:  # the callback must not need a thread that waits
                self._client.reader.hurry()
        self._client.keep(self)  # until it has been called
        return True

    def initial_metadata(self) -> Any:
        while self._initial is None and not self.finished:
            self.wait(_LOOK_S)
        return self._initial

    def trailing_metadata(self) -> Any:
        self.wait()
        return self._ending.trailing

    def code(self) -> Any:
        self.wait()
        return self._ending.code

    def details(self) -> Any:
        self.wait()
        return self._ending.details

    def debug_error_string(self) -> str:
        """Returns the status once more as text, as grpcio's objects do."""
        self.wait()
        return self._error_string()

    # grpc.Future

    def cancelled(self) -> bool:
        return self._ending.cancelled

    def running(self) -> bool:
        return not self.done()

    def _outcome(self, timeout: float | None) -> Any:
        if not self.finished and not self.wait(timeout):
            raise grpc.FutureTimeoutError()
        if self._ending.cancelled:
            raise grpc.FutureCancelledError()
        return None if self._ending.code is _OK else self

    def result(self, timeout: float | None = None) -> Any:
        if self._ending.code is not _OK and (error := self._outcome(timeout)) is not None:
            raise error
        return self._ending.response

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
        code, details, *_ = self._ending
        if code is None:
            return f"<{type(self).__name__} object>"
        text = f"<{type(self).__name__} of RPC that terminated with:\n\tstatus = {code}\n"
        return f'{text}\tdetails = "{details}"\n>'

    __str__ = __repr__


class StreamCall(StreamState, RuntimeCall):
    """A call with a stream of responses, which is their iterator too."""

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        taken = self._inflow.take()
        while isinstance(taken, Waiter):
            self._client.reader.wait(taken, None)
            taken = self._inflow.take()
        if taken is None:
            self.wait()
            if self._ending.code is _OK:
                raise StopIteration
            raise self
        response = self._message_of(taken)
        if not self._settle(response):
            raise self
        return response

    next = __next__
