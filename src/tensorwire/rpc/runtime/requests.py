"""Sends a call's streamed requests, from the user's iterator in a thread, or as they are written.

The call is kept only weakly, so that a call that is forgotten is cancelled, as in grpcio.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import grpc

from .. import logs
from ..payload.encode import Serializer
from ..payload.outgoing import CallLink, SentMessage
from . import observed
from .engine import CallState, Ending
from .flow import Outflow, Waiter
from .frames import Number, last_frame, message_frames


class RequestSender:
    """Sends the requests of one call.

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
        for lot in self._outflow.lots(message_frames(self._number, data), new):
            if isinstance(lot, Waiter):
                yield lot
            elif self._outflow.closed:
                return
            else:
                self._client.send(lot)

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
