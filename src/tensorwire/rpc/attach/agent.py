"""Marks a call's attachment in its user agent, so that it needs no metadata of tensorwire.

Metadata of a call cost a twentieth of a small one; the user agent travels with all calls of a
channel anyway, and HTTP/2 compresses it to a byte. So a channel has a token of its own in it. Only
the channel knows the number that the token is a hash of, and tells it to the server as it opens its
attachment: whoever sees a token pass can claim no attachment by it.
"""

from __future__ import annotations

import hashlib
import os
import secrets
from collections.abc import Iterable
from typing import Any

_OPTION = "grpc.secondary_user_agent"
_PREFIX = "tensorwire/"
_NONCE_BYTES = 16
AGENT = "user-agent"
"""The key of the metadata that it arrives in."""


class ChannelAgent:
    """The token of one channel, and the number that proves it.

    Attributes:
        token: what stands in the user agent of all its calls.
        nonce: in hex; the token is a hash of it.
    """

    __slots__ = ("_pid", "nonce", "token")

    def __init__(self) -> None:
        self.nonce = secrets.token_hex(_NONCE_BYTES)
        self.token = token_of(self.nonce)
        self._pid = os.getpid()

    @property
    def owned(self) -> bool:
        """Whether this process made the channel. A forked child sends the token of its parent."""
        return self._pid == os.getpid()

    def added_to(self, options: Iterable[tuple[Any, Any]] | None) -> tuple[tuple[Any, Any], ...]:
        """Options of a channel of grpcio with the token in its user agent, before the user's end.

        grpcio joins all options of that name.
        """
        return (_OPTION, self.token), *(options or ())


def token_of(nonce: object) -> str:
    """The token that a number stands for.

    Raises:
        ValueError: it is no such number.
    """
    if not isinstance(nonce, str) or len(nonce) != 2 * _NONCE_BYTES:
        raise ValueError(f"agent is {nonce!r}")
    return _PREFIX + hashlib.sha256(bytes.fromhex(nonce)).hexdigest()[: 2 * _NONCE_BYTES]


def read_token(metadata: Any) -> str | None:
    """The token in the metadata of a call, None if there is none, or another one too."""
    for key, value in metadata or ():
        if key == AGENT and isinstance(value, str):
            found = {word for word in value.split(" ") if word.startswith(_PREFIX)}
            return found.pop() if len(found) == 1 else None
    return None
