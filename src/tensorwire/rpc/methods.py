"""The methods of a channel, as stubs call them: what happens before a call, and when it has ended.

A call goes by the runtime or by grpcio. What differs from grpcio there is what happens between the
user's message and grpcio's bytes; see `outgoing.py` and `incoming.py`.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Protocol

import grpc

from tensorwire.errors import TensorwireError

from .attachment import RpcAttachment
from .calls import ResentFuture, ResentStream, is_refused
from .envelope import mark
from .incoming import Reader
from .negotiation import MARK, OPEN, AttachmentKeeper
from .outgoing import AGAIN, PLAIN, CallLink, SentMessage, always, no_deadline
from .runtime.call import RuntimeCall
from .runtime.carry import CarriedMethod
from .tensors import delivered

_LOG = logging.getLogger("tensorwire.rpc")
_NEGOTIATE_S = 5.0
_NEGOTIATE_NOWAIT_S = 1.0


class OfMethods(Protocol):
    """The channel of methods.

    Attributes:
        inner: of grpcio.
        keeper: of its attachment.
    """

    inner: grpc.Channel
    keeper: AttachmentKeeper


class Method:
    """One method of a channel: its inner callable, and what every call of it does.

    The channel stays alive as long as a stub has its methods, as in grpcio.
    """

    def __init__(
        self,
        channel: OfMethods,
        arity: str,
        method: str,
        request_serializer: Any,
        response_deserializer: Any,
        registered: bool | None,
    ) -> None:
        self._channel = channel
        self._keeper = channel.keeper
        self._reader = Reader(response_deserializer)
        self._inner = getattr(channel.inner, arity)(
            method,
            lambda outgoing: outgoing.serialize(request_serializer),
            self._deserialize,
            registered,
        )
        self._carried = CarriedMethod(
            arity, method, request_serializer, self._deserialize, self._end
        )

    def _carrier(
        self,
        timeout: float | None,
        credentials: Any,
        wait_for_ready: Any,
        compression: Any,
        *,
        waits: bool,
    ) -> tuple[RpcAttachment | None, float | None]:
        """The attachment by which a call may go, and what is left of its timeout."""
        if not self._keeper.carries or credentials is not None or compression is not None:
            return None, timeout
        started = time.monotonic()
        attachment = self._attachment(timeout, wait_for_ready, waits=waits)
        return attachment, _left(timeout, started)

    def _deserialize(self, data: bytes) -> Any:
        return self._reader.read(data, self._keeper.find, lenient=True)

    def _begin(
        self, timeout: float | None, metadata: Any, wait_for_ready: Any, *, waits: bool
    ) -> tuple[CallLink, Any]:
        """The link of a new call, and its metadata with the mark of its attachment."""
        attachment = self._attachment(timeout, wait_for_ready, waits=waits)
        call = None if attachment is None else attachment.begin_call()
        if attachment is None or call is None:
            return PLAIN, metadata
        marked = (MARK, mark(attachment.id, *call))
        remaining = no_deadline if timeout is None else partial(_left, timeout, time.monotonic())
        link = CallLink(attachment, call, remaining, always)
        return link, (*metadata, marked) if metadata else (marked,)

    def _attachment(
        self, timeout: float | None, wait_for_ready: Any, *, waits: bool
    ) -> RpcAttachment | None:
        """The channel's, for which the server is asked if need be."""
        attachment = self._keeper.ready
        if attachment is not None or self._keeper.settled():
            return attachment
        wait_s = _NEGOTIATE_S if waits else _NEGOTIATE_NOWAIT_S
        if timeout is not None:
            wait_s = min(wait_s, max(timeout / 2, 0.0))  # the rest is for the call itself
        ask = partial(self._ask, time.monotonic() + wait_s, wait_for_ready if waits else None)
        return self._keeper.get(ask, wait_s)

    def _ask(self, until: float, wait_for_ready: Any, request: bytes) -> bytes:
        inner = self._channel.inner.unary_unary(OPEN)
        answer: bytes = inner(
            request, timeout=max(until - time.monotonic(), 0.001), wait_for_ready=wait_for_ready
        )
        return answer

    def _end(self, link: CallLink, ok: bool, code: Any = None) -> None:
        """The call is over: what it sent and nobody has seen is taken back."""
        if code is grpc.StatusCode.UNAVAILABLE:
            self._keeper.disconnected()
        elif link.foreign:
            self._keeper.pause()
        attachment = link.attachment
        if attachment is None:
            return
        link.ended = True  # before the leases are looked at: see `SentMessage`
        attachment.end_call(link.call, link.leases, ok)

    def _is_to_be_sent_again(self, outgoing: SentMessage, call: Any) -> bool:
        """Whether the payload of a request went ahead to somebody who has not got the call.

        Either the server says so, or it cannot even parse an envelope: then it is none of ours, and
        no server of ours has confirmed the call.
        """
        if not outgoing.ahead or call.code() is None:
            return False
        if is_refused(call.trailing_metadata()):
            self._keeper.pause()
            return True
        if call.code() is grpc.StatusCode.INTERNAL and not call_is_confirmed(outgoing.link):
            self._keeper.pause()
            return True
        return False


class _UnaryRequest(Method):
    """What calls with one request have in common."""

    def _blocking(
        self,
        call: Callable[..., Any],
        request: Any,
        timeout: float | None,
        metadata: Any,
        credentials: Any,
        wait_for_ready: Any,
        compression: Any,
    ) -> Any:
        started = time.monotonic()
        link, marked = self._begin(timeout, metadata, wait_for_ready, waits=True)
        outgoing = SentMessage(request, link, last=False)
        if timeout is not None:
            timeout = _left(timeout, started)
        try:
            answer = call(outgoing, timeout, marked, credentials, wait_for_ready, compression)
        except grpc.RpcError as error:
            self._end(link, False, error.code())
            if not self._is_to_be_sent_again(outgoing, error):
                raise
        except BaseException:
            self._end(link, False)
            raise
        else:
            self._end(link, True)
            if outgoing.tickets:
                delivered(outgoing.tickets)
            return answer
        plain = SentMessage(request, AGAIN, last=False)
        answer = call(
            plain, _left(timeout, started), metadata, credentials, wait_for_ready, compression
        )
        delivered(plain.tickets)
        return answer

    def _nowait(
        self,
        call: Callable[..., Any],
        wrap: Callable[..., Any],
        request: Any,
        timeout: float | None,
        metadata: Any,
        credentials: Any,
        wait_for_ready: Any,
        compression: Any,
    ) -> Any:
        started = time.monotonic()
        link, marked = self._begin(timeout, metadata, wait_for_ready, waits=False)
        timeout = _left(timeout, started)
        outgoing = SentMessage(request, link, last=False)
        try:
            first = call(outgoing, timeout, marked, credentials, wait_for_ready, compression)
        except BaseException:
            self._end(link, False)
            raise
        if link.attachment is None and not outgoing.tickets:
            return first
        self._when_ended(first, link, outgoing.tickets)
        if not outgoing.ahead:
            return first

        def again(ended: Any) -> Any:
            if not self._is_to_be_sent_again(outgoing, ended):
                return None
            plain = SentMessage(request, AGAIN, last=False)
            return call(
                plain, _left(timeout, started), metadata, credentials, wait_for_ready, compression
            )

        return wrap(first, again, partial(call_is_confirmed, link))

    def _when_ended(self, call: Any, link: CallLink, tickets: Sequence[int]) -> None:
        # A call that is forgotten is cancelled when it is collected: nothing here may hold it.
        state = weakref.ref(call)
        ended = partial(_ended, self, link, tickets, state)
        if not call.add_callback(ended):
            ended()


def call_is_confirmed(link: CallLink) -> bool:
    """Whether the attachment's server has the call. True if nobody can know any more."""
    attachment = link.attachment
    try:
        return attachment is None or attachment.lost or attachment.confirmed(link.call)
    except TensorwireError:
        return True


def _ended(method: Method, link: CallLink, tickets: Sequence[int], state: Any) -> None:
    """A callback of grpcio, whose thread does not survive an exception."""
    try:
        call = state()
        code = None if call is None else call.code()
        ok = code is grpc.StatusCode.OK
        method._end(link, ok, code)
        if ok:
            delivered(tickets)
    except Exception:
        _LOG.exception("ending a call failed")


class UnaryUnary(_UnaryRequest, grpc.UnaryUnaryMultiCallable):
    """See `grpc.UnaryUnaryMultiCallable`."""

    def _carry(
        self,
        request: Any,
        timeout: float | None,
        metadata: Any,
        credentials: Any,
        wait_for_ready: Any,
        compression: Any,
        again: Callable[[], Any] | None = None,
    ) -> RuntimeCall | None:
        """Begins a call by the runtime; None: by grpcio."""
        attachment, left = self._carrier(
            timeout, credentials, wait_for_ready, compression, waits=again is None
        )
        if attachment is None:
            return None
        return self._carried.begin(attachment, request, left, metadata, again)

    def __call__(
        self,
        request: Any,
        timeout: float | None = None,
        metadata: Any = None,
        credentials: Any = None,
        wait_for_ready: Any = None,
        compression: Any = None,
    ) -> Any:
        given = timeout, metadata, credentials, wait_for_ready, compression
        call = self._carry(request, *given)
        if call is not None and call.wait_blocking():
            return call.result()
        return self._blocking(self._inner, request, *given)

    def with_call(
        self,
        request: Any,
        timeout: float | None = None,
        metadata: Any = None,
        credentials: Any = None,
        wait_for_ready: Any = None,
        compression: Any = None,
    ) -> Any:
        given = timeout, metadata, credentials, wait_for_ready, compression
        call = self._carry(request, *given)
        if call is not None and call.wait_blocking():
            return call.result(), call
        return self._blocking(self._inner.with_call, request, *given)

    def future(
        self,
        request: Any,
        timeout: float | None = None,
        metadata: Any = None,
        credentials: Any = None,
        wait_for_ready: Any = None,
        compression: Any = None,
    ) -> Any:
        given = timeout, metadata, credentials, wait_for_ready, compression
        again = partial(self._nowait, self._inner.future, ResentFuture, request, *given)
        call = self._carry(request, *given, again)
        return again() if call is None else call


class UnaryStream(_UnaryRequest, grpc.UnaryStreamMultiCallable):
    """See `grpc.UnaryStreamMultiCallable`."""

    def __call__(
        self,
        request: Any,
        timeout: float | None = None,
        metadata: Any = None,
        credentials: Any = None,
        wait_for_ready: Any = None,
        compression: Any = None,
    ) -> Any:
        attachment, left = self._carrier(
            timeout, credentials, wait_for_ready, compression, waits=False
        )
        if attachment is not None:
            call = self._carried.begin(attachment, request, left, metadata)
            if call is not None:
                return call
        given = timeout, metadata, credentials, wait_for_ready, compression
        return self._nowait(self._inner, ResentStream, request, *given)


class _StreamRequest(Method):
    """What calls with a stream of requests have in common.

    Requests that were sent cannot be sent again, so payload goes ahead only when the server has
    confirmed the call. Whoever else has it gets plain messages.
    """

    def _start(
        self, timeout: float | None, metadata: Any, wait_for_ready: Any, *, waits: bool
    ) -> tuple[CallLink, Any, float | None]:
        started = time.monotonic()
        link, marked = self._begin(timeout, metadata, wait_for_ready, waits=waits)
        if link is not PLAIN:
            link.must_confirm = True
        return link, marked, _left(timeout, started)

    def _carry(
        self,
        requests: Any,
        timeout: float | None,
        metadata: Any,
        credentials: Any,
        wait_for_ready: Any,
        compression: Any,
        *,
        waits: bool,
    ) -> RuntimeCall | None:
        """Begins a call by the runtime; None: by grpcio, and nothing of it was sent."""
        attachment, left = self._carrier(
            timeout, credentials, wait_for_ready, compression, waits=waits
        )
        if attachment is None:
            return None
        return self._carried.begin_stream(attachment, requests, left, metadata, waits=waits)

    def _blocking(
        self,
        call: Callable[..., Any],
        requests: Iterator[Any],
        timeout: float | None,
        metadata: Any,
        credentials: Any,
        wait_for_ready: Any,
        compression: Any,
    ) -> Any:
        link, marked, timeout = self._start(timeout, metadata, wait_for_ready, waits=True)
        ended = False
        link_needed(link, lambda: not ended)
        try:
            answer = call(
                _Requests(requests, link), timeout, marked, credentials, wait_for_ready, compression
            )
        except BaseException as error:
            ended = True
            self._end(link, False, error.code() if isinstance(error, grpc.Call) else None)
            raise
        ended = True
        self._end(link, True)
        return answer

    def _nowait(
        self,
        call: Callable[..., Any],
        requests: Iterator[Any],
        timeout: float | None,
        metadata: Any,
        credentials: Any,
        wait_for_ready: Any,
        compression: Any,
    ) -> Any:
        link, marked, timeout = self._start(timeout, metadata, wait_for_ready, waits=False)
        over: list[bool] = []
        link_needed(link, lambda: not over)
        try:
            first = call(
                _Requests(requests, link), timeout, marked, credentials, wait_for_ready, compression
            )
        except BaseException:
            self._end(link, False)
            raise
        if link is not PLAIN:
            state = weakref.ref(first)

            def ended() -> None:
                over.append(True)
                _ended(self, link, (), state)

            if not first.add_callback(ended):
                ended()
        return first


def link_needed(link: CallLink, needed: Callable[[], bool]) -> None:
    """Tells a link how to ask whether its call goes on."""
    if link is not PLAIN:
        link.needed = needed


class _Requests:
    """The user's requests, each with its link."""

    def __init__(self, requests: Iterator[Any], link: CallLink) -> None:
        self._requests = requests
        self._link = link

    def __iter__(self) -> _Requests:
        return self

    def __next__(self) -> SentMessage:
        return SentMessage(next(self._requests), self._link, last=True)


class StreamUnary(_StreamRequest, grpc.StreamUnaryMultiCallable):
    """See `grpc.StreamUnaryMultiCallable`."""

    def __call__(
        self,
        request_iterator: Any,
        timeout: float | None = None,
        metadata: Any = None,
        credentials: Any = None,
        wait_for_ready: Any = None,
        compression: Any = None,
    ) -> Any:
        given = timeout, metadata, credentials, wait_for_ready, compression
        call = self._carry(request_iterator, *given, waits=True)
        if call is not None:
            call.wait_blocking()
            return call.result()
        return self._blocking(self._inner, request_iterator, *given)

    def with_call(
        self,
        request_iterator: Any,
        timeout: float | None = None,
        metadata: Any = None,
        credentials: Any = None,
        wait_for_ready: Any = None,
        compression: Any = None,
    ) -> Any:
        given = timeout, metadata, credentials, wait_for_ready, compression
        call = self._carry(request_iterator, *given, waits=True)
        if call is not None:
            call.wait_blocking()
            return call.result(), call
        return self._blocking(self._inner.with_call, request_iterator, *given)

    def future(
        self,
        request_iterator: Any,
        timeout: float | None = None,
        metadata: Any = None,
        credentials: Any = None,
        wait_for_ready: Any = None,
        compression: Any = None,
    ) -> Any:
        given = timeout, metadata, credentials, wait_for_ready, compression
        call = self._carry(request_iterator, *given, waits=False)
        return self._nowait(self._inner.future, request_iterator, *given) if call is None else call


class StreamStream(_StreamRequest, grpc.StreamStreamMultiCallable):
    """See `grpc.StreamStreamMultiCallable`."""

    def __call__(
        self,
        request_iterator: Any,
        timeout: float | None = None,
        metadata: Any = None,
        credentials: Any = None,
        wait_for_ready: Any = None,
        compression: Any = None,
    ) -> Any:
        given = timeout, metadata, credentials, wait_for_ready, compression
        call = self._carry(request_iterator, *given, waits=False)
        return self._nowait(self._inner, request_iterator, *given) if call is None else call


def _left(timeout: float | None, started: float) -> float | None:
    """What is left of a timeout that counts from `started`."""
    return None if timeout is None else timeout - (time.monotonic() - started)
