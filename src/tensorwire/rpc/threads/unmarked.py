"""Handles calls at a server that have no metadata of tensorwire.

Most calls are such, so they have as little of ours in them as can be: a handler that is made once
for each of the user's, with other (de)serializers. No request of such a call is an envelope. Its
response may be one, if the user agent tells of whom the call is; that is looked at only when there
is a large response.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import grpc

from ..attach.registry import Registry
from ..payload.attachment import THRESHOLDS, RpcAttachment
from ..payload.envelope import MAGIC
from ..payload.fields import may_have_tensors
from ..payload.incoming import Reader
from ..payload.outgoing import PLAIN, CallLink, SentMessage, always, at_once
from ..runtime.served import arity_of, behavior_of

OF_BEHAVIORS = "experimental_non_blocking", "experimental_thread_pool"
"""What grpcio looks for at the behavior of a handler."""

_MOST = 1024


class UnmarkedCalls(grpc.RpcMethodHandler):
    """A handler in the place of the user's, of which it keeps all other attributes.

    Args:
        handler: the user's.
        registry: of the server.
    """

    unary_unary = unary_stream = stream_unary = stream_stream = None

    def __init__(self, handler: Any, registry: Registry) -> None:
        self.handler = handler
        self.request_streaming = handler.request_streaming
        self.response_streaming = handler.response_streaming
        self.request_deserializer = Reader(handler.request_deserializer).plain
        self.response_serializer: Callable[[Any], Any] = self._send
        self._registry = registry
        self._serializer = handler.response_serializer
        kind, behavior = arity_of(handler), behavior_of(handler)
        if kind == "unary_unary":
            behavior = self._with_context(behavior)
            self.response_serializer = self._answering()
        setattr(self, kind, behavior)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.handler, name)

    def _send(self, response: Any) -> Any:
        """The bytes of one of several responses, or of the one to several requests."""
        if may_have_tensors(type(response)):
            return SentMessage(response, PLAIN, last=True).serialize(self._serializer)
        return response if self._serializer is None else self._serializer(response)

    def _answering(self) -> Callable[[tuple[Any, Any]], Any]:
        """Makes the bytes of a response with its context, which tells of whom the call is."""
        serializer, beside = self._serializer, self._send_beside
        own = self._registry.limits.threshold_bytes
        small_bytes = min(THRESHOLDS.values()) if own is None else own
        plain: type | None = bytes if serializer is None else None

        def answer(answered: tuple[Any, Any]) -> Any:
            nonlocal plain
            response, context = answered
            if type(response) is not plain:
                if may_have_tensors(type(response)):
                    return beside(response, context)
                plain = type(response)
            body = response if serializer is None else serializer(response)
            if type(body) is bytes and len(body) < small_bytes and not body.startswith(MAGIC):
                return body
            return beside(body, context, made=True)

        return answer

    def _send_beside(self, response: Any, context: Any, *, made: bool = False) -> Any:
        """The bytes of a response that goes ahead of them, if the client is known."""
        attachment = self._registry.of_agent(context.invocation_metadata())
        link = PLAIN if attachment is None else self._link(attachment, context)
        serializer = None if made else self._serializer
        data = SentMessage(response, link, last=True).serialize(serializer)
        if attachment is not None:
            attachment.end_unnumbered(link.call, link.leases)
        return data

    @staticmethod
    def _link(attachment: RpcAttachment, context: Any) -> CallLink:
        """The call of a response that goes ahead."""
        call = attachment.unnumbered_call()
        return CallLink(attachment, call, context.time_remaining, context.is_active)

    @staticmethod
    def _with_context(behavior: Any) -> Any:
        """What gives a behavior's response with its context."""

        def run(request: Any, context: Any) -> tuple[Any, Any]:
            return behavior(request, context), context

        copy_attributes(behavior, run)
        return run


class AioUnmarkedCalls(UnmarkedCalls):
    """The same in a server of `grpc.aio`."""

    @staticmethod
    def _link(attachment: RpcAttachment, context: Any) -> CallLink:
        link = CallLink(attachment, attachment.unnumbered_call(), at_once, always)
        link.patience_s = 0.0  # who gives memory back may be in this event loop
        return link

    @staticmethod
    def _with_context(behavior: Any) -> Any:
        # As grpcio finds out what runs in the event loop, and what in the thread pool.
        if not inspect.iscoroutinefunction(behavior):

            def run_in_thread(request: Any, context: Any) -> tuple[Any, Any]:
                return _as_bytes(behavior(request, context)), context

            return run_in_thread

        async def run(request: Any, context: Any) -> tuple[Any, Any]:
            return _as_bytes(await behavior(request, context)), context

        return run


def _as_bytes(response: Any) -> Any:
    """A response as serializers get it in `grpc.aio`, which encodes text before that."""
    return response.encode() if isinstance(response, str) else response


def copy_attributes(behavior: Any, run: Any) -> None:
    """Gives the replacement of a behavior what grpcio looks for at it."""
    for name in OF_BEHAVIORS:
        if hasattr(behavior, name):
            setattr(run, name, getattr(behavior, name))


class UnmarkedHandlers:
    """Those of a server, one for each handler of the user's. Any thread may use it.

    Args:
        registry: of the server.
        make: the kind of calls.
    """

    def __init__(self, registry: Registry, make: type[UnmarkedCalls] = UnmarkedCalls) -> None:
        self._registry = registry
        self._make = make
        self._made: dict[int, UnmarkedCalls] = {}

    def of(self, handler: Any) -> UnmarkedCalls:
        """That of a handler."""
        found = self._made.get(id(handler))
        if found is not None and found.handler is handler:
            return found
        if len(self._made) >= _MOST:  # interceptors make a new one for each call
            self._made.clear()
        made = self._made[id(handler)] = self._make(handler, self._registry)
        return made
