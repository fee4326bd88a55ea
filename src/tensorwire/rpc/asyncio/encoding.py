"""Makes what travels of a message that leaves an event loop, without blocking the loop."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from tensorwire.errors import TensorwireError

from ..payload.attachment import RpcAttachment
from ..payload.fields import may_have_tensors
from ..payload.outgoing import CallLink, SentMessage
from ..payload.push import OF_A_CALL
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


async def finish_one(message: SentMessage | None, needed: Callable[[], bool]) -> None:
    """Finishes one of several messages, and waits until the other end has taken all but two.

    Args:
        message: was sent.
        needed: the call goes on.
    """
    await finish(message)
    if message is None or message.link.attachment is None:
        return
    link, pool = message.link, message.link.attachment.leases_there
    if len(link.bodies) > OF_A_CALL:
        try:
            await pool.wait_given_back(link.bodies, link.call, OF_A_CALL, needed)
        except TensorwireError:
            pass  # the attachment is over, and ends the call
