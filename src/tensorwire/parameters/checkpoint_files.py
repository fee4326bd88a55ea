"""Defines names, requests and the index of checkpoints in memory that a job lends. Pure.

Server 0 has the memory. A writer, who knows the job's secret, leases a mailbox at its Node, asks
for memory and writes there; a reader finds the index and the memory at its door.
`server/lending/checkpoints.py` is the server's side, `tensorwire.files` the other.
docs/internals/files.md has the tables.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from tensorwire.memory import mailbox_bytes
from tensorwire.outside import parse_json

from .layout import MALFORMED

METADATA = ".metadata"
"""The file that torch.distributed.checkpoint writes last: with it a checkpoint is complete."""

BELL = "checkpoints bell"
"""The region of server 0 with the word to which a writer adds 1 after a request."""

INDEX = "checkpoints"
"""The region at the door of server 0 with the index: a mailbox of two places."""
INDEX_BYTES, INDEX_PLACES = 1 << 20, 2

MESSAGE_BYTES = 4096
"""The size of a request and of an answer: JSON, followed by zeros."""
ASKS = slice(0, mailbox_bytes(MESSAGE_BYTES))
ANSWERS = slice(ASKS.stop, 2 * ASKS.stop)
LEASE_BYTES = ANSWERS.stop

PART_BYTES = 32 << 20
"""A file lies in parts of this size; the last one is shorter."""

MOST_NAME = 255
"""Bytes of the name of a checkpoint or file."""


def lease_name(writer: str) -> str:
    """Returns the name of the region that the Node of a writer leases."""
    return f"checkpoints {writer}"


def part_name(number: int, part: int) -> str:
    """Returns the name of the region with a part of a file."""
    return f"checkpoint {number}.{part}"


@dataclass(frozen=True)
class CheckpointFile:
    """A complete file.

    Attributes:
        number: its own; no other file of this job ever had it.
        parts: the sizes of its parts.
        modified: when it was complete, in seconds since 1970.
    """

    number: int
    parts: tuple[int, ...]
    modified: float

    @property
    def size_bytes(self) -> int:
        """The size of the whole file in bytes."""
        return sum(self.parts)


Index = dict[str, CheckpointFile]
"""The files by their paths: a name, or a checkpoint's name, a slash and a file's name."""


def index_text(index: Index) -> bytes:
    """Returns the text of the index."""
    told = {path: [f.number, list(f.parts), f.modified] for path, f in index.items()}
    return json.dumps(told).encode()


def read_index(data: bytes) -> Index:
    """Returns the index in a text of `index_text`; ValueError if it is none."""
    try:
        return {
            str(path): CheckpointFile(int(number), tuple(map(int, parts)), float(modified))
            for path, (number, parts, modified) in json.loads(data).items()
        }
    except MALFORMED as error:
        raise ValueError(f"the index of checkpoints cannot be read: {error!r}") from error


def message(told: dict[str, Any]) -> bytes:
    """Returns a request or answer as it is written; a long "text" is cut.

    Raises:
        ValueError: it is too long all the same.
    """
    data = json.dumps(told).encode()
    if len(data) >= MESSAGE_BYTES and "text" in told:
        data = json.dumps({**told, "text": str(told["text"])[:500]}).encode()
    if len(data) >= MESSAGE_BYTES:
        raise ValueError(f"a request has {len(data)} bytes: shorten names to fit {MESSAGE_BYTES}")
    return data.ljust(MESSAGE_BYTES, b"\0")


def told_in(data: bytes) -> dict[str, Any]:
    """Returns the request or answer in a written message; ValueError if it is neither."""
    return parse_json(data.partition(b"\0")[0], dict[str, Any], MESSAGE_BYTES)
