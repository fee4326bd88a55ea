"""What a Node offers, asked without joining: the first message of its handshake, and no more.

The answer is not proven and decides nothing; it serves advice. docs/wire.md has the message.
"""

from __future__ import annotations

import os
import socket
import struct
from dataclasses import dataclass

from .handle import split_address

_HELLO = struct.Struct("<8sHBBIQQ32s16sIHBB72s")
_MAGIC, _VERSION = b"TWIREv01", 2
_CLIENT, _CHALLENGE = 1, 3
_TRANSPORTS = {"shm": 1, "tcp": 2, "rdma": 4}


@dataclass(frozen=True, slots=True)
class Offer:
    """What the Node at an address says of itself.

    Attributes:
        transports: what it offers.
        name: of the Node.
        has_secret: whether it asks for one.
    """

    transports: frozenset[str]
    name: str
    has_secret: bool


def offered_by(address: str, timeout_s: float = 2.0) -> Offer | None:
    """Asks the Node at "host:port"; None when nobody there answers as one.

    It costs one connection and one round trip. The Node sees a stranger who hangs up.
    """
    host, port = split_address(address)
    name = b"offer?"
    hello = _HELLO.pack(
        _MAGIC, _VERSION, _CLIENT, 0, _TRANSPORTS["tcp"], 1, 0, os.urandom(32), bytes(16),
        os.getpid(), 0, len(name), 0, name,
    )  # fmt: skip
    try:
        with socket.create_connection((host, port), timeout=timeout_s) as stream:
            stream.sendall(hello)
            answer = b""
            while len(answer) < _HELLO.size:
                part = stream.recv(_HELLO.size - len(answer))
                if not part:
                    return None
                answer += part
    except OSError:
        return None
    return _decode(answer)


def _decode(answer: bytes) -> Offer | None:
    magic, version, kind, has_secret, bits, *_, size, _, name = _HELLO.unpack(answer)
    if (magic, version, kind) != (_MAGIC, _VERSION, _CHALLENGE) or size > len(name):
        return None
    known = frozenset(word for word, bit in _TRANSPORTS.items() if bits & bit)
    return Offer(known, name[:size].decode(errors="replace"), has_secret == 1)
