"""Decides how the payload of a message travels. Pure: knows sizes and the link of a call."""

from __future__ import annotations

import enum
import os
from collections.abc import Sequence
from typing import Protocol

from tensorwire.memory import crowded

THRESHOLDS = {"shm": 1 << 17, "tcp": 1 << 20, "rdma": 1 << 18}
"""The least size of payload that travels beside its message, by transport.

Below gRPC's limit of 4 MiB, so that no message meets it. The size for rdma was not measured.
"""
MOST_IN_FRAMES = 1 << 18
"""The highest threshold of calls of the runtime, for every transport: half of a ring."""
PUSHED_BYTES = 1 << 19
"""The least size of payload that is pushed, where memory is mapped. Smaller payload goes ahead.

To wait for it costs the receiver more than it gains.
"""
_VARIABLE = "TENSORWIRE_RPC_THRESHOLD_BYTES"


def threshold(transport: str, own: int | None, *, by_runtime: bool) -> int:
    """Returns the least size of payload that travels beside its message.

    Args:
        transport: by which it would.
        own: the user's number, None for the measured one.
        by_runtime: it is of a call of the runtime.
    """
    if own is not None:
        return own
    return min(THRESHOLDS[transport], MOST_IN_FRAMES) if by_runtime else THRESHOLDS[transport]


def least_threshold(own: int | None, transports: Sequence[str]) -> int:
    """Returns the least size of payload that may travel beside by one of these transports."""
    return min(threshold(each, own, by_runtime=True) for each in transports or THRESHOLDS)


class PayloadWay(enum.Enum):
    """The way that the payload of a message travels."""

    INSIDE = enum.auto()
    """The payload is in its message."""
    LEASED = enum.auto()
    """The payload goes ahead of its envelope: it is in the receiver's memory when that leaves."""
    PUSHED = enum.auto()
    """The payload goes beside its envelope: the receiver waits for it."""


class Carrier(Protocol):
    """The end of an attachment that a message leaves from; see `RpcAttachment`."""

    maps: bool

    def least_bytes(self, *, by_runtime: bool) -> int:
        """Returns the least size of payload that travels beside its message."""

    def may_send(self, size_bytes: int) -> bool:
        """Returns whether a message of this size may travel beside."""


def route(
    size_bytes: int,
    attachment: Carrier | None,
    *,
    arrays: bool,
    by_runtime: bool = False,
    in_loop: bool = False,
) -> PayloadWay:
    """Decides how payload travels.

    Args:
        size_bytes: of the arrays of a message, or of a message without any.
        attachment: of the call, None if it has none, or if another server has the call.
        arrays: the payload is arrays. Their owner may change them when the call has ended, so only
            the caller's thread copies them.
        by_runtime: it is a call of the runtime, whose two ends can push.
        in_loop: it is a call of an event loop, which copies payload at once if it can.
    """
    if attachment is None or size_bytes < attachment.least_bytes(by_runtime=by_runtime):
        return PayloadWay.INSIDE
    if not attachment.may_send(size_bytes):
        return PayloadWay.INSIDE
    if not by_runtime:
        return PayloadWay.LEASED
    if attachment.maps and (in_loop or size_bytes < PUSHED_BYTES):
        return PayloadWay.LEASED
    # A thread that the caller's wakes might take its core before all arrays are copied.
    if arrays and (not attachment.maps or crowded()):
        return PayloadWay.LEASED
    return PayloadWay.PUSHED


def chosen_threshold(given: int | None) -> int | None:
    """Returns the user's threshold: the given one, else the environment variable, else None.

    Raises:
        ValueError: the variable is no whole number from 0 up.
    """
    if given is not None:
        return given
    text = os.environ.get(_VARIABLE, "")
    if not text:
        return None
    if not text.isascii() or not text.isdecimal():
        raise ValueError(f"{_VARIABLE} is a number of bytes, not {text!r}")
    return int(text)
