"""Ends processes that still run: by a request first, then by a kill, with time limits.

It knows times and signals, and not why a job ends.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterable

from tensorwire.launch.process import Process

# After SIGKILL only a process that hangs in the kernel remains; it is not waited for for ever.
_UNKILLABLE_S = 5.0


class Escalation:
    """The next step against processes that still run, and when.

    Args:
        kill_s: from SIGTERM to SIGKILL.
    """

    def __init__(self, kill_s: float) -> None:
        self._kill_s = kill_s
        self._term_at: float | None = None
        self._kill_at: float | None = None
        self._give_up_at: float | None = None

    @property
    def given_up(self) -> bool:
        """True if a process still runs although it was killed long ago."""
        return passed(self._give_up_at)

    def times(self) -> list[float]:
        """Returns the times at which there is something to do."""
        times = (self._term_at, self._kill_at, self._give_up_at)
        return [at for at in times if at is not None]

    def term_within(self, wait_s: float) -> None:
        """Plans SIGTERM in `wait_s` seconds, or earlier if that was planned already."""
        if self._kill_at is None and self._give_up_at is None:
            at = time.monotonic() + wait_s
            self._term_at = at if self._term_at is None else min(at, self._term_at)

    def tend(self, running: Iterable[Process]) -> None:
        """Takes the steps whose time has come."""
        if passed(self._term_at):
            self._term_at = None
            self._kill_at = time.monotonic() + self._kill_s
            for process in running:
                process.signal(signal.SIGTERM)
        if passed(self._kill_at):
            self.kill(running)

    def kill(self, running: Iterable[Process]) -> None:
        """Sends SIGKILL at once."""
        self._term_at = self._kill_at = None
        self._give_up_at = time.monotonic() + _UNKILLABLE_S
        for process in running:
            process.kill()


def passed(at: float | None) -> bool:
    """Tells whether a time has come; None never comes."""
    return at is not None and time.monotonic() >= at
