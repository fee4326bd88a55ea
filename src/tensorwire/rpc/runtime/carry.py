"""Decides which calls of a client use the runtime and which use grpcio."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Generic, TypeVar

import grpc

from .. import logs
from ..payload.attachment import RpcAttachment
from ..payload.encode import as_sent
from ..payload.outgoing import CallLink, SentMessage, always, no_deadline
from ..payload.tensors import delivered
from ..payload.threads import THREADS
from . import observed
from .call import RuntimeCall, StreamCall
from .engine import OVERDUE, CallState, Ending
from .flow import Outflow
from .frames import Metadata, as_metadata
from .leaving import leaving
from .requests import RequestSender

LONGEST_S = 1e9
"""The longest timeout of a call here, in seconds; grpcio takes longer ones."""

NOT_SERIALIZED = Ending(grpc.StatusCode.INTERNAL, "Exception serializing request!")
_INTERRUPTED = Ending(grpc.StatusCode.CANCELLED, "the caller was interrupted")

Ended = Callable[[CallLink, bool, grpc.StatusCode | None], None]


_Call = TypeVar("_Call", bound=CallState)


class AnyMethod(Generic[_Call]):
    """A method of a client, of whichever world.

    Attributes:
        kinds: of its calls, with one response and with a stream of them.

    Args:
        arity: "unary_unary" and so on.
        serializer: the user's, of requests.
        deserialize: makes the user's response of bytes, and of the link of its call.
        ended: called with the ending of each call.
        owner: the channel; its calls end together.
    """

    kinds: tuple[type[_Call], type[_Call]]

    def __init__(
        self,
        arity: str,
        serializer: Any,
        deserialize: Callable[..., Any],
        ended: Ended,
        owner: object,
    ) -> None:
        self._owner = owner
        self._arity = arity
        self._serializer = serializer
        self._deserialize = deserialize
        self._ended = ended
        self._sends_stream, self._takes_stream = (
            arity.startswith("stream"),
            arity.endswith("stream"),
        )

    def _new(
        self,
        attachment: RpcAttachment | None,
        method: str,
        timeout: float | None,
        metadata: Any,
    ) -> tuple[Any, _Call, CarriedLink, Metadata] | None:
        """Returns client, call, link and metadata of a call to begin; None: grpcio has to make it.

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
        remaining = no_deadline if deadline is None else partial(_left, deadline)
        traced = None
        if observed.OBSERVER is not None:
            traced = observed.watched("client", self._arity, method)
        link = CarriedLink(attachment, number, remaining, always, self._ended, traced)
        deserialize: Callable[[bytes], Any] = partial(self._deserialize, link=link)
        if traced is not None:
            deserialize = partial(traced.deserialize, deserialize, protocol="runtime")
        kind = self.kinds[self._takes_stream]
        outflow = Outflow() if self._sends_stream else None
        call = kind(client, number, deadline, deserialize, link.tell, outflow)
        call.owner = self._owner
        return client, call, link, entries


class CarriedMethod(AnyMethod[RuntimeCall]):
    """A method of a client whose calls threads make.

    Args:
        arity, serializer, deserialize, ended: as of `AnyMethod`.
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
    ) -> RuntimeCall | None:
        """Begins a call with one request; None: grpcio has to make it, and nothing has been sent.

        Args:
            attachment: of the channel, None if there is none.
            request: the user's.
            timeout: in seconds.
            metadata: the user's.
            again: makes the call by grpcio, for one with one response that no thread waits for;
                None: its caller waits, and makes the call by grpcio if it was refused.

        Raises:
            RuntimeCall: the request cannot be serialized, or the call failed as it began.
        """
        began = self._new(attachment, self._method, timeout, metadata)
        if began is None:
            return None
        client, call, link, entries = began
        if again is not None or self._takes_stream:
            link.never_waits()
        outgoing: SentMessage | None = None
        data: Any = None
        try:
            data, outgoing = leaving(
                request, link, self._serializer, last=False, keeps_body=again is not None
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
        if link.left_s(1.0) <= 0:  # passed while it waited for memory: grpcio is no way out now
            call.conclude(OVERDUE)
            return call
        if again is not None:
            sent = as_sent(request, data if outgoing is None else outgoing.body)
            call.sends_again(partial(again, sent))
        if outgoing is not None:
            link.leaves(outgoing)
        if again is not None or self._takes_stream:
            call.leave_unattended()
        client.begin(call, self._name, entries, data)
        if outgoing is not None and outgoing.staging is not None:
            try:
                outgoing.finish()
            except BaseException:
                call.end_here(_INTERRUPTED)
                raise
        return call

    def begin_stream(
        self,
        attachment: RpcAttachment | None,
        requests: Any,
        timeout: float | None,
        metadata: Any,
        *,
        waits: bool,
    ) -> RuntimeCall | None:
        """Begins a call with a stream of requests; None: grpcio has to make it, see `begin`.

        Args:
            attachment: of the channel, None if there is none.
            requests: an iterator of the user's.
            timeout: in seconds.
            metadata: the user's.
            waits: the caller waits for the only response.
        """
        began = self._new(attachment, self._method, timeout, metadata)
        if began is None:
            return None
        client, call, link, entries = began
        sender = RequestSender(client, call)
        link.goes_on = sender.goes_on
        if not waits:
            call.leave_unattended()
        client.begin(call, self._name, entries, None)
        THREADS.run(partial(sender.run, requests, link, self._serializer, link.traced))
        return call


class CarriedLink(CallLink):
    """The link of a call of the runtime at its client, which reports how the call has ended.

    Args:
        attachment, number, remaining, needed: as of `CallLink`.
        ended: called with the link, whether the call has ended well, and its code.
        traced: counts it; None if calls are not counted.

    Attributes:
        traced: as given.
    """

    attachment: RpcAttachment
    by_runtime = True
    _tickets: Sequence[int] = ()

    def __init__(
        self,
        attachment: RpcAttachment,
        number: tuple[int, int],
        remaining: Callable[[], float | None],
        needed: Callable[[], bool],
        ended: Ended,
        traced: Any,
    ) -> None:
        # As the base does, whose call of its own takes longer than that.
        self.attachment = attachment
        self.call = number
        self.goes_on = needed
        self._remaining = remaining
        self._ended = ended
        self.traced = traced
        self._began_ns = 0 if traced is None else traced.begin()

    def link(self) -> CallLink:
        """Returns itself; see `OfCall`."""
        return self

    def leaves(self, request: SentMessage) -> None:
        """Notes the tickets of the request. Keeps no request: it has this link, and the payload."""
        self._tickets = request.tickets

    def tell(self, code: grpc.StatusCode | None) -> None:
        """Reports how the call has ended; None: it was not carried out."""
        ok = code is grpc.StatusCode.OK
        self._ended(self, ok, code)
        if ok and self._tickets:
            delivered(self._tickets)
        if self.traced is not None:
            if code is None:
                self.traced.not_begun()
            else:
                self.traced.ended(self._began_ns, code.name)


def _left(deadline: float) -> float:
    return max(deadline - time.monotonic(), 0.0)
