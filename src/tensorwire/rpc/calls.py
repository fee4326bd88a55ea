"""Futures and streams of calls over grpcio whose request may have to be sent again.

Only where payload went ahead of the request; all other calls give back grpcio's own objects. Each
is the object of the first attempt until that was refused, and of the second from then on.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import grpc
import grpc.aio

from . import logs
from .runtime.callbacks import call_all
from .terms import REFUSED

Again = Callable[[Any], Any]
"""Of a call that has ended: its second attempt, None if there is to be none."""


_LOOK_S = 0.02

_KEPT: set[Resent] = set()
"""Those with a callback that is still to be called; their callers may have forgotten them."""


def _call_weakly(method: weakref.WeakMethod[Callable[[], None]]) -> None:
    if (strong := method()) is not None:
        strong()


class Resent(grpc.Call, grpc.RpcError):
    """What a call knows, of the attempt that counts.

    Args:
        first: grpcio's object of the first attempt.
        again: called once, when it has ended.
        accepted: whether the servicer has got the first attempt.
    """

    def __init__(self, first: Any, again: Again, accepted: Callable[[], bool]) -> None:
        super().__init__()
        self._call = first
        self._again: Again | None = again
        self._accepted = accepted
        self._first = first
        self._lock = threading.Lock()
        self._settled = threading.Event()
        self._callbacks: list[Callable[[], None]] = []
        self._cancelled = False
        # Weak: a call that is forgotten is cancelled when it is collected, as in grpcio.
        ended = weakref.WeakMethod(self._ended)
        if not first.add_callback(partial(_call_weakly, ended)):
            self._ended()

    def _ended(self) -> None:
        """The first attempt has ended."""
        with self._lock:
            if self._settled.is_set():
                return
            again, self._again = self._again, None  # which has the request
            second = None
            try:
                second = None if self._cancelled or again is None else again(self._first)
            except Exception as error:
                if isinstance(error, grpc.Future):
                    second = error  # what grpcio raises of a call that could not begin
                else:
                    logs.OWN.warning(
                        "a request was refused, and could not be sent again: %s", error
                    )
            if second is not None:
                self._call = second
            self._settled.set()
            callbacks, self._callbacks = self._callbacks, []
            _KEPT.discard(self)
        call_all([each for each in callbacks if not self._calls_back(each)])

    def _calls_back(self, callback: Callable[[], None]) -> bool:
        """Whether the attempt that counts goes on; it calls the callback when it ends."""
        try:
            return bool(self._call.add_callback(callback))
        except NotImplementedError:  # an error that grpcio has raised: it is over
            return False

    def _final(self) -> Any:
        """The attempt that counts, once it is known."""
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
            return self._call.cancel()

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

    def trailing_metadata(self) -> Any:
        return self._final().trailing_metadata()

    def code(self) -> Any:
        return self._final().code()

    def details(self) -> Any:
        return self._final().details()

    def debug_error_string(self) -> Any:
        return self._final().debug_error_string()

    def __repr__(self) -> str:
        return repr(self._call)

    __str__ = __repr__


class ResentFuture(Resent, grpc.Future):
    """What `future` gives back."""

    def cancelled(self) -> bool:
        return bool(self._call.cancelled())

    def running(self) -> bool:
        return not self.done()

    def done(self) -> bool:
        return self._settled.is_set() and bool(self._call.done())

    def result(self, timeout: float | None = None) -> Any:
        return self._after(timeout).result(timeout)

    def exception(self, timeout: float | None = None) -> Any:
        return self._after(timeout).exception(timeout)

    def traceback(self, timeout: float | None = None) -> Any:
        return self._after(timeout).traceback(timeout)

    def add_done_callback(self, fn: Callable[[Any], None]) -> None:
        if not self.add_callback(lambda: fn(self)):
            fn(self)

    def _after(self, timeout: float | None) -> Any:
        if not self._settled.wait(timeout):
            raise grpc.FutureTimeoutError()
        return self._call


class ResentStream(ResentFuture):
    """What a call with a stream of answers gives back."""

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
    """What an error of a reserved method says of the server; for `AttachmentKeeper`."""
    if not isinstance(error, grpc.Call | grpc.aio.AioRpcError):
        return "other", f"{type(error).__name__}: {error}"
    if error.code() is grpc.StatusCode.UNIMPLEMENTED:
        return "unknown method", "the server has no tensorwire"
    kind = "unreachable" if error.code() is grpc.StatusCode.UNAVAILABLE else "other"
    return kind, f"{error.code().name}: {error.details()}"


def is_refused(metadata: Any) -> bool:
    """Whether the trailing metadata say that the servicer did not run."""
    return any(key == REFUSED for key, _ in metadata or ())
