"""A grpcio channel whose large payload travels beside its messages (see `methods.py`).

Wraps a channel of grpcio, hands calls to it, and gives back what it gives back.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any

import grpc

from ..attach.negotiation import AttachmentKeeper
from ..attach.terms import Terms
from ..payload.attachment import RpcAttachment
from ..payload.janitor import JANITOR
from .calls import explain
from .methods import StreamStream, StreamUnary, UnaryStream, UnaryUnary

_CLOSE_S = 1.0


class RpcChannel(grpc.Channel):
    """A `grpc.Channel`; made by `insecure_channel` and `secure_channel`.

    Args:
        inner: of grpcio.
        terms: what payload may do.

    Attributes:
        inner: of grpcio.
        keeper: of the attachment.
    """

    def __init__(self, inner: grpc.Channel, terms: Terms) -> None:
        self.inner = inner
        self.keeper = AttachmentKeeper(terms, explain)
        # In whatever thread has the last of it, with whatever lock.
        weakref.finalize(self, JANITOR.soon, self.keeper.close).atexit = False

    @property
    def payload(self) -> str:
        """How payload travels now: "shm", "tcp", "rdma", or "inside: " and the reason."""
        attachment = self.keeper.ready
        return f"inside: {self.keeper.reason}" if attachment is None else attachment.transport

    @property
    def runtime(self) -> str:
        """By which calls travel now: "shm", "tcp", or "grpcio: " and the reason."""
        attachment = self.keeper.ready
        if attachment is not None and attachment.runtime is not None:
            return attachment.transport
        return f"grpcio: {self.keeper.carried_reason}"

    @property
    def attachment(self) -> RpcAttachment | None:
        """What joins this channel with its server, if anything does."""
        return self.keeper.ready

    def subscribe(self, callback: Any, try_to_connect: bool = False) -> None:
        self.inner.subscribe(callback, try_to_connect)

    def unsubscribe(self, callback: Any) -> None:
        self.inner.unsubscribe(callback)

    def unary_unary(
        self,
        method: str,
        request_serializer: Any = None,
        response_deserializer: Any = None,
        _registered_method: bool | None = False,
    ) -> grpc.UnaryUnaryMultiCallable:
        return UnaryUnary(self, "unary_unary", method, request_serializer,
                           response_deserializer, _registered_method)  # fmt: skip

    def unary_stream(
        self,
        method: str,
        request_serializer: Any = None,
        response_deserializer: Any = None,
        _registered_method: bool | None = False,
    ) -> grpc.UnaryStreamMultiCallable:
        return UnaryStream(self, "unary_stream", method, request_serializer,
                            response_deserializer, _registered_method)  # fmt: skip

    def stream_unary(
        self,
        method: str,
        request_serializer: Any = None,
        response_deserializer: Any = None,
        _registered_method: bool | None = False,
    ) -> grpc.StreamUnaryMultiCallable:
        return StreamUnary(self, "stream_unary", method, request_serializer,
                            response_deserializer, _registered_method)  # fmt: skip

    def stream_stream(
        self,
        method: str,
        request_serializer: Any = None,
        response_deserializer: Any = None,
        _registered_method: bool | None = False,
    ) -> grpc.StreamStreamMultiCallable:
        return StreamStream(self, "stream_stream", method, request_serializer,
                             response_deserializer, _registered_method)  # fmt: skip

    def _get_registered_call_handle(self, method: str) -> Any:
        # What the static methods of generated services, grpcio's experimental ones, ask a channel.
        return self.inner._get_registered_call_handle(method)  # type: ignore[attr-defined]

    def close(self) -> None:
        # grpcio waits for calls that it keeps (`outgoing.is_kept`), and ends the others at once.
        closing = threading.Thread(
            target=self.inner.close, name="tensorwire-rpc-close", daemon=True
        )
        try:
            closing.start()
        except RuntimeError:  # no thread is left
            self.inner.close()
        else:
            closing.join(_CLOSE_S)
        self.keeper.close()

    def __enter__(self) -> RpcChannel:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
