"""Defines addresses and handles, the names of memory in another process.

A handle is a value: small, picklable, safe to send through any channel, and useless without the
job's secret. This module is pure (no sockets, no core), because it parses bytes from outside.
"""

from __future__ import annotations

import re
import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass

from tensorwire.errors import StaleHandleError

# name -> (peers may read, peers may write)
ACCESS = {"none": (False, False), "r": (True, False), "w": (False, True), "rw": (True, True)}
_ACCESS_NAMES = {grant: name for name, grant in ACCESS.items()}

# docs/internals/wire.md, "Handle", has this layout as a table.
_MAGIC = b"TWRH"
_VERSION = 1
_FIXED = struct.Struct("<4sBBBBBIQQQ")
_CHECKSUM = struct.Struct("<I")
_MAX_TEXT_BYTES = 255
# Characters that a message would not show as they are; the core refuses them in names.
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")
_FIELD_BITS = {"incarnation": 64, "id": 32, "generation": 64, "size_bytes": 63}


def access_flags(access: str) -> tuple[bool, bool]:
    """Turns an access word into (peers may read, peers may write).

    Raises:
        ValueError: it is none of "rw", "r", "w", "none".
    """
    flags = ACCESS.get(access)
    if flags is None:
        raise ValueError(f"access is one of 'rw', 'r', 'w' and 'none', not {access!r}")
    return flags


def access_name(readable: bool, writable: bool) -> str:
    """Returns the access word for what peers may do; the inverse of `access_flags`."""
    return _ACCESS_NAMES[readable, writable]


def split_address(address: str) -> tuple[str, int]:
    """Splits "host:port", "127.0.0.1:7000" or "[::1]:7000" into host and port.

    Raises:
        TypeError: not a str.
        ValueError: not of that form, with control characters, or the port is not 0 to 65535.
    """
    if not isinstance(address, str):
        raise TypeError(f"an address is a str such as '127.0.0.1:7000', not {_type_name(address)}")
    check_shown(address, "an address")
    host, colon, port = address.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    if bracketed:
        host = host[1:-1]
    well_formed = colon and host and port.isascii() and port.isdigit() and len(port) <= 5
    if not well_formed or bracketed != (":" in host) or "[" in host or "]" in host:
        raise ValueError(f"an address is 'host:port' or '[IPv6]:port', not {address!r}")
    if int(port) > 65535:
        raise ValueError(f"the port in {address!r} is above 65535")
    return host, int(port)


def check_shown(text: str, what: str) -> None:
    """Refuses text that cannot be shown to people, or sent, as it is.

    Raises:
        ValueError: it has control characters or is not valid Unicode.
    """
    if _CONTROL.search(text):
        raise ValueError(f"{what} has no control characters: {text!r}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{what} is not valid Unicode: {text!r}") from error


def join_address(host: str, port: int) -> str:
    """Joins host and port to "host:port" or "[IPv6]:port"; the inverse of `split_address`."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


@dataclass(frozen=True, slots=True)
class Handle:
    """Names one region of one incarnation of one process.

    Pass it to `Peer.region`. It does not keep the memory alive: after the region was freed or its
    process has restarted, use raises `StaleHandleError` and never reaches other memory. It names
    the whole region; slice at the user's side.

    Attributes:
        address: where the owning Node listens, "host:port".
        incarnation: of the owning process, 64 bits.
        id: slot of the region in its Node, 32 bits.
        generation: of the region, 64 bits; knowing it is the permission to use the region.
        size_bytes: length of the region.
        access: what peers may do, "rw", "r", "w" or "none".
        name: of the region, "" if it has none.
        node: name of the owning Node.

    Raises:
        TypeError: a field has the wrong type.
        ValueError: a number does not fit its field, a text is longer than 255 bytes or has control
            characters, or `access` or `address` is malformed.
    """

    address: str
    incarnation: int
    id: int
    generation: int
    size_bytes: int
    access: str
    name: str = ""
    node: str = ""

    def check_incarnation(self, present: int, node: str, address: str) -> None:
        """Raises StaleHandleError if the process that lives at an address is another one."""
        if self.incarnation != present:
            raise StaleHandleError(
                f"the handle of region {self.name!r} is from incarnation {self.incarnation:x} of "
                f"node {self.node!r}; peer {node!r} at {address} is incarnation {present:x}: "
                "the process has restarted, ask it for a new handle"
            )

    def __post_init__(self) -> None:
        for field, bits in _FIELD_BITS.items():
            value = getattr(self, field)
            if type(value) is not int:
                raise TypeError(f"{field} of a handle is an int, not {_type_name(value)}")
            if value < 0 or value >> bits:
                raise ValueError(f"{field} of a handle has {bits} bits and no sign, not {value}")
        for field in ("address", "access", "name", "node"):
            text = getattr(self, field)
            if not isinstance(text, str):
                raise TypeError(f"{field} of a handle is a str, not {_type_name(text)}")
            check_shown(text, f"{field} of a handle")
            if len(text.encode()) > _MAX_TEXT_BYTES:
                raise ValueError(f"{field} of a handle is longer than {_MAX_TEXT_BYTES} bytes")
        access_flags(self.access)
        split_address(self.address)

    def to_bytes(self) -> bytes:
        """Encodes the handle: 41 bytes and its three texts, with a version and a checksum."""
        readable, writable = ACCESS[self.access]
        texts = [text.encode() for text in (self.address, self.node, self.name)]
        body = _FIXED.pack(
            _MAGIC,
            _VERSION,
            readable | writable << 1,
            *map(len, texts),
            self.id,
            self.incarnation,
            self.generation,
            self.size_bytes,
        ) + b"".join(texts)
        return body + _CHECKSUM.pack(zlib.crc32(body))

    @classmethod
    def from_bytes(cls, data: bytes | bytearray | memoryview) -> Handle:
        """Decodes the bytes of `to_bytes`. Safe with bytes from anywhere.

        Raises:
            TypeError: `data` is not bytes.
            ValueError: it is no handle, is damaged, or comes from a version that is not known here.
        """
        if not isinstance(data, bytes | bytearray | memoryview):
            raise TypeError(f"a handle is decoded from bytes, not {_type_name(data)}")
        data = bytes(data)
        if len(data) < _FIXED.size + _CHECKSUM.size or data[:4] != _MAGIC:
            raise ValueError("these bytes are no handle: they do not start like one")
        if data[4] != _VERSION:
            raise ValueError(
                f"the handle has version {data[4]}, this tensorwire knows version {_VERSION}; "
                "use the same tensorwire on both sides"
            )
        body, checksum = data[: -_CHECKSUM.size], data[-_CHECKSUM.size :]
        if zlib.crc32(body) != _CHECKSUM.unpack(checksum)[0]:
            raise ValueError("the handle is damaged: its checksum is wrong")
        _, _, access, *lengths, id, incarnation, generation, size_bytes = _FIXED.unpack_from(body)
        if access > 3 or sum(lengths) != len(body) - _FIXED.size:
            raise ValueError("the handle is damaged: its fields contradict each other")
        texts, start = [], _FIXED.size
        for length in lengths:
            # UnicodeDecodeError is a ValueError.
            texts.append(body[start : start + length].decode())
            start += length
        address, node, name = texts
        return cls(
            address,
            incarnation,
            id,
            generation,
            size_bytes,
            access_name(bool(access & 1), bool(access & 2)),
            name,
            node,
        )

    def __reduce__(self) -> tuple[Callable[[bytes], Handle], tuple[bytes]]:
        return Handle.from_bytes, (self.to_bytes(),)


def _type_name(value: object) -> str:
    return type(value).__name__
