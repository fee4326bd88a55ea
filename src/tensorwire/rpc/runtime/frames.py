"""Encodes and decodes the frames that travel between the two ends of a line. Pure.

docs/internals/rpc-wire.md has the tables.

Everything that comes from the other end is checked here before anybody uses it.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from tensorwire._core import rpc as core

CALL, MESSAGE, END, HEAD, CANCEL, GOAWAY, CREDIT = range(1, 8)
MORE, WHOLE, REFUSED, LAST, STREAM = 1, 2, 4, 8, 16
"""Flags: the message goes on in a later frame; this is its end (of an END: it has a message); the
servicer has not run and will not; there are no more messages; the client of a CALL takes any number
of them."""

HEADER = struct.Struct("<IBBHII")
PIECE_BYTES = core.PIECE_BYTES
"""The most bytes of a message in one frame; longer ones travel in several."""
MOST_METADATA_BYTES = 16 << 10
"""The most bytes of a block of metadata, with the details of a status: it fits into every ring."""
MOST_BYTES = core.MOST_FRAME_BYTES
"""The most bytes of a frame: it has at most one method, two blocks of metadata, and one piece."""
_ENTRY_OF_HTTP2_BYTES = 32  # the size of an entry beside its key and value (RFC 9113, 6.5.2)
NO_DEADLINE = (1 << 64) - 1

_CALL = struct.Struct("<QHH")
_END = struct.Struct("<IIHH")
_CALL_HEADER = struct.Struct("<IBBHIIQHH")
_END_HEADER = struct.Struct("<IBBHIIIIHH")
_CALL_BYTES, _END_BYTES = _CALL.size, _END.size
PLAIN_END = _END.pack(0, 0, 0, 0)
"""The first bytes of the body of an END that has code 0, no details and no metadata."""
_COUNT = struct.Struct("<H")
_CREDIT = struct.Struct("<Q")
_new = tuple.__new__
_ENTRY = struct.Struct("<HI")
_KEY = re.compile(r"[0-9a-z_.-]+")
_VALUE = re.compile(r"(?:[!-~](?:[ -~]*[!-~])?)?")

_OF_HTTP2 = frozenset(
    (
        "te", "content-type", "content-length", "lb-cost-bin", "endpoint-load-metrics-bin",
        "x-envoy-peer-metadata", "grpc-status", "grpc-message", "grpc-encoding",
        "grpc-accept-encoding", "grpc-internal-encoding-request", "grpc-tags-bin",
        "grpc-trace-bin", "grpc-server-stats-bin",
    )
)  # fmt: skip
"""The keys that grpcio takes for its own, so that they never arrive at the other end."""

Number = tuple[int, int]
"""The number of a call: its slot in the attachment, and how often that was used."""


FrameError = core.FrameError
"""The error of bytes that are no frame. Nothing that follows them can be understood."""


class Metadatum(NamedTuple):
    """One entry of metadata; its value is bytes where the key ends with -bin."""

    key: str
    value: str | bytes


Metadata = tuple[Metadatum, ...]


def as_metadata(entries: object, *, reserved: bool = False) -> Metadata | None:
    """Returns the user's metadata as they travel; None: they are not plainly valid, or too long.

    Args:
        entries: pairs of key and value; None for none.
        reserved: keys that gRPC keeps for itself are valid, and any length: see `excess`.
    """
    if not entries:
        return ()
    made, size = [], 0
    try:
        for key, value in entries:  # type: ignore[attr-defined]
            if isinstance(key, bytes):
                key = key.decode()
            if not _KEY.fullmatch(key) or (key.startswith("grpc-") and not reserved):
                return None
            if key.endswith("-bin"):
                if not isinstance(value, bytes):
                    return None
                size += len(value)
            else:
                if isinstance(value, bytes):
                    value = value.decode()
                if not _VALUE.fullmatch(value):
                    return None
                size += len(value)
            if key in _OF_HTTP2 or (key == "user-agent" and not reserved):
                continue
            size += len(key) + _ENTRY.size
            made.append(Metadatum(key, value))
    except (TypeError, ValueError):
        return None
    return tuple(made) if reserved or size <= MOST_METADATA_BYTES else None


def excess(metadata: Metadata, details: bytes | None = None) -> str:
    """Returns gRPC's message for metadata that are too long for it; "" if they are not.

    Args:
        metadata: initial, or trailing with details.
        details: of the status; None for initial metadata.
    """
    entries: list[tuple[str, str | bytes]] = [*metadata]
    if details is not None:
        entries = [("grpc-status", b"0"), ("grpc-message", details), *entries]
    size = 0
    for key, value in entries:
        length = len(value)
        size += len(key) + length + _ENTRY_OF_HTTP2_BYTES
        if max(size, length) > MOST_METADATA_BYTES:
            found = f"value length {length}" if length > MOST_METADATA_BYTES else str(size)
            return f"received metadata size exceeds hard limit ({found} vs. {MOST_METADATA_BYTES})"
    return ""


def _encoded(metadata: Metadata) -> bytes:
    parts = []
    for key, value in metadata:
        name = key.encode()
        data = value if isinstance(value, bytes) else value.encode()
        parts += [_ENTRY.pack(len(name), len(data)), name, data]
    return b"".join(parts)


def _frame(kind: int, flags: int, number: Number, body: Sequence[bytes | memoryview]) -> bytes:
    size = HEADER.size + sum(map(len, body))
    return b"".join((HEADER.pack(size, kind, flags, 0, *number), *body))


def _pieces(message: bytes) -> Sequence[bytes | memoryview]:
    """Returns the pieces of a message, at least one; copies nothing."""
    if len(message) <= PIECE_BYTES:  # as nearly always
        return (message,)
    view = memoryview(message)
    return [view[at : at + PIECE_BYTES] for at in range(0, len(message), PIECE_BYTES)]


def call_frames(
    number: Number,
    method: bytes,
    timeout_us: int,
    metadata: Metadata,
    message: bytes | None,
    *,
    streams: bool = False,
) -> list[bytes]:
    """Returns the frames that begin a call.

    Args:
        number: of the call.
        method: its name.
        timeout_us: or NO_DEADLINE.
        metadata: of the user's.
        message: its only request; None: they come in MESSAGEs.
        streams: the client takes any number of responses.
    """
    flags = STREAM if streams else 0
    first, *others = (b"",) if message is None else _pieces(message)
    if message is not None:
        flags |= MORE if others else WHOLE
    block = _encoded(metadata) if metadata else b""
    size = _CALL_HEADER.size + len(method) + len(block) + len(first)
    head = _CALL_HEADER.pack(size, CALL, flags, 0, *number, timeout_us, len(method), len(metadata))
    begin = b"".join((head, method, block, first))
    return [begin, *_message_frames(number, others)] if others else [begin]


def _message_frames(number: Number, pieces: Sequence[bytes | memoryview]) -> Iterator[bytes]:
    for place, piece in enumerate(pieces, 1):
        yield _frame(MESSAGE, MORE if place < len(pieces) else WHOLE, number, (piece,))


def message_frames(number: Number, message: bytes) -> Iterator[bytes]:
    """Yields the frames of one message of a stream."""
    return _message_frames(number, _pieces(message))


def last_frame(number: Number) -> bytes:
    """Returns the frame that says that there are no more requests."""
    return _frame(MESSAGE, LAST, number, ())


def credit_frame(number: Number, size_bytes: int) -> bytes:
    """Returns the frame that says how many bytes of a stream were taken."""
    return _frame(CREDIT, 0, number, (_CREDIT.pack(size_bytes),))


def parse_credit(body: bytes) -> int:
    """Decodes the body of a CREDIT; FrameError if it is none."""
    if len(body) != _CREDIT.size:
        raise FrameError(f"a CREDIT frame has {len(body)} bytes, not {_CREDIT.size}")
    size: int = _CREDIT.unpack(body)[0]
    return size


def end_frames(
    number: Number,
    code: int,
    details: bytes = b"",
    initial: Metadata = (),
    trailing: Metadata = (),
    message: bytes | None = None,
    *,
    refused: bool = False,
) -> list[bytes]:
    """Returns the frames that end a call, with its response if it has one."""
    flags = (REFUSED if refused else 0) | (0 if message is None else WHOLE)
    *before, last = (b"",) if message is None else _pieces(message)
    frames = [_frame(MESSAGE, MORE, number, (piece,)) for piece in before]
    blocks = _encoded(initial) + _encoded(trailing) if initial or trailing else b""
    size = _END_HEADER.size + len(details) + len(blocks) + len(last)
    head = _END_HEADER.pack(
        size, END, flags, 0, *number, code, len(details), len(initial), len(trailing)
    )
    frames.append(b"".join((head, details, blocks, last)))
    return frames


def plain_end_frame(number: Number, message: bytes) -> bytes:
    """Returns the frame that ends a call well, with this response and nothing else.

    Args:
        number: of the call.
        message: of no more than `PIECE_BYTES`.
    """
    size = HEADER.size + _END_BYTES + len(message)
    return b"".join((HEADER.pack(size, END, WHOLE, 0, *number), PLAIN_END, message))


def head_frame(number: Number, initial: Metadata) -> bytes:
    """Returns the frame of initial metadata that go ahead of the response."""
    return _frame(HEAD, 0, number, (_COUNT.pack(len(initial)), _encoded(initial)))


def short_frame(kind: int, number: Number = (0, 0)) -> bytes:
    """Returns a frame without a body: CANCEL, GOAWAY."""
    return _frame(kind, 0, number, ())


class Frame(NamedTuple):
    """A frame whose header is in order; the end that it arrives at parses its body."""

    kind: int
    flags: int
    number: Number
    body: bytes


class CallBody(NamedTuple):
    """The body of a CALL."""

    method: str
    timeout_us: int
    metadata: Metadata
    piece: bytes


class EndBody(NamedTuple):
    """The body of an END; `piece` is the last of the response."""

    code: int
    details: str
    initial: Metadata
    trailing: Metadata
    piece: bytes


def parse_call(body: bytes) -> CallBody:
    """Decodes the body of a CALL; FrameError if it is none."""
    try:
        timeout_us, method_bytes, count = _CALL.unpack_from(body)
        at = _CALL_BYTES + method_bytes
        if at > len(body):
            raise FrameError("the method in a CALL frame is cut off")
        method = body[_CALL_BYTES:at].decode()
        metadata: Metadata = ()
        if count:
            metadata, at = _decoded(body, at, count)
    except (struct.error, UnicodeDecodeError) as error:
        raise FrameError(f"a CALL frame cannot be decoded: {error}") from None
    return _new(CallBody, (method, timeout_us, metadata, body[at:]))


def parse_end(body: bytes) -> EndBody:
    """Decodes the body of an END; FrameError if it is none."""
    try:
        code, details_bytes, initial_count, trailing_count = _END.unpack_from(body)
        at = _END_BYTES + details_bytes
        if at > len(body):
            raise FrameError("the status details in an END frame are cut off")
        details = body[_END_BYTES:at].decode(errors="replace") if details_bytes else ""
        initial: Metadata = ()
        trailing: Metadata = ()
        if initial_count:
            initial, at = _decoded(body, at, initial_count)
        if trailing_count:
            trailing, at = _decoded(body, at, trailing_count)
    except (struct.error, UnicodeDecodeError) as error:
        raise FrameError(f"an END frame cannot be decoded: {error}") from None
    return _new(EndBody, (code, details, initial, trailing, body[at:]))


def parse_head(body: bytes) -> Metadata:
    """Decodes the body of a HEAD; FrameError if it is none."""
    try:
        metadata, at = _decoded(body, _COUNT.size, _COUNT.unpack_from(body)[0])
    except (struct.error, UnicodeDecodeError) as error:
        raise FrameError(f"a HEAD frame cannot be decoded: {error}") from None
    if at != len(body):
        extra = len(body) - at
        raise FrameError(f"a HEAD frame has {extra} more bytes after its metadata")
    return metadata


def _decoded(body: bytes, at: int, count: int) -> tuple[Metadata, int]:
    """Returns the block of metadata that begins at an offset, and the offset of its end."""
    made: list[Metadatum] = []
    for _ in range(count):
        key_bytes, value_bytes = _ENTRY.unpack_from(body, at)
        start = at + _ENTRY.size
        middle, at = start + key_bytes, start + key_bytes + value_bytes
        if at > len(body):
            raise FrameError("the metadata of a call are cut off")
        key, value = body[start:middle].decode(), body[middle:at]
        if not _KEY.fullmatch(key):
            raise FrameError(f"{key[:80]!r} is not a valid key of metadata")
        if key.endswith("-bin"):
            made.append(Metadatum(key, value))
        else:
            text = value.decode()
            if not _VALUE.fullmatch(text):
                raise FrameError(f"the metadata {key[:80]!r} have a value that is not valid")
            made.append(Metadatum(key, text))
    return tuple(made), at
