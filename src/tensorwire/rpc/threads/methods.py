"""Implements a channel's methods for stubs: the steps before a call and after its end.

A call uses the runtime or grpcio. In the second case only the steps between the user's message and
grpcio's bytes differ; see `payload/outgoing.py` and `payload/incoming.py`.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import grpc

from .. import logs
from ..attach.marks import Sender, SmallCall, SmallRequests, call_is_confirmed
from ..attach.sharing import ChannelShare
from ..payload.encode import as_sent
from ..payload.envelope import MAGIC
from ..payload.incoming import Reader
from ..payload.outgoing import AGAIN, CallLink, SentMessage, is_kept
from ..payload.tensors import delivered
from ..runtime.call import RuntimeCall
from ..runtime.carry import CarriedMethod
from .calls import Overdue, Resent, ResentStream, outcome


class CallOptions:
    """The arguments of grpcio's callables after the request, under its names and in its order.

    The timeout counts from here on, through all steps before the call and a second attempt.
    """

    __slots__ = ("_until", "compression", "credentials", "metadata", "wait_for_ready")

    def __init__(
        self,
        timeout: float | None = None,
        metadata: Any = None,
        credentials: Any = None,
        wait_for_ready: Any = None,
        compression: Any = None,
    ) -> None:
        self._until = None if timeout is None else time.monotonic() + timeout
        self.metadata = metadata
        self.credentials = credentials
        self.wait_for_ready = wait_for_ready
        self.compression = compression

    @property
    def timeout(self) -> float | None:
        """The rest of the timeout, in seconds; None if there is none."""
        return None if self._until is None else self._until - time.monotonic()

    @property
    def is_over(self) -> bool:
        """True when nothing is left of the timeout."""
        return self._until is not None and self._until <= time.monotonic()

    def behind(self, request: Any, metadata: Any) -> tuple[Any, ...]:
        """Returns all arguments of a callable of grpcio, with metadata in place of the user's."""
        return (
            request, self.timeout, metadata, self.credentials, self.wait_for_ready, self.compression
        )  # fmt: skip


class _Answers(Sender):
    """The last steps of a method's calls: reads responses, takes back payload that was not read.

    Calls have it, and it has the channel, which stays alive as long as one of them does. It does
    not know the method: one that is forgotten is gone at once, and its channel with it, as in
    grpcio.

    Args:
        channel: of the method.
        reader: of its responses.
    """

    def __init__(self, channel: Any, reader: Reader) -> None:
        super().__init__(channel.share)
        self._channel = channel
        self._reader = reader

    def of_grpcio(self) -> Callable[[bytes], Any]:
        """Returns the deserializer of grpcio's calls."""
        plain, read = self._reader.plain, self.read
        least_bytes, notice = self.share.least_bytes, self.share.notice

        def deserialize(data: bytes) -> Any:
            if data.startswith(MAGIC):
                return read(data)
            if len(data) >= least_bytes:
                notice(len(data))
            return data if plain is None else plain(data)

        return deserialize

    def read(self, data: bytes, call: RuntimeCall | None = None) -> Any:
        """Returns the user's response; `call` is given if it is one of the runtime."""
        if not data.startswith(MAGIC):
            plain = self._reader.plain
            return data if plain is None else plain(data)
        needed = None if call is None else call.link().awaits_messages
        return self._reader.read(data, self.share.find, needed=needed)


class Method:
    """One method of a channel: its inner callable, and the steps of every call of it.

    The channel stays alive as long as a stub has its methods, as in grpcio.

    Args:
        channel: the `RpcChannel`.
        arity: "unary_unary" and so on.
        method: its full name.
        request_serializer, response_deserializer, registered: the user's, as for grpcio.
    """

    def __init__(
        self,
        channel: Any,
        arity: str,
        method: str,
        request_serializer: Any,
        response_deserializer: Any,
        registered: bool | None,
    ) -> None:
        self._channel = channel
        self._share: ChannelShare = channel.share
        self._sends_stream, streams = arity.startswith("stream"), arity.endswith("stream")
        reader = Reader(response_deserializer, streams=streams)
        self._answers = answers = _Answers(channel, reader)
        self._serializer = request_serializer
        self._end = answers.end
        self._reading = answers.of_grpcio()
        self._inner = getattr(channel.inner, arity)(
            method,
            lambda outgoing: outgoing.serialize(request_serializer),
            self._reading,
            registered,
        )
        # For calls that no thread waits for.
        self._start = self._inner if streams else self._inner.future
        self._wrap = ResentStream if streams else Resent
        self._carried = CarriedMethod(
            arity, method, request_serializer, answers.read, answers.fail, self._share
        )

    def _carry(
        self,
        request: Any,
        options: CallOptions,
        again: Callable[[Any], Any] | None = None,
        *,
        waits: bool,
    ) -> RuntimeCall | None:
        """Begins a call by the runtime; None: grpcio has to make it, and nothing was sent."""
        share = self._share
        if options.credentials is not None or options.compression is not None or not share.carries:
            return None
        given = share.current, request, options.timeout, options.metadata, again
        return self._carried.begin(*given, waits=waits)

    def _outcome(self, request: Any, options: CallOptions) -> Any:
        """Makes a call and waits for it; returns its response and the call."""
        call = self._carry(request, options, waits=True)
        if call is not None and call.wait_blocking():
            return call.result(), call
        return self._blocking(request, options, with_call=True)

    def _begun(self, request: Any, options: CallOptions) -> Any:
        """Begins a call that no thread waits for."""
        call = self._carry(request, options, waits=False)
        return self._nowait(request, options) if call is None else call

    def _sent(self, request: Any, link: CallLink, *, waits: bool) -> Any:
        """Returns the object for grpcio in the place of the user's request or requests.

        Args:
            request: the user's.
            link: of the call.
            waits: the caller waits for the only response.
        """
        if self._sends_stream:
            # What was sent cannot be sent again, so payload goes ahead only when the server has
            # confirmed the call. Any other server gets plain messages.
            if link.attachment is not None:
                link.must_confirm, link.window = True, link.attachment.window()
            return _Requests(request, link)
        if not waits and link.attachment is not None:
            link.never_waits()
        return SentMessage(request, link, last=False, keeps_body=not waits)

    def _is_to_be_sent_again(self, outgoing: SentMessage, call: Any) -> bool:
        """Returns whether a call that has ended is to be made once more."""
        if not outgoing.ahead or call.code() is None:
            return False
        return self._answers.is_to_be_sent_again(outgoing, call.code(), call.trailing_metadata())

    # Calls of grpcio.

    def _blocking(self, request: Any, options: CallOptions, *, with_call: bool) -> Any:
        link, marked = self._answers.begin(options.metadata, lambda: options.timeout)
        outgoing = self._sent(request, link, waits=True)
        try:
            answer = self._answer(outgoing, marked, options, with_call=with_call)
        except BaseException as error:
            call: Any = error if isinstance(error, grpc.Call) else None
            self._end(link, False, None if call is None else call.code())
            if call is None or not self._is_to_be_sent_again(outgoing, call):
                raise
            del call
        else:
            self._end(link, True)
            if outgoing.tickets:
                delivered(outgoing.tickets)
            return answer
        plain = SentMessage(request, AGAIN, last=False)
        answer = self._answer(plain, options.metadata, options, with_call=with_call)
        delivered(plain.tickets)
        return answer

    def _answer(
        self, outgoing: Any, metadata: Any, options: CallOptions, *, with_call: bool
    ) -> Any:
        """Makes a call of grpcio and waits for it. It ends at its deadline, if it has one."""
        if options.timeout is None:
            call = self._inner.with_call if with_call else self._inner
            return call(*options.behind(outgoing, metadata))
        outgoing.prepare(self._serializer)
        if options.is_over:  # while it waited for the server; another way is too late now
            raise Overdue()
        given = options.behind(outgoing, metadata)
        return _in_time(self._inner, given, outgoing.is_kept, with_call=with_call)

    def _nowait(self, request: Any, options: CallOptions) -> Any:
        link, marked = self._answers.begin(options.metadata, lambda: options.timeout)
        outgoing = self._sent(request, link, waits=False)
        try:
            first = self._started(outgoing, marked, options)
        except BaseException:
            self._end(link, False)
            raise
        _when_ended(first, partial(self._end, link), outgoing.tickets)
        if not outgoing.ahead:
            return self._wrap(first, options.timeout) if outgoing.is_kept else first

        def again(ended: Any) -> Any:
            if not self._is_to_be_sent_again(outgoing, ended):
                return None
            plain = SentMessage(as_sent(request, outgoing.body), AGAIN, last=False)
            second = self._started(plain, options.metadata, options)
            return self._wrap(second, options.timeout) if plain.is_kept else second

        return self._wrap(first, options.timeout, again, partial(call_is_confirmed, link))

    def _started(self, outgoing: Any, metadata: Any, options: CallOptions) -> Any:
        """Begins a call of grpcio, if its time is not over."""
        if options.timeout is not None:
            outgoing.prepare(self._serializer)
            if options.is_over:  # while it waited for the server; another way is too late now
                return Overdue()
        return self._start(*options.behind(outgoing, metadata))


def _in_time(inner: Any, given: tuple[Any, ...], is_kept: bool, *, with_call: bool) -> Any:
    """Makes a call of grpcio that has a deadline, and waits for it no longer than that.

    Args:
        inner: of grpcio.
        given: its arguments, see `CallOptions`.
        is_kept: grpcio may keep the thread that waits in there.
        with_call: as of grpcio.
    """
    if not is_kept:
        return (inner.with_call if with_call else inner)(*given)
    return outcome(inner.future(*given), given[1], with_call=with_call)


def _when_ended(call: Any, end: Callable[[bool, Any], None], tickets: Sequence[int] = ()) -> None:
    # A call that is forgotten is cancelled when it is collected: nothing here may hold it.
    ended = partial(_ended, end, tickets, weakref.ref(call))
    if not call.add_callback(ended):
        ended()


def _ended(end: Callable[[bool, Any], None], tickets: Sequence[int], state: Any) -> None:
    """Ends a call as a callback of grpcio, whose thread does not survive an exception."""
    try:
        call = state()
        code = None if call is None else call.code()
        ok = code is grpc.StatusCode.OK
        end(ok, code)
        if ok:
            delivered(tickets)
    except Exception:
        logs.OWN.exception("ending a call failed")


class UnaryUnary(Method, grpc.UnaryUnaryMultiCallable):
    """See `grpc.UnaryUnaryMultiCallable`."""

    def __init__(self, channel: Any, arity: str, method: str, *given: Any) -> None:
        super().__init__(channel, arity, method, *given)
        # `tensorwire rpc trace` counts the work of serializers that grpcio calls.
        watched = hasattr(self._inner, "_tensorwire_trace")
        self._small = SmallRequests(channel.share, self._serializer, watched=watched)
        self._stock = channel.inner.unary_unary(method, None, self._reading, given[-1])

    def __call__(
        self,
        request: Any,
        timeout: float | None = None,
        metadata: Any = None,
        credentials: Any = None,
        wait_for_ready: Any = None,
        compression: Any = None,
    ) -> Any:
        attachment, options = self._share.current, None
        if attachment is None or attachment.runtime is None:
            small = self._small.begin(request, metadata, attachment)
            if type(small) is SmallCall:
                return self._finish_small(
                    small, False, timeout, small.metadata, credentials, wait_for_ready, compression
                )
            request = request if small is None else small
        elif credentials is None and compression is None:
            if timeout is not None:  # which counts from here on
                options = CallOptions(timeout, metadata, None, wait_for_ready, None)
            call = self._carried.begin(attachment, request, timeout, metadata)
            if call is not None and call.wait_blocking():
                return call.result()
        if options is None:
            options = CallOptions(timeout, metadata, credentials, wait_for_ready, compression)
        return self._blocking(request, options, with_call=False)

    def _finish_small(
        self, small: SmallCall, with_call: bool, timeout: float | None, *given: Any
    ) -> Any:
        """Makes a call with a small request, and waits for it."""
        call, body = self._stock, small.body
        try:
            if timeout is None:
                answer = (call.with_call if with_call else call)(body, None, *given)
            else:
                given = body, timeout, *given
                answer = _in_time(call, given, is_kept(body), with_call=with_call)
        except BaseException as error:
            code = error.code() if isinstance(error, grpc.Call) else None
            self._answers.end_small(small, code)
            raise
        small.end(True)
        return answer

    def with_call(self, request: Any, *given: Any, **named: Any) -> Any:
        options = CallOptions(*given, **named)
        small = self._small.begin(request, options.metadata, self._share.current)
        if type(small) is SmallCall:
            _, *taken = options.behind(small.body, small.metadata)
            return self._finish_small(small, True, *taken)
        return self._outcome(request if small is None else small, options)

    def future(self, request: Any, *given: Any, **named: Any) -> Any:
        options = CallOptions(*given, **named)
        small = self._small.begin(request, options.metadata, self._share.current)
        if type(small) is SmallCall:
            try:
                first = self._stock.future(*options.behind(small.body, small.metadata))
            except BaseException:
                small.end(False)
                raise
            _when_ended(first, lambda _, code: self._answers.end_small(small, code))
            if options.timeout is None or not is_kept(small.body):
                return first
            return Resent(first, options.timeout)
        request = request if small is None else small
        again = partial(self._nowait, options=options)
        call = self._carry(request, options, again, waits=False)
        return self._nowait(request, options) if call is None else call


class UnaryStream(Method, grpc.UnaryStreamMultiCallable):
    """See `grpc.UnaryStreamMultiCallable`."""

    def __call__(self, request: Any, *given: Any, **named: Any) -> Any:
        return self._begun(request, CallOptions(*given, **named))


class _Requests:
    """The user's requests, each with its link, with the interface of one `SentMessage`."""

    ahead, is_kept, tickets = False, False, ()

    def __init__(self, requests: Iterator[Any], link: CallLink) -> None:
        self._requests = requests
        self._link = link

    def prepare(self, serializer: Any) -> None:
        """Takes note that their call has a deadline: grpcio may keep it beyond that."""
        self.is_kept = True

    def __iter__(self) -> _Requests:
        return self

    def __next__(self) -> SentMessage:
        return SentMessage(next(self._requests), self._link, last=True)


class StreamUnary(Method, grpc.StreamUnaryMultiCallable):
    """See `grpc.StreamUnaryMultiCallable`."""

    def __call__(self, request_iterator: Any, *given: Any, **named: Any) -> Any:
        return self._outcome(request_iterator, CallOptions(*given, **named))[0]

    def with_call(self, request_iterator: Any, *given: Any, **named: Any) -> Any:
        return self._outcome(request_iterator, CallOptions(*given, **named))

    def future(self, request_iterator: Any, *given: Any, **named: Any) -> Any:
        return self._begun(request_iterator, CallOptions(*given, **named))


class StreamStream(Method, grpc.StreamStreamMultiCallable):
    """See `grpc.StreamStreamMultiCallable`."""

    def __call__(self, request_iterator: Any, *given: Any, **named: Any) -> Any:
        return self._begun(request_iterator, CallOptions(*given, **named))


METHODS: dict[str, type[Method]] = {
    "unary_unary": UnaryUnary,
    "unary_stream": UnaryStream,
    "stream_unary": StreamUnary,
    "stream_stream": StreamStream,
}
"""The classes of methods by their arities."""
