"""Makes the bytes of a message that leaves an event loop, without blocking the loop."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from ..payload import push
from ..payload.fields import may_have_tensors
from ..payload.outgoing import SentMessage
from ..runtime.leaving import OfCall, leaving
from .loop import in_thread


async def encode(
    call: OfCall, serializer: Callable[[Any], bytes], message: Any, *, last: bool
) -> tuple[bytes, SentMessage | None]:
    """Makes the bytes of a message, as `leaving` does, without waiting in the loop.

    The loop serializes. A thread sends ahead payload that travels over a network and may wait.

    Arrays are copied by the loop, whose other tasks may change them.

    Args:
        call: that the message leaves in.
        serializer: a `lenient` one.
        message: the user's.
        last: as for `SentMessage`.
    """
    if may_have_tensors(type(message)):
        return leaving(message, call, serializer, last=last)
    body = serializer(message)
    encode = partial(leaving, body, call, None, last=last)
    return await in_thread(encode) if _may_wait(call, len(body)) else encode()


def _may_wait(call: OfCall, size_bytes: int) -> bool:
    """Returns whether sending a message of this size may wait: for new memory, or for room.

    If not, the memory for it is taken already.
    """
    attachment = call.attachment
    if attachment.maps or size_bytes < attachment.runtime_threshold_bytes:
        return False
    if size_bytes > push.CHUNK_BYTES:
        return True
    if not attachment.may_send(size_bytes):
        return False
    link = call.link()
    link.lease = attachment.leases_there.take_idle(size_bytes, link.call)
    return link.lease is None


async def finish(message: SentMessage | None) -> None:
    """Copies the rest of a message whose bytes have been sent, in a thread."""
    if message is not None and message.staging is not None:
        await in_thread(message.finish)
