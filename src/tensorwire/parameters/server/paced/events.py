"""Lists the actions of all servers of a store, where each worker goes at its own pace."""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import NamedTuple

import numpy as np

from ...messages import Bytes

_EVENT = struct.Struct("<qqq")


class EventKind(IntEnum):
    """The kinds of actions that all servers do in the same order."""

    APPLIED = 1  # a slice's commit makes the next version
    ANSWERED = 2  # a worker gets the version that is in place
    TOGETHER = 3  # all slices have asked for the same, which makes the next version
    PAUSED = 4  # nothing, until a worker says that it goes on


class Event(NamedTuple):
    """The next action of all servers.

    Attributes:
        kind: what is done.
        which: a slice; the rank of a worker where it is ANSWERED or PAUSED.
        number: of the worker's request, where it is PAUSED.
    """

    kind: EventKind
    which: int = 0
    number: int = 0

    def to_bytes(self) -> Bytes:
        """Returns the bytes by which it travels."""
        return np.frombuffer(_EVENT.pack(*self), np.uint8)

    @staticmethod
    def from_bytes(data: Bytes) -> Event:
        """Returns the event in memory, as a copy."""
        kind, which, number = _EVENT.unpack(data[: _EVENT.size].tobytes())
        return Event(EventKind(kind), which, number)
