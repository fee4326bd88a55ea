"""Defines names, words and requests by which readers that are no workers read a store.

Pure. `server/lending/` has the door for readers and the memory that they read; `tensorwire.files`
reads it. docs/internals/files.md has the tables.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import IntEnum
from typing import NamedTuple

import numpy as np

from tensorwire.memory import mailbox_bytes

from .layout import MALFORMED, Layout, Share, Spec
from .messages import Bytes
from .snapshot import REPLY_BYTES

FORMAT = 1

MOST_LENT = 4
"""Snapshots of one store that a server has at a time for all readers together."""

FIRST_VERSION = 2
"""The first version that has values of a model."""

HELD_WORD_AT = 8
"""The offset of the word that tells whether a store stands still, see `held_word`."""

BELL = "bell"
"""The region at a door with the word to which a reader adds 1 after a request."""

HEART_S = 1.0
"""A reader raises the word of its lease so often while it holds snapshots."""
LOST_S = 10.0
"""A reader whose word has not grown for so long does not run, and loses its snapshots."""

LEASE_BYTES = 1024
"""The size of a reader's lease at a door: its word, its request, and the answer to it."""
ASK_BYTES = 64
ASKS = slice(64, 64 + mailbox_bytes(ASK_BYTES))
ANSWERS = slice(256, 256 + mailbox_bytes(REPLY_BYTES))

_ASK = struct.Struct("<qqqq")


def facts_name(store: int) -> str:
    """Returns the name of the region that describes a server's part of a store."""
    return f"{store}/facts"


def version_name(store: int) -> str:
    """Returns the name of the region with the word of a store's version: see `word_of`."""
    return f"{store}/version"


def lent_name(store: int, what: str) -> str:
    """Returns the name of a region with memory of a store as it is now."""
    return f"{store}/{what}"


def lease_name(reader: str) -> str:
    """Returns the name of the region that the reader's Node of this name leases."""
    return f"lease {reader}"


def word_of(version: int, changing: bool = False) -> int:
    """Returns the word of a version in place; `changing`: while the next one is made in its memory.

    Bytes that are read between two looks at the word are of one version if the word was the same
    both times, and even.
    """
    return 2 * version + changing


class ReadPlace(NamedTuple):
    """The place of a server's share of an array: the door, the region, and the offset."""

    server: int
    region: str
    at: int


@dataclass(frozen=True)
class StoreFacts:
    """The description of a store by a server.

    Attributes:
        store: its number.
        server, servers: index of the server, and how many there are.
        spec: what workers have declared, as `Spec.to_json` has it.
        states: the names of the optimizer's states.
        places: where its share lies of "values" and of each state of the optimizer, by the names
            of a snapshot's parts; empty where only snapshots can be read.
    """

    store: int
    server: int
    servers: int
    spec: str
    states: tuple[str, ...]
    places: dict[str, ReadPlace]

    def to_json(self) -> bytes:
        """Returns the text by which it is stored."""
        return json.dumps({"format": FORMAT, **asdict(self)}).encode()

    @staticmethod
    def from_json(data: bytes) -> StoreFacts:
        """Returns the facts of a text of `to_json`; ValueError if it is none."""
        try:
            raw = json.loads(data)
            if (found := raw.pop("format")) != FORMAT:
                raise ValueError(
                    f"its format is {found!r:.20}, not {FORMAT}: use the job's version of "
                    "tensorwire to read it"
                )
            places = {
                str(name): ReadPlace(int(server), str(region), int(at))
                for name, (server, region, at) in raw.pop("places").items()
            }
            states = tuple(str(each) for each in raw.pop("states"))
            numbers = {name: int(raw.pop(name)) for name in ("store", "server", "servers")}
            return StoreFacts(spec=str(raw.pop("spec")), states=states, places=places, **numbers)
        except MALFORMED as error:
            raise ValueError(f"the description of a store cannot be read: {error!r}") from error

    def layout(self) -> Layout:
        """Returns the layout of the store; ValueError if `spec` describes none."""
        return Layout(Spec.from_json(self.spec.encode()))


class AskKind(IntEnum):
    """The requests of a reader to a server."""

    MAKE = 1  # hold a snapshot of a version, which is made when that is in place
    FREE = 2


class Ask(NamedTuple):
    """A reader's request.

    Attributes:
        kind: what is asked for.
        store: its number.
        version: of the snapshot.
        whole: with the optimizer's state, else values alone.
    """

    kind: AskKind
    store: int
    version: int
    whole: bool = False

    def to_bytes(self) -> Bytes:
        """Returns the bytes of the message."""
        return np.frombuffer(_ASK.pack(*self), np.uint8)

    @staticmethod
    def from_bytes(data: Bytes) -> Ask:
        """Returns the request in memory, as a copy; ValueError if it is none."""
        kind, store, version, whole = _ASK.unpack(data[: _ASK.size].tobytes())
        return Ask(AskKind(kind), store, version, bool(whole))


class Copied(NamedTuple):
    """The answer of a server when a snapshot is there.

    Attributes:
        model: the region with the server's bytes of the model file.
        state: the region with the state, whose head has the places of its parts; "": there is none.
        pid, descriptor: the model's memory as `/proc/PID/fd/DESCRIPTOR` of the server's host.
    """

    model: str
    state: str
    pid: int
    descriptor: int

    def to_text(self) -> str:
        """Returns the text of the answer."""
        return json.dumps(list(self))

    @staticmethod
    def from_text(text: str) -> Copied:
        """Returns the answer of a text of `to_text`; ValueError if it is none."""
        try:
            model, state, pid, descriptor = json.loads(text)
            return Copied(str(model), str(state), int(pid), int(descriptor))
        except MALFORMED as error:
            raise ValueError(f"a server's answer cannot be read: {error!r}") from error


def parts_of(shares: Sequence[Share], start: int, stop: int) -> list[tuple[int, int, int]]:
    """Returns (server, start, stop) for each part of the layout's bytes [start, stop)."""
    found = []
    for server, share in enumerate(shares):
        first, last = share.clip(start, stop)
        if first < last:
            found.append((server, first, last))
    return found
