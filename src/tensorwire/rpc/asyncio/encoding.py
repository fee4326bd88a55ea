"""Makes what travels of a message that leaves an event loop, without blocking the loop."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from ..payload.attachment import RpcAttachment
from ..payload.fields import may_have_tensors
from ..payload.outgoing import CallLink, SentMessage
from ..runtime.leaving import leaving
from .loop import in_thread


async def encode(
    attachment: RpcAttachment,
    link: Callable[[], CallLink],
    serializer: Callable[[Any], bytes],
    traced: Any,
    message: Any,
    *,
    last: bool,
) -> tuple[bytes, SentMessage | None]:
    """Makes what travels of a message, as `leaving` does, without waiting in the loop.

    The loop serializes. A thread sends ahead what is large and goes over a network.

    Arrays are copied by the loop, whose other tasks may change them.

    Args:
        attachment: as there.
        link: as there.
        serializer: a `lenient` one.
        traced: as there.
        message: as there.
        last: as there.
    """
    if may_have_tensors(type(message)):
        return leaving(message, attachment, link, serializer, traced, last=last)
    body = serializer(message)
    encode = partial(leaving, body, attachment, link, None, traced, last=last)
    return await in_thread(encode) if _may_wait(attachment, len(body)) else encode()


def _may_wait(attachment: RpcAttachment, size_bytes: int) -> bool:
    """Returns whether sending a message of this size may wait."""
    return not attachment.maps and size_bytes >= attachment.runtime_threshold_bytes


async def finish(message: SentMessage | None) -> None:
    """Has a thread copy what is left of a message whose bytes have been sent."""
    if message is not None and message.staging is not None:
        await in_thread(message.finish)
