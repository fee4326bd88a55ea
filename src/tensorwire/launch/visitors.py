"""Watches workers that other programs have started.

Knows no job: who is let in is decided in serve.py. Nothing here blocks.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal

from tensorwire.membership import DoorClient


class Visitor:
    """A process that something else has started. It is watched, and ended only by `fence`.

    Args:
        index: its rank.
        pid: its number.
        pidfd: owned from now on; ready for reading when the process has ended.

    Attributes:
        kind: "worker".
        index, pid, pidfd: as given.
        name: such as "worker 0".
        killed, died_for_memory: nobody here can know how it ended.
    """

    kind = "worker"
    killed = True
    died_for_memory = False

    def __init__(self, index: int, pid: int, pidfd: int) -> None:
        self.index, self.pid, self.pidfd = index, pid, pidfd
        self.name = f"worker {index}"
        self._ending = "ended without a goodbye"

    @property
    def has_ended(self) -> bool:
        """True if `pidfd` is ready by now."""
        poll = select.poll()
        poll.register(self.pidfd, select.POLLIN)
        return bool(poll.poll(0))

    def ending(self) -> str:
        """Returns how it ended, as a phrase that follows its name."""
        return self._ending

    def fence(self, why: str) -> None:
        """Ends the process, which cannot go on beside its successor; see `Replaceable`."""
        self._ending = why
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)

    def close(self) -> None:
        """Stops watching it."""
        os.close(self.pidfd)


def visitor_of(rank: int, client: DoorClient) -> Visitor | None:
    """Returns the process that has connected as a worker; None if it is gone or not seen here."""
    try:
        visitor = Visitor(rank, client.pid, os.pidfd_open(client.pid))
    except OSError:
        return None
    poll = select.poll()
    poll.register(client.channel, 0)
    if poll.poll(0):  # the number may be another process's by now
        visitor.close()
        return None
    return visitor
