"""Measures the time of messages in frames and by rendezvous when a client meets its server."""

from __future__ import annotations

import time
from typing import Protocol

from tensorwire.errors import TensorwireError

from ..payload.threshold import LEAST_BYTES

_EACH = 2
_HALVED = 5
_MOST_S = 0.1
"""Of all that is measured: a first call waits for it."""


class Probing(Protocol):
    """What sends a message of zeros to the other end, which gives nothing back."""

    def probe(self, size_bytes: int, *, offered: bool, timeout_s: float) -> bool:
        """Waits until it is there; False if it is not within the time."""


def measure(client: Probing, most_bytes: int) -> int | None:
    """The smallest size from which rendezvous is no slower, at it and at twice as much.

    Args:
        client: the end that measures.
        most_bytes: the largest threshold that is looked for.

    Returns:
        `most_bytes` by a power of two; None if it is not found in the time that there is.
    """
    until = time.monotonic() + _MOST_S
    size, found = max(LEAST_BYTES, most_bytes >> _HALVED), None
    try:
        while size <= most_bytes:
            framed = _fastest(client, size, False, until)
            offered = _fastest(client, size, True, until)
            if framed is None or offered is None:
                return found  # which was no slower once
            if offered > framed:
                found = None
            elif found is not None:
                return found
            else:
                found = size
            size *= 2
    except TensorwireError:
        return None  # whoever calls finds out why
    return found or most_bytes


def _fastest(client: Probing, size_bytes: int, offered: bool, until: float) -> float | None:
    """The fewest seconds of some, the first of which also makes what the others use again."""
    best: float | None = None
    for count in range(1 + _EACH):
        left_s = until - (began := time.monotonic())
        if left_s <= 0 or not client.probe(size_bytes, offered=offered, timeout_s=left_s):
            return None
        took = time.monotonic() - began
        if count and (best is None or took < best):
            best = took
    return best
