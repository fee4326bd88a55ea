"""asyncio: sends the calls of a channel with payload beside them, or by the runtime.

The event loop makes the copy of a payload, as it makes grpcio's; it waits for memory of the other
end no longer than a moment.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from functools import partial, partialmethod
from typing import Any

import grpc
import grpc.aio

from ..attach.marks import Sender, SmallCall, call_is_confirmed
from ..payload.fields import may_have_tensors
from ..payload.outgoing import AGAIN, CallLink, SentMessage, at_once
from ..payload.tensors import delivered
from .calls import LATER, WrittenCall, late_error, of_grpcio
from .loop import each_of
from .runtime_client import METHOD


class AioSender(Sender):
    """The sender of the calls of a channel.

    Args: as of `Sender`.

    Attributes:
        inner: the channel of grpcio.
    """

    inner: grpc.aio.Channel
    proof = grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN
    ends_at_once = False  # perhaps by a collector, in a thread that has the locks

    async def _carry(self, details: Any, request: Any) -> Any:
        """Begins a call by the runtime; None: grpcio has to make it."""
        method = METHOD.get()
        if method is None or not self.share.carries:
            return None
        return await method.begin(self.share.current, details, request)

    def _begin(self, details: Any) -> tuple[CallLink, Any]:
        """Returns the link of a new call, and its details with the mark of its attachment."""
        link, metadata = self.begin(details.metadata, at_once)
        if link.attachment is not None:
            link.patience_s = 0.0  # memory may be given back in this event loop
            details = details._replace(metadata=grpc.aio.Metadata(*metadata))
        return link, details

    def watch(self, call: Any, link: CallLink, outgoing: SentMessage | None = None) -> None:
        """Takes back, when the call has ended, the payload that was not read.

        Args:
            call: of grpcio.
            link: of the call.
            outgoing: its request, if it is the only one.
        """
        # Only where need be: grpcio keeps a call with a callback when its caller has forgotten it.
        if link.attachment is None:
            if outgoing is None or not may_have_tensors(type(outgoing.message)):
                return
        call.add_done_callback(partial(self._ended, link, outgoing))

    def watch_small(self, call: Any, small: SmallCall) -> None:
        """Ends a call with a small request when grpcio's has ended; see `watch`."""
        call.add_done_callback(lambda call: self.end_small(small, _code_now(call)))

    def _ended(self, link: CallLink, outgoing: SentMessage | None, call: Any) -> None:
        code = _code_now(call)
        ok = code is grpc.StatusCode.OK
        self.end(link, ok, code)
        if ok and outgoing is not None and outgoing.tickets:
            delivered(outgoing.tickets)

    # Calls of each arity. `make` makes a call of grpcio, of details and a request.

    async def _unary(self, make: Any, details: Any, request: Any, *, streams: bool) -> Any:
        """Begins a call; waits for its end if it may have to be made again."""
        carried = await self._carry(details, request)
        if carried is not None:
            if streams or await carried.settled():
                return carried
            details = details._replace(timeout=carried.time_remaining())
        until = None if details.timeout is None else time.monotonic() + details.timeout
        link, marked = self._begin(details)
        call, outgoing = await self._made(make, marked, request, link)
        if link.attachment is None:
            return call
        try:
            # A call that could not even begin fails here, and never has a code.
            await (call.wait_for_connection() if streams else call)
        except asyncio.CancelledError:
            if streams or not call.done():
                call.cancel()
                raise
        except grpc.aio.AioRpcError:
            pass  # which the user gets from the call
        if not outgoing.ahead:
            return call
        await call.initial_metadata()
        if call_is_confirmed(link) and not call.done():
            return call
        code, trailing = await call.code(), await call.trailing_metadata()
        if not self.is_to_be_sent_again(outgoing, code, trailing):
            return call
        if until is not None:
            details = details._replace(timeout=until - time.monotonic())
            if details.timeout <= 0:
                raise late_error()
        return (await self._made(make, details, request, AGAIN))[0]

    unary_unary: Any = partialmethod(_unary, streams=False)
    unary_stream: Any = partialmethod(_unary, streams=True)

    async def _made(
        self, make: Any, details: Any, request: Any, link: CallLink
    ) -> tuple[Any, SentMessage]:
        """Returns a call of grpcio that has begun, and its request."""
        outgoing = SentMessage(request, link, last=False).with_arrays()
        call = await make(details, outgoing)
        self.watch(call, link, outgoing)
        return call, outgoing

    async def stream(self, make: Any, details: Any, requests: Any) -> Any:
        """Begins a call with an iterable of requests; None: they will be written."""
        carried = await self._carry(details, requests)
        if carried is not None:
            return carried
        link, marked = self._begin(details)
        if link.attachment is None:
            return await make(marked, requests)
        link.must_confirm, link.window = True, link.attachment.window()
        call = await make(marked, None if requests is None else self._requests(requests, link))
        self.watch(call, link)
        return call if requests is not None else WrittenCall(call, partial(self._sent, link))

    async def _requests(self, requests: Any, link: CallLink) -> AsyncIterator[SentMessage]:
        """Yields the user's requests, each with its link."""
        async for each in each_of(requests):
            yield await self._sent(link, each)

    async def _sent(self, link: CallLink, request: Any) -> SentMessage:
        if link.must_confirm and not link.foreign and link.attachment is not None:
            # A request, which may be large, waits until it is known which server has the call.
            patience_s = link.attachment.limits.patience_s
            link.foreign = not await link.attachment.confirmed_later(link.call, patience_s)
            link.must_confirm = False
        return SentMessage(request, link, last=True).with_arrays()


def _code_now(call: Any) -> Any:
    """Returns the code of a call that has ended, without awaiting it."""
    if call.cancelled():
        return grpc.StatusCode.CANCELLED
    task = call.code()
    try:
        task.send(None)
    except StopIteration as done:
        return done.value
    finally:
        task.close()
    return None


# In the order in which grpcio asks what an interceptor is; it is of the first kind only.
_KINDS = {arity: of_grpcio(arity, "ClientInterceptor") for arity in LATER}


def _interceptor(arity: str, sender: AioSender) -> Any:
    """Makes our interceptor of the calls of an arity."""
    send = getattr(sender, "stream" if arity.startswith("stream") else arity)

    async def intercept(_: object, continuation: Any, details: Any, request: Any) -> Any:
        return LATER[arity](send(continuation, details, request), details.timeout)

    return type("Payload", (_KINDS[arity],), {f"intercept_{arity}": intercept})()


def chained(interceptors: Sequence[Any], sender: AioSender) -> tuple[list[Any], frozenset[str]]:
    """Returns the interceptors of grpcio's channel, outermost first, and the arities that they see.

    Ours are the innermost ones, for the arities of the user's.
    """
    arities = []
    for each in interceptors:
        found = (arity for arity, kind in _KINDS.items() if isinstance(each, kind))
        arity = next(found, "")  # of none, which grpcio says
        arities.append(arity)
    ours = [_interceptor(arity, sender) for arity in _KINDS if arity in arities]
    return [*interceptors, *ours], frozenset(arities)
