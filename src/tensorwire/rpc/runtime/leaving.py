"""Makes the bytes of a message that leaves by a line, and the steps that follow once it is sent."""

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
    """The call that a message leaves in, as `leaving` needs it.

    Attributes:
        attachment: of the call.
        traced: counts its messages; None if they are not counted.
    """

    attachment: RpcAttachment
    traced: Any

    def link(self) -> CallLink:
        """Returns the link of the call."""


def leaving(
    message: Any, call: OfCall, serializer: Serializer, *, last: bool, keeps_body: bool = False
) -> tuple[Any, SentMessage | None]:
    """Returns the bytes of a message, and the message to `finish` after they are sent.

    Args:
        message: the user's.
        call: that it leaves in.
        serializer: the user's.
        last: as for `SentMessage`.
        keeps_body: as for `SentMessage`.

    Returns:
        No bytes, if the serializer has made none. None in place of the message to `finish`: it is
        small, and nothing is left to do.

    Raises:
        Exception: as for `SentMessage.serialize`.
    """
    kind = type(message)
    if call.traced is not None or (kind is not bytes and may_have_tensors(kind)):
        sent = SentMessage(message, call.link(), last=last, keeps_body=keeps_body)
        return observed.serialize(call.traced, sent, serializer), sent
    data = message if serializer is None else serializer(message)
    # A small message can only travel inside, in frames.
    least = call.attachment.runtime_threshold_bytes
    if type(data) is bytes and len(data) < least and not data.startswith(MAGIC):
        return data, None
    sent = SentMessage(message, call.link(), last=last, keeps_body=keeps_body)
    return sent.serialize(lambda _: data), sent


def lenient(serializer: Serializer, *, text: bool = False) -> Callable[[Any], bytes]:
    """Returns a serializer for the messages that `grpc.aio` sends, where None is empty bytes.

    It raises TypeError for objects that `grpc.aio` does not send either.

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
