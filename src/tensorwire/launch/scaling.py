"""Carries out the requests of `tensorwire scale` to a running job, one at a time.

Each part of a request, such as "workers", has a handler of its own, which does it. This module has
the rules for all of them: one request at a time, an end by an outcome or an error, and a client
that may go away.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol, TypedDict

from tensorwire.jobs.asking import ScaleError
from tensorwire.jobs.door import Door, DoorClient
from tensorwire.jobs.lockfile import tell

_LOOK_S = 0.5  # how long a change may stand still before it is looked at again


class RequestPart(TypedDict, total=False):
    """One part of a request; docs/internals/launch.md has the content of each."""

    count: int
    drain: list[int]


class _ScaleRequest(TypedDict, total=False):
    ask: dict[str, RequestPart]
    proof: str
    cancel: bool


class Handler(Protocol):
    """A handler of one part of a request; at most one part is under way."""

    def check(self, asked: RequestPart) -> None:
        """Looks whether it can be done, as far as that is known now; nothing changes.

        Raises:
            ScaleError: it cannot be done.
        """

    def begin(self, asked: RequestPart, say: Callable[[str], None]) -> None:
        """Checks it, and begins.

        Args:
            asked: this part of the request.
            say: tells the client how far it is.

        Raises:
            ScaleError: it cannot be done; nothing has changed.
        """

    def tend(self) -> dict[str, Any] | None:
        """Goes on with the change under way, without waiting; returns the outcome when it is done.

        Raises:
            ScaleError: it cannot be done after all.
        """

    def cancel(self, why: str) -> None:
        """Takes back the change under way, if that is possible; `tend` tells whether it was."""


_FIXED = {
    "servers": "the servers of this job keep what they have; with tensorwire run --servers S:MAX "
    "there can be 1 to MAX servers"
}
"""The parts of a request that some jobs have no handler for, and why."""


class Scaling:
    """The requests of one job.

    Args:
        handlers: by the name of the part of a request that each carries out.
        reason_against: why nothing can be changed now; "" if it can.
        note: writes a line into the log of the job.
        say: prints a line.
    """

    def __init__(
        self,
        handlers: Mapping[str, Handler],
        reason_against: Callable[[], str],
        note: Callable[..., None],
        say: Callable[[str], object] = tell,
    ) -> None:
        self._handlers, self._reason_against, self._note = handlers, reason_against, note
        self._say = say
        self._door: Door[_ScaleRequest] | None = None
        self._client: DoorClient | None = None
        self._cancelled = False
        self._waiting: list[tuple[str, RequestPart]] = []  # parts that come next
        self._present: Handler | None = None
        self._outcome: dict[str, Any] = {}

    def open(self, secret: bytes) -> None:
        """Begins to listen.

        Raises:
            UnavailableError, OSError: there is no place for the door.
        """
        self._door = Door(_ScaleRequest, "control-", secret=secret, say=self._say)
        self._note("control", path=str(self._door.path))

    def close(self) -> None:
        """Ends a request and closes the socket, as the job is over. May be called again."""
        if self._client is not None:
            self._end("the job has ended meanwhile")
        if self._door is not None:
            self._door.close()
            self._door = None

    def descriptors(self) -> Iterator[int]:
        """Yields the descriptors to wait for."""
        if self._door is not None:
            yield self._door.descriptor

    def times(self) -> Iterator[float]:
        """Yields the latest times of the next call of `tend`."""
        if self._client is not None:
            yield time.monotonic() + _LOOK_S

    def tend(self, ready: set[int]) -> None:
        """Hears requests, and goes on with the present one."""
        if self._door is None:
            return
        for client, request in self._door.messages() if self._door.descriptor in ready else ():
            if client is self._client:  # it wants it no more, or is gone
                self._cancelled |= request is None or request.get("cancel", False)
            elif request is not None:
                self._take(client, request.get("ask", {}))
        if self._client is None:
            return
        try:
            if self._cancelled and self._present is not None:
                self._present.cancel("the client has cancelled it")
            elif (why := self._reason_against()) and self._present is not None:
                self._present.cancel(why)
            self._go_on()
        except Exception as error:
            why = _reason_in(error)
            if self._present is not None and not isinstance(error, ScaleError):
                with contextlib.suppress(Exception):  # the first one is told
                    self._present.cancel(why)
            self._end(why)

    def _take(self, client: DoorClient, asked: dict[str, RequestPart]) -> None:
        busy = "another tensorwire scale is under way; try again when it is done"
        busy = busy if self._client is not None else self._reason_against()
        if why := busy or self._reason_of_request(asked):
            client.refuse(why, busy=bool(busy))
            return
        self._client, self._outcome, self._cancelled = client, {}, False
        self._waiting = list(asked.items())

    def _reason_of_request(self, asked: Mapping[str, RequestPart]) -> str:
        """Returns why a request cannot be done; "" if it can be, as far as is known."""
        unknown = sorted(asked.keys() - self._handlers.keys())
        if unknown or not asked:
            text = f"this job cannot change {', '.join(unknown) or 'nothing'}"
            return _FIXED.get(unknown[0] if unknown else "", text)
        try:
            for name, part in asked.items():  # before any is begun
                self._handlers[name].check(part)
        except Exception as error:
            return _reason_in(error)
        return ""

    def _go_on(self) -> None:
        """Moves on to the next part of a request; ends the request after the last one."""
        assert self._client is not None
        client = self._client
        while True:
            if self._present is not None:
                if (outcome := self._present.tend()) is None:
                    return
                self._outcome |= outcome
                self._present = None
            if not self._waiting:
                break
            name, asked = self._waiting.pop(0)
            self._present = self._handlers[name]
            self._present.begin(asked, lambda text: client.send({"says": text}))
        self._client = None
        client.send({"done": self._outcome})
        client.channel.close()

    def _end(self, why: str) -> None:
        assert self._client is not None
        client, self._client = self._client, None
        self._present, self._waiting = None, []
        done = "; ".join(str(each.get("text", name)) for name, each in self._outcome.items())
        client.refuse(f"{why} (done before: {done})" if done else why, busy=False)


def _reason_in(error: Exception) -> str:
    """Returns why a request is not done.

    A mistake of this program ends the request, not the job.
    """
    if isinstance(error, ScaleError):
        return str(error)
    return f"the launcher has made a mistake, {type(error).__name__}: {error}"
