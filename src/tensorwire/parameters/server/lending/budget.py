"""Limits how much of its time a server copies for readers, however often they ask."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

SHARE = 0.25
"""The part of the server's time that copies may take, in the long run."""
ALLOWANCE_S = 0.25
"""The seconds of copying that are free after a rest: occasional readers never wait."""


class CopyBudget:
    """Seconds of copying that a server has left for its readers. Any thread.

    In any T seconds copies take at most SHARE * T + ALLOWANCE_S, but for copies that were admitted
    before the budget was used up.

    Args:
        clock: seconds, as `time.monotonic` has them.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._lock = clock, threading.Lock()
        self._spent, self._since = 0.0, clock()

    def spend(self, seconds: float) -> None:
        """Notes that a copy has taken so long until now."""
        with self._lock:
            self._forgive(until=self._clock() - seconds)
            self._spent += seconds

    def opens_in_s(self) -> float:
        """Returns how long no other copy may be admitted; 0: one may."""
        with self._lock:
            self._forgive(until=self._clock())
            return max(self._spent - ALLOWANCE_S, 0.0) / SHARE

    def _forgive(self, until: float) -> None:
        self._spent = max(self._spent - SHARE * (until - self._since), 0.0)
        self._since = until
