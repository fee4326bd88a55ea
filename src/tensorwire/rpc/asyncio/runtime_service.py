"""asyncio server side of a line: runs each call as a task of the server's event loop."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Sequence
from functools import partial
from typing import Any

import grpc

from .. import logs
from ..runtime.line import MOST_BACKLOG
from ..runtime.served import CallDetails, Handled, IncomingCall
from ..runtime.server import AnyService, ServerEnd
from .loop import alarm, call_back_in, in_loop, taken
from .runtime_behavior import AioPerformance, SyncPerformance

_Code = grpc.StatusCode


class AioServerEnd(ServerEnd):
    """The server's end of one line, which a task of the event loop reads.

    Args: as of `ServerEnd`.
    """

    patient = False
    _serving: asyncio.Task[None] | None = None

    def __init__(self, service: Any, *given: Any) -> None:
        super().__init__(service, *given)
        self._loop: asyncio.AbstractEventLoop = service.loop
        self.call_back = partial(call_back_in, self._loop)

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


class AioService(AnyService):
    """The part of an asyncio server that begins calls, in its event loop.

    Attributes:
        loop: set before clients come.

    Args: as of `AnyService`; the threads are for servicers that are not asynchronous.
    """

    kind_of_end = AioServerEnd

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.loop: asyncio.AbstractEventLoop | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def active(self) -> int:
        """The number of calls under way, and of their servicers that are not done yet."""
        return super().active + len(self._tasks)

    def begin(self, end: ServerEnd, call: IncomingCall) -> None:
        """See `AnyService`."""
        if self._is_refused(call):
            return
        assert self.loop is not None
        if call.deadline is not None:
            call.alarm = alarm(self.loop, call.deadline, call.deadline_passed)
        task = self.loop.create_task(self._serve(end, call))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        call.add_callback(partial(self._halt, call, task))

    def _halt(self, call: IncomingCall, task: asyncio.Task[None]) -> None:
        """Halts the servicer of a call that has ended, unless it is done. Any thread."""
        if call.cancelled and self.loop is not None:
            in_loop(self.loop, task.cancel)

    async def _serve(self, end: ServerEnd, call: IncomingCall) -> None:
        details = CallDetails(call.method, call.metadata)
        try:
            handler = await self._look_up(self._interceptors, details)
            handled = None if handler is None else self._handled(call.method, handler)
        except Exception as error:
            logs.OWN.exception("an interceptor failed")
            call.fail(_Code.UNKNOWN, f"Unexpected {type(error)}: {error}")
            return
        if handled is None:
            call.fail(_Code.UNIMPLEMENTED, "Method not found!")
        elif self._admits(call, handled):
            try:
                await self._run(end, call, handled)
            finally:
                self._ran()

    async def _run(self, end: ServerEnd, call: IncomingCall, handled: Handled) -> None:
        if call.requests is not None and not handled.takes_stream:
            call.first = await taken(call.request)  # of the stream is the only one
            if call.first is None:
                call.lacks_request()
                return
        performance: SyncPerformance | AioPerformance
        if _is_asynchronous(handled.behavior):
            performance = AioPerformance(end, call, handled)
        else:
            performance = SyncPerformance(end, call, handled)
        try:
            if not call.is_active():
                return
            if isinstance(performance, AioPerformance):
                await performance.run()
            else:
                loop = asyncio.get_running_loop()
                await loop.run_in_executor(self.pool, performance.run)
        finally:
            performance.ended()

    async def _look_up(self, interceptors: Sequence[Any], details: Any) -> Any:
        if interceptors:
            continuation = partial(self._look_up, interceptors[1:])
            return await interceptors[0].intercept_service(continuation, details)
        return self._find(details)


def _is_asynchronous(behavior: Any) -> bool:
    return inspect.iscoroutinefunction(behavior) or inspect.isasyncgenfunction(behavior)
