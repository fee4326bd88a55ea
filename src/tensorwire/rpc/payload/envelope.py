"""Encodes envelopes, which travel in the place of messages with payload beside them. Pure.

An envelope names the memory of the receiver that the payload lies in, and has the rest of the
message. docs/internals/rpc-wire.md has the layout as a table. No protobuf parser takes it for a
message: its first bytes are a tag of wire type 7, which does not exist.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

MAGIC = b"\xff\xfftensorwire-rpc"
VERSION, PUSHED_VERSION = 1, 3
"""The versions of an envelope whose payload went ahead, and of one whose payload is under way."""
MAX_PIECES = 1 << 16
BODY = 0
"""The ticket of the piece that is the message itself."""

_HEAD = struct.Struct("<16sB3xI16sI4xQQ")
_MOST_BYTES = 1 << 48
_COUNT, _COUNT_AT = struct.Struct("<I"), 20
_PIECE = struct.Struct("<QQQ")
_MARK = struct.Struct("<16sII")

Piece = tuple[int, int, int]
"""(ticket of the Tensor, or BODY; offset and length in the memory, in bytes)."""


@dataclass(frozen=True, slots=True)
class Envelope:
    """A parsed envelope; every number of it is the sender's word and not believed yet.

    Attributes:
        attachment: 16 bytes, see `RpcAttachment`.
        slot: the sender's number of the memory, which credits are counted by.
        serial: the memory is the region of this number, see `lease_name`.
        turn: rises with each use of the slot, see `leases.py`.
        pieces: the parts that lie in the memory, and where. Without any the body is a message that
            only looks like an envelope.
        body: the message, unless a piece is it.
        version: VERSION or PUSHED_VERSION: whether the payload is there.
    """

    attachment: bytes
    slot: int
    serial: int
    turn: int
    pieces: tuple[Piece, ...]
    body: bytes
    version: int = VERSION

    @property
    def is_pushed(self) -> bool:
        """True when its payload may not be there yet."""
        return self.version == PUSHED_VERSION

    @property
    def is_message(self) -> bool:
        """True when its payload is a message, and nothing else."""
        return len(self.pieces) == 1 and self.pieces[0][0] == BODY


def lease_name(serial: int) -> str:
    """Returns the name of the region that an envelope calls `serial`."""
    return f"lease-{serial}"


def seal(envelope: Envelope) -> bytes:
    """Encodes an envelope."""
    numbers = [number for piece in envelope.pieces for number in piece]
    head = _HEAD.pack(
        MAGIC,
        envelope.version,
        len(envelope.pieces),
        envelope.attachment,
        envelope.slot,
        envelope.serial,
        envelope.turn,
    )
    return b"".join([head, struct.pack(f"<{len(numbers)}Q", *numbers), envelope.body])


def escape(attachment: bytes, message: bytes) -> bytes:
    """Encodes a message that looks like an envelope itself."""
    return seal(Envelope(attachment, 0, 0, 0, (), message))


def is_pushed(data: bytes) -> bool:
    """Returns whether data look like an envelope whose payload is to be waited for."""
    return data.startswith(MAGIC) and data[len(MAGIC) : len(MAGIC) + 1] == b"\x03"


def payload_bytes(data: bytes) -> int:
    """Returns how many bytes lie beside a message, as its sender says; 0 for a plain one."""
    if not data.startswith(MAGIC) or len(data) < _HEAD.size:
        return 0
    (count,) = _COUNT.unpack_from(data, _COUNT_AT)
    end = _HEAD.size + min(count, (len(data) - _HEAD.size) // _PIECE.size) * _PIECE.size
    size_bytes = 0
    for _, _, size in _PIECE.iter_unpack(data[_HEAD.size : end]):
        size_bytes += int(size)
    return min(size_bytes, _MOST_BYTES)


def unseal(data: bytes) -> Envelope:
    """Decodes an envelope, whose first bytes are MAGIC.

    Raises:
        ValueError: it is no envelope, or one of another version.
    """
    if len(data) < _HEAD.size:
        raise ValueError(f"an envelope has {len(data)} bytes, fewer than its header")
    _, version, count, attachment, slot, serial, turn = _HEAD.unpack_from(data)
    if version not in (VERSION, PUSHED_VERSION):
        raise ValueError(
            f"an envelope has version {version}, and this process knows 1 and 3: use the same "
            "version of tensorwire at both ends"
        )
    end = _HEAD.size + count * _PIECE.size
    if count > MAX_PIECES or end > len(data):
        raise ValueError(f"an envelope announces {count} pieces, more than it has or may have")
    pieces = tuple(_PIECE.iter_unpack(data[_HEAD.size : end]))
    tickets = {ticket for ticket, _, _ in pieces}
    if len(tickets) != count or (BODY in tickets and end != len(data)):
        raise ValueError("an envelope names one of its pieces twice")
    return Envelope(attachment, slot, serial, turn, pieces, data[end:], version)


def mark(attachment: bytes, slot: int, generation: int) -> bytes:
    """Encodes the mark in a call's metadata: its attachment, and the call's number in it."""
    return _MARK.pack(attachment, slot, generation)


def read_mark(data: object) -> tuple[bytes, int, int] | None:
    """Decodes a mark; None if it is none."""
    if not isinstance(data, bytes) or len(data) != _MARK.size:
        return None
    attachment, slot, generation = _MARK.unpack(data)
    return attachment, slot, generation
