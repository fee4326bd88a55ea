"""Defines places at which a test lets a process kill or stop itself.

`TENSORWIRE_FAIL=server-0:cell.armed:3:kill` lets server 0 kill itself at the third time it reaches
`cell.armed`; `stop` stops it (SIGSTOP), and the test lets it go on. `server-0+1` is its first
successor. Several settings, one for each process, have commas between them. Without the variable a
place costs a call. The places are the rows of transitions.py.
"""

from __future__ import annotations

import signal
import threading

from tensorwire.transitions import ROWS, rows_of

FAILPOINTS = {name: row.what for name, row in rows_of("server").items()}
"""The failpoints of a server, in the order of a job, each with a description."""

WORKER_FAILPOINTS = {name: row.what for name, row in rows_of("worker").items()}
"""The failpoints of a worker that another process can replace, in the order of a job."""

LAUNCHER_FAILPOINTS = {name: row.what for name, row in rows_of("launcher").items()}
"""The failpoints of the launcher, with which the job ends, in the order of a job."""

_lock = threading.Lock()
_name, _left, _signal = "", 0, signal.SIGKILL


def arm(process: str, text: str, term: int = 0) -> None:
    """Makes this process end or stop at the place that a text names, if it names this process.

    Args:
        process: this one, as "server-0".
        text: "process:place:times:kill" or "…:stop", several with commas; "" arms nothing.
        term: how many processes have had the place of this one before it.

    Raises:
        ValueError: the text has another form, or names no place.
    """
    global _name, _left, _signal
    for each in text.split(",") if text else ():
        whose, _, rest = each.partition(":")
        name, _, more = rest.partition(":")
        times, _, action = more.partition(":")
        signals = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}
        if name not in ROWS or not times.isdigit() or int(times) < 1 or action not in signals:
            raise ValueError(
                f"TENSORWIRE_FAIL is {text!r}; it is 'server-0:PLACE:TIMES:kill' or '…:stop', with "
                f"a place of {', '.join(ROWS)}"
            )
        if whose == (f"{process}+{term}" if term else process):
            _name, _left, _signal = name, int(times), signals[action]


def failpoint(name: str) -> None:
    """Acts if this process was told to fail at this failpoint. Any thread may call it."""
    global _left
    if name != _name:
        return
    with _lock:
        _left -= 1
        if _left == 0:
            # To this thread: another might take a signal to the process, while this one goes on.
            signal.raise_signal(_signal)
