"""Runtime, server side: grpcio's ServicerContext for a call that came by a line."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import grpc

from .. import logs
from .frames import Metadata, as_metadata
from .served import Caller, IncomingCall

_OK = grpc.StatusCode.OK
_NUMBERS = {code: code.value[0] for code in grpc.StatusCode}
_END_OF_TIME_S = float((1 << 63) // 10**9)


class CallDetails(NamedTuple):
    """A `grpc.HandlerCallDetails`, which interceptors and generic handlers are given."""

    method: str
    invocation_metadata: Metadata


class AbortedError(Exception):
    """The error by which `abort` ends the servicer; grpcio raises a bare Exception."""


class AnyContext:
    """The common part of the contexts of servicers in threads and in tasks.

    Args:
        caller: the client.
        call: the call of this context.

    Attributes:
        head_sent: initial metadata have left, or would come too late.
        plain: the servicer has named neither code, details nor trailing metadata.
    """

    head_sent = False
    plain = True
    _code: Any = None
    _trailing: Any = None

    def __init__(self, caller: Caller, call: IncomingCall) -> None:
        self._caller = caller
        self._call = call

    def invocation_metadata(self) -> Metadata:
        return self._call.metadata

    def peer(self) -> str:
        return self._caller.peer

    def peer_identities(self) -> Any:
        return self._caller.identities

    def peer_identity_key(self) -> Any:
        return self._caller.identity_key

    def auth_context(self) -> Any:
        return dict(self._caller.auth_context)

    def disable_next_message_compression(self) -> None:
        """Does nothing: messages are not compressed here, because memory is not a network."""

    def trailing_metadata(self) -> Any:
        return self._trailing

    def set_code(self, code: Any) -> None:
        self._code, self.plain = code, False

    def code(self) -> Any:
        return self._code

    def _initial(self, metadata: Any) -> Metadata:
        """Returns initial metadata as they travel; ValueError if they cannot."""
        entries = as_metadata(metadata, reserved=True)
        if entries is None:
            raise ValueError(f"metadata was invalid: {metadata}")
        return entries


class CallContext(AnyContext, grpc.ServicerContext):  # type: ignore[misc]
    """The context that the servicer of one call is given. Any thread may use it.

    Args: as of `AnyContext`.

    Attributes:
        aborted: the servicer has called `abort`.
        given_up: the errors that the context itself has raised because the call does not go on.
    """

    aborted = False
    given_up: Sequence[BaseException] = ()
    _details: bytes | None = None

    def is_active(self) -> bool:
        return self._call.is_active()

    def time_remaining(self) -> float:
        if self._call.deadline is None:
            return _END_OF_TIME_S - time.time()
        return max(self._call.deadline - time.monotonic(), 0.0)

    def cancel(self) -> None:
        self._call.cancel()

    def add_callback(self, callback: Callable[[], None]) -> bool:
        return self._call.add_callback(callback)

    def set_compression(self, compression: Any) -> None:
        """Does nothing: messages are not compressed here, because memory is not a network."""

    def send_initial_metadata(self, initial_metadata: Any) -> None:
        if self.head_sent:
            raise ValueError("Initial metadata no longer allowed!")
        if not self._call.send_head(self._initial(initial_metadata)):
            raise self.give_up()
        self.head_sent = True

    def give_up(self) -> BaseException:
        """Returns an error to raise, as the call does not go on."""
        error: BaseException = grpc.RpcError()
        self.given_up = *self.given_up, error
        return error

    def set_trailing_metadata(self, trailing_metadata: Any) -> None:
        self._trailing, self.plain = trailing_metadata, False

    def abort(self, code: Any, details: str) -> None:
        if code is _OK:
            logs.OWN.error("abort() called with StatusCode.OK; returning UNKNOWN")
            code, details = grpc.StatusCode.UNKNOWN, ""
        self._code = code
        self.set_details(details)
        self.aborted = True
        raise AbortedError()

    def abort_with_status(self, status: Any) -> None:
        self._trailing = status.trailing_metadata
        self.abort(status.code, status.details)

    def set_details(self, details: Any) -> None:
        self._details = details if isinstance(details, bytes) else str(details).encode()
        self.plain = False

    def details(self) -> Any:
        return self._details

    def status(self, code: grpc.StatusCode, details: str) -> tuple[int, bytes]:
        """Returns the servicer's code and details, or the given ones where it has named none."""
        chosen = code if self._code is None else self._code
        number = _NUMBERS[chosen] if isinstance(chosen, grpc.StatusCode) else 2
        return number, details.encode() if self._details is None else self._details
