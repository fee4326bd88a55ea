"""Exchanges messages between the two ends of a doctor, in memory that they lend each other.

A message is JSON, written into the other's region and signalled; the two take turns. The sender is
a member of the job, but its bytes are checked all the same.
"""

from __future__ import annotations

import json
import struct
from typing import Any

from tensorwire.memory import (
    Mailbox,
    Peer,
    Region,
    RemoteMailbox,
    RemoteRegion,
    RemoteWord,
    Word,
    mailbox_bytes,
)
from tensorwire.outside import parse_json

CLIENT_REGION = "tensorwire-doctor-client-2"
SERVER_REGION = "tensorwire-doctor-2"
"""The name of a doctor's region; its number is the version of the dialogue of both ends."""

AREA_BYTES = 256 << 10
RAW_PATIENCE_S = 10
"""How long either end of a raw socket waits for the other."""

_PING_WORD, _MAILBOX = 0, 64  # offsets in an area
_SIZE = struct.Struct("<Q")
_MAX_TEXT_BYTES = AREA_BYTES - mailbox_bytes(_SIZE.size) - _MAILBOX


class Dialogue:
    """One end. `mine` is the area where messages arrive; `theirs` is the other end's `mine`.

    For one thread. Errors of the memory API (PeerLostError, TimeoutError, ...) pass through.
    """

    def __init__(self, mine: Region, peer: Peer) -> None:
        self.peer = peer
        self._ping_word = mine.word(_PING_WORD)
        self._inbox = Mailbox(mine[_MAILBOX:])
        self._theirs: RemoteRegion | None = None
        self._sent = self._seen = 0

    def answer_to(self, theirs: RemoteRegion) -> None:
        """Sets the area of the other end; nothing can be sent before that."""
        self._theirs = theirs
        self._outbox = RemoteMailbox(theirs[_MAILBOX:])

    @property
    def ping_words(self) -> tuple[Word, RemoteWord]:
        """The words of the two ends by which signals are measured."""
        assert self._theirs is not None, "the other end is not known yet"
        return self._ping_word, self._theirs.word(_PING_WORD)

    def send(self, message: dict[str, Any], timeout_s: float = 10.0) -> None:
        """Writes a message; the last one must have been answered.

        Raises:
            ValueError: it is too large.
        """
        text = json.dumps(message).encode()
        if len(text) > _MAX_TEXT_BYTES:
            raise ValueError(f"a message has {len(text)} bytes, and {_MAX_TEXT_BYTES} fit")
        self._sent += 1
        self._outbox.send(_SIZE.pack(len(text)) + text, self._sent).wait(timeout_s)

    def receive(self, timeout_s: float | None = 30.0) -> dict[str, Any]:
        """Waits for the next message.

        Raises:
            ValueError: what came is no message.
        """
        self._seen += 1
        data = self._inbox.wait(self._seen, timeout_s, peer=self.peer)
        (size,) = _SIZE.unpack(data[: _SIZE.size].tobytes())
        if size > _MAX_TEXT_BYTES:
            raise ValueError(f"the other end sent a message of {size} bytes, which is too long")
        text = data[_SIZE.size : _SIZE.size + size].tobytes()
        return parse_json(text, dict[str, Any], _MAX_TEXT_BYTES)

    def ask(self, message: dict[str, Any], timeout_s: float = 30.0) -> dict[str, Any]:
        """Sends a message and returns the answer.

        Raises:
            ValueError: the other end could not do it; the message says why.
        """
        self.send(message)
        answer = self.receive(timeout_s)
        if "error" in answer:
            raise ValueError(str(answer["error"]))
        return answer
