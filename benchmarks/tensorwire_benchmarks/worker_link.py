"""The worker's end of a `jobs.LinkedJob`; imports no tensorwire, so any version of it will do."""

from __future__ import annotations

import json
import socket
from typing import Any


class WorkerLink:
    """A connection to the bench, which orders turns and gets answers."""

    def __init__(self, address: str, rank: int) -> None:
        link = socket.socket(socket.AF_UNIX)
        link.connect(address)
        self._file = link.makefile("rw")
        self.answer(rank=rank)

    def order(self) -> dict[str, Any]:
        """Waits for the next turn and returns it; "steps" is 0 at the end.

        Raises:
            ConnectionError: the bench has ended.
        """
        line = self._file.readline()
        if not line:
            raise ConnectionError("the bench has ended")
        found: dict[str, Any] = json.loads(line)
        return found

    def answer(self, **what: object) -> None:
        """Sends the answer of a turn to the bench."""
        self._file.write(json.dumps(what) + "\n")
        self._file.flush()
