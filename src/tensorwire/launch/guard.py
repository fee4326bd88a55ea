"""Ends the processes that a launcher leaves if it is killed itself.

The kernel kills the processes of a job with their launcher (see child.py), but not the processes
that they have started, such as the workers of a DataLoader. The guard is one small process: it
holds a pipe from the launcher, is told every process group, and kills all that are left when the
pipe ends. This file is both sides; the process runs it by its path with `python -I -S`.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys


class Guard:
    """The launcher's side.

    A guard that was killed is missed only if the launcher is killed too; nothing is raised then.
    """

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__],
            bufsize=0,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # what kills the launcher's group does not reach it
        )

    def watch(self, group: int) -> None:
        """Makes a process group die with the launcher from now on."""
        self._tell(group)

    def forget(self, group: int) -> None:
        """Forgets a group that is gone; its number may be given to others."""
        self._tell(-group)

    def close(self) -> None:
        """Ends the guard, which kills the groups that it still watches, and waits for it."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        self._process.wait()

    def _tell(self, number: int) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(b"%d\n" % number)


def main() -> None:
    """Reads numbers, one a line: n for a new group, -n for one that is gone."""
    for stop in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(stop, signal.SIG_IGN)
    groups: set[int] = set()
    for line in sys.stdin.buffer:
        number = int(line)
        if number > 0:
            groups.add(number)
        else:
            groups.discard(-number)
    for group in groups:
        with contextlib.suppress(OSError):
            os.killpg(group, signal.SIGKILL)


if __name__ == "__main__":
    main()
