"""Holds the bytes of a message that leaves by a line, and what is done after they are sent."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from ..payload.attachment import RpcAttachment
from ..payload.encode import Serializer
from ..payload.envelope import MAGIC
from ..payload.fields import may_have_tensors
from ..payload.outgoing import CallLink, SentMessage
from . import observed


class OfCall(Protocol):
    """What is known of the call that a message leaves in.

    Attributes:
        attachment: of the call.
        traced: what counts its messages, None if nobody does.
    """

    attachment: RpcAttachment
    traced: Any

    def link(self) -> CallLink:
        """Returns the link of the call."""


def leaving(
    message: Any, call: OfCall, serializer: Serializer, *, last: bool, keeps_body: bool = False
) -> tuple[Any, SentMessage | None]:
    """What travels of a message, and whose `finish` follows; None: it is small, and all there.

    Args:
        message: the user's.
        call: that it leaves in.
        serializer: the user's.
        last: as for `SentMessage`.
        keeps_body: likewise.

    Returns:
        No bytes, if the serializer has made none.

    Raises:
        Exception: as `SentMessage.serialize`.
    """
    if call.traced is not None or may_have_tensors(type(message)):
        sent = SentMessage(message, call.link(), last=last, keeps_body=keeps_body)
        return observed.serialize(call.traced, sent, serializer), sent
    data = message if serializer is None else serializer(message)
    # What is small can only travel inside, in frames.
    least = call.attachment.runtime_threshold_bytes
    if type(data) is bytes and len(data) < least and not data.startswith(MAGIC):
        return data, None
    sent = SentMessage(message, call.link(), last=last, keeps_body=keeps_body)
    return sent.serialize(lambda _: data), sent


def lenient(serializer: Serializer, *, text: bool = False) -> Callable[[Any], bytes]:
    """Returns a serializer that makes bytes of what `grpc.aio` sends: None is no bytes.

    It raises TypeError for what is no message for `grpc.aio` either.

    Args:
        serializer: the user's.
        text: without one text is a message too, as in the responses of a servicer.
    """

    def serialize(message: Any) -> bytes:
        data: Any = message if serializer is None else serializer(message)
        if data is None:
            return b""
        if text and serializer is None and isinstance(data, str):
            return data.encode()
        if not isinstance(data, bytes):
            raise TypeError(f"a message is bytes, not {type(data).__name__}")
        return data

    return serialize
