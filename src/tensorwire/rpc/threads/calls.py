"""Futures and streams of calls over grpcio that it may keep, or that may have to be sent again.

All other calls give back grpcio's own objects. Each stands for the first attempt until that was
refused or is overdue, and for the second, or for an error, from then on.

grpcio keeps a call beyond its deadline while the socket takes no more in the middle of a message of
it. So the caller is released a moment after the deadline (`GRACE_S`), and later news of the call
from grpcio changes nothing.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterator
from functools import partial, partialmethod
from typing import Any, NoReturn

import grpc
import grpc.aio

from .. import logs
from ..payload.threads import DEADLINES, Callbacks, Deadline, call_all
from ..runtime.call import RuntimeCall
from ..runtime.engine import OVERDUE, call_weakly

Again = Callable[[Any], Any]
"""A function of a call that has ended: returns its second attempt, None if there is to be none."""


_LOOK_S = 0.02
GRACE_S = 0.2
"""Seconds after its deadline in which grpcio itself may still end a call."""

_KEPT: set[Resent] = set()
"""The calls with a callback that is still to be called; their callers may have forgotten them."""


class Overdue(RuntimeCall):
    """A call that has met its deadline: raised, or in the place of a call that grpcio keeps."""

    finished = True
    deadline = 0.0
    _initial = ()
    _ending = OVERDUE

    def __init__(self) -> None:
        """Makes one without a client, which a call that is over does not need."""

    def wait(self, timeout_s: float | None = None) -> bool:
        """See `RuntimeCall`."""
        return True

    def add_callback(self, callback: Callable[[], None]) -> bool:
        return False

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> NoReturn:
        raise self

    next = __next__


def outcome(call: Any, left_s: float | None, *, with_call: bool = False) -> Any:
    """Waits for a future of grpcio that no other thread has, and gives back its result.

    Args:
        call: the future.
        left_s: seconds to its deadline; None: it has none.
        with_call: give back the result and the future.

    Raises:
        grpc.RpcError: the call has failed, or met its deadline.
    """
    try:
        answer = call.result(None if left_s is None else max(left_s, 0.0) + GRACE_S)
    except grpc.FutureTimeoutError:
        call.cancel()
        raise Overdue() from None
    except grpc.RpcError as error:
        # The future is its own error: a frame that has both is a cycle, which keeps the requests.
        del call
        raise error.with_traceback(None) from None
    except BaseException:
        call.cancel()
        raise
    return (answer, call) if with_call else answer


class Resent(grpc.Call, grpc.RpcError, grpc.Future):
    """The future of a call with one response: shows the attempt that counts.

    Args:
        first: grpcio's object of the first attempt.
        left_s: seconds to the deadline of the call; None: it has none.
        again: called once, when the first attempt has ended. None: there is no second.
        accepted: whether the servicer has got the first attempt.
    """

    _alarm: Deadline | None = None

    def __init__(
        self,
        first: Any,
        left_s: float | None,
        again: Again | None = None,
        accepted: Callable[[], bool] = lambda: True,
    ) -> None:
        super().__init__()
        self._call = first
        self._again = again
        self._accepted = accepted
        self._first = first
        self._lock = threading.Lock()
        self._settled = threading.Event()
        self._callbacks: list[Callable[[], None]] = []
        self._cancelled = False
        # Weak: a call that is forgotten is cancelled when it is collected, as in grpcio.
        ended = weakref.WeakMethod(self._ended)
        if left_s is not None:
            overdue = partial(call_weakly, weakref.WeakMethod(self._overdue))
            self._alarm = DEADLINES.add(time.monotonic() + max(left_s, 0.0) + GRACE_S, overdue)
        if not first.add_callback(partial(call_weakly, ended)):
            self._ended()

    def _overdue(self) -> None:
        """Ends the call, whose deadline was a while ago, where grpcio does not."""
        if self._first.done():
            self._ended()
            return
        with self._lock:
            if self._settled.is_set():
                return
            self._again = None
            callbacks = self._settle(Overdue())
        self._first.cancel()
        if callbacks:  # in a thread of their own: they may wait for actions of other deadlines
            Callbacks().call(callbacks)

    def _ended(self) -> None:
        """Begins the second attempt, if there is to be one: the first has ended."""
        with self._lock:
            if self._settled.is_set():
                return
            if self._alarm is not None:
                self._alarm.cancel()
            again, self._again = self._again, None  # which has the request
            second = None
            try:
                second = None if self._cancelled or again is None else again(self._first)
            except Exception as error:
                if isinstance(error, grpc.Future):
                    second = error  # grpcio raises it if a call could not begin
                else:
                    logs.OWN.warning(
                        "a request was refused, and could not be sent again: %s", error
                    )
            callbacks = self._settle(self._first if second is None else second)
        call_all([each for each in callbacks if not self._calls_back(each)])

    def _settle(self, call: Any) -> list[Callable[[], None]]:
        """Lets an attempt count from now on, and returns the callbacks; with the lock."""
        self._call = call
        self._settled.set()
        callbacks, self._callbacks = self._callbacks, []
        _KEPT.discard(self)
        return callbacks

    def _calls_back(self, callback: Callable[[], None]) -> bool:
        """Returns whether the attempt that counts goes on; it calls the callback when it ends."""
        try:
            return bool(self._call.add_callback(callback))
        except NotImplementedError:  # an error that grpcio has raised: it is over
            return False

    def _final(self) -> Any:
        """Waits for the attempt that counts, and returns it."""
        self._settled.wait()
        return self._call

    def is_active(self) -> bool:
        return not self._settled.is_set() or self._call.is_active()

    def time_remaining(self) -> float | None:
        remaining: float | None = self._call.time_remaining()
        return remaining

    def cancel(self) -> Any:
        with self._lock:
            self._cancelled = True
            cancelled = self._call.cancel()
        self._ended()  # grpcio calls back only when it has let go
        return cancelled

    def add_callback(self, callback: Callable[[], None]) -> bool:
        with self._lock:
            if not self._settled.is_set():
                self._callbacks.append(callback)
                _KEPT.add(self)
                return True
        return self._calls_back(callback)

    def initial_metadata(self) -> Any:
        self._first.initial_metadata()  # waits until there are any
        while not self._accepted() and not self._settled.wait(_LOOK_S):
            pass
        return self._call.initial_metadata()

    def _ask_final(self, name: str) -> Any:
        """Returns a result of the method of this name, of the attempt that counts."""
        return getattr(self._final(), name)()

    trailing_metadata: Any = partialmethod(_ask_final, "trailing_metadata")
    code: Any = partialmethod(_ask_final, "code")
    details: Any = partialmethod(_ask_final, "details")
    debug_error_string: Any = partialmethod(_ask_final, "debug_error_string")

    def __repr__(self) -> str:
        return repr(self._call)

    __str__ = __repr__

    def cancelled(self) -> bool:
        return bool(self._call.cancelled())

    def running(self) -> bool:
        return not self.done()

    def done(self) -> bool:
        return self._settled.is_set() and bool(self._call.done())

    def _ask_in_time(self, name: str, timeout: float | None = None) -> Any:
        if not self._settled.wait(timeout):
            raise grpc.FutureTimeoutError()
        return getattr(self._call, name)(timeout)

    result: Any = partialmethod(_ask_in_time, "result")
    exception: Any = partialmethod(_ask_in_time, "exception")
    traceback: Any = partialmethod(_ask_in_time, "traceback")

    def add_done_callback(self, fn: Callable[[Any], None]) -> None:
        if not self.add_callback(lambda: fn(self)):
            fn(self)


class ResentStream(Resent):
    """The object of a call with a stream of answers."""

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        call = self._call
        try:
            return next(call)
        except grpc.RpcError:
            if call is not self._first or (second := self._final()) is call:
                raise
            return next(second)

    next = __next__

    def __del__(self) -> None:
        if not self._settled.is_set():
            self._first.cancel()


def explain(error: BaseException) -> tuple[str, str]:
    """Returns (kind, text) of an error of a reserved method; for `AttachmentKeeper`."""
    if not isinstance(error, grpc.Call | grpc.aio.AioRpcError):
        return "other", f"{type(error).__name__}: {error}"
    if error.code() is grpc.StatusCode.UNIMPLEMENTED:
        return "unknown method", "the server has no tensorwire"
    kind = "unreachable" if error.code() is grpc.StatusCode.UNAVAILABLE else "other"
    return kind, f"{error.code().name}: {error.details()}"
