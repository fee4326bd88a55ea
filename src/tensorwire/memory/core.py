"""Converts the package's objects to those of the core, for loops and faults in C++."""

from __future__ import annotations

from typing import Any


def core_of(wrapped: Any) -> Any:
    """The core's object behind a Node, Peer, region or prepared batch."""
    return wrapped._core
