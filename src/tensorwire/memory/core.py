"""Converts the package's objects to the core's, for loops and faults in C++."""

from __future__ import annotations

from typing import Any


def core_of(wrapped: Any) -> Any:
    """Returns the core's object of a Node, Peer, region or prepared batch."""
    return wrapped._core
