"""Passes the calls of the runtime to `tensorwire rpc trace`, if it counts them."""

from __future__ import annotations

from typing import Any

from ..payload.outgoing import SentMessage

OBSERVER: Any = None
"""A function of a side, an arity and a method, which returns a counter; see `rpctrace.patches`."""


def watched(side: str, arity: str, method: str) -> Any:
    """Returns the counter for the calls of a method at one side, None if they are not counted."""
    return None if OBSERVER is None else OBSERVER(side, arity, method)


def serialize(traced: Any, message: SentMessage, serializer: Any) -> Any:
    """Returns the bytes of a message that leaves, counted by `traced` unless it is None."""
    if traced is None:
        return message.serialize(serializer)
    return traced.serialize(lambda sent: sent.serialize(serializer), message, protocol="runtime")
