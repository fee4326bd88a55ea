"""Who counts the calls of this runtime, if anybody does: `tensorwire rpc trace`."""

from __future__ import annotations

from typing import Any

OBSERVER: Any = None
"""Given a side, an arity and a method, what counts its calls; see `rpctrace.patches`."""


def watched(side: str, method: str) -> Any:
    """What counts the calls of a method at one side, None if nobody does."""
    return None if OBSERVER is None else OBSERVER(side, "unary_unary", method)
