"""Makes what travels of a message that leaves an event loop, without blocking the loop."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from ..payload.fields import may_have_tensors
from ..payload.outgoing import SentMessage
from ..runtime.leaving import OfCall, leaving
from .loop import in_thread


async def encode(
    call: OfCall, serializer: Callable[[Any], bytes], message: Any, *, last: bool
) -> tuple[bytes, SentMessage | None]:
    """Makes what travels of a message, as `leaving` does, without waiting in the loop.

    The loop serializes. A thread sends ahead what is large and goes over a network.

    Arrays are copied by the loop, whose other tasks may change them.

    Args:
        call: as there.
        serializer: a `lenient` one.
        message: as there.
        last: as there.
    """
    if may_have_tensors(type(message)):
        return leaving(message, call, serializer, last=last)
    body, attachment = serializer(message), call.attachment
    encode = partial(leaving, body, call, None, last=last)
    may_wait = not attachment.maps and len(body) >= attachment.runtime_threshold_bytes
    return await in_thread(encode) if may_wait else encode()


async def finish(message: SentMessage | None) -> None:
    """Has a thread copy what is left of a message whose bytes have been sent."""
    if message is not None and message.staging is not None:
        await in_thread(message.finish)
