"""Runs the servicer of a call, of any arity, in a thread of the user's pool, and is its context.

The order of steps, the errors and their texts are grpcio's: see its `_server.py`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import grpc

from .. import logs
from ..payload.attachment import RpcAttachment
from ..payload.envelope import MAGIC
from ..payload.inbox import RefusedError, StalledError
from ..payload.incoming import find_only
from ..payload.outgoing import CallLink, SentMessage, no_deadline
from ..payload.tensors import Holding, drop
from . import frames, observed
from .flow import Waiter
from .frames import Metadata, as_metadata
from .leaving import leaving
from .served import Handled, IncomingCall, Receiver

_Code = grpc.StatusCode
_OK = _Code.OK
_NUMBERS = {code: code.value[0] for code in _Code}
_END_OF_TIME_S = float((1 << 63) // 10**9)
_REFUSED_PAYLOAD = frames.Metadatum("tensorwire-refused", "1")


class AbortedError(Exception):
    """The error by which `abort` ends the servicer; grpcio raises a bare Exception."""


class AnyPerformance:
    """One call and its servicer, in a thread or a task; the context that the servicer is given.

    Args:
        end: of the line that it came by.
        call: the call that came.
        handled: the user's handler.

    Attributes:
        answered: it has a response.
        head_sent: initial metadata have left, or would come too late.
        plain: the servicer has named neither code, details nor trailing metadata.
        attachment: of the line.
        traced: counts messages; None if they are not counted.
    """

    answered = False
    head_sent = False
    plain = True
    _code: Any = None
    _trailing: Any = None
    _own_link: CallLink | None = None

    def __init__(self, end: Receiver, call: IncomingCall, handled: Handled) -> None:
        self.attachment = end.attachment
        self.call = call
        self._end = end
        self.handled = handled
        self._serializer = handled.serializer
        self._most_bytes = end.limits.send_bytes
        self.traced = None
        if observed.OBSERVER is not None:
            self.traced = observed.watched("server", handled.arity, call.method)
        self._began_ns = 0 if self.traced is None else self.traced.begin()

    def ended(self) -> None:
        """Counts the call, which is over, if calls are counted."""
        if self.traced is not None:
            outcome = "answered" if self.answered else "not answered"
            self.traced.ended(self._began_ns, "over" if self.handled.gives_stream else outcome)

    def link(self) -> CallLink:
        """Returns the link for payload that travels beside the call, or may."""
        if self._own_link is None:
            call = self.call
            remaining = no_deadline if call.deadline is None else self.time_remaining
            self._own_link = CallLink(self.attachment, call.number, remaining, call.is_active)
            self._own_link.by_runtime = True
        return self._own_link

    def _find(self, id: bytes) -> RpcAttachment | None:
        return find_only(self.attachment, id)

    def _decode(self, data: bytes, holdings: list[Holding] | None) -> Any:
        """Returns the user's request.

        Raises:
            RefusedError: it names memory that is not there.
            Exception: the error of the deserializer.
        """
        reader = self.handled.reader
        if self.traced is not None:
            read = partial(
                reader.read, find=self._find, holdings=holdings, needed=self.call.is_active
            )
            return self.traced.deserialize(read, data, protocol="runtime")
        if data.startswith(MAGIC):
            return reader.read(data, self._find, holdings, needed=self.call.is_active)
        return data if reader.plain is None else reader.plain(data)

    def _too_long(self, size: int) -> None:
        """Ends the call, because a response is longer than it may be."""
        text = f"SERVER: Sent message larger than max ({size} vs. {self._most_bytes})"
        self.finish(_Code.RESOURCE_EXHAUSTED, text)

    def finish(
        self,
        code: grpc.StatusCode,
        details: str,
        message: bytes | None = None,
        rest: Callable[[], None] | None = None,
    ) -> None:
        """Ends the call with the servicer's status, or with an error if that status is not valid.

        Args:
            code: used if the servicer has named none.
            details: used if the servicer has named none.
            message: the only response, None if there is none or it has left.
            rest: sends the rest of the message.
        """
        number, text = self._status(code, details)
        if number == 0:
            text = b""  # as in gRPC, whose client gets none of OK
        trailing = as_metadata(self._trailing, reserved=True)
        if trailing is None:
            number, trailing = _Code.INTERNAL.value[0], ()
            text = b"the trailing metadata of the servicer are not valid"
        if (trailing or text) and (excess := frames.excess(trailing, text)):
            number, text, trailing = _Code.RESOURCE_EXHAUSTED.value[0], excess.encode(), ()
        if number != 0:
            message = rest = None
        end = frames.end_frames(self.call.number, number, text, (), trailing, message)
        self.call.finish(end, rest=rest)

    def _status(self, code: grpc.StatusCode, details: str) -> tuple[int, bytes]:
        """Returns the servicer's code and details, or the given ones where it has named none."""
        raise NotImplementedError

    def time_remaining(self) -> float | None:
        deadline = self.call.deadline
        return None if deadline is None else max(deadline - time.monotonic(), 0.0)

    # grpc.ServicerContext, as far as both worlds have it.

    def invocation_metadata(self) -> Metadata:
        return self.call.metadata

    def peer(self) -> str:
        return self._end.caller.peer

    def peer_identities(self) -> Any:
        return self._end.caller.identities

    def peer_identity_key(self) -> Any:
        return self._end.caller.identity_key

    def auth_context(self) -> Any:
        return dict(self._end.caller.auth_context)

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


class Performance(AnyPerformance, grpc.ServicerContext):  # type: ignore[misc]
    """One call and its servicer. One thread at a time, but for responses that are called back.

    The servicer may use it as its context in any thread.

    Args: as of `AnyPerformance`.

    Attributes:
        aborted: the servicer has called `abort`.
        given_up: the errors that were raised here because the call does not go on.
    """

    aborted = False
    given_up: Sequence[BaseException] = ()
    _details: bytes | None = None

    def run(self) -> None:
        """Runs the servicer and ends the call, unless responses are called back."""
        handled = self.handled
        holdings: list[Holding] = []
        request: Any = None
        behavior = handled.behavior
        if handled.takes_stream:
            request = self._single() if self.call.requests is None else RequestIterator(self)
        else:
            request = self.deserialize(self.call.only_request(), holdings)
            if request is None:
                return
        more: tuple[Any, ...] = ()
        calls_back = handled.gives_stream and getattr(behavior, "experimental_non_blocking", False)
        if handled.gives_stream:
            self.call.stream_responses()
            if calls_back:
                more = (partial(self._respond_in_turn, threading.Lock()),)
        try:
            response = behavior(request, self, *more)
        except Exception as error:
            self._failed(error, "calling application")
            return
        had = [request]
        del request
        drop(had, holdings, response)
        if not handled.gives_stream:
            self._respond_once(response)
        elif not calls_back:
            self._respond_all(response)

    def _single(self) -> Iterator[Any]:
        request = self.deserialize(self.call.only_request())
        if request is not None:
            yield request

    def _failed(self, error: Exception, what: str) -> None:
        if self.aborted:
            self.finish(_Code.UNKNOWN, "RPC Aborted")
        elif error not in self.given_up:
            try:
                details = f"Exception {what}: {error}"
            except Exception:
                details = "Calling application raised unprintable Exception!"
            logs.SERVER.exception(details)
            self.finish(_Code.UNKNOWN, details)

    def deserialize(self, data: bytes | None, holdings: list[Holding] | None = None) -> Any:
        """Returns the user's request; None if there is none, and the call has ended."""
        request = None
        if data is None:
            return None
        try:
            request = self._decode(data, holdings)
        except RefusedError as error:
            refuse_payload(self.call, error)
            return None
        except Exception as error:
            self._unusable(error, "Exception deserializing message!")
        if request is None:
            self.call.fail(_Code.INTERNAL, "Exception deserializing request!")
        return request

    def _unusable(self, error: Exception, what: str) -> None:
        """Logs that a message cannot be deserialized or serialized, which ends the call."""
        logs.COMMON.exception(what)

    def serialize(self, response: Any) -> tuple[bytes, SentMessage | None] | None:
        """Returns the bytes of a response, and a message to `finish` after they are sent, or None.

        None alone: there are no bytes, and the call has ended.
        """
        message = None
        try:
            data, message = leaving(response, self, self._serializer, last=True)
        except Exception as error:
            self._unusable(error, "Exception serializing message!")
            data = None
        if not isinstance(data, bytes):
            self.finish(_Code.INTERNAL, "Failed to serialize response!")
            return None
        if 0 <= self._most_bytes < len(data):
            self._too_long(len(data))
            return None
        return data, message

    def _respond_once(self, response: Any) -> None:
        serialized = self.serialize(response)
        if serialized is None:
            return
        data, message = serialized
        if self.call.takes_stream:  # and gives credits
            self.call.stream_responses()
            self._send(data)
            if message is not None and message.staging is not None:
                self.call.flush()
                message.finish()
            self.finish(_Code.OK, "")
        else:
            rest = None if message is None or message.staging is None else message.finish
            if self.plain and len(data) <= frames.PIECE_BYTES:  # as nearly all small ones
                self.call.finish((frames.plain_end_frame(self.call.number, data),), rest=rest)
            else:
                self.finish(_Code.OK, "", data, rest)
        self.answered = True

    def _respond_all(self, responses: Any) -> None:
        while True:
            try:
                response = next(responses)
            except StopIteration:
                response = None
            except Exception as error:
                self._failed(error, "iterating responses")
                return
            self.respond(response)
            if response is None or not self.call.is_active():
                return

    def _respond_in_turn(self, turn: threading.Lock, response: Any) -> None:
        """Sends a response like `respond`, from any thread.

        One at a time, as pieces of two must not mix.
        """
        with turn:
            self.respond(response)

    def respond(self, response: Any) -> None:
        """Sends one of several responses; None: there are no more."""
        if response is None:
            self.finish(_Code.OK, "")
            self.answered = True
            return
        serialized = self.serialize(response)
        if serialized is not None:
            data, message = serialized
            self.head_sent = True
            self._send(data)
            if message is not None:
                message.finish()

    def _send(self, data: bytes) -> None:
        """Sends one of several responses when there is room, unless the call is over."""
        for waiter in self.call.send_message(data):
            waiter.block()

    # grpc.ServicerContext

    def is_active(self) -> bool:
        return self.call.is_active()

    def time_remaining(self) -> float | None:
        left_s = super().time_remaining()
        return _END_OF_TIME_S - time.time() if left_s is None else left_s

    def cancel(self) -> None:
        self.call.cancel()

    def add_callback(self, callback: Callable[[], None]) -> bool:
        return self.call.add_callback(callback)

    def set_compression(self, compression: Any) -> None:
        """Does nothing: messages are not compressed here, because memory is not a network."""

    def send_initial_metadata(self, initial_metadata: Any) -> None:
        if self.head_sent:
            raise ValueError("Initial metadata no longer allowed!")
        if not self.call.send_head(self._initial(initial_metadata)):
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

    def _status(self, code: grpc.StatusCode, details: str) -> tuple[int, bytes]:
        """Returns the servicer's code and details, or the given ones where it has named none."""
        chosen = code if self._code is None else self._code
        number = _NUMBERS[chosen] if isinstance(chosen, grpc.StatusCode) else 2
        return number, details.encode() if self._details is None else self._details


def refuse_payload(call: IncomingCall, error: RefusedError) -> None:
    """Ends a call whose request names memory that is not there; the servicer has not run."""
    stalled = isinstance(error, StalledError)
    if stalled and call.once:
        call.refuse()  # the client goes on with it by grpcio
        return
    text = f"payload that is not where the message says: {error}"
    code = (_Code.UNAVAILABLE if stalled else _Code.INVALID_ARGUMENT).value[0]
    end = frames.end_frames(call.number, code, text.encode(), trailing=(_REFUSED_PAYLOAD,))
    call.finish(end, cancelled=True)


class RequestIterator:
    """The requests of a stream, for the servicer; waits for each."""

    def __init__(self, performance: Performance) -> None:
        self._performance = performance

    def __iter__(self) -> RequestIterator:
        return self

    def __next__(self) -> Any:
        call = self._performance.call
        taken = call.request()
        while isinstance(taken, Waiter):
            taken.block()
            taken = call.request()
        if taken is None or not call.is_active():
            raise self._end()
        try:
            request = self._performance.deserialize(taken)
        finally:
            call.settle()
        if request is None:
            raise self._end()
        return request

    def _end(self) -> BaseException:
        """Returns the end of the requests; an error if it is not the client that has ended them."""
        if not self._performance.call.cancelled:
            return StopIteration()
        return self._performance.give_up()

    next = __next__
