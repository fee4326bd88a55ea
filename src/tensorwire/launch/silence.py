"""Finds processes of a job that are stopped for so long that they count as dead.

No heartbeat is needed on one host, because the kernel tells whether a process is stopped: a script
that is stuck in its own code is slow, and not silent. A process that is silent for too long is
killed before another one takes its place (the fence), so that it can never go on beside its
successor.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from pathlib import Path

from tensorwire.launch.process import Replaceable

# Where the cgroups of version 2 are: alone, or beside those of version 1.
_CGROUPS = (Path("/sys/fs/cgroup"), Path("/sys/fs/cgroup/unified"))
_LONGEST_TICK_S = 1.0


class Silence:
    """A watch over processes, which ends processes that have been stopped for too long.

    Silence counts from the first look that finds a process stopped, and only while looks come on
    time: if the launcher itself was stopped, or its machine was, the count begins anew, because the
    others were perhaps stopped with it and go on with it.

    Args:
        limit_s: of silence, from which on a process is ended; 0: never, and nothing is looked at.
        say: prints a line.
    """

    def __init__(self, limit_s: float, say: Callable[[str], None]) -> None:
        self._limit_s, self._say = limit_s, say
        self._tick_s = min(_LONGEST_TICK_S, limit_s / 4)
        self._looked_at: float | None = None
        self._stopped: dict[Replaceable, float] = {}  # since when, by this process's clock
        self._told: set[Replaceable] = set()
        self._fenced: set[Replaceable] = set()

    def times(self) -> Iterable[float]:
        """Yields the times at which `tend` has something to do."""
        if self._looked_at is not None:
            yield self._looked_at + self._tick_s

    def tend(self, processes: Iterable[Replaceable]) -> None:
        """Looks at processes if it is time.

        Args:
            processes: that another one could take the place of; without any nobody is looked at.
        """
        if not self._limit_s:
            return
        now, watched = time.monotonic(), set(processes)
        if self._looked_at is not None and watched and now < self._looked_at + self._tick_s:
            return
        late = self._looked_at is None or now > self._looked_at + 2 * self._tick_s
        self._looked_at = now if watched else None
        before = {} if late else self._stopped
        self._stopped = {each: before.get(each, now) for each in watched if is_stopped(each.pid)}
        self._told &= self._stopped.keys()
        self._fenced &= watched
        for process, since in self._stopped.items():
            silent_s = now - since
            if silent_s >= self._limit_s and process not in self._fenced:
                self._fenced.add(process)
                process.fence(f"was stopped for {self._limit_s:g} s and was killed")
            elif silent_s > 0 and process not in self._told:
                self._told.add(process)
                left_s = round(self._limit_s - silent_s, 1)
                self._say(
                    f"{process} is stopped; in {left_s:g} s it is killed "
                    f"and replaced, unless it goes on before (kill -CONT {process.pid})"
                )


def is_stopped(pid: int) -> bool:
    """Tells whether a signal has stopped a process, or it is frozen with its cgroup of version 2.

    False for a process that a debugger has stopped, because somebody looks at it; and for one in a
    frozen cgroup of version 1, which a signal would not end.
    """
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        if state == "T":
            return True
        for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines():
            if line.startswith("0::/"):
                return any(_is_frozen(folder / line[4:]) for folder in _CGROUPS)
    except (OSError, IndexError):
        pass  # it has ended
    return False


def _is_frozen(folder: Path) -> bool:
    try:
        return "frozen 1" in (folder / "cgroup.events").read_text().splitlines()
    except OSError:
        return False
