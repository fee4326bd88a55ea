"""Decides which calls of a client use the runtime and which use grpcio."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Generic, TypeVar

import grpc

from .. import logs
from ..payload.attachment import RpcAttachment
from ..payload.encode import Serializer, as_sent
from ..payload.leases import Lease
from ..payload.outgoing import CallLink, SentMessage
from ..payload.tensors import delivered
from ..payload.threads import THREADS
from . import observed
from .call import RuntimeCall, StreamCall
from .engine import OVERDUE, CallState, Ending
from .flow import Outflow, Waiter
from .frames import Metadata, Number, as_metadata, last_frame, message_frames
from .leaving import leaving

LONGEST_S = 1e9
"""The longest timeout of a call here, in seconds; grpcio takes longer ones."""

NOT_SERIALIZED = Ending(grpc.StatusCode.INTERNAL, "Exception serializing request!")
_OK = grpc.StatusCode.OK
_INTERRUPTED = Ending(grpc.StatusCode.CANCELLED, "the caller was interrupted")

Failed = Callable[[RpcAttachment, Number, Sequence[Lease], grpc.StatusCode | None], None]


_Call = TypeVar("_Call", bound=CallState)


class AnyMethod(Generic[_Call]):
    """A method of a client, in either world.

    Attributes:
        kinds: of its calls, with one response and with a stream of them.

    Args:
        arity: "unary_unary" and so on.
        serializer: the user's, of requests.
        deserialize: makes the user's response of bytes, and of its call.
        failed: called for each call that has not ended well, with its payload and its code, if any.
        owner: the channel; its calls end together.
    """

    kinds: tuple[type[_Call], type[_Call]]

    def __init__(
        self,
        arity: str,
        serializer: Any,
        deserialize: Callable[[bytes, Any], Any],
        failed: Failed,
        owner: object,
    ) -> None:
        self._owner = owner
        self._arity = arity
        self._serializer = serializer
        self._deserialize = deserialize
        self._failed = failed
        self._sends_stream = arity.startswith("stream")
        self._takes_stream = arity.endswith("stream")

    def _new(
        self,
        attachment: RpcAttachment | None,
        method: str,
        timeout: float | None,
        metadata: Any,
    ) -> tuple[Any, _Call, Metadata] | None:
        """Returns client, call and metadata of a call to begin; None: grpcio has to make it.

        Args:
            attachment: of the channel, None if there is none.
            method: its full name.
            timeout: in seconds.
            metadata: the user's.
        """
        client: Any = None if attachment is None else attachment.runtime
        if attachment is None or client is None or not client.usable:
            return None
        if timeout is not None and not 0 < timeout < LONGEST_S:
            return None
        entries = as_metadata(metadata) if metadata else ()
        if entries is None:
            return None  # grpcio raises the right error
        number = attachment.begin_call()
        if number is None:
            return None
        deadline = None if timeout is None else time.monotonic() + timeout
        outflow = Outflow() if self._sends_stream else None
        kind = self.kinds[self._takes_stream]
        call = kind(client, number, deadline, self._deserialize, self._end, outflow)
        call.attachment, call.owner = attachment, self._owner
        if observed.OBSERVER is not None:
            call.traced = observed.watched("client", self._arity, method)
            call.began_ns = 0 if call.traced is None else call.traced.begin()
        return client, call, entries

    def _end(self, call: _Call, code: grpc.StatusCode | None) -> None:
        """Gives back the number of a call that has ended; its code is None if grpcio makes it."""
        link, ok = call.known_link, code is _OK
        leases: Sequence[Lease] = ()
        if link is not None:
            link.ended = True  # before the leases are looked at: see `SentMessage`
            leases = link.leases
            if ok and link.tickets:
                delivered(link.tickets)
        if ok:
            call.attachment.end_call(call.number, leases, complete=True)
        else:
            self._failed(call.attachment, call.number, leases, code)
        if call.traced is not None:
            if code is None:
                call.traced.not_begun()
            else:
                call.traced.ended(call.began_ns, code.name)


class RequestSender:
    """Sends the streamed requests of a call, from an iterator in a thread or as they are written.

    The call is kept only weakly, so that a call that is forgotten is cancelled, as in grpcio.

    Args:
        client: by which it goes.
        call: with an `outflow`.
    """

    def __init__(self, client: Any, call: CallState) -> None:
        assert call.outflow is not None
        self._client = client
        self._call = weakref.ref(call)
        self._number: Number = call.number
        self._outflow: Outflow = call.outflow

    def send(self, data: bytes, new: Callable[[], Waiter] = Waiter) -> Iterator[Waiter]:
        """Sends the bytes of a request; yields each waiter to wait for before it goes on.

        It ends early with the call.

        Args:
            data: the bytes.
            new: makes a waiter.
        """
        most = self._client.limits.send_bytes
        if 0 <= most < len(data):
            text = f"CLIENT: Sent message larger than max ({len(data)} vs. {most})"
            self._abort(Ending(grpc.StatusCode.RESOURCE_EXHAUSTED, text))
            return
        yield from self._outflow.send(message_frames(self._number, data), self._client.send, new)

    def goes_on(self) -> bool:
        """Returns whether the call goes on."""
        return not self._outflow.closed

    def send_last(self) -> None:
        """Sends the frame that says that there are no more requests."""
        if self.goes_on():
            self._client.send((last_frame(self._number),))

    def run(
        self, requests: Iterator[Any], link: CallLink, serializer: Serializer, traced: Any
    ) -> None:
        """Sends all requests in a thread, and then the last frame; ends early with the call.

        Args:
            requests: the user's.
            link: of the call.
            serializer: the user's.
            traced: counts messages; None if they are not counted.
        """
        while self.goes_on():
            try:
                request = next(requests)
            except StopIteration:
                break
            except Exception:
                logs.CHANNEL.exception("Exception iterating requests!")
                self._abort(Ending(grpc.StatusCode.UNKNOWN, "Exception iterating requests!"))
                return
            if not self.goes_on():
                return
            message = SentMessage(request, link, last=True)
            try:
                data = observed.serialize(traced, message, serializer)
            except Exception:
                logs.COMMON.exception("Exception serializing message!")
                data = None
            if not isinstance(data, bytes):
                self._abort(Ending(grpc.StatusCode.INTERNAL, "Exception serializing request!"))
                return
            for waiter in self.send(data):
                self._client.reader.wait(waiter, None)
            message.finish()
            del request, data, message
        self.send_last()

    def _abort(self, ending: Ending) -> None:
        call = self._call()
        if call is not None:
            call.end_here(ending)


class CarriedMethod(AnyMethod[RuntimeCall]):
    """A method of a client whose calls threads make.

    Args:
        arity, serializer, deserialize, failed, owner: as of `AnyMethod`.
        method: its full name.
    """

    kinds = RuntimeCall, StreamCall

    def __init__(self, arity: str, method: str, *given: Any) -> None:
        super().__init__(arity, *given)
        self._method = method
        self._name = method.encode()

    def begin(
        self,
        attachment: RpcAttachment | None,
        request: Any,
        timeout: float | None,
        metadata: Any,
        again: Callable[[Any], Any] | None = None,
        *,
        waits: bool = True,
    ) -> RuntimeCall | None:
        """Begins a call; None: grpcio has to make it, and nothing has been sent.

        Args:
            attachment: of the channel, None if there is none.
            request: the user's, or an iterator of them.
            timeout: in seconds.
            metadata: the user's.
            again: makes the call by grpcio, for one with one request and one response that no
                thread waits for.
            waits: the caller waits for the only response, and makes the call by grpcio if it was
                refused.

        Raises:
            RuntimeCall: the request cannot be serialized, or the call failed as it began.
        """
        began = self._new(attachment, self._method, timeout, metadata)
        if began is None:
            return None
        client, call, entries = began
        if self._sends_stream:
            sender, link = RequestSender(client, call), call.link()
            link.goes_on = sender.goes_on
            if not waits:
                call.leave_unattended()
            client.begin(call, self._name, entries, None)
            THREADS.run(partial(sender.run, request, link, self._serializer, call.traced))
            return call
        call.waits = waits
        outgoing: SentMessage | None = None
        data: Any = None
        try:
            data, outgoing = leaving(
                request, call, self._serializer, last=False, keeps_body=again is not None
            )
        except Exception:
            logs.COMMON.exception("Exception serializing message!")
        except BaseException:
            call.conclude(_INTERRUPTED)
            raise
        if not isinstance(data, bytes):
            if data is not None and self._serializer is None:
                call.leave_to_grpcio()
                return None  # grpcio says that it takes bytes
            call.conclude(NOT_SERIALIZED)
            raise call
        if call.deadline is not None and call.deadline <= time.monotonic():
            # It passed while the message waited for memory: grpcio is no way out now.
            call.conclude(OVERDUE)
            return call
        if again is not None:
            sent = as_sent(request, data if outgoing is None else outgoing.body)
            call.sends_again(partial(again, sent))
        if outgoing is not None:
            call.link().tickets = outgoing.tickets
        if not waits:
            call.leave_unattended()
        client.begin(call, self._name, entries, data)
        if outgoing is not None and outgoing.staging is not None:
            try:
                outgoing.finish()
            except BaseException:
                call.end_here(_INTERRUPTED)
                raise
        return call
