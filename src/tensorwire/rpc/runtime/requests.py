"""Takes a call's streamed requests from the user's iterator, in a thread, and sends them.

The thread keeps the call only weakly, so that a call that is forgotten is cancelled, as in grpcio.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import grpc

from .. import logs
from ..payload.outgoing import CallLink, SentMessage
from . import observed
from .call import ClientEnd, RuntimeCall
from .flow import Outflow, Waiter
from .frames import Number, last_frame, message_frames


class RequestSender:
    """Sends the requests of one call.

    Args:
        client: by which it goes.
        call: with an `outflow`.
        link: of the call.
        serializer: the user's.
        traced: what counts messages, None if nobody does.
    """

    def __init__(
        self, client: ClientEnd, call: RuntimeCall, link: CallLink, serializer: Any, traced: Any
    ) -> None:
        assert call.outflow is not None
        self._client = client
        self._call = weakref.ref(call)
        self._number: Number = call.number
        self._outflow: Outflow = call.outflow
        self._link = link
        self._serializer = serializer
        self._traced = traced

    def run(self, requests: Iterator[Any]) -> None:
        """Sends all of them, and that there are no more; ends early with the call."""
        while True:
            try:
                request = next(requests)
            except StopIteration:
                break
            except Exception:
                logs.CHANNEL.exception("Exception iterating requests!")
                self._abort(grpc.StatusCode.UNKNOWN, "Exception iterating requests!")
                return
            if self._outflow.closed or not self._send(request):
                return
            del request
        if not self._outflow.closed:
            self._client.send((last_frame(self._number),))

    def _send(self, request: Any) -> bool:
        """Sends one; False if the call is over."""
        message = SentMessage(request, self._link, last=True)
        try:
            data = observed.serialize(self._traced, message, self._serializer)
        except Exception:
            logs.COMMON.exception("Exception serializing message!")
            data = None
        if not isinstance(data, bytes):
            self._abort(grpc.StatusCode.INTERNAL, "Exception serializing request!")
            return False
        most = self._client.limits.send_bytes
        if 0 <= most < len(data):
            text = f"CLIENT: Sent message larger than max ({len(data)} vs. {most})"
            self._abort(grpc.StatusCode.RESOURCE_EXHAUSTED, text)
            return False
        outflow = self._outflow
        for lot in outflow.lots(message_frames(self._number, data)):
            if isinstance(lot, Waiter):
                self._client.reader.wait(lot, None)
            elif outflow.closed:
                return False
            else:
                self._client.send(lot)
        message.finish()
        return True

    def _abort(self, code: grpc.StatusCode, details: str) -> None:
        call = self._call()
        if call is not None:
            call.end_here(code, details)
