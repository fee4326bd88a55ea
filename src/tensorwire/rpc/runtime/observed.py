"""Passes the calls of the runtime to `tensorwire rpc trace`, if it counts them."""

from __future__ import annotations

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
    return traced.serialize(lambda sent: sent.serialize(serializer), message, protocol="runtime")
