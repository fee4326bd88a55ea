"""Implements a client's calls with a stream of responses with the interface of grpcio."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import grpc

from .call import ClientEnd, RuntimeCall
from .flow import Inflow, TooLongError, Waiter
from .frames import (
    CANCEL,
    MORE,
    REFUSED,
    WHOLE,
    Frame,
    FrameError,
    Metadata,
    credit_frame,
    parse_end,
    short_frame,
)
from .outcome import NoResponse, status_of


class StreamCall(RuntimeCall):
    """A call with a stream of responses, which is their iterator too.

    Args: as of `RuntimeCall`.
    """

    def __init__(self, client: ClientEnd, *given: Any, **named: Any) -> None:
        super().__init__(client, *given, **named)
        self._inflow = Inflow(client.limits.receive_bytes)
        self._end: tuple[grpc.StatusCode, str, Metadata, Metadata] | None = None

    def message(self, frame: Frame) -> None:
        if frame.flags not in (MORE, WHOLE):
            raise FrameError(f"a piece of a response with the flags {frame.flags}")
        self.head(())
        self._add(frame.body, frame.flags)

    def _add(self, data: bytes, flags: int) -> bool:
        try:
            credit = self._inflow.add(data, flags)
        except TooLongError as error:
            self._too_long(error.args[0])
            return False
        if credit:
            self._client.send((credit_frame(self.number, credit),))
        return True

    def _too_long(self, size: int) -> None:
        # Behind the responses that came before it, as in grpcio.
        if self._end is None:
            self._client.send((short_frame(CANCEL, self.number),))
            self._end = *self._excess(size), (), ()
            if self._inflow.close(drop=False):
                self.conclude(*self._end)

    def answered(self, frame: Frame) -> None:
        if self._end is not None:
            return  # on its way when a response was too long
        body = parse_end(frame.body)
        code, details = status_of(body)
        if frame.flags & REFUSED:
            code, details = grpc.StatusCode.UNAVAILABLE, "the server refuses the call"
        elif frame.flags & WHOLE and not self._add(body.piece, WHOLE):
            return
        self.head(body.initial)
        self._end = code, details, body.initial, body.trailing
        # As in grpcio, a stream ends when all that came before its end is taken.
        if self._inflow.close(drop=False):
            self.conclude(*self._end)

    def _stop_messages(self) -> None:
        super()._stop_messages()
        self._inflow.close()

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        taken = self._inflow.take()
        while isinstance(taken, Waiter):
            self._client.reader.wait(taken, None)
            taken = self._inflow.take()
        if taken is None:
            self.wait()
            if self._code is grpc.StatusCode.OK:
                raise StopIteration
            raise self
        response = self._message_of(taken)
        credit, was_last = self._inflow.settle()
        if isinstance(response, NoResponse):
            self.end_here(*response)
            raise self
        if credit:
            self._client.send((credit_frame(self.number, credit),))
        if was_last and self._end is not None:
            self.conclude(*self._end)
        return response

    next = __next__
