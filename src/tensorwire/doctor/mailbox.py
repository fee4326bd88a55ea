"""Messages between the two ends of a doctor, in the memory that they lend each other.

A message is JSON, written into the other's region and signalled; the two take turns. The sender is
a member of the job, but its bytes are checked all the same.
"""

from __future__ import annotations

import json
import struct
from typing import Any

from tensorwire.memory import Peer, Region, RemoteRegion, RemoteWord, Word

CLIENT_REGION = "tensorwire-doctor-client"
SERVER_REGION = "tensorwire-doctor"
"""A Node with a region of this name is a doctor."""

AREA_BYTES = 256 << 10
RAW_PATIENCE_S = 10
"""How long either end of a raw socket waits for the other."""

_MESSAGES_WORD, _PING_WORD = 0, 64
_SIZE_OFFSET, _TEXT_OFFSET = 128, 136
_MAX_TEXT_BYTES = AREA_BYTES - _TEXT_OFFSET
_SIZE = struct.Struct("<Q")


class Mailbox:
    """One end. `mine` is where messages arrive; `theirs` is the other end's `mine`.

    For one thread. Errors of the memory API (PeerLostError, TimeoutError, ...) pass through.
    """

    def __init__(self, mine: Region, theirs: RemoteRegion | None, peer: Peer) -> None:
        self.mine = mine
        self.theirs = theirs
        self.peer = peer
        self._sent = self._seen = 0

    @property
    def ping_words(self) -> tuple[Word, RemoteWord]:
        """The words of the two ends by which signals are measured."""
        assert self.theirs is not None, "the other end is not known yet"
        return self.mine.word(_PING_WORD), self.theirs.word(_PING_WORD)

    def send(self, message: dict[str, Any], timeout_s: float = 10.0) -> None:
        """Writes a message; the last one must have been answered.

        Raises:
            ValueError: it is too large.
        """
        assert self.theirs is not None, "the other end is not known yet"
        text = json.dumps(message).encode()
        if len(text) > _MAX_TEXT_BYTES:
            raise ValueError(f"a message of {len(text)} bytes; {_MAX_TEXT_BYTES} fit")
        self._sent += 1
        word = self.theirs.word(_MESSAGES_WORD)
        self.theirs[_SIZE_OFFSET:].write(
            _SIZE.pack(len(text)) + text, signal=(word, self._sent)
        ).wait(timeout_s)

    def receive(self, timeout_s: float | None = 30.0) -> dict[str, Any]:
        """Waits for the next message.

        Raises:
            ValueError: what came is no message.
        """
        self.mine.word(_MESSAGES_WORD).wait_until(self._seen + 1, timeout_s, peer=self.peer)
        self._seen += 1
        data = self.mine[_SIZE_OFFSET:].memoryview()
        (size,) = _SIZE.unpack_from(data)
        if size > _MAX_TEXT_BYTES:
            raise ValueError(f"a message of {size} bytes")
        start = _TEXT_OFFSET - _SIZE_OFFSET
        try:
            message = json.loads(bytes(data[start : start + size]))
        except RecursionError as error:
            raise ValueError("a message that is nested too deeply") from error
        if not isinstance(message, dict):
            raise ValueError("a message that is no object")
        return message

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
