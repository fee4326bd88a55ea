"""Runtime, asyncio server: the `grpc.aio` ServicerContext for a call that came by a line."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import grpc
import grpc.aio

from ..runtime.context import AnyContext, CallContext
from ..runtime.served import Caller, IncomingCall

_Code = grpc.StatusCode


class AioContext(AnyContext, grpc.aio.ServicerContext):  # type: ignore[misc,type-arg]
    """The context that an asynchronous servicer is given. In the event loop.

    Args:
        caller: the client.
        call: the call of this context.
        performance: the `AioPerformance` of the call, which reads, writes and ends it.

    Attributes:
        abort_error: the error that `abort` has raised.
        callbacks: to be called when the servicer has ended.
    """

    _trailing: Any = ()

    def __init__(self, caller: Caller, call: IncomingCall, performance: Any) -> None:
        super().__init__(caller, call)
        self._performance = performance
        self._details = ""
        self.abort_error: grpc.aio.AbortError | None = None
        self.callbacks: list[Callable[[], object]] = []

    def check(self) -> None:
        """Raises the error that halts a servicer whose call does not go on."""
        if self.abort_error is not None:
            raise self.abort_error
        if not self._call.is_active():
            raise grpc.aio.UsageError("RPC already finished.")

    async def read(self) -> Any:
        self.check()
        message = await self._performance.read()
        self.check()
        return message

    async def write(self, message: Any) -> None:
        self.check()
        await self._performance.write(message)
        self.head_sent = True

    async def send_initial_metadata(self, initial_metadata: Any) -> None:
        self.check()
        if self.head_sent:
            raise grpc.aio.UsageError("Send initial metadata failed: already sent")
        metadata = self._initial(initial_metadata)
        self.head_sent = True
        self._call.send_head(metadata)

    async def abort(self, code: Any, details: str = "", trailing_metadata: Any = ()) -> None:
        if self.abort_error is not None:
            raise grpc.aio.UsageError("Abort already called!")
        self.abort_error = grpc.aio.AbortError("Locally aborted.")
        if trailing_metadata or not self._trailing:
            self._trailing = _checked(trailing_metadata)
        self._code = code
        self._details = details or self._details
        self._performance.finish(code, self._details)
        raise self.abort_error

    async def abort_with_status(self, status: Any) -> None:
        await self.abort(status.code, status.details, status.trailing_metadata)

    def set_trailing_metadata(self, trailing_metadata: Any) -> None:
        self._trailing = _checked(trailing_metadata)

    def set_details(self, details: str) -> None:
        self._details = details

    def details(self) -> str:
        return self._details

    def set_compression(self, compression: Any) -> None:
        if self.head_sent:
            raise RuntimeError(
                "Compression setting must be specified before sending initial metadata"
            )

    def time_remaining(self) -> float | None:
        if self._call.deadline is None:
            return None
        return max(self._call.deadline - time.monotonic(), 0.0)

    def add_done_callback(self, callback: Callable[[Any], object]) -> None:
        self.callbacks.append(partial(callback, self))

    def done(self) -> bool:
        return not self._call.is_active()

    def cancelled(self) -> bool:
        return self._code is _Code.CANCELLED

    def status(self, code: grpc.StatusCode, details: str) -> tuple[int, bytes]:
        """Returns the servicer's code, or the given one where it has none; and the details."""
        chosen = self._code if self._code not in (None, _Code.OK) else code
        number = chosen.value[0] if isinstance(chosen, grpc.StatusCode) else int(chosen)
        return number, (details or self._details).encode()


def _checked(metadata: Any) -> tuple[Any, ...]:
    """Returns trailing metadata as a tuple; TypeError, as in grpcio, if they are none."""
    if not hasattr(metadata, "__iter__") or isinstance(metadata, dict):
        raise TypeError(f"Invalid trailing metadata type, expected pairs: {metadata}")
    entries = tuple(metadata)
    for each in entries:
        if not isinstance(each, tuple) or len(each) != 2:
            raise TypeError(f"Invalid trailing metadatum, expected a pair: {each}")
        if not isinstance(each[0], str) or not isinstance(each[1], str | bytes):
            raise TypeError(f"Invalid trailing metadatum, expected str and str or bytes: {each}")
    return entries


class SyncContext(CallContext):
    """The context that a synchronous servicer of an asyncio server is given, in a thread."""

    def time_remaining(self) -> float | None:  # type: ignore[override]
        return None if self._call.deadline is None else super().time_remaining()

    def cancel(self) -> None:
        raise NotImplementedError("a servicer of grpc.aio cannot cancel its call")
