"""Defines how a snapshot of a store is requested from a server, and its layout.

Pure. `server/stepping/snapshots.py` makes them, `worker/snapshot.py` asks for them. A snapshot is a
region that begins with a list of its parts and their places.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from enum import IntEnum
from typing import NamedTuple

import numpy as np

from tensorwire.errors import BusyError

from .layout import padded
from .messages import Bytes

MOST_SNAPSHOTS = 2
"""The most snapshots of a store at a time: one being written to a disk, and one being made."""

VALUES, COUNTS, SCALARS, AVERAGED = "values", "counts", "scalars", "averaged"
"""The parts of a snapshot, beside `state` of each state of the optimizer."""

REQUEST_BYTES, REQUEST_PLACES = 64, 2
"""The mailbox for requests: a successor may read one when the next is on its way."""
REPLY_BYTES = 448
BELL_BYTES = 64
"""The word and padding in front of the mailboxes for requests."""

_REQUEST = struct.Struct("<qqq")  # kind, version, number
_REPLY = struct.Struct("<qq")  # outcome, bytes of text
_HEAD_BYTES = 4096


def state(name: str) -> str:
    """Returns the part of a snapshot that has a state of the optimizer."""
    return f"state/{name}"


def busy(text: str) -> BusyError:
    """Returns the error for one snapshot too many; the text names its holders."""
    return BusyError(
        f"{text}. Each is held until its checkpoint is written: wait for one, or save to the same "
        "path, which waits by itself; one worker alone calls job.save: if job.rank == 0"
    )


class RequestKind(IntEnum):
    """The kinds of requests; a request's own number names its result."""

    MAKE = 1
    FREE = 2
    FREE_ALL = 3  # whatever was made for the same member, and its pauses are over
    PAUSE = 4  # no version is made, where each worker goes at its own pace, until GO_ON
    GO_ON = 5


class Request(NamedTuple):
    """The request of a member to a server.

    Attributes:
        kind: what is requested.
        version: MAKE: the one that is copied, which stays in place until there is an answer.
        number: FREE: of the request by which the snapshot was made.
    """

    kind: RequestKind
    version: int = 0
    number: int = 0

    def to_bytes(self) -> Bytes:
        """Returns the bytes of the message."""
        return np.frombuffer(_REQUEST.pack(*self), np.uint8)

    @staticmethod
    def from_bytes(data: Bytes) -> Request:
        """Returns the request in memory, as a copy; ValueError if it is none."""
        kind, version, number = _REQUEST.unpack(data[: _REQUEST.size].tobytes())
        return Request(RequestKind(kind), version, number)


class RequestOutcome(IntEnum):
    """The outcome of a request."""

    DONE = 0
    BUSY = 1  # as many as there may be are held, all for this member
    REFUSED = 2
    NO_MEMORY = 3
    PASSED = 4  # the version is no more in place; the text has the one that is
    HELD = 5  # as many as there may be are held, and not all for this member


class Reply(NamedTuple):
    """A server's answer; the text explains an outcome other than DONE.

    For a pause the text is the version that stands still.
    """

    outcome: RequestOutcome
    text: str = ""

    def to_bytes(self) -> Bytes:
        """Returns the bytes of the message; a text that is too long is cut."""
        text = self.text.encode()[: REPLY_BYTES - _REPLY.size]
        return np.frombuffer(_REPLY.pack(self.outcome, len(text)) + text, np.uint8)

    @staticmethod
    def from_bytes(data: Bytes) -> Reply:
        """Returns the answer in memory, as a copy."""
        outcome, size = _REPLY.unpack(data[: _REPLY.size].tobytes())
        text = data[_REPLY.size : _REPLY.size + size].tobytes().decode(errors="replace")
        return Reply(RequestOutcome(outcome), text)


class Parts:
    """The places of the parts of a snapshot in its region.

    Attributes:
        size_bytes: of the region.
    """

    def __init__(self, version: int, places: Mapping[str, tuple[int, int]]) -> None:
        self.version, self._places = version, dict(places)
        self.size_bytes = max((stop for _, stop in places.values()), default=_HEAD_BYTES)

    @staticmethod
    def of(version: int, arrays: Mapping[str, Bytes]) -> Parts:
        """Returns the places of a snapshot that has these arrays."""
        places, at = {}, _HEAD_BYTES
        for name, array in arrays.items():
            places[name] = at, at + len(array)
            at += padded(len(array))
        return Parts(version, places)

    def write_head(self, memory: Bytes) -> None:
        """Writes the places of the parts into a snapshot; ValueError if they need too much room."""
        text = json.dumps({"version": self.version, "parts": self._places}).encode()
        if len(text) > _HEAD_BYTES - 8:
            raise ValueError(
                f"the list of a snapshot's parts has {len(text)} bytes, and {_HEAD_BYTES - 8} fit"
            )
        memory[8 : 8 + len(text)] = np.frombuffer(text, np.uint8)
        memory[:8].view(np.int64)[0] = len(text)

    @staticmethod
    def head_bytes() -> int:
        """Returns the size of the head of a snapshot, which tells the places of its parts."""
        return _HEAD_BYTES

    @staticmethod
    def read(head: Bytes) -> Parts:
        """Returns the places that `write_head` has written."""
        size = int(head[:8].view(np.int64)[0])
        told = json.loads(head[8 : 8 + size].tobytes())
        places = {name: (start, stop) for name, (start, stop) in told["parts"].items()}
        return Parts(told["version"], places)

    def place(self, name: str) -> slice:
        """Returns the place of a part; LookupError if there is none of this name."""
        return slice(*self._places[name])
