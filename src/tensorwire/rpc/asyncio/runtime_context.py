"""Runtime, asyncio server: the `grpc.aio` ServicerContext for a call that came by a line."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import grpc
import grpc.aio

from ..runtime.context import Caller
from ..runtime.frames import Metadata, Number, as_metadata
from ..runtime.served import IncomingCall

_Code = grpc.StatusCode


class Messages(Protocol):
    """What a context needs of whoever carries out its call."""

    async def read(self) -> Any:
        """The next request, EOF behind the last one."""

    async def write(self, response: Any) -> None:
        """Sends one of several responses."""

    def finish(self, code: grpc.StatusCode, details: str) -> None:
        """Ends the call."""


class AioContext(grpc.aio.ServicerContext):  # type: ignore[misc,type-arg]
    """The context that an asynchronous servicer is given. In the event loop.

    Args:
        caller: who calls.
        call: what it is of.
        messages: by which it reads and writes.

    Attributes:
        abort_error: what `abort` has raised.
        callbacks: to be called when the servicer has ended.
    """

    def __init__(self, caller: Caller, call: IncomingCall, messages: Messages) -> None:
        self._caller = caller
        self._call = call
        self._messages = messages
        self._head_sent = False
        self._trailing: tuple[Any, ...] = ()
        self._code: Any = None
        self._details = ""
        self.abort_error: grpc.aio.AbortError | None = None
        self.callbacks: list[Callable[[], object]] = []

    def check(self) -> None:
        """Raises what halts a servicer whose call does not go on."""
        if self.abort_error is not None:
            raise self.abort_error
        if not self._call.is_active():
            raise grpc.aio.UsageError("RPC already finished.")

    async def read(self) -> Any:
        self.check()
        message = await self._messages.read()
        self.check()
        return message

    async def write(self, message: Any) -> None:
        self.check()
        await self._messages.write(message)
        self._head_sent = True

    async def send_initial_metadata(self, initial_metadata: Any) -> None:
        self.check()
        if self._head_sent:
            raise grpc.aio.UsageError("Send initial metadata failed: already sent")
        metadata = as_metadata(initial_metadata, reserved=True)
        if metadata is None:
            raise ValueError(f"metadata was invalid: {initial_metadata}")
        self._head_sent = True
        self._call.send_head(metadata)

    async def abort(self, code: Any, details: str = "", trailing_metadata: Any = ()) -> None:
        if self.abort_error is not None:
            raise grpc.aio.UsageError("Abort already called!")
        self.abort_error = grpc.aio.AbortError("Locally aborted.")
        if trailing_metadata or not self._trailing:
            self._trailing = _checked(trailing_metadata)
        self._code = code
        self._details = details or self._details
        self._messages.finish(code, self._details)
        raise self.abort_error

    async def abort_with_status(self, status: Any) -> None:
        await self.abort(status.code, status.details, status.trailing_metadata)

    def set_trailing_metadata(self, trailing_metadata: Any) -> None:
        self._trailing = _checked(trailing_metadata)

    def trailing_metadata(self) -> Any:
        return self._trailing

    def invocation_metadata(self) -> Metadata:
        return self._call.metadata

    def set_code(self, code: Any) -> None:
        self._code = code

    def code(self) -> Any:
        return self._code

    def set_details(self, details: str) -> None:
        self._details = details

    def details(self) -> str:
        return self._details

    def set_compression(self, compression: Any) -> None:
        if self._head_sent:
            raise RuntimeError(
                "Compression setting must be specified before sending initial metadata"
            )

    def disable_next_message_compression(self) -> None:
        """Nothing is compressed here."""

    def peer(self) -> str:
        return self._caller.peer

    def peer_identities(self) -> Any:
        return self._caller.identities

    def peer_identity_key(self) -> str | None:
        return self._caller.identity_key

    def auth_context(self) -> Any:
        return dict(self._caller.auth_context)

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
        """How the call ends: as the servicer has said, and where it said nothing, like this."""
        chosen = self._code if self._code not in (None, _Code.OK) else code
        number = chosen.value[0] if isinstance(chosen, grpc.StatusCode) else int(chosen)
        return number, (details or self._details).encode()

    @property
    def number(self) -> Number:
        """Of the call."""
        return self._call.number


def _checked(metadata: Any) -> tuple[Any, ...]:
    """Trailing metadata as a tuple; TypeError, as in grpcio, if they are none."""
    if not hasattr(metadata, "__iter__") or isinstance(metadata, dict):
        raise TypeError(f"Invalid trailing metadata type, expected pairs: {metadata}")
    entries = tuple(metadata)
    for each in entries:
        if not isinstance(each, tuple) or len(each) != 2:
            raise TypeError(f"Invalid trailing metadatum, expected a pair: {each}")
        if not isinstance(each[0], str) or not isinstance(each[1], str | bytes):
            raise TypeError(f"Invalid trailing metadatum, expected str and str or bytes: {each}")
    return entries


class SyncContext(grpc.ServicerContext):  # type: ignore[misc]
    """The context that a synchronous servicer of an asyncio server is given, in a thread.

    Args:
        context: of the call.
        loop: the server's.

    Attributes:
        callbacks: to be called when the servicer has returned.
    """

    def __init__(self, context: AioContext, loop: asyncio.AbstractEventLoop) -> None:
        self._context = context
        self._loop = loop
        self.callbacks: list[Callable[[], object]] = []

    def is_active(self) -> bool:
        return not self._context.done()

    def time_remaining(self) -> float | None:
        return self._context.time_remaining()

    def cancel(self) -> None:
        raise NotImplementedError("a servicer of grpc.aio cannot cancel its call")

    def add_callback(self, callback: Callable[[], object]) -> None:
        self.callbacks.append(callback)

    def abort(self, code: Any, details: str = "", trailing_metadata: Any = ()) -> None:
        aborting = self._context.abort(code, details, trailing_metadata)
        asyncio.run_coroutine_threadsafe(aborting, self._loop).result()

    def abort_with_status(self, status: Any) -> None:
        self.abort(status.code, status.details, status.trailing_metadata)

    def send_initial_metadata(self, initial_metadata: Any) -> None:
        sending = self._context.send_initial_metadata(initial_metadata)
        asyncio.run_coroutine_threadsafe(sending, self._loop).result()

    def set_trailing_metadata(self, trailing_metadata: Any) -> None:
        self._context.set_trailing_metadata(trailing_metadata)

    def invocation_metadata(self) -> Metadata:
        return self._context.invocation_metadata()

    def set_code(self, code: Any) -> None:
        self._context.set_code(code)

    def set_details(self, details: str) -> None:
        self._context.set_details(details)

    def set_compression(self, compression: Any) -> None:
        self._context.set_compression(compression)

    def disable_next_message_compression(self) -> None:
        """Nothing is compressed here."""

    def peer(self) -> str:
        return self._context.peer()

    def peer_identities(self) -> Any:
        return self._context.peer_identities()

    def peer_identity_key(self) -> str | None:
        return self._context.peer_identity_key()

    def auth_context(self) -> Any:
        return self._context.auth_context()
