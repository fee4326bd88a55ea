"""A grpcio channel whose large payload travels beside its messages (see `methods.py`).

Wraps a channel of grpcio, hands calls to it, and gives back its results.
"""

from __future__ import annotations

import threading
import weakref
from functools import partialmethod
from typing import Any

import grpc

from ..attach.sharing import ChannelShare
from ..payload.attachment import RpcAttachment
from ..payload.janitor import JANITOR
from .methods import METHODS

_CLOSE_S = 1.0


class AttachedChannel:
    """The common part of channels of threads and of an event loop: methods and an attachment.

    Args:
        share: of the attachment.

    Attributes:
        share: as given.
    """

    def __init__(self, share: ChannelShare) -> None:
        self.share = share
        # It may run in any thread, with any lock held. Calls keep the channel.
        weakref.finalize(self, JANITOR.soon, share.close).atexit = False

    @property
    def payload(self) -> str:
        """How payload travels now: "shm", "tcp", "rdma", or "inside: " and the reason."""
        attachment = self.share.ready
        return f"inside: {self.share.reason}" if attachment is None else attachment.transport

    @property
    def runtime(self) -> str:
        """How calls travel now: "shm", "tcp", or "grpcio: " and the reason."""
        attachment = self.share.ready
        if attachment is not None and attachment.runtime is not None:
            return attachment.transport
        return f"grpcio: {self.share.carried_reason}"

    @property
    def attachment(self) -> RpcAttachment | None:
        """The attachment of this channel to its server, None if there is none."""
        return self.share.ready

    def _kind_of(self, arity: str) -> Any:
        """Returns the class of the methods of an arity."""
        raise NotImplementedError

    def _method(
        self,
        arity: str,
        method: str,
        request_serializer: Any = None,
        response_deserializer: Any = None,
        _registered_method: bool | None = False,
    ) -> Any:
        given = request_serializer, response_deserializer, _registered_method
        return self._kind_of(arity)(self, arity, method, *given)

    unary_unary: Any = partialmethod(_method, "unary_unary")
    unary_stream: Any = partialmethod(_method, "unary_stream")
    stream_unary: Any = partialmethod(_method, "stream_unary")
    stream_stream: Any = partialmethod(_method, "stream_stream")


class RpcChannel(AttachedChannel, grpc.Channel):
    """A `grpc.Channel`; made by `insecure_channel` and `secure_channel`.

    Args:
        inner: of grpcio.
        share: of an attachment.

    Attributes:
        inner: as given.
    """

    def __init__(self, inner: grpc.Channel, share: ChannelShare) -> None:
        super().__init__(share)
        self.inner = inner

    def _kind_of(self, arity: str) -> Any:
        return METHODS[arity]

    def attach(self, timeout_s: float = 5.0) -> bool:
        """Opens the attachment now, and waits until it is there.

        Calls never wait for it: without this, it is opened beside the first ones that may need it.

        Args:
            timeout_s: how long to wait; the opening goes on.

        Returns:
            True if it is there; if it is not, `payload` says why.
        """
        return self.share.attach(timeout_s)

    def subscribe(self, callback: Any, try_to_connect: bool = False) -> None:
        self.inner.subscribe(callback, try_to_connect)

    def unsubscribe(self, callback: Any) -> None:
        self.inner.unsubscribe(callback)

    def _get_registered_call_handle(self, method: str) -> Any:
        # Static methods of generated services, grpcio's experimental ones, call this.
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
        self.share.close()

    def __enter__(self) -> RpcChannel:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
