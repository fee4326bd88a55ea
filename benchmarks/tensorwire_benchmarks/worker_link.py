"""The worker's end of a `jobs.LinkedJob`; it imports nothing of tensorwire, of whatever age."""

from __future__ import annotations

import json
import socket
from typing import Any


class WorkerLink:
    """Waits for the turns that the bench orders, and answers them."""

    def __init__(self, address: str, rank: int) -> None:
        link = socket.socket(socket.AF_UNIX)
        link.connect(address)
        self._file = link.makefile("rw")
        self.answer(rank=rank)

    def order(self) -> dict[str, Any]:
        """Waits for the next turn; one of no steps is the end."""
        line = self._file.readline()
        if not line:
            raise ConnectionError("the bench has ended")
        found: dict[str, Any] = json.loads(line)
        return found

    def answer(self, **what: object) -> None:
        """Tells the bench of a turn."""
        self._file.write(json.dumps(what) + "\n")
        self._file.flush()
