"""Which calls of a client go by its line, and how they begin. All others go by grpcio."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import grpc

from ..attachment import RpcAttachment
from ..outgoing import CallLink, SentMessage, always, no_deadline
from ..tensors import delivered
from . import observed
from .client import RuntimeCall, RuntimeClient
from .frames import as_metadata

_LOG = logging.getLogger("tensorwire.rpc")
_LONGEST_S = 1e9

Ended = Callable[[CallLink, bool, grpc.StatusCode | None], None]


class CarriedMethod:
    """A unary method of a client.

    Args:
        method: its full name.
        serializer: the user's, of requests.
        deserialize: makes the user's response of bytes.
        ended: told of each call how it has ended.
    """

    def __init__(
        self, method: str, serializer: Any, deserialize: Callable[[bytes], Any], ended: Ended
    ) -> None:
        self._method = method
        self._name = method.encode()
        self._serializer = serializer
        self._deserialize = deserialize
        self._ended = ended

    def begin(
        self,
        attachment: RpcAttachment | None,
        request: Any,
        timeout: float | None,
        metadata: Any,
        again: Callable[[], Any] | None = None,
    ) -> RuntimeCall | None:
        """Begins a call; None: it is one for grpcio, and nothing has been sent.

        Args:
            attachment: of the channel, None if there is none.
            request: the user's.
            timeout: in seconds.
            metadata: the user's.
            again: makes the call by grpcio, for one that nobody waits for; None: its caller waits,
                and does that if it was refused.

        Raises:
            RuntimeCall: the request cannot be serialized, or the call failed as it began.
        """
        client = None if attachment is None else attachment.runtime
        if attachment is None or not isinstance(client, RuntimeClient) or not client.usable:
            return None
        if timeout is not None and not 0 < timeout < _LONGEST_S:
            return None
        entries = as_metadata(metadata)
        if entries is None:
            return None  # grpcio says what is wrong with them
        number = attachment.begin_call()
        if number is None:
            return None
        deadline = None if timeout is None else time.monotonic() + timeout
        remaining = no_deadline if deadline is None else partial(_left, deadline)
        link = CallLink(attachment, number, remaining, always)
        outgoing = SentMessage(request, link, last=False)
        traced = observed.watched("client", self._method)
        began_ns = 0 if traced is None else traced.begin()

        def ended(code: grpc.StatusCode | None) -> None:
            ok = code is grpc.StatusCode.OK
            self._ended(link, ok, code)
            if ok and outgoing.tickets:
                delivered(outgoing.tickets)
            if traced is not None:
                if code is None:
                    traced.not_begun()
                else:
                    traced.ended(began_ns, code.name)

        deserialize = self._deserialize
        if traced is not None:
            deserialize = partial(traced.deserialize, deserialize, protocol="runtime")
        call = RuntimeCall(client, number, deadline, deserialize, ended, again)
        data: Any = None
        try:
            data = observed.serialize(traced, outgoing, self._serializer)
        except Exception:
            _LOG.exception("a request could not be serialized")
        except BaseException:
            call.conclude(grpc.StatusCode.CANCELLED, "the caller was interrupted")
            raise
        if not isinstance(data, bytes):
            if data is not None and self._serializer is None:
                ended(None)
                return None  # grpcio says that it takes bytes
            call.conclude(grpc.StatusCode.INTERNAL, "Exception serializing request!")
            raise call
        if again is not None:
            call.leave_unattended()
        client.begin(call, self._name, entries, data)
        return call


def _left(deadline: float) -> float:
    return max(deadline - time.monotonic(), 0.0)
