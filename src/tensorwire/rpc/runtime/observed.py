"""Passes the calls of the runtime to `tensorwire rpc trace`, if it counts them."""

from __future__ import annotations

from functools import partial
from time import perf_counter_ns
from typing import Any

from ..payload.outgoing import SentMessage

OBSERVER: Any = None
"""Given a side, an arity and a method, what counts its calls; see `rpctrace.patches`."""


def watched(side: str, arity: str, method: str) -> Any:
    """What counts the calls of a method at one side, None if nobody does."""
    return None if OBSERVER is None else OBSERVER(side, arity, method)


def serialize(traced: Any, message: SentMessage, serializer: Any) -> Any:
    """The bytes of a message that leaves; counted, if `watched` says by what."""
    if traced is None:
        return message.serialize(serializer)
    return traced.serialize(partial(_serialize, serializer), message, protocol="runtime")


async def serialize_later(
    traced: Any, message: SentMessage, serializer: Any, *, text: bool = False
) -> Any:
    """As `serialize`, without blocking the event loop, and whatever `as_bytes` takes."""
    began_ns = perf_counter_ns()
    data = as_bytes(message.serialize(serializer), text=text and serializer is None)
    took_ns = perf_counter_ns() - began_ns
    if message.by_rendezvous:
        data = await message.offer_later(data)
    if traced is not None:
        traced.sent(message, data, took_ns, protocol="runtime")
    return data


def as_bytes(data: Any, *, text: bool) -> bytes:
    """What travels of what a serializer has made: None is no bytes.

    Args:
        data: what it has made.
        text: so is text, as in the responses of a servicer of `grpc.aio` without a serializer.

    Raises:
        TypeError: that is no message for `grpc.aio` either.
    """
    if data is None:
        return b""
    if isinstance(data, str) and text:
        return data.encode()
    if not isinstance(data, bytes):
        raise TypeError(f"a message is bytes, not {type(data).__name__}")
    return data


def _serialize(serializer: Any, message: SentMessage) -> bytes:
    return message.serialize(serializer)
