"""From the package's objects to those of the core, for what is written in C++: loops, faults."""

from __future__ import annotations

from typing import Any


def core_of(wrapped: Any) -> Any:
    """The core's object behind a Node, Peer, region or prepared batch."""
    return wrapped._core
