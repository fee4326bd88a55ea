"""The asyncio server's end of a line: its calls, each a task of the server's event loop."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import grpc

from tensorwire.memory import Node, Peer, Region, RemoteRegion

from ..attachment import RpcAttachment
from . import observed
from .aio_behavior import AioPerformance
from .context import CallDetails, Caller
from .line import MOST_BACKLOG
from .loop import LoopCallbacks, LoopDeadline, LoopWaiter, in_loop
from .options import MessageLimits
from .served import IncomingCall
from .server import ARITIES, ServerEnd

_LOG = logging.getLogger("tensorwire.rpc")
_Code = grpc.StatusCode


class AioServerEnd(ServerEnd):
    """The server's end of one line, which a task of the event loop reads.

    Args: as of `ServerEnd`.
    """

    def __init__(self, service: AioService, *given: Any) -> None:
        super().__init__(service, *given, patient=False)
        assert service.loop is not None
        self._loop = service.loop
        self.callbacks = LoopCallbacks(self._loop)
        self._serving: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begins to read. Any thread."""
        in_loop(self._loop, self._start)

    def _start(self) -> None:
        self._serving = self._loop.create_task(self.line.serve(MOST_BACKLOG))

    def over(self, reason: str) -> None:
        """See `LineEnd`. Any thread."""
        in_loop(self._loop, self._end_all)

    def _end_all(self) -> None:
        super().over("")
        if self._serving is not None:
            self._serving.cancel()


class AioService:
    """What an asyncio server does for calls of all its lines, in its event loop.

    Attributes:
        limits: of messages.
        loop: set before clients come.

    Args:
        pool: threads for servicers that are not asynchronous.
        handlers: generic ones.
        interceptors: the user's, outermost first.
        most: calls at a time, None for no limit.
        limits: of messages.
    """

    def __init__(
        self,
        pool: Any,
        handlers: Sequence[Any],
        interceptors: Sequence[Any],
        most: int | None,
        limits: MessageLimits,
    ) -> None:
        self.limits = limits
        self.loop: asyncio.AbstractEventLoop | None = None
        self._pool = pool
        self._generic = list(handlers)
        self._registered: dict[str, Any] = {}
        self._interceptors = tuple(interceptors)
        self._most = most
        self._lock = threading.Lock()
        self._ends: weakref.WeakSet[AioServerEnd] = weakref.WeakSet()
        self._tasks: set[asyncio.Task[None]] = set()
        self._stopping = False

    def add_generic(self, handlers: Sequence[Any]) -> None:
        """See `grpc.aio.Server`."""
        self._generic.extend(handlers)

    def add_registered(self, service_name: str, handlers: Mapping[str, Any]) -> None:
        """See `grpc.aio.Server`."""
        self._registered |= {f"/{service_name}/{name}": each for name, each in handlers.items()}

    def attach(
        self,
        attachment: RpcAttachment,
        caller: Caller,
        node: Node,
        memory: Region,
        other: RemoteRegion,
        peer: Peer,
    ) -> AioServerEnd:
        """The server's end of a new line; `start` lets calls come. Any thread."""
        end = AioServerEnd(self, attachment, caller, node, memory, other, peer)
        with self._lock:
            self._ends.add(end)
        if self._stopping:
            end.go_away()
        return end

    @property
    def active(self) -> int:
        """Calls under way."""
        with self._lock:
            return sum(end.active for end in self._ends) + len(self._tasks)

    def stop(self) -> None:
        """Lets no more calls begin."""
        self._stopping = True
        with self._lock:
            ends = list(self._ends)
        for end in ends:
            end.go_away()

    def cancel_all(self) -> None:
        """Ends all calls."""
        with self._lock:
            ends = list(self._ends)
        for end in ends:
            end.cancel_all()

    def begin(self, end: ServerEnd, call: IncomingCall) -> None:
        """See `Service.begin`."""
        assert self.loop is not None
        once = call.requests is None and not call.takes_stream
        if self._stopping:
            if once:
                call.refuse()
            else:
                call.fail(_Code.UNAVAILABLE, "the server is stopping", reading=True)
            return
        if call.deadline is not None:
            late = partial(
                call.fail,
                _Code.DEADLINE_EXCEEDED,
                "Deadline Exceeded",
                reading=True,
                cancelled=True,
            )
            call.alarm = LoopDeadline(self.loop, call.deadline - time.monotonic(), late)
        exceeded = self._most is not None and len(self._tasks) >= self._most
        task = self.loop.create_task(self._serve(end, call, once, exceeded))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        call.add_callback(partial(_cancel, call, task))

    async def _serve(self, end: ServerEnd, call: IncomingCall, once: bool, exceeded: bool) -> None:
        try:
            handler = await self._look_up(
                self._interceptors, CallDetails(call.method, call.metadata)
            )
        except Exception as error:
            _LOG.exception("an interceptor failed")
            call.fail(_Code.UNKNOWN, f"Unexpected {type(error)}: {error}")
            return
        if handler is None:
            call.fail(_Code.UNIMPLEMENTED, "Method not found!")
            return
        if exceeded:
            call.fail(_Code.RESOURCE_EXHAUSTED, "Concurrent RPC limit exceeded!")
            return
        if once and (handler.request_streaming or handler.response_streaming):
            call.refuse()  # grpcio says what comes of that
            return
        if call.requests is not None and not handler.request_streaming:
            # The first one of the stream is the only one.
            taken = call.request(LoopWaiter)
            while isinstance(taken, LoopWaiter):
                await taken.wait()
                taken = call.request(LoopWaiter)
            if not isinstance(taken, bytes):
                text = f'"{call.method}" requires exactly one request message.'
                call.fail(_Code.UNIMPLEMENTED, text)
                return
            call.first = taken
        arity = ARITIES[handler.request_streaming, handler.response_streaming]
        traced = observed.watched("server", arity, call.method)
        began_ns = 0 if traced is None else traced.begin()
        performance = AioPerformance(
            end.attachment, end.caller, call, handler, self._pool, traced, self.limits.send_bytes
        )
        try:
            if call.is_active():
                await performance.run()
        finally:
            if traced is not None:
                outcome = "answered" if performance.answered else "not answered"
                traced.ended(began_ns, "over" if handler.response_streaming else outcome)

    async def _look_up(self, interceptors: Sequence[Any], details: Any) -> Any:
        if interceptors:
            continuation = partial(self._look_up, interceptors[1:])
            return await interceptors[0].intercept_service(continuation, details)
        found = self._registered.get(details.method)
        if found is not None:
            return found
        for generic in self._generic:
            found = generic.service(details)
            if found is not None:
                return found
        return None


def _cancel(call: IncomingCall, task: asyncio.Task[None]) -> None:
    """A call has ended otherwise than by its servicer, which is halted."""
    if call.cancelled:
        task.cancel()
