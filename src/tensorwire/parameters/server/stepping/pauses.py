"""Pauses a store whose workers go at their own pace: no version is made while a worker reads.

The reading worker has asked every server for the pause, and asks for its end; each request has a
number. All servers pause after the same event, each until it has noted the end. A process that
takes the place of the worker knows nothing of its pauses: it ends them all with its first request.
The notes outlive a server.
"""

from __future__ import annotations

import threading

from ...regions import RegionKind
from ..opening import Opening

_BEGUN, _VERSION, _ENDED = 0, 1, 2
_WORDS = 8  # of a worker


class Pauses:
    """The pauses of one store at this server. Any thread."""

    def __init__(self, opening: Opening) -> None:
        count = opening.member.count
        words = opening.allocate(RegionKind.PAUSES, None, 8 * _WORDS * count).array("int64")
        self._words = words[: _WORDS * count].reshape(count, _WORDS)
        self._ended = threading.Event()

    @property
    def version(self) -> int:
        """The version that stands still; 0: none has to."""
        for row in self._words:
            if row[_BEGUN] > row[_ENDED]:
                return int(row[_VERSION])
        return 0

    def begin(self, rank: int, number: int, version: int) -> None:
        """Begins a pause at a version, for a worker's request."""
        row = self._words[rank]
        row[_VERSION] = version
        row[_BEGUN] = number  # after it

    def is_begun(self, rank: int, number: int) -> bool:
        """Tells whether the pause that a request asks for was begun; it may be over."""
        return bool(self._words[rank, _BEGUN] >= number)

    def end(self, rank: int, number: int) -> None:
        """Ends a worker's pauses before this request."""
        self._words[rank, _ENDED] = max(number, int(self._words[rank, _ENDED]))
        self._ended.set()

    def wait(self, rank: int, number: int, timeout_s: float) -> bool:
        """Waits for the end of a worker's pause, up to a timeout; tells whether it has ended."""
        self._ended.clear()
        if not self.is_over(rank, number):
            self._ended.wait(timeout_s)
        return self.is_over(rank, number)

    def is_over(self, rank: int, number: int) -> bool:
        """Tells whether a later request has ended the pause."""
        return bool(self._words[rank, _ENDED] > number)
